"""What all requests pass first: a line in the log for each, and a check of their framing."""

from __future__ import annotations

import logging
from time import perf_counter

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpt2block.errors import printable
from gpt2block.serve.log import log
from gpt2block.serve.protocol import ApiError

FRAMED_TWICE = "expected Content-Length or Transfer-Encoding, got both"


class Access:
    """Logs requests at the level INFO, once they are answered, and refuses ambiguous ones.

    A proxy may take the end of a request with both Content-Length and Transfer-Encoding for
    another one than this server does. Its connection is closed (RFC 9112, section 6.1).
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._refusal = JSONResponse(ApiError(400, FRAMED_TWICE).body, 400, {"connection": "close"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        names = {name for name, _ in scope["headers"]}
        app = self._refusal if {b"content-length", b"transfer-encoding"} <= names else self._app
        if not log.isEnabledFor(logging.INFO):
            await app(scope, receive, send)
            return
        begun, status = perf_counter(), 500

        async def noted(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await app(scope, receive, noted)
        finally:
            log.info(
                "%s %d %.3f s%s", _request(scope), status, perf_counter() - begun, _state(scope)
            )


def _request(scope: Scope) -> str:
    """Method and path, of which the parts that are parameters may be secret."""
    path = scope["path"]
    for value in filter(None, scope.get("path_params", {}).values()):
        path = path.replace(value, "…")
    return printable(f"{scope['method']} {path}")


def _state(scope: Scope) -> str:
    """The tokens of a request, and its client, as far as they were found out."""
    state = scope.get("state", {})
    found = ""
    if asked := state.get("asked"):
        new = sum(len(row.tokens) for row in asked.rows)
        found = f", {sum(map(len, asked.prompts))} + {new} tokens"
    return printable(f"{found}, {state['client']}" if "client" in state else found)

"""What all requests pass first: a check of their framing, and a line in the log for each."""

from __future__ import annotations

import logging
from time import perf_counter

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpt2block.errors import printable
from gpt2block.serve.log import log
from gpt2block.serve.protocol import ApiError

FRAMED_TWICE = ApiError(400, "expected Content-Length or Transfer-Encoding, got both")


class Access:
    """Logs requests at the level INFO, once they are answered, and refuses ambiguous ones.

    A proxy may take the end of a request with both Content-Length and Transfer-Encoding for
    another one than this server does. Its connection is closed (RFC 9112, section 6.1).
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app, begun, status = self._app, perf_counter(), 500

        async def noted(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        if {b"content-length", b"transfer-encoding"} <= {*dict(scope.get("headers", ()))}:
            app = JSONResponse(FRAMED_TWICE.body, 400, {"connection": "close"})
        logs = scope["type"] == "http" and log.isEnabledFor(logging.INFO)
        try:
            await app(scope, receive, noted if logs else send)
        finally:
            if logs:
                seconds = perf_counter() - begun
                log.info("%s", printable(_line(scope, f"{status} {seconds:.3f} s")))


def _line(scope: Scope, ended: str) -> str:
    """A request in the log. Parts of its path that are parameters may be secret."""
    path, state = scope["path"], scope.get("state", {})
    for value in filter(None, scope.get("path_params", {}).values()):
        path = path.replace(value, "…")
    facts = [f"{scope['method']} {path} {ended}"]
    if asked := state.get("asked"):
        new = sum(len(row.tokens) for row in asked.rows)
        facts.append(f"{sum(map(len, asked.prompts))} + {new} tokens")
    return ", ".join([*facts, *filter(None, [state.get("client")])])

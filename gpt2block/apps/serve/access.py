"""ASGI middleware: check each request's headers, give it an id, and log it in one line."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection
from random import getrandbits
from time import perf_counter

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpt2block.apps.serve.log import log
from gpt2block.apps.serve.protocol import MESSAGES, ApiError, overloaded
from gpt2block.errors import printable, shown

FRAMED_TWICE = ApiError(400, "expected Content-Length or Transfer-Encoding, got both")
OVERLOADED = overloaded("the server has as many connections as it takes")
OTHER_VERSION = ApiError(505, "the request: expected HTTP/1.1")
REQUEST_ID = re.compile("[!-~]{1,128}")
HOST = re.compile(r"(\[[^]]*\]|[^:]*)(:[0-9]*)?")
VERSIONS = "2023-06-01", "2026-10-21"  # supported values of the header anthropic-version
ANTHROPIC_HEADERS = {"anthropic-version", "x-api-key"}  # headers of Anthropic's clients
ANTHROPIC_PATHS = MESSAGES, "/v1/models"  # paths of requests with one of these headers
HEADERS = {
    401: {"www-authenticate": "Bearer"},
    503: {"retry-after": "1"},  # value of the header, in seconds
}


def error_response(error: ApiError, openai: bool = True, /, **headers: str) -> JSONResponse:
    """Return the HTTP response for an error. openai: as for `ApiError.body`."""
    headers = {**HEADERS.get(error.status, {}), **headers}
    return JSONResponse(error.body(openai), error.status, headers)


def request_id(id: str = "") -> str:
    """Return the X-Request-Id that the client sent, if it is short and printable, else a new id."""
    return id if REQUEST_ID.fullmatch(id) else f"req-{getrandbits(128):032x}"


class Access:
    """Gives each request an id, logs it, and refuses ambiguous body lengths and unknown hosts.

    hosts: names of the server in lower case, one of which must be a request's host; none: any host.

    A proxy and this server may disagree where a request with both Content-Length and
    Transfer-Encoding ends. The connection is closed (RFC 9112, section 6.1).
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str]) -> None:
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun, status, headers = perf_counter(), 500, Headers(scope=scope)
        state = scope.setdefault("state", {})
        state["id"] = request_id(headers.get("x-request-id", ""))
        of_openai = ANTHROPIC_HEADERS.isdisjoint(headers)
        state["openai"] = not scope["path"].startswith(MESSAGES if of_openai else ANTHROPIC_PATHS)

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status, named = message["status"], [(b"x-request-id", state["id"].encode())]
                if not state["openai"]:
                    named.append((b"request-id", state["id"].encode()))
                message = {**message, "headers": [*message.get("headers", ()), *named]}
            await send(message)

        try:
            app = self._refusal(scope, headers) or self._app
            await app(scope, receive, noted)
        finally:
            if log.isEnabledFor(logging.INFO):
                seconds = perf_counter() - begun
                log.info("%s", printable(_line(scope, f"{status} {seconds:.3f} s")))

    def _refusal(self, scope: Scope, headers: Headers) -> ASGIApp | None:
        openai = scope["state"]["openai"]
        if not scope["http_version"].startswith("1."):
            return error_response(OTHER_VERSION, openai, connection="close")
        if scope["state"].get("overloaded"):
            return error_response(OVERLOADED, openai)
        if "content-length" in headers and "transfer-encoding" in headers:
            return error_response(FRAMED_TWICE, openai, connection="close")
        host = headers.get("host", "")
        name = HOST.fullmatch(host.lower())
        if self._hosts and not (name and name[1] in self._hosts):
            names = f"{', '.join(self._hosts)} or another one by --allowed-host"
            problem = f"Host: expected {names}, got {shown(host)}"
            return error_response(ApiError(400, problem), openai)
        version = headers.get("anthropic-version", VERSIONS[0])
        if not openai and version not in VERSIONS:
            problem = f"anthropic-version: expected {' or '.join(VERSIONS)}, got {shown(version)}"
            return error_response(ApiError(400, problem), openai)
        return None


def _line(scope: Scope, ended: str) -> str:
    """Return a request's log line. Variable parts of its path, which may be secret, become "…"."""
    path, state = scope["path"], scope["state"]
    for value in filter(None, scope.get("path_params", {}).values()):
        path = path.replace(value, "…")
    facts = [f"{scope['method']} {path} {ended}"]
    if asked := state.get("asked"):
        facts.append(f"{sum(map(len, asked.prompts))} + {asked.new_tokens} tokens")
    return ", ".join([*facts, *filter(None, [state.get("client")]), state["id"]])

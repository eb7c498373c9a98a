"""The web page at / of the server, and the endpoints that only this page uses.

The page writes texts with /v1/completions and /v1/chat/completions, as any client does. Its own
addresses give the tokens of a text, the distribution of the next token, and the page of `explain`
for a forward pass.
"""

from __future__ import annotations

import asyncio
import math
import re
from base64 import b64encode
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from hashlib import sha256
from importlib.resources import files
from typing import Any

import numpy as np
from pydantic import Field
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from gpt2block import reference
from gpt2block.apps.serve.answers import TextForm
from gpt2block.apps.serve.http_end import HttpEnd
from gpt2block.apps.serve.kept import Kept, keep, kept_of
from gpt2block.apps.serve.protocol import ApiError, Body, JsonObject, SamplingFields, Tokens
from gpt2block.apps.serve.settings import ServedModel
from gpt2block.engine.model import Floats, Ids
from gpt2block.errors import CheckpointError
from gpt2block.models.config import model_shapes
from gpt2block.sampling import Sampling, probabilities

SHOWN = 40  # most tokens of a distribution that the page shows
KEPT_LOGITS = 16  # logits kept per client, to apply other sampling options quickly
MAX_EXPLAINED = 256  # most tokens of a pass that `explain` runs
MAX_PARAMETERS = 2**29  # most parameters of a model for `explain`; 4 GiB in float64

IdsOf = Callable[[Any, str], Ids]  # arguments: text or token ids, name of the field
Run = Callable[..., Awaitable[object]]


class TokensRequest(Body):
    """The body of a request to /play/tokens."""

    prompt: str | Tokens


class NextRequest(SamplingFields):
    """The body of a request to /play/next. token: an id that the answer always includes."""

    ids: Tokens = Field(min_length=1)
    token: int | None = Field(None, ge=0)


class ExplainRequest(Body):
    """The body of a request to /play/explain."""

    ids: Tokens = Field(min_length=1)


class Play:
    """The web page of a server, and the endpoints /play/… that only this page uses.

    form: gives tokens as texts. engine: computes passes. ids_of: returns the ids of a prompt.
    in_thread(request, function, ...): runs a function in a thread while other requests go on.
    """

    def __init__(
        self, model: ServedModel, form: TextForm, engine: HttpEnd, ids_of: IdsOf, in_thread: Run
    ) -> None:
        self._model, self._form, self._engine = model, form, engine
        self._ids_of, self._in_thread = ids_of, in_thread
        self._html = files("gpt2block.apps.serve").joinpath("page.html").read_text(encoding="utf-8")
        self._headers = _headers(_policy(self._html))
        # Logits are stored by client, so that response times reveal no other client's requests.
        self._logits: Kept[Kept[asyncio.Future[Floats]]] = OrderedDict()

    def routes(self, behind_key: Callable[..., Route]) -> list[Route]:
        """Return the routes. The page / and `explain` pages at secret URLs need no API key."""
        return [
            Route("/", self.page),
            behind_key("/play/model", self.about),
            behind_key("/play/tokens", self.tokens, TokensRequest),
            behind_key("/play/next", self.next, NextRequest),
            behind_key("/play/explain", self.explain, ExplainRequest),
            Route("/play/explain/{ticket}", self.explained),
        ]

    async def page(self, request: Request) -> Response:
        return HTMLResponse(self._html, headers=self._headers)

    async def about(self, request: Request) -> Response:
        """Return, as JSON, properties of the model that the page shows, such as its name."""
        config = self._model.config
        chat = not isinstance(self._model.template, CheckpointError)
        return JSONResponse({
            "model": self._form.model,
            "device": self._model.device,
            "dtype": self._model.dtype,
            "n_ctx": config.n_ctx,
            "vocab_size": config.vocab_size,
            "chat": chat,
            "chat_sampling": self._model.chat_sampling if chat else {},
            "explained": self._max_explained(),
        })  # fmt: skip

    async def tokens(self, request: Request, given: TokensRequest) -> Response:
        """Return ids and texts of the tokens of a text, or of given token ids."""

        def found() -> list[JsonObject]:
            return [self._token(id) for id in self._ids_of(given.prompt, "prompt").tolist()]

        return JSONResponse({"tokens": await self._in_thread(request, found)})

    async def next(self, request: Request, body: NextRequest) -> Response:
        """Return the next token's probabilities before and after the sampling options apply."""
        token, V = body.token, self._model.config.vocab_size
        if token is not None and token >= V:
            raise ApiError(400, f"token: expected an id from 0 to {V - 1}, got {token}", "token")
        logits = await self._kept_logits(request, self._ids_of(body.ids, "ids"))
        return JSONResponse(await self._in_thread(request, self._distribution, logits, body))

    async def explain(self, request: Request, given: ExplainRequest) -> Response:
        """Generate an `explain` page (one at a time) of a forward pass; return the page's path."""
        ids, most = self._ids_of(given.ids, "ids"), self._max_explained()
        if not most:
            parameters = f"models of at most {MAX_PARAMETERS:,} parameters"
            raise ApiError(400, f"explain: expected {parameters}: use gpt2block explain")
        if len(ids) > most:
            problem = f"ids: expected at most {most} tokens to explain, got {len(ids)}"
            raise ApiError(400, problem, "ids")
        ticket = await self._engine.call("explain", request.state.client, ids)
        return JSONResponse({"path": f"play/explain/{ticket}"})

    async def explained(self, request: Request) -> Response:
        """Return an `explain` page. No API key is required, because a frame cannot send one."""
        html = await self._engine.call("explained", "", request.path_params["ticket"])
        if html is None:
            problem = "The server no longer has this page: explain the position again."
            return PlainTextResponse(problem, 404, _headers("default-src 'none'"))
        return HTMLResponse(html, headers=_headers(EXPLAINED))

    # --- contents of the answers ------------------------------------------------------------------

    def _max_explained(self) -> int:
        """Return the most tokens that `explain` accepts; 0 if the model is too large for it."""
        config = self._model.config
        parameters = sum(map(math.prod, model_shapes(config).values()))
        return min(MAX_EXPLAINED, config.n_ctx) if parameters <= MAX_PARAMETERS else 0

    def _token(self, id: int) -> JsonObject:
        return {"id": id, "token": self._form.token(id)}

    async def _kept_logits(self, request: Request, ids: Ids) -> Floats:
        """Return the logits (V,) after `ids`. Equal requests of a client share one forward pass."""
        client = request.state.client
        kept, key = kept_of(self._logits, client), ids.tobytes()
        if key not in kept:
            computed = asyncio.ensure_future(self._engine.call("logits", client, ids))
            keep(kept, key, computed, KEPT_LOGITS)
        kept.move_to_end(key)
        try:
            return await asyncio.shield(kept[key])
        except Exception:
            kept.pop(key, None)
            raise

    def _distribution(self, logits: Floats, body: NextRequest) -> JsonObject:
        of_model = reference.softmax(logits.astype(np.float64))
        drawn = probabilities(logits, Sampling(**body.sampling_keywords()))

        def entry(id: int) -> JsonObject:
            told = {"probability": float(of_model[id]), "drawn": float(drawn[id])}
            return {**self._token(id), **told, "rank": 1 + int((logits > logits[id]).sum())}

        positive = drawn[drawn > 0]
        return {
            "tokens": [entry(id) for id in np.argsort(-logits, kind="stable")[:SHOWN].tolist()],
            "token": None if body.token is None else entry(body.token),
            "kept": len(positive),
            "entropy": max(0.0, float(-(positive * np.log2(positive)).sum())),  # bits
        }


# Policy of `explain` pages: their scripts lack the server's origin, so they cannot read the key.
EXPLAINED = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'self'; sandbox allow-scripts"
)


def _policy(html: str) -> str:
    """Return a Content-Security-Policy that allows only this page's own script and style."""
    return (
        f"default-src 'none'; script-src {_hash(html, 'script')}; "
        f"style-src {_hash(html, 'style')}; connect-src 'self'; frame-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hash(html: str, tag: str) -> str:
    """Return a hash of the page's only element `tag`, for the Content-Security-Policy."""
    (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    return f"'sha256-{b64encode(sha256(content.encode()).digest()).decode()}'"


def _headers(policy: str) -> dict[str, str]:
    return {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-store",
    }

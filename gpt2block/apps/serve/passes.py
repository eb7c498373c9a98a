"""Forward passes outside the batch: embeddings, scores of prompts, logits, and explanations."""

from __future__ import annotations

import secrets
from collections import Counter, OrderedDict
from functools import cached_property
from typing import Any

import numpy as np

from gpt2block.apps.serve.answers import Scored
from gpt2block.apps.serve.embeddings import vectors_of
from gpt2block.apps.serve.kept import Kept, keep, kept_of
from gpt2block.apps.serve.prompts import scored_prompt
from gpt2block.apps.serve.protocol import JsonObject, overloaded
from gpt2block.apps.serve.rerank import scores_of
from gpt2block.apps.serve.settings import ServerSettings
from gpt2block.apps.serve.workers import Places, Workers
from gpt2block.engine.explain import Page, collect
from gpt2block.engine.grammars import Grammar, Matcher, Vocabulary, vocabulary_of
from gpt2block.engine.grammars.trials import Trial
from gpt2block.engine.model import Floats, Ids
from gpt2block.engine.receipts import identity
from gpt2block.errors import InputError
from gpt2block.files.tokenizers import tokenizer
from gpt2block.files.tokenizers.encoding import Encoding

PASSES_AT_ONCE = 4  # threads that compute passes
COMPILING_AT_ONCE = 2  # threads that compile rules; a client gets one of them
MAX_EXPLAINING = 8  # most `explain` requests per client that run (one at a time) or wait
KEPT_PAGES = 8  # most `explain` pages kept per client, each of a few MB


class Passes:
    """Computes forward passes outside the batch in threads; clients whose passes wait take turns.

    A call that is cancelled begins no further pass. model, encoding: the server's model, and a
    tokenizer that fits its token ids.
    """

    def __init__(self, model: Any, encoding: Encoding, settings: ServerSettings) -> None:
        self._model, self.encoding, self.settings = model, encoding, settings
        self._threads, self._one = Workers(PASSES_AT_ONCE), Workers(1)
        self._compiling = Workers(COMPILING_AT_ONCE)
        seconds = settings.rule_seconds
        self._trials = [Trial(self._tokens, seconds) for _ in range(COMPILING_AT_ONCE)]
        self._idle = [*self._trials]
        self._caches = Places(PASSES_AT_ONCE)  # limits kv_caches for scoring prompts
        # Pages are stored by client, so that response times reveal no other client's requests.
        self._pages: Kept[Kept[str]] = OrderedDict()
        self._explaining: Counter[str] = Counter()

    async def embed(self, client: str, ids: list[Ids], dimensions: int | None) -> Floats:
        """Return the embeddings of texts, (B, C) or (B, dimensions), computed in one pass."""
        given = self._model.engine, self.settings.pooling or "mean", dimensions, ids
        return await self._threads.run(client, vectors_of, *given)

    async def judge(self, client: str, answers: tuple[int, int], ids: list[Ids]) -> list[float]:
        """Return the scores of documents for /v1/rerank, computed in one pass."""
        return await self._threads.run(client, scores_of, self._model.engine, answers, ids)

    async def identity(self, client: str) -> JsonObject:
        """Return the fields of receipts that state the model, which has the server's name."""
        found = await self._threads.run(client, identity, self._model.engine)
        return {**found, "model": self.settings.name}

    async def compile(self, client: str, rule: Grammar) -> None:
        """Compile a grammar for sequences submitted next. Raises InputError and ApiError."""
        if self.matcher(rule) is None:
            await self._compiling.run(client, self._compile, rule)

    def _compile(self, rule: Grammar) -> None:
        trial = self._idle.pop()
        try:
            trial.matcher(rule)
        except (ChildProcessError, MemoryError) as error:
            raise overloaded(str(error)) from None
        finally:
            self._idle.append(trial)

    def matcher(self, rule: Grammar) -> Matcher | None:
        """Return a Matcher at the start of a text; None if the grammar is not compiled."""
        return self.vocabulary.kept(rule)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The model's tokens for grammars. Raises InputError if llguidance is not installed."""
        return vocabulary_of(*self._tokens)

    @property
    def _tokens(self) -> tuple[Encoding, int, frozenset[int]]:
        """Arguments of `vocabulary_of`."""
        config = self._model.config
        return self.encoding, config.vocab_size, tokenizer.end_tokens(config, self.encoding)

    async def score(self, client: str, ids: Ids, alternatives: int) -> Scored:
        """Return the tokens of a prompt with log-probabilities and alternatives."""
        scored = Scored()
        async with self._caches.taken(client):
            parts = scored_prompt(self._model.engine, ids, alternatives)
            while part := await self._threads.run(client, next, parts, None):
                scored.add(part)
        return scored

    async def logits(self, client: str, ids: Ids) -> Floats:
        """Return the logits (V,) after `ids`. Raises InputError unless they are finite."""
        return await self._threads.run(client, self._last_logits, ids)

    async def explain(self, client: str, ids: Ids) -> str:
        """Generate an `explain` page (one at a time) of a pass; return its secret name."""
        if self._explaining[client] == MAX_EXPLAINING:
            raise overloaded(f"the server explains {MAX_EXPLAINING} positions of a client")
        self._explaining[client] += 1
        try:
            html = await self._one.run(client, self._explanation, ids)
        finally:
            self._explaining -= Counter([client])
        ticket = secrets.token_urlsafe(16)
        keep(kept_of(self._pages, client), ticket, html, KEPT_PAGES)
        return ticket

    async def explained(self, client: str, ticket: str) -> str | None:
        """Return the `explain` page with this name, of any client; None if it is not kept."""
        return next((each[ticket] for each in self._pages.values() if ticket in each), None)

    def close(self) -> None:
        """Begin no further passes."""
        for threads in (self._threads, self._one, self._compiling):
            threads.close()
        for trial in self._trials:
            trial.close()

    def _last_logits(self, ids: Ids) -> Floats:
        (logits,) = self._model.engine.forward([ids], "last")
        last: Floats = np.asarray(logits, np.float32)
        if not np.isfinite(last).all():
            raise InputError("logits: expected finite ones, got NaN or infinity: check the weights")
        return last

    def _explanation(self, ids: Ids) -> str:
        return Page(collect(self._model.engine, self.encoding, self.settings.name, ids, 0)).html

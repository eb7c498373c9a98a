"""A fast, predictable replacement for a GPT-2: a table of logits by the last token.

It asserts the requirements of a real engine: sequences of 1 to n_ctx tokens, ids in the vocabulary,
no step of a row whose cache is full.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tiktoken
from numpy.typing import NDArray

from gpt2block.config import GPT2Config
from gpt2block.run.model import CacheKind, Floats, Ids, Tensors, Want
from gpt2block.sampling import Sampling

END = "<|endoftext|>"


def log_softmax(logits: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def cycle(vocab_size: int) -> Floats:
    """Return logits (V, V) with which token i + 1 almost certainly follows token i."""
    return 10 * np.roll(np.eye(vocab_size, dtype=np.float32), 1, axis=1)


def random_table(seed: int, vocab_size: int) -> Floats:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((vocab_size, vocab_size), dtype=np.float32) * 2


def byte_encoding(*merges: bytes, end: bool = True) -> tiktoken.Encoding:
    """Return an encoding of the 256 bytes, these longer tokens and, with `end`, <|endoftext|>."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    ranks |= {token: 256 + index for index, token in enumerate(merges)}
    special = {END: len(ranks)} if end else {}
    return tiktoken.Encoding("bytes", pat_str="(?s:.+)", mergeable_ranks=ranks,
                             special_tokens=special)  # fmt: skip


class MarkovEngine:
    """table: logits (V, V). script: for each row, the tokens that decoding returns instead."""

    nbytes = 0

    def __init__(
        self, table: Floats, n_ctx: int = 64, script: Sequence[Iterable[int]] | None = None
    ) -> None:
        self.dtype = "float32"
        self.config = GPT2Config(n_layer=1, n_head=1, n_embd=4, n_ctx=n_ctx, vocab_size=len(table))
        self.table = table
        self.script = script
        self.batches: list[list[int]] = []  # lengths of the sequences in each call
        self.decodings: list[MarkovDecoding] = []
        self.restarts: list[tuple[int, list[int]]] = []

    @property
    def cache_kind(self) -> CacheKind:
        raise AssertionError("the tests do not use this")

    def tensors(self) -> Tensors:
        raise AssertionError("the tests do not use this")

    def describe(self) -> str:
        return "a table"

    def new_cache(self, batch: int, n_ctx: int) -> Any:
        raise AssertionError("the tests do not use this")

    def forward(self, sequences: Sequence[Ids], want: Want, cache: Any = None) -> list[Floats]:
        """Return hidden states: (i, 1, 0, 0) for token i."""
        assert want == "hidden"
        self._check(sequences)
        return [
            np.stack([ids, np.ones_like(ids), 0 * ids, 0 * ids], axis=1).astype(np.float32)
            for ids in sequences
        ]

    def log_likelihood(self, sequences: Sequence[Ids]) -> list[Floats]:
        self._check(sequences)
        logp = log_softmax(self.table)
        return [logp[ids[:-1], ids[1:]].astype(np.float32) for ids in sequences]

    def decode(self, prompts: Sequence[Ids], sampling: Sequence[Sampling]) -> MarkovDecoding:
        self._check(prompts)
        self.decodings.append(MarkovDecoding(self, prompts, sampling))
        return self.decodings[-1]

    def _check(self, sequences: Sequence[Ids]) -> None:
        assert sequences
        for ids in sequences:
            assert ids.dtype == np.int32
            assert 1 <= len(ids) <= self.config.n_ctx
            assert ids.min() >= 0
            assert ids.max() < self.config.vocab_size
        self.batches.append([len(ids) for ids in sequences])


class MarkovDecoding:
    def __init__(
        self, engine: MarkovEngine, prompts: Sequence[Ids], sampling: Sequence[Sampling]
    ) -> None:
        self.engine, self.sampling = engine, sampling
        self.lengths = [0] * len(prompts)
        self._new = [len(ids) for ids in prompts]  # tokens that enter the cache next
        self._last = [int(ids[-1]) for ids in prompts]
        self._script = [iter(tokens) for tokens in engine.script or ()]
        self._step = 0

    def next(self) -> tuple[Ids, Floats]:
        for row, new in enumerate(self._new):
            self.lengths[row] += new
            assert self.lengths[row] <= self.engine.config.n_ctx
        rows = self.engine.table[self._last]
        logp = log_softmax(rows)
        tokens = [self._choose(row, logits) for row, logits in enumerate(rows)]
        self._new, self._last = [1] * len(tokens), tokens
        self._step += 1
        chosen = [logp[row, token] for row, token in enumerate(tokens)]
        return np.array(tokens, np.int32), np.array(chosen, np.float32)

    def restart(self, row: int, ids: Ids) -> None:
        self.engine._check([ids])
        self.engine.restarts.append((row, ids.tolist()))
        assert len(ids) == 1 or ids[-1] == self._last[row]  # one token: the row has ended
        self._last[row] = int(ids[-1])
        self.lengths[row], self._new[row] = 0, len(ids)

    def _choose(self, row: int, logits: Floats) -> int:
        if self._script:
            return next(self._script[row], 0)
        if np.isnan(logits).any():
            return -1
        options = self.sampling[row]
        if options.temperature == 0:
            return int(logits.argmax())
        p = np.exp(log_softmax(logits / options.temperature))
        rng = np.random.default_rng([options.seed, options.sample, self._step])
        return min(int(np.searchsorted(p.cumsum(), rng.random())), len(p) - 1)

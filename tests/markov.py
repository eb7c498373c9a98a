"""A fast, predictable replacement for GPT-2: a table that gives logits for the last token.

It asserts the requirements of a real engine: sequences of 1 to n_ctx tokens, ids in the vocabulary,
no step of a sequence whose cache is full.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tiktoken
from numpy.typing import NDArray

from gpt2block.cuda.formats import USUAL
from gpt2block.engine.adapters import Adapters
from gpt2block.engine.chat.template import ChatTemplate
from gpt2block.engine.model import CacheKind, Drafts, Floats, Ids, Output, Sampled, Start, Tensors
from gpt2block.models.config import GPT2Config
from gpt2block.sampling import Sampling, unpacked

END = "<|endoftext|>"
# A chat template with one line per message: the first letter of the role, then the content. It also
# reads names, function calls and a variable.
LINES = ChatTemplate(
    "{{ style }}{% for m in messages %}{{ m.role[0] }}{{ m.name }}"
    "{% for call in m.tool_calls %}{{ call.function.name }}{% endfor %}"
    "{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}",
    {},
)


def log_softmax(logits: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def cycle(vocab_size: int, by: float = 40.0) -> Floats:
    """Return logits (V, V) with which token i + 1 almost certainly follows token i.

    by: how far its logit is above all others; with 10, another token is sampled about once in 100.
    """
    return by * np.roll(np.eye(vocab_size, dtype=np.float32), 1, axis=1)


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
    """An engine with logits `table` (V, V) by the last token.

    script: for each sequence, the tokens that decoding returns instead of drawing them.
    """

    nbytes, adapters = 0, Adapters.none()

    def __init__(
        self, table: Floats, n_ctx: int = 64, script: Sequence[Iterable[int]] | None = None
    ) -> None:
        self.formats, self.divides_prompts, self.continues_exactly = USUAL, True, False
        self.config = GPT2Config(n_layer=1, n_head=1, n_embd=4, n_ctx=n_ctx, vocab_size=len(table))
        self.table = table
        self.script = script
        self.start_up: Iterable[tuple[int, int]] = ()  # yielded by MarkovDecoding.start_up
        self.batches: list[list[int]] = []  # lengths of the sequences in each call
        self.decodings: list[MarkovDecoding] = []
        self.restarts: list[tuple[int, list[int]]] = []
        self.pieces: list[tuple[int, int, int]] = []  # slot, first token, end

    @property
    def cache_kind(self) -> CacheKind:
        raise AssertionError("the tests do not use this")

    def tensors(self) -> Tensors:
        raise AssertionError("the tests do not use this")

    def describe(self) -> str:
        return "a table"

    def new_cache(self, batch: int, n_ctx: int) -> Any:
        raise AssertionError("the tests do not use this")

    def forward(self, sequences: Sequence[Ids], want: Output, cache: Any = None) -> list[Floats]:
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

    def likeliest(self, sequences: Sequence[Ids]) -> list[tuple[Floats, Ids]]:
        best = self.table.argmax(axis=-1).astype(np.int32)
        scores = self.log_likelihood(sequences)
        return [(each, best[ids[:-1]]) for each, ids in zip(scores, sequences, strict=True)]

    def decode(
        self, slots: int, n_ctx: int, fewer: bool = False, speculate: Drafts = False
    ) -> MarkovDecoding:
        slots = min(slots, 5) if fewer else slots
        self.decodings.append(MarkovDecoding(self, slots, n_ctx, speculate))
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
    """Decoding with the table. sampling: of each sequence, in the order of their first starts.

    With `speculate`, odd tokens are reported as drafted.
    """

    def __init__(
        self, engine: MarkovEngine, slots: int, n_ctx: int, speculate: Drafts = False
    ) -> None:
        self.engine, self.slots, self.n_ctx, self.speculate = engine, slots, n_ctx, speculate
        self.sampling: list[Sampling] = []
        self._script = iter([iter(tokens) for tokens in engine.script or ()])
        self._scripts: dict[int, Iterator[int]] = {}  # by slot
        self._rows: dict[int, Start] = {}
        self._last: dict[int, int] = {}

    def start_up(self, continued: bool) -> Iterator[tuple[int, int]]:
        yield from self.engine.start_up

    def start(self, starts: Sequence[Start]) -> None:
        assert starts
        self.engine._check([start.ids for start in starts])
        for start in starts:
            assert 0 <= start.slot < self.slots
            assert start.slot not in self._rows
            assert 1 <= start.steps <= self.n_ctx - len(start.ids) + 1
            if start.sampled:
                assert start.occurred is not None
                assert start.occurred[-len(start.ids) :].tolist() == start.ids.tolist()
                self.engine.restarts.append((start.slot, start.ids.tolist()))
            else:
                self.sampling.append(start.sampling)
                self._scripts[start.slot] = next(self._script, iter(()))
            self._rows[start.slot], self._last[start.slot] = start, int(start.ids[-1])

    def extend(self, starts: Sequence[Start]) -> None:
        self.engine.pieces += [(start.slot, start.cached, len(start.ids)) for start in starts]

    def reusable(self, source: int, target: int, tokens: int) -> int:
        return tokens

    def copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        raise AssertionError("the engine does not continue exactly")

    def stop(self, slots: Ids) -> None:
        for slot in slots.tolist():
            del self._rows[slot]

    def next(self) -> Sampled:
        assert self._rows
        slots = list(self._rows)
        rows = self.engine.table[[self._last[slot] for slot in slots]]
        logp = log_softmax(rows)
        tokens = [
            self._choose(self._rows[slot], logits) for slot, logits in zip(slots, rows, strict=True)
        ]
        for slot, token in zip(slots, tokens, strict=True):
            row = self._rows.pop(slot)
            self._last[slot] = token
            if row.steps > 1:
                self._rows[slot] = row._replace(steps=row.steps - 1, sampled=row.sampled + 1)
        chosen = [logp[n, token] for n, token in enumerate(tokens)]
        found = Sampled(
            np.array(slots, np.int32), np.array(tokens, np.int32), np.array(chosen, np.float32)
        )
        return found._replace(drafted=found.tokens % 2 == 1) if self.speculate else found

    def _choose(self, row: Start, logits: Floats) -> int:
        if row.matcher is None:
            return self._sampled(row, logits)
        allowed = unpacked(row.matcher.mask(), len(logits))
        token = self._sampled(row, np.where(allowed, logits, -np.inf)) if allowed.any() else -1
        row.matcher.accept([token])
        return token

    def _sampled(self, row: Start, logits: Floats) -> int:
        if self.engine.script:
            return next(self._scripts[row.slot], 0)
        if np.isnan(logits).any():
            return -1
        options = row.sampling
        if options.temperature == 0:
            return int(logits.argmax())
        p = np.exp(log_softmax(logits / options.temperature))
        rng = np.random.default_rng([options.seed, options.sample, row.sampled])
        return min(int(np.searchsorted(p.cumsum(), rng.random())), len(p) - 1)

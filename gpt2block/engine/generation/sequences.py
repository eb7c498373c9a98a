"""Sequences: continuations of a prompt during generation, with tokens, text and end conditions."""

from __future__ import annotations

import codecs
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

import numpy as np

from gpt2block.engine import notebook
from gpt2block.engine.adapters import NONE
from gpt2block.engine.grammars import Grammar, Matcher
from gpt2block.engine.model import Ids, Start
from gpt2block.errors import Argument, InputError
from gpt2block.files.tokenizers.encoding import Encoding, bytes_of_ids
from gpt2block.files.tokenizers.lookup import ReadLater, Tokenizer, of_outputs
from gpt2block.sampling import Sampling

FinishReason = Literal["length", "stop", "context"]
EndReason = Literal["length", "stop", "context", "error", "rule", "cancelled", "deadline"]
SHOWN_TEXT = 200  # most characters of a text in `repr`
Tops = tuple[tuple[int, float], ...]  # (id, log-probability) of a position's most likely tokens
# Arguments of `TokenSequence.add`: tokens, log-probabilities, most likely tokens, whether each was
# drafted
NewTokens = tuple[Sequence[int], Sequence[float], Sequence[Tops], Sequence[bool]]
BAD_WEIGHTS = (
    "the weights hold infinity or NaN, or numbers too large for their dtype: try ",
    Argument("dtype", "float32"),
)


@dataclass(frozen=True)
class Generation(ReadLater):
    """The result of one continuation of a prompt.

    text: the text before the stop string or stop token; decoded when it is read, "" without a
        tokenizer.
    tokens: all sampled tokens, including the stop token or the tokens of the stop string.
    logprobs: log-probabilities of the tokens under the unmodified logits of the model, before
        penalties, temperature and filters.
    finish_reason: "length" after max_new_tokens, "stop" after a stop string or stop token,
        "context" when the context has no position left.
    seed: seed of the random numbers; the same seed and options give the same text.
    top_logprobs: the most likely tokens at the position of each token and their log-probabilities,
        in descending order, if requested; else empty.
    receipt: a JSON object that states how the text was generated, for `verify`, if requested.
    """

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    seed: int
    top_logprobs: tuple[Tops, ...] = ()
    receipt: dict[str, Any] | None = field(default=None, compare=False)

    def _repr_html_(self) -> str:
        facts = f"{len(self.tokens):,} tokens, ended: {self.finish_reason}, seed {self.seed}"
        return notebook.paragraph(self.text) + notebook.paragraph(facts)

    def __repr__(self) -> str:
        text = repr(self.text)
        if len(text) > SHOWN_TEXT:
            text = f"{text[: SHOWN_TEXT - 2]}…{text[-1]}"
        return (
            f"Generation({text}, {len(self.tokens)} tokens, "
            f"finish_reason={self.finish_reason!r}, seed={self.seed})"
        )


@dataclass(frozen=True)
class Ends:
    """Conditions that end a sequence. encoding: tokenizer for stop strings, or None."""

    max_new_tokens: int
    n_ctx: int
    truncate: bool
    stop: tuple[str, ...]
    stop_ids: frozenset[int]
    encoding: Encoding | None


class TokenSequence:
    """A continuation of a prompt that is being generated.

    Tokens are decoded when the text is read, or immediately if there are stop strings.
    finish_reason: None until the sequence ends; a FinishReason; "error" if its logits were NaN or
    infinite or the engine has failed, or "rule" if its grammar is too complex to continue the text,
    with the exception in `error`; "cancelled"; or "deadline" if its time ran out.
    """

    def __init__(
        self,
        prompt: Ids,
        sampling: Sampling,
        encoding: Tokenizer,
        ends: Ends,
        alternatives: int = 0,
        rule: Grammar | None = None,
    ) -> None:
        """alternatives: number of most likely tokens in `tops` for each token.

        rule: the grammar of the text. The engine also needs its Matcher in `matcher`.
        """
        self.prompt, self.sampling, self.ends = prompt, sampling, ends
        self.alternatives, self.rule = alternatives, rule
        self.matcher: Matcher | None = None
        self.most = len(prompt) + ends.max_new_tokens  # most tokens of prompt and continuation
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.tops: list[Tops] = []
        self.drafted: list[bool] = []  # for each token, whether it was drafted (speculation)
        self.finish_reason: EndReason | None = None
        self.error: Exception | None = None
        self.reused = 0  # number of prompt tokens whose keys and values were reused
        self.client = ""  # owner: prompts are reused only within a client
        self.held = False  # whether Batch.step may deliver tokens later
        self.adapter = NONE  # one of the engine's adapters
        self.known: Ids | None = None  # the continuation if it is known: the Decoding's drafts
        self.exact = False  # whether kernels of prompts compute the whole prompt
        # Returns the receipt of a sequence that has ended; None: no receipt is wanted.
        self.certify: Callable[[TokenSequence], dict[str, object]] | None = None
        self.unwritten: frozenset[int] = frozenset()  # ids of tokens that the text leaves out
        self.reader = encoding  # the tokenizer of the text
        self._at_end_token = self._closed = False
        self._decoded = 0  # number of decoded tokens
        self._pieces: list[str] = []
        self._taken = self._tokens_taken = 0

    def without_text(self) -> TokenSequence:
        """Return a copy without tokenizer and stop strings, which knows token ids only.

        The sequence must have no tokens yet. The copy can be pickled, and generated in another
        process. The tokens of the copy are then added to this sequence, which finds the stop
        strings.
        """
        found = copy(self)
        found.ends = replace(self.ends, stop=(), encoding=None)
        found.reader = None
        found.tokens, found.logprobs, found.tops, found.drafted = [], [], [], []
        found._pieces, found.unwritten = [], frozenset()
        return found

    @cached_property
    def _text(self) -> Text:
        """The decoder of the text; created on first use, because many sequences need no text."""
        return Text(self.ends.stop)

    def start(self, slot: int) -> Start:
        """Return the Start for a slot, with the ids of the prompt, or of half of a full context."""
        ids, sampled, occurred = self.prompt, len(self.tokens), None
        if sampled:
            occurred = np.concatenate([self.prompt, np.array(self.tokens, np.int32)])
            ids = occurred[-max(1, self.ends.n_ctx // 2) :]
        steps = min(self.ends.max_new_tokens - sampled, self.ends.n_ctx - len(ids) + 1)
        known = None if self.known is None else self.known[sampled : sampled + steps]
        more = self.alternatives, self.most, self.matcher, known, self.adapter.number
        return Start(slot, ids, self.sampling, steps, sampled, occurred, 0, *more)

    def add(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        tops: Sequence[Tops],
        drafted: Sequence[bool],
    ) -> None:
        """Append sampled tokens to the sequence, which only the last of them may end.

        If the last token is invalid because of NaN or infinite logits, the other tokens are added,
        and the sequence ends with an error. tops: alternatives of each token; empty without any.
        """
        wrong = "NaN" if tokens[-1] < 0 else "infinite" if math.isnan(logprobs[-1]) else ""
        if wrong:
            tokens, logprobs, drafted = tokens[:-1], logprobs[:-1], drafted[:-1]
        self.tokens += tokens
        self.logprobs += logprobs
        self.drafted += drafted
        for token, logprob, top in zip(tokens, logprobs, tops, strict=False):
            self.tops.append(tuple((id, logprob if id == token else p) for id, p in top))
        if wrong:
            self.error, self.finish_reason = self._problem(wrong)
            return
        self._at_end_token = tokens[-1] in self.ends.stop_ids
        if self.ends.stop:
            self._decode()
        reason: FinishReason | None = None
        if self._at_end_token or self._stopped or self._complete:
            reason = "stop"
        elif len(self.tokens) == self.ends.max_new_tokens:
            reason = "length"
        elif self.full and not self.ends.truncate:
            reason = "context"
        if reason:
            self.close()
            self.finish_reason = "stop" if self._stopped else reason

    def _problem(self, wrong: str) -> tuple[InputError, EndReason]:
        """Return the error of a sequence without a valid token, and the reason of its end.

        wrong: "NaN" or "infinite".
        """
        if self.matcher is not None and self.matcher.problem is not None:
            return InputError(self.matcher.problem), "rule"
        problem = f"the logits are {wrong} after {len(self.tokens)} new tokens: "
        return InputError(problem, *BAD_WEIGHTS), "error"

    @property
    def _complete(self) -> bool:
        """Whether the text is complete by its grammar, so that no token can follow."""
        return self.matcher is not None and self.matcher.complete_at == len(self.tokens)

    def add_until_end(self, new: NewTokens) -> None:
        """Append sampled tokens as `add` does, up to the token that completes a stop string."""
        if not self.ends.stop:
            self.add(*new)
            return
        tokens, logprobs, tops, drafted = new
        for n in range(len(tokens)):
            own = slice(n, n + 1)
            self.add(tokens[own], logprobs[own], tops[own], drafted[own])
            if self.finish_reason:
                return

    @property
    def _stopped(self) -> bool:
        """Whether the text contains a complete stop string."""
        return bool(self.ends.stop) and self._text.stopped

    @property
    def full(self) -> bool:
        """Whether the context has no position left for the last sampled token."""
        return len(self.prompt) + len(self.tokens) > self.ends.n_ctx

    def cancel(self, reason: Literal["cancelled", "deadline"] = "cancelled") -> None:
        """End the sequence before an end condition is met."""
        self.close()
        self.finish_reason = reason

    def end_as(self, reason: EndReason) -> None:
        """End this sequence for the reason for which its copy without text has ended.

        Only the copy knows of a deadline, an error, and a text that is complete by its grammar.
        """
        if reason not in ("error", "rule"):
            self.close()
        self.finish_reason = self.finish_reason or reason

    def close(self) -> None:
        """End the text, and append the characters that the decoder has held back."""
        self._closed = True
        if self.ends.stop:
            self._decode()

    def _decode(self) -> None:
        """Decode the new tokens to text, except for a stop token that ended the sequence."""
        end = len(self.tokens) - self._at_end_token
        if self.ends.stop and self._decoded < (early := min(end, self.sampling.min_new_tokens)):
            data = self._bytes(self.tokens[self._decoded : early])
            self._pieces.append(self._text.unsearched(data))
            self._decoded = early
        data = self._bytes(self.tokens[self._decoded : end])
        self._pieces.append(self._text.add(data, final=self._closed))
        self._decoded = end

    def take(self) -> str:
        """Return the text added since the last call."""
        self._decode()
        piece = "".join(self._pieces[self._taken :])
        self._taken = len(self._pieces)
        return piece

    def take_tokens(self) -> tuple[list[int], list[float], list[Tops], list[bool]]:
        """Return entries of `tokens`, `logprobs`, `tops`, `drafted` since the last call."""
        first, self._tokens_taken = self._tokens_taken, len(self.tokens)
        new = slice(first, None)
        return self.tokens[new], self.logprobs[new], self.tops[new], self.drafted[new]

    @property
    def text(self) -> str:
        """The text so far, without characters that may begin a stop string."""
        self._decode()
        return "".join(self._pieces)

    @property
    def stop_string(self) -> str | None:
        """The stop string that has ended the text; None if none has."""
        return self._text.found if self.ends.stop else None

    def tokens_within(self, ranges: Sequence[tuple[int, int]]) -> int:
        """Return the number of tokens that begin in ranges (begin, end) of characters."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        sizes = (len(decoder.decode(self._bytes([token]))) for token in self.tokens)
        places = [*accumulate(sizes, initial=0)]
        return sum(bisect_left(places, end) - bisect_left(places, begin) for begin, end in ranges)

    def text_of(self, token: int) -> str:
        """Return the text of a single token; an incomplete character becomes U+FFFD."""
        return self._bytes([token]).decode(errors="replace")

    def result(self) -> Generation:
        """Return the Generation (the result) of a sequence whose text has ended."""
        reason = self.finish_reason
        assert reason in ("length", "stop", "context")
        tokens, logprobs, tops = tuple(self.tokens), tuple(self.logprobs), tuple(self.tops)
        receipt = None if self.certify is None else self.certify(self)
        generation = Generation("", tokens, logprobs, reason, self.sampling.seed, tops, receipt)
        return generation.later(text=lambda: self.text)

    def _bytes(self, tokens: Sequence[int]) -> bytes:
        encoding = of_outputs(self.reader) if tokens else None
        if self.unwritten:
            tokens = [token for token in tokens if token not in self.unwritten]
        return b"" if encoding is None else bytes_of_ids(encoding, tokens)


Sequences = Sequence[TokenSequence]


class Text:
    """Incremental UTF-8 decoder that does not yet return text that may begin a stop string.

    The text ends before the stop string that is completed first, for any division of the bytes.
    found: this stop string; None before.
    """

    def __init__(self, stop: tuple[str, ...] = ()) -> None:
        self.found: str | None = None
        self._stop, self._longest = stop, max(map(len, stop), default=0)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    @property
    def stopped(self) -> bool:
        """Whether the text contains a complete stop string."""
        return self.found is not None

    def unsearched(self, data: bytes) -> str:
        """Decode the first bytes of a text, in which no stop strings are searched."""
        return self._decoder.decode(data)

    def add(self, data: bytes, final: bool = False) -> str:
        """Decode `data` and return the text that cannot be part of a stop string."""
        if self.found is not None:
            return ""
        self._held += self._decoder.decode(data, final)
        stops = [(i + len(s), i, s) for s in self._stop if (i := self._held.find(s)) >= 0]
        if stops:
            _, certain, self.found = min(stops)
        else:
            certain = len(self._held) - (0 if final else self._possible_stop())
        text, self._held = self._held[:certain], self._held[certain:]
        return text

    def _possible_stop(self) -> int:
        """Return the length of the held text's longest suffix that may begin a stop string.

        The longest suffix is tried first: if all of the held text stays held, one comparison shows
        this.
        """
        for start in range(max(0, len(self._held) - self._longest + 1), len(self._held)):
            suffix = self._held[start:]
            if any(s.startswith(suffix) for s in self._stop):
                return len(suffix)
        return 0

"""Matchers: for each row (continuation), the tokens that its grammar allows next."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Sequence
from copy import copy
from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from gpt2block.errors import InputError, require
from gpt2block.grammars.grammar import Grammar
from gpt2block.sampling import Mask, mask_words, unpacked
from gpt2block.tokenizers.encoding import Encoding, bytes_of_ids, special_id, tokens_of

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

KEPT = 64  # number of compiled grammars that a Vocabulary keeps
TEXTS = 4096  # number of forced texts whose tokens are cached; most of them occur in every row
TOO_COMPLEX = "{}: the text cannot be continued ({}): expected a simpler one"


class Matcher:
    """The state of a text in its grammar, after the tokens that were accepted so far.

    complete_at: number of tokens after which the text was complete, so that no token can follow;
    None: not yet. words: number of 32-bit words of llguidance's masks. has_end: whether the model
    has an end token.
    """

    def __init__(
        self, grammar: Grammar, matcher: LLMatcher, vocab_size: int, words: int, has_end: bool
    ) -> None:
        self.grammar, self.vocab_size, self.words = grammar, vocab_size, words
        self._has_end = has_end
        self.state, self._count = matcher, 0
        self.complete_at: int | None = None

    def copy(self) -> Matcher:
        made = copy(self)
        made.state = self.state.deep_copy()
        return made

    def accept(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text. Tokens after a complete text, or after -1, have no effect."""
        for token in tokens:
            if token < 0 or self.state.is_stopped():
                return
            self.state.consume_token(token)
            self._count += 1
            if self.state.is_stopped() and not self.state.is_error():
                self.complete_at = self._count
        # Where only the end may follow, a model without an end token has no allowed token.
        ends = not self._has_end and self.complete_at is None and self.state.is_accepting()
        if ends and not unpacked(self.mask(), self.vocab_size).any():
            self.complete_at = self._count

    def mask(self) -> Mask:
        """Return the Mask of the tokens that the grammar allows next; no token after an error."""
        words = mask_words(self.vocab_size)
        bits = np.frombuffer(self.state.compute_bitmask(), np.int32)[:words]
        return bits if self.problem is None else np.zeros(words, np.int32)

    def forced(self) -> list[int]:
        """Return the tokens into which an encoder divides the bytes that the grammar forces next.

        The tokens are guesses, because other tokens can have the same bytes.
        """
        return self.state.compute_ff_tokens()

    @property
    def problem(self) -> str | None:
        """A message, if the grammar is too complex to continue the text; else None."""
        if not self.state.is_error():
            return None
        reason = self.state.get_error().splitlines()[0]
        if "NoExtensionBias" in reason:
            reason = "the model has no token that the grammar allows next"
            return f"{self.grammar.name}: the text cannot be continued: {reason}"
        return TOO_COMPLEX.format(self.grammar.name, reason)


class Vocabulary:
    """The tokens of a model for matchers. Thread-safe.

    ends: tokens that end a text; a grammar allows them where the text may end. Without any, a text
    ends only if no token can follow. Raises InputError if llguidance is not installed.
    """

    def __init__(self, encoding: Encoding, vocab_size: int, ends: Collection[int]) -> None:
        require("a grammar", "tools", "llguidance")
        # llguidance requires an end token: without any, there is one after the vocabulary's last.
        self._tokenizer = _tokenizer(encoding, vocab_size, sorted(ends) or [vocab_size])
        self._vocab_size, self._has_end = vocab_size, bool(ends)
        self._made: OrderedDict[Grammar, Matcher] = OrderedDict()  # the latest one last
        self._lock = Lock()

    def matcher(self, grammar: Grammar) -> Matcher:
        """Return a Matcher at the start of a text. Raises InputError if it cannot be compiled.

        Compiling takes up to about a second for a large grammar, and releases the GIL.
        """
        from llguidance import LLMatcher  # noqa: PLC0415  (optional dependency)

        with self._lock:
            made = self._made.get(grammar)
        if made is None:
            state = LLMatcher(self._tokenizer, grammar.source, log_level=0)
            if state.is_error():
                problem = state.get_error().splitlines()[0]
                raise InputError(f"{grammar.name}: it cannot be compiled: {problem}")
            words = mask_words(self._tokenizer.vocab_size)
            made = Matcher(grammar, state, self._vocab_size, words, self._has_end)
        with self._lock:
            self._made[grammar] = made
            self._made.move_to_end(grammar)
            while len(self._made) > KEPT:
                self._made.popitem(last=False)
        return made.copy()


_latest: deque[tuple[Encoding, int, frozenset[int], Vocabulary]] = deque(maxlen=4)
_lock = Lock()


def vocabulary_of(encoding: Encoding, vocab_size: int, ends: frozenset[int]) -> Vocabulary:
    """Return the Vocabulary of a tokenizer: a new one, or one of the four latest ones.

    Creating one takes 0.2 s for 49,000 tokens and 1.1 s for 152,000, in which no other thread runs.
    """
    with _lock:
        for of, size, of_ends, vocabulary in _latest:
            if of is encoding and (size, of_ends) == (vocab_size, ends):
                return vocabulary
        vocabulary = Vocabulary(encoding, vocab_size, ends)
        _latest.append((encoding, vocab_size, ends, vocabulary))
        return vocabulary


def fill(rows: Sequence[tuple[Matcher, Sequence[int]]], masks: Any) -> None:
    """Write the masks of several texts and of their guesses to `masks`.

    rows: for each text, its Matcher and guesses of its next tokens. masks: (R, ceil(V / 32)) int32,
    C-contiguous. Each text has the mask of its next token, followed by the mask after each guess.
    After a wrong guess, and for a text with a problem, no token is allowed.

    One thread computes all masks: copies of a matcher share a lock, so that several are slower.
    """
    masks[...] = 0
    words = max((matcher.words for matcher, _ in rows), default=0)
    wide = masks if words <= masks.shape[1] else np.zeros((len(masks), words), np.int32)
    address, nbytes, at = wide.ctypes.data, wide.shape[1] * wide.itemsize, 0
    for matcher, guesses in rows:
        state: Any = matcher.state
        place, count = address + at * nbytes, 1 + len(guesses)
        if not state.is_error():
            if count == 1:
                state.unsafe_compute_mask_ptr(place, nbytes)
            else:
                state.unsafe_compute_mask_ptr_with_draft_token(place, nbytes, list(guesses))
        if state.is_error():
            wide[at : at + count] = 0
        at += count
    if wide is not masks:
        masks[...] = wide[:, : masks.shape[1]]


def _tokenizer(encoding: Encoding, vocab_size: int, ends: list[int]) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper  # noqa: PLC0415  (optional dependency)

    return LLTokenizer(TokenizerWrapper(_Tokens(encoding, vocab_size, ends)), eos_token=ends)


class _Tokens:
    """The description of a vocabulary that llguidance reads."""

    bos_token_id = None

    def __init__(self, encoding: Encoding, vocab_size: int, ends: list[int]) -> None:
        self.eos_token_id = ends[0]
        self.tokens = [b""] * max(vocab_size, ends[-1] + 1)
        self._encoding = encoding
        for token, data in tokens_of(encoding):
            if token < vocab_size:
                self.tokens[token] = data
        special = {special_id(encoding, name): name for name in encoding.special_tokens_set}
        for token, name in special.items():
            if token < vocab_size:
                self.tokens[token] = name.encode()
        self.special_token_ids = sorted({*special, *ends})
        self._known = lru_cache(TEXTS)(self._encode)

    def __call__(self, text: str) -> list[int]:
        """Return the token ids of a text; none if the encoder adds or changes characters."""
        return self._known(text)

    def _encode(self, text: str) -> list[int]:
        ids = self._encoding.encode_ordinary(text)
        return ids if bytes_of_ids(self._encoding, ids) == text.encode() else []

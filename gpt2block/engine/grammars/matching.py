"""Matchers: for each sequence, the tokens that its grammar allows next."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from copy import copy
from functools import lru_cache
from threading import Lock
from time import thread_time
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from gpt2block.engine.grammars.grammar import Grammar
from gpt2block.errors import InputError, require
from gpt2block.files.tokenizers.encoding import Encoding, bytes_of_ids, special_id, tokens_of
from gpt2block.sampling import Mask, mask_words, unpacked

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

KEPT, KEPT_BYTES = 64, 2**28  # most compiled grammars that a Vocabulary keeps, and their bytes
# A compiled grammar grows while masks take more than USUAL_S of CPU time, by at most BYTES_PER_S
# (measured: 75 MB/s) and by at most MAX_GROWTH (measured: 62 MB until llguidance ends the text).
USUAL_S, BYTES_PER_S, MAX_GROWTH = 1e-4, 2**27, 2**26
TEXTS = 4096  # number of forced texts whose tokens are cached; most of them occur in every sequence
FORCED = 256  # most characters of a forced text that are divided into tokens
LONG_S = 0.005  # a step does not wait for a mask that takes more CPU time than this
# a sequence ends if its masks take more CPU time than this, on average over SLOW_MASKS
SLOW_S = 0.05
SLOW_MASKS = 8
TOO_COMPLEX = "{}: the text cannot be continued ({}): expected a simpler one"
TOO_SLOW = f"{SLOW_MASKS} masks of allowed tokens in a row take more than {1e3 * SLOW_S:g} ms each"


class CompiledGrammar:
    """The automaton that all copies of a compiled grammar's Matcher share, and that grows.

    lock: held while a Matcher uses the automaton. It is taken before llguidance's own lock, for
    which llguidance also waits with the GIL. grown: bytes that compiling took, 0 if not measured.
    seconds: CPU time of masks beyond USUAL_S each.
    """

    def __init__(self, grown: int) -> None:
        self.lock, self.grown, self.seconds = Lock(), grown, 0.0

    @property
    def nbytes(self) -> int:
        """An upper bound of the bytes."""
        return self.grown + min(int(BYTES_PER_S * self.seconds), MAX_GROWTH)


class Matcher:
    """The state of a text in its grammar, after the tokens that were accepted so far.

    complete_at: number of tokens after which the text was complete, so that no token can follow;
    None: not yet. has_end: whether the model has an end token. grown: as for CompiledGrammar.
    compiled: shared by all copies. latest: CPU seconds of the latest masks. slow: whether one of
    these masks took long.
    """

    def __init__(
        self, grammar: Grammar, matcher: LLMatcher, vocab_size: int, has_end: bool, grown: int
    ) -> None:
        self.grammar, self.vocab_size, self._has_end = grammar, vocab_size, has_end
        self.state, self.compiled, self._count = matcher, CompiledGrammar(grown), 0
        self.complete_at: int | None = None
        self.latest: deque[float] = deque(maxlen=SLOW_MASKS)
        self.slow = False
        # The mask and the forced tokens at the start of a text, which are the same in all copies.
        self._first, self._first_forced = self._next_mask(), self.state.compute_ff_tokens()

    def copy(self, judges: bool = True) -> Matcher:
        """Return a copy. judges: whether the time of its masks may end its text."""
        matcher = copy(self)
        matcher.state, matcher.latest = self.state.deep_copy(), deque(maxlen=SLOW_MASKS * judges)
        return matcher

    def accept(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text. Tokens after a complete text, or after -1, have no effect."""
        with self.compiled.lock:
            for token in tokens:
                if token < 0 or self.state.is_stopped():
                    return
                self.state.consume_token(token)
                self._count += 1
                if self.state.is_stopped() and not self.state.is_error():
                    self.complete_at = self._count
            # Where only the end may follow, a model without an end token has no allowed token.
            ends = not self._has_end and self.complete_at is None and self.state.is_accepting()
            if ends and not unpacked(self._next_mask(), self.vocab_size).any():
                self.complete_at = self._count

    def write(self, drafts: Sequence[int], masks: NDArray[np.int32]) -> None:
        """Write the mask of the next token, and the mask after each draft token, to `masks`.

        masks: (1 + number of draft tokens, ceil(V / 32)) int32. After a wrong draft token, and for
        a text with a problem, no token is allowed.
        """
        if not self._count and not drafts:
            masks[...] = self._first[: masks.shape[1]]
            return
        wide, state = np.zeros((len(masks), len(self._first)), np.int32), cast("Any", self.state)
        with self.compiled.lock:
            began = thread_time()
            if self.problem is None:
                address, nbytes = wide.ctypes.data, wide[0].nbytes
                if drafts:
                    draft = list(drafts)
                    state.unsafe_compute_mask_ptr_with_draft_token(address, nbytes, draft)
                else:
                    state.unsafe_compute_mask_ptr(address, nbytes)
            seconds = thread_time() - began
            self.compiled.seconds += max(0.0, seconds - USUAL_S * len(masks))
        self.latest.append(seconds / len(masks))
        self.slow = max(self.latest, default=0.0) > LONG_S
        masks[...] = wide[:, : masks.shape[1]] if self.problem is None else 0

    def mask(self) -> Mask:
        """Return the Mask of the tokens that the grammar allows next; no token after an error."""
        mask = np.empty(mask_words(self.vocab_size), np.int32)
        self.write((), mask[None])
        return mask

    def _next_mask(self) -> Mask:
        # llguidance appends an empty word if the number of its tokens is a multiple of 32.
        words = mask_words(self.vocab_size + (not self._has_end))
        return np.frombuffer(self.state.compute_bitmask(), np.int32, words)

    def forced(self) -> list[int]:
        """Return the tokens into which an encoder divides the bytes that the grammar forces next.

        The tokens are draft tokens, because other tokens can have the same bytes. Call this after
        `write`: llguidance then knows the bytes, which it finds here without releasing the GIL.
        """
        if not self._count:
            return self._first_forced
        with self.compiled.lock:
            return self.state.compute_ff_tokens()

    @property
    def problem(self) -> str | None:
        """A message, if the grammar is too complex to continue the text; else None."""
        if sum(self.latest) > SLOW_MASKS * SLOW_S:
            return TOO_COMPLEX.format(self.grammar.name, TOO_SLOW)
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
        self._made: OrderedDict[str, Matcher] = OrderedDict()  # key: source; the latest one last
        self._used: WeakSet[CompiledGrammar] = WeakSet()
        self._lock = Lock()

    @property
    def grown(self) -> int:
        """Bytes that compiling took for all grammars that are kept or in use."""
        with self._lock:
            return sum(each.grown for each in self._used)

    def matcher(self, grammar: Grammar, grown: int = 0) -> Matcher:
        """Return a Matcher at the start of a text. Raises InputError if it cannot be compiled.

        Compiling can take any time and memory, and releases the GIL. grown: as for CompiledGrammar.
        """
        if (kept := self.kept(grammar)) is not None:
            return kept
        matcher = self._compile(grammar, grown)
        with self._lock:
            self._made[grammar.source] = matcher
            self._used.add(matcher.compiled)
            nbytes = sum(each.compiled.nbytes for each in self._made.values())
            while len(self._made) > 1 and (len(self._made) > KEPT or nbytes > KEPT_BYTES):
                nbytes -= self._made.popitem(last=False)[1].compiled.nbytes
        return matcher.copy()

    def kept(self, grammar: Grammar) -> Matcher | None:
        """Return a Matcher at the start of a text if its grammar is compiled already, else None."""
        with self._lock:
            compiled = self._made.get(grammar.source)
            if compiled is None:
                return None
            self._made.move_to_end(grammar.source)
        matcher = compiled.copy()
        matcher.grammar = grammar
        return matcher

    def _compile(self, grammar: Grammar, grown: int) -> Matcher:
        from llguidance import LLMatcher  # noqa: PLC0415  (optional dependency)

        state = LLMatcher(self._tokenizer, grammar.source, log_level=0)
        if not state.is_error():
            matcher = Matcher(grammar, state, self._vocab_size, self._has_end, grown)
            if matcher.problem is not None:
                raise InputError(matcher.problem)
            if not (self._has_end or unpacked(matcher._first, self._vocab_size).any()):
                raise InputError(
                    f"{grammar.name}: it allows no text but the empty one, which a model without "
                    "an end token cannot end: allow a longer text"
                )
            return matcher
        grammar.check()  # names the place
        problem = state.get_error().splitlines()[0]
        raise InputError(f"{grammar.name}: it cannot be compiled: {problem}")


_latest: Callable[..., Vocabulary] = lru_cache(4)(Vocabulary)
_lock = Lock()


def vocabulary_of(encoding: Encoding, vocab_size: int, ends: frozenset[int]) -> Vocabulary:
    """Return the Vocabulary of a tokenizer: a new one, or one of the four latest ones.

    Creating one takes 0.2 s for 49,000 tokens and 1.1 s for 152,000, in which no other thread runs.
    """
    with _lock:
        return _latest(encoding, vocab_size, ends)


def _tokenizer(encoding: Encoding, vocab_size: int, ends: list[int]) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper  # noqa: PLC0415  (optional dependency)

    tokens = TokenizerWrapper(_Tokens(encoding, vocab_size, ends))
    # The tokens of a slice need no check in a state that allows the whole slice. "." of a pattern
    # excludes U+2028 and U+2029.
    slices = [each.replace("x7F", r"x7F\u2028\u2029") for each in LLTokenizer.general_slices()]
    return LLTokenizer(tokens, eos_token=ends, slices=slices)


class _Tokens:
    """The description of a vocabulary that llguidance reads."""

    bos_token_id = None

    def __init__(self, encoding: Encoding, vocab_size: int, ends: list[int]) -> None:
        self.eos_token_id = ends[0]
        self.tokens = [b""] * max(vocab_size, ends[-1] + 1)
        self._encoding = encoding
        names = encoding.special_tokens_set
        special = {special_id(encoding, name): name.encode() for name in names}
        for token, data in (*tokens_of(encoding), *special.items()):
            if token < vocab_size:
                self.tokens[token] = data
        self.special_token_ids = sorted({*special, *ends})
        self._known = lru_cache(TEXTS)(self._encode)

    def __call__(self, text: str) -> list[int]:
        """Return the first token ids of a text; none if the encoder adds or changes characters."""
        return self._known(text[:FORCED])

    def _encode(self, text: str) -> list[int]:
        ids = self._encoding.encode_ordinary(text)
        return ids if bytes_of_ids(self._encoding, ids) == text.encode() else []

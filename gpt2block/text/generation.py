"""Text generation: stop strings, streaming, several samples, and texts beyond the context.

An engine computes and samples the tokens; this module turns them into text. The text of a row does
not depend on the other rows of its batch.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args, overload

import numpy as np
from numpy.typing import NDArray

from gpt2block import notebook
from gpt2block.checks import check_choice, named_options, several
from gpt2block.config import check_count
from gpt2block.errors import Argument, InputError, shown
from gpt2block.run.model import Floats, Ids, ModelEngine, Start
from gpt2block.sampling import DEFAULT_TEMPERATURE, Sampling, chosen
from gpt2block.text import tokenizer
from gpt2block.text.encoding import Encoding, bytes_of_ids
from gpt2block.text.lookup import ReadLater, Tokenizer, of_inputs, of_outputs
from gpt2block.text.scheduling import RowScheduler

FinishReason = Literal["length", "stop", "context"]
Overflow = Literal["error", "truncate"]
Prompt = str | Sequence[int] | np.ndarray[tuple[int], np.dtype[np.integer[Any]]]
Prompts = Sequence[Prompt] | np.ndarray[tuple[int, int], np.dtype[np.integer[Any]]]
SHOWN_TEXT = 200  # characters of a text in `repr`
MOST_ROWS = 2**20  # prompts times samples of a call
BAD_WEIGHTS = (
    "the weights hold infinity or NaN, or numbers too large for their dtype: try ",
    Argument("dtype", "float32"),
)


@dataclass(frozen=True)
class Generation(ReadLater):
    """One continuation of a prompt.

    text: ends before the stop string or stop token; decoded when it is read, and "" without a
        tokenizer.
    tokens: all sampled tokens, including those of the stop.
    logprobs: log-probabilities of the tokens under the model's own logits, before penalty,
        temperature and filters.
    finish_reason: "length" after max_new_tokens, "stop" after a stop string or stop token,
        "context" when the context has no position left.
    seed: the seed of the draw; the same seed and options give the same text.
    """

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    seed: int

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


def generate(engine: ModelEngine, encoding: Tokenizer, prompts: Any, **options: Any) -> Any:
    """Continue a prompt (text or token ids), or each of a list of prompts.

    Returns a Generation for one prompt and a list for a list; with `samples` above 1 a list of
    Generations for each prompt. options: the keywords of Run. If prompts are ids, the encoding may
    be None; the text is then empty. With a Lookup, nothing is searched for ids until their text is
    read. An empty prompt starts from <|endoftext|> if the tokenizer has it.

    overflow="truncate" keeps the last n_ctx tokens of a prompt, and drops the older half of the
    context whenever it is full. Raises InputError for wrong arguments, for a longer prompt with
    overflow="error", and for logits that are NaN or infinite.
    """
    run = Run(engine, encoding, prompts, **options)
    run.finish()
    written = [row.result() for row in run.rows]
    samples = len(run.rows) // len(run.prompts)  # `samples` as a Python integer
    if samples == 1:
        return written[0] if run.single else written
    groups = [written[first : first + samples] for first in range(0, len(written), samples)]
    return groups[0] if run.single else groups


def stream(
    engine: ModelEngine, encoding: Tokenizer, prompt: Prompt, **options: Any
) -> Generator[str, None, Generation]:
    """Yield the text of `generate` for one prompt in pieces.

    Pieces hold whole characters and no part of a stop string; joined, they are the text. Without a
    tokenizer, or with a Lookup that has none at hand for ids, there are none. The generator returns
    the Generation. Raises as `generate` does; wrong arguments raise at the call.
    """
    run = Run(engine, of_inputs(encoding, prompt), prompt, **options)
    if not run.single:
        raise InputError("stream: expected one prompt, got a list")
    if len(run.rows) > 1:
        raise InputError(f"stream: expected one sample, got {len(run.rows)}: use generate")
    return _pieces(run)


def _pieces(run: Run) -> Generator[str, None, Generation]:
    for row in run:
        piece = row.take()
        if piece:
            yield piece
    return run.rows[0].result()


class Run:
    """The rows of one call: one for each sample of each prompt.

    Iterating generates the tokens, and yields the row of each new token until all rows have ended.
    The keywords are those of `GPT2.generate`.
    """

    @named_options()
    def __init__(
        self,
        engine: ModelEngine,
        encoding: Tokenizer,
        prompts: Any,
        *,
        max_new_tokens: int = 200,
        temperature: float = DEFAULT_TEMPERATURE,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        seed: int | None = None,
        sampling: Sampling | None = None,
        stop: str | Iterable[str] = (),
        stop_ids: Iterable[int] | None = None,
        samples: int = 1,
        overflow: Overflow = "error",
        rows_at_once: int | None = None,
    ) -> None:
        max_new_tokens = check_count("max_new_tokens", max_new_tokens)
        samples = check_count("samples", samples)
        if rows_at_once is not None:
            rows_at_once = check_count("rows_at_once", rows_at_once)
        check_choice("overflow", overflow, get_args(Overflow))
        strings = _stop_strings(stop)
        reader = encoding  # which may wait until a text is read
        encoding = of_inputs(reader, prompts)
        if encoding is None and strings:
            encoding = of_outputs(reader)
            if encoding is None:
                raise InputError(
                    "stop: this model has no tokenizer, so there is no text: use ",
                    Argument("stop_ids"),
                )
        config, V = engine.config, engine.config.vocab_size
        if stop_ids is None:
            ids = tokenizer.end_tokens(config, encoding)
        else:
            found = tokenizer.token_ids(None, several(stop_ids), V, "stop_ids")
            ids = frozenset(found.tolist())
        ends = _Ends(max_new_tokens, config.n_ctx, overflow == "truncate", strings, ids)
        sampling = chosen(
            sampling, seed, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
            repetition_penalty=repetition_penalty,
        )  # fmt: skip
        self._engine, self._encoding, self._ends = engine, encoding, ends
        self._rows_at_once = rows_at_once
        self.single, self.prompts = tokenizer.as_list(prompts, "prompt")
        _check_rows(len(self.prompts), samples)
        replace(sampling, sample=sampling.sample + samples - 1)  # raises if it is too large
        starts, end = [], tokenizer.end_of_text(encoding, V)
        for index, prompt in enumerate(self.prompts):
            name = "prompt" if self.single else f"prompt {index}"
            start = tokenizer.token_ids(encoding, prompt, V, name)
            starts.append(_fitting(start, name, end, ends))

        def row(index: int) -> Row:
            start, more = starts[index // samples], index % samples
            options = replace(sampling, sample=sampling.sample + more) if more else sampling
            return Row(start, options, reader, ends)

        self.rows = Rows(len(starts) * samples, row)
        self._longest = max(map(len, starts))  # prompt

    def __iter__(self) -> Iterator[Row]:
        return self._generate(each_token=True)

    def finish(self) -> None:
        """Generate all tokens; faster than iterating, as rows take many tokens at a time."""
        for _ in self._generate(each_token=False):
            pass

    def _generate(self, each_token: bool) -> Iterator[Row]:
        """Generate all tokens, and yield rows after they took new tokens: one each, or several."""
        at_once = self._rows_at_once
        slots = len(self.rows) if at_once is None else min(at_once, len(self.rows))
        n_ctx = min(self._ends.n_ctx, self._longest + self._ends.max_new_tokens - 1)
        decoding = self._engine.decode(slots, n_ctx, fewer=at_once is None)
        scheduler = RowScheduler(len(self.rows), decoding.slots)
        endings = _Endings(self._ends, self._encoding, self._engine.config.vocab_size)
        new = _NewTokens(decoding.slots, n_ctx, endings)
        while scheduler.busy:
            starts = [self.rows[row].start(slot) for slot, row in scheduler.place()]
            if starts:
                new.begin(starts)
                decoding.start(starts)
            slots_now, tokens, logprobs = decoding.next()
            new.add(slots_now, tokens, logprobs)
            stopped = []
            for slot in new.slots(each_token).tolist():
                row = self.rows[scheduler.row_of(slot)]
                row.add(*new.take(slot))
                yield row
                if row.finish_reason:
                    if new.left[slot]:
                        stopped.append(slot)
                    scheduler.release(slot)
                elif not new.left[slot]:
                    scheduler.release(slot, again=True)
            if stopped:
                decoding.stop(np.array(stopped, np.int32))


class _Endings:
    """Tokens that may end a row: stop ids, and those with the last byte of a stop string.

    The bytes of a token are looked up when it is sampled for the first time.
    """

    def __init__(self, ends: _Ends, encoding: Encoding | None, vocab_size: int) -> None:
        self._encoding = encoding
        self._bytes = {string.encode()[-1] for string in ends.stop}
        if any(string[-1] == "\ufffd" for string in ends.stop):  # the end of any invalid bytes
            self._bytes = set(range(256))
        self._may_end = np.zeros(vocab_size, bool)
        self._known = np.full(vocab_size, not ends.stop)
        stop_ids = list(ends.stop_ids)
        self._may_end[stop_ids] = self._known[stop_ids] = True

    def of(self, tokens: Ids) -> NDArray[np.bool_]:
        """Whether each of these tokens may end its row."""
        for token in set(tokens[~self._known[tokens]].tolist()) - {-1}:
            data = bytes_of_ids(self._encoding, [token]) if self._encoding is not None else b""
            self._may_end[token] = not self._bytes.isdisjoint(data)
            self._known[token] = True
        return self._may_end[tokens]


class _NewTokens:
    """The tokens of the slots that rows have not taken yet, in arrays."""

    def __init__(self, slots: int, n_ctx: int, endings: _Endings) -> None:
        self.left = np.zeros(slots, np.int64)  # tokens that each slot may still sample
        self._endings = endings
        self._count = np.zeros(slots, np.int64)  # tokens in the arrays
        self._tokens = np.empty((slots, n_ctx), np.int32)
        self._logprobs = np.empty((slots, n_ctx), np.float32)
        self._latest, self._ending = np.empty(0, np.int32), np.empty(0, bool)

    def begin(self, starts: Sequence[Start]) -> None:
        for start in starts:
            self.left[start.slot] = start.steps

    def add(self, slots: Ids, tokens: Ids, logprobs: Floats) -> None:
        """Store a token of each of these slots."""
        at = self._count[slots]
        self._tokens[slots, at] = tokens
        self._logprobs[slots, at] = logprobs
        self._count[slots] = at + 1
        self.left[slots] -= 1
        wrong = (tokens < 0) | np.isnan(logprobs)
        self._latest = slots
        self._ending = (self.left[slots] == 0) | wrong | self._endings.of(tokens)

    def slots(self, each_token: bool) -> Ids:
        """The slots whose tokens are to be taken: of the latest ones those that may end, or all."""
        return self._latest if each_token else self._latest[self._ending]

    def take(self, slot: int) -> tuple[list[int], list[float]]:
        """Remove and return the tokens of a slot and their log-probabilities."""
        count, self._count[slot] = self._count[slot], 0
        return self._tokens[slot, :count].tolist(), self._logprobs[slot, :count].tolist()


@dataclass(frozen=True)
class _Ends:
    """The conditions that end a row."""

    max_new_tokens: int
    n_ctx: int
    truncate: bool
    stop: tuple[str, ...]
    stop_ids: frozenset[int]


class Row:
    """One continuation while it is generated.

    Its tokens are decoded when the text is read, or at once where stop strings may end it.
    """

    def __init__(self, prompt: Ids, sampling: Sampling, encoding: Tokenizer, ends: _Ends) -> None:
        self.prompt, self.sampling = prompt, sampling
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.finish_reason: FinishReason | None = None
        self._encoding, self._ends = encoding, ends
        self._at_end_token = self._closed = False
        self._text = Text(ends.stop)
        self._decoded = 0  # tokens
        self._pieces: list[str] = []
        self._taken = 0

    def start(self, slot: int) -> Start:
        """The row's beginning in a slot, or, if its context is full, its newer half."""
        ids, drawn, seen = self.prompt, len(self.tokens), None
        if drawn:
            seen = np.concatenate([self.prompt, np.array(self.tokens, np.int32)])
            ids = seen[-max(1, self._ends.n_ctx // 2) :]
        steps = min(self._ends.max_new_tokens - drawn, self._ends.n_ctx - len(ids) + 1)
        return Start(slot, ids, self.sampling, steps, drawn, seen)

    def add(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Add tokens, the last of which may end the row."""
        if tokens[-1] < 0 or math.isnan(logprobs[-1]):
            wrong = "NaN" if tokens[-1] < 0 else "infinite"
            count = len(self.tokens) + len(tokens) - 1
            raise InputError(f"the logits are {wrong} after {count} new tokens: ", *BAD_WEIGHTS)
        self.tokens += tokens
        self.logprobs += logprobs
        self._at_end_token = tokens[-1] in self._ends.stop_ids
        if self._ends.stop:
            self._decode()
        reason: FinishReason | None = None
        if self._at_end_token or self._text.stopped:
            reason = "stop"
        elif len(self.tokens) == self._ends.max_new_tokens:
            reason = "length"
        elif self._full and not self._ends.truncate:
            reason = "context"
        if reason:
            self.close()
            self.finish_reason = "stop" if self._text.stopped else reason

    @property
    def _full(self) -> bool:
        """Whether the first context has no position left for the token sampled last."""
        return len(self.prompt) + len(self.tokens) > self._ends.n_ctx

    def close(self) -> None:
        """End the row: characters that were held back become text."""
        self._closed = True
        if self._ends.stop:
            self._decode()

    def _decode(self) -> None:
        """Turn the new tokens into text, without the one that ended the row."""
        end = len(self.tokens) - self._at_end_token
        data = self._bytes(self.tokens[self._decoded : end])
        self._pieces.append(self._text.add(data, final=self._closed))
        self._decoded = end

    def take(self) -> str:
        """The text added since the last call."""
        self._decode()
        piece = "".join(self._pieces[self._taken :])
        self._taken = len(self._pieces)
        return piece

    @property
    def text(self) -> str:
        """The text so far, without the characters held back."""
        self._decode()
        return "".join(self._pieces)

    def token_texts(self) -> list[str]:
        """The text of each token alone, with U+FFFD for incomplete characters."""
        return [self._bytes([token]).decode(errors="replace") for token in self.tokens]

    def result(self) -> Generation:
        """The Generation of an ended row."""
        assert self.finish_reason is not None
        tokens, logprobs = tuple(self.tokens), tuple(self.logprobs)
        found = Generation("", tokens, logprobs, self.finish_reason, self.sampling.seed)
        return found.later(text=lambda: self.text)

    def _bytes(self, tokens: Sequence[int]) -> bytes:
        encoding = of_outputs(self._encoding) if tokens else None
        return b"" if encoding is None else bytes_of_ids(encoding, tokens)


class Rows(Sequence[Row]):
    """The rows of a call; each row is created when it is first used."""

    def __init__(self, count: int, create: Callable[[int], Row]) -> None:
        self._count, self._create = count, create
        self._created: dict[int, Row] = {}

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        selected = range(self._count)[index]
        if isinstance(selected, range):
            return [self[i] for i in selected]
        if selected not in self._created:
            self._created[selected] = self._create(selected)
        return self._created[selected]


class Text:
    """Incremental decoder of UTF-8 that holds back the possible beginning of a stop string.

    The text ends before the stop string that is complete first, for any division of the bytes.
    """

    def __init__(self, stop: tuple[str, ...] = ()) -> None:
        self.stopped = False
        self._stop = stop
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def add(self, data: bytes, final: bool = False) -> str:
        """Decode `data` and return the text that is now certain to be before a stop string."""
        if self.stopped:
            return ""
        self._held += self._decoder.decode(data, final)
        found = [(at + len(s), at) for s in self._stop if (at := self._held.find(s)) >= 0]
        if found:
            self.stopped = True
            certain = min(found)[1]
        else:
            certain = len(self._held) - (0 if final else self._possible_stop())
        text, self._held = self._held[:certain], self._held[certain:]
        return text

    def _possible_stop(self) -> int:
        """Length of the longest suffix of the held text that is a prefix of a stop string."""
        return max(
            (
                size
                for s in self._stop
                for size in range(1, min(len(s), len(self._held) + 1))
                if self._held.endswith(s[:size])
            ),
            default=0,
        )


def _check_rows(prompts: int, samples: int) -> None:
    if prompts * samples > MOST_ROWS:
        what = "samples" if samples > 1 else "prompts"
        raise InputError(
            f"{what}: expected at most {MOST_ROWS:,} rows, one for each sample of each prompt, "
            f"got {prompts:,} prompts and {samples:,} samples: make several calls"
        )


def _stop_strings(stop: Any) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(several(stop))
    if not all(isinstance(string, str) and string for string in strings):
        raise InputError(f"stop: expected strings of at least one character, got {shown(stop)}")
    for string in strings:
        tokenizer.check_encodable("stop", string)
    return strings


def _fitting(ids: Ids, name: str, end: int | None, ends: _Ends) -> Ids:
    """The last n_ctx of `ids`, or <|endoftext|> for an empty prompt."""
    if not len(ids):
        if end is None:
            raise InputError(
                f"{name}: expected at least one token: there is no <|endoftext|> to start from"
            )
        return np.array([end], np.int32)
    if len(ids) > ends.n_ctx and not ends.truncate:
        raise InputError(
            f"{name}: {len(ids)} tokens, the model's context is {ends.n_ctx}: shorten it, or let ",
            Argument("overflow", "truncate"),
            f" keep the last {ends.n_ctx} and drop older ones when it is full",
        )
    return ids[-ends.n_ctx :]

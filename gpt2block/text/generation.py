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
from gpt2block.errors import InputError, shown
from gpt2block.run.model import Ids, ModelEngine
from gpt2block.sampling import DEFAULT_TEMPERATURE, Sampling, chosen
from gpt2block.text import tokenizer
from gpt2block.text.encoding import Encoding, bytes_of_id

FinishReason = Literal["length", "stop", "context"]
Overflow = Literal["error", "truncate"]
Prompt = str | Sequence[int] | NDArray[np.integer[Any]]
SHOWN_TEXT = 200  # characters of a text in `repr`
MOST_ROWS = 2**20  # prompts times samples of a call
BAD_WEIGHTS = (
    "the weights hold infinity or NaN, or numbers too large for their dtype: try dtype='float32'"
)


@dataclass(frozen=True)
class Generation:
    """One continuation of a prompt.

    text: ends before the stop string or stop token.
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


@named_options()
def generate(
    engine: ModelEngine,
    encoding: Encoding | None,
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
    rows_at_once: int = 16,
) -> Any:
    """Continue a prompt (text or token ids), or each of a list of prompts.

    Returns a Generation for one prompt and a list for a list; with `samples` above 1 a list of
    Generations for each prompt. The keywords are those of `GPT2.generate`. If prompts are ids, the
    encoding may be None; the text is then empty. An empty prompt starts from <|endoftext|> if the
    tokenizer has it.

    overflow="truncate" keeps the last n_ctx tokens of a prompt, and drops the older half of the
    context whenever it is full. Raises InputError for wrong arguments, for a longer prompt with
    overflow="error", and for logits that are NaN or infinite.
    """
    run = Run(
        engine,
        encoding,
        prompts,
        max_new_tokens=max_new_tokens,
        sampling=chosen(
            sampling, seed, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
            repetition_penalty=repetition_penalty,
        ),
        stop=stop,
        stop_ids=stop_ids,
        samples=samples,
        overflow=overflow,
        rows_at_once=rows_at_once,
    )  # fmt: skip
    for _ in run:
        pass
    written = [row.result() for row in run.rows]
    samples = len(run.rows) // len(run.prompts)  # `samples` as a Python integer
    if samples == 1:
        return written[0] if run.single else written
    groups = [written[first : first + samples] for first in range(0, len(written), samples)]
    return groups[0] if run.single else groups


@named_options(samples="expected one sample, got {}: use generate")
def stream(
    engine: ModelEngine,
    encoding: Encoding | None,
    prompt: Prompt,
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
    overflow: Overflow = "error",
) -> Generator[str, None, Generation]:
    """Yield the text of `generate` for one prompt in pieces.

    Pieces hold whole characters and no part of a stop string; joined, they are the text. The
    generator returns the Generation. Raises as `generate` does; wrong arguments raise at the call.
    """
    run = Run(
        engine,
        encoding,
        prompt,
        max_new_tokens=max_new_tokens,
        sampling=chosen(
            sampling, seed, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
            repetition_penalty=repetition_penalty,
        ),
        stop=stop,
        stop_ids=stop_ids,
        overflow=overflow,
    )  # fmt: skip
    if not run.single:
        raise InputError("stream: expected one prompt, got a list")
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
    """

    @named_options()
    def __init__(
        self,
        engine: ModelEngine,
        encoding: Encoding | None,
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
        rows_at_once: int = 16,
    ) -> None:
        max_new_tokens = check_count("max_new_tokens", max_new_tokens)
        samples = check_count("samples", samples)
        rows_at_once = check_count("rows_at_once", rows_at_once)
        check_choice("overflow", overflow, get_args(Overflow))
        strings = _stop_strings(stop, encoding)
        config, end = engine.config, tokenizer.end_of_text(encoding)
        if stop_ids is None:
            ids: tuple[int, ...] = () if end is None else (end,)
        else:
            found = tokenizer.token_ids(None, several(stop_ids), config.vocab_size, "stop_ids")
            ids = tuple(found.tolist())
        ends = _Ends(max_new_tokens, config.n_ctx, overflow == "truncate", strings, frozenset(ids))
        sampling = chosen(
            sampling, seed, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
            repetition_penalty=repetition_penalty,
        )  # fmt: skip
        self._engine, self.rows_at_once = engine, rows_at_once
        self.single, self.prompts = tokenizer.as_list(prompts, "prompt")
        _check_rows(len(self.prompts), samples)
        replace(sampling, sample=sampling.sample + samples - 1)  # raises if it is too large
        starts = []
        for index, prompt in enumerate(self.prompts):
            name = "prompt" if self.single else f"prompt {index}"
            start = tokenizer.token_ids(encoding, prompt, config.vocab_size, name)
            starts.append(_fitting(start, name, end, ends))

        def row(index: int) -> Row:
            start, more = starts[index // samples], index % samples
            options = replace(sampling, sample=sampling.sample + more) if more else sampling
            return Row(start, options, encoding, ends)

        self.rows = Rows(len(starts) * samples, row)

    def __iter__(self) -> Iterator[Row]:
        for first in range(0, len(self.rows), self.rows_at_once):
            yield from self._together(self.rows[first : first + self.rows_at_once])

    def _together(self, rows: list[Row]) -> Iterator[Row]:
        """Generate these rows in one batch until the last one has ended."""
        decoding = self._engine.decode([row.prompt for row in rows], [row.sampling for row in rows])
        while not all(row.finish_reason for row in rows):
            for index, row in enumerate(rows):
                if row.overflows:
                    decoding.restart(index, row.shorten())
            tokens, logprobs = decoding.next()
            for row, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
                unfinished = row.finish_reason is None
                row.add(token, logprob)
                if unfinished:
                    yield row


@dataclass(frozen=True)
class _Ends:
    """The conditions that end a row."""

    max_new_tokens: int
    n_ctx: int
    truncate: bool
    stop: tuple[str, ...]
    stop_ids: frozenset[int]


class Row:
    """One continuation while it is generated."""

    def __init__(
        self, prompt: Ids, sampling: Sampling, encoding: Encoding | None, ends: _Ends
    ) -> None:
        self.prompt, self.sampling = prompt, sampling
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.finish_reason: FinishReason | None = None
        self._encoding, self._ends = encoding, ends
        self._text = Text(ends.stop)
        self._pieces: list[str] = []
        self._taken = 0
        self._context = len(prompt)  # tokens in the context, including the last sampled one

    @property
    def overflows(self) -> bool:
        """Whether the context has no position left for the token sampled last."""
        return self._context > self._ends.n_ctx

    def shorten(self) -> Ids:
        """Drop the older half of a full context, and return the tokens that remain.

        One token remains of a row that has ended and only keeps its place in the batch.
        """
        self._context = size = 1 if self.finish_reason else max(1, self._ends.n_ctx // 2)
        newest = [*self.prompt[-size:].tolist(), *self.tokens[-size:]]
        return np.array(newest[-size:], np.int32)

    def add(self, token: int, logprob: float) -> None:
        """Add a token, which may end the row; tokens after the end are dropped."""
        self._context += 1
        if self.finish_reason:
            return
        if token < 0 or math.isnan(logprob):
            wrong = "NaN" if token < 0 else "infinite"
            raise InputError(
                f"the logits are {wrong} after {len(self.tokens)} new tokens: {BAD_WEIGHTS}"
            )
        self.tokens.append(token)
        self.logprobs.append(logprob)
        reason: FinishReason | None = None
        if token in self._ends.stop_ids:
            reason = "stop"
        else:
            self._pieces.append(self._text.add(self._bytes(token)))
            if self._text.stopped:
                reason = "stop"
            elif len(self.tokens) == self._ends.max_new_tokens:
                reason = "length"
            elif self.overflows and not self._ends.truncate:
                reason = "context"
        if reason:
            self.close()
            self.finish_reason = "stop" if self._text.stopped else reason

    def close(self) -> None:
        """End the row: characters that were held back become text."""
        self._pieces.append(self._text.add(b"", final=True))

    def take(self) -> str:
        """The text added since the last call."""
        piece = "".join(self._pieces[self._taken :])
        self._taken = len(self._pieces)
        return piece

    @property
    def text(self) -> str:
        """The text so far, without the characters held back."""
        return "".join(self._pieces)

    def token_texts(self) -> list[str]:
        """The text of each token alone, with U+FFFD for incomplete characters."""
        return [self._bytes(token).decode(errors="replace") for token in self.tokens]

    def result(self) -> Generation:
        """The Generation of an ended row."""
        assert self.finish_reason is not None
        tokens, logprobs = tuple(self.tokens), tuple(self.logprobs)
        return Generation(self.text, tokens, logprobs, self.finish_reason, self.sampling.seed)

    def _bytes(self, token: int) -> bytes:
        return b"" if self._encoding is None else bytes_of_id(self._encoding, token)


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


def _stop_strings(stop: Any, encoding: Encoding | None) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(several(stop))
    if not all(isinstance(string, str) and string for string in strings):
        raise InputError(f"stop: expected strings of at least one character, got {shown(stop)}")
    if strings and encoding is None:
        raise InputError("stop: this model has no tokenizer, so there is no text: use stop_ids")
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
            f"{name}: {len(ids)} tokens, the model's context is {ends.n_ctx}: shorten it, or let "
            f"overflow='truncate' keep the last {ends.n_ctx} and drop older ones when it is full"
        )
    return ids[-ends.n_ctx :]

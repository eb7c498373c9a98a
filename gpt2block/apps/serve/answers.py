"""Build completions in OpenAI's format: complete responses, and streams of chunks.

Source: OpenAI, "API reference" (The completion object, The chat completion chunk object).
"""

from __future__ import annotations

import asyncio
import codecs
import json
import math
import random
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from operator import add
from time import monotonic, perf_counter
from typing import Any, NamedTuple

from gpt2block.apps.serve.http_end import HttpEnd
from gpt2block.apps.serve.protocol import ApiError, JsonObject
from gpt2block.apps.serve.service import Piece
from gpt2block.engine.generation.sequences import EndReason, Sequences, TokenSequence, Tops
from gpt2block.engine.receipts import receipt_of
from gpt2block.files.tokenizers.encoding import Encoding, bytes_of_ids

REASONS = {"length": "length", "context": "length", "stop": "stop"}
MIN_LOGPROB = -9999.0  # log-probability that is sent in place of -inf


class Part(NamedTuple):
    """New tokens of a sequence, and the text that they add.

    finish_reason: as for Piece; "stop" if the text contains a stop string. error: as for Piece.
    """

    text: str
    tokens: list[int]
    logprobs: list[float]
    tops: list[Tops]
    drafted: list[bool]
    finish_reason: EndReason | None = None
    error: str | None = None

    def joined(self, other: Part) -> Part:
        """Return this part together with the next part of the same sequence."""
        both: Any = *map(add, self[:5], other[:5]), *other[5:]
        return Part(*both)


@dataclass
class Scored:
    """Tokens, their log-probabilities, and the most likely alternatives at each position.

    The first token of a text has None, because it has no log-probability.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    tops: list[Tops] = field(default_factory=list)

    def add(self, other: Scored | Part) -> None:
        self.tokens += other.tokens
        self.logprobs += other.logprobs
        self.tops += other.tops or [()] * len(other.tokens)


@dataclass
class AnswerChoice:
    """One choice of a response: a complete answer, its current state, or a part of it."""

    text: str = ""
    scored: Scored = field(default_factory=Scored)
    reason: str | None = None

    def add(self, part: Part) -> None:
        self.text += part.text
        self.scored.add(part)
        self.reason = REASONS.get(part.finish_reason or "")


class TextOffsets:
    """Computes each token's offset in the text of an answer, in characters, token by token."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def next(self, data: bytes) -> int:
        """Return the offset of the character that contains the first byte of the next token.

        If earlier bytes are no whole character, the first byte decides whether they become U+FFFD.
        """
        before = self._characters + len(self._decoder.decode(data[:1]))
        ended = data and not self._decoder.getstate()[0]  # whether the byte ends a character
        self._characters = before + len(self._decoder.decode(data[1:]))
        return before - 1 if ended else before


def _failure(part: Part) -> ApiError | None:
    """Return the error to send if a sequence failed or ran out of time, else None."""
    if part.finish_reason == "error":
        return ApiError(500, part.error or "an error")
    if part.finish_reason == "rule":
        return ApiError(400, part.error or "the rule is too complex")
    return late() if part.finish_reason == "deadline" else None


def late() -> ApiError:
    """Return the error to send to a client whose request exceeded its time limit."""
    problem = "the server did not finish it in time: try again later, or ask for less"
    return ApiError(504, problem, code="timeout")


class Answer:
    """The sequences of a request, with the text and tokens that the engine has computed.

    The engine computes copies of the sequences, without text. The sequences receive the tokens of
    these copies, and find stop strings in their text.
    """

    def __init__(self, engine: HttpEnd, sequences: Sequences) -> None:
        self.sequences, self._engine, self._number = sequences, engine, next(engine.numbers)
        self._parts: list[tuple[int, Part]] = []  # (sequence index, part that was not sent yet)
        self._growing: dict[int, int] = {}  # sequence index: index in _parts of its part to extend
        self._some = asyncio.Event()
        self._mistake: Exception | None = None  # an error that `pieces` raises

    async def submit(self, client: str = "", seconds: float = math.inf) -> None:
        """Queue the sequences. Raises ApiError if the queue is full, or the engine has failed.

        seconds: time limit of the sequences; infinity: no limit.
        """
        if self.sequences:
            deadline = None if seconds == math.inf else monotonic() + seconds
            await self._engine.submit(self._number, self, client, deadline)

    def put(self, index: int, piece: Piece) -> None:
        """Add the tokens of a piece to a sequence. `pieces` raises the exceptions."""
        try:
            self._add(index, piece)
            self._some.set()
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Let `pieces` raise an exception."""
        self._mistake = error
        self._some.set()

    def _add(self, index: int, piece: Piece) -> None:
        """Add the tokens of a piece to a sequence. Tokens after a stop string are dropped.

        A sequence's first part is sent separately. Its later parts are joined until they are sent.
        """
        sequence = self.sequences[index]
        if sequence.finish_reason:
            return
        sequence.reused, before = piece.reused, len(sequence.tokens)
        if piece.tokens:
            sequence.add_until_end(piece[:4])
        dropped = before + len(piece.tokens) - len(sequence.tokens)
        if sequence.finish_reason and (dropped or not piece.finish_reason):
            self._engine.stop(self._number, index, len(sequence.tokens))
        elif piece.finish_reason and not sequence.finish_reason:
            sequence.end_as(piece.finish_reason)
        part = Part(sequence.take(), *sequence.take_tokens(), sequence.finish_reason, piece.error)
        if index in self._growing:
            at = self._growing[index]
            part = self._parts[at][1].joined(part)
            self._parts[at] = index, part
        else:
            if before:
                self._growing[index] = len(self._parts)
            self._parts.append((index, part))

    async def pieces(self) -> AsyncGenerator[list[tuple[int, Part]], None]:
        """Yield lists of pairs (sequence index, its new Part) until all sequences have ended.

        Each list has the parts delivered since the previous list, up to a failure if there is one.
        """
        left = len(self.sequences)
        while left:
            await self._some.wait()
            self._some.clear()
            new, self._parts, self._growing = self._parts, [], {}
            for at, (index, part) in enumerate(new):
                if failure := _failure(part):
                    yield [*new[:at], (index, part._replace(finish_reason=None))]
                    raise failure
            yield new
            if self._mistake is not None:
                raise self._mistake
            left -= sum(part.finish_reason is not None for _, part in new)

    def close(self) -> None:
        """End the sequences of this request that have not ended yet."""
        self._engine.drop(self._number)


class Sent:
    """Converts completion objects to responses and events; a subclass, to those of another API."""

    identity: Mapping[str, object] | None = None  # argument of `receipt_of`; None: no receipts

    def facts(self, sequence: TokenSequence) -> dict[str, object]:
        """Return fields of a choice about its sequence, which has ended."""
        found: dict[str, object] = {"seed": sequence.sampling.seed}
        return found | ({"receipt": receipt_of(sequence, self.identity)} if self.identity else {})

    def choice(self, form: Form, index: int, choice: AnswerChoice, logprobs: bool) -> JsonObject:
        """Return a choice of the completion from which `whole` makes a response."""
        return form.choice(index, choice, logprobs)

    def whole(self, found: JsonObject) -> JsonObject:
        """Return the object of a complete response. found: the object of a completion."""
        return found

    def chunk(self, found: JsonObject) -> bytes:
        """Return the server-sent events of a chunk of a completion."""
        return server_sent(json.dumps(found))

    def end(self) -> bytes:
        """Return the last events of a stream."""
        return server_sent("[DONE]")

    def failure(self, error: ApiError) -> bytes:
        """Return the last events of a stream that fails."""
        return server_sent(json.dumps(error.body()))


class Form(ABC):
    """Base class of response formats. encoding: tokenizer; None for a model without tokenizer.

    unwritten: as in TokenSequence.
    """

    prefix, whole, chunk = "", "", ""

    def __init__(
        self, model: str, encoding: Encoding | None, unwritten: Collection[int] = ()
    ) -> None:
        self.id = f"{self.prefix}-{random.getrandbits(128):032x}"
        self.model, self._encoding, self._created = model, encoding, int(time.time())
        self._unwritten = unwritten

    def object(self, kind: str, choices: list[JsonObject], **more: object) -> JsonObject:
        head = {"id": self.id, "object": kind, "created": self._created, "model": self.model}
        return {**head, "choices": choices, **more}

    @abstractmethod
    def choice(self, index: int, choice: AnswerChoice, logprobs: bool) -> JsonObject:
        """Return a complete response. logprobs: whether it includes tokens' log-probabilities."""

    @abstractmethod
    def deltas(
        self, index: int, part: AnswerChoice, logprobs: bool, offsets: TextOffsets
    ) -> list[JsonObject]:
        """Return one or more chunks of a stream. offsets: TextOffsets after the previous chunks."""

    def is_empty(self, delta: JsonObject) -> bool:
        """Return whether a chunk without log-probabilities has no content."""
        return delta.get("delta") == {} and delta["finish_reason"] is None

    def usage_details(self, sequences: Sequences) -> JsonObject:
        """Return fields of the usage object of answers, whose sequences have ended."""
        return {}

    def first(self, index: int) -> JsonObject | None:
        """Return the chunk that a stream sends before the first tokens of a choice, or None."""
        return None

    def with_prompts(self, found: JsonObject, prompts: Mapping[int, list[int]]) -> None:
        """Add prompts' token ids to a response, as vLLM does. prompts: {index of a choice: ids}.

        Each choice of /v1/completions has the token ids of its own prompt.
        """
        for choice in found["choices"]:
            if choice["index"] in prompts:
                choice["prompt_token_ids"] = prompts[choice["index"]]

    def token(self, token: int) -> str:
        """Return a token's text, or, for bytes that are not complete UTF-8, OpenAI's notation."""
        data = self.bytes_of(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def bytes_of(self, token: int) -> bytes:
        return b"" if self._encoding is None else bytes_of_ids(self._encoding, [token])


class TextForm(Form):
    """The format of /v1/completions."""

    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def choice(self, index: int, choice: AnswerChoice, logprobs: bool) -> JsonObject:
        return self.deltas(index, choice, logprobs, TextOffsets())[0]

    def deltas(
        self, index: int, part: AnswerChoice, logprobs: bool, offsets: TextOffsets
    ) -> list[JsonObject]:
        found = self._logprobs(part.scored, offsets) if logprobs else None
        text, reason = part.text, part.reason
        return [{"index": index, "text": text, "logprobs": found, "finish_reason": reason}]

    def _logprobs(self, scored: Scored, offsets: TextOffsets) -> JsonObject:
        """Return the logprobs object; alternatives, if requested, include the token itself."""
        texts = [self.token(token) for token in scored.tokens]
        alternatives: list[dict[str, float] | None] = []
        for token, logprob, top in zip(scored.tokens, scored.logprobs, scored.tops, strict=True):
            shown = {self.token(id): finite(each) for id, each in top}
            if top and logprob is not None:
                shown.setdefault(self.token(token), finite(logprob))
            alternatives.append(shown or None)
        return {
            "tokens": texts,
            "token_logprobs": [None if each is None else finite(each) for each in scored.logprobs],
            "top_logprobs": alternatives if any(alternatives) else None,
            "text_offset": [
                offsets.next(b"" if token in self._unwritten else self.bytes_of(token))
                for token in scored.tokens
            ],
        }


class ChatForm(Form):
    """The format of /v1/chat/completions."""

    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, choice: AnswerChoice, logprobs: bool) -> JsonObject:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        return self._filled({"index": index, "message": message}, choice, logprobs)

    def deltas(
        self, index: int, part: AnswerChoice, logprobs: bool, offsets: TextOffsets
    ) -> list[JsonObject]:
        new, part = self._read(index, part, part.reason is not None)
        deltas = [self._delta(index, each) for each in new or [{}]]
        deltas[0]["logprobs"] = self._logprobs(part.scored) if logprobs else None
        deltas[-1]["finish_reason"] = part.reason
        return deltas

    def _read(
        self, index: int, part: AnswerChoice, final: bool
    ) -> tuple[list[JsonObject], AnswerChoice]:
        """Return what a part adds to the message, in order, and the part with its end's reason.

        final: whether the answer ends with this part.
        """
        return [{"content": part.text}] if part.text else [], part

    def first(self, index: int) -> JsonObject:
        return self._delta(index, {"role": "assistant", "content": ""})

    def _delta(self, index: int, delta: JsonObject) -> JsonObject:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _filled(self, said: JsonObject, choice: AnswerChoice, logprobs: bool) -> JsonObject:
        found = self._logprobs(choice.scored) if logprobs else None
        return {**said, "logprobs": found, "finish_reason": choice.reason}

    def with_prompts(self, found: JsonObject, prompts: Mapping[int, list[int]]) -> None:
        """Add the prompt's ids to the response once, because all choices have the same prompt."""
        if 0 in prompts:
            found["prompt_token_ids"] = prompts[0]

    def _logprobs(self, scored: Scored) -> JsonObject:
        of_tokens = zip(scored.tokens, scored.logprobs, scored.tops, strict=True)
        content = [
            {**self._entry(token, logprob), "top_logprobs": [self._entry(*each) for each in top]}
            for token, logprob, top in of_tokens
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float | None) -> JsonObject:
        likely = None if logprob is None else finite(logprob)
        return {"token": self.token(token), "logprob": likely, "bytes": [*self.bytes_of(token)]}


def finite(logprob: float) -> float:
    """Return `logprob`, but MIN_LOGPROB for -inf, which JSON cannot represent, as OpenAI does."""
    return max(logprob, MIN_LOGPROB)


async def whole(answer: Answer, choices: Sequence[AnswerChoice]) -> None:
    """Wait until all sequences have ended; return an AnswerChoice per sequence."""
    async with aclosing(answer.pieces()) as pieces:
        async for new in pieces:
            for index, part in new:
                choices[index].add(part)


async def streamed(
    answer: Answer,
    form: Form,
    echoes: Sequence[AnswerChoice],
    logprobs: bool,
    usage_of: Callable[[int], JsonObject] | None,
    prompts: Mapping[int, list[int]] | None = None,
    drafts: bool = False,
    observe: Callable[[float], None] = lambda seconds: None,
    failed: Callable[[Exception], ApiError] = lambda error: ApiError(500, repr(error)),
    sent: Sent = Sent(),  # noqa: B008  (it has no state)
) -> AsyncIterator[bytes]:
    """Yield server-sent events; events of tokens that arrive together are sent together.

    echoes: texts with which the answers begin. usage_of: returns the usage object for a last chunk,
    from the number of new tokens; None: no such chunk. prompts: token ids of the prompt of each
    choice, for the first event of the choice; None: no token ids. drafts: whether events with token
    ids tell which were drafted. observe: called with the seconds between two times at which events
    are sent. failed: converts an exception other than ApiError to the error for the client. sent:
    converts objects to events.
    """
    more: JsonObject = {} if usage_of is None else {"usage": None}
    untold = dict(prompts or {})

    def event(*choices: JsonObject, **changed: object) -> bytes:
        chunk = form.object(form.chunk, list(choices), **{**more, **changed})
        first = [each["index"] for each in choices if each["index"] in untold]
        form.with_prompts(chunk, {index: untold.pop(index) for index in first})
        return sent.chunk(chunk)

    def deltas(
        index: int, part: AnswerChoice, new: list[int], drafted: list[bool]
    ) -> list[JsonObject]:
        chunk = form.deltas(index, part, logprobs, offsets[index])
        if part.reason and answer.sequences:
            chunk[-1] |= sent.facts(answer.sequences[index])
        if prompts is not None:
            chunk[0]["token_ids"] = new
            if drafts:
                chunk[0]["guessed"] = drafted
        return chunk

    offsets, count, last = [TextOffsets() for _ in echoes], 0, 0.0
    detailed = logprobs or prompts is not None  # whether to send also tokens without text
    try:
        for index, echo in enumerate(echoes):
            if beginning := form.first(index):
                yield event(beginning)
            if echo.text:
                yield event(*deltas(index, echo, [], []))
        async with aclosing(answer.pieces()) as pieces:
            async for new in pieces:
                count += sum(len(part.tokens) for _, part in new)
                parts = [
                    each
                    for index, part in new
                    if part.text or part.finish_reason or (part.tokens and detailed)
                    for each in deltas(index, _choice(part), part.tokens, part.drafted)
                ]
                chunk = [event(part) for part in parts if detailed or not form.is_empty(part)]
                if chunk:
                    yield b"".join(chunk)
                    now = perf_counter()
                    if last:
                        observe(now - last)
                    last = now
        if usage_of is not None:
            yield event(usage=usage_of(count))
        yield sent.end()
    except Exception as error:
        yield sent.failure(error if isinstance(error, ApiError) else failed(error))


def server_sent(data: str, name: str = "") -> bytes:
    """Return a server-sent event. data: JSON on a single line. name: of the event, if it has one.

    Source: WHATWG, "HTML" (Server-sent events).
    """
    first = f"event: {name}\n" if name else ""
    return f"{first}data: {data}\n\n".encode()


def _choice(part: Part) -> AnswerChoice:
    """Convert a Part to an AnswerChoice, a part of an answer."""
    choice = AnswerChoice()
    choice.add(part)
    return choice


def usage(prompt: int, completion: int, **details: object) -> JsonObject:
    """Return OpenAI's usage object. details: its further fields."""
    total = prompt + completion
    told = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total}
    return {**told, **details}

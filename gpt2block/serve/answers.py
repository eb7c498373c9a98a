"""Completions as OpenAI's clients expect them: whole, and as streams of chunks.

Source: OpenAI, "API reference" (The completion object, The chat completion chunk object).
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from gpt2block.serve.protocol import ApiError
from gpt2block.serve.service import Failed, Full, Piece, Service
from gpt2block.text.encoding import Encoding, bytes_of_ids
from gpt2block.text.rows import Row

REASONS = {"length": "length", "context": "length", "stop": "stop"}
RETRY_AFTER = "1"  # seconds, of a request that found the queue full


@dataclass(frozen=True)
class Scored:
    """Log-probabilities of tokens, and of the most likely ones in the place of each, by id."""

    logprobs: Sequence[float | None]
    top: Sequence[dict[int, float]]


@dataclass
class Choice:
    """One answer, as far as it came. echo: what the text begins with."""

    echo: str = ""
    text: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: str | None = None


UsageOf = Callable[[int], dict[str, Any]]  # of the number of new tokens


class Answer:
    """The rows of a request in the service. Raises ApiError if it takes no more rows."""

    def __init__(self, service: Service, rows: Sequence[Row]) -> None:
        self.rows, self._service = rows, service
        self._pieces: asyncio.Queue[tuple[int, Piece]] = asyncio.Queue()
        deliver = [partial(self._put, index) for index in range(len(rows))]
        try:
            service.submit(rows, deliver)
        except Full:
            problem = "the server has as many requests as it takes: try again later"
            raise ApiError(503, problem, code="overloaded") from None
        except Failed as error:
            raise ApiError(500, str(error)) from None

    def _put(self, index: int, piece: Piece) -> None:
        self._pieces.put_nowait((index, piece))

    async def pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        """The pieces of all rows, with their indices, until all have ended."""
        left = len(self.rows)
        while left:
            index, piece = await self._pieces.get()
            if piece.finish_reason == "error":
                raise ApiError(500, piece.error or "an error")
            left -= piece.finish_reason is not None
            yield index, piece

    def close(self) -> None:
        """End rows that run or wait."""
        self._service.cancel(self.rows)


class Form(ABC):
    """How the objects of an endpoint look. encoding: None for a model without a tokenizer."""

    prefix, whole, chunk = "", "", ""

    def __init__(self, model: str, encoding: Encoding | None) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._model, self._encoding, self._created = model, encoding, int(time.time())

    def object(self, kind: str, choices: list[Any], **more: Any) -> dict[str, Any]:
        head = {"id": self.id, "object": kind, "created": self._created, "model": self._model}
        return {**head, "choices": choices, **more}

    @abstractmethod
    def choice(self, index: int, choice: Choice, scored: Scored | None) -> dict[str, Any]:
        """A whole answer. scored: of its tokens; None where they are not wanted."""

    @abstractmethod
    def delta(self, index: int, piece: Piece, scored: Scored | None, offset: int) -> dict[str, Any]:
        """A part of an answer. offset: characters before it."""

    def first(self, index: int) -> dict[str, Any] | None:
        """What comes before the first part."""
        return None

    def token(self, token: int) -> str:
        """Its text; of one that is no whole characters its bytes, as OpenAI writes them."""
        data = self.bytes_of(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def bytes_of(self, token: int) -> bytes:
        return b"" if self._encoding is None else bytes_of_ids(self._encoding, [token])


class TextForm(Form):
    """/v1/completions."""

    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def choice(self, index: int, choice: Choice, scored: Scored | None) -> dict[str, Any]:
        logprobs = None
        if scored is not None:
            logprobs = self._logprobs(choice.tokens, scored, 0)
        text = choice.echo + "".join(choice.text)
        return self._choice(index, text, logprobs, choice.reason)

    def delta(self, index: int, piece: Piece, scored: Scored | None, offset: int) -> dict[str, Any]:
        logprobs = None if scored is None else self._logprobs(piece.tokens, scored, offset)
        reason = REASONS.get(piece.finish_reason or "")
        return self._choice(index, piece.text, logprobs, reason)

    def _choice(self, index: int, text: str, logprobs: Any, reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, tokens: Sequence[int], scored: Scored, offset: int) -> dict[str, Any]:
        texts, offsets = [self.token(token) for token in tokens], []
        for token in tokens:
            offsets.append(offset)
            offset += len(self.bytes_of(token).decode(errors="ignore"))
        top = [{self.token(id): logprob for id, logprob in each.items()} for each in scored.top]
        found: list[Any] = [each or None for each in top]
        return {
            "tokens": texts,
            "token_logprobs": list(scored.logprobs),
            "top_logprobs": found if any(found) else None,
            "text_offset": offsets,
        }


class ChatForm(Form):
    """/v1/chat/completions."""

    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, choice: Choice, scored: Scored | None) -> dict[str, Any]:
        message = {"role": "assistant", "content": "".join(choice.text), "refusal": None}
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(choice.tokens, scored),
            "finish_reason": choice.reason,
        }

    def delta(self, index: int, piece: Piece, scored: Scored | None, offset: int) -> dict[str, Any]:
        return {
            "index": index,
            "delta": {"content": piece.text} if piece.text else {},
            "logprobs": self._logprobs(piece.tokens, scored),
            "finish_reason": REASONS.get(piece.finish_reason or ""),
        }

    def first(self, index: int) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _logprobs(self, tokens: Sequence[int], scored: Scored | None) -> dict[str, Any] | None:
        if scored is None:
            return None
        content = [
            {**self._entry(token, logprob), "top_logprobs": [self._entry(*t) for t in top.items()]}
            for token, logprob, top in zip(tokens, scored.logprobs, scored.top, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        return {"token": self.token(token), "logprob": logprob, "bytes": [*self.bytes_of(token)]}


def plain(logprobs: Sequence[float]) -> Scored:
    """Without alternatives."""
    return Scored(logprobs, [{}] * len(logprobs))


async def whole(answer: Answer, choices: Sequence[Choice]) -> None:
    """Wait for all rows, each of which becomes a choice."""
    async with aclosing(answer.pieces()) as pieces:
        async for index, piece in pieces:
            choice = choices[index]
            choice.text.append(piece.text)
            choice.tokens += piece.tokens
            choice.logprobs += piece.logprobs
            choice.reason = REASONS.get(piece.finish_reason or "")


async def streamed(
    answer: Answer, form: Form, echoes: Sequence[str], logprobs: bool, usage_of: UsageOf | None
) -> AsyncIterator[str]:
    """The data of server-sent events. usage_of: None without a chunk of usage at the end."""
    more: dict[str, Any] = {} if usage_of is None else {"usage": None}

    def event(*choices: dict[str, Any], **changed: Any) -> str:
        return json.dumps(form.object(form.chunk, list(choices), **{**more, **changed}))

    lengths, count = [0] * len(echoes), 0
    for index, echo in enumerate(echoes):
        if beginning := form.first(index):
            yield event(beginning)
        if echo:
            piece = Piece(echo, [], [])
            yield event(form.delta(index, piece, plain([]) if logprobs else None, 0))
        lengths[index] = len(echo)
    try:
        async with aclosing(answer.pieces()) as pieces:
            async for index, piece in pieces:
                count += len(piece.tokens)
                scored = plain(piece.logprobs) if logprobs else None
                if piece.text or piece.finish_reason or logprobs:
                    yield event(form.delta(index, piece, scored, lengths[index]))
                lengths[index] += len(piece.text)
    except ApiError as error:
        yield json.dumps(error.body)
        return
    if usage_of is not None:
        yield event(usage=usage_of(count))
    yield "[DONE]"


def usage(prompt: int, completion: int, cached: int | None = None) -> dict[str, Any]:
    """cached: tokens of the prompt that were not computed again; None: none ever are."""
    total = prompt + completion
    told = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total}
    return told if cached is None else {**told, "prompt_tokens_details": {"cached_tokens": cached}}

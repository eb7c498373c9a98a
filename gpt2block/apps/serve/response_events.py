"""Convert chat completions, whole or in chunks, to responses and events of /v1/responses.

Source: OpenAI, "API reference" (The response object, Streaming events).
"""

from __future__ import annotations

import json
import random
import time
from abc import ABC, abstractmethod

from gpt2block.apps.serve.answers import AnswerChoice, Form, Sent, TextOffsets, server_sent
from gpt2block.apps.serve.protocol import ApiError, JsonObject
from gpt2block.apps.serve.responses import ResponsesRequest

MAX_OUTPUT_TOKENS = "max_output_tokens"  # reason of an answer that is incomplete
# Names of Response's fields that repeat the request's → values in place of null
REPEATED: JsonObject = {
    "instructions": None, "max_output_tokens": None, "metadata": {}, "tools": [], "user": None,
    "temperature": 1.0, "top_p": 1.0, "parallel_tool_calls": True, "tool_choice": "auto",
    "top_logprobs": 0,
}  # fmt: skip
# Fields of Response that are always null, because this server does not support their purpose
NULL = ("error", "incomplete_details", "usage", "completed_at", "conversation", "max_tool_calls",
        "previous_response_id", "prompt", "reasoning")  # fmt: skip


class EventSent(Sent, ABC):
    """Base class of conversions of a chat completion to the object and the events of another API.

    A whole completion is converted as the chunks of a stream, which end with the same object.
    """

    result: JsonObject  # the object; complete after `_end`

    @abstractmethod
    def _take(self, chunk: JsonObject) -> list[JsonObject]:
        """Return the events of a chunk of the chat completion."""

    @abstractmethod
    def _end(self) -> list[JsonObject]:
        """Return the last events of a stream."""

    def choice(self, form: Form, index: int, choice: AnswerChoice, logprobs: bool) -> JsonObject:
        return {"deltas": form.deltas(index, choice, logprobs, TextOffsets())}

    def whole(self, answer: JsonObject) -> JsonObject:
        for choice in answer["choices"]:
            self._take({**answer, "choices": choice["deltas"]})
        self._end()
        return self.result

    def chunk(self, found: JsonObject) -> bytes:
        return self._written(self._take(found))

    def end(self) -> bytes:
        return self._written(self._end())

    def _written(self, events: list[JsonObject]) -> bytes:
        return b"".join(server_sent(json.dumps(event), event["type"]) for event in events)


class ResponseSent(EventSent):
    """Converts the chat completion of a request to a response, or its chunks to events."""

    def __init__(self, request: ResponsesRequest, model: str) -> None:
        self.result = {
            **{"id": _id("resp"), "object": "response", "created_at": int(time.time())},
            **{"status": "in_progress", "background": False, "model": model, "output": []},
            "text": {"format": (request.text and request.text.format) or {"type": "text"},
                     "verbosity": "medium"},
            "truncation": "disabled",
            **dict.fromkeys(NULL),
            **{name: default if (value := getattr(request, name)) is None else value
               for name, default in REPEATED.items()},
        }  # fmt: skip
        self._output: list[JsonObject] = []  # items, of which only the latest is in progress
        self._calls: dict[int, int] = {}  # index of a tool call → its place in the output
        self._logprobs: list[JsonObject] = []  # tokens whose text comes with a later token
        self._reason: str | None = None  # the choice's finish_reason
        self._usage: JsonObject | None = None
        self._sequence = 0  # number of events so far

    def failure(self, error: ApiError) -> bytes:
        """Return the last event of a stream that fails."""
        events = self._begin()
        self.result |= {
            "status": "failed",
            "error": {"code": "server_error", "message": error.message},
            "output": [{**each, "status": "incomplete"} if each["status"] == "in_progress" else each
                       for each in self._output],
        }  # fmt: skip
        return self._written([*events, self._of_response("failed")])

    def _written(self, events: list[JsonObject]) -> bytes:
        first = self._sequence
        self._sequence += len(events)
        return super()._written(
            [{**event, "sequence_number": first + n} for n, event in enumerate(events)]
        )

    def _begin(self) -> list[JsonObject]:
        """Return the first two events of a stream; none if they were returned before."""
        return [] if self._sequence else [*map(self._of_response, ("created", "in_progress"))]

    def _take(self, chunk: JsonObject) -> list[JsonObject]:
        events = self._begin()
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk["choices"]:
            self._logprobs += (choice.get("logprobs") or {}).get("content") or []
            if thought := choice["delta"].get("reasoning_content"):
                events += self._thought(thought)
            if text := choice["delta"].get("content"):
                events += self._text(text)
            for call in choice["delta"].get("tool_calls") or ():
                events += self._call(call)
            self._reason = choice["finish_reason"] or self._reason
        return events

    def _text(self, text: str) -> list[JsonObject]:
        """Return the events of more text, with the log-probabilities of the tokens so far."""
        events = list[JsonObject]()
        if not self._in_message:
            item = {"id": _id("msg"), "type": "message", "role": "assistant", "content": []}
            events += self._open(item)
            self._output[-1]["content"] = [_part()]
            events.append(self._of_item("content_part.added", content_index=0, part=_part()))
        (part,) = self._output[-1]["content"]
        part["text"] += text
        part["logprobs"] += self._logprobs
        if text or self._logprobs:
            told = {"delta": text, "logprobs": _without_bytes(self._logprobs)}
            events.append(self._of_item("output_text.delta", content_index=0, **told))
        self._logprobs = []
        return events

    def _thought(self, text: str) -> list[JsonObject]:
        """Return the events of more thinking."""
        events = list[JsonObject]()
        if not self._output or self._output[-1]["type"] != "reasoning":
            item: JsonObject = {"id": _id("rs"), "type": "reasoning", "summary": []}
            events += self._open({**item, "content": []})
            self._output[-1]["content"] = [{"type": "reasoning_text", "text": ""}]
        self._output[-1]["content"][0]["text"] += text
        return [*events, self._of_item("reasoning_text.delta", content_index=0, delta=text)]

    def _call(self, call: JsonObject) -> list[JsonObject]:
        """Return the events of a part of a tool call, which begins or continues a function call."""
        events, index, function = list[JsonObject](), call["index"], call["function"]
        if index not in self._calls:
            events += self._open({"id": _id("fc"), "type": "function_call", "call_id": call["id"],
                                  "name": function["name"], "arguments": ""})  # fmt: skip
            self._calls[index] = len(self._output) - 1
        if self._calls[index] != len(self._output) - 1:
            raise ValueError(f"tool call {index}: expected its parts before the next item")
        if more := function.get("arguments"):
            self._output[-1]["arguments"] += more
            events.append(self._of_item("function_call_arguments.delta", delta=more))
        return events

    def _end(self) -> list[JsonObject]:
        status = "incomplete" if self._reason == "length" else "completed"
        rest = not self._output or (self._in_message and self._logprobs)
        events = [*(self._text("") if rest else ()), *self._close(status)]
        self.result |= {
            "status": status,
            "incomplete_details": None if status == "completed" else {"reason": MAX_OUTPUT_TOKENS},
            "completed_at": int(time.time()) if status == "completed" else None,
            "output": self._output,
            "usage": self._usage and _usage(self._usage),
        }
        return [*events, self._of_response(status)]

    @property
    def _in_message(self) -> bool:
        return bool(self._output) and self._output[-1]["type"] == "message"

    def _open(self, item: JsonObject) -> list[JsonObject]:
        """Close the item in progress, and append a new item. Return the events of both."""
        events = self._close("completed")
        self._output.append({**item, "status": "in_progress"})
        return [*events, self._of_item("output_item.added", item={**self._output[-1]})]

    def _close(self, status: str) -> list[JsonObject]:
        """End the item in progress. Return its last events."""
        if not self._output:
            return []
        item = self._output[-1]
        item["status"] = status
        events = [self._of_item("output_item.done", item={**item})]
        if item["type"] == "function_call":
            done = "function_call_arguments.done"
            return [self._of_item(done, arguments=item["arguments"]), *events]
        (part,) = item["content"]
        if item["type"] == "reasoning":
            told = {"content_index": 0, "text": part["text"]}
            return [self._of_item("reasoning_text.done", **told), *events]
        told = {"text": part["text"], "logprobs": _without_bytes(part["logprobs"])}
        return [
            self._of_item("output_text.done", content_index=0, **told),
            self._of_item("content_part.done", content_index=0, part={**part}),
            *events,
        ]

    def _of_response(self, kind: str) -> JsonObject:
        return {"type": f"response.{kind}", "response": {**self.result}}

    def _of_item(self, kind: str, **more: object) -> JsonObject:
        """Return an event that contains the item in progress, or else the item's id."""
        named = {} if "item" in more else {"item_id": self._output[-1]["id"]}
        index = len(self._output) - 1
        return {"type": f"response.{kind}", "output_index": index, **named, **more}


def _part() -> JsonObject:
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


def _id(prefix: str) -> str:
    return f"{prefix}_{random.getrandbits(192):048x}"


def _without_bytes(logprobs: list[JsonObject]) -> list[JsonObject]:
    """Return log-probabilities as events have them: without the bytes of tokens."""
    return [
        {"token": each["token"], "logprob": each["logprob"],
         "top_logprobs": [{"token": top["token"], "logprob": top["logprob"]}
                          for top in each["top_logprobs"]]}
        for each in logprobs
    ]  # fmt: skip


def _usage(usage: JsonObject) -> JsonObject:
    """Return a usage object of responses for the usage object of a chat completion."""
    cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage.get("completion_tokens_details", {"reasoning_tokens": 0}),
        "total_tokens": usage["total_tokens"],
    }

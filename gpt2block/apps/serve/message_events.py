"""Convert chat completions, whole or in chunks, to messages and events of /v1/messages.

Source: Anthropic, "API reference" (Messages); "Streaming messages".
"""

from __future__ import annotations

import json
import random
from typing import Literal

from pydantic_core import from_json

from gpt2block.apps.serve.answers import server_sent, usage
from gpt2block.apps.serve.protocol import ApiError, JsonObject
from gpt2block.apps.serve.response_events import EventSent
from gpt2block.engine.generation.sequences import TokenSequence

# Field of a block → type of its deltas, and the field of a delta that has a text
DELTAS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking"),
          "input": ("input_json_delta", "partial_json")}  # fmt: skip
# finish_reason of a choice → stop_reason of a message, unless a stop string or the context ends it
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
EMPTY: dict[str, JsonObject] = {"text": {"text": ""}, "thinking": {"thinking": "", "signature": ""}}


class MessageSent(EventSent):
    """Converts the chat completion of a request to a message, or its chunks to events.

    count: number of tokens of the prompt.
    """

    def __init__(self, model: str, count: int) -> None:
        self.result = {
            **{"id": f"msg_{random.getrandbits(192):048x}", "type": "message", "role": "assistant"},
            **{"model": model, "content": [], "stop_reason": None, "stop_sequence": None},
            "usage": _usage(usage(count, 0)),
        }
        self._content: list[JsonObject] = self.result["content"]
        self._begun = self._open = False  # whether the stream has begun; a block is in progress
        self._reason = ""  # the choice's finish_reason
        self._sequence: TokenSequence | None = None  # the sequence after its end

    def facts(self, sequence: TokenSequence) -> dict[str, object]:
        self._sequence = sequence
        return {}

    def whole(self, answer: JsonObject) -> JsonObject:
        """Return the message.

        An input that is cut has the members so far, as the package anthropic reads it in a stream.
        """
        message = super().whole(answer)
        for block in self._content:
            if "input" in block:
                block["input"] = from_json(block["input"] or "{}", allow_partial=True)
        return message

    def failure(self, error: ApiError) -> bytes:
        return server_sent(json.dumps(error.body(openai=False)), "error")

    def _take(self, chunk: JsonObject) -> list[JsonObject]:
        started = {"type": "message_start", "message": {**self.result, "content": []}}
        events, self._begun = [] if self._begun else [started], True
        if chunk.get("usage"):
            self.result["usage"] = _usage(chunk["usage"])
        for choice in chunk["choices"]:
            events += self._text("thinking", choice["delta"].get("reasoning_content"))
            events += self._text("text", choice["delta"].get("content"))
            for call in choice["delta"].get("tool_calls") or ():
                events += self._call(call)
            self._reason = choice["finish_reason"] or self._reason
        return events

    def _text(self, kind: Literal["text", "thinking"], more: str | None) -> list[JsonObject]:
        """Return the events of more text of a kind."""
        if not more:
            return []
        open = self._open and self._content[-1]["type"] == kind
        events = [] if open else self._start({"type": kind, **EMPTY[kind]})
        return [*events, self._add(kind, more)]

    def _call(self, call: JsonObject) -> list[JsonObject]:
        """Return the events of a part of a tool call, which begins or continues a block."""
        events, function = list[JsonObject](), call["function"]
        if "id" in call:
            block = {"type": "tool_use", "id": call["id"], "name": function["name"], "input": ""}
            events += self._start(block)
        if more := function.get("arguments"):
            events.append(self._add("input", more))
        return events

    def _start(self, block: JsonObject) -> list[JsonObject]:
        """Close the block in progress, and append a new block. Return the events of both."""
        empty = {**block, "input": {}} if "input" in block else {**block}
        events = [*self._close(), self._of_block("start", content_block=empty)]
        self._content.append(block)
        self._open = True
        return events if len(self._content) > 1 else [*events, {"type": "ping"}]

    def _close(self) -> list[JsonObject]:
        """End the block in progress. Return its last events."""
        if not self._open:
            return []
        self._open, block = False, self._content[-1]
        signed = {"type": "signature_delta", "signature": ""}
        signature = [self._of_block("delta", delta=signed)] if block["type"] == "thinking" else []
        return [*signature, self._of_block("stop")]

    def _end(self) -> list[JsonObject]:
        events = self._close()
        sequence, reason, stop = self._sequence, REASONS[self._reason], None
        assert sequence is not None
        if sequence.finish_reason == "context":
            reason = "model_context_window_exceeded"
        elif reason == "end_turn" and sequence.stop_string is not None:
            reason, stop = "stop_sequence", sequence.stop_string
        end, facts = {"stop_reason": reason, "stop_sequence": stop}, super().facts(sequence)
        self.result |= {**end, **facts}
        told = {"type": "message_delta", "delta": end, "usage": self.result["usage"], **facts}
        return [*events, told, {"type": "message_stop"}]

    def _add(self, field: str, text: str) -> JsonObject:
        """Add a text to a field of the block in progress. Return the event."""
        self._content[-1][field] += text
        kind, name = DELTAS[field]
        return self._of_block("delta", delta={"type": kind, name: text})

    def _of_block(self, kind: Literal["start", "delta", "stop"], **more: object) -> JsonObject:
        """Return an event of the block in progress, or for "start" of the next block."""
        index = len(self._content) - (kind != "start")
        return {"type": f"content_block_{kind}", "index": index, **more}


def _usage(usage: JsonObject) -> JsonObject:
    """Return a usage object of messages for the usage object of a chat completion."""
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
    }

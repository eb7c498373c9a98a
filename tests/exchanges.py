"""Requests to a server and their answers in golden/serve.txt, and answers rebuilt from streams."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from string import Template
from typing import Any, NamedTuple, get_args

import pytest
from pydantic import BaseModel

from tests.serving import Running, exchanged

types = pytest.importorskip("openai.types.responses", reason="openai, a client, is not installed")

FILE = Path(__file__).parent / "golden" / "serve.txt"
COMPLETION, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MESSAGES = "/v1/messages"
ABSENT = "(absent)"
VARYING = {"id", "call_id", "item_id", "created", "created_at", "completed_at", "seed"}
KINDS = {get_args(kind.model_fields["type"].annotation)[0]: kind
         for kind in get_args(get_args(types.ResponseStreamEvent)[0])}  # fmt: skip


class Exchange(NamedTuple):
    """A request and its answer, as golden/serve.txt explains. line: its line in this file."""

    line: int
    server: str
    method: str
    path: str
    body: str
    headers: dict[str, str]
    says: list[str]
    status: int
    answer: str
    answered: dict[str, str]

    @property
    def given(self) -> Any:
        """The body as a value."""
        return json.loads(self.body, object_hook=_repeated)

    @property
    def streams(self) -> bool:
        """Whether the answer may also be streamed."""
        may = self.path in (COMPLETION, CHAT, RESPONSES, MESSAGES) and self.method == "POST"
        return may and self.status == 200 and self.given.get("max_tokens") != 0

    def asked(self, running: Running, **more: Any) -> tuple[int, Any, str]:
        """Send the request with more fields; return status, headers and text of the answer."""
        body: Any = self.body.encode() or None
        if more or ' times"' in self.body:
            body = {**self.given, **more} if more else self.given
        return exchanged(running.url + self.path, body, self.method, **self.headers)


def _repeated(found: dict[str, Any]) -> Any:
    """Return an object of JSON, or the value that an object {"3 times": …, "then": …} describes."""
    for name, value in found.items():
        if times := re.fullmatch("([0-9]+) times", name):
            return value * int(times[1]) + found.get("then", value[:0])
    return found


def exchanges() -> Iterator[Exchange]:
    """Read golden/serve.txt."""
    text, server, terms = FILE.read_text("utf-8"), "", dict[str, str]()
    for block in re.finditer(r"^[^#\n].*\n(?:.+\n)*", text, re.MULTILINE):
        lines = []
        for each in re.sub(r"\n +", " ", block[0].rstrip()).split("\n"):
            lines.append(Template(each).safe_substitute(terms))
            if each.startswith("let "):
                _, name, value = lines.pop().split(" ", 2)
                terms[name] = value
        first, *rest = lines or ["= " + server]
        if first.startswith("= "):
            server = first[2:]
        else:
            line = text.count("\n", 0, block.start()) + 1
            yield _exchange(line, server, *first.split(" ", 2), lines=rest)


def _exchange(
    line: int, server: str, method: str, path: str, body: str = "", *, lines: list[str]
) -> Exchange:
    at = next(i for i, each in enumerate(lines) if re.match("[0-9]+( |$)", each))
    status, _, answer = lines[at].partition(" ")
    says = [json.loads(each[5:]) for each in lines[:at] if each.startswith("says ")]
    given, answered = (
        {name: value.strip() for name, _, value in (each.partition(":") for each in part)}
        for part in ([each for each in lines[:at] if each[:5] != "says "], lines[at + 1 :])
    )
    return Exchange(line, server, method, path, body, given, says, int(status), answer, answered)


def match(found: Any, expected: Any, exact: bool = False) -> None:
    """Assert that a value of JSON has all that is expected, or with `exact` that it is equal.

    Objects may have further fields. … in a text stands for any text, a text that begins with ~ is a
    regular expression, and a text may describe the tokens of a list of bytes.
    """
    if isinstance(expected, dict):
        assert isinstance(found, dict), found
        assert not exact or found.keys() == expected.keys()
        for name, each in expected.items():
            if each == ABSENT:
                assert name not in found
            else:
                match(found[name], each, exact)
    elif isinstance(expected, list):
        assert len(found) == len(expected), (found, expected)
        for ours, theirs in zip(found, expected, strict=True):
            match(ours, theirs, exact)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, abs=1e-5)
    elif expected == "…":
        assert found is not None
    elif isinstance(expected, str) and not exact:
        text = bytes(found).decode() if isinstance(found, list) else found
        pattern = expected[1:] if expected[0:1] == "~" else re.escape(expected).replace("…", ".*")
        assert re.fullmatch(pattern, text, re.DOTALL), (text, expected)
    else:
        assert found == expected


def without_ids(found: Any) -> Any:
    """Return an answer without the ids, times and seeds that differ between equal requests."""
    if isinstance(found, dict):
        return {name: without_ids(each) for name, each in found.items() if name not in VARYING}
    return [*map(without_ids, found)] if isinstance(found, list) else found


# --- streams --------------------------------------------------------------------------------------


def completion_of(sent: str) -> dict[str, Any]:
    """Return the completion whose stream is `sent`, with a last chunk that has the usage."""
    *events, end, nothing = sent.split("\n\n")
    assert (end, nothing) == ("data: [DONE]", "")
    *chunks, last = [json.loads(each.removeprefix("data: ")) for each in events]
    assert last["choices"] == []
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        assert chunk.pop("usage") is None
        assert {name: chunk[name] for name in ("id", "created", "model", "object")}.items() <= (
            last.items()
        )
        last |= {name: chunk[name] for name in ("prompt_token_ids",) if name in chunk}
        for part in chunk["choices"]:
            choice = choices.setdefault(part["index"], {})
            assert not choice.get("finish_reason"), "a part after the end"
            if "delta" in part and choice:  # only the last delta may be empty
                assert part["delta"] or part["finish_reason"] or len(part) > 4 or part["logprobs"]
            _add(choice, part)
    for choice in choices.values():
        if (message := choice.pop("delta", None)) is not None:
            calls = message.get("tool_calls", {})
            more = {"tool_calls": [*calls.values()]} if calls else {}
            content = message["content"] or (None if calls else "")
            choice["message"] = {**message, "content": content, "refusal": None, **more}
    kind = last["object"].removesuffix(".chunk")
    return {**last, "object": kind, "choices": [choices[index] for index in sorted(choices)]}


def _add(whole: dict[str, Any], part: dict[str, Any]) -> None:
    """Add a part of a choice, or of an object in it, to the parts before."""
    for name, value in part.items():
        if name == "tool_calls":
            for call in value:
                _add(whole.setdefault(name, {}).setdefault(call.pop("index"), {}), call)
        elif isinstance(value, dict):
            whole[name] = whole.get(name) or {}
            _add(whole[name], value)
        elif name.endswith(("text", "content", "arguments")) or isinstance(value, list):
            whole[name] = (whole.get(name) or type(value)()) + value
        elif value is not None or name not in whole:
            whole[name] = value


def strict(kind: Any, given: Any) -> Any:
    """Parse an object as the client's type; assert that no field is unknown, at any depth."""
    found = kind.model_validate(given)
    waiting: list[Any] = [found]
    while waiting:
        each = waiting.pop()
        if isinstance(each, BaseModel):
            assert not each.model_extra, (type(each), each.model_extra)
            waiting += [getattr(each, name) for name in type(each).model_fields]
        elif isinstance(each, list):
            waiting += each
    return found


def events_of(sent: str) -> list[dict[str, Any]]:
    """Return the data of the events of a response; check types and sequence numbers."""
    found = []
    for event in sent.strip().split("\n\n"):
        name, data = event.split("\n")
        each = json.loads(data.removeprefix("data: "))
        assert name == f"event: {each['type']}"
        strict(KINDS[each["type"]], each)
        found.append(each)
    assert [each["sequence_number"] for each in found] == [*range(len(found))]
    return found


def response_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the final response; assert that a client can build its output from the events."""
    response: dict[str, Any] = events[-1]["response"]
    kinds = ["response.created", "response.in_progress", f"response.{response['status']}"]
    assert [each["type"] for each in (*events[:2], events[-1])] == kinds
    items, named = response["output"], list[str]()
    for index, item in enumerate(items):
        own = [each for each in events[2:-1] if each["output_index"] == index]
        empty = {name: type(item[name])() for name in ("content", "arguments") if name in item}
        assert own[0]["item"] == {**item, "status": "in_progress", **empty}
        assert own[-1]["item"] == item
        assert {each["item_id"] for each in own[1:-1]} == {item["id"]}
        named += [each["type"] for each in own]
        (part,) = item.get("content", [{}])
        text = part["text"] if part else item["arguments"]
        deltas = [each for each in own if "delta" in each]
        assert "".join(each["delta"] for each in deltas) == text
        assert [each.get("text", each.get("arguments")) for each in own if
                each["type"].endswith(("text.done", "arguments.done"))] == [text]  # fmt: skip
        told = [token["token"] for each in deltas for token in each.get("logprobs", ())]
        assert told == [token["token"] for token in part.get("logprobs", ())]
    assert named == [each["type"] for each in events[2:-1]]
    return response


def message_of(sent: str) -> dict[str, Any]:
    """Return the message that a client builds from the events of a stream, whose order is checked.

    Source: Anthropic, "Streaming messages".
    """
    pairs = [event.split("\n") for event in sent.strip().split("\n\n")]
    first, *inner, last, end = [json.loads(data.removeprefix("data: ")) for _, data in pairs]
    kinds = [each.pop("type") for each in (first, *inner, last, end)]
    assert [name for name, _ in pairs] == [f"event: {kind}" for kind in kinds]
    assert (kinds[0], *kinds[-2:]) == ("message_start", "message_delta", "message_stop")
    message, opened, text = first["message"], False, ""
    assert (message["content"], message["stop_reason"]) == ([], None)
    for number, (each, kind) in enumerate(zip(inner, kinds[1:-2], strict=True)):
        assert (kind == "ping") == (number == 1)
        if kind == "content_block_start":
            assert (opened, each["index"]) == (False, len(message["content"]))
            message["content"].append(each["content_block"])
            text = ""
        elif kind != "ping":
            block = message["content"][-1]
            assert (opened, each["index"]) == (True, len(message["content"]) - 1)
            for name, value in each.get("delta", {}).items():
                if name == "partial_json":
                    text += value
                elif name != "type":
                    block[name] += value
            if kind == "content_block_stop" and text.endswith("}"):
                block["input"] = json.loads(text)
        opened = kind != "content_block_stop"
    assert not (inner and opened)
    return {**message, **last.pop("delta"), **last}

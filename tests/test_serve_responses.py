"""/v1/responses with the client openai, whose types check every response and event."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

pytest.importorskip("starlette", reason="the extra serve is not installed")
openai = pytest.importorskip("openai", reason="openai, a client, is not installed")
types = pytest.importorskip("openai.types.responses", reason="openai is too old")

from pydantic import BaseModel  # noqa: E402

from gpt2block.errors import InputError  # noqa: E402
from gpt2block.serve import answers, response_events, responses  # noqa: E402
from gpt2block.serve.protocol import NEUTRAL, ApiError  # noqa: E402
from tests.markov import MarkovEngine, cycle  # noqa: E402
from tests.serving import Running, exchanged, model_of, post, serving, small  # noqa: E402

RESPONSES = "/v1/responses"
TOOL: dict[str, Any] = {"type": "function", "name": "add", "strict": True, "description": "Adds.",
        "parameters": {"type": "object", "properties": {}}}  # fmt: skip
SCHEMA = {"type": "json_schema", "name": "s", "schema": {"type": "object"}, "strict": True}
KINDS = {get_args(kind.model_fields["type"].annotation)[0]: kind
         for kind in get_args(get_args(types.ResponseStreamEvent)[0])}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(model_of(small().engine), rows=8, queue=64) as running:
        yield running


@pytest.fixture
def client(server: Running) -> Iterator[Any]:
    url = f"{server.url}/v1"
    with openai.OpenAI(base_url=url, api_key="any", max_retries=0, timeout=60) as found:
        yield found


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
    """Return the data of server-sent events; check types and sequence numbers."""
    found = []
    for event in sent.strip().split("\n\n"):
        name, data = event.split("\n")
        each = json.loads(data.removeprefix("data: "))
        assert name == f"event: {each['type']}"
        strict(KINDS[each["type"]], each)
        found.append(each)
    assert [each["sequence_number"] for each in found] == [*range(len(found))]
    return found


def check_stream(events: list[dict[str, Any]]) -> dict[str, Any]:
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


# --- over HTTP ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"input": "Hello"},
        {"input": [{"role": "user", "content": "Hello"}], "instructions": "S", "user": "ann",
         "metadata": {"a": "b"}, "temperature": 0.5, "top_p": 0.9},
        {"input": "Hello", "include": [responses.LOGPROBS], "top_logprobs": 2},
        {"input": "Hello", "include": ["reasoning.encrypted_content"], "store": False,
         "truncation": "disabled", "background": False, "tools": [], "tool_choice": "auto",
         "parallel_tool_calls": False, "text": {"format": {"type": "text"}, "verbosity": "medium"},
         "service_tier": "auto", "prompt_cache_key": "k", "previous_response_id": None},
    ],
)  # fmt: skip
def test_a_response_and_its_stream(server: Running, fields: dict[str, Any]) -> None:
    """Response and stream equal the chat's answer, and have the fields of the schema."""
    asked = {**fields, "seed": 3, "max_output_tokens": 9}
    status, whole = post(server, RESPONSES, asked)
    assert status == 200, whole
    found = strict(types.Response, whole)
    messages = [{"role": "user", "content": "Hello"}]
    if "instructions" in fields:
        messages.insert(0, {"role": "system", "content": "S"})
    chat = {"seed": 3, "max_tokens": 9, "messages": messages}
    chat |= {name: fields[name] for name in ("temperature", "top_p") if name in fields}
    if "top_logprobs" in fields:
        chat |= {"logprobs": True, "top_logprobs": 2}
    expected = post(server, "/v1/chat/completions", chat)[1]
    (item,), (choice,) = whole["output"], expected["choices"]
    assert item["content"][0]["text"] == choice["message"]["content"]
    assert item["content"][0]["logprobs"] == (choice["logprobs"] or {"content": []})["content"]
    used, of_chat = whole["usage"], expected["usage"]
    assert used["input_tokens"] == of_chat["prompt_tokens"]
    assert used["output_tokens"] == of_chat["completion_tokens"]
    ended = choice["finish_reason"] == "stop"
    assert found.status == item["status"] == ("completed" if ended else "incomplete")
    assert (found.incomplete_details is None) == ended
    for name in ("instructions", "user", "temperature", "top_p", "top_logprobs"):
        if name in fields:
            assert whole[name] == fields[name]

    events = events_of(exchanged(server.url + RESPONSES, {**asked, "stream": True})[2])
    assert without_ids(check_stream(events)) == without_ids(whole)


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    """Return a response without the ids and times that differ between equal requests."""
    varying = ("id", "created_at", "completed_at")
    rest = {name: value for name, value in response.items() if name not in varying}
    return {**rest, "output": [{**item, "id": ""} for item in response["output"]]}


def test_the_client(client: Any) -> None:
    """The client reads whole answers and streams, and sends an answer back as history."""
    asked: dict[str, Any] = {"model": "small", "temperature": 0, "max_output_tokens": 12}
    first = client.responses.create(input="Hello", **asked)
    assert first.output_text
    assert client.responses.create(input="Hello", **asked).output_text == first.output_text
    texts = [each.delta for each in client.responses.create(input="Hello", stream=True, **asked)
             if each.type == "response.output_text.delta"]  # fmt: skip
    assert "".join(texts) == first.output_text
    with client.responses.stream(input="Hello", **asked) as stream:
        kinds = [event.type for event in stream]
        assert kinds[0] == "response.created"
        assert kinds[-1] == f"response.{first.status}"
    user = {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}
    for item in (first.output[0], first.output[0].model_dump()):
        found = client.responses.create(input=[user, item, {"role": "user", "content": "x"}],
                                        **asked)  # fmt: skip
        assert found.usage.input_tokens == len(f"uHello\na{first.output_text}\nux\na".encode())


@pytest.mark.parametrize(("last", "text"), [(98, "b"), (97, "")])
def test_the_end_of_an_answer(last: int, text: str) -> None:
    """An answer that ends by itself is complete, and is a message even without text."""
    table = cycle(257)
    table[last] = table[255]  # the end token follows this byte
    with serving(model_of(MarkovEngine(table)), rows=1) as running:
        asked = {"input": "x", "temperature": 0}
        found = strict(types.Response, post(running, RESPONSES, asked)[1])
        events = events_of(exchanged(running.url + RESPONSES, {**asked, "stream": True})[2])
    assert (found.status, found.output_text) == ("completed", text)
    assert found.completed_at is not None
    assert without_ids(events[-1]["response"]) == without_ids(found.model_dump(exclude_unset=True))


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": None}, "input", "input: expected"),
        ({"input": []}, "input", "input: expected at least one message, got none"),
        ({"input": [3]}, "input", "input.0: expected an object, got 3"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input",
         "input.0: expected a message, function_call, function_call_output or reasoning, got"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input",
         "input.0.role: expected user, assistant, system, developer, got 'tool'"),
        ({"input": [{"role": "user"}]}, "input", "input.0.content: expected, but missing"),
        ({"input": [{"role": "user", "content": 3}]}, "input", "input.0.content: expected a text"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
         "input", "input.0.content.0: expected input_text or output_text with a text, got"),
        ({"input": [{"role": "user", "content": "x", "name": "ann"}]}, "input",
         "input.0.name: there is no such field"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": {}, "call_id": "c"}]},
         "input", "input.0.arguments: expected a text, got {}"),
        ({"input": [{"role": "system", "content": "x"}] * 5000}, "input", "at most 4,096 messages"),
        ({"input": "x" * 200}, "input", "input: 203 tokens, the model's context is 128"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "'resp_1' is not supported"),
        ({"conversation": "conv_1"}, "conversation", "'conv_1' is not supported"),
        ({"background": True}, "background", "True is not supported: expected false, or none"),
        ({"store": True}, "store", "True is not supported: expected false, or none"),
        ({"truncation": "auto"}, "truncation", 'is not supported: expected "disabled", or none'),
        ({"reasoning": {"effort": "high"}}, "reasoning", "is not supported: expected {}, or none"),
        ({"include": ["x"]}, "include", "include.0: expected"),
        ({"top_logprobs": 2}, "top_logprobs", "expected \"message.output_text.logprobs\""),
        ({"tools": [{"type": "web_search"}]}, "tools",
         "tools.0: expected a function, got 'web_search': this server runs no tools"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice", "tool_choice: expected \"auto\""),
        ({"text": {"format": {"type": "xml"}}}, "text", "text.format: expected a type of"),
        ({"text": {"format": {**SCHEMA, "schema": {"items": {"if": 1}}}}}, "text",
         "text.format.schema: /items: the keyword 'if' is not supported"),
        ({"text": {"verbosity": "low"}}, "text", "text.verbosity: expected 'medium', got 'low'"),
        ({"metadata": dict.fromkeys("abcdefghijklmnopq", "")}, "metadata", "at most 16 items"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options", "is not supported"),
        ({"max_tokens": 1}, "max_tokens", "max_tokens: there is no such field"),
    ],
)  # fmt: skip
def test_a_refused_request(server: Running, fields: dict[str, Any], param: str, words: str) -> None:
    status, found = post(server, RESPONSES, {"input": "Hello", **fields})
    assert status in (400, 413), found
    assert found["error"]["param"] == param
    assert words in found["error"]["message"]


def test_a_text_follows_its_format(client: Any) -> None:
    """Answers and streams follow the format; the client parses the text."""
    pytest.importorskip("llguidance")
    digit = {"type": "integer", "minimum": 0, "maximum": 9}
    schema = {"type": "object", "properties": {"a": digit}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    text = {"format": {**SCHEMA, "schema": schema}}
    asked = {"model": "small", "input": "x", "text": text, "extra_body": {"seed": 1}}
    found = client.responses.create(**asked)
    assert found.status == "completed"
    assert json.loads(found.output_text)["a"] in range(10)
    with client.responses.stream(**asked) as events:
        assert events.get_final_response().output_text == found.output_text


def test_errors_of_the_chat_name_the_fields_of_the_request() -> None:
    fields = {"messages": None, "temperature": None}
    for error, param, message in (
        (InputError("messages: expected a text, at 1"), "input", "input: expected a text, at 1"),
        (ApiError(400, "response_format: no", "response_format"), "text", "text.format: no"),
        (ApiError(413, "messages: too many", "messages"), "input", "input: too many"),
        (InputError("temperature: 9"), "temperature", "temperature: 9"),
    ):
        with pytest.raises(ApiError) as caught, responses.named_as_given(fields):
            raise error
        assert (caught.value.param, caught.value.message) == (param, message)
        assert caught.value.status == getattr(error, "status", 400)


def test_a_stream_that_fails(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream's last event is the failed response, without details of the error."""

    def failing(piece: Any) -> Any:
        raise RuntimeError("secret")

    monkeypatch.setattr(answers, "_choice", failing)
    events = events_of(exchanged(server.url + RESPONSES, {"input": "x", "stream": True})[2])
    assert events[0]["response"]["status"] == "in_progress"
    assert events[-1]["type"] == "response.failed"
    found = events[-1]["response"]
    assert (found["status"], found["output"]) == ("failed", [])
    assert found["error"] == {"code": "server_error", "message": "the server has made an error"}


def test_the_documentation_has_every_field() -> None:
    page = Path(__file__).parents[1].joinpath("docs", "serve.md").read_text(encoding="utf-8")
    table = page.partition("## Responses\n")[2].partition("\n## ")[0]
    table = table.partition("| fields of a request |")[2]
    names = {name for line in table.splitlines() for name in
             re.findall("`([a-z_]+)`", line.partition(" | ")[0])}  # fmt: skip
    kind = responses.ResponsesRequest
    own = {name for name, values in kind.neutral.items() if values != NEUTRAL.get(name, "none")}
    assert names == {*kind.model_fields, *own} - {"model"}


# --- conversions ----------------------------------------------------------------------------------

CALLS: list[dict[str, Any]] = [
    {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": arguments}}
    for name, arguments in (("f", '{"a": 1}'), ("g", "{}"))
]
ADDED = {"top_k": 4, "min_p": 0.5, "seed": 1, "chat_template_kwargs": {"a": 1},
         "skip_special_tokens": True}  # fmt: skip
USAGE = {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12}


def sent_for(**fields: Any) -> response_events.ResponseSent:
    given = responses.ResponsesRequest.model_validate({"input": "x", **fields}, context=99)
    return response_events.ResponseSent(given, "small")


def completion(kind: str, *choices: dict[str, Any], usage: Any = None) -> dict[str, Any]:
    """Return an object of /v1/chat/completions."""
    return {"id": "chatcmpl-1", "object": kind, "created": 1, "model": "small",
            "choices": [{"index": 0, "logprobs": None, **each} for each in choices],
            "usage": usage}  # fmt: skip


@pytest.mark.parametrize("text", ["", "Let me see."])
@pytest.mark.parametrize("calls", [CALLS, CALLS[:1]])
@pytest.mark.parametrize(("reason", "status"), [("tool_calls", "completed"),
                                                ("length", "incomplete")])  # fmt: skip
def test_tool_calls_become_function_calls(
    text: str, calls: list[Any], reason: str, status: str
) -> None:
    """Whole answers and streams have function calls, in the same parts as OpenAI's service."""
    indexed = [{"index": index, **call} for index, call in enumerate(calls)]
    message = {"role": "assistant", "content": text or None, "tool_calls": indexed}
    choice: dict[str, Any] = {"deltas": [{"delta": message, "finish_reason": reason}]}
    cached = {**USAGE, "prompt_tokens_details": {"cached_tokens": 4}}
    fields: dict[str, Any] = {"tools": [TOOL], "text": {"format": SCHEMA},
                              "tool_choice": {"type": "function", "name": "f"}}  # fmt: skip
    whole = sent_for(**fields).whole(completion("chat.completion", choice, usage=cached))
    found = strict(types.Response, whole)
    assert found.status == found.output[-1].status == status
    assert found.usage.input_tokens_details.cached_tokens == 4
    assert found.output_text == text
    items = [each for each in found.output if each.type == "function_call"]
    assert [(each.call_id, each.name, each.arguments) for each in items] == [
        (call["id"], call["function"]["name"], call["function"]["arguments"]) for call in calls
    ]
    assert len(found.output) == len(calls) + bool(text)

    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"content": word} for word in text]
    for index, call in enumerate(calls):
        function = {**call["function"], "arguments": ""}
        deltas.append({"tool_calls": [{"index": index, **call, "function": function}]})
        for part in call["function"]["arguments"]:
            deltas.append({"tool_calls": [{"index": index, "function": {"arguments": part}}]})
    chunks: list[dict[str, Any]] = [{"delta": delta, "finish_reason": None} for delta in deltas]
    chunks.append({"delta": {}, "finish_reason": reason})
    sent, kind = sent_for(**fields), "chat.completion.chunk"
    data = b"".join(sent.chunk(completion(kind, each)) for each in chunks)
    data += sent.chunk(completion(kind, usage=cached)) + sent.end()
    events = events_of(data.decode())
    assert without_ids(check_stream(events)) == without_ids(whole)
    arguments = [each for each in events if each["type"].endswith("call_arguments.delta")]
    assert len(arguments) == sum(len(call["function"]["arguments"]) for call in calls)


def test_parts_of_two_calls_in_turns_are_a_fault() -> None:
    sent = sent_for()
    parts = [{"index": index, **CALLS[index]} for index in (0, 1, 0)]
    chunk = {"delta": {"tool_calls": parts}, "finish_reason": None}
    with pytest.raises(ValueError, match="tool call 0: expected its parts before the next item"):
        sent.chunk(completion("chat.completion.chunk", chunk))


def test_a_failure_keeps_the_text_so_far() -> None:
    sent = sent_for()
    chunk = {"delta": {"content": "ab"}, "finish_reason": None}
    data = sent.chunk(completion("chat.completion.chunk", chunk))
    events = events_of((data + sent.failure(ApiError(500, "the engine failed"))).decode())
    assert events[-1]["type"] == "response.failed"
    (item,) = events[-1]["response"]["output"]
    assert (item["status"], item["content"][0]["text"]) == ("incomplete", "ab")


@pytest.mark.parametrize(
    ("given", "messages"),
    [
        ("x", [{"role": "user", "content": "x"}]),
        ([{"role": "developer", "content": "x"}], [{"role": "system", "content": "x"}]),
        ([{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]}],
         [{"role": "user", "content": [{"type": "text", "text": "x"}]}]),
        ([{"role": "user", "content": "x"},
          {"type": "reasoning", "id": "rs_1", "summary": []},
          {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
           "content": [{"type": "output_text", "text": "y", "annotations": [], "logprobs": None}]},
          *({"type": "function_call", "id": "fc_1", "call_id": call["id"], **call["function"]}
            for call in CALLS),
          *({"type": "function_call_output", "call_id": call["id"], "output": "1"}
            for call in CALLS)],
         [{"role": "user", "content": "x"},
          {"role": "assistant", "content": [{"type": "text", "text": "y"}], "tool_calls": CALLS},
          *({"role": "tool", "tool_call_id": call["id"], "content": "1"} for call in CALLS)]),
        ([{"type": "function_call", "call_id": "call_f", **CALLS[0]["function"]}],
         [{"role": "assistant", "content": "", "tool_calls": CALLS[:1]}]),
    ],
)  # fmt: skip
def test_items_become_messages(given: Any, messages: list[Any]) -> None:
    assert responses.messages_of(given, []) == messages
    first = {"role": "system", "content": "S"}
    body = responses.chat_body(
        responses.ResponsesRequest.model_validate({"input": given, "instructions": "S"}, context=9)
    )
    assert body["messages"] == [first, *messages]


@pytest.mark.parametrize(
    ("fields", "body"),
    [
        ({"max_output_tokens": -1}, {"max_completion_tokens": 99}),
        ({"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}),
        ({"tools": [TOOL]}, {"tools": [{"type": "function", "function": {
            name: value for name, value in TOOL.items() if name != "type"}}]}),
        ({"tool_choice": {"type": "function", "name": "f"}},
         {"tool_choice": {"type": "function", "function": {"name": "f"}}}),
        ({"tool_choice": "required", "parallel_tool_calls": False},
         {"tool_choice": "required", "parallel_tool_calls": False}),
        ({"text": {"format": SCHEMA}}, {"response_format": {"type": "json_schema", "json_schema": {
            "name": "s", "schema": {"type": "object"}, "strict": True}}}),
        ({"text": {"format": {"type": "json_object"}}},
         {"response_format": {"type": "json_object"}}),
        ({"include": [responses.LOGPROBS], "top_logprobs": 3},
         {"logprobs": True, "top_logprobs": 3}),
        ({**ADDED}, ADDED),
    ],
)  # fmt: skip
def test_fields_of_the_chat(fields: dict[str, Any], body: dict[str, Any]) -> None:
    given = responses.ResponsesRequest.model_validate({"input": "x", **fields}, context=99)
    plain = responses.ResponsesRequest.model_validate({"input": "x"}, context=99)
    assert responses.chat_body(given) == {**responses.chat_body(plain), **body}

"""/v1/responses with the client openai, and failures; golden/serve.txt has requests and answers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra serve is not installed")

from gpt2block.apps.serve import answers, response_events, responses
from gpt2block.apps.serve.messages import MessagesRequest
from gpt2block.apps.serve.protocol import NEUTRAL, ApiError
from gpt2block.errors import InputError
from tests.exchanges import CHAT, RESPONSES, Exchange, events_of, exchanges
from tests.serving import Running, exchanged, model_of, post, serving, small

openai = pytest.importorskip("openai", reason="openai, a client, is not installed")


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(model_of(small().engine), rows=8, queue=64) as running:
        yield running


@pytest.mark.parametrize("included", [[], [responses.LOGPROBS]])
def test_a_response_is_the_answer_of_a_chat(server: Running, included: list[str]) -> None:
    same = {"seed": 3, "temperature": 0.5, "top_p": 0.9}
    more = {"include": included, "top_logprobs": 2 * len(included), "max_output_tokens": 9}
    told = {"logprobs": True, "top_logprobs": 2} if included else {}
    asked = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 9, **told}
    response = post(server, RESPONSES, {"input": "Hello", **same, **more})[1]
    chat = post(server, CHAT, {**asked, **same})[1]
    (item,), (choice,) = response["output"], chat["choices"]
    assert item["content"][0]["text"] == choice["message"]["content"]
    assert item["content"][0]["logprobs"] == (choice["logprobs"] or {"content": []})["content"]
    assert (item["status"] == "completed") == (choice["finish_reason"] == "stop")
    counts = [response["usage"][f"{each}put_tokens"] for each in ("in", "out")]
    assert counts == [chat["usage"][f"{each}_tokens"] for each in ("prompt", "completion")]


def test_the_client(server: Running) -> None:
    """The client reads whole answers and streams, and sends an answer back as history."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=60)
    asked: dict[str, Any] = {"model": "small", "temperature": 0, "max_output_tokens": 12}
    first = client.responses.create(input="Hello", **asked)
    assert first.output_text
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


@pytest.mark.parametrize(
    ("heading", "kind", "shared"),
    [("Responses", responses.ResponsesRequest, NEUTRAL), ("Messages", MessagesRequest, {})],
)
def test_the_documentation_has_every_field(heading: str, kind: Any, shared: Any) -> None:
    page = Path(__file__).parents[2].joinpath("docs", "serve.md").read_text(encoding="utf-8")
    table = page.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    table = table.partition("| fields of a request |")[2]
    names = {name for line in table.splitlines() for name in
             re.findall("`([a-z_]+)`", line.partition(" | ")[0])}  # fmt: skip
    own = {name for name, values in kind.neutral.items() if values != shared.get(name, "none")}
    fields = {field.alias or name for name, field in kind.model_fields.items()}
    assert names | {"model"} == fields | own


# --- conversions ----------------------------------------------------------------------------------

CHATS = [each for each in exchanges() if (each.method, each.path) == ("CHAT", RESPONSES)]


def request_of(**fields: Any) -> responses.ResponsesRequest:
    return responses.ResponsesRequest.model_validate({"input": "x", **fields}, context=99)


@pytest.mark.parametrize("exchange", CHATS, ids=lambda each: each.line)
def test_the_chat_of_a_request(exchange: Exchange) -> None:
    expected = {**responses.chat_body(request_of(), True), **json.loads(exchange.answer)}
    assert responses.chat_body(request_of(**exchange.given), True) == expected


def chunk_of(**delta: Any) -> dict[str, Any]:
    """Return a chunk of /v1/chat/completions."""
    choice = {"index": 0, "logprobs": None, "delta": delta, "finish_reason": None}
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "small"}
    return {**head, "choices": [choice], "usage": None}


def test_parts_of_two_calls_in_turns_are_a_fault() -> None:
    sent = response_events.ResponseSent(request_of(), "small")
    function = {"name": "f", "arguments": "{}"}
    parts = [{"index": at, "id": "c", "type": "function", "function": function} for at in (0, 1, 0)]
    with pytest.raises(ValueError, match="tool call 0: expected its parts before the next item"):
        sent.chunk(chunk_of(tool_calls=parts))


def test_a_failure_keeps_the_text_so_far() -> None:
    sent = response_events.ResponseSent(request_of(), "small")
    data = sent.chunk(chunk_of(content="ab"))
    events = events_of((data + sent.failure(ApiError(500, "the engine failed"))).decode())
    assert events[-1]["type"] == "response.failed"
    (item,) = events[-1]["response"]["output"]
    assert (item["status"], item["content"][0]["text"]) == ("incomplete", "ab")

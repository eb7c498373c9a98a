"""/v1/messages with the client anthropic; golden/serve.txt has requests, answers and streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra serve is not installed")
pytest.importorskip("llguidance", reason="the extra tools is not installed")

from gpt2block import from_pretrained
from gpt2block.apps.serve import answers
from gpt2block.apps.serve.message_events import MessageSent
from gpt2block.apps.serve.messages import THINKS, MessagesRequest
from tests.apps.test_serve_exchanges import ANSWERS, server_of
from tests.apps.test_serve_responses import chunk_of
from tests.exchanges import CHAT, MESSAGES, Exchange, exchanges, message_of
from tests.serving import Running, exchanged, post, serving

anthropic = pytest.importorskip("anthropic", reason="anthropic, a client, is not installed")

CHATS = [each for each in exchanges() if (each.method, each.path) == ("CHAT", MESSAGES)]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}},
          "required": ["city"]}  # fmt: skip
WEATHER = {"name": "get_weather", "description": "Get the weather of a city.",
           "input_schema": SCHEMA}  # fmt: skip
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
SEQUENCE: Any = SimpleNamespace(  # an answer that has ended
    finish_reason="stop", stop_string=None, sampling=SimpleNamespace(seed=3)
)
ASKED = {"role": "user", "content": "How warm is it?"}


def client_of(running: Running, kind: Any = anthropic.Anthropic) -> Any:
    return kind(base_url=running.url, api_key="any", max_retries=0, timeout=300)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with server_of('scripted {"template": "hermes"}') as running:
        yield running


USER = [{"role": "user", "content": "Paris?"}]
SAMPLING = {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "seed": 3}
PROMPT: dict[str, Any] = {"model": "smollm2", "messages": USER, "system": "Answer briefly."}
AS_CHAT = {"messages": [{"role": "system", "content": "Answer briefly."}, *USER], **SAMPLING}


@contextmanager
def serving_smollm2() -> Iterator[tuple[Running, Any]]:
    loaded = from_pretrained("smollm2", device="cpu")
    with (
        serving(loaded, loaded.tokenizer, names=("smollm2",), rows=4) as running,
        client_of(running) as client,
    ):
        yield running, client


@pytest.mark.usefixtures("smollm2_files")
def test_texts_of_smollm2_are_those_of_chats() -> None:
    """Messages, streams and asynchronous clients have the texts of chats."""
    asked: dict[str, Any] = {**PROMPT, "max_tokens": 4, "extra_body": SAMPLING}

    async def said(running: Running) -> Any:
        async with client_of(running, anthropic.AsyncAnthropic) as client:
            stream = client.messages.stream(**asked)
            async with stream as events:
                return await client.messages.create(**asked), await events.get_final_message()

    with serving_smollm2() as (running, client):
        expected = post(running, CHAT, {**AS_CHAT, "max_tokens": 4})[1]
        usage = expected["usage"]
        for each in (client.messages.create(**asked), *asyncio.run(said(running))):
            (block,) = each.content
            assert block.text == expected["choices"][0]["message"]["content"]
            assert (each.stop_reason, each.usage.output_tokens) == ("max_tokens", 4)
            reused = each.usage.cache_read_input_tokens
            assert each.usage.input_tokens + reused == usage["prompt_tokens"]
        assert client.messages.count_tokens(**PROMPT).input_tokens == usage["prompt_tokens"]


@pytest.mark.slow
@pytest.mark.usefixtures("smollm2_files")
def test_calls_of_smollm2_are_those_of_chats() -> None:
    asked: dict[str, Any] = {**PROMPT, "max_tokens": 40, "extra_body": SAMPLING}
    function = {**WEATHER, "parameters": SCHEMA}
    del function["input_schema"]
    tool = {"type": "function", "function": function}
    choice = {"type": "function", "function": {"name": "get_weather"}}
    with serving_smollm2() as (running, client):
        own = {"type": "tool", "name": "get_weather"}
        (call,) = client.messages.create(**asked, tools=[WEATHER], tool_choice=own).content
        more = {"max_tokens": 40, "tools": [tool], "tool_choice": choice}
        (made,) = post(running, CHAT, {**AS_CHAT, **more})[1]["choices"][0]["message"]["tool_calls"]
        assert (call.name, call.input) == ("get_weather", json.loads(made["function"]["arguments"]))


def test_a_round_with_tools(server: Running) -> None:
    """The client builds the same answer from a stream; its blocks are history."""
    ANSWERS.clear()
    ANSWERS.extend([f"I look.\n{CALL}"] * 2 + ["It is 20 degrees."])
    asked: dict[str, Any] = {"model": "small", "max_tokens": 300, "tools": [WEATHER]}
    with client_of(server) as client:
        with client.messages.stream(messages=[ASKED], **asked) as stream:
            streamed = stream.get_final_message()
        answer = client.messages.create(messages=[ASKED], **asked)
        assert [block.type for block in answer.content] == ["text", "tool_use"]
        for each, other in zip(answer.content, streamed.content, strict=True):
            assert each.model_dump(exclude={"id"}) == other.model_dump(exclude={"id"})
        assert answer.stop_reason == streamed.stop_reason == "tool_use"
        assert answer.content[1].input == {"city": "Paris"}
        result = {"type": "tool_result", "tool_use_id": answer.content[1].id, "content": "20"}
        history = [ASKED, answer.to_param(), {"role": "user", "content": [result]}]
        found = client.messages.create(messages=history, **asked)
        assert (found.content[0].text, found.stop_reason) == ("It is 20 degrees.", "end_turn")


def test_models_of_the_client(server: Running) -> None:
    with client_of(server) as client:
        (model,) = client.models.list(limit=1)
        assert (model.id, model.type, model.lifecycle) == ("small", "model", "active")
        assert model.created_at.timestamp() == server.server._begun
        assert client.models.retrieve("small") == model
        with pytest.raises(anthropic.NotFoundError, match="there is no 'x'") as lost:
            client.models.retrieve("x")
        assert lost.value.type == "not_found_error"
        assert lost.value.request_id.startswith("req-")


@pytest.mark.parametrize("exchange", CHATS, ids=lambda each: each.line)
def test_the_chat_of_a_request(exchange: Exchange) -> None:
    base: dict[str, Any] = {"model": "small", "max_tokens": 9, "messages": [ASKED]}
    plain, chat = (
        MessagesRequest.model_validate(each, context=99).chat_body([THINKS])
        for each in (base, {**base, **exchange.given})
    )
    assert chat == {**plain, **json.loads(exchange.answer)}


def test_thinking_is_a_block_of_its_own() -> None:
    """Parts of chats with reasoning_content become events, and a message with the same blocks."""
    sent, whole = MessageSent("small", 5), MessageSent("small", 5)
    deltas = [{"reasoning_content": "H"}, {"reasoning_content": "m."}, {"content": "Mild."},
              {"reasoning_content": "Hm?"}]  # fmt: skip
    chunks = [chunk_of(**delta) for delta in deltas]
    for each in (sent, whole):
        each.facts(SEQUENCE)
    chunks[-1]["choices"][0]["finish_reason"] = "stop"
    message = message_of((b"".join(map(sent.chunk, chunks)) + sent.end()).decode())
    choices = [{"deltas": [each["choices"][0] for each in chunks]}]
    assert whole.whole({**chunks[0], "choices": choices}) == {**message, "id": whole.result["id"]}
    kinds = [(each["type"], each[each["type"]]) for each in message["content"]]
    assert kinds == [("thinking", "Hm."), ("text", "Mild."), ("thinking", "Hm?")]


def test_errors_of_the_client(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors are of the client's classes; a stream that fails ends with an error event."""
    asked: dict[str, Any] = {"model": "small", "max_tokens": 9, "messages": [ASKED]}
    with client_of(server) as client:
        with pytest.raises(anthropic.NotFoundError, match="there is no 'x'") as lost:
            client.messages.create(**{**asked, "model": "x"})
        assert lost.value.type == "not_found_error"
        assert lost.value.request_id.startswith("req-")
        assert server.requests(MESSAGES, 404) == 1
        image = {"type": "image", "source": {"type": "url", "url": "http://a.b"}}
        shown = [{"role": "user", "content": [image]}]
        with pytest.raises(anthropic.BadRequestError, match="'text', 'tool_result', got"):
            client.messages.create(**{**asked, "messages": shown})
        monkeypatch.setattr(answers, "_choice", lambda piece: 1 // 0)
        ANSWERS.extend(["a", "a"])
        with pytest.raises(anthropic.APIStatusError, match="the server has made an error"):
            list(client.messages.create(**asked, stream=True))
        sent = exchanged(server.url + MESSAGES, {**asked, "stream": True})[2]
    assert sent.startswith("event: message_start\n")
    assert '"type": "api_error"' in sent.rpartition("event: error\n")[2]

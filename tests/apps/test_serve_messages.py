"""/v1/messages with the client anthropic; golden/serve.txt has requests, answers and streams."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra serve is not installed")
pytest.importorskip("llguidance", reason="the extra tools is not installed")

from gpt2block import from_pretrained
from gpt2block.apps.serve import answers
from gpt2block.apps.serve.messages import END, THINKS, MessagesRequest
from tests.apps.test_serve_exchanges import ANSWERS, server_of
from tests.exchanges import CHAT, MESSAGES
from tests.serving import Running, exchanged, post, serving

anthropic = pytest.importorskip("anthropic", reason="anthropic, a client, is not installed")

PARIS = {"city": "Paris"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}},
          "required": ["city"]}  # fmt: skip
WEATHER = {"name": "get_weather", "description": "Get the weather of a city.",
           "input_schema": SCHEMA}  # fmt: skip
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ASKED = {"role": "user", "content": "How warm is it?"}


def client_of(running: Running, kind: Any = anthropic.Anthropic) -> Any:
    return kind(base_url=running.url, api_key="any", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with server_of('scripted {"template": "hermes"}') as running:
        yield running


@pytest.mark.usefixtures("smollm2_files")
def test_texts_of_smollm2_are_those_of_chats() -> None:
    """Messages, streams and asynchronous clients have the texts and calls of chats."""
    loaded, user = from_pretrained("smollm2", device="cpu"), [{"role": "user", "content": "Paris?"}]
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "seed": 3}
    prompt = {"model": "smollm2", "messages": user, "system": "Answer briefly."}
    asked: dict[str, Any] = {**prompt, "max_tokens": 6, "extra_body": sampling}
    tools: dict[str, Any] = {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "get_weather"}}

    async def said(running: Running) -> Any:
        async with client_of(running, anthropic.AsyncAnthropic) as client:
            stream = client.messages.stream(**asked)
            async with stream as events:
                return await client.messages.create(**asked), await events.get_final_message()

    with (
        serving(loaded, loaded.tokenizer, names=("smollm2",), rows=4) as running,
        client_of(running) as client,
    ):
        chat = {"messages": [{"role": "system", "content": "Answer briefly."}, *user], **sampling}
        expected = post(running, CHAT, {**chat, "max_tokens": 6})[1]
        usage = expected["usage"]
        for each in (client.messages.create(**asked), *asyncio.run(said(running))):
            (block,) = each.content
            assert block.text == expected["choices"][0]["message"]["content"]
            assert (each.stop_reason, each.usage.output_tokens) == ("max_tokens", 6)
            reused = each.usage.cache_read_input_tokens
            assert each.usage.input_tokens + reused == usage["prompt_tokens"]
        assert client.messages.count_tokens(**prompt).input_tokens == usage["prompt_tokens"]
        (call,) = client.messages.create(**{**asked, "max_tokens": 40}, **tools).content
        function = {**WEATHER, "parameters": SCHEMA}
        del function["input_schema"]
        tool = {"type": "function", "function": function}
        choice = {"type": "function", "function": {"name": "get_weather"}}
        more = {"max_tokens": 40, "tools": [tool], "tool_choice": choice}
        (made,) = post(running, CHAT, {**chat, **more})[1]["choices"][0]["message"]["tool_calls"]
        assert (call.name, call.input) == ("get_weather", json.loads(made["function"]["arguments"]))


def test_a_round_with_tools(server: Running) -> None:
    """The client's own stream has the answer; its blocks are history, with thoughts and results."""
    ANSWERS.clear()
    ANSWERS.extend([f"<think>Hm.</think>I look.\n{CALL}"] * 2 + ["It is 20 degrees."])
    asked: dict[str, Any] = {"model": "small", "max_tokens": 300, "tools": [WEATHER]}
    with client_of(server) as client:
        with client.messages.stream(messages=[ASKED], **asked) as stream:
            streamed = stream.get_final_message()
        answer = client.messages.create(messages=[ASKED], **asked)
        assert [block.type for block in answer.content] == ["thinking", "text", "tool_use"]
        for each, other in zip(answer.content, streamed.content, strict=True):
            assert each.model_dump(exclude={"id"}) == other.model_dump(exclude={"id"})
        assert answer.stop_reason == streamed.stop_reason == "tool_use"
        assert answer.content[2].input == PARIS
        result = {"type": "tool_result", "tool_use_id": answer.content[2].id, "content": "20"}
        history = [ASKED, answer.to_param(), {"role": "user", "content": [result]}]
        found = client.messages.create(messages=history, **asked)
        assert (found.content[0].text, found.stop_reason) == ("It is 20 degrees.", "end_turn")


def test_the_chat_of_a_request() -> None:
    thought = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    text = {"type": "text", "text": "I look.", "citations": None, "cache_control": None}
    used = {"type": "tool_use", "id": "c", "name": "get_weather", "input": PARIS, "caller": None}
    twice = [{"type": "text", "text": "2"}, {"type": "text", "text": "0"}]
    result = {"type": "tool_result", "tool_use_id": "c", "is_error": True, "content": twice}
    request = MessagesRequest.model_validate({
        "model": "small", "max_tokens": 9, "system": [text, text], "tools": [WEATHER],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "thinking": {"type": "disabled"}, "stop_sequences": ["x"], "stream": True,
        "messages": [ASKED, {"role": "assistant", "content": [thought, text, used]},
                     {"role": "user", "content": [result, text]}, {"role": "user", "content": []}],
    }, context=99)  # fmt: skip
    body = request.chat_body([THINKS])
    call = {"name": "get_weather", "arguments": json.dumps(PARIS)}
    assert body["messages"] == [
        {"role": "system", "content": "I look.I look."},
        ASKED,
        {"role": "assistant", "content": f"<think>Hm.{END}I look.",
         "tool_calls": [{"id": "c", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "c", "content": "20"},
        {"role": "user", "content": "I look."},
        {"role": "user", "content": ""},
    ]  # fmt: skip
    assert body["tool_choice"] == "required"
    assert body["parallel_tool_calls"] is False
    assert body["chat_template_kwargs"] == {THINKS: False}
    assert (body["stop"], body["stream_options"]) == (["x"], {"include_usage": True})


def test_errors_of_the_client(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors are of the client's classes; a stream that fails ends with an error event."""
    asked: dict[str, Any] = {"model": "small", "max_tokens": 9, "messages": [ASKED]}
    with client_of(server) as client:
        with pytest.raises(anthropic.NotFoundError, match="there is no 'x'") as lost:
            client.messages.create(**{**asked, "model": "x"})
        assert lost.value.type == "not_found_error"
        assert lost.value.request_id.startswith("req-")
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


def test_the_documentation_has_every_field() -> None:
    page = Path(__file__).parents[2].joinpath("docs", "serve.md").read_text(encoding="utf-8")
    section = page.partition("## Messages\n")[2].partition("\n## ")[0]
    table = section.partition("| fields of a request |")[2]
    names = {name for line in table.splitlines() for name in
             re.findall("`([a-z_]+)`", line.partition(" | ")[0])}  # fmt: skip
    fields = {field.alias or name for name, field in MessagesRequest.model_fields.items()}
    assert names == fields | {*MessagesRequest.neutral}

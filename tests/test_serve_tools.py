"""Rounds of tool calls with common clients; golden/serve.txt has requests and answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra serve is not installed")
openai = pytest.importorskip("openai", reason="openai, a client, is not installed")

from tests.serving import Running  # noqa: E402
from tests.test_serve_exchanges import ANSWERS, RULES, rules, server_of  # noqa: E402, F401

HELLO = [{"role": "user", "content": "How warm is it?"}]
PARIS = '{"city": "Paris"}'
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
WARM = "It is 20 degrees."


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with server_of('scripted {"template": "hermes"}') as running:
        yield running


def client_of(running: Running) -> Any:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="x", max_retries=0)


def test_a_round_of_openai(server: Running) -> None:
    ANSWERS.extend([CALL, CALL, WARM])
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    asked: dict[str, Any] = {"model": "small", "tools": [tool]}
    with client_of(server) as client:
        create = client.chat.completions.create
        with client.chat.completions.stream(messages=HELLO, **asked) as stream:
            message = stream.get_final_completion().choices[0].message
        assert message.tool_calls[0].function.arguments == PARIS
        message = create(messages=HELLO, **asked).choices[0].message
        (made,) = message.tool_calls
        assert (made.function.name, made.function.arguments) == ("weather", PARIS)
        result = {"role": "tool", "tool_call_id": made.id, "content": "20"}
        found = create(messages=[*HELLO, message.model_dump(), result], **asked).choices[0]
    assert (found.message.content, found.message.tool_calls) == (WARM, None)


def test_a_round_of_langchain(server: Running) -> None:
    langchain = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    tools = pytest.importorskip("langchain_core.tools", reason="langchain-core is not installed")

    def of_city(city: str) -> str:
        """Return the weather of a city."""
        return f"20 in {city}"

    weather = tools.tool("weather")(of_city)
    ANSWERS.extend([CALL, WARM, CALL])
    model = langchain.ChatOpenAI(model="small", base_url=f"{server.url}/v1", api_key="x")
    asking, messages = model.bind_tools([weather]), [("user", "How warm is it?")]
    message = asking.invoke(messages)
    called = [(each["name"], each["args"]) for each in message.tool_calls]
    assert called == [("weather", {"city": "Paris"})]
    result = weather.invoke(message.tool_calls[0])
    assert asking.invoke([*messages, message, result]).content == WARM
    whole = None
    for chunk in asking.stream(messages):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    assert whole.tool_calls[0]["args"] == {"city": "Paris"}


def test_a_round_of_pydantic_ai(server: Running) -> None:
    ai = pytest.importorskip("pydantic_ai", reason="pydantic-ai is not installed")
    models = pytest.importorskip("pydantic_ai.models.openai")
    providers = pytest.importorskip("pydantic_ai.providers.openai")
    ANSWERS.extend([CALL, WARM])
    provider = providers.OpenAIProvider(base_url=f"{server.url}/v1", api_key="x")
    agent, asked = ai.Agent(models.OpenAIChatModel("small", provider=provider)), []

    def weather(city: str) -> str:
        """Return the weather of a city."""
        asked.append(city)
        return "20"

    agent.tool_plain(weather)
    assert agent.run_sync("How warm is it?").output == WARM
    assert asked == ["Paris"]


@pytest.mark.parametrize("mode", ["TOOLS", "RESPONSES_TOOLS"])
def test_an_object_of_instructor(server: Running, mode: str) -> None:
    instructor = pytest.importorskip("instructor", reason="instructor is not installed")
    pydantic = pytest.importorskip("pydantic")
    Weather = pydantic.create_model("weather", city=(str, ...))
    ANSWERS.extend([CALL])
    made = instructor.from_openai(client_of(server), mode=getattr(instructor.Mode, mode))
    create = made.chat.completions.create
    found = create(model="small", messages=HELLO, response_model=Weather, max_retries=0)
    assert found.city == "Paris"
    assert "start: begin body\n" in str(RULES[-1])

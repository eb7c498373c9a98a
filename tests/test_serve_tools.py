"""Tools in chats of the server: requests, answers, streams, and common clients."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import tiktoken

pytest.importorskip("starlette", reason="the extra serve is not installed")
pytest.importorskip("uvicorn", reason="the extra serve is not installed")

from gpt2block.chat.template import ChatTemplate
from gpt2block.generation.options import Options
from gpt2block.serve.protocol import SampledRequest
from tests.markov import MarkovEngine, cycle
from tests.serving import BYTES, Running, exchanged, model_of, post, serving
from tests.tool_answers import TEMPLATES

CHAT, END = "/v1/chat/completions", 256
HELLO = [{"role": "user", "content": "How warm is it?"}]
SCHEMA = {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
    "additionalProperties": False,
}  # fmt: skip
FUNCTION = {"name": "weather", "description": "Weather of a city.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
STRICT = {"type": "function", "function": {**FUNCTION, "strict": True}}
FLAT = [{"type": "function", **FUNCTION}]  # for /v1/responses
FORMAT = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "weather"}}
PARIS = '{"city": "Paris"}'
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
BAD = CALL.replace('"Paris"', "Paris")


ANSWERS = deque[str]()  # answers that the tests' models give, in the order of requests


# Bytes, the end token, and special tokens of Mistral
RANKS, SPECIAL = BYTES._mergeable_ranks, {"<|endoftext|>": END, "[TOOL_CALLS]": 257, "[ARGS]": 258}
ENCODING = tiktoken.Encoding("x", pat_str="(?s:.)", mergeable_ranks=RANKS, special_tokens=SPECIAL)


def said() -> Iterator[int]:
    yield from ENCODING.encode(ANSWERS.popleft(), allowed_special="all")
    yield END


@contextmanager
def answering(source: str, **settings: Any) -> Iterator[Running]:
    """Run a server whose model has a chat template and gives the ANSWERS."""
    engine = MarkovEngine(cycle(259), n_ctx=4096, script=[said() for _ in range(200)])
    model = model_of(engine, chat_template=ChatTemplate(source, {}))
    with serving(model, ENCODING, rows=4, **settings) as running:
        yield running


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with answering(TEMPLATES["hermes"]) as running:
        yield running


@pytest.fixture
def grammars(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list to which each answer's grammar is added, or None."""
    pytest.importorskip("llguidance", reason="the extra tools is not installed")
    found: list[Any] = []
    options = SampledRequest.options

    def noted(self: SampledRequest, **more: Any) -> Options:
        found.append(more["rule"] and more["rule"].source)
        return options(self, **more)

    monkeypatch.setattr(SampledRequest, "options", noted)
    return found


def chat(running: Running, **more: Any) -> Any:
    status, found = post(running, CHAT, {"messages": HELLO, "tools": [TOOL], **more})
    assert status == 200, found
    return found


def streamed(running: Running, **more: Any) -> list[Any]:
    """Send a chat request; return the choices of the stream's chunks."""
    body = {"messages": HELLO, "tools": [TOOL], "stream": True, **more}
    status, _, text = exchanged(running.url + CHAT, body)
    assert status == 200, text
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line)["choices"][0] for line in lines]


@pytest.mark.parametrize(
    ("answer", "content", "arguments"),
    [
        ("Mild.", "Mild.", []),
        ("", "", []),
        (CALL, None, [PARIS]),
        (f"I look.\n{CALL}\n{CALL}\n", "I look.", [PARIS, PARIS]),
        (BAD, BAD, []),
        (f"{CALL} {BAD}", f" {BAD}", [PARIS]),
    ],
)
def test_answers_and_streams(
    server: Running, answer: str, content: str | None, arguments: list[str]
) -> None:
    reason = "tool_calls" if arguments else "stop"
    ANSWERS.extend([answer, answer])
    (choice,) = chat(server)["choices"]
    chunks = streamed(server)
    calls = choice["message"].pop("tool_calls", [])
    assert choice["message"] == {"role": "assistant", "content": content, "refusal": None}
    assert choice["finish_reason"] == chunks[-1]["finish_reason"] == reason
    functions = [{"name": "weather", "arguments": each} for each in arguments]
    assert [each["function"] for each in calls] == functions
    assert len({each["id"] for each in calls}) == len(calls)
    deltas = [chunk["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert all(deltas[1:-1])
    assert "".join(delta.get("content") or "" for delta in deltas) == (content or "")
    parts = [part for delta in deltas for part in delta.get("tool_calls", ())]
    assert [part["index"] for part in parts] == [*range(len(arguments))]
    assert [part["function"]["arguments"] for part in parts] == arguments


def test_choices_are_read_on_their_own(server: Running) -> None:
    ANSWERS.extend(["Mild.", CALL])
    found = chat(server, n=2)["choices"]
    assert [choice["finish_reason"] for choice in found] == ["stop", "tool_calls"]
    assert found[0]["message"]["content"] == "Mild."


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, None),
        ({"tool_choice": "auto", "parallel_tool_calls": True}, None),
        ({"tool_choice": "none"}, None),
        ({"tool_choice": "required"}, 'start: begin body ("\\n" begin body)*'),
        ({"tool_choice": "required", "parallel_tool_calls": False}, "start: begin body\n"),
        ({"tool_choice": NAMED}, "start: begin body\n"),
        ({"tools": [STRICT]}, "start: (head body)* text"),
        ({"parallel_tool_calls": False}, "start: text | head body"),
        ({"response_format": FORMAT}, 'start: %json {"type": "object", "properties": {"city": '),
        ({"response_format": FORMAT, "tool_choice": "required"}, "start: begin body ("),
    ],
)
def test_when_an_answer_is_held_to_a_grammar(
    server: Running, grammars: list[Any], more: Any, expected: Any
) -> None:
    ANSWERS.extend([CALL, CALL])
    message = chat(server, **more)["choices"][0]["message"]
    chunks = streamed(server, **more)
    assert grammars[0] == grammars[1]
    assert (grammars[0] is None) == (expected is None)
    assert expected is None or expected in grammars[0]
    if more.get("tool_choice") == "none":
        assert message["content"] == CALL
        return
    assert message["tool_calls"][0]["function"]["arguments"] == PARIS
    parts = [part for chunk in chunks for part in chunk["delta"].get("tool_calls", ())]
    assert [*parts[0]] == ["index", "id", "type", "function"]
    assert parts[0]["function"]["name"] == "weather"
    assert "".join(part["function"]["arguments"] for part in parts) == PARIS
    assert len(parts) == 1 or expected is not None


@pytest.mark.parametrize(
    ("more", "end", "reason"),
    [({"max_tokens": 60}, 60, "length"), ({"stop": '"Par'}, 54, "stop"),
     ({"max_tokens": 20}, 20, "length"), ({"stop": "_call"}, 5, "stop")],
)  # fmt: skip
def test_a_call_that_is_cut(
    server: Running, grammars: list[Any], more: Any, end: int, reason: str
) -> None:
    """A call cut by the limit has its arguments so far; without a grammar, it remains text."""
    ANSWERS.extend([CALL] * 3)
    held = chat(server, tool_choice="required", **more)["choices"][0]
    chunks = streamed(server, tool_choice="required", **more)
    free = chat(server, **more)["choices"][0]
    assert not any(chunk["delta"].get("content") for chunk in chunks)
    assert held["message"]["content"] is None
    (found,) = held["message"]["tool_calls"]
    assert found["function"]["arguments"] == PARIS[: max(0, end - CALL.index('{"city'))]
    assert free["message"]["content"] == CALL[:end]
    assert held["finish_reason"] == free["finish_reason"] == reason


def test_tools_in_the_prompt(server: Running) -> None:
    """The prompt has all tools, without `strict`, even if only one may be called."""
    ANSWERS.append("Mild.")
    tools = [{**TOOL, "function": {**FUNCTION, "strict": False}},
             {"type": "function", "function": {"name": "time"}}]  # fmt: skip
    found = chat(server, tools=tools, return_token_ids=True)
    shown = {"name": "time", "parameters": {"type": "object", "properties": {}}}
    expected = json.dumps([TOOL, {"type": "function", "function": shown}])
    assert expected in bytes(found["prompt_token_ids"]).decode()


@pytest.mark.parametrize(
    ("more", "param", "words"),
    [
        ({"tools": [{"type": "custom"}]}, "tools", "tools.0.type: expected 'function', got"),
        ({"tools": [{**TOOL, "function": {"name": "a b"}}]}, "tools", "tools.0.function.name: "),
        ({"tools": [{**TOOL, "function": {**FUNCTION, "return": {}}}]}, "tools",
         "tools.0.function.return: there is no such field"),
        ({"tools": [{**TOOL, "function": {**FUNCTION, "parameters": {"type": "array"}}}]},
         "tools", "tools.0.function.parameters: expected the JSON schema of an object"),
        ({"tools": [TOOL, TOOL]}, "tools", "expected each name once, got 'weather' 2 times"),
        ({"tools": [TOOL] * 129}, "tools", "tools: expected at most 128 tools"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "expected tools with it"),
        ({"tool_choice": {**NAMED, "function": {"name": "f"}}}, "tool_choice",
         "tool_choice: expected the name of one of the tools, got"),
        ({"tool_choice": "any"}, "tool_choice", "expected 'none', 'auto' or 'required', got"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "expected a valid boolean"),
        ({"functions": [FUNCTION]}, "functions", "is not supported"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "expected no tools besi"),
        ({"messages": [1]}, "messages", "expected a list of messages"),
        ({"tool_choice": "required", "min_tokens": 3}, "min_tokens",
         "min_tokens: expected none with tool_choice, which decides where the text ends"),
        ({"tool_choice": NAMED, "ignore_eos": True}, "ignore_eos", "expected none with tool_cho"),
        ({"tools": [STRICT], "stop_token_ids": [3]}, "stop_token_ids", "expected none with tools"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "a"}}}},
         "response_format", "response_format.json_schema.schema: Invalid type: a"),
    ],
)  # fmt: skip
def test_a_wrong_request(server: Running, more: Any, param: str, words: str) -> None:
    status, found = post(server, CHAT, {"messages": HELLO, "tools": [TOOL], **more})
    assert (status, found["error"]["param"]) == (400, param)
    assert words in found["error"]["message"]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("<tool_call></tool_call>{{ messages }}", "reads no tools: leave them out, set tool_choice "
         'to "none", or start the server with --tool-form general'),
        ("{{ tools }}{{ messages }}", "does not show the form in which this model writes calls: "
         "start the server with --tool-form hermes or "),
    ],
)  # fmt: skip
def test_a_template_that_does_not_do(source: str, words: str) -> None:
    with answering(source, tool_form=None if "tools" in source else "hermes") as running:
        status, found = post(running, CHAT, {"messages": HELLO, "tools": [TOOL]})
    assert (status, found["error"]["param"]) == (400, "tools")
    assert words in found["error"]["message"]


@pytest.mark.parametrize("part", [{"$ref": "#/$defs/X"}, {"not": {}, "unevaluatedItems": False}])
def test_a_schema_that_a_grammar_cannot_follow(server: Running, part: Any) -> None:
    pytest.importorskip("llguidance", reason="the extra tools is not installed")
    function = {"name": "f", "parameters": {"type": "object", "properties": {"city": part}}}
    body = {"messages": HELLO, "tools": [TOOL, {**TOOL, "function": function}]}
    status, found = post(server, CHAT, {**body, "tool_choice": "required"})
    assert (status, found["error"]["param"]) == (400, "tools")
    assert found["error"]["message"].startswith("tools.1.function.parameters: ")


def test_the_form_of_the_settings() -> None:
    ANSWERS.append("[TOOL_CALLS]weather[ARGS]{}")
    with answering("{{ tools }}{{ messages }}", tool_form="mistral-args") as running:
        (found,) = chat(running, skip_special_tokens=True)["choices"][0]["message"]["tool_calls"]
    assert (found["function"]["name"], len(found["id"])) == ("weather", 9)


ROLES = "{{ 'system' if m.role == 'system' else 'user' if m.role == 'user' else 'assistant' }}"


@pytest.mark.parametrize(
    ("form", "role"), [("general", "{{ tools[0] }}{{ m.role }}"), (None, ROLES)]
)
def test_tools_for_any_template(grammars: list[Any], form: str | None, role: str) -> None:
    """A system message describes the tools; calls, which are not required, follow a rule."""
    ANSWERS.extend(["Mild.", CALL, WARM])
    with answering(TEMPLATES["general"].replace("{{ m.role }}", role), tool_form=form) as running:
        asked = [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}, *HELLO]
        first = chat(running, messages=asked, return_token_ids=True)
        message = chat(running)["choices"][0]["message"]
        (made,) = message["tool_calls"]
        asked = [*HELLO, message, {"role": "tool", "tool_call_id": made["id"], "content": "20"}]
        last = chat(running, messages=asked, tool_choice="none", return_token_ids=True)
    assert first["choices"][0]["message"]["content"] == "Mild."
    assert made["function"]["arguments"] == PARIS
    prompts = [bytes(each["prompt_token_ids"]).decode() for each in (first, last)]
    assert "system\nBe brief.\n\nYou may call functions." in prompts[0]
    assert f"{json.dumps([TOOL])}\nTo call a function" in prompts[0]
    assert f"assistant\n{CALL}<|im_end|>\n<|im_start|>" in prompts[1]
    assert prompts[1].endswith("tool\n20<|im_end|>\n" if form else "user\n20<|im_end|>\n")
    assert '"city"' in grammars[0]
    assert "start: (head body)* text" in grammars[0]


def test_items_of_a_response_are_those_of_its_stream(server: Running) -> None:
    answer = f"I look.\n{CALL} Done.\n{CALL} And"
    ANSWERS.extend([answer, answer])
    body = {"input": "x", "tools": FLAT, "max_output_tokens": len(answer) - 1}
    whole = post(server, "/v1/responses", body)[1]["output"]
    events = exchanged(f"{server.url}/v1/responses", {**body, "stream": True})[2].split("\n\n")
    last = json.loads(events[-2].partition("data: ")[2])["response"]["output"]
    texts = ["I look.", PARIS, " Done.", PARIS, " An"]
    for items in (whole, last):
        assert [item["status"] for item in items] == ["completed"] * 4 + ["incomplete"]
        assert [item.get("arguments") or item["content"][0]["text"] for item in items] == texts


def test_a_text_of_a_format_or_a_call(server: Running, grammars: list[Any]) -> None:
    """The first request is the one of instructor's mode RESPONSES_TOOLS."""
    text, named = json.dumps({"city": CALL}), {"type": "function", "name": "weather"}
    given = {"type": "json_schema", "name": "weather", "strict": True, "schema": SCHEMA}
    for choice, answer in ((named, CALL), ("auto", CALL), ("auto", text)):
        ANSWERS.append(answer)
        body = {"input": HELLO, "tools": FLAT, "tool_choice": choice, "text": {"format": given}}
        (item,) = post(server, "/v1/responses", body)[1]["output"]
        assert item.get("arguments", PARIS) == PARIS
        assert [part["text"] for part in item.get("content", ())] == [text] * (answer == text)
    assert ["start: %json" in each for each in grammars] == [False, True, True]


# --- clients --------------------------------------------------------------------------------------

WARM = "It is 20 degrees."


def test_a_round_of_openai(server: Running) -> None:
    openai = pytest.importorskip("openai", reason="openai, a client, is not installed")
    ANSWERS.extend([CALL, CALL, WARM])
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
    create = client.chat.completions.create
    with client.chat.completions.stream(model="small", messages=HELLO, tools=[TOOL]) as stream:
        message = stream.get_final_completion().choices[0].message
    assert message.tool_calls[0].function.arguments == PARIS
    message = create(model="small", messages=HELLO, tools=[TOOL]).choices[0].message
    (made,) = message.tool_calls
    assert (made.function.name, made.function.arguments) == ("weather", PARIS)
    result = {"role": "tool", "tool_call_id": made.id, "content": "20"}
    messages = [*HELLO, message.model_dump(), result]
    found = create(model="small", messages=messages, tools=[TOOL]).choices[0]
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


def test_a_round_of_pydantic_ai(server: Running, grammars: list[Any]) -> None:
    ai = pytest.importorskip("pydantic_ai", reason="pydantic-ai is not installed")
    pytest.importorskip("openai", reason="openai, a client, is not installed")
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
def test_an_object_of_instructor(server: Running, grammars: list[Any], mode: str) -> None:
    instructor = pytest.importorskip("instructor", reason="instructor is not installed")
    openai = pytest.importorskip("openai", reason="openai, a client, is not installed")
    pydantic = pytest.importorskip("pydantic")
    Weather = pydantic.create_model("weather", city=(str, ...))
    ANSWERS.extend([CALL])
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
    made = instructor.from_openai(client, mode=getattr(instructor.Mode, mode))
    create = made.chat.completions.create
    found = create(model="small", messages=HELLO, response_model=Weather, max_retries=0)
    assert found.city == "Paris"
    assert "start: begin body\n" in grammars[0]

"""The table golden/serve.txt of requests and answers; streams are equal to whole answers."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import pytest
import tiktoken

pytest.importorskip("starlette", reason="the extra serve is not installed")
pytest.importorskip("uvicorn", reason="the extra serve is not installed")
pytest.importorskip("llguidance", reason="the extra tools is not installed")

from gpt2block import from_pretrained
from gpt2block.apps.serve.protocol import SampledRequest
from gpt2block.engine.chat.template import ChatTemplate
from gpt2block.engine.generation.options import Options
from tests.apps import test_serve_embeddings as embeddings
from tests.exchanges import (
    ABSENT,
    COMPLETION,
    MESSAGES,
    RESPONSES,
    Exchange,
    completion_of,
    events_of,
    exchanges,
    match,
    message_of,
    response_of,
    strict,
    types,
    without_ids,
)
from tests.markov import MarkovEngine, cycle
from tests.serving import BYTES, Running, model_of, post, serving, small
from tests.tool_answers import TEMPLATES

openai = pytest.importorskip("openai", reason="openai, a client, is not installed")

END = 256  # id of the end token
TABLE = [*exchanges()]
REQUESTS = [each for each in TABLE if each.method not in ("CHAT", "RUN")]
ANSWERS = deque[str]()  # answers that scripted models give, in the order of requests
RULES: list[str | None] = []  # rules of the answers so far
# Bytes, the end token, and special tokens of Mistral
MARKS = {"<|endoftext|>": END, "[TOOL_CALLS]": 257, "[ARGS]": 258}
MARKED = tiktoken.Encoding(
    "x", pat_str="(?s:.)", mergeable_ranks=BYTES._mergeable_ranks, special_tokens=MARKS
)


def said() -> Iterator[int]:
    yield from MARKED.encode(ANSWERS.popleft(), allowed_special="all")
    yield END


def ending(last: int, after: int) -> MarkovEngine:
    """Return an engine that writes the alphabet, but the end token after token `last`.

    after: the token that follows the end token.
    """
    table = cycle(257)
    table[last], table[END] = table[END - 1].copy(), table[after - 1].copy()
    return MarkovEngine(table)


def scripted(template: str, role: str = "{{ m.role }}") -> tuple[Any, Any]:
    engine = MarkovEngine(cycle(259), n_ctx=4096, script=[said() for _ in range(200)])
    source = TEMPLATES.get(template, template).replace("{{ m.role }}", role)
    return model_of(engine, chat_template=ChatTemplate(source, {})), MARKED


def shakespeare() -> tuple[Any, Any]:
    model = from_pretrained("shakespeare", device="cpu")
    return model, model.tokenizer


MODELS: dict[str, Callable[..., tuple[Any, Any]]] = {
    "small": lambda: (model_of(small().engine), BYTES),
    "alphabet": lambda: (model_of(MarkovEngine(cycle(257))), BYTES),
    "end-after-a": lambda: (model_of(ending(ord("a"), ord("b"))), BYTES),
    "end-after-b": lambda: (model_of(ending(ord("b"), ord("c"))), BYTES),
    "shakespeare": shakespeare,
    "scripted": scripted,
    "judge": lambda: (model_of(embeddings.JUDGE.engine), embeddings.ANSWERS),
}


@contextmanager
def server_of(heading: str) -> Iterator[Running]:
    """Run the server of a heading of the table: a model, and settings."""
    name, _, text = heading.partition(" ")
    settings = {each: tuple(value) if isinstance(value, list) else value
                for each, value in json.loads(text).items()}  # fmt: skip
    own: Any = {each: settings.pop(each) for each in ("template", "role") if each in settings}
    model, encoding = MODELS[name](**own)
    more: Any = settings
    with serving(model, encoding, **more) as running:
        yield running


@pytest.fixture(scope="module")
def serves() -> Iterator[Callable[[str], Running]]:
    """Return a function from the heading of a section to its server."""
    stacks: list[ExitStack] = []

    def entered(heading: str) -> Running:
        stacks.append(ExitStack())
        return stacks[-1].enter_context(server_of(heading))

    yield cache(entered)
    with ThreadPoolExecutor(len(stacks)) as threads:  # each needs a fraction of a second to end
        assert [*threads.map(ExitStack.close, stacks)]


@pytest.fixture(autouse=True)
def rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the rule of each answer to RULES."""
    options = SampledRequest.options

    def noted(self: SampledRequest, **more: Any) -> Options:
        RULES.append(more["rule"] and more["rule"].source)
        return options(self, **more)

    monkeypatch.setattr(SampledRequest, "options", noted)


@pytest.mark.parametrize("exchange", REQUESTS, ids=lambda each: f"{each.line}-{each.path}")
def test_an_answer(serves: Callable[[str], Running], exchange: Exchange) -> None:
    check(serves(exchange.server), exchange)


def check(running: Running, exchange: Exchange) -> None:
    """Send the request of the table, and compare the answer."""
    ANSWERS.clear()
    ANSWERS.extend(exchange.says)
    status, headers, text = exchange.asked(running)
    assert status == exchange.status, text
    for name, value in exchange.answered.items():
        if name == "Rule":
            match(RULES[-1] or "none", value)
        else:
            assert (headers[name] or ABSENT) == value
    ids = re.findall('"(?:call_)?id":"([^"]+)"', text)  # ids of answer, items and calls
    assert len(ids) == len({*ids})
    kind, _, rest = exchange.answer.partition(" ")
    if kind == "as":
        _, same = post(running, exchange.path, rest.encode())
        field = "data" if "data" in same else "choices"
        match(without_ids(json.loads(text)[field]), without_ids(same[field]), exact=True)
    elif kind.startswith("("):
        place, _, message = exchange.answer[1:].partition(") ")
        param, _, code = place.partition(", ")
        found = json.loads(text)
        error = found["error"]
        assert error["message"].isprintable()
        match(error["message"], message)
        server = "server_error" if status >= 500 else "invalid_request_error"
        wanted = {"type": server, "param": param or None, "code": code or None}
        if exchange.path.startswith(MESSAGES) or place.endswith("_error"):
            wanted = {"type": place}
            assert found == {"type": "error", "error": error}
        assert error == {"message": error["message"], **wanted}
    elif exchange.answer:
        match(json.loads(text), json.loads(exchange.answer))


STREAMED = [each for each in REQUESTS if each.streams]


@pytest.mark.parametrize("exchange", STREAMED, ids=lambda each: f"{each.line}-{each.path}")
def test_a_stream_is_the_whole(serves: Callable[[str], Running], exchange: Exchange) -> None:
    """A client that puts the parts of a stream together has the answer that is not streamed."""
    running, more = serves(exchange.server), {"stream": True}
    ANSWERS.clear()
    ANSWERS.extend([*exchange.says, *exchange.says])
    whole = json.loads(exchange.asked(running)[2])
    if exchange.path == RESPONSES:
        strict(types.Response, whole)
        stream = response_of(events_of(exchange.asked(running, **more)[2]))
    elif exchange.path == MESSAGES:
        stream = message_of(exchange.asked(running, **more)[2])
    else:
        usage = {"stream_options": {"include_usage": True}}
        stream = completion_of(exchange.asked(running, **more, **usage)[2])
    match(without_ids(stream), without_ids(whole), exact=True)


ODD: list[Any] = [
    (COMPLETION, b"[" * 10**6, 400, None, "the body: expected JSON"),
    (COMPLETION, b'{"prompt": "\xff"}', 400, None, "the body: expected JSON in UTF-8"),
    (COMPLETION, '{"prompt": "x"}'.encode("utf-16"), 400, None, "expected JSON in UTF-8"),
    (COMPLETION, b'{"stop": {%s"7": 1}}' % b"".join(b'"%d": 0,' % i for i in range(17_000)), 400,
     None, "each key once, got '7' 2 times"),
    (COMPLETION, {"logit_bias": {str(i): 0 for i in range(20_000)}}, 400, "logit_bias",
     "expected at most 16,384 token ids"),
    (COMPLETION, {"logit_bias": {"9" * 5000: 1}}, 400, "logit_bias", "expected token ids"),
    (COMPLETION, {"x" * 5000: 1}, 400, f"{'x' * 64} … {'x' * 33}", f"{'x' * 33}: there is no"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "status", "param", "words"), ODD)
def test_an_odd_body(
    serves: Callable[[str], Running], path: str, body: Any, status: int, param: Any, words: str
) -> None:
    found, answer = post(serves(TABLE[0].server), path, body)
    assert (found, answer["error"]["param"]) == (status, param)
    assert words in answer["error"]["message"]
    assert answer["error"]["message"].isprintable()


# --- rounds of common clients with tools ----------------------------------------------------------

HELLO = [{"role": "user", "content": "How warm is it?"}]
PARIS = '{"city": "Paris"}'
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
WARM = "It is 20 degrees."


@pytest.fixture
def hermes(serves: Callable[[str], Running]) -> Running:
    ANSWERS.clear()
    return serves('scripted {"template": "hermes"}')


def client_of(running: Running) -> Any:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="x", max_retries=0)


def test_a_round_of_openai(hermes: Running) -> None:
    ANSWERS.extend([CALL, CALL, WARM])
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    asked: dict[str, Any] = {"model": "small", "tools": [tool]}
    with client_of(hermes) as client:
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

"""`gpt2block serve` with common clients, and with clients that are wrong, slow or hostile."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import json
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from http.client import HTTPResponse
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("starlette", reason="the extra serve is not installed")
pytest.importorskip("uvicorn", reason="the extra serve is not installed")

import load

from gpt2block import from_pretrained
from gpt2block.apps.cli import serve as cli_serve
from gpt2block.apps.serve import answers, app, listening, metrics, passes, protocol, service
from gpt2block.apps.serve.answers import REASONS, TextOffsets
from gpt2block.apps.serve.engine_end import EngineEnd
from gpt2block.apps.serve.engine_server import EngineServer
from gpt2block.engine.generation.sequences import EndReason
from gpt2block.engine.numpy import model as numpy_model
from gpt2block.errors import InputError
from tests import serving as serving_
from tests.command_line import gpt2block
from tests.devices import slow
from tests.exchanges import (
    CHAT,
    COMPLETION,
    RESPONSES,
    Exchange,
    completion_of,
    exchanges,
    match,
    without_ids,
)
from tests.generating import Run, generate
from tests.markov import MarkovDecoding, MarkovEngine, cycle
from tests.serving import (
    BYTES,
    SECONDS,
    Running,
    Slow,
    clients_of,
    eventually,
    exchanged,
    get,
    model_of,
    post,
    serving,
    small,
)

openai = pytest.importorskip("openai", reason="openai, a client, is not installed")

HELLO = [{"role": "user", "content": "Hello"}]
NEXT = "/play/next"
END = 256  # id of the end token
NAMES = ("small", "b/c")  # names of the model
LATE_S = 0.05  # seconds by which `late_pieces` delays the receipt of pieces


@pytest.fixture(scope="module")
def model() -> Any:
    found = small()
    return model_of(
        found.engine, generate=partial(generate, found.engine, BYTES), embed=found.embed
    )


@pytest.fixture(scope="module")
def server(model: Any) -> Iterator[Running]:
    with serving(model, names=NAMES, rows=8, queue=256) as running:
        yield running


def client_of(running: Running) -> Any:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="any", max_retries=0, timeout=60)


# --- answers --------------------------------------------------------------------------------------


def test_the_client(server: Running, model: Any) -> None:
    """The client openai reads models, answers, streams, embeddings and errors; answers are history.

    An answer can be sent back as the client's object, as its `model_dump`, or as a dict.
    """
    asked: dict[str, Any] = {"model": "small", "max_tokens": 3, "seed": 1}
    with client_of(server) as client:
        assert [each.id for each in client.models.list().data] == [*NAMES]
        assert client.models.retrieve("b/c").owned_by == "gpt2block"
        with pytest.raises(openai.NotFoundError, match="no 'large': expected small or b/c") as lost:
            client.completions.create(model="large", prompt="a")
        assert lost.value.code == "model_not_found"
        text = client.completions.create(prompt="a", **asked).choices[0].text
        parts = client.completions.create(prompt="a", stream=True, **asked)
        assert "".join(each.choices[0].text for each in parts) == text
        create = partial(client.chat.completions.create, **asked)
        said = create(messages=HELLO).choices[0].message
        deltas = [each.choices[0].delta.content for each in create(messages=HELLO, stream=True)]
        assert "".join(filter(None, deltas)) == said.content
        for again in (said, said.model_dump(), {"role": "assistant", "content": said.content}):
            found = create(messages=[*HELLO, again, {"role": "user", "content": "x"}])
            assert found.usage.prompt_tokens == len(f"uHello\na{said.content}\nux\na".encode())
        exact = model.embed([[*b"one"], [*b"two"]])
        exact = exact / np.linalg.norm(exact, axis=1, keepdims=True)
        vectors = client.embeddings.create(model="small", input=["one", "two"])  # base64
        np.testing.assert_allclose([each.embedding for each in vectors.data], exact, atol=1e-6)


OPTIONS = {"max_tokens": "max_new_tokens", "n": "samples", "min_tokens": "min_new_tokens"} | {
    name: name for name in ("temperature", "top_p", "top_k", "min_p", "stop", "repetition_penalty",
                            "presence_penalty", "frequency_penalty", "seed")}  # fmt: skip
OTHER = {"prompt", "messages", "return_token_ids", "logprobs", "top_logprobs", "logit_bias",
         "stop_token_ids", "ignore_eos"}  # fmt: skip
TABLE = [*exchanges()]
LAW = [each for each in TABLE if each.streams and each.server == TABLE[0].server
       and each.path in (COMPLETION, CHAT) and each.given.keys() <= OPTIONS.keys() | OTHER
       and not each.answer.startswith("as ")]  # fmt: skip


@pytest.mark.parametrize("exchange", LAW, ids=lambda each: each.line)
def test_answers_are_those_of_generate(server: Running, model: Any, exchange: Exchange) -> None:
    """Texts, tokens, log-probabilities, ends and counts, of several samples of each prompt."""
    chat, given = exchange.path == CHAT, {"max_tokens": 99, "n": 2, **exchange.given}
    more = {"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2}
    status, found = post(server, exchange.path, {**given, **more, "return_token_ids": True})
    assert status == 200, found
    prompts = ["uHello\na"] if chat else given["prompt"]
    if isinstance(prompts, str) or isinstance(prompts[0], int):
        prompts = [prompts]
    ids = [[*each.encode()] or [END] if isinstance(each, str) else each for each in prompts]
    options = {OPTIONS[name]: value for name, value in given.items() if name in OPTIONS}
    options["seed"] = given["seed"] % 2**64
    options["logit_bias"] = {int(id): bias for id, bias in given.get("logit_bias", {}).items()}
    ends = () if given.get("ignore_eos") else (END,)
    options["stop_ids"] = [*given.get("stop_token_ids", ()), *ends]
    options |= {"temperature": given.get("temperature", 1.0), "top_logprobs": 2}
    rows = [*itertools.chain(*model.generate(ids, **options))]
    for index, (choice, row) in enumerate(zip(found["choices"], rows, strict=True)):
        said = choice["message"]["content"] if chat else choice["text"]
        end = (said, choice["finish_reason"], choice["token_ids"])
        assert end == (row.text, REASONS[row.finish_reason], [*row.tokens])
        assert (choice["index"], choice["seed"]) == (index, options["seed"])
        scores = choice["logprobs"]
        if chat:
            pair = itemgetter("token", "logprob")
            told = [[*pair(e), dict(map(pair, e["top_logprobs"]))] for e in scores["content"]]
        else:
            fields = (scores[name] for name in ("tokens", "token_logprobs", "top_logprobs"))
            told = [*map(list, zip(*fields, strict=True))]
        expected = []
        for token, logprob, top in zip(row.tokens, row.logprobs, row.top_logprobs, strict=True):
            own = {} if chat else {named(token): logprob}  # an alternative in any case
            expected.append([named(token), logprob, {named(id): each for id, each in top} | own])
        match(told, expected, exact=True)
    counts = [sum(map(len, ids)), sum(len(row.tokens) for row in rows)]
    assert [found["usage"][f"{each}_tokens"] for each in ("prompt", "completion")] == counts


def named(token: int) -> str:
    """Return the name of a token in log-probabilities."""
    name = chr(token) if token < 128 else f"bytes:\\x{token:02x}"
    return "<|endoftext|>" if token == END else name


@pytest.mark.parametrize("late", [False, True])
def test_a_stream_of_pieces_with_several_tokens(
    server: Running, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """If sending a piece takes long, the next piece has several tokens: the whole is the same.

    The time between two pieces is counted, unless they are sent at the same time.
    """
    lengths = late_pieces(monkeypatch) if late else [2]
    before = pieces_so_far(server)
    asked: dict[str, Any] = {"prompt": ["ab", "c"], "n": 2, "seed": 3, "max_tokens": 40,
                             "logprobs": 2, "stop": ["\x07", "no"]}  # fmt: skip
    whole = post(server, COMPLETION, asked)[1]
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    sent = post(server, COMPLETION, asked | usage)[1]
    match(without_ids(completion_of(sent)), without_ids(whole), exact=True)
    assert max(lengths) > 1
    parts = sent.count("data:")  # on a busy machine each of the 4 texts may have two, sent together
    least = before + (not late and parts > 12)
    eventually(lambda: least <= server.metric("piece_seconds_count") < before + parts)


def test_a_new_seed_each_time_and_temperature_1(server: Running) -> None:
    asked = {"prompt": "x", "seed": None}
    texts = {post(server, COMPLETION, asked)[1]["choices"][0]["text"] for _ in "abcde"}
    assert len(texts) == 5
    found = post(server, COMPLETION, {"prompt": ["x", "x"], "n": 2})[1]["choices"]
    assert len({each["text"] for each in found}) == len({each["seed"] for each in found}) == 4
    asked["seed"] = found[2]["seed"]
    (again,) = post(server, COMPLETION, asked)[1]["choices"]
    assert (again["text"], again["seed"]) == (found[2]["text"], found[2]["seed"])


def pieces_so_far(server: Running) -> float:
    """Return the number of pieces, after the pieces of earlier requests are counted."""
    eventually(lambda: not any(end.sequences for end in server.engine.ends))
    return server.metric("piece_seconds_count")


def late_pieces(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Delay the receipt of pieces; return a list to which each piece's token count is added."""
    put, received = EngineEnd.put, EngineEnd.received
    lengths: list[int] = []

    def noted(self: Any, pieces: Any) -> None:
        lengths.extend(len(piece.tokens) for _, _, piece in pieces)
        put(self, pieces)

    def late(self: Any) -> None:
        asyncio.get_running_loop().call_later(LATE_S, received, self)

    monkeypatch.setattr(EngineEnd, "put", noted)
    monkeypatch.setattr(EngineEnd, "received", late)
    return lengths


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([b"The", b"\xe2", b"The", b"!"], [0, 3, 4, 7]),  # the text is "The\ufffdThe!"
        ([b"\xe2", b"\x82", b"\xac", b"a"], [0, 0, 0, 1]),
        ([b"\xe2\x82", b"\xe2", b"\x82\xaca", b"b"], [0, 1, 1, 3]),
        ([b"\xff", b"\xffa", b"", b"b"], [0, 1, 3, 3]),
    ],
)
def test_offsets_in_a_text(tokens: list[bytes], expected: list[int]) -> None:
    """Bytes that are no whole character become U+FFFD when another character begins."""
    offsets = TextOffsets()
    assert [offsets.next(token) for token in tokens] == expected


def test_a_request_that_takes_too_long(model: Any) -> None:
    """The request fails and its slot becomes free; a stream ends with an error."""
    asked: dict[str, Any] = {"prompt": ["ab"] * 100, "max_tokens": 120}
    asked["logit_bias"] = {"256": -100}  # else the first token may be the last one
    with serving(model, seconds=0.05) as running:
        status, found = post(running, COMPLETION, asked)
        assert (status, found["error"]["code"]) == (504, "timeout")
        assert "did not finish it in time" in post(running, COMPLETION, asked | {"stream": True})[1]
        eventually(lambda: running.service.open == 0)
        asked |= {"prompt": "ab", "max_tokens": 1}
        assert post(running, COMPLETION, asked)[1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("many", [0, app.MANY_TOKENS])
def test_the_score_of_a_prompt(
    server: Running, model: Any, monkeypatch: pytest.MonkeyPatch, many: int
) -> None:
    """Evaluations request no new tokens, but the prompt with its log-probabilities."""
    monkeypatch.setattr(app, "MANY_TOKENS", many)
    body = {"prompt": ["abcd", "x"], "max_tokens": 0, "echo": True, "logprobs": 1}
    found = post(server, COMPLETION, body)[1]
    logits = model.engine.forward([np.array([*b"abcd"], np.int32)], "logits")[0]
    exact = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    expected = [exact[t, b"abcd"[t + 1]] for t in range(3)]
    first, second = found["choices"]
    assert (first["text"], second["text"]) == ("abcd", "x")
    np.testing.assert_allclose(first["logprobs"]["token_logprobs"][1:], expected, atol=1e-5)
    assert second["logprobs"]["token_logprobs"] == [None]


def test_many_at_a_time_are_those_alone(server: Running, model: Any) -> None:
    """More requests run than there are slots."""
    rng = random.Random(1)
    asked = [
        {"prompt": [rng.randrange(256) for _ in range(rng.randrange(1, 40))], "seed": seed,
         "max_tokens": rng.randrange(1, 30)}
        for seed in range(24)
    ]  # fmt: skip
    with ThreadPoolExecutor(24) as pool:
        found = [*pool.map(partial(post, server, COMPLETION), asked)]
    for (_, answer), given in zip(found, asked, strict=True):
        options = {"max_new_tokens": given["max_tokens"], "seed": given["seed"]}
        expected = model.generate(given["prompt"], temperature=1.0, **options)
        assert answer["choices"][0]["text"] == expected.text


# --- what is refused ------------------------------------------------------------------------------


def test_deep_messages(server: Running) -> None:
    """JSON nested about as deep as Python's recursion limit causes no internal error."""
    head = b'{"messages": [{"role": "user", "content": "<|endoftext|>", "name": '
    for depth in range(800, 1050, 10):
        body = head + b"[" * depth + b"]" * depth + b"}]}"
        assert post(server, "/tokenize", body)[0] in (200, 400)


ONLY = {name: values for name, values in protocol.NEUTRAL.items()
        if values not in (protocol.ANYTHING, ())}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "neutral"),
    [
        (COMPLETION, {"prompt": "a"}, dict.fromkeys(protocol.NEUTRAL)),
        *((CHAT, {"messages": HELLO}, {name: values[at] for name, values in ONLY.items()})
          for at in (0, -1)),
    ],
)  # fmt: skip
def test_fields_without_effect(server: Running, path: str, body: Any, neutral: Any) -> None:
    more = {"max_tokens": 9, "seed": 1}
    status, found = post(server, path, neutral | more | body)
    plain = post(server, path, more | body)[1]
    assert (status, found.get("choices")) == (200, plain["choices"])


def test_sizes_of_bodies(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large bodies and answers are read and written in parts; too large ones are refused."""
    text = "añ" * 9000
    status, found = post(server, "/tokenize", {"prompt": text})
    assert (status, found["tokens"]) == (200, [*text.encode()])
    assert post(server, "/detokenize", {"tokens": found["tokens"]}) == (200, {"prompt": text})
    for size in (app.MAX_BODY + 1, 10_000_000):  # the second is refused while it is being sent
        status, found = post(server, COMPLETION, {"prompt": "x" * size})
        assert status == 413
        assert "at most 4,194,304 bytes" in found["error"]["message"]
    monkeypatch.setattr(app, "MAX_DROPPED", 5_000_000)
    for data in (b"", b" " * 5_000_001):  # without a body to wait for, and endless
        with sent(server, COMPLETION, data, 2**40) as connection:
            assert connection.recv(12) == b"HTTP/1.1 413"
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    chunk = b"Transfer-Encoding: chunked\r\n\r\n4c4b40\r\n" + b" " * 5_000_000
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(head + chunk)
        assert connection.recv(12) == b"HTTP/1.1 413"


KEYS = {"ann": "0123456789abcdef", "bob": "fedcba9876543210"}


def key_of(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[name]}"}


def test_clients_take_turns() -> None:
    """An answer does not wait for all earlier requests of another client."""
    engine = Slow()
    ended: list[str] = []

    def ask(name: str, n: int) -> None:
        body = {"prompt": "a", "max_tokens": 20, "n": n, "temperature": 0}
        assert post(running, COMPLETION, body, **key_of(name))[0] == 200
        ended.append(name)

    with serving(model_of(engine), rows=1, keys=KEYS) as running, ThreadPoolExecutor() as threads:
        threads.submit(ask, "ann", 40)
        eventually(lambda: running.service.open == 40)
        threads.submit(ask, "bob", 1)
        eventually(lambda: running.service.open == 41)
        engine.go.set()
    assert ended == ["bob", "ann"]


@pytest.mark.parametrize(
    ("forwarded", "proxies", "client"),
    [
        (None, (), "127.0.0.1"),
        ("10.0.0.1", (), "127.0.0.1"),
        ("10.0.0.1", ("10.0.0.0/8",), "127.0.0.1"),
        ("9.9.9.9, 1.2.3.4, 10.0.0.2", ("127.0.0.1/32", "10.0.0.0/8"), "1.2.3.4"),
        ("2001:db8::4", ("127.0.0.0/8",), "2001:db8::4"),
    ],
)
def test_clients_without_keys(model: Any, forwarded: str | None, proxies: Any, client: str) -> None:
    headers = {} if forwarded is None else {"X-Forwarded-For": forwarded}
    with serving(model, rows=1, proxies=proxies) as running:
        names = clients_of(running)
        assert post(running, COMPLETION, {"prompt": "a", "max_tokens": 1}, **headers)[0] == 200
    assert names == [client]


def test_shares_of_a_full_queue() -> None:
    """A client with less than its share of 4 texts is accepted, up to 8 texts of all clients."""
    loop = asyncio.new_event_loop()
    engine: Any = Slow()
    alone = service.Service(service.batch_of(engine, 1), 3, loop)
    full = partial(pytest.raises, protocol.ApiError, match="as many requests as it takes")
    taken: list[Any] = []
    for client, count, fits in [
        ("a", 4, True), ("a", 1, False), ("b", 3, False), ("b", 2, True), ("b", 1, False),
        ("c", 1, True), ("d", 2, False), ("d", 1, True), ("e", 1, False),
    ]:  # fmt: skip
        rows = list(Run(engine, BYTES, "a", samples=count, max_new_tokens=9, seed=0).sequences)
        with contextlib.nullcontext() if fits else full():
            alone.submit(rows, lambda pieces: None, client=client)
            taken += rows
    alone.cancel(taken * 2)
    engine.go.set()
    eventually(lambda: alone.open == 0 and not alone._open_of)
    alone.close()
    with full():  # the service has ended
        alone.submit([], lambda pieces: None)
    loop.close()


def test_prefixes_of_other_clients_are_not_told(model: Any) -> None:
    """The count of cached tokens reveals earlier prompts, so prefixes are not shared by clients."""
    body = {"prompt": "a secret of ann", "max_tokens": 1}
    with serving(model, rows=1, reuse_prefixes=True, keys=KEYS) as running:
        cached = [post(running, COMPLETION, body, **key_of(name))[1]["usage"]
                  ["prompt_tokens_details"]["cached_tokens"]
                  for name in ("ann", "ann", "bob", "bob", "ann")]  # fmt: skip
    assert cached == [0, 14, 0, 14, 0]


def test_health_tells_how_far_the_start_is(model: Any) -> None:
    reached, engine = threading.Event(), MarkovEngine(cycle(257))

    def parts() -> Iterator[tuple[int, int]]:
        yield 3, 5
        assert reached.wait(60)

    engine.start_up = parts()
    with serving(model_of(engine), rows=1) as running:
        starting = {"status": "starting", "done": 3, "total": 5}
        eventually(lambda: get(running, "/health") == (503, starting))
        connection = sent(running, COMPLETION, {"prompt": "a", "max_tokens": 2})  # must wait
        eventually(lambda: running.service.open == 1)
        assert get(running, "/health/live")[0] == 200
        reached.set()
        assert received(connection)[0] == 200
        connection.close()
        assert get(running, "/health")[0] == 200


def test_a_server_that_ends_while_it_starts() -> None:
    begun, engine = threading.Event(), MarkovEngine(cycle(257))

    def parts() -> Iterator[tuple[int, int]]:
        for done in itertools.count():
            begun.set()
            yield done, done + 1

    engine.start_up = parts()
    with serving(model_of(engine), rows=1):  # serving() raises if its thread does not end
        assert begun.wait(60)


# --- clients that disconnect, and servers that fail -----------------------------------------------


def sent(running: Running, path: str, body: Any, size: int | None = None) -> socket.socket:
    """Send a request; return the connection. size: Content-Length if the body is incomplete."""
    connection = socket.create_connection(("127.0.0.1", running.port), timeout=60)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {size or len(data)}\r\n\r\n".encode() + data)
    return connection


def received(connection: socket.socket) -> tuple[int, Any]:
    """Return status and JSON of the answer on a connection."""
    with HTTPResponse(connection) as answer:
        answer.begin()
        return answer.status, json.loads(answer.read())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("behind", [0, 1000, 2**16, 10**6])
def test_a_client_that_goes_frees_its_slots(stream: bool, behind: int) -> None:
    """Clients disconnect while their request runs or waits, or after sending further bytes."""
    engine = Slow()
    with serving(model_of(engine), rows=1, queue=8) as running:
        body = {"prompt": "a", "max_tokens": 99_999, "temperature": 0, "stream": stream}
        connections = [sent(running, COMPLETION, body) for _ in range(3)]
        eventually(lambda: running.service.open == 3)
        engine.go.set()
        eventually(lambda: engine.steps > 2)
        for connection in connections:
            with suppress(OSError):  # the server may have closed the connection: too many bytes
                connection.sendall(b"x" * behind)
            connection.close()
        eventually(lambda: running.service.open == 0)
        assert engine.steps < 99_999
        found = post(running, COMPLETION, {"prompt": "a", "max_tokens": 3, "temperature": 0})
        assert found[1]["choices"][0]["text"] == "bcd"
        eventually(lambda: running.requests(COMPLETION, 200 if stream else 499) == 3 + stream)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_sends_no_more_gets_its_answers(stream: bool) -> None:
    """Its side of the connection ends; then the server answers all requests, and closes."""
    engine, body = Slow(), {"prompt": "a", "max_tokens": 3, "temperature": 0, "stream": stream}
    with serving(model_of(engine), rows=1) as running:
        connection = sent(running, COMPLETION, body)
        connection.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        connection.shutdown(socket.SHUT_WR)
        first = connection.recv(12)  # an interim response shows that the server knows
        engine.go.set()
        found = first + connection.makefile("rb").read()
    statuses = re.findall(rb"HTTP/1.1 (\d+)", found)
    assert [each for each in statuses if each != b"100"] == [b"200", b"200"]
    assert (b"[DONE]" if stream else b'"bcd"') in found
    assert found.endswith(b'{"status":"live"}')


def test_requests_that_are_sent_before_the_answer() -> None:
    """Pipelined requests are answered in order, however their bytes are divided."""
    engine, at_once = Slow(), [f"/v1/models/{name}" for name in ("small", "other", "small")]
    heads = "".join(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n" for path in at_once)
    with serving(model_of(engine)) as running:
        connection = sent(running, COMPLETION, {"prompt": "a", "max_tokens": 3})
        eventually(lambda: running.service.open == 1)
        for part in (heads[:70], heads[70:]):
            connection.sendall(part.encode())
            time.sleep(0.05)
        engine.go.set()
        data = b""
        while data.count(b"HTTP/1.1 ") < 4:
            data += connection.recv(2**16)
        assert re.findall(rb"HTTP/1.1 (\d+)", data) == [b"200", b"200", b"404", b"200"]


PASSES = [
    ("/v1/embeddings", {"input": ["a" * 128] * 256}),
    (COMPLETION, {"prompt": ["a" * 128] * 256, "max_tokens": 0, "echo": True, "logprobs": 1}),
    (NEXT, {"ids": [1]}),
]


@pytest.mark.parametrize(("path", "body"), PASSES)
@pytest.mark.parametrize("seconds", [None, 0.05])
def test_passes_end_with_their_request(
    model: Any, monkeypatch: pytest.MonkeyPatch, path: str, body: Any, seconds: float | None
) -> None:
    """When the client disconnects or the time limit is reached, no further pass begins."""
    passes, forward, go = [], model.engine.forward, threading.Event()

    def slow(*arguments: Any) -> Any:
        passes.append(arguments)
        assert go.wait(60)
        return forward(*arguments)

    monkeypatch.setattr(model.engine, "forward", slow)
    with serving(model, seconds=seconds) as running:
        connection = sent(running, path, body)
        if seconds:
            status, found = received(connection)
            assert (status, found["error"]["code"]) == (504, "timeout")
        else:
            eventually(lambda: bool(passes))
            connection.close()
        eventually(lambda: running.requests(path, 504 if seconds else 499) == 1)
        begun = len(passes)
        go.set()
        time.sleep(0.2)
        assert len(passes) <= begun + 1


def test_prefixes_are_computed_once_where_that_is_asked_for(model: Any) -> None:
    """The usage states the number of cached tokens; texts are equal to those without reuse."""
    body: dict[str, Any] = {"prompt": "a conversation that", "max_tokens": 3, "temperature": 0}
    longer = {**body, "prompt": "a conversation that goes on", "n": 2}
    last = {**longer, "n": 1, "stream": True, "stream_options": {"include_usage": True}}
    with serving(model, rows=2) as plain, serving(model, rows=2, reuse_prefixes=True) as reuses:
        found = [[post(each, COMPLETION, body)[1] for body in (body, longer)]
                 for each in (plain, reuses)]  # fmt: skip
        for without, with_ in zip(*found, strict=True):
            texts = [[choice["text"] for choice in each["choices"]] for each in (without, with_)]
            assert texts[0] == texts[1]
        assert "prompt_tokens_details" not in found[0][1]["usage"]
        told = [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in found[1]]
        assert told == [0, 0]  # at most one of two rows had the slot with the prefix
        usage = json.loads(post(reuses, COMPLETION, last)[1].split("\n\n")[-3][6:])["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == len(longer["prompt"]) - 1
        (_, first), (_, again) = (
            post(reuses, RESPONSES, {"input": "Hello", "max_output_tokens": 2}) for _ in "ab"
        )
        told = [each["usage"]["input_tokens_details"]["cached_tokens"] for each in (first, again)]
        assert told == [0, len("uHello\na") - 1]


def test_a_full_queue_refuses_at_once() -> None:
    engine = Slow()
    with serving(model_of(engine), rows=1, queue=2) as running:
        body = {"prompt": "a", "max_tokens": 2, "temperature": 0}
        connections = [sent(running, COMPLETION, body) for _ in range(3)]
        eventually(lambda: running.service.open == 3)
        status, headers, text = exchanged(running.url + COMPLETION, body)
        assert (status, headers["Retry-After"]) == (503, "1")
        assert json.loads(text)["error"]["code"] == "overloaded"
        engine.go.set()
        for connection in connections:
            assert received(connection)[1]["choices"][0]["text"] == "bc"
            connection.close()


def test_wrong_logits_end_one_request() -> None:
    table = cycle(257)
    table[ord("c")] = np.nan
    engine = Slow(table)
    engine.go.set()
    with serving(model_of(engine), rows=4) as running:
        options = {"max_tokens": 4, "temperature": 0}
        status, found = post(running, COMPLETION, {"prompt": "a", **options})
        assert status == 500
        assert "the logits are NaN after 2 new tokens" in found["error"]["message"]
        assert post(running, COMPLETION, {"prompt": "d", **options})[0] == 200
        stream = post(running, COMPLETION, {"prompt": "a", "stream": True, **options})[1]
        assert '"text": "c"' in stream
        assert "logits are NaN" in json.loads(stream.split("\n\n")[-2][6:])["error"]["message"]


def fail(*_: Any) -> Any:
    raise RuntimeError("out of everything")


@pytest.mark.parametrize("method", ["next", "stop"])
def test_a_step_that_fails_ends_its_requests_alone(
    method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine fails in a step, or when the sequence of a disconnected client is stopped."""
    engine = Slow()
    with serving(model_of(engine), rows=1) as running:
        batch = running.service._batch
        connection = sent(running, COMPLETION, {"prompt": "a", "max_tokens": 99_999})
        eventually(lambda: not batch.waiting and batch.busy)
        waits = sent(running, COMPLETION, {"prompt": "a", "max_tokens": 3, "temperature": 0})
        eventually(lambda: running.service.open == 2)
        monkeypatch.setattr(batch._decoding, method, fail)
        if method == "stop":
            connection.close()
            eventually(lambda: len(running.service._cancelled) == 1)
        engine.go.set()
        if method == "next":
            problem = "the engine failed: RuntimeError('out of everything')"
            assert received(connection) == (500, protocol.ApiError(500, problem).body())
        status, found = received(waits)
        assert (status, found["choices"][0]["text"]) == (200, "bcd")
        assert running.metric("failed_steps_total") == 1
        assert get(running, "/health")[0] == 200
        eventually(lambda: running.service.open == 0)
    (message,) = caplog.messages
    assert message.startswith("a step of the engine failed\nTraceback")


@pytest.mark.parametrize("outcomes", ["-+--+---", "-"])
def test_an_engine_that_cannot_go_on(outcomes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps in a row fail (outcome -), or the engine is lost, so that it cannot restart."""
    engine = MarkovEngine(cycle(257))
    body, following = {"prompt": "a", "max_tokens": 1}, MarkovDecoding.next
    with serving(model_of(engine), rows=1) as running:
        # Keep the server from ending after the failure: it would refuse the last two requests.
        monkeypatch.setattr(running.service, "_on_failure", (ends := threading.Event()).set)
        if outcomes == "-":
            monkeypatch.setattr(engine, "decode", fail)
        for outcome in outcomes:
            assert get(running, "/health")[0] == 200
            monkeypatch.setattr(MarkovDecoding, "next", fail if outcome == "-" else following)
            assert post(running, COMPLETION, body)[0] == (500 if outcome == "-" else 200)
        eventually(ends.is_set)
        assert running.metric("failed_steps_total") == outcomes.count("-")
        assert "RuntimeError('out of everything')" in str(post(running, COMPLETION, body))
        assert get(running, "/health")[0] == 503


def test_silent_connections_do_not_stay(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    monkeypatch.setattr(listening, "HEAD_SECONDS", 0.4)
    with serving(model, rows=1, connections=4) as running:
        silent = [socket.create_connection(("127.0.0.1", running.port)) for _ in range(4)]
        silent[0].sendall(b"POST /tokenize HTTP/1.1\r\nHost: local")
        eventually(lambda: "overloaded" in str(post(running, "/tokenize", {"prompt": "x"})))
        eventually(lambda: post(running, "/tokenize", {"prompt": "x"})[0] == 200)
        for connection in silent:
            connection.close()


def test_a_second_request_has_to_come_as_well(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    """A connection is closed if the head of its second request does not end in time."""
    monkeypatch.setattr(listening, "HEAD_SECONDS", 0.4)
    request = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with (
        serving(model, rows=1) as running,
        socket.create_connection(("127.0.0.1", running.port), timeout=60) as connection,
    ):
        connection.sendall(request)
        assert connection.recv(12) == b"HTTP/1.1 200"
        connection.settimeout(0.1)
        more, found = iter(request * 10), b"x"
        end = time.monotonic() + 30
        while found and time.monotonic() < end:
            with suppress(TimeoutError, BrokenPipeError):
                connection.sendall(bytes([next(more)]))
            with suppress(TimeoutError):
                found = connection.recv(1000)
        assert not found


def test_pieces_are_sent_at_once(monkeypatch: pytest.MonkeyPatch, server: Running) -> None:
    """No piece waits until the previous one is acknowledged, which takes a proxy 40 ms."""
    at_once = []
    made = listening.Protocol.connection_made

    def connection_made(self: Any, transport: Any) -> None:
        made(self, transport)
        connection = transport.get_extra_info("socket")
        at_once.append(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    monkeypatch.setattr(listening.Protocol, "connection_made", connection_made)
    assert post(server, "/tokenize", {"prompt": "x"})[0] == 200
    assert at_once
    assert all(at_once)


def test_a_line_in_the_log_for_each_request(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Lines have the name of the key and no secrets; by default there are none."""
    body = {"prompt": "abc", "max_tokens": 2, "seed": 1}
    with (
        serving(model, rows=1, keys=KEYS) as running,
        caplog.at_level("INFO", "gpt2block.apps.serve"),
    ):
        post(running, COMPLETION, {**body, "stream": True}, **key_of("ann"))
        post(running, COMPLETION, body, **key_of("bob"))
        post(running, COMPLETION, body, Authorization="Bearer wrong")
        get(running, "/play/explain/ticket")
        eventually(lambda: len(caplog.messages) == 4)
        caplog.set_level("WARNING", "gpt2block.apps.serve")
        post(running, COMPLETION, body, **key_of("bob"))
    found = [re.sub(r"\d\.\d{3} s|, req-[0-9a-f]{32}$", "T", each) for each in caplog.messages]
    assert found == [
        "POST /v1/completions 200 T, 3 + 2 tokens, annT",
        "POST /v1/completions 200 T, 3 + 2 tokens, bobT",
        "POST /v1/completions 401 TT",
        "GET /play/explain/… 404 TT",
    ]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limit")
@pytest.mark.parametrize(
    ("limits", "raised", "warns"),
    [((64, 4096), 1064, False), ((64, 512), 512, True), ((64, -1), 1064, False),
     ((1064, 1064), None, False), ((-1, -1), None, False)],
)  # fmt: skip
def test_files_that_may_be_open(
    limits: Any, raised: Any, warns: bool, monkeypatch: Any, caplog: Any
) -> None:
    """Each connection is an open file: the limit is raised, or a warning says it is too low."""
    import resource  # noqa: PLC0415

    given: list[Any] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, changed: given.append(changed))
    listening.allow_files(1000)
    assert given == ([] if raised is None else [(raised, limits[1])])
    assert ("expected 1064 or more, or fewer --connections than 1000" in caplog.text) == warns


def test_nothing_is_left_after_many_requests(server: Running) -> None:
    def work() -> None:
        for _ in range(15):
            assert post(server, COMPLETION, {"prompt": "abc", "max_tokens": 2})[0] == 200

    work()
    threads = threading.active_count()
    with ThreadPoolExecutor() as workers:
        for each in [workers.submit(work) for _ in range(4)]:
            each.result()
    assert threading.active_count() < threads + app.AT_ONCE  # AT_ONCE threads encode texts
    # an answer is sent before its sequence is forgotten
    eventually(lambda: server.service.open == 0)
    assert not server.service._since
    assert not server.service._places


@pytest.mark.parametrize("how", [["--rate", "40"], slow(["--at-once", "12"])])
def test_a_load_with_clients_that_go(
    server: Running, capsys: pytest.CaptureFixture[str], how: list[str]
) -> None:
    """tools/load.py sends requests at random times or as fast as possible, and some large ones."""
    more = "--closing", "0.3", "--large-every", "0.2"
    for seconds in ("1", "4", "16"):  # on a busy machine the process of large requests begins late
        found = loaded(server, capsys, "--seconds", seconds, *more, *how)
        if "large" in found:
            break
    assert found["answered"] > 5
    assert found["closed"] > 0
    assert (found["refused"], found["cut"]) == (0, 0)
    assert 0 < found["first p50 ms"] <= found["first p99 ms"]
    assert found["between p99 ms"] <= found["between max ms"]
    first = f"{COMPLETION} 400"
    assert {first} <= {*found["large"]} <= {first, "/tokenize 200", f"{CHAT} 413"}
    eventually(lambda: server.service.open == 0)


def loaded(server: Running, capsys: pytest.CaptureFixture[str], *how: str) -> Any:
    """Run tools/load.py; return its report."""
    given = ["--model", "small", "--lengths", "1", "30", "--new", "20", "--temperature", "0"]
    load.main([f"{server.url}/v1", *given, *how])
    return json.loads(capsys.readouterr().out)


def piece_of(data: bytes, reason: EndReason | None = None) -> service.Piece:
    return service.Piece([*data], [-1.0] * len(data), [], [False] * len(data), 0, reason)


A, B, C, LAST = piece_of(b"a"), piece_of(b"b"), piece_of(b"c\n"), piece_of(b"de", "length")


@pytest.mark.parametrize(
    ("groups", "events", "texts"),
    [
        ([[A, B, C, LAST]], 2, ["a", "bc\nde", "[DONE]"]),
        ([[A], [B, C], [LAST]], 4, ["a", "bc\n", "de", "[DONE]"]),
        ([[A, piece_of(b"", "deadline")]], 2, ["a", "timeout"]),
        ([[A, piece_of(b"e", "deadline")]], 2, ["a", "e", "timeout"]),
        ([[A, protocol.ApiError(503, "The engine has ended.", code="ended")]], 2, ["a", "ended"]),
    ],
)
def test_events_that_come_together_are_sent_together(
    groups: list[Any], events: int, texts: list[str]
) -> None:
    """The first token is sent alone. Tokens before a failure are sent before the error."""
    times: list[float] = []

    async def sent() -> list[bytes]:
        given: Any = SimpleNamespace(numbers=itertools.count())
        engine: Any = Slow()
        answer = answers.Answer(given, Run(engine, BYTES, "a", max_new_tokens=6, seed=0).sequences)
        form, echoes = answers.TextForm("small", BYTES), [answers.AnswerChoice()]
        stream = answers.streamed(answer, form, echoes, False, None, observe=times.append)
        found = []
        for group in groups:
            for each in group:
                answer.fail(each) if isinstance(each, protocol.ApiError) else answer.put(0, each)
            found.append(await anext(stream))
        return [*found, *[event async for event in stream]]

    found = asyncio.run(sent())
    told = []
    for each in b"".join(found).decode().split("\n\n")[:-1]:
        said = {} if each.endswith("[DONE]") else json.loads(each[6:])
        told.append(said["choices"][0]["text"] if "choices" in said else
                    said["error"]["code"] if said else "[DONE]")  # fmt: skip
    assert (len(found), told, len(times)) == (events, texts, len(groups) - 1)


def test_a_call_that_is_dropped_before_it_starts_is_forgotten() -> None:
    host: Any = SimpleNamespace(service=SimpleNamespace(cancel=lambda *_: None))

    async def left() -> dict[int, Any]:
        end = EngineEnd(host, lambda: None)
        end.call(1, "health")
        end.drop(1)
        await asyncio.sleep(0.01)
        return end._calls

    assert asyncio.run(left()) == {}


@pytest.mark.parametrize(
    ("rows", "released"), [(service.MAX_EARLY, "aab"), (service.MAX_EARLY + 1, "ab")]
)
def test_pieces_in_flight(rows: int, released: str) -> None:
    """A sequence gets new tokens once its piece is received; of few, one more may be in flight."""
    found: list[Any] = []
    fake: Any = SimpleNamespace(open=rows, release=found.extend)
    piece = service.Piece([1], [0.0], [], [False])
    end: Any = EngineEnd(SimpleNamespace(service=fake), lambda: None)  # type: ignore[arg-type]
    end.channel = SimpleNamespace(send=lambda *item: None)
    for row in "ab":
        end.put([(row, (0, 0), piece)])
    assert len(found) == len(released) - 2

    async def receive() -> None:
        end.received()
        end.received()

    asyncio.run(receive())
    assert "".join(found) == released


def test_a_stream_without_tokens_sends_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comments keep the connection open in proxies; they stop before the stream ends."""
    monkeypatch.setattr(app, "PING_SECONDS", 0.01)
    engine, body = Slow(), {"prompt": "a", "max_tokens": 2, "temperature": 0, "stream": True}
    with (
        serving(model_of(engine), rows=1) as running,
        HTTPResponse(sent(running, COMPLETION, body)) as answer,
    ):
        answer.begin()
        comment = answer.readline()
        engine.go.set()
        text = (comment + answer.read()).decode()
    assert (answer.status, answer.headers["cache-control"]) == (200, "no-store")
    assert answer.headers["content-type"].startswith("text/event-stream")
    comments, _, rest = text.partition("data: ")
    assert set(comments.split("\n\n")) == {": ping", ""}
    assert rest.endswith("data: [DONE]\n\n")


def test_large_bodies_are_read_in_a_thread(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []

    def noted(*arguments: Any) -> Any:
        names.append(threading.current_thread().name)
        return protocol.parsed(*arguments)

    monkeypatch.setattr(app, "parsed", noted)
    for size in (10, app.SMALL_BODY):
        post(server, "/tokenize", {"prompt": "a" * size})
    loop, other = names
    assert loop != other


def test_metrics(model: Any) -> None:
    """Each token of a whole answer or a stream is counted once."""
    body = {"prompt": "abc", "n": 2, "seed": 1, "max_tokens": 7}
    with serving(model, rows=3) as running:
        for more in ({}, {"max_tokens": 5, "stream": True}, {"prompt": 3}):
            post(running, COMPLETION, body | more)
        eventually(lambda: running.service.open == 0)
        answered = {200: 2, 400: 1}  # a process counts a request after its response
        eventually(lambda: all(running.requests(COMPLETION, s) == n for s, n in answered.items()))
        lines = {*get(running, "/metrics")[1].splitlines()}
        seconds = running.metric("token_seconds_sum")
    assert lines >= {
        'gpt2block_requests_total{path="/v1/completions",status="200"} 2.0',
        "gpt2block_slots 3.0", "gpt2block_new_tokens_total 24.0",
        "gpt2block_first_token_seconds_count 4.0", "gpt2block_token_seconds_count 20.0",
        'gpt2block_token_seconds_bucket{le="+Inf"} 20.0',
    }  # fmt: skip
    assert 0 < seconds < 20 * SECONDS


def test_intervals() -> None:
    found = metrics.Intervals("seconds", "A text.", (0.5, 1, 2))
    for seconds in ([0.1, 0.5, 0.6], []):
        found.add(np.array(seconds))
    found.add(np.array([2.5, 1]))
    (family,) = found.collect()
    values = {(sample.name, *sample.labels.values()): sample.value for sample in family.samples}
    assert [values["seconds_bucket", le] for le in ("0.5", "1.0", "2.0", "+Inf")] == [2, 4, 4, 5]
    assert values["seconds_sum",] == pytest.approx(4.7)


# --- the command ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command", [each for each in TABLE if each.method == "RUN"], ids=lambda each: each.line
)
def test_wrong_options(command: Exchange, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ann, bob = KEYS.values()
    for name, text in {
        "key": ann, "short": "abc", "empty": "# NAME KEY\n", "unnamed": f"ann {ann}\n{bob}",
        "twice": f"ann {ann}\nann: {bob}", "same": f"ann {ann}\nbob {ann}",
    }.items():  # fmt: skip
        Path(f"{name}.txt").write_text(f"{text}\n")
    arguments = "--model", "shakespeare", *shlex.split(command.body)
    match(gpt2block(command.path, *arguments).error, command.answer)


def test_files_of_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file has keys with names, or one key; a warning tells if others can read the file."""
    file = tmp_path / "keys"
    file.write_text(f"# keys of clients\n ann: {KEYS['ann']}\n\nbob\t{KEYS['bob']}")
    file.chmod(0o600)
    assert cli_serve._keys(file) == KEYS
    assert not caplog.text
    file.write_text(f"# key of a client\n{KEYS['ann']}\n", encoding="utf-8-sig")
    file.chmod(0o604)
    assert cli_serve._keys(file) == {"default": KEYS["ann"]}
    assert sys.platform == "win32" or "all users can read the keys" in caplog.text
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match=r"expected UTF-8 text, byte 0 is invalid$"):
        cli_serve._keys(file)


def test_the_interpreter_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """`settle` sets switch interval and garbage collection before the server starts."""
    calls: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(listening, "settle", lambda: calls.append("settle"))
        patch.setattr(EngineServer, "run", lambda *_: calls.append("run"))
        options = "--processes", 0, "--port", 0
        gpt2block("serve", "--model", "shakespeare", "--device", "cpu", *options)
    assert calls == ["settle", "run"]
    before = sys.getswitchinterval(), gc.get_threshold(), gc.get_freeze_count()
    kept = [[number] for number in range(100)]
    listening.settle()
    try:
        assert (sys.getswitchinterval(), gc.get_threshold()[0]) == (0.0005, 20_000)
        assert gc.get_freeze_count() >= before[2] + len(kept)
    finally:
        sys.setswitchinterval(before[0])
        gc.set_threshold(*before[1])


@pytest.mark.parametrize("listens", [True, False])
def test_a_port_that_is_taken(listens: bool) -> None:
    """The port may be taken by a server that still loads its model. No model is loaded first."""
    taken = socket.create_server(("127.0.0.1", 0)) if listens else cli_serve._socket("127.0.0.1", 0)
    with taken:
        port = taken.getsockname()[1]
        ended = gpt2block("serve", "--model", "no-such-file", "--device", "cpu", "--port", port)
    assert re.match(f"--port {port}: .* in use: expected a free port", ended.error)


@contextlib.contextmanager
def command(*more: str, first: str = "") -> Iterator[tuple[Any, str]]:
    """Run `gpt2block serve` in a process; yield it and its log's first line.

    first: Python code that runs before.
    """
    # The imports are those of __main__.py: `from gpt2block import cli` would also import NumPy,
    # whose threads would then receive SIGINT, because `main` has not yet blocked it.
    code = f"{first}\nfrom gpt2block.apps.cli import main\nmain()"
    at = () if "--uds" in more else ("--port", "0")
    processes = "--processes", str(serving_.PROCESSES)
    given = ["serve", "--model", "shakespeare", "--device", "cpu", *processes, *at, *more]
    child = subprocess.Popen(
        [sys.executable, "-c", code, *given],
        stderr=subprocess.PIPE, text=True, env={**os.environ, "NO_COLOR": "1"},
    )  # fmt: skip
    try:
        assert child.stderr is not None
        yield child, child.stderr.readline()
    finally:
        child.kill()
        child.communicate()


def client_of_command(line: str) -> Any:
    found = re.search(r"http://127\.0\.0\.\d:(\d+)/v1", line)
    assert found, line
    return openai.OpenAI(base_url=found[0], api_key="x", max_retries=0)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM")
@pytest.mark.parametrize("number", [signal.SIGTERM, slow(signal.SIGINT)])
def test_a_signal_finishes_what_runs(number: int) -> None:
    """A stream ends normally; then the port is free, though the server closed a connection."""
    host = "127.0.0.2" if sys.platform == "linux" and number == signal.SIGTERM else "127.0.0.1"
    more = "--name", "small", "--name", "b", "--cors-origin", "http://A.b", "--rows", "2"
    with command("--host", host, *more) as (child, line), client_of_command(line) as client:
        stream = client.completions.create(
            model="b", prompt="ROMEO:", stream=True, max_tokens=200, seed=1,
            extra_headers={"Origin": "http://a.b"},
        )  # fmt: skip
        assert stream.response.headers["Access-Control-Allow-Origin"] == "http://a.b"
        chunks = iter(stream)
        next(chunks)
        child.send_signal(number)
        reasons = [chunk.choices[0].finish_reason for chunk in chunks]
        assert reasons[-1] == "length"
        assert child.wait(60) == 0
        assert "the server ends after 1 answer, at most 25 s: a second" in child.stderr.read()
        cli_serve._socket(host, client.base_url.port).close()


SLOW_TO_LOAD = """
import sys, time
from gpt2block.apps.cli import serve
serve.load_model = lambda *_: (print("loads", file=sys.stderr, flush=True), time.sleep(60))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM")
@pytest.mark.parametrize(("first", "wait"), [slow("", 0), slow("", 0.02), (SLOW_TO_LOAD, 0)])
def test_a_signal_at_any_time_ends_the_server(first: str, wait: float) -> None:
    """The signal may come right after the address is shown, or while the model is loaded."""
    with command(first=first) as (child, line):
        assert line.startswith("loads" if first else "shakespeare")
        time.sleep(wait)
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == 0
        assert child.stderr.read() == ""


FAILING = """
from gpt2block.engine.numpy.model import NumpyDecoding
NumpyDecoding.next = lambda *_: 1 / 0
"""


def test_an_engine_that_fails_ends_the_server() -> None:
    """A supervisor can then restart it. Requests and the log state the reason."""
    with command(first=FAILING) as (child, line), client_of_command(line) as client:
        for number in range(service.MAX_FAILED):
            asked: dict[str, Any] = {"prompt": "a", "stream": number % 2 == 0}
            with pytest.raises(openai.APIError, match="the engine failed: ZeroDivisionError"):
                list(client.completions.create(model="shakespeare", **asked))
        assert child.wait(60) == 1
        log = child.stderr.read()
    assert log.count("ERROR a step of the engine failed\nTraceback") == service.MAX_FAILED - 1
    assert log.count("CRITICAL the engine failed\nTraceback") == 1
    assert log.endswith("ZeroDivisionError: division by zero\n")


def test_a_mistake_of_the_server(
    model: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client gets an error (in a stream an event), which is also logged and counted."""

    def fail(*_: Any) -> Any:
        raise RuntimeError("\x1b[31m red")

    monkeypatch.setattr(answers.TextForm, "deltas", fail)
    monkeypatch.setattr(passes, "vectors_of", fail)
    with serving(model, rows=1) as running:
        stream = post(running, COMPLETION, {"prompt": "a", "max_tokens": 99, "stream": True})[1]
        assert "the server has made an error" in json.loads(stream[6:])["error"]["message"]
        eventually(lambda: running.service.open == 0)
        status, found = post(running, "/v1/embeddings", {"input": "x"})
        assert (status, found["error"]["message"]) == (500, "the server has made an error")
        for path, logged in zip((COMPLETION, "/v1/embeddings"), caplog.messages, strict=True):
            eventually(lambda: running.metric("faults_total", path=path) == 1)  # noqa: B023
            assert re.match(f"{path}, req-[0-9a-f]{{32}}: Traceback", logged)
            assert logged.endswith("RuntimeError: \\x1b[31m red")


def test_memory_is_given_back_after_a_time_without_requests(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "REST_S", 0.01)
    monkeypatch.setattr(numpy_model, "FIRST_POSITIONS", 4)
    with serving(model, rows=2) as running:
        assert post(running, COMPLETION, {"prompt": "abcdefgh", "max_tokens": 9})[0] == 200
        cache: Any = running.service._batch._decoding._cache
        eventually(lambda: cache.positions == 4 and cache.lengths == [0, 0])


@pytest.mark.usefixtures("smollm2_files")
def test_a_real_model() -> None:
    """The stream has the same events as on the page docs/serve.md, except for random numbers."""
    page = (Path(__file__).parents[2] / "docs" / "serve.md").read_text(encoding="utf-8")
    (sent, shown), *_ = re.findall(r"-d '(.*)'\n((?:data: .*\n\n?)+)", page)
    events = [json.loads(line) for line in re.findall("data: ({.*)", shown)]
    loaded = from_pretrained("smollm2", device="cpu")
    with serving(loaded, loaded.tokenizer, rows=2) as running, client_of(running) as client:
        stream = [e.to_dict() for e in client.completions.create(model="small", **json.loads(sent))]
    for found_event, event in zip(stream, events, strict=True):
        (choice,), (expected,) = found_event.pop("choices"), event.pop("choices")
        assert {**choice, "seed": 0} == {**expected, "seed": 0}
        assert ("seed" in choice, found_event.keys()) == ("seed" in expected, event.keys())

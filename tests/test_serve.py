"""`gpt2block serve` with common clients, and with clients that are wrong, slow or hostile."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import re
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
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("starlette", reason="the extra serve is not installed")
uvicorn = pytest.importorskip("uvicorn", reason="the extra serve is not installed")
openai = pytest.importorskip("openai", reason="openai, a client, is not installed")

import load  # noqa: E402

from gpt2block import from_pretrained  # noqa: E402
from gpt2block.cli import serve as cli_serve  # noqa: E402
from gpt2block.errors import InputError  # noqa: E402
from gpt2block.generation.rows import EndReason  # noqa: E402
from gpt2block.run import numpy_model  # noqa: E402
from gpt2block.serve import (  # noqa: E402
    answers,
    app,
    listening,
    metrics,
    passes,
    protocol,
    service,
    settings,
)
from gpt2block.serve.answers import TextOffsets  # noqa: E402
from gpt2block.serve.host import Host, LocalEngine  # noqa: E402
from gpt2block.serve.prompts import scored_prompt  # noqa: E402
from gpt2block.tokenizers import tokenizer  # noqa: E402
from tests import serving as serving_  # noqa: E402
from tests.command_line import gpt2block  # noqa: E402
from tests.generating import Run, generate  # noqa: E402
from tests.markov import MarkovDecoding, MarkovEngine, cycle  # noqa: E402
from tests.serving import (  # noqa: E402
    BYTES,
    CONFIG,
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

HELLO = [{"role": "user", "content": "Hello"}]
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


def client_of(running: Running, key: str = "any") -> Any:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key=key, max_retries=0, timeout=60)


@pytest.fixture
def client(server: Running) -> Iterator[Any]:
    with client_of(server) as found:
        yield found


# --- the client openai ----------------------------------------------------------------------------


def test_models(client: Any) -> None:
    """A model can be requested by any of its names; answers state the first one."""
    found = client.models.list().data
    assert [(each.id, each.owned_by) for each in found] == [(n, "gpt2block") for n in NAMES]
    for name in NAMES:
        assert client.models.retrieve(name).id == name
        assert client.completions.create(model=name, prompt="a", max_tokens=1).model == "small"
    with pytest.raises(openai.NotFoundError, match="there is no 'large': expected small or b/c"):
        client.models.retrieve("large")
    with pytest.raises(openai.NotFoundError, match="no 'large': expected small or b/c") as unknown:
        client.completions.create(model="large", prompt="a")
    assert unknown.value.code == "model_not_found"


def test_completions_are_those_of_generate(client: Any, model: Any) -> None:
    """Prompts are one or several texts or lists of ids, with samples, seeds and stops."""
    prompts: list[Any] = ["To be", [1, 2, 3], ["a", "bc"], [[4], [5, 6]]]
    for prompt in prompts:
        found = client.completions.create(
            model="small", prompt=prompt, n=2, seed=5, max_tokens=7, stop=["e", "zz"]
        )
        several = not isinstance(prompt, str) and not isinstance(prompt[0], int)
        texts = prompt if several else [prompt]
        options = {"temperature": 1.0, "seed": 5, "max_new_tokens": 7, "stop": ["e", "zz"]}
        ids = [[*text.encode()] if isinstance(text, str) else text for text in texts]
        rows = [*itertools.chain(*model.generate(ids, samples=2, **options))]
        assert [choice.index for choice in found.choices] == [*range(len(rows))]
        for choice, row in zip(found.choices, rows, strict=True):
            assert (choice.text, choice.finish_reason) == (row.text, row.finish_reason)
        assert found.usage.prompt_tokens == sum(map(len, ids))
        assert found.usage.completion_tokens == sum(len(row.tokens) for row in rows)


def test_a_new_seed_each_time_and_temperature_1(client: Any) -> None:
    asked: dict[str, Any] = {"model": "small", "prompt": "x", "seed": None}
    texts = {client.completions.create(**asked).choices[0].text for _ in "abcde"}
    assert len(texts) == 5
    found = client.completions.create(model="small", prompt=["x", "x"], n=2).choices
    assert len({choice.text for choice in found}) == len({choice.seed for choice in found}) == 4
    for stream in (False, True):
        again = client.completions.create(**asked | {"seed": found[2].seed, "stream": stream})
        parts = [each.choices[0] for each in again] if stream else again.choices
        assert "".join(part.text for part in parts) == found[2].text
        assert parts[-1].seed == found[2].seed


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"presence_penalty": 2}, {"presence_penalty": 2.0}),
        ({"frequency_penalty": -2}, {"frequency_penalty": -2.0}),
        ({"stop_token_ids": [*range(99)]}, {"stop_ids": [*range(99), END]}),
        ({"logit_bias": {str(END): 100}}, {"logit_bias": {END: 100}}),
        ({"logit_bias": {"97": 99.5, "98": -100}}, {"logit_bias": {97: 99.5, 98: -100}}),
        ({"logit_bias": {str(END): 100}, "ignore_eos": True},
         {"logit_bias": {END: 100}, "stop_ids": ()}),
        ({"ignore_eos": True, "stop_token_ids": [*range(99)]}, {"stop_ids": [*range(99)]}),
        ({"min_tokens": 6, "stop_token_ids": [*range(99)]},
         {"min_new_tokens": 6, "stop_ids": [*range(99), END]}),
    ],
)  # fmt: skip
def test_penalties_and_stop_tokens(
    server: Running, model: Any, fields: dict[str, Any], options: dict[str, Any]
) -> None:
    usual: dict[str, Any] = {"prompt": "a", "seed": 2, "max_tokens": 12}
    asked = [{**usual, "return_token_ids": True, **more} for more in (fields, {})]
    (got,), (without,) = (post(server, COMPLETION, each)[1]["choices"] for each in asked)
    expected = model.generate([*b"a"], seed=2, max_new_tokens=12, temperature=1.0, **options)
    assert got["token_ids"] == [*expected.tokens]
    assert got["finish_reason"] == expected.finish_reason
    assert got["token_ids"] != without["token_ids"]


def test_an_empty_prompt_starts_from_the_end_of_a_text(client: Any) -> None:
    found = client.completions.create(model="small", prompt="", max_tokens=1)
    assert found.usage.prompt_tokens == 1


def test_chat(client: Any, model: Any) -> None:
    messages = [{"role": "system", "content": "S"}, *HELLO]
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    for asked in (messages, [messages[0], {"role": "user", "content": parts}]):
        found = client.chat.completions.create(
            model="small", messages=asked, max_completion_tokens=6, temperature=0
        )
        (choice,) = found.choices
        expected = model.generate([*b"sS\nuHello\na"], max_new_tokens=6, temperature=0)
        assert choice.message.role == "assistant"
        assert choice.message.content == expected.text
        assert (choice.finish_reason, found.usage.total_tokens) == ("length", 17)


def test_an_answer_is_history(client: Any) -> None:
    """An answer can be sent back as the client's object, as its `model_dump`, or as a dict."""
    create = partial(client.chat.completions.create, model="small", max_tokens=3, seed=1)
    said = create(messages=HELLO).choices[0].message
    for again in (said, said.model_dump(), {"role": "assistant", "content": said.content}):
        found = create(messages=[*HELLO, again, {"role": "user", "content": "x"}])
        assert found.usage.prompt_tokens == len(f"uHello\na{said.content}\nux\na".encode())


def test_arguments_of_the_template(model: Any) -> None:
    """Variables of a request replace the server's variables for the chat template."""
    asked = {"messages": [*HELLO, {"role": "assistant", "content": "Hi"}], "max_tokens": 4}
    with serving(model_of(model.engine), chat_template_kwargs={"style": "S"}) as running:
        for more, text in (
            ({}, "SuHello\naHi\na"),
            ({"chat_template_kwargs": {"style": "T"}}, "TuHello\naHi\na"),
            ({"chat_template_kwargs": None, "add_generation_prompt": False}, "SuHello\naHi\n"),
            ({"continue_final_message": True, "add_generation_prompt": None}, "SuHello\naHi"),
        ):
            body = {**asked, **more, "return_token_ids": True}
            status, found = post(running, CHAT, body)
            assert (status, found["prompt_token_ids"]) == (200, [*text.encode()])
            del body["max_tokens"], body["return_token_ids"]
            assert post(running, "/tokenize", body)[1]["tokens"] == [*text.encode()]


def test_chat_until_the_context_is_full(client: Any) -> None:
    found = client.chat.completions.create(model="small", messages=HELLO, seed=1)
    assert found.choices[0].finish_reason in ("stop", "length")
    assert found.usage.total_tokens <= CONFIG.n_ctx + 1


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": ["ab", "c"], "n": 2},
        {"prompt": ["ab", "c"], "n": 2, "logprobs": 2, "stop": ["\x07", "no"],
         "extra_body": {"return_token_ids": True}},
        {"prompt": "ab", "logprobs": 3, "echo": True},
        {"messages": HELLO, "n": 2},
        {"messages": HELLO, "logprobs": True, "top_logprobs": 2},
        {"messages": HELLO, "extra_body": {"structured_outputs": {"regex": "[ab]{30}"}}},
    ],
)  # fmt: skip
def test_streams_are_the_whole(
    client: Any, server: Running, monkeypatch: pytest.MonkeyPatch, fields: Any, late: bool
) -> None:
    """If sending a piece takes long, the next piece has several tokens: the whole is the same.

    The time between two pieces is counted, unless they are sent at the same time. On a busy
    machine, an echo, a row's first piece and a piece with all other tokens of the row can be.
    """
    lengths = late_pieces(monkeypatch) if late else [2]
    before = pieces_so_far(server)
    create = (client.chat if "messages" in fields else client).completions.create
    asked = {"model": "small", "seed": 3, "max_tokens": 40, **fields}
    whole = create(**asked)
    *chunks, last = create(stream=True, stream_options={"include_usage": True}, **asked)
    assert max(lengths) > 1
    pieces = [each for chunk in chunks for each in chunk.choices if text_of(each)]
    together = (2 + ("echo" in fields)) * len(whole.choices)
    least = before + (not late and len(pieces) > together)
    eventually(lambda: least <= server.metric("piece_seconds_count") < before + len(chunks))
    assert (last.choices, last.usage) == ([], whole.usage)
    assert not any(chunk.usage for chunk in chunks)
    for choice in whole.choices:
        parts = [each for chunk in chunks for each in chunk.choices if each.index == choice.index]
        assert "".join(map(text_of, parts)) == text_of(choice)
        assert [each.finish_reason for each in parts[-2:]] == [None, choice.finish_reason]
        ids = [id for each in parts for id in getattr(each, "token_ids", [])]
        assert ids == getattr(choice, "token_ids", [])
        told = [each for part in parts for each in scores(part)]
        for (token, scored), (expected, of_whole) in zip(told, scores(choice), strict=True):
            assert token == expected
            assert scored == pytest.approx(of_whole, abs=1e-5)


def pieces_so_far(server: Running) -> float:
    """Return the number of pieces, after the pieces of earlier requests are counted."""
    eventually(lambda: not any(outlet._rows for outlet in server.outlets))
    return server.metric("piece_seconds_count")


def late_pieces(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Delay the receipt of pieces; return a list to which each piece's token count is added."""
    put, received = service.Outlet.put, service.Outlet.received
    lengths: list[int] = []

    def noted(self: Any, pieces: Any) -> None:
        lengths.extend(len(piece.tokens) for _, _, piece in pieces)
        put(self, pieces)

    def late(self: Any) -> None:
        asyncio.get_running_loop().call_later(LATE_S, received, self)

    monkeypatch.setattr(service.Outlet, "put", noted)
    monkeypatch.setattr(service.Outlet, "received", late)
    return lengths


def text_of(choice: Any) -> str:
    said = getattr(choice, "message", None) or getattr(choice, "delta", None)
    return choice.text if said is None else said.content or ""


def scores(choice: Any) -> list[tuple[Any, dict[str, Any]]]:
    """Return for each token (token, its bytes or text offset) and log-probabilities by token."""
    found = choice.logprobs
    if found is None:
        return []
    if hasattr(found, "content"):
        return [((each.token, each.bytes), {e.token: e.logprob for e in (each, *each.top_logprobs)})
                for each in found.content]  # fmt: skip
    tops = found.top_logprobs or [None] * len(found.tokens)
    each = zip(found.tokens, found.text_offset, found.token_logprobs, tops, strict=True)
    return [
        ((token, place), {token: logprob, **(top or {})}) for token, place, logprob, top in each
    ]


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


def test_log_probabilities(client: Any, model: Any) -> None:
    """Answers can state log-probabilities of sampled tokens, alternatives, and prompt tokens."""
    options: dict[str, Any] = {"model": "small", "max_tokens": 5, "temperature": 0}
    expected = model.generate([*b"ab"], max_new_tokens=5, temperature=0)
    plain = client.completions.create(prompt="ab", logprobs=0, **options).choices[0].logprobs
    np.testing.assert_allclose(plain.token_logprobs, expected.logprobs, atol=1e-5)
    assert plain.top_logprobs is None
    with_top = client.completions.create(prompt="ab", logprobs=3, echo=True, **options).choices[0]
    found = with_top.logprobs
    assert with_top.text.startswith("ab")
    assert found.tokens[:2] == ["a", "b"]
    assert found.text_offset[:3] == [0, 1, 2]
    assert found.token_logprobs[0] is found.top_logprobs[0] is None
    np.testing.assert_allclose(found.token_logprobs[2:], expected.logprobs, atol=1e-5)
    for logprob, top in zip(found.token_logprobs[2:], found.top_logprobs[2:], strict=True):
        assert max(top.values()) == logprob  # greedy
    every = client.completions.create(prompt="ab", logprobs=20, **options).choices[0].logprobs
    assert all(len(top) == 20 for top in every.top_logprobs)  # partial characters stay distinct
    other = client.completions.create(prompt="ab", logprobs=1, seed=3, max_tokens=30, model="small")
    found = other.choices[0].logprobs
    tops = zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True)
    assert all(top[token] == logprob for token, logprob, top in tops)
    chat = client.chat.completions.create(
        messages=HELLO, logprobs=True, top_logprobs=2, **options
    ).choices[0]
    entries = chat.logprobs.content
    text = b"".join(bytes(e.bytes) for e in entries).decode(errors="replace")
    assert text == chat.message.content
    assert all(e.logprob == e.top_logprobs[0].logprob for e in entries)
    assert all(len(e.top_logprobs) == 2 for e in entries)


def test_a_request_that_takes_too_long(model: Any) -> None:
    """The request fails and its slot becomes free; a stream ends with an error."""
    with serving(model, seconds=0.05) as running, client_of(running) as client:
        asked: dict[str, Any] = {"model": "small", "prompt": ["ab"] * 100, "max_tokens": 120}
        asked["logit_bias"] = {"256": -100}  # else the first token may be the last one
        with pytest.raises(openai.APIStatusError) as caught:
            client.completions.create(**asked)
        assert (caught.value.status_code, caught.value.code) == (504, "timeout")
        with pytest.raises(openai.APIError, match="did not finish it in time"):
            list(client.completions.create(**asked, stream=True))
        eventually(lambda: running.service.open == 0)
        asked |= {"prompt": "ab", "max_tokens": 1}
        assert client.completions.create(**asked).choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids(client: Any, model: Any, stream: bool) -> None:
    """A stream has a prompt's ids once, and each chunk has its new ids, as in vLLM."""
    more = {"extra_body": {"return_token_ids": True}, "stream": stream}
    options: dict[str, Any] = {"model": "small", "seed": 3, "max_tokens": 5, "n": 2, **more}
    text = client.completions.create(prompt=["ab", [7]], logprobs=0, echo=not stream, **options)
    chat = client.chat.completions.create(messages=HELLO, **options)
    parts = [[*text], [*chat]] if stream else [[text], [chat]]
    expected = [*b"ab"], [7], [*b"uHello\na"]
    rows = [model.generate(ids, samples=2, max_new_tokens=5, seed=3, temperature=1.0)
            for ids in expected]  # fmt: skip
    for objects, written in zip(parts, ([*rows[0], *rows[1]], rows[2]), strict=True):
        found: list[list[int]] = [[] for _ in written]
        for choice in (choice for each in objects for choice in each.choices):
            found[choice.index] += getattr(choice, "token_ids", [])
        assert found == [[*row.tokens] for row in written]
    prompts = [[c.index, c.prompt_token_ids] for each in parts[0] for c in each.choices
               if hasattr(c, "prompt_token_ids")]  # fmt: skip
    assert sorted(prompts) == [[0, expected[0]], [1, expected[0]], [2, [7]], [3, [7]]]
    (prompt,) = [each.prompt_token_ids for each in parts[1] if hasattr(each, "prompt_token_ids")]
    assert prompt == expected[2]


def test_no_token_ids_unless_they_are_requested(server: Running) -> None:
    _, found = post(server, COMPLETION, {"prompt": "ab", "max_tokens": 1})
    assert "token_ids" not in found["choices"][0]
    body = {"prompt": "ab", "max_tokens": 0, "echo": True, "return_token_ids": True}
    (choice,) = post(server, COMPLETION, body)[1]["choices"]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == ([], [*b"ab"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("skips", [True, False, None])
def test_special_tokens_in_a_text(stream: bool, skips: bool | None) -> None:
    """They can be left out; stop strings then extend over them. Log-probabilities keep them."""
    table = cycle(257)
    table[98], table[END] = table[END - 1].copy(), table[98].copy()  # b, the end token, c
    asked: dict[str, Any] = {"model": "small", "prompt": [END, 97], "temperature": 0}
    more = {"extra_body": {"ignore_eos": True, "skip_special_tokens": skips}}
    with serving(model_of(MarkovEngine(table)), rows=1) as running, client_of(running) as client:
        create = partial(client.completions.create, max_tokens=5, stop="bcd", **asked, **more)
        found = create(logprobs=0, stream=stream)
        parts = [each.choices[0] for each in (found if stream else [found])]
        echo = create(echo=True).choices[0].text
    text, reason = ("", "stop") if skips else ("b<|endoftext|>cde", "length")
    assert ("".join(part.text for part in parts), parts[-1].finish_reason) == (text, reason)
    assert echo == ("a" if skips else "<|endoftext|>a") + text
    told = [part.logprobs for part in parts]
    assert [token for each in told for token in each.tokens][:2] == ["b", "<|endoftext|>"]
    offsets = [offset for each in told for offset in each.text_offset]
    assert offsets == ([0, 1, 1, 2] if skips else [0, 1, 14, 15, 16])


@pytest.mark.parametrize("speculate", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": ["a", "b"], "stop": "f"}),
        ("/v1/completions", {"prompt": "a", "echo": True}),
        ("/v1/chat/completions", {"messages": HELLO}),
    ],
)
def test_which_tokens_were_guessed(path: str, body: dict[str, Any], speculate: bool) -> None:
    """Answers and streams have `guessed` next to `token_ids`, and only with that option."""
    with serving(model_of(MarkovEngine(cycle(257))), rows=2, speculate=speculate) as running:
        asked = {"temperature": 0, "max_tokens": 9, **body}
        assert "guessed" not in exchanged(running.url + path, asked)[2]
        asked["return_token_ids"] = True
        whole = post(running, path, asked)[1]["choices"]
        events = exchanged(running.url + path, asked | {"stream": True})[2].split("\n\n")[:-2]
        parts = [choice for event in events for choice in json.loads(event[6:])["choices"]]
    for found in (whole, parts):
        assert sum(len(each.get("token_ids", [])) for each in found) > 4
        for each in found:
            odd = [token % 2 == 1 for token in each.get("token_ids", [])]
            there = speculate and "token_ids" in each
            assert each.get("guessed") == (odd if there else None)


@pytest.mark.parametrize("many", [0, app.MANY_TOKENS])
def test_the_score_of_a_prompt(
    client: Any, model: Any, monkeypatch: pytest.MonkeyPatch, many: int
) -> None:
    """Evaluations request no new tokens, but the prompt with its log-probabilities."""
    monkeypatch.setattr(app, "MANY_TOKENS", many)
    found = client.completions.create(
        model="small", prompt=["abcd", "x"], max_tokens=0, echo=True, logprobs=1
    )
    logits = model.engine.forward([np.array([*b"abcd"], np.int32)], "logits")[0]
    exact = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    expected = [exact[t, b"abcd"[t + 1]] for t in range(3)]
    first, second = found.choices
    assert (first.text, second.text) == ("abcd", "x")
    np.testing.assert_allclose(first.logprobs.token_logprobs[1:], expected, atol=1e-5)
    assert second.logprobs.token_logprobs == [None]
    assert found.usage.completion_tokens == 0


def test_embeddings(client: Any, server: Running, model: Any) -> None:
    exact = model.embed([[*b"one"], [*b"two"]])
    exact = exact / np.linalg.norm(exact, axis=1, keepdims=True)
    found = client.embeddings.create(model="small", input=["one", "two"])  # base64
    np.testing.assert_allclose([each.embedding for each in found.data], exact, atol=1e-6)
    assert found.usage.total_tokens == 6
    status, raw = post(server, "/v1/embeddings", {"input": "one"})
    assert status == 200
    np.testing.assert_allclose(raw["data"][0]["embedding"], exact[0], atol=1e-6)


def test_many_at_a_time_are_those_alone(server: Running, model: Any) -> None:
    """An asynchronous client reads more streams than there are slots, and cancels some."""
    rng = random.Random(1)
    asked = [
        {"prompt": [rng.randrange(256) for _ in range(rng.randrange(1, 40))], "seed": seed,
         "max_tokens": rng.randrange(1, 30)}
        for seed in range(40)
    ]  # fmt: skip

    async def one(client: Any, index: int) -> str:
        text = ""
        stream = await client.completions.create(model="small", stream=True, **asked[index])
        async for chunk in stream:
            text += chunk.choices[0].text
            if index % 8 == 7 and len(text) > 3:
                await stream.close()
                break
        return text

    async def everything() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="x", max_retries=0
        ) as client:
            return list(await asyncio.gather(*(one(client, i) for i in range(len(asked)))))

    found = asyncio.run(everything())
    for index, (text, given) in enumerate(zip(found, asked, strict=True)):
        expected = model.generate(
            given["prompt"], max_new_tokens=given["max_tokens"], seed=given["seed"],
            temperature=1.0,
        )  # fmt: skip
        assert text == expected.text or (index % 8 == 7 and expected.text.startswith(text))
    eventually(lambda: server.service.open == 0)


def test_tokenize(server: Running) -> None:
    status, found = post(server, "/tokenize", {"prompt": "añ"})
    assert (status, found) == (200, {"count": 3, "max_model_len": 128, "tokens": [97, 195, 177]})
    assert post(server, "/tokenize", {"messages": HELLO})[1]["count"] == len("uHello\na")
    assert post(server, "/detokenize", {"tokens": [97, 195, 177]})[1] == {"prompt": "añ"}
    assert post(server, "/detokenize", {"tokens": [257]})[0] == 400
    text = "añ" * 9000  # long enough to be read and written in parts
    status, found = post(server, "/tokenize", {"prompt": text})
    assert (status, found["tokens"]) == (200, [*text.encode()])
    assert post(server, "/detokenize", {"tokens": found["tokens"]}) == (200, {"prompt": text})
    assert post(server, "/tokenize", {})[1]["error"]["param"] == "prompt"


# --- what is refused ------------------------------------------------------------------------------

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
TOKENS, NEXT = "/play/tokens", "/play/next"
CALL = {"type": "function", "function": {"name": "f"}}
LONG = "x" * 13 * 129  # the longest token has 13 bytes
TEXT = {"type": "text", "text": "a"}
CALLED = {"role": "assistant", "tool_calls": [{"id": "1", **CALL}]}  # without content


WRONG_RULES: list[Any] = [
    ({"response_format": {"type": "json_schema"}}, 400, "response_format", "expected json_schema"),
    ({"response_format": {"type": "json"}}, 400, "response_format", "expected 'text', 'json_obj"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"items": {"if": 1}}}}},
     400, "response_format", "json_schema.schema: /items: the keyword 'if' is not supported"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "a"}}}}, 400,
     "response_format", "response_format.json_schema.schema: Invalid type: a"),
    ({"structured_outputs": {}}, 400, "structured_outputs", "expected one of json, regex"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, 400, "structured_outputs", "got 2"),
    ({"structured_outputs": {"regex": "(a"}}, 400, "structured_outputs",
     "structured_outputs.regex: \"(a\": unclosed group"),
    ({"structured_outputs": {"json": {"$ref": "#"}}}, 400, "structured_outputs",
     "structured_outputs.json: the text cannot be continued"),
    ({"structured_outputs": {"structural_tag": "x"}}, 400, "structured_outputs", "no such field"),
    ({"structured_outputs": {"choice": ["a" * 70_000]}}, 413, "structured_outputs",
     "structured_outputs.choice: expected at most 65,536 characters"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, 400,
     "structured_outputs", "expected none with response_format"),
    ({"structured_outputs": {"regex": "a"}, "tools": [CALL]}, 400, "structured_outputs",
     'expected tool_choice "none" with it'),
    ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, 400, "ignore_eos",
     "expected none with structured_outputs, which decides where the text ends"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "words"),
    [
        (COMPLETION, b"{", 400, None, "the body: expected JSON"),
        (COMPLETION, b"[" * 10**6, 400, None, "the body: expected JSON"),
        (COMPLETION, b'{"prompt": "\xff"}', 400, None, "the body: expected JSON in UTF-8"),
        (COMPLETION, '{"prompt": "x"}'.encode("utf-16"), 400, None, "expected JSON in UTF-8"),
        (COMPLETION, [1], 400, None, "expected a JSON object, got [1]"),
        (COMPLETION, b'{"n": 1, "stop": "a", "n": 1}', 400, None, "each key once, got 'n' 2 times"),
        (CHAT, b'{"messages": [{"role": "user", "role": "a"}]}', 400, None, "got 'role' 2 times"),
        (COMPLETION, b'{"stop": {%s"7": 1}}' % b"".join(b'"%d": 0,' % i for i in range(17_000)),
         400, None, "each key once, got '7' 2 times"),
        (COMPLETION, {"prompt": 3}, 400, "prompt", "expected a text, token ids"),
        (COMPLETION, {"prompt": []}, 400, "prompt", "expected 1 to 256 of them, not 0"),
        (COMPLETION, {"prompt": ["a"] * 257}, 400, "prompt", "expected 1 to 256 of them, not 257"),
        (COMPLETION, {"prompt": ["a", 3]}, 400, "prompt", "expected a text, token ids"),
        (COMPLETION, {"prompt": [257]}, 400, "prompt", "257"),
        (COMPLETION, {"prompt": [-1]}, 400, "prompt", "-1"),
        (COMPLETION, {"prompt": [[1], [1, 257]]}, 400, "prompt", "prompt.1: token 1 is 257: exp"),
        (COMPLETION, {"prompt": [1, 2**63]}, 400, "prompt", f"token 1 is {2**63}: expected ids"),
        ("/v1/embeddings", {"input": [[1], [2**31]]}, 400, "input", f"input.1: token 0 is {2**31}"),
        ("/detokenize", {"tokens": [2**64]}, 400, "tokens", f"token 0 is {2**64}: expected ids"),
        (COMPLETION, {"stop_token_ids": [2**64]}, 400, "stop_token_ids", f"token 0 is {2**64}"),
        (COMPLETION, {"prompt": "x" * 129}, 400, "prompt", "129 tokens, the model's"),
        (COMPLETION, {"prompt": "\ud800"}, 400, "prompt", "UTF-8"),
        (COMPLETION, {"prompt": [1] * 20_000}, 400, "prompt", "20000 tokens, the model's"),
        (COMPLETION, {"prompt": [[1], [1] * 129]}, 400, "prompt", "129 tokens, the model's"),
        (COMPLETION, {"logit_bias": {str(i): 0 for i in range(20_000)}}, 400, "logit_bias",
         "expected at most 16,384 token ids"),
        (CHAT, {"messages": HELLO * 4097}, 413, "messages", "at most 4,096 messages"),
        (CHAT, {"messages": [HELLO[0] | {"name": [[]] * 17_000}]}, 413, "messages", "at most"),
        (CHAT, {"messages": [{"role": "user", "content": "é" * 2**19 + "x"}]}, 413, "messages",
         "at most 1,048,576 bytes of text"),
        ("/tokenize", {"messages": HELLO * 4097}, 413, "messages", "at most 4,096 messages"),
        ("/detokenize", {"tokens": [1] * 9000 + [-1]}, 400, "tokens", "expected token ids"),
        ("/detokenize", {"tokens": [1] * 9000 + [True]}, 400, "tokens", "expected token ids"),
        ("/detokenize", {"tokens": [1] * 9000 + [257]}, 400, "tokens", "token 9000 is 257"),
        (COMPLETION, {"temperature": "hot"}, 400, "temperature", "expected a valid number"),
        (COMPLETION, {"temperature": -1}, 400, "temperature", "greater than or equal to 0"),
        (COMPLETION, {"temperature": True}, 400, "temperature", "expected a valid number"),
        (COMPLETION, {"top_p": 1.5}, 400, "top_p", "less than or equal to 1"),
        (COMPLETION, {"max_tokens": 0}, 400, "max_tokens", "expected at least 1, or echo"),
        (COMPLETION, {"max_tokens": 0, "echo": True, "stream": True}, 400, "stream",
         "expected max_tokens of at least 1"),
        (COMPLETION, {"max_tokens": 2**31}, 400, "max_tokens", "less than or equal to 2147483647"),
        (CHAT, {"messages": HELLO, "max_completion_tokens": 2**31}, 400, "max_completion_tokens",
         "less than or equal to 2147483647"),
        (COMPLETION, {"max_tokens": -2}, 400, "max_tokens", "greater than or equal to 0, got -2"),
        (COMPLETION, {"max_tokens": 1.5}, 400, "max_tokens", "expected a valid integer"),
        (COMPLETION, {"n": 129}, 400, "n", "less than or equal to 128"),
        (COMPLETION, {"stop": ["a"] * 17}, 400, "stop", "at most 16 texts"),
        (COMPLETION, {"stop": ["a", "b" * 257]}, 400, "stop", "at most 256 characters each"),
        (CHAT, {"messages": HELLO, "reasoning_effort": "low"}, 400, "reasoning_effort", "is not"),
        (COMPLETION, {"stop": [""]}, 400, "stop", "at least one character"),
        (COMPLETION, {"seed": 2**64}, 400, "seed", "less than"),
        (COMPLETION, {"model": "gpt-5"}, 404, "model", "there is no 'gpt-5': expected small"),
        (COMPLETION, {"tempratur": 1}, 400, "tempratur", "there is no such field"),
        (COMPLETION, {"x" * 5000: 1}, 400, f"{'x' * 64} … {'x' * 33}", f"{'x' * 33}: there is no"),
        (COMPLETION, {"repeat_penalty": 1.1}, 400, "repeat_penalty", "expected 1, or none"),
        (COMPLETION, {"best_of": 3}, 400, "best_of", "3 is not supported: expected 1, as n, or"),
        (COMPLETION, {"best_of": 1, "n": 2}, 400, "best_of", "1 is not supported: expected 2, as"),
        (COMPLETION, {"presence_penalty": 2.5}, 400, "presence_penalty", "less than or equal to 2"),
        (CHAT, {"messages": HELLO, "frequency_penalty": -3}, 400, "frequency_penalty", "or equal"),
        (COMPLETION, {"stop_token_ids": [3, 999]}, 400, "stop_token_ids", "token 1 is 999"),
        (COMPLETION, {"stop_token_ids": [-1]}, 400, "stop_token_ids", "expected token ids"),
        (COMPLETION, {"stop_token_ids": [1] * 20_000}, 400, "stop_token_ids", "at most 16,384"),
        (COMPLETION, {"min_tokens": 17}, 400, "min_tokens", "expected at most max_tokens, 16"),
        (COMPLETION, {"logit_bias": {"a": 1}}, 400, "logit_bias", "expected token ids, got 'a'"),
        (COMPLETION, {"logit_bias": {"5": 101}}, 400, "logit_bias", "less than or equal to 100"),
        (COMPLETION, {"logit_bias": {"999": 1}}, 400, "logit_bias", "ids from 0 to"),
        (COMPLETION, {"logit_bias": {"9" * 50: 1}}, 400, "logit_bias", "expected token ids"),
        (COMPLETION, {"logit_bias": {"9" * 5000: 1}}, 400, "logit_bias", "expected token ids"),
        (COMPLETION, {"logit_bias": {"1": 1, "01": 2}}, 400, "logit_bias", "token ids, got '01'"),
        (CHAT, {"messages": HELLO, "logit_bias": [5]}, 400, "logit_bias", "valid dictionary"),
        (COMPLETION, {"stream_options": {"x": 1}}, 400, "stream_options", "no such field"),
        (COMPLETION, {"stream_options": {"include_usage": False}}, 400, "stream_options",
         "expected stream: true with it"),
        (CHAT, {}, 400, "messages", "expected, but missing"),
        (CHAT, {"messages": []}, 400, "messages", "messages: expected at least 1 item, got []"),
        (CHAT, {"messages": [{"role": "user"}]}, 400, "messages", "a text as content, got None at"),
        (CHAT, {"messages": [HELLO[0] | {"content": None}]}, 400, "messages", "got None"),
        (CHAT, {"messages": [{"role": ["assistant"]}]}, 400, "messages", "got {'role': ['assista"),
        (CHAT, {"messages": [HELLO[0] | {"mood": "good"}]}, 400, "messages", "no field 'mood'"),
        (CHAT, {"messages": HELLO, "chat_template_kwargs": {"x": 1}}, 400, "chat_template_kwargs",
         "expected style, got ['x'"),
        (CHAT, {"messages": HELLO, "chat_template_kwargs": {"self": 1}}, 400,
         "chat_template_kwargs", "expected style, got ['self'"),
        (CHAT, {"messages": HELLO, "chat_template_kwargs": {"style": [[]] * 17_000}}, 413,
         "chat_template_kwargs", "at most 16,384 values"),
        ("/tokenize", {"messages": HELLO, "add_generation_prompt": True,
                       "continue_final_message": True}, 400, "add_generation_prompt", "expected F"),
        (COMPLETION, {"prompt": "a", "tools": []}, 400, "tools", "tools: there is no such field"),
        (CHAT, {"messages": HELLO, "functions": [CALL], "tool_choice": "none"}, 400, "functions",
         'or function_call "none" with it'),
        *((CHAT, {"messages": HELLO, **given}, status, param, words)
          for given, status, param, words in WRONG_RULES),
        (CHAT, {"messages": HELLO, "top_logprobs": 2}, 400, "top_logprobs", "expected logprobs"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 200}]}, 400, "messages",
         "203 tokens, the model's context is 128"),
        (CHAT, {"messages": [{"role": "user", "content": [TEXT, {"type": "image_url"}]}]}, 400,
         "messages", "'image_url'} at 0, part 1 of the content"),
        (CHAT, {"messages": [{"role": "user", "content": [TEXT | {"cache_control": {}}]}]}, 400,
         "messages", "cache_control"),
        ("/v1/embeddings", {"input": "x" * 129}, 400, "input", "129 tokens"),
        ("/v1/embeddings", {"input": "x", "dimensions": 33}, 400, "dimensions",
         "dimensions: expected 1 to 32, the model's n_embd, or none, got 33"),
        ("/v1/embeddings", {"input": [1], "instruction": "x"}, 400, "instruction",
         "instruction: expected a text, with texts as input and no token ids"),
        ("/v1/rerank", {"query": "x", "documents": []}, 400, "documents", "at least 1 item"),
        ("/v1/rerank", {"query": "x", "documents": ["a"] * 257}, 400, "documents", "at most 256"),
        ("/v1/rerank", {"query": "x", "documents": ["a", {"text": "b", "image": "c"}]}, 400,
         "documents", "documents.1.image: there is no such field"),
        ("/v1/rerank", {"query": "x", "documents": ["a"], "top_n": 0}, 400, "top_n", "equal to 1"),
        ("/v1/rerank", {"query": "x" * 40_000, "documents": ["a"] * 200}, 413, "query",
         "expected at most 4,194,304 bytes, counted for each document"),
        ("/rerank", {"query": "x", "documents": ["a"]}, 400, "model",
         "lacks <|im_start|>: expected a model as Qwen3-Reranker"),
        (TOKENS, {}, 400, "prompt", "expected, but missing"),
        (TOKENS, {"prompt": "x" * 129}, 400, "prompt", "129 tokens, the model's context is 128"),
        (TOKENS, {"prompt": [257]}, 400, "prompt", "expected ids from 0 to 256"),
        (TOKENS, {"prompt": [0.5]}, 400, "prompt", "expected a valid"),
        (TOKENS, {"prompt": "x", "model": "y"}, 404, "model", "there is no 'y'"),
        (NEXT, {"ids": []}, 400, "ids", "at least 1 item"),
        (NEXT, {"ids": [257]}, 400, "ids", "expected ids from 0 to 256"),
        (NEXT, {"ids": [1] * 129}, 400, "ids", "129 tokens, the model's context is 128"),
        (NEXT, {"ids": [1], "token": 257}, 400, "token", "expected an id from 0 to 256, got 257"),
        (NEXT, {"ids": [1], "temperature": 3}, 400, "temperature", "less than or equal to 2"),
        (NEXT, {"ids": [1], "seed": 3}, 400, "seed", "there is no such field"),
        ("/play/explain", {"ids": "x"}, 400, "ids", "expected a valid list"),
        ("/play/explain", {"ids": [257]}, 400, "ids", "expected ids from 0 to 256"),
        ("/v1/audio", {}, 404, None, "there is no such address"),
        ("/v1/models", {}, 405, None, "another method is expected"),
        ("/v1/completions/", {"prompt": "x"}, 404, None, "there is no such address"),
    ],
)  # fmt: skip
def test_a_wrong_request(
    server: Running, path: str, body: Any, status: int, param: str | None, words: str
) -> None:
    found, answer = post(server, path, body)
    assert found == status, answer
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert words in error["message"]
    assert error["message"].isprintable()


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9, "minimum": 0}},
          "required": ["a"], "additionalProperties": False}  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "pattern"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {
            "name": "a", "strict": True, "schema": SCHEMA}}}, r'\{"a": [0-9]\}'),
        ({"structured_outputs": {"json": SCHEMA}}, r'\{"a": [0-9]\}'),
        ({"structured_outputs": {"regex": "[xy]{3}"}}, "[xy]{3}"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"grammar": 'start: "a" ("b" | "c")'}}, "ab|ac"),
        ({"response_format": {"type": "json_object"}, "max_tokens": 40}, r"\{.*"),
    ],
)  # fmt: skip
def test_answers_follow_a_rule(server: Running, rule: Any, pattern: str) -> None:
    """The rule holds in chats and completions; log-probabilities are stated without the rule."""
    pytest.importorskip("llguidance")
    body = {"messages": HELLO, "seed": 1, "max_tokens": 60, "logprobs": True, **rule}
    status, answer = post(server, CHAT, body)
    assert status == 200, answer
    choice = answer["choices"][0]
    text = choice["message"]["content"]
    assert re.fullmatch(pattern, text, re.DOTALL)
    assert choice["finish_reason"] == "stop" or "json_object" in str(rule)
    assert all(entry["logprob"] <= 0 for entry in choice["logprobs"]["content"])
    _, plain = post(server, COMPLETION, {"prompt": "x", "seed": 1, "max_tokens": 60, **rule})
    assert re.fullmatch(pattern, plain["choices"][0]["text"], re.DOTALL)


def test_what_a_model_or_a_server_has_not() -> None:
    shakespeare = from_pretrained("shakespeare", device="cpu")
    with serving(shakespeare, shakespeare.tokenizer, rows=1, queue=3) as running:
        assert settings.ServerSettings(("x",)).rows > running.service.slots == 1
        for path, body, param, words in [
            (COMPLETION, {"prompt": "x", "n": 5}, "n", "5 continuations: this server takes 4 at"),
            (CHAT, {"messages": HELLO}, None, "it has no chat template"),
        ]:
            status, found = post(running, path, body)
            assert (status, found["error"]["param"]) == (400, param)
            assert words in found["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETION, {"prompt": LONG}),
        (CHAT, {"messages": [{"role": "user", "content": LONG}]}),
        ("/v1/embeddings", {"input": LONG}),
        (TOKENS, {"prompt": LONG}),
    ],
)
def test_a_text_that_is_too_long_is_not_encoded(
    server: Running, monkeypatch: pytest.MonkeyPatch, path: str, body: Any
) -> None:
    """The length of the text alone shows that it has too many tokens."""
    monkeypatch.delattr(tokenizer, "_encode_text")
    status, found = post(server, path, body)
    assert (status, found["error"]["code"]) == (400, "context_length_exceeded")
    told = r": at least \d+ tokens, the model's context is 128$"
    assert re.search(told, found["error"]["message"])


def test_deep_messages(server: Running) -> None:
    """JSON nested about as deep as Python's recursion limit causes no internal error."""
    head = b'{"messages": [{"role": "user", "content": "<|endoftext|>", "name": '
    for depth in range(800, 1050, 10):
        body = head + b"[" * depth + b"]" * depth + b"}]}"
        assert post(server, "/tokenize", body)[0] in (200, 400)


ONLY = {name: values for name, values in protocol.NEUTRAL.items()
        if values not in (protocol.ANYTHING, ())}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "plain"),
    [
        (COMPLETION, {"prompt": "a", "best_of": 2, "n": 2}, {"prompt": "a", "n": 2}),
        (COMPLETION, {"prompt": "a", "best_of": 1}, {"prompt": "a"}),
        (CHAT, {"messages": HELLO, "tools": [CALL], "tool_choice": "none"}, {"messages": HELLO}),
        (CHAT, {"messages": HELLO, "functions": [CALL], "function_call": "none"},
         {"messages": HELLO}),
        (CHAT, {"messages": [*HELLO, CALLED, {**CALLED, "content": None}]},
         {"messages": [*HELLO, {**CALLED, "content": ""}, {**CALLED, "content": [] }]}),
        ("/v1/embeddings", {"input": "a", "dimensions": 32}, {"input": "a"}),
        (CHAT, {"messages": HELLO, "max_completion_tokens": -1, "max_tokens": None},
         {"messages": HELLO, "max_tokens": 999}),
        (COMPLETION, {"prompt": "a", "max_tokens": -1}, {"prompt": "a", "max_tokens": 999}),
        (COMPLETION, {"prompt": "a", **dict.fromkeys(protocol.NEUTRAL)}, {"prompt": "a"}),
        *((CHAT, {"messages": HELLO, **{name: values[at] for name, values in ONLY.items()}},
           {"messages": HELLO}) for at in (0, -1)),
        (CHAT, {"messages": HELLO, "user": "me", "metadata": {"a": "b"}, "tools": [], "store": True,
                "tool_choice": "none", "response_format": {"type": "text"}, "logit_bias": {},
                "parallel_tool_calls": True, "presence_penalty": 0, "frequency_penalty": 0.0,
                **dict.fromkeys(("stop", "n", "temperature", "top_p", "verbosity", "audio"))},
         {"messages": HELLO}),
    ],
)  # fmt: skip
def test_what_clients_send_for_nothing(server: Running, path: str, body: Any, plain: Any) -> None:
    more = {} if "input" in body else {"max_tokens": 9, "seed": 1}
    (status, found), (_, expected) = (post(server, path, {**more, **b}) for b in (body, plain))
    same = "data" if "input" in body else "choices"
    assert (status, found.get(same)) == (200, expected[same])


def test_media_types_and_sizes(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"prompt": "x", "max_tokens": 1}
    for media in ("", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        assert post(server, COMPLETION, body, **{"Content-Type": media})[0] == 415
    json_type = {"Content-Type": "application/json; charset=utf-8"}
    assert post(server, COMPLETION, body, **json_type)[0] == 200
    for size in (app.MOST_BODY + 1, 10_000_000):  # the second is refused while it is being sent
        status, found = post(server, COMPLETION, {"prompt": "x" * size})
        assert status == 413
        assert "at most 4,194,304 bytes" in found["error"]["message"]
    monkeypatch.setattr(app, "MOST_DROPPED", 5_000_000)
    with sent(server, COMPLETION, b" " * 5_000_001, 2**40) as endless:
        assert endless.recv(12) == b"HTTP/1.1 413"


def test_only_names_of_this_machine(server: Running) -> None:
    """Requests with another host name are refused (DNS rebinding)."""
    for host in ("localhost", f"localhost:{server.port}", "127.0.0.1", "[::1]:80"):
        assert post(server, "/tokenize", {"prompt": "x"}, Host=host)[0] == 200
    for host in ("example.com", "localhost.example.com", ""):
        assert post(server, "/tokenize", {"prompt": "x"}, Host=host)[0] == 400


def test_a_key(model: Any) -> None:
    key, body = KEYS["bob"], {"prompt": "x"}
    with serving(model, rows=2, keys=KEYS) as running:
        for wrong in ({}, {"Authorization": key}, {"Authorization": f"Bearer {key[:-1]}1"},
                      {"Authorization": "Bearer "}):  # fmt: skip
            status, found = post(running, "/tokenize", body, **wrong)
            assert (status, found["error"]["code"]) == (401, "invalid_api_key")
        status, _ = post(running, "/tokenize", body, Authorization=f"Bearer {key}", Host="any.org")
        assert status == 200
        with pytest.raises(openai.AuthenticationError):
            client_of(running, "wrong").models.list()
        assert client_of(running, key).models.list().data[0].id == "small"
        ready = {"status": "ready", "running": 0, "waiting": 0}
        eventually(lambda: get(running, "/health") == (200, ready))


PREFLIGHT = {f"Access-Control-Request-{name}": value
             for name, value in (("Method", "POST"), ("Headers", "authorization"))}  # fmt: skip


@pytest.mark.parametrize(
    ("origins", "keyed", "method", "headers", "status", "allowed"),
    [
        (("https://a.b",), False, "POST", {}, 200, "https://a.b"),
        (("https://a.b",), False, "POST", {"Origin": "https://c.d"}, 200, None),
        (("https://a.b",), False, "POST", {"Host": "a.b"}, 400, None),
        (("https://c.d", "https://a.b"), True, "POST", {}, 401, "https://a.b"),
        (("https://a.b",), True, "OPTIONS", PREFLIGHT, 200, "https://a.b"),
        (("https://a.b",), False, "OPTIONS", PREFLIGHT | {"Host": "a.b"}, 400, None),
        (("https://a.b",), True, "OPTIONS", PREFLIGHT | {"Origin": "https://c.d"}, 400, None),
        (("*",), True, "OPTIONS", PREFLIGHT, 200, "*"),
        (("*",), True, "POST", {}, 401, "*"),
        ((), False, "POST", {}, 200, None),
        ((), False, "OPTIONS", PREFLIGHT, 405, None),
    ],
)  # fmt: skip
def test_pages_of_other_origins(
    model: Any, origins: Any, keyed: bool, method: str, headers: Any, status: int, allowed: Any
) -> None:
    """Only pages of named origins may send requests. A preflight needs no key, but a valid host."""
    headers = {"Origin": "https://a.b", **headers}
    with serving(model, rows=1, origins=origins, keys=KEYS if keyed else {}) as running:
        url = f"{running.url}/tokenize"
        found, answered, _ = exchanged(url, {"prompt": "x"}, method, **headers)
        assert (found, answered["Access-Control-Allow-Origin"]) == (status, allowed)
        if (method, status) == ("OPTIONS", 200):
            assert answered["Access-Control-Allow-Headers"] == "authorization"


KEYS = {"ann": "0123456789abcdef", "bob": "fedcba9876543210"}


def key_of(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[name]}"}


def test_clients_take_turns() -> None:
    """An answer does not wait for all earlier requests of another client."""
    engine = Slow()
    ended: list[str] = []

    def ask(name: str, n: int) -> None:
        body = {"prompt": "a", "max_tokens": 50, "n": n, "temperature": 0}
        assert post(running, COMPLETION, body, **key_of(name))[0] == 200
        ended.append(name)

    with serving(model_of(engine), rows=1, keys=KEYS) as running, ThreadPoolExecutor() as threads:
        threads.submit(ask, "ann", 100)
        eventually(lambda: running.service.open == 100)
        threads.submit(ask, "bob", 1)
        eventually(lambda: running.service.open == 101)
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
    """A client with less than its share of 4 rows is accepted, up to 8 rows of all clients."""
    loop = asyncio.new_event_loop()
    engine: Any = Slow()
    alone = service.Service(service.batch_of(engine, 1), 3, loop)
    outlet, taken = service.Outlet(alone, lambda pieces: None), []
    for client, count, fits in [
        ("a", 4, True), ("a", 1, False), ("b", 3, False), ("b", 2, True), ("b", 1, False),
        ("c", 1, True), ("d", 2, False), ("d", 1, True), ("e", 1, False),
    ]:  # fmt: skip
        rows = list(Run(engine, BYTES, "a", samples=count, max_new_tokens=9, seed=0).rows)
        with contextlib.nullcontext() if fits else pytest.raises(service.Full):
            outlet.submit(0, rows, client, None)
            taken += rows
    alone.cancel(taken * 2)
    engine.go.set()
    eventually(lambda: alone.open == 0 and not alone._open_of)
    alone.close()
    with pytest.raises(service.Full):  # the service has ended
        alone.submit([], outlet)
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
        time.sleep(0.5)
        assert len(passes) <= begun + 1


def test_scoring_stops_nobody_and_ends_with_its_client(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored, go, of = [], threading.Event(), scored_prompt

    def slow(*arguments: Any) -> Any:
        scored.append(arguments)
        go.wait(60)
        yield from of(*arguments)

    monkeypatch.setattr(passes, "scored_prompt", slow)
    body = {"prompt": ["ab"] * 50, "max_tokens": 0, "echo": True, "logprobs": 1}
    with serving(model, rows=1) as running:
        connections = [sent(running, COMPLETION, body) for _ in range(app.AT_ONCE)]
        eventually(lambda: len(scored) == app.AT_ONCE // 2)
        assert post(running, COMPLETION, {"prompt": "a", "max_tokens": 1})[0] == 200
        for connection in connections:
            connection.close()
        assert post(running, "/tokenize", {"prompt": "a"})[0] == 200
        go.set()
        eventually(lambda: running.requests(COMPLETION, 499) == app.AT_ONCE)
        assert len(scored) < 5 * app.AT_ONCE


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
        with client_of(reuses) as client:
            *_, end = client.completions.create(model="small", **last)
        assert end.usage.prompt_tokens_details.cached_tokens == len(longer["prompt"]) - 1


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
        with client_of(running) as client, pytest.raises(openai.APIError, match="logits are NaN"):
            list(client.completions.create(model="small", prompt="a", stream=True, **options))


def fail(*_: Any) -> Any:
    raise RuntimeError("out of everything")


@pytest.mark.parametrize("method", ["next", "stop"])
def test_a_step_that_fails_ends_its_requests_alone(
    method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine fails in a step, or when the row of a disconnected client is stopped."""
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
            assert received(connection) == (500, protocol.ApiError(500, problem).body)
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
        if outcomes == "-":
            monkeypatch.setattr(engine, "decode", fail)
        for outcome in outcomes:
            assert get(running, "/health")[0] == 200
            monkeypatch.setattr(MarkovDecoding, "next", fail if outcome == "-" else following)
            assert post(running, COMPLETION, body)[0] == (500 if outcome == "-" else 200)
        eventually(lambda: running.service.failure is not None)
        assert running.metric("failed_steps_total") == outcomes.count("-")
        assert "RuntimeError('out of everything')" in str(post(running, COMPLETION, body))
        assert get(running, "/health")[0] == 503


def test_silent_connections_do_not_stay(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    monkeypatch.setattr(listening, "HEAD_SECONDS", 1)
    with serving(model, rows=1, connections=4) as running:
        silent = [socket.create_connection(("127.0.0.1", running.port)) for _ in range(4)]
        silent[0].sendall(b"POST /tokenize HTTP/1.1\r\nHost: local")
        eventually(lambda: "overloaded" in str(post(running, "/tokenize", {"prompt": "x"})))
        eventually(lambda: post(running, "/tokenize", {"prompt": "x"})[0] == 200)
        for connection in silent:
            connection.close()


def test_a_second_request_has_to_come_as_well(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    """A connection is closed if the head of its second request does not end in time."""
    monkeypatch.setattr(listening, "HEAD_SECONDS", 1)
    request = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with (
        serving(model, rows=1) as running,
        socket.create_connection(("127.0.0.1", running.port), timeout=60) as connection,
    ):
        connection.sendall(request)
        assert connection.recv(12) == b"HTTP/1.1 200"
        connection.settimeout(0.2)
        more, found = iter(request * 10), b"x"
        end = time.monotonic() + 10
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


@pytest.mark.parametrize("chunked", [b"chunked", b"Chunked"])
def test_a_body_with_two_lengths_is_refused(server: Running, chunked: bytes) -> None:
    """The connection is closed, as a proxy may take the bytes that follow for another request."""
    lengths = b"Content-Length: 5\r\nTransfer-Encoding: " + chunked
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\n" + lengths + b"\r\n\r\n0\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(head + b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        found = connection.makefile("rb").read()  # until the server closes the connection
    assert found.startswith(b"HTTP/1.1 400")
    assert b"got both" in found
    assert found.count(b"HTTP/1.1") == 1


def test_a_line_in_the_log_for_each_request(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Lines have the name of the key and no secrets; by default there are none."""
    body = {"prompt": "abc", "max_tokens": 2, "seed": 1}
    with serving(model, rows=1, keys=KEYS) as running, caplog.at_level("INFO", "gpt2block.serve"):
        post(running, COMPLETION, {**body, "stream": True}, **key_of("ann"))
        post(running, COMPLETION, body, **key_of("bob"))
        post(running, COMPLETION, body, Authorization="Bearer wrong")
        get(running, "/play/explain/ticket")
        eventually(lambda: len(caplog.messages) == 4)
        caplog.set_level("WARNING", "gpt2block.serve")
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


def test_garbage_and_slow_connections_stop_nobody(server: Running) -> None:
    rng = random.Random(0)
    slow = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(50)]
    for connection in slow:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: local")
    for _ in range(30):
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as garbage:
            garbage.sendall(rng.randbytes(rng.randrange(1, 2000)) + b"\r\n\r\n")
    assert post(server, "/tokenize", {"prompt": "x"})[0] == 200
    for connection in slow:
        connection.close()


def test_nothing_is_left_after_many_requests(server: Running) -> None:
    def work() -> None:
        with client_of(server) as client:
            for _ in range(75):
                client.completions.create(model="small", prompt="abc", max_tokens=2)

    work()
    threads = threading.active_count()
    with ThreadPoolExecutor() as workers:
        for each in [workers.submit(work) for _ in range(4)]:
            each.result()
    assert threading.active_count() < threads + app.AT_ONCE  # AT_ONCE threads encode texts
    eventually(lambda: server.service.open == 0)  # an answer is sent before its row is forgotten
    assert not server.service._since
    assert not server.service._places


@pytest.mark.parametrize("how", [["--rate", "40"], ["--at-once", "12"]])
def test_a_load_with_clients_that_go(
    server: Running, capsys: pytest.CaptureFixture[str], how: list[str]
) -> None:
    """tools/load.py sends requests at random times or as fast as possible, and some large ones."""
    more = "--seconds", "1", "--closing", "0.3", "--large-every", "0.2"
    found = loaded(server, capsys, *more, *how)
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


def test_a_load_of_whole_answers(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    """Two processes of tools/load.py share the requests."""
    before = server.service.tokens
    found = loaded(server, capsys, "--whole", "--processes", "2", "--requests", "25")
    assert (found["answered"], found["refused"]) == (25, 0)
    assert 0 < found["answer p50 ms"] <= found["answer p99 ms"] < 1e3 * found["seconds"]
    tokens = found["tokens per second"] * found["seconds"]
    assert tokens == pytest.approx(server.service.tokens - before, rel=0.02)
    assert "first p50 ms" not in found


def test_a_load_counts_refusals(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    for how in ([], ["--whole"]):
        found = loaded(server, capsys, "--vocab-size", "100000", "--requests", "3", *how)
        assert (found["answered"], found["refused"]) == (0, 3)


HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("sends", "how", "cut"),
    [
        (CHUNKED + b"d\r\ndata: {}\n\n", [], 3),  # cut within a chunk
        (CHUNKED + b"a\r\ndata: {}\n\n\r\n", [], 3),  # cut before the next chunk
        (CHUNKED + b"a\r\ndata: {}\n\n\r\n0\r\n\r\n", [], 3),  # without data: [DONE]
        (CHUNKED + b"18\r\ndata: {}\n\ndata: [DONE]\n\n\r\n", [], 3),
        (CHUNKED + b"18\r\ndata: {}\n\ndata: [DONE]\n\n\r\n0\r\n\r\n", [], 0),
        (HEAD + b"Content-Length: 99\r\n\r\n{", ["--whole"], 3),
    ],
)
def test_a_load_counts_answers_that_are_cut(
    capsys: pytest.CaptureFixture[str], sends: bytes, how: list[str], cut: int
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with suppress(OSError):  # raised when the listener is closed
                while True:
                    with listener.accept()[0] as connection:
                        connection.recv(2**16)
                        connection.sendall(sends)

        threading.Thread(target=answer, daemon=True).start()
        load.main([f"http://127.0.0.1:{listener.getsockname()[1]}/v1", "--requests", "3", *how])
        found = json.loads(capsys.readouterr().out)
        listener.shutdown(socket.SHUT_RDWR)
    assert (found["answered"], found["refused"], found["cut"]) == (3 - cut, 0, cut)


def test_events_that_come_together_are_sent_together() -> None:
    """The first token is sent alone. Tokens before a failure are sent before the error."""

    def piece(data: bytes, reason: EndReason | None = None) -> service.Piece:
        count = len(data)
        return service.Piece([*data], [-1.0] * count, [], [False] * count, 0, reason)

    parts, last = [piece(b"a"), piece(b"b"), piece(b"c\n")], piece(b"de", "length")

    async def sent(*groups: list[service.Piece]) -> list[bytes]:
        given: Any = SimpleNamespace(new_number=lambda: 0)
        engine: Any = Slow()
        answer = answers.Answer(given, [*Run(engine, BYTES, "a", max_new_tokens=6, seed=0).rows])
        form = answers.TextForm("small", BYTES)
        form.id = "cmpl-1"
        found = []
        times: list[float] = []
        echoes, observe = [answers.AnswerChoice()], times.append
        events = answers.streamed(answer, form, echoes, False, None, observe=observe)
        for group in groups:
            for each in group:
                answer.put(0, each)
            found.append(await anext(events))
        rest = [event async for event in events]
        assert len(times) == len(groups) - 1
        return [*found, *rest]

    def texts_of(events: list[bytes]) -> list[str]:
        found = [each for event in events for each in event.split(b"\n\n")[:-1]]
        assert found.pop() == b"data: [DONE]"
        return [json.loads(each[6:])["choices"][0]["text"] for each in found]

    together = asyncio.run(sent([*parts, last]))
    alone = asyncio.run(sent([parts[0]], parts[1:], [last]))
    assert (len(together), len(alone)) == (2, 4)
    assert texts_of(together) == ["a", "bc\nde"]
    assert texts_of(alone) == ["a", "bc\n", "de"]
    for failure, texts in ((piece(b"", "deadline"), ["a"]), (piece(b"e", "deadline"), ["a", "e"])):
        failed = [json.loads(each[6:]) for event in asyncio.run(sent([parts[0], failure]))
                  for each in event.split(b"\n\n")[:-1]]  # fmt: skip
        assert [each["choices"][0]["text"] for each in failed[:-1]] == texts
        assert failed[-1]["error"]["code"] == "timeout"


class Gate:
    """A replacement for the event of `Slow` that lets a number of steps pass."""

    def __init__(self) -> None:
        self._asked = self._passed = 0
        self._free = threading.Semaphore(0)

    def wait(self, seconds: float) -> None:
        self._asked += 1
        self._free.acquire(timeout=seconds)

    async def let(self, steps: int) -> None:
        """Let `steps` steps pass, and wait until the next one calls `wait`."""
        self._passed += steps
        for _ in range(steps):
            self._free.release()
        while self._asked <= self._passed:
            await asyncio.sleep(0.001)


@pytest.mark.parametrize(("few", "ahead"), [(0, [1, 1, 1]), (1, [1, 2, 2])])
def test_tokens_that_come_while_a_piece_is_sent_are_one_piece(
    monkeypatch: pytest.MonkeyPatch, few: int, ahead: list[int]
) -> None:
    """With few rows one more piece may be in flight. ahead: number of pieces in flight."""
    monkeypatch.setattr(service, "FEW", few)
    on_the_way: list[int] = []

    async def sent() -> list[tuple[str, int]]:
        gated: Any = Slow()
        gated.go = gate = Gate()
        local = LocalEngine(Host(model_of(gated), BYTES, settings.ServerSettings(("a",), 1)))
        (row,) = Run(gated, BYTES, "a", max_new_tokens=99, temperature=0).rows
        answer, found = answers.Answer(local, [row]), []
        async with local.running(lambda: None), contextlib.aclosing(answer.pieces()) as pieces:
            now: Any = SimpleNamespace(call_soon=lambda *_: None)  # no receipt is reported
            local._loop = now
            await answer.submit()
            for meanwhile in (0, 3, 0):
                await gate.let(1)
                new = await anext(pieces)
                found += [(piece.text, len(piece.tokens)) for _, piece in new]
                await gate.let(meanwhile)
                await asyncio.sleep(0.01)
                on_the_way.append(len(local._outlet._on_the_way))
                local._outlet.received()
            answer.close()
            gate._free.release()
        return found

    assert asyncio.run(sent()) == [("b", 1), ("c", 1), ("defg", 4)]
    assert on_the_way == ahead


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
    from prometheus_client.parser import text_string_to_metric_families as families  # noqa: PLC0415

    body = {"prompt": "abc", "n": 2, "seed": 1, "max_tokens": 7}

    def samples(running: Running) -> dict[tuple[str, ...], float]:
        found = [each for f in families(get(running, "/metrics")[1]) for each in f.samples]
        return {(each.name.removeprefix("gpt2block_"), *each.labels.values()): each.value
                for each in found}  # fmt: skip

    def requests(running: Running) -> float:
        counted = samples(running).items()
        return sum(n for key, n in counted if key[:2] == ("requests_total", COMPLETION))

    with serving(model, rows=3) as running:
        for more in ({}, {"max_tokens": 5, "stream": True}, {"prompt": 3}):
            post(running, COMPLETION, body | more)
        eventually(lambda: running.service.open == 0)
        eventually(lambda: requests(running) == 3)  # a process counts a request after its response
        found = samples(running)
    assert found.items() >= {
        ("requests_total", COMPLETION, "200"): 2, ("requests_total", COMPLETION, "400"): 1,
        ("slots",): 3, ("new_tokens_total",): 24, ("first_token_seconds_count",): 4,
        ("token_seconds_count",): 20, ("token_seconds_bucket", "+Inf"): 20,
    }.items()  # fmt: skip
    assert 0 < found["token_seconds_sum",] < 20 * SECONDS


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
    ("arguments", "error"),
    [
        (("--host", "0.0.0.0"), "--host 0.0.0.0: others can reach this address"),
        (("--host", "example.com"), "--host example.com: others can reach this address"),
        (("--host", "::1%none", "--api-key-file", "key.txt"), "--host ::1%none: "),
        (("--port", 65536), "--port: expected 0 to 65535, got 65536"),
        (("--rows", 0), "--rows: expected"),
        (("--chat-template-kwargs", "[1]"), "expected a JSON object such as"),
        (("--port", 0, "--chat-template-kwargs", '{"x": 1}'), "it has no chat template"),
        (("--queue", 0), "--queue: expected"),
        (("--processes", -1), "processes: expected 0 to 256, got -1"),
        (("--cors-origin", "*"), "--cors-origin *: any page in a browser could use the model"),
        (("--cors-origin", "https://a.b/"), "--cors-origin: expected an origin without a path"),
        (("--cors-origin", "null"), "--cors-origin: expected an origin without a path"),
        (("--allowed-host", "https://a.b"), "--allowed-host: expected a name without a port"),
        (("--uds", "/s", "--port", 80), "--uds: expected without --host, --port and --trusted"),
        (("--uds", "x" * 200), f"--uds {'x' * 200}: AF_UNIX path too long"),
        (("--trusted-proxy", "proxy.local"), "--trusted-proxy: expected an address, or a network"),
        (("--api-key-file", "short.txt"), "expected a key of at least 16 ASCII characters"),
        (("--api-key-file", "empty.txt"), "expected a key of at least 16 ASCII characters"),
        (("--api-key-file", "unnamed.txt"), "or a line NAME KEY for each"),
        (("--api-key-file", "twice.txt"), "expected each name and each key once"),
        (("--api-key-file", "same.txt"), "expected each name and each key once"),
        (("--api-key-file", "none.txt"), "cannot be read"),
    ],
)
def test_wrong_options(
    arguments: Any, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ann, bob = KEYS.values()
    for name, text in {
        "key": ann, "short": "abc", "empty": "# NAME KEY\n", "unnamed": f"ann {ann}\n{bob}",
        "twice": f"ann {ann}\nann: {bob}", "same": f"ann {ann}\nbob {ann}",
    }.items():  # fmt: skip
        Path(f"{name}.txt").write_text(f"{text}\n")
    assert error in gpt2block("serve", "--model", "shakespeare", *arguments).error


def test_files_of_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file has keys with names, or one key; a warning tells if others can read the file."""
    file = tmp_path / "keys"
    file.write_text(f"# of clients\n ann: {KEYS['ann']}\n\nbob\t{KEYS['bob']}")
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
    monkeypatch.setattr(listening, "settle", lambda: calls.append("settle"))
    monkeypatch.setattr(uvicorn.Server, "run", lambda *_: calls.append("run"))
    options = "--processes", 0, "--port", 0
    gpt2block("serve", "--model", "shakespeare", "--device", "cpu", *options)
    assert calls == ["settle", "run"]
    code = (
        "import gc, sys; from gpt2block.serve import listening; listening.settle(); "
        "print(sys.getswitchinterval(), gc.get_threshold()[0], gc.get_freeze_count() > 10_000)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0.0005", "20000", "True"]


@pytest.mark.parametrize("listens", [True, False])
def test_a_port_that_is_taken(listens: bool) -> None:
    """The port may be taken by a server that still loads its model. No model is loaded first."""
    taken = socket.create_server(("127.0.0.1", 0)) if listens else cli_serve._bound("127.0.0.1", 0)
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
    code = f"{first}\nfrom gpt2block.cli import main\nmain()"
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
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_what_runs(number: int) -> None:
    """A stream ends normally; then the port is free, though the server closed a connection."""
    host = "127.0.0.2" if sys.platform == "linux" and number == signal.SIGTERM else "127.0.0.1"
    more = "--name", "small", "--name", "b", "--cors-origin", "http://A.b", "--rows", "2"
    with (
        command("--host", host, *more) as (child, line),
        client_of_command(line) as client,
    ):
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
        assert child.stderr.read() == ""
        cli_serve._bound(host, client.base_url.port).close()


SLOW_TO_LOAD = """
import sys, time
from gpt2block.cli import serve
serve.load_model = lambda *_: (print("loads", file=sys.stderr, flush=True), time.sleep(60))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM")
@pytest.mark.parametrize(("first", "wait"), [("", 0), ("", 0.02), (SLOW_TO_LOAD, 0)])
def test_a_signal_at_any_time_ends_the_server(first: str, wait: float) -> None:
    """The signal may come right after the address is shown, or while the model is loaded."""
    with command(first=first) as (child, line):
        assert line.startswith("loads" if first else "shakespeare")
        time.sleep(wait)
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == 0
        assert child.stderr.read() == ""


FAILING = """
from gpt2block.run.numpy_model import NumpyDecoding
NumpyDecoding.next = lambda *_: 1 / 0
"""


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_fails_ends_the_server(stream: bool) -> None:
    """A supervisor can then restart it. Requests and the log state the reason."""
    with command(first=FAILING) as (child, line), client_of_command(line) as client:
        for _ in range(service.MOST_FAILED):
            with pytest.raises(openai.APIError, match="the engine failed: ZeroDivisionError"):
                list(client.completions.create(model="shakespeare", prompt="a", stream=stream))
        assert child.wait(60) == 1
        log = child.stderr.read()
    assert log.count("ERROR a step of the engine failed\nTraceback") == service.MOST_FAILED - 1
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
    with serving(model, rows=1) as running, client_of(running) as client:
        asked: dict[str, Any] = {"model": "small", "prompt": "a", "stream": True}
        with pytest.raises(openai.APIError, match="the server has made an error"):
            list(client.completions.create(max_tokens=99, **asked))
        eventually(lambda: running.service.open == 0)
        status, found = post(running, "/v1/embeddings", {"input": "x"})
        assert (status, found["error"]["message"]) == (500, "the server has made an error")
        for path, logged in zip((COMPLETION, "/v1/embeddings"), caplog.messages, strict=True):
            assert running.metric("faults_total", path=path) == 1
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
        eventually(lambda: cache.layers.shape[3] == 4 and cache.lengths == [0, 0])


@pytest.mark.usefixtures("smollm2_files")
def test_a_real_model() -> None:
    """The stream has the same events as on the page docs/serve.md, except for random numbers."""
    page = (Path(__file__).parents[1] / "docs" / "serve.md").read_text(encoding="utf-8")
    (sent, shown), *_ = re.findall(r"-d '(.*)'\n((?:data: .*\n\n?)+)", page)
    events = [json.loads(line) for line in re.findall("data: ({.*)", shown)]
    loaded = from_pretrained("smollm2", device="cpu")
    with serving(loaded, loaded.tokenizer, rows=2) as running, client_of(running) as client:
        question = [{"role": "user", "content": "What is the capital of France?"}]
        found = client.chat.completions.create(model="small", messages=question, temperature=0)
        stream = [e.to_dict() for e in client.completions.create(model="small", **json.loads(sent))]
    for found_event, event in zip(stream, events, strict=True):
        (choice,), (expected,) = found_event.pop("choices"), event.pop("choices")
        assert {**choice, "seed": 0} == {**expected, "seed": 0}
        assert ("seed" in choice, found_event.keys()) == ("seed" in expected, event.keys())
    assert found.choices[0].message.content == "The capital of France is Paris."
    assert found.choices[0].finish_reason == "stop"

"""A server with processes for HTTP: tests of test_serve.py, and processes that end."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra serve is not installed")
pytest.importorskip("uvicorn", reason="the extra serve is not installed")

from gpt2block.apps.serve.channel import Channel
from tests import serving as serving_
from tests.apps import test_serve, test_serve_clients, test_serve_play
from tests.apps.test_serve import command
from tests.apps.test_serve_exchanges import TABLE, check
from tests.command_line import python
from tests.exchanges import COMPLETION, Exchange
from tests.markov import MarkovEngine, cycle
from tests.serving import Running, Slow, eventually, exchanged, get, model_of, post, serving

openai = pytest.importorskip("openai", reason="openai, a client, is not installed")

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has one process")

# A test that depends on whether another process handles HTTP
test_the_client = test_serve.test_the_client
model = test_serve.model  # a fixture


@pytest.mark.slow
class TestFurther:
    """Tests that also run with a thread; here each starts a process, which takes a second."""

    test_keys = staticmethod(test_serve_clients.test_a_unix_socket_and_new_keys)
    test_pass = staticmethod(
        test_serve_play.test_a_pass_is_explained_at_an_address_that_none_can_guess
    )
    test_health = staticmethod(test_serve.test_health_tells_how_far_the_start_is)
    test_failure = staticmethod(test_serve.test_an_engine_that_fails_ends_the_server)


@pytest.fixture(autouse=True)
def processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start servers with one process for HTTP: with two, tests would take twice as long."""
    monkeypatch.setattr(serving_, "PROCESSES", 1)


@pytest.fixture
def two_processes(processes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_, "PROCESSES", 2)


@pytest.fixture(scope="module")
def server(model: Any) -> Iterator[Running]:
    with serving(model, names=test_serve.NAMES, rows=8, queue=256, processes=1) as running:
        yield running


@pytest.mark.parametrize("exchange", [
    each for each in TABLE if each.server == TABLE[0].server and each.status == 200
], ids=lambda each: f"{each.line}-{each.path}")  # fmt: skip
def test_an_answer(server: Running, exchange: Exchange) -> None:
    check(server, exchange)


def test_a_client_that_goes() -> None:
    test_serve.test_a_client_that_goes_frees_its_slots(True, 1000)


@pytest.mark.slow
def test_passes_end(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    test_serve.test_passes_end_with_their_request(model, monkeypatch, *test_serve.PASSES[0], None)


@pytest.mark.slow
@pytest.mark.usefixtures("two_processes")
def test_a_signal_finishes_what_runs() -> None:
    test_serve.test_a_signal_finishes_what_runs(signal.SIGTERM)


STREAM = {"prompt": "a", "max_tokens": 20, "temperature": 0, "stream": True}


def read(connection: Any) -> bytes:
    """Read until the connection is closed or an answer has ended."""
    data = b""
    with connection, suppress(ConnectionResetError):
        while not data.endswith(b"0\r\n\r\n") and (more := connection.recv(2**16)):
            data += more
    return data


@pytest.mark.usefixtures("two_processes")
def test_a_process_for_http_that_is_killed(caplog: pytest.LogCaptureFixture) -> None:
    """Only its clients lose their answers, and another process takes its place."""
    engine, connections = Slow(), []
    with serving(model_of(engine), rows=4, connections=40) as running:
        first, second = running.engine.ends
        while not (first.sequences and second.sequences):
            connections.append(test_serve.sent(running, COMPLETION, STREAM))
            eventually(lambda: len(first.sequences) + len(second.sequences) == len(connections))
            assert len(connections) < 100
        stays = len(second.sequences)
        first.process.kill()
        engine.go.set()
        ended = [b"data: [DONE]" in read(each) for each in connections]
        assert sum(ended) == stays < len(connections)
        eventually(lambda: first not in running.engine.ends)
        eventually(lambda: sum(end.is_ready for end in running.engine.ends) == 2)
        assert second in running.engine.ends
        for _ in range(10):
            assert post(running, COMPLETION, {"prompt": "a", "max_tokens": 1})[0] == 200
    assert caplog.messages == ["a process for HTTP has ended with code -9"]


@pytest.mark.parametrize("processes", [0, 1])
def test_a_second_signal_ends_answers(processes: int, caplog: pytest.LogCaptureFixture) -> None:
    """The last event of a stream that is cut states the reason."""
    engine = Slow()
    with serving(model_of(engine), rows=1, processes=processes) as running:
        connection = test_serve.sent(running, COMPLETION, STREAM)
        eventually(lambda: any(end.sequences for end in running.engine.ends))
        for _ in range(2):
            running.engine._loop.call_soon_threadsafe(running.engine.end)
        assert b"the server ends before the answer is complete" in read(connection)
        engine.go.set()
    assert caplog.messages[0].startswith("the server ends after 1 answer, at most 5 s: a second")


def test_a_process_for_http_ends_with_the_engines_process(caplog: pytest.LogCaptureFixture) -> None:
    """The process exits with code 1, and its client gets an error event."""
    engine = Slow()
    with serving(model_of(engine), rows=1) as running:
        connection = test_serve.sent(running, COMPLETION, STREAM)
        eventually(lambda: any(end.sequences for end in running.engine.ends))
        (end,) = running.engine.ends
        abort = end.channel._transport.abort  # type: ignore[union-attr]  # this process "ends"
        running.engine._loop.call_soon_threadsafe(abort)
        assert b"the engine's process has ended" in read(connection)
        engine.go.set()
        eventually(lambda: bool(caplog.messages))
    assert caplog.messages == ["a process for HTTP has ended with code 1"]


@pytest.mark.slow
@pytest.mark.usefixtures("two_processes")
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_an_engine_that_is_killed_ends_all() -> None:
    # A step takes longer, so that the stream does not end.
    first = "import time; from gpt2block.apps.serve.service import Service as s; "
    first += "s._note = lambda _: time.sleep(0.05)"
    with command(first=first) as (child, line), test_serve.client_of_command(line) as client:
        stream = iter(client.completions.create(
            model="shakespeare", prompt="a", stream=True, max_tokens=250
        ))  # fmt: skip
        next(stream)
        children = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
        assert len(children) == 2
        child.kill()
        with pytest.raises(openai.APIError, match="the engine's process has ended"):
            list(stream)
        eventually(lambda: not any(Path(f"/proc/{number}").exists() for number in children))


@pytest.mark.usefixtures("two_processes")
def test_connections_of_all_processes_are_limited() -> None:
    """The limit is of all processes together, although each sees only its own connections."""
    with serving(model_of(MarkovEngine(cycle(257))), rows=1, connections=5) as running:
        opened = [socket.create_connection(("127.0.0.1", running.port)) for _ in range(5)]
        eventually(lambda: get(running, "/version")[0] == 503)
        for each in opened:
            each.close()
        eventually(lambda: get(running, "/version")[0] == 200)


@pytest.mark.parametrize("processes", [0, 1])
def test_tokens_after_a_stop_string_do_not_count(processes: int) -> None:
    """Tokens after a stop string are dropped, and a metric counts them."""
    body = {"prompt": "a", "max_tokens": 100, "temperature": 0, "stop": "d", "n": 2}
    model = model_of(MarkovEngine(cycle(257), n_ctx=200))
    with serving(model, rows=2, processes=processes) as running:
        for more in ({}, {"stream": True, "stream_options": {"include_usage": True}}):
            _, _, text = exchanged(running.url + COMPLETION, {**body, **more})
            assert re.findall('"completion_tokens": ?([0-9]+)', text) == ["6"]
            assert '"finish_reason": "stop"' in text.replace('":"', '": "')
        eventually(lambda: running.service.open == 0)

        def needed() -> float:
            return running.metric("new_tokens_total") - running.metric("overdrawn_tokens_total")

        eventually(lambda: needed() == 12)  # a sequence may end before its stop string is reported


def test_processes_have_no_gpu_and_no_weights() -> None:
    """Modules that only the engine needs are not imported."""
    code = (
        "import sys, gpt2block.apps.serve.http_server; print([name for name in sys.modules if name "
        "in ('cupy', 'gpt2block.engine.cuda.model', 'gpt2block.engine.numpy.model', "
        "'gpt2block.model')])"
    )
    assert python(code, check=True).stdout.strip() == "[]"


def test_items_cross_in_order() -> None:
    """Items that do not fit the socket follow later."""

    async def crossed(size: int) -> list[Any]:
        ours, theirs = socket.socketpair()
        found: list[Any] = []
        here = await Channel.over(ours, SimpleNamespace(lost=lambda: None))
        for number in range(9):
            here.send("add", number, b"0" * size)
        add = SimpleNamespace(add=lambda *item: found.append(item), lost=here.close)
        there = await Channel.over(theirs, add)
        while len(found) < 9:
            await asyncio.sleep(0.001)
        there.close()
        return found

    for size in (1, 2**19):
        assert asyncio.run(crossed(size)) == [(number, b"0" * size) for number in range(9)]

"""A server for tests, in a thread of this process, with a small model."""

from __future__ import annotations

import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

from gpt2block import GPT2, GPT2Config
from gpt2block.apps.serve.engine_host import EngineHost
from gpt2block.apps.serve.engine_server import EngineServer
from gpt2block.apps.serve.settings import ServerSettings
from gpt2block.files.parameters.gpt2 import GPT2Weights
from tests.markov import LINES, MarkovEngine, byte_encoding, cycle

PROCESSES = 0  # number of processes of a server that handle HTTP; 0: a thread of this process
SECONDS = 60  # time limit for an event that a test waits for
BYTES = byte_encoding()
SAMPLING = {"temperature": 0.75, "top_p": 0.9}  # the model's defaults for conversations
CONFIG = GPT2Config(n_layer=1, n_head=2, n_embd=32, n_ctx=128, vocab_size=257)


def small() -> GPT2:
    return GPT2(GPT2Weights.random(0, CONFIG), device="cpu")


def model_of(engine: Any, **more: Any) -> Any:
    """Return a substitute for a model with the attributes that the server uses."""
    given = {"chat_template": LINES, "config": engine.config, "chat_sampling": SAMPLING, **more}
    return SimpleNamespace(engine=engine, **given)


class Slow:
    """An engine whose steps wait until `go` is set. steps: number of finished steps."""

    def __init__(self, table: Any = None) -> None:
        if table is None:  # a cycle without the end token: no answer ends by itself
            table = cycle(257)
            table[255] = table[256]
        self._engine = MarkovEngine(table, n_ctx=100_000)
        self.config, self.go, self.steps = self._engine.config, threading.Event(), 0
        self.divides_prompts, self.continues_exactly, self.nbytes = True, False, 0
        self.formats, self.describe = self._engine.formats, self._engine.describe
        self.adapters = self._engine.adapters

    def decode(self, *arguments: Any, **options: Any) -> Any:
        decoding = self._engine.decode(*arguments, **options)
        following = decoding.next

        def next_tokens() -> Any:
            self.go.wait(60)
            self.steps += 1
            return following()

        setattr(decoding, "next", next_tokens)  # noqa: B010
        return decoding


class Running:
    """A running server."""

    def __init__(self, engine: EngineServer, port: int) -> None:
        self.engine, self.host, self.port = engine, engine.host, port
        self.url = f"http://127.0.0.1:{port}"

    @property
    def server(self) -> Any:
        """The endpoints of a server with one process."""
        return self.engine.http and self.engine.http.api

    @property
    def service(self) -> Any:
        return self.host.service

    def metric(self, name: str, **labels: str) -> float:
        found = self.host.metrics.registry.get_sample_value(f"gpt2block_{name}", labels)
        return found or 0  # None until the first value is recorded

    def requests(self, path: str, status: int) -> float:
        """Return the number of requests to `path` that were answered with `status`."""
        return self.metric("requests_total", path=path, status=str(status))


@contextmanager
def serving(model: Any, encoding: Any = BYTES, **settings: Any) -> Iterator[Running]:
    """Run a server, with its engine in this process, until the context ends."""
    default: Any = {"names": ("small",), "processes": PROCESSES, "grace": 5}
    host = EngineHost(model, encoding, ServerSettings(**default | settings))
    listening, started = socket.create_server(("127.0.0.1", 0)), threading.Event()
    server = EngineServer(host, started.set, lambda: None)
    thread = threading.Thread(target=server.run, args=(listening,), daemon=True)
    port = listening.getsockname()[1]
    thread.start()
    try:
        eventually(started.is_set)
        yield Running(server, port)
    finally:
        server._loop.call_soon_threadsafe(server.end)
        thread.join(SECONDS)
        listening.close()
    assert not thread.is_alive()


def clients_of(running: Running) -> list[str]:
    """Return a list to which the clients of all sequences submitted from now on are appended."""
    names, submit = [], running.service.submit

    def noted(*given: Any) -> None:
        names.append(given[3])
        submit(*given)

    running.service.submit = noted
    return names


def exchanged(
    url: str, body: Any = None, method: str | None = None, **headers: str
) -> tuple[int, Any, str]:
    """Send a request; return status, headers and text of the answer.

    body: bytes, or a value to send as JSON, by POST; None sends a GET request.
    """
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **headers}
    request = urllib.request.Request(url, data, headers, method=method)
    try:
        answer = urllib.request.urlopen(request, timeout=SECONDS)
    except urllib.error.HTTPError as error:
        answer = error
    with answer:
        return answer.status, answer.headers, answer.read().decode()


def post(running: Running, path: str, body: Any, **headers: str) -> tuple[int, Any]:
    """Send a POST request; return status and JSON of the answer, or its text if it is not JSON."""
    status, _, found = exchanged(running.url + path, body, **headers)
    try:
        return status, json.loads(found)
    except ValueError:
        return status, found


get = partial(post, body=None)


def eventually(happened: Callable[[], bool]) -> None:
    """Wait until something has happened."""
    end = time.monotonic() + SECONDS
    while not happened():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)

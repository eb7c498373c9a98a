"""Clients of a server that must not affect each other, and marks of requests and errors."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from functools import partial
from http.client import HTTPConnection
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra serve is not installed")

from gpt2block import __version__
from gpt2block.apps.cli import serve as cli_serve
from gpt2block.apps.serve import app, protocol
from gpt2block.apps.serve.workers import Places
from gpt2block.engine.chat.template import ChatTemplate
from gpt2block.errors import InputError
from tests.apps.test_serve import HELLO, KEYS, command, key_of
from tests.exchanges import CHAT, COMPLETION
from tests.markov import LINES
from tests.serving import eventually, exchanged, model_of, post, serving, small

ANN, BOB = key_of("ann"), key_of("bob")
TEXT = "a" * 120
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def with_template(template: Any) -> Any:
    found = small()
    return model_of(found.engine, chat_template=template)


@pytest.fixture(scope="module")
def model() -> Any:
    return with_template(LINES)


class Held:
    """A chat template that waits for `go` before it renders."""

    names, thinking = SimpleNamespace(fields=(), variables=()), None

    def __init__(self) -> None:
        self.go, self.begun = threading.Event(), []  # type: threading.Event, list[Any]

    def arguments(self, *given: Any) -> dict[str, Any]:
        return {}

    def placed(self, messages: Any, *more: Any) -> Any:
        self.begun.append(messages)
        assert self.go.wait(60)
        return "x", []


def test_chats_of_a_client_do_not_stop_others() -> None:
    """Other clients' texts, large bodies, embeddings and pages are served meanwhile."""
    held, chat, long = Held(), {"messages": HELLO, "max_tokens": 1}, {"user": "x" * app.SMALL_BODY}
    pool, model = ThreadPoolExecutor(16), with_template(held)
    with pool, serving(model, rows=2, keys=KEYS) as running:
        chats = [pool.submit(post, running, CHAT, chat, **ANN) for _ in range(16)]
        eventually(lambda: len(held.begun) >= app.AT_ONCE // 2)
        try:
            for path, body in (
                ("/tokenize", {"prompt": TEXT}), ("/tokenize", {"prompt": TEXT, **long}),
                ("/v1/embeddings", {"input": TEXT, **long}), ("/play/tokens", {"prompt": TEXT}),
                (COMPLETION, {"prompt": "a", "max_tokens": 1, **long}),
            ):  # fmt: skip
                assert post(running, path, body, **BOB)[0] == 200
            assert len(held.begun) == app.AT_ONCE // 2
        finally:
            held.go.set()
        assert [each.result()[0] for each in chats] == [200] * 16


def test_a_rendering_has_a_limit_and_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread renders in a separate process."""
    monkeypatch.setattr(app, "TEMPLATE_SECONDS", 1.5)
    template = ChatTemplate("{% if messages[0].content == 'go' %}" + ENDLESS + "{% endif %}ok", {})
    endless = {"messages": [{"role": "user", "content": "go"}]}
    pool, model = ThreadPoolExecutor(1), with_template(template)
    with pool, serving(model, keys=KEYS) as running:
        for _ in range(2):  # start the processes first
            ready = copy(template)
            ready.seconds = 1.5
            ready.render(HELLO)
            running.server._templates.append(ready)
        slow = pool.submit(post, running, "/tokenize", endless, **ANN)
        eventually(lambda: len(running.server._templates) == 1)
        status, found = post(running, "/tokenize", {"messages": HELLO}, **BOB)
        assert (status, found["tokens"], slow.done()) == (200, [*b"ok"], False)
        status, found = slow.result()
        assert (status, found["error"]["param"]) == (413, "messages")
        assert "takes more than 1,500 ms" in found["error"]["message"]
        assert post(running, "/tokenize", {"messages": HELLO}, **ANN)[0] == 200


def test_a_conversation_that_is_too_long_is_rendered_once(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Characters are not traced through the template, which would be slower than rendering."""
    asked, ask = [], ChatTemplate._ask

    def counted(self: ChatTemplate, line: str, *more: Any) -> Any:
        asked.append(type(json.loads(line)))
        return ask(self, line, *more)

    monkeypatch.setattr(ChatTemplate, "_ask", counted)
    with serving(model, rows=1) as running:
        status, found = post(running, CHAT, {"messages": HELLO * 4000})
    assert (status, found["error"]["code"]) == (400, "context_length_exceeded")
    assert asked == [str, dict]


def test_places() -> None:
    """Clients take turns and leave half of the places free; cancelled requests take no place."""
    order: list[str] = []

    async def work(places: Places, client: str, name: str, go: asyncio.Event) -> None:
        async with places.taken(client):
            order.append(name)
            await go.wait()

    async def run() -> None:
        places, go = Places(4), asyncio.Event()
        names = ("a1", "a2", "a3", "a4", "b1", "b2")
        tasks = {n: asyncio.create_task(work(places, n[0], n, go)) for n in names}
        await asyncio.sleep(0)
        assert order == ["a1", "a2", "b1"]
        tasks["a3"].cancel()
        tasks["c1"] = asyncio.create_task(work(places, "c", "c1", go))
        await asyncio.sleep(0)
        assert order == ["a1", "a2", "b1", "c1"]
        go.set()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        assert sorted(order[4:]) == ["a4", "b2"]
        assert places._free == 4
        assert not places._taken

    asyncio.run(run())


def test_a_turn_that_comes_with_a_cancellation_is_passed_on() -> None:
    async def run() -> None:
        places = Places(1)
        await places.take("a")
        waiting = [asyncio.ensure_future(places.take(client)) for client in "bc"]
        await asyncio.sleep(0)
        places.give_back("a")
        waiting[0].cancel()
        await asyncio.wait_for(waiting[1], 20)
        assert waiting[0].cancelled()
        assert not places._free

    asyncio.run(run())


# --- heads of requests ----------------------------------------------------------------------------


def test_an_id_for_each_request(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    def logged(id: str) -> bool:
        return any(each.endswith(f", {id}") for each in caplog.messages)

    given = {"abc-1": True, "x" * 128: True, "": False, "x" * 129: False, "a b": False}
    with (
        serving(model, rows=1, keys=KEYS) as running,
        caplog.at_level("INFO", "gpt2block.apps.serve"),
    ):
        for (id, kept), path, key in product(given.items(), ("/version", "/none"), (ANN, {})):
            status, found, text = exchanged(running.url + path, **{"X-Request-Id": id}, **key)
            (told,) = found.get_all("x-request-id")
            assert kept == (told == id)
            assert re.fullmatch("[!-~]{1,128}", told)
            eventually(partial(logged, told))
            assert (found["www-authenticate"] == "Bearer") == (status == 401)
            assert status == (404 if path == "/none" else 200 if key else 401)
            assert status != 200 or json.loads(text) == {"version": __version__}


# A proxy may take the bytes after such a body for another request.
TWICE = (
    b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: %s"
    b"\r\n\r\n0\r\n\r\nGET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
)
LENGTHS = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: %s\r\n\r\n"
HEADS = [
    (b"hello\r\n\r\n", 400, "illegal request line"),
    (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400, "Host"),
    (b"GET / HTTP/1.1\r\nX: " + b"x" * 70_000, 431, "expected HTTP/1.1"),
    (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\n", 501, "chunked"),
    (b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n", 505, "expected HTTP/1.1"),
    *((LENGTHS % each, 400, "Content-Length") for each in (b"-5", b"five", b"5, 6")),
    *((TWICE % chunked, 400, "got both") for chunked in (b"chunked", b"Chunked")),
]


def test_errors_of_http_are_those_of_the_protocol(model: Any) -> None:
    with serving(model, rows=1) as running:
        for head, status, words in HEADS:
            with socket.create_connection(("127.0.0.1", running.port), timeout=60) as connection:
                connection.sendall(head)
                found, _, body = connection.makefile("rb").read().partition(b"\r\n\r\n")  # closed
            assert found.startswith(b"HTTP/1.1 %d" % status)
            assert b"x-request-id: req-" in found
            assert words in json.loads(body)["error"]["message"]


def test_the_table_of_neutral_values_is_that_of_the_documentation() -> None:
    page = Path(__file__).parents[2].joinpath("docs", "serve.md").read_text(encoding="utf-8")
    table = page.partition("## Fields without effect\n")[2].partition("\n## ")[0]
    found: dict[str, str] = {}
    for names, values in re.findall(r"^\| (`.*) \| (any|only null|`.*`) \|$", table, re.MULTILINE):
        found |= dict.fromkeys(re.findall("`(.*?)`", names), values)
    any_value = protocol.NEUTRAL["user"]
    assert found == {
        name: "any" if values is any_value
        else ", ".join(f"`{json.dumps(each)}`" for each in values) or "only null"
        for name, values in protocol.NEUTRAL.items()
    }  # fmt: skip


# --- the command ----------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has neither")
def test_a_unix_socket_and_new_keys(tmp_path: Path) -> None:
    path, keys = tmp_path / "socket", tmp_path / "keys"
    keys.write_text(f"ann {KEYS['ann']}\n")
    keys.chmod(0o600)

    def status(key: Any) -> int:
        connection = HTTPConnection("localhost", timeout=60)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(str(path))
        connection.request("GET", "/version", headers=key)
        return connection.getresponse().status

    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(path))  # left by a server that crashed
    with command("--uds", str(path), "--api-key-file", str(keys)) as (child, line):
        assert f"unix:{path}" in line
        assert [status(ANN), status(BOB)] == [200, 401]
        with pytest.raises(InputError, match="another server listens there"):
            cli_serve._bound_file(path)
        for text, expected in ((f"bob {KEYS['bob']}", [401, 200]), ("", [401, 200])):
            keys.write_text(text)
            child.send_signal(signal.SIGHUP)
            assert "SIGHUP: " in child.stderr.readline()
            eventually(lambda: [status(ANN), status(BOB)] == expected)  # noqa: B023
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == 0
    assert not path.exists()


def test_sighup_without_keys_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    for file in (None, Path("-")):
        assert cli_serve._reload(file) is None
        assert "SIGHUP: ignored" in caplog.messages[-1]

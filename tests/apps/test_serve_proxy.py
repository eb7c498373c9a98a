"""Several servers behind HAProxy, with the configuration in examples/."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra serve is not installed")
pytest.importorskip("uvicorn", reason="the extra serve is not installed")

from tests.generating import generate
from tests.serving import BYTES, Slow, clients_of, eventually, exchanged, model_of, serving, small

EXAMPLE = Path(__file__).parents[2] / "examples" / "haproxy.cfg"
HAPROXY = shutil.which("haproxy")
pytestmark = pytest.mark.skipif(HAPROXY is None, reason="HAProxy is not installed")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def status_of(port: int, path: str, body: Any = None, **headers: str) -> tuple[int, str]:
    status, _, text = exchanged(f"http://127.0.0.1:{port}{path}", body, **headers)
    return status, text


@contextmanager
def proxy(folder: Path, *servers: int) -> Iterator[int]:
    """Run HAProxy in front of the servers at these ports; yield its own port."""
    port, text = free_port(), EXAMPLE.read_text()
    text = re.sub(r"(bind 127.0.0.1):\d+", rf"\1:{port}", text)
    for number, each in enumerate(servers):
        text, changed = re.subn(rf"(server gpu{number} 127.0.0.1):\d+", rf"\1:{each}", text)
        assert changed == 1
    (folder / "haproxy.cfg").write_text(text)
    with subprocess.Popen([str(HAPROXY), "-f", folder / "haproxy.cfg"]) as process:
        try:
            eventually(lambda: listens(port))
            yield port
        finally:
            process.kill()


def listens(port: int) -> bool:
    try:
        return status_of(port, "/v1/models")[0] == 200
    except OSError:
        return False


@pytest.fixture(scope="module")
def model() -> Any:
    found = small()
    return model_of(found.engine, generate=partial(generate, found.engine, BYTES))


COMPLETION = "/v1/completions"
SHORT = {"prompt": "a", "max_tokens": 2}


def test_a_request_goes_to_the_server_with_the_fewest(tmp_path: Path) -> None:
    engines = Slow(), Slow()
    with ExitStack() as stack:
        servers = [stack.enter_context(serving(model_of(each))) for each in engines]
        port = stack.enter_context(proxy(tmp_path, *(each.port for each in servers)))
        threads = stack.enter_context(ThreadPoolExecutor())
        waiting = [threads.submit(status_of, port, COMPLETION, SHORT) for _ in range(4)]
        eventually(lambda: [each.service.open for each in servers] == [2, 2])
        for engine in engines:
            engine.go.set()
        assert [each.result()[0] for each in waiting] == [200] * 4


def test_requests_of_a_server_that_ends_go_to_the_other(model: Any, tmp_path: Path) -> None:
    with serving(model, rows=2) as stays, ExitStack() as stack:
        ends = stack.enter_context(serving(model, rows=2))
        with proxy(tmp_path, ends.port, stays.port) as port:
            assert status_of(port, COMPLETION, SHORT)[0] == 200
            stack.close()
            assert [status_of(port, COMPLETION, SHORT)[0] for _ in range(20)] == [200] * 20


def test_a_full_queue_sends_a_request_on(model: Any, tmp_path: Path) -> None:
    engine = Slow()
    with ExitStack() as stack:
        full = stack.enter_context(serving(model_of(engine), rows=1, queue=1))
        other = stack.enter_context(serving(model, rows=1))
        threads = stack.enter_context(ThreadPoolExecutor())
        waiting = [threads.submit(status_of, full.port, COMPLETION, SHORT) for _ in range(2)]
        eventually(lambda: full.service.open == 2)
        assert status_of(full.port, COMPLETION, SHORT)[0] == 503
        with proxy(tmp_path, full.port, other.port) as port:
            assert [status_of(port, COMPLETION, SHORT)[0] for _ in range(6)] == [200] * 6
        engine.go.set()
        assert [each.result()[0] for each in waiting] == [200, 200]


def test_the_host_that_a_browser_asked_for_is_checked(model: Any, tmp_path: Path) -> None:
    """The client is the proxy's peer, whatever the request's own X-Forwarded-For states.

    Answers pass the proxy unchanged.
    """
    with serving(model, rows=1, proxies=("127.0.0.1/32",)) as server:
        names = clients_of(server)
        with proxy(tmp_path, server.port, server.port) as port:
            for host, status in (("localhost", 200), (f"127.0.0.1:{port}", 200), ("evil.com", 400)):
                given = {"Host": host, "X-Forwarded-For": "9.9.9.9"}
                assert status_of(port, COMPLETION, SHORT, **given)[0] == status
            status, found = status_of(port, COMPLETION, {**SHORT, "max_tokens": -1.5})
            assert (status, json.loads(found)["error"]["param"]) == (400, "max_tokens")
    assert names == ["127.0.0.1"] * 2

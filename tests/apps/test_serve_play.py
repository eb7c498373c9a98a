"""The page at / of a server, and its own requests: tokens, distributions, explained passes."""

from __future__ import annotations

import json
import re
import threading
from base64 import b64encode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from typing import Any

import numpy as np
import pytest

pytest.importorskip("starlette", reason="the extra serve is not installed")
pytest.importorskip("uvicorn", reason="the extra serve is not installed")

from gpt2block.apps.serve import kept, passes, play
from gpt2block.sampling import Sampling, choose, probabilities
from tests.serving import BYTES, Running, eventually, exchanged, model_of, post, serving, small

NEXT, EXPLAIN = "/play/next", "/play/explain"
KEYS = {name: name * 16 for name in "abe"}
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.5, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.6},
    {"temperature": 0.8, "min_p": 0.4, "top_k": 40, "top_p": 0.9},
    {"temperature": 2.0, "top_k": 1},
    {"temperature": 0.0},
]


@pytest.fixture(scope="module")
def model() -> Any:
    return model_of(small().engine)


@pytest.fixture(scope="module")
def server(model: Any) -> Iterator[Running]:
    with serving(model, rows=2) as running:
        yield running


def get(running: Running, path: str, **headers: str) -> tuple[int, Any, str]:
    return exchanged(running.url + path, **headers)


# --- the distribution -----------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS)
def test_probabilities_are_the_frequencies_of_draws(options: dict[str, Any]) -> None:
    """Both agree within 5 standard deviations of 1,000 draws; filtered tokens are never drawn."""
    logits = np.random.default_rng(3).standard_normal(50, dtype=np.float32) * 2
    draws = 1000
    drawn = [choose(logits, Sampling(**options, seed=9), step).token for step in range(draws)]
    p = probabilities(logits, Sampling(**options))
    assert p.sum() == pytest.approx(1)
    deviation = np.sqrt(p * (1 - p) / draws)
    assert (np.abs(np.bincount(drawn, minlength=50) / draws - p) <= 5 * deviation).all()


def test_probabilities_of_odd_logits() -> None:
    sampling = Sampling(temperature=1)
    assert probabilities(np.array([0, np.nan], np.float32), sampling).tolist() == [0, 0]
    assert probabilities(np.full(2, -np.inf, np.float32), sampling).tolist() == [0, 0]
    assert probabilities(np.array([-np.inf, 3, 3], np.float32), sampling).tolist() == [0, 0.5, 0.5]
    biased = Sampling(temperature=1, logit_bias={0: -1})
    assert probabilities(np.array([2, 1], np.float32), biased).tolist() == [0.5, 0.5]


@pytest.mark.parametrize("options", OPTIONS)
def test_the_distribution_is_that_of_the_sampler(
    server: Running, model: Any, options: dict[str, Any]
) -> None:
    (logits,) = model.engine.forward([np.array([*b"abc"], np.int32)], "last")
    exact = np.exp(logits.astype(np.float64))
    exact /= exact.sum()
    status, found = post(server, NEXT, {"ids": [*b"abc"], "token": 7, **options})
    assert status == 200
    order = np.argsort(-logits, kind="stable")
    assert [each["id"] for each in found["tokens"]] == order[: play.SHOWN].tolist()
    assert [each["rank"] for each in found["tokens"]] == [*range(1, play.SHOWN + 1)]
    drawn = probabilities(logits, Sampling(**options))
    for each in (*found["tokens"], found["token"]):
        assert each["probability"] == pytest.approx(exact[each["id"]], rel=1e-9)
        assert each["drawn"] == drawn[each["id"]]
        assert each["token"] in (chr(each["id"]), f"bytes:\\x{each['id']:02x}", "<|endoftext|>")
    assert found["token"]["rank"] == 1 + order.tolist().index(7)
    kept = drawn[drawn > 0]
    assert found["kept"] == len(kept)
    assert found["entropy"] == pytest.approx(-(kept * np.log2(kept)).sum(), abs=1e-12)


def test_a_text_is_computed_once_for_all_options_of_a_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Simultaneous requests share a pass too; its result is kept until newer texts replace it.

    If logits were shared by clients, response times would reveal another client's requests.
    """
    engine, passes = small().engine, []
    forward, both = engine.forward, threading.Event()

    def counted(sequences: Any, *more: Any) -> Any:
        passes.append(sequences[0].tolist())
        both.wait(60)
        return forward(sequences, *more)

    monkeypatch.setattr(engine, "forward", counted)
    monkeypatch.setattr(kept, "KEPT_CLIENTS", 2)
    ann, bob, eve = ({"Authorization": f"Bearer {key}"} for key in KEYS.values())
    with serving(model_of(engine), rows=1, keys=KEYS) as running, ThreadPoolExecutor(2) as pool:
        bodies = [{"ids": [1, 2], "temperature": t} for t in (0.5, 1.5)]
        waiting = [pool.submit(post, running, NEXT, body, **ann) for body in bodies]
        eventually(lambda: len(passes) == 1)
        both.set()
        answers = [each.result() for each in waiting]
        assert [status for status, _ in answers] == [200, 200]
        assert answers[0][1]["tokens"][0]["drawn"] > answers[1][1]["tokens"][0]["drawn"]
        for client, count in ((ann, 1), (bob, 2), (ann, 2), (eve, 3), (ann, 3), (bob, 4)):
            assert post(running, NEXT, {"ids": [1, 2]}, **client)[0] == 200
            assert len(passes) == count
        for last in range(play.KEPT_LOGITS):
            post(running, NEXT, {"ids": [1, last + 3]}, **bob)
        assert len(passes) == 4 + play.KEPT_LOGITS
        post(running, NEXT, {"ids": [1, 2]}, **bob)
        assert passes[-1] == [1, 2]


def test_logits_that_are_not_finite_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = small().engine
    wrong = [np.full(257, np.nan, np.float32)]
    monkeypatch.setattr(engine, "forward", lambda *given: wrong)
    with serving(model_of(engine), rows=1) as running:
        for _ in range(2):
            status, found = post(running, NEXT, {"ids": [1]})
            assert status == 400
            assert "expected finite ones, got NaN or infinity" in found["error"]["message"]
        wrong[0] = np.zeros(257, np.float32)  # errors are not cached
        assert post(running, NEXT, {"ids": [1]})[1]["tokens"][0]["probability"] == 1 / 257


# --- the page, keys and names ---------------------------------------------------------------------


def test_the_page_allows_its_own_script_and_no_other(server: Running) -> None:
    status, headers, html = get(server, "/")
    assert status == 200
    assert headers["content-type"].startswith("text/html")
    policy = dict(
        part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";")
    )
    for tag in ("script", "style"):
        (content,) = re.findall(f"<{tag}[^>]*>(.*?)</{tag}>", html, re.DOTALL)
        expected = b64encode(sha256(content.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{expected}'"
    assert (policy["default-src"], policy["connect-src"]) == ("'none'", "'self'")
    assert policy["frame-ancestors"] == policy["form-action"] == policy["base-uri"] == "'none'"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert not re.search(r"\son\w+=|innerHTML|outerHTML|insertAdjacentHTML|https?://", html)


# --- explained passes -----------------------------------------------------------------------------


def test_a_pass_is_explained_at_an_address_that_none_can_guess(server: Running) -> None:
    paths = [post(server, EXPLAIN, {"ids": [*b"To be"]})[1]["path"] for _ in range(2)]
    assert len({*paths}) == 2
    assert all(re.fullmatch(r"play/explain/[\w-]{22}", path) for path in paths)
    status, headers, html = get(server, f"/{paths[0]}")
    assert status == 200
    assert "<title>To be · small</title>" in html
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'self'" in policy
    assert policy.endswith("sandbox allow-scripts")
    status, headers, text = get(server, "/play/explain/other")
    assert (status, headers["content-type"]) == (404, "text/plain; charset=utf-8")
    assert text == "The server no longer has this page: explain the position again."


def test_old_pages_are_forgotten(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "KEPT_PAGES", 2)
    monkeypatch.setattr(passes, "collect", lambda *given: {"model": {"name": "m"}, "text": "x"})
    with serving(model, rows=1) as running:
        paths = [post(running, EXPLAIN, {"ids": [1]})[1]["path"] for _ in range(3)]
        assert [get(running, f"/{path}")[0] for path in paths] == [404, 200, 200]


class Explaining:
    """A substitute for `collect` that waits for `go`; it counts calls and simultaneous calls."""

    def __init__(self) -> None:
        self.go, self.calls, self.running, self.together = threading.Event(), 0, 0, 0

    def __call__(self, engine: Any, encoding: Any, name: str, ids: Any, layer: int) -> Any:
        self.calls += 1
        self.running += 1
        self.together = max(self.together, self.running)
        self.go.wait(60)
        self.running -= 1
        return {"model": {"name": name}, "text": "x"}


def test_rows_go_on_while_a_pass_is_explained(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One pass is explained at a time; others wait."""
    explaining = Explaining()
    monkeypatch.setattr(passes, "collect", explaining)
    with serving(model, rows=1) as running, ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(post, running, EXPLAIN, {"ids": [n]}) for n in range(3)]
        eventually(lambda: explaining.calls == 1)
        body = {"prompt": "abc", "max_tokens": 20}
        assert post(running, "/v1/completions", body)[1]["usage"]["completion_tokens"] > 0
        explaining.go.set()
        assert [each.result()[0] for each in waiting] == [200] * 3
    assert (explaining.calls, explaining.together) == (3, 1)


def test_explained_passes_are_short_and_few(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    explaining = Explaining()
    monkeypatch.setattr(passes, "collect", explaining)
    monkeypatch.setattr(passes, "MAX_EXPLAINING", 1)
    monkeypatch.setattr(play, "MAX_EXPLAINED", 5)
    ann, bob, _ = ({"Authorization": f"Bearer {key}"} for key in KEYS.values())
    with serving(model, rows=1, keys=KEYS) as running, ThreadPoolExecutor(2) as pool:
        status, found = post(running, EXPLAIN, {"ids": [1] * 6}, **ann)
        assert (status, found["error"]["param"]) == (400, "ids")
        assert "at most 5 tokens to explain, got 6" in found["error"]["message"]
        both = [pool.submit(post, running, EXPLAIN, {"ids": [1]}, **key) for key in (ann, bob)]
        eventually(lambda: explaining.calls == 1)
        status, found = post(running, EXPLAIN, {"ids": [1]}, **ann)
        assert (status, found["error"]["code"]) == (503, "overloaded")
        explaining.go.set()
        assert [each.result()[0] for each in both] == [200, 200]
        assert post(running, EXPLAIN, {"ids": [1]}, **ann)[0] == 200


def test_a_model_that_is_too_large_is_not_explained(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(play, "MAX_PARAMETERS", 1000)
    with serving(model, BYTES, rows=1) as running:
        assert json.loads(get(running, "/play/model")[2])["explained"] == 0
        status, found = post(running, EXPLAIN, {"ids": [1]})
        assert status == 400
        assert "models of at most 1,000 parameters" in found["error"]["message"]

"""Rules that take any time and memory: limits of compiling them, and masks that take long."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra serve is not installed")
pytest.importorskip("llguidance", reason="the extra tools is not installed")
pytest.importorskip("openai", reason="test_serve needs the client openai")

from gpt2block.errors import InputError
from gpt2block.grammars import Grammar, Vocabulary
from gpt2block.serve.protocol import ApiError
from gpt2block.serve.trials import POSSIBLE, Trial
from tests.serving import BYTES, post, serving, small
from tests.test_serve import COMPLETION, client_of_command, command

pytestmark = pytest.mark.skipif(not POSSIBLE, reason="limits need Linux")

STRINGS = [{"type": "string", "pattern": f"[ab]*a[ab]{{{n}}}b[ab]*"} for n in range(10, 50)]
PATTERNS = {f"^a{n}x.*b$": {"type": "string"} for n in range(400)}
ENDLESS = {"allOf": STRINGS}
VOCABULARY = BYTES, 257, frozenset({256})
SECONDS = "compiling takes more than 0.2 s of CPU time: expected a simpler one"


@pytest.mark.parametrize(
    ("rule", "mib", "problem"),
    [
        ({"schema": ENDLESS}, 512, f"schema: {SECONDS}"),
        ({"schema": {"multipleOf": 1_000_003}}, 512, f"schema: {SECONDS}"),
        ({"schema": {"type": "object", "patternProperties": PATTERNS}}, 512, f"schema: {SECONDS}"),
        ({"schema": {"multipleOf": 100_003}}, 4, "compiling takes more than 4 MiB of memory"),
        ({"grammar": 'start: "a"' + ' ("b"' * 9_000 + ")" * 9_000}, 512, "too deeply nested"),
        ({"regex": "(a"}, 512, "regex: .*unclosed group"),
    ],
)
def test_a_rule_that_exceeds_a_limit(rule: dict[str, Any], mib: int, problem: str) -> None:
    """The process compiles the next rule; a process that was killed is started again."""
    trial = Trial(VOCABULARY, 0.2 if "CPU" in problem else 60, mib << 20)
    given, good = Grammar.unchecked(**rule), Grammar.unchecked(choice=["yes"])
    assert given is not None
    assert good is not None
    with pytest.raises(InputError, match=problem):
        trial.run(given)
    assert 0 <= trial.run(good) < 2**20
    assert trial._process is not None
    os.killpg(trial._process.pid, signal.SIGKILL)
    with pytest.raises(ApiError, match="has ended: try again"):
        trial.run(good)
    assert trial.run(good) >= 0
    trial.close()


def test_one_clients_rules_delay_no_other_client() -> None:
    """A client's rules are compiled one by one; its requests without rules do not wait for them."""
    keys = {name: f"key-of-the-client-{name}" for name in "ab"}
    with (
        serving(small(), rows=2, keys=keys, rule_seconds=1) as running,
        ThreadPoolExecutor(4) as threads,
    ):
        headers = {name: {"Authorization": f"Bearer {key}"} for name, key in keys.items()}
        slow = [
            threads.submit(post, running, COMPLETION, {
                "prompt": "a", "structured_outputs": {"json": ENDLESS, "regex": None}
            }, **headers["a"])
            for _ in range(3)
        ]  # fmt: skip
        quick = {"structured_outputs": {"choice": ["yes"]}}
        for name, rule in (("b", quick), ("a", {})):
            body = {"prompt": "a", "max_tokens": 3, **rule}
            assert post(running, COMPLETION, body, **headers[name])[0] == 200
        assert not all(each.done() for each in slow)
        for each in slow:
            status, found = each.result()
            assert (status, found["error"]["param"]) == (400, "structured_outputs")
            assert "json: compiling takes more than 1 s of CPU time" in found["error"]["message"]


def test_kept_rules_have_a_limit_of_bytes() -> None:
    """The latest rule stays, however large; the CPU time of masks counts as bytes, too."""
    vocabulary = Vocabulary(*VOCABULARY)
    rules = [Grammar.unchecked(choice=[f"yes{n}"]) for n in range(4)]

    def kept() -> list[int]:
        return [n for n, rule in enumerate(rules) if rule and vocabulary.kept(rule)]

    for rule, mib in zip(rules[:2], (100, 100), strict=True):
        assert rule is not None
        matcher = vocabulary.matcher(rule, mib << 20)
    assert kept() == [0, 1]
    matcher.compiled.seconds += 1
    assert rules[2] is not None
    vocabulary.matcher(rules[2], 100 << 20)
    assert kept() == [2]
    assert rules[3] is not None
    vocabulary.matcher(rules[3], 300 << 20)
    assert kept() == [3]


LATE = "from gpt2block.serve import listening; listening.EXIT_SECONDS = 2"


def test_a_signal_ends_a_server_that_compiles() -> None:
    asked: dict[str, Any] = {"model": "shakespeare", "prompt": "a", "max_tokens": 2}
    with (
        command("--rule-seconds", "2", first=LATE) as (child, line),
        client_of_command(line) as client,
        ThreadPoolExecutor(1) as threads,
    ):
        body = {"structured_outputs": {"json": ENDLESS}}
        slow = threads.submit(client.completions.create, **asked, extra_body=body)
        client.completions.create(**asked)
        child.send_signal(signal.SIGTERM)
        assert child.wait(20) == 1
        with pytest.raises(Exception, match="Connection error"):
            slow.result()

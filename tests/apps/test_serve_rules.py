"""Rules that take any time and memory: limits of compiling them, and masks that take long."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from time import sleep
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra serve is not installed")
pytest.importorskip("llguidance", reason="the extra tools is not installed")
pytest.importorskip("openai", reason="test_serve needs the client openai")

from gpt2block import from_pretrained
from gpt2block.engine.generation import generate
from gpt2block.engine.grammars import Grammar, Vocabulary, matching
from gpt2block.engine.grammars.trials import POSSIBLE, Trial
from gpt2block.errors import InputError
from tests.apps.test_serve import client_of_command, command
from tests.exchanges import COMPLETION
from tests.serving import BYTES, post, serving, small

pytestmark = pytest.mark.skipif(not POSSIBLE, reason="limits need Linux")

STRINGS = [{"type": "string", "pattern": f"[ab]*a[ab]{{{n}}}b[ab]*"} for n in range(10, 50)]
PATTERNS = {f"^a{n}x.*b$": {"type": "string"} for n in range(400)}
ENDLESS = {"allOf": STRINGS}
VOCABULARY = BYTES, 257, frozenset({256})


def rule_of(**rule: Any) -> Grammar:
    made = Grammar.unchecked(**rule)
    assert made is not None
    return made


SECONDS = "compiling takes more than 0.2 s of CPU time: expected a simpler one"


@cache
def trial_of(seconds: float, mib: int) -> Trial:
    """Return a process that compiles rules within limits; it ends with this process."""
    return Trial(VOCABULARY, seconds, mib << 20)


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
    """The process compiles the next rule."""
    trial = trial_of(0.2 if "CPU" in problem else 60, mib)
    with pytest.raises(InputError, match=problem):
        trial.run(rule_of(**rule))
    assert 0 <= trial.run(rule_of(choice="a")) < 2**20


def test_a_process_that_was_killed_is_started_again() -> None:
    trial, good = trial_of(60, 512), rule_of(choice="a")
    assert trial.run(good) >= 0
    assert trial._process is not None
    os.killpg(trial._process.pid, signal.SIGKILL)
    with pytest.raises(ChildProcessError, match="process has ended"):
        trial.run(good)
    assert trial.run(good) >= 0


def test_a_rule_of_a_receipt_has_the_same_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next receipt is checked. Masks have limits, too."""
    monkeypatch.setattr(generate, "trial_of", lambda *vocabulary: Trial(vocabulary, 0.2))
    model = from_pretrained("shakespeare", "cpu")
    good: Any = model.generate("a", choice=["To be"], receipt=True).receipt
    bad = {**good, "options": {**good["options"], "rule": rule_of(schema=ENDLESS).source}}
    codes = [(each.code, each.problem) for each in model.verify([bad, good])]
    assert codes == [(2, f"options.rule: {SECONDS}"), (0, "")]
    monkeypatch.setattr(matching, "SLOW_S", 0.0)
    assert model.verify(good).code == 2


def test_one_clients_rules_delay_no_other_client() -> None:
    """A client's rules are compiled one by one; its requests without rules do not wait for them."""
    keys = {name: f"key-of-the-client-{name}" for name in "ab"}
    with (
        serving(small(), rows=2, keys=keys, rule_seconds=0.5) as running,
        ThreadPoolExecutor(4) as threads,
    ):
        headers = {name: {"Authorization": f"Bearer {key}"} for name, key in keys.items()}
        slow = [
            threads.submit(post, running, COMPLETION, {
                "prompt": "a", "structured_outputs": {"json": ENDLESS, "regex": None}
            }, **headers["a"])
            for _ in range(2)
        ]  # fmt: skip
        quick = {"structured_outputs": {"choice": ["yes"]}}
        for name, rule in (("b", quick), ("a", {})):
            body = {"prompt": "a", "max_tokens": 3, **rule}
            assert post(running, COMPLETION, body, **headers[name])[0] == 200
        assert not all(each.done() for each in slow)
        for each in slow:
            status, found = each.result()
            assert (status, found["error"]["param"]) == (400, "structured_outputs")
            assert "json: compiling takes more than 0.5 s of CPU time" in found["error"]["message"]


def test_kept_rules_have_a_limit_of_bytes() -> None:
    """The latest rule stays, however large. Growth by masks that take long counts, too."""
    vocabulary, rules = Vocabulary(*VOCABULARY), [rule_of(choice=[f"a{n}"]) for n in range(4)]
    matchers = []
    for rule, mib, kept in zip(
        rules, (100, 110, 110, 300), ([0], [0, 1], [1, 2], [3]), strict=True
    ):
        matchers.append(vocabulary.matcher(rule, mib << 20))
        assert [n for n in range(4) if vocabulary.kept(rules[n])] == kept
    assert vocabulary.grown == 620 << 20
    del matchers[1:3]
    assert vocabulary.grown == 400 << 20
    assert vocabulary.matcher(rules[0], 100 << 20).compiled.nbytes == 100 << 20
    matchers[0].compiled.seconds += 1
    assert matchers[0].compiled.nbytes == 164 << 20


LATE = "from gpt2block.apps.serve import listening; listening.EXIT_SECONDS = 0.5"


def computing(seconds: str) -> int:
    """Return the process with this limit if it has computed for more than a second, else 0."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if seconds in path.read_text(errors="replace").split("\0"):
                stat = path.with_name("stat").read_text().rpartition(")")[2].split()
                if int(stat[11]) > 120:  # ticks of 10 ms; loading the vocabulary takes fewer
                    return int(path.parent.name)
    return 0


def test_a_signal_ends_a_server_that_compiles() -> None:
    asked: dict[str, Any] = {"model": "shakespeare", "prompt": "a", "max_tokens": 2}
    with (
        command("--rule-seconds", "57", first=LATE) as (child, line),
        client_of_command(line) as client,
        ThreadPoolExecutor(1) as threads,
    ):
        schema = {"type": "object", "patternProperties": PATTERNS}  # slow, in little memory
        body = {"structured_outputs": {"json": schema}}
        slow = threads.submit(client.completions.create, **asked, extra_body=body)
        client.completions.create(**asked)
        while not (compiler := computing("57.0")):
            assert not slow.done()
            sleep(0.02)
        child.send_signal(signal.SIGTERM)
        assert child.wait(50) == 1  # before the compiler's limit
        os.kill(compiler, signal.SIGKILL)  # it would compute for a minute
        with pytest.raises(Exception, match="Connection error"):
            slow.result()

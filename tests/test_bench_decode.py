"""`bench --decode`: bytes and operations of steps and prompts, checks of results, and tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import isnan, nan
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from gpt2block import GPT2, GPT2Config, InputError, bench
from gpt2block.bench import Report, decoding
from gpt2block.bench import report as reports
from gpt2block.bench.decoding import RandomGPT2, Steps, decode, parse_rows
from gpt2block.bench.works import GeneratedSequences
from gpt2block.cli.bench import print_report
from gpt2block.config import SIZES, model_shapes
from gpt2block.cuda import timing
from gpt2block.run import cuda_decoding
from tests.benches import BEST, row
from tests.command_line import gpt2block
from tests.devices import running_on

TINY = GPT2Config(n_layer=1, n_head=1, n_embd=64, n_ctx=24, vocab_size=53)


def tiny(dtype: str = "float32") -> RandomGPT2:
    return RandomGPT2(TINY, dtype)


# Bytes and operations


def test_bytes_and_operations() -> None:
    """GPT-2 small has 124 million parameters, and 36,864 bytes of cache per token in bfloat16."""
    model = RandomGPT2(SIZES["gpt2"], "bfloat16")
    shapes = model_shapes(model.config)
    parameters = sum(int(np.prod(shape)) for name, shape in shapes.items() if name != "wpe")
    vectors = sum(shape[0] for shape in shapes.values() if len(shape) == 1)
    assert model.matrix_elements == parameters - vectors
    assert model.weight_bytes == 2 * parameters + 2 * vectors
    assert model.token_bytes == 36_864
    step = decode(Steps(model, 8))
    assert step.traffic == model.weight_bytes + 8 * 512 * 36_864
    assert step.flops == 2 * 8 * (parameters - vectors) + 8 * 4 * 12 * 768 * 512
    assert step.tokens == 8
    assert step.sizes == {"rows": 8, "position": 512, "n_layer": 12, "n_embd": 768}
    narrow = RandomGPT2(SIZES["gpt2"], "float8_e5m2")
    assert narrow.weight_bytes == parameters + 3 * vectors
    assert narrow.token_bytes == 36_864
    assert RandomGPT2(SIZES["gpt2"], "float32").token_bytes == 73_728


def test_the_position_is_the_middle_of_the_timed_steps() -> None:
    steps = Steps(RandomGPT2(SIZES["gpt2"], "bfloat16"), 1)
    timed = decoding.STEPS * decoding.TURNS
    assert steps.end - timed / 2 == 512  # an untimed first turn checks results
    assert steps.end - steps.start == timed + decoding.STEPS


def test_the_works_and_their_order() -> None:
    works = bench.decode_works()
    assert [work.name for work in works[:2]] == ["1 row", "2 rows"]
    assert [work.sizes["rows"] for work in works] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert {work.dtype for work in works} == {"bfloat16"}
    some = bench.decode_works("float32", "3, 3,16", "gpt2-xl")
    assert [work.sizes["rows"] for work in some] == [3, 16]
    assert some[0].sizes["n_layer"] == 48
    assert len({id(getattr(work.truth, "__self__", None)) for work in some}) == 1  # one model


@pytest.mark.parametrize("rows", ["", "0", "1,", "x", "-1", "1.5", "4097", "9" * 5000, "²"])
def test_numbers_of_rows_that_there_are_not(rows: str) -> None:
    with pytest.raises(InputError, match="--rows: expected numbers from 1 to 4,096 such as 1,8,64"):
        parse_rows(rows)


# Checks of results


def last_token(model: RandomGPT2, ids: Any) -> tuple[int, float]:
    """Return the most likely token after ids, and its log-probability."""
    logits = GPT2(model.weights, device="cpu")(ids, last=True).astype(np.float64)
    return int(logits.argmax()), float(logits.max() - np.log(np.exp(logits).sum()))


@pytest.fixture
def checked() -> Callable[..., tuple[float, float]]:
    """Return a function that checks given results after one replay and returns their errors."""
    work = decode(Steps(tiny(), 2, position=12))

    def check(*written: Any) -> tuple[float, float]:
        replays: list[int] = []
        errors = work.check(lambda: replays.append(1), (lambda: GeneratedSequences(*written),))
        assert replays == [1]
        return errors

    return check


def test_the_error_of_a_token_is_the_difference_from_the_best(checked: Any) -> None:
    model = tiny()
    (ids,) = model.prompts([9])
    token, logprob = last_token(model, ids)
    right, other = (np.append(ids, np.int32((token + n) % 53)) for n in (0, 1))
    assert checked([right]) == (0, 0)
    assert checked([right], [logprob])[0] < 1e-6
    assert checked([right], [logprob - 0.25])[0] == pytest.approx(0.25, abs=1e-6)
    logits = model.last_logits(ids)
    off, relative = checked([right, other])
    assert off == pytest.approx(logits[token] - logits[(token + 1) % 53])
    assert relative == pytest.approx(off / np.abs(logits).max())
    assert relative > reports.tolerance(decode(Steps(model, 2)), "float32")
    # A sampled token need not be the most likely one; only its log-probability is checked.
    own = logprob - off
    assert checked([other], [own], False)[0] < 1e-6
    assert checked([other], [logprob], False)[0] == pytest.approx(off, abs=1e-6)
    assert all(map(isnan, checked([right, right], [logprob, nan])))


# Contenders


def test_steps_are_measured_on_the_emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompts of a decoding start in several groups; each group's first tokens are a result."""
    monkeypatch.setattr(decoding, "STEPS", 1)
    monkeypatch.setattr(decoding, "TURNS", 1)
    steps = Steps(tiny("bfloat16"), 4, 10)
    monkeypatch.setattr(cuda_decoding, "PREFILL_TOKENS", steps.start)
    with running_on("shuffled"):
        work = decode(steps)
        rows, skipped = reports.rows_of(work, work.ours([{}], 0), 1, BEST)
        runs = [steps.decoded(0, sampling, 1) for sampling in (decoding.SAMPLED, decoding.GREEDY)]
        for run in runs:
            run.replay()
        sampled, greedy = (run.outs[0]() for run in runs)
    assert {len(ids) for ids in greedy.sequences} == {steps.start + 2}
    assert (sampled.greedy, greedy.greedy) == (False, True)
    assert skipped == []
    assert [(row.work, row.contender) for row in rows] == [
        ("4 rows", "gpt2block"),
        ("4 rows", "sampled"),
    ]
    for each in rows:
        assert each.right, each
        assert each.max_rel < 0.01
        assert each.us > 0
        assert each.percent_copy == pytest.approx(100 * each.gb_s / 4000)
        assert each.tokens_s == pytest.approx(4e6 / each.us)


@pytest.fixture
def report() -> Report:
    """Return a report of steps with four numbers of rows."""
    works = [decode(Steps(tiny(), rows, position=10)) for rows in (1, 4, 8, 64)]
    us = {"gpt2block": 50.0, "sampled": 60.0}
    rows = [row(work, by, us[by]) for work in works for by in us]
    return Report({"GPU": "none"}, BEST, rows, [])


# Tables


def test_the_table_fits_eighty_columns(report: Report) -> None:
    step = decode(Steps(RandomGPT2(SIZES["gpt2"], "bfloat16", "float8_e5m2"), 256))
    rows = [row(step, "gpt2block", 2500.0), row(step, "sampled", 52_000.0)]
    console = Console(width=80)
    with console.capture() as shown:
        print_report(console, replace(report, rows=rows))
    lines = shown.get().splitlines()
    assert max(map(len, lines)) <= 80
    assert "12 layers of 768 channels, random weights" in lines
    cells = [line.split() for line in lines]
    first = next(line for line in cells if "gpt2block" in line)
    floor_us = step.traffic / 4000e3
    assert first[-7:] == ["gpt2block", "2500.0", "102,400", f"{floor_us / 25:.1f}", "1.00",
                          "0.0e+00", "ok"]  # fmt: skip
    second = next(line for line in cells if "sampled" in line and "ok" in line)
    assert second[-6:-4] == ["52000.0", "4,923"]
    assert second[-3] == "20.80"


def test_json_has_everything(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[Any] = []
    honest = bench.decode_works

    def works(*arguments: Any) -> Any:
        requested.append(arguments)
        return honest(*arguments)

    monkeypatch.setattr(bench, "decode_works", works)
    monkeypatch.setattr(bench, "run", lambda *arguments: report)
    ended = gpt2block("bench", "--decode", "--rows", "1,4", "--dtype", "float32", "--json")
    assert ended.code == 0
    assert requested == [("float32", "1,4", None, None)]
    found = ended.json
    assert list(found) == ["versions", "ceilings", "rows", "skipped"]
    steps = found["rows"]
    assert [entry["contender"] for entry in steps] == ["gpt2block", "sampled"] * 4
    assert steps[2]["sizes"] == {"rows": 4, "position": 10, "n_layer": 1, "n_embd": 64}
    assert steps[2]["tokens_s"] == pytest.approx(4e6 / 50)


def test_replays_on_the_host_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0.0, 1.0, 1.0, 3.0, 3.0, 6.0, 6.0, 7.0, 7.0, 9.0, 9.0, 10.0])
    monkeypatch.setattr(timing, "perf_counter", lambda: next(seconds))
    turns: list[str] = []
    replays = {name: (lambda name=name: turns.append(name)) for name in "ab"}
    assert timing.interleaved_host_ms(replays, 3) == {"a": 2000.0, "b": 1000.0}
    assert turns == ["a", "b"] * 3


# On the GPU


@pytest.mark.gpu
def test_a_small_race() -> None:
    works = bench.decode_works(rows="1,8")
    report = bench.run(works)
    assert report.right
    assert report.skipped == []
    us = {(row.work, row.contender): row.us for row in report.rows}
    # Times are not compared, as other tests may use the GPU at the same time.
    assert {"1 row", "8 rows"} <= {work for work, by in us if by == "gpt2block"}
    assert all(0 < row.percent_copy < 100 for row in report.rows)

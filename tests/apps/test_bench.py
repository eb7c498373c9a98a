"""Benchmarks: their figures, wrong results, the printed tables, and labels of plots."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from math import isnan, nan
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from rich.console import Console

from benchmarks import blocks, decoding, kernel_works, models, reports
from benchmarks.decoding import RandomModel, Steps
from benchmarks.kernel_works import block, block_weights, block_works, chosen_works
from benchmarks.labels import spread
from benchmarks.run import Report, _driver, rows_of, run
from benchmarks.run import tolerance as tolerance_of
from benchmarks.token_works import decode, gpt2_works, parse_rows
from benchmarks.works import GeneratedSequences, Work
from gpt2block import GPT2, Block, GPT2Config, InputError
from gpt2block.cuda import doctor, timing
from gpt2block.cuda.arrays import compute_capability
from gpt2block.engine.cuda import decoding as cuda_decoding
from gpt2block.errors import DeviceError, KernelError
from gpt2block.files.parameters.arrays import random_model
from gpt2block.models.config import SIZES, model_shapes
from gpt2block.ops import workload
from gpt2block.ops.bench import race
from gpt2block.ops.bench.race import Captured, Contender, copies_for, rounds_for
from gpt2block.ops.workload import errors, tolerance
from tests.benches import BEST, NO_GPU, row
from tests.devices import running_on

TINY = GPT2Config(n_layer=1, n_head=1, n_embd=64, n_ctx=24, vocab_size=53)


def tiny(dtype: str = "float32") -> RandomModel:
    return RandomModel(TINY, dtype)


O = block("bfloat16", 1, 6, True)  # noqa: E741


# Operations and bytes


def test_operations_and_bytes() -> None:
    full, causal = (block("float32", 2, 4, mask) for mask in (False, True))
    products = 2 * 8 * 768 * 768 * (3 + 1 + 4 + 4)
    assert full.flops == products + 2 * 12 * (16 * 2 * 64 * 2)  # sequences, heads, two products
    assert causal.flops == products + 2 * 12 * (10 * 2 * 64 * 2)
    assert causal.traffic == 4 * (2 * 8 * 768) + 4 * 7_087_872


def test_the_works_and_their_order() -> None:
    found = block_works()
    assert [work.dtype for work in found] == ["bfloat16"] * 5 + ["float32"] * 5
    names = ["1x128 full", "1x1024 full", "1x1024 causal", "8x1024 causal", "64x1024 causal"]
    assert [work.name for work in found] == 2 * names
    assert [(each.dtype, each.name) for each in chosen_works("block", "float16")] == [
        ("float16", name) for name in names
    ]


def test_the_truth_of_a_block_is_a_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_works, "TOKENS", 21)
    work = block("float32", 5, 7, True)
    x = work.inputs()["x"]
    assert (x[4] == x[1]).all()
    for causal, right in ((True, True), (False, False)):
        out = Block(block_weights("float32"), causal=causal, device="cpu")(x)
        assert (errors(out, work.truth())[1] <= tolerance_of(work, "float32")) == right


# Decoding


def test_bytes_and_operations_of_a_step() -> None:
    """GPT-2 small has 124 million parameters, and 36,864 bytes of cache per token in bfloat16."""
    model = RandomModel(SIZES["gpt2"], "bfloat16")
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
    narrow = RandomModel(SIZES["gpt2"], "float8_e5m2")
    assert narrow.weight_bytes == parameters + 3 * vectors
    assert narrow.token_bytes == 36_864
    assert RandomModel(SIZES["gpt2"], "float32").token_bytes == 73_728


def test_the_position_is_the_middle_of_the_timed_steps() -> None:
    steps = Steps(RandomModel(SIZES["gpt2"], "bfloat16"), 1)
    timed = decoding.STEPS * decoding.TURNS
    assert steps.end - timed / 2 == 512  # an untimed first turn checks results
    assert steps.end - steps.start == timed + decoding.STEPS


def test_the_steps_and_their_order() -> None:
    works = decode_works()
    assert [work.name for work in works[:2]] == ["1 row", "2 rows"]
    assert [work.sizes["rows"] for work in works] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert {work.dtype for work in works} == {"bfloat16"}
    some = decode_works("float32", "3, 3,16", "gpt2-xl")
    assert [work.sizes["rows"] for work in some] == [3, 16]
    assert some[0].sizes["n_layer"] == 48
    assert len({id(getattr(work.truth, "__self__", None)) for work in some}) == 1  # one model


@pytest.mark.parametrize("rows", ["", "0", "1,", "x", "-1", "1.5", "4097", "9" * 5000, "²"])
def test_numbers_of_rows_that_there_are_not(rows: str) -> None:
    with pytest.raises(InputError, match="--rows: expected numbers from 1 to 4,096 such as 1,8,64"):
        parse_rows(rows)


def decode_works(*chosen: str, **options: str) -> list[Work]:
    return [work for work in gpt2_works(*chosen, **options) if work.what == "decode"]


def last_token(model: RandomModel, ids: Any) -> tuple[int, float]:
    """Return the most likely token after ids, and its log-probability."""
    tensors = random_model(0, TINY)
    exact = GPT2.from_tensors(TINY, tensors, "cpu", "float32")
    logits = exact(ids, last=True).astype(np.float64)
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
    assert relative > tolerance_of(decode(Steps(model, 2)), "float32")
    # A sampled token need not be the most likely one; only its log-probability is checked.
    own = logprob - off
    assert checked([other], [own], False)[0] < 1e-6
    assert checked([other], [logprob], False)[0] == pytest.approx(off, abs=1e-6)
    assert all(map(isnan, checked([right, right], [logprob, nan])))


def test_steps_are_checked_on_the_emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompts of a decoding start in several groups; each group's first tokens are a result."""
    monkeypatch.setattr(decoding, "STEPS", 1)
    monkeypatch.setattr(decoding, "TURNS", 1)
    steps = Steps(tiny("bfloat16"), 4, 10)
    monkeypatch.setattr(cuda_decoding, "PREFILL_TOKENS", steps.start)
    work = decode(steps)
    with running_on("shuffled"):
        for each in work.ours([{}], 0):
            run = each.capture(1)
            relative = work.check(run.replay, run.outs)[1]
            assert relative <= tolerance_of(work, each.arithmetic)
            found = run.outs[0]()
            assert {len(ids) for ids in found.sequences} == {steps.start + 2}
            assert found.greedy == (each.name == "gpt2block")


def test_replays_on_the_host_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0.0, 1.0, 1.0, 3.0, 3.0, 6.0, 6.0, 7.0, 7.0, 9.0, 9.0, 10.0])
    monkeypatch.setattr(timing, "perf_counter", lambda: next(seconds))
    turns: list[str] = []
    replays = {name: (lambda name=name: turns.append(name)) for name in "ab"}
    assert timing.interleaved_host_ms(replays, 3) == {"a": 2000.0, "b": 1000.0}
    assert turns == ["a", "b"] * 3


# Errors


def test_errors_are_those_of_the_worst_row() -> None:
    truth = np.arange(12.0).reshape(3, 4) - 5
    out = np.resize(truth, (8, 4)).astype(np.float32)
    assert errors(out, truth) == (0, 0)
    out[7, 2] += 0.5
    assert errors(out.reshape(2, 4, 4), truth) == (0.5, 0.5 / 6)
    for wrong in (nan, np.inf):
        out[4, 1] = wrong
        assert all(map(isnan, errors(out, truth)))
    bits = np.arange(5, dtype=np.uint8)
    assert errors(bits.copy(), bits) == (0, 0)
    assert errors(bits + np.uint8(1), bits) == (255, 1)


def test_bfloat16_is_widened_exactly() -> None:
    bits = np.arange(0x7F80, dtype=np.uint16)
    values = np.concatenate([bits, bits | 0x8000]).view(ml_dtypes.bfloat16)
    truth = values.astype(np.float64)[:, None]
    assert errors(values, truth) == (0, 0)
    assert errors(values[:, None][::-1], truth[::-1]) == (0, 0)


def test_tf32_is_right_as_far_as_it_is() -> None:
    assert 4e-4 < tolerance("tf32") < 2e-3
    assert tolerance("float32") < 2e-5
    assert tolerance("float32") < tolerance("float16") < tolerance("bfloat16") < 0.01
    assert tolerance_of(O, "bfloat16") == 7 * tolerance("bfloat16")


# A race of fake contenders


class Racer:
    """A contender on the host whose result has an error of `off`."""

    def __init__(self, name: str, off: float = 0.0, **options: Any) -> None:
        self.name, self.off = name, off
        self.error: Exception | None = options.get("error")
        self.lazy = options.get("lazy", False)
        self.rounds: list[int] = []

    def capture(self, rounds: int) -> Captured:
        if self.error:
            raise self.error
        self.rounds.append(rounds)
        result = O.truth()[:6] + self.off
        out = np.zeros_like(result)

        def replay() -> None:
            if not self.lazy:
                out[...] = result

        return Captured(replay, (out, out))


@pytest.fixture
def run_race(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return a function that races contenders; ms: their times per turn.

    It returns the report's rows, reasons why contenders did not run, and the contenders per turn.
    """

    def poison(out: NDArray[Any]) -> None:
        out[...] = nan

    monkeypatch.setattr(workload, "poison", poison)
    monkeypatch.setattr(kernel_works, "TOKENS", 6)  # one input: its truth takes seconds for many

    def run(*racers: Racer, ms: Mapping[str, float] | None = None) -> Any:
        turns: list[list[str]] = []

        def interleaved_ms(replays: Mapping[str, Any], count: int = 7) -> dict[str, float]:
            for replay in replays.values():
                replay()
            if list(replays) == [""]:
                return {"": 0.7}
            turns.append(list(replays))
            return {name: (ms or {}).get(name, 3.0) for name in replays}

        monkeypatch.setattr(timing, "interleaved_ms", interleaved_ms)
        entrants = [Contender(r.name, r.capture, "bfloat16") for r in racers]
        return *rows_of(O, entrants, 10, BEST), turns

    return run


def test_what_a_row_says(run_race: Callable[..., Any]) -> None:
    new, old = Racer("wgmma"), Racer("mma")
    rows, skipped, turns = run_race(new, old, ms={"wgmma": 1.0, "mma": 1.5})
    assert skipped == []
    assert turns == [["wgmma", "mma"]]
    assert new.rounds == old.rounds == [1, 5]  # a round takes 0.7 ms, 3 ms are wanted
    first, second = rows
    assert first.us == pytest.approx(20.0)  # 1 ms for ten copies and five rounds
    assert first.tflop_s == pytest.approx(O.flops / 20e-6 / 1e12)
    assert first.gb_s == pytest.approx(O.traffic / 20e-6 / 1e9)
    assert first.percent_matmul == pytest.approx(100 * first.tflop_s / 800)
    assert first.percent_copy == pytest.approx(100 * first.gb_s / 4000)
    assert first.intensity == pytest.approx(first.tflop_s * 1e3 / first.gb_s)
    assert first.right
    assert second.right
    assert second.us == pytest.approx(30.0)
    assert first.sizes == {"B": 1, "T": 6, "causal": 1}
    assert (first.copies, first.arithmetic) == (10, "bfloat16")


def test_a_wrong_result_counts_for_nothing(run_race: Callable[..., Any]) -> None:
    others = Racer("c", off=nan), Racer("d", lazy=True)
    rows, _, _ = run_race(Racer("a", off=1.0), Racer("b"), *others)
    assert [row.right for row in rows] == [False, True, False, False]
    assert isnan(rows[3].max_rel)  # an output that is not written is NaN
    assert not Report({}, BEST, rows, []).right
    assert Report({}, BEST, rows[1:2], []).right


def test_who_cannot_run_is_told_with_the_reason(run_race: Callable[..., Any]) -> None:
    refusals = InputError("takes float32"), KernelError("needs Hopper\nx"), MemoryError("none left")
    racers = [Racer(f"r{i}", error=error) for i, error in enumerate(refusals)]
    rows, skipped, _ = run_race(*racers, Racer("ours"))
    assert [row.contender for row in rows] == ["ours"]
    assert skipped == [
        "block bfloat16: r0: takes float32",
        "block bfloat16: r1: needs Hopper",
        "block bfloat16: r2: none left",
    ]
    assert run_race(*racers[:1])[:2] == ([], skipped[:1])
    with pytest.raises(RuntimeError, match="illegal memory access"):  # a GPU error is no refusal
        run_race(Racer("ours", error=RuntimeError("an illegal memory access")))


def test_how_many_copies_and_rounds() -> None:
    assert copies_for(traffic=10, cache=100) == 40
    assert copies_for(traffic=1000, cache=100) == 1
    assert copies_for(traffic=1, cache=100) == race.MAX_SETS
    for once_ms, copies, rounds in ((0.5, 10, 6), (10.0, 10, 1), (0.0, 10, 200), (0.0, 10_000, 1)):
        assert rounds_for(once_ms, copies) == rounds


def test_the_drivers_version(tmp_path: Path) -> None:
    file = tmp_path / "version"
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23\n")
    assert _driver(file) == "580.95.05"
    assert _driver(tmp_path / "none") == "unknown"


# Tables


@pytest.fixture
def report() -> Report:
    rows = [
        row(O, "wgmma", error=1e-3),
        row(O, "mma", 3.0),
    ]
    for work in block_works("float32")[:3]:
        rows.append(row(work, "fused", 20.0))
        rows.append(row(work, "skeleton", 50.0))
    return Report({"GPU": "a GPU", "CuPy": "14.2"}, BEST, rows, ["block bfloat16: old: takes [x]"])


def shown(report: Report) -> str:
    console = Console(width=120)
    with console.capture() as captured:
        reports.print_report(console, report)
    return captured.get()


def test_the_table(report: Report) -> None:
    text = shown(report)
    assert "GPU a GPU, CuPy 14.2" in text
    assert "float32 50, tf32 400, float16 700, bfloat16 800 TFLOP/s" in text
    assert "GPT-2 small's block" in text
    assert "A step of decoding" not in text
    lines = [line.split() for line in text.splitlines()]
    first = next(line for line in lines if line[:2] == ["1x6", "causal"])
    assert first[2:5] == ["bfloat16", "wgmma", "2.00"]
    assert first[-3:] == ["1.00", "1.0e-03", "ok"]
    assert next(line for line in lines if line[:1] == ["mma"])[-3] == "1.50"
    assert next(line for line in lines if line[:2] == ["skeleton", "50.00"])[-3] == "2.50"
    assert "not run: block bfloat16: old: takes [x]" in text
    wrong = shown(replace(report, rows=[row(O, "wgmma", error=1.0), row(O, "mma", 2.5)]))
    assert wrong.count("WRONG") == 1
    assert " 1.00 " not in wrong  # no ratio to a wrong result


def test_the_table_of_steps_fits_eighty_columns(report: Report) -> None:
    step = decode(Steps(RandomModel(SIZES["gpt2"], "bfloat16", "float8_e5m2"), 256))
    rows = [row(step, "gpt2block", 2500.0), row(step, "sampled", 52_000.0)]
    console = Console(width=80)
    with console.capture() as shown:
        reports.print_report(console, replace(report, rows=rows))
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


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, report: Report) -> list[list[Work]]:
    requested: list[list[Work]] = []

    def run(works: Any) -> Report:
        requested.append(list(works))
        return report

    monkeypatch.setattr(reports, "run", run)
    return requested


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[[ModuleType, str], int]:
    """Return a function that runs a script with arguments and returns its exit code."""

    def start(script: ModuleType, arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["", *arguments.split()])
        code: int = script.main()
        return code

    return start


def test_json_has_everything(
    measured: list[list[Work]], report: Report, start: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    report.rows[0] = replace(report.rows[0], max_abs=nan, max_rel=nan, right=False)
    assert start(blocks, "--what block --only 8x1024 --json") == 1  # ours was wrong
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["versions", "ceilings", "rows", "skipped"]
    assert found["ceilings"] == {"copy_gb_s": 4000.0, "tflop_s": dict(BEST.tflop_s)}
    assert [entry["contender"] for entry in found["rows"]][:3] == ["wgmma", "mma", "fused"]
    assert found["rows"][0]["max_rel"] is None
    assert found["rows"][1]["sizes"] == {"B": 1, "T": 6, "causal": 1}
    assert [(work.name, work.dtype) for work in measured[0]] == [
        ("8x1024 causal", "bfloat16"),
        ("8x1024 causal", "float32"),
    ]
    start(models, "gpt2 --only row --rows 1,4 --dtype float32 --size gpt2-xl")
    steps = [(work.name, work.dtype, work.sizes["n_layer"]) for work in measured[1]]
    assert steps == [("1 row", "float32", 48), ("4 rows", "float32", 48)]


ROWS_WANTED = "--rows: expected numbers from 1 to 4,096 such as 1,8,64"
NOT_USED = f"benchmarks cannot be used: {NO_GPU}"


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        (blocks, "--what gem", "--what: expected one of block, gemm, attention, all, got 'gem'"),
        (blocks, "--dtype int8", "--dtype: expected one of float32, float16, bfloat16, got 'int8'"),
        (blocks, "--only 9x9", "--only '9x9': no name contains it; a name is '1x128 full'"),
        (models, "gpt2 --rows 8;9", ROWS_WANTED),
        (models, "gpt2 --dtype int8", "--dtype: expected one of float32, "),
        (models, "gpt2 --size gpt3", "unknown size 'gpt3': expected one of gpt2, "),
        (blocks, "--what block --only 8x", NOT_USED),
        (models, "gpt2 --only row --rows 1", NOT_USED),
    ],
)
def test_what_cannot_be_timed(
    script: ModuleType, arguments: str, message: str, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "cuda_problem", lambda: NO_GPU)
    with pytest.raises((InputError, DeviceError), match=re.escape(message)):
        start(script, arguments)


# Labels of plots


def test_labels_stand_apart() -> None:
    heights = [0.5, 0.51, 0.1, 0.52, 1.0, 0.99, 0.98]
    places = spread(heights, 0.05)
    ordered = sorted(places)
    assert all(b - a >= 0.05 - 1e-9 for a, b in pairwise(ordered))
    assert [places.index(p) for p in ordered] == [heights.index(h) for h in sorted(heights)]
    assert places[2] == 0.1
    assert ordered[0] >= 0
    assert ordered[-1] <= 1 + 1e-9
    crowded = spread([0.5] * 101, 0.05)
    assert min(crowded) >= -1e-9
    assert max(crowded) <= 1 + 1e-9
    assert len(set(crowded)) == 101


# On the GPU


@pytest.mark.gpu
def test_a_small_race() -> None:

    report = run(
        [
            block("bfloat16", 2, 17, True),
            block("float32", 2, 17, True),
            *decode_works(rows="1,8"),
        ]
    )
    assert report.right
    names = {(row.what, row.contender) for row in report.rows}
    assert names >= {("block", "skeleton"), ("decode", "sampled")}
    assert not [line for line in report.skipped if line.startswith("decode")]
    if compute_capability() >= 80:
        assert ("block", "fused") in names
    for each in report.rows:
        assert each.us > 0
        assert each.max_rel > 0
    assert report.versions["GPU"]

"""The registry of operations: completeness, consistency, and its use in the command and docs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from gpt2block import InputError, emulator, reference
from gpt2block.apps.cli.kernels import print_series
from gpt2block.cuda import kernels, timing
from gpt2block.cuda.arrays import Bound
from gpt2block.ops import workload
from gpt2block.ops.bench.race import Captured, Contender
from gpt2block.ops.bench.variants import Measurement, measure_variants
from gpt2block.ops.registry import OPERATIONS, Operation, all_sizes, find, parse_sizes
from gpt2block.ops.workload import counted_sizes, tolerance
from tests.command_line import gpt2block, printed
from tests.judge.test_mine import BEST, emulated  # noqa: F401  (a fixture)

SMALL = {"B": 2, "T": 5, "C": 24, "N": 7, "NH": 3, "HS": 8, "V": 11, "M": 3, "K": 5, "H": 3, "D": 8}
every_operation = pytest.mark.parametrize("operation", OPERATIONS.values(), ids=lambda o: o.name)


def small(operation: Operation) -> dict[str, int]:
    if operation.workload.matrices:  # a head of 128 columns, and sizes for tensor cores
        return {"M": 3, "K": 64, "N": 128}
    return {name: SMALL[name] for name in operation.workload.sizes}


def test_every_kernel_belongs_to_a_variant() -> None:
    registered = {
        (variant.file, name)
        for operation in OPERATIONS.values()
        for variant in operation.table
        for name in variant.kernels
    }
    there = {(file, name) for file in kernels.sources() for name in kernels.signatures(file)}
    assert registered == there


def test_every_variant_has_an_idea_and_every_idea_a_kernel() -> None:
    used: set[tuple[str, str]] = set()
    for operation in OPERATIONS.values():
        for variant in operation.table:
            stated = kernels.ideas(variant.file)
            assert variant.idea == variant.described()["idea"]
            assert variant.idea
            for name in variant.kernels:
                own = f"{name} ({variant.name})"
                used.add((variant.file, own if own in stated else name))
    assert used == {(file, name) for file in kernels.sources() for name in kernels.ideas(file)}


@every_operation
def test_an_operation_has_a_numpy_meaning_and_counts(operation: Operation) -> None:
    sizes = small(operation)
    inputs = operation.make(sizes, np.random.default_rng(0))
    attrs = dict(operation.workload.attrs)
    if "C" in sizes and "n_head" in attrs:
        attrs["n_head"] = 3
    out = getattr(reference, operation.name)(*inputs, **attrs)
    assert np.isfinite(out[..., 0]).all()  # column 0 is in the defined half of a trimat
    counted = counted_sizes(sizes, operation.workload.dtypes[0])
    assert operation.workload.traffic(counted) > 0
    assert operation.workload.flops(sizes) > 0
    assert operation.workload.bound in ("memory", "compute", "either")
    assert len({variant.name for variant in operation.variants}) == len(operation.variants)
    for variant in operation.variants:
        assert variant.block in (variant.blocks or (variant.block,))


@pytest.mark.parametrize(
    ("name", "sizes", "moved_bytes"),
    [
        ("layernorm", {"B": 2, "T": 3, "C": 5, "itemsize": 4}, 240),
        ("rmsnorm", {"M": 3, "C": 5, "itemsize": 2}, 2 * (15 + 15 + 5)),
        ("trimat", {"B": 2, "T": 7, "NH": 3, "HS": 4}, 4 * 2 * 3 * (28 + 2 * 7 * 4)),
    ],
)
def test_traffic(name: str, sizes: dict[str, int], moved_bytes: int) -> None:
    assert find(name).workload.traffic(sizes) == moved_bytes


def test_sizes_from_a_text() -> None:
    trimat = find("trimat")
    assert parse_sizes(trimat, None) == dict(trimat.workload.sizes)
    assert parse_sizes(trimat, "B=1,T=129") == {**trimat.workload.sizes, "B": 1, "T": 129}
    assert parse_sizes(trimat, " B=1, T = 129") == {**trimat.workload.sizes, "B": 1, "T": 129}


def test_the_list_names_every_variant() -> None:
    text, as_json = printed("kernels"), printed("kernels", "--json")
    for operation in OPERATIONS.values():
        names = {name for variant in operation.variants for name in variant.kernels}
        assert f" {operation.name} " in text.replace("\n", " ")
        assert all(name in as_json for name in (operation.name, *names))
    listed = gpt2block("kernels", "--json").json
    assert [entry["operation"] for entry in listed] == list(OPERATIONS)


def measured(
    operation: Operation,
    *variants: str,
    sizes: Mapping[str, int] | None = None,
    dtype: str | None = None,
    **options: Any,
) -> tuple[list[Measurement], list[str]]:
    """Measure some variants, by default all, on the emulator: see the fixture `emulated`."""
    chosen = [operation.variant(name) for name in variants] or operation.variants
    stored = workload.check_storage(operation, dtype)
    return measure_variants(operation, chosen, sizes or small(operation), BEST, stored, **options)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("name", "variant", "dtype"),
    [("layernorm", "6", "bfloat16"), ("trimat", "naive", "float32")],
)
def test_measuring(name: str, variant: str, dtype: str) -> None:
    operation = find(name)
    ((row,), skipped) = measured(operation, variant, dtype=dtype)
    assert skipped == []
    assert (row.variant, row.dtype, row.right) == (variant, dtype, True)
    counted = counted_sizes(small(operation), dtype)
    assert row.gpu_us == 500.0  # 1 ms for two copies, one round
    if row.unit == "GB/s":
        assert row.rate == pytest.approx(operation.workload.traffic(counted) / 500e-6 / 1e9)
        assert row.percent == pytest.approx(row.rate / 40)
    else:
        assert row.rate == pytest.approx(operation.workload.flops(counted) / 500e-6 / 1e12)
        assert row.percent == pytest.approx(100 * row.rate / 50)


@pytest.mark.usefixtures("emulated")
def test_a_sweep_measures_every_block() -> None:
    rows, _ = measured(find("layernorm"), "1", "decode", sweep=True)
    assert [row.block for row in rows] == [32, 64, 128, 256, 512, 1024, None]


@pytest.mark.usefixtures("emulated")
def test_a_wrong_variant_shows_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    softmax, run = find("softmax"), Bound.run

    def off_by_one(bound: Bound) -> Any:
        out = run(bound)
        if bound.launches[0].name in softmax.variant("rows").kernels:
            out.set(out.get() + 1)
        return out

    monkeypatch.setattr(Bound, "run", off_by_one)
    rows, _ = measured(softmax, "rows", "three_pass")
    assert rows[0].max_abs == pytest.approx(1, rel=1e-5)
    assert rows[1].max_abs < 1e-6
    assert [row.right for row in rows] == [False, True]
    assert not replace(rows[1], max_rel=float("nan")).right


def test_the_storage_of_an_operation() -> None:
    check = workload.check_storage
    assert check(find("rmsnorm_ffn")) == ("float16", "NK")
    assert check(find("rmsnorm_ffn"), "float8_e5m2", "KN") == ("float8_e5m2", "KN")


def test_a_series_shows_where_the_fastest_changes() -> None:
    operation = find("rmsnorm_matmul")
    sizes = all_sizes(operation)
    assert [size["M"] for size in sizes] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    one = Measurement("rmsnorm_matmul", "", None, {}, 1.0, 1.0, 9.0, "GB/s", 50.0, 0.0, 0.0)
    series = [
        [
            replace(one, variant="matvec", sizes=at, gpu_us=2.0 * at["M"]),
            replace(one, variant="mma", sizes=at, gpu_us=9.0, max_rel=float(at["M"] == 8)),
        ]
        for at in sizes[:4]
    ]
    skipped = ["mma: takes float16"] * 2
    console = Console(width=120)
    with console.capture() as captured:
        print_series(console, operation, series, skipped, BEST)
    printed = captured.get()
    assert "from M = 8 on, mma is faster than matvec" in printed
    assert printed.count("WRONG") == 1
    assert printed.count("not run: mma: takes float16") == 1
    assert printed.count("    ok ") == 3


@pytest.mark.usefixtures("emulated")
def test_a_variant_that_cannot_run_is_told_and_the_others_run() -> None:
    trimat, sizes = find("trimat"), {"B": 1, "T": 3, "NH": 1, "HS": 132}
    why = "tri6: trimat variant tri6: takes heads of up to 128 channels, got 132"
    rows, (skipped,) = measured(trimat, "naive", "tri6", sizes=sizes)
    assert [row.variant for row in rows] == ["naive"]
    assert skipped.startswith(why)
    with pytest.raises(InputError, match=f"trimat: {why}"):
        measured(trimat, "tri6", sizes=sizes)


@pytest.mark.usefixtures("emulated")
def test_the_command_measures_on_the_emulator() -> None:
    ended = gpt2block("kernels", "softmax", "--shape", "B=1,NH=1,T=5", "--json")
    assert ended.code == 0
    found = ended.json
    assert found["ceilings"] == {"copy_gb_s": 4000.0, "fp32_tflop_s": 50.0, "fp16_tflop_s": 700.0}
    assert found["skipped"] == []
    softmax = find("softmax")
    assert [row["variant"] for row in found["rows"]] == [v.name for v in softmax.variants]
    for row in found["rows"]:
        assert list(row) == [field.name for field in fields(Measurement)]
        assert row["sizes"] == {"B": 1, "NH": 1, "T": 5}
        assert row["gpu_us"] == 500.0  # 1 ms for two copies, one round
        assert row["call_us"] > 0
        assert row["rate"] == pytest.approx(softmax.workload.traffic(row["sizes"]) / 500e-6 / 1e9)
        assert row["percent"] == pytest.approx(row["rate"] / 40)
        assert 0 < row["max_rel"] < tolerance("float32")
        assert row["peers"] == {}


@pytest.mark.usefixtures("emulated")
def test_other_libraries_are_timed_on_the_same_copies() -> None:
    softmax, copies = find("softmax"), []

    def peers(inputs: Any) -> list[Contender]:
        copies.append(len(inputs))
        return [Contender("other", lambda rounds: Captured(lambda: None, ()), "float32")]

    rows, _ = measured(softmax, softmax.variants[0].name, peers=peers)
    assert [row.peers for row in rows] == [{"other": 500.0}]
    assert copies == [2]


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("written", [0, 1])
def test_an_output_that_is_not_written_is_wrong(
    written: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variants share their outputs, in which the result of an earlier variant must not count."""
    runs, run = itertools.count(), Bound.run
    monkeypatch.setattr(
        Bound, "run", lambda bound: run(bound) if next(runs) < written else bound.out
    )
    rows, _ = measured(find("softmax"))
    assert [row.right for row in rows] == [n < written for n in range(4)]


def test_a_capture_that_fails_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise later work of the process could be refused."""
    runs: list[bool] = []

    def run() -> None:
        runs.append(stream.is_capturing())
        if runs[-1]:
            raise ZeroDivisionError

    with emulator.emulated() as device:
        stream = device.cuda.Stream()
        monkeypatch.setattr(device.cuda, "Stream", lambda **_: stream)
        with pytest.raises(ZeroDivisionError):
            timing.captured([SimpleNamespace(run=run)])
        assert runs == [False, True]
        assert not stream.is_capturing()


@pytest.mark.gpu
@every_operation
def test_every_variant_is_right_and_timed(operation: Operation) -> None:
    sizes = {**small(operation), "C": 48} if "C" in operation.workload.sizes else small(operation)
    dtype = workload.check_storage(operation)[0]
    chosen = [
        v.name for v in operation.variants if dtype in (v.dtypes or operation.workload.dtypes)
    ]
    rows, skipped = measured(operation, *chosen, sizes=sizes)
    terms = ["wgmma"] if operation.name == "linear" else []  # takes terms, not floats
    assert [message.partition(":")[0] for message in skipped] == terms
    assert [row.variant for row in rows] == [name for name in chosen if name not in terms]
    for row in rows:
        assert row.right
        assert row.gpu_us > 0
        assert row.call_us is not None
        assert row.call_us > 0

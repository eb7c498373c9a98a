"""The registry of operations: completeness, consistency, and its use in the command and docs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from gpt2block import InputError, emulator, reference
from gpt2block.apps.cli.kernels import print_series
from gpt2block.cuda import doctor, kernels, timing
from gpt2block.cuda.arrays import Bound
from gpt2block.ops import workload
from gpt2block.ops.bench import variants
from gpt2block.ops.bench.race import Captured, Contender
from gpt2block.ops.bench.variants import Measurement, measure_variants
from gpt2block.ops.call import UncheckedCall
from gpt2block.ops.registry import OPERATIONS, Operation, all_sizes, find, parse_sizes
from gpt2block.ops.workload import counted_sizes, inputs_and_truth, tolerance
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


def test_an_unknown_operation_or_variant_lists_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"'norm' \(did you mean rmsnorm\?\): expected one of lay"):
        find("norm")
    with pytest.raises(InputError, match="unknown variant '9': expected one of naive, registers"):
        find("trimat").variant("9")


def test_sizes_from_a_text() -> None:
    trimat = find("trimat")
    assert parse_sizes(trimat, None) == dict(trimat.workload.sizes)
    assert parse_sizes(trimat, "B=1,T=129") == {**trimat.workload.sizes, "B": 1, "T": 129}
    assert parse_sizes(trimat, " B=1, T = 129") == {**trimat.workload.sizes, "B": 1, "T": 129}
    for text in ("", "B", "B=1,", "B;1"):
        with pytest.raises(InputError, match="expected sizes such as B=8,T=1024,NH=12,HS=64"):
            parse_sizes(trimat, text)
    for value in ("0", "-1", "x", "1;T=2", "1.5", "²", "01", ""):
        with pytest.raises(InputError, match=rf"shape 'B={value}': B: expected an integer from 1"):
            parse_sizes(trimat, f"T=2,B={value}")
    with pytest.raises(InputError, match="shape 'Q=1': trimat has no size Q: expected B, T, NH, H"):
        parse_sizes(trimat, "B=1,Q=1")
    with pytest.raises(InputError, match="shape 'B=2': B: stated twice"):
        parse_sizes(trimat, "B=1,B=2")


@pytest.mark.gpu
def test_an_output_that_is_not_written_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = {"count": 0}
    run = Bound.run

    def only_the_first(bound: Bound) -> Any:
        runs["count"] += 1
        return run(bound) if runs["count"] == 1 else bound.out

    monkeypatch.setattr(Bound, "run", only_the_first)
    operation = find("softmax")
    stored = workload.check_storage(operation)
    sizes = small(operation)
    rows, _ = measure_variants(operation, operation.variants, sizes, BEST, stored)
    assert [row.right for row in rows] == [True, False, False, False]


def test_the_list_names_every_variant() -> None:
    text, as_json = printed("kernels"), printed("kernels", "--json")
    for operation in OPERATIONS.values():
        names = {name for variant in operation.variants for name in variant.kernels}
        assert f" {operation.name} " in text.replace("\n", " ")
        assert all(name in as_json for name in (operation.name, *names))
    listed = gpt2block("kernels", "--json").json
    assert [entry["operation"] for entry in listed] == list(OPERATIONS)


def test_sizes_that_make_no_sense_together_are_refused() -> None:
    with pytest.raises(InputError, match="attention cannot run at B=1, T=5, C=50: "):
        inputs_and_truth(find("attention"), {"B": 1, "T": 5, "C": 50})


class StandIn:
    """A substitute for `gpt2block.ops` that computes with the reference, without a GPU."""

    def __init__(self, operation: Operation, refused: str, wrong: str) -> None:
        self.operation, self.refused, self.wrong = operation, refused, wrong
        self.outs: list[object] = []
        setattr(self, operation.name, lambda *arrays, **options: None)

    def prepare(self, asked: UncheckedCall) -> Any:
        arrays, out = asked.inputs, asked.out
        name = asked.options.get("variant") or self.operation.variants[0].name
        block = asked.options.get("block")
        options = {attr: asked.options[attr] for attr in self.operation.workload.attrs}
        if name == self.refused:
            raise InputError(f"variant {name} does not take this")
        self.outs.append(out)
        result = getattr(reference, self.operation.name)(*arrays, **options)
        host = result + 1 if name == self.wrong else result
        shared = host if out is None else out
        return SimpleNamespace(out=shared, launches=(name, block), run=lambda: host)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Let `measure_variants` run without a GPU: a replay takes 2 ms, a call 3 µs on the host."""
    monkeypatch.setattr(doctor, "require_cuda", lambda what: None)
    monkeypatch.setattr(variants, "input_copies", lambda host, traffic: [host, host])
    monkeypatch.setattr(variants, "rounds_for", lambda copies, traffic: 5)
    monkeypatch.setattr(timing, "captured", lambda launches: lambda: None)
    monkeypatch.setattr(workload, "poison", lambda out, inputs: None)
    monkeypatch.setattr(timing, "interleaved_ms", lambda replays: dict.fromkeys(replays, 2.0))
    monkeypatch.setattr(timing, "call_times", lambda call: (0.0, 3.0))

    def run(
        operation: Operation,
        refused: str = "",
        wrong: str = "",
        dtype: str = "float32",
        **options: Any,
    ) -> Any:
        stand_in = StandIn(operation, refused, wrong)
        monkeypatch.setattr(variants, "ops", stand_in)
        sizes = small(operation)
        found = measure_variants(
            replace(operation, prepare=stand_in.prepare),
            operation.variants,
            sizes,
            BEST,
            (dtype, operation.workload.layout),
            **options,
        )
        return found, stand_in

    return run


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "float32") for name in ("layernorm", "trimat", "layernorm_gelu", "softmax")),
        *(("layernorm", dtype) for dtype in ("float16", "bfloat16")),
    ],
)
def test_measuring(measured: Callable[..., Any], name: str, dtype: str) -> None:
    operation = find(name)
    (rows, skipped), stand_in = measured(operation, dtype=dtype)
    assert skipped == []
    assert [row.variant for row in rows] == [variant.name for variant in operation.variants]
    counted = counted_sizes(small(operation), dtype)
    traffic, flops = operation.workload.traffic(counted), operation.workload.flops(counted)
    for row in rows:
        assert row.gpu_us == pytest.approx(200.0)  # 2 ms for two sets and five rounds
        assert row.call_us == 3.0
        rate = traffic / 200e-6 / 1e9 if row.unit == "GB/s" else flops / 200e-6 / 1e12
        assert row.rate == pytest.approx(rate)
        ceiling = 4000.0 if row.unit == "GB/s" else 50.0
        assert row.percent == pytest.approx(100 * rate / ceiling)
        assert row.dtype == dtype
        assert row.right
    first = len(operation.variants) * 2
    assert stand_in.outs[:2] == [None, None]  # all later variants reuse its outputs
    assert all(out is not None for out in stand_in.outs[2:first])


def test_a_sweep_measures_every_block(measured: Callable[..., Any]) -> None:
    (rows, _), _ = measured(find("layernorm"), sweep=True)
    assert [row.block for row in rows[:6]] == [32, 64, 128, 256, 512, 1024]
    assert [row.block for row in rows[6 * 6 :]] == [None, None]  # narrow and decode have no block


def test_a_wrong_variant_shows_its_error(measured: Callable[..., Any]) -> None:
    (rows, _), _ = measured(find("softmax"), wrong="rows")
    error = {row.variant: row.max_abs for row in rows}
    assert error["rows"] == pytest.approx(1, rel=1e-5)
    assert error["three_pass"] < 1e-6
    assert [row.variant for row in rows if not row.right] == ["rows"]
    assert not replace(rows[0], max_rel=float("nan")).right


def test_a_storage_that_an_operation_has_not_is_refused() -> None:
    check = workload.check_storage
    for name, dtype, layout, said in (
        ("trimat", "float16", None, "dtype 'float16': expected one of float32"),
        ("trimat", None, "NK", "layout 'NK': it has no weights"),
        ("rmsnorm_ffn", None, "nk", "layout 'nk': expected one of KN, NK"),
    ):
        with pytest.raises(InputError, match=f"{name}: {said}"):
            check(find(name), dtype, layout)
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


def test_a_variant_that_cannot_run_is_told_and_the_others_run(measured: Callable[..., Any]) -> None:
    why = "rows, block 256: variant rows does not take this"
    softmax = find("softmax")
    (rows, skipped), _ = measured(softmax, refused="rows")
    assert [row.variant for row in rows] == [v.name for v in softmax.variants if v.name != "rows"]
    assert skipped == [why]
    with pytest.raises(InputError, match=f"softmax: {why}"):
        measured(replace(softmax, variants=(softmax.variant("rows"),)), refused="rows")


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

    stored = workload.check_storage(softmax)
    rows, _ = measure_variants(
        softmax, softmax.variants[:1], small(softmax), BEST, stored, peers=peers
    )
    assert [row.peers for row in rows] == [{"other": 500.0}]
    assert copies == [2]


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("name", ["to_fp8", "trimat", "sample_token", "rmsnorm_ffn", "gelu"])
def test_results_are_checked_on_the_emulator(name: str) -> None:
    """Results are bytes, partly undefined, with a state, of weights, or computed in place."""
    operation = find(name)
    stored = workload.check_storage(operation)
    rows, _ = measure_variants(operation, operation.variants[:1], small(operation), BEST, stored)
    assert [row.right for row in rows] == [True]


@pytest.mark.usefixtures("emulated")
def test_an_output_that_is_never_written_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bound, "run", lambda bound: bound.out)
    operation = find("softmax")
    stored = workload.check_storage(operation)
    rows, _ = measure_variants(operation, operation.variants, small(operation), BEST, stored)
    assert not any(row.right for row in rows)


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
    stored = workload.check_storage(operation)
    chosen = [v for v in operation.variants if stored[0] in (v.dtypes or operation.workload.dtypes)]
    rows, skipped = measure_variants(operation, chosen, sizes, BEST, stored)
    terms = ["wgmma"] if operation.name == "linear" else []  # takes terms, not floats
    assert [message.partition(":")[0] for message in skipped] == terms
    assert [row.variant for row in rows] == [v.name for v in chosen if v.name not in terms]
    for row in rows:
        assert row.right
        assert row.gpu_us > 0
        assert row.call_us is not None
        assert row.call_us > 0

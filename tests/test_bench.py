"""The bench: what a figure means, what a wrong result is worth, what is printed and drawn."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import isnan, nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from rich.console import Console

from gpt2block import Block, InputError, bench, cli, doctor
from gpt2block.bench import (
    AttentionWork,
    BlockWork,
    Ceilings,
    GemmWork,
    Report,
    Row,
    Work,
    chosen_works,
    contenders,
    measure,
    torch_peers,
)
from gpt2block.bench import report as reports
from gpt2block.bench.contenders import Contender, Run
from gpt2block.bench.measure import copies_for, errors
from gpt2block.bench.race import Timed, rounds_for
from gpt2block.bench.roofline import Mark, ceiling, draw, marks, spread
from gpt2block.bench.works import PRODUCTS, ROWS, ArrayWork
from gpt2block.cli.bench import print_report
from gpt2block.cuda import timing
from gpt2block.errors import KernelError
from gpt2block.weights.matrix import WeightMatrix

BEST = Ceilings(4000.0, {"float32": 50.0, "tf32": 400.0, "float16": 700.0, "bfloat16": 800.0})
O = GemmWork("bfloat16", "o", 600, 768, 768)  # noqa: E741
every_product = pytest.mark.parametrize("name", PRODUCTS)


# What there is to do


def test_operations_and_bytes() -> None:
    assert O.flops == 2 * 600 * 768 * 768
    assert O.traffic == 2 * (600 * 768 + 768 * 768 + 600 * 768) + 4 * 768
    with_residual = replace(O, residual=True)
    assert with_residual.traffic - O.traffic == 2 * 600 * 768
    full, causal = (AttentionWork("bfloat16", 2, 4, mask) for mask in (False, True))
    assert full.flops == 2 * 12 * (16 * 2 * 64 * 2)  # sequences, heads, scores and their use
    assert causal.flops == 2 * 12 * (10 * 2 * 64 * 2)
    assert full.traffic == 2 * 4 * (2 * 4 * 768)
    block = BlockWork("float32", 2, 4, True)
    products = sum(2 * 8 * N * K for N, K, *_ in (PRODUCTS[n] for n in ("qkv", "o", "fc", "proj")))
    assert block.flops == products + causal.flops
    assert block.traffic == 4 * (2 * 8 * 768) + 4 * 7_087_872


def test_the_works_and_their_order() -> None:
    works = chosen_works()
    assert [work.what for work in works] == ["block"] * 10 + ["gemm"] * 24 + ["attention"] * 8
    assert [work.dtype for work in works[:10]] == ["bfloat16"] * 5 + ["float32"] * 5
    names = [work.name for work in works]
    assert names[:5] == ["1x128 full", "1x1024 full", "1x1024 causal", "8x1024 causal",
                         "64x1024 causal"]  # fmt: skip
    assert names[10:12] == ["qkv M=128", "o M=128"]
    assert (
        len(set(zip((w.what for w in works), (w.dtype for w in works), names, strict=True))) == 42
    )
    some = chosen_works("gemm", "float16", "proj")
    assert {work.dtype for work in some} == {"float16"}
    assert len(some) == 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"what": "mlp"}, "--what: expected one of block, gemm, attention, all, got 'mlp'"),
        ({"dtype": "int8"}, "--dtype: expected one of bfloat16, float16, float32, got 'int8'"),
        ({"only": "9x9"}, "--only '9x9': no name contains it"),
    ],
)
def test_works_that_there_are_not(arguments: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message.replace("*", ".")):
        chosen_works(**arguments)


@every_product
def test_the_truth_of_a_product_covers_every_row(name: str) -> None:
    work = GemmWork("float16", name, ROWS + 91, *PRODUCTS[name])
    host, truth = work.host(), work.truth()
    assert tuple(host)[:3] == ("a", "w", "bias")
    assert ("residual" in host) == work.residual
    assert isinstance(host["w"], WeightMatrix)
    assert host["w"].layout == "NK"
    row = ROWS + 90
    assert (host["a"][row] == host["a"][90]).all()
    out = host["a"][row].astype(np.float64) @ host["w"].dequantized().astype(np.float64)
    out += host["bias"]
    if work.gelu:
        out = 0.5 * out * (1 + np.tanh(np.sqrt(2 / np.pi) * (out + 0.044715 * out**3)))
    if work.residual:
        out += host["residual"][row]
    np.testing.assert_allclose(out, truth[90], rtol=1e-12, atol=1e-12)


def test_the_truth_of_a_block_is_a_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpt2block.bench.works.TOKENS", 21)
    work = BlockWork("float32", 5, 7, True)
    x = work.host()["x"]
    assert (x[4] == x[1]).all()
    out = Block(work.weights(), causal=True, device="cpu")(x)
    assert errors(out, work.truth())[1] <= reports.tolerance(work, "float32")
    other = Block(work.weights(), causal=False, device="cpu")(x)
    assert errors(other, work.truth())[1] > 0.01


def test_the_truth_of_attention_repeats_its_sequences() -> None:
    work = AttentionWork("bfloat16", 200, 16, False)
    qkv = work.host()["qkv"].astype(np.float64)
    assert (qkv[192] == qkv[0]).all()
    assert (qkv[193] != qkv[0]).any()
    q, k, v = qkv[193].reshape(16, 3, 12, 64).transpose(1, 2, 0, 3)
    p = np.exp(q @ k.swapaxes(1, 2) / 8)
    out = (p / p.sum(-1, keepdims=True) @ v).swapaxes(0, 1).reshape(16, 768)
    np.testing.assert_allclose(out, work.truth()[16:32], rtol=1e-9, atol=1e-12)


# Errors


def test_errors_are_those_of_the_worst_row() -> None:
    truth = np.arange(12.0).reshape(3, 4) - 5
    out = np.resize(truth, (8, 4)).astype(np.float32)
    assert errors(out, truth) == (0, 0)
    out[7, 2] += 0.5
    assert errors(out.reshape(2, 4, 4), truth) == (0.5, 0.5 / 6)
    out[4, 1] = nan
    assert all(map(isnan, errors(out, truth)))
    out[4, 1] = np.inf
    assert all(map(isnan, errors(out, truth)))


def test_bfloat16_is_widened_exactly() -> None:
    bits = np.arange(0x7F80, dtype=np.uint16)
    values = np.concatenate([bits, bits | 0x8000]).view(ml_dtypes.bfloat16)
    truth = values.astype(np.float64)[:, None]
    assert errors(values, truth) == (0, 0)
    assert errors(values[:, None][::-1], truth[::-1]) == (0, 0)


def test_tf32_is_right_as_far_as_it_is() -> None:
    work = replace(O, dtype="float32")
    assert 4e-4 < reports.tolerance(work, "tf32") < 2e-3
    assert reports.tolerance(work, "float32") < 2e-5
    block = BlockWork("bfloat16", 1, 128, True)
    assert reports.tolerance(block, "bfloat16") == 7 * measure.tolerance("bfloat16")


# A race with stand-ins


class Clock:
    """Stands for the GPU's time: a replay takes what its name says, in ms."""

    def __init__(self, ms: Mapping[str, float]) -> None:
        self.ms = ms
        self.turns: list[list[str]] = []

    def __call__(
        self, replays: Mapping[str, Callable[[], None]], count: int = 7
    ) -> dict[str, float]:
        for replay in replays.values():
            replay()
        if list(replays) == [""]:
            return {"": 0.7}
        self.turns.append(list(replays))
        return {name: self.ms[name] for name in replays}


class Racer:
    """A contender on the host, with a result that is off by so much."""

    def __init__(self, name: str, peer: bool = False, off: float = 0.0, **options: Any) -> None:
        self.name, self.peer, self.off = name, peer, off
        self.error: Exception | None = options.get("error")
        self.arithmetic = options.get("arithmetic", "bfloat16")
        self.rounds: list[int] = []

    def enters(self, work: ArrayWork) -> Contender:
        truth = work.truth()
        self.result = np.resize(truth, (600, truth.shape[1])) + self.off
        return Contender(self.name, self.peer, self.capture, self.arithmetic, lambda: "as it is")

    def capture(self, rounds: int) -> Run:
        if self.error:
            raise self.error
        self.rounds.append(rounds)
        out = np.zeros_like(self.result)

        def replay() -> None:
            out[...] = self.result

        return Run(replay, (out, out))


@pytest.fixture
def run_race(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    def poison(out: NDArray[Any]) -> None:
        out[...] = nan

    monkeypatch.setattr(measure, "poison", poison)

    def run(*racers: Racer, ms: Mapping[str, float] | None = None) -> Any:
        clock = Clock(ms or {racer.name: 3.0 for racer in racers})
        monkeypatch.setattr(timing, "interleaved_ms", clock)
        entrants = [racer.enters(O) for racer in racers]
        rows, skipped = reports.rows_of(O, entrants, 10, BEST)
        return rows, skipped, clock

    return run


def test_what_a_row_says(run_race: Callable[..., Any]) -> None:
    ours, theirs = Racer("hopper"), Racer("torch", peer=True)
    rows, skipped, clock = run_race(ours, theirs, ms={"hopper": 1.0, "torch": 1.5})
    assert skipped == []
    assert clock.turns == [["hopper", "torch"]]
    assert ours.rounds == theirs.rounds == [1, 5]  # 0.7 ms once, 3 ms wanted
    first, second = rows
    assert first.us == pytest.approx(20.0)  # 1 ms, ten copies, five rounds
    assert first.tflop_s == pytest.approx(O.flops / 20e-6 / 1e12)
    assert first.gb_s == pytest.approx(O.traffic / 20e-6 / 1e9)
    assert first.percent_matmul == pytest.approx(100 * first.tflop_s / 800)
    assert first.percent_copy == pytest.approx(100 * first.gb_s / 4000)
    assert first.intensity == pytest.approx(first.tflop_s * 1e3 / first.gb_s)
    assert first.peers == {"torch": pytest.approx(1.5)}
    assert first.right
    assert second.right
    assert second.peers == {}
    assert first.sizes == {"M": 600, "N": 768, "K": 768}
    assert (first.note, first.copies, first.arithmetic) == ("as it is", 10, "bfloat16")


def test_a_wrong_result_counts_for_nothing(run_race: Callable[..., Any]) -> None:
    rows, _, _ = run_race(Racer("a", off=1.0), Racer("b"), Racer("p", peer=True, off=1.0),
                          Racer("q", peer=True))  # fmt: skip
    assert [row.right for row in rows] == [False, True, False, True]
    assert rows[0].peers == {}
    assert rows[1].peers == {"q": 1.0}
    report = Report({}, BEST, rows, [])
    assert not report.right
    assert Report({}, BEST, rows[1:], []).right  # a peer's error is not ours
    rows, _, _ = run_race(Racer("a", off=nan))
    assert not rows[0].right


def test_what_is_not_written_shows(run_race: Callable[..., Any]) -> None:
    racer = Racer("lazy")
    honest = racer.capture
    racer.capture = lambda rounds: honest(rounds)._replace(replay=lambda: None)  # type: ignore[method-assign]
    rows, _, _ = run_race(racer)
    assert isnan(rows[0].max_rel)
    assert not rows[0].right


def test_who_cannot_run_is_told_with_the_reason(run_race: Callable[..., Any]) -> None:
    refusals = InputError("takes float32"), KernelError("needs Hopper"), MemoryError("none left")
    racers = [Racer(f"r{i}", error=error) for i, error in enumerate(refusals)]
    peer = Racer("torch", peer=True, error=AttributeError("no such backend\nmore of it"))
    rows, skipped, _ = run_race(*racers, peer, Racer("ours"))
    assert [row.contender for row in rows] == ["ours"]
    assert skipped == [
        "gemm bfloat16: r0: takes float32",
        "gemm bfloat16: r1: needs Hopper",
        "gemm bfloat16: r2: none left",
        "gemm bfloat16: torch: no such backend",
    ]


def test_a_fault_of_ours_is_no_refusal(run_race: Callable[..., Any]) -> None:
    with pytest.raises(RuntimeError, match="illegal memory access"):
        run_race(Racer("ours", error=RuntimeError("an illegal memory access")))


def test_nobody_can_run(run_race: Callable[..., Any]) -> None:
    assert run_race(Racer("a", error=InputError("no")))[:2] == ([], ["gemm bfloat16: a: no"])


def test_how_many_copies_and_rounds() -> None:
    assert copies_for(traffic=10, cache=100) == 40
    assert copies_for(traffic=1000, cache=100) == 1
    assert copies_for(traffic=1, cache=100) == measure.MOST_SETS
    assert rounds_for(0.5, 10) == 6
    assert rounds_for(10.0, 10) == 1
    assert rounds_for(0.0, 10) == 200
    assert rounds_for(0.0, 10_000) == 1


def test_the_drivers_version(tmp_path: Path) -> None:
    file = tmp_path / "version"
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23\n")
    assert reports._driver(file) == "580.95.05"
    assert reports._driver(tmp_path / "none") == "unknown"


# Ours and theirs


def test_the_default_variant_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy", reason="the ops need CuPy")
    variants = [
        SimpleNamespace(name=name, kernels=(f"gemm_{name}",), dtypes=dtypes)
        for name, dtypes in (
            ("mma", ("bfloat16",)),
            ("hopper", ()),
            ("old", ()),
            ("fp32", ("float32",)),
        )
    ]
    bound: list[tuple[Any, ...]] = []

    def bind(
        inputs: Any, out: Any = None, *, gelu: bool, split_k: bool, variant: str | None = None
    ) -> Any:
        assert split_k
        if variant == "old":
            raise InputError("old takes float32")
        bound.append((inputs, out, gelu, variant))
        launch = SimpleNamespace(name=f"gemm_{variant or 'hopper'}")
        return SimpleNamespace(out=out or object(), launches=(launch,))

    operation = SimpleNamespace(variants=variants, bind=bind)
    monkeypatch.setattr(contenders, "OPERATIONS", {"gemm": operation})
    captured: list[list[Any]] = []
    monkeypatch.setattr(timing, "captured", captured.append)
    monkeypatch.setattr("gpt2block.cuda.overlap.possible", lambda: False)
    sets = [{"a": f"a{i}", "w": "w", "bias": "b"} for i in range(3)]
    found = list(contenders.contenders(replace(O, gelu=True), sets, 0))
    assert [each.name for each in found] == ["hopper", "mma", "old"]
    assert not any(each.peer for each in found)
    first, second = found[0].capture(2), found[1].capture(1)
    assert [len(launches) for launches in captured] == [6, 3]
    assert [out for _, out, *_ in bound[1:4]] == [None] * 3
    assert [out for _, out, *_ in bound[4:]] == [first.outs[0], bound[5][1], first.outs[1]]
    assert second.outs == first.outs
    assert all(gelu for _, _, gelu, _ in bound)
    with pytest.raises(InputError, match="old takes float32"):
        found[2].capture(1)


def test_an_operation_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy", reason="the ops need CuPy")
    monkeypatch.setattr(contenders, "OPERATIONS", {})
    (only,) = contenders.contenders(O, [{"a": 1}], 0)
    with pytest.raises(InputError, match="there is no operation gemm"):
        only.capture(1)


def on_host(array: Any) -> Any:
    """As `torch_peers.tensor`, from NumPy."""
    import torch  # noqa: PLC0415

    if isinstance(array, WeightMatrix):
        return on_host(array.data).T
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.ascontiguousarray(array))


@pytest.mark.parametrize(
    "work",
    [
        *(GemmWork("bfloat16", name, 40, *of_it) for name, of_it in PRODUCTS.items()),
        BlockWork("float32", 2, 6, True),
        BlockWork("bfloat16", 1, 6, False),
        AttentionWork("float32", 2, 6, True),
        AttentionWork("float32", 1, 6, False),
    ],
    ids=lambda work: f"{work.what} {work.name} {work.dtype}",
)
def test_pytorch_computes_the_same(work: ArrayWork, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="compares with PyTorch")
    monkeypatch.setattr(torch_peers, "BACKENDS", {"math": "MATH"})
    monkeypatch.setattr("gpt2block.bench.works.TOKENS", 18)
    arguments = torch_peers.arguments_of(work, work.host(), on_host)
    for function in torch_peers.functions_for(work).values():
        out = torch_peers.in_rows(work, function(*arguments))
        assert out.dtype == arguments[0].dtype
        found = errors(out.float().contiguous().numpy(), work.truth())
        assert found[1] <= reports.tolerance(work, work.dtype)


class Torch:
    """Enough of PyTorch to make contenders of."""

    def __init__(self) -> None:
        self.cuda = SimpleNamespace(set_device=lambda index: None)


def named(monkeypatch: pytest.MonkeyPatch, work: Work) -> list[tuple[str, str]]:
    monkeypatch.setattr(torch_peers, "required_torch", Torch)
    monkeypatch.setattr(torch_peers, "arguments_of", lambda work, arrays: ())
    found = torch_peers.TorchPeers(0).contenders(work, [{}])
    return [(each.name, each.arithmetic) for each in found]


def test_the_peers_of_each_work(monkeypatch: pytest.MonkeyPatch) -> None:
    name = partial(named, monkeypatch)
    assert name(BlockWork("bfloat16", 1, 128, True)) == [
        ("torch", "bfloat16"),
        ("torch.compile", "bfloat16"),
    ]
    assert name(BlockWork("float32", 1, 128, True)) == [
        ("torch", "float32"),
        ("torch.compile", "float32"),
        ("torch, TF32", "tf32"),
        ("torch.compile, TF32", "tf32"),
    ]
    assert name(O) == [("torch", "bfloat16")]
    assert [n for n, _ in name(replace(O, gelu=True))] == [
        "torch",
        "torch, cuBLASLt's GELU",
        "torch.compile",
    ]
    assert [n for n, _ in name(replace(O, residual=True))] == ["torch", "torch.compile"]
    assert [n for n, _ in name(AttentionWork("float32", 1, 16, True))] == [
        "torch, flash",
        "torch, cuDNN",
        "torch, efficient",
    ]


def test_the_search_for_products_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled is compiled once, with a search as long as there is time for one."""
    monkeypatch.setattr(torch_peers, "required_torch", Torch)
    monkeypatch.setattr(torch_peers, "arguments_of", lambda work, arrays: ())
    searches: list[bool] = []

    def compiled(self: Any, function: Any, search: bool) -> Any:
        searches.append(search)
        return function

    monkeypatch.setattr(torch_peers.TorchPeers, "compiled", compiled)
    monkeypatch.setattr(torch_peers, "_capture", lambda *arguments: Run(lambda: None, ()))
    seconds = iter(range(0, 1000, 70))
    monkeypatch.setattr(torch_peers, "perf_counter", lambda: next(seconds))
    torch = torch_peers.TorchPeers(0)
    notes = []
    for work in (*[BlockWork("bfloat16", 1, T, True) for T in (1, 2, 3)], replace(O, gelu=True)):
        contender = list(torch.contenders(work, [{}]))[-1]
        contender.capture(1)
        contender.capture(5)
        notes.append(contender.note())
    assert searches == [True, True, False, False]
    assert notes[1] == "max-autotune-no-cudagraphs"
    assert notes[2] == "products by cuBLAS, the rest tuned"


# What is shown


def row(contender: str, peer: bool = False, us: float = 2.0, **changes: Any) -> Row:
    each = Contender(contender, peer, lambda rounds: Run(lambda: None, ()), "bfloat16")
    work = changes.pop("of", O)
    return replace(reports.row_of(work, Timed(each, us, (1e-3, 1e-3)), 3, BEST), **changes)


@pytest.fixture
def report() -> Report:
    works = chosen_works("block", "float32", "1x")
    rows = [row("hopper", peers={"torch": 1.25}), row("mma", us=3.0), row("torch", True, 2.5)]
    for work in works:
        rows.append(row("fused", of=work, right=True, us=20.0))
        rows.append(row("torch", True, of=work, right=True, us=50.0, arithmetic="float32"))
        rows.append(row("torch, TF32", True, of=work, right=True, us=30.0,
                        arithmetic="tf32", note="as it is"))  # fmt: skip
    return Report({"GPU": "a GPU", "torch": "2.11"}, BEST, rows, ["gemm bfloat16: old: takes [x]"])


def test_the_table(report: Report) -> None:
    console = Console(width=120, record=True, quiet=False)
    with console.capture() as shown:
        print_report(console, report)
    text = shown.get()
    assert "GPU a GPU, torch 2.11" in text
    assert "float32 50, tf32 400, float16 700, bfloat16 800 TFLOP/s" in text
    assert "Products with bias" in text
    assert "Attention" not in text
    lines = [line.split() for line in text.splitlines()]
    first = next(line for line in lines if line[:2] == ["o", "M=600"])
    assert first[2:4] == ["bfloat16", "hopper"]
    assert first[4] == "2.00"
    assert first[-3:] == ["1.00", "1.0e-03", "ok"]
    assert next(line for line in lines if line[:1] == ["mma"])[-3] == "1.50"
    assert next(line for line in lines if line[:2] == ["torch", "2.50"])[-3] == "1.25"
    assert "torch, TF32: as it is: float32 1x128 full, float32 1x1024 full" in text
    assert "not run: gemm bfloat16: old: takes [x]" in text


def test_a_wrong_row_says_so(report: Report) -> None:
    console = Console(width=120)
    wrong = replace(report, rows=[row("hopper", right=False), row("torch", True)])
    with console.capture() as shown:
        print_report(console, wrong)
    assert shown.get().count("WRONG") == 1
    assert " 1.00 " not in shown.get()  # and nothing is compared with it


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, report: Report) -> list[list[Work]]:
    asked: list[list[Work]] = []

    def run(works: Any, device: Any, peer: Any, progress: Any) -> Report:
        asked.append(list(progress(works)))
        return report

    monkeypatch.setattr(bench, "run", run)
    return asked


def test_json_has_everything(
    measured: list[list[Work]], report: Report, capsys: pytest.CaptureFixture[str]
) -> None:
    report.rows[0] = replace(report.rows[0], max_abs=nan, max_rel=nan, right=False)
    with pytest.raises(SystemExit) as done:
        cli.main(["bench", "--what", "attention", "--only", "4096", "--json"])
    assert done.value.code == 1  # ours was wrong
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["versions", "ceilings", "rows", "skipped"]
    assert found["ceilings"] == {"copy_gb_s": 4000.0, "tflop_s": dict(BEST.tflop_s)}
    assert [entry["contender"] for entry in found["rows"]][:3] == ["hopper", "mma", "torch"]
    assert found["rows"][0]["max_rel"] is None
    assert found["rows"][0]["peers"] == {"torch": 1.25}
    assert found["rows"][1]["sizes"] == {"M": 600, "N": 768, "K": 768}
    assert [work.name for work in measured[0]] == ["4x4096 full", "4x4096 causal"]


def test_the_command_draws(
    measured: list[list[Work]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="drawing needs matplotlib")
    file = tmp_path / "roofline.png"
    with pytest.raises(SystemExit) as done:
        cli.main(["bench", "--plot", str(file)])
    assert done.value.code == 0
    assert len(measured[0]) == 42
    assert file.read_bytes().startswith(b"\x89PNG")
    assert "x ours" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--what", "mlp"], "--what: expected one of"),
        (["--peer", "jax"], "--peer: expected torch, got 'jax'"),
        (["--plot", "no/such/place.png"], "there is no directory no/such"),
    ],
)
def test_wrong_words_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="without it --plot says that first")
    with pytest.raises(SystemExit) as done:
        cli.main(["bench", *arguments])
    assert done.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


def test_without_a_gpu_nothing_is_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "cuda_problem", lambda: "no driver today")
    with pytest.raises(SystemExit) as done:
        cli.main(["bench", "--what", "block"])
    assert done.value.code == 2
    assert "error: the bench cannot be used: no driver today" in capsys.readouterr().err


# The picture


def test_a_mark_is_of_the_fastest_right_results() -> None:
    rows = [
        row("hopper", us=2.0),
        row("mma", us=1.0, right=False),
        row("torch", True, 4.0),
        row("torch.compile", True, 2.5),
        row("torch, TF32", True, 1.6, arithmetic="tf32"),
    ]
    (mark,) = marks(rows, "gemm")
    assert mark.ours == rows[0].tflop_s
    assert mark.peer == rows[3].tflop_s
    assert mark.work == "o M=600"
    assert mark.label == f"{rows[0].tflop_s:.3g}, 1.25 x peer, 0.80 x TF32"
    assert marks(rows, "block") == []
    assert marks([replace(row("a"), right=False)], "gemm") == []
    alone = Mark("o", "bfloat16", 1.0, None, 3.0, None)
    assert alone.label == "3 (peer alone)"
    assert ceiling(alone, BEST) == pytest.approx(4.0)  # a copy of 4 TB/s, for one operation a byte
    assert ceiling(replace(alone, intensity=1e6), BEST) == BEST.tflop_s["bfloat16"]
    assert ceiling(alone, Ceilings(4000.0, {"bfloat16": nan})) == pytest.approx(4.0)


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


def test_the_picture_is_of_the_given_rows(report: Report, tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib", reason="drawing needs matplotlib")
    from matplotlib.figure import Figure  # noqa: PLC0415

    drawn: list[Any] = []
    honest = Figure.savefig

    def savefig(figure: Any, *arguments: Any, **options: Any) -> None:
        drawn.append(figure)
        honest(figure, *arguments, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(matplotlib.figure.Figure, "savefig", savefig)
        draw(report, tmp_path / "roofline.png")
    blocks, products = drawn[0].axes
    assert blocks.get_title(loc="left").startswith("Blocks")
    assert products.get_title(loc="left").startswith("Products")
    texts = [text.get_text() for text in blocks.texts]
    assert len(texts) == 3
    assert all("1.50 x TF32" in text and "2.50 x peer" in text for text in texts)
    assert [label.get_text() for label in products.get_yticklabels()] == ["o M=600"]
    rates = {
        float(line.get_xdata()[0])
        for line in products.lines
        if line.get_marker() == "o" and line.get_ydata()[0] == 0
    }
    assert rates == {report.rows[0].tflop_s, report.rows[2].tflop_s}
    assert drawn[0].get_size_inches()[0] == 8


def test_a_picture_of_nothing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="drawing needs matplotlib")
    with pytest.raises(InputError, match="there is no right result to draw"):
        draw(Report({}, BEST, [], []), tmp_path / "x.png")


# On the GPU


@pytest.mark.gpu
def test_a_small_race() -> None:
    import cupy  # noqa: PLC0415

    works: list[Work] = [
        BlockWork("bfloat16", 2, 17, True),
        BlockWork("float32", 2, 17, True),
        GemmWork("bfloat16", "fc+gelu", 600, *PRODUCTS["fc+gelu"]),
        AttentionWork("float32", 2, 17, False),
    ]
    report = bench.run(works)
    assert report.right
    assert {(row.what, row.contender) for row in report.rows} >= {
        ("block", "skeleton"),
        ("attention", "online"),
    }
    if int(cupy.cuda.Device().compute_capability) >= 80:
        assert ("block", "fused") in {(row.what, row.contender) for row in report.rows}
    for each in report.rows:
        assert each.us > 0
        assert each.max_rel > 0
    assert report.versions["GPU"]


@pytest.mark.gpu
def test_a_graph_of_pytorch_keeps_its_inputs() -> None:
    """PyTorch would give their memory to later tensors, which a replay would then read."""
    torch = pytest.importorskip("torch", reason="captures a graph of PyTorch")
    run = torch_peers.captured(lambda x: x + 1, [(torch.full((4,), 2.0, device="cuda"),)], rounds=1)
    later = [torch.zeros(4, device="cuda") for _ in range(8)]
    run.replay()
    assert run.outs[0].tolist() == [3.0] * 4
    assert not torch.stack(later).any()


@pytest.mark.gpu
def test_a_small_race_against_pytorch() -> None:
    pytest.importorskip("torch", reason="races against PyTorch")
    works: list[Work] = [
        BlockWork("float32", 1, 16, True),
        GemmWork("bfloat16", "proj+residual", 600, *PRODUCTS["proj+residual"]),
        AttentionWork("bfloat16", 2, 64, True),
    ]
    report = bench.run(works, peer="torch")
    names = {(row.what, row.contender) for row in report.rows if row.peer and row.right}
    assert names >= {("block", "torch"), ("block", "torch, TF32"), ("gemm", "torch")}
    assert ("attention", "torch, flash") in names

"""`bench --llama`: its works, the stages of fusion, and that all of them compute the same."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from gpt2block import InputError, LlamaConfig, bench, cli, emulator
from gpt2block.bench import (
    Ceilings,
    DecodeWork,
    PromptWork,
    Report,
    Work,
    llama_peers,
    measure,
    token_contenders,
    token_peers,
)
from gpt2block.bench import report as reports
from gpt2block.bench.llama_works import (
    SHAPES,
    LlamaDecodeWork,
    LlamaPromptWork,
    RandomLlama,
    Stage,
    random_tensors,
    stages_of,
)
from gpt2block.bench.measure import tolerance
from gpt2block.bench.staged_pass import StagedPass
from gpt2block.cli.bench import print_report
from gpt2block.config import model_shapes
from gpt2block.cuda import cupy
from gpt2block.emulator import loader
from gpt2block.passes.forward import Product
from gpt2block.run.model import weight_bytes
from gpt2block.run.numpy_model import NumpyModel
from tests.outlines import outline

BEST = Ceilings(4000.0, {"float32": 50.0, "tf32": 400.0, "float16": 700.0, "bfloat16": 800.0})
TINY = LlamaConfig(
    n_layer=2, n_head=2, n_kv_head=1, n_embd=64, n_ctx=16, vocab_size=56, n_ff=32, head_size=64,
    tie_word_embeddings=True,
)  # fmt: skip
STAGES = {
    "float16": ["unfused", "+ residuals", "+ RoPE", "+ graph", "+ overlap"],
    "float8_e5m2": ["unfused", "+ RMSNorm", "+ RoPE", "+ feed-forward", "+ graph"],
}


def test_bytes_of_llama_7b() -> None:
    """13.5 GB in float16, of which a step does not read wte; a token's keys take 512 KiB."""
    model = RandomLlama(SHAPES["7b"], "float16")
    wte = 2 * 32000 * 4096
    assert model.weight_bytes == weight_bytes(model.config, "float16") - wte
    assert model.token_bytes == 2 * 32 * 4096 * 2
    step = LlamaDecodeWork("float16", model, 1)
    assert step.traffic == pytest.approx(13.48e9, rel=0.01)
    assert step.flops == 2 * model.matrix_elements + 4 * 32 * 4096 * 512
    small = RandomLlama(SHAPES["1b"], "bfloat16")
    assert small.matrix_elements == pytest.approx(1.236e9, rel=0.01)
    assert small.token_bytes == 2 * 16 * 512 * 2


def test_the_works_and_their_order() -> None:
    works = bench.llama_works()
    assert [(work.what, work.dtype, work.name) for work in works] == [
        *[("decode", "float16", name) for name in ("1 row", "4 rows", "16 rows", "64 rows")],
        ("prompt", "float16", "1x512"),
        *[("decode", "float8_e5m2", name) for name in ("1 row", "4 rows", "16 rows", "64 rows")],
        *[
            ("decode", "float8_e5m2", f"{name}, kv_cache float8_e5m2")
            for name in ("1 row", "4 rows", "16 rows", "64 rows")
        ],
    ]
    assert works[0].sizes["n_kv_head"] == 32
    one = bench.llama_works(None, "1", "1b")
    assert [work.dtype for work in one] == ["bfloat16", "bfloat16", "float8_e5m2", "float8_e5m2"]
    assert [work.what for work in bench.llama_works("float32", "1", "small")] == ["decode"]


def kernels_of(dtype: str) -> list[tuple[int, set[str]]]:
    """Of each stage: the number of steps of a layer, and their operations."""
    found = []
    for stage in stages_of(dtype):
        do = outline(TINY)
        stage.run(do, TINY)
        steps = [step for step in do.steps if step.name.startswith("h.1.")]
        found.append((len(steps), {step.op for step in steps}))
    return found


def test_each_stage_has_fewer_kernels() -> None:
    """A layer of one kernel for each operation has thirteen, with the append to the kv_cache."""
    sixteen, narrow = kernels_of("float16"), kernels_of("float8_e5m2")
    assert [count for count, _ in sixteen] == [13, 11, 10, 10, 10]
    assert [count for count, _ in narrow] == [13, 9, 8, 6, 6]
    assert {"add", "kv_append", "rope_qkv"} <= sixteen[0][1]
    assert not {"add"} & sixteen[1][1]
    assert "rope_append" in sixteen[2][1]
    assert "kv_append" in narrow[1][1]
    assert {"rmsnorm_matmul", "silu_mul"} <= narrow[2][1]
    assert {"rmsnorm_matmul", "rmsnorm_ffn"} <= narrow[3][1]
    assert not {"rmsnorm", "silu_mul"} & narrow[3][1]


@pytest.fixture
def emulated() -> Iterator[None]:
    if problem := loader.missing():
        pytest.skip(problem)
    with emulator.emulated():
        yield


@pytest.mark.usefixtures("emulated")
def test_weights_are_made_in_device_memory() -> None:
    made = {name: (array, layout) for name, array, layout in random_tensors(TINY, "float16")}
    shapes = model_shapes(TINY)
    assert list(made) == list(shapes)
    for name, (array, layout) in made.items():
        wide = np.asarray(array).astype(np.float64)
        assert isinstance(array, cupy.ndarray)
        if layout is None:
            assert array.dtype == np.float32
            assert (wide.min() >= 0.8) & (wide.max() <= 1.2)
            continue
        assert array.dtype == np.float16
        assert array.shape == (shapes[name] if name == "wte" else shapes[name][::-1])
        assert wide.std() == pytest.approx(0.02, rel=0.1)
        assert len(np.unique(wide, axis=0)) == len(wide)
    assert not np.array_equal(made["h.0.w_gate"][0], made["h.1.w_gate"][0])


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """One turn of one step after the one that is checked."""
    for kind in (DecodeWork, PromptWork):
        monkeypatch.setattr(kind, "rounds", 1)
        monkeypatch.setattr(kind, "turns", 1)


@pytest.mark.usefixtures("emulated", "short")
def test_all_stages_are_right_with_fp8_weights() -> None:
    """Compared with a prompt in float32, which is compared with NumPy."""
    model = RandomLlama(TINY, "float8_e5m2")
    work = LlamaDecodeWork("float8_e5m2", model, 1, position=6)
    rows, skipped = reports.rows_of(work, reports._entrants(work, [{}], 0, None), 1, BEST)
    assert skipped == []
    assert [row.contender for row in rows] == ["gpt2block", *STAGES["float8_e5m2"]]
    for row in rows:
        assert row.right, row
        assert row.us > 0
    check_exact(model)


@pytest.mark.usefixtures("emulated", "short")
def test_a_step_with_a_kv_cache_of_fp8() -> None:
    """Without the stages of fusion, and compared with a prompt that rounds keys and values, too."""
    model = RandomLlama(TINY, "float8_e5m2", "float8_e5m2")
    work = LlamaDecodeWork("float8_e5m2", model, 2, position=6)
    rows, skipped = reports.rows_of(work, reports._entrants(work, [{}], 0, None), 1, BEST)
    assert skipped == []
    assert [row.contender for row in rows] == ["+ FP8 kv_cache"]
    assert rows[0].work == "2 rows, kv_cache float8_e5m2"
    assert rows[0].right, rows[0]
    peers: Any = token_peers.contenders(work, None)  # type: ignore[arg-type]
    for peer in peers:
        with pytest.raises(InputError, match="no PyTorch operation here takes a kv_cache of float"):
            peer.capture(1)


def check_exact(model: RandomLlama) -> None:
    """The logits that results are compared with are NumPy's, but for keys stored in float16."""
    ids = work_ids(model)
    tensors = list(model.on(0).tensors())
    exact = NumpyModel(TINY, tensors, "float32").forward([ids], "last")[0]
    off = np.abs(model.last_logits(ids) - exact).max() / np.abs(exact).max()
    assert off < tolerance("float16")


def work_ids(model: RandomLlama) -> Any:
    return LlamaDecodeWork(model.dtype, model, 1, position=6).prompts()[0]


@pytest.mark.usefixtures("emulated", "short")
def test_a_wrong_step_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks whose residual is the feed-forward itself."""

    class Wrong(StagedPass):
        def _product(self, p: Product) -> Any:
            y = super()._product(p._replace(add=None))
            return self.do(p.result, "add", (y, y)) if p.add else y

    monkeypatch.setattr(sys.modules["gpt2block.bench.llama_works"], "StagedPass", Wrong)
    monkeypatch.setattr(token_contenders, "stages_of", lambda dtype: [Stage("wrong", {})])
    work = LlamaDecodeWork("float16", RandomLlama(TINY, "float16"), 1, position=6)
    entrants = [each for each in token_contenders.contenders(work, 0) if each.name == "wrong"]
    rows, _ = reports.rows_of(work, entrants, 1, BEST)
    assert [row.right for row in rows] == [False]


@pytest.mark.usefixtures("emulated", "short")
def test_all_stages_are_right_in_the_table_and_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = RandomLlama(TINY, "float16")
    step = LlamaDecodeWork("float16", model, 2, position=6)
    works = [step, LlamaPromptWork("float16", model, T=7)]
    monkeypatch.setattr(bench, "llama_works", lambda *arguments: works)
    monkeypatch.setattr(measure, "gpu_index", lambda device: 0)
    monkeypatch.setattr(reports, "measured", lambda: BEST)
    monkeypatch.setattr(reports, "_versions", lambda index, more: {"GPU": "none", **more})
    reported: list[Report] = []
    honest = bench.run

    def run(*arguments: Any) -> Report:
        reported.append(honest(*arguments))
        return reported[0]

    monkeypatch.setattr(bench, "run", run)
    with pytest.raises(SystemExit) as done:
        cli.main(["bench", "--llama", "--json"])
    assert done.value.code == 0
    found = json.loads(capsys.readouterr().out)
    assert found["skipped"] == []
    rows = found["rows"]
    assert [row["contender"] for row in rows] == ["gpt2block", *STAGES["float16"], "gpt2block"]
    assert all(row["right"] and row["us"] > 0 for row in rows)
    assert rows[0]["sizes"]["n_kv_head"] == 1
    assert rows[0]["tokens_s"] == pytest.approx(2e6 / rows[0]["us"])
    check_exact(model)
    console = Console(width=80)
    with console.capture() as captured:
        print_report(console, both_dtypes(reported[0]))
    shown = captured.get()
    assert "Llama of 2 layers of 64 channels, random weights" in shown
    assert shown.count(" unfused ") == 2
    assert "WRONG" not in shown
    assert max(map(len, shown.splitlines())) <= 80


def both_dtypes(report: Report) -> Report:
    """The report, and the same rows for FP8 weights, with the times of a large model."""
    rows = [replace(row, us=23456.7) for row in report.rows]
    narrow = [replace(row, dtype="float8_e5m2") for row in rows if row.what == "decode"]
    return replace(report, rows=[*rows, *narrow])


# PyTorch and transformers, on the CPU


@pytest.mark.usefixtures("emulated", "short")
@pytest.mark.parametrize("grouped", [False, True])
def test_pytorch_computes_the_same(grouped: bool) -> None:
    pytest.importorskip("torch", reason="compares with PyTorch")
    pytest.importorskip("transformers", reason="compares with transformers")
    config = TINY if grouped else replace(TINY, n_kv_head=2, tie_word_embeddings=False)
    model = RandomLlama(config, "float32")
    steps = LlamaDecodeWork("float32", model, 2, position=10)
    prompt = LlamaPromptWork("float32", model, T=11)
    runs: list[tuple[Work, Callable[[int], Any]]] = [
        (steps, lambda n: token_peers.steps(steps, "cpu", token_peers.called, n)),
        (steps, lambda n: llama_peers.transformers_steps(steps, "cpu", n)),
        (prompt, lambda n: llama_peers.prompt(prompt, "cpu", token_peers.called, n)),
        (prompt, lambda n: llama_peers.transformers_prompt(prompt, "cpu", n)),
    ]
    for work, capture in runs:
        run = capture(2)
        _, relative = work.check(run.replay, run.outs)
        assert relative <= reports.tolerance(work, "float32")

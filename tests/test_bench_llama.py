"""`bench --llama`: its works, the stages of fusion, and equal results of all stages."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from gpt2block import InputError, LlamaConfig, bench, emulator
from gpt2block.bench import Report, Work, models, stages, tasks, token_works
from gpt2block.bench import report as reports
from gpt2block.bench.models import SHAPES, RandomLlama
from gpt2block.bench.race import Captured, Contender
from gpt2block.bench.random_weights import gguf_types, random_tensors
from gpt2block.bench.stages import StagedPass, staged, stages_of
from gpt2block.bench.tasks import Steps
from gpt2block.bench.token_works import ManyPrompts, decode, generate, prompt
from gpt2block.bench.works import GeneratedSequences
from gpt2block.cli.bench import print_report
from gpt2block.config import model_shapes
from gpt2block.config.formats import USUAL, Formats
from gpt2block.cuda import cupy
from gpt2block.model import Model
from gpt2block.ops.workload import tolerance
from gpt2block.passes.forward import Product
from gpt2block.run.model import weight_bytes
from gpt2block.run.numpy_model import NumpyModel
from gpt2block.weights.gguf import GgufMatrix
from tests import benches
from tests.benches import BEST
from tests.command_line import gpt2block
from tests.outlines import outline

TINY = LlamaConfig(
    n_layer=1, n_head=2, n_kv_head=1, n_embd=64, n_ctx=16, vocab_size=56, n_ff=32, head_size=64,
    tie_word_embeddings=True,
)  # fmt: skip
OF_BLOCKS = replace(TINY, n_layer=2, n_embd=256, n_ff=256)
MANY = ManyPrompts(3, 5, 9, new=4)
STAGES = {
    "float16": ["unfused", "+ residuals", "+ RoPE", "+ graph", "+ overlap"],
    "float8_e5m2": ["unfused", "+ RMSNorm", "+ RoPE", "+ feed-forward", "+ graph"],
}


def test_bytes_of_llama_7b() -> None:
    """The model has 13.5 GB in float16; steps do not read wte. K and V of a token take 512 KiB."""
    model = RandomLlama(SHAPES["7b"], "float16")
    wte = 2 * 32000 * 4096
    assert model.weight_bytes == weight_bytes(model.config, Formats("float16")) - wte
    assert model.token_bytes == 2 * 32 * 4096 * 2
    step = decode(model, 1)
    assert step.traffic == pytest.approx(13.48e9, rel=0.01)
    assert step.flops == 2 * model.matrix_elements + 4 * 32 * 4096 * 512
    small = RandomLlama(SHAPES["1b"], "bfloat16")
    assert small.matrix_elements == pytest.approx(1.236e9, rel=0.01)
    assert small.token_bytes == 2 * 16 * 512 * 2


@pytest.mark.usefixtures("emulated")
def test_a_model_on_several_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, Any] = {}

    def from_tensors(config: Any, tensors: Any, device: str, *formats: str) -> Any:
        made[device] = [array for _, array, _ in tensors]

    monkeypatch.setattr(Model, "from_tensors", from_tensors)
    one, several = (
        bench.model_works("llama", "float16", "1", "small", None, device)
        for device in (None, "cuda:2,3")
    )
    for a, b in zip(one, several, strict=True):
        assert (b.flops, b.traffic) == (a.flops // 2, a.traffic // 2)
        assert b.sizes == {**a.sizes, "gpus": 2}
    assert [each.name for each in several[0].ours((), 0)] == ["gpt2block"]
    monkeypatch.setattr(models, "reads_blocks", lambda device: True)
    for config, dtype in ((TINY, "float16"), (OF_BLOCKS, "file")):
        for device in (None, "cuda:2,3"):
            RandomLlama(config, dtype, None, device).on(0)
        for pair in zip(*made.values(), strict=True):
            a, b = (w.data if isinstance(w, GgufMatrix) else w for w in pair)
            np.testing.assert_array_equal(a.get(), b)
        assert [*made] == ["cuda:0", "cuda:2,3"]


def test_the_works_and_their_order() -> None:
    works = bench.model_works("llama")
    assert [(work.what, work.dtype, work.name) for work in works] == [
        *[("decode", "float16", name) for name in ("1 row", "4 rows", "16 rows", "64 rows")],
        ("prompt", "float16", "1x512"),
        *[("decode", "float8_e5m2", name) for name in ("1 row", "4 rows", "16 rows", "64 rows")],
        *[
            ("decode", "float8_e5m2", f"{name}, kv_cache float8_e5m2")
            for name in ("1 row", "4 rows", "16 rows", "64 rows")
        ],
        *[("decode", "file", name) for name in ("1 row", "4 rows", "16 rows", "64 rows")],
    ]
    assert works[0].sizes["n_kv_head"] == 32
    one = bench.model_works("llama", None, "1", "1b")
    dtypes = ["bfloat16", "bfloat16", "float8_e5m2", "float8_e5m2"]
    assert [work.dtype for work in one] == [*dtypes, "file"]
    assert [work.what for work in bench.model_works("llama", "float32", "1", "small")] == ["decode"]
    few, many = (
        bench.model_works("llama", "bfloat16", "8", name)[-1].sizes
        for name in ("smollm2-135m", "qwen3-0.6b")
    )
    assert (few["prompts"], few["n_embd"], few["new"]) == (512, 576, 128)
    assert (many["prompts"], many["shortest"], many["longest"]) == (256, 100, 1024)


def kernels_of(dtype: str) -> list[tuple[int, set[str]]]:
    """Return for each stage the number of steps of a layer, and their operations."""
    found = []
    for fusions in stages_of(dtype).values():
        do = outline(TINY)
        staged(do, TINY, fusions)
        steps = [step for step in do.steps if step.name.startswith("h.0.")]
        found.append((len(steps), {step.op for step in steps}))
    return found


def test_each_stage_has_fewer_kernels() -> None:
    """A layer with a kernel per operation has thirteen, including the append to the kv_cache."""
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
    if problem := emulator.missing():
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
    assert not np.array_equal(made["h.0.w_gate"][0], made["h.0.w_up"][0])


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time one turn of one step, after the turn that is checked."""
    monkeypatch.setattr(tasks, "STEPS", 1)
    monkeypatch.setattr(tasks, "TURNS", 1)


def raced(work: Work) -> list[bench.BenchRow]:
    rows, skipped = reports.rows_of(work, work.ours([{}], 0), 1, BEST)
    assert skipped == []
    return rows


@pytest.mark.usefixtures("emulated", "short")
def test_all_stages_are_right_with_fp8_weights() -> None:
    """Steps are compared with a prompt in float32, which is compared with NumPy.

    A step with a kv_cache of FP8 has no stages, and is compared with a prompt that also rounds
    keys and values.
    """
    model = RandomLlama(TINY, "float8_e5m2")
    rows = raced(decode(model, 2, 6))
    assert [row.contender for row in rows] == ["gpt2block", *STAGES["float8_e5m2"]]
    for row in rows:
        assert row.right, row
        assert row.us > 0
    check_exact(model)
    work = decode(RandomLlama(TINY, "float8_e5m2", "float8_e5m2"), 2, 6)
    rows = raced(work)
    assert [row.contender for row in rows] == ["+ FP8 kv_cache"]
    assert rows[0].work == "2 rows, kv_cache float8_e5m2"
    assert rows[0].right, rows[0]


@pytest.mark.usefixtures("emulated", "short")
@pytest.mark.parametrize(("cache", "by"), [(None, "gpt2block"), ("float8_e5m2", "+ FP8 kv_cache")])
def test_a_step_with_gguf_blocks_is_right(cache: str | None, by: str) -> None:
    model = RandomLlama(OF_BLOCKS, "file", cache)
    rows = raced(decode(model, 2, 6))
    assert [(row.contender, row.right) for row in rows] == [(by, True)]
    if cache is None:
        engine: Any = model.on(0).engine
        stored = [w for w in engine.given().values() if isinstance(w, GgufMatrix)]
        vectors = sum(len(array) for _, array, layout in model.on(0).tensors() if layout is None)
        read = {id(w): w.nbytes for w in stored}  # lm_head is wte
        assert model.weight_bytes == sum(read.values()) + 4 * vectors
        check_exact(model)


def test_gguf_types_are_those_of_q4_k_m() -> None:
    """Half of the layers have Q6_K in w_down and v, as llama.cpp chooses them."""
    config = SHAPES["7b"]
    of = {n: gguf_types(config, f"h.{n}.w_down", 4096) for n in range(32)}
    precise = [n for n, types in of.items() if types == (("Q6_K", 4096),)]
    assert precise == [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]
    assert gguf_types(config, "h.0.w_qkv", 12288) == (("Q4_K", 8192), ("Q6_K", 4096))
    assert gguf_types(config, "lm_head", 32000) == (("Q6_K", 32000),)
    assert gguf_types(config, "wte", 32000) == (("Q4_K", 32000),)
    assert RandomLlama(config, "file").weight_bytes == pytest.approx(4.0e9, rel=0.02)


def test_rows_of_gguf_blocks_differ() -> None:
    """Rows repeat after 4,072 rows, so that heads and matrices of a usual width differ."""
    config = replace(OF_BLOCKS, n_embd=512, head_size=256, vocab_size=4100)
    made: dict[str, Any] = {name: w for name, w, _ in random_tensors(config, "file", np)}
    wide = made["wte"].dequantized().T
    assert wide.std() == pytest.approx(0.02, rel=0.1)
    assert len(np.unique(wide[:4072], axis=0)) == 4072
    np.testing.assert_array_equal(wide[4072:], wide[: 4100 - 4072])
    q, k, v = np.split(made["h.0.w_qkv"].dequantized().T, [512, 768])
    gate, up = (made[f"h.0.w_{name}"].dequantized() for name in ("gate", "up"))
    pairs = (q[:256], k), (k, v), (gate, up), (gate[:, :248], up[:, 8:])
    assert not any(np.array_equal(a, b) for a, b in pairs)


@pytest.mark.usefixtures("emulated", "short")
def test_a_run_releases_each_model_before_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    benches.without_measuring(monkeypatch)
    first, last = RandomLlama(TINY, "float16"), RandomLlama(TINY, "bfloat16")
    engines: list[weakref.ref[Any]] = []

    def truth(ids: Any) -> Any:
        if first._on:
            engines.append(weakref.ref(first.on(0).engine))
        return np.ones(TINY.vocab_size)

    found = GeneratedSequences([np.zeros(2, np.int32)])
    done = Captured(lambda: None, (lambda: found,))
    peer = Contender("other", True, lambda rounds: done, "bfloat16")
    works = [replace(decode(model, 1, 6), truth=truth) for model in (first, last)]
    report = bench.run(works, peers=lambda work, sets: [peer] if work is works[1] else [])
    assert [row.dtype for row in report.rows if row.peer and row.right] == ["bfloat16"]
    assert engines
    assert all(engine() is None for engine in engines)
    assert (first._on, first._exact) == ({}, None)
    assert last._on


def test_a_size_without_gguf_blocks() -> None:
    works = bench.model_works("llama", None, "1", "smollm2-135m")
    assert "file" not in {work.dtype for work in works}
    with pytest.raises(InputError, match=r"--dtype file: .* 256 inputs, w.* has 576 in smoll"):
        bench.model_works("llama", "file", "1", "smollm2-135m")
    with pytest.raises(InputError, match="--dtype: expected one of float32"):
        bench.model_works("gpt2", "file", "1")


def test_dtypes_of_a_cache_that_weights_cannot_have_are_left_out() -> None:
    found = bench.model_works("llama", None, "1", "1b", "bfloat16")
    assert [work.dtype for work in found] == ["bfloat16", "bfloat16"]
    found = bench.model_works("llama", None, "1", "1b", "float8_e5m2")
    assert [work.dtype for work in found if work.what == "decode"] == [
        *("bfloat16", "float8_e5m2", "file"),
    ]


def check_exact(model: RandomLlama) -> None:
    """Assert that reference logits equal NumPy's, except for keys stored in float16."""
    ids = Steps(model, 1, 6).prompts()[0]
    tensors = list(model.on(0).tensors())
    exact = NumpyModel(model.config, tensors, USUAL).forward([ids], "last")[0]
    off = np.abs(model.last_logits(ids) - exact).max() / np.abs(exact).max()
    assert off < tolerance("float16")


@pytest.mark.usefixtures("emulated", "short")
def test_a_wrong_step_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong blocks add the feed-forward to itself instead of to the residual."""

    class Wrong(StagedPass):
        def _product(self, p: Product) -> Any:
            y = super()._product(p._replace(add="", residual=None, result=p.name))
            return self.do(p.result, "add", (y, y)) if p.add else y

    monkeypatch.setattr(stages, "StagedPass", Wrong)
    monkeypatch.setattr(token_works, "stages_of", lambda dtype: {"wrong": ()})
    work = decode(RandomLlama(TINY, "float16"), 2, 6)
    entrants = [each for each in work.ours([{}], 0) if each.name == "wrong"]
    rows, _ = reports.rows_of(work, entrants, 1, BEST)
    assert [row.right for row in rows] == [False]


@pytest.mark.usefixtures("emulated", "short")
def test_all_stages_are_right_in_the_table_and_json(monkeypatch: pytest.MonkeyPatch) -> None:
    model = RandomLlama(TINY, "float16")
    works = [decode(model, 2, 6), prompt(model, 7), generate(model, MANY)]
    monkeypatch.setattr(bench, "model_works", lambda *arguments: works)
    benches.without_measuring(monkeypatch)
    reported: list[Report] = []
    honest = bench.run

    def run(*arguments: Any) -> Report:
        reported.append(honest(*arguments))
        return reported[0]

    monkeypatch.setattr(bench, "run", run)
    ended = gpt2block("bench", "--llama", "--json")
    assert ended.code == 0
    found = ended.json
    assert found["skipped"] == []
    rows = found["rows"]
    names = ["gpt2block", *STAGES["float16"], "gpt2block", "gpt2block", "sampled"]
    assert [row["contender"] for row in rows] == names
    assert "sampled: temperature" in gpt2block("bench", "--llama").out
    assert all(row["right"] and row["us"] > 0 for row in rows)
    assert rows[0]["sizes"]["n_kv_head"] == 1
    assert rows[0]["tokens_s"] == pytest.approx(2e6 / rows[0]["us"])
    check_exact(model)
    console = Console(width=80)
    with console.capture() as captured:
        print_report(console, both_dtypes(reported[0]))
    shown = captured.get()
    assert "Llama of 1 layers of 64 channels, random weights" in shown
    assert shown.count(" unfused ") == 2
    assert "WRONG" not in shown
    assert max(map(len, shown.splitlines())) <= 80


def both_dtypes(report: Report) -> Report:
    """Return the report with a large model's times, and its rows again for FP8 weights."""
    rows = [replace(row, us=23456.7) for row in report.rows]
    narrow = [replace(row, dtype="float8_e5m2") for row in rows if row.what == "decode"]
    return replace(report, rows=[*rows, *narrow])

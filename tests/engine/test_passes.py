"""Passes as lists of steps with their options, and computed with NumPy."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, get_args
from unittest.mock import Mock

import numpy as np
import pytest

from gpt2block import Block, BlockWeights, GPT2Config, LlamaConfig, emulator, reference
from gpt2block.block import largest, spec_of
from gpt2block.cuda import cupy
from gpt2block.engine.block import BlockSpec
from gpt2block.engine.numpy.executor import NumpyExecutor
from gpt2block.engine.passes import model_steps
from gpt2block.engine.passes.bounds import result_bounds
from gpt2block.engine.passes.executor import Step
from gpt2block.engine.passes.prefill_rules import Prefill, Products
from gpt2block.engine.passes.settings import PassSettings
from gpt2block.engine.recorder import ALIGNMENT, Arena, ArenaFull, Offsets
from gpt2block.engine.recording import Recordings
from gpt2block.models.architectures import gpt2
from gpt2block.models.config import ModelConfig, Scales, block_shapes
from gpt2block.models.weights.matrix import WeightMatrix
from gpt2block.ops.registry import OPERATIONS, STEPS
from tests.outlines import decode, prefill

TEN = ("ln1", "qkv", "attn", "proj", "x1", "ln2", "ff1", "gelu", "ff2", "output")
SEVEN = ("ln1", "qkv", "attn", "x1", "ln2", "gelu", "output")
CONFIG = GPT2Config(n_layer=3, n_head=2, n_embd=128, n_ctx=40, vocab_size=53)
LLAMA = LlamaConfig(n_layer=2, n_head=2, n_embd=128, n_ctx=40, vocab_size=53, n_kv_head=1, n_ff=144)
WANTS: tuple[Any, ...] = (None, "last", "logits", "rows", "hidden", "log_likelihood", "likeliest")


def block_of(kernels: str, n_head: int = 2) -> BlockSpec:
    settings = PassSettings(n_head, n_head, Scales(1e-5), 64)
    return BlockSpec(gpt2, settings, 64 * n_head, block_shapes(64 * n_head), kernels)


@pytest.mark.parametrize("kernels", ["skeleton", "fused"])
def test_no_x_passes_the_bounds(kernels: str) -> None:
    """Inputs are random rows and rows of one large value, whose LayerNorm is the largest."""
    weights = BlockWeights.random(0, GPT2Config(n_head=2, n_embd=48))
    weights = replace(weights, gamma1=-3 * weights.gamma1, beta2=100 * weights.beta2)
    block = Block(weights, causal=True, device="cpu", kernels=kernels)
    bounds = result_bounds(block.spec.steps, weights.tensors())
    rows = [np.eye(48) * 1e6, np.eye(48) * -1e-3, np.random.default_rng(0).normal(size=(48, 48))]
    trace = block.trace(np.concatenate(rows).astype(np.float32))
    products = {"skeleton": {"proj", "ff1", "ff2"}, "fused": set()}[kernels]
    assert set(bounds) == {"ln1", "qkv", "attn", "ln2", "gelu"} | products
    for name, bound in bounds.items():
        assert np.abs(trace[name]).max() <= bound * (1 + 1e-6)
    assert np.abs(trace["ln1"]).max() > 0.7 * bounds["ln1"]


def test_the_bounds_by_hand() -> None:
    weights = BlockWeights.random(0, GPT2Config(n_head=2, n_embd=48))
    bounds = largest(weights)
    ln1 = 48**0.5 * float(np.abs(weights.gamma1).max()) + float(np.abs(weights.beta1).max())
    sums = [sum(abs(float(v)) for v in column) for column in weights.w_qkv.T]
    qkv = ln1 * max(sums) + max(abs(float(v)) for v in weights.b_qkv)
    assert bounds["ln1"] == ln1
    assert bounds["qkv"] == bounds["attn"] == pytest.approx(qkv, rel=1e-12)
    nan = replace(weights, w_fc=weights.w_fc * np.float32(np.nan))
    assert np.isnan(largest(nan)["gelu"])


def every_pass() -> Iterator[list[Step]]:
    yield decode(CONFIG)
    yield decode(CONFIG, norms=False)
    yield decode(CONFIG, kv_dtype="float8_e5m2")
    yield model_steps(CONFIG)
    for want in WANTS:
        for products, batch, kind in itertools.product(get_args(Products), (1, 3), range(3)):
            if kind == 0 or products != "float32":
                shape = Prefill(products, 1030, batch, 7, kind != 1, kind == 2)
                yield prefill(shape, CONFIG, want)
                if products in ("16_bits", "fp8", "float32"):
                    yield prefill(replace(shape, fp8_cache="float8_e4m3fn"), CONFIG, want)


def test_every_op_runs_in_numpy_and_in_cuda() -> None:
    passes = list(every_pass())
    assert len(passes) > 50
    blocks = (block_of(kernels).steps for kernels in ("skeleton", "fused"))
    for step in itertools.chain(*passes, *blocks):
        assert callable(getattr(reference, step.op))
        known = {*OPERATIONS, *STEPS, "rows"}
        assert step.op in known


def ops_of(steps: Sequence[Step], h: str = "h.1.") -> list[str]:
    return [f"{s.name[len(h) :]} {s.op}" for s in steps if s.name.startswith(h)]


@pytest.mark.parametrize("config", [CONFIG, LLAMA])
def test_eps_reaches_every_norm(config: ModelConfig) -> None:
    config = replace(config, eps=0.25)
    prompts = (Prefill(products, 9, 2, 9, True) for products in get_args(Products))
    passes = [prefill(prompt, config, want) for prompt in prompts for want in WANTS]
    passes += [decode(config), decode(config, norms=False)]
    for steps in (*passes, model_steps(config)):
        norms = [
            step
            for step in steps
            if step.op in ("layernorm", "rmsnorm")
            or (step.op in ("linear", "linear_qkv") and any(step.inputs[3:4]))
        ]
        assert len(norms) >= 2 * config.n_layer - 1
        assert {step.attrs["eps"] for step in norms} == {0.25}


def test_a_block_is_the_formula() -> None:
    """The plans of both kinds of kernels, in float64, equal `reference.block_forward`."""
    weights = BlockWeights.random(0, GPT2Config(n_head=2, n_embd=48)).astype(np.float64)
    x = np.random.default_rng(0).normal(size=(2, 7, 48))
    for causal, kernels in itertools.product((False, True), ("skeleton", "fused")):
        truth = reference.block_forward(x, weights, causal)
        out = spec_of(weights, causal, kernels).run(NumpyExecutor({**weights.tensors(), "x": x}))
        np.testing.assert_allclose(out, truth, rtol=1e-13, atol=1e-13)


def test_a_part_of_an_arena_gets_the_lowest_place_and_is_free_again() -> None:
    offsets = Offsets(5 * ALIGNMENT)
    first, second, third = (offsets.take(n) for n in (1, ALIGNMENT + 1, ALIGNMENT))
    assert (first, second, third) == (0, ALIGNMENT, 3 * ALIGNMENT)
    offsets.give_back(second)
    assert offsets.take(ALIGNMENT) == second
    with pytest.raises(ArenaFull):
        offsets.take(2 * ALIGNMENT)
    assert offsets.take(ALIGNMENT) == 2 * ALIGNMENT
    assert offsets.peak == 4 * ALIGNMENT


@pytest.fixture
def emulated() -> Iterator[Any]:
    with emulator.emulated() as device:
        yield device


def test_an_array_of_an_arena_lives_as_long_as_its_views(emulated: Any) -> None:
    arena = Arena(4096)
    array = arena.empty((3, 5), "float32")
    array[...] = 7
    view = array[1:]
    assert arena.view(view).data.ptr == view.data.ptr
    del array
    other = arena.empty((5,), "float32")
    assert other.data.ptr != view.data.ptr - 20
    assert (view == 7).all()
    kept, place = arena.view(view), other.data.ptr
    del view, other
    assert arena.empty((99,), "uint8").data.ptr == min(place, kept.data.ptr - 20)
    outside = cupy.empty(3, "float32")
    assert arena.view(outside) is outside


def test_a_step_that_reads_what_another_has_overwritten_is_an_error(emulated: Any) -> None:
    def run(do: Any) -> Any:
        a = do("a", "add", ("x", "x"))
        do("b", "gelu", (a,))
        return do("c", "gelu", (a,))

    with pytest.raises(RuntimeError, match="c: reads a: b overwrote it"):
        Recordings().make(run, {"x": cupy.zeros((2, 3), "float32")})


def test_steps_with_the_same_arrays_are_bound_once(emulated: Any) -> None:
    def run(do: Any) -> Any:
        y = do("a", "add", ("x", "w"))
        return do("b", "add", (y, "w"))

    x, w = (cupy.full((2, 3), n, "float32") for n in (0, 1))
    outs = [cupy.empty((2, 3), "float32") for _ in "ab"]
    recordings = Recordings()
    first = recordings.make(run, {"x": x, "w": w}, {"b": outs[0]})
    second = recordings.make(run, {"x": x, "w": w}, {"b": outs[1]}, known=first.steps)
    assert second.steps["a"].launches is first.steps["a"].launches
    assert second.steps["b"].launches is not first.steps["b"].launches
    second.run()
    np.testing.assert_array_equal(outs[1].get(), np.full((2, 3), 2, np.float32))


def test_a_measured_arena_is_as_large_as_the_recording_needs(
    emulated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Views may outlive their arrays: steps must not overwrite their memory."""
    arenas = Mock(wraps=Arena)
    monkeypatch.setattr("gpt2block.engine.recording.Arena", arenas)

    def run(do: Any) -> Any:
        last = do("last", "rows", (do("a", "add", ("x", "x")),), first=200, end=201)
        y = do("b", "add", ("x", "x"))
        return do("c", "add", (last, do("d", "rows", (y,), first=0, end=1)))

    x = cupy.full((201, 3), 2, "float32")
    recording = Recordings().make(run, {"x": x})
    recording.run()
    np.testing.assert_array_equal(recording.out.get(), np.full((1, 3), 8, np.float32))
    assert arenas.call_count == 1


def test_steps_whose_options_differ_in_their_names_are_not_alike(emulated: Any) -> None:
    def run(do: Any) -> Any:
        a = do("a", "linear", ("x", "w"), gelu=True)
        return do("c", "add", (a, do("b", "linear", ("x", "w"), decoding=True)))

    x, w = (np.random.default_rng(n).standard_normal((8, 8), dtype=np.float32) for n in (0, 1))
    tensors = {"x": cupy.asarray(x), "w": WeightMatrix(cupy.asarray(w), "float32", None, "NK")}
    recording = Recordings().make(run, tensors)
    recording.run()
    product = reference.linear(x, w.T)
    expected = reference.gelu(product) + product
    np.testing.assert_allclose(recording.out.get(), expected, rtol=1e-4, atol=1e-5)


def test_scales_of_several_sequences_are_measured(emulated: Any) -> None:
    def run(do: Any) -> Any:
        return do("a", "hi_lo", ("x",), dtype="hi_lo")

    recording = Recordings().make(run, {"x": cupy.full((3, 512, 4), 1, "float32")})
    recording.run()
    np.testing.assert_array_equal(recording.out.get(), np.ones((3, 512, 4), np.float32))


def test_results_that_something_keeps_get_a_larger_arena(
    emulated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Any] = []
    empty = Arena.empty

    def keeping(arena: Arena, *args: Any) -> Any:
        kept.append(empty(arena, *args))
        return kept[-1]

    monkeypatch.setattr(Arena, "empty", keeping)

    def run(do: Any) -> Any:
        x = "x"
        for n in range(12):
            x = do(f"a{n}", "add", (x, "w"))
        return x

    tensors = {"x": cupy.zeros((201, 3), "float32"), "w": cupy.full((201, 3), 1, "float32")}
    recording = Recordings().make(run, tensors)
    recording.run()
    np.testing.assert_array_equal(recording.out.get(), np.full((201, 3), 12, np.float32))

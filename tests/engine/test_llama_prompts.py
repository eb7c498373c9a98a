"""Prompts of Llama models on tensor cores, with float32 (hi/lo) and FP8 weights.

With float32 the error against float64 is at most the error of float32 kernels without tensor cores;
on a GPU, whose tensor cores truncate sums, at most twice that error. With FP8 the error is due to
float16 activations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpt2block import Llama, LlamaBlockWeights, LlamaConfig, LlamaWeights, cuda
from gpt2block.cuda.kernels import FP8
from gpt2block.engine.cuda.model import CudaModel
from gpt2block.engine.cuda.products import row_norms
from gpt2block.engine.inspect.compare import compare, exact_tensors
from gpt2block.models.weights.matrix import WeightMatrix
from tests.devices import GPU, running_on, set_attributes, slow

Array = NDArray[Any]
TINY = LlamaConfig(
    n_layer=1, n_head=2, n_kv_head=1, n_embd=72, n_ctx=40, vocab_size=53, n_ff=40, head_size=64,
    attention_bias=True,
)  # fmt: skip
H200_SHARED = 232448  # hi/lo heads of 128 channels need more than the emulated GPU has


@pytest.fixture(params=["emulator", GPU])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with running_on("forward" if request.param == "emulator" else "gpu"):
        set_attributes(monkeypatch, MaxSharedMemoryPerBlockOptin=H200_SHARED)
        yield


def random_ids(length: int) -> Array:
    return np.random.default_rng(length).integers(53, size=length).astype(np.int32)


def without_tensor_cores(
    weights: LlamaWeights, monkeypatch: pytest.MonkeyPatch, dtype: str = "float32"
) -> Llama:
    with monkeypatch.context() as patch:
        patch.setattr(CudaModel, "_choose_products", lambda *_: ("float32", {}))
        return Llama(weights, device="cuda", dtype=dtype)


def large_gated_product(block: LlamaBlockWeights) -> LlamaBlockWeights:
    """Return the block with gate and up 4,000 times as large."""
    names = ("w_gate", "b_gate", "w_up", "b_up")
    return replace(block, **{name: getattr(block, name) * np.float32(4000) for name in names})


def decoded(engine: Any, ids: Array) -> Array:
    """Decode tokens one by one; return the logits of each, (T, V)."""
    cache = engine.new_cache(1, len(ids))
    return np.stack([engine.forward([ids[n : n + 1]], "last", cache)[0] for n in range(len(ids))])


def kernels(engine: Any, ids: Array) -> list[str]:
    """Return the names of a prompt's launches, in order."""
    with engine.running():
        return [launch.name for launch in engine._pass(ids, False).launches]


def rms(error: Array) -> float:
    return float(np.sqrt(np.square(error).mean()))


@pytest.mark.parametrize(
    ("device", "head"),
    [slow("emulator", 128), *(pytest.param("gpu", head, marks=GPU.marks) for head in (64, 128))],
    indirect=["device"],
)
def test_two_parts_are_as_near_to_float64(
    device: None, head: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums have 264 channels; with very few, only the last rounding would differ from float64."""
    weights = LlamaWeights.random(2, replace(TINY, n_embd=264, head_size=head))
    model: Any = Llama(weights, device="cuda")
    plain: Any = without_tensor_cores(weights, monkeypatch)
    assert (model.engine.products, plain.engine.products) == ("hi_lo", "float32")
    ids = random_ids(17)
    logits = exact_tensors(model.engine, ids)["logits"]
    assert rms(model(ids) - logits) <= (1 if cuda.replaced() else 2) * rms(plain(ids) - logits)
    assert np.abs(model(ids, last=True) - logits[-1]).max() <= 1e-6 * np.abs(logits).max()


def test_hi_lo_steps(device: None) -> None:
    """Conversions are not separate steps in traces and comparisons."""
    model: Any = Llama(LlamaWeights.random(2, TINY), device="cuda")
    ids = random_ids(15)
    names, steps = list(model.engine.trace(ids, False)), model.compare(ids)
    assert [step.name for step in steps] == names
    assert names[:6] == ["embedding", *(f"h.0.{n}" for n in ("rms1", "qkv", "rope", "attn", "x1"))]
    assert steps[2].kernel.startswith("gemm_split")
    assert steps[4].kernel.startswith("attention_fp32")
    for step in steps:
        assert step.max_rel <= 1e-6, step


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_row_norms_bound_every_product(device: None, dtype: str) -> None:
    """An RMSNorm row parallel to the weights reaches the bound, except for its margin."""
    rng = np.random.default_rng(0)
    gamma, w = rng.normal(size=24).astype(np.float32), rng.normal(size=(16, 24)) ** 3
    matrix = WeightMatrix.quantize(cuda.cupy.asarray(w.astype(np.float32)), dtype, "NK")
    rows = matrix.dequantized().T.astype(np.float64) * gamma
    largest = np.abs(rows @ (rows / np.linalg.norm(rows, axis=1, keepdims=True)).T).max(axis=1)
    np.testing.assert_allclose(row_norms(matrix, cuda.cupy.asarray(gamma)), 1.01 * largest, 1e-6)


@pytest.mark.parametrize(
    ("device", "dtype"),
    [("emulator", "float8_e5m2"), *(pytest.param("gpu", d, marks=GPU.marks) for d in FP8)],
    indirect=["device"],
)
def test_a_gated_product_beyond_float16(
    device: None, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The usual kernels compute it divided by a power of two; traced steps show the full values."""
    plain = LlamaWeights.random(2, replace(TINY, n_layer=2, mlp_bias=True))
    blocks = (plain.blocks[0], large_gated_product(plain.blocks[1]))
    weights, ids = replace(plain, blocks=blocks), random_ids(15)
    engines: Any = (Llama(w, device="cuda", dtype=dtype).engine for w in (weights, plain))
    model, small = engines
    assert list(model._divisors) == ["h.1.up", "h.1.ff"]
    assert kernels(model, ids) == kernels(small, ids)

    exact = exact_tensors(model, ids)
    assert np.abs(exact["h.1.ff"]).max() > 4 * 65504
    (logits,) = model.forward([ids], "logits")
    assert np.abs(logits - exact["logits"]).max() <= 2e-3 * np.abs(exact["logits"]).max()
    (nats,) = model.log_likelihood([ids])
    np.testing.assert_allclose(nats, exact["scores"][:-1], atol=2e-3 * np.abs(logits).max())
    for step in compare(model, ids, cached=False):
        assert step.max_rel <= 2e-3, step

    rows = [ids[:5], random_ids(6)]
    for row, together in zip(rows, model.forward(rows, "last"), strict=True):
        np.testing.assert_array_equal(model.forward([row], "last")[0], together)
        truth = exact_tensors(model, row)["logits"]
        assert np.abs(together - truth[-1]).max() <= 2e-3 * np.abs(truth).max()

    plainly: Any = without_tensor_cores(weights, monkeypatch, dtype)
    np.testing.assert_array_equal(decoded(model, ids[:2]), decoded(plainly.engine, ids[:2]))


def test_what_float16_cannot_hold_or_the_gpu_has_no_shared_memory_for(
    device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such prompts are computed without tensor cores."""

    def products(dtype: str) -> str:
        engine: Any = Llama(weights, device="cuda", dtype=dtype).engine
        return str(engine.products)

    weights = LlamaWeights.random(2, TINY)
    weights.blocks[0].w_gate[...] *= 1e5  # SiLU is not linear: gate is not divided
    assert products("float32") == "hi_lo"
    assert products("float8_e5m2") == "float32"
    if cuda.replaced():
        set_attributes(monkeypatch, MaxSharedMemoryPerBlockOptin=101376)
        weights = LlamaWeights.random(2, replace(TINY, head_size=128))
        assert products("float32") == "float32"

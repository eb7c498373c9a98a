"""Prefill on tensor cores with float32 weights, two-part, and with FP8 weights, in float16.

With float32 the rule is that of float32 kernels: the error against float64 is at most twice that of
float32 NumPy. With FP8 it is that of float16 (tests/test_prefill.py), on the FP8 numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpt2block import GPT2, GPT2Config, emulator, reference
from gpt2block.architectures.gpt2_weights import BlockWeights, GPT2Weights
from gpt2block.config import block_shapes
from gpt2block.emulator import loader, stand_in
from gpt2block.passes.gpt2 import operand_bounds
from gpt2block.run.cuda_model import CudaModel
from tests.test_prefill import SMALL, Found, assert_close, computed, random_ids, weights

Array = NDArray[Any]
TINY = GPT2Config(n_layer=1, n_head=1, n_embd=64, n_ctx=40, vocab_size=53)
TWO_LAYERS = replace(TINY, n_layer=2)
DTYPES = ("float32", "float8_e4m3fn", "float8_e5m2")
PRODUCTS = {"float32": "two_part", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8"}
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
one_fp8 = pytest.mark.parametrize("dtype", DTYPES[:2])


def stored(model: Any) -> GPT2Weights:
    """The weights that a model computes with, as float32."""
    tensors = {
        name: np.asarray(a, np.float32).T if layout == "NK" and name.startswith("h.") else a
        for name, a, layout in model.tensors()
    }
    tensors = {name: np.ascontiguousarray(a, np.float32) for name, a in tensors.items()}
    c = model.config
    blocks = tuple(
        BlockWeights(
            **{name: tensors[f"h.{n}.{name}"] for name in block_shapes(c.n_embd)},
            n_head=c.n_head,
            eps=c.eps,
        )
        for n in range(c.n_layer)
    )
    wte, wpe, gamma_f, beta_f = (tensors[name] for name in ("wte", "wpe", "gamma_f", "beta_f"))
    return GPT2Weights(c, wte, wpe, blocks, gamma_f, beta_f, wte)


def rounded_like(dtype: str) -> Any:
    """What a step's result is rounded to: nothing in float32, float16 with FP8."""
    if dtype == "float32":
        return np.asarray
    return lambda result: result.astype(np.float16).astype(np.float32)


class Truth:
    """What a model should give for a sequence, in float64 and in its own precision."""

    def __init__(self, model: Any, ids: Array) -> None:
        w = stored(model)
        self.ids = ids
        self.exact: Found = computed(w, ids, np.asarray, np.float64)
        self.own: Found = computed(w, ids, rounded_like(model.dtype), np.float32)

    def check(self, got: Array, name: str, at: Any = slice(None)) -> None:
        assert_close(got, getattr(self.exact, name), getattr(self.own, name), at)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """An emulated GPU; the names of the kernels that run."""
    if problem := loader.missing():
        pytest.skip(problem)
    names: list[str] = []
    run = stand_in.Function._run

    def recorded(self: Any, *args: Any) -> None:
        names.append(self.name)
        run(self, *args)

    monkeypatch.setattr(stand_in.Function, "_run", recorded)
    with emulator.emulated():
        yield names


def on(config: GPT2Config, dtype: str) -> CudaModel:
    model = CudaModel(config, weights(config).tensors(), dtype, 0)
    assert model.products == PRODUCTS[dtype]
    return model


@one_fp8
def test_every_output_of_a_sequence(ran: list[str], dtype: str) -> None:
    config = TWO_LAYERS if dtype == "float32" else TINY
    model = on(config, dtype)
    truth = Truth(model, random_ids(config, 33))
    ran.clear()
    (last,) = model.forward([truth.ids], "last")
    truth.check(last, "last", -1)
    product = "gemm_split_mma" if dtype == "float32" else "gemm_mma"
    assert ran.count(product) == 4 * config.n_layer - (3 if dtype == "float32" else 2)
    assert ran.count("widen_fp8") == (0 if dtype == "float32" else 4 * config.n_layer - 2)
    assert "linear_tiles" not in ran
    truth.check(model.forward([truth.ids], "logits")[0], "logits")
    truth.check(model.forward([truth.ids], "hidden")[0], "hidden")
    (states,) = model.forward([truth.ids], "states")
    assert_close(states[:-1], truth.exact.stream, truth.own.stream)
    (nats,) = model.log_likelihood([truth.ids])
    exact, own = (
        reference.log_likelihood(logits[:-1], truth.ids[1:])[:, None]
        for logits in (truth.exact.logits, truth.own.logits)
    )
    assert own.dtype == np.float32
    assert_close(nats[:, None], exact, own)


@one_fp8
def test_rows_that_begin_and_rows_that_continue(ran: list[str], dtype: str) -> None:
    """In one call, with rows of one token and none; each has the bits that it has alone."""
    model = on(TINY, dtype)
    rows = [random_ids(TINY, n, n) for n in (20, 9, 30, 12, 7)]
    first = [ids[:n] for ids, n in zip(rows, (11, 0, 29, 12, 3), strict=True)]
    second = [ids[len(begun) :] for ids, begun in zip(rows, first, strict=True)]
    kv_cache = model.new_cache(5, 40)
    model.forward(first, "last", kv_cache)
    for b, ids in ((0, rows[0]), (2, rows[2])):
        truth = Truth(model, ids)
        for layer, halves in enumerate(kv_cache.layers):
            for kept, exact, own in zip(
                halves, truth.exact.kv[layer], truth.own.kv[layer], strict=True
            ):
                seen = kept[b].get().astype(np.float64)
                end = len(first[b])
                assert_close(seen[:end], exact, own, slice(end))
                assert (seen[end:] == 0).all()
    found = model.forward(second, "logits", kv_cache)
    assert kv_cache.lengths == [20, 9, 30, 12, 7]
    assert found[3].size == 0
    for b in (0, 1, 4):
        Truth(model, rows[b]).check(found[b], "logits", slice(len(first[b]), None))
        alone = model.new_cache(1, 40)
        if len(first[b]):
            model.forward([first[b]], "last", alone)
        (logits,) = model.forward([second[b]], "logits", alone)
        np.testing.assert_array_equal(logits, found[b])


@one_fp8
def test_a_batch_has_the_bits_of_each_sequence(ran: list[str], dtype: str) -> None:
    model = on(TINY, dtype)
    rows = [random_ids(TINY, n, n) for n in (1, 20, 9)]
    for want in ("last", "hidden"):
        together = model.forward(rows, want)
        for ids, got in zip(rows, together, strict=True):
            np.testing.assert_array_equal(model.forward([ids], want)[0], got)


@one_fp8
def test_steps_alone_and_traced(ran: list[str], dtype: str) -> None:
    """As `compare` runs them: two-part tensors are filled from exact ones."""
    model = on(TINY, dtype)
    ids = random_ids(TINY, 18)
    w = stored(model)
    b = w.blocks[0]
    x = reference.encoder(ids, w.wte, w.wpe).astype(np.float64)
    exact = {"embedding": x, "h.0.ln1": reference.layernorm(x, b.gamma1, b.beta1, b.eps)}
    exact["h.0.qkv"] = exact["h.0.ln1"] @ b.w_qkv.astype(np.float64) + b.b_qkv
    exact["h.0.attn"] = reference.attention(exact["h.0.qkv"], b.n_head, causal=True)
    found = {row.name: row for row in model.run_alone(ids, False, exact)}
    assert set(found) == set(exact)
    traced = model.trace(ids, False)
    limit = 1e-5 if dtype == "float32" else 3e-3
    for name, truth in exact.items():
        for got in (found[name].out, traced[name]):
            assert np.abs(got - truth).max() <= limit * np.abs(truth).max(), name


@pytest.mark.parametrize(("gamma", "beta"), [(3, 1), (0.01, 100)])
def test_bounds_hold_for_the_operands(gamma: float, beta: float) -> None:
    """For tokens and for what is far larger than any, with γ and β that are not alike.

    Norms: exact ones, as with FP8, or what follows from the largest magnitudes.
    """
    rng = np.random.default_rng(0)
    w = weights(TWO_LAYERS)
    block = replace(
        w.blocks[0],
        gamma2=rng.normal(size=64).astype(np.float32) * np.float32(gamma),
        beta2=w.blocks[0].beta2 * np.float32(beta),
    )
    w = replace(w, blocks=(block, *w.blocks[1:]))
    tensors = {name: a for name, a, _ in w.tensors()}
    largest = {name: float(np.abs(a).max()) for name, a in tensors.items()}
    exact = operand_bounds(
        TWO_LAYERS, largest, lambda w, gamma: np.linalg.norm(tensors[w].T * tensors[gamma], axis=1)
    )
    bounds = operand_bounds(
        TWO_LAYERS, largest, lambda w, gamma: np.array([8 * largest[w] * largest[gamma]])
    )
    operands = [f"h.{n}.{k}" for n in range(2) for k in ("ln1", "qkv", "ln2", "gelu")]
    assert list(exact) == list(bounds) == ["ln_f", *operands]
    assert exact["h.0.gelu"] < bounds["h.0.gelu"] / 2
    for size in (1e-3, 1.0, 1e6):
        x = rng.normal(size=(64, 64)) * size
        x[0, 5] *= 1e6  # nearly all of a row's deviation
        norm = reference.layernorm(x, block.gamma2, block.beta2, block.eps)
        assert np.abs(norm).max() <= exact["h.0.ln2"] == bounds["h.0.ln2"]
        assert np.abs(reference.gelu(norm @ block.w_fc + block.b_fc)).max() <= exact["h.0.gelu"]


def test_weights_that_float16_or_scales_cannot_hold(ran: list[str]) -> None:
    """Prompts are then computed in float32.

    The norm of a row of 64 weights counts, not 64 times the largest of them.
    """
    w = weights(TINY)

    def with_weight(value: float) -> GPT2Weights:
        large = w.blocks[0].w_fc.copy()
        large[3, 4] = value
        return replace(w, blocks=(replace(w.blocks[0], w_fc=large),))

    final = replace(w, gamma_f=w.gamma_f * np.float32(1e4))
    for other, products in ((with_weight(4e3), "fp8"), (final, "float32")):
        assert CudaModel(TINY, other.tensors(), DTYPES[1], 0).products == products
    tensors = list(with_weight(1e4).tensors())
    chosen = {d: CudaModel(TINY, tensors, d, 0).products for d in (*DTYPES, "float16")}
    assert chosen == {
        "float32": "two_part",
        "float8_e4m3fn": "float32",
        "float8_e5m2": "float32",
        "float16": "16_bits",
    }
    tensors = [(n, np.full_like(a, np.inf) if n == "h.0.b_fc" else a, k) for n, a, k in tensors]
    assert CudaModel(TINY, tensors, "float32", 0, allow_nonfinite=True).products == "float32"
    narrow = replace(TINY, n_head=2)
    assert CudaModel(narrow, weights(narrow).tensors(), "float32", 0).products == "float32"


# --- on the GPU -----------------------------------------------------------------------------------


@cache
def model_on_gpu(dtype: str) -> Any:
    engine: Any = GPT2(weights(SMALL), "cuda", dtype).engine
    if engine.products != PRODUCTS[dtype]:
        pytest.skip("needs tensor cores of compute capability 8.0")
    return engine


@pytest.mark.gpu
@every_dtype
@pytest.mark.parametrize("length", [1, 17, 300])
def test_a_sequence_on_the_gpu(dtype: str, length: int) -> None:
    model = model_on_gpu(dtype)
    truth = Truth(model, random_ids(SMALL, length))
    for _ in range(3):  # launches, a graph, the graph again
        truth.check(model.forward([truth.ids], "last")[0], "last", -1)
    truth.check(model.forward([truth.ids], "logits")[0], "logits")
    truth.check(model.forward([truth.ids], "hidden")[0], "hidden")


@pytest.mark.gpu
@every_dtype
def test_batches_on_the_gpu(dtype: str) -> None:
    model = model_on_gpu(dtype)
    rows = [random_ids(SMALL, n, n) for n in (300, 1, 17, 128, 65)]
    cuts = (130, 0, 16, 128, 1)
    for want in ("last", "logits", "hidden"):
        for ids, got in zip(rows, model.forward(rows, want), strict=True):
            np.testing.assert_array_equal(model.forward([ids], want)[0], got)
    for ids, got in zip(rows, model.log_likelihood(rows), strict=True):
        np.testing.assert_array_equal(model.log_likelihood([ids])[0], got)
    kv_cache = model.new_cache(5, 300)
    model.forward([ids[:n] for ids, n in zip(rows, cuts, strict=True)], "last", kv_cache)
    found = model.forward([ids[n:] for ids, n in zip(rows, cuts, strict=True)], "logits", kv_cache)
    for ids, n, got in zip(rows, cuts, found, strict=True):
        if len(ids) > n:
            Truth(model, ids).check(got, "logits", slice(n, None))

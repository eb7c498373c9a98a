"""Prompts of GPT-2 on tensor cores: 16 bits, float32 as hi/lo terms, and FP8 as float16.

tests/engine/test_architectures_cuda.py compares the steps of such prompts with float64. Without a
GPU, the emulator runs the launches of a whole model.
"""

from __future__ import annotations

import gc
import itertools
import re
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from gpt2block import GPT2Config, cuda, reference
from gpt2block.cuda import kernels, overlap, requests
from gpt2block.cuda.formats import Formats
from gpt2block.emulator import stand_in
from gpt2block.engine.cuda import model as cuda_model
from gpt2block.engine.cuda.model import CudaModel
from gpt2block.engine.inspect.compare import exact_tensors
from gpt2block.engine.model import padded
from gpt2block.engine.passes.bounds import bounds_of
from gpt2block.files.parameters.gpt2 import GPT2Weights
from gpt2block.ops.gemm import OPERATION as GEMM
from tests.devices import GPU, running_on, slow
from tests.gpus import HOPPER_CAPABILITY, MMA_CAPABILITY, cupy_with

Array = NDArray[Any]
TINY = GPT2Config(n_layer=1, n_head=1, n_embd=64, n_ctx=40, vocab_size=53)
TWO_LAYERS = replace(TINY, n_layer=2)
TWO_HEADS = replace(TWO_LAYERS, n_head=2, n_embd=128)
SMALL = GPT2Config(n_layer=3, n_head=4, n_embd=256, n_ctx=300, vocab_size=501)
DTYPES = ("bfloat16", "float16")
PRODUCTS = {
    **dict.fromkeys(DTYPES, "16_bits"),
    "float32": "hi_lo",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
}
# Limit of the error of logits, relative to the largest
ROUNDING = {"bfloat16": 2.0**-6, "float16": 2.0**-9}
in_16_bits = pytest.mark.parametrize("dtype", DTYPES)
on_gpu = [pytest.param("gpu", SMALL, dtype, marks=GPU.marks) for dtype in PRODUCTS]
emulated = pytest.mark.parametrize("machine", ["forward"], indirect=True)


@cache
def weights(config: GPT2Config) -> GPT2Weights:
    """Return weights with a larger w_qkv, so that attention weights are not almost equal."""
    w = GPT2Weights.random(3, config)
    return replace(w, blocks=tuple(replace(b, w_qkv=4 * b.w_qkv) for b in w.blocks))


def random_ids(config: GPT2Config, length: int, seed: int = 0) -> Array:
    rng = np.random.default_rng((seed, length))
    return rng.integers(config.vocab_size, size=length, dtype=np.int32)


def assert_rounding(got: Array, exact: Array, largest: Array, dtype: str) -> None:
    """Assert that results in 16 bits differ from float64 by rounding."""
    assert np.abs(got - exact).max() <= ROUNDING[dtype] * np.abs(largest).max()


class Machine:
    """A GPU, or the emulator with overlapping launches, which records the kernels that run."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.early: list[str] = []  # kernels that were launched to overlap the previous one


@pytest.fixture
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    found = Machine()
    run_kernel = stand_in.EmulatedFunction._run

    def run(self: Any, *args: Any) -> None:
        found.ran.append(self.name)
        run_kernel(self, *args)

    def run_early(launch: requests.Launch) -> None:
        found.early.append(launch.name)
        launch.run()

    with running_on(request.param):
        if cuda.replaced():
            monkeypatch.setattr(stand_in.EmulatedFunction, "_run", run)
            monkeypatch.setattr(overlap, "possible", lambda: True)
            monkeypatch.setattr(overlap, "run", run_early)
        yield found


def made(config: GPT2Config, dtype: str) -> CudaModel:
    model = CudaModel(config, weights(config).tensors(), Formats(dtype), 0)
    if not cuda.replaced() and model.products != PRODUCTS[dtype]:
        pytest.skip("needs tensor cores of compute capability 8.0")
    assert model.products == PRODUCTS[dtype]
    return model


def several_times(call: Callable[[], list[Array]]) -> list[Array]:
    """Call once; on a GPU three times (launches, captures, replays), which must be equal."""
    first = call()
    for _ in range(0 if cuda.replaced() else 2):
        for a, b in zip(first, call(), strict=True):
            np.testing.assert_array_equal(a, b)
    return first


@pytest.mark.parametrize(
    ("machine", "config", "dtype"),
    [
        ("forward", TWO_HEADS, "bfloat16"),
        slow("forward", TWO_LAYERS, "float32"),
        slow("forward", TINY, "float8_e4m3fn"),
    ],
    indirect=["machine"],
)
def test_the_kernels_of_a_prompt(machine: Machine, config: GPT2Config, dtype: str) -> None:
    model, ids, layers = made(config, dtype), random_ids(config, 15), config.n_layer
    machine.ran.clear()
    last = model.forward([ids], "last")[0]
    ran = list(machine.ran)
    product = "gemm_split_mma" if dtype == "float32" else "gemm_mma"
    assert ran.count(product) == 4 * layers - (3 if dtype == "float32" else 2)
    assert ran.count("widen_fp8") == (4 * layers - 2 if "8_e" in dtype else 0)
    assert "linear_tiles" not in ran
    assert model._scratch([ids]).nbytes == 0  # no cache is kept or filled
    machine.early.clear()
    np.testing.assert_array_equal(model.forward([ids], "last")[0], last)
    assert machine.early == ran  # the second call captures a graph
    if dtype != "bfloat16":
        return
    exact = exact_tensors(model, ids)["logits"]
    assert_rounding(last, exact[-1], exact, dtype)
    machine.ran.clear()
    kv_cache, (hidden,) = model.new_cache(4, 40), model.forward([ids], "hidden")
    assert machine.ran.count("attention_mma") == layers
    for chunk in ([ids[:5], ids[:0], ids[:6], ids[:3]], [ids[5:9], ids[:4], ids[6:7], ids[:0]]):
        rows = model.forward(chunk, "logits", kv_cache)
    assert kv_cache.lengths == [9, 4, 7, 3]
    assert_rounding(rows[0], exact[5:9], exact, dtype)
    assert_rounding(rows[1], exact[:4], exact, dtype)
    # first chunks need no attention over the cache
    assert machine.ran.count("attention_cached_mma") == layers
    assert machine.ran.count("kv_append_narrow") == 3 * layers
    assert hidden.shape == (15, config.n_embd)


def test_the_kernels_of_a_prompt_wait_for_the_one_before() -> None:
    names = {
        "encoder_rows", "layernorm_narrow_float", "gemm_mma", "attention_mma", "decode_mma",
    }  # fmt: skip
    files = [path for path in kernels.sources() if set(kernels.signatures(path)) & names]
    others = "attention/prompt/cores.cu", "attention/cache/kv_cache.cu", "matmul/prompt/wgmma.cu"
    for file in (*files, *others):
        every, headers = kernels.read_source(file), set[str]()
        while more := {name for name in every.split('"') if name.endswith(".cuh")} - headers:
            headers |= more
            paths = [kernels.SOURCE_DIR / name for name in sorted(more)]
            every += "".join(path.read_text("ascii") for path in paths if path.is_file())
        assert "let_next_start();" in every, file
        assert re.search(r"wait_(for_previous|before_copies)\(\);", every), file


@pytest.mark.parametrize(
    ("machine", "config", "dtype"),
    [("forward", TWO_HEADS, "bfloat16"), slow("forward", TINY, "float32"), *on_gpu],
    indirect=["machine"],
)
def test_a_batch_has_the_bits_of_each_sequence(
    machine: Machine, config: GPT2Config, dtype: str
) -> None:
    """Outputs include "last", which omits all other rows after the last attention."""
    model: Any = made(config, dtype)
    lengths, sizes, wants = [5, 9], [2], ["last", "hidden"]
    if not cuda.replaced():
        lengths, sizes = [1, 300, 127, 17, 128, 129, 64, 2], [2, 5, 8]
        wants += ["logits", "states"]
    rows = [random_ids(config, n, seed=n) for n in lengths]

    def everything(which: list[Array]) -> list[list[Array]]:
        found = [several_times(partial(model.forward, which, want)) for want in wants]
        return found if cuda.replaced() else [*found, model.log_likelihood(which)]

    alone = [everything([ids]) for ids in rows]
    for size in sizes:
        for kind, together in enumerate(everything(rows[-size:])):
            for own, got in zip(alone[-size:], together, strict=True):
                np.testing.assert_array_equal(got, own[kind][0])


@emulated
def test_likelihoods_of_a_padded_batch(machine: Machine) -> None:
    """A graph for one batch is replayed for another batch of the same padded shape."""
    model = made(TWO_HEADS, "bfloat16")
    texts = [random_ids(TWO_HEADS, n, b) for b, n in enumerate((33, 20, 2))]
    for number, several in enumerate((texts, texts[::-1])):
        machine.ran.clear()
        machine.early.clear()
        batch = padded(several)
        assert (len(batch), sum(map(len, batch))) == (4, 56)
        cache = model._scratch(batch, repeats=True)
        prefill = model.prefill(batch, cache, "log_likelihood")
        nats = np.split(prefill.out.get(), prefill.ends[:-1])
        for ids, got in zip(several, nats[:3], strict=True):
            exact = exact_tensors(model, ids)
            assert_rounding(got[:-1], exact["scores"][:-1], exact["logits"], "bfloat16")
        assert machine.ran[-1] == "log_likelihood_kernel"
        assert machine.early == (machine.ran if number == 1 else [])  # captured by the second call
    assert len(cache.prefills) == 1


@given(st.lists(st.integers(1, 1024), min_size=1, max_size=300))
def test_padded_batches(lengths: list[int]) -> None:
    """The sequences remain unchanged; the added ones are few and short."""
    group = [np.full(n, 7, np.int32) for n in lengths]
    filled = padded(group)
    assert all(a is b for a, b in zip(group, filled, strict=False))
    added = filled[len(group) :]
    assert sum(map(len, added)) <= sum(lengths) / 16
    assert all(len(ids) <= max(lengths) and not ids.any() for ids in added)
    assert len(added) <= len(group) / 4 + sum(lengths) / 16 / max(lengths) * 1.25 + 2
    again = padded(filled)
    assert sum(map(len, again)) == sum(map(len, filled))


def test_few_shapes_for_batches_of_a_size() -> None:
    """Batches of 8,000 to 8,192 tokens in 20 to 40 sequences have at most 10 shapes."""
    found = set()
    for tokens, count in itertools.product(range(8000, 8193, 3), range(20, 41)):
        filled = padded(np.array_split(np.zeros(tokens, np.int32), count))
        found.add((sum(map(len, filled)), len(filled)))
    assert len(found) <= 10


@emulated
def test_a_model_does_not_live_on_in_its_prefills(machine: Machine) -> None:
    model = made(TINY, "bfloat16")
    model.forward([random_ids(TINY, 3)], "last")
    seen = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert seen() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(("gamma", "beta"), [(3, 1), (0.01, 100)])
def test_bounds_hold_for_the_operands(gamma: float, beta: float) -> None:
    """Bounds hold for usual and for far larger inputs, with different γ and β.

    Bounds use exact norms of weights, as with FP8, or norms estimated from largest magnitudes.
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
    _, exact = bounds_of(
        TWO_LAYERS, largest, lambda w, gamma: np.linalg.norm(tensors[w].T * tensors[gamma], axis=1)
    )
    _, bounds = bounds_of(TWO_LAYERS, largest)
    operands = [f"h.{n}.{k}" for n in range(2) for k in ("ln1", "qkv", "ln2", "gelu")]
    assert list(exact) == list(bounds) == [*operands, "ln_f"]
    assert exact["h.0.gelu"] < bounds["h.0.gelu"] / 2
    for size in (1e-3, 1.0, 1e6):
        x = rng.normal(size=(64, 64)) * size
        x[0, 5] *= 1e6  # a value that dominates the row's deviation
        norm = reference.layernorm(x, block.gamma2, block.beta2, block.eps)
        assert np.abs(norm).max() <= exact["h.0.ln2"] == bounds["h.0.ln2"]
        assert np.abs(reference.gelu(norm @ block.w_fc + block.b_fc)).max() <= exact["h.0.gelu"]


@emulated
def test_weights_that_float16_or_scales_cannot_hold(machine: Machine) -> None:
    """Prompts are then computed in float32.

    The norm of a row of 64 weights decides, not 64 times the largest weight.
    """
    w = weights(TINY)

    def with_weight(value: float) -> GPT2Weights:
        large = w.blocks[0].w_fc.copy()
        large[3, 4] = value
        return replace(w, blocks=(replace(w.blocks[0], w_fc=large),))

    def products(w: GPT2Weights, dtype: str, **changed: Any) -> str:
        tensors = [(name, changed.get(name, a), layout) for name, a, layout in w.tensors()]
        formats = Formats(dtype, allow_nonfinite=bool(changed))
        return str(CudaModel(w.config, tensors, formats, 0).products)

    final = replace(w, gamma_f=w.gamma_f * np.float32(1e4))
    assert products(with_weight(4e3), "float8_e4m3fn") == "fp8"
    assert products(final, "float8_e4m3fn") == "float32"
    too_large = {dtype: "float32" if "8_e" in dtype else PRODUCTS[dtype] for dtype in PRODUCTS}
    del too_large["bfloat16"]
    assert {d: products(with_weight(1e4), d) for d in too_large} == too_large
    infinite = np.full(256, np.inf, np.float32)
    assert products(w, "float32", **{"h.0.b_fc": infinite}) == "float32"
    assert products(weights(replace(TINY, n_head=2)), "float32") == "float32"


# --- on the GPU -----------------------------------------------------------------------------------


@pytest.mark.gpu
@in_16_bits
def test_likelihoods_of_many_groups(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes repeat or have been evicted; a longer group makes the buffers grow."""
    model = made(SMALL, dtype)
    for name, value in (("TOKENS_AT_ONCE", 128), ("KEPT_COUNTS", 2), ("KEPT_OF_COUNT", 2)):
        monkeypatch.setattr(cuda_model, name, value)
    lengths = np.random.default_rng(0).integers(2, 100, 60).tolist()
    rows = [random_ids(SMALL, n, seed) for seed, n in enumerate(lengths)]
    rows.insert(30, random_ids(SMALL, 300))
    together = several_times(lambda: model.log_likelihood(rows))
    for ids, got in zip(rows, together, strict=True):
        np.testing.assert_array_equal(got, model.log_likelihood([ids])[0])


@pytest.mark.gpu
@in_16_bits
@pytest.mark.parametrize("variant", ["mma", "wgmma"])
def test_either_tier(dtype: str, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both variants run, even the one that this GPU would not choose."""
    cupy_with(HOPPER_CAPABILITY if variant == "wgmma" else MMA_CAPABILITY)
    model = made(SMALL, dtype)
    gemm = replace(GEMM, variants=(GEMM.variant(variant),))
    monkeypatch.setattr(import_module("gpt2block.ops.gemm"), "OPERATION", gemm)
    monkeypatch.setattr(import_module("gpt2block.ops.attention"), "TENSOR_CORES", (variant,))
    for b, length in enumerate((63, 257)):
        ids = random_ids(SMALL, length, b)
        exact = exact_tensors(model, ids)["logits"]
        assert_rounding(model.forward([ids], "logits")[0], exact, exact, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float8_e5m2", "bfloat16"])
def test_heads_that_stay_in_float32(dtype: str) -> None:
    config = replace(SMALL, n_head=8)
    assert not CudaModel(config, weights(config).tensors(), Formats(dtype), 0).on_tensor_cores

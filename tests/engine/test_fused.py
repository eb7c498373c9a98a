"""Block on tensor cores: the seven steps of fused kernels, with NumPy and on a GPU.

The rule for 16 bits on the GPU: the error against float64, on the same rounded weights and x, is at
most twice the error of NumPy plus one rounding (half a unit in the last place) of the largest
value. NumPy computes steps in float32 and rounds each result to the dtype. In float32 the error is
no larger than with the kernels of LeetGPU's challenge.
"""

from __future__ import annotations

import re
import weakref
from contextlib import nullcontext
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from gpt2block import Block, BlockWeights, GPT2Config, random_input, reference
from gpt2block import block as block_module
from gpt2block.block import fused_problem, hi_lo_problem, rounded
from gpt2block.checks import FLOATS
from gpt2block.cuda import kernels, overlap, requests
from gpt2block.engine.cuda.block import CudaEngine
from tests.devices import running_on
from tests.gpus import cupy_with

Array = NDArray[Any]
SMALL = GPT2Config(n_head=3, n_embd=48)
HEAD_64 = GPT2Config(n_head=2, n_embd=128)
DTYPES = ("bfloat16", "float16")
SEVEN = ["ln1", "qkv", "attn", "x1", "ln2", "gelu", "output"]
ALL = (*DTYPES, "float32")
in_16_bits = pytest.mark.parametrize("dtype", DTYPES)
both_masks = pytest.mark.parametrize("causal", [False, True])


def inputs(seed: int, shape: tuple[int, ...], dtype: str) -> Array:
    return np.asarray(random_input(seed, shape).astype(FLOATS[dtype]))


def half_a_unit(dtype: str) -> float:
    fraction = ml_dtypes.finfo(FLOATS[dtype]).nmant  # type: ignore[no-untyped-call]
    return 2.0 ** -(int(fraction) + 1)


def exact(x: Array, weights: BlockWeights, dtype: str, causal: bool) -> Array:
    """Compute the block in float64 from x and weights rounded to `dtype`."""
    return reference.block_forward(x.astype(np.float64), rounded(weights, dtype), causal)


def assert_as_accurate(
    got: Array,
    x: Array,
    weights: BlockWeights,
    causal: bool,
    on_gpu: bool = True,
    mean: bool = True,
) -> None:
    """Assert that `got`, the result of fused kernels for x, follows the rules of this file.

    on_gpu: whether float32 follows its own rule, not the rule of 16 bits. mean: in float32 on a
    GPU, also compare the mean square of errors.
    """
    dtype = got.dtype.name
    truth = exact(x, weights, dtype, causal)
    options: Any = {"kernels": "fused", "device": "cpu"}
    if dtype == "float32" and on_gpu:
        options = {"kernels": "skeleton", "device": "cuda"}
    peer = Block(weights, causal=causal, dtype=dtype, **options)(x)
    assert (got.shape, got.dtype) == (truth.shape, peer.dtype)
    assert np.isfinite(got.astype(np.float64)).all(), "an element was not written"
    own, other = (np.abs(result.astype(np.float64) - truth) for result in (got, peer))
    error, limit = float(own.max()), float(other.max())
    if dtype == "float32" and on_gpu:
        assert not mean or (own**2).mean() <= (other**2).mean()
    else:
        limit = 2 * limit + half_a_unit(dtype) * float(np.abs(truth).max())
    assert error <= limit, f"error {error:.3g} is over {limit:.3g}"


# --- with NumPy -----------------------------------------------------------------------------------


@pytest.fixture
def weights() -> BlockWeights:
    return BlockWeights.random(0, SMALL)


@in_16_bits
@both_masks
@pytest.mark.parametrize("shape", [(1, 48), (2, 5, 48)])
def test_every_step_is_float32_and_its_result_is_rounded(
    weights: BlockWeights, shape: tuple[int, ...], causal: bool, dtype: str
) -> None:
    def stored(values: Array) -> Array:
        return np.asarray(values.astype(FLOATS[dtype]))

    def wide(values: Array) -> Array:
        return np.asarray(values.astype(np.float32))

    x, w = inputs(0, shape, dtype), weights
    ln1 = stored(reference.layernorm(wide(x), w.gamma1, w.beta1, w.eps))
    qkv = stored(wide(ln1) @ wide(stored(w.w_qkv)) + w.b_qkv)
    attn = stored(reference.attention(wide(qkv), w.n_head, causal))
    x1 = stored(wide(x) + (wide(attn) @ wide(stored(w.w_attn)) + w.b_attn))
    ln2 = stored(reference.layernorm(wide(x1), w.gamma2, w.beta2, w.eps))
    gelu = stored(reference.gelu(wide(ln2) @ wide(stored(w.w_fc)) + w.b_fc))
    output = stored(wide(x1) + (wide(gelu) @ wide(stored(w.w_proj)) + w.b_proj))

    block = Block(weights, causal=causal, device="cpu", dtype=dtype)
    assert (block.dtype, block.kernels) == (dtype, "fused")
    trace = block.trace(x)
    assert list(trace) == SEVEN
    for name, expected in zip(SEVEN, (ln1, qkv, attn, x1, ln2, gelu, output), strict=True):
        assert trace[name].dtype == FLOATS[dtype]
        np.testing.assert_array_equal(trace[name], expected)
    np.testing.assert_array_equal(block(x), output)
    out = np.zeros(shape, FLOATS[dtype])
    assert block(x, out=out) is out
    np.testing.assert_array_equal(out, output)


def test_where_the_fused_kernels_run(
    weights: BlockWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    fits = BlockWeights.random(0, HEAD_64)
    assert fused_problem(fits, 75) is None
    wide: Any = SimpleNamespace(n_head=257, n_embd=257 * 64)
    assert "takes 16,384 channels at most, not 16,448" in str(fused_problem(wide, 90))
    monkeypatch.setattr("gpt2block.cuda.cards.capability_of", lambda _: 70)
    assert block_module._choose("auto", "float32", fits, 0) == "skeleton"


def test_weights_that_scales_cannot_follow_from(
    weights: BlockWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpt2block.cuda.cards.capability_of", lambda _: 90)
    choose, fits = block_module._choose, BlockWeights.random(0, HEAD_64)
    assert hi_lo_problem(fits) is None
    assert choose("auto", "float32", fits, 0) == "fused"
    for name, value in (("w_proj", np.nan), ("beta2", -np.inf), ("w_qkv", 3e38), ("gamma2", 1e38)):
        tensor = getattr(fits, name).copy()
        tensor.flat[7] = value
        changed: dict[str, Any] = {name: tensor}
        wrong = replace(fits, **changed)
        assert choose("auto", "float32", wrong, 0) == "skeleton"
        assert choose("fused", "float32", wrong, None) == "fused"
    assert choose("auto", "float32", weights, 0) == "skeleton"


@pytest.mark.parametrize("able", [False, True])
def test_a_graph_of_waiting_kernels_is_made_of_overlapping_launches(
    monkeypatch: pytest.MonkeyPatch, able: bool
) -> None:
    class Stream(nullcontext[None]):
        def begin_capture(self) -> None: ...
        def end_capture(self) -> str:
            return "graph"

    early: list[Any] = []
    monkeypatch.setattr(overlap, "possible", lambda: able)
    monkeypatch.setattr(overlap, "run", early.append)
    plain: list[Any] = []
    monkeypatch.setattr(requests.Launch, "run", lambda self: plain.append(self))  # noqa: PLW0108
    launches = [requests.Launch(name, None, (1,), (1,), ()) for name in "ab"]
    for overlapping in (False, True):
        early.clear()
        plain.clear()
        assert overlap.capture(launches, Stream(), overlapping) == "graph"
        assert (early if able and overlapping else plain) == launches


# --- the kernels on the CPU -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "shape", "causal", "order"),
    [
        ("bfloat16", (2, 37, 128), True, "reverse"),
        ("float16", (5, 64), False, "shuffled"),
        ("float32", (2, 21, 64), True, "shuffled"),
        ("float32", (5, 128), False, "reverse"),
    ],
)
def test_the_steps_in_a_row_and_every_kernel_waits(
    monkeypatch: pytest.MonkeyPatch, dtype: str, shape: tuple[int, ...], causal: bool, order: str
) -> None:
    """The emulator runs the launches of a GPU of compute capability 8.0, with its buffers."""
    weights = BlockWeights.random(0, GPT2Config(n_head=shape[-1] // 64, n_embd=shape[-1]))
    x = inputs(1, shape, dtype)
    files: dict[str, str] = {}
    load = kernels.load

    def recorded(file: str, name: str, defines: kernels.Defines = ()) -> Any:
        files[name] = file
        return load(file, name, defines)

    with running_on(order, 108):
        block = Block(
            weights, causal=causal, device="cuda", dtype=dtype, kernels="fused", graph=False
        )
        monkeypatch.setattr(kernels, "load", recorded)
        got = block(x)
    assert_as_accurate(got, x, weights, causal, on_gpu=False)
    assert len(files) == 3
    for name, file in files.items():
        text = kernels.read_source(file)
        headers = re.findall(r'#include "(.*)"', text)
        every = text + "".join((kernels.SOURCE_DIR / header).read_text() for header in headers)
        for call in ("let_next_start();", "wait_for_previous();"):
            assert call in every, f"{name} of {file}: {call}"


# --- on the GPU -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cp() -> ModuleType:
    return cupy_with()


@pytest.fixture(scope="module")
def gpt2() -> BlockWeights:
    return BlockWeights.random(0)


def poison(block: Block) -> None:
    """Fill the memory of all activations with NaN, so that values never written show."""
    engine = block._engine
    assert isinstance(engine, CudaEngine)
    arena = engine._recordings._arena
    if arena is not None:
        arena._memory.fill(0xFF)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize(
    ("T", "heads", "causal"),
    [
        *((T, 12, causal) for T in (1, 17, 100, 128, 1000, 1024) for causal in (False, True)),
        *((33, heads, True) for heads in (1, 2, 25)),
    ],
)
def test_accuracy(cp: ModuleType, T: int, heads: int, causal: bool, dtype: str) -> None:
    """Repeated calls and graphs give the same bits; a sequence alone may split sums over K."""
    usual = heads == 12
    gpt2 = BlockWeights.random(int(not usual), GPT2Config(n_head=heads, n_embd=64 * heads))
    x = inputs(T if usual else 0, (3 if usual else 2, T, 64 * heads), dtype)
    block = Block(gpt2, causal=causal, device="cuda", dtype=dtype, kernels="fused")
    on_device, out = cp.asarray(x), cp.empty(x.shape, dtype)
    found = []
    for _ in range(3):  # launches, captures, replays
        poison(block)
        out.fill(np.nan)
        found.append(block(on_device, out=out).get())
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])
    assert_as_accurate(found[0], x, gpt2, causal, mean=usual)
    if not usual:
        return
    poison(block)
    if dtype == "float32":
        np.testing.assert_array_equal(block(x[0]), found[0][0])
    for b in range(1 if dtype == "float32" else 3):
        assert_as_accurate(block(x[b]), x[b], gpt2, causal)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1e-6, 1e6])
def test_an_x_of_any_size(cp: ModuleType, gpt2: BlockWeights, size: float) -> None:
    x = random_input(0, (100, 768)) * np.float32(size)
    x[:, 5] *= 100
    x[3] = 0
    truth = reference.block_forward(x.astype(np.float64), gpt2, True)
    fused, skeleton = (
        float(np.abs(Block(gpt2, True, "cuda", kernels=kernels)(x) - truth).max())
        for kernels in ("fused", "skeleton")
    )
    assert fused <= skeleton


@pytest.mark.gpu
def test_overlapping_replays_do_not_mix(cp: ModuleType, gpt2: BlockWeights) -> None:
    """Replays of sizes from one block to many are queued one after the other."""
    direct = Block(gpt2, causal=True, device="cuda", dtype="bfloat16", graph=False)
    block = Block(gpt2, causal=True, device="cuda", dtype="bfloat16")
    xs = [cp.asarray(inputs(T, (T, 768), "bfloat16")) for T in (1, 100, 1024, 4096)]
    expected = [direct(x).get() for x in xs]
    outs = [cp.empty_like(x) for x in xs]
    for _ in range(30):
        for out in outs:
            out.fill(np.nan)
        for _ in range(3):
            for x, out in zip(xs, outs, strict=True):
                block(x, out=out)
        for out, want in zip(outs, expected, strict=True):
            np.testing.assert_array_equal(out.get(), want)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_replay_follows_what_x_holds(cp: ModuleType, gpt2: BlockWeights, dtype: str) -> None:
    """Replays read the current x, also in place; an unaligned or strided x is copied."""
    block, direct = (
        Block(gpt2, device="cuda", dtype=dtype, graph=graph) for graph in (True, False)
    )
    assert (block.kernels, direct.kernels) == ("fused", "fused")
    if dtype == "float32":
        assert block.weight_bytes == 4 * (12 * 768 * 768 + 13 * 768 + 9 * 768)  # 9 * 768: scales
    shape = 2, 30, 768
    x, out = cp.empty(shape, dtype), cp.empty(shape, dtype)
    for seed in range(5):
        x.set(inputs(seed, shape, dtype))
        expected = direct(x).get()
        np.testing.assert_array_equal(block(x, out=out).get(), expected)
    np.testing.assert_array_equal(block(x, out=x).get(), expected)  # in place
    memory = cp.zeros(60 * 768 + 1, dtype)
    odd = memory[1:].reshape(shape)
    odd[...] = cp.asarray(inputs(4, shape, dtype))
    assert odd.data.ptr % 16
    for given in (odd, cp.repeat(odd, 2, axis=2)[:, :, ::2]):
        np.testing.assert_array_equal(block(given).get(), expected)


@pytest.mark.gpu
def test_the_callers_stream_and_two_streams(cp: ModuleType, gpt2: BlockWeights) -> None:
    block = Block(gpt2, device="cuda", dtype="bfloat16")
    xs = [cp.asarray(inputs(seed, (256, 768), "bfloat16")) for seed in range(2)]
    outs = [cp.empty_like(x) for x in xs]
    expected = [block(x).get() for x in xs]
    cp.cuda.Device().synchronize()
    streams = [cp.cuda.Stream(non_blocking=True) for _ in xs]
    for _ in range(10):
        for x, out, stream in zip(xs, outs, streams, strict=True):
            with stream:
                out.fill(np.nan)
                block(x, out=out)
    for stream in streams:
        stream.synchronize()
    for out, want in zip(outs, expected, strict=True):
        np.testing.assert_array_equal(out.get(), want)


@pytest.mark.gpu
def test_a_warm_call_with_out_allocates_nothing(
    cp: ModuleType, gpt2: BlockWeights, allocations: list[int]
) -> None:
    block = Block(gpt2, device="cuda", dtype="bfloat16")
    x = cp.asarray(inputs(0, (30, 768), "bfloat16"))
    out = cp.empty_like(x)
    block(x, out=out)
    allocations.clear()
    for _ in range(5):
        assert block(x, out=out) is out
    assert allocations == []


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "value"), [("bfloat16", np.nan), ("float32", np.nan), ("float32", np.inf)]
)
def test_nan_stays_in_the_rows_that_see_it(
    cp: ModuleType, gpt2: BlockWeights, dtype: str, value: float
) -> None:
    block = Block(gpt2, causal=True, device="cuda", dtype=dtype)
    x = inputs(0, (2, 70, 768), dtype)
    clean = block(x)
    x[1, 40, 5] = value
    got = block(x)
    np.testing.assert_array_equal(got[0], clean[0])
    np.testing.assert_array_equal(got[1, :40], clean[1, :40])
    assert np.isnan(got[1, 40:].astype(np.float32)).all()


@pytest.mark.parametrize("kernels", ["skeleton", "fused"])
def test_a_block_keeps_neither_input_nor_result(kernels: str) -> None:
    """The next call gets the same memory, so a graph with these addresses can be replayed."""
    weights = BlockWeights.random(0, GPT2Config(n_head=1, n_embd=64))
    with running_on("forward") as cupy:
        block = Block(weights, device="cuda", kernels=kernels)
        x = cupy.asarray(random_input(1, (5, 64)))
        first = block(x)
        expected, gone = first.get(), [weakref.ref(first.base), weakref.ref(x.base)]
        np.testing.assert_array_equal(block(x, out=first).get(), expected)
        del first, x
        assert [memory() for memory in gone] == [None, None]

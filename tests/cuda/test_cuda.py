"""Block and its ops on a GPU: accuracy at every length, streams, graphs, memory and devices."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import gpt2block
from gpt2block import (
    SIZES,
    BlockWeights,
    GPT2Config,
    InputError,
    random_input,
    reference,
)
from gpt2block.cuda import kernels, overlap, requests
from tests import plain
from tests.command_line import python
from tests.gpus import large_memory

pytest.importorskip("cupy", reason="these tests need CuPy and a GPU")
import cupy as cp

from gpt2block.cuda.formats import DTYPES
from gpt2block.engine.cuda.block import MAX_CALLS, MAX_SHAPES, CudaEngine

pytestmark = pytest.mark.gpu
Block = partial(gpt2block.Block, kernels="skeleton")  # kernels of LeetGPU's challenge
SMALL = GPT2Config(n_head=3, n_embd=48)
TOLERANCE = 1e-3  # atol and rtol of LeetGPU's challenge


@pytest.fixture(scope="module")
def gpt2() -> BlockWeights:
    return BlockWeights.random(0)


def close_to(got: Any, truth: Any) -> None:
    np.testing.assert_allclose(got, truth, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("T", [1, 2, 4, 16, 30, 64, 100, 128, 256, 1024, 4096])
def test_accuracy(gpt2: BlockWeights, T: int, causal: bool) -> None:
    x = random_input(T, (3, T, 768))
    truth = reference.block_forward(x.astype(np.float64), gpt2, causal)
    on_device = {name: cp.asarray(array) for name, array in gpt2.tensors().items()}
    expected = plain.block_forward(cp.asarray(x), on_device, 12, causal, cp).get()
    block = Block(gpt2, causal=causal, device="cuda")
    for rows in (slice(None), 0):  # (3, T, C) and (T, C)
        got = block(x[rows])
        close_to(got, truth[rows])
        plain.assert_as_accurate(got, truth[rows], expected[rows])


@pytest.mark.parametrize("graph", [False, True])
def test_the_result_is_the_callers(gpt2: BlockWeights, graph: bool) -> None:
    block = Block(gpt2, device="cuda", graph=graph)
    inputs = [cp.asarray(random_input(seed, (30, 768))) for seed in range(3)]
    expected = [Block(gpt2, device="cuda", graph=False)(x).get() for x in inputs]
    results = [block(x) for _ in range(3) for x in inputs]  # x repeats, so graphs are replayed
    for i, result in enumerate(results):
        np.testing.assert_array_equal(result.get(), expected[i % 3])


def test_the_second_call_captures_a_graph_and_the_third_replays_it(
    gpt2: BlockWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    captures: list[int] = []
    capture = overlap.capture

    def spy(launches: tuple[requests.Launch, ...], stream: Any, overlapping: bool) -> Any:
        captures.append(len(launches))
        return capture(launches, stream, overlapping)

    monkeypatch.setattr(overlap, "capture", spy)
    x, out = cp.asarray(random_input(0, (30, 768))), cp.empty((30, 768), "float32")
    block = Block(gpt2, device="cuda")
    for calls, expected in ((1, []), (2, [10]), (3, [10])):
        block(x, out=out)
        assert captures == expected, f"after {calls} calls"
    direct = Block(gpt2, device="cuda", graph=False)
    for _ in range(3):
        direct(x, out=out)
    assert captures == [10]


def test_a_warm_call_without_out_allocates_its_result_only(
    gpt2: BlockWeights, allocations: list[int]
) -> None:
    block = Block(gpt2, device="cuda")
    x = cp.asarray(random_input(0, (30, 768)))
    block(x)
    allocations.clear()
    block(x)
    assert allocations == [x.nbytes]


def test_many_shapes_keep_few_buffers() -> None:
    weights = BlockWeights.random(0, SMALL)
    block = Block(weights, causal=False, device="cuda")
    engine = block._engine
    assert isinstance(engine, CudaEngine)
    for T in [*range(1, 30), 3, 2, 1]:
        x = random_input(T, (T, 48))
        for _ in range(2):
            close_to(block(x), reference.block_forward(x.astype(np.float64), weights))
        assert len(engine._workspaces) <= MAX_SHAPES
        assert len(engine._calls) <= MAX_CALLS
        assert {key[0] for key in engine._calls} <= set(engine._workspaces)


def test_the_first_call_on_a_stream_waits_for_the_weights() -> None:
    weights = BlockWeights.random(0, SIZES["gpt2-xl"])
    x = cp.asarray(random_input(0, (4, 1600)))
    expected = Block(weights, device="cuda")(x).get()
    for _ in range(3):
        stream = cp.cuda.Stream(non_blocking=True)
        cp.cuda.Device().synchronize()
        block = Block(weights, device="cuda")
        with stream:
            got = block(x)
        np.testing.assert_array_equal(got.get(stream=stream), expected)


def test_a_block_may_go_while_its_work_is_under_way(gpt2: BlockWeights) -> None:
    x = cp.asarray(random_input(0, (1024, 768)))
    expected = Block(gpt2, device="cuda")(x).get()
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    block = Block(gpt2, device="cuda")
    with stream:
        got = block(x)
    del block
    rubbish = [cp.full(size, np.nan, "float32") for size in (1024 * 3072, 768 * 3072, 768 * 768)]
    np.testing.assert_array_equal(got.get(stream=stream), expected)
    assert len(rubbish) == 3


def test_a_capturing_stream_is_refused(gpt2: BlockWeights) -> None:
    block = Block(gpt2, device="cuda")
    x, out = cp.zeros((5, 768), "float32"), cp.empty((5, 768), "float32")
    block(x, out=out)
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        try:
            with pytest.raises(InputError, match="the current stream is capturing"):
                block(x, out=out)
        finally:
            stream.end_capture()
    block(x, out=out)


def test_x_and_out_may_be_the_same_array(gpt2: BlockWeights) -> None:
    x = cp.asarray(random_input(0, (30, 768)))
    block = Block(gpt2, device="cuda")
    expected = block(x).get()
    np.testing.assert_array_equal(block(x, out=x).get(), expected)


@pytest.fixture(scope="module")
def torch() -> ModuleType:
    module: ModuleType = pytest.importorskip("torch", reason="torch is not installed")
    return module


def test_a_torch_tensor(torch: ModuleType, gpt2: BlockWeights) -> None:
    block = Block(gpt2, device="cuda")
    host = random_input(0, (30, 768))
    expected = block(host)
    x = torch.from_numpy(host).cuda()
    np.testing.assert_array_equal(block(x).get(), expected)
    np.testing.assert_array_equal(block(torch.from_numpy(host)), expected)
    strided = torch.from_numpy(np.repeat(host, 2, axis=0)).cuda()[::2]
    np.testing.assert_array_equal(block(strided).get(), expected)
    out = torch.full_like(x, torch.nan)
    for _ in range(3):  # launched, captured, replayed
        out.fill_(torch.nan)
        assert block(x, out=out) is out
        np.testing.assert_array_equal(out.cpu().numpy(), expected)


def test_a_torch_tensor_is_viewed_without_dlpack(
    monkeypatch: pytest.MonkeyPatch, torch: ModuleType, gpt2: BlockWeights
) -> None:
    """DLPack takes torch about 18 µs of host time per tensor, as much as a small block."""
    monkeypatch.setattr(torch.Tensor, "__dlpack__", None)
    block = Block(gpt2, device="cuda")
    x = torch.from_numpy(random_input(0, (30, 768))).cuda()
    np.testing.assert_array_equal(block(x).get(), block(x.cpu().numpy()))


def test_a_torch_tensor_that_torch_does_not_share(torch: ModuleType, gpt2: BlockWeights) -> None:
    block = Block(gpt2, device="cuda")
    x = torch.zeros((5, 768), device="cuda")
    for wrong, message in (
        (x.clone().requires_grad_(), "expected an array that can be shared, got Tensor: .*grad"),
        (x.to_sparse(), "expected an array that can be shared, got Tensor"),
        (x[:0], "expected at least one token"),
        (x.double(), "x: expected float32, got float64"),
        (x.t(), r"expected shape \(T, 768\) or \(B, T, 768\)"),
    ):
        with pytest.raises(InputError, match=message):
            block(wrong)


def test_a_cuda_array_that_is_not_contiguous_is_copied(gpt2: BlockWeights) -> None:
    block = Block(gpt2, device="cuda")
    x = cp.asarray(random_input(0, (768, 60))).T[::2]
    np.testing.assert_array_equal(block(x).get(), block(cp.ascontiguousarray(x)).get())


@pytest.mark.parametrize("T", [1, 30, 128])
def test_solve_gives_the_bits_of_block(gpt2: BlockWeights, T: int) -> None:
    packed = cp.asarray(gpt2.to_packed())
    x = cp.asarray(random_input(T, (T, 768)))
    output = cp.full(T * 768, np.nan, "float32")
    gpt2block.solve(x, output, packed, T)
    expected = Block(BlockWeights.from_packed(packed.get()), causal=False, device="cuda")(x)
    np.testing.assert_array_equal(output.get().reshape(T, 768), expected.get())


def test_solve_refuses_wrong_arguments(gpt2: BlockWeights) -> None:
    packed = cp.asarray(gpt2.to_packed())
    x, out = cp.ones((5, 768), "float32"), cp.full((5, 768), 7, "float32")
    for wrong, message in (
        ((x, out, packed[:-1], 5), "expected a 1-D array of 7,087,872 floats"),
        ((x, out, packed, 6), "x: expected seq_len · 768 = 4,608 floats, got 3,840"),
        ((x, out[:4], packed, 5), "output: expected seq_len · 768 = 3,840 floats, got 3,072"),
        ((x.get(), out, packed, 5), "x: expected a CuPy array, got ndarray"),
        ((x.astype("float64"), out, packed, 5), "x: expected float32, got float64"),
    ):
        with pytest.raises(InputError, match=message):
            gpt2block.solve(*wrong)
    assert bool((out == 7).all())


def test_the_longest_sequence_and_one_more() -> None:
    weights = BlockWeights.random(0, GPT2Config(n_head=1, n_embd=8))
    block = Block(weights, causal=False, device="cuda")
    with pytest.raises(InputError, match="T can be at most") as caught:
        block(np.zeros((1_000_000, 8), np.float32))
    longest = int(str(caught.value).split()[-1].replace(",", ""))
    assert longest > 4096
    x = random_input(0, (longest, 8))
    truth = Block(block.weights, device="cpu")
    tail = block(x)[-3:]
    # Compute attention of the last rows only, to avoid the T×T matrix.
    ln1 = reference.layernorm(x.astype(np.float64), truth.weights.gamma1, truth.weights.beta1)
    qkv = ln1 @ truth.weights.w_qkv + truth.weights.b_qkv
    p = reference.softmax(qkv[-3:, :8] @ qkv[:, 8:16].T / np.sqrt(8))
    w = truth.weights
    x1 = x[-3:] + (p @ qkv[:, 16:]) @ w.w_attn + w.b_attn
    ff1 = reference.gelu(reference.layernorm(x1, w.gamma2, w.beta2) @ w.w_fc + w.b_fc)
    close_to(tail, x1 + ff1 @ w.w_proj + w.b_proj)
    engine = block._engine
    assert isinstance(engine, CudaEngine)
    kept = len(engine._workspaces)
    with pytest.raises(InputError, match=f"T {longest + 1:,}: a row of scores takes"):
        block(np.zeros((longest + 1, 8), np.float32))
    assert len(engine._workspaces) == kept


def test_wrong_arrays_are_refused(gpt2: BlockWeights) -> None:
    block = Block(gpt2, device="cuda")
    good = cp.zeros((5, 768), "float32")
    for x, out, message in (
        (cp.zeros((5, 768)), None, "x: expected float32, got float64"),
        (cp.zeros((5, 767), "float32"), None, r"expected shape \(T, 768\) or \(B, T, 768\)"),
        (cp.zeros((0, 768), "float32"), None, "at least one token"),
        ("text", None, "got str"),
        (good, np.zeros((5, 768), np.float32), "both as CUDA arrays"),
        (good.get(), good, "out: expected a numpy array, got ndarray"),
        (good, cp.zeros((768, 5), "float32").T, "not C-contiguous"),
        (good, cp.zeros((4, 768), "float32"), r"of shape \(5, 768\)"),
    ):
        with pytest.raises(InputError, match=message):
            block(x, out=out)


def test_an_array_on_another_device_is_refused() -> None:
    block = Block(BlockWeights.random(0, SMALL), device="cuda")
    block._engine.device = 1  # type: ignore[attr-defined]  # as if the Block were elsewhere
    x = cp.zeros((5, 48), "float32")
    with pytest.raises(InputError, match=r"expected an array on cuda:1, .* got one on cuda:0"):
        block._engine._adopt(x, x, None)  # type: ignore[attr-defined]


def test_a_device_that_is_not_there() -> None:
    count = cp.cuda.runtime.getDeviceCount()
    with pytest.raises(gpt2block.DeviceError, match=f"this machine has {count}"):
        Block(BlockWeights.random(0, SMALL), device=f"cuda:{count}")


def test_too_many_rows_or_sequences() -> None:
    a, w = cp.zeros((1_048_561, 1), "float32"), cp.zeros((1, 1), "float32")
    with pytest.raises(InputError, match=r"1,048,561 rows .* takes at most 1,048,560"):
        gpt2block.ops.matmul_bias(a, w)
    assert gpt2block.ops.matmul_bias(a[1:], w).shape == (1_048_560, 1)
    with pytest.raises(InputError, match="B 65,536: a batch can have at most 65,535"):
        gpt2block.ops.attention(cp.zeros((65536, 1, 3), "float32"), 1)
    assert gpt2block.ops.attention(cp.zeros((65535, 1, 3), "float32"), 1).shape == (65535, 1, 1)
    block = Block(BlockWeights.random(0, GPT2Config(n_head=1, n_embd=4)), device="cuda")
    with pytest.raises(InputError, match="1,048,576 rows"):
        block(cp.zeros((32, 32768, 4), "float32"))


def test_more_than_two_to_the_31_elements() -> None:
    n = 2**31 + 5
    with large_memory(2 * 4 * n):
        x = cp.zeros(n, "float32")
        x[-3:] = 1
        y = gpt2block.ops.add(x, x)
        assert y[-4:].get().tolist() == [0, 2, 2, 2]
        del y
        y = gpt2block.ops.gelu(x)
        assert y[-1].get().item() == pytest.approx(0.8411920, rel=1e-6)
        del x, y


def test_shared_memory_is_left_as_the_kernel_needs_it() -> None:
    """A kernel calls a reduction twice: without its last barrier the second call could race."""
    file = "learn/elementwise/residual.cu"
    code = kernels.program(file) + (
        '\n#include "lib/common.cuh"\n'
        'extern "C" __global__ void reduce(const float* x, float* sums, float* maxima) {\n'
        "    __shared__ float scratch[256];\n"
        "    const float v = x[blockIdx.x * 256 + threadIdx.x];\n"
        "    const float sum = block_reduce_sum<256>(v, scratch);\n"
        "    const float maximum = block_reduce_max<256>(v, scratch);\n"
        "    sums[blockIdx.x * 256 + threadIdx.x] = sum;\n"
        "    maxima[blockIdx.x * 256 + threadIdx.x] = maximum;\n"
        "}\n"
    )
    kernel = cp.RawModule(code=code, options=kernels.options(file, 90)).get_function("reduce")
    x = cp.asarray(np.random.default_rng(0).standard_normal((500, 256)), dtype="float32")
    sums, maxima = cp.empty_like(x), cp.empty_like(x)
    kernel((500,), (256,), (x, sums, maxima))
    truth = x.get().astype(np.float64)
    close_to(sums.get(), np.broadcast_to(truth.sum(1, keepdims=True), truth.shape))
    np.testing.assert_array_equal(
        maxima.get(), np.broadcast_to(truth.max(1, keepdims=True), truth.shape)
    )


@pytest.fixture
def start_program(tmp_path: Path) -> Callable[[], tuple[int, float]]:
    """Return a function that runs a Block in a new process with a separate compile cache.

    It returns the values that the process prints.
    """
    code = (
        "import time; start = time.perf_counter()\n"
        "import cupy.cuda.compiler as compiler\n"
        "honest, compiled = compiler._compile_using_nvrtc_no_warning, []\n"
        "def spy(*a, **k): compiled.append(1); return honest(*a, **k)\n"
        "compiler._compile_using_nvrtc_no_warning = spy\n"
        "from gpt2block import *\n"
        "w = BlockWeights.random(0, GPT2Config(n_head=3, n_embd=48))\n"
        "Block(w, device='cuda')(random_input(0, (5, 48)))\n"
        "print(len(compiled), time.perf_counter() - start)\n"
    )
    environment = {**os.environ, "CUPY_CACHE_DIR": str(tmp_path / "cache")}

    def start() -> tuple[int, float]:
        compiled, seconds = python(code, env=environment, check=True).stdout.split()
        return int(compiled), float(seconds)

    return start


def test_the_second_start_compiles_nothing(start_program: Any) -> None:
    first, second = start_program(), start_program()
    print(f"first start {first[1]:.2f} s, second start {second[1]:.2f} s")
    assert first[0] == 5  # one file per operation
    assert second[0] == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_eight_rows_are_more_than_twice_as_fast_as_one(dtype: str) -> None:
    """Compare tokens per second, in the best of three runs as the GPU may be shared."""
    from benchmarks.run import run  # noqa: PLC0415
    from benchmarks.token_works import gpt2_works  # noqa: PLC0415

    works = gpt2_works(dtype, "1,8")[:2]
    ratios: list[float] = []
    while len(ratios) < 3 and max(ratios, default=0) <= 2:
        found = run(works)
        assert found.right
        assert found.skipped == []
        ours = [row for row in found.rows if row.contender == "gpt2block"]
        assert [row.work for row in ours] == ["1 row", "8 rows"]
        one, eight = (row.tokens_s or 0.0 for row in ours)
        assert one > 0
        ratios.append(eight / one)
    assert max(ratios) > 2

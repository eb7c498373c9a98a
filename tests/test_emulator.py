"""The CUDA emulator finds planted mistakes.

A shipped kernel with one edit, or a small kernel with a mistake, must fail. Unchanged shipped
kernels must pass in every thread order, with the same bits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpt2block.cuda.kernels import SOURCE_DIR
from gpt2block.emulator import (
    ORDERS,
    ShimError,
    Source,
    compile_kernel_file,
    loader,
    missing,
    programs,
    run,
)
from gpt2block.errors import KernelError

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"no CUDA on the CPU: {missing()}")

Floats = NDArray[np.float32]
BARRIER = "__syncthreads();"
HEADS = (("NH", 3), ("HS", 16))


def random(*shape: int) -> Floats:
    rng = np.random.default_rng(sum(shape))
    return (rng.standard_normal(shape) + 0.5).astype(np.float32)


def empty(*shape: int) -> Floats:
    return np.full(shape, np.nan, np.float32)


def layernorm768(source: Source, order: loader.Order) -> Floats:
    out = empty(3, 768)
    args = [random(3, 768), out, random(768), random(768), 3]
    run(source, "layernorm768_kernel", (3,), (256,), args, order=order)
    return out


def layernorm(source: Source, order: loader.Order) -> Floats:
    out = empty(3, 300)
    args = [random(3, 300), out, random(300), random(300), 3, 300]
    run(source, "layernorm_kernel", (3,), (256,), args, order=order)
    return out


def matmul(source: Source, order: loader.Order) -> Floats:
    M, K, N = 17, 50, 35
    out = empty(M, N)
    args = [random(M, K), random(K, N), random(N), out, M, K, N]
    run(source, "matmul_bias_tiled", (3, 2), (16, 16), args, order=order)
    return out


def attention(source: Source, order: loader.Order) -> Floats:
    B, T, C = 2, 33, 48
    out = empty(B, T, C)
    args = [random(B, T, 3 * C), out, T]
    launch = {"shared": T * 4, "defines": HEADS, "order": order}
    run(source, "mha_causal_kernel", (T, 3, B), (256,), args, **launch)  # type: ignore[arg-type]
    return out


def gelu(source: Source, order: loader.Order) -> Floats:
    x = random(300)
    run(source, "gelu_kernel", (2,), (256,), [x, x.size], order=order)
    return x


def add(source: Source, order: loader.Order) -> Floats:
    out = empty(300)
    run(source, "add_kernel", (2,), (256,), [random(300), random(300), out, 300], order=order)
    return out


Launch = Callable[[Source, loader.Order], Floats]
SHIPPED: list[tuple[str, Launch]] = [
    ("learn/layernorm/skeleton.cu", layernorm768),
    ("learn/layernorm/skeleton.cu", layernorm),
    ("learn/matmul/skeleton.cu", matmul),
    ("learn/attention/skeleton.cu", attention),
    ("learn/elementwise/gelu.cu", gelu),
    ("learn/elementwise/residual.cu", add),
]


@pytest.mark.parametrize(("file", "launch"), SHIPPED)
def test_a_shipped_kernel_gives_the_same_bits_in_every_order(file: str, launch: Launch) -> None:
    results = [launch(Source.shipped(file), order) for order in ORDERS]
    assert np.isfinite(results[0]).all()
    assert results[0].tobytes() == results[1].tobytes() == results[2].tobytes()


def test_a_shipped_kernel_computes_its_formula() -> None:
    product = random(17, 50).astype(float) @ random(50, 35) + random(35)
    np.testing.assert_allclose(
        matmul(Source.shipped("learn/matmul/skeleton.cu"), "forward"), product, rtol=1e-4
    )


# --- missing barriers


def without_barrier(file: str, n: int, header: str) -> Source:
    """Return a shipped source without its n-th barrier, or without the n-th of its header."""
    text = (SOURCE_DIR / (header or file)).read_text("ascii")
    before, after = text.split(BARRIER)[: n + 1], text.split(BARRIER)[n + 1 :]
    assert after, f"{header or file} has only {n} barriers"
    edited = BARRIER.join(before) + BARRIER.join(["", *after])[len(BARRIER) :]
    assert len(edited) == len(text) - len(BARRIER)
    if header:
        return Source(file, Source.shipped(file).text, ((header, edited),))
    return Source(file, edited)


@cache
def outcome(source: Source, launch: Launch, order: loader.Order) -> bytes:
    try:
        return launch(source, order).tobytes()
    except ShimError as error:
        return str(error).encode()


# file, launch, header that has the barriers or "", numbers of the barriers
BARRIERS: list[tuple[str, Launch, str, tuple[int, ...]]] = [
    ("learn/matmul/skeleton.cu", matmul, "", (0, 1)),
    ("learn/attention/skeleton.cu", attention, "", (0, 1)),
    (
        "learn/attention/skeleton.cu",
        attention,
        "lib/common.cuh",
        (0, 2, 3),
    ),  # with few keys barrier 1 has no effect
    ("learn/layernorm/skeleton.cu", layernorm768, "lib/common.cuh", (0, 1, 2, 3)),
    ("learn/layernorm/skeleton.cu", layernorm, "lib/common.cuh", (0, 1, 2, 3)),
]


@pytest.mark.parametrize(
    ("file", "launch", "header", "n"),
    [
        pytest.param(file, launch, header, n, id=f"{launch.__name__}-{header or file}-{n}")
        for file, launch, header, numbers in BARRIERS
        for n in numbers
    ],
)
def test_a_missing_barrier_shows(file: str, launch: Launch, header: str, n: int) -> None:
    right = outcome(Source.shipped(file), launch, "forward")
    source = without_barrier(file, n, header)
    assert any(outcome(source, launch, order) != right for order in ORDERS)


def test_every_barrier_is_planted() -> None:
    for text in {header or file for file, _, header, _ in BARRIERS}:
        planted = {n for f, _, header, ns in BARRIERS if (header or f) == text for n in ns}
        count = (SOURCE_DIR / text).read_text("ascii").count(BARRIER)
        assert planted == set(range(count)), f"{text}: bring BARRIERS up to date"


# --- accesses out of bounds


# name → file, launch, text, its replacement, report
OUT_OF_BOUNDS: dict[str, tuple[str, Launch, str, str, str]] = {
    "global-read": (
        "learn/matmul/skeleton.cu",
        matmul,
        "a_next = row_inside && k0",
        "a_next = k0",
        r"READ out of bounds: byte 3\d\d\d of A, which has 3400 bytes(.|\n)*skeleton\.cu:\d+",
    ),
    "global-read-by-one": (
        "learn/elementwise/residual.cu",
        add,
        "i < n",
        "i <= n",
        r"READ out of bounds: byte 1200 of \w, which has 1200 bytes(.|\n)*residual\.cu:\d+",
    ),
    "global-write": (
        "learn/matmul/skeleton.cu",
        matmul,
        "if (row_inside && col_inside) C",
        "if (col_inside) C",
        r"WRITE out of bounds: byte 2[34]\d\d of C, which has 2380 bytes",
    ),
    "global-write-before": (
        "learn/attention/skeleton.cu",
        attention,
        "attn_out[(first_row + t) * C + head * HS + tid] =",
        "attn_out[(first_row + t) * C + head * HS + tid - 1] =",
        "WRITE out of bounds: byte -4 of attn_out",
    ),
    "static-shared-index": (
        "learn/attention/skeleton.cu",
        attention,
        "if (tid < HS) q[tid] =",
        "if (tid <= HS) q[tid] =",
        r"learn/attention/skeleton\.cu:\d+.*index 16 out of bounds for type 'float \[16\]'",
    ),
    "static-shared-inner-index": (  # still inside the array as a whole
        "learn/matmul/skeleton.cu",
        matmul,
        "k < TILE;",
        "k <= TILE;",
        r"learn/matmul/skeleton\.cu:\d+.*index 16 out of bounds",
    ),
    "dynamic-shared": (
        "learn/attention/skeleton.cu",
        attention,
        "j < n_keys; j += GROUPS",
        "j <= n_keys; j += GROUPS",
        r"heap-buffer-overflow learn/attention/skeleton\.cu:\d+ in attend<true>(.|\n)*READ of "
        r"size 4(.|\n)* 0 bytes (?:to the right of|after) 132-byte region",
    ),
}


@pytest.mark.parametrize("name", OUT_OF_BOUNDS)
def test_an_access_out_of_bounds_shows(name: str) -> None:
    file, launch, old, new, report = OUT_OF_BOUNDS[name]
    with pytest.raises(ShimError, match=report):
        launch(Source.shipped(file).edited(old, new), "forward")


def test_static_shared_memory_is_guarded_behind_a_pointer() -> None:
    source = Source.shipped("learn/layernorm/skeleton.cu")
    source = source.edited("threadIdx.x < stride", "threadIdx.x <= stride", header="lib/common.cuh")
    report = (
        r"global-buffer-overflow lib/common\.cuh:\d+(.|\n)*"
        r"0 bytes (?:to the right of|after).*'scratch'"
    )
    with pytest.raises(ShimError, match=report):
        layernorm(source, "forward")


# --- small kernels, each with one mistake or one feature

PROBES = Source(
    "probes.cu",
    """
template <int N> __device__ float last(int i) {
    __shared__ float kept[N];
    kept[threadIdx.x] = 1.0f;
    __syncthreads();
    const float* p = kept;
    return p[i];
}
extern "C" __global__ void template_shared(float* x, int i) { x[0] = last<5>(i); }

extern "C" __global__ void local_array(float* x, int i) {
    float kept[3] = {x[0], x[1], x[2]};
    const float* p = kept;
    __syncthreads();
    x[0] = p[i];
}

extern "C" __global__ void some_wait(float* x) {
    if (threadIdx.x < 16) __syncthreads();
    x[threadIdx.x] = 1.0f;
}

extern "C" __global__ void early_return(float* x) {
    x[threadIdx.x] = 1.0f;
    if (threadIdx.x == 3) return;
    __syncthreads();
}

extern "C" __global__ void two_places(float* x) {
    if (threadIdx.x % 2) {
        __syncthreads();
    } else {
        __syncthreads();
    }
    x[threadIdx.x] = 1.0f;
}

extern "C" __global__ void half_a_warp(float* x) {
    if (threadIdx.x < 16) x[0] = __shfl_sync(0xffffffffu, 1.0f, 0);
    __syncthreads();
}

extern "C" __global__ void not_in_mask(float* x) {
    x[threadIdx.x] = __shfl_sync(0xffffu, 1.0f, 0);
}

extern "C" __global__ void two_masks(float* x) {
    x[threadIdx.x] = __shfl_sync(threadIdx.x < 16 ? 0xffffffffu : 0xffff0000u, 1.0f, 0);
}

extern "C" __global__ void whole_block_returns(float* x) {
    if (blockIdx.x == 1) return;
    __syncthreads();
    x[blockIdx.x] = 1.0f;
}

extern "C" __global__ void unwritten(float* x) {  // a block's values must not reach the next block
    __shared__ float fixed[4];
    extern __shared__ float sized[];
    x[blockIdx.x * 2] = fixed[3];
    x[blockIdx.x * 2 + 1] = sized[3];
    fixed[3] = sized[3] = 1.0f;
}

extern "C" __global__ void read_as_float4(float* x, int i) {
    const float4 v = *reinterpret_cast<const float4*>(x + i);
    x[0] = v.x + v.w;
}

extern "C" __global__ void write_to_const(const float* x) { *const_cast<float*>(x) = 7.0f; }

extern "C" __global__ void forever(float* x) {
    while (x[0] == 0.0f) x[1] += 1.0f;
}

extern "C" __global__ void indices(long long* out) {
    const int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    const int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    const int threads = blockDim.x * blockDim.y * blockDim.z;
    out[block * threads + thread] = blockIdx.z * 100000 + blockIdx.y * 10000 + blockIdx.x * 1000
                                  + threadIdx.z * 100 + threadIdx.y * 10 + threadIdx.x;
}

extern "C" __global__ void turns(int* out, int* counter) {  // who comes when, in two phases
    const int n = blockDim.x * gridDim.x;
    for (int phase = 0; phase < 2; ++phase) {
        out[phase * n + blockIdx.x * blockDim.x + threadIdx.x] = counter[0]++;
        __syncthreads();
    }
}

extern "C" __global__ void scalars(short* none, long long* out, long long n, int i, float f) {
    out[0] = none ? 0 : n;
    out[1] = i;
    out[2] = (long long)(f * 4.0f);
}

extern "C" __global__ void reverse(float* x) {
    extern __shared__ float kept[];
    kept[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = kept[blockDim.x - 1 - threadIdx.x];
}

extern "C" __global__ void shuffle_floats(float* x, int width) {
    const unsigned all = 0xffffffffu, i = threadIdx.x, n = blockDim.x;
    const float v = x[i];
    const float direct = __shfl_sync(all, v, 3, width);
    const float above = __shfl_up_sync(all, v, 1, width);
    const float below = __shfl_down_sync(all, v, 2, width);
    __syncwarp();
    x[i] = direct;
    x[n + i] = above;
    x[2 * n + i] = below;
    x[3 * n + i] = __shfl_xor_sync(all, v, 1, width);
}

extern "C" __global__ void shuffle_ints(long long* x) {
    int sum = (int)x[threadIdx.x];
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    x[threadIdx.x] = __shfl_down_sync(0xffffffffu, x[threadIdx.x], 1) * 1000 + sum;
}

extern "C" __global__ void shuffle_in_part(float* x) {  // lanes 8.. are not in the mask
    if (threadIdx.x < 8) x[threadIdx.x] = __shfl_down_sync(0xffu, x[threadIdx.x], 4);
}
""",
)


def probe(kernel: str, threads: int, *args: Any, grid: int = 1, **options: Any) -> None:
    run(PROBES, kernel, (grid,), (threads,), args, **options)


def fails(report: str) -> Any:
    return pytest.raises(ShimError, match=report)


@pytest.mark.parametrize("order", ORDERS)
def test_a_divergent_barrier_is_named(order: loader.Order) -> None:
    a, waits = r"thread \(\d+, 0, 0\)", r"waits at probes\.cu:\d+ after 0 barriers"
    with fails(rf"barrier in some_wait, block \(0, 0, 0\): {a} {waits}, {a} has returned"):
        probe("some_wait", 64, empty(64), order=order)
    with fails(rf"divergent barrier in early_return.*{waits}, thread \(3, 0, 0\) has returned"):
        probe("early_return", 32, empty(32), order=order)
    with fails(rf"divergent barrier in two_places.*{waits}.*{waits}"):
        probe("two_places", 32, empty(32), order=order)
    with fails(r"divergent barrier in half_a_warp.*with mask 0xffffffff.*after 0.*after 0"):
        probe("half_a_warp", 32, empty(32), order=order)
    with fails(r"divergent barrier in two_masks.* with mask 0xffff.* with mask 0xffff"):
        probe("two_masks", 32, empty(32), order=order)
    with fails("its mask does not name its own lane"):
        probe("not_in_mask", 32, empty(32), order=order)


def test_a_block_may_return_as_a_whole() -> None:
    x = empty(3)
    probe("whole_block_returns", 8, x, grid=3)
    np.testing.assert_array_equal(x, [1, np.nan, 1])


@pytest.mark.parametrize("order", ORDERS)
def test_shared_memory_is_nan_until_written(order: loader.Order) -> None:
    x = np.zeros(6, np.float32)
    probe("unwritten", 1, x, grid=3, shared=16, order=order)
    assert np.isnan(x).all()


def test_the_last_element_is_inside_and_the_next_is_not() -> None:
    x = random(8)
    probe("template_shared", 5, x, 4)
    assert x[0] == 1
    with fails("global-buffer-overflow probes.cu"):
        probe("template_shared", 5, x, 5)
    probe("local_array", 1, x, 2)
    with fails("stack-buffer-overflow probes.cu"):
        probe("local_array", 1, x, 3)
    probe("read_as_float4", 1, x, 4)
    with fails("misaligned address"):
        probe("read_as_float4", 1, x, 2)
    with fails("READ out of bounds: byte 32 of x"):
        probe("read_as_float4", 1, x, 8)
    with fails("null pointer"):
        probe("read_as_float4", 1, None, 0)


def test_a_failed_launch_leaves_the_arrays_alone() -> None:
    x = np.zeros(64, np.float32)
    with fails("divergent"):
        probe("early_return", 32, x)
    assert not x.any()


def test_const_arrays_must_stay() -> None:
    with fails("wrote to x, which is const"):
        probe("write_to_const", 1, np.zeros(4, np.float32))


def test_a_hanging_kernel_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "TIMEOUT_S", 0.5)
    with fails("forever.*still running after 0.5 s"):
        probe("forever", 1, np.zeros(2, np.float32))


WAITING = Source(
    "waiting.cu",
    """
#include <cuda_pipeline.h>
__device__ void receive(float* x, const float* from, bool waits) {
    __shared__ alignas(16) float kept[4];
    if (from) __pipeline_memcpy_async(kept, from, 16);
    __pipeline_commit();
    if (waits) __pipeline_wait_prior(0);
    x[threadIdx.x] = kept[threadIdx.x % 4];
}
extern "C" __global__ void leaves(float* x, const float* from) { receive(x, from, false); }
extern "C" __global__ void waits(float* x, const float* from) { receive(x, from, true); }
""",
)


def test_a_program_waits_for_its_next_launch() -> None:
    """A process serves several launches until one fails.

    Unfinished copies of a launch do not arrive in the next launch.
    """

    def waiting(kernel: str, from_: Floats | None, block: int = 1) -> tuple[float, Any]:
        x = empty(block)
        run(WAITING, kernel, (1,), (block,), [x, from_])
        return x[0], next(reversed(programs._waiting.values()))._process

    first, process = waiting("waits", np.ones(4, np.float32))
    for kernel, from_ in (("leaves", np.ones(4, np.float32)), ("waits", None)):
        received, same = waiting(kernel, from_)
        assert np.isnan(received)
        assert same is process
    assert first == 1
    with fails("out of bounds"):
        waiting("waits", np.ones(3, np.float32))
    assert process.returncode != 0
    second = waiting("waits", np.ones(4, np.float32), 33)
    second[1].kill()
    second[1].wait()
    assert waiting("waits", np.ones(4, np.float32), 33)[0] == second[0] == 1


@pytest.mark.parametrize("order", ORDERS)
def test_blocks_and_grids_have_three_axes(order: loader.Order) -> None:
    grid, block = (2, 3, 2), (4, 2, 3)
    out = np.zeros((*grid[::-1], *block[::-1]), np.int64)
    run(PROBES, "indices", grid, block, [out], order=order)
    digits = 10 ** np.array([5, 4, 3, 2, 1, 0]).reshape(6, 1, 1, 1, 1, 1, 1)
    np.testing.assert_array_equal(out, (np.indices(out.shape) * digits).sum(0))


def turns(order: loader.Order, seed: int = 0) -> list[list[int]]:
    out = np.zeros((2, 1, 64), np.int32)
    probe("turns", 64, out, np.zeros(1, np.int32), order=order, seed=seed)
    return [[int(i) for i in np.argsort(phase[0])] for phase in out]


def test_threads_come_in_the_asked_order() -> None:
    assert turns("forward") == [[*range(64)]] * 2
    assert turns("reverse") == [[*range(63, -1, -1)]] * 2
    first, second = turns("shuffled")
    assert sorted(first) == sorted(second) == [*range(64)]
    assert first != second
    assert turns("shuffled") == [first, second]
    assert turns("shuffled", seed=1)[0] not in (first, [*range(64)])


def test_blocks_come_in_the_asked_order() -> None:
    out = np.zeros((2, 4), np.int32)
    probe("turns", 1, out, np.zeros(1, np.int32), grid=4, order="reverse")
    assert out[0].tolist() == [6, 4, 2, 0]


def test_numbers_and_null_pointers_arrive() -> None:
    out = np.zeros(3, np.int64)
    with pytest.raises(ShimError, match=r"short\* none: the loader does not know this type"):
        probe("scalars", 1, np.zeros(1, np.int16), out, 2**40, -5, 2.25)
    probe("scalars", 1, None, out, 2**40, -5, 2.25)
    assert out.tolist() == [2**40, -5, 9]
    with pytest.raises(KernelError, match="int i: 2147483648 does not fit"):
        probe("scalars", 1, None, out, 0, 2**31, 0.0)


def test_dynamic_shared_memory_has_the_asked_size() -> None:
    x = random(40)
    expected = x[::-1].copy()
    probe("reverse", 40, x, shared=160)
    np.testing.assert_array_equal(x, expected)
    with fails("heap-buffer-overflow probes.cu"):
        probe("reverse", 40, x, shared=156)
    with fails("heap-buffer-overflow probes.cu"):
        probe("reverse", 40, x)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("width", [32, 16])
def test_shuffles_move_floats(order: loader.Order, width: int) -> None:
    n = 64
    v, x = random(n), empty(4, n)
    x[0] = v
    probe("shuffle_floats", n, x, width, order=order)
    i = np.arange(n)
    first = i // width * width
    np.testing.assert_array_equal(x[0], v[first + 3])
    np.testing.assert_array_equal(x[1], v[np.maximum(i - 1, first)])
    np.testing.assert_array_equal(x[2], v[np.where(i + 2 < first + width, i + 2, i) % n])
    np.testing.assert_array_equal(x[3], v[i ^ 1])


@pytest.mark.parametrize("order", ORDERS)
def test_shuffles_move_ints(order: loader.Order) -> None:
    x = np.arange(32, dtype=np.int64)
    probe("shuffle_ints", 32, x, order=order)
    down = np.append(np.arange(1, 32), 31)
    np.testing.assert_array_equal(x, down * 1000 + 31 * 16)


def test_a_shuffle_from_a_lane_that_is_not_there_gives_nan() -> None:
    x = random(32)
    v = x.copy()
    probe("shuffle_in_part", 32, x)
    np.testing.assert_array_equal(x[:4], v[4:8])
    assert np.isnan(x[4:8]).all()
    x = np.concatenate([random(10), empty(30)])
    probe("shuffle_floats", 10, x, 32)
    assert np.isnan(x[28:30]).all()  # lanes 8 and 9 read from lanes 10 and 11
    assert not np.isnan(x[20:28]).any()


def test_the_same_array_may_be_given_twice() -> None:
    x = random(300)
    expected = x + x
    run("learn/elementwise/residual.cu", "add_kernel", (2,), (256,), [x, x, x, 300])
    np.testing.assert_array_equal(x, expected)
    with fails("overlaps an earlier argument"):
        run(
            "learn/elementwise/residual.cu",
            "add_kernel",
            (1,),
            (256,),
            [x[:200], x[100:], x[:200], 200],
        )


def test_wrong_launches_are_refused() -> None:
    x = random(4)
    with fails("probes.cu has no kernel 'gone'"):
        probe("gone", 1, x)
    with fails("expected 1 arguments, got 2"):
        probe("reverse", 1, x, 1)
    with fails("1 to 1024 threads"):
        probe("reverse", 1025, x)
    for wrong in (x.astype(np.float64), x[::2], [1.0]):
        with fails("x: expected a contiguous array of float32"):
            probe("reverse", 2, wrong)


def test_a_source_that_does_not_compile_is_told_by_line() -> None:
    with fails(r"residual\.cu:\d+:\d+: error: .*wrong"):
        add(
            Source.shipped("learn/elementwise/residual.cu").edited(
                "y[i] = a[i]", "y[i] = wrong[i]"
            ),
            "forward",
        )


def test_an_edit_that_changes_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"residual\.cu has 'gone' 0 times"):
        Source.shipped("learn/elementwise/residual.cu").edited("gone", "")


def test_a_source_is_compiled_once_for_its_constants() -> None:
    once = compile_kernel_file("learn/matmul/skeleton.cu")
    assert compile_kernel_file(Source.shipped("learn/matmul/skeleton.cu")) == once
    assert compile_kernel_file("learn/matmul/skeleton.cu", (("TILE", 8),)) != once


@pytest.mark.parametrize("races", [False, True])
def test_messages_of_the_compiler_go_to_the_caller(races: bool, tmp_path: Path) -> None:
    """The caller gets them, even if another thread has compiled the program ahead."""
    text = 'extern "C" __global__ void idle(float* x) {\n    int unused;\n}\n'
    source = Source("idle.cu", f"// {tmp_path}\n{text}")  # a text that no cache has
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader.compile_ahead(source, races=races)
        assert loader._ahead[source, (), races, "usual"].result().exists()
    with pytest.warns(UserWarning, match=r"(?s)^idle\.cu.*unused variable"):
        compile_kernel_file(source, races=races)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compile_kernel_file(source, races=races)


def test_memory_with_two_owners_is_allocated_as_long_as_one_lives() -> None:
    from gpt2block.emulator import stand_in  # noqa: PLC0415  (with CuPy replaced elsewhere)

    memory = bytearray(1200)
    kept, dropped = (np.frombuffer(memory, np.float32) for _ in range(2))
    x = stand_in.adopt(kept)
    address = x.data.ptr
    stand_in.adopt(dropped)
    del dropped
    assert stand_in._allocation(address) == (address, kept.nbytes)
    del x, kept
    assert stand_in._allocation(address) is None

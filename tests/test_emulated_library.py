"""The emulator's versions of CUDA's C++ libraries: CUB, barriers, pipelines, atomics and FP8."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from gpt2block.emulator import ShimError, Source, missing, run
from gpt2block.fp8 import from_fp8, to_fp8
from gpt2block.mine.on_cpu import RUNS

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"no CUDA on the CPU: {missing()}")
Array = NDArray[np.float32]
X: Array = np.random.default_rng(0).integers(0, 100, 256).astype(np.float32)
CUB = Source(
    "/cub.cu",
    """
#include <cub/cub.cuh>
#include <cub/block/block_reduce.cuh>

struct Pair {
    float most, sum;
};
struct Join {
    __device__ Pair operator()(const Pair& a, const Pair& b) const {
        return {fmaxf(a.most, b.most), a.sum + b.sum};
    }
};
struct Running {
    float total;
    __device__ float operator()(float block) {
        const float before = total;
        total += block;
        return before;
    }
};

extern "C" __global__ void reductions(const float* x, float* out) {  // 96 threads
    typedef cub::BlockReduce<float, 96> Reduce;
    typedef cub::BlockReduce<Pair, 96, cub::BLOCK_REDUCE_RAKING> Pairs;
    __shared__ Reduce::TempStorage temp;
    __shared__ Pairs::TempStorage pairs;
    const float own = x[threadIdx.x], two[2] = {own, 1.0f};
    const float sum = Reduce(temp).Sum(own);
    __syncthreads();
    const float most = Reduce(temp).Reduce(own, cuda::maximum<>{}, 50);
    __syncthreads();
    float items[2] = {two[0], two[1]};
    const float both = Reduce(temp).Sum(items);
    const Pair pair = Pairs(pairs).Reduce(Pair{own, own}, Join());
    if (threadIdx.x > 0) return;
    const float found[5] = {sum, most, both, pair.most, pair.sum};
    for (int i = 0; i < 5; ++i) out[i] = found[i];
}

extern "C" __global__ void scans(const float* x, float* out) {  // 64 threads
    typedef cub::BlockScan<float, 64, cub::BLOCK_SCAN_WARP_SCANS> Scan;
    __shared__ Scan::TempStorage temp;
    const int t = threadIdx.x;
    float v = x[t], total;
    Scan(temp).InclusiveSum(v, out[t]);
    __syncthreads();
    Scan(temp).ExclusiveSum(v, v, total);
    out[64 + t] = v + total;
    __syncthreads();
    Scan(temp).ExclusiveScan(x[t], out[128 + t], -1.0f, cuda::maximum<float>());
    Running running{0.0f};
    for (int i = 0; i < 2; ++i) {
        __syncthreads();
        Scan(temp).InclusiveSum(x[64 * i + t], out[192 + 64 * i + t], running);
    }
    __syncthreads();
    float items[2] = {1.0f, x[t]};
    Scan(temp).ExclusiveSum(items, items);
    out[320 + t] = items[1];
}

extern "C" __global__ void warps(const float* x, float* out) {  // 64 threads
    typedef cub::WarpScan<float, 16> Scan;
    typedef cub::WarpReduce<float> Reduce;
    __shared__ Scan::TempStorage scans[4];
    __shared__ Reduce::TempStorage reductions[2];
    float total;
    const int t = threadIdx.x;
    Scan(scans[t / 16]).InclusiveSum(x[t], out[t], total);
    out[64 + t] = total;
    const float sum = Reduce(reductions[t / 32]).Reduce(x[t], cuda::std::plus<float>());
    if (t % 32 == 0) out[128 + t / 32] = sum;
}

extern "C" __global__ void items(const float* x, float* out) {  // 64 threads
    typedef cub::BlockLoad<float, 64, 2, cub::BLOCK_LOAD_WARP_TRANSPOSE> Load;
    typedef cub::BlockStore<float, 64, 2, cub::BLOCK_STORE_STRIPED> Store;
    __shared__ union {
        Load::TempStorage load;
        Store::TempStorage store;
    } temp;
    float items[2];
    Load(temp.load).Load(x, items, 100, 7.0f);
    __syncthreads();
    Store(temp.store).Store(out, items);
}

extern "C" __global__ void reused(const float* x, float* out) {
    typedef cub::BlockReduce<float, 96> Reduce;
    __shared__ Reduce::TempStorage temp;
    const float sum = Reduce(temp).Sum(x[threadIdx.x]);
    const float most = Reduce(temp).Reduce(x[threadIdx.x], cuda::maximum<>{});  // reused
    if (threadIdx.x == 0) out[0] = sum, out[1] = most;
}

extern "C" __global__ void shared_by_warps(const float* x, float* out) {
    typedef cub::WarpReduce<float> Reduce;
    __shared__ Reduce::TempStorage temp;
    const float sum = Reduce(temp).Sum(x[threadIdx.x]);
    if (threadIdx.x % 32 == 0) out[threadIdx.x / 32] = sum;
}

extern "C" __global__ void of_thread_1(const float* x, float* out) {
    typedef cub::BlockReduce<float, 96> Reduce;
    __shared__ Reduce::TempStorage temp;
    const float sum = Reduce(temp).Sum(x[threadIdx.x]);
    if (threadIdx.x == 1) out[0] = sum;
}

extern "C" __global__ void some_threads(const float* x, float* out) {
    typedef cub::BlockReduce<float, 96> Reduce;
    __shared__ Reduce::TempStorage temp;
    if (threadIdx.x < 64) out[0] = Reduce(temp).Sum(x[threadIdx.x]);
}
""",
)

LIBRARY = Source(
    "/library.cu",
    """
#include <cooperative_groups.h>
#include <cooperative_groups/memcpy_async.h>
#include <cooperative_groups/reduce.h>
#include <cuda/atomic>
#include <cuda/barrier>
#include <cuda/pipeline>
#include <cuda/std/array>
#include <cuda/std/limits>
#include <cuda/std/tuple>
#include <cuda_fp8.h>
namespace cg = cooperative_groups;
constexpr auto BLOCK = cuda::thread_scope_block;
typedef cuda::barrier<BLOCK> Barrier;

struct Scale {
    __device__ virtual float of(float x) const { return x; }
};
struct Twice : Scale {
    __device__ float of(float x) const override { return 2.0f * x; }
};

extern "C" __global__ void barriers(const float* x, float* out) {  // 64 threads
    __shared__ Barrier barrier;
    __shared__ __align__(16) float tile[64];
    const cg::thread_block block = cg::this_thread_block();
    const int t = threadIdx.x;
    if (t == 0) init(&barrier, blockDim.x);
    __syncthreads();
    cuda::memcpy_async(block, tile, x, cuda::aligned_size_t<16>(sizeof tile), barrier);
    barrier.arrive_and_wait();
    out[t] = tile[63 - t];
    Barrier::arrival_token token = barrier.arrive();
    barrier.wait(cuda::std::move(token));
    tile[t] = x[64 + t];
    barrier.arrive_and_wait();
    out[64 + t] = tile[63 - t];
}

extern "C" __global__ void pipelines(const float* x, float* out) {  // 64 threads
    __shared__ cuda::pipeline_shared_state<BLOCK, 2> state;
    __shared__ float tiles[2][64];
    const cg::thread_block block = cg::this_thread_block();
    const int t = threadIdx.x;
    auto pipe = cuda::make_pipeline(block, &state);
    for (int i = 0; i < 5; ++i) {
        if (i < 4) {
            pipe.producer_acquire();
            cuda::memcpy_async(block, tiles[i % 2], x + 64 * i, sizeof tiles[0], pipe);
            pipe.producer_commit();
        }
        if (i == 0) continue;
        pipe.consumer_wait();
        out[64 * i - 64 + t] = tiles[(i - 1) % 2][63 - t];
        pipe.consumer_release();
    }
    block.sync();
    cg::memcpy_async(block, tiles[0], x, sizeof tiles[0]);
    cg::wait(block);
    out[256 + t] = tiles[0][63 - t];
    __shared__ float own[64];
    auto mine = cuda::make_pipeline();
    cuda::memcpy_async(&own[t], &x[t], sizeof(float), mine);
    mine.producer_commit();
    mine.consumer_wait();
    out[320 + t] = own[t];
}

extern "C" __global__ void roles(const float* x, float* out) {  // 64 threads: one warp copies
    __shared__ cuda::pipeline_shared_state<BLOCK, 1> state;
    __shared__ float tile[64];
    const cg::thread_block block = cg::this_thread_block();
    const bool produces = threadIdx.x < 32;
    const auto role = produces ? cuda::pipeline_role::producer : cuda::pipeline_role::consumer;
    auto pipe = cuda::make_pipeline(block, &state, role);
    const int lane = threadIdx.x % 32;
    for (int i = 0; i < 4; ++i) {
        if (produces) {
            pipe.producer_acquire();
            cuda::memcpy_async(&tile[lane], x + 32 * i + lane, sizeof(float), pipe);
            pipe.producer_commit();
        } else {
            pipe.consumer_wait();
            out[32 * i + lane] = tile[31 - lane];
            pipe.consumer_release();
        }
    }
}

extern "C" __global__ void atomics(const float* x, float* out) {  // 64 threads
    __shared__ cuda::atomic<int, BLOCK> count, ready, most;
    __shared__ float value;
    const int t = threadIdx.x;
    if (t == 0) count = 0, ready = 0, most = cuda::std::numeric_limits<int>::min();
    __syncthreads();
    count.fetch_add(2, cuda::memory_order_relaxed);
    most.fetch_max((int)x[t]);
    if (t == 33) value = x[5], ready.store(1, cuda::std::memory_order_release);
    while (ready.load(cuda::memory_order_acquire) == 0) {}
    int old = count;
    while (!count.compare_exchange_weak(old, old + 1)) {}
    __syncthreads();
    cuda::atomic_ref<float, cuda::thread_scope_device> sum(out[64]);
    sum.fetch_add(1.0f);
    const cuda::std::array<float, 2> parts = {value, (float)count};
    const auto [a, b] = cuda::std::make_tuple(parts[0], parts[1]);
    const Twice twice;
    const Scale& scale = twice;
    out[t] = a + b + scale.of(most.load());
}

extern "C" __global__ void groups(const float* x, float* out) {  // 64 threads
    const cg::thread_block block = cg::this_thread_block();
    const auto warp = cg::tiled_partition<32>(block);
    const auto tile = cg::tiled_partition<8>(warp);
    const int t = threadIdx.x;
    const auto parity = cg::labeled_partition(warp, t % 2);
    out[t] = cg::reduce(parity, x[t], cg::plus<float>());
    out[64 + t] = cg::binary_partition(warp, t % 32 < 5).size();
    out[128 + t] = 10 * tile.meta_group_rank() + tile.meta_group_size();
    auto token = block.barrier_arrive();
    block.barrier_wait(cuda::std::move(token));
}

extern "C" __global__ void bytes(const float* x, float* out) {  // 64 threads
    const int t = threadIdx.x;
    const float v = (t % 2 ? 8.0f : -0.001f) * x[t];
    out[t] = v;
    out[64 + t] = __nv_cvt_float_to_fp8(v, __NV_SATFINITE, __NV_E4M3);
    out[128 + t] = __nv_cvt_halfraw_to_fp8(__half(v), __NV_NOSAT, __NV_E5M2);
    out[192 + t] = float(__nv_fp8_e4m3(v));
    out[256 + t] = float4(__nv_fp8x4_e5m2(make_float4(1, 2, 3, v))).w;
}

extern "C" __global__ void no_wait(const float* x, float* out) {
    __shared__ float tile[64];
    auto pipe = cuda::make_pipeline();
    cuda::memcpy_async(&tile[threadIdx.x], &x[threadIdx.x], sizeof(float), pipe);
    pipe.producer_commit();
    out[threadIdx.x] = tile[threadIdx.x];
}

extern "C" __global__ void no_wait_at_barrier(const float* x, float* out) {
    __shared__ Barrier barrier;
    __shared__ float tile[64];
    if (threadIdx.x == 0) init(&barrier, blockDim.x);
    __syncthreads();
    cuda::memcpy_async(&tile[threadIdx.x], &x[threadIdx.x], sizeof(float), barrier);
    auto token = barrier.arrive();
    out[threadIdx.x] = tile[threadIdx.x];
    barrier.wait(cuda::std::move(token));
}

extern "C" __global__ void no_release(const float* x, float* out) {
    __shared__ float tiles[64];
    __shared__ Barrier barrier;
    if (threadIdx.x == 0) init(&barrier, blockDim.x);
    __syncthreads();
    tiles[threadIdx.x] = x[threadIdx.x];
    auto token = barrier.arrive();
    out[threadIdx.x] = tiles[63 - threadIdx.x];  // before the wait
    barrier.wait(cuda::std::move(token));
}

extern "C" __global__ void relaxed(const float* x, float* out) {
    __shared__ cuda::atomic<int, BLOCK> ready;
    __shared__ float value;
    if (threadIdx.x == 0) ready = 0;
    __syncthreads();
    if (threadIdx.x == 33) value = x[5], ready.store(1, cuda::memory_order_relaxed);
    while (ready.load(cuda::memory_order_acquire) == 0) {}
    out[threadIdx.x] = value;
}

extern "C" __global__ void no_init(const float* x, float* out) {
    __shared__ Barrier barrier;
    barrier.arrive_and_wait();
}

extern "C" __global__ void of_grid(const float* x, float* out) { cg::this_grid().sync(); }
""",
)


class Case(NamedTuple):
    source: Source
    kernel: str
    block: int
    right: list[Any]  # arrays that form the expected output
    said: str = ""  # regex of the expected report; "wrong": the output is wrong


def before(x: Array) -> Array:
    """Return the sum of all numbers before each number."""
    return np.cumsum(x) - x


A, B = X[:96], X[:64]
V = (np.where(np.arange(64) % 2, np.float32(8), np.float32(-0.001)) * B).astype(np.float32)
V_E4M3 = to_fp8(V, "float8_e4m3fn")
CASES = [
    Case(CUB, "reductions", 96, [A.sum(), A[:50].max(), A.sum() + 96, A.max(), A.sum()]),
    Case(
        CUB, "scans", 64,
        [
            B.cumsum(), before(B) + B.sum(), np.maximum.accumulate([-1, *B])[:64],
            X[:128].cumsum(), before(B) + np.arange(1, 65),
        ],
    ),
    Case(
        CUB, "warps", 64,
        [B.reshape(4, 16).cumsum(1), B.reshape(4, 16).sum(1).repeat(16), B.reshape(2, 32).sum(1)],
    ),
    Case(CUB, "items", 64, [np.r_[X[:100], np.full(28, 7)].reshape(64, 2).T]),
    Case(CUB, "reused", 96, [A.sum(), A.max()], r"race in reused: .*cub.cu:\d+, and no barrier"),
    Case(CUB, "shared_by_warps", 64, [], r"race in shared_by_warps: .*cub.cu:\d+"),
    Case(CUB, "of_thread_1", 96, [A.sum()], "wrong"),
    Case(CUB, "some_threads", 96, [A.sum()], "divergent barrier in some_threads"),
    Case(CUB, "reductions", 128, [], r"BlockReduce is for a block of \(96, 1, 1\) .*128"),
    Case(LIBRARY, "barriers", 64, [B[::-1], X[64:128][::-1]]),
    Case(LIBRARY, "pipelines", 64, [X.reshape(4, 64)[:, ::-1], B[::-1], B]),
    Case(LIBRARY, "roles", 64, [X[:128].reshape(4, 32)[:, ::-1]]),
    Case(LIBRARY, "atomics", 64, [np.full(64, X[5] + 192 + 2 * B.max()), [64]]),
    Case(
        LIBRARY, "groups", 64,
        [
            B.reshape(2, 16, 2).sum(1).repeat(16, 0).reshape(-1), [*[5] * 5, *[27] * 27] * 2,
            (10 * (np.arange(64) // 8 % 4) + 4),
        ],
    ),
    Case(
        LIBRARY, "bytes", 64,
        [
            V, V_E4M3, to_fp8(V.astype(np.float16), saturate=False),
            from_fp8(V_E4M3, "float8_e4m3fn"), from_fp8(to_fp8(V)),
        ],
    ),
    Case(LIBRARY, "no_wait", 64, [B], "wrong"),
    Case(LIBRARY, "no_wait_at_barrier", 64, [B], "wrong"),
    Case(LIBRARY, "no_release", 64, [B[::-1]], r"race in no_release: .* tiles"),
    Case(LIBRARY, "relaxed", 64, [], r"race in relaxed: thread .* reads value"),
    Case(LIBRARY, "no_init", 64, [], r"cuda::barrier: it is used before init\(\)"),
    Case(LIBRARY, "of_grid", 64, [], "barrier of a grid needs a cooperative launch"),
]  # fmt: skip


def outcome(case: Case) -> str:
    """Return the report of the first run that fails, "wrong" for a wrong result, else ""."""
    right = np.concatenate([np.ravel(part) for part in case.right] or [np.zeros(0)])
    found = ""
    for each in RUNS:
        out: Array = np.zeros(1024, np.float32)
        try:
            run(
                case.source, case.kernel, (1,), (case.block,), [X.copy(), out],
                order=each.order, races=each.races, build=each.build,
            )  # fmt: skip
        except ShimError as error:
            return error.report
        if not np.array_equal(out[: right.size], right):
            found = "wrong"
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.kernel}-{case.block}")
def test_a_kernel_is_judged(case: Case) -> None:
    said = outcome(case)
    assert bool(said) == bool(case.said), said
    assert re.search(case.said, said)

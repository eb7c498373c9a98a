"""The emulator's versions of CUDA's C++ libraries: CUB, barriers, pipelines, atomics and FP8."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from gpt2block.emulator import ShimError, Source, missing, run
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


class Case(NamedTuple):
    source: Source
    kernel: str
    block: int
    right: list[Any]  # arrays that form the output
    said: str = ""  # regex of the expected report; "wrong": the output is wrong


def before(x: Array) -> Array:
    """Return the sum of all numbers before each number."""
    return np.cumsum(x) - x


A, B = X[:96], X[:64]
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

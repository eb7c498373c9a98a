"""The emulator's cooperative groups: threads of a tile, and reductions over it."""

from __future__ import annotations

import numpy as np
import pytest

from gpt2block.emulator import ORDERS, ShimError, Source, loader, missing, run

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"no CUDA on the CPU: {missing()}")
PROBES = Source(
    "/groups.cu",
    """
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
namespace cg = cooperative_groups;

extern "C" __global__ void ranks(int* x) {  // (blockDim, 5)
    const cg::thread_block block = cg::this_thread_block();
    const cg::thread_block_tile<8> tile = cg::tiled_partition<8>(block);
    int* row = x + 5 * block.thread_rank();
    row[0] = tile.thread_rank();
    row[1] = tile.meta_group_rank();
    row[2] = tile.meta_group_size();
    row[3] = tile.size();
    row[4] = block.size();
}

extern "C" __global__ void sums(float* x, int from, int to) {  // of the threads of a tile
    const cg::thread_block_tile<8> tile = cg::tiled_partition<8>(cg::this_thread_block());
    if (tile.thread_rank() < from) return;
    float& own = x[threadIdx.x];
    if (tile.thread_rank() < to) own = cg::reduce(tile, own, cg::plus<float>());
    __syncthreads();
}
""",
)


def test_groups_know_their_threads() -> None:
    ranks = np.zeros((24, 5), np.int32)
    run(PROBES, "ranks", (1,), (6, 4), [ranks])
    i = np.arange(24)
    expected = np.stack([i % 8, i // 8, *(np.full(24, n) for n in (3, 8, 24))], axis=1)
    np.testing.assert_array_equal(ranks, expected)


@pytest.mark.parametrize("order", ORDERS)
def test_a_reduction_over_a_group(order: loader.Order) -> None:
    x = np.arange(32, dtype=np.float32)
    run(PROBES, "sums", (1,), (32,), [x, 0, 8], order=order)
    np.testing.assert_array_equal(x, np.arange(32).reshape(4, 8).sum(1).repeat(8))


def test_a_group_that_diverges_is_named() -> None:
    with pytest.raises(ShimError, match=r"divergent barrier in sums.*groups\.cu"):
        run(PROBES, "sums", (1,), (32,), [np.zeros(32, np.float32), 3, 5])

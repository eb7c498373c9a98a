"""Asynchronous copies, mbarriers, clusters and wgmma of the PTX engine: right and wrong kernels."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from gpt2block.cuda.kernels import SOURCE_DIR
from gpt2block.emulator.ptx import nvrtc, parse
from gpt2block.emulator.ptx.engine import CHECKED, ORDERS, Result, launch
from gpt2block.emulator.ptx.tensor_maps import TensorMap

Array = npt.NDArray[Any]
every_order = pytest.mark.parametrize("order", ORDERS)


@cache
def _module(text: str) -> parse.Module:
    compiled = nvrtc.compile(
        f'#include "lib/sm90_wgmma.cuh"\nextern "C" {text}',
        name="kernel.cu",
        arch="sm_90a",
        options=(f"-I{SOURCE_DIR}",),
    )
    assert isinstance(compiled, nvrtc.Compiled), compiled
    return parse.Module(compiled.ptx)


def run(
    text: str, args: list[Any], block: int = 128, grid: int = 1, order: Any = "forward"
) -> Result:
    """Launch the only kernel of a source that includes lib/sm90_wgmma.cuh."""
    module = _module(text)
    (kernel,) = (name for name, (entry, _) in module.functions.items() if entry)
    checks = CHECKED._replace(budget=10**6)
    return launch(module, kernel, (grid,), (block,), args, order=order, checks=checks)


def kinds(result: Result) -> list[str]:
    return [finding.kind for finding in result.findings]


# --- cp.async

COPY = """__global__ void copy(const float* from, float* to) {
    __shared__ __align__(16) float s[2][128];
    const unsigned at = shared_address(&s[0][threadIdx.x]);
    const float* mine = from + threadIdx.x;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(at), "l"(mine));
    asm volatile("cp.async.commit_group;");
    const unsigned next = shared_address(&s[1][threadIdx.x]);
    const int bytes = threadIdx.x % 2 ? 4 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                 :: "r"(next), "l"(mine + 128), "r"(bytes));
    asm volatile("cp.async.commit_group;");
    asm volatile("cp.async.wait_group 1;" ::: "memory");
    __syncthreads();  // first
    to[threadIdx.x] = s[0][127 - threadIdx.x];
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();  // second
    to[128 + threadIdx.x] = s[1][127 - threadIdx.x];
}"""
WAITS = ("wait_group 1", "wait_all")


@every_order
def test_groups_of_copies(order: str) -> None:
    given, to = np.arange(256, dtype=np.float32), np.zeros(256, np.float32)
    assert run(COPY, [given, to], order=order).findings == ()
    np.testing.assert_array_equal(to[:128], given[127::-1])
    second = np.where(np.arange(128) % 2, given[128:], 0)
    np.testing.assert_array_equal(to[128:], second[::-1])


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("wait_group 1", "wait_group 2", "race"),
        ('asm volatile("cp.async.wait_all;" ::: "memory");', "", "unwritten"),
        ("__syncthreads();  // first", "", "race"),
        ("__syncthreads();  // second", "", "race"),
        ("from + threadIdx.x", "from + 2 * threadIdx.x", "out of bounds"),
        ('"r"(next)', '"r"(next + 2)', "misaligned"),
    ],
)
def test_wrong_copies_are_found(old: str, new: str, found: str) -> None:
    assert old in COPY
    given, to = np.arange(256, dtype=np.float32), np.zeros(256, np.float32)
    assert kinds(run(COPY.replace(old, new), [given, to]))[:1] == [found]


# --- a pipeline with mbarriers and bulk copies: thread 0 requests, all other warps read

PIPELINE = """__global__ void pipeline(const float* from, float* to, int stages) {
    __shared__ __align__(128) float s[2][64];
    __shared__ Barrier full[2], empty[2];
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; ++i) init(full[i], 1), init(empty[i], 2);
        fence_inits();
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        if (threadIdx.x == 0) {
            for (int k = 0; k < stages; ++k) {
                if (k > 1) wait(empty[k % 2], k / 2 - 1 & 1, "empty");
                arrive_and_expect(full[k % 2], 256);
                load_bytes(s[k % 2], from + 64 * k, 256, full[k % 2]);
            }
        }
    } else if (threadIdx.x < 96) {
        const int i = threadIdx.x - 32;
        float sum = 0;
        for (int k = 0; k < stages; ++k) {
            wait(full[k % 2], k / 2 & 1, "full");
            sum += s[k % 2][63 - i];
            __syncwarp();
            if (threadIdx.x % 32 == 0) arrive(empty[k % 2]);
        }
        to[i] = sum;
    }
}"""


@every_order
def test_a_pipeline(order: str) -> None:
    given, to = np.arange(64 * 7, dtype=np.float32), np.zeros(64, np.float32)
    assert run(PIPELINE, [given, to, 7], order=order).findings == ()
    np.testing.assert_array_equal(to, given.reshape(7, 64).sum(0)[::-1])


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ('if (k > 1) wait(empty[k % 2], k / 2 - 1 & 1, "empty");', "", "race or barrier"),
        ('wait(full[k % 2], k / 2 & 1, "full");', "", "race"),
        ("__syncwarp();\n", "", "race"),
        ("init(empty[i], 2)", "init(empty[i], 1)", "barrier"),  # more arrivals than its count
        ("init(empty[i], 2)", "init(empty[i], 3)", "endless or barrier"),
        ("arrive_and_expect(full[k % 2], 256)", "arrive(full[k % 2])", "unwritten or race"),
        ("from + 64 * k, 256", "from + 64 * k + 2, 256", "misaligned"),
        ("from + 64 * k, 256", "from + 64 * (k + 1), 256", "out of bounds"),
        ("init(full[i], 1), ", "", "barrier"),
        ("    __syncthreads();\n", "", "barrier or race"),
    ],
)
def test_wrong_pipelines_are_found(old: str, new: str, found: str) -> None:
    assert old in PIPELINE
    given, to = np.arange(64 * 7, dtype=np.float32), np.zeros(64, np.float32)
    first = kinds(run(PIPELINE.replace(old, new), [given, to, 7]))[:1]
    assert first
    assert first[0] in found


# --- boxes of tensors

BOXES = """__global__ void boxes(const __grid_constant__ TensorMap from,
                                        const __grid_constant__ TensorMap to, int x, int y) {
    extern __shared__ __align__(1024) float s[];
    __shared__ Barrier full;
    if (threadIdx.x == 0) {
        init(full, 1);
        fence_inits();
        arrive_and_expect(full, 8 * 128);
        load_box(s, from, full, x, y, 1);
        wait(full, 0, "full");
        store_box(to, s, x + 1, y + 1, 0);
        end_stores();
        wait_for_reads<0>();
    }
}"""


def _map(array: Array, swizzle: int) -> TensorMap:
    item, sizes = array.itemsize, tuple(reversed(array.shape))
    strides = tuple(reversed(array.strides[:-1]))
    return TensorMap(array.reshape(-1), 0, item, sizes, strides, (128 // item, 8, 1), swizzle)


@pytest.mark.parametrize("swizzle", [0, 128])
@pytest.mark.parametrize(("x", "y"), [(0, 0), (8, 3), (-4, -2), (28, 9)])
def test_boxes_are_zero_outside_of_the_tensor(x: int, y: int, swizzle: int) -> None:
    given = np.random.default_rng(1).standard_normal((2, 12, 36)).astype(np.float32)
    stored = np.full((1, 14, 40), 7, np.float32)
    module = _module(BOXES)
    args = [_map(given, swizzle), _map(stored, swizzle), x, y]
    result = launch(module, "boxes", (1,), (32,), args, shared=1024)
    assert result.findings == ()
    padded = np.pad(given[1], 40)
    box = padded[40 + y : 48 + y, 40 + x : 72 + x]
    wanted = np.full((14 + 80, 40 + 80), 7, np.float32)
    wanted[41 + y : 49 + y, 41 + x : 73 + x] = box
    np.testing.assert_array_equal(stored[0], wanted[40:-40, 40:-40])


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("wait_for_reads<0>();", "", "async"),
        ('wait(full, 0, "full");', "", "unwritten"),
        ("load_box(s, ", "load_box(s + 16, ", "misaligned"),
    ],
)
def test_wrong_uses_of_tma_are_found(old: str, new: str, found: str) -> None:
    assert old in BOXES
    given, stored = np.zeros((2, 12, 36), np.float32), np.zeros((1, 14, 40), np.float32)
    module, args = _module(BOXES.replace(old, new)), [_map(given, 128), _map(stored, 128), 0, 0]
    assert kinds(launch(module, "boxes", (1,), (32,), args, shared=2048))[:1] == [found]


# --- clusters

CLUSTER = """__global__ void __cluster_dims__(4, 1, 1) ring(float* to) {
    __shared__ float s[32];
    const int rank = rank_in_cluster();
    *in_block_of_cluster(&s[threadIdx.x], (rank + 1) % 4) = blockIdx.x * 100 + threadIdx.x;
    release_to_cluster();
    acquire_from_cluster();
    to[32 * blockIdx.x + threadIdx.x] = s[31 - threadIdx.x];
}"""


@every_order
def test_blocks_of_a_cluster_write_to_each_other(order: str) -> None:
    to = np.zeros((8, 32), np.float32)
    assert run(CLUSTER, [to], 32, 8, order).findings == ()
    before = np.array([3, 0, 1, 2, 7, 4, 5, 6])
    np.testing.assert_array_equal(to, before[:, None] * 100 + np.arange(31, -1, -1))


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("release_to_cluster();\n    acquire_from_cluster();", "__syncthreads();", "race"),
        ("release_to_cluster();", "arrive_in_cluster();", "race"),
        ("(rank + 1) % 4", "rank + 1", "out of bounds"),
    ],
)
def test_wrong_clusters_are_found(old: str, new: str, found: str) -> None:
    assert old in CLUSTER
    assert kinds(run(CLUSTER.replace(old, new), [np.zeros((8, 32), np.float32)], 32, 8))[:1] == [
        found
    ]


LATE = """__global__ void __cluster_dims__(2, 1, 1) late(float* to) {
    __shared__ float s[32];
    const int rank = rank_in_cluster();
    if (threadIdx.x >= 32) return arrive_in_cluster();
    *in_block_of_cluster(&s[threadIdx.x], 1 - rank) = 100 * rank + threadIdx.x;
    release_to_cluster();
    acquire_from_cluster();
    to[32 * rank + threadIdx.x] = s[31 - threadIdx.x];
}"""


@every_order
def test_threads_that_arrive_and_return_count_once(order: str) -> None:
    to = np.zeros((2, 32), np.float32)
    assert run(LATE, [to], 96, 2, order).findings == ()
    np.testing.assert_array_equal(to, np.array([[100], [0]]) + np.arange(31, -1, -1))


MULTICAST = """__global__ void __cluster_dims__(2, 1, 1) everywhere(const float* from, float* to) {
    __shared__ __align__(128) float s[128];
    __shared__ Barrier full;
    const int rank = rank_in_cluster();
    if (threadIdx.x == 0) {
        init(full, 1);
        fence_inits();
        arrive_and_expect(full, 512);
    }
    sync_cluster();
    if (threadIdx.x == 0) load_bytes_for(3, s + 64 * rank, from + 64 * rank, 256, full);
    wait<true>(full, 0, "full");
    for (int i = threadIdx.x; i < 128; i += 32) to[128 * blockIdx.x + i] = s[i];
    sync_cluster();
}"""


@every_order
def test_a_copy_arrives_in_all_blocks_of_a_cluster(order: str) -> None:
    given, to = np.arange(128, dtype=np.float32), np.zeros((4, 128), np.float32)
    assert run(MULTICAST, [given, to], 32, 4, order).findings == ()
    np.testing.assert_array_equal(to, np.broadcast_to(given, to.shape))


# --- wgmma: A (64, 64), B (64, 64) in shared memory, with swizzled rows of 128 bytes

WGMMA = """__global__ void product(const unsigned short* a, const unsigned short* b, float* c) {
    __shared__ __align__(1024) unsigned char s[2][8192];
    for (int i = threadIdx.x; i < 4096; i += 128) {
        *(unsigned short*)(s[0] + swizzled(2 * i)) = a[i];
        *(unsigned short*)(s[1] + swizzled(2 * i)) = b[i];
    }
    show_writes();
    __syncthreads();
    float sums[32];
    for (int i = 0; i < 32; ++i) sums[i] = 1;
    fence_sums();
    for (int k = 0; k < 4; ++k) {
        multiply<ACROSS>(sums, further(matrix_at(s[0]), 32 * k),
                         further(matrix_at(s[1]), (ACROSS ? 2048 : 32) * k), true);
    }
    end_products();
    wait_for_products<0>();
    // here
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    for (int j = 0; j < 32; ++j) {
        c[(row + 8 * (j / 2 % 2)) * 64 + column + 8 * (j / 4) + j % 2] = sums[j];
    }
}"""


@every_order
@pytest.mark.parametrize("across", [False, True])
def test_a_product_of_a_warpgroup(across: bool, order: str) -> None:
    a, b, c = _matrices()
    text = WGMMA.replace("ACROSS", str(across).lower())
    assert run(text, [a.view(np.uint16), b.view(np.uint16), c], order=order).findings == ()
    right = b.astype(np.float32)
    np.testing.assert_array_equal(c, 1 + a.astype(np.float32) @ (right if across else right.T))


def test_every_lane_knows_that_its_warp_has_read() -> None:
    text = WGMMA.replace("ACROSS", "false")
    text = text.replace("show_writes();", "__shared__ Barrier read; init(read, 4); show_writes();")
    arrives = "if (threadIdx.x % 32 == 1) arrive(read);"
    writes = 'if (threadIdx.x == 0) { wait(read, 0, "read"); s[0][0] = s[1][640] = 1; }'
    text = text.replace("init(read, 4);", "if (threadIdx.x == 0) init(read, 4);")
    a, b, c = _matrices()
    args = [a.view(np.uint16), b.view(np.uint16), c]
    assert run(text.replace("// here", arrives + writes), args).findings == ()
    assert kinds(run(text.replace("// here", writes.replace('wait(read, 0, "read");', "")), args))


def _matrices() -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(5)
    a, b = (rng.integers(-8, 9, (64, 64)).astype(np.float16) for _ in range(2))
    return a, b, np.zeros((64, 64), np.float32)


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("wait_for_products<0>();", "", "async"),
        ("wait_for_products<0>();", "wait_for_products<1>();", "async"),
        ("wait_for_products<0>();", "s[1][64 * threadIdx.x] = 0; wait_for_products<0>();", "race"),
        ("    __syncthreads();\n", "", "race"),
    ],
)
def test_wrong_products_of_a_warpgroup_are_found(old: str, new: str, found: str) -> None:
    text = WGMMA.replace("ACROSS", "false")
    assert old in text
    a, b, c = _matrices()
    args = [a.view(np.uint16), b.view(np.uint16), c]
    assert kinds(run(text.replace(old, new), args))[:1] == [found]

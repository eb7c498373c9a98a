"""nvcuda::wmma on the emulator: products of every type, shape and layout, and wrong uses."""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from gpt2block.emulator import ShimError, Source, missing, run

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"no CUDA on the CPU: {missing()}")

Floats = NDArray[np.float32]
PRODUCT = """#include <mma.h>
using namespace nvcuda;
__device__ half stored(half, float v) { return __float2half(v); }
__device__ __nv_bfloat16 stored(__nv_bfloat16, float v) { return __float2bfloat16(v); }
__device__ float stored(float, float v) { return wmma::__float_to_tf32(v); }

template <int M, int N, int K, typename T, typename A, typename B, typename Sum>
__device__ void times(const float* a, const float* b, const float* c, float* out, int lda,
                      int ldb) {
    typedef wmma::fragment<wmma::matrix_a, M, N, K, T, A> Left;
    typedef typename Left::storage_element_type Operand;
    __shared__ alignas(32) Operand sa[32 * 24], sb[32 * 24];
    __shared__ alignas(32) Sum sums[M * N];
    for (int i = threadIdx.x; i < 32 * 24; i += 32) {
        sa[i] = stored(Operand(), a[i]);
        sb[i] = stored(Operand(), b[i]);
    }
    for (int i = threadIdx.x; i < M * N; i += 32) sums[i] = c[i];
    __syncwarp();
    Left left;
    wmma::fragment<wmma::matrix_b, M, N, K, T, B> right;
    wmma::fragment<wmma::accumulator, M, N, K, Sum> before, after, zero;
    wmma::load_matrix_sync(left, sa, lda);
    wmma::load_matrix_sync(right, sb, ldb);
    wmma::load_matrix_sync(before, sums, N, wmma::mem_row_major);
    wmma::fill_fragment(zero, 0.0f);
    wmma::mma_sync(after, left, right, zero);
    for (int i = 0; i < after.num_elements; ++i) after.x[i] = after.x[i] * Sum(0.5f) + before.x[i];
    for (int i = 0; i < left.num_elements; ++i) left.x[i] = left.x[i] + left.x[i];
    wmma::mma_sync(after, left, right, after);
    wmma::store_matrix_sync(sums, after, M, wmma::mem_col_major);
    __syncwarp();
    for (int i = threadIdx.x; i < M * N; i += 32) out[i] = sums[i];
}
"""
CALL = """
extern "C" __global__ void {name}(const float* a, const float* b, const float* c, float* out) {{
    times<{m}, {n}, {k}, {type}, wmma::{a}, wmma::{b}, {sum}>(a, b, c, out, {lda}, {ldb});
}}
"""
MAJOR = ("row_major", "col_major")
DTYPES = {"half": np.float16, "__nv_bfloat16": ml_dtypes.bfloat16}


class Case(NamedTuple):
    operand: str
    sum: str
    m: int
    n: int
    k: int
    a: str
    b: str

    @property
    def name(self) -> str:
        return "_".join(map(str, self)).replace("wmma::precision::", "")

    @property
    def strides(self) -> tuple[int, int]:
        """Strides of a and b: 8 elements more than a row or column, if memory has room."""
        lda = self.k if self.a == MAJOR[0] else self.m
        ldb = self.n if self.b == MAJOR[0] else self.k
        return (lda + 8 if lda < 32 else lda), (ldb + 8 if ldb < 32 else ldb)

    @property
    def call(self) -> str:
        lda, ldb = self.strides
        return CALL.format(name=self.name, type=self.operand, lda=lda, ldb=ldb, **self._asdict())


TYPES = (("half", "float"), ("half", "half"), ("__nv_bfloat16", "float"))
SHAPES = ((16, 16, 16), (32, 8, 16), (8, 32, 16))
CASES = [
    *(Case(*t, *shape, a, b) for t, shape, a, b in product(TYPES, SHAPES, MAJOR, MAJOR)),
    *(Case("wmma::precision::tf32", "float", 16, 16, 8, a, b) for a, b in product(MAJOR, MAJOR)),
]
SOURCE = Source("/wmma.cu", PRODUCT + "".join(case.call for case in CASES))


def rounded(values: Floats, operand: str) -> NDArray[np.float64]:
    """Round as kernels store operands; TF32: to the nearest numbers with 10 bits of fraction."""
    if operand in DTYPES:
        return values.astype(DTYPES[operand]).astype(np.float64)
    return ((values.view(np.uint32) + 0x1000) & 0xFFFFE000).view(np.float32).astype(np.float64)


def matrix(memory: NDArray[Any], rows: int, columns: int, stride: int, major: str) -> NDArray[Any]:
    """Return the matrix at the start of memory; rows or columns are `stride` elements apart."""
    long, short = (rows, columns) if major == MAJOR[0] else (columns, rows)
    found = memory[: long * stride].reshape(long, stride)[:, :short]
    return found if major == MAJOR[0] else found.T


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_product(case: Case) -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(32 * 24, np.float32) for _ in range(2))
    c = rng.standard_normal(case.m * case.n, np.float32)
    out = np.zeros(case.m * case.n, np.float32)
    run(SOURCE, case.name, (1,), (32,), [a, b, c, out], order="shuffled")
    left = matrix(rounded(a, case.operand), case.m, case.k, case.strides[0], case.a)
    right = matrix(rounded(b, case.operand), case.k, case.n, case.strides[1], case.b)
    expected = 2.5 * (left @ right) + c.reshape(case.m, case.n)
    within = 3e-2 if case.sum == "half" else 1e-5
    np.testing.assert_allclose(out.reshape(case.n, case.m).T, expected, rtol=0, atol=within)


# A product of 16 x 16 tiles of half, in which WRONG replaces a line

TILE = """#include <mma.h>
using namespace nvcuda;
extern "C" __global__ void tile(const float* x, float* out, int n) {
    __shared__ alignas(32) half s[16 * 24];
    __shared__ alignas(32) float sums[256];
    for (int i = threadIdx.x; i < 16 * 24; i += blockDim.x) s[i] = __float2half(x[i]);
    __syncthreads();
    wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> a;
    wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::row_major> b;
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> c;
    wmma::fill_fragment(c, 0.0f);
    wmma::load_matrix_sync(a, s, 24);
    wmma::load_matrix_sync(b, s, 24);
    wmma::mma_sync(c, a, b, c);
    if (threadIdx.x < 32) wmma::store_matrix_sync(sums, c, 16, wmma::mem_row_major);
    __syncthreads();
    for (int i = threadIdx.x; i < 256; i += blockDim.x) out[i] = sums[i];
}
"""
BARRIER = """    __syncthreads();
    for (int i = threadIdx.x; i < 256"""
NO_BARRIER = BARRIER.partition("\n")[2]
LOAD = "wmma::load_matrix_sync(a, s, 24)"


def launch(old: str = "", new: str = "", races: bool = False) -> Floats:
    assert not old or TILE.count(old) == 1
    x = np.random.default_rng(1).standard_normal(500, np.float32)
    out = np.zeros(256, np.float32)
    source = Source("/tile.cu", TILE.replace(old, new) if old else TILE)
    run(source, "tile", (1,), (64,), [x, out, 500], races=races)
    half = x[: 16 * 24].astype(np.float16).astype(np.float64).reshape(16, 24)[:, :16]
    np.testing.assert_allclose(out.reshape(16, 16), half @ half, atol=1e-5)
    return out


@pytest.mark.parametrize("races", [False, True])
def test_a_right_tile(races: bool) -> None:
    launch(races=races)


@pytest.mark.parametrize(
    ("old", "new", "races", "said"),
    [
        (BARRIER, NO_BARRIER, True, r"race in tile: .*writes sums\[\d+\] at .*tile\.cu:15"),
        ("0.0f);\n", "0.0f);\n    s[threadIdx.x] = 0;\n", True, r"race in tile: .* s\[.*tile\.cu"),
        (LOAD, f"if (threadIdx.x < 40) {LOAD}", False, r"divergent barrier .*tile\.cu:12"),
        (LOAD, "wmma::load_matrix_sync(a, s, 20)", False, "row stride is not a multiple"),
        (LOAD, "wmma::load_matrix_sync(a, s + 2, 24)", False, "address of the matrix"),
        (LOAD, "wmma::load_matrix_sync(a, s + 32, 24)", False, r"tile\.cu:12"),
        ("16, 16, 16, float> c", "16, 16, 8, half> c", False, "does not compile"),
    ],
    ids=["no barrier", "other warp", "half a warp", "stride", "address", "bounds", "shape"],
)
def test_a_wrong_tile(old: str, new: str, races: bool, said: str) -> None:
    with pytest.raises(ShimError, match=said):
        launch(old, new, races)

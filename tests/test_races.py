"""The emulator finds races: accesses of two threads to one place that no barrier orders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gpt2block.bench import measure
from gpt2block.cuda import kernels
from gpt2block.emulator import Checks, ShimError, Source, emulated, missing, run
from gpt2block.ops.registry import find

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"no CUDA on the CPU: {missing()}")

REDUCE = """extern "C" __global__ void total(const float* x, float* out, int C) {
    __shared__ float part[64];
    const int t = threadIdx.x;
    float sum = 0.0f;
    for (int c = t; c < C; c += 64) sum += x[blockIdx.x * C + c];
    part[t] = sum;
    __syncthreads();
    for (int n = 32; n > 0; n /= 2) {
        if (t < n) part[t] += part[t + n];
        BARRIER
    }
    if (t == 0) out[blockIdx.x] = part[0];
}
"""


def total(barrier: str) -> np.ndarray[Any, Any]:
    x = np.random.default_rng(0).standard_normal((3, 200), dtype=np.float32)
    out = np.full(3, np.nan, np.float32)
    source = Source("/tmp/total.cu", REDUCE.replace("BARRIER", barrier))
    run(source, "total", (3,), (64,), [x, out, 200], races=True)
    np.testing.assert_allclose(out, x.sum(axis=1), rtol=1e-4, atol=1e-4)
    return out


def small(body: str, args: Sequence[Any], block: int = 64, grid: int = 1, shared: int = 0) -> None:
    """Launch a kernel of floats `out` and an int `n`, whose body begins at line 2."""
    text = f'extern "C" __global__ void k(float* out, int n) {{\n{body}\n}}\n'
    run(Source("/tmp/k.cu", text), "k", (grid,), (block,), args, races=True, shared=shared)


def out(n: int = 64) -> np.ndarray[Any, Any]:
    return np.zeros(n, np.float32)


def test_a_missing_barrier_is_a_race_with_both_lines() -> None:
    said = (
        r"race in total: thread \(1, 0, 0\) writes byte 4 of the shared variables at "
        r"\S*total\.cu:9; thread \(0, 0, 0\) read it at \S*total\.cu:9, and no barrier"
    )
    with pytest.raises(ShimError, match=said):
        total("")


@pytest.mark.parametrize("barrier", ["__syncthreads();", "__syncwarp();"])
def test_barriers_order_accesses(barrier: str) -> None:
    """Below 32 threads the tree is in one warp, which __syncwarp orders."""
    total(barrier)


def test_a_warp_barrier_does_not_order_other_warps() -> None:
    body = "extern __shared__ float s[];\ns[threadIdx.x] = 1.0f;\n__syncwarp();\n"
    same = "out[threadIdx.x] = s[threadIdx.x ^ 1];"
    small(body + same, [out(), 0], shared=256)
    other = "out[threadIdx.x] = s[threadIdx.x ^ 32];"
    with pytest.raises(ShimError, match=r"of the dynamic shared memory at \S*k\.cu:5.* wrote it"):
        small(body + other, [out(), 0], shared=256)


def test_a_mask_orders_its_lanes_alone() -> None:
    """Lanes 0 to 15 and 16 to 31 synchronise separately."""
    body = (
        "__shared__ float s[32];\ns[threadIdx.x] = 1.0f;\n"
        "__syncwarp(threadIdx.x < 16 ? 0xffffu : 0xffff0000u);\n"
    )
    small(body + "out[threadIdx.x] = s[threadIdx.x ^ 1];", [out(), 0], block=32)
    with pytest.raises(ShimError, match="race in k"):
        small(body + "out[threadIdx.x] = s[threadIdx.x ^ 16];", [out(), 0], block=32)


def test_two_threads_that_write_one_element_are_a_race() -> None:
    with pytest.raises(ShimError, match=r"writes byte 0 of out at \S*k\.cu:2; .* wrote it"):
        small("out[0] = threadIdx.x;", [out(), 0])


def test_two_blocks_that_write_one_element_are_a_race() -> None:
    body = "if (threadIdx.x == 0) out[0] = blockIdx.x;"
    small(body, [out(), 0], grid=1)
    with pytest.raises(ShimError, match=r"of another block wrote it .* nothing orders two blocks"):
        small(body, [out(), 0], grid=2)


def test_atomics_are_no_race() -> None:
    counted = out(1)
    small("atomicAdd(out, 1.0f);", [counted, 0], grid=3)
    assert counted[0] == 192


def test_shared_memory_of_the_block_before_is_another_one() -> None:
    body = (
        "__shared__ float s[64];\ns[threadIdx.x] = blockIdx.x;\nout[64 * blockIdx.x + threadIdx.x]"
    )
    small(f"{body} = s[threadIdx.x];", [out(128), 0], grid=2)


@pytest.mark.parametrize(
    ("name", "variant"),
    [("softmax", "online_block"), ("layernorm", "2"), ("trimat", "tri5"), ("linear", "mma")],
)
def test_built_in_kernels_have_no_race(name: str, variant: str) -> None:
    """Trees in shared memory, warps, copies in flight, tensor cores."""
    operation = find(name)
    sizes, attrs = operation.cases[-1]
    own = replace(operation, attrs={**operation.attrs, **attrs})
    dtype, layout = measure.check_storage(own)
    host, truth = measure.inputs_and_truth(own, sizes, dtype, layout)
    with emulated(checks=Checks(races=True)):
        arrays = tuple(map(measure.uploaded, host))
        bound = own.bind(arrays, **own.attrs, variant=variant)
        assert measure.errors(np.asarray(bound.run()), truth)[1] <= measure.tolerance(dtype)


def test_a_kernel_that_does_not_end_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    text = 'extern "C" __global__ void k(float* out, int n) {\n    while (n == 0) {\n'
    text += "        out[0] += 1.0f;\n    }\n}\n"
    monkeypatch.setattr(kernels, "read_source", lambda file: text)
    with emulated(checks=Checks(limit_s=0.5)) as cupy:
        array = cupy.asarray(out(1))
        kernel = cupy.RawModule(kernels.program("elementwise/gelu.cu")).get_function("k")
        with pytest.raises(ShimError, match=r"still running after 0.5 s(.|\n)*gelu\.cu:[23]"):
            kernel((1,), (1,), (np.uintp(array.data.ptr), np.int32(0)))

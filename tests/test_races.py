"""The emulator finds races: accesses of two threads to one address that no barrier orders."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpt2block.bench import measure
from gpt2block.cuda import kernels
from gpt2block.emulator import Checks, ShimError, Source, emulated, missing, run
from gpt2block.ops.registry import find

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"no CUDA on the CPU: {missing()}")

REDUCE = """__shared__ float part[64];
    const int t = threadIdx.x;
    float sum = 0.0f;
    for (int c = t; c < n; c += 64) sum += x[blockIdx.x * n + c];
    part[t] = sum;
    __syncthreads();
    for (int n = 32; n > 0; n /= 2) {
        if (t < n) part[t] += part[t + n];
        BARRIER
    }
    if (t == 0) out[blockIdx.x] = part[0];"""
WARPS = """extern __shared__ float s[];
    s[threadIdx.x] = 1.0f;
    __syncwarp();
    out[threadIdx.x] = s[threadIdx.x ^ OTHER];"""
MASKS = """__shared__ float s[32];
    s[threadIdx.x] = 1.0f;
    __syncwarp(threadIdx.x < 16 ? 0xffffu : 0xffff0000u);
    out[threadIdx.x] = s[threadIdx.x ^ OTHER];"""
BODIES = {
    "reduce": REDUCE.replace("BARRIER", ""),
    "reduce_block": REDUCE.replace("BARRIER", "__syncthreads();"),
    "reduce_warp": REDUCE.replace("BARRIER", "__syncwarp();"),
    "same_warp": WARPS.replace("OTHER", "1"),
    "other_warp": WARPS.replace("OTHER", "32"),
    "same_mask": MASKS.replace("OTHER", "1"),
    "other_mask": MASKS.replace("OTHER", "16"),
    "one_element": "out[0] = threadIdx.x;",
    "blocks": "if (threadIdx.x == 0) out[0] = blockIdx.x;",
    "atomic": "atomicAdd(out, 1.0f);",
    "next_block": (
        "__shared__ float s[64];\n    s[threadIdx.x] = blockIdx.x;\n"
        "    out[64 * blockIdx.x + threadIdx.x] = s[threadIdx.x];"
    ),
}
KERNEL = """extern "C" __global__ void NAME(const float* x, float* out, int n) {
    BODY
}
"""
PARTS = [KERNEL.replace("NAME", name).replace("BODY", body) for name, body in BODIES.items()]
SOURCE = Source("/tmp/k.cu", "".join(PARTS))


def launch(
    name: str, elements: int = 64, block: int = 64, grid: int = 1, shared: int = 0
) -> np.ndarray[Any, Any]:
    x = np.random.default_rng(0).standard_normal((grid, 200), dtype=np.float32)
    out = np.zeros(elements, np.float32)
    run(SOURCE, name, (grid,), (block,), [x, out, 200], races=True, shared=shared)
    if name.startswith("reduce"):
        np.testing.assert_allclose(out, x.sum(axis=1), rtol=1e-4, atol=1e-4)
    return out


def at(name: str, line: int) -> str:
    """Return a pattern for the file and line of a line of a body, from 1."""
    before = "".join(PARTS[: list(BODIES).index(name)]).count("\n")
    return rf"\S*k\.cu:{before + 1 + line}"


def test_a_missing_barrier_is_a_race_with_both_lines() -> None:
    line = at("reduce", 8)
    said = (
        r"race in reduce: thread \(1, 0, 0\) writes part\[1\] at "
        rf"{line}; thread \(0, 0, 0\) read it at {line}, and no barrier"
    )
    with pytest.raises(ShimError, match=said):
        launch("reduce", 3, grid=3)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("reduce_block", {"elements": 3, "grid": 3}),
        ("reduce_warp", {"elements": 3, "grid": 3}),  # below 32 threads the tree is in one warp
        ("same_warp", {"shared": 256}),
        ("same_mask", {"block": 32}),  # lanes 0 to 15 and 16 to 31 synchronise separately
        ("blocks", {}),
        ("next_block", {"elements": 128, "grid": 2}),  # each block has its own shared memory
    ],
)
def test_ordered_accesses_are_no_race(name: str, options: dict[str, int]) -> None:
    launch(name, **options)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("other_warp", {"shared": 256}, rf"reads s\[32\] at {at('other_warp', 4)}.*"),
        ("other_mask", {"block": 32}, "race in other_mask"),
        ("one_element", {}, rf"writes out\[0\] at {at('one_element', 1)}; .* wrote it"),
        ("blocks", {"grid": 2}, "of another block wrote it .* nothing orders two blocks"),
    ],
)
def test_accesses_that_nothing_orders_are_a_race(
    name: str, options: dict[str, int], said: str
) -> None:
    with pytest.raises(ShimError, match=said):
        launch(name, **options)


def test_atomics_are_no_race() -> None:
    assert launch("atomic", 1, grid=3)[0] == 192


@pytest.mark.parametrize(
    ("name", "variant"),
    [("softmax", "online_block"), ("layernorm", "2"), ("trimat", "tri5"), ("linear", "mma")],
)
def test_built_in_kernels_have_no_race(name: str, variant: str) -> None:
    """Kernels use trees in shared memory, shuffles, asynchronous copies, and tensor cores."""
    operation = find(name)
    sizes, attrs = operation.cases[-1]
    own = operation.with_workload(attrs={**operation.workload.attrs, **attrs})
    dtype, layout = measure.check_storage(own)
    host, truth = measure.inputs_and_truth(own, sizes, dtype, layout)
    with emulated(checks=Checks(races=True)):
        arrays = tuple(map(measure.uploaded, host))
        bound = own.bind(arrays, **own.workload.attrs, variant=variant)
        assert measure.errors(np.asarray(bound.run()), truth)[1] <= measure.tolerance(dtype)


def test_a_kernel_that_does_not_end_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    text = 'extern "C" __global__ void k(float* out, int n) {\n    while (n == 0) {\n'
    text += "        out[0] += 1.0f;\n    }\n}\n"
    monkeypatch.setattr(kernels, "read_source", lambda file: text)
    with emulated(checks=Checks(limit_s=0.5)) as cupy:
        array = cupy.zeros(1, "float32")
        kernel = cupy.RawModule(kernels.program("learn/elementwise/gelu.cu")).get_function("k")
        with pytest.raises(ShimError, match=r"still running after 0.5 s(.|\n)*gelu\.cu:[23]"):
            kernel((1,), (1,), (np.uintp(array.data.ptr), np.int32(0)))

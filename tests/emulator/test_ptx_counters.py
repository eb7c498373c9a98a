"""Counters of the PTX engine: kernels of one line whose counts follow from the hardware's rules."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from gpt2block.emulator.ptx import engine, nvrtc
from gpt2block.emulator.ptx.engine import ORDERS, Result
from gpt2block.emulator.ptx.parse import Module

pytestmark = pytest.mark.skipif(engine.missing() is not None, reason="no NVRTC or no g++")

HEAD = r"""
__noinline__ __device__ float called(float v) { return v + 1; }
#define AT(p) "r"((unsigned)__cvta_generic_to_shared(p))
#define COPY(to, from) \
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: AT(to), "l"(from))
#define MATRICES(d, row) \
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" \
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : AT(row))
"""
SHARED = "__shared__ __align__(16) float tile[4096]; tile[t] = t; __syncwarp();"
LOOP = '_Pragma("unroll 1") for (int k = 0;'
# A line that one warp executes with t = threadIdx.x, x and out of 4,096 floats: all counters that
# are not 0, except for numbers of instructions. Lines before it prepare shared memory.
COPIED = "load_requests=1 load_sectors=16 copied_bytes=512"
LINES = {
    "v = x[t];": "load_requests=1 load_sectors=4 load_bytes=128",
    "v = x[t + 1];": "load_requests=1 load_sectors=5 load_bytes=128",
    "v = x[32 * t];": "load_requests=1 load_sectors=32 load_bytes=128",
    "v = x[8 * (t / 8)];": "load_requests=1 load_sectors=4 load_bytes=128",
    "v = ((float4*)x)[t].w + ((float4*)x)[t].x;": "load_requests=1 load_sectors=16 load_bytes=512",
    "v = ((char*)x)[t];": "load_requests=1 load_sectors=1 load_bytes=32",
    "if (t < 3) v = x[8 * t];": "load_requests=1 load_sectors=3 load_bytes=12 branches=1",
    "out[2 * t] = 1;": "store_requests=1 store_sectors=8 store_bytes=128",
    "((float2*)out)[t] = {1, 2};": "store_requests=1 store_sectors=8 store_bytes=256",
    "atomicAdd(out, v);": "atomics=1",
    "v = tile[t];": "shared_requests=1",
    "v = tile[5];": "shared_requests=1",
    "v = tile[2 * t];": "shared_requests=1 bank_conflicts=1",
    "v = tile[32 * t];": "shared_requests=1 bank_conflicts=31",
    "v = tile[33 * t];": "shared_requests=1",
    "v = *(double*)&tile[2 * t];": "shared_requests=1",
    "v = *(double*)&tile[4 * t];": "shared_requests=1 bank_conflicts=2",
    "*(float4*)&tile[4 * t] = float4();": "shared_requests=1",
    "*(float4*)&tile[8 * t] = float4();": "shared_requests=1 bank_conflicts=4",
    "atomicAdd(&tile[16 * t], v);": "atomics=1 shared_requests=1 bank_conflicts=15",
    "MATRICES(d, tile + 4 * t);": "shared_requests=1",
    "MATRICES(d, tile + 32 * t);": "shared_requests=1 bank_conflicts=28",
    "COPY(tile + 4 * t, x + 4 * t);": f"{COPIED} shared_requests=1",
    "COPY(tile + 32 * t, x + 4 * t);": f"{COPIED} shared_requests=1 bank_conflicts=28",
    "v = *(double*)&tile[32 * (t / 2)];": "shared_requests=1 bank_conflicts=15",
    "own[n & 7] = v;": "local_bytes=128",
    "v = called(v);": "",
    "v = __shfl_xor_sync(~0u, v, 1) + __shfl_xor_sync(~0u, v, 2);": "shuffles=2",
    "__syncthreads();": "barriers=1",
    f"{LOOP} k < n; ++k) v += __sinf(v);": "branches=6 uniform_branches=6",
    f"{LOOP} k < t; ++k) v += __sinf(v);": "branches=32 uniform_branches=1",
}


def kernel(number: int, line: str) -> str:
    shared = SHARED if "tile" in line else ""
    return f"""extern "C" __global__ void k{number}(float* x, float* out, int n) {{
    const int t = threadIdx.x; float v = t; unsigned d[4] = {{}}; float own[8] = {{}}; {shared}
#line {number} "lines.cu"
    {line}
#line 1000 "lines.cu"
    out[t] = v + d[0] + d[1] + d[2] + d[3] + own[(n + 1) & 7];
}}
"""


@cache
def module() -> Module:
    kernels = "".join(kernel(number, line) for number, line in enumerate(LINES, 1))
    made = nvrtc.compile(HEAD + kernels, name="lines.cu", arch="sm_80")
    assert isinstance(made, nvrtc.Compiled), made
    return Module(made.ptx)


def launch(line: str, **options: object) -> Result:
    args = np.zeros(4096, np.float32), np.zeros(4096, np.float32), 5
    name = f"k{list(LINES).index(line) + 1}"
    return engine.launch(module(), name, (1,), (32,), args, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("line", LINES)
def test_a_line_has_the_counts_that_the_rules_of_the_hardware_give(line: str) -> None:
    for order in (ORDERS[0], ORDERS[3]):
        result = launch(line, order=order, checks=engine.Checks(counters=True))
        assert not result.findings
        counts = {at.number: each for at, each in result.counts.items()}
        found = counts[list(LINES).index(line) + 1]._asdict()
        assert found.pop("instructions") > 0
        assert " ".join(f"{name}={value}" for name, value in found.items() if value) == LINES[line]
        assert sum(each.instructions for each in counts.values()) == result.instructions


def test_nothing_is_counted_unless_asked_for() -> None:
    assert launch("v = x[t];").counts == {}

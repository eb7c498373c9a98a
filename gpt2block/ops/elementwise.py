"""Residual addition and GELU of LeetGPU's ten-step GPT-2 block, and the gate of a Llama.

Kernels: elementwise/residual.cu, elementwise/gelu.cu and llama/silu_mul.cu.
"""

from __future__ import annotations

from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import (
    Bound,
    CudaArray,
    alignment,
    check,
    check_alignment,
    contiguous,
    launch_at,
    output,
    storage,
)
from gpt2block.cuda.kernels import Geometry, Launch, launch
from gpt2block.errors import InputError
from gpt2block.ops.operation import Operation, Sizes, Variant
from gpt2block.ops.warm import call

CHALLENGE = "LeetGPU's GPT-2 block challenge"
SILU_MUL_FILE = "llama/silu_mul.cu"
BLOCK = 256


def _launch_add(job: tuple[CudaArray, CudaArray, CudaArray]) -> tuple[Launch, ...]:
    """job: a, b, out."""
    size = job[0].size
    grid, args = (ceil(size / BLOCK),), (*job, size)
    return (launch("elementwise/residual.cu", "add_kernel", grid, (BLOCK,), args),)


def bind_add(inputs: tuple[Any, ...], out: CudaArray | None = None) -> Bound:
    """inputs (a, b), out; all of one shape. out may be a or b."""
    a, b = inputs
    check("a", a)
    check("b", b, a.shape)
    out = output(out, a.shape, apart={}, in_place={"a": a, "b": b})
    return Bound(out, _launch_add((a, b, out)))


def _launch_gelu(x: CudaArray) -> tuple[Launch, ...]:
    grid, args = (ceil(x.size / BLOCK),), (x, x.size)
    return (launch("elementwise/gelu.cu", "gelu_kernel", grid, (BLOCK,), args),)


def bind_gelu(inputs: tuple[Any, ...], out: CudaArray | None = None) -> Bound:
    """inputs (x,); the kernel works in place, so `out` is x itself."""
    (x,) = inputs
    check("x", x)
    if out is not None and out.data.ptr != x.data.ptr:
        raise InputError("out: gelu_kernel works in place, expected x itself")
    return Bound(x, _launch_gelu(x))


def _normal(rng: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    values: NDArray[np.float32] = rng.standard_normal(shape, dtype=np.float32) + np.float32(0.5)
    return values


def _elements(s: Sizes) -> int:
    return s["N"] * s["C"]


ADD = Operation(
    name="add",
    document=CHALLENGE,
    idea="a + b, the residual connection",
    sizes={"N": 8192, "C": 768},
    variants=(
        Variant(
            "add",
            "elementwise/residual.cu",
            ("add_kernel",),
            "one thread per element",
            launch=_launch_add,
        ),
    ),
    make=lambda s, rng: (_normal(rng, s["N"], s["C"]), _normal(rng, s["N"], s["C"])),
    traffic=lambda s: 12 * _elements(s),
    flops=_elements,
    bound="memory",
    attrs={},
    binder=bind_add,
)


def add(a: CudaArray, b: CudaArray) -> CudaArray:
    """`reference.add` on float32 CuPy arrays of one shape; raises InputError."""
    return call(bind_add, contiguous(a, b)).out


GELU = Operation(
    name="gelu",
    document=CHALLENGE,
    idea="0.5 x (1 + tanh(sqrt(2/π) (x + 0.044715 x³))), in place",
    sizes={"N": 8192, "C": 3072},
    variants=(
        Variant(
            "gelu",
            "elementwise/gelu.cu",
            ("gelu_kernel",),
            "one thread per element",
            launch=_launch_gelu,
        ),
    ),
    make=lambda s, rng: (_normal(rng, s["N"], s["C"]),),
    traffic=lambda s: 8 * _elements(s),
    flops=lambda s: 8 * _elements(s),
    bound="memory",
    attrs={},
    largest=lambda x, *_: x,
    binder=bind_gelu,
)


def gelu(x: CudaArray) -> CudaArray:
    """`reference.gelu` on a float32 CuPy array, into a new one; raises InputError."""
    if isinstance(x, cupy.ndarray):
        check_alignment("x", x)
        x = x.copy(order="C")  # the kernel works in place
    return bind_gelu((x,)).run()


def silu_mul_geometry(size: int, aligned: int, itemsize: int) -> Geometry:
    """For `size` elements; aligned: the alignment of the arrays in bytes."""
    width = aligned // itemsize  # elements a load
    while size % width:
        width //= 2
    defines = (("SM_WIDTH", width),)
    return Geometry("silu_mul", (ceil(size / (width * BLOCK)),), (BLOCK,), defines=defines)


def _launch_silu_mul(job: tuple[CudaArray, CudaArray, CudaArray]) -> tuple[Launch, ...]:
    """job: gate, up, out."""
    first = job[0]
    aligned = alignment(*(array.data.ptr for array in job))
    geometry = silu_mul_geometry(first.size, aligned, first.itemsize)
    return (launch_at(SILU_MUL_FILE, geometry, (*job, first.size), storage=first.dtype.name),)


def bind_silu_mul(inputs: tuple[Any, ...], out: CudaArray | None = None) -> Bound:
    """inputs (gate, up), out; all of one shape and dtype. out may be gate or up."""
    gate, up = inputs
    dtype = storage(gate)
    check("gate", gate, dtype=dtype)
    check("up", up, gate.shape, dtype)
    out = output(out, gate.shape, dtype, apart={}, in_place={"gate": gate, "up": up})
    return Bound(out, _launch_silu_mul((gate, up, out)))


SILU_MUL = Operation(
    name="silu_mul",
    document="gpt2block",
    idea="gate / (1 + exp(-gate)) · up, the gated feed-forward of Llama",
    sizes={"M": 16, "N": 11008},
    variants=(
        Variant(
            "silu_mul",
            SILU_MUL_FILE,
            ("silu_mul",),
            "one thread per vector; launches may overlap",
            launch=_launch_silu_mul,
        ),
    ),
    make=lambda s, rng: (_normal(rng, s["M"], s["N"]), _normal(rng, s["M"], s["N"])),
    traffic=lambda s: 3 * s["itemsize"] * s["M"] * s["N"],
    flops=lambda s: 4 * s["M"] * s["N"],
    bound="memory",
    attrs={},
    dtypes=("float32", "float16", "bfloat16"),
    binder=bind_silu_mul,
)


def silu_mul(gate: CudaArray, up: CudaArray) -> CudaArray:
    """`reference.silu_mul` on CuPy arrays of one shape and dtype, float32 or 16 bits.

    Raises InputError.
    """
    return call(bind_silu_mul, contiguous(gate, up)).out

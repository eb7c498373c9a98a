"""The operations of the ten-step block that have one kernel each."""

from __future__ import annotations

from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import Bound, CudaArray, check, check_alignment, contiguous, output
from gpt2block.cuda.kernels import launch
from gpt2block.errors import InputError
from gpt2block.ops.operation import Operation, Sizes, Variant
from gpt2block.ops.warm import call

TEN_STEPS = "ten-step block"


def _normal(rng: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    values: NDArray[np.float32] = rng.standard_normal(shape, dtype=np.float32) + np.float32(0.5)
    return values


def _elements(s: Sizes) -> int:
    return s["N"] * s["C"]


BLOCK = 256


def bind_add(inputs: tuple[Any, ...], out: CudaArray | None = None) -> Bound:
    """inputs (a, b), out; all of one shape."""
    a, b = inputs
    check("a", a)
    check("b", b, a.shape)
    out = output(out, a.shape, apart={}, in_place={"a": a, "b": b})
    grid = (ceil(a.size / BLOCK),)
    return Bound(
        out, (launch("elementwise/residual.cu", "add_kernel", grid, (BLOCK,), (a, b, out, a.size)),)
    )


def bind_gelu(inputs: tuple[Any, ...], out: CudaArray | None = None) -> Bound:
    """inputs (x,); the kernel works in place, so `out` is x itself."""
    (x,) = inputs
    check("x", x)
    if out is not None and out.data.ptr != x.data.ptr:
        raise InputError("out: gelu_kernel works in place, expected x itself")
    grid = (ceil(x.size / BLOCK),)
    return Bound(x, (launch("elementwise/gelu.cu", "gelu_kernel", grid, (BLOCK,), (x, x.size)),))


ADD = Operation(
    name="add",
    document=TEN_STEPS,
    idea="a + b, the residual connection",
    sizes={"N": 8192, "C": 768},
    variants=(Variant("add", "elementwise/residual.cu", ("add_kernel",), "a thread an element"),),
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
    document=TEN_STEPS,
    idea="0.5 x (1 + tanh(sqrt(2/π) (x + 0.044715 x³))), in place",
    sizes={"N": 8192, "C": 3072},
    variants=(Variant("gelu", "elementwise/gelu.cu", ("gelu_kernel",), "a thread an element"),),
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

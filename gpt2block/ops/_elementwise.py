"""GELU and the residual addition on CUDA: kernels_cu/elementwise."""

from __future__ import annotations

from math import ceil
from typing import Any

from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import Bound, CudaArray, check, check_alignment, contiguous, output
from gpt2block.cuda.kernels import launch
from gpt2block.errors import InputError
from gpt2block.ops._warm import call

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


def add(a: CudaArray, b: CudaArray) -> CudaArray:
    """`reference.add` on float32 CuPy arrays of one shape; raises InputError."""
    return call(bind_add, contiguous(a, b)).out


def gelu(x: CudaArray) -> CudaArray:
    """`reference.gelu` on a float32 CuPy array, into a new one; raises InputError."""
    if isinstance(x, cupy.ndarray):
        check_alignment("x", x)
        x = x.copy(order="C")  # the kernel works in place
    return bind_gelu((x,)).run()

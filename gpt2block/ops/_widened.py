"""FP8 weights as float16, for products with float16 activations. Kernel: fp8/widen.cu."""

from __future__ import annotations

from math import ceil
from typing import Any

from gpt2block.cuda.arrays import Bound, CudaArray, check_address, check_apart, launch_at
from gpt2block.cuda.kernels import Geometry, Launch
from gpt2block.errors import InputError
from gpt2block.ops.call import Call
from gpt2block.ops.operation import Operation, variant

FILE = "fp8/widen.cu"
KERNEL = "widen_fp8"
WIDTH = 16  # weights in a load
VECTORS = 2  # loads of a thread
BLOCK = 256


@variant(
    "widen",
    FILE,
    KERNEL,
    idea="FP8 weights as float16, before a product with float16 activations",
)
def _widen(c: Call) -> Launch:
    size = c.N * c.K
    for name, array in (("w", c.w.data), ("memory", c.out)):
        check_address(name, array)
    grid = (ceil(size / (WIDTH * VECTORS * BLOCK)),)
    geometry = Geometry(KERNEL, grid, (BLOCK,), defines=(("WIDEN_VECTORS", VECTORS),))
    return launch_at(FILE, geometry, (c.w.data, c.out, size), "float16", c.w.dtype)


def bind(inputs: tuple[Any, ...], out: CudaArray | None = None) -> Bound:
    """inputs (w, memory): the bytes of w as float16 numbers (N, K), without its scales.

    memory: for out, float16, of at least as many elements, or None for new memory. Raises
    InputError.
    """
    c = OPERATION.checked(inputs, out)
    size = c.N * c.K
    if size % WIDTH:
        raise InputError(f"w {c.w.data.shape}: expected a multiple of {WIDTH} weights")
    if c.memory is not None:
        check_apart("memory", c.memory, {"w": c.w})
        if c.memory.size < size:
            raise InputError(f"memory: expected at least {size:,} elements, got {c.memory.size:,}")
        c.out = c.memory.reshape(-1)[:size].reshape(c.N, c.K)
    c.make("out")
    return OPERATION.bound_to(c)


OPERATION = Operation(
    name="widen",
    variants=(_widen,),
    binder=bind,
    line="w rows K N; memory? f16 ... -> out? f16 N K",
)

"""FP8 weights as float16, for products with float16 activations. Kernel: fp8/widen.cu."""

from __future__ import annotations

from math import ceil, prod

from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import Bound, CudaArray, check, check_address, check_apart, launch_at
from gpt2block.cuda.kernels import Geometry
from gpt2block.errors import InputError
from gpt2block.weights.matrix import WeightMatrix

FILE = "fp8/widen.cu"
KERNEL = "widen_fp8"
WIDTH = 16  # weights in a load
VECTORS = 2  # loads of a thread
BLOCK = 256


def bind(w: WeightMatrix, memory: CudaArray | None = None) -> Bound:
    """The bytes of w as float16 numbers in its layout, without its scales.

    memory: float16, of at least as many elements, or None for new memory. Raises InputError.
    """
    shape = w.data.shape
    size = prod(shape)
    if size % WIDTH:
        raise InputError(f"w {shape}: expected a multiple of {WIDTH} weights")
    if memory is None:
        out = cupy.empty(shape, "float16")
    else:
        check("memory", memory, dtype="float16")
        check_apart("memory", memory, {"w": w})
        if memory.size < size:
            raise InputError(f"memory: expected at least {size:,} elements, got {memory.size:,}")
        out = memory.reshape(-1)[:size].reshape(shape)
    for name, array in (("w", w.data), ("memory", out)):
        check_address(name, array)
    grid = (ceil(size / (WIDTH * VECTORS * BLOCK)),)
    geometry = Geometry(KERNEL, grid, (BLOCK,), defines=(("WIDEN_VECTORS", VECTORS),))
    return Bound(out, (launch_at(FILE, geometry, (w.data, out, size), "float16", w.dtype),))

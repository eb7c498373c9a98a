"""Short convolution of LFM2 over rows [B | C | x]; the rows of u are keys in a kv_cache.

Kernels: elementwise/short_conv.cu. A row has the same bits in a prompt and in a step of decoding.
"""

from __future__ import annotations

from math import ceil, gcd

from gpt2block.cuda.kernels import Geometry, Launch, launch_at
from gpt2block.errors import InputError
from gpt2block.models.weights.gguf import UNIT
from gpt2block.ops.call import Call, UncheckedCall
from gpt2block.ops.operands import check_operand, stored_defines, stored_scale, written_dtype
from gpt2block.ops.operation import Operation, variant

FILE = "elementwise/short_conv.cu"
MAX_THREADS = 128


@variant("short_conv", FILE, "short_conv", "short_conv_narrow")
def _short_conv(c: Call) -> Launch:
    """Launch short_conv, or short_conv_narrow if out has 16 bits.

    row and position are not read back to the host: the kernel skips u of rows outside the cache.
    """
    out, narrow, width = c.output("out"), c.out_dtype != "float32", gcd(4, c.C)
    c.check_addresses("bcx", "k", "out", loaded=width)
    threads = min(32 * ceil(c.C / (32 * width)), MAX_THREADS)
    defines = (
        ("CONV_L", c.L),
        ("CONV_WIDTH", width),
        *stored_defines("CONV_OPERAND", c.to_operand),
    )
    kernel, scale = (
        ("short_conv_narrow", ()) if narrow else ("short_conv", (stored_scale(c.to_operand),))
    )
    grid = (c.M, ceil(c.C / (threads * width)))
    geometry = Geometry(kernel, grid, (threads,), defines=defines)
    slots = (0, 0) if c.k is None else (c.B, c.P)
    arrays = (c.bcx, c.taps, c.bias, c.row, c.position, c.k, out)
    return launch_at(FILE, geometry, (*arrays, *scale, c.C, *slots), c.T)


def _prepare(unchecked: UncheckedCall) -> Call:
    """Check a call. dtype: of out, float32 or the dtype of u; without k, u has the dtype of out.

    to_operand: the `Operand` to store in a float32 out for `linear`, instead of floats.
    """
    dtype = written_dtype(unchecked, "short_conv")
    c = unchecked.checked(out_dtype=dtype)
    if c.W != 3 * c.C:
        raise InputError(f"bcx: expected (M, {3 * c.C}) for {c.C} channels, got {c.bcx.shape}")
    c.T = dtype if c.k is None else c.kv_storage
    if dtype not in ("float32", c.T):
        raise InputError(f"dtype: expected float32 or k's {c.T}, got {dtype}")
    check_operand(c.to_operand, c.C, UNIT)
    return c


SHORT_CONV = Operation(
    name="short_conv",
    variants=(_short_conv,),
    options={"dtype": None, "to_operand": None},
    prepare=_prepare,
)

"""Softmax over rows, optionally causal: y = exp(x - max) / Σ exp(x - max).

Kernels: learn/softmax/ladder.cu, one for each variant.
"""

from __future__ import annotations

from math import ceil

from gpt2block.cuda.arrays import CudaArray, contiguous, device_attribute, row_alignment
from gpt2block.cuda.kernels import Geometry, launch_at
from gpt2block.cuda.requests import Launch
from gpt2block.errors import InputError
from gpt2block.ops._rows import LONGEST_IN_REGISTERS, THREADS, check_rows, power_of_two, share
from gpt2block.ops.call import Call, UncheckedCall
from gpt2block.ops.operation import Operation, Sizes, UnsupportedCall, Workload, variant
from gpt2block.ops.warm import call

FILE = "learn/softmax/ladder.cu"
BLOCKS = (32, 64, 128, 256, 512, 1024)


def _launch(c: Call, kernel: str, grid: int, block: int, *defines: tuple[str, int]) -> Launch:
    defines = (("SOFTMAX_CAUSAL", int(c.causal)), *defines)
    args = (c.scores, c.output("out"), c.rows, c.T)
    return launch_at(FILE, Geometry(kernel, (grid,), (block,), defines=defines), args)


def _width(c: Call) -> int:
    """Return the scores per load: 4 if rows start on multiples of 16 bytes, else 1."""
    return 4 if row_alignment(c.T, c.scores, c.output("out")) == 16 else 1


@variant("three_pass", FILE, "softmax_forward_kernel1", blocks=BLOCKS)
def _three_pass(c: Call) -> Launch:
    return _launch(c, "softmax_forward_kernel1", c.rows, c.block, ("SOFTMAX_BLOCK", c.block))


@variant("online_warp", FILE, "softmax_forward_kernel2", blocks=BLOCKS)
def _online_warp(c: Call) -> Launch:
    return _launch(c, "softmax_forward_kernel2", ceil(c.rows / (c.block // 32)), c.block)


@variant("online_block", FILE, "softmax_forward_kernel3", blocks=BLOCKS)
def _online_block(c: Call) -> Launch:
    return _launch(c, "softmax_forward_kernel3", c.rows, c.block, ("SOFTMAX_WIDTH", _width(c)))


@variant(
    "rows",
    FILE,
    "softmax_forward_kernel4",
    blocks=tuple(block for block in BLOCKS if block <= THREADS),
)
def _rows(c: Call) -> Launch:
    """Launch variant rows. A requested block size sets the threads per row."""
    if c.T > LONGEST_IN_REGISTERS:
        raise UnsupportedCall(
            f"rows of {c.T:,} values: expected at most {LONGEST_IN_REGISTERS:,}, which fit in "
            "registers: use another variant"
        )
    width, sms = _width(c), device_attribute("MultiProcessorCount")
    shape = share(c.rows, c.T, width, sms, c.block if c.requested else None)
    return _launch(
        c,
        "softmax_forward_kernel4",
        shape.grid,
        shape.block,
        ("SOFTMAX_WIDTH", width),
        ("SOFTMAX_THREADS", shape.threads),
        ("SOFTMAX_HELD", power_of_two(shape.held)),  # a power of two, to compile fewer kernels
        ("SOFTMAX_ROWS", shape.rows),
    )


def _prepare(unchecked: UncheckedCall) -> Call:
    """Check a call. The default variant is "rows" if rows fit in registers, else "online_block"."""
    c = unchecked.checked()
    if c.causal and c.leading[-1:] != (c.T,):
        raise InputError(f"scores: expected (..., T, T) with causal, got {c.scores.shape}")
    check_rows("scores", c.scores)
    c.order = (_rows if c.T <= LONGEST_IN_REGISTERS else _online_block,)
    return c


def _scores(sizes: Sizes) -> int:
    return sizes["B"] * sizes["NH"] * sizes["T"] ** 2


OPERATION = Operation(
    name="softmax",
    variants=(_three_pass, _online_warp, _online_block, _rows),
    options={"causal": False, "variant": None, "block": None},
    prepare=_prepare,
    workload=Workload(
        document="named after llm.c's softmax kernels",
        idea="y = exp(x - max) / Σ exp(x - max) over each row",
        sizes={"B": 2, "NH": 12, "T": 1024},
        traffic=lambda sizes: 8 * _scores(sizes),
        flops=lambda sizes: 5 * _scores(sizes),
        axes={"...": "B NH T"},
        small=({"B": 1, "NH": 3, "T": 5}, {"B": 2, "NH": 1, "T": 33}, {"B": 1, "NH": 1, "T": 130}),
        arrays={"scores": "x", "out": "y"},
        aliases={"rows": "B*NH*T", "N": "B*NH*T", "n": "T"},
    ),
)


def softmax(
    scores: CudaArray,
    causal: bool = False,
    variant: str | int | None = None,
    block: int | None = None,
    out: CudaArray | None = None,
) -> CudaArray:
    """Compute `reference.softmax` on a float32 CuPy array, with `out=scores` in place.

    With `causal`, row t of each (T, T) sees columns 0..t: other columns become 0 and are never
    read. A row that sees only -inf becomes NaN, as in NumPy. The default is the fastest variant
    that supports the call. Raises InputError.
    """
    if out is not scores:
        (scores,) = contiguous(scores)
    options = {"causal": causal, "variant": variant, "block": block}
    return call(OPERATION, (scores,), out, **options).out

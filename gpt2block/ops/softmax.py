"""Softmax over rows, optionally causal: y = exp(x - max) / Σ exp(x - max).

Kernels: learn/softmax/ladder.cu, one for each variant.
"""

from __future__ import annotations

from collections.abc import Callable

from gpt2block.cuda.arrays import CudaArray, contiguous, multiprocessors, row_alignment
from gpt2block.cuda.kernels import Defines, Geometry, Launch, launch_at
from gpt2block.errors import InputError
from gpt2block.ops.call import Call, Refusal, UncheckedCall, accept
from gpt2block.ops.engines.rows import (
    LONGEST_IN_REGISTERS,
    ROW_BLOCKS,
    check_rows,
    power_of_two,
    share,
)
from gpt2block.ops.operation import Operation, Sizes, Variant, Workload, as_stated, variant
from gpt2block.ops.warm import call

FILE = "learn/softmax/ladder.cu"
BLOCKS = (32, 64, 128, 256, 512, 1024)


def _args(c: Call) -> tuple[object, ...]:
    return c.scores, c.output("out"), c.rows, c.T


def _causal(c: Call, *further: tuple[str, int]) -> Defines:
    return ("SOFTMAX_CAUSAL", int(c.causal)), *further


def _width(c: Call) -> int:
    """Return the scores per load: 4 if rows start on multiples of 16 bytes, else 1."""
    return 4 if row_alignment(c.T, c.scores, c.output("out")) == 16 else 1


def _ladder(name: str, kernel: str, defines: Callable[[Call], Defines]) -> Variant:
    return as_stated(name, FILE, kernel, _args, defines, blocks=BLOCKS)


_three_pass = _ladder(
    "three_pass", "softmax_forward_kernel1", lambda c: _causal(c, ("SOFTMAX_BLOCK", c.block))
)
_online_warp = _ladder("online_warp", "softmax_forward_kernel2", _causal)
_online_block = _ladder(
    "online_block", "softmax_forward_kernel3", lambda c: _causal(c, ("SOFTMAX_WIDTH", _width(c)))
)


def _rows_refusal(T: int) -> Refusal | None:
    most = f"at most {LONGEST_IN_REGISTERS:,}, which fit in registers: use another variant"
    return Refusal.first((T > LONGEST_IN_REGISTERS, f"rows of {T:,} values: expected {most}"))


@variant("rows", FILE, "softmax_forward_kernel4", blocks=ROW_BLOCKS)
def _rows(c: Call) -> Launch:
    """Launch variant rows. A requested block size sets the threads per row."""
    accept(_rows_refusal(c.T))
    width, sms = _width(c), multiprocessors()
    shape = share(c.rows, c.T, width, sms, c.block if c.requested else None)
    defines = _causal(
        c,
        ("SOFTMAX_WIDTH", width),
        ("SOFTMAX_THREADS", shape.threads),
        ("SOFTMAX_HELD", power_of_two(shape.held)),  # a power of two, to compile fewer kernels
        ("SOFTMAX_ROWS", shape.rows),
    )
    grid, block = (shape.grid,), (shape.block,)
    return launch_at(FILE, Geometry("softmax_forward_kernel4", grid, block, 0, defines), _args(c))


def _prepare(unchecked: UncheckedCall) -> Call:
    """Check a call. The default variant is "rows" if rows fit in registers, else "online_block"."""
    c = unchecked.checked()
    if c.causal and c.leading[-1:] != (c.T,):
        raise InputError(f"scores: expected (..., T, T) with causal, got {c.scores.shape}")
    check_rows("scores", c.scores)
    c.order = (_rows if not _rows_refusal(c.T) else _online_block,)
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

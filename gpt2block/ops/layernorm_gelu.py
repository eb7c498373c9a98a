"""LayerNorm and GELU in one kernel: y = GELU((x - mean) · rstd · γ + β).

Kernels: learn/layernorm/gelu.cu, one for each variant.
"""

from __future__ import annotations

from gpt2block.cuda.arrays import CudaArray, contiguous, multiprocessors, row_alignment, same_memory
from gpt2block.cuda.kernels import Geometry, Launch, defines_of, launch_at
from gpt2block.ops.call import Call, refuse
from gpt2block.ops.engines.rows import ROW_BLOCKS, share
from gpt2block.ops.operation import Operation, Workload, as_stated, variant
from gpt2block.ops.warm import call

FILE = "learn/layernorm/gelu.cu"
BLOCKS = (32, 64, 128, 256, 512, 1024)


def _documented(c: Call) -> tuple[CudaArray, CudaArray, int, int, float]:
    """Return the arguments of variants baseline and optimized, which support no gamma and beta."""
    affine = c.gamma is not None or c.beta is not None
    refuse(affine, "has no gamma and beta: use variant 'rows'")
    refuse(same_memory(c.x, c.output("out")), "out: overlaps x: expected another array")
    return c.x, c.out, c.rows, c.C, c.eps


_baseline = as_stated("baseline", FILE, "layernorm_gelu_baseline", _documented, blocks=BLOCKS)
_optimized = as_stated("optimized", FILE, "layernorm_gelu_optimized", _documented, blocks=BLOCKS)


@variant("rows", FILE, "layernorm_gelu_rows", blocks=ROW_BLOCKS)
def _rows(c: Call) -> Launch:
    """Launch variant rows. A requested block size sets the threads per row. out may be x."""
    width = 4 if row_alignment(c.C, c.x, c.gamma, c.beta, c.output("out")) == 16 else 1
    shape = share(c.rows, c.C, width, multiprocessors(), c.block if c.requested else None)
    defines = (
        *defines_of(LG_HIDDEN=c.C, LG_WIDTH=width, LG_THREADS=shape.threads, LG_ROWS=shape.rows),
        *defines_of(LG_AFFINE=int(c.gamma is not None or c.beta is not None)),
    )
    args = (c.x, c.out, c.gamma, c.beta, c.rows, c.eps)
    grid, block = (shape.grid,), (shape.block,)
    return launch_at(FILE, Geometry("layernorm_gelu_rows", grid, block, defines=defines), args)


OPERATION = Operation(
    name="layernorm_gelu",
    variants=(_baseline, _optimized, _rows),
    options={"eps": 1e-5, "variant": "rows", "block": None},
    workload=Workload(
        idea="y = GELU((x - mean) · rstd · γ + β), tanh GELU",
        sizes={"N": 1024, "C": 1024},
        traffic=lambda sizes: 8 * sizes["N"] * sizes["C"],
        flops=lambda sizes: 20 * sizes["N"] * sizes["C"],
        attrs={"eps": 1e-5},
        small=({"N": 1, "C": 5}, {"N": 7, "C": 33}, {"N": 3, "C": 769}),
        arrays={"out": "y"},
        aliases={"input": "x", "output": "out", "batch_size": "N", "rows": "N", "hidden_dim": "C"},
    ),
)


def layernorm_gelu(
    x: CudaArray,
    gamma: CudaArray | None = None,
    beta: CudaArray | None = None,
    eps: float = 1e-5,
    variant: str | int = "rows",
    block: int | None = None,
) -> CudaArray:
    """Compute `reference.layernorm_gelu` on float32 CuPy arrays. Raises InputError.

    Variants "baseline" and "optimized" support neither gamma nor beta. "rows" takes rows of up to
    16,384 values. Few rows get more threads each, so the last bits of a row can depend on the
    number of rows; `block` fixes the threads per row.
    """
    arrays = contiguous(x, gamma, beta)
    return call(OPERATION, arrays, eps=eps, variant=variant, block=block).out

"""Log-likelihoods of tokens: logits[target] - log Σ exp(logits) for each row.

Kernel: tokens/log_likelihood.cu.
"""

from __future__ import annotations

from gpt2block.cuda.arrays import CudaArray, contiguous
from gpt2block.cuda.kernels import Geometry, Launch, launch_at
from gpt2block.ops.call import Call
from gpt2block.ops.engines.rows import check_rows
from gpt2block.ops.operation import Operation, Workload, variant
from gpt2block.ops.top_logprobs import TOP_LOGPROBS
from gpt2block.ops.warm import call

FILE = "tokens/log_likelihood.cu"
THREADS = 512


def choose_geometry(rows: int, threads: int = THREADS) -> Geometry:
    """Return a geometry of one block per row. Only tests pass `threads` to use smaller blocks."""
    defines = () if threads == THREADS else (("LL_THREADS", threads),)
    return Geometry("log_likelihood_kernel", (rows,), (threads,), defines=defines)


@variant("block", FILE, "log_likelihood_kernel", block=THREADS)
def _block(c: Call) -> Launch:
    """Launch the kernel. The host does not check targets: a target outside 0..V-1 gives NaN."""
    check_rows("logits", c.logits)
    args = (c.logits, c.targets, c.output("out"), c.V)
    return launch_at(FILE, choose_geometry(c.rows), args)


OPERATION = Operation(
    name="log_likelihood",
    variants=(_block,),
    steps=(TOP_LOGPROBS,),
    workload=Workload(
        idea="out = logits[target] - log Σ exp(logits) of each row",
        sizes={"N": 1024, "V": 50257},
        below={"targets": "V"},
        traffic=lambda sizes: sizes["N"] * (4 * sizes["V"] + 8),
        flops=lambda sizes: 5 * sizes["N"] * sizes["V"],
        small=({"N": 1, "V": 11}, {"N": 5, "V": 70}, {"N": 3, "V": 1031}),
    ),
)


def log_likelihood(logits: CudaArray, targets: CudaArray) -> CudaArray:
    """Compute `reference.log_likelihood` on CuPy arrays, float32 and int32. Raises InputError.

    logits (..., V), targets (...) → (...). A target outside 0..V-1 gives NaN.
    """
    return call(OPERATION, contiguous(logits, targets)).out

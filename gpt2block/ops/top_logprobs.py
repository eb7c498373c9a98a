"""The most likely tokens of each row of logits, with their log-probabilities.

Kernel: tokens/top.cu.
"""

from __future__ import annotations

from gpt2block.cuda.arrays import CudaArray, contiguous
from gpt2block.cuda.kernels import Geometry, Launch, launch_at
from gpt2block.ops.call import Call, UncheckedCall
from gpt2block.ops.engines.rows import check_rows
from gpt2block.ops.operation import Operation, variant
from gpt2block.ops.warm import call
from gpt2block.sampling import MAX_ALTERNATIVES, check_alternatives

FILE = "tokens/top.cu"
THREADS = 512


def choose_geometry(rows: int, threads: int = THREADS) -> Geometry:
    """Return a geometry of one block per row. Only tests pass `threads` to use smaller blocks."""
    defines = () if threads == THREADS else (("TOP_THREADS", threads),)
    return Geometry("top_logprobs_kernel", (rows,), (threads,), defines=defines)


@variant("top", FILE, "top_logprobs_kernel", block=THREADS)
def _block(c: Call) -> Launch:
    check_rows("logits", c.logits)
    args = (c.logits, c.output("ids"), c.output("logprobs"), c.V, c.K)
    return launch_at(FILE, choose_geometry(c.M), args)


def _prepare(unchecked: UncheckedCall) -> Call:
    return unchecked.checked(K=check_alternatives("K", unchecked.options["K"], least=1))


TOP_LOGPROBS = Operation(
    name="top_logprobs", variants=(_block,), options={"K": MAX_ALTERNATIVES}, prepare=_prepare
)


def top_logprobs(logits: CudaArray, K: int = MAX_ALTERNATIVES) -> tuple[CudaArray, CudaArray]:
    """Compute `reference.top_logprobs` on a CuPy array (M, V) of float32.

    Raises InputError for logits of another shape or dtype, and for a K that is out of range.
    """
    done = call(TOP_LOGPROBS, contiguous(logits), K=K)
    return done.out, done.extra[0]

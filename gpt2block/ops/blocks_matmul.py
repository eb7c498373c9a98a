"""Matrix product with weights in 4-bit blocks, as in GGUF files: one naive and two faster kernels.

Models store the same blocks in another order (`linear` with a `GgufMatrix`). learn/gguf/ladder.cu
has one kernel for each variant.
"""

from __future__ import annotations

import numpy as np

from gpt2block.checks import check_blocks
from gpt2block.cuda.arrays import CudaArray, on_16_bytes
from gpt2block.models.weights.gguf import TYPES, random_blocks
from gpt2block.ops.call import Call, UncheckedCall, accept, needs, refuse
from gpt2block.ops.operation import Inputs, Operation, Sizes, Workload, as_stated
from gpt2block.ops.warm import call

FILE = "learn/gguf/ladder.cu"
TYPE = TYPES["Q4_K"]


def _args(c: Call) -> tuple[object, ...]:
    return c.x, c.w, c.output("out"), c.rows, c.N, c.K


def _mma_args(c: Call) -> tuple[object, ...]:
    types = f"takes x of float16, got {c.storage}: use variant warp"
    refuse(c.storage != "float16", types)
    accept(needs("has_mma", ": use variant warp"))
    return _args(c)


_naive = as_stated("naive", FILE, "blocks_matmul_naive", _args)
_warp = as_stated("warp", FILE, "blocks_matmul_warp", _args)
_mma = as_stated("mma", FILE, "blocks_matmul_mma", _mma_args, dtypes=("float16",))


def _prepare(unchecked: UncheckedCall) -> Call:
    c = unchecked.checked()
    check_blocks(c.K)
    c.check_addresses("x", "w")
    return c


def _make(sizes: Sizes, rng: np.random.Generator) -> Inputs:
    M, B, N = sizes["M"], sizes["B"], sizes["N"]
    x = rng.standard_normal((M, TYPE.size * B), dtype=np.float32) + np.float32(0.5)
    w = random_blocks("Q4_K", N, TYPE.size * B, int(rng.integers(2**31)))
    return x, w.reshape(N, B, TYPE.nbytes)


OPERATION = Operation(
    name="blocks_matmul",
    variants=(_naive, _warp, _mma),
    options={"variant": None},
    prepare=_prepare,
    workload=Workload(
        idea="x · Wᵀ, W in blocks of Q4_K: weights d s q - dmin m of 4-bit codes q",
        sizes={"M": 1, "B": 16, "N": 12288},  # B: GGUF blocks per row, K / 256
        draw=_make,
        traffic=lambda s: (
            s["M"] * (TYPE.size * s["B"] * s["itemsize"] + 4 * s["N"])
            + s["N"] * s["B"] * TYPE.nbytes
        ),
        flops=lambda s: 2 * s["M"] * s["N"] * s["B"] * TYPE.size,
        axes={"...": "M", "K": f"{TYPE.size}*B"},
        small=({"M": 1, "B": 1, "N": 7}, {"M": 9, "B": 3, "N": 17}, {"M": 3, "B": 5, "N": 66}),
        aliases={"K": "K", "B": f"K//{TYPE.size}"},
        dtypes=("float32", "float16", "bfloat16"),
    ),
)


def blocks_matmul(x: CudaArray, w: CudaArray, variant: str | None = None) -> CudaArray:
    """Compute `reference.blocks_matmul` on CuPy arrays, x of float32 or 16 bits. Raises InputError.

    x (..., K), w (N, K / 256, 144) uint8 → (..., N) float32. The default variant is mma for x of
    float16 on GPUs of compute capability 7.5 or newer, else warp.
    """
    inputs = on_16_bytes("x", x), on_16_bytes("w", w)
    return call(OPERATION, inputs, variant=variant).out

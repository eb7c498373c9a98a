"""The product of q, k and v in decoding, with RoPE and the kv_cache in its epilogue, by wgmma.

`linear` and `rope_append` in one kernel, matmul/decode_hopper_rope.cu, for large matrices.
"""

from __future__ import annotations

from typing import Any

from gpt2block.cuda.arrays import Bound, CudaArray, check, compute_capability
from gpt2block.cuda.kernels import Launch, cache_dtype
from gpt2block.errors import InputError
from gpt2block.ops import _linear_hopper as hopper
from gpt2block.ops._tensor_cores import HOPPER_CAPABILITY
from gpt2block.ops._terms import Terms
from gpt2block.ops.call import Call
from gpt2block.ops.operation import Operation, unfit, variant


@variant(
    "rope_hopper",
    hopper.ROPE_FILE,
    "rope_decode_hopper",
    idea="qkv_hopper with RoPE of q and k",
)
def _rope_hopper(c: Call) -> Launch:
    unfit(
        compute_capability() != HOPPER_CAPABILITY,
        "needs a GPU of compute capability 9.0 (Hopper): use linear and rope_append",
    )
    wanted, D = hopper.terms(c.w.dtype), 2 * c.P
    unfit(c.terms != wanted, f"terms of {c.terms}: expected {wanted}")
    multiple = 2 * hopper.ROPE_BOX
    unfit(D % multiple, f"heads of {D} channels: expected a multiple of {multiple}")
    arrays = (c.w.scale, c.bias, c.by, c.row, c.position, c.out, c.k, c.v)
    args = (*arrays, c.M, c.K, c.n_head, c.C // D, c.B, c.S)
    return hopper.launch(c, "rope_decode_hopper", (c.w,), args, head=D)


def _bind(
    inputs: tuple[Any, ...],
    out: CudaArray | None = None,
    *,
    n_head: int,
    terms: Terms,
    kv_dtype: str | None = None,
) -> Bound:
    """inputs (x (M, K), w, bias (N,), by (M, D / 2, 2), k, v, row (M,), position (M,)).

    x has `terms`, in the order of wgmma, and w is a WeightMatrix (N, K) of N = (n_head + 2
    n_kv_head) D outputs; RoPE turns half-split pairs of q and k by the rotations. k and v, (B,
    n_ctx, n_kv_head D), have the dtype of the weights, float16 with FP8 weights, or `kv_dtype`; row
    and position, int32, are not read back: K and V of rows outside the cache are left out. out is
    q, (M, n_head D), with the bits of `linear` and `rope_append`.
    """
    options = {"n_head": n_head, "terms": terms, "to_terms": None, "up": None}
    c = OPERATION.checked(inputs, out, kv_dtype=kv_dtype, **options)
    c.T = cache_dtype(c.w.dtype)
    if kv_dtype is None:
        check("k", c.k, dtype=c.T)
    D = 2 * c.P
    N = c.n_head * D + 2 * c.C
    if c.C % D or c.N != N:
        raise InputError(
            f"w of {c.N:,} outputs, k of {c.C:,} channels: expected {N:,} outputs, {c.n_head} "
            f"heads of q and whole heads of k and v, of {D} channels as by has"
        )
    return OPERATION.bound_to(c)


OPERATION = Operation(name="linear_rope", variants=(_rope_hopper,), binder=_bind)

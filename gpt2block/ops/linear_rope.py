"""The product of q, k and v in decoding, with RoPE and the kv_cache in its epilogue, by wgmma.

`linear` and `rope_append` in one kernel, matmul/decode_hopper_rope.cu, for large matrices.
"""

from __future__ import annotations

from typing import Any

from gpt2block.cuda.arrays import Bound, CudaArray, check, check_apart, compute_capability, output
from gpt2block.cuda.kernels import cache_dtype
from gpt2block.errors import InputError
from gpt2block.ops import _linear_hopper as hopper
from gpt2block.ops._matrix import check_weights
from gpt2block.ops._tensor_cores import HOPPER_CAPABILITY
from gpt2block.ops.rope_qkv import check_heads
from gpt2block.plan import Terms


def bind(
    inputs: tuple[Any, ...],
    out: CudaArray | None = None,
    *,
    n_head: int,
    terms: Terms,
    kv_dtype: str | None = None,
) -> Bound:
    """inputs (x (M, K), w, bias (N,), rotations (M, D / 2, 2), k, v, row (M,), position (M,)).

    x has `terms`, in the order of wgmma, and w is a WeightMatrix (N, K) of N = (n_head + 2
    n_kv_head) D outputs; RoPE turns half-split pairs of q and k by `rotations`. k and v, (B, n_ctx,
    n_kv_head D), have the dtype of the weights, float16 with FP8 weights, or `kv_dtype`; row and
    position, int32, are not read back: K and V of rows outside the cache are left out. out is q,
    (M, n_head D), with the bits of `linear` and `rope_append`. Raises InputError.
    """
    x, w, bias, rotations, k, v, row, position = inputs
    check("x", x)
    check_weights("w", w, ("x", x))
    check("rotations", rotations)
    if rotations.ndim != 3 or rotations.shape[::2] != (len(x), 2):
        raise InputError(f"rotations: expected ({len(x)}, D / 2, 2), got {rotations.shape}")
    D = 2 * rotations.shape[1]
    n_kv_head = check_heads(D, k, v, kv_dtype)
    heads = n_head + 2 * n_kv_head
    if x.ndim != 2 or heads * D != w.N:
        raise InputError(
            f"x {x.shape}, w of {w.N:,} outputs: expected (M, K) and {heads * D:,} outputs, "
            f"{n_head} heads of q and {n_kv_head} of k and v, of {D} channels"
        )
    if bias is not None:
        check("bias", bias, (w.N,))
    M, T = len(x), cache_dtype(w.dtype)
    if kv_dtype is None:
        check("k", k, dtype=T)
    check("row", row, (M,), "int32")
    check("position", position, (M,), "int32")
    problem = _problem(w.K, w.dtype, D, terms)
    if problem:
        raise InputError(problem)
    given = {"x": x, "w": w.data, "bias": bias, "rotations": rotations}
    apart = {**given, "row": row, "position": position}
    for name, cache in (("k", k), ("v", v)):
        check_apart(name, cache, apart)
    out = output(out, (M, n_head * D), apart={**apart, "k": k, "v": v})
    sizes = (M, w.K, n_head, n_kv_head, *k.shape[:2])
    args = (w.scale, bias, rotations, row, position, out, k, v, *sizes)
    launch = hopper.launch("rope_decode_hopper", hopper.Given(x, (w,), head=D), T, args, kv_dtype)
    return Bound(out, (launch,), (k, v))


def _problem(K: int, dtype: str, D: int, terms: Terms) -> str | None:
    if compute_capability() != HOPPER_CAPABILITY:
        return "needs a GPU of compute capability 9.0 (Hopper): use linear and rope_append"
    if terms != hopper.terms(dtype):
        return f"terms of {terms}: expected {hopper.terms(dtype)}"
    if D % (2 * hopper.ROPE_BOX):
        return f"heads of {D} channels: expected a multiple of {2 * hopper.ROPE_BOX}"
    return hopper.problem(K)

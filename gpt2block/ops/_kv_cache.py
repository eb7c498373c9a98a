"""What the operations that write or read a kv_cache share: the dtype of its arrays."""

from __future__ import annotations

from typing import Any

from gpt2block.checks import meant
from gpt2block.cuda.arrays import check, storage
from gpt2block.cuda.kernels import FP8
from gpt2block.errors import InputError, shown


def check_cache(k: Any, v: Any, kv_dtype: str | None) -> tuple[str, int, int, int]:
    """Check both halves of a kv_cache (B, n_ctx, C): the dtype of its arrays, B, n_ctx and C.

    kv_dtype: None, or the FP8 format of k and v, which are then uint8. Raises InputError.
    """
    dtype = array_dtype(k, kv_dtype)
    check("k", k, dtype=dtype)
    if k.ndim != 3:
        raise InputError(f"k: expected (B, n_ctx, C), got shape {k.shape}")
    check("v", v, k.shape, dtype)
    return dtype, *k.shape


def array_dtype(k: Any, kv_dtype: str | None) -> str:
    """The dtype of the arrays of a kv_cache, of which k is one. Raises InputError."""
    if kv_dtype is None:
        return storage(k)
    check_format(kv_dtype)
    return "uint8"


def check_format(kv_dtype: Any) -> None:
    """Raise InputError unless `kv_dtype` is an FP8 format."""
    if not isinstance(kv_dtype, str) or kv_dtype not in FP8:
        raise InputError(
            f"kv_dtype: expected one of {', '.join(FP8)}, got {shown(kv_dtype)}"
            f"{meant(kv_dtype, FP8)}"
        )

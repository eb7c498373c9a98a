"""Dtypes of arrays, and arrays of other libraries in host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from gpt2block.checks import of_bfloat16
from gpt2block.errors import InputError

DLPACK_HOST = (1, 3)  # DLDeviceType kDLCPU and kDLCUDAHost, pinned memory
FLOATS = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def host_array(x: Any) -> NDArray[Any] | None:
    """`x` as a NumPy array when it lives in host memory, else None.

    It is copied only if it has not this machine's byte order.
    """
    if isinstance(x, np.ma.MaskedArray):
        raise InputError("x: expected an array without a mask, got a NumPy masked array")
    if isinstance(x, np.ndarray):
        return x if x.dtype.isnative else x.astype(x.dtype.newbyteorder("="))
    if hasattr(x, "__dlpack_device__") and x.__dlpack_device__()[0] in DLPACK_HOST:
        shared: NDArray[Any] = imported(np.from_dlpack, x)
        return shared
    return None


def require_host(x: Any, use: str, dtype: Any, on_gpu: str) -> NDArray[Any]:
    """`host_array`; InputError for anything else, with what to do: on_gpu for a CUDA array."""
    host = host_array(x)
    if host is not None:
        return host
    todo = ""
    if hasattr(x, "__dlpack_device__") or hasattr(x, "__cuda_array_interface__"):
        todo = f": {on_gpu}"
    elif isinstance(x, (list, tuple)):
        module = "ml_dtypes" if dtype == ml_dtypes.bfloat16 else "np"
        todo = f": use np.array(x, {module}.{np.dtype(dtype).name})"
    raise InputError(f"x: expected a NumPy array {use}, got {type(x).__name__}{todo}")


def imported(from_library: Callable[[Any], Any], x: Any) -> Any:
    """A foreign array through `from_library`; what is not shared is an InputError."""
    try:
        return from_library(x)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(
            f"expected an array that can be shared, got {type(x).__name__}: {error}{of_bfloat16(x)}"
        ) from error

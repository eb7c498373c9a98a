"""Checks of the dtypes and shapes of array arguments: `@takes(x="... C", gamma="C")`."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from gpt2block.checks import check_flag, check_integer, check_number, is_plain
from gpt2block.config import check_count, check_eps
from gpt2block.errors import InputError, shown

P = ParamSpec("P")
R = TypeVar("R")
Sizes = dict[str, Any]  # letter → size; "..." → the sizes of all leading axes

MOST_POSITIONS = 2**31 - 1
DLPACK_HOST = (1, 3)  # DLDeviceType kDLCPU and kDLCUDAHost, pinned memory
FLOATS = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
# Kind of array → its dtype characters, and the dtypes in words. E is bfloat16 of ml_dtypes.
_KINDS: Mapping[str, tuple[str, str]] = {
    "float": ("efdE", "float16, bfloat16, float32 or float64"),
    "float32": ("f", "float32"),
    "float16": ("e", "float16"),
    "int": ("bBhHiIlLqQ", "integers"),
    "byte": ("B", "uint8"),
    "matrix": ("efdE", "a float dtype, or a WeightMatrix"),  # (K, N)
    "table": ("efdE", "a float dtype, or a WeightMatrix"),  # (N, K)
}


def _position(name: str, value: Any) -> int:
    return check_integer(name, value, 0, MOST_POSITIONS, "an integer of at least 0 below 2^31")


# Scalar arguments by name, with the same meaning in every function.
_SCALARS: Mapping[str, Callable[[str, Any], object]] = {
    "n_head": check_count,
    "n_kv_head": check_count,
    "head_dim": check_count,
    "start": _position,
    "step": _position,
    "eps": lambda _, value: check_eps(value),
    "theta": lambda name, value: check_number(name, value, 1, 2.0**100, "a number from 1 to 2^100"),
    **dict.fromkeys(("causal", "gelu", "split_k", "half_split", "saturate"), check_flag),
}


@dataclass(frozen=True)
class _Spec:
    """The required dtype and shape of an array: `kind` of `_KINDS`, `axes` letters or numbers."""

    kind: str
    leading: bool  # whether any axes may precede `axes`
    axes: tuple[str, ...]
    chars: str

    @classmethod
    def parse(cls, text: str) -> _Spec:
        words = text.split()
        kind = words.pop(0) if words[0] in _KINDS else "float"
        leading = words[0] == "..."
        return cls(kind, leading, tuple(words[leading:]), _KINDS[kind][0])

    def check(self, name: str, value: Any, sizes: Sizes) -> None:
        """InputError unless `value` fits; the sizes of new letters are added to `sizes`."""
        if not self._fits(value, sizes):
            raise self._error(name, value, sizes)

    def _fits(self, value: Any, sizes: Sizes) -> bool:
        if self.kind in ("matrix", "table") and hasattr(value, "dequantized"):
            shape = (value.K, value.N) if self.kind == "matrix" else (value.N, value.K)
        elif is_plain(value) and value.dtype.char in self.chars and value.size:
            shape = value.shape
        else:
            return False
        first = len(shape) - len(self.axes)
        if first < 0 or (first and not self.leading):
            return False
        if self.leading and sizes.setdefault("...", shape[:first]) != shape[:first]:
            return False
        return all(
            size == (int(axis) if axis.isdigit() else sizes.setdefault(axis, size))
            for axis, size in zip(self.axes, shape[first:], strict=True)
        )

    def _error(self, name: str, value: Any, sizes: Sizes) -> InputError:
        leading = sizes.get("...", ("...",)) if self.leading else ()
        axes = [str(size) for size in (*leading, *(sizes.get(axis, axis) for axis in self.axes))]
        expected = f"({', '.join(axes)}{',' * (len(axes) == 1)})"
        if isinstance(value, np.ma.MaskedArray):
            got = "a NumPy masked array"
        elif isinstance(value, np.matrix):
            got = f"an np.matrix: use np.asarray({name})"
        elif hasattr(value, "dtype") and hasattr(value, "shape"):
            got = f"{value.dtype} {value.shape}"
        else:
            got = f"{type(value).__name__} {shown(value):.60}"
        return InputError(
            f"{name}: expected a NumPy array of {_KINDS[self.kind][1]}, of shape {expected} with "
            f"at least one element, got {got}"
        )


def takes(**arrays: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator: check the arguments of a function, and raise InputError if one is wrong.

    arrays: argument → a kind of `_KINDS` ("float" by default) and axes: "..." for any leading axes,
    a letter for a size that is the same for all its occurrences, or a number. An array may be None
    if that is its default. Scalars are checked by name with `_SCALARS`.
    """

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(function).parameters
        names = tuple(parameters)
        specs = {name: _Spec.parse(text) for name, text in arrays.items()}
        scalars = {name: _SCALARS[name] for name in names if name in _SCALARS and name not in specs}
        optional = {name for name, one in parameters.items() if one.default is None}

        def fitting(name: str, value: Any, sizes: Sizes) -> Any:
            """The checked value; NumPy scalars become Python scalars, which do not overflow."""
            if value is None and name in optional:
                return value
            if name in specs:
                specs[name].check(name, value, sizes)
            return scalars[name](name, value) if name in scalars else value

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            sizes: Sizes = {}
            values: Any = [fitting(*pair, sizes) for pair in zip(names, args, strict=False)]
            named: Any = {name: fitting(name, value, sizes) for name, value in kwargs.items()}
            values += args[len(values) :]  # the function raises TypeError for these
            return function(*values, **named)

        return checked

    return decorated


def unchecked(function: Callable[P, R]) -> Callable[P, R]:
    """The function without the checks of `takes`, for arguments known to be valid."""
    inner: Callable[P, R] = getattr(function, "__wrapped__", function)
    return inner


def check_real(name: str, value: Any) -> None:
    """InputError unless `value` is a number; NaN and infinity are numbers."""
    numbers = (int, float, np.integer, np.floating)
    if isinstance(value, bool) or not isinstance(value, numbers) or _overflows(value):
        raise InputError(f"{name}: expected a number, got {shown(value)}")


def _overflows(value: Any) -> bool:
    """Whether an integer is too large for a float."""
    return isinstance(value, int) and abs(value) > math.ldexp(1, 1023)


def host_array(x: Any) -> NDArray[Any] | None:
    """`x` as a NumPy array without a copy when it lives in host memory, else None."""
    if isinstance(x, np.ma.MaskedArray):
        raise InputError("x: expected an array without a mask, got a NumPy masked array")
    if isinstance(x, np.ndarray):
        return x
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
            f"expected an array that can be shared, got {type(x).__name__}: {error}"
        ) from error

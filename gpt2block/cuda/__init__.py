"""Compile and launch CUDA kernels through CuPy.

`cupy` is a proxy of the module cupy. The proxy imports CuPy on first use, and no other code imports
CuPy, so that every module of the package can be imported without CuPy.

Imports only checks and errors; every other room may import it.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

from gpt2block.errors import DeviceError

if TYPE_CHECKING:
    import numpy as np
    from typing_extensions import Self

NOT_INITIALIZED = 3  # error code of CUDA calls, even cuInit, if CUDA was initialized before a fork
FORKED = "this process was forked after CUDA had been initialized, and CUDA does not work in it"
FORKED_FIX = "start processes with multiprocessing's method 'spawn' or 'forkserver'"


class CudaArray(Protocol):  # noqa: PLW1641  (not hashable, like NumPy arrays)
    """A `cupy.ndarray` for type checkers, as CuPy has no type stubs. Other attributes are Any."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype
    ndim: int
    size: int
    itemsize: int
    nbytes: int

    def __init__(self, shape: object, dtype: object, memptr: object, strides: object = None): ...
    def __getattr__(self, name: str) -> Any: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Self]: ...
    def __getitem__(self, index: object, /) -> Self: ...
    def __setitem__(self, index: object, value: object, /) -> None: ...
    def __eq__(self, other: object, /) -> Any: ...
    def __lt__(self, other: object, /) -> Self: ...
    def __gt__(self, other: object, /) -> Self: ...
    def __add__(self, other: object, /) -> Self: ...
    def __sub__(self, other: object, /) -> Self: ...
    def __mul__(self, other: object, /) -> Self: ...
    def __rmul__(self, other: object, /) -> Self: ...
    def __truediv__(self, other: object, /) -> Self: ...
    def __abs__(self) -> Self: ...
    def reshape(self, *shape: int | tuple[int, ...]) -> Self: ...
    def view(self, dtype: object = None) -> Self: ...
    def astype(self, dtype: object, copy: bool = True) -> Self: ...
    def copy(self, order: str = "C") -> Self: ...
    def get(self, *, out: np.ndarray | None = None, blocking: bool = True) -> np.ndarray: ...
    def set(self, arr: np.ndarray) -> None: ...


class _CuPy:
    """A proxy for the module CuPy, which looks up each attribute of CuPy once.

    Raises DeviceError if CuPy is missing, or in a process forked after CUDA was initialized.
    """

    ndarray: type[CudaArray]
    empty: Callable[..., CudaArray]  # types of the functions that return new arrays or views
    full: Callable[..., CudaArray]
    zeros: Callable[..., CudaArray]
    asarray: Callable[..., CudaArray]
    ascontiguousarray: Callable[..., CudaArray]
    from_dlpack: Callable[..., CudaArray]
    _module: object = None  # replacement of CuPy while `replaced_by` is active
    _forked = False  # whether this process was forked; CUDA may then not work

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__version__":  # introspection must not import CuPy
            raise AttributeError(name)
        if self._module is None:
            try:
                found = getattr(import_module("cupy"), name)
            except ImportError as error:
                raise DeviceError(
                    f"CuPy cannot be imported ({error}): `gpt2block check` says what is missing"
                ) from error
            if self._forked and name != "ndarray":  # isinstance checks with ndarray need no CUDA
                _check_fork()
        else:
            found = getattr(self._module, name)
        setattr(self, name, found)
        return found


cupy = _CuPy()


def _check_fork() -> None:
    """Raise DeviceError if CUDA had been initialized when this process was forked."""
    if initialized() == NOT_INITIALIZED:
        raise DeviceError(f"{FORKED}: {FORKED_FIX}")


def initialized() -> int:
    """Return the result of cuInit, which creates no context: 0 if CUDA works, or an error code.

    CUDA's runtime cannot tell: after a fork it returns cached answers of the parent process.
    """
    try:
        return int(ctypes.CDLL("libcuda.so.1").cuInit(0))
    except OSError:  # no driver: the next call of CuPy reports this
        return 0


def first_gpus(count: int) -> str:
    """Return the name of the first GPUs as a device: "cuda:0,1" for two."""
    return f"cuda:{','.join(map(str, range(count)))}"


def begin(device: str | None) -> None:
    """Start a thread that creates a GPU's context (0.2 s) while CuPy is imported.

    device: "cuda", "cuda:N", or None for the GPU if there is one; other names are ignored. Errors
    are ignored here, as they occur again, with a message, when the device is used.
    """
    kind, _, index = ("cuda" if device is None else str(device)).partition(":")
    if kind == "cuda" and not replaced() and "cupy" not in sys.modules and find_spec("cupy"):
        number = int(index) if index.isdecimal() and len(index) < 10 else 0
        # Not a daemon thread: the process must not exit while the driver works in the thread.
        threading.Thread(target=_create_context, args=(number,), name="CUDA").start()


def _create_context(number: int) -> None:
    """Create the device's primary context, which the CUDA runtime, and therefore CuPy, uses."""
    if initialized() == 0:
        with suppress(OSError):
            driver, device, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_void_p()
            if driver.cuDeviceGet(ctypes.byref(device), number) == 0:
                driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def _after_fork() -> None:
    """Clear the proxy's attributes in a forked process, so that each lookup calls `_check_fork`."""
    if not replaced():
        vars(cupy).clear()
        cupy._forked = True


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork)


def is_array(x: object) -> TypeGuard[CudaArray]:
    """Return whether x is a CuPy array. Does not import CuPy."""
    return (replaced() or "cupy" in sys.modules) and isinstance(x, cupy.ndarray)


def replaced() -> bool:
    """Return whether another module currently replaces CuPy (see `replaced_by`)."""
    return cupy._module is not None


@contextmanager
def replaced_by(module: object) -> Iterator[None]:
    """Within this context manager, use `module` instead of CuPy in the whole process."""
    names = vars(cupy)
    before = dict(names)
    names.clear()
    names["_module"] = module
    try:
        yield
    finally:
        names.clear()
        names.update(before)

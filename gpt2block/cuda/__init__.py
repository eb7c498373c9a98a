"""Compile and launch CUDA kernels through CuPy.

`cupy` is a proxy of the module of that name. It imports CuPy on first use, and no other code does:
every module of the package can be imported without CuPy.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from gpt2block.errors import DeviceError

NOT_INITIALIZED = 3  # the error of every CUDA function in such a process, also of cuInit
FORKED = "this process was forked after CUDA had been initialized, and CUDA does not work in it"
FORKED_FIX = "start processes with multiprocessing's method 'spawn' or 'forkserver'"


class _CuPy:
    """CuPy's names as attributes, each looked up once.

    DeviceError where CuPy is missing, and in a process that was forked too late.
    """

    _module: Any = None  # the replacement of CuPy, as in `replaced_by`
    _forked = False  # whether CUDA may not work because this process was forked

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__version__":  # inspection looks up any of them
            raise AttributeError(name)
        if self._module is None:
            try:
                found = getattr(import_module("cupy"), name)
            except ImportError as error:
                raise DeviceError(
                    f"CuPy cannot be imported ({error}): `gpt2block check` says what is missing"
                ) from error
            if self._forked and name != "ndarray":  # which tells CuPy's arrays from others
                _check_fork()
        else:
            found = getattr(self._module, name)
        setattr(self, name, found)
        return found


cupy: Any = _CuPy()


def _check_fork() -> None:
    """Raise DeviceError if CUDA had been initialized when this process was forked."""
    if initialized() == NOT_INITIALIZED:
        raise DeviceError(f"{FORKED}: {FORKED_FIX}")


def initialized() -> int:
    """The result of cuInit, which creates no context: 0 if CUDA works, or an error.

    After a fork, CUDA's runtime still answers from what the parent process knew.
    """
    try:
        return int(ctypes.CDLL("libcuda.so.1").cuInit(0))
    except OSError:  # no driver: the next call of CuPy says so
        return 0


def begin(device: str | None) -> None:
    """Let a thread create the context of a GPU, which takes 0.2 s, while the caller imports CuPy.

    device: "cuda", "cuda:N", or None for the GPU if there is one; nothing begins for other names.
    Whatever fails here fails again, with a message, when the device is used.
    """
    kind, _, index = ("cuda" if device is None else str(device)).partition(":")
    if kind == "cuda" and not replaced() and "cupy" not in sys.modules and find_spec("cupy"):
        number = int(index) if index.isdecimal() and len(index) < 10 else 0
        # Not a daemon: a process that ends early must not leave while the driver works.
        threading.Thread(target=_create_context, args=(number,), name="CUDA").start()


def _create_context(number: int) -> None:
    """Create the context that CUDA's runtime, and so CuPy, uses."""
    if initialized() == 0:
        with suppress(OSError):
            driver, device, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_void_p()
            if driver.cuDeviceGet(ctypes.byref(device), number) == 0:
                driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def _after_fork() -> None:
    """Let a forked process look up all names again, with `_check_fork`."""
    if not replaced():
        vars(cupy).clear()
        cupy._forked = True


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork)


def is_array(x: Any) -> bool:
    """Whether x is a CuPy array. Does not import CuPy: an array exists only after its import."""
    if not replaced() and "cupy" not in sys.modules:
        return False
    return isinstance(x, cupy.ndarray)


def replaced() -> bool:
    """Whether `replaced_by` is active."""
    return cupy._module is not None


@contextmanager
def replaced_by(module: Any) -> Iterator[None]:
    """Use `module` instead of CuPy, in the whole process, until the context ends."""
    names = vars(cupy)
    before = dict(names)
    names.clear()
    names["_module"] = module
    try:
        yield
    finally:
        names.clear()
        names.update(before)

"""Compile and launch CUDA kernels through CuPy.

`cupy` is a proxy of the module of that name. It imports CuPy on first use, and no other code does:
every module of the package can be imported without CuPy.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from gpt2block.errors import DeviceError


class _CuPy:
    """CuPy's names as attributes, each looked up once; DeviceError where CuPy is missing."""

    _module: Any = None  # the replacement of CuPy, as in `replaced_by`

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
        else:
            found = getattr(self._module, name)
        setattr(self, name, found)
        return found


cupy: Any = _CuPy()


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

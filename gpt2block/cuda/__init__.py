"""Compile and launch CUDA kernels through CuPy.

`cupy` stands for the module of that name, which is imported on first use, here and nowhere else: so
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

    _module: Any = None  # what stands in for CuPy

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what inspection asks of any object
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
    """Whether x is a CuPy array. CuPy is not imported for it: who has such an array has done so."""
    if not replaced() and "cupy" not in sys.modules:
        return False
    return isinstance(x, cupy.ndarray)


def replaced() -> bool:
    """Whether something stands in for CuPy."""
    return cupy._module is not None


@contextmanager
def replaced_by(module: Any) -> Iterator[None]:
    """`module` in the place of CuPy, for the whole process."""
    names = vars(cupy)
    before = dict(names)
    names.clear()
    names["_module"] = module
    try:
        yield
    finally:
        names.clear()
        names.update(before)

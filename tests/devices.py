"""The devices that one test runs on: the CPU emulator in three thread orders, and a GPU.

A test takes `device`, which is CuPy or its stand-in, and calls operations the same way on all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest

from gpt2block import cuda, emulator
from gpt2block.cuda import arrays

ON_CPU = [pytest.param(order, id=f"emulator-{order}") for order in emulator.ORDERS]
EVERYWHERE = [*ON_CPU, pytest.param("gpu", marks=pytest.mark.gpu)]
SOMEWHERE = ["shuffled", EVERYWHERE[-1]]  # for tests of which one thread order is enough
every_device = pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
one_device = pytest.mark.parametrize("device", SOMEWHERE, indirect=True)
on_gpu = pytest.mark.parametrize("device", EVERYWHERE[-1:], indirect=True)


@contextmanager
def running_on(name: str, multiprocessors: int = 4) -> Iterator[Any]:
    """CuPy, or its stand-in with a thread order by name; skips where g++ is missing.

    multiprocessors: those of the emulated device.
    """
    if name != "gpu" and (problem := emulator.missing()):
        pytest.skip(problem)
    context: AbstractContextManager[Any] = (
        nullcontext() if name == "gpu" else emulator.emulated(name, multiprocessors)  # type: ignore[arg-type]
    )
    with context:
        yield cuda.cupy


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[Any]:
    with running_on(request.param) as cupy:
        yield cupy


def set_attributes(monkeypatch: pytest.MonkeyPatch, **attributes: int) -> None:
    """What the emulated device says of itself; a GPU keeps its own attributes."""
    if cuda.replaced():
        known = cuda.cupy.ATTRIBUTES | attributes
        monkeypatch.setattr(arrays, "_attribute", lambda _, name: known[name])

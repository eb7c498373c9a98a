"""The devices that one test runs on: the CPU emulator in three thread orders, and a GPU.

A test takes `device`, which is CuPy or its stand-in, and calls operations the same way on all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest

from gpt2block import cuda, emulator

ON_CPU = [pytest.param(order, id=f"emulator-{order}") for order in emulator.ORDERS]
EVERYWHERE = [*ON_CPU, pytest.param("gpu", marks=pytest.mark.gpu)]
every_device = pytest.mark.parametrize("device", EVERYWHERE, indirect=True)


@contextmanager
def running_on(name: str) -> Iterator[Any]:
    """CuPy, or its stand-in with a thread order by name; skips where g++ is missing."""
    if name != "gpu" and (problem := emulator.missing()):
        pytest.skip(problem)
    context: AbstractContextManager[Any] = (
        nullcontext() if name == "gpu" else emulator.emulated(name)  # type: ignore[arg-type]
    )
    with context:
        yield cuda.cupy


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[Any]:
    with running_on(request.param) as cupy:
        yield cupy

"""The context of a GPU is created while a checkpoint is opened and CuPy is imported."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from gpt2block import cuda


@pytest.fixture
def created(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Fake a driver with two devices; return the list of requested devices."""
    numbers: list[int] = []

    def device_get(device: Any, number: int) -> int:
        return 0 if number < 2 else 101

    driver = SimpleNamespace(
        cuInit=lambda flags: 0,
        cuDeviceGet=device_get,
        cuDevicePrimaryCtxRetain=lambda context, device: numbers.append(device),
    )
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    monkeypatch.setattr(cuda, "find_spec", lambda name: name)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    return numbers


def begin(device: str | None) -> bool:
    """Return whether a thread was started; wait until it has ended."""
    before = set(threading.enumerate())
    cuda.begin(device)
    started = [thread for thread in threading.enumerate() if thread not in before]
    for thread in started:
        thread.join()
    return bool(started)


@pytest.mark.parametrize(
    "device", [None, "cuda", "cuda:0", "cuda:1", "cuda:x", "cuda:-1", f"cuda:{'1' * 5000}"]
)
def test_the_context_of_the_device_is_created(created: list[int], device: str | None) -> None:
    """A name that is refused later stands for the first device."""
    begin(device)
    assert len(created) == 1


@pytest.mark.parametrize("device", ["cpu", "tpu", "", 3, "cuda:7"])
def test_other_names_create_none(created: list[int], device: Any) -> None:
    """There are two devices."""
    begin(device)
    assert created == []


def test_without_cupy_nothing_begins(created: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "find_spec", lambda name: None)
    assert not begin("cuda")
    assert created == []


def test_an_imported_cupy_has_its_context(
    created: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace())
    assert not begin("cuda")
    assert created == []


@pytest.mark.gpu
def test_a_process_that_ends_at_once() -> None:
    """The process waits for the driver, and ends normally."""
    command = [sys.executable, "-c", "from gpt2block import cuda; cuda.begin('cuda')"]
    done = subprocess.run(command, check=False, capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")

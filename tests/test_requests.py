"""Kernels that background threads compile, without a GPU or a compiler."""

from __future__ import annotations

import threading
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest

from gpt2block import KernelError
from gpt2block.cuda import requests
from gpt2block.cuda.requests import Function

WAIT = 30.0  # seconds after which a test fails that would wait forever


@pytest.fixture(autouse=True)
def _no_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "_modules", {})


class Raw:
    """Stands for a `cupy.RawKernel`."""

    max_dynamic_shared_size_bytes = shared_size_bytes = 16

    def __init__(self) -> None:
        self.kernel = SimpleNamespace(ptr=7)
        self.calls: list[Any] = []

    def __call__(self, *args: Any, shared_mem: int) -> None:
        self.calls.append((*args, shared_mem))


@pytest.fixture
def raw() -> Raw:
    return Raw()


def module_of(raw: Raw) -> Any:
    return SimpleNamespace(get_function=lambda name: raw)


def test_a_function_is_requested_at_once_and_waits_when_it_is_called(raw: Raw) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def compile(file: str) -> Any:
        begun.set()
        assert may_end.wait(WAIT)
        return module_of(raw)

    function = Function("f", compile, ("a.cu",))
    assert begun.wait(WAIT)
    function.allow_shared(100)  # which does not wait
    function.allow_shared(50)
    may_end.set()
    function((1,), (32,), ("x",), shared_mem=8)
    assert raw.calls == [((1,), (32,), ("x",), 8)]
    assert raw.max_dynamic_shared_size_bytes == 100
    function.allow_shared(200)
    assert raw.max_dynamic_shared_size_bytes == 200
    assert (function.kernel.ptr, function.shared_size_bytes) == (7, 16)


def test_several_are_compiled_at_the_same_time(raw: Raw, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    requests._threads.cache_clear()
    together = threading.Barrier(3)

    def compile(file: str) -> Any:
        together.wait(WAIT)
        return module_of(raw)

    try:
        functions = [Function("f", compile, (file,)) for file in ("a.cu", "b.cu", "c.cu")]
        for function in functions:
            function((1,), (1,), ())
    finally:
        requests._threads.cache_clear()
    assert len(raw.calls) == 3


def test_many_cores_do_not_mean_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 192)
    requests._threads.cache_clear()
    try:
        assert requests._threads()._max_workers == requests.MOST_THREADS
    finally:
        requests._threads.cache_clear()


def test_functions_of_a_file_share_a_module(raw: Raw) -> None:
    compiled = []

    def compile(file: str) -> Any:
        compiled.append(file)
        return module_of(raw)

    for name in ("f", "g", "f"):
        Function(name, compile, ("a.cu",))((1,), (1,), ())
    assert compiled == ["a.cu"]


def test_an_error_is_raised_by_each_call_until_it_compiles(raw: Raw) -> None:
    wrong = True

    def compile(file: str) -> Any:
        if wrong:
            raise KernelError(f"{file} does not compile")
        return module_of(raw)

    function = Function("f", compile, ("a.cu",))
    for _ in range(2):
        with pytest.raises(KernelError, match=r"a\.cu does not compile"):
            function((1,), (1,), ())
    wrong = False
    function((1,), (1,), ())
    assert len(raw.calls) == 1


def test_watchers_are_told_of_every_module(raw: Raw) -> None:
    seen: Queue[tuple[int, int]] = Queue()
    with requests.watched(lambda *counts: seen.put(counts)):
        Function("f", lambda file: module_of(raw), ("a.cu",))
        assert seen.get(timeout=WAIT) == (1, 1)
        Function("f", lambda file: module_of(raw), ("b.cu",))
        assert seen.get(timeout=WAIT) == (2, 2)
    Function("f", lambda file: module_of(raw), ("c.cu",))((1,), (1,), ())
    assert seen.empty()

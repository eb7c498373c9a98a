"""Kernels that background threads compile, without a GPU or a compiler."""

from __future__ import annotations

import subprocess
import sys
import threading
from queue import Queue
from types import SimpleNamespace
from typing import Any

import launch_recorder
import pytest

from gpt2block import GPT2, GPT2Config, GPT2Weights, KernelError
from gpt2block.cuda import requests
from gpt2block.cuda.requests import Function

WAIT = 300.0  # seconds after which a test fails that would wait forever
STORING = ("absmax_nk_kernel", "store_weights", "to_fp8_kernel")  # kernels that store weights


@pytest.fixture(autouse=True)
def _no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "_kernels", {})


class Raw:
    """A substitute for a `cupy.RawKernel`."""

    max_dynamic_shared_size_bytes = shared_size_bytes = 16

    def __init__(self) -> None:
        self.kernel = SimpleNamespace(ptr=7)
        self.calls: list[Any] = []

    def __call__(self, *args: Any, shared_mem: int) -> None:
        self.calls.append((*args, shared_mem))


@pytest.fixture
def raw() -> Raw:
    return Raw()


def test_a_function_is_requested_at_once_and_waits_when_it_is_called(raw: Raw) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def compile(file: str) -> Any:
        begun.set()
        assert may_end.wait(WAIT)
        return raw

    function = Function(compile, ("a.cu",))
    assert begun.wait(WAIT)
    function.allow_shared(100)  # must not wait
    function.allow_shared(50)
    may_end.set()
    function((1,), (32,), ("x",), shared_mem=8)
    assert raw.calls == [((1,), (32,), ("x",), 8)]
    assert raw.max_dynamic_shared_size_bytes == 100
    function.allow_shared(200)
    assert raw.max_dynamic_shared_size_bytes == 200
    assert (function.kernel.ptr, function.shared_size_bytes) == (7, 16)


def test_a_launch_with_too_much_shared_memory_fails_alone() -> None:
    """Later launches of the kernel set the limit that they need, also before its first use."""

    class Limited(Raw):
        def __setattr__(self, name: str, value: Any) -> None:
            if value == 1001:
                raise RuntimeError("CUDA_ERROR_INVALID_VALUE")
            super().__setattr__(name, value)

    function = Function(lambda file: Limited(), ("a.cu",))

    def launch(shared: int) -> None:
        function.allow_shared(shared)
        function((1,), (1,), ())

    for allowed in (900, 1000):
        with pytest.raises(RuntimeError, match="INVALID_VALUE"):
            launch(1001)
        launch(allowed)
        assert function.found.max_dynamic_shared_size_bytes == allowed


def test_several_are_compiled_at_the_same_time(raw: Raw, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    together, running = threading.Barrier(3), set[int]()

    def compile(turn: int, file: str) -> Any:
        running.add(threading.get_ident())
        together.wait(WAIT)
        return raw

    for turn in range(2):  # new threads, after those of the first turn have ended
        functions = [Function(compile, (turn, file)) for file in ("a.cu", "b.cu", "c.cu")]
        for function in functions:
            function((1,), (1,), ())
        assert len(running) == 3
        running.clear()
    assert len(raw.calls) == 6


def test_many_cores_do_not_mean_many_threads(raw: Raw, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 192)
    assert requests.max_threads() == requests.MAX_THREADS
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    begun, may_end = Queue[str](), threading.Event()

    def compile(file: str) -> Any:
        begun.put(file)
        assert may_end.wait(WAIT)
        return raw

    functions = [Function(compile, (file,)) for file in ("a.cu", "b.cu", "c.cu")]
    assert {begun.get(timeout=WAIT), begun.get(timeout=WAIT)} == {"a.cu", "b.cu"}
    assert begun.empty()
    may_end.set()
    functions[2]((1,), (1,), ())
    assert begun.get(timeout=WAIT) == "c.cu"


EXIT = """
import os, sys, threading, time
from types import SimpleNamespace
from gpt2block.cuda.requests import Function

def say(what, number):
    os.write(1, f"{what} {number}\\n".encode())

def compile(number):
    say("begun", number)
    time.sleep(0.2)
    return lambda *args, **named: say("ran", number)

os.cpu_count = lambda: 2
functions = [Function(compile, (number,)) for number in range(40)]

def go_on():
    threading.main_thread().join()
    functions[-1]((1,), (1,), ())

if sys.argv[1] == "thread":
    threading.Thread(target=go_on).start()
if sys.argv[1] == "interrupt":
    raise KeyboardInterrupt
"""


@pytest.mark.parametrize("way", ["end", "interrupt", "thread"])
def test_an_exit_waits_only_for_what_is_being_compiled(way: str) -> None:
    """A thread that outlives the main thread compiles the kernels that it needs itself."""
    command = [sys.executable, "-c", EXIT, way]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    lines = done.stdout.split("\n")[:-1]
    needed = ["begun 39", "ran 39"] if way == "thread" else []
    assert sorted(lines) == sorted(["begun 0", "begun 1", *needed])
    assert ("KeyboardInterrupt" in done.stderr) == (way == "interrupt")
    assert (done.returncode == 0) == (way != "interrupt")


def test_an_error_is_raised_by_each_call_until_it_compiles(raw: Raw) -> None:
    wrong = True

    def compile(file: str) -> Any:
        if wrong:
            raise KernelError(f"{file} does not compile")
        return raw

    function = Function(compile, ("a.cu",))
    for _ in range(2):
        with pytest.raises(KernelError, match=r"a\.cu does not compile"):
            function((1,), (1,), ())
    wrong = False
    function((1,), (1,), ())
    assert len(raw.calls) == 1


def test_watchers_are_told_of_every_kernel(raw: Raw) -> None:
    seen: Queue[tuple[int, int]] = Queue()
    with requests.watched(lambda *counts: seen.put(counts)):
        Function(lambda file: raw, ("a.cu",))
        assert seen.get(timeout=WAIT) == (1, 1)
        Function(lambda file: raw, ("b.cu",))
        assert seen.get(timeout=WAIT) == (2, 2)
    Function(lambda file: raw, ("c.cu",))((1,), (1,), ())
    assert seen.empty()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3fn", "float8_e5m2"])
def test_a_start_waits_for_no_kernel_that_it_could_have_requested_before(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Storing weights waits only once, for kernels that are compiled at the same time."""
    events: list[tuple[str, str, str]] = []

    class Kernel(launch_recorder._Kernel):
        def __init__(self, recorder: Any, code: str, name: str) -> None:
            super().__init__(recorder, code, name)
            events.append(("requested", self.name, self.defines))

        def record(self, *args: Any) -> None:
            events.append(("run", self.name, self.defines))

    monkeypatch.setattr(launch_recorder, "_Kernel", Kernel)
    config = GPT2Config(n_layer=1, n_head=1, n_embd=64, n_ctx=64, vocab_size=96)
    with launch_recorder.recording("9.0"):
        model = GPT2(GPT2Weights.random(0, config), "cuda", dtype)
        stored = [event for event in events if event[1] in STORING]
        model.generate([1, 2], max_new_tokens=1, temperature=0)
    kinds = [kind for kind, *_ in stored]
    first = kinds.index("run")
    assert first >= 2
    assert "requested" not in kinds[first:]
    early = [name for kind, name, _ in events[: events.index(stored[0])] if kind == "requested"]
    assert {"sample_token", "begin_slots"} <= set(early)

"""Launches, and their kernels, which are compiled, or loaded from CuPy's cache, in the background.

A kernel is requested when a launch is bound, and its first use waits for it. So the kernels of a
whole plan, which are all bound before the first one runs, are compiled in parallel. At exit, and
after Ctrl-C, a process waits for those that are being compiled, and not for the others.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gpt2block.cuda import replaced
from gpt2block.cuda.tensor_maps import TensorMap

Scalar = Any  # a NumPy scalar: CuPy passes its bytes to the kernel
Argument = Any  # a Scalar or a TensorMap
Compile = Callable[..., Any]  # of the arguments in a key: a `cupy.RawKernel`, compiled
Watcher = Callable[[int, int], None]
MOST_THREADS = 16  # a start has few more kernels, and each compile takes memory

_LIMITS, _REQUESTS = threading.Lock(), threading.Lock()
_kernels: dict[Hashable, Future[Any]] = {}
_watchers: list[Watcher] = []


class Function:
    """A requested kernel, with the attributes of a `cupy.RawKernel` that this package uses.

    compile(*key) returns that. A call waits for it, and raises its error; the next call then
    requests it again.
    """

    def __init__(self, compile: Compile, key: tuple[Hashable, ...]) -> None:
        self._compile, self._key = compile, key
        self._shared = 0
        self._found: Any = None
        _request(compile, key)

    @property
    def found(self) -> Any:
        """The `cupy.RawKernel`; waits for it."""
        if self._found is None:
            found = _result(self._compile, self._key)
            with _LIMITS:
                if self._shared:
                    found.max_dynamic_shared_size_bytes = self._shared
                self._found = found
        return self._found

    @property
    def kernel(self) -> Any:
        return self.found.kernel

    @property
    def shared_size_bytes(self) -> int:
        return int(self.found.shared_size_bytes)

    def allow_shared(self, nbytes: int) -> None:
        """Let launches have so much dynamic shared memory; the limit never shrinks."""
        with _LIMITS:  # functions are shared by all threads
            if nbytes > self._shared:
                self._shared = nbytes
                if self._found is not None:
                    self._found.max_dynamic_shared_size_bytes = nbytes

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: Any, shared_mem: int = 0
    ) -> None:
        self.found(grid, block, args, shared_mem=shared_mem)


@dataclass(frozen=True)
class Launch:
    """A kernel with its grid, block and arguments fixed; `run` puts it on the current stream.

    Pointers are stored as numbers: a launch does not keep the arrays alive. args: NumPy scalars,
    and TensorMaps, which the first run encodes.
    """

    name: str
    function: Any
    grid: tuple[int, ...]
    block: tuple[int, ...]
    args: tuple[Argument, ...]
    shared: int = 0

    @cached_property
    def values(self) -> tuple[Scalar, ...]:
        """The arguments as CuPy takes them. Raises DeviceError."""
        return tuple([a.encoded() if type(a) is TensorMap else a for a in self.args])

    def run(self) -> None:
        self.function(self.grid, self.block, self.values, shared_mem=self.shared)


def _result(compile: Compile, key: tuple[Hashable, ...]) -> Any:
    """The kernel, when it is ready."""
    try:
        return _request(compile, key).result()
    except CancelledError:  # the main thread has ended, this one goes on
        return _request(compile, key).result()


def _request(compile: Compile, key: tuple[Hashable, ...]) -> Future[Any]:
    """The kernel; one that failed is requested again."""
    with _REQUESTS:
        known = _kernels.get(key)
        if known is None or (known.done() and (known.cancelled() or known.exception())):
            known = Future()
            if replaced() or not _main_thread_runs():  # the emulator is in CuPy's place for a time
                _run(known, compile, key)
            else:
                _threads.submit(known, compile, key)
            _kernels[key] = known
            known.add_done_callback(_report)
        return known


class _Threads:
    """Threads that compile what is queued, and end when nothing is.

    NVRTC releases Python's lock, and compiles in parallel. An exiting process waits for a thread
    that is not a daemon, as it must for one inside NVRTC; the threads of `concurrent.futures` would
    first compile all that is queued.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: deque[tuple[Future[Any], Compile, tuple[Hashable, ...]]] = deque()
        self._running = 0

    def submit(self, future: Future[Any], compile: Compile, key: tuple[Hashable, ...]) -> None:
        with self._lock:
            self._queue.append((future, compile, key))
            if self._running == most_threads():
                return
            self._running += 1
        try:
            threading.Thread(target=self._work, name="compile").start()
        except BaseException:
            with self._lock:
                self._running -= 1
            raise

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._running -= 1
                    return
                future, compile, key = self._queue.popleft()
            if _main_thread_runs():
                _run(future, compile, key)
            else:
                future.cancel()


_threads = _Threads()


def most_threads() -> int:
    """The number of kernels that are compiled at the same time."""
    return min(os.cpu_count() or 1, MOST_THREADS)


def _main_thread_runs() -> bool:
    return threading.main_thread().is_alive()


def _run(future: Future[Any], compile: Compile, key: tuple[Hashable, ...]) -> None:
    """Compile in this thread."""
    try:
        future.set_result(compile(*key))
    except Exception as error:
        future.set_exception(error)


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Until the context ends, call watcher(ready, requested) whenever a kernel is ready.

    The calls come from background threads. All kernels of the process are counted.
    """
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def _report(_: Future[Any]) -> None:
    kernels = list(_kernels.values())
    for watcher in list(_watchers):
        watcher(sum(kernel.done() for kernel in kernels), len(kernels))

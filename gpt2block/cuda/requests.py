"""Compile kernels or load them from CuPy's cache, in the background, and launch them.

A kernel is requested when a launch is bound, and the first use of the kernel waits for it. A pass
binds all its launches before the first one runs, so that their kernels are compiled in parallel.
At exit, and after Ctrl-C, a process waits only for kernels whose compilation has begun.
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
Compile = Callable[..., object]  # compile(*key) returns a compiled `cupy.RawKernel`
Watcher = Callable[[int, int], None]  # receives the numbers of ready and of requested kernels
MAX_THREADS = 16  # maximum threads: each needs memory, and few programs start with more kernels

_LIMITS, _REQUESTS = threading.Lock(), threading.Lock()
_kernels: dict[Hashable, Future[object]] = {}
_watchers: list[Watcher] = []


class Function:
    """A requested kernel, with the attributes of a `cupy.RawKernel` that this package uses.

    compile(*key) returns the `cupy.RawKernel`. A call waits for the compilation. If it fails, the
    call raises its error, and the next call requests the kernel again.
    """

    def __init__(self, compile: Compile, key: tuple[Hashable, ...]) -> None:
        self._compile, self._key = compile, key
        self._shared = 0
        self._found: object = None
        _request(compile, key)

    @property
    def found(self) -> Any:
        """The compiled `cupy.RawKernel`. Reading this property waits for the compilation."""
        if self._found is None:
            found = _result(self._compile, self._key)
            with _LIMITS:
                allowed, self._shared = self._shared, 0
                self._allow(found, allowed)
                self._found = found
        return self._found

    @property
    def kernel(self) -> Any:
        return self.found.kernel

    @property
    def shared_size_bytes(self) -> int:
        return int(self.found.shared_size_bytes)

    @property
    def local_size_bytes(self) -> int:
        """Bytes of local memory per thread, in which the stack and spilled registers are."""
        return int(self.found.local_size_bytes)

    def allow_shared(self, nbytes: int) -> None:
        """Allow launches of the kernel at least `nbytes` bytes of dynamic shared memory."""
        with _LIMITS:  # threads share Function objects
            self._allow(self._found, nbytes)

    def _allow(self, found: Any, nbytes: int) -> None:
        """Set the limit of a compiled kernel, and store the limit if the driver accepts it."""
        if nbytes > self._shared:
            if found is not None:
                found.max_dynamic_shared_size_bytes = nbytes
            self._shared = nbytes

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: object, shared_mem: int = 0
    ) -> None:
        self.found(grid, block, args, shared_mem=shared_mem)


@dataclass(frozen=True)
class Launch:
    """A kernel with a fixed grid, block and arguments; `run` launches it on the current stream.

    Pointers are stored as numbers, so that a launch does not keep the arrays alive. args: NumPy
    scalars, and TensorMaps, which the first run encodes.
    """

    name: str
    function: Any
    grid: tuple[int, ...]
    block: tuple[int, ...]
    args: tuple[Argument, ...]
    shared: int = 0

    @cached_property
    def values(self) -> tuple[Scalar, ...]:
        """The arguments in the form that CuPy's launch takes. Raises DeviceError."""
        return tuple([a.encoded() if type(a) is TensorMap else a for a in self.args])

    def run(self) -> None:
        self.function(self.grid, self.block, self.values, shared_mem=self.shared)


def _result(compile: Compile, key: tuple[Hashable, ...]) -> object:
    """Wait for a kernel and return it."""
    try:
        return _request(compile, key).result()
    except CancelledError:  # the main thread has ended: this thread compiles the kernel itself
        return _request(compile, key).result()


def _request(compile: Compile, key: tuple[Hashable, ...]) -> Future[object]:
    """Return a kernel's Future. Start its compilation if it is new or its compilation failed."""
    with _REQUESTS:
        known = _kernels.get(key)
        if known is None or (known.done() and (known.cancelled() or known.exception())):
            known = Future()
            # The emulator replaces CuPy only temporarily: this thread must compile the kernel now.
            if replaced() or not _main_thread_runs():
                _run(known, compile, key)
            else:
                _threads.submit(known, compile, key)
            _kernels[key] = known
            known.add_done_callback(_report)
        return known


class _Threads:
    """Threads that compile queued kernels, and end when the queue is empty.

    NVRTC releases Python's interpreter lock, so that threads compile in parallel. The threads are
    not daemons: an exiting process must wait for a thread inside NVRTC. The threads of
    `concurrent.futures` would compile all queued kernels before the process exits.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: deque[tuple[Future[object], Compile, tuple[Hashable, ...]]] = deque()
        self._running = 0

    def submit(self, future: Future[object], compile: Compile, key: tuple[Hashable, ...]) -> None:
        with self._lock:
            self._queue.append((future, compile, key))
            if self._running == max_threads():
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


def max_threads() -> int:
    """Return the maximum number of kernels that are compiled at the same time."""
    return min(os.cpu_count() or 1, MAX_THREADS)


def _main_thread_runs() -> bool:
    return threading.main_thread().is_alive()


def _run(future: Future[object], compile: Compile, key: tuple[Hashable, ...]) -> None:
    """Compile a kernel in the calling thread, and set the Future's result or exception."""
    try:
        future.set_result(compile(*key))
    except Exception as error:
        future.set_exception(error)


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Within this context, call watcher(ready, requested) whenever a kernel becomes ready.

    Background threads make the calls. The numbers count all kernels of the process.
    """
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def _report(_: Future[object]) -> None:
    kernels = list(_kernels.values())
    for watcher in list(_watchers):
        watcher(sum(kernel.done() for kernel in kernels), len(kernels))

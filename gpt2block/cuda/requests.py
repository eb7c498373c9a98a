"""Kernels that are compiled, or loaded from CuPy's cache, by background threads.

A kernel is requested when a launch is bound, and its first use waits for it. So the kernels of a
whole plan, which are all bound before the first one runs, are compiled in parallel.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any

from gpt2block.cuda import replaced

Compile = Callable[..., Any]  # of the arguments in a key: a `cupy.RawModule`, compiled
Watcher = Callable[[int, int], None]

_LIMITS, _REQUESTS = threading.Lock(), threading.Lock()
_modules: dict[Hashable, Future[Any]] = {}
_watchers: list[Watcher] = []


class Function:
    """A requested kernel, with the attributes of a `cupy.RawKernel` that this package uses.

    compile(*key) returns its module. A call waits for it, and raises its error; the next call then
    requests it again.
    """

    def __init__(self, name: str, compile: Compile, key: tuple[Hashable, ...]) -> None:
        self._name, self._compile, self._key = name, compile, key
        self._shared = 0
        self._found: Any = None
        _request(compile, key)

    @property
    def _kernel(self) -> Any:
        if self._found is None:
            found = _request(self._compile, self._key).result().get_function(self._name)
            with _LIMITS:
                if self._shared:
                    found.max_dynamic_shared_size_bytes = self._shared
                self._found = found
        return self._found

    @property
    def kernel(self) -> Any:
        return self._kernel.kernel

    @property
    def found(self) -> Any:
        """What the module has by the name: a `cupy.RawKernel`; waits for the module."""
        return self._kernel

    @property
    def shared_size_bytes(self) -> int:
        return int(self._kernel.shared_size_bytes)

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
        self._kernel(grid, block, args, shared_mem=shared_mem)


def _request(compile: Compile, key: tuple[Hashable, ...]) -> Future[Any]:
    """The module; one that failed is requested again."""
    with _REQUESTS:
        known = _modules.get(key)
        if known is None or (known.done() and known.exception()):
            submit = _at_once if replaced() else _threads().submit
            known = _modules[key] = submit(compile, *key)
            known.add_done_callback(_report)
        return known


def _at_once(compile: Compile, *key: Hashable) -> Future[Any]:
    """Compile in this thread: on the emulator, which is in CuPy's place for a time only."""
    done: Future[Any] = Future()
    try:
        done.set_result(compile(*key))
    except Exception as error:
        done.set_exception(error)
    return done


@cache
def _threads() -> ThreadPoolExecutor:
    """NVRTC releases Python's lock, and compiles in parallel."""
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="compile")


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Until the context ends, call watcher(ready, requested) whenever a module is ready.

    The calls come from background threads. All modules of the process are counted.
    """
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def _report(_: Future[Any]) -> None:
    modules = list(_modules.values())
    for watcher in list(_watchers):
        watcher(sum(module.done() for module in modules), len(modules))

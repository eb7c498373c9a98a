"""Time work on a GPU: medians of CUDA graph replays, without the overhead of Python."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from statistics import median
from time import perf_counter
from typing import Protocol

from gpt2block.cuda import cupy, overlap

REPLAYS = 7
CALLS = 20  # calls from Python per measurement; with few calls the host never waits for the GPU
TARGET_MS = 2.0  # duration of one replay: long compared with the resolution of an event


class Launchable(Protocol):
    def run(self) -> None: ...


def gpu_ms(launches: Iterable[Launchable]) -> float:
    """Return the milliseconds that the launches together take, run in order on the current device.

    A CUDA graph contains many repetitions, and the result is the median of seven replays. All
    repetitions use the same arrays, so that data that fits in the L2 cache is read from it.
    """
    launches = tuple(launches)
    once = interleaved_ms({"": captured(launches)}, count=1)[""]
    repetitions = max(1, min(200, round(TARGET_MS / once)))
    return interleaved_ms({"": captured(launches * repetitions)})[""] / repetitions


def event_ms(work: Callable[[], None]) -> float:
    """Run `work` once. Return the milliseconds between events recorded before and after it.

    The kernels must be loaded already. Gaps between launches count.
    """
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(cupy.cuda.get_elapsed_time(start, end))


def captured(launches: Iterable[Launchable]) -> Callable[[], None]:
    """Capture the launches in a CUDA graph. The result replays it on the current stream."""
    launches = tuple(launches)
    for launch in {id(launch): launch for launch in launches}.values():
        launch.run()  # loads the kernel, which is not possible during a capture
    cupy.cuda.get_current_stream().synchronize()
    graph = overlap.capture(launches, cupy.cuda.Stream(non_blocking=True), overlapping=False)
    return lambda: graph.launch(cupy.cuda.get_current_stream())


def interleaved_ms(
    replays: Mapping[str, Callable[[], None]],
    count: int = REPLAYS,
    lead: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Return {name: median ms of the replay}. Replays take turns, so that clock changes affect all.

    replays: {name: function that launches a CUDA graph}. lead: function that launches work before
    each replay, so that the GPU does not wait for the host to launch the replay.
    """
    times: dict[str, list[float]] = {name: [] for name in replays}
    for _ in range(count + 1):  # the first iteration warms up
        for name, replay in replays.items():
            lead()
            times[name].append(event_ms(replay))
    return {name: median(found[1:]) for name, found in times.items()}


def interleaved_host_ms(
    replays: Mapping[str, Callable[[], None]], count: int = REPLAYS
) -> dict[str, float]:
    """Return {name: median ms that a call of the function takes on the host} over `count` calls.

    replays: {name: function that returns when its results are in host memory}. Each function must
    have been called before.
    """
    times: dict[str, list[float]] = {name: [] for name in replays}
    for _ in range(count):
        for name, replay in replays.items():
            began = perf_counter()
            replay()
            times[name].append(1e3 * (perf_counter() - began))
    return {name: median(found) for name, found in times.items()}


def call_times(call: Callable[[], object]) -> tuple[float, float]:
    """Return GPU ms and host µs of a repeated call; calls are queued without a wait for the GPU."""
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    gpu: list[float] = []
    host: list[float] = []
    for _ in range(REPLAYS + 1):  # the first iteration compiles kernels and captures graphs
        start.record()
        began = perf_counter()
        for _ in range(CALLS):
            call()
        host.append(1e6 * (perf_counter() - began) / CALLS)
        end.record()
        end.synchronize()
        gpu.append(cupy.cuda.get_elapsed_time(start, end) / CALLS)
    return median(gpu[1:]), median(host[1:])

"""Timing on a GPU so that a figure counts: graph replays, medians, nothing of Python in between."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, Protocol

REPLAYS = 7
CALLS = 20  # of a block in one measurement; few enough that the host never waits for the GPU
# The source document's own figures on an H200: T → ms of its `solve`, cudaMalloc in every call.
DOCUMENT_MS = {128: 0.545, 1024: 6.30, 4096: 67.8}
TARGET_MS = 2.0  # one replay: long against the resolution of an event, short for the user


class Launchable(Protocol):
    def run(self) -> None: ...


def gpu_ms(launches: Iterable[Launchable]) -> float:
    """Milliseconds the launches take on the current device, one after the other.

    Many repetitions are captured in one CUDA graph; the median of seven replays counts. The data
    stays where it is, so what fits in the L2 cache is read from there.
    """
    import cupy  # noqa: PLC0415  (a NumPy-only installation imports this module too)

    launches = tuple(launches)

    def replay(repetitions: int, replays: int) -> float:
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            for _ in range(repetitions):
                for launch in launches:
                    launch.run()
            graph = stream.end_capture()
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        times: list[float] = []
        for _ in range(replays + 1):  # the first one warms up
            start.record(stream)
            graph.launch(stream)
            end.record(stream)
            end.synchronize()
            times.append(cupy.cuda.get_elapsed_time(start, end) / repetitions)
        return median(times[1:])

    cupy.cuda.get_current_stream().synchronize()
    for launch in launches:
        launch.run()  # loads the kernels, which a capture cannot
    cupy.cuda.get_current_stream().synchronize()
    once = replay(1, 1)
    return replay(max(1, min(200, round(TARGET_MS / once))), REPLAYS)


@dataclass(frozen=True)
class BlockTime:
    """GPT-2 small's block, B = 1: the graph on the GPU, and a warm `block(x, out=out)`."""

    device: str
    T: int
    mask: str
    ms: float
    document_ms: float | None
    python_us: float  # host time of one warm call, which does not wait for the GPU

    @property
    def speedup(self) -> float | None:
        return self.document_ms / self.ms if self.document_ms else None


def block_against_document(device: str | None = None) -> list[BlockTime]:
    """The skeleton block at the document's lengths, with and without a mask, and at T = 1."""
    import cupy  # noqa: PLC0415

    from gpt2block.block import Block  # noqa: PLC0415  (block imports this module for its engine)
    from gpt2block.weights import BlockWeights, random_input  # noqa: PLC0415

    rows = []
    weights = BlockWeights.random(0)
    for causal in (False, True):
        block = Block(weights, causal=causal, device=device or "cuda", kernels="skeleton")
        for T in (1, *DOCUMENT_MS):
            x = cupy.asarray(random_input(T, (T, weights.n_embd)))
            out = cupy.empty_like(x)
            ms, python_us = _time_calls(partial(block, x, out=out))
            document = None if causal else DOCUMENT_MS.get(T)
            mask = "causal" if causal else "full"
            rows.append(BlockTime(block.device, T, mask, ms, document, python_us))
    return rows


def _time_calls(call: Callable[[], Any]) -> tuple[float, float]:
    """GPU ms and host µs of a warm call: calls queued one behind the other, none waited for."""
    import cupy  # noqa: PLC0415

    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    gpu: list[float] = []
    host: list[float] = []
    for _ in range(REPLAYS + 1):  # the first one warms up: compiles, captures
        start.record()
        began = perf_counter()
        for _ in range(CALLS):
            call()
        host.append(1e6 * (perf_counter() - began) / CALLS)
        end.record()
        end.synchronize()
        gpu.append(cupy.cuda.get_elapsed_time(start, end) / CALLS)
    return median(gpu[1:]), median(host[1:])

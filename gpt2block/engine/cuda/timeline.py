"""Measure when each kernel of a forward pass ends, by events around CUDA graphs of its kernels.

A graph whose last kernel is n ends when kernel n has ended, as in the graph of the whole pass: with
all launches that overlap the previous launch, and without a node between kernels, which would
prevent the overlap. The time that kernel n adds is the difference to the graph that ends one kernel
earlier. Both graphs begin only a few kernels before n, because the time of a long graph varies by
more than a short kernel takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, pairwise
from math import ceil
from typing import Any

from gpt2block.cuda import cupy, overlap
from gpt2block.cuda.arrays import ArrayArg
from gpt2block.cuda.kernels import Geometry, launch_at
from gpt2block.cuda.timing import interleaved_ms
from gpt2block.engine.recorder import TensorSpec
from gpt2block.engine.recording import Recording, Recordings
from gpt2block.engine.timeline import BytesMoved, Call, KernelTiming, Timeline, moves, weights_dtype
from gpt2block.ops.operands import Operand
from gpt2block.ops.sample_token import FILE

EMPTY = 100  # number of empty kernels in the graph that measures the gap between kernels
SAMPLE = "sample"  # name of the step that samples after a forward pass
LEAD_US = 200.0  # µs that kernels before a measured graph take, to hide the graph's launch time
TOGETHER = 8  # number of kernels measured together, by graphs that begin with the same kernel
EARLIER = 8  # number of kernels before the measured ones in a graph: more than can overlap


def timed(recordings: Recordings, call: Call) -> list[Timeline]:
    """Call `call`; return a Timeline of each pass, measured just before `call` runs the pass."""
    with watched(recordings) as found:
        call()
    return found


@contextmanager
def watched(recordings: Recordings) -> Iterator[list[Timeline]]:
    """Measure each pass just before it runs in the with block; yield the list of Timelines."""
    timelines: list[Timeline] = []

    def watch(recording: Recording) -> None:
        timelines.append(measured(recording))
        recording.meet()  # no GPU starts the pass while another GPU frees its graphs

    recordings.watch = watch
    try:
        yield timelines
    finally:
        recordings.watch = None


def measured(recording: Recording) -> Timeline:
    """Measure the kernel times of a recording whose inputs are on the device; return a Timeline.

    Repeated runs of its steps have equal results. Arrays that later launches change are restored.

    On several GPUs, all threads measure the same launches at the same time, because gathers wait
    for each other. The time of an all-gather thus includes the wait for the slowest GPU. The
    threads meet between allocations and launches of all-gathers (see `Recordings.meet`).
    """
    kernels = list(kernels_of(recording))
    changed = [array for bound in recording.after for array in (bound.out, *bound.extra)]
    before = [array.copy() for array in changed]

    def restore() -> None:
        for array, value in zip(changed, before, strict=True):
            array[...] = value

    # A launch without tokens measures the overhead of a launch.
    nothing = launch_at(FILE, Geometry("mark_occurred", (1,), (32,)), (None, None, None, 0, 0, 0))
    nothing.run()
    restore()
    recording.load()
    launches = recording.launches
    for each in launches:  # loads the kernels, because a graph capture cannot load them
        each.run()
    recording.meet()
    restore()
    steps = [each for recorded in recording.steps.values() for each in recorded.launches]
    early = recording.overlapping and overlap.possible()
    whole = _graph(steps, early)
    (us,) = _us([whole], recording.meet)

    def lead(min_us: float = LEAD_US) -> None:
        restore()
        for _ in range(recording.agree(ceil(min_us / us))):
            whole()

    start, many = _us([_graph([nothing] * n, False) for n in (1, 1 + EMPTY)], lead)
    apart = ends_us(launches, False, lead)
    ends = ends_us(launches, True, lead) if early else apart
    restore()
    return assembled(kernels, ends, apart, start, max(0.0, many - start) / EMPTY)


def ends_us(launches: Sequence[Any], overlapping: bool, lead: Callable[..., None]) -> list[float]:
    """Return the µs from the start of the pass to the end of each of its launches, ascending.

    lead: function that launches work before the pass, for a number of µs, by default LEAD_US. A
    graph that begins later in the pass runs after the earlier kernels of the pass. If these kernels
    take less than LEAD_US, `lead` runs before them. The sum of all differences is scaled to the
    time of the pass.

    On several GPUs, a graph can end after a kernel that sends columns and before the all-gather
    that receives them. The first all-gather of the next graph can then take these columns for its
    own, and wait too short a time. The last graph is the whole pass, whose gathers receive all
    columns.
    """
    ends: list[float] = []
    for first in range(0, len(launches), TOGETHER):
        start, last_known = max(0, first - EARLIER), max(0, first - 1)
        last = min(first + TOGETHER, len(launches))
        parts = [_graph(launches[start : n + 1], overlapping) for n in range(last_known, last)]
        led: Callable[[], None] = lead
        if start:
            before = _graph(launches[:start], overlapping)
            led = partial(_run_both, partial(lead, LEAD_US - ends[start - 1]), before)
        times = list(accumulate(_us(parts, led), max))
        # found[0] and ends[-1] are the end of the same launch, `last_known`.
        ends += [ends[-1] + each - times[0] for each in times[1:]] if ends else times
    (pass_us,) = _us([_graph(launches, overlapping)], lead)
    return [end * pass_us / ends[-1] for end in ends]


def _run_both(lead: Callable[[], None], before: Callable[[], None]) -> None:
    lead()
    before()


def _us(replays: Sequence[Callable[[], None]], lead: Callable[[], None]) -> list[float]:
    """Return the median µs of each function. Functions are timed alternately, each after `lead`."""
    named = {str(n): replay for n, replay in enumerate(replays)}
    return [1e3 * ms for ms in interleaved_ms(named, lead=lead).values()]


def assembled(
    kernels: Sequence[KernelTiming],
    ends: Sequence[float],
    apart: Sequence[float],
    start: float,
    between: float,
) -> Timeline:
    """Return a Timeline: add measured times, in µs, to kernels that have no times yet.

    ends, apart: ends with and without overlap. start: µs of a graph of one empty kernel. between:
    µs that another empty kernel adds, which are subtracted from a kernel's time.
    """
    own = [apart[0] - start, *(end - last - between for last, end in pairwise(apart))]
    ran = (
        each._replace(end=end, own=max(0.0, alone), apart=waited)
        for each, end, alone, waited in zip(kernels, ends, own, apart, strict=True)
    )
    return Timeline(tuple(ran), ends[-1], between)


def _graph(launches: Sequence[object], overlapping: bool) -> Callable[[], None]:
    """Capture a graph of launches; return a function that launches it on the current stream.

    The upload allocates the graph's memory now, because the graph's first launch may follow a
    gather, after which no memory may be allocated (see `Recordings.meet`).
    """
    stream = cupy.cuda.get_current_stream()
    graph = overlap.capture(launches, cupy.cuda.Stream(non_blocking=True), overlapping)
    graph.upload(stream)
    stream.synchronize()
    return partial(graph.launch, stream)


def _in_memory(array: ArrayArg, operand: Operand | None) -> TensorSpec:
    """Return the TensorSpec of an array: shape, dtype and number of bytes.

    The number is half the array's bytes if `operand` keeps one 16-bit number per float.
    """
    stored = TensorSpec.of(array)
    half = operand is not None and operand.rounded and operand.width > 0
    return stored._replace(nbytes=stored.nbytes // 2) if half else stored


def kernels_of(recording: Recording) -> Iterator[KernelTiming]:
    """Yield a KernelTiming, still without times, for each kernel of a recording."""
    for name, (step, launches, *_) in recording.steps.items():
        inputs = [recording.known(each) if each else None for each in step.inputs]
        if operand := step.attrs.get("operand"):  # the 16-bit format in which x is stored
            inputs[0] = _in_memory(inputs[0], operand)
        # Names of weights and other tensors: `moves` counts "" as an activation.
        tensors = ["" if each in recording.steps else each for each in step.inputs]
        out = _in_memory(recording.known(name), step.attrs.get("to_operand"))
        dtypes = out.dtype, weights_dtype(step.op, inputs)
        for each in launches:
            moved = moves(step.op, tensors, inputs, out) if each is launches[-1] else BytesMoved()
            yield KernelTiming(name, step.op, each.name, each.grid, each.block, *dtypes, moved)
    for bound in recording.after:  # the sampler's launches, which read the pass's result
        moved = BytesMoved(activations=recording.out.nbytes + bound.out.nbytes)
        for each in bound.launches:
            dtype = str(bound.out.dtype.name)
            yield KernelTiming(
                SAMPLE, "sample_token", each.name, each.grid, each.block, dtype, "", moved
            )

"""When each kernel of a recording runs, measured with events around graphs of its first kernels.

A graph of the first n kernels ends when kernel n has ended, as it does in the whole graph: with
every launch that overlaps the previous one, and without a node between kernels, which would end the
overlap. What each kernel adds is the difference to the graph before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from math import ceil
from typing import Any

from gpt2block.cuda import cupy, overlap
from gpt2block.cuda.kernels import Launch, launch
from gpt2block.cuda.timing import REPLAYS, interleaved_ms
from gpt2block.ops.sample_token import FILE
from gpt2block.run.recording import Recording, Recordings, capture
from gpt2block.run.timeline import Call, Moved, Ran, Stored, Timeline, moved, weights_dtype

EMPTY = 100  # kernels that do nothing, for the time between two kernels
SAMPLE = "sample"  # the step of what launches after a pass
LEAD_US = 200  # of whole passes before each replay, in which the host launches it
LONG_US, FEW = 1000, 3  # replays of parts of a pass that takes longer than this


def timed(recordings: Recordings, call: Call) -> list[Timeline]:
    """The timelines of the recordings that a call runs, each measured before it runs."""
    found: list[Timeline] = []
    recordings.watch = lambda recording: found.append(measured(recording))
    try:
        call()
    finally:
        recordings.watch = None
    return found


def measured(recording: Recording) -> Timeline:
    """The timeline of a recording on the current stream, whose inputs are on the device.

    Its steps have the same results each time; what launches after them change is restored.
    """
    kernels = list(_kernels(recording))
    changed = [array for bound in recording.after for array in (bound.out, *bound.extra)]
    before = [array.copy() for array in changed]

    def restore() -> None:
        for array, value in zip(changed, before, strict=True):
            array[...] = value

    launches = recording.launches
    for each in launches:  # loads the kernels, which a capture cannot do
        each.run()
    restore()
    steps = [each for recorded in recording.steps.values() for each in recorded.launches]
    early = recording.overlapping and overlap.possible()
    whole = _graph(steps, early)

    us = 1e3 * interleaved_ms({"": whole})[""]
    count = REPLAYS if us < LONG_US else FEW

    def lead() -> None:
        restore()
        for _ in range(ceil(LEAD_US / us)):
            whole()

    firsts = [launches[: n + 1] for n in range(len(launches))]
    nothing = _nothing()
    nothing.run()
    start, many = ends_us([[nothing], [nothing] * (1 + EMPTY)], False, lead, REPLAYS)
    apart = ends_us(firsts, False, lead, count)
    ends = ends_us(firsts, True, lead, count) if early else apart
    restore()
    return assembled(kernels, ends, apart, start, max(0.0, many - start) / EMPTY)


def ends_us(
    parts: Sequence[Sequence[Any]], overlapping: bool, lead: Callable[[], None], count: int
) -> list[float]:
    """For launches of each part, in order, µs from the end of `lead` to their end; ascending.

    lead: launches what the GPU runs before; its end is also the state of the caches. count: replays
    of each part, of which the median is taken.
    """
    found = []
    for part in parts:
        replay = _graph(part, overlapping)
        found.append(1e3 * interleaved_ms({"": replay}, count, lead)[""])
    return list(accumulate(found, max))


def assembled(
    kernels: Sequence[Ran],
    ends: Sequence[float],
    apart: Sequence[float],
    start: float,
    between: float,
) -> Timeline:
    """A timeline of kernels that have no times yet.

    start: µs of a graph of one kernel that does nothing; between: what another one adds. So much
    of the time of a kernel that waits for the previous one is not its own.
    """
    own = [apart[0] - start, *(end - last - between for last, end in pairwise(apart))]
    ran = (
        each._replace(end=end, own=max(0.0, alone), apart=waited)
        for each, end, alone, waited in zip(kernels, ends, own, apart, strict=True)
    )
    return Timeline(tuple(ran), ends[-1], between)


def _graph(launches: Sequence[Any], overlapping: bool) -> Callable[[], None]:
    """What launches a graph of these on the current stream."""
    graph = capture(launches, cupy.cuda.Stream(non_blocking=True), overlapping)
    return partial(graph.launch, cupy.cuda.get_current_stream())


def _nothing() -> Launch:
    """A kernel whose threads return at once: `mark_seen` of no tokens."""
    return launch(FILE, "mark_seen", (1,), (32,), (None, None, None, 0, 0, 0))


def _kernels(recording: Recording) -> Iterator[Ran]:
    """The kernels of a recording, without times."""
    for name, (step, launches, *_) in recording.steps.items():
        inputs = [recording.known(each) if each else None for each in step.inputs]
        names = ["" if each in recording.steps else each for each in step.inputs]
        out = Stored.of(recording.known(name))
        dtypes = out.dtype, weights_dtype(step.op, inputs)
        for each in launches:
            nbytes = moved(step.op, names, inputs, out) if each is launches[-1] else Moved()
            yield Ran(name, step.op, each.name, each.grid, each.block, *dtypes, nbytes)
    for bound in recording.after:  # reads the result of the pass
        nbytes = Moved(activations=recording.out.nbytes + bound.out.nbytes)
        for each in bound.launches:
            dtype = str(bound.out.dtype.name)
            yield Ran(SAMPLE, "sample_token", each.name, each.grid, each.block, dtype, "", nbytes)

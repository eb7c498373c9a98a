"""Convert a profile to the Trace Event Format, which ui.perfetto.dev and chrome://tracing read.

Slices on one track may be nested but not partly overlap, so overlapping kernels get separate
tracks. Source: the Trace Event Format of Chromium's trace-viewer, with complete events (X),
counters (C) and metadata (M); times in µs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from gpt2block.apps.profiling.summary import layer_of
from gpt2block.cuda import doctor
from gpt2block.engine.timeline import KernelTiming, Timeline

if TYPE_CHECKING:
    from gpt2block.apps.profiling.runs import Profile

AS_IT_RUNS, APART = "as it runs", "one kernel at a time"
PASSES, KERNELS = 1, 2  # PASSES: track of passes, layers; KERNELS: first track of kernels
FLOOR = "floor"
Event = dict[str, Any]


class Slice(NamedTuple):
    """A kernel in a trace, from `start` to `end` in ns; `track`: index among tracks of kernels."""

    ran: KernelTiming
    added: float
    start: int
    end: int
    track: int


def trace(profile: Profile) -> dict[str, Any]:
    """Convert a profile to the JSON object of a trace.

    The trace has a process for each view; on several GPUs, for each view of each GPU. The first
    view has the passes as they run. If kernels overlap, a second view has passes in which each
    kernel waits for the previous kernel. The last view has a counter of bytes/s.
    """
    timelines = [each.timeline for each in profile.passes]
    overlaps = any(ran.apart != ran.end for each in timelines for ran in each.ran)
    devices = dict.fromkeys(each.device for each in timelines)
    views = (AS_IT_RUNS, APART) if overlaps else (AS_IT_RUNS,)
    events = [
        event
        for pid, (device, view) in enumerate(product(devices, views), 1)
        for event in _view(profile, pid, device, view, counter=view == views[-1])
    ]
    facts = {"gpt2block": doctor.version(), **profile.facts}
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": facts}


def _view(profile: Profile, pid: int, device: str, view: str, counter: bool) -> Iterator[Event]:
    """Yield the trace events of one process: all passes on a GPU, one after another."""
    yield _name_event("process_name", f"{device or profile.device}: {view}", pid)
    yield _name_event("thread_name", "passes and layers", pid, PASSES)
    offset, tracks = 0, [0]  # in ns: start of the pass; end of each kernel track's last slice
    events: list[Event] = []
    passed: Counter[str] = Counter()
    for kind, timeline in (each for each in profile.passes if each.timeline.device == device):
        passed[kind] += 1
        ends = [ran.end if view == AS_IT_RUNS else ran.apart for ran in timeline.ran]
        us = timeline.us if view == AS_IT_RUNS else timeline.apart
        slices = _slices(timeline, ends, offset, tracks)
        end = max(offset + _ns(us), *(each.end for each in slices))
        events += _pass(pid, f"{kind} {passed[kind]}", timeline, slices, offset, end)
        for each in slices:
            events += _kernel(pid, each, profile)
        if counter:
            events += _rates(pid, slices)
        offset = end
    for track in range(len(tracks)):
        name = "kernels" if track == 0 else f"kernels that overlap, {track}"
        yield _name_event("thread_name", name, pid, KERNELS + track)
    yield from sorted(events, key=lambda event: (event["ts"], -event.get("dur", 0)))


def _slices(
    timeline: Timeline, ends: Sequence[float], offset: int, tracks: list[int]
) -> list[Slice]:
    """Return a Slice (start, end, track) per kernel of a pass, on the first free track.

    ends: µs from the start of the pass to each kernel's end. offset: start of the pass in ns.
    tracks: end of the last slice of each track in ns; updated.
    """
    events = []
    for ran, added, end_us in zip(timeline.ran, timeline.added, ends, strict=True):
        end = offset + _ns(end_us)
        start = max(offset, end - _ns(ran.own))
        free = next((n for n, last in enumerate(tracks) if last <= start), len(tracks))
        if free == len(tracks):
            tracks.append(0)
        tracks[free] = end
        events.append(Slice(ran, added, start, end, free))
    return events


def _pass(
    pid: int, name: str, timeline: Timeline, slices: Sequence[Slice], start: int, end: int
) -> Iterator[Event]:
    """Yield a trace event for the pass and, nested in its time, an event for each layer."""
    times = {"us": timeline.us, "apart_us": timeline.apart, "own_us": timeline.own}
    args = {name: round(value, 3) for name, value in times.items()}
    yield _slice(name, "pass", pid, PASSES, start, end, args | {"kernels": len(slices)})
    layers: dict[int, list[Slice]] = {}
    for each in slices:
        layer, _ = layer_of(each.ran.step)
        if layer is not None:
            layers.setdefault(layer, []).append(each)
    for layer, members in layers.items():
        start = max(start, members[0].start)  # kernels of two layers may overlap, slices may not
        last = max(start, *(each.end for each in members))
        yield _slice(f"layer {layer}", "layer", pid, PASSES, start, last, {})
        start = last


def _kernel(pid: int, each: Slice, profile: Profile) -> Iterator[Event]:
    """Yield an event for a kernel, and a nested event for the time of a copy of as many bytes."""
    ran, track = each.ran, KERNELS + each.track
    layer, step = layer_of(ran.step)
    floor = profile.floor_us(ran.moved.total)
    args: dict[str, object] = {"layer": layer, "step": ran.step, "op": ran.op, "kernel": ran.kernel}
    if ran.grid:
        args |= {"grid": list(ran.grid), "block": list(ran.block)}
    args |= {"dtype": ran.dtype} | ({"weights dtype": ran.weights} if ran.weights else {})
    parts = {f"bytes of {n}": nbytes for n, nbytes in ran.moved._asdict().items() if nbytes}
    args |= {"bytes": ran.moved.total, **parts}
    args |= {"own_us": round(ran.own, 3), "added_us": round(each.added, 3)}
    if ran.own:
        args |= {"GB/s": round(1e-3 * ran.moved.total / ran.own, 3)}
        args |= {"of floor": round(floor / ran.own, 4)}
    yield _slice(f"{step}: {ran.kernel}", ran.op, pid, track, each.start, each.end, args)
    filled = min(each.end, each.start + _ns(floor))
    if filled > each.start:
        copied = {"floor_us": round(floor, 3)}
        yield _slice(FLOOR, FLOOR, pid, track, each.start, filled, copied)


def _rates(pid: int, slices: Sequence[Slice]) -> Iterator[Event]:
    """Yield the values of a counter of GB/s that kernels move; the value between kernels is 0."""
    for n, each in enumerate(slices):
        rate = 1e-3 * each.ran.moved.total / each.ran.own if each.ran.own else 0.0
        yield _counter(pid, each.start, rate)
        if n + 1 == len(slices) or slices[n + 1].start > each.end:
            yield _counter(pid, each.end, 0.0)


def _counter(pid: int, at: int, rate: float) -> Event:
    args = {"GB/s": round(rate, 3)}
    return {"ph": "C", "name": "bytes moved", "pid": pid, "tid": 0, "ts": at / 1e3, "args": args}


def _slice(
    name: str, category: str, pid: int, tid: int, start: int, end: int, args: dict[str, Any]
) -> Event:
    times = {"ts": start / 1e3, "dur": (end - start) / 1e3}
    return {"ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid, **times, "args": args}


def _name_event(what: str, name: str, pid: int, tid: int = 0) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _ns(us: float) -> int:
    return round(1e3 * us)

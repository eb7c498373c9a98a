"""Summarize a profile: each operation's share of a pass, and its speed relative to a copy."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpt2block.engine.timeline import BytesMoved, KernelTiming, Timeline

if TYPE_CHECKING:
    from gpt2block.apps.profiling.runs import Profile

RESOLUTION_US = 0.5  # resolution of CUDA events, and so of a kernel's time, in µs
_LAYER = re.compile(r"h\.(\d+)\.(.+)")
_ROWS = re.compile(r"\.\d+\b")  # ".512" in a step's name: the group of rows from row 512


@dataclass(frozen=True)
class TimedOperation:
    """Times of a step's kernels in all layers of a pass; means over all passes of one kind.

    count: number of kernels in a pass. own_us: sum of the kernels' times, each run alone. added_us:
    time by which the kernels lengthen the pass; share: added_us as a fraction of the pass. moved:
    bytes. gb_s: moved per own_us. of_floor: the time in which a copy moves as many bytes, as a
    fraction of own_us. gb_s and of_floor are None if own_us is 0.
    """

    kind: str
    step: str
    op: str
    kernel: str
    count: float
    own_us: float
    added_us: float
    share: float
    moved: BytesMoved
    gb_s: float | None
    of_floor: float | None


@dataclass(frozen=True)
class PassTimes:
    """Mean times in µs of all passes of one kind: "prompt", "token", "score" or "block".

    us: time of the pass as it runs. apart_us: time of the pass if each kernel waits for the
    previous kernel. own_us: sum of the kernels' own times. between_us: time between kernels.
    floor_us: time in which a copy moves the bytes of all kernels.
    """

    kind: str
    count: int
    kernels: float
    us: float
    apart_us: float
    own_us: float
    between_us: float
    moved: BytesMoved
    floor_us: float


def layer_of(step: str) -> tuple[int | None, str]:
    """Return a step's layer and its name in the layer: (3, "q") for "h.3.q"."""
    match = _LAYER.fullmatch(step)
    return (int(match[1]), match[2]) if match else (None, _ROWS.sub("", step))


def operations(profile: Profile, kind: str) -> list[TimedOperation]:
    """Return the timed operations of all passes of one kind, in the order of their first runs."""
    timelines = _timelines(profile, kind)
    groups: dict[tuple[str, str], list[tuple[KernelTiming, float]]] = {}
    for timeline in timelines:
        for ran, added in zip(timeline.ran, timeline.added, strict=True):
            groups.setdefault((layer_of(ran.step)[1], ran.kernel), []).append((ran, added))
    count, whole = len(timelines), sum(each.us for each in timelines)
    rows = []
    for (step, kernel), members in groups.items():
        own, added = sum(ran.own for ran, _ in members), sum(added for _, added in members)
        nbytes = total(ran.moved for ran, _ in members)
        rows.append(
            TimedOperation(
                kind,
                step,
                members[0][0].op,
                kernel,
                len(members) / count,
                own / count,
                added / count,
                added / whole,
                mean(nbytes, count),
                1e-3 * nbytes.total / own if own else None,
                profile.floor_us(nbytes.total) / own if own else None,
            )
        )
    return rows


def pass_times(profile: Profile, kind: str) -> PassTimes:
    """Return the mean times of all passes of one kind, such as "token"."""
    timelines = _timelines(profile, kind)
    count = len(timelines)
    nbytes = total(ran.moved for each in timelines for ran in each.ran)
    return PassTimes(
        kind,
        count,
        sum(len(each.ran) for each in timelines) / count,
        sum(each.us for each in timelines) / count,
        sum(each.apart for each in timelines) / count,
        sum(each.own for each in timelines) / count,
        sum(each.between for each in timelines) / count,
        mean(nbytes, count),
        profile.floor_us(nbytes.total) / count,
    )


def kinds(profile: Profile) -> list[str]:
    """Return the distinct labels of a profile's passes, in the order of their first passes."""
    return list(dict.fromkeys(each.label for each in profile.passes))


def _timelines(profile: Profile, kind: str) -> list[Timeline]:
    return [each.timeline for each in profile.passes if each.label == kind]


def total(parts: Iterable[BytesMoved]) -> BytesMoved:
    return BytesMoved(*(sum(column) for column in zip(*parts, strict=True)))


def mean(nbytes: BytesMoved, count: int) -> BytesMoved:
    return BytesMoved(*(round(each / count) for each in nbytes))

"""A profile as rows: what each operation takes of a pass, and how near it is to the floor."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from gpt2block.profiling.runs import Profile
from gpt2block.run.timeline import BytesMoved, KernelTiming, Timeline

RESOLUTION_US = 0.5  # of the time of a kernel on a GPU, that of an event
_LAYER = re.compile(r"h\.(\d+)\.(.+)")
_ROWS = re.compile(r"\.\d+\b")  # the first row, in names of steps that compute some rows at a time


@dataclass(frozen=True)
class TimedOperation:
    """The kernels of a step in all layers, as the mean of the passes of a kind.

    count: in a pass. own_us: the sum of their times alone; added_us: by how much they lengthen the
    pass, of which that is the share. moved: bytes. gb_s: their rate alone; of_floor: the time in
    which a copy moves as many bytes, as a fraction of own_us. Both are None where own_us is 0.
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
    """The mean times of the passes of a kind, in µs.

    us: as it runs; apart_us: one kernel after another; own_us: the kernels alone, without the time
    between them; floor_us: in which a copy moves all their bytes.
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
    """The layer of a step and its name in the layer: "h.3.q" is q of layer 3."""
    found = _LAYER.fullmatch(step)
    return (int(found[1]), found[2]) if found else (None, _ROWS.sub("", step))


def operations(profile: Profile, kind: str) -> list[TimedOperation]:
    """The operations of the passes of a kind, in the order in which they first run."""
    timelines = of_kind(profile, kind)
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
    """The mean times of the passes of a kind."""
    timelines = of_kind(profile, kind)
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
    """The kinds of passes, in order."""
    return list(dict.fromkeys(each.kind for each in profile.passes))


def of_kind(profile: Profile, kind: str) -> list[Timeline]:
    return [each.timeline for each in profile.passes if each.kind == kind]


def total(parts: Iterable[BytesMoved]) -> BytesMoved:
    return BytesMoved(*(sum(column) for column in zip(*parts, strict=True)))


def mean(nbytes: BytesMoved, count: int) -> BytesMoved:
    return BytesMoved(*(round(each / count) for each in nbytes))

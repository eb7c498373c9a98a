"""Time implementations on copies of the same inputs, with interleaved replays of CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, nan
from typing import TYPE_CHECKING, Any, NamedTuple

from gpt2block.cuda import cupy, overlap, timing
from gpt2block.cuda.arrays import ArrayArg, Bound, mapped
from gpt2block.errors import InputError, KernelError
from gpt2block.ops.workload import Host, uploaded

if TYPE_CHECKING:
    from gpt2block.engine.recording import Recording

REFUSALS = (InputError, KernelError, MemoryError)  # errors of a variant that cannot run
REPLAY_MS = 3.0  # ms of a graph's replay: long enough to make the graph's launch time negligible
CACHES = 4  # a round over all copies of the inputs moves this many times the size of the L2 cache
MAX_SETS = 256  # maximum number of copies of the inputs
MAX_CALLS = 2000  # maximum number of calls captured in one graph

Replay = Callable[[], None]
Check = Callable[[Replay, tuple[Any, ...]], tuple[float, float]]


class Captured(NamedTuple):
    """A captured CUDA graph: `replay` launches the graph; `outs` are some outputs of the graph."""

    replay: Replay
    outs: tuple[Any, ...]
    kept: object = None  # objects that own the memory to which the graph has pointers


Capture = Callable[[int], Captured]


@dataclass(frozen=True)
class Contender:
    """One implementation of a benchmark's computation.

    `capture(rounds)` returns a graph that computes all copies of the inputs `rounds` times.
    `arithmetic` is a dtype or "tf32", and determines the ceiling and the tolerance.
    """

    name: str
    capture: Capture
    arithmetic: str


class Timed(NamedTuple):
    """An implementation, the µs of one call, and (absolute, relative) errors of its outputs."""

    contender: Contender
    us: float
    errors: tuple[float, float]


def refuse(why: str, rounds: int) -> Captured:
    """Raise InputError(why); used as `capture` function of an implementation that cannot run."""
    raise InputError(why)


def first_and_last(outs: Iterable[object]) -> tuple[object, ...]:
    """Return the first and, if there are several, the last output: only these are checked."""
    first, *others = outs
    return (first, *others[-1:])


def race(
    contenders: Iterable[Contender],
    copies: int,
    check: Check | None = None,
    rounds: int | None = None,
    times: Callable[[Mapping[str, Replay]], Mapping[str, float]] | None = None,
) -> tuple[list[Timed], list[tuple[Contender, str]]]:
    """Capture, check and time implementations; return timings, and errors of those that failed.

    copies: number of copies of the inputs; a call computes one copy. check: returns the errors of
    the outputs that a replay writes; an implementation that raises one of REFUSALS is left out.
    Without a check, the errors are NaN, and every exception is raised. rounds: rounds over all
    copies in one graph; by default as many as take REPLAY_MS. times: returns the ms of each replay;
    by default `timing.interleaved_ms`.
    """
    captured: list[tuple[Contender, Captured, int, tuple[float, float]]] = []
    refused: list[tuple[Contender, str]] = []
    for each in contenders:
        try:
            run, repeated = _captured(each, copies, rounds)
            errors = check(run.replay, run.outs) if check else (nan, nan)
        except REFUSALS as error:
            if check is None:
                raise
            refused.append((each, first_line(error)))
            continue
        captured.append((each, run, repeated * copies, errors))
    ms = (times or timing.interleaved_ms)({each.name: run.replay for each, run, *_ in captured})
    return [
        Timed(each, 1e3 * ms[each.name] / calls, errors) for each, _, calls, errors in captured
    ], refused


def _captured(contender: Contender, copies: int, rounds: int | None) -> tuple[Captured, int]:
    """Return a captured graph and its number of rounds; if `rounds` is None, one is timed first."""
    if rounds is not None:
        return contender.capture(rounds), rounds
    graph = contender.capture(1)
    rounds = rounds_for(timing.interleaved_ms({"": graph.replay}, count=1)[""], copies)
    return (contender.capture(rounds) if rounds > 1 else graph), rounds


def rounds_for(once_ms: float, copies: int) -> int:
    """Return a graph's number of rounds (one call on every copy of the inputs) of `once_ms` ms."""
    return max(1, min(ceil(REPLAY_MS / max(once_ms, 1e-3)), MAX_CALLS // copies))


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or the name of its type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def bind_copies(
    bind: Callable[..., Bound], inputs: Sequence[tuple[ArrayArg, ...]], outs: list[ArrayArg]
) -> list[Bound]:
    """Return `bind(arrays, out)` for each copy of the inputs and the entry of `outs` for this copy.

    outs: initially None for each copy, and replaced by the outputs, so that the variants of an
    operation share one output for each copy.
    """
    bound = [bind(arrays, out) for arrays, out in zip(inputs, outs, strict=True)]
    outs[:] = [each.out for each in bound]
    return bound


def capture_bound(
    bound: Sequence[Bound | Recording],
    rounds: int,
    overlapping: bool = False,
    outs: Sequence[ArrayArg] = (),
) -> Captured:
    """Capture all launches in one graph. Only the first and last of `outs` will be checked.

    outs: outputs of the graph; by default the outputs of `bound`. overlapping: every kernel waits
    for the previous kernel itself, so that launches may overlap.
    """
    launches = [launch for each in bound for launch in each.launches]
    if overlapping:
        launches = [overlap.overlapped(launch) for launch in launches]
    ends = first_and_last(outs or [each.out for each in bound])
    return Captured(timing.captured(launches * rounds), ends, bound)


def input_copies(host: Host, traffic: int) -> list[dict[str, Any]]:
    """Return copies of the inputs in device memory that together exceed the L2 cache.

    A round over the copies moves CACHES times the size of the L2 cache; there are at most MAX_SETS
    copies. traffic: bytes that a call with one copy moves.
    """
    count = copies_for(traffic, cupy.cuda.Device().attributes["L2CacheSize"])
    first = {name: uploaded(value) for name, value in host.items()}
    copies = [
        {name: mapped(lambda array: array.copy(), value) for name, value in first.items()}
        for _ in range(count - 1)
    ]
    return [first, *copies]


def copies_for(traffic: int, cache: int) -> int:
    return min(MAX_SETS, max(1, ceil(CACHES * cache / traffic)))

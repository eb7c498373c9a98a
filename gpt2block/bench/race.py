"""Time contenders on the same buffers: each as a CUDA graph, the replays interleaved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import ceil, nan
from typing import Any, NamedTuple

from gpt2block.bench.contenders import REFUSALS, Contender, Run
from gpt2block.cuda import timing

REPLAY_MS = 3.0  # of one contender; the launch of the graph itself is then negligible
MOST_CALLS = 2000  # captured in one graph

Replay = Callable[[], None]
Check = Callable[[Replay, tuple[Any, ...]], tuple[float, float]]


class Timed(NamedTuple):
    """A contender, the µs of one call, and its errors as `measure.errors` returns them."""

    contender: Contender
    us: float
    errors: tuple[float, float]


def race(
    contenders: Iterable[Contender],
    copies: int,
    check: Check | None = None,
    rounds: int | None = None,
    strict: bool = False,
    times: Callable[[Mapping[str, Replay]], Mapping[str, float]] | None = None,
) -> tuple[list[Timed], list[tuple[Contender, str]]]:
    """Capture, check and time every contender; also returns those that cannot run, with the reason.

    copies: of the inputs; a call is one pass over one of them. check: gives the errors of the
    outputs that a replay writes; None skips it, and the errors are NaN. rounds: over all copies in
    one graph; by default as many as take REPLAY_MS. A contender of gpt2block cannot run if it
    raises one of REFUSALS, a peer if it raises anything; with `strict`, every exception is raised
    instead. times: gives the ms of each replay, by default `timing.interleaved_ms`.
    """
    graphs: dict[str, Run] = {}
    calls: dict[str, int] = {}
    checked: list[tuple[Contender, tuple[float, float]]] = []
    refused: list[tuple[Contender, str]] = []
    for each in contenders:
        try:
            graph, repeated = _captured(each, copies, rounds)
            errors = check(graph.replay, graph.outs) if check else (nan, nan)
        except Exception as error:
            if strict or not (each.peer or isinstance(error, REFUSALS)):
                raise
            refused.append((each, first_line(error)))
            continue
        graphs[each.name] = graph
        calls[each.name] = repeated * copies
        checked.append((each, errors))
    replays = {name: graph.replay for name, graph in graphs.items()}
    ms = (times or timing.interleaved_ms)(replays)
    timed = [
        Timed(each, 1e3 * ms[each.name] / calls[each.name], errors) for each, errors in checked
    ]
    return timed, refused


def _captured(contender: Contender, copies: int, rounds: int | None) -> tuple[Run, int]:
    """A graph and its rounds; without `rounds`, one round is timed first."""
    if rounds is not None:
        return contender.capture(rounds), rounds
    graph = contender.capture(1)
    rounds = rounds_for(timing.interleaved_ms({"": graph.replay}, count=1)[""], copies)
    return (contender.capture(rounds) if rounds > 1 else graph), rounds


def rounds_for(once_ms: float, copies: int) -> int:
    """Rounds over all copies in one graph, if a round takes `once_ms`."""
    return max(1, min(ceil(REPLAY_MS / max(once_ms, 1e-3)), MOST_CALLS // copies))


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, or the name of its type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]

"""Time contenders on the same buffers: each as a CUDA graph, the replays interleaved."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil, inf, isfinite, nan
from typing import NamedTuple

from gpt2block.bench import measure
from gpt2block.bench.contenders import REFUSALS, Contender, Run
from gpt2block.bench.measure import Truth
from gpt2block.cuda import timing

REPLAY_MS = 3.0  # of one contender; the launch of the graph itself is then negligible
MOST_CALLS = 2000  # captured in one graph


class Timed(NamedTuple):
    """A contender, the µs of one call, and its errors as `measure.errors` returns them."""

    contender: Contender
    us: float
    errors: tuple[float, float]


def race(
    contenders: Iterable[Contender],
    copies: int,
    truth: Truth | None = None,
    rounds: int | None = None,
    strict: bool = False,
) -> tuple[list[Timed], list[tuple[Contender, str]]]:
    """Capture, check and time every contender; also returns those that cannot run, with the reason.

    copies: of the inputs; a call is one pass over one of them. truth: what the outputs are compared
    with; None skips the check, and the errors are NaN. rounds: over all copies in one graph; by
    default as many as take REPLAY_MS. A contender of gpt2block cannot run if it raises one of
    REFUSALS, a peer if it raises anything; with `strict`, every exception is raised instead.
    """
    graphs: dict[str, Run] = {}
    calls: dict[str, int] = {}
    checked: list[tuple[Contender, tuple[float, float]]] = []
    refused: list[tuple[Contender, str]] = []
    for each in contenders:
        try:
            graph, repeated = _captured(each, copies, rounds)
            errors = (nan, nan) if truth is None else _check(graph, truth)
        except Exception as error:
            if strict or not (each.peer or isinstance(error, REFUSALS)):
                raise
            refused.append((each, first_line(error)))
            continue
        graphs[each.name] = graph
        calls[each.name] = repeated * copies
        checked.append((each, errors))
    ms = timing.interleaved_ms({name: graph.replay for name, graph in graphs.items()})
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


def _check(graph: Run, truth: Truth) -> tuple[float, float]:
    """Errors of the outputs that a replay writes, filled with NaN before it."""
    for out in graph.outs:
        measure.poison(out)
    graph.replay()
    found = [measure.errors(out, truth) for out in graph.outs]
    return max(found, key=lambda errors: errors[1] if isfinite(errors[1]) else inf)


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, or the name of its type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]

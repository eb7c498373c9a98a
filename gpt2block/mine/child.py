"""Work in a child process that is ended if it hangs, and may crash."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, NamedTuple


class Stage(NamedTuple):
    """What the child does next, and how many seconds it may take."""

    name: str
    limit_s: float


class Ended(NamedTuple):
    """The child is gone. `exitcode` is None if it was ended after its time limit."""

    stage: Stage
    exitcode: int | None


Send = Callable[[Any], None]


def supervised(target: Callable[..., None], args: tuple[Any, ...], first: Stage) -> Iterator[Any]:
    """Run target(send, *args) in a process; yields what it sends, except for stages.

    It returns when the target does. A child that exceeds the limit of its stage is killed; for that
    one, and for one that ends by itself before the target returns, the last item is an `Ended`.
    target: a function of a module, as it is imported by the child. first: the stage it begins with.
    """
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_main, args=(sender, target, args), daemon=True)
    child.start()
    sender.close()
    stage = first
    try:
        while receiver.poll(stage.limit_s):
            message = receiver.recv()
            if isinstance(message, _Done):
                return
            if isinstance(message, Stage):
                stage = message
            else:
                yield message
        yield Ended(stage, None)
    except EOFError:
        child.join()
        yield Ended(stage, child.exitcode)
    finally:
        if child.is_alive():
            child.kill()
        child.join()
        receiver.close()


class _Done(NamedTuple):
    """The target has returned."""


def _main(sender: Connection, target: Callable[..., None], args: tuple[Any, ...]) -> None:
    target(sender.send, *args)
    sender.send(_Done())
    sender.close()

"""Run a function in a child process, which may crash and is killed if it hangs."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, NamedTuple


class Stage(NamedTuple):
    """A stage of a child process's work: its name for messages, and its time limit in seconds."""

    name: str
    limit_s: float


class ProcessExited(NamedTuple):
    """Message that the child exited in this stage. exitcode: None if it was killed at its limit."""

    stage: Stage
    exitcode: int | None


Send = Callable[[object], None]


def supervised(
    target: Callable[..., None], args: tuple[object, ...], first: Stage, daemon: bool = True
) -> Iterator[Any]:
    """Run target(send, *args) in a child process; yield the objects, except Stages, that it sends.

    A child that exceeds the time limit of its stage is killed. If the child is killed or exits
    before the target returns, the last item is a `ProcessExited`. target: a function of a module
    that the child can import; the child gets the name of the target. first: the stage in which the
    child begins. daemon: whether the child is ended with this process; it can then have no children
    of its own.
    """
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(
        target=_main, name=target.__name__, args=(sender, target, args), daemon=daemon
    )
    child.start()
    sender.close()
    stage = first
    try:
        while receiver.poll(stage.limit_s):
            message = receiver.recv()
            if message is None:
                return
            if isinstance(message, Stage):
                stage = message
            else:
                yield message
        yield ProcessExited(stage, None)
    except EOFError:
        child.join()
        yield ProcessExited(stage, child.exitcode)
    finally:
        if child.is_alive():
            child.kill()
        child.join()
        receiver.close()


def _main(sender: Connection, target: Callable[..., None], args: tuple[object, ...]) -> None:
    target(sender.send, *args)
    sender.send(None)  # the target has returned
    sender.close()

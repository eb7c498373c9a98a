"""Functions that child processes of tests run: a module that is imported quickly."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpt2block.judge.child import Send, Stage

if TYPE_CHECKING:
    from gpt2block.judge.folder import KernelFile


def finishes(send: Send, count: int) -> None:
    for i in range(count):
        send(i)


def hangs(send: Send) -> None:
    send("begun")
    send(Stage("the second stage", 0.5))
    time.sleep(600)


def dies(send: Send) -> None:
    send("begun")
    os._exit(7)


def judges(send: Send, chunk: Sequence[KernelFile], *_: object) -> None:
    """Judge every kernel right, except that `dies.cu` ends the process and `hangs.cu` hangs."""
    from gpt2block.judge.folder import Judged  # noqa: PLC0415  (slow to import)

    for entry in chunk:
        if entry.file == "dies.cu":
            os._exit(7)
        if entry.file == "hangs.cu":
            time.sleep(600)
        send(Judged(entry, "right", float(os.getpid())))

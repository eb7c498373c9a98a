"""What children of the test of `supervised` run: a module that is imported quickly."""

from __future__ import annotations

import os
import time

from gpt2block.mine.child import Send, Stage


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

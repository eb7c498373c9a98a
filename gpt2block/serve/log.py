"""The log of the server, on standard error: printable lines, also of what clients send."""

from __future__ import annotations

import logging
import traceback

from gpt2block.errors import printable

log = logging.getLogger("gpt2block.serve")


def set_up_log(level: str) -> None:
    """Log from this level on; of asyncio, which warns of clients that have gone, errors."""
    log.setLevel(level.upper())
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")


def traceback_of(error: BaseException) -> str:
    """The traceback of an exception, whose lines have no control characters."""
    lines = "".join(traceback.format_exception(error)).splitlines()
    return "\n".join(map(printable, lines))

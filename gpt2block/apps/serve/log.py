"""Log of the server on standard error. Control characters in clients' text are escaped."""

from __future__ import annotations

import logging
import traceback

from gpt2block.errors import printable

log = logging.getLogger("gpt2block.apps.serve")


def set_up_log(level: str) -> None:
    """Log messages of `level` and above; from asyncio only errors, as it warns of disconnects."""
    log.setLevel(level.upper())
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")


def traceback_of(error: BaseException) -> str:
    """Return the traceback of an exception, without control characters in its lines."""
    lines = "".join(traceback.format_exception(error)).splitlines()
    return "\n".join(map(printable, lines))

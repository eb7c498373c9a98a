"""Setup that the workers of a local cluster preload."""

from __future__ import annotations

import logging
import signal
from typing import Any


def dask_setup(worker: Any) -> None:
    """Ignore Ctrl-C, which a terminal sends to all processes: the client ends its workers.

    The client may do so during a shard or a heartbeat; the warnings about that are silenced.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.getLogger("distributed.worker.state_machine").setLevel(logging.ERROR)
    logging.getLogger("distributed.worker").addFilter(_not_about_scheduler)


def _not_about_scheduler(record: logging.LogRecord) -> bool:
    """Drop messages about a lost scheduler: it runs in the client, which reports how it ended."""
    return "Failed to communicate with scheduler" not in record.getMessage()

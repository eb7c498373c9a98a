"""Preloaded by the workers of a local cluster."""

from __future__ import annotations

import logging
import signal
from typing import Any


def dask_setup(worker: Any) -> None:
    """Leave Ctrl-C, which reaches every process of a terminal, to the client.

    It ends its workers, in the middle of a shard or of a heartbeat too, of which they would warn.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.getLogger("distributed.worker.state_machine").setLevel(logging.ERROR)
    logging.getLogger("distributed.worker").addFilter(_is_no_lost_scheduler)


def _is_no_lost_scheduler(record: logging.LogRecord) -> bool:
    """The scheduler runs in the client, which says itself how it ended."""
    return "Failed to communicate with scheduler" not in record.getMessage()

"""Set up a worker of a local cluster; Dask preloads this module in each worker."""

from __future__ import annotations

import logging
import signal


def dask_setup(worker: object) -> None:
    """Ignore Ctrl-C, which a terminal sends to all processes: the client ends its workers.

    Warnings are silenced, as the client may end a worker during a shard or a heartbeat.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.getLogger("distributed.worker.state_machine").setLevel(logging.ERROR)
    logging.getLogger("distributed.worker").addFilter(_not_about_scheduler)


def _not_about_scheduler(record: logging.LogRecord) -> bool:
    """Return False for logs of a lost scheduler: the client, which has ended it, reports why."""
    return "Failed to communicate with scheduler" not in record.getMessage()

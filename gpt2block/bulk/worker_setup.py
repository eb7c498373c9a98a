"""Preloaded by the workers of a local cluster."""

from __future__ import annotations

import signal
from typing import Any


def dask_setup(worker: Any) -> None:
    """Ctrl-C reaches every process of a terminal: it is the client's to end its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

"""Hash gpt2block's sources, and state versions, to compare those of jobs and workers."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from pathlib import Path

import kernels_cu
from gpt2block.engine.receipts import hash_of_sources


def of_program() -> str:
    """Return the SHA-256 of gpt2block's sources, which also distinguishes unreleased versions."""
    folders = [Path(__file__).parent.parent, *map(Path, kernels_cu.__path__)]
    return hashlib.sha256("".join(map(hash_of_sources, folders)).encode()).hexdigest()


def versions() -> dict[str, str]:
    """Return {name: version} of software that must be equal on client, scheduler and workers."""
    by_name = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in ("numpy", "dask", "distributed"):
        by_name[name] = importlib.metadata.version(name)
    return {**by_name, "gpt2block": of_program()[:12]}

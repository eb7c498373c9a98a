"""A pytest plugin that collects the messages of the package's errors during a test run.

    GPT2BLOCK_ERROR_TEXTS=before.txt pytest -p tools.error_texts -n 2 tests/test_wrong_arguments.py

writes each class and message once, sorted, to compare messages before and after a change. Errors in
workers of pytest-xdist are collected, errors in processes that tests start are not.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from gpt2block.errors import KernelError, PrintableError

FILE = Path(os.environ.get("GPT2BLOCK_ERROR_TEXTS", "error_texts.txt")).absolute()
_VARYING = (  # patterns of text that differs between runs → replacement
    (re.compile(re.escape(str(Path(__file__).parents[1]))), "ROOT"),
    (re.compile(r"/\S*/pytest-\d+/(popen-gw\d+/)?"), "TEMPORARY/"),
    (re.compile(r"/tmp/\w*?tmp\w+"), "TEMPORARY"),
    (re.compile(r"\b0x[0-9a-f]{6,}"), "0x#"),
)
_found: set[str] = set()


def _record(kind: type[Exception]) -> None:
    """Make the constructor of an error class record each message."""
    construct = kind.__init__

    def noting(self: Exception, *args: Any) -> None:
        construct(self, *args)
        text = f"{type(self).__name__}: {self}".replace("\n", "\\n")
        for pattern, stands_for in _VARYING:
            text = pattern.sub(stands_for, text)
        _found.add(text)

    setattr(kind, "__init__", noting)  # noqa: B010  (mypy refuses to assign to it)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        FILE.unlink(missing_ok=True)
    for kind in (PrintableError, KernelError):
        _record(kind)


def pytest_sessionfinish() -> None:
    """Append the messages of this process to the file, before pytest-xdist ends a worker."""
    with FILE.open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.write("".join(f"{line}\n" for line in sorted(_found)))


def pytest_unconfigure(config: pytest.Config) -> None:
    """Sort the messages of all processes, in the process that ends last."""
    if not hasattr(config, "workerinput"):
        lines = sorted(set(FILE.read_text("utf-8").splitlines(keepends=True)))
        FILE.write_text("".join(lines), encoding="utf-8")

"""Random calls of gpt2block, area by area, each compared with an independent result.

A case is a function of a random generator and an empty folder. It returns "right" when gpt2block's
result agrees with an independent computation, and "refused" when gpt2block raised one of its own
errors where that is allowed. Everything else is a failure: `Difference` for a wrong result without
an error, any other exception, and a case that exceeds the time limit.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import numpy as np

from gpt2block.errors import LONGEST, CheckpointError, DeviceError, InputError

Outcome = Literal["right", "refused"]
Case = Callable[[np.random.Generator, Path], Outcome]
T = TypeVar("T")

OURS = (InputError, CheckpointError, DeviceError)
NUMPY_AREAS = ("checkpoints", "configs", "gguf_files", "tokenizers", "api", "bulk", "command_line")


class Area(NamedTuple):
    """A part of gpt2block and the function that tests it."""

    name: str
    share: float  # of a run's calls, relative to the other areas
    case: Case
    memory: int | None = 3 * 2**30  # bytes of address space a process may add; None: no limit


class Difference(AssertionError):  # noqa: N818  (a finding, not an error of the program)
    """gpt2block accepted the input and returned something wrong, or refused a valid input."""


def area(name: str) -> Area:
    """Import and return the area of that name. Only the areas of a run are imported."""
    found: Area = import_module(f"fuzzing.{name}").AREA
    return found


def generator(seed: int, name: str, number: int) -> np.random.Generator:
    """Return a case's random generator, which depends only on these three arguments."""
    return np.random.default_rng([seed, zlib.crc32(name.encode()), number])


def refused_or(call: Callable[[], T], *errors: type[Exception]) -> T | Literal["refused"]:
    """Return the result of `call`, or "refused" when it raises one of gpt2block's errors.

    errors: the allowed types; by default InputError, CheckpointError and DeviceError, whose message
    must be one printable line of at most 500 characters.
    """
    allowed = errors or OURS
    try:
        return call()
    except allowed as error:
        if isinstance(error, OURS):
            check_message(str(error))
        return "refused"


def accepted(call: Callable[[], T]) -> T:
    """Return the result of `call`. Raises Difference when gpt2block refuses this valid input."""
    try:
        return call()
    except OURS as error:
        raise Difference(f"refused a valid input: {error}") from error


def check_message(message: str) -> None:
    """Raise Difference unless an error's message is one printable line."""
    if not message or len(message) > LONGEST or not message.isprintable():
        raise Difference(f"message of {len(message)} characters: {message[:60]!r}")


def check_equal(name: str, got: object, expected: object) -> None:
    """Raise Difference unless the two are equal."""
    if got != expected:
        raise Difference(f"{name}: expected {expected!r:.120}, got {got!r:.120}")

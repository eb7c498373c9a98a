"""Random calls of gpt2block, area by area, each compared with an independent result.

A case is a function of a random generator and an empty folder. It returns when gpt2block's result
agrees with an independent computation, and raises `Refused` when gpt2block raised one of its own
errors where that is allowed. Everything else is a failure: `Difference` for a wrong result without
an error, any other exception, and a case that exceeds the time limit.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from gpt2block.errors import LONGEST, CheckpointError, DeviceError, InputError

T = TypeVar("T")
OURS = (InputError, CheckpointError, DeviceError)
AREAS = (
    "checkpoints", "configs", "gguf_files", "tokenizers", "bulk", "command_line", "conversations",
    "chat_names",
)  # fmt: skip


class Rng(np.random.Generator):
    """The random generator of a case."""

    def whole(self, low: int, high: int | None = None) -> int:
        """Return an integer from `low` to `high` - 1, or from 0 to `low` - 1 without `high`."""
        return int(self.integers(low, high))

    def chance(self, share: float) -> bool:
        return bool(self.random() < share)

    def pick(self, *choices: T) -> T:
        """Return one of the choices."""
        return choices[self.whole(len(choices))]


Case = Callable[[Rng, Path], None]


class Area(NamedTuple):
    """A part of gpt2block and the function that tests it."""

    name: str
    share: float  # of a run's calls, relative to the other areas
    case: Case
    memory: int = 3 * 2**30  # bytes of address space a process may add


class Difference(AssertionError):  # noqa: N818  (a finding, not an error of the program)
    """gpt2block accepted the input and returned something wrong, or refused a valid input."""


class Refused(Exception):  # noqa: N818  (an outcome of a case)
    """gpt2block refused an input that it may refuse, which ends the case."""


def area(name: str) -> Area:
    """Import and return the area of that name. Only the areas of a run are imported."""
    found: Area = import_module(f"fuzzing.{name}").AREA
    return found


def generator(seed: int, name: str, number: int) -> Rng:
    """Return a case's random generator, which depends only on these three arguments."""
    return Rng(np.random.PCG64([seed, zlib.crc32(name.encode()), number]))


def attempt(valid: bool, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the function's result.

    Raises Refused when gpt2block refuses the arguments by one of its errors, or Difference when
    they are valid, or when the error's message is not one printable line of at most 500 characters.
    """
    try:
        return function(*args, **kwargs)
    except OURS as error:
        if valid:
            raise Difference(f"refused a valid input: {error}") from error
        check_message(str(error))
        raise Refused from error


def accepted(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the function's result; the arguments are valid."""
    return attempt(True, function, *args, **kwargs)


def refuses(function: Any, *args: Any, **kwargs: Any) -> bool:
    """Return whether gpt2block refuses the arguments, in a case that goes on."""
    try:
        attempt(False, function, *args, **kwargs)
    except Refused:
        return True
    return False


def check(right: Any, problem: str) -> None:
    """Raise Difference with the message `problem` unless `right` is true."""
    if not right:
        raise Difference(problem[:300])


def check_message(message: str) -> None:
    """Raise Difference unless an error's message is one printable line."""
    printable = message and len(message) <= LONGEST and message.isprintable()
    check(printable, f"message of {len(message)} characters: {message[:60]!r}")


def check_equal(name: str, got: object, expected: object) -> None:
    """Raise Difference unless the two are equal."""
    check(got == expected, f"{name}: expected {expected!r:.120}, got {got!r:.120}")

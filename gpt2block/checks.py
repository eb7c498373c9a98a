"""Checks of arguments: each raises InputError by the argument's name."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from numbers import Integral
from typing import Any, ParamSpec, TypeGuard, TypeVar

import numpy as np
from numpy.typing import NDArray

from gpt2block.errors import InputError, UnknownOption, shown

P = ParamSpec("P")
R = TypeVar("R")


def real(value: object) -> float | None:
    """A Python or NumPy number as a float; None where it is not one, not finite or a bool."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def check_number(name: str, value: object, least: float, most: float, expected: str) -> float:
    """A number from `least` to `most`."""
    number = real(value)
    if number is None or not least <= number <= most:
        raise InputError(f"{name}: expected {expected}, got {shown(value)}")
    return number


def check_integer(name: str, value: Any, least: int, most: float, expected: str) -> int:
    """A Python or NumPy integer from `least` to `most`; a bool is not one."""
    number = None if isinstance(value, bool) or not isinstance(value, Integral) else int(value)
    if number is None or not least <= number <= most:
        raise InputError(f"{name}: expected {expected}, got {shown(value)}")
    return number


def check_flag(name: str, value: object) -> bool:
    """True or False: anything else, such as the string "no", could mean either."""
    if not isinstance(value, (bool, np.bool_)):
        raise InputError(f"{name}: expected True or False, got {shown(value)}")
    return bool(value)


def check_callable(name: str, value: object) -> None:
    if not callable(value):
        raise InputError(f"{name}: expected a function, got {shown(value)}")


def several(given: Any) -> list[Any]:
    """The elements of what can be iterated over, else a list of the one object."""
    try:
        return list(given)
    except TypeError:
        return [given]


def is_plain(array: object) -> TypeGuard[NDArray[Any]]:
    """Whether it is a NumPy array without a mask, which most functions would ignore."""
    return isinstance(array, np.ndarray) and not isinstance(array, np.ma.MaskedArray)


def plain_array(name: str, given: Any) -> NDArray[Any]:
    """`np.asarray` without what it would lose silently: a mask, and bools between numbers."""
    if isinstance(given, np.ma.MaskedArray):
        raise InputError(f"{name}: expected an array without a mask, got a NumPy masked array")
    if isinstance(given, (list, tuple)) and any(isinstance(n, (bool, np.bool_)) for n in given):
        raise InputError(f"{name}: expected numbers, got a bool")
    return as_numpy(name, given)


def as_numpy(name: str, given: Any) -> NDArray[Any]:
    """`np.asarray`; InputError where an object's own conversion fails, as of a torch tensor does.

    Raises TypeError, ValueError or OverflowError for what is no array.
    """
    try:
        return np.asarray(given)
    except RuntimeError as error:
        raise InputError(f"{name}: cannot be read as an array: {error}") from error


def named_options(**elsewhere: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator: an unknown keyword raises UnknownOption, which names the nearest known one.

    elsewhere: messages for keywords that the function does not take for a reason of its own; {} is
    the value. Where the function takes `sampling`, a Sampling, the keywords of a Sampling's fields
    cannot be given as well. `help` shows the signature of the function itself.
    """

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        known = list(inspect.signature(function).parameters)

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for name, value in kwargs.items():
                if name not in known:
                    raise _unknown(function, name, known, elsewhere, value)
            if kwargs.get("sampling") is not None:
                both = [name for name in SAMPLING_OPTIONS if name in kwargs]
                if both:
                    raise InputError(f"sampling: holds {both[0]} already: give one of the two")
            return function(*args, **kwargs)

        return checked

    return decorated


SAMPLING_OPTIONS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")


def _unknown(
    function: Callable[..., Any], name: str, known: list[str], elsewhere: dict[str, str], value: Any
) -> UnknownOption:
    where = function.__qualname__.removesuffix(".__init__")
    if name in elsewhere:
        return UnknownOption(f"{where}: {elsewhere[name].format(shown(value))}")
    from difflib import get_close_matches  # noqa: PLC0415

    nearest = get_close_matches(name, known, 1)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"see help({where})"
    return UnknownOption(f"{where}: unknown keyword {name!r}: {hint}")

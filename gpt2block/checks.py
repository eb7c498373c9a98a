"""Checks of arguments, which raise InputError with the name of the argument.

This module also defines the float dtypes, imports host arrays of other libraries, and has options
as fields of dataclasses: default, range and meaning of each are written once.

    @documented
    @dataclass(frozen=True)
    class Sampling:
        '''The sampling options of one sequence.

        {options}
        '''

        top_k: int = option(0, "Keep the k most likely tokens; 0: off.", Range(0, 99, "0 to 99"))

Docstrings contain the options' descriptions in the place of {options}; the command line's help and
defaults and the server's fields are generated from the same fields.
"""

from __future__ import annotations

import functools
import inspect
import math
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, field, fields
from difflib import get_close_matches
from numbers import Integral
from typing import Any, NamedTuple, ParamSpec, TypeGuard, TypeVar

import ml_dtypes
import numpy as np

from gpt2block.errors import InputError, UnknownOption, shown

P = ParamSpec("P")
R = TypeVar("R")
Documented = TypeVar("Documented", bound=Any)
LARGEST_COUNT = 2**31 - 1  # sizes, positions and rows are int32 on the GPU
LARGEST_FLOAT32 = (2 - 2**-23) * 2.0**127
DLPACK_HOST = (1, 3)  # DLDeviceType values kDLCPU and kDLCUDAHost (pinned memory)
FLOATS = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def as_float(value: object) -> float | None:
    """Return a Python or NumPy number, including NaN, as a float; None for a bool or other type."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def real(value: object) -> float | None:
    """Return a finite Python or NumPy number as a float; None for other values, such as a bool."""
    number = as_float(value)
    return number if number is not None and math.isfinite(number) else None


def check_number(name: str, value: object, least: float, most: float, expected: str) -> float:
    """Return `value` as a float. Raises InputError unless it is a number from `least` to `most`."""
    number = real(value)
    if number is None or not least <= number <= most:
        raise InputError(f"{name}: expected {expected}, got {shown(value)}")
    return number


def check_integer(name: str, value: Any, least: float, most: float, expected: str) -> int:
    """Return `value` as an int. Raises InputError unless it is an integer, not a bool, in range.

    The range is least..most. expected: description of valid values for the message.
    """
    whole = type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))
    number = int(value) if whole else None
    if number is None or not least <= number <= most:
        raise InputError(f"{name}: expected {expected}, got {shown(value)}")
    return number


def check_span(begin: Any, end: int, N: int, multiple: int = 1) -> None:
    """Raise InputError unless begin and end bound a shard of a matrix with N outputs.

    Borders are multiples of `multiple`, except the end of the matrix.
    """
    expected = f"borders of some of {N:,} outputs"
    check_integer("end", end, 1, N, expected)
    check_integer("begin", begin, 0, end - 1, expected)
    if begin % multiple or (end % multiple and end < N):
        raise InputError(
            f"outputs {begin:,} to {end:,} of {N:,}: expected borders in multiples of {multiple}"
        )


def check_flag(name: str, value: object) -> bool:
    """Return `value` as a bool. Raises InputError unless it is True or False."""
    if not isinstance(value, (bool, np.bool_)):
        raise InputError(f"{name}: expected True or False, got {shown(value)}")
    return bool(value)


# Common names of dtypes that differ from the names in NumPy
_DTYPE_OF = {
    **dict.fromkeys(("fp32", "f32", "fp64", "f64", "float64", "double"), "float32"),  # the widest
    **dict.fromkeys(("fp16", "f16", "half"), "float16"),
    "bf16": "bfloat16",
    **dict.fromkeys(("e4m3", "e4m3fn", "fp8", "float8"), "float8_e4m3fn"),
    "e5m2": "float8_e5m2",
}


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Raise InputError unless `value` is one of the strings; the message suggests the nearest."""
    known = tuple(choices)
    if not isinstance(value, str) or value not in known:
        several = f"one of {', '.join(known)}"
        expected = several if len(known) > 2 else " or ".join(map(repr, known))
        raise InputError(f"{name}: expected {expected}, got {shown(value)}{nearest(value, known)}")


def nearest(value: object, known: Iterable[str]) -> str:
    """Return the end of an error message, ": did you mean bfloat16?"; "" if no string is similar.

    A dtype of NumPy or torch is compared by its name.
    """
    name = value.__name__ if isinstance(value, type) else str(value)
    text, names = name.lower().removeprefix("torch."), list(known)
    if isinstance(value, (type, np.dtype)) or str(value).startswith("torch."):
        return f": use {text!r}" if text in names else ""
    near = [_DTYPE_OF.get(text, "")] if _DTYPE_OF.get(text) in names else []
    near = near or get_close_matches(text, names, 1)
    return f": did you mean {near[0]}?" if near else ""


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON. Raises InputError for a repeated key, whose value is ambiguous."""
    found = dict(pairs)
    if len(found) < len(pairs):
        ((key, count),) = Counter(key for key, _ in pairs).most_common(1)
        raise InputError(f"expected each key once, got {shown(key)} {count} times")
    return found


def set_fields(frozen: object, **values: object) -> None:
    """Set fields of a frozen dataclass, whose __post_init__ has checked or converted them."""
    for name, value in values.items():
        object.__setattr__(frozen, name, value)


def check_callable(name: str, value: object) -> None:
    """Raise InputError unless `value` is callable."""
    if not callable(value):
        raise InputError(f"{name}: expected a function, got {shown(value)}")


def check_encodable(name: str, text: str) -> None:
    """Raise InputError if `text` contains a lone surrogate, which UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{name}: character {error.start} is U+{ord(text[error.start]):04X}, a lone surrogate: "
            "expected text that UTF-8 can encode: decode its bytes again, and replace invalid "
            "bytes"
        ) from error


def several(value: Any) -> list[Any]:
    """Return a list of an iterable's elements, or [value] if `value` is not iterable."""
    try:
        return list(value)
    except TypeError:
        return [value]


def is_plain(array: object) -> TypeGuard[np.ndarray]:
    """Return whether `array` is a NumPy array, but neither a masked array nor an np.matrix.

    The mask of a masked array would be ignored, and * of an np.matrix is the matrix product.
    """
    kinds = (np.ma.MaskedArray, np.matrix)
    return isinstance(array, np.ndarray) and not isinstance(array, kinds)


def plain_array(name: str, value: object) -> np.ndarray:
    """Call `np.asarray`. Raises InputError for masked arrays and bools, which NumPy accepts."""
    if isinstance(value, np.ma.MaskedArray):
        raise InputError(f"{name}: expected an array without a mask, got a NumPy masked array")
    if isinstance(value, (list, tuple)) and any(isinstance(n, (bool, np.bool_)) for n in value):
        raise InputError(f"{name}: expected numbers, got a bool")
    return as_numpy(name, value)


def as_numpy(name: str, given: object) -> np.ndarray:
    """Call `np.asarray`. Raises InputError in place of RuntimeError, which torch tensors may raise.

    Raises TypeError, ValueError or OverflowError as `np.asarray` does.
    """
    try:
        return np.asarray(given)
    except RuntimeError as error:
        raise InputError(f"{name}: cannot be read as an array: {error}") from error


def of_bfloat16(array: object) -> str:
    """Return advice for an error message if `array` is a torch tensor of bfloat16, otherwise "".

    NumPy cannot read tensors of bfloat16. The advice is appended to the message.
    """
    if str(getattr(array, "dtype", "")) != "torch.bfloat16":
        return ""
    return ": use x.float().numpy(), and .astype(ml_dtypes.bfloat16) for a bfloat16 array"


def named_options(**rejected: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator that raises UnknownOption for unknown keywords, and suggests the nearest keyword.

    rejected: keyword → message, for keywords that need an explanation; {} stands for the value.
    """

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(function).parameters
        known = frozenset(parameters)

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            if not known.issuperset(kwargs):
                name, value = next(each for each in kwargs.items() if each[0] not in known)
                callee = _name_of(function, args)
                if name in rejected:
                    raise UnknownOption(f"{callee}: {rejected[name].format(shown(value))}")
                raise unknown_option(callee, name, parameters)
            return function(*args, **kwargs)

        return checked

    return decorated


def _name_of(function: Callable[..., object], args: tuple[object, ...]) -> str:
    """Return a function's name for messages; a method's name begins with its object's class."""
    owner, dot, name = function.__qualname__.rpartition(".")
    if dot and args:
        owner = (args[0] if isinstance(args[0], type) else type(args[0])).__name__
    return f"{owner}{dot}{name}".removesuffix(".__init__")


def unknown_option(callee: str, name: str, known: Iterable[str]) -> UnknownOption:
    """Return the error for a keyword that a function does not have, with the nearest keyword."""
    close = get_close_matches(name, list(known), 1)
    hint = f"did you mean {close[0]!r}?" if close else f"see help({callee})"
    return UnknownOption(f"{callee}: unknown keyword {name!r}: {hint}")


def host_array(x: object) -> np.ndarray | None:
    """Return `x` as a NumPy array if it is in host memory, else None.

    The array is copied only if its byte order differs from this machine's byte order.
    """
    if isinstance(x, np.ma.MaskedArray):
        raise InputError("x: expected an array without a mask, got a NumPy masked array")
    if isinstance(x, np.ndarray):
        return x if x.dtype.isnative else x.astype(x.dtype.newbyteorder("="))
    if hasattr(x, "__dlpack_device__") and x.__dlpack_device__()[0] in DLPACK_HOST:
        return imported(np.from_dlpack, x)
    return None


def require_host(x: Any, use: str, dtype: Any, on_gpu: str) -> np.ndarray:
    """Return `host_array(x)`. Raises InputError if the result is None.

    on_gpu: advice in the message for a CUDA array.
    """
    host = host_array(x)
    if host is not None:
        return host
    todo = ""
    if hasattr(x, "__dlpack_device__") or hasattr(x, "__cuda_array_interface__"):
        todo = f": {on_gpu}"
    elif isinstance(x, (list, tuple)):
        module = "ml_dtypes" if dtype == ml_dtypes.bfloat16 else "np"
        todo = f": use np.array(x, {module}.{np.dtype(dtype).name})"
    raise InputError(f"x: expected a NumPy array {use}, got {type(x).__name__}{todo}")


def imported(from_library: Callable[[Any], R], x: object) -> R:
    """Return from_library(x), which converts an array of another library. Raises InputError."""
    try:
        return from_library(x)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(
            f"expected an array that can be shared, got {type(x).__name__}: {error}{of_bfloat16(x)}"
        ) from error


def check_count(name: str, value: object, most: int = LARGEST_COUNT) -> int:
    """Return the value as an int. Raises InputError unless it is a non-bool integer in 1..most."""
    count = check_integer(name, value, 1, math.inf, "a positive integer")
    return check_integer(name, count, 1, most, f"at most {most:,}")


def normed_together(
    gamma_q: tuple[int, ...], gamma_k: tuple[int, ...], n_head: int, n_kv_head: int, D: int
) -> bool:
    """Return whether norm weights of these shapes apply to all heads together, not per head.

    D: channels per head. Raises InputError for other shapes.
    """
    together = (n_head * D,), (n_kv_head * D,)
    if (gamma_q, gamma_k) not in (together, ((D,), (D,))):
        raise InputError(
            f"gamma_q and gamma_k: expected ({D},) each, for norms of heads, or {together[0]} and "
            f"{together[1]}, for norms of all heads together, got {gamma_q} and {gamma_k}"
        )
    return gamma_q != (D,) or gamma_k != (D,)


def check_blocks(K: int) -> None:
    """Raise InputError unless K (values per row) is a multiple of 256, the size of a Q4_K block."""
    if K % 256:
        raise InputError(f"x: expected rows of a multiple of 256 numbers, got {K:,}")


def check_eps(value: object) -> float:
    """Return the value as a float. Raises InputError unless it is a valid epsilon in float32."""
    expected = "a finite number of at least 0 that fits float32"
    return check_number("eps", value, 0, LARGEST_FLOAT32, expected)


def check_token(name: str, value: object) -> int:
    """Return the value as an int. Raises InputError unless it is a valid token id."""
    return check_integer(name, value, 0, LARGEST_COUNT, "token ids")


def _position(name: str, value: object) -> int:
    return check_integer(name, value, 0, LARGEST_COUNT, "an integer of at least 0 below 2^31")


FLAGS = "causal", "gelu", "split_k", "half_split", "saturate", "stats", "values", "queries"
# Checks of scalar arguments by argument name. A name has the same meaning in all functions.
SCALARS: Mapping[str, Callable[[str, object], object]] = {
    "n_head": check_count,
    "window": check_count,
    "n_kv_head": check_count,
    "head_dim": check_count,
    "start": _position,
    "step": _position,
    "eps": lambda _, value: check_eps(value),
    **dict.fromkeys(
        ("softmax_scale", "factor", "limit"),
        lambda name, value: check_number(name, value, 2.0**-40, 2.0**40, "2^-40 to 2^40"),
    ),
    "theta": lambda name, value: check_number(name, value, 1, 2.0**100, "a number from 1 to 2^100"),
    **dict.fromkeys(FLAGS, check_flag),
}


# Options

PLACE = "{options}"  # placeholder: a separate paragraph of a docstring
WIDTH = 100


class Range(NamedTuple):
    """The range of an option's values, and its description in an error."""

    least: float
    most: float
    expected: str


class Meaning(NamedTuple):
    """The effect of an option: a sentence, `text`, and further text for docstrings only, `more`."""

    text: str
    more: str = ""
    range: Range | None = None

    @property
    def full(self) -> str:
        """Return the text that follows the option's name in a docstring."""
        return f"{self.text[0].lower()}{self.text[1:]} {self.more}".rstrip()


def option(default: object, text: str, range: Range | None = None, more: str = "") -> Any:
    """Return a dataclass field that is an option with this description, default and range."""
    return field(default=default, metadata={"meaning": Meaning(text, more, range)})


def options_of(kind: Any) -> dict[str, Field[Any]]:
    """Return the options of a dataclass, by name."""
    return {each.name: each for each in fields(kind) if "meaning" in each.metadata}


def meaning_of(option: Field[Any]) -> Meaning:
    meaning: Meaning = option.metadata["meaning"]
    return meaning


def document(target: object, options: Mapping[str, Field[Any]]) -> None:
    """Insert the descriptions of these options into a docstring, if it has a place for them."""
    text = target.__doc__ or ""  # python -OO removes docstrings
    indent = next((line.removesuffix(PLACE) for line in text.splitlines() if PLACE in line), "")
    lines = [
        textwrap.fill(
            f"{name}: {meaning_of(each).full}",
            WIDTH,
            initial_indent=indent,
            subsequent_indent=f"{indent}    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        for name, each in options.items()
    ]
    target.__doc__ = text.replace(indent + PLACE, "\n".join(lines)) or None


def documented(kind: Documented) -> Documented:
    """Class decorator: insert the descriptions of the dataclass's options into its docstring."""
    document(kind, options_of(kind))
    return kind

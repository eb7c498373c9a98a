"""What an operation takes and returns, in one line: names, dtypes and axes of its arrays.

    x f32 ... K; w matrix K N; bias? f32 N; residual? f32 ... N -> out~residual f32 ... N

An entry has names, a kind of dtype and axes. A letter is one size in all entries; an expression
such as `3*C` or `N//3` follows from sizes and options; `...` stands for any leading axes. An array
with `?` may be None. Outputs follow `->`: `out~residual` may be the array `residual` itself, and an
output with the name of an input is that input, which the operation changes.

The same line checks the NumPy arrays of `gpt2block.reference` (`takes`) and the CUDA arrays of
`gpt2block.ops` (`gpt2block.ops.call`). A kind restricts the dtype on a GPU; NumPy functions take
any float dtype, or any integer dtype, in its place, in any byte order:

    any      float32, float16 or bfloat16, the same for all arrays of this kind
    other    float32, float16 or bfloat16
    f32 f64 i32 i64 u8  float32, float64, int32, int64, uint8
    kv       a half of a kv_cache: any float dtype, or uint8 of the FP8 format kv_dtype
    float32  float32, with NumPy as well
    matrix   a WeightMatrix (K, N) of either layout; with NumPy also an array (K, N)
    rows     the same with layout "NK" only, so that a row in memory has the K inputs of an output
    table    the axes (N, K) of rows in memory: an array, or a WeightMatrix of layout "NK"
    two_part a TwoPartMatrix; the axes are its shape
    strided  "any" with any strides, of which the operation says which it takes
    mixed    "any", or "two_part" for all arrays of this kind

Any other kind is the name of an option that holds the dtype, "two_part" included.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from types import CodeType
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import numpy as np

from gpt2block.checks import SCALARS, is_plain, of_bfloat16
from gpt2block.errors import InputError, shown

P = ParamSpec("P")
R = TypeVar("R")
Sizes = dict[str, Any]  # letter → size; "..." → the sizes of all leading axes

MATRICES = ("matrix", "rows")  # kinds whose axes are (K, N)
_LETTERS = re.compile(r"[A-Za-z_]+")
_FLOAT = ("efdE", "float16, bfloat16, float32 or float64")  # E is bfloat16 of ml_dtypes
_MATRIX = ("efdE", "a float dtype, or a WeightMatrix")
# Kind → the dtype characters that NumPy functions take, and the dtypes in words; others: _FLOAT.
_IN_NUMPY: Mapping[str, tuple[str, str]] = {
    "i32": ("bBhHiIlLqQ", "integers"),
    "u8": ("B", "uint8"),
    "float32": ("f", "float32"),
    **dict.fromkeys((*MATRICES, "table"), _MATRIX),
}


class Entry(NamedTuple):
    """An array of a contract."""

    name: str
    kind: str
    axes: tuple[str, ...]
    optional: bool
    itself: tuple[str, ...]  # inputs that this output may be

    def shape(self, sizes: Mapping[str, Any]) -> tuple[int, ...]:
        """The shape, from sizes and options by name."""
        leading = sizes["..."] if self.axes[0] == "..." else ()
        return (*leading, *[size_of(axis, sizes) for axis in self.axes if axis != "..."])

    def fits(self, shape: tuple[int, ...], sizes: Sizes) -> bool:
        """Whether a shape agrees with the sizes; those of new letters are added to them."""
        axes = self.axes[1:] if self.axes[0] == "..." else self.axes
        first = len(shape) - len(axes)
        if first < 0 or (first and len(axes) == len(self.axes)):
            return False
        if len(axes) < len(self.axes) and sizes.setdefault("...", shape[:first]) != shape[:first]:
            return False
        for axis, size in zip(axes, shape[first:], strict=True):
            if size != (sizes.setdefault(axis, size) if axis.isalpha() else size_of(axis, sizes)):
                return False
        return True

    def expected(self, sizes: Mapping[str, Any]) -> str:
        """The shape for a message: known sizes as numbers, others by their letters."""
        parts: list[str] = []
        for axis in self.axes:
            if axis == "...":
                parts.extend(map(str, sizes.get(axis, (axis,))))
            else:
                known = all(letter in sizes for letter in _LETTERS.findall(axis))
                parts.append(str(size_of(axis, sizes)) if known else axis)
        return f"({', '.join(parts)}{',' * (len(parts) == 1)})"


class Contract(NamedTuple):
    """The arrays of an operation.

    changed: the place of the input that is the first output, or None.
    """

    inputs: tuple[Entry, ...]
    outputs: tuple[Entry, ...]
    changed: int | None

    @classmethod
    def parse(cls, text: str) -> Contract:
        """The contract that a line states."""
        before, _, after = text.partition("->")
        inputs, outputs = _entries(before), _entries(after)
        names = [entry.name for entry in inputs]
        changed = next((names.index(each.name) for each in outputs[:1] if each.name in names), None)
        return cls(inputs, outputs, changed)

    @property
    def matrices(self) -> tuple[int, ...]:
        """The places of the weight matrices among the inputs."""
        return tuple(i for i, entry in enumerate(self.inputs) if entry.kind in MATRICES)


def check_shapes(given: Iterable[tuple[Entry, tuple[int, ...]]], sizes: Sizes) -> None:
    """InputError unless all shapes fit; the sizes of new letters are added."""
    for entry, shape in given:
        if not entry.fits(shape, sizes):
            raise InputError(f"{entry.name}: expected shape {entry.expected(sizes)}, got {shape}")


def _entries(text: str) -> tuple[Entry, ...]:
    found = []
    for part in filter(str.strip, text.split(";")):
        words = part.split()
        first = next(i for i, word in enumerate(words) if word == "..." or not word[0].islower())
        *names, kind = words[:first]
        for name in names:
            plain, *itself = name.split("~")
            axes, optional = tuple(words[first:]), plain.endswith("?")
            found.append(Entry(plain.rstrip("?"), kind, axes, optional, tuple(itself)))
    return tuple(found)


def size_of(axis: str, sizes: Mapping[str, Any]) -> int:
    """The size of an axis: a letter, a number or an expression of them and of options."""
    return int(sizes[axis] if axis.isalpha() else eval(_compiled(axis), {}, dict(sizes)))


@cache
def _compiled(axis: str) -> CodeType:
    return compile(axis, f"<axis {axis}>", "eval")  # of a contract, which is this package's text


def takes(line: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator of a NumPy function: check its arguments by a contract, of which it has the names.

    An array may be None if that is its default, or if the contract says so; scalars are checked by
    name (`checks.SCALARS`). Raises InputError. `contract` of the result is the contract.

    The function gets float32 in place of 16 bits, whose squares and sums overflow or are coarse.
    Its results are rounded to 16 bits where all arrays have that dtype, apart from matrices,
    float64 and the kv_cache, which it may change and gets as it is.
    """
    contract = Contract.parse(line)
    entries = {entry.name: entry for entry in contract.inputs}

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(function).parameters
        names = tuple(parameters)
        optional = {name for name, one in parameters.items() if one.default is None}
        optional |= {entry.name for entry in contract.inputs if entry.optional}

        def fitting(name: str, value: Any, sizes: Sizes, dtypes: set[Any]) -> Any:
            if value is None and name in optional:
                return value
            if name in entries:
                _check(entries[name], value, sizes)
                return _widened(entries[name].kind, value, dtypes)
            return SCALARS[name](name, value) if name in SCALARS else value

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            sizes: Sizes = {}
            dtypes: set[Any] = set()
            values: Any = [fitting(*pair, sizes, dtypes) for pair in zip(names, args, strict=False)]
            named: Any = {name: fitting(name, v, sizes, dtypes) for name, v in kwargs.items()}
            values += args[len(values) :]  # the function raises TypeError for these
            made: Any = function(*values, **named)
            if len(dtypes) != 1 or (dtype := dtypes.pop()).itemsize != 2:
                return cast(R, made)
            given = [*values, *named.values()]
            if isinstance(made, tuple):
                return cast(R, tuple(_rounded(each, dtype, given) for each in made))
            return cast(R, _rounded(made, dtype, given))

        checked.contract = contract  # type: ignore[attr-defined]
        return checked

    return decorated


def unchecked(function: Callable[P, R]) -> Callable[P, R]:
    """The function without the checks of `takes`, for arguments known to be valid."""
    inner: Callable[P, R] = getattr(function, "__wrapped__", function)
    return inner


def _widened(kind: str, value: Any, dtypes: set[Any]) -> Any:
    """float32 in place of 16 bits, in this machine's byte order; dtypes: of arrays, extended."""
    if kind == "kv" or not isinstance(value, np.ndarray):
        return value
    native = value.dtype.newbyteorder("=")
    if native.char in _FLOAT[0] and kind not in ("f64", *MATRICES):
        dtypes.add(native)
    return value.astype(np.float32 if native.char in "eE" else native, copy=False)


def _rounded(made: Any, dtype: Any, given: list[Any]) -> Any:
    """A result in `dtype` if it is float32; an array that the function changed stays itself."""
    unchanged = made.dtype != np.float32 or any(made is value for value in given)
    return made if unchanged else made.astype(dtype)


def _check(entry: Entry, value: Any, sizes: Sizes) -> None:
    """InputError unless a NumPy array or a matrix fits; the sizes of new letters are added."""
    chars, words = _IN_NUMPY.get(entry.kind, _FLOAT)
    if words is _MATRIX[1] and hasattr(value, "dequantized"):
        shape = (value.N, value.K) if entry.kind == "table" else (value.K, value.N)
    elif is_plain(value) and value.dtype.char in chars and value.size:
        shape = value.shape
    else:
        shape = None
    if shape is None or not entry.fits(shape, sizes):
        raise InputError(
            f"{entry.name}: expected a NumPy array of {words}, of shape {entry.expected(sizes)} "
            f"with at least one element, got {_described(entry.name, value)}"
        )


def _described(name: str, value: Any) -> str:
    if isinstance(value, np.ma.MaskedArray):
        return "a NumPy masked array"
    if isinstance(value, np.matrix):
        return f"an np.matrix: use np.asarray({name})"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{value.dtype} {value.shape}{of_bfloat16(value)}"
    return f"{type(value).__name__} {shown(value):.60}"

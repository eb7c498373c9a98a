"""Contracts: lines of text that state names, dtypes and axes of operations' arrays.

    x f32 ... K; w matrix K N; bias? f32 N; residual? f32 ... N -> out~residual f32 ... N

An entry has names, a kind of dtype and axes. A letter is the same size in all entries. An
expression such as `3*C` or `N//3` is computed from sizes and options. `...` stands for any leading
axes. An array with `?` may be None. Outputs follow `->`. `out~residual` is an output `out` that may
be the array `residual` itself. An output with the name of an input is this input, which the
operation changes.

The same line checks the NumPy arrays of `gpt2block.reference` (`takes`) and the CUDA arrays of
`gpt2block.ops` (`gpt2block.ops.call`). A kind restricts the dtype on a GPU. NumPy functions take
any float dtype, or any integer dtype, instead, in any byte order. The kinds are:

    any      float32, float16 or bfloat16, the same for all arrays of this kind
    other    float32, float16 or bfloat16
    f32 f64 i32 i64 u8  float32, float64, int32, int64, uint8
    kv       a half of a kv_cache: any float dtype, or uint8 with codes of FP8
    float32  float32, also for NumPy functions
    matrix   a WeightMatrix (K, N) of either layout; with NumPy also an array (K, N)
    rows     as matrix, but only with layout "NK": a row in memory has the K inputs of an output
    table    an array of shape (N, K), or a WeightMatrix of layout "NK", whose rows are (N, K)
    hi_lo a HiLoMatrix; the axes are its shape
    strided  as "any", but with any strides; the operation checks which strides it supports
    mixed    "any", or "hi_lo" for all arrays of this kind

Any other kind is the name of an option whose value is the dtype, or "hi_lo".
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
Sizes = dict[str, Any]  # size by axis letter; "..." has sizes of leading axes

MATRICES = ("matrix", "rows")  # kinds of weight matrices with axes (K, N)
_LETTERS = re.compile(r"[A-Za-z_]+")
_FLOAT = ("efdE", "float16, bfloat16, float32 or float64")  # "E" is ml_dtypes' bfloat16
_MATRIX = ("efdE", "a float dtype, or a WeightMatrix")
# Kind of array → dtype characters that NumPy functions accept, description; default: _FLOAT.
_IN_NUMPY: Mapping[str, tuple[str, str]] = {
    "i32": ("bBhHiIlLqQ", "integers"),
    "u8": ("B", "uint8"),
    "float32": ("f", "float32"),
    **dict.fromkeys((*MATRICES, "table"), _MATRIX),
}


class Entry(NamedTuple):
    """An array in a contract: its name, kind (the accepted dtypes and storage) and axes."""

    name: str
    kind: str
    axes: tuple[str, ...]
    optional: bool
    itself: tuple[str, ...]  # names of inputs whose array may also be this output

    def shape(self, sizes: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the shape. sizes: values of axis letters and options, by name."""
        leading = sizes["..."] if self.axes[0] == "..." else ()
        return (*leading, *[size_of(axis, sizes) for axis in self.axes if axis != "..."])

    def fits(self, shape: tuple[int, ...], sizes: Sizes) -> bool:
        """Return whether a shape agrees with `sizes`; add sizes of new axis letters to `sizes`."""
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
        """Return the shape as text for a message: numbers for known sizes, else axis letters."""
        parts: list[str] = []
        for axis in self.axes:
            if axis == "...":
                parts.extend(map(str, sizes.get(axis, (axis,))))
            else:
                known = all(letter in sizes for letter in _LETTERS.findall(axis))
                parts.append(str(size_of(axis, sizes)) if known else axis)
        return f"({', '.join(parts)}{',' * (len(parts) == 1)})"


class Contract(NamedTuple):
    """A parsed contract: the input and output arrays of an operation.

    changed: index of the input that is also the first output, or None.
    """

    inputs: tuple[Entry, ...]
    outputs: tuple[Entry, ...]
    changed: int | None

    @classmethod
    def parse(cls, text: str) -> Contract:
        """Parse a contract from its line of text."""
        before, _, after = text.partition("->")
        inputs, outputs = _entries(before), _entries(after)
        names = [entry.name for entry in inputs]
        changed = next((names.index(each.name) for each in outputs[:1] if each.name in names), None)
        return cls(inputs, outputs, changed)

    @property
    def matrices(self) -> tuple[int, ...]:
        """Indices of the weight matrices among the inputs."""
        return tuple(i for i, entry in enumerate(self.inputs) if entry.kind in MATRICES)


def check_shapes(given: Iterable[tuple[Entry, tuple[int, ...]]], sizes: Sizes) -> None:
    """Raise InputError if a shape does not fit its Entry; add sizes of further axes to `sizes`."""
    for entry, shape in given:
        if not entry.fits(shape, sizes):
            raise InputError(f"{entry.name}: expected shape {entry.expected(sizes)}, got {shape}")


def _entries(text: str) -> tuple[Entry, ...]:
    entries = []
    for part in filter(str.strip, text.split(";")):
        words = part.split()
        first = next(i for i, word in enumerate(words) if word == "..." or not word[0].islower())
        *names, kind = words[:first]
        for name in names:
            plain, *itself = name.split("~")
            axes, optional = tuple(words[first:]), plain.endswith("?")
            entries.append(Entry(plain.rstrip("?"), kind, axes, optional, tuple(itself)))
    return tuple(entries)


def size_of(axis: str, sizes: Mapping[str, Any]) -> int:
    """Return the size of an axis that is a letter, a number, or an expression of `sizes`."""
    return int(sizes[axis] if axis.isalpha() else eval(_compiled(axis), {}, dict(sizes)))


@cache
def _compiled(axis: str) -> CodeType:
    return compile(axis, f"<axis {axis}>", "eval")  # safe: contracts are constants of this package


def takes(line: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a NumPy function so that each call checks the shapes and dtypes of its arguments.

    line: a contract (see `Contract.parse`), which describes arrays by argument name. An array may
    be None if None is its default, or if the contract allows it. Scalars are checked by name
    (`checks.SCALARS`). The decorated function raises InputError; the attribute `contract` of the
    function is the contract.

    Arrays of 16 bits are converted to float32, as 16-bit squares and sums overflow or are coarse.
    Results are rounded back to a 16-bit dtype if all arrays have it; matrices, float64 arrays and
    the kv_cache do not count. The kv_cache is passed unchanged, as the function may modify it.
    """
    contract = Contract.parse(line)
    entries = {entry.name: entry for entry in contract.inputs}

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(function).parameters
        names = tuple(parameters)
        optional = {name for name, one in parameters.items() if one.default is None}
        optional |= {entry.name for entry in contract.inputs if entry.optional}

        def fitting(name: str, value: object, sizes: Sizes, dtypes: set[object]) -> object:
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
            values += args[len(values) :]  # surplus arguments: the function raises TypeError
            result: Any = function(*values, **named)
            if len(dtypes) != 1 or (dtype := dtypes.pop()).itemsize != 2:
                return cast(R, result)
            arguments = [*values, *named.values()]
            if isinstance(result, tuple):
                return cast(R, tuple(_rounded(each, dtype, arguments) for each in result))
            return cast(R, _rounded(result, dtype, arguments))

        checked.contract = contract  # type: ignore[attr-defined]
        return checked

    return decorated


def unchecked(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function without the checks of `takes`, for arguments known to be valid."""
    inner: Callable[P, R] = getattr(function, "__wrapped__", function)
    return inner


def _widened(kind: str, value: object, dtypes: set[object]) -> object:
    """Convert an array to native byte order, 16-bit to float32; append its dtype to `dtypes`."""
    if kind == "kv" or not isinstance(value, np.ndarray):
        return value
    native = value.dtype.newbyteorder("=")
    if native.char in _FLOAT[0] and kind not in ("f64", *MATRICES):
        dtypes.add(native)
    return value.astype(np.float32 if native.char in "eE" else native, copy=False)


def _rounded(result: Any, dtype: Any, arguments: list[object]) -> object:
    """Convert a float32 result to `dtype`, unless the result is one of the `arguments`."""
    unchanged = result.dtype != np.float32 or any(result is value for value in arguments)
    return result if unchanged else result.astype(dtype)


def _check(entry: Entry, value: Any, sizes: Sizes) -> None:
    """Raise InputError unless an array fits; add sizes of the contract's new axes to `sizes`."""
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


def _described(name: str, value: object) -> str:
    if isinstance(value, np.ma.MaskedArray):
        return "a NumPy masked array"
    if isinstance(value, np.matrix):
        return f"an np.matrix: use np.asarray({name})"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{value.dtype} {value.shape}{of_bfloat16(value)}"
    return f"{type(value).__name__} {shown(value):.60}"

"""The checked arrays of a call on a GPU: `checked` applies a contract to CUDA arrays."""

from __future__ import annotations

from itertools import zip_longest
from math import prod
from types import SimpleNamespace
from typing import Any

from gpt2block.checks import meant
from gpt2block.contract import MATRICES, Contract, Entry, Sizes, scalar
from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import check, check_address, check_apart, same_memory, storage
from gpt2block.cuda.kernels import FP8
from gpt2block.errors import InputError, shown
from gpt2block.weights.matrix import WeightMatrix
from gpt2block.weights.two_part import TwoPartMatrix

TWO_PART = "two_part"  # in place of a dtype: a TwoPartMatrix
FIXED = {
    "f32": "float32",
    "f16": "float16",
    "float32": "float32",
    "f64": "float64",
    "i32": "int32",
    "i64": "int64",
    "u8": "uint8",
}


class Call(SimpleNamespace):
    """The checked arrays, sizes and options of a call, by name.

    A size has its letter; `leading` are the axes of `...`, `rows` is their product. `storage` is
    the dtype of arrays of kind "any" or "mixed", `kv_storage` that of a kv_cache. An output that is
    not given is allocated when it is first used, after all checks. The operation's `bind` may add
    what follows from these; `kept` are arrays that launches need and that nothing else keeps alive.
    """

    contract: Contract

    def __getattr__(self, name: str) -> Any:
        """A required output that is not given, newly allocated."""
        required = [entry.name for entry in self.contract.outputs if not entry.optional]
        if name not in required:
            raise AttributeError(name)
        self.make(name)
        return vars(self)[name]

    def make(self, *names: str) -> None:
        """Allocate outputs that are None, also optional ones."""
        for entry in self.contract.outputs:
            if entry.name in names and vars(self).get(entry.name) is None:
                shape = entry.shape({**vars(self), "...": vars(self).get("leading", ())})
                if _kind(entry, None, self) == TWO_PART:
                    made = TwoPartMatrix.empty(shape, vars(self).get("bound"))
                else:
                    made = cupy.empty(shape, _dtype(entry, None, self))
                setattr(self, entry.name, made)

    @property
    def extra(self) -> tuple[Any, ...]:
        """The outputs besides the first one, and the arrays of launches before the last one."""
        found = (getattr(self, entry.name) for entry in self.contract.outputs[1:])
        return (*(array for array in found if array is not None), *vars(self).get("kept", ()))


def checked(contract: Contract, inputs: tuple[Any, ...], out: Any = None, **options: Any) -> Call:
    """Check a call of an operation.

    inputs, out: in the order of the contract; missing ones are None. Options with a known meaning
    are checked too (`contract.scalar`). Raises InputError with the name of what is wrong.
    """
    call = Call(
        contract=contract, **{name: scalar(name, option) for name, option in options.items()}
    )
    sizes: Sizes = {name: value for name, value in vars(call).items() if type(value) is int}
    given: dict[str, Any] = {}
    for entry, value in zip_longest(contract.inputs, inputs[: len(contract.inputs)]):
        if value is not None or not entry.optional:
            _check(entry, value, call, sizes)
        given[entry.name] = value
        setattr(call, entry.name, value)
    for letter, size in sizes.items():
        setattr(call, "leading" if letter == "..." else letter, size)
    if "..." in sizes:
        call.rows = prod(sizes["..."])
    outs = out if isinstance(out, tuple) else (out,)
    for entry, value in zip_longest(contract.outputs, outs):
        written = _output(entry, value, call, sizes, given)
        if written is not None or entry.optional:
            setattr(call, entry.name, written)
        given[entry.name] = written
    return call


def _check(entry: Entry, value: Any, call: Call, sizes: Sizes) -> None:
    """InputError unless the array or matrix fits; the sizes of new letters are added."""
    name, kind = entry.name, _kind(entry, value, call)
    if kind == TWO_PART:
        check_two_part(name, value)
        shape = value.shape
    elif kind in MATRICES or (kind == "table" and isinstance(value, WeightMatrix)):
        check_matrix(name, value, None if kind == "matrix" else "NK")
        shape = value.data.shape if kind == "table" else (value.K, value.N)
    else:
        check(name, value, dtype=_dtype(entry, value, call), strided=kind == "strided")
        shape = value.shape
    if not entry.fits(shape, sizes):
        raise InputError(f"{name}: expected shape {entry.expected(sizes)}, got {shape}")


def _kind(entry: Entry, value: Any, call: Call) -> str:
    """The kind of an array; of a "mixed" one "two_part" or "any", as the first one is."""
    if entry.kind != "mixed":
        return TWO_PART if vars(call).get(entry.kind) == TWO_PART else entry.kind
    if not hasattr(call, "storage") and isinstance(value, TwoPartMatrix):
        call.storage = TWO_PART
    return TWO_PART if vars(call).get("storage") == TWO_PART else "any"


def _dtype(entry: Entry, value: Any, call: Call) -> str:
    """The dtype that an array must have."""
    kind = _kind(entry, value, call)
    if kind in ("any", "strided"):
        if not hasattr(call, "storage"):
            call.storage = storage(value)
        found: str = call.storage
    elif kind == "kv":
        if not hasattr(call, "kv_storage"):
            call.kv_storage = cache_storage(value, call.kv_dtype)
        found = call.kv_storage
    elif kind in ("other", "table"):
        found = storage(value) if kind == "other" else "float32"
    else:
        found = FIXED[kind] if kind in FIXED else getattr(call, kind)
    return found


def cache_storage(k: Any, kv_dtype: str | None) -> str:
    """The dtype of the arrays of a kv_cache, of which k is one. Raises InputError."""
    if kv_dtype is None:
        return storage(k)
    check_format(kv_dtype)
    return "uint8"


def check_format(kv_dtype: Any) -> None:
    """InputError unless it is an FP8 format."""
    if not isinstance(kv_dtype, str) or kv_dtype not in FP8:
        raise InputError(
            f"kv_dtype: expected one of {', '.join(FP8)}, got {shown(kv_dtype)}"
            f"{meant(kv_dtype, FP8)}"
        )


def _output(entry: Entry, value: Any, call: Call, sizes: Sizes, given: dict[str, Any]) -> Any:
    """An output, checked; an input if the operation changes it; None if it is not given.

    given: the inputs, and the outputs before this one, by name.
    """
    name = entry.name
    if name in given:
        if value is not None and not same_memory(value, given[name]):
            raise InputError(f"out: expected {name} itself, which the kernel changes in place")
        value = given.pop(name)
    elif value is None:
        return None
    else:
        _check(entry, value, call, sizes)
    itself = {other: given[other] for other in entry.itself}
    check_apart(name, value, {n: v for n, v in given.items() if n not in itself}, itself)
    return value


def check_matrix(name: str, w: Any, layout: str | None = "NK") -> None:
    """InputError unless w is a WeightMatrix on the current device; layout: None for either."""
    if not isinstance(w, WeightMatrix):
        raise InputError(
            f"{name}: expected a WeightMatrix, got {type(w).__name__}: use WeightMatrix.quantize"
        )
    if layout not in (None, w.layout):
        raise InputError(
            f"{name}: expected layout 'NK', (N, K) in memory, got {w.layout!r}: "
            f"use WeightMatrix.quantize(w, {w.dtype!r}, 'NK')"
        )
    check(name, w.data, dtype="uint8" if w.dtype in FP8 else w.dtype)
    if w.scale is not None:
        check(f"{name}.scale", w.scale)


def check_two_part(name: str, matrix: Any) -> None:
    """InputError unless it is a TwoPartMatrix on the current device, aligned to 16 bytes."""
    if not isinstance(matrix, TwoPartMatrix):
        raise InputError(
            f"{name}: expected a TwoPartMatrix, got {type(matrix).__name__}: "
            "use TwoPartMatrix.from_float32"
        )
    for part, array in matrix.arrays().items():
        check(name + part, array, dtype=array.dtype.name)
        check_address(name + part, array)

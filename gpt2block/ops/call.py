"""Checks of a call on a GPU: `checked` applies the contract of an operation to CUDA arrays.

A kernel has a function that plans its launch from facts, such as sizes, dtypes and the GPU, or
returns `Refusal`. The launch and the code that predicts kernels ask for the same plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from math import prod
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

from gpt2block.checks import SCALARS, nearest
from gpt2block.contract import MATRICES, Contract, Entry, Sizes, check_shapes
from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import (
    ArrayArg,
    ArrayArgs,
    CudaArray,
    Expected,
    check_address,
    check_apart,
    check_each,
    same_memory,
)
from gpt2block.cuda.cards import gpu
from gpt2block.cuda.kernels import FP8, IN_BYTES, STORAGE, Launch, dtype_name
from gpt2block.errors import InputError, shown
from gpt2block.models.weights.hi_lo import HiLoMatrix
from gpt2block.models.weights.matrix import WeightMatrix

Plan = TypeVar("Plan")
# The compute capability with each of `cards.Properties`
LEAST = {
    "has_mma": "7.5 or newer", "has_bf16": "8.0 or newer", "has_clusters": "9.0 or newer",
    "has_wgmma": "9.0 (Hopper)",
}  # fmt: skip
HI_LO = "hi_lo"  # used in place of a dtype for a HiLoMatrix
FIXED = {
    "f32": "float32",
    "f16": "float16",
    "float32": "float32",
    "f64": "float64",
    "i32": "int32",
    "i64": "int64",
    "u8": "uint8",
}


CACHE: Mapping[str, object] = {"kv_dtype": None}  # option with a kv_cache: its FP8 format


class Parts(NamedTuple):
    """A HiLoMatrix (N, K) with a WeightMatrix's attribute names, for code that takes both."""

    data: CudaArray  # float16 parts, (2, N, K)
    scale: CudaArray
    dtype: str = HI_LO


WITH_DATA = WeightMatrix, Parts


class Call(SimpleNamespace):
    """The checked arrays, sizes and options of a call, as attributes.

    The attribute of a size is its letter in the contract. `leading` holds the sizes of the axes
    `...`, `rows` their product. `storage` is the dtype of arrays of kind "any" or "mixed",
    `kv_storage` the dtype of a kv_cache, `fp8_cache` its FP8 format or None. An output that the
    caller does not pass is allocated by `output`, after all checks. The operation's `prepare` may
    add derived values. `kept` holds arrays that launches need and that nothing else
    keeps alive. `order` lists the preferred variants; if it is empty, all variants are tried, the
    last one first. `before` and `after` are launches before and after the launches of the variant.
    `to_peers` is the `ops.all_gather.PeerStores` of the output, if the kernel also sends it to
    other GPUs.
    """

    contract: Contract
    order: tuple[Any, ...] = ()  # preferred variants, or their names
    before: tuple[Launch, ...] = ()
    after: tuple[Launch, ...] = ()
    kept: tuple[Any, ...] = ()
    fp8_cache: str | None = None
    to_peers: Any = None

    def output(self, name: str) -> Any:
        """Return an output. Allocate it, as this attribute, if the caller did not pass it."""
        if vars(self).get(name) is None:
            entry = next(each for each in self.contract.outputs if each.name == name)
            shape = entry.shape({**vars(self), "...": vars(self).get("leading", ())})
            if _kind(entry, None, self) == HI_LO:
                setattr(self, name, HiLoMatrix.empty(shape, vars(self).get("bound")))
            else:
                setattr(self, name, cupy.empty(shape, _dtype(entry, None, self)))
        return vars(self)[name]

    def check_addresses(self, *names: str, loaded: int = 0) -> None:
        """Raise InputError unless the named arrays and matrices are aligned to 16 bytes.

        loaded: elements per load of arrays, which are aligned to a load if it has less than 16
        bytes. An `out` that was not passed is allocated.
        """
        for name in names:
            array = self.output("out") if name == "out" else getattr(self, name, None)
            if array is None:
                continue
            if loaded:
                check_address(name, array, min(16, loaded * array.itemsize))
            else:
                check_address(name, array.data if isinstance(array, WITH_DATA) else array)


class UncheckedCall(NamedTuple):
    """A call before its checks. options: values of all options; defaults: their default values."""

    contract: Contract
    inputs: tuple[Any, ...]
    out: Any
    options: Mapping[str, Any]
    defaults: Mapping[str, object]

    def checked(self, contract: Contract | None = None, **more: object) -> Call:
        """Check the call by `contract`, by default the operation's contract. Raises InputError.

        more: additional options, or replacements of `options`. Options with a known meaning
        (`checks.SCALARS`) are checked, too. None is accepted in `more`, and in `options` if it is
        the default.
        """
        options = {**self.options, **more}
        for name, value in options.items():
            absent = value is None and (name in more or self.defaults[name] is None)
            if name in SCALARS and not absent:
                options[name] = SCALARS[name](name, value)
        return checked(contract or self.contract, self.inputs, self.out, **options)


def checked(contract: Contract, inputs: ArrayArgs, out: Any = None, **options: Any) -> Call:
    """Check a call of an operation.

    inputs, out: arrays in the order of the contract; None for an omitted array. options: attributes
    to add to the call; integers are sizes. Raises InputError with the name of the wrong argument.
    """
    call = Call(contract=contract, **options)
    call.fp8_cache = options.get("kv_dtype")
    sizes: Sizes = {name: value for name, value in vars(call).items() if type(value) is int}
    arrays: list[Expected] = []
    shapes: list[tuple[Entry, Any]] = []

    def expect(entry: Entry, value: ArrayArg) -> None:
        try:
            expected, shape = _expected(entry, value, call)
        except InputError:
            check_each(arrays)  # errors of the arrays before this one are reported first
            raise
        arrays.extend(expected)
        shapes.append((entry, shape))

    given: dict[str, Any] = {}
    for entry, value in zip_longest(contract.inputs, inputs[: len(contract.inputs)]):
        if value is not None or not entry.optional:
            expect(entry, value)
        given[entry.name] = value
        setattr(call, entry.name, value)
    written: dict[str, Any] = {}
    outs = out if isinstance(out, tuple) else (out,)
    for entry, value in zip_longest(contract.outputs, outs):
        if entry.name in given:
            if value is not None and not same_memory(value, given[entry.name]):
                name = entry.name
                raise InputError(f"out: expected {name} itself, which the kernel changes in place")
            written[entry.name] = given[entry.name]
        else:
            if value is not None:
                expect(entry, value)
            written[entry.name] = value
    apart = [_apart(entry, written, given) for entry in contract.outputs]
    check_each(arrays)
    check_shapes(shapes, sizes)
    for name, value, others, itself in apart:
        check_apart(name, value, others, itself)
    if "..." in sizes:
        call.leading = sizes.pop("...")
        call.rows = prod(call.leading)
    vars(call).update(sizes)
    for entry in contract.outputs:
        if written[entry.name] is not None or entry.optional:
            setattr(call, entry.name, written[entry.name])
    return call


def _apart(
    entry: Entry, written: dict[str, Any], arrays: dict[str, Any]
) -> tuple[str, Any, dict[str, Any], dict[str, Any]]:
    """Return the arguments of `check_apart` for an output. Also add the output to `arrays`.

    An input that the operation changes in place is not compared with itself.
    """
    name, value = entry.name, written[entry.name]
    arrays.pop(name, None)
    itself = {other: arrays[other] for other in entry.itself}
    others = {other: array for other, array in arrays.items() if other not in itself}
    arrays[name] = value
    return name, value, others, itself


def _expected(entry: Entry, value: Any, call: Call) -> tuple[tuple[Expected, ...], Any]:
    """Return the expected arrays and shape of an argument. Raises InputError for a wrong type."""
    name, kind = entry.name, _kind(entry, value, call)
    if kind == HI_LO:
        if not isinstance(value, HiLoMatrix):
            raise InputError(
                f"{name}: expected a HiLoMatrix, got {type(value).__name__}: "
                "use HiLoMatrix.from_float32"
            )
        parts = Expected(f"{name}.parts", value.parts, "float16", multiple=16)
        scale = Expected(f"{name}.scale", value.scale, "float32", multiple=16)
        return (parts, scale), value.shape
    if kind in MATRICES or (kind == "table" and isinstance(value, WeightMatrix)):
        expected = _of_matrix(name, value, None if kind == "matrix" else "NK")
        return expected, (value.N, value.K) if kind == "table" else (value.K, value.N)
    array = Expected(name, value, _dtype(entry, value, call), kind == "strided")
    return (array,), getattr(value, "shape", ())


def _kind(entry: Entry, value: ArrayArg, call: Call) -> str:
    """Return the kind of an array. For "mixed", return "hi_lo" for a HiLoMatrix, else "any".

    The first array of kind "mixed" determines the kind of all.
    """
    if entry.kind != "mixed":
        return HI_LO if vars(call).get(entry.kind) == HI_LO else entry.kind
    if not hasattr(call, "storage") and isinstance(value, HiLoMatrix):
        call.storage = HI_LO
    return HI_LO if vars(call).get("storage") == HI_LO else "any"


def _dtype(entry: Entry, value: ArrayArg, call: Call) -> str:
    """Return the dtype that an array must have."""
    kind = _kind(entry, value, call)
    if kind in ("any", "strided"):
        if not hasattr(call, "storage"):
            call.storage = storage(value)
        dtype: str = call.storage
    elif kind == "kv":
        if not hasattr(call, "kv_storage"):
            call.kv_storage = cache_storage(value, call.fp8_cache)
        dtype = call.kv_storage
    elif kind in ("other", "table"):
        dtype = storage(value) if kind == "other" else "float32"
    else:
        dtype = FIXED[kind] if kind in FIXED else getattr(call, kind)
    return dtype


def cache_storage(k: object, fp8: str | None) -> str:
    """Return the dtype of a kv_cache, from its array k and its FP8 format. Raises InputError."""
    if fp8 is None:
        return storage(k)
    check_format(fp8)
    return "uint8"


def check_format(kv_dtype: object) -> None:
    """Raise InputError unless kv_dtype is an FP8 format."""
    if not isinstance(kv_dtype, str) or kv_dtype not in FP8:
        raise InputError(
            f"kv_dtype: expected one of {', '.join(FP8)}, got {shown(kv_dtype)}"
            f"{nearest(kv_dtype, FP8)}"
        )


def _of_matrix(name: str, w: object, layout: str | None) -> tuple[Expected, ...]:
    """Return the expected arrays of a WeightMatrix. layout: required layout, None for any.

    Raises InputError for another type or layout.
    """
    if not isinstance(w, WeightMatrix):
        raise InputError(
            f"{name}: expected a WeightMatrix, got {type(w).__name__}: use WeightMatrix.quantize"
        )
    if layout not in (None, w.layout):
        raise InputError(
            f"{name}: expected layout 'NK', (N, K) in memory, got {w.layout!r}: "
            f"use WeightMatrix.quantize(w, {w.dtype!r}, 'NK')"
        )
    data = Expected(name, w.data, "uint8" if w.dtype in IN_BYTES else w.dtype)
    return (data,) if w.scale is None else (data, Expected(f"{name}.scale", w.scale, "float32"))


def storage(x: object) -> str:
    """Return the dtype to require: x's dtype if kernels support it as type `T`, else float32."""
    name = dtype_name(x.dtype) if isinstance(x, cupy.ndarray) else ""
    return name if name in STORAGE else "float32"


class UnsupportedCall(Exception):  # noqa: N818  (a reason to take another variant)
    """A variant does not support a call's dtypes, sizes, alignment or compute capability."""


class Refusal(NamedTuple):
    """The reason why a kernel does not support the facts of a call, in place of a plan."""

    reason: str

    @classmethod
    def first(cls, *reasons: tuple[object, str] | Refusal | None) -> Refusal | None:
        """Return the first refusal, of refusals and of pairs (condition, reason), or None."""
        for each in reasons:
            if each and each[0]:
                return cls(each[-1])
        return None


def accept(plan: Plan | Refusal) -> Plan:
    """Return a plan. Raises UnsupportedCall with the reason if the kernel refused."""
    if isinstance(plan, Refusal):
        raise UnsupportedCall(plan.reason)
    return plan


def refuse(condition: object, reason: str) -> None:
    """Raise UnsupportedCall with a reason if a condition is true."""
    if condition:
        accept(Refusal(reason))


def supports(plan: object) -> bool:
    """Return whether a kernel has a plan, or no reason to refuse."""
    return not isinstance(plan, Refusal)


def needs(feature: str, instead: str = "") -> Refusal | None:
    """Return a refusal on a GPU without a feature, one of LEAST. instead: advice."""
    if getattr(gpu(), feature):
        return None
    return Refusal(f"needs a GPU of compute capability {LEAST[feature]}{instead}")

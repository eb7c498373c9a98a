"""Random calls of every function of `gpt2block.ops` on a GPU, compared with `gpt2block.reference`.

A case draws an operation with valid inputs, by its contract, and options. Then it mostly changes
something: strides, alignment, dtype, shape, the device of an array, an option, or memory that the
output shares with an input. gpt2block must raise InputError, or agree with the reference in float64
on the same numbers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import cupy as cp
import numpy as np
from ml_dtypes import finfo

from fuzzing import Area, Difference, Refused, Rng, check, check_message
from fuzzing.op_calls import RULES, Arrays, Call, Draw, drawn_call
from gpt2block import ops
from gpt2block.cuda.arrays import mapped
from gpt2block.errors import InputError
from gpt2block.ops.registry import OPERATIONS, STEPS
from gpt2block.ops.workload import tolerance, uploaded
from gpt2block.weights.matrix import WeightMatrix
from gpt2block.weights.two_part import TwoPartMatrix

NAN_DEFINED = ("encoder", "encoder_rows", "log_likelihood")  # NaN for ids that are out of range
IN_PLACE: Mapping[str, tuple[str, ...]] = {"kv_append": ("k", "v"), "mark_seen": ("seen",)}
ODD_OPTIONS: tuple[Any, ...] = (
    None, True, False, 0, -1, 7, 33, 2**31, 2**70, 1.5, float("nan"), "mha", "", "6", [],
)  # fmt: skip
GUARD = 64  # number of elements on each side of an output that must not change
UNWRITTEN = 0xA5  # value of the bytes of these elements
T = TypeVar("T")


def case(rng: Rng, folder: Path) -> None:
    """Check that one call is refused, or that its result is right."""
    call = drawn_call(Draw(rng), rng.pick(*RULES))
    arrays = {
        name: None if value is None else uploaded(value) for name, value in call.arrays.items()
    }
    options = dict(call.options)
    _change(rng, call, arrays, options)
    guarded = _add_out(rng, call.op, arrays, options)
    before = {name: _on_host(value) for name, value in arrays.items()}
    result = _run(lambda: getattr(ops, call.op)(**arrays, **options), guarded)
    if call.op in IN_PLACE:
        result = [arrays[name] for name in IN_PLACE[call.op]]
    _check_inputs(arrays, before, options.get("out"), IN_PLACE.get(call.op, ()))
    _compare(call, result, before, options)
    if isinstance(result, cp.ndarray) and "out" not in options and call.op in OPERATIONS:
        _bind_into(rng, call, arrays, options, result)


def _run(function: Callable[[], T], guarded: Guarded | None) -> T:
    """Return the result, when the GPU is done. Raises Refused for InputError."""
    try:
        return function()
    except InputError as error:
        check_message(str(error))
        raise Refused from error
    finally:
        cp.cuda.runtime.deviceSynchronize()
        if guarded is not None:
            sides = guarded.buffer[: guarded.first], guarded.buffer[guarded.end :]
            untouched = bool((cp.concatenate(sides) == UNWRITTEN).all())
            check(untouched, "bytes next to the output were written")


def _change(rng: Rng, call: Call, arrays: Arrays, options: dict[str, Any]) -> None:
    """Change up to two of the arguments."""
    names = list(arrays)
    free = [name for name in options if not call.trusted or name in ("n_head", "variant", "block")]
    for _ in range(rng.integers(0, 3)):
        if rng.chance(0.7) and names:
            name = names.pop(rng.whole(len(names)))
            arrays[name] = _changed(rng, arrays[name], call.trusted)
        elif free:
            options[rng.pick(*free)] = rng.pick(*ODD_OPTIONS)


def _bind_into(rng: Rng, call: Call, arrays: Arrays, options: dict[str, Any], result: Any) -> None:
    """Repeat the call with `bind`, with an output that may overlap an input."""
    operation, given = OPERATIONS[call.op], tuple(arrays.values())
    if "cu_seqlens" in options:
        operation, given = STEPS["attention_varlen"], (*given, options["cu_seqlens"])
    found = [a for a in given if isinstance(a, cp.ndarray) and a.flags.c_contiguous]
    shared = [a for a in found if a.dtype == result.dtype and a.size >= result.size]
    if shared and rng.chance(0.7):
        flat = rng.pick(*shared).ravel()  # a view, as it is contiguous
        first = rng.whole(flat.size - result.size + 1)
        guarded, out = None, flat[first : first + result.size].reshape(result.shape)
    else:
        guarded, out = _guarded(result.shape, result.dtype)
    before = {name: _on_host(value) for name, value in arrays.items()}
    known = {name: value for name, value in options.items() if name in operation.options}
    try:
        bound = _run(lambda: operation.bind(given, out, **known), guarded)
    except Refused:
        return
    _run(bound.run, guarded)
    _check_inputs(arrays, before, out, ())
    outputs = (bound.out, *bound.extra)[: 1 + 2 * bool(options.get("stats"))]
    _compare(call, outputs, before, options)


def _compare(call: Call, result: Any, host: Arrays, options: dict[str, Any]) -> None:
    got = list(result) if isinstance(result, (tuple, list)) else [result]
    try:
        with np.errstate(all="ignore"):
            truth = call.truth(host, options)
    except (ValueError, TypeError, IndexError, AttributeError) as error:
        raise Difference(f"{call.op}: accepted what the reference refuses: {error}") from error
    for index, (one, true) in enumerate(zip(got, truth, strict=True)):
        values = one.joined() if isinstance(one, TwoPartMatrix) else one
        _check_near(f"{call.op}, result {index}", values, true)


def _check_near(name: str, got: Any, truth: Any) -> None:
    """Raise Difference unless the finite values of the truth are equal up to rounding."""
    values = cp.asnumpy(got)
    check(values.shape == truth.shape, f"{name}: expected shape {truth.shape}, got {values.shape}")
    if truth.dtype.kind in "iub":
        off_by = int((values != truth).sum())
        check(off_by == 0, f"{name}: {off_by} of {truth.size} differ")
        return
    finite = np.isfinite(truth)
    if name.partition(",")[0] in NAN_DEFINED:
        undefined = np.isnan(values[np.isnan(truth)]).all()
        check(undefined, f"{name}: expected NaN for ids that are out of range")
    if not finite.any():
        return
    off = float(np.abs(values.astype(np.float64)[finite] - truth[finite]).max())
    largest = max(float(np.abs(truth[finite]).max()), 1e-30)
    rounded = name.startswith("rmsnorm_")  # the norm and both products are rounded, too
    limit = tolerance(values.dtype.name) * (2 if rounded else 1)
    smallest = float(finfo(values.dtype).smallest_subnormal)  # type: ignore[no-untyped-call]
    near = off <= limit * largest + smallest  # not for NaN
    check(near, f"{name}: off by {off / largest:.2e}, expected {limit:.2e} at most")


def _check_inputs(arrays: Arrays, before: Arrays, out: Any, written: tuple[str, ...]) -> None:
    """Raise Difference where an input that is not an output has changed."""
    for name, value in arrays.items():
        if name in written or (isinstance(value, cp.ndarray) and _shares(value, out)):
            continue
        now, old = _parts(_on_host(value)), _parts(before[name])
        same = all(np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
                   for a, b in zip(now, old, strict=True))  # fmt: skip
        check(same, f"{name}: an input has changed")


def _on_host(value: Any) -> Any:
    """Return a copy on the host of the numbers that the call receives."""
    if isinstance(value, TwoPartMatrix):
        return cp.asnumpy(value.joined())
    return mapped(lambda a: cp.asnumpy(a).copy() if isinstance(a, cp.ndarray) else a, value)


def _parts(value: Any) -> list[Any]:
    """Return the arrays of an input."""
    if isinstance(value, WeightMatrix):
        return [value.data]
    return [value] if isinstance(value, np.ndarray) else []


def _shares(a: Any, b: Any) -> bool:
    return isinstance(b, cp.ndarray) and bool(cp.shares_memory(a, b))


# --- changes -------------------------------------------------------------------------------------


def _changed(rng: Rng, value: Any, trusted: bool = False) -> Any:
    """Return another input: a changed layout, other numbers, or something that is not an array."""
    if isinstance(value, WeightMatrix):
        return _changed_weights(rng, value)
    if not isinstance(value, cp.ndarray) or value.ndim == 0 or value.size == 0:
        return rng.pick(None, 1.0, "x", np.zeros(3, np.float32))
    return rng.pick(*(LAYOUT_CHANGES if trusted else CHANGES))(rng, value)


def _changed_weights(rng: Rng, w: WeightMatrix) -> Any:
    kind = rng.integers(4)
    if kind == 0:
        return w.data
    if kind == 1:
        return cp.asarray(w.dequantized() if w.scale is None else cp.asnumpy(w.dequantized()))
    if kind == 2:
        return replace(w, data=_offset(rng, w.data))
    return None


def _strided(rng: Rng, x: Any) -> Any:
    """Return a view with every second element along an axis of a larger array."""
    axis = rng.whole(x.ndim)
    wide = cp.repeat(x, 2, axis=axis)
    return wide[(slice(None),) * axis + (slice(None, None, 2),)]


def _column_major(rng: Rng, x: Any) -> Any:
    """Return the array in column-major order."""
    return cp.ascontiguousarray(x.T).T


def _reversed(rng: Rng, x: Any) -> Any:
    """Return a view with a negative stride."""
    axis = rng.whole(x.ndim)
    reverse = (slice(None),) * axis + (slice(None, None, -1),)
    return cp.ascontiguousarray(x[reverse])[reverse]


def _repeated_rows(rng: Rng, x: Any) -> Any:
    """Return a view with a stride of 0."""
    return cp.broadcast_to(x[:1], x.shape)


def _offset(rng: Rng, x: Any) -> Any:
    """Return a contiguous view that does not begin at the start of an allocation."""
    shift = rng.whole(1, 9)
    buffer = cp.empty(x.size + shift, x.dtype)
    view = buffer[shift:].reshape(x.shape)
    view[...] = x
    return view


def _misaligned(rng: Rng, x: Any) -> Any:
    """Return an array whose elements are not aligned to their size."""
    memory = cp.cuda.alloc(x.nbytes + x.itemsize) + rng.whole(1, max(2, x.itemsize))
    flat = cp.ascontiguousarray(x).reshape(-1).view("uint8")
    cp.ndarray(x.nbytes, "uint8", memory)[...] = flat
    return cp.ndarray(x.shape, x.dtype, memory)


def _other_dtype(rng: Rng, x: Any) -> Any:
    names = ("float32", "float16", "float64", "int32", "int64", "uint8", "bool", "complex64")
    return x.astype(rng.pick(*names))


def _other_shape(rng: Rng, x: Any) -> Any:
    changes = (
        lambda: x[..., :-1],
        lambda: x[:-1],
        lambda: x[None],
        x.ravel,
        lambda: x[..., None],
        lambda: cp.concatenate([x, x], axis=rng.whole(x.ndim)),
        lambda: x[:0],
        lambda: x.ravel()[0],
    )
    return rng.pick(*changes)()


def _on_the_host(rng: Rng, x: Any) -> Any:
    host = cp.asnumpy(x)
    return rng.pick(host, host.tolist(), np.ma.masked_array(host), None, "text", 3)


LAYOUT_CHANGES = (
    _strided, _strided, _column_major, _reversed, _offset, _offset, _misaligned, _other_dtype,
    _on_the_host,
)  # fmt: skip
CHANGES = (*LAYOUT_CHANGES, _repeated_rows, _other_dtype, _other_shape, _other_shape)


class Guarded(NamedTuple):
    """An output between two regions of known bytes."""

    buffer: Any
    first: int
    end: int


def _add_out(rng: Rng, op: str, arrays: Arrays, options: dict[str, Any]) -> Guarded | None:
    """Sometimes pass `out=`: a new array, an input, or an array that overlaps an input."""
    first = next(iter(arrays.values()), None)
    if isinstance(first, cp.ndarray) and first.data.ptr % first.itemsize:
        return None  # CuPy itself cannot copy a misaligned array
    has_out = "out" in inspect.signature(getattr(ops, op)).parameters
    if not has_out or not isinstance(first, cp.ndarray) or first.size == 0 or rng.chance(0.4):
        return None
    dtype = np.dtype("uint8") if op == "to_fp8" else first.dtype
    kind = rng.integers(5)
    if kind == 0:
        options["out"] = first
        return None
    if kind == 1 and first.ndim > 1 and first.shape[0] > 1:
        whole = cp.concatenate([first, first])
        name = next(iter(arrays))
        arrays[name] = whole[: len(first)]
        options["out"] = whole[1 : len(first) + 1]
        return None
    if kind == 2:
        options["out"] = _changed(rng, cp.empty_like(first))
        return None
    guarded, options["out"] = _guarded(first.shape, dtype)
    return guarded


def _guarded(shape: tuple[int, ...], dtype: Any) -> tuple[Guarded, Any]:
    """Return an output of that shape, and the guard regions around it."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    edge = GUARD * np.dtype(dtype).itemsize
    buffer = cp.full(size + 2 * edge, UNWRITTEN, "uint8")
    out = buffer[edge : edge + size].view(dtype).reshape(shape)
    return Guarded(buffer, edge, edge + size), out


AREA = Area("ops", 1.0, case, memory=None)

"""Random calls of every function of `gpt2block.ops` on a GPU, compared with `gpt2block.reference`.

A case draws an operation with valid inputs and options. Then it mostly changes something: strides,
alignment, dtype, shape, the device of an array, an option, or memory that the output shares with an
input. gpt2block must raise InputError, or agree with the reference in float64 on the same numbers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import cupy as cp
import numpy as np
from ml_dtypes import finfo

from fuzzing import Area, Difference, Outcome, refused_or
from gpt2block import ops, reference
from gpt2block.array_checks import FLOATS
from gpt2block.bench.measure import tolerance
from gpt2block.errors import InputError
from gpt2block.ops.registry import OPERATIONS
from gpt2block.sampling import Sampling
from gpt2block.weights.matrix import WeightMatrix
from gpt2block.weights.two_part import TwoPartMatrix

Rng = np.random.Generator
Arrays = dict[str, Any]  # a CuPy or NumPy array, WeightMatrix, TwoPartMatrix or None by its name
Truth = Callable[[Arrays, dict[str, Any]], "list[Any]"]  # (host arrays, options) → float64 arrays

SIZES = (1, 2, 3, 5, 8, 16, 17, 32, 33, 64, 65, 96, 128, 129, 200, 256, 320)
HEADS = (1, 2, 3)
HEAD_SIZES = (4, 8, 48, 64, 128)
BLOCKS = (None, None, 32, 64, 128, 256, 512, 1024)
WEIGHTS = ("float32", "float16", "bfloat16", "float8_e5m2", "float8_e4m3fn")
ODD_OPTIONS: tuple[Any, ...] = (
    None, True, False, 0, -1, 7, 33, 2**31, 2**70, 1.5, float("nan"), "mha", "", "6", [],
)  # fmt: skip
GUARD = 64  # elements on each side of an output that must not change


class Call(NamedTuple):
    """An operation with valid inputs and options."""

    op: str
    arrays: Arrays  # in the order of the function's parameters
    options: dict[str, Any]
    truth: Truth
    trusted: bool = False  # values in device memory determine the addresses that the kernel reads


def case(rng: Rng, folder: Path) -> Outcome:
    """One call, whose result is right or which is refused."""
    call = BUILDERS[_pick(rng, list(BUILDERS))](rng)
    arrays = {name: _uploaded(value) for name, value in call.arrays.items()}
    options = dict(call.options)
    _change(rng, call, arrays, options)
    guarded = _add_out(rng, call.op, arrays, options)
    before = {name: _on_host(value) for name, value in arrays.items()}
    result = refused_or(lambda: getattr(ops, call.op)(**arrays, **options), InputError)
    cp.cuda.runtime.deviceSynchronize()
    if guarded is not None:
        guarded.check()
    if isinstance(result, str):
        return "refused"
    if call.op in IN_PLACE:
        result = [arrays[name] for name in IN_PLACE[call.op]]
    _check_inputs(arrays, before, options.get("out"), IN_PLACE.get(call.op, ()))
    _compare(call, result, before, options)
    if isinstance(result, cp.ndarray) and "out" not in options and call.op in OPERATIONS:
        _bind_into(rng, call, arrays, options, result)
    return "right"


def _change(rng: Rng, call: Call, arrays: Arrays, options: dict[str, Any]) -> None:
    """Change up to two of the arguments."""
    names = list(arrays)
    free = [name for name in options if not call.trusted or name in ("n_head", "variant", "block")]
    for _ in range(rng.integers(0, 3)):
        if rng.random() < 0.7 and names:
            name = names.pop(int(rng.integers(len(names))))
            arrays[name] = _changed(rng, arrays[name], call.trusted)
        elif free:
            options[_pick(rng, free)] = _pick(rng, ODD_OPTIONS)


def _bind_into(rng: Rng, call: Call, arrays: Arrays, options: dict[str, Any], result: Any) -> None:
    """Repeat the call with `bind`, with an output that may overlap an input."""
    bind = OPERATIONS[call.op].binder
    known = inspect.signature(bind).parameters
    inputs = [value for value in arrays.values() if isinstance(value, cp.ndarray)]
    shared = [a for a in inputs if a.dtype == result.dtype and a.flags.c_contiguous
              and a.size >= result.size]  # fmt: skip
    if shared and rng.random() < 0.7:
        flat = _pick(rng, shared).ravel()  # a view, as it is contiguous
        first = int(rng.integers(flat.size - result.size + 1))
        guarded, out = None, flat[first : first + result.size].reshape(result.shape)
    else:
        guarded, out = _guarded(result.shape, result.dtype)
    before = {name: _on_host(value) for name, value in arrays.items()}
    found = {name: value for name, value in options.items() if name in known}
    bound = refused_or(lambda: bind(tuple(arrays.values()), out, **found), InputError)
    if isinstance(bound, str):
        return
    bound.run()
    cp.cuda.runtime.deviceSynchronize()
    if guarded is not None:
        guarded.check()
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
    if values.shape != truth.shape:
        raise Difference(f"{name}: expected shape {truth.shape}, got {values.shape}")
    if truth.dtype.kind in "iub":
        if not np.array_equal(values, truth):
            raise Difference(f"{name}: {int((values != truth).sum())} of {truth.size} differ")
        return
    finite = np.isfinite(truth)
    if name.partition(",")[0] in NAN_DEFINED and not np.isnan(values[np.isnan(truth)]).all():
        raise Difference(f"{name}: expected NaN for ids that are out of range")
    if not finite.any():
        return
    off = np.abs(values.astype(np.float64)[finite] - truth[finite])
    largest = max(float(np.abs(truth[finite]).max()), 1e-30)
    rounded = name.startswith("rmsnorm_")  # the norm and both products are rounded, too
    limit = tolerance(values.dtype.name) * (2 if rounded else 1)
    smallest = float(finfo(values.dtype).smallest_subnormal)  # type: ignore[no-untyped-call]
    if not float(off.max()) <= limit * largest + smallest:  # also for NaN
        raise Difference(f"{name}: off by {off.max() / largest:.2e}, expected {limit:.2e} at most")


def _check_inputs(arrays: Arrays, before: Arrays, out: Any, written: tuple[str, ...]) -> None:
    """Raise Difference where an input that is not an output has changed."""
    for name, value in arrays.items():
        if name in written or (isinstance(value, cp.ndarray) and _shares(value, out)):
            continue
        now, old = _parts(_on_host(value)), _parts(before[name])
        same = all(np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
                   for a, b in zip(now, old, strict=True))  # fmt: skip
        if not same:
            raise Difference(f"{name}: an input has changed")


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
        return _pick(rng, (None, 1.0, "x", np.zeros(3, np.float32)))
    return _pick(rng, LAYOUT_CHANGES if trusted else CHANGES)(rng, value)


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
    axis = int(rng.integers(x.ndim))
    wide = cp.repeat(x, 2, axis=axis)
    return wide[(slice(None),) * axis + (slice(None, None, 2),)]


def _column_major(rng: Rng, x: Any) -> Any:
    """Return the array in column-major order."""
    return cp.ascontiguousarray(x.T).T


def _reversed(rng: Rng, x: Any) -> Any:
    """Return a view with a negative stride."""
    axis = int(rng.integers(x.ndim))
    reverse = (slice(None),) * axis + (slice(None, None, -1),)
    return cp.ascontiguousarray(x[reverse])[reverse]


def _repeated_rows(rng: Rng, x: Any) -> Any:
    """Return a view with a stride of 0."""
    return cp.broadcast_to(x[:1], x.shape)


def _offset(rng: Rng, x: Any) -> Any:
    """Return a contiguous view that does not begin at the start of an allocation."""
    shift = int(rng.integers(1, 9))
    buffer = cp.empty(x.size + shift, x.dtype)
    view = buffer[shift:].reshape(x.shape)
    view[...] = x
    return view


def _misaligned(rng: Rng, x: Any) -> Any:
    """Return an array whose elements are not aligned to their size."""
    memory = cp.cuda.alloc(x.nbytes + x.itemsize) + int(rng.integers(1, max(2, x.itemsize)))
    flat = cp.ascontiguousarray(x).reshape(-1).view("uint8")
    cp.ndarray(x.nbytes, "uint8", memory)[...] = flat
    return cp.ndarray(x.shape, x.dtype, memory)


def _other_dtype(rng: Rng, x: Any) -> Any:
    names = ("float32", "float16", "float64", "int32", "int64", "uint8", "bool", "complex64")
    return x.astype(_pick(rng, names))


def _other_shape(rng: Rng, x: Any) -> Any:
    changes = (
        lambda: x[..., :-1],
        lambda: x[:-1],
        lambda: x[None],
        x.ravel,
        lambda: x[..., None],
        lambda: cp.concatenate([x, x], axis=int(rng.integers(x.ndim))),
        lambda: x[:0],
        lambda: x.ravel()[0],
    )
    return _pick(rng, changes)()


def _on_the_host(rng: Rng, x: Any) -> Any:
    host = cp.asnumpy(x)
    return _pick(rng, (host, host.tolist(), np.ma.masked_array(host), None, "text", 3))


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

    def check(self) -> None:
        sides = cp.concatenate([self.buffer[: self.first], self.buffer[self.end :]])
        if not bool((sides == 0xA5).all()):
            raise Difference("bytes next to the output were written")


def _add_out(rng: Rng, op: str, arrays: Arrays, options: dict[str, Any]) -> Guarded | None:
    """Sometimes pass `out=`: a new array, an input, or an array that overlaps an input."""
    first = next(iter(arrays.values()), None)
    if isinstance(first, cp.ndarray) and first.data.ptr % first.itemsize:
        return None  # CuPy itself cannot copy a misaligned array
    has_out = "out" in inspect.signature(getattr(ops, op)).parameters
    if not has_out or not isinstance(first, cp.ndarray) or first.size == 0 or rng.random() < 0.4:
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
    buffer = cp.full(size + 2 * edge, 0xA5, "uint8")
    out = buffer[edge : edge + size].view(dtype).reshape(shape)
    return Guarded(buffer, edge, edge + size), out


# --- inputs --------------------------------------------------------------------------------------


def _pick(rng: Rng, values: Any) -> Any:
    return values[int(rng.integers(len(values)))]


def _size(rng: Rng, most: int = 320) -> int:
    return int(_pick(rng, [n for n in SIZES if n <= most]))


def _wide_size(rng: Rng) -> int:
    """Return the channels of a LayerNorm: more than a few, whose variance could be almost 0."""
    return _size(rng) + 8


def _rows(rng: Rng) -> tuple[int, ...]:
    """Return the axes before the last one."""
    return (_size(rng, 65),) if rng.random() < 0.5 else (_size(rng, 5), _size(rng, 33))


def _normal(rng: Rng, *shape: int, dtype: str = "float32") -> Any:
    return (rng.standard_normal(shape) + 0.5).astype(FLOATS[dtype])


def _uploaded(value: Any) -> Any:
    if isinstance(value, WeightMatrix):
        scale = None if value.scale is None else cp.asarray(value.scale)
        return replace(value, data=cp.asarray(value.data), scale=scale)
    if isinstance(value, TwoPartMatrix):
        return TwoPartMatrix(cp.asarray(value.parts), cp.asarray(value.scale), value.shape)
    return cp.asarray(value) if isinstance(value, np.ndarray) else value


def _on_host(value: Any) -> Any:
    """Return a copy on the host of the numbers that the call receives."""
    if isinstance(value, WeightMatrix):
        scale = None if value.scale is None else cp.asnumpy(value.scale)
        return replace(value, data=cp.asnumpy(value.data), scale=scale)
    if isinstance(value, TwoPartMatrix):
        return cp.asnumpy(value.joined())
    return cp.asnumpy(value).copy() if isinstance(value, cp.ndarray) else value


def _wide(value: Any) -> Any:
    """Convert floats to float64."""
    is_float = isinstance(value, np.ndarray) and value.dtype.kind in "fV"
    return value.astype(np.float64) if is_float else value


def by_reference(name: str) -> Truth:
    """Return the function of the reference in float64, with the options that it accepts."""
    function = getattr(reference, name)
    known = inspect.signature(function).parameters

    def truth(arrays: Arrays, options: dict[str, Any]) -> list[Any]:
        accepted = {key: value for key, value in options.items() if key in known}
        wide = {key: _wide(value) for key, value in arrays.items() if key in known}
        result = function(**wide, **accepted)
        return list(result) if isinstance(result, tuple) else [result]

    return truth


def _dtype(rng: Rng, narrow: float = 0.5) -> str:
    return _pick(rng, ("float16", "bfloat16")) if rng.random() < narrow else "float32"


def _matrix(rng: Rng, K: int, N: int, dtype: str, layout: str) -> WeightMatrix:
    shape = (K, N) if layout == "KN" else (N, K)
    return WeightMatrix.quantize(_normal(rng, *shape), dtype, layout)


def _layernorm(rng: Rng) -> Call:
    C, dtype = _wide_size(rng), _dtype(rng, 0.3)
    affine = _pick(rng, (dtype, "float32"))
    arrays = {
        "x": _normal(rng, *_rows(rng), C, dtype=dtype),
        "gamma": _normal(rng, C, dtype=affine),
        "beta": _normal(rng, C, dtype=affine),
    }
    options = {
        "eps": _pick(rng, (1e-5, 1e-12, 0.1)),
        "variant": _pick(rng, (None, None, 1, 2, 3, 4, 5, 6, "narrow")),
        "block": _pick(rng, BLOCKS),
        "stats": bool(rng.random() < 0.2),
    }

    def truth(host: Arrays, options: dict[str, Any]) -> list[Any]:
        wide = {name: _wide(value) for name, value in host.items()}
        out = [reference.layernorm(**wide, eps=options["eps"])]
        stats = reference.layernorm_stats(wide["x"], options["eps"])
        return [*out, *stats] if options["stats"] else out

    return Call("layernorm", arrays, options, truth)


def _matmul_bias(rng: Rng) -> Call:
    K, N = _size(rng), _size(rng)
    bias = _normal(rng, N) if rng.random() < 0.7 else None
    arrays = {"a": _normal(rng, *_rows(rng), K), "w": _normal(rng, K, N), "bias": bias}
    variant = _pick(rng, ("naive", "tiled", "coarsened", "registers"))
    return Call("matmul_bias", arrays, {"variant": variant}, by_reference("matmul_bias"))


def _attention(rng: Rng) -> Call:
    n_head, dtype = _pick(rng, HEADS), _dtype(rng)
    C = n_head * (64 if dtype != "float32" else _pick(rng, HEAD_SIZES))
    variants = (None, "mma", "hopper") if dtype != "float32" else (None, "mha", "naive", "online")
    options = {
        "n_head": n_head,
        "causal": bool(rng.integers(2)),
        "variant": _pick(rng, variants),
        "block": _pick(rng, BLOCKS) if rng.random() < 0.2 else None,
    }
    arrays = {"qkv": _normal(rng, *_rows(rng), 3 * C, dtype=dtype)}
    return Call("attention", arrays, options, by_reference("attention"))


def _attention_packed_rows(rng: Rng) -> Call:
    """`attention` over sequences of different lengths in consecutive rows."""
    n_head, lengths = _pick(rng, HEADS), rng.integers(0, 70, rng.integers(1, 5))
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    rows = int(ends[-1]) + 1
    options = {"n_head": n_head, "causal": bool(rng.integers(2)), "cu_seqlens": cp.asarray(ends)}
    options["max_seqlen"] = int(max(1, lengths.max()))
    arrays = {"qkv": _normal(rng, rows, 3 * 64 * n_head, dtype=_pick(rng, ("float16", "bfloat16")))}

    def truth(host: Arrays, options: dict[str, Any]) -> list[Any]:
        qkv = _wide(host["qkv"])
        out = np.full((len(qkv), qkv.shape[1] // 3), np.nan)
        for first, end in pairwise(ends):
            if end > first:
                part = qkv[first:end]
                out[first:end] = reference.attention(part, options["n_head"], options["causal"])
        return [out]

    return Call("attention", arrays, options, truth, trusted=True)


def _attention_cached(rng: Rng) -> Call:
    n_head = _pick(rng, HEADS)
    C, T, start = n_head * _pick(rng, HEAD_SIZES), _size(rng, 65), int(rng.integers(0, 90))
    kept = _dtype(rng)
    keys = start + T + int(rng.integers(0, 3))
    arrays = {
        "q": _normal(rng, T, C),
        "k": _normal(rng, keys, C, dtype=kept),
        "v": _normal(rng, keys, C, dtype=kept),
    }
    options = {"start": start, "n_head": n_head}
    return Call("attention_cached", arrays, options, by_reference("attention_cached"))


def _attention_split(rng: Rng) -> Call:
    n_head, B, n_ctx = _pick(rng, HEADS), _size(rng, 17), _size(rng)
    C, kept = n_head * _pick(rng, HEAD_SIZES), _dtype(rng)
    arrays = {
        "q": _normal(rng, B, C),
        "k": _normal(rng, B, n_ctx, C, dtype=kept),
        "v": _normal(rng, B, n_ctx, C, dtype=kept),
        "row": rng.integers(0, B, B).astype(np.int32),
        "position": rng.integers(0, n_ctx, B).astype(np.int32),
    }

    def truth(host: Arrays, options: dict[str, Any]) -> list[Any]:
        q, k, v = (_wide(host[name]) for name in "qkv")
        rows = [
            reference.attention_cached(q[m : m + 1], k[b], v[b], int(p), options["n_head"])[0]
            for m, (b, p) in enumerate(zip(host["row"], host["position"], strict=True))
        ]
        return [np.stack(rows)]

    return Call("attention_split", arrays, {"n_head": n_head}, truth, trusted=True)


def _attention_packed(rng: Rng) -> Call:
    n_head, B, n_ctx = _pick(rng, HEADS), int(rng.integers(1, 4)), 96
    C, kept = n_head * _pick(rng, HEAD_SIZES), _dtype(rng)
    lengths = rng.integers(0, 40, B)
    start = rng.integers(0, n_ctx - 40, B).astype(np.int32)
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    arrays = {
        "qkv": _normal(rng, int(max(1, ends[-1])), 3 * C, dtype=_pick(rng, ("float32", kept))),
        "k": _normal(rng, B, n_ctx, C, dtype=kept),
        "v": _normal(rng, B, n_ctx, C, dtype=kept),
        "cu_seqlens": ends,
        "start": start,
    }
    options = {"n_head": n_head, "longest": int(max(1, lengths.max()))}

    def truth(host: Arrays, options: dict[str, Any]) -> list[Any]:
        qkv, k, v = (_wide(host[name]) for name in ("qkv", "k", "v"))
        out = np.full((len(qkv), k.shape[-1]), np.nan)
        for b, (first, end) in enumerate(pairwise(ends)):
            if end > first:
                q = qkv[first:end, : k.shape[-1]]
                at = int(host["start"][b])
                out[first:end] = reference.attention_cached(q, k[b], v[b], at, options["n_head"])
        return [out]

    return Call("attention_packed", arrays, options, truth, trusted=True)


def _kv_append(rng: Rng) -> Call:
    B, n_ctx, C, kept = _size(rng, 5), _size(rng, 33), _size(rng, 129), _dtype(rng)
    places = rng.permutation(B * n_ctx)[: rng.integers(1, B * n_ctx + 1)]
    row, position = (places // n_ctx).astype(np.int32), (places % n_ctx).astype(np.int32)
    row[0] += int(_pick(rng, (0, 0, B, -B)))  # rows outside the cache are ignored
    arrays = {
        "qkv": _normal(rng, len(places), 3 * C, dtype=_pick(rng, ("float32", kept))),
        "k": _normal(rng, B, n_ctx, C, dtype=kept),
        "v": _normal(rng, B, n_ctx, C, dtype=kept),
        "row": row,
        "position": position,
    }

    def truth(host: Arrays, options: dict[str, Any]) -> list[Any]:
        k, v = host["k"].copy(), host["v"].copy()
        C = k.shape[-1]
        for n, (b, t) in enumerate(zip(host["row"], host["position"], strict=True)):
            if 0 <= b < k.shape[0] and 0 <= t < k.shape[1]:
                k[b, t] = host["qkv"][n, C : 2 * C].astype(k.dtype)
                v[b, t] = host["qkv"][n, 2 * C :].astype(v.dtype)
        return [k.astype(np.float64), v.astype(np.float64)]

    return Call("kv_append", arrays, {}, truth, trusted=True)


def _pair(name: str) -> Callable[[Rng], Call]:
    """`add`, `gelu` and `silu_mul`."""

    def build(rng: Rng) -> Call:
        shape = (*_rows(rng), _size(rng))
        names = {"add": ("a", "b"), "silu_mul": ("gate", "up")}.get(name, ("x",))
        arrays = {each: _normal(rng, *shape) for each in names}
        return Call(name, arrays, {}, by_reference(name))

    return build


def _layernorm_gelu(rng: Rng) -> Call:
    C = _wide_size(rng)
    affine = rng.random() < 0.5
    arrays = {
        "x": _normal(rng, *_rows(rng), C),
        "gamma": _normal(rng, C) if affine else None,
        "beta": _normal(rng, C) if affine else None,
    }
    options = {
        "eps": _pick(rng, (1e-5, 0.1)),
        "variant": _pick(rng, ("rows", "rows", "baseline", "optimized")),
        "block": _pick(rng, BLOCKS),
    }
    return Call("layernorm_gelu", arrays, options, by_reference("layernorm_gelu"))


def _ids(rng: Rng, shape: Any, V: int) -> Any:
    """Return ids, sometimes with ids outside the vocabulary."""
    low, high = ((0, V), (0, V), (-2, V + 2))[int(rng.integers(3))]
    return rng.integers(low, high, shape).astype(np.int32)


def _encoder(rng: Rng) -> Call:
    V, n_ctx, C, shape = _size(rng), _size(rng), _size(rng), _rows(rng)
    shape = (*shape[:-1], min(shape[-1], n_ctx))
    arrays = {"ids": _ids(rng, shape, V), "wte": _normal(rng, V, C), "wpe": _normal(rng, n_ctx, C)}
    options = {"variant": _pick(rng, (None, 1, 2, 3)), "block": _pick(rng, BLOCKS)}

    def truth(host: Arrays, options: dict[str, Any]) -> list[Any]:
        ids, wte, wpe = (_wide(np.asarray(host[name])) for name in ("ids", "wte", "wpe"))
        known = (ids >= 0) & (ids < len(wte))
        out = reference.encoder(np.where(known, ids, 0), wte, wpe)
        return [np.where(known[..., None], out, np.nan)]

    return Call("encoder", arrays, options, truth)


def _encoder_rows(rng: Rng) -> Call:
    V, n_ctx, C, N = _size(rng), _size(rng), _size(rng), _size(rng)
    quantized = rng.random() < 0.5
    wte = _matrix(rng, C, V, _pick(rng, WEIGHTS), "NK") if quantized else _normal(rng, V, C)
    arrays = {
        "ids": _ids(rng, N, V),
        "positions": _ids(rng, N, n_ctx),
        "wte": wte,
        "wpe": _normal(rng, n_ctx, C),
    }

    def truth(host: Arrays, options: dict[str, Any]) -> list[Any]:
        ids, positions, wpe = host["ids"], host["positions"], _wide(host["wpe"])
        wte = host["wte"]
        V = wte.N if isinstance(wte, WeightMatrix) else len(wte)
        known = (ids >= 0) & (ids < V) & (positions >= 0) & (positions < len(wpe))
        at, place = np.where(known, ids, 0), np.where(known, positions, 0)
        out = reference.encoder_rows(at, place, _wide(wte), wpe)
        return [np.where(known[:, None], out, np.nan)]

    return Call("encoder_rows", arrays, {}, truth)


def _softmax(rng: Rng) -> Call:
    n, causal = _size(rng), bool(rng.integers(2))
    shape = (*_rows(rng)[:1], n, n) if causal else (*_rows(rng), n)
    options = {
        "causal": causal,
        "variant": _pick(rng, (None, *_variants("softmax"))),
        "block": _pick(rng, BLOCKS),
    }
    return Call("softmax", {"scores": _normal(rng, *shape)}, options, by_reference("softmax"))


def _trimat(rng: Rng) -> Call:
    B, T, NH, HS = _size(rng, 3), _size(rng, 129), _pick(rng, HEADS), _pick(rng, HEAD_SIZES)
    options = {
        "fill": _pick(rng, (None, 0.0, -1e4)),
        "variant": _pick(rng, (None, *_variants("trimat"))),
        "block": _pick(rng, BLOCKS) if rng.random() < 0.3 else None,
    }
    arrays = {"qkv": _normal(rng, B, T, 3, NH, HS)}
    return Call("trimat", arrays, options, by_reference("trimat"))


def _rmsnorm(rng: Rng) -> Call:
    C, dtype = _size(rng), _dtype(rng)
    arrays = {
        "x": _normal(rng, *_rows(rng), C, dtype=dtype),
        "weight": _normal(rng, C, dtype=dtype),
    }
    options: dict[str, Any] = {"eps": _pick(rng, (1e-6, 1e-5))}
    options |= {"variant": "stream"} if rng.random() < 0.3 else {"block": _pick(rng, BLOCKS)}
    return Call("rmsnorm", arrays, options, by_reference("rmsnorm"))


def _rope(rng: Rng) -> Call:
    shape = (*_rows(rng), _pick(rng, HEADS), 2 * _size(rng, 64))
    arrays = {"x": _normal(rng, *shape, dtype=_dtype(rng))}
    options = {
        "start": int(_pick(rng, (0, 1, 1000))),
        "theta": _pick(rng, (1e4, 500000.0, 1)),
        "half_split": bool(rng.integers(2)),
        "block": _pick(rng, BLOCKS),
    }
    return Call("rope", arrays, options, by_reference("rope"))


def _llama_weights(rng: Rng, K: int, N: int, dtype: str) -> Any:
    """Return an array (K, N), or a WeightMatrix of the same dtype or FP8."""
    kinds = (dtype, "float8_e5m2", "float8_e4m3fn") if dtype == "float16" else (dtype,)
    if rng.random() < 0.3:
        return _normal(rng, K, N, dtype=dtype)
    return _matrix(rng, K, N, _pick(rng, kinds), _pick(rng, ("KN", "NK")))


def _rmsnorm_matmul(rng: Rng) -> Call:
    dtype, K, head_dim = _dtype(rng, 0.7), 8 * _size(rng, 33), _pick(rng, (None, 16, 64, 128))
    N = (head_dim or 8) * _size(rng, 5)
    arrays = {
        "x": _normal(rng, *_rows(rng), K, dtype=dtype),
        "gamma": _normal(rng, K, dtype=dtype),
        "w": _llama_weights(rng, K, N, dtype),
    }
    options = {
        "eps": 1e-6,
        "head_dim": head_dim,
        "start": int(_pick(rng, (0, 7))),
        "half_split": bool(rng.integers(2)),
        "variant": _pick(rng, (None, *_variants("rmsnorm_matmul"))),
    }
    return Call("rmsnorm_matmul", arrays, options, by_reference("rmsnorm_matmul"))


def _rmsnorm_ffn(rng: Rng) -> Call:
    dtype, K, N = _dtype(rng, 0.7), 8 * _size(rng, 33), 8 * _size(rng, 33)
    rows = _rows(rng)
    arrays = {
        "x": _normal(rng, *rows, K, dtype=dtype),
        "gamma": _normal(rng, K, dtype=dtype),
        "w1": (first := _llama_weights(rng, K, N, dtype)),
        "w3": first if rng.random() < 0.1 else _like(rng, first, K, N),
        "residual": _normal(rng, *rows, K, dtype=dtype) if rng.random() < 0.4 else None,
    }
    options = {"variant": _pick(rng, (None, *_variants("rmsnorm_ffn")))}
    return Call("rmsnorm_ffn", arrays, options, by_reference("rmsnorm_ffn"))


def _like(rng: Rng, w: Any, K: int, N: int) -> Any:
    if isinstance(w, WeightMatrix):
        return _matrix(rng, K, N, w.dtype, w.layout)
    return _normal(rng, K, N, dtype=w.dtype.name)


def _to_fp8(rng: Rng) -> Call:
    N, K, layout = _size(rng), _size(rng), _pick(rng, ("KN", "NK"))
    shape = (K, N) if layout == "KN" else (N, K)
    x = (10.0 ** rng.uniform(-8, 6, shape) * rng.choice([-1, 1], shape)).astype(np.float32)
    scale = rng.uniform(0.01, 100, N).astype(np.float32) if rng.random() < 0.4 else None
    dtype = _dtype(rng)
    with np.errstate(over="ignore"):
        arrays = {"x": x.astype(FLOATS[dtype])}
    options = {
        "format": _pick(rng, ("float8_e5m2", "float8_e4m3fn")),
        "saturate": bool(rng.integers(2)),
        "scale": None if scale is None else cp.asarray(scale),
        "layout": layout,
        "block": _pick(rng, BLOCKS),
    }

    def truth(host: Arrays, options: dict[str, Any]) -> list[Any]:
        found = {k: options[k] for k in ("format", "saturate", "layout")}
        on_host = None if options["scale"] is None else cp.asnumpy(options["scale"])
        with np.errstate(all="ignore"):
            return [reference.to_fp8(host["x"], scale=on_host, **found)]

    return Call("to_fp8", arrays, options, truth)


def _linear(rng: Rng) -> Call:
    K, N, rows = _size(rng), _size(rng), _rows(rng)
    norm = rng.random() < 0.4
    arrays = {
        "x": _normal(rng, *rows, K),
        "w": _matrix(rng, K, N, _pick(rng, WEIGHTS), "NK"),
        "bias": _normal(rng, N) if rng.random() < 0.6 else None,
        "gamma": _normal(rng, K) if norm else None,
        "beta": _normal(rng, K) if norm else None,
        "residual": _normal(rng, *rows, N) if rng.random() < 0.4 else None,
    }
    options = {
        "gelu": bool(rng.integers(2)),
        "eps": 1e-5,
        "variant": _pick(rng, (None, *_variants("linear"))),
    }
    return Call("linear", arrays, options, by_reference("linear"))


def _gemm(rng: Rng) -> Call:
    dtype, K, N, rows = (
        _pick(rng, ("float16", "bfloat16")),
        8 * _size(rng, 65),
        8 * _size(rng, 65),
        _rows(rng),
    )
    wide = rng.random() < 0.3
    arrays = {
        "a": _normal(rng, *rows, K, dtype=dtype),
        "w": _matrix(rng, K, N, dtype, "NK"),
        "bias": _normal(rng, N) if rng.random() < 0.6 else None,
        "residual": _normal(rng, *rows, N, dtype="float32" if wide else dtype)
        if rng.random() < 0.4
        else None,
    }
    options = {
        "gelu": bool(rng.integers(2)),
        "split_k": bool(rng.integers(2)),
        "dtype": "float32" if wide else None,
        "variant": _pick(rng, (None, "mma", "hopper")),
    }
    return Call("gemm", arrays, options, by_reference("gemm"))


def _gemm_split(rng: Rng) -> Call:
    """`gemm` with the accuracy of float32, on two-part matrices."""
    K, N, rows = 8 * _size(rng, 65), 8 * _size(rng, 65), _rows(rng)
    w = cp.asarray(_normal(rng, N, K))
    split = TwoPartMatrix.from_float32(w)
    host = cp.asnumpy(split.joined()).T
    arrays = {
        "a": _normal(rng, *rows, K),
        "bias": _normal(rng, N) if rng.random() < 0.6 else None,
        "residual": _normal(rng, *rows, N) if rng.random() < 0.4 else None,
    }
    options = {"w": split, "gelu": bool(rng.integers(2)), "variant": _pick(rng, (None, "mma"))}

    def truth(found: Arrays, options: dict[str, Any]) -> list[Any]:
        wide = {name: _wide(value) for name, value in found.items()}
        return [reference.gemm(w=host.astype(np.float64), gelu=options["gelu"], **wide)]

    return Call("gemm", arrays, options, truth)


def _split(rng: Rng) -> Call:
    x = _normal(rng, *_rows(rng), _size(rng)) * np.float32(10.0 ** rng.integers(-20, 20))

    def truth(host: Arrays, options: dict[str, Any]) -> list[Any]:
        found = reference.joined(*reference.two_part(host["x"])).reshape(host["x"].shape)
        return [found.astype(np.float64)]

    return Call("two_part", {"x": x}, {}, truth)


def _sample_token(rng: Rng) -> Call:
    B, V = _size(rng, 9), _size(rng)
    sampling = Sampling(
        temperature=float(_pick(rng, (0, 0.5, 1, 2))),
        top_k=int(_pick(rng, (0, 1, 5))),
        top_p=float(_pick(rng, (1, 0.9, 0.1))),
        min_p=float(_pick(rng, (0, 0.05))),
        seed=int(rng.integers(2**62)),
    )
    logits = (3 * rng.standard_normal((B, V))).astype(np.float32)

    # exp may differ in its last bit, which changes one draw in millions
    options = {"sampling": sampling, "step": 3}
    return Call("sample_token", {"logits": logits}, options, by_reference("sample_token"))


def _log_likelihood(rng: Rng) -> Call:
    V, rows = _size(rng), _rows(rng)
    arrays = {"logits": _normal(rng, *rows, V), "targets": _ids(rng, rows, V)}
    return Call("log_likelihood", arrays, {}, by_reference("log_likelihood"))


def _mark_seen(rng: Rng) -> Call:
    B, V, N = _size(rng, 9), _size(rng), _size(rng)
    arrays = {
        "tokens": _ids(rng, N, V),
        "rows": _ids(rng, N, B),
        "seen": rng.integers(0, 2, (B, V)).astype(np.uint8),
    }

    def truth(host: Arrays, options: dict[str, Any]) -> list[Any]:
        seen = host["seen"].copy()
        for token, row in zip(host["tokens"], host["rows"], strict=True):
            if 0 <= row < len(seen) and 0 <= token < seen.shape[1]:
                seen[row, token] = 1
        return [seen]

    return Call("mark_seen", arrays, {}, truth)


def _variants(op: str) -> tuple[str, ...]:
    from gpt2block.ops.registry import OPERATIONS  # noqa: PLC0415

    return tuple(variant.name for variant in OPERATIONS[op].variants)


NAN_DEFINED = ("encoder", "encoder_rows", "log_likelihood")  # NaN for ids that are out of range
IN_PLACE: Mapping[str, tuple[str, ...]] = {"kv_append": ("k", "v"), "mark_seen": ("seen",)}
BUILDERS: Mapping[str, Callable[[Rng], Call]] = {
    "layernorm": _layernorm,
    "matmul_bias": _matmul_bias,
    "attention": _attention,
    "attention, packed rows": _attention_packed_rows,
    "attention_cached": _attention_cached,
    "attention_packed": _attention_packed,
    "attention_split": _attention_split,
    "kv_append": _kv_append,
    "add": _pair("add"),
    "gelu": _pair("gelu"),
    "silu_mul": _pair("silu_mul"),
    "layernorm_gelu": _layernorm_gelu,
    "encoder": _encoder,
    "encoder_rows": _encoder_rows,
    "softmax": _softmax,
    "trimat": _trimat,
    "rmsnorm": _rmsnorm,
    "rope": _rope,
    "rmsnorm_matmul": _rmsnorm_matmul,
    "rmsnorm_ffn": _rmsnorm_ffn,
    "to_fp8": _to_fp8,
    "linear": _linear,
    "gemm": _gemm,
    "gemm, split": _gemm_split,
    "two_part": _split,
    "sample_token": _sample_token,
    "log_likelihood": _log_likelihood,
    "mark_seen": _mark_seen,
}

AREA = Area("ops", 1.0, case, memory=None)

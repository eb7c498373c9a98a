"""Random valid calls of every function of `gpt2block.ops`, and their exact results.

Arrays are drawn by the operation's contract and options by name; a `Rule` has what these do not
say, such as whole heads, and integers that belong together.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from gpt2block import ops, reference
from gpt2block.array_checks import FLOATS
from gpt2block.contract import MATRICES, Contract, Entry
from gpt2block.cuda import cupy
from gpt2block.ops.call import FIXED
from gpt2block.ops.registry import OPERATIONS, STEPS
from gpt2block.sampling import Sampling
from gpt2block.weights.matrix import WeightMatrix
from gpt2block.weights.two_part import TwoPartMatrix

Rng = np.random.Generator
Arrays = dict[str, Any]  # a CuPy or NumPy array, WeightMatrix, TwoPartMatrix or None by its name
Known = dict[Any, Any]  # sizes, dtypes, arrays and options of a call
Truth = Callable[[Arrays, dict[str, Any]], "list[Any]"]  # (host arrays, options) → float64 arrays

SIZES = (1, 2, 3, 5, 8, 16, 17, 32, 33, 64, 65, 96, 128, 129, 200, 256, 320)
HEADS = (1, 2, 3)
HEAD_SIZES = (4, 8, 48, 64, 128)
WEIGHTS = ("float32", "float16", "bfloat16", "float8_e5m2", "float8_e4m3fn")
OPTIONS: Mapping[str, tuple[Any, ...]] = {  # valid values, by name in every operation
    "block": (*[None] * 6, 32, 64, 128, 256, 512, 1024),
    "eps": (1e-6, 1e-5, 0.1),
    "fill": (None, 0.0, -1e4),
    "format": ("float8_e5m2", "float8_e4m3fn"),
    "start": (0, 1, 7, 1000),
    "theta": (1e4, 500000.0, 1),
    **dict.fromkeys(
        ("causal", "gelu", "half_split", "saturate", "split_k", "stats"), (False, True)
    ),
}


class Call(NamedTuple):
    """An operation with valid inputs and options."""

    op: str
    arrays: Arrays  # in the order of the function's parameters
    options: dict[str, Any]
    truth: Truth
    trusted: bool = False  # values in device memory determine the addresses that the kernel reads


def pick(rng: Rng, values: Any) -> Any:
    return values[int(rng.integers(len(values)))]


def _size(rng: Rng, most: int = 320) -> int:
    return int(pick(rng, [n for n in SIZES if n <= most]))


def _rows(rng: Rng) -> tuple[int, ...]:
    """Return the axes before the last one."""
    return (_size(rng, 65),) if rng.random() < 0.5 else (_size(rng, 5), _size(rng, 33))


def _normal(rng: Rng, *shape: int, dtype: str = "float32") -> Any:
    return (rng.standard_normal(shape) + 0.5).astype(FLOATS[dtype])


def _wide(value: Any) -> Any:
    """Convert floats to float64."""
    is_float = isinstance(value, np.ndarray) and value.dtype.kind in "fV"
    return value.astype(np.float64) if is_float else value


def _dtype(rng: Rng, narrow: float = 0.5) -> str:
    return pick(rng, ("float16", "bfloat16")) if rng.random() < narrow else "float32"


def _ids(rng: Rng, shape: Any, V: int) -> Any:
    """Return ids, sometimes with ids outside the vocabulary."""
    low, high = ((0, V), (0, V), (-2, V + 2))[int(rng.integers(3))]
    return rng.integers(low, high, shape).astype(np.int32)


# --- calls by contract ---------------------------------------------------------------------------


class Rule(NamedTuple):
    """What a contract does not say about the valid calls of an operation.

    `given` draws sizes by letter, dtypes by kind, arrays and options by name; `drawn_call` draws
    what it leaves out.
    """

    op: str
    given: Callable[[Rng], Known] = lambda rng: {}
    truth: Truth | None = None  # None: the reference in float64
    trusted: bool = False


def drawn_call(rng: Rng, rule: Rule) -> Call:
    """Draw the arrays of the contract, and the options."""
    known = rule.given(rng)
    operation = {**OPERATIONS, **STEPS}.get(rule.op)
    contract = operation.contract if operation else MARK_SEEN
    entries = {entry.name: entry for entry in contract.inputs}
    arrays: Arrays = {}
    options: dict[str, Any] = {}
    for name in inspect.signature(getattr(ops, rule.op)).parameters:
        if name in entries and name not in (operation.keywords if operation else ()):
            arrays[name] = known[name] if name in known else _drawn(rng, entries[name], known)
        elif name in known:
            options[name] = known[name]
        elif name in OPTIONS:
            options[name] = pick(rng, OPTIONS[name])
        elif name == "variant" and operation:
            options[name] = pick(rng, (None, *(each.name for each in operation.variants)))
    return Call(rule.op, arrays, options, rule.truth or by_reference(rule.op), rule.trusted)


def _drawn(rng: Rng, entry: Entry, known: Known) -> Any:
    """Draw an array, or None. What it draws for the first time is added to known."""
    alike = entry.kind, entry.axes  # such as gamma and beta, which are present together
    if entry.optional and not known.setdefault(alike, bool(rng.integers(2))):
        return None
    for axis in entry.axes:
        if axis == "..." and axis not in known:
            known[axis] = pick(rng, ((), (_size(rng, 5),))) if "T" in entry.axes else _rows(rng)
        elif axis.isalpha() and axis not in known:
            known[axis] = _size(rng, 65 if axis == "T" else 320)
    shape = entry.shape(known)
    if entry.kind in (*MATRICES, "table"):
        return _weights(rng, entry.kind, shape, known)
    kind = "any" if entry.kind in ("strided", "mixed") else entry.kind
    dtype = FIXED.get(kind) or known.setdefault(kind, _dtype(rng))
    return _normal(rng, *shape, dtype=dtype)


def _weights(rng: Rng, kind: str, shape: tuple[int, ...], known: Known) -> Any:
    """Draw a matrix. All matrices of a call have the same dtype and layout."""
    if "weights" not in known:
        known["weights"] = _storage(rng, kind, known.get("any", "float32"))
    dtype, layout = known["weights"]
    if layout is None:
        return _normal(rng, *shape, dtype=dtype)
    in_memory = shape[::-1] if layout == "NK" and kind != "table" else shape
    return WeightMatrix.quantize(_normal(rng, *in_memory), dtype, layout)


def _storage(rng: Rng, kind: str, dtype: str) -> tuple[str, str | None]:
    """The dtype and layout of matrices; None for an array. dtype: that of the activations."""
    if kind == "rows":
        return pick(rng, WEIGHTS), "NK"
    if rng.random() < 0.4:
        return dtype, None
    if kind == "table":
        return pick(rng, WEIGHTS), "NK"
    fp8 = WEIGHTS[3:] if dtype == "float16" else ()
    return pick(rng, (dtype, *fp8)), pick(rng, ("KN", "NK"))


def by_reference(name: str) -> Truth:
    """Return the function of the reference in float64, with the options that it accepts."""

    def truth(arrays: Arrays, options: dict[str, Any]) -> list[Any]:
        function = getattr(reference, name)
        known = inspect.signature(function).parameters
        accepted = {key: value for key, value in options.items() if key in known}
        wide = {key: _wide(value) for key, value in arrays.items() if key in known}
        result = function(**wide, **accepted)
        return list(result) if isinstance(result, tuple) else [result]

    return truth


# --- what is special -----------------------------------------------------------------------------


def _layernorm(rng: Rng) -> Known:
    """More than a few channels, whose variance could be almost 0."""
    eps, dtype = pick(rng, (1e-5, 1e-12, 0.1)), _dtype(rng, 0.3)
    other = pick(rng, (dtype, "float32"))  # of gamma and beta
    return {"C": _size(rng) + 8, "eps": eps, "any": dtype, "other": other}


def _layernorm_truth(host: Arrays, options: dict[str, Any]) -> list[Any]:
    out = by_reference("layernorm")(host, options)
    if options["stats"]:
        out += reference.layernorm_stats(_wide(host["x"]), options["eps"])
    return out


def _attention(rng: Rng) -> Known:
    n_head, dtype = pick(rng, HEADS), _dtype(rng)
    HS = 64 if dtype != "float32" else pick(rng, HEAD_SIZES)
    variants = (None, "mma", "hopper") if dtype != "float32" else (None, "mha", "naive", "online")
    return {"n_head": n_head, "any": dtype, "W": 3 * n_head * HS, "variant": pick(rng, variants)}


def _sequences(rng: Rng, count: int, longest: int) -> tuple[Any, Any]:
    """Return the lengths of sequences, at least one of which has rows, and cu_seqlens."""
    lengths = rng.integers(0, longest, count)
    lengths[-1] += not lengths.any()
    return lengths, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def _attention_varlen(rng: Rng) -> Known:
    lengths, ends = _sequences(rng, int(rng.integers(1, 5)), 70)
    n_head, dtype = pick(rng, HEADS), pick(rng, ("float16", "bfloat16"))
    return {
        "n_head": n_head,
        "qkv": _normal(rng, int(ends[-1]) + 1, 3 * 64 * n_head, dtype=dtype),
        "cu_seqlens": cupy.asarray(ends),
        "max_seqlen": int(lengths.max()),
        "variant": None,
        "block": None,
    }


def _attention_varlen_truth(host: Arrays, options: dict[str, Any]) -> list[Any]:
    ends = cupy.asnumpy(options["cu_seqlens"])
    (out,) = by_reference("attention_varlen")(host, options | {"cu_seqlens": ends})
    out[ends[-1] :] = np.nan  # rows of no sequence
    return [out]


def _kv_cache(rng: Rng, B: int, n_ctx: int) -> Known:
    """A kv_cache, and q or qkv of the same heads in float32 or its dtype."""
    n_head, kept = pick(rng, HEADS), _dtype(rng)
    C = n_head * pick(rng, HEAD_SIZES)
    sizes = {"B": B, "P": n_ctx, "C": C, "Q": C, "W": 3 * C}
    return {**sizes, "n_head": n_head, "kv": kept, "any": pick(rng, ("float32", kept))}


def _attention_cached(rng: Rng) -> Known:
    T, start = _size(rng, 65), int(rng.integers(0, 90))
    keys = start + T + int(rng.integers(0, 3))
    return _kv_cache(rng, 1, keys) | {"T": T, "start": start}


def _attention_split(rng: Rng) -> Known:
    B, n_ctx = _size(rng, 17), _size(rng)
    row, position = (rng.integers(0, most, B).astype(np.int32) for most in (B, n_ctx))
    return _kv_cache(rng, B, n_ctx) | {"M": B, "row": row, "position": position}


def _attention_packed(rng: Rng) -> Known:
    B, n_ctx = int(rng.integers(1, 4)), 96
    lengths, ends = _sequences(rng, B, 40)
    start = rng.integers(0, n_ctx - 40, B).astype(np.int32)
    found = {"N": int(ends[-1]), "cu_seqlens": ends, "start": start, "longest": int(lengths.max())}
    return _kv_cache(rng, B, n_ctx) | found


def _kv_append(rng: Rng) -> Known:
    B, n_ctx = _size(rng, 5), _size(rng, 33)
    places = rng.permutation(B * n_ctx)[: rng.integers(1, B * n_ctx + 1)]
    row, position = (places // n_ctx).astype(np.int32), (places % n_ctx).astype(np.int32)
    row[0] += int(pick(rng, (0, 0, B, -B)))  # rows outside the cache are ignored
    return _kv_cache(rng, B, n_ctx) | {"N": len(places), "row": row, "position": position}


def _kv_append_truth(host: Arrays, options: dict[str, Any]) -> list[Any]:
    k, v, row = host["k"].copy(), host["v"].copy(), host["row"]
    inside = (row >= 0) & (row < len(k))
    if inside.any():
        qkv, at = host["qkv"][inside], host["position"][inside]
        reference.kv_append(qkv, k, v, row[inside], at)
    return [k.astype(np.float64), v.astype(np.float64)]


def _encoder(rng: Rng) -> Known:
    V, P, rows = _size(rng), _size(rng), _rows(rng)
    return {"V": V, "P": P, "ids": _ids(rng, (*rows[:-1], min(rows[-1], P)), V)}


def _encoder_rows(rng: Rng) -> Known:
    V, P, N = _size(rng), _size(rng), _size(rng)
    return {"V": V, "P": P, "ids": _ids(rng, N, V), "positions": _ids(rng, N, P)}


def _encoder_truth(name: str) -> Truth:
    """NaN for ids, and positions, that are out of range."""

    def truth(host: Arrays, options: dict[str, Any]) -> list[Any]:
        wte, wpe = host["wte"], host["wpe"]
        ends = {"ids": wte.N if isinstance(wte, WeightMatrix) else len(wte)}
        if "positions" in host:
            ends["positions"] = 2**31 if wpe is None else len(wpe)
        inside = {key: (host[key] >= 0) & (host[key] < end) for key, end in ends.items()}
        places = {key: np.where(known, host[key], 0) for key, known in inside.items()}
        (out,) = by_reference(name)(host | places, {})
        return [np.where(np.all([*inside.values()], axis=0)[..., None], out, np.nan)]

    return truth


def _softmax(rng: Rng) -> Known:
    T, causal = _size(rng), bool(rng.integers(2))
    return {"T": T, "...": (*_rows(rng)[:1], T) if causal else _rows(rng), "causal": causal}


def _trimat(rng: Rng) -> Known:
    heads = {"NH": pick(rng, HEADS), "HS": pick(rng, HEAD_SIZES)}
    return {"B": _size(rng, 3), "T": _size(rng, 129), **heads}


def _rope(rng: Rng) -> Known:
    return {"H": pick(rng, HEADS), "D": 2 * _size(rng, 64), "any": _dtype(rng)}


def _rmsnorm_matmul(rng: Rng) -> Known:
    head_dim = pick(rng, (None, 16, 64, 128))
    sizes = {"K": 8 * _size(rng, 33), "N": (head_dim or 8) * _size(rng, 5)}
    return sizes | {"head_dim": head_dim, "any": _dtype(rng, 0.7)}


def _rmsnorm_ffn(rng: Rng) -> Known:
    known: Known = {"K": 8 * _size(rng, 33), "N": 8 * _size(rng, 33), "any": _dtype(rng, 0.7)}
    if rng.random() < 0.1:
        known["w1"] = known["w3"] = _weights(rng, "matrix", (known["K"], known["N"]), known)
    return known


def _to_fp8(rng: Rng) -> Known:
    N, K, layout = _size(rng), _size(rng), pick(rng, ("KN", "NK"))
    shape = (K, N) if layout == "KN" else (N, K)
    x = 10.0 ** rng.uniform(-8, 6, shape) * rng.choice([-1, 1], shape)
    scale = rng.uniform(0.01, 100, N).astype(np.float32)
    with np.errstate(over="ignore"):
        stored = x.astype(np.float32).astype(FLOATS[_dtype(rng)])
    found = {"x": stored, "layout": layout, "variant": None}
    return found | {"scale": cupy.asarray(scale) if rng.random() < 0.4 else None}


def _to_fp8_truth(host: Arrays, options: dict[str, Any]) -> list[Any]:
    found = {key: options[key] for key in ("format", "saturate", "layout")}
    scale = None if options["scale"] is None else cupy.asnumpy(options["scale"])
    with np.errstate(all="ignore"):
        return [reference.to_fp8(host["x"], scale=scale, **found)]


def _gemm(rng: Rng) -> Known:
    dtype, wide = pick(rng, ("float16", "bfloat16")), rng.random() < 0.3
    return {
        "K": 8 * _size(rng, 65),
        "N": 8 * _size(rng, 65),
        "any": dtype,
        "weights": (dtype, "NK"),
        "out_dtype": "float32" if wide else dtype,
        "dtype": "float32" if wide else None,
        "up": None,
    }


def _gemm_two_part(rng: Rng) -> Known:
    """`gemm` with the accuracy of float32, on two-part matrices."""
    K, N = 8 * _size(rng, 65), 8 * _size(rng, 65)
    w = TwoPartMatrix.from_float32(cupy.asarray(_normal(rng, N, K)))
    options = {"split_k": False, "variant": pick(rng, (None, "mma"))}
    return options | {"K": K, "N": N, "any": "float32", "out_dtype": "float32", "w": w, "up": None}


def _gemm_two_part_truth(host: Arrays, options: dict[str, Any]) -> list[Any]:
    return by_reference("gemm")(host | {"w": host["w"].T}, {"gelu": options["gelu"]})


def _two_part(rng: Rng) -> Known:
    scale = np.float32(10.0 ** rng.integers(-20, 20))
    return {"x": _normal(rng, *_rows(rng), _size(rng)) * scale}


def _two_part_truth(host: Arrays, options: dict[str, Any]) -> list[Any]:
    found = reference.joined(*reference.two_part(host["x"])).reshape(host["x"].shape)
    return [found.astype(np.float64)]


def _sample_token(rng: Rng) -> Known:
    """Random settings. exp may differ in its last bit, which changes one draw in millions."""
    sampling = Sampling(
        temperature=float(pick(rng, (0, 0.5, 1, 2))),
        top_k=int(pick(rng, (0, 1, 5))),
        top_p=float(pick(rng, (1, 0.9, 0.1))),
        min_p=float(pick(rng, (0, 0.05))),
        seed=int(rng.integers(2**62)),
    )
    logits = (3 * rng.standard_normal((_size(rng, 9), _size(rng)))).astype(np.float32)
    return {"logits": logits, "sampling": sampling, "step": 3}


def _log_likelihood(rng: Rng) -> Known:
    V, rows = _size(rng), _rows(rng)
    return {"...": rows, "V": V, "targets": _ids(rng, rows, V)}


def _mark_seen(rng: Rng) -> Known:
    B, V, N = _size(rng, 9), _size(rng), _size(rng)
    seen = rng.integers(0, 2, (B, V)).astype(np.uint8)
    return {"tokens": _ids(rng, N, V), "rows": _ids(rng, N, B), "seen": seen}


def _mark_seen_truth(host: Arrays, options: dict[str, Any]) -> list[Any]:
    seen = host["seen"].copy()
    for token, row in zip(host["tokens"], host["rows"], strict=True):
        if 0 <= row < len(seen) and 0 <= token < seen.shape[1]:
            seen[row, token] = 1
    return [seen]


MARK_SEEN = Contract.parse("tokens rows i32 N; seen u8 B V -> seen u8 B V")
RULES = (
    Rule("layernorm", _layernorm, _layernorm_truth),
    Rule("matmul_bias"),
    Rule("attention", _attention),
    Rule("attention", _attention_varlen, _attention_varlen_truth, trusted=True),
    Rule("attention_cached", _attention_cached),
    Rule("attention_packed", _attention_packed, trusted=True),
    Rule("attention_split", _attention_split, trusted=True),
    Rule("kv_append", _kv_append, _kv_append_truth, trusted=True),
    *(Rule(name) for name in ("add", "gelu", "silu_mul", "rmsnorm", "linear")),
    Rule("layernorm_gelu", lambda rng: {"C": _size(rng) + 8}),
    Rule("encoder", _encoder, _encoder_truth("encoder")),
    Rule("encoder_rows", _encoder_rows, _encoder_truth("encoder_rows")),
    Rule("softmax", _softmax),
    Rule("trimat", _trimat),
    Rule("rope", _rope),
    Rule("rmsnorm_matmul", _rmsnorm_matmul),
    Rule("rmsnorm_ffn", _rmsnorm_ffn),
    Rule("to_fp8", _to_fp8, _to_fp8_truth),
    Rule("gemm", _gemm),
    Rule("gemm", _gemm_two_part, _gemm_two_part_truth),
    Rule("two_part", _two_part, _two_part_truth),
    Rule("sample_token", _sample_token),
    Rule("log_likelihood", _log_likelihood),
    Rule("mark_seen", _mark_seen, _mark_seen_truth),
)

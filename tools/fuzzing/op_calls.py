"""Random valid calls of every function of `gpt2block.ops`, and their exact results.

Arrays are drawn by the operation's contract, and options by name. A `Rule` adds constraints that a
contract does not state, such as whole heads or consistent integers. A `Draw` chooses sizes and
dtypes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from fuzzing import Rng
from gpt2block import ops, reference
from gpt2block.checks import FLOATS
from gpt2block.contract import MATRICES, Entry
from gpt2block.cuda import cupy
from gpt2block.ops.call import FIXED
from gpt2block.ops.registry import OPERATIONS, STEPS
from gpt2block.ops.sample_token import MARK_SEEN
from gpt2block.sampling import Sampling
from gpt2block.weights.gguf import random_blocks
from gpt2block.weights.matrix import WeightMatrix
from gpt2block.weights.two_part import TwoPartMatrix

Arrays = dict[str, Any]  # a CuPy or NumPy array, WeightMatrix, TwoPartMatrix or None by its name
Known = dict[Any, Any]  # sizes, dtypes, arrays and options of a call
Truth = Callable[[Arrays, dict[str, Any]], "list[Any]"]  # (host arrays, options) → float64 arrays

SIZES = (1, 2, 3, 5, 8, 16, 17, 32, 33, 64, 65, 96, 128, 129, 200, 256, 320)
SIXTEEN_BITS = ("float16", "bfloat16")
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


class Draw:
    """Random sizes and arrays for a GPU."""

    def __init__(self, rng: Rng) -> None:
        self.rng = rng

    def size(self, most: int = 320) -> int:
        return int(self.rng.pick(*(n for n in SIZES if n <= most)))

    def rows(self) -> tuple[int, ...]:
        """Draw the sizes of the axes before the last axis."""
        return (self.size(65),) if self.rng.chance(0.5) else (self.size(5), self.size(33))

    def array(self, *shape: int, dtype: str = "float32") -> Any:
        return (self.rng.standard_normal(shape) + 0.5).astype(FLOATS[dtype])

    def matrix(self, kind: str, shape: tuple[int, ...], known: Known) -> Any:
        """Draw a matrix. All matrices of a call have the same dtype and layout."""
        if "weights" not in known:
            known["weights"] = self.storage(kind, known.get("any", "float32"))
        dtype, layout = known["weights"]
        if layout is None:
            return self.array(*shape, dtype=dtype)
        in_memory = shape[::-1] if layout == "NK" and kind != "table" else shape
        return WeightMatrix.quantize(self.array(*in_memory), dtype, layout)

    def storage(self, kind: str, dtype: str) -> tuple[str, str | None]:
        """Draw dtype and layout (None: an array) of matrices. dtype: dtype of the activations."""
        if kind == "rows":
            return self.rng.pick(*WEIGHTS), "NK"
        if self.rng.chance(0.4):
            return dtype, None
        if kind == "table":
            return self.rng.pick(*WEIGHTS), "NK"
        fp8 = WEIGHTS[3:] if dtype == "float16" else ()
        return self.rng.pick(dtype, *fp8), self.rng.pick("KN", "NK")

    def dtype(self, narrow: float = 0.5) -> str:
        return self.rng.pick(*SIXTEEN_BITS) if self.rng.chance(narrow) else "float32"

    def ids(self, shape: Any, V: int) -> Any:
        """Ids, sometimes with ids outside the vocabulary."""
        low, high = ((0, V), (0, V), (-2, V + 2))[self.rng.whole(3)]
        return self.rng.integers(low, high, shape).astype(np.int32)


def _wide(value: Any) -> Any:
    """Convert floats to float64."""
    is_float = isinstance(value, np.ndarray) and value.dtype.kind in "fV"
    return value.astype(np.float64) if is_float else value


# --- calls by contract ---------------------------------------------------------------------------


class Rule(NamedTuple):
    """Constraints on the valid calls of an operation that its contract does not state.

    `given` draws some sizes by letter, dtypes by kind, arrays and options by name; `drawn_call`
    draws all others.
    """

    op: str
    given: Callable[[Draw], Known] = lambda d: {}
    truth: Truth | None = None  # None: the reference in float64
    trusted: bool = False


def drawn_call(d: Draw, rule: Rule, function: Any = None) -> Call:
    """Draw the arrays of the contract, and the options. function: None for the one in `ops`."""
    known = rule.given(d)
    operation = {**OPERATIONS, **STEPS, "mark_seen": MARK_SEEN}.get(rule.op)
    contract = operation.contract if operation else reference.CONTRACTS[rule.op]
    entries = {entry.name: entry for entry in contract.inputs}
    arrays: Arrays = {}
    options: dict[str, Any] = {}
    for name in inspect.signature(function or getattr(ops, rule.op)).parameters:
        if name in entries and name not in (operation.options if operation else ()):
            arrays[name] = known[name] if name in known else _drawn(d, entries[name], known)
        elif name in known:
            options[name] = known[name]
        elif name in OPTIONS:
            options[name] = d.rng.pick(*OPTIONS[name])
        elif name == "variant" and operation:
            options[name] = d.rng.pick(None, *(each.name for each in operation.variants))
    return Call(rule.op, arrays, options, rule.truth or by_reference(rule.op), rule.trusted)


def _drawn(d: Draw, entry: Entry, known: Known) -> Any:
    """Draw an array, or None. New sizes and dtypes that it draws are added to known."""
    alike = entry.kind, entry.axes  # such as gamma and beta, which are present together
    if entry.optional and not known.setdefault(alike, bool(d.rng.integers(2))):
        return None
    for axis in entry.axes:
        if axis == "..." and axis not in known:
            known[axis] = d.rng.pick((), (d.size(5),)) if "T" in entry.axes else d.rows()
        elif axis.isalpha() and axis not in known:
            known[axis] = d.size(65 if axis == "T" else 320)
    shape = entry.shape(known)
    if entry.kind in (*MATRICES, "table"):
        return d.matrix(entry.kind, shape, known)
    kind = "any" if entry.kind in ("strided", "mixed") else entry.kind
    dtype = FIXED.get(kind) or known.setdefault(kind, d.dtype())
    return d.array(*shape, dtype=dtype)


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


# --- rules of operations -------------------------------------------------------------------------


def _layernorm(d: Draw) -> Known:
    """Draw a row length that is not tiny: the variance of a few channels could be almost 0."""
    eps, dtype = d.rng.pick(1e-5, 1e-12, 0.1), d.dtype(0.3)
    other = d.rng.pick(dtype, "float32")  # dtype of gamma and beta
    return {"C": d.size() + 8, "eps": eps, "any": dtype, "other": other}


def _layernorm_truth(host: Arrays, options: dict[str, Any]) -> list[Any]:
    out = by_reference("layernorm")(host, options)
    if options["stats"]:
        out += reference.layernorm_stats(_wide(host["x"]), options["eps"])
    return out


def _attention(d: Draw) -> Known:
    n_head, dtype = d.rng.pick(*HEADS), d.dtype()
    HS = 64 if dtype != "float32" else d.rng.pick(*HEAD_SIZES)
    variants = (None, "mma", "hopper") if dtype != "float32" else (None, "mha", "naive", "online")
    return {"n_head": n_head, "any": dtype, "W": 3 * n_head * HS, "variant": d.rng.pick(*variants)}


def _sequences(d: Draw, count: int, longest: int) -> tuple[Any, Any]:
    """Return the lengths of sequences, at least one of which has rows, and cu_seqlens."""
    lengths = d.rng.integers(0, longest, count)
    lengths[-1] += not lengths.any()
    return lengths, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def _attention_varlen(d: Draw) -> Known:
    lengths, ends = _sequences(d, d.rng.whole(1, 5), 70)
    n_head, dtype = d.rng.pick(*HEADS), d.rng.pick(*SIXTEEN_BITS)
    return {
        "n_head": n_head,
        "qkv": d.array(int(ends[-1]) + 1, 3 * 64 * n_head, dtype=dtype),
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


def _kv_cache(d: Draw, B: int, n_ctx: int) -> Known:
    """Draw a kv_cache, and q or qkv for its heads, in float32 or the dtype of the kv_cache."""
    n_head, kept = d.rng.pick(*HEADS), d.dtype()
    C = n_head * d.rng.pick(*HEAD_SIZES)
    sizes = {"B": B, "P": n_ctx, "C": C, "Q": C, "W": 3 * C}
    return {**sizes, "n_head": n_head, "kv": kept, "any": d.rng.pick("float32", kept)}


def _attention_cached(d: Draw) -> Known:
    T, start = d.size(65), d.rng.whole(0, 90)
    keys = start + T + d.rng.whole(0, 3)
    return _kv_cache(d, 1, keys) | {"T": T, "start": start}


def _attention_split(d: Draw) -> Known:
    B, n_ctx = d.size(17), d.size()
    row, position = (d.rng.integers(0, most, B).astype(np.int32) for most in (B, n_ctx))
    return _kv_cache(d, B, n_ctx) | {"M": B, "row": row, "position": position}


def _attention_packed(d: Draw) -> Known:
    B, n_ctx = d.rng.whole(1, 4), 96
    lengths, ends = _sequences(d, B, 40)
    start = d.rng.integers(0, n_ctx - 40, B).astype(np.int32)
    found = {"N": int(ends[-1]), "cu_seqlens": ends, "start": start, "longest": int(lengths.max())}
    return _kv_cache(d, B, n_ctx) | found


def _kv_append(d: Draw) -> Known:
    B, n_ctx = d.size(5), d.size(33)
    places = d.rng.permutation(B * n_ctx)[: d.rng.integers(1, B * n_ctx + 1)]
    row, position = (places // n_ctx).astype(np.int32), (places % n_ctx).astype(np.int32)
    row[0] += int(d.rng.pick(0, 0, B, -B))  # rows outside the cache are ignored
    return _kv_cache(d, B, n_ctx) | {"N": len(places), "row": row, "position": position}


def _kv_append_truth(host: Arrays, options: dict[str, Any]) -> list[Any]:
    k, v, row = host["k"].copy(), host["v"].copy(), host["row"]
    inside = (row >= 0) & (row < len(k))
    if inside.any():
        qkv, at = host["qkv"][inside], host["position"][inside]
        reference.kv_append(qkv, k, v, row[inside], at)
    return [k.astype(np.float64), v.astype(np.float64)]


def _encoder(d: Draw) -> Known:
    V, P, rows = d.size(), d.size(), d.rows()
    return {"V": V, "P": P, "ids": d.ids((*rows[:-1], min(rows[-1], P)), V)}


def _encoder_rows(d: Draw) -> Known:
    V, P, N = d.size(), d.size(), d.size()
    return {"V": V, "P": P, "ids": d.ids(N, V), "positions": d.ids(N, P)}


def _encoder_truth(name: str) -> Truth:
    """Return the exact embedding: NaN for ids and positions that are out of range."""

    def truth(host: Arrays, options: dict[str, Any]) -> list[Any]:
        wte, wpe = host["wte"], host["wpe"]
        ends = {"ids": wte.N if isinstance(wte, WeightMatrix) else len(wte)}
        if "positions" in host:
            ends["positions"] = 2**31 if wpe is None else len(wpe)
        given = {key: np.asarray(host[key]) for key in ends}  # ids may be a list
        inside = {key: (given[key] >= 0) & (given[key] < end) for key, end in ends.items()}
        places = {key: np.where(known, given[key], 0) for key, known in inside.items()}
        (out,) = by_reference(name)(host | places, {})
        return [np.where(np.all([*inside.values()], axis=0)[..., None], out, np.nan)]

    return truth


def _softmax(d: Draw) -> Known:
    T, causal = d.size(), bool(d.rng.integers(2))
    return {"T": T, "...": (*d.rows()[:1], T) if causal else d.rows(), "causal": causal}


def _trimat(d: Draw) -> Known:
    heads = {"NH": d.rng.pick(*HEADS), "HS": d.rng.pick(*HEAD_SIZES)}
    return {"B": d.size(3), "T": d.size(129), **heads}


def _rope(d: Draw) -> Known:
    return {"H": d.rng.pick(*HEADS), "D": 2 * d.size(64), "any": d.dtype()}


def _rmsnorm_matmul(d: Draw) -> Known:
    head_dim = d.rng.pick(None, 16, 64, 128)
    sizes = {"K": 8 * d.size(33), "N": (head_dim or 8) * d.size(5)}
    return sizes | {"head_dim": head_dim, "any": d.dtype(0.7)}


def _rmsnorm_ffn(d: Draw) -> Known:
    known: Known = {"K": 8 * d.size(33), "N": 8 * d.size(33), "any": d.dtype(0.7)}
    if d.rng.chance(0.1):
        known["w1"] = known["w3"] = d.matrix("matrix", (known["K"], known["N"]), known)
    return known


def _to_fp8(d: Draw) -> Known:
    N, K, layout = d.size(), d.size(), d.rng.pick("KN", "NK")
    shape = (K, N) if layout == "KN" else (N, K)
    x = 10.0 ** d.rng.uniform(-8, 6, shape) * d.rng.choice([-1, 1], shape)
    scale = d.rng.uniform(0.01, 100, N).astype(np.float32)
    with np.errstate(over="ignore"):
        stored = x.astype(np.float32).astype(FLOATS[d.dtype()])
    found = {"x": stored, "layout": layout, "variant": None}
    return found | {"scale": cupy.asarray(scale) if d.rng.chance(0.4) else None}


def _to_fp8_truth(host: Arrays, options: dict[str, Any]) -> list[Any]:
    found = {key: options[key] for key in ("format", "saturate", "layout")}
    scale = None if options["scale"] is None else cupy.asnumpy(options["scale"])
    with np.errstate(all="ignore"):
        return [reference.to_fp8(host["x"], scale=scale, **found)]


def _gemm(d: Draw) -> Known:
    dtype, wide = d.rng.pick(*SIXTEEN_BITS), d.rng.chance(0.3)
    return {
        "K": 8 * d.size(65),
        "N": 8 * d.size(65),
        "any": dtype,
        "weights": (dtype, "NK"),
        "out_dtype": "float32" if wide else dtype,
        "dtype": "float32" if wide else None,
        "up": None,
    }


def _gemm_two_part(d: Draw) -> Known:
    """`gemm` with the accuracy of float32, on two-part matrices."""
    K, N = 8 * d.size(65), 8 * d.size(65)
    w = TwoPartMatrix.from_float32(cupy.asarray(d.array(N, K)))
    options = {"split_k": False, "variant": d.rng.pick(None, "mma")}
    return options | {"K": K, "N": N, "any": "float32", "out_dtype": "float32", "w": w, "up": None}


def _gemm_two_part_truth(host: Arrays, options: dict[str, Any]) -> list[Any]:
    return by_reference("gemm")(host | {"w": host["w"].T}, {"gelu": options["gelu"]})


def _two_part(d: Draw) -> Known:
    scale = np.float32(10.0 ** d.rng.integers(-20, 20))
    return {"x": d.array(*d.rows(), d.size()) * scale}


def _two_part_truth(host: Arrays, options: dict[str, Any]) -> list[Any]:
    found = reference.joined(*reference.two_part(host["x"])).reshape(host["x"].shape)
    return [found.astype(np.float64)]


def _sample_token(d: Draw) -> Known:
    """Draw random settings. The last bit of exp may differ, which changes one draw in millions."""
    sampling = Sampling(
        temperature=float(d.rng.pick(0, 0.5, 1, 2)),
        top_k=int(d.rng.pick(0, 1, 5)),
        top_p=float(d.rng.pick(1, 0.9, 0.1)),
        min_p=float(d.rng.pick(0, 0.05)),
        seed=d.rng.whole(2**62),
    )
    logits = (3 * d.rng.standard_normal((d.size(9), d.size()))).astype(np.float32)
    return {"logits": logits, "sampling": sampling, "step": 3}


def _log_likelihood(d: Draw) -> Known:
    V, rows = d.size(), d.rows()
    return {"...": rows, "V": V, "targets": d.ids(rows, V)}


def _mark_seen(d: Draw) -> Known:
    B, V, N = d.size(9), d.size(), d.size()
    seen = d.rng.integers(0, 2, (B, V)).astype(np.uint8)
    return {"tokens": d.ids(N, V), "rows": d.ids(N, B), "seen": seen}


def _mark_seen_truth(host: Arrays, options: dict[str, Any]) -> list[Any]:
    seen = host["seen"].copy()
    for token, row in zip(host["tokens"], host["rows"], strict=True):
        if 0 <= row < len(seen) and 0 <= token < seen.shape[1]:
            seen[row, token] = 1
    return [seen]


def _blocks_matmul(d: Draw) -> Known:
    N, K = d.size(), 256 * d.size(9)
    return {"K": K, "w": random_blocks("Q4_K", N, K, d.rng.whole(1000)).reshape(N, -1, 144)}


RULES = (
    Rule("layernorm", _layernorm, _layernorm_truth),
    Rule("matmul_bias"),
    Rule("blocks_matmul", _blocks_matmul),
    Rule("attention", _attention),
    Rule("attention", _attention_varlen, _attention_varlen_truth, trusted=True),
    Rule("attention_cached", _attention_cached),
    Rule("attention_packed", _attention_packed, trusted=True),
    Rule("attention_split", _attention_split, trusted=True),
    Rule("kv_append", _kv_append, _kv_append_truth, trusted=True),
    *(Rule(name) for name in ("add", "gelu", "silu_mul", "rmsnorm", "linear")),
    Rule("layernorm_gelu", lambda d: {"C": d.size() + 8}),
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

"""Call single operations in all variants, sizes and forms, for lists of launches."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
from launch_recorder import Recorder

from gpt2block import HiLoMatrix, WeightMatrix
from gpt2block.checks import FLOATS
from gpt2block.cuda import cupy
from gpt2block.cuda.kernels import FP8
from gpt2block.ops.operands import Operand
from gpt2block.ops.operation import Operation
from gpt2block.ops.registry import OPERATIONS, STEPS

HEADS = (2, 2, 64), (3, 3, 64), (4, 1, 64), (2, 1, 128), (4, 2, 32), (3, 3, 20), (12, 12, 64)
ROWS = 1, 3, 16, 17, 64, 512
MATRICES = (96, 40), (37, 33), (768, 770), (2304, 768), (4096, 4096), (11008, 4096), (50257, 768)
SIZES = (
    {"B": 1, "T": 5, "C": 24, "N": 7, "NH": 3, "HS": 8, "V": 11, "M": 3, "K": 5, "H": 3, "D": 8},
    {"B": 2, "T": 33, "C": 132, "N": 256, "NH": 2, "HS": 12, "V": 70, "M": 17, "K": 96, "H": 1}
    | {"D": 34},
)
OPTIONS: Mapping[str, tuple[dict[str, Any], ...]] = {  # in addition to an Operation's own options
    "attention": ({"n_head": 3}, {"n_head": 2, "causal": False}),
    "attention_cached": ({"n_head": 3}, {"n_head": 2}),
    "layernorm": ({"stats": False}, {"dtype": "hi_lo", "bound": 3.0, "variant": "narrow"}),
    "softmax": ({"causal": True},),
    "trimat": ({"fill": 0.0},),
    "rmsnorm": ({"dtype": "float16", "variant": "stream"},),
    "rmsnorm_matmul": ({"head_dim": None}, {"half_split": True}),
    "rope": ({"half_split": True},),
    "rope_qkv": ({"half_split": True},),
}
DECODING = {"decoding": True}
FORMS: Mapping[str, tuple[tuple[str, dict[str, Any]], ...]] = {  # inputs after w, and options
    "linear": (
        ("bias gamma beta", {"gelu": True}),
        ("bias - - residual", {}),
        ("bias - - residual", DECODING),
        ("bias", {**DECODING, "operand": "own"}),
        ("bias", {**DECODING, "to_operand": "own"}),
        ("bias - - residual", {**DECODING, "operand": "wide"}),
        ("-", {**DECODING, "operand": "wide", "to_operand": "wide", "gelu": True}),
        ("- - - - up", {**DECODING, "operand": "wide", "to_operand": "wide"}),
    ),
    "gemm": (
        ("bias", {"gelu": True}),
        ("bias narrow", {"split_k": True}),
        ("bias residual", {"dtype": "float32"}),
        ("- - up", {}),
        ("-", {"dtype": "hi_lo", "bound": 3.0}),
    ),
}


def operation(of: Operation, dtype: str, to: Recorder) -> None:
    """Call every variant in three sizes, also with addresses aligned to a single element."""
    for sizes, layout, first in itertools.product(
        (*SIZES, _documented(of)), ("KN", "NK") if of.workload.matrices else ("KN",), (0, 1)
    ):
        chosen = {name: sizes[name] for name in of.workload.sizes}
        inputs = [
            _matrix(shape, dtype, layout)
            if i in of.workload.matrices
            else _array(shape, kind, "float16" if dtype in FP8 else dtype, first)
            for i, (shape, kind) in enumerate(_made(of.name, tuple(chosen.items())))
        ]
        for options in ({}, *OPTIONS.get(of.name, ())):
            label = f"{chosen} {layout} {first} {options}"
            _variants(to, label, of, inputs, {**of.workload.attrs, **options})


def _documented(of: Operation) -> dict[str, int]:
    return {name: min(size, 4096) for name, size in of.workload.sizes.items()}


@cache
def _made(name: str, sizes: tuple[tuple[str, int], ...]) -> tuple[tuple[tuple[int, ...], str], ...]:
    """Return shapes and dtypes of an operation's inputs."""
    arrays = OPERATIONS[name].make(dict(sizes), np.random.default_rng(0))
    return tuple((array.shape, array.dtype.name) for array in arrays)


def _array(shape: tuple[int, ...], kind: str, dtype: str, first: int) -> Any:
    count = int(np.prod(shape))
    return cupy.empty(first + count, dtype if kind == "float32" else kind)[first:].reshape(shape)


def _matrix(shape: tuple[int, ...], dtype: str, layout: str) -> WeightMatrix:
    """Return a matrix (K, N) of zeros."""
    data = cupy.empty(shape if layout == "KN" else shape[::-1], FLOATS.get(dtype, "uint8"))
    scale = cupy.full(shape[1], 1, "float32") if dtype == "float8_e4m3fn" else None
    return WeightMatrix(data, dtype, scale, layout)


def _variants(
    to: Recorder, label: str, of: Operation, inputs: Any, options: dict[str, Any]
) -> None:
    """Call the default variant, and each variant by its name."""
    names = [variant.name for variant in of.variants] if len(of.variants) > 1 else []
    for name in (None, *names):
        by = {} if name is None else {"variant": name}
        bound = to.call(f"{label} {name}", of.bind, tuple(inputs), **{**options, **by})
        if bound is not None:
            bound.run()


def product(name: str, dtype: str, to: Recorder) -> None:
    """Call all forms of `linear` and `gemm`, including hi/lo float32."""
    storage = FLOATS["float16" if dtype in FP8 else dtype]
    own = Operand("bfloat16" if dtype == "bfloat16" else "float16")
    operand = {"own": own, "wide": own._replace(width=16 if dtype in FP8 else 8)}
    for M, (N, K) in itertools.product(ROWS, MATRICES):
        x: Any = cupy.empty((M, K), "float32" if name == "linear" else storage)
        w: Any = _matrix((K, N), dtype, "NK")
        if name == "gemm" and dtype == "float32":
            x, w = HiLoMatrix.empty((M, K), 1.0), HiLoMatrix.empty((N, K), 1.0)
        given = {"-": None, "up": w, "narrow": cupy.empty((M, N), storage)}
        shapes = {"bias": N, "gamma": K, "beta": K, "residual": (M, N)}
        given |= {each: cupy.empty(shape, "float32") for each, shape in shapes.items()}
        for names, options in FORMS[name]:
            inputs = (x, w, *(given[each] for each in names.split()))
            chosen = {key: operand.get(value, value) for key, value in options.items()}
            _variants(to, f"{M} {N} {K} {names} {options}", OPERATIONS[name], inputs, chosen)


def attention(dtype: str, to: Recorder) -> None:
    """Call attention with heads of all sizes, for sequences of equal and of different lengths."""
    for (NH, NKV, HS), T, B in itertools.product(HEADS, (1, 5, 70, 300, 4096), (1, 3)):
        qkv: Any = cupy.empty((B, T, (NH + 2 * NKV) * HS), FLOATS[dtype])
        rows, ends = qkv.reshape(B * T, -1), cupy.zeros(B + 1, "int32")
        for causal in (True, False):
            heads = {"n_head": NH, "n_kv_head": NKV, "causal": causal}
            label = f"{heads} {HS}"
            found, packed = OPERATIONS["attention"], STEPS["attention_varlen"]
            _variants(to, f"{label} {qkv.shape}", found, (qkv,), heads)
            ragged = {**heads, "max_seqlen": T}
            _variants(to, f"{label} {rows.shape}", packed, (rows, ends), ragged)

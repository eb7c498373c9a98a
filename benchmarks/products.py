"""Matrix products and attention of GPT-2 small to time, and blocks on kernels for earlier GPUs.

The rows of a product's input repeat after a prime number of rows, and sequences after some thousand
tokens, so that NumPy computes the distinct results in float64 within seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt2block import reference
from gpt2block.apps.bench.works import (
    DTYPES,
    C,
    Sets,
    Work,
    attention_flops,
    block_weights,
    block_works,
    named,
    recorded,
    sequences,
)
from gpt2block.block import Block
from gpt2block.checks import check_choice
from gpt2block.engine.passes.executor import Executor, Step
from gpt2block.errors import InputError, KernelError
from gpt2block.models.architectures.architecture import Value
from gpt2block.models.weights.matrix import WeightMatrix
from gpt2block.ops.bench.race import Captured, Contender, bind_copies, capture_bound
from gpt2block.ops.registry import OPERATIONS
from gpt2block.ops.workload import Host, matrix, widened

NH = 12
ROWS = 509  # number of different rows of a product; a prime, so not a multiple of a tile's rows
OLDER = "mma"  # variant for GPUs before Hopper; it also runs on Hopper

PRODUCTS: Mapping[str, tuple[int, int, bool, bool]] = {  # name → (N, K, gelu, residual)
    "qkv": (3 * C, C, False, False),
    "o": (C, C, False, False),
    "fc": (4 * C, C, False, False),
    "fc+gelu": (4 * C, C, True, False),
    "proj": (C, 4 * C, False, False),
    "proj+residual": (C, 4 * C, False, True),
}
MS = (128, 1024, 8192, 65536)  # rows of products
ATTENTIONS = tuple(
    (B, T, mask) for B, T in ((1, 1024), (8, 1024), (64, 1024), (4, 4096)) for mask in (False, True)
)
KINDS = ("block", "gemm", "attention")


def chosen_works(what: str, dtype: str | None, only: str | None) -> list[Work]:
    """Return the benchmarks of a kind or of all, in the order they are timed. Raises InputError.

    dtype: by default bfloat16, for blocks also float32. only: a text that the name must contain.
    """
    check_choice("--what", what, (*KINDS, "all"))
    if dtype is not None:
        check_choice("--dtype", dtype, DTYPES)
    of = dtype or "bfloat16"
    works = {
        "block": [with_older(each) for each in block_works(dtype)],
        "gemm": [gemm(of, name, M, *each) for M in MS for name, each in PRODUCTS.items()],
        "attention": [attention(of, *sizes) for sizes in ATTENTIONS],
    }
    return named(
        [each for kind in (KINDS if what == "all" else (what,)) for each in works[kind]], only
    )


def attention(dtype: str, B: int, T: int, causal: bool) -> Work:
    """Return the benchmark of attention, 12 heads of 64: [Q | K | V] (B, T, 3C) → (B, T, C)."""
    return Work(
        "attention",
        f"{B}x{T} {'causal' if causal else 'full'}",
        dtype,
        {"B": B, "T": T, "causal": int(causal)},
        flops=attention_flops(B, T, causal),
        traffic=np.dtype(dtype).itemsize * 4 * B * T * C,
        truth=partial(_attention_truth, T, causal, dtype),
        ours=partial(_variants, "attention", {"n_head": NH, "causal": causal}, dtype),
        inputs=lambda: {"qkv": np.resize(sequences(T, 3 * C, dtype), (B, T, 3 * C))},
    )


def gemm(
    dtype: str, product: str, M: int, N: int, K: int, gelu: bool = False, residual: bool = False
) -> Work:
    """Return the benchmark of [residual +] [gelu](a w + bias) with a (M, K) and w (K, N)."""
    elements = M * K + K * N + (1 + residual) * M * N

    def inputs() -> Host:
        a, w, bias, added = _product_inputs(N, K, dtype)
        arrays = {"a": np.resize(a, (M, K)), "w": w, "bias": bias}
        return arrays | ({"residual": np.resize(added, (M, N))} if residual else {})

    def truth() -> NDArray[Any]:
        a, w, bias, added = _product_inputs(N, K, dtype)
        wide = widened(a), widened(w.dequantized()), widened(bias)
        return reference.gemm(*wide, widened(added) if residual else None, gelu=gelu)

    return Work(
        "gemm",
        f"{product} M={M}",
        dtype,
        {"M": M, "N": N, "K": K},
        flops=2 * M * N * K,
        traffic=np.dtype(dtype).itemsize * elements + 4 * N,
        truth=truth,
        # A GPT-2 block calls gemm with the same options.
        ours=partial(_variants, "gemm", {"gelu": gelu, "split_k": True}, dtype),
        inputs=inputs,
    )


@lru_cache(maxsize=4)
def _product_inputs(
    N: int, K: int, dtype: str
) -> tuple[NDArray[Any], WeightMatrix, NDArray[Any], NDArray[Any]]:
    """Generate a, w, bias and residual; bias is float32, rounded to values of `dtype`."""
    rng = np.random.default_rng(N + K)
    a = rng.standard_normal((ROWS, K), dtype=np.float32).astype(dtype)
    w = rng.standard_normal((K, N), dtype=np.float32) / np.float32(K**0.5)
    bias = rng.standard_normal(N, dtype=np.float32).astype(dtype).astype(np.float32)
    residual = rng.standard_normal((ROWS, N), dtype=np.float32).astype(dtype)
    return a, matrix(w, dtype, "NK"), bias, residual


@lru_cache(maxsize=8)
def _attention_truth(T: int, causal: bool, dtype: str) -> NDArray[Any]:
    qkv = widened(sequences(T, 3 * C, dtype))
    return reference.attention(qkv, NH, causal).reshape(-1, C)


def _variants(
    name: str, options: Mapping[str, Any], dtype: str, sets: Sets, device: int
) -> Iterator[Contender]:
    """Yield a Contender for each variant of an operation, the default variant first."""
    operation = OPERATIONS[name]
    inputs = [tuple(each.values()) for each in sets]
    outs: list[Any] = [None] * len(inputs)

    def capture(variant: str, rounds: int) -> Captured:
        bound = bind_copies(partial(operation.bind, **options, variant=variant), inputs, outs)
        overlapping = dtype != "float32"  # float32 kernels do not wait for the previous kernel
        return capture_bound(bound, rounds, overlapping)

    try:
        kernel = operation.bind(inputs[0], **options).launches[0].name
    except (InputError, KernelError):
        kernel = ""
    default = next((each.name for each in operation.variants if kernel in each.kernels), None)
    names = [each.name for each in operation.variants if dtype in (each.dtypes or (dtype,))]
    for variant in sorted(names, key=lambda each: each != default):
        yield Contender(variant, partial(capture, variant), dtype)


class _Variant(Executor):
    """An executor of a pass's steps that uses one variant for matrix products and attention."""

    def __init__(self, do: Executor, variant: str) -> None:
        super().__init__(do.tensors)
        self._do, self._variant = do, variant

    def do(self, step: Step, into: Value) -> Value:
        if step.op in ("gemm", "attention"):
            step = step._replace(attrs={**step.attrs, "variant": self._variant})
        return self._do.do(step, into)


def with_older(work: Work) -> Work:
    """Return the benchmark of a block, also with variant `mma` of products and attention."""
    weights, causal = block_weights(work.dtype), bool(work.sizes["causal"])

    def contenders(sets: Sets, device: int) -> Iterator[Contender]:
        yield from work.ours(sets, device)
        for kernels in ("fused", "skeleton"):
            yield Contender(f"{kernels}, {OLDER}", partial(capture, kernels, sets), work.dtype)

    def capture(kernels: str, sets: Sets, rounds: int) -> Captured:
        block = Block(weights, causal, "cuda", work.dtype, kernels)
        return recorded(block.spec, sets, lambda do: _Variant(do, OLDER))(rounds)

    return replace(work, ours=contenders)

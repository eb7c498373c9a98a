"""Works of GPT-2 small: blocks, matrix products and attention, also on kernels for earlier GPUs.

The inputs are random but repeat: sequences after some thousand tokens, and rows of a product after
a prime number of rows. NumPy therefore computes the distinct results in float64 within seconds, and
every value of the largest output is compared with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.works import STEPS_OF_A_BLOCK, Sets, Work
from gpt2block import reference
from gpt2block.block import Block
from gpt2block.checks import FLOATS, check_choice
from gpt2block.cuda import cupy
from gpt2block.engine.block import BlockSpec
from gpt2block.engine.cuda.block import OUTPUT
from gpt2block.engine.passes.executor import Executor, Step
from gpt2block.engine.recording import Recordings
from gpt2block.errors import InputError, KernelError
from gpt2block.files.parameters.gpt2 import BlockWeights
from gpt2block.models.architectures.architecture import Value
from gpt2block.models.weights.hi_lo import HiLoMatrix
from gpt2block.models.weights.matrix import WeightMatrix
from gpt2block.ops.bench.race import (
    REFUSALS,
    Capture,
    Captured,
    Contender,
    bind_copies,
    capture_bound,
    refuse,
)
from gpt2block.ops.registry import OPERATIONS
from gpt2block.ops.workload import Host, matrix, widened

C, NH = 768, 12
TOKENS = 3072  # total number of tokens of the different sequences
MATRICES = ("w_qkv", "w_attn", "w_fc", "w_proj")
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


def chosen_works(what: str, dtype: str | None) -> list[Work]:
    """Return the benchmarks of a kind or of all, in the order they are timed. Raises InputError.

    dtype: by default bfloat16, for blocks also float32.
    """
    check_choice("--what", what, (*KINDS, "all"))
    if dtype is not None:
        check_choice("--dtype", dtype, tuple(FLOATS))
    of = dtype or "bfloat16"
    works = {
        "block": block_works(dtype),
        "gemm": [gemm(of, name, M, *each) for M in MS for name, each in PRODUCTS.items()],
        "attention": [attention(of, *sizes) for sizes in ATTENTIONS],
    }
    return [each for kind in (KINDS if what == "all" else (what,)) for each in works[kind]]


def block(dtype: str, B: int, T: int, causal: bool) -> Work:
    """Return the benchmark of a whole GPT-2 block on inputs (B, T, C)."""
    item = np.dtype(dtype).itemsize
    weights = block_weights(dtype)

    def inputs() -> Host:
        """Return x and weights by name; matrices are (K, N) in float32, else (N, K)."""
        tensors: dict[str, Any] = weights.tensors()
        if dtype != "float32":
            tensors |= {name: matrix(tensors[name], dtype, "NK") for name in MATRICES}
        return {"x": np.resize(sequences(T, C, dtype), (B, T, C)), **tensors}

    return Work(
        "block",
        f"{B}x{T} {'causal' if causal else 'full'}",
        dtype,
        {"B": B, "T": T, "causal": int(causal)},
        flops=24 * B * T * C * C + attention_flops(B, T, causal),
        traffic=item * (2 * B * T * C + 12 * C * C) + 4 * 13 * C,
        truth=partial(_block_truth, T, causal, dtype),
        ours=partial(_blocks, weights, causal, dtype),
        inputs=inputs,
        roundings=STEPS_OF_A_BLOCK,
    )


def attention_flops(B: int, T: int, causal: bool) -> int:
    """Return the FLOPs of attention: the scores Q·K and their product with V."""
    return 4 * B * (T * (T + 1) // 2 if causal else T * T) * C


BLOCKS = ((1, 128, False), (1, 1024, False), (1, 1024, True), (8, 1024, True), (64, 1024, True))


def block_works(dtype: str | None = None) -> list[Work]:
    """Return the benchmarks of blocks, in the order they are timed.

    dtype: by default bfloat16, then float32.
    """
    dtypes = (dtype,) if dtype else ("bfloat16", "float32")
    return [block(each, *sizes) for each in dtypes for sizes in BLOCKS]


@lru_cache(maxsize=8)
def sequences(T: int, width: int, dtype: str) -> np.ndarray:
    """Generate n different random inputs of T rows each: an array (n, T, width) of `dtype`."""
    count = max(1, TOKENS // T)
    rng = np.random.default_rng(T)
    return rng.standard_normal((count, T, width), dtype=np.float32).astype(dtype)


@lru_cache(maxsize=4)
def block_weights(dtype: str) -> BlockWeights:
    """Generate random float32 weights of a block, rounded to values that `dtype` can represent."""
    random = BlockWeights.random(0)
    tensors = {n: a.astype(dtype).astype(np.float32) for n, a in random.tensors().items()}
    return BlockWeights(**tensors, n_head=random.n_head, eps=random.eps)


@lru_cache(maxsize=8)
def _block_truth(T: int, causal: bool, dtype: str) -> np.ndarray:
    x = widened(sequences(T, C, dtype))
    return reference.block_forward(x, block_weights(dtype), causal).reshape(-1, C)


def _blocks(
    weights: BlockWeights, causal: bool, dtype: str, sets: Sets, device: int
) -> Iterator[Contender]:
    """Yield the fused and the skeleton block, then both with variant `mma`.

    sets: copies of x and the weights; each call reads the weights of its copy.
    """
    executors = {"": lambda do: do, f", {OLDER}": _Older}
    for (suffix, executor), kernels in product(executors.items(), ("fused", "skeleton")):
        try:
            block = Block(weights, causal, f"cuda:{device}", dtype, kernels)
            capture = recorded(block.spec, sets, executor)
        except REFUSALS as error:
            capture = partial(refuse, str(error))
        yield Contender(kernels + suffix, capture, dtype)


class _Older(Executor):
    """An executor of a block's steps that uses variant `mma` of matrix products and attention."""

    def __init__(self, do: Executor) -> None:
        super().__init__(do.tensors)
        self._do = do

    def do(self, step: Step, into: Value) -> Value:
        if step.op in ("gemm", "attention"):
            step = step._replace(attrs={**step.attrs, "variant": OLDER})
        return self._do.do(step, into)


def recorded(spec: BlockSpec, sets: Sets, executor: Callable[[Executor], Executor]) -> Capture:
    """Record the block's launches for each copy of its inputs; return a `capture` of them.

    The blocks share the memory of activations. executor: returns the executor of the block's steps.
    """
    if spec.bounds is not None:
        sets = [_with_hi_lo(spec, each) for each in sets]
    outs = [cupy.empty_like(each["x"]) for each in sets]
    recordings = Recordings()
    bound = [
        recordings.make(lambda do: spec.run(executor(do)), each, {OUTPUT: out})
        for each, out in zip(sets, outs, strict=True)
    ]

    def capture(rounds: int) -> Captured:
        found = capture_bound(bound, rounds, spec.overlapping, outs)
        return found._replace(kept=(bound, sets, outs, recordings))

    return capture


def _with_hi_lo(spec: BlockSpec, arrays: Host) -> Host:
    """Convert the weight matrices to HiLoMatrix, which float32 tensor-core products read."""
    matrices = {name: cupy.ascontiguousarray(arrays[name].T) for name in spec.matrices}
    return {**arrays, **{name: HiLoMatrix.from_float32(w) for name, w in matrices.items()}}


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

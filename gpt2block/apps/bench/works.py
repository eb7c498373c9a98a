"""Benchmarks of `gpt2block bench`: blocks, matrix products and attention of GPT-2 small.

The inputs are random but repeat: sequences after some thousand tokens, rows of a product after a
prime number of rows. NumPy therefore computes the distinct results in float64 within seconds, and
every value of the largest output is compared with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from math import inf, isfinite
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpt2block import reference
from gpt2block.block import Block
from gpt2block.checks import check_choice
from gpt2block.cuda import cupy, timing
from gpt2block.engine.block import BlockSpec
from gpt2block.engine.cuda.block import OUTPUT
from gpt2block.engine.model import Ids
from gpt2block.engine.passes.machine import Machine, Step
from gpt2block.engine.recording import Recording, Recordings
from gpt2block.errors import InputError, KernelError
from gpt2block.files.parameters.gpt2 import BlockWeights
from gpt2block.models.architectures.architecture import Value
from gpt2block.models.weights.matrix import WeightMatrix
from gpt2block.models.weights.two_part import TwoPartMatrix
from gpt2block.ops import workload
from gpt2block.ops.bench.race import (
    REFUSALS,
    Capture,
    Captured,
    Contender,
    Replay,
    bind_copies,
    capture_bound,
    refuse,
    rotated,
)
from gpt2block.ops.registry import OPERATIONS
from gpt2block.ops.workload import Host, matrix, widened

C, NH = 768, 12
TOKENS = 3072  # total number of tokens of the different sequences
ROWS = 509  # number of different rows of a product; a prime, so not a multiple of a tile's rows
DTYPES = ("bfloat16", "float16", "float32")
MATRICES = ("w_qkv", "w_attn", "w_fc", "w_proj")
STEPS_OF_A_BLOCK = 7  # steps of a block whose results are rounded to the block's dtype
OLDER = "mma"  # variant for GPUs before Hopper; it also runs on Hopper

Sets = Sequence[Host]  # copies of the inputs in device memory
Errors = tuple[float, float]  # absolute and relative, as `workload.errors` returns them


@dataclass(frozen=True)
class Work:
    """A computation to time.

    name: its sizes in words, such as "8x1024 causal"; the same for all dtypes. flops: minimum
    operations; a multiplication and an addition count as two, masked scores as none. traffic:
    minimum bytes; every input and weight is read once, and the output is written once.

    truth: returns the exact output (n, columns), whose row i mod n is compared with row i of an
    output; for a whole model, the exact logits after a sequence. ours: returns gpt2block's
    contenders for copies of the inputs and a device, the default one first; a capture shows whether
    a contender can run.

    roundings: number of consecutive results that are rounded to the dtype. rounding: dtype whose
    rounding errors are tolerated; None: the dtype of the arithmetic. rounds: rounds over all copies
    in one turn; None: as many as take some milliseconds. turns: number of timed calls that return
    when their results are in host memory; None: times of CUDA graphs. tokens: number of tokens that
    a call generates; None without generation.
    """

    what: str
    name: str
    dtype: str
    sizes: Mapping[str, int]
    flops: int
    traffic: int
    truth: Callable[..., NDArray[Any]]
    ours: Callable[[Sets, int], Iterable[Contender]]
    inputs: Callable[[], Host] = dict
    roundings: int = 1
    rounding: str | None = None
    rounds: int | None = None
    turns: int | None = None
    tokens: int | None = None

    def sets(self) -> Sets:
        """Return copies of the inputs in device memory, which successive calls use in turn."""
        inputs = self.inputs()
        return rotated(inputs, self.traffic) if inputs else [inputs]

    def check(self, replay: Replay, outs: tuple[Any, ...]) -> Errors:
        """Replay a graph, and return the (absolute, relative) error of its least accurate output.

        outs: arrays, which are filled with NaN before the replay, or functions, which return an
        output after the replay.
        """
        for out in outs:
            if not callable(out):
                workload.poison(out)
        replay()
        found = [self._errors(out() if callable(out) else out) for out in outs]
        return max(found, key=lambda errors: errors[1] if isfinite(errors[1]) else inf)

    def _errors(self, out: Any) -> Errors:
        if isinstance(out, GeneratedSequences):
            return out.errors(self.truth)
        return workload.errors(out, self.truth())

    def times(self, replays: Mapping[str, Replay]) -> dict[str, float]:
        """Return {name: median ms of a replay}; the replays are interleaved."""
        if self.turns is None:
            return timing.interleaved_ms(replays)
        return timing.interleaved_host_ms(replays, self.turns)


class GeneratedSequences(NamedTuple):
    """Sequences that an implementation has generated, to be checked.

    logprobs: the log-probability of each sequence's last token, if the contender returns it.
    greedy: whether the last token was the most likely token.
    """

    sequences: Sequence[Ids]
    logprobs: Sequence[float] | None = None
    greedy: bool = True

    def errors(self, last_logits: Callable[[Ids], NDArray[np.float64]]) -> Errors:
        """Return the largest error at a last token: absolute, and relative to the largest |logit|.

        The errors are differences of log-probabilities and, for greedy sequences, of a token's
        logit from the largest logit.
        """
        worst_of_each = []
        for i, ids in enumerate(self.sequences):
            logits = last_logits(ids[:-1])
            top, chosen = logits.max(), logits[ids[-1]]
            off = [top - chosen] if self.greedy else []
            if self.logprobs is not None:
                exact = chosen - top - np.log(np.exp(logits - top).sum())
                off.append(abs(self.logprobs[i] - exact))
            worst_of_each.append((np.max(off), np.max(off) / np.abs(logits).max()))
        worst, relative = np.max(worst_of_each, axis=0)  # NaN if any error is NaN
        return float(worst), float(relative)


def block(dtype: str, B: int, T: int, causal: bool) -> Work:
    """Return the benchmark of a whole GPT-2 block on inputs (B, T, C)."""
    item = np.dtype(dtype).itemsize
    weights = block_weights(dtype)

    def inputs() -> Host:
        """Return x and weights by name; matrices are (K, N) in float32, else (N, K)."""
        tensors: dict[str, Any] = weights.tensors()
        if dtype != "float32":
            tensors |= {name: matrix(tensors[name], dtype, "NK") for name in MATRICES}
        return {"x": np.resize(_sequences(T, C, dtype), (B, T, C)), **tensors}

    return Work(
        "block",
        _sequences_name(B, T, causal),
        dtype,
        {"B": B, "T": T, "causal": int(causal)},
        flops=24 * B * T * C * C + _attention_flops(B, T, causal),
        traffic=item * (2 * B * T * C + 12 * C * C) + 4 * 13 * C,
        truth=partial(_block_truth, T, causal, dtype),
        ours=partial(_blocks, weights, causal, dtype),
        inputs=inputs,
        roundings=STEPS_OF_A_BLOCK,
    )


def attention(dtype: str, B: int, T: int, causal: bool) -> Work:
    """Return the benchmark of attention, 12 heads of 64: [Q | K | V] (B, T, 3C) → (B, T, C)."""
    return Work(
        "attention",
        _sequences_name(B, T, causal),
        dtype,
        {"B": B, "T": T, "causal": int(causal)},
        flops=_attention_flops(B, T, causal),
        traffic=np.dtype(dtype).itemsize * 4 * B * T * C,
        truth=partial(_attention_truth, T, causal, dtype),
        ours=partial(_variants, "attention", {"n_head": NH, "causal": causal}, dtype),
        inputs=lambda: {"qkv": np.resize(_sequences(T, 3 * C, dtype), (B, T, 3 * C))},
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


def _sequences_name(B: int, T: int, causal: bool) -> str:
    return f"{B}x{T} {'causal' if causal else 'full'}"


def _attention_flops(B: int, T: int, causal: bool) -> int:
    """Return the FLOPs of attention: the scores Q·K and their product with V."""
    return 4 * B * (T * (T + 1) // 2 if causal else T * T) * C


BLOCKS = ((1, 128, False), (1, 1024, False), (1, 1024, True), (8, 1024, True), (64, 1024, True))
PRODUCTS: Mapping[str, tuple[int, int, bool, bool]] = {  # name → (N, K, gelu, residual)
    "qkv": (3 * C, C, False, False),
    "o": (C, C, False, False),
    "fc": (4 * C, C, False, False),
    "fc+gelu": (4 * C, C, True, False),
    "proj": (C, 4 * C, False, False),
    "proj+residual": (C, 4 * C, False, True),
}
ATTENTIONS = tuple(
    (B, T, mask) for B, T in ((1, 1024), (8, 1024), (64, 1024), (4, 4096)) for mask in (False, True)
)
WORKS: Mapping[str, tuple[tuple[str, ...], Callable[..., Work], Sequence[tuple[Any, ...]]]] = {
    # kind → (default dtypes, function that returns a benchmark, the function's further arguments)
    "block": (("bfloat16", "float32"), block, BLOCKS),
    "gemm": (
        ("bfloat16",),
        gemm,
        [(name, M, *of) for M in (128, 1024, 8192, 65536) for name, of in PRODUCTS.items()],
    ),
    "attention": (("bfloat16",), attention, ATTENTIONS),
}
KINDS = tuple(WORKS)


def chosen_works(
    what: str = "all", dtype: str | None = None, only: str | None = None
) -> list[Work]:
    """Return the benchmarks of a kind, in the order they are timed. Raises InputError.

    only: a text that the benchmark's name must contain, or None.
    """
    check_choice("--what", what, (*KINDS, "all"))
    if dtype is not None:
        check_choice("--dtype", dtype, DTYPES)
    works = [
        work(each, *sizes)
        for dtypes, work, rows in (WORKS.values() if what == "all" else (WORKS[what],))
        for each in ((dtype,) if dtype else dtypes)
        for sizes in rows
    ]
    chosen = [work for work in works if only is None or only in work.name]
    if not chosen:
        raise InputError(f"--only {only!r}: no name contains it; an example is '8x1024 causal'")
    return chosen


@lru_cache(maxsize=8)
def _sequences(T: int, width: int, dtype: str) -> NDArray[Any]:
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
def _block_truth(T: int, causal: bool, dtype: str) -> NDArray[Any]:
    x = widened(_sequences(T, C, dtype))
    return reference.block_forward(x, block_weights(dtype), causal).reshape(-1, C)


@lru_cache(maxsize=8)
def _attention_truth(T: int, causal: bool, dtype: str) -> NDArray[Any]:
    qkv = widened(_sequences(T, 3 * C, dtype))
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


def _blocks(
    weights: BlockWeights, causal: bool, dtype: str, sets: Sets, device: int
) -> Iterator[Contender]:
    """Yield the fused and skeleton blocks, and each with variant `mma` if it uses Hopper kernels.

    sets: copies of x and the weights; each call reads the weights of its copy.
    """
    for kernels in ("fused", "skeleton"):
        try:
            block = Block(weights, causal, f"cuda:{device}", dtype, kernels)
            bound, capture = _bound_block(block.spec, sets)
        except REFUSALS as error:
            yield Contender(kernels, partial(refuse, str(error)), dtype)
            continue
        yield Contender(kernels, capture, dtype)
        if any("hopper" in launch.name for each in bound for launch in each.launches):
            older = partial(_older, block.spec, sets)
            yield Contender(f"{kernels}, {OLDER}", older, dtype)


def _older(spec: BlockSpec, sets: Sets, rounds: int) -> Captured:
    return _bound_block(spec, sets, OLDER)[1](rounds)


class _Variant(Machine):
    """An executor of a pass's steps that uses one variant for matrix products and attention."""

    def __init__(self, do: Machine, variant: str) -> None:
        super().__init__(do.tensors)
        self._do, self._variant = do, variant

    def do(self, step: Step, into: Value) -> Value:
        if step.op in ("gemm", "attention"):
            step = step._replace(attrs={**step.attrs, "variant": self._variant})
        return self._do.do(step, into)


def _bound_block(
    spec: BlockSpec, sets: Sets, variant: str | None = None
) -> tuple[list[Recording], Capture]:
    """Record the block's launches for each copy of its inputs; return recordings and `capture`.

    The blocks share the memory of activations. variant: variant of matrix products and attention;
    None: the default variant.
    """

    def run(do: Machine) -> Value:
        return spec.run(do if variant is None else _Variant(do, variant))

    if spec.bounds is not None:
        sets = [_with_two_part(spec, each) for each in sets]
    outs = [cupy.empty_like(each["x"]) for each in sets]
    recordings = Recordings()
    copies = zip(sets, outs, strict=True)
    bound = [recordings.make(run, each, {OUTPUT: out}) for each, out in copies]

    def capture(rounds: int) -> Captured:
        found = capture_bound(bound, rounds, spec.overlapping, outs)
        return found._replace(kept=(bound, sets, outs, recordings))

    return bound, capture


def _with_two_part(spec: BlockSpec, arrays: Host) -> Host:
    """Convert the weight matrices to TwoPartMatrix, which float32 tensor-core products read."""
    matrices = {name: cupy.ascontiguousarray(arrays[name].T) for name in spec.matrices}
    return {**arrays, **{name: TwoPartMatrix.from_float32(w) for name, w in matrices.items()}}

"""What `gpt2block bench` times: blocks, matrix products and attention of GPT-2 small.

The inputs are random but repeat: sequences after some thousand tokens, rows of a product after a
prime number of rows. So every value of the largest output is compared with float64, whose result
NumPy computes within seconds.
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
from gpt2block.architectures.architecture import Value
from gpt2block.bench import measure
from gpt2block.bench.measure import Host, matrix, widened
from gpt2block.bench.race import (
    REFUSALS,
    Capture,
    Captured,
    Contender,
    Replay,
    first_and_last,
    refuse,
)
from gpt2block.block import Block
from gpt2block.checks import check_choice
from gpt2block.cuda import cupy, overlap, timing
from gpt2block.cuda.arrays import Bound
from gpt2block.errors import InputError, KernelError
from gpt2block.ops.registry import OPERATIONS
from gpt2block.parameters.gpt2 import BlockWeights
from gpt2block.passes.machine import Machine, Step
from gpt2block.run.block import BlockSpec
from gpt2block.run.cuda_block import OUTPUT
from gpt2block.run.model import Ids
from gpt2block.run.recording import Recording, Recordings
from gpt2block.weights.matrix import WeightMatrix
from gpt2block.weights.two_part import TwoPartMatrix

C, NH = 768, 12
TOKENS = 3072  # in different sequences
ROWS = 509  # different rows of a product; a prime, so that no tile of rows divides it
DTYPES = ("bfloat16", "float16", "float32")
MATRICES = ("w_qkv", "w_attn", "w_fc", "w_proj")
STEPS_OF_A_BLOCK = 7  # the result of each is rounded to the dtype of the block
OLDER = "mma"  # the variant for GPUs before Hopper, which Hopper runs too

Sets = Sequence[Host]  # copies of the inputs in device memory
Errors = tuple[float, float]  # absolute and relative, as `measure.errors` returns them


@dataclass(frozen=True)
class Work:
    """One thing to time.

    name: its sizes in words, such as "8x1024 causal"; the same for all dtypes. flops: a
    multiplication and an addition count as two; masked scores do not count. traffic: bytes, every
    input and weight read once, the output written once. Both are the minimum that every
    implementation needs.

    truth: gives the exact output, (n, columns), of which row i is row i mod n of the output; for
    sequences of tokens, the exact logits after one. ours: the contenders of gpt2block, on copies of
    the inputs and a device, of which the first one is what a user gets. Capturing shows whether
    they run. for_peers: what peers compute the same from: options of a kernel, or a task of a whole
    model (`tasks`); None: no peer takes part.

    roundings: consecutive results that are rounded to the dtype. rounding: the dtype whose rounding
    errors results may have; None: that of the arithmetic. rounds: of all copies in one turn; None:
    some milliseconds. turns: of calls that return when their result is on the host; None: of
    graphs. tokens: that a call writes; None for other works.
    """

    what: str
    name: str
    dtype: str
    sizes: Mapping[str, int]
    flops: int
    traffic: int
    truth: Callable[..., NDArray[Any]]
    ours: Callable[[Sets, int], Iterable[Contender]]
    for_peers: Any = None
    inputs: Callable[[], Host] = dict
    roundings: int = 1
    rounding: str | None = None
    rounds: int | None = None
    turns: int | None = None
    tokens: int | None = None

    def sets(self) -> Sets:
        """Copies of the inputs in device memory, which calls use in turn."""
        inputs = self.inputs()
        return measure.rotated(inputs, self.traffic) if inputs else [inputs]

    def check(self, replay: Replay, outs: tuple[Any, ...]) -> Errors:
        """Errors of the worst output of a replay.

        Arrays are filled with NaN before it; functions give an output after it.
        """
        for out in outs:
            if not callable(out):
                measure.poison(out)
        replay()
        found = [self._errors(out() if callable(out) else out) for out in outs]
        return max(found, key=lambda errors: errors[1] if isfinite(errors[1]) else inf)

    def _errors(self, out: Any) -> Errors:
        if isinstance(out, Written):
            return out.errors(self.truth)
        return measure.errors(out, self.truth())

    def times(self, replays: Mapping[str, Replay]) -> dict[str, float]:
        """Name → median ms of a replay, all of them in turn."""
        if self.turns is None:
            return timing.interleaved_ms(replays)
        return timing.interleaved_host_ms(replays, self.turns)


class Written(NamedTuple):
    """Some of the sequences that a contender has continued.

    logprobs: the log-probability of the last token of each, if the contender returns it. greedy:
    whether that token was the most likely one.
    """

    sequences: Sequence[Ids]
    logprobs: Sequence[float] | None = None
    greedy: bool = True

    def errors(self, last_logits: Callable[[Ids], NDArray[np.float64]]) -> Errors:
        """Errors of the last tokens: the difference of their logits from the largest ones, and
        that of their log-probabilities; relative to the largest logit."""
        found = []
        for i, ids in enumerate(self.sequences):
            logits = last_logits(ids[:-1])
            top, chosen = logits.max(), logits[ids[-1]]
            off = [top - chosen] if self.greedy else []
            if self.logprobs is not None:
                exact = chosen - top - np.log(np.exp(logits - top).sum())
                off.append(abs(self.logprobs[i] - exact))
            found.append((np.max(off), np.max(off) / np.abs(logits).max()))
        worst, relative = np.max(found, axis=0)  # NaN if one of them is
        return float(worst), float(relative)


def block(dtype: str, B: int, T: int, causal: bool) -> Work:
    """The whole block on (B, T, C)."""
    item = np.dtype(dtype).itemsize
    weights = block_weights(dtype)

    def inputs() -> Host:
        """Weights as the skeleton plan takes them in float32; else matrices (N, K) in the dtype."""
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
        for_peers={"eps": weights.eps, "causal": causal},
        inputs=inputs,
        roundings=STEPS_OF_A_BLOCK,
    )


def attention(dtype: str, B: int, T: int, causal: bool) -> Work:
    """Attention of 12 heads of 64 on packed rows: qkv (B, T, 3C) → (B, T, C)."""
    return Work(
        "attention",
        _sequences_name(B, T, causal),
        dtype,
        {"B": B, "T": T, "causal": int(causal)},
        flops=_attention_flops(B, T, causal),
        traffic=np.dtype(dtype).itemsize * 4 * B * T * C,
        truth=partial(_attention_truth, T, causal, dtype),
        ours=partial(_variants, "attention", {"n_head": NH, "causal": causal}, dtype),
        for_peers={"causal": causal},
        inputs=lambda: {"qkv": np.resize(_sequences(T, 3 * C, dtype), (B, T, 3 * C))},
    )


def gemm(
    dtype: str, product: str, M: int, N: int, K: int, gelu: bool = False, residual: bool = False
) -> Work:
    """[residual +] [gelu](a w + bias): a (M, K), w (K, N)."""
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
        ours=partial(_variants, "gemm", {"gelu": gelu, "split_k": True}, dtype),  # as in a block
        for_peers={"gelu": gelu, "residual": residual},
        inputs=inputs,
    )


def _sequences_name(B: int, T: int, causal: bool) -> str:
    return f"{B}x{T} {'causal' if causal else 'full'}"


def _attention_flops(B: int, T: int, causal: bool) -> int:
    """The scores, and their product with V."""
    return 4 * B * (T * (T + 1) // 2 if causal else T * T) * C


BLOCKS = ((1, 128, False), (1, 1024, False), (1, 1024, True), (8, 1024, True), (64, 1024, True))
PRODUCTS: Mapping[str, tuple[int, int, bool, bool]] = {  # name → N, K, gelu, residual
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
    # kind → dtypes by default, and a work by its arguments after the dtype
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
    """The works in the order they are timed; only those with `only` in their name.

    Raises InputError.
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
    found = [work for work in works if only is None or only in work.name]
    if not found:
        raise InputError(f"--only {only!r}: no name contains it; a name is such as '8x1024 causal'")
    return found


@lru_cache(maxsize=8)
def _sequences(T: int, width: int, dtype: str) -> NDArray[Any]:
    """Different sequences (n, T, width), as stored."""
    count = max(1, TOKENS // T)
    rng = np.random.default_rng(T)
    return rng.standard_normal((count, T, width), dtype=np.float32).astype(dtype)


@lru_cache(maxsize=4)
def block_weights(dtype: str) -> BlockWeights:
    """In float32, of values that the dtype has."""
    random = BlockWeights.random(0)
    tensors = {n: a.astype(dtype).astype(np.float32) for n, a in random.tensors().items()}
    return BlockWeights(**tensors, n_head=random.n_head, eps=random.eps)


@lru_cache(maxsize=4)
def _product_inputs(
    N: int, K: int, dtype: str
) -> tuple[NDArray[Any], WeightMatrix, NDArray[Any], NDArray[Any]]:
    """a, w, bias and residual; a bias of values that the dtype has."""
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


def bind_copies(
    bind: Callable[..., Bound], inputs: Sequence[tuple[Any, ...]], outs: list[Any]
) -> list[Bound]:
    """`bind(arrays, out)` for each copy; `outs`, at first None, then holds the outputs.

    So the variants of an operation share one output for each copy.
    """
    bound = [bind(arrays, out) for arrays, out in zip(inputs, outs, strict=True)]
    outs[:] = [each.out for each in bound]
    return bound


def capture_bound(
    bound: Sequence[Bound | Recording],
    rounds: int,
    overlapping: bool = False,
    outs: Sequence[Any] = (),
) -> Captured:
    """A graph of all launches, with the first and the last of `outs`, or of all outputs.

    overlapping: every kernel waits for the previous one itself, so launches may overlap.
    """
    launches = [launch for each in bound for launch in each.launches]
    if overlapping:
        launches = [overlap.overlapped(launch) for launch in launches]
    ends = first_and_last(outs or [each.out for each in bound])
    return Captured(timing.captured(launches * rounds), ends, bound)


def _variants(
    name: str, options: Mapping[str, Any], dtype: str, sets: Sets, device: int
) -> Iterator[Contender]:
    """The variants of an operation, the default one first."""
    operation = OPERATIONS[name]
    inputs = [tuple(each.values()) for each in sets]
    outs: list[Any] = [None] * len(inputs)

    def capture(variant: str, rounds: int) -> Captured:
        bound = bind_copies(partial(operation.bind, **options, variant=variant), inputs, outs)
        overlapping = dtype != "float32"  # kernels of float32 do not wait for the previous one
        return capture_bound(bound, rounds, overlapping)

    try:
        kernel = operation.bind(inputs[0], **options).launches[0].name
    except (InputError, KernelError):
        kernel = ""
    default = next((each.name for each in operation.variants if kernel in each.kernels), None)
    names = [each.name for each in operation.variants if dtype in (each.dtypes or (dtype,))]
    for variant in sorted(names, key=lambda each: each != default):
        yield Contender(variant, False, partial(capture, variant), dtype)


def _blocks(
    weights: BlockWeights, causal: bool, dtype: str, sets: Sets, device: int
) -> Iterator[Contender]:
    """The fused block, the same with variant `mma` instead of Hopper's, and the skeleton.

    A block reads the weights of `sets`, of which each copy of x has its own.
    """
    for kernels in ("fused", "skeleton"):
        try:
            block = Block(weights, causal, f"cuda:{device}", dtype, kernels)
            bound, capture = _bound_block(block.spec, sets)
        except REFUSALS as error:
            yield Contender(kernels, False, partial(refuse, str(error)), dtype)
            continue
        yield Contender(kernels, False, capture, dtype)
        if any("hopper" in launch.name for each in bound for launch in each.launches):
            older = partial(_older, block.spec, sets)
            yield Contender(f"{kernels}, {OLDER}", False, older, dtype)


def _older(spec: BlockSpec, sets: Sets, rounds: int) -> Captured:
    return _bound_block(spec, sets, OLDER)[1](rounds)


class _Variant(Machine):
    """Runs the steps of a machine, matrix products and attention by a variant."""

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
    """A block for each copy of x and weights; the copies share the memory of activations.

    variant: of matrix products and attention; None is the default one.
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
    """The arrays with the matrices as float32 on tensor cores takes them."""
    matrices = {name: cupy.ascontiguousarray(arrays[name].T) for name in spec.matrices}
    return {**arrays, **{name: TwoPartMatrix.from_float32(w) for name, w in matrices.items()}}

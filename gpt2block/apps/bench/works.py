"""Benchmarks of `gpt2block bench`: blocks of GPT-2 small.

The inputs are random but repeat: sequences after some thousand tokens. NumPy therefore computes the
distinct results in float64 within seconds, and every value of the largest output is compared with
them.
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
from gpt2block.engine.passes.executor import Executor
from gpt2block.engine.recording import Recordings
from gpt2block.errors import InputError
from gpt2block.files.parameters.gpt2 import BlockWeights
from gpt2block.models.weights.hi_lo import HiLoMatrix
from gpt2block.ops import workload
from gpt2block.ops.bench import race
from gpt2block.ops.workload import Host, matrix, widened

C = 768
TOKENS = 3072  # total number of tokens of the different sequences
DTYPES = ("bfloat16", "float16", "float32")
MATRICES = ("w_qkv", "w_attn", "w_fc", "w_proj")
STEPS_OF_A_BLOCK = 7  # steps of a block whose results are rounded to the block's dtype

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
    truth: Callable[..., np.ndarray]
    ours: Callable[[Sets, int], Iterable[race.Contender]]
    inputs: Callable[[], Host] = dict
    roundings: int = 1
    rounding: str | None = None
    rounds: int | None = None
    turns: int | None = None
    tokens: int | None = None

    def sets(self) -> Sets:
        """Return copies of the inputs in device memory, which successive calls use in turn."""
        inputs = self.inputs()
        return race.input_copies(inputs, self.traffic) if inputs else [inputs]

    def check(self, replay: race.Replay, outs: tuple[object, ...]) -> Errors:
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

    def _errors(self, out: object) -> Errors:
        if isinstance(out, GeneratedSequences):
            return out.errors(self.truth)
        return workload.errors(out, self.truth())

    def times(self, replays: Mapping[str, race.Replay]) -> dict[str, float]:
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


def block_works(dtype: str | None = None, only: str | None = None) -> list[Work]:
    """Return the benchmarks of blocks, in the order they are timed. Raises InputError.

    dtype: by default bfloat16, then float32. only: a text that the benchmark's name must contain.
    """
    if dtype is not None:
        check_choice("--dtype", dtype, DTYPES)
    dtypes = (dtype,) if dtype else ("bfloat16", "float32")
    return named([block(each, *sizes) for each in dtypes for sizes in BLOCKS], only)


def named(works: Iterable[Work], only: str | None) -> list[Work]:
    """Return the benchmarks whose names contain a text. Raises InputError if there are none."""
    chosen = [work for work in works if only is None or only in work.name]
    if not chosen:
        raise InputError(f"--only {only!r}: no name contains it; an example is '8x1024 causal'")
    return chosen


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
) -> Iterator[race.Contender]:
    """Yield the fused and the skeleton block.

    sets: copies of x and the weights; each call reads the weights of its copy.
    """
    for kernels in ("fused", "skeleton"):
        try:
            block = Block(weights, causal, f"cuda:{device}", dtype, kernels)
            capture = recorded(block.spec, sets)
        except race.REFUSALS as error:
            capture = partial(race.refuse, str(error))
        yield race.Contender(kernels, capture, dtype)


def recorded(
    spec: BlockSpec, sets: Sets, executor: Callable[[Executor], Executor] = lambda do: do
) -> race.Capture:
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

    def capture(rounds: int) -> race.Captured:
        found = race.capture_bound(bound, rounds, spec.overlapping, outs)
        return found._replace(kept=(bound, sets, outs, recordings))

    return capture


def _with_hi_lo(spec: BlockSpec, arrays: Host) -> Host:
    """Convert the weight matrices to HiLoMatrix, which float32 tensor-core products read."""
    matrices = {name: cupy.ascontiguousarray(arrays[name].T) for name in spec.matrices}
    return {**arrays, **{name: HiLoMatrix.from_float32(w) for name, w in matrices.items()}}

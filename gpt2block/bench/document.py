"""Times of the block, compared with LeetGPU's GPT-2 block challenge, and of GPT-2's decoding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter

import numpy as np

from gpt2block import doctor
from gpt2block.architectures.gpt2_weights import BlockWeights, GPT2Weights, random_input
from gpt2block.block import Block
from gpt2block.cuda import cupy
from gpt2block.cuda.timing import call_times
from gpt2block.model import GPT2
from gpt2block.run.model import DTYPES, start_all
from gpt2block.sampling import Sampling

# T → ms of the challenge's own `solve` on an H200; every call of it allocates device memory.
DOCUMENT_MS = {128: 0.545, 1024: 6.30, 4096: 67.8}


@dataclass(frozen=True)
class BlockTime:
    """GPT-2 small's block, B = 1: GPU time of its graph, and host times of repeated calls.

    A host time is that of one call, which does not wait for the GPU.
    """

    device: str
    T: int
    mask: str
    ms: float
    document_ms: float | None
    out_us: float  # host time of block(x, out=out)
    call_us: float  # host time of block(x), whose result is freed at once

    @property
    def speedup(self) -> float | None:
        return self.document_ms / self.ms if self.document_ms else None


def block_against_document(device: str | None = None) -> list[BlockTime]:
    """The skeleton block at the challenge's lengths and at T = 1, with and without a mask."""
    doctor.require_cuda("the bench")
    rows = []
    weights = BlockWeights.random(0)
    for causal in (False, True):
        block = Block(weights, causal=causal, device=device or "cuda", kernels="skeleton")
        for T in (1, *DOCUMENT_MS):
            x = cupy.asarray(random_input(T, (T, weights.n_embd)))
            out = cupy.empty_like(x)
            ms, out_us = call_times(partial(block, x, out=out))
            _, call_us = call_times(partial(block, x))
            document = None if causal else DOCUMENT_MS.get(T)
            mask = "causal" if causal else "none"
            rows.append(BlockTime(block.device, T, mask, ms, document, out_us, call_us))
    return rows


POSITION = 512  # tokens in the cache when a step is timed
BATCHES = (1, 8, 16)
STEPS, REPEATS = 50, 7
GREEDY, SAMPLED = Sampling(temperature=0), Sampling(temperature=0.8, top_k=50, top_p=0.9)


@dataclass(frozen=True)
class DecodeTime:
    """Time of a token for each row of GPT-2 small, sampled on the device, as the host sees it.

    It is the time of a call of `Decoding.next`, which returns the tokens on the host: the median of
    REPEATS runs of STEPS calls.
    """

    device: str
    dtype: str
    batch: int
    greedy_us: float
    sampled_us: float  # with temperature, top-k and top-p
    prompt_ms: float  # from a prompt of 1,024 tokens to its last logits on the host; one row
    weights_mb: float

    @property
    def tokens_per_s(self) -> float:
        return self.batch / self.greedy_us * 1e6


def decoding(device: str | None = None, size: str = "gpt2") -> list[DecodeTime]:
    """Every dtype at a few batch sizes; random weights, prompts of 512 random tokens."""
    doctor.require_cuda("the bench")
    weights = GPT2Weights.random(0, size)
    ids = np.random.default_rng(0).integers(weights.config.vocab_size, size=(17, 1024))
    rows = []
    for dtype in DTYPES:
        model = GPT2(weights, device=device or "cuda", dtype=dtype)
        prompt = ids[-1]
        model(prompt, last=True)
        prompt_ms = 1e3 * min(_seconds(partial(model, prompt, last=True)) for _ in range(REPEATS))
        for batch in BATCHES:
            prompts = list(ids[:batch, :POSITION].astype(np.int32))
            greedy_us, sampled_us = (
                median(_step_us(model, prompts, sampling) for _ in range(REPEATS))
                for sampling in (GREEDY, SAMPLED)
            )
            times = greedy_us, sampled_us, prompt_ms
            rows.append(DecodeTime(model.device, dtype, batch, *times, model.nbytes / 1e6))
    return rows


def _step_us(model: GPT2, prompts: list[np.ndarray], sampling: Sampling) -> float:
    steps = start_all(model.engine, prompts, [sampling] * len(prompts), STEPS + 5)
    for _ in range(3):
        steps.next()
    return 1e6 * _seconds(steps.next, STEPS) / STEPS


def _seconds(call: Callable[[], object], times: int = 1) -> float:
    start = perf_counter()
    for _ in range(times):
        call()
    return perf_counter() - start

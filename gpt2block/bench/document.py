"""Times on a GPU: the block beside the document its kernels come from; whole GPT-2, decoding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter

import numpy as np

from gpt2block import doctor
from gpt2block.block import Block
from gpt2block.cuda import cupy
from gpt2block.cuda.timing import call_times
from gpt2block.model import GPT2
from gpt2block.run.model import DTYPES
from gpt2block.text.sampling import Sampling
from gpt2block.weights.gpt2 import BlockWeights, GPT2Weights, random_input

# On an H200: T → ms of the document's own `solve`, which allocates device memory in every call.
DOCUMENT_MS = {128: 0.545, 1024: 6.30, 4096: 67.8}


@dataclass(frozen=True)
class BlockTime:
    """GPT-2 small's block, B = 1: its graph on the GPU, and warm calls seen from Python.

    The host times are of one call that does not wait for the GPU.
    """

    device: str
    T: int
    mask: str
    ms: float
    document_ms: float | None
    out_us: float  # host time of block(x, out=out)
    call_us: float  # host time of block(x), whose result is let go at once

    @property
    def speedup(self) -> float | None:
        return self.document_ms / self.ms if self.document_ms else None


def block_against_document(device: str | None = None) -> list[BlockTime]:
    """The skeleton block at the document's lengths, with and without a mask, and at T = 1."""
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


@dataclass(frozen=True)
class DecodeTime:
    """A token for each row of GPT-2 small, sampled on the device, as a program sees it.

    From one call of `Decoding.next` to the next, the token on the host; median of some runs of 50.
    """

    device: str
    dtype: str
    batch: int
    greedy_us: float
    sampled_us: float  # with temperature, top-k and top-p
    prompt_ms: float  # a prompt of 1,024 tokens to its last logits, on the host; one row
    weights_mb: float

    @property
    def tokens_per_s(self) -> float:
        return self.batch / self.greedy_us * 1e6


def decoding(device: str | None = None, size: str = "gpt2") -> list[DecodeTime]:
    """Every dtype, a few batch sizes; weights are random, prompts have 512 random tokens."""
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
            us = []
            for way in (Sampling(temperature=0), Sampling(temperature=0.8, top_k=50, top_p=0.9)):
                us.append(median(_step_us(model, prompts, way) for _ in range(REPEATS)))
            megabytes = model.nbytes / 1e6
            rows.append(DecodeTime(model.device, dtype, batch, us[0], us[1], prompt_ms, megabytes))
    return rows


def _step_us(model: GPT2, prompts: list[np.ndarray], way: Sampling) -> float:
    steps = model.engine.decode(prompts, [way] * len(prompts))
    for _ in range(3):
        steps.next()

    def run() -> None:
        for _ in range(STEPS):
            steps.next()

    return 1e6 * _seconds(run) / STEPS


def _seconds(call: Callable[[], object]) -> float:
    start = perf_counter()
    call()
    return perf_counter() - start

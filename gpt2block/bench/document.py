"""Compare times of gpt2block's GPT-2 block with times of LeetGPU's GPT-2 block challenge."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from gpt2block.bench.race import gpu_index
from gpt2block.block import Block
from gpt2block.cuda import cupy
from gpt2block.cuda.timing import call_times
from gpt2block.parameters.gpt2 import BlockWeights, random_input

# Tokens T → ms of the challenge's `solve` on an H200; each call of `solve` allocates device memory.
DOCUMENT_MS = {128: 0.545, 1024: 6.30, 4096: 67.8}


@dataclass(frozen=True)
class BlockTime:
    """Times of a GPT-2 small block for B = 1: GPU time of its CUDA graph, and host time per call.

    A host time is the time until one call returns; the call does not wait for the GPU.
    """

    device: str
    T: int
    mask: str
    ms: float
    document_ms: float | None
    out_us: float  # host time of block(x, out=out), in µs
    call_us: float  # host time of block(x), in µs; the result is freed at once

    @property
    def speedup(self) -> float | None:
        return self.document_ms / self.ms if self.document_ms else None


def block_against_document(device: str | None = None) -> list[BlockTime]:
    """Time the block with `kernels="skeleton"` at each T, with and without a causal mask.

    The lengths T are 1 and the lengths of DOCUMENT_MS.
    """
    index = gpu_index(device)
    rows = []
    weights = BlockWeights.random(0)
    with cupy.cuda.Device(index):
        for causal in (False, True):
            block = Block(weights, causal=causal, device=f"cuda:{index}", kernels="skeleton")
            for T in (1, *DOCUMENT_MS):
                x = cupy.asarray(random_input(T, (T, weights.n_embd)))
                out = cupy.empty_like(x)
                ms, out_us = call_times(partial(block, x, out=out))
                _, call_us = call_times(partial(block, x))
                document = None if causal else DOCUMENT_MS.get(T)
                mask = "causal" if causal else "none"
                rows.append(BlockTime(block.device, T, mask, ms, document, out_us, call_us))
    return rows

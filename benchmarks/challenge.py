"""Compare times of GPT-2's block with times of LeetGPU's GPT-2 block challenge. Needs a GPU.

    python -m benchmarks.challenge

Run it in the root of the repository.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from gpt2block.apps.cli.display import console, new_table, print_table
from gpt2block.block import Block
from gpt2block.cuda import cupy
from gpt2block.cuda.timing import call_times
from gpt2block.files.parameters.gpt2 import BlockWeights, random_input

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


def times() -> list[BlockTime]:
    """Time the block with `kernels="skeleton"` at each T, with and without a causal mask.

    The lengths T are 1 and the lengths of DOCUMENT_MS.
    """
    rows = []
    weights = BlockWeights.random(0)
    for causal in (False, True):
        block = Block(weights, causal=causal, device="cuda", kernels="skeleton")
        for T in (1, *DOCUMENT_MS):
            x = cupy.asarray(random_input(T, (T, weights.n_embd)))
            out = cupy.empty_like(x)
            ms, out_us = call_times(partial(block, x, out=out))
            _, call_us = call_times(partial(block, x))
            document = None if causal else DOCUMENT_MS.get(T)
            mask = "causal" if causal else "none"
            rows.append(BlockTime(block.device, T, mask, ms, document, out_us, call_us))
    return rows


def main() -> None:
    columns = ("T", "mask", "GPU ms", "document ms", "times faster")
    table = new_table((), (*columns, "block(x, out) µs", "block(x) µs"))
    rows = times()
    for row in rows:
        document = (f"{row.document_ms:.3f}", f"{row.speedup:.2f}") if row.document_ms else ("", "")
        host = (f"{row.out_us:.1f}", f"{row.call_us:.1f}")
        table.add_row(str(row.T), row.mask, f"{row.ms:.4f}", *document, *host)
    out = console()
    out.print(rows[0].device)
    out.print(
        "GPT-2 small, float32, B = 1. GPU: the graph, calls queued one behind the other, median."
    )
    out.print("Document: its own solve on an H200, device memory allocated in every call.")
    out.print("µs: host time of a warm call from Python, which does not wait for the GPU.")
    print_table(out, table)


if __name__ == "__main__":
    main()

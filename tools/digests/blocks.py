"""Blocks of GPT-2 and Llama in all dtypes, causal or not, with their traces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from gpt2block import (
    Block,
    BlockWeights,
    GPT2Config,
    LlamaBlock,
    LlamaBlockWeights,
    LlamaConfig,
    RopeScaling,
    random_input,
)
from gpt2block.checks import FLOATS

Made = Iterator[tuple[str, Any]]


def blocks(small: bool, device: str = "cuda") -> Made:
    yield from gpt2_blocks(small, device)
    yield from llama_blocks(small, device)


def gpt2_blocks(small: bool, device: str) -> Made:
    C, shapes = (128, ((5,), (2, 9))) if small else (768, ((128,), (1, 1024), (8, 512)))
    weights = BlockWeights.random(0, GPT2Config(n_head=C // 64, n_embd=C))
    kinds = [("skeleton", "float32"), *(("fused", dtype) for dtype in FLOATS)]
    for kernels, dtype in kinds:
        for causal in (True, False):
            block = Block(weights, causal, device, dtype, kernels)
            yield from outputs(f"block {kernels} {dtype} causal {causal}", block, C, shapes)


def llama_blocks(small: bool, device: str) -> Made:
    """Blocks with grouped queries; without and with biases, scaled RoPE and rotated neighbours."""
    C, shapes = (128, ((5,), (2, 9))) if small else (1024, ((128,), (2, 512)))
    plain = LlamaConfig(n_head=C // 64, n_embd=C, n_kv_head=C // 128, n_ff=3 * C - 32)
    scaling = RopeScaling("llama3", 8.0, original_context=64)
    biased = replace(plain, attention_bias=True, mlp_bias=True, scaling=scaling)
    for name, config, half_split in (("half", plain, True), ("neighbours", biased, False)):
        weights = replace(LlamaBlockWeights.random(0, config), half_split=half_split)
        for dtype in FLOATS:
            for causal in (True, False):
                block = LlamaBlock(weights, causal, device, dtype)
                yield from outputs(f"llama block {name} {dtype} causal {causal}", block, C, shapes)
            x = random_input(1, (5, C)).astype(FLOATS[dtype])
            yield f"llama block {name} {dtype} positions", block(x, [3, 1, 4, 1, 59])


def outputs(name: str, block: Any, C: int, shapes: tuple[tuple[int, ...], ...]) -> Made:
    """Outputs of two calls, of which the second replays a graph, and the tensors of a trace."""
    for shape in shapes:
        x = random_input(1, (*shape, C)).astype(FLOATS[block.dtype])
        for turn in range(2):
            yield f"{name} {shape} {turn}", block(x)
        steps = block.trace(x).items()
        yield from ((f"{name} {shape} trace {step}", array) for step, array in steps)

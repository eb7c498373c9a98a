"""A Llama block on a GPU and on the emulator, compared with float64 NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpt2block import InputError, LlamaBlock, LlamaBlockWeights, LlamaConfig, RopeScaling, emulator
from gpt2block.array_checks import FLOATS
from gpt2block.bench.measure import tolerance
from gpt2block.emulator import loader

GROUPED = LlamaConfig(n_embd=36, n_head=6, n_kv_head=2, head_size=10, n_ff=52, attention_bias=True,
                      mlp_bias=True, scaling=RopeScaling("linear", 4.0))  # fmt: skip
CORES = LlamaConfig(n_embd=128, n_head=2, n_ff=176)  # heads of 64 channels
TWELVE = ("rms1", "qkv", "rope", "attn", "proj", "x1", "rms2", "gate", "up", "ff", "down", "output")
POSITIONS = np.array([7, 0, 3, 900, 4])


@pytest.fixture(params=["emulator", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "emulator" and (problem := loader.missing()):
        pytest.skip(problem)
    with emulator.emulated() if request.param == "emulator" else nullcontext():
        yield "cuda"


def random_x(*shape: int, dtype: str = "float32") -> NDArray[Any]:
    x = np.random.default_rng(1).standard_normal(shape, dtype=np.float32)
    return x.astype(FLOATS[dtype])


@pytest.mark.parametrize("half_split", [True, False])
def test_every_step_of_twelve(device: str, half_split: bool) -> None:
    weights = replace(LlamaBlockWeights.random(0, GROUPED), half_split=half_split)
    block, on_cpu = LlamaBlock(weights, device=device), LlamaBlock(weights, device="cpu")
    assert block.kernels == "skeleton"
    x = random_x(2, 5, 36)
    for positions in (POSITIONS, None):
        rows = block.compare(x, positions)
        assert [row.name for row in rows] == list(TWELVE)
        for row in rows:
            assert max(row.max_rel, row.total_rel) <= tolerance("float32"), row
    np.testing.assert_allclose(block(x), on_cpu(x), rtol=0, atol=1e-5)
    assert block.trace(x)["attn"].shape == (2, 5, 60)


def test_positions_of_each_call(device: str) -> None:
    """Calls of one shape share their buffers, and from the second call on a graph."""
    weights = LlamaBlockWeights.random(0, GROUPED)
    block = LlamaBlock(weights, device=device, causal=False)
    x, out = random_x(5, 36), np.empty((5, 36), np.float32)
    first = block(x, POSITIONS)
    for positions in (None, POSITIONS, POSITIONS + 1, POSITIONS, None):
        expected = LlamaBlock(weights, device="cpu", causal=False)(x, positions)
        assert block(x, positions, out=out) is out
        np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(block(x, POSITIONS), first)
    direct = LlamaBlock(weights, device=device, causal=False, graph=False)
    np.testing.assert_array_equal(direct(x, POSITIONS), first)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_fused_steps_in_16_bits(device: str, dtype: str) -> None:
    block = LlamaBlock(LlamaBlockWeights.random(0, CORES), device=device, dtype=dtype)
    assert block.kernels == "fused"
    rows = block.compare(random_x(5, 128, dtype=dtype), POSITIONS)
    assert [row.name for row in rows] == ["qkv", "rope", "attn", "x1", "ff", "output"]
    for row in rows:
        assert row.max_rel <= 2 * tolerance(dtype), row
        assert row.total_rel <= 4 * tolerance(dtype), row


def test_what_a_block_refuses(device: str) -> None:
    weights = LlamaBlockWeights.random(0, GROUPED)
    with pytest.raises(InputError, match="kernels 'fused': expected 'skeleton' for float32 on a"):
        LlamaBlock(weights, device=device, kernels="fused")
    with pytest.raises(InputError, match="kernels 'skeleton': expected 'fused' for float16"):
        LlamaBlock(weights, device=device, dtype="float16", kernels="skeleton")
    with pytest.raises(InputError, match="dtype 'float16': attention"):
        LlamaBlock(weights, device=device, dtype="float16")
    block = LlamaBlock(weights, device=device)
    with pytest.raises(InputError, match=r"x: expected shape \(T, 36\)"):
        block(random_x(5, 35))
    with pytest.raises(InputError, match="positions: expected 5 integers"):
        block(random_x(5, 36), [1, 2])
    with pytest.raises(InputError, match="positions: expected 0 to 2147483647, got -1"):
        block(random_x(1, 36), [-1])

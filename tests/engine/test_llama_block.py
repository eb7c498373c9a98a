"""The plans of a Llama block, compared with its ten-line definition in the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gpt2block import (
    Llama,
    LlamaBlock,
    LlamaBlockWeights,
    LlamaConfig,
    LlamaWeights,
    RopeScaling,
    cuda,
    random_input,
    reference,
)
from gpt2block.checks import FLOATS
from gpt2block.cuda import timing
from gpt2block.ops.workload import tolerance
from tests.devices import GPU, SOMEWHERE, one_order

TWELVE = ("rms1", "qkv", "rope", "attn", "proj", "x1", "rms2", "gate", "up", "ff", "down", "output")
SIX = ("qkv", "rope", "attn", "x1", "ff", "output")
PLAIN = LlamaConfig(n_head=3, n_embd=24, n_ff=40, eps=1e-3)
SIZES = {
    "plain": PLAIN,
    "grouped": LlamaConfig(n_head=6, n_kv_head=2, n_embd=40, head_size=10, n_ff=36),
    "one key": replace(PLAIN, n_kv_head=1, scaling=RopeScaling("linear", 4.0)),
    "biases": replace(PLAIN, attention_bias=True, mlp_bias=True),
    "biases of one half": replace(PLAIN, mlp_bias=True),
}
sizes = pytest.mark.parametrize("size", list(SIZES))
SIZES["cores"] = LlamaConfig(n_embd=128, n_head=2, n_ff=176)  # heads of 64 channels
SIZES["cuda"] = LlamaConfig(n_embd=36, n_head=6, n_kv_head=2, head_size=10, n_ff=52,
                            attention_bias=True, mlp_bias=True,
                            scaling=RopeScaling("linear", 4.0))  # fmt: skip
POSITIONS = np.array([3, 0, 9000, 7, 7, 1])


def block_weights(size: str, half_split: bool = True) -> LlamaBlockWeights:
    """Return weights that are large enough to affect the result."""
    weights = LlamaBlockWeights.random(0, SIZES[size])
    wide: dict[str, Any] = {name: 10 * a for name, a in weights.tensors().items() if a.ndim == 2}
    return replace(weights, **wide, half_split=half_split)


@sizes
@pytest.mark.parametrize("half_split", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_both_plans_are_the_ten_lines(size: str, half_split: bool, causal: bool) -> None:
    weights = block_weights(size, half_split)
    x = random_input(1, (2, len(POSITIONS), weights.n_embd))
    expected = reference.llama_block_forward(x, weights, POSITIONS, causal)
    traces = []
    for kernels in ("skeleton", "fused"):
        block = LlamaBlock(weights, causal=causal, device="cpu", kernels=kernels)
        names = tuple(step.name for step in block.steps)
        assert names == TWELVE if kernels == "skeleton" else names == SIX or "biases" in size
        out = np.empty_like(x)
        assert block(x, POSITIONS, out) is out
        traces.append(block.trace(x, POSITIONS))
        np.testing.assert_array_equal(traces[-1]["output"], out)
        assert np.abs(out - expected).max() <= 4e-6 * np.abs(expected).max()
    for name, tensor in traces[1].items():
        largest = np.abs(traces[0][name]).max()
        assert np.abs(tensor - traces[0][name]).max() <= 4e-6 * largest, name


@sizes
def test_interleaved_channels_are_those_of_halves_in_another_order(size: str) -> None:
    """Golden models of `transformers`, whose pairs of channels are halves, test the ten lines."""
    weights = block_weights(size).astype(np.float64)
    c, x = weights.config, random_input(2, (len(POSITIONS), weights.n_embd)).astype(np.float64)
    turned, of_halves = c.q_width + c.kv_width, np.arange(c.head_size).reshape(2, -1).T.ravel()
    order = np.arange(c.q_width + 2 * c.kv_width)
    order[:turned] = order[:turned].reshape(-1, c.head_size)[:, of_halves].ravel()
    bias = None if weights.b_qkv is None else weights.b_qkv[order]
    other = replace(weights, w_qkv=weights.w_qkv[:, order], b_qkv=bias, half_split=False)
    expected, found = (
        reference.llama_block_forward(x, each, POSITIONS) for each in (weights, other)
    )
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13 * np.abs(expected).max())


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_block_of_a_model_with_yarn(dtype: str) -> None:
    """A block equals the model's first one; YaRN scales scores by 1.4², which affects every row."""
    scaling = RopeScaling("yarn", 4.0, original_context=8, attention_factor=1.4)
    config = LlamaConfig(1, 4, 32, 16, 11, n_kv_head=2, n_ff=24, scaling=scaling)
    weights = LlamaWeights.random(2, config)
    traced = Llama(weights, device="cpu", dtype="float32").trace(np.arange(9))
    x = traced["embedding"].astype(dtype)
    found = LlamaBlock(weights.blocks[0], device="cpu", dtype=dtype)(x)
    expected = traced["h.0.output"]
    limit = 1e-6 if dtype == "float32" else 3e-3
    np.testing.assert_allclose(found, expected, rtol=0, atol=limit * np.abs(expected).max())
    plain = LlamaBlock(replace(weights.blocks[0], scaling=None), device="cpu")(traced["embedding"])
    assert np.abs(plain - expected).max() > 1e-3 * np.abs(expected).max()


# --- on the emulator and a GPU --------------------------------------------------------------------


@pytest.mark.parametrize("device", SOMEWHERE, indirect=True)
@pytest.mark.parametrize("half_split", [True, False])
def test_every_step_of_twelve(
    device: Any, half_split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = replace(LlamaBlockWeights.random(0, SIZES["cuda"]), half_split=half_split)
    block = LlamaBlock(weights, device="cuda")
    assert block.kernels == "skeleton"
    given: list[Any] = [POSITIONS[:5], None]
    if cuda.replaced():
        monkeypatch.setattr(timing, "gpu_ms", lambda _: 1.0)  # avoids many runs
        given = [given[half_split]]
    x = random_input(3, (2, 5, 36))
    for positions in given:
        rows = block.compare(x, positions)
        assert [row.name for row in rows] == list(TWELVE)
        for row in rows:
            assert max(row.max_rel, row.total_rel) <= tolerance("float32"), row
    assert block.trace(x)["attn"].shape == (2, 5, 60)


@one_order
def test_positions_of_each_call(device: Any) -> None:
    """Positions may change, although calls of a shape share buffers, and later a graph."""
    weights = LlamaBlockWeights.random(0, SIZES["cuda"])
    block = LlamaBlock(weights, device="cuda", causal=False)
    x, out = random_input(3, (6, 36)), np.empty((6, 36), np.float32)
    first = block(x, POSITIONS)
    for positions in (None, POSITIONS, POSITIONS + 1, POSITIONS, None):
        expected = LlamaBlock(weights, device="cpu", causal=False)(x, positions)
        assert block(x, positions, out=out) is out
        np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(block(x, POSITIONS), first)
    direct = LlamaBlock(weights, device="cuda", causal=False, graph=False)
    np.testing.assert_array_equal(direct(x, POSITIONS), first)


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("shuffled", "bfloat16"),
        *(pytest.param("gpu", d, marks=GPU.marks) for d in list(FLOATS)[1:]),
    ],
    indirect=["device"],
)
def test_the_fused_steps_in_16_bits(
    device: Any, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cuda.replaced():
        monkeypatch.setattr(timing, "gpu_ms", lambda _: 1.0)
    block = LlamaBlock(LlamaBlockWeights.random(0, SIZES["cores"]), device="cuda", dtype=dtype)
    assert block.kernels == "fused"
    rows = block.compare(random_input(3, (5, 128)).astype(FLOATS[dtype]), POSITIONS[:5])
    assert [row.name for row in rows] == list(SIX)
    for row in rows:
        assert row.max_rel <= 2 * tolerance(dtype), row
        assert row.total_rel <= 4 * tolerance(dtype), row

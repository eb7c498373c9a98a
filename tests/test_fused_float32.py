"""Block in float32 on tensor cores: what 16 bits (test_fused.py) do not have.

The rule on the GPU: its error against float64 is no larger than that of the documents' kernels.
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpt2block import (
    Block,
    BlockWeights,
    GPT2Config,
    InputError,
    random_input,
    reference,
)
from gpt2block import block as block_module
from gpt2block.block import two_part_problem
from tests import test_fused
from tests.test_attention_mma import both_masks
from tests.test_fused import SEVEN, poison

Array = NDArray[Any]
SMALL = GPT2Config(n_head=2, n_embd=128)


@pytest.fixture(scope="module")
def weights() -> BlockWeights:
    return BlockWeights.random(0, SMALL)


def with_one(weights: BlockWeights, name: str, value: float) -> BlockWeights:
    """The same but for one element of a tensor."""
    tensor = getattr(weights, name).copy()
    tensor.flat[7] = value
    changed: dict[str, Any] = {name: tensor}
    return replace(weights, **changed)


# --- with NumPy -----------------------------------------------------------------------------------


@both_masks
def test_with_numpy_it_is_the_seven_steps_in_float32(weights: BlockWeights, causal: bool) -> None:
    x = random_input(0, (2, 9, 128))
    block = Block(weights, causal=causal, device="cpu", kernels="fused")
    assert (block.dtype, block.kernels) == ("float32", "fused")
    assert list(block.trace(x)) == SEVEN
    np.testing.assert_array_equal(block(x), reference.block_forward(x, weights, causal))
    assert all(row.max_rel < 1e-6 for row in block.compare(x))


def test_the_bytes_of_the_weights(weights: BlockWeights) -> None:
    assert Block(weights, device="cpu").weight_bytes == 4 * (12 * 128 * 128 + 13 * 128)


def test_weights_that_scales_cannot_follow_from(
    weights: BlockWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_module, "_capability", lambda device: 90)
    assert two_part_problem(weights) is None
    assert block_module._choose("auto", "float32", weights, 0) == "fused"
    for name, value, message in (
        ("w_proj", np.nan, "w_proj: expected finite weights, found infinity or NaN"),
        ("beta2", -np.inf, "beta2: expected finite weights"),
        ("w_qkv", 3e38, "qkv: with these weights it may be as large as .*e.39, beyond 2.127"),
        ("gamma2", 1e38, "ln2: with these weights it may be as large as 1.1e.39"),
    ):
        wrong = with_one(weights, name, value)
        with pytest.raises(InputError, match=f"'fused': {message}.*use kernels='skeleton'"):
            block_module._choose("fused", "float32", wrong, 0)
        assert block_module._choose("auto", "float32", wrong, 0) == "skeleton"
        assert block_module._choose("fused", "float32", wrong, None) == "fused"
    narrow = BlockWeights.random(0, GPT2Config(n_head=3, n_embd=48))
    assert block_module._choose("auto", "float32", narrow, 0) == "skeleton"
    with pytest.raises(InputError, match="'fused': the fused attention takes heads of 64 channels"):
        block_module._choose("fused", "float32", narrow, 0)


# --- on the GPU -----------------------------------------------------------------------------------


cp, gpt2 = test_fused.cp, test_fused.gpt2  # fixtures


@pytest.mark.gpu
@both_masks
@pytest.mark.parametrize("T", [1, 17, 100, 128, 1000, 1024])
def test_no_less_accurate_than_the_documents_kernels(
    cp: ModuleType, gpt2: BlockWeights, T: int, causal: bool
) -> None:
    """And the same bits twice, in a graph, and for each sequence alone."""
    x = random_input(T, (3, T, 768))
    truth = reference.block_forward(x.astype(np.float64), gpt2, causal)
    block = Block(gpt2, causal=causal, device="cuda", kernels="fused")
    skeleton = Block(gpt2, causal=causal, device="cuda", kernels="skeleton")
    on_device, out = cp.asarray(x), cp.empty(x.shape, "float32")
    found = []
    for _ in range(3):  # launches, captures, replays
        poison(block)
        out.fill(np.nan)
        found.append(block(on_device, out=out).get())
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])
    for rows in (slice(None), 0):
        got = found[0] if rows == slice(None) else block(x[rows])
        own = np.abs(got - truth[rows])
        peer = np.abs(skeleton(x[rows]) - truth[rows])
        largest = np.abs(truth[rows]).max()
        rms = [float(np.sqrt((off**2).mean()) / largest) for off in (own, peer)]
        most = [float(off.max() / largest) for off in (own, peer)]
        print(f"B {3 if got.ndim == 3 else 1} T {T} causal {causal}: fused {most[0]:.2e} rms "
              f"{rms[0]:.2e}, skeleton {most[1]:.2e} rms {rms[1]:.2e}")  # fmt: skip
        assert rms[0] <= rms[1]
        assert most[0] <= most[1]
    np.testing.assert_array_equal(block(x[0]), found[0][0])


@pytest.mark.gpu
@pytest.mark.parametrize(
    "config",
    [GPT2Config(n_head=1, n_embd=64), SMALL, GPT2Config(n_head=25, n_embd=1600)],
    ids=lambda config: f"C{config.n_embd}",
)
def test_other_widths(cp: ModuleType, config: GPT2Config) -> None:
    weights = BlockWeights.random(1, config)
    x = random_input(0, (2, 33, config.n_embd))
    truth = reference.block_forward(x.astype(np.float64), weights, True)
    fused, skeleton = (
        float(np.abs(Block(weights, True, "cuda", kernels=kernels)(x) - truth).max())
        for kernels in ("fused", "skeleton")
    )
    print(f"C {config.n_embd}: fused {fused:.2e}, skeleton {skeleton:.2e}")
    assert fused <= skeleton


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1e-6, 1e6])
def test_an_x_of_any_size(cp: ModuleType, gpt2: BlockWeights, size: float) -> None:
    x = random_input(0, (100, 768)) * np.float32(size)
    x[:, 5] *= 100
    x[3] = 0
    truth = reference.block_forward(x.astype(np.float64), gpt2, True)
    fused, skeleton = (
        float(np.abs(Block(gpt2, True, "cuda", kernels=kernels)(x) - truth).max())
        for kernels in ("fused", "skeleton")
    )
    print(f"x {size:.0e}: fused {fused:.2e}, skeleton {skeleton:.2e}")
    assert fused <= skeleton


@pytest.mark.gpu
def test_direct_launches_and_a_graph_give_the_same_bits(cp: ModuleType, gpt2: BlockWeights) -> None:
    block, direct = (Block(gpt2, device="cuda", graph=graph) for graph in (True, False))
    assert block.kernels == "fused"
    assert block.weight_bytes == 4 * (12 * 768 * 768 + 13 * 768 + 9 * 768)  # and scales
    x, out = cp.empty((2, 30, 768), "float32"), cp.empty((2, 30, 768), "float32")
    for seed in range(4):
        x.set(random_input(seed, (2, 30, 768)))
        expected = direct(x).get()
        np.testing.assert_array_equal(block(x, out=out).get(), expected)
    np.testing.assert_array_equal(block(x, out=x).get(), expected)  # in place
    memory = cp.zeros(60 * 768 + 1, "float32")
    odd = memory[1:].reshape(2, 30, 768)
    odd[...] = cp.asarray(random_input(3, (2, 30, 768)))
    np.testing.assert_array_equal(block(odd).get(), expected)


@pytest.mark.gpu
def test_trace_and_compare(cp: ModuleType, gpt2: BlockWeights) -> None:
    block = Block(gpt2, causal=True, device="cuda", kernels="fused")
    x = random_input(0, (2, 30, 768))
    trace = block.trace(x)
    assert list(trace) == SEVEN
    assert {array.dtype.name for array in trace.values()} == {"float32"}
    assert trace["qkv"].shape == (2, 30, 2304)
    np.testing.assert_array_equal(trace["output"], block(x))
    assert isinstance(block.trace(cp.asarray(x))["gelu"], cp.ndarray)
    rows = block.compare(x)
    assert [row.kernel for row in rows[::2]][:2] == ["layernorm_narrow_split", "attention_fp32_mma"]
    for row in rows:
        print(row.name, row.kernel, f"{row.max_rel:.1e} {row.total_rel:.1e} {row.ms:.4f} ms")
        assert 0 < row.max_rel < 1e-6
        assert 0 < row.total_rel < 2e-6
        assert row.ms > 0


@pytest.mark.gpu
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_stays_in_the_rows_that_see_it(
    cp: ModuleType, gpt2: BlockWeights, value: float
) -> None:
    block = Block(gpt2, causal=True, device="cuda", kernels="fused")
    x = random_input(0, (2, 70, 768))
    clean = block(x)
    x[1, 40, 5] = value
    got = block(x)
    np.testing.assert_array_equal(got[0], clean[0])
    np.testing.assert_array_equal(got[1, :40], clean[1, :40])
    assert np.isnan(got[1, 40:]).all()

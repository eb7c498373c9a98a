"""BlockWeights and GPT2Weights: the packed buffer, the random distribution, wrong arguments."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from gpt2block import (
    SIZES,
    BlockWeights,
    GPT2Config,
    GPT2Weights,
    random_input,
)
from gpt2block.files.parameters.gpt2 import unpack
from gpt2block.models.config import model_shapes, size

SMALL = GPT2Config(n_head=3, n_embd=48)


def test_the_twelve_offsets_of_the_challenge() -> None:
    assert [array.flat[0] for array in unpack(np.arange(7_087_872)).values()] == [
        0, 768, 1536, 1771008, 1773312, 2363136, 2363904, 2364672, 2365440, 4724736, 4727808,
        7087104,
    ]  # fmt: skip


def test_packed_round_trip() -> None:
    packed = np.arange(7_087_872, dtype=np.float32)
    w = BlockWeights.from_packed(packed)
    assert w.w_qkv.shape == (768, 2304)
    assert w.w_qkv[1, 2] == 1536 + 2304 + 2
    assert w.b_proj[-1] == 7_087_871
    assert np.shares_memory(w.w_fc, packed)
    np.testing.assert_array_equal(w.to_packed(), packed)
    small = BlockWeights.random(0, SMALL)
    again = BlockWeights.from_packed(small.to_packed(), n_embd=48, n_head=3)
    for name, array in small.tensors().items():
        np.testing.assert_array_equal(getattr(again, name), array)


def test_random_has_the_challenge_distribution_and_biases() -> None:
    w = BlockWeights.random(5)
    assert w.gamma1.min() >= 0.8
    assert w.gamma1.max() <= 1.2
    assert np.abs(w.beta2).max() <= 0.1
    assert np.std(w.w_fc) == pytest.approx(0.02, rel=0.01)
    assert all(np.count_nonzero(b) == b.size for b in (w.b_qkv, w.b_attn, w.b_fc, w.b_proj))
    assert all(a.dtype == np.float32 for a in w.tensors().values())
    np.testing.assert_array_equal(BlockWeights.random(5).w_qkv, w.w_qkv)
    assert (BlockWeights.random(6).w_qkv != w.w_qkv).any()


def test_the_sizes_have_two_names() -> None:
    numbers = ("124M", "355M", "774M", "1558M")
    for name, number in zip(SIZES, numbers, strict=True):
        config = SIZES[name]
        assert size(number) is size(name) is config
        assert config.head_size == 64
        parameters = sum(math.prod(shape) for shape in model_shapes(config).values())
        assert number == f"{parameters / 1e6:.0f}M"
    assert BlockWeights.random(0, "gpt2-medium").n_head == 16


@pytest.mark.parametrize("tied", [True, False])
def test_a_random_model(tied: bool) -> None:
    config = GPT2Config(3, 2, 16, 9, 30, tie_word_embeddings=tied)
    w = GPT2Weights.random(7, config)
    found = list(w.tensors())
    assert {name: array.shape for name, array, _ in found} == model_shapes(config)
    assert (w.lm_head is w.wte) == tied
    for (name, array, layout), (_, again, _) in zip(
        found, GPT2Weights.random(7, config).tensors(), strict=True
    ):
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, again)
        kind = name.rpartition(".")[2]
        layouts = {"wte": "NK", "lm_head": "NK"}
        assert layout == ("KN" if kind[:2] == "w_" else layouts.get(kind))
        low, high = {"g": (0.8, 1.2), "b": (-0.1, 0.1)}.get(kind[0], (-0.12, 0.12))
        assert low <= array.min() < array.max() <= high
    assert len({array.ravel()[0] for _, array, _ in found}) == len(found)


def test_random_input() -> None:
    x = random_input(0, (2, 3, 768))
    assert x.dtype == np.float32
    assert -1 <= x.min() < -0.9 < 0.9 < x.max() <= 1


def test_numpy_integers_are_accepted_as_sizes() -> None:
    """Sizes are converted to int, because `save_pretrained` writes them to JSON."""
    sizes: dict[str, Any] = {"n_layer": np.int64(1), "n_head": np.int32(2), "n_embd": np.uint8(4)}
    config = GPT2Config(**sizes, eps=np.float32(0.5))
    assert json.loads(json.dumps(config.to_hugging_face()))["n_embd"] == 4
    assert config == GPT2Config(1, 2, 4, eps=0.5)

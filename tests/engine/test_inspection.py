"""Attention weights, the logit lens, and their display in notebooks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpt2block import (
    GPT2,
    GPT2Weights,
    Model,
    reference,
)
from gpt2block.files.parameters.arrays import random_model
from gpt2block.models.architectures.gemma3 import Gemma3Config
from gpt2block.models.architectures.granite import GraniteConfig
from gpt2block.models.architectures.mistral import MistralConfig
from gpt2block.models.config import ModelConfig
from tests.engine.test_compare import CONFIG, IDS, device  # noqa: F401


def test_attention_is_that_of_the_model(device: str) -> None:  # noqa: F811
    model = GPT2(GPT2Weights.random(0, CONFIG), device)
    weights = model.attention(IDS)
    assert weights.shape == (2, 1, 11, 11)
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-5)
    assert not weights[..., ~np.tri(11, dtype=bool)].any()
    trace = model.trace(IDS)
    for layer in range(2):
        v = trace[f"h.{layer}.qkv"][:, 128:]
        attn = trace[f"h.{layer}.attn"]
        np.testing.assert_allclose(weights[layer, 0] @ v, attn, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "own", "window", "scale"),
    [
        (MistralConfig, {"window": 4}, 4, 8**-0.5),
        (GraniteConfig, {"attention_multiplier": 0.7}, None, 0.7),
        (Gemma3Config, {"window": 3, "scalar": 4, "logits_cap": 0.1}, 3, 0.5),
    ],
)
def test_windows_and_scales_of_scores(
    kind: type[ModelConfig], own: dict[str, Any], window: int | None, scale: float
) -> None:
    """Each row in its window equals one by hand; the lens ends with the prediction here too."""
    sizes: Any = {"n_layer": 1, "n_head": 4, "n_kv_head": 2, "n_embd": 32, "n_ff": 40, "n_ctx": 24}
    config = kind(**sizes, vocab_size=53, **own)
    model: Model[Any] = Model.from_tensors(config, random_model(0, config), "cpu", "float32")
    heads = model.trace(IDS)["h.0.rope"].astype(np.float64).reshape(11, 8, 8).swapaxes(0, 1)
    for head, weights in enumerate(model.attention(IDS)[0]):
        scores = np.exp(scale * heads[head] @ heads[4 + head // 2].T)
        for t, row in enumerate(weights):
            first = 0 if window is None else max(0, t - window + 1)
            expected = scores[t, first : t + 1] / scores[t, first : t + 1].sum()
            np.testing.assert_allclose(row[first : t + 1], expected, rtol=1e-5)
            assert not row[:first].any()
            assert not row[t + 1 :].any()
    probabilities = reference.softmax(model(IDS))
    lens = model.logit_lens(IDS, top=1)
    np.testing.assert_allclose(lens.probabilities[-1, :, 0], probabilities.max(-1), rtol=1e-5)


def test_the_lens_ends_with_the_models_prediction(device: str) -> None:  # noqa: F811
    model = GPT2(GPT2Weights.random(0, CONFIG), device)
    lens = model.logit_lens(IDS, top=3)
    assert lens.ids.shape == lens.probabilities.shape == (3, 11, 3)
    probabilities = reference.softmax(model(IDS))
    np.testing.assert_array_equal(lens.ids[-1, :, 0], probabilities.argmax(-1))
    np.testing.assert_allclose(lens.probabilities[-1, :, 0], probabilities.max(-1), rtol=1e-4)
    assert (np.diff(lens.probabilities, axis=-1) <= 0).all()
    one = model.logit_lens(IDS[:1], top=53)
    np.testing.assert_allclose(one.probabilities.sum(-1), 1, rtol=1e-5)

"""Attention weights, the logit lens, and their display in notebooks."""

from __future__ import annotations

import re
from html import escape
from typing import Any

import numpy as np
import pytest

import gpt2block
from gpt2block import (
    GPT2,
    Block,
    BlockWeights,
    Comparisons,
    GPT2Weights,
    LogitLens,
    Model,
    random_input,
    reference,
)
from gpt2block.engine import notebook
from gpt2block.engine.generation.scoring import score
from gpt2block.engine.generation.sequences import Generation
from gpt2block.files.parameters.arrays import random_model
from gpt2block.models.architectures.gemma3 import Gemma3Config
from gpt2block.models.architectures.granite import GraniteConfig
from gpt2block.models.architectures.mistral import MistralConfig
from gpt2block.models.config import ModelConfig
from tests.engine.test_compare import CONFIG, IDS, device  # noqa: F401
from tests.markov import MarkovEngine, byte_encoding, cycle


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


def test_a_notebook_shows_text_as_text() -> None:
    engine = MarkovEngine(cycle(256))
    found = score(engine, byte_encoding(end=False), "a<script>b</script>")
    html = found._repr_html_()
    assert "<script" not in html
    assert re.sub("<[^>]*>", "", html).startswith("a&lt;script&gt;b&lt;/script&gt;")
    assert html.count("bits") == found.n_tokens + 1  # a tooltip per token, and bits per byte
    written = Generation("<b>&", (1, 2), (-1.0, -2.0), "length", 7)
    assert "&lt;b&gt;&amp;" in written._repr_html_()
    assert "2 tokens, ended: length, seed 7" in written._repr_html_()
    assert notebook.table(["<"], [["<", 1234, 0.5]]) == (
        "<table><thead><tr><th>&lt;</th></tr></thead><tbody><tr>"
        '<td style="text-align: left">&lt;</td><td style="text-align: right">1,234</td>'
        '<td style="text-align: right">0.5</td></tr></tbody></table>'
    )


def test_a_notebook_shows_compared_steps() -> None:
    model = GPT2(GPT2Weights.random(0, CONFIG), "cpu")
    rows = model.compare(IDS)
    assert rows._repr_html_().count("<tr>") == len(rows) + 1
    assert "h.1.gelu" in rows._repr_html_()
    block = Block(BlockWeights.random(0, CONFIG), device="cpu")
    assert "ln1" in block.compare(random_input(0, (3, 64)))._repr_html_()


def test_compared_steps_are_a_list_shown_as_a_table() -> None:
    block = Block(BlockWeights.random(0, CONFIG), device="cpu")
    rows = block.compare(random_input(0, (3, 64)))
    assert isinstance(rows, list)
    assert rows == list(rows)
    header, *lines = repr(rows).splitlines()
    assert re.split("  +", header) == [
        "step", "kernel", "shape", "alone, relative", "accumulated, relative",
    ]  # fmt: skip
    assert [line.split()[0] for line in lines] == [row.name for row in rows]
    errors = [f"{rows[1].max_rel:.3g}", f"{rows[1].total_rel:.3g}"]
    assert re.split("  +", lines[1]) == ["qkv", "reference.matmul_bias", "3 × 192", *errors]
    assert len({len(line) for line in [header, *lines]}) == 1  # aligned to the right
    many = Comparisons(rows * 20)
    assert len(repr(many)) < 3000
    assert "\n… 176 more\n" in repr(many)
    assert many._repr_html_().count("<tr>") == 201
    assert repr(Comparisons()).startswith("step")


def test_the_lens_is_a_table_of_texts() -> None:
    model = gpt2block.from_pretrained("shakespeare", "cpu")
    lens = model.logit_lens("To be", top=2)
    title, header, *lines = repr(lens).splitlines()
    assert title == "LogitLens of 6 blocks, 5 tokens, top 2: the most likely next token"
    assert re.split("  +", header) == ["after", "'T'", "'o'", "' '", "'b'", "'e'"]
    names = [line.split("  ")[0] for line in lines]
    assert names == ["embedding", *(f"block {n}" for n in range(6))]
    last = f"{chr(lens.ids[-1, -1, 0])!r} {lens.probabilities[-1, -1, 0]:.0%}"
    assert lines[-1].endswith(last)
    assert escape(last) in lens._repr_html_()
    longer = model.logit_lens("To be, <or>")
    assert "the last 6 of 11 tokens" in repr(longer)
    assert len(repr(longer)) < 1000
    assert "<th>&#x27;&lt;&#x27;</th>" in longer._repr_html_()


def test_the_lens_of_a_model_without_a_tokenizer_shows_ids() -> None:
    found = GPT2(GPT2Weights.random(0, CONFIG), "cpu").logit_lens([5, 6])
    lens = LogitLens(found.ids, found.probabilities)
    _, header, *lines = repr(lens).splitlines()
    assert header.split() == ["after", "0", "1"]  # positions
    assert lines[-1].split()[2] == str(lens.ids[-1, 0, 0])

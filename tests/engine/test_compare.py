"""Steps of a whole model traced and compared, its attention and the logit lens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpt2block import GPT2, GPT2Config, GPT2Weights, Model, reference
from gpt2block.files.parameters.arrays import random_model
from gpt2block.models.architectures.gemma3 import Gemma3Config
from gpt2block.models.architectures.granite import GraniteConfig
from gpt2block.models.architectures.mistral import MistralConfig
from gpt2block.models.config import ModelConfig
from gpt2block.ops.workload import tolerance
from tests.devices import GPU, running_on, slow

CONFIG = GPT2Config(n_layer=2, n_head=1, n_embd=64, n_ctx=24, vocab_size=53)
IDS = np.random.default_rng(0).integers(53, size=11)
TEN = ("ln1", "qkv", "attn", "proj", "x1", "ln2", "ff1", "gelu", "ff2", "output")
SEVEN = ("ln1", "qkv", "attn", "x1", "ln2", "gelu", "output")
FIVE = ("q", "attn", "x1", "gelu", "output")


def layers(names: tuple[str, ...]) -> list[str]:
    return [f"h.{layer}.{name}" for layer in range(2) for name in names]


DTYPES = ("float32", "bfloat16", "float8_e4m3fn")


@pytest.fixture(params=["cpu", "emulator", GPU])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    on_cpu = request.param == "cpu"
    where = "forward" if request.param == "emulator" else "gpu"
    with nullcontext() if on_cpu else running_on(where):
        yield "cpu" if on_cpu else "cuda"


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        *(("cpu", dtype) for dtype in DTYPES),
        slow("emulator", DTYPES[0]),
        slow("emulator", DTYPES[2]),
        *(pytest.param("gpu", dtype, marks=GPU.marks) for dtype in DTYPES),
    ],
    indirect=["device"],
)
def test_every_step_errs_by_rounding(device: str, dtype: str) -> None:
    model = GPT2(GPT2Weights.random(0, CONFIG), device, dtype)
    for cached in (False, True):
        rows = model.compare(IDS, cached)
        names = [row.name for row in rows]
        assert names == list(model.trace(IDS, cached))
        assert names[0] == "embedding"
        if device == "cpu":
            assert names[1:] == [*layers(TEN), "ln_f", "logits"]
        elif cached:
            assert names[1:] == [*layers(FIVE), "logits"]
        else:
            assert names[1:] == [*layers(SEVEN), "ln_f", "logits.0", "scores.0"]
        for row in rows:
            assert row.max_rel <= tolerance("float32" if dtype == "float32" else "bfloat16"), row
            assert row.total_rel < 0.02, row
            assert row.ms > 0
            assert row.shape[0] == (1 if cached else len(IDS))


def test_a_trace_holds_what_a_call_returns(device: str) -> None:
    model = GPT2(GPT2Weights.random(0, CONFIG), device)
    trace = model.trace(IDS)
    logits = trace["logits" if device == "cpu" else "logits.0"]
    np.testing.assert_array_equal(logits, model(IDS))
    streams = [trace[name] for name in ("embedding", "h.0.output", "h.1.output", "ln_f")]
    np.testing.assert_array_equal(np.stack(streams), model.hidden_states(IDS))


def test_a_step_that_is_wrong_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    right = reference.gelu

    def gelu(x: NDArray[Any]) -> NDArray[Any]:
        return right(x) * (np.float32(1.01) if x.dtype == np.float32 else 1)

    monkeypatch.setattr(reference, "gelu", gelu)
    rows = GPT2(GPT2Weights.random(0, CONFIG), "cpu").compare(IDS)
    assert {row.name for row in rows if row.max_rel > 1e-3} == {"h.0.gelu", "h.1.gelu"}
    before = [row for row in rows if row.name in ("embedding", "h.0.ff1")]
    assert max(row.total_rel for row in before) < 1e-5 < rows[-1].total_rel


# --- attention and the logit lens -----------------------------------------------------------------


def test_attention_is_that_of_the_model(device: str) -> None:
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


def test_the_lens_ends_with_the_models_prediction(device: str) -> None:
    model = GPT2(GPT2Weights.random(0, CONFIG), device)
    lens = model.logit_lens(IDS, top=3)
    assert lens.ids.shape == lens.probabilities.shape == (3, 11, 3)
    probabilities = reference.softmax(model(IDS))
    np.testing.assert_array_equal(lens.ids[-1, :, 0], probabilities.argmax(-1))
    np.testing.assert_allclose(lens.probabilities[-1, :, 0], probabilities.max(-1), rtol=1e-4)
    assert (np.diff(lens.probabilities, axis=-1) <= 0).all()
    one = model.logit_lens(IDS[:1], top=53)
    np.testing.assert_allclose(one.probabilities.sum(-1), 1, rtol=1e-5)

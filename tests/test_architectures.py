"""Models of random small configurations, compared with `transformers` where it is installed."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gpt2block
from tests.devices import GPU

CASES = range(60)
NONE = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def sizes(rng: random.Random) -> dict[str, Any]:
    """Of a model with RoPE: grouped queries, odd numbers of heads, ties, one layer to three."""
    n_kv_head = rng.choice((1, 1, 2, 3))
    n_head = n_kv_head * rng.choice((1, 2, 3, 5))
    head_dim = 2 * rng.randint(1, 12)
    return {
        "hidden_size": n_head * head_dim,
        "intermediate_size": rng.randint(1, 80),
        "num_hidden_layers": rng.randint(1, 3),
        "num_attention_heads": n_head,
        "num_key_value_heads": n_kv_head,
        "head_dim": head_dim,
        "vocab_size": rng.randint(20, 120),
        "max_position_embeddings": rng.choice((24, 32, 64)),
        "rms_norm_eps": rng.choice((1e-6, 1e-5, 1e-3)),
        "rope_theta": rng.choice((10.0, 1e4, 1e6)),
        "tie_word_embeddings": rng.random() < 0.5,
        "hidden_act": "silu",
        **NONE,
    }


def llama(rng: random.Random) -> dict[str, Any]:
    biases = {name: rng.random() < 0.3 for name in ("attention_bias", "mlp_bias")}
    return sizes(rng) | {"hidden_size": 4 * rng.randint(2, 20)} | biases


def qwen2(rng: random.Random) -> dict[str, Any]:
    found = sizes(rng)
    del found["head_dim"]
    return found | {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 1}


def mistral(rng: random.Random) -> dict[str, Any]:
    found = sizes(rng) | {"hidden_size": 4 * rng.randint(2, 20)}
    window = rng.choice((None, found["max_position_embeddings"], 4096))
    return found | {"sliding_window": window}


KINDS: Mapping[str, Callable[[random.Random], dict[str, Any]]] = {
    each.__name__: each for each in (llama, qwen2, mistral)
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def error(found: Any, expected: Any) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@each_kind
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU.marks)])
def test_logits_and_greedy_tokens_are_those_of_transformers(
    kind: str, device: str, tmp_path: Path
) -> None:
    """Logits, and batches of unequal lengths, whose tokens differ where two are as likely."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    for seed in CASES:
        settings = KINDS[kind](random.Random(seed))
        torch.manual_seed(seed)
        config = transformers.AutoConfig.for_model(kind, **settings)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        with torch.no_grad():
            for name, tensor in model.named_parameters():
                spread = 0.3 if tensor.ndim == 1 else tensor.shape[1] ** -0.5
                tensor.normal_("norm" in name, spread)
        folder = tmp_path / str(seed)
        model.eval().save_pretrained(folder)
        ours = gpt2block.from_pretrained(folder, device=device)
        rng = np.random.default_rng(seed)
        V, n_ctx = config.vocab_size, config.max_position_embeddings
        rows = [rng.integers(0, V, n) for n in (n_ctx, 1, n_ctx - 8)]
        with torch.no_grad():
            expected = [model.double()(torch.tensor(row[None])).logits[0].numpy() for row in rows]
        limit = 2e-6 if device == "cpu" else 1e-5
        for got, exact in zip(ours(rows), expected, strict=True):
            assert error(got, exact) <= limit, (seed, settings)
        prompts = [rows[1].tolist(), rows[2].tolist(), rows[2][:5].tolist()]
        for prompt, made in zip(
            prompts, ours.generate(prompts, temperature=0, max_new_tokens=8), strict=True
        ):
            text = list(prompt)
            for token in made.tokens:
                with torch.no_grad():
                    logits = model(torch.tensor([text])).logits[0, -1]
                assert logits.max() - logits[token] <= 2 * limit * logits.abs().max(), (seed, text)
                text.append(int(token))

"""Make tests/golden/llama-*: tiny Llamas and the results of `transformers` for them.

    python tools/make_golden_llama.py

Each folder is an ordinary checkpoint with random float16 weights, which are large enough that every
part of a block affects the logits. "shards" was written by `transformers` itself, in several files.

`expected.safetensors`: ids (2, 23); stream (layers + 1, 2, 23, C), the residual stream before and
after each block; hidden (2, 23, C), after the final RMSNorm; logits (2, 23, V); greedy (200,), the
most likely continuation of the first 8 ids of the first row. All were computed in float64 and
rounded to float32 once. `transformers` converts angles, norms and softmax to float32 by name, so
that these names stand for float64 while it computes.

The committed files were made with torch 2.15.0 and transformers 5.23.0. The package itself needs
neither.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file
from transformers import LlamaConfig, LlamaForCausalLM

FOLDER = Path(__file__).parent.parent / "tests" / "golden"
BATCH, TOKENS, PROMPT, NEW = 2, 23, 8, 200
SHAPE: dict[str, Any] = {
    "hidden_size": 36,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "vocab_size": 89,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-4,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS: Mapping[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "scaled": {"rope_scaling": LLAMA3, "rope_theta": 500.0},
    "tied": {
        "tie_word_embeddings": True,
        "num_key_value_heads": 1,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    },
    "shards": {"rope_scaling": LLAMA3, "num_key_value_heads": 1},
}


def main() -> None:
    for name, changed in MODELS.items():
        make(FOLDER / f"llama-{name}", {"tie_word_embeddings": False, **SHAPE, **changed})
    made = [file for file in FOLDER.glob("llama-*/*") if file.is_file()]
    print(f"{len(made)} files, {sum(file.stat().st_size for file in made):,} bytes")


def make(folder: Path, settings: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    model = LlamaForCausalLM._from_config(
        LlamaConfig(**deepcopy(settings)), attn_implementation="eager"
    ).eval()
    weights = {name: drawn(rng, name, tuple(t.shape)) for name, t in model.state_dict().items()}
    if settings["tie_word_embeddings"]:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict({name: torch.tensor(array) for name, array in weights.items()})
    folder.mkdir(parents=True, exist_ok=True)
    if folder.name == "llama-shards":
        model.half().save_pretrained(folder, max_shard_size="20KB")
        (folder / "generation_config.json").unlink(missing_ok=True)
    else:
        if settings["tie_word_embeddings"]:
            del weights["lm_head.weight"]
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **settings}
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    ids = rng.integers(0, settings["vocab_size"], (BATCH, TOKENS))
    save_file(evaluated(settings, weights, ids), folder / "expected.safetensors")


def drawn(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> NDArray[np.float16]:
    """Draw γ around 1 and all else around 0; matrices of blocks preserve the input's magnitude."""
    array = rng.standard_normal(shape)
    if len(shape) == 1:
        array = 0.3 * array + ("norm" in name)
    else:
        array = array / np.sqrt(shape[1] if ".layers." in name else 4)
    return array.astype(np.float16)


@contextmanager
def in_float64() -> Iterator[None]:
    """Let `torch.float32`, `torch.float` and `Tensor.float` stand for float64."""
    names, method = ("float32", "float"), torch.Tensor.float
    kept = {name: getattr(torch, name) for name in names}
    for name in names:
        setattr(torch, name, torch.float64)
    torch.Tensor.float = torch.Tensor.double
    try:
        yield
    finally:
        torch.Tensor.float = method
        for name, dtype in kept.items():
            setattr(torch, name, dtype)


def evaluated(
    settings: dict[str, Any], weights: Mapping[str, NDArray[Any]], ids: NDArray[np.int64]
) -> dict[str, NDArray[Any]]:
    """Compute residual stream, hidden, logits and the greedy continuation in float64."""
    with in_float64(), torch.no_grad():
        config = LlamaConfig(**deepcopy(settings))
        model = LlamaForCausalLM._from_config(config, attn_implementation="eager").double().eval()
        doubles = {name: torch.tensor(np.float64(array)) for name, array in weights.items()}
        model.load_state_dict(doubles, strict=not config.tie_word_embeddings)
        stream: list[torch.Tensor] = []
        hidden: list[torch.Tensor] = []
        hooks = [
            module.register_forward_pre_hook(lambda _, inputs: stream.append(inputs[0]))
            for module in (*model.model.layers, model.model.norm)
        ]
        hooks.append(
            model.model.norm.register_forward_hook(lambda _, inputs, out: hidden.append(out))
        )
        logits = model(torch.tensor(ids), use_cache=False).logits
        for hook in hooks:
            hook.remove()
        assert logits.dtype == hidden[0].dtype == torch.float64
        text = torch.tensor(ids[:1, :PROMPT])
        gaps = []
        for _ in range(NEW):
            last = model(text, use_cache=False).logits[0, -1]
            best = last.topk(2)
            gaps.append(float(best.values[0] - best.values[1]))
            text = torch.cat([text, best.indices[None, :1]], 1)
    print(f"the smallest lead of a greedy token: {min(gaps):.1e}")
    return {
        "ids": ids.astype(np.int32),
        "stream": torch.stack(stream).numpy().astype(np.float32),
        "hidden": hidden[0].numpy().astype(np.float32),
        "logits": logits.numpy().astype(np.float32),
        "greedy": text[0, PROMPT:].numpy().astype(np.int32),
    }


if __name__ == "__main__":
    main()

"""Make tests/golden/tiny, llama-* and others: tiny models and the results of `transformers`.

    python tools/make_golden.py            # all
    python tools/make_golden.py qwen2

Each folder is an ordinary checkpoint with random float16 weights. They are large enough that every
part of a block affects the logits, and are read without rounding. "llama-shards", in several files,
"qwen3_moe", "olmoe" and "lfm2_moe" were written by `transformers`.

`expected.safetensors`: ids (2, 23); stream (layers + 1, 2, 23, C), the residual stream before and
after each block; hidden (2, 23, C), after the final norm; logits (2, 23, V). "tiny" has a tied
lm_head; its file also has lm_head (101, 48), float16, and untied_logits computed with it. The other
files have greedy (200,), the most likely continuation of the first 8 ids of the first row. All
values were computed in float64 and rounded to float32 once. `transformers` converts a Llama's
angles, norms and softmax to float32 by name; these names are redefined as float64 meanwhile.

The committed files were made with torch 2.13.0 (tiny), 2.15.0 (llama-*), 2.14.1 (mistral, gemma3,
olmo3, ministral3, granitemoehybrid, lfm2, gemma4, qwen3_5, qwen3_moe, olmoe, lfm2_moe) and 2.11.0
(other files), and transformers 5.23.0, 5.24.0 (files of torch 2.14.1) or 5.17.0 (other files).
The package itself needs neither torch nor transformers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

FOLDER = Path(__file__).parent.parent / "tests" / "golden"
BATCH, TOKENS, PROMPT, NEW = 2, 23, 8, 200
NO_IDS = {"bos_token_id": None, "eos_token_id": None}
GPT2_SHAPE = {
    "n_layer": 3,
    "n_head": 4,
    "n_embd": 48,
    "n_positions": 40,
    "n_ctx": 40,
    "vocab_size": 101,
}
GPT2_CONFIG = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    **GPT2_SHAPE,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
    **NO_IDS,
    "torch_dtype": "float16",
}
LLAMA_SHAPE: dict[str, Any] = {
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
    **NO_IDS,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS: Mapping[str, dict[str, Any]] = {
    "llama-plain": {},
    "llama-grouped": {
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "llama-scaled": {"rope_scaling": LLAMA3, "rope_theta": 500.0},
    "llama-tied": {
        "tie_word_embeddings": True,
        "num_key_value_heads": 1,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    },
    "llama-shards": {"rope_scaling": LLAMA3, "num_key_value_heads": 1},
    "qwen2": {
        "model_type": "qwen2",
        "tie_word_embeddings": True,
        "num_key_value_heads": 1,
        "rope_theta": 1e6,
        "use_sliding_window": False,
        "sliding_window": 16,
        "max_window_layers": 1,
    },
    "qwen3": {
        "model_type": "qwen3",
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "attention_bias": True,
        "rope_theta": 1e6,
        "use_sliding_window": False,
        "sliding_window": 16,
        "max_window_layers": 1,
    },
    "granite": {
        "model_type": "granite",
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.7,
        "logits_scaling": 3.0,
    },
    "smollm3": {
        "model_type": "smollm3",
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
        "no_rope_layers": [1, 0, 1, 0],
        "use_sliding_window": False,
        "mlp_bias": True,
        "pad_token_id": None,
    },
    "phi3": {
        "model_type": "phi3",
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "partial_rotary_factor": 0.5,
        "original_max_position_embeddings": 4,
        "rope_scaling": {
            "rope_type": "longrope",
            "short_factor": [1.0, 1.0, 1.0],
            "long_factor": [1.0, 1.5, 4.0],
        },
        "pad_token_id": None,
    },
    "olmo2": {
        "model_type": "olmo2",
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "attention_bias": True,
    },
    "olmo3": {
        "model_type": "olmo3",
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 6,
        "rope_theta": None,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 500.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
        "pad_token_id": None,
    },
    "ministral3": {
        "model_type": "ministral3",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 14,
        "rope_theta": None,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "beta_fast": 4.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.3,
        },
        "pad_token_id": None,
    },
    "granitemoehybrid": {
        "model_type": "granitemoehybrid",
        "num_key_value_heads": 1,
        "shared_intermediate_size": 56,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "mamba_n_heads": 1,
        "layer_types": ["attention", "attention"],
        "position_embedding_type": "rope",
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.7,
        "logits_scaling": 3.0,
    },
    "nanochat": {
        "model_type": "nanochat",
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "attention_bias": True,
        "hidden_act": "relu2",
        "final_logit_softcapping": 6.0,
    },
    "mistral": {
        "model_type": "mistral",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 14,
        "sliding_window": 9,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 6,
        "query_pre_attn_scalar": 14,
        "rope_local_base_freq": 100.0,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        "final_logit_softcapping": 6.0,
        "pad_token_id": None,
    },
    "gemma4": {
        "model_type": "gemma4_text",
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "global_head_dim": 14,
        "hidden_act": None,
        "layer_types": 2 * ["sliding_attention", "full_attention"],
        "sliding_window": 6,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 89,
        "rope_theta": None,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 500.0,
                "partial_rotary_factor": 0.45,
            },
        },
        "final_logit_softcapping": 6.0,
        "pad_token_id": None,
    },
    "qwen3_5": {
        "model_type": "qwen3_5_text",
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 12,
        "linear_value_head_dim": 12,
        "pad_token_id": None,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "num_hidden_layers": 3,
        "mlp_only_layers": [1],
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 12,
        "norm_topk_prob": True,
        "pad_token_id": None,
    },
    "olmoe": {
        "model_type": "olmoe",
        "num_key_value_heads": 1,
        "intermediate_size": 20,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "pad_token_id": None,
    },
    "lfm2": {
        "model_type": "lfm2",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 14,
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "block_multiple_of": 4,
        "norm_eps": 1e-4,
        "tie_word_embeddings": True,
        "pad_token_id": None,
    },
    "lfm2_moe": {
        "model_type": "lfm2_moe",
        "num_key_value_heads": 1,
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "num_dense_layers": 1,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "norm_eps": 1e-4,
        "pad_token_id": None,
    },
}
Arrays = dict[str, NDArray[Any]]


def main() -> None:
    names = sys.argv[1:] or ["tiny", *MODELS]
    for name in names:
        if name == "tiny":
            make_gpt2(FOLDER / name)
        else:
            settings = {"tie_word_embeddings": False, **LLAMA_SHAPE, **MODELS[name]}
            make_model(FOLDER / name, settings)
    made = [file for name in names for file in (FOLDER / name).iterdir() if file.is_file()]
    print(f"{len(made)} files, {sum(file.stat().st_size for file in made):,} bytes")


def make_gpt2(folder: Path) -> None:
    rng = np.random.default_rng(0)
    tied, untied = (
        GPT2LMHeadModel._from_config(
            GPT2Config(**GPT2_SHAPE, **NO_IDS, tie_word_embeddings=tie), attn_implementation="eager"
        )
        for tie in (True, False)
    )
    weights = {name: gpt2_weight(rng, name, t.shape) for name, t in untied.state_dict().items()}
    ids = rng.integers(0, GPT2_SHAPE["vocab_size"], (BATCH, TOKENS))
    load(untied, weights)
    load(tied, {**weights, "lm_head.weight": weights["transformer.wte.weight"]})
    blocks, norm = tied.transformer.h, tied.transformer.ln_f
    expected = evaluated(tied, [*blocks, norm], ids)
    expected["lm_head"] = weights.pop("lm_head.weight")
    with torch.no_grad():
        expected["untied_logits"] = rounded(untied(torch.tensor(ids), use_cache=False).logits)
    write(folder, weights, GPT2_CONFIG, expected)


def make_model(folder: Path, settings: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    kind = settings.pop("model_type", "llama")
    more = {"experts_implementation": "eager"} if "num_experts" in settings else {}

    def model() -> Any:
        config = AutoConfig.for_model(kind, **deepcopy(settings))
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager", **more).eval()

    stored, adds_1 = model(), kind in ("gemma3_text", "qwen3_5_text")  # norms add 1 to weights
    weights = {
        n: llama_weight(rng, n, t.shape, int(not adds_1 or "linear_attn.norm" in n))
        for n, t in stored.state_dict().items()
    }
    for name, array in weights.items():
        if kind == "gemma4_text" and name.endswith("q_norm.weight"):
            array[:] = array * len(array) ** -0.5  # scores have no other scale
    if settings["tie_word_embeddings"]:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    stored.load_state_dict({name: torch.tensor(array) for name, array in weights.items()})
    ids = rng.integers(0, settings["vocab_size"], (BATCH, TOKENS))
    with in_float64():
        exact = model()
        load(exact, weights)
        last = exact.model.embedding_norm if kind.startswith("lfm2") else exact.model.norm
        expected = evaluated(exact, [*exact.model.layers, last], ids)
        expected["greedy"] = continued(exact, ids[:1, :PROMPT])
    if settings["tie_word_embeddings"]:
        del weights["lm_head.weight"]
    config = {"architectures": [type(stored).__name__], "model_type": kind, **settings}
    write(folder, weights, config, expected)
    if folder.name == "llama-shards" or "num_experts" in settings:  # experts have the hub's names
        (folder / "model.safetensors").unlink()
        size = "20KB" if folder.name == "llama-shards" else "1GB"
        stored.half().save_pretrained(folder, max_shard_size=size)
        (folder / "generation_config.json").unlink(missing_ok=True)


def write(folder: Path, weights: Arrays, config: dict[str, Any], expected: Arrays) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    save_file(expected, folder / "expected.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def gpt2_weight(rng: np.random.Generator, name: str, shape: Any) -> NDArray[np.float16]:
    """Draw γ around 1 and all else around 0; matrices of blocks preserve the input's magnitude."""
    array = rng.standard_normal(tuple(shape))
    if len(shape) == 1:
        array = 0.3 * array + (".ln_" in name and name.endswith("weight"))
    elif "wte" not in name and "lm_head" not in name:
        array = array / np.sqrt(shape[0] if ".h." in name else 4)
    return array.astype(np.float16)


def llama_weight(rng: np.random.Generator, name: str, shape: Any, mean: int) -> NDArray[np.float16]:
    """Draw weights of a Llama, with matrices (outputs, inputs). mean: mean of weights of norms."""
    array = rng.standard_normal(tuple(shape))
    if len(shape) == 1:
        array = 0.3 * array + mean * ("norm" in name or "scalar" in name)
    else:
        array = array / np.sqrt(shape[-1] if ".layers." in name else 4)
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


def load(model: Any, weights: Arrays) -> None:
    """Load weights in float64."""
    doubles = {name: torch.tensor(np.float64(array)) for name, array in weights.items()}
    model.double().eval().load_state_dict(doubles)


def evaluated(model: Any, stages: list[Any], ids: NDArray[np.int64]) -> Arrays:
    """Compute residual stream, hidden and logits. stages: the blocks and the final norm.

    Nanochat's final norm also normalizes the embedding, before all stages; that call is left out.
    """
    stream: list[torch.Tensor] = []
    hidden: list[torch.Tensor] = []
    hooks = [
        stage.register_forward_pre_hook(lambda _, inputs: stream.append(inputs[0]))
        for stage in stages
    ]
    hooks.append(stages[-1].register_forward_hook(lambda _, inputs, out: hidden.append(out)))
    with torch.no_grad():
        logits = model(torch.tensor(ids), use_cache=False).logits
    for hook in hooks:
        hook.remove()
    assert logits.dtype == hidden[-1].dtype == torch.float64
    inputs = torch.stack(stream[-len(stages) :])
    found = {"stream": inputs, "hidden": hidden[-1], "logits": logits}
    return {"ids": ids.astype(np.int32), **{name: rounded(t) for name, t in found.items()}}


def rounded(tensor: torch.Tensor) -> NDArray[np.float32]:
    found: NDArray[np.float32] = tensor.numpy().astype(np.float32)
    return found


def continued(model: Any, ids: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return the most likely tokens that follow."""
    text, gaps = torch.tensor(ids), []
    with torch.no_grad():
        for _ in range(NEW):
            best = model(text, use_cache=False).logits[0, -1].topk(2)
            gaps.append(float(best.values[0] - best.values[1]))
            text = torch.cat([text, best.indices[None, :1]], 1)
    print(f"the smallest lead of a greedy token: {min(gaps):.1e}")
    found: NDArray[np.int32] = text[0, ids.shape[1] :].numpy().astype(np.int32)
    return found


if __name__ == "__main__":
    main()

"""Make tests/golden/tiny: a tiny GPT-2 and the results of `transformers` for it.

    python tools/make_golden.py

`config.json` and `model.safetensors` are an ordinary checkpoint: 3 layers, 4 heads of size 12. The
random weights are large enough that every part of a block affects the logits, and float16, so that
the file is small and is read without rounding.

`expected.safetensors`: ids (2, 23); stream (4, 2, 23, 48), the residual stream before and after
each block; hidden (2, 23, 48), after the final LayerNorm; logits (2, 23, 101) with the tied
lm_head; lm_head (101, 48), float16, and untied_logits with it. All results were computed in float64
and rounded to float32 once.

The committed files were made with torch 2.13.0 and transformers 5.23.0. The package itself needs
neither.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file
from transformers import GPT2Config, GPT2LMHeadModel

FOLDER = Path(__file__).parent.parent / "tests" / "golden" / "tiny"
SHAPE = {
    "n_layer": 3,
    "n_head": 4,
    "n_embd": 48,
    "n_positions": 40,
    "n_ctx": 40,
    "vocab_size": 101,
}
BATCH, TOKENS = 2, 23
CONFIG = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    **SHAPE,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "torch_dtype": "float16",
}


def main() -> None:
    rng = np.random.default_rng(0)
    tied, untied = model(tie_word_embeddings=True), model(tie_word_embeddings=False)
    weights = {
        name: drawn(rng, name, tuple(tensor.shape)) for name, tensor in untied.state_dict().items()
    }
    ids = rng.integers(0, SHAPE["vocab_size"], (BATCH, TOKENS))
    untied.load_state_dict({name: torch.tensor(array) for name, array in weights.items()})
    weights_of_tied = {**weights, "lm_head.weight": weights["transformer.wte.weight"]}
    tied.load_state_dict({name: torch.tensor(array) for name, array in weights_of_tied.items()})
    stream, hidden, logits = evaluated(tied, ids)
    expected: dict[str, Any] = {
        "ids": ids.astype(np.int32),
        "stream": stream,
        "hidden": hidden,
        "logits": logits,
        "lm_head": weights.pop("lm_head.weight"),
        "untied_logits": evaluated(untied, ids)[2],
    }
    FOLDER.mkdir(parents=True, exist_ok=True)
    save_file(weights, FOLDER / "model.safetensors", {"format": "pt"})
    save_file(expected, FOLDER / "expected.safetensors")
    (FOLDER / "config.json").write_text(json.dumps(CONFIG, indent=1) + "\n")
    print(f"{FOLDER}: {sum(file.stat().st_size for file in FOLDER.iterdir()):,} bytes")


def model(tie_word_embeddings: bool) -> GPT2LMHeadModel:
    config = GPT2Config(
        **SHAPE, bos_token_id=None, eos_token_id=None, tie_word_embeddings=tie_word_embeddings
    )
    return GPT2LMHeadModel._from_config(config, attn_implementation="eager").double().eval()


def drawn(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> NDArray[np.float16]:
    """Draw γ around 1 and all else around 0; matrices of blocks preserve the input's magnitude."""
    array = rng.standard_normal(shape)
    if len(shape) == 1:
        array = 0.3 * array + (".ln_" in name and name.endswith("weight"))
    elif "wte" not in name and "lm_head" not in name:
        array = array / np.sqrt(shape[0] if ".h." in name else 4)
    return array.astype(np.float16)


def evaluated(
    gpt2: GPT2LMHeadModel, ids: NDArray[np.int64]
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
    """Compute residual stream, hidden and logits in float64."""
    stream: list[torch.Tensor] = []
    for block in gpt2.transformer.h:
        block.register_forward_pre_hook(lambda _, inputs: stream.append(inputs[0]))
    gpt2.transformer.ln_f.register_forward_pre_hook(lambda _, inputs: stream.append(inputs[0]))
    hidden: list[torch.Tensor] = []
    gpt2.transformer.ln_f.register_forward_hook(lambda _, inputs, output: hidden.append(output))
    with torch.no_grad():
        logits = gpt2(torch.tensor(ids), use_cache=False).logits
    assert logits.dtype == torch.float64
    found = torch.stack(stream), hidden[0], logits
    states, last, scores = (tensor.numpy().astype(np.float32) for tensor in found)
    return states, last, scores


if __name__ == "__main__":
    main()

"""Convert nanoGPT's checkpoints (https://github.com/karpathy/nanoGPT) to Hugging Face's layout.

The file is a dictionary written by `torch.save`: `model`, a state dict with Hugging Face's names,
and `model_args`, the sizes. Matrices are (outputs, inputs), as in `nn.Linear`. With `bias=False`
the linear layers have no biases and LayerNorm has no β. GPT-2's vocabulary is padded from 50257 to
50304 rows. The file does not say whether the model was trained with the tanh or the exact GELU;
gpt2block computes the tanh form for all, and docs/checkpoints.md gives the measured difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gpt2block.errors import CheckpointError
from gpt2block.files.checkpoints.pickles import describe
from gpt2block.files.checkpoints.stored import Stored
from gpt2block.models.config import GPT2_VOCABULARY, GPT2Config

_SIZES = {
    "n_layer": "n_layer",
    "n_head": "n_head",
    "n_embd": "n_embd",
    "block_size": "n_ctx",
    "vocab_size": "vocab_size",
}
_OTHERS = ("bias", "dropout")  # model_args of older files lack "bias"; their layers have biases
_PADDED = 50304


def as_hugging_face(
    model_args: Mapping[str, Any], found: Mapping[str, Stored]
) -> tuple[GPT2Config, dict[str, Stored]]:
    """Return the config, and the tensors in Hugging Face's layout.

    Matrices are transposed, padding rows are dropped, and missing biases become zeros. found:
    tensors by Hugging Face's names. Raises CheckpointError or InputError for model_args that are
    not nanoGPT's.
    """
    _check(model_args)
    config = GPT2Config(**{ours: model_args[theirs] for theirs, ours in _SIZES.items()})
    padded = config.vocab_size == _PADDED
    without_bias = not model_args.get("bias", True)
    tensors: dict[str, Stored] = {}
    for name, stored in found.items():
        tensor = stored
        if name.startswith("h.") and len(tensor.shape) == 2:
            tensor = tensor.transposed()
        elif padded and name in ("wte.weight", "lm_head.weight") and tensor.shape[:1] == (_PADDED,):
            tensor = replace(tensor, shape=(GPT2_VOCABULARY, *tensor.shape[1:]))
        tensors[name] = tensor
        if without_bias and name.startswith(("h.", "ln_f.")) and name.endswith(".weight"):
            bias = name.removesuffix("weight") + "bias"
            zeros = replace(tensor, label=bias, offset=None, shape=tensor.shape[-1:], order="C")
            tensors.setdefault(bias, zeros)
    return replace(config, vocab_size=GPT2_VOCABULARY) if padded else config, tensors


def _check(model_args: Mapping[str, object]) -> None:
    missing = [name for name in _SIZES if name not in model_args]
    unknown = [str(name)[:80] for name in model_args if name not in (*_SIZES, *_OTHERS)]
    if missing or unknown:
        problem = f"{missing[0]} is missing" if missing else f"{unknown[0]} is not known"
        raise CheckpointError(f"expected {', '.join((*_SIZES, *_OTHERS))}: {problem}")
    kinds = {**dict.fromkeys(_SIZES, (int, "an integer")), "bias": (bool, "true or false")}
    for name, (kind, words) in kinds.items():
        value = model_args.get(name, True)
        if type(value) is not kind:
            raise CheckpointError(f"{name}: expected {words}, got {describe(value)}")

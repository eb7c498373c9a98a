"""nanoGPT's checkpoints (https://github.com/karpathy/nanoGPT): a GPT-2 in PyTorch's own layers.

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

from gpt2block.checkpoints.pickles import describe
from gpt2block.checkpoints.stored import Entry
from gpt2block.config import GPT2Config

_SIZES = {
    "n_layer": "n_layer",
    "n_head": "n_head",
    "n_embd": "n_embd",
    "block_size": "n_ctx",
    "vocab_size": "vocab_size",
}
_OTHERS = ("bias", "dropout")  # files without the key `bias` are older and have biases
_PADDED, _VOCABULARY = 50304, 50257


def as_hugging_face(
    model_args: Mapping[str, Any], found: Mapping[str, Entry]
) -> tuple[GPT2Config, dict[str, Entry]]:
    """Return the config, and the tensors in Hugging Face's layout.

    Matrices are transposed, padding rows are dropped, and missing biases become zeros. found: by
    Hugging Face's names. Raises ValueError for model_args that are not nanoGPT's.
    """
    _check(model_args)
    sizes = {ours: model_args[theirs] for theirs, ours in _SIZES.items()}
    config = GPT2Config(**sizes)
    padded = config.vocab_size == _PADDED
    without_bias = not model_args.get("bias", True)
    tensors: dict[str, Entry] = {}
    for name, entry in found.items():
        if name.startswith("h.") and len(entry.shape) == 2:
            entry = entry.transposed()  # noqa: PLW2901
        elif padded and name in ("wte.weight", "lm_head.weight") and entry.shape[:1] == (_PADDED,):
            entry = entry._replace(shape=(_VOCABULARY, *entry.shape[1:]))  # noqa: PLW2901
        tensors[name] = entry
        if without_bias and name.startswith(("h.", "ln_f.")) and name.endswith(".weight"):
            zeros = entry._replace(offset=None, shape=entry.shape[-1:], order="C")
            tensors.setdefault(name.removesuffix("weight") + "bias", zeros)
    return replace(config, vocab_size=_VOCABULARY) if padded else config, tensors


def _check(model_args: Mapping[str, Any]) -> None:
    missing = [name for name in _SIZES if name not in model_args]
    unknown = [str(name)[:80] for name in model_args if name not in (*_SIZES, *_OTHERS)]
    if missing or unknown:
        problem = f"{missing[0]} is missing" if missing else f"{unknown[0]} is not known"
        raise ValueError(f"expected {', '.join((*_SIZES, *_OTHERS))}: {problem}")
    for name in _SIZES:
        if type(model_args[name]) is not int:
            raise ValueError(f"{name}: expected an integer, got {describe(model_args[name])}")
    if type(model_args.get("bias", True)) is not bool:
        raise ValueError(f"bias: expected true or false, got {describe(model_args['bias'])}")

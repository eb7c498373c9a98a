"""The reference of all areas: a simple GPT-2 in float64, and tiny checkpoints.

Names and layouts are Hugging Face's: matrices of blocks are (inputs, outputs).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from fuzzing import Rng, check
from gpt2block import GPT2Config

Array = NDArray[Any]
Tensors = dict[str, Array]
DTYPES: dict[str, Any] = {
    "float32": np.float32,
    "float64": np.float64,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}

_OURS = {
    "wte": "wte.weight", "wpe": "wpe.weight", "gamma_f": "ln_f.weight", "beta_f": "ln_f.bias",
    "lm_head": "lm_head.weight", "gamma1": "ln_1.weight", "beta1": "ln_1.bias",
    "w_qkv": "attn.c_attn.weight", "b_qkv": "attn.c_attn.bias", "w_attn": "attn.c_proj.weight",
    "b_attn": "attn.c_proj.bias", "gamma2": "ln_2.weight", "beta2": "ln_2.bias",
    "w_fc": "mlp.c_fc.weight", "b_fc": "mlp.c_fc.bias", "w_proj": "mlp.c_proj.weight",
    "b_proj": "mlp.c_proj.bias",
}  # fmt: skip
_STEM = ("wte.weight", "wpe.weight", "ln_f.weight", "ln_f.bias")


@dataclass(frozen=True)
class Sizes:
    """The sizes and options of a model."""

    n_layer: int
    n_head: int
    n_embd: int
    n_ctx: int
    vocab_size: int
    eps: float = 1e-5
    tied: bool = True
    exact_gelu: bool = False
    n_inner: int | None = None
    scaled: bool = True  # attention scores are divided by the square root of the head size
    scaled_by_layer: bool = False  # scores are also divided by the number of the layer, from 1

    @property
    def inner(self) -> int:
        return self.n_inner or 4 * self.n_embd


def sizes_of(config: GPT2Config) -> Sizes:
    """The sizes of a config."""
    return Sizes(
        config.n_layer, config.n_head, config.n_embd, config.n_ctx, config.vocab_size, config.eps,
        config.tie_word_embeddings,
    )  # fmt: skip


def random_sizes(rng: Rng) -> Sizes:
    """Return the sizes of a tiny model."""
    n_head = rng.whole(1, 4)
    return Sizes(
        n_layer=rng.whole(1, 4),
        n_head=n_head,
        n_embd=n_head * rng.whole(1, 6),
        n_ctx=rng.whole(1, 12),
        vocab_size=rng.whole(1, 30),
        eps=float(rng.choice([1e-5, 1e-3, 0.1])),
        tied=rng.chance(0.7),
    )


def shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Return the tensors' shapes by Hugging Face's names, without a prefix."""
    C, inner = sizes.n_embd, sizes.inner
    one = {
        "ln_1.weight": (C,), "ln_1.bias": (C,),
        "attn.c_attn.weight": (C, 3 * C), "attn.c_attn.bias": (3 * C,),
        "attn.c_proj.weight": (C, C), "attn.c_proj.bias": (C,),
        "ln_2.weight": (C,), "ln_2.bias": (C,),
        "mlp.c_fc.weight": (C, inner), "mlp.c_fc.bias": (inner,),
        "mlp.c_proj.weight": (inner, C), "mlp.c_proj.bias": (C,),
    }  # fmt: skip
    found: dict[str, tuple[int, ...]] = {
        "wte.weight": (sizes.vocab_size, C),
        "wpe.weight": (sizes.n_ctx, C),
    }
    for layer in range(sizes.n_layer):
        found |= {f"h.{layer}.{name}": shape for name, shape in one.items()}
    found |= {"ln_f.weight": (C,), "ln_f.bias": (C,)}
    return found if sizes.tied else found | {"lm_head.weight": (sizes.vocab_size, C)}


def random_tensors(rng: Rng, sizes: Sizes, dtype: str | None = None) -> Tensors:
    """Return random tensors. dtype: None draws one for each tensor."""
    tensors = {}
    names = list(DTYPES)
    for name, shape in shapes(sizes).items():
        kind = dtype or names[rng.whole(len(names))]
        values = rng.standard_normal(shape) * 0.4 + (name.endswith(("1.weight", "2.weight")))
        tensors[name] = values.astype(DTYPES[kind])
    return tensors


def config_json(sizes: Sizes) -> dict[str, Any]:
    """Return the content of config.json."""
    return {
        "model_type": "gpt2",
        "n_layer": sizes.n_layer,
        "n_head": sizes.n_head,
        "n_embd": sizes.n_embd,
        "n_positions": sizes.n_ctx,
        "vocab_size": sizes.vocab_size,
        "layer_norm_epsilon": sizes.eps,
        "tie_word_embeddings": sizes.tied,
        "activation_function": "gelu" if sizes.exact_gelu else "gelu_new",
        "n_inner": sizes.n_inner,
        "scale_attn_weights": sizes.scaled,
        "scale_attn_by_inverse_layer_idx": sizes.scaled_by_layer,
    }


def to_safetensors(tensors: Mapping[str, Array], prefix: str = "") -> bytes:
    """Return the bytes of a safetensors file, by the format's own library."""
    named = {
        name if name == "lm_head.weight" else prefix + name: np.ascontiguousarray(array)
        for name, array in tensors.items()
    }
    data: bytes = save(named)
    return data


def write(folder: Path, sizes: Sizes, tensors: Mapping[str, Array]) -> Path:
    """Write a Hugging Face directory."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_json(sizes)))
    (folder / "model.safetensors").write_bytes(to_safetensors(tensors))
    return folder


def label_of(ours: str) -> str:
    """Return Hugging Face's name of a tensor by gpt2block's name."""
    block, dot, kind = ours.rpartition(".")
    return block + dot + _OURS[kind]


def write_sparse(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Write a sparse safetensors file of zeros."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def layernorm(x: Array, gamma: Array, beta: Array, eps: float) -> Array:
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    result: Array = (x - mean) / np.sqrt(variance + eps) * gamma + beta
    return result


def gelu(x: Array, exact: bool) -> Array:
    if exact:
        erf = np.vectorize(math.erf, otypes=[float])(x / math.sqrt(2))
        half: Array = 0.5 * x * (1 + erf)
        return half
    result: Array = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return result


def softmax(scores: Array) -> Array:
    e = np.exp(scores - scores.max(-1, keepdims=True))
    result: Array = e / e.sum(-1, keepdims=True)
    return result


def attention(q: Array, k: Array, v: Array, scale: float) -> Array:
    """Compute one head; q, k, v and the result are (T, HS). scale: a further factor of scores."""
    scores = q @ k.T * (scale / math.sqrt(q.shape[-1]))
    scores[np.triu_indices(len(q), 1)] = -np.inf
    result: Array = softmax(scores) @ v
    return result


def block(
    x: Array, weights: Mapping[str, Array], n_head: int, eps: float, scale: float, exact_gelu: bool
) -> Array:
    """Compute a block of x (T, C), in float64."""
    w = {name: array.astype(np.float64) for name, array in weights.items()}
    size = x.shape[-1] // n_head
    n = layernorm(x, w["ln_1.weight"], w["ln_1.bias"], eps)
    q, k, v = np.split(n @ w["attn.c_attn.weight"] + w["attn.c_attn.bias"], 3, -1)
    heads = [slice(a, a + size) for a in range(0, x.shape[-1], size)]
    a = np.concatenate([attention(q[:, s], k[:, s], v[:, s], scale) for s in heads], -1)
    x = x + a @ w["attn.c_proj.weight"] + w["attn.c_proj.bias"]
    n = layernorm(x, w["ln_2.weight"], w["ln_2.bias"], eps)
    f = gelu(n @ w["mlp.c_fc.weight"] + w["mlp.c_fc.bias"], exact_gelu)
    result: Array = x + f @ w["mlp.c_proj.weight"] + w["mlp.c_proj.bias"]
    return result


def logits(sizes: Sizes, tensors: Mapping[str, Array], ids: Any) -> Array:
    """Return the logits (T, V) of tokens (T,), in float64."""
    w = {name: tensors[name].astype(np.float64) for name in _STEM}
    x = w["wte.weight"][ids] + w["wpe.weight"][: len(ids)]
    unscaled = 1 if sizes.scaled else math.sqrt(sizes.n_embd // sizes.n_head)
    for layer in range(sizes.n_layer):
        h = f"h.{layer}."
        of_block = {name[len(h) :]: tensors[name] for name in tensors if name.startswith(h)}
        scale = unscaled / (layer + 1 if sizes.scaled_by_layer else 1)
        x = block(x, of_block, sizes.n_head, sizes.eps, scale, sizes.exact_gelu)
    head = tensors["wte.weight" if sizes.tied else "lm_head.weight"].astype(np.float64)
    result: Array = layernorm(x, w["ln_f.weight"], w["ln_f.bias"], sizes.eps) @ head.T
    return result


def check_close(name: str, got: Any, truth: Array, relative: float = 2e-3) -> None:
    """Raise Difference unless `got` has the shape, the NaN positions and the values of `truth`."""
    array = np.asarray(got)
    check(array.shape == truth.shape, f"{name}: expected shape {truth.shape}, got {array.shape}")
    wide, exact = array.astype(np.float64), np.asarray(truth, np.float64)
    finite = np.isfinite(exact)
    same = np.array_equal(wide[~finite], exact[~finite], equal_nan=True)
    check(same, f"{name}: expected other values that are not finite")
    largest = float(np.abs(exact[finite]).max(initial=0))
    error = float(np.abs(wide - exact)[finite].max(initial=0))
    near = error <= relative * max(largest, 1e-3)
    check(near, f"{name}: off by {error:.3g} where the largest value is {largest:.3g}")

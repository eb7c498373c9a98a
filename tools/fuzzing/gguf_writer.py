"""GGUF files, written by the package `gguf` as llama.cpp's converter does."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize
from numpy.typing import NDArray

from gpt2block.architectures import GGUF_ARCHITECTURES, architecture_of
from gpt2block.architectures.phi3 import Phi3Config
from gpt2block.checkpoints import Checkpoint, TensorSource
from gpt2block.config import ModelConfig
from gpt2block.config.llama import LlamaConfig, RopeScaling

Arrays = dict[str, NDArray[Any]]
_GPT2 = {
    "wte": "token_embd.weight", "wpe": "position_embd.weight", "lm_head": "output.weight",
    "gamma_f": "output_norm.weight", "beta_f": "output_norm.bias",
    "gamma1": "attn_norm.weight", "beta1": "attn_norm.bias",
    "gamma2": "ffn_norm.weight", "beta2": "ffn_norm.bias",
    "w_qkv": "attn_qkv.weight", "b_qkv": "attn_qkv.bias",
    "w_attn": "attn_output.weight", "b_attn": "attn_output.bias",
    "w_fc": "ffn_up.weight", "b_fc": "ffn_up.bias",
    "w_proj": "ffn_down.weight", "b_proj": "ffn_down.bias",
}  # fmt: skip
_LLAMA = {
    "wte": "token_embd.weight", "lm_head": "output.weight", "gamma_f": "output_norm.weight",
    "gamma1": "attn_norm.weight", "gamma2": "ffn_norm.weight",
    "w_o": "attn_output.weight", "b_o": "attn_output.bias",
    "w_gate": "ffn_gate.weight", "b_gate": "ffn_gate.bias",
    "w_up": "ffn_up.weight", "b_up": "ffn_up.bias",
    "w_down": "ffn_down.weight", "b_down": "ffn_down.bias",
    "gamma_q": "attn_q_norm.weight", "gamma_k": "attn_k_norm.weight",
    "gamma_attn": "post_attention_norm.weight", "gamma_ff": "post_ffw_norm.weight",
}  # fmt: skip


def tensors_of(model: TensorSource) -> Arrays:
    """The tensors by GGUF's names, matrices (outputs, inputs), as llama.cpp stores them."""
    config, found = model.config, Arrays()
    for name, array, layout in model.tensors():
        h, _, kind = name.rpartition(".")
        block = f"blk.{h[2:]}." if h else ""
        turned = array.T if layout == "KN" else array
        turned = turned + np.float32(config.ADDED_TO_NORMS) if "gamma" in kind else turned
        if isinstance(config, Phi3Config) and kind in ("w_qkv", "w_gate", "w_up"):
            kept = found.pop(f"{block}ffn_up.weight", turned[:0])  # gate, before up
            fused = "attn_qkv" if kind == "w_qkv" else "ffn_up"
            rows = turned if kind != "w_qkv" else turned_first(turned, config)
            found[f"{block}{fused}.weight"] = np.concatenate([kept, rows])
            continue
        if not isinstance(config, LlamaConfig):
            found[block + _GPT2[kind]] = turned
        elif kind in ("w_qkv", "b_qkv"):
            ends = [config.q_width, config.q_width + config.kv_width]
            q, k, v = np.split(turned, ends)
            suffix = "weight" if kind == "w_qkv" else "bias"
            if GGUF_ARCHITECTURES[name_of(config)].TURNED:
                q, k = neighbours(q, config.n_head), neighbours(k, config.n_kv_head)
            found[f"{block}attn_q.{suffix}"] = q
            found[f"{block}attn_k.{suffix}"] = k
            found[f"{block}attn_v.{suffix}"] = v
        else:
            found[block + _LLAMA[kind]] = turned
    if isinstance(config, Phi3Config) and config.scaling is not None:
        short, long = config.scaling.factors, config.scaling.long_factors
        found["rope_factors_short.weight"] = np.array(short, np.float32)
        found["rope_factors_long.weight"] = np.array(long, np.float32)
    return found


def turned_first(rows: NDArray[Any], config: Phi3Config) -> NDArray[Any]:
    """Rows [Q | K | V], where heads of Q and K have all channels that RoPE turns before the others.

    Here each half of a head has its turned channels before its others.
    """
    Q = config.q_width + config.kv_width
    halves = rows[:Q].reshape(-1, 2, config.head_size // 2, rows.shape[1])
    pairs = math.ceil(config.rotary / 2)
    both = (halves[:, :, :pairs], halves[:, :, pairs:])
    heads = [half.reshape(len(halves), -1, rows.shape[1]) for half in both]
    return np.concatenate([np.concatenate(heads, 1).reshape(Q, -1), rows[Q:]])


def name_of(config: ModelConfig) -> str:
    """The architecture that a file names: that of Mistral is Llama's."""
    return architecture_of(config).GGUF or "llama"


def neighbours(rows: NDArray[Any], n_head: int) -> NDArray[Any]:
    """Rows of Q or K for a RoPE that turns neighbours, from those for half-split pairs."""
    split = rows.reshape(n_head, 2, len(rows) // n_head // 2, -1)
    turned: NDArray[Any] = split.transpose(0, 2, 1, 3).reshape(rows.shape)
    return turned


def metadata_of(model: TensorSource) -> dict[str, Any]:
    """The keys of an architecture, of which a test may change some."""
    c, name = model.config, name_of(model.config)
    sizes: dict[str, Any] = {
        "block_count": c.n_layer,
        "context_length": c.n_ctx,
        "embedding_length": c.n_embd,
        "attention.head_count": c.n_head,
    }
    if isinstance(c, LlamaConfig):
        sizes |= {
            "feed_forward_length": c.n_ff,
            "attention.head_count_kv": c.n_kv_head,
            "attention.key_length": c.head_size,
            "attention.value_length": c.head_size,
            "attention.layer_norm_rms_epsilon": c.eps,
            "rope.freq_base": c.theta,
            "rope.dimension_count": c.rotary_size,
            "vocab_size": c.vocab_size,
        }
        sizes |= {key: getattr(c, field) or 0 for key, field in c.GGUF_KEYS.items()}
        if c.scaling is not None and c.scaling.kind == "linear":
            sizes |= {"rope.scaling.type": "linear", "rope.scaling.factor": c.scaling.factor}
        if isinstance(c, Phi3Config) and c.scaling is not None:
            sizes["rope.scaling.attn_factor"] = c.scaling.attention_factor
            sizes["rope.scaling.original_context_length"] = c.scaling.original_context
    else:
        sizes |= {"feed_forward_length": 4 * c.n_embd, "attention.layer_norm_epsilon": c.eps}
    return {"general.architecture": name, **{f"{name}.{key}": n for key, n in sizes.items()}}


def rope_factors(config: LlamaConfig, scaling: RopeScaling) -> NDArray[np.float32]:
    """rope_freqs.weight of Llama 3.1's scaling, as llama.cpp's converter computes it."""
    factors = []
    for k in range(config.head_size // 2):
        wavelength = 2 * math.pi * config.theta ** (2 * k / config.head_size)
        if wavelength < scaling.original_context / scaling.high_freq_factor:
            factors.append(1.0)
        elif wavelength > scaling.original_context / scaling.low_freq_factor:
            factors.append(scaling.factor)
        else:
            smooth = scaling.original_context / wavelength - scaling.low_freq_factor
            smooth /= scaling.high_freq_factor - scaling.low_freq_factor
            factors.append(1 / ((1 - smooth) / scaling.factor + smooth))
    return np.array(factors, np.float32)


def write(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, NDArray[Any]],
    kind: Callable[[str], str] = lambda name: "F32",
) -> Path:
    """Write a file. kind: the type of a matrix by its name; uint8 is written as it is."""
    writer = GGUFWriter(path, str(metadata["general.architecture"]))
    for key, value in metadata.items():
        if key != "general.architecture":
            add(writer, key, value)
    for name, array in tensors.items():
        stored = GGMLQuantizationType[kind(name) if array.ndim > 1 else "F32"]
        if array.dtype == np.uint8:
            writer.add_tensor(name, array, raw_dtype=stored)
        elif stored is GGMLQuantizationType.F64:
            writer.add_tensor(name, np.ascontiguousarray(array, np.float64))
        else:
            values = quantize(np.ascontiguousarray(array, np.float32), stored)
            writer.add_tensor(name, values, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(writer: GGUFWriter, key: str, value: Any) -> None:
    """Add a key, with the type that llama.cpp's converter gives such a value."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def save(path: Path, source: Path, kind: Callable[[str], str] = lambda name: "F32") -> Path:
    """Write a Hugging Face checkpoint as GGUF."""
    checkpoint = Checkpoint.open(source)
    tensors, config = tensors_of(checkpoint), checkpoint.config
    if isinstance(config, LlamaConfig) and config.scaling and config.scaling.kind == "llama3":
        tensors["rope_freqs.weight"] = rope_factors(config, config.scaling)
    return write(path, metadata_of(checkpoint), tensors, kind)


def tokenizer_keys(
    model: str, tokens: Sequence[str], types: Sequence[TokenType], **more: Any
) -> dict[str, Any]:
    """The keys of a tokenizer."""
    keys = {"model": model, "tokens": list(tokens), "token_type": [int(kind) for kind in types]}
    return {f"tokenizer.ggml.{key}": value for key, value in {**keys, **more}.items()}

"""GGUF, the format of llama.cpp: Llama and GPT-2 models, whose quantized tensors become floats.

Names and types are those of the package `gguf`. llama.cpp stores rows of Q and K in the order of
Meta's RoPE, which turns neighbouring channels; they are put back in Hugging Face's order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from gpt2block.checkpoints.gguf_header import MAGIC, Header, Placed, library, read_header
from gpt2block.checkpoints.hugging_face import checked_parts
from gpt2block.checkpoints.naming import Naming, single
from gpt2block.checkpoints.stored import Entry, Joined, Stored, read_start, reading
from gpt2block.config import GPT2Config, ModelConfig
from gpt2block.config_llama import LlamaConfig, RopeScaling
from gpt2block.errors import CheckpointError, InputError, shown

_DECODED_AT_ONCE = 2**20  # numbers
_NATIVE: Mapping[str, Any] = {"F32": np.float32, "F16": np.float16, "F64": np.float64,
                              "BF16": ml_dtypes.bfloat16}  # fmt: skip
_ROPE_FACTORS = "rope_freqs.weight"
_HEAD = "output.weight"

_BOTH = {
    "wte": "token_embd.weight",
    "gamma1": "attn_norm.weight",
    "gamma2": "ffn_norm.weight",
    "gamma_f": "output_norm.weight",
    "lm_head": _HEAD,
}
_GPT2 = Naming(
    single(_BOTH | {
        "wpe": "position_embd.weight",
        "beta1": "attn_norm.bias", "beta2": "ffn_norm.bias", "beta_f": "output_norm.bias",
        "w_qkv": "attn_qkv.weight", "b_qkv": "attn_qkv.bias",
        "w_attn": "attn_output.weight", "b_attn": "attn_output.bias",
        "w_fc": "ffn_up.weight", "b_fc": "ffn_up.bias",
        "w_proj": "ffn_down.weight", "b_proj": "ffn_down.bias",
    }),
    block="blk.", prefix="", matrices="NK", ignored=re.compile(r"(?!)"),
)  # fmt: skip
_LLAMA = Naming(
    single(_BOTH | {
        "w_o": "attn_output.weight", "b_o": "attn_output.bias",
        "w_gate": "ffn_gate.weight", "b_gate": "ffn_gate.bias",
        "w_up": "ffn_up.weight", "b_up": "ffn_up.bias",
        "w_down": "ffn_down.weight", "b_down": "ffn_down.bias",
    }) | {
        "w_qkv": tuple(f"attn_{part}.weight" for part in "qkv"),
        "b_qkv": tuple(f"attn_{part}.bias" for part in "qkv"),
    },
    block="blk.", prefix="", matrices="NK", ignored=re.compile(re.escape(_ROPE_FACTORS)),
)  # fmt: skip

# Keys of an architecture that do not change the result, or that are read here
_READ = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size",
    "attention.head_count", "attention.head_count_kv", "attention.key_length",
    "attention.value_length", "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon",
    "rope.dimension_count", "rope.freq_base", "rope.scale_linear", "rope.scaling.type",
    "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.finetuned",
    "tensor_data_layout",
}  # fmt: skip
# Other keys are accepted only with the value for which they change nothing
_NEUTRAL: Mapping[str, Any] = {
    "attention.causal": True, "attention.sliding_window": 0, "attention.scale": 0.0,
    "expert_count": 0, "expert_used_count": 0, "logit_scale": 1.0, "embedding_scale": 1.0,
    "residual_scale": 1.0, "rope.scaling.attn_factor": 1.0, "pooling_type": 0,
    "use_parallel_residual": False,
}  # fmt: skip


def is_gguf(file: Path) -> bool:
    """Return whether the file is GGUF, by its content or its name. Raises CheckpointError."""
    return file.suffix == ".gguf" or read_start(file, 4) == MAGIC


def read_model(file: Path) -> tuple[ModelConfig, dict[str, Stored]]:
    """Return the config and the stored tensors by gpt2block's names.

    Raises CheckpointError for a damaged file, another architecture, and keys, tensors and types of
    tensors that are not supported, with their names.
    """
    header = header_of(file)
    try:
        config = _config(header, file)
    except (CheckpointError, InputError) as error:
        raise CheckpointError(f"{file}: {error}") from error
    naming = _LLAMA if isinstance(config, LlamaConfig) else _GPT2
    found = {
        name: Entry(file, placed.offset, placed.shape, _dtype(name, placed, file), "C")
        for name, placed in header.tensors.items()
    }
    parts = checked_parts(file, "block_count is", config, naming, found)

    def stored(ours: str, names: Sequence[str]) -> Stored:
        pieces = []
        for name in names:
            placed, heads = header.tensors[name], 0
            if isinstance(config, LlamaConfig) and ".attn_q." in name:
                heads = config.n_head
            elif isinstance(config, LlamaConfig) and ".attn_k." in name:
                heads = config.n_kv_head
            pieces.append(
                Encoded(name, file, placed.offset, placed.shape, found[name].dtype,
                        naming.layout_of(ours), placed.kind, placed.nbytes, heads)
            )  # fmt: skip
        if len({piece.dtype for piece in pieces}) > 1:  # such as Q4_K for Q and K, F16 for V
            pieces = [replace(piece, dtype="float32") for piece in pieces]
        return pieces[0] if len(pieces) == 1 else Joined.of(pieces)

    return config, {ours: stored(ours, list(names)) for ours, names in parts.items()}


@lru_cache(maxsize=1)  # that of the weights is also that of the tokenizer
def _cached_header(file: Path, _stamp: tuple[int, int]) -> Header:
    return read_header(file)


def header_of(file: Path) -> Header:
    """The header of a GGUF file; that of the last file is kept. Raises CheckpointError."""
    with reading(file):
        status = file.stat()
    return _cached_header(file, (status.st_size, status.st_mtime_ns))


@dataclass(frozen=True)
class Encoded(Stored):
    """A tensor of a GGUF file, read as floats.

    dtype: the one of its type; float32 for quantized types. kind: the number of its type. length:
    its bytes. heads: of a part of Q and K, the number of heads, whose rows change their order; 0
    for other tensors.
    """

    kind: int = 0
    length: int = 0
    heads: int = 0

    @property
    def types(self) -> tuple[str, ...]:
        return (library().GGMLQuantizationType(self.kind).name,)

    @property
    def nbytes(self) -> int:
        return self.length

    def read_into(self, array: NDArray[Any]) -> None:
        """Read into a C-contiguous array of this shape and any float dtype.

        Whole heads, or single rows, are decoded at a time. Raises CheckpointError.
        """
        flat = array.reshape(self.shape[0], -1)
        unit = self.shape[0] // self.heads if self.heads else 1
        rows = unit * max(1, _DECODED_AT_ONCE // (unit * flat.shape[1]))
        row_bytes = self.length // self.shape[0]
        with reading(self.file), self.file.open("rb") as stream:
            stream.seek(self.offset or 0)
            for first in range(0, self.shape[0], rows):
                piece = flat[first : first + rows]
                data = stream.read(len(piece) * row_bytes)
                if len(data) != len(piece) * row_bytes:
                    raise CheckpointError(
                        f"{self.file}: {self.label}: the file has become shorter since it was "
                        "opened"
                    )
                values = _decoded(data, self.kind).reshape(piece.shape)
                if self.heads:
                    pairs = values.reshape(-1, unit // 2, 2, piece.shape[1])
                    values = pairs.swapaxes(1, 2).reshape(piece.shape)
                piece[...] = values


def _decoded(data: bytes, kind: int) -> NDArray[Any]:
    """The numbers of a tensor's bytes."""
    types = library().GGMLQuantizationType
    native = _NATIVE.get(types(kind).name)
    if native is not None:
        return np.frombuffer(data, native)
    row = np.frombuffer(data, np.uint8)[None]  # dequantize loops over groups of 16 rows
    with np.errstate(over="ignore", invalid="ignore"):  # a model refuses infinity and NaN
        values: NDArray[Any] = library().dequantize(row, types(kind))
    return values


@lru_cache
def _problem(kind: int) -> str | None:
    """Why tensors of a type cannot be read; None if they can."""
    kinds, sizes = library().GGMLQuantizationType, library().GGML_QUANT_SIZES
    try:
        _decoded(bytes(sizes[kind][1]), kind)
    except NotImplementedError:
        return f"type {kinds(kind).name} is not supported by the package gguf's dequantize"
    return None


def _dtype(name: str, placed: Placed, file: Path) -> str:
    """The dtype as which a tensor is read. Raises CheckpointError for types without one."""
    problem = _problem(placed.kind)
    if problem:
        raise CheckpointError(f"{file}: {name}: {problem}: use a file with other types")
    native = _NATIVE.get(library().GGMLQuantizationType(placed.kind).name)
    return "float32" if native is None else np.dtype(native).name


def _config(header: Header, file: Path) -> ModelConfig:
    """The config of a file's metadata. Raises CheckpointError or InputError."""
    metadata = header.metadata
    architecture = metadata.get("general.architecture")
    if architecture not in ("llama", "gpt2"):
        raise CheckpointError(
            f"general.architecture: expected 'llama' or 'gpt2', got {shown(architecture)}"
        )
    if metadata.get("split.count", 0) not in (0, 1):
        raise CheckpointError(
            f"split.count is {shown(metadata['split.count'])}: expected one file: join the parts "
            "with llama-gguf-split --merge"
        )
    prefix = f"{architecture}."
    settings = {
        key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)
    }
    for key, value in settings.items():
        if isinstance(value, (list, np.ndarray)):
            raise CheckpointError(f"{prefix}{key}: expected one value for all blocks, got an array")
        if key not in _READ and value != _NEUTRAL.get(key, _NEUTRAL):
            raise CheckpointError(f"{prefix}{key}: {shown(value)} is not supported")
    needed = ["block_count", "embedding_length", "attention.head_count", "feed_forward_length"]
    missing = [prefix + key for key in needed if key not in settings]
    if missing or "token_embd.weight" not in header.tensors:
        raise CheckpointError(f"expected {', '.join(missing) or 'token_embd.weight'}: missing")
    tokens = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    sizes = {
        "n_layer": settings["block_count"],
        "n_head": settings["attention.head_count"],
        "n_embd": settings["embedding_length"],
        "n_ctx": settings.get("context_length", 2048),
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": _HEAD not in header.tensors,
        "eos_token_ids": tuple(dict.fromkeys(token for token in tokens if token is not None)),
    }
    if settings.get("vocab_size", sizes["vocab_size"]) != sizes["vocab_size"]:
        raise CheckpointError(
            f"{prefix}vocab_size is {shown(settings['vocab_size'])}, token_embd.weight has "
            f"{sizes['vocab_size']} rows"
        )
    if architecture == "gpt2":
        return _gpt2_config(sizes, settings)
    return _llama_config(sizes, settings, header, file)


def _gpt2_config(sizes: dict[str, Any], settings: Mapping[str, Any]) -> GPT2Config:
    config = GPT2Config(**sizes, eps=settings.get("attention.layer_norm_epsilon", 1e-5))
    wrong = {
        "feed_forward_length": 4 * config.n_embd,
        "attention.head_count_kv": config.n_head,
        "rope.dimension_count": config.head_size,  # written by converters, and not used
    }
    for key, expected in wrong.items():
        if settings.get(key, expected) != expected:
            raise CheckpointError(f"gpt2.{key}: expected {expected}, got {shown(settings[key])}")
    return config


def _llama_config(
    sizes: dict[str, Any], settings: Mapping[str, Any], header: Header, file: Path
) -> LlamaConfig:
    config = LlamaConfig(
        **sizes,
        n_ff=settings["feed_forward_length"],
        n_kv_head=settings.get("attention.head_count_kv", 0),
        head_size=settings.get("attention.key_length", 0),
        eps=settings.get("attention.layer_norm_rms_epsilon", 1e-6),
        theta=settings.get("rope.freq_base", 10000.0),
        scaling=_scaling(settings, header, file),
        attention_bias="blk.0.attn_q.bias" in header.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in header.tensors,
        bos_token_id=header.metadata.get("tokenizer.ggml.bos_token_id"),
    )
    for key in ("rope.dimension_count", "attention.value_length"):
        if settings.get(key, config.head_size) != config.head_size:
            raise CheckpointError(
                f"llama.{key}: expected the head size, {config.head_size}, got "
                f"{shown(settings[key])}"
            )
    return config


def _scaling(settings: Mapping[str, Any], header: Header, file: Path) -> RopeScaling | None:
    """The scaling of RoPE: a linear one, or a factor for each frequency in a tensor."""
    kind = settings.get("rope.scaling.type", "linear")  # as in llama.cpp
    if kind not in ("none", "linear"):
        raise CheckpointError(f"llama.rope.scaling.type: {shown(kind)} is not supported")
    factor = settings.get("rope.scaling.factor", settings.get("rope.scale_linear", 0))
    linear = kind == "linear" and factor not in (0, 1)
    if _ROPE_FACTORS not in header.tensors:
        return RopeScaling("linear", factor) if linear else None
    if linear:
        raise CheckpointError(f"llama.rope.scaling.factor: not supported with {_ROPE_FACTORS}")
    placed = header.tensors[_ROPE_FACTORS]
    dtype = _dtype(_ROPE_FACTORS, placed, file)
    factors = Encoded(_ROPE_FACTORS, file, placed.offset, placed.shape, dtype, None, placed.kind,
                      placed.nbytes)  # fmt: skip
    return RopeScaling("longrope", 1.0, factors=tuple(factors.read().ravel().tolist()))

"""Read the config and the tensors of GGUF files, the format of llama.cpp.

llama.cpp stores a Llama's rows of Q and K in the order of Meta's RoPE, which rotates adjacent
channels; reading restores Hugging Face's order. Quantized tensors are read as floats.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from gpt2block.checks import check_integer, check_number
from gpt2block.errors import CheckpointError, shown
from gpt2block.files.checkpoints.files import about, read_start
from gpt2block.files.checkpoints.gguf_end_tokens import end_tokens
from gpt2block.files.checkpoints.gguf_header import MAGIC, Header, as_python, read_header, under
from gpt2block.files.checkpoints.naming import LONGROPE_FACTORS, ROPE_FACTORS, naming_of
from gpt2block.files.checkpoints.stored import Stored
from gpt2block.models.architectures import GGUF_ARCHITECTURES, GGUF_WITH_WINDOW, architecture_of
from gpt2block.models.config import CONV_LAYERS, LIMITS, GPT2Config, ModelConfig, sees_all
from gpt2block.models.config.llama import LlamaConfig, RopeScaling, all_but_every, yarn_attention

# GGUF key without the architecture's prefix → (field of the config, default of an absent key)
_SIZES: Mapping[str, tuple[str, Any]] = {
    "block_count": ("n_layer", None), "attention.head_count": ("n_head", None),
    "embedding_length": ("n_embd", None), "context_length": ("n_ctx", 2048),
}  # fmt: skip
_OF_GPT2 = {**_SIZES, "attention.layer_norm_epsilon": ("eps", 1e-5)}
_OF_LLAMA = {
    **_SIZES, "feed_forward_length": ("n_ff", None), "attention.head_count_kv": ("n_kv_head", 0),
    "attention.key_length": ("head_size", 0), "attention.layer_norm_rms_epsilon": ("eps", 1e-6),
    "rope.freq_base": ("theta", 10000.0),
}  # fmt: skip
YARN_KEYS: Mapping[str, str] = {  # GGUF key → field of RopeScaling
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_context",
    "rope.scaling.yarn_attn_factor": "attention_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
# GGUF keys that this module reads, and GGUF keys that do not affect a model's results
_READ = {
    *_OF_GPT2, *_OF_LLAMA, *YARN_KEYS, "vocab_size", "attention.value_length",
    "rope.dimension_count", "rope.scale_linear", "rope.scaling.type", "rope.scaling.finetuned",
    "rope.scaling.attn_factor", "rope.scaling.yarn_log_multiplier", "tensor_data_layout",
    # sizes of tensors that Granite 4.0's dense models do not have
    "attention.value_length_swa", "rope.dimension_count_swa",
    "expert_shared_feed_forward_length", "ssm.conv_kernel", "ssm.state_size", "ssm.group_count",
    "ssm.inner_size", "ssm.time_step_rank",
}  # fmt: skip
_PATTERN, KV_HEADS = "attention.sliding_window_pattern", "attention.head_count_kv"
_NEEDED = ("block_count", "embedding_length", "attention.head_count", "feed_forward_length")
NEGATED = ".ssm_a"  # ends the names of tensors that files store as -exp of the model's
# GGUF key that is not implemented → the only accepted value, which has no effect on results
_NEUTRAL: Mapping[str, object] = {
    "attention.causal": True, "attention.sliding_window": 0, "attention.scale": 0.0,
    "expert_count": 0, "expert_used_count": 0, "logit_scale": 1.0, "embedding_scale": 1.0,
    "residual_scale": 1.0, "pooling_type": 0, "use_parallel_residual": False,
    "rope.scaling.yarn_ext_factor": 1.0,
}  # fmt: skip


def is_gguf(file: Path) -> bool:
    """Return whether a file is GGUF, by its suffix or its first bytes. Raises CheckpointError."""
    return file.suffix == ".gguf" or read_start(file, 4) == MAGIC


def read_model(file: Path) -> tuple[ModelConfig, dict[str, Stored]]:
    """Return a model's config, and its stored tensors by gpt2block's names.

    Raises CheckpointError for a damaged file, another architecture, and keys, tensors and types of
    tensors that are not supported, with their names.
    """
    header = header_of(file)
    with about(file):
        config = _config(header).with_tensors(header.tensors)
    found: dict[str, Stored] = {}
    for name, tensor in header.tensors.items():
        if _layer_of(name) >= config.n_layer and _drafting(header) and not config.draft_config:
            continue
        tensor.check_type()
        heads, added = differences(config, name)
        negated = name.endswith(NEGATED)
        found[name] = replace(tensor, heads=heads, added=added, negated=negated)
    naming = naming_of(config, gguf=True)
    return config, naming.model_tensors(file, "block_count is", config, found)


def differences(config: ModelConfig, name: str) -> tuple[int, float]:
    """Return (heads of a tensor that GGUF reorders for RoPE, constant that GGUF adds to it)."""
    heads = 0
    if architecture_of(config).GGUF_ROPE_INTERLEAVED:
        n_kv_head = config.kv_width // config.head_size
        heads = config.n_head * (".attn_q." in name) + n_kv_head * (".attn_k." in name)
    norms = ("_norm.weight", ".enorm.weight", ".hnorm.weight")
    added = name.endswith(norms) and not name.endswith("ssm_norm.weight")
    return heads, config.ADDED_TO_NORMS * added


def _layer_of(name: str) -> int:
    """Return the number of the block of a tensor; -1 outside the blocks."""
    block, _, number = name.partition(".")
    number = number.partition(".")[0]
    return int(number) if block == "blk" and number.isdecimal() else -1


def _drafting(header: Header) -> int:
    """Return the number of last blocks of a file that only draft tokens."""
    named = header.metadata.get("general.architecture")
    key, expected = f"{named}.nextn_predict_layers", "a number of blocks"
    return check_integer(key, header.metadata.get(key, 0), 0, LIMITS["n_layer"], expected)


def fields_of(kind: type[ModelConfig]) -> Mapping[str, tuple[str, Any]]:
    """Return a mapping: GGUF key → (field of the config, default if the file lacks the key)."""
    return _OF_LLAMA if issubclass(kind, LlamaConfig) else _OF_GPT2


def following(config: ModelConfig) -> dict[str, tuple[str, int]]:
    """Return a dict: GGUF key that the config determines → (value's meaning in words, value)."""
    if isinstance(config, LlamaConfig):
        return config.gguf_sizes
    return {
        "feed_forward_length": ("4 n_embd", 4 * config.n_embd),
        "attention.head_count_kv": ("n_head", config.n_head),
    }


@lru_cache(maxsize=1)  # loading the weights and loading the tokenizer both need the header
def _cached_header(file: Path, _stamp: tuple[int, int]) -> Header:
    return read_header(file)


def header_of(file: Path) -> Header:
    """Return the header of a GGUF file; the latest header is cached. Raises CheckpointError."""
    with about(file):
        status = file.stat()
    return _cached_header(file, (status.st_size, status.st_mtime_ns))


def _config(header: Header) -> ModelConfig:
    """Return the config that a file's metadata describe. Raises CheckpointError or InputError."""
    metadata, tensors = header.metadata, header.tensors
    header.check_usable("general.architecture", "general.alignment", "split.count")
    architecture = metadata.get("general.architecture")
    known = GGUF_ARCHITECTURES.get(architecture) if isinstance(architecture, str) else None
    if known is None:
        names, got = ", ".join(map(repr, GGUF_ARCHITECTURES)), shown(architecture)
        raise CheckpointError(f"general.architecture: expected one of {names}, got {got}")
    parts = metadata.get("split.count", 0)
    if isinstance(parts, (list, np.ndarray)) or parts not in (0, 1):
        raise CheckpointError(
            f"split.count is {shown(parts)}: expected one file: join the parts "
            "with llama-gguf-split --merge"
        )
    prefix = f"{architecture}."
    settings, own = _settings(header, prefix, known.CONFIG), known.CONFIG.GGUF_READ
    if "nextn_predict_layers" in own and type(settings.get("block_count")) is int:
        settings["block_count"] -= _drafting(header)
    if settings.get("attention.sliding_window"):
        known = GGUF_WITH_WINDOW.get(known.GGUF, known)
    neutral = {**_NEUTRAL, **known.CONFIG.GGUF_NEUTRAL}
    n_ctx = settings.get("context_length", 2048)
    for key, value in settings.items():
        wide = key.endswith(".sliding_window") and sees_all(value, n_ctx)
        read = key in (*known.CONFIG.GGUF_KEYS, *own) or (key in _READ and key not in neutral)
        if not read and not wide and value != neutral.get(key, neutral):
            raise CheckpointError(f"{prefix}{key}: {shown(value)} is not supported")
    missing = [prefix + key for key in _NEEDED if key not in settings]
    if missing or "token_embd.weight" not in tensors:
        raise CheckpointError(f"expected {', '.join(missing) or 'token_embd.weight'}: missing")
    rows = tensors["token_embd.weight"].shape[0]
    if settings.get("vocab_size", rows) != rows:
        raise CheckpointError(
            f"{prefix}vocab_size is {shown(settings['vocab_size'])}, token_embd.weight has {rows} "
            "rows"
        )
    keys = fields_of(known.CONFIG).items()
    fields: dict[str, Any] = {
        **{field: settings.get(key, absent) for key, (field, absent) in keys},
        "vocab_size": rows,
        "tie_word_embeddings": "output.weight" not in tensors,
        "eos_token_ids": tuple(end_tokens(metadata, rows)),
    }
    config: ModelConfig
    if issubclass(known.CONFIG, LlamaConfig):
        config = _llama_config(known.CONFIG, prefix, fields, settings, header)
    else:
        config = GPT2Config(**fields)
    for key, (words, expected) in following(config).items():
        if settings.get(key, expected) != expected:
            got = shown(settings[key])
            raise CheckpointError(f"{prefix}{key}: expected {words}, {expected}, got {got}")
    return config


def _settings(header: Header, prefix: str, kind: type[ModelConfig]) -> dict[str, Any]:
    """Return the metadata below a prefix: a value for all blocks, or a tuple by `_PATTERN`.

    Layers with 0 heads of keys have convolutions if `kind` has a key `CONV_LAYERS`, by which a
    tuple then states these layers. Keys of `kind.GGUF_READ` may have arrays.
    """
    convs = CONV_LAYERS in kind.GGUF_KEYS
    header.check_usable(prefix)
    settings = kind.from_gguf(under(header.metadata, prefix))
    blocks, pattern = settings.get("block_count"), settings.pop(_PATTERN, None)
    if isinstance(blocks, (list, np.ndarray)):
        raise CheckpointError(f"{prefix}block_count: expected a number, got {shown(blocks)}")
    heads = settings.get(KV_HEADS)
    heads = heads.tolist() if isinstance(heads, np.ndarray) else heads
    if convs and isinstance(heads, list) and len(heads) == blocks:
        settings[KV_HEADS] = [max(heads) if n == 0 else n for n in heads]
    settings = {
        key: value if key in kind.GGUF_READ else _of_all_blocks(prefix + key, value, blocks)
        for key, value in settings.items()
    }
    if convs and isinstance(heads, list):
        settings[CONV_LAYERS] = tuple(n == 0 for n in heads)
    if pattern is not None:  # the period of layers without a window, or a bool per layer
        layers = np.atleast_1d(pattern).tolist()
        if type(pattern) is int and type(blocks) is int:
            period = max(0, pattern) or blocks + 1  # 0: all layers have the window
            layers = all_but_every(period, min(blocks, LIMITS["n_layer"]))
        settings[_PATTERN] = tuple(layers)
    return settings


def _of_all_blocks(key: str, value: object, blocks: object) -> Any:
    """Return `value`, or if it is an array with one entry per block, the entries' common value.

    Raises CheckpointError for an array of another length, and for unequal values.
    """
    if not isinstance(value, (list, np.ndarray)):
        return value
    if not len(value) or len(value) != blocks or any(each != value[0] for each in value):
        raise CheckpointError(f"{key}: expected one value for all blocks, got {shown(value)}")
    return value[0] if isinstance(value, list) else as_python(value[0])


def _llama_config(
    kind: type[LlamaConfig],
    prefix: str,
    fields: dict[str, Any],
    settings: Mapping[str, object],
    header: Header,
) -> LlamaConfig:
    flags = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_gate.bias"}
    fields |= {flag: name in header.tensors for flag, name in flags.items() if flag in kind.FLAGS}
    given = kind.gguf_fields(settings)
    # 0 means the default
    fields |= {f: v for f, v in given.items() if v or (v == 0 and f in kind.GGUF_ZEROS)}
    fields |= {"bos_token_id": header.metadata.get("tokenizer.ggml.bos_token_id")}
    if kind.PARTIAL:
        for key in (each for each in settings if each.startswith("rope.scal")):
            raise CheckpointError(f"{prefix}{key}: {shown(settings[key])} is not supported")
        return kind(**fields).with_rope_factors(*_factors(header, (ROPE_FACTORS,)))
    config = kind(**fields, scaling=_scaling(prefix, settings, header))
    scale = kind.GGUF_KEYS.get("attention.scale", "")
    if scale and scale not in fields:
        return replace(config, **{scale: config.head_size**-0.5})
    return config


def _factors(header: Header, names: Iterable[str]) -> list[tuple[float, ...]]:
    """Return the factors by which tensors of a file divide RoPE's frequencies."""
    for name in names:
        if name not in header.tensors:
            raise CheckpointError(f"expected {name}: missing")
        header.tensors[name].check_type()
    return [tuple(header.tensors[name].read().ravel().tolist()) for name in names]


def _scaling(prefix: str, settings: Mapping[str, Any], header: Header) -> RopeScaling | None:
    """Return the RoPE scaling (linear, YaRN, or factors stored as tensors); None if absent."""
    kind = settings.get("rope.scaling.type", "linear")  # llama.cpp has the same default
    present = {name for name in (ROPE_FACTORS, *LONGROPE_FACTORS) if name in header.tensors}
    long = present == {*LONGROPE_FACTORS}
    if not long and not present <= {ROPE_FACTORS}:
        both = " and ".join(LONGROPE_FACTORS)
        raise CheckpointError(
            f"expected {ROPE_FACTORS}, or {both}, got {' and '.join(sorted(present))}"
        )
    if kind == "yarn" and not present:
        return _yarn(settings)
    if kind not in ("none", "linear", *("longrope",) * long):
        raise CheckpointError(f"{prefix}rope.scaling.type: {shown(kind)} is not supported")
    factor = settings.get("rope.scaling.factor", settings.get("rope.scale_linear", 0))
    linear = kind == "linear" and factor not in (0, 1)
    attention = settings.get("rope.scaling.attn_factor", 1.0)
    if not long and attention != 1:
        raise CheckpointError(f"{prefix}rope.scaling.attn_factor: {shown(attention)} is not "
                              f"supported without {' and '.join(LONGROPE_FACTORS)}")  # fmt: skip
    names = LONGROPE_FACTORS if long else (ROPE_FACTORS,)
    if names[0] not in header.tensors:
        return RopeScaling("linear", factor) if linear else None
    if linear:
        raise CheckpointError(f"{prefix}rope.scaling.factor: not supported with {names[0]}")
    factors = _factors(header, names)
    if not long:
        return RopeScaling("longrope", 1.0, factors=factors[0])
    original = settings.get("rope.scaling.original_context_length", settings.get("context_length"))
    short, long_factors = factors
    return RopeScaling("longrope", 1.0, original_context=original, factors=short,
                       long_factors=() if long_factors == short else long_factors,
                       attention_factor=attention)  # fmt: skip


def _yarn(settings: Mapping[str, Any]) -> RopeScaling:
    """Return YaRN's settings from the keys that llama.cpp or llama.cpp's converter uses.

    llama.cpp multiplies queries and keys by attn_factor times `yarn_attention(factor)`. The key
    yarn_attn_factor, the attention_factor of config.json, replaces `yarn_attention(factor)`. The
    key yarn_log_multiplier, config.json's mscale_all_dim, divides by `yarn_attention` of both.
    """
    given = {field: settings[key] for key, field in YARN_KEYS.items() if key in settings}
    defaults = {"factor": 1.0, "original_context": settings.get("context_length", 2048)}
    scaling = RopeScaling("yarn", **{**defaults, **given})
    key = "rope.scaling.attn_factor"
    factor = check_number(key, settings.get(key, 1.0), 2.0**-20, 2.0**20, "2^-20 to 2^20")
    key = "rope.scaling.yarn_log_multiplier"
    log = check_number(key, settings.get(key, 0.0), 0, 2.0**20, "a number from 0 to 2^20")
    factor /= yarn_attention(scaling.factor, log)
    return replace(scaling, attention_factor=scaling.attention_factor * factor)

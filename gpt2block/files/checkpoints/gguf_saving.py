"""`save_gguf`: write a GGUF file that llama.cpp and `Checkpoint.open` load."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import fields, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt2block.checks import check_choice
from gpt2block.errors import CheckpointError, InputError, shown
from gpt2block.files.checkpoints import gguf, saving
from gpt2block.files.checkpoints.checkpoint import Checkpoint
from gpt2block.files.checkpoints.files import first_names
from gpt2block.files.checkpoints.gguf_end_tokens import end_tokens
from gpt2block.files.checkpoints.gguf_header import PREFIX, TOKEN_ID
from gpt2block.files.checkpoints.gguf_tokenizer_keys import keys_of
from gpt2block.files.checkpoints.gguf_types import library
from gpt2block.files.checkpoints.naming import LONGROPE_FACTORS, ROPE_FACTORS, Shape, naming_of
from gpt2block.files.writing import check_file, put_in_place, temporary_folder
from gpt2block.models.architectures import GGUF_ARCHITECTURES, architecture_of
from gpt2block.models.config import CONV_LAYERS, ModelConfig
from gpt2block.models.config.llama import LlamaConfig, yarn_attention

TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
_ENDS = tuple(f"{PREFIX}{name}{TOKEN_ID}" for name in ("eos", "eot", "eom"))
# Config fields without a GGUF key of their own: tensors or other keys store the values
_ELSEWHERE = {
    "vocab_size", "tie_word_embeddings", "attention_bias", "mlp_bias", "scaling", "bos_token_id",
    "eos_token_ids", "rotary_part", "v_size", "delta_layers", "tiled", "mtp",
}  # fmt: skip
# Ends of names
_ALWAYS_FLOAT32 = ("position_embd.weight", "ffn_gate_inp.weight", "conv.weight", "conv1d.weight")
_INSTEAD = "write a Hugging Face directory instead"


def save_gguf(
    path: str | Path,
    weights: saving.TensorSource,
    type: str,
    tokenizer: str | Path | Checkpoint | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a GGUF file that llama.cpp and `Checkpoint.open` load.

    path: the file to write, in an existing folder. weights, tokenizer: as in `save_pretrained`.
    type: GGUF type of the matrices, one of `TYPES`, quantized by the package gguf; norms, biases
    and GPT-2's position embedding are float32. A matrix whose rows are not a multiple of the type's
    blocks is float16. overwrite: replace an existing file, once the new file is complete. Returns
    the path.

    Warns (UserWarning) of matrices in float16, of a file without a tokenizer because GGUF cannot
    describe it, of more end tokens than GGUF has keys for, and if llama.cpp multiplies embeddings
    by a different factor.

    Raises InputError for wrong arguments, for a config that GGUF has no keys for, and for weights
    out of the range of the type, CheckpointError if the file cannot be written, the tokenizer's
    files cannot be read, or the package gguf is missing.
    """
    path = saving.given_path("path", path)
    check_choice("type", type, TYPES)
    saving.check_source(weights)
    check_file(path)
    if os.path.lexists(path) and not overwrite:
        raise InputError(f"{path}: already exists: give another file or overwrite=True")
    _check_config(weights.config)
    saving.warn_of_factor(path, weights.config, "llama.cpp", "float32")
    kinds = _kinds(path, weights.config, type.upper())
    most = "ALL_F32" if type == "f32" else f"MOSTLY_{type.upper()}"
    metadata = _described(path, weights, tokenizer) | metadata_of(weights.config)
    metadata |= {"general.file_type": int(library().LlamaFileType[most]),
                 "general.quantization_version": library().GGML_QUANT_VERSION}  # fmt: skip
    data = (encoded(name, rows, kinds[name][0]) for name, rows in tensors_of(weights))
    try:
        with temporary_folder(path.parent, "saving") as folder:
            write(folder / "model.gguf", metadata, kinds, data)
            put_in_place(folder / "model.gguf", path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error.strerror or error}") from error
    return path


def metadata_of(config: ModelConfig) -> dict[str, Any]:
    """Return the GGUF metadata that describe a config, in the form that `gguf.read_model` reads."""
    named = architecture_of(config).GGUF
    keys = {key: getattr(config, field) for key, (field, _) in gguf.fields_of(type(config)).items()}
    keys |= {key: value for key, (_, value) in gguf.following(config).items()}
    own = config.gguf_settings()
    keys |= {key: 0 if value is None else value for key, value in own.items()}
    if CONV_LAYERS in keys:
        n, convs = keys[gguf.KV_HEADS], keys.pop(CONV_LAYERS)
        keys[gguf.KV_HEADS] = tuple(0 if conv else n for conv in convs)
    keys |= {"vocab_size": config.vocab_size, **_scaling(config)[0]}
    return {"general.architecture": named, **{f"{named}.{key}": keys[key] for key in keys}}


def tensors_of(weights: saving.TensorSource) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yield (name, values) of every tensor of a GGUF file; matrices are (outputs, inputs)."""
    config, naming = weights.config, naming_of(weights.config, gguf=True)
    parts = naming.parts(config)
    yield from _scaling(config)[1].items()
    rows: list[np.ndarray] = []  # arrays to join into one tensor of the file
    for ours, array in saving.as_in_files(weights, naming, "float32"):
        rows.append(array)
        names = parts[naming.first_of(ours)]
        ends = list(accumulate(shape[0] for shape in names.values()))
        if sum(map(len, rows)) < ends[-1]:
            continue
        whole = array if len(rows) == 1 else np.concatenate(rows)
        rows = []
        for name, piece in zip(names, np.split(whole, ends[:-1]), strict=True):
            yield name, _as_in_file(config, name, piece)


def encoded(name: str, rows: NDArray[np.float32], kind: str) -> np.ndarray:
    """Convert rows to a GGUF type. Raises InputError for values out of the type's range."""
    package = library()
    with np.errstate(all="ignore"):
        if kind not in ("F32", "BF16"):
            beyond = rows.size - int(np.isfinite(rows.astype(np.float16)).sum())
            if beyond:
                raise InputError(f"{name}: {beyond:,} weights are out of the range of float16, "
                                 f"as are the scales of {kind}: use f32 or bf16")  # fmt: skip
        found: np.ndarray = package.quantize(rows, package.GGMLQuantizationType[kind])
    return found


def write(
    file: Path,
    metadata: Mapping[str, object],
    kinds: Mapping[str, tuple[str, Shape]],
    data: Iterable[np.ndarray],
) -> None:
    """Write a GGUF file from its metadata, the types and shapes of its tensors, and their data.

    metadata: numbers, bool, str, arrays and lists by key. kinds: tensor name → (type, shape). data:
    arrays in the order of `kinds`, read once, one at a time.
    """
    package = library()
    with closing(package.GGUFWriter(file, metadata["general.architecture"])) as writer:
        for key, value in metadata.items():
            if key != "general.architecture":
                _add(writer, key, value)
        for name, (kind, shape) in kinds.items():
            stored = package.GGMLQuantizationType[kind]
            block, size = package.GGML_QUANT_SIZES[stored]
            length = math.prod(shape) // block * size
            writer.add_tensor_info(name, shape, np.dtype(np.float32), length, stored)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for array in data:
            writer.write_tensor_data(array)


def _add(writer: Any, key: str, value: Any) -> None:
    """Write a key and its value with the GGUF type that llama.cpp's converter would choose."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, np.ndarray):
        types = library().GGUFValueType
        kind = types[value.dtype.name.upper()]
        writer.add_key_value(key, value.tolist(), types.ARRAY, sub_type=kind)
    else:
        writer.add_array(key, list(value))


def _check_config(config: ModelConfig) -> None:
    """Raise InputError for an architecture or a setting that GGUF cannot describe."""
    if not architecture_of(config).GGUF:
        known = ", ".join(GGUF_ARCHITECTURES)
        raise InputError(f"{config.MODEL_TYPE}: GGUF has no such architecture, expected one of "
                         f"{known}: {_INSTEAD}")  # fmt: skip
    named = {field for field, _ in gguf.fields_of(type(config)).values()}
    named |= _ELSEWHERE | {*config.GGUF_KEYS.values()}
    given = {field.name: getattr(config, field.name) for field in fields(config)}
    read = type(config)(**{name: value for name, value in given.items() if name in named})
    lost = {name: value for name, value in given.items() if getattr(read, name) != value}
    if read.windows == config.windows:
        lost.pop("window", None)
    if not getattr(given.get("scaling"), "truncate", True):
        lost["truncate"] = False
    if lost:
        several = " and ".join(f"{name} {shown(value)}" for name, value in lost.items())
        raise InputError(f"{config.MODEL_TYPE}: GGUF has no key for {several}: {_INSTEAD}")


def _scaling(config: ModelConfig) -> tuple[dict[str, object], dict[str, NDArray[np.float32]]]:
    """Return the GGUF keys and the tensors that describe the RoPE scaling."""
    scaling = config.scaling if isinstance(config, LlamaConfig) else None
    if isinstance(config, LlamaConfig) and config.rope_factors:
        return {}, {ROPE_FACTORS: np.array(config.rope_factors, np.float32)}
    if not isinstance(config, LlamaConfig) or scaling is None:
        return {}, {}
    if scaling.kind == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": scaling.factor}, {}
    if scaling.kind == "yarn":
        keys = {key: getattr(scaling, field) for key, field in gguf.YARN_KEYS.items()}
        del keys["rope.scaling.yarn_attn_factor"]  # ignored by most architectures in llama.cpp
        factor = scaling.attention_factor / yarn_attention(scaling.factor)
        return {**keys, "rope.scaling.type": "yarn", "rope.scaling.attn_factor": factor}, {}
    if "long_factor" in config.HONOURED and scaling.kind == "longrope":
        keys = {"rope.scaling.attn_factor": scaling.attention_factor,
                "rope.scaling.original_context_length": scaling.original_context}  # fmt: skip
        both = (scaling.factors, scaling.long_factors or scaling.factors)
        factors = [np.array(each, np.float32) for each in both]
        return keys, dict(zip(LONGROPE_FACTORS, factors, strict=True))
    pairs = -(-config.rotary_size // 2)
    plain = replace(config, scaling=None).frequencies()[:pairs]
    return {}, {ROPE_FACTORS: (plain / config.frequencies()[:pairs]).astype(np.float32)}


def _as_in_file(config: ModelConfig, name: str, rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Convert a tensor's rows to GGUF: reorder them for RoPE, or add GGUF's constant to norms.

    Others are stored as -exp of the tensor.
    """
    heads, added = gguf.differences(config, name)
    if name.endswith(gguf.NEGATED):
        return -np.exp(rows)
    if heads:
        halves = rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:])
        rows = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)
    return rows + np.float32(added) if added else rows


def _kinds(path: Path, config: ModelConfig, kind: str) -> dict[str, tuple[str, Shape]]:
    """Return {tensor name: (GGUF type, shape)}. Warns of matrices that fall back to float16."""
    package, odd = library(), []
    block, _ = package.GGML_QUANT_SIZES[package.GGMLQuantizationType[kind]]
    found = {name: ("F32", array.shape) for name, array in _scaling(config)[1].items()}
    parts = naming_of(config, gguf=True).parts(config).values()
    for name, shape in (pair for names in parts for pair in names.items()):
        stored = kind
        if len(shape) == 1 or name.endswith(_ALWAYS_FLOAT32):
            stored = "F32"
        elif shape[-1] % block:
            stored = "F16"
            odd.append(name)
        found[name] = stored, shape
    if odd:
        warnings.warn(
            f"{path}: {len(odd)} matrices are F16, as their rows are no multiples of {block} "
            f"numbers: {first_names(odd)}",
            stacklevel=3,
        )
    return found


def _described(
    path: Path, weights: saving.TensorSource, tokenizer: str | Path | Checkpoint | None
) -> dict[str, object]:
    """Return the metadata keys `general.…` and `tokenizer.…`; a GGUF source's keys are copied.

    Warns of a missing tokenizer and of end tokens without a key.
    """
    config, given = weights.config, weights if tokenizer is None else tokenizer
    source = next((each for each in (weights, given) if isinstance(each, Checkpoint)), None)
    found: dict[str, object] = {"general.type": "model"}
    if source is not None:
        name = source.repo or Path(source.name).name
        found["general.name"] = name.encode("utf-8", "replace").decode()
    reason = "its source has none"
    if isinstance(given, Checkpoint) and gguf.is_gguf(given.file):
        metadata = gguf.header_of(given.file).metadata
        kept = (key for key in metadata if key.startswith(("general.", "tokenizer.")))
        found |= {key: metadata[key] for key in kept if key != "general.alignment"}
    elif files := saving.tokenizer_of(weights, tokenizer):
        try:
            found |= keys_of(files, config.vocab_size)
        except CheckpointError as error:
            reason = str(error)
    if f"{PREFIX}tokens" not in found:
        found[f"{PREFIX}model"] = "none"  # llama.cpp then expects no tokens
        warnings.warn(
            f"{path} has no tokenizer: {reason}: give one with --tokenizer, or token ids",
            stacklevel=3,
        )
    named = (found.pop(key, None) for key in _ENDS)
    tokens = range(config.vocab_size)  # config.json may name end tokens outside the vocabulary
    ends = [*dict.fromkeys(id_ for id_ in (*named, *config.eos_token_ids) if id_ in tokens)]
    by_text = end_tokens(found, config.vocab_size)
    ends[1:] = sorted(ends[1:], key=by_text.__contains__)  # ids recognized by their text go last
    found |= zip(_ENDS, ends, strict=False)
    lost = [id_ for id_ in ends[len(_ENDS) :] if id_ not in by_text]
    if lost:
        warnings.warn(f"{path} has {len(ends) - len(lost)} of {len(ends)} end tokens, as GGUF has "
                      f"no keys for more: {', '.join(map(str, ends))}", stacklevel=3)  # fmt: skip
    bos = getattr(config, "bos_token_id", None)
    return ({f"{PREFIX}bos_token_id": bos} if bos in tokens else {}) | found

"""Read Hugging Face checkpoints: config.json next to model.safetensors, or to shards and an index.

The weights may also be PyTorch's files, pytorch_model.bin or its shards. nanoGPT's checkpoints have
the same tensor names but another layout.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from gpt2block.errors import CheckpointError, InputError, shown
from gpt2block.files.checkpoints import files, nanogpt, pytorch
from gpt2block.files.checkpoints.four_bit import Scheme
from gpt2block.files.checkpoints.naming import GPT2_NAMING, Naming, naming_of
from gpt2block.files.checkpoints.packed_experts import split_experts
from gpt2block.files.checkpoints.stored import DTYPES, Stored, equal, itemsize, same
from gpt2block.models.architectures import ARCHITECTURES
from gpt2block.models.config import SIZES, GPT2Config, ModelConfig, end_tokens_in, model_type

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MODEL_FILES = (WEIGHTS, INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")
CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
# Files of the package sentence-transformers
MODULES = "modules.json"
POOLING_CONFIG = "1_Pooling/config.json"
# Last words of the errors that the package safetensors raises for truncated files
_TRUNCATED = ("header too small", "invalid header length", "file not fully covered")
# For multimodal models: prefixes of the text model's tensors, keys of the whole model's config that
# apply to the text model, and defaults of `transformers`
_TEXT = re.compile(r"^(model\.)?language_model\.(model\.)?|^(?=lm_head\.|mtp\.)")
_OF_WHOLE = ("tie_word_embeddings", "dtype", "torch_dtype", "eos_token_id", "quantization_config")
_ABSENT = {"model_type": "mistral", "tie_word_embeddings": True}
# Unsupported parts of models, and the keys of their configs
_UNSUPPORTED = {
    "other mixtures of experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "layers of Mamba": ("mamba_d_state", "ssm_state_size", "state_size"),
    "layers of convolutions": ("conv_L_cache",),
    "images": ("vision_config",), "sounds": ("audio_config",),
}  # fmt: skip
DTYPE_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def is_weights(file: Path) -> bool:
    """Return whether this module reads such a file, judged by the file's suffix or first bytes."""
    if file.suffix == ".json" or pytorch.is_pickle(file):
        return True
    header = files.read_start(file, 9)[8:]  # first byte of safetensors' header, after its length
    return header == b"{" or (not header and file.suffix == ".safetensors")


def read_model(file: Path) -> tuple[ModelConfig, dict[str, Stored]]:
    """Return a model's config, and its stored tensors by gpt2block's names.

    file: .safetensors, a file written by `torch.save`, or an index of several such files. Raises
    CheckpointError, which lists missing, unexpected and misshapen tensors.

    No tensor data is read, except to compare an lm_head that is stored although the config ties it.
    """
    tensors: list[Stored] = []
    model_args = None
    for shard in _files(file):
        if pytorch.is_pickle(shard):
            read, model_args = pytorch.read(shard)
            tensors += read.values()
        else:
            tensors += read_header(shard)
    if model_args is None:
        source, (config, found) = CONFIG, _read_config(file, tensors)
    else:
        source, found = "model_args", _bare(file, tensors, GPT2_NAMING)
        with files.about(f"{file}: model_args"):
            config, found = nanogpt.as_hugging_face(model_args, found)
    tied, (wte,) = config.tie_word_embeddings, naming_of(config).in_file("wte")
    if tied and wte not in found and "lm_head.weight" in found:
        found[wte] = found.pop("lm_head.weight")
    if tied and "lm_head.weight" in found:
        config = replace(config, tie_word_embeddings=False)
    stored = naming_of(config).model_tensors(file, f"{source} has n_layer", config, found)
    # As in `transformers` 5: a stored lm_head that differs from wte is used even if the config
    # says tie_word_embeddings, because the config is then wrong.
    if tied and "lm_head" in stored and equal(stored["lm_head"], stored["wte"]):
        del stored["lm_head"]
        config = replace(config, tie_word_embeddings=True)
    return config, stored


def _bare(file: Path, tensors: Sequence[Stored], naming: Naming) -> dict[str, Stored]:
    """Return weights by their names without prefixes. Buffers that are not weights are dropped.

    A tensor may be stored several times with the same numbers. Raises CheckpointError for a tensor
    that is stored with several values.
    """
    found: dict[str, Stored] = {}
    unequal = []
    for tensor in tensors:
        name = naming.bare(tensor.label)
        if re.fullmatch(naming.ignored, name):
            continue
        if name in found and not same(found[name], tensor):
            unequal.append(name)
        found[name] = replace(tensor, label=name)
    if unequal:
        raise CheckpointError(
            f"{file}: {len(unequal)} tensors are stored twice with different numbers: "
            f"{files.first_names(unequal)}"
        )
    return found


def shards_of(index: Path) -> list[str]:
    """Return the names of the files that an index lists. Raises CheckpointError."""
    content = files.read_json(index)
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not names:
        raise CheckpointError(f"{index}: expected weight_map, an object of tensor and file names, "
                              "as in the index of a model in several files: to open another model "
                              "give its folder")  # fmt: skip
    shards = sorted(set(map(str, names.values())))
    outside = [name for name in shards if Path(name).name != name]
    if outside:
        raise CheckpointError(
            f"{index}: expected names of files in the same folder, got {files.first_names(outside)}"
        )
    return shards


def _files(file: Path) -> list[Path]:
    """Return the files with tensors: the weights file itself, or the files that an index lists."""
    if file.suffix != ".json":
        return [file]
    shards = shards_of(file)
    absent = [name for name in shards if not files.is_file(file.parent / name)]
    if absent:
        raise CheckpointError(
            f"{file}: {len(absent)} of {len(shards)} files are not in its folder: "
            f"{files.first_names(absent)}"
        )
    return [file.parent / name for name in shards]


def read_header(file: Path) -> list[Stored]:
    """Return the tensors of a .safetensors file, labelled with their names in the file.

    Source: the format's description in https://github.com/huggingface/safetensors. The library
    checks the file, but its interface does not return the tensors' offsets.
    """
    files.check_supported(file, files.read_start(file, 64))
    size = files.file_size(file)
    damage = (SafetensorError, ValueError, TypeError, KeyError, RecursionError)
    with files.about(file, damage, "not a safetensors file that can be read: {}"):
        try:
            with safe_open(file, "np"):
                header, data = _json_of(file)
                return list(_entries(file, header, data, size))
        except SafetensorError as error:
            if not str(error).endswith(_TRUNCATED):
                raise
            if str(error).endswith(_TRUNCATED[-1]):
                header, data = _json_of(file)
                header.pop("__metadata__", None)
                most = data + max((spec["data_offsets"][1] for spec in header.values()), default=0)
                if size > most:
                    raise CheckpointError(f"too long: its header expects {most:,} bytes, the file "
                                          f"has {size:,}") from error  # fmt: skip
            raise CheckpointError(f"truncated or not a safetensors file, {size:,} bytes ({error}): "
                                  "download it again") from error  # fmt: skip


def _json_of(file: Path) -> tuple[dict[str, Any], int]:
    """Return the header of a .safetensors file, and the file offset of tensor data."""
    length = int.from_bytes(files.read_start(file, 8), "little")
    return json.loads(files.read_start(file, 8 + length)[8:]), 8 + length


def _entries(file: Path, header: dict[str, Any], data: int, size: int) -> Iterator[Stored]:
    """Yield a header's tensors. `data`: file offset of tensor data. `size`: bytes of the file."""
    for name, spec in header.items():
        if name == "__metadata__":
            continue
        shape, (begin, end) = tuple(spec["shape"]), spec["data_offsets"]
        dtype = DTYPE_NAMES.get(spec["dtype"])
        fits = dtype is None or math.prod(shape) * itemsize(dtype) == end - begin
        if not fits or data + end > size:
            raise ValueError(f"{name}: {shape} does not fit its data_offsets")
        yield Stored(name, file, data + begin, shape, dtype or spec["dtype"])


def _read_config(file: Path, tensors: Sequence[Stored]) -> tuple[ModelConfig, dict[str, Stored]]:
    """Return config and tensors. Without config.json, the tensors' width implies a GPT-2 size.

    The tensors are returned by their names without prefixes. As in transformers, the end tokens of
    generation_config.json replace config.json's end tokens, and a config without a dtype gets the
    dtype of the first tensor.
    """
    path = file.parent / CONFIG
    if not files.is_file(path):
        found = _bare(file, tensors, GPT2_NAMING)
        return _gpt2_config(file, found), found
    config, of_text, scheme = read_config(path, tensors)
    tensors = _text_tensors(file, tensors) if of_text else tensors
    if scheme is not None:
        with files.about(file):
            tensors = scheme.joined(tensors)
    settings = path.with_name(GENERATION_CONFIG)
    ends = end_tokens_in(files.read_object(settings))
    with files.about(settings):
        config = config if ends == () else replace(config, eos_token_ids=ends)
    config = config.with_tensors(each.label for each in tensors)
    found = split_experts(file, config, _bare(file, tensors, naming_of(config)))
    return config, found if scheme is None else _without_zeros(config, found)


def _without_zeros(config: ModelConfig, found: dict[str, Stored]) -> dict[str, Stored]:
    """Drop biases of zeros that the model does not have, as early files of GPTQ store them."""
    known = {name for names in naming_of(config).parts(config).values() for name in names}
    extra = (n for n in found if n.endswith(".bias") and found[n].dtype in DTYPES)
    zeros = {n for n in extra if n not in known and not found[n].read().any()}
    return {name: tensor for name, tensor in found.items() if name not in zeros}


def read_config(
    path: Path, tensors: Sequence[Stored] = ()
) -> tuple[ModelConfig, bool, Scheme | None]:
    """Return the config of a config.json, and the scheme of matrices of 4 bits, if it states one.

    The second item is whether the config is the text model's of a larger model. tensors: of the
    checkpoint, for a config without a dtype. Raises CheckpointError.
    """
    content = files.read_json(path)
    text = _text_config(content)
    content = content if text is None else text
    if isinstance(content, dict) and not (content.get("dtype") or content.get("torch_dtype")):
        content["dtype"] = next((each.dtype for each in tensors if each.dtype in DTYPES), None)
    try:
        scheme = Scheme.of(content) if isinstance(content, dict) else None
        return parse_config(content), text is not None, scheme
    except (CheckpointError, InputError) as error:
        message = str(error).removeprefix(f"{CONFIG}: ")
        raise CheckpointError(f"{path}: {message}") from error


def _text_config(content: Any) -> Any:
    """Return the text model's config of a multimodal model, or None.

    Settings of the whole model replace the text model's.
    """
    text = content.get("text_config") if isinstance(content, dict) else None
    if not isinstance(text, dict) or content.get("model_type") in (*ARCHITECTURES,):
        return None
    whole = {key: content[key] for key in _OF_WHOLE if content.get(key) is not None}
    return {**_ABSENT, **text, **whole}


def _text_tensors(file: Path, tensors: Sequence[Stored]) -> Sequence[Stored]:
    """Return the text model's tensors of a multimodal model; warn of the other tensors."""
    left = [each.label for each in tensors if not _TEXT.match(each.label)]
    modules = Counter(label.removeprefix("model.").split(".")[0] for label in left)
    named = ", ".join(f"{module} ({count} tensors)" for module, count in modules.items())
    if named:
        warnings.warn(f"{file}: only the text model is read, without {named}", stacklevel=2)
    kept = (each for each in tensors if _TEXT.match(each.label))
    return [replace(each, label=_TEXT.sub("", each.label)) for each in kept]


def parse_config(config: Any) -> ModelConfig:
    """Return the config that a Hugging Face `config.json` describes. Raises CheckpointError."""
    kind = model_type(config)
    known = ARCHITECTURES.get(kind) if isinstance(kind, str) else None
    if known is None:
        names = ", ".join(map(repr, ARCHITECTURES))
        absent = [what for what, keys in _UNSUPPORTED.items() if any(map(config.get, keys))]
        lacks = f": {', '.join(absent)} are not supported" if absent else ""
        raise CheckpointError(
            f"{CONFIG}: model_type: expected one of {names}, got {shown(kind)}{lacks}"
        )
    return known.CONFIG.from_hugging_face(config)


def _gpt2_config(file: Path, found: Mapping[str, Stored]) -> GPT2Config:
    """Return the config of the GPT-2 size with this n_embd; other sizes come from the tensors."""
    n_embd, vocab_size, n_ctx = (
        next(iter(found[name].shape), 0) if name in found else 0
        for name in ("h.0.ln_1.weight", "wte.weight", "wpe.weight")
    )
    layers = GPT2_NAMING.layers(found)
    sizes: dict[str, Any] = {"n_layer": layers, "vocab_size": vocab_size, "n_ctx": n_ctx}
    for config in SIZES.values():
        if config.n_embd == n_embd:
            with files.about(file):
                return replace(config, **{name: size for name, size in sizes.items() if size})
    raise CheckpointError(
        f"{file}: expected config.json next to it: the tensors do not show the number of heads, "
        f"and width {n_embd} is not that of a GPT-2 size"
    )

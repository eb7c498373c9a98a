"""Hugging Face's layout: config.json next to model.safetensors, or next to shards and an index.

The weights may also be PyTorch's files, pytorch_model.bin or its shards. nanoGPT's checkpoints have
the same tensor names but another layout.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from gpt2block.checkpoints import nanogpt, pytorch
from gpt2block.checkpoints.naming import GPT2_NAMING, Naming, naming_of
from gpt2block.checkpoints.stored import (
    DTYPES,
    Entry,
    Joined,
    Stored,
    check_pointer,
    equal,
    file_size,
    first_names,
    is_file,
    itemsize,
    read_start,
    reading,
)
from gpt2block.config import SIZES, GPT2Config, ModelConfig, end_tokens_in, model_shapes
from gpt2block.config_llama import LlamaConfig
from gpt2block.errors import CheckpointError, InputError, shown

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PYTORCH_WEIGHTS = "pytorch_model.bin"
PYTORCH_INDEX = "pytorch_model.bin.index.json"
CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
Entries = Mapping[str, Entry]
_LONGEST_JSON = 100_000_000  # bytes; the same limit as for the header of a .safetensors file
DTYPE_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def read_model(file: Path) -> tuple[ModelConfig, dict[str, Stored]]:
    """Return the config and the stored tensors by gpt2block's names.

    file: .safetensors, a file written by `torch.save`, or an index of several. Raises
    CheckpointError, which lists missing, unexpected and misshapen tensors.

    No tensor data is read, except to compare an lm_head that is stored although the config ties it.
    """
    entries, model_args = _read_entries(file)
    if model_args is None:
        source, (config, found) = CONFIG, _read_config(file, entries)
    else:
        source = "model_args"
        try:
            config, found = nanogpt.as_hugging_face(model_args, _bare(file, entries, GPT2_NAMING))
        except ValueError as error:
            raise CheckpointError(f"{file}: model_args: {error}") from error
    tied = config.tie_word_embeddings
    if tied and "lm_head.weight" in found:
        config = replace(config, tie_word_embeddings=False)
    naming = naming_of(config)
    parts = checked_parts(file, f"{source} has n_layer", config, naming, found)
    stored = {
        ours: _stored(file, naming.layout_of(ours), {name: found[name] for name in names})
        for ours, names in parts.items()
    }
    # `transformers` 5 ties only equal matrices: with a config that ties them, or by default, it
    # uses a stored lm_head that differs from wte, because the config is then wrong.
    if tied and "lm_head" in stored and equal(stored["lm_head"], stored["wte"]):
        del stored["lm_head"]
        config = replace(config, tie_word_embeddings=True)
    return config, stored


def _read_entries(file: Path) -> tuple[list[tuple[str, Entry]], dict[str, Any] | None]:
    """Return the tensors by the names in the files, and nanoGPT's model_args where present."""
    found: list[tuple[str, Entry]] = []
    model_args = None
    for shard in _files(file):
        if pytorch.is_pickle(shard):
            entries, model_args = pytorch.read(shard)
            found += entries.items()
        else:
            found += _read_header(shard).items()
    return found, model_args


def _bare(file: Path, entries: Iterable[tuple[str, Entry]], naming: Naming) -> dict[str, Entry]:
    """Return the tensors by their names without prefixes, each of which must be there once."""
    found: dict[str, Entry] = {}
    repeated = []
    for label, entry in entries:
        name = naming.bare(label)
        repeated += [name] if name in found else []
        found[name] = entry
    if repeated:
        raise CheckpointError(
            f"{file}: {len(repeated)} tensors are stored twice: {first_names(repeated)}"
        )
    return found


def _stored(file: Path, layout: str | None, entries: Entries) -> Stored:
    """The tensor of these entries, whose rows follow each other."""
    parts = []
    for name, entry in entries.items():
        shape, kept = entry.shape, layout
        if entry.order == "F":
            shape, kept = shape[::-1], "NK"
        parts.append(Stored(name, entry.file, entry.offset, shape, entry.dtype, kept))
    if len(parts) == 1:
        return parts[0]
    if len({part.dtype for part in parts}) > 1:
        described = ", ".join(f"{part.label} {part.dtype}" for part in parts)
        raise CheckpointError(f"{file}: expected one dtype for Q, K and V, got {described}")
    return Joined.of(parts)


def checked_parts(
    file: Path, source: str, config: ModelConfig, naming: Naming, found: Entries
) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return gpt2block's names → names and shapes in the file of a model's tensors.

    source: what states the number of blocks. Raises CheckpointError unless the tensors found are
    exactly these.
    """
    present = naming.layers(found)
    if present != config.n_layer:  # checked before anything of the config's size is allocated
        raise CheckpointError(f"{file}: {source} {config.n_layer}, the file has {present} blocks")
    parts = {
        ours: naming.parts(config, ours, shape) for ours, shape in model_shapes(config).items()
    }
    _check(file, naming, parts, found)
    return parts


def _check(
    file: Path, naming: Naming, parts: Mapping[str, Mapping[str, tuple[int, ...]]], found: Entries
) -> None:
    """Raise CheckpointError unless the tensors found are exactly those of the model."""
    expected = {name: shape for names in parts.values() for name, shape in names.items()}
    missing = [name for name in expected if name not in found]
    unexpected = [
        name for name in found if name not in expected and not naming.ignored.fullmatch(name)
    ]
    wrong = [
        f"{name}: expected shape {shape}, got {found[name].shape}"
        for name, shape in expected.items()
        if name in found and found[name].shape != shape
    ]
    foreign = [
        f"{name}: expected one of {', '.join(DTYPES)}, got {found[name].dtype}"
        for name in expected
        if name in found and found[name].dtype not in DTYPES
    ]
    scattered = [
        name
        for ours, names in parts.items()
        for name in names
        if (entry := found.get(name)) is not None
        and entry.order not in (("C", "F") if naming.layout_of(ours) == "KN" else ("C",))
    ]
    problems = [
        f"{len(names)} tensors {problem}: {first_names(names)}"
        for names, problem in (
            (missing, "missing"),
            (unexpected, "unexpected"),
            (wrong, "misshapen"),
            (foreign, "of another dtype"),
            (scattered, "not contiguous, so save tensor.contiguous()"),
        )
        if names
    ]
    if problems:
        raise CheckpointError(f"{file}: {'; '.join(problems)}")


def shards_of(index: Path) -> list[str]:
    """Return the names of the files that an index lists. Raises CheckpointError."""
    content = read_json(index)
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not names:
        raise CheckpointError(f"{index}: expected weight_map, an object of tensor and file names")
    files = sorted(set(map(str, names.values())))
    outside = [name for name in files if Path(name).name != name]
    if outside:
        raise CheckpointError(
            f"{index}: expected names of files in the same folder, got {first_names(outside)}"
        )
    return files


def _files(file: Path) -> list[Path]:
    """Return the files that hold the tensors: the file itself, or those that an index lists."""
    if file.suffix != ".json":
        return [file]
    shards = shards_of(file)
    absent = [name for name in shards if not is_file(file.parent / name)]
    if absent:
        raise CheckpointError(
            f"{file}: {len(absent)} of {len(shards)} files are not in its folder: "
            f"{first_names(absent)}"
        )
    return [file.parent / name for name in shards]


def read_json(file: Path) -> Any:
    """Return the content of a JSON file. Raises CheckpointError when it cannot be read."""
    size = file_size(file)
    if size > _LONGEST_JSON:
        raise CheckpointError(f"{file}: expected at most {_LONGEST_JSON:,} bytes, got {size:,}")
    try:
        with reading(file):
            return json.loads(file.read_text(encoding="utf-8"))
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: cannot be read as JSON: {error}") from error


def _read_header(file: Path) -> dict[str, Entry]:
    """Return the tensors of a .safetensors file by the names in it.

    Source: the format's description in https://github.com/huggingface/safetensors. The library
    checks the file, but its interface does not return the tensors' offsets.
    """
    check_pointer(file, read_start(file, 64))
    size = file_size(file)
    try:
        with reading(file), safe_open(file, "np"):
            start = read_start(file, 8)
            length = int.from_bytes(start, "little")
            header = json.loads(read_start(file, 8 + length)[8:])
            return dict(_entries(file, header, 8 + length, size))
    except CheckpointError:
        raise
    except (SafetensorError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(
            f"{file}: truncated or not a safetensors file, {size:,} bytes ({error}): "
            "download it again"
        ) from error


def _entries(
    file: Path, header: dict[str, Any], data: int, size: int
) -> Iterator[tuple[str, Entry]]:
    """Yield name and entry of each tensor. data: offset of the tensor data; size: of the file."""
    for name, spec in header.items():
        if name == "__metadata__":
            continue
        shape, (begin, end) = tuple(spec["shape"]), spec["data_offsets"]
        dtype = DTYPE_NAMES.get(spec["dtype"])
        fits = dtype is None or math.prod(shape) * itemsize(dtype) == end - begin
        if not fits or data + end > size:
            raise ValueError(f"{name}: {shape} does not fit its data_offsets")
        yield name, Entry(file, data + begin, shape, dtype or spec["dtype"], "C")


def _read_config(
    file: Path, entries: Iterable[tuple[str, Entry]]
) -> tuple[ModelConfig, dict[str, Entry]]:
    """Read config.json next to the file; without one, use the GPT-2 size of the tensors' width.

    As in transformers, the end tokens of generation_config.json replace those of config.json.
    Returns the config, and the tensors by their names without prefixes.
    """
    path = file.parent / CONFIG
    if not is_file(path):
        found = _bare(file, entries, GPT2_NAMING)
        return _gpt2_config(file, found), found
    content = read_json(path)
    try:
        config = parse_config(content)
    except (CheckpointError, InputError) as error:
        message = str(error).removeprefix(f"{CONFIG}: ")
        raise CheckpointError(f"{path}: {message}") from error
    try:
        ends = end_tokens_in(read_generation_config(file.parent))
        config = config if ends == () else replace(config, eos_token_ids=ends)
    except InputError as error:
        raise CheckpointError(f"{path.with_name(GENERATION_CONFIG)}: {error}") from error
    return config, _bare(file, entries, naming_of(config))


def read_generation_config(directory: Path) -> dict[str, Any]:
    """The content of generation_config.json; {} where there is none. Raises CheckpointError."""
    path = directory / GENERATION_CONFIG
    content = read_json(path) if is_file(path) else {}
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected an object, got {shown(content)}")
    return content


def parse_config(config: Any) -> ModelConfig:
    """The config that a Hugging Face `config.json` describes. Raises CheckpointError."""
    if not isinstance(config, dict):
        raise CheckpointError(f"{CONFIG}: expected an object, got {shown(config)}")
    kind = config.get("model_type", "gpt2")
    if kind == "gpt2":
        return GPT2Config.from_hugging_face(config)
    if kind == "llama":
        return LlamaConfig.from_hugging_face(config)
    raise CheckpointError(f"{CONFIG}: expected model_type 'gpt2' or 'llama', got {shown(kind)}")


def _gpt2_config(file: Path, found: Entries) -> GPT2Config:
    n_embd, vocab_size, n_ctx = (
        (*(found[name].shape if name in found else ()), 0)[0]
        for name in ("h.0.ln_1.weight", "wte.weight", "wpe.weight")
    )
    for config in SIZES.values():
        if config.n_embd == n_embd:
            try:
                return replace(
                    config,
                    n_layer=GPT2_NAMING.layers(found) or config.n_layer,
                    vocab_size=vocab_size or config.vocab_size,
                    n_ctx=n_ctx or config.n_ctx,
                )
            except InputError as error:
                raise CheckpointError(f"{file}: {error}") from error
    raise CheckpointError(
        f"{file}: expected config.json next to it: the tensors do not show the number of heads, "
        f"and width {n_embd} is not that of a GPT-2 size"
    )

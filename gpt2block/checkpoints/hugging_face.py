"""Hugging Face's layout: config.json beside model.safetensors, or beside shards and their index."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from gpt2block.checkpoints.stored import Stored, check_pointer, itemsize, read_start, some
from gpt2block.config import SIZES, GPT2Config, model_shapes
from gpt2block.errors import CheckpointError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
PREFIX = "transformer."  # that `transformers` writes before every name but lm_head's
DTYPE_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}

# Our names → Hugging Face's; a block's stand inside `h.N.`
NAMES = {
    "wte": "wte.weight",
    "wpe": "wpe.weight",
    "gamma1": "ln_1.weight",
    "beta1": "ln_1.bias",
    "w_qkv": "attn.c_attn.weight",
    "b_qkv": "attn.c_attn.bias",
    "w_attn": "attn.c_proj.weight",
    "b_attn": "attn.c_proj.bias",
    "gamma2": "ln_2.weight",
    "beta2": "ln_2.bias",
    "w_fc": "mlp.c_fc.weight",
    "b_fc": "mlp.c_fc.bias",
    "w_proj": "mlp.c_proj.weight",
    "b_proj": "mlp.c_proj.bias",
    "gamma_f": "ln_f.weight",
    "beta_f": "ln_f.bias",
    "lm_head": "lm_head.weight",
}
_MASK = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")  # buffers that old files have


class _Entry(NamedTuple):
    offset: int
    shape: tuple[int, ...]
    dtype: str  # in safetensors' words


def name_of(ours: str) -> str:
    """Hugging Face's name, without `transformer.`, of a tensor by our name."""
    block, dot, kind = ours.rpartition(".")
    return block + dot + NAMES[kind]


def layout_of(ours: str) -> str | None:
    """Of a tensor by our name: "KN" in a block, "NK" for wte and lm_head, None for no matrix."""
    kind = ours.rpartition(".")[2]
    return "NK" if kind in ("wte", "lm_head") else "KN" if kind.startswith("w_") else None


def read_model(file: Path) -> tuple[GPT2Config, dict[str, Stored]]:
    """The config and where the tensors are, by our names, of a .safetensors file or an index.

    Raises CheckpointError, which lists what is missing, unexpected or misshapen.
    """
    found: dict[str, tuple[Path, _Entry]] = {}
    twice = []
    for shard in _files(file):
        for label, entry in _read_header(shard).items():
            name = label.removeprefix(PREFIX)
            twice += [name] if name in found else []
            found[name] = shard, entry
    if twice:
        raise CheckpointError(f"{file}: {len(twice)} tensors are there twice: {some(twice)}")
    config = _read_config(file, {name: entry.shape for name, (_, entry) in found.items()})
    present = _layers(found)
    if present != config.n_layer:  # before anything is made as long as config.json says
        raise CheckpointError(
            f"{file}: config.json says n_layer {config.n_layer}, the file has blocks for {present}"
        )
    _check(file, config, {name: entry for name, (_, entry) in found.items()})
    tensors = {}
    for ours in model_shapes(config):
        shard, entry = found[name_of(ours)]
        dtype = DTYPE_NAMES[entry.dtype]
        layout = layout_of(ours)
        tensors[ours] = Stored(name_of(ours), shard, entry.offset, entry.shape, dtype, layout)
    return config, tensors


def _check(file: Path, config: GPT2Config, found: Mapping[str, _Entry]) -> None:
    """CheckpointError unless exactly the tensors of such a model are there."""
    expected = {name_of(ours): shape for ours, shape in model_shapes(config).items()}
    missing = [name for name in expected if name not in found]
    unexpected = [
        name
        for name in found
        if name not in expected and name != "lm_head.weight" and not _MASK.fullmatch(name)
    ]
    wrong = [
        f"{name}: expected shape {shape}, got {found[name].shape}"
        for name, shape in expected.items()
        if name in found and found[name].shape != shape
    ]
    foreign = [
        f"{name}: expected one of {', '.join(DTYPE_NAMES)}, got {found[name].dtype}"
        for name in expected
        if name in found and found[name].dtype not in DTYPE_NAMES
    ]
    problems = [
        f"{len(names)} tensors {what}: {some(names)}"
        for names, what in (
            (missing, "missing"),
            (unexpected, "unexpected"),
            (wrong, "misshapen"),
            (foreign, "of another dtype"),
        )
        if names
    ]
    if problems:
        raise CheckpointError(f"{file}: {'; '.join(problems)}")


def shards_of(index: Path) -> list[str]:
    """The names of the files that an index says the tensors are in. Raises CheckpointError."""
    content = read_json(index)
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not names:
        raise CheckpointError(f"{index}: expected weight_map, an object of tensor and file names")
    files = sorted(set(map(str, names.values())))
    outside = [name for name in files if Path(name).name != name]
    if outside:
        raise CheckpointError(f"{index}: expected names of files beside it, got {some(outside)}")
    return files


def _files(file: Path) -> list[Path]:
    """Those that hold the tensors: the file itself, or what an index names."""
    if file.suffix != ".json":
        return [file]
    shards = shards_of(file)
    absent = [name for name in shards if not (file.parent / name).is_file()]
    if absent:
        raise CheckpointError(
            f"{file}: {len(absent)} of {len(shards)} files missing beside it: {some(absent)}"
        )
    return [file.parent / name for name in shards]


def read_json(file: Path) -> Any:
    """What a JSON file holds; CheckpointError when it cannot be read."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise CheckpointError(f"{file}: cannot be read as JSON: {error}") from error


def _read_header(file: Path) -> dict[str, _Entry]:
    """What a .safetensors file holds, by the names in it.

    Source: the format's description in https://github.com/huggingface/safetensors. The library
    checks the file; where the tensors begin is not in its interface.
    """
    check_pointer(file, read_start(file, 64))
    try:
        with safe_open(file, "np"):
            start = read_start(file, 8)
            length = int.from_bytes(start, "little")
            header = json.loads(read_start(file, 8 + length)[8:])
            return dict(_entries(header, 8 + length, file.stat().st_size))
    except (SafetensorError, OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"{file}: truncated or not a safetensors file, {file.stat().st_size:,} bytes "
            f"({error}): download it again"
        ) from error


def _entries(header: dict[str, Any], data: int, size: int) -> Iterator[tuple[str, _Entry]]:
    """Name and place of each tensor; `data` is where the bytes of all begin, `size` the file's."""
    for name, spec in header.items():
        if name == "__metadata__":
            continue
        shape, (begin, end) = tuple(spec["shape"]), spec["data_offsets"]
        dtype = DTYPE_NAMES.get(spec["dtype"])
        fits = dtype is None or math.prod(shape) * itemsize(dtype) == end - begin
        if not fits or data + end > size:
            raise ValueError(f"{name}: {shape} does not fit its place in the file")
        yield name, _Entry(data + begin, shape, spec["dtype"])


def _read_config(file: Path, shapes: Mapping[str, tuple[int, ...]]) -> GPT2Config:
    """config.json beside the file; without one, the GPT-2 size that has the tensors' width."""
    path = file.parent / CONFIG
    if path.is_file():
        config = read_json(path)
        try:
            return GPT2Config.from_hugging_face(config)
        except ValueError as error:  # our own errors are ValueErrors
            raise CheckpointError(f"{path}: {error}") from error
    n_embd, vocab_size, n_ctx = (
        (*shapes.get(name, ()), 0)[0] for name in ("h.0.ln_1.weight", "wte.weight", "wpe.weight")
    )
    for config in SIZES.values():
        if config.n_embd == n_embd:
            return replace(
                config,
                n_layer=_layers(shapes) or config.n_layer,
                vocab_size=vocab_size or config.vocab_size,
                n_ctx=n_ctx or config.n_ctx,
                tie_word_embeddings="lm_head.weight" not in shapes,
            )
    raise CheckpointError(
        f"{file}: expected config.json beside it: the number of heads is not in the tensors, and "
        f"width {n_embd} is no GPT-2 size"
    )


def _layers(names: Iterable[str]) -> int:
    """How many blocks there are tensors for."""
    return len({found[1] for name in names if (found := re.match(r"h\.(\d+)\.", name))})

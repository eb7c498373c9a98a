"""`save_pretrained`: write config.json and model.safetensors for `transformers`."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from gpt2block.checks import check_choice, is_plain
from gpt2block.errors import CheckpointError, InputError, shown
from gpt2block.files.checkpoints import gguf, gguf_tokenizer, hugging_face, tokenizer_files
from gpt2block.files.checkpoints.checkpoint import Checkpoint
from gpt2block.files.checkpoints.files import first_names, read_start
from gpt2block.files.checkpoints.naming import Naming, Shape, naming_of
from gpt2block.files.checkpoints.stored import DTYPES, converted, itemsize, reorder
from gpt2block.files.writing import put_in_place, temporary_folder
from gpt2block.models.config import ModelConfig, model_shapes

SAVED_DTYPES = ("float32", "float16", "bfloat16")
_SAFETENSORS_NAMES = {ours: theirs for theirs, ours in hugging_face.DTYPE_NAMES.items()}


class TensorSource(Protocol):
    """An object with a config and its tensors, such as GPT2Weights or Checkpoint."""

    @property
    def config(self) -> ModelConfig: ...

    def tensors(self) -> Iterable[tuple[str, np.ndarray, str | None]]:
        """Yield (name, array, layout) of every tensor, like `Checkpoint.tensors`."""


def save_pretrained(
    directory: str | Path,
    weights: TensorSource,
    dtype: str | None = None,
    tokenizer: str | Path | Checkpoint | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a Hugging Face directory that `transformers` and `Checkpoint.open` load.

    directory: created if it does not exist. weights: GPT2Weights, a Checkpoint or another
    TensorSource, read once, one tensor at a time. dtype: "float32", "float16" or "bfloat16"; None
    keeps each tensor's dtype. tokenizer: a folder with tokenizer files, a tokenizer.json or a
    Checkpoint, whose tokenizer files are copied; by default the files of `weights` if it is a
    Checkpoint. The generation_config.json of a Checkpoint is copied, too.

    `overwrite` is required to replace a model in the directory. Replacing removes the old model's
    configs, weights (including PyTorch's), shards and tokenizer files even if the new model has no
    file of that name; other files stay. An error before the new files are complete changes nothing.
    Temporary files of a killed process are removed (`files.temporary_folder`). Returns the
    directory.

    Warns (UserWarning) if `transformers` multiplies a Gemma's embeddings by a different factor.

    Raises InputError for wrong arguments and for weights outside the dtype's range, CheckpointError
    if files cannot be written or a tokenizer cannot be read.
    """
    directory = given_path("directory", directory)
    if dtype is not None:
        check_choice("dtype", dtype, SAVED_DTYPES)
    check_source(weights)
    copied = tokenizer_of(weights, tokenizer)
    old = _model_files(directory, bool(copied))
    copied |= _generation_config_of(weights, tokenizer)
    if old and not overwrite:
        raise InputError(
            f"{directory}: {first_names(old)} already there: give another directory or "
            "overwrite=True"
        )
    with _replaced_together(directory, old) as new:
        stored = _write_weights(new / hugging_face.WEIGHTS, weights, dtype)
        warn_of_factor(directory, weights.config, "transformers", stored)
        config = weights.config.to_hugging_face() | {"torch_dtype": stored}
        if config.get("embedding_dtype") == stored:
            # embedding_dtype defaults to torch_dtype. If it were stored, `transformers` would keep
            # it when the model is cast to another dtype.
            del config["embedding_dtype"]
        copied[hugging_face.CONFIG] = (json.dumps(config, indent=2) + "\n").encode()
        for name, content in copied.items():
            (new / name).write_bytes(content)
    return directory


def check_source(weights: TensorSource) -> None:
    """Raise InputError for weights without a config."""
    if not isinstance(getattr(weights, "config", None), ModelConfig):
        raise InputError(
            "weights: expected GPT2Weights, a Checkpoint or another TensorSource, got "
            f"{shown(weights)}"
        )


def warn_of_factor(path: Path, config: Any, program: str, dtype: str) -> None:
    """Warn if rounding to `dtype`, as the software `program` does, changes the embedding factor."""
    if getattr(config, "embedding_dtype", dtype) == dtype:
        return
    cast = replace(config, embedding_dtype=dtype)
    own, other = config.scales.embedding, cast.scales.embedding
    if own != other:
        warnings.warn(
            f"{path}: {program} multiplies embeddings by {other:g}, as it rounds the factor to "
            f"{dtype}; this model has {own:g}, which gpt2block keeps",
            stacklevel=3,
        )


def given_path(name: str, given: str | Path) -> Path:
    """Return a path argument with `~` expanded. Raises InputError for an invalid path."""
    if not isinstance(given, (str, Path)) or given == "":
        raise InputError(f"{name}: expected a path, got {shown(given)}")
    try:
        if b"\0" in os.fsencode(given):
            raise ValueError("it has a null character")
        return Path(given).expanduser()
    except (ValueError, RuntimeError) as error:  # such as an unknown user in ~user
        raise InputError(f"{name}: expected a path, got {shown(str(given))}: {error}") from error


def tokenizer_of(weights: TensorSource, given: str | Path | Checkpoint | None) -> dict[str, bytes]:
    """Return {name: content} of the tokenizer files to write, read from `given` or `weights`.

    OpenAI's pair of files is also written under Hugging Face's names, the only names that
    `transformers` reads.
    """
    if given is None and isinstance(weights, Checkpoint):
        given = weights
    if given is None:
        return {}
    if not isinstance(given, Checkpoint):
        found = tokenizer_files.of_path(given_path("tokenizer", given))
    elif gguf.is_gguf(given.file):
        return gguf_tokenizer.as_files(given.file)
    else:
        found = given.tokenizer_files()
    openai, usual = tokenizer_files.PAIRS
    if all(name in found for name in openai) and not any(name in found for name in usual):
        found = dict(zip(usual, (found[name] for name in openai), strict=True)) | found
    return {name: read_start(file) for name, file in found.items()}


def _generation_config_of(*given: object) -> dict[str, bytes]:
    """Return {file name: content} of generation_config.json of the first Checkpoint, or {}."""
    source = next((each for each in given if isinstance(each, Checkpoint)), None)
    if source is None or not source.generation_config():
        return {}
    name = hugging_face.GENERATION_CONFIG
    return {name: read_start(source.directory / name)}


def _model_files(directory: Path, with_tokenizer: bool) -> list[str]:
    """Return the names of a directory's files that saving a new model replaces or removes.

    Tokenizer files in a directory without a model are included only with `with_tokenizer`.
    """
    try:
        names = set(os.listdir(directory)) if directory.exists() else set()
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot be written: {error.strerror}") from error
    model = {hugging_face.CONFIG, hugging_face.GENERATION_CONFIG, *hugging_face.MODEL_FILES} & names
    for index in names.intersection(hugging_face.MODEL_FILES[1::2]):
        with suppress(CheckpointError):  # a damaged index counts as an index without files
            model |= {name for name in hugging_face.shards_of(directory / index) if name in names}
    tokens = names.intersection(tokenizer_files.NAMES) if model or with_tokenizer else set()
    old = sorted(model | tokens)
    folders = [name for name in old if (directory / name).is_dir()]
    if folders:
        raise CheckpointError(
            f"{directory}: expected files, found the folders {first_names(folders)}"
        )
    return old


@contextmanager
def _replaced_together(directory: Path, old: Iterable[str]) -> Iterator[Path]:
    """Yield a temporary folder. After the block, its files replace the files `old`."""
    new = not directory.exists()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        try:
            with temporary_folder(directory, "saving") as folder:
                yield folder
                files = sorted(folder.iterdir())
                for file in files:  # replaces links, not their targets, which other models may use
                    put_in_place(file, directory / file.name)
                for stale in {*old} - {file.name for file in files}:
                    (directory / stale).unlink(missing_ok=True)
        except BaseException:
            if new:
                with suppress(OSError):  # not empty
                    directory.rmdir()
            raise
    except OSError as error:
        name = os.path.basename(error.filename or directory)
        at = "" if name == directory.name else f" ({name})"
        raise CheckpointError(f"{directory}: cannot be written: {error.strerror}{at}") from error


def _write_weights(file: Path, weights: TensorSource, dtype: str | None) -> str:
    """Write a .safetensors file, and return the dtype of wte.

    The header precedes the tensors in the file and contains their dtypes, which are only known
    after the last tensor. Space for the longest possible header is reserved and padded with blanks.
    """
    shapes, naming = model_shapes(weights.config), naming_of(weights.config)
    parts = naming.parts(weights.config)
    room = len(_header(naming, parts, dict.fromkeys(shapes, "float32")))
    room += sum(map(len, parts.values()))  # 1 byte more per tensor: "BF16" is longer than "F32"
    room += -(8 + room) % 8
    dtypes: dict[str, str] = {}
    with file.open("wb") as stream:
        stream.seek(8 + room)
        for name, narrow in as_in_files(weights, naming, dtype):
            first = naming.first_of(name)
            if dtypes.setdefault(first, narrow.dtype.name) != narrow.dtype.name:
                raise InputError(
                    f"weights: {name} is {narrow.dtype.name}, {first} {dtypes[first]}: one tensor "
                    "in the file has both: give a dtype"
                )
            stream.write(narrow.reshape(-1).view(np.uint8).data)
        stream.seek(0)
        stream.write(room.to_bytes(8, "little") + _header(naming, parts, dtypes).ljust(room))
    return dtypes["wte"]


def as_in_files(
    weights: TensorSource, naming: Naming, dtype: str | None
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (gpt2block's name, C-contiguous array in the file's layout) for each tensor.

    dtype: as in `save_pretrained`. Raises InputError unless `weights` has exactly the model's
    tensors, in order.
    """
    config, shapes = weights.config, model_shapes(weights.config)
    expected = iter(shapes)
    joined: dict[str, np.ndarray] = {}  # rows that one tensor of the file joins, by its first name
    for name, array, layout in weights.tensors():
        awaited = next(expected, "no more tensors")
        if name != awaited:
            raise InputError(f"weights: expected {awaited} at this position, got {name}")
        if layout != naming.layout_of(name) and isinstance(array, np.ndarray):
            array = array.T  # noqa: PLW2901
        shape = naming.shape_of(name, shapes[name])
        if getattr(array, "shape", ()) == naming.flat(name, shapes[name]):
            array = array.reshape(shape)  # noqa: PLW2901
        rows = _converted(name, array, shape, dtype)
        kind = name.rpartition(".")[2]
        spans = config.file_spans(kind)
        if kind == "w_qkv" and config.head_order and not spans:
            rows = rows.copy()
            heads = config.q_width + config.kv_width
            reorder(rows[:heads], np.argsort(config.head_order).tolist())
        if spans:
            first = naming.first_of(name)
            whole = joined.setdefault(first, np.empty((0, *rows.shape[1:]), rows.dtype))
            joined[first] = _with_spans(whole, rows, spans)
            if name == first:
                continue
            name, rows = first, joined.pop(first)  # noqa: PLW2901
        yield name, of_value_heads(config, kind, rows, naming.tiled)
    missing = list(expected)
    if missing:
        raise InputError(f"weights: {len(missing)} tensors missing: {first_names(missing)}")


def _with_spans(
    whole: np.ndarray, rows: np.ndarray, spans: Iterable[tuple[int, int]]
) -> np.ndarray:
    """Return `whole`, grown to the end of the last range, with `rows` in these ranges of rows."""
    places = np.concatenate([np.arange(*span) for span in spans])
    found = np.empty((max(len(whole), places.max() + 1), *rows.shape[1:]), rows.dtype)
    found[: len(whole)] = whole
    found[places] = rows
    return found


def of_value_heads(config: ModelConfig, kind: str, rows: np.ndarray, tiled: bool) -> np.ndarray:
    """Return a tensor of a gated delta net with its heads of v in another order.

    kind: the tensor's name without its layer's prefix. tiled: the new order: whether heads whose
    numbers have the same remainder share a head of k, instead of neighbours.
    """
    of = config.delta_nets
    if of is None or tiled == of.tiled:
        return rows
    before = of.channels - of.values  # rows of q and k
    places = {"w_in": (before, of.v_size), "conv": (before, of.v_size), "w_out": (0, of.v_size)}
    places |= dict.fromkeys(("w_ba", "a_log", "dt_bias"), (0, 1))
    if kind not in places:
        return rows
    order = np.arange(of.n_v_head).reshape(of.n_k_head, -1).T.ravel()
    (first, size), turned = places[kind], rows.T if kind == "w_out" else rows
    heads = turned[first:].reshape(-1, of.n_v_head, size, *turned.shape[1:])
    ordered = heads[:, order if tiled else np.argsort(order)].reshape(-1, *turned.shape[1:])
    found = np.concatenate([turned[:first], ordered])
    return np.ascontiguousarray(found.T) if kind == "w_out" else found


def _converted(
    name: str, array: np.ndarray, shape: tuple[int, ...], dtype: str | None
) -> np.ndarray:
    """Return a tensor as a C-contiguous array of `dtype`. Raises InputError."""
    if not is_plain(array) or array.dtype.name not in DTYPES:
        got = array.dtype if is_plain(array) else type(array).__name__
        raise InputError(f"{name}: expected a NumPy array of {' or '.join(DTYPES)}, got {got}")
    if array.shape != shape:
        raise InputError(f"{name}: expected shape {shape}, got {array.shape}")
    if dtype is None:
        dtype = "float32" if array.dtype == np.float64 else array.dtype.name
    narrow, beyond = converted(array, dtype)
    if beyond:
        hint = "" if dtype == "float32" else ": use float32"
        raise InputError(f"{name}: {beyond:,} weights are out of the range of {dtype}{hint}")
    return narrow


def _header(
    naming: Naming, parts: Mapping[str, Mapping[str, Shape]], dtypes: Mapping[str, str]
) -> bytes:
    """Return the JSON header of a .safetensors file whose tensors have the order of `parts`.

    parts: gpt2block's name → {name in the file: shape}. dtypes: gpt2block's name → dtype.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # required by `transformers`
    end = 0
    for ours, names in parts.items():
        dtype = _SAFETENSORS_NAMES[dtypes[ours]]
        for name, shape in names.items():
            begin, end = end, end + math.prod(shape) * itemsize(dtypes[ours])
            stored = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
            header[naming.with_prefix(name)] = stored
    return json.dumps(header, separators=(",", ":")).encode()

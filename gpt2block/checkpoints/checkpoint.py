"""`Checkpoint`: an opened checkpoint, of which every tensor's place, shape and dtype is known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt2block.checkpoints import hub, hugging_face, llm_c, tokenizer_files
from gpt2block.checkpoints.locating import ON_BOARD, hub_id, locate
from gpt2block.checkpoints.stored import Stored
from gpt2block.config import GPT2Config, block_shapes
from gpt2block.errors import CheckpointError, InputError, shown

__all__ = ["ON_BOARD", "Checkpoint"]

Array = NDArray[np.float32]


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: all tensors are there in the right shapes, and read when asked for."""

    name: str  # as the user gave it
    file: Path  # with the weights, or the index of several: safetensors, PyTorch's or llm.c's
    config: GPT2Config
    stored: Mapping[str, Stored]  # by our names, in the order of `config.model_shapes`
    repo: str | None = None  # the repository on the hub that it comes from

    @classmethod
    def open(cls, name_or_path: str | Path | Checkpoint, revision: str | None = None) -> Checkpoint:
        """Find the files, read their headers and the config, check both; no tensor data yet.

        A Hugging Face directory, a `.safetensors` file or the index of several, a hub id such as
        "gpt2" (or "124M"), a `.bin` of llm.c, or "shakespeare", the bundled model. In a directory
        or by its path, also a file of `torch.save`: a state dict such as `pytorch_model.bin`, in
        one file or several, or a checkpoint of nanoGPT. None of its code is run. revision: of a hub
        id, a branch, tag or commit; None is its main branch.

        Raises CheckpointError naming what was expected, what came and what to do; tensors that are
        missing, unexpected or misshapen are listed by name. Raises InputError for a revision of
        anything but a hub id.
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
        layout = llm_c if llm_c.is_model(file) else hugging_face
        config, stored = layout.read_model(file)
        return cls(name, file, config, stored, repo)

    def __repr__(self) -> str:
        c = self.config
        return (
            f"Checkpoint({self.name!r}, n_layer={c.n_layer}, n_head={c.n_head}, "
            f"n_embd={c.n_embd}, n_ctx={c.n_ctx}, vocab_size={c.vocab_size}, "
            f"{self.nbytes:,} bytes)"
        )

    @property
    def directory(self) -> Path:
        """The folder of the weights, with config.json and the tokenizer's files."""
        return self.file.parent

    def tokenizer_directory(self) -> Path:
        """The folder for `tokenizer.load`; a hub model's tokenizer files are fetched into it.

        A folder without such files is that of a model which is known to have none, or which is one
        of OpenAI's. Raises CheckpointError as `tokenizer_files` does.
        """
        self.tokenizer_files()
        return self.directory

    def tokenizer_files(self) -> dict[str, Path]:
        """The tokenizer's files, by name; a hub model's are fetched first.

        Raises CheckpointError when the cache does not know whether the repository has a tokenizer,
        and the hub cannot be asked.
        """
        problem = hub.fetch_tokenizer(self.repo, self.directory) if self.repo else None
        found = tokenizer_files.present(self.directory)
        known = problem is None or tokenizer_files.readable(found)
        if not known and not hub.has_gpt2_tokenizer(self.repo):
            raise CheckpointError(
                f"{self.name}: the tokenizer is not in the Hugging Face cache, and {problem}: "
                "give a tokenizer with --tokenizer, or token ids"
            )
        return found

    @property
    def names(self) -> frozenset[str]:
        """What the file calls the tensors of the model, without the prefix `transformer.`."""
        return frozenset(tensor.label for tensor in self.stored.values())

    @property
    def nbytes(self) -> int:
        """Of all tensors of the model as they are stored."""
        return sum(tensor.nbytes for tensor in self.stored.values())

    def tensors(self) -> Iterator[tuple[str, NDArray[Any], str | None]]:
        """Every tensor of the model in turn: our name, array, layout. See `config.model_shapes`.

        The array is new, the caller's, in the dtype it is stored in (float64 as float32). layout:
        "KN" when it is a matrix (inputs, outputs), as Hugging Face has those of the blocks, "NK"
        for (outputs, inputs), as llm.c has all and wte and lm_head are everywhere; else None. A
        tied lm_head does not come again.

        Each is read when it is asked for and none is kept, so a caller that drops an array before
        it asks for the next holds one at a time. Raises CheckpointError when the file has changed.
        """
        for name, tensor in self.stored.items():
            yield name, tensor.read(), tensor.layout

    def check_layer(self, layer: int) -> None:
        """Raise CheckpointError unless 0 ≤ layer < n_layer."""
        n_layer = self.config.n_layer
        if not isinstance(layer, Integral) or isinstance(layer, bool):
            raise CheckpointError(f"layer: expected an integer, got {shown(layer)}")
        if not 0 <= layer < n_layer:
            raise CheckpointError(
                f"{self.name}: layer {shown(layer)} is out of range: it has {n_layer} layers, "
                f"0…{n_layer - 1}"
            )

    def read_block(self, layer: int) -> dict[str, Array]:
        """The twelve tensors of block `layer`, 0 ≤ layer < n_layer, by our names.

        float32; matrices are (inputs, outputs).
        """
        self.check_layer(layer)
        return {name: self._read(f"h.{layer}.{name}") for name in block_shapes(self.config.n_embd)}

    def read_ends(self) -> tuple[Array, Array, Array, Array, Array]:
        """wte, wpe, the final LayerNorm's γ and β, and lm_head, as float32.

        A tied lm_head is the very array wte.
        """
        wte, wpe, gamma_f, beta_f = map(self._read, ("wte", "wpe", "gamma_f", "beta_f"))
        tied = self.config.tie_word_embeddings
        return wte, wpe, gamma_f, beta_f, wte if tied else self._read("lm_head")

    def _read(self, name: str) -> Array:
        tensor = self.stored[name]
        array = tensor.read()
        if tensor.layout == "NK" and name.startswith("h."):
            array = np.ascontiguousarray(array.T)
        return array.astype(np.float32, copy=False)


def _check_no_revision(name: str, revision: str | None) -> None:
    if revision is not None:
        raise InputError(
            f"revision: expected a hub id such as 'gpt2' with it, {name} is none: leave it out"
        )


def _absolute(path: Path) -> str:
    """A Path is never a hub id or the bundled model: it names the very file."""
    try:
        return str(path.expanduser().absolute())
    except (OSError, RuntimeError, ValueError) as error:  # no working directory, no such user
        raise CheckpointError(f"{path}: cannot be read: {error}") from error

"""`Checkpoint`: an opened checkpoint, of which every tensor's place, shape and dtype is known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt2block.checkpoints import hugging_face, llm_c
from gpt2block.checkpoints.locating import ON_BOARD, locate
from gpt2block.checkpoints.stored import Stored
from gpt2block.config import GPT2Config, block_shapes
from gpt2block.errors import CheckpointError

__all__ = ["ON_BOARD", "Checkpoint"]

Array = NDArray[np.float32]


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: all tensors are there in the right shapes, and read when asked for."""

    name: str  # as the user gave it
    file: Path  # the .safetensors file, the index of several, or the .bin of llm.c
    config: GPT2Config
    stored: Mapping[str, Stored]  # by our names, in the order of `config.model_shapes`

    @classmethod
    def open(cls, name_or_path: str | Path | Checkpoint) -> Checkpoint:
        """Find the files, read their headers and the config, check both; no tensor data yet.

        A Hugging Face directory, a `.safetensors` file or the index of several, a hub id such as
        "gpt2" (or "124M"), a `.bin` of llm.c, or "shakespeare", the model in the package.

        Raises CheckpointError naming what was expected, what came and what to do; tensors that are
        missing, unexpected or misshapen are listed by name.
        """
        if isinstance(name_or_path, Checkpoint):
            return name_or_path
        if isinstance(name_or_path, Path):  # never the name of a model: a path of this very file
            name_or_path = str(name_or_path.expanduser().absolute())
        file = locate(name_or_path)
        layout = llm_c if llm_c.is_model(file) else hugging_face
        config, stored = layout.read_model(file)
        return cls(str(name_or_path), file, config, stored)

    @property
    def directory(self) -> Path:
        """Where config.json and tokenizer.json stand, beside the weights."""
        return self.file.parent

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
        if not isinstance(layer, int):
            raise CheckpointError(f"layer: expected an integer, got {layer!r}")
        if not 0 <= layer < n_layer:
            raise CheckpointError(
                f"{self.name}: layer {layer} is out of range: it has {n_layer} layers, "
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

"""Adapters (LoRA) of a model, and which adapter each sequence of a kv_cache has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpt2block.checks import check_number, nearest
from gpt2block.errors import Argument, InputError, shown
from gpt2block.files.checkpoints.adapters import Adapter, Factors, adaptable_shapes
from gpt2block.files.checkpoints.checkpoint import Checkpoint
from gpt2block.models.config import GPT2Config, ModelConfig
from gpt2block.ops.low_rank import COLUMNS

A, B, SPANS = ".lora_a", ".lora_b", ".lora_spans"  # end the names of tensors, after a matrix's name
UP = "_up"  # after the name of w_gate: the name of the joined factors of w_gate and w_up
MEMORY = 4.0  # default limit of the adapters' memory in GB


class ChosenAdapter(NamedTuple):
    """The adapter of a sequence: its number among the model's adapters, or -1; and its digest."""

    number: int = -1
    digest: str | None = None


NONE = ChosenAdapter()


class Adapters:
    """The adapters of a model; an adapter's number is its place in `names`.

    tensors: inputs of `reference.add_low_rank` for each matrix W with a factor: `W.lora_a` (R, K)
    and `W.lora_b` (R, N), float32, have the factors of all adapters, one after another, and
    `W.lora_spans` (adapters, tiles of COLUMNS columns, 2) has the range of rows of each adapter for
    each tile. Columns of other modules than a factor's are 0 in `W.lora_b`. The factors of w_gate
    and w_up, which read the same x, are joined. `no_rotation`: RoPE's frequencies for a model
    without RoPE, 0, with which a kernel only stores keys and values.
    """

    def __init__(self, adapters: Mapping[str, Adapter], config: ModelConfig) -> None:
        self.names = tuple(adapters)
        self.digests = tuple(each.digest for each in adapters.values())
        self.tensors: dict[str, np.ndarray] = {}
        if adapters and not config.frequencies_of_layers:
            self.tensors["no_rotation"] = np.zeros(config.head_size // 2)
        shapes = adaptable_shapes(config)
        joined = [_joined(each.factors, shapes) for each in adapters.values()]
        for matrix in dict.fromkeys(name for each in joined for name in each):
            K, N = _shape(matrix, shapes)
            terms = [each.get(matrix, ()) for each in joined]
            R = sum(len(a) for of_adapter in terms for a, _, _ in of_adapter)
            a_rows, b_rows = np.empty((R, K), np.float32), np.zeros((R, N), np.float32)
            spans, first = np.zeros((len(terms), -(-N // COLUMNS), 2), np.int32), 0
            for own, of_adapter in zip(spans, terms, strict=True):
                for a, b, column in of_adapter:
                    end, width = first + len(a), b.shape[1]
                    a_rows[first:end], b_rows[first:end, column : column + width] = a, b
                    tiles = own[column // COLUMNS : -(-(column + width) // COLUMNS)]
                    tiles[tiles[:, 1] == 0, 0] = first
                    tiles[:, 1] = end
                    first = end
            self.tensors |= {matrix + A: a_rows, matrix + B: b_rows, matrix + SPANS: spans}

    @classmethod
    def none(cls) -> Adapters:
        """Return the Adapters of a model that has none."""
        return cls({}, GPT2Config())

    @classmethod
    def read(
        cls,
        folders: Mapping[str, str | Path],
        config: ModelConfig,
        base: Checkpoint | None,
        memory: float = MEMORY,
    ) -> Adapters:
        """Read the folders of adapters by name. memory: limit of all tensors in GB (1e9 bytes).

        Raises CheckpointError as `Adapter.read`, and InputError if there are more adapters than the
        memory holds.
        """
        memory = check_number("adapters_memory", memory, 1e-9, 1e9, "a positive number of GB")
        read, nbytes = dict[str, Adapter](), 0
        shapes = adaptable_shapes(config)
        for name, folder in folders.items():
            if not isinstance(name, str) or not name:
                raise InputError(f"adapters: expected names of adapters, got {shown(name)}")
            read[name] = Adapter.read(folder, config, base)
            for matrix, terms in _joined(read[name].factors, shapes).items():
                nbytes += 4 * sum(len(a) for a, _, _ in terms) * sum(_shape(matrix, shapes))
            if nbytes > 1e9 * memory:
                raise InputError(
                    f"adapters: the first {len(read)} of {len(folders)} take {nbytes / 1e9:.2f} "
                    f"GB: expected at most {memory:g} GB: use fewer, or raise ",
                    Argument("adapters_memory"),
                )
        return cls(read, config)

    def without_tensors(self) -> Adapters:
        """Return a copy that can choose adapters, but not compute with them."""
        found = copy(self)
        found.tensors = {}
        return found

    def named(self, name: str | None) -> ChosenAdapter:
        """Return the adapter with this name, or NONE for None. Raises InputError."""
        if name is None:
            return NONE
        if name not in self.names:
            known = f"one of {', '.join(self.names)}" if self.names else "None without adapters"
            hint = nearest(name, self.names)
            raise InputError(f"adapter: expected {known}, got {shown(name)}{hint}")
        return self._at(self.names.index(name))

    def with_digest(self, digest: object) -> ChosenAdapter:
        """Return the adapter with the digest that a receipt states, or NONE. Raises InputError."""
        if digest is None:
            return NONE
        if digest not in self.digests:
            known = " or ".join(each[:23] for each in self.digests) or "a model with adapters"
            raise InputError(
                f"adapter: the receipt states {shown(digest)[:24]}, expected {known}: load the "
                "adapter of the text, too"
            )
        return self._at(self.digests.index(str(digest)))

    def _at(self, number: int) -> ChosenAdapter:
        return ChosenAdapter(number, self.digests[number])


def _joined(
    factors: Mapping[str, tuple[Factors, ...]], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[Factors, ...]]:
    """Return factors in which the columns of w_up follow the columns of w_gate, as w_gate_up."""
    found = dict[str, tuple[Factors, ...]]()
    for name, own in factors.items():
        gate = name.replace("w_up", "w_gate")
        first = shapes[gate][1] if name != gate else 0
        matrix = gate + UP if gate.endswith("w_gate") else name
        moved = tuple(each._replace(column=first + each.column) for each in own)
        found[matrix] = found.get(matrix, ()) + moved
    return found


def _shape(matrix: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
    """Return K and N of a matrix with factors, whose name `_joined` has returned."""
    K, N = shapes[matrix.removesuffix(UP)]
    return K, 2 * N if matrix.endswith(UP) else N


class SlotAdapters:
    """The adapter of each sequence of a kv_cache.

    tensors: names in a pass → the tensors of `Adapters`, and "adapter" (batch,) with the number of
    each sequence's adapter; empty for a model without adapters.
    """

    def __init__(self, tensors: Mapping[str, Any], batch: int, library: Any) -> None:
        """library: module of the cache's arrays, NumPy or CuPy."""
        self.tensors = dict(tensors)
        self._asarray, self._copy = library.asarray, library.copyto
        self._of_slot = np.full(batch, -1, np.int32)
        if tensors:
            self.tensors["adapter"] = library.asarray(self._of_slot.copy())

    def begin(self, slot: int, adapter: int) -> None:
        """Set the adapter's number of a new sequence in a slot, if the model has adapters."""
        if self.tensors and adapter != self._of_slot[slot]:
            number = self._asarray(np.array([adapter], np.int32))
            self._copy(self.tensors["adapter"][slot : slot + 1], number)
            self._of_slot[slot] = adapter

    def used(self, slots: Sequence[int] | NDArray[np.int32]) -> bool:
        """Whether the sequence of any of these slots has an adapter."""
        return bool((self._of_slot[slots] >= 0).any())

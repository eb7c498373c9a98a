"""Read tensors of GGUF files: dequantize them with the package `gguf`, or keep them quantized.

`InBlocks` also keeps matrices of 4 bits in Hugging Face checkpoints quantized (`four_bit`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from gpt2block.errors import CheckpointError, require
from gpt2block.files.checkpoints.files import about
from gpt2block.files.checkpoints.four_bit import FourBit
from gpt2block.files.checkpoints.stored import DTYPES, Stored, cut
from gpt2block.models.weights.gguf import BORDER, TYPES, GgufMatrix, range_bytes
from gpt2block.models.weights.gguf_packing import BlockRows, packed_on_device

if TYPE_CHECKING:
    from typing_extensions import Self

_DECODED_AT_ONCE = 2**20  # maximum number of values that are dequantized at once
FLOAT, NARROW = 4, 2  # bytes per unquantized value: 4 in vectors, 2 in matrices
_NATIVE: Mapping[str, str] = {"F32": "float32", "F16": "float16", "F64": "float64",
                              "BF16": "bfloat16"}  # fmt: skip


def library() -> Any:
    """Return the package `gguf`. Raises CheckpointError if it is not installed."""
    require("a GGUF file", "gguf", "gguf", kind=CheckpointError)
    import gguf  # noqa: PLC0415  (slow to import)

    return gguf


def dtype_of(kind: int) -> str:
    """Return the dtype to which a GGUF type is decoded; float32 for a quantized type."""
    return _NATIVE.get(library().GGMLQuantizationType(kind).name, "float32")


@dataclass(frozen=True)
class Encoded(Stored):
    """A tensor of a GGUF file.

    kind: number of the tensor's GGUF type. length: its size in bytes. heads: number of heads in a
    tensor for Q or K, whose rows are reordered; 0 for other tensors. added: constant that the
    file's values contain in addition to the model's. negated: whether the file's values are -exp of
    the model's.
    """

    kind: int = 0
    length: int = 0
    heads: int = 0
    added: float = 0.0
    negated: bool = False

    @property
    def types(self) -> tuple[str, ...]:
        return (library().GGMLQuantizationType(self.kind).name,)

    input_order: ClassVar[Any] = None  # inputs have the model's order

    @property
    def block_type(self) -> str:
        return self.types[0]

    @property
    def nbytes(self) -> int:
        return self.length

    def rows(self, begin: int, end: int) -> Self:
        of_row, of_head = self.length // self.shape[0], self.shape[0] // (self.heads or 1)
        length, heads = (end - begin) * of_row, (end - begin) // of_head if self.heads else 0
        return replace(super().rows(begin, end), length=length, heads=heads)

    def check_type(self) -> None:
        """Raise CheckpointError if the package `gguf` cannot dequantize the tensor's type."""
        if not _is_supported(self.kind):
            raise CheckpointError(
                f"{self.file}: {self.label}: type {self.types[0]} is not supported by the package "
                "gguf's dequantize: use a file with other types"
            )

    def read_into(self, array: np.ndarray) -> None:
        """Read the tensor into a C-contiguous array of the tensor's shape and any float dtype.

        Decodes several whole heads, or rows without heads, at a time. Raises CheckpointError.
        """
        flat = array.reshape(self.shape[0], -1)
        unit = self.shape[0] // self.heads if self.heads else 1
        rows = unit * max(1, _DECODED_AT_ONCE // (unit * flat.shape[1]))
        row_bytes = self.length // self.shape[0]
        for first in range(0, self.shape[0], rows):
            piece = flat[first : first + rows]
            data = np.empty(len(piece) * row_bytes, np.uint8)
            self.read_bytes(first * row_bytes, data)
            values = self._in_model_order(_decoded(data, self.kind).reshape(piece.shape))
            values = values - self.added if self.added else values
            piece[...] = np.log(-values) if self.negated else values

    def read_blocks(self) -> NDArray[np.uint8]:
        """Return the rows' encoded bytes, (N, bytes per row), heads in the model's row order.

        Raises CheckpointError.
        """
        data = np.empty((self.shape[0], self.length // self.shape[0]), np.uint8)
        self.read_bytes(0, data.reshape(-1))
        return self._in_model_order(data)

    def block_rows(self) -> BlockRows:
        """Return the rows as blocks, which are read in the file's row order."""
        return BlockRows(self.block_type, self.shape[0], self.heads, self.read_bytes)

    def read_bytes(self, begin: int, array: NDArray[np.uint8]) -> None:
        """Fill `array` with the stored bytes from byte `begin` on. Raises CheckpointError."""
        with about(self.file), self.file.open("rb") as stream:
            stream.seek((self.offset or 0) + begin)
            if stream.readinto(array.data) != len(array):
                raise CheckpointError(
                    f"{self.file}: {self.label}: the file has become shorter since it was opened"
                )

    def _in_model_order(self, rows: np.ndarray) -> np.ndarray:
        """Reorder the rows of Q's or K's heads from GGUF's RoPE order to the model's."""
        if not self.heads:
            return rows
        pairs = rows.reshape(-1, self.shape[0] // self.heads // 2, 2, rows.shape[1])
        ordered: np.ndarray = pairs.swapaxes(1, 2).reshape(rows.shape)
        return ordered


def block_parts(tensor: Stored) -> list[tuple[str, Encoded | FourBit]]:
    """Return (block type, tensor) for tensors joined in a matrix; [] if kernels cannot read one."""
    pieces = [piece for piece in tensor.pieces if isinstance(piece, (Encoded, FourBit))]
    if len(pieces) != len(tensor.pieces) or tensor.layout != "NK" or tensor.head_order:
        return []
    types = [piece.block_type for piece in pieces]
    ends = accumulate(piece.shape[0] for piece in pieces)
    borders = [end for end, *two in zip(ends, types, types[1:], strict=False) if two[0] != two[1]]
    if not all(name in TYPES for name in types) or any(end % BORDER for end in borders):
        return []
    orders = [piece.input_order for piece in pieces]
    if not all(np.array_equal(each, orders[0]) for each in orders):
        return []
    return list(zip(types, pieces, strict=True))


@dataclass(frozen=True)
class InBlocks:
    """A matrix in a file, whose quantized blocks `on_host` and `on_device` read."""

    parts: list[tuple[str, Encoded | FourBit]]
    K: int

    @property
    def shape(self) -> tuple[int, int]:
        """Shape (N, K) of the decoded weights, layout "NK"."""
        return sum(part.shape[0] for _, part in self.parts), self.K

    def of_spans(self, spans: Sequence[tuple[int, int]]) -> InBlocks:
        """Return the rows in `spans`, which begin and end between heads and between BORDERs."""
        pieces = cut([part for _, part in self.parts], spans)
        return InBlocks([(piece.block_type, piece) for piece in pieces], self.K)

    def on_host(self) -> GgufMatrix:
        blocks = [(name, part.read_blocks()) for name, part in self.parts]
        return replace(GgufMatrix.pack(blocks, self.K), input_order=self.parts[0][1].input_order)

    def on_device(self) -> GgufMatrix:
        packed = packed_on_device([part.block_rows() for _, part in self.parts], self.K)
        return replace(packed, input_order=self.parts[0][1].input_order)


def in_blocks(tensor: Stored) -> InBlocks | None:
    """Return the tensor as a matrix in quantized blocks; None if kernels cannot read its blocks."""
    parts = block_parts(tensor)
    return InBlocks(parts, tensor.shape[1]) if parts else None


def bytes_in_blocks(stored: Iterable[Stored]) -> int:
    """Return a model's bytes if matrices stay in quantized blocks; 0 if no matrix can."""
    total, found = 0, False
    for tensor in stored:
        parts = block_parts(tensor)
        rows = [(name, piece.shape[0]) for name, piece in parts]
        width = FLOAT if tensor.layout is None else NARROW
        total += sum(range_bytes(rows, tensor.shape[-1])) or width * math.prod(tensor.shape)
        found = found or bool(parts)
    return total * found


def _decoded(data: NDArray[np.uint8], kind: int) -> np.ndarray:
    """Decode the bytes of a tensor of GGUF type `kind` to a flat array of values."""
    types = library().GGMLQuantizationType
    if types(kind).name in _NATIVE:
        return data.view(DTYPES[dtype_of(kind)])
    with np.errstate(over="ignore", invalid="ignore"):  # infinity and NaN raise an error later
        # 1 row: dequantize loops over groups of 16 rows
        values: np.ndarray = library().dequantize(data[None], types(kind))
    return values


@lru_cache
def _is_supported(kind: int) -> bool:
    try:
        _decoded(np.zeros(library().GGML_QUANT_SIZES[kind][1], np.uint8), kind)
    except NotImplementedError:
        return False
    return True

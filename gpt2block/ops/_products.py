"""What products share: how weights are stored, what tensor cores require, tiles and memory."""

from __future__ import annotations

from math import ceil
from typing import Any, NamedTuple, TypeVar

from gpt2block.cuda.kernels import TWO_PART, WEIGHTS, Defines
from gpt2block.weights.matrix import WeightMatrix

MMA_CAPABILITY = 80  # of the oldest GPU that has mma.sync for 16-bit floats with 16 values of K
HOPPER_CAPABILITY = 90  # exactly: no other GPU has wgmma
MULTIPLE = 8  # of N and K of a product: rows are copied in 16 bytes
RESERVED = 1024  # bytes of shared memory that CUDA reserves for each block

Tile = TypeVar("Tile")


class Parts(NamedTuple):
    """A TwoPartMatrix (N, K) for a kernel that reads weights, by the names of a WeightMatrix."""

    data: Any  # both parts
    scale: Any
    dtype: str = TWO_PART


def storage_of(w: WeightMatrix | Parts, with_fp8: str = "float32") -> tuple[str, str | None]:
    """`storage` and `weights` of a launch with such weights: the types `T` and `W` of its source.

    with_fp8: `T` where the weights are FP8 or two-part; else it is the dtype of the weights.
    """
    return (with_fp8, w.dtype) if w.dtype in WEIGHTS else (w.dtype, None)


def gate_define(gelu: bool) -> Defines:
    """What kernels with a gate (lib/gate.cuh) are compiled with."""
    return (("GATE_GELU", 1),) if gelu else ()


def count_tiles(tile: Any, M: int, N: int) -> int:
    """How many tiles, of `rows` and `columns`, cover an output (M, N)."""
    rows: int = tile.rows
    columns: int = tile.columns
    return ceil(M / rows) * ceil(N / columns)


def fastest(tiles: tuple[Tile, ...], M: int, N: int, sms: int) -> Tile:
    """The tile with the shortest estimated time on `sms` multiprocessors; of equals the first.

    tiles: with `rows`, `columns` and `speed`, that of a multiprocessor busy with such tiles.
    """

    def duration(tile: Any) -> Any:
        return ceil(count_tiles(tile, M, N) / sms) * tile.rows * tile.columns / tile.speed

    return min(tiles, key=duration)


def room(most_shared: int, blocks: int) -> int:
    """Bytes of shared memory for each of `blocks` on a multiprocessor.

    most_shared: the bytes that a block may request.
    """
    return (most_shared + RESERVED) // blocks - RESERVED


def filled(most_shared: int, blocks: int, shared: int) -> int:
    """`shared`, or so many bytes that a multiprocessor has no room for more blocks.

    most_shared: the bytes that a block may request.
    """
    return max(shared, room(most_shared, blocks + 1) + 1)

"""Common code of matrix products: types of stored weights, required GPUs, tiles, shared memory."""

from __future__ import annotations

from math import ceil
from typing import Any, TypeVar

from gpt2block.cuda.cards import gpu
from gpt2block.cuda.kernels import WEIGHTS, Defines
from gpt2block.models.weights.matrix import WeightMatrix
from gpt2block.ops.call import Parts
from gpt2block.ops.operation import UnsupportedCall

MULTIPLE = 8  # N and K must be multiples of 8: rows are copied 16 bytes at a time
# Sizes of products for checks, no multiples of blocks and vectors
SMALL = ({"M": 1, "K": 16, "N": 8}, {"M": 5, "K": 40, "N": 24}, {"M": 17, "K": 96, "N": 136})
RESERVED = 1024  # bytes of shared memory that CUDA reserves for each block

Tile = TypeVar("Tile")


def needs_mma(instead: str = "", floats: bool = False) -> None:
    """Raise UnsupportedCall on a GPU without mma.sync. instead: advice. floats: of float32."""
    if not (gpu().has_bf16 if floats else gpu().has_mma):
        least = "8.0" if floats else "7.5"
        raise UnsupportedCall(f"needs a GPU of compute capability {least} or newer{instead}")


def needs_wgmma(instead: str) -> None:
    """Raise UnsupportedCall on a GPU without wgmma. instead: advice."""
    if not gpu().has_wgmma:
        raise UnsupportedCall(f"needs a GPU of compute capability 9.0 (Hopper){instead}")


def storage_of(w: WeightMatrix | Parts, with_fp8: str = "float32") -> tuple[str, str | None]:
    """Return (`storage`, `weights`) of a launch, the dtypes of a kernel's types `T` and `W`.

    with_fp8: dtype of `T` if the weights are FP8 or hi/lo; else `T` has the weights' dtype.
    """
    return (with_fp8, w.dtype) if w.dtype in WEIGHTS else (w.dtype, None)


def gate_define(gelu: bool) -> Defines:
    """Return the compile-time constant that selects GELU in lib/gate.cuh; () for SiLU."""
    return (("GATE_GELU", 1),) if gelu else ()


def count_tiles(tile: Any, M: int, N: int) -> int:
    """Number of tiles of tile.rows by tile.columns that cover an output (M, N)."""
    rows: int = tile.rows
    columns: int = tile.columns
    return ceil(M / rows) * ceil(N / columns)


def fastest(tiles: tuple[Tile, ...], M: int, N: int, sms: int) -> Tile:
    """Return the first of the tiles with the shortest estimated time on `sms` multiprocessors.

    tiles: tiles with `rows`, `columns` and `speed`, the speed of a multiprocessor on such tiles.
    """

    def duration(tile: Any) -> Any:
        return ceil(count_tiles(tile, M, N) / sms) * tile.rows * tile.columns / tile.speed

    return min(tiles, key=duration)


def room(max_shared: int, blocks: int) -> int:
    """Bytes of shared memory available to each of `blocks` blocks on a multiprocessor.

    max_shared: bytes of shared memory that a block may request.
    """
    return (max_shared + RESERVED) // blocks - RESERVED


def shared_for_blocks(max_shared: int, blocks: int, shared: int) -> int:
    """Return the bytes, at least `shared`, with which at most `blocks` blocks fit on an SM.

    max_shared: bytes of shared memory that a block may request.
    """
    return max(shared, room(max_shared, blocks + 1) + 1)

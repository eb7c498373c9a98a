"""What operations check of a weight matrix, and how many tiles a product has."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil
from typing import Any, Protocol, TypeVar

from gpt2block.cuda.arrays import check
from gpt2block.cuda.kernels import FP8
from gpt2block.errors import InputError
from gpt2block.weights.matrix import WeightMatrix


def check_weights(name: str, w: Any, inputs: tuple[str, Any], layout: str | None = "NK") -> None:
    """InputError unless it is a WeightMatrix on the current device that fits the input.

    inputs: name and array (..., K) of what w is multiplied with. layout: None for either.
    """
    if not isinstance(w, WeightMatrix):
        raise InputError(
            f"{name}: expected a WeightMatrix, got {type(w).__name__}: use WeightMatrix.quantize"
        )
    if layout not in (None, w.layout):
        raise InputError(
            f"{name}: expected layout 'NK', (N, K) in memory, got {w.layout!r}: "
            f"use WeightMatrix.quantize(w, {w.dtype!r}, 'NK')"
        )
    check(name, w.data, dtype="uint8" if w.dtype in FP8 else w.dtype)
    if w.scale is not None:
        check(f"{name}.scale", w.scale)
    other, array = inputs
    if array.shape[-1] != w.K:
        raise InputError(
            f"{name}: expected K {array.shape[-1]} to match {other}, got {w.K} ({w.layout})"
        )


def storage_of(w: WeightMatrix, with_fp8: str = "float32") -> tuple[str, str | None]:
    """`storage` and `weights` of a launch with such weights: the types `T` and `W` of its source.

    with_fp8: `T` where the weights are FP8; else it is the dtype of the weights.
    """
    return (with_fp8, w.dtype) if w.dtype in FP8 else (w.dtype, None)


class _Tile(Protocol):
    @property
    def rows(self) -> int: ...
    @property
    def columns(self) -> int: ...


class _TimedTile(_Tile, Protocol):
    @property
    def speed(self) -> float: ...


_Timed = TypeVar("_Timed", bound=_TimedTile)


def count_tiles(tile: _Tile, M: int, N: int) -> int:
    """How many tiles cover an output (M, N)."""
    return ceil(M / tile.rows) * ceil(N / tile.columns)


def fastest(tiles: Iterable[_Timed], M: int, N: int, sms: int) -> _Timed:
    """The tile that gets the outputs done first on `sms` multiprocessors; of equals the first.

    The speed of a tile is that of a multiprocessor busy with such tiles, relative to the others.
    """

    def duration(tile: _Timed) -> float:
        return ceil(count_tiles(tile, M, N) / sms) * tile.rows * tile.columns / tile.speed

    return min(tiles, key=duration)

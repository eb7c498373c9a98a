"""The linear layer for many rows: which tile of matmul/tiles.cu computes it, and its launch."""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import Any, NamedTuple

from gpt2block.cuda.arrays import (
    Bound,
    CudaArray,
    alignment,
    check,
    device_attribute,
    launch_at,
    output,
)
from gpt2block.cuda.kernels import FP8, Geometry
from gpt2block.errors import InputError
from gpt2block.weights.matrix import WeightMatrix

FILE = "matmul/tiles.cu"
KERNEL = "linear_tiles"
WARP = 32
MOST_LOADED = 8  # narrow weights in a copy
LONGEST = 2**23  # K, with which the rows of a tile are less than 4 GB from each other


class Tile(NamedTuple):
    """The constants of linear_tiles that decide how fast it is, never what it computes."""

    rows: int
    columns: int
    side: int  # rows of a thread
    span: int  # columns of a thread
    depth: int  # of a slice along K
    stages: int  # slices in shared memory, or fewer where they do not fit
    blocks: int  # that an SM shall have registers for
    speed: float  # of an SM that is busy with such tiles, relative to the largest


# Larger ones first: of equals the first is taken. Smaller ones have fewer outputs a thread, so that
# even one tile on an SM has a warp for each of its four schedulers.
TILES = (
    Tile(128, 128, 8, 8, 16, 2, 2, 1.0),
    Tile(64, 96, 8, 6, 32, 2, 4, 0.97),
    Tile(32, 96, 4, 6, 32, 3, 4, 0.86),
    Tile(32, 32, 2, 4, 32, 3, 4, 0.62),
)


def tiles(tile: Tile, M: int, N: int) -> int:
    """How many make (M, N)."""
    return ceil(M / tile.rows) * ceil(N / tile.columns)


def choose_tile(M: int, N: int, sms: int) -> Tile:
    """The tile that gets the outputs done first on `sms` multiprocessors."""

    def duration(tile: Tile) -> float:
        return ceil(tiles(tile, M, N) / sms) * tile.rows * tile.columns / tile.speed

    return min(TILES, key=duration)


def shared_bytes(tile: Tile, size: int) -> int:
    """For weights of `size` bytes; narrow ones have a place for what arrives, too."""
    floats = 4 * (tile.rows + 4 + tile.columns + 4)
    return tile.stages * tile.depth * (floats + (tile.columns * size if size < 4 else 0))


@lru_cache(maxsize=1024)
def geometry(
    M: int,
    N: int,
    size: int,
    load: int,
    store: int,
    gelu: bool,
    sms: int,
    most_shared: int,
    tile: Tile | None = None,
) -> Geometry:
    """For x (M, K) and weights (N, K) of `size` bytes an element.

    load: narrow weights in a copy, a power of two up to 8 that divides K, and to whose bytes the
    weights are aligned. store: 4 where rows of out and residual lie on 16 bytes, else 1.
    most_shared: bytes of shared memory that a block can have.
    """
    tile = tile or choose_tile(M, N, sms)
    while shared_bytes(tile, size) > most_shared and tile.stages > 2:
        tile = tile._replace(stages=tile.stages - 1)
    threads = WARP * tile.rows // (8 * tile.side) * (tile.columns // (4 * tile.span))
    defines = (
        ("LT_ROWS", tile.rows),
        ("LT_COLUMNS", tile.columns),
        ("LT_SIDE", tile.side),
        ("LT_SPAN", tile.span),
        ("LT_DEPTH", tile.depth),
        ("LT_STAGES", tile.stages),
        ("LT_BLOCKS", tile.blocks),
        ("LT_LOAD", 1 if size == 4 else load),
        ("LT_STORE", store),
        ("LT_GELU", int(gelu)),
    )
    grid = (tiles(tile, M, N),)
    return Geometry(KERNEL, grid, (threads,), shared_bytes(tile, size), defines)


MAX_SIZE = 2**31 - 1024  # of M and N: what an int holds, and a tile more


def bind_tiles(
    inputs: tuple[Any, ...], out: CudaArray | None = None, *, gelu: bool = False
) -> Bound:
    """inputs (x (..., K), w, bias (N,) or None, residual (..., N) or None), out (..., N).

    w: a WeightMatrix (N, K) on the GPU, of any dtype. x, bias, residual and out are float32;
    residual may be out itself. The bits of a row depend on this row, w, bias and its residual
    alone, not on how many rows there are. Raises InputError.
    """
    x, w, bias, residual = inputs
    check("x", x)
    K = x.shape[-1]
    dtype = _check_weights(w, K)
    N = w.N
    if bias is not None:
        check("bias", bias, (N,))
    M = x.size // K
    if max(M, N) > MAX_SIZE or K > LONGEST:
        raise InputError(
            f"x {x.shape}, w ({N}, {K}): expected at most {MAX_SIZE:,} rows or outputs, and "
            f"{LONGEST:,} inputs"
        )
    shape = (*x.shape[:-1], N)
    if residual is not None:
        check("residual", residual, shape)
    given = {"x": x, "w": w, "bias": bias}
    out = output(out, shape, apart=given, in_place={"residual": residual})

    item = w.data.itemsize
    load = min(MOST_LOADED, alignment(K * item, w.data.data.ptr) // item)
    rows = [array.data.ptr for array in (out, residual) if array is not None]
    how = geometry(
        M,
        N,
        item,
        load,
        4 if alignment(4 * N, *rows) == 16 else 1,
        gelu,
        device_attribute("MultiProcessorCount"),
        device_attribute("MaxSharedMemoryPerBlockOptin"),
    )
    args = (x, w.data, w.scale, bias, residual, out, M, K, N)
    storage, weights = ("float32", dtype) if dtype in FP8 else (dtype, None)
    return Bound(out, (launch_at(FILE, how, args, storage, weights),))


def _check_weights(w: Any, K: int) -> str:
    """The dtype of a WeightMatrix that fits; InputError for anything else."""
    if not isinstance(w, WeightMatrix):
        raise InputError(f"w: expected a WeightMatrix, got {type(w).__name__}: use .quantize")
    if w.layout != "NK":
        raise InputError(f"w: expected layout 'NK', (N, K) in memory, got {w.layout!r}")
    check("w", w.data, dtype="uint8" if w.dtype in FP8 else w.dtype)
    if w.K != K:
        raise InputError(f"w: expected K {K} to match x, got {w.K}")
    if w.scale is not None:
        check("scale", w.scale, (w.N,))
    return w.dtype

"""Common code of matrix products: types of stored weights, required GPUs, tiles, shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any, NamedTuple, TypeVar

from gpt2block.cuda.arrays import max_shared, multiprocessors
from gpt2block.cuda.kernels import WEIGHTS, Defines
from gpt2block.models.weights.gguf import GgufMatrix
from gpt2block.models.weights.matrix import WeightMatrix
from gpt2block.ops.call import Call, Parts, Refusal
from gpt2block.ops.operands import Operand

MULTIPLE = 8  # N and K must be multiples of 8: rows are copied 16 bytes at a time
# Sizes of products for checks, no multiples of blocks and vectors
SMALL = ({"M": 1, "K": 16, "N": 8}, {"M": 5, "K": 40, "N": 24}, {"M": 17, "K": 96, "N": 136})
RESERVED = 1024  # bytes of shared memory that CUDA reserves for each block

Tile = TypeVar("Tile")


class Matmul(NamedTuple):
    """The facts by which kernels of decoding plan a product of x (M, K) and weights (N, K).

    dtype: dtype of the weights. norm: the norm of x that the kernel computes, 0 none, 1 LayerNorm,
    2 RMSNorm. up, residual: whether there is a second matrix, and a residual. rounded: whether x is
    rounded to one 16-bit term per value. head: channels per head, with RoPE, else 0. blocks: the
    matrices, if they have GGUF blocks. whole_N: `WeightMatrix.whole_N`, or 0 for N. workspace:
    floats of memory with which blocks of a kernel can divide K.
    """

    M: int
    N: int
    K: int
    dtype: str
    norm: int = 0
    up: bool = False
    residual: bool = False
    rounded: bool = False
    operand: Operand | None = None
    to_operand: Operand | None = None
    head: int = 0
    blocks: tuple[GgufMatrix, ...] = ()
    whole_N: int = 0  # noqa: N815  (as WeightMatrix.whole_N)
    workspace: int = 0

    @classmethod
    def of(cls, c: Call) -> Matmul:
        """Return the facts of a checked call."""
        given, blocks, workspace = vars(c).get, (c.w, vars(c).get("up")), vars(c).get("workspace")
        norm = 0 if given("gamma") is None else 1 + (given("beta") is None)
        return cls(
            c.M, c.N, c.K, c.w.dtype, norm, given("up") is not None, given("residual") is not None,
            c.rounded, given("operand"), given("to_operand"), given("head", 0),
            tuple(w for w in blocks if isinstance(w, GgufMatrix)), getattr(c.w, "whole_N", 0),
            0 if workspace is None or c.to_peers else workspace.size,
        )  # fmt: skip

    @property
    def summed(self) -> bool:
        """Whether the kernel also stores the sums of chunks of the result."""
        return self.to_operand is not None and self.to_operand.summed

    @property
    def outputs(self) -> int:
        """The outputs of both matrices."""
        return self.N * (1 + self.up)


def in_multiples(*sizes: int) -> bool:
    """Return whether `gemm` supports matrices of these sizes K and N."""
    return not any(size % MULTIPLE for size in sizes)


def same_types(blocks: Sequence[GgufMatrix]) -> Refusal | None:
    """Return a refusal if two matrices of a product have GGUF blocks of different types."""
    wanted, *others = [w.ranges for w in blocks] or [()]
    different = [ranges for ranges in others if ranges != wanted]
    return Refusal(f"up: expected types {wanted}, got {different[0]}") if different else None


def limits(static: int = 0) -> dict[str, int]:
    """Return the multiprocessors of the device, and the bytes of shared memory per block.

    static: bytes of static shared memory, which are not included.
    """
    return {"sms": multiprocessors(), "max_shared": max_shared() - static}


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

"""Kernels that dequantize rows of a `GgufMatrix` (gguf/rows.cu), or pack raw blocks into one.

Products of prompts and embeddings need dequantized rows. gguf/pack.cu creates a `GgufMatrix`.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

from gpt2block.checks import LARGEST_COUNT
from gpt2block.cuda.arrays import CudaArray
from gpt2block.cuda.formats import GGUF
from gpt2block.cuda.kernels import Defines, Geometry, Launch, float_define, launch_at
from gpt2block.models.weights import gguf_packing
from gpt2block.models.weights.gguf import ROW_GROUP, TYPES, UNIT, GgufMatrix
from gpt2block.ops.call import Call, refuse
from gpt2block.ops.engines.rows import WARP
from gpt2block.ops.operands import CHUNK
from gpt2block.ops.operation import Variant, variant

FILE = "gguf/rows.cu"
SUMS_FILE = "gguf/chunk_sums.cu"
SUMS_BLOCK = 128  # threads per block of gguf_chunk_sums, each of which sums a chunk
WARPS = 8  # warps per block of gguf_widen


def range_defines(w: GgufMatrix) -> Defines:
    """Compile-time constants of lib/decode/mma_gguf.cuh: each GGUF type in w, and its first row."""
    types = [(f"GGUF_TYPE_{i}", TYPES[name].number) for i, (name, _) in enumerate(w.ranges)]
    begins = [(f"GGUF_FROM_{i}", begin) for i, begin in enumerate(w.begins) if i]
    return (("GGUF_RANGES", len(w.ranges)), *types, *begins)


def _of_ranges(
    w: GgufMatrix, launch: Callable[[CudaArray, Defines, int, int], Launch]
) -> tuple[Launch, ...]:
    """Call `launch`(bytes, constants, first row, number of rows) for each GGUF type in w."""
    return tuple(
        launch(data, (("GGUF_TYPE", TYPES[name].number),), begin, rows)
        for name, begin, rows, data in w.of_ranges()
    )


@variant("gguf", FILE, "gguf_widen")
def widen(c: Call) -> tuple[Launch, ...]:
    """Dequantize w to float16 (N, K) into `out`."""

    def of_range(data: CudaArray, defines: Defines, begin: int, rows: int) -> Launch:
        grid = ceil(c.K / UNIT), ceil(rows / (ROW_GROUP * WARPS))
        geometry = Geometry("gguf_widen", grid, (WARP * WARPS,), defines=defines)
        return launch_at(FILE, geometry, (data, c.output("out"), c.K, begin, rows), "float16", GGUF)

    return _of_ranges(c.w, of_range)


@variant("gguf", FILE, "gguf_row_norms")
def row_norms(c: Call) -> tuple[Launch, ...]:
    """Write the sum of squares of each row in w · gamma to `squares`."""

    def of_range(data: CudaArray, defines: Defines, begin: int, rows: int) -> Launch:
        geometry = Geometry("gguf_row_norms", (ceil(rows / ROW_GROUP),), (WARP,), defines=defines)
        args = data, c.gamma, c.output("squares"), c.K, begin, rows
        return launch_at(FILE, geometry, args, "float16", GGUF)

    return _of_ranges(c.w, of_range)


@variant("gguf", FILE, "gguf_encoder_rows")
def encoder_rows(c: Call) -> Launch:
    """Write the rows `ids` of wte to `out`, as `encoder_rows` does. wte must have one GGUF type."""
    refuse(len(c.wte.ranges) != 1, f"wte: expected a single GGUF type, got {c.wte.ranges}")
    defines: Defines = (("GGUF_TYPE", TYPES[c.wte.ranges[0][0]].number),)
    defines += float_define("GGUF_FACTOR", c.factor, 1.0)
    grid = ceil(c.N / ROW_GROUP), ceil(c.C / UNIT)
    geometry = Geometry("gguf_encoder_rows", grid, (WARP,), defines=defines)
    n_ctx = LARGEST_COUNT if c.wpe is None else c.P
    args = (c.ids, c.positions, c.wte.data, c.wpe, c.output("out"), c.N, c.C, c.V, n_ctx)
    return launch_at(FILE, geometry, args, "float16", GGUF)


@variant("gguf pack", gguf_packing.FILE, "gguf_pack")
def pack(c: Call) -> Launch:
    """Reorder `raw`, rows of blocks of a GGUF file, into `out`, in the order that kernels read."""
    return gguf_packing.pack(c.parts, c.raw, c.output("out"), c.largest, c.K)


def _chunk_sums(x: CudaArray, sums: CudaArray, M: int, K: int) -> Launch:
    """Return a launch that writes the sum of each 32 values along K of x (M, K) to `sums`.

    x is an `Operand` of 16-bit terms. Products multiply minimums of GGUF blocks by these sums.
    """
    grid = (ceil(M * K / (CHUNK * SUMS_BLOCK)),)
    geometry = Geometry("gguf_chunk_sums", grid, (SUMS_BLOCK,))
    return launch_at(SUMS_FILE, geometry, (x, sums, M, K), "float16", GGUF)


chunk_sums = Variant("gguf sums", SUMS_FILE, ("gguf_chunk_sums",), _chunk_sums)


def sums_of(c: Call) -> tuple[CudaArray | None, tuple[Launch, ...]]:
    """Return the sums of chunks of x, an `Operand`, and a launch that computes them if necessary.

    The sums are None if no GGUF type of w has minimums.
    """
    if not any(TYPES[name].minimum for name, _ in c.w.ranges):
        return None, ()
    sums = c.x.reshape(-1)[c.M * c.K // 2 :]  # unused half: x contains 16-bit values
    return sums, () if c.operand.summed else (chunk_sums.launch(c.x, sums, c.M, c.K),)

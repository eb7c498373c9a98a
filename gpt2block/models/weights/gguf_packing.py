"""Convert blocks of a GGUF file to the order of the kernels, on a GPU: gguf/pack.cu.

The GPU rearranges bytes as `weights.gguf.pack` does on the host. On the host this takes longer than
all other work in loading a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from math import ceil
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import CudaArray, Read, read_into
from gpt2block.cuda.formats import GGUF
from gpt2block.cuda.kernels import Geometry, launch_at
from gpt2block.cuda.requests import Launch
from gpt2block.models.weights.gguf import ROW_GROUP, TYPES, UNIT, GgufMatrix, range_bytes
from gpt2block.models.weights.matrix import on_host

FILE = "gguf/pack.cu"
WARPS = 4  # warps per block; each warp converts 128 inputs


class BlockRows(NamedTuple):
    """Rows (outputs) of one GGUF type, and a function that reads bytes of the rows from a file.

    heads: number of heads of a Llama's q or k, whose rows in a file have the order of Meta's RoPE;
    0 for other outputs. read(begin, array): fills the array with the bytes from `begin` on.
    """

    name: str
    N: int
    heads: int
    read: Read

    @classmethod
    def of(cls, name: str, raw: NDArray[np.uint8]) -> BlockRows:
        """Return BlockRows of rows in host memory, uint8 (N, bytes per row)."""

        def read(begin: int, array: NDArray[np.uint8]) -> None:
            array[...] = raw.reshape(-1)[begin : begin + len(array)]

        return cls(name, len(raw), 0, read)


def pack(
    rows: Sequence[BlockRows], raw: CudaArray, out: CudaArray, largest: CudaArray, K: int
) -> Launch:
    """Return a launch that writes rows `raw` of one GGUF type to `out` in the kernels' byte order.

    Rows of heads must come first. largest: int32 (1,), bits of a float; raised to an upper bound of
    the weights' magnitudes if that is larger.
    """
    kind, of_heads = TYPES[rows[0].name], [part for part in rows if part.heads]
    head = of_heads[0].N // of_heads[0].heads if of_heads else 0
    N = sum(part.N for part in rows)
    units = ceil(K / (kind.units * UNIT)) * kind.units
    grid, defines = (ceil(N / ROW_GROUP), ceil(units / WARPS)), (("GGUF_TYPE", kind.number),)
    geometry = Geometry("gguf_pack", grid, (32 * WARPS,), defines=defines)
    args = raw, out, largest, K, N, head, sum(part.N for part in of_heads)
    return launch_at(FILE, geometry, args, "float16", GGUF)


def packed_on_device(parts: Sequence[BlockRows], K: int) -> GgufMatrix:
    """Create a GgufMatrix on the current GPU. The rows are read from a file in pieces.

    Device memory also holds the bytes of the file for one range at a time.
    """
    grouped = [list(group) for _, group in groupby(parts, lambda part: part.name)]
    ranges = tuple((group[0].name, sum(part.N for part in group)) for group in grouped)
    sizes = range_bytes(ranges, K)
    data, largest, at = cupy.empty(sum(sizes), "uint8"), cupy.zeros(1, "int32"), 0
    for group, (name, N), size in zip(grouped, ranges, sizes, strict=True):
        of_row = K // TYPES[name].size * TYPES[name].nbytes
        raw = cupy.empty(N * of_row, "uint8")
        launch = pack(group, raw, data[at : at + size], largest, K)  # compiles while bytes are read
        read_into(raw, [(part.read, part.N * of_row) for part in group])
        launch.run()
        at += size
    return GgufMatrix(data, GGUF, None, "NK", float(on_host(largest).view("float32")[0]), ranges, K)

"""Random weights of a Llama for benchmarks: in 16 or 32 bits, or in GGUF blocks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np

from gpt2block.checks import FLOATS
from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import CudaArray
from gpt2block.cuda.formats import FILE, GGUF
from gpt2block.cuda.kernels import FP8
from gpt2block.engine.model import Tensors
from gpt2block.models.config import DRAFTING, TABLES, ModelConfig, model_shapes
from gpt2block.models.config.llama import LlamaConfig
from gpt2block.models.weights.gguf import ROW_GROUP, TYPES, GgufMatrix, range_bytes

NUMBERS = 2**22 - 3  # count of different random weights; a prime, so that rows of a matrix differ
ROW_GROUPS = 509  # count of different row groups (8 rows) of random GGUF blocks of a type; a prime
DEVIATION = 0.02  # standard deviation of random weights
GOLDEN_RATIO = (5**0.5 - 1) / 2  # multiples of the golden ratio modulo 1 are spread evenly
MULTIPLE = TYPES["Q4_K"].size  # divisor of the inputs of a matrix in blocks of Q4_K
OUTER = (*TABLES, "lm_head")  # matrices with shape (N, K); a layer's matrices have shape (K, N)
Ranges = tuple[tuple[str, int], ...]  # pairs (GGUF type, number of outputs)


def random_tensors(config: LlamaConfig, dtype: str, library: Any = cupy) -> Tensors:
    """Yield (name, array, layout) of each tensor of a random Llama.

    Matrices are drawn from N(0, 0.02²), in the dtype, or in float16 for FP8; the numbers repeat
    after NUMBERS weights. For dtype "file", matrices have random blocks of types `gguf_types`, with
    the same standard deviation; the rows of a type repeat after ROW_GROUPS groups. Gammas are drawn
    from U(0.8, 1.2), in float32. library: CuPy or NumPy, whose arrays are yielded.
    """
    rng = np.random.default_rng(0)
    matrices: Iterator[Any] = (
        _blocks(config, library) if dtype == FILE else _floats(config, dtype, library, rng)
    )
    for name, shape in model_shapes(config).items():
        if len(shape) != 2:
            yield name, library.asarray(rng.uniform(0.8, 1.2, shape).astype(np.float32)), None
        else:
            yield name, next(matrices), "NK"


def _matrices(config: ModelConfig) -> Iterator[tuple[int, str, int, int]]:
    """Yield (position among all tensors, name, outputs N, inputs K) of each matrix."""
    for n, (name, shape) in enumerate(model_shapes(config).items()):
        if len(shape) == 2:
            N, K = shape if name in OUTER else shape[::-1]
            yield n, name, N, K


def _floats(
    config: LlamaConfig, dtype: str, library: Any, rng: np.random.Generator
) -> Iterator[CudaArray]:
    stored = FLOATS["float16" if dtype in FP8 else dtype]
    count = min(NUMBERS, max(int(np.prod(shape)) for shape in model_shapes(config).values()))
    numbers = rng.standard_normal(count, dtype=np.float32) * np.float32(DEVIATION)
    block = library.asarray(numbers.astype(stored))
    for n, _, N, K in _matrices(config):
        made = library.empty((N, K), stored)
        _fill(made, block, int(n * GOLDEN_RATIO * count))
        yield made


def _blocks(config: LlamaConfig, library: Any) -> Iterator[GgufMatrix]:
    for n, name, N, K in _matrices(config):
        ranges = gguf_types(config, name, N)
        sizes, first = range_bytes(ranges, K), int(n * GOLDEN_RATIO * ROW_GROUPS)
        data, at, largest = library.empty(sum(sizes), "uint8"), 0, 0.0
        for (kind, _), size in zip(ranges, sizes, strict=True):
            rows = _different_rows(kind, K)
            block = library.asarray(rows.data)
            _fill(data[at : at + size], block, first * TYPES[kind].row_bytes(K))
            at, largest = at + size, max(largest, rows.largest or 0.0)
        yield GgufMatrix(data, GGUF, None, "NK", largest, ranges, K)


@lru_cache
def _different_rows(kind: str, K: int) -> GgufMatrix:
    """Return ROW_GROUPS groups of random rows; their weights are about uniform in ±3 DEVIATION."""
    return GgufMatrix.random([(kind, ROW_GROUP * ROW_GROUPS)], K, size=3 * DEVIATION)


def gguf_types(config: ModelConfig, name: str, N: int) -> Ranges:
    """Return the GGUF types of the N outputs of a matrix, as in llama.cpp's mixture Q4_K_M.

    Matrices have type Q4_K. lm_head, and w_down and the outputs v of w_qkv in half of the layers,
    have type Q6_K. The block that drafts tokens has the types of the last layer.
    """
    *of_layer, matrix = name.split(".")
    if not of_layer:
        precise = matrix == "lm_head" or config.tie_word_embeddings
        return (("Q6_K" if precise else "Q4_K", N),)
    drafting, eighth = name.startswith(DRAFTING), config.n_layer // 8
    n = config.n_layer - 1 if drafting else int(of_layer[1])
    precise = n < eighth or n >= 7 * config.n_layer // 8 or (n - eighth) % 3 == 2
    if precise and matrix == "w_down":
        return (("Q6_K", N),)
    if precise and matrix == "w_qkv":
        values = config.qkv_widths(n)[2]
        return ("Q4_K", N - values), ("Q6_K", values)
    return (("Q4_K", N),)


def bytes_in_blocks(config: ModelConfig, unread: str) -> int:
    """Return the bytes of the matrices in blocks of `gguf_types`.

    Not included are the matrix `unread`, and the table of embeddings for layers, of which a step
    reads a row per token.
    """
    left = unread, "layer_table"
    matrices = ((name, N, K) for _, name, N, K in _matrices(config) if name not in left)
    return sum(sum(range_bytes(gguf_types(config, name, N), K)) for name, N, K in matrices)


def blocks_problem(config: ModelConfig) -> str | None:
    """Return the reason why matrices of these sizes cannot have blocks of Q4_K, or None."""
    wrong = [f"{name} has {K:,}" for _, name, _, K in _matrices(config) if K % MULTIPLE]
    return f"expected matrices with multiples of {MULTIPLE} inputs, {wrong[0]}" if wrong else None


def _fill(array: CudaArray, block: CudaArray, start: int) -> None:
    """Fill `array` with repetitions of `block`, beginning with the element `start` of `block`."""
    bits = np.dtype(f"u{array.dtype.itemsize}")  # not every CuPy can copy bfloat16 and FP8
    to, of = array.reshape(-1).view(bits), block.view(bits)
    at, start = 0, start % of.size
    while at < to.size:
        part = of[start : start + to.size - at]
        to[at : at + part.size] = part
        at, start = at + part.size, 0

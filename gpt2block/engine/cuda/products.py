"""Choose the kernels that process prompts on a GPU, by device, head size and weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt2block.checks import FLOATS
from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import CudaArray
from gpt2block.cuda.formats import FILE, FP8, GGUF, Formats, own_cache_dtype
from gpt2block.cuda.kernels import IN_BYTES
from gpt2block.engine.model import FLOAT16
from gpt2block.engine.passes.bounds import bounds_of, rough_norms
from gpt2block.engine.passes.prefill_rules import Products
from gpt2block.engine.passes.shards import ModelShard
from gpt2block.models.config import ModelConfig, product_shapes
from gpt2block.models.weights.hi_lo import LARGEST_BOUND, HiLoMatrix
from gpt2block.models.weights.matrix import WeightMatrix, on_host
from gpt2block.ops import registry
from gpt2block.ops.attention import SIXTEEN_BITS, hi_lo_fits
from gpt2block.ops.call import needs
from gpt2block.ops.products import in_multiples
from gpt2block.ops.sample_token import request as request_sampler
from gpt2block.ops.to_fp8 import ROW_NORMS

MARGIN = 1.01  # factor that covers the rounding of float16 activations and float32 sums


def request_kernels(config: ModelConfig, formats: Formats) -> None:
    """Start compiling the sampler and attention of one prompt before the weights are read.

    These two kernels take longest to compile.
    """
    request_sampler()
    products, width = possible_products(config, formats.dtype), config.q_width + 2 * config.kv_width
    if products == "float32" or config.FROM_CACHE:
        return
    qkv: HiLoMatrix | CudaArray
    if products == "hi_lo":
        parts = cupy.empty((2, 1, width), "float16")
        qkv = HiLoMatrix(parts, cupy.empty(1, "float32"), (1, width), one_scale=1.0)
    else:
        qkv = cupy.empty((1, width), FLOATS[own_cache_dtype(formats.dtype)])
    heads = {"n_head": config.n_head, "n_kv_head": config.n_kv_head}
    options = {**heads, "causal": True, "max_seqlen": 1}
    registry.bind("attention_varlen", (qkv, cupy.zeros(2, "int32")), **options)


def possible_products(config: ModelConfig, dtype: str) -> Products:
    """Return the kind of prefill products for a dtype: on tensor cores if GPU and sizes permit."""
    if needs("has_mma") or not has_sizes_of_tensor_cores(config):
        return "float32"
    if dtype in SIXTEEN_BITS:
        return "16_bits"
    if dtype in (*FP8, FILE):
        return "fp8"
    gates = "w_g" in config.block_shapes()  # gates of attention read floats
    return "hi_lo" if hi_lo_fits(config.head_size) and not gates else "float32"


def has_sizes_of_tensor_cores(config: ModelConfig) -> bool:
    """Return whether tensor cores can compute products and attention of the model's sizes."""
    known = config.head_size in config.TENSOR_HEADS
    return known and all(in_multiples(*shape) for shape in product_shapes(config).values())


def hi_lo_bytes(config: ModelConfig, formats: Formats) -> int:
    """Return the bytes of the hi/lo copies of weights; 0 if products do not read such copies."""
    if possible_products(config, formats.dtype) != "hi_lo":
        return 0
    shapes, head = product_shapes(config).values(), (config.n_embd, config.vocab_size)
    return sum(4 * (K + 1) * N for K, N in (*shapes, head))


def choose_products(
    config: ModelConfig,
    matrices: Mapping[str, WeightMatrix],
    vectors: Mapping[str, CudaArray],
    largest: Mapping[str, float],
    shard: ModelShard | None = None,
) -> tuple[Products, dict[str, float]]:
    """Return the kind of prefill's products, and a dict from operands' names to upper bounds.

    The products are possible if no activation of a prompt, divided by its divisor if it has one
    (`divisors`), can exceed the range of float16, or of a hi/lo scale, for any tokens, and if the
    matrices that the divisors multiply have scales, which float16 matrices do not. largest: the
    largest magnitude of every tensor. shard: this GPU's part of the matrices, if they are
    divided; bounds then hold for the shards of all GPUs.
    """
    blocks = [matrix for name, matrix in matrices.items() if name.startswith("h.")]
    in_blocks = any(matrix.dtype == GGUF for matrix in matrices.values())
    dtype = FILE if in_blocks else blocks[0].dtype
    products = possible_products(config, dtype)
    if products in ("float32", "16_bits"):
        return products, {}
    rough = rough_norms(config, largest)

    def norms(w: str, gamma: str) -> np.ndarray:
        if matrices[w].dtype in IN_BYTES:  # float16 activations need tight bounds
            ones = cupy.full((matrices[w].K,), 1, "float32")
            own = row_norms(matrices[w], vectors[gamma] if gamma else ones)
            return own if shard is None else shard.in_order(w, own)
        return rough(w, gamma)

    _, bounds = bounds_of(config, largest, norms)
    limit, by = (FLOAT16, divisors(config, bounds)) if products == "fp8" else (LARGEST_BOUND, {})
    fit = all(bound / by.get(name, 1) <= limit for name, bound in bounds.items())  # False for NaN
    multiplied = {h + name for h, first, last, _ in _divided(config, by) for name in (first, last)}
    scaled = all(matrices[w].dtype in IN_BYTES for w in multiplied & matrices.keys())
    return (products, bounds) if fit and scaled else ("float32", {})


def divisors(config: ModelConfig, bounds: Mapping[str, float]) -> dict[str, float]:
    """Return {name of an activation: power of two by which it is divided to fit float16}."""
    powers: dict[str, float] = {}
    for n, (_, results, _) in product(range(config.n_layer), config.DIVIDED):
        names = [name for name in (f"h.{n}.{each}" for each in results) if name in bounds]
        largest = max((bounds[name] for name in names), default=0)
        if FLOAT16 < largest < math.inf:
            powers |= dict.fromkeys(names, 2.0 ** math.ceil(math.log2(largest / FLOAT16)))
    return powers


def _divided(config: ModelConfig, by: Mapping[str, float]) -> Iterator[tuple[str, str, str, float]]:
    """Yield the prefix of a layer, the matrices before and after an activation, and its divisor."""
    for n, (first, (result, *_), last) in product(range(config.n_layer), config.DIVIDED):
        if (divisor := by.get(f"h.{n}.{result}")) is not None:
            yield f"h.{n}.", first, last, divisor


def divided_weights(
    config: ModelConfig,
    by: Mapping[str, float],
    matrices: Mapping[str, WeightMatrix],
    vectors: Mapping[str, CudaArray],
) -> dict[str, Any]:
    """Return the weights of prefill if activations are divided by `by`, a dict by name.

    The weights share the FP8 numbers with the matrices; scales and biases are new. Division by
    powers of two is exact, except for activations that become subnormal in float16.
    """
    divided: dict[str, WeightMatrix | CudaArray] = {}
    for h, first, last, divisor in _divided(config, by):
        name, bias = f"{h}{first}", f"{h}b_{first.removeprefix('w_')}"
        if name in matrices:
            divided[name] = matrices[name].times(1 / divisor)
        divided[f"{h}{last}"] = matrices[f"{h}{last}"].times(divisor)
        for vector in (name, bias):
            if vector in vectors:
                divided[vector] = vectors[vector] * np.float32(1 / divisor)
    return divided


def row_norms(w: WeightMatrix, gamma: CudaArray) -> NDArray[np.float64]:
    """Return upper bounds (N,) of the norms of w's rows, each row multiplied by gamma (K,).

    w: FP8 or GGUF blocks on the GPU, layout "NK", K a multiple of 4. The norms are computed from
    the stored numbers and their scales.
    """
    if w.input_order is not None:
        gamma = cupy.asarray(on_host(gamma)[w.input_order])
    squares = ROW_NORMS.bind((w, gamma)).run()
    norms: NDArray[np.float64] = MARGIN * np.sqrt(on_host(squares).astype(np.float64))
    return norms if w.scale is None else norms * on_host(w.scale)

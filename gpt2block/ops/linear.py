"""The linear layer, [residual +] [gelu]((LayerNorm(x) or x) w + bias), sums in float32.

In decoding, a linear layer for q, k and v also appends k and v to the kv_cache. wgmma kernels for
large matrices also fuse RoPE.

Use it for float32 activations and weights (N, K) of any dtype, or on GPUs without tensor cores.
matmul/decode/mma.cu computes few rows, as in decoding. mma_tiles.cu computes more rows, and
wgmma.cu large matrices or more rows, with the same bits. matmul/decode/cores.cu runs where these
kernels do not apply, matmul/prompt/cores.cu for many rows. `gemm` is faster for many rows of 16-bit
activations; `matmul_bias` takes plain float32 matrices (K, N).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import gcd
from typing import Any

import numpy as np

from gpt2block.config.formats import FILE, GGUF
from gpt2block.contract import Contract
from gpt2block.cuda.arrays import (
    CudaArray,
    alignment,
    check,
    check_address,
    compute_capability,
    contiguous,
    device_attribute,
    row_alignment,
)
from gpt2block.cuda.kernels import FP8, TWO_PART, Geometry, cache_dtype, launch_at
from gpt2block.cuda.requests import Launch
from gpt2block.errors import InputError
from gpt2block.ops import _linear_gguf as blocks
from gpt2block.ops import _linear_hopper as hopper
from gpt2block.ops import _linear_matvec as matvec
from gpt2block.ops import _linear_mma as mma
from gpt2block.ops import _linear_mma_tiles as mma_tiles
from gpt2block.ops import _linear_tiles as tiles
from gpt2block.ops.call import Call, UncheckedCall
from gpt2block.ops.gated_sums import GATED_SUMS, LINEAR_SUMS, ROPE_SUMS
from gpt2block.ops.gguf import chunk_sums
from gpt2block.ops.operation import (
    REQUIRED,
    Inputs,
    Operation,
    Sizes,
    UnsupportedCall,
    Variant,
    Workload,
    variant,
)
from gpt2block.ops.products import (
    HOPPER_CAPABILITY,
    MMA_CAPABILITY,
    Parts,
    check_addresses,
    storage_of,
)
from gpt2block.ops.terms import Terms, check_terms, count_define, rounds, stored_scale
from gpt2block.ops.warm import call
from gpt2block.weights.matrix import WeightMatrix
from gpt2block.weights.two_part import TwoPartMatrix, scale_for

FEW_ROWS = 16  # maximum rows of x for which the kernels of decoding are the default variants
MORE_ROWS = 16  # maximum rows with fused LayerNorm; for more, mma_tiles can be faster than mma
FEW_PRODUCTS = 80_000_000  # maximum M N K for which mma is faster than mma_tiles for M > MORE_ROWS
# Sizes from which variant hopper is faster. With more than MANY_ROWS rows, and with 17 to MANY_ROWS
# rows, N K of the matrix decides. With fewer rows, the smallest matrix of a layer decides: its
# N K or, for 2 to 16 rows, its M N K. The limit of M N K differs for 16-bit and for FP8 weights.
MANY_ROWS, SMALL_MATRIX, MEDIUM_MATRIX = 32, 500_000, 4_000_000
LARGE_MATRIX, LARGE_PRODUCTS, LARGE_FP8_PRODUCTS = 10_000_000, 4_000_000, 9_000_000
# Contracts of `reference.linear` and `reference.linear_qkv` if w is a TwoPartMatrix.
TWO_PART_LINEAR = Contract.parse(
    "x f32 ... K; w two_part N K; bias? f32 N; gamma? beta? f32 K; residual? f32 ... N; "
    "up? rows K N -> out~residual f32 ... N"
)
TWO_PART_QKV = Contract.parse(
    "x f32 M K; w two_part N K; bias? f32 N; gamma? beta? f32 K; k v kv B P C; row position i32 M "
    "-> q f32 M C; k v kv B P C"
)
MAX_OUTPUTS = 2**31 - 2**16  # maximum M and N: an int still holds them plus a block's columns
MAX_BLOCKS = 65535  # maximum blocks along the second axis of a grid
# normalizes: whether GGUF products can fuse RMSNorm. wgmma_takes: whether wgmma supports w.
normalizes, wgmma_takes = blocks.normalizes, hopper.takes_blocks


def terms_of(
    dtype: str, M: int, shapes: Mapping[str, tuple[int, int]], rounded: bool = False
) -> dict[str, tuple[Terms, ...]]:
    """Return, for each product of a layer, the `Terms` in which x can be stored, fastest first.

    M: rows of x. dtype: dtype of the weights. shapes: (K, N) of the matrices, by name. rounded:
    whether x is rounded to one term per value. A product without `Terms` reads x as floats: floats
    are faster for few rows, and necessary for products without tensor cores or with tf32. The
    caller sets the scale of two-part terms. Up to MORE_ROWS rows, all products of a layer are of
    one kind: if two kinds alternate, launches overlap less. With GGUF blocks, mma is faster up to 8
    rows: a step of a 7B model in Q4_K_M (H100) takes 3.1 ms for 8 rows, and for 16 rows 4.9 ms, or
    3.8 ms by wgmma.
    """
    if dtype == "float32" or compute_capability() < MMA_CAPABILITY:
        return {}
    if dtype in (FILE, GGUF):
        possible = rounded and M > blocks.FEW_ROWS and compute_capability() == HOPPER_CAPABILITY
        fits = possible and not any(K % mma.UNIT for K, _ in shapes.values())
        return dict.fromkeys(shapes, (hopper.terms(dtype, rounded),)) if fits else {}
    multiple = mma.LOADED // itemsize_of(dtype)
    if dtype == TWO_PART:
        fitting = [name for name, (K, _) in shapes.items() if M > MORE_ROWS and K % multiple == 0]
        return dict.fromkeys(fitting, (Terms(TWO_PART),))
    wide = hopper.terms(dtype, rounded)
    smallest = min(K * N for K, N in shapes.values())
    products = LARGE_FP8_PRODUCTS if dtype in FP8 else LARGE_PRODUCTS

    def terms_for(K: int, N: int) -> tuple[Terms, ...]:
        if M > MORE_ROWS:
            enough = SMALL_MATRIX if M > MANY_ROWS else MEDIUM_MATRIX
            faster = enough <= N * K
        else:
            faster = smallest >= LARGE_MATRIX or (M > 1 and M * smallest >= products)
        possible = compute_capability() == HOPPER_CAPABILITY and K % mma.UNIT == 0
        in_place = (wide._replace(width=0),) if M > MORE_ROWS and K % multiple == 0 else ()
        return (wide, *in_place) if possible and faster else in_place

    return {name: terms for name, shape in shapes.items() if (terms := terms_for(*shape))}


ROUNDING = ("float16", "float8_e5m2", "float8_e4m3fn", FILE)  # weights for which x is rounded


def can_round(dtype: str, inputs: Iterable[int]) -> bool:
    """Return whether decoding rounds x to ROUNDED. inputs: the number of inputs of each matrix.

    Rounding is faster, and costs almost no accuracy, on Hopper GPUs with weights of a dtype in
    ROUNDING if all products run on tensor cores. x is then rounded for any number of rows, so that
    a row has the same bits alone and in any batch. Otherwise, x has two terms or stays float32.
    """
    if dtype not in ROUNDING or compute_capability() != HOPPER_CAPABILITY:
        return False
    multiple = mma.LOADED // itemsize_of(dtype)
    return all(K % multiple == 0 for K in inputs)


def itemsize_of(dtype: str) -> int:
    """Return the bytes per weight of this dtype, or per part of a two-part weight."""
    return 2 if dtype == TWO_PART else mma.BYTES.get(dtype, 1)


def _most_shared() -> int:
    return device_attribute("MaxSharedMemoryPerBlockOptin") - 1024  # 1024: static shared memory


def _few_rows(module: Any, c: Call, kernel: str, args: tuple[Any, ...]) -> Launch:
    """Return the launch of a kernel of matmul/decode/cores.cu or matmul/decode/mma.cu.

    module: matvec for cores.cu, mma for mma.cu. args: the kernel's last arguments.
    """
    if c.N > MAX_OUTPUTS:
        raise UnsupportedCall(f"w: expected at most {MAX_OUTPUTS:,} outputs, got {c.N:,}")
    if c.w.dtype == GGUF:
        raise UnsupportedCall("takes no GgufMatrix: use variant tiles")
    if c.to_terms or (c.terms and (module is matvec or c.terms.width)) or c.up:
        raise UnsupportedCall(
            "takes and gives floats, of one matrix: use variant mma_tiles for terms, or hopper"
        )
    size = c.w.data.itemsize
    sms, defines = device_attribute("MultiProcessorCount"), count_define(c.rounded)
    more: dict[str, Any] = {"terms": True} if c.terms else {}
    geometry: Geometry | None = module.geometry(
        kernel,
        *(c.M, c.N, c.K, c.w.dtype if module is mma else size),
        norm=c.gamma is not None,
        sms=sms,
        most_shared=_most_shared(),
        **more,
    )
    if geometry is None:
        raise UnsupportedCall(
            f"K {c.K:,}: a row does not fit in the {_most_shared():,} bytes of this GPU's "
            "shared memory: variant tiles has no such limit"
        )
    assert geometry is not None
    geometry = geometry.with_defines(defines)
    if geometry.grid[1] > MAX_BLOCKS:
        raise UnsupportedCall(f"{c.M:,} rows: too many for this variant: use variant tiles")
    load = mma.LOADED if module is mma else matvec.order(c.N, c.K, size)[0] * size
    check_address("w", c.w.data, load)
    for name in ("x", "gamma", "beta"):
        if getattr(c, name) is not None:
            check_address(name, getattr(c, name), 4 * gcd(4, c.K))
    x_scale = (c.x_scale,) if module is mma else ()
    args = (c.x, c.gamma, c.beta, c.w.data, c.w.scale, c.bias, *x_scale, *args)
    return launch_at(module.FILE, geometry, args, *storage_of(c.w, c.T), c.kv_dtype)


def _on_tensor_cores(c: Call) -> None:
    """Raise UnsupportedCall if the tensor-core decoding kernels do not support the GPU or K."""
    old, multiple = compute_capability() < MMA_CAPABILITY, mma.LOADED // itemsize_of(c.w.dtype)
    if old:
        raise UnsupportedCall("needs a GPU of compute capability 8.0 or newer: use variant matvec")
    expected = f"expected a multiple of {multiple} for {c.w.dtype}"
    if c.K % multiple:
        raise UnsupportedCall(f"K {c.K:,}: {expected}: use variant matvec")


def _on_cuda_cores(c: Call) -> None:
    """Raise UnsupportedCall if only tensor-core kernels support w's dtype or the rounding of x."""
    if c.w.dtype == TWO_PART:
        raise UnsupportedCall("takes no TwoPartMatrix: use variant mma, or a WeightMatrix")
    if c.w.dtype == GGUF:
        raise UnsupportedCall("takes no GgufMatrix: use variant tiles")
    if c.rounded:
        raise UnsupportedCall("does not round x: use variant mma")


def _check_sizes(c: Call) -> None:
    """Raise UnsupportedCall if there are more rows or outputs than kernels can index."""
    expected = f"expected at most {MAX_OUTPUTS:,} of both"
    if max(c.M, c.N) > MAX_OUTPUTS:
        raise UnsupportedCall(f"x {c.x.shape}, {c.N:,} outputs: {expected}")


def _more_rows(c: Call, kernel: str, args: tuple[Any, ...]) -> Launch:
    """Return the launch of a kernel of mma_tiles.cu. args: the kernel's last arguments."""
    if c.w.dtype == GGUF:
        raise UnsupportedCall("takes no GgufMatrix: use variant tiles")
    if c.gamma is not None:
        raise UnsupportedCall(
            "takes no gamma and beta: use variant mma, or layernorm's variant decode before it"
        )
    _check_sizes(c)
    if c.up or any(terms and terms.width for terms in (c.terms, c.to_terms)):
        raise UnsupportedCall(
            "takes and gives floats, or terms in their places, of one matrix: use variant hopper"
        )
    _on_tensor_cores(c)
    check_address("w", c.w.data)
    check_address("x", c.x)
    sizes = c.M, c.N, c.K, c.w.dtype
    tile = mma_tiles.choose(
        *sizes,
        capability=compute_capability(),
        sms=device_attribute("MultiProcessorCount"),
        most_shared=_most_shared(),
    )
    stored = c.terms is not None, c.to_terms is not None
    geometry = mma_tiles.geometry(kernel, *sizes, tile, *stored)
    geometry = geometry.with_defines(count_define(c.rounded))
    args = (c.x, c.w.data, c.w.scale, c.bias, c.x_scale, *args)
    return launch_at(mma_tiles.FILE, geometry, args, *storage_of(c.w, c.T), c.kv_dtype)


def _by_wgmma(
    c: Call,
    kernel: str,
    matrices: tuple[WeightMatrix | None, ...],
    args: tuple[Any, ...],
    head: int = 0,
) -> tuple[Launch, ...]:
    """Return the launches of a kernel of wgmma*.cu. Parameters: as for `hopper.launch`."""
    if compute_capability() != HOPPER_CAPABILITY:
        raise UnsupportedCall(
            "needs a GPU of compute capability 9.0 (Hopper): use variant mma_tiles"
        )
    _check_sizes(c)
    ordered = c.terms and c.terms.width and (not c.to_terms or c.to_terms.width)
    if not ordered:
        raise UnsupportedCall("takes and gives terms in the order of wgmma: use variant mma_tiles")
    return hopper.launch(c, kernel, matrices, args, head)


@variant("gguf hopper", hopper.GGUF_FILE, "linear_hopper_gguf")
def _blocks_hopper(c: Call) -> tuple[Launch, ...]:
    args = (c.bias, *_tile_ends(c))
    return _by_wgmma(c, "linear_hopper_gguf", (c.w, c.up), args)


@variant("qkv_gguf hopper", hopper.GGUF_FILE, "qkv_hopper_gguf")
def _qkv_blocks_hopper(c: Call) -> tuple[Launch, ...]:
    args = (c.bias, *_cache_ends(c, c.M, c.K))
    return _by_wgmma(c, "qkv_hopper_gguf", (c.w,), args)


@variant("rope_gguf hopper", hopper.GGUF_ROPE_FILE, "rope_hopper_gguf")
def _rope_blocks_hopper(c: Call) -> tuple[Launch, ...]:
    sizes = c.M, c.K, c.n_head, c.C // (2 * c.P), c.B, c.S
    args = (c.bias, c.by, c.row, c.position, c.out, c.k, c.v, *sizes)
    return _by_wgmma(c, "rope_hopper_gguf", (c.w,), args, head=2 * c.P)


def _ends(c: Call) -> tuple[Any, ...]:
    """Return the last arguments of a kernel for few rows of x."""
    return c.residual, c.out, c.eps, c.M, c.N, int(c.gelu)


def _tile_ends(c: Call) -> tuple[Any, ...]:
    """Return the last arguments of a kernel for more rows of x."""
    return c.residual, c.out, c.M, c.N, c.K, int(c.gelu)


@variant("matvec", matvec.FILE, "linear_matvec")
def _matvec(c: Call) -> Launch:
    _on_cuda_cores(c)
    return _few_rows(matvec, c, "linear_matvec", _ends(c))


@variant("mma", mma.FILE, "linear_decode_mma")
def _mma(c: Call) -> Launch:
    _on_tensor_cores(c)
    return _few_rows(mma, c, "linear_decode_mma", _ends(c))


def _in_blocks(c: Call, kernel: str, args: tuple[Any, ...], **options: Any) -> Launch:
    """Return the launch of a kernel for GGUF blocks. args: arguments after x, gamma, beta and w."""
    if c.terms or c.to_terms:
        raise UnsupportedCall("takes and gives floats")
    check_addresses(c, "x", "gamma", "beta", "w")
    norm = blocks.norm_of(c.gamma, c.beta)
    args = (c.x, c.gamma, c.beta, c.w.data, *args)
    return blocks.launch(c, kernel, args, rounded=c.rounded, norm=norm, **options)


@variant("gguf", blocks.FILE, "linear_decode_gguf")
def _linear_blocks(c: Call) -> Launch:
    up = c.up.data if c.up is not None else None
    args = up, c.bias, c.residual, c.out, c.eps, c.M, c.N, int(c.gelu)
    return _in_blocks(c, "linear_decode_gguf", args, up=c.up)


@variant("qkv_gguf", blocks.FILE, "qkv_decode_gguf")
def _qkv_blocks(c: Call) -> Launch:
    args = (c.bias, *_cache_ends(c, c.eps, c.M))
    return _in_blocks(c, "qkv_decode_gguf", args, cache=c.kv_dtype)


@variant("rope_gguf", blocks.FILE, "rope_decode_gguf")
def _rope_blocks(c: Call) -> Launch:
    if c.terms:
        raise UnsupportedCall("takes floats")
    check_addresses(c, "x", "w")
    return blocks.launch_rope(c, rounded=c.rounded, bias=c.bias, n_ctx=c.S, cache=c.kv_dtype)


@variant("mma_tiles", mma_tiles.FILE, "linear_decode_tiles")
def _mma_tiles(c: Call) -> Launch:
    return _more_rows(c, "linear_decode_tiles", (stored_scale(c.to_terms), *_tile_ends(c)))


@variant("hopper", hopper.FILE, "linear_decode_hopper")
def _hopper(c: Call) -> tuple[Launch, ...]:
    args = (c.w.scale, c.up.scale if c.up else None, c.bias, *_tile_ends(c))
    return _by_wgmma(c, "linear_decode_hopper", (c.w, c.up), args)


@variant("tiles", tiles.FILE, tiles.KERNEL)
def _tiles(c: Call) -> Any:
    if c.w.dtype == GGUF:
        return _linear_blocks.launch(c)
    _on_cuda_cores(c)
    if c.gamma is not None:
        raise UnsupportedCall("takes no gamma and beta: use variant matvec")
    if c.terms or c.to_terms or c.up:
        raise UnsupportedCall("takes and gives floats, of one matrix: use variant hopper")
    M, N, K, data = c.M, c.N, c.K, c.w.data
    if max(M, N) > tiles.MAX_SIZE or K > tiles.MAX_K:
        raise UnsupportedCall(
            f"x {c.x.shape}, w ({N}, {K}): expected at most {tiles.MAX_SIZE:,} rows or outputs, "
            f"and {tiles.MAX_K:,} inputs"
        )
    geometry = tiles.geometry(
        M,
        N,
        data.itemsize,
        min(tiles.MOST_LOADED, alignment(K * data.itemsize, data.data.ptr) // data.itemsize),
        4 if row_alignment(N, c.out, c.residual) == 16 else 1,
        c.gelu,
        device_attribute("MultiProcessorCount"),
        device_attribute("MaxSharedMemoryPerBlockOptin"),
    )
    args = (c.x, data, c.w.scale, c.bias, c.residual, c.out, M, K, N)
    return launch_at(tiles.FILE, geometry, args, *storage_of(c.w))


def _cache_ends(c: Call, *sizes: Any) -> tuple[Any, ...]:
    """Return the last arguments of a kernel that appends k and v to the kv_cache."""
    return c.row, c.position, c.q, c.k, c.v, *sizes, c.C, c.B, c.P


@variant("qkv", matvec.FILE, "qkv_matvec")
def _qkv_matvec(c: Call) -> Launch:
    _on_cuda_cores(c)
    return _few_rows(matvec, c, "qkv_matvec", _cache_ends(c, c.eps, c.M))


@variant("qkv_mma", mma.FILE, "qkv_decode_mma")
def _qkv_mma(c: Call) -> Launch:
    _on_tensor_cores(c)
    return _few_rows(mma, c, "qkv_decode_mma", _cache_ends(c, c.eps, c.M))


@variant("qkv_mma_tiles", mma_tiles.FILE, "qkv_decode_tiles")
def _qkv_tiles(c: Call) -> Launch:
    return _more_rows(c, "qkv_decode_tiles", _cache_ends(c, c.M, c.K))


@variant("qkv_hopper", hopper.FILE, "qkv_decode_hopper")
def _qkv_hopper(c: Call) -> tuple[Launch, ...]:
    args = (c.w.scale, c.bias, *_cache_ends(c, c.M, c.K))
    return _by_wgmma(c, "qkv_decode_hopper", (c.w,), args)


@variant("rope_hopper", hopper.ROPE_FILE, "rope_decode_hopper")
def _rope_hopper(c: Call) -> tuple[Launch, ...]:
    if compute_capability() != HOPPER_CAPABILITY:
        raise UnsupportedCall(
            "needs a GPU of compute capability 9.0 (Hopper): use linear and rope_append"
        )
    wanted, D = hopper.terms(c.w.dtype, c.rounded), 2 * c.P
    if c.terms != wanted:
        raise UnsupportedCall(f"terms of {c.terms}: expected {wanted}")
    multiple = 2 * hopper.ROPE_BOX
    if D % multiple:
        raise UnsupportedCall(f"heads of {D} channels: expected a multiple of {multiple}")
    arrays = (c.w.scale, c.bias, c.by, c.row, c.position, c.out, c.k, c.v)
    args = (*arrays, c.M, c.K, c.n_head, c.C // D, c.B, c.S)
    return hopper.launch(c, "rope_decode_hopper", (c.w,), args, head=D)


def _decoding(c: Call, operation: Operation) -> tuple[Variant, ...]:
    """Return variants for decoding, preferred first. All tensor-core variants give equal bits."""
    few_rows, on_tensor_cores, more_rows, by_wgmma = operation.variants[:4]
    ordered = c.terms is not None and c.terms.width > 0
    if c.w.dtype == GGUF and operation is LINEAR_QKV:
        return (_qkv_blocks_hopper if ordered else _qkv_blocks,)
    if c.w.dtype == GGUF:
        return (_blocks_hopper if ordered else _linear_blocks,)
    if ordered:
        return (by_wgmma,)
    few = c.M * c.N * c.K <= FEW_PRODUCTS or c.M <= MORE_ROWS
    tiles_first = c.to_terms or (c.gamma is None and not few)
    others = () if c.rounded else (few_rows,)
    return (*((more_rows,) if tiles_first else ()), on_tensor_cores, *others)


def _prepare(unchecked: UncheckedCall) -> Call:
    """Check a call of `linear`, and list the variants to try.

    decoding: whether to choose as for few rows, so that the bits of a row do not depend on other
    rows. w: a WeightMatrix (N, K), or a TwoPartMatrix for variants mma and mma_tiles. x_bound: with
    a TwoPartMatrix, the largest magnitude of x or its LayerNorm, by default 2^15; it determines the
    scale of x's terms. terms: the `Terms` in which x is stored (lib/terms.cuh), one of `terms_of`,
    not with gamma or x_bound, as two-part terms have a scale. to_terms: the `Terms` in which out is
    stored for another product with such weights. up: a second WeightMatrix of w's dtype and shape;
    variant hopper then computes silu(x w) (x up) or gelu(x w) (x up). x_dtype: "float16" rounds
    floats of x, or their LayerNorm, in tensor-core kernels of decoding with float16 or FP8 weights;
    with `terms`, `Terms.rounded` says this.
    """
    c = _checked(unchecked, TWO_PART_LINEAR)
    c.M, c.T, c.kv_dtype = c.rows, "float32", None
    _check(c)
    if c.up is not None and (c.up.dtype != c.w.dtype or c.bias is not None):
        raise InputError(f"up: {c.up.dtype}: expected {c.w.dtype}, as w has, and no bias")
    few = c.decoding or c.M <= FEW_ROWS or c.gamma is not None or c.w.dtype in (TWO_PART, GGUF)
    c.order = _decoding(c, OPERATION) if few else (_tiles,)
    return c


def _checked(unchecked: UncheckedCall, two_part: Contract) -> Call:
    """Return the checked call and set its scale of x. two_part: contract for a TwoPartMatrix w."""
    if not isinstance(unchecked.inputs[1], TwoPartMatrix):
        if unchecked.options["x_bound"] is not None:
            raise InputError("x_bound: expected a TwoPartMatrix: only with one x has a scale")
        c = unchecked.checked()
        c.x_scale = 1.0
        return c
    c = unchecked.checked(two_part)
    c.w = Parts(c.w.parts, c.w.scale)
    if c.terms and c.x_bound is not None:
        raise InputError("x_bound: terms have a scale: expected either")
    c.x_scale = stored_scale(c.terms) if c.x_bound is None else scale_for(c.x_bound)
    return c


def _prepare_qkv(unchecked: UncheckedCall) -> Call:
    """Check a call of `linear_qkv`, and list the variants to try.

    k and v have the FP8 format kv_dtype, or else the dtype of the weights (float16 with FP8
    weights, float32 with a TwoPartMatrix). No two rows of x may have the same row and position of
    the cache. k and v of a token outside the cache are not stored. Other options: as in `linear`.
    """
    c = _checked(unchecked, TWO_PART_QKV)
    c.T, c.to_terms, c.up = cache_dtype(c.w.dtype), None, None
    _check(c)
    if c.kv_dtype is None:
        check("k", c.k, dtype=c.T)
    if c.N != 3 * c.C:
        raise InputError(f"w: expected {3 * c.C} outputs, 3C as k has C channels, got {c.N}")
    c.order = _decoding(c, LINEAR_QKV)
    return c


def _prepare_rope(unchecked: UncheckedCall) -> Call:
    """Check a call of `linear_rope`, and choose the variant.

    x has `terms` in the order of wgmma; with a GgufMatrix, x may have floats, which x_dtype
    "float16" rounds. N is (n_head + 2 n_kv_head) D, the C of the cache n_kv_head D. RoPE rotates
    half-split pairs of q and k. k and v are as in `linear_qkv`. The host does not read row and
    position; kernels do not store k and v outside the cache. q has the bits of `linear` followed by
    `rope_append`.
    """
    c = unchecked.checked(to_terms=None, up=None)
    c.T = cache_dtype(c.w.dtype)
    c.rounded = rounds(c.terms.x_dtype if c.terms else c.x_dtype, c.w.dtype)
    blocks_variant = _rope_blocks_hopper if c.terms else _rope_blocks
    c.order = (blocks_variant if c.w.dtype == GGUF else _rope_hopper,)
    if c.kv_dtype is None:
        check("k", c.k, dtype=c.T)
    D = 2 * c.P
    N = c.n_head * D + 2 * c.C
    if c.C % D or c.N != N:
        raise InputError(
            f"w of {c.N:,} outputs, k of {c.C:,} channels: expected {N:,} outputs, {c.n_head} "
            f"heads of q and whole heads of k and v, of {D} channels as by has"
        )
    return c


def _check(c: Call) -> None:
    """Raise InputError unless gamma, beta, and the `Terms` of x and of out are compatible."""
    if (c.gamma is None) != (c.beta is None) and (c.gamma is None or c.w.dtype != GGUF):
        raise InputError("gamma and beta: expected both, or neither")
    if c.terms and c.x_dtype is not None:
        raise InputError("x_dtype: terms are rounded or not: expected either")
    c.rounded = rounds(c.terms.x_dtype if c.terms else c.x_dtype, c.w.dtype)
    stored = [each for each in (c.terms, c.to_terms) if each is not None]
    if not stored:
        return
    if any(each.rounded != c.rounded for each in stored):
        raise InputError(f"terms of {c.to_terms}: expected both x and out rounded, or neither")
    shapes = {"w": (c.K, c.N)}
    known = terms_of(c.w.dtype, MORE_ROWS + 1, shapes, c.rounded).get("w", ())
    kinds = {each.dtype for each in known}
    orders = {0} if c.w.dtype == TWO_PART else {0, hopper.width(c.w.dtype)}
    unknown = any(each.dtype not in kinds or each.width not in orders for each in stored)
    if unknown or (c.terms and c.gamma is not None):
        raise InputError(
            f"w: {c.w.dtype}, {c.K} inputs, {c.N} outputs: expected terms of "
            f"{' or '.join(kinds) or 'no dtype'}, without gamma and beta: pass floats"
        )
    check_terms(c.to_terms, c.N)


def _make(s: Sizes, rng: np.random.Generator) -> Inputs:
    x = rng.standard_normal((s["M"], s["K"]), dtype=np.float32)
    w = rng.standard_normal((s["K"], s["N"]), dtype=np.float32) / np.float32(s["K"] ** 0.5)
    return x, w, rng.standard_normal(s["N"], dtype=np.float32)


LINEAR_QKV = Operation(
    name="linear_qkv",
    variants=(_qkv_matvec, _qkv_mma, _qkv_tiles, _qkv_hopper),
    options={"eps": 1e-5, "terms": None, "kv_dtype": None, "x_bound": None, "x_dtype": None},
    prepare=_prepare_qkv,
)

LINEAR_ROPE = Operation(
    name="linear_rope",
    variants=(_rope_hopper,),
    options={"n_head": REQUIRED, "terms": None, "kv_dtype": None, "x_dtype": None},
    prepare=_prepare_rope,
)

OPERATION = Operation(
    name="linear",
    variants=(_matvec, _mma, _mma_tiles, _hopper, _tiles),
    options={
        "gelu": False,
        "eps": 1e-5,
        "variant": None,
        "decoding": False,
        "terms": None,
        "to_terms": None,
        "x_bound": None,
        "x_dtype": None,
    },
    prepare=_prepare,
    parts=(
        *(_linear_blocks, _qkv_blocks, _rope_blocks),
        *(_blocks_hopper, _qkv_blocks_hopper, _rope_blocks_hopper, chunk_sums),
    ),
    steps=(LINEAR_QKV, LINEAR_ROPE, LINEAR_SUMS, ROPE_SUMS, GATED_SUMS),
    workload=Workload(
        idea="[residual +] [gelu]((LayerNorm(x) or x) W + bias)",
        sizes={"M": 1, "K": 768, "N": 2304},
        draw=_make,
        traffic=lambda s: s["weight"] * s["K"] * s["N"] + 4 * (s["M"] * (s["K"] + s["N"]) + s["N"]),
        flops=lambda s: 2 * s["M"] * s["K"] * s["N"],
        bound="either",
        small=(
            {"M": 1, "K": 16, "N": 8},
            {"M": 5, "K": 40, "N": 24},
            {"M": 17, "K": 96, "N": 136},
        ),
        matrices=(1,),
        layout="NK",
    ),
)


def linear(
    x: CudaArray,
    w: WeightMatrix | TwoPartMatrix,
    bias: CudaArray | None = None,
    gamma: CudaArray | None = None,
    beta: CudaArray | None = None,
    residual: CudaArray | None = None,
    gelu: bool = False,
    eps: float = 1e-5,
    variant: str | None = None,
    x_bound: float | None = None,
) -> CudaArray:
    """Compute `reference.linear` on CuPy arrays. Raises InputError.

    x (..., K), bias (N,), gamma and beta (K,), residual (..., N): float32. w: a `WeightMatrix` in
    layout "NK", of any dtype, or on GPUs from compute capability 8.0 on a `TwoPartMatrix`. x_bound:
    with a TwoPartMatrix, the largest magnitude of x or its LayerNorm, by default 2^15. variant: by
    default mma for up to 16 rows or with gamma (matvec on GPUs before compute capability 8.0, or if
    a row of w is no multiple of 16 bytes), else tiles, or mma_tiles with a TwoPartMatrix. For one
    variant, the result of a row has the same bits alone and among other rows.
    """
    inputs = (*contiguous(x), w, *contiguous(bias, gamma, beta, residual))
    options = {"gelu": gelu, "eps": eps, "variant": variant, "x_bound": x_bound}
    return call(OPERATION, inputs, **options).out

"""Every kernel of matrix products behind one call, for tests/ops/test_product_laws.py.

A kernel is a function from rows, matrices and fused operations (`Case`) to rows. Lines of `ON_CPU`
and `ON_GPU` name the cases of each kernel; special features of a kernel have their own test file.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from importlib import import_module
from itertools import cycle, product
from types import ModuleType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import arrays_of, compute_capability, mapped
from gpt2block.cuda.kernels import FP8, HI_LO
from gpt2block.models.weights.hi_lo import HiLoMatrix
from gpt2block.models.weights.matrix import WeightMatrix
from gpt2block.ops.engines import (
    gemm_mma,
    gemm_wgmma,
    linear_matvec,
    linear_mma,
    linear_mma_tiles,
    linear_tiles,
    linear_wgmma,
    rmsnorm_mma,
    rmsnorm_wgmma,
)
from gpt2block.ops.engines.gemm_mma import MmaGemmTile
from gpt2block.ops.engines.linear_mma_tiles import MmaLinearTile
from gpt2block.ops.engines.rmsnorm_mma import RmsnormTile
from gpt2block.ops.engines.rows import power_of_two
from gpt2block.ops.gemm import OPERATION as GEMM
from gpt2block.ops.operands import Operand
from gpt2block.ops.operation import Operation
from gpt2block.ops.registry import OPERATIONS
from tests import plain
from tests.devices import H200, assert_same_bits, moved, running_on
from tests.gpus import H200 as H200_LIMITS
from tests.gpus import HOPPER_CAPABILITY, MMA_CAPABILITY, cupy_with
from tests.ops.test_operands import as_operand, rounded_to_float16

Array = NDArray[Any]
Given = dict[str, Any]  # arrays and matrices by name
DTYPES: dict[str, Any] = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
}
WEIGHTS = (*DTYPES, *FP8)
FP8_E5M2, FP8_E4M3 = FP8
GPT2 = ((2304, 768), (768, 768), (3072, 768), (768, 3072))  # N, K
EPS = 1e-3
START, THETA = 3, 500.0  # first position and base of RoPE
LINEAR = import_module("gpt2block.ops.linear")
MATMUL = import_module("gpt2block.ops.matmul_bias")
LINEAR_OP, MATMUL_OP = OPERATIONS["linear"], OPERATIONS["matmul_bias"]
RMSNORM_MATMUL, RMSNORM_FFN = OPERATIONS["rmsnorm_matmul"], OPERATIONS["rmsnorm_ffn"]
QKV_KERNELS = ("decode_cores", "decode_mma", "decode_mma_tiles")  # in the order of the variants
NAMES = {"a": "x", "w1": "w", "w3": "up"}  # names of arguments in contracts -> names here
# (operation, variant) -> module and function that choose a tile or layout, and the option of this
# function that replaces the choice, or "" if the function only returns the choice.
CHOOSERS: dict[tuple[str, str], tuple[ModuleType, str, str]] = {
    ("linear", "matvec"): (linear_matvec, "geometry", "cut"),
    ("linear", "mma"): (linear_mma, "geometry", "cut"),
    ("linear", "mma_tiles"): (linear_mma_tiles, "choose", ""),
    ("linear", "wgmma"): (linear_wgmma, "choose", ""),
    ("linear", "tiles"): (linear_tiles, "geometry", "tile"),
    ("gemm", "mma"): (gemm_mma, "geometry", "tile"),
    ("gemm", "wgmma"): (gemm_wgmma, "choose_tile", ""),
    ("matmul_bias", "registers"): (MATMUL, "choose_tile", ""),
}
for _name in ("rmsnorm_matmul", "rmsnorm_ffn"):
    for _variant in ("mma", "unfused"):
        CHOOSERS[_name, _variant] = rmsnorm_mma, "geometry", "tile"
    CHOOSERS[_name, "wgmma"] = rmsnorm_wgmma, "choose_tile", ""


class Case(NamedTuple):
    """Sizes, and fused operations, which are ignored if the kernel's operation lacks them.

    tile: tile or layout instead of the chosen one. sms: multiprocessors of the emulated device;
    with few of them a block has several tiles. head_dim, half_split: of RoPE. sequences: number of
    sequences that share the rows, as an axis of x; 0: no such axis. apart: elements between the
    rows of x.
    """

    M: int
    K: int
    N: int
    bias: bool = True
    norm: bool = False
    gelu: bool = False
    residual: bool = False
    tile: Any = None
    sms: int = H200
    head_dim: int | None = None
    half_split: bool = False
    sequences: int = 0
    apart: int = 0


@dataclass(frozen=True, eq=False)
class Joined(WeightMatrix):
    """float32 weights that are passed to kernels as a HiLoMatrix."""


@dataclass(frozen=True)
class Kernel:
    """A variant of an operation. dtype: of x, or "hi_lo".

    weights, out: dtypes of the matrices and of the result; "": dtype. layout: of the matrices.
    gated: whether two matrices, without bias, give the gate and its factor.
    operand: `Operand` in which x is stored instead of floats. alike: name of a kernel that gives
    the same bits. alone: whether a row has the same bits alone and among other rows, with any tile.
    """

    name: str
    operation: Operation
    variant: str
    dtype: str = "float32"
    weights: str = ""
    out: str = ""
    layout: str = "NK"
    gated: bool = False
    operand: Operand | None = None
    alike: str = ""
    alone: bool = True

    @property
    def capability(self) -> int:
        if self.variant == "wgmma":
            return HOPPER_CAPABILITY
        return MMA_CAPABILITY if self.variant.startswith("mma") else 0

    @property
    def stored(self) -> Any:
        """The NumPy dtype of the result."""
        return DTYPES.get(self.out or self.dtype, np.float32)

    @property
    def multiple(self) -> int:
        """The number of which K and N must be multiples."""
        return 8 if self.operation is not LINEAR_OP and self.capability else 1

    @property
    def asynchronous(self) -> bool:
        """Whether the kernel copies slices while it multiplies earlier ones, also when emulated."""
        return self.variant == "mma_tiles" or self.multiple > 1

    def may_be_in_place(self, given: Given) -> bool:
        """Whether the residual may be the output."""
        own = self.operation is not RMSNORM_FFN and self.out != HI_LO
        return own and given.get("residual") is not None

    def matrix(self, seed: int, K: int, N: int, size: float = 1.0) -> WeightMatrix:
        values = plain.normal(seed, N, K) * np.float32(size)
        if self.operation is GEMM:  # mean 0 keeps long sums small, as tensor cores truncate sums
            values -= np.float32(0.5)
        values /= np.float32(math.sqrt(K))
        if self.layout == "KN":
            values = np.ascontiguousarray(values.T)
        dtype = self.weights or self.dtype
        kind, stored = (Joined, "float32") if dtype == HI_LO else (WeightMatrix, dtype)
        return kind.quantize(values, stored, self.layout)

    def made(self, case: Case) -> Given:
        """Create the operation's inputs in host memory."""
        M, K, N = case[:3]
        rows = (case.sequences, M // case.sequences) if case.sequences else (M,)
        x = plain.normal(0, *rows, K)
        if self.dtype == HI_LO:
            x -= np.float32(0.5)
            x[len(x) // 2] = 0  # a row of zeros
            x[..., K // 2] *= 100  # a column of outliers
        if self.operand and self.operand.rounded:
            x = rounded_to_float16(x)
        x = x.astype(DTYPES.get(self.dtype, np.float32))
        if case.apart:
            apart = np.full((*rows, K + case.apart), np.nan, x.dtype)
            apart[..., :K] = x
            x = apart[..., :K]
        ffn = self.operation is RMSNORM_FFN
        norm = case.norm or self.operation in (RMSNORM_MATMUL, RMSNORM_FFN)
        everything: Given = {
            "x": x,
            "w": self.matrix(1, K, N),
            # size 4.0: FP8 scales differ from the scales of w
            "up": self.matrix(6, K, N, 4.0) if ffn or self.gated else None,
            "bias": plain.normal(2, N) if case.bias and not self.gated else None,
            "gamma": plain.normal(3, K).astype(x.dtype) if norm else None,
            "beta": plain.normal(4, K) if norm else None,
            "residual": None,
        }
        if case.residual:
            everything["residual"] = plain.normal(5, *rows, K if ffn else N).astype(self.stored)
        return {name: everything[name] for name in self.names if name in everything}

    @property
    def names(self) -> list[str]:
        """Names of the inputs, as in `Given`."""
        names = [entry.name for entry in self.operation.contract.inputs]
        return [NAMES.get(name, name) for name in names]

    def inputs(self, given: Given) -> tuple[Any, ...]:
        return tuple(given.get(name) for name in self.names)

    def attrs(self, case: Case) -> dict[str, Any]:
        """Return the options of this case that the operation and its reference share."""
        known: dict[str, Any] = {"gelu": case.gelu, "eps": EPS, "start": START, "theta": THETA}
        known |= {"head_dim": case.head_dim, "half_split": case.half_split}
        return {name: value for name, value in known.items() if name in self.operation.options}

    def __call__(
        self, where: str, given: Given, case: Case, in_place: bool = False, away: Sequence[str] = ()
    ) -> Array:
        """Run the kernel; return its result. No input may change.

        A GPU runs it twice and must give the same bits. in_place: the residual is the output. away:
        names of arrays that begin one element after a multiple of 512 bytes.
        """
        with running_on(where, case.sms) as cp, self.forced(case):
            cupy_with(self.capability)
            runs = range(1 if where != "gpu" else 2)
            found = [self.run(cp, given, case, in_place, away) for _ in runs]
        assert_same_bits(found[0], found[-1])
        return found[0]

    def run(self, cp: Any, given: Given, case: Case, in_place: bool, away: Sequence[str]) -> Array:
        there = {name: self.uploaded(cp, name, each, away) for name, each in given.items()}
        shape = (*given["x"].shape[:-1], case.N)
        out = there["residual"] if in_place else self.poisoned(cp, shape)
        if "out" in away:
            out = moved(np.full(shape, np.nan, np.float32), 1)
        inputs = (arrays_of(name, each) for name, each in there.items() if each is not out)
        kept = [a for arrays in inputs for a in arrays.values() if a.flags.c_contiguous]
        before = [array.get() for array in kept]
        chosen: dict[str, Any] = {"variant": self.variant}
        if self.operand:
            of_wgmma = self.variant == "wgmma"
            chosen = {"operand": self.operand, **({"decoding": True} if of_wgmma else chosen)}
        bound = self.operation.bind(self.inputs(there), out, **self.attrs(case), **chosen)
        assert bound.run() is out
        for array, old in zip(kept, before, strict=True):
            assert_same_bits(array.get(), old)
        if self.operation is RMSNORM_FFN and case.residual:
            assert_same_bits(bound.extra[0].get(), summed(given))
        return np.asarray(out.get())

    def uploaded(self, cp: Any, name: str, given: Any, away: Sequence[str] = ()) -> Any:
        upload = partial(moved, offset=1) if name in away else cp.asarray
        if isinstance(given, Joined):
            return HiLoMatrix.from_float32(given.data).mapped(cp.asarray)
        if name == "w" and self.operation is MATMUL_OP:
            return upload(given.data)
        if name == "x" and self.dtype == HI_LO:
            return HiLoMatrix.from_float32(given).mapped(cp.asarray)
        if name == "x" and self.operand:
            dtype, width, _, rounded, _ = self.operand
            return cp.asarray(as_operand(given, dtype, width, rounded))
        if name == "x" and not given.flags.c_contiguous:
            return cp.asarray(given.base)[..., : given.shape[-1]]
        return given if given is None else mapped(upload, given)

    def poisoned(self, cp: Any, shape: tuple[int, ...]) -> Any:
        if self.out == HI_LO:
            parts = cp.full((2, *shape), np.nan, "float16")
            return HiLoMatrix.empty(shape, 2.0**11, parts)
        return cp.full(shape, np.nan, self.stored)

    @contextmanager
    def forced(self, case: Case) -> Iterator[None]:
        """Make the kernel use the tile or layout of this case, unless it is None."""
        tile, key = case.tile, (self.operation.name, self.variant)
        if tile is None:
            yield
            return
        module, name, option = CHOOSERS[key]
        if key == ("linear", "mma") and not tile.loop:
            tile = tile._replace(warps=linear_mma.splits(case.K)[0])
        found: Any = lambda *_, **__: tile  # noqa: E731
        if option:
            found = partial(getattr(module, name), **{option: tile})
        clear = getattr(getattr(module, "geometry", None), "cache_clear", lambda: None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, name, found)
            clear()
            try:
                yield
            finally:
                clear()

    def exact(self, given: Given, case: Case) -> Array:
        """Return the result of the reference in float64."""
        if self.operation is RMSNORM_FFN and case.residual:
            given = given | {"x": summed(given), "residual": None}
        if self.operation is MATMUL_OP:
            given = given | {"w": given["w"].dequantized()}
        named = [name for name in self.names if given.get(name) is not None]
        inputs = self.inputs(given)[: self.names.index(named[-1]) + 1]
        return plain.exact(self.operation.name, *inputs, **self.attrs(case))

    def plainly(
        self, given: Given, case: Case, xp: Any = np, multiply: Any = plain.product
    ) -> Array:
        """Compute the result in float32, rounded to the stored dtype.

        multiply: function for matrix products. xp: NumPy or CuPy.
        """
        x, bias, before = given["x"], given.get("bias"), given.get("residual")
        if self.operation in (RMSNORM_MATMUL, RMSNORM_FFN):
            h = summed(given) if case.residual else x
            x = rms_normed(h, given["gamma"])
        elif given.get("gamma") is not None:
            x = plain.layernorm(x, given["gamma"], given["beta"], EPS)
        x = xp.asarray(x.astype(np.float32))
        y = multiply(x, xp.asarray(given["w"].dequantized()), xp)
        if given.get("up") is not None:
            up = multiply(x, xp.asarray(given["up"].dequantized()), xp)
            y = plain.gelu(y, xp) if case.gelu else y / (np.float32(1) + xp.exp(-y))
            return self.rounded(y * up)
        y = y if bias is None else y + xp.asarray(bias)
        attrs = self.attrs(case)
        y = plain.gelu(y, xp) if attrs.get("gelu") else y
        y = y if before is None else xp.asarray(before.astype(np.float32)) + y
        if size := attrs.get("head_dim"):
            heads = on_host(y).reshape(*y.shape[:-1], -1, size)
            y = plain.rope(heads, START, THETA, case.half_split).reshape(y.shape)
        return self.rounded(y)

    def rounded(self, y: Any) -> Array:
        """Round y to the stored dtype; return it as float32."""
        return on_host(y).astype(self.stored).astype(np.float32)

    def assert_right(self, got: Array, given: Given, case: Case, where: str = "") -> None:
        """Assert that `got` is as accurate as sequential float32 sums, with the given terms of x.

        On a GPU, GEMMs of 16-bit inputs with float32 results may instead be as inaccurate as sums
        that tensor cores truncate: no rounding to 16 bits hides the difference.
        """
        assert got.dtype == self.stored
        xp = cupy if where == "gpu" else np
        truth, expected = self.exact(given, case), self.plainly(given, case, xp)
        allowed = 0.0
        narrow = self.dtype not in (HI_LO, "float32")
        if self.operation is GEMM and narrow and self.out == "float32" and where == "gpu":
            cut = self.plainly(given, case, xp, plain.tensor_core_product)
            expected = max(expected, cut, key=lambda y: float(np.abs(y - truth).max()))
        if self.operation is LINEAR_OP and self.capability and self.weights == "bfloat16":
            x = given["x"]
            if case.norm:
                x = plain.layernorm(x, given["gamma"], given["beta"], EPS)
            allowed = plain.rounding_of_bfloat16_terms(x, given["w"].dequantized())
        plain.assert_as_accurate(got.astype(np.float32), truth, expected, allowed)


def on_host(array: Any) -> Array:
    return np.asarray(array if isinstance(array, np.ndarray) else array.get())


def rows_of(given: Given, rows: slice) -> Given:
    """Return the inputs for some rows of x."""
    some = {name: given[name][rows] for name in ("x", "residual") if given.get(name) is not None}
    return given | some


def summed(given: Given) -> Array:
    """Return x + residual, rounded to the dtype of x."""
    both = given["x"].astype(np.float32) + given["residual"].astype(np.float32)
    return np.asarray(both.astype(given["x"].dtype))


def rms_normed(h: Array, gamma: Array) -> Array:
    """Compute RMSNorm in float32, adding term by term, then round to the dtype of h."""
    w = h.astype(np.float32)
    mean = plain.running_sum(w * w) / np.float32(h.shape[-1])
    normed = w / np.sqrt(mean + np.float32(EPS)) * gamma.astype(np.float32)
    return np.asarray(normed.astype(h.dtype))


def use_variant(patch: pytest.MonkeyPatch, n: int) -> None:
    """Let decoding steps use variant n of `linear` and `linear_qkv`."""
    patch.setattr(LINEAR, "_decoding", lambda c, operation: (operation.variants[n],))


# --- kernels --------------------------------------------------------------------------------------


def linears() -> Iterator[Kernel]:
    for weights in (*WEIGHTS, HI_LO):
        for variant in ("matvec", "mma", "mma_tiles", "tiles"):
            if weights != HI_LO or variant.startswith("mma"):
                alike = f"linear-mma-{weights}" if variant == "mma_tiles" else ""
                name = f"linear-{variant}-{weights}"
                yield Kernel(name, LINEAR_OP, variant, weights=weights, alike=alike)
    for weights in ("float16", "bfloat16", *FP8):
        for rounded in (False, True) if weights in ("float16", FP8_E4M3) else (False,):
            name = f"linear-wgmma-{weights}{'-rounded' * rounded}"
            order = linear_wgmma.operand(weights, rounded)
            alike = f"linear-mma_tiles-{weights}"
            yield Kernel(name, LINEAR_OP, "wgmma", weights=weights, operand=order, alike=alike)
            order, name = order._replace(width=0), name.replace("wgmma", "terms")
            alike = f"linear-mma-{weights}"
            yield Kernel(name, LINEAR_OP, "mma_tiles", weights=weights, operand=order, alike=alike)


def gemms() -> Iterator[Kernel]:
    outs = [(dtype, out) for dtype in ("bfloat16", "float16") for out in (dtype, "float32")]
    outs += [(HI_LO, "float32"), (HI_LO, HI_LO)]
    for variant, (dtype, out) in product(("mma", "wgmma"), outs):
        yield Kernel(f"gemm-{variant}-{dtype}-to-{out}", GEMM, variant, dtype, out=out)
    for variant, weights, out in product(("mma", "wgmma"), FP8, ("float16", "float32")):
        yield Kernel(f"gemm-{variant}-{weights}-to-{out}", GEMM, variant, "float16", weights, out)
    for variant, dtype in product(("mma", "wgmma"), ("bfloat16", "float16")):
        yield Kernel(f"gated-{variant}-{dtype}", GEMM, variant, dtype, gated=True)


def after_rmsnorm() -> Iterator[Kernel]:
    """Yield kernels with a fused RMSNorm. `mma` takes 16-bit x; `wgmma` also takes no FP8."""
    variants = ("matvec", "mma", "unfused", "wgmma")
    for dtype, weights, layout, variant in product(DTYPES, ("", *FP8), ("KN", "NK"), variants):
        if variant in ("mma", "wgmma") and (dtype == "float32" or (variant == "wgmma" and weights)):
            continue
        for operation in (RMSNORM_MATMUL, RMSNORM_FFN):
            name = f"{operation.name}-{variant}-{weights or 'own'}-{dtype}-{layout}"
            yield Kernel(name, operation, variant, dtype, weights, layout=layout, alone=False)


def all_kernels() -> Iterator[Kernel]:
    yield from linears()
    yield from gemms()
    for variant in ("naive", "tiled", "coarsened", "registers"):
        name, alone = f"matmul-{variant}", variant != "registers"
        yield Kernel(name, MATMUL_OP, variant, layout="KN", alone=alone)
    yield from after_rmsnorm()


KERNELS = {kernel.name: kernel for kernel in all_kernels()}


# --- tiles and layouts for the emulator: small, so that matrices have whole and partial tiles -----


# width, split, steps, columns, groups, loop, blocks, rows
ROUNDS = linear_matvec.MatvecLayout(8, 2, 1, 3, 2, True, 1, 2)  # two trips along K, many groups
SMALL = linear_matvec.MatvecLayout(4, 3, 1, 2, 2, False, 1, 1)
LONG = linear_matvec.MatvecLayout(4, 1, 1, 2, 2, True, 1, 1)  # a row exceeds the registers
# columns, flight, loop, warps, blocks, rows
LOOP = linear_mma.MmaLayout(16, 1, True, 2, 1, 2)
ODD_LOOP = linear_mma.MmaLayout(5, 1, True, 1, 1, 8)
WIDE = linear_mma.MmaLayout(19, 1, False, 1, 1, 4)
TALL = WIDE._replace(rows=16)
ODD, EVEN = MmaLinearTile(48, 64, (1, 4), 2), MmaLinearTile(32, 64, (2, 2), 3)
# Odd numbers of fragments side by side, in groups of four, two and one; warps along both axes.
NARROW = MmaGemmTile(16, 72, (1, 1), 64, 3, 2)
SQUARE = MmaGemmTile(64, 48, (2, 2), 64, 3, 1)
BROAD = MmaGemmTile(32, 128, (1, 2), 128, 3, 1)
PARTS = MmaGemmTile(32, 40, (2, 1), 64, 3, 2)  # for hi/lo matrices
PAIRS = MmaGemmTile(32, 64, (1, 2), 128, 3, 1)
# TINY: two warps share K and a row's squares. UNEVEN: four warps share rows and columns, each has
# an odd number of fragments per row, and some threads are idle when weights are copied.
TINY = RmsnormTile(16, 32, (1, 1, 2), 32, 3, 1)
UNEVEN = RmsnormTile(32, 48, (2, 2, 1), 64, 2, 1)
GROUPED = [(tile, tile.groups * n) for tile in MATMUL.TILES for n in (1, 2)]
TILES_ON_CPU: dict[str, Sequence[Any]] = {
    "linear-matvec-*": (SMALL, SMALL._replace(rows=4), SMALL._replace(rows=16, groups=1)),
    "linear-mma-*": (None, TALL, ODD_LOOP),
    "linear-mma_tiles-*": (None, *linear_mma_tiles.ALONE),
    "linear-tiles-*": (*linear_tiles.TILES, None),
    "gemm-mma-bfloat16-*": (NARROW, SQUARE, BROAD),
    "gemm-mma-hi_lo-*": (PARTS, PAIRS),
}


TILES_ON_GPU: dict[str, Sequence[Any]] = {
    "linear-tiles-*": linear_tiles.TILES,
    "gemm-mma-*16-*": (*gemm_mma.TILES, *gemm_mma.SMALL_TILES),
    "gemm-mma-hi_lo-*": gemm_mma.HI_LO_TILES,
    "gated-mma-*": gemm_mma.GATED_TILES,
    "gemm-wgmma-*16-*": gemm_wgmma.TILES,
    "gemm-wgmma-hi_lo-*": gemm_wgmma.HI_LO_TILES,
    "matmul-registers": GROUPED,
    "rmsnorm_*-mma-*": rmsnorm_mma.TILES,
    "rmsnorm_matmul-wgmma-*": rmsnorm_wgmma.MATMUL_TILES,
    "rmsnorm_ffn-wgmma-*-KN": rmsnorm_wgmma.FFN_TILES["KN"],
    "rmsnorm_ffn-wgmma-*-NK": rmsnorm_wgmma.FFN_TILES["NK"],
}


def tiles_of(where: str, kernel: Kernel, case: Case) -> Iterator[Any]:
    """Yield the tiles or layouts to try; None stands for the kernel's own choice."""
    if where == "gpu" and kernel.variant == "wgmma" and kernel.operand:
        yield from _of_decoding_by_wgmma(kernel, case)
        return
    if kernel.variant == "matvec" and not case.norm:
        weight = linear_mma.BYTES.get(kernel.weights, 1)
        cut = linear_matvec.layout(case.M, case.N, case.K, weight, case.sms)
        fits = cut.width >= linear_matvec.TILE_WIDTH
        some = linear_matvec.TILES[:: 1 if where == "gpu" else -2]
        yield from (None, *(cut._replace(tile=tile) for tile in some if fits))
        return
    table = TILES_ON_CPU
    if where == "gpu":
        table = TILES_ON_GPU
        yield None
    if where == "gpu" and kernel.variant == "mma_tiles":
        yield from _of_decoding(kernel, case)
    for name, tiles in table.items():
        if fnmatchcase(kernel.name, name):
            yield from tiles


def _of_decoding(kernel: Kernel, case: Case) -> Iterator[MmaLinearTile]:
    """Yield tiles of variant `mma_tiles`, with clusters of blocks."""
    yield ODD
    dtype = kernel.weights
    clusters = (1, 2, 3, 6, 8) if compute_capability() >= 90 else (1,)
    for tile, cluster in product(linear_mma_tiles.TILES, clusters):
        pairs = math.prod(tile.warps) % 4 == 0  # whether the threads copy whole groups of rows
        if dtype == HI_LO and not pairs:
            continue
        chunks = 2 if cluster > 1 and dtype in DTYPES and pairs else 1
        one = tile._replace(cluster=cluster, chunks=chunks)
        if linear_mma_tiles.shared_bytes(one, case.K, dtype) <= H200_LIMITS["max_shared"] - 1024:
            yield one


# groups, splits, shares, blocks of a WgmmaLinearTile
WGMMA_TILES = (
    *((1, 1, 1, 2), (2, 1, 1, 1), (1, 2, 1, 1), (1, 4, 1, 3), (2, 8, 1, 1), (1, 1, 4, 1)),
    *((2, 2, 2, 1), (3, 1, 1, 1), (3, 2, 2, 1), (1, 3, 1, 1), (1, 6, 1, 2), (3, 6, 1, 1)),
)


def _of_decoding_by_wgmma(kernel: Kernel, case: Case) -> Iterator[linear_wgmma.WgmmaLinearTile]:
    assert kernel.operand
    rows, tried = max(4, power_of_two(min(case.M, 64))), 0
    for groups, parts, shares, blocks in WGMMA_TILES:
        if parts > linear_mma.splits(case.K)[0]:
            continue
        of_tile = max(rows, power_of_two(-(-parts // groups)))  # every block finishes some rows
        tile = linear_wgmma.WgmmaLinearTile(of_tile, groups, parts, shares, blocks)
        sizes = case.M, (case.N,), case.K, kernel.weights
        of = linear_wgmma.WgmmaProduct(*sizes, rounded=kernel.operand.rounded)
        divides = parts > 1 and groups < linear_wgmma.MAX_GROUPS
        for teams in (1, 2) if divides and of_tile == linear_wgmma.OPERAND_ROWS else (1,):
            one = tile._replace(teams=teams)
            if of.block_bytes(one) <= H200_LIMITS["max_shared"]:
                tried += 1
                yield one
    assert tried >= 3


# --- cases, by the names of kernels ---------------------------------------------------------------


Table = Mapping[str, Sequence[Case]]
ENDS: Any = {"gelu": True, "residual": True}
FULL: Any = {"norm": True, **ENDS}
SIZES = [Case(65, 65, 36, bias=False), Case(33, 67, 35, sequences=3), Case(1, 1, 1)]
RAGGED = Case(17, 72, 136, sms=2)  # for gemm
SPLIT = Case(37, 264, 88, tile=PARTS, sms=2)  # for hi/lo matrices
PART = Case(25, 176, 37, **ENDS, tile=ODD)
EVENLY = Case(33, 176, 32, **ENDS, tile=EVEN)
TURNED = Case(21, 144, 80, head_dim=16, sequences=3, apart=16, tile=TINY)
# The kernels of a variant take the cases of a line in turn.
ON_CPU: Table = {
    "linear-matvec-*": [
        Case(9, 264, 7, residual=True, tile=SMALL._replace(width=8, rows=4)),
        Case(3, 784, 31, norm=True, tile=ROUNDS, sms=2), Case(3, 48, 21, **FULL),
        Case(1, 33, 5, gelu=True),
        Case(1, 1100, 9, norm=True, residual=True, tile=LONG, sms=2)],
    "linear-mma-*": [
        Case(1, 2064, 9, gelu=True, tile=WIDE), Case(3, 784, 31, norm=True, tile=LOOP, sms=2),
        Case(3, 1104, 37, norm=True, tile=ODD_LOOP, sms=2), Case(2, 1168, 19, residual=True),
        Case(3, 48, 21, **FULL), Case(17, 264, 20, norm=True, tile=TALL._replace(flight=2))],
    "linear-mma_tiles-*": [
        EVENLY._replace(K=1168), PART, PART, EVENLY, PART, PART._replace(tile=EVEN)],
    "linear-terms-*": [PART, PART._replace(tile=EVEN)],
    "linear-tiles-*": [
        Case(37, 24, 40, residual=True), Case(33, 33, 35, residual=True), Case(33, 1, 70),
        Case(37, 24, 41, residual=True), Case(34, 8, 36, **ENDS, sequences=2)],
    "gemm-mma-*16-to-*": [
        RAGGED._replace(**ENDS, tile=BROAD), RAGGED._replace(residual=True, tile=SQUARE),
        RAGGED._replace(bias=False, tile=NARROW),
        Case(130, 200, 72, bias=False, tile=SQUARE, sms=2)],
    "gemm-mma-hi_lo-*": [SPLIT._replace(residual=True), SPLIT._replace(gelu=True),
                         Case(1, 8, 8, residual=True, tile=PARTS)],
    "gemm-*-float8_*-to-float32": [
        Case(37, 72, 136, **ENDS), Case(5, 264, 8, gelu=True)],
    "gated-*mma-*": [Case(70, 72, 136, gelu=True), Case(1, 264, 8)],
    "matmul-*": SIZES,
    "matmul-registers": [
        Case(131, 70, 132, tile=GROUPED[0]), Case(70, 19, 101, tile=GROUPED[-1])],
    "linear-wgmma-*16*": 2 * [Case(5, 256, 72, residual=True)],
    "linear-wgmma-float8_e4m3fn*": [Case(5, 256, 72, residual=True)],
    "gemm-wgmma-*-to-*16": [Case(70, 72, 136, **ENDS)],
    "gemm-wgmma-*-to-float32": 2 * [Case(70, 72, 136, residual=True)],
    "gemm-wgmma-hi_lo-to-hi_lo": [Case(70, 72, 136, gelu=True)],
    "rmsnorm_matmul-wgmma-own-*-KN": [TURNED._replace(M=30, N=128, tile=None)],
    "rmsnorm_ffn-wgmma-own-*-NK": [Case(20, 144, 80, residual=True, apart=8)],
    "rmsnorm_*-unfused-own-float16-KN": [Case(37, 320, 72, tile=UNEVEN)],
    "rmsnorm_matmul-matvec-*-float16-KN": [
        Case(3, 300, 16, head_dim=8, half_split=True, sequences=1, apart=3), Case(5, 33, 17),
        Case(1, 544, 32, head_dim=8)],
    "rmsnorm_matmul-matvec-*-NK": [Case(1, 64, 64, head_dim=32, half_split=True)],
    "rmsnorm_ffn-matvec-own-*-KN": [Case(1, 64, 6, gelu=True)],
    "rmsnorm_ffn-matvec-float8_e4m3fn-*-NK": [Case(3, 48, 80, residual=True)],
    "rmsnorm_ffn-matvec-own-*-NK": [
        Case(1, 2056, 6), Case(2, 520, 33, residual=True), Case(7, 36, 12, residual=True, apart=4)],
    "rmsnorm_matmul-mma-own-*-NK": [TURNED, TURNED],
    "rmsnorm_ffn-mma-float8_*-NK": [TURNED._replace(gelu=True), TURNED],
    "rmsnorm_ffn-mma-own-float16-KN": [
        Case(40, K, 40, residual=True, tile=UNEVEN) for K in (64, 64 * 5 + 8)],
}  # fmt: skip


def over(ends: Sequence[Given], rows: Iterable[int], *shapes: tuple[int, int]) -> list[Case]:
    """Return cases with these numbers of rows and all shapes (K, N); epilogues alternate."""
    sizes = ((M, *shape) for M, shape in product(rows, shapes))
    return [Case(*each, **end) for each, end in zip(sizes, cycle(ends), strict=False)]


ADDED: Any = {"residual": True}
NORMED: Any = {"norm": True, **ADDED}
LLAMA = Case(1, 4096, 512, head_dim=128)
ALL_ENDS = [{"bias": False}, {"gelu": True}, ADDED, ENDS]
FLOAT_ENDS = [{}, {"bias": False}, ADDED, {"bias": False, **ADDED}]
GPT2_SHAPES = [(K, N) for N, K in GPT2]
DECODING = (1, 3, 17, 65, 200)  # numbers of rows
EIGHTS = (8, 8), (264, 2312), (520, 264), (768, 776), (1032, 520)  # K and N for gemm
# For results, and for the bits of all tiles.
ON_GPU: Table = {
    "matmul-*": [*SIZES, *over([{}], (1, 131, 517, 8192), (70, 132), (77, 333), (768, 516))],
    "linear-tiles-*": [
        *ON_CPU["linear-tiles-*"], *over([ENDS, ADDED], (17, 131, 517, 2000), (136, 104), (77, 333),
                                         (1000, 516))],
    "linear-matvec-*": over([FULL, ADDED, NORMED, ENDS], DECODING, (768, 2304), (3072, 768),
                            (1615, 333), (383, 77), (256, 20_001)),
    "linear-mma-[bf]*": over([FULL, ADDED, NORMED], DECODING, (768, 2304), (3072, 768),
                             (1616, 333), (256, 20_001)),
    "linear-terms-*": over([ENDS], DECODING, (768, 2304), (1600, 97)),
    "linear-mma_tiles-*": over([ENDS], DECODING, (768, 2304), (3072, 768), (1600, 97),
                               (768, 20_001)),
    "linear-wgmma-*": over([ENDS], DECODING, (768, 2304), (896, 200), (4096, 100), (64, 40)),
    "gemm-*16-to-*16": [
        *over(ALL_ENDS, (1, 129, 300, 1000), *EIGHTS), *over(ALL_ENDS, (5000,), *EIGHTS[1:2]),
        # With a short K warpgroups do not wait for the ring.
        *over(ALL_ENDS, (3000,), *((K, 2312) for K in (8, 64, 128, 192)))],
    "gemm-*-to-float32": over(FLOAT_ENDS, (1, 129, 300, 1000), *EIGHTS),
    "gemm-*-float8_*-to-float16": over(ALL_ENDS, (1, 129, 300, 1000), *EIGHTS),
    "gated-*": over([{}, {"gelu": True}], (1, 70, 500), (264, 8), (72, 144), (768, 2312)),
    "gemm-*-hi_lo-to-hi_lo": over([{"gelu": True}], (1, 129, 300, 1000), *EIGHTS),
    "rmsnorm_*-*mma-own-*16-*": [
        Case(1, 264, 40, apart=8), Case(333, 1032, 1448), Case(1000, 136, 3032, apart=8)],
}  # fmt: skip
RESULTS_ON_GPU: Table = {  # only for results
    "rmsnorm_matmul-*": [
        Case(M, 272, 384, head_dim=64 * (M > 1) or None, half_split=M in (3, 70), apart=8 * (M > 3))
        for M in (1, 3, 16, 70, 200)
    ],
    "rmsnorm_ffn-*": [
        Case(M, 272, 192, residual=M > 1, apart=8 * (M > 5), gelu=M in (5, 130))
        for M in (1, 5, 33, 130, 300)
    ],
    "linear-m[am]*-[bf]*": over([ADDED], (2, 3), (6400, 1600), (16_384, 40), (256, 50_257)),
    "gemm-*-bfloat16-to-bfloat16": over(ALL_ENDS, (17, 1024), *GPT2_SHAPES),
    "gemm-*-float16-to-*16": over(ALL_ENDS, (128, 8192), *GPT2_SHAPES),
    "rmsnorm_*-matvec-own-float16-*": [Case(3, 333, 77), Case(2, 12_000, 8)],
    "rmsnorm_matmul-matvec-own-float16-*": [LLAMA],
    "rmsnorm_matmul-matvec-float8_e4m3fn-bfloat16-*": [LLAMA._replace(half_split=True)],
    "rmsnorm_*-mma-own-float16-*": [Case(M, 4096, 4096, head_dim=128) for M in (16, 500)],
}


LENGTHS = [Case(5, K, 8) for K in (1, 2, 4, 7, 8, 31, 32, 63, 64, 76, 128, 130)]
BAND = Case(32 * 17 + 1, 3, 70)  # more rows than a band of tiles
SLICES: Table = {  # the first slice of K is full or not
    "linear-tiles-float32": [*LENGTHS, BAND],
    "linear-tiles-*16": LENGTHS,
    "matmul-registers": [*LENGTHS, BAND],
}
UP_TO: Table = {
    "linear-matvec-bfloat16": [Case(6, 784, 40, norm=True, tile=ROUNDS)],
    "linear-tiles-*": [Case(70, 72, 100)],
    "gemm-mma-bfloat16-to-bfloat16": [Case(100, 240, 96, bias=False, tile=SQUARE, sms=1)],
    "matmul-*": [Case(70, 70, 70)],
}
UP_TO_ON_GPU: Table = {
    "linear-tiles-*": [Case(70, 72, 100)],
    "matmul-*": [Case(70, 70, 70)],
    "gemm-*-*16-to-*": [Case(600, 480, 480, residual=True)],
    "rmsnorm_*-mma-own-float16-KN": [Case(600, 480, 480)],
    "rmsnorm_*-unfused-own-float16-KN": [Case(600, 480, 480)],
}
TILED: Table = {
    "linear-mma-*": [Case(17, 264, 14, **FULL)],
    "linear-matvec-*": [Case(20, 528, 37, **ENDS)],
    "linear-mma_tiles-*": [Case(20, 1168, 37, gelu=True)],
    "linear-tiles-*": [Case(67, 72, 104, **ENDS)],
    "gemm-mma-bfloat16-to-bfloat16": [Case(40, 136, 80, bias=False)],
    "gemm-mma-hi_lo-to-float32": [Case(40, 136, 80, bias=False)],
}
EDGES: Table = {
    "linear-mma-*": [Case(37, 32, 44, **ENDS)],
    "linear-mma_tiles-*": [Case(37, 32, 44, **ENDS, tile=ODD)],
    "linear-tiles-*": [Case(37, 32, 44, **ENDS)],
    "matmul-*": [Case(37, 21, 44)],
    "gemm-mma-bfloat16-to-bfloat16": [Case(37, 32, 48, residual=True, tile=NARROW)],
    "gemm-wgmma-bfloat16-to-bfloat16": [Case(37, 32, 48, residual=True)],
}
REFERENCES: Table = {
    "linear-matvec-float8_e4m3fn": [
        Case(2, 5, 3, **ends) for ends in ({}, ENDS, {"norm": True}, FULL)],
    "gemm-mma-hi_lo-to-float32": [Case(6, 4, 5, **ENDS, sequences=2), Case(2, 4, 5, bias=False)],
    "matmul-naive": [Case(3, 5, 4), Case(3, 5, 4, bias=False)],
    "rmsnorm_matmul-matvec-own-float32-*": [
        Case(3, 6, 8, head_dim=4), Case(6, 6, 8, head_dim=4, half_split=True, sequences=2)],
    "rmsnorm_ffn-matvec-own-float32-*": [Case(2, 5, 3), Case(4, 5, 3, sequences=2)],
}  # fmt: skip


class Found(NamedTuple):
    """A kernel and a case of one line of a table, and their places in this line.

    alike: kernels of the line with the same operation and variant. nth: place among these.
    """

    kernel: Kernel
    case: Case
    place: int
    nth: int
    alike: int


def found_in(table: Table) -> Iterator[Found]:
    """Yield the kernels that a table names, with their cases."""
    for name, cases in table.items():
        lists: dict[Any, list[Kernel]] = {}
        for kernel in KERNELS.values():
            if fnmatchcase(kernel.name, name):
                lists.setdefault((kernel.operation.name, kernel.variant), []).append(kernel)
        assert lists, name
        for alike, (place, case) in product(lists.values(), enumerate(cases)):
            for nth, kernel in enumerate(alike):
                yield Found(kernel, case, place, nth, len(alike))

"""The number of threads per row of a norm, and the compilation of the kernels by NVRTC."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
from compile_for import compile_for
from hypothesis import example, given
from hypothesis import strategies as st

from gpt2block import InputError, KernelError
from gpt2block.cuda import kernels
from gpt2block.cuda.kernels import STORAGE, Geometry
from gpt2block.ops.call import Call
from gpt2block.ops.engines.rows import LONGEST_IN_REGISTERS, VALUES, share
from gpt2block.ops.layernorm import HELD, narrow_geometry, row_shape
from gpt2block.ops.layernorm_gelu import OPERATION as LAYERNORM_GELU
from gpt2block.ops.operation import Operation
from gpt2block.ops.rmsnorm import choose_geometry
from gpt2block.ops.rope import FILE as ROPE
from gpt2block.ops.softmax import OPERATION as SOFTMAX
from tests.compiling import Job, assert_clean
from tests.devices import H200, running_on
from tests.launches import geometry_of, stub
from tests.norms import DTYPES, EPS

MANY = 10**6  # rows
ROWS, NARROW, RMS = "norms/layernorm_rows.cu", "norms/layernorm_narrow.cu", "norms/rmsnorm.cu"


class Shared(NamedTuple):
    """The division of rows. each: rows per thread, one after the other. grid: number of blocks."""

    width: int  # values per load
    threads: int  # threads per row
    held: int  # loads per thread; 0: rows too long for registers are read again
    rows: int  # rows per block at the same time
    each: int
    grid: int
    block: int  # threads per block


def of_six(itemsize: int, rows: int, C: int, width: int, sms: int) -> Shared:
    """Return the division of layernorm 6; blocks have at least 128 threads."""
    width, threads, held = row_shape(C, itemsize, itemsize * width)
    together = max(1, 128 // threads)
    return Shared(width, threads, held, together, 1, -(-rows // together), threads * together)


def of_share(rows: int, C: int, width: int, sms: int) -> Shared:
    """Return the division of LayerNorm with GELU, and of softmax."""
    shape = share(rows, C, width, sms)
    assert (shape.threads - 1) * shape.held * width < C + 32 * VALUES  # no warp is idle
    return Shared(width, shape.threads, shape.held, shape.rows, 1, shape.grid, shape.block)


def of_geometry(geometry: Callable[..., Geometry], *sizes: int) -> Shared:
    how = geometry(*sizes)
    at = {name.partition("_")[2]: int(value) for name, value in how.defines}
    width, threads, held, rows = (at[name] for name in ("WIDTH", "THREADS", "VECTORS", "ROWS"))
    return Shared(width, threads, held, rows, at.get("EACH", 1), how.grid[0], how.block[0])


WAYS: dict[str, Callable[[int, int, int, int], Shared]] = {
    "6-float32": partial(of_six, 4),
    "6-float16": partial(of_six, 2),
    "rmsnorm": partial(of_geometry, choose_geometry),
    "share": of_share,
    "narrow": partial(of_geometry, partial(narrow_geometry, False)),
    "narrow-float": partial(of_geometry, partial(narrow_geometry, True)),
}


@pytest.mark.parametrize("way", WAYS)
@given(
    rows=st.integers(1, MANY),
    C=st.integers(1, 70000),
    width=st.sampled_from([1, 2, 4, 8]),
    sms=st.sampled_from([1, 20, H200]),
)
@example(rows=1, C=4096, width=8, sms=H200)
@example(rows=65536, C=4096, width=8, sms=H200)
@example(rows=8192, C=768, width=8, sms=H200)
@example(rows=1, C=16384, width=8, sms=H200)
@example(rows=1, C=16385, width=8, sms=H200)
def test_a_row_is_shared_out_whole(way: str, rows: int, C: int, width: int, sms: int) -> None:
    """Only the last load of a thread can be outside of the row."""
    if way in ("share", "narrow", "narrow-float"):
        C = 1 + (C - 1) % LONGEST_IN_REGISTERS
    width = math.gcd(width, C)
    at = WAYS[way](rows, C, width, sms)
    step = at.threads * at.width
    if at.held:
        assert (at.held - 1) * step < C <= at.held * step
        assert at.held * at.width <= VALUES
    else:
        assert C > LONGEST_IN_REGISTERS or way == "6-float32"
    assert at.threads in (1, 2, 4, 8, 16) or at.threads % 32 == 0
    assert at.block == at.threads * at.rows <= 1024
    assert at.block % 32 == 0
    assert (at.grid - 1) * at.rows * at.each < rows <= at.grid * at.rows * at.each
    if "narrow" in way:  # a row has the same bits among any number of rows
        one = WAYS[way](1, C, width, sms)
        assert one._replace(each=at.each, grid=at.grid) == at
        held = at.held * width * (2 + at.each * (1 if way == "narrow-float" else 0.5))
        assert at.each == 1 or held <= HELD


def test_rows_that_do_not_fit() -> None:
    with pytest.raises(InputError, match=r"rows of 20,000 values: .* use another variant"):
        share(3, 20_000, 4, H200)
    with pytest.raises(InputError, match="32 threads hold 1,024: use a larger block"):
        share(3, 1028, 4, H200, block=32)
    with pytest.raises(InputError, match=r"rows of 16,392 values: .* use another variant"):
        narrow_geometry(False, 5, 16392, 8, H200)
    with pytest.raises(InputError, match="64 threads hold 2,048: use a larger block"):
        choose_geometry(5, 2056, 8, H200, block=64)
    assert choose_geometry(5, 2048, 8, H200, block=64).block == (64,)


# --- with NVRTC -----------------------------------------------------------------------------------


def turns(i: int) -> tuple[str, int, str]:
    """Return a dtype, values of its widest load, and an old or a new GPU."""
    dtype = list(DTYPES)[i % 3]
    return dtype, 16 // np.dtype(DTYPES[dtype]).itemsize, ("sm_75", "sm_90")[i % 2]


def six() -> Iterator[tuple[Job, str]]:
    for i, C in enumerate((3, 768, 1024, 8191, 8192, 16384, 50000)):
        dtype, widest, arch = turns(i)
        shape = of_six(16 // widest, 1, C, widest, H200)
        names = "LN_WIDTH", "LN_THREADS", "LN_VECTORS", "LN_ROWS"
        yield (ROWS, arch, (*STORAGE[dtype], *zip(names, shape[:4], strict=True))), ""


def narrow() -> Iterator[tuple[Job, str]]:
    """Yield the kernels before 16-bit and before hi/lo products, each compiled alone."""
    for i, (rows, C) in enumerate(((1, 768), (MANY, 768), (MANY, 4096), (1, 16384), (1, 16383))):
        for j, (float_x, hi_lo) in enumerate(((False, False), (True, False), (True, True))):
            how = narrow_geometry(float_x, rows, C, math.gcd(C, 8), H200, hi_lo)
            stored = kernels.stored_as("float16" if hi_lo else "bfloat16")
            arch = ("sm_80", "sm_90")[(i + j) % 2]
            yield (NARROW, arch, (*stored, *how.defines)), how.kernel


def rmsnorm() -> Iterator[tuple[Job, str]]:
    first = (1, 16384), (MANY, 16384), (1, 16383)
    for i, (rows, C) in enumerate((*first, (MANY, 1023), (MANY, 7), (1, 16386), *first)):
        dtype, widest, arch = turns(i + i // 6)
        geometry = choose_geometry(rows, C, math.gcd(C, widest), H200)
        yield (RMS, arch, (*STORAGE[dtype], *geometry.defines)), ""


LAUNCHED: list[tuple[Operation, str, dict[str, Any]]] = [
    (LAYERNORM_GELU, "sm_75", {"rows": 1, "C": 16384}),
    (LAYERNORM_GELU, "sm_90", {"rows": 1, "C": 16383}),
    (LAYERNORM_GELU, "sm_120", {"rows": MANY, "C": 1024}),
    (LAYERNORM_GELU, "sm_75", {"rows": MANY, "C": 1023}),
    (LAYERNORM_GELU, "sm_90", {"rows": 1, "C": 1}),
    (SOFTMAX, "sm_75", {"rows": 1, "T": 16383, "causal": False}),
    (SOFTMAX, "sm_90", {"rows": 1, "T": 16384, "causal": False}),
    (SOFTMAX, "sm_90", {"rows": 1, "T": 16383, "causal": True}),
    (SOFTMAX, "sm_90", {"rows": MANY, "T": 1024, "causal": False}),
    (SOFTMAX, "sm_90", {"rows": MANY, "T": 1, "causal": True}),
]


def launched() -> Iterator[tuple[Job, str]]:
    for operation, arch, sizes in LAUNCHED:
        arrays = dict.fromkeys(("x", "gamma", "beta", "scores", "out"), stub())
        variant, options = operation.variant("rows"), {"eps": EPS, "requested": False}
        with running_on("forward", H200):
            job = Call(contract=operation.contract, **arrays, **options, **sizes)
            yield (variant.file, arch, geometry_of(variant, job).defines), ""


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [six, narrow, rmsnorm, launched])
def test_rows_compile_without_spills(jobs: Callable[[], Iterator[tuple[Job, str]]]) -> None:
    files, only = zip(*jobs(), strict=True)
    assert_clean(files, only)


@pytest.mark.parametrize(
    ("file", "constants", "message"),
    [
        (ROWS, (("LN_WIDTH", 8),), "16 bytes"),
        (ROWS, (("LN_WIDTH", 3),), "16 bytes"),
        (ROWS, (("LN_THREADS", 24),), "or a multiple of 32"),
        (ROWS, (("LN_THREADS", 8), ("LN_ROWS", 3)), "whole warps"),
        (RMS, (("RMS_WIDTH", 8),), "16 bytes"),
        (RMS, (("RMS_C", 4098),), "whole vectors"),
        (RMS, (("RMS_THREADS", 24),), "or a multiple of 32"),
        (RMS, (("RMS_THREADS", 8), ("RMS_C", 8)), "whole warps"),
        (RMS, (("RMS_VECTORS", 3),), "fits in its threads' vectors"),
        (RMS, (("RMS_VECTORS", 5),), "needs all of them"),
        (ROPE, (("ROPE_D", 7),), "ROPE_D must be even"),
        (ROPE, (("ROPE_D", 6),), "whole loads"),
        (ROPE, (("ROPE_D", 12), ("ROPE_HALF_SPLIT", 1)), "whole loads"),
        (ROPE, (("ROPE_WIDTH", 8),), "16 bytes"),
    ],
)
def test_constants_that_make_no_sense_do_not_compile(
    file: str, constants: kernels.Defines, message: str
) -> None:
    pytest.importorskip("cupy", reason="compiling needs CuPy and NVRTC")
    with pytest.raises(KernelError, match=message):
        compile_for(file, "sm_80", constants)

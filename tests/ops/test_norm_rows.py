"""The number of threads per row of a norm, and the compilation of the kernels by NVRTC."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
from compile_for import compile_for
from hypothesis import example, given
from hypothesis import strategies as st

from gpt2block import KernelError
from gpt2block.cuda import kernels
from gpt2block.cuda.kernels import Geometry
from gpt2block.ops.engines.rows import LONGEST_IN_REGISTERS, VALUES, share
from gpt2block.ops.layernorm import HELD, narrow_geometry, row_shape
from gpt2block.ops.rmsnorm import choose_geometry
from gpt2block.ops.rope import FILE as ROPE
from tests.devices import H200

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


# --- with NVRTC -----------------------------------------------------------------------------------


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

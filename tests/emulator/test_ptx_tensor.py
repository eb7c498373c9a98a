"""Products of matrices, and their fragments, of the PTX engine against NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from gpt2block.emulator.ptx import nvrtc, parse
from gpt2block.emulator.ptx.engine import launch
from tests.ptx_instructions import LANES, execute

Array = npt.NDArray[Any]
DTYPES: dict[str, Any] = {
    "f16": np.float16, "bf16": ml_dtypes.bfloat16, "tf32": np.float32, "f32": np.float32,
    "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "s8": np.int8, "u8": np.uint8,
    "s32": np.int32, "f64": np.float64,
}  # fmt: skip


def _a_places(bits: int, rows: int, depth: int) -> list[list[tuple[int, int]]]:
    """Return by lane the elements (row, column) of A, as the PTX ISA lists them."""
    per = max(1, 32 // bits)
    count = rows * depth // LANES
    places = []
    for lane in range(LANES):
        g, t = divmod(lane, 4)
        of_lane = []
        for i in range(count):
            register, part = divmod(i, per)
            row = g + 8 * (register % (rows // 8))
            of_lane.append((row, per * t + part + 4 * per * (register // (rows // 8))))
        places.append(of_lane)
    return places


def _b_places(bits: int, depth: int) -> list[list[tuple[int, int]]]:
    return [[(column, row) for row, column in of_lane] for of_lane in _a_places(bits, 8, depth)]


def _c_places(rows: int) -> list[list[tuple[int, int]]]:
    return [
        [(lane // 4 + 8 * (i // 2), lane % 4 * 2 + i % 2) for i in range(rows // 4)]
        for lane in range(LANES)
    ]


def _packed(matrix: Array, places: list[list[tuple[int, int]]]) -> Array:
    """Return rows of registers (register, lane) that hold a matrix."""
    lanes = [np.array([matrix[place] for place in of_lane]) for of_lane in places]
    width = max(4, matrix.dtype.itemsize)
    unsigned = f"u{width}"
    packed: Array = np.array([lane.view(unsigned) for lane in lanes], np.uint64).T
    return packed


def _unpacked(registers: Array, places: list[list[tuple[int, int]]], dtype: Any) -> Array:
    width = max(4, np.dtype(dtype).itemsize)
    values = registers.astype(f"u{width}").T.copy().view(dtype)
    shape = tuple(np.array(places).max((0, 1)) + 1)
    matrix = np.zeros(shape, dtype)
    for of_lane, row in zip(places, values, strict=True):
        for place, each in zip(of_lane, row, strict=True):
            matrix[place] = each
    return matrix


def multiply(opcode: str, a: Array, b: Array, c: Array) -> Array:
    """Return the matrix that mma computes. a, b, c: of the types that the opcode names."""
    (rows, depth), bits = a.shape, 8 * a.dtype.itemsize
    places = _a_places(bits, rows, depth), _b_places(bits, depth), _c_places(rows)
    groups = [_packed(each, place) for each, place in zip((a, b, c), places, strict=True)]
    registers = np.concatenate([np.zeros_like(groups[2]), *groups])[None]
    kinds = "".join(str(len(each)) for each in (groups[2], *groups))
    after = execute(opcode, kinds, registers)[0]
    return _unpacked(after[: len(groups[2])], places[2], c.dtype)


FORMS = [
    *[f"mma.sync.aligned.m16n8k{k}.row.col.f32.{t}.{t}.f32" for t in ("f16", "bf16")
      for k in (8, 16)],
    *[f"mma.sync.aligned.m16n8k{k}.row.col.f16.f16.f16.f16" for k in (8, 16)],
    *[f"mma.sync.aligned.m16n8k{k}.row.col.f32.tf32.tf32.f32" for k in (4, 8)],
    *[f"mma.sync.aligned.m16n8k{k}.row.col.s32.{a}.{b}.s32" for k in (16, 32)
      for a in ("s8", "u8") for b in ("s8", "u8")],
    "mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32",
    "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e5m2.f32",
    "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64",
    "mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64",
]  # fmt: skip


@pytest.mark.parametrize("opcode", FORMS)
def test_products_of_small_integers_are_exact(opcode: str) -> None:
    rows, depth = map(int, opcode.split(".")[3].removeprefix("m").split("n8k"))
    types = [DTYPES[word] for word in opcode.split(".")[6:10]]
    rng = np.random.default_rng(len(opcode))
    low = 0 if "u8" in opcode else -8
    a = rng.integers(low, 9, (rows, depth)).astype(types[1])
    b = rng.integers(low, 9, (depth, 8)).astype(types[2])
    c = rng.integers(-100, 100, (rows, 8)).astype(types[3])
    wanted = a.astype(np.float64) @ b.astype(np.float64) + c.astype(np.float64)
    np.testing.assert_array_equal(multiply(opcode, a, b, c), wanted.astype(types[0]))


@pytest.mark.parametrize(
    ("opcode", "tolerance"),
    [(FORMS[1], 2e-6), (FORMS[3], 2e-6), (FORMS[5], 2e-3), (FORMS[7], 2e-6), (FORMS[17], 2e-6)],
)
def test_products_are_near_the_exact_ones(opcode: str, tolerance: float) -> None:
    rows, depth = map(int, opcode.split(".")[3].removeprefix("m").split("n8k"))
    types = [DTYPES[word] for word in opcode.split(".")[6:10]]
    rng = np.random.default_rng(7)
    a, b, c = (
        rng.standard_normal(shape).astype(dtype)
        for shape, dtype in zip(((rows, depth), (depth, 8), (rows, 8)), types[1:], strict=True)
    )
    if "tf32" in opcode:  # the lower 13 bits are not used
        a, b = ((each.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32) for each in (a, b))
    wanted = a.astype(np.float64) @ b.astype(np.float64) + c.astype(np.float64)
    size = np.abs(a.astype(np.float64)) @ np.abs(b.astype(np.float64)) + np.abs(c)
    found = multiply(opcode, a, b, c).astype(np.float64)
    assert np.abs((found - wanted) / size).max() < tolerance
    assert np.abs(found - wanted).max() > 0


@pytest.mark.parametrize(
    ("c", "products", "wanted"),
    [
        (0.0, [1.0, -(2.0**-24)], 1 - 2**-24),
        (1.0, [2.0**-24], 1.0),  # cut off to f32, not rounded up
        (1.0, [2.0**-24, 2.0**-24], 1 + 2**-23),  # but the terms are kept for 25 bits
        (1.0, [2.0**-26] * 8, 1.0),  # and not for 26
        (-1.0, [-(2.0**-24)] * 3, -1 - 2**-23),
        (0.0, [np.inf, 1.0], np.inf),
        (np.inf, [-np.inf], np.nan),
        (0.0, [], 0.0),
        (2.0**-149, [], 2.0**-149),
        (3e38, [2.0**126] * 8, np.inf),
    ],
)
def test_terms_are_aligned_and_cut_off(c: float, products: list[float], wanted: float) -> None:
    a, b = np.zeros((16, 16), ml_dtypes.bfloat16), np.zeros((16, 8), ml_dtypes.bfloat16)
    for k, product in enumerate(products):
        a[3, k], b[k, 5] = product, 1
    sums = np.zeros((16, 8), np.float32)
    sums[3, 5] = c
    found = multiply(FORMS[3], a, b, sums)
    np.testing.assert_array_equal(found[3, 5], np.float32(wanted))
    assert np.count_nonzero(found) <= 1 or np.isinf(products).any()


def test_sums_of_integers_wrap_or_are_limited() -> None:
    a, b = np.full((16, 32), 127, np.int8), np.full((32, 8), 127, np.int8)
    c = np.full((16, 8), 2**31 - 1, np.int32)
    opcode = "mma.sync.aligned.m16n8k32.row.col{}.s32.s8.s8.s32"
    assert (multiply(opcode.format(""), a, b, c) == -(2**31) + 32 * 127**2 - 1).all()
    assert (multiply(opcode.format(".satfinite"), a, b, c) == 2**31 - 1).all()


KERNELS = Path(__file__).parents[1] / "corpus" / "kernels"


def test_matrices_are_loaded_and_stored() -> None:
    given = np.random.default_rng(0).integers(0, 2**16, (4, 8, 8)).astype(np.uint16)
    loaded, across = np.zeros((4, 32), np.uint32), np.zeros((2, 32), np.uint32)
    stored, stored_across = np.zeros_like(given), np.zeros_like(given)
    _run("matrices.cu", "copies", [given, loaded, across, stored, stored_across], "sm_90a")
    np.testing.assert_array_equal(loaded.view(np.uint16).reshape(4, 8, 8), given)
    transposed = given.transpose(0, 2, 1)
    np.testing.assert_array_equal(across.view(np.uint16).reshape(2, 8, 8), transposed[:2])
    np.testing.assert_array_equal(stored, given)
    np.testing.assert_array_equal(stored_across, transposed)


@pytest.mark.parametrize("kind", ["float", "half"])
@pytest.mark.parametrize("layout", ["row_major", "col_major"])
def test_wmma_fragments(kind: str, layout: str) -> None:
    rng = np.random.default_rng(1)
    a, b = (rng.integers(-4, 5, shape).astype(np.float16) for shape in ((16, 32), (32, 16)))
    c = np.zeros((16, 16), np.float32 if kind == "float" else np.float16)
    stored = b if layout == "row_major" else np.ascontiguousarray(b.T)
    named = f"-DTYPE={kind}", f"-DLAYOUT={layout}", f"-DROWS={layout == 'row_major':d}"
    _run("wmma.cu", "product", [a, stored, c, 32], "sm_80", *named)
    np.testing.assert_array_equal(c, 2 + 2 * (a.astype(np.float32) @ b.astype(np.float32)))


def _run(file: str, kernel: str, args: list[Any], arch: str, *options: str) -> None:
    text = (KERNELS / file).read_text("ascii")
    compiled = nvrtc.compile(text, name=file, arch=arch, options=options)
    assert isinstance(compiled, nvrtc.Compiled), compiled
    result = launch(parse.Module(compiled.ptx), kernel, (1,), (32,), args)
    assert result.findings == ()

"""The linear layer for few rows on tensor cores: alone, into the KV cache, with the same bits."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from gpt2block import InputError
from gpt2block.ops._linear_mma import Layout, geometry, layout, splits
from gpt2block.ops.linear import bind as bind_linear
from tests.devices import H200, in_every_order, on_one_order, running_on
from tests.linears import (
    Arrays,
    Case,
    arrays,
    assert_linear,
    assert_qkv,
    every_weight,
    run_linear,
    upload,
)

Array = Any

# columns, flight, loop, warps, blocks, rows
LOOP = Layout(16, 1, True, 2, 1, 2)
ODD_LOOP = Layout(5, 1, True, 1, 1, 8)
WIDE = Layout(19, 1, False, 1, 1, 4)


# --- the launch -----------------------------------------------------------------------------------


@pytest.mark.parametrize("sms", [132, 40, 1])
@every_weight
@pytest.mark.parametrize(
    ("K", "N"), [(768, 2304), (768, 768), (3072, 768), (768, 50257), (1600, 6400), (6400, 1600)]
)
def test_every_column_and_row_has_a_block(K: int, N: int, dtype: str, sms: int) -> None:
    for M in (1, 2, 7, 8, 16, 17, 64):
        cut = layout(M, N, K, dtype, sms)
        where = geometry("linear_decode_mma", M, N, K, dtype, norm=True, sms=sms)
        assert where is not None
        assert where.block[0] == 32 * cut.warps <= 512
        assert cut.loop or cut.warps == splits(K)[0] <= 8
        rows = dict(where.defines)["LM_ROWS"]
        assert where.grid[1] * int(rows) >= M
        assert where.grid[0] * cut.columns >= N or cut.loop
        assert (where.grid[0] - 1) * cut.columns < N


def test_blocks_of_gpt2_on_an_h200() -> None:
    def grids(dtype: str) -> list[tuple[int, ...]]:
        shapes = ((2304, 768), (768, 768), (3072, 768), (768, 3072), (50257, 768))
        found = [geometry("linear_decode_mma", 1, N, K, dtype) for N, K in shapes]
        return [where.grid for where in found if where]

    assert grids("bfloat16") == [(72, 1), (96, 1), (96, 1), (48, 1), (132, 1)]
    assert grids("float32") == [(144, 1), (48, 1), (192, 1), (48, 1), (132, 1)]


def test_splits_have_whole_units() -> None:
    assert splits(16) == (1, 1)
    assert splits(768) == (6, 1)
    assert splits(3072) == (8, 3)
    assert splits(6400) == (8, 7)
    assert splits(1152) == (5, 2)


def test_rows_that_no_block_can_hold() -> None:
    assert geometry("linear_decode_mma", 16, 8, 16_384, "bfloat16") is not None
    assert geometry("linear_decode_mma", 1, 8, 60_000, "bfloat16") is None


# --- products -------------------------------------------------------------------------------------


CASES = [
    Case(3, 48, 21, "float32", residual=True, gelu=True),
    Case(3, 784, 31, "bfloat16", cut=LOOP),
    Case(1, 40, 5, "float16", norm=False, gelu=True),
    Case(1, 528, 10, "float8_e4m3fn", residual=True),
    Case(9, 264, 21, "float32", norm=False, cut=WIDE._replace(rows=16)),
    Case(3, 1104, 37, "float32", cut=ODD_LOOP),
    Case(2, 1168, 19, "float8_e5m2", norm=False, residual=True),
    Case(17, 1160, 20, "bfloat16", cut=WIDE._replace(rows=16, flight=2)),
    Case(17, 520, 9, "float16", cut=WIDE._replace(rows=16)),
    Case(11, 400, 9, "float32", cut=WIDE._replace(rows=16)),
    Case(5, 2064, 9, "float16", cut=WIDE),
]


@in_every_order
@pytest.mark.parametrize("case", CASES, ids=str)
def test_linear(case: Case, where: str) -> None:
    assert_linear(where, "mma", case, 2 if case.cut and case.cut.loop else H200)


def assert_same_bits(where: str, given: Arrays, counts: tuple[int, ...], **how: Layout) -> None:
    """Of the first rows of x together as of each alone, with any layout."""
    K = given.w.K
    case = Case(1, K, given.w.N, given.w.dtype, residual=True, gelu=True)
    alone = np.concatenate(
        [
            run_linear(where, "mma", given._replace(x=x[None], residual=r[None]), case)
            for x, r in zip(given.x[:3], given.residual[:3], strict=True)
        ]
    )
    everything = run_linear(where, "mma", given, case)
    np.testing.assert_array_equal(everything[:3], alone)
    for rows in counts:
        for cut in (None, *how.values()):
            some = given._replace(x=given.x[-rows:], residual=given.residual[-rows:])
            got = run_linear(where, "mma", some, case._replace(cut=cut))
            np.testing.assert_array_equal(got, everything[-rows:])


@pytest.mark.parametrize(
    ("dtype", "K"), [("float32", 264), ("bfloat16", 264), ("float8_e4m3fn", 272)]
)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(dtype: str, K: int) -> None:
    given = arrays(17, K, 14, dtype)
    assert_same_bits("forward", given, (2, 7, 9), wide=WIDE, loop=ODD_LOOP)


@on_one_order
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn"])
def test_nan_and_infinity_stay_in_their_row(dtype: str, where: str) -> None:
    given = arrays(10, 272, 11, dtype)
    case = Case(10, 272, 11, dtype, norm=False)
    expected = run_linear(where, "mma", given, case)
    given.x[1], given.x[8, 3] = np.nan, np.inf
    got = run_linear(where, "mma", given, case)
    others = [0, 2, 3, 4, 5, 6, 7, 9]
    np.testing.assert_array_equal(got[others], expected[others])
    assert not np.isfinite(got[[1, 8]]).any()


@in_every_order
@pytest.mark.parametrize(("M", "dtype"), [(3, "float32"), (1, "float8_e4m3fn"), (10, "bfloat16")])
def test_qkv(M: int, dtype: str, where: str) -> None:
    K, C, n_ctx = {"float32": (48, 7, 4), "bfloat16": (784, 9, 3)}.get(dtype, (528, 10, 3))
    position = np.array([2, -1, n_ctx, 0, 1, 2, 0, 1, 2, 0], np.int32)[:M]
    assert_qkv(where, "mma", Case(M, K, 3 * C, dtype), n_ctx, position)


# --- the choice of a variant ----------------------------------------------------------------------


@on_one_order
def test_what_decides_between_the_variants(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(M: int, K: int, dtype: str, **options: Any) -> str:
        with running_on(where):
            x, w, *_ = upload(arrays(M, K, 24, dtype))
            return bind_linear((x, w), **options).launches[0].name

    for M in (1, 16):
        assert kernel(M, 64, "float16") == "linear_decode_mma"
        assert kernel(M, 60, "float16") == "linear_matvec"
        assert kernel(M, 60, "float32") == "linear_decode_mma"
    module = importlib.import_module("gpt2block.ops.linear")
    assert kernel(17, 64, "float16") == "linear_tiles"
    assert kernel(17, 64, "float16", decoding=True) == "linear_decode_mma"
    monkeypatch.setattr(module, "FEW_PRODUCTS", 17 * 24 * 64 - 1)
    assert kernel(17, 64, "float16", decoding=True) == "linear_decode_tiles"
    assert kernel(17, 60, "float16", decoding=True) == "linear_matvec"
    monkeypatch.setattr(module, "compute_capability", lambda: 75)
    assert kernel(1, 64, "float16") == "linear_matvec"
    with pytest.raises(InputError, match=r"mma: needs a GPU of compute capability 8\.0 or newer"):
        kernel(1, 64, "float16", variant="mma")


@on_one_order
def test_rows_of_w_that_are_not_aligned_are_refused(where: str) -> None:
    with running_on(where):
        x, w, *_ = upload(arrays(1, 60, 8, "bfloat16"))
        with pytest.raises(InputError, match="mma: K 60: expected a multiple of 8 for bfloat16"):
            bind_linear((x, w), variant="mma")


# --- on the GPU -----------------------------------------------------------------------------------


@pytest.mark.gpu
@every_weight
@pytest.mark.parametrize(
    ("M", "K", "N", "norm", "gelu"),
    [
        (1, 768, 768, False, False),
        (3, 768, 3072, True, True),
        (8, 3072, 768, False, False),
        (16, 3072, 768, False, False),
        (64, 768, 2304, True, False),
        (17, 1600, 300, True, False),
        (2, 6400, 1600, False, False),
        (1, 256, 50257, True, False),
        (2, 336, 77, True, True),
        (3, 16_384, 40, False, False),
    ],
)
def test_linear_on_the_gpu(dtype: str, M: int, K: int, N: int, norm: bool, gelu: bool) -> None:
    assert_linear("gpu", "mma", Case(M, K, N, dtype, norm, True, gelu))


@pytest.mark.gpu
@every_weight
@pytest.mark.parametrize(("K", "N"), [(768, 2304), (3072, 768), (768, 20_000), (1616, 333)])
def test_same_bits_in_any_batch_on_the_gpu(dtype: str, K: int, N: int) -> None:
    assert_same_bits("gpu", arrays(200, K, N, dtype), (1, 2, 7, 8, 9, 16, 17, 33, 64))


@pytest.mark.gpu
@every_weight
@pytest.mark.parametrize("M", [1, 3, 10])
def test_qkv_on_the_gpu(dtype: str, M: int) -> None:
    position = np.array([4, -1, 5, 0, 1, 2, 3, 2, 1, 0], np.int32)[:M]
    assert_qkv("gpu", "mma", Case(M, 768, 3 * 768, dtype), 5, position)

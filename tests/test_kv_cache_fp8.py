"""A kv_cache of FP8: what is stored, attention over it, and whole models.

On NumPy, on the CPU emulator and on a GPU. Codes are compared with ml_dtypes, attention with
float64 over the numbers that the codes represent.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from gpt2block import GPT2, InputError, Llama, LlamaConfig, cli, ops, reference
from gpt2block.architectures.gpt2_weights import GPT2Weights
from gpt2block.architectures.llama_weights import LlamaWeights
from gpt2block.bench import llama_works
from gpt2block.bench.llama_works import SHAPES, RandomLlama, llama_decode
from gpt2block.bench.report import tolerance
from gpt2block.bench.token_works import RandomGPT2
from gpt2block.bulk import job as bulk_job
from gpt2block.bulk.predictor import Predictor
from gpt2block.config import GPT2Config
from gpt2block.cuda import arrays as cuda_arrays
from gpt2block.cuda import cupy, kernels, replaced
from gpt2block.emulator import loader
from gpt2block.ops import _linear_mma_tiles
from gpt2block.ops._terms import Terms
from gpt2block.ops.attention_cached import (
    APPEND,
    ATTENTION_SPLIT,
    KV_ROUND,
    SPLIT,
    TILES,
    append_geometry,
    split_geometry,
    tiles_geometry,
)
from gpt2block.ops.linear import OPERATION as LINEAR
from gpt2block.ops.registry import STEPS
from gpt2block.ops.rope_qkv import APPEND as ROPE_APPEND
from gpt2block.run.model import kv_cache_dtype, kv_cache_dtypes
from tests import gpus
from tests.compiling import Job, assert_clean
from tests.devices import assert_same_bits, combinations, one_order, running_on
from tests.linears import KERNELS, use_variant
from tests.plain import normal
from tests.test_attention_cached import assert_right, forced_geometry
from tests.test_attention_cached import exact as exactly
from tests.test_terms import matrix
from tests.test_terms import terms as terms_of

Array = NDArray[Any]
FORMATS: dict[str, Any] = {
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
}
WIDE: dict[str, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}
LARGEST = {"float8_e5m2": 57344.0, "float8_e4m3fn": 448.0}
every_format = pytest.mark.parametrize("kv_dtype", FORMATS)


def codes_of(x: Array, kv_dtype: str) -> NDArray[np.uint8]:
    """By ml_dtypes, which does not saturate: numbers beyond the largest one are limited first."""
    largest = LARGEST[kv_dtype]
    limited = np.clip(x.astype(np.float32), -largest, largest)
    with np.errstate(invalid="ignore"):  # NaN
        return np.asarray(limited.astype(FORMATS[kv_dtype]).view(np.uint8))


def widened(codes: Array, kv_dtype: str) -> NDArray[np.float32]:
    return np.asarray(codes.view(FORMATS[kv_dtype]).astype(np.float32))


def assert_same_codes(got: Array, x: Array, kv_dtype: str) -> None:
    """Those of ml_dtypes; NaN has several codes."""
    nan = np.isnan(x.astype(np.float32))
    np.testing.assert_array_equal(got[~nan], codes_of(x, kv_dtype)[~nan])
    assert np.isnan(widened(got, kv_dtype)[nan]).all()


def interesting(kv_dtype: str) -> NDArray[np.float32]:
    """Every finite number, every tie and its neighbours, and what is beyond the largest number."""
    numbers = widened(np.arange(128, dtype=np.uint8), kv_dtype)
    finite = numbers[np.isfinite(numbers)]
    ties = (finite[1:] + finite[:-1]) / np.float32(2)
    largest = finite[-1]
    beyond = np.array([1.01, 1.0625, 1.125, 1.15, 2, 1e6], np.float32) * largest
    tiny = finite[1] * np.array([1e-3, 0.49, 0.5, 0.51], np.float32)
    more = np.array([0, 1e-45, 1e-38, np.inf, np.nan, np.finfo(np.float32).max], np.float32)
    near = [np.nextafter(ties, np.float32(end)) for end in (0, np.inf)]
    found = np.concatenate([finite, ties, *near, beyond, tiny, more])
    return np.concatenate([found, -found]).astype(np.float32)


def as_rows(values: Array, C: int) -> Array:
    """Rows [Q | K | V] (N, 3C) that have these values, repeated, as K and V."""
    N = -(-values.size // (2 * C))
    rows = np.zeros((N, 3 * C), values.dtype)
    rows[:, C:] = np.resize(values, (N, 2 * C))
    return rows


# --- what is stored -------------------------------------------------------------------------------


@every_format
def test_kv_round_on_numpy(kv_dtype: str) -> None:
    for dtype in (np.float32, np.float64):
        rows = as_rows(interesting(kv_dtype), 16).astype(dtype)
        rows[:, :16] = normal(0, len(rows), 16)
        got = reference.kv_round(rows, 2, 2, kv_dtype)
        assert got.dtype == dtype
        np.testing.assert_array_equal(got[:, :16], rows[:, :16])
        expected = widened(codes_of(rows[:, 16:], kv_dtype), kv_dtype)
        np.testing.assert_array_equal(got[:, 16:], expected)
    with pytest.raises(InputError, match=r"expected \(N, W\) of 7 heads"):
        reference.kv_round(rows, 5, 1, kv_dtype)


def appended(rows: Array, C: int, kv_dtype: str) -> Array:
    """The codes (N, 2C) that kv_append writes for the rows, from the last to the first."""
    N = len(rows)
    k, v = (cupy.asarray(np.zeros((2, N, C), np.uint8)) for _ in range(2))
    row, position = np.ones(N, np.int32), np.arange(N, dtype=np.int32)[::-1].copy()
    ops.kv_append(cupy.asarray(rows), k, v, cupy.asarray(row), cupy.asarray(position), kv_dtype)
    assert not k.get()[0].any()
    return np.concatenate([k.get()[1, ::-1], v.get()[1, ::-1]], axis=1)


@every_format
@pytest.mark.parametrize("C", [16, 3])
@one_order
def test_every_number_is_rounded_to_the_nearest_code(device: Any, C: int, kv_dtype: str) -> None:
    rows = as_rows(interesting(kv_dtype), C)
    assert_same_codes(appended(rows, C, kv_dtype), rows[:, C:], kv_dtype)


@every_format
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@one_order
def test_rows_of_16_bits(device: Any, dtype: str, kv_dtype: str) -> None:
    """All numbers of the dtype, appended and rounded in place, give the same codes."""
    C = 512
    values = np.arange(2**16, dtype=np.uint16).view(WIDE[dtype])
    rows = as_rows(values, C)
    rows[:, :C] = 1.25
    codes = appended(rows, C, kv_dtype)
    assert_same_codes(codes, rows[:, C:], kv_dtype)
    on_device = device.asarray(rows)
    assert ops.kv_round(on_device, 2, 2, kv_dtype) is on_device
    got = on_device.get().astype(np.float32)
    np.testing.assert_array_equal(got[:, :C], 1.25)
    np.testing.assert_array_equal(got[:, C:], widened(codes, kv_dtype))


@every_format
@one_order
def test_rope_append_writes_what_numpy_rounds(device: Any, kv_dtype: str) -> None:
    NH, NKV, HS = 4, 2, 8
    qkv = device.asarray(200 * normal(2, 4, (NH + 2 * NKV) * HS))
    row = device.asarray(np.array([2, 0, -1, 1], np.int32))
    position = device.asarray(np.array([3, 0, 4, 6], np.int32))
    turns = device.asarray(100.0 ** (-np.arange(0, HS, 2) / HS))
    found = []
    for stored, given in ((np.float32, None), (np.uint8, kv_dtype)):
        k, v = (device.asarray(np.zeros((3, 7, NKV * HS), stored)) for _ in range(2))
        q = ops.rope_append(qkv, turns, k, v, row, position, NH, True, given)
        found.append([each.get() for each in (q, k, v)])
    (q, *wide), (same, *codes) = found
    np.testing.assert_array_equal(same, q)
    for exact, code in zip(wide, codes, strict=True):
        np.testing.assert_array_equal(code, codes_of(exact, kv_dtype))
        assert code[1, 6].any()


@combinations(
    kernel=KERNELS, dtype=["float8_e5m2", "bfloat16", "float8_e4m3fn"], kv_dtype=list(FORMATS)
)
def test_qkv_writes_what_numpy_rounds(
    device: Any, monkeypatch: pytest.MonkeyPatch, kernel: str, dtype: str, kv_dtype: str
) -> None:
    """With W and KV of one format and of two; tokens outside the cache are not stored."""
    M, K, C, n_ctx = 5, 272, 10, 4
    n = KERNELS.index(kernel)
    use_variant(monkeypatch, n)
    x, w, bias = device.asarray(normal(0, M, K)), matrix(3 * C, K, dtype), normal(2, 3 * C)
    rows, places = np.array([3, 0, 1, 9, 2], np.int32), np.array([2, 0, n_ctx, 1, 3], np.int32)
    on_device = [device.asarray(a) for a in (bias, rows, places)]
    product = LINEAR.bind((x, w, on_device[0]), variant=LINEAR.variants[n].name).run().get()
    k, v = (device.asarray(np.full((4, n_ctx, C), 77, np.uint8)) for _ in range(2))
    row, position = on_device[1:]
    inputs = (x, w, on_device[0], None, None, k, v, row, position)
    bound = STEPS["linear_qkv"].bind(inputs, kv_dtype=kv_dtype)
    assert [launch.name for launch in bound.launches] == [kernel]
    np.testing.assert_array_equal(bound.run().get(), product[:, :C])
    for i, got in enumerate((k.get(), v.get())):
        expected = np.full((4, n_ctx, C), 77, np.uint8)
        for m in (0, 1, 4):
            at = slice((i + 1) * C, (i + 2) * C)
            expected[rows[m], places[m]] = codes_of(product[m, at], kv_dtype)
        np.testing.assert_array_equal(got, expected)


# --- attention ------------------------------------------------------------------------------------


def cache(seed: int, lengths: list[int], n_ctx: int, C: int, kv_dtype: str) -> tuple[Array, Array]:
    """Codes of keys and values; NaN where no sequence has any."""
    codes = codes_of(normal(seed, 2, len(lengths), n_ctx, C), kv_dtype)
    for b, length in enumerate(lengths):
        codes[:, b, length:] = 0x7F
    return codes[0], codes[1]


@every_format
@pytest.mark.parametrize("HS", [16, 3])
@one_order
def test_every_code_is_read_as_its_number(device: Any, HS: int, kv_dtype: str) -> None:
    """With one key, attention returns its value, channel by channel, infinity and NaN too."""
    NH = -(-256 // HS)
    C = NH * HS
    codes = np.resize(np.arange(256, dtype=np.uint8), (1, 1, C))
    k, v = device.asarray(np.zeros_like(codes)), device.asarray(codes)
    q, zero = device.asarray(normal(0, 1, C)), device.asarray(np.zeros(1, np.int32))
    expected = widened(codes, kv_dtype)[0]
    split = ops.attention_split(q, k, v, zero, zero, NH, kv_dtype).get()
    np.testing.assert_array_equal(split, expected)
    tiles = ops.attention_cached(q, k[0], v[0], 0, NH, kv_dtype).get()
    np.testing.assert_array_equal(tiles, expected)
    code_of_key = np.zeros((1, 2, C), np.uint8)
    code_of_key[:, 1] = codes[:, 0]  # a key of NaN or infinity makes its own head NaN
    two = device.asarray(np.repeat(codes, 2, axis=1) & 0x30)
    position = device.asarray(np.ones(1, np.int32))
    got = ops.attention_split(q, device.asarray(code_of_key), two, zero, position, NH, kv_dtype)
    own = np.isfinite(widened(codes, kv_dtype)).reshape(NH, HS).all(axis=1)
    finite = np.isfinite(got.get()).reshape(NH, HS).all(axis=1)
    assert finite[own].all()
    if kv_dtype == "float8_e4m3fn":
        assert not finite[~own].any()


@every_format
@pytest.mark.parametrize("heads", [(2, 2, 64), (1, 1, 128), (3, 3, 7), (4, 2, 48), (8, 2, 64)])
@one_order
def test_split(device: Any, heads: tuple[int, int, int], kv_dtype: str) -> None:
    NH, NKV, HS = heads
    positions = [0, 31, 32, 149, -1]
    k, v = cache(HS, [at + 1 for at in positions], 150, NKV * HS, kv_dtype)
    q = normal(1, len(positions), NH * HS)
    row = np.arange(len(positions), dtype=np.int32)
    at = np.array(positions, np.int32)
    inputs = tuple(map(device.asarray, (q, k, v, row, at)))
    out = device.asarray(np.full(q.shape, np.nan, np.float32))
    got = ATTENTION_SPLIT.bind(inputs, out, n_head=NH, kv_dtype=kv_dtype).run().get()
    wide_k, wide_v = (repeated(widened(a, kv_dtype), heads) for a in (k, v))
    for b, position in enumerate(positions):
        if position >= 0:
            one = slice(b, b + 1)
            assert_right(got[one], q[one], wide_k[b], wide_v[b], position, NH)
    assert np.isnan(got[-1]).all(), "a query without keys was written"
    for b in (0, 3):  # a row alone
        query, of_row, there = (device.asarray(a[b : b + 1]) for a in (q, row, at))
        arrays = query, *inputs[1:3], of_row, there
        alone = ATTENTION_SPLIT.bind(arrays, n_head=NH, kv_dtype=kv_dtype).run().get()
        np.testing.assert_array_equal(alone, got[b : b + 1])


@every_format
@pytest.mark.parametrize(
    "heads",
    [
        (2, 2, 16),
        (4, 1, 16),
        *(pytest.param(each, marks=pytest.mark.gpu) for each in ((12, 12, 64), (16, 4, 128))),
    ],
)
@one_order
def test_split_over_two_spans(
    device: Any, monkeypatch: pytest.MonkeyPatch, heads: tuple[int, int, int], kv_dtype: str
) -> None:
    """More than 1,024 keys, with the same bits however warps and blocks share them."""
    NH, NKV, HS = heads
    k, v = cache(0, [1100, 1024, 70], 1100, NKV * HS, kv_dtype)
    q, at = normal(1, 3, NH * HS), np.array([1099, 1023, 69], np.int32)
    inputs = tuple(map(device.asarray, (q, k, v, np.arange(3, dtype=np.int32), at)))
    right = ATTENTION_SPLIT.bind(inputs, n_head=NH, kv_dtype=kv_dtype).run().get()
    wide_k, wide_v = (repeated(widened(a, kv_dtype), heads) for a in (k, v))
    for b in range(3):
        one = slice(b, b + 1)
        assert_right(right[one], q[one], wide_k[b], wide_v[b], int(at[b]), NH)
    choices = [{"AS_WARPS": 1}, {"AS_WARPS": 8}]
    if not replaced() and cuda_arrays.compute_capability() >= 90:
        choices += [{"AS_WARPS": 4, "AS_CLUSTER": cluster} for cluster in (2, 5, 8)]
    for forced in choices:
        chosen = partial(forced_geometry, forced)
        monkeypatch.setattr(sys.modules[split_geometry.__module__], "split_geometry", chosen)
        got = ATTENTION_SPLIT.bind(inputs, n_head=NH, kv_dtype=kv_dtype).run().get()
        np.testing.assert_array_equal(got, right)


def repeated(rows: Array, heads: tuple[int, int, int]) -> Array:
    """K or V (..., KV) with each head as often as it serves heads of Q: (..., Q)."""
    NH, NKV, HS = heads
    each = rows.reshape(*rows.shape[:-1], NKV, HS)
    return np.repeat(each, NH // NKV, axis=-2).reshape(*rows.shape[:-1], NH * HS)


@combinations(kv_dtype=list(FORMATS), kind=["float16", "bfloat16"], width=[0, 8])
def test_terms_of_the_result(device: Any, width: int, kind: str, kv_dtype: str) -> None:
    """Of any 16-bit dtype, whatever the cache holds."""
    k, v = map(device.asarray, cache(0, [70, 70], 70, 64, kv_dtype))
    row, position = (device.asarray(np.array(a, np.int32)) for a in ([1, 0, 1], [69, 3, 40]))
    inputs = (device.asarray(normal(0, 3, 64)), k, v, row, position)
    floats = ATTENTION_SPLIT.bind(inputs, n_head=1, kv_dtype=kv_dtype).run().get()
    order = Terms(kind, width)
    made = ATTENTION_SPLIT.bind(inputs, n_head=1, to_terms=order, kv_dtype=kv_dtype).run().get()
    assert_same_bits(made, terms_of(floats, kind, width))


@combinations(
    heads=[(2, 2, 64), (2, 1, 128), (3, 3, 7), (4, 2, 24)], dtype=list(WIDE), kv_dtype=list(FORMATS)
)
def test_packed_rows(device: Any, heads: tuple[int, int, int], dtype: str, kv_dtype: str) -> None:
    """Queries of every dtype; the prompt in one call has the bits of the prompt in two."""
    NH, NKV, HS = heads
    C, lengths, start = NKV * HS, [33, 0, 5], [4, 3, 40]
    ends = [s + n for s, n in zip(start, lengths, strict=True)]
    k, v = cache(HS, ends, 47, C, kv_dtype)
    qkv = normal(3, sum(lengths), (NH + 2 * NKV) * HS).astype(WIDE[dtype])
    qkv[:, NH * HS :] = np.nan  # K and V come from the cache

    def attended(qkv: Array, lengths: list[int], start: list[int]) -> Array:
        seams, starts = np.array([0, *np.cumsum(lengths)], np.int32), np.array(start, np.int32)
        on_device = (device.asarray(a) for a in (qkv, k, v, seams, starts))
        options: Any = {"n_head": NH, "longest": max(lengths), "kv_dtype": kv_dtype}
        got = ops.attention_packed(*on_device, **options).get()
        assert got.dtype == qkv.dtype
        return np.asarray(got)

    got = attended(qkv, lengths, start)
    wide = [repeated(widened(a, kv_dtype), heads) for a in (k, v)]
    for first, b in ((0, 0), (33, 2)):
        rows = slice(first, first + lengths[b])
        q = qkv[rows, : NH * HS].astype(np.float32)
        if dtype == "float32":
            assert_right(got[rows], q, wide[0][b], wide[1][b], start[b], NH)
        exact = exactly(q, wide[0][b], wide[1][b], start[b], NH)
        limit = {"float32": 1e-5, "float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
        off = np.abs(got[rows].astype(np.float64) - exact).max() / np.abs(exact).max()
        assert off <= 1e-5 + limit
    parts = [attended(qkv[:20], [20, 0, 0], start), attended(qkv[20:33], [13, 0, 0], [24, 3, 40])]
    assert_same_bits(np.concatenate(parts), got[:33])


def test_no_two_threads_write_one_byte() -> None:
    if problem := loader.missing():
        pytest.skip(problem)
    rows = as_rows(interesting("float8_e5m2")[:480].astype(np.float16), 24)
    geometry = append_geometry(len(rows), 24, 72, 1, 16, 16, narrow=True)
    options: dict[str, Any] = {"defines": geometry.defines, "storage": "float16", "races": True}
    launch = partial(loader.run, APPEND, grid=geometry.grid, block=geometry.block)
    k, v = np.zeros((2, 1, len(rows), 24), np.uint8)
    row, position = np.zeros(len(rows), np.int32), np.arange(len(rows), dtype=np.int32)
    args: list[Any] = [rows, row, position, k, v, 24, 72, 1, len(rows)]
    launch(kernel="kv_append_narrow", args=args, cache="float8_e5m2", **options)
    assert_same_codes(k[0], rows[:, 24:48], "float8_e5m2")
    launch(kernel="kv_round", args=[rows, 24, 72], cache="float8_e5m2", **options)
    np.testing.assert_array_equal(rows[:, 48:].astype(np.float32), widened(v[0], "float8_e5m2"))


def test_the_kernels_compile_without_spills() -> None:
    jobs: list[Job] = []
    others = ("sm_75", "float8_e4m3fn"), ("sm_80", "float8_e5m2"), ("sm_120", "float8_e4m3fn")
    for arch, cache in (*others, *(("sm_90", each) for each in FORMATS)):
        stored = kernels.stored_as("bfloat16", None, cache)
        clusters = arch == "sm_90"
        heads = (12, 12, 64), (32, 8, 128), (32, 32, 128), (8, 4, 64), (3, 3, 65)
        for NH, NKV, HS in heads if clusters else heads[:2]:
            tiles = tiles_geometry(1, 100, NH, NKV, HS, 1, 232448)
            split = split_geometry(64, 1024, NH, NKV, HS, 1, 132, 232448, clusters)
            jobs += [(TILES, arch, (*stored, *tiles.defines))]
            jobs += [(SPLIT, arch, (*stored, *split.defines))]
        jobs += [(APPEND, arch, (*stored, ("KV_WIDTH", 8)))]
        jobs += [(ROPE_APPEND, arch, (*stored, ("ROPE_HALF_SPLIT", 1)))]
    mixed = kernels.stored_as("float16", "float8_e5m2", "float8_e4m3fn")
    product: Any = (64, 768, 256, "float8_e5m2")
    gpu = {"capability": 90, "sms": 132, "most_shared": gpus.H200["most_shared"]}
    tile = _linear_mma_tiles.choose(*product, **gpu)
    made = _linear_mma_tiles.geometry("qkv_decode_tiles", *product, tile)
    jobs += [("matmul/decode.cu", "sm_75", mixed), ("matmul/decode_mma.cu", "sm_80", mixed)]
    jobs += [(_linear_mma_tiles.FILE, "sm_90", (*mixed, *made.defines))]
    assert_clean(jobs)


@one_order
def test_what_the_operations_refuse(device: Any) -> None:
    q, k = device.zeros((5, 48), "float32"), device.zeros((2, 9, 48), "uint8")
    half, qkv = device.zeros((2, 9, 48), "float16"), device.zeros((5, 144), "float32")
    i32, f64 = device.zeros(5, "int32"), device.zeros(8, "float64")
    e5m2 = "float8_e5m2"
    for call, message in (
        (partial(ops.attention_split, q, k, k, i32, i32, 3), "k: expected float32, got uint8"),
        (partial(ops.attention_split, q, k, k, i32, i32, 3, "float16"), "kv_dtype: expected one"),
        (partial(ops.attention_split, q, k, half, i32, i32, 3, e5m2), "v: expected uint8"),
        (partial(ops.kv_append, qkv, half, half, i32, i32, e5m2), "k: expected uint8, got float1"),
        (partial(ops.attention_cached, q, k[0], half[0], 0, 3, e5m2), "v: expected uint8"),
        (partial(ops.rope_append, qkv, f64, half, k, i32, i32, 3, False, e5m2), "k: expected uin"),
        (partial(ops.kv_round, qkv, 3, 3, e5m2), "qkv: expected float16, got float32"),
        (
            partial(ops.kv_round, half[0], 3, 3, e5m2),
            r"qkv: expected \(N, W\) of 9 heads, got \(9, 48",
        ),
        (
            partial(ops.kv_round, half[0], 2, 1, "float16"),
            "kv_dtype: expected one of float8_e5m2, flo",
        ),
        (
            partial(KV_ROUND.bind, (half[0],), half[1], n_head=2, n_kv_head=1, kv_dtype=e5m2),
            "out: expected qkv itself",
        ),
        (
            partial(ATTENTION_SPLIT.bind, (q, k, k, i32, i32), n_head=3, kv_dtype=[e5m2]),
            "kv_dtype: expected one of",
        ),
        (partial(ops.kv_append, qkv, k, k, i32, i32, e5m2), "k: overlaps v"),
    ):
        with pytest.raises(InputError, match=message):
            call()


# --- whole models ---------------------------------------------------------------------------------

GPT2_SMALL = GPT2Config(n_layer=2, n_head=2, n_embd=128, n_ctx=48, vocab_size=53)
GPT2_NARROW = GPT2Config(n_layer=2, n_head=3, n_embd=24, n_ctx=48, vocab_size=53)
LLAMA_SMALL = LlamaConfig(2, 2, 64, 48, 53, n_kv_head=1, n_ff=48, head_size=64)
LLAMA_NARROW = LlamaConfig(2, 4, 32, 48, 53, n_kv_head=2, n_ff=48)
MODELS: dict[str, tuple[Any, Any]] = {
    "gpt2": (GPT2, GPT2Weights.random(3, GPT2_SMALL)),
    "gpt2 without tensor cores": (GPT2, GPT2Weights.random(3, GPT2_NARROW)),
    "llama": (Llama, LlamaWeights.random(3, LLAMA_SMALL)),
    "llama without tensor cores": (Llama, LlamaWeights.random(3, LLAMA_NARROW)),
}
KINDS = [
    ("gpt2", "bfloat16", "float8_e5m2"),
    ("gpt2 without tensor cores", "float8_e5m2", "float8_e4m3fn"),
    ("llama", "float8_e5m2", "float8_e5m2"),
    ("llama", "float16", "float8_e4m3fn"),
    ("llama without tensor cores", "bfloat16", "float8_e5m2"),
]
every_kind = pytest.mark.parametrize(("name", "dtype", "kv_dtype"), KINDS)
IDS = [np.random.default_rng(n).integers(53, size=n).astype(np.int32) for n in (29, 7, 18)]


def made(name: str, dtype: str, kv_dtype: str | None, device: str = "cpu") -> Any:
    kind, weights = MODELS[name]
    return kind(weights, device, dtype, kv_dtype=kv_dtype)


def off(got: Any, expected: Any) -> float:
    """The root mean square of the difference, relative to that of the logits."""
    return float(np.sqrt(np.square(got - expected).mean() / np.square(expected).mean()))


@every_kind
@one_order
def test_a_model_is_that_of_numpy(device: Any, name: str, dtype: str, kv_dtype: str) -> None:
    """A prompt at once, continued, and decoded token by token, alone and in a batch.

    With activations in float32 the difference is far below what FP8 costs. Rows of 16 bits that are
    near a tie are rounded to either side, and what follows from one is rounded otherwise in the
    next layer: there it is what FP8 costs, and test_tensor_cores_attend_to_rounded_rows says more.
    """
    numpy, ours = made(name, dtype, kv_dtype), made(name, dtype, kv_dtype, "cuda")
    expected, wide = numpy(IDS), made(name, dtype, None)(IDS)
    cost = max(map(off, expected, wide))
    assert cost > 3e-3
    limit = cost * (0.05 if ours.engine.products == "float32" else 1.5)
    together = ours(IDS)
    assert max(map(off, together, expected)) < limit
    for ids, got in zip(IDS, together, strict=True):
        assert_same_bits(ours([ids])[0], got)

    held = ours.new_cache(3)
    assert held.kind == ours.engine.cache_kind
    assert held.nbytes == 2 * 2 * 3 * 48 * ours.config.kv_width
    first = ours([ids[:5] for ids in IDS], cache=held)
    assert max(off(a, b[:5]) for a, b in zip(first, expected, strict=True)) < limit
    rest = ours([ids[5:-1] for ids in IDS], cache=held)
    assert max(off(a, b[5:-1]) for a, b in zip(rest, expected, strict=True)) < limit
    last = ours([ids[-1:] for ids in IDS], cache=held, last=True)
    assert max(off(a, b[-1]) for a, b in zip(last, expected, strict=True)) < limit
    alone = ours.new_cache(1)
    ours([IDS[1][:5]], cache=alone)
    ours([IDS[1][5:-1]], cache=alone)
    assert_same_bits(ours([IDS[1][-1:]], cache=alone, last=True)[0], last[1])
    if ours.engine.products == "float32":  # else a continued prompt has other kernels
        at_once = np.concatenate([first[0], rest[0]])
        np.testing.assert_array_equal(at_once, together[0][:-1])


@every_kind
def test_numpy_in_one_call_and_in_several(name: str, dtype: str, kv_dtype: str) -> None:
    model = made(name, dtype, kv_dtype)
    whole = model(IDS[0])
    held = model.new_cache(1)
    parts = [model(IDS[0][a:b][None], cache=held)[0] for a, b in ((0, 5), (5, 28), (28, 29))]
    assert off(np.concatenate(parts), whole) < 1e-3  # a key near a tie may be rounded otherwise
    for layer in held.data:
        for half in layer:
            once_more = reference.from_fp8(reference.to_fp8(half, kv_dtype), kv_dtype)
            np.testing.assert_array_equal(once_more, half)


@every_format
@one_order
def test_tensor_cores_attend_to_rounded_rows(device: Any, kv_dtype: str) -> None:
    """K and V in the rows of a prompt are the numbers of the cache, also without one."""
    model = made("llama", "bfloat16", kv_dtype, "cuda").engine
    assert model.products == "16_bits"
    KV, ids = model.config.kv_width, IDS[2]
    with model.running():
        for held in (model.new_cache(1, 48), model._scratch([ids])):
            program = model.prefill([ids], held, "hidden").recording(model, "hidden")
            steps = ("h.1.rope", "h.1.rounded", "h.1.attn")
            traced = [a.get().astype(np.float64) for a in program.trace(steps).values()]
            before, rounded, attended = traced
            np.testing.assert_array_equal(rounded, reference.kv_round(before, 2, 1, kv_dtype))
            rows = rounded[:, -2 * KV :].astype(np.float32)
            assert np.abs(rows - before[:, -2 * KV :]).max() > 1e-2 * np.abs(rows).max()
            exact = reference.attention(rounded, 2, True, 1)
            assert np.abs(attended - exact).max() <= 2.0**-7 * np.abs(exact).max()
            ops_of = [each.step.op for n, each in program.steps.items() if n.startswith("h.1.")]
            assert ops_of.count("kv_round") == 1
            for n, half in enumerate(held.layers[1] if held.layers else ()):
                kept = widened(half.get()[0, : len(ids)], kv_dtype)
                np.testing.assert_array_equal(kept, rows[:, n * KV : (n + 1) * KV])


@every_kind
@one_order
def test_generation_and_score(device: Any, name: str, dtype: str, kv_dtype: str) -> None:
    ours, numpy = (made(name, dtype, kv_dtype, where) for where in ("cuda", "cpu"))
    options: dict[str, Any] = {"max_new_tokens": 6, "temperature": 0, "stop_ids": ()}
    prompts = [ids[:6].tolist() for ids in IDS]
    together = ours.generate(prompts, **options)
    for prompt, got in zip(prompts, together, strict=True):
        alone = ours.generate(prompt, **options)
        assert alone.tokens == got.tokens
        assert_same_bits(np.array(alone.logprobs), np.array(got.logprobs))
    expected = numpy.generate(prompts, **options)
    same = sum(a.tokens == b.tokens for a, b in zip(together, expected, strict=True))
    assert same >= 2  # random weights may have two tokens that are almost equally likely
    ids = np.concatenate(IDS).tolist()
    wide = made(name, dtype, None).score(ids).nats_per_token
    scores = [model.score(ids).nats_per_token for model in (ours, numpy)]
    assert abs(scores[0] - scores[1]) < 5e-3
    assert scores[1] != wide


@every_format
def test_attention_weights_are_those_of_rounded_keys(kv_dtype: str) -> None:
    model = made("llama", "bfloat16", kv_dtype)
    qkv = reference.kv_round(model.trace(IDS[1])["h.1.rope"], 2, 1, kv_dtype)
    scores = np.einsum("ihd,jd->hij", qkv[:, :128].reshape(-1, 2, 64), qkv[:, 128:192]) / 8
    expected = reference.softmax(scores, causal=True)
    np.testing.assert_allclose(model.attention(IDS[1])[1], expected, rtol=1e-4, atol=1e-6)
    plain = made("llama", "bfloat16", None).attention(IDS[1])[1]
    assert np.abs(plain - expected).max() > 1e-4


@one_order
def test_compare_shows_what_rounding_costs(device: Any) -> None:
    """The float64 pass has keys and values that are not rounded, as with a cache of 16 bits."""
    model = made("gpt2", "bfloat16", "float8_e4m3fn", "cuda")
    for cached in (False, True):
        rows = {row.name: row for row in model.compare(IDS[2], cached)}
        assert not any("rounded" in name or name.endswith(".kv") for name in rows)
        attention = rows["h.0.attn"]
        assert 2.0**-8 < attention.max_rel < 2.0**-3
        others = [row.max_rel for name, row in rows.items() if not name.endswith("attn")]
        assert max(others) < 2.0**-6


def test_the_dtype_of_the_cache() -> None:
    assert kv_cache_dtype("float8_e5m2") == "float16"
    assert kv_cache_dtype("bfloat16", "bfloat16") == "bfloat16"
    assert kv_cache_dtype("float8_e5m2", "float8_e4m3fn") == "float8_e4m3fn"
    narrow = kv_cache_dtypes("float8_e5m2")
    assert set(narrow) == {"float16", "bfloat16", "float8_e5m2", "float8_e4m3fn"}
    assert set(narrow.values()) == {"float8_e5m2"}
    assert kv_cache_dtypes(None)["float32"] == "float32"
    model = made("gpt2", "float16", "float8_e5m2")
    assert model.kv_dtype == "float8_e5m2"
    assert "float16, kv_cache float8_e5m2, CPU" in repr(model)
    assert "kv_cache" not in repr(made("gpt2", "float16", "float16"))
    with pytest.raises(
        InputError, match=r"cache: expected .*'float16', 'cpu'.*, got .*float8_e5m2"
    ):
        made("gpt2", "float16", None)(IDS[0], cache=model.new_cache(1))


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "message"),
    [
        ("bfloat16", "float16", r"kv_dtype: expected float8_e5m2, float8_e4m3fn, or bfloat16 with"),
        ("float8_e5m2", "bfloat16", "or float16 with weights of float8_e5m2, got 'bfloat16'"),
        ("float32", "float16", "or float32 with weights of float32, got 'float16'"),
        ("float32", "float8_e5m2", "kv_dtype 'float8_e5m2': expected weights of 16 bits or FP8, g"),
        ("bfloat16", np.zeros(2), "kv_dtype: expected float8_e5m2"),
        ("bfloat16", 8, "kv_dtype: expected float8_e5m2"),
    ],
)
def test_what_is_refused(dtype: str, kv_dtype: Any, message: str) -> None:
    kind, weights = MODELS["gpt2"]
    for call in (
        lambda: made("gpt2", dtype, kv_dtype),
        lambda: kind.from_pretrained("shakespeare", "cpu", dtype, kv_dtype=kv_dtype),
        lambda: Predictor("score", device="cpu", dtype=dtype, kv_dtype=kv_dtype),
        lambda: kind.from_tensors(weights.config, weights.tensors(), "cpu", dtype, kv_dtype),
    ):
        with pytest.raises(InputError, match=message):
            call()


def test_a_gpu_without_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute capability 7.5: prompts in float32, which read the cache."""
    monkeypatch.setattr(cuda_arrays, "_capability", lambda device: 75)
    with running_on("shuffled"):
        model = made("gpt2", "float16", "float8_e5m2", "cuda")
        assert model.engine.products == "float32"
        expected = made("gpt2", "float16", "float8_e5m2")(IDS)
        few = 2e-3  # of the logits: a key near a tie may be rounded otherwise
        assert max(map(off, model(IDS), expected)) < few
        held = model.new_cache(3)
        model([ids[:-1] for ids in IDS], cache=held)
        last = model([ids[-1:] for ids in IDS], cache=held, last=True)
        assert max(off(a, b[-1]) for a, b in zip(last, expected, strict=True)) < few


# --- commands, jobs and the bench -----------------------------------------------------------------


Printed = Callable[..., str]


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Printed:
    """What a command prints, and its error; code: its exit code."""

    def run(*arguments: str, code: int = 0) -> str:
        with pytest.raises(SystemExit) as done:
            cli.main(list(arguments))
        said = capsys.readouterr()
        assert done.value.code == code, said.err
        return said.err if code else said.out

    return run


def test_info_halves_the_cache(printed: Printed) -> None:
    plain = json.loads(printed("info", "--json"))["memory"]
    narrow = json.loads(printed("info", "--kv-dtype", "float8_e4m3fn", "--json"))["memory"]
    assert set(narrow) == set(plain) - {"float32"}
    for dtype, sizes in narrow.items():
        assert sizes["kv_cache_dtype"] == "float8_e4m3fn"
        assert 2 * sizes["kv_cache_per_row"] == plain[dtype]["kv_cache_per_row"]
        assert sizes["weights"] == plain[dtype]["weights"]
    assert "float8_e4m3fn" in printed("info", "--kv-dtype", "float8_e4m3fn")


def test_generate_and_compare(printed: Printed) -> None:
    narrow = ["--device", "cpu", "--dtype", "bfloat16", "--kv-dtype", "float8_e5m2"]
    out = printed("generate", "O Romeo", "--max-new-tokens", "3", "--json", *narrow)
    found = json.loads(out)
    assert (found["dtype"], found["kv_dtype"]) == ("bfloat16", "float8_e5m2")
    text = printed("compare", "O Romeo", "--cached", *narrow)
    assert "bfloat16, kv_cache float8_e5m2" in text


def test_errors_name_the_option(printed: Printed) -> None:
    for command in (["generate", "a"], ["compare", "a"]):
        text = printed(*command, "--device", "cpu", "--kv-dtype", "float8_e5m2", code=2)
        assert "--kv-dtype 'float8_e5m2': expected weights of 16 bits or FP8, got float32" in text
        assert "use --dtype bfloat16" in text
    text = printed("info", "--kv-dtype", "int8", code=2)
    assert re.search(r"--kv-dtype: expected one of float32, .*, got 'int8'", text)
    text = printed("bench", "--kv-dtype", "float8_e5m2", code=2)
    assert "--kv-dtype is an option of --decode and --llama" in text


def test_a_job_takes_the_dtype_of_the_cache(printed: Printed, tmp_path: Path) -> None:
    options: dict[str, Any] = {"device": "cpu", "dtype": "bfloat16"}
    scores = [
        Predictor("score", kv_dtype=kv, **options)({"text": ["To be, or not"]})["log_likelihood"]
        for kv in (None, "float8_e5m2")
    ]
    assert scores[0] != scores[1]
    np.testing.assert_allclose(scores[1], scores[0], rtol=0.05)
    pytest.importorskip("distributed")
    lines = tmp_path / "lines.txt"
    lines.write_text("To be\n", encoding="utf-8")
    arguments = "map", "score", str(lines), "--output", str(tmp_path / "out")
    text = printed(*arguments, "--kv-dtype", "float8_e5m2", code=2)
    assert "--kv-dtype 'float8_e5m2': expected weights of 16 bits" in text
    job = bulk_job.Job("score", output="out", kv_dtype="float8_e5m2")
    assert job.described({}, "", 1, "cpu")["kv_dtype"] == "float8_e5m2"


def test_the_bench_counts_the_bytes_of_the_cache() -> None:
    config = GPT2Config(n_layer=2, n_head=2, n_embd=128, n_ctx=48, vocab_size=53)
    assert RandomGPT2(config, "bfloat16").token_bytes == 2 * 2 * 128 * 2
    assert RandomGPT2(config, "bfloat16", "float8_e5m2").token_bytes == 2 * 2 * 128
    works = llama_works(None, "1,4", "small")
    names = [(work.dtype, work.name) for work in works if work.what == "decode"]
    kept = "kv_cache float8_e5m2"
    assert names[-4:] == [
        *[("float8_e5m2", name) for name in ("1 row", "4 rows")],
        *[("float8_e5m2", f"{name}, {kept}") for name in ("1 row", "4 rows")],
    ]
    models = [RandomLlama(SHAPES["small"], "float8_e5m2", kv) for kv in (None, "float8_e5m2")]
    plain, narrow = (llama_decode(model, 4) for model in models)
    assert plain.traffic - narrow.traffic == 4 * 512 * 2 * 4 * 128
    assert tolerance(narrow, "float16") < 8 * tolerance(plain, "float16")
    one = RandomLlama(LLAMA_SMALL, "float16", "float8_e4m3fn")
    assert one.kv_dtype == "float8_e4m3fn"

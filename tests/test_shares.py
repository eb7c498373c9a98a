"""Shares of a model that several GPUs compute: columns of matrices and heads, with equal bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpt2block import InputError, ops
from gpt2block.config.formats import GGUF
from gpt2block.cuda.kernels import FP8, TWO_PART
from gpt2block.ops import _linear_hopper, _linear_matvec, _linear_mma
from gpt2block.ops.attention import VARLEN
from gpt2block.ops.attention_cached import ATTENTION_PACKED, ATTENTION_SPLIT, split_geometry
from gpt2block.ops.gemm import OPERATION as GEMM
from gpt2block.ops.linear import OPERATION as LINEAR
from gpt2block.weights.gguf import TYPES, GgufMatrix
from gpt2block.weights.matrix import WeightMatrix
from gpt2block.weights.two_part import TwoPartMatrix
from tests.attentions import DTYPES
from tests.caches import KINDS, Cache, Heads, random_cache
from tests.devices import GPU, SOMEWHERE, assert_same_bits, one_order
from tests.gpus import H200
from tests.plain import normal
from tests.test_terms import terms

Array = NDArray[Any]
N, K = 272, 512
SHARES = (0, 144), (144, 272)
RANGES = {"mixed": (("Q4_K", 128), ("Q6_K", 64), ("Q5_K", 80))}  # q, k and v of different types
FLOATS = "float32", "float16", "bfloat16"
WEIGHTS = (*FLOATS, *FP8)
EVERY = (*WEIGHTS, TWO_PART, *TYPES, *RANGES)


def matrix(kind: str, n: int = N, k: int = K) -> Any:
    """Weights (n, k) on the host: of a dtype, in two parts, or in blocks of GGUF."""
    if kind in TYPES or kind in RANGES:
        return GgufMatrix.random(RANGES.get(kind, ((kind, n),)), k)
    w = normal(1, n, k) * np.linspace(0.1, 3, n, dtype=np.float32)[:, None]
    if kind == TWO_PART:
        return TwoPartMatrix.from_float32(w)
    return WeightMatrix.quantize(w, kind, "NK")


# --- shares of matrices -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", EVERY)
def test_shares_are_the_columns_of_the_matrix(kind: str) -> None:
    whole = matrix(kind)
    spans = (*SHARES, (0, N), (16, 32), (128, 192), (112, 272))
    for begin, end in spans:
        share = whole.columns(begin, end)
        if kind == TWO_PART:
            assert_same_bits(share.get(), whole.get()[begin:end])
            continue
        assert_same_bits(share.dequantized(), whole.dequantized()[:, begin:end])
        assert np.shares_memory(share.data, whole.data)
        assert (share.N, share.K, share.whole_N) == (end - begin, K, N)
        assert share.columns(0, 16).whole_N == N
        assert share.largest == whole.largest
        type(share)(**vars(share))  # passes all checks
    if isinstance(whole, GgufMatrix) and len(whole.ranges) > 1:
        assert whole.columns(112, 208).ranges == (("Q4_K", 16), ("Q6_K", 64), ("Q5_K", 16))
    for begin, end in ((16, 16), (-16, 16), (0, N + 16)):
        with pytest.raises(InputError, match="expected borders of some of 272 outputs"):
            whole.columns(begin, end)


def test_shares_that_cannot_be() -> None:
    for span in ((8, 32), (16, 40)):
        with pytest.raises(InputError, match="expected borders in multiples of 16"):
            matrix("mixed").columns(*span)
    with pytest.raises(InputError, match="expected layout 'NK'"):
        WeightMatrix(normal(1, 8, 8), "float32").columns(0, 4)


# --- products -----------------------------------------------------------------------------------


PRODUCTS = [
    *((dtype, variant) for dtype in WEIGHTS for variant in ("matvec", "mma", "mma_tiles", "tiles")),
    *((TWO_PART, variant) for variant in ("mma", "mma_tiles")),
    *((name, "") for name in ("Q4_K", "Q8_0", "mixed")),
]
BY_WGMMA = [(dtype, "hopper") for dtype in (*WEIGHTS[1:], "Q4_K", "mixed")]


def product(device: Any, x: Array, w: Any, span: tuple[int, int], variant: str) -> Array:
    """Of rows and a share of outputs, with their part of a bias."""
    bias = device.asarray(normal(2, N)[slice(*span)])
    options: dict[str, Any] = {"variant": variant or None, "decoding": not variant}
    if variant == "hopper":
        rounded = w.dtype == GGUF
        order = _linear_hopper.terms(w.dtype, rounded)
        x = terms(x, order.dtype, order.width, rounded=rounded)
        options = {"decoding": True, "terms": order}
    out: Array = LINEAR.bind((device.asarray(x), w, bias), **options).run().get()
    return out


@pytest.mark.parametrize(
    ("device", "kind", "variant"),
    [
        *(pytest.param(SOMEWHERE[0], *case) for case in PRODUCTS),
        *(pytest.param("gpu", *case, marks=GPU.marks) for case in (*PRODUCTS, *BY_WGMMA)),
    ],
    indirect=["device"],
)
def test_products_of_shares(
    device: Any, kind: str, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole matrix has the many columns of lm_head, of which blocks loop; a share has fewer."""
    for module in (_linear_matvec, _linear_mma):
        monkeypatch.setattr(module, "MANY_COLUMNS", N)
        module.geometry.cache_clear()
    whole = matrix(kind).mapped(device.asarray)
    x = normal(3, 64, K)
    for M in (1, 4, 16, 64):
        expected = product(device, x[:M], whole, (0, N), variant)
        parts = [product(device, x[:M], whole.columns(*s), s, variant) for s in SHARES]
        assert_same_bits(np.concatenate(parts, axis=1), expected)
    for module in (_linear_matvec, _linear_mma):
        module.geometry.cache_clear()


@one_order
@pytest.mark.parametrize(("kind", "variant"), [("float16", "matvec"), ("float16", "mma")])
def test_shares_of_lm_head(device: Any, kind: str, variant: str) -> None:
    n, begin = 16_512, 8_320
    whole = matrix(kind, n).mapped(device.asarray)
    x = device.asarray(normal(3, 1, K))
    expected = ops.linear(x, whole, variant=variant).get()
    assert _linear_matvec.order(n, K, 2) != _linear_matvec.order(begin, K, 2)
    parts = []
    for span in ((0, begin), (begin, n)):
        share = whole.columns(*span)
        alone = ops.linear(x, replace(share, share_of=None), variant=variant).get()
        parts.append(ops.linear(x, share, variant=variant).get())  # not taken for the call before
        assert np.array_equal(parts[-1], alone) == (variant == "mma")
    assert_same_bits(np.concatenate(parts, axis=1), expected)


@one_order
@pytest.mark.parametrize("kind", [*WEIGHTS[1:], TWO_PART, "Q4_K", "mixed"])
def test_products_of_prompts(device: Any, kind: str) -> None:
    whole = matrix(kind).mapped(device.asarray)
    a: Any = normal(3, 33, K).astype(DTYPES.get(kind, np.float16))
    a = TwoPartMatrix.from_float32(normal(3, 33, K)) if kind == TWO_PART else a
    a = a.mapped(device.asarray) if kind == TWO_PART else device.asarray(a)

    def computed(w: Any) -> Array:
        out: Array = GEMM.bind((a, w), dtype="float32").run().get()
        return out

    parts = [computed(whole.columns(*span)) for span in SHARES]
    assert_same_bits(np.concatenate(parts, axis=1), computed(whole))


# --- attention ----------------------------------------------------------------------------------


HEADS: tuple[tuple[Heads, tuple[tuple[int, int], ...]], ...] = (
    ((4, 4, 16), ((0, 3), (3, 4))),
    ((8, 2, 16), ((0, 4), (4, 8))),  # whole groups of a head of K
    ((4, 1, 16), ((0, 3), (3, 4))),  # K and V are computed on each GPU
)


def of_heads(held: Cache, begin: int, end: int) -> tuple[slice, Cache]:
    """Columns of q of some heads, and a cache with the heads of K that they see."""
    NH, NKV, HS = held.heads
    serves = NH // NKV
    first, last = begin // serves, -(-end // serves)
    part = slice(first * HS, last * HS)
    k, v = (np.ascontiguousarray(each[..., part]) for each in (held.k, held.v))
    return slice(begin * HS, end * HS), Cache(k, v, (end - begin, last - first, HS), held.kind)


@one_order
@pytest.mark.parametrize("kind", KINDS)
def test_attention_of_shares(device: Any, kind: str) -> None:
    """Of decoding, and of new tokens after a cache."""
    for heads, shares in HEADS:
        held = random_cache(heads, [70, 70], 70, kind)
        q = normal(1, 2, heads[0] * heads[2])
        rows, position = np.arange(2, dtype=np.int32), np.array([69, 40], np.int32)
        starts = np.array([40, 69], np.int32), np.array([0, 1, 2], np.int32)
        serves = heads[0] // heads[1]

        def computed(columns: slice, held: Cache, serves: int | None) -> tuple[Array, Array]:
            own = np.ascontiguousarray(q[:, columns])
            given: Any = {"n_head": held.heads[0], "kv_dtype": held.kv_dtype}
            arrays = [device.asarray(a) for a in (own, held.k, held.v, rows, position)]
            one = ATTENTION_SPLIT.bind(tuple(arrays), serves=serves, **given).run().get()
            kv = np.zeros((2, 2 * held.heads[1] * held.heads[2]), np.float32)
            arrays[0] = device.asarray(np.concatenate([own, kv], axis=1))
            arrays[3:] = [device.asarray(a) for a in reversed(starts)]
            several = ATTENTION_PACKED.bind(tuple(arrays), longest=1, variant="tiles", **given)
            return one, several.run().get()

        expected = computed(slice(None), held, None)
        parts = [computed(*of_heads(held, *share), serves) for share in shares]
        for i in range(2):
            assert_same_bits(np.concatenate([part[i] for part in parts], axis=1), expected[i])


def test_fp8_attention_follows_from_the_heads_of_the_whole_model() -> None:
    sizes = 16, 1, 132, H200["most_shared"], True
    for serves, width in ((None, 16), (1, 16), (4, 8)):
        defines = dict(split_geometry(1, 70, 2, 2, *sizes, serves).defines)
        assert (defines["AS_WIDTH"], defines["AS_QUERIES"]) == (width, 1)


@one_order
@pytest.mark.parametrize("kind", [*DTYPES, TWO_PART])
def test_attention_of_prompts(device: Any, kind: str) -> None:
    (NH, NKV, HS), T = (4, 2, 64), 40
    qkv = normal(1, T, (NH + 2 * NKV) * HS).astype(DTYPES.get(kind, np.float32))
    lengths = device.asarray(np.array([0, 25, T], np.int32))

    def computed(rows: Array, n_head: int, n_kv_head: int) -> Array:
        given: Any = device.asarray(np.ascontiguousarray(rows))
        given = ops.two_part(given) if kind == TWO_PART else given
        options = {"n_head": n_head, "n_kv_head": n_kv_head, "causal": True, "max_seqlen": 25}
        out = VARLEN.bind((given, lengths), **options).run()
        return np.asarray(out.get())

    q, k, v = np.split(qkv, [NH * HS, (NH + NKV) * HS], axis=1)
    halves = [[np.split(each, 2, axis=1)[i] for each in (q, k, v)] for i in range(2)]
    parts = [computed(np.concatenate(half, axis=1), NH // 2, NKV // 2) for half in halves]
    assert_same_bits(np.concatenate(parts, axis=1), computed(qkv, NH, NKV))

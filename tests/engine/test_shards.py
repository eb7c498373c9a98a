"""Shards of a model that several GPUs compute: columns of matrices and heads, with equal bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpt2block import InputError, ops
from gpt2block.cuda.formats import GGUF
from gpt2block.cuda.kernels import FP8, HI_LO
from gpt2block.models.weights.gguf import TYPES, GgufMatrix
from gpt2block.models.weights.hi_lo import HiLoMatrix
from gpt2block.models.weights.matrix import WeightMatrix
from gpt2block.ops.all_gather import ALL_GATHER, PeerBuffers, PeerStores
from gpt2block.ops.attention import VARLEN
from gpt2block.ops.attention_cached import ATTENTION_PACKED, ATTENTION_SPLIT
from gpt2block.ops.engines import linear_matvec as _linear_matvec
from gpt2block.ops.engines import linear_mma as _linear_mma
from gpt2block.ops.engines import linear_wgmma as _linear_wgmma
from gpt2block.ops.gemm import OPERATION as GEMM
from gpt2block.ops.linear import OPERATION as LINEAR
from tests.attentions import DTYPES
from tests.caches import KINDS, Cache, Heads, random_cache
from tests.devices import GPU, SOMEWHERE, assert_same_bits, one_order, slow
from tests.ops.test_all_gather import few_words
from tests.ops.test_operands import as_operand
from tests.plain import normal

Array = NDArray[Any]
N, K = 272, 512
SHARDS = (0, 144), (144, 272)
ROWS = 1, 4, 16, 64
RANGES = {
    "q, k, v": (("Q4_K", 128), ("Q6_K", 64), ("Q5_K", 80)),
    "two types": (("Q8_0", 128), ("Q4_0", 144)),
}
WEIGHTS = ("float32", "float16", "bfloat16", *FP8)
EVERY = (*WEIGHTS, HI_LO, *TYPES, *RANGES)


def matrix(kind: str, n: int = N, k: int = K) -> Any:
    """Return weights (n, k) on the host: of a dtype, hi/lo, or in GGUF blocks."""
    if kind in TYPES or kind in RANGES:
        return GgufMatrix.random(RANGES.get(kind, ((kind, n),)), k)
    w = normal(1, n, k) * np.linspace(0.1, 3, n, dtype=np.float32)[:, None]
    if kind == HI_LO:
        return HiLoMatrix.from_float32(w)
    return WeightMatrix.quantize(w, kind, "NK")


@pytest.mark.parametrize("kind", EVERY)
def test_shares_are_the_columns_of_the_matrix(kind: str) -> None:
    whole = matrix(kind)
    for begin, end in (*SHARDS, (0, N), (16, 32), (128, 192)):
        shard = whole.columns(begin, end)
        if kind == HI_LO:
            assert_same_bits(shard.get(), whole.get()[begin:end])
            continue
        assert_same_bits(shard.dequantized(), whole.dequantized()[:, begin:end])
        assert np.shares_memory(shard.data, whole.data)
        assert (shard.N, shard.K, shard.whole_N) == (end - begin, K, N)
        assert shard.columns(0, 16).whole_N == N
        assert shard.largest == whole.largest
        type(shard)(**vars(shard))  # passes all checks
    for begin, end in ((16, 16), (-16, 16), (0, N + 16)):
        with pytest.raises(InputError, match="expected borders of some of 272 outputs"):
            whole.columns(begin, end)


def test_borders_of_shares() -> None:
    whole = matrix("q, k, v")
    assert whole.columns(112, 208).ranges == (("Q4_K", 16), ("Q6_K", 64), ("Q5_K", 16))
    assert whole.columns(112, 208).columns(16, 80).ranges == (("Q6_K", 64),)
    for span in ((8, 32), (16, 40)):
        with pytest.raises(InputError, match="expected borders in multiples of 16"):
            whole.columns(*span)
    with pytest.raises(InputError, match="columns: expected layout 'NK'"):
        WeightMatrix(normal(1, 8, 8), "float32").columns(0, 4)


EMULATED = (  # each program takes the emulator a second to compile
    ("float32", "matvec", (1, 4)),
    ("float16", "mma", (1, 16)),
    ("float8_e5m2", "mma", (4,)),
    ("bfloat16", "mma_tiles", (64,)),
    ("float32", "tiles", (64,)),
    ("Q4_K", "", (64,)),
    ("two types", "", (16,)),
)
ON_GPU = (
    *product(WEIGHTS, ("matvec", "mma", "mma_tiles", "tiles")),
    *product([HI_LO], ("mma", "mma_tiles")),
    *product([*TYPES, *RANGES], [""]),
    *product([*WEIGHTS[1:], *TYPES, *RANGES], ["wgmma"]),
)


def multiplied(
    device: Any,
    x: Array,
    w: Any,
    span: tuple[int, int],
    variant: str,
    to_peers: Any = None,
    gated: bool = False,
) -> Array:
    """Return the product of x with a shard of the outputs, plus the shard of the bias, or gated."""
    bias = device.asarray(normal(2, N)[slice(*span)])
    options: dict[str, Any] = {
        "variant": variant or None,
        "decoding": not variant,
        "to_peers": to_peers,
    }
    if variant == "wgmma":
        rounded = w.dtype == GGUF
        order = _linear_wgmma.operand(w.dtype, rounded)
        x = as_operand(x, order.dtype, order.width, rounded=rounded)
        options = {"decoding": True, "operand": order, "to_peers": to_peers}
    more = (None, None, None, None, w) if gated else (bias,)
    inputs = device.asarray(x), w, *more
    return np.asarray(LINEAR.bind(inputs, **options).run().get())


@pytest.mark.parametrize(
    ("device", "kind", "variant", "rows"),
    [
        *((SOMEWHERE[0], *case) for case in EMULATED[::6]),
        *(slow(SOMEWHERE[0], *case) for n, case in enumerate(EMULATED) if n % 6),
        *(pytest.param("gpu", *case, ROWS, marks=GPU.marks) for case in ON_GPU),
    ],
    indirect=["device"],
)
def test_products_of_shares(
    device: Any, kind: str, variant: str, rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole matrix has as many columns as lm_head, so blocks loop; a shard has fewer."""
    for module in (_linear_matvec, _linear_mma):
        monkeypatch.setattr(module, "MANY_COLUMNS", N)
        module.geometry.cache_clear()
    whole = matrix(kind).mapped(device.asarray)
    x = normal(3, 64, K)
    for M in rows:
        expected = multiplied(device, x[:M], whole, (0, N), variant)
        parts = [multiplied(device, x[:M], whole.columns(*s), s, variant) for s in SHARDS]
        assert_same_bits(np.concatenate(parts, axis=1), expected)
    for module in (_linear_matvec, _linear_mma):
        module.geometry.cache_clear()


@one_order
@pytest.mark.parametrize("variant", ["matvec", slow("mma")])
def test_shares_of_lm_head(device: Any, variant: str) -> None:
    n, begin = 16_512, 8_320
    whole = matrix("float16", n).mapped(device.asarray)
    x = device.asarray(normal(3, 1, K))
    expected = ops.linear(x, whole, variant=variant).get()
    assert _linear_matvec.order(n, K, 2) != _linear_matvec.order(begin, K, 2)
    parts = []
    for span in ((0, begin), (begin, n)):
        shard = whole.columns(*span)
        alone = ops.linear(x, replace(shard, share_of=None), variant=variant).get()
        parts.append(ops.linear(x, shard, variant=variant).get())  # another recipe
        assert np.array_equal(parts[-1], alone) == (variant == "mma")
    assert_same_bits(np.concatenate(parts, axis=1), expected)


@one_order
@pytest.mark.parametrize("kind", ["bfloat16", slow("float8_e5m2"), slow(HI_LO), "two types"])
def test_products_of_prompts(device: Any, kind: str) -> None:
    whole = matrix(kind).mapped(device.asarray)
    x = normal(3, 33, K)
    a = device.asarray(x if kind == HI_LO else x.astype(DTYPES.get(kind, np.float16)))

    def computed(w: Any) -> Array:
        bound = GEMM.bind((a, w), dtype="float32")
        return np.asarray(bound.run().get())

    parts = [computed(whole.columns(*span)) for span in SHARDS]
    assert_same_bits(np.concatenate(parts, axis=1), computed(whole))


def received(
    device: Any, peers: PeerBuffers, parts: Sequence[Array], firsts: Sequence[int]
) -> list[Array]:
    """Return the whole matrices that the GPUs receive after their kernels have sent `parts`."""
    options = {"N": sum(part.shape[1] for part in parts), "sent": True}
    found = []
    for me, (part, first) in enumerate(zip(parts, firsts, strict=True)):
        inputs = device.asarray(part), None, *peers.of(me).values()
        found.append(ALL_GATHER.bind_on_device(inputs, first=first, **options).run().get())
    return found


@pytest.mark.parametrize(
    ("device", "kind", "variant", "gated"),
    [
        (SOMEWHERE[0], "float16", "mma", True),
        (SOMEWHERE[0], "Q4_K", "", False),
        slow(SOMEWHERE[0], "float32", "matvec", False),
        slow(SOMEWHERE[0], "float32", "tiles", False),
        slow(SOMEWHERE[0], "float16", "mma", False),
        slow(SOMEWHERE[0], "Q4_K", "", True),
        *(pytest.param("gpu", *case, False, marks=GPU.marks) for case in ON_GPU),
        *(
            pytest.param("gpu", *case, True, marks=GPU.marks)
            for case in ON_GPU
            if case[1] in ("mma", "wgmma", "") and case[0] not in (HI_LO, "float32")
        ),
    ],
    indirect=["device"],
)
def test_products_send_their_columns(
    device: Any, kind: str, variant: str, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_words(monkeypatch, 8 * N)
    whole, x = matrix(kind).mapped(device.asarray), normal(3, 8, K)
    peers, firsts = PeerBuffers([0, 0]), [begin for begin, _ in SHARDS]
    for M in (1, 5, 8):  # the third round uses the first half of the peer buffers again
        expected = multiplied(device, x[:M], whole, (0, N), variant, gated=gated)
        parts = []
        for me, span in enumerate(SHARDS):
            to_peers, shard = PeerStores(peers.of(me), N, span[0]), whole.columns(*span)
            parts.append(multiplied(device, x[:M], shard, span, variant, to_peers, gated))
        for result in received(device, peers, parts, firsts):
            assert_same_bits(result, expected)
    assert not peers.aborted


HEADS: dict[Heads, tuple[tuple[int, int], ...]] = {  # heads -> shards of the heads of q
    (4, 1, 16): ((0, 3), (3, 4)),  # K and V are computed on each GPU
    (8, 2, 16): ((0, 4), (4, 8)),
    (4, 4, 16): ((0, 2), (2, 4)),
}


def of_heads(held: Cache, begin: int, end: int) -> tuple[slice, Cache]:
    """Return the columns of some heads of q, and a cache with the heads of K and V they use."""
    NH, NKV, HS = held.heads
    serves = NH // NKV
    first, last = begin // serves, -(-end // serves)
    part = slice(first * HS, last * HS)
    k, v = (np.ascontiguousarray(each[..., part]) for each in (held.k, held.v))
    return slice(begin * HS, end * HS), Cache(k, v, (end - begin, last - first, HS), held.kind)


@pytest.mark.parametrize(
    ("device", "heads", "kind"),
    [
        (SOMEWHERE[0], (4, 1, 16), "bfloat16"),
        slow(SOMEWHERE[0], (8, 2, 16), "float8_e5m2"),
        *(pytest.param("gpu", *case, marks=GPU.marks) for case in product(HEADS, KINDS)),
    ],
    indirect=["device"],
)
def test_attention_of_shares(device: Any, heads: Heads, kind: str) -> None:
    """Attention of decoding, and of new tokens after a cache, gives a shard of the heads."""
    held = random_cache(heads, [70, 70], 70, kind)
    q = normal(1, 2, heads[0] * heads[2])
    numbers = [np.array(each, np.int32) for each in ((0, 1), (69, 40), (0, 1, 2))]
    row, position, lengths = map(device.asarray, numbers)

    def computed(columns: slice, held: Cache, serves: int | None) -> tuple[Array, Array]:
        own = np.ascontiguousarray(q[:, columns])
        unread = np.zeros((2, 2 * held.k.shape[2]), np.float32)
        qkv = np.concatenate([own, unread], axis=1)
        own, qkv, k, v = map(device.asarray, (own, qkv, held.k, held.v))
        given: Any = {"n_head": held.heads[0], "kv_dtype": held.kv_dtype}
        one = ATTENTION_SPLIT.bind((own, k, v, row, position), serves=serves, **given)
        options = {"longest": 1, "variant": "tiles", **given}
        several = ATTENTION_PACKED.bind((qkv, k, v, lengths, position), **options)
        return one.run().get(), several.run().get()

    expected = computed(slice(None), held, None)
    serves = heads[0] // heads[1]
    parts = [computed(*of_heads(held, *shard), serves) for shard in HEADS[heads]]
    for got, right in zip(zip(*parts, strict=True), expected, strict=True):
        assert_same_bits(np.concatenate(got, axis=1), right)


@pytest.mark.parametrize(
    ("device", "heads", "kind"),
    [
        (SOMEWHERE[0], (8, 2, 16), "float8_e5m2"),
        *(
            pytest.param("gpu", *case, marks=GPU.marks)
            for case in product([(8, 2, 16), (4, 4, 64)], KINDS)
        ),
    ],
    indirect=["device"],
)
def test_attention_sends_its_columns(
    device: Any, heads: Heads, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 1 has no position, row 2 no sequence: their words are arbitrary, but must arrive."""
    few_words(monkeypatch)
    (NH, _, HS), held = heads, random_cache(heads, [70, 70], 70, kind)
    q, width, peers = normal(1, 4, NH * HS), NH * HS // 2, PeerBuffers([0, 0])
    numbers = (0, 1, -1, 1), (69, -1, 5, 40)
    places = [device.asarray(np.array(each, np.int32)) for each in numbers]

    def computed(columns: slice, held: Cache, to_peers: PeerStores | None = None) -> Array:
        own = device.asarray(np.ascontiguousarray(q[:, columns]))
        inputs = own, *map(device.asarray, (held.k, held.v)), *places
        given: Any = {"n_head": held.heads[0], "kv_dtype": held.kv_dtype, "to_peers": to_peers}
        return np.asarray(ATTENTION_SPLIT.bind(inputs, **given).run().get())

    expected, halves = computed(slice(None), held), ((0, NH // 2), (NH // 2, NH))
    for _ in range(3):
        parts = [
            computed(*of_heads(held, *half), PeerStores(peers.of(me), NH * HS, me * width))
            for me, half in enumerate(halves)
        ]
        for result in received(device, peers, parts, (0, width)):
            assert_same_bits(result[::3], expected[::3])
    assert not peers.aborted


@one_order
@pytest.mark.parametrize("kind", [*map(slow, DTYPES), HI_LO])
def test_attention_of_prompts(device: Any, kind: str) -> None:
    (NH, NKV, HS), T = (4, 2, 64), 40
    qkv = normal(1, T, (NH + 2 * NKV) * HS).astype(DTYPES.get(kind, np.float32))
    lengths = device.asarray(np.array([0, 25, T], np.int32))

    def computed(rows: Array, n_head: int, n_kv_head: int) -> Array:
        given: Any = device.asarray(np.ascontiguousarray(rows))
        given = ops.hi_lo(given) if kind == HI_LO else given
        options = {"n_head": n_head, "n_kv_head": n_kv_head, "causal": True, "max_seqlen": 25}
        out = VARLEN.bind((given, lengths), **options).run()
        return np.asarray(out.get())

    q, k, v = np.split(qkv, [NH * HS, (NH + NKV) * HS], axis=1)
    halves = [[np.split(each, 2, axis=1)[i] for each in (q, k, v)] for i in range(2)]
    parts = [computed(np.concatenate(half, axis=1), NH // 2, NKV // 2) for half in halves]
    assert_same_bits(np.concatenate(parts, axis=1), computed(qkv, NH, NKV))

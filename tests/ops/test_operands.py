"""Operands instead of floats (kernels_cu/lib/operands.cuh), from one step to the next product.

Operands that a step stores, and products computed from them, have the same bits as with floats.
"""

from __future__ import annotations

import itertools
import pickle
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from launch_recorder import DEVICES, recording
from numpy.typing import NDArray

from gpt2block import GPT2, GPT2Weights, InputError
from gpt2block.bulk import Predictor
from gpt2block.bulk.predictor import Arguments
from gpt2block.checks import FLOATS
from gpt2block.cuda import cupy, replaced
from gpt2block.cuda.formats import GGUF, FormatOptions
from gpt2block.cuda.kernels import HI_LO
from gpt2block.engine.cuda import choice as cuda_choice
from gpt2block.engine.cuda.model import CudaModel
from gpt2block.engine.cuda.steps import DecodingSteps
from gpt2block.models.config import GPT2Config
from gpt2block.models.config.llama import LlamaConfig
from gpt2block.models.weights.hi_lo import HiLoMatrix, scale_for
from gpt2block.models.weights.matrix import WeightMatrix
from gpt2block.ops.attention_cached import ATTENTION_SPLIT
from gpt2block.ops.engines import linear_wgmma
from gpt2block.ops.layernorm import OPERATION as LAYERNORM
from gpt2block.ops.linear import OPERATION as LINEAR
from gpt2block.ops.linear import operands_of
from gpt2block.ops.operands import Operand
from gpt2block.ops.registry import STEPS
from gpt2block.ops.rmsnorm import OPERAND
from gpt2block.ops.rmsnorm import OPERATION as RMSNORM
from tests import devices, plain
from tests.devices import GPU, assert_same_bits, one_order, slow
from tests.outlines import decode, decode_sums

Array = NDArray[Any]
DTYPES: dict[str, Any] = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
BOUND = 6.0  # largest magnitude of hi/lo values
SCALE = scale_for(BOUND)
WEIGHTS = GPT2Weights.random(0, GPT2Config(1, 1, 64, 8, 40))
PRODUCTS = "linear", "linear_qkv", "gated_sums", "linear_sums", "rope_sums"


@pytest.mark.parametrize("capability", DEVICES)
def test_kernels_take_the_operands_that_are_predicted(capability: str) -> None:
    sizes = itertools.product((1, 17, 65, 300), (8, 24, 64, 1000, 1024), (64, 20_000))
    with recording(capability):
        for (M, K, N), dtype in itertools.product(sizes, ("float16", "bfloat16", "float8_e5m2")):
            data = cupy.empty((N, K), "uint8" if dtype == "float8_e5m2" else FLOATS[dtype])
            inputs = cupy.empty((M, K), "float32"), WeightMatrix(data, dtype, None, "NK")
            for operand in operands_of(dtype, M, {"w": (K, N)}).get("w", ()):
                (launch,) = LINEAR.bind(inputs, decoding=True, operand=operand).launches
                wanted = "decode_wgmma" if operand.width else "decode_mma"
                assert launch.name.startswith(wanted), (M, K, N, operand)


def made_of(kind: str, width: int = 0, rounded: bool = False) -> Operand:
    made = Operand(kind, width, SCALE if kind == HI_LO else 1.0, rounded)
    return made.with_sums(32)


def chunk_sums(x: Array) -> Array:
    """Sum each 32 values along K of x (M, K), in float16, in the order of lib/chunk_sums.cuh."""
    sums = x.reshape(len(x), -1, 32)
    for _ in range(2):  # sums of pairs, then of fours
        sums = sums[..., ::2] + sums[..., 1::2]
    while sums.shape[-1] > 1:
        half = sums.shape[-1] // 2
        sums = sums[..., :half] + sums[..., half:]
    sums = sums[..., 0] / np.float32(32)
    high = sums.astype(np.float16)
    low = (sums - high.astype(np.float32)).astype(np.float16)
    words = np.stack([high, low], axis=-1).view(np.float32).reshape(len(x), -1, 4)
    tiles = [words[n : n + 64].transpose(1, 0, 2).reshape(-1) for n in range(0, len(x), 64)]
    return np.concatenate(tiles)


def as_operand(
    x: Array, kind: str, width: int = 0, rounded: bool = False, summed: bool = False
) -> Array:
    """Return floats (M, K) as terms: for each pair of values both high terms, then both low ones.

    width: if not 0, terms have the order of wgmma that lib/operands.cuh defines. rounded: low terms
    are 0; in the order of wgmma they are omitted, so the second half of (M, K) is unused (NaN)
    except, if summed, for the sums of chunks.
    """
    dtype, factor = DTYPES.get(kind, np.float16), 1
    if kind == HI_LO:
        x, factor = x / np.float32(SCALE), 2048
    high = x.astype(dtype)
    low = ((x - high.astype(np.float32)) * np.float32(factor)).astype(dtype)
    if rounded:
        low = np.zeros_like(low)
    pairs = np.stack([part.reshape(*x.shape[:-1], -1, 2) for part in (high, low)], axis=-2)
    words = np.ascontiguousarray(pairs).view(np.uint16).reshape(*x.shape[:-1], -1)
    floats: Array = words.view(np.float32)
    if not width:
        return floats
    count, ordered = 2, []
    if rounded:
        count, floats = 1, floats[:, ::2]
    for first in range(0, len(x), 64):
        tile = floats[first : first + 64]  # (rows, chunks, lanes, units per chunk, terms)
        n = count * len(tile)
        units = tile.reshape(len(tile), -1, 4, width // 2, count).transpose(1, 3, 0, 4, 2)
        lines = units.reshape(-1, 8, n, 4).transpose(0, 2, 1, 3)  # 8 units of 16 bytes
        line, unit = np.ogrid[: lines.shape[1], :8]
        ordered.append(lines[:, line, unit ^ line % 8].reshape(-1))
    nothing = np.full(x.size - floats.size, np.nan, np.float32)
    if summed:
        nothing[: x.size // 32] = chunk_sums(high.astype(np.float32))
    return np.concatenate([*ordered, nothing]).reshape(x.shape)


def assert_operand(made: Array, x: Array, of: Operand) -> None:
    """Assert that an array has the terms of x; ignore its unused part."""
    expected = as_operand(x, of.dtype, of.width, of.rounded, of.summed)
    has_place = expected.size // 2 if of.rounded and of.width else expected.size
    has_place += expected.size // 32 if of.summed else 0
    assert_same_bits(made.reshape(-1)[:has_place], expected.reshape(-1)[:has_place])


def rounded_to_float16(x: Array) -> Array:
    rounded: Array = x.astype(np.float16).astype(np.float32)
    return rounded


def matrix(N: int, K: int, dtype: str) -> WeightMatrix:
    w = WeightMatrix.quantize(plain.normal(1, N, K) / np.float32(K**0.5), dtype, "NK")
    scale = None if w.scale is None else cupy.asarray(w.scale)
    return WeightMatrix(cupy.asarray(w.data), w.dtype, scale, w.layout)


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("shuffled", "float8_e4m3fn"),
        slow("shuffled", "bfloat16"),
        *(pytest.param("gpu", d, marks=GPU.marks) for d in (*DTYPES, "float8_e4m3fn")),
    ],
    indirect=["device"],
)
def test_products_of_floats_that_store_terms(device: Any, dtype: str) -> None:
    """Tests of linear-terms in tests/products.py have products of terms, whose bits are equal."""
    x, w, bias = plain.normal(0, 19, 272), matrix(50, 272, dtype), cupy.asarray(plain.normal(2, 50))
    (kind,) = operands_of(dtype, 19, {"w": (272, 50)})["w"]
    rounds = [(False, kind), (True, kind._replace(rounded=True))]
    for rounded, order in rounds[: 1 + (kind.dtype == "float16")]:
        exact = rounded_to_float16(x) if rounded else x
        inputs, ends = (cupy.asarray(exact), w, bias), {"gelu": True}
        expected = LINEAR.bind(inputs, variant="mma", **ends).run().get()
        terms = cupy.asarray(as_operand(x, kind.dtype, rounded=rounded))
        got = LINEAR.bind((terms, w, bias), variant="mma", operand=order, **ends).run().get()
        assert_same_bits(got, expected)
        given: list[tuple[Any, dict[str, Any]]] = [(terms, {"operand": order})]
        if rounded:
            floats, rounding = cupy.asarray(x), {"x_dtype": "float16"}
            given.append((floats, rounding))
            for variant in ("mma", "mma_tiles"):
                bound = LINEAR.bind((floats, w, bias), variant=variant, **ends, **rounding)
                assert_same_bits(bound.run().get(), expected)
        for rows, how in given:
            made = LINEAR.bind((rows, w, bias), decoding=True, to_operand=order, **ends, **how)
            assert [launch.name for launch in made.launches] == ["decode_mma_tiles"]
            assert_operand(made.run().get(), expected, order)


@one_order
def test_channels_in_another_order(device: Any) -> None:
    """Channels are stored as floats, as terms, and in 16 bits, in which no bit changes."""
    x, channels = plain.normal(0, 3, 1408), np.random.default_rng(0).permutation(1408)
    inputs = cupy.asarray(x), cupy.asarray(channels.astype(np.int32))
    expected = OPERAND.bind_on_device(inputs).run()
    np.testing.assert_array_equal(expected.get(), x[:, channels])
    for kind in (made_of("float16"), linear_wgmma.operand(GGUF, rounded=True)):
        terms = OPERAND.bind_on_device(inputs, to_operand=kind).run()
        assert_operand(terms.get(), x[:, channels], kind)
    narrow = cupy.asarray(x.astype(np.float16))
    got = OPERAND.bind_on_device((narrow, inputs[1]), dtype="float16").run().get()
    np.testing.assert_array_equal(got, x.astype(np.float16)[:, channels])
    for refused, options in (((narrow, inputs[1]), {}), ((narrow,), {"dtype": "float16"})):
        with pytest.raises(InputError, match="x in float16: expected float32"):
            OPERAND.bind_on_device(refused, **options)


@devices.combinations(times=1, along="K", M=[33, 17, 64, 65, 200], K=[264])
def test_products_of_hi_lo_operands(device: Any, M: int, K: int) -> None:
    """With every kernel and in any batch, products equal those of the original floats."""
    N = 50
    x, residual, bias = plain.normal(0, M, K), plain.normal(3, M, N), plain.normal(2, N)
    w = hi_lo_matrix(N, K)
    (kind,) = operands_of(HI_LO, M, {"w": (K, N)})["w"]
    assert kind == Operand(HI_LO)
    kind = made_of(HI_LO)

    def product(of: Array, rows: slice, **options: Any) -> Array:
        inputs = [None if a is None else cupy.asarray(a[rows]) for a in (of, residual)]
        given = inputs[0], w, cupy.asarray(bias), None, None, inputs[1]
        result: Array = LINEAR.bind(given, gelu=True, **options).run().get()
        return result

    every = slice(None)
    expected = product(x, every, variant="mma", x_bound=BOUND)
    for variant in ("mma", "mma_tiles"):
        made = product(as_operand(x, HI_LO), every, variant=variant, operand=kind)
        assert_same_bits(made, expected)
    for rows in (slice(M - 1, M), slice(M // 2, None)):
        alone = product(as_operand(x, HI_LO), rows, decoding=True, operand=kind)
        assert_same_bits(alone, expected[rows])
    larger = kind._replace(scale=4 * SCALE)
    made = product(as_operand(x, HI_LO), every, decoding=True, operand=kind, to_operand=larger)
    assert_same_bits(made, as_operand(expected / 4, HI_LO))


def hi_lo_matrix(N: int, K: int) -> HiLoMatrix:
    numbers = HiLoMatrix.from_float32(plain.normal(1, N, K) / np.float32(K**0.5))
    return numbers.mapped(cupy.asarray)


@one_order
def test_qkv_of_a_hi_lo_operand(device: Any) -> None:
    x, B, C, w = plain.normal(0, 3, 64), 3, 24, hi_lo_matrix(72, 64)
    found = []
    given: list[tuple[Array, dict[str, Any]]] = [(x, {"x_bound": BOUND})]
    for rows, options in (*given, (as_operand(x, HI_LO), {"operand": made_of(HI_LO)})):
        caches = [cupy.zeros((B, 2, C), "float32") for _ in range(2)]
        row, position = (cupy.asarray(np.arange(B, dtype=np.int32) % n) for n in (3, 2))
        inputs = (cupy.asarray(rows), w, None, None, None, *caches, row, position)
        q = STEPS["linear_qkv"].bind(inputs, **options).run().get()
        found.append([q, *(cache.get() for cache in caches)])
    for ours, theirs in zip(*found, strict=True):
        assert_same_bits(ours, theirs)


@devices.combinations(
    times=1, layout=[(70, 0), (768, 8), (768, 0), (768, 16)], kind=["bfloat16", "float16", HI_LO]
)
def test_layernorm(device: Any, layout: tuple[int, int], kind: str) -> None:
    (C, width), kind = layout, "float16" if kind == HI_LO and layout[1] else kind
    inputs = [
        cupy.asarray(plain.normal(seed, *shape)) for seed, shape in enumerate([(9, C), (C,), (C,)])
    ]
    options: dict[str, Any] = {"eps": 1e-5, "variant": "decode"}
    floats = LAYERNORM.bind(tuple(inputs), **options).run().get()
    for rounded in (False, True):
        order = made_of(kind, width, rounded)
        made = LAYERNORM.bind(tuple(inputs), to_operand=order, **options).run().get()
        assert_operand(made, floats, order)


@pytest.mark.parametrize(
    ("C", "width", "kind"),
    [
        *((70, 0, "bfloat16"), slow(70, 0, HI_LO), (768, 0, HI_LO)),
        *((768, 8, "float16"), (768, 2, "float16"), slow(128, 2, "float16")),
    ],
)
@one_order
def test_rmsnorm(device: Any, C: int, width: int, kind: str) -> None:
    inputs = cupy.asarray(plain.normal(0, 70, C)), cupy.asarray(plain.normal(1, C))
    floats = RMSNORM.bind(inputs, variant="stream").run().get()
    for rounded in (False, True):
        order = made_of(kind, width, rounded)
        made = RMSNORM.bind(inputs, variant="stream", to_operand=order).run().get()
        assert_operand(made, floats, order)
        made = OPERAND.bind(inputs[:1], to_operand=order).run().get()
        assert_operand(made, inputs[0].get(), order)


@devices.combinations(
    times=1,
    along="kind",
    shape=[(3, 6, 0), (2, 64, 16), (2, 64, 2), (2, 40, 0), (1, 64, 8), (8, 48, 2), (4, 32, 2)],
    kind=[HI_LO, "bfloat16", "float16"],
)
def test_attention(device: Any, shape: tuple[int, int, int], kind: str) -> None:
    """Attention stores terms of its result. shape: heads, channels per head, width of terms."""
    n_head, HS, width = shape
    kind = "float16" if width == 2 else kind  # width 2 belongs to GGUF blocks
    C, dtype = n_head * HS, DTYPES.get(kind, np.float32)
    k, v = (cupy.asarray(plain.normal(n, 2, 70, C).astype(dtype)) for n in (1, 2))
    row, position = (cupy.asarray(np.array(a, np.int32)) for a in ([1, 0, 1], [69, 3, 40]))
    inputs = (cupy.asarray(plain.normal(0, 3, C)), k, v, row, position)
    floats = ATTENTION_SPLIT.bind(inputs, n_head=n_head).run().get()
    for rounded in (True,) if width and replaced() else (False, True):
        order = made_of(kind, width, rounded).with_sums(HS)
        made = ATTENTION_SPLIT.bind(inputs, n_head=n_head, to_operand=order).run().get()
        assert_operand(made, floats, order)


def step_of(model: Any, rows: slice, floats: bool = False) -> tuple[int, Array]:
    """Run decoding steps for three tokens of some rows, without a prompt.

    Return the number of products of terms in a step, and the logits of the last one.
    """
    engine = model.engine
    assert isinstance(engine, CudaModel)
    ids = np.random.default_rng(0).integers(40, size=(17, 3)).astype(np.int32)[rows]
    slots = np.arange(len(ids), dtype=np.int32)
    with engine.running():
        steps = DecodingSteps(engine, engine.new_cache(len(ids), 8), floats)
        for place, tokens in enumerate(ids.T):
            logits = steps.logits_of(engine, slots, tokens, np.full_like(slots, place))
        recorded = steps.of(engine, slots).recording(engine).steps.values()
        return sum("operand" in each.step.attrs for each in recorded), logits


EVERY, FIRST = slice(17), slice(1)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        *(slow("shuffled", dtype) for dtype in ("float32", "float8_e4m3fn")),
        *(pytest.param("gpu", d, marks=GPU.marks) for d in ("float32", "float16", "float8_e4m3fn")),
    ],
    indirect=["device"],
)
def test_a_step_of_many_rows(device: Any, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With terms, logits have the bits of a step with floats, and of a row alone.

    Products that round x have other bits than products of two terms.
    """
    rounds = dtype != "float32"
    monkeypatch.setattr(cuda_choice, "can_round", lambda dtype, inputs: rounds)
    model = GPT2(WEIGHTS, "cuda", dtype)
    (with_operands, got), (without, of_floats) = step_of(model, EVERY), step_of(model, EVERY, True)
    assert (with_operands, without) == (5, 0)
    assert_same_bits(of_floats, got)
    assert_same_bits(step_of(model, FIRST)[1], got[:1])
    if rounds:
        monkeypatch.setattr(cuda_choice, "can_round", lambda dtype, inputs: False)
        _, exact = step_of(GPT2(WEIGHTS, "cuda", dtype), EVERY)
        assert 0 < np.abs(got - exact).max() <= 2e-3 * np.abs(exact).max()


def test_a_product_without_an_operand_gives_none() -> None:
    """If 8 divides the channels of h but not of x, only the second product could take terms."""
    with recording("8.0"):
        model = GPT2(GPT2Weights.random(0, GPT2Config(1, 2, 36, 8, 40)), "cuda", "float16")
        assert step_of(model, EVERY)[0] == 0


def test_a_predictor_pickled_by_version_0_2() -> None:
    """Such pickles have single dtypes and the option activations; its values are refused."""
    formats = FormatOptions("float16", "float8_e5m2")
    expected = Arguments("score", device="cpu", formats=formats)
    for activations in (None, "float16"):
        old = object.__new__(Arguments)
        state = {name: each for name, each in vars(expected).items() if name != "formats"}
        state |= {"dtype": "float16", "kv_dtype": "float8_e5m2", "activations": activations}
        vars(old).update(state)
        pickled = pickle.dumps(Predictor.later(old))
        if activations is None:
            assert pickle.loads(pickled).arguments == expected
            continue
        with pytest.raises(InputError, match="activations is no option any more"):
            pickle.loads(pickled)


def test_the_products_that_round() -> None:
    """With x_dtype, all products that take no terms round."""
    gpt2 = GPT2Config(n_layer=2, n_head=2, n_embd=128, n_ctx=40, vocab_size=53)
    llama = LlamaConfig(n_layer=2, n_head=2, n_kv_head=1, n_embd=128, n_ff=256, vocab_size=53)
    known = {"w_fc": (Operand("float16", rounded=True),)}
    for make in (
        partial(decode, gpt2),
        partial(decode, gpt2, False, known),
        partial(decode, llama),
        partial(decode_sums, llama, 2),
    ):
        products = [step for step in make(x_dtype="float16") if step.op in PRODUCTS]
        assert len(products) >= 4 * 2 + 1 - 2 * (make.func is decode_sums)
        for step in products:
            assert (step.attrs.get("x_dtype") == "float16") != ("operand" in step.attrs)
        assert not any("x_dtype" in step.attrs for step in make())


@one_order
def test_what_is_no_operand(device: Any) -> None:
    dtypes = ("float32", "float16", "float8_e4m3fn")
    found = [operands_of(dtype, 19, {"w": (24, 8)}) for dtype in dtypes]
    assert found == [{}, {"w": (Operand("float16"),)}, {}]
    assert not operands_of("float16", 3, {"w": (24, 8)})
    assert operands_of(HI_LO, 17, {"w": (24, 8), "v": (20, 8)}) == {"w": (Operand(HI_LO),)}
    assert not operands_of(HI_LO, 16, {"w": (24, 8)})

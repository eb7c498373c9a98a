"""Weights kept in GGUF blocks: their layout, products, rows, whole models, and blocks_matmul."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, product
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from fuzzing.gguf_writer import metadata_of, tensors_of, write
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray

from gpt2block import (
    GPT2Config,
    GPT2Weights,
    InputError,
    LlamaConfig,
    LlamaWeights,
    from_pretrained,
    ops,
    reference,
)
from gpt2block.cuda import cupy, replaced
from gpt2block.cuda.cards import gpu
from gpt2block.cuda.formats import GGUF
from gpt2block.emulator import emulated
from gpt2block.emulator.ptx.engine import CHECKED
from gpt2block.files.checkpoints import Checkpoint, save_pretrained
from gpt2block.files.checkpoints.gguf_types import InBlocks
from gpt2block.models.weights.gguf import INT4, INT4_128, TYPES, GgufMatrix, random_blocks
from gpt2block.models.weights.gguf_packing import BlockRows, packed_on_device
from gpt2block.models.weights.matrix import WeightMatrix
from gpt2block.ops.blocks_matmul import OPERATION as BLOCKS_MATMUL
from gpt2block.ops.engines import linear_wgmma
from gpt2block.ops.gemm import WIDEN
from gpt2block.ops.linear import LINEAR_QKV, LINEAR_ROPE, normalizes, workspace_floats
from gpt2block.ops.linear import OPERATION as LINEAR
from gpt2block.ops.rmsnorm import OPERATION as RMSNORM
from gpt2block.ops.to_fp8 import ROW_NORMS
from tests.devices import EVERYWHERE, GPU, assert_same_bits, one_order, running_on, slow
from tests.four_bit import LAYOUTS
from tests.four_bit import write as write_four_bit
from tests.gpus import cupy_with
from tests.ops.test_operands import as_operand, assert_operand

LLAMA = LlamaConfig(
    n_layer=1, n_head=4, n_kv_head=2, n_embd=256, n_ff=512, n_ctx=96, vocab_size=101
)
GPT = GPT2Config(n_layer=1, n_head=2, n_embd=128, n_ctx=96, vocab_size=101)
MIXED = (("Q4_K", 48), ("Q6_K", 16), ("Q5_K", 16))
K_OF = {32: 160, 128: 384, 256: 512}


def decoded(raw: NDArray[np.uint8], name: str) -> Any:
    """Return the weights (N, K) of rows of blocks: of GGUF by the package, others exactly."""
    if not TYPES[name].zero:
        return dequantize(raw, gguf.GGMLQuantizationType[name])
    blocks = raw.reshape(len(raw), -1, TYPES[name].nbytes)
    zero, scale = blocks[..., :1], blocks[..., :4].copy()
    scale[..., 0] = 0
    low = blocks[..., 4:].reshape(*blocks.shape[:2], -1, 16)
    codes = np.concatenate([low % 16, low // 16], axis=-1).reshape(*blocks.shape[:2], -1)
    exact = (codes.astype(np.float64) - zero) * scale.view(np.float32)
    return exact.reshape(len(raw), -1)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("N", [1, 8, 13])
@pytest.mark.parametrize("blocks", [1, 3, 5])
def test_weights_are_those_that_the_package_decodes(name: str, N: int, blocks: int) -> None:
    K = blocks * TYPES[name].size
    raw = random_blocks(name, N, K)
    packed = GgufMatrix.pack([(name, raw)], K)
    expected = decoded(raw, name)
    np.testing.assert_array_equal(packed.dequantized(), expected.T)
    ids = np.array([[0, N - 1], [N // 2, 0]])
    np.testing.assert_array_equal(packed[ids], expected[ids])
    x = np.random.default_rng(1).standard_normal((2, 3, K)).astype(np.float32)
    np.testing.assert_allclose(x @ packed, x @ expected.T, rtol=1e-4, atol=1e-4)
    assert packed.largest is not None
    assert np.abs(expected).max() <= packed.largest <= 9 * np.abs(expected).max() + 1e-6


def test_bytes_stay_those_of_the_file() -> None:
    for name, kind in TYPES.items():
        assert GgufMatrix.random([(name, 64)], 1024).nbytes == 64 * 1024 // kind.size * kind.nbytes
    assert GgufMatrix.random(MIXED, 512).ranges == MIXED


def assert_same_blocks(ours: GgufMatrix, expected: GgufMatrix) -> None:
    np.testing.assert_array_equal(ours.data.get(), expected.data)
    np.testing.assert_equal(ours.largest, expected.largest)
    assert ours.ranges == expected.ranges


@pytest.mark.parametrize("where", ["shuffled", pytest.param("gpu", marks=GPU.marks)])
@pytest.mark.parametrize("name", TYPES)
def test_a_gpu_packs_the_bytes_that_numpy_packs(
    where: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are read in pieces; some scales are infinity or NaN."""
    monkeypatch.setattr("gpt2block.cuda.arrays.READ_BYTES", 1000)
    with running_on(where):
        sizes = (
            product((1, 8, 13, 1031), (1, 3, 5)) if where == "gpu" else ((1, 1), (8, 3), (13, 5))
        )
        for N, blocks in sizes:
            K = blocks * TYPES[name].size
            raw = random_blocks(name, N, K)
            for scale in (1.0, np.inf, np.nan):
                if scale != 1:
                    at = TYPES[name].nbytes - 2 if name == "Q6_K" else 0  # offset of the scale
                    last = raw[-1, -TYPES[name].nbytes :]
                    number = (np.float32 if TYPES[name].zero else np.float16)(-scale).tobytes()
                    if TYPES[name].fp4:  # the largest and the least power of two
                        number = b"\xff" if scale == np.inf else b"\0"
                    last[at : at + len(number)] = np.frombuffer(number, np.uint8)
                expected = GgufMatrix.pack([(name, raw)], K)
                assert_same_blocks(packed_on_device([BlockRows.of(name, raw)], K), expected)


ROWS = [1, 2, 3, 8, 16, 17, 64, 65, 512]


EXACT: list[Any] = [
    ("shuffled", MIXED, [1, 9], None),
    slow("reverse", (("Q8_0", 19),), [1, 9], "float16"),
    ("shuffled", (("Q5_1", 19),), [2], "float16"),
    ("shuffled", ((INT4, 19),), [2, 9], None),
    ("shuffled", ((INT4_128, 19),), [2, 9], "float16"),
    ("shuffled", (("MXFP4", 19),), [2, 9], None),
    ("turing", (("Q4_K", 19),), [1, 33], "float16"),
]
EXACT += [
    pytest.param("gpu", ranges, ROWS, x_dtype, marks=GPU.marks)
    for ranges in (MIXED, *(((name, n),) for name in TYPES for n in (19, 1000, 20_000)))
    for x_dtype in (None, "float16")
]


@pytest.mark.parametrize(("where", "ranges", "rows", "x_dtype"), EXACT)
def test_products_are_exact_and_the_same_in_any_batch(
    where: str, ranges: tuple[tuple[str, int], ...], rows: list[int], x_dtype: str | None
) -> None:
    """The error against float64 is at most the error of float16 weights."""
    K = K_OF[TYPES[ranges[0][0]].size]
    with running_on(where):
        w = GgufMatrix.random(ranges, K)
        given = w.mapped(cupy.asarray)
        rng = np.random.default_rng(2)
        x = rng.standard_normal((max(rows), K)).astype(x_dtype or np.float32).astype(np.float32)
        bias = rng.standard_normal(w.N).astype(np.float32)
        bias_there = cupy.asarray(bias)
        options: dict[str, Any] = {"decoding": True, "x_dtype": x_dtype}

        def product(matrix: Any, M: int) -> NDArray[Any]:
            inputs = cupy.asarray(x[:M]), matrix, bias_there
            found: NDArray[Any] = LINEAR.bind_on_device(inputs, **options).run().get()
            return found

        exact = x.astype(np.float64) @ w.dequantized() + bias
        whole = product(given, max(rows))
        for M in rows:
            np.testing.assert_array_equal(product(given, M), whole[:M])
        floats = WeightMatrix(
            cupy.asarray(w.dequantized().T.astype(np.float16)), "float16", layout="NK"
        )
        ours, theirs = (np.abs(each - exact).max() for each in (whole, product(floats, max(rows))))
        assert ours <= theirs


ROPE: dict[str, Any] = {"n_head": 1, "growth": (0.5, 1)}


def rotations_of(M: int, D: int) -> NDArray[Any]:
    return reference.rotations(np.arange(M), np.linspace(0.1, 1, D // 2)).astype(np.float32)


def every_product(x: Any, w: Any, up: Any, bias: Any, residual: Any, **given: Any) -> Iterator[Any]:
    """Yield products: plain, gated, with RoPE, of q, k and v, and with GELU and a residual."""
    M, D = len(x), w.N // 3
    plain, floats = {"decoding": True, **given}, workspace_floats("file", w.N)
    sums = cupy.zeros(floats, "float32") if floats else None
    yield LINEAR.bind_on_device((x, w, bias), **plain).run()
    yield LINEAR.bind_on_device((x, w, None, None, None, None, up), **plain).run()
    by = cupy.asarray(rotations_of(M, D))
    for operation, options, extra in (
        (LINEAR_ROPE, {**ROPE, **given}, (bias, by)), (LINEAR_QKV, given, (bias, None, None)),
    ):  # fmt: skip
        k, v = (cupy.zeros((M, 1, D), "float16") for _ in range(2))
        rows = cupy.asarray(np.arange(M, dtype=np.int32)), cupy.zeros(M, "int32")
        q = operation.bind_on_device((x, w, *extra, k, v, *rows), **options).run()
        yield from (q, k, v)
    inputs = x, w, bias, None, None, residual, None, sums
    yield LINEAR.bind_on_device(inputs, gelu=True, **plain).run()


def exact_products(x: Any, w: Any, up: Any, bias: Any, residual: Any) -> list[NDArray[Any]]:
    M, D = len(x), w.N // 3
    y, identity = x @ w, WeightMatrix(np.eye(w.N, dtype=np.float32), "float32", layout="KN")
    k, v, rows = *np.zeros((2, M, 1, D), np.float32), np.arange(M)
    places = k, v, rows, 0 * rows
    q = reference.linear_rope(y, identity, bias, rotations_of(M, D), *places, *ROPE.values())
    apart = [(y + bias)[:, n * D : (n + 1) * D] for n in range(3)]
    ends = reference.gelu(y + bias) + residual
    return [y + bias, reference.silu_mul(y, x @ up), q, k[:, 0], v[:, 0], *apart, ends]


@pytest.mark.parametrize(
    ("where", "ends", "products"),
    [
        ("shuffled", [(2, 2), (9, 9)], 5),
        slow("shuffled", [(2, 2), (9, 9)], 9),
        pytest.param("gpu", [(1, 64), (8, 64), (16, 64), (65, 513)], 9, marks=GPU.marks),
    ],
)
def test_every_product(where: str, ends: list[tuple[int, int]], products: int) -> None:
    """Weights have two types. Rows have the same bits in any batch."""
    K, D, rng = 512, 32, np.random.default_rng(6)
    w, up = (GgufMatrix.random([("Q5_K", 2 * D), ("Q6_K", D)], K, seed) for seed in (1, 2))
    bias = rng.standard_normal(w.N, np.float32)
    for few, many in ends:
        x, residual = (rng.standard_normal((many, size), np.float32) for size in (K, w.N))
        expected = exact_products(x, w, up, bias, residual)[:products]
        with running_on(where):
            there, gate = (matrix.mapped(cupy.asarray) for matrix in (w, up))
            rows, shift, added = map(cupy.asarray, (x, bias, residual))
            whole, some = (
                islice(every_product(rows[:M], there, gate, shift, added[:M]), products)
                for M in (many, few)
            )
            for got, alone, exact in zip(whole, some, expected, strict=True):
                result = got.get().reshape(exact.shape)
                np.testing.assert_allclose(
                    result, exact, rtol=2e-3, atol=2e-3 * np.abs(exact).max()
                )
                assert_same_bits(alone.get(), got.get()[:few])


@pytest.mark.parametrize("where", ["shuffled", pytest.param("gpu", marks=GPU.marks)])
def test_rows_that_a_product_normalizes(where: str) -> None:
    """More than eight rows are divided among blocks; each row has the same bits as alone."""
    rng, K = np.random.default_rng(0), 160
    x, gamma = (rng.standard_normal(shape, np.float32) for shape in ((19, K), (K,)))
    with running_on(where):
        w, up = (GgufMatrix.random([("Q4_1", 48)], K, n).mapped(cupy.asarray) for n in (1, 2))
        by = cupy.asarray(gamma)

        def normalized(rows: Any) -> Any:
            given = cupy.asarray(np.ascontiguousarray(rows))
            bound = LINEAR.bind_on_device((given, w, None, by, None, None, up), decoding=True)
            (launch,) = bound.launches
            assert launch.grid[1] == -(-len(rows) // 8)
            return bound.run().get()

        whole = normalized(x)
        for m in (0, 7, 8, 15, 16, 18):
            np.testing.assert_array_equal(whole[m : m + 1], normalized(x[m : m + 1]))


@pytest.mark.parametrize("K", [slow(160), 512, slow(2048), slow(3072), slow(4096)])
@pytest.mark.parametrize("where", ["shuffled", pytest.param("gpu", marks=GPU.marks)])
def test_norm_of_a_product_has_the_bits_of_its_own_kernel(where: str, K: int) -> None:
    rng, eps = np.random.default_rng(K), {"eps": 1e-6}
    x, gamma = (rng.standard_normal(shape, np.float32) for shape in ((1, K), K))
    with running_on(where):
        if not normalizes(1, K):
            pytest.skip("a kernel of its own computes the norm")
        w, up = (GgufMatrix.random([("Q4_1", 48)], K, n).mapped(cupy.asarray) for n in (1, 2))
        given, by = cupy.asarray(x), cupy.asarray(gamma)
        for rounding in ({}, {"x_dtype": "float16"}):
            how = {"decoding": True, **rounding}
            y = RMSNORM.bind_on_device((given, by), variant="stream", **eps).run()
            apart = LINEAR.bind_on_device((y, w, None, None, None, None, up), **how).run().get()
            inputs = given, w, None, by, None, None, up
            got = LINEAR.bind_on_device(inputs, **how, **eps).run().get()
            np.testing.assert_array_equal(got, apart)


SEVERAL = "Q4_K", "Q6_K", "Q5_K"


@pytest.mark.parametrize(
    ("device", "types", "units", "products"),
    [
        ("shuffled", ("Q4_K",), 3, 2),
        ("shuffled", (INT4,), 3, 2),
        ("hopper", (INT4,), 3, 2),
        slow("hopper", (INT4_128,), 3, 2),
        ("hopper", ("MXFP4",), 3, 2),
        slow("shuffled", SEVERAL[:2], 3, 1),
        slow("shuffled", SEVERAL, 3, None),
        *(
            pytest.param("gpu", types, units, None, marks=GPU.marks)
            for types in [*((name,) for name in TYPES), SEVERAL]
            for units in (9, 8, 22)
        ),
    ],
    indirect=["device"],
)
def test_products_of_operands_have_the_same_bits(
    device: Any, types: tuple[str, ...], units: int, products: int | None
) -> None:
    """K has few splits, the most splits (shared by sets of warps), or a shorter last split.

    products: number of products of `every_product`; None: all.
    """
    if not gpu().has_bf16:
        pytest.skip("products read floats")
    K = units * (256 if TYPES[types[0]].size == 256 else 128)
    D, order = 128, linear_wgmma.operand(GGUF, rounded=True)
    ranges = [(name, 3 * D // len(types)) for name in types]
    w, up = (GgufMatrix.random(ranges, K, seed).mapped(cupy.asarray) for seed in (1, 2))
    rng = np.random.default_rng(7)
    bias = cupy.asarray(rng.standard_normal(w.N, np.float32))
    for M in (33,) if replaced() else (1, 9, 16, 17, 33, 64, 65, 200):
        x = rng.standard_normal((M, K)).astype(np.float16).astype(np.float32)
        weights = w, up, bias, cupy.asarray(rng.standard_normal((M, w.N), np.float32))
        ordered = cupy.asarray(as_operand(x, "float16", order.width, rounded=True))
        given: list[tuple[Any, dict[str, Any]]]
        given = [(cupy.asarray(x), {"x_dtype": "float16"}), (ordered, {"operand": order})]
        found = (every_product(rows, *weights, **how) for rows, how in given)
        expected, made = (list(islice(each, products)) for each in found)
        for got, one in zip(made, expected, strict=True):
            np.testing.assert_array_equal(got.get(), one.get())
        if products == 1:
            continue
        options = {"decoding": True, "operand": order}
        gated = (ordered, w, None, None, None, None, up)
        cases = ((ordered, w, bias), expected[0], order), (gated, expected[1], order.with_sums(32))
        for inputs, exact, to in cases:
            stored = LINEAR.bind_on_device(inputs, **options, to_operand=to).run()
            assert_operand(stored.get(), exact.get(), to)


@pytest.mark.parametrize("M", [2, slow(9)])
def test_products_have_no_race(M: int) -> None:
    raw = random_blocks("Q4_1", 160, 160)
    w = GgufMatrix.pack([("Q4_1", raw)], 160)
    x = np.random.default_rng(4).standard_normal((M, 160)).astype(np.float32)
    with emulated(checks=CHECKED) as device:
        arrays = device.asarray(x), packed_on_device([BlockRows.of("Q4_1", raw)], 160)
        got = LINEAR.bind_on_device(arrays, decoding=True).run().get()
    np.testing.assert_allclose(got, x @ w, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("where", "ranges"),
    [
        ("shuffled", MIXED),
        ("reverse", (("Q4_1", 19),)),
        ("shuffled", ((INT4, 19),)),
        ("shuffled", ((INT4_128, 19),)),
        ("shuffled", (("MXFP4", 19),)),
        *(pytest.param("gpu", ((name, 19),), marks=GPU.marks) for name in TYPES),
        pytest.param("gpu", MIXED, marks=GPU.marks),
    ],
)
def test_rows_as_numbers(where: str, ranges: tuple[tuple[str, int], ...]) -> None:
    K = K_OF[TYPES[ranges[0][0]].size]
    with running_on(where):
        w = GgufMatrix.random(ranges, K)
        given, exact = w.mapped(cupy.asarray), w.dequantized().T
        wide = WIDEN.bind_on_device((given, None)).run().get()
        with pytest.raises(InputError, match="memory: expected data aligned to 16 bytes"):
            WIDEN.bind_on_device((given, cupy.empty(w.N * K + 4, np.float16)[4:]))
        wrong, once = (each - exact for each in (wide.astype(np.float32), exact.astype(np.float16)))
        assert np.abs(wrong).max() <= 1.01 * np.abs(once).max()
        assert np.square(wrong).mean() <= 1.01 * np.square(once).mean()
        gamma = np.random.default_rng(3).standard_normal(K).astype(np.float32)
        factors = cupy.asarray(gamma)
        squares = ROW_NORMS.bind_on_device((given, factors)).run().get()
        np.testing.assert_allclose(squares, ((exact * gamma) ** 2).sum(axis=1), rtol=1e-5)
        ids = cupy.asarray(np.array([3, 0, w.N, 18, -1, 3, 5, 6, 7], np.int32))
        positions = cupy.asarray(np.zeros(9, np.int32))
        if len(ranges) > 1:
            with pytest.raises(InputError, match="expected a single GGUF type"):
                ops.encoder_rows(ids, positions, given)
            return
        got = ops.encoder_rows(ids, positions, given, factor=2.0).get()
        expected = np.full((9, K), np.nan, np.float32)
        known = [0, 1, 3, 5, 6, 7, 8]
        expected[known] = 2 * exact[ids.get()[known]]
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("where", ["shuffled", pytest.param("gpu", marks=GPU.marks)])
def test_types_whose_blocks_have_as_many_bytes(where: str) -> None:
    """A call is not confused with an earlier call of another type with the same shapes."""
    with running_on(where):
        for name in ("Q4_0", "Q4_K", "Q4_0"):
            w = GgufMatrix.random([(name, 16)], 256)
            assert w.nbytes == 16 * 144
            ids, positions = (cupy.asarray(np.arange(16, dtype=np.int32)) for _ in range(2))
            got = ops.encoder_rows(ids, positions, w.mapped(cupy.asarray)).get()
            np.testing.assert_array_equal(got, w.dequantized().T)


def written(folder: Path, config: Any, types: dict[str, str]) -> Path:
    """Write a random model as GGUF. types: part of a matrix's name, or "" -> its type.

    If that of "" is one of `LAYOUTS`, write a Hugging Face checkpoint with matrices of 4 bits.
    """
    if types[""] in LAYOUTS:
        return write_four_bit(folder, config, LAYOUTS[types[""]])[0]
    kind_of = LlamaWeights if isinstance(config, LlamaConfig) else GPT2Weights
    random: Any = kind_of.random(1, config)
    checkpoint = Checkpoint.open(save_pretrained(folder / "wide", random))
    tensors, kinds = tensors_of(checkpoint), {}
    for at, (name, array) in enumerate(tensors.items()):
        if array.ndim == 1 or "position" in name:
            continue
        kind = next((kind for part, kind in types.items() if part in name), types[""])
        kinds[name] = kind
        if kind in TYPES and TYPES[kind].size == 256:
            tensors[name] = random_blocks(kind, len(array), array.shape[1], at, 0.05)
        elif kind in TYPES:
            tensors[name] = quantize(array, gguf.GGMLQuantizationType[kind])
    return write(
        folder / "m.gguf", metadata_of(checkpoint), tensors, lambda name: kinds.get(name, "F32")
    )


Q4_K_M = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "output": "Q6_K", "": "Q4_K"}
MODELS: dict[str, tuple[Any, dict[str, str]]] = {
    "Q4_K_M": (LLAMA, Q4_K_M),
    "Q5_K and Q8_0": (LLAMA, {"attn_k": "Q8_0", "ffn_up": "F16", "ffn_down": "MXFP4", "": "Q5_K"}),
    "GPT-2 of Q5_0": (GPT, {"token_embd": "Q8_0", "": "Q5_0"}),
    "Q4_1": (LLAMA, {"": "Q4_1"}),
    "awq": (LLAMA, {"": "awq"}),
    "gptq in activation order": (LLAMA, {"": "gptq in activation order"}),
}


@pytest.mark.parametrize("name", MODELS)
def test_numpy_computes_with_the_numbers_of_the_file(name: str, tmp_path: Path) -> None:
    file = written(tmp_path, *MODELS[name])
    ids = np.arange(40) * 7 % 101
    kept, wide = (from_pretrained(file, "cpu", dtype) for dtype in ("file", "float32"))
    assert kept.engine.nbytes < 0.45 * wide.engine.nbytes
    np.testing.assert_allclose(kept(ids), wide(ids), rtol=0, atol=2e-3 * np.abs(wide(ids)).max())
    for (_, array, _), (_, expected, _) in zip(kept.tensors(), wide.tensors(), strict=True):
        np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize(
    ("where", "name", "kv_dtype"),
    [
        slow("shuffled", "Q4_K_M", None),
        slow("shuffled", "GPT-2 of Q5_0", None),
        ("shuffled", "gptq in activation order", None),
        *(pytest.param("gpu", name, kv, marks=GPU.marks)
          for name in MODELS for kv in (None, "float8_e5m2")),
    ],
)  # fmt: skip
def test_models_compute_with_the_numbers_of_the_file(
    where: str, name: str, kv_dtype: str | None, tmp_path: Path
) -> None:
    """Prompts and decoding, alone and in a batch, are compared with float16 weights."""
    file = written(tmp_path, *MODELS[name])
    lengths = [3, 9] if where != "gpu" else [5, 33, 60, 1, 17, 2, 9, 8, 40, 3] * 4
    prompts = [(np.arange(n) * 7 + n) % 101 for n in lengths]
    given: dict[str, Any] = {"max_new_tokens": 2 if where != "gpu" else 20, "stop_ids": ()}
    given |= {"seed": 3, "top_logprobs": 1}
    exact, bound = from_pretrained(file, "cpu", "float32"), 6e-3 if kv_dtype is None else 0.15
    with running_on(where):
        model = from_pretrained(file, "cuda", "file", kv_dtype=kv_dtype)
        texts = model.generate(prompts, **given)
        if where == "gpu":
            logits, expected = model(prompts[1]), exact(prompts[1])
            assert np.abs(logits - expected).max() <= bound * np.abs(expected).max()
            for prompt, text in zip(prompts, texts, strict=True):
                assert model.generate(prompt, **given).tokens == text.tokens
            assert model.generate(prompts, rows_at_once=2, **given) == texts
    for prompt, text in zip(prompts, texts, strict=True):
        count = len(text.tokens)
        logits = exact(np.array([*prompt, *text.tokens[:-1]]))[-count:].astype(np.float64)
        expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        off = expected[np.arange(count), text.tokens] - text.logprobs
        assert np.abs(off).max() <= 2 * bound * np.abs(logits).max()


@pytest.mark.parametrize("where", ["shuffled", pytest.param("gpu", marks=GPU.marks)])
@pytest.mark.parametrize("name", ["Q4_K_M", "Q5_K and Q8_0"])
def test_a_gpu_packs_the_matrices_of_a_file(where: str, name: str, tmp_path: Path) -> None:
    """Rows of q and k are reordered within heads, and types of q, k and v differ."""
    tensors = Checkpoint.open(written(tmp_path, *MODELS[name])).tensors(in_blocks=True)
    matrices = [array for _, array, _ in tensors if isinstance(array, InBlocks)]
    assert len(matrices) >= 5
    with running_on(where):
        for matrix in matrices:
            assert_same_blocks(matrix.on_device(), matrix.on_host())


def test_a_file_without_blocks_is_refused(tmp_path: Path) -> None:
    folder = save_pretrained(tmp_path / "other", GPT2Weights.random(0, GPT))
    with pytest.raises(InputError, match="expected a GGUF file"):
        from_pretrained(folder, "cpu", "file")
    with pytest.raises(InputError, match="expected a GGUF file"):
        from_pretrained(written(tmp_path, GPT, {"": "F16"}), "cpu", "file")


def test_damaged_scales_are_refused_or_are_values(tmp_path: Path) -> None:
    file = written(tmp_path, LLAMA, {"": "Q8_0"})
    data = bytearray(file.read_bytes())
    tensor = gguf.GGUFReader(file).tensors[-1]
    data[tensor.data_offset : tensor.data_offset + 2] = np.float16(np.nan).tobytes()
    file.write_bytes(bytes(data))
    with pytest.raises(InputError, match="blocks of magnitudes up to nan"):
        from_pretrained(file, "cpu", "file")
    model = from_pretrained(file, "cpu", "file", allow_nonfinite=True)
    assert np.isnan(model(np.arange(3))).any()


# --- products with Q4_K blocks, without rounding -------------------------------------------------


BLOCK_VARIANTS = [variant.name for variant in BLOCKS_MATMUL.variants]


def blocks(N: int, B: int) -> NDArray[np.uint8]:
    return random_blocks("Q4_K", N, 256 * B).reshape(N, B, 144)


def test_blocks_are_those_that_the_package_decodes() -> None:
    w = blocks(13, 3)
    expected = dequantize(w.reshape(13, -1), gguf.GGMLQuantizationType.Q4_K)
    found = reference.blocks_matmul(np.eye(768, dtype=np.float32), w)
    np.testing.assert_array_equal(found, expected.T)


@pytest.mark.parametrize("variant", BLOCK_VARIANTS)
@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
@pytest.mark.parametrize(("M", "B", "N"), [(1, 1, 1), (9, 2, 65), (17, 6, 15)])
def test_no_weight_is_rounded(device: Any, variant: str, M: int, B: int, N: int) -> None:
    """With integers x and powers of two d, all sums are exact in float32, in any order."""
    cupy_with()
    rng = np.random.default_rng(M)
    w = blocks(N, B)
    scales = rng.choice(np.array([2**-9, -(2**-10), 2**-10], np.float16), (N, B, 2))
    w[..., :4] = scales.view(np.uint8).reshape(N, B, 4)
    x = rng.integers(-4, 5, (M, 256 * B)).astype(np.float16)
    truth = reference.blocks_matmul(x.astype(np.float64), w)
    got = ops.blocks_matmul(device.asarray(x), device.asarray(w), variant)
    assert_same_bits(got.get(), truth.astype(np.float32))


@one_order
def test_a_value_that_is_not_finite_is_of_its_row_alone(device: Any) -> None:
    """Tiles are filled up with other rows and outputs, which must not affect results."""
    cupy_with()
    x = np.ones((9, 512), np.float16)
    x[8, 100] = np.inf
    w = blocks(18, 2)
    w[17, 1, :2] = np.frombuffer(np.float16(np.nan).tobytes(), np.uint8)
    for variant in BLOCK_VARIANTS:
        found = ops.blocks_matmul(device.asarray(x), device.asarray(w), variant).get()
        assert np.isfinite(found[:8, :17]).all()
        assert not np.isfinite(found[8]).any()
        assert np.isnan(found[:, 17]).all()

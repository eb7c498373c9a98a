"""Decoding on GPUs without wgmma: the kernels of a layer, and bits of a row in any batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from launch_models import CONFIGS, FORMATS, IDS, engine_of
from launch_recorder import recording

from gpt2block import LlamaConfig, Model, emulator, reference
from gpt2block.cuda import cupy
from gpt2block.cuda.formats import FILE
from gpt2block.emulator.ptx.engine import CHECKED
from gpt2block.files.parameters.arrays import random_model
from gpt2block.models.architectures.olmo2 import Olmo2Config
from gpt2block.models.architectures.qwen3 import Qwen3Config
from gpt2block.models.config import ModelConfig
from gpt2block.models.weights.gguf import GgufMatrix
from gpt2block.models.weights.matrix import WeightMatrix
from gpt2block.ops.engines import linear_gguf
from gpt2block.ops.gemm import OPERATION as GEMM
from gpt2block.ops.linear import OPERATION as LINEAR
from tests import plain
from tests.devices import assert_same_bits, slow

LLAMA: Any = CONFIGS["llama"]
MODELS: dict[str, ModelConfig] = {
    **CONFIGS,
    "llama 7B": LlamaConfig(2, 32, 4096, 1024, 3200),
    "with biases": replace(LLAMA, attention_bias=True),
    "qwen3": Qwen3Config(2, 16, 1024, 1024, 515, n_kv_head=8, head_size=128, n_ff=3072),
}


@pytest.mark.parametrize("capability", ["8.0", slow("8.9"), slow("10.0"), "12.0"])
@pytest.mark.parametrize(
    ("name", "formats", "most"),  # most: kernels of a layer of 1, 4 and 16 rows; with clusters, too
    [
        ("llama", "bfloat16", (5, 5, 5, 4, 4, 5)),
        ("llama", "e4m3/e4m3", (5, 5, 5, 4, 4, 5)),
        ("llama", "Q4_K_M", (5, 5, 5, 4, 4, 5)),
        ("llama 7B", "bfloat16", (7,) * 6),
        ("llama 7B", "e5m2", (7,) * 6),
        ("with biases", "bfloat16", (7,) * 6),
        ("qwen3", "bfloat16", (6, 6, 6, 5, 5, 10)),
        ("olmo2", "bfloat16", (8,) * 6),
        ("gemma3", "bfloat16", (8,) * 6),
    ],
)
def test_how_many_kernels_a_layer_has(
    capability: str, name: str, formats: str, most: tuple[int, ...]
) -> None:
    dtype, kv_dtype = FORMATS[formats]
    with recording(capability) as recorder:
        engine = engine_of(MODELS[name], dtype, kv_dtype, formats if dtype == FILE else None)
        for rows, limit in zip((1, 4, 16), most[3 * (float(capability) > 9) :], strict=False):
            recorder.lines.clear()
            engine.forward([IDS[:1]] * rows, "last", engine.new_cache(rows, 64))
            found = [line.split(" | ")[1:3] for line in recorder.lines if "| h.1." in line]
            assert 0 < len(found) <= limit, found


@pytest.mark.parametrize(
    ("capability", "dtype", "kind", "n_embd"),
    [
        ("8.0", "bfloat16", LlamaConfig, 36),
        ("8.9", "float8_e4m3fn", LlamaConfig, 40),
        ("9.0", "bfloat16", Olmo2Config, 36),
    ],
)
def test_rows_of_no_whole_loads_are_not_fused(
    capability: str, dtype: str, kind: Any, n_embd: int
) -> None:
    with recording(capability):
        config = kind(1, 2, n_embd, 64, 64, n_ff=64, head_size=16)
        engine = engine_of(config, dtype, None, None)
        assert len(engine.forward([IDS[:1]], "last", engine.new_cache(1, 64))) == 1


SMALL = LlamaConfig(2, 4, 96, 64, 101, n_kv_head=1, n_ff=384, head_size=32)
SMALL_MODELS: dict[str, ModelConfig] = {
    "qwen3": Qwen3Config(**vars(SMALL)),
    "olmo2": Olmo2Config(**vars(SMALL)),
}


@pytest.mark.parametrize(
    ("capability", "name", "dtype"),
    [
        slow("80", "qwen3", "float8_e4m3fn"),
        slow("120", "olmo2", "bfloat16"),
    ],
)
def test_a_model_on_another_card(capability: str, name: str, dtype: str) -> None:
    """Logits are NumPy's within rounding, and a row has the same bits in a batch of 10 as alone."""
    if problem := emulator.missing():
        pytest.skip(problem)
    config = SMALL_MODELS[name]
    tensors = list(random_model(0, config))
    prompts = [[n, 3 * n + 1, 7] for n in range(10)]
    options: Any = {"max_new_tokens": 2, "temperature": 0, "stop_ids": ()}
    reference: Model[Any] = Model.from_tensors(config, iter(tensors), "cpu", dtype)
    with emulator.emulated("forward", 8, capability=capability):
        model: Model[Any] = Model.from_tensors(config, iter(tensors), "cuda:0", dtype)
        together = model.generate(prompts, rows_at_once=10, **options)
        for n in (0, 9):
            (alone,) = model.generate([prompts[n]], **options)
            assert alone.tokens == together[n].tokens
            assert_same_bits(np.array(alone.logprobs), np.array(together[n].logprobs))
    for prompt, text in zip(prompts, together, strict=True):
        (exact,) = reference.generate([prompt], **options)
        np.testing.assert_allclose(text.logprobs, exact.logprobs, rtol=0, atol=0.03)


def same_as_alone(x: Any, *given: Any, kernel: str, **options: Any) -> None:
    """Assert that some rows of a product by `kernel` have the bits of these rows alone."""
    bound = LINEAR.bind_on_device((x, *given), decoding=True, **options)
    assert bound.launches[0].name == kernel
    got = bound.run().get()
    for m in {0, len(x) // 2, len(x) - 1}:
        alone = LINEAR.bind_on_device((x[m : m + 1], *given), decoding=True, **options).run().get()
        assert_same_bits(got[m : m + 1], alone)


@pytest.mark.parametrize(("K", "M"), [slow(4096, 16), slow(10240, 7), (14336, 8)])
def test_registers_hold_rows_of_a_product_with_blocks(K: int, M: int) -> None:
    if problem := emulator.missing():
        pytest.skip(problem)
    with emulator.emulated("shuffled", 2, capability="89"):
        ranges = [("Q4_K", 16), ("Q6_K", 16)]
        w, up = (GgufMatrix.random(ranges, K, n).mapped(cupy.asarray) for n in range(2))
        given = (cupy.asarray(plain.normal(M, M, K)), w, None, None, None, None, up)
        same_as_alone(*given, kernel="decode_mma_gguf", x_dtype="float16")


@pytest.mark.parametrize(
    ("M", "K", "ranges", "gated", "x_dtype"),
    [
        slow(40, 1280, [("Q4_K", 256), ("Q6_K", 256)], True, "float16"),
        (33, 1536, [("Q5_K", 528)], False, "float16"),  # no whole groups of columns
        slow(64, 1408, [("Q8_0", 528)], False, "float16"),  # the last split is shorter
        slow(9, 11008, [("Q8_0", 128)], False, None),  # a whole row does not fit in shared memory
    ],
)
def test_many_rows_of_a_product_with_blocks(
    M: int, K: int, ranges: list[tuple[str, int]], gated: bool, x_dtype: str | None
) -> None:
    if problem := emulator.missing():
        pytest.skip(problem)
    with emulator.emulated("shuffled", 8, CHECKED, "89"):
        w, up = (GgufMatrix.random(ranges, K, n).mapped(cupy.asarray) for n in range(2))
        x = cupy.asarray(plain.normal(M, M, K))
        given = (x, w, None, None, None, None, *((up,) if gated else ()))
        same_as_alone(*given, kernel="decode_mma_gguf", x_dtype=x_dtype)


@pytest.mark.parametrize(
    ("order", "M", "K", "ranges"),
    [
        ("reverse", 40, 1024, [("Q4_K", 256), ("Q6_K", 272)]),
        ("shuffled", 64, 2816, [("Q5_K", 528)]),
    ],
)
def test_blocks_divide_a_product(
    order: Any, M: int, K: int, ranges: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows have the bits of these rows alone, and the workspace can be used again."""
    if problem := emulator.missing():
        pytest.skip(problem)
    monkeypatch.setattr(linear_gguf, "ADDING", -1e9)
    monkeypatch.setattr(linear_gguf, "geometry", linear_gguf.geometry.__wrapped__)
    with emulator.emulated(order, 8, CHECKED, "89"):
        w = GgufMatrix.random(ranges, K).mapped(cupy.asarray)
        x, residual = (cupy.asarray(plain.normal(M, M, n)) for n in (K, w.N))
        workspace = cupy.zeros(linear_gguf.COUNTERS + 8 * M * w.N, "float32")
        given = x, w, None, None, None, residual, None, workspace
        bound = LINEAR.bind_on_device(given, decoding=True, x_dtype="float16")
        assert bound.launches[0].name == "decode_mma_gguf_parts"
        first, again = bound.run().get().copy(), bound.run().get()
        assert_same_bits(first, again)
        assert not workspace.get()[: linear_gguf.COUNTERS].any()
        for m in (0, M - 1):
            row = (x[m : m + 1], w, None, None, None, residual[m : m + 1])
            alone = LINEAR.bind_on_device(row, decoding=True, x_dtype="float16").run().get()
            assert_same_bits(first[m : m + 1], alone)


@pytest.mark.parametrize(
    ("capability", "M", "N", "K", "gelu"),
    [slow("80", 9, 40, 136, True), ("89", 70, 144, 72, False), slow("120", 150, 136, 200, False)],
)
def test_gate_and_up_of_a_prompt(capability: str, M: int, N: int, K: int, gelu: bool) -> None:
    """A row has the same bits alone, and errors are at most one rounding."""
    if problem := emulator.missing():
        pytest.skip(problem)
    with emulator.emulated("shuffled", 8, CHECKED, capability):
        exact = [plain.normal(n, *shape) for n, shape in enumerate(((M, K), (N, K), (N, K)))]
        a, *both = (cupy.asarray(each.astype(np.float16)) for each in exact)
        w, up = (WeightMatrix(each, "float16", None, "NK") for each in both)
        bound = GEMM.bind_on_device((a, w, None, None, up), gelu=gelu)
        assert [each.name for each in bound.launches] == ["gemm_mma"]
        got = bound.run().get()
        for m in (0, M - 1):
            alone = GEMM.bind_on_device((a[m : m + 1], w, None, None, up), gelu=gelu).run().get()
            assert_same_bits(got[m : m + 1], alone)
        x, gate, other = (each.get().astype(np.float64) for each in (a, *both))
        truth = reference.gemm(x, gate.T, up=other.T, gelu=gelu)
        np.testing.assert_allclose(got, truth, rtol=2**-10, atol=2**-10 * np.abs(truth).max())


@pytest.mark.parametrize(
    ("dtype", "x_dtype", "M", "N", "K"),
    [
        ("bfloat16", None, 40, 80, 1344),
        slow("float16", "float16", 17, 96, 320),
        slow("float8_e4m3fn", "float16", 17, 96, 320),
    ],
)
def test_gate_and_up_of_many_rows(dtype: str, x_dtype: str | None, M: int, N: int, K: int) -> None:
    if problem := emulator.missing():
        pytest.skip(problem)
    with emulator.emulated("shuffled", 2, CHECKED, "89"):
        w, up = (
            WeightMatrix.quantize(cupy.asarray(plain.normal(n, N, K)), dtype, "NK")
            for n in range(2)
        )
        given = (cupy.asarray(plain.normal(M, M, K)), w, None, None, None, None, up)
        together, few = (
            LINEAR.bind_on_device(given, variant=name, decoding=True, x_dtype=x_dtype)
            for name in ("mma_tiles", "mma")
        )
        assert together.launches[0].name == "decode_mma_tiles_up"
        assert_same_bits(together.run().get(), few.run().get())

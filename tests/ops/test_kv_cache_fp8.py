"""A kv_cache of FP8: the stored codes, and whole models, with NumPy, emulated and on a GPU.

Codes are compared with ml_dtypes. test_attention_laws.py tests attention over such a cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.decoding import RandomModel
from benchmarks.run import tolerance
from benchmarks.token_works import gpt2_works
from gpt2block import GPT2, InputError, Llama, LlamaConfig, ops, reference
from gpt2block.bulk import job as bulk_job
from gpt2block.bulk.predictor import Predictor
from gpt2block.cuda import cupy
from gpt2block.cuda.formats import USUAL, Formats, with_cache
from gpt2block.files.parameters.gpt2 import GPT2Weights
from gpt2block.files.parameters.llama import LlamaWeights
from gpt2block.models.config import GPT2Config
from tests.caches import DTYPES, FORMATS, codes_of, widened
from tests.command_line import gpt2block, printed
from tests.devices import GPU, assert_same_bits, combinations, slow
from tests.ops.test_fp8 import floats
from tests.plain import normal

Array = NDArray[Any]
every_format = pytest.mark.parametrize("kv_dtype", FORMATS)


def assert_same_codes(got: Array, x: Array, kv_dtype: str) -> None:
    """Assert that codes equal ml_dtypes' codes of x; NaN may have any of its codes."""
    nan = np.isnan(x.astype(np.float32))
    np.testing.assert_array_equal(got[~nan], codes_of(x, kv_dtype)[~nan])
    assert np.isnan(widened(got, kv_dtype)[nan]).all()


def as_rows(values: Array, C: int) -> Array:
    """Return rows [Q | K | V] (N, 3C) whose K and V repeat these values."""
    N = -(-values.size // (2 * C))
    rows = np.zeros((N, 3 * C), values.dtype)
    rows[:, C:] = np.resize(values, (N, 2 * C))
    return rows


# --- stored codes ---------------------------------------------------------------------------------


@every_format
def test_kv_round_on_numpy(kv_dtype: str) -> None:
    for dtype in (np.float32, np.float64):
        rows = as_rows(floats(kv_dtype), 16).astype(dtype)
        rows[:, :16] = normal(0, len(rows), 16)
        got = reference.kv_round(rows, 2, 2, kv_dtype)
        assert got.dtype == dtype
        np.testing.assert_array_equal(got[:, :16], rows[:, :16])
        expected = widened(codes_of(rows[:, 16:], kv_dtype), kv_dtype)
        np.testing.assert_array_equal(got[:, 16:], expected)


def appended(rows: Array, C: int, kv_dtype: str) -> Array:
    """Return the codes (N, 2C) that kv_append writes for the rows, last row first."""
    N = len(rows)
    k, v = (cupy.asarray(np.zeros((2, N, C), np.uint8)) for _ in range(2))
    row, position = np.ones(N, np.int32), np.arange(N, dtype=np.int32)[::-1].copy()
    ops.kv_append(cupy.asarray(rows), k, v, cupy.asarray(row), cupy.asarray(position), kv_dtype)
    assert not k.get()[0].any()
    return np.concatenate([k.get()[1, ::-1], v.get()[1, ::-1]], axis=1)


@combinations(times=1, C=[16, 3], kv_dtype=list(FORMATS))
def test_every_number_is_rounded_to_the_nearest_code(device: Any, C: int, kv_dtype: str) -> None:
    rows = as_rows(floats(kv_dtype), C)
    assert_same_codes(appended(rows, C, kv_dtype), rows[:, C:], kv_dtype)


@combinations(times=1, dtype=["float16", "bfloat16"], kv_dtype=list(FORMATS))
def test_rows_of_16_bits(device: Any, dtype: str, kv_dtype: str) -> None:
    """All numbers of the dtype, appended and rounded in place, give the same codes."""
    C = 512
    values = np.arange(2**16, dtype=np.uint16).view(DTYPES[dtype])
    rows = as_rows(values, C)
    rows[:, :C] = 1.25
    codes = appended(rows, C, kv_dtype)
    assert_same_codes(codes, rows[:, C:], kv_dtype)
    on_device = device.asarray(rows)
    assert ops.kv_round(on_device, 2, 2, kv_dtype) is on_device
    got = on_device.get().astype(np.float32)
    np.testing.assert_array_equal(got[:, :C], 1.25)
    np.testing.assert_array_equal(got[:, C:], widened(codes, kv_dtype))


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
    ("llama without tensor cores", "float8_e5m2", "float8_e4m3fn"),
    ("llama without tensor cores", "bfloat16", "float8_e5m2"),
]
IDS = [np.random.default_rng(n).integers(53, size=n).astype(np.int32) for n in (29, 7, 18)]


def on_devices(*emulated: int, late: Sequence[int] = (), of: str = "") -> pytest.MarkDecorator:
    """Parametrize `device` and KINDS: all on a GPU, on the emulator those with these indices.

    late: indices for --slow. of: the only model to run on a GPU.
    """
    cases = [("shuffled", *KINDS[i]) for i in emulated]
    cases += [slow("shuffled", *KINDS[i]) for i in late]
    on_gpu = [pytest.param("gpu", *k, marks=GPU.marks) for k in KINDS if of in ("", k[0])]
    names = ("device", "name", "dtype", "kv_dtype")
    return pytest.mark.parametrize(names, [*cases, *on_gpu], indirect=["device"])


def made(name: str, dtype: str, kv_dtype: str | None, device: str = "cpu") -> Any:
    kind, weights = MODELS[name]
    return kind(weights, device, dtype, kv_dtype=kv_dtype)


def off(got: Any, expected: Any) -> float:
    """Return the root mean square of the difference, relative to the expected logits'."""
    return float(np.sqrt(np.square(got - expected).mean() / np.square(expected).mean()))


@pytest.mark.usefixtures("small_blocks")
@on_devices(0, late=[4])
def test_a_model_is_that_of_numpy(device: Any, name: str, dtype: str, kv_dtype: str) -> None:
    """Prompts are computed at once, continued, and decoded token by token, alone and in a batch.

    With float32 activations the difference is far below the error of FP8. With 16 bits, values near
    a tie may be rounded to either side, and the next layer rounds differently again: the difference
    is about the error of FP8. test_tensor_cores_attend_to_rounded_rows is more exact.
    """
    numpy, ours = made(name, dtype, kv_dtype), made(name, dtype, kv_dtype, "cuda")
    expected, wide = numpy(IDS), made(name, dtype, None)(IDS)
    cost = max(map(off, expected, wide))
    assert cost > 3e-3
    limit = cost * (0.05 if ours.engine.products == "float32" else 1.5)
    together = ours(IDS)
    assert max(map(off, together, expected)) < limit
    assert_same_bits(ours(IDS[1:2])[0], together[1])

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
    if ours.engine.products == "float32":  # otherwise a continued prompt uses other kernels
        at_once = np.concatenate([first[0], rest[0]])
        np.testing.assert_array_equal(at_once, together[0][:-1])


@pytest.mark.usefixtures("small_blocks")
@on_devices(3, of="llama")
def test_tensor_cores_attend_to_rounded_rows(
    device: Any, name: str, dtype: str, kv_dtype: str
) -> None:
    """K and V in the rows of a prompt are rounded as in the cache, even without a cache."""
    model = made(name, dtype, kv_dtype, "cuda").engine
    assert model.products != "float32"
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


@every_format
def test_attention_weights_are_those_of_rounded_keys(kv_dtype: str) -> None:
    model = made("llama", "bfloat16", kv_dtype)
    qkv = reference.kv_round(model.trace(IDS[1])["h.1.rope"], 2, 1, kv_dtype)
    scores = np.einsum("ihd,jd->hij", qkv[:, :128].reshape(-1, 2, 64), qkv[:, 128:192]) / 8
    expected = reference.softmax(scores, causal=True)
    np.testing.assert_allclose(model.attention(IDS[1])[1], expected, rtol=1e-4, atol=1e-6)
    plain = made("llama", "bfloat16", None).attention(IDS[1])[1]
    assert np.abs(plain - expected).max() > 1e-4


def test_the_dtype_of_the_cache() -> None:
    assert Formats("float8_e5m2").cache_dtype == "float16"
    assert Formats("bfloat16", "bfloat16").cache_dtype == "bfloat16"
    assert Formats("float8_e5m2", "float8_e4m3fn").cache_dtype == "float8_e4m3fn"
    narrow = {each.dtype: each.cache_dtype for each in with_cache("float8_e5m2")}
    assert set(narrow) == {"float16", "bfloat16", "float8_e5m2", "float8_e4m3fn"}
    assert set(narrow.values()) == {"float8_e5m2"}
    assert next(with_cache(None)) == USUAL
    assert (USUAL.dtype, USUAL.cache_dtype) == ("float32", "float32")
    model = made("gpt2", "float16", "float8_e5m2")
    assert model.kv_dtype == "float8_e5m2"
    assert "float16, kv_cache float8_e5m2, CPU" in repr(model)
    assert "kv_cache" not in repr(made("gpt2", "float16", "float16"))
    with pytest.raises(
        InputError, match=r"cache: expected .*'float16', 'cpu'.*, got .*float8_e5m2"
    ):
        made("gpt2", "float16", None)(IDS[0], cache=model.new_cache(1))


# --- commands, jobs and benchmarks ----------------------------------------------------------------


def test_generate_and_compare() -> None:
    narrow = ["--device", "cpu", "--dtype", "bfloat16", "--kv-dtype", "float8_e5m2"]
    found = gpt2block("generate", "O Romeo", "--max-new-tokens", 3, "--json", *narrow).json
    assert (found["dtype"], found["kv_dtype"]) == ("bfloat16", "float8_e5m2")
    text = printed("compare", "O Romeo", "--cached", *narrow)
    assert "bfloat16, kv_cache float8_e5m2" in text


def test_a_job_takes_the_dtype_of_the_cache() -> None:
    options: dict[str, Any] = {"device": "cpu", "dtype": "bfloat16"}
    scores = [
        Predictor("score", kv_dtype=kv, **options)({"text": ["To be, or not"]})["log_likelihood"]
        for kv in (None, "float8_e5m2")
    ]
    assert scores[0] != scores[1]
    np.testing.assert_allclose(scores[1], scores[0], rtol=0.05)
    formats = Formats("bfloat16", "float8_e5m2")
    job = bulk_job.Job("score", output="out", formats=formats)
    assert job.described({}, "", 1, "cpu")["kv_dtype"] == "float8_e5m2"


def test_benchmarks_count_the_bytes_of_the_cache() -> None:
    assert RandomModel(GPT2_SMALL, "bfloat16").token_bytes == 2 * 2 * 128 * 2
    assert RandomModel(GPT2_SMALL, "bfloat16", "float8_e5m2").token_bytes == 2 * 2 * 128
    plain, narrow = (gpt2_works("float8_e5m2", "4", "gpt2", kv)[0] for kv in (None, "float8_e5m2"))
    assert (plain.name, narrow.name) == ("4 rows", "4 rows, kv_cache float8_e5m2")
    assert plain.traffic - narrow.traffic == 4 * 512 * 2 * 12 * 768
    assert tolerance(plain, "float16") < tolerance(narrow, "float16")
    assert tolerance(narrow, "float16") < 8 * tolerance(plain, "float16")

"""Llama on a GPU and on the emulator, compared with transformers' results, NumPy and float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpt2block import Llama, LlamaConfig, LlamaWeights, RopeScaling, cuda
from gpt2block.cuda.cards import gpu
from gpt2block.cuda.formats import USUAL
from gpt2block.engine.model import weight_bytes
from gpt2block.ops.workload import tolerance
from tests.devices import GPU, running_on, slow

GOLDEN = Path(__file__).parents[1] / "golden"
SMALL = LlamaConfig(
    n_layer=1, n_head=4, n_kv_head=2, n_embd=48, n_ctx=40, vocab_size=53, n_ff=40, head_size=16,
    scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 16),
)  # fmt: skip
LARGE = LlamaConfig(
    n_layer=2, n_head=8, n_kv_head=2, n_embd=512, n_ctx=700, vocab_size=1003, n_ff=688,
    head_size=128, theta=500000.0, tie_word_embeddings=True,
)  # fmt: skip
CORES = replace(SMALL, n_embd=64, head_size=64, n_head=2, n_kv_head=1, vocab_size=53)
DTYPES = ("float32", "bfloat16", "float16", "float8_e5m2", "float8_e4m3fn")


@pytest.fixture(params=["emulator", GPU])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    with running_on({"emulator": "forward"}.get(request.param, request.param)):
        yield "cuda"


def cases(values: Sequence[str], emulated: Sequence[str]) -> list[Any]:
    """Return (device, value): all values on a GPU, some on the emulator, which compiles each."""
    on_gpu = [pytest.param("gpu", value, marks=GPU.marks) for value in values]
    return [*(("emulator", value) for value in emulated), *on_gpu]


def small(device: str, dtype: str = "float32") -> Llama:
    return Llama(LlamaWeights.random(0, SMALL), device=device, dtype=dtype)


def random_rows(*lengths: int, config: LlamaConfig = SMALL) -> list[NDArray[np.int32]]:
    rng = np.random.default_rng(0)
    return [rng.integers(config.vocab_size, size=n).astype(np.int32) for n in lengths]


def error(found: Any, expected: NDArray[Any]) -> float:
    """Return the largest difference, relative to the largest expected value."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize(
    ("device", "dtype"), cases(["float32", "float8_e4m3fn"], ["float32"]), indirect=["device"]
)
def test_every_step_errs_by_rounding(device: str, dtype: str) -> None:
    model, (ids,) = small(device, dtype), random_rows(9)
    for cached in (False, True):
        rows = model.compare(ids, cached)
        names = [row.name for row in rows]
        assert names == list(model.trace(ids, cached))
        layer = ("rms1", "qkv", "q" if cached else "rope", "attn", "x1", "rms2", "gate", "up", "ff",
                 "output")  # fmt: skip
        last = ["logits"] if cached else ["logits.0", "scores.0"]
        assert names == ["embedding", *(f"h.0.{name}" for name in layer), "rms_f", *last]
        for row in rows:
            assert row.max_rel <= tolerance("float32" if dtype == "float32" else "bfloat16"), row
            assert row.total_rel < 0.02, row


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        slow("turing", "bfloat16"),
        *cases(["float32", "bfloat16", "float8_e5m2"], ["bfloat16", "float8_e5m2"]),
    ],
    indirect=["device"],
)
def test_a_row_has_the_same_bits_alone_and_in_a_batch(device: str, dtype: str) -> None:
    model, rows = small(device, dtype), random_rows(5, 1, 17)
    together = model(rows)
    near = Llama(LlamaWeights.random(0, SMALL), device="cpu", dtype=dtype)(rows)
    for row, logits, expected in zip(rows, together, near, strict=True):
        np.testing.assert_array_equal(logits, model(row))
        assert error(logits, expected) <= (1e-5 if dtype == "float32" else 0.02)
    likely = model.score([row.tolist() for row in rows[::2]])
    for row, score in zip(rows[::2], likely, strict=True):
        alone = model.score(row)
        assert score.log_likelihood == alone.log_likelihood
        logits = model(row).astype(np.float64)
        logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        exact = logprobs[np.arange(len(row) - 1), row[1:]].sum()
        assert alone.log_likelihood == pytest.approx(exact, rel=1e-4)


def test_a_prompt_on_tensor_cores(device: str) -> None:
    """Steps, all outputs of logits and a continued prompt are right, with equal bits in a batch."""
    weights, rows = LlamaWeights.random(2, CORES), random_rows(15, 1, config=CORES)
    model = Llama(weights, device=device, dtype="bfloat16")
    on_cpu = Llama(weights, device="cpu", dtype="bfloat16")
    for step in (steps := model.compare(rows[0])):
        assert step.max_rel <= tolerance("bfloat16"), step
        assert step.total_rel < 0.02, step
    kernels = [step.kernel.partition("_")[0] for step in steps[1:5]]
    assert kernels == ["rmsnorm", "gemm" if gpu().has_mma else "linear", "rope", "attention"]
    logits, last = model(rows), model(rows, last=True)
    for row, found, end in zip(rows, logits, last, strict=True):
        np.testing.assert_array_equal(found, model(row))
        np.testing.assert_array_equal(end, model(row, last=True))
        assert error(found, on_cpu(row)) < 0.03
        assert error(end, found[-1]) < 0.03
    cache = model.new_cache(1)
    parts = [model(rows[0][:7], cache=cache), model(rows[0][7:], cache=cache)]
    assert error(np.concatenate(parts), logits[0]) < 0.03
    assert error(model.embed(rows[0]), on_cpu.embed(rows[0])) < 0.03


def test_slots_sampling_and_streams(device: str) -> None:
    """Slots are refilled, rows exceed the products of few rows, and a stop token ends a row."""
    model, prompts = small(device), random_rows(3, 1, 22)
    tokens = 3 if cuda.replaced() else 4
    options: dict[str, Any] = {"max_new_tokens": tokens, "seed": 3, "stop_ids": [2, 10]}
    options |= {"repetition_penalty": 1.5, "temperature": 0.5, "overflow": "truncate"}
    alone = [model.generate(prompt, **options) for prompt in prompts]
    assert model.generate(prompts, rows_at_once=2, **options) == alone
    options["max_new_tokens"] = 2
    many = model.generate(prompts[0], samples=18, **options)
    assert many[0].tokens == alone[0].tokens[:2]
    assert "".join(model.stream(prompts[0], **options)) == many[0].text


def test_embeddings_attention_and_weights(device: str) -> None:
    model, (ids,) = small(device), random_rows(7)
    on_cpu = Llama(LlamaWeights.random(0, SMALL), device="cpu")
    assert error(model.embed(ids), on_cpu.embed(ids)) <= 1e-5
    assert error(model.attention(ids), on_cpu.attention(ids)) <= 1e-5
    np.testing.assert_array_equal(model.logit_lens(ids).ids, on_cpu.logit_lens(ids).ids)
    for (name, array, _), (_, expected, _) in zip(model.tensors(), on_cpu.tensors(), strict=True):
        np.testing.assert_array_equal(
            array, expected.T if array.shape != expected.shape else expected, err_msg=name
        )


def test_weights_that_do_not_fit(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes before any tensor is read."""

    def read(progress: Any) -> Any:
        yield from ()
        raise AssertionError("a tensor was read")

    path = GOLDEN / "llama-grouped"
    needed = Llama.from_pretrained(path, device=device).nbytes
    assert needed == weight_bytes(Llama.from_pretrained(path, device="cpu").config, USUAL)
    if cuda.replaced():
        monkeypatch.setattr(type(cuda.cupy.cuda.Device()), "mem_info", (needed - 1, 1 << 40))
        message = f"the weights take {needed:,} bytes in float32, the GPU has {needed - 1:,} bytes"
        with pytest.raises(MemoryError, match=message):
            Llama.from_pretrained(path, device=device, progress=read)
        Llama.from_pretrained(path, device=device, dtype="bfloat16")


def test_hi_lo_copies_that_do_not_fit(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies count as weights: little free memory is an error, and never changes the kernels."""
    weights = LlamaWeights.random(0, LlamaConfig(n_layer=1, n_head=2, n_embd=128, n_ff=256,
                                                 n_ctx=64, vocab_size=101))  # fmt: skip
    engine: Any = Llama(weights, device=device).engine
    if not cuda.replaced():
        return
    needed = weight_bytes(weights.config, USUAL)
    copies = sum(each.nbytes for each in engine.prompts.hi_lo.values())
    assert engine.products == "hi_lo"
    monkeypatch.setattr(type(cuda.cupy.cuda.Device()), "mem_info", (needed + copies - 1, 1 << 40))
    message = f"take {needed:,} bytes in float32 and {copies:,} as pairs of float16 matrices, the "
    message += rf"GPU has {needed + copies - 1:,} bytes free: .* \(float16, bfloat16, float8_e5m2"
    with pytest.raises(MemoryError, match=message):
        Llama(weights, device=device)
    Llama(weights, device=device, dtype="bfloat16")
    monkeypatch.setattr(type(cuda.cupy.cuda.Device()), "mem_info", (needed + copies, 1 << 40))
    assert Llama(weights, device=device).engine.products == "hi_lo"  # type: ignore[attr-defined]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_of_128_channels_and_a_long_prompt(dtype: str) -> None:
    weights, (ids,) = LlamaWeights.random(1, LARGE), random_rows(600, config=LARGE)
    model, on_cpu = (Llama(weights, device=where, dtype=dtype) for where in ("cuda", "cpu"))
    limit = 1e-4 if dtype == "float32" else 0.02
    assert error(model(ids), on_cpu(ids)) <= limit
    cache = model.new_cache(1)
    parts = [model(ids[:500], cache=cache)]
    parts += [model(ids[t : t + 1], cache=cache) for t in range(500, 520)]
    assert error(np.concatenate(parts), on_cpu(ids[:520])) <= limit
    prompts = random_rows(*(1 + 31 * b % 300 for b in range(40)), config=LARGE)
    options: dict[str, Any] = {"max_new_tokens": 20, "seed": 1, "stop_ids": range(9)}
    alone = [model.generate(prompt, **options) for prompt in prompts]
    for rows in (None, 3, 16):
        assert model.generate(prompts, rows_at_once=rows, **options) == alone

"""Llama on a GPU and on the emulator: embeddings and attention as NumPy's, memory for weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpt2block import Llama, LlamaConfig, LlamaWeights, RopeScaling, cuda
from gpt2block.cuda.formats import USUAL
from gpt2block.engine.model import weight_bytes
from tests.devices import GPU, running_on

GOLDEN = Path(__file__).parents[1] / "golden"
SMALL = LlamaConfig(
    n_layer=1, n_head=4, n_kv_head=2, n_embd=48, n_ctx=40, vocab_size=53, n_ff=40, head_size=16,
    scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 16),
)  # fmt: skip
CORES = replace(SMALL, n_embd=64, head_size=64, n_head=2, n_kv_head=1, vocab_size=53)


@pytest.fixture(params=["emulator", GPU])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    with running_on({"emulator": "forward"}.get(request.param, request.param)):
        yield "cuda"


def test_embeddings_attention_and_weights(device: str) -> None:
    ids = np.random.default_rng(0).integers(SMALL.vocab_size, size=7)
    weights = LlamaWeights.random(0, SMALL)
    model, on_cpu = (Llama(weights, device=each) for each in (device, "cpu"))
    for found, expected in (
        (model.embed(ids), on_cpu.embed(ids)),
        (model.attention(ids), on_cpu.attention(ids)),
    ):
        assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()
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

"""Tracing and comparing a whole model: NumPy, the emulated GPU, and the command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpt2block import GPT2, GPT2Config, GPT2Weights, reference
from gpt2block.ops.workload import tolerance
from tests.devices import GPU, running_on, slow

CONFIG = GPT2Config(n_layer=2, n_head=1, n_embd=64, n_ctx=24, vocab_size=53)
IDS = np.random.default_rng(0).integers(53, size=11)
TEN = ("ln1", "qkv", "attn", "proj", "x1", "ln2", "ff1", "gelu", "ff2", "output")
SEVEN = ("ln1", "qkv", "attn", "x1", "ln2", "gelu", "output")
FIVE = ("q", "attn", "x1", "gelu", "output")


def layers(names: tuple[str, ...]) -> list[str]:
    return [f"h.{layer}.{name}" for layer in range(2) for name in names]


DTYPES = ("float32", "bfloat16", "float8_e4m3fn")


@pytest.fixture(params=["cpu", "emulator", GPU])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    on_cpu = request.param == "cpu"
    where = "forward" if request.param == "emulator" else "gpu"
    with nullcontext() if on_cpu else running_on(where):
        yield "cpu" if on_cpu else "cuda"


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        *(("cpu", dtype) for dtype in DTYPES),
        slow("emulator", DTYPES[0]),
        slow("emulator", DTYPES[2]),
        *(pytest.param("gpu", dtype, marks=GPU.marks) for dtype in DTYPES),
    ],
    indirect=["device"],
)
def test_every_step_errs_by_rounding(device: str, dtype: str) -> None:
    model = GPT2(GPT2Weights.random(0, CONFIG), device, dtype)
    for cached in (False, True):
        rows = model.compare(IDS, cached)
        names = [row.name for row in rows]
        assert names == list(model.trace(IDS, cached))
        assert names[0] == "embedding"
        if device == "cpu":
            assert names[1:] == [*layers(TEN), "ln_f", "logits"]
        elif cached:
            assert names[1:] == [*layers(FIVE), "logits"]
        else:
            assert names[1:] == [*layers(SEVEN), "ln_f", "logits.0", "scores.0"]
        for row in rows:
            assert row.max_rel <= tolerance("float32" if dtype == "float32" else "bfloat16"), row
            assert row.total_rel < 0.02, row
            assert row.ms > 0
            assert row.shape[0] == (1 if cached else len(IDS))


def test_a_trace_holds_what_a_call_returns(device: str) -> None:
    model = GPT2(GPT2Weights.random(0, CONFIG), device)
    trace = model.trace(IDS)
    logits = trace["logits" if device == "cpu" else "logits.0"]
    np.testing.assert_array_equal(logits, model(IDS))
    streams = [trace[name] for name in ("embedding", "h.0.output", "h.1.output", "ln_f")]
    np.testing.assert_array_equal(np.stack(streams), model.hidden_states(IDS))


def test_a_step_that_is_wrong_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    right = reference.gelu

    def gelu(x: NDArray[Any]) -> NDArray[Any]:
        return right(x) * (np.float32(1.01) if x.dtype == np.float32 else 1)

    monkeypatch.setattr(reference, "gelu", gelu)
    rows = GPT2(GPT2Weights.random(0, CONFIG), "cpu").compare(IDS)
    assert {row.name for row in rows if row.max_rel > 1e-3} == {"h.0.gelu", "h.1.gelu"}
    before = [row for row in rows if row.name in ("embedding", "h.0.ff1")]
    assert max(row.total_rel for row in before) < 1e-5 < rows[-1].total_rel

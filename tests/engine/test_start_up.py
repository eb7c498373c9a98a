"""A decoding prepares all kernels and the usual starts before its first sequence."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from launch_models import engine_of
from launch_recorder import recording

from gpt2block import GPT2Config, Sampling
from gpt2block.cuda import requests
from gpt2block.engine.cuda import decoding as cuda_decoding
from gpt2block.engine.cuda import draft as cuda_draft
from gpt2block.engine.cuda import prefill as cuda_prefill
from gpt2block.engine.cuda.choice import DecodingChoice
from gpt2block.engine.cuda.start_up import PROMPTS, TOGETHER
from gpt2block.engine.generation.batching import Batch
from gpt2block.engine.model import Start
from gpt2block.engine.speculation import ROWS
from tests.devices import GPU, running_on, slow
from tests.engine.test_decoding import TINY, model, random_prompts
from tests.generating import Run

LARGE = GPT2Config(n_layer=1, n_head=12, n_embd=768, n_ctx=1024, vocab_size=50257)
SLOTS = 32


def starts(lengths: tuple[int, ...], steps: int = 3) -> list[Start]:
    sampling = Sampling(temperature=0)
    return [Start(n, np.zeros(k, np.int32), sampling, steps) for n, k in enumerate(lengths)]


@pytest.mark.parametrize("dtype", ["bfloat16", slow("float32")])
def test_nothing_is_compiled_for_the_first_sequences(dtype: str) -> None:
    """Prompts of usual lengths are recorded too; other lengths have compiled kernels."""
    rng = np.random.default_rng(0)
    with recording("9.0"):
        engine = engine_of(LARGE, dtype, None)
        decoding = engine.decode(SLOTS, LARGE.n_ctx)
        parts = list(decoding.start_up(False))
        assert parts == [(done, len(parts)) for done in range(len(parts))]
        recorded, known = dict(decoding._cache.prefills), set(requests._kernels)
        least, most = PROMPTS
        usual = [(least,), (most,), *((least, most)[:n] for n in (1, 2))]
        usual += [tuple(rng.integers(least, most + 1, TOGETHER)) for _ in range(8)]
        usual += [tuple(rng.integers(least, most + 1, 1 + n % TOGETHER)) for n in range(16)]
        for lengths in usual:
            decoding.start(starts(lengths))
            decoding.next()
            decoding.stop(np.arange(len(lengths)))
        assert all(decoding._cache.prefills[kind] is made for kind, made in recorded.items())
        assert decoding._cache.prefills.keys() == recorded.keys()
        for lengths in ((1,), (700,), (1000,) * 2, (400, 20, 90), (50,) * SLOTS, (150,) * SLOTS):
            decoding.start(starts(lengths))
            decoding.next()
            decoding.stop(np.arange(len(lengths)))
        assert set(requests._kernels) == known


@pytest.mark.parametrize(
    ("count", "steps", "draft", "recorded"),
    [
        (1, 3, False, [1, "prompts"]),
        (20, 3, False, ["prompts", "prompts", 24, "prompts"]),
        (20, 1, False, ["prompts"] * 3),
        (16, 3, True, ["prompts", "prompts", 16 * ROWS[0], "prompts", "prompts", 16]),
    ],
)
def test_only_steps_that_run_are_recorded(
    count: int, steps: int, draft: bool, recorded: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight prompts start together. The step after them is recorded before the last ones run.

    Other steps only sample first tokens. recorded: numbers of rows of the steps, and prompts, of
    the model and of its draft model.
    """
    events, planned, prefill = list[Any](), DecodingChoice.steps, cuda_prefill.prefill_starts

    def noted_steps(self: DecodingChoice, names: Any, rows: int, *args: Any) -> Any:
        events.append(rows)
        return planned(self, names, rows, *args)

    def noted_prefill(*args: Any, **options: Any) -> Any:
        events.append("prompts")
        return prefill(*args, **options)

    monkeypatch.setattr(DecodingChoice, "steps", noted_steps)
    for module in (cuda_decoding, cuda_draft):
        monkeypatch.setattr(module, "prefill_starts", noted_prefill)
    with recording("9.0"):
        engine = engine_of(LARGE, "bfloat16", None)
        engine.draft = engine_of(LARGE, "bfloat16", None) if draft else None
        decoding = engine.decode(count, LARGE.n_ctx, speculate=draft)
        decoding.start(starts((1000,) * count, steps))
        with engine.running():
            decoding._launch()
        assert events == recorded


@pytest.mark.parametrize(
    ("where", "reuse"),
    [("cpu", False), ("cpu", True), slow("shuffled", True)]
    + [pytest.param("gpu", reuse, marks=GPU.marks) for reuse in (False, True)],
)
def test_rows_have_the_bits_of_a_batch_that_prepared_nothing(where: Any, reuse: bool) -> None:
    """With NumPy there is nothing to prepare. With reused prefixes, the batch also draft tokens."""
    with nullcontext() if where == "cpu" else running_on(where):
        m = model("cpu" if where == "cpu" else "cuda", TINY)
        options: dict[str, Any] = {"max_new_tokens": 4, "seed": 3, "top_logprobs": 2}
        got = []
        for prepared in (False, True):
            batch = Batch(m.engine, 2, TINY.n_ctx, reuse=reuse, speculate=prepared and reuse)
            parts = list(batch.start_up()) if prepared else []
            assert bool(parts) == (prepared and where != "cpu")
            assert not batch.busy
            run = Run(m.engine, None, [np.zeros(5, np.int32), *random_prompts([1, 9])], **options)
            run.batch = batch
            run.finish()
            assert not any(row.reused for row in run.sequences)
            got.append([row.result() for row in run.sequences])
        assert got[0] == got[1]

"""Adapters (LoRA): their files, merged weights, and the bits that a text has alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpt2block import Model, from_pretrained
from gpt2block.engine.generation.generate import Run
from gpt2block.engine.generation.options import Options
from tests.adapters import merge, save_adapter, save_base
from tests.devices import one_order
from tests.engine.test_architectures_cuda import GPT2, OWN, SIZES

NAMES = [
    "gpt2", "llama", "qwen3-bias", "granite", "smollm3", "phi3", "olmo2", "gemma3", "gemma4",
    "lfm2",
]  # fmt: skip


def config_of(name: str) -> Any:
    if name == "gpt2":
        return GPT2
    kind, own = OWN[name]
    return kind(**{**SIZES, **own})


@pytest.mark.parametrize("name", NAMES)
def test_an_adapter_computes_as_merged_weights(name: str, tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", config_of(name))
    adapter = save_adapter(tmp_path / "a", base, use_rslora=name == "llama")
    scale = 2 / (3**0.5 if name == "llama" else 3)
    merged = from_pretrained(merge(tmp_path / "merged", base, adapter, scale), "cpu")
    own = from_pretrained(base, "cpu", adapters={"a": adapter, "b": adapter})
    plain = from_pretrained(base, "cpu")
    prompt, text = np.arange(1, 10), np.arange(20, 28)
    found = [
        model.score_generated(prompt, text, adapter=which).logprobs
        for model, which in ((own, "b"), (merged, None), (own, None), (plain, None))
    ]
    assert np.abs(found[0] - found[1]).max() < 2e-5
    assert np.array_equal(found[2], found[3])
    assert np.abs(found[0] - found[3]).max() > 0.1


def texts(model: Model[Any], adapters: list[str | None], together: bool) -> list[Any]:
    """Return tokens and log-probabilities of a text for each adapter, and of some more texts."""
    prompts = [np.arange(3 + n, 12 + 2 * n) for n in range(len(adapters))]
    found = []
    for own in [range(len(prompts))] if together else [[n] for n in range(len(prompts))]:
        run = Run(model.engine, None, [prompts[n] for n in own],
                  Options.of({"max_new_tokens": 5, "temperature": 0.0}))  # fmt: skip
        for n, sequence in zip(own, run.sequences, strict=True):
            sequence.adapter = model.engine.adapters.named(adapters[n])
        run.finish()
        found += [(each.tokens, each.logprobs) for each in run.sequences]
    return found


CUDA_CASES = [("gpt2", "bfloat16"), ("llama", "bfloat16"), ("qwen3", "float16")]


@pytest.mark.parametrize(("name", "dtype"), CUDA_CASES)
@one_order
def test_a_text_has_the_bits_that_it_has_alone(
    name: str, dtype: str, device: Any, tmp_path: Path
) -> None:
    base = save_base(tmp_path / "base", config_of(name))
    folders = {"a": save_adapter(tmp_path / "a", base)}
    folders["b"] = save_adapter(tmp_path / "b", base, 2, 17, "q_proj|v_proj|down_proj|c_attn")
    model = from_pretrained(base, "cuda", dtype, adapters=folders)
    plain = from_pretrained(base, "cuda", dtype)
    adapters = ["a", None, "b", None, "a"]
    together = texts(model, adapters, True)
    assert together == texts(model, adapters, False)
    without = texts(plain, [None] * 5, True)
    same = [own == other for own, other in zip(together, without, strict=True)]
    assert same == [name is None for name in adapters]

"""A smaller model that drafts tokens: texts stay the same, and a step gives several tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpt2block import GPT2, GPT2Config
from gpt2block.engine.cuda.steps import InFlight
from gpt2block.engine.model import Sampled
from gpt2block.files.parameters.gpt2 import GPT2Weights
from tests.devices import GPU, running_on
from tests.engine.test_decoding import random_prompts

SMALL = GPT2Config(n_layer=1, n_head=2, n_embd=32, n_ctx=48, vocab_size=7)
LARGE = replace(SMALL, n_layer=2)
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.8, "top_p": 0.9, "top_logprobs": 2},
    "changed": {"temperature": 0.5, "repetition_penalty": 1.3, "frequency_penalty": 0.2},
}


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which the number of tokens of each step is added."""
    counts, read = list[int](), InFlight.accepted

    def noted(result: InFlight) -> Sampled:
        found = read(result)
        counts.append(len(found.slots))
        return found

    monkeypatch.setattr(InFlight, "accepted", noted)
    return counts


def gpt2(config: GPT2Config, seed: int, dtype: str = "float32") -> GPT2:
    return GPT2(GPT2Weights.random(seed, config), "cuda", dtype)


@pytest.mark.parametrize(
    ("where", "options"),
    [("shuffled", "sampled"), *(pytest.param("gpu", each, marks=GPU.marks) for each in OPTIONS)],
)
def test_the_text_is_that_without_a_draft(where: str, options: str, taken: list[int]) -> None:
    """Nearly all drafts of the model itself are right, even sampled ones; of another, some."""
    with running_on(where):
        model, prompts = gpt2(LARGE, 0), random_prompts([9, 20, 3], LARGE)
        few = 8 if where != "gpu" else 14
        given = {"max_new_tokens": few, "seed": 5, "stop_ids": (), **OPTIONS[options]}
        alone = model.generate(prompts, **given)
        drafts = ((gpt2(LARGE, 0), 2 * few), (gpt2(SMALL, 3), 3 * few))
        for draft, most in drafts[: 1 if where != "gpu" else 2]:
            model.draft_model = draft
            taken.clear()
            assert model.generate(prompts, speculate=True, rows_at_once=2, **given) == alone
            if options != "changed":
                assert len(taken) < most / 2
        model.draft_model = None
        if where == "gpu":
            assert model.generate(prompts[0], speculate=True, **given) == alone[0]

"""Requests of lm_eval's models local-completions and local-chat-completions, and their answers.

Bodies are as lm_eval 0.4.13 sends them (lm_eval/models/openai_completions.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("starlette", reason="the extra serve is not installed")
pytest.importorskip("uvicorn", reason="the extra serve is not installed")

from gpt2block import from_pretrained
from tests.serving import Running, post, serving

CONTEXTS = ("ROMEO:\nO, speak again, bright", "One, two, three,", "My lord, I will")
CONTINUATIONS = (" angel", " four", " not speak")
PROMPTS = [a + b for a, b in zip(CONTEXTS, CONTINUATIONS, strict=True)]


@pytest.fixture(scope="module")
def model() -> Any:
    return from_pretrained("shakespeare", device="cpu")


@pytest.fixture(scope="module")
def server(model: Any) -> Iterator[Running]:
    with serving(model, model.tokenizer, rows=4) as running:
        yield running


def log_likelihoods(server: Running, prompt: Any) -> list[dict[str, Any]]:
    """Request log-likelihoods of continuations; return the choices."""
    body = {"model": "small", "prompt": prompt, "temperature": 0, "max_tokens": 1, "logprobs": 1}
    status, found = post(server, "/v1/completions", {**body, "seed": 1234, "echo": True})
    assert status == 200, found
    assert [choice["index"] for choice in found["choices"]] == [*range(len(found["choices"]))]
    return list(found["choices"])


def read(choice: dict[str, Any], begin: int) -> tuple[float, bool]:
    """Read a choice as lm_eval does: the sum of log-probabilities of the tokens from `begin` on,
    without the new token, and whether each token is the most likely one.
    """
    found = choice["logprobs"]
    scored, tops = found["token_logprobs"][begin:-1], found["top_logprobs"][begin:-1]
    greedy = [logprob == max(top.values()) for logprob, top in zip(scored, tops, strict=True)]
    return sum(scored), all(greedy)


@pytest.mark.parametrize("form", ["ids", "texts"])
def test_log_likelihoods_are_those_of_score(server: Running, model: Any, form: str) -> None:
    encoded = [list(model.tokenizer.encode_ordinary(text)) for text in PROMPTS]
    choices = log_likelihoods(server, encoded if form == "ids" else PROMPTS)
    for choice, context, ids in zip(choices, CONTEXTS, encoded, strict=True):
        begin = len(model.tokenizer.encode_ordinary(context))
        total, greedy = read(choice, begin)
        exact = model.score(ids).tokens.logprobs[begin - 1 :]  # all tokens have one but the first
        np.testing.assert_allclose(total, exact.sum(dtype=np.float64), atol=1e-4)
        logits = model(np.array(ids, np.int32))[begin - 1 : -1]
        assert greedy == (logits.argmax(axis=1) == ids[begin:]).all()


def test_a_greedy_continuation_is_seen_as_such(server: Running, model: Any) -> None:
    ids = list(model.tokenizer.encode_ordinary("To be"))
    drawn = model.generate(ids, max_new_tokens=8, temperature=0)
    (choice,) = log_likelihoods(server, [[*ids, *drawn.tokens]])
    total, greedy = read(choice, len(ids))
    assert greedy
    np.testing.assert_allclose(total, sum(drawn.logprobs), atol=1e-4)

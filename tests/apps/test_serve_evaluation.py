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


@pytest.fixture(scope="module")
def model() -> Any:
    return from_pretrained("shakespeare", device="cpu")


@pytest.fixture(scope="module")
def server(model: Any) -> Iterator[Running]:
    with serving(model, model.tokenizer, rows=4) as running:
        yield running


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
    """The last text is a greedy continuation, and is reported as such."""
    greedy_text = model.generate("To be", max_new_tokens=8, temperature=0).text
    pairs = [*zip(CONTEXTS, CONTINUATIONS, strict=True), ("To be", greedy_text)]
    encoded = [list(model.tokenizer.encode_ordinary(a + b)) for a, b in pairs]
    body = {"model": "small", "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234}
    prompt = encoded if form == "ids" else [a + b for a, b in pairs]
    status, found = post(server, "/v1/completions", {**body, "prompt": prompt, "echo": True})
    assert status == 200, found
    assert [choice["index"] for choice in found["choices"]] == [*range(len(pairs))]
    each_greedy = []
    for choice, (context, _), ids in zip(found["choices"], pairs, encoded, strict=True):
        begin = len(model.tokenizer.encode_ordinary(context))
        total, greedy = read(choice, begin)
        exact = model.score(ids).tokens.logprobs[begin - 1 :]  # all tokens have one but the first
        np.testing.assert_allclose(total, exact.sum(dtype=np.float64), atol=1e-4)
        logits = model(np.array(ids, np.int32))[begin - 1 : -1]
        assert greedy == (logits.argmax(axis=1) == ids[begin:]).all()
        each_greedy.append(greedy)
    assert each_greedy[-1]
    assert not all(each_greedy)

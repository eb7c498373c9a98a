"""The tokens of a prompt, with the most likely alternatives at each position."""

from __future__ import annotations

from collections.abc import Iterator

from gpt2block import reference
from gpt2block.apps.serve.answers import Scored
from gpt2block.engine.model import Ids, ModelEngine

POSITIONS = 64  # positions whose logits are computed at a time


def scored_prompt(engine: ModelEngine, ids: Ids, alternatives: int) -> Iterator[Scored]:
    """Yield the tokens of a prompt in parts; one forward pass computes each part.

    The first token has neither a log-probability nor alternatives.
    """
    yield Scored(ids[:1].tolist(), [None], [()])
    cache = engine.new_cache(1, len(ids))
    for begin in range(0, len(ids) - 1, POSITIONS):
        inputs = ids[begin : min(begin + POSITIONS, len(ids) - 1)]
        targets = ids[begin + 1 : begin + 1 + len(inputs)]
        (logits,) = engine.forward([inputs], "logits", cache)
        logprobs = reference.log_likelihood(logits, targets).tolist()
        top_ids, top_logprobs = (each.tolist() for each in reference.top_logprobs(logits))
        pairs = zip(top_ids, top_logprobs, strict=True)
        tops = [tuple(zip(*pair, strict=True))[:alternatives] for pair in pairs]
        yield Scored(targets.tolist(), logprobs, tops)

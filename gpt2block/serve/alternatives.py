"""The most likely tokens in the place of each token of a text."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gpt2block.run.model import Ids, ModelEngine
from gpt2block.serve.answers import Scored

POSITIONS = 64  # whose logits are in memory together


def alternatives(engine: ModelEngine, ids: Ids, first: int, count: int) -> Scored:
    """Of the tokens from `first` on, by a pass over all ids; `count` alternatives for each.

    The first token of a text has neither a log-probability nor alternatives.
    """
    logprobs: list[float | None] = []
    top: list[dict[int, float]] = []
    if first == 0:
        logprobs, top = [None], [{}]
    cache = engine.new_cache(1, len(ids))
    for begin in range(0, len(ids) - 1, POSITIONS):
        inputs = ids[begin : min(begin + POSITIONS, len(ids) - 1)]
        (logits,) = engine.forward([inputs], "logits", cache)
        skipped = max(0, first - 1 - begin)
        for row, token in zip(logits[skipped:], ids[begin + 1 + skipped :], strict=False):
            given = _log_softmax(row)
            logprobs.append(float(given[token]))
            best = np.argsort(-given, kind="stable")[:count].tolist() if count else []
            shown = [*best, *({int(token)} - {*best} if count else ())]  # always the token itself
            top.append({id: float(given[id]) for id in shown})
    return Scored(logprobs, top)


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max()
    found: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return found

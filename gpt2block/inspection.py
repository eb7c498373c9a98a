"""What a model attends to, and what it predicts after each block."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpt2block import reference
from gpt2block.run.model import Floats, Ids, TracedEngine


@dataclass(frozen=True)
class LogitLens:
    """The most likely next tokens after the embedding and after each block, at every position.

    ids (n_layer + 1, T, top) int64, the most likely first; probabilities, float32, of the same
    shape. The last layer's are the model's own predictions.
    """

    ids: NDArray[np.int64]
    probabilities: Floats


def attention_weights(engine: TracedEngine, ids: Ids) -> Floats:
    """The weights with which each token of ids (T,) attends to the others: (n_layer, n_head, T, T).

    float32; weights[l, h, i, j] is that of token j for token i, 0 for j > i. A row's sum is 1.
    """
    config, T = engine.config, len(ids)
    traced = engine.trace(ids, cached=False)
    weights = np.empty((config.n_layer, config.n_head, T, T), np.float32)
    for layer in range(config.n_layer):
        qkv = traced[f"h.{layer}.qkv"].astype(np.float32).reshape(T, 3, config.n_head, -1)
        q, k = qkv[:, :2].transpose(1, 2, 0, 3)
        scores = q @ k.swapaxes(-1, -2) / np.float32(math.sqrt(config.head_size))
        weights[layer] = reference.softmax(scores, causal=True)
    return weights


def logit_lens(engine: TracedEngine, ids: Ids, top: int) -> LogitLens:
    """The `top` most likely tokens by the final LayerNorm and lm_head, applied after each block.

    Source: nostalgebraist, "interpreting GPT: the logit lens" (2020).
    """
    needed = {"gamma_f", "beta_f", "wte", "lm_head"}
    weights = {
        name: np.asarray(array.T if layout == "NK" else array, np.float32)
        for name, array, layout in engine.tensors()
        if name in needed
    }
    head = weights.get("lm_head", weights["wte"])
    states = engine.forward([ids], "states")[0][:-1]
    shape = (len(states), len(ids), top)
    found = LogitLens(np.empty(shape, np.int64), np.empty(shape, np.float32))
    for layer, x in enumerate(states):
        normed = reference.layernorm(x, weights["gamma_f"], weights["beta_f"], engine.config.eps)
        probabilities = reference.softmax(reference.matmul_bias(normed, head))
        order = np.argsort(-probabilities, axis=-1, kind="stable")[:, :top]
        found.ids[layer] = order
        found.probabilities[layer] = np.take_along_axis(probabilities, order, axis=-1)
    return found

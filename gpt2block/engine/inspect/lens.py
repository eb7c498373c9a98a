"""Compute attention weights, and the tokens that a model predicts after each block."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from gpt2block import reference
from gpt2block.engine import notebook
from gpt2block.engine.model import Floats, Ids, TracedEngine, tensors_of
from gpt2block.engine.numpy.executor import FUNCTIONS
from gpt2block.engine.passes import final_step
from gpt2block.files.tokenizers.encoding import Encoding, bytes_of_id
from gpt2block.files.tokenizers.lookup import ReadLater
from gpt2block.models.architectures import architecture_of
from gpt2block.models.config import ModelConfig

POSITIONS = 6  # number of last positions that a table in text form shows
POSITIONS_HTML = 32


@dataclass(frozen=True)
class LogitLens(ReadLater):
    """The most likely next tokens after the embedding and after each block, at every position.

    ids: int64 (n_layer + 1, T, top), the most likely token first. probabilities: float32 of the
    same shape. The last layer's entries are the model's predictions. tokens: the input (T,). A
    LogitLens is shown, as text and in a notebook, as a table of the most likely tokens for the last
    positions.
    """

    ids: NDArray[np.int64]
    probabilities: Floats
    tokens: Ids | None = None
    # The tokenizer for the texts of tokens, loaded on first use. The default is a factory: a plain
    # default would become a class attribute, and ReadLater would then not load the tokenizer.
    encoding: Encoding | None = field(default_factory=lambda: None)

    def __repr__(self) -> str:
        return f"{self._title(POSITIONS)}\n{notebook.text_table(*self._table(POSITIONS))}"

    def _repr_html_(self) -> str:
        title = notebook.paragraph(self._title(POSITIONS_HTML))
        return title + notebook.table(*self._table(POSITIONS_HTML))

    def _title(self, most: int) -> str:
        layers, T, top = self.ids.shape
        which = f"the last {most} of {T} tokens" if most < T else f"{T} tokens"
        return f"LogitLens of {layers - 1} blocks, {which}, top {top}: the most likely next token"

    def _table(self, most: int) -> tuple[list[str], list[list[str]]]:
        """Return a table: headers (the input's tokens), a row for the embedding and each block."""
        layers, T, _ = self.ids.shape
        first = max(0, T - most)
        tokens = range(first, T) if self.tokens is None else self.tokens[first:].tolist()
        given = map(str if self.tokens is None else self._text, tokens)
        rows = []
        for layer in range(layers):
            ids = self.ids[layer, first:, 0].tolist()
            likely = zip(ids, self.probabilities[layer, first:, 0].tolist(), strict=True)
            name = f"block {layer - 1}" if layer else "embedding"
            rows.append([name, *(f"{self._text(token)} {p:.0%}" for token, p in likely)])
        return ["after", *given], rows

    def _text(self, token: int) -> str:
        """Return the text of a token in quotes or, if there is no tokenizer, the token's id."""
        if self.encoding is None:
            return str(token)
        return repr(bytes_of_id(self.encoding, token).decode(errors="replace"))


def attention_weights(engine: TracedEngine, ids: Ids) -> Floats:
    """Return the attention weights of tokens ids (T,): float32 (n_layer, n_head, T, T).

    weights[l, h, i, j] is the weight of token j for query token i, 0 for j > i. The sum of weights
    over j is 1. All weights of a layer without attention are 0.
    """
    return weights_of(engine, engine.trace(ids, cached=False))


def weights_of(engine: TracedEngine, traced: Mapping[str, np.ndarray]) -> Floats:
    """Return the attention weights of all layers. traced: the result of the engine's `trace`."""
    config = engine.config
    T = len(traced["embedding"])
    # each query head's key head
    shared = np.arange(config.n_head) * config.n_kv_head // config.n_head
    weights = np.zeros((config.n_layer, config.n_head, T, T), np.float32)
    for layer in layers_with_attention(config):
        rows = rows_of_attention(engine, traced, layer)
        Q, K, _ = config.qkv_widths(layer)
        D = Q // config.n_head
        q, k = (each.reshape(T, -1, D).swapaxes(0, 1) for each in (rows[:, :Q], rows[:, Q : Q + K]))
        scale, window = config.scales.attention, config.windows[layer]
        scores = q @ k[shared].swapaxes(-1, -2) * np.float32(D**-0.5 if scale is None else scale)
        past = np.tri(T, k=-(window or T), dtype=bool)  # True for keys before the window
        weights[layer] = reference.softmax(np.where(past, -np.inf, scores), causal=True)
    return weights


def layers_with_attention(config: ModelConfig) -> list[int]:
    """Return the layers that have attention; others have no values in a kv_cache."""
    return [n for n, cache in enumerate(config.layer_caches) if cache.values]


def rows_of_attention(engine: TracedEngine, traced: Mapping[str, np.ndarray], layer: int) -> Floats:
    """Return float32 rows [Q | K | V] (T, channels) as the attention of a layer reads them."""
    config = engine.config
    source = config.layer_caches[layer].layer
    name = config.QKV if source == layer else "q_rope"
    rows = traced[f"h.{layer}.{name}"].astype(np.float32)
    rows = rows.reshape(len(rows), -1)
    if source != layer:  # rows have queries only; keys and values are an earlier layer's
        Q, *_ = config.qkv_widths(source)
        return np.concatenate([rows, rows_of_attention(engine, traced, source)[:, Q:]], axis=1)
    fp8 = engine.formats.fp8_cache
    if fp8:  # a kv_cache of FP8 rounds keys and values
        rows = reference.kv_round(rows, config.n_head, config.n_kv_head, fp8)
    return rows


def logit_lens(
    engine: TracedEngine, ids: Ids, top: int, encoding: Callable[[], Encoding | None]
) -> LogitLens:
    """Apply the final norm and lm_head after each block; return the `top` most likely tokens.

    encoding: function that returns the tokenizer for the texts of tokens.

    Source: nostalgebraist, "interpreting GPT: the logit lens" (2020).
    """
    found = lens_of(engine, engine.forward([ids], "states")[0][:-1], top)
    return replace(found, tokens=ids).later(encoding=encoding)


def lens_of(engine: TracedEngine, states: Floats, top: int) -> LogitLens:
    """Return the LogitLens of states (n_layer + 1, T, C): the embedding, each block's output."""
    norm = final_step(engine.config)
    parameters = norm.inputs[1:]
    # constants() may read vectors of blocks
    weights = tensors_of(
        engine, np.float32, lambda name, ndim: not name.startswith("h.") or ndim == 1
    )
    weights |= architecture_of(engine.config).constants(engine.config, weights)
    shape = (*states.shape[:2], top)
    lens = LogitLens(np.empty(shape, np.int64), np.empty(shape, np.float32))
    for layer, x in enumerate(states):
        inputs = (x, *(weights[name] for name in parameters))
        normed = FUNCTIONS[norm.op](*inputs, **norm.attrs)
        logits, cap = reference.matmul_bias(normed, weights["lm_head"]), engine.config.scales.cap
        probabilities = reference.softmax(logits if cap is None else reference.cap(logits, cap))
        chosen = np.sort(np.argpartition(probabilities, -top, axis=-1)[:, -top:], axis=-1)
        kept = np.take_along_axis(probabilities, chosen, axis=-1)
        order = np.argsort(-kept, axis=-1, kind="stable")
        lens.ids[layer] = np.take_along_axis(chosen, order, axis=-1)
        lens.probabilities[layer] = np.take_along_axis(kept, order, axis=-1)
    return lens


def most_likely(logits: NDArray[np.floating]) -> list[tuple[int, float]]:
    """Return (id, probability) of the five most likely tokens of logits (V,), likeliest first."""
    p = reference.softmax(logits.astype(np.float64))
    return [(int(token), float(p[token])) for token in np.argsort(-p)[:5]]

"""Collect the data of a block that a page shows in detail: Q, K, V and excerpts of products.

A page has no room for all numbers. A page holds some whole rows of x and some whole columns of W,
so that the page can compute the complete sum for each pair of a row and a column.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from gpt2block.engine.explain import grids
from gpt2block.engine.inspect.lens import layers_with_attention, rows_of_attention
from gpt2block.engine.model import TracedEngine, tensors_of
from gpt2block.engine.passes import model_steps

ATTENTION_VALUES = 200_000  # maximum float16 values of Q, K and V; a float32 value counts as two
PRODUCT = "matmul_bias"
Tensors = Mapping[str, np.ndarray]


def opened(engine: TracedEngine, tensors: Tensors, layer: int, values: int) -> dict[str, object]:
    """Return data of a layer's attention and matrix products, and of the product for the logits.

    If the layer has no attention, the attention is that of the first layer that has.

    tensors: the result of the engine's `trace`, completed by the steps that it does not store.
    values: maximum number of float16 values, more than ATTENTION_VALUES; a float32 value counts as
    two.
    """
    attending = layers_with_attention(engine.config)
    of_attention = layer if layer in attending else attending[0]
    rows = rows_of_attention(engine, tensors, of_attention)
    whole = 2 * rows.size <= ATTENTION_VALUES
    kept = rows if whole else rows[: max(1, ATTENTION_VALUES // rows.shape[1])]
    attention = {
        "layer": of_attention,
        "head_size": engine.config.qkv_widths(of_attention)[0] // engine.config.n_head,
        "tokens": len(kept),
        "rows": grids.exact(kept) if whole else grids.encoded(kept),
    }
    own = f"h.{layer}."
    steps = {
        step.name.removeprefix(own): step.inputs
        for step in model_steps(engine.config)
        if step.op == PRODUCT and (step.name.startswith(own) or not step.name.startswith("h."))
    }
    left = values - min(ATTENTION_VALUES, (1 + whole) * kept.size)
    lines = left // sum(tensors[x].shape[1] for x, _, _ in steps.values())
    names = {"wte", *(name for inputs in steps.values() for name in inputs[1:])}
    weights = tensors_of(engine, wanted=lambda name, _: name in names)
    likely = np.argsort(-tensors["logits"][-1], kind="stable")
    products = {}
    for name, (x, w, b) in steps.items():
        y = tensors[name if name in tensors else own + name]
        first = likely if name == "logits" else None
        products[name] = _product(tensors[x], weights[w], weights.get(b), y, lines, first)
    return {"attention": attention, "products": products}


def _product(
    x: np.ndarray,
    w: np.ndarray,
    b: np.ndarray | None,
    y: np.ndarray,
    lines: int,
    first: NDArray[np.int64] | None,
) -> dict[str, object]:
    """Return some rows of x (T, K), some columns of w (K, N), and the values of b and y there.

    lines: maximum number of rows and columns, each of K float16 values; equal for all products.
    first: columns in the order of preference; None: evenly spaced columns.
    """
    (T, K), N = x.shape, w.shape[1]
    # Unit of `lines`: K float16 values, as in a column of w; K float32 values count as two.
    n_rows = min(T, max(1, lines // 4))
    n_columns = min(N, max(1, (lines - 2 * n_rows) * K // (K + 2 * n_rows)))
    rows = grids.ends(T, n_rows)
    columns = grids.ends(N, n_columns) if first is None else np.sort(first[:n_columns])
    return {
        "rows": rows.tolist(),
        "columns": columns.tolist(),
        "x": grids.exact(x[rows]),
        "w": grids.encoded(w[:, columns].T),
        "b": None if b is None else grids.exact(b[columns]),
        "y": grids.exact(y[np.ix_(rows, columns)]),
    }

"""Compare the steps of a block, and every layer of a model, with float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpt2block import reference
from gpt2block.checks import FLOATS, require_host
from gpt2block.engine import notebook
from gpt2block.engine.block import NOTHING, BlockEngine, Given
from gpt2block.engine.model import (
    Ids,
    SequenceFrequencies,
    StepResult,
    TracedEngine,
    by_name,
    layer_rows,
    new_states,
    tensors_of,
)
from gpt2block.engine.numpy.block import NumpyEngine
from gpt2block.engine.numpy.executor import NumpyExecutor
from gpt2block.engine.passes.forward import ROWS_AT_ONCE, NumpyPass, forward
from gpt2block.engine.passes.settings import PassSettings
from gpt2block.models.architectures import architecture_of
from gpt2block.models.config import TABLES, ModelConfig

Exact = NDArray[np.float64]


@dataclass(frozen=True)
class Comparison:
    """The comparison of one step with float64.

    `max_abs`, `max_rel`: the error of this step alone, on the float64 run's inputs rounded to the
    block's dtype. `total_abs`, `total_rel`: the error accumulated from x up to this step. Relative
    errors are divided by the largest magnitude of the tensor.
    """

    name: str
    kernel: str
    shape: tuple[int, ...]
    ms: float
    max_abs: float
    max_rel: float
    total_abs: float
    total_rel: float


class Comparisons(list[Comparison]):
    """A list of the comparisons of a forward pass's steps, in order, which is shown as a table."""

    def __repr__(self) -> str:
        return notebook.text_table(*self._table())

    def _repr_html_(self) -> str:
        return notebook.table(*self._table())

    def _table(self) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
        headers = ("step", "kernel", "shape", "alone, relative", "accumulated, relative")
        return headers, [
            (c.name, c.kernel, " × ".join(map(str, c.shape)), c.max_rel, c.total_rel) for c in self
        ]


def compare_steps(
    engine: BlockEngine, exact: NumpyEngine, x: object, dtype: str, given: Given = NOTHING
) -> Comparisons:
    """Compare the result of every step of a block with `exact`, the same block in float64.

    x: a NumPy array of `dtype`, the block's dtype. given: as for a BlockEngine. Raises InputError
    for any other x.
    """
    host = require_host(x, "to compare", FLOATS[dtype], "copy it to the host")
    traced = engine.trace(host, given)
    truth: dict[str, np.ndarray] = {"x": host.astype(np.float64)}
    rows = Comparisons()
    for step in engine.spec.steps:
        truth[step.name] = exact.executor({**truth, **given}).do(step)
        rounded = {name: truth[name].astype(FLOATS[dtype]) for name in step.inputs if name in truth}
        own = engine.step(step, {**rounded, **given})
        wide = {name: array.astype(np.float64) for name, array in rounded.items()}
        expected = exact.executor({**wide, **given}).do(step)
        rows.append(_comparison(own, expected, traced[step.name], truth[step.name]))
    return rows


def _comparison(alone: StepResult, expected: Exact, traced: np.ndarray, truth: Exact) -> Comparison:
    """Compare a step's results with float64.

    alone, expected: result of the step on exact inputs, and its exact value. traced, truth: result
    of the step in the whole pass, and its exact value.
    """
    own = alone.out[..., : truth.shape[-1]]  # a GPU may add columns of padding to lm_head
    both = *errors(own, expected), *errors(traced, truth)
    return Comparison(alone.name, alone.kernel, truth.shape, alone.ms, *both)


def errors(got: np.ndarray, truth: np.ndarray) -> tuple[float, float]:
    """Return the largest absolute difference, and its ratio to the largest magnitude of `truth`."""
    largest = float(np.abs(got.astype(np.float64) - truth).max())
    return largest, largest / max(float(np.abs(truth).max()), np.finfo(np.float64).tiny)


def exact_tensors(engine: TracedEngine, ids: Ids) -> dict[str, Exact]:
    """Return the tensors of a forward pass of ids (T,), computed in float64 from stored weights.

    Keys: names of `model_steps`, (T, channels) each; "h.0.k" and "h.0.v", (1, T, C) each, for K and
    V of layer 0, and so on; "scores" (T,), the log-likelihood of each next token, where the first
    token follows the last.
    """
    config = engine.config
    architecture = architecture_of(config)
    weights = tensors_of(engine, np.float64)
    weights |= {name: weights[name].T for name in TABLES if name in weights}
    T = len(ids)
    kept = by_name(layer_rows(config.layer_caches, lambda _, width: np.zeros((1, T, width))))
    rows = np.arange(T)
    batch = {"tokens": ids, "positions": rows, "row": 0 * rows}
    batch |= {"cu_seqlens": np.array([0, T]), "start": np.array([0])}
    batch |= new_states(config, 1, np, kept=False)
    constants = architecture.constants(config, weights)
    constants |= SequenceFrequencies(config, 1, T, np).tensors
    do = NumpyExecutor({**weights, **constants, **kept, **batch}, keep=None)
    forward(NumpyPass(do, PassSettings.of(config), T), architecture, config, "logits")
    # Engines compute these results from exact inputs, as the results are no rows of the pass.
    others = "spans", ".mixed", ".tiles"
    tensors = {name: made for name, made in do.kept.items() if not name.endswith(others)}
    scores = np.asarray(reference.log_likelihood(tensors["logits"], np.roll(ids, -1)), np.float64)
    return {**tensors, **kept, "scores": scores}


def compare(engine: TracedEngine, ids: Ids, cached: bool) -> Comparisons:
    """Compare every step of a forward pass of ids with float64, as `Block.compare` does.

    cached: compare the decoding step for the last id instead of the whole pass.
    """
    traced = engine.trace(ids, cached)
    return compare_tensors(engine, ids, cached, exact_tensors(engine, ids), traced)


def compare_tensors(
    engine: TracedEngine,
    ids: Ids,
    cached: bool,
    exact: Mapping[str, Exact],
    traced: Mapping[str, np.ndarray],
) -> Comparisons:
    """Compare as `compare` does. exact: from `exact_tensors`. traced: from the engine's `trace`."""
    exact = _by_engine_names(exact, engine.config, len(ids), cached)
    compared = Comparisons()
    for own in engine.run_alone(ids, cached, exact):
        if own.name in traced:
            truth = exact[own.name]
            compared.append(_comparison(own, truth, traced[own.name], truth))
    return compared


def _by_engine_names(
    exact: Mapping[str, Exact], config: ModelConfig, T: int, cached: bool
) -> dict[str, Exact]:
    """Return `exact` plus the tensors of GPU passes: q, and groups of rows of logits and scores."""
    tensors, qkv = dict(exact), config.QKV
    for name, tensor in exact.items():
        if name.endswith(f".{qkv}"):
            width, *_ = config.qkv_widths(int(name.split(".")[1]))
            tensors[f"{name.removesuffix(qkv)}q"] = tensor[:, :width]
        elif name in ("uncapped", "logits", "scores"):
            spans = range(0, T, ROWS_AT_ONCE)
            tensors |= {f"{name}.{first}": tensor[first : first + ROWS_AT_ONCE] for first in spans}
    if cached:
        # The last token has a row, or one for each of its experts.
        tensors = {
            name: tensor if name.endswith((".k", ".v")) else tensor[-max(1, len(tensor) // T) :]
            for name, tensor in tensors.items()
        }
    return tensors

"""Every step of every layer of a model, compared with float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt2block import reference
from gpt2block.block import Comparison, Comparisons, errors
from gpt2block.config import ModelConfig
from gpt2block.passes import architecture_of
from gpt2block.passes.blocks import ModelStepPass, Settings
from gpt2block.passes.forward import forward
from gpt2block.passes.prefill import ROWS_AT_ONCE
from gpt2block.run.model import Ids, TracedEngine
from gpt2block.run.numpy_machine import NumpyMachine

Exact = NDArray[np.float64]


def exact_tensors(engine: TracedEngine, ids: Ids) -> dict[str, Exact]:
    """The tensors of a forward pass of ids (T,) in float64, with the weights as they are stored.

    Keys: the names of `model_steps`, (T, channels) each; "h.0.k" (1, T, C) and
    "h.0.v" for K and V of a layer; "scores" (T,) for the log-likelihoods of the next tokens, where
    the last is that of the first token.
    """
    config = engine.config
    architecture = architecture_of(config)
    weights = {
        name: np.asarray(array.T if layout == "NK" else array, np.float64)
        for name, array, layout in engine.tensors()
    }
    weights.setdefault("lm_head", weights["wte"])
    weights["wte"] = weights["wte"].T
    T = len(ids)
    caches = [f"h.{n}.{half}" for n in range(config.n_layer) for half in "kv"]
    kept = {name: np.zeros((1, T, config.kv_width)) for name in caches}
    rows = np.arange(T)
    batch = {"tokens": ids, "positions": rows, "row": 0 * rows}
    batch |= {"cu_seqlens": np.array([0, T]), "start": np.array([0])}
    do = NumpyMachine({**weights, **architecture.constants(config), **kept, **batch}, keep=None)
    forward(ModelStepPass(do, Settings.of(config), T), architecture, config, "logits")
    found: dict[str, Exact] = do.kept
    scores = np.asarray(reference.log_likelihood(found["logits"], np.roll(ids, -1)), np.float64)
    return {**found, **kept, "scores": scores}


def compare(engine: TracedEngine, ids: Ids, cached: bool) -> Comparisons:
    """A row for every step, in order; cached: for the last token of ids only.

    The rows are as in `Block.compare`.
    """
    traced = engine.trace(ids, cached)
    return compare_tensors(engine, ids, cached, exact_tensors(engine, ids), traced)


def compare_tensors(
    engine: TracedEngine,
    ids: Ids,
    cached: bool,
    exact: Mapping[str, Exact],
    traced: Mapping[str, NDArray[Any]],
) -> Comparisons:
    """`compare`, from the results of `exact_tensors` and of the engine's `trace`."""
    exact = _by_engine_names(exact, engine.config, len(ids), cached)
    compared = Comparisons()
    for name, kernel, out, ms in engine.run_alone(ids, cached, exact):
        if name not in traced:
            continue
        truth = exact[name]
        own = errors(out[..., : truth.shape[-1]], truth)  # a GPU may pad lm_head with columns
        total = errors(traced[name], truth)
        compared.append(Comparison(name, kernel, truth.shape, ms, *own, *total))
    return compared


def _by_engine_names(
    exact: Mapping[str, Exact], config: ModelConfig, T: int, cached: bool
) -> dict[str, Exact]:
    """Add the names of passes on a GPU: q in decoding, logits and scores in groups of rows."""
    found, qkv = dict(exact), architecture_of(config).QKV
    for name, tensor in exact.items():
        if name.endswith(f".{qkv}"):
            found[f"{name.removesuffix(qkv)}q"] = tensor[:, : config.q_width]
        elif name in ("logits", "scores"):
            spans = range(0, T, ROWS_AT_ONCE)
            found |= {f"{name}.{first}": tensor[first : first + ROWS_AT_ONCE] for first in spans}
    if cached:
        found = {n: t if n.endswith((".k", ".v")) else t[-1:] for n, t in found.items()}
    return found

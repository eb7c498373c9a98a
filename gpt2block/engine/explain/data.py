"""Collect the JSON data of an HTML page that shows one forward pass of a text."""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Mapping
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt2block import reference
from gpt2block.checks import check_integer
from gpt2block.cuda.kernels import read_source
from gpt2block.engine.explain import grids, sources
from gpt2block.engine.explain.opened import opened
from gpt2block.engine.inspect.compare import Comparison, compare_tensors, exact_tensors
from gpt2block.engine.inspect.lens import lens_of, weights_of
from gpt2block.engine.model import UNCOMPARED, Floats, Ids, TracedEngine
from gpt2block.engine.passes import fused_steps, model_steps
from gpt2block.engine.passes.executor import Step
from gpt2block.errors import InputError
from gpt2block.files.tokenizers.encoding import Encoding, bytes_of_id
from gpt2block.models.config import ModelConfig, model_shapes

MAX_TOKENS = 1024  # maximum tokens of a text, as every tensor is kept in float64
DETAILED_CELLS = 16_384  # maximum grid cells per tensor in the detailed layer or outside blocks
OTHER_CELLS = 400_000  # maximum total of grid cells of all tensors in layers without details
MIN_CELLS, MAX_CELLS = 256, 8_192  # minimum and maximum grid cells per tensor of such layers
ATTENTION_WEIGHTS = 800_000  # maximum total of the attention weights of all heads and layers
OPENED_VALUES = 450_000  # maximum values of attention and products in the detailed layer
OPENED_AND_WEIGHTS = 1_090_000  # maximum sum of these values and all attention weights
LENS_ENTRIES = 60_000  # maximum total of logit-lens entries of all layers and positions
LENS_TOP = 5
EXPERT_ENTRIES = 60_000  # maximum total of the experts of all layers and positions
NEXT_TOKENS = 24  # number of next tokens that the page lists, although it has all logits
Shapes = Mapping[str, tuple[int, ...]]
Traced = Mapping[str, np.ndarray]


def collect(
    engine: TracedEngine, encoding: Encoding | None, name: str, ids: Ids, layer: int
) -> dict[str, object]:
    """Run a forward pass of ids (T,) and return all data that its page shows.

    name: name of the model. layer: index of the layer that the page shows in more detail. Raises
    InputError for too many tokens, a layer that the model does not have, and logits that are not
    finite.
    """
    config = engine.config
    layer = check(config, len(ids), layer)
    exact = exact_tensors(engine, ids)
    traced = _by_plan_names(engine.trace(ids, cached=False))
    rows = compare_tensors(engine, ids, False, exact, traced)
    compared = {row.name.removesuffix(".0"): row for row in rows}
    plan = _Plan(config)
    files: dict[str, str] = {}
    steps = {short: _step(plan, short, compared, files) for short in plan.short_names}
    ops = [step["op"] for step in steps.values()]
    logits = traced["logits"][-1].astype(np.float32)
    if not np.isfinite(logits).all():
        raise InputError("logits: expected finite numbers, got NaN or infinity: check the weights")
    lens = _lens(engine, traced)
    attention = _attention(weights_of(engine, traced))
    side = attention["side"]
    weights = config.n_layer * config.n_head * side * (side + 1) // 2
    values = min(OPENED_VALUES, OPENED_AND_WEIGHTS - weights)
    shown = np.argsort(-logits, kind="stable")[:NEXT_TOKENS].tolist()
    return {
        "model": _model(engine, name),
        "layer": layer,
        "text": _text(encoding, *ids.tolist()),
        "tokens": _tokens(encoding, ids, traced["logits"]),
        "texts": {str(i): _text(encoding, i) for i in sorted({*shown, *lens["ids"]})},
        "plan": {"before": plan.before, "blocks": plan.blocks, "after": plan.after},
        "steps": steps,
        "functions": {op: sources.function_source(op) for op in dict.fromkeys(ops)},
        "files": files,
        "tensors": _tensors(config, exact, traced, compared, plan, layer),
        "attention": attention,
        "lens": lens,
        "experts": _experts(config, {**exact, **traced}),
        "opened": opened(engine, {**exact, **traced}, layer, values),
        "next": {"logits": b64encode(logits.astype("<f4").tobytes()).decode(), "shown": shown},
    }


def check(config: ModelConfig, tokens: int, layer: int) -> int:
    """Return the layer. Raise InputError if the page cannot show it, or this number of tokens."""
    most = min(MAX_TOKENS, config.n_ctx)
    if not 1 <= tokens <= most:
        advice = "shorten it" if tokens else "give some text"
        raise InputError(f"text: expected 1 to {most:,} tokens, got {tokens:,}: {advice}")
    last = config.n_layer - 1
    return check_integer("layer", layer, 0, last, f"0 to {last}")


class _Plan:
    """The steps of a forward pass before, in and after the blocks. blocks: a list for each layer.

    Steps of the same name in several blocks are equal, except that attention may read rows of
    queries only.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        kept = [step for step in model_steps(config) if step.op not in UNCOMPARED]
        self.steps = {_short(step.name): step for step in reversed(kept)}
        self.blocks: list[list[str]] = []
        self.joined: dict[str, tuple[Step, list[str]]] = {}
        for n in range(config.n_layer):
            h, before = f"h.{n}.", f"h.{n - 1}.output" if n else "embedding"
            block = [step for step in kept if step.name.startswith(h)]
            names = [_short(step.name) for step in block]
            if names not in self.blocks:
                fused = [s for s in fused_steps(config, h, before) if s.op not in UNCOMPARED]
                joined = sources.joined_steps(block, fused)
                self.joined |= {_short(name): found for name, found in joined.items()}
            self.blocks.append(names)
        outer = [step.name for step in kept if not step.name.startswith("h.")]
        first = next(n for n, step in enumerate(kept) if step.name.startswith("h."))
        self.before, self.after = outer[:first], outer[first:]

    @property
    def short_names(self) -> list[str]:
        return [*self.before, *dict.fromkeys(chain(*self.blocks)), *self.after]


def _short(name: str) -> str:
    """Return a tensor's name without the prefix of its layer: "qkv" for "h.3.qkv"."""
    return name.split(".", 2)[2] if name.startswith("h.") else name


def _by_plan_names(traced: Traced) -> dict[str, np.ndarray]:
    """Return `traced`; the first group of rows of "logits", "logits.0", is also named "logits"."""
    return {name.removesuffix(".0"): tensor for name, tensor in traced.items()} | dict(traced)


def _step(
    plan: _Plan, short: str, compared: Mapping[str, Comparison], files: dict[str, str]
) -> dict[str, object]:
    """Return data of a step that hold for every block; add its kernels' sources to `files`."""
    step = plan.steps[short]
    operation = sources.operation_of(step.op) or sources.operation_of(sources.function_of(step))
    kernels = []
    if operation is not None:
        kernel = sources.readable_kernel(operation)
        kernels.append(sources.described(kernel, sources.TEN_STEPS, plan.config))
    fused, names = plan.joined.get(short, (None, [short]))
    fused_operation = fused and sources.operation_of(sources.function_of(fused))
    if fused_operation:
        variants = sources.fused_kernels(fused_operation, plan.config)
        kernels += [sources.described(each, sources.FUSED, plan.config) for each in variants]
    row = compared.get(step.name) or (compared.get(fused.name) if fused else None)
    ran = row.kernel.split(", ") if row else ()
    kernels = [*sources.kernels_run(ran, plan.config), *kernels]
    files.update({each["file"]: read_source(each["file"]) for each in kernels})
    return {
        "op": sources.function_of(step),
        "number": step.attrs.get("softmax_scale", step.attrs.get("factor")),
        "gate": next((each for each in ("gelu", "sigmoid") if step.attrs.get(each)), "silu"),
        "adds": step.op in ("add", "rmsnorm_add"),
        "kernels": kernels,
        "joins": [_short(name) for name in names],
    }


def _model(engine: TracedEngine, name: str) -> dict[str, object]:
    config = engine.config
    sizes = ("n_layer", "n_head", "head_size", "n_embd", "n_ctx", "vocab_size")
    return {
        "name": name,
        "kind": type(config).__name__.removesuffix("Config"),
        "device": engine.describe(),
        "dtype": engine.formats.dtype,
        "n_kv_head": config.n_kv_head,
        "windows": list(config.windows),
        "growth": config.scales.growth,
        **{size: getattr(config, size) for size in sizes},
    }


def _tokens(
    encoding: Encoding | None, ids: Ids, logits: NDArray[np.floating]
) -> list[dict[str, object]]:
    """Return each token's id, text, bytes and surprisal in bits (None for the first token)."""
    scores = reference.log_likelihood(logits[:-1], ids[1:]).tolist() if len(ids) > 1 else []
    bits = [None, *(_rounded(0 - score / math.log(2)) for score in scores)]
    return [
        {
            "id": int(token),
            "text": _text(encoding, token),
            "bytes": "" if encoding is None else _bytes(encoding, token).hex(" "),
            "bits": b,
        }
        for token, b in zip(ids.tolist(), bits, strict=True)
    ]


def _bytes(encoding: Encoding | None, token: int) -> bytes:
    """Return the bytes of a token or, if there is no tokenizer, "#" and the token's id."""
    return f"#{token}".encode() if encoding is None else bytes_of_id(encoding, token)


def _text(encoding: Encoding | None, *tokens: int) -> str:
    """Return the text of tokens; bytes that are not valid UTF-8 are written like \\xe4."""
    return b"".join(_bytes(encoding, token) for token in tokens).decode(errors="backslashreplace")


def _tensors(
    config: ModelConfig,
    exact: Traced,
    traced: Traced,
    compared: Mapping[str, Comparison],
    plan: _Plan,
    layer: int,
) -> dict[str, object]:
    """Return {step: shapes, statistics, errors, time and downsampled values of its tensor}."""
    others = sum(map(len, plan.blocks)) - len(plan.blocks[layer])
    cells = min(MAX_CELLS, max(MIN_CELLS, OTHER_CELLS // max(1, others)))
    shapes: dict[str, tuple[int, ...]] = {**model_shapes(config)}
    shapes["lm_head"] = shapes.get("lm_head", shapes["wte"])[::-1]
    shapes |= dict.fromkeys(("tokens", "positions"), (len(exact["embedding"]),))
    tensors: dict[str, object] = {}
    for step in model_steps(config):
        if step.op in UNCOMPARED:
            continue
        shapes[step.name] = exact[step.name].shape
        stored = step.name in traced
        tensor = traced[step.name] if stored else exact[step.name]
        tensor = tensor.reshape(len(exact["embedding"]), -1)  # a token's experts, side by side
        inside = step.name.startswith("h.") and not step.name.startswith(f"h.{layer}.")
        tensors[step.name] = {
            "inputs": _input_shapes(step, shapes),
            "shape": list(tensor.shape),
            "stored": stored,
            **_statistics(tensor),
            **_comparison_fields(compared.get(step.name)),
            "grid": grids.grid(tensor, cells if inside else DETAILED_CELLS),
        }
    return tensors


def _input_shapes(step: Step, shapes: Shapes) -> list[list[object]]:
    """Return [name, shape] of each input of a step, except inputs that describe the batch.

    Names from the step's layer are short; a name from the previous layer is not.
    """
    own = step.name.rpartition(".")[0]
    return [
        [_short(name) if name.startswith(f"{own}.") else name, list(shapes[name])]
        for name in step.inputs
        if name in shapes
    ]


def _statistics(tensor: np.ndarray) -> dict[str, float | None]:
    wide = tensor.astype(np.float64)
    values = {"min": wide.min(), "max": wide.max(), "mean": wide.mean()}
    return {name: _rounded(float(value)) for name, value in values.items()}


def _comparison_fields(row: Comparison | None) -> dict[str, object]:
    """Return a comparison's kernel, time in ms, and errors; {} if the step was not compared."""
    if row is None:
        return {}
    names = ("ms", "max_abs", "max_rel", "total_abs", "total_rel")
    return {"kernel": row.kernel, **{name: _rounded(getattr(row, name)) for name in names}}


def _attention(weights: Floats) -> dict[str, Any]:
    """Return each head's attention weights up to the diagonal, downsampled to fit on the page.

    The weights are in row-major order. side: number of rows of the triangle. If there are fewer
    rows than tokens, a cell has the largest weight of its area.
    """
    n_layer, n_head, T, _ = weights.shape
    side = min(T, max(8, math.isqrt(2 * ATTENTION_WEIGHTS // (n_layer * n_head))))
    below = np.tril_indices(side)
    heads = [
        [grids.encoded(grids.downsampled(head, side, side)[below]) for head in layer]
        for layer in weights
    ]
    return {"side": side, "heads": heads}


def _lens(engine: TracedEngine, traced: Traced) -> dict[str, Any]:
    """Return the most likely tokens after each block, at the last positions that fit on the page.

    ids and probabilities are in the order (n_layer + 1, positions, top).
    """
    top, n_layer = min(LENS_TOP, engine.config.vocab_size), engine.config.n_layer
    kept = max(1, LENS_ENTRIES // ((n_layer + 1) * top))
    names = ["embedding", *(f"h.{n}.output" for n in range(n_layer))]
    states = np.stack([traced[name][-kept:] for name in names]).astype(np.float32)
    lens = lens_of(engine, states, top)
    return {
        "positions": states.shape[1],
        "top": top,
        "ids": lens.ids.ravel().tolist(),
        **grids.encoded(lens.probabilities.ravel()),
    }


def _experts(config: ModelConfig, traced: Traced) -> dict[str, Any] | None:
    """Return the experts of each layer, at the last positions that fit on the page.

    numbers and weights (the encoded values) are in the order (layers, positions, used).
    """
    if (of := config.experts) is None:
        return None
    layers, used = np.flatnonzero(of.layers).tolist(), of.n_used
    kept = max(1, EXPERT_ENTRIES // (len(layers) * used))
    routes = np.stack([traced[f"h.{n}.routes"][-kept:] for n in layers])
    return {
        "layers": layers,
        "positions": routes.shape[1],
        "used": used,
        "numbers": routes[..., :used].astype(int).ravel().tolist(),
        **grids.encoded(routes[..., used:].ravel()),
    }


def _rounded(value: float) -> float | None:
    """Round to 4 significant digits; return None for infinity and NaN, which JSON lacks."""
    return float(f"{value:.4g}") if math.isfinite(value) else None

"""Passes as lists of steps, without arrays."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from gpt2block.engine.passes import names_of
from gpt2block.engine.passes.settings import PassSettings
from gpt2block.engine.passes.decoding import DecodePass, SumsPass
from gpt2block.engine.passes.executor import Outline, Step, hi_lo_of
from gpt2block.engine.passes.forward import forward
from gpt2block.engine.passes.prefill_rules import Prefill
from gpt2block.models.architectures import architecture_of
from gpt2block.models.config import ModelConfig
from gpt2block.ops.operands import Operand


def outline(config: ModelConfig) -> Outline:
    names = names_of(config) | {"head", "head_bias", "wide"}
    return Outline(names | set(map(hi_lo_of, names)))


def prefill(shape: Prefill, config: ModelConfig, want: Any) -> list[Step]:
    """Return the steps that compute a prompt."""
    do = outline(config)
    over = shape.over(do, PassSettings.of(config), "bfloat16", defaultdict(float))
    if want == "logits":
        over.logits_of(forward(over, architecture_of(config), config, "rows"), 0, shape.rows)
    else:
        forward(over, architecture_of(config), config, want)
    return do.steps


def decode(
    config: ModelConfig,
    norms: bool = True,
    known: Mapping[str, Sequence[Operand]] | None = None,
    kv_dtype: str | None = None,
    bounds: Mapping[str, float] | None = None,
    x_dtype: str | None = None,
) -> list[Step]:
    """Return the steps that compute one token per sequence."""
    do = outline(config)
    step = DecodePass(do, PassSettings.of(config), norms, known, kv_dtype, bounds, x_dtype)
    forward(step, architecture_of(config), config, "logits")
    return do.steps


def decode_sums(config: ModelConfig, splits: int, x_dtype: str | None = None) -> list[Step]:
    """Return the steps that compute one token for few rows of a Llama, with `SumsPass`."""
    do = outline(config)
    step = SumsPass(do, PassSettings.of(config), splits, None, x_dtype)
    forward(step, architecture_of(config), config, "logits")
    return do.steps

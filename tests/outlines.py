"""Passes as lists of steps, without arrays."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from gpt2block.cuda.formats import cache_option
from gpt2block.engine.passes import names_of
from gpt2block.engine.passes.decoding_rules import ALL_FUSED, DecodingPlan, decoding_steps
from gpt2block.engine.passes.executor import Outline, Step, hi_lo_of
from gpt2block.engine.passes.forward import Pass, forward
from gpt2block.engine.passes.prefill_rules import Prefill, PrefillPlan, prefill_steps
from gpt2block.engine.passes.settings import PassSettings
from gpt2block.models.architectures import architecture_of
from gpt2block.models.config import ModelConfig
from gpt2block.ops.operands import Operand


def outline(config: ModelConfig) -> Outline:
    names = names_of(config) | {"head", "head_bias", "wide"}
    return Outline(names | set(map(hi_lo_of, names)))


def prefill(shape: Prefill, config: ModelConfig, want: Any) -> list[Step]:
    """Return the steps that compute a prompt."""
    do, settings = outline(config), PassSettings.of(config)
    o, rows = Pass(do, settings, shape.longest, shape.rows), want in ("rows", "logits")
    x = forward(o, architecture_of(config), config, "rows" if rows else want)
    if want == "logits":
        o.logits_of(x, 0, shape.rows)
    dtype = {"16_bits": "bfloat16", "fp8": "float16"}.get(shape.products, "float32")
    bounds = defaultdict[str, float](float)
    plan = PrefillPlan(shape, do.tensors, dtype, settings.heads, bounds, want == "rows")
    return prefill_steps(do.steps, plan)


def decode(
    config: ModelConfig,
    norms: bool = True,
    known: Mapping[str, Sequence[Operand]] | None = None,
    kv_dtype: str | None = None,
    bounds: Mapping[str, float] | None = None,
    x_dtype: str | None = None,
) -> list[Step]:
    """Return the steps that compute one token per sequence."""
    kv = cache_option(kv_dtype)
    return decode_by(
        config, norms=norms, known=known or {}, kv=kv, bounds=bounds or {}, x_dtype=x_dtype
    )


def decode_sums(config: ModelConfig, splits: int, x_dtype: str | None = None) -> list[Step]:
    """Return the steps that compute one token for few rows of a Llama, by `RULES_OF_SUMS`."""
    return decode_by(config, fuses=ALL_FUSED, splits=splits, x_dtype=x_dtype)


def decode_by(config: ModelConfig, **plan: Any) -> list[Step]:
    """Return the steps of decoding by a plan with these fields."""
    do = outline(config)
    forward(Pass(do, PassSettings.of(config)), architecture_of(config), config, "logits")
    return decoding_steps(do.steps, DecodingPlan(do.tensors, config.head_size, **plan))

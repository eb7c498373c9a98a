"""Decoding steps of a Llama, first with one kernel per operation, then with more and more fusions.

The stages follow the table of kernl's Llama optimisation.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import accumulate
from operator import or_

from gpt2block.engine.passes import decoding_rules
from gpt2block.engine.passes.decoding_rules import DecodingPlan
from gpt2block.engine.passes.executor import Executor, Outline, Step
from gpt2block.engine.passes.forward import Pass, forward
from gpt2block.engine.passes.rewriting import ROPE, Steps, overwriting, rewritten, rule, run
from gpt2block.engine.passes.settings import PassSettings
from gpt2block.models.architectures import architecture_of
from gpt2block.models.architectures.architecture import Value
from gpt2block.models.config import ModelConfig
from gpt2block.ops.attention import SIXTEEN_BITS

UNFUSED = "unfused"  # name of the first stage, which has no fusions
Stages = Mapping[str, Collection[str]]  # name of a stage → its fusions
SIXTEEN_BIT_STAGES = {  # name of a stage → fusions that it adds to the preceding stage
    UNFUSED: "",
    "+ residuals": "adds",
    "+ RoPE": "into_cache",
    "+ graph": "graph",
    "+ overlap": "overlap",
}
OTHER_STAGES = {
    UNFUSED: "",
    "+ RMSNorm": "adds norms",
    "+ RoPE": "into_cache",
    "+ feed-forward": "gates",
    "+ graph": "graph",
}


def stages_of(dtype: str) -> Stages:
    """Return {name of a stage: its set of fusions} for weights of this dtype, fewest fusions first.

    Residual additions are fused together with RMSNorm; RoPE together with the append of K and V to
    the kv_cache. Kernels with a fused RMSNorm support float32 activations only with float32 and FP8
    weights. These kernels do not overlap.
    """
    stages = SIXTEEN_BIT_STAGES if dtype in SIXTEEN_BITS else OTHER_STAGES
    added = (frozenset(more.split()) for more in stages.values())
    return dict(zip(stages, accumulate(added, or_), strict=True))


def staged(do: Executor, config: ModelConfig, fusions: Collection[str]) -> Value:
    """Run a decoding step with these fusions, up to the logits.

    "adds": products add residuals. "norms": products apply RMSNorm. "gates": one product computes
    gate and up of the feed-forward. "into_cache": RoPE also appends K and V to the kv_cache, and
    attention reads them there; otherwise a separate kernel appends K and V, and attention reads
    rows [Q | K | V].
    """
    plain = Outline(do.tensors)
    forward(Pass(plain, PassSettings.of(config)), architecture_of(config), config, "logits")
    stages = (
        ("norms", normed_products), ("gates", normed_gates), ("adds", decoding_rules.products),
    )  # fmt: skip
    chosen = [each for name, each in stages if name in fusions]
    rules = [*chosen, products, decoding_rules.norms]
    if "into_cache" in fusions:
        rules += [decoding_rules.rope_append, decoding_rules.attention]
    plan = DecodingPlan(do.tensors, config.head_size, norms=False)
    steps = rewritten(plain.steps, rules, plan)
    return run([overwriting(step, OVERWRITTEN) for step in steps], do, "logits")


OVERWRITTEN = {**decoding_rules.OVERWRITTEN, **dict.fromkeys((*ROPE, "add"), 0)}


@rule("rmsnorm")
def normed_products(steps: Steps, step: Step, plan: DecodingPlan) -> str:
    """rmsnorm, then products -> rmsnorm_matmul"""
    readers = steps.readers(step.name)
    if readers[0].inputs[1] == "lm_head":
        return "lm_head has too many outputs"
    x, gamma = step.inputs
    for each in readers:
        by = Step(each.name, "rmsnorm_matmul", (x, gamma, each.inputs[1]), step.attrs)
        steps.replace(each.name, by)
    steps.drop(step.name, x)
    return ""


@rule("silu_mul")
def normed_gates(steps: Steps, step: Step, plan: DecodingPlan) -> str:
    """rmsnorm_matmul of gate and of up, then silu_mul -> rmsnorm_ffn"""
    gate, up = (steps[name] for name in step.inputs)
    by = Step(step.name, "rmsnorm_ffn", (*gate.inputs, up.inputs[2]), gate.attrs)
    steps.replace(step.name, by, gate.name, up.name)
    return ""


@rule("matmul_bias")
def products(steps: Steps, step: Step, plan: DecodingPlan) -> str:
    """matmul -> linear"""
    steps.replace(step.name, Step(step.name, "linear", step.inputs, {"decoding": True}))
    return ""

"""Rules of a fused block: few steps, as products fuse residual sums, GELU and RMSNorm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gpt2block.engine.passes.executor import HI_LO, Step
from gpt2block.engine.passes.rewriting import Rule, Steps, end_of_product, rewritten, rule


class BlockPlan(NamedTuple):
    """The facts that decide the kernels of a fused block.

    bounds: the largest magnitude of each result by name, for float32 on tensor cores, where
    operands are hi/lo; else None. split_k: whether projections may split the sum over K.
    """

    bounds: Mapping[str, float] | None = None
    split_k: bool = False

    def operand(self, name: str) -> dict[str, Any]:
        """Return dtype and bound of the named result, an operand of a product."""
        return {} if self.bounds is None else {"dtype": HI_LO, "bound": self.bounds.get(name)}


@rule("rmsnorm")
def norms(steps: Steps, step: Step, plan: BlockPlan) -> str:
    """rmsnorm, then a product, or gate, up and silu_mul -> one kernel"""
    readers = steps.readers(step.name)
    if any(each.op != "matmul_bias" or each.inputs[2] for each in readers):
        return "a product has a bias"
    x, gamma = step.inputs
    ends = [steps.readers(each.name) for each in readers]
    if len(readers) == 2 and ends[0] == ends[1]:  # gate and up
        (end,) = ends[0]
        inputs = (x, gamma, *(each.inputs[1] for each in readers))
        by = Step(end.name, "rmsnorm_ffn", inputs, {**step.attrs, **end.attrs})
        steps.replace(end.name, by, step.name, *(each.name for each in readers))
        return ""
    for each in readers:
        by = Step(each.name, "rmsnorm_matmul", (x, gamma, each.inputs[1]), step.attrs)
        steps.replace(each.name, by)
    steps.drop(step.name, x, readers)
    return ""


@rule("layernorm")
def operands(steps: Steps, step: Step, plan: BlockPlan) -> str:
    """LayerNorm stores its result as an operand"""
    steps.replace(step.name, step._replace(**plan.operand(step.name)))
    return ""


@rule("matmul_bias")
def products(steps: Steps, step: Step, plan: BlockPlan) -> str:
    """matmul, then gelu, or add to the residual stream -> gemm"""
    end, residual = end_of_product(steps, step)
    gone = () if end is step else (step.name,)
    if residual:
        by = Step(end.name, "gemm", (*step.inputs, residual), {"split_k": plan.split_k})
    else:
        read = any(each.op != "silu_mul" for each in steps.readers(end.name))
        operand = plan.operand(end.name) if read else {}
        attrs = {"gelu": True} if end.op == "gelu" else {}
        by = Step(end.name, "gemm", step.inputs, attrs, **operand)
    steps.replace(end.name, by, *gone)
    return ""


RULES: tuple[Rule[BlockPlan], ...] = norms, operands, products


def fused_block_steps(steps: Sequence[Step], plan: BlockPlan) -> list[Step]:
    """Return the steps of a fused block for its plain steps."""
    return rewritten(steps, RULES, plan)

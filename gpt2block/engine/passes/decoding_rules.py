"""Rules of decoding: a token for each row of a kv_cache, with kernels for few rows.

The rules turn a layer of GPT-2 into five kernels, as products fuse LayerNorm, GELU and residual
sums, and the product of Q, K and V also writes the kv_cache. The rules of the last list turn a
layer of a Llama into four: its feed-forward is one kernel that writes partial sums.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from gpt2block.cuda.kernels import HI_LO
from gpt2block.engine.passes.executor import Step, hi_lo_of
from gpt2block.engine.passes.rewriting import (
    ROPE,
    Log,
    Rule,
    Steps,
    changed,
    end_of_product,
    kept,
    layer_of,
    overwriting,
    rewritten,
    rule,
)
from gpt2block.models.weights.gguf import UNIT
from gpt2block.models.weights.hi_lo import scale_for
from gpt2block.ops.gated_sums import Fusions
from gpt2block.ops.operands import CHUNK, Operand, head_multiple, ordered

LOW_RANK = "add_low_rank"  # adds an adapter's term to the result of a product
ADAPTED = "an adapter's term is added to the product"
# All that a layer fuses if its feed-forward is one kernel
ALL_FUSED = Fusions(norms=True, rope=True, gate=True, heads=True)


class DecodingPlan(NamedTuple):
    """The facts that decide the kernels of a decoding step.

    names: of the tensors. head_size: a divisor of the sizes of all heads. norms: whether products
    fuse LayerNorm, which is fastest for few rows. known: the `Operand` in which x of a product can
    be stored, preferred ones first, by the last part of the weights' name; empty if products read
    floats. kv: the option of steps that read or write a kv_cache of FP8. bounds: upper bounds of
    the magnitudes of operands, by name; products of bounded operands read hi/lo weights. x_dtype:
    the dtype to which x of a product that reads floats is rounded, or None. together: the number of
    neighbouring rows of one sequence. fuses: what products that read floats can fuse. summed: the
    names in `known` of the products that read sums of chunks of x. splits: the number of partial
    sums of a feed-forward that is one kernel, or 0. terms: for an adapter's terms, the operands of
    products of many rows, whose values adapters read in all steps.
    """

    names: Collection[str]
    head_size: int
    norms: bool = True
    known: Mapping[str, Sequence[Operand]] = {}
    kv: Mapping[str, Any] = {}
    bounds: Mapping[str, float] = {}
    x_dtype: str | None = None
    together: int = 1
    fuses: Fusions = Fusions()
    summed: Collection[str] = ()
    splits: int = 0
    terms: Mapping[str, Operand] = {}

    def format(
        self, to: Sequence[str], bound: float | None, width: int | None = None, together: int = 1
    ) -> Operand | None:
        """Return the preferred `Operand` that all products with weights `to` can read, or None.

        bound: upper bound of the operand's magnitudes. width: the required width of the terms.
        together: neighbouring channels computed together by the kernel that stores the terms.
        """
        first, *others = [self.known.get(matrix_of(w), ()) for w in to] or [()]
        for operand in first:
            if not all(operand in each for each in others) or width not in (None, operand.width):
                continue
            if operand.dtype != HI_LO:
                summed = any(matrix_of(w) in self.summed for w in to)
                return operand.with_sums(together) if summed else operand
            if bound is not None and all(hi_lo_of(w) in self.names for w in to):
                return operand._replace(scale=scale_for(power_from(bound)))
        return None

    def fuses_rope(self, operand: Operand | None, normed: bool) -> bool:
        """Return whether a product of Q, K and V fuses RoPE and appends to the kv_cache."""
        if normed and not (self.fuses.heads and operand is None):
            return False
        possible = ordered(operand) or (self.fuses.rope and operand is None)
        return possible and self.head_size % head_multiple(operand) == 0


def power_from(bound: float) -> float:
    """Round a bound up to a power of two, so that more layers have equal launch parameters."""
    return 2.0 ** math.ceil(math.log2(bound)) if bound else 0.0


def matrix_of(w: str) -> str:
    """Return the last part of a weight's name, which is the key of `DecodingPlan.known`."""
    return w.rpartition(".")[2]


class Linear(NamedTuple):
    """The inputs of `linear`, by name."""

    x: str
    w: str
    bias: str = ""
    gamma: str = ""
    beta: str = ""
    residual: str = ""
    up: str = ""
    workspace: str = ""


def product(step: Step) -> Linear:
    return Linear(*step.inputs)


def products_of(steps: Steps, name: str, others: Sequence[Step] = ()) -> list[Step]:
    """Return the products that read a result as x, or [] if another step reads the result, too.

    others: further steps that may read the result.
    """
    readers = [each for each in steps.readers(name) if each not in others]
    alone = all(s.op == "linear" and s.inputs.count(name) == 1 and s.inputs[0] == name
                for s in readers)  # fmt: skip
    return readers if alone else []


def bound_of(plan: DecodingPlan, steps: Steps, name: str) -> float | None:
    """Return the upper bound of the magnitudes of a result, or None.

    Attention computes weighted means of rows of v, which have the bound of its input.
    """
    if name in steps and steps[name].op.startswith("attention"):
        return plan.bounds.get(steps[name].inputs[0])
    return plan.bounds.get(name)


@rule("matmul_bias")
def products(steps: Steps, step: Step, plan: DecodingPlan) -> str:
    """matmul, then gelu, or add to the residual stream -> linear"""
    end, residual = end_of_product(steps, step)
    inputs, bound = Linear(*step.inputs), bound_of(plan, steps, step.inputs[0])
    attrs: dict[str, Any] = {"decoding": True}
    if plan.x_dtype is not None:
        attrs["x_dtype"] = plan.x_dtype
    if bound is not None and hi_lo_of(inputs.w) in plan.names:
        attrs["x_bound"] = power_from(bound)
    if end.op == "gelu":
        attrs["gelu"] = True
    if residual:
        workspace = "workspace" if "workspace" in plan.names else ""
        inputs = inputs._replace(residual=residual, workspace=workspace)
    by = Step(end.name, "linear", inputs, attrs)
    steps.replace(end.name, by, *(() if end is step else (step.name,)))
    return ""


@rule("layernorm", "rmsnorm")
def norms(steps: Steps, step: Step, plan: DecodingPlan) -> str:
    """norm, then products -> products that fuse the norm"""
    x, gamma, beta = (*step.inputs, "")[:3]
    readers = products_of(steps, step.name)
    if why := _keeps_norm(readers, bool(beta), plan):
        attrs = {"variant": "decode", "stats": False} if beta else {"variant": "stream"}
        steps.replace(step.name, changed(step, **attrs))
        return why
    for each in readers:
        inputs = product(each)._replace(x=x, gamma=gamma, beta=beta)
        steps.replace(each.name, changed(each._replace(inputs=inputs), eps=step.attrs["eps"]))
    steps.drop(step.name, x, readers)
    return ""


def _keeps_norm(readers: Sequence[Step], is_layernorm: bool, plan: DecodingPlan) -> str:
    """Return the reason why the norm of these products is a kernel of its own, or ""."""
    inputs = [product(each) for each in readers]
    matrices = [matrix_of(each.w) for each in inputs]
    reasons = {
        "a step that is no product reads the result": not readers,
        "too many rows: each product would compute the norms again": not plan.norms,
    }
    if not is_layernorm:
        reasons |= {
            "products of this dtype, card and number of rows fuse no RMSNorm": not plan.fuses.norms,
            "lm_head has too many outputs: each block would compute the norms again":
                matrices[:1] == ["lm_head"],
            "the products read operands": any(name in plan.known for name in matrices),
            "a product has a bias": any(each.bias for each in inputs),
        }  # fmt: skip
    return next((why for why, holds in reasons.items() if holds), "")


@rule("layernorm", "rmsnorm", "operand", "attention_packed", "attention_queries", "short_conv")
def operands(steps: Steps, step: Step, plan: DecodingPlan) -> str:
    """a result that only products read is stored in their format"""
    # Kernels store sums of CHUNK channels with the terms (`Operand.with_sums`) if they compute
    # these channels together. The RMSNorm kernel computes UNIT neighbouring channels together.
    together = {"layernorm": 1}.get(step.op, UNIT)
    if step.op.startswith("attention"):
        together = plan.head_size
    why = _store(steps, step, plan, bound_of(plan, steps, step.name), together=together)
    if step.op == "operand":
        if why and len(step.inputs) == 1:
            steps.drop(step.name, step.inputs[0])
        else:
            steps.replace(step.name, steps[step.name]._replace(dtype="float32"))
    return why


@rule("linear")
def operands_of_products(steps: Steps, step: Step, plan: DecodingPlan) -> str:
    """a product stores its result in the format of the products that read it"""
    inputs, operand = product(step), step.attrs.get("operand")
    if inputs.gamma or matrix_of(inputs.w) not in plan.known:
        return "the product itself reads floats"
    width = operand.width if operand else 0
    return _store(steps, step, plan, plan.bounds.get(step.name), width)


def _store(
    steps: Steps,
    step: Step,
    plan: DecodingPlan,
    bound: float | None,
    width: int | None = None,
    together: int = 1,
) -> str:
    """Let a step store an operand for the products that read its result, or return a reason."""
    adapted = [s for s in steps.readers(step.name) if s.op == LOW_RANK and s.inputs[1] == step.name]
    readers = products_of(steps, step.name, adapted)
    if not readers:
        return "a step that is no product reads the result"
    operand = plan.format([product(each).w for each in readers], bound, width, together)
    if operand is None or (adapted and operand.dtype == HI_LO):
        return "the products read floats"
    for each in adapted:
        steps.replace(each.name, changed(each, operand=operand, stored=True))
    steps.replace(step.name, changed(step, to_operand=operand))
    for each in readers:
        steps.replace(each.name, changed(each, "x_dtype", "x_bound", operand=operand))
    return ""


@rule("silu_mul")
def gates(steps: Steps, step: Step, plan: DecodingPlan) -> str:
    """two products of the same rows, then silu_mul -> linear with two matrices"""
    inputs = [steps[name].op for name in step.inputs if name in steps]
    if LOW_RANK in inputs and not step.attrs.get("sigmoid"):
        _activate(steps, step, step.inputs, step.attrs, plan)
        return ADAPTED
    pair = [steps[name] for name in step.inputs if name in steps and steps[name].op == "linear"]
    if len(pair) < 2:
        return "an input is no product"
    gate, up = map(product, pair)
    operand = pair[0].attrs.get("operand")
    if not (ordered(operand) or plan.fuses.gate):
        return "the products of this dtype, card and number of rows have one matrix"
    if gate.bias or up.bias:
        return "a product has a bias"
    by = Step(step.name, "linear", gate._replace(up=up.w), {**pair[0].attrs, **step.attrs})
    steps.replace(step.name, by, *(each.name for each in pair))
    # The kernel reads and stores rows without bounds.
    for each in (by, *products_of(steps, step.name)):
        steps.replace(each.name, changed(steps[each.name], "x_bound"))
    # Warps that can add them up compute CHUNK neighbouring outputs of a gated product.
    if operand:
        _store(steps, steps[step.name], plan, None, operand.width, CHUNK)
    return ""


class Heads(NamedTuple):
    """The steps that make rows [Q | K | V] and append K and V to the kv_cache of a layer.

    product: of the rows. norms: of the heads of q and k, or None. turned: RoPE, or else `product`.
    """

    product: Step
    norms: Step | None
    turned: Step
    append: Step

    @classmethod
    def of(cls, steps: Steps, append: Step) -> Heads:
        turned = steps[append.inputs[0]]
        if turned.op not in ROPE:
            return cls(turned, None, turned, append)
        before = steps[turned.inputs[0]]
        if before.op != "qk_norm":
            return cls(before, None, turned, append)
        return cls(steps[before.inputs[0]], before, turned, append)

    @property
    def frequencies(self) -> str:
        return str(self.turned.inputs[2])

    @property
    def rotations(self) -> str:
        return self.frequencies.replace("frequencies", "rotations")

    @property
    def gammas(self) -> tuple[str, ...]:
        return self.norms.inputs[1:] if self.norms else ()

    @property
    def cache(self) -> tuple[str, ...]:
        return self.append.inputs[1:]

    def replace(
        self, steps: Steps, op: str, inputs: tuple[str, ...], attrs: Mapping[str, Any], *also: Step
    ) -> str:
        """Replace these steps by one with the queries as its result; `also` and all but `product`.

        Return "": the rule has fired.
        """
        gone = {each.name: None for each in (self.append, self.norms, *also) if each}
        by = Step(f"{layer_of(self.append.name)}q", op, inputs, attrs)
        steps.replace(self.turned.name, by, *gone)
        return ""


@rule("kv_append")
def linear_qkv(steps: Steps, step: Step, plan: DecodingPlan) -> str:
    """product of q, k and v, kv_append -> linear_qkv"""
    heads = Heads.of(steps, step)
    if heads.turned is not heads.product:
        return "RoPE rotates q and k"
    if heads.product.op != "linear":
        return ADAPTED
    x, w, bias, gamma, beta, *_ = product(heads.product)
    attrs = changed(heads.product, "decoding", **plan.kv).attrs
    return heads.replace(steps, "linear_qkv", (x, w, bias, gamma, beta, *heads.cache), attrs)


@rule("kv_append")
def rope_product(steps: Steps, step: Step, plan: DecodingPlan) -> str:
    """product of q, k and v, norms of heads, RoPE, kv_append -> rope_sums or linear_rope"""
    heads = Heads.of(steps, step)
    if heads.product.op != "linear":
        return ADAPTED
    x, w, bias, gamma, beta, *_ = product(heads.product)
    attrs = changed(heads.product, "decoding", "x_bound", **plan.kv).attrs
    attrs = {**attrs, **kept(heads.turned, "n_head", "growth")}
    if gamma and not beta and plan.fuses_rope(None, bool(heads.norms)):
        inputs = (x, gamma, w, "", "", heads.rotations, *heads.cache, *heads.gammas)
        return heads.replace(steps, "rope_sums", inputs, attrs, heads.product)
    if heads.norms:
        return "products of this dtype, card and number of rows fuse no norms of heads"
    if not plan.fuses_rope(heads.product.attrs.get("operand"), False):
        return "products of this dtype, card and number of rows do not fuse RoPE"
    inputs = (x, w, bias, heads.rotations, *heads.cache)
    return heads.replace(steps, "linear_rope", inputs, attrs, heads.product)


@rule("kv_append")
def attention_append(steps: Steps, step: Step, plan: DecodingPlan) -> str:
    """norms of heads, RoPE, kv_append, attention -> attention_append"""
    heads = Heads.of(steps, step)
    if not heads.norms:
        return "heads have no norms"
    if not plan.fuses.attention:
        return "attention over these heads, or of several tokens of a sequence, fuses no norms"
    name = f"{layer_of(step.name)}attn"
    inputs = (heads.product.name, heads.rotations, *heads.gammas, *heads.cache)
    attrs = {**kept(steps[name], *OF_ATTENTION), **plan.kv, **kept(heads.norms, "eps", "values")}
    gone = (step.name, heads.norms.name, heads.turned.name)
    steps.replace(name, Step(name, "attention_append", inputs, attrs), *gone)
    return ""


@rule("kv_append")
def rope_append(steps: Steps, step: Step, plan: DecodingPlan) -> str:
    """norms of heads, RoPE, kv_append -> rope_append or qk_norm_append"""
    heads = Heads.of(steps, step)
    attrs = {**kept(heads.turned, "n_head", "growth"), **plan.kv}
    if heads.turned is heads.product:  # an adapter's term is added to rows without RoPE
        q, reader = f"{layer_of(step.name)}q", steps[f"{layer_of(step.name)}attn"]
        inputs = (heads.product.name, "no_rotation", *heads.cache)
        attrs = {**kept(reader, "n_head"), **plan.kv, "half_split": True}
        steps.replace(step.name, Step(q, "rope_append", inputs, attrs))
        steps.replace(reader.name, reader._replace(inputs=(q, *reader.inputs[1:])))
        return ""
    inputs = (heads.product.name, heads.frequencies, *heads.cache, *heads.gammas)
    if heads.norms:
        attrs |= kept(heads.norms, "eps", "values")
        return heads.replace(steps, "qk_norm_append", inputs, attrs)
    attrs |= {**kept(heads.turned, "factor"), "half_split": True}
    return heads.replace(steps, "rope_append", inputs, attrs)


OF_ATTENTION = "n_head", "softmax_scale", "window", "to_operand"  # kept attributes


@rule("attention_packed", "attention_queries")
def attention(steps: Steps, step: Step, plan: DecodingPlan) -> str:
    """attention of packed rows -> attention_split, of one token for each row"""
    q, k, v, *_ = step.inputs
    options = {**kept(step, *OF_ATTENTION), **plan.kv}
    if plan.together > 1:
        options["together"] = plan.together
    by = Step(step.name, "attention_split", (q, k, v, "row", "positions"), options)
    steps.replace(step.name, by)
    return ""


@rule("linear", "linear_qkv")
def hi_lo_weights(steps: Steps, step: Step, plan: DecodingPlan) -> str:
    """a product of bounded rows, or of hi/lo operands, reads hi/lo weights"""
    operand = step.attrs.get("operand")
    if "x_bound" not in step.attrs and not (operand and operand.dtype == HI_LO):
        return "the rows have no bound, or the weights no hi/lo form"
    x, w, *others = step.inputs
    steps.replace(step.name, step._replace(inputs=(x, hi_lo_of(w), *others)))
    return ""


@rule("gelu")
def gelus(steps: Steps, step: Step, plan: DecodingPlan) -> str:
    """GELU of a product to which an adapter's term is added -> activate"""
    _activate(steps, step, (*step.inputs, ""), {"gelu": True}, plan)
    return ""


def _activate(
    steps: Steps, step: Step, inputs: tuple[str, ...], attrs: Mapping[str, Any], plan: DecodingPlan
) -> None:
    """Replace an activation by a step that can store an operand, as products that fuse it can."""
    by = Step(step.name, "activate", inputs, attrs, "float32")
    steps.replace(step.name, by)
    _store(steps, by, plan, None)


@rule(LOW_RANK)
def terms(steps: Steps, step: Step, plan: DecodingPlan) -> str:
    """an adapter's term reads floats as the values that products of many rows read"""
    w = matrix_of(step.inputs[2].removesuffix(".lora_a")).replace("w_gate_up", "w_gate")
    if step.attrs.get("stored") or w not in plan.terms:
        return "x is stored so, or no product reads such values"
    steps.replace(step.name, changed(step, operand=plan.terms[w]))
    return ""


@rule("experts_gated", "experts_down")
def experts(steps: Steps, step: Step, plan: DecodingPlan) -> str:
    """a product with experts rounds its rows as other products do"""
    if plan.x_dtype is None:
        return "products of this dtype do not round rows"
    steps.replace(step.name, changed(step, x_dtype=plan.x_dtype))
    return ""


@rule("delta_spans", "delta_rule")
def delta_steps(steps: Steps, step: Step, plan: DecodingPlan) -> str:
    """gated delta nets: later rows of a slot than its first may be refused"""
    inputs = step.inputs if step.op == "delta_spans" else step.inputs[:-2]  # no pool of states
    steps.replace(step.name, changed(step._replace(inputs=inputs), steps=True))
    return ""


@rule("short_conv")
def convolutions(steps: Steps, step: Step, plan: DecodingPlan) -> str:
    """a short convolution stores floats"""
    steps.replace(step.name, step._replace(dtype="float32"))
    return ""


RULES: tuple[Rule[DecodingPlan], ...] = (
    products, norms, operands, operands_of_products, gates, linear_qkv, rope_product,
    attention_append, rope_append, attention, hi_lo_weights, gelus, terms, experts, delta_steps,
    convolutions,
)  # fmt: skip


@rule("linear")
def feed_forward_sums(steps: Steps, step: Step, plan: DecodingPlan) -> str:
    """gate and up, then down and add -> gated_sums; the next steps add its partial sums"""
    inputs = product(step)
    if not inputs.up:
        return "the product has one matrix"
    (down,) = steps.readers(step.name)
    sums, w = f"{layer_of(step.name)}down", product(down).w
    given = (inputs.x, inputs.gamma, inputs.w, inputs.up, w)
    by = Step(sums, "gated_sums", given, changed(step, "decoding", splits=plan.splits).attrs)
    steps.replace(step.name, by)
    steps.drop(down.name, inputs.x, [by])
    for each in steps.readers(inputs.x):
        if each.op == "rope_sums":
            added = (*each.inputs[:3], sums, w, *each.inputs[5:])
            steps.replace(each.name, each._replace(inputs=added))
        elif each.op == "rmsnorm":
            added = (*each.inputs, sums, w)
            by = changed(each._replace(op="rmsnorm_sums", inputs=added), "variant")
            steps.replace(each.name, by)
        elif each.op == "linear":
            _add_sums(steps, each, sums, w)
    return ""


@rule("linear")
def residual_sums(steps: Steps, step: Step, plan: DecodingPlan) -> str:
    """product, add, in the first layer -> linear_sums"""
    if not product(step).residual:
        return "the product has no residual"
    _add_sums(steps, step, "", "")
    return ""


def _add_sums(steps: Steps, step: Step, sums: str, w: str) -> None:
    inputs = product(step)
    given = (inputs.x, inputs.w, inputs.residual, sums, w)
    steps.replace(step.name, Step(step.name, "linear_sums", given, kept(step, "x_dtype")))


RULES_OF_SUMS = feed_forward_sums, residual_sums
# The input that the result of an operation overwrites
OVERWRITTEN = {
    "linear": 5, "linear_sums": 2, "rmsnorm_add": 2, "rmsnorm_groups": 2, "silu_mul": 1,
    "gated_columns": 0, "relu_squared": 0, "gated_rmsnorm": 0, "qk_norm_rope": 0,
}  # fmt: skip


def decoding_steps(steps: Iterable[Step], plan: DecodingPlan, log: Log | None = None) -> list[Step]:
    """Return the steps of decoding for the plain steps of a pass. log: as in `rewritten`."""
    rules = RULES + (RULES_OF_SUMS if plan.splits else ())
    found = rewritten(steps, rules, plan, log)
    read = dict.fromkeys(name for step in found for name in step.inputs if "rotations" in name)
    own = {s.inputs[2]: s for s in steps if s.op in ROPE}
    rotations = [_rotations(name, own) for name in read]
    return [*rotations, *(overwriting(step, OVERWRITTEN) for step in found)]


def _rotations(name: str, ropes: Mapping[str, Step]) -> Step:
    """Return the step that computes the rotations of all positions, which all layers share."""
    frequencies = name.replace("rotations", "frequencies")
    rope = ropes[frequencies]
    inputs = ("positions", frequencies, *rope.inputs[3:])
    return Step(name, "rotations", inputs, kept(rope, "factor"))

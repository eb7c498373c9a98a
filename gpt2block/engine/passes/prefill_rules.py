"""Rules of prefill: the new tokens of all sequences are the rows of one matrix.

Products are float32, by `linear`, or on tensor cores, by `gemm`: with operands of 16 bits, also
with FP8 weights, or in two float16 parts (hi/lo) for each float32 number. After the last attention,
a pass whose output is "last" continues with one row per sequence, by the rules of decoding.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from gpt2block.cuda.formats import cache_option
from gpt2block.engine.passes.decoding_rules import (
    LOW_RANK,
    OVERWRITTEN,
    DecodingPlan,
    decoding_steps,
)
from gpt2block.engine.passes.executor import HI_LO, Step, hi_lo_of
from gpt2block.engine.passes.forward import EVERY
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

Products = Literal["float32", "16_bits", "fp8", "hi_lo"]
PRODUCTS = "matmul_bias", "linear", "gemm"
# Steps that read 16 bits, besides products; all others read floats.
READ_16_BITS = (
    *ROPE, "qk_norm", "qk_norm_rope", "attention_packed", "attention_queries", "attention_varlen",
    "kv_append", "kv_round", "silu_mul", LOW_RANK,
)  # fmt: skip
HEAD = "lm_head", "head"  # products with these weights convert their rows themselves
OVERWRITTEN_ROWS = {**OVERWRITTEN, **dict.fromkeys(ROPE, 0), "gemm": 3, "cap": 0}


@dataclass(frozen=True)
class Prefill:
    """The parameters that determine the steps of a prefill on a GPU.

    products: "float32" for `linear`; otherwise `gemm` on tensor cores, with activations of 16 bits
    or hi/lo. With "fp8", a product whose kernel cannot read FP8 weights first converts them
    into the tensor "wide"; other products exchange partial sums in "stream_k_workspace". rows: the
    number of new tokens of all sequences. longest: an upper bound for one sequence. cached: whether
    there is a kv_cache; on tensor cores, attention over new tokens alone does not need it.
    continued: whether the sequences continue tokens in the kv_cache; used with tensor cores only.
    ends: the number of rows of the output "last"; None for one per row of the kv_cache. fp8_cache:
    the FP8 format of the kv_cache, to which attention over new tokens also rounds K and V; or None.
    gated: whether 16-bit products can have two matrices, so that a gated feed-forward is one
    product instead of gate, up and ff. appends: whether 16-bit attention over new tokens also
    writes K and V to the kv_cache, whose dtype is then the activations' dtype.
    """

    products: Products
    rows: int
    batch: int
    longest: int
    cached: bool
    continued: bool = False
    ends: int | None = None
    fp8_cache: str | None = None
    gated: bool = False
    appends: bool = False

    @property
    def tensor_cores(self) -> bool:
        return self.products != "float32"

    @property
    def sequences(self) -> int:
        """Number of sequences in attention: `batch` if it reads the kv_cache, else `ends`.

        If `ends` is None, the number is `batch`.
        """
        reads_cache = self.continued or not self.tensor_cores
        return self.batch if reads_cache or self.ends is None else self.ends


class PrefillPlan(NamedTuple):
    """The facts that decide the kernels of a prefill.

    names: of the tensors. dtype: of the activations. heads: numbers of heads. bounds: upper bounds
    of the magnitudes of the hi/lo operands that have a single scale, by name. logits: whether the
    last result is an operand of the product with lm_head.
    """

    shape: Prefill
    names: Collection[str]
    dtype: str
    heads: Mapping[str, int]
    bounds: Mapping[str, float] = {}
    logits: bool = False

    @property
    def kv(self) -> Mapping[str, Any]:
        return cache_option(self.shape.fp8_cache)

    @property
    def hi_lo(self) -> bool:
        return self.shape.products == "hi_lo"

    @property
    def wide(self) -> tuple[str, ...]:
        """The further inputs of products whose FP8 weights are converted first."""
        return ("", "wide", "stream_k_workspace") if self.shape.products == "fp8" else ()

    def reads_parts(self, steps: Steps, name: str) -> bool:
        """Return whether products read a result in two float16 parts."""
        weights = [w for w in self.weights(steps, name) if w not in HEAD]
        return self.hi_lo and any(hi_lo_of(w) in self.names for w in weights)

    def weights(self, steps: Steps, name: str) -> list[str]:
        """Return the weights of the products that read a result, or rows of the result."""
        found, readers = [], steps.readers(name)
        for step in readers:
            if step.op in ("rows", "hi_lo"):
                found += self.weights(steps, step.name)
            elif step.op in PRODUCTS and step.inputs[0] == name:
                found.append(step.inputs[1].removesuffix(".parts"))
        return found if readers or not self.logits else ["lm_head"]


@rule("matmul_bias")
def products(steps: Steps, step: Step, plan: PrefillPlan) -> str:
    """matmul, then gelu, or add to the residual stream -> linear or gemm"""
    end, residual = end_of_product(steps, step)
    (x, w, bias), name = (*step.inputs, "")[:3], end.name
    attrs: dict[str, Any] = {"gelu": True} if end.op == "gelu" else {}
    gone = () if end is step else (step.name,)
    if not plan.shape.tensor_cores:
        inputs = (x, w, bias, "", "", residual)
        steps.replace(name, Step(name, "linear", inputs, {**attrs, "variant": "tiles"}), *gone)
        return ""
    form: dict[str, Any] = {"dtype": "float32"}
    if w != "head":
        form = {} if residual else _format(steps, end, plan)
        if form.get("dtype") == HI_LO and (adapted := _terms_of(steps, name)):
            form = {"dtype": "float32"}
            _convert(steps, adapted, steps.readers(adapted), plan.bounds[adapted])
        w = hi_lo_of(w) if plan.hi_lo else w
    elif plan.hi_lo:
        steps.insert(Step(hi_lo_of(name), "hi_lo", (x,), {}), x)
        x = hi_lo_of(name)
    by = Step(name, "gemm", (x, w, bias, residual, *plan.wide), attrs, **form)
    steps.replace(name, by, *gone)
    return ""


def _format(steps: Steps, step: Step, plan: PrefillPlan) -> dict[str, Any]:
    """Return dtype and bound of the result of a product without residual."""
    name = _terms_of(steps, step.name) or step.name
    readers = steps.readers(name)
    if not plan.hi_lo:
        narrow = readers and all(each.op in (*READ_16_BITS, *PRODUCTS) for each in readers)
        return {"dtype": plan.dtype if narrow else "float32"}
    attended = any(each.op.startswith("attention") for each in readers)
    kept = plan.shape.continued and step.op != "gelu"  # attention over a kv_cache reads floats
    if (attended or plan.reads_parts(steps, name)) and not kept:
        return {"dtype": HI_LO, "bound": plan.bounds[name]}
    return {"dtype": "float32"}


def _terms_of(steps: Steps, name: str) -> str:
    """Return the name of a product's result after an adapter's term is added to it, or ""."""
    readers = steps.readers(name)
    return next(
        (each.name for each in readers if each.op == LOW_RANK and each.inputs[0] == name), ""
    )


@rule("layernorm", "rmsnorm")
def norms(steps: Steps, step: Step, plan: PrefillPlan) -> str:
    """a norm stores its result in the format of the products that read it"""
    layernorm = step.op == "layernorm"
    variant: dict[str, Any] = {"variant": "stream"}
    if layernorm:
        narrow = plan.shape.tensor_cores
        variant = {"variant": "narrow"} if narrow else {"variant": 6, "stats": False}
    by = changed(step, **variant)
    weights, readers = plan.weights(steps, step.name), steps.readers(step.name)
    if plan.shape.tensor_cores and (weights or not readers):
        parts = plan.reads_parts(steps, step.name)
        if plan.hi_lo and parts and layernorm:
            by = by._replace(dtype=HI_LO, bound=plan.bounds[step.name])
        else:
            by = by._replace(dtype="float32" if plan.hi_lo or not weights else plan.dtype)
            if parts:
                _convert(steps, step.name)
    steps.replace(step.name, by)
    return ""


def _convert(
    steps: Steps, name: str, readers: Sequence[Step] | None = None, bound: float | None = None
) -> None:
    """Insert a step that converts a result to two float16 parts, for the steps that read it as x.

    readers: by default all products. bound: as in Step.
    """
    parts = hi_lo_of(name)
    for each in steps.readers(name) if readers is None else readers:
        if (readers or each.op in PRODUCTS) and each.inputs[0] == name:
            steps.replace(each.name, each._replace(inputs=(parts, *each.inputs[1:])))
    steps.insert(Step(parts, "hi_lo", (name,), {}, bound=bound), name)


@rule("operand")
def operands(steps: Steps, step: Step, plan: PrefillPlan) -> str:
    """a step that only converts rows to the format of products"""
    x, *order = step.inputs
    gated = x in steps and steps[x].attrs.get("sigmoid")
    if order:
        steps.replace(step.name, step._replace(dtype=plan.dtype))
    elif plan.hi_lo and plan.reads_parts(steps, step.name):
        steps.replace(step.name, Step(hi_lo_of(step.name), "hi_lo", (x,), {}))
    elif not plan.shape.tensor_cores or plan.hi_lo or gated:
        steps.drop(step.name, x)
        return "the rows have the format of the products"
    else:
        steps.replace(step.name, step._replace(dtype=plan.dtype))
    return ""


@rule(*ROPE)
def head_norms(steps: Steps, step: Step, plan: PrefillPlan) -> str:
    """norms of heads, then RoPE -> qk_norm_rope"""
    before = steps[step.inputs[0]]
    if before.op != "qk_norm":
        return "heads have no norms"
    x, *of_norms = before.inputs
    given = (x, *step.inputs[1:3], *of_norms)
    steps.replace(step.name, Step(step.name, "qk_norm_rope", given, before.attrs), before.name)
    return ""


@rule("attention_packed", "attention_queries")
def attention(steps: Steps, step: Step, plan: PrefillPlan) -> str:
    """kv_append, then attention over new tokens alone -> attention_varlen"""
    h, (qkv, k, v, *_) = layer_of(step.name), step.inputs
    step = changed(step, longest=plan.shape.longest, **plan.kv)
    append = f"{h}kv"
    if append in steps:
        steps.replace(append, changed(steps[append], **plan.kv))
    if plan.shape.continued or not plan.shape.tensor_cores:
        if plan.shape.continued and plan.hi_lo:
            cached = step._replace(name=f"{h}attn_cached")
            steps.insert(cached, append if append in steps else qkv)
            step = Step(step.name, "hi_lo", (cached.name,), {})
        steps.replace(step.name, step)
        return "attention reads the kv_cache"
    if plan.kv:
        qkv = _inserted(steps, Step(f"{h}rounded", "kv_round", (qkv,), {**plan.heads, **plan.kv}))
        steps.replace(append, steps[append]._replace(inputs=(qkv, *steps[append].inputs[1:])))
    elif plan.hi_lo and steps[qkv].op in OF_ROPE:
        qkv = _inserted(steps, Step(hi_lo_of(qkv), "hi_lo", (qkv,), {}))
    cache: tuple[str, ...] = ()
    gone = () if plan.shape.cached else (append,)
    if plan.shape.cached and plan.shape.appends and not plan.hi_lo:
        cache, gone = (k, v, "row", "positions"), (append,)
    options = {**plan.heads, **kept(step, "softmax_scale", "window"), "causal": True}
    options["max_seqlen"] = plan.shape.longest
    by = Step(step.name, "attention_varlen", (qkv, "cu_seqlens", *cache), options)
    steps.replace(step.name, by, *gone)
    return ""


OF_ROPE = *ROPE, "qk_norm_rope"


def _inserted(steps: Steps, step: Step) -> str:
    """Insert a step directly after the step whose result it reads; return its name."""
    steps.insert(step, step.inputs[0])
    return step.name


@rule("silu_mul")
def gates(steps: Steps, step: Step, plan: PrefillPlan) -> str:
    """two products of the same rows, then silu_mul -> gemm with two matrices"""
    if step.attrs.get("sigmoid"):
        return "an input is no product"
    gate, up = (steps[name] for name in step.inputs)
    pair = [steps[each.inputs[0]] if each.op == LOW_RANK else each for each in (gate, up)]
    fits = plan.shape.gated and not any(each.inputs[2] for each in pair)
    if fits and LOW_RANK in (gate.op, up.op):
        for each in pair:  # floats until the gate, as in a product with two matrices
            steps.replace(each.name, each._replace(dtype="float32"))
        attrs = {**step.attrs, "fast": True}
        steps.replace(step.name, Step(step.name, "activate", step.inputs, attrs, plan.dtype))
        return "an adapter's term is added to a product"
    if not fits:
        if plan.reads_parts(steps, step.name):
            _convert(steps, step.name)
        return "products with these weights have one matrix"
    inputs = (*gate.inputs[:2], "", "", up.inputs[1])
    steps.replace(step.name, Step(step.name, "gemm", inputs, step.attrs), gate.name, up.name)
    return ""


@rule("gelu")
def gelus(steps: Steps, step: Step, plan: PrefillPlan) -> str:
    """GELU of a product to which an adapter's term is added -> activate"""
    attrs = {"gelu": True, "fast": plan.shape.tensor_cores}
    by = Step(step.name, "activate", (*step.inputs, ""), attrs, plan.dtype)
    steps.replace(step.name, by)
    if plan.reads_parts(steps, step.name):
        _convert(steps, step.name, bound=plan.bounds[step.name])
    return ""


@rule(LOW_RANK)
def terms(steps: Steps, step: Step, plan: PrefillPlan) -> str:
    """an adapter's term reads floats where products read two float16 parts"""
    y, x, *others = step.inputs
    source = steps[x]
    if not plan.hi_lo or not (source.dtype == HI_LO or source.op in ("hi_lo", "attention_varlen")):
        return "the rows are floats, or have 16 bits"
    floats = source.inputs[0] if source.op == "hi_lo" else f"{x}_floats"
    if floats not in steps:
        steps.insert(Step(floats, "take", (x, "every"), {}, "float32"), x)
    steps.replace(step.name, step._replace(inputs=(y, floats, *others)))
    return ""


@rule("short_conv")
def convolutions(steps: Steps, step: Step, plan: PrefillPlan) -> str:
    """a short convolution stores its result in the format of activations"""
    steps.replace(step.name, step._replace(dtype=plan.dtype))
    if plan.reads_parts(steps, step.name):
        _convert(steps, step.name)
    return ""


@rule("take")
def last_rows(steps: Steps, step: Step, plan: PrefillPlan) -> str:
    """the last row of each sequence: of one sequence, without a copy"""
    joined = plan.hi_lo and step.name == "last.attn"  # from two float16 parts to float32
    if plan.shape.ends is not None or plan.shape.batch > 1 or joined:
        steps.replace(step.name, step._replace(dtype="float32" if joined else None))
        return "the rows are not one range of rows"
    rows = {"first": plan.shape.rows - 1, "end": plan.shape.rows}
    steps.replace(step.name, Step(step.name, "rows", step.inputs[:1], rows))
    return ""


RULES: tuple[Rule[PrefillPlan], ...] = (
    products, norms, operands, head_norms, attention, gates, gelus, convolutions, last_rows,
    terms,
)  # fmt: skip


def prefill_steps(steps: Sequence[Step], plan: PrefillPlan, log: Log | None = None) -> list[Step]:
    """Return the steps of a prefill for the plain steps of a pass. log: as in `rewritten`."""
    end = _end_of_prefill(steps, plan)
    found = rewritten(steps[:end], RULES, plan, log)
    few = DecodingPlan(plan.names, 1, bounds=plan.bounds)
    tail = decoding_steps(steps[end:], few, log)
    return [*(overwriting(step, OVERWRITTEN_ROWS) for step in found), *tail]


def _end_of_prefill(steps: Sequence[Step], plan: PrefillPlan) -> int:
    """Return the number of steps up to the one after which kernels of decoding compute the rest.

    These kernels compute the last rows. The product that reads the result of attention in 16 bits
    has the kernel of prefill. Float32 products of the last rows do, too, except the last one.
    """
    names = [step.name for step in steps]
    if not any(name.startswith("last.") for name in names):
        return len(steps)
    end = 1 + max(n for n, name in enumerate(names) if name.startswith(("last.", EVERY)))
    if plan.hi_lo:
        return end
    if plan.shape.tensor_cores:
        end += steps[end].op == "operand" and len(steps[end].inputs) > 1  # `Pass.in_order`
        return end + (2 if steps[end + 1].op == "add" else 1)
    (head,) = (n for n, step in enumerate(steps) if "lm_head" in step.inputs)
    return head - 1

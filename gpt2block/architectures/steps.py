"""What all architectures write their plans with: names, and the fusion of steps.

The fused plans are derived from those with a step per operation: `fuse_epilogues` fuses a GELU or
addition into the matrix product before it, `fuse_norms` a LayerNorm into the one after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from gpt2block.plan import Step, Terms

Steps = list[Step]
Want = Literal["last", "logits", "hidden", "log_likelihood"]
Products = Literal["float32", "16_bits", "fp8", "two_part"]

# The int32 arrays that describe a batch of packed sequences: tokens (N,), their positions (N,) and
# sequences (N,); the start of each sequence in the rows (B + 1,) and in the kv_cache (B,); the row
# of its last token (ends,); the token after each one (N,).
BATCH = ("tokens", "positions", "row", "cu_seqlens", "start", "last", "targets")

# Operations of decoding that can compute terms of the x of a product (kernels_cu/lib/terms.cuh).
GIVE_TERMS = ("layernorm", "rmsnorm", "attention_split", "linear")

# Where a product's inputs have the second matrix of a gated feed-forward.
UP_AT = {"linear": 6, "gemm": 4}

# Operations that can compute a matrix in two parts, the operand of another product.
MAKE_PARTS = ("gemm", "layernorm", "attention_varlen", "two_part")


def fuse_epilogues(steps: Iterable[Step], op: str) -> Steps:
    """Every matmul_bias as `op`, which applies the GELU or adds the residual that follows it.

    The fused step has the name of the last of its steps, and inputs (a, w, bias, residual).
    """
    fused: Steps = []
    for step in steps:
        product = fused[-1] if fused and fused[-1].op == op else None
        if product is not None and product.name in step.inputs and step.op in ("gelu", "add"):
            residual = tuple(name for name in step.inputs if name != product.name)
            attrs = {"gelu": True} if step.op == "gelu" else {}
            fused[-1] = Step(step.name, op, product.inputs + residual, {**product.attrs, **attrs})
        else:
            fused.append(replace(step, op=op) if step.op == "matmul_bias" else step)
    return fused


def fuse_norms(steps: Iterable[Step]) -> Steps:
    """`fuse_epilogues` for op "linear", which also fuses the LayerNorm of its input."""
    fused: Steps = []
    for step in fuse_epilogues(steps, "linear"):
        if step.op != "linear":
            fused.append(step)
        elif fused and fused[-1].op == "layernorm" and fused[-1].name == step.inputs[0]:
            fused.append(as_linear(step, fused.pop()))
        else:
            fused.append(as_linear(step))
    return fused


def as_linear(step: Step, norm: Step | None = None, **attrs: Any) -> Step:
    """A product (a, w, bias, residual) as `linear`: (x, w, bias, gamma, beta, residual)."""
    a, w, bias, residual = (*step.inputs, "", "")[:4]
    x, gamma, beta = norm.inputs if norm else (a, "", "")
    merged = {**step.attrs, **(norm.attrs if norm else {}), **attrs}
    return Step(step.name, "linear", (x, w, bias, gamma, beta, residual), merged)


def hand_over_terms(steps: Iterable[Step], known: Mapping[str, Sequence[Terms]]) -> Steps:
    """Let steps of decoding compute the terms of a product's x, once instead of in each block.

    known: the terms that a product's x can have, the preferred ones first, by the last part of the
    name of its weights. Applies to results that are no more than the x of products. A plan's
    tensors of these names then have terms in the place of floats.
    """
    listed = list(steps)
    handed: dict[str, Terms] = {}
    for step in listed:
        readers = [_terms_taken(r, step.name, known) for r in listed if step.name in r.inputs]
        for terms in reversed(readers[0] if readers else ()):
            if all(terms in each for each in readers) and _gives(step, terms, handed):
                handed[step.name] = terms
    made: Steps = []
    for step in listed:
        found = {"to_terms": handed.get(step.name), "terms": handed.get(step.inputs[0])}
        attrs = {name: terms for name, terms in found.items() if terms is not None}
        made.append(replace(step, attrs={**step.attrs, **attrs}))
    return made


def _terms_taken(step: Step, name: str, known: Mapping[str, Sequence[Terms]]) -> Sequence[Terms]:
    """The terms that a step can read this tensor as, if it is no more than a product's x."""
    product = step.op in ("linear", "linear_qkv") and not step.inputs[3]
    alone = product and name == step.inputs[0] and name not in step.inputs[1:]
    return known.get(step.inputs[1].rpartition(".")[2], ()) if alone else ()


def _gives(step: Step, terms: Terms, handed: Mapping[str, Terms]) -> bool:
    """Whether a step can compute these terms; a product does so in the order that it takes."""
    if step.op != "linear":
        return step.op in GIVE_TERMS
    own = handed.get(step.inputs[0])
    return own.width == terms.width if own else terms.width == 0 and not step.inputs[3]


def fuse_gates(steps: Iterable[Step]) -> Steps:
    """Fuse the products of a gated feed-forward that can have two matrices, gate, up and ff.

    The fused step has the name of the last one. Products with a bias stay apart.
    """
    made: Steps = []
    for step in steps:
        pair = made[-2:]
        gated = step.op == "silu_mul" and [product.name for product in pair] == list(step.inputs)
        if not gated or not all(map(_takes_up, pair)):
            made.append(step)
            continue
        gate, up = pair
        inputs = gate.inputs + ("",) * (UP_AT[gate.op] - len(gate.inputs))
        made[-2:] = [Step(step.name, gate.op, (*inputs, up.inputs[1]), gate.attrs)]
    return made


def _takes_up(product: Step) -> bool:
    """Whether it can have a second matrix: `linear` where its x has the terms of wgmma."""
    terms = product.attrs.get("terms")
    wgmma = terms is not None and terms.width > 0
    return (product.op == "gemm" or wgmma) and not product.inputs[2]


def fuse_rope(steps: Iterable[Step], head_size: int) -> Steps:
    """Fuse RoPE that appends to a kv_cache into the product before it.

    It has x as terms in the order of wgmma. head_size: of which the kernel needs a multiple of 64.
    All of these products use the same rotations, of the first step.
    """
    made: Steps = []
    rotations: Steps = []
    for step in steps:
        product = made[-1] if made and step.op == "rope_append" else None
        terms = product.attrs.get("terms") if product else None
        turned = product and step.inputs[0] == product.name and step.attrs["half_split"]
        if not (product and turned and terms and terms.width) or head_size % 64:
            made.append(step)
            continue
        attrs = {"n_head": step.attrs["n_head"], "terms": terms}
        _, frequencies, *cache = step.inputs
        inputs = (*product.inputs[:3], "rotations", *cache)
        made[-1:] = [Step(step.name, "linear_rope", inputs, attrs)]
        rotations = [Step("rotations", "rotations", (cache[-1], frequencies))]
    return rotations + made


def parts_of(matrix: str) -> str:
    """The name of a matrix in two parts."""
    return f"{matrix}.parts"


def convert_operands(steps: Iterable[Step]) -> Steps:
    """Convert the operands of two-part products and attention, where their steps compute float32.

    A conversion follows the step whose result it converts. Steps of `MAKE_PARTS` need none.
    """
    listed = list(steps)
    reads = ("gemm", "attention_varlen")
    operands = {step.inputs[0] for step in listed if step.op in reads}
    converted: dict[str, str] = {}
    made: Steps = []
    for step in listed:
        first, *others = step.inputs
        if step.op in reads and first in converted:
            made.append(replace(step, inputs=(converted[first], *others)))
        else:
            made.append(step)
        if step.name in operands and step.op not in MAKE_PARTS:
            converted[step.name] = parts_of(step.name)
            made.append(Step(converted[step.name], "two_part", (step.name,)))
    return made

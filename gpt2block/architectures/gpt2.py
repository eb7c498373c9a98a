"""GPT-2 as plans: its block, and what the passes of a whole model need to know of it.

    block                       the ten steps of a Pre-LN block
    ten_step_plan, fused_plan   one block

`architectures.passes` has the forward passes of a model, which share one definition of the block. A
tensor has one name in all plans; that of a layer begins with "h.0.", "h.1." and so on, like its
weights.

Rows of several sequences are packed into one matrix (N, C); only attention, the embedding and the
kv_cache distinguish sequences. Source: Radford et al., "Language Models are Unsupervised Multitask
Learners" (2019).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from gpt2block.architectures.steps import Steps, fuse_epilogues
from gpt2block.config import GPT2Config
from gpt2block.plan import Plan, Step

NORM = "LayerNorm"
QKV = "qkv"  # the step whose rows are [Q | K | V] as attention reads them
FINAL = "ln_f"  # the final norm
FEED_FORWARD = ("gelu",)  # buffers of the feed-forward
TENSOR_HEADS = (64,)  # channels of a head of a prefill on tensor cores
DIVIDED = ()  # GELU is not linear

# The last part of a tensor's name → the buffer that it shares with other tensors, in turn.
BUFFERS: Mapping[str, str] = {
    **dict.fromkeys(("embedding", "x", "x1", "output"), "stream"),
    **dict.fromkeys(("ln1", "attn", "ln2", "ln_f"), "normed"),
    **dict.fromkeys(("qkv", "rounded"), "qkv"),
    "q": "q",
    **dict.fromkeys(("attn_cached", "gelu"), "ff"),
}


def block(eps: float, attention: Sequence[Step], h: str = "", x: str = "x") -> Steps:
    """The ten steps of a Pre-LN block; attention: the steps from `qkv` to `attn`.

    h: the prefix of the names of its weights and tensors; x: the name of its input.
    """
    norm = {"eps": eps}
    return [
        Step(f"{h}ln1", "layernorm", (x, f"{h}gamma1", f"{h}beta1"), norm),
        Step(f"{h}qkv", "matmul_bias", (f"{h}ln1", f"{h}w_qkv", f"{h}b_qkv")),
        *attention,
        Step(f"{h}proj", "matmul_bias", (f"{h}attn", f"{h}w_attn", f"{h}b_attn")),
        Step(f"{h}x1", "add", (x, f"{h}proj")),
        Step(f"{h}ln2", "layernorm", (f"{h}x1", f"{h}gamma2", f"{h}beta2"), norm),
        Step(f"{h}ff1", "matmul_bias", (f"{h}ln2", f"{h}w_fc", f"{h}b_fc")),
        Step(f"{h}gelu", "gelu", (f"{h}ff1",)),
        Step(f"{h}ff2", "matmul_bias", (f"{h}gelu", f"{h}w_proj", f"{h}b_proj")),
        Step(f"{h}output", "add", (f"{h}x1", f"{h}ff2")),
    ]


def fuse(steps: Iterable[Step]) -> Steps:
    """The steps of a block in which products fuse their bias, GELU and residual."""
    return fuse_epilogues(steps, "gemm")


def ten_step_plan(n_head: int, causal: bool, eps: float, weights: Iterable[str]) -> Plan:
    """The Pre-LN GPT-2 block as ten steps; gelu overwrites ff1."""
    attention = Step("attn", "attention", ("qkv",), {"n_head": n_head, "causal": causal})
    return Plan(tuple(block(eps, [attention])), tuple(weights), in_place={"gelu": "ff1"})


def fused_plan(n_head: int, causal: bool, eps: float, weights: Iterable[str]) -> Plan:
    """The same block in seven steps: a product fuses its bias, GELU and residual.

    Each step computes the same tensor as the one of that name in the ten-step plan. Projections may
    sum over K in parts.
    """
    steps = fuse(ten_step_plan(n_head, causal, eps, weights).steps)
    return Plan(
        tuple(
            replace(step, attrs={**step.attrs, "split_k": True}) if len(step.inputs) == 4 else step
            for step in steps
        ),
        tuple(weights),
        in_place={"attn": "ln1", "ln2": "attn"},  # reuses memory in the L2 cache
        overlapping=True,
    )


def embedding() -> Step:
    """The step before the first block."""
    return Step("embedding", "encoder_rows", ("tokens", "positions", "wte", "wpe"))


def model_block(config: GPT2Config, attention: Sequence[Step], h: str, x: str) -> Steps:
    """`block` of a model."""
    return block(config.eps, attention, h, x)


def final_norm(config: GPT2Config, x: str) -> Step:
    """The norm before the logits."""
    return Step(FINAL, "layernorm", (x, "gamma_f", "beta_f"), {"eps": config.eps})


def into_cache(config: GPT2Config, h: str, step: Step, cache: tuple[str, ...]) -> Step:
    """Of a decoding step, QKV that returns q, and appends K and V to the cache.

    step: the product of qkv, with its norm. cache: k, v, row and position.
    """
    return Step(f"{h}q", "linear_qkv", (*step.inputs[:5], *cache), {"eps": config.eps})


def widths(config: GPT2Config) -> dict[str, int]:
    """Channels of the tensors of a prefill that have buffers of their own, besides the stream."""
    C = config.n_embd
    return {"ln1": C, "qkv": 3 * C, "gelu": 4 * C}


def constants(config: GPT2Config) -> dict[str, Any]:
    """Inputs of the plans that the config determines, by name: none."""
    return {}


def operand_bounds(
    config: GPT2Config,
    largest: Mapping[str, float],
    norms: Callable[[str, str], NDArray[Any]],
) -> dict[str, float]:
    """The largest magnitude that the operands of each layer's products can have, by name.

    largest: the largest magnitude of every tensor; infinity or NaN if that is not finite. The
    C values of a LayerNorm before γ and β have variance 1, so that each is at most sqrt(C), and
    so is their Euclidean norm. Their product with a row of weights, times γ, is at most sqrt(C)
    times the norm of that row, and so is that of C ones, times β. GELU increases no magnitude.
    """
    root = math.sqrt(config.n_embd)
    bounds = {FINAL: root * largest["gamma_f"] + largest["beta_f"]}
    for n in range(config.n_layer):
        h = f"h.{n}."
        for norm, result, name in (("1", "qkv", "qkv"), ("2", "gelu", "fc")):
            gamma, beta = f"{h}gamma{norm}", f"{h}beta{norm}"
            bounds[f"{h}ln{norm}"] = root * largest[gamma] + largest[beta]
            rows = norms(f"{h}w_{name}", gamma) + norms(f"{h}w_{name}", beta)
            bounds[h + result] = root * float(rows.max()) + largest[f"{h}b_{name}"]
    return bounds


def stream_bounds(config: GPT2Config, largest: Mapping[str, float]) -> Iterator[float]:
    """Upper bounds of the magnitudes after the embedding and after each block, for any input.

    largest: the largest magnitude of every tensor. A LayerNorm's C values of variance 1 are at most
    sqrt(C), attention computes weighted means of rows of v, GELU increases no magnitude, and a
    product of K inputs is at most K times the largest input times the largest weight. The bundled
    model's bound is 6e6, where the limit is 6e17.
    """
    C = config.n_embd

    def product(a: float, K: int, layer: str, name: str) -> float:
        return a * K * largest[f"{layer}w_{name}"] + largest[f"{layer}b_{name}"]

    stream = largest["wte"] + largest["wpe"]
    yield stream
    for layer in (f"h.{n}." for n in range(config.n_layer)):
        norm1, norm2 = (
            math.sqrt(C) * largest[f"{layer}gamma{n}"] + largest[f"{layer}beta{n}"] for n in "12"
        )
        v, ff = product(norm1, C, layer, "qkv"), product(norm2, C, layer, "fc")
        stream += product(v, C, layer, "attn") + product(ff, 4 * C, layer, "proj")
        yield stream

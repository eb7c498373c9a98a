"""Llama as plans. All forward passes share one definition of the block, `block`.

    block                    the twelve steps of a block
    block_plan, fused_plan   one block: a step per operation, and fewer steps with the same results

`architectures.passes` has the forward passes of a model. The fused plan is derived from the unfused
one; a tensor has one name in all plans. Names of layers begin with "h.0.", "h.1." and so on, like
their weights. Q, K and V of a token are one row [Q | K | V], with fewer heads of K and V than of Q
where queries are grouped.

Rows of several sequences are packed into one matrix (N, C), as for GPT-2. "frequencies": the
radians per position by which RoPE turns each pair of channels, `LlamaConfig.frequencies`.
Source: Touvron et al., "LLaMA: Open and Efficient Foundation Language Models" (2023).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt2block.architectures.steps import Steps, fuse_epilogues
from gpt2block.config_llama import LlamaConfig
from gpt2block.plan import Plan, Step

NORM = "RMSNorm"
QKV = "rope"  # the step whose rows are [Q | K | V] as attention reads them
FINAL = "rms_f"  # the final norm
FEED_FORWARD = ("gate", "up")  # buffers of the feed-forward
TENSOR_HEADS = (64, 128)  # channels of a head of a prefill on tensor cores
# FP8 prompts may divide up, and so ff, by what the product of ff is then multiplied by.
DIVIDED = ("up", "ff", "down")

# The last part of a tensor's name → the buffer that it shares with other tensors, in turn.
BUFFERS: Mapping[str, str] = {
    **dict.fromkeys(("embedding", "x", "x1", "output"), "stream"),
    **dict.fromkeys(("rms1", "rms2", "rms_f"), "normed"),
    **dict.fromkeys(("qkv", "rope", "rounded"), "qkv"),
    **dict.fromkeys(("up", "ff"), "up"),
    **dict.fromkeys(("attn_cached", "parts"), "parts"),
    **{name: name for name in ("q", "attn", "gate")},
}


def block(
    config: LlamaConfig,
    attention: Sequence[Step],
    half_split: bool = True,
    h: str = "",
    x: str = "x",
) -> Steps:
    """The steps of a block; attention: the steps from `rope` to `attn`.

    half_split: which channels RoPE pairs. h: the prefix of the names of its weights and tensors; x:
    the name of its input.
    """
    norm = {"eps": config.eps}
    attention_bias, mlp_bias = config.attention_bias, config.mlp_bias

    def product(name: str, a: str, w: str, bias: bool) -> Step:
        inputs = (f"{h}{a}", f"{h}w_{w}", f"{h}b_{w}" if bias else "")
        return Step(f"{h}{name}", "matmul_bias", inputs)

    turn = {"n_head": config.n_head, "n_kv_head": config.n_kv_head, "half_split": half_split}
    return [
        Step(f"{h}rms1", "rmsnorm", (x, f"{h}gamma1"), norm),
        product("qkv", "rms1", "qkv", attention_bias),
        Step(f"{h}rope", "rope_qkv", (f"{h}qkv", "positions", "frequencies"), turn),
        *attention,
        product("proj", "attn", "o", attention_bias),
        Step(f"{h}x1", "add", (x, f"{h}proj")),
        Step(f"{h}rms2", "rmsnorm", (f"{h}x1", f"{h}gamma2"), norm),
        product("gate", "rms2", "gate", mlp_bias),
        product("up", "rms2", "up", mlp_bias),
        Step(f"{h}ff", "silu_mul", (f"{h}gate", f"{h}up")),
        product("down", "ff", "down", mlp_bias),
        Step(f"{h}output", "add", (f"{h}x1", f"{h}down")),
    ]


def fuse(steps: Iterable[Step], gated: bool = True) -> Steps:
    """Fuse residuals into the products before them, and norms into the products after them.

    A fused step has the name of the last of its steps: with gated, rms2, gate, up and ff become ff.
    A product with a bias keeps its norm as a step of its own.
    """
    before = {step.name: step for step in fuse_epilogues(steps, "gemm")}

    def fused(step: Step) -> Step:
        two = gated and step.op == "silu_mul"
        products = [before[name] for name in step.inputs] if two else [step]
        norm = before.get(products[0].inputs[0])
        alone = all(p.op == "gemm" and p.inputs[2:] == ("",) for p in products)
        if norm is None or norm.op != "rmsnorm" or not alone:
            return step
        op = "rmsnorm_ffn" if two else "rmsnorm_matmul"
        matrices = (product.inputs[1] for product in products)
        return Step(step.name, op, (*norm.inputs, *matrices), norm.attrs)

    made = list(map(fused, before.values()))
    parts = ("rmsnorm", "gemm", "rmsnorm_matmul")  # others may be read outside the block
    while unread := {s.name for s in made[:-1] if s.op in parts}.difference(
        *(s.inputs for s in made)
    ):
        made = [step for step in made if step.name not in unread]
    return made


def block_plan(config: LlamaConfig, causal: bool = True, half_split: bool = True) -> Plan:
    """A block as twelve steps. Its inputs are x, positions (T,), frequencies and the weights."""
    heads = {"n_head": config.n_head, "causal": causal, "n_kv_head": config.n_kv_head}
    attention = Step("attn", "attention", ("rope",), heads)
    given = (*config.block_shapes(), "positions", "frequencies")
    return Plan(tuple(block(config, [attention], half_split)), given)


def fused_plan(config: LlamaConfig, causal: bool = True, half_split: bool = True) -> Plan:
    """The same block in six steps: qkv, rope, attn, x1, ff and output; more if there are biases."""
    plan = block_plan(config, causal, half_split)
    return replace(plan, steps=tuple(fuse(plan.steps)))


def embedding() -> Step:
    """The step before the first block."""
    return Step("embedding", "encoder_rows", ("tokens", "positions", "wte", ""))


def model_block(config: LlamaConfig, attention: Sequence[Step], h: str, x: str) -> Steps:
    """`block` of a model, whose RoPE turns half-split pairs."""
    return block(config, attention, True, h, x)


def final_norm(config: LlamaConfig, x: str) -> Step:
    """The norm before the logits."""
    return Step(FINAL, "rmsnorm", (x, "gamma_f"), {"eps": config.eps})


def into_cache(config: LlamaConfig, h: str, step: Step, cache: tuple[str, ...]) -> Step:
    """Of a decoding step, RoPE that returns q, and appends K and V to the cache.

    step: RoPE of qkv. cache: k, v, row and position.
    """
    turn = {"n_head": config.n_head, "half_split": True}
    return Step(f"{h}q", "rope_append", (step.inputs[0], "frequencies", *cache), turn)


def widths(config: LlamaConfig) -> dict[str, int]:
    """Channels of the tensors of a prefill that have buffers of their own, besides the stream."""
    Q = config.q_width
    normed = {"rms1": config.n_embd, "qkv": Q + 2 * config.kv_width, "attn": Q}
    return normed | {"gate": config.n_ff, "up": config.n_ff}


def constants(config: LlamaConfig) -> dict[str, Any]:
    """Inputs of the plans that the config determines, by name."""
    return {"frequencies": config.frequencies()}


def stream_bounds(config: LlamaConfig, largest: Mapping[str, float]) -> Iterator[float]:
    """Upper bounds of the magnitudes after the embedding and after each block, for any input.

    largest: the largest magnitude of every tensor. A row of an RMSNorm has a Euclidean norm of at
    most sqrt(C) times the largest weight, so its product with K = C weights is at most C times that
    times the largest weight of the matrix. Attention computes weighted means of rows of v, RoPE
    turns pairs of q and k only, and SiLU increases no magnitude.
    """
    C = config.n_embd

    def normed(h: str, n: int, name: str) -> float:
        product = C * largest[f"{h}gamma{n}"] * largest[f"{h}w_{name}"]
        return product + largest.get(f"{h}b_{name}", 0.0)

    stream = largest["wte"]
    yield stream
    for h in (f"h.{layer}." for layer in range(config.n_layer)):
        v, ff = normed(h, 1, "qkv"), normed(h, 2, "gate") * normed(h, 2, "up")
        stream += v * config.q_width * largest[f"{h}w_o"] + largest.get(f"{h}b_o", 0.0)
        stream += ff * config.n_ff * largest[f"{h}w_down"] + largest.get(f"{h}b_down", 0.0)
        yield stream


def operand_bounds(
    config: LlamaConfig,
    largest: Mapping[str, float],
    norms: Callable[[str, str], NDArray[Any]],
) -> dict[str, float]:
    """The largest magnitude that each layer's operands and what they follow from can have, by name.

    A row of an RMSNorm before γ has a Euclidean norm of at most sqrt(C), so its product with a row
    of weights, times γ, is at most sqrt(C) times the norm of that row. RoPE turns pairs, attention
    computes weighted means, and SiLU increases no magnitude: the sums of gate and up are multiplied
    channel by channel, which is why `norms` has a number for each.
    """
    root = math.sqrt(config.n_embd)
    bounds = {FINAL: root * largest["gamma_f"]}
    for h in (f"h.{layer}." for layer in range(config.n_layer)):

        def product(n: int, name: str, h: str = h) -> NDArray[Any]:
            sums = root * norms(f"{h}w_{name}", f"{h}gamma{n}")
            return np.asarray(sums + largest.get(f"{h}b_{name}", 0.0))

        gate, up = product(2, "gate"), product(2, "up")
        bounds |= {f"{h}rms{n}": root * largest[f"{h}gamma{n}"] for n in (1, 2)}
        bounds[f"{h}rope"] = math.sqrt(2) * float(product(1, "qkv").max())
        bounds |= {f"{h}gate": float(gate.max()), f"{h}up": float(up.max())}
        bounds[f"{h}ff"] = float((gate * up).max())
    return bounds

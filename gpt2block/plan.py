"""A forward pass as data: a list of steps, each with a meaning in NumPy and one in CUDA."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpt2block import reference
from gpt2block.errors import InputError

Shape = tuple[int, ...]
Names = tuple[str, ...]


@dataclass(frozen=True)
class Step:
    """One operation: `name` is its tensor's name in a trace, `op` its function on every backend."""

    name: str
    op: str
    inputs: tuple[str, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """Steps in order, from `input` to the last step's tensor.

    `in_place` maps a step to the tensor whose storage it overwrites: one it reads itself, where its
    kernel works in place, or one that no later step needs. `overlapping`: every kernel of
    the CUDA meaning waits for the one before it (kernels_cu/lib/overlap.cuh), so that launches may
    overlap. Raises InputError when a step reads what was never made or is already overwritten, or
    when a name is made twice.
    """

    steps: tuple[Step, ...]
    weights: tuple[str, ...]
    in_place: Mapping[str, str] = field(default_factory=dict)
    input: str = "x"
    overlapping: bool = False

    def __post_init__(self) -> None:
        alive = {self.input, *self.weights}
        seen = set(alive)
        for step in self.steps:
            if not callable(getattr(reference, step.op, None)):
                raise InputError(f"step {step.name}: unknown op {step.op!r}")
            for name in step.inputs:
                if name not in alive:
                    why = "already overwritten" if name in seen else "not made yet"
                    raise InputError(f"step {step.name}: reads {name!r}, which is {why}")
            if step.name in seen:
                raise InputError(f"step {step.name}: the name is already taken")
            alive.add(step.name)
            seen.add(step.name)
            target = self.in_place.get(step.name)
            if target is not None:
                if target not in alive - {step.name} or target in (self.input, *self.weights):
                    raise InputError(f"step {step.name}: cannot overwrite {target!r}")
                alive.discard(target)

    @property
    def output(self) -> str:
        return self.steps[-1].name

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(step.name for step in self.steps)

    @property
    def matrices(self) -> frozenset[str]:
        """Weights of `gemm`, which takes them as a WeightMatrix."""
        return frozenset(step.inputs[1] for step in self.steps if step.op == "gemm")

    @property
    def operands(self) -> frozenset[str]:
        """Steps whose tensor a product or attention on tensor cores reads, in that place alone."""
        reading = (step for step in self.steps if step.op in ("gemm", "attention"))
        return frozenset(step.inputs[0] for step in reading) if self.matrices else frozenset()


def ten_step_plan(n_head: int, causal: bool, eps: float, weights: Iterable[str]) -> Plan:
    """The Pre-LN GPT-2 block as ten steps; gelu overwrites ff1."""
    norm, heads = {"eps": eps}, {"n_head": n_head, "causal": causal}
    return Plan(
        steps=(
            Step("ln1", "layernorm", ("x", "gamma1", "beta1"), norm),
            Step("qkv", "matmul_bias", ("ln1", "w_qkv", "b_qkv")),
            Step("attn", "attention", ("qkv",), heads),
            Step("proj", "matmul_bias", ("attn", "w_attn", "b_attn")),
            Step("x1", "add", ("x", "proj")),
            Step("ln2", "layernorm", ("x1", "gamma2", "beta2"), norm),
            Step("ff1", "matmul_bias", ("ln2", "w_fc", "b_fc")),
            Step("gelu", "gelu", ("ff1",)),
            Step("ff2", "matmul_bias", ("gelu", "w_proj", "b_proj")),
            Step("output", "add", ("x1", "ff2")),
        ),
        weights=tuple(weights),
        in_place={"gelu": "ff1"},
    )


def fused_plan(n_head: int, causal: bool, eps: float, weights: Iterable[str]) -> Plan:
    """The same block in seven steps: a product takes its bias, GELU and residual along.

    A name that is also one of the ten steps' is the same tensor. Projections may add up K in parts.
    """
    norm, heads = {"eps": eps}, {"n_head": n_head, "causal": causal}
    parts = {"split_k": True}
    return Plan(
        steps=(
            Step("ln1", "layernorm", ("x", "gamma1", "beta1"), norm),
            Step("qkv", "gemm", ("ln1", "w_qkv", "b_qkv")),
            Step("attn", "attention", ("qkv",), heads),
            Step("x1", "gemm", ("attn", "w_attn", "b_attn", "x"), parts),
            Step("ln2", "layernorm", ("x1", "gamma2", "beta2"), norm),
            Step("gelu", "gemm", ("ln2", "w_fc", "b_fc"), {"gelu": True}),
            Step("output", "gemm", ("gelu", "w_proj", "b_proj", "x1"), parts),
        ),
        weights=tuple(weights),
        in_place={"attn": "ln1", "ln2": "attn"},  # less to hold in the L2 cache
        overlapping=True,
    )

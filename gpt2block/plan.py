"""A forward pass as data: a list of steps, each of which runs in NumPy and in CUDA."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gpt2block import reference
from gpt2block.errors import InputError

Shape = tuple[int, ...]
Names = tuple[str, ...]


class Terms(NamedTuple):
    """Two numbers of 16 bits for each value of a tensor, in the place of its floats.

    They are for products on tensor cores (kernels_cu/lib/terms.cuh).
    """

    dtype: str  # float16 or bfloat16
    width: int = 0  # 0: in the places of the floats; 8 or 16: in the order in which wgmma reads

    def __str__(self) -> str:
        return f"{self.dtype} in the order of wgmma" if self.width else self.dtype


@dataclass(frozen=True)
class Step:
    """One operation: `name` is the name of its result, `op` its function in the reference.

    inputs: names of tensors, in the order of the function's arguments; "" for an omitted one.
    """

    name: str
    op: str
    inputs: tuple[str, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """Steps in order, from `input` to the last step's result.

    `weights` names the other tensors passed in: weights, a kv_cache, descriptions of a batch.
    `in_place` maps a step to the tensor whose storage it overwrites: one that it reads, where its
    kernel works in place, or one that no later step reads. `overlapping`: every CUDA kernel itself
    waits for the previous one (kernels_cu/lib/overlap.cuh), so launches may overlap. Raises
    InputError when a step reads a tensor that does not exist or is already overwritten, or when two
    steps have the same name.
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
                if name and name not in alive:
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

    def buffer(self, name: str) -> str:
        """The first tensor in the storage of `name`: itself, unless its step works in place."""
        while name in self.in_place:
            name = self.in_place[name]
        return name

    @property
    def matrices(self) -> frozenset[str]:
        """The weights of `gemm`, which expects a WeightMatrix."""
        products = [step.inputs for step in self.steps if step.op == "gemm"]
        # w, and where there is one, up
        return frozenset(name for inputs in products for name in inputs[1:5:3] if name)

    @property
    def operands(self) -> frozenset[str]:
        """Steps whose result is the first input of `gemm` or of attention over the same tokens.

        Nothing else reads them as float32. Views of rows of another result are not among them.
        """
        reads = ("gemm", "attention", "attention_varlen")
        views = {step.name for step in self.steps if step.op == "rows"}
        reading = {step.inputs[0] for step in self.steps if step.op in reads}
        return frozenset(reading - views) if self.matrices else frozenset()

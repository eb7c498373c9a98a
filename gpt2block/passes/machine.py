"""What runs the steps of a forward pass: the interface of a machine, and steps without arrays.

A pass is a function that calls a machine once for each step (`gpt2block.passes.forward`). Machines
compute with NumPy, record kernels, follow bounds of magnitudes, or list the steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from gpt2block.architectures.architecture import Value

TWO_PART = "two_part"  # in place of a dtype: a TwoPartMatrix


def two_part_of(matrix: str) -> str:
    """The name of a two-part matrix."""
    return f"{matrix}.parts"


class Step(NamedTuple):
    """A step: `name` is that of its result, `op` its function in the reference.

    inputs: results, or names of tensors, in the order of the function's arrays; "" for an omitted
    one. An Outline lists names alone. dtype: of the result, where it does not follow from the
    inputs. bound: the largest magnitude that a two-part result can have, which gives all its rows
    one scale.
    """

    name: str
    op: str
    inputs: tuple[Value, ...]
    attrs: Mapping[str, Any]
    dtype: str | None = None
    bound: float | None = None


class Machine(ABC):
    """Runs steps. tensors: weights, constants, a batch and a kv_cache by name; None if absent."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self.tensors = tensors

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        return self.tensors.get(name) is not None

    def __call__(
        self,
        name: str,
        op: str,
        inputs: tuple[Value, ...],
        into: Value = None,
        dtype: str | None = None,
        bound: float | None = None,
        **attrs: Any,
    ) -> Value:
        """Run a step and return its result; absent inputs are omitted.

        into: a result that this one overwrites, which no later step may read.
        """
        return self.do(Step(name, op, inputs, attrs, dtype, bound), into)

    @abstractmethod
    def do(self, step: Step, into: Value) -> Value:
        """`__call__` with the arguments as a Step."""


class Name(str):
    """A result in an Outline."""


class Outline(Machine):
    """Lists the steps of a pass: what the docs and the page of a forward pass show.

    names: of the tensors that there are.
    """

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(dict.fromkeys(names, ""))
        self.steps: list[Step] = []

    def do(self, step: Step, into: Value) -> Name:
        known = (
            str(each) if isinstance(each, Name) or self.has(each) else "" for each in step.inputs
        )
        self.steps.append(step._replace(inputs=tuple(known)))
        return Name(step.name)

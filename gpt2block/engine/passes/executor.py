"""`Executor`, the interface of executors of a pass's steps; `Outline`, which only lists steps.

A pass calls an executor once for each step (`gpt2block.engine.passes.forward`). Executors compute
with NumPy, record kernel launches, or list the steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from gpt2block.models.architectures.architecture import Value

HI_LO = "hi_lo"  # dtype name that stands for a HiLoMatrix


def hi_lo_of(matrix: str) -> str:
    """Return the name of a matrix's hi/lo form (two float16 numbers for each float32 number)."""
    return f"{matrix}.parts"


class Step(NamedTuple):
    """A step of a forward pass. name: name of its result. op: name of its function in `reference`.

    inputs: results, or names of tensors, in the order of the function's arrays; "" for an omitted
    array. In an Outline, all inputs are names. dtype: the result's dtype, if the inputs do not
    determine it. bound: upper bound of the magnitudes of a hi/lo result, from which the scale of
    all its rows is computed. into: in a list of steps, the name of an earlier result that the
    result overwrites, or "".
    """

    name: str
    op: str
    inputs: tuple[Value, ...]
    attrs: Mapping[str, Any]
    dtype: str | None = None
    bound: float | None = None
    into: str = ""


class Executor(ABC):
    """Interface of an executor, which runs the steps of a forward pass.

    tensors: weights, constants, arrays of a batch and of a kv_cache by name; None if absent.
    """

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self.tensors = tensors

    def has(self, name: str) -> bool:
        """Return whether there is a tensor of this name."""
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
        """Run a step and return its result. Inputs that the model does not have are omitted.

        into: an earlier result that the new result overwrites, and that no later step may read.
        """
        return self.do(Step(name, op, inputs, attrs, dtype, bound), into)

    @abstractmethod
    def do(self, step: Step, into: Value) -> Value:
        """Run a step and return its result, which may overwrite `into` if `into` is not None."""


class Renamed(Executor):
    """An executor that runs steps on another one, with a prefix before the names of results."""

    def __init__(self, do: Executor, prefix: str) -> None:
        super().__init__(do.tensors)
        self._do, self._prefix = do, prefix

    def do(self, step: Step, into: Value) -> Value:
        return self._do.do(step._replace(name=self._prefix + step.name), into)


class Name(str):
    """The name of a result in an Outline, which has no arrays."""


class Outline(Executor):
    """An executor that lists the steps of a forward pass without running them.

    names: the names of the existing tensors.
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

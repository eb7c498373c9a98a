"""Run passes with NumPy: every step is its function in `gpt2block.reference`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from statistics import median
from time import perf_counter
from typing import Any

from gpt2block import reference
from gpt2block.contract import unchecked
from gpt2block.passes.machine import Machine, Step, Value

Apply = Callable[..., Any]  # (op, arrays, **attrs) → the result
RUNS = 3  # of a step that is timed


def apply(op: str, inputs: tuple[Any, ...], **attrs: Any) -> Any:
    """The step's function without its argument checks, which take a quarter of a token's time."""
    return unchecked(getattr(reference, op))(*inputs, **attrs)


class NumpyMachine(Machine):
    """Computes steps at once. Results are freed when the pass no longer needs them.

    keep: names of results that `kept` holds; None for all. apply: computes a step.
    """

    def __init__(
        self,
        tensors: Mapping[str, Any],
        keep: Collection[str] | None = (),
        apply: Apply = apply,
    ) -> None:
        super().__init__(tensors)
        self.kept: dict[str, Any] = {}
        self._keep, self._apply = keep, apply

    def __call__(
        self,
        name: str,
        op: str,
        inputs: tuple[Value, ...],
        into: Value = None,
        dtype: str | None = None,
        bound: float | None = None,
        **attrs: Any,
    ) -> Any:
        arrays = tuple(self.tensors.get(x) if isinstance(x, str) else x for x in inputs)
        made = self._apply(op, arrays, **attrs)
        if self._keep is None or name in self._keep:
            self.kept[name] = made
        return made


def inputs_of(step: Step, tensors: Mapping[str, Any]) -> tuple[Any, ...]:
    """The inputs of a listed step."""
    return tuple(tensors[name] if name else None for name in step.inputs)


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """The result of `work`, and the median of its wall times in milliseconds."""
    times = []
    for _ in range(RUNS):
        start = perf_counter()
        out = work()
        times.append(perf_counter() - start)
    return out, 1e3 * median(times)

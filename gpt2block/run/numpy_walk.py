"""Run plans with NumPy: every step is a function of `gpt2block.reference`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from statistics import median
from time import perf_counter
from typing import Any

from gpt2block import reference
from gpt2block.array_checks import unchecked
from gpt2block.plan import Plan, Step

Apply = Callable[[Step, tuple[Any, ...]], Any]
RUNS = 3  # of a step that is timed


def apply(step: Step, inputs: tuple[Any, ...]) -> Any:
    """The step's function without its argument checks, which take a quarter of a token's time."""
    return unchecked(getattr(reference, step.op))(*inputs, **step.attrs)


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """The result of `work`, and the median of its wall times in milliseconds."""
    times = []
    for _ in range(RUNS):
        start = perf_counter()
        out = work()
        times.append(perf_counter() - start)
    return out, 1e3 * median(times)


def walk(
    plan: Plan, tensors: Mapping[str, Any], keep: Collection[str] = (), apply: Apply = apply
) -> dict[str, Any]:
    """Run the plan; return the results of the steps in `keep` and of the last step, by name.

    tensors: the plan's inputs by name. Every other result is freed after the last step that reads
    it.
    """
    last_use = {name: i for i, step in enumerate(plan.steps) for name in step.inputs}
    known = dict(tensors)
    made: dict[str, Any] = {}
    for i, step in enumerate(plan.steps):
        inputs = tuple(known[name] if name else None for name in step.inputs)
        known[step.name] = apply(step, inputs)
        if step.name in keep or step.name == plan.output:
            made[step.name] = known[step.name]
        for name in set(step.inputs):
            if name and last_use[name] == i:
                del known[name]
    return made

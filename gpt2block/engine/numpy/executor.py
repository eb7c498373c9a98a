"""Run forward passes with NumPy: each step calls its function in `gpt2block.reference`."""

from __future__ import annotations

import platform
from collections.abc import Callable, Collection, Mapping
from time import perf_counter
from typing import Any

import numpy as np

from gpt2block import reference
from gpt2block.contract import unchecked
from gpt2block.engine.model import StepResult
from gpt2block.engine.passes.executor import Executor, Step
from gpt2block.engine.timeline import Call, Clock, Timeline
from gpt2block.models.architectures.architecture import Value

Note = Callable[[Step, tuple[Any, ...], Any, float, float], None]  # the signature of `Clock.note`
RUNS = 3  # number of runs when one step is timed


class Functions(dict[str, Callable[..., Any]]):
    """The functions of operations: those of the reference, except for the given ones.

    These functions do not check arguments, which would take a quarter of a token's time. own: the
    given functions. A copy looks functions of the reference up again, as they cannot be pickled.
    """

    def __init__(self, own: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__(own)
        self.own = dict(own)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.own,)

    def __missing__(self, op: str) -> Callable[..., Any]:
        self[op] = function = unchecked(getattr(reference, op))
        return function


FUNCTIONS = Functions({})


class NumpyExecutor(Executor):
    """An executor that computes each step immediately; results are freed after their last use.

    keep: names of results that `kept` holds; None for all. functions: compute the steps. note:
    called after each step with its arrays, its result, and when it began and ended, by
    perf_counter.
    """

    def __init__(
        self,
        tensors: Mapping[str, Any],
        keep: Collection[str] | None = (),
        functions: Functions = FUNCTIONS,
        note: Note | None = None,
    ) -> None:
        super().__init__(tensors)
        self.kept: dict[str, Any] = {}
        self._keep, self._functions, self._note = keep, functions, note

    def do(self, step: Step, into: Value = None) -> Any:
        known = self.tensors
        arrays = tuple(known.get(x) if isinstance(x, str) else x for x in step.inputs)
        began = perf_counter()
        made = self._functions[step.op](*arrays, **step.attrs)
        if self._note is not None:
            self._note(step, arrays, made, began, perf_counter())
        if self._keep is None or step.name in self._keep:
            self.kept[step.name] = made
        return made


class NumpySteps:
    """Base class of the NumPy engines: runs the steps of a forward pass, or a single step.

    known: weights and constants by name, matrices (K, N).
    """

    known: Mapping[str, np.ndarray]
    functions: Functions
    _note: Note | None = None

    def describe(self) -> str:
        return f"CPU ({platform.machine()}), NumPy {np.__version__}"

    def executor(
        self, tensors: Mapping[str, np.ndarray], keep: Collection[str] | None = ()
    ) -> NumpyExecutor:
        """Return a NumpyExecutor for the arrays `known` and `tensors`. keep: see NumpyExecutor."""
        return NumpyExecutor({**self.known, **tensors}, keep, self.functions, self._note)

    def timed(self, call: Call) -> list[Timeline]:
        """Call `call`; return a list with the Timeline of its steps, empty if no step ran."""
        clock = Clock()
        self._note = clock.note
        try:
            call()
        finally:
            self._note = None
        made = clock.timeline()
        return [made] if made.ran else []

    def step(self, step: Step, tensors: Mapping[str, np.ndarray]) -> StepResult:
        """Run one step RUNS times; return its result and the shortest wall time."""
        do, times = self.executor(tensors), []
        for _ in range(RUNS):
            start = perf_counter()
            out = do.do(step)
            times.append(perf_counter() - start)
        return StepResult(step.name, f"reference.{step.op}", out, 1e3 * min(times))

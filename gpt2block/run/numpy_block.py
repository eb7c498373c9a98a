"""The NumPy engine: every step is its function in `gpt2block.reference`."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt2block.array_checks import FLOATS, require_host
from gpt2block.plan import Plan, Step
from gpt2block.run import NOTHING, Given, StepResult, check_array, check_out
from gpt2block.run.numpy_walk import apply, timed, walk


class NumpyEngine:
    """Runs a plan with NumPy, in the dtype of the weights: float32, or float64 as exact values.

    dtype: of x; every step's result is rounded to it. None: the dtype of the weights.
    """

    def __init__(
        self, plan: Plan, weights: Mapping[str, NDArray[Any]], width: int, dtype: str | None = None
    ) -> None:
        self.plan = plan
        self._width = width
        self._weights = dict(weights)
        self._computed: np.dtype[Any] = next(iter(self._weights.values())).dtype
        self._stored: np.dtype[Any] = np.dtype(FLOATS[dtype]) if dtype else self._computed

    def describe(self) -> str:
        return f"CPU ({platform.machine()}), NumPy {np.__version__}"

    @property
    def weight_bytes(self) -> int:
        return sum(int(w.nbytes) for w in self._weights.values())

    def forward(self, x: Any, out: Any | None, given: Given = NOTHING) -> NDArray[Any]:
        host = self._accept(x)
        if out is None:
            return self._walk(host, given)[self.plan.output]
        check_out(out, host.shape, np.ndarray, self._stored.name)
        out[...] = self._walk(host, given)[self.plan.output]
        result: NDArray[Any] = out
        return result

    def trace(self, x: Any, given: Given = NOTHING) -> dict[str, NDArray[Any]]:
        return self._walk(self._accept(x), given)

    def _accept(self, x: Any) -> NDArray[Any]:
        on_gpu = "copy it to the host, or make the Block with device='cuda'"
        host = require_host(x, "for a Block on the CPU", self._stored, on_gpu)
        check_array("x", host, self._width, self._stored.name)
        return np.ascontiguousarray(host)

    def _walk(self, x: NDArray[Any], given: Given) -> dict[str, NDArray[Any]]:
        tensors = {**self._weights, **given, self.plan.input: x}
        return walk(self.plan, tensors, self.plan.names, self._apply)

    def apply(self, step: Step, tensors: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
        """The step's reference function on its inputs, from `tensors` and the weights."""
        known = {**self._weights, **tensors}
        return self._apply(step, tuple(known[name] if name else None for name in step.inputs))

    def _apply(self, step: Step, inputs: tuple[NDArray[Any] | None, ...]) -> NDArray[Any]:
        """Compute in the dtype of the weights, then round to that of the block.

        Inputs of other dtypes, such as positions, stay as they are.
        """
        wide = tuple(
            array.astype(self._computed)
            if array is not None and array.dtype == self._stored != self._computed
            else array
            for array in inputs
        )
        result: NDArray[Any] = apply(step, wide).astype(self._stored, copy=False)
        return result

    def step(self, step: Step, tensors: Mapping[str, NDArray[Any]]) -> StepResult:
        out, ms = timed(lambda: self.apply(step, tensors))
        return StepResult(out, f"reference.{step.op}", ms)

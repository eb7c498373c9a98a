"""The NumPy engine of a block: every step is its function in `gpt2block.reference`."""

from __future__ import annotations

import platform
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt2block.array_checks import FLOATS, require_host
from gpt2block.passes.machine import Step
from gpt2block.run import NOTHING, BlockSpec, Given, StepResult, check_array, check_out
from gpt2block.run.numpy_machine import NumpyMachine, apply, inputs_of, timed


class NumpyEngine:
    """Runs a block with NumPy, in the dtype of the weights: float32, or float64 as exact values.

    dtype: of x; every step's result is rounded to it. None: the dtype of the weights.
    """

    def __init__(
        self, spec: BlockSpec, weights: Mapping[str, NDArray[Any]], dtype: str | None = None
    ) -> None:
        self.spec = spec
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
        if out is not None:
            check_out(out, host.shape, np.ndarray, self._stored.name)
        found, _ = self._run(host, given, ())
        if out is not None:
            out[...] = found
        return found if out is None else out

    def trace(self, x: Any, given: Given = NOTHING) -> dict[str, NDArray[Any]]:
        _, kept = self._run(self._accept(x), given, None)
        return kept

    def _accept(self, x: Any) -> NDArray[Any]:
        on_gpu = "copy it to the host, or make the Block with device='cuda'"
        host = require_host(x, "for a Block on the CPU", self._stored, on_gpu)
        check_array("x", host, self.spec.width, self._stored.name)
        return np.ascontiguousarray(host)

    def _run(
        self, x: NDArray[Any], given: Given, keep: Collection[str] | None
    ) -> tuple[NDArray[Any], dict[str, NDArray[Any]]]:
        do = NumpyMachine({**self._weights, **given, "x": x}, keep, self._apply)
        found: NDArray[Any] = self.spec.run(do)
        return found, do.kept

    def apply(self, step: Step, tensors: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
        """The step's reference function on its inputs, from `tensors` and the weights."""
        inputs = inputs_of(step, {**self._weights, **tensors})
        return self._apply(step.op, inputs, **step.attrs)

    def _apply(
        self, op: str, inputs: tuple[NDArray[Any] | None, ...], **attrs: Any
    ) -> NDArray[Any]:
        """Compute in the dtype of the weights, then round to that of the block.

        Inputs of other dtypes, such as positions, stay as they are.
        """
        wide = tuple(
            array.astype(self._computed)
            if array is not None and array.dtype == self._stored != self._computed
            else array
            for array in inputs
        )
        made: NDArray[Any] = apply(op, wide, **attrs)
        return made.astype(self._stored, copy=False)

    def step(self, step: Step, tensors: Mapping[str, NDArray[Any]]) -> StepResult:
        out, ms = timed(lambda: self.apply(step, tensors))
        return StepResult(out, f"reference.{step.op}", ms)

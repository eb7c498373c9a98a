"""Run a block with NumPy: every step calls its function in `gpt2block.reference`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from gpt2block.checks import FLOATS, require_host
from gpt2block.engine.block import NOTHING, BlockEngine, BlockSpec, Given, check_array, check_out
from gpt2block.engine.numpy.executor import Functions, NumpySteps


class NumpyEngine(NumpySteps, BlockEngine):
    """An engine that runs a block with NumPy in the weights' dtype, float32 or float64.

    dtype: dtype of x, to which every step's result is rounded. None: the dtype of the weights.
    """

    def __init__(
        self, spec: BlockSpec, weights: Mapping[str, np.ndarray], dtype: str | None = None
    ) -> None:
        super().__init__(spec, weights)
        self.known = weights
        self._computed: np.dtype[Any] = next(iter(weights.values())).dtype
        self._stored: np.dtype[Any] = np.dtype(FLOATS[dtype]) if dtype else self._computed
        self.functions = _Rounded(self._computed, self._stored)

    def forward(self, x: Any, out: Any | None, given: Given = NOTHING) -> np.ndarray:
        host = self._accept(x)
        if out is not None:
            check_out(out, host.shape, np.ndarray, self._stored.name)
        found: np.ndarray = self.spec.run(self.executor({**given, "x": host}))
        if out is not None:
            out[...] = found
        return found if out is None else out

    def trace(self, x: object, given: Given = NOTHING) -> dict[str, np.ndarray]:
        do = self.executor({**given, "x": self._accept(x)}, keep=None)
        self.spec.run(do)
        return do.kept

    def _accept(self, x: object) -> np.ndarray:
        on_gpu = "copy it to the host, or make the Block with device='cuda'"
        host = require_host(x, "for a Block on the CPU", self._stored, on_gpu)
        check_array("x", host, self.spec.width, self._stored.name)
        return np.ascontiguousarray(host)


class _Rounded(Functions):
    """Functions that compute in the weights' dtype, and round results to the block's dtype.

    Inputs of other dtypes, such as positions, stay as they are.
    """

    def __init__(self, computed: np.dtype[Any], stored: np.dtype[Any]) -> None:
        super().__init__({})
        self._computed, self._stored = computed, stored

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._computed, self._stored)

    def __missing__(self, op: str) -> Callable[..., Any]:
        function = super().__missing__(op)

        def rounded(*inputs: Any, **attrs: Any) -> np.ndarray:
            wide = (
                array.astype(self._computed)
                if array is not None and array.dtype == self._stored != self._computed
                else array
                for array in inputs
            )
            made: np.ndarray = function(*wide, **attrs)
            return made.astype(self._stored, copy=False)

        self[op] = rounded
        return rounded

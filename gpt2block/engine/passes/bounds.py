"""Compute upper bounds of the magnitudes in a forward pass, which hold for every input."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gpt2block.engine.passes.executor import Executor, Step
from gpt2block.models.architectures.architecture import Value
from gpt2block.ops.layernorm import layernorm_bound

Bound = float | None  # an upper bound, or None if it is unknown


class Bounds(Executor):
    """An executor that computes an upper bound of each step's result. `found`: bounds by name.

    tensors: NumPy arrays by name, matrices (K, N). NaN or infinite weights give no usable bound.
    """

    def __init__(self, tensors: Mapping[str, np.ndarray]) -> None:
        super().__init__(tensors)
        self.found: dict[str, float] = {}

    def do(self, step: Step, into: Value) -> Bound:
        made = self._bound(step.op, *step.inputs)
        if made is not None:
            self.found[step.name] = made
        return made

    def _bound(self, op: str, x: Value, *others: str) -> Bound:
        if op == "layernorm":
            gamma, beta = (self.tensors[name] for name in others)
            return layernorm_bound(gamma, beta)
        if op in ("gelu", "attention"):  # attention is a weighted mean of rows of V
            bounded: Bound = x
            return bounded
        if op in ("gemm", "matmul_bias") and len(others) < 3:
            return self._product(x, *others)
        return None

    def _product(self, a: Bound, w: str, bias: str) -> Bound:
        """Return the bound of a product without residual. A fused GELU increases no magnitude."""
        if a is None:
            return None
        sums = np.abs(self.tensors[w]).sum(axis=0, dtype=np.float64)
        added = float(np.abs(self.tensors[bias]).max()) if self.has(bias) else 0.0
        return a * float(sums.max()) + added

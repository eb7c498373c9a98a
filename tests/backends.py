"""One interface to the three places where an operation runs, for parametrized tests.

It takes and returns NumPy arrays, whether the reference computes them, the emulator (in three
orders of threads), or the GPU.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import pytest
from numpy.typing import NDArray

from gpt2block import reference
from gpt2block.ops.registry import OPERATIONS
from tests.devices import IN_TESTS, running_on

Array = NDArray[Any]


class Backend(Protocol):
    def layernorm(self, x: Array, gamma: Array, beta: Array, eps: float) -> Array: ...
    def matmul_bias(self, a: Array, w: Array, bias: Array | None) -> Array: ...
    def attention(self, qkv: Array, n_head: int, causal: bool) -> Array: ...
    def add(self, a: Array, b: Array) -> Array: ...
    def gelu(self, x: Array) -> Array: ...


def poisoned(*shape: int) -> Array:
    """Return an output of NaN, in which an element that is never written shows."""
    return np.full(shape, np.nan, np.float32)


class OnDevice:
    """Operations with poisoned outputs; on a GPU each runs twice and must give the same bits."""

    def __init__(self, name: str) -> None:
        self.name = name

    def _run(self, op: str, *inputs: Array | None, **attrs: Any) -> Array:
        shape = np.shape(getattr(reference, op)(*inputs, **attrs))
        results: list[Array] = []
        with running_on(self.name) as device:
            for _ in range(2 if self.name == "gpu" else 1):
                arrays = tuple(None if a is None else device.asarray(a) for a in inputs)
                out = arrays[0] if op == "gelu" else device.asarray(poisoned(*shape))
                results.append(OPERATIONS[op].bind(arrays, out, **attrs).run().get())
        np.testing.assert_array_equal(results[0], results[-1])
        return results[0]

    def layernorm(self, x: Array, gamma: Array, beta: Array, eps: float) -> Array:
        return self._run("layernorm", x, gamma, beta, eps=eps)

    def matmul_bias(self, a: Array, w: Array, bias: Array | None) -> Array:
        return self._run("matmul_bias", a, w, bias)

    def attention(self, qkv: Array, n_head: int, causal: bool) -> Array:
        return self._run("attention", qkv, n_head=n_head, causal=causal)

    def add(self, a: Array, b: Array) -> Array:
        return self._run("add", a, b)

    def gelu(self, x: Array) -> Array:
        return self._run("gelu", x)


BACKENDS = [
    pytest.param(reference, id="numpy"),
    *(pytest.param(OnDevice(order), id=order) for order in IN_TESTS),
    pytest.param(OnDevice("gpu"), id="gpu", marks=pytest.mark.gpu),
]

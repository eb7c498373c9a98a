"""One interface over the three places where an operation runs, for the parametrised tests.

NumPy arrays in, NumPy arrays out, whether the work is done by the reference, by the kernels' own
source on the CPU (in three thread orders, under AddressSanitizer), or by the GPU.
"""

from __future__ import annotations

from math import ceil
from typing import Any, Protocol

import numpy as np
import pytest
from numpy.typing import NDArray

from gpt2block import reference
from gpt2block.emulator import loader
from gpt2block.ops.registry import OPERATIONS

Array = NDArray[Any]


class Backend(Protocol):
    def layernorm(self, x: Array, gamma: Array, beta: Array, eps: float) -> Array: ...
    def matmul_bias(self, a: Array, w: Array, bias: Array | None) -> Array: ...
    def attention(self, qkv: Array, n_head: int, causal: bool) -> Array: ...
    def add(self, a: Array, b: Array) -> Array: ...
    def gelu(self, x: Array) -> Array: ...


def poisoned(*shape: int) -> Array:
    """An output in which an element that is never written shows."""
    return np.full(shape, np.nan, np.float32)


class OnShim:
    """The shipped `.cu` files compiled for the CPU, with the grids of `gpt2block.ops`."""

    def __init__(self, order: loader.Order) -> None:
        self.order = order

    def _run(self, file: str, name: str, grid: Any, block: Any, args: Any, **options: Any) -> None:
        problem = loader.missing()
        if problem:
            pytest.skip(problem)
        loader.run(file, name, grid, block, args, order=self.order, **options)

    def layernorm(self, x: Array, gamma: Array, beta: Array, eps: float) -> Array:
        rows, C = x.size // x.shape[-1], x.shape[-1]
        out = poisoned(*x.shape)
        name, width = ("layernorm768_kernel", []) if C == 768 else ("layernorm_kernel", [C])
        args = [x, out, gamma, beta, rows, *width]
        self._run(
            "layernorm/skeleton.cu", name, (rows,), (256,), args, defines=(("LN_EPS", f"{eps}f"),)
        )
        return out

    def matmul_bias(self, a: Array, w: Array, bias: Array | None) -> Array:
        K, N = w.shape
        M = a.size // K
        out: Array = poisoned(*a.shape[:-1], N)
        grid = (ceil(N / 16), ceil(M / 16))
        args = [a, w, bias, out, M, K, N]
        self._run("matmul/skeleton.cu", "matmul_bias_tiled", grid, (16, 16), args)
        return out

    def attention(self, qkv: Array, n_head: int, causal: bool) -> Array:
        *batch, T, three_c = qkv.shape
        C = three_c // 3
        out = poisoned(*batch, T, C)
        name = "mha_causal_kernel" if causal else "mha_nocausal_kernel"
        grid = (T, n_head, batch[0] if batch else 1)
        defines = (("NH", n_head), ("HS", C // n_head))
        args = [qkv, out, T]
        self._run("attention/skeleton.cu", name, grid, (256,), args, shared=4 * T, defines=defines)
        return out

    def add(self, a: Array, b: Array) -> Array:
        out = poisoned(*a.shape)
        grid = (ceil(a.size / 256),)
        self._run("elementwise/residual.cu", "add_kernel", grid, (256,), [a, b, out, a.size])
        return out

    def gelu(self, x: Array) -> Array:
        out: Array = x.copy()
        self._run(
            "elementwise/gelu.cu", "gelu_kernel", (ceil(x.size / 256),), (256,), [out, out.size]
        )
        return out


class OnGpu:
    """The CUDA ops, bound to poisoned outputs; every op runs twice and must give the same bits."""

    def _run(self, op: str, inputs: tuple[Array | None, ...], **attrs: Any) -> Array:
        import cupy  # noqa: PLC0415

        shape = OPERATIONS[op].shape(*(None if a is None else a.shape for a in inputs))
        results: list[Array] = []
        for _ in range(2):
            arrays = tuple(None if a is None else cupy.asarray(a) for a in inputs)
            out = arrays[0] if op == "gelu" else cupy.asarray(poisoned(*shape))
            results.append(OPERATIONS[op].bind(arrays, out, **attrs).run().get())
        np.testing.assert_array_equal(results[0], results[1])
        return results[0]

    def layernorm(self, x: Array, gamma: Array, beta: Array, eps: float) -> Array:
        return self._run("layernorm", (x, gamma, beta), eps=eps)

    def matmul_bias(self, a: Array, w: Array, bias: Array | None) -> Array:
        return self._run("matmul_bias", (a, w, bias))

    def attention(self, qkv: Array, n_head: int, causal: bool) -> Array:
        return self._run("attention", (qkv,), n_head=n_head, causal=causal)

    def add(self, a: Array, b: Array) -> Array:
        return self._run("add", (a, b))

    def gelu(self, x: Array) -> Array:
        return self._run("gelu", (x,))


BACKENDS = [
    pytest.param(reference, id="numpy"),
    *(pytest.param(OnShim(order), id=f"cpu-{order}") for order in loader.ORDERS),
    pytest.param(OnGpu(), id="gpu", marks=pytest.mark.gpu),
]

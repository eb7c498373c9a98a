"""LayerNorm on CUDA: kernels_cu/layernorm.cu."""

from __future__ import annotations

from typing import Any

from gpt2block.kernels import launch
from gpt2block.ops._arrays import Bound, CudaArray, check, contiguous, output

BLOCK = 256


def bind(inputs: tuple[Any, ...], out: CudaArray | None = None, *, eps: float) -> Bound:
    """inputs (x (..., C), gamma (C,), beta (C,)), out (..., C)."""
    x, gamma, beta = inputs
    check("x", x)
    C = x.shape[-1]
    check("gamma", gamma, (C,))
    check("beta", beta, (C,))
    out = output(out, x.shape)
    rows = x.size // C
    name, width = ("layernorm768_kernel", ()) if C == 768 else ("layernorm_kernel", (C,))
    args = (x, out, gamma, beta, rows, *width)
    defines = (("LN_EPS", f"{float(eps)!r}f"),)
    return Bound(out, (launch("layernorm.cu", name, (rows,), (BLOCK,), args, defines=defines),))


def layernorm(x: CudaArray, gamma: CudaArray, beta: CudaArray, eps: float = 1e-5) -> CudaArray:
    """`reference.layernorm` on float32 CuPy arrays; raises InputError."""
    return bind(contiguous(x, gamma, beta), eps=eps).run()

"""PyTorch implementations of blocks, matrix products, attention and other operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import sqrt
from typing import Any

import torch
from torch.nn import attention, functional

from benchmarks.kernel_works import NH
from gpt2block.cuda.formats import FILE
from gpt2block.cuda.kernels import FP8
from gpt2block.errors import InputError
from gpt2block.models.weights.matrix import WeightMatrix

HEAD_DIM = 128  # head_dim of Llama
BACKENDS = {
    "flash": "FLASH_ATTENTION",
    "cuDNN": "CUDNN_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
}

Tensor = Any
Function = Callable[..., Tensor]


def check_weights(dtype: str) -> None:
    """Raise InputError if `dtype`, the dtype of weights, is FP8 or stands for GGUF blocks."""
    if dtype in (*FP8, FILE):
        weights = "GGUF blocks" if dtype == FILE else f"{dtype} weights"
        raise InputError(f"no PyTorch operation here takes {weights}")


def tensor(array: Any) -> Tensor:
    """Return a PyTorch tensor that shares the array's memory; a weight matrix becomes (K, N)."""
    if isinstance(array, WeightMatrix):
        check_weights(array.dtype)
        stored = tensor(array.data)
        return stored if array.layout == "KN" else stored.T
    if array.dtype.name == "bfloat16":  # DLPack cannot export NumPy's bfloat16
        return torch.from_dlpack(array.view("int16")).view(torch.bfloat16)
    return torch.from_dlpack(array)


def _gelu(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


def _layernorm(x: Tensor, gamma: Tensor, beta: Tensor, eps: float = 1e-5) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], gamma, beta, eps)


def _linear(a: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return functional.linear(a, w.T, bias)


def _linear_gelu(a: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return _gelu(_linear(a, w, bias))


def _addmm_gelu(a: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    """Compute gelu(a w + bias) by one cuBLASLt call, with tanh GELU in its epilogue."""
    return torch.ops.aten._addmm_activation(bias, a, w, use_gelu=True)


def products(gelu: bool, residual: bool) -> dict[str, Function]:
    """Return {name: PyTorch function} for a matrix product with bias."""
    if gelu:
        return {"torch": _linear_gelu, "torch, cuBLASLt's GELU": _addmm_gelu}
    if residual:
        return {"torch": lambda a, w, bias, residual: residual + _linear(a, w, bias)}
    return {"torch": _linear}


def _heads_first(qkv: Tensor, causal: bool) -> Tensor:
    """Compute attention of 12 heads on views of rows [Q | K | V]; return (B, NH, T, HS)."""
    heads = qkv.unflatten(-1, (3, NH, -1)).movedim(-3, 0).transpose(-2, -3)
    return functional.scaled_dot_product_attention(*heads, is_causal=causal)


def _attention(qkv: Tensor, causal: bool = True) -> Tensor:
    """Compute attention of 12 heads on rows [Q | K | V]; return (B, T, C)."""
    return _heads_first(qkv, causal).transpose(-2, -3).flatten(-2)


def attention_by(backend: str, causal: bool, qkv: Tensor) -> Tensor:
    """Compute attention as (B, NH, T, HS): the transposition to (B, T, C) is not timed."""
    with attention.sdpa_kernel(getattr(attention.SDPBackend, backend)):
        return _heads_first(qkv, causal)


def attentions(causal: bool) -> dict[str, Function]:
    """Return {name: PyTorch function} for attention, one function for each backend."""
    return {f"torch, {name}": partial(attention_by, b, causal) for name, b in BACKENDS.items()}


def blocks(eps: float, causal: bool) -> dict[str, Function]:
    """Return {name: PyTorch function} for the GPT-2 block."""
    return {"torch": partial(block, eps, causal)}


def block(eps: float, causal: bool, x: Tensor, *weights: Tensor) -> Tensor:
    """Compute a GPT-2 block of x; the weights are in the order of `BlockWeights`."""
    gamma1, beta1, w_qkv, b_qkv, w_attn, b_attn, gamma2, beta2, w_fc, b_fc, w_proj, b_proj = weights
    qkv = _linear(_layernorm(x, gamma1, beta1, eps), w_qkv, b_qkv)
    x1 = x + _linear(_attention(qkv, causal), w_attn, b_attn)
    hidden = _linear_gelu(_layernorm(x1, gamma2, beta2, eps), w_fc, b_fc)
    return x1 + _linear(hidden, w_proj, b_proj)


def _trimat(qkv: Tensor) -> Tensor:
    """Compute all scores, even masked ones, by cuBLAS; scale Q, as the scores are larger."""
    q, k = qkv[:, :, 0].transpose(1, 2), qkv[:, :, 1].transpose(1, 2)
    return (q / sqrt(q.shape[-1])) @ k.transpose(-1, -2)


def _rmsnorm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], weight, eps)


def _rope_cos_sin(x: Tensor, D: int = HEAD_DIM) -> tuple[Tensor, Tensor]:
    """Return RoPE's cos and sin for x's rows at positions 0 to T - 1, each (T, 1, D / 2)."""
    T = x.shape[0]
    frequency = 1e4 ** (-torch.arange(0, D, 2, device=x.device, dtype=torch.float64) / D)
    angle = torch.arange(T, device=x.device)[:, None] * frequency
    return angle.cos().float()[:, None], angle.sin().float()[:, None]


def _rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to x (T, H, D) without complex numbers, so that PyTorch's compiler can fuse it."""
    r, i = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((r * cos - i * sin, r * sin + i * cos), -1).flatten(-2).to(x.dtype)


def _rmsnorm_matmul(x: Tensor, gamma: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out = _rmsnorm(x, gamma) @ w
    return _rope(out.unflatten(-1, (-1, HEAD_DIM)), cos, sin).flatten(-2)


def _rmsnorm_ffn(x: Tensor, gamma: Tensor, w1: Tensor, w3: Tensor) -> Tensor:
    n = _rmsnorm(x, gamma)
    return functional.silu(n @ w1) * (n @ w3)


FUNCTIONS: Mapping[str, Function] = {  # name of the operation → function
    "add": lambda a, b: a + b,
    "attention": _attention,
    "encoder": lambda ids, wte, wpe: wte[ids] + wpe,
    "gelu": _gelu,
    "layernorm": _layernorm,
    "layernorm_gelu": lambda x: _gelu(functional.layer_norm(x, x.shape[-1:])),
    "matmul_bias": lambda a, w, bias: a @ w + bias,
    "rmsnorm": _rmsnorm,
    "rmsnorm_ffn": _rmsnorm_ffn,
    "rmsnorm_matmul": _rmsnorm_matmul,
    "rope": _rope,
    "silu_mul": lambda gate, up: functional.silu(gate) * up,
    "softmax": lambda scores: scores.softmax(dim=-1),
    "trimat": _trimat,
}

# Name of an operation → function of its first input that computes RoPE's cos and sin, outside the
# timing, as inputs of PyTorch's function. gpt2block's kernels compute cos and sin themselves.
PREPARED: Mapping[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "rope": lambda x: _rope_cos_sin(x, x.shape[-1]),
    "rmsnorm_matmul": _rope_cos_sin,
}

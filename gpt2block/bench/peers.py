"""What PyTorch does for the same operation: peers in benchmarks, never a part of a result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from math import sqrt
from typing import Any

from gpt2block.cuda.kernels import FP8
from gpt2block.errors import InputError
from gpt2block.weights.matrix import WeightMatrix

Tensor = Any
HEAD_DIM = 128


def _functional() -> Any:
    from torch.nn import functional  # noqa: PLC0415

    return functional


def _layernorm(x: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    return _functional().layer_norm(x, x.shape[-1:], gamma, beta, 1e-5)


def _layernorm_gelu(x: Tensor) -> Tensor:
    functional = _functional()
    return functional.gelu(functional.layer_norm(x, x.shape[-1:]), approximate="tanh")


def _trimat(qkv: Tensor) -> Tensor:
    """cuBLAS over the full square, on Q and K as they lie; the scale goes onto the smaller Q."""
    q, k = qkv[:, :, 0].transpose(1, 2), qkv[:, :, 1].transpose(1, 2)
    return (q / sqrt(q.shape[-1])) @ k.transpose(-1, -2)


def _attention(qkv: Tensor) -> Tensor:
    """Its own kernels for float32, causal, on Q, K and V as they lie."""
    heads = qkv.unflatten(-1, (3, 12, -1)).movedim(-3, 0).transpose(-2, -3)
    out = _functional().scaled_dot_product_attention(*heads, is_causal=True)
    return out.transpose(-2, -3).flatten(-2)


def _rmsnorm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return _functional().rms_norm(x, x.shape[-1:], weight, eps)


def _turns(x: Tensor, D: int = HEAD_DIM) -> tuple[Tensor, Tensor]:
    """RoPE's cos and sin for the positions of x, in advance; (T, 1, D / 2) each."""
    import torch  # noqa: PLC0415

    T = x.shape[0]
    frequency = 1e4 ** (-torch.arange(0, D, 2, device=x.device, dtype=torch.float64) / D)
    angle = torch.arange(T, device=x.device)[:, None] * frequency
    return angle.cos().float()[:, None], angle.sin().float()[:, None]


def _rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (T, H, D), in real numbers, which the compiler can fuse."""
    import torch  # noqa: PLC0415

    r, i = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((r * cos - i * sin, r * sin + i * cos), -1).flatten(-2).to(x.dtype)


def _rmsnorm_matmul(x: Tensor, gamma: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out = _rmsnorm(x, gamma) @ w
    return _rope(out.unflatten(-1, (-1, HEAD_DIM)), cos, sin).flatten(-2)


def _rmsnorm_ffn(x: Tensor, gamma: Tensor, w1: Tensor, w3: Tensor) -> Tensor:
    n = _rmsnorm(x, gamma)
    return _functional().silu(n @ w1) * (n @ w3)


PEERS: Mapping[str, Callable[..., Tensor]] = {
    "add": lambda a, b: a + b,
    "attention": _attention,
    "encoder": lambda ids, wte, wpe: wte[ids] + wpe,
    "gelu": lambda x: _functional().gelu(x, approximate="tanh"),
    "layernorm": _layernorm,
    "layernorm_gelu": _layernorm_gelu,
    "matmul_bias": lambda a, w, bias: a @ w + bias,
    "rmsnorm": _rmsnorm,
    "rmsnorm_ffn": _rmsnorm_ffn,
    "rmsnorm_matmul": _rmsnorm_matmul,
    "rope": _rope,
    "softmax": lambda scores: scores.softmax(dim=-1),
    "trimat": _trimat,
}


# What an operation computes itself and PyTorch is given in advance, from its first input.
PREPARED: Mapping[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "rope": lambda x: _turns(x, x.shape[-1]),
    "rmsnorm_matmul": _turns,
}


def torch_replays(
    operation: str, sets: list[tuple[Any, ...]], rounds: int
) -> dict[str, Callable[[], None]]:
    """PyTorch on the very CuPy arrays of `sets`, eager and compiled; in float32 without TF32.

    Returns name → replay of a CUDA graph, `rounds` times over all sets. Raises InputError when
    PyTorch is not installed, sees no GPU, or has no such operation here.
    """
    check_peer("torch", operation)
    torch = required_torch()
    tensors = [tuple(tensor(array) for array in arrays) for arrays in sets]
    if operation in PREPARED:
        more = PREPARED[operation](tensors[0][0])
        tensors = [(*arrays, *more) for arrays in tensors]
    functions = {
        "torch": PEERS[operation],
        "torch.compile": torch.compile(PEERS[operation], mode="max-autotune-no-cudagraphs"),
    }
    return {name: captured(each, tensors, rounds)[0] for name, each in functions.items()}


def check_peer(name: str, operation: str) -> None:
    """InputError unless `name` is "torch", which is installed and has such an operation here."""
    if name != "torch":
        raise InputError(f"--peer: expected torch, got {name!r}")
    if operation not in PEERS:
        raise InputError(f"--peer torch: expected one of {', '.join(PEERS)}, got {operation}")
    if find_spec("torch") is None:
        raise InputError("--peer torch: PyTorch is not installed")


def required_torch() -> Any:
    """The module; InputError when it is not there or sees no GPU."""
    try:
        import torch  # noqa: PLC0415
    except ImportError as error:
        raise InputError("--peer torch: PyTorch is not installed") from error
    if not torch.cuda.is_available():
        raise InputError(f"--peer torch: PyTorch {torch.__version__} sees no CUDA device")
    return torch


def captured(
    function: Callable[..., Tensor], sets: list[tuple[Tensor, ...]], rounds: int, tf32: bool = False
) -> tuple[Callable[[], None], list[Tensor]]:
    """What replays a CUDA graph of `function` on all sets, `rounds` times; the last outputs.

    tf32: whether products of float32 may be rounded to TensorFloat-32.
    """
    import torch  # noqa: PLC0415

    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32
    try:
        with torch.no_grad():  # as in the capture: another mode would compile again in there
            for arguments in sets:
                function(*arguments)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # The compiler's own threads may still load kernels, which would end a global capture.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"), torch.no_grad():
            for _ in range(rounds):  # each set's output lives until the next round's
                kept = [function(*arguments) for arguments in sets]
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    return partial(_replay, graph, kept), kept


def tensor(array: Any) -> Tensor:
    """The same memory as a tensor; a weight matrix as (K, N), however it lies."""
    import torch  # noqa: PLC0415

    if isinstance(array, WeightMatrix):
        if array.dtype in FP8:
            raise InputError(f"--peer torch: no PyTorch operation here takes {array.dtype} weights")
        stored = tensor(array.data)
        return stored if array.layout == "KN" else stored.T
    if array.dtype.name == "bfloat16":  # not a type of the exchange protocol for NumPy's kind
        return torch.from_dlpack(array.view("int16")).view(torch.bfloat16)
    return torch.from_dlpack(array)


def _replay(graph: Any, outputs: list[Any]) -> None:
    """`outputs` are arguments only so that they live as long as the graph."""
    graph.replay()

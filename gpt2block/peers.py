"""What PyTorch does for the same operation: peers in benchmarks, never a part of a result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import sqrt
from typing import Any

from gpt2block.errors import InputError

Tensor = Any


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


PEERS: Mapping[str, Callable[..., Tensor]] = {
    "add": lambda a, b: a + b,
    "encoder": lambda ids, wte, wpe: wte[ids] + wpe,
    "gelu": lambda x: _functional().gelu(x, approximate="tanh"),
    "layernorm": _layernorm,
    "layernorm_gelu": _layernorm_gelu,
    "matmul_bias": lambda a, w, bias: a @ w + bias,
    "softmax": lambda scores: scores.softmax(dim=-1),
    "trimat": _trimat,
}


def torch_replays(
    operation: str, sets: list[tuple[Any, ...]], rounds: int
) -> dict[str, Callable[[], None]]:
    """PyTorch on the very CuPy arrays of `sets`, eager and compiled, in float32 without TF32.

    Returns name → replay of a CUDA graph, `rounds` times over all sets. Raises InputError when
    PyTorch is not installed, sees no GPU, or has no such operation here.
    """
    try:
        import torch  # noqa: PLC0415
    except ImportError as error:
        raise InputError("--peer torch: PyTorch is not installed") from error
    if not torch.cuda.is_available():
        raise InputError(f"--peer torch: PyTorch {torch.__version__} sees no CUDA device")
    if operation not in PEERS:
        raise InputError(f"--peer torch: expected one of {', '.join(PEERS)}, got {operation}")
    torch.backends.cuda.matmul.allow_tf32 = False
    tensors = [tuple(torch.from_dlpack(array) for array in arrays) for arrays in sets]
    replays: dict[str, Callable[[], None]] = {}
    functions = {
        "torch": PEERS[operation],
        "torch.compile": torch.compile(PEERS[operation], mode="max-autotune-no-cudagraphs"),
    }
    for name, function in functions.items():
        with torch.no_grad():  # as in the capture: another mode would compile again in there
            for arguments in tensors:
                function(*arguments)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # The compiler's own threads may still load kernels, which would end a global capture.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"), torch.no_grad():
            for _ in range(rounds):  # each set's output lives until the next round's
                kept = [function(*arguments) for arguments in tensors]
        replays[name] = partial(_replay, graph, kept)
    return replays


def _replay(graph: Any, outputs: list[Any]) -> None:
    """`outputs` are arguments only so that they live as long as the graph."""
    graph.replay()

"""What can be compared with PyTorch. It is imported when a peer is requested, and not before."""

from __future__ import annotations

from importlib.util import find_spec
from types import ModuleType

from gpt2block.errors import InputError

OPERATIONS = (  # the names of `torch_functions.FUNCTIONS`
    *("add", "attention", "encoder", "gelu", "layernorm", "layernorm_gelu", "matmul_bias"),
    *("rmsnorm", "rmsnorm_ffn", "rmsnorm_matmul", "rope", "silu_mul", "softmax", "trimat"),
)


def check_peer(name: str | None, operation: str | None = None) -> None:
    """InputError unless `name` is "torch" or None, PyTorch is installed and has the operation."""
    if name is None:
        return
    if name != "torch":
        raise InputError(f"--peer: expected torch, got {name!r}")
    if operation is not None and operation not in OPERATIONS:
        raise InputError(f"--peer torch: expected one of {', '.join(OPERATIONS)}, got {operation}")
    if find_spec("torch") is None:
        raise InputError("--peer torch: PyTorch is not installed")


def torch_peers() -> ModuleType:
    """The module of that name. InputError if PyTorch is not installed or sees no GPU."""
    check_peer("torch")
    import torch  # noqa: PLC0415

    from gpt2block.bench import torch_peers  # noqa: PLC0415

    if not torch.cuda.is_available():
        raise InputError(f"--peer torch: PyTorch {torch.__version__} sees no CUDA device")
    return torch_peers

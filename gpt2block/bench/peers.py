"""List the operations that can be compared with PyTorch; import PyTorch only if requested."""

from __future__ import annotations

from importlib.util import find_spec
from types import ModuleType

from gpt2block.errors import InputError

OPERATIONS = (  # keys of `torch_functions.FUNCTIONS`
    *("add", "attention", "encoder", "gelu", "layernorm", "layernorm_gelu", "matmul_bias"),
    *("rmsnorm", "rmsnorm_ffn", "rmsnorm_matmul", "rope", "silu_mul", "softmax", "trimat"),
)


def check_peer(name: str | None, operation: str | None = None) -> None:
    """Raise InputError unless name is None, or name is "torch" and PyTorch is installed.

    operation: one of OPERATIONS, or None for a check without it.
    """
    if name is None:
        return
    if name != "torch":
        raise InputError(f"--peer: expected torch, got {name!r}")
    if operation is not None and operation not in OPERATIONS:
        raise InputError(f"--peer torch: expected one of {', '.join(OPERATIONS)}, got {operation}")
    if find_spec("torch") is None:
        raise InputError("--peer torch: PyTorch is not installed")


def torch_peers() -> ModuleType:
    """Import the module torch_peers. Raises InputError if PyTorch is missing or sees no GPU."""
    check_peer("torch")
    import torch  # noqa: PLC0415

    from gpt2block.bench import torch_peers  # noqa: PLC0415

    if not torch.cuda.is_available():
        raise InputError(f"--peer torch: PyTorch {torch.__version__} sees no CUDA device")
    return torch_peers

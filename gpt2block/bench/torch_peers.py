"""Contenders of PyTorch: eager, compiled, and its libraries by name; gpt2block itself uses none.

For a block in 16 bits the compiler searches for the fastest products (max-autotune), which takes up
to a minute for each shape, until all searches together have taken SEARCH_S. Otherwise it leaves the
products to cuBLAS, and fuses and tunes the rest: so for float32, where cuBLAS wins anyway, and for
a product with an epilogue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from math import sqrt
from time import perf_counter
from typing import Any

from gpt2block.bench.ceilings import TF32
from gpt2block.bench.contenders import Contender, Run
from gpt2block.bench.measure import Host
from gpt2block.bench.works import NH, AttentionWork, BlockWork, GemmWork, Work
from gpt2block.cuda import cupy
from gpt2block.cuda.kernels import FP8
from gpt2block.errors import InputError
from gpt2block.weights.matrix import WeightMatrix

HEAD_DIM = 128
SEARCH_S = 120.0
SEARCH = "max-autotune-no-cudagraphs"
NO_SEARCH = {"max_autotune_pointwise": True}
BACKENDS = {
    "flash": "FLASH_ATTENTION",
    "cuDNN": "CUDNN_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
}

Tensor = Any
Function = Callable[..., Tensor]


def check_peer(name: str, operation: str) -> None:
    """InputError unless `name` is "torch", PyTorch is installed and the operation is in PEERS."""
    if name != "torch":
        raise InputError(f"--peer: expected torch, got {name!r}")
    if operation not in PEERS:
        raise InputError(f"--peer torch: expected one of {', '.join(PEERS)}, got {operation}")
    if find_spec("torch") is None:
        raise InputError("--peer torch: PyTorch is not installed")


def required_torch() -> Any:
    """The module; InputError if PyTorch is not installed or sees no GPU."""
    try:
        import torch  # noqa: PLC0415
    except ImportError as error:
        raise InputError("--peer torch: PyTorch is not installed") from error
    if not torch.cuda.is_available():
        raise InputError(f"--peer torch: PyTorch {torch.__version__} sees no CUDA device")
    return torch


def operation_peers(
    operation: str, inputs: Sequence[tuple[Any, ...]], dtype: str
) -> list[Contender]:
    """PyTorch's own operation on the CuPy arrays `inputs`, eager and compiled, without TF32.

    Their results are not checked. Raises InputError if PyTorch is not installed, sees no GPU, or
    has no such operation here.
    """
    check_peer("torch", operation)
    torch = required_torch()
    tensors = [tuple(map(tensor, arrays)) for arrays in inputs]
    if operation in PREPARED:
        more = PREPARED[operation](tensors[0][0])
        tensors = [(*arrays, *more) for arrays in tensors]
    eager = PEERS[operation]
    functions = {"torch": eager, "torch.compile": torch.compile(eager, mode=SEARCH)}

    def capture(function: Function, rounds: int) -> Run:
        return captured(function, tensors, rounds)._replace(outs=())

    return [Contender(name, True, partial(capture, f), dtype) for name, f in functions.items()]


def captured(
    function: Function, sets: Sequence[tuple[Tensor, ...]], rounds: int, tf32: bool = False
) -> Run:
    """A CUDA graph of `function` on all sets, `rounds` times, with the first output and the last.

    tf32: whether products of float32 may be rounded to TensorFloat-32.
    """
    import torch  # noqa: PLC0415

    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32
    try:
        with torch.no_grad():  # as in the capture, which must not compile again
            for arguments in sets:
                function(*arguments)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # The compiler's own threads may still load kernels, which would end a global capture.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"), torch.no_grad():
            for _ in range(rounds):  # each set's output lives until that of the next round
                outs = [function(*arguments) for arguments in sets]
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    ends = (outs[0], outs[-1]) if len(outs) > 1 else (outs[0],)
    return Run(graph.replay, ends, (graph, outs, function, sets))


def tensor(array: Any) -> Tensor:
    """The same memory as a tensor; a weight matrix as (K, N) in either layout."""
    import torch  # noqa: PLC0415

    if isinstance(array, WeightMatrix):
        if array.dtype in FP8:
            raise InputError(f"--peer torch: no PyTorch operation here takes {array.dtype} weights")
        stored = tensor(array.data)
        return stored if array.layout == "KN" else stored.T
    if array.dtype.name == "bfloat16":  # not a type of the exchange protocol for NumPy's kind
        return torch.from_dlpack(array.view("int16")).view(torch.bfloat16)
    return torch.from_dlpack(array)


class TorchPeers:
    """PyTorch's contenders for one work after another; limits the time of the compiler's search."""

    def __init__(self, device: int) -> None:
        self._torch = required_torch()
        self._torch.cuda.set_device(device)
        self._searched_s = 0.0

    @property
    def versions(self) -> Mapping[str, str]:
        torch = self._torch
        cudnn = torch.backends.cudnn.version()
        return {"torch": torch.__version__, "torch's CUDA": torch.version.cuda, "cuDNN": str(cudnn)}

    def contenders(self, work: Work, sets: Sequence[Host]) -> Iterator[Contender]:
        """The contenders for a work, on copies of its inputs; capturing shows whether they run."""
        functions = functions_for(work)
        tensors = [arguments_of(work, each) for each in sets]
        with_tf32 = work.dtype == "float32" and work.what != "attention"
        for tf32 in (False, True) if with_tf32 else (False,):
            suffix, arithmetic = (", TF32", TF32) if tf32 else ("", work.dtype)
            for name, function in functions.items():
                capture = partial(_capture, work, function, tensors, tf32)
                yield Contender(name + suffix, True, capture, arithmetic)
            if is_compiled(work):
                first = next(iter(functions.values()))
                compiled, note = self._compiling(work, first, tensors, tf32)
                yield Contender("torch.compile" + suffix, True, compiled, arithmetic, note)

    def _compiling(
        self, work: Work, function: Function, tensors: list[Any], tf32: bool
    ) -> tuple[Callable[[int], Run], Callable[[], str]]:
        """What captures the compiled function, compiled at the first capture, and its note."""
        made: list[Function] = []
        note = ""

        def capture(rounds: int) -> Run:
            nonlocal note
            if made:
                return _capture(work, made[0], tensors, tf32, rounds)
            search = work.what == "block" and work.dtype != "float32"
            search = search and self._searched_s < SEARCH_S
            note = SEARCH if search else "products by cuBLAS, the rest tuned"
            made.append(self.compiled(function, search))
            start = perf_counter()
            found = _capture(work, made[0], tensors, tf32, rounds)
            if search:
                self._searched_s += perf_counter() - start
            return found

        return capture, lambda: note

    def compiled(self, function: Function, search: bool = False) -> Function:
        """The function, compiled for fixed shapes; search: for the fastest products."""
        from torch import _inductor  # noqa: PLC0415
        from torch._inductor import select_algorithm  # noqa: PLC0415

        select_algorithm.PRINT_AUTOTUNE = False  # it prints a table for every product
        options = _inductor.list_mode_options(SEARCH) if search else NO_SEARCH
        compiled: Function = self._torch.compile(function, dynamic=False, options=options)
        return compiled

    def tidy(self) -> None:
        """Free the memory of a work, and what was compiled for its shapes."""
        self._torch.compiler.reset()
        self._torch.cuda.empty_cache()


def _capture(work: Work, function: Function, tensors: list[Any], tf32: bool, rounds: int) -> Run:
    run = captured(function, tensors, rounds, tf32)
    return run._replace(outs=tuple(_array(in_rows(work, out)) for out in run.outs))


def in_rows(work: Work, out: Tensor) -> Tensor:
    """An output in the order of ours: that of attention has the heads before the rows."""
    return out.transpose(-2, -3) if isinstance(work, AttentionWork) else out


def _array(out: Tensor) -> Any:
    import torch  # noqa: PLC0415

    if out.dtype == torch.bfloat16:
        return cupy.from_dlpack(out.view(torch.int16)).view("bfloat16")
    return cupy.from_dlpack(out)


def arguments_of(work: Work, arrays: Host, convert: Callable[[Any], Tensor] = tensor) -> Any:
    """The same memory as tensors, but vectors in the dtype of the first array, for PyTorch."""
    found = [convert(array) for array in arrays.values()]
    matrices = [isinstance(array, WeightMatrix) for array in arrays.values()]
    dtype = found[0].dtype
    return tuple(t if m else t.to(dtype) for t, m in zip(found, matrices, strict=True))


def is_compiled(work: Work) -> bool:
    """Whether the compiler can fuse something."""
    if isinstance(work, GemmWork):
        return work.gelu or work.residual
    return isinstance(work, BlockWork)


def functions_for(work: Work) -> dict[str, Function]:
    """Name → function of the work's tensors; the first one is compiled."""
    if isinstance(work, BlockWork):
        return {"torch": partial(_block, work.weights().eps, work.causal)}
    if isinstance(work, AttentionWork):
        return {
            f"torch, {name}": partial(_attention_by, backend, work.causal)
            for name, backend in BACKENDS.items()
        }
    if isinstance(work, GemmWork) and work.gelu:
        return {"torch": _linear_gelu, "torch, cuBLASLt's GELU": _addmm_gelu}
    if isinstance(work, GemmWork) and work.residual:
        return {"torch": lambda a, w, bias, residual: residual + _linear(a, w, bias)}
    return {"torch": _linear}


def _functional() -> Any:
    from torch.nn import functional  # noqa: PLC0415

    return functional


def _gelu(x: Tensor) -> Tensor:
    return _functional().gelu(x, approximate="tanh")


def _layernorm(x: Tensor, gamma: Tensor, beta: Tensor, eps: float = 1e-5) -> Tensor:
    return _functional().layer_norm(x, x.shape[-1:], gamma, beta, eps)


def _linear(a: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return _functional().linear(a, w.T, bias)


def _linear_gelu(a: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return _gelu(_linear(a, w, bias))


def _addmm_gelu(a: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    """One launch of cuBLASLt with the tanh GELU in its epilogue."""
    import torch  # noqa: PLC0415

    return torch.ops.aten._addmm_activation(bias, a, w, use_gelu=True)


def _heads_first(qkv: Tensor, causal: bool) -> Tensor:
    """Attention of 12 heads on views of the packed rows; (B, NH, T, HS)."""
    heads = qkv.unflatten(-1, (3, NH, -1)).movedim(-3, 0).transpose(-2, -3)
    return _functional().scaled_dot_product_attention(*heads, is_causal=causal)


def _attention(qkv: Tensor, causal: bool = True) -> Tensor:
    """(B, T, C)."""
    return _heads_first(qkv, causal).transpose(-2, -3).flatten(-2)


def _attention_by(backend: str, causal: bool, qkv: Tensor) -> Tensor:
    """(B, NH, T, HS): the time of reordering it to rows is not a part of attention."""
    from torch.nn import attention  # noqa: PLC0415

    with attention.sdpa_kernel(getattr(attention.SDPBackend, backend)):
        return _heads_first(qkv, causal)


def _block(eps: float, causal: bool, x: Tensor, *weights: Tensor) -> Tensor:
    """The weights in the order of `BlockWeights`."""
    gamma1, beta1, w_qkv, b_qkv, w_attn, b_attn, gamma2, beta2, w_fc, b_fc, w_proj, b_proj = weights
    qkv = _linear(_layernorm(x, gamma1, beta1, eps), w_qkv, b_qkv)
    x1 = x + _linear(_attention(qkv, causal), w_attn, b_attn)
    hidden = _linear_gelu(_layernorm(x1, gamma2, beta2, eps), w_fc, b_fc)
    return x1 + _linear(hidden, w_proj, b_proj)


def _trimat(qkv: Tensor) -> Tensor:
    """cuBLAS over the full square, on views of Q and K; the scale is applied to the smaller Q."""
    q, k = qkv[:, :, 0].transpose(1, 2), qkv[:, :, 1].transpose(1, 2)
    return (q / sqrt(q.shape[-1])) @ k.transpose(-1, -2)


def _rmsnorm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return _functional().rms_norm(x, x.shape[-1:], weight, eps)


def _turns(x: Tensor, D: int = HEAD_DIM) -> tuple[Tensor, Tensor]:
    """The cos and sin of RoPE for the positions of x, in advance; (T, 1, D / 2) each."""
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


PEERS: Mapping[str, Function] = {  # by operation
    "add": lambda a, b: a + b,
    "attention": _attention,
    "encoder": lambda ids, wte, wpe: wte[ids] + wpe,
    "gelu": _gelu,
    "layernorm": _layernorm,
    "layernorm_gelu": lambda x: _gelu(_functional().layer_norm(x, x.shape[-1:])),
    "matmul_bias": lambda a, w, bias: a @ w + bias,
    "rmsnorm": _rmsnorm,
    "rmsnorm_ffn": _rmsnorm_ffn,
    "rmsnorm_matmul": _rmsnorm_matmul,
    "rope": _rope,
    "silu_mul": lambda gate, up: _functional().silu(gate) * up,
    "softmax": lambda scores: scores.softmax(dim=-1),
    "trimat": _trimat,
}

# Inputs that gpt2block computes itself and PyTorch gets in advance, from the first input.
PREPARED: Mapping[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "rope": lambda x: _turns(x, x.shape[-1]),
    "rmsnorm_matmul": _turns,
}

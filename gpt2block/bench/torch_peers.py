"""PyTorch's contenders: eager, compiled, and its libraries by name; nothing of ours uses them.

The search for the fastest products (max-autotune) takes up to a minute for each shape of a block.
So it is made for blocks of 16 bits, as long as all searches together have taken less than SEARCH_S.
After that, for float32, where cuBLAS wins anyway, and for a product with something behind it, the
compiler leaves products to cuBLAS, fuses what lies between them and tunes that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any

from gpt2block.bench import peers
from gpt2block.bench.peers import Tensor
from gpt2block.bench.race import TF32, Contender, Run
from gpt2block.bench.works import NH, AttentionWork, BlockWork, GemmWork, Host, Work
from gpt2block.cuda import cupy
from gpt2block.weights.matrix import WeightMatrix

SEARCH_S = 120.0
SEARCH = "max-autotune-no-cudagraphs"
NO_SEARCH = {"max_autotune_pointwise": True}
BACKENDS = {
    "flash": "FLASH_ATTENTION",
    "cuDNN": "CUDNN_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
}

Function = Callable[..., Tensor]


class TorchPeers:
    """The contenders for one work after the other; it remembers how long it has searched."""

    def __init__(self, device: int) -> None:
        self._torch = peers.required_torch()
        self._torch.cuda.set_device(device)
        self._searched_s = 0.0

    @property
    def versions(self) -> Mapping[str, str]:
        torch = self._torch
        cudnn = torch.backends.cudnn.version()
        return {"torch": torch.__version__, "torch's CUDA": torch.version.cuda, "cuDNN": str(cudnn)}

    def contenders(self, work: Work, sets: Sequence[Host]) -> Iterator[Contender]:
        """Those that there are; whether they run shows when they are captured."""
        functions = functions_for(work)
        tensors = [arguments_of(work, each) for each in sets]
        ways = (False, True) if work.dtype == "float32" and work.what != "attention" else (False,)
        for tf32 in ways:
            for name, function in functions.items():
                yield self._contender(work, name, function, tensors, tf32)
            if is_compiled(work):
                yield self._compiled(work, next(iter(functions.values())), tensors, tf32)

    def _contender(
        self, work: Work, name: str, function: Function, tensors: list[Any], tf32: bool
    ) -> Contender:
        return Contender(
            f"{name}, TF32" if tf32 else name,
            True,
            partial(_capture, work, function, tensors, tf32),
            TF32 if tf32 else work.dtype,
        )

    def _compiled(
        self, work: Work, function: Function, tensors: list[Any], tf32: bool
    ) -> Contender:
        """Compiled when it is first captured; for these shapes alone."""
        made: list[Function] = []
        note = ""

        def capture(rounds: int) -> Run:
            nonlocal note
            if made:
                return _capture(work, made[0], tensors, tf32, rounds)
            search = work.what == "block" and work.dtype != "float32"
            search = search and self._searched_s < SEARCH_S
            note = SEARCH if search else "products by cuBLAS, the rest tuned"
            made.append(self._compile(function, search))
            start = perf_counter()
            found = _capture(work, made[0], tensors, tf32, rounds)
            if search:
                self._searched_s += perf_counter() - start
            return found

        name = "torch.compile, TF32" if tf32 else "torch.compile"
        arithmetic = TF32 if tf32 else work.dtype
        return Contender(name, True, capture, arithmetic, lambda: note)

    def _compile(self, function: Function, search: bool) -> Function:
        from torch import _inductor  # noqa: PLC0415
        from torch._inductor import select_algorithm  # noqa: PLC0415

        select_algorithm.PRINT_AUTOTUNE = False  # it prints a table for every product
        options = _inductor.list_mode_options(SEARCH) if search else NO_SEARCH
        compiled: Function = self._torch.compile(function, dynamic=False, options=options)
        return compiled

    def tidy(self) -> None:
        """Give back the memory of a work, and what was compiled for its shapes."""
        self._torch.compiler.reset()
        self._torch.cuda.empty_cache()


def _capture(work: Work, function: Function, tensors: list[Any], tf32: bool, rounds: int) -> Run:
    replay, kept = peers.captured(function, tensors, rounds, tf32)
    ends = (kept[0], kept[-1]) if len(kept) > 1 else (kept[0],)
    return Run(replay, tuple(_array(in_rows(work, each)) for each in ends))


def in_rows(work: Work, out: Tensor) -> Tensor:
    """An output in the order of ours: attention's comes with the heads in front of the rows."""
    return out.transpose(-2, -3) if isinstance(work, AttentionWork) else out


def _array(out: Tensor) -> Any:
    import torch  # noqa: PLC0415

    if out.dtype == torch.bfloat16:
        return cupy.from_dlpack(out.view(torch.int16)).view("bfloat16")
    return cupy.from_dlpack(out)


def arguments_of(work: Work, arrays: Host, tensor: Callable[[Any], Tensor] = peers.tensor) -> Any:
    """The same memory; but small vectors in the dtype of the rest, as PyTorch wants them."""
    first = tensor(next(iter(arrays.values())))
    found = [first]
    for array in list(arrays.values())[1:]:
        same = tensor(array)
        found.append(same if isinstance(array, WeightMatrix) else same.to(first.dtype))
    return tuple(found)


def is_compiled(work: Work) -> bool:
    """Whether there is something to fuse."""
    if isinstance(work, GemmWork):
        return work.gelu or work.residual
    return isinstance(work, BlockWork)


def functions_for(work: Work) -> dict[str, Function]:
    """Name → function of the work's tensors; the first is what is compiled."""
    if isinstance(work, BlockWork):
        return {"torch": partial(_block, work.weights().eps, work.causal)}
    if isinstance(work, AttentionWork):
        return {
            f"torch, {name}": partial(_attention, backend, work.causal)
            for name, backend in BACKENDS.items()
        }
    if isinstance(work, GemmWork) and work.gelu:
        return {"torch": _linear_gelu, "torch, cuBLASLt's GELU": _addmm_gelu}
    if isinstance(work, GemmWork) and work.residual:
        return {"torch": _linear_residual}
    return {"torch": _linear}


def _linear(a: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    from torch.nn import functional  # noqa: PLC0415

    return functional.linear(a, w.T, bias)


def _linear_gelu(a: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    from torch.nn import functional  # noqa: PLC0415

    return functional.gelu(_linear(a, w, bias), approximate="tanh")


def _addmm_gelu(a: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    """One launch of cuBLASLt's with tanh-GELU in its epilogue."""
    import torch  # noqa: PLC0415

    return torch.ops.aten._addmm_activation(bias, a, w, use_gelu=True)


def _linear_residual(a: Tensor, w: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return residual + _linear(a, w, bias)


def _heads(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views (B, NH, T, HS) of packed rows."""
    q, k, v = qkv.unflatten(-1, (3, NH, -1)).movedim(-3, 0).transpose(-2, -3)
    return q, k, v


def _attention(backend: str, causal: bool, qkv: Tensor) -> Tensor:
    """(B, NH, T, HS): what would make rows of it belongs to nobody's figure."""
    from torch.nn import attention, functional  # noqa: PLC0415

    with attention.sdpa_kernel(getattr(attention.SDPBackend, backend)):
        return functional.scaled_dot_product_attention(*_heads(qkv), is_causal=causal)


def _block(
    eps: float,
    causal: bool,
    x: Tensor,
    gamma1: Tensor,
    beta1: Tensor,
    w_qkv: Tensor,
    b_qkv: Tensor,
    w_attn: Tensor,
    b_attn: Tensor,
    gamma2: Tensor,
    beta2: Tensor,
    w_fc: Tensor,
    b_fc: Tensor,
    w_proj: Tensor,
    b_proj: Tensor,
) -> Tensor:
    from torch.nn import functional  # noqa: PLC0415

    width = x.shape[-1:]
    qkv = _linear(functional.layer_norm(x, width, gamma1, beta1, eps), w_qkv, b_qkv)
    seen = functional.scaled_dot_product_attention(*_heads(qkv), is_causal=causal)
    x1 = x + _linear(seen.transpose(-2, -3).flatten(-2), w_attn, b_attn)
    normed = functional.layer_norm(x1, width, gamma2, beta2, eps)
    return x1 + _linear(_linear_gelu(normed, w_fc, b_fc), w_proj, b_proj)

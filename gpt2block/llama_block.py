"""A Llama block: `LlamaBlock(weights)(x)`."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpt2block.architectures import llama
from gpt2block.block import BaseBlock, resolve_device, rounded
from gpt2block.checks import MOST_POSITIONS, check_flag, named_options, plain_array
from gpt2block.config.llama import LlamaConfig
from gpt2block.cuda import cupy
from gpt2block.errors import InputError
from gpt2block.inspect.compare import Comparisons
from gpt2block.ops.attention import SIXTEEN_BITS, check_heads
from gpt2block.parameters.llama import LlamaBlockWeights
from gpt2block.passes.blocks import PassSettings
from gpt2block.run.block import BlockSpec, Given


class LlamaBlock(BaseBlock):
    """A Llama transformer block, computed on a GPU or with NumPy.

    weights: a LlamaBlockWeights. causal: whether row i sees keys 0…i only. device: "cuda",
    "cuda:1", "cpu", or None for the GPU where there is one. graph: replay a CUDA graph for repeated
    calls (same bits as direct launches).

    dtype: dtype of x, the result, all intermediate tensors and the matrices, on a GPU also of
    gamma: "float32", "bfloat16" or "float16". With NumPy a step is computed in float32 and its
    result rounded to the dtype.

    kernels: "skeleton", a step per operation; "fused", in which products fuse residuals and norms;
    "auto" is skeleton for float32 and fused for 16 bits. A name stands for the same tensor in both.
    On a GPU, float32 supports skeleton only, and 16 bits support fused only, with head sizes that
    attention on tensor cores supports.

    Raises InputError for wrong arguments, DeviceError when the device cannot be used.
    """

    @named_options()
    def __init__(
        self,
        weights: LlamaBlockWeights = None,  # type: ignore[assignment]  # the check below names it
        causal: bool = True,
        device: str | None = None,
        dtype: str = "float32",
        kernels: str = "auto",
        graph: bool = True,
    ) -> None:
        self._checked(weights, LlamaBlockWeights, dtype, kernels)
        self.causal, graph = check_flag("causal", causal), check_flag("graph", graph)
        index = resolve_device(device)
        self.dtype = dtype
        fused = "fused" if dtype in SIXTEEN_BITS else "skeleton"
        kernels = fused if kernels == "auto" else kernels
        if index is not None:
            self._check_kernels(weights.config, kernels, fused, index)
        self.weights = rounded(weights, dtype)  # float32 arrays, matrices rounded to dtype
        c = weights.config
        heads = c.n_head, c.n_kv_head, c.eps, c.head_size
        turned = weights.half_split, ("frequencies",)
        settings = PassSettings(*heads, self.causal, *turned, softmax_scale=c.scales.attention)
        spec = BlockSpec(llama, settings, c.n_embd, weights.tensors(), kernels)
        self._start(spec, device, index, graph)

    def _check_kernels(self, config: LlamaConfig, kernels: str, supported: str, index: int) -> None:
        """Raise InputError unless the GPU supports the kernels, heads and dtype of the block."""
        if kernels != supported:
            raise InputError(
                f"kernels {kernels!r}: expected {supported!r} for {self.dtype} on a GPU: use "
                "kernels='auto', or device='cpu'"
            )
        heads = (config.n_head, config.n_kv_head, config.head_size)
        with cupy.cuda.Device(index):
            try:
                check_heads(self.dtype, *heads, self.causal)
            except InputError as problem:
                raise InputError(f"dtype {self.dtype!r}: {problem}") from problem

    def _tensors(self, weights: LlamaBlockWeights) -> dict[str, Any]:
        return {**weights.tensors(), "frequencies": weights.frequencies}

    def __repr__(self) -> str:
        c = self.weights.config
        return (
            f"LlamaBlock(n_embd={c.n_embd}, n_head={c.n_head}, n_kv_head={c.n_kv_head}, "
            f"causal={self.causal}, {self.dtype}, kernels {self.kernels!r}, {self.device}, "
            f"{self.weight_bytes:,} bytes)"
        )

    def __call__(self, x: Any, positions: Any = None, out: Any | None = None) -> Any:
        """Compute the block. x (T, C) or (B, T, C) of the block's dtype → shape and dtype of x.

        positions: T integers on the host, from 0 to 2^31 - 1; None: 0 … T - 1. As for Block, a
        NumPy x gives a NumPy array, and a CUDA array a CuPy array: a new array, or `out`. NaN
        propagates. Raises InputError.
        """
        return self._engine.forward(x, out, _given(positions, x))

    def trace(self, x: Any, positions: Any = None) -> dict[str, Any]:
        """Return a dict from step names, "rms1" to "output", to the steps' results."""
        return self._engine.trace(x, _given(positions, x))

    def compare(self, x: Any, positions: Any = None) -> Comparisons:
        """Compare every step's result, in order, with float64 NumPy; arguments as in `__call__`.

        The float64 run starts from the same x and weights, rounded to the block's dtype.
        """
        return self._compare(x, _given(positions, x))


def _given(positions: Any, x: Any) -> Given:
    """Return the input tensor "positions" of a call: the positions of the rows of x, (T,).

    Raises InputError for wrong positions. The engine checks x.
    """
    shape: tuple[int, ...] = getattr(x, "shape", ())
    T = shape[-2] if len(shape) > 1 else 1
    if positions is None:
        return {"positions": np.arange(T)}
    try:
        found = plain_array("positions", positions)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"positions: expected {T} integers: {error}") from error
    if found.shape != (T,) or found.dtype.kind not in "iu":
        raise InputError(f"positions: expected {T} integers, got {found.dtype} {found.shape}")
    wrong = (found < 0) | (found > MOST_POSITIONS)
    if wrong.any():
        raise InputError(
            f"positions: expected 0 to {MOST_POSITIONS}, got {int(found[wrong.argmax()])}"
        )
    return {"positions": found.astype(np.int64)}

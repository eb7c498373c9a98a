"""A Llama block: `LlamaBlock(weights)(x)`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt2block.architectures.llama import block_plan, fused_plan
from gpt2block.architectures.llama_weights import LlamaBlockWeights
from gpt2block.array_checks import MOST_POSITIONS
from gpt2block.block import Comparisons, check_options, compare_steps, rounded
from gpt2block.checks import check_flag, named_options, plain_array
from gpt2block.errors import InputError, shown
from gpt2block.ops.attention import SIXTEEN_BITS
from gpt2block.run.numpy_block import NumpyEngine


class LlamaBlock:
    """A Llama transformer block with NumPy.

    weights: a LlamaBlockWeights. causal: whether row i sees keys 0…i only. device: "cpu" or None.

    dtype: "float32", "bfloat16" or "float16", of x, the result, all intermediate tensors and the
    matrices. A step is computed in float32 and its result rounded to the dtype.

    kernels: "skeleton", a step per operation; "fused", in which products fuse residuals and norms;
    "auto" is skeleton for float32 and fused for 16 bits. Tensors of the same name are the same.

    Raises InputError for wrong arguments.
    """

    @named_options()
    def __init__(
        self,
        weights: LlamaBlockWeights,
        causal: bool = True,
        device: str | None = None,
        dtype: str = "float32",
        kernels: str = "auto",
    ) -> None:
        if not isinstance(weights, LlamaBlockWeights):
            raise InputError(
                f"weights: expected a LlamaBlockWeights, got {type(weights).__name__}: see "
                "LlamaBlockWeights.from_packed, .random and .from_pretrained"
            )
        if device not in (None, "cpu"):
            raise InputError(f"device: expected 'cpu' or None for a Llama, got {shown(device)}")
        check_options(dtype, kernels)
        self.causal = check_flag("causal", causal)
        self.dtype = dtype
        self.kernels = (
            ("fused" if dtype in SIXTEEN_BITS else "skeleton") if kernels == "auto" else kernels
        )
        self.weights = rounded(weights, dtype)  # float32 arrays of what the steps compute with
        make_plan = fused_plan if self.kernels == "fused" else block_plan
        self.plan = make_plan(weights.config, self.causal, weights.half_split)

    def __repr__(self) -> str:
        c = self.weights.config
        return (
            f"LlamaBlock(n_embd={c.n_embd}, n_head={c.n_head}, n_kv_head={c.n_kv_head}, "
            f"causal={self.causal}, {self.dtype}, kernels {self.kernels!r}, "
            f"{self.weights.nbytes:,} bytes)"
        )

    def __call__(self, x: Any, positions: Any = None, out: Any | None = None) -> Any:
        """The block's output. x (T, C) or (B, T, C) of the block's dtype → the same.

        positions: T integers, from 0 to 2^31 - 1; None: 0 … T - 1. The result is a new array, or
        `out`. NaN propagates. Raises InputError.
        """
        return self._engine(self.weights, x, positions, self.dtype).forward(x, out)

    def trace(self, x: Any, positions: Any = None) -> dict[str, Any]:
        """Step name → its result, for every step of the plan, rms1 … output."""
        return self._engine(self.weights, x, positions, self.dtype).trace(x)

    def compare(self, x: Any, positions: Any = None) -> Comparisons:
        """Compare every step with float64 NumPy, in order. x, positions: as for a call.

        The float64 run starts from the same x and weights, rounded to the block's dtype.
        """
        engine = self._engine(self.weights, x, positions, self.dtype)
        exact = self._engine(self.weights.astype(np.float64), x, positions, None)
        return compare_steps(engine, exact, x, self.dtype)

    def _engine(
        self, weights: LlamaBlockWeights, x: Any, positions: Any, dtype: str | None
    ) -> NumpyEngine:
        """The plan with these positions."""
        given = {"positions": _checked(positions, x), "frequencies": weights.frequencies}
        return NumpyEngine(self.plan, {**weights.tensors(), **given}, weights.n_embd, dtype)


def _checked(positions: Any, x: Any) -> NDArray[np.int64]:
    """Positions of the rows of x, (T,). Raises InputError; a wrong x is left to the engine."""
    shape: tuple[int, ...] = getattr(x, "shape", ())
    T = shape[-2] if len(shape) > 1 else 1
    if positions is None:
        return np.arange(T)
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
    return found.astype(np.int64)

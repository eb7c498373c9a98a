"""The interface of a transformer block on a backend, and checks of its input and output arrays."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt2block import reference
from gpt2block.contract import MATRICES
from gpt2block.cuda.kernels import dtype_name
from gpt2block.engine.model import StepResult
from gpt2block.engine.passes.block_rules import BlockPlan, fused_block_steps
from gpt2block.engine.passes.executor import HI_LO, Executor, Outline, Step
from gpt2block.engine.passes.forward import BlockPass, block
from gpt2block.engine.passes.rewriting import run
from gpt2block.engine.passes.settings import PassSettings
from gpt2block.engine.timeline import Call, Timeline
from gpt2block.errors import InputError
from gpt2block.models.architectures.architecture import Architecture

Given = Mapping[str, NDArray[np.integer]]
NOTHING: Given = {}


@dataclass(frozen=True)
class BlockSpec:
    """Specification of a transformer block: its architecture, settings and kind of kernels.

    width: channels of x. weights: the names of the weights. kernels: "skeleton" for one step per
    operation, or "fused". bounds: the largest magnitude of each result by name, for float32 on
    tensor cores, where operands are stored in two float16 parts; else None.
    """

    of: Architecture
    settings: PassSettings
    width: int
    weights: Collection[str]
    kernels: str
    split_k: bool = False
    bounds: Mapping[str, float] | None = None

    def run(self, do: Executor) -> Any:
        """Run the block's steps with the executor `do` on the tensor "x"; return the result."""
        return run(self.steps, do, self.steps[-1].name)

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """The steps of the block: operations and names of tensors, without arrays."""
        do = Outline({*self.weights, "x", "positions", "frequencies"})
        block(BlockPass(do, self.settings), self.of, "x")
        if self.kernels == "skeleton":
            return tuple(do.steps)
        return tuple(fused_block_steps(do.steps, BlockPlan(self.bounds, self.split_k)))

    @property
    def overlapping(self) -> bool:
        """Whether a kernel may start early and then itself wait for the previous kernel's end."""
        return self.split_k  # true for a fused GPT-2 block

    @cached_property
    def matrices(self) -> frozenset[str]:
        """The names of the weights that products on tensor cores read in the layout (N, K)."""
        inputs = (zip(reference.CONTRACTS[s.op].inputs, s.inputs, strict=False) for s in self.steps)
        return frozenset(
            name for each in inputs for entry, name in each if entry.kind in MATRICES and name
        )

    @property
    def hi_lo(self) -> frozenset[str]:
        """The names of the steps whose result is stored as the sum of two float16 arrays."""
        if self.bounds is None:
            return frozenset()
        made = (s.name for s in self.steps if s.dtype == HI_LO or s.op == "attention")
        return frozenset(made)


class BlockEngine(ABC):
    """Base class of engines that run a block: checks inputs; NumPy inputs give NumPy results.

    given: tensors other than x that can differ in each call: NumPy arrays of integers by name, such
    as positions. The shape of x determines their shapes.
    """

    def __init__(self, spec: BlockSpec, weights: Mapping[str, Any]) -> None:
        self.spec, self._weights = spec, weights

    @property
    def weight_bytes(self) -> int:
        """Bytes of the stored weights."""
        return sum(int(w.nbytes) for w in self._weights.values())

    @abstractmethod
    def forward(self, x: object, out: object | None, given: Given = NOTHING) -> Any:
        """Return the block's output for `x` in `out`, or in a new array if `out` is None."""

    @abstractmethod
    def trace(self, x: object, given: Given = NOTHING) -> dict[str, Any]:
        """Run the block; return a dict from step names to copies of the steps' results."""

    @abstractmethod
    def step(self, step: Step, tensors: Mapping[str, np.ndarray]) -> StepResult:
        """Run and time one step. tensors: dict from names of activations to NumPy arrays."""

    @abstractmethod
    def timed(self, call: Call) -> list[Timeline]:
        """Return a Timeline (times of kernels) of each forward pass that `call` runs."""

    @abstractmethod
    def describe(self) -> str:
        """Return a text that describes the device."""


def check_array(name: str, array: Any, n_embd: int, dtype: str = "float32") -> None:
    """Raise InputError unless `array` has `dtype` and a nonempty shape (T, C) or (B, T, C)."""
    if array.ndim not in (2, 3) or array.shape[-1] != n_embd:
        raise InputError(
            f"{name}: expected shape (T, {n_embd}) or (B, T, {n_embd}), got {array.shape}"
        )
    if array.size == 0:
        raise InputError(f"{name}: expected at least one token, got shape {array.shape}")
    if dtype_name(array.dtype) != dtype:
        target = "ml_dtypes.bfloat16" if dtype == "bfloat16" else f"'{dtype}'"
        raise InputError(f"{name}: expected {dtype}, got {array.dtype}: use .astype({target})")


def check_out(out: Any, shape: tuple[int, ...], kind: Any, dtype: str = "float32") -> None:
    """Raise InputError unless `out` is a writable, C-contiguous `kind` of this shape and dtype."""
    if not isinstance(out, kind) or isinstance(out, np.ma.MaskedArray):
        raise InputError(
            f"out: expected a {kind.__module__.partition('.')[0]} array, got {type(out).__name__}"
        )
    if isinstance(out, np.ndarray) and not out.flags.writeable:
        raise InputError("out: expected a writable array, got a read-only one")
    if out.shape != shape or dtype_name(out.dtype) != dtype or not out.flags.c_contiguous:
        layout = "" if out.flags.c_contiguous else ", not C-contiguous"
        raise InputError(
            f"out: expected a C-contiguous {dtype} array of shape {shape}, "
            f"got {out.dtype} {out.shape}{layout}"
        )

"""Backends that run a plan: NumPy on the CPU, CUDA kernels on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gpt2block.errors import InputError
from gpt2block.plan import Plan, Step

Given = Mapping[str, NDArray[np.integer[Any]]]
NOTHING: Given = {}


@dataclass(frozen=True)
class StepResult:
    """One step run alone: its result, its kernels' names and the time it took."""

    out: NDArray[Any]
    kernel: str
    ms: float


class Engine(Protocol):
    """The backend of a block. It checks its arguments; NumPy in, NumPy out.

    given: inputs of the plan that differ from call to call, besides x: NumPy arrays of integers by
    name, such as positions. Their shapes follow from that of x.
    """

    plan: Plan

    def forward(self, x: Any, out: Any | None, given: Given = NOTHING) -> Any:
        """The plan's output for `x`, written to `out`, or to a new array if `out` is None."""

    def trace(self, x: Any, given: Given = NOTHING) -> dict[str, Any]:
        """Step name → a copy of its result."""

    def step(self, step: Step, tensors: Mapping[str, NDArray[Any]]) -> StepResult:
        """One step on NumPy inputs (activations by name), timed."""

    def describe(self) -> str:
        """A description of the device."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights as they are stored."""


def check_array(name: str, array: Any, n_embd: int, dtype: str = "float32") -> None:
    """Raise InputError unless `array` is of `dtype`, (T, C) or (B, T, C), and not empty."""
    if array.ndim not in (2, 3) or array.shape[-1] != n_embd:
        raise InputError(
            f"{name}: expected shape (T, {n_embd}) or (B, T, {n_embd}), got {array.shape}"
        )
    if array.size == 0:
        raise InputError(f"{name}: expected at least one token, got shape {array.shape}")
    if array.dtype.name != dtype:
        target = "ml_dtypes.bfloat16" if dtype == "bfloat16" else f"'{dtype}'"
        raise InputError(f"{name}: expected {dtype}, got {array.dtype}: use .astype({target})")


def check_out(out: Any, shape: tuple[int, ...], kind: Any, dtype: str = "float32") -> None:
    """Raise InputError unless `out` is a writable C-contiguous `kind` of this shape and dtype."""
    if not isinstance(out, kind) or isinstance(out, np.ma.MaskedArray):
        raise InputError(
            f"out: expected a {kind.__module__.partition('.')[0]} array, got {type(out).__name__}"
        )
    if isinstance(out, np.ndarray) and not out.flags.writeable:
        raise InputError("out: expected a writable array, got a read-only one")
    if out.shape != shape or out.dtype.name != dtype or not out.flags.c_contiguous:
        layout = "" if out.flags.c_contiguous else ", not C-contiguous"
        raise InputError(
            f"out: expected a C-contiguous {dtype} array of shape {shape}, "
            f"got {out.dtype} {out.shape}{layout}"
        )

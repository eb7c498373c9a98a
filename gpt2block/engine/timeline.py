"""Times of the kernels of a forward pass, and bytes that they must move (docs/profile.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from math import prod
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from gpt2block import reference
from gpt2block.contract import MATRICES
from gpt2block.cuda.arrays import ArrayArg, Shape
from gpt2block.engine.passes import BATCH
from gpt2block.engine.passes.executor import Step
from gpt2block.engine.recorder import VIEW, TensorSpec, described
from gpt2block.ops.all_gather import PEER_INPUTS

GATHERED = {
    "encoder_rows": ("wte", "wpe"),
    "take": ("x",),
}  # {operation: inputs of which it reads only some rows}
ACTIVATIONS = frozenset({*BATCH, "x", "hidden"})  # named inputs of a pass that are not weights
# Buffers for converted weights and partial sums, and memory through which GPUs exchange columns.
SCRATCH = "memory", "stream_k_workspace", "workspace", *PEER_INPUTS
OF_EXPERTS = "experts_gated", "experts_down"
STATES = "state", "recent", "pool", "saved", "held"  # inputs of gated delta nets
Call = Callable[[], object]


class BytesMoved(NamedTuple):
    """The least bytes that a step moves, if it reads each input once and writes its result once.

    cache: bytes of the keys and values that attention sees, or of the new keys and values.
    """

    weights: int = 0
    activations: int = 0
    cache: int = 0

    @property
    def total(self) -> int:
        return sum(self)


class KernelTiming(NamedTuple):
    """The times of one kernel of a forward pass on a GPU, or of one step with NumPy.

    step: name of the step, such as "h.3.q". kernel: with NumPy the reference function, which has no
    grid and block. dtype: dtype of the result. weights: dtype of the matrix, "" without a matrix.
    moved: bytes of the step, in the last of its kernels; 0 in its other kernels.

    end: µs from the start of the pass until the kernel has ended. own: µs that the kernel takes
    while nothing else runs. apart: the end in a run in which each kernel waits until the previous
    kernel has ended; equal to `end` if kernels always wait.
    """

    step: str
    op: str
    kernel: str
    grid: Shape
    block: Shape
    dtype: str
    weights: str
    moved: BytesMoved
    end: float = 0.0
    own: float = 0.0
    apart: float = 0.0


class Timeline(NamedTuple):
    """The timed kernels of a forward pass. us: time in µs of the pass plus the sampling after it.

    between: µs between the end of a kernel and a kernel that waits for this end; 0 with NumPy.
    device: the GPU, such as "cuda:1", if the model is on several; else "".
    """

    ran: tuple[KernelTiming, ...]
    us: float
    between: float = 0.0
    device: str = ""

    @property
    def added(self) -> list[float]:
        """µs by which each kernel delays the end of the pass; overlapped time counts once."""
        return [end - start for start, end in pairwise([0.0, *(each.end for each in self.ran)])]

    @property
    def own(self) -> float:
        """Sum of all kernels' `own` times in µs, each measured while no other kernel runs."""
        return sum(each.own for each in self.ran)

    @property
    def apart(self) -> float:
        """µs of the pass without overlap: each kernel waits until the previous kernel has ended."""
        return self.ran[-1].apart + (self.us - self.ran[-1].end)


def moves(op: str, names: Sequence[str], inputs: Sequence[object], out: TensorSpec) -> BytesMoved:
    """Return the least bytes that a step with the operation `op` moves.

    names: name of each input that is a tensor, "" for results. inputs: arrays, None for absent
    inputs; float arrays may be a TensorSpec. out: the result.
    """
    contract = reference.CONTRACTS[op]
    by_name = {entry.name: x for entry, x in zip(contract.inputs, inputs, strict=False)}
    written = {entry.name for entry in contract.outputs}
    weights = activations = cache = 0
    for entry, name in zip(contract.inputs, names, strict=False):
        value = by_name[entry.name]
        if value is None or entry.name in SCRATCH:
            continue
        if entry.name in STATES:
            if (op, entry.name) == ("delta_rule", "state"):  # each slot reads one, writes another
                stored = TensorSpec.of(value)
                cache += stored.nbytes // stored.shape[0] * min(stored.shape[0], out.shape[0])
            continue
        if entry.kind == "kv":
            stored, (new, keys) = TensorSpec.of(value), _tokens(by_name)
            token = stored.nbytes // prod(stored.shape[:2])  # (B, n_ctx, C)
            cache += token * (new if entry.name in written else keys)
            continue
        nbytes = _read(op, entry.name, by_name, out)
        if name and name not in ACTIVATIONS:
            weights += nbytes
        else:
            activations += nbytes
    if contract.outputs and contract.outputs[0].kind != "kv":
        activations += out.nbytes
    return BytesMoved(weights, activations, cache)


def _read(op: str, name: str, inputs: Mapping[str, Any], out: TensorSpec) -> int:
    """Return the bytes that an operation reads of input `name`: all, some rows, or some columns."""
    stored = TensorSpec.of(inputs[name])
    if name in GATHERED.get(op, ()):
        return stored.nbytes // stored.shape[0] * out.shape[0]
    if name == "qkv" and op in ("kv_append", "attention_packed"):  # kv_append reads K, V; else Q
        row, cached = stored.shape[-1], 2 * inputs["k"].shape[-1]
        return int(stored.nbytes * (cached if op == "kv_append" else row - cached) // row)
    if name == "w_down" and "sums" in inputs:  # reads only scales, to add `sums`
        scale = getattr(inputs[name], "scale", None)
        return 0 if scale is None else int(scale.nbytes)
    if op in OF_EXPERTS and name.startswith("w_"):  # a choice may be of an expert of its own
        rows, (choices, width) = next(iter(inputs.values())), out.shape
        n_expert = prod(stored.shape) // (rows.shape[-1] * width)
        return int(stored.nbytes // n_expert * min(n_expert, choices))
    return stored.nbytes


def _tokens(inputs: Mapping[str, object]) -> tuple[int, int]:
    """Return the number of new tokens, and the number of keys that attention reads."""
    if "position" in inputs:
        row, position = on_host(inputs["row"]), on_host(inputs["position"])
        present = row >= 0
        return int(present.sum()), int((position[present] + 1).sum())
    new = np.diff(on_host(inputs["cu_seqlens"]))
    present = new > 0
    return int(new.sum()), int((on_host(inputs["start"]) + new)[present].sum())


def on_host(array: object) -> np.ndarray:
    """Return an integer array as int64 in host memory."""
    host = array.get() if hasattr(array, "get") else array
    return np.asarray(host, np.int64)


def weights_dtype(op: str, inputs: Sequence[object]) -> str:
    """Return the dtype of the first weight matrix that a step reads, or "" if it reads none."""
    for entry, value in zip(reference.CONTRACTS[op].inputs, inputs, strict=False):
        matrix = entry.kind in (*MATRICES, "table") or entry.name == "w"  # matmul_bias has an f32 w
        if matrix and value is not None:
            return described(value)[1]
    return ""


class Clock:
    """Records the times of steps of a NumPy pass, without the time that recording itself takes."""

    def __init__(self) -> None:
        self.ran: list[KernelTiming] = []
        self._noting = 0.0  # seconds
        self._start = perf_counter()

    def note(
        self, step: Step, inputs: Sequence[ArrayArg], out: ArrayArg, began: float, ended: float
    ) -> None:
        """Record a step. inputs: input arrays. began, ended: perf_counter times in seconds."""
        if step.op != VIEW:
            end, own = 1e6 * (ended - self._start - self._noting), 1e6 * (ended - began)
            names = [x if isinstance(x, str) else "" for x in step.inputs]
            stored = TensorSpec.of(out)
            facts = stored.dtype, weights_dtype(step.op, inputs)
            bytes_of = moves(step.op, names, inputs, stored)
            self.ran.append(
                KernelTiming(step.name, step.op, step.op, (), (), *facts, bytes_of, end, own, end)
            )
        self._noting += perf_counter() - ended

    def timeline(self) -> Timeline:
        """Return the Timeline of all steps recorded so far."""
        return Timeline(tuple(self.ran), 1e6 * (perf_counter() - self._start - self._noting))

"""The kernels of a forward pass, their times, and the bytes they must move (docs/profile.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from math import prod
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpt2block import reference
from gpt2block.contract import MATRICES
from gpt2block.cuda.arrays import Shape
from gpt2block.passes import BATCH
from gpt2block.passes.machine import Step
from gpt2block.run.recorder import VIEW, TensorSpec, described

GATHERED = {"encoder_rows": ("wte", "wpe"), "take": ("x",)}  # inputs of which some rows are read
ACTIVATIONS = frozenset({*BATCH, "x", "hidden"})  # tensors of a pass that are no weights
SCRATCH = "memory", "stream_k_workspace"  # buffers for converted weights and for partial sums
Call = Callable[[], Any]


class BytesMoved(NamedTuple):
    """The least bytes that a step moves: its inputs are read once, its result is written once.

    cache: keys and values, those that attention sees, or the new ones.
    """

    weights: int = 0
    activations: int = 0
    cache: int = 0

    @property
    def total(self) -> int:
        return sum(self)


class KernelTiming(NamedTuple):
    """A kernel of a pass, or with NumPy a step.

    step: its name, such as "h.3.q". kernel: with NumPy the function of the reference, which has no
    grid and block. dtype: of the result; weights: of the matrix, "" without one. moved: where a
    step has several kernels, it is that of the last one.

    end: µs from the start of the pass until it has ended, as the pass runs. own: µs that it takes
    while nothing else runs. apart: the end in a run in which each kernel waits until the previous
    one has ended; without such a wait, `end`.
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
    """A pass as it ran. us: its time, until everything after the last step has ended.

    between: µs from a kernel to the next one where that waits for it; 0 with NumPy.
    """

    ran: tuple[KernelTiming, ...]
    us: float
    between: float = 0.0

    @property
    def added(self) -> list[float]:
        """µs by which each kernel lengthens the pass: with gaps, without what overlaps."""
        return [end - start for start, end in pairwise([0.0, *(each.end for each in self.ran)])]

    @property
    def own(self) -> float:
        """The sum of the times of kernels that run alone, in µs."""
        return sum(each.own for each in self.ran)

    @property
    def apart(self) -> float:
        """µs of the pass in which each kernel waits until the previous one has ended."""
        return self.ran[-1].apart + (self.us - self.ran[-1].end)


def moved(op: str, names: Sequence[str], inputs: Sequence[Any], out: TensorSpec) -> BytesMoved:
    """Return the least bytes that a step of an operation moves.

    names: of the tensors among the inputs, "" for results. inputs: arrays, None for absent ones;
    those of floats can be TensorSpec. out: the result.
    """
    contract = reference.CONTRACTS[op]
    given = {entry.name: x for entry, x in zip(contract.inputs, inputs, strict=False)}
    written = {entry.name for entry in contract.outputs}
    weights = activations = cache = 0
    for entry, name in zip(contract.inputs, names, strict=False):
        value = given[entry.name]
        if value is None or entry.name in SCRATCH:
            continue
        if entry.kind == "kv":
            stored, (new, keys) = TensorSpec.of(value), _tokens(given)
            token = stored.nbytes // prod(stored.shape[:2])  # (B, n_ctx, C)
            cache += token * (new if entry.name in written else keys)
            continue
        nbytes = _read(op, entry.name, given, out)
        if name and name not in ACTIVATIONS:
            weights += nbytes
        else:
            activations += nbytes
    if contract.outputs and contract.outputs[0].kind != "kv":
        activations += out.nbytes
    return BytesMoved(weights, activations, cache)


def _read(op: str, name: str, given: Mapping[str, Any], out: TensorSpec) -> int:
    """The bytes of an input that an operation reads, of some only a part."""
    stored = TensorSpec.of(given[name])
    if name in GATHERED.get(op, ()):
        return stored.nbytes // stored.shape[0] * out.shape[0]
    if name == "qkv" and op in ("kv_append", "attention_packed"):  # [Q | K | V]; the cache has K, V
        row, cached = stored.shape[-1], 2 * given["k"].shape[-1]
        return int(stored.nbytes * (cached if op == "kv_append" else row - cached) // row)
    if name == "w_down" and "sums" in given:  # of products with it, which need its scales
        scale = getattr(given[name], "scale", None)
        return 0 if scale is None else int(scale.nbytes)
    return stored.nbytes


def _tokens(given: Mapping[str, Any]) -> tuple[int, int]:
    """The tokens of a step that reads or writes a kv_cache, and the keys that they see."""
    if "position" in given:
        row, position = on_host(given["row"]), on_host(given["position"])
        present = row >= 0
        return int(present.sum()), int((position[present] + 1).sum())
    new = np.diff(on_host(given["cu_seqlens"]))
    present = new > 0
    return int(new.sum()), int((on_host(given["start"]) + new)[present].sum())


def on_host(array: Any) -> NDArray[Any]:
    """An array of integers in host memory, int64."""
    host = array.get() if hasattr(array, "get") else array
    return np.asarray(host, np.int64)


def weights_dtype(op: str, inputs: Sequence[Any]) -> str:
    """The dtype of the first matrix that a step reads, "" without one."""
    entries = reference.CONTRACTS[op].inputs
    for entry, value in zip(entries, inputs, strict=False):
        matrix = entry.kind in (*MATRICES, "table") or entry.name == "w"  # matmul_bias takes arrays
        if matrix and value is not None:
            return described(value)[1]
    return ""


class Clock:
    """Notes the steps of a pass with NumPy; the time that this takes is left out."""

    def __init__(self) -> None:
        self.ran: list[KernelTiming] = []
        self._noting = 0.0  # seconds
        self._start = perf_counter()

    def note(self, step: Step, inputs: Sequence[Any], out: Any, began: float, ended: float) -> None:
        """A step that ran between two values of perf_counter. inputs: its arrays."""
        if step.op != VIEW:
            end, own = 1e6 * (ended - self._start - self._noting), 1e6 * (ended - began)
            names = [x if isinstance(x, str) else "" for x in step.inputs]
            stored = TensorSpec.of(out)
            facts = stored.dtype, weights_dtype(step.op, inputs)
            bytes_of = moved(step.op, names, inputs, stored)
            self.ran.append(
                KernelTiming(step.name, step.op, step.op, (), (), *facts, bytes_of, end, own, end)
            )
        self._noting += perf_counter() - ended

    def timeline(self) -> Timeline:
        """Everything up to now."""
        return Timeline(tuple(self.ran), 1e6 * (perf_counter() - self._start - self._noting))

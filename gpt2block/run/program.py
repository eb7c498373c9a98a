"""Run plans on a GPU: a Program is a plan whose launches are bound to arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpt2block import reference
from gpt2block.cuda import cupy, overlap
from gpt2block.cuda.arrays import Bound, CudaArray
from gpt2block.cuda.kernels import Launch
from gpt2block.cuda.timing import event_ms
from gpt2block.ops.attention import bind as bind_attention
from gpt2block.ops.attention_cached import bind as bind_attention_packed
from gpt2block.ops.attention_cached import bind_append, bind_round, bind_split
from gpt2block.ops.linear import bind_qkv
from gpt2block.ops.linear_rope import bind as bind_linear_rope
from gpt2block.ops.registry import OPERATIONS
from gpt2block.ops.rope_qkv import bind_append as bind_rope_append
from gpt2block.ops.rope_qkv import bind_rotations
from gpt2block.ops.two_part import bind as bind_two_part
from gpt2block.ops.two_part import bind_take
from gpt2block.plan import Plan, Step
from gpt2block.weights.two_part import TwoPartMatrix


class _Take(NamedTuple):
    """Copies rows of `source` to `out` with a CuPy kernel."""

    source: CudaArray
    indices: CudaArray
    out: CudaArray
    name: str = "take"

    def run(self) -> None:
        cupy.take(self.source, self.indices, axis=0, out=self.out)


Runnable = Launch | _Take


def _take(inputs: tuple[Any, ...], out: CudaArray | None = None) -> Bound:
    source, indices = inputs
    if isinstance(source, TwoPartMatrix):
        return bind_take(inputs, out)
    if out is None:
        out = cupy.empty((len(indices), *source.shape[1:]), source.dtype)
    return Bound(out, (_Take(source, indices, out),))  # type: ignore[arg-type]


def _append(inputs: tuple[Any, ...], out: None = None, **options: Any) -> Bound:
    qkv, k, v, row, position = inputs
    return bind_append((qkv, row, position), (k, v), **options)


def _qkv(inputs: tuple[Any, ...], out: CudaArray | None = None, **options: Any) -> Bound:
    x, w, bias, gamma, beta, k, v, row, position = inputs
    return bind_qkv(x, w, bias, gamma, beta, k, v, row, position, out, **options)


def _varlen(inputs: tuple[Any, ...], out: Any, **options: Any) -> Bound:
    qkv, cu_seqlens = inputs
    return bind_attention((qkv,), out, cu_seqlens=cu_seqlens, **options)


# Steps of plans without an Operation of their own, with the signature of `Operation.bind`.
BINDERS: Mapping[str, Callable[..., Bound]] = {
    "take": _take,
    "rows": lambda inputs, out, first, end: Bound(inputs[0][first:end], ()),
    "kv_append": _append,
    "kv_round": bind_round,
    "attention_packed": bind_attention_packed,
    "two_part": bind_two_part,
    "attention_varlen": _varlen,
    "attention_split": bind_split,
    "rope_append": bind_rope_append,
    "linear_qkv": _qkv,
    "linear_rope": bind_linear_rope,
    "rotations": bind_rotations,
}


def bind_step(step: Step, tensors: Mapping[str, Any], out: Any = None) -> Bound:
    """Bind a step to arrays by name; `out` is allocated if it is None."""
    inputs = tuple(tensors[name] if name else None for name in step.inputs)
    bind = BINDERS[step.op] if step.op in BINDERS else OPERATIONS[step.op].bind
    return bind(inputs, out, **step.attrs)


class Program:
    """A plan bound to arrays on the current device. It keeps them alive, except the borrowed ones.

    tensors: the plan's inputs by name, and storage for its steps. An in-place step uses the storage
    of the tensor it overwrites; missing storage is allocated. known: steps that are already bound
    to the same arrays. after: launches after the last step, such as a sampler's. borrowed: names of
    tensors that the caller keeps alive during a run; a trace cannot read them.
    """

    def __init__(
        self,
        plan: Plan,
        tensors: Mapping[str, Any],
        known: Mapping[str, Bound] | None = None,
        after: Iterable[Bound] = (),
        borrowed: Iterable[str] = (),
    ) -> None:
        self.plan = plan
        self.tensors = dict(tensors)
        self.bounds: dict[str, Bound] = {}
        for step in plan.steps:
            bound = known.get(step.name) if known else None
            if bound is None:
                out = self.tensors.get(step.name, self.tensors.get(plan.buffer(step.name)))
                bound = bind_step(step, self.tensors, out)
            self.bounds[step.name] = bound
            self.tensors[step.name] = bound.out
        for name in borrowed:
            del self.tensors[name]
            if name in self.bounds:
                self.bounds[name] = self.bounds[name]._replace(out=None)
        self._after = tuple(after)
        self._ran = False
        self._graph: Any = None

    @property
    def out(self) -> Any:
        """The last step's result."""
        return self.tensors[self.plan.output]

    @property
    def launches(self) -> tuple[Runnable, ...]:
        bounds = (*self.bounds.values(), *self._after)
        return tuple(launch for bound in bounds for launch in bound.launches)

    def run(self) -> None:
        """Launch everything on the current stream."""
        self.run_steps()
        for bound in self._after:
            bound.run()

    def run_steps(self) -> None:
        for name in self.bounds:
            self.run_step(name)

    def run_step(self, name: str) -> None:
        """Launch a step, in an NVTX range of its name for profilers."""
        cupy.cuda.nvtx.RangePush(name)
        try:
            for launch in self.bounds[name].launches:
                launch.run()
        finally:
            cupy.cuda.nvtx.RangePop()

    def replay(self, stream: Any, private: Any) -> None:
        """Run as a CUDA graph on `stream`. The first call captures it on the stream `private`.

        Every kernel must be loaded already, by a run of this program or of another one.
        """
        if self._graph is None:
            self._graph = capture(self.launches, private, self.plan.overlapping)
        self._graph.launch(stream)

    def repeat(self, stream: Any) -> None:
        """Run on `stream`, the current one; from the second call on as a CUDA graph."""
        if self._ran:
            self.replay(stream, stream)
        else:
            self.run()
        self._ran = True

    def trace(self, names: Iterable[str] | None = None) -> dict[str, CudaArray]:
        """Run the steps; return copies of the results of `names`, or of all steps if None."""
        wanted = set(self.plan.names if names is None else names)
        copies = {}
        for name in self.bounds:
            self.run_step(name)
            if name in wanted:
                made = self.tensors[name]
                copies[name] = made.joined() if isinstance(made, TwoPartMatrix) else made.copy()
        return copies

    def run_alone(
        self, exact: Mapping[str, NDArray[Any]]
    ) -> Iterator[tuple[str, str, NDArray[Any], float]]:
        """Run each step alone on exact inputs, rounded to the dtype of their storage.

        exact: float64 tensors by name, of the plan's steps and K and V of a kv_cache, (B, T, C).
        Yields name, kernels' names, result and time in milliseconds of every step that has an
        exact tensor. The kernels must be loaded already, as by `trace`.
        """
        for step in self.plan.steps:
            for name in step.inputs:
                if name in exact:
                    _fill(self.tensors[name], exact[name], step.attrs.get("kv_dtype"))
            ms = event_ms(partial(self.run_step, step.name))
            if step.name in exact:
                kernels = ", ".join(launch.name for launch in self.bounds[step.name].launches)
                yield step.name, kernels, self.tensors[step.name].get(), ms


def _fill(array: CudaArray, exact: NDArray[Any], kv_dtype: str | None) -> None:
    """Copy `exact` to the leading part of an array, rounded to its dtype, or to two parts.

    kv_dtype: the FP8 format of arrays of uint8.
    """
    if isinstance(array, TwoPartMatrix):
        parts, scale = reference.two_part(exact.astype(np.float32))
        if array.one_scale is not None:
            parts, scale = _with_scale(exact, array.one_scale)
        array.parts[...] = cupy.asarray(parts)
        array.scale[...] = cupy.asarray(scale)
        return
    part = array[tuple(slice(n) for n in exact.shape)]
    if kv_dtype is not None and array.dtype == np.uint8:
        part[...] = cupy.asarray(reference.to_fp8(exact, kv_dtype))
    else:
        part[...] = cupy.asarray(exact.astype(np.float32)).astype(array.dtype)


def _with_scale(x: NDArray[Any], scale: float) -> tuple[NDArray[Any], NDArray[Any]]:
    """`reference.two_part` with a given scale for all rows."""
    scaled = (x / scale).astype(np.float32)
    high = scaled.astype(np.float16)
    low = ((scaled - high) * np.float32(2048)).astype(np.float16)
    return np.stack([high, low]), np.full(len(x), scale, np.float32)


def capture(launches: Iterable[Runnable], stream: Any, overlapping: bool) -> Any:
    """A CUDA graph of launches; overlapping: each may start before the previous one has ended."""
    early = overlapping and overlap.possible()
    with stream:
        stream.begin_capture()
        try:
            for launch in launches:
                if early and isinstance(launch, Launch):
                    overlap.run(launch)
                else:
                    launch.run()
        finally:
            graph = stream.end_capture()
    return graph

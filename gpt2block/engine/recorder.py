"""Bind the steps of a forward pass to arrays, and allocate memory for their results.

A step's result is a part of an arena, which is freed when Python drops the result. A pass drops
results that no later step reads, and steps are bound in the order in which they will run.
Recordings that never run at the same time can share an arena.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left, insort
from collections.abc import Collection, Hashable, Mapping
from functools import cached_property, lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from gpt2block import reference
from gpt2block.contract import MATRICES, Sizes
from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import ArrayArg, ArrayArgs, CudaArray, Shape
from gpt2block.cuda.kernels import dtype_name
from gpt2block.cuda.requests import Launch
from gpt2block.engine.passes.executor import HI_LO, Executor, Step
from gpt2block.models.architectures.architecture import Value
from gpt2block.models.weights.hi_lo import HiLoMatrix, scale_for
from gpt2block.models.weights.matrix import WeightMatrix
from gpt2block.ops.call import FIXED
from gpt2block.ops.recipe import Recipe, addresses_of, signature_of
from gpt2block.ops.registry import BY_NAME

VIEW = "rows"  # name of the operation whose result is a NumPy-style view of its input
ALIGNMENT = 512  # alignment, in bytes, of each array in an arena
_scale_for = lru_cache(maxsize=4096)(scale_for)  # cached: all layers have the same bounds
OPEN = ("any", "strided", "mixed")  # kinds (see `contract`) whose arrays have one common dtype


def bytes_of(shape: Shape, dtype: DTypeLike) -> int:
    return prod(shape) * int(np.dtype(dtype).itemsize)


class ArenaFull(Exception):  # noqa: N818  (the caller takes a larger arena)
    """Raised if the free bytes of an arena (a preallocated buffer) do not suffice."""


class Offsets:
    """Allocator of ranges of one buffer; each begins at the lowest offset with enough free bytes.

    limit: bytes of the buffer; None: unlimited. `peak` is the end of the highest range so far.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit, self.peak = limit, 0
        self._taken: list[tuple[int, int]] = []  # (first byte, end) of allocated ranges, sorted

    def take(self, nbytes: int) -> int:
        """Allocate `nbytes` bytes; return the offset of the first byte. Raises ArenaFull."""
        size = -(-max(1, nbytes) // ALIGNMENT) * ALIGNMENT
        at = 0
        for first, end in self._taken:
            if at + size <= first:
                break
            at = end
        if self.limit is not None and at + size > self.limit:
            raise ArenaFull
        insort(self._taken, (at, at + size))
        self.peak = max(self.peak, at + size)
        return at

    def give_back(self, at: int) -> None:
        """Free the allocated range that begins at offset `at`, in bytes."""
        del self._taken[bisect_left(self._taken, (at, 0))]


class Lease:
    """A byte range of an arena, which is freed when the Lease is garbage-collected."""

    def __init__(self, offsets: Offsets, nbytes: int) -> None:
        """Allocate `nbytes` bytes in `offsets`. Raises ArenaFull."""
        self.at = offsets.take(nbytes)
        self._offsets = offsets

    def __del__(self) -> None:
        if hasattr(self, "_offsets"):  # absent if __init__ raised ArenaFull
            self._offsets.give_back(self.at)


class Arena:
    """A buffer of `nbytes` bytes on the current device, in which arrays are allocated."""

    def __init__(self, nbytes: int) -> None:
        self._memory = cupy.zeros(max(ALIGNMENT, nbytes), "uint8")
        self._offsets = Offsets(nbytes)
        self._filled: dict[tuple[str, float], CudaArray] = {}

    @property
    def nbytes(self) -> int:
        return int(self._memory.nbytes)

    def empty(self, shape: Shape, dtype: DTypeLike) -> CudaArray:
        """Return a new array, freed when Python drops it and its views. Raises ArenaFull."""
        nbytes = bytes_of(shape, dtype)
        lease = Lease(self._offsets, nbytes)
        base = self._memory.data
        owner = cupy.cuda.UnownedMemory(base.ptr + lease.at, nbytes, lease, base.device_id)
        return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(owner, 0))

    def filled(self, name: str, rows: int, value: float) -> CudaArray:
        """Return a float32 array (rows,) filled with `value`, outside the arena's buffer.

        Arrays of the same name are shared by all layers.
        """
        known = self._filled.get((name, value))
        if known is None or len(known) < rows:
            known = self._filled[name, value] = cupy.full((rows,), value, "float32")
        return known[:rows]

    def view(self, array: CudaArray) -> CudaArray:
        """Return a view that does not keep an arena's array allocated; other arrays unchanged."""
        offset = array.data.ptr - self._memory.data.ptr
        if not 0 <= offset < self._memory.nbytes:
            return array
        part = self._memory[offset : offset + array.nbytes]
        return part.view(array.dtype).reshape(array.shape)


class TensorSpec(NamedTuple):
    """Shape, dtype and bytes of an array or matrix in memory."""

    shape: Shape
    dtype: str
    nbytes: int

    @classmethod
    def of(cls, array: Any) -> TensorSpec:
        """Return the TensorSpec of `array`: an array, a matrix or another TensorSpec."""
        return cls(*described(array), int(array.nbytes))


def described(array: Any) -> tuple[Shape, str]:
    """Return shape and dtype of a tensor; for matrices, as stored in memory."""
    if isinstance(array, HiLoMatrix):
        return array.shape, HI_LO
    if isinstance(array, WeightMatrix):
        return array.stored_shape, array.dtype
    if isinstance(array, TensorSpec):
        return array.shape, array.dtype
    return array.shape, dtype_name(array.dtype)


class Result:
    """The result of a step while later steps need it. array: a CuPy array or HiLoMatrix."""

    __slots__ = ("array", "dtype", "name", "overwritten", "shape")

    def __init__(self, name: str, shape: Shape, dtype: str, array: Any) -> None:
        self.name, self.shape, self.dtype, self.array = name, shape, dtype, array
        self.overwritten = ""  # name of the step that overwrote the result


class Recorded(NamedTuple):
    """A recorded step. key: equal keys mean equal launches. result: None if the caller keeps it.

    extra: other arrays that the launches use.
    """

    step: Step
    launches: tuple[Launch, ...]
    key: tuple[object, ...]
    result: Any
    extra: tuple[CudaArray, ...]


class Recorder(Executor):
    """Base class of Binder and Measure: determines shapes, dtypes and memory of results of steps.

    outs: arrays for some of the results, by name.
    """

    def __init__(
        self, tensors: Mapping[str, ArrayArg], outs: Mapping[str, object] | None = None
    ) -> None:
        super().__init__(tensors)
        self.outs = dict(outs or {})

    def do(self, step: Step, into: Value) -> Result:
        name, op, inputs, attrs, dtype, bound, _ = step
        results = [self._result(name, each) for each in inputs]
        first, changes = results[0], op == VIEW
        if changes and first:
            result = self._rows(name, first, attrs["first"], attrs["end"])
        else:
            changed = reference.CONTRACTS[op].changed
            target = into if changed is None else results[changed]
            if target is not None:
                result = Result(name, target.shape, target.dtype, target.array)
                target.overwritten = name
            else:
                kinds = tuple([each and (each.shape, each.dtype) for each in results])
                sizes = tuple([pair for pair in attrs.items() if type(pair[1]) is int])
                result = self._new(name, *result_of(op, kinds, sizes, dtype), bound)
            changes = changed is not None
        names = tuple([each.name if each else "" for each in results])
        out = None if changes else result.array
        arrays = tuple([each.array if each else None for each in results])
        self._bind(Step(name, op, names, attrs, dtype, bound), arrays, out, result)
        return result

    def _result(self, name: str, value: Any) -> Result | None:
        """Return `value` if it is a Result, else the tensor named `value`, or None if absent."""
        if isinstance(value, Result):
            if value.overwritten:
                raise RuntimeError(f"{name}: reads {value.name}: {value.overwritten} overwrote it")
            return value
        array = self.tensors.get(value)
        return None if array is None else Result(value, *described(array), array)

    def _new(self, name: str, shape: Shape, dtype: str, bound: float | None) -> Result:
        array = self.outs.get(name)
        if array is None:
            array = self._allocated(name, shape, dtype, bound)
        return Result(name, shape, dtype, array)

    def _rows(self, name: str, x: Result, first: int, end: int) -> Result:
        return Result(name, (end - first, *x.shape[1:]), x.dtype, x.array[first:end])

    @abstractmethod
    def _allocated(self, name: str, shape: Shape, dtype: str, bound: float | None) -> Any:
        """Allocate and return the array or matrix for a result."""

    @abstractmethod
    def _bind(self, step: Step, inputs: ArrayArgs, out: ArrayArg, made: Result) -> None:
        """Bind a step to its arrays. out: output array; None if the step changes an input."""


@lru_cache(maxsize=4096)  # all layers have equal shapes, so most calls repeat
def result_of(
    op: str,
    given: tuple[tuple[Shape, str] | None, ...],
    attrs: tuple[tuple[str, int], ...],
    dtype: str | None,
) -> tuple[Shape, str]:
    """Return the shape and the dtype name of an operation's first output.

    given: shape and dtype of each input. attrs: the attributes that are sizes. dtype: the output's
    dtype, if the contract does not determine it.
    """
    contract = reference.CONTRACTS[op]
    sizes: Sizes = dict(attrs)
    storage = None
    for entry, value in zip(contract.inputs, given, strict=False):
        if value is not None:
            shape, of_input = value
            in_rows = entry.kind in MATRICES  # axes (K, N) of an array stored as (N, K)
            entry.fits(shape[::-1] if in_rows else shape, sizes)
            storage = storage or (of_input if entry.kind in OPEN else None)
    out = contract.outputs[0]
    open_dtype = storage if storage != HI_LO or out.kind in OPEN else "float32"
    kind = HI_LO if out.kind == HI_LO else str(open_dtype)
    return out.shape(sizes), dtype or FIXED.get(out.kind) or kind


class _Leased:
    """A stand-in for an array without memory: it only reserves byte ranges in an Offsets."""

    def __init__(self, *leases: Lease) -> None:
        self._leases = leases

    def __getitem__(self, rows: slice) -> _Leased:
        return self


class Measure(Recorder):
    """Computes `peak`, the bytes that an arena needs for a pass, without allocating memory."""

    @cached_property
    def _offsets(self) -> Offsets:
        return Offsets()

    @property
    def peak(self) -> int:
        return self._offsets.peak

    def _allocated(self, name: str, shape: Shape, dtype: str, bound: float | None) -> _Leased:
        if dtype != HI_LO:
            return _Leased(Lease(self._offsets, bytes_of(shape, dtype)))
        parts = Lease(self._offsets, bytes_of((2, *shape), "float16"))
        scales = bytes_of(shape[:-1], "float32")
        return _Leased(parts, *((Lease(self._offsets, scales),) if bound is None else ()))

    def _bind(self, step: Step, inputs: ArrayArgs, out: ArrayArg, made: Result) -> None:
        pass


class Binder(Recorder):
    """Binds the steps of a pass to arrays on the current device: creates their launches.

    known: earlier recorded steps by name, reused if arrays and options are the same. borrowed:
    names of results that the caller keeps alive during a run; the Binder does not.
    """

    def __init__(
        self,
        tensors: Mapping[str, ArrayArg],
        arena: Arena,
        outs: Mapping[str, ArrayArg] | None = None,
        known: Mapping[str, Recorded] | None = None,
        borrowed: Collection[str] = (),
    ) -> None:
        super().__init__(tensors, outs)
        self.steps: dict[str, Recorded] = {}
        self._arena, self._known, self._borrowed = arena, known or {}, borrowed
        self._recipes: dict[Hashable, tuple[Recipe | None, tuple[Any, ...], tuple[int, ...]]] = {}

    def _allocated(self, name: str, shape: Shape, dtype: str, bound: float | None) -> Any:
        if dtype != HI_LO:
            return self._arena.empty(shape, dtype)
        rows = int(np.prod(shape[:-1]))
        parts = self._arena.empty((2, rows, shape[-1]), "float16")
        one_scale = None if bound is None else _scale_for(bound)
        if one_scale is None:
            scale = self._arena.empty((rows,), "float32")
        else:
            scale = self._arena.filled(name.rpartition(".")[2], rows, one_scale)
        return HiLoMatrix.trusted(parts=parts, scale=scale, shape=shape, one_scale=one_scale)

    def _bind(self, step: Step, inputs: ArrayArgs, out: ArrayArg, made: Result) -> None:
        places, kind = signature_of((*inputs, made.array), step.attrs.values())
        key = step.op, out is None, places, kind, tuple(step.attrs)
        known = self._known.get(step.name)
        if known is not None and known.key == key:
            launches, extra = known.launches, known.extra
        elif step.op == VIEW:
            launches, extra = (), ()
        else:
            launches, extra = self._launches(step, inputs, out, kind, places)
        result = None if step.name in self._borrowed else self.views_of(made.array)
        self.steps[step.name] = Recorded(step, launches, key, result, extra)

    def _launches(
        self, step: Step, inputs: ArrayArgs, out: ArrayArg, kind: Hashable, places: tuple[int, ...]
    ) -> tuple[tuple[Launch, ...], tuple[CudaArray, ...]]:
        """Return a step's launches and auxiliary arrays; one derivation serves all layers."""
        alike = step.op, out is None, kind, tuple(step.attrs)
        recipe, extra, further = self._recipes.get(alike, (None, (), ()))
        if recipe is not None:
            return recipe.at((*places, *further)), extra
        _, launches, extra = BY_NAME[step.op].bind_on_device(inputs, out, **step.attrs)
        to_peers = step.attrs.get("to_peers")
        further = (*addresses_of(extra), *(to_peers.addresses if to_peers else ()))
        self._recipes[alike] = Recipe.of(launches, (*places, *further)), extra, further
        return launches, extra

    def views_of(self, value: Any) -> Any:
        """Return an array or matrix as views that do not keep the arena's memory allocated."""
        view = self._arena.view
        if not isinstance(value, HiLoMatrix):
            return view(value)
        parts, scale = view(value.parts), view(value.scale)
        return HiLoMatrix.trusted(**{**vars(value), "parts": parts, "scale": scale})


def rounded_up(n: int, steps: int) -> int:
    """Round n up to a multiple of p / steps; p is the greatest power of two that is at most n."""
    step = max(1, (1 << max(0, n.bit_length() - 1)) // steps)
    return -(-n // step) * step

"""A forward pass as kernels: running it with a Recording binds its steps to arrays.

A recording runs at once or as a CUDA graph, traces its results, and times each step alone. Results
are parts of an arena, which Python frees as the pass drops them: launches keep no array alive.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpt2block import reference
from gpt2block.contract import MATRICES, Sizes, contract_of
from gpt2block.cuda import cupy, overlap
from gpt2block.cuda.arena import Arena, ArenaFull, Lease, Offsets, bytes_of
from gpt2block.cuda.arrays import Bound, CudaArray, Shape, mapped
from gpt2block.cuda.requests import Launch
from gpt2block.cuda.timing import event_ms
from gpt2block.ops import registry
from gpt2block.ops.call import FIXED
from gpt2block.ops.recipe import Recipe, addresses_of, alike, exactly
from gpt2block.passes.machine import TWO_PART, Machine, Step, Value
from gpt2block.run.model import StepResult, rounded_up
from gpt2block.run.timeline import VIEW, Stored, described
from gpt2block.weights.two_part import TwoPartMatrix, scale_for

RUNS = 5  # of a step that is timed alone
STEPS_OF_SIZE = 4  # sizes of an arena between two powers of two
OPEN = ("any", "strided", "mixed")  # kinds of arrays that share their dtype


class Result:
    """The result of a step while its pass needs it. array: CuPy, or a TwoPartMatrix."""

    __slots__ = ("array", "dtype", "name", "overwritten", "shape")

    def __init__(self, name: str, shape: Shape, dtype: str, array: Any) -> None:
        self.name, self.shape, self.dtype, self.array = name, shape, dtype, array
        self.overwritten = ""  # by the step of this name


class Recorded(NamedTuple):
    """A step bound to arrays. key: what determines its launches; result: None if borrowed.

    extra: other arrays that the launches use.
    """

    step: Step
    launches: tuple[Launch, ...]
    key: tuple[Any, ...]
    result: Any
    extra: tuple[Any, ...]


class Recorder(Machine):
    """What recordings have in common with the measurement of their memory: results and names.

    outs: arrays for some of the results, by name.
    """

    def __init__(self, tensors: Mapping[str, Any], outs: Mapping[str, Any] | None = None) -> None:
        super().__init__(tensors)
        self._outs = dict(outs or {})

    def do(self, step: Step, into: Value) -> Result:
        name, op, inputs, attrs, dtype, bound = step
        given = [self._given(name, each) for each in inputs]
        first, changes = given[0], op == VIEW
        if changes and first:
            made = self._rows(name, first, attrs["first"], attrs["end"])
        else:
            changed = contract_of(getattr(reference, op)).changed
            target = into if changed is None else given[changed]
            if target is not None:
                made = Result(name, target.shape, target.dtype, target.array)
                target.overwritten = name
            else:
                kinds = tuple([each and (each.shape, each.dtype) for each in given])
                sizes = tuple([pair for pair in attrs.items() if type(pair[1]) is int])
                made = self._new(name, *result_of(op, kinds, sizes, dtype), bound)
            changes = changed is not None
        names = tuple([each.name if each else "" for each in given])
        out = None if changes else made.array
        self._bind(
            Step(name, op, names, attrs, dtype, bound),
            tuple([each.array if each else None for each in given]),
            out,
            made,
        )
        return made

    def _given(self, name: str, value: Any) -> Result | None:
        """An input: a result, or a tensor by its name."""
        if isinstance(value, Result):
            if value.overwritten:
                raise RuntimeError(f"{name}: reads {value.name}: {value.overwritten} overwrote it")
            return value
        array = self.tensors.get(value)
        return None if array is None else Result(value, *described(array), array)

    def _new(self, name: str, shape: Shape, dtype: str, bound: float | None) -> Result:
        array = self._outs.get(name)
        if array is None:
            array = self._allocated(name, shape, dtype, bound)
        return Result(name, shape, dtype, array)

    def _rows(self, name: str, x: Result, first: int, end: int) -> Result:
        return Result(name, (end - first, *x.shape[1:]), x.dtype, x.array[first:end])

    @abstractmethod
    def _allocated(self, name: str, shape: Shape, dtype: str, bound: float | None) -> Any:
        """Memory for a result."""

    @abstractmethod
    def _bind(self, step: Step, inputs: tuple[Any, ...], out: Any, made: Result) -> None:
        """Bind a step to its arrays. out: None if it changes an input; made: its result."""


@lru_cache(maxsize=4096)  # layers have the same shapes
def result_of(
    op: str,
    given: tuple[tuple[Shape, str] | None, ...],
    attrs: tuple[tuple[str, int], ...],
    dtype: str | None,
) -> tuple[Shape, str]:
    """Shape and dtype of an operation's first output.

    given: those of the inputs. attrs: the sizes among the attributes. dtype: where the contract
    leaves it open.
    """
    contract = contract_of(getattr(reference, op))
    sizes: Sizes = dict(attrs)
    storage = None
    for entry, value in zip(contract.inputs, given, strict=False):
        if value is not None:
            shape, of_input = value
            in_rows = entry.kind in MATRICES  # axes (K, N), rows in memory
            entry.fits(shape[::-1] if in_rows else shape, sizes)
            storage = storage or (of_input if entry.kind in OPEN else None)
    out = contract.outputs[0]
    open_dtype = storage if storage != TWO_PART or out.kind in OPEN else "float32"
    kind = TWO_PART if out.kind == TWO_PART else str(open_dtype)
    return out.shape(sizes), dtype or FIXED.get(out.kind) or kind


class _Leased:
    """An array without memory."""

    def __init__(self, *leases: Lease) -> None:
        self._leases = leases

    def __getitem__(self, rows: slice) -> _Leased:
        return self


class Measure(Recorder):
    """Finds the bytes that an arena needs for a pass, `peak`; nothing is allocated or bound."""

    def __init__(self, tensors: Mapping[str, Any], outs: Mapping[str, Any] | None = None) -> None:
        super().__init__(tensors, outs)
        self._offsets = Offsets()

    @property
    def peak(self) -> int:
        return self._offsets.peak

    def _allocated(self, name: str, shape: Shape, dtype: str, bound: float | None) -> _Leased:
        if dtype != TWO_PART:
            return _Leased(Lease(self._offsets, bytes_of(shape, dtype)))
        parts = Lease(self._offsets, bytes_of((2, *shape), "float16"))
        scales = bytes_of(shape[:-1], "float32")
        return _Leased(parts, *((Lease(self._offsets, scales),) if bound is None else ()))

    def _bind(self, step: Step, inputs: tuple[Any, ...], out: Any, made: Result) -> None:
        pass


class Recording(Recorder):
    """Steps bound to arrays on the current device.

    known: earlier recorded steps by name, used again where they have the same arrays and options.
    overlapping: every kernel itself waits for the previous one (kernels_cu/lib/overlap.cuh), so
    launches may overlap. borrowed: names of tensors and results that the caller keeps alive during
    a run; a trace cannot read them. owner: the Recordings that made it.
    """

    def __init__(
        self,
        tensors: Mapping[str, Any],
        arena: Arena,
        outs: Mapping[str, Any] | None = None,
        known: Mapping[str, Recorded] | None = None,
        overlapping: bool = False,
        borrowed: Collection[str] = (),
        owner: Recordings | None = None,
    ) -> None:
        super().__init__(tensors, outs)
        self.steps: dict[str, Recorded] = {}
        self.out: Any = None
        self.after: tuple[Bound, ...] = ()  # launches after the last step, such as a sampler's
        self.overlapping = overlapping
        self._arena, self._known, self._borrowed = arena, known or {}, borrowed
        self._recipes: dict[Hashable, tuple[Recipe | None, tuple[Any, ...]]] = {}
        self._sizes: dict[str, Stored] = {}  # of what is borrowed
        self._owner = owner
        self._ran = False
        self._graph: Any = None

    def finish(self, out: Result | None) -> None:
        """End the recording. out: the result of the pass."""
        if out is not None and out.name not in self._borrowed:
            self.out = self._kept(out.array)
        given = {**self.tensors, **self._outs}
        self._sizes = {n: Stored.of(given[n]) for n in self._borrowed if n in given}
        self.tensors = {n: a for n, a in self.tensors.items() if n not in self._borrowed}
        self._outs, self._known, self._recipes = {}, {}, {}

    def _allocated(self, name: str, shape: Shape, dtype: str, bound: float | None) -> Any:
        if dtype != TWO_PART:
            return self._arena.empty(shape, dtype)
        rows = int(np.prod(shape[:-1]))
        parts = self._arena.empty((2, rows, shape[-1]), "float16")
        if bound is None:
            return TwoPartMatrix(parts, self._arena.empty((rows,), "float32"), shape)
        one_scale = scale_for(bound)
        scale = self._arena.filled(name.rpartition(".")[2], rows, one_scale)
        return TwoPartMatrix(parts, scale, shape, one_scale)

    def _bind(self, step: Step, inputs: tuple[Any, ...], out: Any, made: Result) -> None:
        values = (*inputs, made.array)
        places = addresses_of(values)
        key = (step.op, places, made.shape, made.dtype, tuple(step.attrs.items()))
        known = self._known.get(step.name)
        if known is not None and known.key == key:
            launches, extra = known.launches, known.extra
        elif step.op == VIEW:
            launches, extra = (), ()
        else:
            launches, extra = self._launches(step, inputs, out, alike(values, places), places)
        result = None if step.name in self._borrowed else self._kept(made.array)
        self.steps[step.name] = Recorded(step, launches, key, result, extra)

    def _launches(
        self, step: Step, inputs: tuple[Any, ...], out: Any, kind: Hashable, places: tuple[int, ...]
    ) -> tuple[tuple[Launch, ...], tuple[Any, ...]]:
        """The launches of a step and their further arrays: most steps are alike in all layers."""
        options = tuple([(name, exactly(option)) for name, option in step.attrs.items()])
        kind = step.op, out is None, kind, options
        recipe, extra = self._recipes.get(kind, (None, ()))
        if recipe is not None:
            return recipe.at((*places, *addresses_of(extra))), extra
        _, launches, extra = registry.bind(step.op, inputs, out, **step.attrs)
        recipe = Recipe.of(launches, (*places, *addresses_of(extra)))
        self._recipes[kind] = recipe, extra
        return launches, extra

    def _kept(self, array: Any) -> Any:
        """The array, without keeping its part of the arena."""
        return mapped(self._arena.view, array)

    def value(self, name: str) -> Any:
        """A result, or a tensor, by name."""
        recorded = self.steps.get(name)
        return self.tensors[name] if recorded is None else recorded.result

    def known(self, name: str) -> Any:
        """`value`, or the size of what is borrowed."""
        return self._sizes[name] if name in self._sizes else self.value(name)

    @property
    def launches(self) -> tuple[Launch, ...]:
        after = (launch for bound in self.after for launch in bound.launches)
        return (*(launch for each in self.steps.values() for launch in each.launches), *after)

    def run(self) -> None:
        """Launch everything on the current stream."""
        self._watched()
        self.run_steps()
        for bound in self.after:
            bound.run()

    def run_steps(self) -> None:
        for name in self.steps:
            self.run_step(name)

    def run_step(self, name: str) -> None:
        """Launch a step, in an NVTX range of its name for profilers."""
        cupy.cuda.nvtx.RangePush(name)
        try:
            for launch in self.steps[name].launches:
                launch.run()
        finally:
            cupy.cuda.nvtx.RangePop()

    def replay(self, stream: Any, private: Any) -> None:
        """Run as a CUDA graph on `stream`. The first call captures it on the stream `private`.

        Every kernel must be loaded already, by a run of this recording or of another one.
        """
        self._watched()
        if self._graph is None:
            self._graph = capture(self.launches, private, self.overlapping)
        self._graph.launch(stream)

    def repeat(self, stream: Any) -> None:
        """Run on `stream`, the current one; from the second call on as a CUDA graph."""
        if self._ran:
            self.replay(stream, stream)
        else:
            self.run()
        self._ran = True

    def _watched(self) -> None:
        """Show the recording to the one who watches, before it runs."""
        if self._owner is not None and self._owner.watch is not None:
            self._owner.watch(self)

    def trace(self, names: Iterable[str] | None = None) -> dict[str, CudaArray]:
        """Run the steps; return copies of the results of `names`, or of all steps if None."""
        wanted = set(self.steps if names is None else names)
        copies = {}
        for name, recorded in self.steps.items():
            self.run_step(name)
            if name in wanted:
                made = recorded.result
                copies[name] = made.joined() if isinstance(made, TwoPartMatrix) else made.copy()
        return copies

    def run_alone(self, exact: Mapping[str, NDArray[Any]]) -> Iterator[StepResult]:
        """Run each step alone on exact inputs, rounded to the dtype of their storage.

        exact: float64 tensors by name, of the steps' results and K and V of a kv_cache, (B, T, C).
        Yields every step that has an exact tensor. The kernels must be loaded already, as by
        `trace`.
        """
        for name, (step, launches, _, result, _) in self.steps.items():
            for given in step.inputs:
                if given in exact:
                    fill(self.value(given), exact[given], step.attrs.get("kv_dtype"))
            run = partial(self.run_step, name)
            ms = event_ms(run)
            if name in exact:
                names = ", ".join(launch.name for launch in launches)
                out = result.get()  # before further runs, which change what is computed in place
                ms = min(ms, *(event_ms(run) for _ in range(RUNS - 1)))
                yield StepResult(name, names, out, ms)


def fill(array: CudaArray, exact: NDArray[Any], kv_dtype: str | None = None) -> None:
    """Copy `exact` to the leading part of an array, rounded to its dtype, or in two-part form.

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


def capture(launches: Iterable[Any], stream: Any, overlapping: bool) -> Any:
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


class Recordings:
    """Makes the recordings of an engine, in an arena that they share.

    A larger pass gets a larger arena; earlier recordings keep theirs. watch: called with each
    recording before it runs, its inputs being on the device.
    """

    def __init__(self) -> None:
        self._arena: Arena | None = None
        self.watch: Callable[[Recording], None] | None = None

    def make(
        self,
        run: Callable[[Machine], Any],
        tensors: Mapping[str, Any],
        outs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Recording:
        """The recording of a pass. run: calls its verbs; options: those of Recording."""
        if self._arena is not None:
            with suppress(ArenaFull):
                return self._recorded(run, tensors, outs, options)
        measured = Measure(tensors, outs)
        run(measured)
        if self._arena is None or self._arena.nbytes < measured.peak:
            self._arena = Arena(rounded_up(measured.peak, STEPS_OF_SIZE))
        while True:
            with suppress(ArenaFull):  # something kept results for longer than the pass needs them
                return self._recorded(run, tensors, outs, options)
            self._arena = Arena(2 * self._arena.nbytes)

    def _recorded(
        self,
        run: Callable[[Machine], Any],
        tensors: Mapping[str, Any],
        outs: Mapping[str, Any] | None,
        options: Mapping[str, Any],
    ) -> Recording:
        assert self._arena is not None
        recording = Recording(tensors, self._arena, outs, owner=self, **options)
        recording.finish(run(recording))
        return recording

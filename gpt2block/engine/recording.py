"""Record the launches of a forward pass, to run, trace, time or replay them as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from gpt2block import reference
from gpt2block.cuda import cupy, overlap
from gpt2block.cuda.arrays import Bound, CudaArray, arrays_of, mapped, reserve_local_memory
from gpt2block.cuda.requests import Launch
from gpt2block.cuda.timing import event_ms
from gpt2block.engine.model import Item, StepResult
from gpt2block.engine.passes.executor import Executor
from gpt2block.engine.passes.shards import OF_SHARD, PRODUCTS, ModelShard, of_shard
from gpt2block.engine.recorder import (
    Arena,
    ArenaFull,
    Binder,
    Measure,
    Recorded,
    Result,
    TensorSpec,
    rounded_up,
)
from gpt2block.models.weights.hi_lo import HiLoMatrix

RUNS = 5  # number of runs when one step is timed
STEPS_OF_SIZE = 4  # number of possible sizes of an arena from a power of two up to the next


class Recording:
    """The recorded steps of a forward pass, each with its launches and their arrays.

    out: the result of the pass. overlapping: every kernel itself waits for the previous one
    (kernels_cu/lib/overlap.cuh), so launches may overlap. borrowed: names of tensors and results
    that the caller keeps alive during a run; a trace cannot read them. owner: the Recordings
    object that created this recording. meet, agreed: as in Recordings.
    """

    def __init__(
        self,
        binder: Binder,
        out: Result | None,
        overlapping: bool,
        borrowed: Collection[str],
        owner: Recordings,
    ) -> None:
        self.steps, self.overlapping = binder.steps, overlapping
        self.out: Any = None
        if out is not None and out.name not in borrowed:
            self.out = binder.views_of(out.array)
        self.after: tuple[Bound, ...] = ()  # launches after the last step, such as the sampler's
        self.tensors = {n: a for n, a in binder.tensors.items() if n not in borrowed}
        arrays = {**binder.tensors, **binder.outs}
        self._sizes = {n: TensorSpec.of(arrays[n]) for n in borrowed if n in arrays}
        self._owner, self.shard = owner, owner.shard
        self.meet, self.agree = owner.meet, owner.agree
        self._ran = self._loaded = False
        self.captured = False  # whether `replay` launches a graph that is captured already
        self._graph: Any = None

    def value(self, name: str) -> Any:
        """Return the result of the step `name`, or the tensor `name` if there is no such step."""
        recorded = self.steps.get(name)
        return self.tensors[name] if recorded is None else recorded.result

    def known(self, name: str) -> Any:
        """Return `value(name)`, or its TensorSpec if the caller owns the array (see `borrowed`)."""
        return self._sizes[name] if name in self._sizes else self.value(name)

    @property
    def launches(self) -> tuple[Launch, ...]:
        after = (launch for bound in self.after for launch in bound.launches)
        return (*(launch for each in self.steps.values() for launch in each.launches), *after)

    def run(self) -> None:
        """Run all steps, then the launches of `after`, on the current stream."""
        self._notify()
        self.run_steps()
        for bound in self.after:
            bound.run()
        self.meet()

    def run_steps(self, *names: str) -> None:
        """Run the named steps, or all steps, each in an NVTX range, which profilers show."""
        if not self._loaded:
            self.load()
        for name in names or self.steps:
            cupy.cuda.nvtx.RangePush(name)
            try:
                for launch in self.steps[name].launches:
                    launch.run()
            finally:
                cupy.cuda.nvtx.RangePop()

    def replay(self, stream: Any, private: object) -> None:
        """Replay the launches as a CUDA graph on `stream`. The first call captures it on `private`.

        Every kernel must be loaded already, by a run of this recording or of another recording.
        """
        self._notify()
        if self._graph is None:
            self.meet()
            self._graph = overlap.capture(self.launches, private, self.overlapping)
            if self.shard is not None:
                # An upload may allocate memory (see `Recordings.meet`).
                self._graph.upload(stream)
                stream.synchronize()
                self.meet()
            self.captured = True
        self._graph.launch(stream)

    def repeat(self, stream: object) -> None:
        """Run on `stream`, which must be current; from the second call on, as a CUDA graph."""
        if self._ran:
            self.replay(stream, stream)
        else:
            self.run()
        self._ran = True

    def load(self) -> None:
        """Load all kernels of a model on several GPUs before the first one runs; all threads meet.

        An all-gather waits for the launches of other GPUs, and would wait for a compiler, too.
        Local memory is reserved for the same reason (see `Recordings.meet`).
        """
        if self.shard is not None:
            # The driver loads a kernel to answer how much local memory it needs.
            local = max((each.function.local_size_bytes for each in self.launches), default=0)
            self.meet()
            reserve_local_memory(local)
            self.meet()
        self._loaded = True

    def _notify(self) -> None:
        """Call the function `watch` of the Recordings, if set, with this recording."""
        if self._owner.watch is not None:
            self._owner.watch(self)

    def trace(self, names: Iterable[str] | None = None) -> dict[str, CudaArray]:
        """Run all steps; return copies of the results of steps in `names` (None: all) by name.

        On several GPUs, all copies are allocated before the first all-gather (see
        `Recordings.meet`).
        """
        wanted = set(self.steps if names is None else names)
        results = {name: each.result for name, each in self.steps.items() if name in wanted}
        copies = {name: mapped(lambda array: array.copy(), each) for name, each in results.items()}
        self.meet()
        for name in self.steps:
            self.run_steps(name)
            if name in wanted:
                _copy(results[name], copies[name])
        self.meet()
        return {n: c.joined() if isinstance(c, HiLoMatrix) else c for n, c in copies.items()}

    def returns(self, name: str) -> bool:
        """Whether this GPU returns the result of a step.

        The first GPU returns whole results. Each GPU returns its part of a result that no
        all-gather joins.
        """
        if self.shard is None:
            return True
        gathered = name.endswith(OF_SHARD) and name.removesuffix(OF_SHARD) in self.steps
        return not gathered and (self.shard.index == 0 or self.shard.has_part(name))

    def run_alone(self, exact: Mapping[str, np.ndarray]) -> Iterator[StepResult]:
        """Run and time each step on exact inputs, rounded to their storage dtype.

        exact: float64 tensors by name, of the steps' results and K and V of a kv_cache, (B, T, C).
        Yields every step that has an exact tensor. The kernels must be loaded already, as by
        `trace`.

        On several GPUs, a step and the all-gather of its columns are one result, as on one GPU. The
        first GPU yields whole results.
        """
        of_shards: dict[str, tuple[list[str], float]] = {}
        for name, (step, launches, _, result, _) in self.steps.items():
            whole = name.removesuffix(OF_SHARD)
            # The last run has exact inputs, because runs change results that are computed in place.
            times = [self._ms(name) for _ in range(RUNS - 1 if whole in exact else 0)]
            for given in step.inputs[step.op == "all_gather" :]:
                if (values := self._exact(given, exact)) is not None:
                    fill(self.value(given), values, step.attrs.get("kv_dtype"))
            kernels, ms = [launch.name for launch in launches], min([self._ms(name), *times])
            if name != whole and whole in self.steps:  # the all-gather reads these columns
                of_shards[whole] = kernels, ms
            elif whole in exact:
                first, before = of_shards.get(name, ([], 0.0))
                out = result.get()
                if self.shard is not None:
                    out = self.shard.joined(name, out)
                yield StepResult(whole, ", ".join(first + kernels), out, before + ms)

    def _ms(self, name: str) -> float:
        """Run and time a step when all GPUs have the memory for it (see `Recordings.meet`)."""
        self.meet()
        return event_ms(partial(self.run_steps, name))

    def _exact(self, name: str, exact: Mapping[str, np.ndarray]) -> np.ndarray | None:
        """Return the exact input `name` of a step, or this GPU's part; None if it is unknown."""
        values, shard = exact.get(name.removesuffix(OF_SHARD)), self.shard
        if values is None or shard is None or not shard.has_part(name):
            return values
        if not name.endswith(OF_SHARD):
            return shard.own_part(name, values)
        product = self.steps[name].step
        first = shard.first(product.inputs[PRODUCTS[product.op][0]])
        return values[:, first : first + self.value(name).shape[-1]]


def _copy(value: object, to: object) -> None:
    """Copy an array or a matrix to memory of the same shapes, on the current stream."""
    targets = arrays_of("", to)
    for part, array in arrays_of("", value).items():
        cupy.copyto(targets[part], array)


def fill(array: CudaArray, exact: np.ndarray, kv_dtype: str | None = None) -> None:
    """Copy `exact` to the first elements along each axis of `array`, rounded to its format.

    kv_dtype: the FP8 format of arrays of uint8.
    """
    if isinstance(array, HiLoMatrix):
        parts, scale = reference.hi_lo(exact.astype(np.float32))
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


def _with_scale(x: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Return `reference.hi_lo` of x, but with the given scale for all rows."""
    scaled = (x / scale).astype(np.float32)
    high = scaled.astype(np.float16)
    low = ((scaled - high) * np.float32(2048)).astype(np.float16)
    return np.stack([high, low]), np.full(len(x), scale, np.float32)


class Recordings:
    """Creates the recordings of an engine, which share an arena (a buffer for results).

    A larger pass gets a larger arena; earlier recordings keep the old arena. watch: called with
    each recording before it runs, when its inputs are on the device. shard: the engine's part of a
    model on several GPUs; None for a model on one GPU.
    """

    def __init__(self, shard: ModelShard | None = None) -> None:
        self.shard = shard
        self._arena: Arena | None = None
        self.watch: Callable[[Recording], None] | None = None

    def meet(self) -> None:
        """Wait for the threads of all GPUs, if the model is on several.

        An allocation can wait until a GPU is idle, and lets no other thread launch kernels
        meanwhile. So no thread may allocate until all have launched the work that all-gathers wait
        for.
        """
        if self.shard is not None:
            self.shard.exchange()

    def agree(self, value: Item) -> Item:
        """Return `value`, which depends on measured times; on several GPUs, the first GPU's."""
        return value if self.shard is None else self.shard.exchange(value)[0]

    def make(
        self,
        run: Callable[[Executor], Any],
        tensors: Mapping[str, Any],
        outs: Mapping[str, Any] | None = None,
        known: Mapping[str, Recorded] | None = None,
        overlapping: bool = False,
        borrowed: Collection[str] = (),
        fuses: bool = False,
    ) -> Recording:
        """Return a Recording of the pass `run`.

        fuses: see `Divided`. Other arguments: see Binder and Recording.
        """

        def steps_on(do: Executor) -> Any:
            return run(do) if self.shard is None else of_shard(run, do, self.shard, fuses)

        def recorded(arena: Arena) -> Recording:
            binder = Binder(tensors, arena, outs, known, borrowed)
            return Recording(binder, steps_on(binder), overlapping, borrowed, self)

        self.meet()
        if self._arena is not None:
            with suppress(ArenaFull):
                return recorded(self._arena)
        measured = Measure(tensors, outs)
        steps_on(measured)
        if self._arena is None or self._arena.nbytes < measured.peak:
            self._arena = Arena(rounded_up(measured.peak, STEPS_OF_SIZE))
        while True:
            with suppress(ArenaFull):  # full if Python keeps results longer than the pass needs
                return recorded(self._arena)
            self._arena = Arena(2 * self._arena.nbytes)

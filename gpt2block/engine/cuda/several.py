"""A model on several GPUs: one thread drives each GPU, which has a shard of every matrix.

Every call runs on all GPUs at once, each with its own `CudaModel`, and returns the results of the
first. Host code is the same on all of them, so that they launch the same gathers in the same order.
The first GPU makes decisions that depend on measured times. The number of slots is the smallest of
the numbers that fit into the free memory of each GPU. The threads exchange these values.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import tee
from typing import TypeVar

import numpy as np

from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import compute_capability, device_attribute
from gpt2block.cuda.cards import properties
from gpt2block.cuda.formats import Formats
from gpt2block.engine.adapters import Adapters
from gpt2block.engine.cuda.caches import CudaCache
from gpt2block.engine.cuda.decoding import CudaDecoding
from gpt2block.engine.cuda.model import CudaModel
from gpt2block.engine.cuda.products import possible_products
from gpt2block.engine.cuda.several_bytes import BytesByGpu
from gpt2block.engine.cuda.timeline import watched
from gpt2block.engine.model import (
    CacheKind,
    Drafts,
    Floats,
    Ids,
    Output,
    Sampled,
    Start,
    StepResult,
    Tensors,
    check_divides,
    describe_cache,
    token_bytes,
)
from gpt2block.engine.passes.shards import Meeting, ModelShard
from gpt2block.engine.timeline import Call, Timeline
from gpt2block.errors import DeviceError, InputError
from gpt2block.files.checkpoints.checkpoint import Checkpoint
from gpt2block.files.checkpoints.stored import Stored
from gpt2block.models.config import ModelConfig
from gpt2block.ops.all_gather import PeerBuffers

Found = TypeVar("Found")


class Crew:
    """A thread for each GPU. All threads run the same calls, in the same order.

    All-gathers of two models must not run on a GPU at the same time. Their blocks wait for other
    GPUs while they occupy multiprocessors. Each gather could wait for blocks of another GPU that
    the other gather prevents from starting.
    """

    lock = threading.RLock()  # held by the crew that runs a call
    _latest: weakref.ref[Crew] | None = None  # the crew whose launches may still run

    def __init__(self, devices: Sequence[int]) -> None:
        self.devices = tuple(devices)
        self.peers, self.meeting = PeerBuffers(devices), Meeting(len(devices))
        self._threads = [ThreadPoolExecutor(1, f"cuda:{device}") for device in devices]

    def run(self, calls: Sequence[Callable[[], Found]]) -> list[Found]:
        """Run a call on each GPU's thread, all at once; return their results.

        If a call raises, all other calls end: gathers that wait for this GPU end without a result.
        Raises the error of the first GPU that has one, or DeviceError if an all-gather has waited
        too long.
        """
        with self.lock:
            self._wait_for_others()
            pairs = zip(self._threads, calls, strict=True)
            futures = [thread.submit(self._guarded, call) for thread, call in pairs]
            errors = [error for each in futures if (error := each.exception()) is not None]
            if not errors and not self.peers.aborted:
                return [each.result() for each in futures]
            self.peers.clear()
            self.meeting.reset()
            own = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)]
            if own:
                raise own[0]
            raise DeviceError(
                "a GPU has not sent its columns of a row to the other GPUs: use one GPU"
            )

    def iterate(self, parts: Sequence[Iterator[Found]]) -> Iterator[Found]:
        """Yield the items of the first GPU's iterator; all GPUs compute each item together."""
        while (found := self.run([partial(next, part, None) for part in parts])[0]) is not None:
            yield found

    def _wait_for_others(self) -> None:
        latest = None if Crew._latest is None else Crew._latest()
        if latest is not None and latest is not self:
            for device in latest.devices:
                cupy.cuda.Device(device).synchronize()
        Crew._latest = weakref.ref(self)

    def _guarded(self, call: Callable[[], Found]) -> Found:
        try:
            return call()
        except BaseException:
            self.peers.abort()
            self.meeting.abort()
            raise


class SeveralCaches:
    """The kv_caches of a model on several GPUs.

    Each GPU stores the keys and values of the heads that it computes: its own, or all of them
    (`ModelShard.divides_heads`). nbytes is the sum over all GPUs.
    """

    def __init__(self, parts: Sequence[CudaCache], kind: CacheKind) -> None:
        self.parts, self.kind = parts, kind
        self.batch, self.n_ctx = parts[0].batch, parts[0].n_ctx

    @property
    def lengths(self) -> list[int]:
        return self.parts[0].lengths

    @lengths.setter
    def lengths(self, lengths: list[int]) -> None:
        for part in self.parts:
            part.lengths = list(lengths)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    __repr__ = describe_cache


class SeveralCudaModels:
    """A model on several GPUs; results are bitwise equal to one GPU's. devices: GPU numbers.

    Raises InputError for GPUs that differ, or that cannot access each other's memory.
    """

    checkpoint: Checkpoint | None = None

    def __init__(
        self, config: ModelConfig, tensors: Tensors, formats: Formats, devices: Sequence[int]
    ) -> None:
        check_divides(config, len(devices))
        _check_alike(devices)
        self.config, self.formats, self.devices = config, formats, tuple(devices)
        self._crew = crew = Crew(devices)
        with cupy.cuda.Device(devices[0]):
            hi_lo = possible_products(config, formats.dtype) == "hi_lo"

        def create(index: int, items: Tensors) -> CudaModel:
            device = devices[index]
            with cupy.cuda.Device(device):
                peers = crew.peers.of(index)
            own = replace(shard, index=index, peers=peers)
            return CudaModel(config, items, formats, device, own)

        shard = ModelShard(config, formats.dtype, 0, len(devices), crew.meeting, hi_lo=hi_lo)
        self._shard = shard  # shard of the first GPU
        copies = _copies(_read_whole(tensors, shard), len(devices))
        calls = [partial(create, n, each) for n, each in enumerate(copies)]
        self.parts: list[CudaModel] = crew.run(calls)
        first = self.parts[0]
        n_layer, width, dtype, _, rope = first.cache_kind
        names = ",".join(map(str, devices))
        self.cache_kind = n_layer, width, dtype, f"cuda:{names}", rope
        self.divides_prompts = first.divides_prompts
        self.continues_exactly = first.continues_exactly

    adapters = Adapters.none()

    def use_adapters(self, adapters: Adapters) -> None:
        """Raise InputError: only models on one device have adapters."""
        raise InputError("adapters: expected a model on one GPU, or device='cpu'")

    def _on_all(self, function: Callable[[CudaModel], Found]) -> list[Found]:
        return self._crew.run([partial(function, part) for part in self.parts])

    @property
    def draft(self) -> CudaModel | None:
        """The first GPU's copy of the draft model. Every GPU has one; all draft the same tokens."""
        return self.parts[0].draft

    @draft.setter
    def draft(self, model: CudaModel | None) -> None:
        own = None if model is None else self.devices.index(model.device)

        def attach(part: CudaModel, number: int) -> None:
            part.draft = model if model is None or number == own else model.copy_on(part.device)

        self._crew.run([partial(attach, part, n) for n, part in enumerate(self.parts)])

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def bytes_by_gpu(self) -> BytesByGpu:
        of_token = token_bytes(self._shard.layer_caches, self.formats)
        return BytesByGpu([part.nbytes for part in self.parts], of_token)

    def describe(self) -> str:
        return f"{len(self.parts)} × {self.parts[0].describe()}"

    def tensors(self) -> Tensors:
        return self._crew.iterate([iter(part.tensors()) for part in self.parts])

    def new_cache(self, batch: int, n_ctx: int) -> SeveralCaches:
        return SeveralCaches(self._on_all(lambda m: m.new_cache(batch, n_ctx)), self.cache_kind)

    def forward(
        self, sequences: Sequence[Ids], want: Output, cache: SeveralCaches | None = None
    ) -> list[Floats]:
        caches = [None] * len(self.parts) if cache is None else cache.parts
        pairs = zip(self.parts, caches, strict=True)
        calls = [partial(m.forward, sequences, want, part) for m, part in pairs]
        found: list[list[Floats]] = self._crew.run(calls)
        return found[0]

    def log_likelihood(self, sequences: Sequence[Ids]) -> list[Floats]:
        return self._on_all(lambda m: m.log_likelihood(sequences))[0]

    def likeliest(self, sequences: Sequence[Ids]) -> list[tuple[Floats, Ids]]:
        return self._on_all(lambda m: m.likeliest(sequences))[0]

    def trace(self, ids: Ids, cached: bool) -> dict[str, np.ndarray]:
        return self._on_all(lambda m: m.trace(ids, cached))[0]

    def run_alone(
        self, ids: Ids, cached: bool, exact: Mapping[str, np.ndarray]
    ) -> Iterator[StepResult]:
        first = self.parts[0]  # only its results are kept
        found = self._on_all(lambda m: [e for e in m.run_alone(ids, cached, exact) if m is first])
        return iter(found[0])

    def timed(self, call: Call) -> list[Timeline]:
        with self._crew.lock, ExitStack() as stack:
            found = [stack.enter_context(watched(part.recordings)) for part in self.parts]
            call()
        names = [f"cuda:{device}" for device in self.devices]
        return [
            timeline._replace(device=name)
            for of_pass in zip(*found, strict=True)
            for timeline, name in zip(of_pass, names, strict=True)
        ]

    def decode(
        self, slots: int, n_ctx: int, fewer: bool = False, speculate: Drafts = False
    ) -> SeveralDecodings:
        return SeveralDecodings(
            self._crew, self._on_all(lambda m: m.decode(slots, n_ctx, fewer, speculate))
        )


class SeveralDecodings:
    """A Decoding on several GPUs."""

    def __init__(self, crew: Crew, parts: Sequence[CudaDecoding]) -> None:
        self._crew, self._parts = crew, parts
        self.slots, self.n_ctx = parts[0].slots, parts[0].n_ctx

    def _on_all(self, function: Callable[[CudaDecoding], Found]) -> list[Found]:
        return self._crew.run([partial(function, part) for part in self._parts])

    def start_up(self, continued: bool) -> Iterator[tuple[int, int]]:
        return self._crew.iterate([part.start_up(continued) for part in self._parts])

    def start(self, starts: Sequence[Start]) -> None:
        self._with_starts("start", starts)

    def extend(self, starts: Sequence[Start]) -> None:
        self._with_starts("extend", starts)

    def _with_starts(self, name: str, starts: Sequence[Start]) -> None:
        """Call a method of all parts, with a copy of the starts' matchers for each further part.

        The times of masks end a text on the first GPU alone.
        """
        own = [
            [each._replace(matcher=each.matcher and each.matcher.copy(False)) for each in starts]
            for _ in self._parts[1:]
        ]
        pairs = zip(self._parts, [starts, *own], strict=True)
        self._crew.run([partial(getattr(part, name), each) for part, each in pairs])

    def reusable(self, source: int, target: int, tokens: int) -> int:
        return tokens

    def copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        self._on_all(lambda part: part.copy(copies))

    def next(self) -> Sampled:
        return self._on_all(lambda part: part.next())[0]

    def stop(self, slots: Ids) -> None:
        for part in self._parts:
            part.stop(slots)


def _read_whole(tensors: Tensors, shard: ModelShard) -> Tensors:
    """Yield the tensors. Read each `Stored` that is not divided, once for all GPUs."""
    for name, given, layout in tensors:
        array = given
        if isinstance(array, Stored) and not shard.spans(name):
            array = array.read()
        yield name, array, layout


def _copies(tensors: Tensors, count: int) -> list[Tensors]:
    """Return iterators over the same tensors, one for each thread. Each item is made once.

    If a tensor cannot be read, all iterators raise the error.
    """
    lock, errors = threading.Lock(), list[Exception]()

    def next_items(items: Iterator[Found]) -> Iterator[Found]:
        while True:
            with lock:
                try:
                    item = next(items, None)
                except Exception as error:
                    errors.append(error)
            if errors:
                raise errors[0]
            if item is None:
                return
            yield item

    return [next_items(each) for each in tee(iter(tensors), count)]


def _check_alike(devices: Sequence[int]) -> None:
    """Raise InputError unless the GPUs are of one kind, with tensor cores."""
    kinds = []
    for device in devices:
        with cupy.cuda.Device(device):
            kinds.append((compute_capability(), device_attribute("MultiProcessorCount")))
    if len(set(kinds)) > 1:
        raise InputError(
            f"device: GPUs of compute capability and multiprocessors {kinds}: expected GPUs of one "
            "kind"
        )
    if not properties(kinds[0][0]).has_bf16:
        raise InputError(
            f"device: GPUs of compute capability {kinds[0][0]}: expected 80 or newer "
            "for a model on several GPUs: use one of them"
        )

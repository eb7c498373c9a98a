"""kv_caches on a GPU, and the number of slots (sequences of a cache) that fit in its memory."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Hashable, Iterator, Sequence
from math import ceil, gcd
from typing import Any, NoReturn

import numpy as np

from gpt2block.checks import FLOATS
from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import CudaArray
from gpt2block.cuda.formats import Formats, cache_option
from gpt2block.engine.adapters import SlotAdapters
from gpt2block.engine.model import (
    Drafts,
    Item,
    SequenceFrequencies,
    cache_kind,
    describe_cache,
    layer_rows,
    new_states,
    row_dtype,
    state_bytes,
    stored_rows,
    token_bytes,
)
from gpt2block.engine.passes.shards import ModelShard
from gpt2block.engine.recorder import rounded_up
from gpt2block.engine.states import KeptStates, pool_bytes, pool_shapes
from gpt2block.errors import InputError
from gpt2block.models.config import EXPERTS, LayerCache, ModelConfig
from gpt2block.ops.attention_cached import KV_COPY

KEPT_SHAPES = 4  # maximum prefill shapes recorded per cache; also maximum temporary caches kept
KEPT_STARTS = 160  # maximum prefill shapes recorded for the cache of a decoding
KEPT_CACHES = 2  # maximum caches of ended decodings kept for reuse, with their CUDA graphs
MAX_LARGER = 2  # maximum size of a reused cache, relative to the size of a new cache
MAX_SLOTS = 512  # maximum slots of a decoding whose caller accepts fewer slots than requested
MIN_CONTEXT = 64  # minimum positions per slot in a decoding's cache
MIN_STREAM_ROWS = 64  # minimum rows of `stream_rows`: the most of a step with draft tokens
ALIGNED = 16  # bytes per vector load of the kernels


def free_bytes() -> int:
    """Return the free bytes of the current device, including free bytes in CuPy's pool."""
    free = int(cupy.cuda.Device().mem_info[0])
    return free + int(cupy.get_default_memory_pool().free_bytes())


def forget_oldest(kept: OrderedDict[Any, Any], most: int, stream: Any) -> None:
    """If there are more than `most` entries, wait for the stream, and drop the oldest entry."""
    if len(kept) > most:
        stream.synchronize()
        kept.popitem(last=False)


class CudaCache:
    """Keys and values as an array (2 n_layer, slots, n_ctx, KV): K of layer 0, V of layer 0, …

    If layers differ, `arrays` has an array for each number of channels and dtype. Each layer's K
    and V begin at a multiple of ALIGNED bytes; unused slots are added if necessary.
    prefills, steps: a model's recordings for this cache. A key of `prefills` is a prefill's sizes,
    and whether its sequences may have adapters.
    drafting: the cache of the block that drafts tokens, if prompts and steps also compute it.
    stream_rows: rows of the residual stream after the layers of the latest step, or of the last
    tokens of prompts, which the block reads; for a cache of a block, rows of the block.
    """

    drafting: Any = None
    stream_rows: Any = None

    def __init__(
        self,
        config: ModelConfig,
        batch: int,
        n_ctx: int,
        formats: Formats,
        caches: Sequence[LayerCache] | None = None,
        continued: bool = True,
        pool: bool = False,
    ) -> None:
        """caches: the caches of the layers that are stored; None for `config.layer_caches`.

        These caches have fewer channels than the model's if a GPU has only some heads. continued:
        whether later passes continue sequences, from states of gated delta nets. pool: whether
        other sequences can continue from states, too.
        """
        caches = config.layer_caches if caches is None else caches
        self.batch, self.n_ctx, self.kept_shapes = batch, n_ctx, KEPT_SHAPES
        self.kind = cache_kind(config, formats, f"cuda:{cupy.cuda.Device().id}")
        self.lengths, self.fp8 = [0] * batch, formats.fp8_cache

        def kind(each: LayerCache, width: int) -> tuple[int, type | str]:
            return width, FLOATS.get(row_dtype(each, formats), "uint8")

        counts = Counter(kind(*each) for each in stored_rows(caches))
        self.arrays = [_zeros(n, batch, n_ctx, *each) for each, n in counts.items()]
        rows = {each: iter(a[:, :batch]) for each, a in zip(counts, self.arrays, strict=True)}
        self.layers = layer_rows(caches, lambda each, width: next(rows[kind(each, width)]))
        self.frequencies = SequenceFrequencies(config, batch, n_ctx, cupy)
        self.adapters = SlotAdapters({}, batch, cupy)
        self.states = new_states(config, batch, cupy, continued)
        self.kept_states: KeptStates | None = None
        for name, shape in pool_shapes(config, batch, n_ctx).items() if pool else ():
            self.states[name] = cupy.zeros(shape, "int32" if name == "saved" else "float32")
        if "saved" in self.states:
            self.kept_states = KeptStates(self.states)
        self.prefills: OrderedDict[Hashable, Any] = OrderedDict()
        self.steps: dict[Drafts, Any] = {}  # key: source of the draft tokens that steps verify

    def __getstate__(self) -> NoReturn:
        raise InputError(
            "a kv_cache on a GPU cannot be copied or pickled: make one with new_cache, and call "
            "the model with it and all ids"
        )

    @property
    def nbytes(self) -> int:
        states = sum(int(each.nbytes) for each in self.states.values())
        states += self.drafting.nbytes if self.drafting else 0
        return states + sum(int(each[:, : self.batch].nbytes) for each in self.arrays)

    __repr__ = describe_cache


def _zeros(count: int, batch: int, n_ctx: int, width: int, stored: type | str) -> CudaArray:
    """Return zeros (count, slots, n_ctx, width) of at least `batch` slots; others are unused."""
    multiple = ALIGNED // gcd(ALIGNED, n_ctx * width * np.dtype(stored).itemsize)
    return cupy.zeros((count, ceil(batch / multiple) * multiple, n_ctx, width), stored)


def copy_slots(cache: CudaCache, copies: Sequence[tuple[int, int, int]]) -> None:
    """Copy keys and values from slots to other slots of a cache; see `Decoding.copy`."""
    for group in apart(copies):
        numbers = cupy.asarray(np.array(group, np.int32).T, order="C")
        for rows in cache.arrays:
            option = cache_option(cache.fp8 if rows.dtype == np.uint8 else None)
            KV_COPY.bind_on_device((rows, *numbers), **option).run()
    if (states := cache.kept_states) is not None:
        for copy in copies:
            states.copy(*copy)


def apart(copies: Sequence[tuple[int, int, int]]) -> Iterator[list[tuple[int, int, int]]]:
    """Split copies, in order, into groups whose copies can run at the same time."""
    group: list[tuple[int, int, int]] = []
    for source, target, count in copies:
        if any(target in each[:2] or source == each[1] for each in group):
            yield group
            group = []
        group.append((source, target, count))
    if group:
        yield group


class DecodingCaches:
    """The kv_caches of Decodings. A later Decoding can reuse the cache of an ended Decoding."""

    def __init__(
        self, config: ModelConfig, formats: Formats, shard: ModelShard | None = None
    ) -> None:
        """shard: this GPU's part of a model on several GPUs, whose caches have equal sizes."""
        self._config, self._formats, self._shard = config, formats, shard
        self.of_layers = (config if shard is None else shard).layer_caches
        self._token_bytes = token_bytes(self.of_layers, formats)
        self._ended: deque[CudaCache] = deque()
        self.adapters: dict[str, CudaArray] = {}  # tensors of the model's adapters
        self.of_block: DecodingCaches | None = None  # the caches of the block that drafts tokens

    def give_back(self, cache: CudaCache) -> None:
        """Keep the cache of an ended decoding. Any thread may call this at any time."""
        self._ended.append(cache)

    def take(self, slots: int, n_ctx: int, fewer: bool, drafting: bool = False) -> CudaCache:
        """Return a cache of at least `slots` slots. fewer: allow fewer slots if memory is short.

        drafting: whether the cache has a cache of the block that drafts tokens.
        """
        n_ctx = min(max(MIN_CONTEXT, rounded_up(n_ctx, 4)), self._config.n_ctx)
        slots = rounded_up(slots, 2)
        if fewer:
            slots = min(slots, MAX_SLOTS)
        self._forget(KEPT_CACHES)
        kept = self._ended_cache(slots, n_ctx, drafting)
        if fewer and kept is None:
            room = min(self._of_all_gpus(self._free() // 2 // self._sequence_bytes(n_ctx)))
            slots = max(1, min(slots, room))
            kept = self._ended_cache(slots, n_ctx, drafting)
        while kept is None:
            try:
                kept = self.new(slots, n_ctx, pool=True, drafting=drafting)
            except MemoryError:
                if not fewer or slots == 1:
                    raise
            if not all(self._of_all_gpus(kept is not None)):
                kept, slots = None, slots // 2
        kept.kept_shapes = KEPT_STARTS
        return kept

    def _of_all_gpus(self, value: Item) -> list[Item]:
        """Return the `value` that each GPU of the model passes, in the order of the GPUs."""
        return [value] if self._shard is None else self._shard.exchange(value)

    def new(self, batch: int, n_ctx: int, pool: bool = False, drafting: bool = False) -> CudaCache:
        """Return a new cache, after freeing kept caches if memory is short. Raises MemoryError.

        pool: as for CudaCache. drafting: as for `take`.
        """
        try:
            try:
                return self._allocate(batch, n_ctx, pool, drafting)
            except cupy.cuda.memory.OutOfMemoryError:
                if not self._ended:
                    raise
                self._forget(0)
            return self._allocate(batch, n_ctx, pool, drafting)
        except cupy.cuda.memory.OutOfMemoryError as error:
            size = batch * (n_ctx * self._token_bytes + state_bytes(self._config))
            raise MemoryError(
                f"Out of memory: keys and values of {batch:,} sequences of {n_ctx:,} tokens take "
                f"{size / 1e9:.2f} GB, the GPU has {self._free() / 1e9:.2f} GB free: expected "
                "fewer sequences, or fewer tokens in each"
            ) from error

    def _allocate(
        self, batch: int, n_ctx: int, pool: bool = False, drafting: bool = False
    ) -> CudaCache:
        """Return a new cache. Raises CuPy's OutOfMemoryError. Arguments: see `new`."""
        made = CudaCache(self._config, batch, n_ctx, self._formats, self.of_layers, pool=pool)
        if pool:  # the cache of a Decoding
            made.adapters = SlotAdapters(self.adapters, batch, cupy)
        if self.of_block and drafting:
            made.drafting = self.of_block._allocate(batch, n_ctx)
            for each in (made, made.drafting):
                rows = max(2 * batch, MIN_STREAM_ROWS)
                each.stream_rows = cupy.zeros((rows, self._config.n_embd), "float32")
        return made

    def _ended_cache(self, slots: int, n_ctx: int, drafting: bool) -> CudaCache | None:
        """Return a kept cache of an ended decoding with `slots` slots, or None.

        A cache has at least n_ctx and at most MAX_LARGER * n_ctx positions per slot. drafting: as
        for `take`. Decodings may end, and give back their caches, while this runs.
        """
        for _ in range(len(self._ended)):
            try:
                cache = self._ended.popleft()
            except IndexError:
                return None
            fits = cache.batch == slots and (cache.drafting is not None) == drafting
            if fits and n_ctx <= cache.n_ctx <= MAX_LARGER * n_ctx:
                return cache
            self._ended.append(cache)
        return None

    def _forget(self, kept: int) -> None:
        """Free the oldest caches of ended decodings until at most `kept` remain."""
        if len(self._ended) > kept:
            cupy.cuda.get_current_stream().synchronize()  # the GPU may still use these caches
        while len(self._ended) > kept:
            self._ended.popleft()

    def _free(self) -> int:
        """Return the free bytes of device memory, counting CuPy's pool and kept caches as free."""
        return free_bytes() + sum(cache.nbytes for cache in tuple(self._ended))

    def _sequence_bytes(self, n_ctx: int) -> int:
        """Return the bytes per slot of keys, values, states, logits, activations, flags of tokens.

        All steps and layers share memory for activations, counted twice because a smaller arena
        can remain in use after a larger one is allocated.
        """
        c = self._config
        keys = n_ctx * self._token_bytes
        shapes, experts = c.block_shapes().items(), c.experts
        widths: int = c.n_embd + sum(sum(s[1:]) for n, s in shapes if not n.endswith(EXPERTS))
        if experts:
            stacked = sum(s[1] for n, s in shapes if n.endswith(EXPERTS))
            widths += stacked // experts.n_expert * experts.n_used
        if c.layer_embeddings:
            widths += 2 * c.n_layer * c.layer_embeddings.width
        return keys + state_bytes(c) + pool_bytes(c) + 5 * c.vocab_size + 2 * 4 * widths

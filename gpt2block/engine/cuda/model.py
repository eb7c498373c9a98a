"""A model on a GPU: prefill over packed rows, decoding as a CUDA graph, sampling on the device.

Every forward pass is recorded from a pass in `gpt2block.engine.passes`. A decoding step reads
tokens and positions from device memory, where the sampler writes the next values, so that every
step can replay the same graph.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from gpt2block.cuda import cupy, doctor
from gpt2block.cuda.arrays import ArrayArg, CudaArray, mapped, to_host
from gpt2block.cuda.formats import Formats
from gpt2block.engine.adapters import Adapters
from gpt2block.engine.cuda.caches import (
    KEPT_SHAPES,
    CudaCache,
    DecodingCaches,
    forget_oldest,
    free_bytes,
)
from gpt2block.engine.cuda.choice import DecodingChoice
from gpt2block.engine.cuda.decoding import MAX_KNOWN_TEXTS, CudaDecoding
from gpt2block.engine.cuda.draft import BlockDraft, Draft
from gpt2block.engine.cuda.prefill import PrefillPrograms, Requested, programs_of
from gpt2block.engine.cuda.products import choose_products, divisors, request_kernels
from gpt2block.engine.cuda.steps import MAX_DRAFT_ROWS, DecodingSteps, steps_of
from gpt2block.engine.cuda.timeline import timed
from gpt2block.engine.cuda.weights import CudaWeights, PromptWeights, check_room
from gpt2block.engine.model import (
    UNCOMPARED,
    Drafts,
    Floats,
    Ids,
    Output,
    StepResult,
    Tensors,
    in_groups,
    in_shared_memory,
    padded,
    stored_tensors,
)
from gpt2block.engine.passes import STREAM
from gpt2block.engine.passes.executor import Outline, Step
from gpt2block.engine.passes.forward import EVERY, ROWS_AT_ONCE, Pass, Want, forward
from gpt2block.engine.passes.prefill_rules import Prefill, PrefillPlan, Products, prefill_steps
from gpt2block.engine.passes.rewriting import Log, renamed, run
from gpt2block.engine.passes.settings import PassSettings
from gpt2block.engine.passes.shards import OF_SHARD, ModelShard
from gpt2block.engine.recorder import rounded_up
from gpt2block.engine.recording import Recording, Recordings
from gpt2block.engine.speculation import ROWS
from gpt2block.engine.timeline import Call, Timeline
from gpt2block.errors import Argument, InputError
from gpt2block.models.architectures import architecture_of
from gpt2block.models.config import DRAFTING, HALVES, ModelConfig, model_shapes
from gpt2block.models.weights.matrix import on_host
from gpt2block.ops.attention import appends_to_cache
from gpt2block.ops.attention_cached import continues_exactly
from gpt2block.ops.delta import check_heads
from gpt2block.ops.experts import check_sizes
from gpt2block.ops.linear import workspace_floats

TOKENS_AT_ONCE = 8192  # maximum tokens of a prefill of several sequences
KEPT_COUNTS = 32  # maximum scratch caches kept for padded batches, one per number of sequences
KEPT_OF_COUNT = 8  # prefill shapes kept per scratch cache of padded batches


class CudaModel(CudaWeights):
    """A model on one GPU. Matrices are stored in their dtype, (N, K).

    Decoding computes with float32 activations, which some products round (`DecodingChoice`).

    Prefill computes on tensor cores (`on_tensor_cores`) if the GPU has them and the architecture
    permits the head size. With 16-bit matrices, its activations have the matrices' dtype. With FP8
    matrices they are float16; activations that may exceed its range are divided by a power of two
    (`divisors`). With float32 matrices, operands are hi/lo; decoding reads these matrices, too.

    Thread-safe: calls run one after another on one stream.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Tensors,
        formats: Formats,
        device: int,
        shard: ModelShard | None = None,
        trunk: CudaModel | None = None,
    ) -> None:
        """shard: this GPU's part of a model on several GPUs; None if the model is on one GPU.

        trunk: the model of which this one is the block that drafts tokens. The model and its block
        share a stream, and the kind of prefill's products.
        """
        super().__init__(config, formats, f"cuda:{device}")
        if (nets := config.delta_nets) is not None:
            check_heads(nets.n_k_head, nets.n_v_head, nets.k_size, nets.v_size)
        if (experts := config.experts) is not None:
            check_sizes(config.n_embd, experts.n_expert, experts.n_used)
        self.device, self._shard = device, shard
        self._architecture, self._settings = architecture_of(config), PassSettings.of(config)
        if shard is not None:
            self._settings = self._settings._replace(**shard.heads)
        self._scratch_caches: OrderedDict[tuple[int, int], CudaCache] = OrderedDict()
        self._padded_caches: OrderedDict[tuple[int, int], CudaCache] = OrderedDict()
        self.recordings = Recordings(shard)
        self._caches = DecodingCaches(config, formats, shard)
        self.draft: CudaModel | None = None  # the model that drafts tokens for this one
        self._lock = threading.RLock()
        with cupy.cuda.Device(device):
            if trunk is None:
                check_room(config, formats, shard)
            self.stream: Any = trunk.stream if trunk else cupy.cuda.Stream(non_blocking=True)
            tensors_ready = cupy.cuda.Event(disable_timing=True)
            tensors_ready.record()  # the caller's stream may still compute tensors in device memory
            self.stream.wait_event(tensors_ready)
            with self.stream:
                request_kernels(config, formats)
                largest = self._store(tensors)
                constants = self._architecture.constants(config, self._vectors)
                self._constants = {name: cupy.asarray(a) for name, a in constants.items()}
                weights = self._matrices, self._vectors
                if shard is not None:
                    self._take_shard_of_head(shard)
                elif size := workspace_floats(formats.dtype, config.n_embd):
                    self._constants["workspace"] = cupy.zeros(size, "float32")
                self.products, self._bounds = self._choose_products(largest)
                self.products = trunk.products if trunk else self.products
                hi_lo, fp8 = self.products == "hi_lo", self.products == "fp8"
                self._divisors = divisors(config, self._bounds) if fp8 else {}
                divided, several = self._divisors, shard is not None
                self.prompts = PromptWeights(config, self.products, *weights, divided, several)
                bounds = self._bounds if hi_lo else {}
                functions = self._architecture, self._settings, several
                self.decoding = DecodingChoice(config, formats, self._matrices, bounds, *functions)
                exact = continues_exactly(config.head_size, formats.fp8_cache) and not hi_lo
                self.continues_exactly = exact or self._reads_cache
                self.divides_prompts = self.continues_exactly
                self.block: Any = self._draft_block()
                self.stream.synchronize()

    def _draft_block(self) -> CudaModel | None:
        """Return the block that drafts tokens, in the memory of this model's tensors.

        The block has copies of the halves of w_eh; the whole matrix is then kept in host memory.
        """
        config, whole = self.config.draft_config, f"{DRAFTING}w_eh"
        if config is None:
            return None
        stored: dict[str, Any] = {n: (on_host(a), None) for n, a in self._vectors.items()}
        stored |= {n: (a, "NK") for n, a in self._matrices.items()}
        halves = zip(HALVES, stored.pop(whole)[0].halves(), strict=True)
        stored |= {DRAFTING + n: (a, "NK") for n, a in halves}
        stored |= {DRAFTING + n: stored[n] for n in ("wte", "lm_head")}
        tensors = ((n.removeprefix(DRAFTING), *a) for n, a in stored.items() if DRAFTING in n)
        made = CudaModel(config, tensors, self.formats, self.device, trunk=self)
        self._matrices[whole] = self._matrices[whole].mapped(on_host)
        self._caches.of_block = made._caches
        return made

    def __getstate__(self) -> object:
        raise InputError(
            "a model on a GPU cannot be copied or pickled: load it again with from_pretrained, in "
            "another process too (a Predictor is pickled without its model), or use device='cpu'"
        )

    def _choose_products(self, largest: Mapping[str, float]) -> tuple[Products, dict[str, float]]:
        """Return the kind of prefill's products, and bounds of their operands by name."""
        return choose_products(self.config, self._matrices, self._vectors, largest, self._shard)

    @property
    def on_tensor_cores(self) -> bool:
        """Whether prefill is computed on tensor cores."""
        return self.products != "float32"

    @property
    def _reads_cache(self) -> bool:
        """Whether attention of new prompts reads keys and values from a kv_cache."""
        return self.config.FROM_CACHE or not self.on_tensor_cores

    def describe(self) -> str:
        return doctor.describe_device(self.device)

    def use_adapters(self, adapters: Adapters) -> None:
        """Let sequences use these adapters. Raises InputError and MemoryError."""
        if self._divisors:
            raise InputError(
                "adapters: expected a model whose activations fit into float16: use ",
                Argument("dtype", "bfloat16"),
            )
        with self.running():
            nbytes, free = sum(each.nbytes for each in adapters.tensors.values()), free_bytes()
            if nbytes > free:
                raise MemoryError(
                    f"Out of memory: adapters take {nbytes:,} bytes, the GPU has {free:,} bytes "
                    "free: expected fewer adapters"
                )
            on_device = {name: cupy.asarray(each) for name, each in adapters.tensors.items()}
            self.adapters, self._caches.adapters = adapters, on_device
            self.stream.synchronize()

    def tensors(self) -> Tensors:
        items = iter(stored_tensors(self.config, self._vectors, self._matrices))
        while True:
            with self.running():  # the lock is free while the caller uses an item
                item = next(items, None)
                if item is not None and self._shard is not None:
                    name, array, layout = item
                    item = name, self._shard.joined(name, array, int(layout == "KN")), layout
            if item is None:
                return
            yield item

    def copy_on(self, device: int) -> CudaModel:
        """Return a copy of this model on another GPU, with the same bits."""
        return CudaModel(self.config, self._on_host(), self.formats, device)

    def _on_host(self) -> Iterator[tuple[str, Any, str | None]]:
        """Yield (name, vector or WeightMatrix in host memory, layout) of each tensor."""
        for name in model_shapes(self.config):
            stored = self._matrices.get(name, self._vectors.get(name))
            with self.running():
                found = mapped(on_host, stored)
            yield name, found, getattr(stored, "layout", None)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Hold the model's lock, and make its device and stream current."""
        with self._lock, cupy.cuda.Device(self.device), self.stream:
            yield

    def new_cache(self, batch: int, n_ctx: int) -> CudaCache:
        with self.running():
            return self._caches.new(batch, n_ctx)

    def forward(
        self, sequences: Sequence[Ids], want: Output, cache: CudaCache | None = None
    ) -> list[Floats]:
        with self.running():
            if cache is None:
                outputs: list[Floats] = []
                for group in in_groups(sequences, TOKENS_AT_ONCE):
                    outputs += self._forward(group, want, self._scratch(group))
                return outputs
            # A row's bits depend on its kernels, so other rows must not affect the choice of these.
            decoded = want in ("last", "logits")
            single = [decoded and len(ids) == 1 for ids in sequences]
            several = [len(ids) > 0 and not one for one, ids in zip(single, sequences, strict=True)]
            logits = [np.empty(0, np.float32)] * len(sequences)
            continued = [n > 0 for n in cache.lengths]
            for kind in (False, True):
                chosen = [s and c == kind for s, c in zip(several, continued, strict=True)]
                if any(chosen):
                    group = [ids[: len(ids) * c] for ids, c in zip(sequences, chosen, strict=True)]
                    result = self._forward(group, want, cache)
                    for b, ids in enumerate(sequences):
                        if chosen[b] or not len(ids):
                            logits[b] = result[b]
            rows = [row for row, one in enumerate(single) if one]
            if rows:
                tokens = np.array([sequences[row][0] for row in rows], np.int32)
                at = np.array([cache.lengths[row] for row in rows], np.int32)
                last_logits = steps_of(self, cache).logits_of(
                    self, np.array(rows, np.int32), tokens, at
                )
                for row, last in zip(rows, last_logits, strict=True):
                    logits[row] = last if want == "last" else last[None]
                    cache.lengths[row] += 1
            return logits

    def _scratch(self, sequences: Sequence[Ids], repeats: bool = False) -> CudaCache:
        """Return a cache for sequences that no later call continues; layers share its memory.

        Attention on tensor cores needs no keys and values in the cache. repeats: whether the batch
        was padded; the shapes of a padded batch will recur, so more programs are kept.
        """
        count, longest = len(sequences), max(map(len, sequences))
        kept, most = self._scratch_caches, KEPT_SHAPES
        if repeats:
            kept, most = self._padded_caches, KEPT_COUNTS
        shape = count, self.config.n_ctx if repeats else longest
        cache = kept.get(shape)
        if cache is None:
            caches = in_shared_memory(self._caches.of_layers) if self._reads_cache else ()
            cache = CudaCache(self.config, *shape, self.formats, caches, continued=False)
            cache.kept_shapes = KEPT_OF_COUNT if repeats else KEPT_SHAPES
            kept[shape] = cache
            forget_oldest(kept, most, self.stream)
        kept.move_to_end(shape)
        cache.lengths = [0] * count
        for number, ids in enumerate(sequences):
            cache.frequencies.begin(number, len(ids))
        return cache

    def _forward(self, sequences: Sequence[Ids], want: Output, cache: CudaCache) -> list[Floats]:
        prefill = self.prefill(sequences, cache, "rows" if want == "logits" else want)
        if want == "last":
            nothing = np.empty(0, np.float32)
            logits = np.empty(prefill.out.shape, np.float32)
            to_host((prefill.out,), logits)
            return [
                row if len(ids) else nothing for row, ids in zip(logits, sequences, strict=True)
            ]
        ends = prefill.ends[:-1]
        if want == "logits":
            logits = np.empty((len(prefill.out), self.config.vocab_size), np.float32)
            to_host(self._logits(prefill.out.copy()), logits)
            return np.split(logits, ends)
        hidden = prefill.out.get()
        if want == "hidden":
            return np.split(hidden, ends)
        states, prefill.states = prefill.states, []
        return np.split(np.stack([*states, hidden]), ends, axis=1)

    def log_likelihood(self, sequences: Sequence[Ids]) -> list[Floats]:
        return [scores for (scores,) in self._scored(sequences, "log_likelihood")]

    def likeliest(self, sequences: Sequence[Ids]) -> list[tuple[Floats, Ids]]:
        return [(scores, ids) for scores, ids in self._scored(sequences, "likeliest")]

    def _scored(self, sequences: Sequence[Ids], want: Want) -> list[tuple[np.ndarray, ...]]:
        """Return a tuple of arrays (T - 1,) for each sequence: log-likelihoods of its tokens.

        The second array, for want "likeliest", has the most likely tokens. Results are copied to
        the host after all groups have run.
        """
        scored: list[tuple[np.ndarray, ...]] = []
        computed: list[tuple[list[CudaArray], list[int]]] = []
        with self.running():
            for group in in_groups(sequences, TOKENS_AT_ONCE):
                pads = not self._reads_cache  # else kept caches of padded batches need memory
                several = padded(group) if pads else group
                prefill = self.prefill(several, self._scratch(several, repeats=pads), want)
                arrays = [prefill.out.copy()]
                if want == "likeliest":
                    arrays.append(prefill.likeliest[:, 0].copy())  # (N, 1)
                computed.append((arrays, prefill.ends[: len(group)]))
            for arrays, ends in computed:
                rows = zip(*(np.split(each.get(), ends)[:-1] for each in arrays), strict=True)
                scored += [tuple(part[:-1] for part in row) for row in rows]
        return scored

    def trace(self, ids: Ids, cached: bool) -> dict[str, np.ndarray]:
        V = self.config.vocab_size
        with self.running():
            recording = self._pass(ids, cached)
            copying = (*UNCOMPARED, "kv_round", "operand", "rows", "take", "hi_lo")
            names = [n for n, each in recording.steps.items() if each.step.op not in copying]
            traced = recording.trace(filter(recording.returns, names))
            copies = {name: copy.get() for name, copy in traced.items()}
            if (shard := self._shard) is not None:
                joined = {name: shard.joined(name, copy) for name, copy in copies.items()}
                copies = {name.removesuffix(OF_SHARD): copy for name, copy in joined.items()}
            whole = {name: self._whole(name, copy, cached) for name, copy in copies.items()}
        heads = ("logits", "uncapped")
        return {n: a[:, :V] if n.startswith(heads) else a for n, a in whole.items()}

    def run_alone(
        self, ids: Ids, cached: bool, exact: Mapping[str, np.ndarray]
    ) -> Iterator[StepResult]:
        with self.running():
            by = {} if cached else self._divisors
            exact = {name: a / by[name] if name in by else a for name, a in exact.items()}
            for each in self._pass(ids, cached).run_alone(exact):
                yield each._replace(out=self._whole(each.name, each.out, cached))

    def timed(self, call: Call) -> list[Timeline]:
        with self.running():
            return timed(self.recordings, call)

    def _whole(self, name: str, result: np.ndarray, cached: bool) -> np.ndarray:
        """Return a step's result, multiplied by its divisor if `_pass` has divided it."""
        divided = name in self._divisors and not cached
        return result * np.float32(self._divisors[name]) if divided else result

    def _pass(self, ids: Ids, cached: bool) -> Recording:
        """Return the recording of a forward pass of one sequence, with its tokens on the device."""
        if not cached:
            prefill = self.prefill([ids], self._scratch([ids]), "log_likelihood")
            return prefill.recording(self, "log_likelihood")
        cache = self.new_cache(1, len(ids))
        self.prefill([ids[:-1]], cache)
        at = np.array([len(ids) - 1], np.int32)
        steps = DecodingSteps(self, cache, floats=True)
        return steps.next_token(self, np.zeros(1, np.int32), ids[-1:], at).recording(self)

    def decode(
        self, slots: int, n_ctx: int, fewer: bool = False, speculate: Drafts = False
    ) -> CudaDecoding:
        smaller = self.draft if speculate is True else None
        if fewer and speculate in ("known", "forced"):
            slots = min(slots, MAX_KNOWN_TEXTS)
        if smaller is not None:
            most = MAX_DRAFT_ROWS // ROWS[0]
            if slots > most and not fewer:
                raise InputError(
                    f"{slots:,} texts together with a draft model: expected at most {most}, as a "
                    f"step has {MAX_DRAFT_ROWS} rows with draft tokens: use ",
                    Argument("rows_at_once"),
                    f" of {most}",
                )
            slots = min(slots, most)
        with self.running():
            self.stream.synchronize()  # raises an exception if the GPU is lost
            drafting = self.block is not None and smaller is None and speculate is True
            cache = self._caches.take(slots, n_ctx, fewer, drafting)
            slots = min(slots, cache.batch)
            if smaller is None:
                block = BlockDraft(self.block, cache.drafting) if cache.drafting else None
                decoding = CudaDecoding(self, cache, slots, speculate, block)
            else:
                draft, kept = smaller.drafting(cache.batch, n_ctx)
                decoding = CudaDecoding(self, cache, slots, speculate, draft)
                weakref.finalize(decoding, smaller._caches.give_back, kept).atexit = False
            weakref.finalize(decoding, self._caches.give_back, cache).atexit = False
            return decoding

    def drafting(self, slots: int, n_ctx: int) -> tuple[Draft, CudaCache]:
        """Return a Draft that drafts tokens for another model's slots, and the Draft's cache."""
        with self.running():
            cache = self._caches.take(slots, n_ctx, fewer=False)
            return Draft(self, cache), cache

    def prefill(
        self, sequences: Sequence[Ids], cache: CudaCache, want: Requested | None = None
    ) -> PrefillPrograms:
        """Run the sequences through all blocks; append their keys and values to the cache.

        Nonempty sequences must either all start, or all continue sequences of the cache.
        """
        lengths = [len(ids) for ids in sequences]
        rows, longest = sum(lengths), max(lengths)
        if self.on_tensor_cores:
            longest = min(rounded_up(longest, 4), rows)
        before = [at for at, new in zip(cache.lengths, lengths, strict=True) if new]
        prefill = programs_of(self, cache, rows, longest, any(before))
        prefill.run(self, sequences, range(cache.batch), cache.lengths, want)
        cache.lengths = [n + new for n, new in zip(cache.lengths, lengths, strict=True)]
        return prefill

    def prefill_shape(
        self, batch: int, cached: bool, rows: int, longest: int, continued: bool, ends: int | None
    ) -> Prefill:
        appends = self.formats.fp8_cache is None and appends_to_cache(self.config.head_size)
        return Prefill(
            self.products, rows, batch, longest, cached=cached, ends=ends,
            continued=(continued or self.config.FROM_CACHE) and self.on_tensor_cores,
            fp8_cache=self.formats.fp8_cache, gated=self.products == "16_bits",
            appends=appends,
        )  # fmt: skip

    def given(self) -> dict[str, ArrayArg]:
        """Return {name that steps use: array or matrix} of the weights that decoding reads."""
        weights = {**self._vectors, **self._matrices, **self._orders}
        return {**weights, **self._constants, **self.prompts.hi_lo}

    def prompt_weights(self, head: bool) -> dict[str, ArrayArg]:
        """Return the weights that prefill reads, with memory for converted weights.

        head: whether to include the padded lm_head for logits of all tokens, as "head",
        "head_bias".
        """
        return {**self.given(), **self.prompts.of(head)}

    def _logits(self, hidden: CudaArray) -> Iterator[CudaArray]:
        """Yield logits of up to ROWS_AT_ONCE rows, always in the same memory; padding is -inf.

        hidden: the final norm of all rows, outside the memory of recordings.
        """
        shape = Prefill(self.products, len(hidden), 1, len(hidden), cached=False)
        tensors = {**self.prompt_weights(head=True), "normed": hidden}

        for first in range(0, len(hidden), ROWS_AT_ONCE):
            do, end = Outline(tensors), min(len(hidden), first + ROWS_AT_ONCE)
            out = Pass(do, self._settings).logits_of("normed", first, end)
            steps = prefill_steps(do.steps, self._plan(shape, tensors))
            recording = self.recordings.make(partial(run, steps, out=out), tensors)
            recording.run()
            yield recording.out

    def _plan(
        self, shape: Prefill, names: Collection[str], want: Want | None = None
    ) -> PrefillPlan:
        by_products = {"float32": "float32", "hi_lo": "float32", "fp8": "float16"}
        dtype = by_products.get(self.products, self.formats.dtype)
        heads = self._settings.heads
        return PrefillPlan(shape, names, dtype, heads, self._bounds, want == "rows")

    def prefill_steps(
        self,
        shape: Prefill,
        names: Collection[str],
        want: Want | None,
        log: Log | None = None,
    ) -> tuple[list[Step], str]:
        """Return the steps of a prefill of this shape, and the name of the result `want`, or "".

        names: of the tensors. log: as in `rewritten`.
        """
        do, drafts = Outline(names), self.block is not None and f"{DRAFTING}tokens" in names
        o = Pass(do, self._settings, shape.longest, shape.rows, drafts)
        out = forward(o, self._architecture, self.config, want)
        steps = prefill_steps(do.steps, self._plan(shape, names, want), log)
        if drafts:
            of_block = {n.removeprefix(DRAFTING) for n in names if n.startswith(DRAFTING)}
            stream = f"{EVERY}h.{self.config.n_layer - 1}.output"
            own, _ = self.block.prefill_steps(shape, {*of_block, STREAM}, None)
            at = 1 + [step.name for step in steps].index(stream)
            steps[at:at] = renamed(own, DRAFTING, {STREAM: stream})
        return steps, out or ""

"""Run a model with NumPy: each step calls a function of `gpt2block.reference`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from gpt2block import reference
from gpt2block.checks import FLOATS
from gpt2block.contract import unchecked
from gpt2block.cuda.formats import Formats, own_cache_dtype
from gpt2block.engine.adapters import SlotAdapters
from gpt2block.engine.grammars import Masker, MaskJob, Matcher
from gpt2block.engine.model import (
    UNCOMPARED,
    Alternatives,
    Drafts,
    Floats,
    Ids,
    Output,
    Sampled,
    SequenceFrequencies,
    Start,
    StepResult,
    StoredModel,
    Tensors,
    cache_kind,
    cache_tensors,
    describe_cache,
    in_shared_memory,
    layer_rows,
    new_states,
    stored_tensors,
)
from gpt2block.engine.numpy.executor import FUNCTIONS, Functions, NumpyExecutor, NumpySteps
from gpt2block.engine.passes import model_steps
from gpt2block.engine.passes.forward import NumpyPass, forward
from gpt2block.engine.passes.settings import PassSettings
from gpt2block.files.checkpoints.gguf_types import InBlocks
from gpt2block.models.architectures import architecture_of
from gpt2block.models.config import TABLES, LayerCache, ModelConfig
from gpt2block.models.weights.gguf import GgufMatrix
from gpt2block.models.weights.matrix import WeightMatrix
from gpt2block.sampling import Mask, Sampling, choose

ROWS_AT_ONCE = 1024  # maximum rows whose logits are computed at a time for likelihoods
SLOTS = 16  # maximum slots of a decoding whose caller accepts fewer slots than requested


FIRST_POSITIONS = 256  # positions of each sequence for which a kv_cache has memory at first


class NumpyCache:
    """Keys and values (batch, positions, KV) of each layer: float32, rounded to the cache's dtype.

    Rows that are never stored in FP8 (`LayerCache.narrow`) have the dtype itself.

    The memory grows with the longest sequence, up to n_ctx positions. shared: whether equal layers
    share their memory.
    """

    def __init__(
        self, config: ModelConfig, batch: int, n_ctx: int, formats: Formats, shared: bool = False
    ) -> None:
        self.batch, self.n_ctx = batch, n_ctx
        self.kind = cache_kind(config, formats, "cpu")
        caches = config.layer_caches
        self._caches = in_shared_memory(caches) if shared else caches
        self._config, self._shared = config, shared
        self._dtype = FLOATS[own_cache_dtype(formats.dtype)]
        self.release()
        self.frequencies = SequenceFrequencies(config, batch, n_ctx, np)
        self.adapters = SlotAdapters({}, batch, np)

    def release(self) -> None:
        """Forget all tokens, and give back the memory of later positions."""
        self.lengths = [0] * self.batch
        self.states = new_states(self._config, self.batch, np, not self._shared)
        self._allocate(min(self.n_ctx, FIRST_POSITIONS))

    def reserve(self, count: int) -> None:
        """Provide memory for `count` positions of each sequence."""
        if count > self.positions:
            before = self.arrays
            self._allocate(min(self.n_ctx, max(count, 2 * self.positions)))
            for old, new in zip(before, self.arrays, strict=True):
                for number, n in enumerate(self.lengths):
                    new[number, :n] = old[number, :n]

    def _allocate(self, positions: int) -> None:
        def make(each: LayerCache, width: int) -> Floats:
            dtype = np.float32 if each.narrow else self._dtype
            self.arrays.append(np.zeros((self.batch, positions, width), dtype))
            return self.arrays[-1]

        self.positions, self.arrays = positions, list[Floats]()
        self.layers = layer_rows(self._caches, make)

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (*self.arrays, *self.states.values()))

    __repr__ = describe_cache


class NumpyModel(NumpySteps, StoredModel):
    """A model that runs in host memory with float32 arithmetic.

    Matrices are rounded to their dtype and stored as float32: NumPy multiplies in no narrower type,
    and converting a matrix for every product takes many times as long as the product.
    """

    def __init__(self, config: ModelConfig, tensors: Tensors, formats: Formats) -> None:
        super().__init__(config, formats, "cpu")
        self._store(tensors)
        matrices = {name: matrix.operand for name, matrix in self._matrices.items()}
        constants = architecture_of(config).constants(config, self._vectors)
        self.known = {**self._vectors, **matrices, **constants}
        self.known |= {name: self._matrices[name].table for name in TABLES if name in matrices}
        self.functions = Functions({"kv_append": self._kv_append})

    def _vector(self, name: str, array: np.ndarray) -> Floats:
        return np.ascontiguousarray(array, dtype=np.float32)

    def _matrix(self, name: str, array: np.ndarray, layout: str) -> WeightMatrix:
        stored = self.formats
        given = stored.dtype_of(name), layout, name, stored.allow_nonfinite
        if isinstance(array, InBlocks):
            return array.on_host()
        if isinstance(array, GgufMatrix):
            return array
        return WeightMatrix.quantize(array, *given).widened()

    def tensors(self) -> Tensors:
        for name, array, layout in stored_tensors(self.config, self._vectors, self._matrices):
            of_blocks = isinstance(self._matrices.get(name), GgufMatrix)
            dtype = self.formats.dtype_of(name) if layout and not of_blocks else "float32"
            stored = FLOATS.get(dtype, np.float32)  # FP8 and GGUF blocks become float32
            read = array.astype(stored, copy=False).view()
            read.flags.writeable = False  # read-only, because the model computes with it
            yield name, read, layout

    def new_cache(self, batch: int, n_ctx: int) -> NumpyCache:
        return NumpyCache(self.config, batch, n_ctx, self.formats)

    def forward(
        self,
        sequences: Sequence[Ids],
        want: Output | Literal["rows"],
        cache: NumpyCache | None = None,
    ) -> list[Floats]:
        """See `ModelEngine.forward`. want "rows": the final norm of all rows, before lm_head."""
        if cache is None:  # then layers can share one layer's memory
            longest = max(map(len, sequences))
            cache = NumpyCache(self.config, len(sequences), longest, self.formats, shared=True)
            for number, ids in enumerate(sequences):
                cache.frequencies.begin(number, len(ids))
        lengths = [len(ids) for ids in sequences]
        starts = list(cache.lengths)
        cache.reserve(max(map(sum, zip(starts, lengths, strict=True))))
        streams = ["embedding", *(f"h.{n}.output" for n in range(self.config.n_layer))]
        keep = streams if want == "states" else []
        do = self.executor(self._tensors(sequences, cache), keep)
        found = self._run(do, "hidden" if want == "states" else want, max(lengths))
        ends = np.cumsum(lengths)
        cache.lengths = [s + n for s, n in zip(starts, lengths, strict=True)]
        if want == "last":
            rows_of = iter(found)
            return [next(rows_of) if n else np.empty(0, np.float32) for n in lengths]
        if want == "states":
            found = np.stack([*do.kept.values(), found])
        return np.split(found, ends[:-1], axis=-2)

    def _tensors(self, sequences: Sequence[Ids], cache: NumpyCache) -> dict[str, np.ndarray]:
        """Return a dict from names to arrays: a pass's inputs for new tokens, except weights."""
        lengths = np.array([len(ids) for ids in sequences])
        ends = np.cumsum(lengths)
        batch = {
            "tokens": np.concatenate(sequences),
            "positions": np.arange(ends[-1]) - np.repeat(ends - lengths - cache.lengths, lengths),
            "row": np.repeat(np.arange(len(lengths)), lengths),
            "cu_seqlens": np.array([0, *ends]),
            "start": np.array(cache.lengths),
            "last": ends[lengths > 0] - 1,
            "last_row": np.flatnonzero(lengths),
        }
        return {**cache_tensors(cache), **cache.adapters.tensors, **batch}

    def _run(self, do: NumpyExecutor, want: Any, longest: int) -> Any:
        """Run a forward pass; return its output `want`. longest: tokens of the longest sequence."""
        step = NumpyPass(do, PassSettings.of(self.config), longest)
        return forward(step, architecture_of(self.config), self.config, want)

    def trace(self, ids: Ids, cached: bool) -> dict[str, np.ndarray]:
        do = self.executor(self._pass(ids, cached), keep=None)
        self._run(do, "logits", 1 if cached else len(ids))
        unshown = ".kv", ".tiles"
        return {name: made for name, made in do.kept.items() if not name.endswith(unshown)}

    def run_alone(
        self, ids: Ids, cached: bool, exact: Mapping[str, np.ndarray]
    ) -> Iterator[StepResult]:
        inputs = self._pass(ids, cached)
        inputs |= {name: tensor.astype(np.float32) for name, tensor in exact.items()}
        for step in model_steps(self.config):
            found = self.step(step, inputs)
            inputs.setdefault(step.name, found.out)
            if step.op not in UNCOMPARED:
                yield found

    def _pass(self, ids: Ids, cached: bool) -> dict[str, np.ndarray]:
        """Return a dict from names to inputs of a forward pass of one sequence, except weights."""
        cache = self.new_cache(1, len(ids))
        if cached:
            self.forward([ids[:-1]], "last", cache)
            ids = ids[-1:]
        cache.reserve(cache.n_ctx)
        return self._tensors([ids], cache)

    def log_likelihood(self, sequences: Sequence[Ids]) -> list[Floats]:
        return [scores for scores, _ in self.likeliest(sequences)]

    def likeliest(self, sequences: Sequence[Ids]) -> list[tuple[Floats, Ids]]:
        found = []
        for ids, hidden in zip(sequences, self.forward(sequences, "rows"), strict=True):
            ends = range(ROWS_AT_ONCE, len(ids) - 1, ROWS_AT_ONCE)
            rows = zip(np.split(hidden[:-1], ends), np.split(ids[1:], ends), strict=True)
            scores, best = zip(*(self._scores(*pair) for pair in rows), strict=True)
            found.append((np.concatenate(scores), np.concatenate(best)))
        return found

    def _scores(self, hidden: Floats, targets: Ids) -> tuple[Floats, Ids]:
        """Return the log-likelihood of each row's target, and the row's most likely token.

        hidden: final norm of each row.
        """
        do = self.executor({"hidden": hidden, "targets": targets})
        logits = NumpyPass(do, PassSettings.of(self.config)).logits("hidden")
        scores: Floats = do("scores", "log_likelihood", (logits, "targets"))
        return scores, logits.argmax(axis=-1).astype(np.int32)

    def decode(
        self, slots: int, n_ctx: int, fewer: bool = False, speculate: Drafts = False
    ) -> NumpyDecoding:
        """Return a NumpyDecoding without drafts, as BLAS results depend on the number of rows."""
        fewest = min(slots, SLOTS) if fewer else slots
        return NumpyDecoding(self, fewest, n_ctx, speculate == "forced")

    def _kv_append(self, qkv: Floats, *cache: np.ndarray, **attrs: object) -> Any:
        """Append K and V, rounded to the cache's dtype, but stored as float32."""
        if fp8 := self.formats.fp8_cache:
            heads = self.config.n_head, self.config.n_kv_head
            rounded = unchecked(reference.kv_round)(qkv, *heads, fp8)
        else:
            narrow = qkv.astype(FLOATS[self.formats.cache_dtype], copy=False)
            rounded = narrow.astype(np.float32, copy=False)
        return FUNCTIONS["kv_append"](rounded, *cache, **attrs)


class NumpyDecoding:
    """Decoding on the CPU. Each call of `next` samples and returns a token of every sequence."""

    def __init__(self, model: NumpyModel, slots: int, n_ctx: int, forced: bool = False) -> None:
        """forced: report the known tokens of sequences in place of sampled tokens."""
        self.slots, self.n_ctx = slots, n_ctx
        self._texts: list[Iterator[int]] | None = [iter(())] * slots if forced else None
        self._model = model
        self._cache = model.new_cache(slots, n_ctx)
        self._cache.adapters = SlotAdapters(model.adapters.tensors, slots, np)
        self._sampling = [Sampling()] * slots
        self._matchers: list[Matcher | None] = [None] * slots
        self._left = np.zeros(slots, np.int32)  # number of tokens left to sample per slot
        self._steps = np.zeros(slots, np.int32)
        self._alternatives = np.zeros(slots, np.int32)
        self._occurred = np.zeros((slots, model.config.vocab_size), np.uint8)
        self._counts = np.zeros(self._occurred.shape, np.int32)  # times that each token was sampled
        self._next = [np.empty(0, np.int32)] * slots  # per slot: ids to process before sampling
        self._masker = Masker()
        # {slot: mask that takes long, its logits}
        self._late: dict[int, tuple[MaskJob, Floats]] = {}

    def start_up(self, continued: bool) -> Iterator[tuple[int, int]]:
        return iter(())

    def start(self, starts: Sequence[Start]) -> None:
        for start in starts:
            slot, ids, sampling, occurred = start.slot, start.ids, start.sampling, start.occurred
            if self._texts is not None:
                assert start.known is not None
                self._texts[slot] = iter(start.known.tolist())
            self._cache.frequencies.begin(slot, start.n_tokens)
            self._cache.adapters.begin(slot, start.adapter)
            self._cache.lengths[slot], self._next[slot] = start.cached, ids[start.cached :]
            self._sampling[slot], self._matchers[slot] = sampling, start.matcher
            self._left[slot], self._steps[slot] = start.steps, start.sampled
            self._alternatives[slot] = start.alternatives
            self._occurred[slot] = 0
            self._occurred[slot, ids if occurred is None else occurred] = 1
            if sampling.counts:
                self._counts[slot] = start.counts(self._counts.shape[1])

    def extend(self, starts: Sequence[Start]) -> None:
        new = [np.empty(0, np.int32)] * self.slots
        for start in starts:
            self._cache.frequencies.begin(start.slot, start.n_tokens)
            self._cache.adapters.begin(start.slot, start.adapter)
            self._cache.lengths[start.slot] = start.cached
            new[start.slot] = start.ids[start.cached :]
        self._model.forward(new, "last", self._cache)

    def copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        for source, target, count in copies:
            self._cache.lengths[target] = count
            for rows in self._cache.arrays:
                rows[target, :count] = rows[source, :count]

    def reusable(self, source: int, target: int, tokens: int) -> int:
        return tokens

    def stop(self, slots: Ids) -> None:
        self._left[slots] = 0
        for slot in slots.tolist():
            self._late.pop(slot, None)

    def release(self) -> None:
        """Forget the keys and values of all slots, and give their memory back."""
        self._cache.release()

    def next(self) -> Sampled:
        if not self._left.any():
            raise RuntimeError("next: expected a sequence in at least one slot")
        logits, masks = self._logits(), dict[int, Mask]()
        if not logits:
            self._masker.wait(job for job, _ in self._late.values())
        for slot, (job, of_slot) in [*self._late.items()]:
            if self._masker.ready(job):
                logits[slot], masks[slot] = of_slot, job.result()[0]
                del self._late[slot]
        return self._sampled(np.array(sorted(logits), np.int32), logits, masks)

    def _logits(self) -> dict[int, Floats]:
        """Compute the next logits of each slot; put those whose masks take long into `_late`."""
        nothing, running = np.empty(0, np.int32), self._left > 0
        running[[*self._late]] = False
        active = np.flatnonzero(running).tolist()
        if not active:
            return {}
        new = [ids if runs else nothing for ids, runs in zip(self._next, running, strict=True)]
        every = self._model.forward(new, "last", self._cache)
        jobs = {n: MaskJob(matcher) for n in active if (matcher := self._matchers[n]) is not None}
        self._masker.compute(jobs.values())
        self._late |= {slot: (job, every[slot]) for slot, job in jobs.items()}
        return {slot: every[slot] for slot in active if slot not in jobs}

    def _sampled(self, active: Ids, logits: dict[int, Floats], masks: dict[int, Mask]) -> Sampled:
        """Sample a token for each active slot."""
        tokens, logprobs = np.empty(len(active), np.int32), np.empty(len(active), np.float32)
        for n, slot in enumerate(active.tolist()):
            occurred, counts = self._occurred[slot], self._counts[slot]
            options, matcher = self._sampling[slot], self._matchers[slot]
            step, allowed = self._steps[slot], masks.get(slot)
            forced = None if self._texts is None else next(self._texts[slot])
            token, logprobs[n] = choose(
                logits[slot], options, step, occurred, counts, allowed, forced
            )
            tokens[n] = token
            if matcher is not None:
                matcher.accept([token])
            occurred[max(token, 0)] |= token >= 0
            counts[max(token, 0)] += token >= 0
            self._next[slot] = tokens[n : n + 1]
        self._steps[active] += 1
        self._left[active] -= 1
        top = None
        if self._alternatives[active].any():
            found = np.stack([logits[slot] for slot in active.tolist()])
            top = Alternatives(*reference.top_logprobs(found))
        return Sampled(active, tokens, logprobs, top)

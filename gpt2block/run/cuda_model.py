"""A model on a GPU: prefill over packed rows, decoding as a CUDA graph, sampling on the device.

Every forward pass is a recording of one of `gpt2block.passes`. A decoding step reads its tokens and
positions from device memory, where the sampler writes the next ones, so that it is the same graph
each time.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt2block import doctor
from gpt2block.architectures import architecture_of
from gpt2block.checkpoints.gguf_types import InBlocks
from gpt2block.config import ModelConfig
from gpt2block.config.formats import FILE, Formats
from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import CudaArray, compute_capability, to_host
from gpt2block.cuda.kernels import IN_BYTES, TWO_PART
from gpt2block.errors import Argument, InputError
from gpt2block.ops._linear_gguf import normalizes
from gpt2block.ops._linear_hopper import takes_blocks
from gpt2block.ops._products import HOPPER_CAPABILITY, MMA_CAPABILITY, MULTIPLE
from gpt2block.ops._stored import stored
from gpt2block.ops._terms import ROUNDED, Terms
from gpt2block.ops.attention import tensor_cores_take
from gpt2block.ops.attention_cached import continues_exactly
from gpt2block.ops.call import storage
from gpt2block.ops.gated_sums import splits_of
from gpt2block.ops.gemm import allocate_stream_k_workspace, widens
from gpt2block.ops.linear import MORE_ROWS, can_round, terms_of
from gpt2block.passes.blocks import PassSettings
from gpt2block.passes.decoding import DecodePass, SumsPass
from gpt2block.passes.forward import Want, forward
from gpt2block.passes.machine import Machine, two_part_of
from gpt2block.passes.prefill import ROWS_AT_ONCE, Prefill, PrefillPass, Products
from gpt2block.run.cuda_caches import (
    KEPT_SHAPES,
    CudaCache,
    DecodingCaches,
    forget_oldest,
    free_bytes,
)
from gpt2block.run.cuda_decoding import CudaDecoding
from gpt2block.run.cuda_draft import Draft
from gpt2block.run.cuda_prefill import PrefillPrograms, Requested, programs_of
from gpt2block.run.cuda_products import choose_products, divided_weights, divisors, request_kernels
from gpt2block.run.cuda_steps import MOST_GUESSING, DecodingSteps, steps_of
from gpt2block.run.cuda_timeline import timed
from gpt2block.run.guessing import ROWS
from gpt2block.run.model import (
    Floats,
    Ids,
    Output,
    StepResult,
    StoredModel,
    Tensors,
    in_groups,
    padded,
    stored_tensors,
    weight_bytes,
)
from gpt2block.run.recorder import rounded_up
from gpt2block.run.recording import Recording, Recordings
from gpt2block.run.timeline import Call, Timeline
from gpt2block.weights.gguf import GgufMatrix
from gpt2block.weights.matrix import WeightMatrix, request
from gpt2block.weights.two_part import TwoPartMatrix

TOKENS_AT_ONCE = 8192  # of a prefill, which has at least one sequence
KEPT_COUNTS = 32  # numbers of sequences in padded batches whose scratch caches are kept
KEPT_OF_COUNT = 8  # prefill shapes kept for each of them


class CudaModel(StoredModel):
    """A model on one GPU. Matrices are stored in their dtype, (N, K).

    Activations are float32, except for what decoding's products multiply, where they round it, and
    in prefill on a GPU with tensor cores, with heads of a size that the architecture names
    (`on_tensor_cores`): there they have the dtype of 16-bit matrices, with FP8 matrices float16,
    and with float32 matrices operands are two-part. FP8 matrices are widened by each product or
    before it, and activations that float16 cannot hold are divided (`divisors`); of float32
    matrices, the two-part ones are stored in addition, which decoding reads, too.

    Thread-safe: calls run one after another on one stream.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Tensors,
        formats: Formats,
        device: int,
    ) -> None:
        super().__init__(config, formats, f"cuda:{device}")
        self.device = device
        self._architecture, self._settings = architecture_of(config), PassSettings.of(config)
        self._scratch_caches: OrderedDict[tuple[int, int], CudaCache] = OrderedDict()
        self._padded_caches: OrderedDict[tuple[int, int], CudaCache] = OrderedDict()
        self.recordings = Recordings()
        self._caches = DecodingCaches(config, formats)
        self.draft: CudaModel | None = None  # which guesses tokens, where steps compute guesses
        self._lock = threading.RLock()
        self._two_part: dict[str, TwoPartMatrix] = {}
        self._divisors: dict[str, float] = {}
        self._divided: dict[str, Any] = {}
        self._wide: CudaArray | None = None
        self._stream_k_workspace: CudaArray | None = None
        with cupy.cuda.Device(device):
            _check_room(config, formats)
            self.stream = cupy.cuda.Stream(non_blocking=True)
            made = cupy.cuda.Event(disable_timing=True)
            made.record()  # the caller's stream may still compute tensors in device memory
            self.stream.wait_event(made)
            with self.stream:
                request_kernels(config, formats)
                largest = self._store(tensors)
                constants = self._architecture.constants(config, self._vectors)
                self._constants = {name: cupy.asarray(a) for name, a in constants.items()}
                self.products, self._bounds = self._choose_products(largest)
                self._head = self._whole_head() if self.on_tensor_cores else None
                own = continues_exactly(config.head_size, self.formats.fp8_cache)
                of_two_parts = self.products == "two_part"  # attention of a continued one is not
                self.continues_exactly = not (self.on_tensor_cores and (of_two_parts or not own))
                self.divides_prompts = self.continues_exactly
                if self.products == "two_part":
                    self._two_part = {
                        two_part_of(name): TwoPartMatrix.from_float32(matrix.data)
                        for name, matrix in self._matrices.items()
                        if name.startswith("h.") or name == "lm_head"
                    }
                if self.products == "fp8":
                    self._divisors = divisors(config, self._bounds)
                    self._divided = divided_weights(
                        config, self._divisors, self._matrices, self._vectors
                    )
                self.stream.synchronize()

    def __getstate__(self) -> Any:
        raise InputError(
            "a model on a GPU cannot be copied or pickled: load it again with from_pretrained, in "
            "another process too (a Predictor is pickled without its model), or use device='cpu'"
        )

    def _vector(self, array: NDArray[Any]) -> CudaArray:
        return cupy.asarray(array.astype(np.float32, copy=False), order="C")

    def _matrix(self, name: str, array: Any, layout: str) -> WeightMatrix:
        in_blocks = compute_capability() >= MMA_CAPABILITY
        if isinstance(array, InBlocks):
            if in_blocks:
                packed = array.on_device()
                # The file's bytes: of their memory, a smaller matrix would keep all.
                cupy.get_default_memory_pool().free_all_blocks()
                return packed
            array = array.on_host()
        if isinstance(array, GgufMatrix):
            if in_blocks:
                return array.mapped(cupy.asarray)
            array, layout = array.dequantized().T, "NK"
        rows, given = cupy.asarray(array), self.formats
        if not self._matrices:
            request(storage(rows), given.matrix_dtype)
        if layout == "KN":
            rows = stored(rows, storage(rows), transposed=True)
        return WeightMatrix.quantize(rows, given.matrix_dtype, "NK", name, given.allow_nonfinite)

    def _choose_products(self, largest: Mapping[str, float]) -> tuple[Products, dict[str, float]]:
        """Return the kind of prefill products and their operands' bounds; see `choose_products`."""
        return choose_products(self.config, self._matrices, self._vectors, largest)

    @property
    def on_tensor_cores(self) -> bool:
        """Whether prefill is computed on tensor cores."""
        return self.products != "float32"

    def terms(self, rows: int) -> dict[str, tuple[Terms, ...]]:
        """The terms that x can have in decoding's products of so many rows, by their weights.

        None with few rows where LayerNorm is part of the products.
        """
        fused = rows <= MORE_ROWS and self._architecture.NORM == "LayerNorm"
        if fused or self.config.head_size % 2:
            return {}
        matrices = {name: s for name, s in self.config.block_shapes().items() if len(s) == 2}
        head = self.config.n_embd, self.config.vocab_size
        shapes = {name: (K, N) for name, (K, N) in matrices.items()} | {"lm_head": head}
        rounded = self._x_dtype is not None
        if self.formats.dtype == FILE:
            shapes = {name: shape for name, shape in shapes.items() if self._by_wgmma(name)}
            if len(shapes) < len(matrices):
                return {}
        return terms_of(TWO_PART if self._two_part else self.formats.dtype, rows, shapes, rounded)

    @property
    def _x_dtype(self) -> str | None:
        """The dtype to which decoding's products round their input x, or None."""
        inputs = (s[0] for s in self.config.block_shapes().values() if len(s) == 2)
        return ROUNDED if can_round(self.formats.dtype, inputs) else None

    def _whole_head(self) -> tuple[WeightMatrix, CudaArray | None]:
        """lm_head with rows padded to a multiple that tensor cores support, and a bias.

        The padding has logits of -inf. lm_head itself becomes a view without the padding.
        """
        head = self._matrices["lm_head"]
        added = -head.N % MULTIPLE
        if not added:
            return head, None
        bias = cupy.asarray(np.where(np.arange(head.N + added) < head.N, 0, -np.inf), "float32")
        if isinstance(head, GgufMatrix):  # which has whole octets of rows
            (name, n), *others = reversed(head.ranges)
            return replace(head, ranges=(*reversed(others), (name, n + added))), bias
        rows = cupy.zeros((head.N + added, head.K), head.data.dtype)
        rows[: head.N] = head.data
        scale = None
        if head.scale is not None:
            scale = cupy.asarray(np.ones(len(rows), np.float32))
            scale[: head.N] = head.scale
        whole = replace(head, data=rows, scale=scale)
        view = replace(head, data=rows[: head.N])
        same = [name for name, matrix in self._matrices.items() if matrix is head]
        self._matrices.update(dict.fromkeys(same, view))
        return whole, bias

    def describe(self) -> str:
        return doctor.describe_device(self.device)

    def tensors(self) -> Tensors:
        items = iter(stored_tensors(self.config, self._vectors, self._matrices))
        while True:
            with self.running():  # not while the caller uses an item
                item = next(items, None)
            if item is None:
                return
            yield item

    @contextmanager
    def running(self) -> Iterator[None]:
        """Hold the model's lock, with its device and stream current."""
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
                found: list[Floats] = []
                for group in in_groups(sequences, TOKENS_AT_ONCE):
                    found += self._forward(group, want, self._scratch(group))
                return found
            # A row's kernels, and so its bits, must not depend on the other rows.
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
                of_rows = steps_of(self, cache).logits_of(
                    self, np.array(rows, np.int32), tokens, at
                )
                for row, last in zip(rows, of_rows, strict=True):
                    logits[row] = last if want == "last" else last[None]
                    cache.lengths[row] += 1
            return logits

    def _scratch(self, sequences: Sequence[Ids], repeats: bool = False) -> CudaCache:
        """A cache for sequences that no later call continues; all layers share its memory.

        Attention on tensor cores needs no keys and values in it. repeats: the batch was padded, so
        its shapes will recur, and more of their programs are kept.
        """
        count, longest = len(sequences), max(map(len, sequences))
        kept, most = self._scratch_caches, KEPT_SHAPES
        if repeats:
            kept, most = self._padded_caches, KEPT_COUNTS
        shape = count, self.config.n_ctx if repeats else longest
        cache = kept.get(shape)
        if cache is None:
            layers = 0 if self.on_tensor_cores else 1
            cache = CudaCache(self.config, *shape, self.formats, layers)
            cache.kept_shapes = KEPT_OF_COUNT if repeats else KEPT_SHAPES
            kept[shape] = cache
            forget_oldest(kept, most, self.stream)
        kept.move_to_end(shape)
        cache.lengths = [0] * count
        for row, ids in enumerate(sequences):
            cache.frequencies.begin(row, len(ids))
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
            hidden = prefill.out.copy()
            logits = np.empty((len(hidden), self.config.vocab_size), np.float32)
            to_host(self._logits(hidden), logits)
            return np.split(logits, ends)
        hidden = prefill.out.get()
        if want == "hidden":
            return np.split(hidden, ends)
        states, prefill.states = prefill.states, []
        return np.split(np.stack([*states, hidden]), ends, axis=1)

    def log_likelihood(self, sequences: Sequence[Ids]) -> list[Floats]:
        """Compute log-likelihoods as ModelEngine does; launch all groups before copying results."""
        found: list[Floats] = []
        computed: list[tuple[CudaArray, list[int]]] = []
        with self.running():
            for group in in_groups(sequences, TOKENS_AT_ONCE):
                repeats = self.on_tensor_cores
                several = padded(group) if repeats else group
                prefill = self.prefill(several, self._scratch(several, repeats), "log_likelihood")
                computed.append((prefill.out.copy(), prefill.ends[: len(group)]))
            for rows, ends in computed:
                *found_here, _ = np.split(rows.get(), ends)
                found += [row[:-1] for row in found_here]
        return found

    def trace(self, ids: Ids, cached: bool) -> dict[str, NDArray[Any]]:
        V = self.config.vocab_size
        with self.running():
            recording = self._pass(ids, cached)
            copying = ("kv_append", "kv_round", "operand", "rows", "take", "two_part")
            names = [n for n, each in recording.steps.items() if each.step.op not in copying]
            copies = {name: copy.get() for name, copy in recording.trace(names).items()}
            whole = {name: self._whole(name, copy, cached) for name, copy in copies.items()}
        heads = ("logits", "uncapped")
        return {n: a[:, :V] if n.startswith(heads) else a for n, a in whole.items()}

    def run_alone(
        self, ids: Ids, cached: bool, exact: Mapping[str, NDArray[Any]]
    ) -> Iterator[StepResult]:
        with self.running():
            by = {} if cached else self._divisors
            exact = {name: a / by[name] if name in by else a for name, a in exact.items()}
            for each in self._pass(ids, cached).run_alone(exact):
                yield each._replace(out=self._whole(each.name, each.out, cached))

    def timed(self, call: Call) -> list[Timeline]:
        with self.running():
            return timed(self.recordings, call)

    def _whole(self, name: str, result: NDArray[Any], cached: bool) -> NDArray[Any]:
        """The result of a step of `_pass`, times its divisor if it is an activation with one."""
        divided = name in self._divisors and not cached
        return result * np.float32(self._divisors[name]) if divided else result

    def _pass(self, ids: Ids, cached: bool) -> Recording:
        """The recording of a forward pass of one sequence, with its tokens on the device."""
        if not cached:
            prefill = self.prefill([ids], self._scratch([ids]), "log_likelihood")
            return prefill.recording(self, "log_likelihood")
        cache = self.new_cache(1, len(ids))
        self.prefill([ids[:-1]], cache)
        at = np.array([len(ids) - 1], np.int32)
        steps = DecodingSteps(self, cache, floats=True)
        return steps.next_token(self, np.zeros(1, np.int32), ids[-1:], at).recording

    def decode(
        self, slots: int, n_ctx: int, fewer: bool = False, speculate: bool = False
    ) -> CudaDecoding:
        smaller = self.draft if speculate else None
        if smaller is not None:
            most = MOST_GUESSING // ROWS[0]
            if slots > most and not fewer:
                raise InputError(
                    f"{slots:,} texts together with a draft model: expected at most {most}, as a "
                    f"step has {MOST_GUESSING} rows with guesses: use ",
                    Argument("rows_at_once"),
                    f" of {most}",
                )
            slots = min(slots, most)
        with self.running():
            cache = self._caches.take(slots, n_ctx, fewer)
            slots = min(slots, cache.batch)
            if smaller is None:
                decoding = CudaDecoding(self, cache, slots, speculate)
            else:
                draft, kept = smaller.drafting(cache.batch, n_ctx)
                decoding = CudaDecoding(self, cache, slots, speculate, draft)
                weakref.finalize(decoding, smaller._caches.give_back, kept).atexit = False
            weakref.finalize(decoding, self._caches.give_back, cache).atexit = False
            return decoding

    def drafting(self, slots: int, n_ctx: int) -> tuple[Draft, CudaCache]:
        """Return a Draft that guesses tokens for another model's slots, and the Draft's cache."""
        with self.running():
            cache = self._caches.take(slots, n_ctx, fewer=False)
            return Draft(self, cache), cache

    def prefill(
        self, sequences: Sequence[Ids], cache: CudaCache, want: Requested | None = None
    ) -> PrefillPrograms:
        """Compute the sequences through all blocks, each appended to its row of the cache.

        Nonempty sequences must either all be new, or all continue their row of the cache.
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
        hopper = compute_capability() == HOPPER_CAPABILITY
        appends = hopper and tensor_cores_take("hopper", self.config.head_size)
        return Prefill(
            self.products,
            rows,
            batch,
            longest,
            cached=cached,
            continued=continued and self.on_tensor_cores,
            ends=ends,
            kv_dtype=self.formats.fp8_cache,
            gated=self.products == "16_bits" and hopper,
            appends=appends and self.formats.fp8_cache is None,
        )

    def given(self) -> dict[str, Any]:
        """Weights by their names in a plan, as decoding uses them."""
        return {**self._vectors, **self._matrices, **self._constants, **self._two_part}

    def prompt_weights(self, head: bool) -> dict[str, Any]:
        """Weights as prefill uses them, with memory for converted ones.

        head: with the padded lm_head for logits of all tokens as "head" and "head_bias".
        """
        given: dict[str, Any] = {**self.given(), **self._divided}
        if head:
            given |= self._head_of_all()
        if self.products == "fp8":
            used = [m for name, m in self._matrices.items() if name.startswith("h.")]
            used += [given["head"]] if head else []
            before = (m for m in used if m.dtype in IN_BYTES and not widens(m))
            size = max((m.N * m.K for m in before), default=0)
            if size and (self._wide is None or self._wide.size < size):
                self._wide = cupy.empty(size, "float16")
            if size:
                given["wide"] = self._wide
            if any(widens(m) for m in used):
                if self._stream_k_workspace is None:
                    self._stream_k_workspace = allocate_stream_k_workspace()
                given["stream_k_workspace"] = self._stream_k_workspace
        return given

    def _head_of_all(self) -> dict[str, Any]:
        """lm_head for the logits of all tokens; padded parts of float32 are made on first use."""
        matrix, bias = self._head or (self._matrices["lm_head"], None)
        head: Any = matrix
        if self.products == "two_part":
            name = "lm_head" if bias is None else "head"
            if two_part_of(name) not in self._two_part:
                self._two_part[two_part_of(name)] = TwoPartMatrix.from_float32(matrix.data)
            head = self._two_part[two_part_of(name)]
        return {"head": head, "head_bias": bias}

    def _logits(self, hidden: CudaArray) -> Iterator[CudaArray]:
        """Yield the logits of ROWS_AT_ONCE rows at a time, in the same memory; padding is -inf.

        hidden: apart from the memory of recordings.
        """
        shape = Prefill(self.products, len(hidden), 1, len(hidden), cached=False)
        tensors = {**self.prompt_weights(head=True), "normed": hidden}

        def run(do: Machine, first: int, end: int) -> Any:
            return self._prefill_pass(shape, do).logits_of("normed", first, end)

        for first in range(0, len(hidden), ROWS_AT_ONCE):
            end = min(len(hidden), first + ROWS_AT_ONCE)
            recording = self.recordings.make(partial(run, first=first, end=end), tensors)
            recording.run()
            yield recording.out

    def _prefill_pass(self, shape: Prefill, do: Machine) -> PrefillPass:
        return shape.over(do, self._settings, self.formats.dtype, self._bounds)

    def forward_pass(self, shape: Prefill, do: Machine, want: Want | None) -> Any:
        """A prefill of this shape, to what is wanted."""
        return forward(self._prefill_pass(shape, do), self._architecture, self.config, want)

    def decode_pass(
        self, do: Machine, rows: int, terms: Mapping[str, Any] | None, together: int = 1
    ) -> Any:
        """A step of decoding of so many rows, `together` of a sequence, to logits.

        terms: as `DecodePass` takes them. None: all results can be read, so no layer has fewer of
        them either.
        """
        norms, bounds = rows <= MORE_ROWS, self._bounds if self._two_part else {}
        shapes, dtype = self.config.block_shapes(), self.formats.dtype
        splits = 0
        if terms == {}:
            types = self._types_of_ffn() if dtype == FILE else ()
            splits = splits_of(dtype, rows, shapes, types, self.config.head_size)
        fp8_cache = self.formats.fp8_cache
        step: DecodePass
        if splits:
            step = SumsPass(do, self._settings, splits, fp8_cache, self._x_dtype, together)
        else:
            in_blocks = terms is not None and self._in_blocks()
            if in_blocks:
                norms = normalizes(rows, self.config.n_embd) and not terms
            given = norms, terms, fp8_cache, bounds, self._x_dtype, together, in_blocks
            step = DecodePass(do, self._settings, *given)
        return forward(step, self._architecture, self.config, "logits")

    def _in_blocks(self) -> bool:
        """Whether products with blocks of a GGUF file can gate, and turn whole heads."""
        layers = [f"h.{n}." for n in range(self.config.n_layer)]
        if f"{layers[0]}w_gate" not in self._matrices:
            return False
        for h in layers:
            found = [self._matrices[f"{h}{name}"] for name in ("w_qkv", "w_gate", "w_up")]
            blocks = [w for w in found if isinstance(w, GgufMatrix)]
            if len(blocks) < len(found) or blocks[1].ranges != blocks[2].ranges:
                return False
            if any(begin % self.config.head_size for begin in blocks[0].begins):
                return False
        return True

    def _types_of_ffn(self) -> set[tuple[str, str]]:
        """Types of w_gate and w_down in the layers, where all are blocks, and each of one type."""
        types: set[tuple[str, str]] = set()
        for n in range(self.config.n_layer) if self._in_blocks() else ():
            found = [self._matrices[f"h.{n}.{name}"] for name in ("w_gate", "w_down", "w_o")]
            blocks = [w.ranges for w in found if isinstance(w, GgufMatrix)]
            if len(blocks) < len(found) or any(len(ranges) > 1 for ranges in blocks[:2]):
                return set()
            types.add((blocks[0][0][0], blocks[1][0][0]))
        return types

    def _by_wgmma(self, name: str) -> bool:
        """Whether all matrices of this name are blocks that products by wgmma take."""
        head = self.config.head_size if name == "w_qkv" and self._settings.rope else 0
        names = [n for n in self._matrices if n == name or n.endswith(f".{name}")]
        found = [self._matrices[n] for n in names]
        gates = name not in ("w_gate", "w_up") or self._in_blocks()
        return gates and all(isinstance(w, GgufMatrix) and takes_blocks(w, head) for w in found)


def _check_room(config: ModelConfig, formats: Formats) -> None:
    """Raise MemoryError, before a tensor is read, if the weights do not fit on the device."""
    needed, free = weight_bytes(config, formats), free_bytes()
    if needed > free:
        raise MemoryError(
            f"Out of memory: the weights take {needed:,} bytes in {formats.dtype}, the GPU has "
            f"{free:,} bytes free: expected a narrower dtype, or a GPU with more memory"
        )

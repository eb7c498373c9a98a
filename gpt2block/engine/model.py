"""The interface of a model engine, which computes logits, hidden states and tokens."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, Protocol, TypeVar
from zlib import crc32

import numpy as np
from numpy.typing import DTypeLike, NDArray

from gpt2block.cuda.formats import FILE, GGUF, Formats, itemsize, own_cache_dtype
from gpt2block.cuda.kernels import IN_BYTES
from gpt2block.engine.adapters import NONE, Adapters
from gpt2block.engine.grammars import Matcher
from gpt2block.engine.passes import check_read, model_steps
from gpt2block.engine.passes.bounds import bounds_of
from gpt2block.engine.recorder import rounded_up
from gpt2block.engine.timeline import Call, Timeline
from gpt2block.errors import Argument, InputError
from gpt2block.files.checkpoints.checkpoint import Checkpoint
from gpt2block.models.config import (
    TABLES,
    LayerCache,
    ModelConfig,
    is_matrix,
    model_shapes,
    state_shapes,
)
from gpt2block.models.weights.gguf import TYPES
from gpt2block.models.weights.matrix import SCALED, WeightMatrix, check_finite, on_host
from gpt2block.sampling import Sampling

Ids = NDArray[np.int32]  # (T,), the token ids of one sequence
Floats = NDArray[np.float32]
Tensors = Iterable[tuple[str, np.ndarray, str | None]]  # name, array, layout; None for a vector
Output = Literal["logits", "last", "hidden", "states"]

Item = TypeVar("Item")
FLOAT16 = float(np.finfo(np.float16).max)


def weight_bytes(
    config: ModelConfig, formats: Formats, shapes: Mapping[str, tuple[int, ...]] | None = None
) -> int:
    """Return the bytes of a model's weights: matrices, scales of E4M3 matrices, float32 vectors.

    shapes: {name: shape} of the tensors, if they are a shard of the model's. For dtype "file", a
    lower bound: the bytes that the types Q4_0 and Q4_K would need.
    """
    total = 0
    for name, shape in (shapes or model_shapes(config)).items():
        if not is_matrix(name, shape):
            total += 4 * math.prod(shape)
            continue
        dtype = formats.dtype_of(name)
        total += int(math.prod(shape) * (4.5 / 8 if formats.dtype == FILE else itemsize(dtype)))
        if dtype == SCALED:  # one scale per output (row of a table or lm_head)
            total += 4 * shape[0 if name in (*TABLES, "lm_head") else 1]
    return total


def stored_tensors(
    config: ModelConfig, vectors: Mapping[str, object], matrices: Mapping[str, WeightMatrix]
) -> Tensors:
    """Yield tensors in the order of `model_shapes`; copy each to the host only when reached."""
    for name in model_shapes(config):
        matrix = matrices.get(name)
        if matrix is None:
            yield name, on_host(vectors[name]), None
        elif matrix.dtype in IN_BYTES:
            layout = matrix.layout
            values = matrix.dequantized()
            yield name, values if layout == "KN" else values.T, layout
        else:
            yield name, on_host(matrix.data), matrix.layout


class StoredModel(ABC):
    """Base class of model engines, which stores the weights in the formats of the model."""

    divides_prompts, continues_exactly = True, False
    checkpoint: Checkpoint | None = None
    adapters = Adapters.none()

    def __init__(self, config: ModelConfig, formats: Formats, device: str) -> None:
        check_read(config, model_steps(config))  # GPU recordings run the same pass functions
        self.config, self.formats = config, formats
        self.cache_kind = cache_kind(config, formats, device)
        self._vectors: dict[str, Any] = {}
        self._matrices: dict[str, WeightMatrix] = {}
        self._orders: dict[str, Any] = {}  # on a GPU: "<matrix>.order" → its `input_order`

    @property
    def nbytes(self) -> int:
        tied = {"lm_head"} if self.config.tie_word_embeddings else ()  # in the memory of wte
        matrices = sum(m.nbytes for name, m in self._matrices.items() if name not in tied)
        return matrices + sum(int(a.nbytes) for a in self._vectors.values())

    def use_adapters(self, adapters: Adapters) -> None:
        """Let sequences use these adapters. Call this before the first sequence."""
        self.adapters = adapters

    def _store(self, tensors: Tensors) -> dict[str, float]:
        """Store the tensors; return a dict from names to largest magnitudes. Raises InputError.

        Vectors are biases, γ, β and wpe.
        """
        largest: dict[str, float] = {}
        for name, array, layout in tensors:
            if layout is None:
                if not self.formats.allow_nonfinite:
                    check_finite(name, array)
                largest[name] = float(np.abs(array.astype(np.float32, copy=False)).max())
                self._vectors[name] = self._vector(name, array)
            else:
                matrix = self._matrix(name, array, layout)
                if matrix.dtype == GGUF:
                    self._check_blocks(name, matrix.largest or 0.0)
                largest[name] = matrix.largest or 0.0
                self._matrices[name] = matrix
            del array  # frees its memory before the next array is read
        if self.formats.dtype == FILE and all(m.dtype != GGUF for m in self._matrices.values()):
            raise InputError(
                Argument("dtype"),
                f" {FILE!r}: expected a GGUF file with matrices of {', '.join(TYPES)}, or another "
                "file with matrices of 4 bits, got none: ",
                "use ",
                Argument("dtype", "float16"),
            )
        for name, w in self._matrices.items():
            gate = self._matrices.get(name.replace("w_up", "w_gate"), w)
            if not np.array_equal(w.input_order, gate.input_order):
                raise InputError(f"{name}: expected the order of inputs of w_gate, got another one")
        if not self.formats.allow_nonfinite:
            self._check_stream(largest)
        self._matrices.setdefault("lm_head", self._matrices["wte"])
        return largest

    def _check_stream(self, largest: Mapping[str, float]) -> None:
        """Check the residual stream by magnitudes, then for short convolutions by norms of rows.

        A convolution multiplies three products, so that bounds by magnitudes are far too large.
        """
        try:
            check_stream(self.config, largest)
        except InputError:
            convs = [f"h.{n}." for n, conv in enumerate(self.config.conv_layers) if conv]
            if not convs:
                raise
            check_stream(self.config, {**largest, **{f"{h}w_in": self._mean(h) for h in convs}})

    def _mean(self, h: str) -> float:
        """Return the magnitude of w_in if each weight of the row with the largest norm had it."""
        gamma = on_host(self._vectors[f"{h}gamma1"])
        rows = self._matrices[f"{h}w_in"].dequantized() * gamma[:, None]
        most = float(np.linalg.norm(rows, axis=0).max())
        return most / (math.sqrt(len(gamma)) * (float(np.abs(gamma).max()) or 1.0))

    def _check_blocks(self, name: str, largest: float) -> None:
        """Raise InputError if a GGUF matrix's largest magnitude is NaN or too large for float16."""
        if not largest <= FLOAT16 and not self.formats.allow_nonfinite:
            raise InputError(
                f"{name}: blocks of magnitudes up to {largest:.1e}: expected at most "
                f"{FLOAT16:.0f}, as products of prompts round them to float16 "
                "(allow_nonfinite=True permits others): use ",
                Argument("dtype", "float32"),
                " for larger ones",
            )

    @abstractmethod
    def _vector(self, name: str, array: np.ndarray) -> Any:
        """Return a vector as a float32 array of the backend."""

    @abstractmethod
    def _matrix(self, name: str, array: np.ndarray, layout: str) -> WeightMatrix:
        """Return a matrix converted to the dtype of the model."""


def check_stream(config: ModelConfig, largest: Mapping[str, float]) -> None:
    """Raise InputError if the sum of squares in a LayerNorm or RMSNorm could overflow float32.

    The variance would be infinite, the normalized row constant, and the logits finite but wrong.
    Any other overflow produces an infinity or a NaN that reaches the logits.

    largest: the largest magnitude of every tensor. The bounds of the residual stream hold for all
    inputs. Deviations from the mean are at most twice the bound on the residual stream, and C of
    their squares are summed.
    """
    first, _ = config.outer_shapes()
    limit = math.sqrt(float(np.finfo(np.float32).max) / config.n_embd) / 2
    seen: list[str] = []
    for layer, stream in enumerate(bounds_of(config, largest)[0], -1):
        seen += first if layer < 0 else [f"h.{layer}.{name}" for name in config.shapes_of(layer)]
        if stream > limit:
            worst = max(seen, key=lambda name: largest[name])
            raise InputError(
                f"{worst}: its largest magnitude is {largest[worst]:.1e}: the residual stream can "
                f"reach {stream:.1e}, and from {limit:.1e} on {config.NORM}'s squares "
                "overflow float32: expected smaller weights (allow_nonfinite=True permits these)"
            )


def in_groups(
    sequences: Iterable[Item],
    tokens: int,
    length: Callable[[Item], int] = len,  # type: ignore[assignment]
) -> Iterator[list[Item]]:
    """Split sequences, in order, into lists: each has at most `tokens` tokens or one sequence."""
    group: list[Item] = []
    taken = 0
    for each in sequences:
        more = length(each)
        if group and taken + more > tokens:
            yield group
            group, taken = [], 0
        group.append(each)
        taken += more
    if group:
        yield group


def padded(group: list[Ids]) -> list[Ids]:
    """Return the sequences, followed by padding sequences, which are empty or contain only 0.

    Padding adds at most a sixteenth of the tokens and about a quarter of the sequences. Many
    batches then have the same shape and reuse each other's launches and graphs on a GPU.
    """
    tokens, count = sum(map(len, group)), len(group)
    longest = max(map(len, group))
    missing = rounded_up(tokens, 16) - tokens
    more = rounded_up(count + -(-missing // max(1, longest)), 4) - count
    return [*group, *np.array_split(np.zeros(missing, np.int32), more)] if more else group


# Operations of a pass whose results are no rows of the pass, which is why they are not compared
UNCOMPARED = ("kv_append", "delta_spans", "delta_inputs", "expert_tiles")
# n_layer, channels of keys (if layers differ, of keys and values that each layer stores), dtype,
# device, checksum of RoPE frequencies ("" if always the same)
CacheKind = tuple[int, int | tuple[int, ...], str, str, str]


def cache_kind(config: ModelConfig, formats: Formats, device: str) -> CacheKind:
    """Return the CacheKind: properties that a kv_cache and the model that uses it must share."""
    sets = short_and_long(config)
    rope = f"longrope {crc32(sets.tobytes()):x}" if len(sets) else ""
    caches = enumerate(config.layer_caches)
    widths = tuple(each.keys + each.values if each.layer == n else 0 for n, each in caches)
    width = widths if {*widths} != {2 * config.kv_width} else config.kv_width
    return config.n_layer, width, formats.cache_dtype, device, rope


def short_and_long(config: ModelConfig) -> NDArray[np.float64]:
    """Return RoPE's frequencies (2, D / 2) of short and long sequences; empty if both are equal."""
    short = config.short_context
    both: list[Any] = [replace(config, n_ctx=short), config] if short else []
    return np.array([each.frequencies() for each in both])


class KVCache(Protocol):
    """The keys and values of a batch, up to `n_ctx` tokens per sequence."""

    kind: CacheKind
    batch: int
    n_ctx: int
    lengths: list[int]  # number of cached tokens of each sequence

    @property
    def nbytes(self) -> int:
        """Bytes of memory for the keys and values of all sequences."""


class SequenceFrequencies:
    """RoPE's frequencies for each sequence of a kv_cache, if they depend on sequence length.

    tensors: name in a pass → frequencies of all sequences, (batch, head_size / 2) float64; empty if
    all sequences have the same frequencies.
    """

    def __init__(self, config: ModelConfig, batch: int, n_ctx: int, library: Any) -> None:
        """Set the frequencies of all sequences to the frequencies for sequences of n_ctx tokens.

        library: module of the cache's arrays, NumPy or CuPy.
        """
        self.tensors: dict[str, Any] = {}
        self._short, self._copy = config.short_context, library.copyto
        if self._short:
            sets, self._long = short_and_long(config), [n_ctx > self._short] * batch
            self._sets = library.asarray(sets)
            self.tensors["frequencies"] = library.asarray(sets[np.array(self._long, int)])

    def begin(self, sequence: int, n_tokens: int) -> None:
        """Set the frequencies of a new sequence of up to n_tokens tokens."""
        long = n_tokens > self._short
        if self._short and long != self._long[sequence]:
            self._copy(self.tensors["frequencies"][sequence], self._sets[int(long)])
            self._long[sequence] = long


def stored_rows(caches: Iterable[LayerCache]) -> Iterator[tuple[LayerCache, int]]:
    """Yield (cache of the layer, channels) of the arrays of a kv_cache: K of layer 0, V of it, …

    A layer without keys or values, or that reads the rows of another layer, has fewer arrays.
    """
    for layer, each in enumerate(caches):
        for width in (each.keys, each.values) if each.layer == layer else ():
            if width:
                yield each, width


def layer_rows(
    caches: Sequence[LayerCache], make: Callable[[LayerCache, int], Any]
) -> list[tuple[Any, Any]]:
    """Return for each layer its arrays (k, v); None for an array that the layer does not have.

    make: called for each item of `stored_rows`, returns the array.
    """
    arrays: dict[int, tuple[Any, ...]] = {}
    for layer, each in enumerate(caches):
        if each.layer == layer:
            arrays[layer] = tuple(make(each, n) if n else None for n in (each.keys, each.values))
    return [arrays[each.layer] for each in caches]


def in_shared_memory(caches: Sequence[LayerCache]) -> tuple[LayerCache, ...]:
    """Return caches for sequences that no later pass continues: equal layers share their rows.

    Layers whose rows other layers read keep their own rows.
    """
    kept = {each.layer for layer, each in enumerate(caches) if each.layer != layer}
    first: dict[LayerCache, int] = {}
    return tuple(
        each
        if each.layer in kept
        else each._replace(layer=first.setdefault(each._replace(layer=0), each.layer))
        for each in caches
    )


def row_dtype(cache: LayerCache, formats: Formats) -> str:
    """Return the dtype of a layer's rows in a kv_cache."""
    return formats.cache_dtype if cache.narrow else own_cache_dtype(formats.dtype)


def token_bytes(caches: Iterable[LayerCache], formats: Formats) -> int:
    """Return the bytes of one token's rows in a kv_cache of these layers."""
    rows = stored_rows(caches)
    return sum(width * itemsize(row_dtype(each, formats)) for each, width in rows)


def by_name(layers: Iterable[tuple[object, object]]) -> dict[str, Any]:
    """Return {tensor name: array} of all layers' arrays (k, v), as `layer_rows` returns them."""
    return {
        f"h.{n}.{half}": array
        for n, pair in enumerate(layers)
        for half, array in zip("kv", pair, strict=True)
        if array is not None
    }


def cache_tensors(cache: Any) -> dict[str, Any]:
    """Return {tensor name: array} of a cache: K and V or states, and RoPE's frequencies.

    cache.layers: the result of `layer_rows`, or an empty list without memory for keys and values.
    """
    return {**cache.frequencies.tensors, **by_name(cache.layers), **cache.states}


def new_states(config: ModelConfig, slots: int, library: Any, kept: bool = True) -> dict[str, Any]:
    """Return {tensor name: array} of the states of gated delta nets; empty if there are none.

    library: module of the arrays, NumPy or CuPy. kept: whether later passes continue sequences;
    otherwise there are no states but `held`, which says so.
    """
    shapes = state_shapes(config, slots).items()
    return {
        name: library.full(shape, -1, "int32")
        if name == "held"
        else library.zeros(shape, "float32")
        for name, shape in shapes
        if kept or name == "held"
    }


def state_bytes(config: ModelConfig) -> int:
    """Return the bytes that gated delta nets store per sequence."""
    return 4 * sum(map(math.prod, state_shapes(config, 1).values()))


def check_divides(config: ModelConfig, gpus: int) -> None:
    """Raise InputError if so many GPUs cannot divide a model with this config."""
    parts = {
        "gated delta nets are": config.delta_nets,
        "mixtures of experts are": config.experts,
        "a block that drafts tokens is": config.draft_config,
    }
    whole = next((words for words, part in parts.items() if part is not None), "")
    if gpus > 1 and whole:
        raise InputError(
            f"{config.MODEL_TYPE} on {gpus} GPUs: expected one GPU, as {whole} not divided among "
            "several"
        )


def describe_cache(cache: KVCache) -> str:
    """Return the `repr` of a kv_cache: one line with its sizes, dtype and device."""
    n_layer, width, dtype, device, _ = cache.kind
    filled = ", ".join(map(str, cache.lengths[:4])) + (", …" if cache.batch > 4 else "")
    return (
        f"{type(cache).__name__}(n_layer={n_layer}, width={width}, batch={cache.batch}, "
        f"n_ctx={cache.n_ctx}, lengths [{filled}], {dtype}, {device}, {cache.nbytes:,} bytes)"
    )


# Source of the draft tokens of a Decoding's steps. False: none; True: earlier tokens of the text, a
# block of the model, or a draft model; "known": Start.known; "forced": the same, which are then
# reported in any case.
Drafts = Literal[False, True, "known", "forced"]


class Start(NamedTuple):
    """A sequence to start in a slot of a Decoding: its prompt, sampling options and limits."""

    slot: int
    ids: Ids  # (T,), the prompt's tokens, at least one
    sampling: Sampling
    steps: int  # maximum tokens to sample, at least 1; len(ids) + steps - 1 is at most n_ctx
    sampled: int = 0  # number of tokens that the sequence has sampled earlier
    occurred: Ids | None = None  # tokens that the repetition penalty counts as occurred; None: ids
    cached: int = 0  # number of first ids whose keys and values the slot holds already
    alternatives: int = 0  # number of most likely tokens to report with each sampled token
    limit: int = 0  # maximum tokens of the sequence; 0: len(ids) + steps
    matcher: Matcher | None = None  # decides which tokens can be sampled; None: all tokens
    known: Ids | None = None  # the tokens after ids that are drafts, one for each of `steps`
    adapter: int = NONE.number  # number of the sequence's adapter

    @property
    def n_tokens(self) -> int:
        """The most tokens that the sequence may have, which can determine its RoPE frequencies."""
        return self.limit or len(self.ids) + self.steps

    def counts(self, V: int) -> Ids:
        """Return how often each token of the vocabulary was sampled in the sequence, (V,)."""
        occurred, n = self.occurred, self.sampled
        sampled = self.ids[:0] if occurred is None else occurred[len(occurred) - n :]
        return np.bincount(sampled, minlength=V).astype(np.int32)


class Alternatives(NamedTuple):
    """The K most likely tokens at N positions, and their log-probabilities, most likely first."""

    ids: Ids  # (N, K); -1 fills a row if the vocabulary has fewer than K tokens
    logprobs: Floats  # (N, K)


class Sampled(NamedTuple):
    """The tokens just sampled for slots, as arrays (N,). A slot can have several entries."""

    slots: Ids
    tokens: Ids  # token ids; -1 if the logits were NaN
    logprobs: Floats  # log-probabilities under the unmodified logits
    top: Alternatives | None = None  # the most likely tokens, if any slot requests them
    # Whether each token was drafted, so that its step also samples the next; None: no draft tokens.
    drafted: NDArray[np.bool_] | None = None
    # The number of the entry among its slot's entries, from 0, ascending; None: one for each slot.
    nth: Ids | None = None


NOTHING = Sampled(np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.float32))


def without_slots(sampled: Sampled, slots: Ids) -> Sampled:
    """Return `sampled` without the tokens of `slots`."""
    kept = ~np.isin(sampled.slots, slots)
    own, tokens, logprobs, top, drafted, nth = sampled
    top = top and Alternatives(top.ids[kept], top.logprobs[kept])
    drafted = drafted if drafted is None else drafted[kept]
    nth = nth if nth is None else nth[kept]
    return Sampled(own[kept], tokens[kept], logprobs[kept], top, drafted, nth)


class Decoding(Protocol):
    """A batch of sequences, each in a slot. Sequences grow step by step, on the device.

    A sequence leaves its slot when it has sampled its number of steps, or by `stop`. Another
    sequence can then start in the slot. The tokens of a sequence depend neither on its slot nor on
    other sequences.
    """

    slots: int
    n_ctx: int  # number of positions per slot

    def start_up(self, continued: bool) -> Iterator[tuple[int, int]]:
        """Compile the kernels and record the launches of sequences, before any sequence runs.

        continued: whether sequences may begin with cached tokens. Yields (tasks done, all tasks)
        before each task; yields nothing if there is nothing to do.
        """

    def start(self, starts: Sequence[Start]) -> None:
        """Start sequences in free slots; later calls of `next` return their tokens."""

    def extend(self, starts: Sequence[Start]) -> None:
        """Compute K and V of ids[cached:] of unfinished prompts, for a later call of `start`."""

    def copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy keys, values and states of a slot's first tokens to a free slot, in order.

        copies: (source slot, target slot, number of tokens) of each copy.
        """

    def reusable(self, source: int, target: int, tokens: int) -> int:
        """Return how many of the first `tokens` tokens of slot `source` slot `target` can reuse."""

    def next(self) -> Sampled:
        """Return the next sampled tokens: at most one of each sequence, in the sequence's order.

        Returns no tokens if all sequences wait for masks that take long.
        Raises RuntimeError when no slot holds a sequence.
        """

    def stop(self, slots: Ids) -> None:
        """End the sequences in `slots`, (N,), early, and free the slots."""


class ModelEngine(Protocol):
    """A model on a backend. Callers have checked that ids are in range and sequences fit n_ctx.

    divides_prompts: whether long prompts may be processed in several passes without taking much
    longer. continues_exactly: whether results are bitwise equal if the first part of a prompt was
    computed earlier.
    """

    formats: Formats
    divides_prompts: bool
    continues_exactly: bool
    adapters: Adapters

    @property
    def config(self) -> ModelConfig:
        """The model's configuration, such as n_layer and n_embd."""

    @property
    def cache_kind(self) -> CacheKind:
        """The CacheKind (layers, width, dtype, device) of kv_caches that the model accepts."""

    @property
    def nbytes(self) -> int:
        """Bytes of the stored weights."""

    def describe(self) -> str:
        """Return a text that describes the device."""

    def tensors(self) -> Tensors:
        """Yield name, array and layout of every stored tensor; FP8 is converted to float32."""

    def new_cache(self, batch: int, n_ctx: int) -> KVCache:
        """Return an empty kv_cache for `batch` sequences of up to `n_ctx` tokens each."""

    def forward(self, sequences: Sequence[Ids], want: Output, cache: Any = None) -> list[Floats]:
        """Return the output named by `want` for each sequence.

        want: "logits" (T, V); "last", the logits of the last token (V,); "hidden" (T, C), after the
        final norm; "states" (n_layer + 2, T, C), the residual stream before, between and after
        the blocks, then hidden. With a cache, sequence b continues sequence b of the cache; an
        empty one changes nothing in the cache.
        """

    def log_likelihood(self, sequences: Sequence[Ids]) -> list[Floats]:
        """Return log-probabilities (T - 1,) of each sequence's T tokens, except for the first."""

    def likeliest(self, sequences: Sequence[Ids]) -> list[tuple[Floats, Ids]]:
        """Return the `log_likelihood` of each sequence, and the most likely tokens (T - 1,).

        The most likely tokens are predicted at the same positions. Equal logits are sorted by id.
        """

    def decode(
        self, slots: int, n_ctx: int, fewer: bool = False, speculate: Drafts = False
    ) -> Decoding:
        """Return a Decoding whose slots are free, for sequences of up to n_ctx tokens.

        fewer: whether there may be fewer slots, if memory has no room for more, or more would not
        be faster. speculate: draft tokens that a step may compute, too, if the results stay the
        same to the last bit. "forced": report each known token, with its log-probability, in place
        of a sampled token; the temperature of all sequences must be 0. Raises MemoryError.
        """


class StepResult(NamedTuple):
    """The result of one step of a forward pass, and the step's time in ms."""

    name: str
    kernel: str  # names of the step's kernels, or of its reference function
    out: np.ndarray  # (rows, channels)
    ms: float


class TracedEngine(ModelEngine, Protocol):
    """A model engine that returns results and times of each step of a sequence's forward pass.

    cached: the pass computes the last token only, with earlier keys and values in a kv_cache.
    checkpoint: the weights' checkpoint; None for weights given as arrays.
    """

    checkpoint: Checkpoint | None

    def use_adapters(self, adapters: Adapters) -> None:
        """Let sequences use these adapters. Call this before the first sequence."""

    def trace(self, ids: Ids, cached: bool) -> dict[str, np.ndarray]:
        """Run the steps in order; return a dict from step names to results (rows, channels)."""

    def run_alone(
        self, ids: Ids, cached: bool, exact: Mapping[str, np.ndarray]
    ) -> Iterator[StepResult]:
        """Run every step on exact inputs, rounded to their storage dtype, not on earlier results.

        exact: the tensors of the pass by name, and K and V of the sequence as "h.0.k" (1, T, C).
        """

    def timed(self, call: Call) -> list[Timeline]:
        """Call `call`, which uses this engine; return a Timeline of each forward pass that it runs.

        On a GPU each pass is measured before it runs; each group of sequences is a pass. On several
        GPUs, a pass has a Timeline for each GPU, in order. With NumPy the call is one timeline.
        Work outside of passes is not measured.
        """


def tensors_of(
    engine: ModelEngine,
    dtype: DTypeLike | None = None,
    wanted: Callable[[str, int], bool] = lambda name, ndim: True,
) -> dict[str, np.ndarray]:
    """Return {name: array} of stored tensors: matrices (K, N), also of a tied lm_head.

    dtype: of the arrays; None for the stored dtype. wanted: chooses by name and number of axes.
    """
    found = {
        name: np.asarray(array.T if layout == "NK" else array, dtype)
        for name, array, layout in engine.tensors()
        if wanted(name, array.ndim)
    }
    return {"lm_head": found["wte"], **found}


def start_all(
    engine: ModelEngine, prompts: Sequence[Ids], sampling: Sequence[Sampling], steps: int
) -> Decoding:
    """Start each prompt in a slot of a new Decoding, to sample `steps` tokens; return it."""
    n_ctx = max(map(len, prompts)) + steps - 1
    decoding = engine.decode(len(prompts), n_ctx)
    sequences = zip(prompts, sampling, strict=True)
    decoding.start([Start(slot, *each, steps) for slot, each in enumerate(sequences)])
    return decoding

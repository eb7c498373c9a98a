"""Prefill of a GPT-2 on a GPU: the new tokens of all sequences as rows of one matrix.

Only attention, the encoder and the kv_cache know of sequences. A layer is

    norm       LayerNorm
    qkv        product
    append     K and V into the kv_cache
    attention  of the rows
    attn       product, residual
    norm       LayerNorm
    fc         product, GELU
    proj       product, residual

and what follows the last attention is done for those rows alone that somebody asks for. The
residual stream is float32 always, and all sums are. Beside it there are two ways:

    Plain        activations in float32, weights in any dtype; attention over the kv_cache, which
                 is there even if nobody goes on behind it, one for all layers then
    TensorCores  activations and weights in one dtype of 16 bits; attention over the rows of qkv
                 themselves, but over the kv_cache for those that have tokens in it before

A row's kernels, and so its bits, depend on its own sequence alone. Tokens, positions and lengths
are in device memory: a call of a shape that was there before is the same CUDA graph, in which the
kernels of TensorCores overlap.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import numpy as np

from gpt2block.cuda import cupy, overlap
from gpt2block.cuda.arrays import Bound, CudaArray, pinned
from gpt2block.cuda.kernels import Launch
from gpt2block.ops.attention import bind as bind_attention_
from gpt2block.ops.attention_cached import bind as bind_attention_cached
from gpt2block.ops.attention_cached import bind_append
from gpt2block.ops.gemm import bind as bind_gemm
from gpt2block.ops.layernorm import bind as bind_layernorm
from gpt2block.run.model import Floats, Ids, Want

if TYPE_CHECKING:
    from gpt2block.run.cuda_model import CudaCache, CudaModel


Asked = Want | Literal["log_likelihood"]


class Shape(NamedTuple):
    """What the launches of a prefill follow from, beside the cache."""

    rows: int
    longest: int  # of the sequences' new tokens, or somewhat more
    fresh: bool = True  # some begin here
    going_on: bool = False  # some go on behind tokens in the cache


class _Gather(NamedTuple):
    """Rows of `source` → out, as a launch and a bound op in one."""

    source: CudaArray
    rows: CudaArray
    out: CudaArray

    @property
    def launches(self) -> tuple[_Gather]:
        return (self,)

    def run(self) -> None:
        cupy.take(self.source, self.rows, axis=0, out=self.out)


@dataclass
class _Way:
    """From the tokens to what is asked for; the graph is captured when it is asked for again."""

    bounds: tuple[Bound | _Gather, ...]
    out: CudaArray
    ran: bool = False
    graph: Any = None

    def launch(self, run: Callable[[Launch], None]) -> None:
        for bound in self.bounds:
            for each in bound.launches:
                if isinstance(each, Launch):
                    run(each)
                else:
                    each.run()


class Prefill(ABC):
    """Launches for one shape and cache, bound once, over the model's buffers; `x` is the residual
    stream, (N, C).

    After `run`, `out` holds of what was asked for: "last": logits, (B, V), where rows of sequences
    without new tokens mean nothing; "hidden" and "states": the final LayerNorm, (N, C) float32;
    "logits": the same as their product takes it; "log_likelihood": of the next token of each, (N,),
    where that behind the last of a sequence means nothing. It holds until the model's next prefill.
    """

    overlapping: ClassVar[
        bool
    ]  # whether every kernel waits for the one before it (lib/overlap.cuh)

    def __init__(self, model: CudaModel, cache: CudaCache, shape: Shape, dtype: str) -> None:
        N, B = shape.rows, cache.batch
        self.model: CudaModel = weakref.proxy(model)  # it has this, in its caches
        self.shape, self.batch, self.n_ctx, self.kept = shape, B, cache.n_ctx, cache.layers
        self.ends: list[int] = []
        self.states: list[Floats] = []
        self.out: CudaArray = None
        self._numbers = cupy.empty(4 * N + 3 * B + 1, "int32")
        ends = np.cumsum([N, N, N, N, B + 1, B]).tolist()
        ids, self._targets, positions, self.row, self.cu_seqlens, self.start, self._last = (
            cupy.split(self._numbers, ends)
        )
        self.positions = positions
        self.x, self._h, self.qkv, self._ff = model.activations(N, dtype)
        self._encoder = model.bind_encoder(ids, positions, self.x)
        self._layers = list(self._bind_layers())
        self._ways: dict[Asked | None, _Way] = {}

    @abstractmethod
    def bind_norm(self, x: CudaArray, which: str, out: CudaArray) -> Bound:
        """LayerNorm of rows of the residual stream, `which` as in `CudaModel.bind_norm`."""

    @abstractmethod
    def bind_product(
        self,
        layer: int,
        name: str,
        a: CudaArray,
        out: CudaArray,
        residual: CudaArray | None = None,
        gelu: bool = False,
    ) -> Bound:
        """out = [residual +] [gelu](a · w + b) with w_`name` and b_`name` of a layer."""

    @abstractmethod
    def bind_attention(self, layer: int, out: CudaArray) -> Iterator[Bound]:
        """Of `qkv`, whose K and V also go into the cache."""

    @abstractmethod
    def bind_hidden(self, want: Asked) -> Bound:
        """The final LayerNorm of x: float32 for "hidden" and "states", else for the product."""

    def _bind_layers(self) -> Iterator[tuple[Bound, ...]]:
        """Of every layer what comes before and with attention, which leaves its result in h."""
        for layer in range(self.model.config.n_layer):
            yield (
                self.bind_norm(self.x, f"h.{layer}.1", self._h),
                self.bind_product(layer, "qkv", self._h, self.qkv),
                *self.bind_attention(layer, self._h),
            )

    def _bind_rest(self, layer: int, x: CudaArray, h: CudaArray) -> tuple[Bound, ...]:
        """Of a layer what follows attention, for the rows x of the stream and h of attention."""
        ff = self._ff[: len(x)]
        return (
            self.bind_product(layer, "attn", h, x, residual=x),
            self.bind_norm(x, f"h.{layer}.2", h),
            self.bind_product(layer, "fc", h, ff, gelu=True),
            self.bind_product(layer, "proj", ff, x, residual=x),
        )

    def _bind_last(self, x: CudaArray, h: CudaArray) -> tuple[Bound, ...]:
        """What follows the last attention for a row of each sequence."""
        return self._bind_rest(len(self._layers) - 1, x, h)

    def _bind_before(self) -> Iterator[Bound]:
        """As far as the last attention."""
        yield self._encoder
        for layer, bounds in enumerate(self._layers):
            if layer:
                yield from self._bind_rest(layer - 1, self.x, self._h)
            yield from bounds

    def _bind(self, want: Asked | None) -> _Way:
        before: list[Bound | _Gather] = list(self._bind_before())
        if want is None:
            return _Way(tuple(before), self.x)
        if want != "last":
            norm = self.bind_hidden(want)
            rest = self._bind_rest(len(self._layers) - 1, self.x, self._h)
            hidden = (*before, *rest, norm)
            if want != "log_likelihood":
                return _Way(hidden, norm.out)
            scores, out = self.model.bind_log_likelihood(norm.out, self._targets)
            return _Way((*hidden, *scores), out)
        x, h = self.x[-1:], self._h[-1:]
        if self.batch > 1:
            shape = (self.batch, x.shape[1])
            x, h = (cupy.empty(shape, rows.dtype) for rows in (x, h))
            before += [_Gather(self.x, self._last, x), _Gather(self._h, self._last, h)]
        logits = self.model.bind_lm_head(x, None)
        return _Way((*before, *self._bind_last(x, h), logits), logits.out)

    def run(self, sequences: Sequence[Ids], starts: list[int], want: Asked | None) -> None:
        """The sequences through the model; `want` None: for what is in the cache then."""
        self._send(self._numbers_of(sequences, starts))
        if want == "states":
            self._run_and_look()
            return
        way = self._ways.get(want)
        if way is None:
            way = self._ways[want] = self._bind(want)
        if way.ran and way.graph is None:
            way.graph = self._capture(way)
        if way.graph is None:
            way.launch(Launch.run)
        else:
            way.graph.launch(self.model.stream)
        way.ran = True
        self.out = way.out

    def _numbers_of(self, sequences: Sequence[Ids], starts: list[int]) -> Ids:
        lengths = np.array([len(ids) for ids in sequences])
        ends = np.cumsum(lengths)
        self.ends = ends.tolist()
        before = ends - lengths
        rows = np.repeat(np.arange(len(lengths)), lengths)
        positions = np.arange(self.shape.rows) - np.repeat(before - starts, lengths)
        last = np.maximum(ends - 1, 0)
        ids = np.concatenate(sequences)
        parts = (ids, np.roll(ids, -1), positions, rows, [0], ends, self._starts(starts), last)
        return np.concatenate(parts, dtype=np.int32, casting="same_kind")

    def _starts(self, starts: list[int]) -> list[int]:
        """As attention over the cache takes them."""
        return starts

    def _send(self, numbers: Ids) -> None:
        """Through memory that the GPU reads when it gets there; the call before has to be there."""
        self._sent.synchronize()
        self._pinned[...] = numbers
        self._numbers.set(self._pinned)
        self._sent.record()

    @cached_property
    def _pinned(self) -> Ids:
        return pinned(self._numbers.shape)

    @cached_property
    def _sent(self) -> Any:
        return cupy.cuda.Event(disable_timing=True)

    def _run_and_look(self) -> None:
        """Layer by layer, with copies of the stream in between."""
        self._encoder.run()
        self.states = [self.x.get()]
        for layer, bounds in enumerate(self._layers):
            for bound in (*bounds, *self._bind_rest(layer, self.x, self._h)):
                bound.run()
            self.states.append(self.x.get())
        self.out = self.bind_hidden("states").run()

    def _capture(self, way: _Way) -> Any:
        stream = self.model.stream
        stream.begin_capture()
        try:
            way.launch(overlap.run if self.overlapping and overlap.possible() else Launch.run)
        finally:
            graph = stream.end_capture()
        return graph


class Plain(Prefill):
    """Activations in float32, weights in any dtype."""

    overlapping = False

    def __init__(self, model: CudaModel, cache: CudaCache, shape: Shape) -> None:
        super().__init__(model, cache, shape, "float32")

    def bind_norm(self, x: CudaArray, which: str, out: CudaArray) -> Bound:
        return self.model.bind_norm(x, which, out)

    def bind_product(
        self,
        layer: int,
        name: str,
        a: CudaArray,
        out: CudaArray,
        residual: CudaArray | None = None,
        gelu: bool = False,
    ) -> Bound:
        return self.model.bind_linear(layer, "tiles", name, a, out, residual=residual, gelu=gelu)

    def bind_attention(self, layer: int, out: CudaArray) -> Iterator[Bound]:
        k, v = self.kept[layer % len(self.kept)]
        yield bind_append((self.qkv, self.row, self.positions), (k, v))
        yield bind_attention_cached(
            (self.qkv, k, v, self.cu_seqlens, self.start),
            out,
            n_head=self.model.config.n_head,
            longest=self.shape.longest,
        )

    def bind_hidden(self, want: Asked) -> Bound:
        return self.model.bind_norm(self.x, "_f", self._h)


class TensorCores(Prefill):
    """Activations and weights in one dtype of 16 bits; a cache without layers is not filled."""

    overlapping = True

    def __init__(self, model: CudaModel, cache: CudaCache, shape: Shape) -> None:
        super().__init__(model, cache, shape, model.dtype)

    def bind_norm(self, x: CudaArray, which: str, out: CudaArray) -> Bound:
        inputs = (x, *self.model.norm(which))
        return bind_layernorm(inputs, out, eps=self.model.config.eps, variant="narrow")

    def bind_product(
        self,
        layer: int,
        name: str,
        a: CudaArray,
        out: CudaArray,
        residual: CudaArray | None = None,
        gelu: bool = False,
    ) -> Bound:
        w, bias, _ = self.model.weights(f"h.{layer}.", name)
        return bind_gemm((a, w, bias, residual), out, gelu=gelu)

    def bind_attention(self, layer: int, out: CudaArray) -> Iterator[Bound]:
        n_head, longest = self.model.config.n_head, self.shape.longest
        if self.kept:
            k, v = self.kept[layer]
            yield bind_append((self.qkv, self.row, self.positions), (k, v))
        if self.shape.fresh:  # the others' rows, too: they are overwritten
            yield bind_attention_(
                (self.qkv,),
                out,
                n_head=n_head,
                causal=True,
                cu_seqlens=self.cu_seqlens,
                max_seqlen=longest,
            )
        if self.shape.going_on:
            inputs = (self.qkv, k, v, self.cu_seqlens, self.start)
            yield bind_attention_cached(inputs, out, n_head=n_head, longest=longest)

    def _bind_last(self, x: CudaArray, h: CudaArray) -> tuple[Bound, ...]:
        """As in decoding: for few rows tensor cores are slower, without more splits of K."""
        last = len(self._layers) - 1
        ff = cupy.empty((len(x), self._ff.shape[1]), "float32")
        matvec = partial(self.model.bind_linear, last, "matvec")
        return (
            self.bind_product(last, "attn", h, x, residual=x),
            matvec("fc", x, ff, norm="2", gelu=True),
            matvec("proj", ff, x, residual=x),
        )

    def bind_hidden(self, want: Asked) -> Bound:
        whole = want in ("hidden", "states")
        out = cupy.empty(self.x.shape, "float32") if whole else self._h
        return self.bind_norm(self.x, "_f", out)

    def _starts(self, starts: list[int]) -> list[int]:
        """Sequences that begin here are behind all caches, where nothing is computed."""
        return [start or self.n_ctx for start in starts]

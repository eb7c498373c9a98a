"""Shards of a model on several GPUs, and the executor that runs a GPU's shard of a pass's steps.

A shard of a matrix has all of its inputs (K) and some neighbouring outputs (N). So every output is
bitwise equal to the same output of the whole matrix. Attention and its kv_cache are divided by
heads if `ModelShard.divides_heads`; otherwise every GPU computes all heads. Steps that read whole
rows gather them first (`ops.all_gather`). Norms, the residual stream and sampling are computed on
every GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from itertools import pairwise
from typing import Any

import numpy as np

from gpt2block.checks import normed_together
from gpt2block.cuda.formats import FILE
from gpt2block.engine.passes.executor import Executor, Step
from gpt2block.models.architectures.architecture import Value
from gpt2block.models.config import LayerCache, ModelConfig, model_shapes, shapes_in_blocks
from gpt2block.ops.all_gather import PEER_INPUTS, PeerStores, can_store, normalizes, stores_operand
from gpt2block.ops.products import MULTIPLE

BORDER = 64  # a shard begins at a multiple of BORDER outputs
BORDER_OF_BLOCKS = 128  # BORDER of matrices that keep their GGUF types
QKV, QUERIES = "w_qkv", "w_q"
# Operation of a product → places of its weights and of its residual among the inputs.
PRODUCTS: Mapping[str, tuple[int, int]] = {"linear": (1, 5), "gemm": (1, 3)}
ATTENTION = "attention", "attention_split", "attention_varlen", "attention_packed"
ELEMENTWISE = "silu_mul", "relu_squared", "cap"  # computed before a GPU's columns are gathered
# Matrices whose products can send their columns
STORING = "w_o", "w_attn", "w_out", "w_down", "w_proj"
GATED = 6  # inputs of `linear` before the second matrix, with which a product can also send
OF_SHARD = ".shard"  # ends the names of results that have only this GPU's columns


class Meeting(threading.Barrier):
    """A barrier at which the threads that drive a model's GPUs exchange values.

    After `abort`, all threads that wait now or later raise threading.BrokenBarrierError.
    """

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self._values: list[Any] = [None] * count

    def exchange(self, index: int, value: object = None) -> list[Any]:
        """Wait for all threads; return their values in the order of the GPUs."""
        self._values[index] = value
        self.wait()
        found = list(self._values)
        self.wait()
        return found


@dataclass(frozen=True)
class ModelShard:
    """The part of a model that one of `count` GPUs has.

    config, dtype: of the whole model. index: number of this GPU, from 0. meeting: shared by the
    threads of all GPUs. peers: {name: array} of an all-gather's peer buffers (`PeerBuffers.of`).
    """

    config: ModelConfig
    dtype: str
    index: int
    count: int
    meeting: Meeting
    peers: Mapping[str, Any] = field(default_factory=dict)
    hi_lo: bool = False  # whether products of prompts read hi/lo operands

    @cached_property
    def divides_heads(self) -> bool:
        """Whether each GPU has its own heads.

        Otherwise each GPU computes all heads. This is so if the heads of q or of k cannot be
        divided equally, if a GPU's channels of K are no multiple of BORDER_OF_BLOCKS with GGUF
        types, if one norm or one scale (of hi/lo operands) applies to all heads, or if layers have
        heads of different sizes.
        """
        c, shapes = self.config, self.config.block_shapes()
        if c.FROM_CACHE or self.hi_lo or c.n_head % self.count or c.n_kv_head % self.count:
            return False
        if self.dtype == FILE and (c.kv_width // self.count) % BORDER_OF_BLOCKS:
            return False
        if "gamma_q" not in shapes:
            return True
        of_q, of_k = shapes["gamma_q"], shapes["gamma_k"]
        return not normed_together(of_q, of_k, c.n_head, c.n_kv_head, c.head_size)

    @cached_property
    def divides_channels(self) -> bool:
        """Whether each GPU has its own channels of short convolutions; else each has all."""
        C, unit = self.config.n_embd, BORDER_OF_BLOCKS if self.dtype == FILE else MULTIPLE
        return not (self.hi_lo or C % self.count or (C // self.count) % unit)

    @property
    def heads(self) -> dict[str, Any]:
        """The numbers of heads of this GPU: n_head and n_kv_head."""
        c, by = self.config, self.count if self.divides_heads else 1
        return {"n_head": c.n_head // by, "n_kv_head": c.n_kv_head // by}

    @property
    def layer_caches(self) -> tuple[LayerCache, ...]:
        """The part of this GPU's kv_cache that each layer reads."""
        by = {True: self.divides_heads, False: self.divides_channels}
        counts = (self.count if by[c.values > 0] else 1 for c in self.config.layer_caches)
        pairs = zip(self.config.layer_caches, counts, strict=True)
        return tuple(c._replace(keys=c.keys // n, values=c.values // n) for c, n in pairs)

    @cached_property
    def borders(self) -> dict[str, tuple[int, ...]]:
        """A dict {name of a matrix: (first output of each shard, …, N)}.

        w_qkv is absent (see `spans`), w_in if channels are divided, and so are matrices that every
        GPU has whole: w_q, matrices outside the blocks, and those with too few outputs to divide. A
        tied lm_head is divided, wte is not.
        """
        sizes = {n: s[1] for n, s in shapes_in_blocks(self.config).items() if len(s) == 2}
        sizes["lm_head"] = self.config.vocab_size
        unit = BORDER_OF_BLOCKS if self.dtype == FILE else BORDER
        found = {}
        for name, N in sizes.items():
            units = -(-N // unit)
            in_parts = matrix_of(name) in (QKV, QUERIES) or self.parts(name)
            if not in_parts and units >= self.count:
                each, more = divmod(units, self.count)
                ends = [(n * each + min(n, more)) * unit for n in range(self.count)]
                found[name] = (*ends, N)
        return found

    def spans(self, name: str) -> tuple[tuple[int, int], ...]:
        """Return the ranges (begin, end) of a matrix's outputs that this GPU has.

        Return () if this GPU has all outputs. A bias has the ranges of its matrix.
        """
        if parts := self.parts(name):
            firsts = np.cumsum((0, *parts[:-1])).tolist()
            own = [(first, size // self.count) for first, size in zip(firsts, parts, strict=True)]
            return tuple((at + self.index * n, at + (self.index + 1) * n) for at, n in own)
        name = _plain(name).replace(".b_", ".w_")
        if name in self.borders:
            return (tuple(pairwise(self.borders[name]))[self.index],)
        return ()

    def parts(self, name: str) -> tuple[int, ...]:
        """Return the sizes of the parts, such as [Q | K | V], of each of which a GPU has a share.

        name: of weights, of a result, or of a kv_cache, whose only part is K, V or u. Return () if
        each GPU has all, or a range of neighbouring outputs.
        """
        base, c = matrix_of(name.removesuffix(OF_SHARD)), self.config
        h, parts = name.removeprefix("h.").partition(".")[0], dict[str, tuple[int, ...]]()
        if c.conv_layers and h.isdigit() and c.conv_layers[int(h)]:
            parts = dict.fromkeys(("w_in", "b_in", "bcx"), 3 * (c.n_embd,))
            parts |= dict.fromkeys(("taps", "b_taps", "k"), (c.n_embd,))
            return parts.get(base, ()) if self.divides_channels else ()
        parts = {"q": (c.q_width,), "k": (c.kv_width,), "v": (c.kv_width,)}
        rows = (c.q_width, c.kv_width, c.kv_width)
        parts |= dict.fromkeys((QKV, "b_qkv", "qkv", "rope"), rows)
        return parts.get(base, ()) if self.divides_heads else ()

    def width(self, name: str) -> int | None:
        """Return the number of outputs that an all-gather of a product with this matrix returns.

        Return None if the product needs no all-gather. The padded copy of lm_head is named "head";
        the number of outputs of "head" is rounded up to a multiple of MULTIPLE.
        """
        name = _plain(name)
        if name == "head":
            N = self.borders["lm_head"][-1] if "lm_head" in self.borders else 0
            return N + -N % MULTIPLE or None
        return self.borders[name][-1] if name in self.borders else None

    def divided_width(self, op: str) -> int:
        """Return the columns of a divided result of attention or a convolution, or 0."""
        if op == "short_conv":
            return self.config.n_embd if self.divides_channels else 0
        return self.config.q_width if op in ATTENTION and self.divides_heads else 0

    def first(self, name: str) -> int:
        """Return the first output of a matrix that this GPU has."""
        name = _plain(name)
        return self.borders["lm_head" if name == "head" else name][self.index]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return {name: shape} of this GPU's tensors, as `model_shapes` does of the model's."""
        found: dict[str, tuple[int, ...]] = {}
        for name, shape in model_shapes(self.config).items():
            spans = self.spans(name)
            own = sum(end - begin for begin, end in spans)
            if spans and len(shape) == 2:
                found[name] = (own, shape[1]) if name == "lm_head" else (shape[0], own)
            else:
                found[name] = shape
        return found

    @cached_property
    def to_peers(self) -> Callable[[int, int], PeerStores]:
        """A function that returns `PeerStores(peers, N, first)`, one object per pair N, first."""
        return cache(partial(PeerStores, self.peers))

    def exchange(self, value: object = None) -> list[Any]:
        """Wait for the threads of all GPUs; return their values in the order of the GPUs."""
        return self.meeting.exchange(self.index, value)

    def has_part(self, name: str) -> bool:
        """Whether this GPU has only its columns or heads of a step's result or of a kv_cache."""
        return name.endswith(OF_SHARD) or bool(self.parts(name))

    def joined(self, name: str, own: np.ndarray, axis: int = -1) -> np.ndarray:
        """Join the parts that all GPUs have of a result, or of a tensor, along an axis.

        name: as in a recording or a checkpoint. The threads of all GPUs call this; only the first
        GPU joins the parts. The other GPUs return `own`, and the first GPU does if `own` is whole.
        """
        spans = self.spans(name)
        parts = self.exchange(own) if spans or self.has_part(name) else [own]
        if self.index or len(parts) == 1:
            return own
        ends = np.cumsum([end - begin for begin, end in spans])[:-1]
        pieces = zip(*(np.split(part, ends, axis) for part in parts), strict=True)
        return np.concatenate([piece for of_range in pieces for piece in of_range], axis)

    def in_order(self, name: str, own: np.ndarray) -> np.ndarray:
        """Return numbers (N,) of all outputs of a matrix, from the numbers of each GPU's own."""
        spans = self.spans(name)
        if not spans:
            return own
        places = np.concatenate([np.arange(*span) for span in spans])
        whole = self.exchange((places, own))
        order = np.argsort(np.concatenate([each for each, _ in whole]))
        return np.concatenate([numbers for _, numbers in whole])[order]

    def own_part(self, name: str, whole: np.ndarray) -> np.ndarray:
        """Return this GPU's heads or channels of a result, or of rows in a kv_cache."""
        return np.concatenate([whole[..., begin:end] for begin, end in self.spans(name)], -1)


def _plain(name: str) -> str:
    """Return the name of a matrix, from its own or from the name of its hi/lo form."""
    return name.removesuffix(".parts")


def matrix_of(name: str) -> str:
    """Return a matrix's name without the layer's prefix and without ".parts"."""
    return _plain(name).rpartition(".")[2]


@dataclass(eq=False)
class Columns:
    """This GPU's columns of a result, gathered before the first step that reads all columns.

    Columns that a kernel has sent are gathered earlier if another all-gather comes first. value:
    the array of the columns, or None after the all-gather. N: number of columns of the whole.
    first: this GPU's first column. step: the step that computes the whole result on one GPU.
    stream: the residual stream to add to the gathered result, or None. into: the array that
    receives the result of the all-gather, or None. whole: this result, including the stream, or
    None before the all-gather.
    """

    value: Value
    N: int
    first: int
    step: Step
    stream: Value = None
    into: Value = None
    whole: Value = None


class Divided(Executor):
    """An executor that runs a GPU's shard of the steps on the executor `do`, and gathers rows.

    A pass lists the steps of the whole model, with this GPU's numbers of heads. fuses: if true, one
    kernel gathers columns, adds them to the residual stream and normalizes the sum, so that the
    addition has no step. Attention and products then also send their columns. An all-gather of sent
    columns only receives, so it cannot be run without the kernel that sends them.
    """

    def __init__(self, do: Executor, shard: ModelShard, fuses: bool = False) -> None:
        super().__init__({**do.tensors, **shard.peers})
        do.tensors = self.tensors
        self._do, self._shard, self._fuses = do, shard, fuses
        self._sent: Columns | None = None  # columns that the next all-gather must receive

    def do(self, step: Step, into: Value) -> Value:
        given = step.inputs
        if step.op == "rmsnorm" and self._is_stream_to_gather(given[0]):
            return self._all_gather_norm(step, given[0])
        if step.op in PRODUCTS and (N := self._shard.width(given[PRODUCTS[step.op][0]])):
            return self._product(step, N, into)
        if step.op in ELEMENTWISE and all(self._is_unsent(each) for each in given):
            to = into.value if isinstance(into, Columns) else None
            value = self._run_shard(step, tuple(each.value for each in given), to)
            return Columns(value, given[0].N, given[0].first, step)
        inputs = tuple(self.whole(each) for each in given)
        if width := self._shard.divided_width(step.op):
            first = self._shard.index * width // self._shard.count
            to_peers = step.op == "attention_split" and self._stores(inputs[0], width)
            return self._columns(Columns(None, width, first, step), inputs, to_peers)
        return self._do.do(step._replace(inputs=inputs), self.whole(into))

    def _product(self, step: Step, N: int, into: Value) -> Value:
        """Compute this GPU's columns. Gather them at once if a residual is added to them."""
        weights, residual = PRODUCTS[step.op]
        inputs = [self.whole(each) for each in step.inputs]
        added = inputs[residual] if len(inputs) > residual else None
        if len(inputs) > residual:
            inputs[residual] = ""
        if isinstance(added, str) and not self.has(added):
            added = None
        dtype = "float32" if added is not None and step.op == "gemm" else step.dtype
        first, into = self._shard.first(step.inputs[weights]), self.whole(into)
        columns = Columns(None, N, first, step._replace(dtype=dtype), added, into)
        ends = matrix_of(step.inputs[weights]) in STORING or len(inputs) > GATED
        to_peers = ends and step.attrs.get("decoding", False) and self._stores(inputs[0], N)
        self._columns(columns, tuple(inputs), to_peers)
        deferred = added is None or (
            self._fuses and added is into and normalizes(columns.value.shape[0], N)
        )
        return columns if deferred else self.whole(columns)

    def _stores(self, x: Value, N: int) -> bool:
        """Whether a kernel can send its columns of a result with the rows of x and N columns."""
        return self._fuses and bool(self._shard.peers) and can_store(x.shape[0], N)

    def _columns(self, columns: Columns, inputs: tuple[Value, ...], to_peers: bool) -> Columns:
        """Compute this GPU's columns. The kernel also sends them if `to_peers` is true."""
        step, more = columns.step, {}
        if to_peers:
            self.receive()
            more["to_peers"] = self._shard.to_peers(columns.N, columns.first)
            self._sent = columns
        columns.value = self._run_shard(step._replace(attrs={**step.attrs, **more}), inputs)
        return columns

    def receive(self, but: Columns | None = None) -> None:
        """Gather columns that a kernel has already sent, unless they are `but`."""
        if self._sent is not None and self._sent is not but:
            self.whole(self._sent)

    def _is_unsent(self, value: Value) -> bool:
        return isinstance(value, Columns) and value.whole is None and value is not self._sent

    def _is_stream_to_gather(self, value: Value) -> bool:
        return isinstance(value, Columns) and value.stream is not None and value.whole is None

    def _all_gather_norm(self, step: Step, columns: Columns) -> Value:
        """Add the gathered columns to the residual stream, and return the norm of the stream."""
        sizes = {**self._sizes(columns), "eps": step.attrs["eps"], "bound": step.bound}
        inputs = (columns.value, columns.stream, step.inputs[1], *self._peers)
        operand = step.attrs.get("to_operand")
        y = self._do(step.name, "all_gather_norm", inputs, to_operand=operand, **sizes)
        columns.whole, columns.value = columns.stream, None
        return y

    def _run_shard(self, step: Step, inputs: tuple[Value, ...], into: Value = None) -> Value:
        attrs = {name: value for name, value in step.attrs.items() if name != "to_operand"}
        own = step._replace(name=step.name + OF_SHARD, inputs=inputs, attrs=attrs)
        return self._do.do(own, into)

    def whole(self, value: Value) -> Value:
        """Return the whole result.

        Columns are gathered first, and converted to the operand format of their step.
        """
        if not isinstance(value, Columns):
            return value
        if value.whole is None:
            value.whole = self._all_gather(value, value.stream or "", value.into)
            value.value = None  # frees the memory of the columns
        return value.whole

    @property
    def _peers(self) -> tuple[str, ...]:
        return tuple(name for name in PEER_INPUTS if name in self._shard.peers)

    def _sizes(self, columns: Columns) -> dict[str, Any]:
        """Return the options of the all-gather of these columns, which is the next all-gather."""
        self.receive(columns)
        sent, self._sent = self._sent is columns, None
        return {"N": columns.N, "first": columns.first, "sent": sent}

    def _all_gather(self, columns: Columns, residual: Value, into: Value) -> Value:
        step, sizes = columns.step, self._sizes(columns)
        operand = step.attrs.get("to_operand")
        inputs = (columns.value, residual, *self._peers)
        if operand and stores_operand(columns.value.shape[0], columns.N):
            sizes["to_operand"] = operand
            return self._do(step.name, "all_gather", inputs, into=into, bound=step.bound, **sizes)
        name = f"{step.name}.floats" if operand else step.name
        y = self._do(name, "all_gather", inputs, into=into, bound=step.bound, **sizes)
        if operand is None:
            return y
        return self._do(step.name, "operand", (y,), dtype="float32", to_operand=operand)


def of_shard(run: Callable[[Executor], Any], do: Executor, shard: ModelShard, fuses: bool) -> Any:
    """Run a GPU's shard of a pass's steps on the executor `do`; return the pass's whole result."""
    divided = Divided(do, shard, fuses)
    found = divided.whole(run(divided))
    divided.receive()
    return found

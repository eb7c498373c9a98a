"""Prefill of a model on a GPU: the new tokens of all sequences as rows of one matrix.

The plans are those of `architectures.passes.Prefill`. A row's kernels, and so its bits, depend on
its own sequence alone. Tokens, positions and lengths are in device memory: a repeated call of the
same shape is a CUDA graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from gpt2block.architectures import architecture_of
from gpt2block.architectures.passes import ROWS_AT_ONCE, Prefill
from gpt2block.architectures.steps import Want, parts_of
from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import Bound, CudaArray, pinned
from gpt2block.plan import Plan
from gpt2block.run.model import Floats, Ids, cache_tensors
from gpt2block.run.program import Program
from gpt2block.weights.two_part import TwoPartMatrix

if TYPE_CHECKING:
    from gpt2block.run.cuda_caches import CudaCache
    from gpt2block.run.cuda_model import CudaModel

Requested = Want | Literal["states"]


class PrefillPrograms:
    """The programs of one shape and cache, over the model's buffers.

    Rows beyond the given tokens are padding: they belong to no sequence, and attention skips them.

    After `run`, `out` holds the requested output until the model's next prefill. "last": logits of
    the given sequences, undefined for those without new tokens; "hidden" and "states": the final
    norm, (N, C) float32; "logits": the same, in the dtype of the product with lm_head;
    "log_likelihood": of the next token of each row, (N,), undefined for the last row of a sequence.
    """

    def __init__(self, model: CudaModel, cache: CudaCache, shape: Prefill) -> None:
        N, B = shape.rows, shape.batch
        self._ends = L = B if shape.ends is None else shape.ends
        self.model: CudaModel = weakref.proxy(model)  # the owner of this object, through its caches
        self.shape = shape
        self.ends: list[int] = []
        self.states: list[Floats] = []
        self.out: CudaArray = None
        self._numbers = cupy.empty(4 * N + 2 * B + L + 1, "int32")
        sizes = {"tokens": N, "targets": N, "positions": N, "row": N}
        sizes |= {"cu_seqlens": B + 1, "start": B, "last": L}
        ends = np.cumsum(list(sizes.values()))[:-1].tolist()
        batch = dict(zip(sizes, cupy.split(self._numbers, ends), strict=True))
        self._architecture = architecture_of(model.config)
        self._x, self._made = model.activations(N)
        self._tensors = {
            **model.prompt_weights(head=False),
            **batch,
            **cache_tensors(cache.layers, model.config.n_layer),
        }
        self._tensors |= {"embedding": self._x}
        self._programs: dict[Want | None, Program] = {}
        self._shared: dict[str, Bound] = {}  # steps up to the last attention, common to all wants

    def program(self, want: Want | None) -> Program:
        """The program for an output, bound on first use."""
        if want not in self._programs:
            self._programs[want] = self._bind(want)
        return self._programs[want]

    def _bind(self, want: Want | None) -> Program:
        config, N, final = self.model.config, self.shape.rows, self._architecture.FINAL
        plan = self.shape.plan(config, want)
        storage: dict[str, Any] = {f"h.0.{name}": array for name, array in self._made.items()}
        if self.shape.products == "two_part":
            storage |= self._two_part(plan)
        if want == "last":  # the last layer computes fewer rows
            for name in self._architecture.FEED_FORWARD:
                few = self._made[name][: self._ends]
                if self.shape.tensor_cores:  # which leave float32 there
                    few = cupy.empty(few.shape, "float32")
                storage[f"h.{config.n_layer - 1}.{name}"] = few
        if want == "hidden" and self.shape.tensor_cores and final not in storage:
            storage[final] = cupy.empty(self._x.shape, "float32")
        if want == "log_likelihood":
            scores = cupy.empty(N, "float32")
            logits = self.model.logits_buffer(N)
            for first in range(0, N, ROWS_AT_ONCE):
                count = min(N - first, ROWS_AT_ONCE)
                storage[f"logits.{first}"] = logits[:count]
                storage[f"scores.{first}"] = scores[first : first + count]
            storage["scores"] = scores
        if want == "log_likelihood":
            storage |= self.model.prompt_weights(head=True)
        program = Program(plan, {**self._tensors, **storage}, self._shared)
        if not self._shared:
            attended = plan.names.index(f"h.{config.n_layer - 1}.attn") + 1
            self._shared = {name: program.bounds[name] for name in plan.names[:attended]}
        return program

    def _two_part(self, plan: Plan) -> dict[str, Any]:
        """Storage of steps whose result is a TwoPartMatrix, or float32 in its memory."""
        config, buffers = self.model.config, self._architecture.BUFFERS
        N, Q = len(self._x), config.n_head * config.head_size
        memory = {buffers[name]: array for name, array in self._made.items()}
        widths = self._architecture.widths(config)
        of_buffer = {buffers[name]: width for name, width in widths.items()}

        def float32(name: str, width: int) -> CudaArray:
            return memory[buffers[name]].reshape(-1)[: N * width].reshape(N, width)

        joined = [name for name in plan.names if name.endswith("attn_cached")]
        storage: dict[str, Any] = dict.fromkeys(joined, float32("attn_cached", Q))
        if plan.output != "logits":
            storage[self._architecture.FINAL] = float32(self._architecture.FINAL, config.n_embd)
        made = {step.name for step in plan.steps if step.op in ("attention_varlen", "two_part")}
        for name in plan.operands | made:
            last = name.removesuffix(parts_of("")).rpartition(".")[2]
            width = Q if last == "attn" else of_buffer[buffers[last]]
            held = float32(name.rpartition(".")[2], width)
            parts = held.view("float16").reshape(2, N, width)
            scale, one_scale = self.model.scales(name, N)
            storage[name] = TwoPartMatrix(parts, scale, held.shape, one_scale)
        return storage

    def run(
        self,
        sequences: Sequence[Ids],
        rows: NDArray[np.integer[Any]],
        starts: NDArray[np.integer[Any]],
        want: Requested | None,
    ) -> None:
        """Compute the sequences; `want` None: only their keys and values.

        rows: of the cache, one for each sequence, in ascending order. starts (B,): tokens in each
        row of the cache.
        """
        self._send(self._numbers_of(sequences, rows, starts))
        program = self.program("hidden" if want == "states" else want)
        if want == "states":
            names = ["embedding", *(f"h.{n}.output" for n in range(self.model.config.n_layer))]
            self.states = [copy.get() for copy in program.trace(names).values()]
        else:
            program.repeat(self.model.stream)
        if want is None:
            self.out = self._x
        else:
            self.out = program.tensors["scores"] if want == "log_likelihood" else program.out

    def _numbers_of(
        self,
        sequences: Sequence[Ids],
        rows: NDArray[np.integer[Any]],
        starts: NDArray[np.integer[Any]],
    ) -> Ids:
        shape = self.shape
        lengths = np.array([len(ids) for ids in sequences])
        ends = np.cumsum(lengths)
        self.ends = ends.tolist()
        of_row = np.zeros(shape.batch, np.int32)
        of_row[rows] = lengths
        N = self.ends[-1]
        tokens, targets, positions = np.zeros((3, shape.rows), np.int32)
        row, last = np.full(shape.rows, -1, np.int32), np.zeros(self._ends, np.int32)
        tokens[:N] = np.concatenate(sequences)
        targets[:N] = np.roll(tokens[:N], -1)
        positions[:N] = np.arange(N) - np.repeat(ends - lengths - starts[rows], lengths)
        row[:N] = np.repeat(rows, lengths)
        last[: len(ends)] = np.maximum(ends - 1, 0)
        parts = (tokens, targets, positions, row, [0], np.cumsum(of_row), starts, last)
        return np.concatenate(parts, dtype=np.int32, casting="same_kind")

    def _send(self, numbers: Ids) -> None:
        """Copy through pinned memory, after the previous call's copy from it has finished."""
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

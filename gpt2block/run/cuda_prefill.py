"""Prefill of a GPT-2 on a GPU: the new tokens of all sequences as rows of one matrix.

The plans are those of `architectures.gpt2.Prefill`. A row's kernels, and so its bits, depend on its
own sequence alone. Tokens, positions and lengths are in device memory: a repeated call of the same
shape is a CUDA graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from gpt2block.architectures.gpt2 import ROWS_AT_ONCE, Prefill, Want
from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import Bound, CudaArray, pinned
from gpt2block.run.model import Floats, Ids, cache_tensors
from gpt2block.run.program import Program

if TYPE_CHECKING:
    from gpt2block.run.cuda_caches import CudaCache
    from gpt2block.run.cuda_model import CudaModel

Requested = Want | Literal["states"]


class PrefillPrograms:
    """The programs of one shape and cache, over the model's buffers.

    Rows beyond the given tokens are padding: they belong to no sequence, and attention skips them.

    After `run`, `out` holds the requested output until the model's next prefill. "last": logits of
    the given sequences, undefined for those without new tokens; "hidden" and "states": the final
    LayerNorm, (N, C) float32; "logits": the same, in the dtype of the product with lm_head;
    "log_likelihood": of the next token of each row, (N,), undefined for the last row of a sequence.
    """

    def __init__(self, model: CudaModel, cache: CudaCache, shape: Prefill) -> None:
        N, B = shape.rows, shape.batch
        self._ends = L = B if shape.ends is None else shape.ends
        self.model: CudaModel = weakref.proxy(model)  # the owner of this object, through its caches
        self.shape, self.n_ctx = shape, cache.n_ctx
        self.ends: list[int] = []
        self.states: list[Floats] = []
        self.out: CudaArray = None
        self._numbers = cupy.empty(4 * N + 2 * B + L + 1, "int32")
        sizes = {"tokens": N, "targets": N, "positions": N, "row": N}
        sizes |= {"cu_seqlens": B + 1, "start": B, "last": L}
        ends = np.cumsum(list(sizes.values()))[:-1].tolist()
        batch = dict(zip(sizes, cupy.split(self._numbers, ends), strict=True))
        dtype = model.dtype if shape.tensor_cores else "float32"
        self._x, h, qkv, self._ff = model.activations(N, dtype)
        self._tensors = {
            **model.given(),
            **batch,
            **cache_tensors(cache.layers, model.config.n_layer),
        }
        self._tensors |= {"embedding": self._x, "h.0.ln1": h, "h.0.qkv": qkv}
        self._programs: dict[Want | None, Program] = {}
        self._shared: dict[str, Bound] = {}  # steps up to the last attention, common to all wants

    def program(self, want: Want | None) -> Program:
        """The program for an output, bound on first use."""
        if want not in self._programs:
            self._programs[want] = self._bind(want)
        return self._programs[want]

    def _bind(self, want: Want | None) -> Program:
        config, N = self.model.config, self.shape.rows
        plan = self.shape.plan(config, want)
        storage: dict[str, CudaArray] = {"h.0.gelu": self._ff}
        if want == "last":  # the last layer computes fewer rows
            gelu = f"h.{config.n_layer - 1}.gelu"
            rows = cupy.empty(
                (self._ends, 4 * config.n_embd), "float32"
            )  # tensor cores leave float32 there
            storage[gelu] = rows if self.shape.tensor_cores else self._ff[: self._ends]
        if want == "hidden" and self.shape.tensor_cores:
            storage["ln_f"] = cupy.empty(self._x.shape, "float32")
        if want == "log_likelihood":
            scores = cupy.empty(N, "float32")
            logits = self.model.logits_buffer(N)
            for first in range(0, N, ROWS_AT_ONCE):
                count = min(N - first, ROWS_AT_ONCE)
                storage[f"logits.{first}"] = logits[:count]
                storage[f"scores.{first}"] = scores[first : first + count]
            storage["scores"] = scores
        program = Program(plan, {**self._tensors, **storage}, self._shared)
        if not self._shared:
            attended = plan.names.index(f"h.{config.n_layer - 1}.attn") + 1
            self._shared = {name: program.bounds[name] for name in plan.names[:attended]}
        return program

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
        if shape.tensor_cores:  # attention over the cache skips new sequences, marked by
            starts = np.where(starts, starts, self.n_ctx)  # a start beyond its end
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

"""Prefill of a model on a GPU: the new tokens of all sequences as rows of one matrix.

The passes are those of `gpt2block.passes.prefill`. A row's kernels, and so its bits, depend on
its own sequence alone. Tokens, positions and lengths are in device memory: a repeated call of the
same shape is a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import CudaArray, pinned
from gpt2block.passes.forward import Want
from gpt2block.passes.prefill import ROWS_AT_ONCE, Prefill
from gpt2block.run.cuda_caches import CudaCache
from gpt2block.run.model import Floats, Ids, cache_tensors
from gpt2block.run.recording import Recorded, Recording

if TYPE_CHECKING:
    from gpt2block.run.cuda_model import CudaModel

Requested = Want | Literal["states"]


class PrefillPrograms:
    """The recordings of one shape and cache, over the model's arena.

    Rows beyond the given tokens are padding: they belong to no sequence, and attention skips them.

    After `run`, `out` holds the requested output until the model's next prefill. "last": logits of
    the given sequences, undefined for those without new tokens; "hidden" and "states": the final
    norm, (N, C) float32; "rows": the same, in the dtype of the product with lm_head;
    "log_likelihood": of the next token of each row, (N,), undefined for the last row of a sequence.
    """

    def __init__(self, model: CudaModel, cache: CudaCache, shape: Prefill) -> None:
        N, B = shape.rows, shape.batch
        self._ends = L = B if shape.ends is None else shape.ends
        self.shape = shape
        self.ends: list[int] = []
        self.states: list[Floats] = []
        self.out: CudaArray = None
        self._numbers = cupy.empty(4 * N + 2 * B + L + 1, "int32")
        self._sizes = {"tokens": N, "targets": N, "positions": N, "row": N}
        self._sizes |= {"cu_seqlens": B + 1, "start": B, "last": L}
        ends = np.cumsum(list(self._sizes.values()))[:-1].tolist()
        batch = dict(zip(self._sizes, cupy.split(self._numbers, ends), strict=True))
        self._tensors = {**batch, **cache_tensors(cache.layers, model.config.n_layer)}
        self._recordings: dict[Want | None, Recording] = {}
        self._known: Mapping[str, Recorded] = {}  # the steps of the first one: most are in all

    def recording(self, model: CudaModel, want: Want | None) -> Recording:
        """The recording for an output, made on first use."""
        if want not in self._recordings:
            N, outs = self.shape.rows, {}
            tensors = model.prompt_weights(head=want == "log_likelihood")
            if want == "log_likelihood":
                self._scores = cupy.empty(N, "float32")
                for first in range(0, N, ROWS_AT_ONCE):
                    outs[f"scores.{first}"] = self._scores[first : first + ROWS_AT_ONCE]
            made = model.recordings.make(
                lambda do: model.forward_pass(self.shape, do, want),
                {**tensors, **self._tensors},
                outs,
                known=self._known,
                overlapping=self.shape.tensor_cores,
            )
            self._recordings[want] = made
            self._known = self._known or made.steps
        return self._recordings[want]

    def run(
        self,
        model: CudaModel,
        sequences: Sequence[Ids],
        rows: NDArray[np.integer[Any]],
        starts: NDArray[np.integer[Any]],
        want: Requested | None,
    ) -> None:
        """Compute the sequences; `want` None: only their keys and values.

        rows: of the cache, one for each sequence, in ascending order. starts (B,): tokens in each
        row of the cache.
        """
        self._send(sequences, rows, starts)
        recording = self.recording(model, "hidden" if want == "states" else want)
        if want == "states":
            names = ["embedding", *(f"h.{n}.output" for n in range(model.config.n_layer))]
            self.states = [copy.get() for copy in recording.trace(names).values()]
        else:
            recording.repeat(model.stream)
        self.out = self._scores if want == "log_likelihood" else recording.out

    def _send(
        self,
        sequences: Sequence[Ids],
        rows: NDArray[np.integer[Any]],
        starts: NDArray[np.integer[Any]],
    ) -> None:
        """Copy through pinned memory, after the previous call's copy from it has finished."""
        self._sent.synchronize()
        lengths = np.array([len(ids) for ids in sequences])
        ends = np.cumsum(lengths)
        self.ends = ends.tolist()
        of, N = self._on_host, self.ends[-1]
        np.concatenate(sequences, out=of["tokens"][:N])
        of["tokens"][N:] = 0
        of["targets"][: N - 1] = of["tokens"][1:N]
        of["targets"][N - 1] = of["tokens"][0]
        of["targets"][N:] = 0
        first = ends - lengths - starts[rows]  # each sequence's row of position 0
        of["positions"][:N] = np.arange(N) - np.repeat(first, lengths)
        of["positions"][N:] = 0
        of["row"][:N] = np.repeat(rows, lengths)
        of["row"][N:] = -1
        of_row = np.zeros(self.shape.batch, np.int32)
        of_row[rows] = lengths
        of["cu_seqlens"][0] = 0
        np.cumsum(of_row, out=of["cu_seqlens"][1:])
        of["start"][...] = starts
        of["last"][: len(ends)] = np.maximum(ends - 1, 0)
        of["last"][len(ends) :] = 0
        self._numbers.set(self._pinned)
        self._sent.record()

    @cached_property
    def _pinned(self) -> Ids:
        return pinned(self._numbers.shape)

    @cached_property
    def _on_host(self) -> dict[str, Ids]:
        """The parts of the pinned memory by their names."""
        parts = np.split(self._pinned, np.cumsum(list(self._sizes.values()))[:-1])
        return dict(zip(self._sizes, parts, strict=True))

    @cached_property
    def _sent(self) -> Any:
        return cupy.cuda.Event(disable_timing=True)

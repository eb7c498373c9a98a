"""Prefill on a GPU: the new tokens of all sequences are the rows of one matrix.

`gpt2block.engine.passes.prefill_rules` has the rules. A row's kernels, and so its bits, depend on
its own sequence alone. Tokens, positions and lengths are in device memory: a repeated call of the
same shape is a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np

from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import CudaArray, pinned
from gpt2block.engine.cuda.caches import CudaCache, forget_oldest
from gpt2block.engine.cuda.passes import CudaPasses
from gpt2block.engine.model import Floats, Ids, Start, cache_tensors
from gpt2block.engine.passes import check_read
from gpt2block.engine.passes.forward import ROWS_AT_ONCE, Want
from gpt2block.engine.passes.prefill_rules import Prefill
from gpt2block.engine.passes.rewriting import run
from gpt2block.engine.recorder import Recorded, rounded_up
from gpt2block.engine.recording import Recording
from gpt2block.models.config import DRAFTING

Requested = Want | Literal["states"]
TILE = 64  # number of rows of a prompt to whose multiples its size is rounded up
SCORED = ("log_likelihood", "likeliest")  # outputs that are computed from the next tokens


class PrefillPrograms:
    """The recorded launches of prefills with one shape and one kv_cache, one for each output.

    Rows beyond the given tokens are padding: they belong to no sequence, and attention skips them.

    After `run`, `out` holds the requested output until the model's next prefill. "last": logits of
    the given sequences, undefined for sequences without new tokens. "hidden" and "states": the
    final norm, (N, C) float32. "rows": the final norm in the dtype of the product with lm_head.
    "log_likelihood": each row's log-likelihood of its next token, (N,), undefined for the last row
    of a sequence. With "likeliest", the array `likeliest` also holds each row's most likely token.
    """

    def __init__(self, model: CudaPasses, cache: CudaCache, shape: Prefill, adapted: bool) -> None:
        """adapted: whether sequences may have adapters."""
        N, B = shape.rows, shape.sequences
        L = shape.batch if shape.ends is None else shape.ends
        self.shape = shape
        self.ends: list[int] = []
        self.states: list[Floats] = []
        self.out: CudaArray  # the result of the last `run`
        self._sizes = {"tokens": N, "targets": N, "positions": N, "row": N}
        self._sizes |= {"cu_seqlens": B + 1, "start": B, "last": L, "last_row": L}
        self._numbers = cupy.empty(sum(self._sizes.values()), "int32")
        ends = np.cumsum(list(self._sizes.values()))[:-1].tolist()
        batch = dict(zip(self._sizes, cupy.split(self._numbers, ends), strict=True))
        self._tensors = {**batch, **cache_tensors(cache)}
        self._tensors |= cache.adapters.tensors if adapted else {}
        if adapted and shape.products == "hi_lo":
            self._tensors["every"] = cupy.asarray(np.arange(N, dtype=np.int32))
        self._drafting, self._stream_rows = cache.drafting, cache.stream_rows
        self._recordings: dict[Want | None, Recording] = {}
        self._known: Mapping[str, Recorded] = {}  # first recording's steps, which others reuse

    def recording(self, model: CudaPasses, want: Want | None) -> Recording:
        """Return the recorded launches that compute the output `want`; record them on first use."""
        if want not in self._recordings:
            N, outs = self.shape.rows, {}
            tensors = model.prompt_weights(head=want in SCORED)
            for first in range(0, N, ROWS_AT_ONCE) if want in SCORED else ():
                outs[f"scores.{first}"] = self._scores[first : first + ROWS_AT_ONCE]
                if want == "likeliest":
                    outs[f"likeliest.{first}"] = self.likeliest[first : first + ROWS_AT_ONCE]
            if self._drafting is not None:
                rows = np.arange(len(self._tensors["last"]), dtype=np.int32)
                outs["stream_rows"] = self._stream_rows[: len(rows)]
                tensors |= {"stream_index": cupy.asarray(rows), **self._of_block(model)}
            tensors |= self._tensors
            steps, out = model.prefill_steps(self.shape, tensors, want)
            made = model.recordings.make(
                lambda do: run(steps, do, out),
                tensors,
                outs,
                known=self._known,
                overlapping=self.shape.tensor_cores,
            )
            if want == "last":
                check_read(model.config, (each.step for each in made.steps.values()))
            self._recordings[want] = made
            self._known = self._known or made.steps
        return self._recordings[want]

    def _of_block(self, model: CudaPasses) -> dict[str, Any]:
        """Return {name: tensor} of the block that drafts tokens and reads the following ones."""
        own = {**self._tensors, "tokens": self._tensors["targets"], **cache_tensors(self._drafting)}
        own |= model.block.prompt_weights(head=False)
        return {DRAFTING + name: each for name, each in own.items()}

    def run(
        self,
        model: CudaPasses,
        sequences: Sequence[Ids],
        rows: Sequence[int],
        starts: Sequence[int],
        want: Requested | None,
    ) -> None:
        """Prefill the sequences. want: the requested output; None: only their keys and values.

        rows: row of the cache for each sequence, in ascending order. starts: number of tokens that
        each of these rows already has.
        """
        self._send(sequences, rows, starts, want in SCORED or self._drafting is not None)
        recording = self.recording(model, "hidden" if want == "states" else want)
        if want == "states":
            names = ["embedding", *(f"h.{n}.output" for n in range(model.config.n_layer))]
            self.states = [copy.get() for copy in recording.trace(names).values()]
        else:
            recording.repeat(model.stream)
        model.recordings.meet()
        self.out = self._scores if want in SCORED else recording.out

    def _send(
        self, sequences: Sequence[Ids], rows: Sequence[int], starts: Sequence[int], targets: bool
    ) -> None:
        """Copy the batch to the device from pinned memory, after the previous copy has finished.

        targets: whether to send the next token of each token, too.
        """
        self._sent.synchronize()
        tokens, after, positions, row_of, seams, start, last, last_row = self._on_host
        at, self.ends = 0, []
        packed = self.shape.sequences < self.shape.batch
        seams[:] = start[:] = last[:] = 0
        last_row[:] = -1
        for n, (ids, row, first) in enumerate(zip(sequences, rows, starts, strict=True)):
            end = at + len(ids)
            tokens[at:end] = ids
            positions[at:end] = np.arange(first, first + len(ids))
            row_of[at:end] = row
            sequence = n if packed else row
            seams[sequence + 1], start[sequence] = len(ids), first
            last[n], last_row[n] = max(end - 1, 0), row
            self.ends.append(end)
            at = end
        tokens[at:] = positions[at:] = 0
        row_of[at:] = -1
        seams.cumsum(out=seams)
        if targets:
            after[: at - 1] = tokens[1:at]
            after[at - 1] = tokens[0]
            after[at:] = 0
        # Half the time of `set`, which checks the array and the device.
        self._numbers.data.copy_from_host_async(self._pinned.ctypes.data, self._numbers.nbytes)
        self._sent.record()

    @cached_property
    def _scores(self) -> CudaArray:
        """The log-likelihoods of the next tokens, (N,), in memory that all recordings share."""
        return cupy.empty(self.shape.rows, "float32")

    @cached_property
    def likeliest(self) -> CudaArray:
        """The most likely next tokens, (N, 1), as the output "likeliest" computes them."""
        return cupy.empty((self.shape.rows, 1), "int32")

    @cached_property
    def _pinned(self) -> Ids:
        return pinned(self._numbers.shape)

    @cached_property
    def _on_host(self) -> list[Ids]:
        """Views of parts of the pinned memory, one for each array named in `_sizes`."""
        return np.split(self._pinned, np.cumsum(list(self._sizes.values()))[:-1])

    @cached_property
    def _sent(self) -> Any:
        return cupy.cuda.Event(disable_timing=True)


def programs_of(
    model: CudaPasses,
    cache: CudaCache,
    rows: int,
    longest: int,
    continued: bool,
    ends: int | None = None,
    adapted: bool = False,
) -> PrefillPrograms:
    """Return the PrefillPrograms of this shape and cache.

    adapted: whether sequences may have adapters. The other arguments: see `Prefill`.
    """
    sizes = rows, longest, continued, ends  # the cache determines all other fields of Prefill
    kind = *sizes, adapted
    if kind not in cache.prefills:
        shape = model.prefill_shape(cache.batch, bool(cache.layers), *sizes)
        cache.prefills[kind] = PrefillPrograms(model, cache, shape, adapted)
        forget_oldest(cache.prefills, cache.kept_shapes, model.stream)
    cache.prefills.move_to_end(kind)
    found: PrefillPrograms = cache.prefills[kind]
    return found


def prefill_starts(model: CudaPasses, cache: CudaCache, group: Sequence[Start], last: bool) -> Any:
    """Compute the tokens of prompts that are not cached; all prompts are new, or all continue.

    The Starts are in ascending order of slots. Returns the logits of their last tokens, (N or more,
    V), valid until the next prefill. Without `last`, only keys and values are computed, and the
    result is None. Sizes are rounded up, so that other sequences use the same launches.
    """
    for start in group if cache.frequencies.tensors or cache.adapters.tensors else ():
        cache.frequencies.begin(start.slot, start.n_tokens)
        cache.adapters.begin(start.slot, start.adapter)
    if (states := cache.kept_states) is not None:
        for start in group:
            states.begin(start.slot, start.cached, len(start.ids))
    slots, cached = [start.slot for start in group], [start.cached for start in group]
    adapted = bool(cache.adapters.tensors) and cache.adapters.used(slots)
    new = [start.ids[start.cached :] for start in group]
    lengths = [len(ids) for ids in new]
    kind = start_kind(cache, sum(lengths), max(lengths), any(cached), len(slots))
    prefill = programs_of(model, cache, *kind, adapted)
    prefill.run(model, new, slots, cached, "last" if last else None)
    return prefill.out


def start_kind(
    cache: CudaCache, total: int, longest: int, continued: bool, count: int
) -> tuple[int, int, bool, int]:
    """Return `rows`, `longest`, `continued` and `ends` of `programs_of` for `count` sequences.

    total, longest: tokens in all sequences, and in the longest one.
    """
    ends = rounded_up(count, 2)
    if cache.batch > 1:
        rows = max(rounded_up(total, 4), ends)
    else:  # few sizes: a prompt whose size is new takes 10 ms more, a tile of rows at most 0.1 ms
        rows = rounded_up(total, 1) if total <= TILE else -(-rounded_up(total, 16) // TILE) * TILE
    return rows, min(rounded_up(longest, 1), rows), continued, ends

"""Decoding on a GPU: steps of the sequences in the slots of a kv_cache, sampled on the device.

A step computes the rows of a few numbers, such as 48 or 64, each with a CUDA graph of its own; a
device array maps them to slots, so that empty slots cost nothing. A step reads its tokens and
positions from device memory, where the sampler has written them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import CudaArray, pinned
from gpt2block.ops.sample_token import SampleState, Slots, bind_place, bind_state, mark_seen
from gpt2block.run.cuda_caches import CudaCache
from gpt2block.run.model import Floats, Ids, Sampled, Start, cache_tensors, in_groups, rounded_up

if TYPE_CHECKING:
    from gpt2block.run.cuda_model import CudaModel

PREFILL_TOKENS = 8192  # of prompts that start together
IN_FLIGHT = 2  # results that are computed ahead of the host


class DecodingSteps:
    """The buffers of a cache's decoding steps, and a Step for each number of rows in use."""

    def __init__(self, model: CudaModel, cache: CudaCache, floats: bool = False) -> None:
        """floats: no step has terms in their place, so that all can be read; with the same bits."""
        B, config = cache.batch, model.config
        self.floats = floats
        self.n_ctx, self.batch = cache.n_ctx, B
        self.state = SampleState.allocate(B, config.vocab_size)
        self.logits = cupy.empty((B, config.vocab_size), "float32")
        self.row, self.tokens, self.positions = (cupy.zeros(B, "int32") for _ in range(3))
        self.cache_tensors = cache_tensors(cache.layers, config.n_layer)
        self._steps: dict[int, Step] = {}
        self._placed: tuple[int, Ids] | None = None  # rows of the step, slots

    def restart(self) -> None:
        """Begin another decoding, whatever the previous one has left in flight or unfinished."""
        self._placed = None
        for step in self._steps.values():
            step.restart()

    def of(self, model: CudaModel, rows: int) -> Step:
        """The step of this number of rows, or of a few more."""
        rows = min(rounded_up(rows, 2), self.batch)
        if rows not in self._steps:
            self._steps[rows] = Step(model, self, rows)
        return self._steps[rows]

    def place(self, slots: Ids, rows: int) -> None:
        """Let the first rows of the step of `rows` be those of these slots, the others of none."""
        if self._placed and self._placed[0] == rows and np.array_equal(self._placed[1], slots):
            return
        self._set_rows(slots, rows)
        self._steps[rows].placing.run()
        self._placed = rows, slots

    def _set_rows(self, slots: Ids, rows: int) -> None:
        row = np.full(rows, -1, np.int32)
        row[: len(slots)] = slots
        self.row[:rows].set(row)
        self._placed = None

    def next_token(self, model: CudaModel, slots: Ids, tokens: Ids, positions: Ids) -> Step:
        """A step that computes a given token of each of these slots at this position."""
        step = self.of(model, len(slots))
        self._set_rows(slots, step.rows)
        self.tokens[: len(slots)].set(tokens)
        self.positions[: len(slots)].set(positions)
        return step

    def logits_of(self, model: CudaModel, slots: Ids, tokens: Ids, positions: Ids) -> Floats:
        """The logits (N, V) after a token for each of these slots."""
        self.next_token(model, slots, tokens, positions).recording.run_steps()
        logits: Floats = self.logits[: len(slots)].get()
        return logits

    def begin(
        self, model: CudaModel, starts: Sequence[Start], slots: Ids, logits: CudaArray
    ) -> Step:
        """Place sequences with these logits after their last token; the step then samples."""
        ids = [start.ids if start.seen is None else start.seen for start in starts]
        positions = np.array([len(start.ids) - 1 for start in starts], np.int32)
        drawn = np.array([start.drawn for start in starts], np.int32)
        self.state.begin(slots, [start.sampling for start in starts], positions, drawn)
        if any(start.sampling.repetition_penalty != 1 for start in starts):
            self.state.seen[cupy.asarray(slots)] = 0
            of_token = np.repeat(slots, [len(each) for each in ids])
            mark_seen(np.concatenate(ids), of_token, self.state.seen)
        step = self.of(model, len(slots))
        cupy.copyto(self.logits[: len(slots)], logits[: len(slots)])
        self.place(slots, step.rows)
        return step


class Step:
    """A decoding step of a number of rows: launches, their graph, and the results on the host."""

    def __init__(self, model: CudaModel, of: DecodingSteps, rows: int) -> None:
        self.rows, self._stream = rows, model.stream
        self._sampled, report = _on_host((2, 2, rows))  # token, logprob of even and odd launches
        self._done = [cupy.cuda.Event(disable_timing=True) for _ in range(2)]
        self._turn = cupy.zeros(rows, "int32")
        row, tokens, positions = (a[:rows] for a in (of.row, of.tokens, of.positions))
        slots = Slots(row, tokens, positions, self._turn)
        self.placing = bind_place(of.state, slots)
        logits = of.logits[:rows]
        self._sample = bind_state(logits, of.state, of.n_ctx, report, slots)
        given = {"tokens": tokens, "row": row, "positions": positions}
        terms = None if of.floats else model.terms(rows)
        self.recording = model.recordings.make(
            lambda do: model.decode_pass(do, rows, terms),
            {**model.given(), **of.cache_tensors, **given},
            {"logits": logits},
            overlapping=True,
        )
        self.recording.after = (self._sample,)
        self.restart()

    def restart(self) -> None:
        """Let the next launch be the first one, on the device and here."""
        self._turn.fill(0)
        self._launched = 0
        self._results: list[_Result | None] = [None, None]  # that may not have been read yet

    def run(self, slots: Ids) -> _Result:
        """Compute the placed rows, of these slots, and sample; a graph from the second run on."""
        half = self._free_half()
        self.recording.repeat(self._stream)
        return self._result(half, slots)

    def sample(self, slots: Ids) -> _Result:
        """Sample from `logits` alone."""
        half = self._free_half()
        self._sample.run()
        return self._result(half, slots)

    def _free_half(self) -> int:
        """The half of the results' memory that the next launch writes, once it has been read."""
        half = self._launched % 2
        earlier = self._results[half]
        if earlier:
            earlier.read()
        return half

    def _result(self, half: int, slots: Ids) -> _Result:
        self._done[half].record(self._stream)
        self._launched += 1
        result = _Result(slots, self._done[half], self._sampled[half])
        self._results[half] = result
        return result


class _Result:
    """The tokens of a launch, read when they are needed or their memory is."""

    def __init__(self, slots: Ids, done: Any, sampled: Ids) -> None:
        self._slots, self._done, self._sampled = slots, done, sampled
        self._stopped: list[Ids] = []
        self._read = False

    def read(self) -> None:
        if not self._read:
            self._done.synchronize()
            self._sampled = self._sampled[:, : len(self._slots)].copy()
            self._read = True

    def leave_out(self, slots: Ids) -> None:
        self._stopped.append(slots)

    def get(self) -> Sampled:
        """The result, without slots that were stopped."""
        self.read()
        slots, (tokens, logprobs) = self._slots, self._sampled
        if self._stopped:
            kept = ~np.isin(slots, np.concatenate(self._stopped))
            slots, tokens, logprobs = slots[kept], tokens[kept], logprobs[kept]
        return Sampled(slots, tokens, logprobs.view(np.float32))


class CudaDecoding:
    """Decoding on a GPU, one step ahead of the host.

    A sequence that is stopped is computed for at most one step more.
    """

    def __init__(self, model: CudaModel, cache: CudaCache, slots: int) -> None:
        self.slots, self.n_ctx = slots, cache.n_ctx
        self._model, self._cache = model, cache
        self._steps = model.steps(cache)
        self._steps.restart()
        self._left = np.zeros(slots, np.int32)  # tokens of each slot that are not launched yet
        self._in_flight: deque[_Result] = deque()

    def start(self, starts: Sequence[Start]) -> None:
        with self._model.running():
            for continued in (False, True):  # a row's kernels depend on it, not on other rows
                chosen = sorted(start for start in starts if (start.cached > 0) == continued)
                for group in in_groups(chosen, PREFILL_TOKENS, _tokens_of):
                    self._start(group)

    def _start(self, group: Sequence[Start]) -> None:
        slots, cached = np.array([(start.slot, start.cached) for start in group], np.int32).T
        self._steps.of(self._model, len(slots))  # compiles while the prompts run
        new = [start.ids[start.cached :] for start in group]
        logits = self._model.prefill_slots(new, slots, cached, self._cache)
        step = self._steps.begin(self._model, group, slots, logits)
        self._in_flight.append(step.sample(slots))
        self._left[slots] = [start.steps - 1 for start in group]

    def stop(self, slots: Ids) -> None:
        self._left[slots] = 0
        for result in self._in_flight:
            result.leave_out(slots)

    def next(self) -> Sampled:
        with self._model.running():
            while True:
                while len(self._in_flight) < IN_FLIGHT and self._launch():
                    pass
                if not self._in_flight:
                    raise RuntimeError("next: expected a sequence in at least one slot")
                found = self._in_flight.popleft().get()
                if len(found.slots):  # else all sequences of that step were stopped after it
                    return found

    def _launch(self) -> bool:
        """Launch a step of the slots that have tokens left to sample; False if none has."""
        slots = np.flatnonzero(self._left).astype(np.int32)
        if not len(slots):
            return False
        step = self._steps.of(self._model, len(slots))
        self._steps.place(slots, step.rows)
        self._in_flight.append(step.run(slots))
        self._left[slots] -= 1
        return True


def _tokens_of(start: Start) -> int:
    """The tokens that the start of a sequence computes."""
    return len(start.ids) - start.cached


def _on_host(shape: tuple[int, ...]) -> tuple[Ids, CudaArray]:
    """int32 zeros in pinned host memory that kernels can write, as a NumPy and a CuPy array."""
    seen = pinned(shape)
    seen[...] = 0
    owner = cupy.cuda.UnownedMemory(seen.ctypes.data, seen.nbytes, seen, cupy.cuda.Device().id)
    return seen, cupy.ndarray(shape, "int32", cupy.cuda.MemoryPointer(owner, 0))

"""Compile the kernels of a decoding and record its CUDA graphs before its first sequence starts.

The kernels of a decoding depend on the sizes of its steps and of the prompts that start together.
Sizes are rounded up, so that there are few different kernels. All steps and the usual starts are
also recorded as CUDA graphs. Steps and prompts of sequences with adapters (LoRA) are recorded when
the first such sequence starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from gpt2block.cuda import cupy
from gpt2block.engine.cuda.caches import CudaCache
from gpt2block.engine.cuda.passes import CudaPasses
from gpt2block.engine.cuda.prefill import programs_of, start_kind
from gpt2block.engine.cuda.steps import MAX_DRAFT_ROWS, DecodingStep, steps_of
from gpt2block.engine.model import Ids
from gpt2block.engine.recorder import rounded_up
from gpt2block.engine.speculation import ROWS

PROMPTS = 16, 256  # prefills to capture as CUDA graphs: minimum and maximum tokens per prompt
TOGETHER = 4  # largest number of prompts per prefill that `start_up` captures as a CUDA graph
NOBODY: Ids = np.empty(0, np.int32)
Kind = tuple[int, int, bool, int]  # arguments of `programs_of`: rows, longest, continued, ends


def start_up(
    model: CudaPasses,
    cache: CudaCache,
    slots: int,
    most: int,
    continued: bool,
    speculate: bool = False,
) -> Iterator[tuple[int, int]]:
    """Compile kernels, record CUDA graphs; yield numbers of done and all tasks before each task.

    slots: slots of a decoding in which no sequence runs; their kv_cache is overwritten. most:
    maximum tokens of prompts that start together. continued: whether prompts may continue cached
    tokens. speculate: whether steps compute draft tokens, too.
    """
    start = _Parts(model, cache, speculate)
    counts = sorted({rounded_up(n, 2) for n in range(1, slots + 1)})
    bound = list(_all_sizes(cache, counts, most))
    bound += [(*kind[:2], True, kind[3]) for kind in bound] if continued else []
    recorded = list(_usual(cache, counts))
    steps = [(count, 1) for count in counts]
    if speculate:
        pairs = product(sorted({min(rounded_up(n, 1), cache.batch) for n in counts}), ROWS)
        steps += [(count, rows) for count, rows in pairs if count * rows <= MAX_DRAFT_ROWS]
    parts: list[Callable[[], None]] = [
        # The largest prefill comes first, because smaller prefills can then use its memory.
        *(partial(start.bind, kind) for kind in sorted(bound, reverse=True)),
        *(partial(start.bind_step, *kind) for kind in steps),
        *(partial(start.bind, kind) for kind in recorded),
        *(partial(start.record_step, *kind) for kind in steps),
        *(partial(start.record, kind) for kind in recorded),
        start.finish,
    ]
    for done, part in enumerate(parts):
        yield done, len(parts)
        # Skip a prefill that does not fit into memory; a prompt that needs this prefill records it.
        with model.running(), suppress(cupy.cuda.memory.OutOfMemoryError):
            part()


class _Parts:
    """Tasks of `start_up`: `bind…` starts compiling kernels; `record…` awaits and runs them."""

    def __init__(self, model: CudaPasses, cache: CudaCache, speculate: bool) -> None:
        self._model, self._cache = model, cache
        self._steps = steps_of(model, cache, speculate)
        self._functions: set[Any] = set()

    def bind(self, kind: Kind) -> None:
        programs = programs_of(self._model, self._cache, *kind)
        self._request(programs.recording(self._model, "last").launches)

    def bind_step(self, count: int, together: int) -> None:
        self._request(self._step(count, together).recording(self._model).launches)

    def _step(self, count: int, together: int) -> DecodingStep:
        return self._steps.of(self._model, np.arange(count, dtype=np.int32), together)

    def _request(self, launches: Any) -> None:
        self._functions.update(launch.function for launch in launches)

    def record_step(self, count: int, together: int) -> None:
        """Run a decoding step without sequences twice; the second run captures a CUDA graph."""
        step = self._step(count, together)
        self._steps.place(NOBODY, step)
        for _ in range(2):
            step.recording(self._model).repeat(self._model.stream)

    def record(self, kind: Kind) -> None:
        """Run twice a prefill of one token plus padding; the second run captures a CUDA graph."""
        programs = programs_of(self._model, self._cache, *kind)
        for _ in range(2):
            programs.run(self._model, [np.zeros(1, np.int32)], [0], [0], "last")

    def finish(self) -> None:
        """Wait until all kernels are compiled, including kernels of recordings that did not run."""
        for function in self._functions:
            _ = function.found
        self._model.stream.synchronize()
        self._steps.restart()


def _usual(cache: CudaCache, counts: list[int]) -> Iterator[Kind]:
    """Yield the sizes of prefills with 1 to 4 (TOGETHER) prompts of 16 to 256 tokens."""
    least, most = (min(n, cache.n_ctx) for n in PROMPTS)
    kinds: set[Kind] = set()
    for count in (n for n in counts if n <= TOGETHER):
        for total in range(least * count, most * count + 1):
            mean, longest = -(-total // count), min(most, total - least * (count - 1))
            powers = range((mean - 1).bit_length(), (longest - 1).bit_length() + 1)
            kinds |= {start_kind(cache, total, 1 << n, False, count) for n in powers}
    yield from sorted(kinds)


def _all_sizes(cache: CudaCache, counts: list[int], most: int) -> Iterator[Kind]:
    """Yield every prefill size, up to `most` tokens, of one prompt and of `counts[-1]` prompts."""
    for count in {1, counts[-1]}:
        totals = range(count, min(most, count * cache.n_ctx) + 1)
        yield from {start_kind(cache, n, -(-n // count), False, count) for n in totals}

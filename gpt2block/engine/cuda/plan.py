"""The plan of a decoding step on any card: its steps, their kernels, and why these were chosen.

No GPU and no weights are needed: an imitation of the card (`gpt2block.emulator.dry`) binds every
step to its kernels, which are neither compiled nor run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpt2block.cuda import cupy
from gpt2block.cuda.cards import CARDS, Card
from gpt2block.cuda.formats import GGUF, Formats
from gpt2block.emulator.dry import dry
from gpt2block.engine.cuda.model import CudaModel
from gpt2block.engine.cuda.steps import DecodingSteps
from gpt2block.engine.cuda.timeline import kernels_of
from gpt2block.engine.passes.rewriting import Log
from gpt2block.engine.timeline import KernelTiming
from gpt2block.models.config import TABLES, ModelConfig, is_matrix, model_shapes
from gpt2block.models.weights.gguf import GgufMatrix, range_bytes

# Name of a matrix: (GGUF type, number of outputs) for each range of its outputs
Ranges = Mapping[str, tuple[tuple[str, int], ...]]


@dataclass(frozen=True)
class Plan:
    """The kernels of a decoding step, without times, and what the rules of decoding did.

    rows: number of tokens that the step computes, one of each sequence. position: of each token.
    """

    config: ModelConfig
    formats: Formats
    card: Card
    rows: int
    position: int
    kernels: tuple[KernelTiming, ...]
    log: Log

    def floor_us(self, kernel: KernelTiming) -> float:
        """Return the µs in which the card's memory moves the bytes of a kernel."""
        return 1e-3 * kernel.moved.total / self.card.gb_s

    def computes(self, kernel: KernelTiming) -> tuple[str, ...]:
        """Return the operations of `gpt2block.reference` that the step of a kernel computes."""
        return self.log.parts.get(kernel.step, (kernel.op,))


def plan_of(
    config: ModelConfig,
    formats: Formats,
    capability: int,
    rows: int,
    position: int,
    ranges: Ranges = {},  # noqa: B006  (not changed)
) -> Plan:
    """Plan a decoding step on a card of `CARDS`. ranges: the matrices in GGUF blocks."""
    log = Log()
    with dry(capability):
        engine = CudaModel(config, _zeros(config, ranges), formats, 0)
        steps = DecodingSteps(engine, engine.new_cache(rows, position + 1))
        steps.row[...], steps.positions[...] = np.arange(steps.rows), position
        step = steps.of(engine, np.arange(rows, dtype=np.int32))
        kernels = tuple(kernels_of(step.recording(engine)))
        names = {*engine.given(), *steps.cache_tensors, "row", "positions"}
        engine.decoding.steps(names, step.rows, engine.decoding.operands(step.rows), log=log)
    return Plan(config, formats, CARDS[capability], step.rows, position, kernels, log)


def _zeros(config: ModelConfig, ranges: Ranges) -> Iterator[tuple[str, Any, str | None]]:
    """Yield (name, tensor, layout) of a model's tensors, which take no memory."""
    for name, shape in model_shapes(config).items():
        stored = shape if name in (*TABLES, "lm_head") else shape[::-1]
        if name in ranges:
            data = cupy.empty(sum(range_bytes(ranges[name], stored[1])), "uint8")
            yield name, GgufMatrix(data, GGUF, None, "NK", 1.0, ranges[name], stored[1]), "NK"
        elif not is_matrix(name, shape):
            yield name, np.ones(shape, np.float32), None
        else:
            yield name, cupy.empty(stored, "float32"), "NK"

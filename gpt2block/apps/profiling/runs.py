"""Run and time passes of a model or block: decoding, likelihoods, one block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from gpt2block.block import Block, LlamaBlock
from gpt2block.checks import FLOATS
from gpt2block.cuda import cupy
from gpt2block.engine.cuda.caches import free_bytes
from gpt2block.engine.model import Ids, ModelEngine, Start
from gpt2block.engine.timeline import Call, Timeline
from gpt2block.errors import InputError
from gpt2block.files.parameters.gpt2 import random_input
from gpt2block.model import Model
from gpt2block.ops.bench import ceilings
from gpt2block.sampling import Sampling

MAX_ROWS, MAX_STEPS = 4096, 100
MAX_TOKENS = 2**17  # maximum number of tokens of all sequences together
MAX_OF_FREE = 8  # each array of a timed copy takes at most 1/MAX_OF_FREE of the free memory


class TimedPass(NamedTuple):
    """A pass and its kernels' times. kind: "prompt", "token", "score" or "block"."""

    kind: str
    timeline: Timeline

    @property
    def label(self) -> str:
        """The kind; on several GPUs the kind and the GPU, such as "token, cuda:1"."""
        return ", ".join(filter(None, (self.kind, self.timeline.device)))


@dataclass(frozen=True)
class Profile:
    """Timed passes of one model or block, in the order in which the passes ran.

    tokens: number of tokens per sequence; with "generate", before the first new token. copy_gb_s:
    GB/s of a copy within the device's memory, from which the floor of a time follows.
    """

    what: str
    model: str
    device: str
    dtype: str
    rows: int
    tokens: int
    copy_gb_s: float
    passes: Sequence[TimedPass]

    @property
    def facts(self) -> dict[str, object]:
        """The fields except the passes, by name, for JSON."""
        return {name: value for name, value in vars(self).items() if name != "passes"}

    def floor_us(self, nbytes: int) -> float:
        """Return the µs in which a copy in the device's memory reads and writes `nbytes` bytes."""
        return 1e-3 * nbytes / self.copy_gb_s


def of_generate(model: Model[Any], rows: int, tokens: int, steps: int) -> list[TimedPass]:
    """Time a prompt of random tokens for each sequence, then `steps` steps of decoding.

    The sizes must have passed `check_sizes`. Raises InputError if they exceed the model's context.
    """
    n_ctx = model.config.n_ctx
    if tokens + steps > n_ctx:
        raise InputError(
            f"--tokens {tokens} and --steps {steps}: expected at most {n_ctx} together, the "
            "context of the model"
        )
    engine = model.engine
    decoding = engine.decode(rows, tokens + steps)
    starts = [
        Start(slot, ids, Sampling(sample=slot), steps + 1)
        for slot, ids in enumerate(_random_ids(engine, rows, tokens))
    ]
    # A GPU computes the prompts in `start` and one more token in each `next`; NumPy computes the
    # prompts in the first `next`.
    prompts = engine.timed(partial(decoding.start, starts)) or engine.timed(decoding.next)
    passes = [TimedPass("prompt", each) for each in prompts]
    for _ in range(steps):
        passes += [TimedPass("token", each) for each in engine.timed(decoding.next)]
    return passes


def of_score(model: Model[Any], rows: int, tokens: int, steps: int) -> list[TimedPass]:
    """Time likelihoods of `rows` random sequences, `steps` times. Raises InputError."""
    n_ctx = model.config.n_ctx
    if not 2 <= tokens <= n_ctx:
        raise InputError(f"--tokens: expected 2 to {n_ctx}, the context of the model, got {tokens}")
    engine = model.engine
    call = partial(engine.log_likelihood, _random_ids(engine, rows, tokens))
    call()  # the first call allocates memory and, on a GPU, compiles kernels
    return [TimedPass("score", each) for _ in range(steps) for each in engine.timed(call)]


def of_block(block: Block | LlamaBlock, rows: int, tokens: int, steps: int) -> list[TimedPass]:
    """Time a block on random input `steps` times."""
    x = random_input(0, (rows, tokens, block.spec.width)).astype(FLOATS[block.dtype])
    call: Call = partial(block, x)
    call()
    return [TimedPass("block", each) for _ in range(steps) for each in block._timed(call)]


def check_sizes(rows: int, tokens: int, steps: int) -> None:
    """Raise InputError if a size, or the product of rows and tokens, is out of range."""
    for option, value, most in (
        ("--rows", rows, MAX_ROWS),
        ("--tokens", tokens, MAX_TOKENS),
        ("--steps", steps, MAX_STEPS),
    ):
        if not 1 <= value <= most:
            raise InputError(f"{option}: expected 1 to {most:,}, got {value}")
    if rows * tokens > MAX_TOKENS:
        raise InputError(
            f"--rows {rows} and --tokens {tokens}: expected at most {MAX_TOKENS:,} tokens in all "
            f"sequences, got {rows * tokens:,}"
        )


def _random_ids(engine: ModelEngine, rows: int, tokens: int) -> list[Ids]:
    rng = np.random.default_rng(0)
    return list(rng.integers(engine.config.vocab_size, size=(rows, tokens)).astype(np.int32))


def copy_gb_s(device: int | None) -> float:
    """Measure GB/s of a copy within the memory of GPU `device`, or of the host if None."""
    if device is None:
        return ceilings.host_copy_gb_s()
    with cupy.cuda.Device(device):
        return ceilings.copy_gb_s(min(ceilings.COPIED, free_bytes() // MAX_OF_FREE))

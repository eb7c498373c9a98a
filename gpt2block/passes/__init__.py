"""Forward passes: an architecture is three functions, for every pass and every machine.

forward       the order of the halves of the blocks, and what a pass ends with
blocks        a step for each operation, and the fused block
prefill       the new tokens of all sequences as rows of one matrix
decoding      a token for each row of a kv_cache
machine       what runs steps; others are in `gpt2block.run`
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from gpt2block.architectures import architecture_of
from gpt2block.config import ModelConfig, model_shapes
from gpt2block.passes import forward as _forward
from gpt2block.passes.blocks import BlockPass, ModelStepPass, PassSettings, StepPass
from gpt2block.passes.machine import Outline, Step, two_part_of

# The int32 arrays that describe a batch of packed sequences: tokens (N,), their positions (N,) and
# sequences (N,); the start of each sequence in the rows (B + 1,) and in the kv_cache (B,); the row
# of its last token (ends,); the token after each one (N,).
BATCH = ("tokens", "positions", "row", "cu_seqlens", "start", "last", "targets")


def names_of(config: ModelConfig) -> set[str]:
    """The names of the tensors of a model's passes."""
    shapes = model_shapes(config)
    constants = architecture_of(config).constants(config, dict.fromkeys(shapes, 1.0))
    caches = (f"h.{n}.{half}" for n in range(config.n_layer) for half in "kv")
    return {*shapes, "lm_head", *constants, *BATCH, *caches}


def model_steps(config: ModelConfig) -> list[Step]:
    """The steps from tokens to logits, one for each operation, without arrays."""
    do = Outline(names_of(config))
    _forward.forward(
        ModelStepPass(do, PassSettings.of(config), 1), architecture_of(config), config, "logits"
    )
    return do.steps


def check_read(config: ModelConfig, steps: Iterable[Step]) -> None:
    """Raise RuntimeError if no step of a pass to logits reads a tensor of the model.

    A two-part matrix stands for the matrix that it was made of. A vector from which the
    architecture computes a constant counts as read, but the constant itself must be read.
    """
    of = architecture_of(config)
    sources: dict[str, float] = defaultdict(lambda: 1.0)  # gets a key for each vector that is read
    needed = [*model_shapes(config), *of.constants(config, sources)]
    read = {name for step in steps for name in step.inputs} | {*sources}
    unread = [n for n in needed if n not in read and two_part_of(n) not in read]
    if unread:
        more = f" and {len(unread) - 3} more" if len(unread) > 3 else ""
        functions = (of.attention, of.feed_forward, of.final)
        named = ", ".join(f"{each.__module__}.{each.__name__}" for each in functions)
        raise RuntimeError(
            f"{', '.join(unread[:3])}{more}: no step of a forward pass reads it: expected one of "
            f"the pass functions ({named}) to use it, or a config without it"
        )


def fused_steps(config: ModelConfig, h: str, x: str) -> list[Step]:
    """The steps of a fused block; h: the prefix of its names, x: the name of its input."""
    do = Outline(names_of(config) | {x})
    _forward.block(BlockPass(do, PassSettings.of(config)), architecture_of(config), x, h)
    return do.steps


def final_step(config: ModelConfig) -> Step:
    """The norm before the logits."""
    do = Outline(names_of(config) | {"x"})
    architecture_of(config).final(StepPass(do, PassSettings.of(config)), "x", ("lm_head",))
    return do.steps[0]

"""Forward passes of all architectures: plain steps, and the rules that rewrite them for a GPU.

forward         the plain steps of a pass, one for each operation of the reference
rewriting       lists of steps, rules that rewrite them, and running them
decoding_rules  rules of a token for each row of a kv_cache
prefill_rules   rules of the new tokens of all sequences as rows of one matrix
block_rules     rules of a single fused block
bounds          upper bounds of the magnitudes in a pass
shards          a pass that several GPUs divide
executor        the interface that runs steps; implementations are in `gpt2block.engine`
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from gpt2block.engine.passes import forward as _forward
from gpt2block.engine.passes.block_rules import BlockPlan, fused_block_steps
from gpt2block.engine.passes.executor import Outline, Step, hi_lo_of
from gpt2block.engine.passes.settings import PassSettings
from gpt2block.models.architectures import architecture_of
from gpt2block.models.config import DRAFTING, ModelConfig, model_shapes, state_shapes

# Names of the int32 arrays that describe a batch of packed sequences. For each token: its id,
# position, sequence and target (the next token's id); shape (N,). For each sequence: its first row
# (shape (B + 1,)), its first position (B,), and the row and the sequence of its last token (at most
# B).
BATCH = ("tokens", "positions", "row", "cu_seqlens", "start", "last", "last_row", "targets")
STREAM = "stream"  # name of the rows of another model's residual stream (N, C) that a model reads


def names_of(config: ModelConfig) -> set[str]:
    """Return the names of all tensors that a model's passes can read."""
    shapes = model_shapes(config)
    constants = architecture_of(config).constants(config, dict.fromkeys(shapes, np.array(1.0)))
    caches = enumerate(config.layer_caches)
    rows = (f"h.{n}.{name}" for n, (_, k, v, _) in caches for name in "k" * (k > 0) + "v" * (v > 0))
    return {*shapes, "lm_head", *constants, *BATCH, STREAM, *rows, *state_shapes(config, 1)}


def model_steps(config: ModelConfig) -> list[Step]:
    """Return the steps from tokens to logits, one for each operation, without running them."""
    do = Outline(names_of(config))
    plain = _forward.NumpyPass(do, PassSettings.of(config))
    _forward.forward(plain, architecture_of(config), config, "logits")
    return do.steps


def check_read(config: ModelConfig, steps: Iterable[Step]) -> None:
    """Raise RuntimeError if the model has a tensor that no step of a pass to logits reads.

    A matrix counts as read if its hi/lo form is read. A vector from which the
    architecture computes a constant counts as read, but the constant itself must be read.
    """
    of = architecture_of(config)
    sources = defaultdict[str, np.ndarray](lambda: np.array(1.0))  # records vectors that are read
    own = (name for name in model_shapes(config) if not name.startswith(DRAFTING))
    needed = [*own, *of.constants(config, sources)]
    read = {name for step in steps for name in step.inputs} | {*sources}
    unread = [n for n in needed if n not in read and hi_lo_of(n) not in read]
    if unread:
        more = f" and {len(unread) - 3} more" if len(unread) > 3 else ""
        functions = (of.attention, of.feed_forward, of.final)
        named = ", ".join(f"{each.__module__}.{each.__name__}" for each in functions)
        raise RuntimeError(
            f"{', '.join(unread[:3])}{more}: no step of a forward pass reads it: expected one of "
            f"the pass functions ({named}) to use it, or a config without it"
        )


def fused_steps(config: ModelConfig, h: str, x: str) -> list[Step]:
    """Return the steps of a fused block. h: prefix of the block's tensor names. x: input's name."""
    do = Outline(names_of(config) | {x})
    plain = _forward.BlockPass(do, PassSettings.of(config))
    _forward.block(plain, architecture_of(config), x, h)
    return fused_block_steps(do.steps, BlockPlan())


def final_step(config: ModelConfig) -> Step:
    """Return the step that computes the final norm, before lm_head."""
    do = Outline(names_of(config) | {"x"})
    architecture_of(config).final(_forward.Pass(do, PassSettings.of(config)), "x", head=True)
    return do.steps[0]

"""The interface through which recordings get the weights and passes of a model on a GPU."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import Any, Protocol

from gpt2block.cuda.arrays import ArrayArg
from gpt2block.engine.cuda.choice import DecodingChoice
from gpt2block.engine.passes.executor import Step
from gpt2block.engine.passes.forward import Want
from gpt2block.engine.passes.prefill_rules import Prefill
from gpt2block.engine.recording import Recordings
from gpt2block.models.config import ModelConfig


class CudaPasses(Protocol):
    """Interface of `CudaModel` for the code that records launches for its kv_caches.

    Each call passes the model: a cache with a reference to it would keep its memory allocated.
    """

    config: ModelConfig
    stream: Any
    recordings: Recordings
    decoding: DecodingChoice
    block: Any  # the block that drafts tokens from the model's residual stream, or None

    def running(self) -> AbstractContextManager[None]:
        """Hold the model's lock, with its device and stream current."""

    def given(self) -> dict[str, ArrayArg]:
        """Return {name that steps use: array or matrix} of the weights that decoding reads."""

    def prompt_weights(self, head: bool) -> dict[str, ArrayArg]:
        """Return the weights of prefill. head: include lm_head for logits of all tokens."""

    def prefill_shape(
        self, batch: int, cached: bool, rows: int, longest: int, continued: bool, ends: int | None
    ) -> Prefill:
        """Return the Prefill of `rows` tokens. cached: whether the kv_cache stores any layers."""

    def prefill_steps(
        self, shape: Prefill, names: Collection[str], want: Want | None
    ) -> tuple[list[Step], str]:
        """Return the steps of a prefill, and the name of the result `want`, or ""."""

"""The interface through which recordings get the weights and passes of a model on a GPU."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from gpt2block.config import ModelConfig
from gpt2block.passes.forward import Want
from gpt2block.passes.machine import Machine
from gpt2block.passes.prefill import Prefill
from gpt2block.run.cuda_choice import DecodingChoice
from gpt2block.run.recording import Recordings


class CudaPasses(Protocol):
    """The part of `CudaModel` that the launches of its kv_caches need.

    They get it with each call: a cache that kept its model would keep its memory, too.
    """

    config: ModelConfig
    stream: Any
    recordings: Recordings
    decoding: DecodingChoice

    def running(self) -> AbstractContextManager[None]:
        """Hold the model's lock, with its device and stream current."""
        ...

    def given(self) -> dict[str, Any]:
        """Return the weights that decoding reads, by their names in a plan."""
        ...

    def prompt_weights(self, head: bool) -> dict[str, Any]:
        """Return the weights that prefill reads; head: with lm_head for logits of all tokens."""
        ...

    def prefill_shape(
        self, batch: int, cached: bool, rows: int, longest: int, continued: bool, ends: int | None
    ) -> Prefill:
        """Return the Prefill of `rows` tokens. cached: whether the cache has layers."""
        ...

    def forward_pass(self, shape: Prefill, do: Machine, want: Want | None) -> Any:
        """Run the steps of a prefill of this shape, up to `want`, on the Machine `do`."""
        ...

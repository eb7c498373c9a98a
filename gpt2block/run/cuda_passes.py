"""The interface through which recordings get the weights and passes of a model on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from gpt2block.config import ModelConfig
from gpt2block.passes.forward import Want
from gpt2block.passes.machine import Machine
from gpt2block.passes.prefill import Prefill
from gpt2block.run.recording import Recordings


class CudaPasses(Protocol):
    """The part of `CudaModel` that the launches of its kv_caches need.

    They get it with each call: a cache that kept its model would keep its memory, too.
    """

    config: ModelConfig
    stream: Any
    recordings: Recordings

    def running(self) -> AbstractContextManager[None]:
        """Hold the model's lock, with its device and stream current."""
        ...

    def given(self) -> dict[str, Any]:
        """Weights by their names in a plan, as decoding uses them."""
        ...

    def prompt_weights(self, head: bool) -> dict[str, Any]:
        """Weights as prefill uses them; head: with lm_head for logits of all tokens."""
        ...

    def terms(self, rows: int) -> Mapping[str, Any]:
        """The terms that x can have in decoding's products of so many rows."""
        ...

    def prefill_shape(
        self, batch: int, cached: bool, rows: int, longest: int, continued: bool, ends: int | None
    ) -> Prefill:
        """The prefill of so many rows over a cache of `batch` rows; cached: it keeps layers."""
        ...

    def forward_pass(self, shape: Prefill, do: Machine, want: Want | None) -> Any:
        """A prefill of this shape, to what is wanted."""
        ...

    def decode_pass(
        self, do: Machine, rows: int, terms: Mapping[str, Any] | None, together: int = 1
    ) -> Any:
        """A step of decoding of so many rows, `together` of a sequence, to logits."""
        ...

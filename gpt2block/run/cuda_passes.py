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
    """The methods of `CudaModel` that recordings for its kv_caches need.

    Each call gets the model: a cache with a reference to it would keep the weights' memory, too.
    """

    config: ModelConfig
    stream: Any
    recordings: Recordings

    def running(self) -> AbstractContextManager[None]:
        """Hold the model's lock in a with block, and make its device and stream current."""
        ...

    def given(self) -> dict[str, Any]:
        """Return name → weight for the steps of decoding."""
        ...

    def prompt_weights(self, head: bool) -> dict[str, Any]:
        """Return name → weight for a prefill; head: with lm_head for the logits of all tokens."""
        ...

    def terms(self, rows: int) -> Mapping[str, Any]:
        """Return weight → supported formats (`Terms`) of x, in decoding products of `rows` rows."""
        ...

    def prefill_shape(
        self, batch: int, cached: bool, rows: int, longest: int, continued: bool, ends: int | None
    ) -> Prefill:
        """Return the Prefill of `rows` tokens over a cache. cached: if the cache has layers."""
        ...

    def forward_pass(self, shape: Prefill, do: Machine, want: Want | None) -> Any:
        """Run the steps of a prefill of this shape by a Machine, up to the output `want`."""
        ...

    def decode_pass(
        self, do: Machine, rows: int, terms: Mapping[str, Any] | None, together: int = 1
    ) -> Any:
        """Run a decoding step up to logits. rows: rows in total; together: rows per sequence."""
        ...

"""Benchmarks on a GPU.

A `Work` is a computation to time: its sizes, operations, bytes, exact result and contenders, which
are implementations by gpt2block. `run` times the contenders of each work on the same buffers and
returns a `Report`. The works are blocks, matrix products and attention (`works`), and whole models
(`token_works`): GPT-2 and Llama. `measure_variants` times the variants of one operation, and
`document` compares the block's times with LeetGPU's. A caller can add contenders of other
libraries, as the scripts in the repository's folder `benchmarks/` do.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpt2block.bench.ceilings import Ceilings
    from gpt2block.bench.document import BlockTime, block_against_document
    from gpt2block.bench.report import BenchRow, Report, run
    from gpt2block.bench.token_works import model_works
    from gpt2block.bench.variants import Measurement, measure_variants
    from gpt2block.bench.works import KINDS, Work, chosen_works

__all__ = [
    "KINDS", "BenchRow", "BlockTime", "Ceilings", "Measurement", "Report", "Work",
    "block_against_document", "chosen_works", "measure_variants", "model_works", "run",
]  # fmt: skip
_NAMES = {
    "ceilings": "Ceilings",
    "document": "BlockTime block_against_document",
    "report": "BenchRow Report run",
    "token_works": "model_works",
    "variants": "Measurement measure_variants",
    "works": "KINDS Work chosen_works",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}


if not TYPE_CHECKING:  # lazy: variants of an operation need no blocks or models

    def __getattr__(name: str) -> Any:
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)

"""Benchmarks on a GPU: variants of an operation, blocks of GPT-2, products, attention, decoding.

A `Work` is a computation to time: its sizes, operations, bytes, exact result and implementations.
`run` times the implementations of each work on the same buffers, compares the results with float64
and the rates with the `ceilings` of the GPU, and returns a `Report`. `works` has blocks, matrix
products and attention, and `decoding` has decoding steps. Scripts in the repository's folder
`benchmarks/` add further models and implementations of other libraries.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpt2block.apps.bench.decoding import decode_works
    from gpt2block.apps.bench.report import BenchRow, Report, run
    from gpt2block.apps.bench.works import KINDS, Work, chosen_works

__all__ = [
    "KINDS",
    "BenchRow",
    "Report",
    "Work",
    "chosen_works",
    "decode_works",
    "run",
]
_NAMES = {
    "decoding": "decode_works",
    "report": "BenchRow Report run",
    "works": "KINDS Work chosen_works",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}


if not TYPE_CHECKING:  # lazy: variants of an operation need no blocks or models

    def __getattr__(name: str) -> Any:
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)

"""Benchmarks on a GPU: blocks of GPT-2 and decoding.

A `Work` is a computation to time: its sizes, operations, bytes, exact result and implementations.
`run` times the implementations of each work on the same buffers, compares the results with float64
and the rates with the `ceilings` of the GPU, and returns a `Report`. `works` has blocks, and
`decoding` has decoding steps. Scripts in the repository's folder `benchmarks/` add matrix products,
attention, further models, and implementations of other libraries.
"""

from gpt2block.apps.bench.decoding import decode_works
from gpt2block.apps.bench.report import BenchRow, Report, run
from gpt2block.apps.bench.works import Work, block_works

__all__ = ["BenchRow", "Report", "Work", "block_works", "decode_works", "run"]

"""Benchmarks on a GPU.

`report` times blocks, matrix products and attention against PyTorch and the ceilings of the GPU,
and `variants` the variants of one operation. Both are a `race` of contenders on the same buffers.
`document` times the block against LeetGPU's figures, and decoding.
"""

from gpt2block.bench.ceilings import Ceilings
from gpt2block.bench.document import BlockTime, DecodeTime, block_against_document, decoding
from gpt2block.bench.report import Report, Row, run
from gpt2block.bench.variants import Measurement, measure_variants
from gpt2block.bench.works import KINDS, AttentionWork, BlockWork, GemmWork, Work, chosen_works

__all__ = [
    "KINDS",
    "AttentionWork",
    "BlockTime",
    "BlockWork",
    "Ceilings",
    "DecodeTime",
    "GemmWork",
    "Measurement",
    "Report",
    "Row",
    "Work",
    "block_against_document",
    "chosen_works",
    "decoding",
    "measure_variants",
    "run",
]

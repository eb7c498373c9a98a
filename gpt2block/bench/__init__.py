"""Benchmarks on a GPU.

`report` times blocks, matrix products and attention against PyTorch and the ceilings of the GPU,
and `variants` the variants of one operation. Both are a `race` of contenders on the same buffers.
`token_works` are whole models from tokens to tokens, which take part in the same race.
`document` times the block against LeetGPU's figures.
"""

from gpt2block.bench.ceilings import Ceilings
from gpt2block.bench.document import BlockTime, block_against_document
from gpt2block.bench.llama_works import LlamaDecodeWork, LlamaPromptWork, llama_works
from gpt2block.bench.report import Report, Row, run
from gpt2block.bench.token_works import DecodeWork, GenerateWork, PromptWork, decode_works
from gpt2block.bench.variants import Measurement, measure_variants
from gpt2block.bench.works import KINDS, AttentionWork, BlockWork, GemmWork, Work, chosen_works

__all__ = [
    "KINDS",
    "AttentionWork",
    "BlockTime",
    "BlockWork",
    "Ceilings",
    "DecodeWork",
    "GemmWork",
    "GenerateWork",
    "LlamaDecodeWork",
    "LlamaPromptWork",
    "Measurement",
    "PromptWork",
    "Report",
    "Row",
    "Work",
    "block_against_document",
    "chosen_works",
    "decode_works",
    "llama_works",
    "measure_variants",
    "run",
]

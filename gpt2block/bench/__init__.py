"""Times on a GPU: beside the document, beside PyTorch and the ceilings, and decoding."""

from gpt2block.bench.ceilings import Ceilings
from gpt2block.bench.document import BlockTime, DecodeTime, block_against_document, decoding
from gpt2block.bench.race import Report, Row, run
from gpt2block.bench.works import KINDS, AttentionWork, BlockWork, GemmWork, Work, chosen_works

__all__ = [
    "KINDS",
    "AttentionWork",
    "BlockTime",
    "BlockWork",
    "Ceilings",
    "DecodeTime",
    "GemmWork",
    "Report",
    "Row",
    "Work",
    "block_against_document",
    "chosen_works",
    "decoding",
    "run",
]

"""Compute, from a model's shapes, the bytes that the model takes on each of several GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gpt2block.cuda.formats import FILE, Formats
from gpt2block.engine.cuda.products import has_sizes_of_tensor_cores
from gpt2block.engine.model import token_bytes, weight_bytes
from gpt2block.engine.passes.shards import Meeting, ModelShard
from gpt2block.files.checkpoints.gguf_types import bytes_in_blocks
from gpt2block.files.checkpoints.stored import Stored
from gpt2block.models.config import ModelConfig


class BytesByGpu(NamedTuple):
    """Bytes of the weights on each GPU, and of a token's keys and values on every GPU."""

    weights: Sequence[int]
    kv_cache_per_token: int


def bytes_by_gpu(
    config: ModelConfig, formats: Formats, count: int, stored: Mapping[str, Stored]
) -> BytesByGpu:
    """Return the bytes on each of `count` GPUs of compute capability 8.0 or newer.

    stored: the model's tensors in a file, whose types determine the bytes for dtype "file".
    """
    hi_lo = formats.dtype == "float32" and has_sizes_of_tensor_cores(config)
    meeting = Meeting(count)
    shards = [
        ModelShard(config, formats.dtype, n, count, meeting, hi_lo=hi_lo) for n in range(count)
    ]
    if formats.dtype == FILE:
        weights = [bytes_in_blocks(_in_shard(stored, shard)) for shard in shards]
    else:
        weights = [weight_bytes(config, formats, shard.shapes()) for shard in shards]
    return BytesByGpu(weights, token_bytes(shards[0].layer_caches, formats))


def _in_shard(stored: Mapping[str, Stored], shard: ModelShard) -> list[Stored]:
    spans = ((tensor, shard.spans(name)) for name, tensor in stored.items())
    return [tensor.of_spans(own) if own else tensor for tensor, own in spans]

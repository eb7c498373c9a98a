"""llm.c's model files (https://github.com/karpathy/llm.c): a header of 256 int32, then the tensors.

Each kind of tensor is stored for all layers together, in this order:

    wte (Vp, C) · wpe (n_ctx, C) · ln1w ln1b (L, C) · qkvw (L, 3C, C) · qkvb (L, 3C) ·
    attprojw (L, C, C) · attprojb (L, C) · ln2w ln2b (L, C) · fcw (L, 4C, C) · fcb (L, 4C) ·
    fcprojw (L, C, 4C) · fcprojb (L, C) · lnfw lnfb (C)

Matrices are (outputs, inputs). The vocabulary is padded from V to Vp rows; lm_head is wte.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from pathlib import Path

from gpt2block.checkpoints.stored import Stored, check_pointer, file_size, itemsize, read_start
from gpt2block.config import GPT2Config, block_shapes, model_shapes
from gpt2block.errors import CheckpointError

_MAGIC = 20240326
_HEADER = struct.Struct("<256i")
_DTYPES = {3: "float32", 5: "bfloat16"}  # by version
_FIELDS = ("n_ctx", "vocab_size", "n_layer", "n_head", "n_embd", "padded vocab_size")
_OTHER_MAGICS = {20240327: "a debugging state", 20240328: "a tokenizer", 20240520: "tokens"}
_LABELS = {
    "wte": "wte", "wpe": "wpe", "gamma1": "ln1w", "beta1": "ln1b", "w_qkv": "qkvw", "b_qkv": "qkvb",
    "w_attn": "attprojw", "b_attn": "attprojb", "gamma2": "ln2w", "beta2": "ln2b", "w_fc": "fcw",
    "b_fc": "fcb", "w_proj": "fcprojw", "b_proj": "fcprojb", "gamma_f": "lnfw", "beta_f": "lnfb",
}  # fmt: skip


def is_model(file: Path) -> bool:
    """Return whether the file has the magic number of llm.c's models.

    Raises CheckpointError for llm.c's other files, for a Git-LFS pointer, for GGUF, and for a file
    that cannot be read.
    """
    start = read_start(file, 64)
    check_pointer(file, start)
    magic = int.from_bytes(start[:4], "little")
    if magic in _OTHER_MAGICS:
        raise CheckpointError(
            f"{file}: expected a model of llm.c, magic {_MAGIC}, got {_OTHER_MAGICS[magic]}, "
            f"magic {magic}"
        )
    return magic == _MAGIC


def read_model(file: Path) -> tuple[GPT2Config, dict[str, Stored]]:
    """Return the config and the stored tensors by gpt2block's names. Raises CheckpointError."""
    start = read_start(file, _HEADER.size)
    if len(start) < _HEADER.size:
        raise CheckpointError(
            f"{file}: truncated: expected a header of {_HEADER.size} bytes, got {len(start)}"
        )
    _, version, *fields = _HEADER.unpack(start)[: 2 + len(_FIELDS)]
    if version not in _DTYPES:
        raise CheckpointError(
            f"{file}: expected version 3 (float32) or 5 (bfloat16), got {version}: "
            "write it again with a current llm.c"
        )
    sizes = dict(zip(_FIELDS, fields, strict=True))
    padded = sizes.pop("padded vocab_size")
    try:
        config = GPT2Config(**sizes)
    except ValueError as error:
        raise CheckpointError(f"{file}: header: {error}") from error
    if padded < config.vocab_size:
        raise CheckpointError(
            f"{file}: header: expected a padded vocab_size of at least {config.vocab_size}, "
            f"got {padded}"
        )
    size = file_size(file)
    expected = _size(config, padded, version)
    if size != expected:
        problem = "truncated" if size < expected else "too long"
        raise CheckpointError(
            f"{file}: {problem}: its header expects {expected:,} bytes, the file has {size:,}"
        )
    found = dict(_tensors(file, config, padded, _DTYPES[version]))
    return config, {name: found[name] for name in model_shapes(config)}


def _size(config: GPT2Config, padded: int, version: int) -> int:
    """Return the file's size in bytes by its header, before anything is allocated."""
    C = config.n_embd
    block = sum(math.prod(shape) for shape in block_shapes(C).values())
    elements = (padded + config.n_ctx) * C + config.n_layer * block + 2 * C
    return _HEADER.size + elements * itemsize(_DTYPES[version])


def _tensors(
    file: Path, config: GPT2Config, padded: int, dtype: str
) -> Iterator[tuple[str, Stored]]:
    C, width = config.n_embd, itemsize(dtype)
    offset = _HEADER.size

    def tensor(kind: str, shape: tuple[int, ...], layout: str | None, layer: str = "") -> Stored:
        return Stored(_LABELS[kind] + layer, file, offset, shape, dtype, layout)

    yield "wte", tensor("wte", (config.vocab_size, C), "NK")
    offset += padded * C * width
    yield "wpe", tensor("wpe", (config.n_ctx, C), None)
    offset += config.n_ctx * C * width
    for kind, shape in block_shapes(C).items():
        for layer in range(config.n_layer):
            layout = "NK" if len(shape) == 2 else None
            yield f"h.{layer}.{kind}", tensor(kind, shape[::-1], layout, f"[{layer}]")
            offset += math.prod(shape) * width
    for kind in ("gamma_f", "beta_f"):
        yield kind, tensor(kind, (C,), None)
        offset += C * width

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

from gpt2block.errors import CheckpointError
from gpt2block.files.checkpoints.files import about, file_size, read_start
from gpt2block.files.checkpoints.stored import Stored, itemsize
from gpt2block.models.config import GPT2Config, block_shapes, model_shapes

_MAGIC = 20240326
_HEADER = struct.Struct("<256i")
_DTYPES = {3: "float32", 5: "bfloat16"}  # version of the file → dtype
_FIELDS = ("n_ctx", "vocab_size", "n_layer", "n_head", "n_embd", "padded vocab_size")
_OTHER_MAGICS = {20240327: "a debugging state", 20240328: "a tokenizer", 20240520: "tokens"}
_LABELS = {
    "gamma1": "ln1w", "beta1": "ln1b", "w_qkv": "qkvw", "b_qkv": "qkvb",
    "w_attn": "attprojw", "b_attn": "attprojb", "gamma2": "ln2w", "beta2": "ln2b",
    "w_fc": "fcw", "b_fc": "fcb", "w_proj": "fcprojw", "b_proj": "fcprojb",
}  # fmt: skip


def is_model(file: Path) -> bool:
    """Return whether the file has the magic number of llm.c's models.

    Raises CheckpointError for llm.c's other files, and for a file that cannot be read.
    """
    magic = int.from_bytes(read_start(file, 4), "little")
    if magic in _OTHER_MAGICS:
        raise CheckpointError(
            f"{file}: expected a model of llm.c, magic {_MAGIC}, got {_OTHER_MAGICS[magic]}, "
            f"magic {magic}"
        )
    return magic == _MAGIC


def read_model(file: Path) -> tuple[GPT2Config, dict[str, Stored]]:
    """Return a model's config, and its tensors by gpt2block's names. Raises CheckpointError."""
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
    with about(f"{file}: header"):
        config = GPT2Config(**sizes)
    if padded < config.vocab_size:
        raise CheckpointError(
            f"{file}: header: expected a padded vocab_size of at least {config.vocab_size}, "
            f"got {padded}"
        )
    C, width = config.n_embd, itemsize(_DTYPES[version])
    block = sum(map(math.prod, block_shapes(C).values()))
    numbers = (padded + config.n_ctx + 2) * C + config.n_layer * block
    size, expected = file_size(file), _HEADER.size + width * numbers
    if size != expected:  # checked before memory of the model's size is allocated
        problem = "truncated" if size < expected else "too long"
        raise CheckpointError(
            f"{file}: {problem}: its header expects {expected:,} bytes, the file has {size:,}"
        )
    stored, offset = {}, _HEADER.size
    for name, label, shape in _order(config):
        layout = "NK" if len(shape) == 2 and name != "wpe" else None
        stored[name] = Stored(label, file, offset, shape, _DTYPES[version], layout)
        offset += width * (padded * C if name == "wte" else math.prod(shape))
    return config, {name: stored[name] for name in model_shapes(config)}


def _order(config: GPT2Config) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield gpt2block's name, label and shape of each tensor, in the order of the file."""
    C = config.n_embd
    yield "wte", "wte", (config.vocab_size, C)
    yield "wpe", "wpe", (config.n_ctx, C)
    for kind, shape in block_shapes(C).items():
        for layer in range(config.n_layer):
            yield f"h.{layer}.{kind}", f"{_LABELS[kind]}[{layer}]", shape[::-1]
    yield "gamma_f", "lnfw", (C,)
    yield "beta_f", "lnfb", (C,)

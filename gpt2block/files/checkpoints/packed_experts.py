"""Split tensors of Hugging Face files that have a matrix of all experts of a layer.

Files of the hub have three matrices of each expert, such as gate_proj, up_proj and down_proj.
`transformers` 5 keeps them as gate_up_proj (n_expert, 2 n_ff_expert, n_embd), in which the rows of
gate precede the rows of up, and down_proj (n_expert, n_embd, n_ff_expert).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpt2block.errors import CheckpointError
from gpt2block.files.checkpoints.naming import naming_of
from gpt2block.files.checkpoints.stored import DTYPES, Stored
from gpt2block.models.config import EXPERTS, ModelConfig

_PACKED = re.compile(r"(.+\.)\w+\.experts\.(gate_up_proj|down_proj)")


def split_experts(
    file: Path, config: ModelConfig, found: Mapping[str, Stored]
) -> dict[str, Stored]:
    """Return a file's tensors by name, with the parts of each packed tensor under the hub's names.

    Raises CheckpointError for a packed tensor of another shape or an unsupported dtype, and if the
    file also has one of its parts.
    """
    split: dict[str, Stored] = {}
    for name, tensor in found.items():
        place = _PACKED.fullmatch(name)
        if config.experts is None or place is None:
            split[name] = tensor
            continue
        parts = _parts(file, config, tensor, *place.groups())
        twice = [part for part in parts if part in found]
        if twice:
            raise CheckpointError(f"{file}: {name} and {twice[0]}: expected one of the two")
        split |= parts
    return split


def _parts(file: Path, config: Any, tensor: Stored, block: str, kind: str) -> dict[str, Stored]:
    C, E, H = config.n_embd, config.n_expert, config.n_ff_expert
    gated = kind == "gate_up_proj"
    shape, halves = ((E, 2 * H, C), EXPERTS[:2]) if gated else ((E, C, H), EXPERTS[2:])
    if tensor.shape != shape or tensor.dtype not in DTYPES:
        raise CheckpointError(
            f"{file}: {tensor.label}: expected shape {shape} of {', '.join(DTYPES)}, got "
            f"{tensor.shape} of {tensor.dtype}"
        )
    by_expert = zip(*(naming_of(config).names[half] for half in halves), strict=True)
    names = [block + name for of_expert in by_expert for name in of_expert]
    rows = shape[1] // len(halves)
    matrix = replace(tensor, shape=(len(names) * rows, shape[2]))
    return {name: matrix.rows(n * rows, (n + 1) * rows) for n, name in enumerate(names)}

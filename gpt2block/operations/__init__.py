"""Every operation with its kernels, in one place: what the command, tests, bench and docs read.

Nothing here needs CuPy or a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from gpt2block.errors import InputError
from gpt2block.operations import (
    attention,
    attention_cached,
    block,
    encoder,
    encoder_rows,
    fp8,
    gemm,
    layernorm,
    layernorm_gelu,
    linear,
    log_likelihood,
    matmul,
    rmsnorm,
    rmsnorm_matmul,
    rope,
    sample,
    softmax,
    trimat,
)
from gpt2block.operations._types import Inputs, Operation, Variant

OPERATIONS: Mapping[str, Operation] = {
    operation.name: operation
    for operation in (
        layernorm.OPERATION,
        trimat.OPERATION,
        layernorm_gelu.OPERATION,
        encoder.OPERATION,
        encoder_rows.OPERATION,
        softmax.OPERATION,
        matmul.OPERATION,
        attention.OPERATION,
        attention_cached.OPERATION,
        block.ADD,
        block.GELU,
        rmsnorm.OPERATION,
        rope.OPERATION,
        rmsnorm_matmul.RMSNORM_MATMUL,
        rmsnorm_matmul.RMSNORM_FFN,
        fp8.OPERATION,
        linear.OPERATION,
        gemm.OPERATION,
        sample.OPERATION,
        log_likelihood.OPERATION,
    )
}

__all__ = [
    "OPERATIONS",
    "Inputs",
    "Operation",
    "Variant",
    "all_sizes",
    "find",
    "markdown",
    "parse_sizes",
]


def find(name: str) -> Operation:
    """An operation by name; InputError lists the known ones."""
    if name not in OPERATIONS:
        raise InputError(f"unknown operation {name!r}: expected one of {', '.join(OPERATIONS)}")
    return OPERATIONS[name]


def parse_sizes(operation: Operation, text: str | None) -> dict[str, int]:
    """The documented sizes, changed by a text such as "B=1,T=128"; InputError for anything else."""
    sizes = dict(operation.sizes)
    for part in text.split(",") if text else []:
        name, _, value = part.partition("=")
        if name not in sizes or not re.fullmatch("[1-9][0-9]{0,9}", value):
            example = ",".join(f"{key}={size}" for key, size in operation.sizes.items())
            raise InputError(f"shape {part!r}: expected sizes such as {example}")
        sizes[name] = int(value)
    return sizes


def markdown() -> str:
    """The table of kernels for kernels_cu/README.md, a row a variant."""
    rows = ["| operation | variant | file | kernels | source | idea |", "|---|---|---|---|---|---|"]
    for operation in OPERATIONS.values():
        for variant in (*operation.variants, *operation.beside):
            names = ", ".join(f"`{name}`" for name in variant.kernels)
            rows.append(
                f"| {operation.name} | {variant.name} | `{variant.file}` | {names} "
                f"| {variant.source or operation.document} | {variant.idea} |"
            )
    return "\n".join(rows)


def all_sizes(operation: Operation) -> list[dict[str, int]]:
    """The documented sizes; of an operation with a series, one for each power of two of it."""
    if operation.series is None:
        return [dict(operation.sizes)]
    name, last = operation.series
    return [{**operation.sizes, name: 1 << i} for i in range(last.bit_length())]

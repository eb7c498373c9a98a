"""The registry of all operations, for the command line, tests, bench and docs.

This module needs neither CuPy nor a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gpt2block.cuda.arrays import Bound
from gpt2block.errors import Argument, InputError
from gpt2block.ops.attention import OPERATION as ATTENTION
from gpt2block.ops.attention_cached import OPERATION as ATTENTION_CACHED
from gpt2block.ops.blocks_matmul import OPERATION as BLOCKS_MATMUL
from gpt2block.ops.elementwise import ADD, GELU, SILU_MUL
from gpt2block.ops.encoder import ENCODER_ROWS
from gpt2block.ops.encoder import OPERATION as ENCODER
from gpt2block.ops.gemm import OPERATION as GEMM
from gpt2block.ops.layernorm import OPERATION as LAYERNORM
from gpt2block.ops.layernorm_gelu import OPERATION as LAYERNORM_GELU
from gpt2block.ops.linear import OPERATION as LINEAR
from gpt2block.ops.log_likelihood import OPERATION as LOG_LIKELIHOOD
from gpt2block.ops.matmul_bias import OPERATION as MATMUL_BIAS
from gpt2block.ops.operation import Inputs, Operation, Variant
from gpt2block.ops.qk_norm import OPERATION as QK_NORM
from gpt2block.ops.rmsnorm import OPERATION as RMSNORM
from gpt2block.ops.rmsnorm_matmul import RMSNORM_FFN, RMSNORM_MATMUL
from gpt2block.ops.rope import OPERATION as ROPE
from gpt2block.ops.rope_qkv import OPERATION as ROPE_QKV
from gpt2block.ops.sample_token import OPERATION as SAMPLE_TOKEN
from gpt2block.ops.softmax import OPERATION as SOFTMAX
from gpt2block.ops.to_fp8 import OPERATION as TO_FP8
from gpt2block.ops.trimat import OPERATION as TRIMAT

OPERATIONS: Mapping[str, Operation] = {
    operation.name: operation
    for operation in (
        LAYERNORM,
        TRIMAT,
        LAYERNORM_GELU,
        ENCODER,
        ENCODER_ROWS,
        SOFTMAX,
        MATMUL_BIAS,
        ATTENTION,
        ATTENTION_CACHED,
        ADD,
        GELU,
        RMSNORM,
        ROPE,
        ROPE_QKV,
        QK_NORM,
        RMSNORM_MATMUL,
        RMSNORM_FFN,
        SILU_MUL,
        TO_FP8,
        LINEAR,
        GEMM,
        BLOCKS_MATMUL,
        SAMPLE_TOKEN,
        LOG_LIKELIHOOD,
    )
}

# STEPS: operations of forward passes and of weight conversion that bench does not measure alone.
STEPS: Mapping[str, Operation] = {
    step.name: step for operation in OPERATIONS.values() for step in operation.steps
}

BY_NAME: Mapping[str, Operation] = {**STEPS, **OPERATIONS}

__all__ = [
    "BY_NAME",
    "OPERATIONS",
    "STEPS",
    "Inputs",
    "Operation",
    "Variant",
    "all_sizes",
    "bind",
    "find",
    "parse_sizes",
]


def bind(name: str, inputs: tuple[Any, ...], out: Any = None, **options: Any) -> Bound:
    """Call `Operation.bind` of the operation or step with this name."""
    return BY_NAME[name].bind(inputs, out, **options)


def find(name: str) -> Operation:
    """Return an operation by name. Raises InputError with the nearest name and all names."""
    if name not in OPERATIONS:
        from difflib import get_close_matches  # noqa: PLC0415

        near = get_close_matches(name, OPERATIONS, 1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise InputError(
            f"unknown operation {name!r}{hint}: expected one of {', '.join(OPERATIONS)}"
        )
    return OPERATIONS[name]


def parse_sizes(operation: Operation, text: str | None) -> dict[str, int]:
    """Return the documented sizes, changed by a text such as "B=1,T=128". Raises InputError."""
    return {**operation.workload.sizes, **stated_sizes(operation, text)}


def stated_sizes(operation: Operation, text: str | None) -> dict[str, int]:
    """Parse sizes in a text such as "B=1,T=128". Raises InputError that quotes a wrong part."""
    known, sizes = operation.workload.sizes, {}
    for part in () if text is None else text.split(","):
        name, equals, value = map(str.strip, part.partition("="))
        if not equals:
            example = ",".join(f"{key}={size}" for key, size in known.items())
            raise InputError(Argument("shape"), f" {text!r}: expected sizes such as {example}")
        if name not in known:
            problem = f"{operation.name} has no size {name}: expected {', '.join(known)}"
        elif not re.fullmatch("[1-9][0-9]{0,9}", value):
            problem = f"{name}: expected an integer from 1 to 9,999,999,999, got {value!r}"
        else:
            sizes[name] = int(value)
            continue
        raise InputError(Argument("shape"), f" {part.strip()!r}: {problem}")
    return sizes


def all_sizes(operation: Operation) -> list[dict[str, int]]:
    """Return the sizes to measure: the documented sizes, or a case per power of two of `series`."""
    if operation.workload.series is None:
        return [dict(operation.workload.sizes)]
    name, last = operation.workload.series
    return [{**operation.workload.sizes, name: 1 << i} for i in range(last.bit_length())]

"""The registry of all operations, for the command line, tests and docs.

This module needs neither CuPy nor a GPU. `find` imports only the module of the operation; the
tables OPERATIONS, STEPS and BY_NAME import all operations when one of the tables is first used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from gpt2block.cuda.arrays import ArrayArgs, Bound
from gpt2block.errors import Argument, InputError
from gpt2block.ops import MODULE_OF
from gpt2block.ops.operation import Inputs, Operation, Variant

_NAMES = (  # all operations, in the order of tables
    "layernorm trimat layernorm_gelu encoder encoder_rows softmax matmul_bias attention "
    "attention_cached add gelu rmsnorm rope rope_qkv qk_norm rmsnorm_matmul rmsnorm_ffn silu_mul "
    "to_fp8 linear gemm blocks_matmul sample_token log_likelihood"
)
NAMES = tuple(_NAMES.split())
if TYPE_CHECKING:
    OPERATIONS: Mapping[str, Operation]
    STEPS: Mapping[str, Operation]  # operations of passes and of weight conversion
    BY_NAME: Mapping[str, Operation]  # all operations and steps

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


@cache
def _tables() -> Mapping[str, Mapping[str, Operation]]:
    operations = {name: _imported(name) for name in NAMES}
    steps = {step.name: step for operation in operations.values() for step in operation.steps}
    return {"OPERATIONS": operations, "STEPS": steps, "BY_NAME": {**steps, **operations}}


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in ("OPERATIONS", "STEPS", "BY_NAME"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return _tables()[name]


def _imported(name: str) -> Operation:
    module = MODULE_OF[name]
    variable = "OPERATION" if module == name else name.upper()
    operation: Operation = getattr(import_module(f"gpt2block.ops.{module}"), variable)
    return operation


def bind(name: str, inputs: ArrayArgs, out: object = None, **options: object) -> Bound:
    """Call `Operation.bind` of the operation or step with this name."""
    return _tables()["BY_NAME"][name].bind(inputs, out, **options)


def find(name: str, known: Sequence[str] = NAMES) -> Operation:
    """Return an operation by name. Raises InputError with the nearest and all known names."""
    if name not in known:
        near = get_close_matches(name, known, 1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise InputError(f"unknown operation {name!r}{hint}: expected one of {', '.join(known)}")
    return _imported(name)


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
        if name in sizes:
            problem = f"{name}: stated twice"
        elif name not in known:
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

"""Find the code of a step: its NumPy function, its CUDA kernels, its fused step."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from gpt2block import reference
from gpt2block.cuda import kernels
from gpt2block.engine.passes.executor import Step
from gpt2block.models.config import ModelConfig
from gpt2block.ops.attention import OPERATION as ATTENTION
from gpt2block.ops.attention import head_constants, tensor_cores_take
from gpt2block.ops.operation import Operation, Variant
from gpt2block.ops.registry import OPERATIONS

TEN_STEPS, FUSED, HERE = "step by step", "fused plan", "ran here"  # why a page shows a kernel
_FUSED_VARIANTS = ("narrow", "mma", "wgmma")
# Operation on packed rows of several sequences → its equivalent for one sequence, easier to read
_OF_ONE_SEQUENCE = {"attention_packed": "attention", "attention_queries": "attention",
                    "rope_packed": "rope_qkv"}  # fmt: skip
_ROW_SIZES = {"layernorm768_kernel": 768}  # kernel → the only row length that it supports
_KERNELS_OF = {"rope_qkv": "rope"}  # function → operation whose kernels compute it


def function_of(step: Step) -> str:
    """Return the name of the step's function in `gpt2block.reference`."""
    return _OF_ONE_SEQUENCE.get(step.op, step.op)


def operation_of(op: str) -> Operation | None:
    """Return the operation whose CUDA kernels compute `op`; None if there are no such kernels."""
    return OPERATIONS.get(op) or OPERATIONS.get(_KERNELS_OF.get(op, op))


@cache
def function_source(name: str) -> dict[str, object]:
    """Return the text of a function of `gpt2block.reference`, its file and the line of its def."""
    module = inspect.unwrap(getattr(reference, name)).__module__
    text = inspect.getsource(sys.modules[module])
    named = (n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef) and n.name == name)
    node = next(named)
    lines = text.splitlines(keepends=True)[node.lineno - 1 : node.end_lineno]
    file = f"{module.replace('.', '/')}.py"
    return {"file": file, "line": node.lineno, "text": "".join(lines)}


def readable_kernel(operation: Operation) -> Variant:
    """Return an operation's most readable variant: from skeleton.cu, or else the first one."""
    every = operation.table
    written = (variant for variant in every if variant.file.endswith("/skeleton.cu"))
    return next(written, every[0])


def fused_kernels(operation: Operation, config: ModelConfig) -> list[Variant]:
    """Return the variants of an operation that the model's fused steps can run, on any GPU."""
    every = [variant for variant in operation.variants if variant.name in _FUSED_VARIANTS]
    if operation is not ATTENTION:
        return every
    return [variant for variant in every if tensor_cores_take(variant.name, config.head_size)]


def described(variant: Variant, plan: str, config: ModelConfig) -> dict[str, Any]:
    """Return a page's data about a variant and its kernels that support the model."""
    C = config.n_embd
    names = [name for name in variant.kernels if _ROW_SIZES.get(name, C) == C]
    return _shown(plan, variant.file, names, variant.idea, config)


def _shown(
    plan: str, file: str, names: list[str], idea: str, config: ModelConfig
) -> dict[str, object]:
    """Return the data that describe kernels of one file on a page.

    line: line of the first kernel. constants: values of the macros for the model's heads that a
    file of attention kernels defines.
    """
    known = _constants(file) if "attention/" in file else set()
    heads = config.n_head, config.n_kv_head, config.head_size
    return {
        "plan": plan,
        "file": file,
        "names": names,
        "idea": idea,
        "line": line_of(file, names[0]),
        "constants": {n: int(value) for n, value in head_constants(*heads) if n in known},
    }


@cache
def _constants(file: str) -> set[str]:
    """Return macros that can be set for a file and for the attention headers that it includes."""
    text = kernels.read_source(file)
    found = set(re.findall(r"^#ifndef (\w+)", text, re.MULTILINE))
    headers = re.findall(r'^#include "(.*attention/[^"]+)"', text, re.MULTILINE)
    return found.union(*map(_constants, headers))


def line_of(file: str, kernel: str) -> int:
    """Return the line of a kernel's definition in a file of kernels_cu."""
    text = kernels.read_source(file)
    match = re.search(rf"__global__[^;{{]*?\b{kernel}\s*\(", text)
    return text.count("\n", 0, match.end()) + 1 if match else 1


def kernels_run(names: Iterable[str], config: ModelConfig) -> list[dict[str, object]]:
    """Return data that describe these kernels on a page, except kernels of other libraries."""
    files = {name: file for file in kernels.sources() for name in kernels.signatures(file)}
    return [
        _shown(HERE, files[name], [name], "", config)
        for name in dict.fromkeys(names)
        if name in files
    ]


def joined_steps(steps: Sequence[Step], fused: Iterable[Step]) -> dict[str, tuple[Step, list[str]]]:
    """Return {name of a step: (fused step that contains it, names of all steps in the fused step)}.

    A fused step joins the preceding steps whose results are not stored.
    """
    by_name = {step.name: step for step in steps}
    fused_by_name = {step.name: step for step in fused}
    joined = {}
    for name, step in fused_by_name.items():
        group = {name}
        unseen = [name]
        while unseen:
            inputs = by_name[unseen.pop()].inputs
            new = [n for n in inputs if n in by_name and n not in fused_by_name and n not in group]
            group.update(new)
            unseen += new
        names = [each.name for each in steps if each.name in group]
        joined.update(dict.fromkeys(names, (step, names)))
    return joined

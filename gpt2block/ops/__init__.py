"""All operations on CUDA, with the names and signatures of the functions of `gpt2block.reference`.

Each function checks CuPy arrays (float32 or, where documented, 16 bits), launches kernels on the
current stream and returns a new array. Each module describes one operation completely; the
registry (`gpt2block.ops.registry`) lists the operations. `Operation.bind(inputs, out, **attrs)`
checks the arguments once and returns the launches, for repeated calls. `workload` has random inputs
of an operation, exact results and errors.

`import gpt2block.ops` imports no operation: the module of a function is imported when the function
is first used.

Imports `gpt2block.models`, `.reference` and `.cuda`; `gpt2block.engine` and the rooms above it may
import it.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from gpt2block.cuda.arrays import Bound

if TYPE_CHECKING:
    from gpt2block.ops.attention import attention
    from gpt2block.ops.attention_cached import (
        attention_cached,
        attention_packed,
        attention_split,
        kv_append,
        kv_round,
    )
    from gpt2block.ops.blocks_matmul import blocks_matmul
    from gpt2block.ops.elementwise import add, gelu, silu_mul
    from gpt2block.ops.encoder import encoder, encoder_rows
    from gpt2block.ops.gemm import gemm
    from gpt2block.ops.hi_lo import hi_lo
    from gpt2block.ops.layernorm import layernorm
    from gpt2block.ops.layernorm_gelu import layernorm_gelu
    from gpt2block.ops.linear import linear
    from gpt2block.ops.log_likelihood import log_likelihood
    from gpt2block.ops.matmul_bias import matmul_bias
    from gpt2block.ops.qk_norm import qk_norm
    from gpt2block.ops.rmsnorm import rmsnorm
    from gpt2block.ops.rmsnorm_matmul import rmsnorm_ffn, rmsnorm_matmul
    from gpt2block.ops.rope import rope
    from gpt2block.ops.rope_qkv import rope_append, rope_qkv
    from gpt2block.ops.sample_token import SampleState, mark_occurred, sample_token
    from gpt2block.ops.softmax import softmax
    from gpt2block.ops.to_fp8 import to_fp8
    from gpt2block.ops.top_logprobs import top_logprobs
    from gpt2block.ops.trimat import trimat

__all__ = [
    "Bound",
    "SampleState",
    "add",
    "attention",
    "attention_cached",
    "attention_packed",
    "attention_split",
    "blocks_matmul",
    "encoder",
    "encoder_rows",
    "gelu",
    "gemm",
    "hi_lo",
    "kv_append",
    "kv_round",
    "layernorm",
    "layernorm_gelu",
    "linear",
    "log_likelihood",
    "mark_occurred",
    "matmul_bias",
    "qk_norm",
    "rmsnorm",
    "rmsnorm_ffn",
    "rmsnorm_matmul",
    "rope",
    "rope_append",
    "rope_qkv",
    "sample_token",
    "silu_mul",
    "softmax",
    "to_fp8",
    "top_logprobs",
    "trimat",
]
_MODULE_OF = {name: name for name in __all__ if name != "Bound"} | {
    "SampleState": "sample_token",
    "attention_packed": "attention_cached",
    "attention_split": "attention_cached",
    "kv_append": "attention_cached",
    "kv_round": "attention_cached",
    "add": "elementwise",
    "gelu": "elementwise",
    "silu_mul": "elementwise",
    "encoder_rows": "encoder",
    "rmsnorm_ffn": "rmsnorm_matmul",
    "rope_append": "rope_qkv",
    "mark_occurred": "sample_token",
}  # name → module


class _Functions(ModuleType):
    """This module: a name of a function and of its module stands for the function."""

    def __setattr__(self, name: str, value: object) -> None:
        if isinstance(value, ModuleType) and _MODULE_OF.get(name) == name:
            value = getattr(value, name)
        super().__setattr__(name, value)


if not TYPE_CHECKING:
    sys.modules[__name__].__class__ = _Functions

    def __getattr__(name: str) -> Any:
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)

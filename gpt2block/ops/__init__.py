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

from gpt2block.cuda.arrays import Bound as Bound

if TYPE_CHECKING:
    from gpt2block.ops.attention import attention as attention
    from gpt2block.ops.attention_cached import attention_cached as attention_cached
    from gpt2block.ops.attention_cached import attention_packed as attention_packed
    from gpt2block.ops.attention_cached import attention_split as attention_split
    from gpt2block.ops.attention_cached import kv_append as kv_append
    from gpt2block.ops.attention_cached import kv_round as kv_round
    from gpt2block.ops.blocks_matmul import blocks_matmul as blocks_matmul
    from gpt2block.ops.elementwise import add as add
    from gpt2block.ops.elementwise import gelu as gelu
    from gpt2block.ops.elementwise import silu_mul as silu_mul
    from gpt2block.ops.encoder import encoder as encoder
    from gpt2block.ops.encoder import encoder_rows as encoder_rows
    from gpt2block.ops.gemm import gemm as gemm
    from gpt2block.ops.hi_lo import hi_lo as hi_lo
    from gpt2block.ops.layernorm import layernorm as layernorm
    from gpt2block.ops.layernorm_gelu import layernorm_gelu as layernorm_gelu
    from gpt2block.ops.linear import linear as linear
    from gpt2block.ops.log_likelihood import log_likelihood as log_likelihood
    from gpt2block.ops.matmul_bias import matmul_bias as matmul_bias
    from gpt2block.ops.qk_norm import qk_norm as qk_norm
    from gpt2block.ops.rmsnorm import rmsnorm as rmsnorm
    from gpt2block.ops.rmsnorm_matmul import rmsnorm_ffn as rmsnorm_ffn
    from gpt2block.ops.rmsnorm_matmul import rmsnorm_matmul as rmsnorm_matmul
    from gpt2block.ops.rope import rope as rope
    from gpt2block.ops.rope_qkv import rope_append as rope_append
    from gpt2block.ops.rope_qkv import rope_qkv as rope_qkv
    from gpt2block.ops.sample_token import SampleState as SampleState
    from gpt2block.ops.sample_token import mark_occurred as mark_occurred
    from gpt2block.ops.sample_token import sample_token as sample_token
    from gpt2block.ops.softmax import softmax as softmax
    from gpt2block.ops.to_fp8 import to_fp8 as to_fp8
    from gpt2block.ops.top_logprobs import top_logprobs as top_logprobs
    from gpt2block.ops.trimat import trimat as trimat

# Functions that are alone in a module of their name
_ALONE = (
    "attention blocks_matmul gemm hi_lo layernorm layernorm_gelu linear log_likelihood matmul_bias "
    "qk_norm rmsnorm rope softmax to_fp8 top_logprobs trimat"
)
_NAMES = {  # module → names that this package exports from the module
    "attention_cached": "attention_cached attention_packed attention_split kv_append kv_round",
    "elementwise": "add gelu silu_mul",
    "encoder": "encoder encoder_rows",
    "rmsnorm_matmul": "rmsnorm_ffn rmsnorm_matmul",
    "rope_qkv": "rope_append rope_qkv",
    "sample_token": "SampleState mark_occurred sample_token",
    **{name: name for name in _ALONE.split()},
}
MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}
if not TYPE_CHECKING:
    __all__ = ["Bound"]
    __all__ += list(MODULE_OF)


class _Functions(ModuleType):
    """This module: a name of a function and of its module stands for the function."""

    def __setattr__(self, name: str, value: object) -> None:
        if isinstance(value, ModuleType) and MODULE_OF.get(name) == name:
            value = getattr(value, name)
        super().__setattr__(name, value)


if not TYPE_CHECKING:
    sys.modules[__name__].__class__ = _Functions

    def __getattr__(name: str) -> Any:
        if name not in MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{MODULE_OF[name]}"), name)

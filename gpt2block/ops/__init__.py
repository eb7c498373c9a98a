"""The CUDA meaning of every operation: names and signatures of `gpt2block.reference`.

Each function takes CuPy arrays, float32 and where it says so 16 bits, checks them, launches on the
current stream and returns a new array. `BINDERS` holds the layer below: `bind(inputs, out,
**attrs)` checks once and returns the launches, which a Block walks again and again.
"""

from collections.abc import Callable, Mapping

from gpt2block.cuda.arrays import Bound
from gpt2block.ops import (
    _attention,
    _attention_cached,
    _elementwise,
    _encoder,
    _encoder_rows,
    _fp8,
    _gemm,
    _layernorm,
    _layernorm_gelu,
    _linear,
    _log_likelihood,
    _matmul,
    _rmsnorm,
    _rmsnorm_matmul,
    _rope,
    _sample,
    _softmax,
    _split,
    _trimat,
)
from gpt2block.ops._attention import attention
from gpt2block.ops._attention_cached import (
    attention_cached,
    attention_packed,
    attention_split,
    kv_append,
)
from gpt2block.ops._elementwise import add, gelu
from gpt2block.ops._encoder import encoder
from gpt2block.ops._encoder_rows import encoder_rows
from gpt2block.ops._fp8 import to_fp8
from gpt2block.ops._gemm import gemm
from gpt2block.ops._layernorm import layernorm
from gpt2block.ops._layernorm_gelu import layernorm_gelu
from gpt2block.ops._linear import linear
from gpt2block.ops._log_likelihood import log_likelihood
from gpt2block.ops._matmul import matmul_bias
from gpt2block.ops._rmsnorm import rmsnorm
from gpt2block.ops._rmsnorm_matmul import rmsnorm_ffn, rmsnorm_matmul
from gpt2block.ops._rope import rope
from gpt2block.ops._sample import SampleState, mark_seen, sample_token
from gpt2block.ops._softmax import softmax
from gpt2block.ops._split import split
from gpt2block.ops._trimat import trimat

BINDERS: Mapping[str, Callable[..., Bound]] = {
    "layernorm": _layernorm.bind,
    "matmul_bias": _matmul.bind,
    "attention": _attention.bind,
    "attention_cached": _attention_cached.bind_sequence,
    "add": _elementwise.bind_add,
    "gelu": _elementwise.bind_gelu,
    "layernorm_gelu": _layernorm_gelu.bind,
    "encoder": _encoder.bind,
    "encoder_rows": _encoder_rows.bind,
    "softmax": _softmax.bind,
    "trimat": _trimat.bind,
    "rmsnorm": _rmsnorm.bind,
    "rope": _rope.bind,
    "rmsnorm_matmul": _rmsnorm_matmul.bind_matmul,
    "rmsnorm_ffn": _rmsnorm_matmul.bind_ffn,
    "to_fp8": _fp8.bind,
    "linear": _linear.bind,
    "gemm": _gemm.bind,
    "split": _split.bind,
    "sample_token": _sample.bind,
    "log_likelihood": _log_likelihood.bind,
}

# Op → what checks the shapes of its inputs against the hardware's limits, before any allocation.
LIMITS: Mapping[str, Callable[..., None]] = {
    "matmul_bias": _matmul.check_limits,
    "attention": _attention.check_limits,
}

__all__ = [
    "BINDERS",
    "LIMITS",
    "Bound",
    "SampleState",
    "add",
    "attention",
    "attention_cached",
    "attention_packed",
    "attention_split",
    "encoder",
    "encoder_rows",
    "gelu",
    "gemm",
    "kv_append",
    "layernorm",
    "layernorm_gelu",
    "linear",
    "log_likelihood",
    "mark_seen",
    "matmul_bias",
    "rmsnorm",
    "rmsnorm_ffn",
    "rmsnorm_matmul",
    "rope",
    "sample_token",
    "softmax",
    "split",
    "to_fp8",
    "trimat",
]

"""The CUDA meaning of every operation: names and signatures of `gpt2block.reference`.

Each function takes CuPy arrays, float32 and where it says so 16 bits, checks them, launches on the
current stream and returns a new array. `BINDERS` holds the layer below: `bind(inputs, out,
**attrs)` checks once and returns the launches, which a Block walks again and again.
"""

from collections.abc import Callable, Mapping

from gpt2block.cuda.arrays import Bound
from gpt2block.ops.attention import attention, check_limits
from gpt2block.ops.attention import bind as bind_attention
from gpt2block.ops.attention_cached import (
    attention_cached,
    attention_packed,
    attention_split,
    bind_sequence,
    kv_append,
)
from gpt2block.ops.elementwise import add, bind_add, bind_gelu, gelu
from gpt2block.ops.encoder import bind as bind_encoder
from gpt2block.ops.encoder import encoder
from gpt2block.ops.encoder_rows import bind as bind_encoder_rows
from gpt2block.ops.encoder_rows import encoder_rows
from gpt2block.ops.gemm import bind as bind_gemm
from gpt2block.ops.gemm import gemm
from gpt2block.ops.layernorm import bind as bind_layernorm
from gpt2block.ops.layernorm import layernorm
from gpt2block.ops.layernorm_gelu import bind as bind_layernorm_gelu
from gpt2block.ops.layernorm_gelu import layernorm_gelu
from gpt2block.ops.linear import bind as bind_linear
from gpt2block.ops.linear import linear
from gpt2block.ops.log_likelihood import bind as bind_log_likelihood
from gpt2block.ops.log_likelihood import log_likelihood
from gpt2block.ops.matmul_bias import bind as bind_matmul_bias
from gpt2block.ops.matmul_bias import check_limits as matmul_bias_check_limits
from gpt2block.ops.matmul_bias import matmul_bias
from gpt2block.ops.rmsnorm import bind as bind_rmsnorm
from gpt2block.ops.rmsnorm import rmsnorm
from gpt2block.ops.rmsnorm_matmul import bind_ffn, bind_matmul, rmsnorm_ffn, rmsnorm_matmul
from gpt2block.ops.rope import bind as bind_rope
from gpt2block.ops.rope import rope
from gpt2block.ops.sample_token import SampleState, mark_seen, sample_token
from gpt2block.ops.sample_token import bind as bind_sample_token
from gpt2block.ops.softmax import bind as bind_softmax
from gpt2block.ops.softmax import softmax
from gpt2block.ops.to_fp8 import bind as bind_to_fp8
from gpt2block.ops.to_fp8 import to_fp8
from gpt2block.ops.trimat import bind as bind_trimat
from gpt2block.ops.trimat import trimat
from gpt2block.ops.two_part import bind as bind_two_part
from gpt2block.ops.two_part import split

BINDERS: Mapping[str, Callable[..., Bound]] = {
    "layernorm": bind_layernorm,
    "matmul_bias": bind_matmul_bias,
    "attention": bind_attention,
    "attention_cached": bind_sequence,
    "add": bind_add,
    "gelu": bind_gelu,
    "layernorm_gelu": bind_layernorm_gelu,
    "encoder": bind_encoder,
    "encoder_rows": bind_encoder_rows,
    "softmax": bind_softmax,
    "trimat": bind_trimat,
    "rmsnorm": bind_rmsnorm,
    "rope": bind_rope,
    "rmsnorm_matmul": bind_matmul,
    "rmsnorm_ffn": bind_ffn,
    "to_fp8": bind_to_fp8,
    "linear": bind_linear,
    "gemm": bind_gemm,
    "split": bind_two_part,
    "sample_token": bind_sample_token,
    "log_likelihood": bind_log_likelihood,
}

# Op → what checks the shapes of its inputs against the hardware's limits, before any allocation.
LIMITS: Mapping[str, Callable[..., None]] = {
    "matmul_bias": matmul_bias_check_limits,
    "attention": check_limits,
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

"""All operations on CUDA, with the names and signatures of the functions of `gpt2block.reference`.

Each function checks CuPy arrays (float32 or, where documented, 16 bits), launches kernels on the
current stream and returns a new array. Each module describes one operation completely; the
registry (`gpt2block.ops.registry`) lists the operations. `Operation.bind(inputs, out, **attrs)`
checks the arguments once and returns the launches, for repeated calls.
"""

from gpt2block.cuda.arrays import Bound
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
from gpt2block.ops.sample_token import SampleState, mark_seen, sample_token
from gpt2block.ops.softmax import softmax
from gpt2block.ops.to_fp8 import to_fp8
from gpt2block.ops.top_logprobs import top_logprobs
from gpt2block.ops.trimat import trimat
from gpt2block.ops.two_part import two_part

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
    "kv_append",
    "kv_round",
    "layernorm",
    "layernorm_gelu",
    "linear",
    "log_likelihood",
    "mark_seen",
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
    "two_part",
]

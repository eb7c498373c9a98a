"""Every operation refuses arrays that its contract excludes, and names the array."""

from __future__ import annotations

import pytest

from gpt2block import InputError
from gpt2block.ops.registry import OPERATIONS, STEPS
from tests.contract_cases import Example, cases
from tests.devices import running_on

KV = {"B": 2, "P": 7, "C": 8}
HEADS = {"n_head": 2, "n_kv_head": 1}
EXAMPLES = {
    "add": Example({}),
    "silu_mul": Example({}),
    "gelu": Example({}),
    "relu_squared": Example({}),
    "cap": Example({}, {"limit": 15.0}),
    "softmax": Example({"T": 6}),
    "trimat": Example({"B": 1, "T": 5, "NH": 2, "HS": 8}),
    "matmul_bias": Example({"K": 8, "N": 4}),
    "blocks_matmul": Example({"K": 512, "N": 4}, dtype="float16"),
    "gemm": Example({"K": 64, "N": 16, "S": 9, "H": 9}, dtype="float16"),
    "hi_lo": Example({"K": 8}),
    "take": Example({"N": 5, "C": 8, "B": 3}),
    "rmsnorm": Example({"C": 8}, dtype="bfloat16"),
    "rmsnorm_add": Example({"C": 8, "S": 2}),
    "rmsnorm_groups": Example({"N": 5, "W": 16, "P": 8}),
    "gated_columns": Example({"N": 5, "W": 16, "P": 8}, {"first": 8}),
    "operand": Example({"C": 8}),
    "rmsnorm_matmul": Example({"K": 8, "N": 4}),
    "rmsnorm_ffn": Example({"K": 8, "N": 4}, dtype="float16"),
    "attention": Example({"T": 5, "W": 32}, {**HEADS, "causal": True}),
    "attention_varlen": Example(
        {"N": 5, "W": 32, "S": 3, "R": 2, "P": 7, "D": 8},
        {**HEADS, "causal": True, "max_seqlen": 3},
    ),
    "attention_cached": Example({"T": 3, "Q": 16, "P": 7, "C": 8}, {"start": 2, "n_head": 2}),
    "attention_packed": Example({"N": 5, "W": 32, **KV}, {"n_head": 2, "longest": 3}),
    "attention_queries": Example({"N": 5, "Q": 16, **KV}, {"n_head": 2, "longest": 3}),
    "attention_split": Example({"M": 3, "Q": 16, **KV}, {"n_head": 2}),
    "attention_append": Example({"M": 3, "W": 32, "H": 4, "D": 8, **KV}, {"n_head": 2}),
    "rope": Example({"T": 5, "H": 2, "D": 8}, dtype="float16"),
    "rope_qkv": Example({"T": 5, "W": 32, "P": 4}, HEADS),
    "rope_packed": Example({"N": 3, "W": 32, "P": 4, "B": 2}, HEADS),
    "rope_append": Example({"N": 3, "W": 32, "P": 4, "B": 2, "S": 7, "C": 8}, {"n_head": 2}),
    "qk_norm": Example({"W": 32, "G": 8, "H": 8}, HEADS, dtype="float16"),
    "qk_norm_rope": Example({"T": 5, "W": 32, "P": 4, "G": 8, "H": 8}, HEADS),
    "qk_norm_append": Example(
        {"N": 3, "W": 32, "P": 4, "B": 2, "S": 7, "C": 8, "G": 8, "H": 8}, {"n_head": 2}
    ),
    "rotations": Example({"N": 3, "P": 4}),
    "encoder": Example({"T": 5, "V": 9, "P": 7, "C": 8}),
    "encoder_rows": Example({"N": 5, "V": 9, "P": 7, "C": 8}),
    "layernorm": Example({"C": 8}, {"eps": 1e-5, "variant": 3}),
    "layernorm_gelu": Example({"C": 8}),
    "linear": Example({"K": 8, "N": 4, "H": 9}),
    "linear_qkv": Example({"M": 2, "K": 8, "N": 24, "B": 2, "P": 3, "C": 8}),
    "log_likelihood": Example({"V": 9}),
    "top_logprobs": Example({"M": 2, "V": 9}, {"K": 20}),
    "sample_token": Example({"B": 2, "V": 9}),
    "mark_occurred": Example({"N": 5, "B": 2, "V": 9}),
    "kv_append": Example({"N": 3, "W": 32, **KV}),
    "short_conv": Example({"M": 3, "W": 24, "L": 3, **KV}),
    "kv_round": Example({"N": 3, "W": 32}, {**HEADS, "kv_dtype": "float8_e5m2"}),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_a_contract_excludes_is_refused(name: str) -> None:
    operation, example = {**OPERATIONS, **STEPS}[name], EXAMPLES[name]
    refused = 0
    with running_on("forward"):
        for case in cases(operation.contract, example):
            with pytest.raises(InputError) as caught:
                operation.bind(case.inputs, case.out, **example.options)
            message = str(caught.value)
            assert message.partition(":")[0] in case.names, case.label
            assert case.words in message, case.label
            refused += 1
    assert refused >= 5 * len(operation.contract.inputs)

"""Every operation refuses arrays that its contract excludes, and names the array."""

from __future__ import annotations

from typing import Any

import pytest

from gpt2block import InputError
from gpt2block.ops.registry import OPERATIONS, STEPS
from tests.contract_cases import Example, cases
from tests.devices import running_on

# Sizes of the letters of contracts, unless an example states others
SIZES = {"B": 2, "C": 8, "D": 8, "G": 8, "H": 8, "HS": 8, "K": 8, "L": 3, "M": 3, "N": 5, "P": 7}
SIZES |= {"NH": 2, "Q": 16, "R": 2, "S": 7, "T": 5, "V": 9, "W": 32}
HEADS = {"n_head": 2, "n_kv_head": 1}


def example(options: Any = None, dtype: str = "float32", **sizes: int) -> Example:
    return Example({**SIZES, **sizes}, options or {}, dtype)


ALIKE = """add silu_mul gelu relu_squared hi_lo operand encoder encoder_rows layernorm_gelu
    log_likelihood sample_token mark_occurred"""
EXAMPLES = {
    **dict.fromkeys(ALIKE.split(), example()),
    "cap": example({"limit": 15.0}),
    "softmax": example(T=6),
    "trimat": example(B=1),
    **dict.fromkeys(["matmul_bias", "rmsnorm_matmul"], example(N=4)),
    "blocks_matmul": example(dtype="float16", K=512, N=4),
    "gemm": example(dtype="float16", K=64, N=16, S=9, H=9),
    "take": example(B=3),
    "rmsnorm": example(dtype="bfloat16"),
    "rmsnorm_add": example(S=2),
    "rmsnorm_groups": example(W=16, P=8),
    "gated_columns": example({"first": 8}, W=16, P=8),
    "rmsnorm_ffn": example(dtype="float16", N=4),
    "attention": example({**HEADS, "causal": True}),
    "attention_varlen": example({**HEADS, "causal": True, "max_seqlen": 3}, S=3),
    "attention_cached": example({"start": 2, "n_head": 2}, T=3),
    "attention_packed": example({"n_head": 2, "longest": 3}),
    "attention_queries": example({"n_head": 2, "longest": 3}),
    "attention_split": example({"n_head": 2}),
    "attention_append": example({"n_head": 2}, H=4),
    "rope": example(dtype="float16", H=2),
    **dict.fromkeys(["rope_qkv", "qk_norm_rope"], example(HEADS, P=4)),
    "rope_packed": example(HEADS, N=3, P=4),
    **dict.fromkeys(["rope_append", "qk_norm_append"], example({"n_head": 2}, N=3, P=4)),
    "qk_norm": example(HEADS, dtype="float16"),
    "rotations": example(N=3, P=4),
    "layernorm": example({"eps": 1e-05, "variant": 3}),
    "linear": example(N=4, H=9),
    "linear_qkv": example(M=2, N=24, P=3),
    "top_logprobs": example({"K": 20}, M=2),
    "kv_append": example(N=3),
    "short_conv": example(W=24),
    "route": example({"n_used": 2}, E=4),
    "expert_tiles": example({"n_expert": 4, "rows": 8}),
    "experts_gated": example({"n_expert": 2, "n_used": 1}, N=4),
    "experts_down": example({"n_expert": 2}, N=4),
    "add_experts": example(P=3),
    "kv_round": example({**HEADS, "kv_dtype": "float8_e5m2"}, N=3),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_a_contract_excludes_is_refused(name: str) -> None:
    operation, valid = {**OPERATIONS, **STEPS}[name], EXAMPLES[name]
    refused = 0
    with running_on("forward"):
        for case in cases(operation.contract, valid):
            with pytest.raises(InputError) as caught:
                operation.bind(case.inputs, case.out, **valid.options)
            message = str(caught.value)
            assert message.partition(":")[0] in case.names, case.label
            assert case.words in message, case.label
            refused += 1
    assert refused >= 5 * len(operation.contract.inputs)

"""Limits of the error of a user's kernel, derived from the roundings of the operation's formula.

Errors are relative to the largest value of the result. `cases.case` draws the inputs of a result of
few values so that this value is not near zero. u = 2^-24 is the largest relative error of one
rounding in float32. A limit is the sum of three parts:

- 2 roundings to the dtype of the arrays: of the result and of an intermediate value.
- Further roundings of the formula, each of at most u, as if all of them had the same sign. They are
  counted for the least accurate usual form. A function of CUDA counts with its error of 1 to 2 ulp:
  expf, rsqrtf and a fast division 4, tanhf and logf 2. `__expf(x)` has an error of (4 + 2.3 |x|)u,
  but where |x| is large, the result is small.
- Sums of n terms. A thread that adds the terms in order rounds each partial sum. The sum after k
  terms is about k / n of the whole, and a rounding has a standard deviation of u / sqrt(3). The
  standard deviation of the sum is therefore u sqrt(n) / 3; other orders have smaller errors. The
  errors of several sums are independent, so that their numbers of terms are added. Mean and
  variance count as one sum, as the root halves the error of the variance. Terms below half an ulp
  of a partial sum are lost, which matters for more than 30,000 terms: the limit includes this
  loss for squares of normally distributed numbers (231u for 65,544 terms, halved by the root),
  and for the logarithm of a sum of exponentials (160u of the log-likelihood for 100,001 terms).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt

from gpt2block.contract import size_of
from gpt2block.ops.operation import Operation

ULP = 2.0**-24  # largest relative rounding error of float32
DEVIATIONS = 4.5  # standard deviations of a sum's error that are allowed
_STORED = {"float32": ULP, "bfloat16": 2.0**-8}  # largest relative rounding error of other dtypes
# Operation → roundings outside of sums and beside the result's, and number of terms of all sums.
_ROUNDINGS: Mapping[str, tuple[int, str]] = {
    "add": (0, "0"),  # one addition, whose rounding is the result's
    "attention": (24, "2 * T + C // n_head"),  # trimat and softmax; sums of weights and values
    "blocks_matmul": (16, "256 * B"),  # linear, rounded value of a weight 8
    "encoder": (0, "0"),
    "gelu": (8, "0"),  # argument of tanh 2, tanh by exp and division 4, 1 + tanh 1, product 1
    "gemm": (8, "K"),
    "layernorm": (8, "C"),  # x - mean 1, division by C 1, rsqrt 4, products 2
    "layernorm_gelu": (16, "C"),
    "linear": (8, "K"),  # hi/lo or separately rounded products 4, bias 1, scale 3
    "log_likelihood": (16, "V"),
    "matmul_bias": (8, "K"),
    "qk_norm": (8, "D"),
    "rmsnorm": (8, "C"),
    "rmsnorm_ffn": (16, "3 * K"),  # rmsnorm and silu_mul; sums of squares, gate and up
    "rmsnorm_matmul": (72, "2 * K"),  # linear, rmsnorm; angles of up to 14 radians in float
    "rope": (160, "0"),  # angles of up to 40 radians in float, each with four roundings
    "silu_mul": (8, "0"),  # exp 4, weighted by 1 - sigmoid; 1 + exp 1, division 2, product 1
    "softmax": (16, "T"),  # x - max - log(sum), of magnitude up to 8: 8, exp 4, division 4
    "trimat": (8, "HS"),  # hi/lo products 4, root 2, division 2
}


def limit(operation: Operation, dtype: str, at: Mapping[str, object]) -> float:
    """Return the largest error that rounding explains, relative to the largest value.

    dtype: dtype of the activations. at: sizes and attributes. Operations whose results are integers
    are compared exactly.
    """
    count, terms = _ROUNDINGS.get(operation.name, (0, "0"))
    of_sums = DEVIATIONS * sqrt(size_of(terms, at)) / 3
    return 2 * _STORED.get(dtype, 2.0**-11) + ULP * (count + of_sums)

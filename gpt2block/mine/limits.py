"""Limits of the error of a user's kernel, derived from the roundings of the operation's formula.

Errors are relative to the largest value of the result. u = 2^-24 is the largest relative error of
one rounding in float32. A limit is the sum of three parts:

- Roundings of the result and of one intermediate value to the dtype of the arrays: 2u in float32,
  2^-10 in float16, 2^-7 in bfloat16.
- Further roundings of the formula, each of at most u. They are counted for the least accurate usual
  form, as if all of them had the same sign. A function of CUDA has an error of 1 to 2 ulp, which is
  2u to 4u: `expf` and `rsqrtf` 4u, `tanhf` and `logf` 2u, a fast division 4u. `__expf(x)` has an
  error of (4 + 2.3 |x|)u, but the weights of large |x| are small. The error of a function's
  argument counts with the derivative of the function.
- Sums of n terms. A thread that adds the terms in order rounds each partial sum. The partial sum
  after k terms is about k / n of the sum, and a rounding has a standard deviation of u / sqrt(3).
  The sum therefore has a standard deviation of u sqrt(n) / 3. The limit allows for 4.5 standard
  deviations. Sums in any other order have smaller errors. The errors of several sums are
  independent, so that the numbers of their terms are added. Terms below half an ulp of a partial
  sum are lost, which matters for more than 30,000 terms: the limit includes this loss for squares
  of normally distributed numbers (231u for 65,544 terms, halved by the root) and for the logarithm
  of a sum of exponentials, which is divided by the log-likelihood (160u for 100,001 terms).

The numbers of `_ROUNDINGS` follow:

    add, encoder    one addition, whose rounding is the rounding of the result
    gelu            argument of tanh 2, tanh 2 (with exp and a division 4), 1 + tanh 1, product 1
    silu_mul        exp 4, weighted by 1 - sigmoid < 1; 1 + exp 1, division 2, product 1
    layernorm       x - mean 1, division by C 1, rsqrt 4, two products 2; mean and variance, of
                    which the root halves the error, count as one sum
    layernorm_gelu  the formulas of layernorm and gelu
    softmax         x - max - log(sum), of magnitude up to 8: 8, exp 4, division 4
    log_likelihood  as softmax
    trimat          two-part products 4, root 2, division 2
    attention       trimat and softmax; the sums are scores, weights and weighted values
    products        two-part or separately rounded products 4, bias 1, scale 3
    blocks_matmul   products, and the rounded values of the weights: scale, minimum and difference
    rmsnorm         as layernorm
    rmsnorm_ffn     rmsnorm and silu_mul; the sums are squares, gate and up
    rope            angles of up to 40 radians in float, each with four roundings
    rmsnorm_matmul  products, rmsnorm and angles of up to 14 radians; the sums are squares, products
"""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import Any, NamedTuple

from gpt2block.contract import size_of
from gpt2block.ops.operation import Operation

ULP = 2.0**-24  # largest relative rounding error of float32
DEVIATIONS = 4.5  # standard deviations of a sum's error that are allowed
_STORED = {"float32": ULP, "bfloat16": 2.0**-8}  # largest relative rounding error of other dtypes


class _Roundings(NamedTuple):
    """Roundings of a formula. count: those outside of sums. terms: number of terms of all sums."""

    count: int
    terms: str = "0"


_PRODUCTS = _Roundings(8, "K")
_ROUNDINGS: Mapping[str, _Roundings] = {
    "add": _Roundings(0),
    "attention": _Roundings(24, "2 * T + C // n_head"),
    "blocks_matmul": _Roundings(16, "256 * B"),
    "encoder": _Roundings(0),
    "gelu": _Roundings(8),
    "gemm": _PRODUCTS,
    "layernorm": _Roundings(8, "C"),
    "layernorm_gelu": _Roundings(16, "C"),
    "linear": _PRODUCTS,
    "log_likelihood": _Roundings(16, "V"),
    "matmul_bias": _PRODUCTS,
    "qk_norm": _Roundings(8, "D"),
    "rmsnorm": _Roundings(8, "C"),
    "rmsnorm_ffn": _Roundings(16, "3 * K"),
    "rmsnorm_matmul": _Roundings(72, "2 * K"),
    "rope": _Roundings(160),
    "silu_mul": _Roundings(8),
    "softmax": _Roundings(16, "T"),
    "trimat": _Roundings(8, "HS"),
}


def limit(operation: Operation, dtype: str, at: Mapping[str, Any]) -> float:
    """Return the largest error that rounding explains, relative to the largest value.

    dtype: dtype of the activations. at: sizes and attributes. Operations whose results are integers
    are compared exactly.
    """
    count, terms = _ROUNDINGS.get(operation.name, _Roundings(0))
    of_sums = DEVIATIONS * sqrt(size_of(terms, at)) / 3
    return 2 * _STORED.get(dtype, 2.0**-11) + ULP * (count + of_sums)

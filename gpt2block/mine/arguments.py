"""The arguments that each operation's kernels are given, by the names in their prototypes.

A kernel of the user's takes any of them, in any order. The names are those of the built-in kernels
and of `gpt2block.reference`; where these differ, both are known. Small sizes to check with are here
too: odd ones, which no block and no vector divides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from numpy.typing import NDArray

from gpt2block import reference
from gpt2block.bench.measure import widened
from gpt2block.errors import InputError
from gpt2block.ops.operation import Operation, Shape, Sizes
from gpt2block.weights.matrix import WeightMatrix

Attrs = Mapping[str, Any]
FLOAT = "float32"


class Output(NamedTuple):
    shape: Shape
    dtype: str = FLOAT


class Values(NamedTuple):
    """The arguments of one call. An output that is an input, too, is computed in place."""

    inputs: Mapping[str, Any]  # name → array
    outputs: Mapping[str, Output]  # the result first
    numbers: Mapping[str, int | float]
    aliases: Mapping[str, str] = {}  # another name → name

    @property
    def sizes(self) -> dict[str, int]:
        """What the expressions of a launch line may use."""
        whole = {name: n for name, n in self.numbers.items() if isinstance(n, int)}
        other = {name: whole[known] for name, known in self.aliases.items() if known in whole}
        return whole | other


Case = tuple[Sizes, Attrs]  # sizes, and attributes that differ from the documented ones


@dataclass(frozen=True)
class Contract:
    """`values(inputs, attrs)`: the arguments for inputs as `Operation.make` gives them.

    cases: to check with. further: the exact values of outputs besides the result, from the inputs
    in float64.
    """

    values: Callable[[tuple[Any, ...], Attrs], Values]
    cases: tuple[Case, ...]
    further: Callable[..., dict[str, NDArray[Any]]] = field(default=lambda *_, **__: {})


def contract(operation: Operation) -> Contract:
    """InputError for an operation whose kernels need more than arrays and numbers."""
    if operation.name not in CONTRACTS:
        raise InputError(
            f"{operation.name} takes no kernel of your own: expected one of {', '.join(CONTRACTS)}"
        )
    return CONTRACTS[operation.name]


def _stored(array: Any) -> str:
    return str(array.dtype.name)


def _layernorm(inputs: tuple[Any, ...], attrs: Attrs) -> Values:
    x, gamma, beta = inputs
    B, T, C = x.shape
    return Values(
        {"x": x, "gamma": gamma, "beta": beta},
        {"out": Output(x.shape, _stored(x)), "mean": Output((B, T)), "rstd": Output((B, T))},
        {"eps": attrs["eps"], "N": B * T, "C": C, "B": B, "T": T},
        {"in": "x", "seq_len": "N", "rows": "N"},
    )


def _layernorm_stats(x: Any, *_: Any, eps: float) -> dict[str, NDArray[Any]]:
    mean, rstd = reference.layernorm_stats(widened(x), eps)
    return {"mean": mean, "rstd": rstd}


def _trimat(inputs: tuple[Any, ...], attrs: Attrs) -> Values:
    (qkv,) = inputs
    B, T, _, NH, HS = qkv.shape
    return Values(
        {"qkv": qkv},
        {"out": Output((B, NH, T, T))},
        {"B": B, "T": T, "NH": NH, "HS": HS, "C": NH * HS},
    )


def _layernorm_gelu(inputs: tuple[Any, ...], attrs: Attrs) -> Values:
    (x,) = inputs
    return Values(
        {"x": x},
        {"y": Output(x.shape)},
        {"eps": attrs["eps"], "N": x.shape[0], "C": x.shape[1]},
        {"input": "x", "output": "y", "out": "y", "batch_size": "N", "rows": "N"}
        | {"hidden_dim": "C"},
    )


def _encoder(inputs: tuple[Any, ...], attrs: Attrs) -> Values:
    ids, wte, wpe = inputs
    (B, T), (V, C) = ids.shape, wte.shape
    return Values(
        {"ids": ids, "wte": wte, "wpe": wpe},
        {"out": Output((B, T, C))},
        {"rows": B * T, "T": T, "C": C, "V": V, "B": B},
        {"N": "rows"},
    )


def _softmax(inputs: tuple[Any, ...], attrs: Attrs) -> Values:
    (x,) = inputs
    numbers = {"rows": prod(x.shape[:-1]), "n": x.shape[-1], "B": x.shape[0], "NH": x.shape[1]}
    return Values(
        {"x": x}, {"y": Output(x.shape)}, {**numbers, "T": x.shape[2]}, {"out": "y", "N": "rows"}
    )


def _matmul_bias(inputs: tuple[Any, ...], attrs: Attrs) -> Values:
    a, w, bias = inputs
    (M, K), N = a.shape, w.shape[1]
    return Values(
        {"A": a, "B": w, "bias": bias},
        {"C": Output((M, N))},
        {"M": M, "K": K, "N": N},
        {"a": "A", "w": "B", "out": "C"},
    )


def _attention(inputs: tuple[Any, ...], attrs: Attrs) -> Values:
    (qkv,) = inputs
    (B, T, width), NH = qkv.shape, attrs["n_head"]
    return Values(
        {"qkv": qkv},
        {"out": Output((B, T, width // 3), _stored(qkv))},
        {"B": B, "T": T, "C": width // 3, "NH": NH, "HS": width // 3 // NH}
        | {"causal": int(attrs["causal"])},
        {"attn_out": "out", "seq_len": "T", "n_head": "NH"},
    )


def _add(inputs: tuple[Any, ...], attrs: Attrs) -> Values:
    a, b = inputs
    return Values({"a": a, "b": b}, {"y": Output(a.shape)}, {"n": int(a.size)}, {"out": "y"})


def _silu_mul(inputs: tuple[Any, ...], attrs: Attrs) -> Values:
    gate, up = inputs
    out = {"out": Output(gate.shape, _stored(gate))}
    return Values({"gate": gate, "up": up}, out, {"n": int(gate.size)})


def _gelu(inputs: tuple[Any, ...], attrs: Attrs) -> Values:
    (x,) = inputs
    return Values({"x": x}, {"x": Output(x.shape)}, {"n": int(x.size)})


def _rmsnorm(inputs: tuple[Any, ...], attrs: Attrs) -> Values:
    x, weight = inputs
    M, C = x.shape
    numbers = {"eps": attrs["eps"], "M": M, "C": C}
    out = {"out": Output(x.shape, _stored(x))}
    return Values({"x": x, "weight": weight}, out, numbers, {"gamma": "weight", "rows": "M"})


def _extents(x: Any, w: WeightMatrix) -> dict[str, int]:
    """M, N and K of x (M, K) times w (K, N)."""
    return {"M": int(x.shape[0]), "N": w.N, "K": w.K}


def _product(x: Any, w: WeightMatrix) -> dict[str, Output]:
    return {"out": Output((x.shape[0], w.N), _stored(x))}


def _rmsnorm_matmul(inputs: tuple[Any, ...], attrs: Attrs) -> Values:
    x, gamma, w = inputs
    return Values(
        {"x": x, "gamma": gamma, "w": w.data},
        _product(x, w),
        {"eps": 1e-6, **_extents(x, w), "head_dim": attrs["head_dim"], "theta": 10000.0},
    )


def _rmsnorm_ffn(inputs: tuple[Any, ...], attrs: Attrs) -> Values:
    x, gamma, w1, w3 = inputs
    return Values(
        {"x": x, "gamma": gamma, "w1": w1.data, "w3": w3.data},
        _product(x, w1),
        {"eps": 1e-6, **_extents(x, w1)},
    )


def _to_fp8(inputs: tuple[Any, ...], attrs: Attrs) -> Values:
    (x,) = inputs
    out = {"out": Output(x.shape, "uint8")}
    return Values({"x": x}, out, {"size": int(x.size), "K": x.shape[0], "N": x.shape[1]})


def _linear(inputs: tuple[Any, ...], attrs: Attrs) -> Values:
    x, w, bias = inputs
    return Values({"x": x, "w": w.data, "bias": bias}, _product(x, w), _extents(x, w))


def _gemm(inputs: tuple[Any, ...], attrs: Attrs) -> Values:
    a, w = inputs
    return Values({"a": a, "w": w.data}, _product(a, w), _extents(a, w))


def _log_likelihood(inputs: tuple[Any, ...], attrs: Attrs) -> Values:
    logits, targets = inputs
    N, V = logits.shape
    return Values({"logits": logits, "targets": targets}, {"out": Output((N,))}, {"N": N, "V": V})


def small_cases(operation: Operation) -> tuple[Case, ...]:
    """Small sizes of any operation, also of one that takes no kernel of the user's."""
    known = CONTRACTS.get(operation.name)
    return known.cases if known else BUILT_IN[operation.name]


def _cases(*sizes: Mapping[str, int]) -> tuple[Case, ...]:
    return tuple((each, {}) for each in sizes)


BUILT_IN: Mapping[str, tuple[Case, ...]] = {  # operations without a contract
    "encoder_rows": _cases({"N": 19, "T": 33, "C": 128, "V": 70}),
    "attention_cached": (({"T": 17, "C": 128}, {"n_head": 2}),),
    "rope": _cases({"T": 5, "H": 3, "D": 8}),
    "rope_qkv": _cases({"T": 5, "D": 8}),
    "sample_token": _cases({"B": 2, "V": 70}),
}
_PRODUCTS = _cases(
    {"M": 1, "K": 16, "N": 8}, {"M": 5, "K": 40, "N": 24}, {"M": 17, "K": 96, "N": 136}
)
_ELEMENTS = _cases({"N": 1, "C": 5}, {"N": 7, "C": 33}, {"N": 3, "C": 769})
CONTRACTS: Mapping[str, Contract] = {
    "layernorm": Contract(
        _layernorm,
        _cases(
            {"B": 1, "T": 1, "C": 24},
            {"B": 1, "T": 5, "C": 33},
            {"B": 2, "T": 17, "C": 128},
            {"B": 1, "T": 3, "C": 769},
        ),
        _layernorm_stats,
    ),
    "trimat": Contract(
        _trimat,
        _cases(
            {"B": 1, "T": 5, "NH": 3, "HS": 8},
            {"B": 2, "T": 33, "NH": 1, "HS": 64},
            {"B": 1, "T": 70, "NH": 2, "HS": 12},
        ),
    ),
    "layernorm_gelu": Contract(_layernorm_gelu, _ELEMENTS),
    "encoder": Contract(
        _encoder,
        _cases(
            {"B": 1, "T": 5, "C": 24, "V": 11},
            {"B": 1, "T": 3, "C": 769, "V": 5},
            {"B": 2, "T": 33, "C": 128, "V": 70},
        ),
    ),
    "softmax": Contract(
        _softmax,
        _cases({"B": 1, "NH": 3, "T": 5}, {"B": 2, "NH": 1, "T": 33}, {"B": 1, "NH": 1, "T": 130}),
    ),
    "matmul_bias": Contract(
        _matmul_bias,
        _cases({"M": 1, "K": 5, "N": 7}, {"M": 17, "K": 40, "N": 19}, {"M": 33, "K": 70, "N": 130}),
    ),
    "attention": Contract(
        _attention,
        (
            ({"B": 1, "T": 5, "C": 24}, {"n_head": 3}),
            ({"B": 2, "T": 33, "C": 128}, {"n_head": 2}),
            ({"B": 1, "T": 70, "C": 24}, {"n_head": 2}),
        ),
    ),
    "add": Contract(_add, _ELEMENTS),
    "gelu": Contract(_gelu, _ELEMENTS),
    "silu_mul": Contract(
        _silu_mul, _cases({"M": 1, "N": 5}, {"M": 7, "N": 33}, {"M": 3, "N": 1376})
    ),
    "rmsnorm": Contract(_rmsnorm, _cases({"M": 1, "C": 24}, {"M": 5, "C": 33}, {"M": 3, "C": 769})),
    "rmsnorm_matmul": Contract(
        _rmsnorm_matmul,
        (
            ({"M": 1, "K": 16, "N": 24}, {"head_dim": 8}),
            ({"M": 5, "K": 40, "N": 32}, {"head_dim": 16}),
            ({"M": 17, "K": 96, "N": 256}, {}),
        ),
    ),
    "rmsnorm_ffn": Contract(_rmsnorm_ffn, _PRODUCTS),
    "to_fp8": Contract(_to_fp8, _cases({"K": 1, "N": 5}, {"K": 7, "N": 33}, {"K": 3, "N": 769})),
    "linear": Contract(_linear, _PRODUCTS),
    "gemm": Contract(_gemm, _PRODUCTS),
    "log_likelihood": Contract(
        _log_likelihood, _cases({"N": 1, "V": 11}, {"N": 5, "V": 70}, {"N": 3, "V": 1031})
    ),
}

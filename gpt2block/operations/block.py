"""The operations of the ten-step block that have one kernel each."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gpt2block.operations._types import Inputs, Operation, Sizes, Variant

BLOCK = "ten-step block"
GPT2_FC = {"M": 1024, "K": 768, "N": 3072}


def _normal(rng: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    values: NDArray[np.float32] = rng.standard_normal(shape, dtype=np.float32) + np.float32(0.5)
    return values


def _matmul_inputs(s: Sizes, rng: np.random.Generator) -> Inputs:
    return _normal(rng, s["M"], s["K"]), _normal(rng, s["K"], s["N"]), _normal(rng, s["N"])


def _elements(s: Sizes) -> int:
    return s["N"] * s["C"]


MATMUL_BIAS = Operation(
    name="matmul_bias",
    document=BLOCK,
    idea="a · w + bias",
    sizes=GPT2_FC,
    variants=(
        Variant(
            "tiled",
            "matmul.cu",
            ("matmul_bias_tiled",),
            "a thread an output, 16x16 tiles in shared memory, the next tile on its way",
        ),
    ),
    make=_matmul_inputs,
    traffic=lambda s: 4 * (s["M"] * s["K"] + s["K"] * s["N"] + s["M"] * s["N"]),
    flops=lambda s: 2 * s["M"] * s["K"] * s["N"],
    bound="compute",
    attrs={},
)

ATTENTION = Operation(
    name="attention",
    document=BLOCK,
    idea="softmax(Q Kᵀ / sqrt(HS)) V",
    sizes={"B": 1, "T": 1024, "C": 768},
    variants=(
        Variant(
            "mha",
            "attention.cu",
            ("mha_causal_kernel", "mha_nocausal_kernel"),
            "a block a query and head: scores, exp and sum, weighted sum of V",
        ),
    ),
    make=lambda s, rng: (_normal(rng, s["B"], s["T"], 3 * s["C"]),),
    traffic=lambda s: 16 * s["B"] * s["T"] * s["C"],
    flops=lambda s: 2 * s["B"] * s["T"] * (s["T"] + 1) * s["C"],
    bound="compute",
    attrs={"n_head": 12, "causal": True},
)

ADD = Operation(
    name="add",
    document=BLOCK,
    idea="a + b, the residual connection",
    sizes={"N": 8192, "C": 768},
    variants=(Variant("add", "residual.cu", ("add_kernel",), "a thread an element"),),
    make=lambda s, rng: (_normal(rng, s["N"], s["C"]), _normal(rng, s["N"], s["C"])),
    traffic=lambda s: 12 * _elements(s),
    flops=_elements,
    bound="memory",
    attrs={},
)

GELU = Operation(
    name="gelu",
    document=BLOCK,
    idea="0.5 x (1 + tanh(sqrt(2/π) (x + 0.044715 x³))), in place",
    sizes={"N": 8192, "C": 3072},
    variants=(Variant("gelu", "gelu.cu", ("gelu_kernel",), "a thread an element"),),
    make=lambda s, rng: (_normal(rng, s["N"], s["C"]),),
    traffic=lambda s: 8 * _elements(s),
    flops=lambda s: 8 * _elements(s),
    bound="memory",
    attrs={},
)

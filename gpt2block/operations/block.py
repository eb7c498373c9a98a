"""The operations of the ten-step block that have one kernel each."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gpt2block.operations._types import Operation, Sizes, Variant

BLOCK = "ten-step block"


def _normal(rng: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    values: NDArray[np.float32] = rng.standard_normal(shape, dtype=np.float32) + np.float32(0.5)
    return values


def _elements(s: Sizes) -> int:
    return s["N"] * s["C"]


ADD = Operation(
    name="add",
    document=BLOCK,
    idea="a + b, the residual connection",
    sizes={"N": 8192, "C": 768},
    variants=(Variant("add", "elementwise/residual.cu", ("add_kernel",), "a thread an element"),),
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
    variants=(Variant("gelu", "elementwise/gelu.cu", ("gelu_kernel",), "a thread an element"),),
    make=lambda s, rng: (_normal(rng, s["N"], s["C"]),),
    traffic=lambda s: 8 * _elements(s),
    flops=lambda s: 8 * _elements(s),
    bound="memory",
    attrs={},
)

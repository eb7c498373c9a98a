"""Choosing the next token: the launch of its kernel."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from gpt2block.cuda.kernels import Defines
from gpt2block.operations._types import Geometry, Inputs, Operation, Sizes, Variant
from gpt2block.text.sampling import Sampling

FILE = "tokens/sample.cu"
THREADS = 1024
MARK_BLOCK = 256
MAX_V = 2**23  # so that all masses together are less than 2^64


def _make(sizes: Sizes, rng: np.random.Generator) -> Inputs:
    shape = (sizes["B"], sizes["V"])
    return (np.float32(3) * rng.standard_normal(shape, dtype=np.float32),)


OPERATION = Operation(
    name="sample_token",
    document="Salmon et al. (2011), for the random numbers",
    idea="the first token whose cumulative mass exp(logit / temperature), of those kept, passes u",
    sizes={"B": 1, "V": 50257},
    variants=(
        Variant(
            "block",
            FILE,
            ("sample_token",),
            "a block a row; after exp all is integers: the same bits in any batch",
            block=THREADS,
        ),
    ),
    beside=(
        Variant("seen", FILE, ("mark_seen",), "tokens of prompts, for the repetition penalty"),
    ),
    make=_make,
    traffic=lambda sizes: 4 * sizes["B"] * sizes["V"],
    flops=lambda sizes: 5 * sizes["B"] * sizes["V"],
    bound="memory",
    attrs={"sampling": Sampling(temperature=0.8, top_k=50, top_p=0.95)},
)


@lru_cache(maxsize=1024)
def geometry(rows: int, threads: int = THREADS, defines: Defines = ()) -> Geometry:
    """For `rows` rows of any length; `defines` change constants of the kernel."""
    (kernel,) = OPERATION.variants[0].kernels
    sizes = () if threads == THREADS else (("SAMPLE_THREADS", threads),)
    return Geometry(kernel, (rows,), (threads,), defines=(*sizes, *defines))

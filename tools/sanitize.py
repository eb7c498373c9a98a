"""What compute-sanitizer watches: the ten steps at T = 30, and every variant of every operation.

No CUDA graph, so that each kernel is reported by name, and each result is held against NumPy. The
sizes are small and odd: tiles have edges, rows have tails.
"""

from __future__ import annotations

import numpy as np

from gpt2block import (
    Block,
    BlockWeights,
    GPT2Config,
    InputError,
    measure,
    ops,
    random_input,
    reference,
)
from gpt2block.operations import OPERATIONS, Operation

SIZES = {"B": 2, "T": 70, "C": 48, "NH": 3, "HS": 20, "V": 50, "M": 70, "K": 144, "N": 37}
HEADS = {"H": 3, "D": 34}


def block() -> None:
    """Both masks, one sequence and several, GPT-2's width and another one."""
    for config in (GPT2Config(), GPT2Config(n_head=3, n_embd=48)):
        weights = BlockWeights.random(0, config)
        for causal, batch in ((False, 1), (True, 1), (True, 3)):
            x = random_input(1, (batch, 30, config.n_embd))
            got = Block(weights, causal=causal, device="cuda", graph=False)(x)
            truth = reference.block_forward(x.astype(np.float64), weights, causal)
            error = float(np.abs(got - truth).max())
            assert error < 1e-5, error
            print(f"checked C {config.n_embd} causal {causal} B {batch}: error {error:.1e}")


def operation(found: Operation) -> None:
    """Every variant in every dtype it takes, weights in both layouts."""
    sizes = {name: (SIZES | HEADS)[name] for name in found.sizes}
    if found.matrices:
        sizes["N"] = 256  # whole heads
    options = {**found.attrs, **({"fill": 0.0} if "fill" in found.attrs else {})}
    for dtype in found.dtypes:
        for layout in ("KN", "NK") if found.matrices else ("KN",):
            host, truth = measure._inputs_and_truth(found, sizes, dtype, layout)
            stated = np.isfinite(truth)
            arrays = tuple(map(measure._uploaded, host))
            for variant in found.variants:
                chosen = options | measure.chosen(found, variant, None)
                try:
                    bound = ops.BINDERS[found.name](arrays, **chosen)
                except InputError as error:
                    print(f"not for {found.name} {variant.name} {dtype} {layout}: {error}")
                    continue
                got = bound.run().get().astype(np.float64)
                off = float(np.abs(got - truth)[stated].max() / np.abs(truth)[stated].max())
                assert off <= measure.tolerance(dtype), (found.name, variant.name, dtype, off)
                print(f"checked {found.name} {variant.name} {dtype} {layout}: error {off:.1e}")


def main() -> None:
    block()
    for found in OPERATIONS.values():
        operation(found)
    print("all done")


if __name__ == "__main__":
    main()

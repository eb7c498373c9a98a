"""What compute-sanitizer watches: the ten steps, every variant of every operation, a whole model.

Each result is held against NumPy. The sizes are small and odd: tiles have edges, rows have tails.
But for the model's decoding there is no CUDA graph, so that each kernel is reported by name.
"""

from __future__ import annotations

import numpy as np

from gpt2block import (
    GPT2,
    Block,
    BlockWeights,
    GPT2Config,
    GPT2Weights,
    InputError,
    Sampling,
    measure,
    ops,
    random_input,
    reference,
)
from gpt2block.engines.model import DTYPES
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


def model() -> None:
    """Prefill of a ragged batch, decoding as a graph, likelihoods, in every dtype."""
    weights = GPT2Weights.random(0, GPT2Config(2, 3, 48, 140, 101))
    rng = np.random.default_rng(0)
    ids = [rng.integers(101, size=n).astype(np.int32) for n in (131, 1, 140)]
    ways = [
        Sampling(temperature=0),
        Sampling(top_k=20, top_p=0.8, min_p=0.01, repetition_penalty=1.2),
        Sampling(temperature=1.5, seed=3),
    ]
    for dtype in DTYPES:
        ours, truth = (GPT2(weights, device, dtype) for device in ("cuda", "cpu"))
        error = 0.0
        for got, exact in zip(ours(ids), truth(ids), strict=True):
            error = max(error, float(np.abs(got - exact).max() / np.abs(exact).max()))
        assert error <= measure.tolerance("float32" if dtype == "float32" else "bfloat16"), error
        for rows in (slice(0, 3), slice(0, 1)):
            decoding = ours.engine.decode([row[:131] for row in ids[rows]], ways[rows])
            drawn = np.array([decoding.next()[0] for _ in range(5)])
            assert ((drawn >= 0) & (drawn < 101)).all()
        if dtype == "bfloat16":  # two rows are full on the way and restart
            for one in ours.generate(ids, max_new_tokens=12, overflow="truncate"):
                assert len(one.tokens) == 12
        likelihoods = np.concatenate(ours.engine.log_likelihood(ids))
        assert np.isfinite(likelihoods).all()
        print(f"checked GPT-2 {dtype}: error {error:.1e}")


def main() -> None:
    block()
    model()
    for found in OPERATIONS.values():
        operation(found)
    print("all done")


if __name__ == "__main__":
    main()

"""What compute-sanitizer watches: the ten steps at T = 30, both masks, launched directly.

No CUDA graph, so that each kernel is reported by name, and each result is held against NumPy.
"""

from __future__ import annotations

import numpy as np

from gpt2block import Block, BlockWeights, GPT2Config, random_input, reference


def main() -> None:
    for config in (GPT2Config(), GPT2Config(n_head=3, n_embd=48)):
        weights = BlockWeights.random(0, config)
        for causal, batch in ((False, 1), (True, 1), (True, 3)):
            x = random_input(1, (batch, 30, config.n_embd))
            got = Block(weights, causal=causal, device="cuda", graph=False)(x)
            truth = reference.block_forward(x.astype(np.float64), weights, causal)
            error = float(np.abs(got - truth).max())
            assert error < 1e-5, error
            print(f"checked C {config.n_embd} causal {causal} B {batch}: error {error:.1e}")


if __name__ == "__main__":
    main()

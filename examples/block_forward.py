"""Run a block with random weights, on the GPU if there is one, and compare it with NumPy."""

import numpy as np

from gpt2block import Block, BlockWeights, random_input, reference

weights = BlockWeights.random(seed=0)  # shapes of GPT-2 small: C = 768, 12 heads
x = random_input(seed=1, shape=(128, 768))  # (T, C)
block = Block(weights)
y = block(x)
truth = reference.block_forward(x.astype(np.float64), weights, causal=True)
print(block.device)
print(f"largest error against float64: {np.abs(y - truth).max():.1e}")

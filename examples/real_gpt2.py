"""Whole GPT-2 out of one block: text → tokens → embeddings → every block → the next token.

    python examples/real_gpt2.py "The capital of France is" --weights gpt2

`--weights` is a hub id (gpt2, gpt2-medium, gpt2-large, gpt2-xl), a Hugging Face directory, or
"shakespeare", the model in the package. After every block the residual stream is held against
float64 NumPy.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt2block import Block, GPT2Weights, reference, tokenizer
from gpt2block.checkpoints import Checkpoint
from gpt2block.walkthrough import likeliest

Array = NDArray[np.floating[Any]]


class Model:
    """A GPT-2's weights with a `Block` for each layer."""

    def __init__(self, weights: GPT2Weights, device: str | None = None) -> None:
        self.weights = weights
        self.blocks = [Block(w, causal=True, device=device) for w in weights.blocks]

    def logits(
        self, ids: NDArray[np.int64], check: Callable[[int, Array], None] | None = None
    ) -> Array:
        """ids (T,) or (B, T) → logits of the last position, (V,) or (B, V).

        `check` gets the residual stream after each block.
        """
        w = self.weights
        x = reference.encoder(ids, w.wte, w.wpe)
        for layer, block in enumerate(self.blocks):
            x = block(x)
            if check:
                check(layer, x)
        last = reference.layernorm(x[..., -1, :], w.gamma_f, w.beta_f, w.config.eps)
        logits: Array = last @ w.lm_head.T
        return logits


def held_against_numpy(
    weights: GPT2Weights, ids: NDArray[np.int64]
) -> Callable[[int, Array], None]:
    """A check that walks the float64 reference along and prints how far the stream is from it."""
    stream: list[Array] = [reference.encoder(ids, weights.wte, weights.wpe).astype(np.float64)]

    def check(layer: int, x: Array) -> None:
        stream[0] = reference.block_forward(stream[0], weights.blocks[layer], causal=True)
        error = np.abs(x - stream[0]).max() / np.abs(stream[0]).max()
        print(f"block {layer:2d}: residual stream within {error:.1e} of float64, relative")

    return check


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", nargs="?", default="The capital of France is")
    parser.add_argument("--weights", default="gpt2")
    parser.add_argument("--device", default=None)
    arguments = parser.parse_args()

    checkpoint = Checkpoint.open(arguments.weights)
    encoding = tokenizer.load(checkpoint.directory, checkpoint.config.vocab_size)
    ids = np.array(tokenizer.encode(encoding, arguments.text))
    weights = GPT2Weights.from_pretrained(checkpoint)
    model = Model(weights, arguments.device)
    print(f"{len(ids)} tokens on {model.blocks[0].device}")
    logits = model.logits(ids, held_against_numpy(weights, ids))
    for token, p in likeliest(logits):
        print(f"{p:6.1%}  {arguments.text}{encoding.decode([token])!r}")


if __name__ == "__main__":
    main()

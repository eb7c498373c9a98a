"""Continue a text with GPT-2, and compare its residual stream with float64.

    python examples/real_gpt2.py "The capital of France is" --model gpt2

`--model` is a hub id (gpt2, gpt2-medium, gpt2-large, gpt2-xl), a Hugging Face directory, or
"shakespeare", the bundled GPT-2. The residual stream is compared with float64 NumPy after the
embedding and after each block. If the model or device cannot be used, an error is printed to
stderr, and the exit code is 2.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np

from gpt2block import (
    GPT2,
    CheckpointError,
    DeviceError,
    GPT2Weights,
    InputError,
    reference,
)
from gpt2block.engine.inspect.lens import most_likely
from gpt2block.files.checkpoints import Checkpoint


def main() -> int:
    """Parse the arguments, run the example and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", nargs="?", default="The capital of France is")
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--device", default=None)
    arguments = parser.parse_args()
    try:
        show(arguments.text, arguments.model, arguments.device)
    except (CheckpointError, DeviceError, InputError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def show(text: str, model: str, device: str | None) -> None:
    checkpoint = Checkpoint.open(model)
    gpt2 = GPT2.from_pretrained(checkpoint, device=device)
    ids = np.array(gpt2.tokenizer.encode_ordinary(text))
    print(f"{len(ids)} tokens on {gpt2.device}")

    w = GPT2Weights.from_pretrained(checkpoint)
    exact = reference.encoder(ids, w.wte.astype(np.float64), w.wpe.astype(np.float64))
    for layer, x in enumerate(gpt2.hidden_states(ids)[:-1]):  # without the state after ln_f
        if layer > 0:
            exact = reference.block_forward(exact, w.blocks[layer - 1], causal=True)
        error = np.abs(x - exact).max() / np.abs(exact).max()
        position = f"after block {layer - 1}" if layer else "embedding"
        print(f"{position:14}  residual stream within {error:.1e} of float64, relative")

    for token, p in most_likely(gpt2(ids, last=True)):
        print(f"{p:6.1%}  {gpt2.tokenizer.decode([token])!r}")
    print(text + gpt2.generate(text, temperature=0, max_new_tokens=40).text)


if __name__ == "__main__":
    sys.exit(main())

"""Print the table of docs/dtypes.md: what each dtype of the weights costs the model on board.

    python tools/dtype_table.py input.txt
    python tools/dtype_table.py input.txt --bytes 4096 --device cpu

input.txt is tinyshakespeare; its last 10 %, which the model was not trained on, are scored, or the
first --bytes of them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gpt2block import GPT2
from gpt2block.run.model import DTYPES, kv_cache_dtype
from gpt2block.text.scoring import Score


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("--bytes", type=int, help="how many; all that were held out by default")
    parser.add_argument("--stride", type=int, default=64)
    parser.add_argument("--device", help="cuda, cuda:N or cpu; the best there is by default")
    arguments = parser.parse_args()

    data = arguments.text.read_bytes()
    held_out = data[len(data) * 9 // 10 :][: arguments.bytes].decode()
    print("| dtype | kv_cache | weights, MB | nats a byte | perplexity | against float32 |")
    print("| --- | --- | --- | --- | --- | --- |")
    plain: Score | None = None
    for dtype in DTYPES:
        model = GPT2.from_pretrained(device=arguments.device, dtype=dtype)
        found = model.score(held_out, stride=arguments.stride)
        plain = plain or found
        cost = 100 * (found.perplexity / plain.perplexity - 1)
        cells = (
            dtype,
            kv_cache_dtype(dtype),
            f"{model.nbytes / 1e6:.2f}",
            f"{found.nats_per_token:.4f}",
            f"{found.perplexity:.4f}",
            f"{round(cost, 2) + 0:+.2f} %",
        )
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()

"""Print the table of docs/dtypes.md: size and accuracy of a bundled model in each dtype.

    python tools/dtype_table.py input.txt
    python tools/dtype_table.py input.txt --bytes 4096 --device cpu
    python tools/dtype_table.py input.txt --model shakespeare-llama

input.txt is tinyshakespeare. The tool scores its last 10 %, which no bundled model was trained on,
or the first --bytes of them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gpt2block import from_pretrained
from gpt2block.checkpoints import BUNDLED, BUNDLED_NAMES
from gpt2block.run.model import DTYPES, kv_cache_dtype
from gpt2block.text.scoring import Score


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("--model", choices=BUNDLED_NAMES, default=BUNDLED)
    parser.add_argument("--bytes", type=int, help="bytes to score; by default the whole last 10 %%")
    parser.add_argument("--stride", type=int, default=64)
    parser.add_argument("--device", help="cuda, cuda:N or cpu; by default a GPU if there is one")
    arguments = parser.parse_args()

    data = arguments.text.read_bytes()
    held_out = data[len(data) * 9 // 10 :][: arguments.bytes].decode()
    print("| dtype | kv_cache | weights, MB | nats a byte | perplexity | against float32 |")
    print("| --- | --- | --- | --- | --- | --- |")
    baseline: Score | None = None
    for dtype in DTYPES:
        model = from_pretrained(arguments.model, device=arguments.device, dtype=dtype)
        found = model.score(held_out, stride=arguments.stride)
        baseline = baseline or found
        cost = 100 * (found.perplexity / baseline.perplexity - 1)
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

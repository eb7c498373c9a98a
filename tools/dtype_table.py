"""Print the tables of docs/dtypes.md: size and accuracy of a bundled model in each dtype.

    python tools/dtype_table.py input.txt
    python tools/dtype_table.py input.txt --bytes 4096 --device cpu
    python tools/dtype_table.py input.txt --model shakespeare-llama
    python tools/dtype_table.py input.txt --kv

input.txt is tinyshakespeare. The tool scores its last 10 %, which no bundled model was trained on,
or the first --bytes bytes of this part. --kv: vary the dtype of keys and values, with 16-bit
weights.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gpt2block import from_pretrained
from gpt2block.cuda.formats import DTYPES
from gpt2block.cuda.kernels import FP8
from gpt2block.engine.generation.scoring import Score
from gpt2block.files.checkpoints import BUNDLED, BUNDLED_NAMES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("--model", choices=BUNDLED_NAMES, default=BUNDLED)
    parser.add_argument("--bytes", type=int, help="bytes to score; by default the whole last 10 %%")
    parser.add_argument("--stride", type=int, default=64)
    parser.add_argument("--kv", action="store_true", help="dtypes of keys and values")
    parser.add_argument("--device", help="cuda, cuda:N or cpu; by default a GPU if there is one")
    arguments = parser.parse_args()

    data = arguments.text.read_bytes()
    held_out = data[len(data) * 9 // 10 :][: arguments.bytes].decode()
    pairs: list[tuple[str, str | None]] = [(dtype, None) for dtype in DTYPES]
    if arguments.kv:
        pairs = [("bfloat16", kv_dtype) for kv_dtype in (None, *FP8)]
    against = f"against {pairs[0][0]}"
    print(f"| dtype | kv_cache | weights, MB | nats a byte | perplexity | {against} |")
    print("| --- | --- | --- | --- | --- | --- |")
    baseline: Score | None = None
    for dtype, kv_dtype in pairs:
        model = from_pretrained(
            arguments.model, device=arguments.device, dtype=dtype, kv_dtype=kv_dtype
        )
        score = model.score(held_out, stride=arguments.stride)
        baseline = baseline or score
        cost = 100 * (score.perplexity / baseline.perplexity - 1)
        cells = (
            dtype,
            model.kv_dtype,
            f"{model.nbytes / 1e6:.2f}",
            f"{score.nats_per_token:.4f}",
            f"{score.perplexity:.4f}",
            f"{round(cost, 2) + 0:+.2f} %",
        )
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()

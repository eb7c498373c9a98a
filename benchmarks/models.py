"""Compare whole models with PyTorch and `transformers`. Needs a GPU and both packages.

    python -m benchmarks.models gpt2                          # steps, a prompt and many prompts
    python -m benchmarks.models gpt2 --size gpt2-xl --rows 1,8
    python -m benchmarks.models llama --size qwen3-0.6b --dtype bfloat16 --json

Run it in the root of the repository. The works and options are those of `gpt2block bench --decode`
and `--llama`. By default GPT-2's steps have few numbers of rows, as PyTorch takes seconds to
compile each step.
"""

from __future__ import annotations

import argparse

from benchmarks.torch_peers import compare
from gpt2block.bench import model_works

ROWS = {"gpt2": "1,8,64,256", "llama": "1,4,16,64"}


def main() -> int:
    """Return 1 if a result of gpt2block is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("architecture", choices=ROWS)
    for name in ("--size", "--rows", "--dtype", "--kv-dtype"):
        parser.add_argument(name)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    rows = given.rows or ROWS[given.architecture]
    works = model_works(given.architecture, given.dtype, rows, given.size, given.kv_dtype)
    return not compare(works, given.json)


if __name__ == "__main__":
    raise SystemExit(main())

"""Time whole models with random weights: steps of decoding, prompts and continuations. Needs a GPU.

    python -m benchmarks.models gpt2 --only row               # steps of decoding alone
    python -m benchmarks.models gpt2 --size gpt2-xl --rows 1,8 --plot decoding.png
    python -m benchmarks.models llama                         # 7B, also with fewer fusions
    python -m benchmarks.models llama --size qwen3-0.6b --dtype bfloat16 --torch --json
    python -m benchmarks.models llama --gpus 4                # divided among GPUs

Run it in the root of the repository. With --torch, the models also run in PyTorch and
`transformers`; PyTorch takes seconds to compile each number of rows.
"""

from __future__ import annotations

import argparse

from benchmarks.reports import add_options, time_and_show
from benchmarks.token_works import gpt2_works, llama_works
from gpt2block.cuda import first_gpus


def main() -> int:
    """Return 1 if a result of gpt2block is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("architecture", choices=("gpt2", "llama"))
    for name in ("--size", "--rows", "--kv-dtype"):
        parser.add_argument(name)
    parser.add_argument("--gpus", type=int, default=1, help="of a Llama")
    add_options(parser)
    given = parser.parse_args()
    chosen = given.dtype, given.rows, given.size, given.kv_dtype
    if given.architecture == "gpt2":
        works = gpt2_works(*chosen)
    else:
        works = llama_works(*chosen, first_gpus(given.gpus) if given.gpus > 1 else None)
    return time_and_show(works, given)


if __name__ == "__main__":
    raise SystemExit(main())

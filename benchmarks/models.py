"""Time whole models with random weights: steps of decoding, prompts and continuations. Needs a GPU.

    python -m benchmarks.models gpt2                          # sizes as for `gpt2block bench`
    python -m benchmarks.models gpt2 --size gpt2-xl --rows 1,8 --plot decoding.png
    python -m benchmarks.models llama                         # 7B, also with fewer fusions
    python -m benchmarks.models llama --size qwen3-0.6b --dtype bfloat16 --torch --json
    python -m benchmarks.models llama --gpus 4                # divided among GPUs

Run it in the root of the repository. With --torch, the models also run in PyTorch and
`transformers`; PyTorch takes seconds to compile each number of rows.
"""

from __future__ import annotations

import argparse

from benchmarks.labels import check_file
from benchmarks.reports import add_options, released, show
from benchmarks.token_works import gpt2_works, llama_works
from gpt2block.apps import bench
from gpt2block.cuda import first_gpus


def main() -> int:
    """Return 1 if a result of gpt2block is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("architecture", choices=("gpt2", "llama"))
    for name in ("--size", "--rows", "--dtype", "--kv-dtype"):
        parser.add_argument(name)
    parser.add_argument("--gpus", type=int, default=1, help="of a Llama")
    parser.add_argument("--torch", action="store_true")
    add_options(parser)
    given = parser.parse_args()
    if given.plot:
        check_file(given.plot)
    chosen = given.dtype, given.rows, given.size, given.kv_dtype
    if given.architecture == "gpt2":
        works = gpt2_works(*chosen)
    else:
        works = llama_works(*chosen, first_gpus(given.gpus) if given.gpus > 1 else None)
    peers = set[str]()
    if given.torch:
        from benchmarks.torch_peers import compare  # noqa: PLC0415  (loads cuBLAS before CuPy)

        report, peers = compare(works)
    else:
        report = bench.run(released(works))
    return not show(report, peers, given.json, given.plot)


if __name__ == "__main__":
    raise SystemExit(main())

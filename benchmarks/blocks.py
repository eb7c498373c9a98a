"""Compare GPT-2 blocks, matrix products and attention with PyTorch. Needs a GPU and PyTorch.

    python -m benchmarks.blocks                               # all of them; blocks also in float32
    python -m benchmarks.blocks --what gemm --dtype float16   # or block or attention
    python -m benchmarks.blocks --only 8x1024 --json          # works whose name contains a text
    python -m benchmarks.blocks --plot roofline.png

Run it in the root of the repository. The contenders run in turn on the same buffers, and each
result is compared with float64.
"""

from __future__ import annotations

import argparse

from benchmarks.labels import check_file
from benchmarks.products import chosen_works
from benchmarks.reports import add_options, show
from benchmarks.torch_peers import compare


def main() -> int:
    """Return 1 if a result of gpt2block is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--what", default="all")
    parser.add_argument("--dtype")
    parser.add_argument("--only")
    add_options(parser)
    given = parser.parse_args()
    if given.plot:
        check_file(given.plot)
    report, peers = compare(chosen_works(given.what, given.dtype, given.only))
    return not show(report, peers, given.json, given.plot)


if __name__ == "__main__":
    raise SystemExit(main())

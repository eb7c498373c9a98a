"""Time GPT-2 blocks, matrix products and attention on a GPU, and compare results with float64.

    python -m benchmarks.blocks                               # all of them; blocks also in float32
    python -m benchmarks.blocks --what gemm --dtype float16   # or block or attention
    python -m benchmarks.blocks --torch                       # compared with PyTorch
    python -m benchmarks.blocks --only 8x1024 --json          # works whose name contains a text
    python -m benchmarks.blocks --plot roofline.png

Run it in the root of the repository. The contenders run in turn on the same buffers.
"""

from __future__ import annotations

import argparse

from benchmarks.kernel_works import chosen_works
from benchmarks.reports import add_options, time_and_show


def main() -> int:
    """Return 1 if a result of gpt2block is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--what", default="all")
    add_options(parser)
    given = parser.parse_args()
    return time_and_show(chosen_works(given.what, given.dtype), given)


if __name__ == "__main__":
    raise SystemExit(main())

"""SHA-256 of the outputs of a fixed list of calls, to show that a change keeps every bit.

    python -m tools.digests [--emulated] [--only AREA] [--texts FOLDER] > before.txt

prints a line for each call. `blocks`, `models`, `texts` and `operations` run on a GPU, or in small
sizes on the CPU with --emulated, which then compiles for several minutes: with the environment
variable GPT2BLOCK_CPU_CUDA_CACHE set to a folder only the first time. `numpy`, `jobs` and
`command_line` run on the CPU, `smollm2` on the CPU with --emulated. Digests of NumPy can be
compared only on the same machine with the same BLAS.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the number determines the order of sums

"""Run a command on this GPU with the kernels of another card.

    python tools/as_gpu.py CAPABILITY [--shared BYTES] -- COMMAND ...

for example `python tools/as_gpu.py 8.9 -- python -m benchmarks.models gpt2`. The package chooses
kernels and their sizes for the card, within its shared memory. Kernels for a card older than this
GPU are compiled to PTX for the card's capability, which the driver translates; kernels for a newer
card are compiled for this GPU. Clocks, caches, bandwidth, the number of multiprocessors and machine
code are those of this GPU.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # a script finds only modules of its own folder

from gpt2block.cuda.cards import AS_GPU, CARDS, dotted


def main() -> None:
    known = {dotted(capability): card for capability, card in CARDS.items()}
    cards = ", ".join(f"{capability} ({card.name})" for capability, card in known.items())
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("capability", choices=known, help=cards)
    parser.add_argument("--shared", type=int, help="bytes of shared memory of a block")
    parser.add_argument("command", nargs="+", help="the command and its arguments, after --")
    args = parser.parse_args()
    shared = known[args.capability].max_shared if args.shared is None else args.shared
    environment = {**os.environ, AS_GPU: f"{args.capability} {shared}"}
    os.execvpe(args.command[0], args.command, environment)


if __name__ == "__main__":
    main()

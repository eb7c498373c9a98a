"""Compare the variants of an operation with PyTorch's function. Needs a GPU and PyTorch.

    python -m benchmarks.operations softmax
    python -m benchmarks.operations attention --shape B=8,T=512 --dtype bfloat16
    python -m benchmarks.operations layernorm --variant 6 --sweep --json

Run it in the root of the repository. The options are those of `gpt2block kernels`. PyTorch's
function runs eagerly and compiled, in turn with the variants, on the same buffers.
"""

from __future__ import annotations

import argparse
from functools import partial

from benchmarks.torch_functions import FUNCTIONS
from benchmarks.torch_peers import operation_peers
from gpt2block.apps.cli.display import console, print_json
from gpt2block.apps.cli.kernels import measured_report, print_measurements, print_series
from gpt2block.ops import workload
from gpt2block.ops.bench import ceilings
from gpt2block.ops.bench.variants import CEILINGS, measure_variants
from gpt2block.ops.registry import all_sizes, find, parse_sizes


def main() -> int:
    """Return 1 if a result of gpt2block is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("operation", choices=FUNCTIONS)
    for name in ("--variant", "--shape", "--dtype", "--layout"):
        parser.add_argument(name)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    operation = find(given.operation)
    variants = operation.variants if given.variant is None else [operation.variant(given.variant)]
    stored = workload.check_storage(operation, given.dtype, given.layout)
    single = given.shape is not None or given.sweep
    sizes = [parse_sizes(operation, given.shape)] if single else all_sizes(operation)
    peers = partial(operation_peers, given.operation, stored[0])
    ceiling = ceilings.measured(CEILINGS)
    results = [
        measure_variants(operation, variants, at, ceiling, stored, given.sweep, peers)
        for at in sizes
    ]
    measured = [rows for rows, _ in results]
    skipped = [line for _, lines in results for line in lines]
    if given.json:
        print_json(measured_report(measured, skipped, ceiling))
    elif len(results) > 1:
        print_series(console(), operation, measured, skipped, ceiling)
    else:
        print_measurements(console(), *results[0], ceiling)
    return not all(row.right for rows in measured for row in rows)


if __name__ == "__main__":
    raise SystemExit(main())

"""Compare counters of the PTX engine with the ones that Nsight Compute reads on a GPU.

    python -m benchmarks.counters

Run it in the root of the repository. The engine needs NVRTC and g++; the GPU's side needs CuPy and
ncu, and the right to read counters. Without one of them, the program prints the engine's counters
and says that the comparison was not run. Kernels of counters.cu have one access of each kind.
"""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from gpt2block.apps.cli import counters
from gpt2block.emulator.ptx import engine, nvrtc
from gpt2block.emulator.ptx.counters import METRICS, Counts, total
from gpt2block.emulator.ptx.parse import Module
from gpt2block.ops import workload
from gpt2block.ops.registry import find, parse_sizes

CASES = (  # operation, variant, dtype, sizes
    ("matmul_bias", "tiled", "float32", "M=256,K=128,N=256"),
    ("matmul_bias", "registers", "float32", "M=256,K=128,N=256"),
    ("attention", "online", "float32", "B=2,T=128"),
    ("softmax", "rows", "float32", "B=1,NH=1,T=512"),
    ("gemm", "mma", "bfloat16", "M=256,K=128,N=256"),
    ("layernorm", "6", "float32", "B=1,T=256"),
    ("layernorm", "1", "float32", "B=1,T=256"),
)
OWN = Path(__file__).with_suffix(".cu")
GRID, BLOCK, ELEMENTS = (64,), (128,), 1 << 20  # launches of the kernels in counters.cu
UNIFORM = "smsp__sass_average_branch_targets_threads_uniform.pct"
READ = (*(f"{metric}.sum" for metric in METRICS.values()), UNIFORM)
# Where ncu may be if PATH does not name its folder.
FOLDERS = Path("/usr/local/cuda/bin"), *Path("/").glob("opt/nvidia/nsight-compute/*")


def counted() -> Iterator[tuple[str, Counts]]:
    """Yield the names of the kernels and their counters on the engine."""
    for operation, variant, dtype, sizes in CASES:
        found = find(operation)
        at, stored = parse_sizes(found, sizes), workload.check_storage(found, dtype, None)
        for each in counters.count(found, found.variant(variant), at, stored):
            yield each.kernel, each.total
    compiled = nvrtc.compile(OWN.read_text("ascii"), name=OWN.name, arch="sm_90")
    assert isinstance(compiled, nvrtc.Compiled), compiled
    own = Module(compiled.ptx)
    args = [np.zeros(ELEMENTS, np.float32) for _ in range(2)]
    for kernel in (name for name, (entry, _) in own.functions.items() if entry):
        result = engine.launch(own, kernel, GRID, BLOCK, args, checks=engine.Checks(counters=True))
        yield kernel, total(result.counts.values())


def launch(own: Sequence[str]) -> None:
    """Launch the kernels on the GPU, in the order of `counted`; own: those of counters.cu."""
    import cupy  # noqa: PLC0415  (only in the profiled process)

    for operation, variant, dtype, sizes in CASES:
        found = find(operation)
        at, stored = parse_sizes(found, sizes), workload.check_storage(found, dtype, None)
        host, _ = workload.inputs_and_truth(found, at, *stored)
        options = workload.options_for(found, found.variant(variant))
        arrays = tuple(map(workload.uploaded, host))
        found.bind(arrays, **found.workload.attrs, **options).run()
    module = cupy.RawModule(code=OWN.read_text("ascii"), options=("-std=c++17",))
    args = tuple(cupy.asarray(np.zeros(ELEMENTS, np.float32)) for _ in range(2))
    for kernel in own:
        module.get_function(kernel)(GRID, BLOCK, args)
    cupy.cuda.Device().synchronize()


def profiled(kernels: Sequence[str]) -> tuple[list[dict[str, str]], str]:
    """Return the metrics of the kernels as ncu reads them, or why they were not read."""
    ncu = shutil.which("ncu") or shutil.which("ncu", path=":".join(map(str, FOLDERS)))
    if ncu is None:
        return [], "ncu is not installed"
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        options = "--target-processes all --clock-control none --csv --page raw --print-units base"
        command = [
            ncu, *options.split(), "--print-kernel-base", "function", "--log-file", str(log),
            "--metrics", ",".join(READ), "--kernel-name", f"regex:^({'|'.join(kernels)})$",
            sys.executable, "-m", "benchmarks.counters", "--launch", *kernels[len(CASES) :],
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        text = log.read_text() if log.exists() else ""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows = [row for row in csv.DictReader(lines) if row["ID"]]  # without the row of units
    if [row["Kernel Name"] for row in rows] != list(kernels):
        return [], (done.stderr + done.stdout + text)[-3000:]
    return rows, ""


def main() -> None:
    """Print a table, or only the engine's counters and why ncu has not read those of the GPU."""
    if sys.argv[1:2] == ["--launch"]:
        return launch(sys.argv[2:])
    ours = list(counted())
    rows, reason = profiled([kernel for kernel, _ in ours])
    print(f"{nvrtc.find_library()}\n{'kernel':28}{'counter':17}{'engine':>11}{'ncu':>11}")
    for number, (kernel, counts) in enumerate(ours):
        row = rows[number] if rows else {}
        share = 100 * counts.uniform_branches / max(1, counts.branches)
        values = *(getattr(counts, name) for name in METRICS), share
        for name, metric, value in zip((*METRICS, "uniform, %"), READ, values, strict=True):
            theirs = float(row.get(metric, "nan").replace(",", ""))
            if value or theirs > 0:
                off = "" if abs(theirs - value) <= 0.02 * theirs else f"{theirs - value:+,.0f}"
                print(f"{kernel:28}{name:17}{value:11,.0f}{theirs:11,.0f}  {off}")
    if reason:
        raise SystemExit(f"not run: {reason}")


if __name__ == "__main__":
    main()

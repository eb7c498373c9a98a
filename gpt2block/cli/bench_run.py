"""What `gpt2block bench` runs: races with PyTorch and the ceilings, or LeetGPU's block."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

from gpt2block import bench as benches
from gpt2block.bench import block_against_document
from gpt2block.bench.decode_plot import draw_decoding
from gpt2block.bench.roofline import check_file, draw
from gpt2block.cli.bench import print_report
from gpt2block.cli.bench_command import BenchOptions
from gpt2block.cli.display import console, new_table, print_json, print_table, shown, tracked


def run(options: BenchOptions) -> bool:
    """Time what the options choose, and print it; False if a result of gpt2block is wrong."""
    if options.decode or options.llama:
        works_of = benches.llama_works if options.llama else benches.decode_works
        works = works_of(options.dtype, options.rows, options.size, options.kv_dtype)
        return _race(works, options)
    chosen = options.what, options.dtype, options.only, options.peer, options.plot
    if chosen != (None,) * len(chosen):
        works = benches.chosen_works(options.what or "all", options.dtype, options.only)
        return _race(works, options)
    _compare_with_document(options)
    return True


def _race(works: list[benches.Work], options: BenchOptions) -> bool:
    """Time our kernels and their peers, print and plot the results; False if ours are wrong."""
    if options.plot is not None:
        check_file(options.plot)
    report = benches.run(works, options.device, options.peer, _tracked)
    if options.as_json:
        print_json(report.as_dict())
    else:
        print_report(console(), report)
    if options.plot is not None:
        (draw_decoding if options.decode else draw)(report, options.plot)
    return report.right


def _tracked(works: list[benches.Work]) -> Iterable[benches.Work]:
    return tracked(works, "bench")


def _compare_with_document(options: BenchOptions) -> None:
    times = block_against_document(options.device)
    if options.as_json:
        print_json([asdict(row) for row in times])
        return
    columns = ("T", "mask", "GPU ms", "document ms", "times faster")
    table = new_table((), (*columns, "block(x, out) µs", "block(x) µs"))
    for row in times:
        document = (f"{row.document_ms:.3f}", f"{row.speedup:.2f}") if row.document_ms else ("", "")
        host = (f"{row.out_us:.1f}", f"{row.call_us:.1f}")
        table.add_row(str(row.T), row.mask, f"{row.ms:.4f}", *document, *host)
    out = console()
    out.print(shown(times[0].device))
    out.print(
        "GPT-2 small, float32, B = 1. GPU: the graph, calls queued one behind the other, median."
    )
    out.print("Document: its own solve on an H200, device memory allocated in every call.")
    out.print("µs: host time of a warm call from Python, which does not wait for the GPU.")
    print_table(out, table)

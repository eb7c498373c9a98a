"""Plot reports: rates of blocks, products and attention, and of decoding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf, isfinite, log
from pathlib import Path
from typing import Any

from benchmarks.decoding import NAME
from benchmarks.kernel_works import KINDS
from benchmarks.labels import End, check_file, label_ends, save
from benchmarks.run import BenchRow, Report
from gpt2block.errors import InputError
from gpt2block.ops.bench.ceilings import Ceilings

COLORS = {"bfloat16": "#1f5fbf", "float16": "#7a3fb0", "float32": "#c0392b"}
TITLES = {"block": "Blocks, B x T", "gemm": "Products with bias", "attention": "Attention, B x T"}
SIZE, LABEL_SIZE = 9.0, 9.5
LINE = 0.28  # height in inches of one benchmark's line in the plot

Points = list[tuple[int, float]]  # (number of rows, tokens/s) of each point


def measured_on(report: Report) -> str:
    """Return the GPU, its driver and the version of CuPy, for the title of a plot."""
    return report.versions.get("GPU", "GPU")


def _label_2_and_5(axis: Any, form: str) -> None:
    """Label the ticks 1, 2 and 5 of each decade of a logarithmic axis."""
    axis.set_major_formatter("{x:" + form + "}")
    axis.set_minor_formatter(lambda x, _: format(x, form) if f"{x:e}"[0] in "25" else "")


def fastest(rows: Sequence[BenchRow], kind: str) -> list[BenchRow]:
    """Return the fastest correct row of each benchmark of `kind`, in the rows' order."""
    found: dict[tuple[str, str], BenchRow] = {}
    for row in rows:
        if row.what == kind and row.right:
            key = row.work, row.dtype
            found[key] = min(found.get(key, row), row, key=lambda each: each.us)
    return list(found.values())


def draw(report: Report, file: Path) -> None:
    """Plot blocks, products and attention in a panel each. Raises InputError without results.

    Each benchmark is a line of its panel: the name at the left; marks for gpt2block's rate and the
    ceiling; the rate at the right.
    """
    check_file(file)
    from matplotlib.figure import Figure  # noqa: PLC0415

    panels = {kind: found for kind in KINDS if (found := fastest(report.rows, kind))}
    if not panels:
        raise InputError(f"--plot {file}: there is no right result to draw")
    lines = [len(found) + 3 for found in panels.values()]
    figure = Figure(figsize=(8, 1.0 + LINE * sum(lines)), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=lines)[:, 0]
    for ax, (kind, found) in zip(axes, panels.items(), strict=True):
        _panel(ax, found, report.ceilings)
        ax.set_title(TITLES[kind], fontsize=LABEL_SIZE + 1.5, loc="left")
    _legend(figure, dict.fromkeys(row.dtype for found in panels.values() for row in found))
    figure.suptitle(measured_on(report), fontsize=LABEL_SIZE + 1)
    save(figure, file)


def ceiling(row: BenchRow, best: Ceilings) -> float:
    """Return cuBLAS's TFLOP/s in this dtype or, if lower, those that memory bandwidth allows."""
    memory = 1e-3 * best.copy_gb_s * row.intensity
    matmul = best.tflop_s.get(row.dtype, inf)
    return min(memory, matmul if isfinite(matmul) else inf)


def _panel(ax: Any, shown: list[BenchRow], best: Ceilings) -> None:
    ax.set_xscale("log")
    for at, row in enumerate(shown):
        color = COLORS[row.dtype]
        ax.plot(row.tflop_s, at, "o", markersize=6, color=color, zorder=4)
        ax.plot(ceiling(row, best), at, "|", markersize=14, markeredgewidth=1.5, color="black")
        ax.annotate(f"{row.tflop_s:.3g}", (1.02, at), xycoords=("axes fraction", "data"),
                    va="center", fontsize=LABEL_SIZE, color=color)  # fmt: skip
    several = len({row.dtype for row in shown}) > 1
    names = [f"{row.work}, {row.dtype}" if several else row.work for row in shown]
    ax.set_yticks(range(len(shown)), names, fontsize=LABEL_SIZE)
    ax.set_ylim(len(shown) - 0.4, -0.6)
    _label_2_and_5(ax.xaxis, "g")
    ax.tick_params(axis="x", which="both", labelsize=LABEL_SIZE)
    ax.grid(alpha=0.25, which="both", axis="x", linewidth=0.5)
    ax.set_xlabel(f"TFLOP/s, {shown[0].dtype}" if not several else "TFLOP/s", fontsize=LABEL_SIZE)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.tick_params(axis="y", length=0)


def _legend(figure: Any, dtypes: Iterable[str]) -> None:
    from matplotlib.lines import Line2D  # noqa: PLC0415

    handles = [
        Line2D([], [], marker="o", linestyle="", color=COLORS[dtype], label=f"{NAME}, {dtype}")
        for dtype in dtypes
    ]
    handles.append(Line2D([], [], color="black", marker="|", linestyle="", markersize=12,
                          markeredgewidth=1.5, label="cuBLAS, or a copy"))  # fmt: skip
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=9,
                  frameon=False, handletextpad=0.2, columnspacing=1.2)  # fmt: skip


def draw_decoding(report: Report, file: Path) -> None:
    """Plot tokens/s of decoding over the number of sequences, and the limit by the bandwidth.

    Raises InputError if there is nothing to draw.
    """
    check_file(file)
    from matplotlib.figure import Figure  # noqa: PLC0415

    rows = [row for row in report.rows if row.what == "decode" and row.right]
    ours, limit = points(rows), floor(rows)
    if not ours:
        raise InputError(f"--plot {file}: there is no right result to draw")
    figure = Figure(figsize=(8, 5), layout="constrained")
    ax = figure.subplots()
    lines = [("floor", limit, "black"), (NAME, ours, COLORS["bfloat16"])]
    ax.plot(*zip(*limit, strict=True), color="black", linewidth=1.3)
    ax.plot(*zip(*ours, strict=True), "o-", color=COLORS["bfloat16"], markersize=5)
    _axes(ax, [n for n, _ in limit], [rate for _, rate in limit + ours])
    low, high = ax.get_ylim()
    ends = [
        End(f"{name}, {at[-1][1]:,.0f}", at[-1], log(at[-1][1] / low) / log(high / low), color)
        for name, at, color in lines
    ]
    label_ends(ax, ends, SIZE)
    first = rows[0]
    at = f"{first.sizes['position']} tokens in the cache"
    model = f"GPT-2 of {first.sizes['n_layer']} layers of {first.sizes['n_embd']}"
    ax.set_title(f"{model}, {first.dtype}, {at}\n{measured_on(report)}", fontsize=SIZE + 1)
    save(figure, file)


def points(rows: Sequence[BenchRow]) -> Points:
    """Return gpt2block's points (number of rows, tokens/s), sorted by number of rows."""
    pairs = [(r.sizes["rows"], r.tokens_s) for r in rows if r.contender == NAME]
    return sorted((n, rate) for n, rate in pairs if rate)


def floor(rows: Sequence[BenchRow]) -> Points:
    """Return (number of rows, tokens/s) of decoding steps that move bytes as fast as a copy."""
    return sorted(
        {r.sizes["rows"]: 100 * r.tokens_s / r.percent_copy for r in rows if r.tokens_s}.items()
    )


def _axes(ax: Any, counts: Sequence[int], rates: Sequence[float]) -> None:
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xlim(min(counts) / 1.5, max(counts) * 2)
    ax.set_ylim(min(rates) / 1.6, max(rates) * 1.3)
    ax.set_xticks(counts, [str(n) for n in counts], fontsize=SIZE)
    ax.set_xticks([], minor=True)
    _label_2_and_5(ax.yaxis, ",.0f")
    ax.tick_params(which="both", labelsize=SIZE)
    ax.set_xlabel("rows decoded together", fontsize=SIZE)
    ax.set_ylabel("tokens/s", fontsize=SIZE)
    ax.grid(alpha=0.25, which="both", linewidth=0.5)

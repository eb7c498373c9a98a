"""Plot reports of `gpt2block bench`. `gpt2block kernels` uses some of these functions too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf, isfinite, log
from pathlib import Path
from typing import Any, NamedTuple

from gpt2block.bench.ceilings import TF32, Ceilings
from gpt2block.bench.report import BenchRow, Report
from gpt2block.bench.token_works import NAME
from gpt2block.bench.works import KINDS
from gpt2block.errors import InputError, require
from gpt2block.files import replacing

COLORS = {"bfloat16": "#1f5fbf", "float16": "#7a3fb0", "float32": "#c0392b", "tf32": "#e08e0b"}
PEER_COLORS = ("#c0392b", "#e08e0b", "#7a3fb0")
TITLES = {"block": "Blocks, B x T", "gemm": "Products with bias", "attention": "Attention, B x T"}
SIZE, LABEL_SIZE = 9.0, 9.5
LINE = 0.28  # height in inches of one benchmark's line in the plot
LEADER = {
    "arrowstyle": "-",
    "linewidth": 0.4,
    "alpha": 0.6,
    "relpos": (0.0, 0.5),
    "shrinkA": 0,
    "shrinkB": 3,
}
APART = 0.06  # minimum distance of labels, as a fraction of the plot's height

Points = list[tuple[int, float]]  # (number of rows, tokens/s) of each point


class End(NamedTuple):
    """The label of a line: text, the line's last point, and the point's height in the plot, 0…1."""

    text: str
    point: tuple[float, float]
    height: float
    color: str


def label_ends(ax: Any, ends: Sequence[End], size: float) -> None:
    """Label every line to the right of its last point."""
    for end, place in zip(ends, spread([end.height for end in ends]), strict=True):
        ax.annotate(end.text, end.point, (1.03, place), textcoords="axes fraction", fontsize=size,
                    color=end.color, va="center",
                    arrowprops=LEADER | {"color": end.color})  # fmt: skip


def spread(heights: Sequence[float], apart: float = APART) -> list[float]:
    """Return the heights, moved as little as possible in 0…1 so that all differ by `apart` or more.

    The order of the heights is kept. If there are too many for this distance, they are spread
    evenly.
    """
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    apart = min(apart, 1 / max(1, len(heights) - 1))
    groups: list[tuple[list[int], float]] = []  # (indices into `heights`, lowest height)
    for i in order:
        members, low = [i], min(max(heights[i], 0.0), 1.0)
        while groups and groups[-1][1] + len(groups[-1][0]) * apart > low:
            members = groups.pop()[0] + members
            middle = sum(heights[m] - k * apart for k, m in enumerate(members)) / len(members)
            low = min(max(middle, 0.0), 1.0 - (len(members) - 1) * apart)
        groups.append((members, low))
    placed = [0.0] * len(heights)
    for members, low in groups:
        for k, member in enumerate(members):
            placed[member] = low + k * apart
    return placed


def check_file(file: Path) -> None:
    """Raise InputError if no plot can be written to the file; call this before measurements."""
    require("--plot", "plot", "matplotlib")
    if not file.parent.is_dir():
        raise InputError(f"--plot {file}: there is no directory {file.parent}")
    if file.is_dir():
        raise InputError(f"--plot {file}: expected a file, got a directory")


def save(figure: Any, file: Path) -> None:
    """Write a figure in the format of the file's suffix, by default PNG. Raises InputError."""
    try:
        with replacing(file) as stream:
            figure.savefig(stream, dpi=130, format=file.suffix[1:] or "png")
    except (OSError, ValueError) as error:
        raise InputError(f"--plot {file}: {error}") from error


def measured_on(report: Report) -> str:
    """Return the GPU's name and the versions of CuPy and PyTorch, for the title of a plot."""
    versions = report.versions
    known = [f"{name} {versions[name]}" for name in ("CuPy", "torch") if name in versions]
    return ", ".join([versions.get("GPU", "GPU"), *known])


def _label_2_and_5(axis: Any, form: str) -> None:
    """Label the ticks 1, 2 and 5 of each decade of a logarithmic axis."""
    axis.set_major_formatter("{x:" + form + "}")
    axis.set_minor_formatter(lambda x, _: format(x, form) if f"{x:e}"[0] in "25" else "")


@dataclass(frozen=True)
class Mark:
    """One benchmark in the plot: TFLOP/s of the fastest correct run of gpt2block and of PyTorch."""

    work: str
    dtype: str
    intensity: float
    ours: float | None
    peer: float | None  # TFLOP/s of PyTorch in the arithmetic of `dtype`
    tf32: float | None  # TFLOP/s of PyTorch if it rounds float32 to TF32

    @property
    def rate(self) -> float:
        """TFLOP/s in the label: gpt2block's rate or, if there is none, PyTorch's rate."""
        return self.ours or self.peer or self.tf32 or 0.0

    @property
    def label(self) -> str:
        parts = [f"{self.rate:.3g}{'' if self.ours else ' (peer alone)'}"]
        for name, rate in (("peer", self.peer), ("TF32", self.tf32)):
            if self.ours and rate:
                parts.append(f"{self.ours / rate:.2f} x {name}")
        return ", ".join(parts)


def marks(rows: Sequence[BenchRow], kind: str) -> list[Mark]:
    """Return a Mark per benchmark of `kind` that has a correct result, in the order of `rows`."""
    result = []
    for work, dtype in dict.fromkeys((row.work, row.dtype) for row in rows if row.what == kind):
        of_it = [row for row in rows if (row.what, row.work, row.dtype) == (kind, work, dtype)]
        ours = _fastest(row for row in of_it if not row.peer)
        peer = _fastest(row for row in of_it if row.peer and row.arithmetic == dtype)
        tf32 = _fastest(row for row in of_it if row.peer and row.arithmetic == TF32)
        if ours or peer or tf32:
            result.append(Mark(work, dtype, of_it[0].intensity, ours, peer, tf32))
    return result


def _fastest(rows: Iterable[BenchRow]) -> float | None:
    return max((row.tflop_s for row in rows if row.right), default=None)


def draw(report: Report, file: Path) -> None:
    """Plot blocks, products and attention in a panel each. Raises InputError without results.

    Each benchmark is a line of its panel: the name at the left; marks for gpt2block's rate, the
    fastest peer's rate and the ceiling; the figures at the right.
    """
    check_file(file)
    from matplotlib.figure import Figure  # noqa: PLC0415

    panels = {kind: found for kind in KINDS if (found := marks(report.rows, kind))}
    if not panels:
        raise InputError(f"--plot {file}: there is no right result to draw")
    lines = [len(found) + 3 for found in panels.values()]
    figure = Figure(figsize=(8, 1.0 + LINE * sum(lines)), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=lines)[:, 0]
    for ax, (kind, found) in zip(axes, panels.items(), strict=True):
        _panel(ax, found, report.ceilings)
        ax.set_title(TITLES[kind], fontsize=LABEL_SIZE + 1.5, loc="left")
    _legend(figure, [mark for found in panels.values() for mark in found])
    figure.suptitle(measured_on(report), fontsize=LABEL_SIZE + 1)
    save(figure, file)


def ceiling(mark: Mark, best: Ceilings) -> float:
    """Return cuBLAS's TFLOP/s in this dtype or, if lower, those that memory bandwidth allows."""
    memory = 1e-3 * best.copy_gb_s * mark.intensity
    matmul = best.tflop_s.get(mark.dtype, inf)
    return min(memory, matmul if isfinite(matmul) else inf)


def _panel(ax: Any, shown: list[Mark], best: Ceilings) -> None:
    ax.set_xscale("log")
    for at, mark in enumerate(shown):
        color = COLORS[mark.dtype]
        own = [rate for rate in (mark.ours, mark.peer, mark.tf32) if rate]
        ax.plot([min(own), max(own)], [at, at], color=color, linewidth=1.5, alpha=0.4)
        for rate, edge in ((mark.peer, color), (mark.tf32, COLORS[TF32])):
            if rate:
                ax.plot(rate, at, "o", markersize=7, markerfacecolor="white",
                        markeredgecolor=edge, zorder=3)  # fmt: skip
        if mark.ours:
            ax.plot(mark.ours, at, "o", markersize=6, color=color, zorder=4)
        ax.plot(ceiling(mark, best), at, "|", markersize=14, markeredgewidth=1.5, color="black")
        ax.annotate(mark.label, (1.02, at), xycoords=("axes fraction", "data"), va="center",
                    fontsize=LABEL_SIZE, color=color)  # fmt: skip
    several = len({mark.dtype for mark in shown}) > 1
    names = [f"{mark.work}, {mark.dtype}" if several else mark.work for mark in shown]
    ax.set_yticks(range(len(shown)), names, fontsize=LABEL_SIZE)
    ax.set_ylim(len(shown) - 0.4, -0.6)
    _label_2_and_5(ax.xaxis, "g")
    ax.tick_params(axis="x", which="both", labelsize=LABEL_SIZE)
    ax.grid(alpha=0.25, which="both", axis="x", linewidth=0.5)
    ax.set_xlabel(f"TFLOP/s, {shown[0].dtype}" if not several else "TFLOP/s", fontsize=LABEL_SIZE)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.tick_params(axis="y", length=0)


def _legend(figure: Any, every: Sequence[Mark]) -> None:
    from matplotlib.lines import Line2D  # noqa: PLC0415

    def dot(color: str, face: str, label: str) -> Any:
        return Line2D([], [], marker="o", linestyle="", color=color, markerfacecolor=face,
                      label=label)  # fmt: skip

    dtypes = dict.fromkeys(mark.dtype for mark in every)
    handles = [dot(COLORS[dtype], COLORS[dtype], f"gpt2block, {dtype}") for dtype in dtypes]
    if any(mark.peer for mark in every):
        handles.append(dot("black", "white", "fastest of PyTorch"))
    if any(mark.tf32 for mark in every):
        handles.append(dot(COLORS[TF32], "white", "in TF32"))
    handles.append(Line2D([], [], color="black", marker="|", linestyle="", markersize=12,
                          markeredgewidth=1.5, label="cuBLAS, or a copy"))  # fmt: skip
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=9,
                  frameon=False, handletextpad=0.2, columnspacing=1.2)  # fmt: skip


def draw_decoding(report: Report, file: Path) -> None:
    """Plot tokens/s of decoding over the number of sequences, with PyTorch and the bandwidth limit.

    Raises InputError if there is nothing to draw.
    """
    check_file(file)
    from matplotlib.figure import Figure  # noqa: PLC0415

    rows = [row for row in report.rows if row.what == "decode" and row.right]
    ours = points(rows, NAME)
    if not ours:
        raise InputError(f"--plot {file}: there is no right result to draw")
    figure = Figure(figsize=(8, 5), layout="constrained")
    ax = figure.subplots()
    limit = floor(rows)
    ax.plot(*zip(*limit, strict=True), color="black", linewidth=1.3)
    ax.plot(*zip(*ours, strict=True), "o-", color=COLORS["bfloat16"], markersize=5)
    lines = [("floor", limit, "black"), (NAME, ours, COLORS["bfloat16"])]
    peers = dict.fromkeys(row.contender for row in rows if row.peer)
    for name, color in zip(peers, PEER_COLORS, strict=False):
        theirs = points(rows, name)
        ax.plot(*zip(*theirs, strict=True), "o:", color=color, markersize=7, linewidth=0.9,
                markerfacecolor="white")  # fmt: skip
        _ratios(ax, theirs, dict(ours), color)
        lines.append((name, theirs, color))
    _axes(ax, [n for n, _ in limit], [rate for _, found, _ in lines for _, rate in found])
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


def points(rows: Sequence[BenchRow], contender: str) -> Points:
    """Return one implementation's points (number of rows, tokens/s), sorted by number of rows."""
    pairs = [(r.sizes["rows"], r.tokens_s) for r in rows if r.contender == contender]
    return sorted((n, rate) for n, rate in pairs if rate)


def floor(rows: Sequence[BenchRow]) -> Points:
    """Return (number of rows, tokens/s) of decoding steps that move bytes as fast as a copy."""
    return sorted(
        {r.sizes["rows"]: 100 * r.tokens_s / r.percent_copy for r in rows if r.tokens_s}.items()
    )


def _ratios(ax: Any, theirs: Points, ours: dict[int, float], color: str) -> None:
    """Label each PyTorch point with gpt2block's rate / PyTorch's, away from gpt2block's line."""
    for n, rate in theirs:
        if n in ours:
            below = ours[n] > rate
            ax.annotate(f"{ours[n] / rate:.2f}x", (n, rate), (5, -5) if below else (-5, 5),
                        textcoords="offset points", ha="left" if below else "right", fontsize=SIZE,
                        color=color, va="top" if below else "bottom")  # fmt: skip


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
    ax.set_ylabel(f"tokens/s; at a mark: {NAME} as a multiple of it", fontsize=SIZE)
    ax.grid(alpha=0.25, which="both", linewidth=0.5)

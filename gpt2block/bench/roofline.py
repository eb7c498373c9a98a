"""The roofline plot of a report: TFLOP/s by operations per byte, with the ceilings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from math import isfinite, log
from pathlib import Path
from typing import Any

from gpt2block.bench.ceilings import TF32
from gpt2block.bench.report import Report, Row
from gpt2block.bench.works import KINDS
from gpt2block.errors import InputError

COLORS = {"bfloat16": "#1f5fbf", "float16": "#7a3fb0", "float32": "#c0392b", "tf32": "#e08e0b"}
TITLES = {"block": "blocks (B x T, mask)", "gemm": "products + bias", "attention": "attention"}
CEILINGS = {"bfloat16": "bf16", "float16": "fp16", "tf32": "TF32", "float32": "fp32"}
LABEL_SIZE = 7.0
LEADER = {
    "arrowstyle": "-",
    "linewidth": 0.4,
    "alpha": 0.6,
    "relpos": (0.0, 0.5),
    "shrinkA": 0,
    "shrinkB": 3,
}
APART = 0.029  # of a panel's height between labels, at least


@dataclass(frozen=True)
class Mark:
    """A work in the plot: TFLOP/s of the fastest right result of gpt2block and of a peer."""

    work: str
    dtype: str
    intensity: float
    ours: float | None
    peer: float | None  # in the same arithmetic
    tf32: float | None  # of a peer that rounds float32 to TF32

    @property
    def rate(self) -> float:
        """The rate that the label points to."""
        return self.ours or self.peer or self.tf32 or 0.0

    @property
    def label(self) -> str:
        parts = [f"{self.work}: {self.rate:.3g}{'' if self.ours else ' (peer alone)'}"]
        for name, rate in (("peer", self.peer), ("TF32", self.tf32)):
            if self.ours and rate:
                parts.append(f"{self.ours / rate:.2f} x {name}")
        return ", ".join(parts)


def marks(rows: Sequence[Row], kind: str) -> list[Mark]:
    """The marks in the order of the rows; a work without a right result has none."""
    found = []
    for work, dtype in dict.fromkeys((row.work, row.dtype) for row in rows if row.what == kind):
        of_it = [row for row in rows if (row.what, row.work, row.dtype) == (kind, work, dtype)]
        ours = _fastest(row for row in of_it if not row.peer)
        peer = _fastest(row for row in of_it if row.peer and row.arithmetic == dtype)
        tf32 = _fastest(row for row in of_it if row.peer and row.arithmetic == TF32)
        if ours or peer or tf32:
            found.append(Mark(work, dtype, of_it[0].intensity, ours, peer, tf32))
    return found


def _fastest(rows: Iterable[Row]) -> float | None:
    return max((row.tflop_s for row in rows if row.right), default=None)


def spread(heights: Sequence[float], apart: float = APART) -> list[float]:
    """Heights in 0…1, moved as little as possible to be at least `apart`, in the same order.

    Too many heights for that are spread evenly.
    """
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    apart = min(apart, 1 / max(1, len(heights) - 1))
    groups: list[tuple[list[int], float]] = []  # members, and the lowest one's place
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
    """InputError if no plot can be written there; to be called before anything is timed."""
    if find_spec("matplotlib") is None:
        raise InputError("--plot needs matplotlib: pip install matplotlib")
    if not file.parent.is_dir():
        raise InputError(f"--plot {file}: there is no directory {file.parent}")
    if file.is_dir():
        raise InputError(f"--plot {file}: expected a file, got a directory")


def draw(report: Report, file: Path) -> None:
    """Plot a panel for each kind of work to a PNG file; InputError if there is nothing to draw."""
    check_file(file)
    from matplotlib.figure import Figure  # noqa: PLC0415

    panels = {kind: found for kind in KINDS if (found := marks(report.rows, kind))}
    if not panels:
        raise InputError(f"--plot {file}: there is no right result to draw")
    figure = Figure(figsize=(0.4 + 5.6 * len(panels), 7.0), layout="constrained")
    every = [mark for found in panels.values() for mark in found]
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for ax, (kind, found) in zip(axes, panels.items(), strict=True):
        _panel(ax, found, report)
        ax.set_title(TITLES[kind], fontsize=10)
    axes[0].set_ylabel("TFLOP/s")
    _legend(figure, every, report)
    save(figure, file)


def save(figure: Any, file: Path) -> None:
    """Write a PNG file; InputError if that fails."""
    try:
        figure.savefig(file, dpi=130)
    except (OSError, ValueError) as error:
        raise InputError(f"--plot {file}: {error}") from error


def _panel(ax: Any, found: list[Mark], report: Report) -> None:
    """Draw the ceilings, the marks, and the labels to the right of them."""
    ceilings = _shown(found, report)
    rates = [rate for mark in found for rate in (mark.ours, mark.peer, mark.tf32) if rate]
    span = [end([mark.intensity for mark in found]) for end in (min, max)]
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlim(span[0] / 1.7, span[1] * 1.7)
    ax.set_ylim(min(rates) / 1.4, max([*rates, *ceilings.values()]) * 1.35)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(_minor)
    ax.tick_params(which="both", labelsize=LABEL_SIZE)
    ax.set_xlabel("FLOP for each byte that has to move")
    ax.grid(alpha=0.25, which="both", linewidth=0.5)
    _ceilings(ax, ceilings, report.ceilings.copy_gb_s)
    for mark in found:
        color = COLORS[mark.dtype]
        own = [rate for rate in (mark.ours, mark.peer, mark.tf32) if rate]
        ends = [min(own), max(own)]
        ax.plot([mark.intensity] * 2, ends, color=color, linewidth=0.8, alpha=0.6)
        for rate, edge in ((mark.peer, color), (mark.tf32, COLORS[TF32])):
            if rate:
                ax.plot(mark.intensity, rate, "o", markersize=6, markerfacecolor="white",
                        markeredgecolor=edge, zorder=3)  # fmt: skip
        if mark.ours:
            ax.plot(mark.intensity, mark.ours, "o", markersize=4.5, color=color, zorder=4)
    _labels(ax, found)


def _minor(value: float, _place: int) -> str:
    """Label 2 and 5 of each decade."""
    return f"{value:g}" if f"{value:e}"[0] in "25" else ""


def _shown(found: list[Mark], report: Report) -> dict[str, float]:
    """The cuBLAS ceilings of the arithmetics of these works."""
    dtypes = {mark.dtype for mark in found}
    shown = dtypes | ({TF32} if "float32" in dtypes else set())
    rates = report.ceilings.tflop_s
    return {name: rates[name] for name in CEILINGS if name in shown and isfinite(rates[name])}


def _ceilings(ax: Any, rates: Mapping[str, float], copy_gb_s: float) -> None:
    """Draw the slope of the copy up to the highest of the horizontal cuBLAS lines."""
    left, right = ax.get_xlim()
    slope = 1e-3 * copy_gb_s  # TFLOP/s of one operation for each byte
    for name, rate in rates.items():
        ax.plot([max(left, rate / slope), right], [rate, rate], color=COLORS[name], linewidth=1.3)
        ax.annotate(f"cuBLAS {CEILINGS[name]}, {rate:.0f}", (right, rate), (-3, 3),
                    textcoords="offset points", fontsize=LABEL_SIZE, color=COLORS[name],
                    ha="right")  # fmt: skip
    end = min(right, max(rates.values(), default=right * slope) / slope)
    if left < end:
        ax.plot([left, end], [left * slope, end * slope], color="black", linewidth=1.3)


def _labels(ax: Any, found: list[Mark]) -> None:
    low, high = ax.get_ylim()
    heights = [log(mark.rate / low) / log(high / low) for mark in found]
    for mark, place in zip(found, spread(heights), strict=True):
        ax.annotate(
            mark.label,
            (mark.intensity, mark.rate),
            (1.05, place),
            textcoords="axes fraction",
            fontsize=LABEL_SIZE,
            color=COLORS[mark.dtype],
            va="center",
            arrowprops=LEADER | {"color": COLORS[mark.dtype]},
        )


def _legend(figure: Any, every: Sequence[Mark], report: Report) -> None:
    from matplotlib.lines import Line2D  # noqa: PLC0415

    def dot(color: str, face: str, label: str) -> Any:
        return Line2D([], [], marker="o", linestyle="", color=color, markerfacecolor=face,
                      label=label)  # fmt: skip

    handles = [
        dot(COLORS[dtype], COLORS[dtype], f"ours, {dtype}")
        for dtype in dict.fromkeys(mark.dtype for mark in every)
    ]
    if any(mark.peer for mark in every):
        handles.append(dot("black", "white", "the fastest of PyTorch"))
    if any(mark.tf32 for mark in every):
        handles.append(dot(COLORS[TF32], "white", "... with products in TF32"))
    copy = f"copy, {report.ceilings.copy_gb_s / 1e3:.2f} TB/s"
    handles.append(Line2D([], [], color="black", label=copy))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8)
    figure.suptitle(f"{measured_on(report)}; TFLOP/s", fontsize=10)


def measured_on(report: Report) -> str:
    """The GPU and the libraries, for the title of a plot."""
    versions = report.versions
    known = [f"{name} {versions[name]}" for name in ("CuPy", "torch") if name in versions]
    return ", ".join([versions.get("GPU", "GPU"), *known])

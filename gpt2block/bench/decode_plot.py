"""The plot of a report of decoding: tokens/s by rows, with the floor and the peers."""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from pathlib import Path
from typing import Any

from gpt2block.bench.report import Report, Row
from gpt2block.bench.roofline import APART, LEADER, check_file, measured_on, save, spread
from gpt2block.bench.token_contenders import NAME
from gpt2block.errors import InputError

COLORS = {NAME: "#1f5fbf"}
PEER_COLORS = ("#c0392b", "#e08e0b", "#7a3fb0")
SIZE = 9.0

Points = list[tuple[int, float]]  # rows and tokens/s


def draw_decoding(report: Report, file: Path) -> None:
    """Plot the steps of decoding to a PNG file; InputError if there is nothing to draw."""
    check_file(file)
    from matplotlib.figure import Figure  # noqa: PLC0415

    rows = [row for row in report.rows if row.what == "decode" and row.right]
    lines = {name: points(rows, name) for name in dict.fromkeys(row.contender for row in rows)}
    ours = lines.get(NAME)
    if not ours:
        raise InputError(f"--plot {file}: there is no right result to draw")
    peers = [name for name in lines if any(r.peer for r in rows if r.contender == name)]
    figure = Figure(figsize=(8, 5), layout="constrained")
    ax = figure.subplots()
    ends: dict[str, tuple[Points, str]] = {}
    limit = floor(rows)
    ax.plot(*zip(*limit, strict=True), color="black", linewidth=1.3)
    ends["floor"] = limit, "black"
    ax.plot(*zip(*ours, strict=True), "o-", color=COLORS[NAME], markersize=5)
    ends[NAME] = ours, COLORS[NAME]
    for name, color in zip(peers, PEER_COLORS, strict=False):
        ax.plot(*zip(*lines[name], strict=True), "o:", color=color, markersize=7, linewidth=0.9,
                markerfacecolor="white")  # fmt: skip
        ends[name] = lines[name], color
        _ratios(ax, lines[name], dict(ours), color)
    rates = [rate for found, _ in ends.values() for _, rate in found]
    _axes(ax, [n for n, _ in limit], rates)
    _ends(ax, ends)
    first = rows[0]
    at = f"{first.sizes['position']} tokens in the cache"
    model = f"GPT-2 of {first.sizes['n_layer']} layers of {first.sizes['n_embd']}"
    ax.set_title(f"{model}, {first.dtype}, {at}\n{measured_on(report)}", fontsize=SIZE + 1)
    save(figure, file)


def points(rows: Sequence[Row], contender: str) -> Points:
    """Rows and tokens/s of a contender, by the number of rows."""
    found = [(r.sizes["rows"], r.tokens_s) for r in rows if r.contender == contender]
    return sorted((n, rate) for n, rate in found if rate)


def floor(rows: Sequence[Row]) -> Points:
    """Rows and the tokens/s of a step that takes as long as reading weights, keys and values."""
    return sorted(
        {r.sizes["rows"]: 100 * r.tokens_s / r.percent_copy for r in rows if r.tokens_s}.items()
    )


def _ratios(ax: Any, theirs: Points, ours: dict[int, float], color: str) -> None:
    """Label points of a peer with our rate as a multiple, on the side away from our line."""
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
    ax.yaxis.set_major_formatter("{x:,.0f}")
    ax.yaxis.set_minor_formatter(_minor)
    ax.tick_params(which="both", labelsize=SIZE)
    ax.set_xlabel("rows decoded together", fontsize=SIZE)
    ax.set_ylabel(f"tokens/s; at a mark: {NAME} as a multiple of it", fontsize=SIZE)
    ax.grid(alpha=0.25, which="both", linewidth=0.5)


def _minor(value: float, _place: int) -> str:
    """Label 2 and 5 of each decade."""
    return f"{value:,.0f}" if f"{value:e}"[0] in "25" else ""


def _ends(ax: Any, ends: dict[str, tuple[Points, str]]) -> None:
    """Label every line to the right of its last point."""
    low, high = ax.get_ylim()
    heights = [log(found[-1][1] / low) / log(high / low) for found, _ in ends.values()]
    places = spread(heights, APART)
    for (name, (found, color)), place in zip(ends.items(), places, strict=True):
        ax.annotate(f"{name}, {found[-1][1]:,.0f}", found[-1], (1.03, place),
                    textcoords="axes fraction", fontsize=SIZE, color=color, va="center",
                    arrowprops=LEADER | {"color": color})  # fmt: skip

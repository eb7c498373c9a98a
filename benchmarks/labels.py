"""Labels at the ends of the lines of a plot, and the file of a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gpt2block.errors import InputError, require
from gpt2block.files.writing import replacing

LEADER = {
    "arrowstyle": "-",
    "linewidth": 0.4,
    "alpha": 0.6,
    "relpos": (0.0, 0.5),
    "shrinkA": 0,
    "shrinkB": 3,
}
APART = 0.06  # minimum distance of labels, as a fraction of the plot's height


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

"""The charts in docs/, which `tools/pages.py` draws from the tables of the pages.

The figures are stored only in these tables.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, floor, log10
from pathlib import Path

from svg import BLUE, FAINT, GREEN, GREY, INK, ORANGE, Picture

DOCS = Path(__file__).parent.parent / "docs"
FOLDER = DOCS / "images"
H200 = "NVIDIA H200"
LEFT, RIGHT, STEP = 180, 720, 34  # ends of the bars, distance between bars
MIN_MS = 0.01  # ms: shorter times are drawn with this length
PAIR = BLUE, "#5f6c7b"  # colors of gpt2block and of a peer, whose bar follows without a gap
Table = list[dict[str, str]]


@dataclass(frozen=True)
class Bar:
    name: str
    value: float
    label: str
    color: str = BLUE


def table(heading: str, nth: int = 0, page: str = "performance.md") -> Table:
    """Return the table of a page below a heading: a dict, column → text, for each row."""
    text = (DOCS / page).read_text(encoding="utf-8")
    section = re.split(r"^#+ ", text.split(f"# {heading}\n", 1)[1], flags=re.MULTILINE)[0]
    blocks = re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)
    lines = [line.strip()[1:-1].split("|") for line in blocks[nth].splitlines()]
    header, _, *rows = [[cell.strip() for cell in line] for line in lines]
    return [dict(zip(header, row, strict=True)) for row in rows]


def transposed(rows: Table) -> Table:
    """Return a table with rows and columns exchanged. The first column has the names."""
    first, *names = rows[0]
    return [{first: name, **{row[first]: row[name] for row in rows}} for name in names]


def bars(
    title: str, note: str, shown: Sequence[Bar], limit: tuple[float, str] | None = None
) -> Picture:
    """Draw horizontal bars from zero, each with a name on its left and a label on its right."""
    about = "; ".join(f"{bar.name}: {bar.label}" for bar in shown)
    tops = [78.0]
    for bar in shown[1:]:
        tops.append(tops[-1] + (STEP if bar.name else STEP - 9))
    end = tops[-1] + STEP
    p = Picture(title, end + (44 if limit else 24), f"{note}. {about}")
    p.text(24, 58, note, color=GREY)
    most = max([bar.value for bar in shown] + ([limit[0]] if limit else []))
    for bar, y in zip(shown, tops, strict=True):
        width = (RIGHT - LEFT) * bar.value / most
        p.text(LEFT - 12, y + 18, bar.name, at="end")
        p.box(LEFT, y, width, 24, bar.color, bar.color)
        if width > 9 * len(bar.label) + 16:
            p.text(LEFT + width - 8, y + 18, bar.label, at="end", color="white")
        else:
            p.text(LEFT + width + 8, y + 18, bar.label)
    p.line((LEFT, 70), (LEFT, end), INK, 1)
    if limit:
        at = LEFT + (RIGHT - LEFT) * limit[0] / most
        p.line((at, 70), (at, end + 2), ORANGE, 1.5, dashed=True)
        p.text(at, end + 22, limit[1], color=ORANGE, at="end" if at > 600 else "middle")
    return p


def block() -> Picture:
    """Draw the times of a block and of PyTorch in the same dtype, from the table of blocks."""
    rows = table("The GPT-2 block")
    ratios = [float(row["PyTorch"]) / float(row["bfloat16"]) for row in rows]
    found = [
        Bar(row["B × T, mask"], ratio, f"{ratio:.2f}")
        for row, ratio in zip(rows, ratios, strict=True)
    ]
    return bars(
        f"A GPT-2 block is {min(ratios):.1f} to {max(ratios):.2f} times as fast as compiled "
        "PyTorch",
        f"{H200}, bfloat16; PyTorch's time divided by gpt2block's, by B × T",
        found,
        (1.0, "PyTorch 2.11, compiled"),
    )


def layernorm() -> Picture:
    rows = transposed(table("layernorm"))
    return bars(
        f"LayerNorm: six kernels, from {rows[0]['GB/s']} to {rows[-1]['GB/s']} GB/s",
        f"{H200}, float32, 8192 rows of 768, each at its best block size",
        [
            Bar(f"LayerNorm {row['variant']}", float(row["GB/s"]), f"{row['GB/s']} GB/s")
            for row in rows
        ],
        (4239.0, "a copy, 4239 GB/s"),
    )


def trimat() -> Picture:
    rows = transposed(table("trimat"))
    return bars(
        f"Trimat: six kernels, from {rows[0]['µs']} to {rows[-1]['µs']} µs",
        f"{H200}, float32, B = 8, T = 1024, 12 heads of 64; bars: calls per second",
        [Bar(row["variant"], 1 / float(row["µs"]), f"{row['µs']} µs") for row in rows],
    )


def matmul() -> Picture:
    lines = []
    for row in table("matmul_bias", 1):
        us, rate = row["µs"].split()[0], row["TFLOP/s"].split()[0]
        lines.append(Bar(row["variant"], float(rate), f"{rate} TFLOP/s, {us} µs"))
    (row,) = (row for row in table("matmul_bias") if row["M"] == "1024")
    us = row["768, 3072"].split(" / ")[1]
    rate = f"{2e-6 * 1024 * 3072 * 768 / float(us):.1f}"
    lines.append(Bar("cuBLAS", float(rate), f"{rate} TFLOP/s, {float(us):.0f} µs", PAIR[1]))
    return bars(
        "A product in float32: fewer loads for each multiply-add",
        f"{H200}, M = 1024, K = 768, N = 3072",
        lines,
    )


def pair(name: str, peer: str, mflop: float, times: Sequence[str]) -> list[Bar]:
    """Draw the rates of gpt2block and of a peer for the same work, from their times in µs."""
    lines = []
    for who, us, color in zip(("gpt2block", peer), times, PAIR, strict=True):
        rate = mflop / float(us)
        shown = f"{who} {rate:.0f} TFLOP/s, {us} µs"
        lines.append(Bar(name if color == BLUE else "", rate, shown, color))
    return lines


def products() -> Picture:
    """Draw the rates of products of 8192 rows, of gpt2block and cuBLAS."""
    (row,) = (row for row in table("gemm") if row["M"] == "8192")
    lines = []
    for name, text in row.items():
        if sizes := re.search(r"(\d+) → (\d+)", name):
            work = 2e-6 * 8192 * int(sizes[1]) * int(sizes[2])
            lines += pair(name, "cuBLAS", work, text.split(" / "))
    return bars(
        "Products of 8192 rows: closer to the limit than cuBLAS",
        f"{H200}, bfloat16, with bias, K → N",
        lines,
        (788.0, "cuBLAS on a square of 8192, 788 TFLOP/s"),
    )


def attention() -> Picture:
    """Draw the rates of attention with a causal mask, of gpt2block and cuDNN."""
    found, ratios = [], []
    for row in (row for row in table("attention") if row["cuDNN"]):
        B, T = (int(size) for size in row["B, T"].split(", "))
        times = [row[column].split(" / ")[1] for column in ("wgmma", "cuDNN")]
        ratios.append(float(times[1]) / float(times[0]))
        found += pair(f"{B} × {T}", "cuDNN", 4e-6 * B * T * (T + 1) / 2 * 768, times)
    return bars(
        f"Causal attention: from {max(ratios) - 1:.0%} faster than cuDNN to "
        f"{1 / min(ratios) - 1:.0%} slower".replace("%", " %"),
        f"{H200}, bfloat16, 12 heads of 64, B × T",
        found,
    )


def decoding() -> Picture:
    """Draw tokens/s of decoding by rows, and the fraction of the limit set by memory bandwidth."""
    lines, rows = [], table("Decoding")
    shares = [int(row["of the floor"].removesuffix(" %")) for row in rows]
    for row in rows:
        name = f"{row['rows']} row{'' if row['rows'] == '1' else 's'}"
        shown = f"{row['tokens/s']} tokens/s, {row['of the floor']}"
        lines.append(Bar(name, float(row["tokens/s"].replace(",", "")), shown))
    return bars(
        f"Decoding: more rows, more tokens, {min(shares)} to {max(shares)} % of what memory allows",
        f"{H200}, GPT-2 small, bfloat16, 512 tokens in the cache; share of the floor",
        lines,
    )


def curves(
    p: Picture, title: str, left: float, at: Sequence[float], found: Mapping[str, Sequence[float]]
) -> None:
    """Draw curves of logarithmic milliseconds over request rates, in half of a picture."""
    top, bottom, width = 112.0, 340.0, 260.0
    logs = {name: [log10(max(ms, MIN_MS)) for ms in curve] for name, curve in found.items()}
    low, high = floor(min(map(min, logs.values()))), ceil(max(map(max, logs.values())))
    p.text(left, 92, title, bold=True)
    for power in range(low, high + 1):
        y = bottom - (bottom - top) * (power - low) / (high - low)
        p.line((left, y), (left + width, y), FAINT, 1)
        p.text(left - 8, y + 5, f"{10**power:g}", color=GREY, at="end")
    for rate in at:
        p.text(left + width * rate / at[-1], bottom + 22, f"{rate:g}", color=GREY, at="middle")
    beside = bottom + 15  # height of the previous name: names are placed from the lowest curve up
    for (name, curve), color in zip(logs.items(), (BLUE, GREEN, ORANGE), strict=True):
        heights = [bottom - (bottom - top) * (each - low) / (high - low) for each in curve]
        points = [(left + width * x / at[-1], y) for x, y in zip(at, heights, strict=True)]
        for start, end in pairwise(points):
            p.line(start, end, color, 2)
        beside = min(points[-1][1] + 5, beside - 15)
        p.text(left + width + 8, beside, name, color=color)


def serving() -> Picture:
    """Draw times to the first token and between events of streams, by the rate of requests."""
    rows = table("Speed", 1, "serve.md")
    at = [float(row["requests/s"].replace(",", "")) for row in rows]
    last = rows[-1]
    note = f"{H200}, GPT-2 small, bfloat16, streams of 128 tokens; milliseconds by requests/s"
    title = f"At {last['requests/s']} requests/s, 99 % of events come within {last['p99']} ms"
    spoken = "; ".join(", ".join(f"{name}: {cell}" for name, cell in row.items()) for row in rows)
    p = Picture(title, 380, f"{note}. {spoken}")
    p.text(24, 58, note, color=GREY)
    for what, left, prefix in (("to the first token", 70, "first "), ("between events", 450, "")):
        names = ("p50", "p95", "p99")
        columns = {name: [float(row[prefix + name]) for row in rows] for name in names}
        curves(p, what, left, at, columns)
    return p


CHARTS: Mapping[str, Callable[[], Picture]] = {
    f"chart-{draw.__name__}": draw
    for draw in (block, layernorm, trimat, matmul, products, attention, decoding, serving)
}

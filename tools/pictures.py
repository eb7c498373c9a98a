"""The pictures of the chapters in docs/learn: `python tools/pictures.py` draws them again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from svg import BLUE, FAINT, GREEN, GREY, INK, ORANGE, PALE, Picture

FOLDER = Path(__file__).parent.parent / "docs" / "images"


def one_thread_per_row() -> Picture:
    p = Picture(
        "LayerNorm 1: a thread walks along its own row",
        330,
        "Six threads, each with a row of 16 channels. All of them read channel c at the "
        "same time, so that a warp touches 32 addresses that are a whole row apart.",
    )
    p.text(24, 66, "x (N, C), row-major: neighbouring channels are neighbours in memory")
    for row in range(6):
        y = 86 + 30 * row
        p.text(108, y + 20, f"thread {row}", at="end", color=BLUE)
        p.grid(124, y, 16, 1, (24, 24))
        p.box(124 + 24 * 5, y, 24, 24, PALE[ORANGE], ORANGE, 2)
        p.line((124, y + 12), (124 + 24 * 5 - 3, y + 12), BLUE, 1.5, arrow=True)
    p.text(256, 290, "channel c, read by all threads at once", at="middle", color=ORANGE)
    p.text(256, 312, "(N rows give only N threads)", at="middle", color=GREY)
    p.text(546, 112, "One load of a warp:", bold=True)
    for lane in range(6):
        p.grid(546, 126 + 24 * lane, 8, 1, (18, 14), PALE[GREY])
        p.box(546 + 18 * 3, 126 + 24 * lane, 18, 14, ORANGE, ORANGE)
    p.text(546, 290, "32 pieces of memory, 32 bytes")
    p.text(546, 312, "each, of which it uses 4")
    return p


def reductions() -> Picture:
    p = Picture(
        "A sum over lanes: three shuffles for 8 lanes, five for 32",
        350,
        "Eight lanes of a warp hold a value each. In three steps every lane adds the value of the "
        "lane whose number differs in one bit; then all lanes have the sum.",
    )
    values = [3, 1, 4, 1, 5, 9, 2, 6]
    for level, distance in enumerate((0, 4, 2, 1)):
        y = 70 + 76 * level
        if distance:
            before = list(values)
            values = [before[i] + before[i ^ distance] for i in range(8)]
            for lane in range(8):
                other = lane ^ distance
                p.line((198 + 64 * other, y - 44), (198 + 64 * lane, y - 2), BLUE, 1, arrow=True)
                p.line((198 + 64 * lane, y - 44), (198 + 64 * lane, y - 2), GREY, 1)
        for lane, value in enumerate(values):
            fill = PALE[GREEN] if level == 3 else PALE[BLUE]
            p.box(176 + 64 * lane, y, 44, 30, fill, GREEN if level == 3 else BLUE)
            p.text(198 + 64 * lane, y + 21, str(value), at="middle")
        name = f"distance {distance}" if distance else "each lane"
        p.text(152, y + 21, name, at="end", color=BLUE if distance else INK)
    p.text(690, 91, "registers: no")
    p.text(690, 111, "memory, no")
    p.text(690, 131, "barrier")
    p.text(690, 309, "the sum, in", color=GREEN)
    p.text(690, 329, "every lane", color=GREEN)
    return p


def registers() -> Picture:
    p = Picture(
        "LayerNorm 6 reads x once",
        320,
        "Kernel 3 reads a row from memory three times: for the mean, the variance and the result. "
        "Kernel 6 reads it once and keeps it in registers.",
    )
    stages = ("mean", "variance", "result")
    for y, name, once in ((64, "kernel 3", False), (200, "kernel 6", True)):
        p.text(24, y + 24, name, bold=True)
        p.text(24, y + 46, "registers", color=GREEN)
        p.text(24, y + 92, "memory", color=GREY)
        p.box(130, y + 74, 646, 26, PALE[GREY], GREY)
        p.text(144, y + 92, "x", color=INK)
        p.text(762, y + 92, "out", at="end")
        for i, stage in enumerate(stages):
            x = 190 + 190 * i
            p.box(x, y, 140, 32, PALE[GREEN], GREEN)
            p.text(x + 70, y + 21, stage, at="middle")
            if not once or i == 0:
                p.line((x + 20, y + 74), (x + 20, y + 34), ORANGE, 2, arrow=True)
                p.text(x + 30, y + 58, "read x", color=ORANGE)
            if once and i:
                p.line((x - 50, y + 16), (x - 2, y + 16), GREEN, 2, arrow=True)
        p.line((690, y + 32), (690, y + 72), BLUE, 2, arrow=True)
        p.text(700, y + 58, "write", color=BLUE)
    p.text(308, 258, "x stays in registers, 16 bytes for each load", color=GREEN)
    return p


def shared_memory() -> Picture:
    p = Picture(
        "Tiles: a value loaded from global memory is used 16 times",
        370,
        "The product C = A B. A block computes a tile of 16 by 16 outputs. It walks along K and "
        "puts a tile of A and a tile of B into shared memory at each step.",
    )
    p.box(60, 190, 250, 140, "white", GREY)
    p.box(60, 230, 250, 36, PALE[BLUE], BLUE)
    p.box(146, 230, 36, 36, BLUE, BLUE)
    p.line((190, 248), (300, 248), BLUE, 2, arrow=True)
    p.text(60, 352, "A (M, K)")
    p.box(350, 60, 180, 110, "white", GREY)
    p.box(420, 60, 36, 110, PALE[ORANGE], ORANGE)
    p.box(420, 96, 36, 36, ORANGE, ORANGE)
    p.line((438, 138), (438, 164), ORANGE, 2, arrow=True)
    p.text(340, 78, "B (K, N)", at="end")
    p.box(350, 190, 180, 140, "white", GREY)
    p.box(420, 230, 36, 36, PALE[GREEN], GREEN, 2)
    p.text(350, 352, "C (M, N)")
    p.line((310, 248), (416, 248), GREY, 1, dashed=True)
    p.line((438, 172), (438, 226), GREY, 1, dashed=True)
    p.text(562, 92, "A step of 16 along K", bold=True)
    p.text(562, 118, "1. every thread loads one", color=INK)
    p.text(582, 138, "value of A and one of B")
    p.text(562, 164, "2. barrier")
    p.text(562, 190, "3. every thread adds 16")
    p.text(582, 210, "products, read from")
    p.text(582, 230, "shared memory")
    p.text(562, 256, "4. barrier")
    p.text(562, 300, "256 threads, 256 outputs:", color=GREEN)
    p.text(562, 320, "one each", color=GREEN)
    return p


def coarsening() -> Picture:
    p = Picture(
        "Loads from shared memory for one multiply-add",
        330,
        "Three threads: one with one output, one with a column of 8 outputs, one with 8 by 8 "
        "outputs. The more outputs a thread has, the more often it uses each value it has loaded.",
    )
    for x, name, columns, rows, loads in (
        (60, "tiled", 1, 1, "1.25"),
        (290, "coarsened", 1, 8, "0.375"),
        (490, "registers", 8, 8, "0.0625"),
    ):
        p.text(x, 70, name, bold=True)
        left, top = x + 44, 118
        p.grid(left, top, columns, rows, (20, 20), PALE[GREEN])
        p.grid(left, top - 30, columns, 1, (20, 20), PALE[ORANGE])
        p.grid(left - 30, top, 1, rows, (20, 20), PALE[BLUE])
        p.text(left - 20, top + 15, "a", at="middle", color=BLUE)
        p.text(left + 10, top - 15, "b", at="middle", color=ORANGE)
        p.text(x, 306, f"{loads} loads", bold=True, size=17)
    p.text(148, 134, "1 output", color=GREEN)
    p.text(378, 134, "8 outputs,", color=GREEN)
    p.text(378, 154, "one b for all", color=GREEN)
    p.text(704, 134, "64 outputs", color=GREEN)
    return p


def tensor_cores() -> Picture:
    p = Picture(
        "Float32 on tensor cores: two float16 values for one",
        350,
        "A float32 value x is scaled and divided into hi and lo, two float16 values. The product "
        "of two such values needs three products on the tensor cores; lo times lo is left out.",
    )
    p.text(24, 74, "x / scale", mono=True)
    p.box(130, 54, 300, 30, FAINT, GREY)
    p.text(280, 74, "24 bits of float32", at="middle")
    p.line((205, 86), (205, 112), BLUE, 2, arrow=True)
    p.line((355, 86), (355, 112), ORANGE, 2, arrow=True)
    p.box(130, 116, 150, 30, PALE[BLUE], BLUE)
    p.text(205, 136, "hi, 11 bits", at="middle", color=BLUE)
    p.box(280, 116, 150, 30, PALE[ORANGE], ORANGE)
    p.text(355, 136, "lo, the next 11", at="middle", color=ORANGE)
    p.text(24, 196, "q · k  =", mono=True)
    for i, (a, b, color) in enumerate(
        (("lo", "hi", ORANGE), ("hi", "lo", ORANGE), ("hi", "hi", BLUE))
    ):
        x = 130 + 110 * i
        p.box(x, 174, 80, 32, PALE[color], color)
        p.text(x + 40, 195, f"{a} · {b}", at="middle", mono=True)
        if i:
            p.text(x - 15, 195, "+", at="middle")
    p.text(130, 234, "the small products first: a tensor core truncates")
    p.text(130, 254, "what it adds at the magnitude of the sum so far")
    p.text(130, 292, "1 product:   11 bits of each value", mono=True, size=14)
    p.text(130, 314, "3 products:  22 bits of each value", mono=True, size=14)
    p.text(508, 74, "One mma.sync of a warp:", bold=True)
    p.grid(540, 188, 8, 8, (11, 11), PALE[BLUE])
    p.grid(636, 92, 4, 8, (11, 11), PALE[ORANGE])
    p.grid(636, 188, 4, 8, (11, 11), PALE[GREEN])
    p.text(540, 178, "A, 16 × 16", color=BLUE)
    p.text(690, 142, "B, 16 × 8", color=ORANGE)
    p.text(690, 238, "C, 16 × 8", color=GREEN)
    p.text(508, 306, "2048 multiply-adds; float16 in,")
    p.text(508, 326, "sums in float32")
    return p


def favicon() -> Picture:
    p = Picture("", 800, "gpt2block")
    p.parts.clear()
    for row in range(4):
        for column in range(row + 1):
            p.box(80 + 165 * column, 80 + 165 * row, 145, 145, BLUE, BLUE)
    return p


PICTURES: Mapping[str, Callable[[], Picture]] = {
    draw.__name__.replace("_", "-"): draw
    for draw in (
        *(one_thread_per_row, reductions, registers, shared_memory, coarsening, tensor_cores),
        favicon,
    )
}


def main() -> None:
    """Draw all pictures."""
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()

"""Draw the pictures of the chapters in docs/learn: `python tools/pictures.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import exp, inf
from pathlib import Path

from svg import BLUE, FAINT, GREEN, GREY, INK, ORANGE, PALE, Picture

FOLDER = Path(__file__).parent.parent / "docs" / "images"


def threads_and_blocks() -> Picture:
    p = Picture(
        "Three blocks of four threads add ten elements",
        300,
        "A grid of three blocks with four threads each. Thread t of block b has the element "
        "4 b + t. The last two threads of block 2 have no element.",
    )
    colors = (BLUE, GREEN, ORANGE)
    p.text(24, 76, "blockIdx.x", mono=True)
    p.text(24, 124, "threadIdx.x", mono=True)
    p.text(24, 236, "y = a + b", mono=True)
    for i in range(12):
        block, thread = divmod(i, 4)
        color, x = colors[block], 160 + 50 * i + 10 * block
        if thread == 0:
            p.box(x - 4, 56, 198, 88, PALE[color], color)
            p.text(x + 95, 76, f"block {block}", at="middle", color=color, bold=True)
        p.cell(x + 3, 102, 36, 32, str(thread), color, fill="white")
        if i < 10:
            p.line((x + 21, 136), (185 + 50 * i, 212), color, 1.5, arrow=True)
            p.cell(164 + 50 * i, 214, 42, 34, str(i), color)
        else:
            p.line((x + 21, 136), (x + 21, 160), GREY, 1.5, dashed=True)
    p.text(745, 180, "no element:", at="middle", color=GREY)
    p.text(745, 200, "i >= n", at="middle", color=GREY, mono=True)
    p.text(164, 280, "i = blockIdx.x * blockDim.x + threadIdx.x, with blockDim.x = 4", mono=True)
    return p


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
            p.cell(176 + 64 * lane, y, 44, 30, str(value), GREEN if level == 3 else BLUE)
        name = f"distance {distance}" if distance else "each lane"
        p.text(152, y + 21, name, at="end", color=BLUE if distance else INK)
    p.lines(690, 91, "registers: no", "memory, no", "barrier")
    p.lines(690, 309, "the sum, in", "every lane", color=GREEN)
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
            p.cell(x, y, 140, 32, stage, GREEN)
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
    p.lines(582, 210, "products, read from", "shared memory")
    p.text(562, 256, "4. barrier")
    p.lines(562, 300, "256 threads, 256 outputs:", "one each", color=GREEN)
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
    p.lines(378, 134, "8 outputs,", "one b for all", color=GREEN)
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
    p.cell(130, 54, 300, 30, "24 bits of float32", fill=FAINT)
    p.line((205, 86), (205, 112), BLUE, 2, arrow=True)
    p.line((355, 86), (355, 112), ORANGE, 2, arrow=True)
    p.cell(130, 116, 150, 30, "hi, 11 bits", BLUE, color=BLUE)
    p.cell(280, 116, 150, 30, "lo, the next 11", ORANGE, color=ORANGE)
    p.text(24, 196, "q · k  =", mono=True)
    for i, (a, b, color) in enumerate(
        (("lo", "hi", ORANGE), ("hi", "lo", ORANGE), ("hi", "hi", BLUE))
    ):
        x = 130 + 110 * i
        p.cell(x, 174, 80, 32, f"{a} · {b}", color, mono=True)
        if i:
            p.text(x - 15, 195, "+", at="middle")
    p.lines(
        130, 234,
        "the small products first: a tensor core truncates",
        "what it adds at the magnitude of the sum so far",
    )  # fmt: skip
    p.text(130, 292, "1 product:   11 bits of each value", mono=True, size=14)
    p.text(130, 314, "3 products:  22 bits of each value", mono=True, size=14)
    p.text(508, 74, "One mma.sync of a warp:", bold=True)
    p.grid(540, 188, 8, 8, (11, 11), PALE[BLUE])
    p.grid(636, 92, 4, 8, (11, 11), PALE[ORANGE])
    p.grid(636, 188, 4, 8, (11, 11), PALE[GREEN])
    p.text(540, 178, "A, 16 × 16", color=BLUE)
    p.text(690, 142, "B, 16 × 8", color=ORANGE)
    p.text(690, 238, "C, 16 × 8", color=GREEN)
    p.lines(508, 306, "2048 multiply-adds; float16 in,", "sums in float32")
    return p


def online_softmax() -> Picture:
    p = Picture(
        "Two halves of a row: (m, s) of each, and of both",
        360,
        "The values 1, 3, 2 and 5, 4, 1. In each half m is the largest value so far and s the sum "
        "of exp(x - m). Both sums are corrected to the larger maximum and added.",
    )
    halves: tuple[tuple[int, str, tuple[int, ...]], ...] = (
        (90, BLUE, (1, 3, 2)),
        (460, ORANGE, (5, 4, 1)),
    )
    p.text(24, 84, "x", mono=True)
    p.text(24, 138, "m", mono=True)
    p.text(24, 168, "s", mono=True)
    ends = []
    for left, color, values in halves:
        m, s = -inf, 0.0
        for i, x in enumerate(values):
            m, s = max(m, x), s * exp(m - max(m, x)) + exp(x - max(m, x))
            at = left + 90 * i
            p.cell(at, 62, 70, 34, str(x), color)
            p.text(at + 35, 138, f"{m:.0f}", at="middle", mono=True)
            p.text(at + 35, 168, f"{s:.3f}", at="middle", mono=True)
            if i:
                p.line((at - 24, 133), (at + 12, 133), color, 1.5, arrow=True)
        ends.append((m, s))
        p.line((left + 215, 180), (400 + (left - 275) // 8, 218), color, 2, arrow=True)
    (m_a, s_a), (m_b, s_b) = ends
    m = max(m_a, m_b)
    s = s_a * exp(m_a - m) + s_b * exp(m_b - m)
    p.box(170, 224, 460, 92, PALE[GREEN], GREEN)
    p.text(400, 250, f"m = max({m_a:.0f}, {m_b:.0f}) = {m:.0f}", at="middle", mono=True)
    first, second = f"{s_a:.3f} exp({m_a:.0f} - {m:.0f})", f"{s_b:.3f} exp({m_b:.0f} - {m:.0f})"
    p.text(400, 276, f"s = {first} + {second}", at="middle", mono=True)
    p.text(400, 302, f"  = {s_a * exp(m_a - m):.3f} + {s_b:.3f} = {s:.3f}", at="middle", mono=True)
    p.text(
        400, 344, "exp of all six values relative to 5 has the same sum", at="middle", color=GREY
    )
    return p


def attention_tiles() -> Picture:
    p = Picture(
        "The scores in memory, or a tile of them at a time",
        400,
        "On the left all scores below the diagonal are stored in memory. On the right a block of "
        "queries walks along the keys; it holds one tile of scores, and m, s and o of each query.",
    )
    for left, name, online in ((40, "naive", False), (400, "online", True)):
        p.text(left, 72, name, bold=True)
        p.text(left + 112, 92, "keys", color=GREY, at="middle")
        for row in range(6):
            for column in range(6):
                x, y = left + 36 * column, 102 + 36 * row
                seen = column <= row
                fill = "white" if not seen or online else PALE[ORANGE]
                edge = ORANGE if seen and not online else "#cbd2d9"
                p.box(x, y, 36, 36, fill, edge)
    written = "every score is written to memory,", "read, written as a weight, read again"
    p.lines(40, 344, *written, step=22, color=ORANGE)
    top = 102 + 36 * 4
    p.box(400, top, 180, 36, PALE[BLUE], BLUE)
    p.box(400 + 36 * 2, top, 36, 36, BLUE, BLUE)
    p.line((400 + 36 * 3 + 6, top + 18), (400 + 36 * 5 - 6, top + 18), BLUE, 2, arrow=True)
    p.text(392, top + 23, "Q", at="end", color=BLUE)
    p.text(636, top - 34, "for each query:", color=GREEN)
    for i, (letter, meaning) in enumerate((("m", "largest"), ("s", "sum"), ("o", "weighted V"))):
        p.cell(636, top - 20 + 28 * i, 28, 24, letter, GREEN, mono=True)
        p.text(674, top - 2 + 28 * i, meaning, color=GREEN)
    kept = "a block walks over the tiles of its row;", "the scores never reach global memory"
    p.lines(400, 344, *kept, step=22, color=BLUE)
    return p


def one_token() -> Picture:
    weights = 124.4e6 * 2  # bytes of GPT-2 small in 16 bits
    row = 12 * 512 * 2 * 768 * 2  # bytes of the keys and values of 512 tokens
    p = Picture(
        "A step reads every weight once, whatever the number of rows",
        330,
        "Bytes that a step of decoding reads, for 1, 8 and 64 rows. The weights are 249 MB each "
        "time. Each row adds 19 MB of keys and values, which no other row reads.",
    )
    p.text(24, 66, "GPT-2 small in 16 bits, 512 tokens in the cache")
    scale = 540 / (weights + 64 * row)
    for i, rows in enumerate((1, 8, 64)):
        y, width, cache = 92 + 58 * i, weights * scale, rows * row * scale
        p.text(96, y + 24, f"{rows} row{'s' if rows > 1 else ''}", at="end", bold=True)
        p.box(112, y, width, 36, PALE[BLUE], BLUE)
        p.box(112 + width, y, cache, 36, PALE[ORANGE], ORANGE)
        mb = (weights + rows * row) / 1e6
        p.text(124 + width + cache, y + 16, f"{mb:,.0f} MB", size=14)
        p.text(124 + width + cache, y + 34, f"{mb / rows:,.0f} a token", size=14, color=GREEN)
    p.text(112 + weights * scale / 2, 115, "weights", at="middle", color=BLUE, size=14)
    p.text(112 + weights * scale + 32 * row * scale, 231, "keys and values of 64 rows",
           at="middle", color=ORANGE, size=14)  # fmt: skip
    p.lines(
        24, 290,
        "With few rows a token costs a reading of all weights. With many rows it costs",
        "its own keys and values, and a share of the weights.",
        step=22,
    )  # fmt: skip
    return p


def splits() -> Picture:
    p = Picture(
        "The keys of one query, shared by warps",
        350,
        "The keys of a head are divided into splits of 32. A warp computes the softmax of its "
        "split alone: the largest score m, the sum l and the sum of weighted values o. The splits "
        "are merged: their sums are scaled to the largest m and added, one split after the other.",
    )
    p.text(24, 74, "keys 0 to 127 of a head, in the kv_cache", size=14)
    for i in range(4):
        x = 24 + 190 * i
        p.grid(x, 88, 8, 1, (22, 24), PALE[GREY])
        p.text(x + 88, 134, f"split {i}: 32 keys", at="middle", size=14, color=GREY)
        p.line((x + 88, 142), (x + 88, 162), BLUE, 2, arrow=True)
        p.box(x + 16, 166, 144, 52, PALE[BLUE], BLUE)
        p.text(x + 88, 187, f"warp {i}", at="middle", color=BLUE)
        p.text(x + 88, 208, "m, l, o", at="middle", mono=True)
        p.line((x + 88, 220), (x + 88, 250), GREEN, 2, arrow=True)
    p.box(40, 254, 714, 44, PALE[GREEN], GREEN)
    p.text(60, 281, "M = max m", mono=True)
    p.text(192, 281, "w = exp(m - M)", mono=True)
    p.text(370, 281, "out = (sum of w o) / (sum of w l)", mono=True)
    p.text(24, 328, "Splits are added in the order of their keys, whichever warp computed them.")
    return p


def fusion() -> Picture:
    p = Picture(
        "The feed-forward of one row: five kernels, two, two that overlap",
        396,
        "Three timelines of a feed-forward, not to scale. With a kernel for each operation there "
        "are five starts, and five times a result is written and read. With LayerNorm, GELU and "
        "the residual in the products there are two. Where launches overlap, the second product "
        "has requested its weights before the first one ends.",
    )

    def kernel(x: float, y: float, name: str, weights: float, waits: float, work: float) -> float:
        """Draw a kernel from x on: weights, the wait for its input, its work. Return its end."""
        if name:
            p.text(x, y - 8, name, size=14)
        for width, color in ((weights, BLUE), (waits, ORANGE), (work, GREEN)):
            if width:
                p.box(x, y, width, 30, PALE[color], color)
            x += width
        return x

    x: float = 24
    for name, weights, work in (
        ("LayerNorm", 20, 36), ("fc", 60, 46), ("GELU", 0, 36), ("proj", 60, 46), ("add", 0, 36),
    ):  # fmt: skip
        x = kernel(x, 92, name, weights, 40, work) + 36
    p.text(24, 144, "five kernels: five starts, five waits for the result before", color=GREY)
    first = "LayerNorm, fc, GELU"
    kernel(kernel(24, 188, first, 60, 40, 70) + 36, 188, "proj, add", 60, 40, 60)
    p.text(24, 240, "two kernels, one after the other", color=GREY)
    end = kernel(24, 284, first, 60, 40, 70)
    p.text(end - 66, 340, "proj, add", size=14, at="end")
    kernel(end - 60, 320, "", 60, 30, 60)
    p.line((end, 276), (end, 356), GREY, 1, dashed=True)
    p.text(24, 376, "two that overlap: proj requests its weights while fc runs", color=GREY)
    p.text(784, 58, "time, not to scale", at="end", color=GREY, size=14)
    for i, (color, what) in enumerate(
        ((BLUE, "request weights"), (ORANGE, "wait for x, load it"), (GREEN, "compute, store"))
    ):
        p.box(560, 196 + 32 * i, 22, 18, PALE[color], color)
        p.text(592, 210 + 32 * i, what, color=color)
    return p


def eight_bits() -> Picture:
    p = Picture(
        "Eight bits: two formats",
        330,
        "The bits of float16, E5M2 and E4M3. E5M2 is the upper half of a float16: 5 exponent bits "
        "and 2 fraction bits. E4M3 has 4 and 3. The numbers of both formats between a quarter and "
        "4: E4M3 has twice as many.",
    )
    for i, (name, exponent, fraction, about) in enumerate(
        (
            ("float16", 5, 10, "up to 65504"),
            ("E5M2", 5, 2, "up to 57344, steps of 1/4 between 1 and 2"),
            ("E4M3", 4, 3, "up to 448, steps of 1/8 between 1 and 2"),
        )
    ):
        y = 60 + 40 * i
        p.text(24, y + 20, name, bold=True)
        p.grid(112, y, 1, 1, (24, 28), PALE[GREY])
        p.grid(136, y, exponent, 1, (24, 28), PALE[BLUE])
        p.grid(136 + 24 * exponent, y, fraction, 1, (24, 28), PALE[ORANGE])
        p.text(136 + 24 * (exponent + fraction) + 16, y + 20, about)
    p.text(124, 192, "sign", at="middle", size=14, color=GREY)
    p.text(148, 192, "exponent", size=14, color=BLUE)
    p.text(236, 192, "fraction", size=14, color=ORANGE)
    for y, name, fraction, color in ((234, "E5M2", 2, BLUE), (282, "E4M3", 3, ORANGE)):
        p.text(24, y + 5, name, bold=True, color=color)
        p.line((112, y), (776, y), GREY, 1)
        for exponent in range(-2, 2):
            for step in range(2**fraction):
                at = 112 + 166 * 2.0**exponent * (1 + step / 2**fraction)
                p.line((at, y - 10), (at, y + 10), color, 2)
        p.line((776, y - 10), (776, y + 10), color, 2)
    for value in (0, 1, 2, 3, 4):
        p.text(112 + 166 * value, 316, str(value), at="middle", size=14, color=GREY)
    return p


def guess_and_verify() -> Picture:
    p = Picture(
        "Three guesses, computed in one step with the last token",
        366,
        "The tokens to, be, or, not, to, be at positions 0 to 5. The last two were there before, "
        "and the three tokens that followed them are the guesses: or, not, to. A step computes "
        "rows at positions 5 to 8. Their drawn tokens are or, else, to, be. The first one is the "
        "guess at position 6. The second one is not the guess at position 7, so that two tokens "
        "are taken.",
    )

    def left(position: int) -> int:
        return 122 + 74 * position

    p.text(24, 98, "position", size=14, color=GREY)
    p.text(24, 133, "token")
    for i, word in enumerate(("to", "be", "or", "not", "to", "be", "or", "not", "to")):
        p.text(left(i) + 32, 98, str(i), size=14, color=GREY, at="middle")
        edge = ORANGE if i > 5 else BLUE if i in (0, 1, 4, 5) else GREY
        p.cell(left(i), 110, 64, 34, word, edge)
    for first, last, y, color in (
        (0, 1, 154, BLUE), (4, 5, 154, BLUE), (2, 4, 78, ORANGE), (6, 8, 78, ORANGE)
    ):  # fmt: skip
        p.line((left(first), y), (left(last) + 64, y), color, 3)
    p.line((left(4) + 68, 78), (left(6) - 4, 78), ORANGE, 1.5, arrow=True)
    p.text(left(2), 66, "what followed", size=14, color=ORANGE)
    p.text(left(6), 66, "three guesses", size=14, color=ORANGE)
    p.text(left(0), 174, "the same tokens", size=14, color=BLUE)
    p.text(24, 210, "in one step, the rows at positions 5 to 8")
    drawn = (("or", True), ("else", True), ("to", False), ("be", False))
    for i, (word, taken) in enumerate(drawn):
        x, color = left(5 + i), GREEN if taken else GREY
        p.text(x + 32, 210, f"row {i}", at="middle", bold=True)
        p.text(x + 32, 240, f"0 to {5 + i}", at="middle", size=14)
        p.cell(x, 256, 64, 34, word, color)
        p.text(x + 32, 312, "taken" if taken else "dropped", at="middle", size=14, color=color)
    p.text(24, 240, "keys that a row sees")
    p.text(24, 278, "token that is drawn")
    p.lines(
        24, 338,
        "The token of row 0 is the guess at position 6. That of row 1 is not the guess at",
        "position 7: it is taken, and the rows after it are dropped.",
    )  # fmt: skip
    return p


def four_bits() -> Picture:
    p = Picture(
        "Four bits: a block and its scales",
        400,
        "The 20 bytes of a block of Q4_1 for 32 weights: two of d, two of m, and 16 with two "
        "codes each. The 16 numbers that it can stand for are d q + m, at equal distances from "
        "-0.73 to 1.17. The 144 bytes of a block of Q4_K for 256 weights: d and dmin, the scales s "
        "and minimums m of eight sub-blocks, and the codes, 32 bytes for two sub-blocks.",
    )
    real = bytes.fromhex("0f30d8b9458765406f65164b677664502267655a")
    p.text(24, 80, "Q4_1", bold=True)
    for i, byte in enumerate(real):
        edge = ORANGE if i < 2 else GREEN if i < 4 else BLUE
        p.cell(92 + 34 * i, 58, 34, 34, f"{byte:02x}", edge, mono=True)
    p.text(126, 112, "d", size=14, color=ORANGE, at="middle")
    p.text(194, 112, "m", size=14, color=GREEN, at="middle")
    p.text(228, 112, "codes of 32 weights: 45 is q = 5 of weight 0 and q = 4 of weight 16",
           size=14, color=BLUE)  # fmt: skip
    p.text(24, 158, "d q + m")
    p.line((92, 153), (772, 153), GREY, 1)
    for q in range(16):
        x = 112 + 40 * q
        p.line((x, 143), (x, 163), BLUE if q in (4, 5) else GREY, 4 if q in (4, 5) else 2)
        p.text(x, 184, str(q), size=14, color=BLUE if q in (4, 5) else GREY, at="middle")
    p.text(112, 206, "-0.73", size=14, at="middle")
    p.text(292, 206, "-0.22 and -0.10", size=14, color=BLUE, at="middle")
    p.text(712, 206, "1.17", size=14, at="middle")
    p.text(24, 268, "Q4_K", bold=True)
    pairs = ((32, BLUE, f"{i}, {i + 1}") for i in range(0, 8, 2))
    left = 92.0
    for size, edge, name in ((4, ORANGE, ""), (12, GREEN, ""), *pairs):
        p.cell(left, 246, 4.72 * size, 34, name, edge)
        left += 4.72 * size
    p.line((101, 284), (101, 328), ORANGE)
    p.text(92, 346, "d and dmin: 4 bytes", size=14, color=ORANGE)
    p.line((140, 284), (140, 306), GREEN)
    p.text(131, 323, "s and m of 8 sub-blocks of 32 weights, 6 bits each: 12 bytes", size=14,
           color=GREEN)  # fmt: skip
    p.text(420, 300, "codes, 32 bytes for two sub-blocks", size=14, color=BLUE)
    p.text(
        24, 382, "A weight is d s q - dmin m: as in Q4_1, with a scale d s and a minimum dmin m."
    )
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
        threads_and_blocks,
        one_thread_per_row,
        reductions,
        registers,
        shared_memory,
        coarsening,
        tensor_cores,
        online_softmax,
        attention_tiles,
        one_token,
        splits,
        fusion,
        eight_bits,
        guess_and_verify,
        four_bits,
        favicon,
    )
}


def main() -> None:
    """Draw all pictures."""
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()

"""Format tables of results as text, and as HTML for notebooks, in which text is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

HIGHEST_BITS = 16.0  # surprisal, in bits, from which a piece has the strongest color
MAX_ROWS = 24  # maximum rows of a text table; middle rows of longer tables are omitted
MAX_CHARACTERS = 40  # maximum characters per cell of a text table


def text_table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table of texts and numbers for a terminal; numbers are aligned to the right."""
    half = MAX_ROWS // 2
    cut = len(rows) > MAX_ROWS
    shown = [*rows[:half], *rows[-half:]] if cut else list(rows)
    first = rows[0] if rows else headers
    numbers = [isinstance(value, (int, float)) for value in first]
    cells = [list(headers), *([_short(_text(value)) for value in row] for row in shown)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(row, widths, numbers, strict=True)
        ).rstrip()
        for row in cells
    ]
    if cut:
        lines.insert(1 + half, f"… {len(rows) - 2 * half} more")
    return "\n".join(lines)


def _short(text: str) -> str:
    return text if len(text) <= MAX_CHARACTERS else f"{text[: MAX_CHARACTERS - 1]}…"


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def table(headers: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a table of texts and numbers as HTML; numbers are aligned to the right."""
    head = "".join(f"<th>{escape(name)}</th>" for name in headers)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: object) -> str:
    side = "right" if isinstance(value, (int, float)) else "left"
    return f'<td style="text-align: {side}">{escape(_text(value))}</td>'


def paragraph(text: str) -> str:
    """Return a text as HTML that keeps the text's line breaks."""
    return f'<div style="white-space: pre-wrap">{escape(text)}</div>'


def surprisals(start: str, pieces: Iterable[tuple[str, float]]) -> str:
    """Return HTML of `start` and of tokens, whose color and tooltip show the surprisal in bits."""
    spans = "".join(
        f'<span title="{bits:.2f} bits" style="background: rgba(220, 50, 32, '
        f'{min(max(bits, 0.0) / HIGHEST_BITS, 1.0) * 0.8:.2f})">{escape(piece)}</span>'
        for piece, bits in pieces
    )
    return f'<div style="white-space: pre-wrap">{escape(start)}{spans}</div>'

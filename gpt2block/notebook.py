"""HTML for notebooks. All text is escaped."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

HIGHEST_BITS = 16.0  # surprisal shown in the strongest color


def table(headers: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A table of texts and numbers; numbers are aligned to the right."""
    head = "".join(f"<th>{escape(name)}</th>" for name in headers)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f'<td style="text-align: right">{value:.3g}</td>'
    if isinstance(value, int):
        return f'<td style="text-align: right">{value:,}</td>'
    return f'<td style="text-align: left">{escape(str(value))}</td>'


def paragraph(text: str) -> str:
    """Text with its line breaks."""
    return f'<div style="white-space: pre-wrap">{escape(text)}</div>'


def surprisals(start: str, pieces: Iterable[tuple[str, float]]) -> str:
    """A text whose pieces are colored by their surprisal in bits, which is also their tooltip."""
    spans = "".join(
        f'<span title="{bits:.2f} bits" style="background: rgba(220, 50, 32, '
        f'{min(max(bits, 0.0) / HIGHEST_BITS, 1.0) * 0.8:.2f})">{escape(piece)}</span>'
        for piece, bits in pieces
    )
    return f'<div style="white-space: pre-wrap">{escape(start)}{spans}</div>'

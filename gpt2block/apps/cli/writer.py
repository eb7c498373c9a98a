"""Write the rows (samples) of `gpt2block generate` to stdout while tokens are generated."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from gpt2block.engine.generation.rows import Row


class Writer:
    """Write rows (samples) to stdout, one after another; the current row's text as it is generated.

    ids: write token ids instead of text.
    """

    def __init__(self, rows: Sequence[Row], prompt: str, ids: bool) -> None:
        self._rows, self._prompt, self._ids = rows, prompt, ids
        self._terminal = Console(highlight=False) if sys.stdout.isatty() else None
        self._current = -1
        self._tail = "\n\n"  # the last two characters written

    def show(self, row: Row) -> None:
        """Write the new text of `row` if `row` is the sample that is being written."""
        if self._current < 0:
            self._start_next()
        if row is self._rows[self._current]:
            self._write(self._take(row))
            while row.finish_reason and self._current + 1 < len(self._rows):
                row = self._start_next()

    def rest(self, logprobs: bool) -> None:
        """Write all text that is not yet written, and with `logprobs` all log-probabilities."""
        if self._current >= 0:
            self._write(self._take(self._rows[self._current]))
        while self._current + 1 < len(self._rows):
            self._start_next()
        self._end_line("\n")
        for number, row in enumerate(self._rows if logprobs else ()):
            self._end_line("\n\n")
            self._write(self._heading(number))
            pieces = row.tokens if self._ids else row.token_texts()
            for piece, logprob in zip(pieces, row.logprobs, strict=True):
                self._write(f"{logprob:9.4f}  {piece!r}\n")

    def _start_next(self) -> Row:
        """Write the heading, prompt and text of the next row (sample), now the current row."""
        self._end_line("\n\n")
        self._current += 1
        row = self._rows[self._current]
        self._write(self._heading(self._current))
        if self._terminal:
            self._terminal.print(Text(self._prompt, style="bold"), end="", soft_wrap=True)
            self._tail = self._prompt[-2:]
        else:
            self._write(self._prompt)
        self._write(self._take(row))
        return row

    def _take(self, row: Row) -> str:
        """Return the text, or the token ids, generated for a row (sample) since the last call."""
        if not self._ids:
            return row.take()
        tokens, *_ = row.take_tokens()
        return "".join(f" {token}" for token in tokens)

    def _heading(self, number: int) -> str:
        several = len(self._rows) > 1
        return f"--- sample {number + 1} of {len(self._rows)}\n" if several else ""

    def _end_line(self, end: str) -> None:
        """Write newlines until the output ends with `end`, which consists of newlines."""
        present = len(self._tail) - len(self._tail.rstrip("\n"))
        self._write(end[present:])

    def _write(self, text: str) -> None:
        if text:
            sys.stdout.write(text)
            sys.stdout.flush()
            self._tail = (self._tail + text)[-2:]

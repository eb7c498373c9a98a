"""Write the samples (sequences) of `gpt2block generate` to stdout while tokens are generated."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from gpt2block.engine.generation.sequences import Sequences, TokenSequence


class Writer:
    """Write samples to stdout, one after another; the current one's text as it is generated.

    ids: write token ids instead of text.
    """

    def __init__(self, sequences: Sequences, prompt: str, ids: bool) -> None:
        self._sequences, self._prompt, self._ids = sequences, prompt, ids
        self._terminal = Console(highlight=False) if sys.stdout.isatty() else None
        self._current = -1
        self._tail = "\n\n"  # the last two characters written

    def show(self, sequence: TokenSequence) -> None:
        """Write the new text of `sequence` if `sequence` is the sample that is being written."""
        if self._current < 0:
            self._start_next()
        if sequence is self._sequences[self._current]:
            self._write(self._take(sequence))
            while sequence.finish_reason and self._current + 1 < len(self._sequences):
                sequence = self._start_next()

    def rest(self, logprobs: bool) -> None:
        """Write all text that is not yet written, and with `logprobs` all log-probabilities."""
        if self._current >= 0:
            self._write(self._take(self._sequences[self._current]))
        while self._current + 1 < len(self._sequences):
            self._start_next()
        self._end_line("\n")
        for number, sequence in enumerate(self._sequences if logprobs else ()):
            self._end_line("\n\n")
            self._write(self._heading(number))
            tops = sequence.tops or [()] * len(sequence.tokens)
            for token, logprob, top in zip(sequence.tokens, sequence.logprobs, tops, strict=True):
                pairs = (self._likely(sequence, *each) for each in ((token, logprob), *top))
                self._write("    ".join(pairs) + "\n")

    def _likely(self, sequence: TokenSequence, token: int, logprob: float) -> str:
        """Return a token's log-probability, and its text or id."""
        return f"{logprob:9.4f}  {token if self._ids else sequence.text_of(token)!r}"

    def _start_next(self) -> TokenSequence:
        """Write the heading, prompt and text of the next sample, now the current sequence."""
        self._end_line("\n\n")
        self._current += 1
        sequence = self._sequences[self._current]
        self._write(self._heading(self._current))
        if self._terminal:
            self._terminal.print(Text(self._prompt, style="bold"), end="", soft_wrap=True)
            self._tail = self._prompt[-2:]
        else:
            self._write(self._prompt)
        self._write(self._take(sequence))
        return sequence

    def _take(self, sequence: TokenSequence) -> str:
        """Return the text, or the token ids, generated for a sequence since the last call."""
        if not self._ids:
            return sequence.take()
        tokens, *_ = sequence.take_tokens()
        return "".join(f" {token}" for token in tokens)

    def _heading(self, number: int) -> str:
        several = len(self._sequences) > 1
        return f"--- sample {number + 1} of {len(self._sequences)}\n" if several else ""

    def _end_line(self, end: str) -> None:
        """Write newlines until the output ends with `end`, which consists of newlines."""
        present = len(self._tail) - len(self._tail.rstrip("\n"))
        self._write(end[present:])

    def _write(self, text: str) -> None:
        if text:
            sys.stdout.write(text)
            sys.stdout.flush()
            self._tail = (self._tail + text)[-2:]

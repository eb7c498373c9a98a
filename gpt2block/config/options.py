"""Options as fields of dataclasses: default, range and meaning of each are written once.

    @documented
    @dataclass(frozen=True)
    class Sampling:
        '''The sampling options of one row.

        {options}
        '''

        top_k: int = option(0, "Keep the k most likely tokens; 0: off.", Range(0, 99, "0 to 99"))

Docstrings get the meanings in the place of {options}; the command line's help, its defaults and the
server's fields are made of the same fields.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import Field, field, fields
from typing import Any, NamedTuple, TypeVar

Documented = TypeVar("Documented", bound=Any)
PLACE = "{options}"  # in a docstring, a paragraph of its own
WIDTH = 100


class Range(NamedTuple):
    """The numbers that an option may have, and what an error says of them."""

    least: float
    most: float
    expected: str


class Meaning(NamedTuple):
    """What an option does: a sentence, and what Python's documentation says in addition."""

    text: str
    more: str = ""
    range: Range | None = None

    @property
    def full(self) -> str:
        """As it follows the option's name in a docstring."""
        return f"{self.text[0].lower()}{self.text[1:]} {self.more}".rstrip()


def option(default: Any, text: str, range: Range | None = None, more: str = "") -> Any:
    """A field of a dataclass that is an option; see Meaning."""
    return field(default=default, metadata={"meaning": Meaning(text, more, range)})


def options_of(kind: Any) -> dict[str, Field[Any]]:
    """The options that a dataclass has, by name."""
    return {each.name: each for each in fields(kind) if "meaning" in each.metadata}


def meaning_of(option: Field[Any]) -> Meaning:
    meaning: Meaning = option.metadata["meaning"]
    return meaning


def document(target: Any, options: Mapping[str, Field[Any]]) -> None:
    """Write what these options do into the docstring of a function or class, if it has a place."""
    text = target.__doc__ or ""  # none with python -OO
    indent = next((line.removesuffix(PLACE) for line in text.splitlines() if PLACE in line), "")
    lines = [
        textwrap.fill(
            f"{name}: {meaning_of(each).full}",
            WIDTH,
            initial_indent=indent,
            subsequent_indent=f"{indent}    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        for name, each in options.items()
    ]
    target.__doc__ = text.replace(indent + PLACE, "\n".join(lines)) or None


def documented(kind: Documented) -> Documented:
    """Class decorator: the docstring says what the dataclass's options do."""
    document(kind, options_of(kind))
    return kind

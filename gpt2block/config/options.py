"""Options as fields of dataclasses: default, range and meaning of each are written once.

    @documented
    @dataclass(frozen=True)
    class Sampling:
        '''The sampling options of one row.

        {options}
        '''

        top_k: int = option(0, "Keep the k most likely tokens; 0: off.", Range(0, 99, "0 to 99"))

Docstrings contain the options' descriptions in the place of {options}; the command line's help and
defaults and the server's fields are generated from the same fields.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import Field, field, fields
from typing import Any, NamedTuple, TypeVar

Documented = TypeVar("Documented", bound=Any)
PLACE = "{options}"  # placeholder: a separate paragraph of a docstring
WIDTH = 100


class Range(NamedTuple):
    """The range of an option's values, and its description in an error."""

    least: float
    most: float
    expected: str


class Meaning(NamedTuple):
    """The effect of an option: a sentence, `text`, and further text for docstrings only, `more`."""

    text: str
    more: str = ""
    range: Range | None = None

    @property
    def full(self) -> str:
        """Return the text that follows the option's name in a docstring."""
        return f"{self.text[0].lower()}{self.text[1:]} {self.more}".rstrip()


def option(default: Any, text: str, range: Range | None = None, more: str = "") -> Any:
    """Return a dataclass field that is an option with this description, default and range."""
    return field(default=default, metadata={"meaning": Meaning(text, more, range)})


def options_of(kind: Any) -> dict[str, Field[Any]]:
    """Return the options of a dataclass, by name."""
    return {each.name: each for each in fields(kind) if "meaning" in each.metadata}


def meaning_of(option: Field[Any]) -> Meaning:
    meaning: Meaning = option.metadata["meaning"]
    return meaning


def document(target: Any, options: Mapping[str, Field[Any]]) -> None:
    """Insert the descriptions of these options into a docstring, if it has a place for them."""
    text = target.__doc__ or ""  # python -OO removes docstrings
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
    """Class decorator: insert the descriptions of the dataclass's options into its docstring."""
    document(kind, options_of(kind))
    return kind

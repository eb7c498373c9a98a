"""Tables of parameters on the page of the Python API: an extension of griffe.

A docstring describes a parameter in a sentence that begins with its name and a colon, or with
several names: "top: tokens for each layer. ids, mask: as in a call." Such sentences become a
section in NumPy's style, which mkdocstrings shows as a table with types and defaults.

If a docstring is completed with options at run time, docstring and signature come from the Python
object: griffe reads sources, in which options are fields of dataclasses.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import griffe

from gpt2block.checks import PLACE

_OTHER = re.compile(r"(?<=\.)\s(?=Raises |Returns )")  # begins text that describes no parameter


class Tables(griffe.Extension):
    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        _add_sections(pkg)


def _add_sections(parent: griffe.Object) -> None:
    for child in parent.members.values():
        if isinstance(child, (griffe.Module, griffe.Class)):
            _add_sections(child)
        if isinstance(child, (griffe.Function, griffe.Class)) and child.docstring is not None:
            if PLACE in child.docstring.value or _takes_options(child):
                _as_imported(child)
            attributes = "dataclass" in child.labels
            names = child.attributes if attributes else [each.name for each in child.parameters]
            title = "Attributes" if attributes else "Parameters"
            child.docstring.value = with_section(child.docstring.value, names, title)


def _takes_options(child: griffe.Object) -> bool:
    return any("with_keywords" in str(each.value) for each in getattr(child, "decorators", ()))


def _as_imported(child: griffe.Function | griffe.Class) -> None:
    """Replace docstring, parameters and defaults by the values of the imported object."""
    module = child.module.path
    found = attrgetter(child.path.removeprefix(f"{module}."))(importlib.import_module(module))
    assert child.docstring is not None
    child.docstring.value = inspect.getdoc(found) or ""
    known = inspect.signature(found).parameters
    if isinstance(child, griffe.Class):
        for name, each in known.items():
            child.attributes[name].value = repr(each.default)
        return
    del child.parameters["options"]
    for name, each in known.items():
        if name not in child.parameters:
            kind: Any = griffe.ParameterKind.keyword_only
            default = repr(each.default)
            child.parameters.add(
                griffe.Parameter(name, annotation=each.annotation, kind=kind, default=default)
            )


def with_section(text: str, names: Iterable[str], title: str) -> str:
    """Return the docstring with the descriptions of these names moved to a section at its end."""
    name = "|".join(map(re.escape, names))
    if not name:
        return text
    begin = re.compile(rf"(?:^|(?<=\.)\s+|\n)((?:{name})(?:, (?:{name}))*): ")
    prose, section = [], []
    for paragraph in text.split("\n\n"):
        before, *described = begin.split(paragraph)
        kept = [before]
        for which, what in zip(described[::2], described[1::2], strict=True):
            description, *rest = _OTHER.split(what, maxsplit=1)
            words = " ".join(description.split())
            section += [f"{each}\n    {words}" for each in which.split(", ")]
            kept += rest
        prose.append(" ".join(part for part in kept if part.strip()) if described else paragraph)
    if not section:
        return text
    body = "\n\n".join(part for part in prose if part.strip())
    return "\n".join((body, "", title, "-" * len(title), *section))

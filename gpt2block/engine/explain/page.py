"""Create the HTML page of a forward pass from its data and the files in template/."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from gpt2block.errors import printable
from gpt2block.files.writing import write_file

FRAME_HEIGHT = 900  # height of the frame in a notebook, in pixels
# JavaScript files that are joined to one script in this order: each file uses definitions of
# earlier files, and start.js draws the page.
SCRIPTS = (
    "base", "heatmap", "tokens", "forward", "walk", "experts", "step", "product", "code",
    "attention", "opened", "lens", "next", "start",
)  # fmt: skip
# An unescaped "<" in a text could end the script element that holds the data, or start a comment.
_ESCAPED = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}


class DataTemplate(Template):
    """A string.Template with placeholders @@name, as JavaScript uses the dollar sign."""

    delimiter = "@@"


def json_of_script(data: object) -> str:
    """Return JSON that a script element can hold."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character, escaped in _ESCAPED.items():  # replace is much faster than translate
        text = text.replace(character, escaped)
    return text


class Page:
    """An HTML page in one file, which needs no network. A notebook displays the page in a frame.

    data: the values that the page shows, as in its JSON.
    """

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data = data

    def __repr__(self) -> str:
        model, tokens = self.data["model"]["name"], len(self.data["tokens"])
        return f"Page({model!r}, {tokens} tokens, {len(self.html.encode()):,} bytes)"

    @property
    def title(self) -> str:
        """The title: beginning of the text and name of the model, in printable characters."""
        text = " ".join(self.data["text"].split())
        start = text if len(text) <= 60 else f"{text[:59]}…"
        return printable(f"{start} · {self.data['model']['name']}")

    @property
    def html(self) -> str:
        """The HTML text of the whole page."""
        return DataTemplate(_part("page.html")).substitute(
            title=escape(self.title),
            style=_part("style.css"),
            steps=_part("steps.html"),
            data=json_of_script(self.data),
            script="\n".join(_part(f"{name}.js") for name in SCRIPTS),
        )

    def save(self, path: str | Path) -> Path:
        """Write the page to a file and return the file's path. Raises InputError."""
        path = Path(path)
        write_file(path, self.html.encode())
        return path

    def _repr_html_(self) -> str:
        return (
            f'<iframe title="{escape(self.title)}" srcdoc="{escape(self.html)}" '
            f'style="width: 100%; height: {FRAME_HEIGHT}px; border: 0"></iframe>'
        )


@cache
def _part(name: str) -> str:
    """Return the text of a file in the folder gpt2block/engine/explain/template."""
    return (files("gpt2block.engine.explain") / "template" / name).read_text(encoding="utf-8")

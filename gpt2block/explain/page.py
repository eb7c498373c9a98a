"""A page: the data of a forward pass in the HTML template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from gpt2block.errors import InputError, printable
from gpt2block.files import replacing

FRAME_HEIGHT = 900  # pixels, in a notebook
# "<" would let a text end the script element that holds the data, or start a comment in it.
_ESCAPED = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026"}


class _Template(Template):
    """string.Template with @@name, as JavaScript uses the dollar sign."""

    delimiter = "@@"


class Page:
    """An HTML page in one file, which needs no network; in a notebook, the page in a frame.

    data: what the page shows, as in its JSON.
    """

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data = data

    def __repr__(self) -> str:
        model, tokens = self.data["model"]["name"], len(self.data["tokens"])
        return f"Page({model!r}, {tokens} tokens, {len(self.html.encode()):,} bytes)"

    @property
    def title(self) -> str:
        """The name of the model and the beginning of the text, in printable characters."""
        text = " ".join(self.data["text"].split())
        start = text if len(text) <= 60 else f"{text[:59]}…"
        return printable(f"{start} · {self.data['model']['name']}")

    @property
    def html(self) -> str:
        """The whole page."""
        template = files("gpt2block.explain").joinpath("page.html").read_text(encoding="utf-8")
        text = json.dumps(self.data, separators=(",", ":"), allow_nan=False)
        return _Template(template).substitute(
            title=escape(self.title), data=text.translate(_ESCAPED)
        )

    def save(self, path: str | Path) -> Path:
        """Write the page to a file and return its path. Raises InputError where it cannot."""
        path = Path(path)
        check_file(path)
        html = self.html.encode()
        try:
            with replacing(path) as file:
                file.write(html)
        except (OSError, ValueError) as error:  # ValueError: a null character in the path
            reason = getattr(error, "strerror", None) or error
            raise InputError(f"{path}: cannot be written: {reason}") from error
        return path

    def _repr_html_(self) -> str:
        return (
            f'<iframe title="{escape(self.title)}" srcdoc="{escape(self.html)}" '
            f'style="width: 100%; height: {FRAME_HEIGHT}px; border: 0"></iframe>'
        )


def check_file(path: Path) -> None:
    """Raise InputError unless a file can have this path; to be called before a long computation."""
    if path.is_dir():
        raise InputError(f"{path}: expected a file, got a directory")
    if not path.parent.is_dir():
        raise InputError(f"{path}: there is no directory {path.parent}: create it first")

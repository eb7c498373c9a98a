"""Pages of the site for notebooks: their texts, code and stored outputs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

IMAGES = ("image/png", "image/jpeg")
FORMS = (*IMAGES, "image/svg+xml", "text/html", "text/markdown", "text/plain")  # best form first
_ESCAPE_SEQUENCE = re.compile(r"\x1b\[[0-9;]*m")  # colors of a terminal


def markdown(notebook: str) -> str:
    """Return the page of a notebook, from its JSON."""
    document = json.loads(notebook)
    language = document["metadata"]["language_info"]["name"]
    parts = []
    for cell in document["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text)
        elif cell["cell_type"] == "code" and text:
            parts.append(_block(language, text))
            parts += (part for output in cell["outputs"] for part in _shown(output))
    return "\n\n".join(parts) + "\n"


def _shown(output: Mapping[str, Any]) -> Iterator[str]:
    """Return an output in the best form that it has, like Jupyter."""
    kind = output["output_type"]
    data = {name: "".join(value) for name, value in output.get("data", {}).items() if name in FORMS}
    if kind == "stream":
        data["text/plain"] = "".join(output["text"])
    elif kind == "error":
        data["text/plain"] = "\n".join(output["traceback"])
    image = next((name for name in IMAGES if name in data), None)
    if "text/html" in data or "image/svg+xml" in data:
        yield f'<div class="output">{data.get("text/html") or data["image/svg+xml"]}</div>'
    elif image:
        yield f"![Output of the code above](data:{image};base64,{data[image].strip()})"
    elif "text/markdown" in data:
        yield data["text/markdown"]
    elif "text/plain" in data:
        yield _block("text", _ESCAPE_SEQUENCE.sub("", data["text/plain"]))


def _block(language: str, text: str) -> str:
    """Return a block of code with fences longer than any fence in the text."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"

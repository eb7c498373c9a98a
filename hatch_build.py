"""A build hook: the README as the description of the package, which has no other files.

In a checkout its links are paths of the repository. In the wheel they lead to the repository that
`[project.urls]` names as Source, images to the raw file. Where no Source is named, a link becomes
its text, and an image is left out.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)\s]+)\)")


def description(text: str, source: str | None) -> str:
    """The text of a page without relative links, for a repository at the address `source`."""

    def link(match: re.Match[str]) -> str:
        image, shown, path = match.groups()
        if source is None:
            return "" if image else shown
        kind = "raw" if image else "blob"
        return f"{image}[{shown}]({source}/{kind}/main/{path})"

    return LINK.sub(link, text)


class CustomMetadataHook(MetadataHookInterface):
    """Fills the dynamic field `readme` of the project."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        text = description(text, metadata.get("urls", {}).get("Source"))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}

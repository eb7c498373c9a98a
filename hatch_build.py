"""A build hook: makes the relative links of the README absolute, as PyPI has no other files.

In a checkout the links are paths of the repository. In the wheel's description they lead to the
repository that `[project.urls]` names as Source, images to the raw file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)(\[[^\]]*\])\((?!https?:|#)([^)\s]+)\)")


def absolute(text: str, source: str) -> str:
    """The text of a page with absolute links to a repository at the address `source`."""

    def link(match: re.Match[str]) -> str:
        image, shown, path = match.groups()
        kind = "raw" if image else "blob"
        return f"{image}{shown}({source}/{kind}/main/{path})"

    return LINK.sub(link, text)


class CustomMetadataHook(MetadataHookInterface):
    """Fills the dynamic field `readme` of the project."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        text = absolute(text, metadata["urls"]["Source"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}

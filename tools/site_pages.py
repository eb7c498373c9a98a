"""A hook of mkdocs.yml: pages that lie outside docs/, excerpts, and links to the sources.

Links in the repository are relative paths, which work in a checkout. On the site, a link to a page
leads to that page. Any other link that leaves docs/ leads to the file in the repository that
`[project.urls]` names as Source; where it names none, the link becomes its text.
"""

from __future__ import annotations

import posixpath
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import excerpts
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = {  # file of the repository → page of the site
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "kernels_cu/README.md": "kernels.md",
    "examples/README.md": "examples.md",
}
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s:#]+)((?:#[^)\s]*)?)\)")
CODE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def source_address() -> str | None:
    """The address of the repository, if `[project.urls]` has one."""
    found = re.search(r'^Source = "(.*)"$', (ROOT / "pyproject.toml").read_text("utf-8"), re.M)
    return found[1] if found else None


def on_post_template(output: str, config: Any, **_: Any) -> str:
    """Leave out 404.html and sitemap.xml where mkdocs.yml has no site_url, which they need."""
    return output if config.site_url else ""


def on_files(files: Files, config: Any) -> Files:
    """Add the pages outside docs/."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Insert the excerpts of a page, and resolve its links except in blocks of code."""
    at = page.file.src_uri
    source = next((file for file, name in PAGES.items() if name == at), f"docs/{at}")
    markdown = excerpts.insert(markdown, (ROOT / source).parent)
    ends = [0, *(end for block in CODE.finditer(markdown) for end in block.span()), len(markdown)]
    parts = [markdown[a:b] for a, b in pairwise(ends)]

    def resolved(link: re.Match[str]) -> str:
        text, path, anchor = link.groups()
        address = target(path, source, at)
        return f"[{text}]({address}{anchor})" if address else text

    parts[::2] = [LINK.sub(resolved, part) for part in parts[::2]]
    return "".join(parts)


def target(link: str, source: str, page: str) -> str | None:
    """Where a link of the file `source` leads from the page `page`: a page, or an address."""
    file = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    if file.startswith("docs/"):
        file = file.removeprefix("docs/")
    elif file in PAGES:
        file = PAGES[file]
    else:
        kind = "tree" if (ROOT / file).is_dir() else "blob"
        address = source_address()
        return address and f"{address}/{kind}/main/{file}"
    return posixpath.relpath(file, posixpath.dirname(page) or ".")

"""A hook of mkdocs.yml: pages of files outside docs/, and links to the sources.

Links in the repository are relative paths, which work in a checkout. On the site, a link to a page
leads to this page. Any other link that leaves docs/ leads to the file in the repository that
`[project.urls]` names as Source; without a Source, the link is replaced by its text.

Files of kernels_cu/ and notebooks of examples/ are converted to pages when the site is built. If a
page names a file of kernels_cu as code, both pages link to each other.

The build fails if a page would load a file that is missing, or anything from the network.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import explain_pages
import notebook_pages
from kernel_pages import KernelPages, Page
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = {  # file of the repository → page of the site
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "kernels_cu/README.md": "kernels.md",
    "examples/README.md": "examples.md",
}
NOTEBOOKS = {
    f"examples/{file.name}": f"examples/{file.stem}.md"
    for file in sorted((ROOT / "examples").glob("*.ipynb"))
}
KERNELS = {f"kernels_cu/{file}": f"kernels/{file}.md" for file in KernelPages().sources}
OUTSIDE = {**PAGES, **NOTEBOOKS, **KERNELS}
SECTIONS = {"examples.md": list(NOTEBOOKS.values()), "kernels.md": list(KERNELS.values())}
# Weights of pages in searches by the first pattern that matches; the changelog is not searched.
SEARCH = {
    r"learn/\d.*": {"boost": 8},
    r"learn/.*": {"boost": 4},
    r"(block|contributing)\.md": {"boost": 12},  # their titles are general
    r"kernels/.*": {"boost": 0.2},
    r"changelog\.md": {"exclude": True},
}
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s:#]+)((?:#[^)\s]*)?)\)")
CODE = re.compile(r"^( *)```.*?^\1```$", re.DOTALL | re.MULTILINE)
KERNEL = re.compile(rf"{LINK.pattern}|`((?:\w+/)+\w+\.cuh?)`")
LINE = re.compile(r'<a id="__codelineno-\d+-(\d+)" name="[^"]*"></a><a href="[^"]*">')

LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
NETWORK = re.compile(r"(https?:)?//")
IMPORTED = re.compile(rf"(url\(|@import)\s*[\"']?{NETWORK.pattern}")


class Loaded(HTMLParser):
    """Addresses of the files that a browser loads for a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag in LOADED and values.get("rel") not in ("next", "prev", "canonical"):
            self.found.append(values.get(LOADED[tag]) or "")


def source_address() -> str | None:
    """Return the address of the repository, if `[project.urls]` has one."""
    match = re.search(r'^Source = "(.*)"$', (ROOT / "pyproject.toml").read_text("utf-8"), re.M)
    return match[1] if match else None


def on_config(config: Any) -> Any:
    """Add the pages of notebooks and kernels to the navigation, below their index."""
    config.nav = [_with_sections(item) for item in config.nav]
    return config


def _with_sections(item: Any) -> Any:
    if isinstance(item, dict):
        ((title, inside),) = item.items()
        if isinstance(inside, list):
            return {title: [_with_sections(each) for each in inside]}
        if inside in SECTIONS:
            return {title: [inside, *_by_folder(SECTIONS[inside])]}
    return item


def _by_folder(pages: list[str]) -> Iterator[Any]:
    for folder, group in groupby(pages, lambda page: page.split("/")[1:-1]):
        entries = [{Path(page).stem: page} if folder else page for page in group]
        yield from [{folder[0]: entries}] if folder else entries


def on_post_template(output: str, template_name: str, config: Any, **_: Any) -> str:
    """Remove sitemap.xml if mkdocs.yml has no site_url, and the 404.html of the theme.

    The theme's 404.html needs to know the folder of the site; docs/404.html finds the folder.
    """
    return output if config.site_url and template_name != "404.html" else ""


def on_files(files: Files, config: Any) -> Files:
    """Add pages of files outside docs/, and pages of `gpt2block explain`."""
    kernels, mentioned = KernelPages(), _mentions()
    for source, page in OUTSIDE.items():
        if source in KERNELS:
            text = kernels.page(source.partition("/")[2], mentioned.get(source, ()))
        else:
            text = (ROOT / source).read_text("utf-8")
        if source in NOTEBOOKS:
            text = notebook_pages.markdown(text)
        files.append(File.generated(config, page, content=text))
    for model in explain_pages.MODELS:
        address = explain_pages.address(model)
        files.append(File.generated(config, address, content=explain_pages.page(model)))
    return files


def _mentions() -> dict[str, list[Page]]:
    """Return the pages that name each file of kernels_cu, with chapters first."""
    mentions: dict[str, list[Page]] = {}
    chapters = sorted((ROOT / "docs" / "learn").glob("*.md"))
    for path in [*chapters, *sorted((ROOT / "docs").glob("*.md"))]:
        page = path.relative_to(ROOT).as_posix()
        text = path.read_text("utf-8")
        title = re.search(r"^# (.*)$", text, re.MULTILINE)
        links = (link.groups() for link in KERNEL.finditer(CODE.sub("", text)))
        named = (_kernel(name) if name else _file(to, page) for _, to, _, name in links)
        for file in dict.fromkeys(file for file in named if file in KERNELS):
            mentions.setdefault(file, []).append((title[1] if title else path.stem, page))
    return mentions


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Resolve the links of a page except in blocks of code."""
    at = page.file.src_uri
    source = next((file for file, name in OUTSIDE.items() if name == at), f"docs/{at}")
    ends = [0, *(end for block in CODE.finditer(markdown) for end in block.span()), len(markdown)]
    parts = [markdown[a:b] for a, b in pairwise(ends)]

    def resolved(link: re.Match[str]) -> str:
        text, path, anchor, name = link.groups()
        file = _kernel(name) if name else _file(path, source)
        address = file and target(file, at)
        shown = link[0] if name else text
        return f"[{shown}]({address}{anchor or ''})" if address else shown

    parts[::2] = [KERNEL.sub(resolved, part) for part in parts[::2]]
    return explain_pages.insert("".join(parts))


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Rank a page in searches, and name the lines of its source L1, L2 …, with links."""
    at = page.file.src_uri
    rank = next((rank for pattern, rank in SEARCH.items() if re.match(pattern, at)), {})
    page.meta.setdefault("search", rank)
    if at in KERNELS.values():
        page.meta["hide"] = ["toc"]  # makes room for lines of 120 columns
        page.meta["title"] = at.removeprefix("kernels/").removesuffix(".md")
    page.present_anchor_ids.update(f"L{number}" for number in LINE.findall(html))
    return LINE.sub(r'<a id="L\1"></a><a href="#L\1" tabindex="-1">', html)


def on_post_build(config: Any) -> None:
    """Raise PluginError if a page loads anything from the network, or a file that is missing."""
    site = Path(config.site_dir)
    for page in sorted(site.rglob("*.html")):
        for address in Loaded(page.read_text("utf-8")).found:
            local = address and not address.startswith(("data:", "#", ".", "/"))
            missing = local and not (page.parent / address.partition("?")[0]).exists()
            if missing or NETWORK.match(address):
                raise PluginError(f"{page.relative_to(site)} loads {address}")
    for style in site.rglob("*.css"):
        if found := IMPORTED.search(style.read_text("utf-8")):
            raise PluginError(f"{style.relative_to(site)} loads {found[0]}")


def target(file: str, page: str) -> str | None:
    """Return the target of a page's link to a file of the repository: its page, or an address."""
    if file.startswith("docs/"):
        file = file.removeprefix("docs/")
    elif file in OUTSIDE:
        file = OUTSIDE[file]
    else:
        kind = "tree" if (ROOT / file).is_dir() else "blob"
        address = source_address()
        return address and f"{address}/{kind}/main/{file}"
    return posixpath.relpath(file, posixpath.dirname(page) or ".")


def _file(link: str, source: str) -> str:
    """Return the file of the repository that a link in the file `source` leads to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def _kernel(name: str) -> str | None:
    """Return the file of kernels_cu with a name such as lib/rows.cuh, if there is one."""
    return f"kernels_cu/{name}" if f"kernels_cu/{name}" in KERNELS else None

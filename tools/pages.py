"""Write the parts of documents that come from code and tables, and check links to files.

    python tools/pages.py           # write these parts
    python tools/pages.py --check   # write nothing, and name the documents that differ

These parts are excerpts of source files, line numbers in links, the table of PTX instructions, the
index of kernels, and the charts. The exit code is 1 if a link leads nowhere or a document differs.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import charts
import instruction_table
import kernel_index
from excerpts import insert

ROOT = Path(__file__).parents[1]
PAGES = (
    *sorted(ROOT.glob("*.md")),
    *(ROOT / folder / "README.md" for folder in ("kernels_cu", "examples")),
    *sorted((ROOT / "docs").rglob("*.md")),
)
TABLES = {
    ROOT / "docs" / "emulator.md": instruction_table.table,
    ROOT / "kernels_cu" / "README.md": kernel_index.table,
}
DEFINITION = re.compile(r"(\[`(\w+)`\]\(([^)#]+\.py)#L)(\d+)\)")  # a link to a line of Python
LINK = re.compile(r"\]\(([^)#:]*)(?:#([^)]*))?\)")
KERNEL = re.compile(r"\[`(\w+)`\]\(([^)#]+\.cuh?)\)")
NAMED = re.compile(r"`((?:tests|tools|examples|gpt2block)/[\w./]+)`")
BLOCK = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def with_table(page: str, table: str) -> str:
    """Return a page whose table with the same head is replaced. Raises ValueError without one."""
    head = "".join(table.splitlines(keepends=True)[:2])
    parts = re.split(re.escape(head) + r"(?:\|.*\n)+", page)
    if len(parts) != 2:
        raise ValueError(f"expected one table with this head, found {len(parts) - 1}:\n{head}")
    return table.join(parts)


def with_lines(page: str, folder: Path) -> str:
    """Return a page whose links to classes and functions have the lines of the definitions."""

    def renewed(link: re.Match[str]) -> str:
        begin, name, file, number = link.groups()
        lines = (folder / file).read_text("utf-8").splitlines()
        start = re.compile(rf" *(def|class) {name}\b")
        starts = [at for at, line in enumerate(lines, 1) if start.match(line)]
        if not starts:
            raise ValueError(f"{file} has no class or function {name}")
        return f"{begin}{min(starts, key=lambda at: abs(at - int(number)))})"

    return DEFINITION.sub(renewed, page)


def documents() -> Iterator[tuple[Path, str]]:
    """Yield each document, and its text with the parts that come from code and tables."""
    for page in PAGES:
        text = with_lines(insert(page.read_text("utf-8"), page.parent), page.parent)
        yield page, with_table(text, TABLES[page]()) if page in TABLES else text
    for name, draw in charts.CHARTS.items():
        yield charts.FOLDER / f"{name}.svg", draw().svg()


def anchors(text: str) -> set[str]:
    """Return the anchors of a page, as GitHub derives them from headings."""
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", text), re.MULTILINE)
    slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return slugs | set(re.findall(r'<a id="([\w-]+)"></a>', text))


def broken(page: Path) -> Iterator[str]:
    """Yield links of a page that lead nowhere, and names of files and kernels that do not exist."""
    text = page.read_text("utf-8")
    for link, anchor in LINK.findall(BLOCK.sub("", text)):
        target = (page.parent / link).resolve() if link else page
        known = target.suffix != ".md" or not anchor
        if not target.exists() or not (known or anchor in anchors(target.read_text("utf-8"))):
            yield f"{link}#{anchor}" if anchor else link
    for name, file in KERNEL.findall(text):
        if not re.search(rf"\b{name}\b", (page.parent / file).read_text("utf-8")):
            yield f"{name} in {file}"
    yield from (name for name in NAMED.findall(text) if not (ROOT / name).exists())


def main() -> int:
    """Write or check all documents."""
    problems = []
    for path, text in documents():
        name = path.relative_to(ROOT)
        if path.read_text("utf-8") != text:
            if "--check" in sys.argv[1:]:
                problems.append(f"{name} differs from its sources: run python tools/pages.py")
            else:
                path.write_text(text, "utf-8")
                print(f"{name} is written")
    for page in PAGES:
        problems += (f"{page.relative_to(ROOT)}: {link} is not there" for link in broken(page))
    print(*(problems or ["documents and sources agree"]), sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())

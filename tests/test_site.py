"""The documentation site: it builds without a warning, and needs no network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html import unescape
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import charts
import excerpts
import pictures
import pytest

import gpt2block
from gpt2block.ops.registry import OPERATIONS

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
CHAPTERS = sorted((DOCS / "learn").glob("[1-9]*.md"))
DRAWN = {**pictures.PICTURES, **charts.CHARTS}
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}


class Loaded(HTMLParser):
    """The addresses of what a browser loads for a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag in LOADED and values.get("rel") not in ("next", "prev", "canonical"):
            self.found.append(values.get(LOADED[tag]) or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for name in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(name, reason="building the site needs the extra docs")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_no_page_loads_anything_from_the_network(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 25
    for page in pages:
        for address in Loaded(page.read_text(encoding="utf-8")).found:
            assert not re.match(r"(https?:)?//", address), (page.name, address)
            if address and not address.startswith(("data:", "#", ".", "/")):
                assert (page.parent / address.split("?")[0]).exists(), (page.name, address)
    for style in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*[\"']?(https?:)?//", style.read_text("utf-8"))


def test_every_chapter_has_its_kernel_picture_figure_and_exercise(site: Path) -> None:
    assert len(CHAPTERS) == 6
    for chapter in CHAPTERS:
        page = (site / "learn" / f"{chapter.stem}.html").read_text(encoding="utf-8")
        text = unescape(re.sub(r"<[^>]+>", "", page))
        assert re.search(r"__global__|__device__", text), chapter.name
        assert "<!-- source:" not in page
        assert "images/" in page
        assert "NVIDIA H200" in text
        assert 'id="exercise"' in page


def test_the_exercises_name_the_sizes_that_the_emulator_tries() -> None:
    registers = (DOCS / "learn" / "3-registers.md").read_text(encoding="utf-8")
    coarsening = (DOCS / "learn" / "5-coarsening.md").read_text(encoding="utf-8")
    layernorm = [sizes for sizes, _ in OPERATIONS["layernorm"].cases]
    softmax = [sizes["T"] for sizes, _ in OPERATIONS["softmax"].cases]
    assert "rows of 24, 33 and 769 channels" in registers
    assert {24, 33, 769} <= {sizes["C"] for sizes in layernorm}
    assert max(sizes["C"] for sizes in layernorm if sizes["C"] % 4 == 0) <= 4 * 256  # held[0]
    assert f"rows of {softmax[0]}, {softmax[1]} and {softmax[2]}" in registers
    assert all(T % 4 for T in softmax)
    assert "tries 1, 3 and 5 rows" in coarsening
    assert {1, 3, 5} <= {sizes["B"] * sizes["T"] for sizes in layernorm}


def test_the_reference_has_the_docstrings(site: Path) -> None:
    text = unescape(re.sub(r"<[^>]+>", "", (site / "api.html").read_text(encoding="utf-8")))
    assert "Load a checkpoint, one tensor at a time." in text
    assert "softmax(Q Kᵀ / sqrt(HS)) V for each head." in text


def test_the_reference_has_every_public_name_and_tables_of_parameters(site: Path) -> None:
    page = (site / "api.html").read_text(encoding="utf-8")
    ids = re.findall(r'id="gpt2block\.([\w.]+)"', page)
    assert {name.rpartition(".")[2] for name in ids} >= {*gpt2block.__all__} - {"reference"}
    assert "model.GPT2.__call__" in ids
    rows = [re.sub(r"<[^>]+>|\s+", " ", row) for row in re.findall(r"<tr.*?</tr>", page, re.S)]
    assert any(row.split()[:3] == ["top_k", "int", "sample"] for row in rows)
    assert any(row.split()[:2] == ["allow_nonfinite", "bool"] for row in rows)
    assert any(row.split()[:2] == ["finish_reason", "FinishReason"] for row in rows)
    assert page.count("<table") > 30


def test_descriptions_of_parameters_become_a_section() -> None:
    pytest.importorskip("griffe", reason="building the site needs the extra docs")
    import api_tables  # noqa: PLC0415

    text = "Do it.\n\nx: first. a, b: as in f: always.\nOf c: no. y: none.\nRaises E: x: 3.\n\nEnd."
    assert api_tables.with_section(text, ["a", "b", "c", "x"], "Parameters") == (
        "Do it.\n\nRaises E: x: 3.\n\nEnd.\n\nParameters\n----------\n"
        "x\n    first.\na\n    as in f: always. Of c: no. y: none.\n"
        "b\n    as in f: always. Of c: no. y: none."
    )
    for names in ([], ["z"]):
        assert api_tables.with_section(text, names, "Parameters") == text


def test_an_excerpt_is_a_block_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "a.cu"
    file.write_text(
        "int x;\n  // doubles\n#pragma unroll\n  for (;;) {  // {\n    { y(); }\n  }\nz();\n"
    )
    expected = "// doubles\n#pragma unroll\nfor (;;) {  // {\n  { y(); }\n}"
    assert excerpts.excerpt(file, "for (") == expected
    page = "<!-- source: for ( -->\n[`a.cu`](a.cu)\n"
    assert excerpts.insert(page, tmp_path) == f"```cuda\n{expected}\n```\n\n[`a.cu`](a.cu)\n"
    for text in ("while (", "y"):
        file.write_text("y();\ny();\n")
        with pytest.raises(ValueError, match="expected once"):
            excerpts.excerpt(file, text)
    python = tmp_path / "a.py"
    python.write_text("@late\ndef f():\n    return 1\n\nX = 2\n")
    assert excerpts.excerpt(python, "f") == "def f():\n    return 1"


def test_every_excerpt_of_a_chapter_is_there() -> None:
    for chapter in CHAPTERS:
        text = chapter.read_text(encoding="utf-8")
        assert excerpts.MARK.search(text), chapter.name
        assert "<!-- source:" not in excerpts.insert(text, chapter.parent)


@pytest.mark.parametrize("source", [None, "https://b.c/d"])
def test_links_out_of_the_docs_lead_to_the_repository_if_it_has_an_address(
    source: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mkdocs", reason="building the site needs the extra docs")
    import site_pages  # noqa: PLC0415

    def resolved(page: str, text: str) -> str:
        return site_pages.on_page_markdown(
            text, SimpleNamespace(file=SimpleNamespace(src_uri=page))
        )

    def linked(text: str, path: str) -> str:
        return f"[{text}]({source}/{path})" if source else text

    monkeypatch.setattr(site_pages, "source_address", lambda: source)
    assert resolved("learn/a.md", "[a](../gpt2.md#b)") == "[a](../gpt2.md#b)"
    assert resolved("a.md", "[a](../kernels_cu/README.md)") == "[a](kernels.md)"
    assert resolved("a.md", "[`a`](../gpt2block/ops)") == linked("`a`", "tree/main/gpt2block/ops")
    assert resolved("kernels.md", "[a](lib/rows.cuh#x)") == linked(
        "a", "blob/main/kernels_cu/lib/rows.cuh#x"
    )
    assert resolved("kernels.md", "[a](../docs/performance.md)") == "[a](performance.md)"
    assert resolved("a.md", "[a](https://b.c/d)") == "[a](https://b.c/d)"
    code = "```\n[a](../b)\n```"
    assert resolved("a.md", code) == code


def test_the_site_has_no_file_that_needs_its_address(site: Path) -> None:
    assert "site_url:" not in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert [name for name in ("404.html", "sitemap.xml") if (site / name).exists()] == []


# Pictures


@pytest.mark.parametrize("name", DRAWN)
def test_a_picture_is_the_drawn_one(name: str) -> None:
    """`python tools/pictures.py` and `python tools/charts.py` draw them again."""
    assert (DOCS / "images" / f"{name}.svg").read_text(encoding="utf-8") == DRAWN[name]().svg()


def test_every_picture_is_drawn() -> None:
    assert {file.stem for file in (DOCS / "images").glob("*.svg")} == set(DRAWN)


def texts(svg: str) -> list[tuple[str, float, float, float, float]]:
    """Each text of a picture with its left, right, top and bottom.

    By the width of a letter: 0.55 of its size on average, 0.6 with bold or fixed width.
    """
    size = re.compile(
        r'<text x="([\d.]+)" y="([\d.]+)" font-size="(\d+)"[^>]*text-anchor="(\w+)"([^>]*)>([^<]*)<'
    )
    found = []
    for x, y, points, anchor, style, text in size.findall(svg):
        height = int(points)
        width = len(unescape(text)) * height * (0.6 if style else 0.55)
        left = float(x) - {"start": 0.0, "middle": width / 2, "end": width}[anchor]
        found.append((text, left, left + width, float(y) - 0.75 * height, float(y)))
    return found


@pytest.mark.parametrize("name", DRAWN)
def test_no_text_leaves_a_picture(name: str) -> None:
    svg = DRAWN[name]().svg()
    height = float(re.search(r'viewBox="0 0 800 ([\d.]+)"', svg)[1])  # type: ignore[index]
    for text, left, right, _, bottom in texts(svg):
        assert left >= 0, text
        assert right <= 800, text
        assert bottom <= height - 6, text


@pytest.mark.parametrize("name", DRAWN)
def test_no_text_crosses_another(name: str) -> None:
    for a, b in combinations(texts(DRAWN[name]().svg()), 2):
        apart = a[1] >= b[2] or b[1] >= a[2] or a[3] >= b[4] or b[3] >= a[4]
        assert apart, (a[0], b[0])


def test_the_charts_have_the_figures_of_the_tables() -> None:
    trimat = charts.trimat().svg()
    variants = [variant.name for variant in OPERATIONS["trimat"].variants]
    assert all(f">{name}<" in trimat for name in variants)
    assert all(f">{us} µs<" in trimat for us in (3546, 698, 499, 243, 205, 98))
    text = (DOCS / "performance.md").read_text(encoding="utf-8")
    assert "copy reached 4239 GB/s" in text  # the ceilings in the charts
    assert "cuBLAS reaches 788 on a square of 8192" in text
    (fast,) = re.findall(r"block is ([\d.]+ to [\d.]+) times as fast", charts.block().title)
    for page in (ROOT / "README.md", DOCS / "index.md", DOCS / "performance.md"):
        assert f"block is {fast} times as fast" in page.read_text(encoding="utf-8"), page.name
    layernorm = charts.layernorm().svg()
    assert [n for n in range(1, 7) if f">LayerNorm {n}<" in layernorm] == [1, 2, 3, 4, 5, 6]

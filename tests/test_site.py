"""The documentation site: it builds without a warning, and works from disk in a browser."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gpt2block
from tests.engine import test_explain_page as explain_page

ROOT = Path(__file__).parent.parent
FIRST = {  # words → the page that a search finds first
    "reduction": "learn/2-reductions",
    "shared memory": "learn/4-shared-memory",
    "install": "start",
    "own weights": "block",
    "add a kernel": "contributing",
}


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


def test_the_reference_has_every_public_name(site: Path) -> None:
    page = (site / "api.html").read_text(encoding="utf-8")
    ids = re.findall(r'id="gpt2block\.([\w.]+)"', page)
    assert {name.rpartition(".")[2] for name in ids} >= {*gpt2block.__all__} - {"reference"}
    assert "model.GPT2.__call__" in ids


in_browser, browser = explain_page.pytestmark, explain_page.browser  # a mark, a fixture


def first_result(browser: Any, words: str) -> str:
    """Return the page that a search finds first."""
    field = browser.find_element("css selector", ".md-search__input")
    browser.execute_script("arguments[0].focus()", field)
    field.send_keys(words)
    browser.implicitly_wait(10)
    link = browser.find_element("css selector", ".md-search-result__item > a")
    return str(link.get_attribute("href")).partition("?")[0]


@in_browser
def test_the_site_works_from_disk(browser: Any, site: Path) -> None:
    """A search finds the right page, and nothing is loaded from the network."""
    for words, page in FIRST.items():
        browser.get(f"{site.as_uri()}/index.html")
        assert first_result(browser, words) == f"{site.as_uri()}/{page}.html"
        script = "return performance.getEntriesByType('resource').map(entry => entry.name)"
        loaded = browser.execute_script(script)
        assert [name for name in loaded if not name.startswith((site.as_uri(), "data:"))] == []


@in_browser
@pytest.mark.parametrize("width", [1280, 390])
def test_no_page_is_wider_than_the_screen(browser: Any, site: Path, width: int) -> None:
    screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    kernel = "kernels/learn/layernorm/ladder.cu.html"  # has lines of 120 columns
    notebook = f"examples/{next((ROOT / 'examples').glob('*.ipynb')).stem}.html"
    chapter = "learn/2-reductions.html"
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

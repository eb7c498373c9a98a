"""The page of `explain` in a headless Chromium, which runs its script."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpt2block import GPT2, Llama, LlamaWeights
from gpt2block.cuda import kernels
from gpt2block.explain import Page, collect
from gpt2block.sampling import Sampling, masses
from tests.markov import byte_encoding
from tests.test_explain import EVIL, LLAMA
from tests.test_explain import model as bundled

webdriver = pytest.importorskip("selenium.webdriver", reason="the browser test needs selenium")
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (BROWSER and DRIVER), reason="the browser test needs chromium and chromedriver"
)
TEXT = "To be, or not to be"
LAYER = 2
ARGUMENTS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
    "--force-prefers-reduced-motion",
)  # fmt: skip


@pytest.fixture(scope="module")
def model() -> GPT2:
    return bundled()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from selenium.webdriver.chrome.service import Service  # noqa: PLC0415

    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for argument in (*ARGUMENTS, "--window-size=1280,900"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def path(model: GPT2, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model.explain(TEXT, layer=LAYER).save(tmp_path_factory.mktemp("page") / "page.html")


@pytest.fixture
def page(browser: Any, path: Path) -> Any:
    """The page, just loaded; whatever a test does to it causes no message in the console."""
    load(browser, path)
    yield browser
    assert browser.get_log("browser") == []


def load(browser: Any, path: Path) -> None:
    browser.get(path.as_uri())
    assert browser.get_log("browser") == []


def find(page: Any, selector: str) -> Any:
    return page.find_element("css selector", selector)


def press(page: Any, *keys: str) -> None:
    webdriver.ActionChains(page).send_keys(*keys).perform()


def focused(page: Any, attribute: str) -> str | None:
    found: str | None = page.switch_to.active_element.get_attribute(attribute)
    return found


def slide(page: Any, **values: float) -> None:
    """Move sliders as a user does: each has its new value when it sends `input`."""
    for name, value in values.items():
        script = "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('input'))"
        page.execute_script(script, find(page, f"#{name.replace('_', '-')}"), str(value))


def test_the_page_loads_nothing_and_shows_the_pass(page: Any, model: GPT2) -> None:
    assert page.title == f"{TEXT} · shakespeare"
    assert find(page, "h1").text == TEXT
    assert page.execute_script("return performance.getEntriesByType('resource').length") == 0
    strip = [each.text for each in page.find_elements("css selector", "#strip .token")]
    assert "".join(strip) == TEXT.replace(" ", "·")
    parts = [each.text.split("\n")[0] for each in page.find_elements("css selector", "#flow li")]
    blocks = [f"block {layer}" for layer in range(6)]
    assert parts == ["embedding", *blocks, "ln_f", "logits", "next token"]
    assert find(page, '#flow [aria-pressed="true"]').text.startswith(f"block {LAYER}")
    lens = page.find_elements("css selector", "#lens-table tbody tr")
    assert len(lens) == model.config.n_layer + 1


def test_step_seven_shows_the_source_of_ff1(page: Any) -> None:
    step = page.find_elements("css selector", ".step")[6]
    assert step.accessible_name.startswith("Step 7: ff1, matmul_bias, joined in the fused plan")
    assert step.accessible_name.endswith(f"; {find(step, 'small').text}")
    step.click()
    assert find(page, "#step-title").text == "7 · ff1"
    assert find(page, ".formula math").is_displayed()
    assert find(page, ".formula math").text.replace("\n", "").endswith("+bn")
    assert "(19, 256)" in find(page, ".shapes").text
    assert "computes ff1 and gelu in one kernel, and never stores ff1" in find(page, "#detail").text
    assert find(page, '[role="tab"][aria-selected="true"]').text.endswith("matmul_bias_tiled")
    shown = [row.get_property("textContent") for row in page.find_elements("css selector", ".row")]
    assert shown == kernels.read_source("matmul/skeleton.cu").splitlines()
    assert "void matmul_bias_tiled(" in find(page, ".row.here").text
    comment = find(page, ".t-comment")
    assert comment.text.startswith("// Matrix product with bias")
    find(page, '[role="tab"]:last-child').click()
    assert "def matmul_bias(" in find(page, ".row.here").text


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.8, "top_k": 5},
        {"temperature": 1.45, "top_p": 0.9},
        {"temperature": 0.3, "top_k": 12, "top_p": 0.55},
        {"temperature": 2.0, "top_k": 1},
        {"temperature": 1.0, "top_p": 0.0},
    ],
)
def test_sliders_give_the_distribution_of_the_sampler(
    page: Any, model: GPT2, options: dict[str, Any]
) -> None:
    slide(page, **options)
    expected = masses(model(model._tokens(TEXT))[-1], Sampling(**options)).astype(np.float64)
    expected /= expected.sum()
    found = np.array(page.execute_script(
        "return Array.from(distribution(...['temperature', 'top-k', 'top-p']"
        ".map(id => Number(document.getElementById(id).value))))"
    ))  # fmt: skip
    np.testing.assert_array_equal(found > 0, expected > 0)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    for row in page.find_elements("css selector", "#next-rows tr"):
        p = expected[int(row.get_attribute("data-id"))]
        assert float(row.get_attribute("data-p")) == pytest.approx(p, rel=1e-6)
    kept = int((expected > 0).sum())
    assert find(page, "#next-readout").text.startswith(f"{kept} of 256 tokens can be drawn")


def test_temperature_zero_is_greedy(page: Any, model: GPT2) -> None:
    slide(page, temperature=0)
    best = model(model._tokens(TEXT))[-1].argmax()
    row = find(page, "#next-rows tr")
    assert (int(row.get_attribute("data-id")), row.get_attribute("data-p")) == (best, "1")


def test_every_step_is_reached_by_keyboard(page: Any) -> None:
    from selenium.webdriver.common.keys import Keys  # noqa: PLC0415

    seen: list[str] = []
    parts: list[str] = []
    for _ in range(60):
        press(page, Keys.TAB)
        seen += [name for name in [focused(page, "data-step")] if name]
        parts += [name for name in [focused(page, "data-part")] if name]
    ten = ["ln1", "qkv", "attn", "proj", "x1", "ln2", "ff1", "gelu", "ff2", "output"]
    assert seen[:10] == ten
    assert parts[:10] == ["embedding", *"012345", "ln_f", "logits", "next"]
    page.execute_script("document.querySelector('[data-step=gelu]').focus()")
    press(page, Keys.ENTER)
    assert find(page, "#step-title").text == "8 · gelu"
    assert focused(page, "data-step") == "gelu"
    page.execute_script("document.querySelector('[data-part=\"4\"]').focus()")
    press(page, Keys.SPACE)
    assert "block 4" in find(page, "#detail header").text
    assert find(page, "#step-title").text == "8 · gelu"


def test_arrow_keys_read_the_heatmaps(page: Any, model: GPT2) -> None:
    from selenium.webdriver.common.keys import Keys  # noqa: PLC0415

    ids = model._tokens(TEXT)
    page.execute_script("selectStep('ln1'); document.querySelector('#detail canvas').focus()")
    press(page, *[Keys.ARROW_DOWN] * 3, *[Keys.ARROW_RIGHT] * 7)
    name, _, value = find(page, "#detail .readout").text.partition(": ")
    assert name == "token 3 “b”, channel 7"
    expected = model.trace(ids)[f"h.{LAYER}.ln1"][3, 7]
    assert float(value.replace("−", "-")) == pytest.approx(expected, rel=1e-3)
    find(page, "[data-head='2']").click()
    page.execute_script("document.querySelector('#attention-map canvas').focus()")
    press(page, Keys.HOME, *[Keys.ARROW_RIGHT] * 15, *[Keys.ARROW_UP] * 2)
    name, _, value = find(page, "#attention-readout").text.rpartition(" ")
    assert name == "“·” (16) reads “o” (15) with weight"
    expected = model.attention(ids)[LAYER, 2, 16, 15]
    assert expected > 1e-3
    assert float(value.replace("−", "-")) == pytest.approx(expected, rel=1e-3)
    press(page, Keys.ENTER)
    assert find(page, "#attended-title").text == "What “·” (16) reads"


def test_tokens_are_selected_by_arrow_keys(page: Any) -> None:
    from selenium.webdriver.common.keys import Keys  # noqa: PLC0415

    page.execute_script("document.querySelector('.token[tabindex=\"0\"]').focus()")
    press(page, Keys.HOME, Keys.ARROW_RIGHT)
    assert find(page, "#token-readout").text.startswith("Token 1: “o” · id 111 · bytes 6f · surp")
    assert find(page, '.token[aria-selected="true"]').text == "o"
    assert "1, after “o”" in find(page, "#lens-at").text
    assert find(page, "#attended").text == "To"


def test_the_theme_follows_the_system_and_the_button(browser: Any, path: Path) -> None:
    def background() -> str:
        return str(find(browser, "body").value_of_css_property("background-color"))

    def prefer(scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    load(browser, path)
    browser.execute_script("localStorage.clear()")
    shown = {}
    for scheme in ("light", "dark"):
        prefer(scheme)
        browser.refresh()
        shown[scheme] = background()
        other = "Light theme" if scheme == "dark" else "Dark theme"
        assert find(browser, "#theme").text == other
    assert shown["light"] != shown["dark"]
    pixel = "return document.querySelector('#detail canvas').toDataURL()"
    dark = browser.execute_script(pixel)
    find(browser, "#theme").click()
    assert background() == shown["light"]
    assert browser.execute_script(pixel) != dark
    find(browser, "#theme").click()
    assert background() == shown["dark"]
    browser.execute_script("localStorage.clear()")
    prefer("")
    assert browser.get_log("browser") == []


CONTRAST = """
const pixel = color => {
  const canvas = Object.assign(document.createElement("canvas"), {width: 1, height: 1});
  const context = canvas.getContext("2d");
  for (const one of color) { context.fillStyle = one; context.fillRect(0, 0, 1, 1); }
  return [...context.getImageData(0, 0, 1, 1).data].slice(0, 3).map(each => each / 255);
};
const light = rgb => rgb.map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
  .reduce((sum, c, i) => sum + [0.2126, 0.7152, 0.0722][i] * c, 0.05);
const each = document.querySelector(arguments[0]), style = getComputedStyle(each);
each.style.setProperty("--share", 1);
const panel = getComputedStyle(document.querySelector(".panel")).backgroundColor;
const [a, b] = [[style.color], [panel, style.backgroundColor]].map(pixel).map(light);
return Math.max(a, b) / Math.min(a, b);
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_on_its_color(browser: Any, path: Path, scheme: str) -> None:
    """4.5 to 1, as WCAG asks for, also on the strongest color."""
    load(browser, path)
    browser.execute_script("document.documentElement.dataset.theme = arguments[0]", scheme)
    selected = '.step[aria-pressed="true"]'
    for each in (".token", ".attended span", ".lens td", selected, "select", ".note", ".badge"):
        assert browser.execute_script(CONTRAST, each) >= 4.5, each


def test_the_title_is_in_a_landmark(page: Any) -> None:
    assert find(page, "body > header").aria_role == "banner"
    assert find(page, "body > header h1").text == TEXT


def test_everything_to_operate_has_a_name(page: Any) -> None:
    found = page.find_elements("css selector", "button, input, select, canvas[tabindex], pre")
    assert len(found) > 40
    for each in found:
        assert each.accessible_name, each.get_attribute("outerHTML")[:200]


@pytest.mark.parametrize("width", [360, 768])
def test_it_fits_a_phone(page: Any, width: int) -> None:
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        assert page.execute_script("return document.documentElement.scrollWidth") == width
        assert all(each.rect["width"] >= 40 for each in page.find_elements("css selector", ".step"))
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_texts_of_users_stay_texts(browser: Any, model: GPT2, tmp_path: Path) -> None:
    encoding = byte_encoding(end=False)
    ids = np.array(list(EVIL.encode()), np.int32)
    page = Page(collect(model.engine, encoding, f"model {EVIL}", ids, 0))
    load(browser, page.save(tmp_path / "evil.html"))
    assert browser.execute_script("return document.scripts.length") == 2
    assert find(browser, "h1").text.startswith("</script><script>alert(1)</script><!-- <b>")
    assert "</script>" in find(browser, "#facts").text
    assert browser.execute_script("return document.querySelectorAll('h1 *, #facts b').length") == 0


def test_a_notebook_shows_the_page_in_a_frame(browser: Any, path: Path, model: GPT2) -> None:
    outer = path.with_name("notebook.html")
    html = model.explain("O Romeo")._repr_html_()
    outer.write_text(f"<!DOCTYPE html><meta charset=utf-8><link rel=icon href='data:,'>{html}")
    load(browser, outer)
    browser.switch_to.frame(0)
    assert find(browser, "h1").text == "O Romeo"
    find(browser, '[data-step="attn"]').click()
    assert find(browser, "#step-title").text == "3 · attn"
    browser.switch_to.default_content()


@pytest.mark.parametrize("kind", ["llama", "one token", "long"])
def test_other_pages_load(browser: Any, model: GPT2, tmp_path: Path, kind: str) -> None:
    if kind == "llama":
        page = Llama(LlamaWeights.random(0, LLAMA), "cpu").explain([3, 1, 4, 1, 5])
    else:
        page = model.explain("x" if kind == "one token" else "To be " * 42)
    load(browser, page.save(tmp_path / "page.html"))
    steps = len(browser.find_elements("css selector", ".step"))
    assert steps == (12 if kind == "llama" else 10)
    for step in range(steps):
        browser.find_elements("css selector", ".step")[step].click()
        assert find(browser, "#detail canvas").is_displayed()
        assert find(browser, ".formula math").is_displayed()
    find(browser, '[data-step="attn"]').click()
    text = find(browser, "#detail").text
    heads = "2 heads of keys and values serves 2 heads of queries"
    assert (heads in text, "NH = 4, NKV = 2, HS = 8" in text) == 2 * (kind == "llama",)
    find(browser, '[data-part="logits"]').click()  # no model has a bias here, a Llama none at all
    assert "b" not in find(browser, ".formula math").text
    assert browser.get_log("browser") == []

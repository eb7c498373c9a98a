"""The page of `explain` in a headless Chromium, which runs its script."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from gpt2block import GPT2, Llama, LlamaWeights, Model, from_pretrained
from gpt2block.cuda import kernels
from gpt2block.engine.explain import Page, collect
from gpt2block.errors import printable
from gpt2block.files.parameters.arrays import random_model
from gpt2block.models.architectures.gemma3 import Gemma3Config
from gpt2block.models.architectures.lfm2 import Lfm2Config
from gpt2block.models.architectures.qwen3_moe import Qwen3MoeConfig
from gpt2block.sampling import Sampling, masses
from tests.devices import slow
from tests.engine.test_explain import EVIL, LLAMA, of, tokens_of
from tests.engine.test_explain import model as bundled
from tests.markov import byte_encoding

webdriver = pytest.importorskip("selenium.webdriver", reason="the browser test needs selenium")
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (BROWSER and DRIVER), reason="the browser test needs chromium and chromedriver"
)
TRANSCRIPTS = Path(__file__).parents[1] / "golden" / "pages" / "explain.txt"
TEXT = "To be, or not to be"
LAYER = 2
BUTTONS = "button:not([hidden]), input, select, canvas[tabindex], pre"
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
    """Load the page; after the test, assert that the browser's console has no messages."""
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


def number(text: str) -> float:
    """Parse a number as the page writes it."""
    return float(text.strip("()").replace("−", "-"))


def texts(page: Any, selector: str) -> list[str]:
    text = "each => each.innerText ?? each.textContent"
    script = f"return [...document.querySelectorAll(arguments[0])].map({text})"
    found: list[str] = page.execute_script(script, selector)
    return found


def slide(page: Any, **values: float) -> None:
    """Move sliders as a user does: set each value, then send `input`."""
    for name, value in values.items():
        script = "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('input'))"
        page.execute_script(script, find(page, f"#{name.replace('_', '-')}"), str(value))


# --- transcripts ----------------------------------------------------------------------------------


class Visit(NamedTuple):
    """A block of tests/golden/pages/explain.txt: its lines, and the recorded lines below each.

    A line begins with a verb. `page NAME` loads a page; `click`, `focus` and `press` act as a user;
    `script` runs JavaScript and shows its value; `text`, `first` and `names` show elements;
    `focused ATTRIBUTE` shows the element with the focus. `each KEYS ATTRIBUTE` and `each-text KEYS
    SELECTOR` press keys and show something for each; `each-step SELECTOR` clicks all steps.
    """

    title: str
    steps: tuple[tuple[str, list[str]], ...]


def visits() -> list[Any]:
    """Read the transcripts. A block that begins with the line "slow" runs only with --slow."""
    found = []
    for text in f"\n{TRANSCRIPTS.read_text('utf-8')}".split("\n# ")[1:]:
        title, *lines = text.rstrip("\n").split("\n")
        steps: list[tuple[str, list[str]]] = []
        for line in lines:
            if line.startswith("="):
                steps[-1][1].append(line)
            else:
                steps.append((line, []))
        visit = Visit(title, tuple(steps))
        found.append(slow(visit) if lines[0] == "slow" else visit)
    return found


@pytest.fixture(scope="module")
def pages(model: GPT2, path: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that returns the path of a page by its name."""

    def make(name: str) -> Any:
        if name == "evil":
            ids = np.array(list(EVIL.encode()), np.int32)
            return Page(collect(model.engine, byte_encoding(end=False), f"model {EVIL}", ids, 0))
        if name == "llama":
            return Llama(LlamaWeights.random(0, LLAMA), "cpu").explain([3, 1, 4, 1, 5])
        if name == "lfm2":  # the first and last block have a convolution, and no attention
            return of(Lfm2Config, conv_layers=(True, False, True), n_layer=3).explain([3, 1, 4])
        if name == "experts":
            sizes = {"n_expert": 5, "n_expert_used": 2, "n_ff_expert": 8}
            return of(Qwen3MoeConfig, **sizes).explain([3, 1, 4])
        if name == "gemma3":
            return gemma3().explain(TEXT, layer=LAYER)
        return model.explain("x" if name == "one" else "To be " * 42)

    def save(name: str) -> Path:
        folder = tmp_path_factory.getbasetemp() / f"{name}.html"
        return path if name == "shakespeare" else make(name).save(folder)

    return cache(save)


def keys(names: str) -> list[str]:
    """Return keys by names such as ARROW_UP*2."""
    from selenium.webdriver.common.keys import Keys  # noqa: PLC0415

    pairs = (each.partition("*") for each in names.split())
    return [getattr(Keys, name) for name, _, times in pairs for _ in range(int(times or 1))]


def lines_of(page: Any, selector: str) -> list[str]:
    """Return the text of each element on one line, without times."""
    found = (each.replace("\n", " / ") for each in texts(page, selector))
    return [printable(re.sub(r"[\d.,]+ [µm]?s\b", "TIME", each)).strip() for each in found]


def perform(page: Any, line: str) -> list[str]:
    """Do a line of a transcript; return the texts that it shows."""
    verb, _, rest = line.partition(" ")
    first, _, last = rest.partition(" ")
    if verb == "click":
        find(page, rest).click()
    elif verb == "focus":
        page.execute_script("document.querySelector(arguments[0]).focus()", rest)
    elif verb == "press":
        press(page, *keys(rest))
    elif verb == "text":
        return lines_of(page, rest)
    elif verb == "first":
        return lines_of(page, rest)[:1]
    elif verb == "names":
        return [each.accessible_name for each in page.find_elements("css selector", rest)]
    elif verb == "focused":
        return [str(focused(page, rest))]
    elif verb == "script":
        found = page.execute_script(rest)
        return [] if found is None else [json.dumps(found, ensure_ascii=False)]
    shown = []
    for key in keys(first) if verb.startswith("each") and verb != "each-step" else ():
        if verb == "each-text":
            shown += lines_of(page, last)
        press(page, key)
        shown += filter(None, [focused(page, last) if verb == "each" else None])
    for step in page.execute_script("return plan.block") if verb == "each-step" else ():
        find(page, f'[data-step="{step}"]').click()
        shown += [f"{step}: {each}" for each in lines_of(page, rest)]
    return shown


@pytest.mark.parametrize("visit", visits(), ids=lambda visit: visit.title)
def test_a_visit(browser: Any, pages: Any, visit: Visit) -> None:
    """GPT2BLOCK_WRITE_VISITS=1 writes what the page shows now to the file."""
    before, after = [f"# {visit.title}"], [f"# {visit.title}"]
    for line, recorded in visit.steps:
        if line.startswith("page "):
            load(browser, pages(line.removeprefix("page ")))
        shown = [f"= {each}".rstrip() for each in perform(browser, line)]
        before += [line, *recorded]
        after += [line, *shown]
    assert browser.get_log("browser") == []
    if os.environ.get("GPT2BLOCK_WRITE_VISITS"):
        text = TRANSCRIPTS.read_text("utf-8")
        TRANSCRIPTS.write_text(text.replace("\n".join(before), "\n".join(after)), "utf-8")
    else:
        assert after == before


# --- numbers and layouts --------------------------------------------------------------------------


def test_the_source_of_a_kernel_is_shown(page: Any) -> None:
    find(page, '.step[data-step="ff1"]').click()
    shown = [row.get_property("textContent") for row in page.find_elements("css selector", ".row")]
    assert shown == kernels.read_source("learn/matmul/skeleton.cu").splitlines()


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        slow({"temperature": 0.8, "top_k": 5}),
        slow({"temperature": 1.45, "top_p": 0.9}),
        {"temperature": 0.3, "top_k": 12, "top_p": 0.55},
        slow({"temperature": 1.0, "top_p": 0.0}),
    ],
)
def test_sliders_give_the_distribution_of_the_sampler(
    page: Any, model: GPT2, options: dict[str, Any]
) -> None:
    slide(page, **options)
    expected = masses(model(tokens_of(model, TEXT))[-1], Sampling(**options)).astype(np.float64)
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


def row_of_attention(made: Any, ids: Any, position: int, head: int) -> dict[str, Any]:
    """Compute the page's `attentionRow` with NumPy in float64, from the traced Q, K and V."""
    config, D = made.config, made.config.head_size
    trace = made.trace(ids)
    rows = trace[f"h.{LAYER}.{config.QKV}"].astype(np.float64)
    q, k, v = np.split(rows, [config.q_width, config.q_width + config.kv_width], axis=1)
    shared = head * (config.kv_width // D) // config.n_head
    q, k, v = (x[:, i * D : (i + 1) * D] for x, i in ((q, head), (k, shared), (v, shared)))
    scores = k[: position + 4] @ q[position]
    token, scale = np.arange(len(scores)), config.scales.attention
    scaled = scores / np.sqrt(D) if scale is None else scores * scale
    past = position - (config.windows[LAYER] or len(ids))
    masked = np.where((token > position) | (token <= past), -np.inf, scaled)
    weights = np.exp(masked - masked.max()) / np.exp(masked - masked.max()).sum()
    output = weights[: position + 1] @ v[: position + 1]
    stored = trace[f"h.{LAYER}.attn"][position, head * D : (head + 1) * D]
    np.testing.assert_allclose(output, stored, rtol=1e-4, atol=1e-5)
    return {"scores": scores, "scaled": scaled, "masked": masked, "weights": weights,
            "output": output, "values": v}  # fmt: skip


def gemma3() -> Model[Any]:
    """Return a Gemma 3 with its own scale, a tokenizer, and a window in the opened layer."""
    own: Any = {"n_layer": 3, "sliding_layers": (False, False, True), "window": 5, "scalar": 20}
    own |= {"n_ctx": 32, "vocab_size": 256, "tie_word_embeddings": True}
    config = Gemma3Config(**{**vars(LLAMA), **own})
    halves = ((name, np.float16(array), kind) for name, array, kind in random_model(0, config))
    made: Model[Any] = Model.from_tensors(config, halves, "cpu", "float32")
    vars(made.lookup)["_loaded"] = byte_encoding(end=False)
    return made


@pytest.fixture(scope="module", params=[slow("shakespeare"), slow("shakespeare-llama"), "gemma3"])
def opened(request: pytest.FixtureRequest, tmp_path_factory: Any) -> tuple[Any, Path]:
    """Return a model and its page; the second and third model have grouped queries."""
    name = request.param
    made = gemma3() if name == "gemma3" else from_pretrained(name, device="cpu")
    path = tmp_path_factory.mktemp(request.param) / "page.html"
    return made, made.explain(TEXT, layer=LAYER).save(path)


@pytest.mark.parametrize(("position", "head"), [slow(0, 0), (9, 3), slow(18, 2)])
def test_a_row_of_attention_agrees_with_numpy(
    browser: Any, opened: tuple[Any, Path], position: int, head: int
) -> None:
    made, path = opened
    load(browser, path)
    browser.execute_script("selectPosition(arguments[0])", position)
    find(browser, f"[data-head='{head}']").click()
    expected = row_of_attention(made, tokens_of(made, TEXT), position, head)
    found = browser.execute_script(
        "const row = attentionRow(...arguments); return Object.fromEntries(Object.entries(row)"
        ".map(([name, of]) => [name, of.map ? Array.from(of, each => `${each}`) : of]))",
        position, head,
    )  # fmt: skip
    for name in ("scores", "scaled", "masked", "weights", "output"):
        numbers = np.array([float(each) for each in found[name]])
        np.testing.assert_allclose(numbers, expected[name], rtol=1e-9, atol=1e-12)
    read = int(np.argmax(expected["weights"]))
    for step, name in enumerate(("scores", "scaled", "masked", "weights")):
        find(browser, f"#opened-{step}").click()
        cells = texts(browser, "#opened-panel tbody td.now")
        assert len(cells) == len(expected[name]) == min(len(TEXT), position + 4)
        for cell, value in zip(cells, expected[name], strict=True):
            if value == -np.inf:
                assert cell == "−∞"
            elif name == "weights":
                assert cell.startswith(("<", "99.9+")) or number(
                    cell.removesuffix("%")
                ) / 100 == pytest.approx(value, abs=6e-4)
            else:
                assert number(cell) == pytest.approx(value, rel=1e-3)
        # the equations are for the token with the largest weight; the last ends with its number
        last = texts(browser, "#opened-panel .equation")[-1].split(" = ")[-1]
        assert last == cells[read]
    find(browser, "#opened-4").click()
    assert number(texts(browser, "#opened-panel tfoot td")[-1]) == pytest.approx(
        expected["output"][0], rel=1e-3
    )
    assert browser.get_log("browser") == []


def product_shown(page: Any, made: Any, step: str) -> tuple[int, int]:
    """Check the sum that the page shows for one number of a product; return row and column."""
    ids = tokens_of(made, TEXT)
    trace = made.trace(ids)
    found = re.match(rf"{step}\[(\d+), (\d+)\] = (\w+)\[\d+, :\] · (\w+)",
                     find(page, "#product .equation").text)  # fmt: skip
    assert found
    row, column = int(found[1]), int(found[2])
    prefix = "" if step == "logits" else f"h.{LAYER}."
    x = trace[prefix + found[3]][row]
    weights = {n: a.T if kind == "NK" else a for n, a, kind in made.engine.tensors()}
    w = weights["wte" if step == "logits" else prefix + found[4]][:, column]
    y = trace[prefix + step][row, column]
    text = find(page, "#product-sum").text
    first = re.findall(r"(\S+) × (\S+) \+", text)
    assert len(first) == 4
    for k, pair in enumerate(first):
        # small numbers have three significant digits
        np.testing.assert_allclose([number(each) for each in pair], [x[k], w[k]], rtol=5e-3)
    assert number(text.rpartition(" = ")[2]) == pytest.approx(y, rel=2e-3, abs=2e-3)
    assert f"holds {text.rpartition(' = ')[2]}." in find(page, "#product").text
    assert f"{len(x) - 4:,} more terms" in text
    return row, column


@pytest.mark.parametrize("step", ["qkv", slow("proj"), slow("logits")])
def test_a_cell_of_a_product_shows_its_row_and_column(
    browser: Any, opened: tuple[Any, Path], step: str
) -> None:
    from selenium.webdriver.common.keys import Keys  # noqa: PLC0415

    made, path = opened
    load(browser, path)
    browser.execute_script("selectStep(arguments[0])", step)
    row, _ = product_shown(browser, made, step)
    assert row == len(TEXT) - 1
    canvas = find(browser, "#detail canvas")
    assert canvas.get_attribute("aria-describedby") == "product-sum"
    held = browser.execute_script("return data.opened.products[arguments[0]].columns", step)
    grid = browser.execute_script("return tensors[tensorName(state.step)].grid.columns")
    width = browser.execute_script("return tensors[tensorName(state.step)].shape[1]")
    shown = []
    for token, cell in ((3, 0.7), (12, 0.2)):  # hover
        size = canvas.size
        right = int(size["width"] * (cell - 0.5))
        down = int(size["height"] * ((token + 0.5) / len(TEXT) - 0.5))
        pointer = webdriver.ActionChains(browser, duration=0)
        pointer.move_to_element_with_offset(canvas, right, down).perform()
        shown.append(product_shown(browser, made, step))
        assert shown[-1][0] == token
        assert shown[-1][1] in held
        far = min(abs(c - cell * width) for c in held)
        assert abs(shown[-1][1] - cell * width) <= far + 2 * width / grid
    assert shown[0] != shown[1]
    pointer = webdriver.ActionChains(browser, duration=0)
    pointer.move_to_element(find(browser, "#step-title")).perform()
    assert product_shown(browser, made, step) == shown[1]  # the product stays
    browser.execute_script("arguments[0].focus()", canvas)
    press(browser, Keys.HOME, Keys.ARROW_UP)
    row, column = product_shown(browser, made, step)
    assert (row, column) == (11, min(held))
    assert browser.get_log("browser") == []


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
    """The contrast is at least 4.5 to 1 (WCAG), even on the strongest color."""
    load(browser, path)
    browser.execute_script("document.documentElement.dataset.theme = arguments[0]", scheme)
    selected = '.step[aria-pressed="true"]'
    opened = (".opened-table .now", ".opened-table thead th", ".opened-table .pick", "#walk-start")
    browser.execute_script(
        "selectPosition(3); selectStep('ln1'); document.querySelector('#opened-2').click()"
    )
    colored = (".token", ".attended span", ".lens td", selected, "select", ".note", ".badge")
    for each in (*colored, *opened, ".opened-table .out"):
        assert browser.execute_script(CONTRAST, each) >= 4.5, each


def test_everything_to_operate_has_a_name(page: Any) -> None:
    found = page.find_elements("css selector", BUTTONS)
    assert len(found) > 80
    for each in found:
        assert each.accessible_name, each.get_attribute("outerHTML")[:200]


TOO_NARROW = """return [...document.querySelectorAll('.step')]
    .filter(each => each.scrollWidth > each.clientWidth).map(each => each.dataset.step)
"""
COVERED = """return [...document.querySelectorAll('.step:has(.badge)')].filter(step => {
    const badge = step.querySelector('.badge').getBoundingClientRect();
    return [...step.querySelectorAll('b, small')].some(label => {
        const range = document.createRange();
        range.selectNodeContents(label);
        const text = range.getBoundingClientRect();
        return text.width && badge.left < text.right && badge.bottom > text.top + 4;
    });
}).map(step => step.dataset.step)
"""


@pytest.mark.parametrize("width", [360, slow(768), slow(1280)])
def test_it_fits_a_phone(page: Any, width: int) -> None:
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        assert page.execute_script("return document.documentElement.scrollWidth") == width
        assert all(each.rect["width"] >= 40 for each in page.find_elements("css selector", ".step"))
        assert page.execute_script(COVERED) == []
        assert page.execute_script(TOO_NARROW) == []
        contents = find(page, ".contents ul")
        assert contents.get_property("scrollWidth") <= contents.get_property("clientWidth")
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


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

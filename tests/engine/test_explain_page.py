"""The page of `explain` in a headless Chromium, which runs its script."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpt2block import GPT2, Llama, LlamaWeights, Model, from_pretrained
from gpt2block.cuda import kernels
from gpt2block.engine.explain import Page, collect
from gpt2block.files.parameters.arrays import random_model
from gpt2block.models.architectures.gemma3 import Gemma3Config
from gpt2block.models.architectures.lfm2 import Lfm2Config
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
    script = "return [...document.querySelectorAll(arguments[0])].map(each => each.innerText)"
    found: list[str] = page.execute_script(script, selector)
    return found


def slide(page: Any, **values: float) -> None:
    """Move sliders as a user does: set each value, then send `input`."""
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
    assert find(page, '#flow [aria-pressed="true"]').text.startswith("embedding")
    assert find(page, "#step-title").text == "embedding"
    said = "Looks up the vector of each token, and adds the vector of the token's position."
    assert find(page, "#detail p").text == said
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
    assert shown == kernels.read_source("learn/matmul/skeleton.cu").splitlines()
    assert "void matmul_bias_tiled(" in find(page, ".row.here").text
    comment = find(page, ".t-comment")
    assert comment.text.startswith("// Matrix product with bias")
    find(page, '[role="tab"]:last-child').click()
    assert "def matmul_bias(" in find(page, ".row.here").text


CLICKED = """const seen = [];
let button;
while (button = document.querySelector('[data-move="1"]')) {
    button.click();
    seen.push(document.querySelector("#step-title").innerText);
}
return seen;
"""


def test_buttons_lead_from_step_to_step(page: Any) -> None:
    """Buttons lead from the embedding to the logits and back; focus stays on the button."""
    page.execute_script("selectLayer(0); selectStep('embedding')")
    steps = ["ln1", "qkv", "attn", "proj", "x1", "ln2", "ff1", "gelu", "ff2", "output"]
    blocks = [f"{n} · {each}" for n, each in enumerate(steps, 1)] * 6
    seen = [find(page, "#step-title").text]
    for _ in steps:
        find(page, '[data-move="1"]').click()
        seen.append(find(page, "#step-title").text)
    seen += page.execute_script(CLICKED)  # in a script: a click by the driver is ten times slower
    assert seen == ["embedding", *blocks, "ln_f", "logits"]
    find(page, '[data-move="-1"]').click()
    find(page, '[data-move="-1"]').click()
    assert "block 5" in find(page, "#detail header").text
    assert find(page, '[data-move="1"]').text == "ln_f →"
    assert focused(page, "data-move") == "-1"


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
    kept = int((expected > 0).sum())
    assert find(page, "#next-readout").text.startswith(f"{kept} of 256 tokens can be drawn")
    unfiltered = replace(Sampling(**options), top_p=1.0)
    logits = model(tokens_of(model, TEXT))[-1]
    possible, after_k = (
        int((masses(logits, each) > 0).sum()) for each in (replace(unfiltered, top_k=0), unfiltered)
    )
    why = find(page, "#next-kept").text
    assert why.startswith(f"{256 - possible} tokens are less than") == (possible < 256)
    assert (f"Top-k keeps the {after_k} token" in why) == (after_k < possible)
    assert (f"of what is left: {kept} token" in why) == (kept < after_k)
    assert ("are off" in why) == (not {"top_k", "top_p"} & options.keys())


def test_temperature_zero_is_greedy(page: Any, model: GPT2) -> None:
    slide(page, temperature=0)
    best = model(tokens_of(model, TEXT))[-1].argmax()
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

    ids = tokens_of(model, TEXT)
    page.execute_script("selectStep('ln1'); document.querySelector('#detail canvas').focus()")
    press(page, *[Keys.ARROW_DOWN] * 3, *[Keys.ARROW_RIGHT] * 7)
    name, _, value = find(page, "#detail .readout").text.partition(": ")
    assert name == "token 3 “b”, channel 7"
    expected = model.trace(ids)[f"h.{LAYER}.ln1"][3, 7]
    assert number(value) == pytest.approx(expected, rel=1e-3)
    find(page, "[data-head='2']").click()
    page.execute_script("document.querySelector('#attention-map canvas').focus()")
    press(page, Keys.HOME, *[Keys.ARROW_RIGHT] * 15, *[Keys.ARROW_UP] * 2)
    name, _, value = find(page, "#attention-readout").text.rpartition(" ")
    assert name == "“·” (16) reads “o” (15) with weight"
    expected = model.attention(ids)[LAYER, 2, 16, 15]
    assert expected > 1e-3
    assert number(value.removesuffix("%")) / 100 == pytest.approx(expected, abs=6e-4)
    press(page, Keys.ENTER)
    assert find(page, "#attended-title").text == "What “·” (16) reads"


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
    vars(made.lookup)["_found"] = byte_encoding(end=False)
    return made


@pytest.fixture(scope="module", params=["shakespeare", slow("shakespeare-llama"), "gemma3"])
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


def test_a_row_of_attention_is_read_by_keyboard(page: Any, model: GPT2) -> None:
    from selenium.webdriver.common.keys import Keys  # noqa: PLC0415

    page.execute_script("selectPosition(9); document.querySelector('#opened-0').focus()")
    press(page, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert focused(page, "id") == "opened-2"
    assert find(page, "#opened-panel").get_attribute("aria-labelledby") == "opened-2"
    assert "after “·” (9) become −∞" in find(page, "#opened-panel p").text
    page.execute_script("document.querySelector('#opened-panel [aria-pressed=true]').focus()")
    press(page, Keys.END)
    assert focused(page, "data-token") == "12"
    assert "comes after “·” (9)" in find(page, ".opened-detail").text
    press(page, Keys.HOME, Keys.ARROW_DOWN)
    assert find(page, ".opened-detail h4").text == "“o” (1)"
    press(page, Keys.ARROW_UP, Keys.ARROW_UP)
    assert focused(page, "data-token") == "0"
    page.execute_script("document.querySelector('#opened-4').focus()")
    press(page, Keys.ENTER)
    page.execute_script("document.querySelector('#opened-panel canvas').focus()")
    press(page, Keys.HOME, *[Keys.ARROW_RIGHT] * 5)
    expected = row_of_attention(model, tokens_of(model, TEXT), 9, 0)["output"][5]
    assert texts(page, "#opened-panel thead th")[-1] == "× v[5]"
    assert number(texts(page, "#opened-panel tfoot td")[-1]) == pytest.approx(expected, rel=1e-3)
    page.execute_script("document.querySelector('[data-part=\"4\"]').click()")
    assert "of block 2 alone" in find(page, "#opened").text
    find(page, "#opened button").click()
    assert find(page, "#flow [aria-pressed='true']").text.startswith("block 2")
    assert page.find_elements("css selector", "#opened-panel")


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


def test_a_tap_shows_the_row_and_column(page: Any, model: GPT2) -> None:
    page.execute_script("selectStep('ff2')")
    before = product_shown(page, model, "ff2")
    script = (
        "const box = arguments[0].getBoundingClientRect(); return [box.left, box.top, box.width]"
    )
    page.execute_script("document.querySelector('#step-title').scrollIntoView()")
    left, top, width = page.execute_script(script, find(page, "#detail canvas"))
    point = {"x": left + 0.9 * width, "y": top + 5}
    touched = {"touchPoints": [point]}
    page.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": "touchStart", **touched})
    page.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    after = product_shown(page, model, "ff2")
    assert after[0] < before[0]
    assert after[1] > 0.8 * 256 > before[1]
    page.execute_script("selectLayer(0)")
    assert "rows and columns of block 2 alone" in find(page, "#product").text
    find(page, "#product button").click()
    product_shown(page, model, "ff2")


def test_a_walk_has_a_sentence_for_every_step(browser: Any, opened: tuple[Any, Path]) -> None:
    from selenium.webdriver.common.keys import Keys  # noqa: PLC0415

    made, path = opened
    load(browser, path)
    steps = browser.execute_script("return plan.block")
    assert len(steps) == {"GPT2": 10, "Llama": 12, "Gemma3": 13}[made.config.NAME]
    browser.execute_script("document.querySelector('#walk-start').focus()")
    press(browser, Keys.ENTER)
    sentences = []
    for at, step in enumerate(steps):
        assert focused(browser, "id") == "walk-next"
        start = f"Step {at + 1} of {len(steps)}, {step}. "
        assert find(browser, "#walk-text").text.startswith(start)
        sentences.append(find(browser, "#walk-text").text.removeprefix(start))
        assert sentences[-1].count(". ") == 0
        assert sentences[-1].endswith(".")
        assert find(browser, ".step[aria-pressed='true']").get_attribute("data-step") == step
        assert find(browser, "#step-title").text == f"{at + 1} · {step}"
        names = [
            each.accessible_name
            for each in browser.find_elements("css selector", "#walk button:not([hidden])")
        ]
        assert names == ["Back", "Finish" if at + 1 == len(steps) else "Next", "End"]
        if at + 1 < len(steps):
            press(browser, Keys.ENTER if at % 2 else Keys.ARROW_RIGHT)
    assert len(set(sentences)) == len(steps)
    assert "undefined" not in " ".join(sentences)
    press(browser, Keys.ARROW_LEFT)
    back = webdriver.ActionChains(browser).key_down(Keys.SHIFT).send_keys(Keys.TAB)
    back.key_up(Keys.SHIFT).send_keys(Keys.ENTER).perform()
    assert focused(browser, "id") == "walk-back"
    assert find(browser, "#walk-text b").text.startswith(f"Step {len(steps) - 2} of")
    find(browser, ".step").click()  # the walk follows the diagram
    assert find(browser, "#walk-text b").text == f"Step 1 of {len(steps)}, {steps[0]}."
    find(browser, "#walk-back").click()
    assert find(browser, "#walk-text b").text == f"Step 1 of {len(steps)}, {steps[0]}."
    press(browser, Keys.ESCAPE)
    assert focused(browser, "id") == "walk-start"
    assert not find(browser, "#walk-text").is_displayed()
    browser.execute_script("selectStep('output')")
    find(browser, "#walk-start").click()
    assert find(browser, "#walk-text b").text.startswith("Step 1 of")
    find(browser, "#walk-end").click()
    assert focused(browser, "id") == "walk-start"
    assert browser.get_log("browser") == []


@pytest.mark.parametrize("width", [390, slow(768), slow(1280)])
def test_names_of_steps_fit_in_the_diagram(
    browser: Any, opened: tuple[Any, Path], width: int
) -> None:
    load(browser, opened[1])
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 700}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        boxes = browser.execute_script(
            "return [...document.querySelectorAll('.step')].map(each => "
            "[each.dataset.step, each.scrollWidth - each.clientWidth])"
        )
        assert len(boxes) >= 10
        assert [name for name, over in boxes if over > 0] == []
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


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


def test_the_title_is_in_a_landmark(page: Any) -> None:
    assert find(page, "body > header").aria_role == "banner"
    assert find(page, "body > header h1").text == TEXT


def test_everything_to_operate_has_a_name(page: Any) -> None:
    found = page.find_elements("css selector", BUTTONS)
    assert len(found) > 80
    for each in found:
        assert each.accessible_name, each.get_attribute("outerHTML")[:200]


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
        contents = find(page, ".contents ul")
        assert contents.get_property("scrollWidth") <= contents.get_property("clientWidth")
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


@pytest.mark.parametrize("kind", ["llama", "one token", slow("long")])
def test_other_pages_load(browser: Any, model: GPT2, tmp_path: Path, kind: str) -> None:
    if kind == "llama":
        page = Llama(LlamaWeights.random(0, LLAMA), "cpu").explain([3, 1, 4, 1, 5])
    else:
        page = model.explain("x" if kind == "one token" else "To be " * 42)
    load(browser, page.save(tmp_path / "page.html"))
    assert ("position" in find(browser, "#detail p").text) == (kind != "llama")
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
    find(browser, '[data-part="logits"]').click()  # logits of these models have no bias
    assert "b" not in find(browser, ".formula math").text
    assert browser.get_log("browser") == []


@pytest.mark.slow
def test_the_page_of_blocks_that_differ(browser: Any, tmp_path: Path) -> None:
    """A block with a convolution has no attention: the page shows that of block 1."""
    made = of(Lfm2Config, conv_layers=(True, False, True), n_layer=3)
    load(browser, made.explain([3, 1, 4], layer=0).save(tmp_path / "page.html"))
    assert texts(browser, "#attention-layer *") == ["1"]
    for layer, count in enumerate((11, 13, 11)):
        browser.execute_script("endWalk(); selectLayer(arguments[0])", layer)
        assert find(browser, "#walk-start").text == f"Walk through the block in {count} steps"
        assert "block 1, head 0" in find(browser, "#opened-title").text
        for step in browser.execute_script("return plan.block"):
            find(browser, f'[data-step="{step}"]').click()
            assert find(browser, ".formula math").is_displayed()
            reads = "convolution" in find(browser, "#detail p").text
            assert reads == (count == 11 and step in ("rms_in", "bcx", "proj", "x1"))
            browser.execute_script("walking = true; drawWalk()")
            assert step in find(browser, "#walk-text").text
    assert browser.get_log("browser") == []

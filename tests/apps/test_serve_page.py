"""The page at / of a server, used in a headless Chromium."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra serve is not installed")
pytest.importorskip("uvicorn", reason="the extra serve is not installed")

from gpt2block import GPT2
from gpt2block.apps.serve.protocol import overloaded
from gpt2block.apps.serve.service import FULL
from gpt2block.engine.generation.sequences import TokenSequence
from gpt2block.engine.model import Sampled
from gpt2block.engine.numpy.model import NumpyDecoding
from tests.engine import test_explain_page as explain_page
from tests.engine.test_explain import model as bundled
from tests.engine.test_explain_page import CONTRAST, find, focused, press, slide
from tests.generating import generate
from tests.markov import LINES
from tests.serving import SAMPLING, Running, eventually, model_of, post, serving

pytestmark = explain_page.pytestmark
browser = explain_page.browser  # a fixture
KEY = "0123456789abcdef"
TEXT = "To be, or"
SEED = 7


@pytest.fixture(scope="module")
def model() -> GPT2:
    return bundled()


@pytest.fixture(scope="module")
def server(model: GPT2) -> Iterator[Running]:
    with serving(model_of(model.engine, chat_template=LINES), model.tokenizer, rows=4) as running:
        yield running


@pytest.fixture
def page(browser: Any, server: Running) -> Any:
    """Load the page; after the test, assert that the browser's console has no messages."""
    browser.get(server.url)
    eventually(lambda: find(browser, "h1").text == "small")
    use(browser, "#tab-text")  # the page opens on Chat, as the model has a template
    browser.execute_script(
        "for (const [id, value] of [['seed', arguments[0]], ['length', 12]])"
        " document.getElementById(id).value = value",
        SEED,
    )
    yield browser
    assert browser.get_log("browser") == []


def use(page: Any, *steps: Any) -> None:
    """Click elements given by their selectors, and type into elements: (selector, keys, …)."""
    for step in steps:
        selector, *keys = [step] if isinstance(step, str) else step
        find(page, selector).send_keys(*keys) if keys else find(page, selector).click()


def every(page: Any, selector: str) -> list[Any]:
    return list(page.find_elements("css selector", selector))


def strip(page: Any) -> list[str]:
    """Return the tokens that the page shows."""
    script = "return [...document.querySelectorAll('#strip .token')].map(each => each.textContent)"
    return [str(each) for each in page.execute_script(script)]


def status_is(page: Any, words: str, element: str = "#text-status") -> None:
    eventually(lambda: words in find(page, element).text)


def proceed(page: Any, text: str) -> None:
    use(page, ("#text", text), "#continue")
    status_is(page, "all that were requested")


def rows(page: Any, title: str) -> list[Any]:
    """Wait for the alternatives under a title; return their rows."""
    table = "#next-table:not(.busy) tr[data-id]"
    eventually(lambda: find(page, "#h-next").text == title)
    eventually(lambda: bool(every(page, table)))
    return every(page, table)


def continued(model: GPT2, prompt: bytes, count: int = 12, **more: Any) -> list[str]:
    options: dict[str, Any] = {"temperature": 0.8, "seed": SEED, "max_new_tokens": count, **more}
    found = generate(model.engine, model.tokenizer, [*prompt], **options)
    return [chr(token).replace("\n", "↵\n") for token in found.tokens]


def test_a_text_is_continued_and_changed(page: Any, model: GPT2) -> None:
    """Tokens equal those of `generate`, also after a token is replaced by an alternative."""
    proceed(page, TEXT)
    first = [*TEXT, *continued(model, TEXT.encode())]
    assert strip(page) == first
    assert "12 new tokens" in find(page, "#text-status").text
    assert "tokens/s" in find(page, "#text-status").text
    every(page, ".token")[11].click()
    alternatives = rows(page, f"In the place of “{first[11].replace(' ', '·')}”")
    assert len([each for each in alternatives if each.get_attribute("class") == "actual"]) == 1
    other = next(each for each in alternatives if each.get_attribute("class") != "actual")
    chosen = int(other.get_attribute("data-id"))
    find(other, "button").click()
    status_is(page, "all that were requested")
    prompt = "".join(first[:11]).encode() + bytes([chosen])
    second = [*first[:11], chr(chosen), *continued(model, prompt)]
    eventually(lambda: strip(page) == second)
    kinds = [each.get_attribute("class") for each in every(page, ".token")]
    assert kinds == ["token given"] * 9 + ["token drawn"] * 2 + ["token picked"] + 12 * [
        "token drawn"
    ]
    use(page, "#undo")
    eventually(lambda: strip(page) == first)


def test_the_distribution_follows_the_sliders(page: Any, server: Running) -> None:
    use(page, ("#text", TEXT))
    rows(page, "Next token")
    options = {"temperature": 1.5, "top_k": 30, "top_p": 0.9, "min_p": 0.02}
    slide(page, **options)
    page.execute_script("document.getElementById('options').dispatchEvent(new Event('input'))")
    expected = post(server, "/play/next", {"ids": [*TEXT.encode()], **options})[1]
    kept = f"{expected['kept']} of 256 tokens can be drawn; entropy {expected['entropy']:.2f} bits"
    status_is(page, kept, "#next-readout")
    assert expected["kept"] < 30
    shown = rows(page, "Next token")
    assert [int(each.get_attribute("data-id")) for each in shown] == [
        each["id"] for each in expected["tokens"]
    ]
    assert [each.get_attribute("class") for each in shown].count("out") == 40 - expected["kept"]
    best = expected["tokens"][0]
    figures = [each.text for each in shown[0].find_elements("css selector", "td")][1:]
    assert figures == [f"{100 * best[p]:.1f}%" for p in ("probability", "drawn")]
    slide(page, temperature=0)
    page.execute_script("document.getElementById('options').dispatchEvent(new Event('input'))")
    status_is(page, "1 of 256 tokens can be drawn; entropy 0.00 bits", "#next-readout")


def test_texts_stay_texts_and_bytes_are_bytes(page: Any) -> None:
    evil = "<img src=x onerror=alert(1)>&é\u202e"
    page.execute_script("document.getElementById('text').value = arguments[0]", evil)
    use(page, "#show-tokens")
    status_is(page, "34 tokens")
    shown = strip(page)
    assert "".join(shown[:29]) == "<img src=x onerror=alert(1)>&"
    assert shown[29:] == ["c3", "a9", "e2", "80", "ae"]
    assert find(page, '[data-index="29"]').accessible_name == "bytes c3, token 29, given"
    assert page.execute_script("return document.images.length + document.scripts.length") == 1
    use(page, "#edit")
    eventually(lambda: find(page, "#text").is_displayed())
    assert find(page, "#text").get_property("value") == evil


def test_the_keyboard_reaches_tokens_and_alternatives(page: Any) -> None:
    from selenium.webdriver.common.keys import Keys  # noqa: PLC0415

    use(page, ("#text", "ROMEO"), "#show-tokens")
    status_is(page, "5 tokens")
    page.execute_script("document.querySelector('#strip [tabindex=\"0\"]').focus()")
    assert focused(page, "aria-label") == "the end of the text"
    press(page, Keys.ARROW_LEFT, Keys.ARROW_LEFT)
    assert focused(page, "aria-label") == "“E”, token 3, given"
    rows(page, "In the place of “E”")
    press(page, Keys.ENTER)
    assert str(focused(page, "aria-label")).startswith("Continue with “")
    press(page, Keys.ESCAPE)
    assert focused(page, "aria-label") == "“E”, token 3, given"
    press(page, Keys.HOME)
    status_is(page, "No token comes before this one", "#next-readout")
    assert not find(page, "#explain").is_enabled()


def test_draft_tokens_are_marked(
    page: Any, server: Running, model: GPT2, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here every odd drawn token is marked; the legend explains it while the text has any."""
    own, following = server.server, NumpyDecoding.next

    def odd_drafted(decoding: NumpyDecoding) -> Sampled:
        found = following(decoding)
        return found._replace(drafted=found.tokens % 2 == 1)

    monkeypatch.setattr(own, "settings", replace(own.settings, speculate=True))
    monkeypatch.setattr(NumpyDecoding, "next", odd_drafted)
    proceed(page, TEXT)
    drawn = every(page, ".token.drawn")
    odd = [ord(each[-1]) % 2 == 1 for each in continued(model, TEXT.encode())]
    assert ["guessed" in str(each.get_attribute("class")) for each in drawn] == odd
    told = [str(each.accessible_name) for each in drawn]
    assert [each.endswith(", guessed and confirmed") for each in told] == odd
    assert find(page, "#guessed-note").is_displayed()
    use(page, "#undo")
    eventually(lambda: not find(page, "#guessed-note").is_displayed())


def test_a_position_is_explained(page: Any) -> None:
    proceed(page, TEXT)
    every(page, ".token")[9].click()
    rows(page, f"In the place of “{strip(page)[9].replace(' ', '·')}”")
    use(page, "#explain")
    eventually(lambda: find(page, "#explain-dialog").is_displayed())
    assert find(page, "#h-explain").text == "The forward pass of 9 tokens"
    page.switch_to.frame(find(page, "#explain-frame"))
    eventually(lambda: bool(every(page, "h1")))
    eventually(lambda: find(page, "h1").text == TEXT)
    assert page.execute_script("return origin") == "null"  # it cannot read the key
    page.switch_to.default_content()
    tab = find(page, "#explain-tab").get_attribute("href")
    use(page, "#explain-close")
    assert not find(page, "#explain-dialog").is_displayed()
    page.get(tab)
    assert find(page, "h1").text == TEXT


def test_a_conversation(page: Any, model: GPT2) -> None:
    from selenium.webdriver.common.keys import Keys  # noqa: PLC0415

    use(page, "#tab-chat")
    assert not find(page, "#distribution").is_displayed()
    options = ("temperature", "top-k", "top-p", "min-p", "length")
    shown = [find(page, f"#{each}").get_attribute("value") for each in options]
    assert shown == ["0.75", "0", "0.9", "0", "512"]  # the model's defaults for conversations
    message = "<b>Hi</b>" + "x" * 230
    use(page, ("#message", message, Keys.ENTER))
    status_is(page, "the context is full", "#chat-status")
    said = [each.get_property("textContent") for each in every(page, ".said")]
    prompt = f"u{message}\na".encode()
    expected = continued(model, prompt, 300, **SAMPLING)
    assert said == [message, "".join(expected).replace("↵", "")]
    use(page, ".under button")
    eventually(lambda: len(strip(page)) == len(prompt) + len(expected))
    assert strip(page)[len(prompt) :] == expected
    status_is(page, "The context is full", "#next-readout")
    use(page, "#continue")
    status_is(page, "The context is full: prompt: 257 tokens", "#text-problem")
    use(page, "#tab-chat", "#reset")
    assert every(page, ".said") == []
    page.execute_script("document.getElementById('length').value = 3")
    use(page, ("#message", "Hi", Keys.ENTER))
    status_is(page, "3 new tokens", "#chat-status")
    status_is(page, "cut at the limit of new tokens", "#chat-status")
    assert_only_refused(page, 400)


def test_it_opens_on_chat_and_fills_a_window(browser: Any, server: Running) -> None:
    """Conversation and options end near the window's lower edge; the conversation is wider."""
    browser.set_window_size(1366, 900)
    browser.get(server.url)
    eventually(lambda: find(browser, "#chat-view").is_displayed())
    assert find(browser, "#tab-chat").get_attribute("aria-selected") == "true"
    chat, options = find(browser, "#chat-view").rect, find(browser, "#next").rect
    inner = browser.execute_script("return innerHeight")
    assert chat["width"] > 2.5 * options["width"]
    for part in (chat, options):
        assert 0.8 * inner < part["y"] + part["height"] < inner
    use(browser, "#tab-text")
    shown = [find(browser, f"#{each}").get_attribute("value") for each in ("temperature", "length")]
    assert shown == ["0.8", "100"]
    assert browser.get_log("browser") == []


def assert_only_refused(page: Any, status: int) -> None:
    """Assert that the console has only the browser's lines about answers with this status."""
    messages = [each["message"] for each in page.get_log("browser")]
    assert messages
    assert all(f"status of {status}" in message for message in messages), messages


def test_a_full_queue(page: Any, server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The question that was refused can be sent again."""

    def submit(*given: Any) -> None:
        raise overloaded(FULL)

    use(page, ("#text", TEXT))
    rows(page, "Next token")
    with monkeypatch.context() as patched:
        patched.setattr(server.service, "submit", submit)
        use(page, "#continue")
        busy = "The server is busy: the server has as many requests as it takes"
        status_is(page, busy, "#text-problem")
        use(page, "#tab-chat", ("#message", "Hello"), "#send")
        status_is(page, busy, "#chat-problem")
        assert find(page, "#message").get_property("value") == "Hello"
        assert every(page, ".said") == []
        assert_only_refused(page, 503)
    use(page, "#tab-text", "#continue")
    status_is(page, "all that were requested")
    assert not find(page, "#text-problem").is_displayed()


CUT = """
const fetched = window.fetch;
window.fetch = async (path, options) => {
  if (path !== "v1/completions") return fetched(path, options);
  const choice = {index: 0, token_ids: [65], finish_reason: null,
                  logprobs: {tokens: ["A"], token_logprobs: [-1]}};
  const event = `data: ${JSON.stringify({choices: [choice]})}\\n\\n`;
  return new Response(event + (arguments[0] ?? ""), {status: 200});
};
"""


def test_a_stream_that_breaks(page: Any) -> None:
    """The text received so far is kept, and can be continued."""
    failed = json.dumps({"error": {"message": "the engine failed"}})
    for rest, words in (
        (f"data: {failed}\n\n", "The server failed: the engine failed."),
        ("data: {", "The stream ended before the text was complete"),
    ):
        page.refresh()
        eventually(lambda: find(page, "h1").text == "small")
        use(page, "#tab-text")
        page.execute_script(CUT, rest)
        use(page, ("#text", TEXT), "#continue")
        status_is(page, words, "#text-problem")
        assert strip(page) == [*TEXT, "A"]
        assert find(page, "#text-status").text == "1 new token: not complete"
        assert find(page, "#continue").is_enabled()


def test_stop_keeps_what_was_written(
    page: Any, server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = server.service._batch
    step = batch.step

    def slow() -> list[TokenSequence]:
        time.sleep(0.02)
        found: list[TokenSequence] = step()
        return found

    monkeypatch.setattr(batch, "step", slow)
    page.execute_script("document.getElementById('length').value = 240")
    use(page, ("#text", "O"), "#continue")
    eventually(lambda: len(strip(page)) > 3)
    use(page, "#stop")
    status_is(page, ": stopped")
    assert 3 < len(strip(page)) < 241
    eventually(lambda: server.service.open == 0)
    status_is(page, "0 running, 0 waiting", "#fact-requests")


def test_a_key(browser: Any, model: GPT2) -> None:
    """The page asks for it, the tab keeps it, and a user can remove it."""
    with serving(model_of(model.engine), model.tokenizer, rows=1, keys={"one": KEY}) as running:
        browser.get(running.url)
        for given in ("wrong", KEY):
            eventually(lambda: find(browser, "#key-dialog").is_displayed())
            use(browser, ("#key", given), "#key-form button")
            if given == "wrong":
                status_is(browser, "The server refuses this key.", "#key-problem")
        eventually(lambda: find(browser, "h1").text == "small")
        assert not find(browser, "#key-dialog").is_displayed()
        use(browser, "#tab-text", ("#text", TEXT), "#continue")
        eventually(lambda: len(strip(browser)) > len(TEXT))
        kept = (
            "return [Object.values(sessionStorage), JSON.stringify(localStorage), document.cookie]"
        )
        session, local, cookie = browser.execute_script(kept)
        assert session == [KEY]
        assert KEY not in local + cookie
        browser.refresh()
        eventually(lambda: find(browser, "h1").text == "small")
        use(browser, "#forget-key")
        eventually(lambda: find(browser, "#key-dialog").is_displayed())
        assert browser.execute_script("return sessionStorage.length") == 0
        assert_only_refused(browser, 401)


def test_a_server_that_goes_and_comes(browser: Any, model: GPT2) -> None:
    with serving(model_of(model.engine), model.tokenizer, rows=1) as running:
        browser.get(running.url)
        eventually(lambda: "running" in find(browser, "#facts").text)
    status_is(browser, "The server does not answer.", "#fact-requests")
    use(browser, "#tab-text", ("#text", TEXT), "#continue")
    status_is(browser, "The server does not answer.", "#text-problem")
    assert find(browser, "#continue").is_enabled()
    browser.get_log("browser")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_readable_and_fits_a_phone(page: Any, scheme: str) -> None:
    """The contrast is at least 4.5 to 1 (WCAG), even on the strongest color."""
    page.execute_script("document.documentElement.dataset.theme = arguments[0]", scheme)
    proceed(page, f"{TEXT} é {'x' * 60}")
    rows(page, "Next token")
    page.execute_script("for (const id of ['text-problem', 'chat-problem']) show(id, 'wrong')")
    for each in (".token.given", ".token.drawn", ".token.bytes", "#continue", "#edit", ".note",
                 ".legend", ".choice", "#text-problem", ".facts dt"):  # fmt: skip
        assert page.execute_script(CONTRAST, each) >= 4.5, each
    named = every(page, "button:not(.choice), input, textarea, .strip")
    shown = [each for each in named if each.is_displayed()]
    assert len(shown) > 12
    assert all(each.accessible_name for each in shown)
    size = {"width": 360, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        assert page.execute_script("return document.documentElement.scrollWidth") == 360
        use(page, "#tab-chat")
        assert page.execute_script("return document.documentElement.scrollWidth") == 360
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})

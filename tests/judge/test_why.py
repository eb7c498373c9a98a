"""Steps of the threads that a finding names: how many are shown, and the page.

The steps themselves are in tests/golden/commands/why.txt.
"""

from __future__ import annotations

import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from shutil import which
from typing import Any

import pytest

from gpt2block import InputError, Verdict
from gpt2block import judge as mine
from gpt2block.judge.why import RIGHT as NOTHING_TO_SHOW
from gpt2block.judge.why import ThreadStep, Why
from tests.command_line import gpt2block
from tests.devices import on_emulator
from tests.judge.test_verdict import ADD, RIGHT, SHAPE, file_of, validate

pytestmark = on_emulator


@pytest.fixture(scope="module")
def all_kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a file with all kernels, so that it compiles once."""
    bodies = {"race": RACE, "right": RIGHT, "loop": LOOP, "long": LONG, "barrier": BARRIER}
    return file_of(tmp_path_factory.mktemp("why"), bodies)


RACE = (
    "__shared__ float s[64];\n    s[threadIdx.x] = 0.5f;\n    if (i < n) y[i] = s[threadIdx.x ^ 1];"
)
LONG = (
    "if (i == 0) for (int k = 0; k < 21000; ++k) y[k % n] = k;\n    __syncthreads();\n    y[0] = i;"
)
BARRIER = "if (threadIdx.x < 40) __syncthreads();\n    if (i < n) y[i] = a[i] + b[i];"
LOOP = "if (i == 0) for (int k = 0; k < 40; ++k) y[k] = a[k] + b[k];\n    y[0] = i;"


def check(file: Path, name: str, **options: Any) -> Verdict:
    options = {"shape": SHAPE, "device": "cpu", "why": True, **options}
    return mine.check(file, "add", kernel=f"k_{name}", **options)


def test_a_right_kernel_has_no_steps(all_kernels: Path) -> None:
    found = check(all_kernels, "right")
    assert found.why == Why(note=NOTHING_TO_SHOW)
    assert "why" not in check(all_kernels, "right", why=False).as_dict()
    validate(check(all_kernels, "race").as_dict())


def test_loops_are_folded(all_kernels: Path) -> None:
    found = check(all_kernels, "loop")
    assert found.why
    rows = found.why.rows()
    assert len(found.why.steps) == 122
    assert [row.text for row in rows if row.step is None] == [
        "… 114 steps of the same lines are left out"
    ]
    assert [row.number for row in rows] == [1, 2, 3, 0, 118, 119, 120, 121, 122]


def test_the_last_20_000_steps_are_shown(all_kernels: Path) -> None:
    found = check(all_kernels, "long").why
    assert found
    assert (len(found.steps), found.note) == (20_000, "The first 1,006 steps are left out.")
    assert found.steps[-1].event == "writes y[0] = 1: nothing orders it after step 19999"
    assert found.steps[-1].problem


def test_each_thread_of_a_divergent_barrier_is_marked(all_kernels: Path) -> None:
    found = check(all_kernels, "barrier").why
    assert found
    assert len(found.threads) > 1
    assert [step.thread for step in found.steps if step.problem] == list(found.threads)


def test_a_long_table_keeps_its_first_and_last_rows() -> None:
    why = Why(tuple(ThreadStep("thread (0, 0, 0)", i, f"my.cu:{i}", "returns") for i in range(500)))
    rows = why.rows()
    assert (len(rows), rows[0].number, rows[-1].number) == (60, 1, 500)
    assert [row.text for row in rows if row.step is None] == ["… 441 steps are left out"]


class Page(HTMLParser):
    """A parser that checks that every element is closed, and collects texts and addresses."""

    VOID = ("meta", "input")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.addresses: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [str(value) for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_page_has_the_source_and_the_steps(all_kernels: Path, tmp_path: Path) -> None:
    page = tmp_path / "why.html"
    options = ("--kernel", "k_race", "--shape", "N=3,C=20", "--device", "cpu")
    shown = ("--why", "--why-page", page)
    ended = gpt2block("kernels", "add", "--mine", all_kernels, *options, *shown)
    assert ended.code == 1
    assert "reads s[1] = 0.5: nothing orders it" in ended.out
    assert ended.out.splitlines()[-1] == f"The steps are in {page}."
    text = page.read_text(encoding="utf-8")
    found = Page(text)
    assert not found.open
    assert not found.addresses
    assert not re.search(r"https?://|@import|url\(", text)
    code = all_kernels.read_text(encoding="utf-8").splitlines()
    assert all(not line or line in found.texts for line in code)
    steps = check(all_kernels, "race").why
    assert steps
    for step in steps.steps:
        assert f"{step.line}: {step.event}" in found.texts or step.event in found.texts


def test_a_browser_goes_back_to_the_first_step(all_kernels: Path, tmp_path: Path) -> None:
    if not (chromium := which("chromium")):
        pytest.skip("a browser is needed: chromium")
    options = ("--kernel", "k_race", "--shape", "N=3,C=20", "--device", "cpu")
    page = tmp_path / "why.html"
    gpt2block("kernels", "add", "--mine", all_kernels, *options, "--why-page", page)
    text = page.read_text(encoding="utf-8")
    key = 'document.dispatchEvent(new KeyboardEvent("keydown", { key: "Home" }));'
    page.write_text(text.replace("show(at);\n</script>", f"show(at);\n{key}\n</script>"), "utf-8")
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", str(page)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert "Step 1: thread (0, 0, 0), line" in done.stdout
    assert '<td class="changed">0.5</td>' in done.stdout


def test_steps_need_the_emulator() -> None:
    with pytest.raises(InputError, match="device: expected 'cpu', 'cuda'"):
        mine.check(ADD, "add", device="gpu", why=True)

"""docs/your-kernel.md shows the actual output of its commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpt2block.apps import cli
from gpt2block.judge.templates import names
from tests.devices import on_emulator, slow

PAGE = (Path(__file__).parents[2] / "docs" / "your-kernel.md").read_text(encoding="utf-8")
KERNEL, FIX = re.findall(r"```cuda\n(.*?)```", PAGE, re.DOTALL)
SHOWN = re.findall(r"^\$ gpt2block (kernels .*)\n((?:.|\n)*?)```", PAGE, re.MULTILINE)
RACY, FIXED, ODD, WHY, SOFTMAX = SHOWN


def words(text: str) -> list[str]:
    """Return words with digits of errors replaced, as these depend on compiler and libraries."""
    return re.sub(r"\d\.\de-\d\d", "an-error", text).split()


@on_emulator
@pytest.mark.parametrize(
    ("shown", "fixed", "code"),
    [slow(RACY, False, 1), (FIXED, True, 0), slow(ODD, True, 1), (WHY, False, 1),
     (SOFTMAX, True, 0)],
    ids=["race", "fixed", "odd block", "steps", "softmax"],
)  # fmt: skip
def test_the_page_shows_what_is_printed(
    shown: tuple[str, str],
    fixed: bool,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    mean = "    const float mean = part[0] / C;\n"
    text = KERNEL.replace(mean, mean + FIX) if fixed else KERNEL
    Path("my.cu").write_text(text, encoding="utf-8")
    command, output = shown
    with pytest.raises(SystemExit) as end:
        cli.main(command.split())
    assert end.value.code == code
    assert words(capsys.readouterr().out) == words(output)


def test_the_page_lists_every_template() -> None:
    listed = re.search(r"There is a template for ([\w\s,]+)\.", PAGE)
    assert listed
    assert re.findall(r"\w+", listed[1].replace(" and ", ", ")) == names()

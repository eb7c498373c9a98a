"""The pages in docs/learn show the actual output of their commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import dedent

import pytest

from gpt2block.judge.solutions import solution
from gpt2block.judge.templates import template
from gpt2block.ops.registry import find
from tests.command_line import gpt2block
from tests.devices import on_emulator, slow

LEARN = Path(__file__).parents[2] / "docs" / "learn"
BLOCK = re.compile(r"^( *)```\n(\1\$ gpt2block .*?)^\1```$", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"^\$ gpt2block (kernels .* --mine my\.cu .*)\n", re.MULTILINE)
Text = Callable[[], str]


def edited(read: Callable[..., str], *where: str, old: str, new: str = "") -> Text:
    """Return a template or a solution with one change; `old` must occur exactly once."""

    def text() -> str:
        operation, *which = where
        found = read(find(operation), *which)
        assert found.count(old) == 1
        return found.replace(old, new)

    return text


def without_barrier(operation: str, which: str, number: int) -> Text:
    """Return a solution without one of its barriers, counted from 1."""

    def text() -> str:
        lines = solution(find(operation), which).splitlines(keepends=True)
        at = [i for i, line in enumerate(lines) if "__syncthreads()" in line]
        del lines[at[number - 1]]
        return "".join(lines)

    return text


# Page → for each of its commands with output, in order, the content of my.cu.
SHOWN: Mapping[str, Sequence[Text]] = {
    "0-first-kernel": (
        lambda: template(find("add")),
        edited(template, "add", old="if (i < n) "),
    ),
    "2-reductions": (without_barrier("layernorm", "2.2", 3),),
    "4-shared-memory": (without_barrier("matmul_bias", "4.1", 2),),
}


def outputs(page: str) -> list[tuple[str, str]]:
    """Return the commands about my.cu on a page, each with the output shown below it."""
    text = (LEARN / f"{page}.md").read_text(encoding="utf-8")
    found = []
    for _, block in BLOCK.findall(text):
        _, *parts = COMMAND.split(dedent(block))
        found += list(zip(parts[::2], parts[1::2], strict=True))
    return found


def words(text: str) -> list[str]:
    """Return words with digits of errors replaced, as these depend on compiler and libraries."""
    return re.sub(r"\d\.\de-\d\d", "an-error", text).split()


def test_every_page_with_outputs_is_listed() -> None:
    assert {page.stem for page in LEARN.glob("*.md") if outputs(page.stem)} == set(SHOWN)


@on_emulator
@pytest.mark.parametrize("page", ["0-first-kernel", slow("2-reductions"), "4-shared-memory"])
def test_a_page_shows_what_is_printed(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for (command, shown), text in zip(outputs(page), SHOWN[page], strict=True):
        Path("my.cu").write_text(text(), encoding="utf-8")
        assert words(gpt2block(*shlex.split(command)).out) == words(shown)


@on_emulator
def test_one_uncorrected_operand_makes_as_many_elements_wrong_as_the_other(tmp_path: Path) -> None:
    """Chapter 6, exercise 3, states this number of wrong elements."""
    counts = []
    for kept in ("a.lo * c.hi", "a.hi * c.lo", "0.0f"):
        old = "sum += a.lo * c.hi + a.hi * c.lo;"
        text = edited(solution, "trimat", "6.2", old=old, new=f"sum += {kept};")
        file = tmp_path / "my.cu"
        file.write_text(text(), encoding="utf-8")
        shape = ("--shape", "B=1,T=70,NH=2,HS=12")
        said = gpt2block("kernels", "trimat", "--mine", file, *shape, "--device", "cpu").out
        found = re.search(r"([\d,]+) of 9,800 elements of out are wrong", said)
        assert found
        counts.append(int(found[1].replace(",", "")))
    page = (LEARN / "6-tensor-cores.md").read_text(encoding="utf-8")
    for count, told in zip(counts, ("4,840", "4,840", "4,890"), strict=True):
        assert f"about {told}" in page
        assert abs(count - int(told.replace(",", ""))) <= 50

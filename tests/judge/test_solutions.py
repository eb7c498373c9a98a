"""Solutions of the exercises in docs/learn: each is right, and its page shows it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from gpt2block import InputError, check_kernel
from gpt2block.judge.solutions import HERE, names, operations, solution
from gpt2block.judge.templates import HERE as TEMPLATES
from gpt2block.judge.verdict import ALL_ORDERS
from gpt2block.ops.registry import find
from tests.command_line import gpt2block
from tests.devices import on_emulator, slow

LEARN = Path(__file__).parents[2] / "docs" / "learn"
FILES = sorted(HERE.glob("*/*.cu"))
LONG = "softmax", "rmsnorm_matmul", "blocks_matmul"
FIRST = {file.parent: file for file in reversed(FILES) if file.parent.name not in LONG}.values()
each_file = pytest.mark.parametrize(
    "file", FILES, ids=lambda file: f"{file.parent.name} {file.stem}"
)


def commands(file: Path) -> list[list[str]]:
    """Return the arguments of each `gpt2block` in the opening comment, with `file` for my.cu."""
    text = file.read_text(encoding="utf-8")
    found = re.findall(r"^//   gpt2block (kernels .* --mine my\.cu.*)$", text, re.MULTILINE)
    return [shlex.split(line.replace("my.cu", str(file))) for line in found]


@on_emulator
@pytest.mark.usefixtures("fewer_runs")
@pytest.mark.parametrize("file", [
    file if file in FIRST else slow(file) for file in FILES
], ids=lambda file: f"{file.parent.name} {file.stem}")  # fmt: skip
def test_a_solution_is_right(file: Path) -> None:
    """A solution's own commands check it, without the built-in kernels to compare its speed."""
    first, *more = commands(file)
    assert first == ["kernels", file.parent.name, "--mine", str(file)]
    for _, operation, _, source, *options in (first, *more):
        given = dict(zip(options[::2], options[1::2], strict=True))
        sizes = re.findall(r"(\w+)=(\d+)", given.pop("--shape", ""))
        shape = {name: int(size) for name, size in sizes}
        dtype = given.pop("--dtype", None)
        assert not given
        found = check_kernel(operation, source, shape=shape, dtype=dtype, device="cpu")
        assert found.right, str(found)
        assert found.summary.startswith(ALL_ORDERS)


@on_emulator
@pytest.mark.usefixtures("fewer_runs")
@pytest.mark.parametrize(
    ("operation", "file", "shape"),
    [
        # The first value of row 3 is far from the mean.
        ("layernorm", HERE / "layernorm" / "1.2.cu", {"B": 1, "T": 4, "C": 9689}),
        # A sum of so many terms in one accumulator is off by 2e-4.
        ("log_likelihood", TEMPLATES / "log_likelihood.cu", {"N": 1, "V": 151936}),
        # Both values are sums whose terms cancel.
        ("trimat", HERE / "trimat" / "6.2.cu", {"B": 1, "T": 1, "NH": 2, "HS": 8}),
        # A gate of -100 gives a number below the smallest float, which a kernel may round to 0.
        ("silu_mul", TEMPLATES / "silu_mul.cu", {"M": 1, "N": 1}),
    ],
)
def test_a_size_is_right(operation: str, file: Path, shape: dict[str, int]) -> None:
    found = check_kernel(operation, file, shape=shape, device="cpu")
    assert found.right, str(found)


@on_emulator
def test_a_wrong_constant_is_found_in_one_value(tmp_path: Path) -> None:
    text = (TEMPLATES / "gelu.cu").read_text(encoding="utf-8")
    (tmp_path / "my.cu").write_text(text.replace("0.044715f", "0.04472f"), encoding="utf-8")
    shape = {"N": 1, "C": 1}
    assert not check_kernel("gelu", tmp_path / "my.cu", shape=shape, device="cpu").right


@each_file
def test_the_first_line_names_the_exercise(file: Path) -> None:
    chapter, exercise = file.stem.split(".")
    first, *_ = file.read_text(encoding="ascii").splitlines()
    assert first.startswith(f"// Chapter {chapter}, exercise {exercise}: ")


@each_file
def test_the_chapter_shows_the_solution(file: Path) -> None:
    chapter, exercise = file.stem.split(".")
    (page,) = LEARN.glob(f"{chapter}-*.md")
    answers = re.split("<summary>Answers? to ", page.read_text(encoding="utf-8"))
    path = f"../../{file.relative_to(LEARN.parent.parent).as_posix()}"
    shown = f"\n```\n\n[`{file.parent.name}/{file.name}`]({path}#L"
    (answer,) = [each for each in answers[1:] if shown in each]
    assert exercise in re.findall(r"\d+", answer.partition("<")[0])


def test_a_solution_is_printed_as_it_is() -> None:
    text = (HERE / "layernorm" / "2.1.cu").read_text(encoding="utf-8")
    assert gpt2block("kernels", "layernorm", "--solution", "2.1").out == text
    last = gpt2block("kernels", "layernorm", "--solution", "2").out
    assert last.startswith("// Chapter 2, exercise 2: ")


def test_solutions_are_in_the_order_of_the_course() -> None:
    assert operations() == sorted({file.parent.name for file in FILES})
    for name in operations():
        listed = names(name)
        assert listed == sorted(listed, key=lambda each: [int(part) for part in each.split(".")])


@pytest.mark.parametrize("which", ["99", "2.99", "x", "", "2.", "../layernorm/2.1", "-1"])
def test_a_solution_that_is_not_there(which: str) -> None:
    said = r"expected a chapter with an exercise about layernorm, or one of its .*: .*2\.1, 2\.2"
    with pytest.raises(InputError, match=said):
        solution(find("layernorm"), which)

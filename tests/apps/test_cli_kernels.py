"""`gpt2block kernels`: a wrong variant, a source in a terminal, and a race on a GPU.

What it prints without a GPU is in tests/golden/commands/kernels.txt.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gpt2block.apps.cli import mine as cli_mine
from gpt2block.apps.cli.mine import rank
from gpt2block.cuda import doctor
from gpt2block.judge import on_gpu
from gpt2block.judge.comparison import BenchmarkResult
from gpt2block.judge.finding import Finding
from gpt2block.judge.templates import template
from gpt2block.ops.bench.ceilings import Ceilings
from gpt2block.ops.bench.variants import Measurement
from gpt2block.ops.registry import find
from tests.command_line import Ended, gpt2block
from tests.devices import on_emulator


def kernels(*arguments: object) -> Ended:
    return gpt2block("kernels", *arguments)


@pytest.fixture
def my_softmax(tmp_path: Path) -> Path:
    file = tmp_path / "my.cu"
    file.write_text(template(find("softmax")), encoding="utf-8")
    return file


@on_emulator
def test_a_wrong_variant_on_the_emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpt2block.ops.workload.tolerance", lambda dtype: 0.0)
    ended = kernels("softmax", "--variant", "three_pass", "--shape", "T=5", "--device", "cpu")
    assert ended.code == 1
    assert "WRONG" in ended.out


def test_a_terminal_shows_a_source_with_colours_and_line_numbers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    from rich.console import Console  # noqa: PLC0415

    out = Console(force_terminal=True, width=130, color_system="standard")
    operation = find("layernorm")
    cli_mine.print_source(out, operation, operation.variant("5"))
    printed = capsys.readouterr().out
    assert "\x1b[" in printed
    assert "kernels_cu/learn/layernorm/ladder.cu" in printed
    assert "⋮" in printed


# The GPU's output, from given measurements


def row(variant: str, us: float) -> Measurement:
    at = {"B": 1, "T": 2, "C": 3}
    return Measurement("layernorm", variant, None, at, us, None, 4.0, "GB/s", 50.0, 1e-7, 1e-7)


def test_the_place_in_the_race_is_said() -> None:
    assert rank([row("1", 4.0), row("2", 2.0), row("mine", 3.0)]) == (
        "Your kernel is number 2 of 3, 50 % of the ceiling; it takes 1.50 times as long as 2, the "
        "fastest other one. --counters shows what takes time."
    )
    assert "number 1 of 2, 50 % of the ceiling; it is 2.00 times as fast as 1" in rank(
        [row("1", 4.0), row("mine", 2.0)]
    )
    assert rank([row("1", 4.0)]) == "your kernel did not run: see above"


def test_a_race_is_a_table_with_the_users_row(
    my_softmax: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "cuda_problem", lambda: None)
    raced = BenchmarkResult(
        [row("1", 4.0), row("mine", 2.0)], [], Ceilings(4000.0, {"float32": 50.0, "float16": 9.0})
    )
    monkeypatch.setattr(on_gpu, "run", lambda job: iter([raced]))
    ended = kernels("softmax", "--mine", my_softmax)
    assert ended.code == 0
    assert "Your kernel is number 1 of 2" in ended.out
    assert "mine" in ended.out
    found = kernels("softmax", "--mine", my_softmax, "--json").json
    assert [each["variant"] for each in found["benchmark"]["rows"]] == ["1", "mine"]
    hang = Finding("my_softmax still runs after 20 s, and was ended", at="during the check")
    monkeypatch.setattr(on_gpu, "run", lambda job: iter([hang]))
    ended = kernels("softmax", "--mine", my_softmax)
    assert ended.code == 1
    assert "my.cu: my_softmax still runs after 20 s, and was ended\nduring the check" in ended.out


@pytest.mark.gpu
def test_a_users_kernel_on_the_gpu(my_softmax: Path) -> None:
    shape = ["--shape", "B=1,NH=1,T=64"]
    ended = kernels("softmax", "--mine", my_softmax, *shape, "--json")
    assert ended.code == 0
    rows = ended.json["benchmark"]["rows"]
    names = [each["variant"] for each in rows]
    assert names == [*(each.name for each in find("softmax").variants), "mine"]
    assert all(each["gpu_us"] > 0 for each in rows)

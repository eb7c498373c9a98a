"""`gpt2block kernels` without a GPU: on the emulator, with a user's kernel, sources, templates."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpt2block import doctor, emulator, errors
from gpt2block.bench import Ceilings, Measurement
from gpt2block.cli import mine as cli_mine
from gpt2block.cli.mine import placed
from gpt2block.mine import on_gpu
from gpt2block.mine.comparison import BenchmarkResult
from gpt2block.mine.finding import Finding
from gpt2block.mine.templates import template
from gpt2block.ops.registry import find
from gpt2block.ptx import nvrtc
from tests.command_line import Ended, gpt2block

NO_GPU = "no driver today"
on_emulator = pytest.mark.skipif(
    emulator.missing() is not None, reason=f"no CUDA on the CPU: {emulator.missing()}"
)


def kernels(*arguments: object) -> Ended:
    return gpt2block("kernels", *arguments)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "cuda_problem", lambda: NO_GPU)


@pytest.fixture
def my_softmax(tmp_path: Path) -> Path:
    file = tmp_path / "my.cu"
    file.write_text(template(find("softmax")), encoding="utf-8")
    return file


@on_emulator
@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_the_emulator_runs() -> None:
    ended = kernels("softmax", "--variant", "three_pass", "--shape", "T=5")
    assert ended.code == 0
    assert ended.err == f"note: running on the CPU: {NO_GPU}\n"
    assert "reduced sizes: B=1 NH=1 T=5 (on a GPU B=2 NH=12 T=1024)" in ended.out
    assert "three_pass" in ended.out
    assert "No times" in ended.out


@on_emulator
@pytest.mark.usefixtures("no_gpu")
def test_a_variant_for_hopper_runs_on_the_emulator() -> None:
    ended = kernels("gemm", "--variant", "hopper", "--shape", "M=3,K=40,N=24")
    assert ended.code == 0
    assert re.search(r"hopper +gemm_hopper +1 of 1 .* ok", ended.out)


@on_emulator
@pytest.mark.usefixtures("no_gpu")
def test_what_the_emulator_cannot_run_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    options = ("gemm", "--variant", "hopper", "--shape", "K=12")
    ended = kernels(*options)
    assert ended.code == 1
    (line,) = (each for each in ended.out.splitlines() if each.startswith("not run: hopper: "))
    assert "expected K and N in multiples of 8, got K 12" in line
    found = kernels(*options, "--json", "--device", "cpu").json
    assert (found["rows"], found["device"], found["note"]) == ([], "cpu", None)
    assert found["skipped"] == [line.removeprefix("not run: ")]


@on_emulator
@pytest.mark.usefixtures("no_gpu")
def test_a_wrong_variant_on_the_emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpt2block.ops.workload.tolerance", lambda dtype: 0.0)
    ended = kernels("softmax", "--variant", "three_pass", "--shape", "T=5")
    assert ended.code == 1
    assert "WRONG" in ended.out


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    "options",
    [["--device", "cuda"], ["--sweep"], ["--plot", "a.png"], ["--device", "cuda", "--json"]],
)
def test_what_needs_a_gpu_says_so(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "find_spec", lambda name: name)  # matplotlib may be missing
    monkeypatch.chdir(tmp_path)
    ended = kernels("softmax", *options)
    assert list(tmp_path.iterdir()) == []  # nothing is drawn
    assert ended.code == 1
    why = f"softmax: no kernel was run: {NO_GPU}: this needs a GPU, and {doctor.ADVICE}"
    if "--json" in options:
        assert ended.json == {"run": False, "why": why}
    else:
        assert ended.err == f"error: {why}\n"


@pytest.mark.usefixtures("no_gpu")
def test_all_that_is_missing_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "find_spec", lambda name: None)
    for command in (["kernels", "softmax", "--sweep"], ["bench"]):
        said = gpt2block(*command, "--plot", "a.png").error
        for missing in ("--plot needs matplotlib", NO_GPU):
            assert missing in said


@pytest.mark.usefixtures("no_gpu")
def test_one_screen_lists_the_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each operation lists its variants, even if none can run."""
    monkeypatch.setenv("COLUMNS", "100")
    assert len(kernels().out.splitlines()) <= 45
    monkeypatch.setattr(emulator, "missing", lambda: "g++ is not installed")
    listed = kernels("softmax").out.split()
    for variant in find("softmax").table:
        assert {variant.name, *variant.kernels, *variant.idea.split()} <= set(listed)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("library", "said"),
    [
        (Path("libnvrtc.so"), "g++, which compiles the engine once, is not installed: apt install"),
        (None, "NVRTC, CUDA's run-time compiler, is not installed: pip install 'nvidia-cuda-nvrtc"),
    ],
)
def test_without_gpu_and_compiler_one_line_says_what_to_install(
    library: Path | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvrtc, "find_library", lambda: library)
    monkeypatch.setattr("shutil.which", lambda name: None)
    ended = kernels("softmax")
    assert ended.code == 1
    assert ended.err.count("\n") == 1
    assert NO_GPU in ended.err
    assert said in ended.err
    assert kernels("softmax", "--device", "cpu").error.startswith(
        f"the emulator cannot run: {said}"
    )


@on_emulator
@pytest.mark.usefixtures("no_gpu", "fewer_runs")
def test_a_users_kernel_on_the_emulator(my_softmax: Path) -> None:
    ended = kernels("softmax", "--mine", my_softmax, "--block", "32")
    assert ended.code == 0
    assert "softmax: my_softmax of my.cu, on the CPU, by an emulator of CUDA" in ended.out
    assert re.search(r"^ B=1 NH=3 T=5 .* ok *$", ended.out, re.MULTILINE)
    assert "Right in forward, reverse, shuffled and interleaved thread order." in ended.out
    assert re.search(r"^\d+ instructions, ", ended.out, re.MULTILINE)
    assert "A GPU times B=2, NH=12, T=1024: " in ended.out
    assert re.search(r"^Random sizes: seed \d+\.$", ended.out, re.MULTILINE)
    found = kernels("softmax", "--mine", my_softmax, "--shape", "T=3", "--json").json
    row, *special = found["checks"]
    assert all(each["sizes"] == {"B": 1, "NH": 1, "T": 3} for each in (row, *special))
    assert row["inputs"] == ""
    assert row["bound"] > row["max_rel"]
    assert [each["inputs"] for each in special][-1] == "-inf scores"
    assert (row["grid"], row["block"], row["shared"]) == ([1], [64], 0)
    assert (found["right"], found["findings"], found["device"]) == (True, [], "cpu")


@on_emulator
def test_a_fragile_kernel_says_why(my_softmax: Path) -> None:
    text = my_softmax.read_text(encoding="utf-8").replace(" - largest)", ")")
    my_softmax.write_text(text, encoding="utf-8")
    options = ("softmax", "--mine", my_softmax, "--device", "cpu")
    ended = kernels(*options, "--shape", "T=3")
    assert ended.code == 1
    assert "fragile: right for ordinary inputs" in ended.out
    assert "subtract the largest score of the row before exp" in ended.out
    (found,) = kernels(*options, "--shape", "T=3", "--json").json["findings"]
    assert found["kind"] == "fragile"
    assert found["bound"] > 1e-5
    said = kernels(*options, "--block", "2048").error
    assert said == "--block 2048: 2048 threads: at most 1024"


@on_emulator
def test_a_wrong_kernel_shows_its_line(my_softmax: Path) -> None:
    text = my_softmax.read_text(encoding="utf-8").replace("i = 1; i < n", "i = 1; i <= n")
    my_softmax.write_text(text, encoding="utf-8")
    ended = kernels("softmax", "--mine", my_softmax, "--device", "cpu")
    assert ended.code == 1
    lines = ended.out.splitlines()
    number = 1 + next(i for i, line in enumerate(text.splitlines()) if "i <= n" in line)
    assert lines[1] == f"my.cu:{number}: reads out of bounds: byte 300 of x, which has 300 bytes"
    assert lines[2] == f"{number:>5} | {text.splitlines()[number - 1]}"
    assert lines[3].startswith("in block (0, 0, 0), thread (14, 0, 0), at B=1, NH=3, T=5")
    found = kernels("softmax", "--mine", my_softmax, "--device", "cpu", "--json")
    assert found.code == 1
    assert found.json["findings"][0]["lines"] == [number]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--template"], "--template needs an operation"),
        (["softmax", "--template", "--source", "1"], "--source and --template: choose one"),
        (["softmax", "--grid", "3"], "--grid is an option of --mine: add it"),
        (["softmax", "--mine", "/no/such.cu"], "--mine /no/such.cu: no such file"),
        (["softmax", "--source", "9"], "--source 9: expected a number from 1 to 4"),
        (["softmax", "--device", "tpu"], "--device tpu: expected cuda or cpu"),
        (["softmax", "--device", "cpu", "--sweep"], "times are measured on a GPU"),
        (["rope_qkv", "--template"], "rope_qkv has no template: expected one of add"),
        (["--sweep"], "as layernorm: gpt2block kernels layernorm --sweep; gpt2block kernels lists"),
        (["--mine", "my.cu"], "--mine needs an operation, such as layernorm: gpt2block kernels "),
        (["--mine", "my.cu"], "kernels layernorm --mine my.cu; gpt2block kernels lists all oper"),
        (["--shape", "B=1"], "--shape needs an operation"),
        (["norm"], "unknown operation 'norm' (did you mean rmsnorm?): expected one of layernorm, "),
        (["trimat", "--variant", "9"], "unknown --variant '9'"),
        (["trimat", "--shape", "B"], "expected sizes such as"),
    ],
)
def test_options_that_do_not_fit(arguments: list[str], said: str) -> None:
    assert said in kernels(*arguments).error


def test_a_template_and_a_source_are_printed_as_they_are() -> None:
    assert kernels("softmax", "--template").out == template(find("softmax"))
    printed = kernels("softmax", "--source", "2").out
    assert "softmax_forward_kernel2(" in printed
    assert 'extern "C" __global__ void softmax_forward_kernel1(' not in printed
    assert "\x1b" not in printed


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
    assert placed([row("1", 4.0), row("2", 2.0), row("mine", 3.0)]) == (
        "Your kernel is number 2 of 3, 50 % of the ceiling; it takes 1.50 times as long as 2, the "
        "fastest other one."
    )
    assert "number 1 of 2, 50 % of the ceiling; it is 2.00 times as fast as 1" in placed(
        [row("1", 4.0), row("mine", 2.0)]
    )
    assert placed([row("1", 4.0)]) == "your kernel did not run: see above"


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

"""`gpt2block judge`: the table of a folder, child processes, the verdicts and their output."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from gpt2block import InputError, doctor, emulator
from gpt2block.mine import folder as judging
from gpt2block.mine.folder import Judged, KernelFile, confusion, disagreements, entries, judge
from tests import children
from tests.command_line import Ended, gpt2block
from tests.test_verdict import ADD, validate

on_emulator = pytest.mark.skipif(
    emulator.missing() is not None, reason=f"no CUDA on the CPU: {emulator.missing()}"
)
RIGHT = "if (i < n) y[i] = a[i] + b[i];"
SHAPE = "--shape N=3,C=20"


def write(folder: Path, name: str, body: str = RIGHT, first: str = "") -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    text = first + ADD.replace("NAME", "k").replace("BODY", body)
    (folder / name).write_text(text, encoding="utf-8")


def write_table(folder: Path, *rows: Sequence[str], columns: str = "file,operation") -> None:
    with (folder / "table.csv").open("w", encoding="utf-8", newline="") as stream:
        csv.writer(stream).writerows([columns.split(","), *rows])


def test_a_table_names_kernels_expectations_and_options(tmp_path: Path) -> None:
    write(tmp_path, "a.cu")
    options = "--shape N=3,C=20 --block=64 --grid 'ceil(n / 64)'"
    write_table(
        tmp_path,
        ("a.cu", "add", "wrong", "race", options, "of week 3"),
        ("a.cu", "gelu"),
        columns="file,operation,expected,kind,options,note",
    )
    first, second = entries(tmp_path)
    given = {"shape": "N=3,C=20", "block": "64", "grid": "ceil(n / 64)"}
    assert first == KernelFile(
        tmp_path / "a.cu", "a.cu", "add", "wrong", "race", given, "of week 3"
    )
    assert second == KernelFile(tmp_path / "a.cu", "a.cu", "gelu")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (("b.cu", "add", "", ""), r"table\.csv:3: file 'b\.cu': no such file"),
        (("a.cu", "ad", "", ""), r"table\.csv:3: unknown operation 'ad'"),
        (("a.cu", "add", "good", ""), "table.csv:3: expected: 'good': expected 'right' or 'wrong'"),
        (("a.cu", "add", "", "--seed 3"), "3: options: '--seed': expected one of --dtype, --lay"),
        (("a.cu", "add", "", "shape N=3"), "3: options: 'shape': expected one of --dtype"),
        (("a.cu", "add", "", "--block"), "3: options: --block needs a value"),
        (("a.cu", "add", "", "--grid 'n"), '3: options: "--grid \'n": No closing quotation'),
        (("a.cu", "add", "", "--shape Q=3"), "3: shape 'Q=3': add has no size Q"),
        (("a.cu", "add", "", "--shape N=3", "C=2"), "3: more values than columns: quote"),
    ],
)
def test_an_error_in_the_table_names_its_line(
    row: Sequence[str], said: str, tmp_path: Path
) -> None:
    write(tmp_path, "a.cu")
    columns = "file,operation,expected,options"
    write_table(tmp_path, ("a.cu", "add", "right", ""), row, columns=columns)
    with pytest.raises(InputError, match=said):
        entries(tmp_path)


def test_columns_are_known_and_a_folder_has_kernels(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no kernel: expected \.cu files, or rows in table\.csv"):
        entries(tmp_path)
    with pytest.raises(InputError, match="no such folder"):
        entries(tmp_path / "none")
    for columns, said in (
        ("file,operation,expectd", "column 'expectd': expected file, operation and optionally"),
        ("file,note", "columns file, note: expected file, operation"),
    ):
        write_table(tmp_path, columns=columns)
        with pytest.raises(InputError, match=said):
            entries(tmp_path)


def test_without_a_table_files_name_their_operation(tmp_path: Path) -> None:
    write(tmp_path, "b.cu", first="// By me.\n// operation: add\n")
    write(tmp_path, "student/a.cu", first="// operation: gelu\n")
    found = entries(tmp_path)
    assert [(each.file, each.operation) for each in found] == [
        ("b.cu", "add"), ("student/a.cu", "gelu"),
    ]  # fmt: skip
    write(tmp_path, "c.cu", first="\n" * 20 + "// operation: gelu\n")
    with pytest.raises(InputError, match=r"c\.cu: no operation: write a line such as // operation"):
        entries(tmp_path)
    assert [each.operation for each in entries(tmp_path, "softmax")] == ["add", "softmax", "gelu"]
    write(tmp_path, "c.cu", first="// operation: norm\n")
    with pytest.raises(InputError, match=r"c\.cu: unknown operation 'norm'"):
        entries(tmp_path)


def test_a_check_that_crashes_or_hangs_ends_its_own_process_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(judging, "_serve", children.judges)
    names = ["a", "dies", "b", "c", "hangs", "d"]
    kernels = [KernelFile(Path(f"{name}.cu"), f"{name}.cu", "add") for name in names]
    found = {each.entry.file[:-3]: each for each in judge(kernels, 1, 20.0)}
    assert set(found) == set(names)
    for name, said in (("dies", "ended with code 7"), ("hangs", "took more than 20 s")):
        assert found[name].verdict == "not judged"
        assert found[name].said == f"the process of the check {said}"
    processes = {name: each.seconds for name, each in found.items() if each.verdict == "right"}
    assert len(set(processes.values())) == 3
    assert processes["b"] == processes["c"]  # one process checks several kernels
    assert float(os.getpid()) not in processes.values()


def test_an_error_of_the_checks_is_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.cu").write_text("int x;\n", encoding="utf-8")
    entry = KernelFile(tmp_path / "a.cu", "a.cu", "add", options={"shape": "N=3,C=20"})
    found = judging.judged(entry, device="cpu")
    assert (found.verdict, found.result, found.finding) == ("not judged", None, "")
    assert "no kernel: expected extern" in found.said
    monkeypatch.setattr(judging, "check", lambda *_, **options: 1 // 0)
    assert judging.judged(entry).said.startswith("ZeroDivisionError: ")


def test_verdicts_are_compared_with_expected_ones() -> None:
    def judged(expected: str, verdict: str) -> Judged:
        return Judged(KernelFile(Path("a.cu"), "a.cu", "add", expected), verdict, 0.0)

    right, missed, refused = (judged("wrong", each) for each in ("wrong", "right", "not judged"))
    free = judged("", "wrong")
    assert disagreements([right, missed, refused, free]) == [missed, refused]
    assert disagreements([free, judged("", "right")]) == [free]
    assert confusion([right, missed, refused, free]) == {
        "wrong": {"right": 1, "wrong": 1, "not judged": 1},
        "": {"right": 0, "wrong": 1, "not judged": 0},
    }


@pytest.fixture
def homework(tmp_path: Path) -> Path:
    write(tmp_path, "right.cu")
    write(tmp_path, "racy.cu", "y[0] = i;")
    write(tmp_path, "broken.cu", "if (i < n) y[i] = q;")
    write_table(
        tmp_path,
        ("right.cu", "add", "right", SHAPE, ""),
        ("racy.cu", "add", "wrong", SHAPE, ""),
        ("broken.cu", "add", "right", "", "of a stranger"),
        columns="file,operation,expected,options,note",
    )
    return tmp_path


def command(folder: Path, *options: object) -> Ended:
    return gpt2block("judge", folder, "--device", "cpu", "--jobs", 2, *options)


@on_emulator
def test_the_command_prints_verdicts_a_confusion_matrix_and_disagreements(homework: Path) -> None:
    ended = command(homework, "--csv", homework / "out.csv")
    assert (ended.code, ended.err) == (1, "")
    lines = [line.split() for line in ended.out.splitlines()]
    assert [line[:4] for line in lines[1:3]] == [
        ["right.cu", "add", "right", "right"], ["racy.cu", "add", "wrong", "wrong"],
    ]  # fmt: skip
    assert ["right", "1", "1", "0"] in lines
    assert ["wrong", "0", "1", "0"] in lines
    assert "broken.cu: expected right, found wrong (of a stranger)" in ended.out
    assert "  broken.cu does not compile: broken.cu:4: " in ended.out
    with (homework / "out.csv").open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [(row["file"], row["verdict"], row["finding"]) for row in rows] == [
        ("right.cu", "right", ""),
        ("racy.cu", "wrong", "race"),
        ("broken.cu", "wrong", "does_not_compile"),
    ]
    assert rows[0]["options"] == "--shape=N=3,C=20"


@on_emulator
def test_the_command_prints_json_and_succeeds_if_all_is_as_expected(homework: Path) -> None:
    (homework / "table.csv").write_text(
        f'file,operation,expected,options\nracy.cu,add,wrong,"{SHAPE}"\n', encoding="utf-8"
    )
    ended = command(homework, "--json", "--seed", 3)
    assert ended.code == 0
    assert ended.json["seed"] == 3
    assert ended.json["kernels"][0]["result"]["seed"] is None  # the file states its sizes
    assert ended.json["confusion"] == {"wrong": {"right": 0, "wrong": 1, "not judged": 0}}
    (kernel,) = ended.json["kernels"]
    assert (kernel["file"], kernel["verdict"], kernel["finding"]) == ("racy.cu", "wrong", "race")
    validate(kernel["result"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--device", "tpu"], "--device tpu: expected cuda or cpu"),
        (["--device", "cuda"], "--device cuda cannot be used: no driver today"),
        (["--csv", "/no/such/folder/out.csv"], "there is no directory /no/such/folder"),
        (["--operation", "norm"], "unknown operation 'norm'"),
        (["--jobs", "0"], "--jobs"),
        (["--seed", "-1"], "--seed"),
    ],
)
def test_options_that_do_not_fit(
    options: list[str], said: str, homework: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "cuda_problem", lambda: "no driver today")
    assert said in gpt2block("judge", homework, *options).error

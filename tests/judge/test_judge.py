"""`gpt2block judge`: the table of a folder, child processes, the verdicts and their output."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpt2block import InputError
from gpt2block.judge import folder as judging
from gpt2block.judge.folder import Judged, KernelFile, confusion, disagreements, entries, judge
from tests import children
from tests.judge.test_verdict import ADD, RIGHT


def write(folder: Path, name: str, body: str = RIGHT, first: str = "") -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    text = first + ADD.replace("NAME", "k").replace("BODY", body)
    (folder / name).write_text(text, encoding="utf-8")


def test_a_table_names_kernels_expectations_and_options(tmp_path: Path) -> None:
    write(tmp_path, "a.cu")
    (tmp_path / "table.csv").write_text(
        "file,operation,expected,kind,options,note\n"
        "a.cu,add,wrong,race,\"--shape N=3,C=20 --block=64 --grid 'ceil(n / 64)'\",of week 3\n"
        "a.cu,gelu\n"
    )
    first, second = entries(tmp_path)
    given = {"shape": "N=3,C=20", "block": "64", "grid": "ceil(n / 64)"}
    assert first == KernelFile(
        tmp_path / "a.cu", "a.cu", "add", "wrong", "race", given, "of week 3"
    )
    assert second == KernelFile(tmp_path / "a.cu", "a.cu", "gelu")


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
    (tmp_path / "c.cu").write_bytes(b"// f\xfcr alle\n")
    assert len(entries(tmp_path, "add")) == 3  # its check says why it cannot be read
    for path, said in ((tmp_path, r"^\S*c\.cu: expected UTF-8"), (tmp_path / "b.cu", "got a file")):
        with pytest.raises(InputError, match=said):
            entries(path)
    (tmp_path / "table.csv").write_bytes(b"file,operation\nb.cu,add\n\xff,\n")
    with pytest.raises(InputError, match=r"table\.csv: expected UTF-8, byte 24 is not"):
        entries(tmp_path)


def test_a_check_that_crashes_or_hangs_ends_its_own_process_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(judging, "_serve", children.judges)
    names = ["a", "dies", "b", "c", "hangs", "d"]
    kernels = [KernelFile(Path(f"{name}.cu"), f"{name}.cu", "add") for name in names]
    found = {each.entry.file[:-3]: each for each in judge(kernels, 1, 8.0)}
    assert set(found) == set(names)
    for name, said in (("dies", "ended with code 7"), ("hangs", "took more than 8 s")):
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

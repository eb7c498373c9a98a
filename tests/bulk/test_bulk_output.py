"""The output of `gpt2block map`: wrong inputs and outputs, damaged manifests, exit codes.

The shards are computed in this process, without a cluster.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from fuzzing.gguf_writer import save

from gpt2block import InputError
from gpt2block.apps.cli import map as cli_map
from gpt2block.bulk import paths, records, shards
from gpt2block.bulk.job import Job
from tests import inline_cluster
from tests.command_line import Ended, gpt2block
from tests.inline_cluster import InlineClient, contents
from tests.refusals import cases

pytest.importorskip("distributed", reason="gpt2block map needs dask and distributed")
from gpt2block.bulk import cluster, driver, job

MODEL = Path(__file__).parents[2] / "gpt2block/files/bundled/shakespeare"


@pytest.fixture(autouse=True)
def client(monkeypatch: pytest.MonkeyPatch) -> InlineClient:
    return inline_cluster.use(monkeypatch)


def run(*words: str | Path) -> Ended:
    """Run `gpt2block map` on the CPU."""
    return gpt2block("map", *words, "--device", "cpu")


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "lines.txt"
    path.write_text("To be,\nx\nor not\nto be\n")
    return path


def test_the_exit_code_shows_whether_any_record_has_a_result(lines: Path, tmp_path: Path) -> None:
    code, out, _ = run("score", lines, "--output", tmp_path / "some")
    assert code == 0
    assert "3 records, 1 errors in " in out
    bad = tmp_path / "bad.txt"
    bad.write_text("x\n \ny\n\n")
    for _ in range(2):  # a second run has nothing to compute, and reports the same
        code, out, message = run("score", bad, "--output", tmp_path / "none")
        assert code == 1
        assert re.search("0 records, 2 errors in .*/errors, 2 blank lines skipped\n", out)
        assert message.endswith(
            "error: none of 2 records could be computed: bad.txt, line 1: expected at least two "
            "tokens, got 1\n"
        )
    empty = tmp_path / "empty.txt"
    empty.touch()
    code, out, _ = run("score", empty, "--output", tmp_path / "empty")
    assert (code, out) == (0, f"{tmp_path / 'empty'}: 0 records\n")


def test_ignored_entries_of_a_folder_are_reported(lines: Path, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    (folder / "older").mkdir(parents=True)
    lines.rename(folder / lines.name)
    for name in ("a.csv", "notes.md", ".hidden.txt", "z.text", "b.jsonl"):
        (folder / name).touch()
    files = [path.name for path in records.find_files([folder])]
    assert files == ["b.jsonl", "lines.txt", "z.text"]
    code, out, err = run("score", folder, "--output", tmp_path / "o")
    assert code == 0
    assert "3 records, 1 errors" in out
    assert f"{folder}: 4 entries are not read (.hidden.txt, a.csv, notes.md, …): expected" in err
    (folder / "a.csv").unlink()
    (folder / ".hidden.txt").unlink()
    err = run("score", folder, "--output", tmp_path / "o").err
    assert "2 entries are not read (notes.md, older/): expected" in err


@pytest.mark.parametrize(("path", "message"), cases("inputs of a bulk job"))
def test_inputs_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo.txt")
    Path("empty").mkdir()
    Path("zero.txt").symlink_to("/dev/zero")
    Path("loop.txt").symlink_to("loop.txt")
    Path("in.csv").touch()
    assert message in run("score", path, "--output", "o").error
    assert not Path("o").exists()


@pytest.mark.parametrize(("output", "message"), cases("outputs of a bulk job"))
def test_a_wrong_output_is_refused_before_the_input_is_read(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "locked" / shards.LOCK).mkdir(parents=True)
    (tmp_path / "waits").mkdir()
    os.mkfifo(tmp_path / "waits" / shards.LOCK)
    (tmp_path / "listed" / shards.MANIFEST).mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    source = lines if output == "listed" else tmp_path / "no such input.txt"
    assert message in run("score", source, "--output", output).error
    (tmp_path / "listed" / shards.LOCK).unlink(missing_ok=True)
    assert sorted(tmp_path.rglob("*")) == before


def test_new_empty_folders_are_removed_again(lines: Path, tmp_path: Path) -> None:
    assert "no such file" in run("score", "nowhere.txt", "--output", tmp_path / "a/b/c").error
    assert not (tmp_path / "a").exists()


def test_a_working_directory_that_was_deleted(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deleted = tmp_path / "deleted"
    deleted.mkdir()
    monkeypatch.chdir(deleted)
    deleted.rmdir()
    for output in ("relative", tmp_path / "o"):
        message = run("score", lines, "--output", output).error
        assert "the working directory was deleted: change to one that exists" in message


@pytest.mark.parametrize("written", [0, 2])
def test_a_disk_that_is_full(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    """The disk is full before the first shard or later; the job can be continued afterwards."""
    command = ("score", lines, "--shard-size", "1", "--output")
    assert run(*command, tmp_path / "whole").code == 0
    room, replace_file = [None] * written, shards.replace_file

    def replace(path: Path, data: bytes) -> str:
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        room.pop()
        return replace_file(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(shards, "replace_file", replace)
        ended = run(*command, tmp_path / "o")
    assert ended.code == 1
    assert "cannot be written" in ended.err
    assert ended.err.endswith("the same command continues the job\n")
    assert "No space left on device" in ended.err
    assert run(*command, tmp_path / "o").code == 0
    assert contents(tmp_path / "o") == contents(tmp_path / "whole")


def test_an_input_that_changes_during_the_job(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("score", lines, "--output", tmp_path / "o", "--shard-size", "1")
    before = lines.read_text()
    with monkeypatch.context() as patch:
        changed = before.replace("to be", "to bee")
        patch.setattr(cli_map._Watcher, "show", lambda *_, **__: lines.write_text(changed))
        ended = run(*command)
    assert ended.code == 1
    assert "shard 3 failed: ChangedError" in ended.err
    assert "1 shards failed (3): the same command tries them again" in ended.out
    lines.write_text(before)
    assert run(*command).code == 0
    assert list(shards.Manifest(tmp_path / "o").done) == [0, 1, 2, 3]


def test_the_format_and_name_of_the_input_belong_to_the_job(tmp_path: Path) -> None:
    first = tmp_path / "in.txt"
    first.write_text('{"text": "To be"}\n{"text": "or not"}\n')
    command = ("--output", tmp_path / "o", "--shard-size", "1")
    assert run("score", first, *command).code == 0
    again = first.rename(tmp_path / "in.jsonl")
    message = run("score", again, *command).error
    assert "inputs.kinds was 'text', now it is 'jsonl': choose another --output" in message
    renamed = again.rename(tmp_path / "other.txt")
    assert "inputs.names_sha256 was" in run("score", renamed, *command).error
    # The same bytes in two files: the second line has another file name and line number.
    (tmp_path / "in.txt").write_text('{"text": "To be"}\n')
    (tmp_path / "rest.txt").write_text('{"text": "or not"}\n')
    message = run("score", tmp_path / "in.txt", tmp_path / "rest.txt", *command).error
    assert "inputs.files was 1, now it is 2" in message


def test_the_dtype_belongs_to_the_job(lines: Path, tmp_path: Path) -> None:
    command = ("score", lines, "--output", tmp_path / "o")
    assert run(*command).code == 0
    message = run(*command, "--dtype", "bfloat16").error
    assert "dtype was 'float32', now it is 'bfloat16': choose another --output" in message


@pytest.mark.parametrize("words", [(), ("--scheduler", "tcp://a-cluster:1")])
def test_a_job_keeps_the_dtype_that_its_workers_chose(
    words: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers first read GGUF blocks (dtype "file"), then pretend not to."""
    lines, file, output = (tmp_path / name for name in ("ids.jsonl", "m.gguf", "o"))
    lines.write_text('{"text": [84, 111]}')
    save(file, MODEL, lambda name: "F32" if "position" in name else "Q8_0")
    monkeypatch.setattr(cluster, "running", cluster.local)
    for reads, message in ((True, ""), (False, "dtype was 'file', now it is 'float32'")):
        for module in (driver, job):
            monkeypatch.setattr(module, "reads_blocks", lambda _, reads=reads: reads)
        command = ("map", "score", lines, "--output", output, "--model", file, *words)
        ended = gpt2block(*command)
        assert (message in ended.err, ended.code) == (True, 2 if message else 0)
        assert '"dtype": "file"' in (output / shards.MANIFEST).read_text()
        (output / "part-00000.jsonl").unlink(missing_ok=True)  # the shard must be computed again


def test_a_job_is_finished_repaired_or_refused(
    client: InlineClient, lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "o"
    command = ("embed", lines, "--output", output, "--shard-size", "2")
    assert run(*command).code == 0
    before = contents(output)
    row = json.loads(before["part-00000.jsonl"].splitlines()[0])
    assert list(row) == ["index", "embedding", "n_tokens"]
    assert len(row["embedding"]) == 256
    assert run(*command).code == 0
    assert client.tries == [0, 1]  # all shards were done already
    (output / "part-00001.jsonl").write_bytes(b"damaged")
    assert "part-00001.jsonl was changed or removed" in run(*command).err
    assert client.tries == [0, 1, 1]

    other = tmp_path / "model"
    shutil.copytree(MODEL, other)
    with (other / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x00")
    changes: dict[str, tuple[str | Path, ...]] = {
        "of another job: options.pooling was 'mean'": (*command, "--pooling", "last"),
        "overflow: expected 'error' or 'truncate', got 'x'": (*command, "--overflow", "x"),
        "--shard-size was 2, now it is 7": (*command, "--shard-size", "7"),
        "task was 'embed', now it is 'score'": ("score", *command[1:]),
        "model_sha256 was": (*command, "--model", str(other)),
        "no Dask scheduler answers": (
            "embed", lines, "--output", tmp_path / "n", "--scheduler", "tcp://127.0.0.1:9"
        ),
        "--workers is for a local cluster": (
            "embed", lines, "--output", tmp_path / "n", "--scheduler", "tcp://x:9", "--workers", "2"
        ),
        "not empty, and not written by gpt2block map": ("embed", lines, "--output", other),
    }  # fmt: skip
    monkeypatch.setattr("gpt2block.bulk.cluster.CONNECT_SECONDS", 1)
    for message, words in changes.items():
        assert message in run(*words).error
    lines.write_text(lines.read_text().replace("T", "t"))
    assert "input_sha256 was" in run(*command).error
    with shards.folder_lock(output, "token"):
        assert "another gpt2block map writes to this folder" in run(*command).error
    assert contents(output) == before
    assert not (tmp_path / "n").exists()


DEEP = "[" * 500 + "]" * 500
DEEPER = "[" * 100_000 + "]" * 100_000


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[records.Shard]]:
    """Return the manifest and the shards of a finished job."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "lines.txt").write_text("To be,\nx\nor not\nto be\n")
    job = Job("score", device="cpu", output=str(folder / "o"))
    with pytest.MonkeyPatch.context() as patch:
        inline_cluster.use(patch)
        driver.run(job, [str(folder / "lines.txt")], Mock())
    cut = records.cut([folder / "lines.txt"], job.shard_size, [])
    return (folder / "o" / shards.MANIFEST).read_text(), cut


def refused(finished: tuple[str, list[records.Shard]], folder: Path, text: str) -> str:
    """Refuse to continue the finished job with another text of the manifest; return the message."""
    (folder / shards.MANIFEST).write_text(text)
    described = json.loads(finished[0].splitlines()[0])
    with pytest.raises(InputError) as error:
        driver._open_manifest(folder, described, finished[1], Mock())
    message = str(error.value)
    assert message.startswith(f"{folder / shards.MANIFEST}")
    assert message.endswith("choose another --output")
    return message


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("shard", ["null", "-1", "1.5", "true", '"0"', "7", "1" * 400, "1" * 5000]),
        ("records", ["-1", "null", "1000000"]),
        ("errors", ["[1]", "0"]),
        ("tokens", ["{}", "NaN", "1e3"]),
        ("sha256", ["null", '"abc"', "1" * 64, DEEP]),
        ("errors_sha256", [DEEPER, "5", "null"]),
        ("more", ["1"]),
    ],
)
def test_a_manifest_changed_by_hand(
    finished: tuple[str, Any], tmp_path: Path, name: str, values: list[str]
) -> None:
    job, done, _ = finished[0].split("\n")
    entry = json.dumps({**json.loads(done), name: "HERE"})
    for value in values:
        changed = f"{job}\n{entry}\n".replace('"HERE"', value)
        assert ": damaged" in refused(finished, tmp_path, changed)


def test_a_manifest_whose_job_was_changed_by_hand(
    finished: tuple[str, Any], tmp_path: Path
) -> None:
    first, rest = finished[0].split("\n", 1)
    for name, correct in json.loads(first).items():
        for value in {"null", "{}", DEEP, "1" * 400} - {json.dumps(correct)}:
            changed = json.dumps({**json.loads(first), name: "HERE"}).replace('"HERE"', value)
            refused(finished, tmp_path, f"{changed}\n{rest}")


def test_a_file_that_is_not_a_manifest(finished: tuple[str, Any], tmp_path: Path) -> None:
    for text in ("", "[]\n", "nonsense\n", "\0\n", "{}\n{}\n", DEEPER + "\n"):
        assert "damaged, or not a manifest" in refused(finished, tmp_path, text)


def test_part_files_of_another_job_are_reported(lines: Path, tmp_path: Path) -> None:
    output = tmp_path / "o"
    run("score", lines, "--output", output)
    names = ["errors/part-00007.ndjson", "part-00001.jsonl", "part-00000.parquet", "part-x"]
    for name in names:
        (output / name).touch()
    code, _, err = run("score", lines, "--output", output)
    assert code == 0
    assert f"{output} has 4 part files that are not of this job: errors/part-00007.ndjson, " in err
    assert all((output / name).exists() for name in names)


def test_manifest(tmp_path: Path) -> None:
    written = shards.Manifest(tmp_path)
    written.write({"task": "score"})
    for shard in (2, 0, 1):
        sha256 = shards.replace_file(tmp_path / shards.part_name(shard, "jsonl"), b"%d" % shard)
        written.add(shards.ShardEntry(shard, 1, 0, 1, sha256, None))
    sha256 = shards.replace_file(tmp_path / shards.part_name(3, "jsonl"), b"3")
    errors = shards.replace_file(tmp_path / shards.errors_name(3), b"{}")
    written.add(shards.ShardEntry(3, 1, 1, 1, sha256, errors))
    with written.path.open("ab") as file:
        file.write(b'{"shard": 4, "rec')  # the process was killed while writing
    again = shards.Manifest(tmp_path)
    assert again.job == {"task": "score"}
    assert again.done == written.done
    assert again.forget_damaged("jsonl") == []
    (tmp_path / "part-00001.jsonl").write_bytes(b"another")
    (tmp_path / "part-00002.jsonl").unlink()
    (tmp_path / shards.errors_name(3)).unlink()
    damaged = ["part-00001.jsonl", "part-00002.jsonl", "part-00003.ndjson"]
    assert sorted(again.forget_damaged("jsonl")) == damaged
    again.write({"task": "score"})
    assert list(shards.Manifest(tmp_path).done) == [0]


def test_absolute_paths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", "/home/nobody")
    monkeypatch.chdir(tmp_path)
    assert paths.absolute("output", "~/a") == Path("/home/nobody/a")
    assert paths.absolute("output", Path("a")) == tmp_path / "a"

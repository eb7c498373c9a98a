"""`gpt2block map` on real Dask clusters of separate processes, with failures.

After every failure, the completed output is byte for byte that of an undisturbed run.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from gpt2block import GPT2, cli
from gpt2block.bulk import shards

pytest.importorskip("distributed", reason="gpt2block map needs dask and distributed")
import dask
import psutil  # distributed needs both

ROOT = Path(__file__).parent.parent
TIMEOUT = 120  # seconds
LINES, SHARD = 2000, 50
UNREADABLE = {
    3: (b'{"text": "\xc3("}', "not UTF-8: byte 10 of the line"),
    77: (b'{"text": "unfinished', "not JSON: "),
    78: (b'{"words": "no text"}', "no field 'text'"),
    79: (b'"a string"', "expected an object, got str"),
    500: (b'{"text": 5}', "expected text or token ids, got int"),
    501: (b'{"text": null}', "expected text or token ids, got NoneType"),
    999: (b'{"text": ""}', "expected at least two tokens, got 0"),
    1000: (b'{"text": [5, 256]}', "token 1 is 256: expected ids from 0 to 255"),
    1999: (b'{"text": "\\ud800"}', "character 0 is U+D800, a lone surrogate"),
}
BLANK = (10, 1234)


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2,000 lines: short texts, some unreadable records, and two blank lines."""
    words = (ROOT / "gpt2block/models/shakespeare/passage.txt").read_text().split()
    random = np.random.default_rng(0)
    lines = []
    for index in range(LINES):
        text = " ".join(["O", *random.choice(words, random.integers(1, 4))])
        line = json.dumps({"id": f"r{index}", "text": text}).encode()
        lines.append(UNREADABLE.get(index, (line,))[0] if index not in BLANK else b"")
    path = tmp_path_factory.mktemp("input") / "records.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def few(records: Path, folder: Path, count: int = 200) -> Path:
    """Write the first `count` records to a file."""
    path = folder / "few.jsonl"
    path.write_bytes(b"".join(records.read_bytes().splitlines(keepends=True)[:count]))
    return path


class Job:
    """`gpt2block map` in a process of its own."""

    def __init__(
        self,
        *arguments: str | Path,
        shard: int = SHARD,
        limit: str = "",
        group: bool = False,
        root: Path = ROOT,
    ) -> None:
        options = ["--device", "cpu", "--shard-size", str(shard)]
        command = [sys.executable, "-m", "gpt2block", "map", *map(str, arguments), *options]
        if limit:
            command = ["bash", "-c", f'{limit}; exec "$@"', "bash", *command]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(root),
            cwd=root,
            start_new_session=group,
        )

    def end(self) -> tuple[int, str]:
        """Wait; return the exit code and everything that was printed."""
        printed, _ = self.process.communicate(timeout=TIMEOUT)
        return self.process.returncode, printed

    def workers(self) -> list[Any]:
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in children if "spawn_main" in " ".join(child.cmdline())]

    def kill_all(self) -> None:
        """Send SIGKILL to the client and its workers; Python's resource tracker may end itself."""
        workers = self.workers()
        self.process.kill()
        for worker in workers:
            with suppress(psutil.NoSuchProcess):
                worker.kill()
        self.process.communicate(timeout=TIMEOUT)


def environment(root: Path | None = ROOT) -> dict[str, str]:
    """Return an environment that imports gpt2block from `root`; None: without gpt2block."""
    path = "" if root is None else str(root)
    return {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}


def run(*arguments: str | Path, **options: Any) -> str:
    """Run the command, which must succeed; return what it printed."""
    code, printed = Job(*arguments, **options).end()
    assert code == 0, printed
    return printed


def refused(*arguments: str | Path, shard: int = SHARD) -> str:
    """Run the command in this process; return the message with which it is refused."""
    options = ("--device", "cpu", "--shard-size", str(shard))
    stderr = StringIO()
    with redirect_stderr(stderr), pytest.raises(SystemExit) as end:
        cli.main(["map", *map(str, arguments), *options])
    assert end.value.code == 2, stderr.getvalue()
    return stderr.getvalue()


def wait(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def parts(folder: Path) -> int:
    return len(list(folder.glob("part-*.jsonl")))


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file's content by name, without the lock."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != shards.LOCK
    }


def lines_of(folder: Path, pattern: str) -> list[dict[str, Any]]:
    files = sorted(folder.glob(pattern))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def undisturbed(records: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("undisturbed") / "output"
    printed = run("score", records, "--output", output, "--workers", "2", "--keep", "id")
    assert "dashboard http://127.0.0.1:" in printed
    assert "1,989 records, 9 errors in" in printed
    assert " records/s, " in printed
    return output


def test_unreadable_records_are_counted(undisturbed: Path) -> None:
    errors = lines_of(undisturbed, "errors/*.ndjson")
    assert [error["index"] for error in errors] == list(UNREADABLE)
    for error in errors:
        assert error["reason"].startswith(UNREADABLE[error["index"]][1])
        assert error["line"] == error["index"] + 1
        assert error["file"] == "records.jsonl"
    manifest = shards.Manifest(undisturbed)
    assert sum(entry.errors for entry in manifest.done.values()) == len(UNREADABLE)
    assert sum(entry.records for entry in manifest.done.values()) == LINES - len(UNREADABLE) - 2


def test_the_results_have_the_order_of_the_input(undisturbed: Path, records: Path) -> None:
    names = sorted(path.name for path in undisturbed.rglob("*.jsonl"))
    assert names == [f"part-{number:05}.jsonl" for number in range(LINES // SHARD)]
    found = lines_of(undisturbed, "part-*.jsonl")
    expected = [index for index in range(LINES) if index not in (*UNREADABLE, *BLANK)]
    assert [row["index"] for row in found] == expected
    model = GPT2.from_pretrained(device="cpu")
    lines = records.read_bytes().split(b"\n")
    for row in found[::97]:
        entry = json.loads(lines[row["index"]])
        assert row["id"] == entry["id"]
        score = model.score(entry["text"])
        assert (row["n_tokens"], row["n_bytes"]) == (score.n_tokens, score.bytes)
        np.testing.assert_allclose(row["log_likelihood"], score.log_likelihood, 1e-6)


def test_two_shards_at_once_in_a_worker(
    records: Path, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The setting of a worker with a GPU."""
    from gpt2block.bulk import cluster, driver, job  # noqa: PLC0415

    assert job.threads_of("score", "cuda") == 2
    assert job.threads_of("generate", "cuda") == job.threads_of("score", "cpu") == 1
    monkeypatch.setattr(driver, "threads_of", lambda *_: 2)
    with cluster.local(1, "cpu", threads=2) as client:
        assert list(client.nthreads().values()) == [2]
        name = "distributed.worker.profile.enabled"
        assert client.submit(dask.config.get, name).result() is False
    output = tmp_path / "o"
    small = job.Job("score", str(output), device="cpu", keep=("id",), shard_size=SHARD)
    outcome = driver.run(small, [str(few(records, tmp_path))], Mock(), workers=1)
    assert (outcome.records + outcome.errors, outcome.failed) == (199, {})
    for name in (shards.part_name(number, "jsonl") for number in range(200 // SHARD)):
        assert (output / name).read_bytes() == (undisturbed / name).read_bytes()


def test_a_worker_is_killed(records: Path, undisturbed: Path, tmp_path: Path) -> None:
    output = tmp_path / "o"
    job = Job("score", records, "--output", output, "--workers", "2", "--keep", "id")
    wait(lambda: parts(output) >= 10)
    job.workers()[0].send_signal(signal.SIGKILL)
    code, printed = job.end()
    assert code == 0, printed
    assert "Restarting worker" in printed
    assert contents(output) == contents(undisturbed)


def test_the_whole_job_is_killed(records: Path, undisturbed: Path, tmp_path: Path) -> None:
    output = tmp_path / "o"
    command = ("score", records, "--output", output, "--keep", "id")
    job = Job(*command, "--workers", "1")
    wait(lambda: parts(output) >= 8)
    job.kill_all()
    written = parts(output)
    assert 8 <= written < LINES // SHARD
    (output / ".part-00099.jsonl.0.tmp").write_bytes(b"half")
    with (output / shards.MANIFEST).open("ab") as file:
        file.write(b'{"shard": 39, "re')
    done = shards.Manifest(output).done
    assert written - 1 <= len(done) <= written
    files = [output / shards.part_name(number, "jsonl") for number in done]
    times = [file.stat().st_mtime for file in files]
    assert " lines are done already" in run(*command, "--workers", "2")
    assert [file.stat().st_mtime for file in files] == times
    assert contents(output) == contents(undisturbed)


def test_workers_end_with_their_client(records: Path, tmp_path: Path) -> None:
    job = Job("score", records, "--output", tmp_path / "o", "--workers", "2")
    wait(lambda: parts(tmp_path / "o") >= 1)
    workers = job.workers()
    assert len(workers) == 2
    job.process.kill()
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert not alive
    job.process.communicate(timeout=TIMEOUT)


def test_finished_damaged_and_refused(
    records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands that continue, repair or refuse the output of one small job."""
    short, output = few(records, tmp_path, 100), tmp_path / "o"
    command = ("embed", short, "--output", output)
    run(*command)
    before = contents(output)
    row = json.loads(before["part-00000.jsonl"].splitlines()[0])
    assert list(row) == ["index", "embedding", "n_tokens"]
    assert len(row["embedding"]) == 256

    assert "dashboard" not in run(*command)  # nothing is left to compute
    (output / "part-00001.jsonl").write_bytes(b"damaged")
    assert "part-00001.jsonl was changed or removed" in run(*command)
    assert contents(output) == before

    assert "of another job: options.pooling was 'mean'" in refused(*command, "--pooling", "last")
    assert "--shard-size was 50, now it is 7" in refused(*command, shard=7)
    assert "task was 'embed', now it is 'score'" in refused("score", short, "--output", output)
    other = tmp_path / "model"
    shutil.copytree(ROOT / "gpt2block/models/shakespeare", other)
    with (other / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x00")
    assert "model_sha256 was" in refused(*command, "--model", str(other))
    short.write_bytes(short.read_bytes().replace(b"O", b"o", 1))
    assert "input_sha256 was" in refused(*command)
    assert contents(output) == before

    with shards.locked(output, "token"):
        assert "another gpt2block map writes to this folder" in refused(*command)

    other_files = tmp_path / "files"
    other_files.mkdir()
    (other_files / "notes.txt").touch()
    message = refused("embed", short, "--output", other_files)
    assert "not empty, and not written by gpt2block map" in message
    monkeypatch.setattr("gpt2block.bulk.cluster.CONNECT_SECONDS", 1)
    nowhere = ("embed", short, "--output", tmp_path / "n")
    assert "no Dask scheduler answers" in refused(*nowhere, "--scheduler", "tcp://127.0.0.1:9")
    assert "--workers is for a local cluster" in refused(
        *nowhere, "--scheduler", "tcp://127.0.0.1:9", "--workers", "2"
    )
    assert not (tmp_path / "n").exists()


def test_a_disk_that_is_full(records: Path, tmp_path: Path) -> None:
    short, output = few(records, tmp_path), tmp_path / "o"
    command = ("score", short, "--output", output)
    code, printed = Job(*command, limit="ulimit -f 4").end()  # no file of more than 4 KiB
    assert code == 1
    assert "cannot be written" in printed
    assert "the same command continues the job" in printed
    assert "Traceback" not in printed
    run(*command)
    run("score", short, "--output", tmp_path / "p")
    assert contents(output) == contents(tmp_path / "p")


def test_an_input_that_changes_during_the_job(records: Path, tmp_path: Path) -> None:
    short, output = few(records, tmp_path, 400), tmp_path / "o"
    before = short.read_bytes()
    job = Job("score", short, "--output", output, "--workers", "1")
    wait(lambda: parts(output) >= 1)
    short.write_bytes(before[:-10] + before[-10:].replace(b'"', b"'"))
    code, printed = job.end()
    assert code == 1
    assert "shard 7 failed: ChangedError" in printed
    assert "1 shards failed (7): the same command tries them again" in printed
    short.write_bytes(before)
    run("score", short, "--output", output)
    assert len(shards.Manifest(output).done) == 8


def changed_copy(folder: Path, changes: dict[str, tuple[str, str]]) -> Path:
    """Copy the packages; changes: file → the text to replace, and its replacement."""
    for package in ("gpt2block", "kernels_cu"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("*.pyc"))
    for file, (old, new) in changes.items():
        text = (folder / file).read_text()
        assert old in text
        (folder / file).write_text(text.replace(old, new))
    return folder


def test_a_shard_that_kills_its_workers_is_the_only_one_that_fails(
    records: Path, tmp_path: Path
) -> None:
    load = "    loaded = predictor(job)\n"
    changes = {
        "gpt2block/bulk/job.py": (load, f"{load}    shard.number == 1 and os._exit(1)\n"),
        "gpt2block/bulk/cluster.py": ("ALLOWED_FAILURES = 10", "ALLOWED_FAILURES = 1"),
    }
    other = changed_copy(tmp_path / "other", changes)
    short, output = few(records, tmp_path, 100), tmp_path / "o"
    code, printed = Job("score", short, "--output", output, shard=10, root=other).end()
    assert code == 1
    assert "1 shards failed (1): the same command tries them again" in printed
    assert sorted(shards.Manifest(output).done) == [0, *range(2, 10)]


class Cluster:
    """A scheduler and workers that the command does not start."""

    def __init__(self, folder: Path, root: Path | None = ROOT) -> None:
        self.file = folder / "scheduler.json"
        self._folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []
        self.scheduler = self._start(
            "dask_scheduler", "--port", "0", "--host", "127.0.0.1", "--no-dashboard",
            "--scheduler-file", str(self.file), root=root,
        )  # fmt: skip
        wait(lambda: self.file.exists() and self.file.read_text().endswith("}"))
        self.address: str = json.loads(self.file.read_text())["address"]

    def add_worker(self, root: Path | None = ROOT) -> None:
        options = ("--nthreads", "2", "--local-directory", str(self._folder), "--no-dashboard")
        self._start("dask_worker", self.address, *options, root=root)

    def _start(self, module: str, *arguments: str, root: Path | None) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", f"distributed.cli.{module}", *arguments]
        log = (self._folder / f"log{len(self.processes)}").open("wb")
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=environment(root), cwd=self._folder
        )
        self.processes.append(process)
        return process


@contextmanager
def cluster(folder: Path, root: Path | None = ROOT) -> Iterator[Cluster]:
    folder.mkdir(exist_ok=True)
    started = Cluster(folder, root)
    try:
        yield started
    finally:
        for process in started.processes[::-1]:  # a worker would wait for its lost scheduler
            process.terminate()
            process.wait(TIMEOUT)


def test_two_clients_share_a_cluster_and_its_scheduler_dies(records: Path, tmp_path: Path) -> None:
    short = few(records, tmp_path, 150)
    with cluster(tmp_path / "cluster") as shared:
        shared.add_worker()
        shared.add_worker()
        at = ("--scheduler", shared.address)
        words = ("generate", short, "--max-new-tokens", "4")
        commands = [(*words, "--seed", "1"), (*words, "--seed", "2")]
        alone = [tmp_path / "alone1", tmp_path / "alone2"]
        for command, output in zip(commands, alone, strict=True):
            run(*command, "--output", output, *at, shard=10)
        both = [tmp_path / "both1", tmp_path / "both2"]
        jobs = [
            Job(*command, "--output", output, *at, shard=10)
            for command, output in zip(commands, both, strict=True)
        ]
        wait(lambda: parts(both[0]) > 1 and parts(both[1]) > 1)
        assert [job.process.poll() for job in jobs] == [None, None]
        for job, one, other in zip(jobs, alone, both, strict=True):
            code, printed = job.end()
            assert code == 0, printed
            assert contents(one) == contents(other)
        assert contents(alone[0]) != contents(alone[1])

        output = tmp_path / "orphan"
        job = Job(*commands[0], "--output", output, *at, shard=10)
        wait(lambda: parts(output) > 1)
        shared.scheduler.kill()
        code, printed = job.end()
        assert code == 1, printed
        assert "the connection to the scheduler is lost" in printed
        assert "the same command continues the job" in printed
        assert parts(output) < 15
    run(*commands[0], "--output", output, "--workers", "1", shard=10)
    assert contents(output) == contents(alone[0])


def test_workers_of_another_version(records: Path, tmp_path: Path) -> None:
    change = "from __future__", "# another version\nfrom __future__"
    other = changed_copy(tmp_path / "other", {"gpt2block/text/scoring.py": change})
    short = few(records, tmp_path, 10)
    with cluster(tmp_path / "cluster") as mixed:
        command = ("score", short, "--output", tmp_path / "o", "--scheduler", mixed.address)
        mixed.add_worker(other)
        message = refused(*command)
        assert "has gpt2block " in message
        assert "install the same version" in message
        assert not (tmp_path / "o").exists()
    with cluster(tmp_path / "another", other) as changed:
        changed.add_worker(other)
        assert "the scheduler has gpt2block " in refused(*command[:-1], changed.address)


def test_interrupted(records: Path, tmp_path: Path) -> None:
    job = Job("score", records, "--output", tmp_path / "o", "--workers", "2", group=True)
    wait(lambda: parts(tmp_path / "o") >= 2)
    workers = job.workers()
    os.killpg(job.process.pid, signal.SIGINT)  # all processes, as a terminal does
    code, printed = job.end()
    assert code == 130
    assert "interrupted: the same command continues from here" in printed
    assert "Traceback" not in printed
    assert not psutil.wait_procs(workers, timeout=20)[1]

"""`gpt2block map` on real Dask clusters of separate processes, with failures.

After every failure, the completed output is byte for byte that of one process without Dask.
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
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpt2block import GPT2, cli
from gpt2block.bulk import shards

pytest.importorskip("distributed", reason="gpt2block map needs dask and distributed")
import psutil  # distributed needs both

ROOT = Path(__file__).parent.parent
TIMEOUT = 120  # seconds
LINES, SHARD = 400, 10
UNREADABLE = {
    3: (b'{"text": "\xc3("}', "not UTF-8: byte 10 of the line"),
    77: (b'{"text": "unfinished', "not JSON: "),
    78: (b'{"words": "no text"}', "no field 'text'"),
    79: (b'"a string"', "expected an object, got str"),
    200: (b'{"text": 5}', "expected text or token ids, got int"),
    201: (b'{"text": null}', "expected text or token ids, got NoneType"),
    250: (b'{"text": ""}', "expected at least two tokens, got 0"),
    251: (b'{"text": [5, 256]}', "token 1 is 256: expected ids from 0 to 255"),
    399: (b'{"text": "\\ud800"}', "character 0 is U+D800, a lone surrogate"),
}
BLANK = (10, 234)


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """400 lines: short texts, some unreadable records, and two blank lines."""
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


def few(records: Path, folder: Path, count: int) -> Path:
    """Write the first `count` records to a file."""
    path = folder / "few.jsonl"
    path.write_bytes(b"".join(records.read_bytes().splitlines(keepends=True)[:count]))
    return path


def environment(root: Path = ROOT) -> dict[str, str]:
    """Return an environment that imports gpt2block from `root`. BLAS has one thread, as on Dask."""
    return {**os.environ, "PYTHONPATH": str(root), "OPENBLAS_NUM_THREADS": "1"}


def options(shard: int) -> list[str]:
    return ["--device", "cpu", "--shard-size", str(shard)]


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
        words = [*map(str, arguments), *options(shard)]
        command = [sys.executable, "-m", "gpt2block", "map", *words]
        if limit:
            command = ["bash", "-c", f'{limit}; exec "$@"', "bash", *command]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=environment(root), cwd=root, start_new_session=group,
        )  # fmt: skip

    def end(self) -> tuple[int, str]:
        """Wait; return the exit code and everything that was printed."""
        printed, _ = self.process.communicate(timeout=TIMEOUT)
        return self.process.returncode, printed

    def workers(self) -> list[Any]:
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in children if "spawn_main" in " ".join(child.cmdline())]


ALONE = """
import sys
import pytest
from gpt2block import cli
from tests import inline_cluster
inline_cluster.use(pytest.MonkeyPatch())
for command in sys.stdin.read().splitlines():
    try:
        cli.main(["map", *command.split("\t")])
    except SystemExit as end:
        assert not end.code, command
"""


def run_alone(*commands: tuple[str | Path, ...], shard: int = SHARD) -> None:
    """Run commands, which must succeed, one after the other in one process without Dask."""
    lines = ["\t".join([*map(str, command), *options(shard)]) for command in commands]
    done = subprocess.run(
        [sys.executable, "-c", ALONE], input="\n".join(lines), env=environment(), cwd=ROOT,
        capture_output=True, text=True, check=False, timeout=TIMEOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def refused(*arguments: str | Path, shard: int = SHARD) -> str:
    """Run the command in this process; return the message with which it is refused."""
    stderr = StringIO()
    with redirect_stderr(stderr), pytest.raises(SystemExit) as end:
        cli.main(["map", *map(str, arguments), *options(shard)])
    assert end.value.code == 2, stderr.getvalue()
    return stderr.getvalue()


def wait(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def parts(folder: Path) -> int:
    return len(list(folder.glob("part-*.jsonl")))


def recorded(folder: Path) -> list[int]:
    """Return the shards in the manifest; a part may be written shortly before its entry."""
    return list(shards.Manifest(folder).done)


def contents(folder: Path, pattern: str = "*") -> dict[str, bytes]:
    """Return every file's content by name, without the lock."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob(pattern))
        if path.is_file() and path.name != shards.LOCK
    }


def lines_of(folder: Path, pattern: str) -> list[dict[str, Any]]:
    files = sorted(folder.glob(pattern))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def undisturbed(records: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("undisturbed") / "output"
    run_alone(("score", records, "--output", output, "--keep", "id", "--logprobs"))
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


def test_an_interrupted_and_killed_job_continues(
    records: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """Ctrl-C ends the first run, SIGKILL the second one; in the third one a worker is killed."""
    output = tmp_path / "o"
    command = ("score", records, "--output", output, "--keep", "id", "--logprobs", "--workers", "2")
    job = Job(*command, group=True)
    wait(lambda: parts(output) >= 2)
    workers = job.workers()
    os.killpg(job.process.pid, signal.SIGINT)  # all processes, as a terminal does
    code, printed = job.end()
    assert code == 130
    assert "interrupted: the same command continues from here" in printed
    assert "Traceback" not in printed
    assert not psutil.wait_procs(workers, timeout=20)[1]

    before = recorded(output)
    job = Job(*command)
    wait(lambda: len(recorded(output)) > len(before))
    workers = job.workers()
    assert len(workers) == 2
    job.process.kill()
    assert not psutil.wait_procs(workers, timeout=20)[1]
    job.end()

    (output / ".part-00099.jsonl.0.tmp").write_bytes(b"half")
    with (output / shards.MANIFEST).open("ab") as file:
        file.write(b'{"shard": 39, "re')
    done = recorded(output)
    assert len(before) < len(done) <= parts(output) < LINES // SHARD
    files = [output / shards.part_name(number, "jsonl") for number in done]
    times = [file.stat().st_mtime for file in files]
    job = Job(*command)
    wait(lambda: len(recorded(output)) > len(done))
    job.workers()[0].kill()
    code, printed = job.end()
    assert code == 0, printed
    messages = (
        "dashboard http://127.0.0.1:", " lines are done already", "Restarting worker",
        "389 records, 9 errors in", " records/s, ",
    )  # fmt: skip
    assert all(message in printed for message in messages), printed
    assert [file.stat().st_mtime for file in files] == times
    assert contents(output) == contents(undisturbed)


def test_a_disk_that_is_full(records: Path, undisturbed: Path, tmp_path: Path) -> None:
    short, output = few(records, tmp_path, 4 * SHARD), tmp_path / "o"
    command = ("score", short, "--output", output, "--keep", "id", "--logprobs")
    code, printed = Job(*command, "--workers", "1", limit="ulimit -f 2").end()  # files of 2 KiB
    assert code == 1
    assert "cannot be written" in printed
    assert "the same command continues the job" in printed
    assert "Traceback" not in printed
    run_alone(command)
    for name, data in contents(output, "part-*.jsonl").items():
        assert (undisturbed / name).read_bytes() == data
    assert parts(output) == 4


def test_an_input_that_changes_during_the_job(records: Path, tmp_path: Path) -> None:
    short, output = few(records, tmp_path, 400), tmp_path / "o"
    before = short.read_bytes()
    job = Job("score", short, "--output", output, "--workers", "1", shard=50)
    wait(lambda: parts(output) >= 1)
    short.write_bytes(before[:-10] + before[-10:].replace(b'"', b"'"))
    code, printed = job.end()
    assert code == 1
    assert "shard 7 failed: ChangedError" in printed
    assert "1 shards failed (7): the same command tries them again" in printed
    short.write_bytes(before)
    run_alone(("score", short, "--output", output), shard=50)
    assert len(shards.Manifest(output).done) == 8


def changed_copy(folder: Path, changes: dict[str, tuple[str, str]]) -> Path:
    """Copy the packages; changes: file → the text to replace, and its replacement."""
    for package in ("gpt2block", "kernels_cu"):
        shutil.copytree(ROOT / package, folder / package)
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
    short, output = few(records, tmp_path, 50), tmp_path / "o"
    command = ("score", short, "--output", output, "--workers", "1")
    code, printed = Job(*command, shard=10, root=other).end()
    assert code == 1
    assert "1 shards failed (1): the same command tries them again" in printed
    assert sorted(shards.Manifest(output).done) == [0, 2, 3, 4]


class Cluster:
    """A scheduler and workers that the command does not start."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        file = folder / "scheduler.json"
        self.scheduler = self._start(
            "dask_scheduler", "--port", "0", "--host", "127.0.0.1", "--no-dashboard",
            "--scheduler-file", str(file),
        )  # fmt: skip
        wait(lambda: file.exists() and file.read_text().endswith("}"))
        self.address: str = json.loads(file.read_text())["address"]

    def add_worker(self, root: Path = ROOT) -> None:
        options = ("--nthreads", "2", "--local-directory", str(self._folder), "--no-dashboard")
        self._start("dask_worker", self.address, *options, root=root)

    def _start(self, module: str, *arguments: str, root: Path = ROOT) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", f"distributed.cli.{module}", *arguments]
        with (self._folder / f"log{len(self._processes)}").open("wb") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment(root), cwd=self._folder
            )
        self._processes.append(process)
        return process

    def close(self) -> None:
        for process in self._processes[::-1]:  # a worker would wait for its lost scheduler
            process.terminate()
            process.wait(TIMEOUT)


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    started = Cluster(folder)
    try:
        yield started
    finally:
        started.close()


def test_two_clients_share_a_cluster_and_its_scheduler_dies(records: Path, tmp_path: Path) -> None:
    words = ("generate", few(records, tmp_path, 150), "--max-new-tokens", "4")
    commands = [(*words, "--seed", "1"), (*words, "--seed", "2")]
    alone, both = ([tmp_path / f"{name}{seed}" for seed in (1, 2)] for name in ("alone", "both"))
    output = tmp_path / "orphan"
    with cluster(tmp_path / "cluster") as shared:
        shared.add_worker()
        shared.add_worker()
        at = ("--scheduler", shared.address)
        jobs = [
            Job(*command, "--output", folder, *at, shard=10)
            for command, folder in zip(commands, both, strict=True)
        ]
        wait(lambda: parts(both[0]) > 1 and parts(both[1]) > 1)
        assert [job.process.poll() for job in jobs] == [None, None]
        for job in jobs:
            code, printed = job.end()
            assert code == 0, printed

        job = Job(*commands[0], "--output", output, *at, shard=10)
        wait(lambda: parts(output) > 1)
        shared.scheduler.kill()
        code, printed = job.end()
        assert code == 1, printed
        assert "the connection to the scheduler is lost" in printed
        assert "the same command continues the job" in printed
        assert parts(output) < 15
    folders = [*zip(commands, alone, strict=True), (commands[0], output)]
    run_alone(*((*command, "--output", folder) for command, folder in folders), shard=10)
    assert contents(both[0]) == contents(alone[0]) == contents(output)
    assert contents(both[1]) == contents(alone[1]) != contents(alone[0])


def test_workers_of_another_version(records: Path, tmp_path: Path) -> None:
    change = "from __future__", "# another version\nfrom __future__"
    other = changed_copy(tmp_path / "other", {"gpt2block/text/scoring.py": change})
    short = few(records, tmp_path, 10)
    with cluster(tmp_path / "cluster") as mixed:
        mixed.add_worker(other)
        message = refused("score", short, "--output", tmp_path / "o", "--scheduler", mixed.address)
    assert "has gpt2block " in message
    assert "install the same version" in message
    assert not (tmp_path / "o").exists()

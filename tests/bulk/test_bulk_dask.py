"""`gpt2block map` on Dask: a local cluster, a cluster of other processes, and their failures.

After every failure, the completed output equals the output of one process without Dask.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from gpt2block import GPT2, DeviceError, InputError
from gpt2block.apps.cli import map as cli_map
from gpt2block.bulk import identity, shards
from gpt2block.bulk import job as bulk_job
from gpt2block.bulk import records as bulk_records
from gpt2block.bulk.job import Job, threads_of
from gpt2block.bulk.records import Shard
from gpt2block.cuda import doctor
from gpt2block.cuda.doctor import Driver, VisibleDevice
from gpt2block.cuda.formats import Formats
from gpt2block.engine.model import weight_bytes
from gpt2block.files.checkpoints import Checkpoint
from tests import inline_cluster
from tests.command_line import gpt2block, python
from tests.devices import slow
from tests.inline_cluster import contents

pytest.importorskip("distributed", reason="gpt2block map needs dask and distributed")
import dask
import psutil  # distributed needs both

from gpt2block.bulk import cluster, driver

ROOT = Path(__file__).parents[2]
TIMEOUT = 300  # seconds
# BLAS has one thread, as in Dask's workers: the number changes the last bits of a product.
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
LINES, SHARD, FEW = 64, 4, 24
UNREADABLE = {
    3: (b'{"text": "\xc3("}', "not UTF-8: byte 10 of the line"),
    31: (b'{"text": "unfinished', "not JSON: "),
    50: (b'{"text": 5}', "expected text or token ids, got int"),
    57: (b'{"text": [5, 256]}', "token 1 is 256: expected ids from 0 to 255"),
    63: (b'{"text": "\\ud800"}', "character 0 is U+D800, a lone surrogate"),
}
BLANK = (5, 45)


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 64 lines: short texts, some unreadable records, and two blank lines."""
    words = (ROOT / "gpt2block/files/bundled/shakespeare/passage.txt").read_text().split()
    random = np.random.default_rng(0)
    lines = []
    for index in range(LINES):
        text = " ".join(["O", *random.choice(words, random.integers(1, 4))])
        line = json.dumps({"id": f"r{index}", "text": text}).encode()
        lines.append(UNREADABLE.get(index, (line,))[0] if index not in BLANK else b"")
    path = tmp_path_factory.mktemp("input") / "records.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    (path.parent / "few.jsonl").write_bytes(b"\n".join(lines[:FEW]) + b"\n")
    return path


def score(records: Path, output: Path) -> list[str]:
    """Return the command that tests with processes disturb."""
    return ["map", "score", str(records), "--output", str(output), "--keep", "id", "--logprobs",
            "--device", "cpu", "--shard-size", str(SHARD)]  # fmt: skip


def generating(output: Path) -> Job:
    options = {"max_new_tokens": 4, "seed": 1}
    return Job("generate", device="cpu", options=options, output=str(output), shard_size=SHARD)


ALONE = """
import sys
from pathlib import Path
from unittest.mock import Mock
import pytest
from gpt2block.bulk import driver
from tests import inline_cluster
from tests.command_line import gpt2block
from tests.inline_cluster import contents
from tests.bulk.test_bulk_dask import generating, score
records, folder = map(Path, sys.argv[1:])
few = str(records.parent / "few.jsonl")
inline_cluster.use(pytest.MonkeyPatch())
assert gpt2block(*score(records, folder / "score")).code == 0
driver.run(generating(folder / "generated"), [few], Mock())
"""


@pytest.fixture(scope="module")
def alone(records: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the outputs of one process without Dask: score, generated."""
    folder = tmp_path_factory.mktemp("alone")
    python(ALONE, records, folder, env=ENVIRONMENT, cwd=ROOT, check=True, timeout=TIMEOUT)
    return folder


def wait(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def recorded(folder: Path) -> list[int]:
    """Return the shards in the manifest; a part may be written shortly before its entry."""
    return list(shards.Manifest(folder).done)


def lines_of(folder: Path, pattern: str) -> list[dict[str, Any]]:
    files = sorted(folder.glob(pattern))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_the_output_has_every_record_or_its_error(alone: Path, records: Path) -> None:
    errors = lines_of(alone / "score", "errors/*.ndjson")
    assert [error["index"] for error in errors] == list(UNREADABLE)
    for error in errors:
        assert error["reason"].startswith(UNREADABLE[error["index"]][1])
        assert error["line"] == error["index"] + 1
        assert error["file"] == "records.jsonl"
    manifest = shards.Manifest(alone / "score")
    assert sum(entry.errors for entry in manifest.done.values()) == len(UNREADABLE)
    assert sum(entry.records for entry in manifest.done.values()) == LINES - len(UNREADABLE) - 2
    names = sorted(path.name for path in (alone / "score").rglob("*.jsonl"))
    assert names == [f"part-{number:05}.jsonl" for number in range(LINES // SHARD)]
    found = lines_of(alone / "score", "part-*.jsonl")
    expected = [index for index in range(LINES) if index not in (*UNREADABLE, *BLANK)]
    assert [row["index"] for row in found] == expected
    model = GPT2.from_pretrained(device="cpu")
    lines = records.read_bytes().split(b"\n")
    for row in found[::20]:
        entry = json.loads(lines[row["index"]])
        assert row["id"] == entry["id"]
        score = model.score(entry["text"])
        assert (row["n_tokens"], row["n_bytes"]) == (score.n_tokens, score.bytes)
        np.testing.assert_allclose(row["log_likelihood"], score.log_likelihood, 1e-6)


# The local cluster of this process


class StoppedError(Exception):
    """Raised instead of starting workers."""


@pytest.mark.parametrize(
    ("workers", "most", "count"), [(None, None, 3), (None, 2, 2), (None, 5, 3), (7, 2, 7)]
)
def test_one_worker_for_each_core_by_default(
    monkeypatch: pytest.MonkeyPatch, workers: int | None, most: int | None, count: int
) -> None:
    """There are no more workers than the job can use, unless --workers is given."""

    def start(**options: Any) -> Any:
        raise StoppedError(len(options["workers"]))

    monkeypatch.setattr("dask.system.CPU_COUNT", 3)
    monkeypatch.setattr(cluster, "_start_cluster", start)
    with pytest.raises(StoppedError, match=f"^{count}$"), cluster.local(workers, "cpu", 1, most):
        pass


@pytest.mark.parametrize(
    ("visible", "workers", "of_each", "started"),
    [
        ("7,5,3", None, 1, ["7", "5", "3"]),
        ("5", 2, 1, ["5", "5"]),
        ("0,1,2,3,4", None, 2, ["0,1", "2,3"]),
        ("0,1,2,3,4", 1, 4, ["0,1,2,3"]),
        ("0,1", None, 4, "--gpus 4: expected at least 4 visible GPUs, got 2: use fewer"),
        ("0,1,2", 2, 2, "--gpus 2 with --workers 2: expected at least 4 visible GPUs"),
    ],
)
def test_gpus_of_workers(
    monkeypatch: pytest.MonkeyPatch, visible: str, workers: int | None, of_each: int, started: Any
) -> None:
    def start(**options: Any) -> Any:
        specs = options["workers"].values()
        raise StoppedError([each["options"]["env"]["CUDA_VISIBLE_DEVICES"] for each in specs])

    devices = [VisibleDevice("a GPU", (9, 0), 132, 0)] * len(visible.split(","))
    driver_of = Mock(return_value=Driver("libcuda.so.1", devices=tuple(devices)))
    monkeypatch.setattr(doctor, "probe_driver", driver_of)
    monkeypatch.setattr(doctor, "require_cuda", Mock())
    monkeypatch.setattr(cluster, "_start_cluster", start)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with (
        pytest.raises((StoppedError, InputError), match=re.escape(str(started))),
        cluster.local(workers, "cuda", of_each=of_each),
    ):
        pass


def test_a_model_of_a_worker_is_on_the_job_s_gpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    inline_cluster.use(monkeypatch)
    properties = {"versions": identity.versions(), "engine": "cuda", "reads_blocks": False}
    monkeypatch.setattr(bulk_job, "worker_properties", lambda device: properties)
    monkeypatch.setattr(driver, "engine_of", lambda device: "cuda")
    monkeypatch.setattr(driver, "reads_blocks", lambda engine: False)
    load = Mock(return_value=GPT2.from_pretrained(device="cpu"))
    monkeypatch.setattr("gpt2block.bulk.predictor.load", load)
    (tmp_path / "in.txt").write_text("To be")
    job = Job("score", device="cuda:0,1", output=str(tmp_path / "out"))
    assert driver.run(job, [str(tmp_path / "in.txt")], Mock()).records == 1
    assert load.call_args[0][2] == "cuda:0,1"


def test_workers_are_limited_by_shards_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    job, todo = Job("score", output="nowhere"), [object()] * 9
    assert driver._most(job, todo) == 9  # type: ignore[arg-type]
    weights = weight_bytes(Checkpoint.open("shakespeare").config, Formats("float32"))
    file = ROOT / "gpt2block/files/bundled/shakespeare/model.safetensors"
    assert weights == pytest.approx(file.stat().st_size * 2, rel=0.02)  # it is stored in float16
    for memory, count in ((7 * weights, 3), (weights, 1)):
        monkeypatch.setattr(driver, "MEMORY_LIMIT", memory)
        assert driver._most(job, todo) == count  # type: ignore[arg-type]


NAMES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "OPENBLAS_NUM_THREADS", "SET_BY_USER")


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    """Start a local cluster with one worker of two threads, as on a GPU, with user settings.

    A shard fails as soon as one worker dies while computing it.
    """
    settings = {"distributed.nanny.pre-spawn-environ.SET_BY_USER": "yes"}
    settings["distributed.deploy.lost-worker-timeout"] = "1 ms"  # a worker starts more slowly
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OPENBLAS_NUM_THREADS", raising=False)
        patch.setenv("MALLOC_MMAP_THRESHOLD_", "5000000")
        patch.setattr(cluster, "ALLOWED_FAILURES", 0)
        with dask.config.set(settings), cluster.local(1, "cpu", threads=2) as started:
            yield started


@pytest.fixture
def here(client: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let jobs run on `client` instead of starting a cluster."""
    monkeypatch.setattr(cluster, "local", lambda *_: nullcontext(client))
    return client


def environment() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in NAMES}


def test_settings_of_the_workers(client: Any) -> None:
    """Workers keep freed memory unless the user chose otherwise; Dask does not profile them."""
    (found,) = client.run(environment).values()
    assert found == dict(zip(NAMES, ("1000000000", "5000000", "1", "yes"), strict=True))
    assert list(client.nthreads().values()) == [2]
    name = "distributed.worker.profile.enabled"
    assert client.submit(dask.config.get, name).result() is False


def test_two_shards_at_once_in_a_worker(here: Any, alone: Path, records: Path) -> None:
    assert threads_of("score", "cuda") == 2
    assert threads_of("generate", "cuda") == threads_of("score", "cpu") == 1
    output = records.parent / "together"
    assert gpt2block(*score(records, output)).code == 0
    assert contents(output) == contents(alone / "score")


def dying(job: Job, shard: Shard, token: str) -> Any:
    """Compute a shard; shard 1 ends the worker process."""
    if shard.number == 1:
        os._exit(1)
    return cluster.run_shard(job, shard, token)


def test_a_shard_that_kills_its_workers_is_the_only_one_that_fails(
    here: Any, records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "run_shard", dying)
    job = Job("score", device="cpu", output=str(tmp_path / "o"), shard_size=SHARD)
    outcome = driver.run(job, [str(records.parent / "few.jsonl")], Mock())
    assert list(outcome.failed) == [1]
    assert "every worker that computed it died" in outcome.failed[1]
    assert sorted(recorded(tmp_path / "o")) == [0, 2, 3, 4, 5]


def test_workers_report_their_progress(client: Any, tmp_path: Path) -> None:
    lines = tmp_path / "in.jsonl"
    lines.write_text('{"text": "To be"}\n' * 40)
    options = {"max_new_tokens": 16}
    job = Job("generate", device="cpu", options=options, output=str(tmp_path / "o")).checked()
    (shard,) = bulk_records.cut([lines], 1000, ["text"])
    future = client.submit(cluster.run_shard, job, shard, "token", pure=False)
    seen: set[int] = set()

    def reported() -> bool:
        assert future.status == "pending"
        assert cluster.progress(client, "another") == {}
        seen.update(cluster.progress(client, "token").values())
        return len(seen) == 2

    wait(reported)
    assert all(0 < count < 40 for count in seen)
    client.cancel([future], force=True)


# Other processes


PROPERTIES = {
    "versions": identity.versions(), "engine": "cpu", "no_cuda": "no driver", "reads_blocks": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("scheduler", "workers", "device", "message"),
    [
        ({"gpt2block": "x"}, [], None, "the scheduler has gpt2block x, this process has "),
        (ImportError("gpt2block"), [], None, "the scheduler: ImportError: gpt2block: install"),
        ({}, [{"versions": {"numpy": "1"}}], None, "worker 0 has python None, this process has"),
        ({}, [{}, ValueError("x")], None, "worker 1: ValueError: x"),
        ({}, [{}, {"engine": "cuda"}], None, "some workers have a GPU and some have none"),
        ({}, [{"engine": "cuda"}, {}], "cuda", "worker 1: no driver"),
    ],
)
def test_workers_that_cannot_compute_a_job(
    scheduler: Any, workers: list[Any], device: str | None, message: str
) -> None:
    versions = {**identity.versions(), **scheduler} if isinstance(scheduler, dict) else None
    answers = {
        str(number): PROPERTIES | given if isinstance(given, dict) else given
        for number, given in enumerate(workers)
    }
    client = Mock()
    client.run_on_scheduler.configure_mock(
        side_effect=None if versions else scheduler, return_value=versions
    )
    client.run.return_value = answers
    with pytest.raises((InputError, DeviceError), match=message):
        cluster.check(client, device)


@contextmanager
def dask_process(folder: Path, module: str, *arguments: str) -> Iterator[Any]:
    command = [sys.executable, "-m", f"distributed.cli.{module}", "--no-dashboard", *arguments]
    with (folder / module).open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=ENVIRONMENT, cwd=folder)
    try:
        yield process
    finally:
        process.kill()
        process.wait(TIMEOUT)


def test_a_cluster_of_other_processes_whose_scheduler_dies(
    here: Any, alone: Path, records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, output, few = tmp_path / "scheduler.json", tmp_path / "o", records.parent / "few.jsonl"
    job, watcher = generating(output), Mock()
    options = "--port", "0", "--host", "127.0.0.1", "--scheduler-file", str(file)
    with dask_process(tmp_path, "dask_scheduler", *options) as scheduler:
        wait(lambda: file.exists() and file.read_text().endswith("}"))
        address = json.loads(file.read_text())["address"]
        with dask_process(tmp_path, "dask_worker", address, "--no-nanny"):
            with monkeypatch.context() as patch:
                patch.setattr(identity, "of_program", lambda: "another")
                message = "has gpt2block .*, this process has another: install the same version"
                with pytest.raises(InputError, match=message):
                    driver.run(job, [str(few)], watcher, scheduler=address)
            assert not output.exists()
            watcher.show.side_effect = lambda found, inside: found.lines_done and scheduler.kill()
            lost = "the connection to the scheduler is lost.*the same command continues the job"
            with pytest.raises(driver.JobError, match=lost):
                driver.run(job, [str(few)], watcher, scheduler=address)
    assert 0 < len(recorded(output)) < FEW // SHARD
    driver.run(job, [str(few)], watcher)
    assert contents(output, "part-*") == contents(alone / "generated", "part-*")


@contextmanager
def command(*words: str | Path, workers: int) -> Iterator[subprocess.Popen[str]]:
    """Run `gpt2block` in a new process with its own process group."""
    process = subprocess.Popen(
        [sys.executable, "-m", "gpt2block", *map(str, words), "--workers", str(workers)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT, cwd=ROOT,
        start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def children(process: subprocess.Popen[str]) -> list[Any]:
    return list(psutil.Process(process.pid).children(recursive=True))


def workers_of(process: subprocess.Popen[str]) -> list[Any]:
    """Return the processes of workers, which exist before the workers can compute."""
    return [one for one in children(process) if "spawn_main" in " ".join(one.cmdline())]


@pytest.mark.slow
def test_a_worker_and_then_the_client_is_killed(
    here: Any, alone: Path, records: Path, tmp_path: Path
) -> None:
    output = tmp_path / "o"
    with command(*score(records, output), workers=1) as process:
        wait(lambda: (output / shards.MANIFEST).exists() and recorded(output))
        before = recorded(output)
        (worker,) = workers_of(process)
        worker.kill()
        wait(lambda: len(recorded(output)) > len(before) + 1)
        workers = children(process)
        process.kill()
        assert not psutil.wait_procs(workers, timeout=60)[1]
        assert "Restarting worker" in process.communicate()[0]
    (output / ".part-00099.jsonl.0.tmp").write_bytes(b"half")
    with (output / shards.MANIFEST).open("ab") as file:
        file.write(b'{"shard": 15, "re')
    done = recorded(output)
    assert len(before) + 1 < len(done) < LINES // SHARD
    files = [output / shards.part_name(number, "jsonl") for number in done]
    times = [file.stat().st_mtime for file in files]
    ended = gpt2block(*score(records, output))
    assert ended.code == 0
    for message in ("dashboard http://127.0.0.1:", " lines are done already"):
        assert message in ended.err
    for message in ("57 records, 5 errors in", " records/s, "):
        assert message in ended.out
    assert [file.stat().st_mtime for file in files] == times
    assert contents(output) == contents(alone / "score")


@pytest.mark.parametrize("moment", ["the second shard", slow("the start of a worker")])
def test_an_interrupt(records: Path, tmp_path: Path, moment: str) -> None:
    """An interrupted command prints one line, exits with 130 and leaves no process.

    A terminal interrupts all processes at once.
    """
    output = tmp_path / "o"
    with command(*score(records, output), workers=1) as process:
        wait(lambda: (output / shards.LOCK).exists() or process.poll() is not None)
        if moment == "the start of a worker":
            wait(lambda: workers_of(process))
        elif moment == "the second shard":
            wait(lambda: len(list(output.glob("part-*.jsonl"))) >= 2)
        workers = children(process)
        os.killpg(process.pid, signal.SIGINT)
        printed, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 130, printed
    *before, last = printed.splitlines()
    assert last == "interrupted: the same command continues from here"
    # Started workers are reported, but not their ends.
    assert all(line.startswith(("dashboard ", "1 x CPU")) for line in before), printed
    assert not psutil.wait_procs(workers, timeout=60)[1]
    if not (output / shards.MANIFEST).exists():
        assert not output.exists()


HELD = """
import os, signal, time
from multiprocessing import resource_tracker
from gpt2block.bulk import cluster
from gpt2block.apps.cli import interrupts
interrupts.end_at_once_on_interrupt()
interrupts.receive_on_a_thread()
interrupts.raise_on_interrupt()
resource_tracker.ensure_running()
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the tracker's start has unblocked it
try:
    with cluster._delay_interrupts():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        print("ended")
    for _ in range(200):  # a signal just before a sleep would come after it
        time.sleep(0.1)
except KeyboardInterrupt:
    print("interrupted")
"""


DROPPED = """
import signal, time
from gpt2block.apps.cli import interrupts
class Object:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)
        time.sleep(0)
interrupts.end_at_once_on_interrupt()
interrupts.raise_on_interrupt()
try:
    Object()
    for _ in range(200):
        time.sleep(0.1)
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize(
    ("code", "printed"), [(HELD, "ended\ninterrupted\n"), (DROPPED, "interrupted\n")]
)
def test_an_interrupt_that_comes_late(code: str, printed: str) -> None:
    """All threads but one block SIGINT; or Python drops an exception, as it is in a `__del__`."""
    done = python(code, timeout=TIMEOUT, env=ENVIRONMENT)
    assert (done.returncode, done.stdout, done.stderr) == (0, printed, "")


@pytest.mark.slow
def test_progress_shows_records_inside_a_shard(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]
    monkeypatch.setattr(cli_map, "monotonic", lambda: clock[0])
    watcher, outcome = cli_map._Watcher(), driver.Outcome(lines=1000)
    watcher.show(outcome, 0)
    for now, inside, line in (
        (10.0, 100, "100 of 1,000 lines, 10.0 records/s, 90 s left\n"),
        (15.0, 150, ""),
        (50.0, 10, "510 of 1,000 lines, 10.0 records/s, 100 tokens/s, 48 s left\n"),
    ):
        clock[0] = now
        watcher.show(outcome, inside)
        assert capsys.readouterr().err == line
        outcome = driver.Outcome(lines=1000, lines_done=500, done_now=490, tokens_now=5000)

"""The local cluster of `gpt2block map`: workers, their environment, progress, interrupts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from gpt2block import DeviceError, InputError
from gpt2block.bulk import identity, records, shards
from gpt2block.bulk.job import Job, threads_of
from gpt2block.checkpoints import Checkpoint
from gpt2block.cli import map as cli_map
from gpt2block.run.model import weight_bytes

pytest.importorskip("distributed", reason="gpt2block map needs dask and distributed")
import dask
import psutil  # distributed needs both

from gpt2block.bulk import cluster, driver

ROOT = Path(__file__).parent.parent
TIMEOUT = 120  # seconds
NAMES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "OPENBLAS_NUM_THREADS", "SET_BY_USER")


class StoppedError(Exception):
    """Raised where workers would start."""


@pytest.mark.parametrize(
    ("workers", "most", "count"), [(None, None, 3), (None, 2, 2), (None, 5, 3), (7, 2, 7)]
)
def test_one_worker_for_each_core_by_default(
    monkeypatch: pytest.MonkeyPatch, workers: int | None, most: int | None, count: int
) -> None:
    """At most as many as the job can use, unless --workers is given."""

    def start(**options: Any) -> Any:
        raise StoppedError(len(options["workers"]))

    monkeypatch.setattr("dask.system.CPU_COUNT", 3)
    monkeypatch.setattr(cluster, "_started", start)
    with pytest.raises(StoppedError, match=f"^{count}$"), cluster.local(workers, "cpu", 1, most):
        pass


def test_workers_are_limited_by_shards_and_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job, todo = Job("score", output="nowhere"), [object()] * 9
    assert driver._most(job, todo) == 9  # type: ignore[arg-type]
    weights = weight_bytes(Checkpoint.open("shakespeare").config, "float32")
    file = ROOT / "gpt2block/models/shakespeare/model.safetensors"
    assert weights == pytest.approx(file.stat().st_size * 2, rel=0.02)  # it is stored in float16
    monkeypatch.setattr(driver, "MEMORY_LIMIT", 7 * weights)
    assert driver._most(job, todo) == 3  # type: ignore[arg-type]
    monkeypatch.setattr(driver, "MEMORY_LIMIT", weights)
    assert driver._most(job, todo) == 1  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    """A local cluster with a worker of two threads, as on a GPU, started with these settings."""
    settings = {"distributed.nanny.pre-spawn-environ.SET_BY_USER": "yes"}
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OPENBLAS_NUM_THREADS", raising=False)
        patch.setenv("MALLOC_MMAP_THRESHOLD_", "5000000")
        with dask.config.set(settings), cluster.local(1, "cpu", threads=2) as started:
            yield started


def environment() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in NAMES}


def test_settings_of_the_workers(client: Any) -> None:
    """Freed memory is kept, unless the user chose otherwise; nothing profiles the threads."""
    (found,) = client.run(environment).values()
    assert found == dict(zip(NAMES, ("1000000000", "5000000", "1", "yes"), strict=True))
    assert list(client.nthreads().values()) == [2]
    name = "distributed.worker.profile.enabled"
    assert client.submit(dask.config.get, name).result() is False


def test_two_shards_at_once_in_a_worker(
    client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert threads_of("score", "cuda") == 2
    assert threads_of("generate", "cuda") == threads_of("score", "cpu") == 1
    monkeypatch.setattr(cluster, "local", lambda *_: nullcontext(client))
    lines = tmp_path / "in.txt"
    lines.write_text("".join(f"To be, or not to be {n}\n" for n in range(40)))
    outputs = tmp_path / "two", tmp_path / "one"
    for output, ahead in zip(outputs, (driver.AHEAD, 0.5), strict=True):
        monkeypatch.setattr(driver, "AHEAD", ahead)  # 0.5 of two threads: one shard at a time
        job = Job("embed", device="cpu", output=str(output), shard_size=5)
        outcome = driver.run(job, [str(lines)], Mock())
        assert (outcome.records, outcome.errors, outcome.failed) == (40, 0, {})
    parts = sorted(outputs[0].glob("part-*"))
    assert len(parts) == 8
    assert all(part.read_bytes() == (outputs[1] / part.name).read_bytes() for part in parts)


def test_workers_report_their_progress(client: Any, tmp_path: Path) -> None:
    lines = tmp_path / "in.jsonl"
    lines.write_text('{"text": "To be"}\n' * 200)
    options = {"max_new_tokens": 40}
    job = Job("generate", device="cpu", options=options, output=str(tmp_path / "o")).checked()
    (shard,) = records.cut([lines], 1000, ["text"])
    future = client.submit(cluster.run_shard, job, shard, "token", pure=False)
    seen: set[int] = set()
    end = time.monotonic() + TIMEOUT
    while len(seen) < 3 and time.monotonic() < end:
        assert future.status == "pending"
        assert cluster.progress(client, "another") == {}
        seen.update(cluster.progress(client, "token").values())
        time.sleep(0.05)
    assert len(seen) == 3
    assert all(0 < count < 200 for count in seen)
    client.cancel([future], force=True)


PROPERTIES = {"versions": identity.versions(), "engine": "cpu", "no_cuda": "no driver"}


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


def test_progress_shows_records_inside_a_shard(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]
    monkeypatch.setattr(cli_map, "monotonic", lambda: clock[0])
    watcher = cli_map._Watcher()
    watcher.begin(1000, 0)
    clock[0] = 10.0
    watcher.wait(100)
    assert "100 of 1,000 lines, 10.0 records/s, 90 s left" in capsys.readouterr().err
    clock[0] = 15.0
    watcher.wait(150)
    assert capsys.readouterr().err == ""
    watcher.advance(500, 490, 5000)
    clock[0] = 50.0
    watcher.wait(10)
    progress = "510 of 1,000 lines, 10.0 records/s, 100 tokens/s, 48 s left"
    assert progress in capsys.readouterr().err


COMMAND = "from gpt2block.cli import main; main()"
HELD = """
import os, signal, time
from multiprocessing import resource_tracker
from gpt2block.bulk import cluster
from gpt2block.cli import interrupts
interrupts.end_at_once_on_interrupt()
interrupts.receive_on_a_thread()
interrupts.raise_on_interrupt()
resource_tracker.ensure_running()
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the tracker's start has unblocked it
try:
    with cluster._uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        print("ended")
    time.sleep(20)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_an_interrupt_comes_late_where_all_threads_block_it() -> None:
    """As in a command, whose threads leave SIGINT to one that waits for it."""
    done = subprocess.run(
        [sys.executable, "-c", HELD],
        capture_output=True, text=True, check=False, timeout=TIMEOUT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "ended\ninterrupted\n", "")


@pytest.mark.parametrize("delay", [0.0, 0.5, 1.5])
def test_an_interrupt_while_workers_start(tmp_path: Path, delay: float) -> None:
    """One line, exit code 130, no process left. A terminal interrupts all processes at once."""
    lines, output = tmp_path / "in.txt", tmp_path / "o"
    lines.write_text("To be, or not to be, that is the question\n" * 2000)
    words = ["map", "score", str(lines), "--output", str(output), "--device", "cpu"]
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, *words, "--workers", "1"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    end = time.monotonic() + TIMEOUT
    while not (output / shards.LOCK).exists():  # the imports have ended then
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.01)
    time.sleep(delay)
    children = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    printed, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 130, printed
    *before, last = printed.splitlines()
    assert last == "interrupted: the same command continues from here"
    # Workers that had started are reported; how they ended is not.
    assert all(line.startswith(("dashboard ", "1 x CPU")) for line in before), printed
    assert not psutil.wait_procs(children, timeout=20)[1]
    if not (output / shards.MANIFEST).exists():
        assert not output.exists()

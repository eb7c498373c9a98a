"""Measure `gpt2block map` with 1, 2, 4 workers, a GPU each, and one process without Dask.

    python -m tools.scaling --json scaling.json
    python -m tools.scaling --what generate --workers 1 2 --seconds 30
    python -m tools.scaling --model shakespeare --dtype float32 --device cpu --seconds 5

A model of GPT-2 124M's shapes with random weights, unless --model names one, and random records of
mixed lengths, token ids, or text where --tokenizer says how it is read. First `run_shard` in a loop
of one process, as many threads as a worker has, on one GPU: its rate tells how many records keep
the workers busy for --seconds. Then the command itself, as a process, for each number of workers.

Start-up is what passes until the first shard is there. The rates are taken from the times at which
the shards were finished, without the first ones of every worker and those at the end, when some
wait. The first shards of all runs are the same records: their files have to be equal. Kernels are
compiled and files read before anything is measured.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from gpt2block import GPT2Weights
from gpt2block.bulk import records, shards
from gpt2block.bulk.job import Job, engine_of, prepare, run_shard, threads_of
from gpt2block.checkpoints import Checkpoint, save_pretrained
from gpt2block.text import tokenizer
from gpt2block.text.encoding import tokens_of

ROOT = Path(__file__).parent.parent
LENGTHS = {"score": (16, 512), "generate": (8, 64)}  # of records, in tokens
SHARD_SIZE = {"score": 1000, "generate": 256}
MORE = 1.1  # records than the loop's rate asks for
AT_LEAST = 4  # finished shards that a rate is taken from
EDGE = 2  # shards of each thread, at either end, that it is not taken from
WARM_SECONDS = 3.0
GRACE = 30  # seconds for what was interrupted
# As Dask starts its workers: a BLAS with more threads is another one, in its last bits, too.
ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS")}


@dataclass(frozen=True)
class End:
    """When a shard was there, in seconds of the clock, and what it holds."""

    time: float
    records: int
    tokens: int


@dataclass
class Part:
    """What one run gave."""

    name: str
    workers: int
    threads: int  # of each
    start_up: float = math.nan  # seconds until the first shard was there
    seconds: float = 0.0  # of the steady part
    records: int = 0
    tokens: int = 0
    shards: int = 0
    problem: str = ""
    compared: int = 0  # files that are equal to another run's
    said: list[str] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Records a second."""
        return self.records / self.seconds if self.seconds else math.nan

    @property
    def token_rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else math.nan

    def take(self, begun: float, ends: Sequence[End]) -> None:
        """The steady part: when every thread has done `EDGE` shards, and has as many left."""
        ends = sorted(ends, key=lambda end: end.time)
        if ends:
            self.start_up = ends[0].time - begun
        edge = EDGE * self.workers * self.threads
        steady = ends[edge - 1 : len(ends) - edge]
        if len(steady) <= AT_LEAST:
            self.problem = self.problem or f"{len(ends)} shards are too few"
            return
        self.seconds = steady[-1].time - steady[0].time
        self.shards = len(steady) - 1
        self.records = sum(end.records for end in steady[1:])
        self.tokens = sum(end.tokens for end in steady[1:])


def write_records(
    path: Path, count: int, lengths: tuple[int, int], vocab_size: int, words: Sequence[str] = ()
) -> None:
    """Random token ids, or words, of so many tokens each; the same ones every time."""
    random = np.random.default_rng(0)
    with path.open("w", encoding="utf-8") as file:
        for length in random.integers(lengths[0], lengths[1] + 1, count):
            ids = random.integers(len(words) or vocab_size, size=length).tolist()
            text = "".join(words[index] for index in ids) if words else ids
            file.write(json.dumps({"text": text}) + "\n")


def words_of(path: str, vocab_size: int) -> list[str]:
    """Words that are one token each behind any other."""
    encoding = tokenizer.from_path(path, vocab_size)
    tokens = (token.decode(errors="replace") for _, token in tokens_of(encoding))
    return sorted(token for token in tokens if re.fullmatch(" [a-z]+", token))


def ends_of(folder: Path, form: str = "jsonl") -> list[End]:
    """Of the shards in a manifest; each file's time is that of its worker's last write."""
    if not (folder / shards.MANIFEST).exists():
        return []
    return [
        End((folder / shards.part_name(n, form)).stat().st_mtime, done.records, done.tokens)
        for n, done in shards.Manifest(folder).done.items()
    ]


class Measurement:
    """All runs of one kind of job."""

    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self._given, self._folder = given, folder
        self._threads = threads_of(given.what, engine_of(given.device))
        model = given.model
        if model is None:
            model = str(folder / "model")
            if not Path(model).exists():
                save_pretrained(model, GPT2Weights.random(0), "bfloat16")
        config = Checkpoint.open(model).config
        shortest, longest = given.lengths or LENGTHS[given.what]
        words = words_of(given.tokenizer, config.vocab_size) if given.tokenizer else []
        size = given.shard_size or SHARD_SIZE[given.what]
        self._count: int = max(1, given.records // size) * size
        self._lines = folder / f"{given.what}.jsonl"
        longest = min(longest, config.n_ctx)
        write_records(self._lines, self._count, (shortest, longest), config.vocab_size, words)
        options: dict[str, Any] = {}
        if given.what == "generate":
            options = {"max_new_tokens": given.max_new_tokens, "temperature": 0.8}
            options |= {"seed": 0, "rows_at_once": 64}
        self._job = Job(
            given.what,
            "",
            model,
            given.device,
            given.dtype,
            given.tokenizer,
            options,
            shard_size=size,
            batch_tokens=given.batch_tokens,
        )
        self.device = ""
        self.parts: list[Part] = []

    def loop(self, threads: int, seconds: float, name: str) -> Part:
        """`run_shard` in a process of its own."""
        part = Part(name, 1, threads)
        output = self._output(name)
        begun = time.time()
        job = replace(self._job, output=str(output))
        spec = {"job": asdict(job), "lines": str(self._lines), "repeat": self._repeats(seconds)}
        spec |= {"threads": threads, "seconds": seconds, "result": f"{output}.json"}
        Path(f"{output}.spec").write_text(json.dumps(spec))
        command = [sys.executable, "-m", "tools.scaling", "--loop", f"{output}.spec"]
        self._run(part, command, seconds, {"CUDA_VISIBLE_DEVICES": _first_gpu()} | ONE_THREAD)
        result = Path(f"{output}.json")
        if result.exists():
            found = json.loads(result.read_text())
            self.device = found["device"]
            part.take(begun, [End(*end) for end in found["ends"]])
        return part

    def map(self, workers: int, rate: float) -> Part:
        """The command, for as many records as take `seconds` at the loop's rate."""
        given, job = self._given, self._job
        part = Part(f"map, {workers}", workers, self._threads)
        output = self._output(f"map{workers}")
        edges = 5 * workers * part.threads * job.shard_size
        needed = MORE * rate * workers * given.seconds + edges
        files = [str(self._lines)] * math.ceil(needed / self._count)
        command = [sys.executable, "-m", "gpt2block", "map", given.what, *files]
        command += ["--output", str(output), "--workers", str(workers), "--model", job.model]
        command += ["--dtype", job.dtype, "--shard-size", str(job.shard_size)]
        command += ["--batch-tokens", str(job.batch_tokens)]
        command += ["--device", job.device] if job.device else []
        command += ["--tokenizer", job.tokenizer] if job.tokenizer else []
        if given.what == "generate":
            for name, value in job.options.items():
                command += [f"--{name.replace('_', '-')}", str(value)]
        begun = time.time()
        self._run(part, command, given.seconds)
        part.take(begun, ends_of(output))
        return part

    def equal(self, one: Path, other: Path) -> int:
        """How many files both have; SystemExit where two of them differ."""
        names = sorted(
            {p.name for p in one.glob("part-*")} & {p.name for p in other.glob("part-*")}
        )
        _, different, unread = filecmp.cmpfiles(one, other, names, shallow=False)
        if different or unread:
            raise SystemExit(f"{one} and {other} differ: {', '.join((different + unread)[:10])}")
        return len(names)

    def all(self) -> Iterator[Part]:
        """Part by part, as they are done."""
        given = self._given
        self.loop(1, WARM_SECONDS, "warm")
        best: Part | None = None
        for threads in given.threads or [self._threads]:
            best = self.loop(threads, given.loop_seconds or given.seconds, f"loop{threads}")
            yield best
        assert best is not None
        rate = best.rate if best.seconds else 1.0
        before = self._folder / best.name
        for workers in given.workers:
            part = self.map(workers, rate)
            output = self._folder / f"map{workers}"
            part.compared = self.equal(before, output)
            yield part
            before = output

    def _repeats(self, seconds: float) -> int:
        """Of the file, for the loop: more than it gets done."""
        return math.ceil(1 + seconds * float(self._given.most) / self._count)

    def _output(self, name: str) -> Path:
        output = self._folder / name
        if output.exists():
            raise SystemExit(f"{output} is there already: give another --folder")
        return output

    def _run(
        self, part: Part, command: list[str], seconds: float, env: dict[str, str] | None = None
    ) -> None:
        """Until it ends, or its time is over."""
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **(env or {}), "PYTHONPATH": path},
            start_new_session=True,
        )
        limit = self._given.limit or 1.5 * seconds + 90
        try:
            said, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            part.problem = f"not done after {limit:.0f} s"
            said = _end(process)
        except BaseException:
            _end(process)
            raise
        part.said = said.splitlines()[-6:]
        if process.returncode and not part.problem:
            part.problem = f"exit code {process.returncode}: {' '.join(part.said)}"


def _end(process: subprocess.Popen[str]) -> str:
    """Interrupt it and what it has started; → what it said."""
    for how in (signal.SIGINT, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        with suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=GRACE)[0]
    return ""


def _first_gpu() -> str:
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]


def run_loop(spec: dict[str, Any]) -> None:
    """What a worker does, without Dask: shard after shard until the time is over, and the edge."""
    job = Job(**{**spec["job"], "keep": tuple(spec["job"]["keep"])}).checked()
    job = replace(job, device=engine_of(job.device))
    files = records.find_files([spec["lines"]] * spec["repeat"])
    waiting = iter(records.cut(files, job.shard_size, [job.column]))
    folder, token = Path(job.output), uuid4().hex
    taking = threading.Lock()
    ends: list[End] = []
    with shards.locked(folder, token):
        device = prepare(job, [(str(path), path.stat().st_size) for path in files[:1]], token)
        edge = EDGE * spec["threads"]

        def work() -> None:
            after = 0  # shards that were begun when the time was over
            while after < EDGE:
                with taking:
                    shard = next(waiting, None)
                if shard is None:
                    return
                after += len(ends) >= edge and time.time() > ends[edge - 1].time + spec["seconds"]
                done = run_shard(job, shard, token)
                if not isinstance(done, shards.Done):
                    raise RuntimeError(done)
                ends.append(End(time.time(), done.records, done.tokens))

        with ThreadPoolExecutor(spec["threads"]) as pool:
            for future in [pool.submit(work) for _ in range(spec["threads"])]:
                future.result()
        found = {"device": device, "ends": [(e.time, e.records, e.tokens) for e in ends]}
        Path(spec["result"]).write_text(json.dumps(found))


def table(parts: Sequence[Part]) -> list[str]:
    """Markdown. Efficiency is beside one worker, overhead is one worker's beside the loop's."""
    one = next((part for part in parts if part.name == "map, 1"), None)
    loop = [part for part in parts if part.name.startswith("loop")]
    lines = [
        "| | workers | threads | start-up, s | steady, s | records/s | tokens/s | efficiency |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for part in parts:
        efficient = "" if one is None or part in loop else f"{_efficiency(part, one):.3f}"
        lines.append(
            f"| {part.name} | {part.workers} | {part.threads} | {part.start_up:.1f} | "
            f"{part.seconds:.1f} | {part.rate:,.1f} | {part.token_rate:,.0f} | {efficient} |"
        )
    if one and loop:
        lines.append(f"Dask's overhead with one worker: {100 * _overhead(one, loop[-1]):.1f} %")
    return lines + [f"{part.name}: {part.problem}" for part in parts if part.problem]


def _efficiency(part: Part, one: Part) -> float:
    return part.rate / (part.workers * one.rate) if one.rate else math.nan


def _overhead(one: Part, loop: Part) -> float:
    return 1 - one.rate / loop.rate if loop.rate else math.nan


def report(measurement: Measurement, given: argparse.Namespace) -> dict[str, Any]:
    """The table's figures, and what they were measured with."""
    parts = measurement.parts
    one = next((part for part in parts if part.name == "map, 1"), None)
    loop = [part for part in parts if part.name.startswith("loop")]
    rows = [
        {
            **asdict(part),
            "start_up": _number(part.start_up),
            "records_per_s": _number(part.rate),
            "tokens_per_s": _number(part.token_rate),
            "efficiency": None if not one or part in loop else _number(_efficiency(part, one)),
        }
        for part in parts
    ]
    return {
        "device": measurement.device,
        "asked": {key: str(value) for key, value in vars(given).items()},
        "parts": rows,
        "overhead": _number(_overhead(one, loop[-1])) if one and loop else None,
    }


def _number(value: float) -> float | None:
    """JSON has no NaN."""
    return None if math.isnan(value) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--what", choices=("score", "generate"), default="score")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--threads", type=int, nargs="+", help="of the loops; a worker's last")
    parser.add_argument("--seconds", type=float, default=60, help="of steady state, at least")
    parser.add_argument("--loop-seconds", type=float, help="of the loops; --seconds by default")
    parser.add_argument("--limit", type=float, help="of every run; 1.5 seconds + 90 by default")
    parser.add_argument("--model", help="124M shapes with random weights by default")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", choices=("cuda", "cpu"))
    parser.add_argument("--tokenizer", help="records are text, not ids, read with this one")
    parser.add_argument("--records", type=int, default=20000, help="that are different")
    parser.add_argument("--lengths", type=int, nargs=2, help="tokens of the shortest, the longest")
    parser.add_argument("--shard-size", type=int)
    parser.add_argument("--batch-tokens", type=int, default=16384)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--most", type=float, default=10000, help="records/s that no loop reaches")
    parser.add_argument("--folder", type=Path, help="of model, records and results; a new one")
    parser.add_argument("--json", type=Path, help="where the figures go, after every part anew")
    parser.add_argument("--loop", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.loop:
        run_loop(json.loads(given.loop.read_text()))
        return
    folder = given.folder or Path(tempfile.mkdtemp(prefix="scaling-"))
    folder.mkdir(parents=True, exist_ok=True)
    measurement = Measurement(given, folder.absolute())
    for part in measurement.all():
        measurement.parts.append(part)
        print(
            f"{part.name}: {part.rate:,.1f} records/s {part.problem}", file=sys.stderr, flush=True
        )
        if given.json:
            given.json.write_text(json.dumps(report(measurement, given), indent=1) + "\n")
    print(f"{given.what}, {given.dtype}, {measurement.device}", *table(measurement.parts), sep="\n")


if __name__ == "__main__":
    main()

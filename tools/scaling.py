"""Measure `gpt2block map` with 1, 2, 4 workers, one GPU each, and one process without Dask.

    python -m tools.scaling --json scaling.json
    python -m tools.scaling --what generate --workers 1 2 --seconds 30
    python -m tools.scaling --model shakespeare --dtype float32 --device cpu --seconds 5

The model has GPT-2 124M's shapes and random weights, unless --model is given. The records have
random lengths: token ids or, with --tokenizer, text. The tool first runs `run_shard` in a loop in
one process, with the threads of one worker, on one GPU; its rate determines how many records keep
the workers busy for --seconds. It then runs the command for each number of workers.

Start-up is the time until the first shard is finished. Rates are computed from the shards' finish
times, without the first shards of every worker and without those at the end, when some workers are
idle. The first shards of all runs hold the same records, so their files must be equal. Kernels are
compiled and files are read before the measurement.
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
from gpt2block.cuda.formats import Formats
from gpt2block.files.checkpoints import Checkpoint, save_pretrained
from gpt2block.files.tokenizers import tokenizer
from gpt2block.files.tokenizers.encoding import tokens_of

ROOT = Path(__file__).parent.parent
LENGTHS = {"score": (16, 512), "generate": (8, 64)}  # tokens per record, minimum and maximum
SHARD_SIZE = {"score": 1000, "generate": 256}
MARGIN = 1.1  # factor on the number of records that the loop's rate requires
AT_LEAST = 4  # finished shards needed to compute a rate
EDGE = 2  # shards per thread that are excluded at the start and at the end
WARM_SECONDS = 3.0
GRACE = 30  # seconds for an interrupted process to end
# The setting of Dask's workers. With more threads the last bits of a BLAS product may differ.
ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS")}


@dataclass(frozen=True)
class End:
    """A finished shard."""

    time: float  # clock time in seconds
    records: int
    tokens: int


@dataclass
class Part:
    """The figures of one run."""

    name: str
    workers: int
    threads: int  # threads per worker
    start_up: float = math.nan  # seconds until the first shard was finished
    seconds: float = 0.0  # duration of the steady state
    records: int = 0
    tokens: int = 0
    shards: int = 0
    problem: str = ""
    compared: int = 0  # files that equal those of another run
    said: list[str] = field(default_factory=list)  # last lines of its output

    @property
    def rate(self) -> float:
        """Records per second."""
        return self.records / self.seconds if self.seconds else math.nan

    @property
    def token_rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else math.nan

    def take(self, begun: float, ends: Sequence[End]) -> None:
        """Set the figures of the steady state, without `EDGE` shards per thread at either end."""
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
    """Write records of random token ids or words. lengths: in tokens. The seed is fixed."""
    random = np.random.default_rng(0)
    with path.open("w", encoding="utf-8") as file:
        for length in random.integers(lengths[0], lengths[1] + 1, count):
            ids = random.integers(len(words) or vocab_size, size=length).tolist()
            text = "".join(words[index] for index in ids) if words else ids
            file.write(json.dumps({"text": text}) + "\n")


def words_of(path: str, vocab_size: int) -> list[str]:
    """Return words with a leading space that are one token each."""
    encoding = tokenizer.from_path(path, vocab_size)
    tokens = (token.decode(errors="replace") for _, token in tokens_of(encoding))
    return sorted(token for token in tokens if re.fullmatch(" [a-z]+", token))


def ends_of(folder: Path, form: str = "jsonl") -> list[End]:
    """Return the finished shards of a manifest; the time is that of the file's last write."""
    if not (folder / shards.MANIFEST).exists():
        return []
    return [
        End((folder / shards.part_name(n, form)).stat().st_mtime, done.records, done.tokens)
        for n, done in shards.Manifest(folder).done.items()
    ]


class Measurement:
    """All runs of one kind of job."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self._args, self._folder = args, folder
        self._threads = threads_of(args.what, engine_of(args.device))
        model = args.model
        if model is None:
            model = str(folder / "model")
            if not Path(model).exists():
                save_pretrained(model, GPT2Weights.random(0), "bfloat16")
        config = Checkpoint.open(model).config
        shortest, longest = args.lengths or LENGTHS[args.what]
        words = words_of(args.tokenizer, config.vocab_size) if args.tokenizer else []
        size = args.shard_size or SHARD_SIZE[args.what]
        self._count: int = max(1, args.records // size) * size
        self._lines = folder / f"{args.what}.jsonl"
        longest = min(longest, config.n_ctx)
        write_records(self._lines, self._count, (shortest, longest), config.vocab_size, words)
        options: dict[str, Any] = {}
        if args.what == "generate":
            options = {"max_new_tokens": args.max_new_tokens, "temperature": 0.8, "seed": 0}
        self._job = Job(
            args.what, model, args.device, Formats(args.dtype), args.tokenizer, options=options,
            output="", shard_size=size, batch_tokens=args.batch_tokens,
        )  # fmt: skip
        self.device = ""
        self.parts: list[Part] = []

    def loop(self, threads: int, seconds: float, name: str) -> Part:
        """Run `run_shard` in a new process."""
        part = Part(name, 1, threads)
        output = self._output(name)
        begun = time.time()
        job = replace(self._job, output=str(output))
        spec = {"job": asdict(job), "lines": str(self._lines), "repeat": self._repeats(seconds)}
        spec |= {"threads": threads, "seconds": seconds, "result": f"{output}.json"}
        Path(f"{output}.spec").write_text(json.dumps(spec))
        command = [sys.executable, "-m", "tools.scaling", "--loop", f"{output}.spec"]
        first_gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        self._run(part, command, seconds, {"CUDA_VISIBLE_DEVICES": first_gpu} | ONE_THREAD)
        result = Path(f"{output}.json")
        if result.exists():
            report = json.loads(result.read_text())
            self.device = report["device"]
            part.take(begun, [End(*end) for end in report["ends"]])
        return part

    def map(self, workers: int, rate: float) -> Part:
        """Run the command on as many records as take `seconds` at the loop's rate."""
        args, job = self._args, self._job
        part = Part(f"map, {workers}", workers, self._threads)
        output = self._output(f"map{workers}")
        edges = 5 * workers * part.threads * job.shard_size
        needed = MARGIN * rate * workers * args.seconds + edges
        files = [str(self._lines)] * math.ceil(needed / self._count)
        options = {
            "output": output,
            "workers": workers,
            "model": job.model,
            "dtype": job.formats.dtype,
        }
        options |= {"shard-size": job.shard_size, "device": job.device, "tokenizer": job.tokenizer}
        options |= {name.replace("_", "-"): value for name, value in job.options.items()}
        if args.what != "generate":
            options["batch-tokens"] = job.batch_tokens
        command = [sys.executable, "-m", "gpt2block", "map", args.what, *files]
        for name, value in options.items():
            command += [] if value in (None, "") else [f"--{name}", str(value)]
        begun = time.time()
        self._run(part, command, args.seconds)
        part.take(begun, ends_of(output))
        return part

    def all(self) -> Iterator[Part]:
        """Yield each part when it is finished."""
        args = self._args
        self.loop(1, WARM_SECONDS, "warm")
        last: Part | None = None
        for threads in args.threads or [self._threads]:
            last = self.loop(threads, args.loop_seconds or args.seconds, f"loop{threads}")
            yield last
        assert last is not None
        rate = last.rate if last.seconds else 1.0
        before = self._folder / last.name
        for workers in args.workers:
            part = self.map(workers, rate)
            output = self._folder / f"map{workers}"
            part.compared = equal_files(before, output)
            yield part
            before = output

    def _repeats(self, seconds: float) -> int:
        """Return how often the loop's input repeats the file: more than the loop can compute."""
        return math.ceil(1 + seconds * float(self._args.most) / self._count)

    def _output(self, name: str) -> Path:
        output = self._folder / name
        if output.exists():
            raise SystemExit(f"{output} exists already: give another --folder")
        return output

    def _run(
        self, part: Part, command: list[str], seconds: float, env: dict[str, str] | None = None
    ) -> None:
        """Run a process until it ends, or until its time limit."""
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **(env or {}), "PYTHONPATH": path},
            start_new_session=True,
        )
        limit = self._args.limit or 1.5 * seconds + 90
        try:
            printed, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            part.problem = f"not finished after {limit:.0f} s"
            printed = _end(process)
        except BaseException:
            _end(process)
            raise
        part.said = printed.splitlines()[-6:]
        if process.returncode and not part.problem:
            part.problem = f"exit code {process.returncode}: {' '.join(part.said)}"


def equal_files(one: Path, other: Path) -> int:
    """Return the number of results in both folders. Raises SystemExit where two differ."""
    names = sorted({p.name for p in one.glob("part-*")} & {p.name for p in other.glob("part-*")})
    _, different, unread = filecmp.cmpfiles(one, other, names, shallow=False)
    if different or unread:
        raise SystemExit(f"{one} and {other} differ: {', '.join((different + unread)[:10])}")
    return len(names)


def _end(process: subprocess.Popen[str]) -> str:
    """Interrupt the process and its children; return what it printed."""
    for number in (signal.SIGINT, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=GRACE)[0]
    return ""


def run_loop(spec: dict[str, Any]) -> None:
    """Compute shards like a worker, without Dask, until the time is over, and `EDGE` more."""
    given = {**spec["job"], "keep": tuple(spec["job"]["keep"])}
    job = Job(**{**given, "formats": Formats(given["formats"]["dtype"])}).checked()
    job = replace(job, device=engine_of(job.device))
    files = records.find_files([spec["lines"]] * spec["repeat"])
    waiting = iter(records.cut(files, job.shard_size, [job.column]))
    folder, token = Path(job.output), uuid4().hex
    taking = threading.Lock()
    ends: list[End] = []
    with shards.folder_lock(folder, token):
        device = prepare(job, [(str(path), path.stat().st_size) for path in files[:1]], token)
        edge = EDGE * spec["threads"]

        def work() -> None:
            after = 0  # shards begun after the end of the measured time
            while after < EDGE:
                with taking:
                    shard = next(waiting, None)
                if shard is None:
                    return
                after += len(ends) >= edge and time.time() > ends[edge - 1].time + spec["seconds"]
                done = run_shard(job, shard, token)
                if not isinstance(done, shards.ShardEntry):
                    raise RuntimeError(done)
                ends.append(End(time.time(), done.records, done.tokens))

        with ThreadPoolExecutor(spec["threads"]) as pool:
            for future in [pool.submit(work) for _ in range(spec["threads"])]:
                future.result()
        found = {"device": device, "ends": [(e.time, e.records, e.tokens) for e in ends]}
        Path(spec["result"]).write_text(json.dumps(found))


def figures(parts: Sequence[Part]) -> tuple[list[dict[str, Any]], float | None]:
    """Return the figures of each part, and Dask's overhead.

    The efficiency is relative to one worker; the overhead, to the loop. None where unknown.
    """
    one = next((part for part in parts if part.name == "map, 1"), None)
    loops = [part for part in parts if part.name.startswith("loop")]
    rows = []
    for part in parts:
        efficiency = math.nan
        if one is not None and part not in loops:
            efficiency = part.rate / (part.workers * one.rate)
        row = asdict(part) | {"records_per_s": part.rate, "tokens_per_s": part.token_rate}
        row["efficiency"] = efficiency
        rows.append({key: _known(value) for key, value in row.items()})
    return rows, _known(1 - one.rate / loops[-1].rate) if one and loops else None


def _known(value: Any) -> Any:
    """Replace NaN, which JSON does not have, by None."""
    return None if isinstance(value, float) and math.isnan(value) else value


def table(parts: Sequence[Part]) -> list[str]:
    """Return a Markdown table of the figures."""
    lines = [
        "| | workers | threads | start-up, s | steady, s | records/s | tokens/s | efficiency |",
        "|---|---|---|---|---|---|---|---|",
    ]
    rows, overhead = figures(parts)
    for part, row in zip(parts, rows, strict=True):
        efficient = "" if row["efficiency"] is None else f"{row['efficiency']:.3f}"
        lines.append(
            f"| {part.name} | {part.workers} | {part.threads} | {part.start_up:.1f} | "
            f"{part.seconds:.1f} | {part.rate:,.1f} | {part.token_rate:,.0f} | {efficient} |"
        )
    if overhead is not None:
        lines.append(f"Dask's overhead with one worker: {100 * overhead:.1f} %")
    return lines + [f"{part.name}: {part.problem}" for part in parts if part.problem]


def report(measurement: Measurement, args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures, the device and the arguments."""
    rows, overhead = figures(measurement.parts)
    asked = {key: str(value) for key, value in vars(args).items()}
    return {"device": measurement.device, "asked": asked, "parts": rows, "overhead": overhead}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--what", choices=("score", "generate"), default="score")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument(
        "--threads", type=int, nargs="+", help="threads of each loop; a worker's last"
    )
    parser.add_argument("--seconds", type=float, default=60, help="minimum steady state")
    parser.add_argument("--loop-seconds", type=float, help="time of a loop; by default --seconds")
    parser.add_argument("--limit", type=float, help="time limit of a run; 1.5 x --seconds + 90")
    parser.add_argument("--model", help="124M shapes with random weights by default")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", choices=("cuda", "cpu"))
    parser.add_argument("--tokenizer", help="tokenizer of text records; by default they are ids")
    parser.add_argument("--records", type=int, default=20000, help="number of different records")
    parser.add_argument("--lengths", type=int, nargs=2, help="shortest and longest, in tokens")
    parser.add_argument("--shard-size", type=int)
    parser.add_argument("--batch-tokens", type=int, default=16384)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--most", type=float, default=10000, help="records/s that no loop reaches")
    parser.add_argument("--folder", type=Path, help="new folder for model, records and results")
    parser.add_argument("--json", type=Path, help="file for the figures, rewritten after each part")
    parser.add_argument("--loop", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.loop:
        run_loop(json.loads(args.loop.read_text()))
        return
    folder = args.folder or Path(tempfile.mkdtemp(prefix="scaling-"))
    folder.mkdir(parents=True, exist_ok=True)
    measurement = Measurement(args, folder.absolute())
    for part in measurement.all():
        measurement.parts.append(part)
        print(
            f"{part.name}: {part.rate:,.1f} records/s {part.problem}", file=sys.stderr, flush=True
        )
        if args.json:
            args.json.write_text(json.dumps(report(measurement, args), indent=1) + "\n")
    print(f"{args.what}, {args.dtype}, {measurement.device}", *table(measurement.parts), sep="\n")


if __name__ == "__main__":
    main()

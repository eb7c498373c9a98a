"""Compare `gpt2block serve` with several numbers of processes, and with `generate`.

    python tools/bench_server.py --processes 0 8 --json server.json
    python tools/bench_server.py --model shakespeare --device cpu --dtype float32 --at-once 16

The tool first times `generate` in a process of its own, and then starts a server for each number of
--processes, in turn, --rounds times. Each server gets: all requests at once, as whole answers and
as streams; streams that arrive at random with each of --rates; and one stream at a time. Several
client processes send the requests (`tools/load.py`). The server counts new tokens.

The model has GPT-2 124M's shapes and random weights, unless --model is given. The files of its
tokenizer are in the folder gpt2-bpe of $GPT2BLOCK_DATA, unless --tokenizer is given.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from load import Load, report, run_all

START_SECONDS = 300.0  # time limit for a server to become ready
ALONE = 24  # number of streams that are measured one at a time
WARM = 64  # number of requests before the measurements
PROGRAM = """
import json, sys, time
import gpt2block
given, prompts, new = json.load(sys.stdin)
model = gpt2block.from_pretrained(**given)
options = {"max_new_tokens": new, "temperature": 1.0, "seed": 0, "stop_ids": []}
seconds = []
for _ in range(4):  # the first call compiles
    begun = time.perf_counter()
    found = model.generate(prompts, **options)
    seconds.append(time.perf_counter() - begun)
print(sum(len(each.tokens) for each in found) / min(seconds[1:]))
"""


def random_model(folder: Path) -> Path:
    """Save a model of GPT-2 124M's shapes with random weights, and with GPT-2's tokenizer."""
    import gpt2block  # noqa: PLC0415

    weights = gpt2block.GPT2Weights.random(0, gpt2block.GPT2Config())
    gpt2block.GPT2(weights, device="cpu").save_pretrained(folder)
    data = Path(os.environ.get("GPT2BLOCK_DATA", "")) / "gpt2-bpe"
    for source, name in (("encoder.json", "vocab.json"), ("vocab.bpe", "merges.txt")):
        if (data / source).exists():
            shutil.copy(data / source, folder / name)
    return folder


def load_of(options: argparse.Namespace, url: str, **changed: Any) -> Load:
    fixed = {"key": "any", "temperature": 1.0, "closing": 0.0, "seed": 0, "whole": False}
    own = {"model": "bench", "lengths": tuple(options.lengths), "new": options.new}
    sizes = {"vocab_size": options.vocab_size, "rate": 0.0, "at_once": options.at_once}
    return Load(
        **{"url": url, "seconds": 0.0, "requests": None, **fixed, **own, **sizes, **changed}
    )


def generate_rate(given: argparse.Namespace, model: str) -> float:
    """Return the new tokens per second of one call of `generate` with all prompts."""
    load = load_of(given, "")
    prompts = [load.prompt(number) for number in range(given.at_once)]
    options = {"name": model, "device": given.device, "dtype": given.dtype}
    command = [sys.executable, "-c", PROGRAM]
    text = json.dumps([options, prompts, given.new])
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return float(done.stdout)


@contextmanager
def server(options: argparse.Namespace, model: str, processes: int) -> Iterator[str]:
    """Run a server that is ready; yield its URL."""
    command = [
        sys.executable, "-m", "gpt2block", "serve", "--model", model, "--name", "bench",
        "--processes", str(processes), "--port", "0", "--rows", str(options.at_once),
        "--queue", "8192", "--connections", "8192", "--dtype", options.dtype,
    ]  # fmt: skip
    for option in ("device", "tokenizer"):
        if getattr(options, option):
            command += [f"--{option}", getattr(options, option)]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert child.stderr is not None
    try:
        line = ""
        while not (match := re.search(r"(http://\S+)/v1", line)):
            if not (line := child.stderr.readline()):
                raise SystemExit("the server has ended")
        end = time.monotonic() + START_SECONDS
        while not _ready(match[1]) and time.monotonic() < end:
            time.sleep(0.1)
        yield match[1]
    finally:
        child.send_signal(signal.SIGTERM)
        child.communicate()


def _ready(url: str) -> bool:
    try:
        with urlopen(f"{url}/health") as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def new_tokens(url: str) -> float:
    with urlopen(f"{url}/metrics") as answer:
        match = re.search(
            r"^gpt2block_new_tokens_total (\S+)", answer.read().decode(), re.MULTILINE
        )
    assert match
    return float(match[1])


def measured(options: argparse.Namespace, url: str) -> dict[str, Any]:
    """Return the measurements of a server."""
    results: dict[str, Any] = {}

    def ask(name: str, clients: int, **changed: Any) -> None:
        before = new_tokens(url)
        seen = run_all(load_of(options, f"{url}/v1", **changed), clients)
        told = report(seen)
        new = new_tokens(url) - before
        told["new tokens per second"] = round(new / (seen.ended - seen.begun))
        results[name] = told

    clients, count = options.clients, options.at_once
    ask("warm", clients, requests=min(WARM, count))
    for turn in range(options.bursts):
        ask(f"whole {turn}", clients, requests=count, whole=True)
        ask(f"streams {turn}", clients, requests=count)
    for rate in options.rates:
        ask(f"rate {rate:g}", clients, rate=rate, seconds=options.seconds)
    ask("alone", 1, requests=ALONE, at_once=1)
    return results


def line_of(name: str, told: dict[str, Any]) -> str:
    keys = ("new tokens per second", "requests per second", "first p50 ms", "first p95 ms",
            "first p99 ms", "between p50 ms", "between p95 ms", "refused", "cut")  # fmt: skip
    return f"  {name}: " + ", ".join(f"{key} {told[key]}" for key in keys if key in told)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[0, 8])
    parser.add_argument("--rounds", type=int, default=2, help="times that each server is started")
    parser.add_argument("--model", help="by default GPT-2 124M with random weights")
    parser.add_argument("--tokenizer")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--at-once", type=int, default=512, help="requests, and rows of a batch")
    parser.add_argument("--bursts", type=int, default=3, help="repetitions of all requests at once")
    parser.add_argument("--rates", type=float, nargs="*", default=[20, 240], help="streams/s")
    parser.add_argument("--seconds", type=float, default=8, help="time for each rate")
    parser.add_argument("--clients", type=int, default=8, help="processes that send requests")
    parser.add_argument("--lengths", type=int, nargs=2, default=(16, 256), metavar="TOKENS")
    parser.add_argument("--new", type=int, default=128, help="new tokens per answer")
    parser.add_argument("--vocab-size", type=int, default=256, help="ids are below this")
    parser.add_argument("--json", type=Path, help="write all measurements to this file")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or str(random_model(Path(folder) / "model"))
        rate = generate_rate(options, model)
        print(f"generate: {rate:,.0f} new tokens/s", flush=True)
        every: list[dict[str, Any]] = [{"generate": rate}]
        for _ in range(options.rounds):
            for processes in options.processes:
                with server(options, model, processes) as url:
                    results = measured(options, url)
                every.append({"processes": processes, **results})
                print(f"--processes {processes}:")
                print(*(line_of(*each) for each in results.items()), sep="\n", flush=True)
    if options.json:
        options.json.write_text(json.dumps(every, indent=2))


if __name__ == "__main__":
    main()

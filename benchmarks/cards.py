"""Decoding, prompts and blocks with the kernels of other cards, on the GPU at hand, by turns.

    python -m benchmarks.cards 9.0 8.9 8.6 8.0 7.5 12.0 [--only TEXT]

prints the table of docs/performance.md#other-cards, with a column for each compute capability. Each
capability has a process of its own (tools/as_gpu.py). For each case, all processes prepare, then
take turns. Weights are random; the model in blocks has float32 weights on cards that cannot read
blocks.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.decoding import GREEDY, STEPS, TURNS, RandomModel, Steps
from benchmarks.llama import SHAPES, RandomLlama
from gpt2block import Block, BlockWeights, GPT2Config, InputError
from gpt2block.checks import FLOATS
from gpt2block.cuda import cupy
from gpt2block.cuda.cards import CARDS, dotted
from gpt2block.cuda.devices import reads_blocks
from gpt2block.cuda.formats import FILE
from gpt2block.models.config import size

ROOT = Path(__file__).parents[1]
POSITION, PROMPT, CALLS = 400, 512, 20
RUNS = 3  # runs of a prompt or of a block in a turn; steps run once, as their sequences end
Run = Callable[[], object]
STEPS_OF: Mapping[str, tuple[int, ...]] = {  # rows of the steps of each model
    "GPT-2 small, bfloat16": (1, 8, 64),
    "GPT-2 small, float32": (1, 8, 64),
    "Qwen3-0.6B, bfloat16": (1, 4, 8, 16, 64),
    "8 layers, Q4_K_M": (1, 4, 8, 16, 64),
}
BLOCKS = "1 × 128", "1 × 1024", "8 × 1024"
TABLE: Mapping[str, tuple[tuple[str, str], ...]] = {  # label of a row: its cases
    **{f"{model}: step": tuple((model, str(M)) for M in rows) for model, rows in STEPS_OF.items()},
    "first token of 512, ms": tuple((model, "first") for model in STEPS_OF),
    "Block, bfloat16": tuple(("bfloat16", shape) for shape in BLOCKS),
    "Block, float32": tuple(("float32", shape) for shape in BLOCKS),
}


def made(model: str) -> RandomModel:
    if model.startswith("GPT-2"):
        return RandomModel(size("gpt2"), model.rpartition(" ")[2])
    if model.startswith("Qwen3"):
        return RandomLlama(SHAPES["qwen3-0.6b"], "bfloat16")
    blocks = FILE if reads_blocks("cuda") else "float32"
    return RandomLlama(replace(SHAPES["7b"], n_layer=8), blocks)


def prepared(of: str, what: str, models: dict[str, RandomModel]) -> tuple[Run, float]:
    """Return a function that runs a case, and the number by which its seconds are multiplied."""
    if of in FLOATS:
        return block(of, what), 1e6 / CALLS
    if of not in models:
        models[of] = made(of)
    if what == "first":
        (ids,) = models[of].prompts([PROMPT])
        options: Any = {"max_new_tokens": 1, "temperature": 0, "stop_ids": ()}
        return lambda: models[of].on(0).generate(ids.tolist(), **options), 1e3
    return Steps(models[of], int(what), POSITION).decoded(0, GREEDY, STEPS).replay, 1e6 / STEPS


def block(dtype: str, shape: str) -> Run:
    weights = BlockWeights.random(0, GPT2Config(1, 12, 768, 1024, 50257))
    of, rng = Block(weights, True, "cuda", dtype), np.random.default_rng(0)
    B, T = map(int, shape.split(" × "))
    x = cupy.asarray(rng.standard_normal((B, T, 768), np.float32)).astype(FLOATS[dtype])
    out = cupy.empty_like(x)

    def calls() -> None:
        for _ in range(CALLS):
            of(x, out=out)

    return calls


def seconds(run: Run) -> float:
    start = time.perf_counter()
    run()
    cupy.cuda.Device().synchronize()
    return time.perf_counter() - start


def work() -> None:
    """Prepare the case of each line, or time the prepared case for an empty line."""
    models: dict[str, RandomModel] = {}
    run: Run = models.clear
    factor, runs = 1.0, RUNS
    for line in sys.stdin:
        if case := json.loads(line):
            try:
                run, factor = prepared(case[0], case[1], models)
            except InputError:  # no kernel of this card takes the case
                run, factor = models.copy, np.nan
            runs = 1 if case[1].isdecimal() else RUNS
        times = [factor * seconds(run) for _ in range(runs)]
        print(json.dumps(median(times)), flush=True)


class Worker:
    """A process with the kernels of one card."""

    def __init__(self, capability: str) -> None:
        command = [sys.executable, str(ROOT / "tools" / "as_gpu.py"), capability, "--"]
        command += [sys.executable, "-m", "benchmarks.cards", "--worker"]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._card, self._process = capability, subprocess.Popen(command, cwd=ROOT, **pipes)

    def ask(self, *case: str) -> None:
        """Let the process prepare a case or, without one, time the last one."""
        print(json.dumps(case), file=self._process.stdin, flush=True)

    def answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            return json.loads(line)
        raise SystemExit(f"the process of {self._card} ended")


def by_turns(workers: Mapping[str, Worker], case: tuple[str, str]) -> dict[str, str]:
    """Return the median time of a case for each worker, as text."""
    for each in workers.values():
        each.ask(*case)
    for each in workers.values():
        each.answer()
    times: dict[str, list[float]] = {name: [] for name in workers}
    for _ in range(TURNS):
        for name, each in workers.items():
            each.ask()
            times[name].append(each.answer())
    digits = 2 if case[1] == "first" else 0
    cells = {name: f"{median(each):,.{digits}f}" for name, each in times.items()}
    return {name: cell.replace("nan", "–") for name, cell in cells.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("capabilities", nargs="*", help=", ".join(map(dotted, CARDS)))
    parser.add_argument("--only", default="", help="only rows of the table with this text")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work()
        return
    workers = {each: Worker(each) for each in arguments.capabilities}
    print("| µs |", *(f"as {each} |" for each in workers), "\n|---|", *("---|" for _ in workers))
    for label, cases in TABLE.items():
        if arguments.only in label:
            found = [by_turns(workers, case) for case in cases]
            cells = (" / ".join(each[name] for each in found) for name in workers)
            shapes = " / ".join(of if what == "first" else what for of, what in cases)
            print(f"| {label}, {shapes} |", *(f"{cell} |" for cell in cells), flush=True)


if __name__ == "__main__":
    main()

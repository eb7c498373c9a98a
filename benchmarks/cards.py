"""Decoding, prompts and blocks with the kernels of other cards, on the GPU at hand.

    python -m benchmarks.cards 9.0 8.9 7.5 12.0

prints a table with a column for each compute capability. Each capability runs in a process of its
own (tools/as_gpu.py), one after the other. Weights are random; the model in blocks has float32
weights on cards that cannot read blocks.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.llama import SHAPES, RandomLlama
from gpt2block import Block, BlockWeights, GPT2Config
from gpt2block.apps.bench.decoding import GREEDY, STEPS, RandomModel, Steps
from gpt2block.checks import FLOATS
from gpt2block.cuda import cupy
from gpt2block.cuda.cards import CARDS, dotted
from gpt2block.cuda.devices import reads_blocks
from gpt2block.cuda.formats import FILE
from gpt2block.models.config import size

ROOT = Path(__file__).parents[1]
POSITION, PROMPT, TURNS = 400, 512, 5
ROWS = 1, 8, 64
BLOCKS = (1, 128), (1, 1024), (8, 1024)


def us(run: Callable[[], object], calls: int = 1) -> float:
    """Return the median time of a run, which makes `calls` calls, in µs per call."""
    run()
    times = []
    for _ in range(TURNS):
        start = time.perf_counter()
        run()
        cupy.cuda.Device().synchronize()
        times.append(1e6 * (time.perf_counter() - start) / calls)
    return median(times)


def cases() -> Iterator[tuple[str, float]]:
    """Yield name and µs of each case, by the kernels that this process chooses."""
    blocks = FILE if reads_blocks("cuda") else "float32"
    models: dict[str, RandomModel] = {
        "GPT-2 small, bfloat16": RandomModel(size("gpt2"), "bfloat16"),
        "GPT-2 small, float32": RandomModel(size("gpt2"), "float32"),
        "Qwen3-0.6B, bfloat16": RandomLlama(SHAPES["qwen3-0.6b"], "bfloat16"),
        "8 layers of Llama 7B, Q4_K_M": RandomLlama(replace(SHAPES["7b"], n_layer=8), blocks),
    }
    for name, model in models.items():
        for rows in ROWS:
            yield f"{name}, step of {rows}", us(steps(model, rows), STEPS)
        yield f"{name}, first token of {PROMPT}", us(prompt(model))
    for dtype in ("bfloat16", "float32"):
        for B, T in BLOCKS:
            yield f"block, {dtype}, {B} × {T}", us(block(dtype, B, T), 20)


def steps(model: RandomModel, rows: int) -> Callable[[], object]:
    captured = Steps(model, rows, POSITION).decoded(0, GREEDY, STEPS)
    return captured.replay


def prompt(model: RandomModel) -> Callable[[], object]:
    (ids,) = model.prompts([PROMPT])
    options: Any = {"max_new_tokens": 1, "temperature": 0, "stop_ids": ()}
    return lambda: model.on(0).generate(ids.tolist(), **options)


def block(dtype: str, B: int, T: int) -> Callable[[], object]:
    weights = BlockWeights.random(0, GPT2Config(1, 12, 768, 1024, 50257))
    of, rng = Block(weights, True, "cuda", dtype), np.random.default_rng(0)
    x = cupy.asarray(rng.standard_normal((B, T, 768), np.float32)).astype(FLOATS[dtype])
    out = cupy.empty_like(x)

    def calls() -> None:
        for _ in range(20):
            of(x, out=out)

    return calls


def measured(capability: str) -> dict[str, float]:
    """Run all cases as this card; return {case: µs}."""
    tool = str(ROOT / "tools" / "as_gpu.py")
    command = [sys.executable, tool, capability, "--", sys.executable, "-m", "benchmarks.cards"]
    out = subprocess.check_output([*command, "--one"], cwd=ROOT, text=True)
    return dict(json.loads(line) for line in out.splitlines())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("capabilities", nargs="*", help=", ".join(map(dotted, CARDS)))
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        for case in cases():
            print(json.dumps(case), flush=True)
        return
    found = {each: measured(each) for each in arguments.capabilities}
    print("| µs |", *(f"as {each} |" for each in found), "\n|---|", *("---|" for _ in found))
    for name in dict.fromkeys(name for times in found.values() for name in times):
        cells = [f"{times[name]:,.0f}" if name in times else "" for times in found.values()]
        print(f"| {name} |", *(f"{cell} |" for cell in cells))


if __name__ == "__main__":
    main()

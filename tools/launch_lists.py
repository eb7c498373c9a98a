"""List the launches of all forward passes and operations for a chosen GPU, on the CPU.

    python tools/launch_lists.py [--capability 9.0] [--only TEXT] [--digests] > before.txt

prints a line for each launch: program, call, step, kernel, file, grid, block, shared memory,
compile-time constants, and arguments (of pointers, whether they are null). A call that fails has
its message instead. A change that keeps kernels, their sizes and their order keeps these lines,
also for GPUs that are not available. --digests prints a line for each program, as in
tests/golden/launches.txt. Nothing is compiled or run (launch_recorder.py).
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from launch_models import MODELS as GENERATING
from launch_models import engine_of, generation
from launch_operations import HEADS, attention, operation, product
from launch_recorder import DEVICES, Recorder, recording

from gpt2block import (
    Block,
    BlockWeights,
    GPT2Config,
    HiLoMatrix,
    LlamaBlock,
    LlamaBlockWeights,
    LlamaConfig,
    Sampling,
    WeightMatrix,
    solve,
)
from gpt2block.checks import FLOATS
from gpt2block.cuda import cupy
from gpt2block.cuda.formats import DTYPES
from gpt2block.engine.model import start_all
from gpt2block.models.config import ModelConfig
from gpt2block.models.config.llama import RopeScaling
from gpt2block.ops.registry import OPERATIONS

sys.path.append(str(Path(__file__).parents[1]))
from benchmarks.decoding import Steps
from benchmarks.llama import RandomLlama
from benchmarks.token_works import by_stages

Program = Callable[[Recorder], None]
PAIRS = (  # dtypes of weights and of the kv_cache
    ("float32", None), ("bfloat16", None), ("float16", None), ("float8_e5m2", None),
    ("float8_e4m3fn", "float8_e4m3fn"), ("bfloat16", "float8_e4m3fn"), ("float16", "float8_e5m2"),
)  # fmt: skip
PROMPTS = (7,), (5, 1, 9), (130, 300), (900, 700)
CONTINUED = (5, 1, 0), (1, 1, 1), (0, 9, 40)
ROWS = 1, 2, 3, 8, 16, 17, 24, 64, 256, 512


def llama(
    heads: tuple[int, int, int], n_embd: int, n_ff: int, vocab_size: int, **other: Any
) -> LlamaConfig:
    sizes: dict[str, Any] = dict(zip(("n_head", "n_kv_head", "head_size"), heads, strict=True))
    sizes |= {"n_embd": n_embd, "n_ff": n_ff, "vocab_size": vocab_size, "n_ctx": 1024}
    return LlamaConfig(n_layer=2, **sizes, **other)


BIASES = {"attention_bias": True, "mlp_bias": True}
LLAMA3, LINEAR = RopeScaling("llama3", 8.0), RopeScaling("linear", 2.0)
MODELS: Mapping[str, ModelConfig] = {
    "gpt2 2x64": GPT2Config(2, 2, 128, 1024, 101),
    "gpt2 3x64 untied": GPT2Config(2, 3, 192, 1024, 258, tie_word_embeddings=False),
    "gpt2 2x16": GPT2Config(2, 2, 32, 1024, 101),
    "gpt2 3x32": GPT2Config(2, 3, 96, 1024, 101),
    "gpt2 3x11": GPT2Config(2, 3, 33, 1024, 101),
    "gpt2 2x18": GPT2Config(2, 2, 36, 1024, 101),
    "llama 2/1x64": llama((2, 1, 64), 128, 192, 104),
    "llama 4/2x128 biases": llama((4, 2, 128), 256, 384, 101, **BIASES, scaling=LLAMA3),
    "llama 6/2x64 tied": llama((6, 2, 64), 320, 208, 515, tie_word_embeddings=True),
    "llama 4/1x32": llama((4, 1, 32), 96, 384, 101, scaling=LINEAR),
    "llama 4/2x16 biases": llama((4, 2, 16), 64, 90, 104, **BIASES),
    "large gpt2 12x64": GPT2Config(2, 12, 768, 1024, 50257),
    "large gpt2 24x64": GPT2Config(2, 24, 1536, 1024, 50257),
    "large llama 32/8x64": llama((32, 8, 64), 2048, 8192, 128256, tie_word_embeddings=True),
    "large llama 32/32x128": llama((32, 32, 128), 4096, 11008, 32000),
}


def block(config: ModelConfig, dtype: str, kernels: str, to: Recorder) -> None:
    """Call a block twice with the same arrays; the second call is a graph."""
    gpt2 = isinstance(config, GPT2Config)
    kind: Any = Block if gpt2 else LlamaBlock
    of: Any = BlockWeights if gpt2 else LlamaBlockWeights
    weights = of.random(0, config)
    for causal in (True, False):
        called = to.call(f"causal {causal}", kind, weights, causal, "cuda", dtype, kernels)
        for shape in ((1,), (5,), (2, 70), (3, 512)) if called else ():
            x, out = (cupy.empty((*shape, weights.n_embd), FLOATS[dtype]) for _ in range(2))
            for turn in ("first", "again"):
                to.call(f"causal {causal} {shape} {turn}", called, x, out=out)


def model(config: ModelConfig, dtype: str, kv_dtype: str | None, to: Recorder) -> None:
    """Compute every output of prompts, without and with a kv_cache, and steps of decoding."""
    engine = to.call("load", engine_of, config, dtype, kv_dtype)
    if engine is None:
        return
    for lengths in PROMPTS[: 4 if config.n_embd < 512 else 2]:
        for want in ("last", "logits", "hidden", "states"):
            to.call(f"{want} {lengths}", engine.forward, _ids(lengths), want)
        for turn in ("first", "again"):
            to.call(f"scores {lengths} {turn}", engine.log_likelihood, _ids(lengths))
    for want in ("last", "logits"):
        kept = engine.new_cache(3, 400)
        for lengths in CONTINUED:
            to.call(f"kv_cache {want} {lengths}", engine.forward, _ids(lengths), want, kept)
    for cached in (False, True):
        to.call(f"trace {cached}", engine.trace, _ids((9,))[0], cached)
    steps(engine, to)


def steps(engine: Any, to: Recorder) -> None:
    """Run steps of decoding, then free the arrays of a large engine."""
    for rows in ROWS:
        to.call(f"{rows} rows", _decode, engine, rows)
    large = engine.config.n_embd > 512
    del engine
    if large:
        gc.collect()  # only for large engines: it takes a tenth of the time of the launches


def _ids(lengths: tuple[int, ...]) -> list[Any]:
    return [np.zeros(length, np.int32) for length in lengths]


def _decode(engine: Any, rows: int) -> None:
    """Start a decoding and run steps; the second step is a graph."""
    sampling = [Sampling(temperature=0, repetition_penalty=1.1), Sampling(top_k=3)]
    decoding = start_all(engine, _ids((2,) * rows), [sampling[row % 2] for row in range(rows)], 5)
    decoding.next()
    decoding.next()


def stages(dtype: str, to: Recorder) -> None:
    """Run decoding steps with fewer fusions."""
    for rows in (1, 4, 16, 64):
        steps = Steps(RandomLlama(llama((4, 2, 64), 128, 192, 104), dtype), rows)
        for name, capture in by_stages(steps, 0).items():
            run = to.call(f"{rows} rows {name}", capture, 1)
            to.call(f"{rows} rows {name} run", run.replay)


def conversions(to: Recorder) -> None:
    """Convert matrices to other dtypes, and run the block of LeetGPU's challenge."""
    x, output, weights = (cupy.empty(size, "float32") for size in (70 * 768, 70 * 768, 7_087_872))
    to.call("solve", solve, x, output, weights, 70)
    for shape, layout in itertools.product(((128, 96), (33, 37)), ("KN", "NK")):
        w = cupy.empty(shape, "float32")
        to.call(f"two parts {shape}", HiLoMatrix.from_float32, w)
        for dtype in DTYPES:
            to.call(f"{dtype} {shape} {layout}", WeightMatrix.quantize, w, dtype, layout)


def programs() -> Iterator[tuple[str, Program]]:
    """Return name and function of every program."""
    for NH, NKV, HS in HEADS:
        for dtype, kernels in itertools.product(FLOATS, ("skeleton", "fused")):
            name = f"{NH}/{NKV}x{HS} {dtype} {kernels}"
            if NH == NKV:
                gpt2 = GPT2Config(1, NH, NH * HS, 64, 8)
                yield f"block gpt2 {name}", partial(block, gpt2, dtype, kernels)
            for biases in ({}, BIASES):
                config = llama((NH, NKV, HS), 16 * NH, 208, 8, **biases)
                kind = "llama biases" if biases else "llama"
                yield f"block {kind} {name}", partial(block, config, dtype, kernels)
    for (name, each), (dtype, kv_dtype) in itertools.product(MODELS.items(), PAIRS):
        yield f"model {name} {dtype} {kv_dtype or 'own'}", partial(model, each, dtype, kv_dtype)
    for name, formats in GENERATING:
        yield f"generation {name} {formats}", partial(generation, name, formats)
    for dtype in DTYPES:
        yield f"stages {dtype}", partial(stages, dtype)
        yield f"products linear {dtype}", partial(product, "linear", dtype)
        yield f"products gemm {dtype}", partial(product, "gemm", dtype)
    for dtype in FLOATS:
        yield f"attention {dtype}", partial(attention, dtype)
    for found in OPERATIONS.values():
        for dtype in found.workload.dtypes:
            yield f"operation {found.name} {dtype}", partial(operation, found, dtype)
    yield "conversions", conversions


def lists(capability: str, wanted: Callable[[str], bool]) -> Iterator[tuple[str, list[str]]]:
    """Yield name, with the capability, and lines of each selected program that launches
    anything."""
    for name, run in programs():
        if wanted(f"{capability} {name}"):
            with recording(capability) as recorder:
                run(recorder)
            if recorder.lines:
                yield f"{capability} {name}", recorder.lines


def digest(lines: list[str]) -> str:
    """Return the start of the SHA-256 of lines, and their number."""
    return f"{hashlib.sha256(chr(10).join(lines).encode()).hexdigest()[:16]} {len(lines):6}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capability", choices=DEVICES, help="by default all, one after another")
    parser.add_argument("--only", default="", help="text in the names of programs to run")
    parser.add_argument("--digests", action="store_true", help="a line for each program")
    args = parser.parse_args()
    for capability in (args.capability,) if args.capability else DEVICES:
        for name, lines in lists(capability, lambda name: args.only in name):
            text = [f"{digest(lines)} {name}"] if args.digests else [f"{name} | {x}" for x in lines]
            print(*text, sep="\n", flush=True)


if __name__ == "__main__":
    main()

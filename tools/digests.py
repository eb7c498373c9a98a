"""SHA-256 of the outputs of a fixed list of calls, to show that a change keeps every bit.

    python -m tools.digests [--emulated] [--only TEXT] > before.txt

prints a line for each call: blocks, models in every dtype, and every variant of every operation. It
needs a GPU, or runs the small calls on the CPU with --emulated.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from gpt2block import (
    GPT2,
    Block,
    BlockWeights,
    GPT2Config,
    GPT2Weights,
    InputError,
    Sampling,
    emulator,
    random_input,
)
from gpt2block.array_checks import FLOATS
from gpt2block.bench import measure
from gpt2block.ops.registry import OPERATIONS, Operation
from gpt2block.run.model import DTYPES, start_all

SMALL = {"B": 2, "T": 6, "C": 48, "NH": 3, "HS": 20, "V": 50, "M": 9, "K": 144, "N": 37}
SMALL |= {"H": 3, "D": 34}
LARGE = {"B": 2, "T": 70, "C": 192, "NH": 3, "HS": 64, "V": 500, "M": 130, "K": 288, "N": 144}
LARGE |= {"H": 3, "D": 64}
Made = Iterator[tuple[str, Any]]


def blocks(emulated: bool) -> Made:
    """Both sets of kernels in three dtypes and shapes; the second call replays a graph."""
    C, shapes = (128, ((5,), (2, 9))) if emulated else (768, ((128,), (1, 1024), (8, 512)))
    weights = BlockWeights.random(0, GPT2Config(n_head=C // 64, n_embd=C))
    kinds = [("skeleton", "float32"), *(("fused", dtype) for dtype in FLOATS)]
    for kernels, dtype in kinds:
        for causal in (True, False):
            block = Block(weights, causal, "cuda", dtype, kernels)
            for shape in shapes:
                x = random_input(1, (*shape, C)).astype(FLOATS[dtype])
                for turn in range(2):
                    yield f"block {kernels} {dtype} causal {causal} {shape} {turn}", block(x)
                trace = block.trace(x)
                yield from ((f"trace {kernels} {dtype} {n} {shape}", t) for n, t in trace.items())


def models(emulated: bool) -> Made:
    """Prefill, decoding, log-likelihoods and sampled tokens in every dtype."""
    small = GPT2Config(2, 2, 32, 24, 101) if emulated else GPT2Config(2, 3, 48, 140, 101)
    wide = GPT2Config(2, 1, 64, 24, 101) if emulated else GPT2Config()
    for config in (small, wide):
        weights = GPT2Weights.random(0, config)
        rng = np.random.default_rng(0)
        lengths = (11, 1, 7) if emulated else (131, 1, 100)
        ids = [rng.integers(config.vocab_size, size=n).astype(np.int32) for n in lengths]
        sampling = [
            Sampling(temperature=0),
            Sampling(top_k=20, top_p=0.8, min_p=0.01, repetition_penalty=1.2),
            Sampling(temperature=1.5, seed=3),
        ]
        for dtype in DTYPES:
            name = f"model {config.n_embd} {dtype}"
            engine = GPT2(weights, "cuda", dtype).engine
            for want in ("last", "logits", "hidden", "states"):
                for turn in range(3):
                    found = engine.forward(ids, want)
                    yield f"{name} {want} {turn}", np.concatenate([f.ravel() for f in found])
            for turn in range(3):
                yield f"{name} scores {turn}", np.concatenate(engine.log_likelihood(ids))
            cache = engine.new_cache(3, config.n_ctx)
            for part in (slice(0, 5), slice(5, 6), slice(6, None)):
                found = engine.forward([row[part] for row in ids], "last", cache)
                yield f"{name} cached {part}", np.concatenate([f.ravel() for f in found])
            for rows in (slice(0, 3), slice(0, 1)):
                decoding = start_all(engine, ids[rows], sampling[rows], 5)
                for step in range(5):
                    _, tokens, logprobs = decoding.next()
                    yield f"{name} decoded {rows} {step}", np.concatenate([tokens, logprobs])


def operations(emulated: bool) -> Made:
    """Every variant of every operation, at two sizes."""
    for found in OPERATIONS.values():
        for wanted in (SMALL,) if emulated else (SMALL, LARGE):
            sizes = {name: wanted[name] for name in found.sizes}
            if found.matrices:
                sizes["N"] = 256  # whole heads
            yield from operation(found, sizes)


def operation(found: Operation, sizes: dict[str, int]) -> Made:
    options = {**found.attrs, **({"fill": 0.0} if "fill" in found.attrs else {})}
    for dtype in found.dtypes:
        for layout in ("KN", "NK") if found.matrices else ("KN",):
            host, _ = measure.inputs_and_truth(found, sizes, dtype, layout)
            arrays = tuple(map(measure.uploaded, host))
            for variant in found.variants:
                chosen = options | measure.options_for(found, variant)
                name = f"{found.name} {variant.name} {dtype} {layout} {sizes}"
                with contextlib.suppress(InputError):
                    bound = found.bind(arrays, **chosen)
                    yield name, bound.run().get()
                    yield from ((f"{name} extra", array.get()) for array in bound.extra)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--emulated", action="store_true", help="on the CPU, in small sizes")
    parser.add_argument("--only", default="", help="one of blocks, models, operations")
    args = parser.parse_args()
    with emulator.emulated() if args.emulated else contextlib.nullcontext():
        for make in (blocks, models, operations):
            if args.only in make.__name__:
                for name, array in make(args.emulated):
                    host = np.ascontiguousarray(array)
                    print(hashlib.sha256(host.tobytes()).hexdigest()[:16], name, flush=True)


if __name__ == "__main__":
    main()

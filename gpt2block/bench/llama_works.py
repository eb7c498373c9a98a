"""What `gpt2block bench --llama` times: a Llama with random weights in device memory.

A step of decoding for several numbers of rows, and a prompt, with 16-bit and with FP8 weights.
Steps are also timed with fewer fusions: one kernel for each operation, launched from Python, then
each fusion in addition, and last a CUDA graph: the table of kernl's Llama optimisation.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from gpt2block.bench.models import SHAPES, RandomLlama
from gpt2block.bench.race import Run
from gpt2block.bench.stages import staged, stages_of
from gpt2block.bench.token_works import (
    GREEDY,
    NAME,
    Captures,
    Steps,
    parse_rows,
    prompt,
)
from gpt2block.bench.works import Work, Written
from gpt2block.checks import check_choice
from gpt2block.cuda import cupy
from gpt2block.cuda.kernels import FP8
from gpt2block.errors import InputError
from gpt2block.ops.attention import SIXTEEN_BITS
from gpt2block.run.model import DTYPES, Ids, cache_tensors

if TYPE_CHECKING:
    from gpt2block.bench.torch_peers import TorchPeers

ROWS = (1, 4, 16, 64)
NARROW = "float8_e5m2"  # the dtype after the 16-bit one, if none is given
FP8_CACHE = "+ FP8 kv_cache"  # a step of all stages, and a kv_cache of FP8
BFLOAT16 = ("1b",)  # sizes whose checkpoints have bfloat16 weights; the others have float16


def llama_decode(model: RandomLlama, rows: int, position: int = 512) -> Work:
    """A step of decoding, and its stages, which have no FP8 kv_cache and round no activations."""
    steps = Steps(model, rows, position)

    def ours(device: int) -> Captures:
        step = partial(steps.decoded, device, GREEDY)
        if model.kv_dtype in FP8:
            return {FP8_CACHE: step}
        if model.activations is not None:  # the stages do not round
            return {NAME: step}
        shared: list[Any] = []
        stages = stages_of(model.dtype).items()
        captures = {name: partial(_stage, steps, device, of, shared) for name, of in stages}
        return {NAME: step, **captures}

    def theirs(torch: TorchPeers) -> Captures:
        of = torch.of_models
        return {
            "torch": partial(of.steps, steps, "cuda", of.called),
            "torch.compile": partial(of.steps, steps, "cuda", torch.repeated),
            "transformers": partial(of.transformers_steps, steps, "cuda"),
        }

    return steps.work(ours, theirs)


def _stage(
    steps: Steps, device: int, fusions: Collection[str], shared: list[Any], rounds: int
) -> Run:
    """Greedy steps with some of the fusions, as a CUDA graph or not, whose launches overlap or not.

    shared: the kv_cache of all stages, which is large; each one writes it again from the prompts.
    """
    prompts, M = steps.prompts(), steps.rows
    engine: Any = steps.model.on(device).engine
    with engine.running():
        if not shared:
            shared.append(engine.new_cache(M, steps.end))
        cache = shared[0]
        cache.lengths = [0] * M
        first = engine.forward(prompts, "last", cache)
        tokens = cupy.asarray(np.array([logits.argmax() for logits in first], np.int32))
        positions = cupy.asarray(np.full(M, steps.start, np.int32))
        rows = cupy.asarray(np.arange(M + 1, dtype=np.int32))
        batch = {"tokens": tokens, "positions": positions, "row": rows[:M]}
        batch |= {"cu_seqlens": rows, "start": positions}
        caches = cache_tensors(cache.layers, engine.config.n_layer)
        recording = engine.recordings.make(
            lambda do: staged(do, engine.config, fusions),
            {**engine.given(), **caches, **batch},
            overlapping="overlap" in fusions,
        )
    columns = [tokens.get()]

    def replay() -> None:
        with engine.running():
            for _ in range(rounds):
                if "graph" in fusions:
                    recording.repeat(engine.stream)
                else:
                    recording.run()
                tokens[...] = recording.out.argmax(axis=1)
                positions[...] += 1
                columns.append(tokens.get())

    def written() -> Written:
        with engine.running():
            logits = recording.out.get().astype(np.float64)
        largest = logits.max(axis=1, keepdims=True)
        scores = logits - largest - np.log(np.exp(logits - largest).sum(axis=1, keepdims=True))
        return steps.written(np.stack(columns, axis=1), lambda row, token: scores[row, token])

    return Run(replay, (written,), cache)


def _prompt_peers(model: RandomLlama, torch: TorchPeers, ids: Ids) -> Captures:
    of = torch.of_models
    return {
        "torch": partial(of.prompt, model, ids, "cuda", of.called),
        "torch.compile": partial(of.prompt, model, ids, "cuda", torch.repeated),
        "transformers": partial(of.transformers_prompt, model, ids, "cuda"),
    }


def llama_prompt(model: RandomLlama, T: int = 512) -> Work:
    """A prompt, to the logits after its last token."""
    return prompt(model, T, partial(_prompt_peers, model))


def llama_works(
    dtype: str | None = None,
    rows: str | None = None,
    name: str | None = None,
    kv_dtype: str | None = None,
    activations: str | None = None,
) -> list[Work]:
    """The works in the order they are timed. Raises InputError.

    dtype: of the weights; by default those of the checkpoints of this size, then NARROW, and then
    NARROW with a kv_cache of NARROW, too. rows: as `parse_rows` takes them; by default ROWS. name:
    one of SHAPES, by default "7b". kv_dtype, activations: as in `RandomModel`, of all works.
    """
    name = name or "7b"
    if name not in SHAPES:
        raise InputError(f"--size: expected one of {', '.join(SHAPES)} with --llama, got {name!r}")
    if dtype is not None:
        check_choice("--dtype", dtype, DTYPES)
    counts = ROWS if rows is None else parse_rows(rows)
    stored = "bfloat16" if name in BFLOAT16 else "float16"
    dtypes = [(each, kv_dtype) for each in ((dtype,) if dtype else (stored, NARROW))]
    if dtype is None and kv_dtype is None:
        dtypes.append((NARROW, NARROW))
    works: list[Work] = []
    for stored, kv in dtypes:
        model = RandomLlama(SHAPES[name], stored, kv, activations)
        works += [llama_decode(model, count) for count in counts]
        if stored in SIXTEEN_BITS:  # else the exact logits would be those that are timed
            works.append(llama_prompt(model))
    return works

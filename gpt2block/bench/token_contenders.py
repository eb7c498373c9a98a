"""Contenders of gpt2block for works from tokens to tokens: calls from Python, not graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from gpt2block.bench.contenders import Contender, Run
from gpt2block.bench.llama_works import UNFUSED, LlamaDecodeWork, Stage, stages_of
from gpt2block.bench.token_works import DecodeWork, GenerateWork, PromptWork, TokenWork, Written
from gpt2block.cuda import cupy
from gpt2block.cuda.kernels import FP8
from gpt2block.errors import InputError
from gpt2block.model import Model
from gpt2block.run.cuda_decoding import IN_FLIGHT
from gpt2block.run.model import (
    Decoding,
    Floats,
    Ids,
    Sampled,
    cache_tensors,
    kv_cache_dtype,
    start_all,
)
from gpt2block.sampling import Sampling

GREEDY = Sampling(temperature=0)
SAMPLED = Sampling(temperature=0.8, top_k=50, top_p=0.9, seed=0)
NAME = "gpt2block"
FP8_CACHE = "+ FP8 kv_cache"  # a step of all stages, and a kv_cache of FP8
NOTES = {UNFUSED: "a kernel for each operation, launched from Python; + adds to the line above"}


def contenders(work: TokenWork, device: int) -> Iterator[Contender]:
    """The contenders for a work on a GPU; capturing shows whether they run."""
    captures: dict[str, Callable[[int], Run]] = {}
    if isinstance(work, DecodeWork):
        fp8_cache = work.model.kv_dtype in FP8 and isinstance(work, LlamaDecodeWork)
        captures[FP8_CACHE if fp8_cache else NAME] = partial(_steps, work, device, GREEDY)
        if isinstance(work, LlamaDecodeWork) and not fp8_cache:
            shared: list[Any] = []
            for stage in stages_of(work.dtype):
                captures[stage.name] = partial(_stage, work, device, stage, shared)
        elif not isinstance(work, LlamaDecodeWork):
            captures["sampled"] = partial(_steps, work, device, SAMPLED)
    elif isinstance(work, PromptWork):
        captures[NAME] = partial(_prompt, work, device)
    elif isinstance(work, GenerateWork):
        captures[NAME] = partial(_generate, work, device)
    for name, capture in captures.items():
        note = partial(str, NOTES.get(name, ""))
        yield Contender(name, False, capture, kv_cache_dtype(work.dtype), note)


def started(model: Model[Any], prompts: Sequence[Ids], sampling: Sampling, end: int) -> Decoding:
    """A decoding of these prompts, which a call of `next` continues by a token each.

    end: the most tokens of a sequence, which the kv_cache has room for.
    """
    steps = end - max(map(len, prompts)) + 1
    return start_all(model.engine, prompts, [sampling] * len(prompts), steps)


def _steps(work: DecodeWork, device: int, sampling: Sampling, rounds: int) -> Run:
    prompts = work.prompts()
    end = min(work.model.config.n_ctx, work.end + IN_FLIGHT)
    decoding = started(work.model.on(device), prompts, sampling, end)
    steps: list[Sampled] = []
    waiting = set(range(work.rows))
    while waiting:  # prompts that start in several groups have separate first steps
        steps.append(decoding.next())
        waiting -= set(steps[-1].slots.tolist())

    def replay() -> None:
        for _ in range(rounds):
            steps.append(decoding.next())
        cupy.cuda.Device().synchronize()  # the next step is in flight and counts in this turn

    def written() -> Written:
        new: list[list[int]] = [[] for _ in prompts]
        logprobs = np.empty(len(prompts))
        for step in steps:
            for slot, token in zip(step.slots.tolist(), step.tokens.tolist(), strict=True):
                new[slot].append(token)
            logprobs[step.slots] = step.logprobs
        sequences = [np.array([*prompts[row], *new[row]], np.int32) for row in work.checked]
        last = [float(logprobs[row]) for row in work.checked]
        return Written(sequences, last, sampling.temperature == 0)

    return Run(replay, (written,))


def _stage(work: LlamaDecodeWork, device: int, stage: Stage, shared: list[Any], rounds: int) -> Run:
    """Greedy steps of a plan with fewer fusions, or without a graph.

    shared: the kv_cache of all stages, which is large; each one writes it again from the prompts.
    """
    prompts, M = work.prompts(), work.rows
    engine: Any = work.model.on(device).engine
    with engine.running():
        if not shared:
            shared.append(engine.new_cache(M, work.end))
        cache = shared[0]
        cache.lengths = [0] * M
        first = engine.forward(prompts, "last", cache)
        tokens = cupy.asarray(np.array([logits.argmax() for logits in first], np.int32))
        positions = cupy.asarray(np.full(M, work.start, np.int32))
        rows = cupy.asarray(np.arange(M + 1, dtype=np.int32))
        batch = {"tokens": tokens, "positions": positions, "row": rows[:M]}
        batch |= {"cu_seqlens": rows, "start": positions}
        caches = cache_tensors(cache.layers, engine.config.n_layer)
        recording = engine.recordings.make(
            lambda do: stage.run(do, engine.config),
            {**engine.given(), **caches, **batch},
            overlapping=stage.overlapping,
        )
    columns = [tokens.get()]

    def replay() -> None:
        with engine.running():
            for _ in range(rounds):
                if stage.graph:
                    recording.repeat(engine.stream)
                else:
                    recording.run()
                tokens[...] = recording.out.argmax(axis=1)
                positions[...] += 1
                columns.append(tokens.get())

    def written() -> Written:
        with engine.running():
            logits = recording.out.get().astype(np.float64)
        of_row = np.stack(columns, axis=1)
        sequences = [np.concatenate([prompts[row], of_row[row]]) for row in work.checked]
        largest = logits.max(axis=1, keepdims=True)
        scores = logits - largest - np.log(np.exp(logits - largest).sum(axis=1, keepdims=True))
        return Written(sequences, [float(scores[row, of_row[row, -1]]) for row in work.checked])

    return Run(replay, (written,), cache)


def _prompt(work: PromptWork, device: int, rounds: int) -> Run:
    model, prompt = work.model.on(device), work.prompt()
    logits: list[Floats] = []

    def replay() -> None:
        logits[:] = [model(prompt, last=True) for _ in range(rounds)]

    return Run(replay, (lambda: logits[-1][None],))


def _generate(work: GenerateWork, device: int, rounds: int) -> Run:
    from gpt2block.text.generation import generate  # noqa: PLC0415  (tiktoken imports slowly)

    engine, prompts = work.model.on(device).engine, work.ids()
    found: list[Any] = []

    def replay() -> None:
        for _ in range(rounds):
            found[:] = generate(
                engine, None, prompts, max_new_tokens=work.new, temperature=0, stop_ids=()
            )

    def written() -> Written:
        return continued(work, prompts, [each.tokens for each in found])

    return Run(replay, (written,))


def continued(work: GenerateWork, prompts: Sequence[Ids], new: Sequence[Sequence[int]]) -> Written:
    """The sequences that are checked. Raises InputError for a continuation of a wrong length."""
    lengths = sorted({len(tokens) for tokens in new})
    if lengths != [work.new]:
        raise InputError(f"{work.new} new tokens of each prompt were requested, got {lengths}")
    pairs = [(prompts[i], np.asarray(new[i], np.int32)) for i in work.checked]
    return Written([np.concatenate(pair) for pair in pairs])

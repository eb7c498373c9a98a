"""Works of whole models: decoding steps, prompts, and continuations of many prompts.

Times are host times of Python calls that return with their results in host memory.
A Llama's step is also timed in stages: one kernel for each operation, launched from Python, then
one fusion more at each stage, and at last a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from benchmarks.decoding import GREEDY, NAME, STEPS, TURNS, RandomModel, Steps
from benchmarks.llama import SHAPES, RandomLlama
from benchmarks.random_weights import blocks_problem
from benchmarks.stages import stages_of
from benchmarks.tasks import Continuations, Prompt, stage
from benchmarks.works import STEPS_OF_A_BLOCK, Work
from gpt2block.checks import check_choice
from gpt2block.cuda.formats import DTYPES, FILE, own_cache_dtype
from gpt2block.cuda.kernels import FP8
from gpt2block.errors import InputError
from gpt2block.models.config import ModelConfig, size
from gpt2block.ops.attention import SIXTEEN_BITS
from gpt2block.ops.bench.race import Capture, Captured, Contender
from gpt2block.sampling import Sampling

FP8_CACHE = "+ FP8 kv_cache"  # name of the decoding step with all fusions and an FP8 kv_cache
FP8_WEIGHTS = "float8_e5m2"
FLOAT16 = ("7b", "small")  # sizes with float16 weights; other sizes have bfloat16 weights
ROWS = "1,2,4,8,16,32,64,128,256"
LLAMA_ROWS = "1,4,16,64"
MAX_ROWS = 4096
SAMPLED = Sampling(temperature=0.8, top_k=50, top_p=0.9, seed=0)

Captures = Mapping[str, Capture]  # name of an implementation → its `capture`


@dataclass(frozen=True)
class ModelWork(Work):
    """A benchmark of a whole model. task: the task, which has the model as an attribute."""

    task: Any = None  # Steps, Prompt or Continuations


class ManyPrompts(NamedTuple):
    """Prompts that are continued together: their number, lengths in tokens, and new tokens each."""

    prompts: int
    shortest: int
    longest: int
    new: int


SHORT_PROMPTS = ManyPrompts(512, 16, 256, new=128)
LONG_PROMPTS = ManyPrompts(256, 100, 1024, new=562)  # lengths as in the benchmark of nano-vllm
MANY = {"smollm2-135m": SHORT_PROMPTS, "qwen3-0.6b": LONG_PROMPTS}  # by size of a Llama


def gpt2_works(
    dtype: str | None = None,
    rows: str | None = None,
    name: str | None = None,
    cache: str | None = None,
) -> list[Work]:
    """Return the works of a GPT-2, in the order they are timed. Raises InputError.

    dtype: dtype of the weights, by default bfloat16. rows: a list that `parse_rows` accepts. name:
    name of the size, by default gpt2. cache: dtype of the kv_cache.
    """
    if dtype is not None:
        check_choice("--dtype", dtype, DTYPES)
    model = RandomModel(size(name or "gpt2"), dtype or "bfloat16", cache)
    return [
        *(decode(steps) for steps in _steps(model, rows or ROWS)),
        prompt(model, 1024),
        *(first_token(model, T) for T in (480, 1000)),
        generate(model, SHORT_PROMPTS),
    ]


def llama_works(
    dtype: str | None = None,
    rows: str | None = None,
    name: str | None = None,
    cache: str | None = None,
    several: str | None = None,
) -> list[Work]:
    """Return the works of a Llama, in the order they are timed.

    dtype: dtype of the weights; by default 16 bits, then FP8, then GGUF blocks. rows: a list that
    `parse_rows` accepts. name: a key of SHAPES. cache: dtype of the kv_cache of all works. several:
    a device such as "cuda:0,1", if the models are divided among GPUs. Raises InputError.
    """
    name = name or "7b"
    check_choice("--size", name, tuple(SHAPES))
    config = SHAPES[name]
    if dtype is not None:
        check_choice("--dtype", dtype, (*DTYPES, FILE))
    if dtype == FILE and (problem := blocks_problem(config)):
        raise InputError(f"--dtype file: {problem} in {name}: choose another --size")
    works: list[Work] = []
    for weights, kv in _formats(config, name, dtype, cache):
        model = RandomLlama(config, weights, kv, several)
        for steps in _steps(model, rows or LLAMA_ROWS):
            works.append(decode(steps, partial(by_stages, steps)))
        if weights in SIXTEEN_BITS:  # prompts of other weights could be checked only by themselves
            works.append(prompt(model, 512))
        if name in MANY:
            works.append(generate(model, MANY[name]))
    gpus = 1 + (several or "").count(",")
    return works if gpus == 1 else [_divided(work, gpus) for work in works]


def _steps(model: RandomModel, rows: str) -> list[Steps]:
    return [Steps(model, n) for n in parse_rows(rows)]


def _formats(
    config: ModelConfig, name: str, dtype: str | None, cache: str | None
) -> Iterator[tuple[str, str | None]]:
    """Yield the dtypes of weights and of kv_caches to time."""
    yield dtype or ("float16" if name in FLOAT16 else "bfloat16"), cache
    if dtype is not None:
        return
    own = own_cache_dtype(FILE)  # FP8 weights have the same cache
    if cache in (None, own, *FP8):
        yield FP8_WEIGHTS, cache
    if cache is None:
        yield FP8_WEIGHTS, FP8_WEIGHTS
    if cache in (None, own, *FP8) and not blocks_problem(config):
        yield FILE, cache


def _divided(work: Work, gpus: int) -> Work:
    """Return the work of each of several GPUs."""
    sizes = {**work.sizes, "gpus": gpus}
    return replace(work, sizes=sizes, flops=work.flops // gpus, traffic=work.traffic // gpus)


def by_stages(steps: Steps, device: int) -> Captures:
    """Return {name: `capture`} of the step of `generate` and of each stage, for a Llama.

    A model on several GPUs, with GGUF blocks or with an FP8 kv_cache has no stages.
    """
    model: Any = steps.model
    step = partial(steps.decoded, device, GREEDY)
    if model.cache_dtype in FP8:
        return {FP8_CACHE: step}
    if model.gpus > 1 or model.dtype == FILE:
        return {NAME: step}
    shared: list[Any] = []
    stages = stages_of(model.dtype).items()
    return {NAME: step, **{by: partial(stage, steps, device, of, shared) for by, of in stages}}


def model_work(
    model: RandomModel,
    what: str,
    name: str,
    sizes: Mapping[str, int],
    ours: Callable[[int], Captures],
    **fields: Any,
) -> ModelWork:
    """Return a benchmark of a whole model that times calls from Python instead of CUDA graphs.

    fields: other fields of ModelWork. There are no copies of the inputs, as the weights exceed the
    L2 cache. With an FP8 kv_cache the tolerance is bfloat16's, eight times float16's: keys and
    values near a tie may round up or down, by relative steps of 1/4 or 1/8, which attention
    averages.
    """
    fp8 = model.cache_dtype in FP8
    config = vars(model.config)
    stored = [f"kv_cache {model.cache_dtype}"] if fp8 else []
    shown = [each for each in ("n_layer", "n_embd", "n_kv_head") if each in config]

    def contenders(sets: object, device: int) -> Iterator[Contender]:
        for by, capture in ours(device).items():
            yield Contender(by, capture, own_cache_dtype(model.dtype))

    return ModelWork(
        what,
        ", ".join([name, *stored]),
        model.dtype,
        {**sizes, **{each: config[each] for each in shown}},
        truth=model.last_logits,
        ours=contenders,
        roundings=STEPS_OF_A_BLOCK,
        rounding="bfloat16" if fp8 else None,
        **fields,
    )


def decode(steps: Steps, ours: Callable[[int], Captures] | None = None) -> ModelWork:
    """Return the benchmark of a decoding step, which reads all weights, keys and values once.

    ours: returns implementations for a device, by default greedy and sampled steps of `generate`.
    """
    model, rows, keys = steps.model, steps.rows, steps.rows * steps.position
    return model_work(
        model,
        "decode",
        f"{rows} rows" if rows > 1 else "1 row",
        {"rows": rows, "position": steps.position},
        ours or partial(by_samplings, steps.decoded),
        flops=2 * rows * model.matrix_elements + model.attention_flops(keys),
        traffic=model.weight_bytes + keys * model.token_bytes,
        rounds=STEPS,
        turns=TURNS,
        tokens=rows,
        task=steps,
    )


def by_samplings(run: Callable[..., Captured], device: int) -> Captures:
    """Return {name: `capture`} of a greedy and of a sampled run."""
    samplings = {NAME: GREEDY, "sampled": SAMPLED}
    return {by: partial(run, device, each) for by, each in samplings.items()}


def prompt(model: RandomModel, T: int) -> Work:
    """Return the work of the logits after one prompt of T tokens."""
    task = Prompt(model, T)
    work = model_work(
        model,
        "prompt",
        f"1x{T}",
        {"T": T},
        lambda device: {NAME: partial(task.computed, device)},
        flops=prompt_flops(model, T),
        traffic=model.weight_bytes,
        rounds=4,
        turns=TURNS,
        task=task,
    )
    return replace(work, truth=lambda: model.last_logits(task.ids))


def prompt_flops(model: RandomModel, T: int) -> int:
    """Return the FLOPs of a prompt of T tokens, including the logits after the last token."""
    head: int = model.config.vocab_size * model.config.n_embd
    products = 2 * T * (model.matrix_elements - head) + 2 * head
    return products + model.attention_flops(T * (T + 1) // 2)


def first_token(model: RandomModel, T: int) -> Work:
    """Return the work of a call of `generate`: a prompt of T tokens and one new token."""
    task = Continuations(model, model.prompts([T]), 1)
    return model_work(
        model,
        "first",
        f"1x{T}",
        {"T": T},
        lambda device: {NAME: partial(task.generated, device, GREEDY)},
        flops=prompt_flops(model, T),
        traffic=model.weight_bytes,
        rounds=4,
        turns=TURNS,
        tokens=1,
        task=task,
    )


def generate(model: RandomModel, of: ManyPrompts) -> Work:
    """Return the work of one batch of prompts of random lengths."""
    prompts, shortest, longest, new = of
    lengths = np.random.default_rng(1).integers(shortest, longest + 1, size=prompts).tolist()
    # Pairs of a query and a key that the query sees
    pairs = sum(n * new + new * (new - 1) // 2 for n in lengths)
    task = Continuations(model, model.prompts(lengths), new)
    tokens = sum(lengths) + prompts * new
    return model_work(
        model,
        "generate",
        f"{prompts} prompts",
        of._asdict(),
        partial(by_samplings, task.generated),
        flops=2 * tokens * model.matrix_elements + model.attention_flops(pairs),
        traffic=new * model.weight_bytes + pairs * model.token_bytes,
        rounds=1,
        turns=1,
        tokens=prompts * new,
        task=task,
    )


def parse_rows(text: str) -> tuple[int, ...]:
    """Parse a list of numbers of sequences such as "1,8,64". Raises InputError."""
    words = text.split(",")
    if not all(w.strip().isdecimal() and len(w) < 10 and 0 < int(w) <= MAX_ROWS for w in words):
        raise InputError(
            f"--rows: expected numbers from 1 to {MAX_ROWS:,} such as 1,8,64, got {text!r}"
        )
    return tuple(dict.fromkeys(map(int, words)))

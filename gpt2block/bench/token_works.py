"""Benchmarks of `gpt2block bench --decode` and `--llama`: whole models with random weights.

The works are a decoding step for several numbers of rows, a prompt, and continuations of many
prompts. A Llama's step is also timed in stages: one kernel for each operation, launched from
Python, then one fusion more at each stage, and at last a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from gpt2block.bench import tasks
from gpt2block.bench.models import SHAPES, RandomGPT2, RandomLlama, RandomModel
from gpt2block.bench.race import Capture, Contender
from gpt2block.bench.random_weights import blocks_problem
from gpt2block.bench.stages import UNFUSED, stages_of
from gpt2block.bench.tasks import Continuations, Prompt, Steps
from gpt2block.bench.works import STEPS_OF_A_BLOCK, Work
from gpt2block.checks import check_choice
from gpt2block.config import ALIASES, SIZES, ModelConfig, size
from gpt2block.config.formats import DTYPES, FILE, own_cache_dtype
from gpt2block.cuda.kernels import FP8
from gpt2block.errors import InputError
from gpt2block.sampling import Sampling

MOST_ROWS = 4096
GREEDY = Sampling(temperature=0)
SAMPLED = Sampling(temperature=0.8, top_k=50, top_p=0.9, seed=0)
NAME = "gpt2block"
FP8_CACHE = "+ FP8 kv_cache"  # name of the decoding step with all fusions and an FP8 kv_cache
NOTES = {UNFUSED: "a kernel for each operation, launched from Python; + adds to the line above"}
NARROW = "float8_e5m2"
FLOAT16 = ("7b", "small")  # sizes with float16 weights; other sizes have bfloat16 weights

Captures = Mapping[str, Capture]  # name of an implementation → its `capture`


class ManyPrompts(NamedTuple):
    """Prompts that are continued together: their number, lengths in tokens, and new tokens each."""

    prompts: int
    shortest: int
    longest: int
    new: int


class ModelWorks(NamedTuple):
    """Parameters of the benchmarks of an architecture.

    size: returns the config for the name of a size. default: name of the default size. rows:
    numbers of rows of decoding steps. further: pairs of dtypes, of the weights and of keys and
    values, that are timed after the size's default dtype if the user sets no dtype. prompt: length
    of a prompt in tokens. firsts: lengths of prompts with one new token. many: name of a size →
    prompts that are continued together.
    """

    model: Callable[..., RandomModel[Any]]
    size: Callable[[str], ModelConfig]
    default: str
    rows: Sequence[int]
    further: Sequence[tuple[str, str | None]]
    prompt: int
    firsts: Sequence[int]
    many: Mapping[str, ManyPrompts]


def _llama(name: str) -> ModelConfig:
    if name not in SHAPES:
        raise InputError(f"--size: expected one of {', '.join(SHAPES)} with --llama, got {name!r}")
    return SHAPES[name]


SHORT_PROMPTS = ManyPrompts(512, 16, 256, new=128)
LONG_PROMPTS = ManyPrompts(256, 100, 1024, new=562)  # lengths as in the benchmark of nano-vllm
MODELS: Mapping[str, ModelWorks] = {
    "gpt2": ModelWorks(
        RandomGPT2,
        size,
        "gpt2",
        rows=(1, 2, 4, 8, 16, 32, 64, 128, 256),
        further=(),
        prompt=1024,
        firsts=(480, 1000),
        many=dict.fromkeys((*SIZES, *ALIASES), SHORT_PROMPTS),
    ),
    "llama": ModelWorks(
        RandomLlama,
        _llama,
        "7b",
        rows=(1, 4, 16, 64),
        further=((NARROW, None), (NARROW, NARROW), (FILE, None)),
        prompt=512,
        firsts=(),
        many={"smollm2-135m": SHORT_PROMPTS, "qwen3-0.6b": LONG_PROMPTS},
    ),
}


def model_works(
    architecture: str,
    dtype: str | None = None,
    rows: str | None = None,
    name: str | None = None,
    cache: str | None = None,
    several: str | None = None,
) -> list[Work]:
    """Return the benchmarks of an architecture (a key of MODELS), in the order they are timed.

    dtype: dtype of the weights; by default the dtype of this size's checkpoints, then `further`.
    rows: a list that `parse_rows` accepts. name: name of the size. cache: dtype of the kv_cache of
    all works. several: a device such as "cuda:0,1", if the models
    are divided among GPUs. Raises InputError.
    """
    timed, name = MODELS[architecture], name or MODELS[architecture].default
    config = timed.size(name)
    _check_dtype(dtype, architecture, name, config)
    counts = timed.rows if rows is None else parse_rows(rows)
    own = "float16" if name in FLOAT16 else "bfloat16"
    first, further = (dtype or own, cache), () if dtype else timed.further
    if cache is not None:
        further = [(weights, cache) for weights, kv in further if kv is None]
    stored = [first, *(each for each in further if _can_be_stored(config, *each))]
    works: list[Work] = []
    for weights, kv in stored:
        model = timed.model(config, weights, kv, several)
        works += [decode(model, n) for n in counts]
        works += [prompt(model, timed.prompt)] if model.checks_prompts else []
        works += [first_token(model, T) for T in timed.firsts]
        works += [generate(model, timed.many[name])] if name in timed.many else []
    return works


def _check_dtype(dtype: str | None, architecture: str, name: str, config: ModelConfig) -> None:
    """Raise InputError unless benchmarks of these weights can have this dtype."""
    if dtype is None:
        return
    check_choice("--dtype", dtype, (*DTYPES, FILE) if architecture == "llama" else DTYPES)
    if dtype == FILE and (problem := blocks_problem(config)):
        raise InputError(f"--dtype file: {problem} in {name}: choose another --size")


def _can_be_stored(config: ModelConfig, dtype: str, cache: str | None) -> bool:
    """Return whether weights of these sizes can have this dtype, with this dtype of the cache."""
    if dtype == FILE and blocks_problem(config):
        return False
    return cache in (None, own_cache_dtype(dtype), *FP8)


def parse_rows(text: str) -> tuple[int, ...]:
    """Parse a list of numbers of rows such as "1,8,64". Raises InputError."""
    words = text.split(",")
    if not all(w.strip().isdecimal() and len(w) < 10 and 0 < int(w) <= MOST_ROWS for w in words):
        raise InputError(
            f"--rows: expected numbers from 1 to {MOST_ROWS:,} such as 1,8,64, got {text!r}"
        )
    return tuple(dict.fromkeys(map(int, words)))


def model_work(
    model: RandomModel[Any],
    what: str,
    name: str,
    sizes: Mapping[str, int],
    ours: Callable[[int], Captures],
    **fields: Any,
) -> Work:
    """Return a benchmark of a whole model that times calls from Python instead of CUDA graphs.

    fields: other fields of Work. There are no copies of the inputs, as the weights exceed the L2
    cache. With an FP8 kv_cache the tolerance is bfloat16's, eight times float16's: keys and values
    near a tie may round up or down, by relative steps of 1/4 or 1/8, which attention averages.

    If the model is on several GPUs, FLOPs and bytes are the model's divided by the number of GPUs.
    """
    fp8 = model.cache_dtype in FP8
    config = vars(model.config)
    sizes = sizes if model.gpus == 1 else {**sizes, "gpus": model.gpus}
    fields |= {each: fields[each] // model.gpus for each in ("flops", "traffic")}
    stored = [f"kv_cache {model.cache_dtype}"] if fp8 else []
    shown = [each for each in ("n_layer", "n_embd", "n_kv_head") if each in config]

    def contenders(sets: Any, device: int) -> Iterator[Contender]:
        arithmetic = own_cache_dtype(model.dtype)
        for by, capture in ours(device).items():
            yield Contender(by, False, capture, arithmetic, partial(str, NOTES.get(by, "")))

    return Work(
        what,
        ", ".join([name, *stored]),
        model.dtype,
        {**sizes, **{each: config[each] for each in shown}},
        ours=contenders,
        roundings=STEPS_OF_A_BLOCK,
        rounding="bfloat16" if fp8 else None,
        model=model,
        **fields,
    )


def decode(model: RandomModel[Any], rows: int, position: int = 512) -> Work:
    """Return the benchmark of a decoding step, which reads all weights, keys and values once."""
    steps, keys = Steps(model, rows, position), rows * position
    by_samplings = partial(_by_samplings, steps.decoded)
    by_stages = partial(_by_stages, steps)
    return model_work(
        model,
        "decode",
        f"{rows} rows" if rows > 1 else "1 row",
        {"rows": rows, "position": position},
        flops=2 * rows * model.matrix_elements + model.attention_flops(keys),
        traffic=model.weight_bytes + keys * model.token_bytes,
        truth=model.last_logits,
        ours=by_stages if isinstance(model, RandomLlama) else by_samplings,
        for_peers=steps,
        rounds=tasks.STEPS,
        turns=tasks.TURNS,
        tokens=rows,
    )


def _by_samplings(run: Callable[..., Any], device: int) -> Captures:
    """Return {name: `capture`} of a greedy and of a sampled run."""
    samplings = {NAME: GREEDY, "sampled": SAMPLED}
    return {by: partial(run, device, each) for by, each in samplings.items()}


def _by_stages(steps: Steps, device: int) -> Captures:
    """Return {name: `capture`} of the fused step and, unless kv_cache is FP8, of each stage.

    A model on several GPUs, or with GGUF blocks, has no stages.
    """
    model, step = steps.model, partial(steps.decoded, device, GREEDY)
    if model.cache_dtype in FP8:
        return {FP8_CACHE: step}
    if model.gpus > 1 or model.dtype == FILE:
        return {NAME: step}
    shared: list[Any] = []
    stages = stages_of(model.dtype).items()
    return {NAME: step, **{by: partial(steps.staged, device, of, shared) for by, of in stages}}


def prompt(model: RandomModel[Any], T: int) -> Work:
    """Return the benchmark of the logits after one prompt of T tokens."""
    one = Prompt(model, T)
    return model_work(
        model,
        "prompt",
        f"1x{T}",
        {"T": T},
        flops=model.prompt_flops(T),
        traffic=model.weight_bytes,
        truth=lambda: model.last_logits(one.ids),
        ours=lambda device: {NAME: partial(one.computed, device)},
        for_peers=one,
        rounds=4,
        turns=tasks.TURNS,
    )


def first_token(model: RandomModel[Any], T: int) -> Work:
    """Return the benchmark of a call of `generate`: a prompt of T tokens and one new token."""
    one = Continuations(model, model.prompts([T]), 1)
    return model_work(
        model,
        "first",
        f"1x{T}",
        {"T": T},
        flops=model.prompt_flops(T),
        traffic=model.weight_bytes,
        truth=model.last_logits,
        ours=lambda device: {NAME: partial(one.generated, device, GREEDY)},
        rounds=4,
        turns=tasks.TURNS,
        tokens=1,
    )


def generate(model: RandomModel[Any], of: ManyPrompts = SHORT_PROMPTS) -> Work:
    """Return the benchmark of one batch of prompts of random lengths."""
    prompts, shortest, longest, new = of
    lengths = np.random.default_rng(1).integers(shortest, longest + 1, size=prompts).tolist()
    seen = sum(n * new + new * (new - 1) // 2 for n in lengths)  # query-key pairs
    many = Continuations(model, model.prompts(lengths), new)
    tokens = sum(lengths) + prompts * new
    return model_work(
        model,
        "generate",
        f"{prompts} prompts",
        of._asdict(),
        flops=2 * tokens * model.matrix_elements + model.attention_flops(seen),
        traffic=new * model.weight_bytes + seen * model.token_bytes,
        truth=model.last_logits,
        ours=partial(_by_samplings, many.generated),
        for_peers=many,
        rounds=1,
        turns=1,
        tokens=prompts * new,
    )

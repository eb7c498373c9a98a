"""Public functions and classes with random arguments, compared with float64 computations."""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fuzzing import Area, Difference, Outcome, accepted, check_equal, formulas, refused_or
from fuzzing import gpt2 as plain
from fuzzing.values import NUMBERS, TEXTS, odd_argument, odd_text, pick
from gpt2block import (
    GPT2,
    Block,
    BlockWeights,
    CheckpointError,
    GPT2Config,
    GPT2Weights,
    InputError,
    Sampling,
    WeightMatrix,
)
from gpt2block.config import block_shapes
from gpt2block.cuda.kernels import FP8
from gpt2block.text.scoring import load_tokens

DTYPES = ("float32", "bfloat16", "float16", "float8_e5m2", "float8_e4m3fn")
_ROUNDING = {
    "float32": 1e-6,
    "float16": 1e-3,
    "bfloat16": 8e-3,
    "float8_e4m3fn": 0.07,
    "float8_e5m2": 0.13,
}


def case(rng: np.random.Generator, folder: Path) -> Outcome:
    chosen = rng.random()
    if chosen < 0.4:
        return formulas.case(rng, folder)
    return pick(
        rng, _block, _block_weights, _model_weights, _logits, _logits, _cache, _generate, _generate,
        _generate_text, _score, _embed, _sampling, _matrix, _tokens, _tokens, _config, _layer,
    )(rng, folder)  # fmt: skip


# --- blocks and weights


def _block_tensors(rng: np.random.Generator, C: int, dtype: Any) -> dict[str, Any]:
    return {n: rng.standard_normal(s).astype(dtype) * 0.5 for n, s in block_shapes(C).items()}


def _block(rng: np.random.Generator, folder: Path) -> Outcome:
    """`Block` on the CPU."""
    n_head = int(rng.integers(1, 4))
    C = n_head * int(rng.integers(1, 5))
    eps = pick(rng, 1e-5, 0.1)
    tensors = _block_tensors(rng, C, pick(rng, np.float32, np.float64))
    weights = accepted(lambda: BlockWeights(**tensors, n_head=n_head, eps=eps))
    dtype = pick(rng, "float32", "float32", "bfloat16", "float16")
    options: dict[str, Any] = {
        "causal": bool(rng.random() < 0.5), "device": "cpu", "dtype": dtype,
        "kernels": pick(rng, "auto", "fused"),
    }  # fmt: skip
    shape = (*pick(rng, (), (2,), (1,)), int(rng.integers(1, 6)), C)
    x: Any = rng.standard_normal(shape).astype(plain.DTYPES[dtype])
    if rng.random() < 0.2:
        x = np.asfortranarray(x)
    changed = rng.random() < 0.4
    out = None
    if changed and rng.random() < 0.4:
        options[str(pick(rng, *options))] = odd_argument(rng)
    elif changed and rng.random() < 0.5:
        out = odd_argument(rng)
    elif changed:
        x = odd_argument(rng)
    elif rng.random() < 0.3:
        out = np.empty(shape, plain.DTYPES[dtype])
    attempt = refused_or if changed else accepted
    got = attempt(lambda: (Block(weights, **options)(x, out),))
    if isinstance(got, str):
        return "refused"
    if isinstance(x, np.ma.MaskedArray) or not isinstance(x, np.ndarray):
        raise Difference(f"accepted x of {type(x).__name__}")
    rows = x.astype(np.float64).reshape(-1, *x.shape[-2:])
    w = {name: array.astype(np.float64) for name, array in tensors.items()}
    truth = np.stack([_plain_block(row, w, n_head, eps, bool(options["causal"])) for row in rows])
    plain.check_close("block", got[0], truth.reshape(x.shape), 2e-3 if dtype == "float32" else 0.1)
    return "right"


def _plain_block(
    x: NDArray[Any], w: dict[str, NDArray[Any]], n_head: int, eps: float, causal: bool
) -> NDArray[Any]:
    size = x.shape[-1] // n_head
    n = plain.layernorm(x, w["gamma1"], w["beta1"], eps)
    q, k, v = np.split(n @ w["w_qkv"] + w["b_qkv"], 3, -1)
    heads = [slice(a, a + size) for a in range(0, x.shape[-1], size)]
    a = np.concatenate([plain.attention(q[:, s], k[:, s], v[:, s], causal) for s in heads], -1)
    x = x + a @ w["w_attn"] + w["b_attn"]
    f = plain.gelu(plain.layernorm(x, w["gamma2"], w["beta2"], eps) @ w["w_fc"] + w["b_fc"])
    result: NDArray[Any] = x + f @ w["w_proj"] + w["b_proj"]
    return result


def _block_weights(rng: np.random.Generator, folder: Path) -> Outcome:
    """`BlockWeights`, `from_packed`, `random`."""
    C = int(rng.integers(1, 6))
    kind = int(rng.integers(3))
    if kind == 0:
        arguments: dict[str, Any] = {**_block_tensors(rng, C, np.float32), "n_head": 1}
        arguments[str(pick(rng, *arguments, "eps"))] = odd_argument(rng)
        weights = refused_or(lambda: BlockWeights(**arguments))
        if isinstance(weights, str):
            return "refused"
        if any(isinstance(array, np.ma.MaskedArray) for array in weights.tensors().values()):
            raise Difference("accepted a masked array")
        return "right"
    if kind == 1:
        packed: Any = rng.standard_normal(12 * C * C + 13 * C).astype(np.float32)
        arguments = {"packed": packed, "n_embd": C, "n_head": 1, "eps": 1e-5}
        changed = rng.random() < 0.6
        if changed:
            arguments[str(pick(rng, *arguments))] = odd_argument(rng)
        attempt = refused_or if changed else accepted
        found = attempt(lambda: BlockWeights.from_packed(**arguments))
        if isinstance(found, str):
            return "refused"
        check_equal("packed", found.to_packed().tolist(), np.ravel(arguments["packed"]).tolist())
        return "right"
    seed, config = odd_argument(rng), odd_argument(rng)
    config = formulas.plain_config(rng) if rng.random() < 0.7 else config
    made: Any = pick(rng, BlockWeights.random, GPT2Weights.random)
    result = refused_or(lambda: made(seed, config))
    return "refused" if isinstance(result, str) else "right"


def _model_weights(rng: np.random.Generator, folder: Path) -> Outcome:
    """`GPT2Weights`, and `GPT2` with them; one argument may be wrong."""
    weights = _weights(int(rng.integers(4)))
    names = ("config", "wte", "wpe", "blocks", "gamma_f", "beta_f", "lm_head")
    arguments = {name: getattr(weights, name) for name in names}
    changed = rng.random() < 0.8
    if changed:
        arguments[str(pick(rng, *names))] = odd_argument(rng)
    options: dict[str, Any] = {"device": "cpu", "dtype": pick(rng, *DTYPES)}
    options["kv_dtype"] = None if options["dtype"] == "float32" else pick(rng, None, *FP8)
    if rng.random() < 0.2:
        options[str(pick(rng, *options))] = odd_argument(rng)
        changed = True
    attempt = refused_or if changed else accepted
    model = attempt(lambda: GPT2(GPT2Weights(**arguments), **options))
    if isinstance(model, str):
        return "refused"
    if any(isinstance(value, np.ma.MaskedArray) for value in arguments.values()):
        raise Difference("accepted a masked array")
    accepted(lambda: model([0]))
    return "right"


def _layer(rng: np.random.Generator, folder: Path) -> Outcome:
    """One block of the bundled model; the layer may be odd."""
    layer = pick(rng, 0, 1, odd_argument(rng))
    found = refused_or(lambda: BlockWeights.from_pretrained("shakespeare", layer))
    if isinstance(found, str):
        return "refused"
    if isinstance(layer, bool) or not isinstance(layer, (int, np.integer)):
        raise Difference(f"accepted layer {layer!a:.60}")
    return "right"


def _config(rng: np.random.Generator, folder: Path) -> Outcome:
    names = ("n_layer", "n_head", "n_embd", "n_ctx", "vocab_size", "eps", "tie_word_embeddings")
    arguments = {str(pick(rng, *names)): odd_argument(rng)}
    result = refused_or(lambda: GPT2Config(**arguments))
    return "refused" if isinstance(result, str) else "right"


# --- whole models


@lru_cache
def _weights(key: int) -> GPT2Weights:
    """Return a tiny model with weights large enough to affect the logits."""
    rng = np.random.default_rng(key)
    config = GPT2Config(
        n_layer=1 + key % 2, n_head=2, n_embd=2 * (2 + key), n_ctx=5 + key, vocab_size=11 + key,
        tie_word_embeddings=key % 2 == 0,
    )  # fmt: skip
    C = config.n_embd

    def matrix(*shape: int) -> NDArray[np.float32]:
        return (rng.standard_normal(shape) * 0.5).astype(np.float32)

    blocks = tuple(
        BlockWeights(**_block_tensors(rng, C, np.float32), n_head=config.n_head)
        for _ in range(config.n_layer)
    )
    wte = matrix(config.vocab_size, C)
    lm_head = wte if config.tie_word_embeddings else matrix(config.vocab_size, C)
    return GPT2Weights(config, wte, matrix(config.n_ctx, C), blocks, matrix(C), matrix(C), lm_head)


@lru_cache
def _model(key: int) -> tuple[GPT2, plain.Sizes, plain.Tensors]:
    """Return the model, its sizes, and its tensors by Hugging Face's names."""
    weights = _weights(key)
    tensors = {plain.label_of(name): array for name, array, _ in weights.tensors()}
    return GPT2(weights, device="cpu"), plain.sizes_of(weights.config), tensors


@lru_cache
def _bundled() -> GPT2:
    return GPT2.from_pretrained(device="cpu")


def _random_ids(rng: np.random.Generator, sizes: plain.Sizes, most: int | None = None) -> Any:
    length = int(rng.integers(1, (most or sizes.n_ctx) + 1))
    return rng.integers(0, sizes.vocab_size, length)


def _logits(rng: np.random.Generator, folder: Path) -> Outcome:
    """`model(ids)` and `hidden_states`."""
    model, sizes, tensors = _model(int(rng.integers(4)))
    kind = int(rng.integers(5))
    changed, T = kind == 4, int(rng.integers(1, sizes.n_ctx + 1))
    ids: Any = [_random_ids(rng, sizes) for _ in range(3 if kind == 2 else 1)]
    if kind == 1:
        ids = [rng.integers(0, sizes.vocab_size, T) for _ in range(3)]
    argument: Any = ids
    if kind == 0:
        row = ids[0]
        argument = pick(rng, row, row.tolist(), tuple(row.tolist()), row.astype(np.uint8))
    elif kind == 1:
        argument = pick(rng, np.stack(ids), ids, [row.tolist() for row in ids])
    elif changed:
        argument = pick(
            rng, odd_argument(rng), [ids[0], odd_argument(rng)], ids[0] - 1, ids[0] + 8, [True],
            np.ma.masked_array(ids[0], ids[0] > 3), np.zeros(sizes.n_ctx + 1, int), [[0], []],
        )  # fmt: skip
    attempt = refused_or if changed else accepted
    if rng.random() < 0.3:
        got = attempt(lambda: (model.hidden_states(argument),))
        if isinstance(got, str):
            return "refused"
        if not changed:
            truth = [np.stack(plain.states(sizes, tensors, row)) for row in ids]
            plain.check_close("states", _first_row(got[0]), truth[0])
        return "right"
    last = bool(rng.random() < 0.3)
    got = attempt(lambda: (model(argument, last=last),))
    if isinstance(got, str):
        return "refused"
    if changed:
        return _check_odd_ids(got[0], argument, sizes, tensors, last)
    for index, tokens in enumerate(ids):
        exact = plain.logits(sizes, tensors, tokens)
        found = got[0] if kind in (0, 3) and np.ndim(argument) == 1 else got[0][index]
        plain.check_close("logits", found, exact[-1] if last else exact)
    return "right"


def _check_odd_ids(
    got: Any, argument: Any, sizes: plain.Sizes, tensors: plain.Tensors, last: bool
) -> Outcome:
    """Check that an accepted argument is one row, or rows, of ids of this model."""
    if isinstance(argument, np.ma.MaskedArray):
        raise Difference("accepted a masked array")
    try:
        rows = argument if np.ndim(argument[0]) else [argument]
    except Exception as error:
        raise Difference(f"accepted {type(argument).__name__}") from error
    for row, tokens in enumerate(rows):
        array = np.asarray(tokens)
        if array.dtype.kind not in "iu" or array.ndim != 1:
            raise Difference(f"accepted a row of {array.dtype} {array.shape}")
        exact = plain.logits(sizes, tensors, array)
        found = got if rows[0] is argument else got[row]
        plain.check_close("logits", found, exact[-1] if last else exact)
    return "right"


def _first_row(states: Any) -> Any:
    """Return the states of the first row."""
    if isinstance(states, list):
        return states[0]
    return states if states.ndim == 3 else states[:, 0]


def _cache(rng: np.random.Generator, folder: Path) -> Outcome:
    """Tokens in parts with a KV cache, or odd arguments of `new_cache`."""
    model, sizes, tensors = _model(int(rng.integers(4)))
    if rng.random() < 0.4:
        arguments = {"batch": 1, "n_ctx": 3}
        arguments[str(pick(rng, *arguments))] = odd_argument(rng)
        made = refused_or(lambda: model.new_cache(**arguments), InputError, MemoryError)
        return "refused" if isinstance(made, str) else "right"
    ids = rng.integers(0, sizes.vocab_size, sizes.n_ctx)
    cache = accepted(lambda: model.new_cache(1, sizes.n_ctx))
    exact = plain.logits(sizes, tensors, ids)
    at = 0
    while at < len(ids):
        part = ids[at : at + int(rng.integers(1, 4))]
        got = accepted(lambda part=part: model(part[None], cache))  # type: ignore[misc]
        plain.check_close("cached", got[0], exact[at : at + len(part)])
        at += len(part)
        if rng.random() < 0.2:
            odd = odd_argument(rng)
            refused_or(lambda odd=odd: (model([0], odd),) if odd is not None else None)  # type: ignore[misc]
    full = refused_or(lambda: (model([[0]], cache),))
    if not isinstance(full, str):
        raise Difference("a full cache accepted another token")
    return "right"


def _options(rng: np.random.Generator) -> dict[str, Any]:
    """Return valid options of `generate`."""
    every = {
        "temperature": pick(rng, 0, 0.7, 1.0, 3), "top_k": pick(rng, 0, 1, 3, 1000),
        "top_p": pick(rng, 1.0, 0.9, 0.3), "min_p": pick(rng, 0.0, 0.1, 1),
        "repetition_penalty": pick(rng, 1.0, 1.3, 0.8), "seed": int(rng.integers(2**40)),
        "stop_ids": pick(rng, [], [1], [2, 3], 4), "rows_at_once": int(rng.integers(1, 9)),
    }  # fmt: skip
    chosen = {name: value for name, value in every.items() if rng.random() < 0.5}
    return {"max_new_tokens": int(rng.integers(1, 7)), "seed": 5, **chosen}


def _generate(rng: np.random.Generator, folder: Path) -> Outcome:
    """Continuations of ids, the same alone and in a batch, with the right log-probabilities."""
    model, sizes, tensors = _model(int(rng.integers(4)))
    prompts: list[Any] = [_random_ids(rng, sizes) for _ in range(int(rng.integers(1, 4)))]
    options = _options(rng)
    truncate = rng.random() < 0.3
    if truncate:
        options["overflow"] = "truncate"
        prompts[0] = _random_ids(rng, sizes, 2 * sizes.n_ctx)
    if rng.random() < 0.4:
        return _generate_odd(rng, model, prompts, options)
    rows = accepted(lambda: model.generate(prompts, **options))
    for prompt, row in zip(prompts, rows, strict=True):
        alone = accepted(lambda prompt=prompt: model.generate(prompt, **options))  # type: ignore[misc]
        check_equal("alone", (alone.tokens, alone.finish_reason), (row.tokens, row.finish_reason))
        if len(row.tokens) > options["max_new_tokens"]:
            raise Difference(f"{len(row.tokens)} tokens")
        if len(prompt) + len(row.tokens) - 1 <= sizes.n_ctx:
            _check_row(sizes, tensors, prompt, row, options)
    samples = int(rng.integers(2, 4))
    several = accepted(lambda: model.generate(prompts[0], samples=samples, **options))
    check_equal("samples", len(several), samples)
    check_equal("first sample", several[0].tokens, rows[0].tokens)
    return "right"


def _check_row(
    sizes: plain.Sizes, tensors: plain.Tensors, prompt: Any, row: Any, options: dict[str, Any]
) -> None:
    """Check the log-probabilities, and that the options allow each token."""
    ids = [*map(int, prompt), *row.tokens]
    logp = plain.log_softmax(plain.logits(sizes, tensors, ids[: sizes.n_ctx]))
    for step, (token, logprob) in enumerate(zip(row.tokens, row.logprobs, strict=True)):
        exact = logp[len(prompt) - 1 + step]
        if not abs(exact[token] - logprob) < 2e-3 * max(1, abs(exact[token])):
            raise Difference(f"log-probability {logprob}, exactly {exact[token]}")
        if options.get("repetition_penalty", 1.0) != 1:
            continue
        k = 1 if options.get("temperature", 1) == 0 else options.get("top_k", 0)
        if k and exact[token] < np.sort(exact)[-min(k, len(exact))] - 1e-3:
            raise Difference(f"token {token} is not among the {k} most likely")


def _generate_odd(
    rng: np.random.Generator, model: GPT2, prompts: list[Any], options: dict[str, Any]
) -> Outcome:
    """One odd argument. Combinations that validly request an endless continuation are excluded."""
    name = str(
        pick(rng, *options, "stop", "overflow", "samples", "sampling", "max_tokens", "prompts")
    )
    if name == "prompts":
        prompts = pick(rng, odd_argument(rng), [*prompts, odd_argument(rng)])
    else:
        options[name] = odd_argument(rng)
    if name == "max_new_tokens":
        options.pop("overflow", None)
    one = prompts[0] if isinstance(prompts, list) else prompts
    streamed = bool(rng.random() < 0.5 and name not in ("samples", "rows_at_once"))
    if streamed:
        options.pop("rows_at_once", None)
    errors = (InputError, CheckpointError, TypeError)[: 3 if name == "max_tokens" else 2]
    result = refused_or(
        lambda: (
            [*model.stream(one, **options)] if streamed else model.generate(prompts, **options),
        ),
        *errors,
    )
    if isinstance(result, str):
        return "refused"
    if name == "max_tokens":
        raise Difference("accepted an unknown option")
    return "right"


def _generate_text(rng: np.random.Generator, folder: Path) -> Outcome:
    """The bundled model with text: `stream` equals `generate`, and stop strings end it."""
    model, options = _bundled(), _options(rng)
    options.pop("stop_ids", None)
    if rng.random() < 0.5:
        options["stop"] = pick(rng, "e", ["th", " "], "\n", ("xyz",))
    prompt = odd_text(rng) or "a"
    whole = accepted(lambda: model.generate(prompt, **options))
    options.pop("rows_at_once", None)
    stream = accepted(lambda: model.stream(prompt, **options))
    check_equal("streamed", "".join(stream), whole.text)
    stops = options.get("stop", ())
    if any(stop in whole.text for stop in ([stops] if isinstance(stops, str) else stops)):
        raise Difference(f"a stop string in {whole.text!r}")
    result = refused_or(lambda: (model.generate(pick(rng, *TEXTS), max_new_tokens=1),))
    return "right" if isinstance(result, tuple) else "refused"


def _score(rng: np.random.Generator, folder: Path) -> Outcome:
    """The sum of log-probabilities over sliding windows."""
    model, sizes, tensors = _model(int(rng.integers(4)))
    ids: Any = _random_ids(rng, sizes, 25)
    stride: Any = pick(rng, None, int(rng.integers(1, sizes.n_ctx)))
    changed = rng.random() < 0.3 or len(ids) < 2
    if changed and rng.random() < 0.5:
        stride = odd_argument(rng)
    elif changed:
        ids = odd_argument(rng)
    attempt = refused_or if changed else accepted
    found = attempt(lambda: model.score(ids, stride))
    if isinstance(found, str):
        return "refused"
    if isinstance(ids, np.ma.MaskedArray) or type(stride) is bool:
        raise Difference("accepted a masked array or a boolean")
    if isinstance(found, list):  # ids was a list of texts
        check_equal("scores", found, [model.score(text, stride) for text in ids])
        return "right"
    tokens = np.asarray(ids)
    total, scored_to, step = 0.0, 1, sizes.n_ctx // 2 if stride is None else int(stride)
    for first in range(0, len(tokens), step):
        end = min(first + sizes.n_ctx, len(tokens))
        logp = plain.log_softmax(plain.logits(sizes, tensors, tokens[first:end]))
        total += sum(logp[i - 1 - first, tokens[i]] for i in range(scored_to, end))
        scored_to = end
        if end == len(tokens):
            break
    plain.check_close("score", [found.log_likelihood], np.array([total]))
    check_equal("tokens", [token.id for token in found.tokens], tokens[1:].tolist())
    return "right"


def _embed(rng: np.random.Generator, folder: Path) -> Outcome:
    model, sizes, tensors = _model(int(rng.integers(4)))
    rows: Any = [_random_ids(rng, sizes) for _ in range(int(rng.integers(1, 4)))]
    pooling: Any = pick(rng, "mean", "last")
    changed = rng.random() < 0.3
    argument = rows
    if changed:
        argument, pooling = pick(rng, (odd_argument(rng), pooling), (rows, odd_argument(rng)))
    attempt = refused_or if changed else accepted
    got = attempt(lambda: (model.embed(argument, pooling),))
    if isinstance(got, str):
        return "refused"
    if isinstance(argument, np.ma.MaskedArray):
        raise Difference("accepted a masked array")
    if argument is rows:
        exact = [plain.states(sizes, tensors, row)[-1] for row in rows]
        pooled = [states[-1] if pooling == "last" else states.mean(0) for states in exact]
        plain.check_close("embed", got[0], np.stack(pooled))
    return "right"


# --- sampling, matrices, token files


def _sampling(rng: np.random.Generator, folder: Path) -> Outcome:
    valid: dict[str, Any] = {
        "temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 2.0,
        "seed": 3, "sample": 2,
    }  # fmt: skip
    changed = rng.random() < 0.8
    if changed:
        valid[str(pick(rng, *valid))] = pick(rng, odd_argument(rng), pick(rng, *NUMBERS))
    attempt = refused_or if changed else accepted
    found = attempt(lambda: Sampling(**valid))
    if isinstance(found, str):
        return "refused"
    for name, value in valid.items():
        if type(value) is bool or not math.isfinite(value) or value < 0:
            raise Difference(f"{name} = {value!r}")
    return "right"


def _matrix(rng: np.random.Generator, folder: Path) -> Outcome:
    """`WeightMatrix.quantize` and its constructor."""
    w: Any = rng.standard_normal((int(rng.integers(1, 9)), int(rng.integers(1, 9))))
    w = w.astype(plain.DTYPES[pick(rng, "float32", "float16", "bfloat16")])
    if rng.random() < 0.3:
        w = np.asfortranarray(w)
    arguments: dict[str, Any] = {
        "w": w,
        "dtype": pick(rng, *DTYPES),
        "layout": pick(rng, "KN", "NK"),
    }
    changed = rng.random() < 0.5
    if changed and rng.random() < 0.5:
        arguments = {"data": w, "dtype": pick(rng, *DTYPES), "scale": None, "layout": "KN"}
        arguments[str(pick(rng, *arguments))] = odd_argument(rng)
        made = refused_or(lambda: WeightMatrix(**arguments))
        return "refused" if isinstance(made, str) else "right"
    if changed:
        arguments[str(pick(rng, *arguments))] = odd_argument(rng)
    attempt = refused_or if changed else accepted
    found = attempt(lambda: WeightMatrix.quantize(**arguments))
    if isinstance(found, str):
        return "refused"
    if isinstance(arguments["w"], np.ma.MaskedArray):
        raise Difference("accepted a masked array")
    exact = arguments["w"].astype(np.float64)
    exact = exact.T if arguments["layout"] == "NK" else exact
    got = found.dequantized().astype(np.float64)
    if got.shape != exact.shape:
        raise Difference(f"shape {got.shape}, not {exact.shape}")
    allowed = _ROUNDING[arguments["dtype"]] * np.abs(exact) + 2.0**-9 * np.abs(exact).max()
    if not (np.abs(got - exact) <= allowed).all():
        raise Difference(f"{arguments['dtype']}: other numbers")
    return "right"


def _tokens(rng: np.random.Generator, folder: Path) -> Outcome:
    """Token files, damaged or not."""
    ids = rng.integers(0, 2**15, int(rng.integers(1, 30)))
    damaged = bool(rng.random() < 0.6)
    path, array = pick(rng, _npy, _bin)(rng, folder, ids, damaged)
    attempt = refused_or if damaged else accepted
    found = attempt(lambda: load_tokens(path))
    if isinstance(found, str):
        return "refused"
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise Difference(f"{found.dtype} {found.shape}")
    if array is not None:
        check_equal("tokens", found.tolist(), np.asarray(array).tolist())
    else:
        found.sum()  # reads all of it
    return "right"


def _npy(
    rng: np.random.Generator, folder: Path, ids: NDArray[Any], damaged: bool
) -> tuple[Path, Any]:
    """Write a .npy file; return its path, and its content where that is known."""
    path = folder / "tokens.npy"
    dtype: Any = pick(rng, np.uint16, np.int32, np.int64, ">i4")
    array = ids.astype(dtype)
    np.save(path, array)
    if not damaged:
        return path, array
    kind = int(rng.integers(5))
    if kind == 0:
        try:
            np.save(path, odd_argument(rng), allow_pickle=True)
            return path, np.load(path)
        except Exception:
            return path, None
    if kind == 1:
        with path.open("wb") as file:
            np.savez(file, ids)
        return path, None
    data = bytearray(path.read_bytes())
    for _ in range(int(rng.integers(1, 4))):
        end = len(data) if rng.random() < 0.3 else min(len(data), 80)
        data[int(rng.integers(end))] = pick(rng, int(rng.integers(256)), ord("("), ord("9"))
    path.write_bytes(data[: int(rng.integers(len(data)))] if kind == 2 else data)
    return path, None


def _bin(
    rng: np.random.Generator, folder: Path, ids: NDArray[Any], damaged: bool
) -> tuple[Path, Any]:
    """The same with a .bin file, with or without llm.c's header."""
    path = folder / "tokens.bin"
    array = ids.astype("<u2")
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(ids)
    data = bytearray(pick(rng, header.tobytes(), b"") + array.tobytes())
    kind = int(rng.integers(3)) if damaged else 3
    if kind == 0:
        data = data[: int(rng.integers(len(data)))]
    elif kind == 1:
        data += rng.bytes(int(rng.integers(1, 5)))
    elif kind == 2:
        data[int(rng.integers(min(len(data), 12)))] = int(rng.integers(256))
    path.write_bytes(data)
    return path, None if damaged else array


AREA = Area("api", 4, case)

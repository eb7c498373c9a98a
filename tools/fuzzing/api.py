"""Public functions and classes with random arguments, compared with float64 computations."""

from __future__ import annotations

import json
import math
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fuzzing import (
    Area,
    Difference,
    Refused,
    Rng,
    accepted,
    attempt,
    check,
    check_equal,
    check_message,
    formulas,
    refuses,
)
from fuzzing import gpt2 as plain
from fuzzing.values import (
    NUMBERS,
    TEXTS,
    damaged,
    odd_argument,
    odd_text,
    odd_value,
    spoil,
    spoil_json,
    swapped,
)
from gpt2block import GPT2, Block, BlockWeights, GPT2Config, GPT2Weights, Sampling, WeightMatrix
from gpt2block.config import block_shapes
from gpt2block.cuda.kernels import FP8
from gpt2block.errors import LONGEST
from gpt2block.generation.scoring import load_tokens
from gpt2block.serve import protocol

DTYPES = ("float32", "bfloat16", "float16", "float8_e5m2", "float8_e4m3fn")
PENALTIES = ("presence_penalty", "frequency_penalty")
_ROUNDING = dict(zip(DTYPES, (1e-6, 8e-3, 1e-3, 0.13, 0.07), strict=True))


def case(rng: Rng, folder: Path) -> None:
    if rng.chance(0.4):
        formulas.case(rng, folder)
        return
    rng.pick(
        _block, _block_weights, _model_weights, _logits, _logits, _cache, _generate, _generate,
        _generate_text, _score, _embed, _sampling, _matrix, _tokens, _tokens, _config, _layer,
        _request,
    )(rng, folder)  # fmt: skip


def _no_mask(*values: Any) -> None:
    """Raise Difference for masked arrays, which no function may accept."""
    masked = any(isinstance(value, np.ma.MaskedArray) for value in values)
    check(not masked, "accepted a masked array")


def _called(
    rng: Rng, share: float, function: Any, arguments: dict[str, Any], *others: str
) -> tuple[Any, bool]:
    """Call a function, with odd arguments in a share of calls; return (result, whether odd)."""
    changed = rng.chance(share)
    if changed:
        spoil(rng, arguments, *others)
    found = attempt(not changed, function, **arguments)
    _no_mask(*arguments.values())
    return found, changed


# --- blocks and weights


def _block_tensors(rng: Rng, C: int, dtype: Any) -> dict[str, Any]:
    return {n: rng.standard_normal(s).astype(dtype) * 0.5 for n, s in block_shapes(C).items()}


def _block(rng: Rng, folder: Path) -> None:
    """`Block` on the CPU."""
    n_head = rng.whole(1, 4)
    C = n_head * rng.whole(1, 5)
    eps = rng.pick(1e-5, 0.1)
    tensors = _block_tensors(rng, C, rng.pick(np.float32, np.float64))
    weights = accepted(BlockWeights, **tensors, n_head=n_head, eps=eps)
    dtype = rng.pick("float32", "float32", "bfloat16", "float16")
    options: dict[str, Any] = {
        "causal": rng.chance(0.5), "device": "cpu", "dtype": dtype,
        "kernels": rng.pick("auto", "fused"),
    }  # fmt: skip
    shape = (*rng.pick((), (2,), (1,)), rng.whole(1, 6), C)
    x: Any = rng.standard_normal(shape).astype(plain.DTYPES[dtype])
    if rng.chance(0.2):
        x = np.asfortranarray(x)
    elif rng.chance(0.2) and dtype != "bfloat16":
        x = swapped(x)
    changed = rng.chance(0.4)
    out = None
    if changed and rng.chance(0.4):
        spoil(rng, options)
    elif changed and rng.chance(0.5):
        out = odd_argument(rng)
    elif changed:
        x = odd_argument(rng)
    elif rng.chance(0.3):
        out = np.empty(shape, plain.DTYPES[dtype])
    got = attempt(not changed, lambda: Block(weights, **options)(x, out))
    _no_mask(x)
    check(isinstance(x, np.ndarray), f"accepted x of {type(x).__name__}")
    rows = x.astype(np.float64).reshape(-1, *x.shape[-2:])
    w = {plain.label_of(name): array for name, array in tensors.items()}
    causal = bool(options["causal"])
    truth = np.stack([plain.block(row, w, n_head, eps, causal) for row in rows])
    plain.check_close("block", got, truth.reshape(x.shape), 2e-3 if dtype == "float32" else 0.1)


def _block_weights(rng: Rng, folder: Path) -> None:
    """`BlockWeights`, `from_packed`, `random`."""
    C = rng.whole(1, 6)
    kind = rng.whole(3)
    if kind == 0:
        arguments: dict[str, Any] = {**_block_tensors(rng, C, np.float32), "n_head": 1}
        _called(rng, 1, BlockWeights, arguments, "eps")
    elif kind == 1:
        packed: Any = rng.standard_normal(12 * C * C + 13 * C).astype(np.float32)
        arguments = {"packed": packed, "n_embd": C, "n_head": 1, "eps": 1e-5}
        found, _ = _called(rng, 0.6, BlockWeights.from_packed, arguments)
        check_equal("packed", found.to_packed().tolist(), np.ravel(arguments["packed"]).tolist())
    else:
        seed, config = odd_argument(rng), odd_argument(rng)
        config = plain.random_config(rng) if rng.chance(0.7) else config
        made: Any = rng.pick(BlockWeights.random, GPT2Weights.random)
        attempt(False, made, seed, config)


def _model_weights(rng: Rng, folder: Path) -> None:
    """`GPT2Weights`, and `GPT2` with them; one argument may be wrong."""
    weights = _weights(rng.whole(4))
    names = ("config", "wte", "wpe", "blocks", "gamma_f", "beta_f", "lm_head")
    arguments = {name: getattr(weights, name) for name in names}
    options: dict[str, Any] = {"device": "cpu", "dtype": rng.pick(*DTYPES)}
    options["kv_dtype"] = None if options["dtype"] == "float32" else rng.pick(None, *FP8)
    changed = rng.chance(0.8)
    if changed:
        spoil(rng, options if rng.chance(0.2) else arguments)
    model = attempt(not changed, lambda: GPT2(GPT2Weights(**arguments), **options))
    _no_mask(*arguments.values())
    accepted(model, [0])


def _layer(rng: Rng, folder: Path) -> None:
    """One block of the bundled model; the layer may be odd."""
    layer = rng.pick(0, 1, odd_argument(rng))
    attempt(False, BlockWeights.from_pretrained, "shakespeare", layer)
    integer = isinstance(layer, (int, np.integer)) and not isinstance(layer, bool)
    check(integer, f"accepted layer {layer!a:.60}")


def _config(rng: Rng, folder: Path) -> None:
    names = ("n_layer", "n_head", "n_embd", "n_ctx", "vocab_size", "eps", "tie_word_embeddings")
    arguments = {rng.pick(*names): odd_argument(rng)}
    attempt(False, GPT2Config, **arguments)


# --- whole models


@lru_cache
def _weights(key: int) -> GPT2Weights:
    """Return a tiny model with weights large enough to affect the logits."""
    rng = Rng(np.random.PCG64(key))
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


Known = tuple[GPT2, plain.Sizes, plain.Tensors]


@lru_cache
def _model(key: int) -> Known:
    """Return the model, its sizes, and its tensors by Hugging Face's names."""
    weights = _weights(key)
    tensors = {plain.label_of(name): array for name, array, _ in weights.tensors()}
    return GPT2(weights, device="cpu"), plain.sizes_of(weights.config), tensors


@lru_cache
def _bundled() -> GPT2:
    return GPT2.from_pretrained(device="cpu")


def _drawn_model(rng: Rng) -> Known:
    return _model(rng.whole(4))


def _random_ids(rng: Rng, sizes: plain.Sizes, most: int | None = None) -> Any:
    length = rng.whole(1, (most or sizes.n_ctx) + 1)
    return rng.integers(0, sizes.vocab_size, length)


def _logits(rng: Rng, folder: Path) -> None:
    """`model(ids)` and `hidden_states`."""
    model, sizes, tensors = _drawn_model(rng)
    kind = rng.whole(5)
    changed, T = kind == 4, rng.whole(1, sizes.n_ctx + 1)
    ids: Any = [_random_ids(rng, sizes) for _ in range(3 if kind == 2 else 1)]
    if kind == 1:
        ids = [rng.integers(0, sizes.vocab_size, T) for _ in range(3)]
    argument: Any = ids
    if kind == 0:
        row = ids[0]
        argument = rng.pick(row, row.tolist(), tuple(row.tolist()), row.astype(np.uint8))
    elif kind == 1:
        argument = rng.pick(np.stack(ids), ids, [row.tolist() for row in ids])
    elif changed:
        argument = rng.pick(
            odd_argument(rng), [ids[0], odd_argument(rng)], ids[0] - 1, ids[0] + 8, [True],
            np.ma.masked_array(ids[0], ids[0] > 3), np.zeros(sizes.n_ctx + 1, int), [[0], []],
        )  # fmt: skip
    if rng.chance(0.3):
        states = attempt(not changed, model.hidden_states, argument)
        if not changed:
            truth = np.stack(plain.states(sizes, tensors, ids[0]))
            plain.check_close("states", _first_row(states), truth)
        return
    last = rng.chance(0.3)
    got = attempt(not changed, model, argument, last=last)
    if changed:
        ids = _checked_rows(argument)
    one = np.ndim(argument[0]) == 0
    for tokens, found in zip(ids, [got] if one else got, strict=True):
        exact = plain.logits(sizes, tensors, np.asarray(tokens))
        plain.check_close("logits", found, exact[-1] if last else exact)


def _checked_rows(argument: Any) -> Any:
    """Return the rows of an accepted argument. Raises Difference if it cannot be ids."""
    _no_mask(argument)
    try:
        rows = argument if np.ndim(argument[0]) else [argument]
    except Exception as error:
        raise Difference(f"accepted {type(argument).__name__}") from error
    for array in map(np.asarray, rows):
        integers = array.dtype.kind in "iu" and array.ndim == 1
        check(integers, f"accepted a row of {array.dtype} {array.shape}")
    return rows


def _first_row(states: Any) -> Any:
    """Return the states of the first row."""
    if isinstance(states, list):
        return states[0]
    return states if states.ndim == 3 else states[:, 0]


def _cache(rng: Rng, folder: Path) -> None:
    """Tokens in parts with a KV cache, or odd arguments of `new_cache`."""
    model, sizes, tensors = _drawn_model(rng)
    if rng.chance(0.4):
        arguments: dict[str, Any] = {"batch": 1, "n_ctx": 3}
        spoil(rng, arguments)
        try:
            attempt(False, model.new_cache, **arguments)
        except MemoryError as error:
            raise Refused from error
        return
    ids = rng.integers(0, sizes.vocab_size, sizes.n_ctx)
    cache = accepted(model.new_cache, 1, sizes.n_ctx)
    exact = plain.logits(sizes, tensors, ids)
    at = 0
    while at < len(ids):
        part = ids[at : at + rng.whole(1, 4)]
        got = accepted(model, part[None], cache)
        plain.check_close("cached", got[0], exact[at : at + len(part)])
        at += len(part)
        if rng.chance(0.2) and (odd := odd_argument(rng)) is not None:
            refuses(model, [0], odd)
    check(refuses(model, [[0]], cache), "a full cache accepted another token")


def _options(rng: Rng) -> dict[str, Any]:
    """Return valid options of `generate`."""
    every = {
        "temperature": rng.pick(0, 0.7, 1.0, 3), "top_k": rng.pick(0, 1, 3, 1000),
        "top_p": rng.pick(1.0, 0.9, 0.3), "min_p": rng.pick(0.0, 0.1, 1),
        "repetition_penalty": rng.pick(1.0, 1.3, 0.8), "seed": rng.whole(2**40),
        "presence_penalty": rng.pick(0.0, 0.5, -2), "frequency_penalty": rng.pick(0, 0.25, -1.5),
        "min_new_tokens": rng.pick(0, 1),
        "stop_ids": rng.pick([], [1], [2, 3], 4), "rows_at_once": rng.whole(1, 9),
    }  # fmt: skip
    chosen = {name: value for name, value in every.items() if rng.chance(0.5)}
    return {"max_new_tokens": rng.whole(1, 7), "seed": 5, **chosen}


def _generate(rng: Rng, folder: Path) -> None:
    """Continuations of ids, the same alone and in a batch, with the right log-probabilities."""
    model, sizes, tensors = _drawn_model(rng)
    prompts: list[Any] = [_random_ids(rng, sizes) for _ in range(rng.whole(1, 4))]
    options = _options(rng)
    truncate = rng.chance(0.3)
    if truncate:
        options["overflow"] = "truncate"
        prompts[0] = _random_ids(rng, sizes, 2 * sizes.n_ctx)
    if rng.chance(0.4):
        _generate_odd(rng, model, prompts, options)
        return
    rows = accepted(model.generate, prompts, **options)
    for prompt, row in zip(prompts, rows, strict=True):
        alone = accepted(model.generate, prompt, **options)
        check_equal("alone", (alone.tokens, alone.finish_reason), (row.tokens, row.finish_reason))
        check(len(row.tokens) <= options["max_new_tokens"], f"{len(row.tokens)} tokens")
        if len(prompt) + len(row.tokens) - 1 <= sizes.n_ctx:
            _check_row(sizes, tensors, prompt, row, options)
    samples = rng.whole(2, 4)
    several = accepted(model.generate, prompts[0], samples=samples, **options)
    check_equal("samples", len(several), samples)
    check_equal("first sample", several[0].tokens, rows[0].tokens)


def _check_row(
    sizes: plain.Sizes, tensors: plain.Tensors, prompt: Any, row: Any, options: dict[str, Any]
) -> None:
    """Check the log-probabilities, and that the options allow each token."""
    ids = [*map(int, prompt), *row.tokens]
    logp = plain.log_softmax(plain.logits(sizes, tensors, ids[: sizes.n_ctx]))
    for step, (token, logprob) in enumerate(zip(row.tokens, row.logprobs, strict=True)):
        exact = logp[len(prompt) - 1 + step]
        near = abs(exact[token] - logprob) < 2e-3 * max(1, abs(exact[token]))
        check(near, f"log-probability {logprob}, exactly {exact[token]}")
        if options.get("min_new_tokens", 0) > step:
            check(token not in np.ravel(options.get("stop_ids", [])), f"token {token} ends early")
        if not options.keys().isdisjoint(("repetition_penalty", *PENALTIES, "min_new_tokens")):
            continue
        k = 1 if options.get("temperature", 1) == 0 else options.get("top_k", 0)
        likely = not k or exact[token] >= np.sort(exact)[-min(k, len(exact))] - 1e-3
        check(likely, f"token {token} is not among the {k} most likely")


def _generate_odd(rng: Rng, model: GPT2, prompts: list[Any], options: dict[str, Any]) -> None:
    """One odd argument. Combinations that validly request an endless continuation are excluded."""
    name = str(
        rng.pick(*options, "stop", "overflow", "samples", "sampling", "max_tokens", "prompts")
    )
    if name == "prompts":
        prompts = rng.pick(odd_argument(rng), [*prompts, odd_argument(rng)])
    else:
        options[name] = odd_argument(rng)
    if name == "max_new_tokens":
        options.pop("overflow", None)
    one = prompts[0] if isinstance(prompts, list) else prompts
    streamed = bool(rng.chance(0.5) and name not in ("samples", "rows_at_once"))
    if streamed:
        options.pop("rows_at_once", None)
    try:
        if streamed:
            attempt(False, lambda: [*model.stream(one, **options)])
        else:
            attempt(False, model.generate, prompts, **options)
    except TypeError as error:
        if name == "max_tokens":
            raise Refused from error
        raise
    check(name != "max_tokens", "accepted an unknown option")


def _generate_text(rng: Rng, folder: Path) -> None:
    """The bundled model with text: `stream` equals `generate`, and stop strings end it."""
    model, options = _bundled(), _options(rng)
    options.pop("stop_ids", None)
    if rng.chance(0.5):
        options["stop"] = rng.pick("e", ["th", " "], "\n", ("xyz",))
    prompt = odd_text(rng) or "a"
    whole = accepted(model.generate, prompt, **options)
    options.pop("rows_at_once", None)
    stream = accepted(model.stream, prompt, **options)
    check_equal("streamed", "".join(stream), whole.text)
    stops = options.get("stop", ())
    ended = any(stop in whole.text for stop in ([stops] if isinstance(stops, str) else stops))
    check(not ended, f"a stop string in {whole.text!r}")
    attempt(False, model.generate, rng.pick(*TEXTS), max_new_tokens=1)


def _score(rng: Rng, folder: Path) -> None:
    """The sum of log-probabilities over sliding windows."""
    model, sizes, tensors = _drawn_model(rng)
    ids: Any = _random_ids(rng, sizes, 25)
    stride: Any = rng.pick(None, rng.whole(1, sizes.n_ctx))
    changed = rng.chance(0.3) or len(ids) < 2
    if changed and rng.chance(0.5):
        stride = odd_argument(rng)
    elif changed:
        ids = odd_argument(rng)
    found: Any = attempt(not changed, model.score, ids, stride)
    _no_mask(ids)
    check(type(stride) is not bool, "accepted a boolean")
    if isinstance(found, list):  # ids was a list of texts
        check_equal("scores", found, [model.score(text, stride) for text in ids])
        return
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


def _embed(rng: Rng, folder: Path) -> None:
    model, sizes, tensors = _drawn_model(rng)
    rows: Any = [_random_ids(rng, sizes) for _ in range(rng.whole(1, 4))]
    pooling: Any = rng.pick("mean", "last", "cls")
    got, changed = _called(rng, 0.3, model.embed, {"texts": rows, "pooling": pooling})
    if not changed:
        exact = [plain.states(sizes, tensors, row)[-1] for row in rows]
        ends = {"last": -1, "cls": 0}
        pooled = [each[ends[pooling]] if pooling in ends else each.mean(0) for each in exact]
        plain.check_close("embed", got, np.stack(pooled))


# --- sampling, matrices, token files


def _sampling(rng: Rng, folder: Path) -> None:
    values: dict[str, Any] = {
        "temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 2.0,
        "seed": 3, "sample": 2, "min_new_tokens": 1, **dict.fromkeys(PENALTIES, -0.5),
    }  # fmt: skip
    changed = rng.chance(0.8)
    if changed:
        values[rng.pick(*values)] = rng.pick(odd_argument(rng), rng.pick(*NUMBERS))
    attempt(not changed, Sampling, **values)
    for name, value in values.items():
        signed = name in PENALTIES
        positive = type(value) is not bool and math.isfinite(value) and (value >= 0 or signed)
        check(positive, f"{name} = {value!r}")


def _matrix(rng: Rng, folder: Path) -> None:
    """`WeightMatrix.quantize` and its constructor."""
    w: Any = rng.standard_normal((rng.whole(1, 9), rng.whole(1, 9)))
    w = w.astype(plain.DTYPES[rng.pick("float32", "float16", "bfloat16")])
    if rng.chance(0.3):
        w = np.asfortranarray(w)
    arguments = {"w": w, "dtype": rng.pick(*DTYPES), "layout": rng.pick("KN", "NK")}
    if rng.chance(0.25):
        arguments = {"data": w, "dtype": rng.pick(*DTYPES), "scale": None, "layout": "KN"}
        _called(rng, 1, WeightMatrix, arguments)
        return
    found, _ = _called(rng, 0.33, WeightMatrix.quantize, arguments)
    exact = arguments["w"].astype(np.float64)
    exact = exact.T if arguments["layout"] == "NK" else exact
    got = found.dequantized().astype(np.float64)
    check_equal("shape", got.shape, exact.shape)
    allowed = _ROUNDING[arguments["dtype"]] * np.abs(exact) + 2.0**-9 * np.abs(exact).max()
    check((np.abs(got - exact) <= allowed).all(), f"{arguments['dtype']}: other numbers")


def _tokens(rng: Rng, folder: Path) -> None:
    """Token files, damaged or not."""
    ids = rng.integers(0, 2**15, rng.whole(1, 30))
    whole = rng.chance(0.4)
    path, array = rng.pick(_npy, _bin)(rng, folder, ids, whole)
    found = attempt(whole, load_tokens, path)
    check(found.ndim == 1 and found.dtype.kind in "iu", f"{found.dtype} {found.shape}")
    if array is not None:
        check_equal("tokens", found.tolist(), np.asarray(array).tolist())
    else:
        found.sum()  # reads all of it


def _npy(rng: Rng, folder: Path, ids: NDArray[Any], whole: bool) -> tuple[Path, Any]:
    """Write a .npy file; return its path, and its content if it is known."""
    path = folder / "tokens.npy"
    dtype: Any = rng.pick(np.uint16, np.int32, np.int64, ">i4")
    array = ids.astype(dtype)
    np.save(path, array)
    if whole:
        return path, array
    kind = rng.whole(5)
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
    path.write_bytes(damaged(rng, path.read_bytes(), 80))
    return path, None


def _bin(rng: Rng, folder: Path, ids: NDArray[Any], whole: bool) -> tuple[Path, Any]:
    """Write a .bin file, with or without llm.c's header; return its path, and its known content."""
    path = folder / "tokens.bin"
    array = ids.astype("<u2")
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(ids)
    data = rng.pick(header.tobytes(), b"") + array.tobytes()
    path.write_bytes(data if whole else damaged(rng, data, 12))
    return path, array if whole else None


def _request(rng: Rng, folder: Path) -> None:
    """The body of a request to the server: one field is odd, or its encoding."""
    content = rng.pick("a", [{"type": "text", "text": "a"}, {"type": "image_url"}], None)
    body: dict[str, Any] = {"messages": [{"role": "user", "content": content}], "stream": True}
    body |= {"max_tokens": rng.pick(-1, 1, 2**31, None), "stream_options": rng.pick(None, {})}
    if rng.chance(0.5):
        spoil_json(rng, body, *body.values())
    if rng.chance(0.5):
        body[rng.pick("stop", *TEXTS, *protocol.NEUTRAL)] = odd_value(rng)
    text = json.dumps(body).encode(rng.pick("utf-8", "utf-8", "utf-8-sig", "utf-16", "utf-32-be"))
    try:
        protocol.parsed(protocol.ChatRequest, text, ("m",), 8)
    except protocol.ApiError as error:
        check_message(error.message[:LONGEST])
        check(len(error.message) < 3 * LONGEST, f"an error of {len(error.message)} characters")
        check(len(error.param or "") <= protocol.LONGEST_KEY, f"the field {error.param!r}")
        raise Refused from error


AREA = Area("api", 4, case)

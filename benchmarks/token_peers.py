"""PyTorch and `transformers` implementations for benchmarks of whole models.

The PyTorch contender is a forward pass in this module: cuBLAS for linear layers, and
scaled_dot_product_attention over a static kv_cache no longer than the sequences become. It is
compiled and replayed as a CUDA graph. A Llama uses the weights of gpt2block's model; its prompt
attends to its own tokens without a kv_cache. Many prompts are continued by the methods `generate`
of `transformers`, left-padded to one batch, and `generate_batch`, with continuous batching.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.functional import (
    gelu,
    layer_norm,
    linear,
    rms_norm,
    scaled_dot_product_attention,
    silu,
)

from benchmarks.decoding import RandomModel, Steps
from benchmarks.llama import RandomLlama
from benchmarks.tasks import Continuations, Prompt
from benchmarks.torch_functions import check_weights, tensor
from benchmarks.works import GeneratedSequences
from gpt2block.cuda.formats import own_cache_dtype
from gpt2block.cuda.kernels import FP8
from gpt2block.errors import InputError
from gpt2block.files.checkpoints.naming import GPT2_NAMING, naming_of
from gpt2block.files.parameters.arrays import random_model
from gpt2block.models.config.llama import LlamaConfig
from gpt2block.ops.bench.race import Capture, Captured, Contender, refuse

CACHE_STEP = 64  # the length of a static kv_cache is a multiple of CACHE_STEP

Tensor = Any
Tensors = dict[str, Tensor]
Caches = list[tuple[Tensor, Tensor]]  # keys and values of each layer, (B, KV heads, S, HS)
Forward = Callable[[Tensor, Tensor, Tensors, Caches | None], Tensor]
# Takes a function and its arguments; returns a function that repeats the call on the same memory.
Repeated = Callable[[Callable[..., Tensor], tuple[Any, ...]], Callable[[], Tensor]]


def contenders(task: Steps | Prompt | Continuations, repeated: Repeated) -> Iterator[Contender]:
    """Yield implementations by PyTorch and `transformers`, which refuse an FP8 kv_cache."""
    model, captures = task.model, _captures(task, "cuda", repeated)
    if model.cache_dtype in FP8:
        why = f"no PyTorch operation here takes a kv_cache of {model.cache_dtype}"
        captures = dict.fromkeys(captures, partial(refuse, why))
    for name, capture in captures.items():
        yield Contender(name, capture, own_cache_dtype(model.dtype))


def _captures(
    task: Steps | Prompt | Continuations, device: str, repeated: Repeated
) -> Mapping[str, Capture]:
    """Return {name of an implementation: function that captures the task in a CUDA graph}."""
    if isinstance(task, Continuations):
        return {
            "transformers": partial(generated, task, device),
            "transformers, paged": partial(generated_in_pages, task, device),
        }
    if not isinstance(task.model, RandomLlama):
        if isinstance(task, Prompt):
            return {}
        return {"torch.compile": partial(steps, task, device, repeated)}
    own: Any = steps if isinstance(task, Steps) else prompt
    theirs: Any = transformers_steps if isinstance(task, Steps) else transformers_prompt
    return {
        "torch": partial(own, task, device, called),
        "torch.compile": partial(own, task, device, repeated),
        "transformers": partial(theirs, task, device),
    }


def steps(work: Steps, device: str, repeated: Repeated, rounds: int) -> Captured:
    """Return a Captured whose replay runs `rounds` decoding steps and copies tokens to the host."""
    c, prompts = work.model.config, work.prompts()
    weights, forward = model_of(work.model, device)
    length = -(-work.end // CACHE_STEP) * CACHE_STEP
    shape = len(prompts), c.kv_width // c.head_size, length, c.head_size
    caches = [
        (weights["wte"].new_zeros(shape), weights["wte"].new_zeros(shape)) for _ in range(c.n_layer)
    ]
    token = torch.zeros(len(prompts), dtype=torch.int64, device=device)
    position = torch.zeros(1, dtype=torch.int64, device=device)

    def step(token: Tensor, position: Tensor, weights: Tensors, caches: Caches) -> Tensor:
        logits = forward(token[:, None], position, weights, caches)
        token.copy_(logits.argmax(-1))
        position.add_(1)
        return logits

    again = repeated(step, (token, position, weights, caches))
    different = {ids.tobytes(): ids for ids in prompts}
    first: dict[bytes, int] = {}
    for key, ids in different.items():
        rows = [row for row, each in enumerate(prompts) if each.tobytes() == key]
        first[key] = prefilled(forward, ids, rows, weights, caches)
    token.copy_(torch.tensor([first[ids.tobytes()] for ids in prompts]))
    position.fill_(work.start)
    tokens = [token.cpu().numpy().copy()]
    logits: list[Tensor] = []

    def replay() -> None:
        for _ in range(rounds):
            logits[:] = [again()]
            tokens.append(token.cpu().numpy().copy())

    return Captured(replay, (lambda: _written(work, tokens, logits[0]),), again)


def _written(work: Steps, tokens: Sequence[Any], logits: Tensor) -> GeneratedSequences:
    """Return the sequences to check, from each step's tokens (rows,) and the last step's logits."""
    scores = logits.float().log_softmax(-1)
    return work.written(np.stack(tokens, axis=1), lambda row, token: scores[row, token])


def called(function: Callable[..., Tensor], arguments: tuple[Any, ...]) -> Callable[[], Tensor]:
    """Return a function that calls `function` with these arguments and returns its output."""

    def again() -> Tensor:
        with torch.no_grad():
            return function(*arguments)

    return again


def prefilled(
    forward: Forward, ids: Any, rows: Sequence[int], weights: Tensors, caches: Caches
) -> int:
    """Store a prompt's keys and values in `rows` of `caches`; return the most likely next token."""
    device = weights["wte"].device
    one = [tuple(torch.zeros_like(half[:1]) for half in pair) for pair in caches]
    positions = torch.arange(len(ids), device=device)
    tokens = torch.from_numpy(ids.astype(np.int64)).to(device)[None]
    with torch.no_grad():
        logits = forward(tokens, positions, weights, one)
    index = torch.tensor(rows, device=device)
    for pair, halves in zip(caches, one, strict=True):
        for cache, half in zip(pair, halves, strict=True):
            cache[index] = half
    return int(logits[0].argmax())


def model_of(model: Any, device: str) -> tuple[Tensors, Forward]:
    """Return the model's weights as tensors, and the function that computes logits from them."""
    if isinstance(model.config, LlamaConfig):
        return llama_weights(model), partial(llama_forward, model.config)
    return weights_of(model, device), partial(forward, model.config.eps)


def forward(
    eps: float, tokens: Tensor, positions: Tensor, weights: Tensors, caches: Caches
) -> Tensor:
    """Return GPT-2's logits (B, V) after tokens (B, T) at positions (T,); extend the caches."""

    def norm(x: Tensor, name: str, number: str) -> Tensor:
        gamma, beta = weights[f"{name}gamma{number}"], weights[f"{name}beta{number}"]
        return layer_norm(x, x.shape[-1:], gamma, beta, eps)

    def product(x: Tensor, layer: str, name: str) -> Tensor:
        return linear(x, weights[f"{layer}w_{name}"], weights[f"{layer}b_{name}"])

    x = weights["wte"][tokens] + weights["wpe"][positions]
    n_head, length, head_size = caches[0][0].shape[1:]
    visible = torch.arange(length, device=x.device) <= positions[:, None]
    for n, (keys, values) in enumerate(caches):
        h = f"h.{n}."
        qkv = product(norm(x, h, "1"), h, "qkv")
        q, k, v = qkv.unflatten(-1, (3, n_head, head_size)).permute(2, 0, 3, 1, 4)
        keys.index_copy_(2, positions, k)
        values.index_copy_(2, positions, v)
        heads = scaled_dot_product_attention(q, keys, values, attn_mask=visible[None, None])
        x = x + product(heads.transpose(1, 2).flatten(-2), h, "attn")
        x = x + product(gelu(product(norm(x, h, "2"), h, "fc"), approximate="tanh"), h, "proj")
    return linear(norm(x[:, -1], "", "_f"), weights.get("lm_head", weights["wte"]))


def weights_of(model: RandomModel, device: str) -> Tensors:
    """Return GPT-2's weights as tensors; matrices are (out, in). Raises InputError for FP8."""
    check_weights(model.dtype)
    tensors = {}
    for name, array, layout in random_model(0, model.config):
        rows = np.ascontiguousarray(array.T if layout == "KN" else array)
        tensors[name] = torch.from_numpy(rows).to(device, getattr(torch, model.dtype))
    return tensors


def generated(work: Continuations, device: str, rounds: int) -> Captured:
    """Return a Captured whose replay continues all prompts by `generate` of `transformers`."""
    model, config = transformers_model(work.model, device), _greedy(work)
    longest = max(map(len, work.prompts))
    padded = np.zeros((2, len(work.prompts), longest), np.int64)  # tokens and attention mask
    for row, ids in enumerate(work.prompts):
        padded[:, row, longest - len(ids) :] = ids, np.ones_like(ids)
    tokens, mask = torch.from_numpy(padded).to(device)

    def generate() -> list[list[int]]:
        out = model.generate(tokens, attention_mask=mask, generation_config=config)
        new: list[list[int]] = out[:, longest:].tolist()
        return new

    return work.run(generate, rounds)


def generated_in_pages(work: Continuations, device: str, rounds: int) -> Captured:
    """Return a Captured whose replay continues all prompts by `transformers`' `generate_batch`."""
    model, config = transformers_model(work.model, device), _greedy(work, eos_token_id=-1)

    def generate() -> list[list[int]]:
        out = model.generate_batch([ids.tolist() for ids in work.prompts], generation_config=config)
        new = [each.generated_tokens for each in out.values()]
        del out  # frees a kv_cache that takes most of the device's memory
        gc.collect()
        torch.cuda.empty_cache()
        return new

    return work.run(generate, rounds)


def _greedy(work: Continuations, eos_token_id: int | None = None) -> Any:
    from transformers import GenerationConfig  # noqa: PLC0415

    return GenerationConfig(
        max_new_tokens=work.new, do_sample=False, eos_token_id=eos_token_id, pad_token_id=0
    )


def _transformers() -> Any:
    """Import `transformers`. Raises InputError if `transformers` is not installed."""
    try:
        import transformers  # noqa: PLC0415
    except ImportError as error:
        raise InputError("transformers is not installed") from error
    return transformers


def transformers_model(model: Any, device: str) -> Any:
    """Return `model` as a model of `transformers`; a Llama's device is the device of `model`."""
    if isinstance(model, RandomLlama):
        return transformers_llama(model)
    return transformers_gpt2(model, device)


def transformers_gpt2(model: Any, device: str) -> Any:
    """Return `model` as a GPT2LMHeadModel. Raises InputError if `transformers` is missing."""
    transformers = _transformers()
    check_weights(model.dtype)
    settings = {**model.config.to_hugging_face(), "bos_token_id": None, "eos_token_id": None}
    with torch.device(device):
        theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**settings))
    state = {
        GPT2_NAMING.with_prefix(GPT2_NAMING.in_file(name)[0]): torch.from_numpy(
            np.ascontiguousarray(array)
        )
        for name, array, _ in model.weights.tensors()
    }
    theirs.load_state_dict(state, strict=False)  # not strict: wte is also lm_head.weight
    return theirs.to(getattr(torch, model.dtype)).eval()


def llama_weights(model: RandomLlama) -> Tensors:
    """Return a Llama's weights and RoPE frequencies as tensors. Raises InputError for FP8.

    Matrices are (out, in) and share gpt2block's memory; vectors are converted to the model's dtype.
    """
    check_weights(model.dtype)
    dtype = getattr(torch, model.dtype)
    tensors = {name: tensor(array).to(dtype) for name, array, _ in model.stored()}
    frequencies = torch.from_numpy(model.config.frequencies().astype(np.float32))
    return {**tensors, "frequencies": frequencies.to(tensors["wte"].device)}


def llama_forward(
    config: LlamaConfig,
    tokens: Tensor,
    positions: Tensor,
    weights: Tensors,
    caches: Caches | None,
) -> Tensor:
    """Return a Llama's logits (B, V) after the last of the tokens (B, T) at positions (T,).

    The tokens' keys and values are stored in the caches. Without caches, the tokens are a whole
    prompt.
    """
    C, Q = config.n_embd, config.q_width
    widths = [Q, config.kv_width, config.kv_width]
    angles = positions[:, None] * weights["frequencies"]
    cos, sin = angles.cos(), angles.sin()

    def norm(x: Tensor, name: str) -> Tensor:
        return rms_norm(x, (C,), weights[name], config.eps)

    def rotated(x: Tensor) -> Tensor:
        a, b = x.float().chunk(2, -1)
        return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype)

    x = weights["wte"][tokens]
    for n in range(config.n_layer):
        h = f"h.{n}."
        qkv = linear(norm(x, f"{h}gamma1"), weights[f"{h}w_qkv"]).split(widths, -1)
        q, k, v = (part.unflatten(-1, (-1, config.head_size)).transpose(1, 2) for part in qkv)
        if f"{h}gamma_q" in weights:
            q, k = (
                rms_norm(part, (config.head_size,), weights[f"{h}gamma_{name}"], config.eps)
                for part, name in ((q, "q"), (k, "k"))
            )
        q, k = rotated(q), rotated(k)
        if caches is None:
            heads = _causal(q, k, v)
        else:
            for cache, new in zip(caches[n], (k, v), strict=True):
                cache.index_copy_(2, positions, new)
            heads = _over_cache(q, *caches[n], positions)
        x = x + linear(heads.transpose(1, 2).flatten(-2), weights[f"{h}w_o"])
        normed = norm(x, f"{h}gamma2")
        gate, up = (linear(normed, weights[f"{h}w_{name}"]) for name in ("gate", "up"))
        x = x + linear(silu(gate) * up, weights[f"{h}w_down"])
    return linear(norm(x[:, -1], "gamma_f"), weights.get("lm_head", weights["wte"]))


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


def _over_cache(q: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
    """Compute attention over a kv_cache; query heads that share keys are rows of one matrix."""
    B, NH, T, HS = q.shape
    group = NH // keys.shape[1]
    rows = q.reshape(B, keys.shape[1], group * T, HS)
    visible = torch.arange(keys.shape[2], device=q.device) <= positions[:, None]
    mask = visible.repeat(group, 1)[None, None]
    heads = scaled_dot_product_attention(rows, keys, values, attn_mask=mask)
    return heads.reshape(B, NH, T, HS)


def prompt(work: Prompt, device: str, repeated: Repeated, rounds: int) -> Captured:
    """Return a Captured whose replay computes the logits after a Llama's prompt by PyTorch."""
    model: Any = work.model
    tokens = torch.from_numpy(work.ids.astype(np.int64)).to(device)[None]
    positions = torch.arange(work.T, device=device)

    def step(tokens: Tensor, positions: Tensor, weights: Tensors) -> Tensor:
        return llama_forward(model.config, tokens, positions, weights, None)

    again = repeated(step, (tokens, positions, llama_weights(model)))
    return work.run(lambda: again().float().cpu().numpy(), rounds)


def transformers_prompt(work: Prompt, device: str, rounds: int) -> Captured:
    """Return a Captured whose replay computes a prompt's last logits by `transformers`."""
    theirs = transformers_llama(work.model)
    tokens = torch.from_numpy(work.ids.astype(np.int64)).to(device)[None]

    def logits() -> Any:
        with torch.no_grad():
            out = theirs(tokens, use_cache=False, logits_to_keep=1)
        return out.logits[:, -1].float().cpu().numpy()

    return work.run(logits, rounds)


def transformers_steps(work: Steps, device: str, rounds: int) -> Captured:
    """Return a Captured whose replay decodes greedily with `transformers`' default KV cache."""
    theirs = transformers_llama(work.model)
    tokens: list[Any] = []
    state: dict[str, Any] = {}

    def step(ids: Tensor) -> None:
        out = theirs(ids, past_key_values=state.get("cache"), use_cache=True, logits_to_keep=1)
        state.update(cache=out.past_key_values, logits=out.logits[:, -1])
        tokens.append(state["logits"].argmax(-1).cpu().numpy())

    with torch.no_grad():
        step(torch.from_numpy(np.stack(work.prompts()).astype(np.int64)).to(device))

    def replay() -> None:
        with torch.no_grad():
            for _ in range(rounds):
                step(torch.from_numpy(tokens[-1]).to(device)[:, None])

    return Captured(replay, (lambda: _written(work, tokens, state["logits"]),))


def transformers_llama(model: Any) -> Any:
    """Return `model` as a model of `transformers` that shares its matrices. Raises InputError."""
    transformers = _transformers()
    weights = llama_weights(model)
    config = transformers.AutoConfig.for_model(**model.config.to_hugging_face())
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config)
    theirs.load_state_dict(_state(model.config, weights), strict=False, assign=True)
    theirs.tie_weights()
    theirs.model.rotary_emb = type(theirs.model.rotary_emb)(config).to(weights["wte"].device)
    return theirs.eval()


def _state(config: LlamaConfig, weights: Tensors) -> Tensors:
    """Return {Hugging Face's name: view of gpt2block's tensor}; Q, K and V are rows of w_qkv."""
    naming = naming_of(config)
    state: Tensors = {}
    for ours, parts in naming.parts(config).items():
        pieces = weights[ours].split([rows for rows, *_ in parts.values()])
        named = zip(map(naming.with_prefix, parts), pieces, strict=True)
        state.update(named)
    return state

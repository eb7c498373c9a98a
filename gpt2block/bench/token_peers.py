"""Contenders of PyTorch and `transformers` for works from tokens to tokens.

A step of decoding is written out here: linear layers by cuBLAS, scaled_dot_product_attention over a
static kv_cache no longer than the sequences become, compiled, and replayed as a CUDA graph. Many
prompts are continued by `generate`, left-padded to one batch, and by `generate_batch`, which is
continuous batching.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np

from gpt2block.bench import llama_peers
from gpt2block.bench.contenders import Contender, Run, refuse
from gpt2block.bench.llama_works import RandomLlama
from gpt2block.bench.token_contenders import continued
from gpt2block.bench.token_works import (
    DecodeWork,
    GenerateWork,
    PromptWork,
    RandomGPT2,
    RandomModel,
    TokenWork,
    Written,
)
from gpt2block.bench.torch_peers import TorchPeers, captured
from gpt2block.checkpoints.naming import GPT2_NAMING
from gpt2block.cuda.kernels import FP8
from gpt2block.errors import InputError
from gpt2block.run.model import kv_cache_dtype

NOTES = {
    "transformers": "generate, left-padded to one batch",
    "transformers, paged": "generate_batch, which is continuous batching",
}
CACHE_STEP = 64  # the length of a static kv_cache is a multiple of it

Tensor = Any
Tensors = dict[str, Tensor]
Caches = list[tuple[Tensor, Tensor]]  # keys and values of each layer, (B, heads, S, HS)
Forward = Callable[[Tensor, Tensor, Tensors, Caches], Tensor]


def contenders(work: TokenWork, peers: TorchPeers) -> Iterator[Contender]:
    """The contenders for a work; capturing shows whether they run."""
    captures: dict[str, Callable[[int], Run]] = {}
    if isinstance(work, DecodeWork) and isinstance(work.model, RandomLlama):
        captures["torch"] = partial(steps, work, "cuda", called)
        captures["torch.compile"] = partial(steps, work, "cuda", partial(_replayed, peers))
        captures["transformers"] = partial(llama_peers.transformers_steps, work, "cuda")
    elif isinstance(work, PromptWork) and isinstance(work.model, RandomLlama):
        captures["torch"] = partial(llama_peers.prompt, work, "cuda", called)
        compiled = partial(_replayed, peers)
        captures["torch.compile"] = partial(llama_peers.prompt, work, "cuda", compiled)
        captures["transformers"] = partial(llama_peers.transformers_prompt, work, "cuda")
    elif isinstance(work, DecodeWork) and work.peers:
        captures["torch.compile"] = partial(steps, work, "cuda", partial(_replayed, peers))
    elif isinstance(work, GenerateWork):
        captures["transformers"] = partial(_generate, work, "cuda")
        captures["transformers, paged"] = partial(_generate_batch, work, "cuda")
    if work.model.kv_dtype in FP8:
        why = f"no PyTorch operation here takes a kv_cache of {work.model.kv_dtype}"
        captures = dict.fromkeys(captures, partial(refuse, why))
    for name, capture in captures.items():
        note = partial(str, NOTES.get(name, ""))
        yield Contender(name, True, capture, kv_cache_dtype(work.dtype), note)


def steps(
    work: DecodeWork,
    device: str,
    repeated: Callable[[Callable[..., Tensor], tuple[Any, ...]], Callable[[], Tensor]],
    rounds: int,
) -> Run:
    """Decoding with every token on the host.

    repeated: gives from a function and its arguments what calls it again, in place.
    """
    import torch  # noqa: PLC0415

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

    def written() -> Written:
        columns = np.stack(tokens, axis=1).astype(np.int32)
        scores = logits[0].float().log_softmax(-1)
        logprobs = [float(scores[row, int(columns[row, -1])]) for row in work.checked]
        sequences = [np.concatenate([prompts[row], columns[row]]) for row in work.checked]
        return Written(sequences, logprobs)

    return Run(replay, (written,), again)


def _replayed(
    peers: TorchPeers, function: Callable[..., Tensor], arguments: tuple[Any, ...]
) -> Callable[[], Tensor]:
    """The compiled function as a CUDA graph; a call replays it and returns its output."""
    run = captured(peers.compiled(function), [arguments], rounds=1)

    def replay() -> Tensor:
        run.replay()
        return run.outs[0]

    return replay


def called(function: Callable[..., Tensor], arguments: tuple[Any, ...]) -> Callable[[], Tensor]:
    """The function itself; a call returns its output."""
    import torch  # noqa: PLC0415

    def again() -> Tensor:
        with torch.no_grad():
            return function(*arguments)

    return again


def prefilled(
    forward: Forward, ids: Any, rows: Sequence[int], weights: Tensors, caches: Caches
) -> int:
    """The token after a prompt, whose keys and values are stored in these rows of the caches."""
    import torch  # noqa: PLC0415

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


def model_of(model: RandomModel, device: str) -> tuple[Tensors, Forward]:
    """The weights, and the function that computes logits with them."""
    if isinstance(model, RandomLlama):
        return llama_peers.weights_of(model), partial(llama_peers.forward, model.config)
    assert isinstance(model, RandomGPT2)
    return weights_of(model, device), partial(forward, model.config.eps)


def forward(
    eps: float, tokens: Tensor, positions: Tensor, weights: Tensors, caches: Caches
) -> Tensor:
    """The logits (B, V) after tokens (B, T) at positions (T,), whose keys and values are stored."""
    import torch  # noqa: PLC0415
    from torch.nn.functional import (  # noqa: PLC0415
        gelu,
        layer_norm,
        linear,
        scaled_dot_product_attention,
    )

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


def weights_of(model: RandomGPT2, device: str) -> Tensors:
    """The weights in the model's dtype; matrices are (out, in). Raises InputError for FP8."""
    import torch  # noqa: PLC0415

    if model.dtype in FP8:
        raise InputError(f"no PyTorch operation here takes {model.dtype} weights")
    found = {}
    for name, array, layout in model.weights.tensors():
        rows = np.ascontiguousarray(array.T if layout == "KN" else array)
        found[name] = torch.from_numpy(rows).to(device, getattr(torch, model.dtype))
    return found


def _generate(work: GenerateWork, device: str, rounds: int) -> Run:
    import torch  # noqa: PLC0415

    model, prompts = transformers_model(work.model, device), work.ids()
    longest = max(map(len, prompts))
    padded = np.zeros((2, len(prompts), longest), np.int64)  # tokens, and where they are
    for row, ids in enumerate(prompts):
        padded[:, row, longest - len(ids) :] = ids, np.ones_like(ids)
    tokens, mask = torch.from_numpy(padded).to(device)
    config = _greedy(work)
    found: list[Any] = []

    def replay() -> None:
        for _ in range(rounds):
            out = model.generate(tokens, attention_mask=mask, generation_config=config)
            found[:] = out[:, longest:].tolist()

    return Run(replay, (lambda: continued(work, prompts, found),))


def _generate_batch(work: GenerateWork, device: str, rounds: int) -> Run:
    import torch  # noqa: PLC0415

    model, prompts = transformers_model(work.model, device), work.ids()
    config = _greedy(work, eos_token_id=-1)
    found: list[Any] = []

    def replay() -> None:
        for _ in range(rounds):
            out = model.generate_batch([ids.tolist() for ids in prompts], generation_config=config)
            found[:] = [each.generated_tokens for each in out.values()]
        del out  # its kv_cache took most of the free memory
        gc.collect()
        torch.cuda.empty_cache()

    return Run(replay, (lambda: continued(work, prompts, found),))


def _greedy(work: GenerateWork, eos_token_id: int | None = None) -> Any:
    from transformers import GenerationConfig  # noqa: PLC0415

    return GenerationConfig(
        max_new_tokens=work.new, do_sample=False, eos_token_id=eos_token_id, pad_token_id=0
    )


def transformers_model(model: RandomGPT2, device: str) -> Any:
    """The same model in `transformers`. Raises InputError if it is not installed."""
    if find_spec("transformers") is None:
        raise InputError("transformers is not installed")
    import torch  # noqa: PLC0415
    from transformers import GPT2Config, GPT2LMHeadModel  # noqa: PLC0415

    if model.dtype in FP8:
        raise InputError(f"no PyTorch operation here takes {model.dtype} weights")
    settings = {**model.config.to_hugging_face(), "bos_token_id": None, "eos_token_id": None}
    with torch.device(device):
        theirs = GPT2LMHeadModel(GPT2Config(**settings))
    state = {
        GPT2_NAMING.with_prefix(GPT2_NAMING.in_file(name)[0]): torch.from_numpy(
            np.ascontiguousarray(array)
        )
        for name, array, _ in model.weights.tensors()
    }
    theirs.load_state_dict(state, strict=False)  # lm_head is wte
    return theirs.to(getattr(torch, model.dtype)).eval()

"""Contenders of PyTorch and `transformers` for a Llama, on the weights of gpt2block's model.

`forward` is written out as in `token_peers`: linear layers by cuBLAS, with one product for Q, K and
V, and scaled_dot_product_attention over a static kv_cache; for a prompt over its tokens alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gpt2block.bench.contenders import Run
from gpt2block.bench.llama_works import RandomLlama
from gpt2block.bench.token_works import DecodeWork, PromptWork, Written
from gpt2block.bench.torch_peers import tensor
from gpt2block.config_llama import LlamaConfig
from gpt2block.cuda.kernels import FP8
from gpt2block.errors import InputError

Tensor = Any
Tensors = dict[str, Tensor]
Caches = list[tuple[Tensor, Tensor]]  # keys and values of each layer, (B, KV heads, S, HS)


def weights_of(model: RandomLlama) -> Tensors:
    """The weights in the same memory, vectors in the model's dtype, and the frequencies of RoPE.

    Matrices are (out, in). Raises InputError for FP8.
    """
    import torch  # noqa: PLC0415

    if model.dtype in FP8:
        raise InputError(f"no PyTorch operation here takes {model.dtype} weights")
    dtype = getattr(torch, model.dtype)
    found = {name: tensor(array).to(dtype) for name, array, _ in model.stored()}
    frequencies = torch.from_numpy(model.config.frequencies().astype(np.float32))
    return {**found, "frequencies": frequencies.to(found["wte"].device)}


def forward(
    config: LlamaConfig,
    tokens: Tensor,
    positions: Tensor,
    weights: Tensors,
    caches: Caches | None,
) -> Tensor:
    """The logits (B, V) after tokens (B, T) at positions (T,).

    Their keys and values are stored in the caches; without caches, the tokens are a whole prompt.
    """
    from torch.nn.functional import linear, rms_norm, silu  # noqa: PLC0415

    C, Q = config.n_embd, config.q_width
    widths = [Q, config.kv_width, config.kv_width]
    angles = positions[:, None] * weights["frequencies"]
    cos, sin = angles.cos(), angles.sin()

    def norm(x: Tensor, name: str) -> Tensor:
        return rms_norm(x, (C,), weights[name], config.eps)

    def turned(x: Tensor) -> Tensor:
        a, b = x.float().chunk(2, -1)
        return _joined(a * cos - b * sin, a * sin + b * cos).to(x.dtype)

    x = weights["wte"][tokens]
    for n in range(config.n_layer):
        h = f"h.{n}."
        qkv = linear(norm(x, f"{h}gamma1"), weights[f"{h}w_qkv"]).split(widths, -1)
        q, k, v = (part.unflatten(-1, (-1, config.head_size)).transpose(1, 2) for part in qkv)
        q, k = turned(q), turned(k)
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


def _joined(a: Tensor, b: Tensor) -> Tensor:
    import torch  # noqa: PLC0415

    return torch.cat((a, b), -1)


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from torch.nn.functional import scaled_dot_product_attention  # noqa: PLC0415

    grouped = q.shape[1] != k.shape[1]
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


def _over_cache(q: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
    """Attention over a cache; the queries that share keys are rows of one matrix, not copies."""
    import torch  # noqa: PLC0415
    from torch.nn.functional import scaled_dot_product_attention  # noqa: PLC0415

    B, NH, T, HS = q.shape
    group = NH // keys.shape[1]
    rows = q.reshape(B, keys.shape[1], group * T, HS)
    visible = torch.arange(keys.shape[2], device=q.device) <= positions[:, None]
    mask = visible.repeat(group, 1)[None, None]
    heads = scaled_dot_product_attention(rows, keys, values, attn_mask=mask)
    return heads.reshape(B, NH, T, HS)


def prompt(
    work: PromptWork,
    device: str,
    repeated: Callable[[Callable[..., Tensor], tuple[Any, ...]], Callable[[], Tensor]],
    rounds: int,
) -> Run:
    """The logits after a prompt, on the host. repeated: as for `token_peers.steps`."""
    import torch  # noqa: PLC0415

    model = _llama(work)
    ids = torch.from_numpy(work.prompt().astype(np.int64)).to(device)[None]
    positions = torch.arange(work.T, device=device)

    def step(tokens: Tensor, positions: Tensor, weights: Tensors) -> Tensor:
        return forward(model.config, tokens, positions, weights, None)

    again = repeated(step, (ids, positions, weights_of(model)))
    logits: list[Any] = []

    def replay() -> None:
        logits[:] = [again().float().cpu().numpy() for _ in range(rounds)]

    return Run(replay, (lambda: logits[-1],), again)


def transformers_prompt(work: PromptWork, device: str, rounds: int) -> Run:
    """As `prompt`, by LlamaForCausalLM."""
    import torch  # noqa: PLC0415

    theirs = transformers_model(_llama(work))
    ids = torch.from_numpy(work.prompt().astype(np.int64)).to(device)[None]
    logits: list[Any] = []

    def replay() -> None:
        with torch.no_grad():
            for _ in range(rounds):
                out = theirs(ids, use_cache=False, logits_to_keep=1)
                logits[:] = [out.logits[:, -1].float().cpu().numpy()]

    return Run(replay, (lambda: logits[-1],))


def transformers_steps(work: DecodeWork, device: str, rounds: int) -> Run:
    """Greedy decoding by LlamaForCausalLM with its default kv_cache."""
    import torch  # noqa: PLC0415

    theirs = transformers_model(_llama(work))
    prompts = work.prompts()
    tokens: list[Any] = []
    state: dict[str, Any] = {}

    def step(ids: Tensor) -> None:
        out = theirs(ids, past_key_values=state.get("cache"), use_cache=True, logits_to_keep=1)
        state.update(cache=out.past_key_values, logits=out.logits[:, -1])
        tokens.append(state["logits"].argmax(-1).cpu().numpy())

    with torch.no_grad():
        step(torch.from_numpy(np.stack(prompts).astype(np.int64)).to(device))

    def replay() -> None:
        with torch.no_grad():
            for _ in range(rounds):
                step(torch.from_numpy(tokens[-1]).to(device)[:, None])

    def written() -> Written:
        columns = np.stack(tokens, axis=1).astype(np.int32)
        scores = state["logits"].float().log_softmax(-1)
        sequences = [np.concatenate([prompts[row], columns[row]]) for row in work.checked]
        return Written(
            sequences, [float(scores[row, int(columns[row, -1])]) for row in work.checked]
        )

    return Run(replay, (written,))


def transformers_model(model: RandomLlama) -> Any:
    """The same model in `transformers`, on the same memory. Raises InputError without it."""
    try:
        from transformers import LlamaConfig as Config  # noqa: PLC0415
        from transformers import LlamaForCausalLM  # noqa: PLC0415
    except ImportError as error:
        raise InputError("transformers is not installed") from error
    import torch  # noqa: PLC0415

    weights = weights_of(model)
    config = Config(**model.config.to_hugging_face())
    with torch.device("meta"):
        theirs = LlamaForCausalLM(config)
    theirs.load_state_dict(_state(model.config, weights), strict=False, assign=True)
    theirs.tie_weights()
    theirs.model.rotary_emb = type(theirs.model.rotary_emb)(config).to(weights["wte"].device)
    return theirs.eval()


def _state(config: LlamaConfig, weights: Tensors) -> Tensors:
    """The tensors under the names of Hugging Face; Q, K and V are rows of one matrix."""
    state = {"model.embed_tokens.weight": weights["wte"], "model.norm.weight": weights["gamma_f"]}
    if "lm_head" in weights:
        state["lm_head.weight"] = weights["lm_head"]
    names = {
        "gamma1": "input_layernorm", "gamma2": "post_attention_layernorm",
        "w_o": "self_attn.o_proj", "w_gate": "mlp.gate_proj", "w_up": "mlp.up_proj",
        "w_down": "mlp.down_proj",
    }  # fmt: skip
    widths = [config.q_width, config.kv_width, config.kv_width]
    for n in range(config.n_layer):
        layer = f"model.layers.{n}."
        for ours, theirs in names.items():
            state[f"{layer}{theirs}.weight"] = weights[f"h.{n}.{ours}"]
        for part, rows in zip("qkv", weights[f"h.{n}.w_qkv"].split(widths), strict=True):
            state[f"{layer}self_attn.{part}_proj.weight"] = rows
    return state


def _llama(work: DecodeWork | PromptWork) -> RandomLlama:
    assert isinstance(work.model, RandomLlama)
    return work.model

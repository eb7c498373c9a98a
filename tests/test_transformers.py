"""Logits of random weights in the released shapes, compared with transformers on the same GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpt2block import GPT2, SIZES, BlockWeights, GPT2Config
from gpt2block.architectures.gpt2_weights import GPT2Weights
from gpt2block.checkpoints.naming import GPT2_NAMING
from gpt2block.config import block_shapes


def random_model(torch: Any, transformers: Any, config: GPT2Config) -> Any:
    """Return a transformers model in which every tensor is random, also biases and LayerNorms."""
    torch.manual_seed(0)
    settings = transformers.GPT2Config(
        n_layer=config.n_layer,
        n_head=config.n_head,
        n_embd=config.n_embd,
        n_positions=config.n_ctx,
        vocab_size=config.vocab_size,
    )
    with torch.device("cuda"):
        model = transformers.GPT2LMHeadModel(settings).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or ".ln_" in name:
                parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def as_weights(model: Any, config: GPT2Config) -> GPT2Weights:
    state = {name: t.cpu().numpy() for name, t in model.transformer.state_dict().items()}
    blocks = tuple(
        BlockWeights(
            **{
                ours: state[GPT2_NAMING.in_file(f"h.{i}.{ours}")[0]]
                for ours in block_shapes(config.n_embd)
            },
            n_head=config.n_head,
        )
        for i in range(config.n_layer)
    )
    wte = state["wte.weight"]
    ends = state["wpe.weight"], blocks, state["ln_f.weight"], state["ln_f.bias"]
    return GPT2Weights(config, wte, *ends, wte)


@pytest.mark.gpu
@pytest.mark.parametrize("size", SIZES)
def test_logits_equal_those_of_transformers(size: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.set_float32_matmul_precision("highest")
    config = SIZES[size]
    theirs = random_model(torch, transformers, config)
    ids = np.random.default_rng(0).integers(config.vocab_size, size=(2, 200))
    with torch.no_grad():
        expected = theirs(torch.from_numpy(ids).cuda()).logits.cpu().numpy()
    ours = GPT2(as_weights(theirs, config), device="cuda")
    del theirs
    torch.cuda.empty_cache()
    error = np.abs(ours(ids) - expected).max() / np.abs(expected).max()
    kv_cache = ours.new_cache(2)
    ours(ids[:, :150], cache=kv_cache)
    steps = np.stack([ours(ids[:, t : t + 1], cache=kv_cache, last=True) for t in range(150, 200)])
    decoded = np.abs(steps.swapaxes(0, 1) - expected[:, 150:]).max() / np.abs(expected).max()
    print(f"{size}: relative to transformers {error:.1e}, decoded with a cache {decoded:.1e}")
    assert error <= 1e-4
    assert decoded <= 1e-4

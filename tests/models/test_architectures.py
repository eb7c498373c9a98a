"""Random small models of each architecture, compared with `transformers` if it is installed."""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gpt2block
from gpt2block.engine.inspect import compare
from gpt2block.models.architectures import ARCHITECTURES
from tests.devices import GPU

NONE = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def sizes(rng: random.Random) -> dict[str, Any]:
    """Draw sizes of a model with RoPE: one to three layers, grouped queries, odd head counts."""
    n_kv_head = rng.choice((1, 1, 2, 3))
    n_head = n_kv_head * rng.choice((1, 2, 3, 5))
    head_dim = 2 * rng.randint(1, 12)
    return {
        "hidden_size": n_head * head_dim,
        "intermediate_size": rng.randint(1, 80),
        "num_hidden_layers": rng.randint(1, 3),
        "num_attention_heads": n_head,
        "num_key_value_heads": n_kv_head,
        "head_dim": head_dim,
        "vocab_size": rng.randint(20, 120),
        "max_position_embeddings": rng.choice((24, 32, 64)),
        "rms_norm_eps": rng.choice((1e-6, 1e-5, 1e-3)),
        "rope_theta": rng.choice((10.0, 1e4, 1e6)),
        "tie_word_embeddings": rng.random() < 0.5,
        "hidden_act": "silu",
        **NONE,
    }


def llama(rng: random.Random) -> dict[str, Any]:
    biases = {name: rng.random() < 0.3 for name in ("attention_bias", "mlp_bias")}
    found = sizes(rng)
    return found | {"hidden_size": found["num_attention_heads"] * rng.randint(2, 20)} | biases


def qwen2(rng: random.Random) -> dict[str, Any]:
    found = sizes(rng)
    del found["head_dim"]
    return found | {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 1}


def qwen3(rng: random.Random) -> dict[str, Any]:
    """Heads have at least 8 channels: norms of fewer can magnify rounding errors greatly."""
    found = sizes(rng) | {"hidden_size": 4 * rng.randint(2, 20), "head_dim": 2 * rng.randint(4, 16)}
    return found | {"attention_bias": rng.random() < 0.3, "use_sliding_window": False}


def experts(rng: random.Random) -> dict[str, Any]:
    count = rng.choice((4, 5, 16, 64, 128))
    used = {"num_experts": count, "num_experts_per_tok": rng.randint(1, min(count, 8))}
    return used | {"norm_topk_prob": rng.random() < 0.5, "router_aux_loss_coef": 0.01}


def qwen3_moe(rng: random.Random) -> dict[str, Any]:
    """Layers have experts, or Qwen3's feed-forward."""
    found = qwen3(rng) | experts(rng) | {"moe_intermediate_size": rng.randint(1, 30)}
    dense = rng.sample(range(found["num_hidden_layers"]), rng.randint(0, 1))
    return found | rng.choice(({}, {"mlp_only_layers": dense}, {"decoder_sparse_step": 2}))


def olmoe(rng: random.Random) -> dict[str, Any]:
    found = olmo2(rng) | experts(rng)
    found["hidden_size"] = found["num_attention_heads"] * found.pop("head_dim")
    return found | {"clip_qkv": None}


def smollm3(rng: random.Random) -> dict[str, Any]:
    biases = {name: rng.random() < 0.3 for name in ("attention_bias", "mlp_bias")}
    found = sizes(rng) | {"use_sliding_window": False, "sliding_window": 8}
    del found["head_dim"]
    layers: dict[str, Any] = {"no_rope_layer_interval": rng.choice((2, 4))}
    if rng.random() < 0.5:
        layers = {"no_rope_layers": rng.choices((0, 1), k=found["num_hidden_layers"])}
    return found | layers | biases


def olmo2(rng: random.Random) -> dict[str, Any]:
    """Heads and rows have at least 8 channels, as for Qwen3."""
    found = sizes(rng) | {"hidden_size": 4 * rng.randint(2, 20), "head_dim": 2 * rng.randint(4, 16)}
    return found | {"attention_bias": rng.random() < 0.3}


def olmo3(rng: random.Random) -> dict[str, Any]:
    """Windows in some layers, and YaRN in the others; heads and rows as for OLMo 2."""
    found = olmo2(rng) | {"max_position_embeddings": 80}
    theta, local = found.pop("rope_theta"), rng.choice((100.0, 1e4))
    full: dict[str, Any] = {"rope_type": "default"}
    if rng.random() < 0.6:
        full = {"rope_type": "yarn", "factor": rng.choice((1.0, 4.0)), "beta_fast": 2.0}
        full |= {"beta_slow": 0.1, "original_max_position_embeddings": 12}
        full |= rng.choice(({}, {"attention_factor": 1.4}))
    rope = {"full_attention": full | {"rope_theta": theta}}
    rope["sliding_attention"] = {"rope_type": "default", "rope_theta": local}
    kinds = rng.choices(("sliding_attention", "full_attention"), k=found["num_hidden_layers"])
    layers = rng.choice(({}, {"layer_types": kinds}))
    return found | layers | {"rope_parameters": rope, "sliding_window": rng.choice((1, 5, 100))}


def nanochat(rng: random.Random) -> dict[str, Any]:
    """Heads have at least 8 channels, as for Qwen3; some logits are near the cap."""
    found = sizes(rng) | {"hidden_size": 4 * rng.randint(2, 20), "head_dim": 2 * rng.randint(4, 16)}
    cap = {"final_logit_softcapping": rng.choice((15.0, 3.0, None)), "hidden_act": "relu2"}
    return found | cap | {"attention_bias": rng.random() < 0.3}


def granite(rng: random.Random) -> dict[str, Any]:
    found = sizes(rng)
    del found["head_dim"]
    scales = {
        "embedding_multiplier": rng.choice((1, 12.0, 0.5)),
        "attention_multiplier": rng.uniform(0.1, 0.5),
        "residual_multiplier": rng.choice((0.22, 1.0, 1.7)),
        "logits_scaling": rng.choice((8, 1, 0.6)),
    }
    return found | scales | {"attention_bias": rng.random() < 0.3, "mlp_bias": rng.random() < 0.3}


def granitemoehybrid(rng: random.Random) -> dict[str, Any]:
    """Dense models: without experts and layers of Mamba2."""
    found = granite(rng) | {"num_local_experts": 0, "num_experts_per_tok": 0, "mamba_n_heads": 1}
    found["max_position_embeddings"] = 80
    del found["mlp_bias"]
    found["shared_intermediate_size"] = found.pop("intermediate_size")
    kinds = [rng.choice(("attention", "full_attention"))] * found["num_hidden_layers"]
    return found | {"layer_types": kinds, "position_embedding_type": rng.choice(("rope", None))}


def mistral(rng: random.Random) -> dict[str, Any]:
    found = sizes(rng) | {"hidden_size": 4 * rng.randint(2, 20)}
    window = rng.choice((None, 1, 5, 9, found["max_position_embeddings"], 4096))
    return found | {"sliding_window": window}


def ministral3(rng: random.Random) -> dict[str, Any]:
    """Queries grow several times within the context; a tenth of the models has a plain RoPE."""
    found = mistral(rng) | {"sliding_window": rng.choice((None, None, 9))}
    found["max_position_embeddings"] = 80
    rope = {"rope_theta": found.pop("rope_theta"), "llama_4_scaling_beta": 0.0}
    rope |= {"rope_type": "default", "original_max_position_embeddings": 4}
    if rng.random() < 0.9:
        options = {"mscale": 0.7, "mscale_all_dim": 1.0, "beta_fast": 2.0, "beta_slow": 0.1}
        given = {name: value for name, value in options.items() if rng.random() < 0.7}
        rope |= {"rope_type": "yarn", "factor": rng.choice((1.0, 4.0, 16.0)), **given}
        rope |= {"original_max_position_embeddings": rng.choice((2, 5, 12, 200))}
        rope |= {"llama_4_scaling_beta": rng.choice((0.1, 0.3, 0.0))}
    return found | {"rope_parameters": rope}


def phi3(rng: random.Random) -> dict[str, Any]:
    """RoPE rotates a part of each head or all of it, with short or long factors, or both.

    Heads have at least 4 channels, so that a part can be rotated.
    """
    found, head_dim = sizes(rng), 2 * rng.randint(2, 12)
    found |= {"head_dim": head_dim, "hidden_size": found["num_attention_heads"] * head_dim}
    found |= {"sliding_window": rng.choice((None, 7))}
    part = rng.choice((1.0, 0.75, 0.4 + 1 / head_dim))
    n_ctx = found["max_position_embeddings"]  # texts of n_ctx - 8 tokens are among those compared
    original = rng.choice((3, 11, n_ctx - 8, 64))
    if int(head_dim * part) % 2 or rng.random() < 0.3:
        return found | {"partial_rotary_factor": part, "original_max_position_embeddings": original}
    pairs = int(head_dim * part) // 2
    factors = {name: [rng.uniform(1, 4) for _ in range(pairs)] for name in ("short", "long")}
    scaling: dict[str, Any] = {"rope_type": "longrope"}
    scaling |= {f"{name}_factor": each for name, each in factors.items()}
    scaling |= rng.choice(({}, {"attention_factor": 1.4}, {"factor": 6.0}))
    return found | {
        "partial_rotary_factor": part,
        "original_max_position_embeddings": original,
        "rope_scaling": scaling,
    }


def gemma3_text(rng: random.Random) -> dict[str, Any]:
    """Heads and rows have at least 8 channels, as for Qwen3; norms follow both block halves too."""
    found = qwen3(rng) | {"attention_bias": rng.random() < 0.3}
    del found["use_sliding_window"], found["hidden_act"], found["rope_theta"]
    found["hidden_size"] = found["num_attention_heads"] * rng.randint(8, 20)
    rope: dict[str, Any] = {"full_attention": {"rope_theta": 1e6, "rope_type": "default"}}
    rope |= {"sliding_attention": {"rope_theta": 100.0, "rope_type": "default"}}
    if rng.random() < 0.3:
        rope["full_attention"] |= {"rope_type": "linear", "factor": 8.0}
    kinds = ("sliding_attention", "full_attention")
    return found | {
        "rope_parameters": rope,
        "sliding_window": rng.choice((1, 5, 100)),
        "layer_types": rng.choices(kinds, k=found["num_hidden_layers"]),
        "query_pre_attn_scalar": rng.choice((found["head_dim"], 20)),
        "final_logit_softcapping": rng.choice((None, 3.0)),
    }


def gemma4_text(rng: random.Random) -> dict[str, Any]:
    """Layers of both kinds, of which some share keys and values; heads of two sizes.

    Rows and gated products have at least 24 channels: if a few gates are all nearly closed, the
    norm after them magnifies the rounding of GELU.
    """
    found = gemma3_text(rng)
    del found["query_pre_attn_scalar"]
    kinds = ("sliding_attention", "full_attention")
    own = rng.choices(kinds, k=rng.randint(1, 3))
    shared = rng.choices(own, k=rng.randint(0, 3)) if "full_attention" in own else []
    if not shared or shared[-1] != "full_attention":
        (shared or own).append("full_attention")
    rope = {"rope_type": "proportional", "rope_theta": rng.choice((1e6, 100.0))}
    rope["partial_rotary_factor"] = rng.choice((0.25, 0.5, 1.0))
    found["rope_parameters"]["full_attention"] = rng.choice(
        (rope, rope, rope | {"factor": 4.0}, {"rope_type": "default", "rope_theta": 1e4})
    )
    return found | {
        "layer_types": own + shared, "num_hidden_layers": len(own + shared),
        "num_kv_shared_layers": len(shared), "use_double_wide_mlp": rng.random() < 0.5,
        "global_head_dim": 2 * rng.randint(4, 24),
        # `transformers` 5.24.0 cannot run shared layers without embeddings for each layer.
        "hidden_size_per_layer_input": rng.choice((24, 30) if shared else (0, 24, 30)),
        "hidden_size": rng.randint(24, 90), "intermediate_size": rng.randint(24, 80),
        "vocab_size_per_layer_input": found["vocab_size"],
    }  # fmt: skip


def qwen3_5_text(rng: random.Random) -> dict[str, Any]:
    """Gated delta nets and gated attention in any order; heads of attention as for Qwen3.

    Heads of delta nets have at least 16 channels, and ε is large, as norms of small values magnify
    errors: `transformers` computes the delta rule in chunks, and rounds otherwise.
    """
    found = qwen3(rng) | {"hidden_size": 4 * rng.randint(10, 20), "num_hidden_layers": 4}
    found |= {"max_position_embeddings": 80, "rms_norm_eps": 1e-3}
    del found["use_sliding_window"], found["attention_bias"]
    rope = {"rope_type": "default", "rope_theta": found.pop("rope_theta")}
    rope |= rng.choice(({}, {"partial_rotary_factor": rng.choice((0.25, 0.5, 1.0))}))
    kinds = ["full_attention", *rng.choices(("linear_attention", "full_attention"), k=2)]
    types = {"layer_types": rng.sample(kinds, 3), "num_hidden_layers": 3}
    layers = rng.choice(({}, types, types, {"full_attention_interval": 2}))
    n_k_head = rng.choice((1, 2, 3))
    heads = {"linear_num_key_heads": n_k_head}
    heads |= {"linear_num_value_heads": n_k_head * rng.choice((1, 2, 3))}
    heads |= {f"linear_{each}_head_dim": rng.randint(16, 24) for each in ("key", "value")}
    return found | layers | heads | {"rope_parameters": rope}


def lfm2(rng: random.Random) -> dict[str, Any]:
    """At least one layer has attention; heads have at least 8 channels, as for Qwen3."""
    found = sizes(rng) | {"num_hidden_layers": rng.randint(2, 4), "max_position_embeddings": 80}
    del found["rms_norm_eps"], found["hidden_act"]
    layers = ["full_attention", *rng.choices(("conv", "full_attention"), (3, 1), k=3)]
    layers = rng.sample(layers[: found["num_hidden_layers"]], found["num_hidden_layers"])
    found |= {"hidden_size": 4 * rng.randint(6, 20), "head_dim": 2 * rng.randint(4, 12)}
    found["intermediate_size"] = rng.randint(2, 80)
    found |= {"norm_eps": rng.choice((1e-5, 1e-3)), "conv_bias": rng.random() < 0.3}
    found |= {"conv_L_cache": rng.choice((3, 3, 3, 1, 2, 5)), "block_multiple_of": 4}
    found |= {"block_ffn_dim_multiplier": rng.choice((1.0, 1.3))}
    found |= {"block_auto_adjust_ff_dim": rng.random() < 0.7}
    if rng.random() < 0.3:
        full = [n for n, kind in enumerate(layers) if kind == "full_attention"]
        return found | {"full_attn_idxs": full}
    return found | {"layer_types": layers}


def lfm2_moe(rng: random.Random) -> dict[str, Any]:
    """The first layers have no experts. `transformers` ignores LFM2's keys `block_…`."""
    found = next(each for each in (lfm2(rng) for _ in range(99)) if "layer_types" in each)
    found |= experts(rng) | {"moe_intermediate_size": rng.randint(1, 30)}
    found |= {"num_dense_layers": rng.randint(0, 2), "use_expert_bias": rng.random() < 0.7}
    return found | {"routed_scaling_factor": rng.choice((1.0, 1.0, 2.5))}


def yarn(rng: random.Random) -> dict[str, Any]:
    """Draw another kind of model with YaRN; optional settings are absent, null, 0 or given."""
    make = rng.choice((llama, qwen2, qwen3, mistral, olmo2))
    found = make(rng) | {"model_type": make.__name__}
    options = {
        "beta_fast": (None, 0, 32, 2, 1.5), "beta_slow": (None, 1, 0.1, 0.01),
        "truncate": (True, True, False), "attention_factor": (None, None, 1.4),
        "mscale": (1, 0.7, None), "mscale_all_dim": (0.5, 0, None),
        "original_max_position_embeddings": (4, 12, 200),
    }  # fmt: skip
    given = {name: rng.choice(values) for name, values in options.items() if rng.random() < 0.6}
    rope = {"rope_type": "yarn", "factor": rng.choice((1.0, 2.0, 7.5, 40, None)), **given}
    if rng.random() < 0.5:
        return found | {"rope_scaling": rope}
    return found | {"rope_parameters": rope | {"rope_theta": found.pop("rope_theta")}}


KINDS: Mapping[str, Callable[[random.Random], dict[str, Any]]] = {
    each.__name__: each
    for each in (
        llama, qwen2, qwen3, mistral, ministral3, granite, granitemoehybrid, smollm3, phi3,
        olmo2, olmo3, nanochat, gemma3_text, gemma4_text, lfm2, qwen3_5_text, qwen3_moe, olmoe,
        lfm2_moe, yarn,
    )
}  # fmt: skip
each_kind = pytest.mark.parametrize("kind", KINDS)
MIXTURES = "qwen3_moe", "olmoe", "lfm2_moe"
# Least versions of `transformers`; earlier ones write a second partial_rotary_factor for Qwen3.5.
VERSIONS = {"qwen3_5_text": "5.20", **dict.fromkeys(MIXTURES, "5.24")}
EAGER = {"attn_implementation": "eager"}
# The products of all experts in one call need weights whose rows are multiples of 16 bytes.
OPTIONS = dict.fromkeys(MIXTURES, EAGER | {"experts_implementation": "eager"})


@pytest.mark.parametrize(
    ("kind", "device", "count", "limit"),
    [
        (kind, "cpu", 60, 5e-6 if kind in ("qwen3_5_text", "qwen3_moe", "lfm2_moe") else 2e-6)
        for kind in KINDS
        if kind != "yarn"
    ]
    + [pytest.param(kind, "cuda", 12, 1e-5, marks=GPU.marks) for kind in KINDS],
)
def test_logits_and_greedy_tokens_are_those_of_transformers(
    kind: str, device: str, count: int, limit: float, tmp_path: Path
) -> None:
    """A batch has unequal lengths. Errors against float64 are relative to the largest logit.

    A few models have large errors in float32: for them the limit is twice the error of
    `transformers`. A different token is permitted if it is as likely.
    """
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", minversion=VERSIONS.get(kind))
    from make_golden import in_float64, load  # noqa: PLC0415  (needs both)

    wrong = {}
    for seed in range(count):
        settings = KINDS[kind](random.Random(seed))
        for name in settings if device == "cuda" else ():  # other heads are refused
            if name.startswith("linear_"):
                size = settings[name]
                settings[name] = size // 4 * 4 if name.endswith("_dim") else 2 * size
        theirs = model_of(torch, transformers, kind, settings, seed)
        theirs.save_pretrained(tmp_path / str(seed))
        ours = gpt2block.from_pretrained(tmp_path / str(seed), device=device)
        rng, n_ctx = np.random.default_rng(seed), settings["max_position_embeddings"]
        rows = [rng.integers(0, settings["vocab_size"], n) for n in (n_ctx, 1, n_ctx - 8)]
        single = [logits_of(torch, theirs, row) for row in rows]
        with in_float64():
            weights = {name: tensor.numpy() for name, tensor in theirs.state_dict().items()}
            theirs = model_of(torch, transformers, kind, settings, seed)
            load(theirs, weights)
            exact = [logits_of(torch, theirs, row) for row in rows]
        largest = max(np.abs(each).max() for each in exact)
        for row, truth in zip(rows if device == "cpu" else (), exact, strict=False):
            found = compare.exact_tensors(ours.engine, row.astype(np.int32))["logits"]
            assert np.abs(found - truth).max() < 1e-12 * largest  # the reference in float64
        off = max(np.abs(a - b).max() for a, b in zip(ours(rows), exact, strict=True))
        prompts = [rows[1].tolist(), rows[2].tolist(), rows[2][:5].tolist()]
        found = ours.generate(prompts, temperature=0, max_new_tokens=8)
        found[2] = ours.generate(prompts[2], temperature=0, max_new_tokens=min(72, n_ctx - 5))
        for prompt, made in zip(prompts, found, strict=True):
            with in_float64():
                after = logits_of(torch, theirs, np.array([*prompt, *made.tokens]))
            steps = zip(after[len(prompt) - 1 :], made.tokens, strict=False)
            off = max(off, *(step.max() - step[token] for step, token in steps))
        own = max(np.abs(a - b).max() for a, b in zip(single, exact, strict=True))
        if off > max(limit * largest, 2 * own):
            wrong[seed] = float(off / largest), settings
    assert not wrong


def test_frequencies_and_logits_of_yarn_are_those_of_transformers(tmp_path: Path) -> None:
    """For 60 models, frequencies are compared in float64, and logits in float32."""
    torch, transformers = map(pytest.importorskip, ("torch", "transformers"))
    from make_golden import in_float64  # noqa: PLC0415  (needs both)

    computed = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["yarn"]
    for seed in range(60):
        settings = yarn(random.Random(seed))
        theirs = model_of(torch, transformers, "yarn", settings, seed)
        theirs.save_pretrained(tmp_path)
        ours: Any = gpt2block.from_pretrained(tmp_path, device="cpu")
        ids = np.random.default_rng(seed).integers(0, settings["vocab_size"], 24)
        with in_float64():
            frequencies, factor = computed(theirs.config, "cpu")
        np.testing.assert_allclose(ours.config.frequencies(), frequencies, rtol=1e-12)
        assert ours.config.scaling.attention_factor == pytest.approx(factor, rel=1e-12)
        logits = logits_of(torch, theirs, ids)
        np.testing.assert_allclose(ours(ids), logits, rtol=0, atol=1e-5 * np.abs(logits).max())


@each_kind
def test_scores_and_files(kind: str, tmp_path: Path) -> None:
    """Scores of a text agree, as do models that are saved for `transformers` or as GGUF."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", minversion=VERSIONS.get(kind))
    pytest.importorskip("gguf")
    from fuzzing import gguf_writer  # noqa: PLC0415  (needs gguf)

    for seed in range(12):
        settings, folder = KINDS[kind](random.Random(seed)), tmp_path / str(seed)
        theirs = model_of(torch, transformers, kind, settings, seed)
        theirs.save_pretrained(folder)
        ours = gpt2block.from_pretrained(folder, device="cpu")
        ids = np.random.default_rng(seed).integers(0, settings["vocab_size"], 20)
        logits = logits_of(torch, theirs, ids)
        chosen = torch.log_softmax(torch.tensor(logits), -1)[range(19), ids[1:]]
        assert ours.score(ids).log_likelihood == pytest.approx(float(chosen.sum()), rel=1e-5)
        ours.save_pretrained(folder / "again")
        again = transformers.AutoModelForCausalLM.from_pretrained(
            folder / "again", **OPTIONS.get(kind, EAGER)
        )
        np.testing.assert_array_equal(logits_of(torch, again.eval(), ids), logits)
        c: Any = ours.config
        layers, turned = getattr(c, "rope_layers", ()), settings.get("position_embedding_type", "")
        no_gguf = c.MODEL_TYPE in ("mistral", "nanochat", "gemma3_text") or turned is None
        no_gguf |= c.MODEL_TYPE == "ministral3" and c.window is not None
        no_gguf |= kind == "qwen3_moe" and not (c.norm_topk_prob and all(c.expert_layers))
        no_gguf |= kind == "olmoe" and c.norm_topk_prob
        if kind == "lfm2_moe":
            no_gguf = (c.norm_topk_prob, c.use_expert_bias, c.routed_scaling_factor) != (1, 1, 1)
        if no_gguf or layers != tuple((n + 1) % 4 > 0 for n in range(len(layers))):
            continue  # GGUF lacks nanochat, Mistral's window, and a key for layers without RoPE
        if getattr(c, "conv_bias", 0) or not getattr(getattr(c, "scaling", 0), "truncate", True):
            with pytest.raises(gpt2block.InputError, match=r"no key for (truncate F|conv_bias T)"):
                ours.save_gguf(folder / "m.gguf", "f32")
            continue
        written = gguf_writer.metadata_of(ours), gguf_writer.tensors_of(ours)
        read = gpt2block.from_pretrained(
            gguf_writer.write(folder / "m.gguf", *written), device="cpu"
        )
        largest = np.abs(logits).max()
        np.testing.assert_allclose(read(ids), ours(ids), rtol=0, atol=4e-6 * largest)


def test_a_llama_with_another_gate_as_the_documentation_adds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module in docs/architectures.md is compared with a Llama of the same hidden_act."""
    torch, transformers = map(pytest.importorskip, ("torch", "transformers"))
    page = (Path(__file__).parents[2] / "docs" / "architectures.md").read_text("utf-8")
    section = page.partition("## A second example")[2]
    name, file = "gated_llama", tmp_path / "gated_llama.py"
    file.write_text(section.partition("```python\n")[2].partition("```\n")[0], encoding="utf-8")
    spec: Any = importlib.util.spec_from_file_location(name, file)
    module: Any = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)  # dataclasses look up annotations there
    spec.loader.exec_module(module)
    monkeypatch.setitem(ARCHITECTURES, name, module)
    settings = llama(random.Random(4)) | {"hidden_act": module.GELU}
    theirs = model_of(torch, transformers, "llama", settings, 4)
    theirs.save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": name}))
    ours = gpt2block.from_pretrained(tmp_path, device="cpu")
    ids = np.arange(20) % settings["vocab_size"]
    expected = logits_of(torch, theirs, ids)
    np.testing.assert_allclose(ours(ids), expected, rtol=0, atol=4e-6 * np.abs(expected).max())
    again = gpt2block.from_pretrained(ours.save_pretrained(tmp_path / "again"), device="cpu")
    np.testing.assert_array_equal(again(ids), ours(ids))


def model_of(torch: Any, transformers: Any, kind: str, settings: dict[str, Any], seed: int) -> Any:
    """Return a model whose random weights let every part of a block affect the logits."""
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(**{"model_type": kind} | settings)
    model = transformers.AutoModelForCausalLM.from_config(config, **OPTIONS.get(kind, EAGER))
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            spread = 0.3 if tensor.ndim == 1 else tensor.shape[-1] ** -0.5
            # Gemma 3 and Qwen3.5 add 1 to weights of norms, but not to linear_attn.norm.
            plain = kind not in ("gemma3_text", "qwen3_5_text") or "linear_attn.norm" in name
            tensor.normal_("norm" in name and plain, spread)
            if kind == "gemma4_text" and name.endswith("q_norm.weight"):
                tensor.mul_(len(tensor) ** -0.5)  # scores have no other scale
        for name, tensor in model.named_buffers():
            if name.endswith(("layer_scalar", "expert_bias")):
                tensor.uniform_(0.5, 1.5)
    return model.eval()


def logits_of(torch: Any, model: Any, ids: Any) -> Any:
    default = torch.get_default_dtype()
    torch.set_default_dtype(model.dtype)  # quotients of integers have it, such as positions
    with torch.no_grad():
        logits = model(torch.tensor(ids[None])).logits[0].numpy()
    torch.set_default_dtype(default)
    return logits

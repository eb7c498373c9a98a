"""config.json: random objects compared with an independent statement of its rules, and logits."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fuzzing import Area, Rng, accepted, attempt, check, check_equal
from fuzzing import gpt2 as plain
from fuzzing.values import odd_value, replace
from gpt2block import GPT2
from gpt2block.files.checkpoints import Checkpoint
from gpt2block.models.config import GPT2Config, ModelConfig

NAMES = {
    "n_layer": ("n_layer", "num_hidden_layers"),
    "n_head": ("n_head", "num_attention_heads"),
    "n_embd": ("n_embd", "hidden_size"),
    "n_ctx": ("n_positions", "max_position_embeddings"),
    "vocab_size": ("vocab_size",),
}
DEFAULTS = {"n_layer": 12, "n_head": 12, "n_embd": 768, "n_ctx": 1024, "vocab_size": 50257}
LARGEST = 100_000  # a larger size may be refused
SWITCHES = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}
VARIANTS = ("gelu_new", "gelu_pytorch_tanh", "gelu")


class Rules(NamedTuple):
    """The meaning of a config.json."""

    must_refuse: bool
    may_refuse: bool  # variants that need not be supported, and ambiguous values
    fields: dict[str, Any]


# Keys of other architectures, each with a value without effect and a value with an effect
FOREIGN: dict[str, tuple[Any, Any]] = {
    "layer_types": (["full_attention"], ["full_attention", "sliding_attention"]),
    "sliding_window": (None, 0), "embedding_multiplier": (1.0, 12.0), "logit_scale": (1, 0.0625),
    "use_qk_norm": (False, True), "final_logit_softcapping": (None, 30.0),
    "no_rope_layers": ([1, 1], [1, 0]), "query_pre_attn_scalar": (None, 0.5),
}  # fmt: skip


def rules(config: Any) -> Rules:
    """Interpret a config.json by the documentation of Hugging Face's GPT2Config."""
    if not isinstance(config, dict) or config.get("model_type", "gpt2") != "gpt2":
        return Rules(True, True, {})
    wrong = doubtful = False
    fields: dict[str, Any] = {}
    for field, names in NAMES.items():
        stated = [config[name] for name in names if config.get(name) is not None]
        doubtful |= any(name in config and config[name] is None for name in names)
        if field == "n_ctx" and config.get("n_ctx") is not None:  # newer names replace this one
            doubtful |= bool(stated)
            stated = stated or [config["n_ctx"]]
        doubtful |= field == "n_ctx" and "n_ctx" in config and config["n_ctx"] is None
        wrong |= any(type(value) is not int or value < 1 for value in stated)
        wrong |= any(value != stated[0] for value in stated)
        fields[field] = stated[0] if stated else DEFAULTS[field]
        doubtful |= not wrong and fields[field] > LARGEST
    wrong = wrong or fields["n_embd"] % fields["n_head"] != 0
    eps = config.get("layer_norm_epsilon", 1e-5)
    wrong |= type(eps) not in (int, float) or not 0 <= eps <= sys.float_info.max
    fields["eps"] = eps if wrong else float(eps)
    doubtful |= not wrong and eps > np.finfo(np.float32).max
    fields["tie_word_embeddings"] = tied = config.get("tie_word_embeddings", True)
    wrong |= type(tied) is not bool
    doubtful |= "tie_word_embeddings" in config and tied is None
    activation = config.get("activation_function", "gelu_new")
    wrong |= not isinstance(activation, str) or activation not in VARIANTS
    doubtful |= activation == "gelu"
    inner = config.get("n_inner")
    if inner is not None and not (
        type(inner) is int and not wrong and inner == 4 * fields["n_embd"]
    ):
        wrong |= type(inner) not in (int, float) or inner < 1
        doubtful = True
    for name, usual in SWITCHES.items():
        doubtful |= name in config and config[name] is not usual
        wrong |= name in config and config[name] not in (True, False, None)
    doubtful |= "add_cross_attention" in config and config["add_cross_attention"] is not False
    wrong |= config.get("add_cross_attention", False) not in (False, None)
    wrong |= any(config.get(name) == other for name, (_, other) in FOREIGN.items())
    return Rules(wrong, wrong or doubtful, fields)


def check_config(config: ModelConfig, expected: Rules) -> None:
    """Raise Difference unless an accepted config agrees with the rules."""
    check(not expected.must_refuse, f"accepted as {config}")
    for name, value in expected.fields.items():
        check_equal(name, getattr(config, name), value)


def case(rng: Rng, folder: Path) -> None:
    rng.pick(_object, _object, _object, _model, _wide)(rng, folder)


def _object(rng: Rng, folder: Path) -> None:
    """Any object as the argument of `GPT2Config.from_hugging_face`."""
    config = random_object(rng)
    expected = rules(config)
    found = attempt(not expected.may_refuse, GPT2Config.from_hugging_face, config)
    check_config(found, expected)
    again = accepted(GPT2Config.from_hugging_face, found.to_hugging_face())
    check_equal("from to_hugging_face", again, found)


def random_object(rng: Rng) -> Any:
    """Return the content of a config.json, which is mostly valid."""
    if rng.chance(0.03):
        return odd_value(rng)
    n_head = rng.whole(1, 20)
    usual: dict[str, Any] = {
        "n_layer": rng.whole(1, 50), "n_head": n_head,
        "n_embd": n_head * rng.whole(1, 80), "n_positions": rng.whole(1, 2000),
        "n_ctx": rng.whole(1, 2000), "vocab_size": rng.whole(1, 10**5),
        "layer_norm_epsilon": float(rng.choice([0, 1e-5, 1e-12, 1.0])),
        "tie_word_embeddings": rng.chance(0.5), "model_type": "gpt2",
        "activation_function": str(rng.choice(VARIANTS)), "add_cross_attention": False,
        "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "n_inner": None,
        "torch_dtype": "float32", "architectures": ["GPT2LMHeadModel"], "use_cache": True,
    }  # fmt: skip
    config = {name: value for name, value in usual.items() if rng.chance(0.7)}
    if "n_head" not in config or "n_embd" not in config:  # other sizes would rarely be divisible
        config |= {"n_head": n_head, "n_embd": usual["n_embd"]} if rng.chance(0.8) else {}
    rename(rng, config)
    if rng.chance(0.2):
        name = rng.pick(*FOREIGN)
        config[name] = FOREIGN[name][rng.whole(2)]
    for _ in range(int(rng.choice([0, 0, 1, 2]))):
        name = str(rng.choice([*usual, "num_hidden_layers", "num_attention_heads", "hidden_size"]))
        config[name] = odd_value(rng)
    return config


def rename(rng: Rng, config: dict[str, Any]) -> None:
    """Give some fields their other name, both names, or contradicting values."""
    for names in NAMES.values():
        if len(names) == 1 or names[0] not in config or rng.chance(0.6):
            continue
        config[names[1]] = config[names[0]] + (rng.whole(3) if rng.chance(0.2) else 0)
        if rng.chance(0.6):
            del config[names[0]]


def _model(rng: Rng, folder: Path) -> None:
    """A tiny model whose config.json uses other names or a variant: opened and computed."""
    sizes = dataclasses.replace(plain.random_sizes(rng), tied=True)
    if rng.chance(0.4):
        sizes = dataclasses.replace(
            sizes,
            exact_gelu=rng.chance(0.4),
            n_inner=rng.whole(1, 20) if rng.chance(0.4) else None,
            scaled=rng.chance(0.7),
            scaled_by_layer=rng.chance(0.3),
        )
    tensors = plain.random_tensors(rng, sizes, "float32")
    plain.write(folder, sizes, tensors)
    config = plain.config_json(sizes)
    rename(rng, config)
    if rng.chance(0.2):
        config[str(rng.choice([*config]))] = odd_value(rng)
    (folder / "config.json").write_text(json.dumps(config))
    expected = rules(config)
    fields = dict(expected.fields, tied=expected.fields.get("tie_word_embeddings"))
    fits = all(
        fields.get(name) == getattr(sizes, name)
        for name in ("n_layer", "n_embd", "n_ctx", "vocab_size", "tied")
    )
    valid = fits and not expected.may_refuse
    opened = attempt(valid, Checkpoint.open, folder)
    check_config(opened.config, expected)
    model = attempt(valid, GPT2.from_pretrained, opened, device="cpu")
    meant = dataclasses.replace(
        sizes, n_head=expected.fields["n_head"], eps=float(expected.fields["eps"])
    )
    check_logits(rng, model, meant, tensors)


def check_logits(rng: Rng, model: GPT2, sizes: plain.Sizes, tensors: plain.Tensors | None) -> None:
    """Compute the logits of some tokens. tensors: to compare them with float64."""
    ids = rng.integers(0, sizes.vocab_size, rng.whole(1, sizes.n_ctx + 1))
    got = accepted(model, ids)
    if tensors is not None:
        plain.check_close("logits", got, plain.logits(sizes, tensors, ids))


def _wide(rng: Rng, folder: Path) -> None:
    """A file of width 768 needs no config.json; a config.json that is not a file is refused."""
    sizes = plain.Sizes(rng.whole(1, 3), 12, 768, rng.whole(1, 9), 5)
    plain.write_sparse(folder / "model.safetensors", plain.shapes(sizes))
    missing = rng.chance(0.2)
    kind = "nothing" if missing else replace(rng, folder / "config.json")
    opened = attempt(kind == "nothing", Checkpoint.open, folder)
    check(kind == "nothing", f"accepted a config.json that is a {kind}")
    check_config(opened.config, rules(plain.config_json(sizes)))


AREA = Area("configs", 2, case)

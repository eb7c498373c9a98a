"""The shape of a GPT-2 model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from gpt2block.errors import CheckpointError, InputError


def check_count(name: str, value: Any) -> None:
    """Raise InputError unless `value` is a positive integer (a bool is none)."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise InputError(f"{name}: expected a positive integer, got {value!r}")


def check_eps(value: Any) -> None:
    """Raise InputError unless `value` will do as LayerNorm's epsilon: finite and not negative."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise InputError(f"eps: expected a finite number of at least 0, got {value!r}")


@dataclass(frozen=True)
class GPT2Config:
    """Sizes of a GPT-2 model; the defaults are GPT-2 small (124M parameters).

    Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), table 2.
    """

    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    n_ctx: int = 1024
    vocab_size: int = 50257
    eps: float = 1e-5
    tie_word_embeddings: bool = True

    def __post_init__(self) -> None:
        for name in ("n_layer", "n_head", "n_embd", "n_ctx", "vocab_size"):
            check_count(name, getattr(self, name))
        check_eps(self.eps)
        if not isinstance(self.tie_word_embeddings, bool):
            raise InputError(
                f"tie_word_embeddings: expected true or false, got {self.tie_word_embeddings!r}"
            )
        if self.n_embd % self.n_head:
            raise InputError(f"n_embd {self.n_embd} is not a multiple of n_head {self.n_head}")

    @property
    def head_size(self) -> int:
        return self.n_embd // self.n_head

    @classmethod
    def from_hugging_face(cls, config: Any) -> GPT2Config:
        """The fields of a Hugging Face `config.json`; absent ones keep GPT-2 small's value.

        Raises CheckpointError for another architecture or for variants GPT-2 itself never used.
        """
        if not isinstance(config, dict):
            raise CheckpointError(f"config.json: expected an object, got {config!r:.40}")
        kind = config.get("model_type", "gpt2")
        if kind != "gpt2":
            raise CheckpointError(f"config.json: expected model_type 'gpt2', got {kind!r}")
        activation = config.get("activation_function", "gelu_new")
        if activation not in ("gelu_new", "gelu_pytorch_tanh"):
            raise CheckpointError(
                f"config.json: expected the tanh GELU (gelu_new), got {activation!r}"
            )
        n_embd = config.get("n_embd", cls.n_embd)
        check_count("n_embd", n_embd)
        if config.get("n_inner") not in (None, 4 * n_embd):
            raise CheckpointError(
                f"config.json: expected n_inner {4 * n_embd}, got {config['n_inner']!r}"
            )
        unsupported = [
            f"{name}={config[name]}"
            for name, usual in (
                ("scale_attn_weights", True),
                ("scale_attn_by_inverse_layer_idx", False),
                ("add_cross_attention", False),
            )
            if config.get(name, usual) != usual
        ]
        if unsupported:
            raise CheckpointError(f"config.json: not GPT-2's own attention: {unsupported[0]}")
        n_ctx: Any = config.get("n_ctx", cls.n_ctx)
        return cls(
            n_layer=config.get("n_layer", cls.n_layer),
            n_head=config.get("n_head", cls.n_head),
            n_embd=n_embd,
            n_ctx=config.get("n_positions", n_ctx),
            vocab_size=config.get("vocab_size", cls.vocab_size),
            eps=config.get("layer_norm_epsilon", cls.eps),
            tie_word_embeddings=config.get("tie_word_embeddings", cls.tie_word_embeddings),
        )

    def to_hugging_face(self) -> dict[str, Any]:
        """The object of a `config.json` that `transformers` reads as this model."""
        end_of_text = 50256 if self.vocab_size == 50257 else None  # other vocabularies: not known
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "n_layer": self.n_layer,
            "n_head": self.n_head,
            "n_embd": self.n_embd,
            "n_inner": None,
            "n_positions": self.n_ctx,
            "n_ctx": self.n_ctx,
            "vocab_size": self.vocab_size,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": self.eps,
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "tie_word_embeddings": self.tie_word_embeddings,
            "bos_token_id": end_of_text,
            "eos_token_id": end_of_text,
        }


SIZES: Mapping[str, GPT2Config] = {
    "gpt2": GPT2Config(),
    "gpt2-medium": GPT2Config(n_layer=24, n_head=16, n_embd=1024),
    "gpt2-large": GPT2Config(n_layer=36, n_head=20, n_embd=1280),
    "gpt2-xl": GPT2Config(n_layer=48, n_head=25, n_embd=1600),
}

# The sizes by their number of parameters
ALIASES: Mapping[str, str] = {
    "124M": "gpt2",
    "355M": "gpt2-medium",
    "774M": "gpt2-large",
    "1558M": "gpt2-xl",
}


def size(name: str) -> GPT2Config:
    """The config of a GPT-2 size by name, "gpt2" or "124M"; InputError lists the known names."""
    known = (*SIZES, *ALIASES)
    if name not in known:
        raise InputError(f"unknown size {name!r}: expected one of {', '.join(known)}")
    return SIZES[ALIASES.get(name, name)]


def block_shapes(n_embd: int) -> dict[str, tuple[int, ...]]:
    """Name → shape of a block's twelve tensors, in packed order; matrices are (in, out)."""
    C = n_embd
    return {
        "gamma1": (C,),
        "beta1": (C,),
        "w_qkv": (C, 3 * C),
        "b_qkv": (3 * C,),
        "w_attn": (C, C),
        "b_attn": (C,),
        "gamma2": (C,),
        "beta2": (C,),
        "w_fc": (C, 4 * C),
        "b_fc": (4 * C,),
        "w_proj": (4 * C, C),
        "b_proj": (C,),
    }


def model_shapes(config: GPT2Config) -> dict[str, tuple[int, ...]]:
    """Name → shape of all tensors of a model, in the order they are given everywhere.

    wte, wpe, the blocks' as `h.N.` and a name of `block_shapes`, gamma_f, beta_f, and lm_head where
    it is not wte. Matrices of blocks are (in, out); wte and lm_head are (vocab_size, C).
    """
    C = config.n_embd
    shapes: dict[str, tuple[int, ...]] = {"wte": (config.vocab_size, C), "wpe": (config.n_ctx, C)}
    for layer in range(config.n_layer):
        shapes |= {f"h.{layer}.{name}": shape for name, shape in block_shapes(C).items()}
    shapes |= {"gamma_f": (C,), "beta_f": (C,)}
    return shapes if config.tie_word_embeddings else shapes | {"lm_head": (config.vocab_size, C)}

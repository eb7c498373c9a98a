"""The sizes of models whose feed-forwards are mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from gpt2block.checks import check_count, set_fields
from gpt2block.errors import InputError
from gpt2block.models.config import (
    ALL_LIMITS,
    EXPERTS,
    Experts,
    ModelConfig,
    Settings,
    Shapes,
)
from gpt2block.models.config.llama import LlamaConfig

DENSE = "w_gate", "w_up", "w_down"  # matrices of a feed-forward without experts
_CHOSEN = "a router chooses all experts that a token uses"
_OF_ALL = "a router chooses among all experts of a layer"
# Keys of config.json that change the result of other mixtures of experts
OF_OTHER_MIXTURES: Settings = (
    ("n_shared_experts", (None, 0), _CHOSEN),
    ("num_shared_experts", (None, 0), _CHOSEN),
    ("shared_expert_intermediate_size", (None, 0), _CHOSEN),
    ("n_group", (None, 1), _OF_ALL),
    ("topk_group", (None, 1), _OF_ALL),
    ("scoring_func", (None, "softmax"), "scores of experts are a softmax"),
    ("routed_scaling_factor", (None, 1), "weights of experts have no factor"),
    ("first_k_dense_replace", (None, 0), "this key names no layers without experts"),
    ("moe_layer_freq", (None, 1), "this key names no layers without experts"),
)


@dataclass(frozen=True)
class MixtureConfig(LlamaConfig):
    """Sizes of a Llama in which experts replace the feed-forward of layers.

    n_expert: experts of a layer. n_expert_used: experts that each token uses. norm_topk_prob:
    whether the weights of a token's experts are divided by their sum. A matrix of a layer has the
    outputs of all experts, one expert after another.
    """

    SIZES: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **LlamaConfig.SIZES,
        "n_expert": ("num_experts", "num_local_experts"),
        "n_expert_used": ("num_experts_per_tok",),
    }
    FLAGS: ClassVar[tuple[str, ...]] = (*ModelConfig.FLAGS, "attention_bias", "norm_topk_prob")
    SETTINGS: ClassVar[Settings] = (*LlamaConfig.SETTINGS, *OF_OTHER_MIXTURES)
    GGUF_KEYS: ClassVar[Mapping[str, str]] = {
        "expert_count": "n_expert", "expert_used_count": "n_expert_used"
    }  # fmt: skip
    GGUF_NEUTRAL: ClassVar[Mapping[str, object]] = {
        "expert_shared_count": 0, "expert_shared_feed_forward_length": 0,
        "expert_gating_func": 1,  # softmax
        "expert_weights_norm": False,
    }  # fmt: skip

    n_expert: int = 64
    n_expert_used: int = 8
    norm_topk_prob: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("n_expert", "n_expert_used"):
            size = check_count(name, getattr(self, name), ALL_LIMITS[name])
            set_fields(self, **{name: size})
        if self.n_expert_used > self.n_expert:
            raise InputError(f"n_expert_used: expected at most n_expert, {self.n_expert}, "
                             f"got {self.n_expert_used}")  # fmt: skip

    @property
    def n_ff_expert(self) -> int:
        """Channels of an expert."""
        return self.n_ff

    @property
    def expert_layers(self) -> tuple[bool, ...]:
        """Whether each layer has experts."""
        return (True,) * self.n_layer

    @property
    def experts(self) -> Experts | None:
        """The mixtures of experts of the layers; None if there are none."""
        sizes = self.expert_layers, self.n_expert, self.n_expert_used
        return Experts(*sizes, normed=self.norm_topk_prob) if any(self.expert_layers) else None

    def file_rows(self, name: str, layer: int) -> tuple[int, ...]:
        """Return how many rows of a block's tensor `name` each of several tensors of a file has."""
        if name not in EXPERTS:
            return super().file_rows(name, layer)
        return (self._shapes(True)[name][1] // self.n_expert,) * self.n_expert

    def block_shapes(self) -> Shapes:
        """Return {name: shape} of the tensors of all layers' blocks."""
        kinds = (self._shapes(experts) for experts in sorted({*self.expert_layers}))
        return {name: shape for shapes in kinds for name, shape in shapes.items()}

    def shapes_of(self, layer: int) -> Shapes:
        """Return {name: shape} of the tensors of a layer with experts, or without."""
        own = self._shapes(self.expert_layers[layer])
        return {name: shape for name, shape in super().shapes_of(layer).items() if name in own}

    def _shapes(self, experts: bool) -> Shapes:
        shapes, C, E, H = super().block_shapes(), self.n_embd, self.n_expert, self.n_ff_expert
        if not experts:
            return shapes
        kept = {name: shape for name, shape in shapes.items() if name not in DENSE}
        widths = dict.fromkeys(EXPERTS, (C, E * H)) | {"w_down_experts": (H, E * C)}
        return {**kept, "router": (E, C), **widths}

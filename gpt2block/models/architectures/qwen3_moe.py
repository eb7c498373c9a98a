"""Qwen3's mixtures of experts: Qwen3's block, whose feed-forward adds a few of many experts.

A router chooses the experts of each token. An expert is a gated feed-forward with few channels.
Layers may also have Qwen3's feed-forward instead; GGUF has no files of such models. Sources: Qwen
Team, "Qwen3 Technical Report" (2025), and Qwen3Moe in `transformers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from gpt2block.checks import check_count, set_fields
from gpt2block.models.architectures import llama, qwen3
from gpt2block.models.architectures.architecture import Value
from gpt2block.models.architectures.qwen3 import Qwen3Config
from gpt2block.models.config import ALL_LIMITS, ModelConfig
from gpt2block.models.config.llama import all_but_every, layers_in, set_layers
from gpt2block.models.config.mixture import MixtureConfig

STEP, DENSE_LAYERS = "decoder_sparse_step", "mlp_only_layers"


@dataclass(frozen=True)
class Qwen3MoeConfig(MixtureConfig, Qwen3Config):
    """Sizes of a Qwen3 model with experts. n_ff: channels in layers without experts.

    n_ff_expert: channels of an expert. expert_layers: whether each layer has experts; () means all.
    """

    NAME: ClassVar[str] = "Qwen3Moe"
    MODEL_TYPE: ClassVar[str] = "qwen3_moe"
    SIZES: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **MixtureConfig.SIZES, "n_ff_expert": ("moe_intermediate_size",)
    }  # fmt: skip
    ABSENT: ClassVar[Mapping[str, object]] = {
        "n_ctx": 32768, "eps": 1e-6, "n_kv_head": 4, "norm_topk_prob": False
    }  # fmt: skip
    GGUF_KEYS: ClassVar[Mapping[str, str]] = {
        **MixtureConfig.GGUF_KEYS, "expert_feed_forward_length": "n_ff_expert"
    }  # fmt: skip
    GGUF_NEUTRAL: ClassVar[Mapping[str, object]] = {
        **MixtureConfig.GGUF_NEUTRAL, "expert_weights_norm": True
    }  # fmt: skip

    n_expert: int = 128
    norm_topk_prob: bool = True  # in all GGUF files, which have no key for it
    n_ff_expert: int = 768
    expert_layers: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        size = check_count("n_ff_expert", self.n_ff_expert, ALL_LIMITS["n_ff"])
        set_fields(self, n_ff_expert=size)
        set_layers(self, "expert_layers", (True,) * self.n_layer)

    @classmethod
    def _fields_in(cls, config: Mapping[str, object]) -> dict[str, Any]:
        """Convert the content of a config.json to {field of this class: value}."""
        fields = super()._fields_in(config)
        n_layer = fields["n_layer"]
        dense = layers_in(DENSE_LAYERS, config.get(DENSE_LAYERS) or [], n_layer)
        others = all_but_every(check_count(STEP, config.get(STEP, 1)), n_layer)
        layers = tuple(not other and n not in dense for n, other in enumerate(others))
        return fields | {"expert_layers": layers}

    def to_hugging_face(self) -> dict[str, object]:
        """Return the content of a `config.json` with which `transformers` loads this model."""
        dense = [n for n, experts in enumerate(self.expert_layers) if not experts]
        return super().to_hugging_face() | {STEP: 1, DENSE_LAYERS: dense}


CONFIG: type[ModelConfig] = Qwen3MoeConfig
NAMES_OF_EXPERTS: Mapping[str, tuple[str, str]] = {
    "router": ("mlp.gate", "ffn_gate_inp"),
    "w_gate_experts": ("mlp.experts.*.gate_proj", "ffn_gate_exps"),
    "w_up_experts": ("mlp.experts.*.up_proj", "ffn_up_exps"),
    "w_down_experts": ("mlp.experts.*.down_proj", "ffn_down_exps"),
}
NAMES: Mapping[str, tuple[str, str]] = {**qwen3.NAMES, **NAMES_OF_EXPERTS}
GGUF, GGUF_ROPE_INTERLEAVED = "qwen3moe", False
attention, final, constants = qwen3.attention, llama.final, llama.constants


def feed_forward(o: Any, h: str, x: Value, y: Value, out: str = "o") -> Value:
    """Compute x1 = x + projected attention; return x1 plus the results of experts of norm(x1).

    out: as in Llama's.
    """
    if not o.c.has_experts(h):
        return llama.feed_forward(o, h, x, y, out)
    x = o.product(f"{h}proj", y, f"{h}w_{out}", f"{h}b_{out}", add=(f"{h}x1", x))
    y = o.norm(f"{h}rms2", x, f"{h}gamma2")
    return o.experts(h, x, y)

"""LFM2's mixtures of experts: LFM2's block, whose feed-forward adds a few of many experts.

The first layers have LFM2's feed-forward. In the others, the score of an expert is the sigmoid of
its logit. The choice adds a bias to the scores. The weight of a chosen expert is its score without
the bias, divided by the sum of the chosen scores plus 1e-6. Source: Lfm2Moe in `transformers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from gpt2block.checks import check_count, check_integer, check_number, set_fields
from gpt2block.models.architectures import lfm2, qwen3_moe
from gpt2block.models.architectures.architecture import Value
from gpt2block.models.architectures.lfm2 import Lfm2Config
from gpt2block.models.architectures.qwen3_moe import Qwen3MoeConfig
from gpt2block.models.config import ALL_LIMITS, Experts, ModelConfig, Shapes
from gpt2block.models.config.mixture import MixtureConfig

SIGMOID: Mapping[str, object] = {"expert_gating_func": 2}  # key of GGUF files


@dataclass(frozen=True)
class Lfm2MoeConfig(MixtureConfig, Lfm2Config):
    """Sizes of an LFM2 model with experts. n_ff: channels in layers without experts.

    n_dense: layers without experts, which are the first ones. n_ff_expert: channels of an expert.
    use_expert_bias: whether the choice of experts has a bias. routed_scaling_factor: factor of the
    weights of experts.
    """

    NAME: ClassVar[str] = "Lfm2Moe"
    MODEL_TYPE: ClassVar[str] = "lfm2_moe"
    SIZES: ClassVar[Mapping[str, tuple[str, ...]]] = Qwen3MoeConfig.SIZES
    HONOURED: ClassVar[tuple[str, ...]] = (*Lfm2Config.HONOURED, "routed_scaling_factor")
    FLAGS: ClassVar[tuple[str, ...]] = (*Lfm2Config.FLAGS, "norm_topk_prob", "use_expert_bias")
    OTHERS: ClassVar[Mapping[str, str]] = {
        **Lfm2Config.OTHERS, "n_dense": "num_dense_layers",
        "routed_scaling_factor": "routed_scaling_factor",
    }  # fmt: skip
    ABSENT: ClassVar[Mapping[str, object]] = {**Lfm2Config.ABSENT, "n_dense": 2}
    GGUF_KEYS: ClassVar[Mapping[str, str]] = {
        **Lfm2Config.GGUF_KEYS, **Qwen3MoeConfig.GGUF_KEYS, "leading_dense_block_count": "n_dense"
    }  # fmt: skip
    GGUF_NEUTRAL: ClassVar[Mapping[str, object]] = {
        **MixtureConfig.GGUF_NEUTRAL, "expert_weights_norm": True, **SIGMOID
    }  # fmt: skip

    n_expert: int = 32
    n_expert_used: int = 4
    norm_topk_prob: bool = True  # in all GGUF files, which have no key for it
    n_dense: int = 0  # in GGUF files without a key for it
    n_ff_expert: int = 1792
    use_expert_bias: bool = True
    routed_scaling_factor: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        expected = f"a number of layers up to {self.n_layer}"
        dense = check_integer("num_dense_layers", self.n_dense, 0, self.n_layer, expected)
        size = check_count("n_ff_expert", self.n_ff_expert, ALL_LIMITS["n_ff"])
        limits = 2.0**-20, 2.0**20, "a number from 2^-20 to 2^20"
        factor = check_number("routed_scaling_factor", self.routed_scaling_factor, *limits)
        set_fields(self, n_dense=dense, n_ff_expert=size, routed_scaling_factor=factor)

    @property
    def expert_layers(self) -> tuple[bool, ...]:
        """Whether each layer has experts."""
        return tuple(n >= self.n_dense for n in range(self.n_layer))

    @property
    def experts(self) -> Experts | None:
        """The mixtures of experts of the layers; None if there are none."""
        of, factor = super().experts, self.routed_scaling_factor
        return None if of is None else of._replace(sigmoid=True, factor=factor, eps=1e-6)

    def _shapes(self, experts: bool) -> Shapes:
        bias = {"b_router": (self.n_expert,)} if experts and self.use_expert_bias else {}
        return {**super()._shapes(experts), **bias}

    @classmethod
    def _fields_in(cls, config: Mapping[str, object]) -> dict[str, Any]:
        """Convert the content of a config.json to {field of this class: value}."""
        return super()._fields_in({**config, "block_auto_adjust_ff_dim": False})

    def gguf_settings(self) -> dict[str, object]:
        """Return {key: value} of the fields that have keys in GGUF files, and of the sigmoid."""
        return {**super().gguf_settings(), **SIGMOID}


CONFIG: type[ModelConfig] = Lfm2MoeConfig
NAMES: Mapping[str, tuple[str, str]] = {
    **lfm2.NAMES,
    "router": ("feed_forward.gate", "ffn_gate_inp"),
    "b_router": ("=feed_forward.expert_bias", "=exp_probs_b.bias"),
    "w_gate_experts": ("feed_forward.experts.*.w1", "ffn_gate_exps"),
    "w_up_experts": ("feed_forward.experts.*.w3", "ffn_up_exps"),
    "w_down_experts": ("feed_forward.experts.*.w2", "ffn_down_exps"),
}
GGUF, GGUF_ROPE_INTERLEAVED = "lfm2moe", False
attention, final, constants = lfm2.attention, lfm2.final, lfm2.constants


def feed_forward(o: Any, h: str, x: Value, y: Value) -> Value:
    """Compute a block's second half as Qwen3's mixtures do; w_out projects a convolution."""
    return qwen3_moe.feed_forward(o, h, x, y, out="out" if o.c.has_conv(h) else "o")

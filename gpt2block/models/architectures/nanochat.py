"""nanochat: a Llama whose norms have no weights, with ReLU squared in the feed-forward.

A norm also follows the embedding. nanochat normalizes heads of q and k after RoPE. Here the norms
precede RoPE, with equal results: rotating pairs of channels changes no sum of squares. RoPE rotates
by negative angles.
Logits are capped. Kernels of norms read weights of one, because nanochat has none.
Source: Karpathy, nanochat (2025), and NanoChat in `transformers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from gpt2block.checks import check_number, set_fields
from gpt2block.models.architectures import llama
from gpt2block.models.architectures.architecture import Value
from gpt2block.models.config import Divided, ModelConfig, Scales, Settings, Shapes
from gpt2block.models.config.llama import LlamaConfig

ONES, HEAD_ONES = "ones", "head_ones"


@dataclass(frozen=True)
class NanoChatConfig(LlamaConfig):
    """Sizes of a nanochat model. attention_bias: whether Q, K, V, output projections have biases.

    logits_cap: the limit of the magnitudes of logits, or None.
    """

    NAME: ClassVar[str] = "NanoChat"
    MODEL_TYPE: ClassVar[str] = "nanochat"
    HONOURED: ClassVar[tuple[str, ...]] = ("final_logit_softcapping",)
    FLAGS: ClassVar[tuple[str, ...]] = (*ModelConfig.FLAGS, "attention_bias")
    OTHERS: ClassVar[Mapping[str, str]] = {
        **LlamaConfig.OTHERS, "logits_cap": "final_logit_softcapping"
    }  # fmt: skip
    SETTINGS: ClassVar[Settings] = (
        ("hidden_act", ("relu2",), "the feed-forward computes the square of ReLU only"),
        *(each for each in LlamaConfig.SETTINGS if each[0] == "quantization_config"),
    )
    EMBEDDING_NORM: ClassVar[str] = ONES
    DIVIDED: ClassVar[Divided] = ()  # ReLU squared is not linear: no scaling of weights

    logits_cap: float | None = 15.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.logits_cap is not None:
            given = "logits_cap", self.logits_cap, 2.0**-20, 2.0**20
            set_fields(self, logits_cap=check_number(*given, "None, or 2^-20 to 2^20"))

    @property
    def scales(self) -> Scales:
        """Return the scalar factors and limits of a forward pass."""
        return Scales(self.eps, cap=self.logits_cap)

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys have norms."""
        return True

    def frequencies(self) -> NDArray[np.float64]:
        """Return Llama's frequencies with negative signs, in radians per position."""
        return -super().frequencies()

    def block_shapes(self) -> Shapes:
        """Return {name: shape} of a block's tensors: no norm weights, two feed-forward matrices."""
        shapes, C, FF = super().block_shapes(), self.n_embd, self.n_ff
        kept = {name: shapes[name] for name in ("w_qkv", "w_o", "b_qkv", "b_o") if name in shapes}
        return {**kept, "w_fc": (C, FF), "w_proj": (FF, C)}

    def outer_shapes(self) -> tuple[Shapes, Shapes]:
        """Return {name: shape} of the tensors before and after the blocks."""
        return super().outer_shapes()[0], {}

    def to_hugging_face(self) -> dict[str, object]:
        """Return the content of a `config.json` with which `transformers` loads this model."""
        return super().to_hugging_face() | {"hidden_act": "relu2"}


CONFIG: type[ModelConfig] = NanoChatConfig
_SHARED = ("wte", "w_qkv b_qkv", "w_o b_o", "lm_head")
NAMES: Mapping[str, tuple[str, str]] = {
    **{name: llama.NAMES[name] for name in _SHARED},
    "w_fc": ("mlp.fc1", "ffn_up"),
    "w_proj": ("mlp.fc2", "ffn_down"),
}
GGUF, GGUF_ROPE_INTERLEAVED = "", False


def constants(config: NanoChatConfig, vectors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return {name: tensor}: Llama's constants, and vectors of ones as the weights of norms."""
    sizes = {ONES: config.n_embd, HEAD_ONES: config.head_size}
    ones = {name: np.ones(size, np.float32) for name, size in sizes.items()}
    return {**llama.constants(config, vectors), **ones}


def attention(o: Any, h: str, x: Value) -> Value:
    """Compute a block's first half, attention, with norms and RoPE of q and k."""
    y = o.norm(f"{h}rms1", x, ONES)
    y = o.qkv(h, y, norms=(HEAD_ONES, HEAD_ONES))
    return o.attend(h, y)


def feed_forward(o: Any, h: str, x: Value, y: Value) -> Value:
    """Compute x1 = x + projected attention, and return the block's output x1 + ffn(norm(x1))."""
    x = o.product(f"{h}proj", y, f"{h}w_o", f"{h}b_o", add=(f"{h}x1", x))
    y = o.norm(f"{h}rms2", x, ONES)
    y = o.product(f"{h}fc", y, f"{h}w_fc")
    y = o.operand(f"{h}ff2_in", o.relu_squared(f"{h}relu2", y))
    return o.product(f"{h}ff2", y, f"{h}w_proj", add=(f"{h}output", x))


def final(o: Any, x: Value, head: bool = False) -> Value:
    """Return the final norm of x, from which the logits are computed."""
    return o.norm("rms_f", x, ONES)

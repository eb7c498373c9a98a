"""Qwen3.5 and Qwen3.6: three of four layers are gated delta nets, the others gated attention.

A gated delta net keeps a matrix S for each head instead of keys and values, and its memory does not
grow with the text: `reference.delta_inputs` and `reference.delta_rule` have the formulas. Attention
multiplies its result by sigmoid(gate), has norms of q and k, and RoPE rotates a part of each head.
Weights of norms are stored as w and multiply as 1 + w; the norm after the delta rule has plain
weights.

A block drafts tokens (multi-token prediction, MTP). From the residual stream of a token before the
final norm, and the next token's embedding, it predicts the token after the next one: the product of
w_eh with the norms of both rows, a layer with attention, and a norm. Embeddings and lm_head are the
model's. To draft further tokens, the block reads its own output instead of the stream.

Sources: Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule" (2024); Qwen3_5 in
`transformers`; DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section 2.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from gpt2block.checks import check_count, check_flag, set_fields
from gpt2block.errors import InputError
from gpt2block.models.architectures import gemma3, llama, qwen3
from gpt2block.models.architectures.architecture import Value
from gpt2block.models.config import (
    ALL_LIMITS,
    DRAFTING,
    HALVES,
    CheckpointLayout,
    DeltaNets,
    LayerCache,
    ModelConfig,
    Settings,
    Shapes,
)
from gpt2block.models.config.llama import (
    KINDS,
    PARTIAL,
    ROPE_BUFFERS,
    LlamaConfig,
    PartlyRotatedConfig,
    all_but_every,
    are_of_type,
    set_layers,
)

# Names that end the name of the matrix w_eh in files with a block that drafts tokens
JOINED = ("mtp.fc.weight", "nextn.eh_proj.weight")
# Names that end the names of such a block's own embeddings and lm_head
OWN = tuple(
    f"{name}.weight"
    for name in ("mtp.embed_tokens", "mtp.lm_head", "nextn.embed_tokens", "nextn.shared_head_head")
)
HEADS = ("n_k_head", "n_v_head", "k_size", "v_size")
DELTA, EVERY = "linear_attention", "full_attention_interval"
NEXT = "nextn_predict_layers"
UNREAD = r"|mtp\..+"  # matches the names of tensors of a block that is not read
RECURRENT = "attention.recurrent_layers"  # key of GGUF files: whether each layer is a delta net


@dataclass(frozen=True)
class Qwen35Config(PartlyRotatedConfig):
    """Sizes of a Qwen3.5 model; head_size, n_head and n_kv_head are those of attention.

    delta_layers: whether each layer is a gated delta net; () means all but every fourth. mtp:
    whether there is a block that drafts tokens (multi-token prediction). Other fields: see
    DeltaNets.
    """

    NAME: ClassVar[str] = "Qwen3_5"
    MODEL_TYPE: ClassVar[str] = "qwen3_5_text"
    ROTARY_PART: ClassVar[float] = 0.25
    ADDED_TO_NORMS: ClassVar[float] = 1.0
    FLAGS: ClassVar[tuple[str, ...]] = ModelConfig.FLAGS
    SIZES: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **LlamaConfig.SIZES,
        "n_k_head": ("linear_num_key_heads",), "n_v_head": ("linear_num_value_heads",),
        "k_size": ("linear_key_head_dim",), "v_size": ("linear_value_head_dim",),
    }  # fmt: skip
    ABSENT: ClassVar[Mapping[str, object]] = {
        "n_ctx": 32768, "eps": 1e-6, "n_kv_head": 4, "head_size": 256,
        "n_k_head": 16, "n_v_head": 32, "k_size": 128, "v_size": 128,
    }  # fmt: skip
    GGUF_KEYS: ClassVar[Mapping[str, str]] = {
        "ssm.group_count": "n_k_head", "ssm.time_step_rank": "n_v_head",
        "ssm.state_size": "k_size", "rope.dimension_count": "rotary",
    }  # fmt: skip
    GGUF_READ: ClassVar[tuple[str, ...]] = (
        "ssm.inner_size", EVERY, RECURRENT, "rope.dimension_sections", NEXT,
    )  # fmt: skip
    GGUF_NEUTRAL: ClassVar[Mapping[str, object]] = {"ssm.conv_kernel": 4}
    HONOURED: ClassVar[tuple[str, ...]] = (PARTIAL, "layer_types")
    SETTINGS: ClassVar[Settings] = (
        *LlamaConfig.SETTINGS,
        ("attention_bias", (False,), "projections of attention have no biases"),
        ("attn_output_gate", (True,), "attention has a gate"),
        ("output_gate_type", ("swish", "silu"), "the gate of a delta net is SiLU"),
        ("linear_conv_kernel_dim", (4,), "convolutions are over 4 tokens"),
    )
    FILES: ClassVar[CheckpointLayout] = LlamaConfig.FILES._replace(ignored=ROPE_BUFFERS + UNREAD)

    delta_layers: tuple[bool, ...] = ()
    n_k_head: int = 16
    n_v_head: int = 32
    k_size: int = 128
    v_size: int = 128
    tiled: bool = False
    mtp: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        set_layers(self, "delta_layers", all_but_every(4, self.n_layer))
        if all(self.delta_layers):
            raise InputError(f"layer_types: expected a layer with {KINDS[0]}, got none")
        set_fields(self, **{n: check_count(n, getattr(self, n), ALL_LIMITS[n]) for n in HEADS})
        check_flag("tiled", self.tiled)
        check_flag("mtp", self.mtp)
        if self.n_v_head % self.n_k_head:
            raise InputError(f"n_v_head {self.n_v_head} is not a multiple of n_k_head "
                             f"{self.n_k_head}")  # fmt: skip

    @property
    def delta_nets(self) -> DeltaNets | None:
        """Return the sizes of the layers that are gated delta nets; None if there are none."""
        return self._delta_nets if any(self.delta_layers) else None

    @property
    def _delta_nets(self) -> DeltaNets:
        heads = self.n_k_head, self.n_v_head, self.k_size, self.v_size
        return DeltaNets(self.delta_layers, *heads, self.tiled)

    @property
    def draft_config(self) -> Qwen35DraftConfig | None:
        """The config of the block that drafts tokens, a layer with attention; None without one."""
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        changed = {"n_layer": 1, "delta_layers": (False,), "mtp": False}
        return Qwen35DraftConfig(**{**own, **changed}) if self.mtp else None

    def with_tensors(self, names: Iterable[str]) -> Qwen35Config:
        """Return this config, without a block that drafts tokens if the file does not have it.

        A block with embeddings of its own is not read.
        """
        names = tuple(names)
        read = any(n.endswith(JOINED) for n in names) and not any(n.endswith(OWN) for n in names)
        return replace(self, mtp=self.mtp and read)

    @property
    def layer_caches(self) -> tuple[LayerCache, ...]:
        """Return the part of a kv_cache that each layer reads; gated delta nets read none."""
        widths = (0 if delta else self.kv_width for delta in self.delta_layers)
        return tuple(LayerCache(layer, width, width) for layer, width in enumerate(widths))

    def block_shapes(self) -> Shapes:
        """Return {name: shape} of the tensors in both kinds of blocks."""
        return {**self._shapes(any(self.delta_layers)), **self._shapes(False)}

    def shapes_of(self, layer: int) -> Shapes:
        """Return {name: shape} of the tensors of a layer's block."""
        return self._shapes(self.delta_layers[layer])

    def _shapes(self, delta: bool) -> Shapes:
        llama, of, C = super().block_shapes(), self._delta_nets, self.n_embd
        H, size = (self.n_v_head,), (self.head_size,)
        own: dict[str, tuple[int, ...]]
        if delta:
            own = {"w_in": (C, of.channels + of.values), "w_ba": (C, 2 * self.n_v_head)}
            own |= {"conv": (of.channels, 1, 4), "a_log": H, "dt_bias": H}
            own |= {"gamma_o": (self.v_size,), "w_out": (of.values, C)}
        else:
            own = {"w_qkv": llama["w_qkv"], "w_g": (C, self.q_width)}
            own |= {"gamma_q": size, "gamma_k": size, "w_o": llama["w_o"]}
        rest = {name: llama[name] for name in ("gamma2", "w_gate", "w_up", "w_down")}
        return {"gamma1": (C,), **own, **rest}

    def file_rows(self, name: str, layer: int) -> tuple[int, ...]:
        """Return the rows of each tensor of a file that has rows of a block's tensor `name`."""
        of = self._delta_nets
        rows = {"w_in": (of.channels, of.values), "w_ba": (of.n_v_head, of.n_v_head)}
        return {**rows, "w_g": (self.q_width, 0, 0)}.get(name) or super().file_rows(name, layer)

    def file_spans(self, name: str) -> tuple[tuple[int, int], ...]:
        """Return rows of files, where each head of q precedes its gate.

        In heads of q and k, the channels that RoPE rotates come first.
        """
        D, Q = self.head_size, 2 * self.q_width
        heads = range(0, Q, 2 * D)
        if name == "w_g":
            return tuple((at + D, at + 2 * D) for at in heads)
        if name != "w_qkv":
            return ()
        order = self.head_order or range(D)
        cuts = [n for n in range(1, D) if order[n] != order[n - 1] + 1]
        runs = [(order[a], order[b - 1] + 1) for a, b in pairwise([0, *cuts, D])]
        both = (*heads, *range(Q, Q + self.kv_width, D))
        ordered = [(at + begin, at + end) for at in both for begin, end in runs]
        return (*ordered, (Q + self.kv_width, Q + 2 * self.kv_width))

    @classmethod
    def _fields_in(cls, config: Mapping[str, object]) -> dict[str, Any]:
        """Convert the content of a config.json to {field of this class: value}."""
        fields = super()._fields_in(config)
        own = config.get("mtp_use_dedicated_embeddings")  # else they are the model's
        fields["mtp"] = config.get("mtp_num_hidden_layers") == 1 and not own
        types = config.get("layer_types")
        if types is None:
            every = check_count(EVERY, config.get(EVERY, 4))
            return fields | {"delta_layers": all_but_every(every, fields["n_layer"])}
        return fields | {"delta_layers": are_of_type(types, (KINDS[0], DELTA))}

    def to_hugging_face(self) -> dict[str, object]:
        """Return the content of a `config.json` with which `transformers` loads this model."""
        content = super().to_hugging_face()
        rope = {"rope_type": "default", "rope_theta": content.pop("rope_theta")}
        rope |= content.pop("rope_scaling") or {}
        types = [DELTA if delta else KINDS[0] for delta in self.delta_layers]
        return content | {
            "rope_parameters": rope | {PARTIAL: self.rotary_part}, "layer_types": types,
            "pad_token_id": None, "linear_conv_kernel_dim": 4,
            "mtp_num_hidden_layers": int(self.mtp),
        }  # fmt: skip

    @classmethod
    def gguf_fields(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return {field: value} of the keys of a GGUF file, which orders heads of v otherwise."""
        fields = super().gguf_fields(settings)
        n_v_head, n_layer = fields["n_v_head"] or 0, settings["block_count"]
        layers = settings.get(RECURRENT)
        if layers is None:
            layers = all_but_every(check_count(EVERY, settings.get(EVERY, 4)), n_layer)
        v_size = settings.get("ssm.inner_size", 0) // max(1, n_v_head)
        return fields | {
            "delta_layers": tuple(bool(each) for each in np.atleast_1d(layers)[:n_layer]),
            "v_size": v_size, "tiled": n_v_head > (fields["n_k_head"] or 0),
            "mtp": settings.get(NEXT) == 1,
        }  # fmt: skip

    def gguf_settings(self) -> dict[str, object]:
        """Return {key: value} of the fields that have keys in GGUF files."""
        drafting = {"block_count": self.n_layer + 1, NEXT: 1} if self.mtp else {}
        return super().gguf_settings() | drafting | {
            "ssm.conv_kernel": 4, "ssm.inner_size": self._delta_nets.values,
            RECURRENT: self.delta_layers + (False,) * self.mtp,
            "rope.dimension_sections": [self.rotary // 2, 0, 0, 0],
        }  # fmt: skip


class Qwen35DraftConfig(Qwen35Config):
    """Sizes of the block that drafts tokens: a model of one layer, which has attention."""

    READS_STREAM: ClassVar[bool] = True

    def outer_shapes(self) -> tuple[Shapes, Shapes]:
        """Return {name: shape} of the tensors before and after the block, without lm_head."""
        (first, last), C = super().outer_shapes(), self.n_embd
        joining = {"gamma_e": (C,), "gamma_h": (C,), **dict.fromkeys(HALVES, (C, C))}
        return {**first, **joining}, last


CONFIG: type[ModelConfig] = Qwen35Config
NAMES: Mapping[str, tuple[str, str]] = {
    **qwen3.NAMES,
    "w_g": qwen3.NAMES["w_qkv b_qkv"],  # each head's gate follows the head's rows of q
    "w_in": ("linear_attn.in_proj_qkv+linear_attn.in_proj_z", "attn_qkv+attn_gate"),
    "w_ba": ("linear_attn.in_proj_b+linear_attn.in_proj_a", "ssm_beta+ssm_alpha"),
    "conv": ("linear_attn.conv1d", "ssm_conv1d"),
    "a_log": ("=linear_attn.A_log", "=ssm_a"),
    "dt_bias": ("=linear_attn.dt_bias", "=ssm_dt.bias"),
    "gamma_o": ("linear_attn.norm", "ssm_norm"),
    "w_out": ("linear_attn.out_proj", "ssm_out"),
    "gamma2": ("post_attention_layernorm", "post_attention_norm"),
    f"{DRAFTING}gamma_e": ("pre_fc_norm_embedding", "nextn.enorm"),
    f"{DRAFTING}gamma_h": ("pre_fc_norm_hidden", "nextn.hnorm"),
    f"{DRAFTING}w_eh": ("fc", "nextn.eh_proj"),
    f"{DRAFTING}gamma_f": ("norm", "nextn.shared_head_norm"),
}
GGUF, GGUF_ROPE_INTERLEAVED = "qwen35", False
final = gemma3.final


def attention(o: Any, h: str, x: Value) -> Value:
    """Compute a block's first half: a gated delta net, or attention with a gate."""
    if o.c.is_delta(h):
        y = o.norm(f"{h}rms1", x, f"{h}gamma1_and_1")
        return o.delta(h, y)
    y = o.norm(f"{h}rms1", x, f"{h}gamma1_and_1")
    gate = o.gate_of_heads(h, y)
    norms = (f"{h}gamma_q_and_1", f"{h}gamma_k_and_1")
    y = o.attend(h, o.qkv(h, y, norms))
    return o.gated_heads(h, gate, y)


def feed_forward(o: Any, h: str, x: Value, y: Value) -> Value:
    """Compute a block's second half as Llama does; w_out projects the result of a delta net."""
    out = "out" if o.c.is_delta(h) else "o"
    return llama.feed_forward(o, h, x, y, out, "gamma2_and_1")


def constants(config: Qwen35Config, vectors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return {name: tensor} of RoPE frequencies, 1 + w of norms' weights w, and exp(a_log).

    Weights of norms of q and k have the order of the heads' channels.
    """
    found: dict[str, np.ndarray] = {"frequencies": config.frequencies()}
    for n, delta in enumerate(config.delta_layers):
        norms = ("gamma1", "gamma2") if delta else ("gamma1", "gamma_q", "gamma_k", "gamma2")
        for name in (f"h.{n}.{norm}" for norm in norms):
            gamma = 1 + vectors[name]
            if name[-1] in "qk" and config.head_order and np.ndim(vectors[name]):
                gamma = gamma[list(config.head_order)]
            found[f"{name}_and_1"] = gamma
        if delta:
            found[f"h.{n}.rate"] = np.exp(vectors[f"h.{n}.a_log"])
    others = ("gamma_f", *("gamma_e", "gamma_h") * config.READS_STREAM)
    return found | {f"{name}_and_1": 1 + vectors[name] for name in others}

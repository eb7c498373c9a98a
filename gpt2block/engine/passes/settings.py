"""Settings of a model or block that the steps of its forward passes have."""

from __future__ import annotations

from typing import Any, NamedTuple

from gpt2block.models.architectures.architecture import Value
from gpt2block.models.config import DeltaNets, Experts, LayerEmbeddings, ModelConfig, Scales


class PassSettings(NamedTuple):
    """Settings of a model or block that the operations of every pass use.

    causal: whether attention is causal, for a pass over a single block. rope: the name of the RoPE
    frequencies of each layer, or (). half_split: whether RoPE pairs channels of the two halves of a
    head instead of neighbours. own: whether each sequence has its own frequencies. qk_norm,
    windows, scales: as in ModelConfig; windows is () if no layer has a window. embedding_norm: as
    EMBEDDING_NORM of ModelConfig.
    gelu: whether the gate of the feed-forward is GELU. delta_nets: as in ModelConfig.
    convs: whether each layer has a short convolution in place of attention; () if none has. values:
    whether heads of V have norms. layers: as `layer_embeddings` of ModelConfig. readers: prefixes
    of the names of the layers that read the keys and values of an earlier layer. experts: as in
    ModelConfig.
    """

    n_head: int
    n_kv_head: int
    scales: Scales
    head_size: int
    causal: bool = True
    half_split: bool = True
    rope: tuple[str, ...] = ()
    qk_norm: bool = False
    gelu: bool = False
    windows: tuple[int | None, ...] = ()
    embedding_norm: str = ""
    own: bool = False
    values: bool = False
    layers: LayerEmbeddings | None = None
    readers: tuple[str, ...] = ()
    delta_nets: DeltaNets | None = None
    convs: tuple[bool, ...] = ()
    experts: Experts | None = None

    @classmethod
    def of(cls, config: ModelConfig) -> PassSettings:
        """Return the PassSettings of a model with this config."""
        sizes = (config.n_head, config.n_kv_head, config.scales, config.head_size)
        return cls(
            *sizes,
            rope=config.frequencies_of_layers,
            qk_norm=config.qk_norm,
            gelu=config.GATE == "gelu",
            windows=config.windows,
            embedding_norm=config.EMBEDDING_NORM,
            own=config.short_context > 0,
            values=config.VALUE_NORMS,
            layers=config.layer_embeddings,
            readers=tuple(f"h.{n}." for n in config.reading_layers),
            delta_nets=config.delta_nets,
            convs=config.conv_layers,
            experts=config.experts,
        )

    def frequencies_of(self, h: str) -> str:
        """Return the name of a layer's RoPE frequencies, or "". h: prefix of the layer's names."""
        return self.rope[_layer(h)] if self.rope else ""

    def is_delta(self, h: str) -> bool:
        """Return whether a layer is a gated delta net. h: the prefix of the layer's names."""
        return self.delta_nets is not None and self.delta_nets.layers[_layer(h)]

    def has_conv(self, h: str) -> bool:
        """Return whether a layer has a short convolution. h: the prefix of the layer's names."""
        return bool(self.convs) and self.convs[_layer(h)]

    def has_experts(self, h: str) -> bool:
        """Return whether a layer is a mixture of experts. h: the prefix of the layer's names."""
        return self.experts is not None and self.experts.layers[_layer(h)]

    def columns_of(self, h: str) -> dict[str, Any]:
        """Return the options of `gated_columns` that select a layer's part of the rows `layers`."""
        assert self.layers is not None
        return {"first": _layer(h) * self.layers.width, **self.gate}

    @property
    def heads(self) -> dict[str, Any]:
        return {"n_head": self.n_head, "n_kv_head": self.n_kv_head}

    def scores(self, h: str) -> dict[str, Any]:
        """Return a layer's attention options softmax_scale and window, without unset ones."""
        window = self.windows[_layer(h)] if self.windows else None
        options = {"softmax_scale": self.scales.attention, "window": window}
        return {name: value for name, value in options.items() if value is not None}

    @property
    def head_norms(self) -> dict[str, Any]:
        """The options of norms of heads: eps, and `values` if heads of V have norms, too."""
        return {"eps": self.scales.eps, **({"values": True} if self.values else {})}

    @property
    def gate(self) -> dict[str, Any]:
        """The options that select a gated feed-forward's activation; an empty dict for SiLU."""
        return {"gelu": True} if self.gelu else {}

    @property
    def multiplied(self) -> dict[str, Any]:
        """The options with RoPE's `factor`, which multiplies rotated pairs; an empty dict for 1."""
        return {} if self.scales.rope == 1 else {"factor": self.scales.rope}

    @property
    def grown(self) -> dict[str, Any]:
        """The options with the `growth` of queries; an empty dict if there is none."""
        return {} if self.scales.growth is None else {"growth": self.scales.growth}

    @property
    def turn(self) -> dict[str, Any]:
        """The options of a RoPE step: numbers of heads, half_split, factor and growth."""
        return {**self.heads, "half_split": self.half_split, **self.multiplied, **self.grown}

    def step_of_rope(self, h: str, qkv: Value) -> tuple[str, tuple[Value, ...]]:
        """Return the name and the inputs of the operation that rotates rows [Q | K | V]."""
        inputs = (qkv, "positions", self.frequencies_of(h))
        return ("rope_packed", (*inputs, "row")) if self.own else ("rope_qkv", inputs)


def _layer(h: str) -> int:
    return int(h.split(".")[1]) if h else 0  # a single block has no prefix

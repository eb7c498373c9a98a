"""Forward passes of a block with one step per operation or fused steps, and of a model in NumPy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from gpt2block.engine.passes.executor import HI_LO, Executor
from gpt2block.engine.passes.forward import Pass, Product
from gpt2block.models.architectures.architecture import To, Value
from gpt2block.models.config import DeltaNets, LayerEmbeddings, ModelConfig, Scales


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
    of the names of the layers that read the keys and values of an earlier layer.
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


class StepPass(Pass):
    """A forward pass with a step per operation: 10 steps in a GPT-2 block, 12 in a Llama block."""

    def __init__(self, do: Executor, settings: PassSettings) -> None:
        self.do, self.c = do, settings

    def norm(self, name: str, x: Value, gamma: str, beta: str = "", to: To = ()) -> Value:
        if beta:
            return self.do(name, "layernorm", (x, gamma, beta), eps=self.c.scales.eps)
        return self.do(name, "rmsnorm", (x, gamma), eps=self.c.scales.eps)

    def _product(self, p: Product) -> Value:
        y = self.do(p.name, "matmul_bias", (p.a, p.w, p.bias))
        if p.gelu:
            y = self.do(p.gelu, "gelu", (y,))
        return self.do(p.add, "add", (p.residual, y)) if p.add else y

    def qkv(self, h: str, x: Value, norms: To = ()) -> Value:
        y = self.product(f"{h}qkv", x, f"{h}w_qkv", f"{h}b_qkv", to=("attention",))
        if norms:
            options = {**self.c.heads, **self.c.head_norms}
            y = self.do(f"{h}qk", "qk_norm", (y, *norms), **options)
        if not self.c.rope:
            return y
        return self.do(f"{h}rope", *self.c.step_of_rope(h, y), **self.c.turn)

    def attend(self, h: str, qkv: Value, to: To = ()) -> Value:
        options = {**self.c.heads, **self.c.scores(h), "causal": self.c.causal}
        return self.do(f"{h}attn", "attention", (qkv,), **options)

    def gated(self, h: str, x: Value, to: To = ()) -> Value:
        gate = self.product(f"{h}gate", x, f"{h}w_gate", f"{h}b_gate")
        up = self.product(f"{h}up", x, f"{h}w_up", f"{h}b_up")
        return self.do(f"{h}ff", "silu_mul", (gate, up), **self.c.gate)


class ModelStepPass(StepPass):
    """A StepPass over the packed rows (tokens of all sequences), with attention over a kv_cache.

    longest: the number of tokens of the longest sequence.
    """

    def __init__(self, do: Executor, settings: PassSettings, longest: int) -> None:
        super().__init__(do, settings)
        self.longest, self._last = longest, False

    def norm(self, name: str, x: Value, gamma: str, beta: str = "", to: To = ()) -> Value:
        if self._last and to == ("lm_head",):
            x = self.do("last.x", "take", (x, "last"))
        return super().norm(name, x, gamma, beta, to)

    def attend(self, h: str, qkv: Value, to: To = ()) -> Value:
        return self._over_cache(f"{h}attn", h, qkv)

    def last_rows(self, x: Value, y: Value) -> tuple[ModelStepPass, Value, Value]:
        """Keep all rows until the final norm, as NumPy products of fewer rows round differently."""
        self._last = True
        return self, x, y


class Normed(NamedTuple):
    """Rows whose RMSNorm is deferred: a product that reads the rows fuses the norm if it can."""

    name: str
    x: Value
    gamma: str


class BlockPass(StepPass):
    """A forward pass of a block in few steps, as products fuse residual, GELU and norm.

    bounds: the largest magnitude of each result by name, for float32 on tensor cores, where
    operands are hi/lo; else None. split_k: whether projections may split the sum over K.
    """

    def __init__(
        self,
        do: Executor,
        settings: PassSettings,
        bounds: Mapping[str, float] | None = None,
        split_k: bool = False,
    ) -> None:
        super().__init__(do, settings)
        self.bounds, self.split_k = bounds, split_k

    def _operand(self, name: str) -> dict[str, Any]:
        """Return the options that set the format of the named result, an operand of a product."""
        if self.bounds is None:
            return {}
        return {"dtype": HI_LO, "bound": self.bounds.get(name)}

    def norm(self, name: str, x: Value, gamma: str, beta: str = "", to: To = ()) -> Value:
        if not beta:
            return Normed(name, x, gamma)
        options = {"eps": self.c.scales.eps, **self._operand(name)}
        return self.do(name, "layernorm", (x, gamma, beta), **options)

    def _with_norm(self, x: Value) -> Value:
        """Return x. If x is Normed (rows with a deferred norm), compute and return its norm."""
        return super().norm(*x) if isinstance(x, Normed) else x

    def _product(self, p: Product) -> Value:
        if isinstance(p.a, Normed) and not self.do.has(p.bias):
            normed = (p.a.x, p.a.gamma, p.w)
            return self.do(p.name, "rmsnorm_matmul", normed, eps=self.c.scales.eps)
        a = self._with_norm(p.a)
        if p.add:
            inputs = (a, p.w, p.bias, p.residual)
            return self.do(p.result, "gemm", inputs, split_k=self.split_k)
        operand = self._operand(p.result) if p.to else {}
        return self.do(p.result, "gemm", (a, p.w, p.bias), **p.options, **operand)

    def gated(self, h: str, x: Value, to: To = ()) -> Value:
        gate, up = f"{h}w_gate", f"{h}w_up"
        biased = any(self.do.has(f"{h}b_{name}") for name in ("gate", "up"))
        options = {"eps": self.c.scales.eps, **self.c.gate}
        if isinstance(x, Normed) and not biased:
            return self.do(f"{h}ff", "rmsnorm_ffn", (x.x, x.gamma, gate, up), **options)
        return super().gated(h, self._with_norm(x), to)

"""Forward passes: the operations of a pass, and the order in which an architecture calls them.

An architecture is three functions that are written like the formulas of its block, for example
`gpt2block.models.architectures.gpt2`. A pass decides which kernels run, and which operations they
fuse.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from copy import copy
from typing import Any, Literal, NamedTuple

from gpt2block.engine.passes.executor import Executor, Renamed
from gpt2block.models.architectures.architecture import Architecture, To, Value
from gpt2block.models.config import ModelConfig

SPANS = ("row", "positions", "held")  # inputs of delta_spans
Want = Literal["last", "logits", "rows", "hidden", "stream", "log_likelihood", "likeliest"]


class Product(NamedTuple):
    """A product `a @ w + bias`, followed by GELU or a residual addition, which kernels can fuse.

    add: the name of the sum with the residual, or "". gelu: the name of the GELU, or "". result:
    the name of the final result. options: options of a kernel that fuses GELU. to: as in `Pass`.
    """

    name: str
    a: Value
    w: str
    bias: str
    add: str
    residual: Value
    gelu: str
    to: To
    result: str
    options: Mapping[str, Any]


class Pass(ABC):
    """The operations of a forward pass, and the Executor that runs its steps.

    Arguments of an operation are the names of its result and weights. `to` has the names of the
    weights of the products that read the result, or of the step that reads the result, such as
    "rope"; these names determine the format of the result: floats, 16 bits, hi/lo or an `Operand`.
    With an empty `to`, the result is float32. h is the prefix of a layer's names.
    """

    do: Executor
    c: Any  # an instance of gpt2block.engine.passes.blocks.PassSettings
    kv: Mapping[str, Any] = {}  # the option of steps that read or write a kv_cache of FP8
    longest: int  # upper bound of the new tokens of a sequence, in passes over several tokens
    of_stream: Mapping[str, Any] = {}  # options for RMSNorm of the residual stream
    to_rope: To = ("rope",)  # `to` of a product whose result RoPE reads
    layers: Value = None  # the rows of all layers' embeddings, if the architecture has them
    # options of gated delta nets: whether later rows of a slot than its first may be refused
    of_steps: Mapping[str, Any] = {}
    spans: Value = None  # the result of `delta_spans`
    stream: Value = "stream"  # rows of another model's residual stream, if the model reads them
    # called with the executor and the residual stream of all rows after the layers, by a pass whose
    # output is "last" or None
    draft: Callable[[Executor, Value], None] | None = None

    def embed(self) -> Value:
        """Return a row per token: token embedding, plus position embedding if there is one.

        If the architecture has an embedding norm, it is applied to the rows.
        """
        if self.c.delta_nets is not None:
            self.spans = self.do("spans", "delta_spans", SPANS, **self.of_steps)
        inputs, factor = ("tokens", "positions", "wte", "wpe"), self.c.scales.embedding
        scaled = {} if factor == 1 else {"factor": factor}
        if self.do.has("gamma_e_and_1"):
            return self._combined(self.do("vectors", "encoder_rows", inputs, **scaled))
        if not self.c.embedding_norm:
            x = self.do("embedding", "encoder_rows", inputs, **scaled)
            self.layers = self._layers(x) if self.c.layers else None
            return x
        normed = self.do("vectors", "encoder_rows", inputs, **scaled), self.c.embedding_norm
        return self.do("embedding", "rmsnorm", normed, eps=self.c.scales.eps, **self.of_stream)

    def _combined(self, x: Value) -> Value:
        """Return norm(x) @ w_e + norm(stream) @ w_h. x: embeddings of tokens."""
        y = self.norm("rms_e", x, "gamma_e_and_1", to=("w_e",))
        y = self.product("of_token", y, "w_e")
        z = self.norm("rms_h", self.stream, "gamma_h_and_1", to=("w_h",))
        return self.product("of_stream", z, "w_h", add=("embedding", y))

    def _layers(self, x: Value) -> Value:
        """Compute the rows of all layers' embeddings from tokens and their embeddings x."""
        y = self.operand("layers_in", x, to=("w_layers",))
        y = self.product("layers_proj", y, "w_layers")
        rows = ("tokens", "positions", "layer_table", "")
        rows = self.do("layers_rows", "encoder_rows", rows, factor=self.c.layers.factor)
        inputs, eps = (y, "gamma_layers_scaled", rows), self.c.layers.eps
        return self.do("layers", "rmsnorm_groups", inputs, into=rows, eps=eps)

    @abstractmethod
    def norm(self, name: str, x: Value, gamma: str, beta: str = "", to: To = ()) -> Value:
        """Compute LayerNorm, or RMSNorm if beta is ""."""

    def product(
        self,
        name: str,
        a: Value,
        w: str,
        bias: str = "",
        add: tuple[str, Value] = ("", None),
        gelu: str = "",
        to: To = (),
    ) -> Value:
        """Compute a @ w + bias, then GELU or a residual sum. add: name of the sum, and residual."""
        result, options = add[0] or gelu or name, {"gelu": True} if gelu else {}
        return self._product(Product(name, a, w, bias, *add, gelu, to, result, options))

    @abstractmethod
    def _product(self, p: Product) -> Value:
        """Compute a product with the kernels of this pass."""

    def operand(self, name: str, x: Value, to: To) -> Value:
        """Convert the residual stream x to the format of products that read x without a norm."""
        return x

    def add_norm(self, name: str, x: Value, y: Value, gamma: str, scale: str = "") -> Value:
        """Compute x + RMSNorm(y), where y is the result of a product, times `scale` if given."""
        inputs = (y, gamma, x, *((scale,) if scale else ()))
        return self.do(name, "rmsnorm_add", inputs, into=x, eps=self.c.scales.eps)

    @abstractmethod
    def qkv(self, h: str, x: Value, norms: To = ()) -> Value:
        """Compute queries, keys and values, with RoPE applied if the architecture has it.

        norms: names of weights, for the norms of q's heads and of k's heads, which precede RoPE; ()
        if the architecture has no such norms.
        """

    def queries(self, h: str, x: Value, norm: str) -> Value:
        """Compute queries, with a norm of heads and RoPE, in a layer without keys and values."""
        y = self.product(f"{h}queries", x, f"{h}w_q", f"{h}b_q", to=self.to_rope)
        inputs = (y, "positions", self.c.frequencies_of(h), norm, norm)
        options = {**self.c.heads, "eps": self.c.scales.eps}
        return self.do(f"{h}q_rope", "qk_norm_rope", inputs, into=y, **options, queries=True)

    def rotate(self, h: str, qkv: Value, norms: To) -> Value:
        """Apply RoPE in place to rows [Q | K | V]; first the norms of q and k heads, if `norms`."""
        if norms:
            inputs = (qkv, "positions", self.c.frequencies_of(h), *norms)
            options = {**self.c.heads, **self.c.head_norms}
            return self.do(f"{h}rope", "qk_norm_rope", inputs, into=qkv, **options)
        op, inputs = self.c.step_of_rope(h, qkv)
        return self.do(f"{h}rope", op, inputs, into=qkv, **self.c.turn)

    def attend(self, h: str, qkv: Value, to: To = ()) -> Value:
        """Compute attention of each query over the keys up to its position, in the kv_cache."""
        return self._over_cache(f"{h}attn", h, qkv)

    def _append(self, h: str, qkv: Value) -> None:
        """Write keys and values to the kv_cache, unless the layer reads an earlier layer's."""
        if h not in self.c.readers:
            self.do(f"{h}kv", "kv_append", (qkv, f"{h}k", f"{h}v", "row", "positions"), **self.kv)

    def _over_cache(self, name: str, h: str, qkv: Value) -> Value:
        """Write keys and values to the kv_cache; compute attention of packed rows over it."""
        self._append(h, qkv)
        options = {"n_head": self.c.n_head, "longest": self.longest, **self.c.scores(h)}
        inputs = (qkv, f"{h}k", f"{h}v", "cu_seqlens", "start")
        op = "attention_queries" if h in self.c.readers else "attention_packed"
        return self.do(name, op, inputs, **options, **self.kv)

    def gate_of_heads(self, h: str, x: Value) -> Value:
        """Compute the gate of attention's result, in the format of this result."""
        return self.product(f"{h}g", x, f"{h}w_g")

    def gated_heads(self, h: str, gate: Value, y: Value, to: To = ()) -> Value:
        """Multiply attention's result y by sigmoid(gate)."""
        y = self.do(f"{h}heads", "silu_mul", (gate, y), into=gate, sigmoid=True)
        return self.operand(f"{h}mixer", y, to)

    def delta(self, h: str, x: Value, to: To = ()) -> Value:
        """Compute a gated delta net with its norm, without the output projection."""
        y = self.product(f"{h}in", x, f"{h}w_in")
        rows = y, self.product(f"{h}ba", x, f"{h}w_ba")
        states, of = (f"{h}state", f"{h}recent"), self.c.delta_nets
        options: dict[str, Any] = {"n_k_head": of.n_k_head, "k_size": of.k_size}
        inputs = (*rows, f"{h}conv", f"{h}rate", f"{h}dt_bias", "row", self.spans, *states)
        mixed = self.do(f"{h}mixed", "delta_inputs", inputs, **options)
        options |= {**({"tiled": True} if of.tiled else {}), **self.of_steps}
        pool = () if self.of_steps else (f"{h}pool", "saved")
        inputs = (*rows, mixed, f"{h}conv", self.spans, *states, *pool)
        o = self.do(f"{h}delta", "delta_rule", inputs, **options)
        del mixed  # free its memory for the result of the norm
        gated = (o, y, f"{h}gamma_o")
        o = self.do(f"{h}normed", "gated_rmsnorm", gated, into=o, eps=self.c.scales.eps)
        return self.operand(f"{h}mixer", o, to)

    def short_conv(self, h: str, bcx: Value, to: To = ()) -> Value:
        """Compute the short convolution of rows [B | C | x]; write rows of u to the kv_cache."""
        return self._short_conv(h, bcx)

    def _short_conv(self, h: str, bcx: Value, **options: Any) -> Value:
        inputs = (bcx, f"{h}taps", f"{h}b_taps", f"{h}k", "row", "positions")
        return self.do(f"{h}conv", "short_conv", inputs, **options)

    @abstractmethod
    def gated(self, h: str, x: Value, to: To = ()) -> Value:
        """Compute silu(gate) * up, or gelu(gate) * up if `PassSettings.gelu` is set."""

    def gated_by_layer(self, h: str, gate: Value) -> Value:
        """Compute gelu(gate) or silu(gate), as `gated`, times the layer's columns of `layers`."""
        inputs, options = (gate, self.layers), self.c.columns_of(h)
        return self.do(f"{h}layer_ff", "gated_columns", inputs, into=gate, **options)

    def relu_squared(self, name: str, x: Value) -> Value:
        """Compute max(x, 0)² in place, where x is the result of a product."""
        return self.do(name, "relu_squared", (x,), into=x)

    def last_rows(self, x: Value, y: Value) -> tuple[Pass, Value, Value]:
        """Return a pass for the remaining steps, then each sequence's last row of x and of y."""
        raise NotImplementedError

    def logits(self, x: Value) -> Value:
        """Compute the product with lm_head. Cap the logits if the architecture caps logits."""
        if self.c.scales.cap is None:
            return self.product("logits", x, "lm_head")
        y = self.product("uncapped", x, "lm_head")
        return self.do("logits", "cap", (y,), limit=self.c.scales.cap)

    def scores(self, x: Value, likeliest: bool = False) -> Value:
        """Compute, for each row, the log-likelihood of the row's target (the next token).

        likeliest: also compute the most likely token.
        """
        raise NotImplementedError


def block(o: Pass, of: Architecture, x: Value, h: str = "") -> Value:
    """Add the steps of one block to the forward pass `o`, and return the block's output."""
    return of.feed_forward(o, h, x, of.attention(o, h, x))


def forward(o: Pass, of: Architecture, config: ModelConfig, want: Want | None) -> Value:
    """Run a model on the pass `o` up to the output `want`. None: stop after the last K and V.

    "last": logits of the last row of each sequence. "logits": logits of all rows. "rows": the final
    norm, as input of a later product with lm_head. "hidden": the final norm as floats. "stream":
    the residual stream before the final norm. "log_likelihood", "likeliest": as computed by
    `Pass.scores`. If there is a tensor "stream_index", these rows of the residual stream after the
    layers continue, as "stream_rows".
    """
    # For keys and values alone, the layers after the last one that stores them are not needed.
    layers = config.n_layer if want or o.draft else 1 + max(c.layer for c in config.layer_caches)
    *front, end = (f"h.{n}." for n in range(layers))
    x = o.embed()
    for h in front:
        x = block(o, of, x, h)
    y = of.attention(o, end, x)
    last = o.last_rows(x, y) if want == "last" else (o, x, y)
    if o.draft is not None:
        every = copy(o)
        every.do = Renamed(o.do, "rows.")
        o.draft(o.do, of.feed_forward(every, end, x, y))
    if want is None:
        return None
    o, x, y = last
    del last
    x = of.feed_forward(o, end, x, y)
    del y
    if o.do.has("stream_index"):
        x = o.do("stream_rows", "take", (x, "stream_index"))
    if want == "stream":
        return x
    if want == "hidden":
        return of.final(o, x)
    x = of.final(o, x, to=("lm_head",))
    if want == "rows":
        return x
    if want in ("log_likelihood", "likeliest"):
        return o.scores(x, want == "likeliest")
    return o.logits(x)

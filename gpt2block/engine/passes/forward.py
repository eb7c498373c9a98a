"""Plain forward passes: one step for each operation of the reference.

An architecture is three functions that are written like the formulas of its block, for example
`gpt2block.models.architectures.gpt2`. They call the methods of a `Pass`, each of which adds one or
more steps. NumPy runs these steps; for a GPU, rules rewrite them (`gpt2block.engine.passes`).
"""

from __future__ import annotations

from copy import copy
from typing import Any, Literal

from gpt2block.engine.passes.executor import Executor, Renamed
from gpt2block.engine.passes.settings import PassSettings
from gpt2block.models.architectures.architecture import Architecture, Value
from gpt2block.models.config import ModelConfig

SPANS = ("row", "positions", "held")  # inputs of delta_spans
ROWS_AT_ONCE = 1024  # rows of logits that are computed together
EXPERT_ROWS = 8  # most rows that kernels multiply at once by an expert's matrices
EVERY = "rows."  # begins the names of the last layer's results of all rows, which a block reads
Want = Literal["last", "logits", "rows", "hidden", "stream", "log_likelihood", "likeliest"]


class Pass:
    """A forward pass over packed rows (tokens of all sequences) with a kv_cache.

    do: the executor that runs or lists the steps. longest: an upper bound of the new tokens of a
    sequence. rows: the number of rows, for scores. drafts: whether a block that drafts tokens reads
    the residual stream of all rows after the layers, in a pass whose output is "last" or None.

    Arguments of a method are the names of its result and weights; h is the prefix of a layer's
    names.
    """

    layers: Value = None  # the rows of all layers' embeddings, if the architecture has them
    spans: Value = None  # the result of `delta_spans`
    stream: Value = "stream"  # rows of another model's residual stream, if the model reads them
    row: Value = "row"  # the sequence of each row that products read

    def __init__(
        self,
        do: Executor,
        settings: PassSettings,
        longest: int = 1,
        rows: int = 0,
        drafts: bool = False,
    ) -> None:
        self.do, self.longest, self.rows, self.drafts = do, longest, rows, drafts
        self.c: Any = settings

    def embed(self) -> Value:
        """Return a row per token: token embedding, plus position embedding if there is one.

        If the architecture has an embedding norm, it is applied to the rows.
        """
        if self.c.delta_nets is not None:
            self.spans = self.do("spans", "delta_spans", SPANS)
        inputs, factor = ("tokens", "positions", "wte", "wpe"), self.c.scales.embedding
        scaled: Any = {} if factor == 1 else {"factor": factor}
        if self.do.has("gamma_e_and_1"):
            return self._combined(self.do("vectors", "encoder_rows", inputs, **scaled))
        if not self.c.embedding_norm:
            x = self.do("embedding", "encoder_rows", inputs, **scaled)
            self.layers = self._layers(x) if self.c.layers else None
            return x
        normed = self.do("vectors", "encoder_rows", inputs, **scaled), self.c.embedding_norm
        return self.do("embedding", "rmsnorm", normed, eps=self.c.scales.eps)

    def _combined(self, x: Value) -> Value:
        """Return norm(x) @ w_e + norm(stream) @ w_h. x: embeddings of tokens."""
        y = self.norm("rms_e", x, "gamma_e_and_1")
        y = self.product("of_token", y, "w_e")
        z = self.norm("rms_h", self.stream, "gamma_h_and_1")
        return self.product("of_stream", z, "w_h", add=("embedding", y))

    def _layers(self, x: Value) -> Value:
        """Compute the rows of all layers' embeddings from tokens and their embeddings x."""
        y = self.operand("layers_in", x)
        y = self.product("layers_proj", y, "w_layers")
        rows = ("tokens", "positions", "layer_table", "")
        rows = self.do("layers_rows", "encoder_rows", rows, factor=self.c.layers.factor)
        inputs, eps = (y, "gamma_layers_scaled", rows), self.c.layers.eps
        return self.do("layers", "rmsnorm_groups", inputs, eps=eps)

    def norm(self, name: str, x: Value, gamma: str, beta: str = "") -> Value:
        """Compute LayerNorm, or RMSNorm if beta is ""."""
        if beta:
            return self.do(name, "layernorm", (x, gamma, beta), eps=self.c.scales.eps)
        return self.do(name, "rmsnorm", (x, gamma), eps=self.c.scales.eps)

    def product(
        self,
        name: str,
        a: Value,
        w: str,
        bias: str = "",
        add: tuple[str, Value] = ("", None),
        gelu: str = "",
    ) -> Value:
        """Compute a @ w + bias, then GELU or a residual sum.

        add: the name of the sum, and the residual. gelu: the name of the result of GELU.
        """
        ordered = self.in_order(name, a, w)
        adapted = self.do.has(f"{w}.lora_a")  # an adapter's term is added to the residual sum, too
        end = add[0] or name
        base = f"{end}_base" if adapted else end
        y = self.do(name if add[0] else base, "matmul_bias", (ordered, w, bias))
        if add[0]:
            y = self.do(base, "add", (add[1], y))
        if adapted:
            y = self.add_low_rank(end, w, a, y)
        return self.do(gelu, "gelu", (y,)) if gelu else y

    def add_low_rank(self, name: str, w: str, x: Value, y: Value, up: Value = "") -> Value:
        """Add the terms of adapters to y = x @ w, and to `up` if w's factors have its columns."""
        factors = (f"{w}.lora_a", f"{w}.lora_b", f"{w}.lora_spans", self.row, "adapter")
        return self.do(name, "add_low_rank", (y, x, *factors, up))

    def operand(self, name: str, x: Value) -> Value:
        """Convert rows that no norm precedes to the format of the products that read them."""
        return self.do(name, "operand", (x,))

    def in_order(self, name: str, x: Value, w: str) -> Value:
        """Put channels of x into the order of a matrix's inputs, if the matrix has an order."""
        order = f"{w}.order"
        return self.do(f"{name}_in", "operand", (x, order)) if self.do.has(order) else x

    def add_norm(self, name: str, x: Value, y: Value, gamma: str, scale: str = "") -> Value:
        """Compute x + RMSNorm(y), where y is the result of a product, times `scale` if given."""
        inputs = (y, gamma, x, *((scale,) if scale else ()))
        return self.do(name, "rmsnorm_add", inputs, eps=self.c.scales.eps)

    def qkv(self, h: str, x: Value, norms: tuple[str, ...] = ()) -> Value:
        """Compute queries, keys and values, with RoPE applied if the architecture has it.

        norms: names of weights, for the norms of q's heads and of k's heads, which precede RoPE; ()
        if the architecture has no such norms.
        """
        y = self.product(f"{h}qkv", x, f"{h}w_qkv", f"{h}b_qkv")
        if norms:
            options = {**self.c.heads, **self.c.head_norms}
            y = self.do(f"{h}qk", "qk_norm", (y, *norms), **options)
        if not self.c.rope:
            return y
        return self.do(f"{h}rope", *self.c.step_of_rope(h, y), **self.c.turn)

    def queries(self, h: str, x: Value, norm: str) -> Value:
        """Compute queries, with a norm of heads and RoPE, in a layer without keys and values."""
        y = self.product(f"{h}queries", x, f"{h}w_q", f"{h}b_q")
        inputs = (y, "positions", self.c.frequencies_of(h), norm, norm)
        options = {**self.c.heads, "eps": self.c.scales.eps}
        return self.do(f"{h}q_rope", "qk_norm_rope", inputs, **options, queries=True)

    def attend(self, h: str, qkv: Value) -> Value:
        """Compute attention of each query over the keys up to its position, in the kv_cache."""
        if h not in self.c.readers:
            self.do(f"{h}kv", "kv_append", (qkv, f"{h}k", f"{h}v", "row", "positions"))
        options = {"n_head": self.c.n_head, "longest": self.longest, **self.c.scores(h)}
        inputs = (qkv, f"{h}k", f"{h}v", "cu_seqlens", "start")
        op = "attention_queries" if h in self.c.readers else "attention_packed"
        return self.do(f"{h}attn", op, inputs, **options)

    def gate_of_heads(self, h: str, x: Value) -> Value:
        """Compute the gate of attention's result."""
        return self.product(f"{h}g", x, f"{h}w_g")

    def gated_heads(self, h: str, gate: Value, y: Value) -> Value:
        """Multiply attention's result y by sigmoid(gate)."""
        y = self.do(f"{h}heads", "silu_mul", (gate, y), sigmoid=True)
        return self.operand(f"{h}mixer", y)

    def delta(self, h: str, x: Value) -> Value:
        """Compute a gated delta net with its norm, without the output projection."""
        y = self.product(f"{h}in", x, f"{h}w_in")
        rows = y, self.product(f"{h}ba", x, f"{h}w_ba")
        states, of = (f"{h}state", f"{h}recent"), self.c.delta_nets
        options: dict[str, Any] = {"n_k_head": of.n_k_head, "k_size": of.k_size}
        inputs = (*rows, f"{h}conv", f"{h}rate", f"{h}dt_bias", "row", self.spans, *states)
        mixed = self.do(f"{h}mixed", "delta_inputs", inputs, **options)
        options |= {"tiled": True} if of.tiled else {}
        inputs = (*rows, mixed, f"{h}conv", self.spans, *states, f"{h}pool", "saved")
        o = self.do(f"{h}delta", "delta_rule", inputs, **options)
        gated = (o, y, f"{h}gamma_o")
        o = self.do(f"{h}normed", "gated_rmsnorm", gated, eps=self.c.scales.eps)
        return self.operand(f"{h}mixer", o)

    def short_conv(self, h: str, bcx: Value) -> Value:
        """Compute the short convolution of rows [B | C | x]; write rows of u to the kv_cache."""
        inputs = (bcx, f"{h}taps", f"{h}b_taps", f"{h}k", "row", "positions")
        return self.do(f"{h}conv", "short_conv", inputs)

    def gated(self, h: str, x: Value) -> Value:
        """Compute silu(gate) * up, or gelu(gate) * up if `PassSettings.gelu` is set.

        Adapters have the factors of both products under one name.
        """
        factors = f"{h}w_gate_up"
        adapted = self.do.has(f"{factors}.lora_a")
        ordered = self.in_order(f"{h}gate", x, f"{h}w_up")  # w_gate has the same order
        inputs = ordered, f"{h}w_gate", f"{h}b_gate"
        gate = self.do(f"{h}gate{'_base' * adapted}", "matmul_bias", inputs)
        up = self.do(f"{h}up", "matmul_bias", (ordered, f"{h}w_up", f"{h}b_up"))
        if adapted:
            gate = self.add_low_rank(f"{h}gate", factors, x, gate, up)
        return self.do(f"{h}ff", "silu_mul", (gate, up), **self.c.gate)

    def gated_by_layer(self, h: str, gate: Value) -> Value:
        """Compute gelu(gate) or silu(gate), as `gated`, times the layer's columns of `layers`."""
        inputs, options = (gate, self.layers), self.c.columns_of(h)
        return self.do(f"{h}layer_ff", "gated_columns", inputs, **options)

    def experts(self, h: str, x: Value, y: Value) -> Value:
        """Return x plus the weighted results of the experts that the router chooses for rows y."""
        of = self.c.experts
        router = {name: getattr(of, name) for name in ("sigmoid", "normed", "factor", "eps")}
        inputs = (y, f"{h}router", f"{h}b_router")
        routes = self.do(f"{h}routes", "route", inputs, n_used=of.n_used, **router)
        sizes: dict[str, Any] = {"n_expert": of.n_expert}
        tiles = self.do(f"{h}tiles", "expert_tiles", (routes,), **sizes, rows=EXPERT_ROWS)
        matrices = (f"{h}w_gate_experts", f"{h}w_up_experts", tiles)
        gated = {**sizes, "n_used": of.n_used, **self.c.gate}
        y = self.do(f"{h}ff", "experts_gated", (y, *matrices), **gated)
        y = self.do(f"{h}down", "experts_down", (y, f"{h}w_down_experts", tiles), **sizes)
        return self.do(f"{h}output", "add_experts", (y, routes, x))

    def relu_squared(self, name: str, x: Value) -> Value:
        """Compute max(x, 0)²."""
        return self.do(name, "relu_squared", (x,))

    def last_rows(self, x: Value, y: Value) -> tuple[Value, Value]:
        """Return each sequence's last row of x and of y."""
        if self.c.layers:
            self.layers = self.do("last.layers", "take", (self.layers, "last"))
        self.row = "last_row"
        return self.do("last.x", "take", (x, "last")), self.do("last.attn", "take", (y, "last"))

    def before_last_norm(self, x: Value) -> Value:
        """Return the rows of x of which the output "last" has the final norm."""
        return x

    def logits(self, x: Value, rows: str = "", head: tuple[str, str] = ("lm_head", "")) -> Value:
        """Compute the product with lm_head. Cap the logits if the architecture caps logits.

        rows: ends the names of the results. head: the names of the matrix and of its bias.
        """
        if self.c.scales.cap is None:
            return self.product(f"logits{rows}", x, *head)
        y = self.product(f"uncapped{rows}", x, *head)
        return self.do(f"logits{rows}", "cap", (y,), limit=self.c.scales.cap)

    def scores(self, x: Value, likeliest: bool = False) -> None:
        """Compute, for each row, the log-likelihood of the row's target (the next token).

        likeliest: also compute the most likely token. ROWS_AT_ONCE rows are computed at a time.
        """
        for first in range(0, self.rows, ROWS_AT_ONCE):
            end = min(self.rows, first + ROWS_AT_ONCE)
            logits = self.logits_of(x, first, end)
            targets = self.do(f"targets.{first}", "rows", ("targets",), first=first, end=end)
            self.do(f"scores.{first}", "log_likelihood", (logits, targets))
            if likeliest:
                self.do(f"likeliest.{first}", "top_logprobs", (logits,), K=1)

    def logits_of(self, x: Value, first: int, end: int) -> Value:
        """Compute the logits of rows `first` to `end` - 1 of x, the result of the final norm."""
        hidden = self.do(f"hidden.{first}", "rows", (x,), first=first, end=end)
        return self.logits(hidden, f".{first}", ("head", "head_bias"))


class NumpyPass(Pass):
    """A Pass whose steps NumPy runs as they are listed, without conversions between formats."""

    def operand(self, name: str, x: Value) -> Value:
        return x

    def last_rows(self, x: Value, y: Value) -> tuple[Value, Value]:
        """Keep all rows until the final norm, as NumPy products of fewer rows round differently."""
        return x, y

    def before_last_norm(self, x: Value) -> Value:
        self.row = "last_row"
        return self.do("last.x", "take", (x, "last"))


class BlockPass(NumpyPass):
    """A Pass over a single block, whose attention has no kv_cache.

    GPT-2's block has ten steps, Llama's twelve.
    """

    def attend(self, h: str, qkv: Value) -> Value:
        options = {**self.c.heads, **self.c.scores(h), "causal": self.c.causal}
        return self.do(f"{h}attn", "attention", (qkv,), **options)


def block(o: Pass, of: Architecture, x: Value, h: str = "") -> Value:
    """Add the steps of one block to the forward pass `o`, and return the block's output."""
    return of.feed_forward(o, h, x, of.attention(o, h, x))


def forward(o: Pass, of: Architecture, config: ModelConfig, want: Want | None) -> Value:
    """Run a model on the pass `o` up to the output `want`. None: stop after the last K and V.

    "last": logits of the last row of each sequence. "logits": logits of all rows. "rows": the final
    norm, as input of a later product with lm_head. "hidden": the final norm as floats. "stream":
    the residual stream before the final norm. "log_likelihood", "likeliest": as computed by
    `Pass.scores`. If there is a tensor "stream_index", these rows of the residual stream after the
    layers continue, as "stream_rows". If a block drafts tokens, the last layer is also computed for
    all rows, with results whose names begin with EVERY.
    """
    # For keys and values alone, the layers after the last one that stores them are not needed.
    layers = config.n_layer if want or o.drafts else 1 + max(c.layer for c in config.layer_caches)
    *front, end = (f"h.{n}." for n in range(layers))
    x = o.embed()
    for h in front:
        x = block(o, of, x, h)
    y = of.attention(o, end, x)
    last = o.last_rows(x, y) if want == "last" else (x, y)
    if o.drafts:
        every = copy(o)
        every.do, every.row = Renamed(o.do, EVERY), "row"
        of.feed_forward(every, end, x, y)
    if want is None:
        return None
    x = of.feed_forward(o, end, *last)
    if o.do.has("stream_index"):
        x = o.do("stream_rows", "take", (x, "stream_index"))
    if want == "stream":
        return x
    if want == "hidden":
        return of.final(o, x)
    if want == "last":
        x = o.before_last_norm(x)
    x = of.final(o, x, head=True)
    if want == "rows":
        return x
    if want in ("log_likelihood", "likeliest"):
        o.scores(x, want == "likeliest")
        return None
    return o.logits(x)

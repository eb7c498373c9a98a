"""Forward passes: which verbs a pass has, and the order in which an architecture uses them.

An architecture is three functions, which read as its block does (`gpt2block.architectures.gpt2`,
`gpt2block.architectures.llama`); a pass decides which verbs share a kernel, and in which kernels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from gpt2block.architectures.architecture import Architecture, To, Value
from gpt2block.config import ModelConfig
from gpt2block.passes.machine import Machine

Want = Literal["last", "logits", "rows", "hidden", "stream", "log_likelihood"]


class Product(NamedTuple):
    """A product, a w + bias, with what a kernel fuses.

    add: the name of its sum with a residual, or "". gelu: the name of its GELU, or "". result: the
    name of what is computed in the end. options: what a kernel that fuses GELU is told.
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
    """The operations of a pass, and the machine that runs its steps.

    A verb names its result and the weights that it takes. `to` has the names of the weights of the
    products that read the result, or of the step that does, such as "rope"; they decide its
    format: floats, 16 bits, two-part or terms. Without any, it is float32. h is the prefix of a
    layer's names.
    """

    do: Machine
    c: Any  # PassSettings of gpt2block.passes.blocks
    of_stream: Mapping[str, Any] = {}  # what RMSNorm of rows of the stream is told

    def embed(self) -> Value:
        """The rows of the tokens: token embedding, plus position embedding if there is one.

        Or the norm of these, if the architecture has it.
        """
        inputs, factor = ("tokens", "positions", "wte", "wpe"), self.c.embedding
        scaled = {} if factor == 1 else {"factor": factor}
        if not self.c.embedding_norm:
            return self.do("embedding", "encoder_rows", inputs, **scaled)
        normed = self.do("vectors", "encoder_rows", inputs, **scaled), self.c.embedding_norm
        return self.do("embedding", "rmsnorm", normed, eps=self.c.eps, **self.of_stream)

    @abstractmethod
    def norm(self, name: str, x: Value, gamma: str, beta: str = "", to: To = ()) -> Value:
        """LayerNorm, or RMSNorm without beta."""

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
        """a w + bias; then its GELU, or its sum with a residual: add has the names of both."""
        result, options = add[0] or gelu or name, {"gelu": True} if gelu else {}
        return self._product(Product(name, a, w, bias, *add, gelu, to, result, options))

    @abstractmethod
    def _product(self, p: Product) -> Value:
        """Compute a product in the kernels of this pass."""

    def operand(self, name: str, x: Value, to: To) -> Value:
        """The residual stream as products without a norm before them read it."""
        return x

    def add_norm(self, name: str, x: Value, y: Value, gamma: str) -> Value:
        """x + RMSNorm of y, the result of a product."""
        return self.do(name, "rmsnorm_add", (y, gamma, x), into=x, eps=self.c.eps)

    @abstractmethod
    def qkv(self, h: str, x: Value, rope: str = "", norms: To = ()) -> Value:
        """Queries, keys and values, turned by RoPE if the architecture has it.

        rope: the name of its frequencies in this layer. norms: the weights of the norms of heads of
        q and of k, before RoPE, if it has these.
        """

    def turned(self, h: str, qkv: Value, rope: str, norms: To = ()) -> Value:
        """RoPE of rows [Q | K | V] in place, and before it the norms of heads, as in `qkv`."""
        inputs = (qkv, "positions", rope, *norms)
        if norms:
            options = {**self.c.heads, "eps": self.c.eps}
            return self.do(f"{h}rope", "qk_norm_rope", inputs, into=qkv, **options)
        op, inputs = self.c.step_of_rope(qkv, rope)
        return self.do(f"{h}rope", op, inputs, into=qkv, **self.c.turn)

    @abstractmethod
    def attend(self, h: str, qkv: Value, to: To = ()) -> Value:
        """Attention over the keys so far."""

    @abstractmethod
    def gated(self, h: str, x: Value, to: To = ()) -> Value:
        """silu(gate) up, or gelu(gate) up (`PassSettings.gelu`)."""

    def relu_squared(self, name: str, x: Value) -> Value:
        """max(x, 0)², of the result of a product."""
        return self.do(name, "relu_squared", (x,), into=x)

    def last_rows(self, x: Value, y: Value) -> tuple[Pass, Value, Value]:
        """The pass that goes on, with the last row of each sequence of the stream and attention."""
        raise NotImplementedError

    def logits(self, x: Value) -> Value:
        """The product with lm_head, capped if the architecture does so."""
        if self.c.cap is None:
            return self.product("logits", x, "lm_head")
        y = self.product("uncapped", x, "lm_head")
        return self.do("logits", "cap", (y,), limit=self.c.cap)

    def scores(self, x: Value) -> Value:
        """The log-likelihood of the target of each row."""
        raise NotImplementedError


def block(o: Any, of: Architecture, x: Value, h: str = "") -> Value:
    """A block of an architecture."""
    return of.feed_forward(o, h, x, of.attention(o, h, x))


def forward(o: Any, of: Architecture, config: ModelConfig, want: Want | None) -> Value:
    """Tokens to what is wanted; None: to the last layer's keys and values.

    "last": logits of the last row of each sequence; "logits": of all rows; "rows": the final norm
    of which logits are computed later; "hidden": the same as floats; "stream": the residual stream
    before it; "log_likelihood": of the target of each row.
    """
    *front, end = (f"h.{n}." for n in range(config.n_layer))
    x = o.embed()
    for h in front:
        x = block(o, of, x, h)
    y = of.attention(o, end, x)
    if want is None:
        return None
    if want == "last":
        o, x, y = o.last_rows(x, y)
    x = of.feed_forward(o, end, x, y)
    del y
    if want == "stream":
        return x
    if want == "hidden":
        return of.final(o, x)
    x = of.final(o, x, to=("lm_head",))
    if want == "rows":
        return x
    return o.scores(x) if want == "log_likelihood" else o.logits(x)

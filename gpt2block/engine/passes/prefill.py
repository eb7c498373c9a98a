"""Prefill: passes over the new tokens of all sequences as rows of one matrix.

    PrefillPass      float32 products, by `linear`
    TensorCorePass   16-bit products, also with FP8 weights, by `gemm`
    HiLoPass      products of float32 in two float16 parts, by `gemm`
    LastRows         steps after the last attention, for the last rows, by kernels of decoding

After the last attention, a pass whose output is "last" continues with one row per sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from gpt2block.cuda.formats import cache_option
from gpt2block.engine.passes.blocks import PassSettings
from gpt2block.engine.passes.decoding import DecodePass, Rows
from gpt2block.engine.passes.executor import HI_LO, Executor, hi_lo_of
from gpt2block.engine.passes.forward import Pass, Product
from gpt2block.models.architectures.architecture import To, Value

ROWS_AT_ONCE = 1024  # rows of logits computed together
Products = Literal["float32", "16_bits", "fp8", "hi_lo"]


@dataclass(frozen=True)
class Prefill:
    """The parameters that determine the steps of a prefill on a GPU.

    products: "float32" for `linear`; otherwise `gemm` on tensor cores, with activations of 16 bits
    or hi/lo. With "fp8", a product whose kernel cannot read FP8 weights first converts them
    into the tensor "wide"; other products exchange partial sums in "stream_k_workspace". rows: the
    number of new tokens of all sequences. longest: an upper bound for one sequence. cached: whether
    there is a kv_cache; on tensor cores, attention over new tokens alone does not need it.
    continued: whether the sequences continue tokens in the kv_cache; used with tensor cores only.
    ends: the number of rows of the output "last"; None for one per row of the kv_cache. fp8_cache:
    the FP8 format of the kv_cache, to which attention over new tokens also rounds K and V; or None.
    gated: whether 16-bit products can have two matrices, so that a gated feed-forward is one
    product instead of gate, up and ff. appends: whether 16-bit attention over new tokens also
    writes K and V to the kv_cache, whose dtype is then the activations' dtype.
    """

    products: Products
    rows: int
    batch: int
    longest: int
    cached: bool
    continued: bool = False
    ends: int | None = None
    fp8_cache: str | None = None
    gated: bool = False
    appends: bool = False

    @property
    def tensor_cores(self) -> bool:
        return self.products != "float32"

    @property
    def sequences(self) -> int:
        """Number of sequences in attention: `batch` if it reads the kv_cache, else `ends`.

        If `ends` is None, the number is `batch`.
        """
        reads_cache = self.continued or not self.tensor_cores
        return self.batch if reads_cache or self.ends is None else self.ends

    def over(
        self, do: Executor, settings: PassSettings, dtype: str, bounds: Mapping[str, float]
    ) -> PrefillPass:
        """Create the prefill pass with these parameters.

        dtype: the weights' dtype. bounds: as for HiLoPass.
        """
        if self.products == "float32":
            return PrefillPass(do, settings, self)
        if self.products == "hi_lo":
            return HiLoPass(do, settings, self, bounds)
        return TensorCorePass(do, settings, self, "float16" if self.products == "fp8" else dtype)


class PrefillPass(Pass):
    """Prefill in float32, with kernels for many rows; base class of the other prefill passes."""

    bounds: Mapping[str, float] = {}
    dtype = "float32"  # dtype of activations
    of_layernorm: Mapping[str, Any] = {"variant": 6, "stats": False}
    of_stream: Mapping[str, Any] = {"variant": "stream"}

    def __init__(self, do: Executor, settings: PassSettings, shape: Prefill) -> None:
        self.do, self.c, self.shape = do, settings, shape
        self.longest, self.kv = shape.longest, cache_option(shape.fp8_cache)

    def norm(self, name: str, x: Value, gamma: str, beta: str = "", to: To = ()) -> Value:
        how: dict[str, Any] = {"eps": self.c.scales.eps, **self._operand(name, to)}
        if beta:
            return self.do(name, "layernorm", (x, gamma, beta), **self.of_layernorm, **how)
        return self.do(name, "rmsnorm", (x, gamma), **self.of_stream, **how)

    def _operand(self, name: str, to: To) -> dict[str, Any]:
        """Return the options that set the format of a result that products with `to` read."""
        return {}

    def _product(self, p: Product) -> Value:
        inputs = (p.a, p.w, p.bias, "", "", p.residual)
        return self.do(p.result, "linear", inputs, into=p.residual, variant="tiles", **p.options)

    def qkv(self, h: str, x: Value, norms: To = ()) -> Value:
        to = ("rope" if self.c.rope else "attention",)
        y = self.product(f"{h}qkv", x, f"{h}w_qkv", f"{h}b_qkv", to=to)
        return self.rotate(h, y, norms) if self.c.rope else y

    def short_conv(self, h: str, bcx: Value, to: To = ()) -> Value:
        return self._short_conv(h, bcx, dtype=self.dtype)

    def gated(self, h: str, x: Value, to: To = ()) -> Value:
        gate = self.product(f"{h}gate", x, f"{h}w_gate", f"{h}b_gate", to=("silu_mul",))
        up = self.product(f"{h}up", x, f"{h}w_up", f"{h}b_up", to=("silu_mul",))
        return self.do(f"{h}ff", "silu_mul", (gate, up), into=up, **self.c.gate)

    def scores(self, x: Value, likeliest: bool = False) -> Value:
        """Compute, for each row, the log-likelihood of its target, ROWS_AT_ONCE rows at a time."""
        for first in range(0, self.shape.rows, ROWS_AT_ONCE):
            self._scores(x, first, min(self.shape.rows, first + ROWS_AT_ONCE), likeliest)

    def _scores(self, x: Value, first: int, end: int, likeliest: bool) -> None:
        """Compute log-likelihoods of rows `first` to `end` - 1; free the logits on return."""
        logits = self.logits_of(x, first, end)
        targets = self.do(f"targets.{first}", "rows", ("targets",), first=first, end=end)
        self.do(f"scores.{first}", "log_likelihood", (logits, targets))
        if likeliest:
            self.do(f"likeliest.{first}", "top_logprobs", (logits,), K=1)

    def logits_of(self, x: Value, first: int, end: int) -> Value:
        """Compute the logits of rows `first` to `end` - 1 of x, the result of the final norm."""
        hidden = self.do(f"hidden.{first}", "rows", (x,), first=first, end=end)
        if self.c.scales.cap is None:
            return self.head(f"logits.{first}", hidden)
        y = self.head(f"uncapped.{first}", hidden)
        return self.do(f"logits.{first}", "cap", (y,), into=y, limit=self.c.scales.cap)

    def head(self, name: str, hidden: Value) -> Value:
        return self.do(name, "linear", (hidden, "head", "head_bias"), variant="tiles")

    def last_rows(self, x: Value, y: Value) -> tuple[DecodePass, Value, Rows]:
        """Return a pass for the remaining steps, then each sequence's last row of x and of y."""
        kind = self.shape.products
        o = TilesOfLastRows(self) if kind == "float32" else LastRows(self)
        if self.c.layers:
            o.layers = self._last("last.layers", self.layers)
        x = self._last("last.x", x)
        y = self._last("last.attn", y, joined=kind == "hi_lo")
        return o, x, Rows(y, narrow=kind in ("16_bits", "fp8"))

    def _last(self, name: str, x: Value, joined: bool = False) -> Value:
        """Return each sequence's last row of x. joined: convert hi/lo rows to float32."""
        if self.shape.ends is not None or self.shape.batch > 1 or joined:
            return self.do(name, "take", (x, "last"), dtype="float32" if joined else None)
        return self.do(name, "rows", (x,), first=self.shape.rows - 1, end=self.shape.rows)


class TensorCorePass(PrefillPass):
    """Prefill with operands in float16 or bfloat16, to which FP8 weights are converted."""

    of_layernorm: Mapping[str, Any] = {"variant": "narrow"}

    def __init__(self, do: Executor, settings: PassSettings, shape: Prefill, dtype: str) -> None:
        super().__init__(do, settings, shape)
        self.dtype = dtype
        self.wide = ("", "wide", "stream_k_workspace") if shape.products == "fp8" else ()

    def operand(self, name: str, x: Value, to: To) -> Value:
        return self.do(name, "operand", (x,), dtype=self.dtype)

    def _operand(self, name: str, to: To) -> dict[str, Any]:
        """Return a result's dtype option: float32 if `to` is empty, else operands' 16-bit dtype."""
        return {"dtype": self.dtype if to else "float32"}

    def _product(self, p: Product) -> Value:
        operand = self._operand(p.result, p.to) if p.residual is None else {}
        inputs = (p.a, p.w, p.bias, p.residual, *self.wide)
        return self.do(p.result, "gemm", inputs, into=p.residual, **p.options, **operand)

    def gate_of_heads(self, h: str, x: Value) -> Value:
        return self.product(f"{h}g", x, f"{h}w_g", to=("attention",))

    def gated_heads(self, h: str, gate: Value, y: Value, to: To = ()) -> Value:
        return self.do(f"{h}heads", "silu_mul", (gate, y), into=gate, sigmoid=True)

    def attend(self, h: str, qkv: Value, to: To = ()) -> Value:
        if self.shape.continued:
            return super().attend(h, qkv, to)
        if self.kv:
            qkv = self.do(f"{h}rounded", "kv_round", (qkv,), **self.c.heads, **self.kv)
        if self.shape.cached and self.shape.appends:
            return self._over_new(h, qkv, f"{h}k", f"{h}v", "row", "positions")
        if self.shape.cached:
            self._append(h, qkv)
        return self._over_new(h, qkv)

    def _over_new(self, h: str, qkv: Value, *cache: Value) -> Value:
        """Compute attention over the new tokens only, without keys from the kv_cache.

        cache: the kv_cache arrays to which K and V are also written, their rows and positions.
        """
        options = {**self.c.heads, **self.c.scores(h), "causal": True, "max_seqlen": self.longest}
        return self.do(f"{h}attn", "attention_varlen", (qkv, "cu_seqlens", *cache), **options)

    def gated(self, h: str, x: Value, to: To = ()) -> Value:
        biases = (f"{h}b_gate", f"{h}b_up")
        if not self.shape.gated or any(map(self.do.has, biases)):
            return super().gated(h, x, to)
        inputs = (x, f"{h}w_gate", "", "", f"{h}w_up")
        return self.do(f"{h}ff", "gemm", inputs, **self.c.gate)

    def head(self, name: str, hidden: Value) -> Value:
        return self.do(name, "gemm", (hidden, "head", "head_bias", "", *self.wide), dtype="float32")


class HiLoPass(TensorCorePass):
    """Prefill whose operands are hi/lo: two float16 numbers for each float32 number.

    bounds: upper bounds of the magnitudes of the operands that have a single scale, by name.
    """

    def __init__(
        self, do: Executor, settings: PassSettings, shape: Prefill, bounds: Mapping[str, float]
    ) -> None:
        super().__init__(do, settings, shape, "float32")
        self.bounds = bounds

    def norm(self, name: str, x: Value, gamma: str, beta: str = "", to: To = ()) -> Value:
        y = super().norm(name, x, gamma, beta, to if beta else ())
        return y if beta else self._convert(name, y, to)

    def _operand(self, name: str, to: To) -> dict[str, Any]:
        if not self._reads_hi_lo(to):
            return {"dtype": "float32"}
        return {"dtype": HI_LO, "bound": self.bounds[name]}

    def operand(self, name: str, x: Value, to: To) -> Value:
        return self._convert(name, x, to)

    def _reads_hi_lo(self, to: To) -> bool:
        """Return whether products with weights `to` read operands in two float16 parts.

        lm_head does not count, because `head` converts its operand itself.
        """
        kept = [w for w in to if w != "lm_head"]
        return any(w == "attention" or self.do.has(hi_lo_of(w)) for w in kept)

    def _convert(self, name: str, y: Value, to: To) -> Value:
        return self.do(hi_lo_of(name), "hi_lo", (y,)) if self._reads_hi_lo(to) else y

    def _product(self, p: Product) -> Value:
        # [Q | K | V] stays float32 if the prompt is continued.
        to = () if self.shape.continued and not p.gelu else p.to
        return super()._product(p._replace(w=hi_lo_of(p.w), to=to))

    def attend(self, h: str, qkv: Value, to: To = ()) -> Value:
        if self.shape.continued:  # attention over a kv_cache computes in float32
            y = self._over_cache(f"{h}attn_cached", h, qkv)
            return self.do(f"{h}attn", "hi_lo", (y,))
        operand = self._convert(f"{h}rope", qkv, ("attention",)) if self.c.rope else qkv
        if self.shape.cached:
            self._append(h, qkv)
        return self._over_new(h, operand)

    def short_conv(self, h: str, bcx: Value, to: To = ()) -> Value:
        return self._convert(f"{h}conv", super().short_conv(h, bcx, to), to)

    def gated(self, h: str, x: Value, to: To = ()) -> Value:
        return self._convert(f"{h}ff", super().gated(h, x, to), to)

    def head(self, name: str, hidden: Value) -> Value:
        return super().head(name, self.do(hi_lo_of(name), "hi_lo", (hidden,)))


class LastRows(DecodePass):
    """Last steps of a prefill, which have few rows and therefore use the decoding kernels.

    The product that reads the attention's result, in 16 bits or hi/lo, has the prefill's kernel.
    """

    def __init__(self, prefill: PrefillPass) -> None:
        super().__init__(prefill.do, prefill.c, bounds=prefill.bounds)
        self.prefill = prefill

    def _product(self, p: Product) -> Value:
        if p.a.narrow:
            return self.prefill._product(p._replace(a=p.a.value))
        return super()._product(p)


class TilesOfLastRows(LastRows):
    """Float32 steps after the last attention, by prefill kernels; logits, by decoding kernels."""

    def norm(self, name: str, x: Value, gamma: str, beta: str = "", to: To = ()) -> Rows:
        if to == ("lm_head",):
            return super().norm(name, x, gamma, beta, to)
        return Rows(self.prefill.norm(name, x, gamma, beta))

    def _product(self, p: Product) -> Value:
        if p.w == "lm_head":
            return super()._product(p)
        y = self.prefill._product(p._replace(a=p.a.value))
        return Rows(y) if p.to else y

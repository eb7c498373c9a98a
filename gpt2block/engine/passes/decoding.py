"""Decoding: passes that compute a token for each row of a kv_cache, with kernels for few rows."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from gpt2block.cuda.formats import cache_option
from gpt2block.cuda.kernels import HI_LO
from gpt2block.engine.passes.blocks import PassSettings
from gpt2block.engine.passes.executor import Executor, hi_lo_of
from gpt2block.engine.passes.forward import Pass, Product
from gpt2block.models.architectures.architecture import To, Value
from gpt2block.models.weights.gguf import UNIT
from gpt2block.models.weights.hi_lo import scale_for
from gpt2block.ops.gated_sums import Fusions
from gpt2block.ops.operands import CHUNK, Operand


class Rows(NamedTuple):
    """The left operand of a product: rows as `operand`, or rows to normalize by `gamma`."""

    value: Value
    gamma: str = ""
    beta: str = ""
    operand: Operand | None = None
    narrow: bool = False  # whether rows are a prefill's attention in 16 bits or hi/lo format
    bound: float | None = None  # upper bound of the (normalized) rows' magnitudes, if known


class NewTokens(NamedTuple):
    """Rows [Q | K | V] of new tokens. Attention norms and rotates their heads, and appends K and V.

    norms: names of weights, for the norms of q's heads and of k's heads.
    """

    rows: Value
    norms: To


class DecodePass(Pass):
    """Decoding with five kernels per GPT-2 layer, as the QKV product also writes the kv_cache.

    norms: whether products fuse LayerNorm, which is fastest for few rows; else LayerNorm has its
    own steps, with bitwise equal results. known: the `Operand` in which x of a product can be
    stored, preferred ones first, by the last part of the weights' name; empty if products read
    floats. Hi/lo terms need an operand with a bound, from which their scale is computed.
    fp8_cache: the FP8 format of the kv_cache, or None. bounds: upper bounds of the magnitudes of
    operands, by name; products of bounded operands read hi/lo weights instead of float32.
    x_dtype: the dtype to which x of a product that reads floats is rounded, or None. together: the
    number of neighbouring rows that belong to one sequence. fuses: what products that read floats
    can fuse. summed: the names in `known` of the products that read sums of chunks of x.
    """

    of_stream: Mapping[str, Any] = {"variant": "stream"}
    to_rope: To = ()
    of_steps: Mapping[str, Any] = {"steps": True}

    def __init__(
        self,
        do: Executor,
        settings: PassSettings,
        norms: bool = True,
        known: Mapping[str, Sequence[Operand]] | None = None,
        fp8_cache: str | None = None,
        bounds: Mapping[str, float] | None = None,
        x_dtype: str | None = None,
        together: int = 1,
        fuses: Fusions = Fusions(),  # noqa: B008  (a constant)
        summed: Collection[str] = (),
    ) -> None:
        self.fuses, self.summed = fuses, summed
        self.together: dict[str, Any] = {"together": together} if together > 1 else {}
        self.do, self.c, self.norms, self.known = do, settings, norms, known or {}
        self.rounding: dict[str, Any] = {} if x_dtype is None else {"x_dtype": x_dtype}
        self._bounds = bounds or {}
        self.kv = cache_option(fp8_cache)
        self.rotations: dict[str, Value] = {}  # key: name of a tensor of RoPE frequencies

    def embed(self) -> Value:
        fused = self.fuses.attention or self._fuses_rope(self._format(("w_qkv",)))
        if self.c.rope and fused:  # rotations are shared by all layers
            for rope in dict.fromkeys(self.c.rope):
                name = rope.replace("frequencies", "rotations")
                inputs = ("positions", rope, *(("row",) if self.c.own else ()))
                self.rotations[rope] = self.do(name, "rotations", inputs, **self.c.multiplied)
        return super().embed()

    def norm(self, name: str, x: Value, gamma: str, beta: str = "", to: To = ()) -> Rows:
        bound = self._bounds.get(name)
        read_operands = any(_matrix_of(w) in self.known for w in to)
        fused = self.norms and self.fuses.norms and to[:1] != ("lm_head",) and not read_operands
        biased = any(self.do.has(w.replace("w_", "b_")) for w in to)
        if (beta and self.norms) or (to and fused and not beta and not biased):
            return Rows(x, gamma, beta, bound=bound)
        # The RMSNorm kernel computes UNIT neighbouring channels together. Therefore it can store
        # sums of CHUNK channels with the terms (`Operand.with_sums`).
        operand = self._format(to, bound, together=1 if beta else UNIT)
        if beta:
            options: dict[str, Any] = {"variant": "decode", "stats": False, **_as_option(operand)}
            y = self.do(name, "layernorm", (x, gamma, beta), eps=self.c.scales.eps, **options)
        else:
            options = {**self.of_stream, **_as_option(operand)}
            y = self.do(name, "rmsnorm", (x, gamma), eps=self.c.scales.eps, **options)
        return Rows(y, operand=operand, bound=bound)

    def operand(self, name: str, x: Value, to: To) -> Rows:
        bound = self._bounds.get(name)
        operand = self._format(to, bound, together=UNIT)
        y = self.do(name, "operand", (x,), dtype="float32", to_operand=operand) if operand else x
        return Rows(y, operand=operand, bound=bound)

    def _product(self, p: Product) -> Value:
        a: Rows = p.a
        bound = self._bounds.get(p.result)
        stores = not a.gamma and _matrix_of(p.w) in self.known  # can store an `Operand`
        operand = self._format(p.to, bound, a.operand.width if a.operand else 0) if stores else None
        w, w_options = self._weights(p.w, a)
        options = {**self._options(a), **_as_option(operand), **p.options, **w_options}
        more = ("", "workspace") if self.do.has("workspace") and p.residual else ()
        inputs = (a.value, w, p.bias, a.gamma, a.beta, p.residual, *more)
        y = self.do(p.result, "linear", inputs, into=p.residual, decoding=True, **options)
        return Rows(y, operand=operand, bound=bound) if p.to else y

    def qkv(self, h: str, x: Rows, norms: To = ()) -> Value:
        """Compute and return the queries. Append the keys and values to the kv_cache."""
        name, w, bias, cache = f"{h}q", f"{h}w_qkv", f"{h}b_qkv", self._cache(h)
        if not (rope := self.c.frequencies_of(h)):
            w, w_options = self._weights(w, x)
            inputs = (x.value, w, bias, x.gamma, x.beta, *cache)
            return self.do(name, "linear_qkv", inputs, **self._options(x), **self.kv, **w_options)
        heads: dict[str, Any] = {"n_head": self.c.n_head, **self.c.grown}
        if x.gamma and not x.beta and self._fuses_rope(None):
            inputs = (x.value, x.gamma, w, "", "", self.rotations[rope], *cache, *norms)
            return self.do(name, "rope_sums", inputs, **self._options(x), **heads, **self.kv)
        if not norms and self._fuses_rope(x.operand):
            inputs = (x.value, w, bias, self.rotations[rope], *cache)
            return self.do(name, "linear_rope", inputs, **self._options(x), **heads, **self.kv)
        y = self.product(f"{h}qkv", x, w, bias)
        if norms and self.fuses.attention:
            return NewTokens(y, norms)
        inputs = (y, rope, *cache, *norms)
        if norms:
            options = {**self.c.head_norms, **heads, **self.kv}
            return self.do(name, "qk_norm_append", inputs, **options)
        options = {**heads, **self.c.multiplied, **self.kv}
        return self.do(name, "rope_append", inputs, half_split=True, **options)

    def attend(self, h: str, qkv: Value, to: To = ()) -> Rows:
        means_of = "rope" if self.c.rope else "qkv"  # name of the result that contains V
        bound = self._bounds.get(f"{h}{'q_rope' if h in self.c.readers else means_of}")
        operand = self._format(to, bound, together=self.c.head_size)
        options = {"n_head": self.c.n_head, **self.c.scores(h), **_as_option(operand), **self.kv}
        if isinstance(qkv, NewTokens):
            op, options = "attention_append", options | self.c.head_norms
            given = (qkv.rows, self.rotations[self.c.frequencies_of(h)], *qkv.norms)
        else:
            op, options, given = "attention_split", options | self.together, (qkv,)
        y = self.do(f"{h}attn", op, (*given, *self._cache(h)), **options)
        return Rows(y, operand=operand, bound=bound)

    def gated_heads(self, h: str, gate: Value, y: Rows, to: To = ()) -> Value:
        return super().gated_heads(h, gate, y.value, to)

    def short_conv(self, h: str, bcx: Value, to: To = ()) -> Rows:
        bound = self._bounds.get(f"{h}conv")
        operand = self._format(to, bound, together=UNIT)
        y = self._short_conv(h, bcx, dtype="float32", **_as_option(operand))
        return Rows(y, operand=operand, bound=bound)

    def gated(self, h: str, x: Rows, to: To = ()) -> Value:
        weights, biases = (f"{h}w_gate", f"{h}w_up"), (f"{h}b_gate", f"{h}b_up")
        ordered = x.operand is not None and x.operand.width > 0
        if (ordered or self.fuses.gate) and not any(map(self.do.has, biases)):
            # Warps that can add them up compute CHUNK neighbouring outputs of a gated product.
            operand = x.operand and self._format(to, width=x.operand.width, together=CHUNK)
            inputs = (x.value, weights[0], "", x.gamma, "", "", weights[1])
            options = {**self._options(x), **_as_option(operand), **self.c.gate}
            y = self.do(f"{h}ff", "linear", inputs, decoding=True, **options)
            return Rows(y, operand=operand)
        gate = self.product(f"{h}gate", x, weights[0], biases[0])
        up = self.product(f"{h}up", x, weights[1], biases[1])
        y = self.do(f"{h}ff", "silu_mul", (gate, up), into=up, **self.c.gate)
        return Rows(y, bound=self._bounds.get(f"{h}ff"))

    def _cache(self, h: str) -> tuple[str, ...]:
        return f"{h}k", f"{h}v", "row", "positions"

    def _weights(self, w: str, a: Rows) -> tuple[str, dict[str, Any]]:
        """Return the name of the weights (`w` or its hi/lo form) for rows `a`, and options."""
        if a.operand:
            return (hi_lo_of(w) if a.operand.dtype == HI_LO else w), {}
        if a.bound is None or not self.do.has(hi_lo_of(w)):
            return w, {}
        return hi_lo_of(w), {"x_bound": _power_from(a.bound)}

    def _options(self, a: Rows) -> dict[str, Any]:
        """Return a product's options for rows `a`: eps for a norm, and operand or x_dtype."""
        normed = {"eps": self.c.scales.eps} if a.gamma else {}
        return normed | ({"operand": a.operand} if a.operand else self.rounding)

    def _fuses_rope(self, operand: Operand | None) -> bool:
        """Return whether the QKV product fuses RoPE and appends to the kv_cache."""
        ordered = operand is not None and operand.width > 0
        if self.c.qk_norm and not (self.fuses.heads and operand is None):
            return False
        possible = ordered or (self.fuses.rope and operand is None)
        return possible and self.c.head_size % (64 if ordered else 16) == 0

    def _format(
        self, to: To, bound: float | None = None, width: int | None = None, together: int = 1
    ) -> Operand | None:
        """Return the preferred `Operand` that all products with weights `to` can read, or None.

        bound: upper bound of the operand's magnitudes. width: the required width of the terms.
        together: neighbouring channels computed together by the kernel that stores the terms.
        """
        first, *others = [self.known.get(_matrix_of(w), ()) for w in to] or [()]
        for operand in first:
            if not all(operand in each for each in others) or width not in (None, operand.width):
                continue
            if operand.dtype != HI_LO:
                summed = any(_matrix_of(w) in self.summed for w in to)
                return operand.with_sums(together) if summed else operand
            if bound is not None and all(self.do.has(hi_lo_of(w)) for w in to):
                return operand._replace(scale=scale_for(_power_from(bound)))
        return None


class PendingResidual(NamedTuple):
    """The residual stream, and partial sums of a product that the next kernel adds to the stream.

    sums: the partial sums of the product with w_down, one per split, as `gated_sums` returns them;
    "", with w_down "", if nothing remains to add.
    """

    stream: Value
    sums: Value = ""
    w_down: str = ""


class Gated(NamedTuple):
    """The inputs of a `gated_sums` step except its last input, the weights w_down."""

    stream: Value
    gamma: str
    gate: str
    up: str


class SumsPass(DecodePass):
    """Decoding of a few rows with four kernels per layer, for Llama models without biases.

    Products fuse RMSNorm, and the QKV product also fuses RoPE. The feed-forward is one kernel; the
    next kernels add up its partial sums. All rows are floats. splits: the number of partial sums
    of `gated_sums`.
    """

    def __init__(
        self,
        do: Executor,
        settings: PassSettings,
        splits: int,
        fp8_cache: str | None = None,
        x_dtype: str | None = None,
        together: int = 1,
    ) -> None:
        super().__init__(do, settings, fp8_cache=fp8_cache, x_dtype=x_dtype, together=together)
        self.splits = splits
        self.eps: dict[str, Any] = {"eps": settings.scales.eps}

    def embed(self) -> PendingResidual:
        return PendingResidual(super().embed())

    def norm(self, name: str, x: PendingResidual, gamma: str, beta: str = "", to: To = ()) -> Rows:
        if to != ("lm_head",):
            return Rows(x, gamma)
        inputs = (x.stream, gamma, x.sums, x.w_down)
        return Rows(self.do(name, "rmsnorm_sums", inputs, **self.eps))

    def qkv(self, h: str, x: Rows, norms: To = ()) -> Value:
        stream, *sums = x.value
        by = self.rotations[self.c.frequencies_of(h)]
        inputs = (stream, x.gamma, f"{h}w_qkv", *sums, by, *self._cache(h), *norms)
        options = {"n_head": self.c.n_head, **self.c.grown, **self.eps, **self.kv, **self.rounding}
        return self.do(f"{h}q", "rope_sums", inputs, **options)

    def _product(self, p: Product) -> Value:
        if p.w == "lm_head":
            return super()._product(p)
        stream, *sums = p.residual
        if isinstance(p.a, Gated):
            options = {"splits": self.splits, **self.eps, **self.c.gate, **self.rounding}
            partial_sums = self.do(p.name, "gated_sums", (*p.a, p.w), **options)
            return PendingResidual(stream, partial_sums, p.w)
        inputs = (p.a.value, p.w, stream, *sums)
        y = self.do(p.result, "linear_sums", inputs, into=stream, **self.rounding)
        return PendingResidual(y)

    def gated(self, h: str, x: Rows, to: To = ()) -> Value:
        return Gated(x.value.stream, x.gamma, f"{h}w_gate", f"{h}w_up")

    def _fuses_rope(self, operand: Operand | None) -> bool:
        return True


def _power_from(bound: float) -> float:
    """Round a bound up to a power of two, so that more layers have equal launch parameters."""
    return 2.0 ** math.ceil(math.log2(bound)) if bound else 0.0


def _matrix_of(w: str) -> str:
    """Return the last part of a weight's name, which is the key of `DecodePass.known`."""
    return w.rpartition(".")[2]


def _as_option(operand: Operand | None) -> dict[str, Any]:
    return {"to_operand": operand} if operand else {}

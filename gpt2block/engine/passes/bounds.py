"""Compute upper bounds of the magnitudes in a forward pass, which hold for every input."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from gpt2block.engine.passes.executor import Step
from gpt2block.engine.passes.forward import Pass, block
from gpt2block.engine.passes.settings import PassSettings
from gpt2block.models.architectures import architecture_of
from gpt2block.models.config import ModelConfig, model_shapes
from gpt2block.ops.layernorm import layernorm_bound

# A function whose arguments name a matrix and a vector γ ("" for ones): it returns upper bounds of
# the Euclidean norms of the rows (N, K) of the matrix, each column multiplied by its γ.
RowNorms = Callable[[str, str], np.ndarray]
Norms = tuple[str, ...]  # names of the weights of norms of heads
AND_1 = "_and_1"  # ends the name of the tensor 1 + w, for the weights w of a norm


def result_bounds(steps: Iterable[Step], tensors: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return {name: upper bound} of the results of a GPT-2 block's steps, without residual sums.

    tensors: NumPy arrays by name, matrices (K, N). NaN or infinite weights give no usable bound.
    """
    found: dict[str, float] = {}
    for step in steps:
        x, *others = step.inputs
        if step.op == "layernorm":
            found[step.name] = layernorm_bound(*(tensors[name] for name in others))
        elif step.op in ("gelu", "attention") and x in found:
            found[step.name] = found[x]  # attention is a weighted mean of rows of V
        elif step.op in ("gemm", "matmul_bias") and len(others) < 3 and x in found:
            w, bias = (np.abs(tensors[name]) for name in others)  # a fused GELU increases nothing
            found[step.name] = found[x] * float(w.sum(axis=0, dtype=np.float64).max())
            found[step.name] += float(bias.max())
    return found


class BoundedRows(NamedTuple):
    """Upper bounds of rows that hold for every input.

    most: of magnitudes, a number for all channels or one for each. norm: of Euclidean norms; None
    if only `most` is known. gammas: vectors, "" for ones; a row is the sum of the products of such
    vectors with rows of this norm.
    """

    most: Any
    norm: float | None = None
    gammas: tuple[str, ...] = ("",)


class BoundsPass(Pass):
    """A forward pass that computes upper bounds. `found`: the bounds of operands of products.

    largest: the largest magnitude of every tensor; if one is infinity or NaN, so are bounds.
    Intermediates that are stored next to operands have bounds, too.

    The C values of a normalized row before γ and β have a Euclidean norm of at most sqrt(C). The
    product of this row with a row of weights, times γ, is at most sqrt(C) times the norm of the row
    of weights; the same limit holds for the product of C ones with the row, times β. Attention
    computes weighted means of rows of v, RoPE rotates pairs of q and k only, and GELU, SiLU and
    sigmoid increase no magnitude. The sums of gate and up are multiplied channel by channel, which
    is why `norms` returns a number for each channel.
    """

    def __init__(self, config: ModelConfig, largest: Mapping[str, Any], norms: RowNorms) -> None:
        self.config, self.norms = config, norms
        self.c: Any = PassSettings.of(config)
        self.shapes, self.root = model_shapes(config), math.sqrt(config.n_embd)
        constants = architecture_of(config).constants(config, largest)
        self.largest = {n: float(np.abs(a).max()) for n, a in {**constants, **largest}.items()}
        self.found: dict[str, float] = {}

    def _record(self, name: str, rows: BoundedRows) -> BoundedRows:
        self.found[name] = float(np.maximum(np.max(rows.most), self.found.get(name, 0.0)))
        return rows

    def embed(self) -> BoundedRows:
        tokens = self.largest["wte"] * self.c.scales.embedding + self.largest.get("wpe", 0.0)
        if self.config.READS_STREAM:
            joined: BoundedRows = self._combined(None)
            return joined
        if self.c.embedding_norm:
            return BoundedRows(max(tokens, self.root), self.root)  # bounds its input, too
        return BoundedRows(tokens, self.root * tokens)

    def norm(self, name: str, x: object, gamma: str, beta: str = "") -> BoundedRows:
        most = self.root * self.largest[gamma] + self.largest.get(beta, 0.0)
        gammas = (gamma, beta) if beta else (gamma,)
        return self._record(name, BoundedRows(most, self.root, gammas))

    def product(
        self,
        name: str,
        a: BoundedRows,
        w: str,
        bias: str = "",
        add: tuple[str, Any] = ("", None),
        gelu: str = "",
    ) -> BoundedRows:
        if a.norm is None:
            most = self.shapes[w][0] * np.max(a.most) * self.largest[w]
        else:
            most = a.norm * sum(self._norms(w, gamma) for gamma in a.gammas)
        most = most + self.largest.get(bias, 0.0)
        if add[0]:
            most = float(np.max(add[1].most) + np.max(most))
        rows = BoundedRows(most)
        return self._record(gelu, rows) if gelu else rows

    def _norms(self, w: str, gamma: str) -> np.ndarray:
        """Return `norms` also for constants: |W (1 + w)| <= |W| + |W w| for a row W of a matrix."""
        if gamma.endswith(AND_1):
            return self.norms(w, "") + self.norms(w, gamma.removesuffix(AND_1))
        return self.norms(w, gamma if gamma in self.shapes else "")  # other vectors are ones

    def operand(self, name: str, x: BoundedRows) -> BoundedRows:
        return self._record(name, x)

    def add_norm(self, name: str, x: Any, y: object, gamma: str, scale: str = "") -> BoundedRows:
        added, factor = self.root * self.largest[gamma], self.largest.get(scale, 1.0)
        return BoundedRows((x.most + added) * factor, (x.norm + added) * factor)

    def qkv(self, h: str, x: BoundedRows, norms: Norms = ()) -> BoundedRows:
        y = self.product(f"{h}qkv", x, f"{h}w_qkv", f"{h}b_qkv")
        if not self.c.rope:
            return self._record(f"{h}qkv", y)
        return self._record_rotated(f"{h}rope", h, y, norms)

    def queries(self, h: str, x: BoundedRows, norm: str) -> BoundedRows:
        y = self.product(f"{h}queries", x, f"{h}w_q", f"{h}b_q")
        return self._record_rotated(f"{h}q_rope", h, y, (norm,))

    def _record_rotated(
        self, name: str, h: str, y: BoundedRows, norms: tuple[str, ...]
    ) -> BoundedRows:
        """Return y; add the bound of y and of its q and k after norms of heads, RoPE and growth.

        A head before γ has a norm of at most sqrt(D), and so has a pair that RoPE rotates.
        """
        scales, D = self.c.scales, (self.config.head_size,)
        sizes = [self.shapes.get(f"{h}gamma_{each}", D)[0] for each in "qk"]
        heads = [math.sqrt(n) * self.largest[g] for n, g in zip(sizes, norms, strict=False)]
        turned = math.sqrt(2) * max(1.0, scales.rope)
        if self.c.values:  # all heads have norms, so that RoPE rotates no row of y
            heads, turned = [*heads, math.sqrt(sizes[0])], 1.0
        beta, span = scales.growth or (0.0, 1)
        growth = 1 + beta * math.log1p((self.config.n_ctx - 1) // span)
        self.found[name] = float(np.max([turned * np.max(y.most), *heads])) * growth
        return y

    def attend(self, h: str, qkv: BoundedRows) -> BoundedRows:
        return qkv

    def gate_of_heads(self, h: str, x: object) -> None:
        """Return None: sigmoid(gate) is at most 1."""

    def gated_heads(self, h: str, gate: None, y: BoundedRows) -> BoundedRows:
        return y

    def delta(self, h: str, x: BoundedRows) -> BoundedRows:
        of = self.c.delta_nets
        z = self.product(f"{h}in", x, f"{h}w_in").most[-of.values :]
        heads = math.sqrt(of.v_size) * self.largest[f"{h}gamma_o"]
        return self._record(f"{h}normed", BoundedRows(heads * z))

    def short_conv(self, h: str, bcx: BoundedRows) -> BoundedRows:
        b, c, x = np.resize(bcx.most, (3, len(bcx.most) // 3 or 1))
        taps = self.shapes[f"{h}taps"][-1] * self.largest[f"{h}taps"]
        sums = taps * b * x + self.largest.get(f"{h}b_taps", 0.0)
        return self._record(f"{h}conv", BoundedRows(c * sums))

    def gated(self, h: str, x: BoundedRows) -> BoundedRows:
        gate, up = (
            self._record(f"{h}{each}", self.product("", x, f"{h}w_{each}", f"{h}b_{each}"))
            for each in ("gate", "up")
        )
        return self._record(f"{h}ff", BoundedRows(gate.most * up.most))

    def experts(self, h: str, x: BoundedRows, y: BoundedRows) -> BoundedRows:
        of = self.c.experts
        gate, up = (self.product("", y, f"{h}w_{each}_experts") for each in ("gate", "up"))
        down = self.product("", BoundedRows(gate.most * up.most), f"{h}w_down_experts")
        weights = of.factor * (of.n_used if of.sigmoid and not of.normed else 1)  # at most, the sum
        return BoundedRows(np.max(x.most) + weights * np.max(down.most))

    def gated_by_layer(self, h: str, gate: BoundedRows) -> BoundedRows:
        width, factor, _ = self.c.layers
        normed = math.sqrt(width) * self.largest["gamma_layers_scaled"]
        return BoundedRows(gate.most * (normed + factor * self.largest["layer_table"]))

    def relu_squared(self, name: str, x: BoundedRows) -> BoundedRows:
        return BoundedRows(x.most * x.most)


def rough_norms(config: ModelConfig, largest: Mapping[str, float]) -> RowNorms:
    """Return RowNorms that are computed from the largest magnitudes."""
    shapes = model_shapes(config)

    def norms(w: str, gamma: str) -> np.ndarray:
        factor = largest[gamma] if gamma else 1.0
        return np.array([math.sqrt(shapes[w][0]) * largest[w] * factor])

    return norms


def bounds_of(
    config: ModelConfig, largest: Mapping[str, float], norms: RowNorms | None = None
) -> tuple[list[float], dict[str, float]]:
    """Return upper bounds of the residual stream after the embedding and each block; of operands.

    The second result is {name: bound}, for the operands and intermediates of all layers' products
    and the final norm. largest, norms: as for BoundsPass; norms None: `rough_norms`.
    """
    o = BoundsPass(config, largest, norms or rough_norms(config, largest))
    of, x = architecture_of(config), o.embed()
    stream = [x.most]
    for n in range(config.n_layer):
        x = block(o, of, x, f"h.{n}.")
        stream.append(x.most)
    for head in (False, True):  # Granite's final norm differs
        of.final(o, x, head)
    return stream, o.found

"""Decoding steps of a Llama, first with one kernel per operation, then with more and more fusions.

The stages follow the table of kernl's Llama optimisation.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import accumulate
from operator import or_

from gpt2block.engine.passes.blocks import PassSettings
from gpt2block.engine.passes.decoding import DecodePass, Rows
from gpt2block.engine.passes.executor import Executor
from gpt2block.engine.passes.forward import Product, forward
from gpt2block.models.architectures import architecture_of
from gpt2block.models.architectures.architecture import To, Value
from gpt2block.models.config import ModelConfig
from gpt2block.ops.attention import SIXTEEN_BITS

UNFUSED = "unfused"  # name of the first stage, which has no fusions
Stages = Mapping[str, Collection[str]]  # name of a stage → its fusions
SIXTEEN_BIT_STAGES = {  # name of a stage → fusions that it adds to the preceding stage
    UNFUSED: "",
    "+ residuals": "adds",
    "+ RoPE": "into_cache",
    "+ graph": "graph",
    "+ overlap": "overlap",
}
OTHER_STAGES = {
    UNFUSED: "",
    "+ RMSNorm": "adds norms",
    "+ RoPE": "into_cache",
    "+ feed-forward": "gates",
    "+ graph": "graph",
}


def stages_of(dtype: str) -> Stages:
    """Return {name of a stage: its set of fusions} for weights of this dtype, fewest fusions first.

    Residual additions are fused together with RMSNorm; RoPE together with the append of K and V to
    the kv_cache. Kernels with a fused RMSNorm support float32 activations only with float32 and FP8
    weights. These kernels do not overlap.
    """
    stages = SIXTEEN_BIT_STAGES if dtype in SIXTEEN_BITS else OTHER_STAGES
    added = (frozenset(more.split()) for more in stages.values())
    return dict(zip(stages, accumulate(added, or_), strict=True))


def staged(do: Executor, config: ModelConfig, fusions: Collection[str]) -> Value:
    """Run a decoding step with these fusions, up to the logits."""
    step = StagedPass(do, PassSettings.of(config), fusions)
    return forward(step, architecture_of(config), config, "logits")


class StagedPass(DecodePass):
    """A decoding step with a chosen set of fusions.

    "adds": products add residuals. "norms": products apply RMSNorm. "gates": one product computes
    gate and up of the feed-forward. "into_cache": RoPE also appends K and V to the kv_cache, and
    attention reads them there; otherwise a separate kernel appends K and V, and attention reads
    rows [Q | K | V].
    """

    def __init__(self, do: Executor, settings: PassSettings, fusions: Collection[str]) -> None:
        super().__init__(do, settings, norms="norms" in fusions)
        self.adds, self.gates = "adds" in fusions, "gates" in fusions
        self.into_cache, self.longest = "into_cache" in fusions, 1

    def norm(self, name: str, x: Value, gamma: str, beta: str = "", to: To = ()) -> Rows:
        if self.norms and to != ("lm_head",):
            return Rows(x, gamma)
        return super().norm(name, x, gamma, beta, to)

    def _product(self, p: Product) -> Value:
        if p.a.gamma:
            inputs = p.a.value, p.a.gamma, p.w
            return self.do(p.name, "rmsnorm_matmul", inputs, eps=self.c.scales.eps)
        if not p.add or self.adds:
            return super()._product(p)
        y = super()._product(p._replace(add="", residual=None, result=p.name, to=()))
        return self.do(p.result, "add", (p.residual, y), into=p.residual)

    def qkv(self, h: str, x: Rows, norms: To = ()) -> Value:
        if self.into_cache:
            return super().qkv(h, x, norms)
        y = self.product(f"{h}qkv", x, f"{h}w_qkv", f"{h}b_qkv")
        return self.rotate(h, y, norms)

    def attend(self, h: str, qkv: Value, to: To = ()) -> Rows:
        if self.into_cache:
            return super().attend(h, qkv, to)
        self._append(h, qkv)
        return Rows(self._over_cache(f"{h}attn", h, qkv))

    def gated(self, h: str, x: Rows, to: To = ()) -> Value:
        if not (self.gates and x.gamma):
            return super().gated(h, x, to)
        inputs = (x.value, x.gamma, f"{h}w_gate", f"{h}w_up")
        return Rows(self.do(f"{h}ff", "rmsnorm_ffn", inputs, eps=self.c.scales.eps))

"""The forward passes of a model as plans, for every architecture.

    model_plan     tokens → logits, a step per operation: the NumPy model
    Prefill.plan   the same on a GPU, for packed rows of several sequences
    decode_plan    one token for each row of a kv_cache, on a GPU
    staged_plan    the same with other fusions, to measure what each brings

What a block is, and the names of its tensors, is up to the architecture (`architecture_of`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from gpt2block.architectures import Architecture, architecture_of
from gpt2block.architectures.steps import (
    BATCH,
    Products,
    Steps,
    Want,
    as_linear,
    convert_operands,
    fuse_epilogues,
    fuse_gates,
    fuse_norms,
    fuse_rope,
    hand_over_terms,
    parts_of,
)
from gpt2block.config import ModelConfig, model_shapes
from gpt2block.plan import Plan, Step, Terms

ROWS_AT_ONCE = 1024  # rows of logits computed together

# Operations that write or read a kv_cache, or round to its dtype.
OF_CACHE = (
    *("kv_append", "kv_round", "linear_qkv", "linear_rope", "rope_append"),
    *("attention_packed", "attention_split"),
)


@lru_cache(maxsize=64)
def model_plan(config: ModelConfig, want: Want | None, longest: int) -> Plan:
    """Tokens to logits or hidden states, a step per operation.

    longest: the number of tokens of the longest sequence. K and V of a layer: "h.0.k", "h.0.v".
    """
    architecture = architecture_of(config)
    steps, x = _embedding(architecture)
    for h in _layers(config):
        steps += architecture.model_block(config, _cached_attention(config, h, longest), h, x)
        x = f"{h}output"
    if want == "last":
        steps.append(Step("last.x", "take", (x, "last")))
        x = "last.x"
    if want is not None:
        steps.append(architecture.final_norm(config, x))
    if want in ("last", "logits"):
        steps.append(Step("logits", "matmul_bias", (architecture.FINAL, "lm_head")))
    return _model(config, steps)


@dataclass(frozen=True)
class Prefill:
    """The parameters that determine the steps of a prefill on a GPU.

    products: "float32" is `linear`, the others are `gemm` on tensor cores, with activations of 16
    bits or in two parts. With "fp8", FP8 weights are converted into the tensor "wide" before each
    product. rows: new tokens of all sequences; longest: an upper bound for one sequence. cached:
    whether there is a kv_cache; with tensor cores, attention over the new tokens only does not need
    one. continued: whether the sequences continue tokens in the kv_cache; else all are new. Only
    tensor cores distinguish them. ends: the number of rows of the output "last"; None: one for each
    row of the kv_cache. kv_dtype: as in `decode_plan`; attention over the new tokens only then
    reads keys and values that have been rounded to it, too. gated: whether products of 16 bits can
    have two matrices, so that a gated feed-forward has one product in place of gate, up and ff.
    """

    products: Products
    rows: int
    batch: int
    longest: int
    cached: bool
    continued: bool = False
    ends: int | None = None
    kv_dtype: str | None = None
    gated: bool = False

    @property
    def tensor_cores(self) -> bool:
        return self.products != "float32"

    def plan(self, config: ModelConfig, want: Want | None) -> Plan:
        """The plan that computes `want`; None: the plan ends with the last layer's attention.

        Steps after the last attention are computed for the requested rows only: for "last", for one
        row of each sequence.
        """
        architecture = architecture_of(config)
        steps, x = _embedding(architecture)
        for h in _layers(config)[:-1]:
            steps += self._fused(self._block(config, h, x))
            x = f"{h}output"
        h = _layers(config)[-1]
        unfused = self._block(config, h, x)
        fused = self._fused(unfused)
        end = [step.name for step in fused].index(f"{h}attn") + 1
        steps += fused[:end]
        if want == "last":
            steps += self._last_rows(h, x, fused[end:], unfused)
            steps += _lm_head(config, f"{h}output")
        elif want is not None:
            steps += [*fused[end:], self._norm(architecture.final_norm(config, f"{h}output"))]
        if want == "log_likelihood":
            for first in range(0, self.rows, ROWS_AT_ONCE):
                steps += self._scores(config, first)
        apart = architecture.FINAL if self.tensor_cores and want == "hidden" else ""
        return _model(config, steps, apart, self.tensor_cores, self.kv_dtype)

    def _block(self, config: ModelConfig, h: str, x: str) -> Steps:
        """A step per operation, with attention over the cache, or over the new tokens only."""
        architecture = architecture_of(config)
        append, cached = _cached_attention(config, h, self.longest)
        if not self.tensor_cores:
            attention = [append, cached]
        elif not self.continued:
            heads = {"n_head": config.n_head, "n_kv_head": config.kv_width // config.head_size}
            heads |= {"causal": True, "max_seqlen": self.longest}
            qkv = f"{h}{architecture.QKV}"
            rounded: Steps = []
            if self.kv_dtype is not None:
                of_kv = {name: heads[name] for name in ("n_head", "n_kv_head")}
                rounded = [Step(f"{h}rounded", "kv_round", (qkv,), of_kv)]
                qkv = f"{h}rounded"
                append = replace(append, inputs=(qkv, *append.inputs[1:]))
            new = Step(f"{h}attn", "attention_varlen", (qkv, "cu_seqlens"), heads)
            attention = [*rounded, append, new] if self.cached else [*rounded, new]
        elif self.products == "two_part":  # qkv and attention over the cache are float32
            joined = replace(cached, name=f"{h}attn_cached")
            attention = [append, joined, Step(f"{h}attn", "two_part", (joined.name,))]
        else:
            attention = [append, cached]
        return architecture.model_block(config, attention, h, x)

    def _fused(self, unfused: Steps) -> Steps:
        if self.tensor_cores:
            fused = [self._converted(step) for step in fuse_epilogues(unfused, "gemm")]
        else:
            fused = [_tiles(step) for step in fuse_epilogues(unfused, "linear")]
        if self.products == "two_part":
            fused = convert_operands(fused)
        if self.gated:
            fused = fuse_gates(fused)
        return [self._norm(step) for step in fused]

    def _converted(self, step: Step) -> Step:
        """A product of weights in two parts, or with memory for FP8 weights that it converts."""
        if step.op != "gemm" or self.products == "16_bits":
            return step
        a, w, bias, residual = (*step.inputs, "")[:4]
        if self.products == "fp8":
            return replace(step, inputs=(a, w, bias, residual, "", "wide"))
        return replace(step, inputs=(a, parts_of(w), *step.inputs[2:]))

    def _norm(self, step: Step) -> Step:
        variant: dict[str, Any] = {}
        if step.op == "layernorm":
            variant = {"variant": "narrow"} if self.tensor_cores else {"variant": 6, "stats": False}
        elif step.op == "rmsnorm":
            variant = {"variant": "stream"}
        return replace(step, attrs={**step.attrs, **variant})

    def _last_rows(self, h: str, x: str, rest: Steps, unfused: Steps) -> Steps:
        """The steps after the last attention, for the last row of each sequence.

        rest: those steps; unfused: the last block, a step per operation. The products of decoding
        have fewer kernels, which are faster than tensor cores for few rows; they take float32 rows.
        """
        names_of = [step.name for step in unfused]
        if self.products == "two_part":
            rest = _decoding(unfused[names_of.index(f"{h}attn") + 1 :])
        elif self.tensor_cores:
            rest = [rest[0], *_decoding(unfused[names_of.index(f"{h}x1") + 1 :])]
        names = {x: "last.x", f"{h}attn": "last.attn"}
        row = {"first": self.rows - 1, "end": self.rows}
        taken = [
            Step(short, "take", (long, "last"))
            if self.batch > 1 or (self.products == "two_part" and long != x)
            else Step(short, "rows", (long,), row)
            for long, short in names.items()
        ]
        return taken + [
            replace(step, inputs=tuple(names.get(name, name) for name in step.inputs))
            for step in rest
        ]

    def _scores(self, config: ModelConfig, first: int) -> Steps:
        """Log-likelihoods of the targets of some rows."""
        span = {"first": first, "end": min(self.rows, first + ROWS_AT_ONCE)}
        targets = Step(f"targets.{first}", "rows", ("targets",), span)
        inputs = f"logits.{first}", targets.name
        scores = Step(f"scores.{first}", "log_likelihood", inputs)
        return [*head_steps(config, span["first"], span["end"], self.products), targets, scores]


def head_steps(config: ModelConfig, first: int, end: int, products: Products) -> Steps:
    """Logits of rows `first` to `end` - 1 of the final norm; head: lm_head, padded for it."""
    final = architecture_of(config).FINAL
    hidden = Step(f"hidden.{first}", "rows", (final,), {"first": first, "end": end})
    name = f"logits.{first}"
    if products == "float32":
        return [hidden, Step(name, "linear", (hidden.name, "head"), {"variant": "tiles"})]
    wide = ("", "", "wide") if products == "fp8" else ()
    return [hidden, Step(name, "gemm", (hidden.name, "head", "head_bias", *wide))]


def head_plan(config: ModelConfig, rows: int, first: int, products: Products) -> Plan:
    """`head_steps` of up to ROWS_AT_ONCE rows, from `first` on; the input is its result."""
    steps = head_steps(config, first, min(rows, first + ROWS_AT_ONCE), products)
    final = architecture_of(config).FINAL
    return Plan(tuple(steps), ("head", "head_bias", "wide"), input=final)


def decode_plan(
    config: ModelConfig,
    fused_norm: bool = True,
    terms: Mapping[str, Sequence[Terms]] | None = None,
    kv_dtype: str | None = None,
) -> Plan:
    """A token for each row of a kv_cache; logits at the end. GPT-2 has five kernels a layer.

    The last step of qkv also appends K and V to the cache, and returns `q`. tokens, row and
    positions (M,) are in device memory, so all steps are one graph. fused_norm: LayerNorm is part
    of the products; else it has steps of its own, for many rows, with the same bits. terms: as
    `hand_over_terms` takes them. kv_dtype: the FP8 format of the kv_cache, or None.
    """
    architecture = architecture_of(config)
    steps, x = _embedding(architecture)
    for h in _layers(config):
        unfused = architecture.model_block(config, _split_attention(config, h), h, x)
        steps += [
            architecture.into_cache(config, h, step, _cache_of(h))
            if step.name == f"{h}{architecture.QKV}"
            else step
            for step in _decoding(unfused, fused_norm)
        ]
        x = f"{h}output"
    steps += _lm_head(config, x, fused_norm)
    if terms:
        steps = hand_over_terms(fuse_gates(hand_over_terms(steps, terms)), terms)
        steps = fuse_rope(steps, config.head_size)
    return _model(config, steps, overlapping=True, kv_dtype=kv_dtype)


def staged_plan(
    config: ModelConfig, fuse: Callable[[Steps], Steps], into_cache: bool, overlapping: bool
) -> Plan:
    """`decode_plan` with the fusions of `fuse` in place of its own.

    fuse: from the steps of a block, one for each operation, to fewer, with products as `gemm`. As
    in decode_plan, they become `linear`. into_cache: one kernel returns q, and appends K and V to
    the cache, which the attention of decoding then reads; else K and V are appended by a kernel of
    their own, and attention takes rows [Q | K | V], of cu_seqlens and start. overlapping: as in
    Plan.
    """
    architecture = architecture_of(config)
    steps, x = _embedding(architecture)
    for h in _layers(config):
        attention = _split_attention(config, h) if into_cache else _cached_attention(config, h, 1)
        for step in fuse(architecture.model_block(config, attention, h, x)):
            if into_cache and step.name == f"{h}{architecture.QKV}":
                steps.append(architecture.into_cache(config, h, step, _cache_of(h)))
            else:
                product = step.op in ("matmul_bias", "gemm")
                steps.append(_decoding_step(as_linear(step) if product else step))
        x = f"{h}output"
    return _model(config, [*steps, *_lm_head(config, x)], overlapping=overlapping)


def _cache_of(h: str) -> tuple[str, ...]:
    """The names of a layer's kv_cache, and of the rows and positions of new tokens in it."""
    return f"{h}k", f"{h}v", "row", "positions"


def _split_attention(config: ModelConfig, h: str) -> Steps:
    """Attention of decoding, over the cache."""
    heads = {"n_head": config.n_head}
    return [Step(f"{h}attn", "attention_split", (f"{h}q", *_cache_of(h)), heads)]


def _embedding(architecture: Architecture) -> tuple[Steps, str]:
    """The steps before the first block, and the name of the block's input."""
    step = architecture.embedding()
    return [step], step.name


def _layers(config: ModelConfig) -> list[str]:
    """The prefix of the names of each layer's tensors."""
    return [f"h.{layer}." for layer in range(config.n_layer)]


def _cached_attention(config: ModelConfig, h: str, longest: int) -> Steps:
    """Append K and V of qkv to the cache, then compute causal attention over it."""
    cache, qkv = (f"{h}k", f"{h}v"), f"{h}{architecture_of(config).QKV}"
    heads = {"n_head": config.n_head, "longest": longest}
    return [
        Step(f"{h}kv", "kv_append", (qkv, *cache, "row", "positions")),
        Step(f"{h}attn", "attention_packed", (qkv, *cache, "cu_seqlens", "start"), heads),
    ]


def _lm_head(config: ModelConfig, x: str, fused_norm: bool = True) -> Steps:
    """The final norm and the logits of few rows, in one kernel where it can be; or in two."""
    norm = architecture_of(config).final_norm(config, x)
    return _decoding([norm, Step("logits", "matmul_bias", (norm.name, "lm_head"))], fused_norm)


def _tiles(step: Step) -> Step:
    """A product of many rows in float32."""
    return as_linear(step, variant="tiles") if step.op == "linear" else step


def _decoding(steps: Iterable[Step], fused_norm: bool = True) -> Steps:
    """Steps with the order of additions of decoding, which is the same for any number of rows.

    fused_norm: a LayerNorm is part of the product after it.
    """
    fused = fuse_norms(steps) if fused_norm else fuse_epilogues(steps, "linear")
    return [_decoding_step(step) for step in fused]


def _decoding_step(step: Step) -> Step:
    if step.op == "layernorm":
        return replace(step, attrs={**step.attrs, "variant": "decode", "stats": False})
    if step.op == "rmsnorm":
        return replace(step, attrs={**step.attrs, "variant": "stream"})
    if step.op != "linear":
        return step
    linear = step if len(step.inputs) == 6 else as_linear(step)
    return replace(linear, attrs={**linear.attrs, "decoding": True})


def _model(
    config: ModelConfig,
    steps: Steps,
    apart: str = "",
    overlapping: bool = False,
    kv_dtype: str | None = None,
) -> Plan:
    """A plan of these steps, whose tensors share one buffer of each kind, except for `apart`.

    kv_dtype: the FP8 format of the kv_cache, which the steps that need it get as an attribute.
    """
    if kv_dtype is not None:
        of_cache = {"kv_dtype": kv_dtype}
        steps = [
            replace(step, attrs={**step.attrs, **of_cache}) if step.op in OF_CACHE else step
            for step in steps
        ]
    architecture = architecture_of(config)
    cache = [f"h.{n}.{half}" for n in range(config.n_layer) for half in "kv"]
    weights = model_shapes(config)
    given = (*weights, *map(parts_of, weights), "lm_head", "head", "head_bias", "wide")
    given += (*architecture.constants(config), *BATCH[1:], *cache)
    in_place: dict[str, str] = {}
    newest: dict[str, str] = {}
    for step in steps:
        kind = (
            architecture.BUFFERS.get(step.name.rpartition(".")[2]) if step.name != apart else None
        )
        if step.name.startswith("last."):  # fewer rows, in buffers of their own
            newest = {k: name for k, name in newest.items() if name.startswith("last.")}
        elif kind in newest:
            in_place[step.name] = newest[kind]
        if kind:
            newest[kind] = step.name
    names = tuple(dict.fromkeys(given))
    return Plan(tuple(steps), names, in_place, "tokens", overlapping)

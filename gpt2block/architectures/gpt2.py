"""GPT-2 as plans. All forward passes share one definition of the Pre-LN block, `block`.

    ten_step_plan, fused_plan   one block
    model_plan                  tokens → logits, a step per operation: the NumPy model
    Prefill.plan                the same on a GPU, for packed rows of several sequences
    decode_plan                 one token for each row of a kv_cache, on a GPU

The fused plans are derived from the ten steps: `fuse_epilogues` fuses a GELU or addition into the
matrix product before it, `fuse_norms` a LayerNorm into the one after it. A tensor has one name in
all plans; that of a layer begins with "h.0.", "h.1." and so on, like its weights.

Rows of several sequences are packed into one matrix (N, C); only attention, the embedding and the
kv_cache distinguish sequences. Source: Radford et al., "Language Models are Unsupervised Multitask
Learners" (2019).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from gpt2block.config import GPT2Config, model_shapes
from gpt2block.plan import Plan, Step

Steps = list[Step]
Want = Literal["last", "logits", "hidden", "log_likelihood"]
Products = Literal["float32", "16_bits", "fp8", "two_part"]
ROWS_AT_ONCE = 1024  # rows of logits computed together
NORM = "LayerNorm"
QKV = "qkv"  # the step whose rows are [Q | K | V] as attention reads them

# The int32 arrays that describe a batch of packed sequences: tokens (N,), their positions (N,) and
# sequences (N,); the start of each sequence in the rows (B + 1,) and in the kv_cache (B,); the row
# of its last token (ends,); the token after each one (N,).
BATCH = ("tokens", "positions", "row", "cu_seqlens", "start", "last", "targets")

# The last part of a tensor's name → the buffer that it shares with other tensors, in turn.
_BUFFERS: Mapping[str, str] = {
    **dict.fromkeys(("embedding", "x", "x1", "output"), "stream"),
    **dict.fromkeys(("ln1", "attn", "ln2", "ln_f"), "normed"),
    **{name: name for name in ("qkv", "q")},
    **dict.fromkeys(("attn_cached", "gelu"), "ff"),
}


def block(eps: float, attention: Sequence[Step], h: str = "", x: str = "x") -> Steps:
    """The ten steps of a Pre-LN block; attention: the steps from `qkv` to `attn`.

    h: the prefix of the names of its weights and tensors; x: the name of its input.
    """
    norm = {"eps": eps}
    return [
        Step(f"{h}ln1", "layernorm", (x, f"{h}gamma1", f"{h}beta1"), norm),
        Step(f"{h}qkv", "matmul_bias", (f"{h}ln1", f"{h}w_qkv", f"{h}b_qkv")),
        *attention,
        Step(f"{h}proj", "matmul_bias", (f"{h}attn", f"{h}w_attn", f"{h}b_attn")),
        Step(f"{h}x1", "add", (x, f"{h}proj")),
        Step(f"{h}ln2", "layernorm", (f"{h}x1", f"{h}gamma2", f"{h}beta2"), norm),
        Step(f"{h}ff1", "matmul_bias", (f"{h}ln2", f"{h}w_fc", f"{h}b_fc")),
        Step(f"{h}gelu", "gelu", (f"{h}ff1",)),
        Step(f"{h}ff2", "matmul_bias", (f"{h}gelu", f"{h}w_proj", f"{h}b_proj")),
        Step(f"{h}output", "add", (f"{h}x1", f"{h}ff2")),
    ]


def fuse_epilogues(steps: Iterable[Step], op: str) -> Steps:
    """Every matmul_bias as `op`, which applies the GELU or adds the residual that follows it.

    The fused step has the name of the last of its steps, and inputs (a, w, bias, residual).
    """
    fused: Steps = []
    for step in steps:
        product = fused[-1] if fused and fused[-1].op == op else None
        if product is not None and product.name in step.inputs and step.op in ("gelu", "add"):
            residual = tuple(name for name in step.inputs if name != product.name)
            attrs = {"gelu": True} if step.op == "gelu" else {}
            fused[-1] = Step(step.name, op, product.inputs + residual, {**product.attrs, **attrs})
        else:
            fused.append(replace(step, op=op) if step.op == "matmul_bias" else step)
    return fused


def fuse(steps: Iterable[Step]) -> Steps:
    """The steps of a block in which products fuse their bias, GELU and residual."""
    return fuse_epilogues(steps, "gemm")


def fuse_norms(steps: Iterable[Step]) -> Steps:
    """`fuse_epilogues` for op "linear", which also fuses the LayerNorm of its input."""
    fused: Steps = []
    for step in fuse_epilogues(steps, "linear"):
        if step.op != "linear":
            fused.append(step)
        elif fused and fused[-1].op == "layernorm" and fused[-1].name == step.inputs[0]:
            fused.append(as_linear(step, fused.pop()))
        else:
            fused.append(as_linear(step))
    return fused


def as_linear(step: Step, norm: Step | None = None, **attrs: Any) -> Step:
    """A product (a, w, bias, residual) as `linear`: (x, w, bias, gamma, beta, residual)."""
    a, w, bias, residual = (*step.inputs, "", "")[:4]
    x, gamma, beta = norm.inputs if norm else (a, "", "")
    merged = {**step.attrs, **(norm.attrs if norm else {}), **attrs}
    return Step(step.name, "linear", (x, w, bias, gamma, beta, residual), merged)


def ten_step_plan(n_head: int, causal: bool, eps: float, weights: Iterable[str]) -> Plan:
    """The Pre-LN GPT-2 block as ten steps; gelu overwrites ff1."""
    attention = Step("attn", "attention", ("qkv",), {"n_head": n_head, "causal": causal})
    return Plan(tuple(block(eps, [attention])), tuple(weights), in_place={"gelu": "ff1"})


def fused_plan(n_head: int, causal: bool, eps: float, weights: Iterable[str]) -> Plan:
    """The same block in seven steps: a product fuses its bias, GELU and residual.

    Each step computes the same tensor as the one of that name in the ten-step plan. Projections may
    sum over K in parts.
    """
    steps = fuse(ten_step_plan(n_head, causal, eps, weights).steps)
    return Plan(
        tuple(
            replace(step, attrs={**step.attrs, "split_k": True}) if len(step.inputs) == 4 else step
            for step in steps
        ),
        tuple(weights),
        in_place={"attn": "ln1", "ln2": "attn"},  # reuses memory in the L2 cache
        overlapping=True,
    )


@lru_cache(maxsize=64)
def model_plan(config: GPT2Config, want: Want | None, longest: int) -> Plan:
    """Tokens to logits or hidden states, a step per operation.

    longest: the number of tokens of the longest sequence. K and V of a layer: "h.0.k", "h.0.v".
    """
    steps, x = _embedding()
    for h in _layers(config):
        steps += block(config.eps, _cached_attention(config, h, longest), h, x)
        x = f"{h}output"
    if want == "last":
        steps.append(Step("last.x", "take", (x, "last")))
        x = "last.x"
    if want is not None:
        steps.append(Step("ln_f", "layernorm", (x, "gamma_f", "beta_f"), {"eps": config.eps}))
    if want in ("last", "logits"):
        steps.append(Step("logits", "matmul_bias", ("ln_f", "lm_head")))
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
    row of the kv_cache.
    """

    products: Products
    rows: int
    batch: int
    longest: int
    cached: bool
    continued: bool = False
    ends: int | None = None

    @property
    def tensor_cores(self) -> bool:
        return self.products != "float32"

    def plan(self, config: GPT2Config, want: Want | None) -> Plan:
        """The plan that computes `want`; None: the plan ends with the last layer's attention.

        Steps after the last attention are computed for the requested rows only: for "last", for one
        row of each sequence.
        """
        steps, x = _embedding()
        for h in _layers(config)[:-1]:
            steps += self._fused(config, self._block(config, h, x))
            x = f"{h}output"
        h = _layers(config)[-1]
        ten = self._block(config, h, x)
        fused = self._fused(config, ten)
        end = [step.name for step in fused].index(f"{h}attn") + 1
        steps += fused[:end]
        if want == "last":
            steps += self._last_rows(h, x, fused[end:], ten)
            steps += _lm_head(config, f"{h}output")
        elif want is not None:
            final = Step("ln_f", "layernorm", (f"{h}output", "gamma_f", "beta_f"))
            steps += [*fused[end:], self._norm(config, final)]
        if want == "log_likelihood":
            for first in range(0, self.rows, ROWS_AT_ONCE):
                steps += self._scores(first)
        apart = "ln_f" if self.tensor_cores and want == "hidden" else ""
        return _model(config, steps, apart, overlapping=self.tensor_cores)

    def _block(self, config: GPT2Config, h: str, x: str) -> Steps:
        """The ten steps, with attention over the cache, or over the new tokens only."""
        append, cached = _cached_attention(config, h, self.longest)
        if not self.tensor_cores:
            attention = [append, cached]
        elif not self.continued:
            heads = {"n_head": config.n_head, "causal": True, "max_seqlen": self.longest}
            new = Step(f"{h}attn", "attention_varlen", (f"{h}qkv", "cu_seqlens"), heads)
            attention = [append, new] if self.cached else [new]
        elif self.products == "two_part":  # qkv and attention over the cache are float32
            joined = replace(cached, name=f"{h}attn_cached")
            attention = [append, joined, Step(f"{h}attn", "two_part", (joined.name,))]
        else:
            attention = [append, cached]
        return block(config.eps, attention, h, x)

    def _fused(self, config: GPT2Config, ten: Steps) -> Steps:
        if self.tensor_cores:
            fused = [self._converted(step) for step in fuse_epilogues(ten, "gemm")]
        else:
            fused = [_tiles(step) for step in fuse_epilogues(ten, "linear")]
        return [self._norm(config, step) for step in fused]

    def _converted(self, step: Step) -> Step:
        """A product of weights in two parts, or with memory for FP8 weights that it converts."""
        if step.op != "gemm" or self.products == "16_bits":
            return step
        a, w, bias, residual = (*step.inputs, "")[:4]
        if self.products == "fp8":
            return replace(step, inputs=(a, w, bias, residual, "wide"))
        return replace(step, inputs=(a, parts_of(w), *step.inputs[2:]))

    def _norm(self, config: GPT2Config, step: Step) -> Step:
        if step.op != "layernorm":
            return step
        variant = {"variant": "narrow"} if self.tensor_cores else {"variant": 6, "stats": False}
        return replace(step, attrs={"eps": config.eps, **variant})

    def _last_rows(self, h: str, x: str, rest: Steps, ten: Steps) -> Steps:
        """The steps after the last attention, for the last row of each sequence.

        rest: those steps; ten: the last block. The products of decoding have fewer kernels, which
        are faster than tensor cores for few rows; they take float32 rows.
        """
        if self.products == "two_part":
            rest = _decoding(ten[-7:])
        elif self.tensor_cores:
            rest = [rest[0], *_decoding(ten[-5:])]
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

    def _scores(self, first: int) -> Steps:
        """Log-likelihoods of the targets of some rows."""
        span = {"first": first, "end": min(self.rows, first + ROWS_AT_ONCE)}
        targets = Step(f"targets.{first}", "rows", ("targets",), span)
        inputs = f"logits.{first}", targets.name
        scores = Step(f"scores.{first}", "log_likelihood", inputs)
        return [*head_steps(span["first"], span["end"], self.products), targets, scores]


def parts_of(w: str) -> str:
    """The name of a matrix in two parts."""
    return f"{w}.parts"


def head_steps(first: int, end: int, products: Products) -> Steps:
    """Logits of rows `first` to `end` - 1 of ln_f; head: lm_head, padded for the product."""
    hidden = Step(f"hidden.{first}", "rows", ("ln_f",), {"first": first, "end": end})
    name = f"logits.{first}"
    if products == "float32":
        return [hidden, Step(name, "linear", (hidden.name, "head"), {"variant": "tiles"})]
    wide = ("", "wide") if products == "fp8" else ()
    return [hidden, Step(name, "gemm", (hidden.name, "head", "head_bias", *wide))]


def head_plan(config: GPT2Config, rows: int, first: int, products: Products) -> Plan:
    """`head_steps` of up to ROWS_AT_ONCE rows, from `first` on; the input is ln_f."""
    steps = head_steps(first, min(rows, first + ROWS_AT_ONCE), products)
    return Plan(tuple(steps), ("head", "head_bias", "wide"), input="ln_f")


def decode_plan(config: GPT2Config, fused_norm: bool = True) -> Plan:
    """A token for each row of a kv_cache, five kernels a layer; logits at the end.

    The product of qkv also appends K and V to the cache, and returns `q`. tokens, row and positions
    (M,) are in device memory, so all steps are one graph. fused_norm: LayerNorm is part of the
    products; else it has steps of its own, for many rows, with the same bits.
    """
    steps, x = _embedding()
    for h in _layers(config):
        cache = (f"{h}k", f"{h}v", "row", "positions")
        attention = Step(
            f"{h}attn", "attention_split", (f"{h}q", *cache), {"n_head": config.n_head}
        )
        for step in _decoding(block(config.eps, [attention], h, x), fused_norm):
            if step.name == f"{h}qkv":
                inputs = (*step.inputs[:5], *cache)
                steps.append(Step(f"{h}q", "linear_qkv", inputs, {"eps": config.eps}))
            else:
                steps.append(step)
        x = f"{h}output"
    return _model(config, [*steps, *_lm_head(config, x, fused_norm)], overlapping=True)


def _embedding() -> tuple[Steps, str]:
    """The steps before the first block, and the name of the block's input."""
    return [Step("embedding", "encoder_rows", ("tokens", "positions", "wte", "wpe"))], "embedding"


def _layers(config: GPT2Config) -> list[str]:
    """The prefix of the names of each layer's tensors."""
    return [f"h.{layer}." for layer in range(config.n_layer)]


def _cached_attention(config: GPT2Config, h: str, longest: int) -> Steps:
    """Append K and V of qkv to the cache, then compute causal attention over it."""
    cache = (f"{h}k", f"{h}v")
    heads = {"n_head": config.n_head, "longest": longest}
    return [
        Step(f"{h}kv", "kv_append", (f"{h}qkv", *cache, "row", "positions")),
        Step(f"{h}attn", "attention_packed", (f"{h}qkv", *cache, "cu_seqlens", "start"), heads),
    ]


def _lm_head(config: GPT2Config, x: str, fused_norm: bool = True) -> Steps:
    """The final LayerNorm and the logits of few rows, in one kernel; or in two."""
    norm = Step("ln_f", "layernorm", (x, "gamma_f", "beta_f"), {"eps": config.eps})
    return _decoding([norm, Step("logits", "matmul_bias", ("ln_f", "lm_head"))], fused_norm)


def _tiles(step: Step) -> Step:
    """A product of many rows in float32."""
    return as_linear(step, variant="tiles") if step.op == "linear" else step


def _decoding(steps: Iterable[Step], fused_norm: bool = True) -> Steps:
    """Steps with the order of additions of decoding, which is the same for any number of rows.

    fused_norm: LayerNorm is part of the product after it.
    """
    fused = fuse_norms(steps) if fused_norm else fuse_epilogues(steps, "linear")
    return [_decoding_step(step) for step in fused]


def _decoding_step(step: Step) -> Step:
    if step.op == "layernorm":
        return replace(step, attrs={**step.attrs, "variant": "decode", "stats": False})
    if step.op != "linear":
        return step
    linear = step if len(step.inputs) == 6 else as_linear(step)
    return replace(linear, attrs={**linear.attrs, "decoding": True})


def _model(config: GPT2Config, steps: Steps, apart: str = "", overlapping: bool = False) -> Plan:
    """A plan of these steps, whose tensors share one buffer of each kind, except for `apart`."""
    cache = [f"h.{n}.{half}" for n in range(config.n_layer) for half in "kv"]
    weights = model_shapes(config)
    given = (*weights, *map(parts_of, weights), "lm_head", "head", "head_bias", "wide")
    given += (*BATCH[1:], *cache)
    in_place: dict[str, str] = {}
    newest: dict[str, str] = {}
    for step in steps:
        kind = None if step.name == apart else _BUFFERS.get(step.name.rpartition(".")[2])
        if step.name.startswith("last."):  # fewer rows, in buffers of their own
            newest.pop("ff", None)
        elif kind in newest:
            in_place[step.name] = newest[kind]
        if kind:
            newest[kind] = step.name
    names = tuple(dict.fromkeys(given))
    return Plan(tuple(steps), names, in_place, "tokens", overlapping)


def constants(config: GPT2Config) -> dict[str, Any]:
    """Inputs of the plans that the config determines, by name: none."""
    return {}


def operand_bounds(config: GPT2Config, largest: Mapping[str, float]) -> dict[str, float]:
    """The largest magnitude that the operands of each layer's products can have, by name.

    largest: the largest magnitude of every tensor; infinity or NaN if that is not finite. The
    C values of a LayerNorm before γ and β have variance 1, so that each is at most sqrt(C), and
    the sum of their magnitudes at most C. GELU increases no magnitude.
    """
    C = config.n_embd
    bounds = {}
    for n in range(config.n_layer):
        h = f"h.{n}."
        for norm, result, name in (("1", "qkv", "qkv"), ("2", "gelu", "fc")):
            gamma, beta = largest[f"{h}gamma{norm}"], largest[f"{h}beta{norm}"]
            bounds[f"{h}ln{norm}"] = math.sqrt(C) * gamma + beta
            product = C * largest[f"{h}w_{name}"] * (gamma + beta)
            bounds[h + result] = product + largest[f"{h}b_{name}"]
    return bounds


def stream_bounds(config: GPT2Config, largest: Mapping[str, float]) -> Iterator[float]:
    """Upper bounds of the magnitudes after the embedding and after each block, for any input.

    largest: the largest magnitude of every tensor. A LayerNorm's C values of variance 1 are at most
    sqrt(C), attention computes weighted means of rows of v, GELU increases no magnitude, and a
    product of K inputs is at most K times the largest input times the largest weight. The bundled
    model's bound is 6e6, where the limit is 6e17.
    """
    C = config.n_embd

    def product(a: float, K: int, layer: str, name: str) -> float:
        return a * K * largest[f"{layer}w_{name}"] + largest[f"{layer}b_{name}"]

    stream = largest["wte"] + largest["wpe"]
    yield stream
    for layer in _layers(config):
        norm1, norm2 = (
            math.sqrt(C) * largest[f"{layer}gamma{n}"] + largest[f"{layer}beta{n}"] for n in "12"
        )
        v, ff = product(norm1, C, layer, "qkv"), product(norm2, C, layer, "fc")
        stream += product(v, C, layer, "attn") + product(ff, 4 * C, layer, "proj")
        yield stream

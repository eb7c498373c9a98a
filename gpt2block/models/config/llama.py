"""The sizes and settings of Llama models, and their conversion from Hugging Face's config.json."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from gpt2block.checks import (
    check_count,
    check_flag,
    check_integer,
    check_number,
    check_token,
    set_fields,
    several,
)
from gpt2block.errors import CheckpointError, InputError, shown
from gpt2block.models.config import (
    ALL_LIMITS,
    OF_OTHERS,
    CheckpointLayout,
    Divided,
    ModelConfig,
    Scales,
    Settings,
    Shapes,
    agreed,
    check_settings,
)

_RopeKind = Literal["linear", "llama3", "longrope", "yarn"]
ORIGINAL, PARTIAL = "original_max_position_embeddings", "partial_rotary_factor"
_OPTIONAL = ("num_key_value_heads", "head_dim", "max_position_embeddings")
_ROPE_SETTINGS: Settings = (
    (PARTIAL, (None, 1), "RoPE rotates all channels of a head"),
    ("full_attention", (None,), "RoPE is the same in all layers"),  # parameters by layer type
    ("sliding_attention", (None,), "RoPE is the same in all layers"),
    *(each for each in OF_OTHERS if each[0] == "llama_4_scaling_beta"),
)
_SCALING_FIELDS: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL),
    "longrope": ("short_factor", "long_factor"),
    "yarn": ("factor",),
}
# model_type values with YaRN support
_WITH_YARN = (
    "llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "olmo2", "olmo3", "ministral3"
)  # fmt: skip
# Values of layer_types: a layer attends to all earlier tokens, or to those in a window.
KINDS = ("full_attention", "sliding_attention")
LOCAL = "local_frequencies"  # the RoPE frequencies of layers with a window
_PATTERN = "sliding_window_pattern"
ROPE_BUFFERS = r"(.+\.)?rotary_emb\w*\..+"  # matches the names of RoPE frequencies in files


def yarn_attention(factor: float, mscale: float = 1.0) -> float:
    """Return the factor by which YaRN multiplies queries and keys: 1 + mscale ln(factor) / 10."""
    return 0.1 * mscale * math.log(max(1.0, factor)) + 1.0


def _check_factor(name: str, value: object) -> float:
    expected = "a number from 2^-20 to 2^20"
    return check_number(f"rope_scaling: {name}", value, 2.0**-20, 2.0**20, expected)


_NUMBERS = (
    "factor", "low_freq_factor", "high_freq_factor", "attention_factor", "beta_fast", "beta_slow",
)  # fmt: skip


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of RoPE's frequencies for a longer context than the context of the training.

    kind "linear": divides all frequencies by `factor`. "llama3": divides frequencies with a
    wavelength above original_context / low_freq_factor by `factor`, keeps frequencies with a
    wavelength below original_context / high_freq_factor, and interpolates between. "longrope":
    divides each frequency by its entry of `factors`. `long_factors`, if there are any, replace
    `factors` for a sequence that may have more tokens than original_context. "yarn": keeps
    frequencies of pairs that rotate more than beta_fast times in the original context, divides
    frequencies of pairs that rotate less than beta_slow times by `factor`, and interpolates between
    by the index of the pair; truncate: whether the ends of this range are rounded to whole pairs.
    attention_factor, of "longrope" and "yarn", multiplies the queries and keys that RoPE rotates;
    by default it is 1 + ln(factor) / 10, at least 1, with "yarn", and 1 with the other kinds.

    Raises InputError. Sources: the configuration of Llama 3.1 in Hugging Face `transformers`; Ding
    et al., "LongRoPE: Extending LLM Context Window Beyond 2 Million Tokens" (2024); Peng et al.,
    "YaRN: Efficient Context Window Extension of Large Language Models" (2023).
    """

    kind: _RopeKind
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    attention_factor: float = None  # type: ignore[assignment]  # a number after __post_init__
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in _SCALING_FIELDS:
            known = " or ".join(map(repr, _SCALING_FIELDS))
            raise InputError(f"rope_scaling: expected kind {known}, got {shown(self.kind)}")
        if self.attention_factor is None:
            factor = _check_factor("factor", self.factor) if self.kind == "yarn" else 1.0
            set_fields(self, attention_factor=yarn_attention(factor))
        set_fields(self, **{name: _check_factor(name, getattr(self, name)) for name in _NUMBERS})
        for name in ("factors", "long_factors"):
            factors = tuple(_check_factor(name, each) for each in several(getattr(self, name)))
            set_fields(self, **{name: factors})
        if self.low_freq_factor >= self.high_freq_factor:
            raise InputError(
                f"rope_scaling: expected low_freq_factor below high_freq_factor, got "
                f"{self.low_freq_factor} and {self.high_freq_factor}"
            )
        if self.beta_slow > self.beta_fast:
            raise InputError(f"rope_scaling: expected beta_slow up to beta_fast, got "
                             f"{self.beta_slow} and {self.beta_fast}")  # fmt: skip
        truncate = check_flag("rope_scaling: truncate", self.truncate)
        context = check_count("rope_scaling: original_max_position_embeddings",
                              self.original_context, ALL_LIMITS["n_ctx"])  # fmt: skip
        set_fields(self, truncate=truncate, original_context=context)

    def scaled(
        self, frequencies: NDArray[np.float64], theta: float, n_ctx: int
    ) -> NDArray[np.float64]:
        """Return the scaled RoPE frequencies for θ and this context, in radians per position."""
        if self.kind == "linear":
            return frequencies / self.factor
        if self.kind == "longrope":
            long = self.long_factors if n_ctx > self.original_context else ()
            return frequencies / np.array(long or self.factors, np.float64)
        if self.kind == "yarn":
            first, last = self._interpolated(len(frequencies), theta)
            kept = 1 - np.clip((np.arange(len(frequencies)) - first) / (last - first), 0, 1)
        else:
            turns = self.original_context * frequencies / (2 * math.pi)  # rotations per pair
            low, high = self.low_freq_factor, self.high_freq_factor
            kept = np.clip((turns - low) / (high - low), 0, 1)
        # kept is 0 where frequencies are divided by factor, and 1 where they do not change.
        scaled: NDArray[np.float64] = frequencies * (kept + (1 - kept) / self.factor)
        return scaled

    def _interpolated(self, pairs: int, theta: float) -> tuple[float, float]:
        """Return the range of indices of channel pairs over which "yarn" blends frequencies."""
        context, step = self.original_context / (2 * math.pi), math.log(theta) / pairs
        first, last = (math.log(context / beta) / step for beta in (self.beta_fast, self.beta_slow))
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * pairs - 1)
        return first, last + 0.001 * (first == last)


@dataclass(frozen=True)
class LlamaConfig(ModelConfig):
    """Sizes of a Llama model; the defaults are the sizes of Llama 2 7B.

    n_kv_head heads of keys and values are shared by n_head heads of queries, in groups of
    n_head / n_kv_head neighbours. n_ff: channels of the gated feed-forward. theta, scaling:
    parameters of RoPE. attention_bias, mlp_bias: whether the projections of attention, or of the
    feed-forward, have biases. n_kv_head and head_size 0 stand for n_head and n_embd / n_head.
    bos_token_id: the token that begins a text. eos_token_ids: as in GPT2Config.

    Raises InputError. Source: Touvron et al., "Llama 2: Open Foundation and Fine-Tuned Chat Models"
    (2023).
    """

    NAME: ClassVar[str] = "Llama"
    MODEL_TYPE: ClassVar[str] = "llama"
    SIZES: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "n_layer": ("num_hidden_layers",),
        "n_head": ("num_attention_heads",),
        "n_kv_head": ("num_key_value_heads",),
        "n_embd": ("hidden_size",),
        "n_ff": ("intermediate_size",),
        "head_size": ("head_dim",),
        "n_ctx": ("max_position_embeddings",),
        "vocab_size": ("vocab_size",),
    }
    FLAGS: ClassVar[tuple[str, ...]] = ("tie_word_embeddings", "attention_bias", "mlp_bias")
    OTHERS: ClassVar[Mapping[str, str]] = {"eps": "rms_norm_eps", "bos_token_id": "bos_token_id"}
    ABSENT: ClassVar[Mapping[str, object]] = {"n_ctx": 2048, "eps": 1e-6}
    SETTINGS: ClassVar[Settings] = (
        ("hidden_act", ("silu", "swish"), "the feed-forward computes SiLU only"),
        ("hidden_activation", (None, "silu", "swish"), "the feed-forward computes SiLU only"),
        ("quantization_config", (None,), "quantized weights are not supported"),
    )

    # Checkpoints of older versions of `transformers` also contain RoPE frequencies.
    FILES: ClassVar[CheckpointLayout] = CheckpointLayout("model.", "layers.", "NK", ROPE_BUFFERS)
    NORM, QKV, TENSOR_HEADS = "RMSNorm", "rope", (64, 128, 256)
    # With FP8 weights, a prefill may use w_up / s and w_down · s, so that step "ff" returns ff / s.
    DIVIDED: ClassVar[Divided] = (("w_up", ("up", "ff"), "w_down"),)
    PARTIAL: ClassVar[bool] = False  # whether GGUF files store which pairs RoPE rotates as factors

    n_layer: int = 32
    n_head: int = 32
    n_embd: int = 4096
    n_ctx: int = 4096
    vocab_size: int = 32000
    eps: float = 1e-5
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    n_kv_head: int = 0
    n_ff: int = 11008
    head_size: int = 0
    theta: float = 10000.0
    scaling: RopeScaling | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    bos_token_id: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.n_kv_head, int) and not self.n_kv_head:
            set_fields(self, n_kv_head=self.n_head)
        if isinstance(self.head_size, int) and not self.head_size:
            if self.n_embd % self.n_head:
                raise InputError(
                    f"n_embd {self.n_embd} is not a multiple of n_head {self.n_head}: "
                    "give head_size"
                )
            set_fields(self, head_size=self.n_embd // self.n_head)
        own = ("n_kv_head", "n_ff", "head_size")
        set_fields(self, **{n: check_count(n, getattr(self, n), ALL_LIMITS[n]) for n in own})
        if self.n_head % self.n_kv_head:
            raise InputError(
                f"n_head {self.n_head} is not a multiple of n_kv_head {self.n_kv_head}"
            )
        if self.head_size % 2:
            raise InputError(f"head_size: expected an even number, as RoPE rotates pairs of "
                             f"channels, got {self.head_size}")  # fmt: skip
        limits = 1, 2.0**100, "a number from 1 to 2^100"
        set_fields(self, theta=check_number("theta", self.theta, *limits))
        if self.scaling is not None and not isinstance(self.scaling, RopeScaling):
            raise InputError(f"scaling: expected a RopeScaling or None, got {shown(self.scaling)}")
        if self.scaling is not None:
            self._check_scaling(self.scaling)
        if self.bos_token_id is not None:
            set_fields(self, bos_token_id=check_token("bos_token_id", self.bos_token_id))

    def _check_scaling(self, scaling: RopeScaling) -> None:
        """Raise InputError if this architecture does not support the RoPE scaling."""
        if scaling.kind == "longrope":
            pairs = -(-self.rotary_size // 2)
            for factors in (scaling.factors, scaling.long_factors or None):
                if factors is not None and len(factors) != pairs:
                    raise InputError(
                        f"rope_scaling: expected a factor for each of {pairs} frequencies, "
                        f"got {len(factors)}"
                    )
            unequal = scaling.long_factors or scaling.attention_factor != 1
            if unequal and "long_factor" not in self.HONOURED:
                raise InputError(
                    "rope_scaling: longrope is supported with equal short_factor and long_factor, "
                    f"and with attention_factor 1, in {self.NAME}"
                )
        if scaling.kind == "yarn":
            check_number("theta", self.theta, 1 + 2.0**-20, 2.0**100, "a number above 1 with yarn")
            if self.MODEL_TYPE not in _WITH_YARN:
                raise InputError(f"rope_scaling: yarn is supported in {', '.join(_WITH_YARN)}, "
                                 f"not in {self.MODEL_TYPE}")  # fmt: skip

    @property
    def frequencies_of_layers(self) -> tuple[str, ...]:
        """For each layer, the name of the tensor of its RoPE frequencies."""
        return ("frequencies",) * self.n_layer

    @property
    def rotary_size(self) -> int:
        """Channels of a head that RoPE rotates."""
        return self.head_size

    @property
    def gguf_sizes(self) -> dict[str, tuple[str, int]]:
        """{GGUF key that the other fields determine: (meaning in words, value)}."""
        return {
            "attention.value_length": ("the head size", self.head_size),
            "rope.dimension_count": ("the head size", self.rotary_size),
        }

    @property
    def rope_factors(self) -> tuple[float, ...]:
        """Factors that divide RoPE's frequencies in a GGUF file; () if they follow from scaling."""
        return ()

    def with_rope_factors(self, factors: tuple[float, ...]) -> LlamaConfig:
        """Return the config for these factors of a GGUF file, if PARTIAL is set."""
        raise NotImplementedError

    @property
    def scales(self) -> Scales:
        """The scalar factors and limits of a forward pass.

        YaRN multiplies all channels of q and k by one factor, and scores therefore by its square.
        """
        if self.scaling is None:
            return Scales(self.eps)
        factor = self.scaling.attention_factor
        if self.scaling.kind == "yarn":
            return Scales(self.eps, attention=factor**2 * self.head_size**-0.5)
        return Scales(self.eps, rope=factor)

    @property
    def short_context(self) -> int:
        """Longest sequence (tokens) that uses RoPE's short-context frequencies; 0 if none does."""
        scaling = self.scaling
        if scaling is None or not scaling.long_factors or self.n_ctx <= scaling.original_context:
            return 0
        return scaling.original_context

    def frequencies(self) -> NDArray[np.float64]:
        """Return the radians per position by which RoPE rotates each pair: (head_size / 2,)."""
        k = np.arange(-(-self.rotary_size // 2))
        frequencies: NDArray[np.float64] = self.theta ** (-2 * k / self.rotary_size)
        if self.scaling is not None:
            frequencies = self.scaling.scaled(frequencies, self.theta, self.n_ctx)
        return np.pad(frequencies, (0, self.head_size // 2 - len(k)))

    def block_shapes(self) -> Shapes:
        """Return shapes of a block's seven tensors and biases, by name; w_qkv is [Wq | Wk | Wv]."""
        C, Q, KV, FF = self.n_embd, self.q_width, self.kv_width, self.n_ff
        shapes: dict[str, tuple[int, ...]] = {
            "gamma1": (C,),
            "w_qkv": (C, Q + 2 * KV),
            "w_o": (Q, C),
            "gamma2": (C,),
            "w_gate": (C, FF),
            "w_up": (C, FF),
            "w_down": (FF, C),
        }
        with_bias = ("w_qkv", "w_o") * self.attention_bias
        with_bias += ("w_gate", "w_up", "w_down") * self.mlp_bias
        return shapes | {f"b{name[1:]}": shapes[name][1:] for name in with_bias}

    def outer_shapes(self) -> tuple[Shapes, Shapes]:
        """Return name → shape of the tensors before and after the blocks, without lm_head."""
        return {"wte": (self.vocab_size, self.n_embd)}, {"gamma_f": (self.n_embd,)}

    @classmethod
    def _fields_in(cls, config: Mapping[str, object]) -> dict[str, Any]:
        """Return keyword arguments of this class, read from a config.json, except eos_token_ids."""
        given = {k: value for k, value in config.items() if value is not None or k not in _OPTIONAL}
        needed = (keys for ours, keys in cls.SIZES.items() if ours not in cls.ABSENT)
        missing = [keys[0] for keys in needed if not {*keys} & {*given, *_OPTIONAL}]
        if missing:
            raise CheckpointError(f"config.json: expected {', '.join(missing)}: missing")
        theta, scaling = _rope_of(given, cls.ABSENT, cls.HONOURED)
        fields = super()._fields_in(given) | {"theta": theta, "scaling": scaling}
        if config.get("num_key_value_heads", 0) is None:  # null means n_head, not the default
            fields["n_kv_head"] = 0
        return fields

    def to_hugging_face(self) -> dict[str, Any]:
        """Return the content of a `config.json` with which `transformers` loads this model."""
        return super().to_hugging_face() | {
            "architectures": [f"{self.NAME}ForCausalLM"],
            "hidden_act": "silu",
            "rope_theta": self.theta,
            "rope_scaling": None if self.scaling is None else _scaling_fields(self.scaling),
        }


@dataclass(frozen=True)
class PartlyRotatedConfig(LlamaConfig):
    """Sizes of a model whose RoPE may rotate only a part of each head.

    rotary: channels of a head that RoPE rotates; 0 means all. An odd number is rounded up to pairs.
    ROTARY_PART: the part of a head that RoPE rotates if config.json does not state it.
    """

    ROTARY_PART: ClassVar[float] = 1

    rotary: int = 0

    def __post_init__(self) -> None:
        check_integer("rotary", self.rotary, 0, ALL_LIMITS["head_size"], "a number of channels")
        super().__post_init__()
        expected = f"at most the head size, {self.head_size}"
        rotary = check_integer("rotary", self.rotary, 0, self.head_size, expected)
        set_fields(self, rotary=rotary or self.head_size)

    @property
    def rotary_size(self) -> int:
        """Number of channels of each head that RoPE rotates."""
        return self.rotary or self.head_size

    @property
    def head_order(self) -> tuple[int, ...]:
        """For each channel of a head of q and k, its index in a file; () if orders are equal."""
        turned, D = 2 * -(-self.rotary // 2), self.head_size
        if turned == D:
            return ()
        pairs, rest = turned // 2, (D - turned) // 2
        halves = ((0, turned), (pairs, turned + rest))  # per half: first rotated, first other
        return tuple(c for a, b in halves for c in (*range(a, a + pairs), *range(b, b + rest)))

    @property
    def rotary_part(self) -> float:
        """Return the part of a head that RoPE rotates, as config.json states it."""
        fractions = (self.rotary / self.head_size, (self.rotary + 0.5) / self.head_size)
        return next(each for each in fractions if int(self.head_size * each) == self.rotary)

    @classmethod
    def _fields_in(cls, config: Mapping[str, object]) -> dict[str, Any]:
        """Convert the content of a config.json to {field of this class: value}."""
        fields = super()._fields_in(config)
        places = {"": config} | {f"{name}: ": each for name, each in rope_objects(config).items()}
        given = {f"{place}{PARTIAL}": each.get(PARTIAL) for place, each in places.items()}
        given = {name: each for name, each in given.items() if each is not None}
        part = agreed(given or {PARTIAL: cls.ROTARY_PART})
        factor = check_number(PARTIAL, part, 0, 1, "a number up to 1")
        size = fields.get("head_size") or fields["n_embd"] // fields["n_head"]
        rotary = check_integer(PARTIAL, int(size * factor), 1, size, "a channel of a head or more")
        return fields | {"rotary": rotary}


@dataclass(frozen=True)
class WindowedConfig(LlamaConfig):
    """Sizes of a model that attends to the last `window` tokens; None or 0: to all tokens."""

    HONOURED: ClassVar[tuple[str, ...]] = ("sliding_window",)
    OTHERS: ClassVar[Mapping[str, str]] = {**LlamaConfig.OTHERS, "window": "sliding_window"}

    window: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        set_fields(self, window=check_count("window", self.window) if self.window else None)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Attention window of each layer, in tokens; None for a layer that sees all tokens."""
        sees_all = self.window is None or self.window >= self.n_ctx
        return (None if sees_all else self.window,) * self.n_layer


@dataclass(frozen=True)
class PartlyWindowedConfig(WindowedConfig):
    """Sizes of a model in which some layers have a window, and other RoPE frequencies.

    sliding_layers: whether each layer has the window; () means all but every EVERY-th. local_theta:
    RoPE's theta in layers with the window, by default theta. scaling applies to other layers only.
    """

    EVERY: ClassVar[int]
    HONOURED: ClassVar[tuple[str, ...]] = (*WindowedConfig.HONOURED, *KINDS, "layer_types")

    sliding_layers: tuple[bool, ...] = ()
    local_theta: float = None  # type: ignore[assignment]  # a number after __post_init__

    def __post_init__(self) -> None:
        super().__post_init__()
        set_layers(self, "sliding_layers", all_but_every(self.EVERY, self.n_layer))
        local = self.theta if self.local_theta is None else self.local_theta
        local = check_number("local_theta", local, 1, 2.0**100, "a number from 1 to 2^100")
        set_fields(self, local_theta=local)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Return the attention window of each layer in tokens; None for a layer without one."""
        pairs = zip(super().windows, self.sliding_layers, strict=True)
        return tuple(window if sliding else None for window, sliding in pairs)

    @property
    def frequencies_of_layers(self) -> tuple[str, ...]:
        """Return, for each layer, the name of the tensor of RoPE frequencies."""
        return tuple(LOCAL if sliding else "frequencies" for sliding in self.sliding_layers)

    def layer_frequencies(self) -> dict[str, NDArray[np.float64]]:
        """Return {name: RoPE frequencies} of the names in `frequencies_of_layers`."""
        local = self.local_theta ** (-2 * np.arange(self.head_size // 2) / self.head_size)
        known = {"frequencies": self.frequencies(), LOCAL: local}
        return {name: known[name] for name in dict.fromkeys(self.frequencies_of_layers)}

    @classmethod
    def _fields_in(cls, config: Mapping[str, object]) -> dict[str, Any]:
        """Convert the content of a config.json to {field of this class: value}."""
        objects, own = rope_objects(config).get("rope_parameters", {}), {}
        if {*objects} & {*KINDS}:
            local = objects.get(KINDS[1]) or {}
            kind = local
            if isinstance(local, dict):
                check_settings(local, tuple(_ROPE_SETTINGS)[:1], f"rope_parameters: {KINDS[1]}: ")
                kind = local.get("rope_type") or local.get("type") or "default"
            if kind != "default":
                raise CheckpointError(
                    f'config.json: rope_parameters: {KINDS[1]}: expected rope_type "default", '
                    f"got {shown(kind)}: only layers that see all have a scaling"
                )
            own = {"local_theta": local["rope_theta"]} if "rope_theta" in local else {}
            config = {**config, "rope_parameters": objects.get(KINDS[0])}
        fields, types = super()._fields_in(config) | own, config.get("layer_types")
        if types is None:
            given = config.get(_PATTERN, cls.EVERY) if _PATTERN in cls.HONOURED else cls.EVERY
            layers = all_but_every(check_count(_PATTERN, given), fields["n_layer"])
        else:
            layers = are_of_type(types, KINDS)
        return fields | {"sliding_layers": layers}

    def to_hugging_face(self) -> dict[str, Any]:
        """Return the content of a `config.json` with which `transformers` loads this model."""
        kinds = [KINDS[sliding] for sliding in self.sliding_layers]
        return super().to_hugging_face() | {"layer_types": kinds}


def all_but_every(every: int, n_layer: int) -> tuple[bool, ...]:
    """Return a bool per layer: false for every `every`-th layer, true for the others."""
    return tuple((layer + 1) % every > 0 for layer in range(n_layer))


def set_layers(config: LlamaConfig, name: str, default: tuple[bool, ...]) -> None:
    """Set the field `name` of a config to a tuple; raise InputError unless each layer has a flag.

    default: replaces ().
    """
    flags = getattr(config, name) or default
    if len(flags) != config.n_layer or not all(type(each) is bool for each in flags):
        expected = f"true or false for each of {config.n_layer} layers"
        raise InputError(f"{name}: expected {expected}, got {shown(flags)}")
    set_fields(config, **{name: tuple(flags)})


def are_of_type(types: object, known: tuple[str, str]) -> tuple[bool, ...]:
    """Return whether each entry of layer_types in a config.json is the second of two types."""
    if not isinstance(types, list) or not all(each in known for each in types):
        raise CheckpointError(f"config.json: layer_types: expected a list of "
                              f"{' and '.join(known)}, got {shown(types)}")  # fmt: skip
    return tuple(each == known[1] for each in types)


def layers_in(name: str, numbers: object, n_layer: int) -> list[int]:
    """Return the numbers of layers that a config.json lists as `name`, or raise CheckpointError."""
    if not isinstance(numbers, list) or not all(n in range(n_layer) for n in numbers):
        raise CheckpointError(f"config.json: {name}: expected a list of numbers below {n_layer}, "
                              f"got {shown(numbers)}")  # fmt: skip
    return numbers


def rope_objects(config: Mapping[str, object]) -> dict[str, dict[str, Any]]:
    """Return rope_scaling and rope_parameters of a config.json, by key, if they are not empty."""
    found = {}
    for name in ("rope_scaling", "rope_parameters"):
        fields = config.get(name)
        if fields is not None and not isinstance(fields, dict):
            raise CheckpointError(f"config.json: {name}: expected an object, got {shown(fields)}")
        if fields:
            found[name] = fields
    return found


def _rope_of(
    config: Mapping[str, object], absent: Mapping[str, object], honoured: Container[str]
) -> tuple[float, RopeScaling | None]:
    """Return RoPE's θ and scaling, read from rope_theta and rope_scaling, or rope_parameters.

    absent, honoured: as in ModelConfig.
    Raises CheckpointError if values contradict each other.
    """
    neutral = [each for each in _ROPE_SETTINGS if each[0] not in honoured]
    check_settings(config, neutral)
    thetas: dict[str, object] = {"rope_theta": config.get("rope_theta")}
    scalings: dict[str, RopeScaling | None] = {}
    sizes = {"max_position_embeddings": absent["n_ctx"], **config}
    for name, fields in rope_objects(config).items():
        check_settings(fields, neutral, f"{name}: ")
        thetas[f"{name}: rope_theta"] = fields.get("rope_theta")
        scalings[name] = _scaling(name, fields, sizes)
    given = {name: theta for name, theta in thetas.items() if theta is not None}
    theta = agreed(given or {"rope_theta": absent.get("theta", 10000.0)})
    return theta, agreed(scalings or {"rope_scaling": None})


def _scaling(name: str, fields: Mapping[str, Any], sizes: Mapping[str, Any]) -> RopeScaling | None:
    """Return the RoPE scaling in `fields`, the value of key `name`; a null type means "default"."""
    types = [(key, fields[key]) for key in ("rope_type", "type") if key in fields]
    kinds = {f"{name}: {key}": "default" if kind is None else kind for key, kind in types}
    kind = agreed(kinds or {"rope_type": "default"})
    if kind == "default":
        return None
    if not isinstance(kind, str) or kind not in _SCALING_FIELDS:
        known = ", ".join(map(repr, ("default", *_SCALING_FIELDS)))
        raise CheckpointError(f"config.json: rope_type: expected one of {known}, got {shown(kind)}")
    needed = _SCALING_FIELDS[kind]
    missing = [field for field in needed if field not in fields]
    if missing:
        raise CheckpointError(f"config.json: {name}: expected {', '.join(missing)}: missing")
    if kind == "longrope":
        return _longrope(name, fields, sizes)
    if kind == "yarn":
        return _yarn(name, fields, sizes)
    values = [fields[field] for field in needed]
    return RopeScaling(kind, *values)  # type: ignore[arg-type]  # one of _SCALING_FIELDS


def _longrope(name: str, fields: Mapping[str, Any], sizes: Mapping[str, Any]) -> RopeScaling:
    """Return longrope's scaling; as in `transformers`, attention_factor has a computed default."""
    n_ctx, original = _contexts(name, fields, sizes)
    attention = fields.get("attention_factor")
    if attention is None:
        factor = fields.get("factor")
        factor = n_ctx / original if factor is None else _check_factor("factor", factor)
        attention = math.sqrt(1 + math.log(max(1.0, factor)) / math.log(original))
    short, long = fields["short_factor"], fields["long_factor"]
    return RopeScaling("longrope", 1.0, original_context=original, factors=short,
                       long_factors=() if long == short else long,
                       attention_factor=attention)  # fmt: skip


def _yarn(name: str, fields: Mapping[str, Any], sizes: Mapping[str, Any]) -> RopeScaling:
    """Return YaRN's scaling with the defaults of `transformers` for absent, 0 or null fields."""
    n_ctx, original = _contexts(name, fields, sizes)
    factor = n_ctx / original if fields["factor"] is None else fields["factor"]
    attention: Any = fields.get("attention_factor")
    parts = ("mscale", "mscale_all_dim")
    if attention is None and all(fields.get(part) for part in parts):
        scale = _check_factor("factor", factor)
        above, below = (yarn_attention(scale, _check_factor(part, fields[part])) for part in parts)
        attention = above / below
    betas = {key: fields[key] for key in ("beta_fast", "beta_slow") if fields.get(key)}
    return RopeScaling("yarn", factor, original_context=original, attention_factor=attention,
                       truncate=fields.get("truncate", True), **betas)  # fmt: skip


def _contexts(name: str, fields: Mapping[str, Any], sizes: Mapping[str, Any]) -> tuple[int, int]:
    """Return the model's context and the context of its training, by default the same."""
    n_ctx = check_count("max_position_embeddings", sizes["max_position_embeddings"])
    originals = {f"{name}: {ORIGINAL}": fields.get(ORIGINAL), ORIGINAL: sizes.get(ORIGINAL)}
    given = {key: value for key, value in originals.items() if value is not None}
    original = check_integer(ORIGINAL, agreed(given or {ORIGINAL: n_ctx}), 2,
                             ALL_LIMITS["n_ctx"], "an integer of at least 2")  # fmt: skip
    return n_ctx, original


def _scaling_fields(scaling: RopeScaling) -> dict[str, object]:
    if scaling.kind == "longrope":
        return {"rope_type": "longrope", "factor": 1.0, ORIGINAL: scaling.original_context,
                "attention_factor": scaling.attention_factor, "short_factor": list(scaling.factors),
                "long_factor": list(scaling.long_factors or scaling.factors)}  # fmt: skip
    if scaling.kind == "yarn":
        same = ("factor", "attention_factor", "beta_fast", "beta_slow", "truncate")
        own = {key: getattr(scaling, key) for key in same}
        return {"rope_type": "yarn", ORIGINAL: scaling.original_context, **own}
    values = scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor
    names = _SCALING_FIELDS[scaling.kind]
    fields = zip(names, (*values, scaling.original_context), strict=False)
    return {"rope_type": scaling.kind, **dict(fields)}

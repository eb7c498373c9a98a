"""Gemma 4's text models: Gemma 3's block with embeddings for each layer, and shared kv_caches.

Layers without a window have larger heads, and RoPE that rotates a part of their channels. Scores
are not scaled; values have a norm without weights. The last layers have queries only, and read the
keys and values of the last earlier layer of their kind. After the feed-forward, a gated projection
adds a row that each token has for each layer: the sum of a table's row and a projection of the
embedding. The block's output is multiplied by a scalar. Mixtures of experts are refused.

Source: Gemma4 in `transformers`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from gpt2block.checks import FLOATS, check_count, check_integer, check_number, set_fields
from gpt2block.errors import CheckpointError, InputError, shown
from gpt2block.models.architectures import gemma3, llama, qwen3
from gpt2block.models.architectures.architecture import Value
from gpt2block.models.architectures.gemma3 import CAP, SCALE, Gemma3Config
from gpt2block.models.config import LayerCache, LayerEmbeddings, ModelConfig, Settings, Shapes
from gpt2block.models.config.llama import KINDS, PartlyWindowedConfig, RopeScaling, rope_objects

OVERRIDES, GLOBAL, PART = "per_layer_config", "global_head_dim", "partial_rotary_factor"
TABLE_ROWS, WIDE, FF = "vocab_size_per_layer_input", "use_double_wide_mlp", "feed_forward_length"
NO_ROTATION = 1e30  # factor that divides the frequencies of pairs that do not rotate in GGUF files


@dataclass(frozen=True)
class Gemma4Config(Gemma3Config):
    """Sizes of a Gemma 4 text model; head_size is the head size of layers with a window.

    global_head_size: head size of the other layers, in which RoPE rotates the part rotary_part.
    shared_layers: number of layers, the last ones, without keys and values of their own.
    use_double_wide_mlp: whether these layers have 2 n_ff channels. n_layer_embd: channels of the
    embedding of a token for each layer; 0 if there are none. embedding_dtype: as in Gemma3Config.
    """

    NAME: ClassVar[str] = "Gemma4"
    MODEL_TYPE: ClassVar[str] = "gemma4_text"
    ADDED_TO_NORMS: ClassVar[float] = 0.0
    VALUE_NORMS: ClassVar[bool] = True
    FROM_CACHE: ClassVar[bool] = True
    FLAGS: ClassVar[tuple[str, ...]] = (*Gemma3Config.FLAGS, WIDE)
    HONOURED: ClassVar[tuple[str, ...]] = (*PartlyWindowedConfig.HONOURED, CAP)
    OTHERS: ClassVar[Mapping[str, str]] = {
        **PartlyWindowedConfig.OTHERS, "logits_cap": CAP, "shared_layers": "num_kv_shared_layers",
        "n_layer_embd": "hidden_size_per_layer_input", "global_head_size": GLOBAL,
    }  # fmt: skip
    GGUF_KEYS: ClassVar[Mapping[str, str]] = {
        **Gemma3Config.GGUF_KEYS, "attention.sliding_window_pattern": "sliding_layers",
        "attention.shared_kv_layers": "shared_layers", "attention.key_length_swa": "head_size",
        "attention.key_length": "global_head_size", WIDE: WIDE,
        "embedding_length_per_layer_input": "n_layer_embd", CAP: "logits_cap",
    }  # fmt: skip
    GGUF_ZEROS: ClassVar[tuple[str, ...]] = ("n_layer_embd",)
    PARTIAL: ClassVar[bool] = True
    ABSENT: ClassVar[Mapping[str, object]] = {
        "n_ctx": 131072, "eps": 1e-6, "n_kv_head": 4, "head_size": 256, "theta": 1e6,
        "window": 512, "tie_word_embeddings": True,
    }  # fmt: skip
    SETTINGS: ClassVar[Settings] = (
        *(each for each in Gemma3Config.SETTINGS if each[0] != "use_bidirectional_attention"),
        ("use_bidirectional_attention", (None, False, "vision"), "a token sees no later ones"),
        ("enable_moe_block", (None, False), "mixtures of experts are not supported"),
        ("attention_k_eq_v", (None, False), "values have a projection of their own"),
    )

    scalar: float = 1
    local_theta: float = 10000.0
    global_head_size: int = 512
    rotary_part: float = 0.25
    shared_layers: int = 0
    use_double_wide_mlp: bool = False
    n_layer_embd: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(self.sliding_layers):
            check_count("sliding_window", self.window)
        for name, most in (("shared_layers", self.n_layer - 1), ("n_layer_embd", 2**16)):
            number = check_integer(name, getattr(self, name), 0, most, f"0 to {most}")
            set_fields(self, **{name: number})
        size = check_count("global_head_size", self.global_head_size, 2**16)
        if size % 2:
            raise InputError(f"global_head_size: expected an even number, got {size}")
        expected = "a number from 0 to 1"
        set_fields(self, rotary_part=check_number("rotary_part", self.rotary_part, 0, 1, expected))
        own = self.sliding_layers[: self.n_layer - self.shared_layers]
        if {*own} != {*self.sliding_layers}:
            raise InputError(
                f"shared_layers: expected layers of both kinds before the last {self.shared_layers}"
                ", whose keys and values these layers read"
            )

    def _check_scaling(self, scaling: RopeScaling) -> None:
        """Raise InputError unless RoPE's frequencies are divided by a number."""
        if scaling.kind != "linear":
            raise InputError(f"rope_scaling: expected linear in {self.NAME}, got {scaling.kind}")

    @property
    def layer_embeddings(self) -> LayerEmbeddings | None:
        """Return the constants of the embeddings for each layer.

        The projection of the embedding is not multiplied by n_embd ** -0.5 before its norm, which
        is the same with n_embd times eps. The sum with the table's row is divided by sqrt(2).
        """
        P = self.n_layer_embd
        root = float(np.asarray(math.sqrt(P)).astype(FLOATS[self.embedding_dtype]))
        return LayerEmbeddings(P, root * 2**-0.5, self.eps * self.n_embd) if P else None

    def head_size_of(self, layer: int) -> int:
        """Return the channels of a head in a layer."""
        return self.head_size if self.sliding_layers[layer] else self.global_head_size

    def source_of(self, layer: int) -> int:
        """Return the layer whose keys and values a layer reads: itself, or an earlier one."""
        readers, kinds = self.reading_layers, self.sliding_layers
        alike = [n for n in range(readers.start) if kinds[n] == kinds[layer]]
        return alike[-1] if layer in readers else layer

    @property
    def reading_layers(self) -> range:
        """The layers that read the keys and values of an earlier layer."""
        return range(self.n_layer - self.shared_layers, self.n_layer)

    @property
    def layer_caches(self) -> tuple[LayerCache, ...]:
        """Return the part of a kv_cache that each layer reads."""
        layers = range(self.n_layer)
        widths = [self.n_kv_head * self.head_size_of(n) for n in layers]
        return tuple(LayerCache(self.source_of(n), widths[n], widths[n]) for n in layers)

    def qkv_widths(self, layer: int) -> tuple[int, int, int]:
        """Return the channels of queries, keys and values in a layer."""
        D = self.head_size_of(layer)
        return self.n_head * D, self.n_kv_head * D, self.n_kv_head * D

    def frequencies(self) -> NDArray[np.float64]:
        """Return the radians per position of each pair in layers without a window."""
        D = self.global_head_size
        pairs = np.arange(int(self.rotary_part * D // 2))
        turned = self.theta ** (-2 * pairs / D) / self.rope_factor
        return np.pad(turned, (0, D // 2 - len(turned)))

    def shapes_of(self, layer: int) -> Shapes:
        """Return {name: shape} of the tensors of one layer's block."""
        C, D, (Q, KV, _) = (self.n_embd,), self.head_size_of(layer), self.qkv_widths(layer)
        shared, P = layer in self.reading_layers, self.n_layer_embd
        FF = self.n_ff * (2 if shared and self.use_double_wide_mlp else 1)
        heads: Shapes = {"w_q": (*C, Q), "gamma_q": (D,)}
        if not shared:
            heads = {"w_qkv": (*C, Q + 2 * KV), "gamma_q": (D,), "gamma_k": (D,)}
        embedding: Shapes = {"w_layer_gate": (*C, P), "w_layer": (P, *C), "gamma_layer": C}
        shapes = {
            "gamma1": C, **heads, "w_o": (Q, *C), "gamma_attn": C, "gamma2": C,
            "w_gate": (*C, FF), "w_up": (*C, FF), "w_down": (FF, *C), "gamma_ff": C,
            **(embedding if P else {}), "layer_scalar": (1,),
        }  # fmt: skip
        biased = [n for n in ("w_qkv", "w_q", "w_o") if n in shapes and self.attention_bias]
        return shapes | {f"b{name[1:]}": shapes[name][1:] for name in biased}

    def block_shapes(self) -> Shapes:
        """Return {name: shape} of the tensors of all layers' blocks, with the largest shapes."""
        found: dict[str, tuple[int, ...]] = {}
        for layer in range(self.n_layer):
            for name, shape in self.shapes_of(layer).items():
                found[name] = max(shape, found.get(name, shape))
        return found

    def outer_shapes(self) -> tuple[Shapes, Shapes]:
        """Return name → shape of the tensors before and after the blocks, without lm_head."""
        (first, last), P = super().outer_shapes(), self.n_layer_embd
        of_all = self.n_layer * P
        table: Shapes = {"layer_table": (self.vocab_size, of_all)}
        table = {**table, "w_layers": (self.n_embd, of_all), "gamma_layers": (P,)}
        return {**first, **(table if P else {})}, last

    @classmethod
    def _fields_in(cls, config: Mapping[str, object]) -> dict[str, Any]:
        """Convert the content of a config.json to {field of this class: value}."""
        own: dict[str, object] = {}
        objects = rope_objects(config).get("rope_parameters", {})
        full = objects.get(KINDS[0])
        if isinstance(full, dict) and full.get("rope_type") == "proportional":
            own["rotary_part"] = full.get(PART, 1.0)
            kind = "linear" if full.get("factor", 1.0) != 1 else "default"
            full = {k: v for k, v in full.items() if k != PART} | {"rope_type": kind}
            config = {**config, "rope_parameters": {**objects, KINDS[0]: full}}
        elif objects:
            own["rotary_part"] = 1.0
        fields = super()._fields_in(config)
        rows = config.get(TABLE_ROWS)
        if rows not in (None, fields["vocab_size"]) and fields.get("n_layer_embd", 1):
            raise CheckpointError(
                f"config.json: {TABLE_ROWS}: expected {fields['vocab_size']}, as vocab_size, "
                f"got {shown(rows)}"
            )
        # As in `transformers`, the last layer never has a window.
        fields["sliding_layers"] = (*fields["sliding_layers"][:-1], False)
        if OVERRIDES in config:
            own["global_head_size"] = _overridden(config[OVERRIDES], fields)
        return fields | own

    @property
    def gguf_sizes(self) -> dict[str, tuple[str, int]]:
        """{GGUF key that the other fields determine: (meaning in words, value)}."""
        full, sliding = (("the head size", n) for n in (self.global_head_size, self.head_size))
        of_full = dict.fromkeys(("attention.value_length", "rope.dimension_count"), full)
        return of_full | {f"{key}_swa": sliding for key in of_full}

    @property
    def rope_factor(self) -> float:
        """The number that divides RoPE's frequencies in layers without a window."""
        return 1.0 if self.scaling is None else self.scaling.factor

    @property
    def rope_factors(self) -> tuple[float, ...]:
        """Factors that divide RoPE's frequencies of layers without a window in a GGUF file."""
        return tuple(self.rope_factor if f > 0 else NO_ROTATION for f in self.frequencies())

    def with_rope_factors(self, factors: tuple[float, ...]) -> Gemma4Config:
        """Return the config for these factors of a GGUF file."""
        count = sum(each < NO_ROTATION / 2 for each in factors)
        pairs, factor = self.global_head_size // 2, factors[0] if count else 1.0
        expected = (*(factor,) * count, *(pairs - count) * (factors[-1],))
        if len(factors) != pairs or factors != expected:
            raise InputError(f"rope_freqs: expected one factor for the first of {pairs} pairs, and "
                             f"{NO_ROTATION:g} for the others, got {shown(factors)}")  # fmt: skip
        parts = (count / pairs, (count + 0.25) / pairs)  # the first may be rounded down to less
        part = next(each for each in parts if int(each * (2 * pairs) // 2) == count)
        scaling = None if factor == 1 else RopeScaling("linear", factor)
        return replace(self, rotary_part=part, scaling=scaling)

    @classmethod
    def from_gguf(cls, settings: dict[str, Any]) -> dict[str, Any]:
        """Return a GGUF file's metadata, with one value for the widths of the feed-forward."""
        n, ff = settings.get("attention.shared_kv_layers"), settings.get(FF)
        if not (isinstance(n, int) and isinstance(ff, (list, np.ndarray)) and 0 < n < len(ff)):
            return settings
        widths = np.asarray(ff).tolist()
        doubled = widths[-n:] == [2 * widths[0]] * n
        return {**settings, FF: widths[:-n] + widths[:1] * n, WIDE: True} if doubled else settings

    def gguf_settings(self) -> dict[str, object]:
        """Return {key: value} of GGUF's keys, with an array of the widths of the feed-forward."""
        keys, n = super().gguf_settings(), self.shared_layers
        widths = (*(self.n_ff,) * (self.n_layer - n), *(2 * self.n_ff,) * n)
        return keys | ({FF: widths} if keys.pop(WIDE) else {})

    def to_hugging_face(self) -> dict[str, object]:
        """Return the content of a `config.json` with which `transformers` loads this model."""
        content = super().to_hugging_face()
        full = {"rope_type": "proportional", "rope_theta": content.pop("rope_theta")}
        full |= {PART: self.rotary_part, "factor": self.rope_factor}
        local = {"rope_type": "default", "rope_theta": self.local_theta}
        del content[SCALE], content["rope_scaling"]
        rope = dict(zip(KINDS, (full, local), strict=True))
        return content | {"rope_parameters": rope, TABLE_ROWS: self.vocab_size}


def _overridden(overrides: object, fields: Mapping[str, Any]) -> Any:
    """Return the head size of layers without a window that per_layer_config states.

    The package `transformers` writes this key in place of global_head_dim; the value is empty if
    all layers have the same head size.
    """
    if overrides == {}:
        return fields["head_size"]
    layers = [str(n) for n, sliding in enumerate(fields["sliding_layers"]) if not sliding]
    named = {str(n): each for n, each in overrides.items()} if isinstance(overrides, dict) else {}
    sizes = [named[n].get("head_dim") if isinstance(named.get(n), dict) else None for n in layers]
    same = {"head_dim": sizes[0], "num_key_value_heads": fields["n_kv_head"]}
    alike = None not in sizes and all(same | named[n] == same for n in layers)
    if not alike or named.keys() != {*layers}:
        raise CheckpointError(
            f"config.json: {OVERRIDES}: expected the same head_dim for each of the layers without "
            f"a window ({', '.join(layers)}), got {shown(overrides)}"
        )
    return sizes[0]


CONFIG: type[ModelConfig] = Gemma4Config
NAMES: Mapping[str, tuple[str, str]] = {
    **gemma3.NAMES,
    "w_q b_q": ("self_attn.q_proj", "attn_q"),
    "w_layer_gate": ("per_layer_input_gate", "inp_gate"),
    "w_layer": ("per_layer_projection", "proj"),
    "gamma_layer": ("post_per_layer_input_norm", "post_norm"),
    "layer_scalar": ("=layer_scalar", "layer_output_scale"),
    "layer_table": ("embed_tokens_per_layer", "per_layer_token_embd"),
    "w_layers": ("per_layer_model_projection", "per_layer_model_proj"),
    "gamma_layers": ("per_layer_projection_norm", "per_layer_proj_norm"),
}
GGUF, GGUF_ROPE_INTERLEAVED = "gemma4", False
final = llama.final


def constants(config: Gemma4Config, vectors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return {name: tensor}: RoPE frequencies, and norm weights of embeddings for layers."""
    found: dict[str, np.ndarray] = {**config.layer_frequencies()}
    if config.n_layer_embd:
        found["gamma_layers_scaled"] = vectors["gamma_layers"] * 2**-0.5
    return found


def attention(o: Any, h: str, x: Value) -> Value:
    """Compute a block's first half, attention, over the layer's own keys or an earlier layer's."""
    if h not in o.c.readers:
        return qwen3.attention(o, h, x)
    y = o.norm(f"{h}rms1", x, f"{h}gamma1")
    return o.attend(h, o.queries(h, y, f"{h}gamma_q"))


def feed_forward(o: Any, h: str, x: Value, y: Value) -> Value:
    """Compute the block's output from x and from attention; each of three sums has a norm."""
    scalar = f"{h}layer_scalar"
    x, y = gemma3.before_last_norm(o, h, x, y, str)
    if not o.c.layers:
        return o.add_norm(f"{h}output", x, y, f"{h}gamma_ff", scalar)
    x = o.add_norm(f"{h}x2", x, y, f"{h}gamma_ff")
    y = o.operand(f"{h}layer_in", x)
    y = o.product(f"{h}layer_gate", y, f"{h}w_layer_gate")
    y = o.operand(f"{h}layer_ff_in", o.gated_by_layer(h, y))
    y = o.product(f"{h}layer_proj", y, f"{h}w_layer")
    return o.add_norm(f"{h}output", x, y, f"{h}gamma_layer", scalar)

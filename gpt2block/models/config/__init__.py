"""Sizes of models and shapes of their tensors: a base class for all architectures, and GPT-2's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

from gpt2block.checks import check_count, check_eps, check_token, nearest, set_fields, several
from gpt2block.errors import Argument, CheckpointError, InputError, shown

# The limits are far above all models' sizes. The limits bound the memory that a damaged file can
# request.
LIMITS: Mapping[str, int] = {
    "n_layer": 10_000,
    "n_head": 2**16,
    "n_embd": 2**16,
    "n_ctx": 2**20,
    "vocab_size": 2**24,
}
# Limits of sizes that only some architectures have.
ALL_LIMITS: Mapping[str, int] = {
    **LIMITS, "n_kv_head": 2**16, "n_ff": 2**20, "head_size": 2**16,
    **dict.fromkeys(("n_k_head", "n_v_head", "k_size", "v_size"), 2**12),
    **dict.fromkeys(("n_expert", "n_expert_used"), 2**10), "n_ff_expert": 2**20,
}  # fmt: skip
Config = TypeVar("Config", bound="ModelConfig")
Shapes = Mapping[str, tuple[int, ...]]
Settings = Iterable[tuple[str, tuple[object, ...], str]]
Divided = tuple[tuple[str, tuple[str, ...], str], ...]
# Keys of config.json that change the result of other architectures. An entry has a key, the values
# without effect, and what this package computes. A list in config.json has a value per layer.
_ALL_VISIBLE, _PLAIN_NORMS = "attention sees all earlier tokens", "queries and keys have no norm"
_UNSCALED = "embeddings, residuals and logits are not scaled"
_CHOSEN = "a router chooses all experts that a token uses"
_OF_ALL = "a router chooses among all experts of a layer"
_LAYERS = "this key names no layers without experts"
OF_OTHERS: Settings = (
    ("layer_types", (None, "full_attention"), _ALL_VISIBLE),
    ("sliding_window_pattern", (None, 1), _ALL_VISIBLE),
    ("use_sliding_window", (None, False), _ALL_VISIBLE),
    ("attention_chunk_size", (None,), _ALL_VISIBLE),
    ("no_rope_layers", (None, 1), "all layers have RoPE"),
    ("no_rope_layer_interval", (None, 0), "all layers have RoPE"),
    ("rope_interleaved", (None, False), "RoPE pairs channels of the two halves of a head"),
    ("llama_4_scaling_beta", (None, 0), "queries are not scaled by their position"),
    ("attn_temperature_tuning", (None, False), "queries are not scaled by their position"),
    ("use_rope", (None, True), "all layers have RoPE"),
    ("use_qk_norm", (None, False), _PLAIN_NORMS),
    ("qk_norm", (None, False), _PLAIN_NORMS),
    ("qk_layernorm", (None, False), _PLAIN_NORMS),
    ("clip_qkv", (None,), "queries, keys and values are not clipped"),
    ("alibi", (None, False), "attention has no biases by distance"),
    ("attn_logit_softcapping", (None,), "attention's scores are not capped"),
    ("final_logit_softcapping", (None,), "logits are not capped"),
    ("embedding_multiplier", (None, 1), _UNSCALED),
    ("residual_multiplier", (None, 1), _UNSCALED),
    ("logits_scaling", (None, 1), _UNSCALED),
    ("logit_scale", (None, 1), _UNSCALED),
    ("scale_emb", (None, 1), _UNSCALED),
    ("key_multiplier", (None, 1), _UNSCALED),
    ("lm_head_multiplier", (None, 1), _UNSCALED),
    ("use_parallel_residual", (None, False), "the feed-forward follows attention"),
    ("parallel_attn", (None, False), "the feed-forward follows attention"),
    ("n_shared_experts", (None, 0), _CHOSEN),
    ("num_shared_experts", (None, 0), _CHOSEN),
    ("shared_expert_intermediate_size", (None, 0), _CHOSEN),
    ("n_group", (None, 1), _OF_ALL),
    ("topk_group", (None, 1), _OF_ALL),
    ("scoring_func", (None, "softmax"), "scores of experts are a softmax"),
    ("routed_scaling_factor", (None, 1), "weights of experts have no factor"),
    ("first_k_dense_replace", (None, 0), _LAYERS),
    ("moe_layer_freq", (None, 1), _LAYERS),
)
_PER_LAYER = ("layer_types", "no_rope_layers")
TABLES = ("wte", "layer_table")  # matrices (vocab_size, …), whose rows are read by token
VECTORS = ("wpe", "router")  # tensors with two axes that are kept in float32, as vectors are
EXPERTS = "w_gate_experts", "w_up_experts", "w_down_experts"  # matrices of all experts of a layer
CONV_LAYERS = "conv_layers"  # GGUF files have no such key, but 0 heads of keys in these layers
# Rows of a slot that later passes of a gated delta net may need, for tokens that they compute again
RECENT = 16
SAVED = 256  # tokens from a state of gated delta nets that other texts can reuse to the next
DRAFTING = "mtp."  # begins the names of tensors of the block that drafts tokens
HALVES = "w_e", "w_h"  # matrices of this block, for the embedding and for the row of the stream
GPT2_VOCABULARY, GPT2_END = 50257, 50256  # vocabulary size, id of <|endoftext|>


class Scales(NamedTuple):
    """Scalar factors and limits of a forward pass; the default values have no effect.

    eps: added to the variance by norms of the residual stream. embedding: factor of rows of wte.
    attention: factor of scores; None for 1 / sqrt(head_size). stream: factor that converts the
    residual stream of a pass to the model's residual stream. rope: factor of the pairs of channels
    that RoPE rotates. cap: the limit of the magnitudes of logits. growth: (β, n), if queries are
    multiplied by 1 + β log(1 + ⌊position / n⌋).
    """

    eps: float
    embedding: float = 1.0
    attention: float | None = None
    stream: float = 1.0
    rope: float = 1.0
    cap: float | None = None
    growth: tuple[float, int] | None = None


class CheckpointLayout(NamedTuple):
    """The names and the matrix layout of an architecture's tensors in files of `transformers`.

    prefix: text before all names except lm_head's. block: text in the place of "h.", before the
    number of the layer. matrices: the layout of a block's matrices, "KN" or "NK". ignored: a
    pattern that matches the names of buffers that are not weights.
    """

    prefix: str
    block: str
    matrices: str
    ignored: str


class LayerCache(NamedTuple):
    """The part of a kv_cache that a layer reads: a row of keys and a row of values per token.

    layer: the layer that stores the rows, this layer or an earlier one. keys, values: channels of
    the rows; 0 if there are none. narrow: whether a kv_cache of FP8 stores the rows in FP8.
    """

    layer: int
    keys: int
    values: int
    narrow: bool = True


class LayerEmbeddings(NamedTuple):
    """Constants of the rows that a token has for each layer, in addition to its embedding.

    width: channels of a row for a layer. factor: factor of the table's rows. eps: added to the
    variance by the norm of the projected embedding.
    """

    width: int
    factor: float
    eps: float


class Experts(NamedTuple):
    """The sizes of mixtures of experts, and how a router chooses experts for each row.

    layers: whether each layer's feed-forward is a mixture. n_expert: experts of a layer. n_used:
    experts that each row uses. sigmoid, normed, factor, eps: as in `reference.route`.
    """

    layers: tuple[bool, ...]
    n_expert: int
    n_used: int
    sigmoid: bool = False
    normed: bool = False
    factor: float = 1.0
    eps: float = 0.0


class DeltaNets(NamedTuple):
    """The sizes of a model's gated delta nets, layers that keep a matrix for each head.

    layers: whether each layer is one. q and k have n_k_head heads of k_size channels, v has
    n_v_head heads of v_size channels. tiled: as in `reference.delta_rule`.
    """

    layers: tuple[bool, ...]
    n_k_head: int
    n_v_head: int
    k_size: int
    v_size: int
    tiled: bool = False

    @property
    def values(self) -> int:
        """Channels of all heads of v."""
        return self.n_v_head * self.v_size

    @property
    def channels(self) -> int:
        """Channels of q, k and v together, over which the convolution runs."""
        return 2 * self.n_k_head * self.k_size + self.values

    @property
    def state_size(self) -> int:
        """Numbers in a state: three rows of q, k and v, and the matrices of all heads."""
        return 3 * self.channels + self.values * self.k_size


@dataclass(frozen=True)
class ModelConfig(ABC):
    """Base class of model configs, with the sizes that all architectures have.

    Sizes are positive integers up to `LIMITS`. eos_token_ids: tokens that end a generation, in
    addition to the tokenizer's end tokens. Raises InputError for other values.

    NAME: name of the architecture. MODEL_TYPE: model_type in config.json. SIZES: field → keys of
    config.json, of which the first key is written. OTHERS: field → key of config.json, for fields
    that are not sizes. FLAGS: boolean fields, which have the same names in config.json. ABSENT:
    values of fields that config.json omits, if they differ from the class's defaults. SETTINGS:
    keys of config.json, supported values (the default first), and the reason for no others.
    HONOURED: keys of OF_OTHERS that this architecture supports. GGUF_KEYS: key of GGUF files,
    without the architecture's name → field. GGUF_READ: other keys that `gguf_fields` reads, also as
    arrays. GGUF_NEUTRAL: key of GGUF files →
    its only supported value. GGUF_ZEROS: fields of GGUF_KEYS for which 0 is a value, and not the
    default. GATE: activation of a gated feed-forward; "gelu" is the tanh approximation.
    ADDED_TO_NORMS: number that GGUF files add to the weights of norms. VALUE_NORMS: whether heads
    of values have norms without weights, next to norms of heads of queries and keys. FROM_CACHE:
    whether attention of prompts always reads keys and values from a kv_cache. READS_STREAM: whether
    the model's input is an embedding joined with a row of another model's residual stream.
    EMBEDDING_NORM: name of the weight of the RMSNorm that follows the embedding; "" without one.

    FILES: the layout in files of `transformers`. NORM: the name of the norms in messages. QKV: the
    step whose result is the rows [Q | K | V] that attention reads. TENSOR_HEADS: head sizes for
    which a prefill can use tensor cores. DIVIDED: weights w of a step, results that are linear in
    w, and the weights of the next product. With FP8 weights, the step may use w / s and the product
    its weights times s, to keep the results in float16's range; () if this is not possible.
    """

    NAME: ClassVar[str]
    MODEL_TYPE: ClassVar[str]
    SIZES: ClassVar[Mapping[str, tuple[str, ...]]]
    OTHERS: ClassVar[Mapping[str, str]]
    ABSENT: ClassVar[Mapping[str, object]] = {}
    SETTINGS: ClassVar[Settings]
    HONOURED: ClassVar[tuple[str, ...]] = ()
    GGUF_KEYS: ClassVar[Mapping[str, str]] = {}
    GGUF_READ: ClassVar[tuple[str, ...]] = ()
    GGUF_NEUTRAL: ClassVar[Mapping[str, object]] = {}
    GGUF_ZEROS: ClassVar[tuple[str, ...]] = ()
    GATE: ClassVar[Literal["silu", "gelu"]] = "silu"
    ADDED_TO_NORMS: ClassVar[float] = 0.0
    VALUE_NORMS: ClassVar[bool] = False
    FROM_CACHE: ClassVar[bool] = False
    READS_STREAM: ClassVar[bool] = False
    EMBEDDING_NORM: ClassVar[str] = ""
    FLAGS: ClassVar[tuple[str, ...]] = ("tie_word_embeddings",)
    FILES: ClassVar[CheckpointLayout]
    NORM: ClassVar[str]
    QKV: ClassVar[str]
    TENSOR_HEADS: ClassVar[tuple[int, ...]]
    DIVIDED: ClassVar[Divided] = ()

    n_layer: int
    n_head: int
    n_embd: int
    n_ctx: int
    vocab_size: int
    eps: float
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        # NumPy integers, which json cannot write, are converted.
        sizes = {n: check_count(n, getattr(self, n), limit) for n, limit in LIMITS.items()}
        set_fields(self, **sizes, eps=check_eps(self.eps))
        for name in self.FLAGS:
            if not isinstance(flag := getattr(self, name), bool):
                raise InputError(f"{name}: expected true or false, got {shown(flag)}")
        ends = tuple(check_token("eos_token_ids", token) for token in several(self.eos_token_ids))
        set_fields(self, eos_token_ids=ends)

    @property
    @abstractmethod
    def head_size(self) -> int:
        """Channels of a head."""

    @property
    def q_width(self) -> int:
        """Channels of all queries of a token."""
        return self.n_head * self.head_size

    @property
    def head_order(self) -> tuple[int, ...]:
        """For each channel of a head of q and k, its index in files; () if orders are equal.

        If w_qkv has `file_spans`, they have this order.
        """
        return ()

    @property
    def n_kv_head(self) -> int:
        """Heads of keys and values."""
        return self.n_head

    @property
    def kv_width(self) -> int:
        """Channels of all keys of a token. The values have as many."""
        return self.n_kv_head * self.head_size

    @property
    def eos_token_id(self) -> int | list[int] | None:
        """Return `eos_token_ids` in the form of config.json: a number, a list or None."""
        ends = list(self.eos_token_ids)
        return ends[0] if len(ends) == 1 else ends or None

    @property
    def scales(self) -> Scales:
        """The scalar factors and limits of a forward pass."""
        return Scales(self.eps)

    @property
    def layer_embeddings(self) -> LayerEmbeddings | None:
        """The constants of the embeddings for each layer; None if there are none."""
        return None

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys have norms."""
        return "gamma_q" in self.block_shapes()

    @property
    def frequencies_of_layers(self) -> tuple[str, ...]:
        """For each layer, the name of the tensor of its RoPE frequencies; () without RoPE."""
        return ()

    @property
    def short_context(self) -> int:
        """Longest sequence (tokens) that uses RoPE's short-context frequencies; 0 if none does."""
        return 0

    @property
    def conv_layers(self) -> tuple[bool, ...]:
        """Whether each layer has a short convolution in place of attention; () if none has."""
        return ()

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Attention window of each layer, in tokens, including the current one; None: no limit."""
        return (None,) * self.n_layer

    def file_rows(self, name: str, layer: int) -> tuple[int, ...]:
        """Return how many rows of a block's tensor `name` each of several tensors of a file has."""
        return self.qkv_widths(layer)

    def file_spans(self, name: str) -> tuple[tuple[int, int], ...]:
        """Return the rows (begin, end) of a file's tensors that a block's tensor `name` has.

        The rows are those of the joined tensors of the file. (): the rows that follow the rows of
        the tensor before it.
        """
        return ()

    @abstractmethod
    def block_shapes(self) -> Shapes:
        """Return a dict of names and shapes of a block's tensors; matrices are (in, out).

        If layers have different tensors, the dict has the tensors of all layers, and the largest of
        several shapes of a tensor.
        """

    def shapes_of(self, layer: int) -> Shapes:
        """Return {name: shape} for the tensors of one layer's block."""
        return self.block_shapes()

    @property
    def reading_layers(self) -> range:
        """The layers that read the keys and values of an earlier layer."""
        return range(0)

    def qkv_widths(self, layer: int) -> tuple[int, int, int]:
        """Return the channels of queries, keys and values in a layer."""
        return self.q_width, self.kv_width, self.kv_width

    @property
    def delta_nets(self) -> DeltaNets | None:
        """The sizes of layers that are gated delta nets; None if there are none."""
        return None

    @property
    def experts(self) -> Experts | None:
        """The mixtures of experts of the layers; None if there are none."""
        return None

    @property
    def layer_caches(self) -> tuple[LayerCache, ...]:
        """The part of a kv_cache that each layer reads."""
        width = self.kv_width
        return tuple(LayerCache(layer, width, width) for layer in range(self.n_layer))

    @property
    def draft_config(self) -> ModelConfig | None:
        """The config of the block that drafts tokens from the residual stream; None without one."""
        return None

    def with_tensors(self, names: Iterable[str]) -> ModelConfig:
        """Return the config of the model in a file with tensors of these names."""
        return self

    @classmethod
    def from_gguf(cls, settings: dict[str, Any]) -> dict[str, Any]:
        """Return a GGUF file's metadata, with one value for arrays that this class can express."""
        return settings

    @classmethod
    def from_hugging_face(cls: type[Config], config: Any) -> Config:
        """Read the fields of a Hugging Face `config.json` of this model_type.

        Keys that do not change the result of the model are ignored. Raises CheckpointError for
        another architecture, for settings that the kernels do not compute, with their names, and
        if two names of a setting have different values.
        """
        if model_type(config) != cls.MODEL_TYPE:
            got = shown(config.get("model_type"))
            raise CheckpointError(f"config.json: expected model_type {cls.MODEL_TYPE!r}, got {got}")
        made = cls(**cls._fields_in(config), eos_token_ids=end_tokens_in(config))
        of_others = (*OF_OTHERS, *made._neutral_for_sizes(config))
        check_settings(config, [each for each in of_others if each[0] not in cls.HONOURED])
        return made

    def _neutral_for_sizes(self, config: Mapping[str, object]) -> Settings:
        """Return entries for OF_OTHERS (checked config.json keys) that depend on the sizes."""
        scale = "attention divides by the square root of the head size"
        window = config.get("sliding_window")
        wide = (window,) if sees_all(window, self.n_ctx) else ()
        return (
            ("sliding_window", (None, *wide), f"{_ALL_VISIBLE} of {self.n_ctx}"),
            ("query_pre_attn_scalar", (None, self.head_size), scale),
            ("attention_multiplier", (None, self.head_size**-0.5), scale),
            ("scale_depth", (None, self.n_layer**0.5), _UNSCALED),
            ("dim_model_base", (None, self.n_embd), _UNSCALED),
        )

    @classmethod
    def _fields_in(cls, config: Mapping[str, object]) -> dict[str, Any]:
        """Return keyword arguments of this class, read from a config.json, except eos_token_ids."""
        fields = dict(cls.ABSENT)
        for ours, keys in cls.SIZES.items():
            limit = ALL_LIMITS[ours]
            sizes = {key: check_count(key, config[key], limit) for key in keys if key in config}
            if sizes:
                fields[ours] = agreed(sizes)
        check_settings(config, cls.SETTINGS)
        others = cls._others().items()
        return fields | {ours: config[theirs] for ours, theirs in others if theirs in config}

    @classmethod
    def _others(cls) -> dict[str, str]:
        return {**cls.OTHERS, **{name: name for name in cls.FLAGS}}

    def to_hugging_face(self) -> dict[str, Any]:
        """Return the content of a `config.json` with which `transformers` loads this model."""
        named = {ours: theirs for ours, (theirs, *_) in self.SIZES.items()} | self._others()
        fields = {theirs: getattr(self, ours) for ours, theirs in named.items()}
        return {"model_type": self.MODEL_TYPE, **fields, "eos_token_id": self.eos_token_id}

    @classmethod
    def gguf_fields(cls, settings: Mapping[str, object]) -> dict[str, Any]:
        """Return {field: value} of the keys of a GGUF file; None and 0 stand for the default."""
        return {field: settings.get(key) for key, field in cls.GGUF_KEYS.items()}

    def gguf_settings(self) -> dict[str, object]:
        """Return {key: value} of the fields that have keys in GGUF files."""
        return {key: getattr(self, field) for key, field in self.GGUF_KEYS.items()}

    @abstractmethod
    def outer_shapes(self) -> tuple[Shapes, Shapes]:
        """Return name → shape of the tensors before and after the blocks, without lm_head.

        The embedding of tokens is wte, (vocab_size, C).
        """


@dataclass(frozen=True)
class GPT2Config(ModelConfig):
    """Sizes of a GPT-2 model; the defaults are GPT-2 small (124M parameters).

    Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), table 2.
    """

    NAME: ClassVar[str] = "GPT2"
    MODEL_TYPE: ClassVar[str] = "gpt2"
    SIZES: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "n_layer": ("n_layer", "num_hidden_layers"),
        "n_head": ("n_head", "num_attention_heads"),
        "n_embd": ("n_embd", "hidden_size"),
        "n_ctx": ("n_positions", "max_position_embeddings"),
        "vocab_size": ("vocab_size",),
    }
    OTHERS: ClassVar[Mapping[str, str]] = {"eps": "layer_norm_epsilon"}
    SETTINGS: ClassVar[Settings] = (
        ("activation_function", ("gelu_new", "gelu_pytorch_tanh"),
         "the kernels compute GELU in its tanh approximation only"),
        ("scale_attn_weights", (True,), "the kernels divide by the square root of the head size"),
        ("scale_attn_by_inverse_layer_idx", (False,), "the kernels scale all layers alike"),
        ("add_cross_attention", (False,), "there is no encoder to attend to"),
        ("quantization_config", (None,), "quantized weights are not supported"),
    )  # fmt: skip
    # Checkpoints of older versions of `transformers` also contain the buffers of attention masks.
    FILES: ClassVar[CheckpointLayout] = CheckpointLayout(
        "transformer.", "h.", "KN", r"h\.\d+\.attn\.(bias|masked_bias)"
    )
    NORM, QKV, TENSOR_HEADS = "LayerNorm", "qkv", (64,)

    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    n_ctx: int = 1024
    vocab_size: int = GPT2_VOCABULARY
    eps: float = 1e-5
    tie_word_embeddings: bool = True
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_embd % self.n_head:
            raise InputError(f"n_embd {self.n_embd} is not a multiple of n_head {self.n_head}")

    @property
    def head_size(self) -> int:
        return self.n_embd // self.n_head

    def block_shapes(self) -> Shapes:
        """Return a dict of names and shapes of the twelve tensors of a block, in packed order."""
        return block_shapes(self.n_embd)

    def outer_shapes(self) -> tuple[Shapes, Shapes]:
        """Return name → shape of the tensors before and after the blocks, without lm_head."""
        C = self.n_embd
        first = {"wte": (self.vocab_size, C), "wpe": (self.n_ctx, C)}
        return first, {"gamma_f": (C,), "beta_f": (C,)}

    @classmethod
    def _fields_in(cls, config: Mapping[str, object]) -> dict[str, Any]:
        """Return keyword arguments of this class from a config.json; defaults are GPT-2 small's.

        A size may have its GPT-2 name or its general name (n_head, num_attention_heads). As in
        `transformers`, n_positions is the context length, and n_ctx is used only without it.
        """
        fields = super()._fields_in(config)
        if "n_ctx" in config:
            fields.setdefault("n_ctx", config["n_ctx"])
        inner = (None, 4 * fields.get("n_embd", cls.n_embd))
        width = ("n_inner", inner, "the kernels have a hidden width of 4 n_embd only")
        check_settings(config, [width])
        return fields

    def to_hugging_face(self) -> dict[str, Any]:
        """Return the content of a `config.json` with which `transformers` loads this model."""
        content = super().to_hugging_face() | {
            "architectures": ["GPT2LMHeadModel"],
            "n_inner": None,
            "n_ctx": self.n_ctx,
            "activation_function": "gelu_new",
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "bos_token_id": GPT2_END if self.vocab_size == GPT2_VOCABULARY else None,
        }
        if self.vocab_size == GPT2_VOCABULARY and not self.eos_token_ids:
            del content["eos_token_id"]  # transformers' default is <|endoftext|>
        return content


def model_type(config: object) -> Any:
    """Return model_type from a config.json's content. Raises CheckpointError for a non-object."""
    if not isinstance(config, dict):
        raise CheckpointError(f"config.json: expected an object, got {shown(config)}")
    return config.get("model_type", "gpt2")


def end_tokens_in(config: Mapping[str, object]) -> Any:
    """Return `eos_token_id` of a config.json or generation_config.json, unchecked; () if absent."""
    ends = config.get("eos_token_id")
    return () if ends is None else ends


def agreed(given: Mapping[str, object]) -> Any:
    """Return the value that these config.json keys share; raise CheckpointError if they differ."""
    (first, value), *others = given.items()
    for name, other in others:
        if other != value:
            raise CheckpointError(
                f"config.json: {first} {shown(value)} contradicts {name} {shown(other)}: remove "
                "the wrong one: both name the same setting"
            )
    return value


def check_settings(config: Mapping[str, object], settings: Settings, prefix: str = "") -> None:
    """Raise CheckpointError if a setting of a config.json has an unsupported value.

    prefix: text before the names of settings in the message.
    """
    for name, supported, why in settings:
        value = config.get(name, supported[0])
        several = value if name in _PER_LAYER and isinstance(value, list) else [value]
        if not all(each in supported for each in several):
            expected = " or ".join(_as_json(option) for option in supported)
            raise CheckpointError(
                f"config.json: {prefix}{name}: expected {expected}, got {_as_json(value)}: {why}"
            )


def sees_all(window: object, n_ctx: object) -> bool:
    """Return whether a window of the last `window` tokens covers a context of n_ctx tokens."""
    return isinstance(window, int) and isinstance(n_ctx, int) and window >= n_ctx


def _as_json(value: object) -> str:
    """Return a value of a config.json as JSON, shortened if it is long."""
    names = {None: "null", True: "true", False: "false"}
    return names[value] if value is None or isinstance(value, bool) else shown(value)


SIZES: Mapping[str, GPT2Config] = {
    "gpt2": GPT2Config(),
    "gpt2-medium": GPT2Config(n_layer=24, n_head=16, n_embd=1024),
    "gpt2-large": GPT2Config(n_layer=36, n_head=20, n_embd=1280),
    "gpt2-xl": GPT2Config(n_layer=48, n_head=25, n_embd=1600),
}

# Names of GPT-2's sizes by number of parameters, such as "124M".
ALIASES: Mapping[str, str] = dict(zip(("124M", "355M", "774M", "1558M"), SIZES, strict=True))


def size(name: str) -> GPT2Config:
    """Return the config of a GPT-2 size, such as "gpt2" or "124M"; InputError lists the names."""
    known = (*SIZES, *ALIASES)
    if not isinstance(name, str) or name not in known:
        raise InputError(
            "unknown ",
            Argument("size"),
            f" {name!r}: expected one of {', '.join(known)}{nearest(name, known)}",
        )
    return SIZES[ALIASES.get(name, name)]


def block_shapes(n_embd: int) -> dict[str, tuple[int, ...]]:
    """Return a dict of names and shapes of a block's twelve tensors, in packed order."""
    C = n_embd
    return {
        "gamma1": (C,), "beta1": (C,),
        "w_qkv": (C, 3 * C), "b_qkv": (3 * C,),
        "w_attn": (C, C), "b_attn": (C,),
        "gamma2": (C,), "beta2": (C,),
        "w_fc": (C, 4 * C), "b_fc": (4 * C,),
        "w_proj": (4 * C, C), "b_proj": (C,),
    }  # fmt: skip


def model_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return a dict of names and shapes of a model's tensors, in the package's order.

    The order is: tensors before the blocks; tensors of blocks; tensors after the blocks; lm_head
    unless it is tied to wte; tensors of the block that drafts tokens. wte and lm_head are
    (vocab_size, C).
    """
    first, last = config.outer_shapes()
    head = {} if config.tie_word_embeddings else {"lm_head": (config.vocab_size, config.n_embd)}
    return {**first, **shapes_in_blocks(config), **last, **head, **_drafting_shapes(config)}


def _drafting_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return a dict of names and shapes of the block that drafts tokens, without shared tensors.

    The matrices `HALVES` of this block are one matrix w_eh, which has the inputs of both.
    """
    if (of := config.draft_config) is None:
        return {}
    shapes = {"w_eh": (2 * config.n_embd, config.n_embd), **model_shapes(of)}
    other = ("wte", "lm_head", *HALVES)
    return {DRAFTING + name: shape for name, shape in shapes.items() if name not in other}


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor is a matrix, which is stored in the dtype of the model."""
    return len(shape) == 2 and name.rpartition(".")[2] not in VECTORS


def is_product(name: str) -> bool:
    """Return whether a tensor of this name is a matrix of a product, other than lm_head."""
    return name.rpartition(".")[2].startswith("w_")


def multiplies_all(name: str) -> bool:
    """Return whether a tensor of this name is a matrix by which a layer multiplies every row."""
    return is_product(name) and not name.endswith(EXPERTS)


def product_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return {name: (in, out)} of the matrices that multiply every row, without lm_head."""
    return {name: shape for name, shape in model_shapes(config).items() if multiplies_all(name)}


def state_shapes(config: ModelConfig, slots: int) -> dict[str, tuple[int, ...]]:
    """Return a dict of names and shapes of the arrays for states of gated delta nets.

    The arrays are `state` and `recent` of each layer, see `reference.delta_rule`, and `held` of all
    layers.
    """
    of, found = config.delta_nets, dict[str, tuple[int, ...]]()
    for n, delta in enumerate(() if of is None else of.layers):
        if of is not None and delta:
            found[f"h.{n}.state"] = slots, 2, of.state_size
            found[f"h.{n}.recent"] = slots, RECENT, of.channels + 2 * of.n_v_head
    return found if of is None else {"held": (slots, 2), **found}


def shapes_in_blocks(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return {name: shape} for the tensors of all blocks, in the package's order.

    Names are `h.N.` and a name of `config.shapes_of(N)`. Matrices are (in, out).
    """
    blocks = ((f"h.{layer}.", config.shapes_of(layer)) for layer in range(config.n_layer))
    return {h + name: shape for h, shapes in blocks for name, shape in shapes.items()}

"""How `transformers` names and stores the tensors of each architecture."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from gpt2block.config import ModelConfig
from gpt2block.config_llama import LlamaConfig

Shape = tuple[int, ...]
_OUTSIDE = ("wte", "lm_head")  # matrices (vocab_size, C) of every architecture


@dataclass(frozen=True)
class Naming:
    """The names and layouts of an architecture's tensors in a file.

    names: gpt2block's name → the names in the file, of which there are several where one of ours
    has their rows in this order. Those of a block are relative to `block`, which stands for `h.`
    and is followed by the number of the layer. prefix: before all names except lm_head's. matrices:
    the layout of a block's matrices. ignored: buffers that are no weights.
    """

    names: Mapping[str, tuple[str, ...]]
    block: str
    prefix: str
    matrices: str
    ignored: re.Pattern[str]
    _prefixes: re.Pattern[str] = field(init=False)

    def __post_init__(self) -> None:
        # Before the prefix there may be those of torch's DistributedDataParallel and compile.
        pattern = rf"((module|_orig_mod)\.){{0,4}}({re.escape(self.prefix)})?"
        object.__setattr__(self, "_prefixes", re.compile(pattern))

    def bare(self, name: str) -> str:
        """The name of a tensor in a file without its prefixes."""
        return self._prefixes.sub("", name, count=1)

    def in_file(self, ours: str) -> tuple[str, ...]:
        """The names of a tensor in a file, without prefixes, by gpt2block's name."""
        h, dot, kind = ours.rpartition(".")
        return tuple(h.replace("h.", self.block, 1) + dot + name for name in self.names[kind])

    def with_prefix(self, name: str) -> str:
        """The name as `transformers` writes it."""
        return name if name == "lm_head.weight" else self.prefix + name

    def layers(self, names: Mapping[str, object]) -> int:
        """The number of blocks that have tensors; names without prefixes."""
        pattern = re.compile(re.escape(self.block) + r"(\d+)\.")
        return len({found[1] for name in names if (found := pattern.match(name))})

    def layout_of(self, ours: str) -> str | None:
        """The layout of a matrix in the file, "KN" or "NK"; None for other tensors."""
        kind = ours.rpartition(".")[2]
        return "NK" if kind in _OUTSIDE else self.matrices if kind.startswith("w_") else None

    def shape_of(self, ours: str, shape: Shape) -> Shape:
        """The shape in a file of a tensor of `config.model_shapes`."""
        turned = ours.startswith("h.") and self.layout_of(ours) == "NK"
        return shape[::-1] if turned else shape

    def parts(self, config: ModelConfig, ours: str, shape: Shape) -> dict[str, Shape]:
        """Name without prefixes → shape of the tensors in the file that hold one of ours.

        shape: as in `config.model_shapes`.
        """
        rows, *rest = self.shape_of(ours, shape)
        names = self.in_file(ours)
        if len(names) == 1:
            return {names[0]: (rows, *rest)}
        counts = (config.q_width, config.kv_width, config.kv_width)  # of Q, K and V
        return {name: (count, *rest) for name, count in zip(names, counts, strict=True)}


def single(names: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Names of tensors that a file holds as one tensor each."""
    return {ours: (theirs,) for ours, theirs in names.items()}


GPT2_NAMING = Naming(
    single({
        "wte": "wte.weight", "wpe": "wpe.weight",
        "gamma1": "ln_1.weight", "beta1": "ln_1.bias",
        "w_qkv": "attn.c_attn.weight", "b_qkv": "attn.c_attn.bias",
        "w_attn": "attn.c_proj.weight", "b_attn": "attn.c_proj.bias",
        "gamma2": "ln_2.weight", "beta2": "ln_2.bias",
        "w_fc": "mlp.c_fc.weight", "b_fc": "mlp.c_fc.bias",
        "w_proj": "mlp.c_proj.weight", "b_proj": "mlp.c_proj.bias",
        "gamma_f": "ln_f.weight", "beta_f": "ln_f.bias", "lm_head": "lm_head.weight",
    }),
    block="h.",
    prefix="transformer.",
    matrices="KN",
    ignored=re.compile(r"h\.\d+\.attn\.(bias|masked_bias)"),  # masks in older files
)  # fmt: skip

LLAMA_NAMING = Naming(
    single({
        "wte": "embed_tokens.weight",
        "gamma1": "input_layernorm.weight",
        "w_o": "self_attn.o_proj.weight", "b_o": "self_attn.o_proj.bias",
        "gamma2": "post_attention_layernorm.weight",
        "w_gate": "mlp.gate_proj.weight", "b_gate": "mlp.gate_proj.bias",
        "w_up": "mlp.up_proj.weight", "b_up": "mlp.up_proj.bias",
        "w_down": "mlp.down_proj.weight", "b_down": "mlp.down_proj.bias",
        "gamma_f": "norm.weight", "lm_head": "lm_head.weight",
    }) | {
        "w_qkv": tuple(f"self_attn.{part}_proj.weight" for part in "qkv"),
        "b_qkv": tuple(f"self_attn.{part}_proj.bias" for part in "qkv"),
    },
    block="layers.",
    prefix="model.",
    matrices="NK",
    ignored=re.compile(r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq"),  # in older files
)  # fmt: skip


def naming_of(config: ModelConfig) -> Naming:
    """The naming of the architecture of a config."""
    return LLAMA_NAMING if isinstance(config, LlamaConfig) else GPT2_NAMING

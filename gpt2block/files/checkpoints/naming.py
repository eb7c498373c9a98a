"""Map gpt2block's tensor names to an architecture's tensor names and layouts in files."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from gpt2block.errors import CheckpointError
from gpt2block.files.checkpoints.files import first_names
from gpt2block.files.checkpoints.stored import DTYPES, Stored, joined
from gpt2block.models.architectures import ARCHITECTURES
from gpt2block.models.architectures.qwen3_5 import UNREAD
from gpt2block.models.config import (
    DRAFTING,
    EXPERTS,
    TABLES,
    ModelConfig,
    is_product,
    model_shapes,
)
from gpt2block.models.config.llama import LlamaConfig

Shape = tuple[int, ...]
# Kinds of tensors that a file must not have, as errors list them
_PROBLEMS = ("missing", "unexpected", "misshapen", "of another dtype",
             "not contiguous, so save tensor.contiguous()")  # fmt: skip
_OUTSIDE = (*TABLES, "lm_head")  # matrices (vocab_size, …) outside the blocks


@dataclass(frozen=True)
class Naming:
    """Names and layouts of an architecture's tensors in one kind of file, Hugging Face or GGUF.

    names: gpt2block's name → names in the file; names of a block's tensors follow `block`, which
    replaces `h.`, and the number of the layer. matrices: layout of a block's matrices. prefix:
    prefix of all names except lm_head's. ignored: regular expression for the names of buffers that
    are not weights. tiled: the order of heads of gated delta nets in files that are written. last:
    the block of the tensors of the block that drafts tokens, such as "blk.32"; "" if they have
    names of their own. experts: the number of experts, if tensors of all experts of a layer have an
    axis of experts; else 0.
    """

    names: Mapping[str, tuple[str, ...]]
    block: str
    matrices: str
    prefix: str = ""
    ignored: str = "(?!)"
    tiled: bool = False
    last: str = ""
    experts: int = 0

    def bare(self, name: str) -> str:
        """Return a file's tensor name without prefixes such as `transformer.`.

        Prefixes of torch's DistributedDataParallel and compile may precede `self.prefix`.
        """
        pattern = rf"((module|_orig_mod)\.){{0,4}}({re.escape(self.prefix)})?"
        return re.sub(pattern, "", name, count=1)

    def in_file(self, ours: str) -> tuple[str, ...]:
        """Return a file's names, without prefixes, for the tensor that gpt2block calls `ours`."""
        h, dot, kind = ours.rpartition(".")
        h = self.last if self.last and ours.startswith(DRAFTING) else h.replace("h.", self.block, 1)
        return tuple(h + dot + name for name in self.names[ours if ours in self.names else kind])

    def rows_in_file(self, ours: str, rows: int, config: ModelConfig) -> list[tuple[str, int]]:
        """Return (name in the file, number of rows) of the tensors that hold `rows` of `ours`."""
        names = self.in_file(ours)
        if len(names) == 1:
            return [(names[0], rows)]
        return [*zip(names, config.file_rows(_kind(ours), int(ours.split(".")[-2])), strict=True)]

    def with_prefix(self, name: str) -> str:
        """Return a tensor's name with the prefix that `transformers` writes."""
        return name if name.startswith(("lm_head.", DRAFTING)) else self.prefix + name

    def layers(self, names: Mapping[str, object]) -> int:
        """Return the number of blocks that have tensors. `names`: tensor names without prefixes."""
        pattern = re.compile(re.escape(self.block) + r"(\d+)\.")
        return len({found[1] for name in names if (found := pattern.match(name))})

    def layout_of(self, ours: str) -> str | None:
        """Return a matrix's layout in the file, "KN" (inputs, outputs) or "NK"; else None."""
        kind = ours.rpartition(".")[2]
        return "NK" if kind in _OUTSIDE else self.matrices if kind.startswith("w_") else None

    def shape_of(self, ours: str, shape: Shape) -> Shape:
        """Return a tensor's shape in a file. `shape`: the tensor's shape in `model_shapes`."""
        if len(shape) == 3 and not self.prefix:  # GGUF has a matrix for weights of a convolution
            return shape[::2]
        turned = self.layout_of(ours) == "NK" and is_product(ours)
        shape = shape[::-1] if turned else shape
        if self.experts and ours.endswith(EXPERTS):
            return (self.experts, shape[0] // self.experts, *shape[1:])
        return shape

    def flat(self, ours: str, shape: Shape) -> Shape:
        """Return a tensor's shape in memory, in the layout of a file. shape: as in `shape_of`."""
        return replace(self, experts=0).shape_of(ours, shape) if len(shape) == 2 else shape

    def parts(self, config: ModelConfig) -> dict[str, dict[str, Shape]]:
        """Return a dict: gpt2block's tensor name → {name in a file, without prefixes: shape}.

        A tensor in the file that joins the rows of several of gpt2block's tensors is listed under
        the name of the first.
        """
        found: dict[str, dict[str, Shape]] = {}
        for ours, shape in model_shapes(config).items():
            rows, *rest = self.shape_of(ours, shape)
            into = found.setdefault(self.first_of(ours), {})
            for name, n in self.rows_in_file(ours, rows, config):
                into[name] = (n + into.get(name, (0,))[0], *rest)
        return found

    def first_of(self, ours: str) -> str:
        """Return the first name in the group of tensors with `ours` that a file joins into one."""
        h, dot, kind = ours.rpartition(".")
        if ours in self.names:
            return ours
        return h + dot + next(k for k, names in self.names.items() if names == self.names[kind])

    def model_tensors(
        self, file: Path, source: str, config: ModelConfig, found: Mapping[str, Stored]
    ) -> dict[str, Stored]:
        """Return the tensors of a model by gpt2block's names, in the order of `model_shapes`.

        source: words for the setting that states the number of blocks, for an error. found: the
        file's tensors by their names without prefixes. Q, K and V of several dtypes are read as
        float32. Raises CheckpointError unless the file's tensors are exactly the model's.
        """
        present = self.layers(found) - bool(self.last)
        if present != config.n_layer:  # checked before memory for n_layer blocks is allocated
            raise CheckpointError(
                f"{file}: {source} {config.n_layer}, the file has {present} blocks"
            )
        parts = self.parts(config)
        _check(file, self, parts, found)
        whole: dict[str, Stored] = {}
        for ours, names in parts.items():
            layout = self.layout_of(ours)
            whole[ours] = joined([_laid_out(found[name], layout) for name in names])
        return self._ours(config, whole)

    def _ours(self, config: ModelConfig, whole: Mapping[str, Stored]) -> dict[str, Stored]:
        """Return tensors by gpt2block's names; tensors that a file joins by rows are split."""
        stored, ends = {}, dict.fromkeys(whole, 0)
        sharing = Counter(map(self.first_of, model_shapes(config)))
        for ours, shape in model_shapes(config).items():
            first, count = self.first_of(ours), self.shape_of(ours, shape)[0]
            tensor, begin = whole[first], ends[first]
            ends[first] += count
            spans = config.file_spans(_kind(ours))
            if spans:
                tensor = tensor.of_spans(spans)
            elif sharing[first] > 1:
                tensor = tensor.rows(begin, begin + count)
            if len(tensor.shape) != len(shape):
                tensor = replace(tensor, shape=self.flat(ours, shape))
            if ours.endswith(".w_qkv") and config.head_order and not spans:
                heads = config.q_width + config.kv_width
                tensor = replace(tensor, head_order=config.head_order, in_heads=heads)
            stored[ours] = tensor
        return stored


def _kind(ours: str) -> str:
    """Return a tensor's name without the prefix of its layer."""
    return ours.rpartition(".")[2]


def _laid_out(tensor: Stored, layout: str | None) -> Stored:
    """Return a tensor with field `layout` set; a matrix in Fortran order is transposed to "NK"."""
    if tensor.order == "F":
        return replace(tensor.transposed(), layout="NK")
    return replace(tensor, layout=layout)


def _check(
    file: Path,
    naming: Naming,
    parts: Mapping[str, Mapping[str, Shape]],
    found: Mapping[str, Stored],
) -> None:
    """Raise CheckpointError unless the file's tensors are exactly the model's."""
    problems: dict[str, list[str]] = {kind: [] for kind in _PROBLEMS}
    missing, unexpected, misshapen, foreign, scattered = problems.values()
    for ours, names in parts.items():
        orders = ("C", "F") if naming.layout_of(ours) == "KN" else ("C",)
        for name, shape in names.items():
            if name not in found:
                missing.append(name)
                continue
            tensor = found[name]
            if tensor.shape != shape:
                misshapen.append(f"{name}: expected shape {shape}, got {tensor.shape}")
            if tensor.dtype not in DTYPES:
                expected = f"expected one of {', '.join(DTYPES)}"
                foreign.append(f"{name}: {expected}, got {tensor.dtype}")
            if tensor.order not in orders:
                scattered.append(name)
    others = found.keys() - {name for names in parts.values() for name in names}
    unexpected += [n for n in found if n in others and not re.fullmatch(naming.ignored, n)]
    listed = [f"{len(n)} tensors {kind}: {first_names(n)}" for kind, n in problems.items() if n]
    if listed:
        raise CheckpointError(f"{file}: {'; '.join(listed)}")


def _names(architecture: Mapping[str, tuple[str, str]], column: int) -> dict[str, tuple[str, ...]]:
    """Map gpt2block's names to a file's names. `column`: 0 for Hugging Face, 1 for GGUF.

    A module's name has {} for q, k and v, * for the numbers of experts, or + between modules whose
    rows are joined. A name after = has no ending .weight or .bias.
    """
    found = {}
    for pair, modules in architecture.items():
        module = modules[column]
        parts = module.split("+")
        if "{}" in module:
            parts = [module.format(part) for part in "qkv"]
        for ours, suffix in zip(pair.split(), (".weight", ".bias"), strict=False):
            ending = "" if module.startswith("=") else suffix
            found[ours] = tuple(part.lstrip("=") + ending for part in parts)
    return found


ROPE_FACTORS = "rope_freqs.weight"  # name of a tensor in GGUF files
LONGROPE_FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")


@cache
def _naming(model_type: str, gguf: bool) -> Naming:
    of = ARCHITECTURES[model_type]
    if gguf:
        ignored = "|".join(map(re.escape, (ROPE_FACTORS, *LONGROPE_FACTORS)))
        ignored = ignored if issubclass(of.CONFIG, LlamaConfig) else "(?!)"
        return Naming(_names(of.NAMES, 1), "blk.", "NK", ignored=ignored, tiled=True)
    prefix, block, matrices, ignored = of.CONFIG.FILES
    return Naming(_names(of.NAMES, 0), block, matrices, prefix, ignored)


def naming_of(config: ModelConfig, gguf: bool = False) -> Naming:
    """Return the Naming of a config's architecture for Hugging Face's files, or for GGUF."""
    found = _naming(config.MODEL_TYPE, gguf)
    if config.experts is not None:
        count = config.experts.n_expert
        each = {ours: _of_experts(names, count) for ours, names in found.names.items()}
        found = replace(found, names=each, experts=count * gguf)
    if config.draft_config is not None:
        ignored = found.ignored.removesuffix(UNREAD)
        found = replace(found, ignored=ignored, last=f"blk.{config.n_layer}" if gguf else "")
    shared = [str(n) for n in config.reading_layers]
    if not shared:
        return found
    # Files may have keys and values of layers that read those of an earlier layer.
    kinds = r"(self_attn\.[kv]_(proj|norm)|attn_[kv](_norm)?)\.(weight|bias)"
    unread = rf"{re.escape(found.block)}({'|'.join(shared)})\.{kinds}"
    return replace(found, ignored=f"{found.ignored}|{unread}")


def _of_experts(names: tuple[str, ...], count: int) -> tuple[str, ...]:
    """Return names of a file, with numbers of experts from 0 in the place of an asterisk."""
    several = "*" in names[0]
    return tuple(names[0].replace("*", str(n)) for n in range(count)) if several else names


GPT2_NAMING = _naming("gpt2", False)

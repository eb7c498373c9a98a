"""The names and layouts of an architecture's tensors in files, to read and to write them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from gpt2block.architectures import ARCHITECTURES
from gpt2block.checkpoints.files import first_names
from gpt2block.checkpoints.stored import DTYPES, Stored, joined
from gpt2block.config import ModelConfig, model_shapes
from gpt2block.config.llama import LlamaConfig
from gpt2block.errors import CheckpointError

Shape = tuple[int, ...]
_OUTSIDE = ("wte", "lm_head")  # matrices (vocab_size, C) of every architecture


@dataclass(frozen=True)
class Naming:
    """The names and layouts of an architecture's tensors in a kind of file.

    names: gpt2block's name → the names in the file. Those of a block are relative to `block`, which
    stands for `h.` and is followed by the number of the layer. matrices: the layout of a block's
    matrices. prefix: before all names except lm_head's. ignored: a pattern of the names of buffers
    that are no weights.
    """

    names: Mapping[str, tuple[str, ...]]
    block: str
    matrices: str
    prefix: str = ""
    ignored: str = "(?!)"

    def bare(self, name: str) -> str:
        """The name of a tensor in a file without its prefixes.

        Before the usual one there may be those of torch's DistributedDataParallel and compile.
        """
        pattern = rf"((module|_orig_mod)\.){{0,4}}({re.escape(self.prefix)})?"
        return re.sub(pattern, "", name, count=1)

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

    def parts(self, config: ModelConfig) -> dict[str, dict[str, Shape]]:
        """gpt2block's names → names without prefixes and shapes of a model's tensors in files.

        Where one of these has the rows of several of ours, it is at the name of the first.
        """
        found: dict[str, dict[str, Shape]] = {}
        heads = (config.q_width, config.kv_width, config.kv_width)  # rows of Q, K and V
        for ours, shape in model_shapes(config).items():
            names = self.in_file(ours)
            rows, *rest = self.shape_of(ours, shape)
            counts = heads if len(names) == len(heads) else (rows,)
            into = found.setdefault(self.first_of(ours), {})
            for name, n in zip(names, counts, strict=True):
                into[name] = (n + into.get(name, (0,))[0], *rest)
        return found

    def first_of(self, ours: str) -> str:
        """Our name of the first rows of the tensor in the file that has this one's."""
        h, dot, kind = ours.rpartition(".")
        return h + dot + next(k for k, names in self.names.items() if names == self.names[kind])

    def model_tensors(
        self,
        file: Path,
        source: str,
        config: ModelConfig,
        found: Mapping[str, Stored],
    ) -> dict[str, Stored]:
        """Return the tensors of a model by gpt2block's names, in the order of `model_shapes`.

        source: what states the number of blocks. found: the tensors by their names without
        prefixes. Q, K and V of several dtypes are read as float32. Raises CheckpointError unless
        the tensors found are exactly the model's.
        """
        present = self.layers(found)
        if present != config.n_layer:  # checked before anything of the config's size is allocated
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
        """The tensors by gpt2block's names, of those with the rows of several as well."""
        stored, ends = {}, dict.fromkeys(whole, 0)
        sharing = Counter(map(self.first_of, model_shapes(config)))
        for ours, shape in model_shapes(config).items():
            first, count = self.first_of(ours), self.shape_of(ours, shape)[0]
            tensor, begin = whole[first], ends[first]
            ends[first] += count
            if sharing[first] > 1:
                tensor = tensor.rows(begin, begin + count)
            if ours.endswith(".w_qkv") and config.head_order:
                heads = config.q_width + config.kv_width
                tensor = replace(tensor, head_order=config.head_order, in_heads=heads)
            stored[ours] = tensor
        return stored


def _laid_out(tensor: Stored, layout: str | None) -> Stored:
    """The tensor as it is in the file, where a matrix (inputs, outputs) may be transposed."""
    if tensor.order == "F":
        return replace(tensor.transposed(), layout="NK")
    return replace(tensor, layout=layout)


def _check(
    file: Path,
    naming: Naming,
    parts: Mapping[str, Mapping[str, Shape]],
    found: Mapping[str, Stored],
) -> None:
    """Raise CheckpointError unless the tensors found are exactly those of the model."""
    missing, misshapen, foreign, scattered = [], [], [], []
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
    unexpected = [n for n in found if n in others and not re.fullmatch(naming.ignored, n)]
    problems = {
        "missing": missing,
        "unexpected": unexpected,
        "misshapen": misshapen,
        "of another dtype": foreign,
        "not contiguous, so save tensor.contiguous()": scattered,
    }
    listed = [
        f"{len(names)} tensors {problem}: {first_names(names)}"
        for problem, names in problems.items()
        if names
    ]
    if listed:
        raise CheckpointError(f"{file}: {'; '.join(listed)}")


def _names(architecture: Mapping[str, tuple[str, str]], column: int) -> dict[str, tuple[str, ...]]:
    """gpt2block's name → the names in a file."""
    found = {}
    for pair, modules in architecture.items():
        module = modules[column]
        parts = [module.format(part) for part in "qkv"] if "{}" in module else [module]
        for ours, suffix in zip(pair.split(), ("weight", "bias"), strict=False):
            found[ours] = tuple(f"{part}.{suffix}" for part in parts)
    return found


ROPE_FACTORS = "rope_freqs.weight"  # of GGUF
LONGROPE_FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")


@cache
def _naming(model_type: str, gguf: bool) -> Naming:
    of = ARCHITECTURES[model_type]
    if gguf:
        ignored = "|".join(map(re.escape, (ROPE_FACTORS, *LONGROPE_FACTORS)))
        ignored = ignored if issubclass(of.CONFIG, LlamaConfig) else "(?!)"
        return Naming(_names(of.NAMES, 1), "blk.", "NK", ignored=ignored)
    prefix, block, matrices, ignored = of.FILES
    return Naming(_names(of.NAMES, 0), block, matrices, prefix, ignored)


def naming_of(config: ModelConfig, gguf: bool = False) -> Naming:
    """The naming of the architecture of a config in Hugging Face's files, or in GGUF."""
    return _naming(config.MODEL_TYPE, gguf)


GPT2_NAMING = _naming("gpt2", False)

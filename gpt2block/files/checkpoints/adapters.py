"""Read adapters (LoRA): folders of the package peft, adapter_config.json and safetensors.

An adapter adds scale · (x A) B to the products x W of some modules of a model. Source: Hu et al.,
"LoRA: Low-Rank Adaptation of Large Language Models" (2021); the scale is alpha / r, or
alpha / sqrt(r) with rslora: Kalajdzievski, "A Rank Stabilization Scaling Factor" (2023).
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpt2block.checks import check_number
from gpt2block.errors import CheckpointError, shown
from gpt2block.files.checkpoints.checkpoint import Checkpoint
from gpt2block.files.checkpoints.files import about, first_names, is_file, read_object
from gpt2block.files.checkpoints.hugging_face import read_header
from gpt2block.files.checkpoints.locating import hub_id
from gpt2block.files.checkpoints.naming import naming_of
from gpt2block.files.checkpoints.stored import DTYPES, Stored, reorder
from gpt2block.models.config import DRAFTING, ModelConfig, product_shapes

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_RANK = 256
Floats = NDArray[np.float32]
# Settings of peft → the values that change nothing
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "use_dora": (None, False),
    "modules_to_save": (None, []),
    "bias": (None, "none"),
    "lora_bias": (None, False),
    "trainable_token_indices": (None, [], {}),
    "alora_invocation_tokens": (None, []),
    "init_lora_weights": (None, True, False, "gaussian", "orthogonal", "eva"),  # others change W
}
_FACTOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])(?:\.default)?\.weight")
_SLOW = re.compile(r"(?s).{201}|\{|\)[*+?]|([*+?(][^*+?(]*){5}")  # patterns too slow to match
_QUANTIZED = re.compile(r"(-unsloth)?(-bnb-4bit)?$")  # ends the names of copies for training


class ModuleRows(NamedTuple):
    """Columns of a matrix from `column` on, which are `rows` outputs of a module from `row` on."""

    matrix: str  # gpt2block's name
    column: int
    row: int
    rows: int


class Factors(NamedTuple):
    """A term of a product: x a.T b is added to the outputs from `column` on."""

    a: Floats  # (r, K)
    b: Floats  # (r, outputs), multiplied by the adapter's scale
    column: int


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter of a model. factors: by gpt2block's names of the matrices.

    digest: the SHA-256 of all factors.
    """

    factors: Mapping[str, tuple[Factors, ...]]
    digest: str

    @classmethod
    def read(
        cls, folder: str | Path, config: ModelConfig, base: Checkpoint | None = None
    ) -> Adapter:
        """Read a folder of peft for a model with this config.

        base: the model's checkpoint. Raises CheckpointError for files that are missing or damaged,
        for another base model, and for settings, modules, shapes and numbers that are not
        supported; the message begins with the folder.
        """
        folder, damage = Path(folder), (AttributeError, KeyError, TypeError, re.error)
        with about(folder, damage, "cannot be read: {}"):
            settings, weights = _settings(folder, base), folder / WEIGHTS
            if not is_file(weights):
                raise CheckpointError(f"expected {WEIGHTS} in this folder")
            places = _places(config)
            modules = _modules(read_header(weights), config, places)
            factors = defaultdict[str, list[Factors]](list)
            for module, (a, b) in modules.items():
                first, scale = _read(a), _scale(settings, module, a.shape[0])
                second = np.float32(scale) * _read(b)
                for place in places[module]:
                    rows = second[place.row : place.row + place.rows]
                    factors[place.matrix].append(
                        Factors(first, _in_order(rows, place, config), place.column)
                    )
        found = {
            matrix: tuple(sorted(each, key=attrgetter("column")))
            for matrix, each in sorted(factors.items())
        }
        return cls(found, _digest(found))


def _settings(folder: Path, base: Checkpoint | None) -> dict[str, Any]:
    """Return the content of adapter_config.json. Raises CheckpointError for unsupported values."""
    if not is_file(folder / CONFIG):
        raise CheckpointError(f"expected an adapter of peft, a folder with {CONFIG}")
    settings = read_object(folder / CONFIG)
    if settings.get("peft_type") != "LORA":
        kind = shown(settings.get("peft_type"))
        raise CheckpointError(f"{CONFIG}: peft_type: expected 'LORA', got {kind}")
    for key, neutral in _NEUTRAL.items():
        if (value := settings.get(key)) not in neutral:
            raise CheckpointError(f"{CONFIG}: {key}: expected {neutral[-1]!r}, got {shown(value)}: "
                                  "merge the adapter with its model in peft")  # fmt: skip
    own, repo = settings.get("base_model_name_or_path"), None if base is None else base.repo
    if repo is not None and isinstance(own, str) and hub_id(own) is not None:
        trained, loaded = (
            _QUANTIZED.sub("", each.rpartition("/")[2].lower()) for each in (own, repo)
        )
        if trained != loaded:
            raise CheckpointError(f"{CONFIG}: an adapter of {own}: expected one of {repo}")
    return settings


def adaptable_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return {name: (K, N)} of the matrices of all products, except those of experts."""
    return {**product_shapes(config), "lm_head": (config.n_embd, config.vocab_size)}


def _places(config: ModelConfig) -> dict[str, list[ModuleRows]]:
    """Return {module, named without prefixes: its ModuleRows} of all modules of products."""
    naming, ends = naming_of(config), Counter[str]()
    found = defaultdict[str, list[ModuleRows]](list)
    for matrix, (_, N) in adaptable_shapes(config).items():
        if matrix.startswith(DRAFTING) or config.file_spans(matrix.rpartition(".")[2]):
            continue
        column = 0
        for name, count in naming.rows_in_file(matrix, N, config):
            module = name.removesuffix(".weight")
            found[module].append(ModuleRows(matrix, column, ends[module], count))
            column, ends[module] = column + count, ends[module] + count
    return dict(found)


def _modules(
    tensors: list[Stored], config: ModelConfig, places: Mapping[str, list[ModuleRows]]
) -> dict[str, tuple[Stored, Stored]]:
    """Return {module: its A (r, K) and B (N, r)}.

    Raises CheckpointError for other modules, missing factors, and wrong shapes and ranks.
    """
    naming, shapes = naming_of(config), adaptable_shapes(config)
    pairs, unknown = defaultdict[str, dict[str, Stored]](dict), []
    for tensor in tensors:
        factor = _FACTOR.fullmatch(tensor.label)
        module = naming.bare(factor[1]) if factor else ""
        if factor is None or module not in places:
            unknown.append(tensor.label)
        else:
            pairs[module][factor[2]] = tensor
    if unknown or not pairs:
        kinds = ", ".join(dict.fromkeys(module.rpartition(".")[2] for module in places))
        raise CheckpointError(f"{WEIGHTS}: expected lora_A and lora_B of modules named {kinds}, "
                              f"got {first_names(unknown) or 'no tensors'}")  # fmt: skip
    for module, pair in pairs.items():
        K, N = shapes[places[module][0].matrix][0], sum(each.rows for each in places[module])
        r = next(iter(pair["A"].shape), 0) if "A" in pair else 0
        got = {factor: each.shape for factor, each in sorted(pair.items())}
        if got != {"A": (r, K), "B": (N, r)} or not 0 < r <= MAX_RANK:
            raise CheckpointError(
                f"{WEIGHTS}: {module}: expected A (r, {K}) and B ({N}, r) with r from 1 to "
                f"{MAX_RANK}, got {got}: an adapter of another model?"
            )
    return {module: (pair["A"], pair["B"]) for module, pair in pairs.items()}


def _scale(settings: Mapping[str, Any], module: str, rank: int) -> float:
    """Return alpha / r of a module, or alpha / sqrt(r) with rslora. Raises CheckpointError."""
    values = []
    for key, patterns in (("r", "rank_pattern"), ("lora_alpha", "alpha_pattern")):
        own = settings.get(patterns) or {}
        if slow := [each for each in own if _SLOW.search(each)]:
            raise CheckpointError(f"{CONFIG}: {patterns}: expected short patterns such as "
                                  f"layers.[0-9]+.(q|v)_proj, got {shown(slow[0])}")  # fmt: skip
        fit = (own[each] for each in {**own} if re.fullmatch(rf"(.*\.)?({each})", module))
        value = next(fit, settings.get(key))
        values.append(check_number(f"{CONFIG}: {key}", value, -1e30, 1e30, "a number"))
    r, alpha = values
    if r != rank:
        raise CheckpointError(f"{CONFIG}: r: {r:g} for {module}, whose A has {rank} rows")
    return alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _read(tensor: Stored) -> Floats:
    """Read a factor as float32. Raises CheckpointError for NaN and infinity."""
    if tensor.dtype not in DTYPES:
        expected = f"expected one of {', '.join(DTYPES)}"
        raise CheckpointError(f"{WEIGHTS}: {tensor.label}: {expected}, got {tensor.dtype}")
    array: Floats = tensor.read().astype(np.float32, copy=False)
    if not np.isfinite(array).all():
        raise CheckpointError(f"{WEIGHTS}: {tensor.label}: expected finite numbers, got NaN or inf")
    return array


def _in_order(rows: Floats, place: ModuleRows, config: ModelConfig) -> Floats:
    """Return rows of B (count, r) as columns (r, count) in the order of the model's matrix."""
    if place.matrix.endswith(".w_qkv") and config.head_order:
        rows = rows.copy()
        heads = max(0, config.q_width + config.kv_width - place.column)
        reorder(rows[:heads], config.head_order)
    return np.ascontiguousarray(rows.T)


def _digest(factors: Mapping[str, tuple[Factors, ...]]) -> str:
    digest = hashlib.sha256()
    for matrix, terms in factors.items():
        for a, b, column in terms:
            digest.update(f"{matrix} {column} {a.shape} {b.shape}".encode())
            for each in (a, b):
                digest.update(each.astype("<f4", copy=False).tobytes())
    return digest.hexdigest()

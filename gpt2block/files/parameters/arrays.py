"""Base classes of weights of all architectures: checks, dtypes, loading and random values."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from gpt2block import checks
from gpt2block.errors import CheckpointError, InputError, shown
from gpt2block.files.checkpoints import Checkpoint
from gpt2block.models.config import TABLES, ModelConfig, Shapes, is_matrix, model_shapes

Array = NDArray[np.floating]
Block = TypeVar("Block", bound="BlockArrays")
Model = TypeVar("Model", bound="ModelArrays[Any]")
MAX_NUMBERS = 2**40  # most random numbers per call: 4 TiB of float32


class BlockArrays(ABC):
    """Base of the frozen dataclasses that hold the tensors of one block, in one float dtype.

    CONFIG: config class of the models; SETTINGS: names of fields that block and config share.
    Raises InputError for a wrong shape, and for a dtype other than float32 and float64.
    """

    CONFIG: ClassVar[type[ModelConfig]]
    SETTINGS: ClassVar[tuple[str, ...]]
    gamma1: Array
    n_head: int
    eps: float

    @property
    @abstractmethod
    def shapes(self) -> Shapes:
        """Dict from names to shapes of the tensors, in the order of packed buffers."""

    def __post_init__(self) -> None:
        gamma1: object = self.gamma1
        if not checks.is_plain(gamma1) or gamma1.ndim != 1 or not gamma1.size:
            got = getattr(gamma1, "shape", type(gamma1).__name__)
            hint = checks.of_bfloat16(gamma1)
            raise InputError(f"gamma1: expected shape (C,), a NumPy array, got {got}{hint}")
        n_head = checks.check_count("n_head", self.n_head)
        checks.set_fields(self, n_head=n_head, eps=checks.check_eps(self.eps))
        self._check_settings()
        for name, shape in self.shapes.items():
            array = checked(name, getattr(self, name), shape)
            if array.dtype != self.gamma1.dtype:
                expected = f"{self.gamma1.dtype}, the same for all tensors"
                raise InputError(f"{name}: expected {expected}, got {array.dtype}")

    def _check_settings(self) -> None:  # noqa: B027  (some classes have nothing to check)
        """Raise InputError for settings that contradict each other or the number of channels."""

    @property
    def n_embd(self) -> int:
        return len(self.gamma1)

    @property
    def nbytes(self) -> int:
        """Total bytes of the tensors."""
        return sum(array.nbytes for array in self.tensors().values())

    def tensors(self) -> dict[str, Array]:
        """Return a dict from names to tensors, in the order of packed buffers."""
        return {name: getattr(self, name) for name in self.shapes}

    def settings(self) -> dict[str, object]:
        """Return the settings and sizes that the block shares with a config, by name."""
        return {name: getattr(self, name) for name in ("n_embd", *self.SETTINGS)}

    def astype(self: Block, dtype: DTypeLike) -> Block:
        """Return the weights converted to `dtype`; self if they have it already.

        Raises InputError.
        """
        try:
            known = np.dtype(dtype) in (np.float32, np.float64)
        except (TypeError, ValueError):
            known = False
        if not known or dtype is None:
            raise InputError(f"dtype: expected float32 or float64, got {shown(dtype)}")
        if self.gamma1.dtype == dtype:
            return self
        tensors: dict[str, Array] = {name: a.astype(dtype) for name, a in self.tensors().items()}
        return replace(self, **tensors)  # type: ignore[type-var]  # subclasses are dataclasses

    @classmethod
    def of(cls: type[Block], config: ModelConfig, tensors: Mapping[str, Array]) -> Block:
        """Create a block with the settings of this config and tensors by name."""
        return cls(**tensors, **{name: getattr(config, name) for name in cls.SETTINGS})

    @classmethod
    def from_pretrained(
        cls: type[Block],
        checkpoint: str | Path | Checkpoint,
        layer: int = 0,
        revision: str | None = None,
    ) -> Block:
        """Return block `layer` of a checkpoint as float32; only this block's tensors are read.

        checkpoint: an opened Checkpoint, or an argument of `Checkpoint.open`: a Hugging Face
        directory, a `.safetensors` file, a hub id such as "gpt2", or a bundled model, "shakespeare"
        or "shakespeare-llama". revision: revision of a hub id. Raises CheckpointError.
        """
        opened = Checkpoint.open(checkpoint, revision)
        check_architecture(opened, cls.CONFIG)
        return cls.of(opened.config, opened.read_block(layer))


class ModelArrays(Generic[Block]):
    """Base of the frozen dataclasses that hold all tensors of a model.

    Fields: config, the tensors of `config.outer_shapes`, blocks, and lm_head, (vocab_size, C),
    which is the same object as wte if the config ties them. Raises InputError for tensors that do
    not match the config.
    """

    CONFIG: ClassVar[type[ModelConfig]]
    BLOCK: ClassVar[type[Any]]
    config: Any
    blocks: tuple[Block, ...]
    wte: Array
    lm_head: Array

    def __post_init__(self) -> None:
        c = self.config
        if not isinstance(c, self.CONFIG):
            raise InputError(f"config: expected a {self.CONFIG.__name__}, got {type(c).__name__}")
        first, last = c.outer_shapes()
        for name, shape in {**first, **last, "lm_head": first["wte"]}.items():
            checked(name, getattr(self, name), shape)
        if c.tie_word_embeddings and self.lm_head is not self.wte:
            raise InputError("lm_head: expected the same object as wte: the config ties them")
        if not isinstance(self.blocks, tuple):
            raise InputError(f"blocks: expected a tuple, got {type(self.blocks).__name__}")
        for layer, block in enumerate(self.blocks):
            if not isinstance(block, self.BLOCK):
                raise InputError(
                    f"block {layer}: expected {self.BLOCK.__name__}, got {type(block).__name__}"
                )
            got = block.settings()
            expected = {name: getattr(c, name) for name in got}
            if got != expected or block.shapes != c.shapes_of(layer):
                wanted = ", ".join(f"{name} {value}" for name, value in expected.items())
                raise InputError(
                    f"block {layer}: expected {wanted}, got {', '.join(map(str, got.values()))}"
                )

    @classmethod
    def from_pretrained(
        cls: type[Model],
        checkpoint: str | Path | Checkpoint,
        layers: Iterable[int] | None = None,
        revision: str | None = None,
    ) -> Model:
        """Return a checkpoint's weights as float32.

        checkpoint, revision: as in `BlockWeights.from_pretrained`. layers: indices of the blocks to
        read; None for all. Raises CheckpointError.
        """
        opened = Checkpoint.open(checkpoint, revision)
        check_architecture(opened, cls.CONFIG)
        wanted = range(opened.config.n_layer) if layers is None else checks.several(layers)
        for layer in wanted:  # check all indices before large tensors are read
            opened.check_layer(layer)
        return cls._of(opened.config, opened.read_outer(), map(opened.read_block, wanted))

    @classmethod
    def _random(cls: type[Model], seed: int, config: ModelConfig) -> Model:
        tensors = random_tensors(seed, model_shapes(config))
        blocks = [
            {name: tensors.pop(f"h.{layer}.{name}") for name in config.shapes_of(layer)}
            for layer in range(config.n_layer)
        ]
        return cls._of(config, tensors, blocks)

    @classmethod
    def _of(
        cls: type[Model],
        config: ModelConfig,
        outer: Mapping[str, Array],
        blocks: Iterable[Mapping[str, Array]],
    ) -> Model:
        """Create a model. outer: tensors outside the blocks, by name; default lm_head: wte."""
        created = tuple(cls.BLOCK.of(config, block) for block in blocks)
        fields: dict[str, Array] = {"lm_head": outer["wte"], **outer}
        return cls(**fields, config=config, blocks=created)  # type: ignore[call-arg]  # a dataclass

    def tensors(self) -> Iterator[tuple[str, Array, str | None]]:
        """Yield name, array and layout of every tensor, like `Checkpoint.tensors`, without copies.

        Raises InputError unless all blocks are present.
        """
        c = self.config
        if len(self.blocks) != c.n_layer:
            raise InputError(
                f"blocks: expected all {c.n_layer} of the model, got {len(self.blocks)}"
            )
        for name, shape in model_shapes(c).items():
            h, _, kind = name.rpartition(".")
            array = getattr(self.blocks[int(h[2:])] if h else self, kind)
            yield name, array, layout_of(name, shape)


def layout_of(name: str, shape: tuple[int, ...]) -> str | None:
    """Return the layout of a tensor that is kept as an array: of a matrix "KN" or "NK"."""
    if name in (*TABLES, "lm_head"):
        return "NK"
    return "KN" if is_matrix(name, shape) else None


def check_architecture(checkpoint: Checkpoint, expected: type[ModelConfig]) -> None:
    """Raise CheckpointError unless the checkpoint's config is of this class."""
    if type(checkpoint.config) is not expected:
        raise CheckpointError(
            f"{checkpoint.name}: expected a {expected.NAME}, got a {checkpoint.config.NAME}: "
            "gpt2block.from_pretrained and the commands generate, score, compare and explain take "
            "any architecture"
        )


def described(weights: object, settings: object, names: str, *rest: object) -> str:
    """Return the `repr` of weights: names and values of settings, then `parts`."""
    values = [f"{name}={getattr(settings, name)}" for name in names.split()]
    return f"{type(weights).__name__}({', '.join([*values, *map(str, rest)])})"


def views(packed: Any, shapes: Shapes, what: str) -> dict[str, Any]:
    """Return views of the tensors in a packed 1-D buffer of NumPy or CuPy.

    what: sizes to name in the message. Raises InputError unless the buffer has the exact length.
    """
    begins = [0, *accumulate(map(math.prod, shapes.values()))]
    end = begins.pop()
    shape = getattr(packed, "shape", None)
    if shape != (end,):
        got = type(packed).__name__ if shape is None else f"shape {shape}"
        raise InputError(
            f"packed weights: expected a 1-D array of {end:,} floats ({what}), got {got}"
        )
    return {
        name: packed[begin : begin + math.prod(shape)].reshape(shape)
        for begin, (name, shape) in zip(begins, shapes.items(), strict=True)
    }


def packed_array(packed: object) -> Array:
    """Return packed weights as a NumPy array. Raises InputError if NumPy cannot convert them."""
    try:
        return checks.plain_array("packed weights", packed)
    except InputError:
        raise
    except (TypeError, ValueError, OverflowError) as error:
        problem = f"{error}{checks.of_bfloat16(packed)}"
        raise InputError(f"packed weights: expected a 1-D array of floats: {problem}") from error


def checked(name: str, array: object, shape: tuple[int, ...]) -> Array:
    """Return `array`. Raises InputError unless it is a plain array of floats of this shape."""
    if not checks.is_plain(array):
        got = type(array).__name__ + checks.of_bfloat16(array)
        raise InputError(f"{name}: expected a NumPy array, got {got}")
    if array.shape != shape:
        raise InputError(f"{name}: expected shape {shape}, got {array.shape}")
    if array.dtype not in (np.float32, np.float64):
        raise InputError(f"{name}: expected float32 or float64, got {array.dtype}")
    return array


def generator(seed: object, numbers: int) -> np.random.Generator:
    """Return a random generator. Raises InputError for a wrong seed, or too many `numbers`."""
    seed = checks.check_integer("seed", seed, 0, math.inf, "an integer of at least 0")
    if numbers > MAX_NUMBERS:
        raise InputError(f"expected sizes of at most {MAX_NUMBERS:,} numbers, got {numbers:,}")
    return np.random.default_rng(seed)


def random_tensors(seed: object, shapes: Shapes) -> dict[str, NDArray[np.float32]]:
    """Draw tensors in the given order: γ ~ U(0.8, 1.2), β ~ U(-0.1, 0.1), others ~ N(0, 0.02)."""
    rng = generator(seed, sum(map(math.prod, shapes.values())))
    ranges = {"g": (0.8, 1.2), "l": (0.8, 1.2), "b": (-0.1, 0.1)}
    tensors: dict[str, NDArray[np.float32]] = {}
    for name, shape in shapes.items():
        kind = name.rpartition(".")[2]
        if kind.startswith(("gamma", "layer_scalar", "beta")):
            tensors[name] = rng.uniform(*ranges[kind[0]], shape).astype(np.float32)
        else:
            tensors[name] = rng.standard_normal(shape, dtype=np.float32)
            tensors[name] *= np.float32(0.02)
    return tensors


def random_model(seed: object, config: ModelConfig) -> Iterator[tuple[str, np.ndarray, str | None]]:
    """Yield random tensors of a model of any architecture, as `Model.from_tensors` takes them."""
    for name, array in random_tensors(seed, model_shapes(config)).items():
        added = config.ADDED_TO_NORMS if "gamma" in name else 0.0
        yield name, array - np.float32(added), layout_of(name, array.shape)

"""The weights of one block and of a whole GPT-2, as NumPy arrays."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from gpt2block.checkpoints import Checkpoint
from gpt2block.checks import check_integer, is_plain, plain_array, several
from gpt2block.config import (
    SIZES,
    GPT2Config,
    block_shapes,
    check_count,
    check_eps,
    model_shapes,
    size,
)
from gpt2block.errors import InputError, shown

Array = NDArray[np.floating[Any]]
MOST_NUMBERS = 2**40  # limit of random numbers in one call: 4 TiB of float32


def packed_offsets(n_embd: int = 768) -> dict[str, int]:
    """Return name → offset in floats in the packed buffer, and "end": 7,087,872 for C = 768."""
    offsets, end = {}, 0
    for name, shape in block_shapes(check_count("n_embd", n_embd)).items():
        offsets[name] = end
        end += math.prod(shape)
    return {**offsets, "end": end}


def unpack(packed: Any, n_embd: int = 768) -> dict[str, Any]:
    """Return views of the twelve tensors in a packed 1-D buffer of NumPy or CuPy.

    Raises InputError unless the buffer is 1-D and has exactly the packed length.
    """
    n_embd = check_count("n_embd", n_embd)
    offsets = packed_offsets(n_embd)
    shape = getattr(packed, "shape", None)
    if shape != (offsets["end"],):
        got = type(packed).__name__ if shape is None else f"shape {shape}"
        raise InputError(
            f"packed weights: expected a 1-D array of {offsets['end']:,} floats (C = {n_embd}), "
            f"got {got}"
        )
    return {
        name: packed[offsets[name] : offsets[name] + math.prod(shape)].reshape(shape)
        for name, shape in block_shapes(n_embd).items()
    }


@dataclass(frozen=True, eq=False)
class BlockWeights:
    """The tensors of one block, in one float dtype. C = n_embd; matrices are (in, out), row-major.

    The arrays are not copied: do not change them while a Block uses them. Raises InputError for a
    wrong shape, a dtype other than float32 and float64, or an n_head that does not divide C.
    """

    gamma1: Array  # (C,)
    beta1: Array  # (C,)
    w_qkv: Array  # (C, 3C), columns [Q | K | V]
    b_qkv: Array  # (3C,)
    w_attn: Array  # (C, C)
    b_attn: Array  # (C,)
    gamma2: Array  # (C,)
    beta2: Array  # (C,)
    w_fc: Array  # (C, 4C)
    b_fc: Array  # (4C,)
    w_proj: Array  # (4C, C)
    b_proj: Array  # (C,)
    n_head: int = 12
    eps: float = 1e-5

    def __post_init__(self) -> None:
        gamma1: Any = self.gamma1
        if not is_plain(gamma1) or gamma1.ndim != 1 or not gamma1.size:
            got = getattr(gamma1, "shape", type(gamma1).__name__)
            raise InputError(f"gamma1: expected shape (C,), a NumPy array, got {got}")
        for name, shape in block_shapes(self.n_embd).items():
            array = _checked(name, getattr(self, name), shape)
            if array.dtype not in (np.float32, np.float64) or array.dtype != self.gamma1.dtype:
                raise InputError(
                    f"{name}: expected float32 or float64, the same for all tensors, got "
                    f"{array.dtype}"
                )
        object.__setattr__(self, "n_head", check_count("n_head", self.n_head))
        object.__setattr__(self, "eps", check_eps(self.eps))
        if self.n_embd % self.n_head:
            raise InputError(f"n_head {self.n_head} does not divide n_embd {self.n_embd}")

    def __repr__(self) -> str:
        nbytes = sum(array.nbytes for array in self.tensors().values())
        return (
            f"BlockWeights(n_embd={self.n_embd}, n_head={self.n_head}, eps={self.eps}, "
            f"{self.gamma1.dtype}, {nbytes:,} bytes)"
        )

    @property
    def n_embd(self) -> int:
        return len(self.gamma1)

    def tensors(self) -> dict[str, Array]:
        """Return name → array of the twelve tensors, in packed order."""
        return {name: getattr(self, name) for name in block_shapes(self.n_embd)}

    def astype(self, dtype: DTypeLike) -> BlockWeights:
        """Return the weights in another float dtype, or self if it is the same.

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
        tensors: dict[str, Any] = {name: a.astype(dtype) for name, a in self.tensors().items()}
        return replace(self, **tensors)

    @classmethod
    def from_packed(
        cls, packed: Array, n_embd: int = 768, n_head: int = 12, eps: float = 1e-5
    ) -> BlockWeights:
        """Return views of one packed buffer of 12C² + 13C floats: 7,087,872 for GPT-2 small.

        packed: a 1-D float32 or float64 array. Raises InputError.
        """
        try:
            packed = plain_array("packed weights", packed)
        except InputError:
            raise
        except (TypeError, ValueError, OverflowError) as error:
            raise InputError(f"packed weights: expected a 1-D array of floats: {error}") from error
        return cls(**unpack(packed, n_embd), n_head=n_head, eps=eps)

    def to_packed(self) -> Array:
        """Return one 1-D buffer with the twelve tensors at `packed_offsets(n_embd)`."""
        return np.concatenate([array.ravel() for array in self.tensors().values()])

    @classmethod
    def random(cls, seed: int = 0, config: GPT2Config | str = SIZES["gpt2"]) -> BlockWeights:
        """Return float32 weights: γ ~ U(0.8, 1.2), β ~ U(-0.1, 0.1), W and biases ~ N(0, 0.02).

        This is the distribution of LeetGPU's GPT-2 block challenge, except for the linear biases,
        which are zero there. config: a GPT2Config or the name of a size, such as "gpt2-xl".
        """
        config = _config(config)
        tensors = _random(seed, block_shapes(config.n_embd))
        return cls(**tensors, n_head=config.n_head, eps=config.eps)

    @classmethod
    def from_pretrained(
        cls,
        checkpoint: str | Path | Checkpoint,
        layer: int = 0,
        revision: str | None = None,
    ) -> BlockWeights:
        """Return block `layer` of a checkpoint as float32; only that block's tensors are read.

        checkpoint: an opened Checkpoint, or an argument of `Checkpoint.open`: a Hugging Face
        directory, a `.safetensors` file, a hub id such as "gpt2", a `.bin` of llm.c, or
        "shakespeare", the bundled model. revision: of a hub id. Raises CheckpointError.
        """
        opened = Checkpoint.open(checkpoint, revision)
        tensors = opened.read_block(layer)
        return cls(**tensors, n_head=opened.config.n_head, eps=opened.config.eps)


@dataclass(frozen=True, eq=False)
class GPT2Weights:
    """All tensors of a GPT-2 model. Raises InputError where they do not fit the config."""

    config: GPT2Config
    wte: Array  # (vocab_size, C) token embedding
    wpe: Array  # (n_ctx, C) position embedding
    blocks: tuple[BlockWeights, ...]
    gamma_f: Array  # (C,) the final LayerNorm
    beta_f: Array  # (C,)
    lm_head: Array  # (vocab_size, C); the same object as wte when tied

    def __post_init__(self) -> None:
        c = self.config
        if not isinstance(c, GPT2Config):
            raise InputError(f"config: expected a GPT2Config, got {type(c).__name__}")
        shapes = {name: model_shapes(c)[name] for name in ("wte", "wpe", "gamma_f", "beta_f")}
        for name, shape in (shapes | {"lm_head": shapes["wte"]}).items():
            array = _checked(name, getattr(self, name), shape)
            if array.dtype not in (np.float32, np.float64):
                raise InputError(f"{name}: expected float32 or float64, got {array.dtype}")
        if c.tie_word_embeddings and self.lm_head is not self.wte:
            raise InputError("lm_head: expected the same object as wte, as the config ties them")
        if not isinstance(self.blocks, tuple):
            raise InputError(f"blocks: expected a tuple, got {type(self.blocks).__name__}")
        for layer, block in enumerate(self.blocks):
            if not isinstance(block, BlockWeights):
                raise InputError(
                    f"block {layer}: expected BlockWeights, got {type(block).__name__}"
                )
            if (block.n_embd, block.n_head, block.eps) != (c.n_embd, c.n_head, c.eps):
                raise InputError(
                    f"block {layer}: expected n_embd {c.n_embd}, n_head {c.n_head}, eps {c.eps}, "
                    f"got {block.n_embd}, {block.n_head}, {block.eps}"
                )

    @classmethod
    def from_pretrained(
        cls,
        checkpoint: str | Path | Checkpoint,
        layers: Iterable[int] | None = None,
        revision: str | None = None,
    ) -> GPT2Weights:
        """Return a checkpoint's weights as float32.

        checkpoint, revision: as in `BlockWeights.from_pretrained`. layers: the blocks to read; None
        for all. Raises CheckpointError.
        """
        opened = Checkpoint.open(checkpoint, revision)
        wanted = range(opened.config.n_layer) if layers is None else several(layers)
        for layer in wanted:  # checked before the large tensors are read
            opened.check_layer(layer)
        wte, wpe, gamma_f, beta_f, lm_head = opened.read_ends()
        blocks = tuple(BlockWeights.from_pretrained(opened, layer) for layer in wanted)
        return cls(opened.config, wte, wpe, blocks, gamma_f, beta_f, lm_head)

    @classmethod
    def random(cls, seed: int = 0, config: GPT2Config | str = SIZES["gpt2"]) -> GPT2Weights:
        """Return random weights, distributed as in `BlockWeights.random`; wte and wpe like W."""
        config = _config(config)
        tensors = _random(seed, model_shapes(config))
        blocks = tuple(
            BlockWeights(
                **{name: tensors[f"h.{layer}.{name}"] for name in block_shapes(config.n_embd)},
                n_head=config.n_head,
                eps=config.eps,
            )
            for layer in range(config.n_layer)
        )
        wte, wpe, gamma_f, beta_f = (tensors[name] for name in ("wte", "wpe", "gamma_f", "beta_f"))
        return cls(config, wte, wpe, blocks, gamma_f, beta_f, tensors.get("lm_head", wte))

    def __repr__(self) -> str:
        c = self.config
        return (
            f"GPT2Weights(n_layer={c.n_layer}, n_head={c.n_head}, n_embd={c.n_embd}, "
            f"n_ctx={c.n_ctx}, vocab_size={c.vocab_size}, {len(self.blocks)} blocks, "
            f"{self.wte.dtype})"
        )

    def tensors(self) -> Iterator[tuple[str, Array, str | None]]:
        """Yield name, array and layout of every tensor, like `Checkpoint.tensors`, without copies.

        Raises InputError unless all blocks are present.
        """
        if len(self.blocks) != self.config.n_layer:
            raise InputError(
                f"blocks: expected all {self.config.n_layer} of the model, got {len(self.blocks)}"
            )
        yield "wte", self.wte, "NK"
        yield "wpe", self.wpe, None
        for layer, block in enumerate(self.blocks):
            for name, array in block.tensors().items():
                yield f"h.{layer}.{name}", array, "KN" if array.ndim == 2 else None
        yield "gamma_f", self.gamma_f, None
        yield "beta_f", self.beta_f, None
        if not self.config.tie_word_embeddings:
            yield "lm_head", self.lm_head, "NK"


def _checked(name: str, array: Any, shape: tuple[int, ...]) -> Array:
    """Return the array. Raises InputError unless it is an unmasked NumPy array of this shape."""
    if not is_plain(array):
        raise InputError(f"{name}: expected a NumPy array, got {type(array).__name__}")
    if array.shape != shape:
        raise InputError(f"{name}: expected shape {shape}, got {array.shape}")
    checked: Array = array
    return checked


def _config(config: Any) -> GPT2Config:
    return config if isinstance(config, GPT2Config) else size(config)


def _generator(seed: Any, numbers: int) -> np.random.Generator:
    """Return a generator. Raises InputError for a wrong seed, or for more than MOST_NUMBERS."""
    seed = check_integer("seed", seed, 0, math.inf, "an integer of at least 0")
    if numbers > MOST_NUMBERS:
        raise InputError(f"expected sizes of at most {MOST_NUMBERS:,} numbers, got {numbers:,}")
    return np.random.default_rng(seed)


def _random(seed: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, NDArray[np.float32]]:
    """Draw the tensors in this order: γ ~ U(0.8, 1.2), β ~ U(-0.1, 0.1), others ~ N(0, 0.02)."""
    rng = _generator(seed, sum(map(math.prod, shapes.values())))
    tensors: dict[str, NDArray[np.float32]] = {}
    for name, shape in shapes.items():
        kind = name.rpartition(".")[2]
        if kind.startswith("gamma"):
            tensors[name] = rng.uniform(0.8, 1.2, shape).astype(np.float32)
        elif kind.startswith("beta"):
            tensors[name] = rng.uniform(-0.1, 0.1, shape).astype(np.float32)
        else:
            tensors[name] = rng.standard_normal(shape, dtype=np.float32)
            tensors[name] *= np.float32(0.02)
    return tensors


def random_input(seed: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Return float32 activations x ~ U(-1, 1), as in LeetGPU's challenge.

    shape: (T, C) or (B, T, C). Raises InputError.
    """
    if not isinstance(shape, (tuple, list)) or not shape:
        raise InputError(f"shape: expected a tuple such as (T, C), got {shown(shape)}")
    sizes = [check_count("shape", size) for size in shape]
    return _generator(seed, math.prod(sizes)).uniform(-1, 1, sizes).astype(np.float32)

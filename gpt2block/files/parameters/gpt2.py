"""Weights of one GPT-2 block and of a whole GPT-2 model, as NumPy arrays."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from gpt2block.checks import check_count
from gpt2block.errors import InputError, shown
from gpt2block.files.parameters import arrays
from gpt2block.files.parameters.arrays import Array
from gpt2block.models.config import SIZES, GPT2Config, Shapes, block_shapes, size


def unpack(packed: object, n_embd: int = 768) -> dict[str, Any]:
    """Return views of the twelve tensors in a packed 1-D buffer of NumPy or CuPy.

    Raises InputError unless the buffer is 1-D and has exactly the packed length.
    """
    n_embd = check_count("n_embd", n_embd)
    return arrays.views(packed, block_shapes(n_embd), f"C = {n_embd}")


@dataclass(frozen=True, eq=False)
class BlockWeights(arrays.BlockArrays):
    """The tensors of one block, all of one float dtype. C = n_embd; matrices are (in, out).

    The arrays are not copied: do not change them while a Block uses them. Raises InputError for a
    wrong shape, a dtype other than float32 and float64, or an n_head that does not divide C.
    """

    CONFIG: ClassVar[type[GPT2Config]] = GPT2Config
    SETTINGS: ClassVar[tuple[str, ...]] = ("n_head", "eps")

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

    def _check_settings(self) -> None:
        if self.n_embd % self.n_head:
            raise InputError(f"n_head {self.n_head} does not divide n_embd {self.n_embd}")

    @property
    def shapes(self) -> Shapes:
        return block_shapes(self.n_embd)

    def __repr__(self) -> str:
        size = f"{self.nbytes:,} bytes"
        return arrays.described(self, self, "n_embd n_head eps", self.gamma1.dtype, size)

    @classmethod
    def from_packed(
        cls, packed: Array, n_embd: int = 768, n_head: int = 12, eps: float = 1e-5
    ) -> BlockWeights:
        """Return views of one packed buffer of 12C² + 13C floats: 7,087,872 for GPT-2 small.

        packed: a 1-D float32 or float64 array. Raises InputError.
        """
        return cls(**unpack(arrays.packed_array(packed), n_embd), n_head=n_head, eps=eps)

    def to_packed(self) -> Array:
        """Return one 1-D buffer with the twelve tensors in their order."""
        return np.concatenate([array.ravel() for array in self.tensors().values()])

    @classmethod
    def random(cls, seed: int = 0, config: GPT2Config | str = SIZES["gpt2"]) -> BlockWeights:
        """Return float32 weights: γ ~ U(0.8, 1.2), β ~ U(-0.1, 0.1), W and biases ~ N(0, 0.02).

        This is the distribution of LeetGPU's GPT-2 block challenge, except for the linear biases,
        which are zero there. config: a GPT2Config or the name of a size, such as "gpt2-xl".
        """
        config = _config(config)
        return cls.of(config, arrays.random_tensors(seed, config.block_shapes()))


@dataclass(frozen=True, eq=False)
class GPT2Weights(arrays.ModelArrays[BlockWeights]):
    """All tensors of a GPT-2 model. Raises InputError for tensors that do not match the config."""

    CONFIG: ClassVar[type[GPT2Config]] = GPT2Config
    BLOCK: ClassVar[type[BlockWeights]] = BlockWeights

    config: GPT2Config
    wte: Array  # (vocab_size, C) token embedding
    wpe: Array  # (n_ctx, C) position embedding
    blocks: tuple[BlockWeights, ...]
    gamma_f: Array  # (C,) weight of the final LayerNorm
    beta_f: Array  # (C,) bias of the final LayerNorm
    lm_head: Array  # (vocab_size, C); the same object as wte if the config ties them

    @classmethod
    def random(cls, seed: int = 0, config: GPT2Config | str = SIZES["gpt2"]) -> GPT2Weights:
        """Return random weights, distributed as in `BlockWeights.random`; wte, wpe ~ N(0, 0.02)."""
        return cls._random(seed, _config(config))

    def __repr__(self) -> str:
        names, blocks = "n_layer n_head n_embd n_ctx vocab_size", f"{len(self.blocks)} blocks"
        return arrays.described(self, self.config, names, blocks, self.wte.dtype)


def _config(config: Any) -> GPT2Config:
    return config if isinstance(config, GPT2Config) else size(config)


def random_input(seed: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Return float32 activations x ~ U(-1, 1), as in LeetGPU's challenge.

    shape: (T, C) or (B, T, C). Raises InputError.
    """
    if not isinstance(shape, (tuple, list)) or not shape:
        raise InputError(f"shape: expected a tuple such as (T, C), got {shown(shape)}")
    sizes = [check_count("shape", size) for size in shape]
    return arrays.generator(seed, math.prod(sizes)).uniform(-1, 1, sizes).astype(np.float32)

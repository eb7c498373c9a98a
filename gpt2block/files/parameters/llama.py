"""Weights of one Llama block and of a whole Llama model, as NumPy arrays."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from gpt2block.checks import check_flag, set_fields
from gpt2block.errors import InputError
from gpt2block.files.parameters import arrays
from gpt2block.files.parameters.arrays import Array
from gpt2block.models.config import Shapes
from gpt2block.models.config.llama import LlamaConfig, RopeScaling

_BIASES = ("b_qkv", "b_o", "b_gate", "b_up", "b_down")


@dataclass(frozen=True, eq=False)
class LlamaBlockWeights(arrays.BlockArrays):
    """The tensors of one Llama block, all of one float dtype. C = n_embd; matrices are (in, out).

    Q = n_head · head_size and KV = n_kv_head · head_size channels; n_kv_head 0 stands for n_head.
    theta, scaling: parameters of RoPE. half_split: whether RoPE rotates channels k and
    k + head_size / 2 (Hugging Face), or neighbours 2k and 2k + 1 (Meta, kernl). Biases are
    optional.

    The arrays are not copied: do not change them while a LlamaBlock uses them. Raises InputError
    for a wrong shape, a dtype other than float32 and float64, and numbers of heads that do not
    divide the channels.
    """

    CONFIG: ClassVar[type[LlamaConfig]] = LlamaConfig
    SETTINGS: ClassVar[tuple[str, ...]] = ("n_head", "n_kv_head", "eps", "theta", "scaling")

    gamma1: Array  # (C,)
    w_qkv: Array  # (C, Q + 2 KV), columns [Q | K | V]
    w_o: Array  # (Q, C)
    gamma2: Array  # (C,)
    w_gate: Array  # (C, FF)
    w_up: Array  # (C, FF)
    w_down: Array  # (FF, C)
    n_head: int = 32
    n_kv_head: int = 0
    eps: float = 1e-5
    theta: float = 10000.0
    scaling: RopeScaling | None = None
    half_split: bool = True
    b_qkv: Array | None = None  # (Q + 2 KV,)
    b_o: Array | None = None  # (C,)
    b_gate: Array | None = None  # (FF,)
    b_up: Array | None = None  # (FF,)
    b_down: Array | None = None  # (C,)

    def _check_settings(self) -> None:
        set_fields(self, half_split=check_flag("half_split", self.half_split))
        config = self.config  # raises InputError for inconsistent sizes
        set_fields(self, n_kv_head=config.n_kv_head, theta=config.theta)
        present = tuple(name for name in _BIASES if getattr(self, name) is not None)
        expected = tuple(name for name in config.block_shapes() if name.startswith("b_"))
        if present != expected:
            raise InputError(
                f"biases: expected biases of attention (b_qkv, b_o), of the feed-forward "
                f"(b_gate, b_up, b_down), of both or none, got {', '.join(present)}"
            )

    @cached_property
    def config(self) -> LlamaConfig:
        """A config with the sizes and settings of this block."""
        for name in ("w_gate", "w_o"):  # (C, FF), (Q, C)
            shape: tuple[int, ...] = getattr(getattr(self, name), "shape", ())
            if len(shape) != 2 or not all(shape):
                raise InputError(f"{name}: expected a matrix, a NumPy array, got shape {shape}")
        Q = len(self.w_o)
        if Q % self.n_head:
            raise InputError(f"w_o: {Q} rows are not a multiple of n_head {self.n_head}")
        return LlamaConfig(
            n_embd=self.n_embd,
            n_ff=self.w_gate.shape[1],
            head_size=Q // self.n_head,
            **{name: getattr(self, name) for name in self.SETTINGS},
            attention_bias=self.b_qkv is not None,
            mlp_bias=self.b_gate is not None,
        )

    @property
    def shapes(self) -> Shapes:
        return self.config.block_shapes()

    @property
    def frequencies(self) -> NDArray[np.float64]:
        """RoPE's frequencies as in LlamaConfig: radians per position of each pair of channels."""
        return self.config.frequencies()

    def __repr__(self) -> str:
        names, size = "n_embd n_head n_kv_head head_size n_ff eps", f"{self.nbytes:,} bytes"
        return arrays.described(self, self.config, names, self.gamma1.dtype, size)

    @classmethod
    def from_packed(
        cls, packed: Array, config: LlamaConfig, half_split: bool = True
    ) -> LlamaBlockWeights:
        """Return views of one packed buffer: γ1, Wq, Wk, Wv, Wo, γ2, Wgate, Wup, Wdown.

        packed: a 1-D float32 or float64 array in which each matrix is (out, in), row-major. config:
        a LlamaConfig without biases. half_split: as in LlamaBlockWeights. Raises InputError.
        """
        if not isinstance(config, LlamaConfig) or config.attention_bias or config.mlp_bias:
            raise InputError(f"config: expected a LlamaConfig without biases, got {config!r}")
        transposed = {name: shape[::-1] for name, shape in config.block_shapes().items()}
        sizes = f"C = {config.n_embd}, Q = {config.q_width}, KV = {config.kv_width}"
        what = f"{sizes}, FF = {config.n_ff}"
        tensors = arrays.views(arrays.packed_array(packed), transposed, what)
        matrices = {name: array.T for name, array in tensors.items()}
        return cls.of(config, matrices | {"half_split": half_split})

    def to_packed(self) -> Array:
        """Return one 1-D buffer in the format of `from_packed`. Raises InputError for biases."""
        if self.b_qkv is not None or self.b_gate is not None:
            raise InputError("biases: packed weights have none: expected a block without biases")
        return np.concatenate([array.T.ravel() for array in self.tensors().values()])

    @classmethod
    def random(cls, seed: int = 0, config: LlamaConfig | None = None) -> LlamaBlockWeights:
        """Return float32 weights: γ ~ U(0.8, 1.2), matrices and biases ~ N(0, 0.02).

        config: a LlamaConfig; None for the sizes of Llama 2 7B.
        """
        config = _config(config)
        return cls.of(config, arrays.random_tensors(seed, config.block_shapes()))


@dataclass(frozen=True, eq=False)
class LlamaWeights(arrays.ModelArrays[LlamaBlockWeights]):
    """All tensors of a Llama model. Raises InputError for tensors that do not match the config.

    RoPE rotates half-split pairs of channels, as in Hugging Face's checkpoints.
    """

    CONFIG: ClassVar[type[LlamaConfig]] = LlamaConfig
    BLOCK: ClassVar[type[LlamaBlockWeights]] = LlamaBlockWeights

    config: LlamaConfig
    wte: Array  # (vocab_size, C) token embedding
    blocks: tuple[LlamaBlockWeights, ...]
    gamma_f: Array  # (C,) weight of the final RMSNorm
    lm_head: Array  # (vocab_size, C); the same object as wte if the config ties them

    def __post_init__(self) -> None:
        super().__post_init__()
        for layer, block in enumerate(self.blocks):
            if not block.half_split:
                raise InputError(f"block {layer}: expected half_split True in a whole model")

    @classmethod
    def random(cls, seed: int = 0, config: LlamaConfig | None = None) -> LlamaWeights:
        """Return random weights, distributed as in `LlamaBlockWeights.random`; wte ~ N(0, 0.02).

        config: a LlamaConfig; None for the sizes of Llama 2 7B.
        """
        return cls._random(seed, _config(config))

    def __repr__(self) -> str:
        names = "n_layer n_head n_kv_head n_embd n_ctx vocab_size"
        blocks = f"{len(self.blocks)} blocks"
        return arrays.described(self, self.config, names, blocks, self.wte.dtype)


def _config(config: object) -> LlamaConfig:
    if config is not None and not isinstance(config, LlamaConfig):
        raise InputError(f"config: expected a LlamaConfig or None, got {type(config).__name__}")
    return config or LlamaConfig()

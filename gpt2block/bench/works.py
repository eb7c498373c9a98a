"""What `gpt2block bench` times: blocks, matrix products and attention of GPT-2 small.

The inputs are random but repeat: sequences after some thousand tokens, rows of a product after a
prime number of rows. So every value of the largest output is compared with float64, whose result
NumPy computes within seconds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import inf, isfinite
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from gpt2block import reference
from gpt2block.architectures.gpt2_weights import BlockWeights
from gpt2block.bench import measure
from gpt2block.bench.measure import Host, Truth, matrix, widened
from gpt2block.checks import check_choice
from gpt2block.cuda import timing
from gpt2block.errors import InputError
from gpt2block.weights.matrix import WeightMatrix

C, NH = 768, 12
TOKENS = 3072  # in different sequences
ROWS = 509  # different rows of a product; a prime, so that no tile of rows divides it
DTYPES = ("bfloat16", "float16", "float32")
MATRICES = ("w_qkv", "w_attn", "w_fc", "w_proj")
STEPS_OF_A_BLOCK = 7  # the result of each is rounded to the dtype of the block


@dataclass(frozen=True)
class Work(ABC):
    """One thing to time. Bytes and operations are the minimum that every implementation needs."""

    dtype: str
    what: ClassVar[str]
    named: ClassVar[tuple[str, ...]]  # the fields that are sizes
    roundings: ClassVar[int] = 1  # consecutive results that are rounded to the dtype
    rounds: ClassVar[int | None] = None  # of all copies in one turn; None: some milliseconds

    @property
    @abstractmethod
    def name(self) -> str:
        """Its sizes in words, such as "8x1024 causal"; the same for all dtypes."""

    @property
    @abstractmethod
    def flops(self) -> int:
        """A multiplication and an addition count as two; masked scores do not count."""

    @property
    @abstractmethod
    def traffic(self) -> int:
        """Bytes: every input and weight read once, the output written once."""

    @abstractmethod
    def sets(self) -> list[Host]:
        """Copies of the inputs in device memory, which calls use in turn."""

    @abstractmethod
    def check(self, replay: Callable[[], None], outs: tuple[Any, ...]) -> tuple[float, float]:
        """Absolute and relative error of the outputs of a replay."""

    def times(self, replays: Mapping[str, Callable[[], None]]) -> dict[str, float]:
        """Name → median ms of a replay, all of them in turn."""
        return timing.interleaved_ms(replays)

    @property
    def rounding(self) -> str | None:
        """The dtype whose rounding errors results may have; None: that of the arithmetic."""
        return None

    @property
    def tokens(self) -> int | None:
        """Tokens that a call writes; None for other works."""
        return None

    @property
    def sizes(self) -> dict[str, int]:
        return {name: int(getattr(self, name)) for name in self.named}

    @property
    def item(self) -> int:
        return int(np.dtype(self.dtype).itemsize)


class ArrayWork(Work):
    """From arrays to an array, which is compared with float64."""

    @abstractmethod
    def host(self) -> Host:
        """The inputs, as stored."""

    @abstractmethod
    def truth(self) -> Truth:
        """(n, columns), float64, of the stored inputs: row i of the output is row i mod n."""

    def sets(self) -> list[Host]:
        return [*measure.rotated(self.host(), self.traffic)]

    def check(self, replay: Callable[[], None], outs: tuple[Any, ...]) -> tuple[float, float]:
        """Errors of the worst output; they are filled with NaN before the replay."""
        truth = self.truth()
        for out in outs:
            measure.poison(out)
        replay()
        found = [measure.errors(out, truth) for out in outs]
        return max(found, key=lambda errors: errors[1] if isfinite(errors[1]) else inf)


@dataclass(frozen=True)
class _SequenceWork(ArrayWork):
    """B sequences of T tokens."""

    B: int
    T: int
    causal: bool
    named = "B", "T", "causal"

    @property
    def name(self) -> str:
        return f"{self.B}x{self.T} {'causal' if self.causal else 'full'}"

    @property
    def flops(self) -> int:
        """FLOPs of attention: the scores, and their product with V."""
        scores = self.T * (self.T + 1) // 2 if self.causal else self.T * self.T
        return 4 * self.B * scores * C

    def repeated(self, width: int) -> NDArray[Any]:
        return np.resize(_sequences(self.T, width, self.dtype), (self.B, self.T, width))


class BlockWork(_SequenceWork):
    """The whole block on (B, T, C)."""

    what = "block"
    roundings = STEPS_OF_A_BLOCK

    @property
    def flops(self) -> int:
        return 24 * self.B * self.T * C * C + super().flops

    @property
    def traffic(self) -> int:
        return self.item * (2 * self.B * self.T * C + 12 * C * C) + 4 * 13 * C

    def weights(self) -> BlockWeights:
        """In float32, of values that the dtype has."""
        return _block_weights(self.dtype)

    def host(self) -> Host:
        return {"x": self.repeated(C), **_stored_weights(self.dtype)}

    def truth(self) -> Truth:
        return _block_truth(self.T, self.causal, self.dtype)


class AttentionWork(_SequenceWork):
    """Attention of 12 heads of 64 on packed rows: qkv (B, T, 3C) → (B, T, C)."""

    what = "attention"

    @property
    def traffic(self) -> int:
        return self.item * 4 * self.B * self.T * C

    def host(self) -> Host:
        return {"qkv": self.repeated(3 * C)}

    def truth(self) -> Truth:
        return _attention_truth(self.T, self.causal, self.dtype)


@dataclass(frozen=True)
class GemmWork(ArrayWork):
    """[residual +] [gelu](a w + bias): a (M, K), w (K, N)."""

    product: str
    M: int
    N: int
    K: int
    gelu: bool = False
    residual: bool = False
    what = "gemm"
    named = "M", "N", "K"

    @property
    def name(self) -> str:
        return f"{self.product} M={self.M}"

    @property
    def flops(self) -> int:
        return 2 * self.M * self.N * self.K

    @property
    def traffic(self) -> int:
        outputs = (1 + self.residual) * self.M * self.N
        return self.item * (self.M * self.K + self.K * self.N + outputs) + 4 * self.N

    def host(self) -> Host:
        a, w, bias, residual = _product_inputs(self.N, self.K, self.dtype)
        arrays = {"a": np.resize(a, (self.M, self.K)), "w": w, "bias": bias}
        added = {"residual": np.resize(residual, (self.M, self.N))} if self.residual else {}
        return arrays | added

    def truth(self) -> Truth:
        a, w, bias, residual = _product_inputs(self.N, self.K, self.dtype)
        added = widened(residual) if self.residual else None
        product = widened(a), widened(w.dequantized()), widened(bias), added
        return reference.gemm(*product, gelu=self.gelu)


BLOCKS = ((1, 128, False), (1, 1024, False), (1, 1024, True), (8, 1024, True), (64, 1024, True))
PRODUCTS: Mapping[str, tuple[int, int, bool, bool]] = {  # name → N, K, gelu, residual
    "qkv": (3 * C, C, False, False),
    "o": (C, C, False, False),
    "fc": (4 * C, C, False, False),
    "fc+gelu": (4 * C, C, True, False),
    "proj": (C, 4 * C, False, False),
    "proj+residual": (C, 4 * C, False, True),
}
MANY_ROWS = (128, 1024, 8192, 65536)
ATTENTIONS = tuple(
    (B, T, causal)
    for B, T in ((1, 1024), (8, 1024), (64, 1024), (4, 4096))
    for causal in (False, True)
)
DEFAULT_DTYPES: Mapping[str, tuple[str, ...]] = {
    "block": ("bfloat16", "float32"),
    "gemm": ("bfloat16",),
    "attention": ("bfloat16",),
}
KINDS = tuple(DEFAULT_DTYPES)


def chosen_works(
    what: str = "all", dtype: str | None = None, only: str | None = None
) -> list[Work]:
    """The works in the order they are timed; only those with `only` in their name.

    Raises InputError.
    """
    check_choice("--what", what, (*KINDS, "all"))
    if dtype is not None:
        check_choice("--dtype", dtype, DTYPES)
    works = [
        work
        for kind in (KINDS if what == "all" else (what,))
        for each in ((dtype,) if dtype else DEFAULT_DTYPES[kind])
        for work in _works(kind, each)
        if only is None or only in work.name
    ]
    if not works:
        raise InputError(f"--only {only!r}: no name contains it; a name is such as '8x1024 causal'")
    return works


def _works(kind: str, dtype: str) -> Iterable[Work]:
    if kind == "block":
        return [BlockWork(dtype, *sizes) for sizes in BLOCKS]
    if kind == "attention":
        return [AttentionWork(dtype, *sizes) for sizes in ATTENTIONS]
    return [GemmWork(dtype, name, M, *of_it) for M in MANY_ROWS for name, of_it in PRODUCTS.items()]


@lru_cache(maxsize=8)
def _sequences(T: int, width: int, dtype: str) -> NDArray[Any]:
    """Different sequences (n, T, width), as stored."""
    count = max(1, TOKENS // T)
    rng = np.random.default_rng(T)
    return rng.standard_normal((count, T, width), dtype=np.float32).astype(dtype)


@lru_cache(maxsize=4)
def _block_weights(dtype: str) -> BlockWeights:
    random = BlockWeights.random(0)
    tensors = {n: a.astype(dtype).astype(np.float32) for n, a in random.tensors().items()}
    return BlockWeights(**tensors, n_head=random.n_head, eps=random.eps)


def _stored_weights(dtype: str) -> dict[str, Any]:
    """As the skeleton plan takes them in float32; else matrices (N, K) in the dtype."""
    tensors: dict[str, Any] = _block_weights(dtype).tensors()
    if dtype == "float32":
        return tensors
    return {n: matrix(a, dtype, "NK") if n in MATRICES else a for n, a in tensors.items()}


@lru_cache(maxsize=4)
def _product_inputs(
    N: int, K: int, dtype: str
) -> tuple[NDArray[Any], WeightMatrix, NDArray[Any], NDArray[Any]]:
    """a, w, bias and residual; a bias of values that the dtype has."""
    rng = np.random.default_rng(N + K)
    a = rng.standard_normal((ROWS, K), dtype=np.float32).astype(dtype)
    w = rng.standard_normal((K, N), dtype=np.float32) / np.float32(K**0.5)
    bias = rng.standard_normal(N, dtype=np.float32).astype(dtype).astype(np.float32)
    residual = rng.standard_normal((ROWS, N), dtype=np.float32).astype(dtype)
    return a, matrix(w, dtype, "NK"), bias, residual


@lru_cache(maxsize=8)
def _block_truth(T: int, causal: bool, dtype: str) -> Truth:
    x = widened(_sequences(T, C, dtype))
    return reference.block_forward(x, _block_weights(dtype), causal).reshape(-1, C)


@lru_cache(maxsize=8)
def _attention_truth(T: int, causal: bool, dtype: str) -> Truth:
    qkv = widened(_sequences(T, 3 * C, dtype))
    return reference.attention(qkv, NH, causal).reshape(-1, C)

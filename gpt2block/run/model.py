"""What a GPT-2 asks of a backend: logits, hidden states, likelihoods, and rows being continued."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from gpt2block.config import GPT2Config, block_shapes, model_shapes
from gpt2block.cuda.kernels import FP8, STORAGE
from gpt2block.errors import InputError
from gpt2block.sampling import Sampling
from gpt2block.weights.matrix import WeightMatrix, check_finite, on_host

Ids = NDArray[np.int32]  # (T,), the tokens of one sequence
Floats = NDArray[np.float32]
Tensors = Iterable[tuple[str, NDArray[Any], str | None]]  # name, array, layout of a matrix
Want = Literal["logits", "last", "hidden", "states"]

DTYPES = (*STORAGE, *FP8)
_KV_CACHE = {"float32": "float32", "float16": "float16"}


def kv_cache_dtype(dtype: str) -> str:
    """The dtype of the keys and values kept beside weights of `dtype`: bfloat16 beside FP8."""
    return _KV_CACHE.get(dtype, "bfloat16")


def stored_tensors(
    config: GPT2Config, vectors: Mapping[str, Any], matrices: Mapping[str, WeightMatrix]
) -> Tensors:
    """The tensors of a model in the order of `model_shapes`, on the host, one at a time."""
    for name in model_shapes(config):
        matrix = matrices.get(name)
        if matrix is None:
            yield name, on_host(vectors[name]), None
        elif matrix.dtype in FP8:
            layout = matrix.layout
            values = matrix.dequantized()
            yield name, values if layout == "KN" else values.T, layout
        else:
            yield name, on_host(matrix.data), matrix.layout


def vector_magnitude(name: str, array: NDArray[Any], allow_nonfinite: bool) -> float:
    """The largest magnitude of a bias, a γ, a β or wpe; InputError for infinity or NaN."""
    if not allow_nonfinite:
        check_finite(name, array)
    return float(np.abs(array.astype(np.float32, copy=False)).max())


def check_stream(config: GPT2Config, largest: Mapping[str, float]) -> None:
    """InputError where the sum of squares in a LayerNorm of the model could overflow float32.

    The variance would be infinite there, its row would come out as β, and the logits would be
    finite and wrong. Any other overflow makes an infinity or a NaN that reaches the logits.

    largest: the largest magnitude of every tensor, from which bounds follow that no token and no
    input passes: a LayerNorm's C values of variance 1 are sqrt(C) at most, attention gives a
    weighted mean of rows of v, GELU makes no magnitude larger, and a product of K inputs is at most
    K times the largest input times the largest weight. Deviations from the mean are twice the bound
    on the residual stream at most, and C of their squares are added up. The bundled model's stream
    is bounded by 6e6 in this way, where the limit is 6e17.
    """
    C = config.n_embd
    limit = math.sqrt(float(np.finfo(np.float32).max) / C) / 2
    seen = ["wte", "wpe"]
    stream = largest["wte"] + largest["wpe"]

    def product(a: float, K: int, layer: str, name: str) -> float:
        return a * K * largest[f"{layer}w_{name}"] + largest[f"{layer}b_{name}"]

    for layer in ("", *(f"h.{n}." for n in range(config.n_layer))):
        if layer:
            seen += [layer + name for name in block_shapes(C)]
            norm1, norm2 = (
                math.sqrt(C) * largest[f"{layer}gamma{n}"] + largest[f"{layer}beta{n}"]
                for n in "12"
            )
            v, ff = product(norm1, C, layer, "qkv"), product(norm2, C, layer, "fc")
            stream += product(v, C, layer, "attn") + product(ff, 4 * C, layer, "proj")
        if stream > limit:
            worst = max(seen, key=lambda name: largest[name])
            raise InputError(
                f"{worst}: its largest magnitude is {largest[worst]:.1e}: the residual stream can "
                f"reach {stream:.1e}, and from {limit:.1e} on LayerNorm's squares overflow "
                "float32: expected smaller weights (allow_nonfinite=True permits these)"
            )


def in_groups(sequences: Iterable[Ids], tokens: int) -> Iterator[list[Ids]]:
    """The sequences in order, in lists of at most so many tokens, or of one sequence."""
    group: list[Ids] = []
    for ids in sequences:
        if group and sum(map(len, group)) + len(ids) > tokens:
            yield group
            group = []
        group.append(ids)
    if group:
        yield group


def filled_up(group: list[Ids]) -> list[Ids]:
    """The sequences, and some of token 0, or empty, behind them.

    At most a sixteenth more tokens and about a quarter more sequences. Many batches then have the
    same numbers of both, and what a GPU was told for one of them is there for the next.
    """
    tokens, count = sum(map(len, group)), len(group)
    longest = max(map(len, group))
    missing = rounded_up(tokens, 16) - tokens
    more = rounded_up(count + -(-missing // max(1, longest)), 4) - count
    return [*group, *np.array_split(np.zeros(missing, np.int32), more)] if more else group


def rounded_up(n: int, steps: int) -> int:
    """n rounded up to a power of two, or to one of `steps` even steps on the way to the next."""
    step = max(1, (1 << max(0, n.bit_length() - 1)) // steps)
    return -(-n // step) * step


def check_dtype(dtype: str) -> None:
    """InputError unless weights can be stored so."""
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise InputError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")


CacheKind = tuple[int, int, str, str]  # n_layer, n_embd, dtype, device


def cache_kind(config: GPT2Config, dtype: str, device: str) -> CacheKind:
    """What a cache and the model it is used with must have in common."""
    return config.n_layer, config.n_embd, dtype, device


def check_room(lengths: Sequence[int], n_ctx: int) -> None:
    """InputError when a row has no position left for the token that was sampled last."""
    full = [row for row, length in enumerate(lengths) if length >= n_ctx]
    if full:
        raise InputError(f"row {full[0]} is full, it has {n_ctx} tokens: restart it, or end here")


class KVCache(Protocol):
    """The keys and values of a batch of sequences, room for `n_ctx` tokens each."""

    kind: CacheKind
    batch: int
    n_ctx: int
    lengths: list[int]  # tokens of each row that are in it

    @property
    def nbytes(self) -> int:
        """Of all keys and values."""


def describe_cache(cache: KVCache) -> str:
    """One line for a cache's `repr`."""
    n_layer, n_embd, dtype, device = cache.kind
    filled = ", ".join(map(str, cache.lengths[:4])) + (", …" if cache.batch > 4 else "")
    return (
        f"{type(cache).__name__}(n_layer={n_layer}, n_embd={n_embd}, batch={cache.batch}, "
        f"n_ctx={cache.n_ctx}, lengths [{filled}], {dtype}, {device}, {cache.nbytes:,} bytes)"
    )


class Decoding(Protocol):
    """Rows being continued, a token each at a time; their state stays on the device."""

    def next(self) -> tuple[Ids, Floats]:
        """The next token of every row and its log-probability under the raw logits, (B,) each.

        The first call samples what follows the prompts. A token of -1: the logits were NaN.
        InputError when a row is full, so that its last token has no position: restart it first.
        """

    def restart(self, row: int, ids: Ids) -> None:
        """Let `row` go on as if it had these tokens, the last of them just sampled, and no others.

        What it has sampled so far still counts for the repetition penalty and the random numbers.
        """

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row that are in its cache; the one sampled last is not."""


class ModelEngine(Protocol):
    """A GPT-2 on one backend. Sequences are checked by the caller: ids in range, not too long."""

    config: GPT2Config
    dtype: str

    @property
    def nbytes(self) -> int:
        """Of the weights as they are stored here."""

    @property
    def cache_kind(self) -> CacheKind:
        """Of the caches that can be used with it."""

    def describe(self) -> str:
        """The device in words."""

    def tensors(self) -> Tensors:
        """What it was made of, as it is stored here; FP8 as the numbers it stands for."""

    def new_cache(self, batch: int, n_ctx: int) -> KVCache:
        """An empty cache for `batch` rows of up to `n_ctx` tokens."""

    def forward(self, sequences: Sequence[Ids], want: Want, cache: Any = None) -> list[Floats]:
        """Of each sequence: "logits" (T, V), those of the "last" token (V,), or after the final
        LayerNorm "hidden" (T, C); "states" (n_layer + 2, T, C), the residual stream before, between
        and after the blocks, and hidden.

        With a cache the sequences go on behind what its rows hold, one for each row (an empty one
        leaves its row alone).
        """

    def log_likelihood(self, sequences: Sequence[Ids]) -> list[Floats]:
        """Of each sequence (T - 1,): the log-probability of every token after its first."""

    def decode(self, prompts: Sequence[Ids], sampling: Sequence[Sampling]) -> Decoding:
        """Rows that start with these prompts, each of at least one token."""


class StepResult(NamedTuple):
    """The result of one step of a forward pass."""

    name: str
    kernel: str  # or the function
    out: NDArray[Any]  # (rows, channels)


class TracedEngine(ModelEngine, Protocol):
    """A GPT-2 whose steps can be looked at, for a forward pass of one sequence of ids (T,).

    cached: of its last token, after the others are in a kv_cache.
    """

    def trace(self, ids: Ids, cached: bool) -> dict[str, NDArray[Any]]:
        """Step name → its tensor, (rows, channels), in order."""

    def alone(
        self, ids: Ids, cached: bool, exact: Mapping[str, NDArray[Any]]
    ) -> Iterator[StepResult]:
        """Every step by itself, on exact inputs, rounded to what they are stored in.

        exact: the tensors of the pass by name, and K and V of the sequence as "h.0.k" (1, T, C).
        """

"""GPT-2 with NumPy: every line is a function of `gpt2block.reference`."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt2block import reference
from gpt2block.array_checks import unchecked
from gpt2block.config import GPT2Config
from gpt2block.run.model import (
    CacheKind,
    Floats,
    Ids,
    Tensors,
    Want,
    cache_kind,
    check_room,
    check_stream,
    describe_cache,
    kv_cache_dtype,
    stored_tensors,
    vector_magnitude,
)
from gpt2block.text.sampling import Sampling, choose
from gpt2block.weights.matrix import FLOATS, WeightMatrix

ROWS_AT_ONCE = 1024  # of logits, when likelihoods are asked for

# What this engine gives them fits by construction; checks would take a quarter of a token's time.
attention_cached = unchecked(reference.attention_cached)
gelu = unchecked(reference.gelu)
layernorm = unchecked(reference.layernorm)
matmul_bias = unchecked(reference.matmul_bias)


class NumpyCache:
    """Keys and values, (n_layer, 2, batch, n_ctx, C): rounded to `dtype`, stored as float32."""

    def __init__(self, config: GPT2Config, batch: int, n_ctx: int, dtype: str) -> None:
        self.batch, self.n_ctx = batch, n_ctx
        self.kind = cache_kind(config, dtype, "cpu")
        self.lengths = [0] * batch
        self.data = np.zeros((config.n_layer, 2, batch, n_ctx, config.n_embd), np.float32)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def __repr__(self) -> str:
        return describe_cache(self)


class NumpyModel:
    """A GPT-2 in host memory. Arithmetic is float32.

    Matrices are rounded to `dtype` and stored as float32: NumPy multiplies in no narrower type, and
    converting a matrix for every product takes many times as long as the product.
    """

    def __init__(
        self, config: GPT2Config, tensors: Tensors, dtype: str, allow_nonfinite: bool = False
    ) -> None:
        self.config, self.dtype = config, dtype
        self._kv_dtype = FLOATS[kv_cache_dtype(dtype)]
        self._vectors: dict[str, Floats] = {}
        self._matrices: dict[str, WeightMatrix] = {}
        largest: dict[str, float] = {}
        for name, array, layout in tensors:
            if layout is None:
                largest[name] = vector_magnitude(name, array, allow_nonfinite)
                self._vectors[name] = np.ascontiguousarray(array, dtype=np.float32)
            else:
                rounded = WeightMatrix.quantize(array, dtype, layout, name, allow_nonfinite)
                largest[name] = rounded.largest or 0.0
                self._matrices[name] = rounded.widened()
        if not allow_nonfinite:
            check_stream(config, largest)
        self._matrices.setdefault("lm_head", self._matrices["wte"])

    @property
    def cache_kind(self) -> CacheKind:
        return cache_kind(self.config, kv_cache_dtype(self.dtype), "cpu")

    @property
    def nbytes(self) -> int:
        matrices = {id(matrix): matrix.nbytes for matrix in self._matrices.values()}
        return sum(matrices.values()) + sum(array.nbytes for array in self._vectors.values())

    def describe(self) -> str:
        return f"CPU ({platform.machine()}), NumPy {np.__version__}"

    def tensors(self) -> Tensors:
        for name, array, layout in stored_tensors(self.config, self._vectors, self._matrices):
            stored = FLOATS.get(self.dtype, np.float32) if layout else np.float32  # FP8: the values
            yield name, array.astype(stored, copy=False), layout

    def new_cache(self, batch: int, n_ctx: int) -> NumpyCache:
        return NumpyCache(self.config, batch, n_ctx, kv_cache_dtype(self.dtype))

    def forward(
        self, sequences: Sequence[Ids], want: Want, cache: NumpyCache | None = None
    ) -> list[Floats]:
        if cache is None:  # nobody goes on from there: every layer overwrites the same one
            config = replace(self.config, n_layer=1)
            longest = max(map(len, sequences))
            cache = NumpyCache(config, len(sequences), longest, kv_cache_dtype(self.dtype))
        lengths = [len(ids) for ids in sequences]
        ends = np.cumsum(lengths)
        states: list[Floats] = []
        x = self._blocks(sequences, cache, states if want == "states" else None)
        if want == "last":
            logits = self._logits(self._norm(x[ends[np.array(lengths) > 0] - 1], "f"))
            rows = iter(logits)
            return [next(rows) if length else np.empty(0, np.float32) for length in lengths]
        hidden = self._norm(x, "f")
        if want == "logits":
            return np.split(self._logits(hidden), ends[:-1])
        if want == "hidden":
            return np.split(hidden, ends[:-1])
        return np.split(np.stack([*states, hidden]), ends[:-1], axis=1)

    def log_likelihood(self, sequences: Sequence[Ids]) -> list[Floats]:
        found = []
        for ids, hidden in zip(sequences, self.forward(sequences, "hidden"), strict=True):
            parts = [
                reference.log_likelihood(
                    self._logits(hidden[:-1][first : first + ROWS_AT_ONCE]),
                    ids[1:][first : first + ROWS_AT_ONCE],
                )
                for first in range(0, len(ids) - 1, ROWS_AT_ONCE)
            ]
            found.append(np.concatenate([*parts, np.empty(0, np.float32)]))
        return found

    def decode(self, prompts: Sequence[Ids], sampling: Sequence[Sampling]) -> NumpyDecoding:
        return NumpyDecoding(self, prompts, sampling)

    def _blocks(
        self, sequences: Sequence[Ids], cache: NumpyCache, states: list[Floats] | None
    ) -> Floats:
        """The residual stream after the last block, rows of all sequences packed: (N, C).

        states: gets it before the first block and after each. The cache has the tokens in the end.
        """
        starts = list(cache.lengths)
        spans, first = [], 0
        for ids in sequences:
            spans.append(slice(first, first + len(ids)))
            first += len(ids)
        positions = np.concatenate(
            [np.arange(s, s + len(ids)) for s, ids in zip(starts, sequences, strict=True)]
        )
        x = self._embed(np.concatenate(sequences), positions)
        for layer in range(self.config.n_layer):
            if states is not None:
                states.append(x)
            x = self._block(x, f"h.{layer}.", cache.data[layer % len(cache.data)], starts, spans)
        if states is not None:
            states.append(x)
        cache.lengths = [s + len(ids) for s, ids in zip(starts, sequences, strict=True)]
        return x

    def _block(
        self, x: Floats, name: str, kv: NDArray[Any], starts: list[int], spans: list[slice]
    ) -> Floats:
        C = self.config.n_embd
        qkv = self._linear(self._norm(x, "1", name), name + "w_qkv", name + "b_qkv")
        attn = np.empty_like(x)
        for row, (start, span) in enumerate(zip(starts, spans, strict=True)):
            end = start + span.stop - span.start
            if end == start:
                continue
            new = qkv[span, C:].astype(self._kv_dtype, copy=False)
            kv[0, row, start:end], kv[1, row, start:end] = new[:, :C], new[:, C:]
            k, v = kv[:, row, :end]
            attn[span] = attention_cached(qkv[span, :C], k, v, start, self.config.n_head)
        x1 = x + self._linear(attn, name + "w_attn", name + "b_attn")
        ff1 = self._linear(self._norm(x1, "2", name), name + "w_fc", name + "b_fc")
        x2: Floats = x1 + self._linear(gelu(ff1), name + "w_proj", name + "b_proj")
        return x2

    def _norm(self, x: Floats, which: str, name: str = "") -> Floats:
        """LayerNorm 1 or 2 of the block whose tensors begin with `name`, or "f", the final one."""
        suffix = "_f" if which == "f" else which
        gamma, beta = (self._vectors[f"{name}{kind}{suffix}"] for kind in ("gamma", "beta"))
        return layernorm(x, gamma, beta, self.config.eps)

    def _linear(self, x: Floats, matrix: str, bias: str) -> Floats:
        w = self._matrices[matrix].dequantized()
        return matmul_bias(x, w, self._vectors[bias])

    def _logits(self, hidden: Floats) -> Floats:
        return matmul_bias(hidden, self._matrices["lm_head"].dequantized())

    def _embed(self, ids: Ids, positions: NDArray[np.integer[Any]]) -> Floats:
        embedded: Floats = self._matrices["wte"].data[ids] + self._vectors["wpe"][positions]
        return embedded


class NumpyDecoding:
    """Rows being continued on the CPU."""

    def __init__(
        self, model: NumpyModel, prompts: Sequence[Ids], sampling: Sequence[Sampling]
    ) -> None:
        self._model = model
        self._cache = model.new_cache(len(prompts), model.config.n_ctx)
        self._sampling = list(sampling)
        self._step = 0
        self._seen = np.zeros((len(prompts), model.config.vocab_size), np.uint8)
        for seen, ids in zip(self._seen, prompts, strict=True):
            seen[ids] = 1
        self._next: list[Ids] = list(prompts)  # what each row has to read before it is sampled

    @property
    def lengths(self) -> list[int]:
        return list(self._cache.lengths)

    def next(self) -> tuple[Ids, Floats]:
        check_room(
            [n + len(ids) - 1 for n, ids in zip(self._cache.lengths, self._next, strict=True)],
            self._cache.n_ctx,
        )
        logits = self._model.forward(self._next, "last", self._cache)
        rows = zip(logits, self._sampling, self._seen, strict=True)
        chosen = [choose(row, options, self._step, seen) for row, options, seen in rows]
        self._step += 1
        tokens = np.array([choice.token for choice in chosen], np.int32)
        for seen, token in zip(self._seen, tokens, strict=True):
            if token >= 0:
                seen[token] = 1
        self._next = list(tokens[:, None])
        return tokens, np.array([choice.logprob for choice in chosen], np.float32)

    def restart(self, row: int, ids: Ids) -> None:
        self._cache.lengths[row] = 0
        self._next[row] = ids

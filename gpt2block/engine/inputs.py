"""Check the token ids or text that a caller passes, also against the space in a kv_cache."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpt2block.checks import check_flag
from gpt2block.engine.model import Ids, KVCache, ModelEngine
from gpt2block.errors import InputError
from gpt2block.files.tokenizers import tokenizer
from gpt2block.files.tokenizers.encoding import as_array
from gpt2block.files.tokenizers.lookup import Lookup


def sequences(
    engine: ModelEngine, ids: object, cache: KVCache | None = None
) -> tuple[list[Ids], tuple[int, ...] | None]:
    """Check `ids`; return its sequences and its shape (None if sequences differ in length)."""
    config = engine.config
    checked, shape = as_sequences(ids, config.vocab_size)
    if cache is not None and getattr(cache, "kind", None) != engine.cache_kind:
        raise InputError(
            f"cache: expected one from this model's new_cache, {engine.cache_kind}, "
            f"got {getattr(cache, 'kind', cache)!r}"
        )
    before = [0] * len(checked) if cache is None else cache.lengths
    if len(before) != len(checked):
        raise InputError(f"ids: {len(checked)} sequences for a cache of {len(before)} sequences")
    most = config.n_ctx if cache is None else cache.n_ctx
    for n, (start, new) in enumerate(zip(before, checked, strict=True)):
        if start + len(new) > most:
            after = f" after the {start} in the cache" if start else ""
            raise InputError(
                f"ids: sequence {n} has {len(new)} tokens{after}, the context is n_ctx = {most}"
            )
    return checked, shape


def one_sequence(engine: ModelEngine, ids: object, cached: bool = False) -> Ids:
    """Check that `ids` is one sequence, of at least two tokens if `cached`; return it."""
    check_flag("cached", cached)
    checked, _ = sequences(engine, ids)
    least = 2 if cached else 1
    if len(checked) != 1 or len(checked[0]) < least:
        raise InputError(
            f"ids: expected one sequence of at least {least} tokens, got "
            f"{[len(sequence) for sequence in checked]}"
        )
    return checked[0]


def tokens(engine: ModelEngine, lookup: Lookup, text: object, cached: bool = False) -> Ids:
    """Return the ids of `text`, a string or one sequence of ids. cached: see `one_sequence`."""
    if isinstance(text, str):
        text = tokenizer.token_ids(lookup.encoding, text, engine.config.vocab_size, "text")
        if not len(text):
            raise InputError("text: expected at least one token, got an empty text")
    return one_sequence(engine, text, cached)


def as_sequences(ids: Any, vocab_size: int) -> tuple[list[Ids], tuple[int, ...] | None]:
    """Return an int32 array per sequence of `ids`, and the shape of `ids` (None if lengths differ).

    Raises InputError, for an id outside 0 … vocab_size - 1 with its position.
    """
    try:
        ragged = isinstance(ids, (list, tuple)) and any(np.ndim(row) for row in ids)
        rows = [as_array(row, "ids") for row in (ids if ragged else [ids])]
    except InputError:
        raise
    except (TypeError, ValueError, OverflowError) as error:  # raised for uneven lists, CuPy arrays
        raise InputError(f"ids: expected rows of integers: {error}") from error
    shape: tuple[int, ...] | None = None
    if ragged and len({row.shape for row in rows}) == 1:
        shape = (len(rows), *rows[0].shape)
    if not ragged and rows[0].ndim in (1, 2):
        shape = rows[0].shape
        rows = list(rows[0].reshape(-1, shape[-1])) if rows[0].size else rows
    for b, row in enumerate(rows):
        name = f"ids: sequence {b}" if len(rows) > 1 else "ids"
        if row.dtype.kind in "US":
            raise InputError(
                f"{name}: expected token ids, got text: use model.tokenizer.encode_ordinary(text): "
                "generate, score, embed, explain, compare and logit_lens take text"
            )
        if row.ndim != 1 or row.size == 0 or row.dtype.kind not in "iu":
            raise InputError(
                f"{name}: expected integers of shape (T,), (B, T), or a list of (T,), with at "
                f"least one token each, got {row.dtype} {row.shape}"
            )
        tokenizer.check_ids(row, vocab_size, name)
    return [row.astype(np.int32) for row in rows], shape

"""Log-likelihood of texts of any length under a model, and embedding vectors of texts."""

from __future__ import annotations

import math
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from gpt2block.checks import check_callable, check_choice, is_plain
from gpt2block.config import check_count
from gpt2block.errors import InputError
from gpt2block.run.model import Floats, Ids, ModelEngine, in_groups
from gpt2block.text import tokenizer
from gpt2block.text.encoding import Encoding, as_array, token_sizes
from gpt2block.text.generation import BAD_WEIGHTS, Overflow

Pooling = Literal["mean", "last"]
Progress = Callable[[int, int], None]  # tokens scored so far, tokens to score
Tokens = NDArray[np.integer[Any]]

LLM_C_MAGIC = 20240520
_HEADER = 256  # int32
_AT_ONCE = 2**24  # tokens of a file that are processed together


@dataclass(frozen=True)
class Score:
    """The log-likelihood of a text: each token after the first is predicted once."""

    log_likelihood: float  # the sum, in nats
    tokens: int  # number of scored tokens
    bytes: int | None  # of text in the scored tokens; None without a tokenizer
    n_ctx: int  # tokens per window
    stride: int  # tokens between the starts of windows

    @property
    def nats_per_token(self) -> float:
        return -self.log_likelihood / self.tokens

    @property
    def perplexity(self) -> float:
        """exp(nats_per_token)."""
        nats = self.nats_per_token
        return math.exp(nats) if nats < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """Compressed length of the text in bits per byte, comparable between tokenizers."""
        return -self.log_likelihood / math.log(2) / self.bytes if self.bytes else None


def score(
    engine: ModelEngine,
    encoding: Encoding | None,
    text: Any,
    *,
    stride: int | None = None,
    tokens_at_once: int = 8192,
    progress: Progress | None = None,
) -> Score:
    """Score a text, or token ids (a sequence, an array or the result of `load_tokens`).

    A window of n_ctx tokens slides by `stride`, n_ctx // 2 by default. The first window scores all
    of its tokens except the first; each later window scores its last `stride` tokens, which no
    earlier window contains (the last window may score fewer). Each token is therefore predicted
    from at least n_ctx - stride tokens, except near the start. A smaller stride takes longer and
    gives a higher likelihood.

    tokens_at_once: tokens of windows computed together; it does not change the result. Raises
    InputError for fewer than two tokens, ids outside the vocabulary, a stride outside
    1…n_ctx - 1, and for logits that are NaN.
    """
    n_ctx, vocab_size = engine.config.n_ctx, engine.config.vocab_size
    if n_ctx < 2:
        raise InputError("score: a model with n_ctx 1 predicts no token from another")
    stride = check_count("stride", n_ctx // 2 if stride is None else stride)
    tokens_at_once = check_count("tokens_at_once", tokens_at_once)
    if progress is not None:
        check_callable("progress", progress)
    if stride >= n_ctx:
        raise InputError(f"stride: expected 1 to {n_ctx - 1}, less than n_ctx, got {stride}")
    ids = _tokens(encoding, text, vocab_size)
    if len(ids) < 2:
        raise InputError(f"text: expected at least two tokens to score one, got {len(ids)}")
    text_bytes = _count_bytes(encoding, ids, vocab_size)
    total, done = 0.0, 0
    for windows in window_batches(ids, n_ctx, stride, tokens_at_once):
        found = engine.log_likelihood([tokens for tokens, _ in windows])
        for (_, new), nats in zip(windows, found, strict=True):
            part = float(np.sum(nats[len(nats) - new :], dtype=np.float64))
            if math.isnan(part):
                raise InputError(
                    f"the logits are NaN between tokens {done + 1} and {done + new}: {BAD_WEIGHTS}"
                )
            total, done = total + part, done + new
        if progress is not None:
            progress(done, len(ids) - 1)
    return Score(total, done, text_bytes, n_ctx, stride)


def embed(
    engine: ModelEngine,
    encoding: Encoding | None,
    inputs: Any,
    pooling: Pooling = "mean",
    tokens_at_once: int = 8192,
    overflow: Overflow = "error",
) -> Floats:
    """Embedding vectors: the mean or the last of the hidden states after the final LayerNorm.

    Returns float32 (C,) for one text or row of token ids, (B, C) for a list of B. overflow: for an
    input longer than n_ctx, "truncate" keeps the last n_ctx tokens, "error" raises InputError. An
    empty input raises InputError.
    """
    check_embed_options(pooling, overflow)
    check_count("tokens_at_once", tokens_at_once)
    config = engine.config
    single, several = tokenizer.as_list(inputs, "input")
    sequences: list[Ids] = []
    for index, given in enumerate(several):
        name = "input" if single else f"input {index}"
        ids = tokenizer.token_ids(encoding, given, config.vocab_size, name)
        if overflow == "truncate":
            ids = ids[-config.n_ctx :]
        if not 1 <= len(ids) <= config.n_ctx:
            raise InputError(f"{name}: expected 1 to {config.n_ctx} tokens, got {len(ids)}")
        sequences.append(ids)
    vectors: list[Floats] = []
    for part in in_groups(sequences, tokens_at_once):
        for hidden in engine.forward(part, "hidden"):
            vector = hidden[-1] if pooling == "last" else hidden.mean(axis=0, dtype=np.float64)
            vectors.append(vector.astype(np.float32))
    return vectors[0] if single else np.stack(vectors)


def check_embed_options(pooling: Any, overflow: Any) -> None:
    """Raise InputError for values that `embed` does not accept."""
    check_choice("pooling", pooling, get_args(Pooling))
    check_choice("overflow", overflow, get_args(Overflow))


def load_tokens(path: str | Path) -> Tokens:
    """Map the ids of a token file into memory, (T,).

    .npy files hold one row of integers. Other files hold little-endian uint16, after llm.c's header
    of 256 int32 (20240520, version 1, number of tokens) or, as nanoGPT writes them, without a
    header. Raises InputError for anything else.
    """
    try:
        path = Path(path).expanduser()
        if not stat.S_ISREG(path.stat().st_mode):
            raise InputError(f"{path}: cannot be read as a token file: it is not a regular file")
        return _from_npy(path) if path.suffix == ".npy" else _from_bin(path)
    except InputError:
        raise
    except Exception as error:  # NumPy parses headers with Python's parser, which raises anything
        reason = str(error) or type(error).__name__
        raise InputError(f"{path}: cannot be read as a token file: {reason}") from error


def _from_npy(path: Path) -> Tokens:
    with path.open("rb") as file:
        archive = file.read(4).startswith(b"PK")
    if archive:
        raise InputError(f"{path}: expected a row of integers, got an archive of arrays (.npz)")
    ids: Tokens = np.lib.format.open_memmap(path, mode="r")
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InputError(f"{path}: expected a row of integers, got {ids.dtype} {ids.shape}")
    return ids


def _from_bin(path: Path) -> Tokens:
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(4 * _HEADER)
    if start.startswith(b"version https://git-lfs"):
        raise InputError(f"{path}: a Git-LFS pointer, not the tokens: run `git lfs pull` there")
    first = 0
    header = np.frombuffer(start[: len(start) // 4 * 4], "<i4")
    if len(header) and header[0] == LLM_C_MAGIC:
        version, count = header[1:3].tolist() if len(header) == _HEADER else (0, 0)
        first = 4 * _HEADER
        if version != 1 or size != first + 2 * count:
            raise InputError(
                f"{path}: {size:,} bytes, with the header of llm.c: expected version 1 and "
                f"{first + 2 * count:,} bytes for its {count:,} tokens, got version {version}"
            )
    if (size - first) % 2 or size == first:
        raise InputError(f"{path}: expected uint16 tokens, two bytes each, got {size:,} bytes")
    return np.memmap(path, "<u2", "r", offset=first)


def _tokens(encoding: Encoding | None, text: Any, vocab_size: int) -> Tokens:
    """Checked ids; an array is checked in parts and not copied, since it may be a mapped file."""
    if not is_plain(text):
        return tokenizer.token_ids(encoding, text, vocab_size, "text")
    ids = as_array(text, "text")
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InputError(f"text: expected text or a row of integers, got {ids.dtype} {ids.shape}")
    for first in range(0, len(ids), _AT_ONCE):
        tokenizer.check_ids(ids[first : first + _AT_ONCE], vocab_size, "text", first)
    return ids


def _count_bytes(encoding: Encoding | None, ids: Tokens, vocab_size: int) -> int | None:
    """Bytes of text in the tokens after the first; special tokens have none."""
    if encoding is None:
        return None
    sizes = token_sizes(encoding, vocab_size)
    parts = (ids[first : first + _AT_ONCE] for first in range(1, len(ids), _AT_ONCE))
    return sum(int(sizes[part].sum()) for part in parts)


def window_batches(
    ids: Tokens, n_ctx: int, stride: int, tokens_at_once: int
) -> Iterator[list[tuple[Ids, int]]]:
    """Yield batches of windows, each a pair: its tokens, and how many of the last are scored."""
    at_once = max(1, tokens_at_once // n_ctx)
    batch: list[tuple[Ids, int]] = []
    scored_to = 1
    for first in range(0, len(ids), stride):
        end = min(first + n_ctx, len(ids))
        batch.append((ids[first:end].astype(np.int32), end - scored_to))
        scored_to = end
        if len(batch) == at_once or end == len(ids):
            yield batch
            batch = []
        if end == len(ids):
            return

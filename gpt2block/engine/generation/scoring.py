"""Log-likelihoods of texts of any length under a model, and embedding vectors of texts."""

from __future__ import annotations

import codecs
import math
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, get_args, overload

import numpy as np
from numpy.typing import NDArray

from gpt2block.checks import (
    check_callable,
    check_choice,
    check_count,
    check_flag,
    check_integer,
    is_plain,
)
from gpt2block.engine import notebook
from gpt2block.engine.generation.options import Overflow
from gpt2block.engine.generation.sequences import BAD_WEIGHTS, Tops
from gpt2block.engine.model import Floats, Ids, ModelEngine, in_groups
from gpt2block.errors import InputError
from gpt2block.files.checkpoints.embedding_files import Pooling
from gpt2block.files.tokenizers import tokenizer
from gpt2block.files.tokenizers.encoding import Encoding, as_array, bytes_of_id, token_sizes
from gpt2block.files.tokenizers.lookup import ReadLater, Tokenizer, of_inputs, of_outputs

Progress = Callable[[int, int], None]  # tokens scored so far, tokens to score
Tokens = NDArray[np.integer]

LLM_C_MAGIC = 20240520
_HEADER = 256  # number of int32 values in the header of llm.c's token files
_AT_ONCE = 2**24  # number of tokens of a file that are read at a time


class ScoreOptions(TypedDict, total=False):
    """The keywords of `score`, for type checkers."""

    tokens_at_once: int
    progress: Progress | None
    likeliest: bool


class ScoredToken(NamedTuple):
    """A token of a text and its log-probability under the model."""

    id: int
    text: str  # text of this token, U+FFFD for an incomplete character; "" without a tokenizer
    logprob: float  # log-probability in nats

    @property
    def surprisal(self) -> float:
        """The token's surprisal, -log2 of its probability, in bits."""
        return -self.logprob / math.log(2)


class ScoredTokens(Sequence[ScoredToken]):
    """The scored tokens of a text, in order: `ids` (N,), `logprobs` (N,), float32 in nats.

    `likeliest` (N,), int32, are the most likely tokens at the same positions, if requested.
    `top_logprobs`: as in Generation, for the tokens of `score_generated`, if requested.
    """

    def __init__(
        self,
        ids: Tokens,
        logprobs: Floats,
        encoding: Tokenizer,
        first: int | None = None,
        likeliest: Ids | None = None,
        top_logprobs: tuple[Tops, ...] = (),
    ) -> None:
        """first: the token before the first scored token."""
        self.ids, self.logprobs, self._encoding, self._first = ids, logprobs, encoding, first
        self.likeliest, self.top_logprobs = likeliest, top_logprobs

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, index: int) -> ScoredToken: ...
    @overload
    def __getitem__(self, index: slice) -> ScoredTokens: ...
    def __getitem__(self, index: int | slice) -> ScoredToken | ScoredTokens:
        if isinstance(index, slice):
            best = None if self.likeliest is None else self.likeliest[index]
            own = self.ids[index], self.logprobs[index], self._encoding
            return ScoredTokens(*own, likeliest=best, top_logprobs=self.top_logprobs[index])
        token = int(self.ids[index])
        return ScoredToken(token, self._text([token]), float(self.logprobs[index]))

    def __repr__(self) -> str:
        return f"ScoredTokens({len(self)} tokens)"

    @property
    def start(self) -> str:
        """The text of the token before the first scored token."""
        return "" if self._first is None else self._text([self._first])

    def pieces(self) -> Iterator[tuple[str, float]]:
        """Yield the scored text in pieces of whole characters, each with its surprisal in bits.

        A character that is divided between tokens is one piece with the sum of their surprisals.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        bits = 0.0
        for token, logprob in zip(self.ids.tolist(), self.logprobs.tolist(), strict=True):
            bits -= logprob / math.log(2)
            piece = decoder.decode(self._bytes(token))
            if piece:
                yield piece, bits
                bits = 0.0
        rest = decoder.decode(b"", final=True)
        if rest:
            yield rest, bits

    def _text(self, tokens: list[int]) -> str:
        return b"".join(map(self._bytes, tokens)).decode(errors="replace")

    def _bytes(self, token: int) -> bytes:
        encoding = of_outputs(self._encoding)
        return b"" if encoding is None else bytes_of_id(encoding, token)


@dataclass(frozen=True)
class Score(ReadLater):
    """The log-likelihood of a text: each token after the first is predicted once."""

    log_likelihood: float  # sum of the log-probabilities, in nats
    n_tokens: int  # number of scored tokens
    bytes: int | None  # bytes of text in the scored tokens, counted on access; None: no tokenizer
    n_ctx: int  # tokens per window
    stride: int  # tokens between the starts of windows
    tokens: ScoredTokens = field(compare=False, repr=False)  # scored tokens and log-probabilities

    def _repr_html_(self) -> str:
        facts = f"{self.n_tokens:,} tokens, perplexity {self.perplexity:,.4f}"
        if self.bits_per_byte is not None:
            facts += f", {self.bits_per_byte:.4f} bits per byte"
        return notebook.surprisals(self.tokens.start, self.tokens.pieces()) + notebook.paragraph(
            facts
        )

    @property
    def nats_per_token(self) -> float:
        return -self.log_likelihood / self.n_tokens

    @property
    def perplexity(self) -> float:
        """The perplexity, exp(nats_per_token)."""
        nats = self.nats_per_token
        return math.exp(nats) if nats < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """Compressed length of the text in bits per byte, comparable between tokenizers."""
        return -self.log_likelihood / math.log(2) / self.bytes if self.bytes else None


def score(
    engine: ModelEngine,
    encoding: Tokenizer,
    text: object,
    *,
    stride: int | None = None,
    tokens_at_once: int = 8192,
    progress: Progress | None = None,
    likeliest: bool = False,
) -> Any:
    """Score a text, or token ids (a sequence, an array or the result of `load_tokens`).

    Returns a Score, or a list of Scores for a list of texts. With a Lookup and ids, the tokenizer
    is loaded only when a text, or its number of bytes, is read.

    A window of n_ctx tokens slides by `stride`, n_ctx // 2 by default. The first window scores all
    of its tokens except the first; each later window scores its last `stride` tokens, which no
    earlier window contains (the last window may score fewer). Each token is therefore predicted
    from at least n_ctx - stride tokens, except near the start. A smaller stride takes longer and
    gives a higher likelihood.

    tokens_at_once: tokens of windows computed together; this number does not change the result.
    likeliest: whether the scored tokens also hold the most likely token at each position.
    Raises InputError for fewer than two tokens, ids outside the vocabulary, a stride outside
    1…n_ctx - 1, and for logits that are NaN.
    """
    n_ctx, vocab_size = engine.config.n_ctx, engine.config.vocab_size
    stride = _checked_stride(stride, n_ctx)
    tokens_at_once = check_count("tokens_at_once", tokens_at_once)
    check_flag("likeliest", likeliest)
    if progress is not None:
        check_callable("progress", progress)
    single, several = tokenizer.as_list(text, "text") if is_list(text) else (True, [text])
    names = ["text"] if single else [f"text {index}" for index in range(len(several))]
    texts = [_scorable(encoding, *each, vocab_size) for each in zip(names, several, strict=True)]
    logprobs = [np.empty(len(ids) - 1, np.float32) for ids in texts]
    best: list[Any] = [np.empty(len(ids) - 1, np.int32) if likeliest else None for ids in texts]
    total, done = sum(map(len, logprobs)), 0
    every = windows_of(texts, n_ctx, stride)
    for windows in in_groups(every, tokens_at_once, lambda window: len(window.tokens)):
        for window, nats, tops in _scored(engine, windows, names, likeliest):
            logprobs[window.text][window.first : window.end] = nats
            if tops is not None:
                best[window.text][window.first : window.end] = tops
            done += window.scored
        if progress is not None:
            progress(done, total)
    scores = []
    for ids, nats, found in zip(texts, logprobs, best, strict=True):
        tokens = ScoredTokens(ids[1:], nats, encoding, int(ids[0]), found)
        text_bytes = partial(_count_bytes, encoding, ids, vocab_size)
        nats_sum = float(np.sum(nats, dtype=np.float64))
        result = Score(nats_sum, len(nats), None, n_ctx, stride, tokens)
        scores.append(result.later(bytes=text_bytes))
    return scores[0] if single else scores


def _scored(
    engine: ModelEngine, windows: Sequence[Window], names: Sequence[str], likeliest: bool
) -> Iterator[tuple[Window, Floats, Ids | None]]:
    """Yield each window, log-likelihoods of its scored tokens, and the likeliest tokens or None.

    names: of the texts. Raises InputError for logits that are NaN.
    """
    rows = [window.tokens for window in windows]
    computed: Sequence[tuple[Floats, Ids | None]] = (
        engine.likeliest(rows)
        if likeliest
        else [(nats, None) for nats in engine.log_likelihood(rows)]
    )
    for window, (nats, tops) in zip(windows, computed, strict=True):
        part = slice(-window.scored, None)
        if np.isnan(nats[part]).any():
            name = "" if names == ["text"] else f"{names[window.text]}: "
            tokens_between = f"between tokens {window.first + 1} and {window.end}"
            raise InputError(f"{name}the logits are NaN {tokens_between}: ", *BAD_WEIGHTS)
        yield window, nats[part], None if tops is None else tops[part]


def embed(
    engine: ModelEngine,
    encoding: Tokenizer,
    inputs: object,
    pooling: Pooling = "mean",
    tokens_at_once: int = 8192,
    overflow: Overflow = "error",
    dimensions: int | None = None,
    normalize: bool = False,
) -> Floats:
    """Compute embedding vectors: the mean, last or first ("cls") hidden state after the final norm.

    Returns float32 (C,) for one text or row of token ids, (B, C) for a list of B inputs. Texts are
    encoded with the tokens that the tokenizer adds around every text. overflow: for an input longer
    than n_ctx, "truncate" keeps the last n_ctx tokens, "error" raises InputError. An empty input
    raises InputError. dimensions, normalize: as for `shortened`.
    """
    check_embed_options(pooling, overflow)
    check_count("tokens_at_once", tokens_at_once)
    config = engine.config
    check_dimensions(dimensions, config.n_embd)
    single, several = tokenizer.as_list(inputs, "input")
    sequences: list[Ids] = []
    for index, each in enumerate(several):
        name = "input" if single else f"input {index}"
        reader = of_inputs(encoding, each) if isinstance(each, str) else None
        ids = tokenizer.whole_text_ids(reader, each, config.vocab_size, name)
        if overflow == "truncate":
            ids = ids[-config.n_ctx :]
        if not 1 <= len(ids) <= config.n_ctx:
            raise InputError(f"{name}: expected 1 to {config.n_ctx} tokens, got {len(ids)}")
        sequences.append(ids)
    vectors: list[Floats] = []
    for part in in_groups(sequences, tokens_at_once):
        for hidden in engine.forward(part, "hidden"):
            vector: np.ndarray = hidden[-1 if pooling == "last" else 0]
            if pooling == "mean":
                vector = hidden.mean(axis=0, dtype=np.float64)
            vectors.append(vector.astype(np.float32))
    embedded = shortened(np.stack(vectors), dimensions, normalize)
    return embedded[0] if single else embedded


def shortened(vectors: Floats, dimensions: int | None, normalize: bool) -> Floats:
    """Return the first `dimensions` numbers of each vector, (B, dimensions); None: all numbers.

    normalize: scale each resulting vector to length 1; a vector of zeros stays. Only models trained
    for it have good embeddings of fewer dimensions. Source: Kusupati et al., "Matryoshka
    Representation Learning" (2022).
    """
    short = vectors[:, :dimensions]
    if normalize:
        lengths = np.linalg.norm(short, axis=1, keepdims=True)
        short = (short / np.maximum(lengths, 1e-12)).astype(np.float32)
    return short


def check_dimensions(dimensions: int | None, n_embd: int) -> None:
    """Raise InputError unless `dimensions` is None or an integer from 1 to n_embd."""
    if dimensions is not None:
        expected = f"1 to {n_embd}, the model's n_embd, or none"
        check_integer("dimensions", dimensions, 1, n_embd, expected)


def instructed(instruction: str, texts: object) -> Any:
    """Return a text, or each text of a list, with an instruction in Qwen3-Embedding's format.

    No space follows "Query:". Raises InputError for token ids. Source: Zhang et al., "Qwen3
    Embedding: Advancing Text Embedding and Reranking Through Foundation Models" (2025), and the
    model's card.
    """
    if isinstance(texts, (list, tuple)) and texts and all(isinstance(each, str) for each in texts):
        return [instructed(instruction, each) for each in texts]
    if not isinstance(texts, str) or not isinstance(instruction, str):
        raise InputError("instruction: expected a text, with texts as input and no token ids")
    return f"Instruct: {instruction}\nQuery:{texts}"


def check_embed_options(pooling: object, overflow: object) -> None:
    """Raise InputError for values that `embed` does not accept."""
    check_choice("pooling", pooling, get_args(Pooling))
    check_choice("overflow", overflow, get_args(Overflow))


def load_tokens(path: str | Path) -> Tokens:
    """Map the ids of a token file into memory, (T,).

    .npy files hold one row of integers. Other files hold little-endian uint16, after llm.c's header
    of 256 int32 (20240520, version 1, number of tokens) or without a header, as nanoGPT writes
    them. Raises InputError for any other content.
    """
    try:
        path = Path(path).expanduser()
        if not stat.S_ISREG(path.stat().st_mode):
            raise InputError(f"{path}: cannot be read as a token file: it is not a regular file")
        return _from_npy(path) if path.suffix == ".npy" else _from_bin(path)
    except InputError:
        raise
    except Exception as error:  # NumPy's parser of headers can raise any exception
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


def is_list(text: object) -> bool:
    """Return whether `text` is a list or tuple whose items are texts or sequences of ids."""
    return isinstance(text, (list, tuple)) and any(
        isinstance(entry, str) or np.ndim(entry) for entry in text
    )


def _checked_stride(stride: int | None, n_ctx: int) -> int:
    """Return the stride of the windows of `score`. Raises InputError."""
    if n_ctx < 2:
        raise InputError("score: a model with n_ctx 1 predicts no token from another")
    stride = check_count("stride", n_ctx // 2 if stride is None else stride)
    if stride >= n_ctx:
        raise InputError(f"stride: expected 1 to {n_ctx - 1}, less than n_ctx, got {stride}")
    return stride


def _scorable(encoding: Tokenizer, name: str, text: object, vocab_size: int) -> Tokens:
    """Return the token ids of a text with at least two tokens. Raises InputError."""
    reader = of_inputs(encoding, text) if isinstance(text, str) else None
    ids = _tokens(reader, text, vocab_size, name)
    if len(ids) < 2:
        raise InputError(f"{name}: expected at least two tokens to score one, got {len(ids)}")
    return ids


def _tokens(encoding: Encoding | None, text: object, vocab_size: int, name: str) -> Tokens:
    """Return checked token ids that later changes to the caller's array cannot affect.

    A read-only memory map is not copied. An array is checked in parts.
    """
    if not is_plain(text):
        return tokenizer.token_ids(encoding, text, vocab_size, name)
    ids = as_array(text, name)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InputError(f"{name}: expected text or a row of integers, got {ids.dtype} {ids.shape}")
    if not isinstance(ids, np.memmap) or ids.mode != "r":
        ids = ids.copy()
    for first in range(0, len(ids), _AT_ONCE):
        tokenizer.check_ids(ids[first : first + _AT_ONCE], vocab_size, name, first)
    return ids


def _count_bytes(tokenizer: Tokenizer, ids: Tokens, vocab_size: int) -> int | None:
    """Return the number of UTF-8 bytes in all tokens after the first; special tokens have none."""
    encoding = of_outputs(tokenizer)
    if encoding is None:
        return None
    sizes = token_sizes(encoding, vocab_size)
    parts = (ids[first : first + _AT_ONCE] for first in range(1, len(ids), _AT_ONCE))
    return sum(int(sizes[part].sum()) for part in parts)


class Window(NamedTuple):
    """A window of a text: tokens of one pass, of which the last `end - first` are scored."""

    text: int  # index of the text
    tokens: Ids
    first: int  # index of the window's first score; score 0 belongs to the text's second token
    end: int  # index after the window's last score

    @property
    def scored(self) -> int:
        return self.end - self.first


def windows_of(texts: Iterable[Tokens], n_ctx: int, stride: int) -> Iterator[Window]:
    """Yield the Windows of all texts."""
    for index, ids in enumerate(texts):
        scored = 0
        for first in range(0, len(ids), stride):
            end = min(first + n_ctx, len(ids))
            yield Window(index, ids[first:end].astype(np.int32), scored, end - 1)
            scored = end - 1
            if end == len(ids):
                break

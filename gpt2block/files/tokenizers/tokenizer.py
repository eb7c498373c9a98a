"""Load tokenizers and encode text: GPT-2's BPE, or the tokenizer next to a checkpoint.

Byte-level BPEs that merge like GPT-2's run with tiktoken, others with the package tokenizers; see
docs/tokenizers.md. Importing this module reads no files and uses no network.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken
from numpy.typing import NDArray

from gpt2block.checks import check_encodable
from gpt2block.errors import CheckpointError, InputError, shown
from gpt2block.files.checkpoints import Checkpoint, gguf_tokenizer, tokenizer_files
from gpt2block.files.checkpoints.files import about, read_json, read_object, read_start
from gpt2block.files.checkpoints.gguf import is_gguf
from gpt2block.files.checkpoints.patterns import SPLITS
from gpt2block.files.checkpoints.tokenizer_files import SETTINGS
from gpt2block.files.checkpoints.tokenizer_specs import GPT2_CLASSES, spec_of_pair, with_settings
from gpt2block.files.tokenizers import tokenizer_json
from gpt2block.files.tokenizers.encoding import (
    Encoding,
    Spans,
    TokenizersEncoding,
    is_rust_failure,
    marks_of,
    row_of_ids,
    special_id,
    tokens_of,
    without_names,
)
from gpt2block.files.tokenizers.tokenizer_json import TiktokenEncoding
from gpt2block.models.config import GPT2_END, GPT2_VOCABULARY, ModelConfig

END_OF_TEXT = "<|endoftext|>"
_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError)
_UNREADABLE = "cannot be read as a byte-level BPE tokenizer: {}"
# White space as defined by Unicode and tiktoken. Python's \s matches four more characters.
_WHITE_SPACE = r"[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"
_IN_LINES = _WHITE_SPACE.replace(r"\t-\r", r"\t\v\f")


def _runs(shortest: int, space: str = _WHITE_SPACE) -> re.Pattern[str]:
    """Return a regular expression for complete runs of `shortest` or more characters of `space`."""
    return re.compile(f"{space}(?<!{space}{{2}}){space}{{{shortest - 1},}}(?!{_WHITE_SPACE})")


# With GPT-2's pattern, tiktoken backtracks in long runs of white space; a run of 1,000,000 fails.
_LONG_RUN = _runs(10_000)
# Other patterns split a run of white space at its last line break, and backtrack only after it.
_LONG_LINE = _runs(10_000, _IN_LINES)


def load(source: Path | None, vocab_size: int) -> Encoding:
    """Load the tokenizer of `source`, a folder or GGUF file, or GPT-2's BPE if `source` is None.

    Reads the first of these that exists: tokenizer.json; encoder.json with vocab.bpe, or vocab.json
    with merges.txt. If the directory has no tokenizer and vocab_size is GPT-2's 50257, GPT-2's BPE
    is loaded by tiktoken (from its cache, TIKTOKEN_CACHE_DIR, or a download).

    Raises CheckpointError for damaged files, for unsupported settings or kinds of tokenizers, and
    for a tokenizer with more tokens than the model.
    """
    encoding = _at(source) if source else None
    name = source or "weights given as arrays"
    if encoding is None and vocab_size != GPT2_VOCABULARY:
        raise CheckpointError(
            f"{name}: expected tokenizer.json for a vocabulary of {vocab_size} tokens"
        )
    return _fitting(encoding or _gpt2(source), vocab_size, name)


def from_path(path: str | Path, vocab_size: int) -> Encoding:
    """Load the tokenizer at a path: a tokenizer file, a GGUF file, or a directory as in `load`.

    Raises CheckpointError if there is no tokenizer, and in the cases of `load`.
    """
    with about(path, (RuntimeError,), "no tokenizer: {}"):
        path = Path(path).expanduser()
    encoding = _at(path)
    if encoding is None:
        raise CheckpointError(
            f"{path}: no tokenizer: expected tokenizer.json, encoder.json and vocab.bpe, or "
            "vocab.json and merges.txt"
        )
    return _fitting(encoding, vocab_size, path)


def _at(path: Path) -> Encoding | None:
    """Load the tokenizer at a path, which is a folder or a file; return None if there is none."""
    if os.path.isdir(path):
        return _in_directory(path)
    if os.path.isfile(path) and is_gguf(path):
        return from_gguf(path)
    return _of_files(tokenizer_files.of_path(path)) if os.path.lexists(path) else None


def _of_files(files: Mapping[str, Path]) -> Encoding | None:
    """Load a tokenizer from the first complete set of files (name → path), or return None."""
    if tokenizer_files.TOKENIZER in files:
        return from_tokenizer_json(files[tokenizer_files.TOKENIZER])
    for vocab, merges in tokenizer_files.PAIRS:
        if vocab in files and merges in files:
            return from_bpe_files(files[vocab], files[merges])
    return None


def _in_directory(directory: Path) -> Encoding | None:
    """Load the tokenizer of a directory, or return None if it has no tokenizer files.

    Raises CheckpointError for unsupported tokenizers.
    """
    # `lexists` includes a dangling link and a FIFO, for which reading raises an error.
    paths = {name: directory / name for name in tokenizer_files.NAMES}
    files = {name: path for name, path in paths.items() if os.path.lexists(path)}
    encoding = _of_files(files)
    if encoding is not None:
        return encoding
    other = next((name for name in tokenizer_files.INCOMPLETE if name in files), None)
    kind = _settings(directory).get("tokenizer_class")
    if other is None and kind not in (None, *GPT2_CLASSES):
        other = f"{SETTINGS} (tokenizer_class {kind!r})"
    if other is not None:
        raise CheckpointError(
            f"{directory}: it has {other}, but no supported tokenizer: expected "
            "tokenizer.json, which save_pretrained of a fast tokenizer of transformers writes, or "
            "vocab.json together with merges.txt"
        )
    return None


def _settings(directory: Path, may_add: bool = False) -> Mapping[str, object]:
    """Read tokenizer_config.json, or return {} if it does not exist.

    eos_token may also come from special_tokens_map.json. may_add: whether the settings may add
    tokens to every text. Raises CheckpointError if they add tokens without it.
    """
    path = directory / SETTINGS
    special = read_object(directory / tokenizer_files.SPECIAL)
    settings = {"eos_token": special.get("eos_token")} | read_object(path)
    for name in ("add_bos_token", "add_eos_token"):
        if settings.get(name) and not may_add:
            raise CheckpointError(
                f"{path}: {name} adds a token to every text: set it to false, and add the token "
                "to the text or its ids if the model needs it"
            )
    return settings


def _fitting(encoding: Encoding, vocab_size: int, path: Path | str) -> Encoding:
    largest = max((encoding.max_token_value, *prefix_of(encoding), *suffix_of(encoding)))
    if largest >= vocab_size:
        raise CheckpointError(
            f"{path}: it has token id {largest}, the model has {vocab_size} tokens"
        )
    return encoding


def _gpt2(directory: Path | None) -> Encoding:
    try:
        return tiktoken.get_encoding("gpt2")
    except Exception as error:  # tiktoken raises exceptions of its HTTP library
        raise CheckpointError(
            "GPT-2's tokenizer is neither next to the weights nor in tiktoken's cache, and cannot "
            f"be downloaded ({type(error).__name__}): put vocab.json and merges.txt from "
            "https://huggingface.co/openai-community/gpt2, or OpenAI's encoder.json and vocab.bpe, "
            f"into {directory or 'a folder next to the weights'}, or set TIKTOKEN_CACHE_DIR to a "
            "cache that was filled elsewhere"
        ) from error


def from_bpe_files(vocab: Path, merges: Path) -> Encoding:
    """Load GPT-2's two files: vocab (encoder.json, vocab.json), merges (vocab.bpe, merges.txt).

    Tokens in <> or [] that no merge produces, such as <|endoftext|>, and tokens of
    added_tokens.json are special tokens. tokenizer_config.json may set add_prefix_space. Raises
    CheckpointError for damaged files and for unsupported settings.
    """
    ids, settings = read_json(vocab), _settings(vocab.parent)
    text, added = read_start(merges), read_object(vocab.with_name(tokenizer_files.ADDED))
    with about(vocab, _DAMAGE, _UNREADABLE):
        spec = spec_of_pair(ids, text, added, settings)
    return _of_spec(vocab, spec, settings)


def from_tokenizer_json(path: Path) -> Encoding:
    """Load a BPE in the format of Hugging Face `tokenizers`: see docs/tokenizers.md.

    Settings for truncation and padding are ignored, as in transformers by default. Raises
    CheckpointError for a damaged file, for unsupported settings, and if tokenizer_config.json
    contradicts the file.
    """
    return _of_spec(path, read_json(path), _settings(path.parent, may_add=True))


def from_gguf(path: Path) -> Encoding:
    """Load the tokenizer of a GGUF file: see docs/tokenizers.md for the two supported kinds.

    Raises CheckpointError for a damaged file, and for an unsupported tokenizer.
    """
    files = gguf_tokenizer.files_of(path)
    return _of_spec(path, files[tokenizer_files.TOKENIZER], files[SETTINGS])


def _of_spec(path: Path, spec: object, settings: Mapping[str, object]) -> Encoding:
    """Create a tokenizer from the content of tokenizer.json and of tokenizer_config.json.

    path: file to name in errors.
    """
    with about(path, _DAMAGE, _UNREADABLE):
        spec = with_settings(spec, settings)
        encoding = tokenizer_json.read(path.parent.name, spec)
        space = settings.get("add_prefix_space")
        if space is not None and bool(space) != tokenizer_json.adds_prefix_space(spec):
            raise ValueError(
                f"{SETTINGS} sets add_prefix_space to {space!r}, {path.name} does not: change one "
                "of them"
            )
        for setting, added, place in (
            ("add_bos_token", prefix_of(encoding), "before"),
            ("add_eos_token", suffix_of(encoding), "after"),
        ):
            wanted = settings.get(setting)
            if wanted is not None and bool(wanted) != bool(added):
                verb = "adds a token" if added else "adds none"
                raise ValueError(
                    f"{SETTINGS} sets {setting} to {wanted!r}, the post_processor {verb} {place} "
                    "every text: change one of them"
                )
        token = settings.get("eos_token")
        name = token.get("content") if isinstance(token, dict) else token
        encoding.end_id = tokenizer_json.id_of(spec, name if isinstance(name, str) else None)
        return encoding


def prefix_of(encoding: Encoding) -> list[int]:
    """Return the ids that the tokenizer adds before every text (often <s>); [] for GPT-2."""
    return list(encoding.prefix) if isinstance(encoding, TokenizersEncoding) else []


def suffix_of(encoding: Encoding) -> list[int]:
    """Return the ids that the tokenizer adds after every text; [] for most models.

    Models for embeddings often end every text with such a token.
    """
    return list(encoding.suffix) if isinstance(encoding, TokenizersEncoding) else []


def encode(encoding: Encoding, text: str, special: bool = False, name: str = "text") -> list[int]:
    """Return the token ids of a non-empty text, preceded by the ids of `prefix_of`.

    special: whether names of special tokens, such as <|endoftext|>, are encoded as their ids; by
    default they are ordinary text. Raises InputError, with `name` in the message, for an empty
    text, for a lone surrogate, which UTF-8 cannot encode, and if the tokenizer fails on the text.
    """
    if not text:
        raise InputError(f"{name}: expected at least one character, got none")
    return _encode(encoding, text, special, name)


def _encode(encoding: Encoding, text: str, special: bool, name: str) -> list[int]:
    """Encode a text, possibly empty. The ids of `prefix_of` come first, but only once."""
    prefix, ids = prefix_of(encoding), _encode_text(encoding, text, special, name)
    return ids if special and ids[: len(prefix)] == prefix else prefix + ids


def encode_chat(encoding: Encoding, text: str, given: Spans = ()) -> list[int]:
    """Encode a chat template's output, in which names of special tokens become their ids.

    given: spans of characters that do not come from the template. A name that overlaps one of them
    is ordinary text.
    """
    return _encode_text(encoding, text, True, "messages", given)


def _encode_text(
    encoding: Encoding, text: str, special: bool, name: str, given: Spans = ()
) -> list[int]:
    """Encode a text, without adding the ids of `prefix_of`. `given`: as in `encode_chat`."""
    check_encodable(name, text)
    # In an encoding of another class, names of special tokens are ordinary text.
    finds = special and isinstance(encoding, (tiktoken.Encoding, TokenizersEncoding))
    names = set(filter(None, encoding.special_tokens_set)) if finds else set()
    try:
        if isinstance(encoding, TokenizersEncoding) and special:
            return encoding.encode_given(text, given)
        if not names:
            return _encode_ordinary(encoding, text)
        longest_first = sorted(names, key=len, reverse=True)
        pattern = re.compile("|".join(map(re.escape, longest_first)))
        ids, start = [], 0
        for match in pattern.finditer(without_names(text, names, marks_of(text, given))):
            ids += _encode_ordinary(encoding, text[start : match.start()])
            ids.append(special_id(encoding, match[0]))
            start = match.end()
        return ids + _encode_ordinary(encoding, text[start:])
    except BaseException as error:
        if not is_rust_failure(error):
            raise
        raise InputError(f"{name}: the tokenizer fails on this text: {error}: split it") from error


def _encode_ordinary(encoding: Encoding, text: str) -> list[int]:
    """Call encode_ordinary, but bypass tiktoken's pattern in long white space, where it panics.

    GPT-2's pattern never joins white space to the text before it, and other patterns join only line
    breaks. A run is therefore one piece, without its last character if text follows, because this
    character may begin the next piece.
    """
    if not isinstance(encoding, tiktoken.Encoding) or not _splits_all(encoding):
        return encoding.encode_ordinary(text)
    ids: list[int] = []
    start = 0
    for run in (_LONG_RUN if _splits_words(encoding) else _LONG_LINE).finditer(text):
        end = run.end() - (run.end() < len(text))
        ids += encoding.encode_ordinary(text[start : run.start()])
        ids += encoding._encode_single_piece(text[run.start() : end])
        start = end
    return ids + encoding.encode_ordinary(text[start:])


def token_count_bound(encoding: Encoding) -> Callable[[str], int]:
    """Return a fast function that returns a lower bound of a text's token count (0: unknown).

    The bound also holds if names of special tokens are encoded as their ids.
    """
    sizes: tuple[int, bytes] | None = None
    if isinstance(encoding, TokenizersEncoding):
        sizes = encoding.sizes
    elif isinstance(encoding, tiktoken.Encoding) and (
        encoding._pat_str == tokenizer_json.SPLIT_NOTHING or _splits_all(encoding)
    ):
        names = [name.encode() for name in encoding.special_tokens_set]
        sizes = max(map(len, [*names, *dict(tokens_of(encoding)).values()])), b""
    if sizes is None:
        return lambda text: 0
    most, absent = sizes
    return lambda text: -(-len(text.encode(errors="replace").translate(None, absent)) // most)


def _splits_all(encoding: tiktoken.Encoding) -> bool:
    """Return whether the encoding's pattern is known to match every character of any text."""
    return _splits_words(encoding) or encoding._pat_str in SPLITS


def _splits_words(encoding: tiktoken.Encoding) -> bool:
    """Return whether the encoding splits text with GPT-2's pattern or an equivalent pattern."""
    known = tiktoken.registry.ENCODINGS.get("gpt2")
    return encoding is known or encoding._pat_str == tokenizer_json.SPLIT_WORDS


def token_ids(
    encoding: Encoding | None, value: object, vocab_size: int, name: str, special: bool = False
) -> NDArray[np.int32]:
    """Return a text's or a sequence's token ids, (T,); T may be 0. `special`: as in `encode`.

    Raises InputError, with `name` in the message, for text without an encoding or text that
    `encode` rejects, for objects that are neither text nor a row of integers (such as masked arrays
    and booleans), and for ids outside 0…vocab_size - 1.
    """
    if isinstance(value, str):
        if encoding is None:
            raise InputError(f"{name}: this model has no tokenizer: expected token ids, got text")
        return np.array(_encode(encoding, value, special, name), np.int32)
    ids = row_of_ids(value, name, "text or ")
    check_ids(ids, vocab_size, name)
    return ids.astype(np.int32)


def whole_text_ids(
    encoding: Encoding | None, value: object, vocab_size: int, name: str
) -> NDArray[np.int32]:
    """Return token ids as `token_ids` does, and after a text the ids of `suffix_of`.

    `embed` and all that computes embeddings read such ids. Texts to continue or to score have no
    end, and are encoded without the suffix. Raises InputError as `token_ids` does.
    """
    ids = token_ids(encoding, value, vocab_size, name)
    if encoding is None or not isinstance(value, str):
        return ids
    return np.append(ids, np.array(suffix_of(encoding), np.int32))


def check_ids(ids: np.ndarray, vocab_size: int, name: str, first: int = 0) -> None:
    """Raise InputError for an id outside the vocabulary. `first`: position to report for ids[0]."""
    if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
        index = int(((ids < 0) | (ids >= vocab_size)).argmax())
        raise InputError(
            f"{name}: token {first + index} is {shown(int(ids[index]))}: expected ids from 0 to "
            f"{vocab_size - 1}"
        )


def as_list(value: Any, name: str) -> tuple[bool, list[object]]:
    """Return (whether `value` is one text or one row of ids, the list of all texts or rows).

    Raises InputError, with `name` in the message, unless `value` is a text, a row of ids or a list
    of texts or rows.
    """
    if isinstance(value, str) or getattr(value, "ndim", None) == 1:
        return True, [value]
    try:
        several = list(value)
    except TypeError:
        several = []
    if not several or isinstance(value, (bytes, Mapping, set, frozenset)):
        raise InputError(f"{name}: expected text, token ids or a list of them, got {value!r:.40}")
    if all(issubclass(each, (int, np.integer)) for each in {*map(type, several)}):
        return True, [several]
    return False, several


def end_of_text(encoding: Encoding | None, vocab_size: int = 0) -> int | None:
    """Return the id of the token that ends a text: eos_token of the settings, or <|endoftext|>.

    None if the tokenizer has neither. <|endoftext|> also begins GPT-2's texts. Without an encoding,
    a vocabulary of GPT-2's size is taken to be GPT-2's.
    """
    if encoding is None:
        return GPT2_END if vocab_size == GPT2_VOCABULARY else None
    if isinstance(encoding, (TiktokenEncoding, TokenizersEncoding)) and encoding.end_id is not None:
        return encoding.end_id
    known = END_OF_TEXT in encoding.special_tokens_set
    return special_id(encoding, END_OF_TEXT) if known else None


def end_tokens(config: ModelConfig, encoding: Encoding | None) -> frozenset[int]:
    """Return the ids of all end tokens: `config.eos_token_ids` and the id of `end_of_text`."""
    end = end_of_text(encoding, config.vocab_size)
    every = {*config.eos_token_ids, *(() if end is None else (end,))}
    return frozenset(token for token in every if token < config.vocab_size)


def sources_of_end_tokens(checkpoint: Checkpoint) -> dict[int, str]:
    """Return a dict: id of a token that ends a text → source of the id, such as "config.json".

    No request is sent. A tokenizer that cannot be read names no token. Raises CheckpointError where
    other files have changed.
    """
    found, config = checkpoint.end_tokens(), checkpoint.config
    source = checkpoint.file if is_gguf(checkpoint.file) else checkpoint.directory
    try:
        encoding = load(source, config.vocab_size) if checkpoint.has_tokenizer() else None
    except CheckpointError:
        encoding = None
    for token in sorted(end_tokens(config, encoding)):
        found.setdefault(token, "the tokenizer")
    return {token: why for token, why in found.items() if token < config.vocab_size}

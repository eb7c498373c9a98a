"""Text ↔ token ids, by tiktoken: GPT-2's own BPE, or the tokenizer beside a checkpoint.

Nothing is read, and no network touched, before one of these functions is called.
"""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken
from numpy.typing import NDArray

from gpt2block.errors import CheckpointError, InputError

# GPT-2's split of text into words; "whole" is for tokenizers that state they do not split.
_SPLIT_WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SPLIT_NOTHING = r"(?s:.+)"


END_OF_TEXT = "<|endoftext|>"
_GPT2_VOCABULARY = 50257
_BPE_FILES = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))
_LLM_C = "gpt2_tokenizer.bin"
_LLM_C_MAGIC = 20240328
_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError)
_SPECIAL = re.compile(r"<.+>|\[.+\]")


def load(directory: Path | None, vocab_size: int) -> tiktoken.Encoding:
    """The tokenizer of the checkpoint in `directory`; None: of weights that came without one.

    One that lies there: tokenizer.json; encoder.json with vocab.bpe, or vocab.json with merges.txt;
    llm.c's gpt2_tokenizer.bin. Otherwise, when vocab_size is GPT-2's 50257, GPT-2's BPE from
    tiktoken (its cache, TIKTOKEN_CACHE_DIR, or a download). Raises CheckpointError.
    """
    encoding = _in_directory(directory) if directory else None
    where = directory or "weights given as arrays"
    if encoding is None and vocab_size != _GPT2_VOCABULARY:
        raise CheckpointError(
            f"{where}: expected tokenizer.json for a vocabulary of {vocab_size} tokens"
        )
    return _fitting(encoding or _gpt2(directory), vocab_size, where)


def from_path(path: str | Path, vocab_size: int) -> tiktoken.Encoding:
    """A tokenizer named by hand: a directory that holds one as in `load`, or one of its files.

    Raises CheckpointError where there is none, or when it has more tokens than the model.
    """
    path = Path(path).expanduser()
    encoding: tiktoken.Encoding | None = None
    if path.is_dir():
        encoding = _in_directory(path)
    elif path.is_file() and path.suffix == ".bin":
        encoding = from_llm_c(path)
    elif path.is_file():
        pair = next(((path.with_name(v), path.with_name(m)) for v, m in _BPE_FILES
                     if path.name in (v, m)), None)  # fmt: skip
        encoding = from_bpe_files(*pair) if pair else from_tokenizer_json(path)
    if encoding is None:
        raise CheckpointError(
            f"{path}: no tokenizer: expected tokenizer.json, encoder.json and vocab.bpe, "
            f"vocab.json and merges.txt, or {_LLM_C}"
        )
    return _fitting(encoding, vocab_size, path)


def _in_directory(directory: Path) -> tiktoken.Encoding | None:
    """The tokenizer that lies there, if any."""
    path = directory / "tokenizer.json"
    if path.is_file():
        return from_tokenizer_json(path)
    for vocab, merges in ((directory / v, directory / m) for v, m in _BPE_FILES):
        if vocab.is_file() and merges.is_file():
            return from_bpe_files(vocab, merges)
    path = directory / _LLM_C
    return from_llm_c(path) if path.is_file() else None


def _fitting(encoding: tiktoken.Encoding, vocab_size: int, path: Path | str) -> tiktoken.Encoding:
    if encoding.max_token_value >= vocab_size:
        raise CheckpointError(
            f"{path}: it has token id {encoding.max_token_value}, the model has {vocab_size} tokens"
        )
    return encoding


def _gpt2(directory: Path | None) -> tiktoken.Encoding:
    try:
        return tiktoken.get_encoding("gpt2")
    except Exception as error:  # tiktoken raises whatever its HTTP library does
        raise CheckpointError(
            "GPT-2's tokenizer is neither beside the weights nor in tiktoken's cache, and cannot "
            f"be downloaded ({type(error).__name__}): put vocab.json and merges.txt from "
            "https://huggingface.co/openai-community/gpt2, or OpenAI's encoder.json and vocab.bpe, "
            f"into {directory or 'a folder beside the weights'}, or set TIKTOKEN_CACHE_DIR to a "
            "cache that was filled elsewhere"
        ) from error


def from_bpe_files(vocab: Path, merges: Path) -> tiktoken.Encoding:
    """GPT-2's pair of files: token → id (encoder.json, vocab.json), merges (vocab.bpe, merges.txt).

    A token in <> or [] that is no result of a merge is a special one, as <|endoftext|> is. Raises
    CheckpointError for damaged files and for ids that are not in the order of the merges.
    """
    try:
        ids = json.loads(vocab.read_text(encoding="utf-8"))
        lines = merges.read_text(encoding="utf-8").splitlines()
        pairs = [line.split(" ") for line in lines if line and not line.startswith("#version")]
        if not all(len(pair) == 2 for pair in pairs):
            raise ValueError("expected two tokens in a line")
        merged = ["".join(pair) for pair in pairs]
        absent = next((token for token in merged if token not in ids), None)
        if absent is not None:
            raise ValueError(f"no id for {absent!r}")
        if not all(ids[one] < ids[other] for one, other in pairwise(merged)):
            raise ValueError("expected ids in the order of the merges")
        known = {*merged, *_byte_characters().values()}
        special = {token: rank for token, rank in ids.items() if token not in known}
        strange = next((token for token in special if not _SPECIAL.fullmatch(token)), None)
        if strange is not None:
            raise ValueError(f"no merge makes {strange!r}")
        ranks = {token: rank for token, rank in ids.items() if token in known}
        return _encoding(vocab.parent.name, _to_bytes(ranks), special)
    except _DAMAGE as error:
        raise CheckpointError(
            f"{vocab}, {merges.name}: not the two files of a GPT-2 BPE ({error!r:.200})"
        ) from error


def from_llm_c(path: Path) -> tiktoken.Encoding:
    """llm.c's gpt2_tokenizer.bin: 256 int32 of header, then a length byte and the bytes of a token.

    The header: 20240328, version 1 or 2, how many tokens, and in version 2 which one ends a text.
    """
    try:
        data = path.read_bytes()
        header = np.frombuffer(data, "<i4", 256)
        magic, version, count = header[:3].tolist()
        if magic != _LLM_C_MAGIC or version not in (1, 2) or not 0 < count < len(data):
            raise ValueError(f"header: {magic}, version {version}, {count} tokens")
        tokens, at = [], header.nbytes
        for _ in range(count):
            end = at + 1 + data[at]
            tokens.append(data[at + 1 : end])
            at = end
        if at != len(data):
            raise ValueError(f"{len(data):,} bytes: expected {at:,}")
        last = int(header[3]) if version == 2 else count - 1
        ranks = {token: rank for rank, token in enumerate(tokens) if rank != last}
        if len(ranks) != count - 1:
            raise ValueError("expected tokens that are all different, and one that ends a text")
        return _encoding(path.parent.name, ranks, {END_OF_TEXT: last})
    except (ValueError, IndexError, OSError) as error:
        raise CheckpointError(f"{path}: not a tokenizer of llm.c ({error})") from error


def from_tokenizer_json(path: Path) -> tiktoken.Encoding:
    """A byte-level BPE in the format of Hugging Face `tokenizers` as a tiktoken encoding.

    A token's rank in tiktoken is its id, which holds for byte-level BPEs that number their bytes
    first and then the merges in order, as GPT-2 does. Raises CheckpointError for a damaged file and
    for what tiktoken does not do: other models, normalizers, a space put before the text.
    """
    try:
        spec = json.loads(path.read_text(encoding="utf-8"))
        ranks, special, byte_level = _read_spec(spec)
        split = _SPLIT_WORDS if byte_level.get("use_regex", True) else _SPLIT_NOTHING
        return _encoding(path.parent.name, ranks, special, split)
    except _DAMAGE as error:
        raise CheckpointError(f"{path}: not a byte-level BPE tokenizer.json ({error!r})") from error


def _encoding(
    name: str, ranks: dict[bytes, int], special: dict[str, int], split: str = _SPLIT_WORDS
) -> tiktoken.Encoding:
    """ValueError unless ids are different and every byte has a token, without which tiktoken fails.

    Beside the check, this is tiktoken's constructor.
    """
    ids = [*ranks.values(), *special.values()]
    if not all(type(rank) is int and rank >= 0 for rank in ids) or len(set(ids)) != len(ids):
        raise ValueError("expected ids that are different integers of at least 0")
    if not all(bytes([byte]) in ranks for byte in range(256)):
        raise ValueError("expected a token for each of the 256 bytes")
    return tiktoken.Encoding(
        name=name, pat_str=split, mergeable_ranks=ranks, special_tokens=special
    )


def _read_spec(spec: dict[str, Any]) -> tuple[dict[bytes, int], dict[str, int], dict[str, Any]]:
    """Ranks, special tokens and the ByteLevel step; ValueError for what cannot be honoured."""
    step = spec["pre_tokenizer"]
    steps = [s for s in [*step.get("pretokenizers", []), step] if s["type"] == "ByteLevel"]
    if spec["model"]["type"] != "BPE" or not steps or spec.get("normalizer"):
        raise ValueError("expected a BPE model, a ByteLevel pre-tokenizer and no normalizer")
    byte_level = steps[0]
    if byte_level.get("add_prefix_space"):
        raise ValueError("add_prefix_space is not supported")
    special = {token["content"]: token["id"] for token in spec.get("added_tokens") or []}
    vocab = spec["model"]["vocab"]
    ranks = {token: rank for token, rank in vocab.items() if token not in special}
    return _to_bytes(ranks), special, byte_level


def _to_bytes(ranks: dict[str, int]) -> dict[bytes, int]:
    """Ranks by the bytes of a token, from those by the characters that stand for them in files."""
    to_byte = {char: byte for byte, char in _byte_characters().items()}
    return {bytes(to_byte[char] for char in token): rank for token, rank in ranks.items()}


def encode(encoding: tiktoken.Encoding, text: str) -> list[int]:
    """Token ids of a non-empty text; InputError for an empty one."""
    if not text:
        raise InputError("text: expected at least one character, got none")
    return encoding.encode_ordinary(text)


def token_ids(
    encoding: tiktoken.Encoding | None, given: Any, vocab_size: int, name: str
) -> NDArray[np.int32]:
    """A text, or ids of tokens, as ids (T,); T may be 0.

    Raises InputError, by the input's `name`, for text without an encoding, for what is neither
    text nor a row of integers, and for ids outside 0…vocab_size - 1.
    """
    if isinstance(given, str):
        if encoding is None:
            raise InputError(f"{name}: this model has no tokenizer: expected token ids, got text")
        return np.array(encoding.encode_ordinary(given), np.int32)
    try:
        ids = np.asarray(given)
    except (TypeError, ValueError) as error:  # ragged lists; CuPy arrays
        raise InputError(f"{name}: expected text or token ids: {error}") from error
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise InputError(
            f"{name}: expected text or a row of integers, got {type(given).__name__} "
            f"of {ids.dtype}, shape {ids.shape}"
        )
    check_ids(ids, vocab_size, name)
    return ids.astype(np.int32)


def check_ids(ids: NDArray[Any], vocab_size: int, name: str, first: int = 0) -> None:
    """InputError with the place of the first id that is none; ids[0] is token `first`."""
    wrong = (ids < 0) | (ids >= vocab_size)
    if wrong.any():
        at = int(wrong.argmax())
        raise InputError(
            f"{name}: token {first + at} is {ids[at]}: expected ids from 0 to {vocab_size - 1}"
        )


def as_list(given: Any, name: str) -> tuple[bool, list[Any]]:
    """Whether it is one text or one row of ids, and the list of all. InputError by its `name`."""
    if isinstance(given, str) or getattr(given, "ndim", None) == 1:
        return True, [given]
    try:
        several = list(given)
    except TypeError:
        several = []
    if not several or isinstance(given, bytes):
        raise InputError(f"{name}: expected text, token ids or a list of them, got {given!r:.40}")
    if all(isinstance(entry, (int, np.integer)) for entry in several):
        return True, [several]
    return False, several


def end_of_text(encoding: tiktoken.Encoding | None) -> int | None:
    """The id of <|endoftext|>, which begins and ends GPT-2's texts; None where there is none."""
    if encoding is None or END_OF_TEXT not in encoding.special_tokens_set:
        return None
    return encoding.encode_single_token(END_OF_TEXT)


def _byte_characters() -> dict[int, str]:
    """Byte → the printable character that stands for it in vocabulary files (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {byte: chr(256 + i) for i, byte in enumerate(others)}
    return {**{byte: chr(byte) for byte in printable}, **shifted}

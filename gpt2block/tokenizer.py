"""Text ↔ token ids, by tiktoken: GPT-2's own BPE, or the tokenizer.json beside a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tiktoken

from gpt2block.errors import CheckpointError, InputError

# GPT-2's split of text into words; "whole" is for tokenizers that state they do not split.
_SPLIT_WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SPLIT_NOTHING = r"(?s:.+)"


def load(directory: Path, vocab_size: int) -> tiktoken.Encoding:
    """The tokenizer of the checkpoint in `directory`.

    tokenizer.json if it is there, else GPT-2's BPE from tiktoken (its cache, TIKTOKEN_CACHE_DIR, or
    a download) when vocab_size is GPT-2's 50257. Raises CheckpointError otherwise.
    """
    path = directory / "tokenizer.json"
    if path.is_file():
        encoding = from_tokenizer_json(path)
    elif vocab_size != 50257:
        raise CheckpointError(
            f"{directory}: expected tokenizer.json for a vocabulary of {vocab_size} tokens"
        )
    else:
        encoding = _gpt2()
    if encoding.max_token_value >= vocab_size:
        raise CheckpointError(
            f"{path}: it has token id {encoding.max_token_value}, the model has {vocab_size} tokens"
        )
    return encoding


def _gpt2() -> tiktoken.Encoding:
    try:
        return tiktoken.get_encoding("gpt2")
    except Exception as error:  # tiktoken raises whatever its HTTP library does
        raise CheckpointError(
            f"GPT-2's BPE files are not in tiktoken's cache and cannot be downloaded "
            f"({type(error).__name__}): set TIKTOKEN_CACHE_DIR to a folder that holds them, "
            "or put tokenizer.json beside the weights"
        ) from error


def from_tokenizer_json(path: Path) -> tiktoken.Encoding:
    """A byte-level BPE in the format of Hugging Face `tokenizers` as a tiktoken encoding.

    A token's rank in tiktoken is its id, which holds for byte-level BPEs that number their bytes
    first and then the merges in order, as GPT-2 does. Raises CheckpointError for a damaged file and
    for what tiktoken does not do: other models, normalizers, a space put before the text.
    """
    try:
        spec = json.loads(path.read_text(encoding="utf-8"))
        ranks, special, byte_level = _read_spec(spec)
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise CheckpointError(f"{path}: not a byte-level BPE tokenizer.json ({error!r})") from error
    return tiktoken.Encoding(
        name=path.parent.name,
        pat_str=_SPLIT_WORDS if byte_level.get("use_regex", True) else _SPLIT_NOTHING,
        mergeable_ranks=ranks,
        special_tokens=special,
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
    to_byte = {char: byte for byte, char in _byte_characters().items()}
    ranks = {
        bytes(to_byte[char] for char in token): rank
        for token, rank in spec["model"]["vocab"].items()
        if token not in special
    }
    ids = [*ranks.values(), *special.values()]
    if not all(type(rank) is int and rank >= 0 for rank in ids) or len(set(ids)) != len(ids):
        raise ValueError("expected ids that are different integers of at least 0")
    if not all(bytes([byte]) in ranks for byte in range(256)):
        raise ValueError("expected a token for each of the 256 bytes")
    return ranks, special, byte_level


def encode(encoding: tiktoken.Encoding, text: str) -> list[int]:
    """Token ids of a non-empty text; InputError for an empty one."""
    if not text:
        raise InputError("text: expected at least one character, got none")
    return encoding.encode_ordinary(text)


def _byte_characters() -> dict[int, str]:
    """Byte → the printable character that stands for it in vocabulary files (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {byte: chr(256 + i) for i, byte in enumerate(others)}
    return {**{byte: chr(byte) for byte in printable}, **shifted}

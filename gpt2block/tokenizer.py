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
        return from_tokenizer_json(path)
    if vocab_size != 50257:
        raise CheckpointError(
            f"{directory}: expected tokenizer.json for a vocabulary of {vocab_size} tokens"
        )
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

    Raises CheckpointError when the file is of another kind. A token's rank in tiktoken is its id,
    which holds for byte-level BPEs that number the merges in order, as GPT-2 does.
    """
    try:
        spec = json.loads(path.read_text(encoding="utf-8"))
        vocab, steps = spec["model"]["vocab"], _pre_tokenizers(spec)
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: not a tokenizer.json ({error!r})") from error
    byte_level = [step for step in steps if step.get("type") == "ByteLevel"]
    if spec["model"].get("type") != "BPE" or not byte_level:
        raise CheckpointError(f"{path}: expected a byte-level BPE, got {spec['model'].get('type')}")
    special = {token["content"]: token["id"] for token in spec.get("added_tokens") or []}
    to_byte = {char: byte for byte, char in _byte_characters().items()}
    return tiktoken.Encoding(
        name=path.parent.name,
        pat_str=_SPLIT_WORDS if byte_level[0].get("use_regex", True) else _SPLIT_NOTHING,
        mergeable_ranks={
            bytes(to_byte[char] for char in token): rank
            for token, rank in vocab.items()
            if token not in special
        },
        special_tokens=special,
    )


def encode(encoding: tiktoken.Encoding, text: str) -> list[int]:
    """Token ids of a non-empty text; InputError for an empty one."""
    if not text:
        raise InputError("text: expected at least one character, got none")
    return encoding.encode_ordinary(text)


def _pre_tokenizers(spec: dict[str, Any]) -> list[dict[str, Any]]:
    step = spec["pre_tokenizer"] or {}
    return list(step.get("pretokenizers", [step]))


def _byte_characters() -> dict[int, str]:
    """Byte → the printable character that stands for it in vocabulary files (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {byte: chr(256 + i) for i, byte in enumerate(others)}
    return {**{byte: chr(byte) for byte in printable}, **shifted}

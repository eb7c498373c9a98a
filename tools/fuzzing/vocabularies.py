"""Random vocabularies of byte-pair encoding, and tokenizer.json files as GPT-2's for them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

END = "<|endoftext|>"


class Vocabulary(NamedTuple):
    """Tokens in GPT-2's order: 256 bytes, then the results of merges."""

    ids: dict[str, int]  # by the characters that represent bytes in files
    merges: list[tuple[str, str]]
    proper: bool  # every merge can occur, as in a learned vocabulary


def byte_characters() -> list[str]:
    """Return for each byte the character that represents it in vocabulary files."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    found, substitute = [], 256
    for byte in range(256):
        found.append(chr(byte if byte in printable else substitute))
        substitute += byte not in printable
    return found


CHARACTERS = byte_characters()


def random_vocabulary(rng: np.random.Generator, proper: bool) -> Vocabulary:
    """Return merges of few different characters, so that they occur in the texts."""
    ids = {char: index for index, char in enumerate(CHARACTERS)}
    parts = [CHARACTERS[b] for b in b"ab cdest'1.\n"]
    if rng.random() < 0.5:
        parts += [CHARACTERS[b] for b in "é🎭".encode()]
    merges: list[tuple[str, str]] = []
    for _ in range(int(rng.integers(0, 25))):
        one, other = (parts[int(rng.integers(len(parts)))] for _ in range(2))
        joined = one + other
        if joined in ids or (proper and by_rank(list(joined), ids) != [one, other]):
            continue
        ids[joined] = len(ids)
        merges.append((one, other))
        parts.append(joined)
    return Vocabulary(ids, merges, proper)


def by_rank(parts: list[str], ids: dict[str, int]) -> list[str]:
    """Apply byte-pair encoding, in which a pair's rank is the id of the merged token."""
    while True:
        pairs = [(ids.get(a + b), i) for i, (a, b) in enumerate(pairwise(parts))]
        ranked = [(rank, i) for rank, i in pairs if rank is not None]
        if not ranked:
            return parts
        i = min(ranked)[1]
        parts = [*parts[:i], parts[i] + parts[i + 1], *parts[i + 2 :]]


def plain_spec(vocabulary: Vocabulary) -> dict[str, Any]:
    """Return GPT-2's tokenizer.json with this vocabulary."""
    byte_level = {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True,
    }  # fmt: skip
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [added_token(len(vocabulary.ids), END)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": {**byte_level, "trim_offsets": False},
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {**vocabulary.ids, END: len(vocabulary.ids)},
            "merges": [list(pair) for pair in vocabulary.merges],
        },
    }


def added_token(index: int, content: str, **options: bool) -> dict[str, Any]:
    usual = {
        "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
        "special": True,
    }  # fmt: skip
    return {"id": index, "content": content, **usual, **options}

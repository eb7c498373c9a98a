"""Small tokenizer files for tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fuzzing.vocabularies import piece_spec, spec_of

from gpt2block.files.tokenizers.encoding import byte_characters

PAIRS = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))
BYTES = {char: byte for byte, char in byte_characters().items()}
SINGLE = [bytes([byte]) for byte in range(256)]


def pair(
    folder: Path, merges: Sequence[str], names: tuple[str, str] = PAIRS[1], **more: int
) -> tuple[Path, Path]:
    """Write a vocabulary (bytes, merges from id 256 on, `more` tokens) and its list of merges."""
    made = {merge.replace(" ", ""): 256 + index for index, merge in enumerate(merges)}
    (folder / names[0]).write_text(json.dumps(BYTES | made | more), encoding="utf-8")
    (folder / names[1]).write_text("\n".join(["#version: 0.2", *merges, ""]), encoding="utf-8")
    return folder / names[0], folder / names[1]


def small_pair(folder: Path, **changed: int) -> tuple[Path, Path]:
    """Write two files with the bytes, the merges "ab" and "abc", and <|endoftext|>."""
    more: dict[str, Any] = {"<|endoftext|>": 258, **changed}
    return pair(folder, ["a b", "ab c"], **more)


def small_json(folder: Path, **changed: Any) -> Path:
    """Write a tokenizer.json with the bytes, ab = 256 and bc = 257.

    changed: replaces parts of the file, or parts of its `model`.
    """
    spec = spec_of(BYTES | {"ab": 256, "bc": 257}, [["a", "b"], ["b", "c"]])
    for name, value in changed.items():
        (spec if name in spec else spec["model"])[name] = value
    return written(folder, spec)


def written(folder: Path, spec: Any) -> Path:
    """Write tokenizer.json."""
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(spec), encoding="utf-8")
    return path


def sentence_piece(folder: Path, **changed: Any) -> Path:
    """Write the tokenizer.json of `piece_spec`. changed: replaces parts of it."""
    return written(folder, piece_spec("ab") | changed)

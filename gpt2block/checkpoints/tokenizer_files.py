"""The files of a tokenizer next to the weights: which there are, and whether they can be read."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from gpt2block.checkpoints.stored import is_file, reading
from gpt2block.errors import CheckpointError

TOKENIZER = "tokenizer.json"
PAIRS = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))  # ids, merges
LLM_C = "gpt2_tokenizer.bin"
SETTINGS = "tokenizer_config.json"
ADDED = "added_tokens.json"
_OTHER_SETTINGS = ("special_tokens_map.json", ADDED)
OTHER_FORMATS = ("spiece.model", "sentencepiece.bpe.model", "tokenizer.model", "vocab.txt")
NAMES = (TOKENIZER, SETTINGS, *PAIRS[1], *PAIRS[0], LLM_C, *_OTHER_SETTINGS, *OTHER_FORMATS)
EXPECTED = "tokenizer.json, or vocab.json with merges.txt"


def present(directory: Path) -> dict[str, Path]:
    """The tokenizer files in a folder, by name.

    Raises CheckpointError for what has such a name and is no file: it does not count as absent.
    """
    return {name: directory / name for name in NAMES if is_file(directory / name)}


def readable(names: Collection[str]) -> bool:
    """Whether a tokenizer is complete in these files."""
    whole = any(name in names for name in (TOKENIZER, LLM_C))
    return whole or any(vocab in names and merges in names for vocab, merges in PAIRS)


def of_path(path: Path) -> dict[str, Path]:
    """The tokenizer files of a folder, or of one that is named: its pair, too. By their names.

    A file of any other name is a tokenizer.json, or with the suffix .bin one of llm.c. Raises
    CheckpointError where there is none.
    """
    with reading(path):
        folder = path.is_dir()
    if folder:
        found = present(path)
        if not readable(found):
            raise CheckpointError(f"{path}: expected {EXPECTED} in this folder")
        return found
    names = next((pair for pair in PAIRS if path.name in pair), None)
    files = {name: path.with_name(name) for name in names} if names else {}
    files = files or {LLM_C if path.suffix == ".bin" else TOKENIZER: path}
    for file in files.values():
        if not is_file(file):
            raise CheckpointError(f"{file}: no such file: expected a tokenizer")
    return files

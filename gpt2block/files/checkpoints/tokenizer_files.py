"""Find the tokenizer's files next to the weights, and check that they are complete."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from gpt2block.errors import CheckpointError
from gpt2block.files.checkpoints.files import about, is_file

TOKENIZER = "tokenizer.json"
PAIRS = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))  # (token ids, merges)
LLM_C = "gpt2_tokenizer.bin"
SETTINGS = "tokenizer_config.json"
ADDED = "added_tokens.json"
SPECIAL = "special_tokens_map.json"
CHAT_TEMPLATE = "chat_template.jinja"
_OTHER_SETTINGS = (SPECIAL, ADDED, CHAT_TEMPLATE)
OTHER_FORMATS = ("spiece.model", "sentencepiece.bpe.model", "tokenizer.model", "vocab.txt")
NAMES = (TOKENIZER, SETTINGS, *PAIRS[1], *PAIRS[0], LLM_C, *_OTHER_SETTINGS, *OTHER_FORMATS)
# Files of unsupported tokenizers, and files that need a second file to be a tokenizer.
INCOMPLETE = (*PAIRS[0], *PAIRS[1], ADDED, *OTHER_FORMATS)
EXPECTED = "tokenizer.json, or vocab.json with merges.txt"


def present(directory: Path) -> dict[str, Path]:
    """Return the tokenizer files in a folder: name → path.

    Raises CheckpointError if a tokenizer file's name exists but is not a file.
    """
    return {name: directory / name for name in NAMES if is_file(directory / name)}


def readable(names: Collection[str]) -> bool:
    """Return whether the files with these names make up a complete tokenizer."""
    single = any(name in names for name in (TOKENIZER, LLM_C))
    return single or any(vocab in names and merges in names for vocab, merges in PAIRS)


def of_path(path: Path) -> dict[str, Path]:
    """Return the tokenizer files at a path, which is a folder or a file: name → path.

    One file of a pair implies the other. A file of an unknown name is read as a tokenizer.json, or
    with the suffix .bin as llm.c's. Raises CheckpointError if the files do not exist.
    """
    with about(path):
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

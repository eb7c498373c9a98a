"""Find the tokenizer's files next to the weights, and check that they are complete."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from gpt2block.errors import CheckpointError
from gpt2block.files.checkpoints.files import about, check_supported, is_file, read_start

TOKENIZER = "tokenizer.json"
PAIRS = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))  # (token ids, merges)
SETTINGS = "tokenizer_config.json"
ADDED = "added_tokens.json"
SPECIAL = "special_tokens_map.json"
CHAT_TEMPLATE = "chat_template.jinja"
_OTHER_SETTINGS = (SPECIAL, ADDED, CHAT_TEMPLATE)
OTHER_FORMATS = (
    "spiece.model", "sentencepiece.bpe.model", "tokenizer.model", "vocab.txt", "gpt2_tokenizer.bin",
)  # fmt: skip
NAMES = (TOKENIZER, SETTINGS, *PAIRS[1], *PAIRS[0], *_OTHER_SETTINGS, *OTHER_FORMATS)
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
    pairs = (vocab in names and merges in names for vocab, merges in PAIRS)
    return TOKENIZER in names or any(pairs)


def of_path(path: Path) -> dict[str, Path]:
    """Return the tokenizer files at a path, which is a folder or a file: name → path.

    One file of a pair implies the other. A file of an unknown name is read as a tokenizer.json.
    Raises CheckpointError if the files do not exist, and for a tokenizer of llm.c.
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
    files = files or {TOKENIZER: path}
    for file in files.values():
        if not is_file(file):
            raise CheckpointError(f"{file}: no such file: expected a tokenizer")
        check_supported(file, read_start(file, 4))
    return files

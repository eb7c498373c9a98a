"""Read the chat template of a checkpoint, and the special tokens that the template may use."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gpt2block.errors import CheckpointError, shown
from gpt2block.files.checkpoints import gguf, gguf_tokenizer
from gpt2block.files.checkpoints.checkpoint import Checkpoint
from gpt2block.files.checkpoints.files import about, is_file, read_object
from gpt2block.files.checkpoints.hugging_face import GENERATION_CONFIG
from gpt2block.files.checkpoints.tokenizer_files import CHAT_TEMPLATE, SETTINGS, SPECIAL
from gpt2block.sampling import Sampling

DEFAULT = "default"  # name of the template to use if a file has several
OPTIONS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
CHAT_SAMPLING = {"temperature": 0.2, "top_p": 0.9}  # defaults, see docs/chat.md
TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


def chat_template(checkpoint: Checkpoint) -> tuple[str, dict[str, str]] | None:
    """Return a chat template's source, and a dict of special tokens; None if there is no template.

    The dict's keys are names such as "bos_token". chat_template.jinja takes precedence over
    tokenizer_config.json; of several templates there, the template named "default" is used. A GGUF
    file contains its template. Raises CheckpointError for damaged files.
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
    """Return the default sampling options of a model's answers, as keywords of `generate`.

    The options come from generation_config.json; if it has no such options, CHAT_SAMPLING is
    returned. Raises CheckpointError for values out of range.
    """
    given = checkpoint.generation_config() if checkpoint else {}
    found = {name: given[name] for name in OPTIONS if given.get(name) is not None}
    if given.get("do_sample") is False:
        found["temperature"] = 0
    if checkpoint is None or not found:
        return dict(CHAT_SAMPLING)
    with about(f"{checkpoint.name}: {GENERATION_CONFIG}"):
        made = Sampling(**{"temperature": 1.0, **found})
    return {name: getattr(made, name) for name in OPTIONS}


def bos_token(checkpoint: Checkpoint) -> str | None:
    """Return the name of the token that begins a text; None if no file names one."""
    return _content(_settings(checkpoint).get("bos_token"))


def _settings(checkpoint: Checkpoint) -> Mapping[str, object]:
    if gguf.is_gguf(checkpoint.file):
        return gguf_tokenizer.files_of(checkpoint.file)[SETTINGS]
    folder: Path = checkpoint.tokenizer_source()
    return read_object(folder / SPECIAL) | read_object(folder / SETTINGS)


def default_template(templates: list[object]) -> object:
    """Return the template named "default", else the list's only template, else None."""
    named = {each.get("name"): each.get("template") for each in templates if isinstance(each, dict)}
    return named.get(DEFAULT, next(iter(named.values()), None) if len(named) == 1 else None)


def _content(token: object) -> str | None:
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None

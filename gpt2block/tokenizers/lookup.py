"""The tokenizer of a model, loaded when it is needed, and fields that are computed when read."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gpt2block.errors import CheckpointError
from gpt2block.tokenizers.encoding import Encoding

if TYPE_CHECKING:
    from gpt2block.checkpoints import Checkpoint

Result = TypeVar("Result", bound="ReadLater")


class Lookup:
    """Loads the tokenizer of a model when text needs it, and remembers it, or why there is none.

    checkpoint: None for weights given as arrays. path: of another tokenizer than the checkpoint's,
    as for `tokenizer.from_path`.
    """

    def __init__(
        self, checkpoint: Checkpoint | None, vocab_size: int, path: str | Path | None = None
    ) -> None:
        self._checkpoint, self._vocab_size, self._path = checkpoint, vocab_size, path

    @cached_property
    def _found(self) -> Encoding | CheckpointError:
        from gpt2block.tokenizers import tokenizer  # noqa: PLC0415  (tiktoken imports slowly)

        try:
            if self._path is not None:
                return tokenizer.from_path(self._path, self._vocab_size)
            source = self._checkpoint.tokenizer_source() if self._checkpoint else None
            return tokenizer.load(source, self._vocab_size)
        except CheckpointError as error:
            return error

    @property
    def encoding(self) -> Encoding:
        """The tokenizer, which may be downloaded. Raises CheckpointError if it cannot be loaded."""
        if isinstance(self._found, CheckpointError):
            raise CheckpointError(str(self._found)) from self._found
        return self._found

    @cached_property
    def at_hand(self) -> Encoding | None:
        """The tokenizer if its files are next to the weights or at the path; else None.

        It suffices for token ids: nothing is searched elsewhere. Raises CheckpointError for a path
        without a tokenizer.
        """
        if self._path is not None:
            return self.encoding
        with suppress(CheckpointError):
            if self._checkpoint is not None and self._checkpoint.has_tokenizer():
                return self.encoding
        return None


Tokenizer = Encoding | Lookup | None


def of_inputs(tokenizer: Tokenizer, inputs: Any) -> Encoding | None:
    """The tokenizer for a text, token ids or a list of them. Raises CheckpointError for text."""
    if not isinstance(tokenizer, Lookup):
        return tokenizer
    several = inputs if isinstance(inputs, (list, tuple)) else [inputs]
    is_text = any(issubclass(each, str) for each in {*map(type, several)})
    return tokenizer.encoding if is_text else tokenizer.at_hand


def of_outputs(tokenizer: Tokenizer) -> Encoding | None:
    """The tokenizer with which ids are read as text; None if it cannot be loaded."""
    if not isinstance(tokenizer, Lookup):
        return tokenizer
    try:
        return tokenizer.encoding
    except CheckpointError:
        return None


class ReadLater:
    """Base of dataclasses, some fields of which are computed when they are first read."""

    def later(self: Result, **fields: Callable[[], Any]) -> Result:
        """The object itself, with functions that return the values of these fields."""
        for name in fields:
            del vars(self)[name]
        vars(self)["_later"] = fields
        return self

    if not TYPE_CHECKING:  # else any name would be an attribute

        def __getattr__(self, name: str) -> Any:
            fields = vars(self).get("_later", {})
            if name not in fields:
                raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
            vars(self)[name] = fields[name]()
            return vars(self)[name]

    def __getstate__(self) -> dict[str, Any]:
        """For pickle: all fields with their values."""
        values = {name: getattr(self, name) for name in vars(self).get("_later", ())}
        return {name: value for name, value in vars(self).items() if name != "_later"} | values

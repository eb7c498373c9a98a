"""Load tokenizers on first use, and compute fields of dataclasses on first access."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gpt2block.errors import CheckpointError
from gpt2block.files.tokenizers import tokenizer
from gpt2block.files.tokenizers.encoding import Encoding

if TYPE_CHECKING:
    from gpt2block.files.checkpoints import Checkpoint

Result = TypeVar("Result", bound="ReadLater")


class Lookup:
    """Load a model's tokenizer on first use, and keep the tokenizer, or the error if it fails.

    checkpoint: None if the weights are arrays. path: path of a tokenizer that replaces the
    checkpoint's tokenizer, as in `tokenizer.from_path`.
    """

    def __init__(
        self, checkpoint: Checkpoint | None, vocab_size: int, path: str | Path | None = None
    ) -> None:
        self._checkpoint, self._vocab_size, self._path = checkpoint, vocab_size, path
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Start to load a tokenizer that is stored next to the weights, in a thread."""
        if self._checkpoint is not None and self._checkpoint.has_tokenizer():
            self._thread = threading.Thread(target=lambda: self._loaded, name="tokenizer")
            self._thread.start()

    @property
    def _found(self) -> Encoding | CheckpointError:
        if self._thread is not None:
            self._thread.join()
        return self._loaded

    @cached_property
    def _loaded(self) -> Encoding | CheckpointError:
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
    def local_encoding(self) -> Encoding | None:
        """The tokenizer if its files are stored next to the weights or at `path`; else None.

        Unlike `encoding`, this property never downloads a tokenizer; it is used if inputs are token
        ids. Raises CheckpointError for a path without a tokenizer.
        """
        if self._path is not None:
            return self.encoding
        with suppress(CheckpointError):
            if self._checkpoint is not None and self._checkpoint.has_tokenizer():
                return self.encoding
        return None


Tokenizer = Encoding | Lookup | None


def of_inputs(tokenizer: Tokenizer, inputs: object) -> Encoding | None:
    """Return the tokenizer for `inputs` (text, ids, or a list); for ids only, it may be None.

    Raises CheckpointError if there is a text but no tokenizer.
    """
    if not isinstance(tokenizer, Lookup):
        return tokenizer
    several = inputs if isinstance(inputs, (list, tuple)) else [inputs]
    is_text = any(issubclass(each, str) for each in {*map(type, several)})
    return tokenizer.encoding if is_text else tokenizer.local_encoding


def of_outputs(tokenizer: Tokenizer) -> Encoding | None:
    """Return the tokenizer that decodes ids to text, or None if it cannot be loaded."""
    if not isinstance(tokenizer, Lookup):
        return tokenizer
    try:
        return tokenizer.encoding
    except CheckpointError:
        return None


class ReadLater:
    """Base class of dataclasses some of whose fields are computed when they are first read."""

    def later(self: Result, **fields: Callable[[], object]) -> Result:
        """Set the functions that compute `fields` on first access. Returns `self`."""
        for name in fields:
            del vars(self)[name]
        vars(self)["_later"] = fields
        return self

    if not TYPE_CHECKING:  # type checkers that see __getattr__ would accept any attribute

        def __getattr__(self, name: str) -> Any:
            fields = vars(self).get("_later", {})
            if name not in fields:
                raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
            vars(self)[name] = fields[name]()
            return vars(self)[name]

    def __getstate__(self) -> dict[str, object]:
        """Return the values of all fields, for pickle."""
        values = {name: getattr(self, name) for name in vars(self).get("_later", ())}
        return {name: value for name, value in vars(self).items() if name != "_later"} | values

"""`Encoding`: what gpt2block asks of a tokenizer, and the one that the package tokenizers runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache, cached_property
from hashlib import sha256
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from gpt2block.checks import as_numpy
from gpt2block.errors import InputError

if TYPE_CHECKING:
    import tokenizers


class Encoding(Protocol):
    """A tokenizer: the methods of `tiktoken.Encoding` that gpt2block uses, with their meaning."""

    max_token_value: int

    def encode_ordinary(self, text: str) -> list[int]:
        """Token ids; the names of special tokens are text like any other."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text; bytes that are not UTF-8 become U+FFFD. KeyError for an id without a token."""

    def decode_single_token_bytes(self, token: int) -> bytes:
        """The bytes of one token. KeyError for an id without a token."""

    def encode_single_token(self, text_or_bytes: str) -> int:
        """The id of a special token by its name. KeyError if there is none."""

    @property
    def n_vocab(self) -> int:
        """max_token_value + 1."""

    @property
    def special_tokens_set(self) -> set[str]:
        """The names of the special tokens."""


class TokenizersEncoding:
    """An `Encoding` that encodes with Hugging Face's package tokenizers.

    definition: the text of a tokenizer.json with a byte-level vocabulary. Ids are those of
    `Tokenizer.encode(text, add_special_tokens=False)`; truncation and padding are off, as they are
    in transformers unless a call asks for them.
    """

    def __init__(self, name: str, definition: str) -> None:
        self.name = name
        self._definition = definition
        self._tokenizer = self._load(special=False)
        self._special = {
            token.content: token_id
            for token_id, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.special
        }
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        self._bytes = {token_id: bytes_of(token) for token, token_id in vocab.items()}
        self.max_token_value: int = max(self._bytes)

    def _load(self, special: bool) -> tokenizers.Tokenizer:
        from tokenizers import Tokenizer  # noqa: PLC0415  (an extra)

        tokenizer = Tokenizer.from_str(self._definition)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = not special
        return tokenizer

    @cached_property
    def _with_special(self) -> tokenizers.Tokenizer:
        """Whether special tokens are found is a state of a Tokenizer, so there are two."""
        return self._load(special=True)

    @property
    def rules(self) -> str:
        """SHA-256 of everything that decides the ids."""
        return sha256(self._definition.encode()).hexdigest()

    def token_to_id(self, token: str) -> int | None:
        """The id of any token by its content in the file, as tokenizers has it."""
        return self._tokenizer.token_to_id(token)

    def adds_tokens(self) -> bool:
        """Whether the file's post-processor puts special tokens around a text."""
        return bool(self._tokenizer.num_special_tokens_to_add(is_pair=False))

    def encode_ordinary(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode(self, text: str, *, allowed_special: Literal["all"]) -> list[int]:
        """Token ids; the names of special tokens become their ids."""
        ids: list[int] = self._with_special.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        data = b"".join(self.decode_single_token_bytes(int(token)) for token in tokens)
        return data.decode("utf-8", errors="replace")

    def decode_single_token_bytes(self, token: int) -> bytes:
        return self._bytes[token]

    def encode_single_token(self, text_or_bytes: str) -> int:
        return self._special[text_or_bytes]

    @property
    def n_vocab(self) -> int:
        return self.max_token_value + 1

    @property
    def special_tokens_set(self) -> set[str]:
        return set(self._special)


def rules(encoding: Encoding) -> str:
    """What decides the ids of a text next to the tokens themselves, for a fingerprint."""
    if isinstance(encoding, TokenizersEncoding):
        return encoding.rules
    return str(getattr(encoding, "_pat_str", ""))


def tokens_of(encoding: Encoding) -> Iterator[tuple[int, bytes]]:
    """Id and bytes of every token except the special ones, in the order of ids."""
    special = {encoding.encode_single_token(name) for name in encoding.special_tokens_set}
    for token in range(encoding.max_token_value + 1):
        if token not in special:
            with suppress(KeyError):  # ids need not be contiguous
                yield token, encoding.decode_single_token_bytes(token)


def token_sizes(encoding: Encoding, vocab_size: int) -> NDArray[np.int64]:
    """Bytes of text that each id stands for, (vocab_size,); special tokens stand for none."""
    sizes = np.zeros(vocab_size, np.int64)
    for token, value in tokens_of(encoding):
        sizes[token] = len(value)
    return sizes


def bytes_of_id(encoding: Encoding, token: int) -> bytes:
    """The bytes of a token; U+FFFD for an id without one, as in a padded vocabulary."""
    try:
        return encoding.decode_single_token_bytes(token)
    except KeyError:
        return "\ufffd".encode()


def as_array(given: Any, name: str) -> NDArray[Any]:
    """Token ids as NumPy has them, which raises ValueError or TypeError for what is no array.

    InputError for masked arrays and booleans, which would pass as the ids below the mask, 0 and 1.
    """
    entries = given if isinstance(given, (list, tuple)) else ()
    for index, entry in enumerate(entries):
        if isinstance(entry, (bool, np.bool_)):
            raise InputError(f"{name}: token {index} is {entry!r}: expected an integer")
    if any(isinstance(part, np.ma.MaskedArray) for part in (given, *entries)):
        raise InputError(f"{name}: expected token ids, got a masked array: use .compressed()")
    return as_numpy(name, given)


def is_rust_failure(error: BaseException) -> bool:
    """Whether a tokenizer's library, written in Rust, failed: both panic at some inputs.

    A panic arrives as a BaseException without a public class; tokenizers raises Exception itself.
    """
    return type(error) is Exception or type(error).__name__ == "PanicException"


@cache
def byte_characters() -> dict[int, str]:
    """Byte → the printable character that stands for it in vocabulary files (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {byte: chr(256 + i) for i, byte in enumerate(others)}
    return {**{byte: chr(byte) for byte in printable}, **shifted}


@cache
def _to_latin1() -> dict[int, str]:
    """For str.translate: the characters of the table → their bytes in Latin-1.

    The other characters below 256 become one that Latin-1 does not have.
    """
    others: dict[int, Any] = dict.fromkeys(range(256), "\uffff")
    return others | {ord(char): chr(byte) for byte, char in byte_characters().items()}


def bytes_of_all(tokens: Sequence[str]) -> list[bytes]:
    """`bytes_of` for many tokens at once; ValueError for a character outside GPT-2's table."""
    table = np.full(0x110000, 256, np.uint16)
    table[[ord(char) for char in byte_characters().values()]] = list(byte_characters())
    data = table[np.frombuffer("".join(tokens).encode("utf-32-le"), "<u4")]
    if (data > 255).any():
        raise ValueError("model.vocab: expected tokens of GPT-2's characters for bytes")
    text = data.astype(np.uint8).tobytes()
    ends = list(accumulate(map(len, tokens)))
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def bytes_of(token: str) -> bytes:
    """The bytes of a token as it stands in a vocabulary file.

    A token with a character outside GPT-2's table is text as it is, as for the ByteLevel decoder of
    the package tokenizers.
    """
    try:
        return token.translate(_to_latin1()).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode("utf-8", errors="surrogatepass")

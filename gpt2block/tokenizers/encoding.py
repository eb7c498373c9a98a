"""The interface `Encoding` of a tokenizer, and its implementation with the package tokenizers."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache, cached_property
from hashlib import sha256
from itertools import accumulate
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import tiktoken
from numpy.typing import NDArray

from gpt2block.checks import as_numpy
from gpt2block.errors import InputError

if TYPE_CHECKING:
    import tokenizers


Spans = Iterable[tuple[int, int]]  # of characters: the first one, and the one after the last
_UNUSED = "\ue000"  # a character that no decoder changes
UTF_8 = frozenset(range(0xF5)) - {0xC0, 0xC1}  # the bytes that occur in UTF-8
# Steps before the model after which each token still stands for at most its own bytes.
_KEEPS = {"ByteLevel", "Digits", "Split", "Metaspace", "Prepend", "Replace"}
_SEQUENCES = {"pre_tokenizer": "pretokenizers", "normalizer": "normalizers", "decoder": "decoders"}
_SPACES = ({"String": " "}, "▁")
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


class Encoding(Protocol):
    """Interface of a tokenizer: the methods of `tiktoken.Encoding` that gpt2block uses."""

    max_token_value: int

    def encode_ordinary(self, text: str) -> list[int]:
        """Token ids; the names of special tokens are ordinary text."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text; bytes that are not UTF-8 become U+FFFD. InputError for ids without a token."""

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

    definition: the text of a tokenizer.json with a byte-level vocabulary, or with `byte_fallback`,
    as SentencePiece's, in which <0x0A> stands for a byte; it has a decoder. Ids are those of
    `Tokenizer.encode(text, add_special_tokens=False)`, without truncation and padding, which is
    also the default of transformers. The text of ids is that of `Tokenizer.decode`.

    prefix: ids that the tokenizer adds before every text, such as that of <s>; `tokenizer.encode`
    adds them. end_id: the token that ends a text, if the tokenizer's settings name one.
    """

    prefix: tuple[int, ...] = ()
    end_id: int | None = None

    def __init__(self, name: str, definition: str, byte_fallback: bool = False) -> None:
        self.name = name
        self._definition = definition
        self._byte_fallback = byte_fallback
        self._tokenizer = self._load(special=False)
        self._added = self._tokenizer.get_added_tokens_decoder()
        self._special = {each.content: id for id, each in self._added.items() if each.special}
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        self._tokens = {token_id: token for token, token_id in vocab.items()}
        for token_id, token in self._added.items():
            # with tokenizers >= 0.23, what the normalizer makes of its content
            self._tokens[token_id] = self._tokenizer.id_to_token(token_id) or token.content
        self._bytes: dict[int, bytes] = {}  # of the tokens that were looked up
        self.max_token_value: int = max(self._tokens)

    def _load(self, special: bool, definition: str = "") -> tokenizers.Tokenizer:
        from tokenizers import Tokenizer  # noqa: PLC0415  (optional dependency)

        tokenizer = Tokenizer.from_str(definition or self._definition)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = not special
        return tokenizer

    @cached_property
    def _with_special(self) -> tokenizers.Tokenizer:
        """A second Tokenizer: whether it recognizes special tokens is part of its state."""
        return self._load(special=True)

    @property
    def rules(self) -> str:
        """SHA-256 of the definition, which determines the ids of a text."""
        return sha256(self._definition.encode()).hexdigest()

    @property
    def sizes(self) -> tuple[int, bytes] | None:
        """The bytes that a token stands for at most, besides those that no token stands for.

        None where a step, such as a normalizer, can leave out more. In a vocabulary with ▁ for a
        space, its tokens also stand for a text that has this character.
        """
        spec = json.loads(self._definition)
        for step in steps_of(spec, "normalizer", "pre_tokenizer"):
            if step["type"] not in _KEEPS or step.get("behavior") == "Removed":
                return None
            if step["type"] == "Replace" and (step["pattern"], step["content"]) != _SPACES:
                return None
        if any(each.get("lstrip") or each.get("rstrip") for each in spec.get("added_tokens") or ()):
            return None
        fallback, vocab = self._byte_fallback, spec["model"]["vocab"]
        name = "<0x{:02X}>".format if fallback else byte_characters().__getitem__
        absent = bytes(byte for byte in UTF_8 if name(byte) not in vocab)
        most = max(len(each.encode() if fallback else each) for each in self._tokens.values())
        return None if fallback and absent else (most, absent)

    def token_to_id(self, token: str) -> int | None:
        """The id of any token by its content in the file."""
        return self._tokenizer.token_to_id(token)

    def added_before(self) -> tuple[int, ...] | None:
        """Ids that the file's post-processor adds before a text; None if it adds others."""
        count = self._tokenizer.num_special_tokens_to_add(is_pair=False)
        plain, whole = (
            self._tokenizer.encode("a", add_special_tokens=added).ids for added in (False, True)
        )
        return tuple(whole[:count]) if whole[count:] == plain else None

    def encode_ordinary(self, text: str) -> list[int]:
        return _ids(self._tokenizer, text)

    def encode(
        self,
        text: str,
        *,
        allowed_special: Literal["all"] | Collection[str] = (),
        disallowed_special: Literal["all"] | Collection[str] = "all",
    ) -> list[int]:
        """Token ids, as `tiktoken.Encoding.encode`: ValueError for names that are not allowed.

        allowed_special: names of special tokens that become their ids.
        disallowed_special: names that the text may not have; others are ordinary text.
        """
        names = set(self._special)
        allowed = names if allowed_special == "all" else names & set(allowed_special)
        refused = names - allowed if disallowed_special == "all" else set(disallowed_special)
        found = next((name for name in sorted(refused) if name in text), None)
        if found is not None:
            raise InputError(f'text: {found!r} is a special token: expected allowed_special="all" '
                             "for its id, or disallowed_special=() for text")  # fmt: skip
        if not allowed:
            return _ids(self._tokenizer, text)
        others = "|".join(map(re.escape, names - allowed)) or "(?!)"
        return self.encode_given(text, (found.span() for found in re.finditer(others, text)))

    def encode_given(self, text: str, given: Spans) -> list[int]:
        """Token ids of a text with names of added tokens.

        given: a name with one of these characters is ordinary text. Other names are replaced by
        those of `_renamed`, to which no text is equal.
        """
        marks = marks_of(text, given)
        free = without_names(text, self._names, marks)
        if free == text and not (1 in marks and self._finds_normalized):
            return _ids(self._with_special, text)
        (found,) = self._with_special.encode_batch([free], add_special_tokens=False)
        tokenizer, names, lost = self._renamed
        parts, at = [], 0
        for id, (start, end) in zip(found.ids, found.offsets, strict=True):
            name, new = names.get(id, ("", ""))
            taken = text[start:end]  # maybe with white space around it
            content = name if name in taken else taken.strip()
            begin = start + taken.index(content)
            if name and 1 not in marks[begin : begin + len(content)]:
                parts += [text[at:begin], new]
                at = begin + len(content)
        parts.append(text[at:])
        missing = next((name for name in lost if any(name in part for part in parts)), None)
        if missing is not None:
            raise InputError(f"messages: the tokenizer has no ordinary token for {missing!r}")
        return _ids(tokenizer, "".join(parts))

    @cached_property
    def _names(self) -> dict[str, int]:
        """Ids of the added tokens that ordinary text may not have: all except for white space."""
        added = self._added.items()
        return {each.content: id for id, each in added if each.content.strip(" \t\r\n▁")}

    @cached_property
    def _finds_normalized(self) -> bool:
        """Whether other text, which the normalizer changes, may become a name."""
        normalizes = self._tokenizer.normalizer is not None
        return normalizes and any(each.normalized for each in self._added.values())

    @cached_property
    def _renamed(self) -> tuple[tokenizers.Tokenizer, dict[int, tuple[str, str]], list[str]]:
        """A Tokenizer with other names for the same ids, which its model makes of no text.

        And by ids both names, the old and the new one; and names that are characters of which the
        vocabulary has no other token.
        """
        spec, prefix = json.loads(self._definition), f"\U000f0000{token_hex(8)}"
        model, names = spec["model"], self._names
        new = {name: f"{prefix}{chr(0xF0001 + at)}" for at, name in enumerate(names)}
        for token in spec["added_tokens"]:
            token["content"] = new.get(token["content"], token["content"])
        pairs = [each.split(" ") if isinstance(each, str) else each for each in model["merges"]]
        model["merges"] = [
            pair for pair in pairs if new.keys().isdisjoint((*pair, "".join(pair)))
        ]  # the vocabulary keeps its size, so that other ids stay as they are
        only = [n for n in names if len(n) == 1 and n in model["vocab"] and not self._byte_fallback]
        model["vocab"] = {new.get(token, token): id for token, id in model["vocab"].items()}
        unknown = model.get("unk_token")
        model["unk_token"] = new.get(unknown, unknown)
        tokenizer = self._load(True, json.dumps(spec, ensure_ascii=False))
        return tokenizer, {id: (name, new[name]) for name, id in names.items()}, only

    def decode(self, tokens: Sequence[int]) -> str:
        ids = ids_to_decode(tokens, self._tokens)  # the package omits ids without a token
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def decode_single_token_bytes(self, token: int) -> bytes:
        if token not in self._bytes:
            to_bytes = self._fallback_bytes_of if self._byte_fallback else bytes_of
            self._bytes[token] = to_bytes(self._tokens[token])
        return self._bytes[token]

    def _fallback_bytes_of(self, token: str) -> bytes:
        """The bytes of a token inside a text: decoders may strip the start and the end of one."""
        byte = _BYTE.fullmatch(token)
        if byte:
            return bytes([int(byte[1], 16)])
        text: str = self._tokenizer.decoder.decode([_UNUSED, token, _UNUSED])
        return text[1:-1].encode()

    def encode_single_token(self, text_or_bytes: str) -> int:
        return self._special[text_or_bytes]

    @property
    def n_vocab(self) -> int:
        return self.max_token_value + 1

    @property
    def special_tokens_set(self) -> set[str]:
        return set(self._special)


def _ids(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
    """Token ids. Releases Python's lock, as `Tokenizer.encode` does not, and finds no offsets."""
    (found,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
    ids: list[int] = found.ids
    return ids


def steps_of(spec: Any, *parts: str) -> list[Any]:
    """The steps of parts of a tokenizer.json, with Sequences flattened."""

    def flat(step: Any, inner: str) -> Iterable[Any]:
        if step["type"] != "Sequence":
            return [step]
        return [found for each in step[inner] for found in flat(each, inner)]

    given = [part for part in parts if spec.get(part) is not None]
    return [step for part in given for step in flat(spec[part], _SEQUENCES[part])]


def rules(encoding: Encoding) -> str:
    """A text that, with the tokens, determines the ids of any text; for fingerprints."""
    if isinstance(encoding, TokenizersEncoding):
        return f"{encoding.rules} {encoding.prefix}" if encoding.prefix else encoding.rules
    return str(getattr(encoding, "_pat_str", ""))


def special_id(encoding: Encoding, name: str) -> int:
    """The id of a special token; tiktoken prefers that of an ordinary one with the same bytes."""
    if isinstance(encoding, tiktoken.Encoding):
        return encoding._special_tokens[name]
    return encoding.encode_single_token(name)


def marks_of(text: str, spans: Spans) -> bytearray:
    """A byte for each character of a text: 1 in the spans, 0 elsewhere."""
    marks = bytearray(len(text))
    for first, end in spans:
        marks[first:end] = b"\1" * (end - first)
    return marks


def without_names(text: str, names: Iterable[str], marks: bytearray) -> str:
    """A text as long, in which each name with a character that has a mark is broken.

    One of these characters is replaced by one for private use, if possible not white space.
    """
    if 1 not in marks:
        return text
    broken: set[int] = set()
    free = next(chr(c) for c in range(0x10FFFD, 0xF0000, -1) if chr(c) not in text)
    for name in names:
        at = text.find(name)
        while at >= 0:
            own = [i for i in range(at, at + len(name)) if marks[i]]
            if own:
                broken.add(min(own, key=lambda i: text[i].isspace()))
            at = text.find(name, at + 1)
    places = sorted(broken)
    starts, ends = [0, *(at + 1 for at in places)], [*places, len(text)]
    return free.join(text[first:end] for first, end in zip(starts, ends, strict=True))


def tokens_of(encoding: Encoding) -> Iterator[tuple[int, bytes]]:
    """Id and bytes of every token except the special ones, by ascending id."""
    special = {special_id(encoding, name) for name in encoding.special_tokens_set}
    for token in range(encoding.max_token_value + 1):
        if token not in special:
            with suppress(KeyError):  # ids need not be contiguous
                yield token, encoding.decode_single_token_bytes(token)


def token_sizes(encoding: Encoding, vocab_size: int) -> NDArray[np.int64]:
    """Number of bytes of each id's token, (vocab_size,); 0 for special tokens."""
    sizes = np.zeros(vocab_size, np.int64)
    for token, value in tokens_of(encoding):
        sizes[token] = len(value)
    return sizes


def bytes_of_id(encoding: Encoding, token: int) -> bytes:
    """The bytes of a token; those of U+FFFD for an id without a token (padded vocabularies)."""
    try:
        return encoding.decode_single_token_bytes(token)
    except KeyError:
        return "\ufffd".encode()


class _TokenBytes(dict[int, bytes]):
    """The bytes of the tokens of an encoding that were looked up."""

    def __init__(self, encoding: Encoding) -> None:
        self.encoding = encoding

    def __missing__(self, token: int) -> bytes:
        self[token] = found = bytes_of_id(self.encoding, token)
        return found


_latest: deque[_TokenBytes] = deque(maxlen=4)


def _token_bytes(encoding: Encoding) -> _TokenBytes:
    for found in tuple(_latest):
        if found.encoding is encoding:
            return found
    new = _TokenBytes(encoding)
    _latest.append(new)
    return new


def bytes_of_ids(encoding: Encoding, tokens: Sequence[int]) -> bytes:
    """The bytes of several tokens, as those of `bytes_of_id`.

    A thread keeps Python's lock meanwhile, which `decode_bytes` of tiktoken would release.
    """
    return b"".join(map(_token_bytes(encoding).__getitem__, tokens))


def as_array(given: Any, name: str) -> NDArray[Any]:
    """Token ids as a NumPy array. Raises ValueError or TypeError for what cannot be an array.

    Raises InputError for masked arrays and booleans, which NumPy would convert without an error.
    """
    entries = given if isinstance(given, (list, tuple)) else ()
    types = {type(given), *map(type, entries)}  # few, where entries are many
    if bool in types or np.bool_ in types:
        for index, entry in enumerate(entries):
            if isinstance(entry, (bool, np.bool_)):
                raise InputError(f"{name}: token {index} is {entry!r}: expected an integer")
    if any(issubclass(each, np.ma.MaskedArray) for each in types):
        raise InputError(f"{name}: expected token ids, got a masked array: use .compressed()")
    return as_numpy(name, given)


def row_of_ids(given: Any, name: str, text: str = "") -> NDArray[Any]:
    """Integers, (T,). Raises InputError for anything else; text: what the message also allows."""
    try:
        ids = as_array(given, name)
    except InputError:
        raise
    except (TypeError, ValueError, OverflowError) as error:  # ragged lists, CuPy arrays, 400 digits
        raise InputError(f"{name}: expected {text}token ids: {error}") from error
    if ids.dtype.kind in "fO" and isinstance(given, list) and {*map(type, given)} == {int}:
        return np.array(given, object)  # integers of more than 63 bits: no vocabulary has them
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise InputError(
            f"{name}: expected {text}a row of integers, got {type(given).__name__} "
            f"of {ids.dtype}, shape {ids.shape}"
        )
    return ids


def ids_to_decode(tokens: Any, known: Container[int]) -> list[int]:
    """Token ids, (T,), as integers of Python. Raises InputError unless all of them are known."""
    ids: list[int] = row_of_ids(tokens, "tokens").tolist()
    for at, token in enumerate(ids):
        if token not in known:
            raise InputError(f"tokens: id {token} at {at}: the tokenizer has no such token")
    return ids


def is_rust_failure(error: BaseException) -> bool:
    """Whether an error comes from the Rust code of tiktoken or tokenizers.

    A panic arrives as a BaseException without a public class; tokenizers also raises Exception.
    """
    return type(error) is Exception or type(error).__name__ == "PanicException"


@cache
def byte_characters() -> dict[int, str]:
    """Byte → the printable character that represents it in vocabulary files (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {byte: chr(256 + i) for i, byte in enumerate(others)}
    return {**{byte: chr(byte) for byte in printable}, **shifted}


@cache
def _to_latin1() -> dict[int, str]:
    """Table for str.translate: characters of `byte_characters` → their bytes as Latin-1.

    Other characters below 256 become U+FFFF, which Latin-1 cannot encode.
    """
    others: dict[int, Any] = dict.fromkeys(range(256), "\uffff")
    return others | {ord(char): chr(byte) for byte, char in byte_characters().items()}


def bytes_of_all(tokens: Sequence[str]) -> list[bytes]:
    """`bytes_of` for many tokens at once; ValueError for a character outside GPT-2's table."""
    try:
        text = "".join(tokens).translate(_to_latin1()).encode("latin-1")
    except UnicodeEncodeError:
        raise ValueError("model.vocab: expected tokens of GPT-2's characters for bytes") from None
    ends = list(accumulate(map(len, tokens)))
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def bytes_of(token: str) -> bytes:
    """The bytes of a token of a vocabulary file.

    A token with a character outside GPT-2's table is encoded as UTF-8, as the ByteLevel decoder of
    the package tokenizers does.
    """
    try:
        return token.translate(_to_latin1()).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode("utf-8", errors="surrogatepass")

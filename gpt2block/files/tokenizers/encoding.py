"""The interface `Encoding` of tokenizers, and its implementation with the package tokenizers."""

from __future__ import annotations

import json
import re
import struct
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


Spans = Iterable[tuple[int, int]]  # ranges (first, end) of characters; `end` is excluded
_UNUSED = "\ue000"  # a private-use character, which no decoder changes
UTF_8 = frozenset(range(0xF5)) - {0xC0, 0xC1}  # the bytes that occur in UTF-8
# Normalizers and pre-tokenizers that drop no text: a token stands for at most as many bytes of the
# text as the token has.
_KEEPS = {"ByteLevel", "Digits", "Split", "Metaspace", "Prepend", "Replace"}
_SEQUENCES = {"pre_tokenizer": "pretokenizers", "normalizer": "normalizers", "decoder": "decoders"}
_SPACES = ({"String": " "}, "▁")
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


class Encoding(Protocol):
    """Interface of a tokenizer: the methods of `tiktoken.Encoding` that gpt2block uses."""

    max_token_value: int

    def encode_ordinary(self, text: str) -> list[int]:
        """Return the token ids of a text, in which names of special tokens are ordinary text."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids. Raises InputError for ids without a token."""

    def decode_single_token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token. Raises KeyError for an id without a token."""

    def encode_single_token(self, text_or_bytes: str) -> int:
        """Return the id of a special token by its name. Raises KeyError for an unknown name."""

    @property
    def n_vocab(self) -> int:
        """The largest token id plus one."""

    @property
    def special_tokens_set(self) -> set[str]:
        """The names of the special tokens."""


class TokenizersEncoding:
    """An `Encoding` that encodes with Hugging Face's package tokenizers.

    definition: text of a tokenizer.json with a decoder. The vocabulary of the tokenizer is
    byte-level, or with `byte_fallback` like SentencePiece's, in which tokens such as <0x0A> stand
    for bytes. Ids are the same as from `Tokenizer.encode(text, add_special_tokens=False)` without
    truncation and padding (the defaults of transformers), and texts the same as from
    `Tokenizer.decode`.

    prefix: ids that the tokenizer adds before every text, such as the id of <s>;
    `tokenizer.encode` adds them. suffix: ids that the tokenizer adds after every text;
    `tokenizer.whole_text_ids` adds them. end_id: id of the token that ends a text, if the
    tokenizer's settings name one.
    """

    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
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
            # In tokenizers >= 0.23, id_to_token returns the normalized content.
            self._tokens[token_id] = self._tokenizer.id_to_token(token_id) or token.content
        self._bytes: dict[int, bytes] = {}  # cache of the bytes of tokens
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
        """A second Tokenizer, in which the setting "encode_special_tokens" is False."""
        return self._load(special=True)

    @property
    def sizes(self) -> tuple[int, bytes] | None:
        """A tuple (maximum bytes of text per token, byte values without a token); None if unknown.

        None if a step, such as a normalizer, can remove other bytes. In a vocabulary with ▁ for a
        space, tokens with ▁ also stand for a text that contains ▁.
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
        """Return the id of the token with this content, or None if there is no such token."""
        return self._tokenizer.token_to_id(token)

    def added_around(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Return the ids that the post-processor adds before and after a text.

        None if the post-processor changes the ids in another way.
        """
        plain = self._tokenizer.encode("a", add_special_tokens=False).ids
        whole = self._tokenizer.encode("a", add_special_tokens=True)
        own = [index for index, added in enumerate(whole.special_tokens_mask) if not added]
        if not own or whole.ids[own[0] : own[-1] + 1] != plain:
            return None
        return tuple(whole.ids[: own[0]]), tuple(whole.ids[own[-1] + 1 :])

    def encode_ordinary(self, text: str) -> list[int]:
        return _ids(self._tokenizer, text)

    def encode(
        self,
        text: str,
        *,
        allowed_special: Literal["all"] | Collection[str] = (),
        disallowed_special: Literal["all"] | Collection[str] = "all",
    ) -> list[int]:
        """Return the token ids of a text, like `tiktoken.Encoding.encode`.

        allowed_special: names of special tokens that are encoded as their ids.
        disallowed_special: names that the text must not contain; other names are ordinary text.
        Raises InputError, a ValueError, for a disallowed name.
        """
        names = set(self._special)
        allowed = names if allowed_special == "all" else names & set(allowed_special)
        refused = names - allowed if disallowed_special == "all" else set(disallowed_special)
        name = next((name for name in sorted(refused) if name in text), None)
        if name is not None:
            raise InputError(f'text: {name!r} is a special token: expected allowed_special="all" '
                             "for its id, or disallowed_special=() for text")  # fmt: skip
        if not allowed:
            return _ids(self._tokenizer, text)
        others = "|".join(map(re.escape, names - allowed)) or "(?!)"
        return self.encode_given(text, (match.span() for match in re.finditer(others, text)))

    def encode_given(self, text: str, given: Spans) -> list[int]:
        """Return token ids of a text in which some names of added tokens are ordinary text.

        given: spans of ordinary text: a name that overlaps one is not a token. All other names are
        replaced by the names of `_renamed`, which no text contains.
        """
        marks = marks_of(text, given)
        free = without_names(text, self._names, marks)
        if free == text and not (1 in marks and self._finds_normalized):
            return _ids(self._with_special, text)
        (encoded,) = self._with_special.encode_batch([free], add_special_tokens=False)
        tokenizer, names, lost = self._renamed
        parts, at = [], 0
        for id, (start, end) in zip(encoded.ids, encoded.offsets, strict=True):
            name, new = names.get(id, ("", ""))
            taken = text[start:end]  # the token's name, possibly with white space around it
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
        """A dict: name → id of added tokens, without the added tokens that are white space only."""
        added = self._added.items()
        return {each.content: id for id, each in added if each.content.strip(" \t\r\n▁")}

    @cached_property
    def _finds_normalized(self) -> bool:
        """Whether the normalizer can turn other text into the name of an added token."""
        normalizes = self._tokenizer.normalizer is not None
        return normalizes and any(each.normalized for each in self._added.values())

    @cached_property
    def _renamed(self) -> tuple[tokenizers.Tokenizer, dict[int, tuple[str, str]], list[str]]:
        """(Tokenizer with renamed added tokens, {id: (old, new name)}, one-character old names).

        No text contains the new names, and the model never produces them. The vocabulary has no
        other token for the one-character old names.
        """
        spec, prefix = json.loads(self._definition), f"\U000f0000{token_hex(8)}"
        model, names = spec["model"], self._names
        new = {name: f"{prefix}{chr(0xF0001 + index)}" for index, name in enumerate(names)}
        for token in spec["added_tokens"]:
            token["content"] = new.get(token["content"], token["content"])
        pairs = [each.split(" ") if isinstance(each, str) else each for each in model["merges"]]
        # The vocabulary keeps its size, and other tokens keep their ids.
        model["merges"] = [each for each in pairs if new.keys().isdisjoint((*each, "".join(each)))]
        only = [n for n in names if len(n) == 1 and n in model["vocab"] and not self._byte_fallback]
        model["vocab"] = {new.get(token, token): id for token, id in model["vocab"].items()}
        unknown = model.get("unk_token")
        model["unk_token"] = new.get(unknown, unknown)
        tokenizer = self._load(True, json.dumps(spec, ensure_ascii=False))
        return tokenizer, {id: (name, new[name]) for name, id in names.items()}, only

    def decode(self, tokens: Sequence[int]) -> str:
        ids = ids_to_decode(tokens, self._tokens)  # raises for ids that `decode` would omit
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def decode_single_token_bytes(self, token: int) -> bytes:
        if token not in self._bytes:
            to_bytes = self._fallback_bytes_of if self._byte_fallback else bytes_of
            self._bytes[token] = to_bytes(self._tokens[token])
        return self._bytes[token]

    def _fallback_bytes_of(self, token: str) -> bytes:
        """Return the bytes that a token stands for in the middle of a text.

        Decoders may strip white space at the start and end of a text.
        """
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
    """Return a text's token ids. Unlike `Tokenizer.encode`, this releases the GIL.

    Offsets of the tokens are not computed.
    """
    (encoded,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
    ids: list[int] = encoded.ids
    return ids


def steps_of(spec: Any, *parts: str) -> list[Any]:
    """Return the steps of components `parts` ("normalizer", …) in one list; flatten Sequences."""

    def flat(step: Any, inner: str) -> Iterable[Any]:
        if step["type"] != "Sequence":
            return [step]
        return [leaf for each in step[inner] for leaf in flat(each, inner)]

    present = [part for part in parts if spec.get(part) is not None]
    return [step for part in present for step in flat(spec[part], _SEQUENCES[part])]


def rules(encoding: Encoding) -> str:
    """Return a string that, together with the vocabulary, determines the token ids of any text."""
    if isinstance(encoding, TokenizersEncoding):
        digest = sha256(encoding._definition.encode()).hexdigest()
        return f"{digest} {encoding.prefix}" if encoding.prefix else digest
    return str(getattr(encoding, "_pat_str", ""))


def special_id(encoding: Encoding, name: str) -> int:
    """Return the id of a special token, even if an ordinary token has the same bytes."""
    if isinstance(encoding, tiktoken.Encoding):
        return encoding._special_tokens[name]
    return encoding.encode_single_token(name)


def marks_of(text: str, spans: Spans) -> bytearray:
    """Return one byte per character of a text: 1 for characters in `spans`, 0 for others."""
    marks = bytearray(len(text))
    for first, end in spans:
        marks[first:end] = b"\1" * (end - first)
    return marks


def without_names(text: str, names: Iterable[str], marks: bytearray) -> str:
    """Return the text with one character replaced in each name that has a marked character.

    The length stays the same. The replacement is a private-use character; this character replaces a
    marked character, if possible one that is not white space.
    """
    if 1 not in marks:
        return text
    characters = list(text)
    free = next(chr(c) for c in range(0x10FFFD, 0xF0000, -1) if chr(c) not in text)
    for name in names:
        start = text.find(name)
        while start >= 0:
            marked = [i for i in range(start, start + len(name)) if marks[i]]
            if marked:
                characters[min(marked, key=lambda i: text[i].isspace())] = free
            start = text.find(name, start + 1)
    return "".join(characters)


def tokens_of(encoding: Encoding) -> Iterator[tuple[int, bytes]]:
    """Yield id and bytes of every token except special tokens, in ascending order of ids."""
    special = {special_id(encoding, name) for name in encoding.special_tokens_set}
    for token in range(encoding.max_token_value + 1):
        if token not in special:
            with suppress(KeyError):  # some ids may have no token
                yield token, encoding.decode_single_token_bytes(token)


def token_sizes(encoding: Encoding, vocab_size: int) -> NDArray[np.int64]:
    """Return the number of bytes of each id's token, (vocab_size,); 0 for special tokens."""
    sizes = np.zeros(vocab_size, np.int64)
    for token, value in tokens_of(encoding):
        sizes[token] = len(value)
    return sizes


def bytes_of_id(encoding: Encoding, token: int) -> bytes:
    """Return a token's bytes, or the bytes of U+FFFD for a padding id that has no token."""
    try:
        return encoding.decode_single_token_bytes(token)
    except KeyError:
        return "\ufffd".encode()


class _TokenBytes(dict[int, bytes]):
    """Cache of the bytes of an encoding's tokens."""

    def __init__(self, encoding: Encoding) -> None:
        self.encoding = encoding

    def __missing__(self, token: int) -> bytes:
        self[token] = data = bytes_of_id(self.encoding, token)
        return data


_latest: deque[_TokenBytes] = deque(maxlen=4)


def _token_bytes(encoding: Encoding) -> _TokenBytes:
    for cached in tuple(_latest):
        if cached.encoding is encoding:
            return cached
    new = _TokenBytes(encoding)
    _latest.append(new)
    return new


def bytes_of_ids(encoding: Encoding, tokens: Sequence[int]) -> bytes:
    """Return the joined bytes of several tokens, each as `bytes_of_id` returns them.

    Unlike tiktoken's `decode_bytes`, this does not release Python's global lock, so that no other
    thread interrupts it.
    """
    return b"".join(map(_token_bytes(encoding).__getitem__, tokens))


def packed(ids: object) -> object:
    """Return a list of Python integers as an int32 array, and any other object unchanged.

    All later checks of an array are faster than one of a list. A list of larger integers is
    unchanged, so that these checks report them.
    """
    if isinstance(ids, list) and ids and [*map(type, ids)].count(int) == len(ids):
        with suppress(struct.error):  # faster than NumPy's conversions
            return np.frombuffer(struct.pack(f"{len(ids)}i", *ids), np.int32)
    return ids


def as_array(ids: object, name: str) -> np.ndarray:
    """Return token ids as a NumPy array.

    Raises InputError for masked arrays and booleans, which NumPy would convert without an error,
    and ValueError or TypeError for objects that NumPy cannot convert.
    """
    entries = ids if isinstance(ids, (list, tuple)) else ()
    types = {type(ids), *map(type, entries)}  # a set is faster to check than all entries
    if bool in types or np.bool_ in types:
        for index, entry in enumerate(entries):
            if isinstance(entry, (bool, np.bool_)):
                raise InputError(f"{name}: token {index} is {entry!r}: expected an integer")
    if any(issubclass(each, np.ma.MaskedArray) for each in types):
        raise InputError(f"{name}: expected token ids, got a masked array: use .compressed()")
    return as_numpy(name, ids)


def row_of_ids(value: object, name: str, text: str = "") -> np.ndarray:
    """Return `value` as integers (T,). `text`: other valid kinds of input, named in errors."""
    try:
        ids = as_array(value, name)
    except InputError:
        raise
    except (TypeError, ValueError, OverflowError) as error:  # ragged list, CuPy array, huge int
        raise InputError(f"{name}: expected {text}token ids: {error}") from error
    if ids.dtype.kind in "fO" and isinstance(value, list) and {*map(type, value)} == {int}:
        return np.array(value, object)  # Python integers that do not fit int64; never valid ids
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise InputError(
            f"{name}: expected {text}a row of integers, got {type(value).__name__} "
            f"of {ids.dtype}, shape {ids.shape}"
        )
    return ids


def ids_to_decode(tokens: object, known: Container[int]) -> list[int]:
    """Return token ids as a list of int. Raises InputError for an id that is not in `known`."""
    ids: list[int] = row_of_ids(tokens, "tokens").tolist()
    for at, token in enumerate(ids):
        if token not in known:
            raise InputError(f"tokens: id {token} at {at}: the tokenizer has no such token")
    return ids


def is_rust_failure(error: BaseException) -> bool:
    """Return whether an error comes from the Rust code of tiktoken or tokenizers.

    A panic arrives as a BaseException without a public class; tokenizers also raises Exception.
    """
    return type(error) is Exception or type(error).__name__ == "PanicException"


@cache
def byte_characters() -> dict[int, str]:
    """Return {byte: printable character that represents the byte in GPT-2's vocabulary files}."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {byte: chr(256 + i) for i, byte in enumerate(others)}
    return {**{byte: chr(byte) for byte in printable}, **shifted}


@cache
def _to_latin1() -> dict[int, str]:
    """Return a table for str.translate: a byte's printable character → its Latin-1 character.

    Other characters below 256 become U+FFFF, which Latin-1 cannot encode.
    """
    others: dict[int, Any] = dict.fromkeys(range(256), "\uffff")
    return others | {ord(char): chr(byte) for byte, char in byte_characters().items()}


def bytes_of_all(tokens: Sequence[str]) -> list[bytes]:
    """Return tokens' bytes. Raises ValueError for characters not in `byte_characters`."""
    try:
        text = "".join(tokens).translate(_to_latin1()).encode("latin-1")
    except UnicodeEncodeError:
        raise ValueError("model.vocab: expected tokens of GPT-2's characters for bytes") from None
    ends = list(accumulate(map(len, tokens)))
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def bytes_of(token: str) -> bytes:
    """Return the bytes that a token in a vocabulary file stands for.

    A token with a character outside GPT-2's table is encoded as UTF-8, as the ByteLevel decoder of
    the package tokenizers does.
    """
    try:
        return token.translate(_to_latin1()).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode("utf-8", errors="surrogatepass")

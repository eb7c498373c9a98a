"""Read tokenizer.json, the format of Hugging Face `tokenizers`.

Pipelines that split text into words like GPT-2 or GPT-4 run with tiktoken. tiktoken merges in the
order of token ids, tokenizers in the order of the list of merges; `_merges_problem` determines
whether both give the same ids. Other pipelines run with the package tokenizers, or are rejected
with the name of the unsupported setting.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain, repeat
from operator import add
from typing import Any

import numpy as np
import tiktoken
from numpy.typing import NDArray

from gpt2block.errors import require
from gpt2block.files.checkpoints.patterns import SPLITS
from gpt2block.files.checkpoints.tokenizer_specs import BYTE_LEVEL
from gpt2block.files.tokenizers.encoding import (
    UTF_8,
    TokenizersEncoding,
    byte_characters,
    bytes_of,
    bytes_of_all,
    ids_to_decode,
    is_rust_failure,
    steps_of,
)

# Regular expressions: GPT-2's, which splits text into words; one that matches the entire text.
SPLIT_WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SPLIT_NOTHING = r"(?s:.+)"

_LARGEST_ID = 2**31 - 1  # token ids are int32
_SPLIT: dict[str, object] = {"type": "Split", "pattern": None, "invert": False}
_MODEL = {"type", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix",
          "fuse_unk", "byte_fallback", "ignore_merges", "vocab", "merges"}  # fmt: skip


class TiktokenEncoding(tiktoken.Encoding):
    """An `Encoding` that encodes with tiktoken. `end_id`: id of the token that ends a text."""

    end_id: int | None = None

    def decode(self, tokens: Sequence[int], errors: str = "replace") -> str:
        """Return the text of `tokens`. `errors`: as in bytes.decode. Raises for unknown ids."""
        return super().decode(ids_to_decode(tokens, self._ids), errors)

    @cached_property
    def _ids(self) -> frozenset[int]:
        return frozenset((*self._mergeable_ranks.values(), *self._special_tokens.values()))


# An added token, which is matched in a text before the BPE model is applied
Token = Mapping[str, Any]


def read(name: str, spec: Any) -> TiktokenEncoding | TokenizersEncoding:
    """Return the tokenizer described by `spec`, a parsed tokenizer.json.

    Raises ValueError for unsupported settings; a damaged file may also raise KeyError, TypeError or
    AttributeError.
    """
    model = spec["model"]
    vocab: dict[str, int] = model["vocab"]
    added: list[Token] = spec.get("added_tokens") or []
    fallback = bool(model.get("byte_fallback")) and _is_sentence_piece(spec)
    if not fallback:
        _check_pipeline(spec)
    _check_model(model, fallback)
    _check_ids(vocab, added)
    if fallback:
        return _by_tokenizers(name, spec, added, "model.byte_fallback", True)
    parts = _parts(model["merges"])
    problem = (
        _pipeline_problem(spec)
        or _added_problem(vocab, added)
        or _merges_problem(vocab, parts, {token["content"] for token in added})
    )
    if problem:
        return _by_tokenizers(name, spec, added, problem)
    special = {token["content"]: token["id"] for token in added}
    ordinary = {token: rank for token, rank in vocab.items() if token not in special}
    ranks = dict(zip(bytes_of_all(list(ordinary)), ordinary.values(), strict=True))
    split = _split_of(spec) or SPLIT_WORDS
    return TiktokenEncoding(name=name, pat_str=split, mergeable_ranks=ranks, special_tokens=special)


def id_of(spec: Any, content: str | None) -> int | None:
    """Return the id of the added or ordinary token `content`; None if there is no such token."""
    added = {token["content"]: token["id"] for token in spec.get("added_tokens") or []}
    id: int | None = added.get(content, spec["model"]["vocab"].get(content))
    return id


def adds_prefix_space(spec: object) -> bool:
    """Return whether the tokenizer adds a space before every text."""
    return any(step.get("add_prefix_space") for step in steps_of(spec, "pre_tokenizer"))


def check_distinct(ids: Sequence[Any]) -> None:
    """Raise ValueError unless ids are different non-negative integers that fit int32."""
    valid = set(map(type, ids)) <= {int} and min(ids, default=0) >= 0
    if not valid or max(ids, default=0) > _LARGEST_ID or len(set(ids)) != len(ids):
        raise ValueError(f"expected ids that are different integers from 0 to {_LARGEST_ID}")


def _parts(merges: Sequence[Any]) -> list[str]:
    """Return a flat list of every merge's left and right token; old files have "left right"."""
    if set(map(type, merges)) <= {str}:
        whole = {merge.count(" ") for merge in merges} <= {1}
        parts = " ".join(merges).split(" ") if merges else []
    else:
        whole = set(map(type, merges)) <= {list} and set(map(len, merges)) <= {2}
        parts = list(chain(*merges))
    if not whole or "" in parts or not set(map(type, parts)) <= {str}:
        raise ValueError("model.merges: expected two tokens in each")
    return parts


def _check_pipeline(spec: Any) -> None:
    """Raise ValueError unless the tokenizer is byte-level, so that any token decodes alone."""
    steps = steps_of(spec, "normalizer", "pre_tokenizer")
    if not any(step["type"] == "ByteLevel" for step in steps):
        step = spec.get("pre_tokenizer") or {"type": "none"}
        raise ValueError(f"expected a ByteLevel pre_tokenizer, got {step['type']!r}")
    decoders = [step["type"] for step in steps_of(spec, "decoder")]
    if decoders not in ([], ["ByteLevel"]):
        raise ValueError(f"decoder: expected ByteLevel, got {', '.join(map(str, decoders))}")


def _is_sentence_piece(spec: object) -> bool:
    """Return whether a tokenizer has SentencePiece's decoders only, and no ByteLevel step.

    Tokens can then be decoded individually: ▁ becomes a space, and only the first space of a text
    is removed.
    """
    before = [step["type"] for step in steps_of(spec, "normalizer", "pre_tokenizer")]
    decoders = [step["type"] for step in steps_of(spec, "decoder")]
    known = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
    return "ByteFallback" in decoders and set(decoders) <= known and "ByteLevel" not in before


def _check_model(model: Any, fallback: bool) -> None:
    """Raise ValueError unless the model is a BPE with supported settings.

    fallback: whether <0x00> … <0xFF> stand for bytes; else the vocabulary is byte-level.
    """
    kind = model.get("type", "BPE" if "merges" in model else None)
    if kind != "BPE":
        raise ValueError(f"expected a BPE model, got {kind!r}")
    if model.get("dropout"):
        raise ValueError(
            f"model.dropout is {model['dropout']!r}: the ids of a text would be random: set it to "
            "null"
        )
    for setting in ("byte_fallback", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(setting) and not (fallback and setting == "byte_fallback"):
            raise ValueError(
                f"model.{setting} is {model[setting]!r}: not supported in a byte-level vocabulary"
            )


def _check_ids(vocab: Mapping[str, object], added: Sequence[Token]) -> None:
    """Raise ValueError unless every token is a text with one id, and every id has one token."""
    new = {}
    for token in added:
        content, id_ = token["content"], token["id"]
        if not isinstance(content, str) or not content:
            raise ValueError(f"added_tokens: expected text as content, got {content!r}")
        if id_ != vocab.get(content, id_):
            raise ValueError(
                f"added_tokens: {content!r} has id {id_}, and in model.vocab {vocab[content]}"
            )
        if content not in vocab:
            new[content] = id_
    check_distinct([*vocab.values(), *new.values()])


def _pipeline_problem(spec: Any) -> str | None:
    """Return the first setting, other than tokens and merges, that tiktoken does not support."""
    if spec.get("normalizer") is not None:
        return f"normalizer {spec['normalizer']['type']}"
    if _split_of(spec) is None:
        return f"pre_tokenizer {spec['pre_tokenizer']['type']}"
    if adds_prefix_space(spec):
        return "pre_tokenizer.add_prefix_space"
    processor = spec.get("post_processor")
    if processor is not None and not _adds_nothing(processor):
        return f"post_processor {processor['type']}"
    if spec["model"].get("ignore_merges"):
        return "model.ignore_merges"
    unknown = spec["model"].keys() - _MODEL
    return f"model.{min(unknown)}" if unknown else None


def _split_of(spec: object) -> str | None:
    """Return a regular expression with which tiktoken splits like the pre_tokenizer, else None.

    Both packages have the same classes of characters. Behaviors Isolated and inverted Removed are
    equivalent for the patterns in SPLITS, whose matches cover every text completely.
    """
    *before, last = steps_of(spec, "pre_tokenizer")
    if last["type"] != "ByteLevel" or not last.keys() <= BYTE_LEVEL.keys():
        return None
    words = last.get("use_regex", True) is not False
    if not before:
        return SPLIT_WORDS if words else SPLIT_NOTHING
    kept = (_SPLIT | {"behavior": "Isolated"}, _SPLIT | {"behavior": "Removed", "invert": True})
    pattern: str | None = before[0].get("pattern", {}).get("Regex")
    known = len(before) == 1 and {**before[0], "pattern": None} in kept and pattern in SPLITS
    return pattern if known and not words else None


def _adds_nothing(processor: Any) -> bool:
    """Return whether a post-processor adds no ids to a text."""
    if processor["type"] == "TemplateProcessing":
        return [list(part) for part in processor["single"]] == [["Sequence"]]
    return bool(processor["type"] == "ByteLevel")


def _added_problem(vocab: Mapping[str, int], added: Sequence[Token]) -> str | None:
    """Describe the first added token that tiktoken would match differently; else return None."""
    for token in added:
        content, flags = token["content"], ("single_word", "lstrip", "rstrip")
        # The package tokenizers requires the key "special".
        if not token.get("special", True) or any(map(token.get, flags)):
            return f"added token {content!r}, which is not a plain special token"
        if bytes_of(content) != content.encode():
            return f"added token {content!r}, whose characters stand for bytes"
    new = (token for token in added if token["content"] not in vocab)
    for index, token in enumerate(new, len(vocab)):
        if token["id"] != index:
            return f"added token {token['content']!r} with id {token['id']} rather than {index}"
    return None


def _merges_problem(
    vocab: Mapping[str, int], parts: Sequence[str], special: set[str]
) -> str | None:
    """Return why tiktoken's ids may differ from ids by the list of merges; None if they never do.

    parts: the two tokens of each merge, merge by merge.

    tiktoken joins two neighbours whenever their bytes form a token, the smallest id first, and maps
    a word that is a token directly to its id. The list of merges gives the same ids if

    - the merges produce different tokens, with ids in the order of the merges;
    - both parts of a merge are bytes or results of an earlier merge, so that the merges of a word
      are also applied in order;
    - there are no other tokens, except special tokens;
    - the earlier merges turn the bytes of each token into exactly the two parts of its merge. Then
      no other two neighbours can have the bytes of this token.
    """
    known = {byte: char for byte, char in byte_characters().items() if char in vocab}
    if not known.keys() >= UTF_8:
        return "bytes without a token"
    order = {char: index for index, char in enumerate(known.values())}
    first = len(order)
    merged = list(map(add, parts[::2], parts[1::2]))
    ids = list(map(vocab.get, merged))
    if None in ids:
        raise ValueError(f"model.merges: no id for {merged[ids.index(None)]!r}")
    if (np.diff(np.array(ids, np.int64)) <= 0).any():
        return "model.merges that are not in the order of ids"
    order.update(zip(merged, range(first, first + len(merged)), strict=True))
    if not special.isdisjoint(order):
        return f"special token {min(special & order.keys())!r} that merges also produce"
    if len(vocab) != len(order) + len(special & vocab.keys()):
        other = min(vocab.keys() - order.keys() - special, default="a byte")
        return f"model.vocab with {other!r}, which no merge produces"
    index = np.array(list(map(order.get, parts, repeat(len(order)))), np.int64)
    left, right = index[::2], index[1::2]
    if (np.maximum(left, right) >= np.arange(first, len(order))).any():
        return "model.merges of tokens that a later merge produces"
    unused = _unreachable(left, right, first)
    return None if unused is None else f"model.merges that never produce {merged[unused]!r}"


def _unreachable(left: NDArray[np.int64], right: NDArray[np.int64], first: int) -> int | None:
    """Return the index of a merge that BPE does not apply to its own token's bytes, or None.

    Tokens are numbered: `first` bytes, then one token for each merge of left[i] and right[i].

    The bytes of left[i] followed by the bytes of right[i] become these two tokens, unless an
    earlier merge joins tokens across their border. To find such a merge, all merges are undone step
    by step, the latest first: `one` and `two` are the tokens at the border, and `limit` is the last
    undone merge. A merge smaller than `limit` that joins `one` and `two` would have been applied
    before `limit`, which would then not apply. (The left one of two equal merges is applied first:
    this is the merge at the border if `two` was undone.)
    """
    total = first + len(left)
    merges = np.arange(first, total)
    keys = left * total + right
    by_key = np.argsort(keys)
    keys = keys[by_key]
    # First merge in which each token is the left part, and first in which it is the right part. A
    # pair of tokens is looked up only if both of these merges precede `limit`.
    as_left, as_right = np.full(total, total), np.full(total, total)
    np.minimum.at(as_left, left, merges)
    np.minimum.at(as_right, right, merges)
    which, one, two, limit = merges, left, right, merges
    while len(which):
        possible = np.flatnonzero((as_left[one] < limit) & (as_right[two] < limit))
        pair = one[possible] * total + two[possible]
        index = np.minimum(np.searchsorted(keys, pair), len(keys) - 1)
        joined = (keys[index] == pair) & (by_key[index] + first < limit[possible])
        if joined.any():
            return int(which[possible[joined][0]]) - first
        more = np.maximum(one, two) >= first
        which, one, two = which[more], one[more], two[more]
        undo = one > two
        limit = np.where(undo, one, two + 1)
        one, two = (
            np.where(undo, right[np.where(undo, one - first, 0)], one),
            np.where(undo, two, left[np.where(undo, 0, two - first)]),
        )
    return None


def _by_tokenizers(
    name: str, spec: Any, added: Iterable[Token], problem: str, fallback: bool = False
) -> TokenizersEncoding:
    """Create a TokenizersEncoding. Raises ValueError if package tokenizers is missing or fails."""
    require(f"it has {problem}, which", "tokenizers", "tokenizers")
    decoder = {} if steps_of(spec, "decoder") else {"decoder": BYTE_LEVEL}
    whole = spec | {"truncation": None, "padding": None} | decoder
    definition = json.dumps(whole, ensure_ascii=False)
    try:
        encoding = TokenizersEncoding(name, definition, fallback)
        around = encoding.added_around()
    except BaseException as error:
        if not is_rust_failure(error):
            raise
        raise ValueError(f"the package tokenizers rejects it: {error}") from error
    if around is None:
        raise ValueError(
            f"post_processor {spec['post_processor']['type']}: expected one that adds tokens "
            "before and after a text only: set it to null, and add the tokens to the text or its "
            "ids if the model needs them"
        )
    encoding.prefix, encoding.suffix = around
    for token in added:
        actual = encoding.token_to_id(token["content"])
        if actual != token["id"]:
            raise ValueError(
                f"added_tokens: {token['content']!r} has id {token['id']}, and {actual} in the "
                "package tokenizers: expected ids that follow the vocabulary's"
            )
    return encoding

"""Random vocabularies of byte-pair encoding, and tokenizer.json files as GPT-2's for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from fuzzing import Rng

END = "<|endoftext|>"


class Vocabulary(NamedTuple):
    """Tokens in GPT-2's order: 256 bytes, then the results of merges."""

    ids: dict[str, int]  # token in the characters that represent bytes in files → id
    merges: list[tuple[str, str]]
    proper: bool  # every merge can occur, as in a learned vocabulary


def byte_characters() -> list[str]:
    """Return for each byte the character that represents it in vocabulary files."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    found, substitute = [], 256
    for byte in range(256):
        found.append(chr(byte if byte in printable else substitute))
        substitute += byte not in printable
    return found


CHARACTERS = byte_characters()
BYTES = Vocabulary({char: byte for byte, char in enumerate(CHARACTERS)}, [], True)


def random_vocabulary(rng: Rng, proper: bool) -> Vocabulary:
    """Return merges of few different characters, so that they occur in the texts."""
    ids = {char: index for index, char in enumerate(CHARACTERS)}
    parts = [CHARACTERS[b] for b in b"ab cdest'1.\n"]
    if rng.chance(0.5):
        parts += [CHARACTERS[b] for b in "é🎭".encode()]
    merges: list[tuple[str, str]] = []
    for _ in range(rng.whole(0, 25)):
        one, other = (parts[rng.whole(len(parts))] for _ in range(2))
        joined = one + other
        if joined in ids or (proper and by_rank(list(joined), ids) != [one, other]):
            continue
        ids[joined] = len(ids)
        merges.append((one, other))
        parts.append(joined)
    return Vocabulary(ids, merges, proper)


def by_rank(parts: list[str], ids: dict[str, int]) -> list[str]:
    """Apply byte-pair encoding, in which a pair's rank is the id of the merged token."""
    while True:
        pairs = [(ids.get(a + b), i) for i, (a, b) in enumerate(pairwise(parts))]
        ranked = [(rank, i) for rank, i in pairs if rank is not None]
        if not ranked:
            return parts
        i = min(ranked)[1]
        parts = [*parts[:i], parts[i] + parts[i + 1], *parts[i + 2 :]]


def byte_level(**options: bool) -> dict[str, Any]:
    usual = {"add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {"type": "ByteLevel", **usual, **options}


def split(pattern: str, behavior: str = "Isolated", kind: str = "Regex") -> dict[str, Any]:
    return {"type": "Split", "pattern": {kind: pattern}, "behavior": behavior, "invert": False}


def sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def template(*parts: str, token_id: int = 97) -> dict[str, Any]:
    """Return a post-processor that adds tokens with this id. parts: tokens; "" for the text."""
    single: list[dict[str, Any]] = [
        {"SpecialToken": {"id": part, "type_id": 0}}
        if part
        else {"Sequence": {"id": "A", "type_id": 0}}
        for part in parts
    ]
    known = {part: {"id": part, "ids": [token_id], "tokens": [part]} for part in parts if part}
    return {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": known}


def added_token(index: int, content: str, **options: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": index, "content": content, **flags, "special": True, **options}


def spec_of(vocab: Mapping[str, int], merges: Sequence[Any]) -> dict[str, Any]:
    """Return a tokenizer.json with GPT-2's pipeline."""
    unset = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
    flags = dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False)
    model = {"type": "BPE", **dict.fromkeys(unset), **flags}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
        "normalizer": None, "pre_tokenizer": byte_level(), "post_processor": None,
        "decoder": byte_level(), "model": {**model, "vocab": dict(vocab), "merges": list(merges)},
    }  # fmt: skip


def piece_spec(letters: str) -> dict[str, Any]:
    """Return a tokenizer.json as that of Llama 2, in which two letters have merges.

    It has byte_fallback, ▁ for a space, and <s> before a text.
    """
    one, both = letters[0], letters
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    added = [added_token(index, name) for index, name in enumerate(names[:3])]
    names += ["▁", *letters, both, f"▁{one}", f"▁{both}"]
    spec = spec_of({name: index for index, name in enumerate(names)}, [])
    spec["model"] |= {"merges": [[*letters], ["▁", one], ["▁", both]],
                      "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}  # fmt: skip
    to_pieces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    to_text = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    prepend = {"type": "Prepend", "prepend": "▁"}
    decoders = [to_text, {"type": "ByteFallback"}, {"type": "Fuse"}, strip]
    return spec | {
        "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": [prepend, to_pieces]},
        "pre_tokenizer": None,
        "post_processor": template("<s>", "", token_id=1),
        "decoder": {"type": "Sequence", "decoders": decoders},
    }


def plain_spec(vocabulary: Vocabulary) -> dict[str, Any]:
    """Return GPT-2's tokenizer.json with this vocabulary."""
    ids = {**vocabulary.ids, END: len(vocabulary.ids)}
    spec = spec_of(ids, [list(pair) for pair in vocabulary.merges])
    added = [added_token(len(vocabulary.ids), END)]
    return spec | {"added_tokens": added, "post_processor": byte_level(trim_offsets=False)}


# Settings that GPT-2's tokenizer.json does not have

_SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
PRE_TOKENIZERS: tuple[Any, ...] = (
    byte_level(use_regex=False),
    byte_level(add_prefix_space=True),
    byte_level(trim_offsets=False),
    sequence(byte_level()),
    sequence(byte_level(), byte_level(use_regex=False)),
    sequence(byte_level(use_regex=False), byte_level()),
    sequence(byte_level(), byte_level()),
    sequence(split(_SPLIT), byte_level(use_regex=False)),
    sequence(split(_SPLIT), byte_level()),
    sequence(split("[a-b]"), byte_level(use_regex=False)),
    sequence(split(r"\d", "Isolated"), byte_level(use_regex=False)),
    sequence(split(r"\s+", "MergedWithNext"), byte_level(use_regex=False)),
    sequence(split(r"\s", "Removed"), byte_level()),
    sequence(split(" ", "Removed", "String"), byte_level()),
    sequence({"type": "Digits", "individual_digits": True}, byte_level()),
    sequence({"type": "Whitespace"}, byte_level()),
    {"type": "Whitespace"},
    {"type": "WhitespaceSplit"},
    {"type": "BertPreTokenizer"},
    {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
    None,
)
NORMALIZERS: tuple[Any, ...] = (
    {"type": "NFC"}, {"type": "NFKC"}, {"type": "Lowercase"}, {"type": "StripAccents"},
    {"type": "ByteLevel"}, {"type": "Sequence", "normalizers": []},
    {"type": "Prepend", "prepend": "a"}, {"type": "Prepend", "prepend": "b"},
    {"type": "Replace", "pattern": {"String": "a"}, "content": "b"},
)  # fmt: skip
DECODERS: tuple[Any, ...] = (
    None,
    {"type": "WordPiece", "prefix": "##", "cleanup": True},
    {"type": "Sequence", "decoders": [byte_level()]},
    {"type": "Fuse"},
)
MODEL_OPTIONS: Mapping[str, tuple[Any, ...]] = {
    "dropout": (0.0, 0.5, 1.0),
    "unk_token": ("a", END, "missing"),
    "continuing_subword_prefix": ("##", "a", "b", ""),
    "end_of_word_suffix": ("</w>", "b", ""),
    "fuse_unk": (True,),
    "byte_fallback": (True,),
    "ignore_merges": (True,),
}
TRUNCATION = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
PADDING = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None,
           "pad_id": 3, "pad_type_id": 0, "pad_token": "#"}  # fmt: skip

"""Random tokenizer files: the ids are those of the package tokenizers, or there is an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2block import CheckpointError
from gpt2block.text import tokenizer
from gpt2block.text.encoding import byte_characters

tokenizers = pytest.importorskip("tokenizers")

ALPHABET = list(byte_characters().values())
NEVER = [byte_characters()[byte] for byte in (0xC0, 0xC1, *range(0xF5, 0x100))]  # not in UTF-8
LETTERS = ["a", "b", "c", "Ġ", "Ã", "©"]  # the last two are the bytes of é
TEXTS = st.lists(
    st.sampled_from(["a", "b", "c", " ", "é", "ab", "abc", "aaa", "  ", "\n", "1", "!", "<x>", "Z",
                     "it's", "\x85", "\u2003", "\x1c", "🎭", "b" * 300, "abc" * 90]),
    max_size=8,
).map("".join)  # fmt: skip


@st.composite
def byte_pairs(draw: st.DrawFn) -> tuple[dict[str, int], list[list[str]]]:
    """A vocabulary and merges: mostly as a training writes them, at times in any order."""
    made, merges = list(LETTERS), []
    for _ in range(draw(st.integers(0, 9))):
        pair = [draw(st.sampled_from(made)), draw(st.sampled_from(made))]
        if "".join(pair) not in made or draw(st.integers(0, 9)) == 0:
            merges.append(pair)
            made.append("".join(pair))
    tokens = [*ALPHABET, *dict.fromkeys("".join(pair) for pair in merges)]
    if draw(st.integers(0, 5)) == 0:
        tokens.append(draw(st.sampled_from(["abab", "Ġb", "zz"])))
    if draw(st.integers(0, 3)) == 0:
        tokens = draw(st.permutations(tokens))
    if draw(st.integers(0, 3)) == 0:
        merges = draw(st.permutations(merges))
    if draw(st.integers(0, 7)) == 0:
        merges = merges[: len(merges) // 2]
    return {token: index for index, token in enumerate(dict.fromkeys(tokens))}, merges


def byte_level(**changed: Any) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
            "use_regex": True, **changed}  # fmt: skip


def added(content: str, token_id: int, **changed: bool) -> dict[str, Any]:
    return {"id": token_id, "content": content, "single_word": False, "lstrip": False,
            "rstrip": False, "normalized": False, "special": True, **changed}  # fmt: skip


def split(pattern: str, behavior: str = "Isolated") -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": False}


def template(added: bool = True) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    if added:
        parts.insert(0, {"SpecialToken": {"id": "a", "type_id": 0}})
    special = {"a": {"id": "a", "ids": [97], "tokens": ["a"]}}
    return {"type": "TemplateProcessing", "single": parts, "pair": parts, "special_tokens": special}


PRE_TOKENIZERS = [
    byte_level(use_regex=False),
    byte_level(add_prefix_space=True),
    {"type": "Sequence", "pretokenizers": [byte_level()]},
    {"type": "Sequence", "pretokenizers": [split("[a-b]"), byte_level(use_regex=False)]},
    {"type": "Sequence", "pretokenizers": [split(r"\s", "Removed"), byte_level()]},
    {"type": "Sequence", "pretokenizers": [{"type": "Whitespace"}, byte_level()]},
    {"type": "Sequence", "pretokenizers": [byte_level(), byte_level()]},
    {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True},
                                           byte_level()]},
    {"type": "Whitespace"},
    {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
    None,
]  # fmt: skip
NORMALIZERS = [{"type": "Lowercase"}, {"type": "NFKC"}, {"type": "ByteLevel"},
               {"type": "Prepend", "prepend": "b"},
               {"type": "Replace", "pattern": {"String": "a"}, "content": "b"}]  # fmt: skip
DECODERS = [None, {"type": "WordPiece", "prefix": "##", "cleanup": True},
            {"type": "Sequence", "decoders": [byte_level()]}, {"type": "Fuse"}]  # fmt: skip
MODEL_SETTINGS = [{"dropout": 0.5}, {"dropout": 0.0}, {"ignore_merges": True},
                  {"byte_fallback": True}, {"end_of_word_suffix": "b"}, {"end_of_word_suffix": ""},
                  {"continuing_subword_prefix": "b"}, {"continuing_subword_prefix": ""},
                  {"unk_token": "a"}, {"fuse_unk": True, "unk_token": "a"}]  # fmt: skip
TRUNCATION = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
PADDING = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None,
           "pad_id": 1, "pad_type_id": 0, "pad_token": "a"}  # fmt: skip


@st.composite
def files(draw: st.DrawFn) -> dict[str, Any]:
    """A tokenizer.json that is GPT-2's pipeline except for at most two settings."""
    vocab, merges = draw(byte_pairs())
    spec: dict[str, Any] = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
        "normalizer": None, "pre_tokenizer": byte_level(), "post_processor": None,
        "decoder": byte_level(),
        "model": {"type": "BPE", "dropout": None, "unk_token": None,
                  "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": False,
                  "byte_fallback": False, "ignore_merges": False, "vocab": vocab,
                  "merges": draw(st.sampled_from([merges, [" ".join(m) for m in merges]]))},
    }  # fmt: skip
    end = len(vocab)
    changes: dict[str, list[Any]] = {
        "pre_tokenizer": PRE_TOKENIZERS,
        "normalizer": NORMALIZERS,
        "decoder": DECODERS,
        "post_processor": [byte_level(trim_offsets=False), template(), template(added=False)],
        "truncation": [TRUNCATION],
        "padding": [PADDING],
        "added_tokens": [
            [added("<x>", end)],
            [added("<x>", end), added("Z", end + 1)],
            [added("<x>", end + 1)],
            [added("a", vocab["a"])],
            [added("a", end)],
            [added("<x>", end, special=False)],
            [added("Z", end, special=False, single_word=True)],
            [added(" b", end, special=False), added("<x>", end + 1, lstrip=True, rstrip=True)],
        ],
        "model": [spec["model"] | setting for setting in MODEL_SETTINGS],
    }
    for part in draw(st.lists(st.sampled_from(sorted(changes)), max_size=2, unique=True)):
        spec[part] = draw(st.sampled_from(changes[part]))
    absent = draw(st.sampled_from([(), (), (), ("Z",), NEVER, NEVER, (*NEVER, "\u0104")]))
    kept = {token: index for token, index in vocab.items() if token not in absent}
    spec["model"] = {**spec["model"], "vocab": kept}
    return spec


def expected_ids(spec: dict[str, Any], text: str, special: bool = False) -> list[int]:
    """With the ids that the post-processor adds, once where the text begins with them."""
    known = tokenizers.Tokenizer.from_str(json.dumps(spec))
    known.no_truncation()
    known.no_padding()
    known.encode_special_tokens = not special
    ids: list[int] = known.encode(text, add_special_tokens=False).ids
    whole: list[int] = known.encode(text).ids
    before = whole[: len(whole) - len(ids)]
    return ids if special and ids[: len(before)] == before else whole


@settings(max_examples=150)
@given(spec=files(), texts=st.lists(TEXTS, min_size=1, max_size=4), data=st.data())
def test_ids_are_those_of_tokenizers_or_there_is_an_error(
    tmp_path_factory: pytest.TempPathFactory,
    spec: dict[str, Any],
    texts: list[str],
    data: st.DataObject,
) -> None:
    path = tmp_path_factory.mktemp("json") / "tokenizer.json"
    path.write_text(json.dumps(spec), encoding="utf-8")
    try:
        encoding = tokenizer.from_path(path, 1000)
    except CheckpointError:
        return
    known = tokenizers.Tokenizer.from_str(json.dumps(spec))
    for text in filter(None, texts):
        ids = tokenizer.encode(encoding, text)
        assert ids == expected_ids(spec, text)
        assert tokenizer.encode(encoding, text, special=True) == expected_ids(spec, text, True)
        if spec["decoder"]:
            assert encoding.decode(ids) == known.decode(ids, skip_special_tokens=False)
    if spec["decoder"]:
        every = sorted(known.get_vocab(with_added_tokens=True).values())
        ids = data.draw(st.lists(st.sampled_from(every), max_size=9))
        assert encoding.decode(ids) == known.decode(ids, skip_special_tokens=False)


@settings(max_examples=75)
@given(pairs=byte_pairs(), texts=st.lists(TEXTS, min_size=1, max_size=4))
def test_two_files_give_the_ids_of_tokenizers(
    tmp_path_factory: pytest.TempPathFactory,
    pairs: tuple[dict[str, int], list[list[str]]],
    texts: list[str],
) -> None:
    folder = tmp_path_factory.mktemp("pair")
    vocab, merges = str(folder / "vocab.json"), str(folder / "merges.txt")
    Path(vocab).write_text(json.dumps(pairs[0]), encoding="utf-8")
    lines = ["#version: 0.2", *map(" ".join, pairs[1])]
    Path(merges).write_text("\n".join(lines) + "\n", encoding="utf-8")
    encoding = tokenizer.from_path(folder, 1000)
    known = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(vocab, merges))
    known.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    for text in filter(None, texts):
        assert tokenizer.encode(encoding, text) == known.encode(text).ids


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 300) | st.floats() | st.text(max_size=3)
    | st.sampled_from([2**31, 2**32, 10**400, "\ud800", "Sequence", "ByteLevel", "BPE", "ab"]),
    lambda values: st.lists(values, max_size=3)
    | st.dictionaries(st.sampled_from(["type", "pretokenizers", "id", "content", "x"]), values),
    max_leaves=4,
)  # fmt: skip


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every container inside `value` with each of its keys, of large ones the first ten."""
    keys = list(value) if isinstance(value, dict) else range(len(value))
    inner = [value[key] for key in keys[:10] if isinstance(value[key], (dict, list))]
    return [(value, key) for key in keys[:10]] + [place for each in inner for place in places(each)]


@settings(max_examples=75)
@given(spec=files(), data=st.data())
def test_a_damaged_file_is_read_as_tokenizers_does_or_an_error(
    tmp_path_factory: pytest.TempPathFactory, spec: dict[str, Any], data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    spec = json.loads(json.dumps(spec))  # parts of its own
    for _ in range(data.draw(st.integers(1, 3))):
        known_places = places(spec)
        container, key = known_places[data.draw(st.integers(0, len(known_places) - 1))]
        if data.draw(st.booleans()) and isinstance(container, dict):
            del container[key]
        else:
            container[key] = data.draw(ANY_JSON)
    (folder / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")
    try:
        encoding = tokenizer.from_path(folder, 1000)
    except CheckpointError:
        return
    text = "abc <x> Zé  it's"
    ids = tokenizer.encode(encoding, text)
    try:
        known = expected_ids(spec, text)
    except Exception:  # tokenizers is stricter about what may be missing
        return
    assert ids == known


@given(
    settings_given=st.dictionaries(
        st.sampled_from(["add_prefix_space", "add_bos_token", "tokenizer_class"]), ANY_JSON
    ),
    added=ANY_JSON | st.dictionaries(st.sampled_from(["256", "257", "x"]), ANY_JSON),
    two_files=st.booleans(),
)
def test_any_settings_are_read_or_an_error(
    tmp_path_factory: pytest.TempPathFactory,
    settings_given: dict[str, Any],
    added: Any,
    two_files: bool,
) -> None:
    folder = tmp_path_factory.mktemp("settings")
    vocab = {char: index for index, char in enumerate(ALPHABET)}
    if two_files:
        (folder / "vocab.json").write_text(json.dumps(vocab))
        (folder / "merges.txt").write_text("")
        (folder / "added_tokens.json").write_text(json.dumps(added))
    else:
        spec = {"pre_tokenizer": byte_level(), "model": {"vocab": vocab, "merges": []}}
        (folder / "tokenizer.json").write_text(json.dumps(spec))
    config = settings_given | {"added_tokens_decoder": added}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    try:
        encoding = tokenizer.from_path(folder, 1000)
    except CheckpointError:
        return
    prefix = " " if settings_given.get("add_prefix_space") else ""
    assert encoding.decode(tokenizer.encode(encoding, "ab c")) == prefix + "ab c"

"""Tokenizer files: random pipelines and texts, compared with the `tokenizers` package."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers as hugging_face

from fuzzing import Area, Difference, Outcome, accepted, check_equal, refused_or
from fuzzing import gpt2 as plain
from fuzzing.values import odd_text, odd_value, pick
from fuzzing.vocabularies import (
    CHARACTERS,
    END,
    Vocabulary,
    added_token,
    by_rank,
    plain_spec,
    random_vocabulary,
)
from gpt2block import GPT2
from gpt2block.checkpoints import Checkpoint, save_pretrained
from gpt2block.text import tokenizer

_SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def case(rng: np.random.Generator, folder: Path) -> Outcome:
    return pick(rng, *[_json] * 6, *[_pair] * 2, *[_llm_c] * 2, _saved)(rng, folder)


def _byte_level(**options: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True,
        **options,
    }  # fmt: skip


def _split(pattern: str, behavior: str = "Isolated", kind: str = "Regex") -> dict[str, Any]:
    return {"type": "Split", "pattern": {kind: pattern}, "behavior": behavior, "invert": False}


def _sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


PRE_TOKENIZERS: tuple[Any, ...] = (
    _byte_level(use_regex=False),
    _byte_level(add_prefix_space=True),
    _byte_level(trim_offsets=False),
    _sequence(_byte_level()),
    _sequence(_byte_level(), _byte_level(use_regex=False)),
    _sequence(_byte_level(use_regex=False), _byte_level()),
    _sequence(_split(_SPLIT), _byte_level(use_regex=False)),
    _sequence(_split(_SPLIT), _byte_level()),
    _sequence(_split(r"\d", "Isolated"), _byte_level(use_regex=False)),
    _sequence(_split(r"\s+", "MergedWithNext"), _byte_level(use_regex=False)),
    _sequence(_split(" ", "Removed", "String"), _byte_level()),
    _sequence({"type": "Digits", "individual_digits": True}, _byte_level()),
    _sequence({"type": "Whitespace"}, _byte_level()),
    {"type": "Whitespace"},
    {"type": "WhitespaceSplit"},
    {"type": "BertPreTokenizer"},
    {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
    None,
)
NORMALIZERS: tuple[Any, ...] = (
    {"type": "NFC"}, {"type": "NFKC"}, {"type": "Lowercase"}, {"type": "StripAccents"},
    {"type": "Sequence", "normalizers": []}, {"type": "Prepend", "prepend": "a"},
    {"type": "Replace", "pattern": {"String": "a"}, "content": "b"},
)  # fmt: skip
POST_PROCESSORS: tuple[Any, ...] = (
    None,
    {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": END, "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {END: {"id": END, "ids": [256], "tokens": [END]}},
    },
)  # fmt: skip
MODEL_OPTIONS: dict[str, tuple[Any, ...]] = {
    "dropout": (0.0, 0.5, 1.0),
    "unk_token": ("a", END, "missing"),
    "continuing_subword_prefix": ("##", "a", ""),
    "end_of_word_suffix": ("</w>", "b", ""),
    "fuse_unk": (True,),
    "byte_fallback": (True,),
    "ignore_merges": (True,),
    "merges": ([], None),
    "type": ("WordPiece", "WordLevel", "Unigram", None),
}


def _change(rng: np.random.Generator, spec: dict[str, Any], vocabulary: Vocabulary) -> None:
    """Change one setting to a value that GPT-2's tokenizer.json does not have."""
    model, kind = spec["model"], int(rng.integers(10))
    if kind == 0:
        spec["pre_tokenizer"] = pick(rng, *PRE_TOKENIZERS)
    elif kind == 1:
        spec["normalizer"] = pick(rng, *NORMALIZERS)
    elif kind == 2:
        name = str(pick(rng, *MODEL_OPTIONS))
        model[name] = pick(rng, *MODEL_OPTIONS[name])
    elif kind == 3:
        content = str(pick(rng, "ab", "abc", " ", "é", "1", "bdd", "\n", ""))
        options = {name: bool(rng.random() < 0.3) for name in ("single_word", "lstrip", "rstrip")}
        new = added_token(
            len(model["vocab"]),
            content,
            special=False,
            normalized=bool(rng.random() < 0.5),
            **options,
        )
        if rng.random() < 0.3 and vocabulary.merges:
            content = "".join(pick(rng, *vocabulary.merges))
            new |= {"content": content, "id": vocabulary.ids[content]}
        spec["added_tokens"].append(new)
    elif kind == 4:
        spec["truncation"] = {
            "direction": "Right", "max_length": int(rng.integers(1, 9)), "strategy": "LongestFirst",
            "stride": 0,
        }  # fmt: skip
    elif kind == 5:
        spec["padding"] = {
            "strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 3,
            "pad_type_id": 0, "pad_token": "#",
        }  # fmt: skip
    elif kind == 6:
        spec["post_processor"] = pick(rng, *POST_PROCESSORS)
    elif kind == 7:
        rng.shuffle(model["merges"]) if model["merges"] else None
    elif kind == 8:
        names = [name for name in model["vocab"] if name != END]
        order = rng.permutation(len(names)).tolist()
        model["vocab"] = {name: order[i] for i, name in enumerate(names)} | {END: len(names)}
    else:
        spec["model"]["merges"] = (model["merges"] or [])[
            : int(rng.integers(len(vocabulary.merges) + 1))
        ]


def _damage(rng: np.random.Generator, spec: dict[str, Any]) -> None:
    """Remove a field at any depth, or change its value."""
    parent: Any = spec
    for _ in range(int(rng.integers(1, 4))):
        key = pick(rng, *parent)
        if not isinstance(parent[key], dict) or not parent[key]:
            break
        parent = parent[key]
    key = pick(rng, *parent)
    if rng.random() < 0.3:
        del parent[key]
    else:
        parent[key] = pick(rng, odd_value(rng), 2**32, 2**63, -1, 10**30)


def _json(rng: np.random.Generator, folder: Path) -> Outcome:
    """tokenizer.json: GPT-2's pipeline must be accepted; others must be obeyed or refused."""
    vocabulary = random_vocabulary(rng, proper=rng.random() < 0.5)
    spec = plain_spec(vocabulary)
    if rng.random() < 0.3:
        spec["model"]["merges"] = [" ".join(pair) for pair in vocabulary.merges]
    changes = int(rng.choice([0, 1, 1, 2, 3]))
    for _ in range(changes):
        _change(rng, spec, vocabulary)
    damaged = rng.random() < 0.25
    if damaged:
        _damage(rng, spec)
    text = json.dumps(spec)
    if damaged and rng.random() < 0.2:
        text = text[: int(rng.integers(len(text)))]
    path = folder / "tokenizer.json"
    path.write_text(text)
    size = len(vocabulary.ids) + 1 + 3 * bool(changes)
    return _check(rng, folder, size, text, exact=not (changes or damaged) and vocabulary.proper)


def _pair(rng: np.random.Generator, folder: Path) -> Outcome:
    """vocab.json and merges.txt, or the same with OpenAI's names."""
    vocabulary = random_vocabulary(rng, proper=rng.random() < 0.7)
    spec = plain_spec(vocabulary)
    ids, merges = dict(spec["model"]["vocab"]), [" ".join(pair) for pair in vocabulary.merges]
    exact = vocabulary.proper
    kind = int(rng.choice([0, 0, 1, 2, 3, 4]))
    if kind == 1 and merges:
        rng.shuffle(merges)
        exact = merges == [" ".join(pair) for pair in vocabulary.merges] and exact
    elif kind == 2 and merges:
        merges[int(rng.integers(len(merges)))] = str(pick(rng, "a b c", "ab", "zz yy", "", " "))
        exact = False
    elif kind == 3:
        ids[str(pick(rng, *ids))] = odd_value(rng)
        exact = False
    elif kind == 4:
        del ids[str(pick(rng, *ids))]
        exact = False
    names = pick(rng, ("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))
    (folder / names[0]).write_text(json.dumps(ids))
    heading = ["#version: 0.2"] if rng.random() < 0.8 else []
    (folder / names[1]).write_text("\n".join([*heading, *merges]) + "\n", encoding="utf-8")
    spec["model"] |= {"vocab": ids, "merges": [m.split(" ") for m in merges if m]}
    spec["added_tokens"] = spec["added_tokens"] if END in ids and ids[END] == len(ids) - 1 else []
    return _check(rng, folder, len(vocabulary.ids) + 1, json.dumps(spec), exact)


def _check(rng: np.random.Generator, folder: Path, size: int, spec: str, exact: bool) -> Outcome:
    """Compare the ids of random texts by gpt2block and by `tokenizers`."""
    attempt = accepted if exact else refused_or
    source = pick(rng, tokenizer.load, tokenizer.from_path)
    encoding = attempt(lambda: source(folder, size))
    if isinstance(encoding, str):  # before `tokenizers` reads it: some files crash its process
        return "refused"
    truth = _truth(spec)
    encoded = False
    for _ in range(6):
        text = odd_text(rng) or "a"
        ids = attempt(lambda text=text: [*map(int, tokenizer.encode(encoding, text))])  # type: ignore[misc]
        if isinstance(ids, str):
            continue
        encoded = True
        if truth is not None:
            expected = [truth.encode(text, add_special_tokens=add).ids for add in (False, True)]
            if ids not in expected:
                raise Difference(f"{text!r:.60}: expected {expected[0]}, got {ids}")
        if exact:
            check_equal(f"decoded {text!r:.40}", _decoded(encoding, ids), text)
    return "right" if encoded else "refused"


def _truth(spec: str) -> Any:
    """Return the tokenizer of the package `tokenizers`; None where it refuses the file."""
    try:
        found = hugging_face.Tokenizer.from_str(spec)
    except BaseException as error:  # its panics are not derived from Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        return None
    found.no_truncation()  # the default of transformers, which has neither limit nor padding
    found.no_padding()
    return found


def _decoded(encoding: Any, ids: Sequence[int]) -> str:
    return b"".join(map(encoding.decode_single_token_bytes, ids)).decode(errors="replace")


def _llm_c(rng: np.random.Generator, folder: Path) -> Outcome:
    """gpt2_tokenizer.bin, compared with byte-pair encoding by rank."""
    vocabulary = random_vocabulary(rng, proper=True)
    to_byte = {char: byte for byte, char in enumerate(CHARACTERS)}
    tokens = [bytes(to_byte[char] for char in token) for token in vocabulary.ids]
    version = int(rng.integers(1, 3))
    header = np.zeros(256, "<i4")
    header[:4] = 20240328, version, len(tokens) + 1, len(tokens) if version == 2 else 0
    data = bytearray(header.tobytes())
    for token in [*tokens, END.encode()]:
        data += bytes([len(token)]) + token
    damaged = rng.random() < 0.5
    if damaged:
        for _ in range(int(rng.integers(1, 4))):
            data[int(rng.integers(16 if rng.random() < 0.5 else len(data)))] = int(
                rng.integers(256)
            )
        data = data[: int(rng.integers(len(data)))] if rng.random() < 0.3 else data
    path = folder / "gpt2_tokenizer.bin"
    path.write_bytes(data)
    source = pick(rng, folder, path)
    attempt = refused_or if damaged else accepted
    encoding = attempt(lambda: tokenizer.from_path(source, len(tokens) + 1))
    if isinstance(encoding, str):
        return "refused"
    splitter = hugging_face.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    for _ in range(6):
        text = odd_text(rng) or "a"
        ids = accepted(lambda text=text: [*map(int, tokenizer.encode(encoding, text))])  # type: ignore[misc]
        check_equal(f"decoded {text!r:.40}", _decoded(encoding, ids), text)
        if not damaged:
            words = [word for word, _ in splitter.pre_tokenize_str(text)]
            ranks = vocabulary.ids
            expected = [ranks[part] for word in words for part in by_rank(list(word), ranks)]
            check_equal(f"ids of {text!r:.40}", ids, expected)
    return "right"


def _saved(rng: np.random.Generator, folder: Path) -> Outcome:
    """A model saved over another one: its tokenizer replaces the other's."""
    for name in ("old", "new"):
        vocabulary = random_vocabulary(rng, proper=True)
        sizes = plain.Sizes(1, 1, 2, 4, len(vocabulary.ids) + 1)
        plain.write(folder / name, sizes, plain.random_tensors(rng, sizes, "float32"))
        _write(rng, folder / name, vocabulary)
    target, size = folder / "saved", sizes.vocab_size
    for name in ("old", "new"):
        opened = accepted(lambda name=name: Checkpoint.open(folder / name))  # type: ignore[misc]
        if rng.random() < 0.5:
            accepted(lambda opened=opened: save_pretrained(target, opened, overwrite=True))  # type: ignore[misc]
        else:
            model = accepted(lambda opened=opened: GPT2.from_pretrained(opened, device="cpu"))  # type: ignore[misc]
            accepted(lambda model=model: model.save_pretrained(target, overwrite=True))  # type: ignore[misc]
    original, saved = (
        accepted(lambda path=path: tokenizer.load(path, size))  # type: ignore[misc]
        for path in (folder / "new", target)
    )
    for _ in range(4):
        text = odd_text(rng) or "a"
        ids = [tokenizer.encode(encoding, text) for encoding in (original, saved)]
        check_equal(f"ids of {text!r:.40} after saving", ids[1], ids[0])
    return "right"


def _write(rng: np.random.Generator, folder: Path, vocabulary: Vocabulary) -> None:
    """Write the tokenizer's files in one of three layouts."""
    spec = plain_spec(vocabulary)
    names = pick(rng, None, ("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))
    if names is None:
        (folder / "tokenizer.json").write_text(json.dumps(spec))
        return
    (folder / names[0]).write_text(json.dumps(spec["model"]["vocab"]))
    lines = ["#version: 0.2", *(" ".join(pair) for pair in vocabulary.merges)]
    (folder / names[1]).write_text("\n".join(lines) + "\n", encoding="utf-8")


AREA = Area("tokenizers", 3, case)

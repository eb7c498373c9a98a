"""Tokenizers: GPT-2's BPE from its own files or from a tokenizer.json, and refused files."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import tiktoken
import tokenizers
from fuzzing.vocabularies import added_token, spec_of, template
from hypothesis import given
from hypothesis import strategies as st

from gpt2block import CheckpointError, GPT2Config, GPT2Weights, InputError
from gpt2block.engine.generation.sequences import Text
from gpt2block.engine.receipts import of_tokenizer
from gpt2block.files.checkpoints import save_pretrained
from gpt2block.files.checkpoints.patterns import SPLITS
from gpt2block.files.checkpoints.tokenizer_specs import BYTE_LEVEL
from gpt2block.files.tokenizers import tokenizer
from gpt2block.files.tokenizers.encoding import (
    TokenizersEncoding,
    byte_characters,
    bytes_of_id,
    bytes_of_ids,
    token_sizes,
)
from gpt2block.files.tokenizers.tokenizer_json import SPLIT_WORDS
from tests import refusals
from tests.command_line import gpt2block
from tests.devices import slow
from tests.tokenizer_files import (
    BYTES,
    PAIRS,
    sentence_piece,
    small_json,
    small_pair,
    written,
)

TEXT = "Hello, world! It's 2026 and I don't   know;\n\n  naïve Übergänge 🎭"


@pytest.fixture
def bpe(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy GPT-2's BPE files into tiktoken's cache, so that nothing is downloaded."""
    names = {
        "vocab.bpe": "6d1cbeee0f20b3d9449abfede4726ed8212e3aee",
        "encoder.json": "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6",
    }
    cache = tmp_path / "tiktoken"
    cache.mkdir()
    for name, key in names.items():
        shutil.copy(data / "gpt2-bpe" / name, cache / key)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(cache))
    return data / "gpt2-bpe"


def gpt2_tokenizer_json(folder: Path) -> dict[str, Any]:
    """Return the content of Hugging Face's tokenizer.json for GPT-2, from the original files."""
    vocab = json.loads((folder / "encoder.json").read_text(encoding="utf-8"))
    merges = (folder / "vocab.bpe").read_text(encoding="utf-8").splitlines()[1:]
    end = "<|endoftext|>"
    return {
        "added_tokens": [{"id": vocab[end], "content": end}],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False},
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }


def test_gpt2_from_each_of_its_files(
    bpe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are tiktoken's cache, a tokenizer.json (without the package tokenizers), and pairs."""
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    spec = gpt2_tokenizer_json(bpe)
    spec["truncation"] = {"max_length": 4}  # ignored, as in transformers by default
    single = [{"Sequence": {"id": "A", "type_id": 0}}]  # transformers 5 writes this
    spec["post_processor"] = {"type": "TemplateProcessing", "single": single}
    del spec["model"]["type"]  # old files have no type
    folders = [tmp_path / name for name in ("json", "openai", "hugging_face")]
    for folder in folders:
        folder.mkdir()
    written(folders[0], spec)
    for folder, names in zip(folders[1:], PAIRS, strict=True):
        for ours, theirs in zip(PAIRS[0], names, strict=True):
            shutil.copy(bpe / ours, folder / theirs)
    for encoding in (
        tokenizer.load(None, 50257),
        tokenizer.load(folders[0], 50257),
        tokenizer.from_path(str(folders[1] / "vocab.bpe"), 50304),
        tokenizer.load(folders[2], 50257),
    ):
        ids = tokenizer.encode(encoding, TEXT)
        assert ids[:4] == [15496, 11, 995, 0]
        assert encoding.decode(ids) == TEXT
        assert encoding.n_vocab == 50257
        assert tokenizer.end_of_text(encoding) == 50256


def set_options(folder: Path, options: Any) -> None:
    """Write tokenizer_config.json."""
    (folder / "tokenizer_config.json").write_text(json.dumps(options))


def refused(path: Path, *words: str) -> str:
    return refusals.refused(path, *words, read=lambda path: tokenizer.from_path(path, 1000))


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", "3", "[" * 10**5, '{"pre_tokenizer": null, "model": {}}']
)
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    refused(tmp_path, "cannot be read as ")


NEVER = {0xC0, 0xC1, *range(0xF5, 0x100)}  # bytes that never occur in UTF-8


def without(absent: set[int]) -> dict[str, Any]:
    """Return a tokenizer.json with the merge ab, and without tokens for the `absent` bytes."""
    chars = [char for byte, char in byte_characters().items() if byte not in absent]
    return spec_of({token: index for index, token in enumerate([*chars, "ab"])}, ["a b"])


@pytest.mark.parametrize(
    ("absent", "by_tiktoken"),
    [(NEVER, True), ({0xFF}, True), (NEVER | {4, 6, 0xF1}, False), ({ord("Z"), 0xA9}, False)],
)
def test_a_vocabulary_need_not_have_every_byte(
    tmp_path: Path, absent: set[int], by_tiktoken: bool
) -> None:
    spec = without(absent)
    written(tmp_path, spec)
    encoding = tokenizer.load(tmp_path, 300)
    assert isinstance(encoding, tiktoken.Encoding) == by_tiktoken
    known = tokenizers.Tokenizer.from_str(json.dumps(spec))
    every = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x110000, 97)]))
    for text in (TEXT, "ab\x04abé\x06 Z\U00050000a\U0010ffffb", every):
        ids = tokenizer.encode(encoding, text)
        assert ids == known.encode(text).ids
        assert encoding.decode(ids) == known.decode(ids)
    assert tokenizer.token_ids(encoding, "\xa0Z", 300, "x").tolist() == known.encode("\xa0Z").ids


@pytest.mark.parametrize("changed", [{}, {"ignore_merges": True}])
def test_ids_whose_bytes_are_not_utf_8(tmp_path: Path, changed: dict[str, Any]) -> None:
    """Decoded texts equal those by the package tokenizers, also where tiktoken decodes."""
    path = small_json(tmp_path, **changed)
    encoding = tokenizer.from_path(path, 300)
    known = tokenizers.Tokenizer.from_file(str(path))
    rng = np.random.default_rng(0)
    parts = [*"aé日🎭".encode(), 0xC0, 0xE0, 0xED, 0xA0, 0xF0, 0xF4, 0x90, 0xFF, 256]
    for _ in range(500):
        ids = rng.choice(parts, 8).tolist()
        assert encoding.decode(ids) == known.decode(ids)
        text = Text()
        pieces = [text.add(encoding.decode_single_token_bytes(token)) for token in ids]
        assert "".join(pieces) + text.add(b"", final=True) == known.decode(ids)


def test_bpe_files_that_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unreachable = Mock(side_effect=ConnectionError("no network"))
    monkeypatch.setattr("tiktoken.get_encoding", unreachable)
    with pytest.raises(CheckpointError, match=r"ConnectionError.*set TIKTOKEN_CACHE_DIR"):
        tokenizer.load(tmp_path, 50257)


def test_a_small_pair(tmp_path: Path) -> None:
    encoding = tokenizer.from_bpe_files(*small_pair(tmp_path))
    assert tokenizer.encode(encoding, "abcab") == [257, 256]
    with pytest.raises(InputError, match="at least one character"):
        tokenizer.encode(encoding, "")
    assert tokenizer.end_of_text(encoding) == 258
    with pytest.raises(CheckpointError, match="it has token id 258, the model has 258 tokens"):
        tokenizer.load(tmp_path, 258)


@pytest.mark.parametrize(
    ("changed", "merges", "message"),
    [
        ({"abc": 258}, None, "expected ids that are different integers"),
        ({}, "#version: 0.2\na b c\n", "expected two tokens in each"),
        ({}, "#version: 0.2\na x\n", "no id for 'ax'"),
        ({}, "[" * 10**5, "expected two tokens in each"),
        ({}, "\udcff", "invalid start byte"),
        ({"A": -1}, None, "expected ids that are different integers"),
        ({"A": "x"}, None, "expected ids that are different integers"),
    ],
)
def test_two_files_that_do_not_fit(
    tmp_path: Path, changed: dict[str, Any], merges: str | None, message: str
) -> None:
    pair = small_pair(tmp_path, **changed)
    if merges is not None:
        pair[1].write_bytes(merges.encode("utf-8", "surrogateescape"))
    refused(tmp_path, message, str(pair[0]))


def test_the_tokenizer_of_llm_c_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "gpt2_tokenizer.bin"
    file.write_bytes((20240328).to_bytes(4, "little") + bytes(1020))
    refused(file, str(file), "a tokenizer of llm.c, whose files are not read", "export_hf.py")
    refused(tmp_path, "it has gpt2_tokenizer.bin, but no supported tokenizer")


def test_where_there_is_no_tokenizer(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing", str(tmp_path), "~nosuchuser/x", "a\0b"):
        with pytest.raises(
            CheckpointError,
            match=r"no tokenizer: (expected tokenizer\.json, enc|Could not determine home)",
        ):
            tokenizer.from_path(path, 50257)
    for source, name in ((None, "weights given as arrays"), (tmp_path, tmp_path)):
        with pytest.raises(CheckpointError, match=rf"{name}: expected tokenizer\.json for a voc"):
            tokenizer.load(source, 3)


@pytest.mark.parametrize(
    ("changed", "ids"),
    [
        ({}, [256, 99]),
        ({"merges": [["b", "c"], ["a", "b"]]}, [97, 257]),
        ({"merges": ["b c", "a b"]}, [97, 257]),
        ({"merges": []}, [97, 98, 99]),
        ({"added_tokens": [added_token(257, "bc", special=False)]}, [97, 257]),
    ],
)
def test_merges_decide_and_not_ids(tmp_path: Path, changed: dict[str, Any], ids: list[int]) -> None:
    encoding = tokenizer.from_path(small_json(tmp_path, **changed), 258)
    assert tokenizer.encode(encoding, "abc") == ids
    assert encoding.decode(ids) == "abc"
    assert encoding.n_vocab == 258
    with pytest.raises(KeyError):
        encoding.decode_single_token_bytes(258)
    for wrong in ([-1], [258], [2**40], ["a"], [1.5], [[1], [2, 3]], 5, None):
        with pytest.raises(InputError, match=r"^tokens: "):
            encoding.decode(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "setting"),
    [
        *refusals.cases("settings that need the package tokenizers"),
        ({"added_tokens": [added_token(258, "x y", special=False)]}, "added token 'x y'"),
        ({"added_tokens": [added_token(256, "ab")]}, "special token 'ab'"),
    ],
)
def test_the_setting_that_needs_the_package_tokenizers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], setting: str
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    message = refused(small_json(tmp_path, **changed), f"it has {setting}")
    assert message.endswith(
        ", which needs tokenizers, of the extra tokenizers: run pip install tokenizers, or in a "
        "checkout pip install -e '.[tokenizers]'"
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        *refusals.cases("changes of tokenizer.json"),
        ({"added_tokens": [added_token(300, "ab")]}, "'ab' has id 300, and in model.vocab 2"),
        ({"added_tokens": [added_token(258, "")]}, "expected text as content, got ''"),
        ({"added_tokens": [added_token(97, "x")]}, "'x' has id 97, and in model.vocab 120"),
        ({"added_tokens": [added_token(97, "xy")]}, "expected ids that are different"),
        ({"added_tokens": [added_token(400, "xy")]}, "has id 400, and 258 in the package"),
        ({"added_tokens": [added_token(2**32, "xy")]}, "integers from 0 to 2147483647"),
        ({"vocab": ["a"]}, "AttributeError"),
        ({"post_processor": template("", "ab", "", token_id=256), "ignore_merges": True},
         "TemplateProcessing: expected one that adds tokens before and after a text only"),
        *(({"vocab": BYTES | {"A": token_id}}, "different integers from 0 to 2147483647")
          for token_id in ("7", -1, 8, 1.5, True, None, 2**31, 10**400)),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    refused(small_json(tmp_path, **changed), message)


def test_a_token_before_every_text(tmp_path: Path) -> None:
    tokens = [added_token(256, "ab"), added_token(258, "</s>")]
    before = template("ab", "", token_id=256)
    path = small_json(tmp_path, post_processor=before, added_tokens=tokens)
    set_options(tmp_path, {"add_bos_token": True, "eos_token": {"content": "</s>"}})
    encoding = tokenizer.load(tmp_path, 1000)
    assert tokenizer.prefix_of(encoding) == [256]
    assert encoding.encode_ordinary("c") == [99]
    assert tokenizer.encode(encoding, "c") == [256, 99]
    assert tokenizer.token_ids(encoding, "", 1000, "text").tolist() == [256]
    assert tokenizer.encode(encoding, "abc", special=True) == [256, 99]
    assert tokenizer.encode(encoding, "c</s>", special=True) == [256, 99, 258]
    assert tokenizer.end_of_text(encoding) == 258
    small_json(tmp_path, post_processor=template("ab", "", token_id=700), added_tokens=tokens)
    with pytest.raises(CheckpointError, match="it has token id 700, the model has 700 tokens"):
        tokenizer.load(tmp_path, 700)
    small_json(tmp_path, post_processor=before, added_tokens=tokens)
    set_options(tmp_path, {"add_bos_token": False})
    refused(path, "add_bos_token to False, the post_processor adds a")
    small_json(tmp_path)
    set_options(tmp_path, {"add_bos_token": True})
    refused(path, "add_bos_token to True, the post_processor adds none")


def test_a_token_after_every_text(tmp_path: Path) -> None:
    """Texts to embed end with this token; texts to continue do not."""
    tokens = [added_token(256, "ab"), added_token(258, "</s>")]
    path = small_json(tmp_path, post_processor=template("", "ab", token_id=256),
                      added_tokens=tokens)  # fmt: skip
    set_options(tmp_path, {"add_eos_token": True})
    encoding = tokenizer.load(tmp_path, 1000)
    assert (tokenizer.prefix_of(encoding), tokenizer.suffix_of(encoding)) == ([], [256])
    assert tokenizer.encode(encoding, "c") == [99]
    for text, ids in (("c", [99, 256]), ("", [256]), ([99], [99])):
        assert tokenizer.whole_text_ids(encoding, text, 1000, "text").tolist() == ids
    small_json(tmp_path, post_processor=template("ab", "", "ab", token_id=256), added_tokens=tokens)
    both = tokenizer.load(tmp_path, 1000)
    assert tokenizer.whole_text_ids(both, "c", 1000, "text").tolist() == [256, 99, 256]
    set_options(tmp_path, {"add_eos_token": False})
    refused(path, "add_eos_token to False, the post_processor adds a token after every text")
    small_json(tmp_path)
    set_options(tmp_path, {"add_eos_token": True})
    refused(path, "add_eos_token to True, the post_processor adds none after every text")


def test_a_tokenizer_with_byte_fallback(tmp_path: Path) -> None:
    path = sentence_piece(tmp_path)
    set_options(tmp_path, {"add_bos_token": True, "eos_token": "</s>"})
    encoding = tokenizer.from_path(path, 1000)
    theirs = tokenizers.Tokenizer.from_file(str(path))
    theirs.encode_special_tokens = True
    for text in ("ab", " ab", "a  b", "ab é\n", "日本 ab", "</s>", "x"):
        ids = tokenizer.encode(encoding, text)
        assert ids == theirs.encode(text).ids
        assert encoding.decode(ids[1:]) == theirs.decode(ids) == text
        assert bytes_of_ids(encoding, ids[1:]) == f" {text}".encode()
    assert tokenizer.end_of_text(encoding) == 2


def step(kind: str, **settings: Any) -> dict[str, Any]:
    return {"type": kind, **settings}


def sequence(*decoders: dict[str, Any]) -> dict[str, Any]:
    return step("Sequence", decoders=list(decoders))


METASPACE = step("Metaspace", replacement="▁", prepend_scheme="first", split=False)
REPLACE = step("Replace", pattern={"String": "▁"}, content=" ")
TO_BYTE, FUSE = step("ByteFallback"), step("Fuse")
TO_METASPACE = step("Replace", pattern={"String": " "}, content="▁")
LOWERCASE = step("Sequence", normalizers=[step("Lowercase"), TO_METASPACE])
PIPELINES: list[dict[str, Any]] = [
    {},
    {"decoder": sequence(REPLACE, TO_BYTE, FUSE)},  # without Strip, as in Gemma
    {"decoder": sequence(REPLACE, TO_BYTE, FUSE), "normalizer": TO_METASPACE},
    {"decoder": sequence(REPLACE, TO_BYTE, FUSE, step("Strip", content=" ", start=2, stop=0))},
    {"decoder": sequence(REPLACE, TO_BYTE, FUSE, step("Strip", content="a", start=1, stop=1))},
    {"decoder": sequence(REPLACE, step("Strip", content=" ", start=1, stop=0), TO_BYTE, FUSE)},
    {"decoder": sequence(TO_BYTE, METASPACE), "normalizer": None, "pre_tokenizer": METASPACE},
    {"decoder": sequence(METASPACE, TO_BYTE, FUSE), "normalizer": None, "pre_tokenizer": METASPACE},
    {"decoder": sequence(TO_BYTE, FUSE)},  # ▁ stays ▁
    {"decoder": sequence(TO_BYTE, step("Replace", pattern={"Regex": "▁+"}, content="_"), FUSE)},
    {"normalizer": LOWERCASE},
    {"normalizer": LOWERCASE, "decoder": sequence(REPLACE, TO_BYTE, FUSE)},
]
SPACED = ["a new a", "new a", " new a", "anew", "a New a", "  a  b", "ab é new", "日本 </s> a", " "]


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("content", ["new", " new", "New", "▁new"])
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_texts_of_byte_fallback_are_those_of_tokenizers(
    tmp_path: Path, pipeline: dict[str, Any], content: str, normalized: bool
) -> None:
    """Texts of encoded and of random ids are equal, alone and within a text."""
    special = [added_token(index, name) for index, name in enumerate(("<unk>", "<s>", "</s>"))]
    new = added_token(265, content, special=False) | {"normalized": normalized}
    path = sentence_piece(tmp_path, added_tokens=[*special, new], **pipeline)
    encoding = tokenizer.from_path(path, 1000)
    known = tokenizers.Tokenizer.from_file(str(path))
    rng = np.random.default_rng(1)
    rows = [known.encode(text).ids for text in SPACED]
    rows += [rng.choice([0, 1, 2, 13, 35, *"é".encode(), *range(259, 266)], 6).tolist()
             for _ in range(50)]  # fmt: skip
    for ids in rows:
        assert encoding.decode(ids) == known.decode(ids, skip_special_tokens=False)
        if not any(3 <= token < 259 for token in ids):  # no byte tokens
            inside = known.decode([262, *ids, 262], skip_special_tokens=False)
            assert bytes_of_ids(encoding, [262, *ids, 262]).decode().endswith(inside)
    with pytest.raises(InputError, match="id 266 at 1: the tokenizer has no such token"):
        encoding.decode([259, 266])


@pytest.mark.parametrize("normalizer", [None, "Lowercase", "NFC", "ByteLevel"])
@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("content", ["new", " new", "New", "<é>", "日 本"])
def test_texts_of_added_tokens_are_those_of_tokenizers(
    tmp_path: Path, content: str, special: bool, normalized: bool, normalizer: str | None
) -> None:
    new = added_token(258, content, special=special) | {"normalized": normalized}
    path = small_json(tmp_path, normalizer=normalizer and step(normalizer), added_tokens=[new])
    encoding = tokenizer.from_path(path, 1000)
    known = tokenizers.Tokenizer.from_file(str(path))
    for text in ("a new a", "a New a", "<é>a 日 本", "anew"):
        ids = known.encode(text).ids
        expected = known.decode(ids, skip_special_tokens=False)
        assert encoding.decode(ids) == expected
        assert bytes_of_ids(encoding, ids).decode(errors="replace") == expected


def test_bytes_of_tokens_are_those_of_the_object() -> None:
    """Cached bytes belong to one object, not to equal ones; an encoding need not be hashable."""

    @dataclass
    class Shifted:
        name: str
        first: int = field(compare=False)

        def decode_single_token_bytes(self, token: int) -> bytes:
            return bytes([self.first + token])

    encodings: list[Any] = [Shifted("same", ord("a") + n) for n in range(9)]
    for _ in range(2):
        found = [bytes_of_ids(encoding, [0, 1, 0]) for encoding in encodings]
        assert found[:2] == [b"aba", b"bcb"]
        assert len(set(found)) == 9


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json"]
)
def test_a_file_that_is_no_file_is_refused(tmp_path: Path, name: str) -> None:
    small_pair(tmp_path)
    path = tmp_path / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match=f"{path}: expected a file, found a named pipe"):
        tokenizer.load(tmp_path, 50257)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *((name, "") for name in ("vocab.json", "merges.txt", "encoder.json", "vocab.bpe",
                                  "added_tokens.json", "tokenizer.model", "spiece.model",
                                  "vocab.txt")),
        *(("tokenizer_config.json", json.dumps({"tokenizer_class": kind}))
          for kind in [*("BertTokenizer", "PreTrainedTokenizerFast"), dict[str, str]()]),
    ],
)  # fmt: skip
def test_gpt2_does_not_take_the_place_of_another_tokenizer(
    bpe: Path, tmp_path: Path, name: str, text: str
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    assert tokenizer.load(folder, 50257).n_vocab == 50257
    set_options(folder, {"tokenizer_class": "GPT2TokenizerFast"})
    assert tokenizer.load(folder, 50257).n_vocab == 50257
    (folder / name).write_text(text)
    message = rf"it has {name}.* but no supported tokenizer"
    with pytest.raises(CheckpointError, match=message):
        tokenizer.load(folder, 50257)


@pytest.mark.parametrize(
    ("settings", "message"), refusals.cases("tokenizer_config.json next to two files")
)
def test_settings_next_to_two_files(tmp_path: Path, settings: Any, message: str) -> None:
    small_pair(tmp_path)
    set_options(tmp_path, settings)
    refused(tmp_path, message)


def test_special_tokens_next_to_two_files(tmp_path: Path) -> None:
    small_pair(tmp_path)
    set_options(tmp_path, {"added_tokens_decoder": []})
    assert tokenizer.encode(tokenizer.load(tmp_path, 1000), "ab") == [256]
    (tmp_path / "added_tokens.json").write_text('{"<pad>": 259}')
    set_options(tmp_path, {"added_tokens_decoder": {"260": {"content": "END", "special": True}}})
    encoding = tokenizer.load(tmp_path, 1000)
    assert tokenizer.encode(encoding, "ab<pad>END", special=True) == [256, 259, 260]
    (tmp_path / "added_tokens.json").write_text('{"pad": 259}')
    refused(tmp_path, "'pad' is an added token that is not special")


def test_add_prefix_space_of_the_settings(tmp_path: Path) -> None:
    small_pair(tmp_path)
    set_options(tmp_path, {"add_prefix_space": True})
    assert tokenizer.encode(tokenizer.load(tmp_path, 1000), "ab") == [32, 256]
    refused(small_json(tmp_path), "sets add_prefix_space to True, tokenizer.json does not")
    set_options(tmp_path, {"add_prefix_space": False})
    assert tokenizer.encode(tokenizer.load(tmp_path, 1000), "ab") == [256]


def test_an_added_token_of_the_settings_alone_is_special(tmp_path: Path) -> None:
    set_options(tmp_path, {"added_tokens_decoder": {"258": {"content": "<x>", "special": True}}})
    encoding = tokenizer.from_path(small_json(tmp_path), 1000)
    assert tokenizer.encode(encoding, "ab<x>", special=True) == [256, 258]
    set_options(tmp_path, {"added_tokens_decoder": {"258": {"content": "x y", "special": False}}})
    refused(tmp_path, "'x y' is an added token that is not special")


def test_the_longest_special_token_is_found(tmp_path: Path) -> None:
    tokens = [added_token(258, "<x>"), added_token(259, "<x><y>")]
    encoding = tokenizer.from_path(small_json(tmp_path, added_tokens=tokens), 1000)
    assert isinstance(encoding, tiktoken.Encoding)
    assert tokenizer.encode(encoding, "<x><x><y>", special=True) == [258, 259]


def test_a_special_token_with_the_bytes_of_an_ordinary_one() -> None:
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"<|endoftext|>": 256}
    encoding = tiktoken.Encoding(
        "", pat_str="(?s:.+)", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 257}
    )
    assert tokenizer.encode(encoding, "a<|endoftext|>", special=True) == [97, 257]
    assert tokenizer.encode(encoding, "<|endoftext|>") == [256]
    assert tokenizer.end_of_text(encoding) == 257
    assert token_sizes(encoding, 258)[256:].tolist() == [13, 0]


def test_encode_of_the_package_tokenizers_is_that_of_tiktoken(tmp_path: Path) -> None:
    for ignored in (False, True):  # by tiktoken, by the package tokenizers
        name = "<x>"
        tokens = [added_token(258, name), added_token(259, "<y>")]
        path = small_json(tmp_path, ignore_merges=ignored, added_tokens=tokens)
        encoding: Any = tokenizer.from_path(path, 1000)
        assert encoding.encode("ab") == [256]
        with pytest.raises(ValueError, match="special token"):
            encoding.encode(f"ab{name}")
        assert encoding.encode(f"ab{name}", allowed_special="all") == [256, 258]
        assert encoding.encode(f"ab{name}", allowed_special={name}) == [256, 258]
        assert encoding.encode(name, disallowed_special=()) == encoding.encode_ordinary(name)
        ids = encoding.encode(f"{name}<y>", allowed_special={name}, disallowed_special=())
        assert ids == [258, *b"<y>"]


def test_lone_surrogates_are_refused_with_their_place(tmp_path: Path) -> None:
    for ignored in (False, True):  # by tiktoken, by the package tokenizers
        encoding = tokenizer.from_path(small_json(tmp_path, ignore_merges=ignored), 1000)
        with pytest.raises(InputError, match=r"^text: character 2 is U\+D83C, a lone surrogate"):
            tokenizer.encode(encoding, "ab\ud83cx")
        with pytest.raises(InputError, match=r"^prompt 3: character 0 is U\+DC00"):
            tokenizer.token_ids(encoding, "\udc00", 300, "prompt 3")


CLASSES = sorted(set(re.findall(r"\\p{(\w+)}", "".join(SPLITS))))
SPACES = ["\t", " ", "\u3000", "\x85", "\x1c", "\x1f", "\u200b", "\u180e", "\xa0"]


@pytest.mark.parametrize("pattern", [SPLIT_WORDS, *sorted(SPLITS)])
@given(
    text=st.lists(st.sampled_from(
        [*SPACES, " " * 7, "\n" * 5, "\r", "/", "\u0301", "ab", "1", "!", "'s", "é",
         "<|endoftext|>"]
    ), max_size=12).map("".join)
)  # fmt: skip
def test_long_runs_of_white_space_are_split_as_short_ones(pattern: str, text: str) -> None:
    known = tiktoken.Encoding(
        "",
        pat_str=pattern,
        mergeable_ranks={bytes([byte]): byte for byte in range(256)}
        | {b" " * size: 254 + size for size in range(2, 8)}
        | {b"  a": 300, b" \n": 301, b"\n ": 302, b"!\n": 303, b"  \n": 304},
        special_tokens={"<|endoftext|>": 400},
    )
    for shortest in (2, 3, 5):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tokenizer, "_LONG_RUN", tokenizer._runs(shortest))
            patch.setattr(tokenizer, "_LONG_LINE", tokenizer._runs(shortest, tokenizer._IN_LINES))
            found = tokenizer.token_ids(known, text, 500, "text")
            special = tokenizer.token_ids(known, text, 500, "text", special=True)
        assert found.tolist() == known.encode_ordinary(text)
        assert special.tolist() == known.encode(text, allowed_special="all")


def test_white_space_is_that_of_the_pattern() -> None:
    bytes_alone = {bytes([byte]): byte for byte in range(256)}
    white_space = tiktoken.Encoding(
        "", pat_str=r"\s", mergeable_ranks=bytes_alone, special_tokens={}
    )
    every = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x110000)]))
    found = white_space.decode(white_space.encode_ordinary(every))
    assert "".join(re.findall(tokenizer._WHITE_SPACE, every)) == found


@pytest.mark.parametrize("kind", [*(rf"\p{{{name}}}" for name in CLASSES), r"\s"])
def test_classes_of_characters_are_those_of_tokenizers(kind: str) -> None:
    """tiktoken runs tokenizers with a Split, so its classes must be equal to theirs.

    Planes that are left out have no letters or digits.
    """
    planes = (0, 0xD800), (0xE000, 0x34000), (0xE0000, 0xE0200)
    every = "".join(chr(c) for first, end in planes for c in range(first, end))
    pattern = f"{kind}+"
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "removed", invert=True)
    bytes_alone = {bytes([byte]): byte for byte in range(256)}
    known = tiktoken.Encoding("", pat_str=pattern, mergeable_ranks=bytes_alone, special_tokens={})
    found = "".join(piece for piece, _ in split.pre_tokenize_str(every))
    assert known.decode(known.encode_ordinary(every)) == found


def test_a_million_spaces(tmp_path: Path) -> None:
    encodings = [tokenizer.from_bpe_files(*small_pair(tmp_path))]
    for pattern in sorted(SPLITS):
        split = step("Split", pattern={"Regex": pattern}, behavior="Isolated", invert=False)
        bytes_ = step("ByteLevel", add_prefix_space=False, use_regex=False)
        steps = step("Sequence", pretokenizers=[split, bytes_])
        encodings.append(tokenizer.from_path(small_json(tmp_path, pre_tokenizer=steps), 258))
    for encoding in encodings:
        assert isinstance(encoding, tiktoken.Encoding)
        for text in (" " * 1_000_001, "!\n \n" + " " * 1_000_001 + "ab", "\r\n" * 500_001 + " ab"):
            assert len(tokenizer.encode(encoding, text)) == len(text) - text.count("ab")


def test_many_runs_of_white_space_take_no_longer() -> None:
    text = (" " * 9_999 + "a") * 300
    start = time.process_time()
    assert tokenizer._LONG_RUN.search(text) is None
    assert tokenizer._LONG_LINE.search(text.replace("a", "\n")) is None
    assert time.process_time() - start < 2  # takes 0.1 s; 15 s if each character began a search


class PanicException(BaseException):
    pass


@pytest.mark.parametrize("error", [PanicException("no"), Exception("no"), KeyboardInterrupt()])
def test_a_panic_is_an_input_error_and_an_interrupt_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    encoding = tokenizer.from_bpe_files(*small_pair(tmp_path))
    monkeypatch.setattr(encoding, "encode_ordinary", Mock(side_effect=error))
    interrupted = isinstance(error, KeyboardInterrupt)
    message = None if interrupted else "text: the tokenizer fails on this text: no"
    with pytest.raises(KeyboardInterrupt if interrupted else InputError, match=message):
        tokenizer.encode(encoding, "x")


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([True, 5], "token 0 is True: expected an integer"),
        ([5, np.True_], "token 1 is .*True.*: expected an integer"),
        (np.array([True]), "got ndarray of bool"),
        (np.ma.array([1, 2], mask=[False, True]), "got a masked array"),
        ([1, np.ma.masked], "got a masked array"),
        (np.array([1.0]), "got ndarray of float64"),
        ([1, 2.0], "of float64"),
        ([10**400], "token 0 is an integer of more than 40 digits"),
        ([2**64 - 1], "token 0 is 18446744073709551615"),
        ([[1], [2, 3]], "expected text or token ids"),
    ],
)
def test_what_is_no_row_of_ids(ids: Any, message: str) -> None:
    with pytest.raises(InputError, match=f"^x: .*{message}"):
        tokenizer.token_ids(None, ids, 300, "x")


def test_ids_without_a_token(tmp_path: Path) -> None:
    pair = small_pair(tmp_path, **{"abc": 270})
    encoding = tokenizer.from_bpe_files(*pair)
    assert bytes_of_id(encoding, 270) == b"abc"
    assert bytes_of_id(encoding, 260) == bytes_of_id(encoding, 10**6) == "\ufffd".encode()
    sizes = token_sizes(encoding, 300)
    assert sizes[[97, 256, 257, 258, 260, 270, 299]].tolist() == [1, 2, 0, 0, 0, 3, 0]


def test_the_fingerprint_has_the_pipeline_in_it(tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [{}, {"merges": []}, {"ignore_merges": True},
                                     {"merges": [["b", "c"], ["a", "b"]]},
                                     {"normalizer": {"type": "NFC"}}]  # fmt: skip
    found = [tokenizer.from_path(small_json(tmp_path, **change), 1000) for change in changes]
    assert len({of_tokenizer(encoding) for encoding in found}) == len(changes)
    again = tokenizer.from_path(small_json(tmp_path, merges=[]), 1000)
    assert of_tokenizer(again) == of_tokenizer(found[1])


def test_the_command_block_with_a_padded_vocabulary(tmp_path: Path) -> None:
    config = GPT2Config(n_layer=1, n_head=1, n_embd=8, n_ctx=8, vocab_size=2000)
    save_pretrained(tmp_path / "model", GPT2Weights.random(3, config))
    small_pair(tmp_path / "model")
    options = "--weights", tmp_path / "model", "--text", "abcab", "--device", "cpu", "--json"
    found = gpt2block("block", *options).json
    assert "\ufffd" in [token for token, _ in found["next_tokens"]]


DASHES = step("Split", pattern={"String": "-"}, behavior="Removed", invert=False)
REMOVED = step("Sequence", pretokenizers=[DASHES, BYTE_LEVEL])
SOME = {char: byte for char, byte in BYTES.items() if byte not in b"-\4"} | {"ab": 256, "bc": 257}


@pytest.mark.parametrize(
    ("write", "changed", "known"),
    [
        (small_json, {}, True),
        (small_json, {"normalizer": step("ByteLevel")}, True),
        (small_json, {"normalizer": step("NFKC")}, False),
        (small_json, {"normalizer": step("Replace", pattern={"String": "-"}, content="")}, False),
        (small_json, {"pre_tokenizer": REMOVED}, False),
        (small_json, {"added_tokens": [added_token(258, "<x>", rstrip=True)]}, False),
        (small_json, {"vocab": SOME}, True),
        (sentence_piece, {}, True),
    ],
)  # fmt: skip
def test_a_text_has_the_least_tokens(
    tmp_path: Path, write: Any, changed: dict[str, Any], known: bool
) -> None:
    """The bound holds even if steps remove characters or some characters have no token."""
    encoding = tokenizer.from_tokenizer_json(write(tmp_path, **changed))
    least = tokenizer.token_count_bound(encoding)
    assert (least("ab" * 1000) > 0) == known
    for text in ("ab" * 300, "-" * 300, "\4" * 300, "▁a" * 300, " a" * 300, "<x>" + " " * 300):
        assert least(text) <= len(tokenizer.encode(encoding, text, special=True)), text[:9]


@pytest.mark.parametrize("write", [small_json, slow(sentence_piece)])
def test_other_threads_run_while_a_text_is_encoded(tmp_path: Path, write: Any) -> None:
    changed = {} if write is sentence_piece else {"ignore_merges": True}
    encoding = tokenizer.from_tokenizer_json(write(tmp_path, **changed))
    assert isinstance(encoding, TokenizersEncoding)
    text, ticks, ended = "ab " * 500_000, [time.process_time()], threading.Event()

    def tick() -> None:
        while not ended.wait(0.001):
            ticks.append(time.process_time())

    thread = threading.Thread(target=tick)
    thread.start()
    for special in (False, True):
        tokenizer.encode(encoding, text, special)
    took = time.process_time() - ticks[0]
    ended.set()
    thread.join()
    assert max(np.diff([*ticks, time.process_time()])) < took / 4

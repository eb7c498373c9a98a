"""Tokenizers: GPT-2's BPE from its own files or from a tokenizer.json, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from gpt2block import CheckpointError, InputError, tokenizer

TEXT = "Hello, world! It's 2026 and I don't   know;\n\n  naïve Übergänge 🎭"


@pytest.fixture
def bpe(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """GPT-2's BPE files as tiktoken's cache, so that nothing is downloaded."""
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
    """What Hugging Face's tokenizer.json for GPT-2 says, made from the original files."""
    vocab = json.loads((folder / "encoder.json").read_text(encoding="utf-8"))
    end = "<|endoftext|>"
    return {
        "added_tokens": [{"id": vocab[end], "content": end}],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }


def test_gpt2_from_the_cache_and_from_tokenizer_json(bpe: Path, tmp_path: Path) -> None:
    from_cache = tokenizer.load(tmp_path, 50257)
    ids = tokenizer.encode(from_cache, TEXT)
    assert ids[:4] == [15496, 11, 995, 0]
    assert from_cache.decode(ids) == TEXT
    spec = json.dumps(gpt2_tokenizer_json(bpe))
    (tmp_path / "tokenizer.json").write_text(spec, encoding="utf-8")
    from_json = tokenizer.load(tmp_path, 50257)
    assert tokenizer.encode(from_json, TEXT) == ids
    assert from_json.n_vocab == 50257
    assert from_json.eot_token == 50256


@pytest.mark.parametrize("text", ["{", "[]", "{}", "3", '{"pre_tokenizer": null, "model": {}}'])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"not a byte-level BPE tokenizer\.json"):
        tokenizer.load(tmp_path, 256)


def on_board() -> dict[str, Any]:
    folder = Path(tokenizer.__file__).parent / "models" / "shakespeare"
    spec: dict[str, Any] = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    return spec


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("model", {"type": "WordPiece"}, "expected a BPE model"),
        ("pre_tokenizer", {"type": "Whitespace"}, "a ByteLevel pre-tokenizer"),
        ("pre_tokenizer", {"add_prefix_space": True}, "add_prefix_space is not supported"),
        ("model", {"vocab": {"a": 0}}, "a token for each of the 256 bytes"),
        ("model", {"vocab": ["a"]}, "AttributeError"),
        ("model", {"vocab": {"☃": 0}}, "KeyError"),
    ],
)
def test_a_tokenizer_of_another_kind_is_refused(
    tmp_path: Path, part: str, change: dict[str, Any], message: str
) -> None:
    spec = on_board()
    spec[part] |= change
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")
    with pytest.raises(CheckpointError, match=message):
        tokenizer.load(tmp_path, 256)


@pytest.mark.parametrize("token_id", ["7", -1, 8, 1.5, True])
def test_ids_that_are_no_different_integers_are_refused(tmp_path: Path, token_id: Any) -> None:
    spec = on_board()
    spec["model"]["vocab"]["A"] = token_id
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")
    with pytest.raises(CheckpointError, match="ids that are different integers of at least 0"):
        tokenizer.load(tmp_path, 256)


def test_a_tokenizer_of_a_larger_vocabulary_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(on_board()), encoding="utf-8")
    with pytest.raises(CheckpointError, match="it has token id 255, the model has 65 tokens"):
        tokenizer.load(tmp_path, 65)


def test_a_vocabulary_without_its_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"expected tokenizer\.json for a vocabulary of 3"):
        tokenizer.load(tmp_path, 3)


def test_bpe_files_that_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(name: str) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr("tiktoken.get_encoding", unreachable)
    with pytest.raises(CheckpointError, match=r"ConnectionError.*set TIKTOKEN_CACHE_DIR"):
        tokenizer.load(tmp_path, 50257)


def test_an_empty_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(on_board()), encoding="utf-8")
    with pytest.raises(InputError, match="at least one character"):
        tokenizer.encode(tokenizer.load(tmp_path, 256), "")

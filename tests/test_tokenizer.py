"""Tokenizers: GPT-2's BPE from its own files or from a tokenizer.json, and what is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", "3", "[" * 10**5, '{"pre_tokenizer": null, "model": {}}']
)
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


PAIRS = [("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt")]


@pytest.mark.parametrize(("vocab", "merges"), PAIRS)
def test_gpt2_from_its_two_files(data: Path, tmp_path: Path, vocab: str, merges: str) -> None:
    shutil.copy(data / "gpt2-bpe" / "encoder.json", tmp_path / vocab)
    shutil.copy(data / "gpt2-bpe" / "vocab.bpe", tmp_path / merges)
    encodings = [
        tokenizer.load(tmp_path, 50257),
        tokenizer.from_path(tmp_path, 50257),
        tokenizer.from_path(str(tmp_path / vocab), 50257),
        tokenizer.from_path(tmp_path / merges, 50304),
    ]
    for encoding in encodings:
        ids = tokenizer.encode(encoding, TEXT)
        assert ids[:4] == [15496, 11, 995, 0]
        assert encoding.decode(ids) == TEXT
        assert encoding.n_vocab == 50257
        assert tokenizer.end_of_text(encoding) == 50256


def small_pair(folder: Path, **changed: int) -> tuple[Path, Path]:
    """Two files with the bytes, the merges "ab" and "abc", and the end of the text."""
    vocab = {char: byte for byte, char in tokenizer._byte_characters().items()}
    vocab |= {"ab": 256, "abc": 257, "<|endoftext|>": 258, **changed}
    (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\na b\nab c\n", encoding="utf-8")
    return folder / "vocab.json", folder / "merges.txt"


def test_a_small_pair(tmp_path: Path) -> None:
    encoding = tokenizer.from_bpe_files(*small_pair(tmp_path))
    assert tokenizer.encode(encoding, "abcab") == [257, 256]
    assert tokenizer.end_of_text(encoding) == 258
    assert tokenizer.end_of_text(None) is None
    with pytest.raises(CheckpointError, match="it has token id 258, the model has 258 tokens"):
        tokenizer.load(tmp_path, 258)


@pytest.mark.parametrize(
    ("changed", "merges", "message"),
    [
        ({"abc": 256, "ab": 257}, None, "expected ids in the order of the merges"),
        ({"abc": 258}, None, "expected ids that are different integers"),
        ({}, "#version: 0.2\na b c\n", "expected two tokens in a line"),
        ({}, "#version: 0.2\na x\n", "no id for 'ax'"),
        ({}, "#version: 0.2\na b\n", "no merge makes 'abc'"),
        ({}, "[" * 10**5, "expected two tokens in a line"),
        ({}, "\udcff", "not the two files of a GPT-2 BPE"),
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
    with pytest.raises(CheckpointError) as error:
        tokenizer.from_bpe_files(*pair)
    assert message in str(error.value)
    assert str(pair[0]) in str(error.value)


def llm_c(*tokens: bytes, version: int = 2, last: int = 256, count: int | None = None) -> bytes:
    header = np.zeros(256, "<i4")
    header[:4] = 20240328, version, len(tokens) if count is None else count, last
    return header.tobytes() + b"".join(bytes([len(token)]) + token for token in tokens)


SINGLE = [bytes([byte]) for byte in range(256)]


@pytest.mark.parametrize(("version", "last"), [(2, 256), (1, 257)])
def test_the_tokenizer_of_llm_c(tmp_path: Path, version: int, last: int) -> None:
    more = [b"ab"] if last == 257 else [b"<|endoftext|>", b"ab"]
    tokens = [*SINGLE, *more, *[b"<|endoftext|>"] * (last == 257)]
    (tmp_path / "gpt2_tokenizer.bin").write_bytes(llm_c(*tokens, version=version, last=last))
    for encoding in (
        tokenizer.load(tmp_path, 258),
        tokenizer.from_path(tmp_path / "gpt2_tokenizer.bin", 300),
    ):
        assert tokenizer.encode(encoding, "xab") == [ord("x"), tokens.index(b"ab")]
        assert tokenizer.end_of_text(encoding) == last


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a tokenizer of llm.c"),
        (llm_c(*SINGLE, b"end", version=3), "version 3"),
        (llm_c(*SINGLE, b"end", count=-1), "-1 tokens"),
        (llm_c(*SINGLE, b"end", count=2**31 - 1), "2147483647 tokens"),
        (llm_c(*SINGLE, b"end", count=258), "index out of range"),
        (llm_c(*SINGLE, b"end", count=256), "bytes: expected"),
        (llm_c(*SINGLE, b"end")[:-1], "bytes: expected"),
        (llm_c(*SINGLE, b"a", b"end", last=257), "different"),
        (llm_c(*SINGLE, b"end", last=400), "different"),
        (llm_c(*SINGLE[1:], b"end", last=255), "a token for each of the 256 bytes"),
    ],
)
def test_a_damaged_tokenizer_of_llm_c(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "gpt2_tokenizer.bin"
    file.write_bytes(content)
    with pytest.raises(CheckpointError) as error:
        tokenizer.load(tmp_path, 257)
    assert str(file) in str(error.value)
    assert message in str(error.value)


@given(
    content=st.binary(max_size=80),
    start=st.sampled_from([b"", b"{", llm_c(*SINGLE, b"end")[:1500], llm_c(*SINGLE, b"end")]),
    name=st.sampled_from(["tokenizer.json", "vocab.json", "merges.txt", "gpt2_tokenizer.bin"]),
)
def test_any_bytes_are_a_tokenizer_or_a_checkpoint_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, start: bytes, name: str
) -> None:
    folder = tmp_path_factory.mktemp("any")
    small_pair(folder)
    (folder / name).write_bytes(start + content)
    try:
        assert tokenizer.from_path(folder / name, 1000).n_vocab
    except CheckpointError:
        return


def test_where_there_is_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text("{}")  # merges.txt is not there
    for path in (tmp_path, tmp_path / "nothing", str(tmp_path)):
        with pytest.raises(CheckpointError, match=r"no tokenizer: expected tokenizer\.json, enc"):
            tokenizer.from_path(path, 50257)
    with pytest.raises(CheckpointError, match="weights given as arrays: expected tokenizer"):
        tokenizer.load(None, 100)


def test_gpt2_for_weights_that_came_without(bpe: Path) -> None:
    assert tokenizer.load(None, 50257).n_vocab == 50257


def test_importing_needs_no_network() -> None:
    code = (
        "import socket\n"
        "def refuse(*_): raise AssertionError('a socket')\n"
        "socket.socket = socket.create_connection = socket.getaddrinfo = refuse\n"
        "import gpt2block.tokenizer, gpt2block.generation, gpt2block.scoring, gpt2block.cli_model\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent.parent)

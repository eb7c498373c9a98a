"""Scores: each token is predicted once, from the context of the stride; token files; vectors."""

from __future__ import annotations

import io
import itertools
import math
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from gpt2block import InputError
from gpt2block.engine.generation import scoring
from gpt2block.engine.generation.scoring import LLM_C_MAGIC, Score, embed, load_tokens, score
from gpt2block.engine.model import Floats, Ids
from tests.markov import MarkovEngine, byte_encoding, cycle, log_softmax, random_table

BYTES = byte_encoding(end=False)


class CountingEngine(MarkovEngine):
    """An engine for which a token's log-likelihood is minus the length of its context."""

    def log_likelihood(self, sequences: Sequence[Ids]) -> list[Floats]:
        self._check(sequences)
        return [-np.arange(1, len(ids), dtype=np.float32) for ids in sequences]


def contexts_by_hand(size: int, n_ctx: int, stride: int) -> list[int]:
    """Return the context length of each token after the first, by the model card's rule."""
    found = list(range(1, min(size, n_ctx)))
    first = 0
    while first + n_ctx < size:
        first += stride
        end = min(first + n_ctx, size)
        found += [token - first for token in range(first - stride + n_ctx, end)]
    return found


@given(
    size=st.integers(2, 60), n_ctx=st.integers(2, 16), data=st.data(), at_once=st.integers(1, 99)
)
def test_windows(size: int, n_ctx: int, data: Any, at_once: int) -> None:
    stride = data.draw(st.integers(1, n_ctx - 1))
    engine = CountingEngine(cycle(7), n_ctx)
    told: list[tuple[int, int]] = []
    found = score(
        engine, None, np.arange(size) % 7, stride=stride, tokens_at_once=at_once,
        progress=lambda done, total: told.append((done, total)),
    )  # fmt: skip
    expected = contexts_by_hand(size, n_ctx, stride)
    assert len(expected) == size - 1
    assert found == Score(-sum(expected), size - 1, None, n_ctx, stride, found.tokens)
    assert found.tokens.logprobs.tolist() == [-n for n in expected]
    assert [token.id for token in found.tokens] == (np.arange(1, size) % 7).tolist()
    assert all(sum(lengths) <= at_once or len(lengths) == 1 for lengths in engine.batches)
    assert told[-1] == (size - 1, size - 1)
    assert len(told) == len(engine.batches)
    assert told == sorted(told)


def test_a_score_is_the_sum_of_the_log_probabilities() -> None:
    engine = MarkovEngine(random_table(1, 256), n_ctx=16)
    text = "Now is the winter of our discontent made glorious summer by this sun of York"
    found = score(engine, BYTES, text)
    ids = np.frombuffer(text.encode(), np.uint8)
    nats = log_softmax(engine.table)[ids[:-1], ids[1:]]
    assert found.log_likelihood == pytest.approx(nats.sum(), rel=1e-6)
    assert found.stride == 8
    assert found.n_tokens == found.bytes == len(ids) - 1
    assert found.nats_per_token == pytest.approx(-nats.mean(), rel=1e-6)
    assert found.perplexity == pytest.approx(math.exp(-nats.mean()), rel=1e-5)
    assert found.bits_per_byte == pytest.approx(-nats.mean() / math.log(2), rel=1e-6)
    assert score(engine, BYTES, ids) == found
    assert score(engine, None, ids.tolist()) == replace(found, bytes=None)
    np.testing.assert_allclose(found.tokens.logprobs, nats, rtol=1e-6)
    third = found.tokens[2]
    assert (third.id, third.text) == (text.encode()[3], text[3])
    assert third.surprisal == pytest.approx(-nats[2] / math.log(2), rel=1e-6)
    assert [token.text for token in found.tokens[-4:]] == list("York")
    assert found.log_likelihood == found.tokens.logprobs.sum(dtype=np.float64)  # no float32 sum
    assert f"perplexity {found.perplexity:,.4f}, " in found._repr_html_()
    best = score(engine, BYTES, text, likeliest=True).tokens
    np.testing.assert_array_equal(best[3:9].likeliest, engine.table[ids[3:9]].argmax(axis=-1))


def test_a_list_of_texts() -> None:
    engine = MarkovEngine(random_table(1, 256), n_ctx=8)
    texts = ["To be, or not to be", "that", [1, 2, 3], "is the question:"]
    told: list[tuple[int, int]] = []
    found = score(
        engine, BYTES, texts, stride=3, tokens_at_once=20, progress=lambda *at: told.append(at)
    )
    alone = [score(engine, BYTES, text, stride=3) for text in texts]
    assert found == alone
    for one, other in zip(found, alone, strict=True):
        np.testing.assert_array_equal(one.tokens.logprobs, other.tokens.logprobs)
    count = sum(one.n_tokens for one in alone)
    assert told[-1] == (count, count)
    assert max(map(len, engine.batches)) > 1
    with pytest.raises(InputError, match="text 1: expected at least two tokens to score one"):
        score(engine, BYTES, ["ab", "c"])
    with pytest.raises(InputError, match="text 1: token 0 is 300: expected ids from 0 to 255"):
        score(engine, BYTES, ["ab", [300, 1]])


def test_pieces_are_whole_characters() -> None:
    engine = MarkovEngine(np.zeros((256, 256), np.float32))
    found = score(engine, BYTES, "aÜ🎭" + "b").tokens
    pieces, bits = zip(*found.pieces(), strict=True)
    assert pieces == ("Ü", "🎭", "b")
    assert bits == pytest.approx([16, 32, 8])
    cut = score(engine, BYTES, [97, 98, 0xF0]).tokens
    assert [piece for piece, _ in cut.pieces()] == ["b", "\ufffd"]
    assert cut[1].text == "\ufffd"
    nothing = score(engine, None, [1, 2]).tokens
    assert list(nothing.pieces()) == []
    assert nothing[0].text == ""


def test_bytes_are_those_of_the_text_predicted() -> None:
    encoding = byte_encoding(b"th", b"the ")  # 258 is the end token
    engine = MarkovEngine(random_table(1, 300), n_ctx=16)
    assert score(engine, encoding, [257, 256, 97, 258, 257, 299]).bytes == 2 + 1 + 0 + 4 + 0
    assert score(engine, encoding, "Ü🎭").bytes == len("Ü🎭".encode()) - 1
    nothing = score(engine, encoding, [97, 258])
    assert nothing.bytes == 0
    assert nothing.bits_per_byte is None


def test_impossible_tokens() -> None:
    table = cycle(5)
    table[2, 3] = -np.inf
    found = score(MarkovEngine(table), None, [1, 2, 3])
    assert found.log_likelihood == -math.inf
    assert found.perplexity == math.inf
    table[2, 3] = np.nan
    with pytest.raises(InputError, match=r"NaN between tokens 6 and 7.*try dtype='float32'"):
        score(MarkovEngine(table, n_ctx=4), None, [0, 1, 1, 1, 1, 2, 3, 1, 1], tokens_at_once=1)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("a", {}, "text: expected at least two tokens to score one, got 1"),
        ("", {}, "expected at least two tokens to score one, got 0"),
        ([3, 256], {}, "text: token 1 is 256: expected ids from 0 to 255"),
        (np.array([3, -1]), {}, "text: token 1 is -1"),
        (np.zeros((2, 2), int), {}, "text: expected text or a row of integers, got int64 (2, 2)"),
        (np.zeros(2), {}, "text: expected text or a row of integers, got float64 (2,)"),
        (None, {}, "text: expected text or a row of integers, got NoneType"),
        ("a\ud800b", {}, "text: character 1 is U+D800, a lone surrogate"),
        (np.ma.array([1, 2], mask=[False, True]), {}, "text: expected token ids, got a masked"),
        ("ab", {"stride": 0}, "stride: expected a positive integer, got 0"),
        ("ab", {"stride": 64}, "stride: expected 1 to 63, less than n_ctx, got 64"),
        ("ab", {"tokens_at_once": 0}, "tokens_at_once: expected a positive integer"),
    ],
)
def test_wrong_input(text: Any, options: dict[str, Any], message: str) -> None:
    engine = MarkovEngine(cycle(256))
    with pytest.raises(InputError, match=re.escape(message)):
        score(engine, BYTES, text, **options)
    assert engine.batches == []
    with pytest.raises(InputError, match="n_ctx 1 predicts no token from another"):
        score(MarkovEngine(cycle(3), n_ctx=1), None, [1, 2])


def with_header(ids: NDArray[np.uint16], version: int = 1, count: int | None = None) -> bytes:
    header = np.zeros(256, "<i4")
    header[:3] = LLM_C_MAGIC, version, len(ids) if count is None else count
    return header.tobytes() + ids.tobytes()


IDS = np.array([5, 0, 50256, 65535, 7], "<u2")


def npy(content: Any) -> bytes:
    """Return a .npy file of version 1: an array, or this header and 12 bytes."""
    if isinstance(content, str):
        text = content.encode("latin1") + b"\n"
        return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(range(12))
    file = io.BytesIO()
    np.save(file, content)
    return file.getvalue()


TURNED = "{'descr': '<u2', 'fortran_order': True, 'shape': (3,)}"


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        *(("a.npy", npy(IDS.astype(dtype)), IDS) for dtype in (np.uint16, np.int64, ">i4")),
        ("a.npy", npy(TURNED), np.frombuffer(bytes(range(6)), "<u2")),
        ("a.bin", with_header(IDS), IDS),
        ("a.bin", IDS.tobytes(), IDS),
        ("a.bin", np.tile(IDS, 1000).tobytes(), np.tile(IDS, 1000)),
    ],
)
def test_token_files(tmp_path: Path, name: str, content: bytes, expected: Any) -> None:
    """Files of NumPy, of llm.c (with a header) and of nanoGPT (without one) are read."""
    (tmp_path / name).write_bytes(content)
    found = load_tokens(str(tmp_path / name))
    assert isinstance(found, np.memmap)
    assert found.tolist() == expected.tolist()


UNREADABLE, NO_ROW = "cannot be read as a token file", "expected a row of integers, got "
HEADERS = {
    "{'descr': '<u2', 'fortran_order': False, 'shape': (3,), ": UNREADABLE,  # a TokenError
    "(" * 900: UNREADABLE,
    "[" * 9000 + "]" * 9000: UNREADABLE,  # raises MemoryError or RecursionError
    "\x00": UNREADABLE,
    "{'descr': '<u2', 'fortran_order': False, 'shape': (10**9,)}": UNREADABLE,
    "{'descr': '<u2', 'fortran_order': False, 'shape': (1000000000000000000000000,)}": UNREADABLE,
    "{'descr': '<u2', 'fortran_order': False, 'shape': (999999999999,)}": UNREADABLE,
    "{'descr': '<u2', 'fortran_order': False, 'shape': (-3,)}": UNREADABLE,
    "{'descr': 'nonsense', 'fortran_order': False, 'shape': (3,)}": UNREADABLE,
    "{'descr': '|O', 'fortran_order': False, 'shape': (3,)}": UNREADABLE,
    "{'descr': [('a', '<u2'), ('b', '<u2')], 'fortran_order': False, 'shape': (3,)}": NO_ROW,
    "{'descr': '<u2', 'fortran_order': False, 'shape': ()}": NO_ROW,
    "{'descr': '<u2', 'fortran_order': True, 'shape': (3, 2)}": NO_ROW,
    "{'descr': '<f4', 'fortran_order': False, 'shape': (3,)}": NO_ROW,
}


@pytest.mark.filterwarnings("ignore")  # NumPy warns about headers written by Python 2
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.bin", with_header(IDS, version=2), "expected version 1 and 1,034 bytes"),
        ("a.bin", with_header(IDS, count=6), "expected version 1 and 1,036 bytes for its 6 tokens"),
        ("a.bin", with_header(IDS)[:-1], "1,033 bytes, with the header of llm.c: expected"),
        ("a.bin", with_header(IDS)[:100], "100 bytes, with the header of llm.c"),
        ("a.bin", with_header(IDS[:0]), "expected uint16 tokens, two bytes each, got 1,024 bytes"),
        ("a.bin", IDS.tobytes() + b"x", "expected uint16 tokens, two bytes each, got 11 bytes"),
        ("a.bin", b"", "expected uint16 tokens, two bytes each, got 0 bytes"),
        ("a.bin", b"version https://git-lfs.github.com/spec/v1\n", "a Git-LFS pointer"),
        ("a.npy", b"no array", UNREADABLE),
        ("a.npy", b"", UNREADABLE),
        ("a.npy", b"PK\x03\x04 no archive after all", NO_ROW + "an archive"),
        *(("a.npy", npy(header), message) for header, message in HEADERS.items()),
    ],
    ids=itertools.count(),
)
def test_wrong_token_files(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=re.escape(f"{tmp_path / name}: ") + f".*{message}"):
        load_tokens(tmp_path / name)


@pytest.mark.parametrize(
    "path",
    [3, None, "", "no such.npy", "~nosuchuser/a.npy", "a\0.npy", "\ud800.npy", "/dev/zero", "pipe"],
)
def test_what_is_no_token_file(path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")  # opening it would wait for a writer forever
    with pytest.raises(InputError, match=UNREADABLE):
        load_tokens(path)


@pytest.mark.parametrize("at_once", [100, 2**24])
def test_a_file_is_scored_where_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(scoring, "_AT_ONCE", at_once)
    ids = np.random.default_rng(0).integers(0, 5, 999).astype("<u2")
    (tmp_path / "a.bin").write_bytes(with_header(ids))
    engine = MarkovEngine(random_table(0, 5), n_ctx=32)
    assert score(engine, None, load_tokens(tmp_path / "a.bin")) == score(engine, None, ids)
    ids[777] = 5
    (tmp_path / "a.bin").write_bytes(with_header(ids))
    with pytest.raises(InputError, match="text: token 777 is 5: expected ids from 0 to 4"):
        score(engine, None, load_tokens(tmp_path / "a.bin"))


def test_vectors() -> None:
    engine = MarkovEngine(cycle(256))
    one = embed(engine, BYTES, "ac")
    assert one.dtype == np.float32
    assert one.tolist() == [98, 1, 0, 0]
    assert embed(engine, BYTES, "ac", pooling="last").tolist() == [99, 1, 0, 0]
    assert embed(engine, BYTES, "ac", pooling="cls").tolist() == [97, 1, 0, 0]
    assert embed(engine, BYTES, "ac", dimensions=1).tolist() == [98]
    short = embed(engine, BYTES, [[3], [4, 4]], dimensions=2, normalize=True)
    np.testing.assert_allclose(short * [[10**0.5], [17**0.5]], [[3, 1], [4, 1]], rtol=1e-6)
    many = embed(engine, BYTES, ["a", "ac", [0, 1, 2], "abc"], tokens_at_once=3)
    assert many[:, 0].tolist() == [97, 98, 1, 98]
    assert engine.batches[5:] == [[1, 2], [3], [3]]


@pytest.mark.parametrize(
    ("inputs", "pooling", "message"),
    [
        ("ab", "max", "pooling: expected one of mean, last, cls, got 'max'"),
        ("", "mean", "input: expected 1 to 4 tokens, got 0"),
        (["ab", "abcde"], "mean", "input 1: expected 1 to 4 tokens, got 5"),
        ([], "mean", "input: expected text, token ids or a list of them, got []"),
    ],
)
def test_wrong_vectors(inputs: Any, pooling: Any, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        embed(MarkovEngine(cycle(256), n_ctx=4), BYTES, inputs, pooling)

"""Scores: each token is predicted once, from the context of the stride; token files; vectors."""

from __future__ import annotations

import io
import math
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

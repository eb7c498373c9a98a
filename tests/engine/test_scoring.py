"""Scores: each token is predicted once, from the context of the stride, also in large files."""

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
from gpt2block.engine.generation.scoring import LLM_C_MAGIC, Score, load_tokens, score
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

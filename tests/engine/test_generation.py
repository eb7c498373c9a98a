"""Generation: ends of sequences, streamed pieces, and independence of the batch."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt2block.engine.generation.sequences import Text
from gpt2block.sampling import DEFAULT_TEMPERATURE, Sampling
from tests.generating import Run, generate, stream
from tests.markov import MarkovEngine, byte_encoding, cycle, random_table

BYTES = byte_encoding(end=False)
WITH_END = byte_encoding()
V = 257


def says(text: str | bytes, n_ctx: int = 64) -> MarkovEngine:
    """Return an engine whose only sequence generates this text, one byte per token."""
    data = text.encode() if isinstance(text, str) else text
    return MarkovEngine(cycle(V), n_ctx, [data])


def test_a_stream_returns_the_generation() -> None:
    pieces = stream(says("no. more"), BYTES, "x", stop=".", seed=3)
    assert [next(pieces), next(pieces)] == ["n", "o"]
    with pytest.raises(StopIteration) as end:
        next(pieces)
    assert end.value.value == generate(says("no. more"), BYTES, "x", stop=".", seed=3)
    assert end.value.value.finish_reason == "stop"


def test_a_stream_closed_early_computes_no_more() -> None:
    engine = MarkovEngine(cycle(256), script=[iter(b"abcdef")])
    pieces = stream(engine, BYTES, "x")
    assert next(pieces) == "a"
    pieces.close()
    assert engine.script is not None
    assert bytes(engine.script[0]) == b"bcdef"


STOPS = st.lists(
    st.text("ab\ufffdÜ", min_size=1, max_size=4) | st.sampled_from(["aab", "aba", "Üa"]), max_size=3
)
CHUNKS = st.lists(
    st.sampled_from([b"a", b"b", b"ab", b"\xc3", b"\x9c", b"\xc3\x9c", b"\xff", b"\xf0\x9f", b"aa"])
    | st.binary(max_size=3),
    max_size=12,
)


@given(chunks=CHUNKS, stops=STOPS)
def test_the_pieces_are_the_text_whatever_the_bytes(chunks: list[bytes], stops: list[str]) -> None:
    whole = b"".join(chunks).decode(errors="replace")
    ends = [(at + len(stop), at, stop) for stop in stops if (at := whole.find(stop)) >= 0]
    expected = whole[: min(ends)[1]] if ends else whole
    text, shown = Text(tuple(stops)), ""
    for chunk in chunks:
        shown += text.add(chunk)
        assert expected.startswith(shown)
    shown += text.add(b"", final=True)
    assert shown == expected
    assert text.found == (min(ends)[2] if ends else None)
    assert text.add(b"more", final=True) == "" or not ends


@given(
    script=st.lists(st.integers(0, V), max_size=20),
    stops=STOPS,
    size=st.integers(1, 20),
    n_ctx=st.integers(1, 9),
    truncate=st.booleans(),
)
def test_stream_and_generate_agree(
    script: list[int], stops: list[str], size: int, n_ctx: int, truncate: bool
) -> None:
    overflow = "truncate" if truncate else "error"
    options: dict[str, Any] = {"stop": stops, "max_new_tokens": size, "overflow": overflow}
    encoding = byte_encoding(b"ab")  # 257 is the end token
    engines = [MarkovEngine(cycle(258), n_ctx, [script]) for _ in range(2)]
    found = generate(engines[0], encoding, "x", **options)
    pieces = list(stream(engines[1], encoding, "x", **options))
    assert "".join(pieces) == found.text
    assert all(pieces)
    assert not any(stop in found.text for stop in stops)
    assert len(found.tokens) == len(found.logprobs)
    if found.finish_reason == "length":
        assert len(found.tokens) == size
    elif found.finish_reason == "context":
        assert not truncate
        assert len(found.tokens) == n_ctx
    else:
        assert found.tokens[-1] == 257 or stops
    if found.finish_reason != "stop":
        assert encoding.decode_bytes(list(found.tokens)).decode(errors="replace") == found.text


@given(
    prompts=st.lists(st.text("abc", min_size=1, max_size=9), min_size=1, max_size=5),
    samples=st.integers(1, 3),
    at_once=st.integers(1, 6),
    seed=st.integers(0, 2**64 - 1),
)
def test_a_row_is_the_same_in_every_batch(
    prompts: list[str], samples: int, at_once: int, seed: int
) -> None:
    engine = MarkovEngine(random_table(3, 256), n_ctx=7)
    options: dict[str, Any] = {"seed": seed, "samples": samples, "max_new_tokens": 12}
    options |= {"overflow": "truncate", "stop_ids": [7, 8]}
    together = generate(engine, BYTES, prompts, rows_at_once=at_once, **options)
    assert all(len(sequences) <= at_once for sequences in engine.batches)
    assert together == [generate(engine, BYTES, prompt, **options) for prompt in prompts]


def test_samples_differ_and_seeds_do() -> None:
    engine = MarkovEngine(random_table(0, 256))
    texts = {found.tokens for found in generate(engine, BYTES, "a", samples=4, seed=5)}
    assert len(texts) == 4
    assert generate(engine, BYTES, "a", seed=6).tokens not in texts
    assert generate(engine, BYTES, "a", seed=5).tokens in texts


def test_a_new_seed_for_every_call_which_is_reported() -> None:
    engine = MarkovEngine(random_table(0, 256))
    first, second = (generate(engine, BYTES, "a", temperature=1) for _ in range(2))
    assert first.seed != second.seed
    assert first.tokens != second.tokens
    assert generate(engine, BYTES, "a", temperature=1, seed=first.seed) == first
    several = generate(engine, BYTES, ["a", "b"], samples=2, seed=5)
    assert [found.seed for found in several[1]] == [5, 5]
    groups = generate(engine, BYTES, ["a", "b", "a"], samples=2, temperature=1)
    own = [found for group in groups for found in group]
    assert len({found.seed for found in own}) == len({found.tokens for found in own}) == 6
    for prompt, found in zip("aabbaa", own, strict=True):
        assert generate(engine, BYTES, prompt, temperature=1, seed=found.seed) == found
    equal = generate(engine, BYTES, ["a", "a"], seed=5)
    assert equal[0] == equal[1]
    with pytest.raises(StopIteration) as end:
        next(stream(engine, None, [97], max_new_tokens=2))  # no tokenizer: no text, so no pieces
    drawn = end.value.value
    assert drawn == generate(engine, None, [97], max_new_tokens=2, seed=drawn.seed)


def test_a_sampling_in_place_of_its_fields() -> None:
    engine = MarkovEngine(random_table(0, 256))
    fields: dict[str, Any] = {"temperature": 0.5, "top_k": 9, "seed": 4}
    sampling = Sampling(**fields)
    expected = generate(engine, BYTES, "a", samples=3, **fields)
    assert generate(engine, BYTES, "a", samples=3, sampling=sampling) == expected
    assert generate(engine, BYTES, "a", sampling=replace(sampling, sample=2)) == expected[2]


def test_the_default_temperature() -> None:
    engine = MarkovEngine(random_table(0, 256))
    default, given = (
        generate(engine, BYTES, "a", seed=1, **options)
        for options in ({}, {"temperature": DEFAULT_TEMPERATURE})
    )
    assert default == given
    assert DEFAULT_TEMPERATURE == Sampling().temperature == 0.8


def test_rows_are_bounded_and_made_when_they_are_needed() -> None:
    engine = MarkovEngine(cycle(256))
    tracemalloc.start()
    run = Run(engine, BYTES, ["a", "b"], samples=2**19, seed=1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20
    assert len(run.sequences) == 2**20
    assert run.sequences[-1].sampling.sample == 2**19 - 1
    assert run.sequences[2**19].prompt.tolist() == [ord("b")]

"""A batch: sequences come and go, each as if alone; the cached tokens of a slot can be reused."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from dataclasses import replace
from time import monotonic
from typing import Any

import numpy as np
import pytest

from gpt2block import GPT2, GPT2Config, InputError
from gpt2block.apps.serve.service import batch_of
from gpt2block.engine.generation import batching
from gpt2block.engine.generation.batching import TURN, Batch
from gpt2block.engine.generation.scheduling import PIECE
from gpt2block.engine.generation.sequences import TokenSequence
from gpt2block.engine.model import Sampled, Start
from gpt2block.engine.numpy import model as numpy_model
from gpt2block.files.parameters.gpt2 import GPT2Weights
from tests.devices import GPU, SOMEWHERE, running_on
from tests.generating import Run, generate
from tests.markov import MarkovEngine, byte_encoding, cycle

TINY = GPT2Config(n_layer=1, n_head=2, n_embd=32, n_ctx=24, vocab_size=37)
BYTES = byte_encoding()
EVERYWHERE = pytest.mark.parametrize("device", ["cpu", *SOMEWHERE])


def model(device: str, config: GPT2Config = TINY, dtype: str = "float32") -> GPT2:
    weights = GPT2Weights.random(0, config)
    return GPT2(weights, device="cpu" if device == "cpu" else "cuda", dtype=dtype)


def on(device: str) -> Any:
    return nullcontext() if device == "cpu" else running_on(device)


def pending(engine: Any, prompt: Any, encoding: Any = None, **options: Any) -> TokenSequence:
    return Run(engine, encoding, prompt, **options).sequences[0]


def finish(batch: Batch) -> None:
    while batch.busy:
        batch.step()


def random_options(rng: np.random.Generator) -> dict[str, Any]:
    """Draw options of a sequence for sampling and its end; many sequences end by chance."""
    return {
        "max_new_tokens": int(rng.integers(1, 12)),
        "temperature": float(rng.choice([0, 0.3, 1])),
        "top_k": int(rng.choice([0, 5])),
        "top_p": float(rng.choice([1, 0.8])),
        "repetition_penalty": float(rng.choice([1, 1.3])),
        "seed": int(rng.integers(100)),
        "stop_ids": rng.integers(TINY.vocab_size, size=rng.integers(1, 4)).tolist(),
        "top_logprobs": int(rng.choice([0, 3])),
        "logit_bias": {} if rng.random() < 0.7 else {int(rng.integers(37)): 3.5, 5: -2.0},
        "frequency_penalty": float(rng.choice([0, 0, 0.4])),
        "presence_penalty": float(rng.choice([0, 0, -0.3])),
        "min_new_tokens": int(rng.choice([0, 1])),
        "overflow": str(rng.choice(["error", "truncate"])),
    }


def test_generate_has_the_pieces_of_a_server() -> None:
    """A prompt longer than two pieces is divided; `start` computes the rest."""
    engine = MarkovEngine(cycle(8), n_ctx=2 * PIECE + 10)
    ids, options = [1] * (2 * PIECE + 3), {"max_new_tokens": 2, "temperature": 0}
    found = generate(engine, None, ids, **options)
    alone, engine.pieces = engine.pieces, []
    server, sequence = batch_of(engine, 2), pending(engine, ids, **options)
    server.submit([sequence])
    finish(server)
    assert alone == engine.pieces == [(0, 0, PIECE), (0, PIECE, 2 * PIECE)]
    assert list(found.tokens) == sequence.tokens
    engine.pieces, engine.divides_prompts = [], False
    assert generate(engine, None, ids, **options).tokens == found.tokens
    assert engine.pieces == []


@pytest.mark.parametrize("options", [{"stop_ids": [3]}, {"stop": ["\x03"]}, {}])
def test_a_divided_prompt_follows_a_sequence_that_has_ended_early(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No slot counts as decoding after its sequence has ended: by a stop, or by wrong logits."""
    monkeypatch.setattr(batching, "PIECE", 4)
    engine = MarkovEngine(cycle(257))
    engine.table[2] = engine.table[2] if options else np.nan
    first = pending(engine, [1], BYTES, **options)
    sequences = [first, pending(engine, [5] * 10, max_new_tokens=3)]
    batch = Batch(engine, 1, engine.config.n_ctx, tokens_at_once=4)
    batch.submit(sequences)
    finish(batch)
    assert sequences[0].finish_reason == ("stop" if options else "error")
    assert (sequences[1].tokens, sequences[1].finish_reason) == ([6, 7, 8], "length")


def test_sequences_end_at_their_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting sequences end too, and those whose prompt is being computed; others continue."""
    engine, now = MarkovEngine(cycle(8)), [10.0]
    monkeypatch.setattr(batching, "monotonic", lambda: now[0])
    monkeypatch.setattr(batching, "PIECE", 1)
    sequences = [pending(engine, [1] * n, max_new_tokens=6, temperature=0) for n in (1, 1, 3, 1, 1)]
    batch = Batch(engine, 3, engine.config.n_ctx, tokens_at_once=1)
    batch.submit(sequences[:1])
    batch.submit(sequences[1:2], deadline=13)
    batch.submit(sequences[2:4], deadline=12)
    batch.submit(sequences[4:], deadline=1000)
    batch.step()
    batch.step()
    late = {id(sequence): list(sequence.tokens) for sequence in sequences}
    now[0] = 12.0
    assert {id(each) for each in batch.step()} == {id(each) for each in sequences[2:4]}
    assert [each.finish_reason for each in sequences] == [None, None, "deadline", "deadline", None]
    now[0] = 13.5
    assert batch.step() == sequences[1:2]
    assert sequences[1].tokens == late[id(sequences[1])]
    finish(batch)
    assert [sequence.finish_reason for sequence in sequences[::4]] == ["length", "length"]
    assert sequences[4].tokens == [2, 3, 4, 5, 6, 7]
    assert not batch.waiting


def test_ended_sequences_are_forgotten_before_their_deadline() -> None:
    """A server with a long timeout does not keep every text until its deadline."""
    engine = MarkovEngine(cycle(8))
    batch = Batch(engine, 2, engine.config.n_ctx)
    left = []
    for _ in range(20):
        sequence = pending(engine, [1], max_new_tokens=2, temperature=0)
        batch.submit([sequence], monotonic() + 1000)
        finish(batch)
        left.append(weakref.ref(sequence))
    del sequence
    assert sum(each() is not None for each in left) <= 1


@pytest.mark.parametrize(
    ("ends", "text", "count"),
    [({"stop_ids": [ord("c")]}, "b", 2), ({"stop": ["de"]}, "bc", 4), ({}, "bcdefghi", 8)],
)
def test_tokens_of_a_step_after_the_end_of_a_sequence_are_left_out(
    ends: dict[str, Any], text: str, count: int
) -> None:
    """Each step returns four tokens of the slot, as a step with right draft tokens does."""
    engine = MarkovEngine(cycle(257))
    sequence = pending(engine, "a", BYTES, temperature=0, max_new_tokens=8, **ends)
    batch = Batch(engine, 1, 64)
    decoding: Any = batch._decoding
    one = decoding.next

    def four() -> Sampled:
        slots, tokens, logprobs = zip(*(one()[:3] for _ in range(4)), strict=True)
        place = np.concatenate(slots), np.concatenate(tokens), np.concatenate(logprobs)
        return Sampled(*place, nth=np.arange(4, dtype=np.int32))

    decoding.next = four
    batch.submit([sequence])
    finish(batch)
    assert (sequence.text, len(sequence.tokens), len(sequence.logprobs)) == (text, count, count)


def test_held_sequences_come_where_they_may_have_ended() -> None:
    engine = MarkovEngine(cycle(257))
    sequences = [
        pending(engine, "a", BYTES, temperature=0, max_new_tokens=8, stop=["fg"]),  # held
        pending(engine, "a", BYTES, temperature=0, max_new_tokens=4),  # held
        pending(engine, "a", BYTES, temperature=0, max_new_tokens=7),
    ]
    for sequence in sequences[:2]:
        sequence.held = True
    batch = Batch(engine, 3, 64)
    batch.submit(sequences)
    steps, firsts, begun = [], [], []
    while batch.busy:
        steps.append([sequences.index(sequence) for sequence in batch.step()])
        firsts.append(batch.firsts.tolist())
        begun.append(batch.begun)
        assert len(batch.latest) == len(firsts[-1])
    assert steps == [[2], [2], [2], [1, 2], [2], [0, 2], [2]]
    assert begun == [sequences, *[[]] * 6]
    assert firsts == [[True] * 3, *[[False] * 3] * 3, *[[False] * 2] * 2, [False]]
    assert [sequence.text for sequence in sequences] == ["bcde", "bcde", "bcdefgh"]


def test_a_held_sequence_gives_all_its_tokens_once_it_is_not() -> None:
    """A released sequence gives log-probabilities and flags too; a stop string ends a held one."""
    engine = MarkovEngine(cycle(257))
    sequences = [
        pending(engine, "a", BYTES, temperature=0, max_new_tokens=9),
        pending(engine, "a", BYTES, temperature=0, max_new_tokens=9, stop=["efg"]),
    ]
    batch = Batch(engine, 2, 64, speculate=True)
    batch.submit(sequences)
    assert batch.step() == sequences
    assert [sequence.take() for sequence in sequences] == ["b", "b"]
    for sequence in sequences:
        sequence.held = True
    assert [batch.step() for _ in range(3)] == [[]] * 3
    sequences[0].held = False
    assert batch.step() == sequences[:1]
    assert sequences[0].take() == "cdef"
    tokens, logprobs, _, drafted = sequences[0].take_tokens()
    assert (tokens, len(logprobs)) == ([*b"bcdef"], 5)
    assert drafted == [False, True, False, True, False]  # odd tokens are drafted
    sequences[0].held = True
    assert batch.step() == sequences[1:]
    assert (sequences[1].take(), sequences[1].finish_reason) == ("cd", "stop")
    assert len(sequences[1].tokens) == len(sequences[1].logprobs) == 6
    assert sequences[1].drafted == [False, True] * 3
    finish(batch)
    assert (sequences[0].take(), sequences[0].finish_reason) == ("ghij", "length")


def test_slots_take_turns_where_nobody_reads_each_token() -> None:
    """After its turn a sequence has a token of each step, whether it is held or not."""
    engine = MarkovEngine(cycle(257))
    count = 2 * TURN + TURN // 2
    asked: dict[str, Any] = {"temperature": 0, "max_new_tokens": count}
    sequences = [pending(engine, "a", BYTES, **asked) for _ in range(TURN)]
    sequences[0].held = True
    batch = Batch(engine, TURN, 64)
    batch.submit(sequences)
    given: dict[int, list[int]] = {n: [] for n in range(TURN)}
    for step in range(1, count + 1):
        found = [sequences.index(sequence) for sequence in batch.step(each_token=False)]
        assert len(found) == (TURN if step == count else 1)
        for n in found:
            assert len(sequences[n].tokens) == len(sequences[n].logprobs) == step
            assert sequences[n].finish_reason == ("length" if step == count else None)
            given[n].append(step)
    for steps in given.values():
        assert (np.diff([0, *steps]) <= TURN).all()
    assert not batch.busy
    assert {sequence.text for sequence in sequences} == {generate(engine, BYTES, "a", **asked).text}


def test_a_cancelled_sequence_keeps_its_text_and_frees_its_slot() -> None:
    engine = MarkovEngine(cycle(257))
    first, second, third = (
        pending(engine, text, BYTES, temperature=0, max_new_tokens=9, stop=["zz"]) for text in "afp"
    )
    batch = Batch(engine, 1, 64)
    batch.submit([first, second, third])
    for _ in range(3):
        assert batch.step() == [first]
    batch.cancel([first, second])
    assert (first.text, first.finish_reason) == ("bcd", "cancelled")
    assert (second.text, second.finish_reason) == ("", "cancelled")
    batch.cancel([first])  # has ended already: no effect
    assert batch.step() == [third]
    finish(batch)
    assert (third.text, third.finish_reason) == ("qrstuvwxy", "length")
    assert not batch.busy
    with pytest.raises(AssertionError):
        first.result()


@pytest.mark.parametrize("held", [False, True])
def test_a_sequence_with_wrong_logits_ends_alone(held: bool) -> None:
    table = cycle(257)
    table[ord("x")] = np.nan
    engine = MarkovEngine(table)
    sequences = [pending(engine, text, BYTES, temperature=0, max_new_tokens=4) for text in "ua"]
    sequences[0].held = held
    batch = Batch(engine, 2, 64, speculate=True)
    batch.submit(sequences)
    finish(batch)
    assert sequences[0].finish_reason == "error"
    assert "the logits are NaN after 3 new tokens" in str(sequences[0].error)
    assert sequences[0].text == "vwx"
    assert (sequences[1].text, sequences[1].error) == ("bcde", None)
    assert [sequence.drafted for sequence in sequences] == [[False, True, False], [False, True] * 2]
    with pytest.raises(InputError, match="the logits are NaN after 3 new tokens"):
        generate(engine, BYTES, ["u", "a"], temperature=0, max_new_tokens=4)


class Spy:
    """Records the number of tokens that each start computes."""

    def __init__(self, batch: Batch) -> None:
        self.computed: list[int] = []
        decoding: Any = batch._decoding
        start = decoding.start

        def noted(starts: list[Start]) -> None:
            self.computed += [len(each.ids) - each.cached for each in starts]
            start(starts)

        decoding.start = noted


def told(batch: Batch, engine: Any, ids: list[int], **options: Any) -> TokenSequence:
    sequence = pending(engine, ids, temperature=0, **options)
    batch.submit([sequence])
    finish(batch)
    return sequence


@pytest.mark.parametrize(
    ("device", "dtype"),
    [*(("cpu", each) for each in ("float32", "bfloat16")), ("shuffled", "float32"),
     *(pytest.param("gpu", each, marks=GPU.marks) for each in ("float32", "bfloat16"))],
)  # fmt: skip
def test_what_a_slot_has_computed_is_not_computed_again(device: str, dtype: str) -> None:
    """Prompts continue, repeat or replace the last sequence's tokens; results are as alone."""
    config = GPT2Config(n_layer=1, n_head=2, n_embd=32, n_ctx=64, vocab_size=61)
    rng, few = np.random.default_rng(0), 4 if device in ("cpu", "gpu") else 2
    with on(device):
        m = model(device, config, dtype)
        batch = Batch(m.engine, 1, config.n_ctx, reuse=True)
        spy = Spy(batch)
        ids = rng.integers(61, size=9).tolist()
        first = told(batch, m.engine, ids, max_new_tokens=6)
        ids += first.tokens
        again = ids[:]
        prompts = [[*ids, 1, 2, 3], [*ids, 1, 2, 3], [*ids[:11], 5, 6], [7], again]
        found = [told(batch, m.engine, each, max_new_tokens=few) for each in prompts]
        assert spy.computed == [9, 4, 1, 2, 1, 15]
        for sequence, prompt in zip(found, prompts, strict=True):
            expected = m.generate(prompt, max_new_tokens=few, temperature=0)
            assert tuple(sequence.tokens) == expected.tokens
            np.testing.assert_allclose(sequence.logprobs, expected.logprobs, atol=2e-2)
        twice = [told(batch, m.engine, prompts[0], max_new_tokens=few) for _ in range(2)]
        assert twice[0].tokens == twice[1].tokens


@EVERYWHERE
def test_a_sequence_gets_the_slot_with_most_of_its_tokens(device: str) -> None:
    """Otherwise it gets the slot that has been free longest, to keep recent tokens."""
    with on(device):
        m = model(device)
        batch = Batch(m.engine, 3, TINY.n_ctx, reuse=True)
        spy = Spy(batch)
        begin = [[1, 2, 3, 4], [5, 6, 7], [1, 2, 8, 9]]
        sequences = [pending(m.engine, ids, temperature=0, max_new_tokens=3) for ids in begin]
        batch.submit(sequences)
        finish(batch)
        assert spy.computed == [4, 3, 4]
        prompts = [[5, 6, 7, *sequences[1].tokens, 1], [1, 2, 8, 9, 4], [9, 9], [1, 2, 8, 3]]
        for ids in prompts:
            sequence = told(batch, m.engine, ids, max_new_tokens=2)
            expected = m.generate(ids, max_new_tokens=2, temperature=0)
            assert tuple(sequence.tokens) == expected.tokens
        assert spy.computed[3:] == [2, 1, 2, 1]
        together = [pending(m.engine, p, temperature=0, max_new_tokens=2) for p in prompts[:3]]
        batch.submit(together)
        finish(batch)
        assert [sequence.reused for sequence in together] == [6, 3, 1]


def test_the_cache_of_numpy_grows_with_the_texts_and_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bits stay the same, also of a prefix that is copied before the cache grows."""
    m = model("cpu", replace(TINY, n_ctx=200))
    ids = np.random.default_rng(0).integers(37, size=200)
    found: list[Any] = []
    for first in (200, 8):
        monkeypatch.setattr(numpy_model, "FIRST_POSITIONS", first)
        batch = Batch(m.engine, 4, 200, reuse=True, tokens_at_once=1)
        cache: Any = batch._decoding._cache  # type: ignore[attr-defined]  # a NumpyDecoding
        sizes = []
        for _ in range(2):  # again after the memory has been given back
            options: dict[str, Any] = {"max_new_tokens": 9, "stop_ids": (), "seed": 1}
            early, long, copied = (
                pending(m.engine, prompt, **options)
                for prompt in (ids[:70], ids[::-1][:190], [*ids[:66], 1, 2])
            )
            batch.submit([early])
            batch.step()
            sizes.append(cache.positions)
            batch.submit([long, copied])
            batch.rest()  # changes nothing while sequences run
            finish(batch)
            sizes.append(cache.positions)
            assert copied.reused == 66
            found.append([(each.tokens, each.logprobs) for each in (early, long, copied)])
            batch.rest()
            sizes.append(cache.positions)
        assert sizes == [max(70, first), 200, first] * 2
    assert found == found[:1] * 4

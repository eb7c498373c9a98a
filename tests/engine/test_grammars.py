"""Texts that follow a schema, a regular expression, a choice or a grammar."""

from __future__ import annotations

import hashlib
import itertools
import json
import threading
from contextlib import nullcontext
from typing import Any

import house
import numpy as np
import pytest
import tiktoken
from numpy.typing import NDArray

pytest.importorskip("llguidance")

from gpt2block import GPT2, GPT2Config, InputError, cuda
from gpt2block.engine.generation.batching import Batch
from gpt2block.engine.generation.sequences import Generation
from gpt2block.engine.grammars import Grammar, Matcher, matching, vocabulary_of
from gpt2block.engine.speculation import SpeculationPolicy
from gpt2block.files.parameters.gpt2 import GPT2Weights
from gpt2block.sampling import mask_words, packed, unpacked
from tests.devices import GPU, SOMEWHERE, running_on, slow
from tests.generating import Run, generate, stream

PIECES = (
    b'{"',
    b'": ',
    b'", "',
    b'"}',
    b"name",
    b"age",
    b"na",
    b"me",
    b"true",
    b"tr",
    b"ue",
    b"12",
)
END = 256 + len(PIECES)
V = END + 8  # the last ids have no token
RANKS = {bytes([n]): n for n in range(256)} | {piece: 256 + n for n, piece in enumerate(PIECES)}
ENCODING = tiktoken.Encoding(
    "bytes", pat_str=r"[\s\S]", mergeable_ranks=RANKS, special_tokens={"<|endoftext|>": END}
)
CONFIG = GPT2Config(n_layer=1, n_head=2, n_embd=32, n_ctx=64, vocab_size=V)
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 3}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
RULES: dict[str, dict[str, Any]] = {
    "schema": {"schema": PERSON},
    "choice": {"choice": ["yes", "true", "name"]},
    "regex": {"regex": "[a-f]{2,4}(12|true)"},
    "grammar": {"grammar": 'start: "name" value\nvalue: "12" | "true" value'},
    "gbnf": {"grammar": 'root ::= "name" value\nvalue ::= "12" | "true" value'},
}


def ids_of(matcher: Matcher) -> list[int]:
    """Return the token ids that a matcher allows."""
    found: list[int] = np.flatnonzero(unpacked(matcher.mask(), V)).tolist()
    return found


def matcher_of(ends: frozenset[int] = frozenset({END}), **rule: Any) -> Matcher:
    grammar = Grammar.of(**rule)
    assert grammar is not None
    return vocabulary_of(ENCODING, V, ends).matcher(grammar)


def bytes_of(tokens: Any) -> bytes:
    return b"".join(ENCODING.decode_single_token_bytes(t) for t in tokens if t != END)


# --- matchers


def test_masks_of_several_texts_and_their_draft_tokens() -> None:
    person, true = matcher_of(schema=PERSON), matcher_of(choice=["true"])
    first, second = person.forced(), true.forced()
    assert (bytes_of(first), bytes_of(second)) == (b'{"name": ', b"true")
    masks = np.full((7, mask_words(V)), -1, np.int32)
    person.write(first[:2], masks[:3])
    true.write([RANKS[b"t"], RANKS[b"x"], RANKS[b"u"]], masks[3:])
    matcher = person.copy()
    for n in range(3):
        np.testing.assert_array_equal(masks[n], matcher.mask())
        matcher.accept(first[n : n + 1])
    found = [bytes_of(np.flatnonzero(unpacked(mask, V))) for mask in masks[3:]]
    assert found == [b"t", b"r", b"", b""]  # no token after the wrong draft token x
    np.testing.assert_array_equal(person.mask(), masks[0])  # the state of the matchers is unchanged


@pytest.mark.parametrize("ends", [frozenset({END}), frozenset[int]()])
@pytest.mark.parametrize("size", [287, 288, 289])
def test_masks_of_vocabularies_around_a_multiple_of_32(size: int, ends: frozenset[int]) -> None:
    grammar = Grammar.of(choice=["true"])
    assert grammar is not None
    matcher = vocabulary_of(ENCODING, size, ends).matcher(grammar)
    matcher.accept([RANKS[b"t"]])
    assert np.flatnonzero(unpacked(matcher.mask(), size)).tolist() == [RANKS[b"r"]]


def test_masks_as_bits() -> None:
    allowed = np.random.default_rng(0).random((3, 70)) < 0.5
    masks = packed(allowed)
    assert masks.shape == (3, mask_words(70)) == (3, 3)
    for mask, each in zip(masks, allowed, strict=True):
        np.testing.assert_array_equal(unpacked(mask, 70), each)


# --- texts


def checked(rule: str, found: Generation) -> None:
    """Assert that a text follows its rule, and is complete unless it has reached its limit."""
    text = bytes_of(found.tokens).decode(errors="replace")
    matcher = matcher_of(**RULES[rule])
    for token in found.tokens:
        assert token in ids_of(matcher)
        matcher.accept([token])
    if found.finish_reason == "length":
        return
    assert found.finish_reason == "stop"
    if rule == "schema":
        assert set(json.loads(text)) == {"name", "age"}
    elif rule == "choice":
        assert text in RULES["choice"]["choice"]


@pytest.mark.parametrize("rule", RULES)
def test_texts_on_the_cpu(rule: str) -> None:
    engine = GPT2(GPT2Weights.random(0, CONFIG), device="cpu").engine
    options: dict[str, Any] = {"max_new_tokens": 60, **RULES[rule]}
    found = [generate(engine, ENCODING, [1, 2], seed=seed, **options) for seed in range(3)]
    for each in found:
        checked(rule, each)
    assert any(each.finish_reason == "stop" for each in found)
    for each in generate(engine, ENCODING, [[1, 2]] * 2, seed=2, **options):
        assert each.tokens == found[2].tokens
    assert "".join(stream(engine, ENCODING, [1, 2], seed=2, **options)) == found[2].text


def test_a_grammar_that_becomes_too_complex_ends_its_row_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = GPT2(GPT2Weights.random(0, CONFIG), device="cpu").engine
    monkeypatch.setattr(Matcher, "problem", "choice: the text cannot be continued")
    with pytest.raises(InputError, match="choice: the text cannot be continued"):
        generate(engine, ENCODING, [1], choice=["yes", "no"])


def mixed(engine: Any, slots: int, **options: Any) -> list[Generation]:
    """Generate texts with all rules and without, at different steps of one batch."""
    rules: list[dict[str, Any]] = [{}, *RULES.values(), {}, {"schema": True}]
    new = 6 if cuda.replaced() else 20
    runs = [
        Run(engine, ENCODING, [n + 1] * (1 + 3 * n), max_new_tokens=new + n, seed=n,
            temperature=0.9, **rule, **options)
        for n, rule in enumerate(rules)
    ]  # fmt: skip
    batch = Batch(engine, slots, CONFIG.n_ctx)
    sequences = [run.sequences[0] for run in runs]
    batch.submit(sequences[:4])
    batch.step()
    batch.submit(sequences[4:])
    while batch.busy:
        batch.step()
    return [sequence.result() for sequence in sequences]


@pytest.fixture
def many_drafts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let steps compute all draft tokens that fit; return a list of each step's rows per slot."""
    run = list[int]()

    def for_forced(pace: SpeculationPolicy, counts: NDArray[np.int64], most: int) -> int:
        rows = (8, 4, 1) if counts.any() else (1,)
        run.append(next(n for n in rows if n * len(counts) <= most))
        return run[-1]

    monkeypatch.setattr(SpeculationPolicy, "for_forced", for_forced)
    return run


@pytest.mark.parametrize("where", SOMEWHERE)
def test_texts_have_the_bits_of_no_draft_tokens_and_of_no_batch(
    where: str, many_drafts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_on(where):
        engine = GPT2(GPT2Weights.random(0, CONFIG), device="cuda").engine
        alone = mixed(engine, 1, repetition_penalty=1.2)
        assert 8 in many_drafts
        for found, rule in zip(alone[1:], RULES, strict=False):
            checked(rule, found)
        if where == "gpu":
            assert mixed(engine, 3, repetition_penalty=1.2) == alone
        with monkeypatch.context() as patch:  # all masks after a text's second one take long
            patch.setattr(matching, "LONG_S", 0.0)
            assert mixed(engine, 3, repetition_penalty=1.2) == alone
        monkeypatch.setattr(SpeculationPolicy, "for_forced", lambda *_: 1)
        assert mixed(engine, 7, repetition_penalty=1.2) == alone


@pytest.mark.parametrize("where", SOMEWHERE)
def test_draft_tokens_save_steps(where: str, many_drafts: list[int]) -> None:
    """Names and braces of a schema are computed in one step; copied draft tokens change nothing."""
    with running_on(where):
        engine = GPT2(GPT2Weights.random(0, CONFIG), device="cuda").engine
        given: dict[str, Any] = {"schema": PERSON, "max_new_tokens": 40, "seed": 1}
        runs = [Run(engine, ENCODING, [1], speculate=each, **given) for each in (False, True)]
        for run in runs:
            run.finish()
        (first,), (second,) = (run.sequences for run in runs)
        assert first.tokens == second.tokens
        assert sum(first.drafted) >= 5
        assert len(many_drafts) < 2 * len(first.tokens)


@pytest.mark.parametrize("others", [{}, {"schema": PERSON}])
@pytest.mark.parametrize("where", ["cpu", slow("shuffled"), GPU])
def test_a_mask_that_takes_long_delays_no_other_text(
    where: str, others: dict[str, Any], many_drafts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts with its grammar wait. All texts have the tokens, on a GPU the bits, as if alone."""
    go, write = threading.Event(), Matcher.write

    def slow(self: Matcher, *given: Any) -> None:
        while self.grammar.name == "regex" and self._count >= 5 and not go.is_set():
            hashlib.sha256(bytes(2**20))  # takes CPU time without the GIL
        write(self, *given)

    with running_on("shuffled" if where == "cpu" else where):
        device = "cpu" if where == "cpu" else "cuda"
        engine = GPT2(GPT2Weights.random(0, CONFIG), device=device).engine
        options = [HALF, others, others, HALF]
        runs = [
            Run(engine, ENCODING, [n % 4], max_new_tokens=20, seed=n % 4, **each)
            for n, each in enumerate([*options, *options])
        ]
        for run in runs[4:]:
            run.finish()
        monkeypatch.setattr(Matcher, "write", slow)
        batch, rows = Batch(engine, 4, CONFIG.n_ctx), [run.sequences[0] for run in runs[:4]]
        batch.submit(rows[:3])
        while len(rows[0].tokens) < 5:
            batch.step()
        batch.submit(rows[3:])
        while any(row.finish_reason is None for row in rows[1:3]):
            batch.step()
        assert (len(rows[3].tokens), rows[0].finish_reason) == (0, None)
        go.set()
        while batch.busy:
            batch.step()
    for row, run in zip(rows, runs[4:], strict=True):
        assert row.tokens == run.sequences[0].tokens
        assert where == "cpu" or row.result() == run.sequences[0].result()


@pytest.mark.parametrize(("seconds", "fails"), [(0.04, False), (0.06, True)])
def test_a_text_whose_masks_all_take_long_ends(
    seconds: float, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = GPT2(GPT2Weights.random(0, CONFIG), device="cpu").engine
    monkeypatch.setattr(matching, "thread_time", itertools.count(0, seconds).__next__)
    message = "regex: the text cannot be continued .8 masks of allowed tokens in a row take more"
    with pytest.raises(InputError, match=message) if fails else nullcontext():
        assert generate(engine, ENCODING, [1], regex="[ab]{20}").finish_reason == "stop"


HALF = {"regex": "([a-f]true12){30}"}  # two of three tokens are determined


@pytest.mark.parametrize(
    ("rule", "drafts", "most"),
    [slow({"stop_ids": []}, False, 43), slow(HALF, False, 73), (HALF, True, 43)],
)
def test_calls_of_the_host_for_a_token(
    rule: dict[str, Any], drafts: bool, most: int, many_drafts: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The average number of the package's Python functions called per token has a limit."""
    if not drafts:
        monkeypatch.setattr(SpeculationPolicy, "for_forced", lambda *_: 1)
    with running_on("shuffled"):
        engine = GPT2(GPT2Weights.random(0, CONFIG), device="cuda").engine
        batch = Batch(engine, 1, CONFIG.n_ctx)
        rows = Run(engine, ENCODING, [1], max_new_tokens=60, seed=1, **rule).sequences
        batch.submit(rows)
        while len(rows[0].tokens) < 20:  # records the steps
            batch.step()
        way, tokens = house.Way(), len(rows[0].tokens)
        while len(rows[0].tokens) < 50:
            way.of(batch.step)
        assert way.calls <= most * (len(rows[0].tokens) - tokens)

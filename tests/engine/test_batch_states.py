"""A batch in random states: sequences come and end in every way, each as if alone."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import stateful as sm
from hypothesis import strategies as st

pytest.importorskip("llguidance")

from gpt2block.engine.generation import batching
from gpt2block.engine.generation.batching import Batch
from gpt2block.engine.generation.sequences import Generation, TokenSequence
from tests.engine.test_batching import finish, model, on, random_options
from tests.engine.test_grammars import CONFIG, ENCODING, RULES
from tests.generating import Run, generate

SMALL = {"PIECE": 8, "MIN_COPIED": 4, "min_shared": lambda *_: 10}  # for short prompts
BEGINS = ([1] * 20, [*[1] * 11, *range(9)], [7] * 5)  # prompts begin with some of these tokens
LETTERS = [chr(n) for n in range(32, 120)]
OF_RULES = {"stop_ids": None, "min_new_tokens": 0}
ENDS: dict[str, dict[str, Any]] = {
    "count": {},
    "token": {"stop_ids": range(0, CONFIG.vocab_size, 4)},
    "text": {"stop": LETTERS},
    "texts": {"stop": [f"{a}{b}" for a in LETTERS for b in LETTERS]},
    **{name: RULES[name] | OF_RULES for name in ("choice", "regex", "grammar")},
}


class Machine(sm.RuleBasedStateMachine):
    """Sequences of a Batch. model, exact: set by the test; exact: whether bits are as alone."""

    model: Any
    exact = False
    now = 0.0

    @sm.initialize(
        slots=st.integers(1, 4), reuse=st.booleans(), speculate=st.booleans(),
        most=st.sampled_from([None, 1, 8, 24]),
    )  # fmt: skip
    def begin(self, slots: int, reuse: bool, speculate: bool, most: int | None) -> None:
        engine = self.model.engine
        self.batch = Batch(engine, slots, CONFIG.n_ctx, False, reuse, most, speculate)
        self.exact &= not reuse
        # sequences, and their results alone
        self.sequences: list[tuple[TokenSequence, Generation]] = []

    @sm.rule(
        begin=st.sampled_from(BEGINS), length=st.integers(1, 20),
        more=st.sampled_from([0, 3, 20, 60]), ends=st.sampled_from([*ENDS]),
        seed=st.integers(0, 99), samples=st.integers(2, 3), client=st.sampled_from("ab"),
        seconds=st.sampled_from([None, None, 3, 9]),
    )  # fmt: skip
    def add(self, begin: list[int], length: int, more: int, ends: str, seed: int, samples: int,
            client: str, seconds: int | None) -> None:  # fmt: skip
        ids = [*begin[:length], *[seed % 4] * min(more, CONFIG.n_ctx - length)]
        options = random_options(np.random.default_rng(seed)) | ENDS[ends] | {"samples": samples}
        alone = generate(self.model.engine, ENCODING, ids, **options)
        sequences = [*Run(self.model.engine, ENCODING, ids, **options).sequences]
        for sequence in sequences:
            sequence.client, sequence.held = client, seed % 2 == 1
        self.sequences += zip(sequences, alone, strict=True)
        self.batch.submit(sequences, None if seconds is None else Machine.now + seconds, client)

    @sm.precondition(lambda self: self.batch.busy)
    @sm.rule(each_token=st.booleans(), count=st.integers(1, 5), released=st.booleans())
    def step(self, each_token: bool, count: int, released: bool) -> None:
        Machine.now += 1
        for sequence, _ in self.sequences if released else ():
            sequence.held = False
        for _ in range(count):
            if self.batch.busy:
                self.batch.step(each_token)

    @sm.rule(chosen=st.sets(st.integers(0, 9), max_size=3))
    def cancel(self, chosen: set[int]) -> None:
        self.batch.cancel([each for n, (each, _) in enumerate(self.sequences[::-1]) if n in chosen])

    @sm.precondition(lambda self: self.batch.busy and len(self.sequences) % 3 == 0)
    @sm.rule(name=st.sampled_from(["start", "extend", "copy", "next", "stop"]), after=st.booleans())
    def fail(self, name: str, after: bool) -> None:
        """Let a method of the engine fail in a step, before or after its work; then restart."""
        decoding: Any = self.batch._decoding
        working = getattr(decoding, name)

        def fails(*given: Any) -> None:
            if after:
                working(*given)
            raise InterruptedError

        setattr(decoding, name, fails)
        unfinished = [sequence for sequence, _ in self.sequences if not sequence.finish_reason]
        with suppress(InterruptedError):
            self.batch.step()
        self.batch.restart(InterruptedError())
        assert sum(sequence.finish_reason == "error" for sequence in unfinished) <= self.batch.slots

    @sm.invariant()
    def sequences_are_as_alone(self) -> None:
        for sequence, alone in self.sequences:
            count = len(sequence.tokens)
            found = sequence.tokens, sequence.logprobs, sequence.tops
            expected = alone.tokens[:count], alone.logprobs[:count], alone.top_logprobs[:count]
            assert found[0] == [*expected[0]]
            assert found == tuple(map(list, expected)) or not self.exact
            np.testing.assert_allclose(found[1], expected[1], atol=1e-4)
            if sequence.finish_reason not in (None, "cancelled", "deadline", "error"):
                assert (sequence.finish_reason, sequence.text) == (alone.finish_reason, alone.text)
                assert count == len(alone.tokens)

    def teardown(self) -> None:
        batch = self.batch
        finish(batch)
        self.sequences_are_as_alone()
        assert all(sequence.finish_reason for sequence, _ in self.sequences)
        assert (batch.busy, batch.waiting, len(batch._pieces)) == (False, 0, 0)
        assert sorted(batch._scheduler._free) == [*range(batch.slots)]
        assert not batch._new.left.any()
        assert not any((batch._starts, batch._following, batch._started, batch._new.matchers))


@pytest.mark.parametrize(
    ("device", "more"),
    [("cpu", False), ("cpu", True), ("shuffled", False)]
    + [pytest.param("gpu", more, marks=pytest.mark.gpu) for more in (False, True)],
)
def test_a_batch_in_random_states(device: str, more: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """more: whether NumPy reuses prefixes as a GPU does, and a GPU has a draft model."""
    for name, value in {**SMALL, "monotonic": lambda: Machine.now}.items():
        monkeypatch.setattr(batching, name, value)
    with on(device):
        m: Any = model(device, CONFIG)
        if device == "cpu":
            m.engine.continues_exactly = more
        elif more:
            m.draft_model = model(device, CONFIG)
        examples, steps = {"cpu": (5, 30), "shuffled": (1, 15), "gpu": (50, 30)}[device]
        machine = type("Given", (Machine,), {"model": m, "exact": device != "cpu"})
        few = settings(max_examples=examples, stateful_step_count=steps)
        sm.run_state_machine_as_test(machine, settings=few)

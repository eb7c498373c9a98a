"""Gated delta nets in a model: prompts in pieces and batches, and prefixes of other texts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, pairwise, product
from typing import Any

import numpy as np
import pytest

from gpt2block import Model, reference
from gpt2block.engine import states
from gpt2block.engine.generation import batching, prefixes
from gpt2block.engine.generation.batching import Batch
from gpt2block.engine.generation.sequences import Ends, TokenSequence
from gpt2block.engine.model import Ids
from gpt2block.engine.speculation import SpeculationPolicy
from gpt2block.ops import delta
from gpt2block.sampling import Sampling
from tests.devices import GPU, running_on, slow
from tests.engine.test_architectures_cuda import FORMATS, OWN, SIZES, model_of


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep a state every 8 tokens, and reuse prefixes of 4 tokens or more."""
    for module in (states, reference, delta):
        monkeypatch.setattr(module, "SAVED", 8)
    for each in (batching, prefixes):
        monkeypatch.setattr(each, "MIN_COPIED", 4)
    monkeypatch.setattr(prefixes, "MIN_SHARED", 4)


def sequences_of(
    model: Model[Any], *prompts: list[Ids], new: int, slots: int, speculate: bool
) -> Iterator[list[TokenSequence]]:
    """Run each group of prompts in the same Batch; yield their sequences."""
    batch = Batch(model.engine, slots, 40, speculate=speculate)
    for group in prompts:
        ends = Ends(new, 40, False, (), frozenset(), None)
        sequences = [TokenSequence(ids, Sampling(seed=1), None, ends, 0) for ids in group]
        batch.submit(sequences)
        while batch.busy:
            batch.step()
        yield sequences


def cases() -> list[Any]:
    every = [
        pytest.param("gpu", *each, marks=GPU.marks) for each in product(FORMATS, (False, True))
    ]
    return [("shuffled", "float32", False), slow("shuffled", "bfloat16", True), *every]


@pytest.mark.parametrize(("where", "dtype", "drafts"), cases())
def test_pieces_and_prefixes_have_the_same_bits(
    where: str, dtype: str, drafts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later prompts continue from states after 8 tokens, after prompts, and of other slots.

    drafts: with draft tokens of the model's block, in steps of 1, 4 and 8 rows for each text.
    """
    rows = cycle((4, 1, 8, 4, 4))
    monkeypatch.setattr(SpeculationPolicy, "together", lambda *_: next(rows))
    with running_on(where):
        kind, own = OWN["qwen3_5"]
        model = model_of(kind(**{**SIZES, **own, "mtp": drafts}), "cuda", dtype)
        ids = np.random.default_rng(0).integers(53, size=60).astype(np.int32)
        first, text = ids[:19], np.concatenate
        groups = [
            [first],
            [text([first, ids[30:35]]), text([first[:13], ids[40:45]])],
            [text([first[:18], ids[50:53]]), ids[25:36]],
            [text([first[:13], ids[40:44], ids[:3]])],
        ]
        new = 5 if where == "gpu" else 2  # tokens of a text
        options: dict[str, Any] = {"max_new_tokens": new, "seed": 1, "stop_ids": ()}
        # Three texts continue one text: the last one, a copy in a slot that had another text.
        copied = [
            [first],
            [ids[30:42], ids[42:54]],
            [text([first, ids[n:][:2]]) for n in (1, 5, 9)],
        ]
        runs = (3, copied, [0, 0, 0, 19, 19, 19]), (2, groups, [0, 19, 8, 16, 0, 8])
        for slots, groups_of, reused in runs[: None if where == "gpu" or drafts else 1]:
            prompts = [ids for group in groups_of for ids in group]
            alone = [model.generate(prompt, **options) for prompt in prompts]
            texts = sequences_of(model, *groups_of, new=new, slots=slots, speculate=drafts)
            found = [sequence for sequences in texts for sequence in sequences]
            for sequence, expected in zip(found, alone, strict=True):
                got = tuple(sequence.tokens), tuple(sequence.logprobs)
                assert got == (expected.tokens, expected.logprobs)
            assert [sequence.reused for sequence in found] == reused
        monkeypatch.setattr(batching, "PIECE", 8)
        assert model.generate(prompts[-1], speculate=drafts, **options) == alone[-1]
        whole, cache = model(ids[:24]), model.new_cache()
        parts = [model(ids[a:b], cache) for a, b in pairwise((0, 5, 13, 24))]
        if model.engine.continues_exactly:
            np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_entries_are_given_up_oldest_first() -> None:
    """A pass keeps states after its last token, shared tokens, and some between."""
    shapes = {"saved": (2, 9), "h.0.pool": (8, 3), "h.0.state": (2, 2, 3), "held": (2, 2)}
    with running_on("forward") as cupy:
        arrays = {name: cupy.zeros(shape, "int32") for name, shape in shapes.items()}
        kept = states.KeptStates(arrays)
        kept.begin(0, 0, 60)
        assert [kept.longest(0, 1, n) for n in (60, 59, 55, 31, 7)] == [60, 56, 32, 8, 0]
        row = arrays["saved"].get()[0]
        assert np.flatnonzero(row >= 0).tolist() == [0, 3, 6, 8]
        kept.longest(0, 1, 21)  # the next text of slot 1 shares 21 tokens
        kept.begin(1, 8, 60)
        assert kept.longest(1, 0, 21) == 16
        kept.copy(1, 0, 16)
        assert arrays["held"].get()[0].tolist() == [16, -1]
        assert kept.longest(0, 1, 60) == 16
        for _ in range(2):
            kept.begin(0, 16, 50)
        assert [kept.longest(slot, 1 - slot, 60) for slot in (0, 1)] == [50, 60]
        kept.begin(1, 0, 20)  # another text
        assert kept.longest(1, 0, 60) == 20

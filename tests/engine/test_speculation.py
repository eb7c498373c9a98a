"""Draft tokens: their ids, the tokens taken, and texts equal to decoding without them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle, product
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from gpt2block import GPT2, GPT2Config, Model, emulator, reference
from gpt2block.cuda import kernels, replaced
from gpt2block.emulator.stand_in import USUAL
from gpt2block.engine.generation.batching import Batch
from gpt2block.engine.model import Ids
from gpt2block.engine.speculation import FORGOTTEN, SpeculationPolicy, StepTimes
from gpt2block.files.parameters.gpt2 import GPT2Weights
from gpt2block.ops.attention_cached import SPLIT, split_geometry
from gpt2block.ops.drafts import (
    DRAFTED,
    MAX_DRAFTS,
    MAX_KNOWN,
    RIGHT,
    TAKE_DRAFTS,
    TAKEN,
    DraftTokens,
)
from gpt2block.ops.sample_token import Masks, SampleState, Slots, bind_sampled
from gpt2block.sampling import Sampling, changes, packed
from tests.caches import NO_PEERS, random_cache
from tests.devices import GPU, SOMEWHERE, edited, every_device, running_on, slow, with_source
from tests.engine.test_architectures_cuda import FORMATS, OWN
from tests.engine.test_architectures_cuda import made as of_architecture
from tests.engine.test_decoding import random_prompts
from tests.generating import Run
from tests.gpus import H200
from tests.plain import normal

Array = NDArray[Any]


# --- the draft tokens


@given(st.lists(st.integers(0, 2), min_size=1, max_size=30))
def test_a_draft_is_what_followed_the_longest_end(tokens: list[int]) -> None:
    (first, *_) = reference.draft_tokens(np.array(tokens, np.int32), 1).tolist()
    followed: dict[int, list[int]] = {
        length: [tokens[at] for at in range(length, len(tokens)) if tokens[at - length : at] == end]
        for length in (1, 2, 3)
        if (end := tokens[-length:]) and len(end) == length
    }
    longest = max((length for length, found in followed.items() if found), default=0)
    assert first == (followed[longest][-1] if longest else -1)


# --- the tokens taken


def taken_by_hand(given: dict[str, Array], together: int) -> dict[str, Array]:
    """Compute the arrays after `take_drafts`, slot by slot."""
    got = {name: array.copy() for name, array in given.items()}
    K = got["draft"].shape[1]
    for first in range(0, len(got["row"]), together):
        half, b = got["turn"][first] % 2, got["row"][first]
        got["turn"][first] += 1
        if b < 0:
            continue
        rows, count, goes_on = range(together), 0, True
        for i in rows:
            there = got["at"][first + i] >= 0
            sampled, draft = got["sampled"][first + i], got["draft"][b, i] if i < K else -1
            right = there and draft >= 0 and draft == sampled
            goes_on = goes_on and there
            flags = TAKEN * goes_on + DRAFTED * (there and draft >= 0) + RIGHT * right
            likely = got["likely"][first + i : first + i + 1].view(np.int32)[0]
            got["report"][half, :, first + i] = (
                (sampled, likely, flags) if there else (-1, 0, flags)
            )
            if goes_on:
                count += 1
                got["history"][b, got["position"][b] + count] = sampled
                if sampled >= 0:
                    got["occurred"][b, sampled] |= 1
                    got["counts"][b, sampled] += 1
                got["token"][b], got["logprob"][b] = sampled, got["likely"][first + i]
            goes_on = goes_on and right
        got["position"][b] += count
        got["step"][b] += count
        got["left"][b] -= count
        if count and (end := int(got["known"][b])):
            text = got["history"][b, got["position"][b] + 1 : end][:K]
            got["draft"][b] = [*text, *[-1] * (K - len(text))]
        elif count:
            known = got["history"][b, : got["position"][b] + 1]
            got["draft"][b] = reference.draft_tokens(known, K)
        for i in rows:
            draft = got["draft"][b, i - 1] if count else -1
            token = draft if i or not count else got["token"][b]
            got["token_of"][first + i] = token
            runs = count and i < got["left"][b] and (i == 0 or token >= 0)
            got["at"][first + i] = got["position"][b] + i if runs else -1
    return got


def sampled_case(rng: np.random.Generator, together: int) -> dict[str, Array]:
    """Draw a step with four of five slots and few distinct tokens; -1 stands for NaN logits.

    Every second slot has a known text; more than eight rows per slot are rows of known texts.
    """
    few = together <= 8
    B, N, V, H, K = 5, 4, 4, *((24, 7) if few else (160, MAX_KNOWN))
    position = rng.integers(0, H - K - 2, B).astype(np.int32)
    left = rng.integers(0, K + 3, B).astype(np.int32)
    history = rng.integers(0, V, (B, H)).astype(np.int32)
    known = np.where(np.arange(B) % 2 * few, 0, rng.integers(position + 2, H)).astype(np.int32)
    draft = np.stack([reference.draft_tokens(history[b, : position[b] + 1], K) for b in range(B)])
    for b in np.flatnonzero(known):
        text = history[b, position[b] + 1 : known[b]][:K]
        draft[b] = [*text, *[-1] * (K - len(text))]
    slots = rng.permutation(B)[:N].astype(np.int32)
    slots[rng.integers(N)] = -1
    row = np.repeat(slots, together)
    i = np.tile(np.arange(together), N)
    token_of = np.where(i, draft[row, i - 1], history[row, position[row]]).astype(np.int32)
    runs = (row >= 0) & (i < left[row]) & ((i == 0) | (token_of >= 0))
    sampled = np.where(
        rng.random(len(row)) < (0.7 if few else 0.98),
        draft[row, np.minimum(i, K - 1)],
        rng.integers(-1, V, len(row)),
    ).astype(np.int32)
    return {
        "sampled": sampled,
        "likely": rng.standard_normal(len(row)).astype(np.float32),
        "row": row,
        "token_of": token_of,
        "at": np.where(runs, position[row] + i, -1).astype(np.int32),
        "turn": rng.integers(0, 5, len(row)).astype(np.int32),
        "history": history,
        "draft": draft,
        "left": left,
        "known": known,
        "position": position,
        "step": rng.integers(0, 9, B).astype(np.int32),
        "token": history[np.arange(B), position].astype(np.int32),
        "logprob": rng.standard_normal(B).astype(np.float32),
        "occurred": rng.integers(0, 2, (B, V)).astype(np.uint8) * 3,
        "counts": rng.integers(0, 3, (B, V)).astype(np.int32),
        "report": np.full((2, 3, len(row)), 77, np.int32),
    }


@every_device
@pytest.mark.parametrize("together", [1, 2, 4, 8, 64])
def test_tokens_up_to_the_first_wrong_draft_are_taken(device: Any, together: int) -> None:
    rng = np.random.default_rng(together)
    for case in range(8 if replaced() else 20):
        given = sampled_case(rng, together)
        expected = taken_by_hand(given, together)
        arrays = {name: device.asarray(array) for name, array in given.items()}
        inputs = [None if case % 4 == 0 and n == "counts" else a for n, a in arrays.items()]
        TAKE_DRAFTS.bind_on_device(tuple(inputs), together=together).run()
        for name, array in arrays.items():
            unchanged = case % 4 == 0 and name == "counts"
            wanted = given[name] if unchanged else expected[name]
            np.testing.assert_array_equal(array.get(), wanted, err_msg=f"{case} {name}")


@every_device
def test_a_sequence_begins_with_its_prompt(device: Any) -> None:
    drafts = DraftTokens.allocate(4, 6)
    drafts.draft.fill(3)
    prompts = [np.arange(1, 6), np.array([9]), np.arange(20, 27)]
    texts = [ids.astype(np.int32) for ids in prompts]
    drafts.begin([2, 0, 3], texts, [4, 1, 2], [5, 1, 4])
    history = np.zeros((4, 7), np.int32)
    history[2, :5], history[0, :1], history[3] = prompts
    np.testing.assert_array_equal(drafts.history.get(), history)
    np.testing.assert_array_equal(drafts.left.get(), [1, 0, 4, 2])
    expected = np.array([[-1] * 7, [3] * 7, [-1] * 7, [24, 25, 26, -1, -1, -1, -1]])
    np.testing.assert_array_equal(drafts.draft.get(), expected)
    np.testing.assert_array_equal(drafts.known.get(), [0, 0, 0, 7])  # the last text is known


@every_device
@pytest.mark.parametrize("masked", [False, True])
def test_a_row_is_sampled_as_if_draft_tokens_were_right(device: Any, masked: bool) -> None:
    """Each row has its own step, and draft tokens of earlier rows of its slot count as sampled."""
    B, V, together, rng = 3, 40, 4, np.random.default_rng(0)
    options: dict[str, Any] = {"repetition_penalty": 1.4, "frequency_penalty": 0.3}
    options |= {"presence_penalty": 0.2, "logit_bias": {7: 1.0}, "min_new_tokens": 6}
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.7, "top_k": 9},
        {"seed": 4},
    ]
    rows = [Sampling(**options, **kind, end_ids=(3,)) for kind in kinds]
    logits = rng.standard_normal((B * together, V)).astype(np.float32)
    occurred, counts = np.zeros((B, V), np.uint8), rng.integers(0, 3, (B, V)).astype(np.int32)
    occurred[counts > 0] = 1
    tokens, step = rng.integers(0, V, B * together).astype(np.int32), np.array([0, 4, 9], np.int32)
    logits.reshape(B, -1, V)[np.arange(B)[:, None], :, tokens.reshape(B, -1)] += 3  # likely tokens
    at = np.arange(B * together, dtype=np.int32) % 7 - 1  # -1: an absent row
    state = SampleState.allocate(B, V)
    state.set(rows)
    state.step.set(step)
    tables = [changes(row, V) for row in rows]
    state.occurred.set(np.stack([places for _, places in tables]) | occurred)
    row = np.repeat(np.arange(B, dtype=np.int32), together)
    row[-2:] = -1  # no slot
    slots = Slots(*map(device.asarray, (row, tokens, at, np.zeros_like(row))))
    sampled, likely = (
        device.asarray(np.full(len(row), 99, np.int32)),
        device.zeros(len(row), "float32"),
    )
    host = (np.stack([values for values, _ in tables]), counts, logits)
    table, of_sampled, on_device = map(device.asarray, host)
    before = [array.get() for array in (state.occurred, state.step, state.position)]
    given = state._replace(token=sampled, logprob=likely)
    allowed = rng.random((B * together, V)) < 0.2 if masked else np.ones((B * together, V), bool)
    allowed[::3] = True  # rows without a mask
    masks = packed(allowed)
    index = np.arange(1, B * together + 1, dtype=np.int32)
    index[::3] = 0
    of_masks = Masks(device.asarray(index), device.asarray(masks)) if masked else None
    bind_sampled(on_device, given, slots, together, table, of_sampled, of_masks).run()
    for m, (b, got) in enumerate(zip(row, sampled.get(), strict=True)):
        drafts = tokens[b * together + 1 : m + 1]
        now = counts[b] + np.bincount(drafts, minlength=V).astype(np.int32)
        of = {"step": int(step[b]) + len(drafts), "occurred": (now > 0).astype(np.uint8)[None]}
        of["masks"] = masks[m : m + 1]
        expected = reference.sample_token(logits[m : m + 1], rows[b], counts=now[None], **of)
        assert got == (expected[0] if at[m] >= 0 and b >= 0 else 99), m
    assert not slots.turn.get().any()  # only take_drafts counts turns
    for array, held in zip((state.occurred, state.step, state.position), before, strict=True):
        np.testing.assert_array_equal(array.get(), held)


# --- texts equal those without draft tokens

SMALL = GPT2Config(n_layer=1, n_head=2, n_embd=32, n_ctx=48, vocab_size=7)
FEW = GPT2Config(n_layer=2, n_head=2, n_embd=128, n_ctx=80, vocab_size=7)
SAMPLED: dict[str, Any] = {"temperature": 0.4, "top_p": 0.9}
CHANGED: dict[str, Any] = {
    "temperature": 0.3, "repetition_penalty": 1.2, "frequency_penalty": 0.2,
    "presence_penalty": 0.1, "logit_bias": {3: 0.5}, "min_new_tokens": 5, "stop_ids": [2],
    "top_logprobs": 2, "overflow": "truncate",
}  # fmt: skip
OPTIONS = {"greedy": {"temperature": 0}, "sampled": SAMPLED, "changed": CHANGED}


def texts_agree(model: Any, prompts: list[Ids], options: dict[str, Any], at_once: int) -> int:
    """Assert that a batch with draft tokens equals each prompt alone; return the token count."""
    options = {"max_new_tokens": 40, "seed": 5, "stop_ids": ()} | options
    alone = [model.generate(prompt, **options) for prompt in prompts]
    drafted = model.generate(prompts, rows_at_once=at_once, speculate=True, **options)
    assert drafted == alone
    return sum(len(each.tokens) for each in alone)


@pytest.fixture
def by_turns(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let steps have different numbers of rows regardless of success; return numbers that ran."""
    turns, run = cycle([4, 1, 8, 8, 4]), list[int]()

    def together(pace: SpeculationPolicy, slots: Ids, most: int) -> int:
        wanted = next(turns)
        run.append(wanted if len(slots) * wanted <= most else 1)
        return run[-1]

    monkeypatch.setattr(SpeculationPolicy, "together", together)
    return run


@pytest.mark.parametrize(
    ("where", "options"),
    [("shuffled", "greedy"), *(pytest.param("gpu", each, marks=GPU.marks) for each in OPTIONS)],
)
def test_the_text_of_a_gpt2(where: str, options: str, by_turns: list[int]) -> None:
    with running_on(where):
        model = GPT2(GPT2Weights.random(0, SMALL), device="cuda")
        prompts = random_prompts([9, 48, 22], SMALL)
        few, at_once = {"max_new_tokens": 16}, 1 if options == "greedy" else 2
        tokens = texts_agree(model, prompts, few | OPTIONS[options], at_once)
        assert 8 in by_turns
        assert len(by_turns) < 0.6 * tokens or options == "changed"  # many draft tokens are right


def cases() -> list[Any]:
    """Return architectures and formats: some on the emulator, all on a GPU."""
    every = product(("gpt2", *OWN), FORMATS, (False, True))
    found = [slow("shuffled", "qwen3_5", "bfloat16", False)]
    found += [slow("shuffled", "lfm2", "float8_e5m2", False)]
    return found + [pytest.param("gpu", *case, marks=GPU.marks) for case in every]


@pytest.mark.parametrize(("where", "name", "dtype", "wide"), cases())
def test_the_text_of_an_architecture(
    where: str, name: str, dtype: str, wide: bool, by_turns: list[int]
) -> None:
    with running_on(where):
        if name == "gpt2":
            given: Any = {"dtype": dtype, "kv_dtype": FORMATS[dtype]}
            model: Model[Any] = GPT2(GPT2Weights.random(0, FEW), device="cuda", **given)
        else:
            model = of_architecture((name, dtype, wide), "cuda")
        few = where != "gpu"
        prompts = random_prompts([9, 22] if few else [9, 1, 38, 22, 5, 30, 16], model.config)
        of = {"max_new_tokens": 6} if few else {}
        for at_once, options in ((2, "sampled"),) if few else zip((1, 3, 7), OPTIONS, strict=True):
            texts_agree(model, prompts, {**of, **OPTIONS[options]}, at_once)


@pytest.mark.parametrize("where", SOMEWHERE)
def test_which_tokens_were_drafted(where: str, by_turns: list[int]) -> None:
    """All tokens of a step except its last were drafted: they equal `draft_tokens` of the text."""
    with running_on(where):
        engine = GPT2(GPT2Weights.random(0, SMALL), device="cuda").engine
        (prompt,) = random_prompts([22], SMALL)
        run = Run(engine, None, prompt, max_new_tokens=24, seed=3, stop_ids=(), **SAMPLED)
        batch = Batch(engine, 1, SMALL.n_ctx, speculate=True)
        batch.submit([sequence := run.sequences[0]])
        while batch.busy:
            batch.step()
    ids = np.concatenate([prompt, np.array(sequence.tokens, np.int32)])
    first, steps = len(prompt), 0
    for last in np.flatnonzero(~np.array(sequence.drafted)) + first:
        draft = reference.draft_tokens(ids[:first], MAX_DRAFTS)
        assert draft[: last - first].tolist() == ids[first:last].tolist()
        first, steps = last + 1, steps + 1
    assert sum(sequence.drafted) > 4
    assert steps <= len(by_turns) + 1  # the first token comes from the prompt


def test_numpy_does_not_draft() -> None:
    model = GPT2(GPT2Weights.random(0, FEW), device="cpu")
    options: dict[str, Any] = {"max_new_tokens": 9, "seed": 1}
    (prompt,) = random_prompts([5], FEW)
    assert model.generate(prompt, speculate=True, **options) == model.generate(prompt, **options)


# --- keys that are loaded early

ENDS = "    if (!cached) return end_without_keys();"
LATE = """
    {
        __syncthreads();
        KV* const keys = const_cast<KV*>(k);
        const int late = position[0];
        if (threadIdx.x == 0) for (int i = late * KV_ROW; i < n_ctx * KV_ROW; ++i) keys[i] = VALUE;
        __syncthreads();
    }
"""


def test_keys_of_this_step_are_not_loaded_early() -> None:
    """An edited kernel imitates a previous kernel that writes the step's keys when it ends."""
    heads, n_ctx, together = (1, 1, 16), 70, 4
    held = random_cache(heads, [n_ctx, n_ctx], n_ctx, "float32")
    position = np.arange(33, 33 + together, dtype=np.int32)
    q, row = normal(1, together, 16), np.zeros(together, np.int32)
    before, after = (
        LATE.replace("VALUE", "__int_as_float(-1)"),
        LATE.replace("VALUE", "keys[n_ctx * KV_ROW + i]"),
    )
    begins = "    const Work work;"
    text = edited(SPLIT, begins, before + begins).replace(ENDS, after + ENDS)
    held.k[1] = held.k[0]  # the keys that are written late
    geometry = split_geometry(together, n_ctx, heads, 4, 4, H200["max_shared"], False)
    run: dict[str, Any] = {"shared": geometry.shared, "checks": USUAL}
    run |= {"defines": (*geometry.defines, ("AS_DRAFTS", 1))}
    outs = []
    for each in (kernels.read_source(SPLIT), text):
        out = np.full(q.shape, np.nan, np.float32)
        args = [q, held.k.copy(), held.v, row, position, 2, n_ctx, together, 1.0, out, *NO_PEERS]
        with with_source(SPLIT, each):
            emulator.run(SPLIT, geometry.kernel, geometry.grid, geometry.block, args, **run)
        outs.append(out)
    np.testing.assert_array_equal(outs[1], outs[0])
    assert np.isfinite(outs[0]).all()


# --- the number of rows per step


class Clock:
    """A fake clock; steps take the times of a table."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("gpt2block.engine.speculation.perf_counter", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def played(
    clock: Clock,
    share: float,
    costs: dict[int, float],
    steps: int = 400,
    odd: Mapping[int, list[float]] = MappingProxyType({}),
) -> list[int]:
    """Return rows of each step. share: of right draft tokens. costs: rows -> time of a step.

    odd: rows -> times of the first steps with this number of rows, which are removed from it.
    """
    pace, rng, slot, run = SpeculationPolicy(1), np.random.default_rng(0), np.zeros(1, np.int32), []
    pace.begin(slot)
    for _ in range(steps):
        together = pace.together(slot, 128)
        right = rng.random(together) < share
        flags = np.full((1, together), DRAFTED, np.int32) | RIGHT * right
        flags[0, : int(np.argmin([*right[:-1], False])) + 1] |= TAKEN
        clock.now += odd[together].pop(0) if odd.get(together) else costs[together]
        pace.result(1, together)
        pace.add(slot, flags)
        run.append(together)
    return run


@pytest.mark.parametrize("kind", [1, 4, 8])
@pytest.mark.parametrize("wrong", [0.01, 300.0], ids=["read late", "interrupted"])
def test_a_wrong_time_of_the_host_does_not_last(clock: Clock, kind: int, wrong: float) -> None:
    """One time of each number of rows is wrong, the first one of the text, or a later one."""
    times = {1: 1.0, 4: 1.1, 8: 1.2}
    for first in (0, 3):
        run = played(clock, 0.95, times, odd={kind: [*[times[kind]] * first, wrong]})
        assert run[200:].count(8) > 150


def test_times_are_medians_of_the_newest_and_are_forgotten() -> None:
    times = StepTimes()
    assert times.get((1, 4)) is None
    for seconds in (9.0, 1.0, 2.0):
        times.add(1, 4, seconds)
    assert times.get((1, 4)) == 2
    for _ in range(9):
        times.add(1, 4, 5.0)
    assert times.get((1, 4)) == 5
    for _ in range(FORGOTTEN - 1):
        times.add(1, 1, 1.0)
    assert times.get((1, 4)) == 5
    times.add(1, 1, 1.0)
    assert times.get((1, 4)) is None
    times.add(1, 4, 7.0)
    assert times.get((1, 4)) == 7


def test_steps_that_record_launches_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = list[tuple[int, int]]()
    monkeypatch.setattr(StepTimes, "add", lambda self, *step: timed.append(step[:2]))
    with running_on("forward"):
        model = GPT2(GPT2Weights.random(0, SMALL), device="cuda")
        for expected in (5, 6):  # the first text records and captures a step
            timed.clear()
            model.generate(np.arange(3), max_new_tokens=7, speculate=True, stop_ids=(), seed=1)
            assert timed == [(1, 1)] * expected


def test_runs_of_right_draft_tokens_pay_where_most_are_wrong(clock: Clock) -> None:
    """A fifth of the draft tokens is right, in runs of ten."""
    pace, slot, run = SpeculationPolicy(1), np.zeros(1, np.int32), list[int]()
    pace.begin(slot)
    right, costs = np.tile(np.arange(50) < 10, 40), {1: 1.0, 4: 1.2, 8: 1.4}
    at = 0
    while at < 1900:
        together = pace.together(slot, 128)
        taken = int(np.argmin([*right[at : at + together - 1], False])) + 1
        flags = np.where(np.arange(together) < taken, TAKEN, 0) | RIGHT * right[at : at + together]
        clock.now += costs[together]
        pace.result(1, together)
        pace.add(slot, flags[None])
        run.append(together)
        at += taken
    assert 1900 / sum(costs[n] for n in run) > 1.05


def test_runs_of_eight_right_draft_tokens() -> None:
    """A run is verified by one step, and the token after the run is tried by a step of one row."""
    policy, slot, run = SpeculationPolicy(1, None, 0.4), np.zeros(1, np.int32), list[int]()
    wrong, right, last = TAKEN | DRAFTED, TAKEN | DRAFTED | RIGHT, TAKEN
    for flags in 30 * [*(7 * [[wrong]]), [right], 7 * [right] + [last]]:
        policy.add(slot, np.array([flags], np.int32), max(len(flags) - 1, 1))
        run.append(policy.together(slot, 64))
    assert run[-9:] == [1] * 7 + [8, 1]


def test_no_more_rows_than_a_step_may_have() -> None:
    pace, slots = SpeculationPolicy(40), np.arange(40, dtype=np.int32)
    for _ in range(3):
        pace.add(slots, np.full((40, 8), TAKEN | DRAFTED | RIGHT, np.int32))
    assert pace.together(slots[:1], 128) == 8
    assert pace.together(slots[:20], 128) == 4
    assert pace.together(slots, 128) == 1
    pace.begin(slots)
    assert pace.together(slots[:1], 128) == 1

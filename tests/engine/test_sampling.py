"""Sampling: the meaning of each option, the random numbers, and the kernel against NumPy."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gpt2block import InputError, ops, reference
from gpt2block.cuda import replaced
from gpt2block.cuda.arrays import Bound
from gpt2block.cuda.kernels import Defines, Geometry
from gpt2block.ops.sample_token import (
    Masks,
    SampleState,
    Slots,
    bind_place,
    bind_state,
    choose_geometry,
)
from gpt2block.sampling import (
    CHANGES,
    Sampling,
    changes,
    choose,
    masses,
    packed,
    penalized,
    random_bits,
)
from tests import plain
from tests.devices import every_device, on_gpu, one_order

Array = NDArray[Any]
MODULE = sys.modules[bind_state.__module__]
GREEDY = Sampling(temperature=0)
EVERY_WAY = (
    GREEDY,
    Sampling(seed=1),
    Sampling(temperature=1.7, top_k=1, seed=2),
    Sampling(top_k=40, seed=3),
    Sampling(temperature=0.7, top_p=0.9, seed=4),
    Sampling(min_p=0.1, seed=2**64 - 1),
    Sampling(temperature=0.9, top_k=20, top_p=0.8, min_p=0.02, seed=5, sample=3),
    Sampling(repetition_penalty=1.3, top_k=9, top_p=0.95, seed=6),
    Sampling(temperature=0, repetition_penalty=2.5),
    Sampling(temperature=1e30, top_p=0.5, seed=7),
    Sampling(temperature=1e-6, top_k=3, seed=8),
    Sampling(top_k=2000, top_p=0.999, repetition_penalty=0.5, seed=2**32),
)


def rows_of_logits(seed: int, B: int, V: int, spread: float = 3.0, ties: bool = False) -> Array:
    """Return logits like a language model's: far from 0, a few far above all others."""
    x = spread * np.random.default_rng(seed).standard_normal((B, V)) - 30
    return (np.round(x) if ties else x).astype(np.float32)


def some_occurred(seed: int, B: int, V: int) -> NDArray[np.uint8]:
    return (np.random.default_rng(seed + 99).random((B, V)) < 0.3).astype(np.uint8)


# --- options -------------------------------------------------------------------------------------


def test_numpy_numbers_are_numbers() -> None:
    x = np.arange(9, dtype=np.float32)
    plain = Sampling(temperature=0.5, top_k=3, top_p=0.75, min_p=0.25, seed=7)
    same = Sampling(
        temperature=np.float16(0.5), top_k=np.uint8(3), top_p=np.float64(0.75),
        min_p=np.float32(0.25), seed=np.uint64(7),
    )  # fmt: skip
    expected = [choose(x, plain, step) for step in range(9)]
    steps: Any = np.arange(9)
    assert [choose(x, same, step) for step in steps] == expected


def test_rows_ask_each_for_its_own() -> None:
    x = np.zeros((3, 5), np.float32)
    rows = [Sampling(seed=i) for i in range(3)]
    got = reference.sample_token(x, rows, step=7)
    assert got.tolist() == [choose(x[i], rows[i], 7).token for i in range(3)]


# --- the filters ---------------------------------------------------------------------------------


def kept_by_hand(x: Array, sampling: Sampling, occurred: Array) -> set[int]:
    """Apply the filters of `transformers` in order, in float64; tied tokens are kept together."""
    scores = [float(value) for value in x]
    for i in map(int, np.flatnonzero(occurred)):
        factor = float(np.float32(sampling.repetition_penalty))
        scores[i] = scores[i] * factor if scores[i] < 0 else scores[i] / factor
    scores = [score / sampling.temperature for score in scores]
    kept = {i for i, score in enumerate(scores) if score > -math.inf}
    if sampling.top_k:
        last = sorted(scores, reverse=True)[min(sampling.top_k, len(scores)) - 1]
        kept = {i for i in kept if scores[i] >= last}
    weights = {i: math.exp(scores[i] - max(scores)) for i in kept}
    if sampling.top_p < 1:
        total, last, reached = sum(weights.values()), math.inf, 0.0
        for i in sorted(kept, key=lambda i: -scores[i]):
            if last < math.inf and reached >= float(np.float32(sampling.top_p)) * total:
                break
            reached, last = reached + weights[i], scores[i]
        kept = {i for i in kept if scores[i] >= last}
    return {i for i in kept if weights[i] >= max(float(np.float32(sampling.min_p)), 2.0**-40)}


some_logits = st.tuples(
    st.integers(0, 999), st.sampled_from([1, 2, 3, 17, 60]), st.sampled_from([0.1, 1.0, 4.0])
)


some_options = st.builds(
    Sampling,
    temperature=st.sampled_from([0.1, 0.7, 1.0, 3.0, 1e20]),
    top_k=st.sampled_from([0, 0, 1, 2, 5, 40, 100]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.37, 0.05, 0.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.03, 0.4, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 2.0, 0.5]),  # exact: others round, which changes ties
)


@settings(max_examples=300)
@given(some_logits, st.booleans(), st.sampled_from([0.0, 0.5, 0.95]), some_options)
def test_what_is_kept(
    logits: tuple[int, int, float], ties: bool, hidden: float, sampling: Sampling
) -> None:
    seed, V, spread = logits
    (x,) = rows_of_logits(seed, 1, V, spread, ties) + np.float32(30)
    x[1:][np.random.default_rng(seed).random(V - 1) < hidden] = -np.inf
    (occurred,) = some_occurred(seed, 1, V)
    expected = kept_by_hand(x, sampling, occurred)
    assert (
        set(np.flatnonzero(masses(penalized(x, sampling, occurred), sampling)).tolist()) == expected
    )
    assert expected


@one_order
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("counted", [False, True])
def test_the_kernel_changes_logits(device: Any, counted: bool, masked: bool) -> None:
    """Some rows have no changes, and some change a token in several ways."""
    B, V, step = 7 + 2 * counted, 777, 3
    x, occurred = rows_of_logits(3, B, V), some_occurred(3, B, V)
    few = {1: 2.5, 70: 30, 71: 30, 776: -4, int(x[1].argmax()): -9}
    rows = [
        Sampling(temperature=0, logit_bias=few),
        Sampling(top_k=40, logit_bias=few, repetition_penalty=1.3, seed=2),
        Sampling(top_p=0.9, seed=3),
        Sampling(repetition_penalty=2.0, top_p=0.8, seed=4),
        Sampling(logit_bias={n: n % 127 / 7 for n in range(V)}, min_p=0.01, seed=5),
        *(
            Sampling(frequency_penalty=0.7, presence_penalty=-1.1, repetition_penalty=1.2, seed=6),
            Sampling(temperature=0, presence_penalty=20, logit_bias=few),
        )[: 2 * counted],
        *(
            Sampling(temperature=0, min_new_tokens=n, end_ids=range(0, V, 2), logit_bias={70: 90})
            for n in (step, step + 1)
        ),
    ]
    counts = np.random.default_rng(4).integers(0, 9, (B, V), dtype=np.int32) * occurred
    counts[6, x[6].argmax()] = occurred[6, x[6].argmax()] = counted
    defines: Defines = (("SAMPLE_CHANGES", 1 + counted),)
    table = np.zeros((B, CHANGES), np.float32)
    places = np.zeros((B, V), np.uint8)
    for b, row in enumerate(rows):
        table[b], places[b] = changes(row, V)
    given: dict[str, Any] = {"table": table}
    if counted:
        given["counts"] = counts
    masks: list[Array | None] = [None] * B
    if masked:
        defines += (("SAMPLE_MASKS", 1),)
        allowed = np.random.default_rng(6).random((B, V)) < 0.04
        allowed[:, 69:72] = True
        index = np.arange(B, 0, -1, dtype=np.int32)
        given["mask_index"] = index * (np.arange(B) % 3 > 0)
        given["masks"] = packed(allowed)[::-1].copy()
        masks = [mask if b % 3 else None for b, mask in enumerate(packed(allowed))]
    got = run(device, x, rows, step, occurred | places, defines=defines, **given)
    assert_as_chosen(
        x, rows, step, occurred, got._replace(occurred=got.occurred & 1), counts, masks
    )
    if masked:
        assert all(allowed[b, token] for b, token in enumerate(got.token) if b % 3)
        return
    assert (got.token[-2], got.token[-1] % 2) == (70, 1)
    np.testing.assert_array_equal(got.occurred & 254, places)
    without = run(device, x[2:4], rows[2:4], step, occurred[2:4])
    np.testing.assert_array_equal(got.token[2:4], without.token)
    np.testing.assert_array_equal(got.logprob[2:4], without.logprob)


@one_order
def test_a_call_with_masks(device: Any) -> None:
    """Allowed tokens are sampled with unmasked log-probabilities; if none is allowed, -1 is."""
    x = rows_of_logits(8, 3, 50)
    allowed = np.zeros((3, 50), bool)
    allowed[[0, 0, 1], [4, 49, 32]] = True
    given: dict[str, Any] = {"masks": packed(allowed)}
    assert given["masks"].tolist() == [[1 << 4, 1 << 17], [0, 1], [0, 0]]
    for sampling in (GREEDY, Sampling(seed=3), Sampling(top_k=1), Sampling(top_p=0.1)):
        expected = reference.sample_token(x, sampling, **given)
        on_device: dict[str, Any] = {n: device.asarray(each) for n, each in given.items()}
        sampled = ops.sample_token(device.asarray(x), sampling, **on_device).get()
        assert sampled.tolist() == expected.tolist()
        assert sampled[0] in {4, 49}
        assert sampled[1:].tolist() == [32, -1]
    with pytest.raises(InputError, match=r"masks: .*3, 2"):
        ops.sample_token(device.asarray(x), masks=device.asarray(np.zeros((3, 3), np.int32)))


@one_order
def test_a_call_with_biases(device: Any) -> None:
    x, sampling = rows_of_logits(8, 2, 50), Sampling(logit_bias={4: 60.0, 9: 60.0}, seed=1)
    logits = device.asarray(x)
    expected = [choose(row, sampling, 0)[0] for row in x]
    assert ops.sample_token(logits, sampling).get().tolist() == expected
    assert set(expected) <= {4, 9}
    counts = np.zeros(x.shape, np.int32)
    counts[0, x[0].argmax()] = 5
    penalty = Sampling(temperature=0, frequency_penalty=9)
    sampled = ops.sample_token(logits, penalty, counts=device.asarray(counts)).get()
    assert sampled.tolist() == reference.sample_token(x, penalty, counts=counts).tolist()
    assert (sampled != x.argmax(-1)).tolist() == [True, False]
    with pytest.raises(InputError, match="logit_bias: expected token ids from 0 to 49, got 50"):
        ops.sample_token(logits, Sampling(logit_bias={50: 1}))
    with pytest.raises(InputError, match="sampling: expected a Sampling, or 2"):
        ops.sample_token(logits, [GREEDY])
    state = SampleState.allocate(2, 50)
    with pytest.raises(InputError, match="sampling: expected 2, one per row, got 1"):
        state.set([GREEDY])
    with pytest.raises(InputError, match="n_ctx: expected 1 to"):
        bind_state(logits, state, 0)
    with pytest.raises(InputError, match="logits: expected 2 rows, like the state, got 1"):
        bind_state(logits[:1], state)


def test_log_probabilities_are_those_of_the_logits() -> None:
    (x,) = rows_of_logits(0, 1, 50)
    truth = np.asarray(reference.log_likelihood(x.astype(np.float64)[None], np.arange(1)))
    for sampling in EVERY_WAY:
        token, logprob = choose(x, sampling, 3)
        truth = reference.log_likelihood(x.astype(np.float64), np.array(token))
        assert logprob == pytest.approx(float(truth), rel=1e-12)


# --- the random numbers --------------------------------------------------------------------------


def chi_square(tokens: Array, probability: Array) -> float:
    """Return chi-square of counts against probabilities, as standard deviations from its mean."""
    expected = probability * len(tokens)
    counts = np.bincount(tokens, minlength=len(probability))
    assert (counts[expected == 0] == 0).all()
    terms = (counts - expected)[expected > 0] ** 2 / expected[expected > 0]
    freedom = len(terms) - 1
    return float((terms.sum() - freedom) / math.sqrt(2 * freedom))


@pytest.mark.parametrize("by", ["step", "sample", "seed"])
def test_draws_have_the_probabilities(by: str) -> None:
    (x,) = rows_of_logits(1, 1, 12, 1.0)
    sampling = Sampling(temperature=0.8, top_k=9, seed=11)
    mass = masses(x, sampling)
    assert np.count_nonzero(mass) == 9
    together = np.cumsum(mass)
    tokens = np.empty(20_000, np.int64)
    for i in range(len(tokens)):
        numbers = {"seed": 11, "step": 0, "sample": 0, by: i}
        r = random_bits(**numbers) * int(together[-1]) >> 64
        tokens[i] = np.searchsorted(together, np.uint64(r), side="right")
    first = replace(sampling, seed=0) if by == "seed" else sampling
    assert tokens[0] == choose(x, first, 0)[0]
    weights = np.where(mass > 0, np.exp(x.astype(np.float64) / 0.8), 0)
    probability = weights / weights.sum()
    assert chi_square(tokens, probability) < 5
    tilted = probability * np.linspace(0.9, 1.1, len(x))  # the bound can fail
    assert chi_square(tokens, tilted / tilted.sum()) > 5


# --- the kernel ----------------------------------------------------------------------------------


class State(NamedTuple):
    """Arrays that the kernel writes."""

    occurred: Array
    position: Array
    step: Array
    token: Array
    logprob: Array


def state_before(B: int, V: int, step: int, occurred: Array | None, position: int = 5) -> State:
    return State(
        np.zeros((B, V), np.uint8) if occurred is None else occurred.copy(),
        np.full(B, position, np.int32),
        np.full(B, step, np.int32),
        np.full(B, -7, np.int32),
        np.full(B, np.inf, np.float32),
    )


def run(
    device: Any,
    x: Array,
    rows: Sequence[Sampling],
    step: int = 0,
    occurred: Array | None = None,
    *,
    threads: int = 128,
    defines: Defines = (),
    blocks: int | None = None,
    position: int = 5,
    n_ctx: int = 1024,
    table: Array | None = None,
    counts: Array | None = None,
    mask_index: Array | None = None,
    masks: Array | None = None,
) -> State:
    """Run the kernel; a GPU runs it twice and must give the same bits.

    threads, defines: of the emulated kernel. blocks: blocks per row on a Hopper or later GPU.
    """
    B, V = x.shape

    def geometry(rows: int, sms: int, clusters: bool) -> Geometry:
        if not replaced():
            few = {8: 10 * rows, 4: 5 * rows, 2: 2 * rows, 1: rows}
            return choose_geometry(rows, few.get(blocks or 0, sms), clusters)
        return choose_geometry(rows, sms, clusters, threads, defines)

    before = state_before(B, V, step, occurred, position)
    results = []
    for _ in range(1 if replaced() else 2):
        state = SampleState.allocate(B, V)
        state.set(rows)
        for name, values in before._asdict().items():
            getattr(state, name).set(values)
        logits, report = device.asarray(x), device.full((2, 2, B), -9, "int32")
        given: list[Any] = [
            None if each is None else device.asarray(each)
            for each in (table, counts, mask_index, masks)
        ]
        of_masks = None if masks is None else Masks(*given[2:])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MODULE, "choose_geometry", geometry)
            bound = bind_state(logits, state, n_ctx, report, None, given[0], given[1], of_masks)
        assert bound.run() is state.token
        if counts is not None:
            sampled = np.zeros_like(counts)
            sampled[np.arange(B), state.token.get()] = 1
            np.testing.assert_array_equal(given[1].get(), counts + sampled)
        results.append(State(*(getattr(state, name).get() for name in State._fields)))
        check_report(report.get(), step, results[-1])
    for first, last in zip(results[0], results[-1], strict=True):
        np.testing.assert_array_equal(first, last)
    return results[0]


def check_report(report: Array, step: int, state: State) -> None:
    """Assert that this step's half of the report equals the state, and the other is unchanged."""
    np.testing.assert_array_equal(report[step % 2, 0], state.token)
    np.testing.assert_array_equal(report[step % 2, 1], state.logprob.view(np.int32))
    assert (report[1 - step % 2] == -9).all()


def assert_as_chosen(
    x: Array,
    rows: Sequence[Sampling],
    step: int,
    occurred: Array,
    got: State,
    counts: Array | None = None,
    masks: Sequence[Array | None] | None = None,
) -> None:
    """Assert that tokens and state equal NumPy's, and that log-probabilities are as accurate."""
    times = np.zeros(x.shape, np.int32) if counts is None else counts
    masks = masks or [None] * len(rows)
    chosen = [
        choose(x[b], row, step, occurred[b], times[b], masks[b]) for b, row in enumerate(rows)
    ]
    tokens = np.array([token for token, _ in chosen])
    np.testing.assert_array_equal(got.token, tokens)
    real = np.flatnonzero(tokens >= 0)
    marked = occurred.copy()
    marked[real, tokens[real]] = 1
    np.testing.assert_array_equal(got.occurred, marked)
    np.testing.assert_array_equal(got.step, np.full(len(x), step + 1))
    truth = np.array([logprob for _, logprob in chosen])
    stated = np.isfinite(truth)
    assert np.isnan(got.logprob[~stated]).all()
    if stated.any():
        plain.assert_as_accurate(
            got.logprob[stated], truth[stated], sequential(x[stated], tokens[stated])
        )


def sequential(x: Array, tokens: Array) -> Array:
    shifted = x - x.max(axis=-1, keepdims=True)
    total = plain.running_sum(np.exp(shifted))
    return np.asarray((np.take_along_axis(shifted, tokens[:, None], axis=-1) - np.log(total))[:, 0])


@every_device
@pytest.mark.parametrize(
    ("V", "spread", "ties", "hidden", "threads", "listed"),
    [
        (1, 1.0, False, 0.0, 128, None),
        (2, 0.01, True, 0.5, 128, None),
        (31, 5.0, False, 0.5, 128, None),
        (129, 1.0, True, 0.0, 128, None),
        (1000, 0.01, False, 0.5, 128, None),
        (4099, 5.0, True, 0.0, 128, None),
        (5001, 3.0, False, 0.0, 1024, None),  # number of threads in use outside of tests
        (3001, 3.0, False, 0.0, 128, 16),  # a list too short for the candidates
        (3001, 3.0, True, 0.0, 128, 16),
    ],
)
def test_the_kernel_chooses_as_numpy_does(
    device: Any, V: int, spread: float, ties: bool, hidden: float, threads: int, listed: int | None
) -> None:
    B, step = len(EVERY_WAY), V % 5
    x, occurred = rows_of_logits(V, B, V, spread, ties), some_occurred(V, B, V)
    x[:, 1:][np.random.default_rng(V).random((B, V - 1)) < hidden] = -np.inf
    defines = (("SAMPLE_LIST", listed),) if listed else ()
    got = run(device, x, EVERY_WAY, step, occurred, threads=threads, defines=defines)
    assert_as_chosen(x, EVERY_WAY, step, occurred, got)


@one_order
def test_rows_of_logits_in_slots(device: Any) -> None:
    """A row of logits samples for its slot as it does alone.

    Slots without a row do not change, and rows with an invalid slot write nothing.
    """
    B, V, chosen = 9, 300, [7, -1, 0, 9, 4]
    x = rows_of_logits(1, len(chosen), V)
    options = [Sampling(top_k=20, repetition_penalty=1.3, seed=b) for b in range(B)]
    occurred, step = some_occurred(1, B, V), np.arange(B, dtype=np.int32)
    state = SampleState.allocate(B, V)
    bound: dict[int, Bound] = {}
    state.begin(step[::-1].copy(), options, 10 + step, step, bound)
    state.begin(step[::-1].copy(), options[::-1], 10 + step[::-1], step[::-1], bound)
    assert list(bound) == [B]
    state.occurred.set(occurred)
    row, token, position = (device.full(len(chosen), -5, "int32") for _ in range(3))
    slots = Slots(row, token, position, device.asarray(np.arange(5, dtype=np.int32)))
    slots.row.set(np.array(chosen, np.int32))
    report = device.full((2, 2, len(chosen)), -9, "int32")
    assert bind_state(device.asarray(x), state, 16, report, slots).run() is state.token
    expected_step = step.copy()
    report = report.get()
    for m, b in enumerate(chosen):
        half, there = report[m % 2, :, m], 0 <= b < B
        assert (report[1 - m % 2, :, m] == -9).all()
        if not there:
            assert slots.token.get()[m] == slots.position.get()[m] == -5
            assert half.tolist() == [-9, -9]
            continue
        expected = choose(x[m], options[b], b, occurred[b])
        occurred[b, expected.token] = 1
        expected_step[b] += 1
        assert slots.token.get()[m] == state.token.get()[b] == half[0] == expected.token
        assert slots.position.get()[m] == state.position.get()[b] == min(11 + b, 15)
        assert half[1:].view(np.float32)[0] == state.logprob.get()[b]
    np.testing.assert_array_equal(slots.turn.get(), np.arange(1, 6))
    np.testing.assert_array_equal(state.step.get(), expected_step)
    np.testing.assert_array_equal(state.occurred.get(), occurred)
    assert state.token.get()[[1, 2, 3, 5, 6, 8]].tolist() == [0] * 6


@one_order
def test_rows_get_the_tokens_and_positions_of_their_slots(device: Any) -> None:
    """Rows with an invalid slot keep theirs; there are more rows than a block has threads."""
    B, V = 300, 5
    state = SampleState.allocate(B, V)
    state.token.set(np.arange(B, dtype=np.int32) * 7)
    state.position.set(np.arange(B, dtype=np.int32) + 40)
    row = np.random.default_rng(0).permutation(B).astype(np.int32)
    row[[3, 4, -1]] = -1, B, 2**31 - 1
    there = (row >= 0) & (row < B)
    token, position, turn = (device.full(B, -5, "int32") for _ in range(3))
    bind_place(state, Slots(device.asarray(row), token, position, turn)).run()
    np.testing.assert_array_equal(token.get(), np.where(there, 7 * row, -5))
    np.testing.assert_array_equal(position.get(), np.where(there, row + 40, -5))
    assert (turn.get() == -5).all()


@on_gpu
@pytest.mark.parametrize("V", [1, 5, 129, 1024, 50257, 200_003])
def test_any_number_of_blocks_gives_the_same_bits(device: Any, V: int) -> None:
    """Rows have every kind of sampling, ties, masked tokens, or no token at all."""
    spreads = (0.01, 1.0, 5.0, 3.0)
    x = np.concatenate([rows_of_logits(5, 12, V, s, ties=s == 3) for s in spreads])
    x[12:24, 1:][np.random.default_rng(V).random((12, V - 1)) < 0.5] = -np.inf
    x[20, V // 2], x[21], x[22, V // 3] = np.nan, -np.inf, np.inf
    rows, occurred = EVERY_WAY * len(spreads), some_occurred(5, len(x), V)
    for step in range(3):
        results = [run(device, x, rows, step, occurred, blocks=n) for n in (1, 2, 4, 8)]
        assert_as_chosen(x, rows, step, occurred, results[0])
        for got in results[1:]:
            for one, other in zip(got, results[0], strict=True):
                np.testing.assert_array_equal(one, other)


@one_order
def test_a_row_chooses_the_same_alone(device: Any) -> None:
    """A row has the same bits at another alignment: rows have an odd length."""
    B, V = len(EVERY_WAY), 515
    x, occurred = rows_of_logits(6, B, V), some_occurred(6, B, V)
    together = run(device, x, EVERY_WAY, 1, occurred)
    for b in range(B):
        alone = run(device, x[b : b + 1], EVERY_WAY[b : b + 1], 1, occurred[b : b + 1])
        for one, all_rows in zip(alone, together, strict=True):
            np.testing.assert_array_equal(one, all_rows[b : b + 1])


@one_order
def test_of_equals_the_lowest_id_is_the_greedy_one(device: Any) -> None:
    places = [(40, 130), (130, 256), (2, 2999), (1023, 1024), (7, 8), (2047, 2048)]
    x = np.zeros((len(places), 3000), np.float32)
    for row, ids in zip(x, places, strict=True):
        row[list(ids)] = 1
    got = run(device, x, [GREEDY] * len(places))
    assert got.token.tolist() == [first for first, _ in places]


@one_order
def test_equal_masses_and_zeros_of_both_signs(device: Any) -> None:
    x = np.zeros((7, 40), np.float32)
    x[:, ::3], x[:, 7] = -0.0, -1
    x[6] = np.arange(40)
    rows = [
        GREEDY,
        Sampling(top_k=30, seed=1),
        Sampling(top_p=0.5, seed=2),
        Sampling(min_p=1, seed=3),
        Sampling(top_k=39, top_p=0.999, seed=4),
        Sampling(top_p=0.25, min_p=0.5, seed=5),
        Sampling(temperature=1e30, top_p=0.5, seed=6),  # masses are equal, logits are not
    ]
    occurred = np.zeros(x.shape, np.uint8)
    for step in range(8):
        got = run(device, x, rows, step, occurred)
        assert_as_chosen(x, rows, step, occurred, got)
        assert got.token[6] >= 20


@one_order
def test_rows_that_the_kernel_cannot_choose_from(device: Any) -> None:
    x = np.tile(rows_of_logits(7, 1, 300), (10, 1))
    x[0:2, 9] = np.nan
    x[2:4] = -np.inf
    x[4:6, [3, 200]] = np.inf, np.nan
    x[6:8, [3, 200]] = np.inf
    rows = [GREEDY, Sampling(top_k=4, top_p=0.9)] * 5
    occurred = np.zeros(x.shape, np.uint8)
    got = run(device, x, rows, 0, occurred)
    assert_as_chosen(x, rows, 0, occurred, got)
    assert got.token[:6].tolist() == [-1] * 6
    assert got.token[6] == 3
    assert got.token[7] in (3, 200)
    assert not got.occurred[:6].any()


@one_order
def test_positions_end_with_the_context(device: Any) -> None:
    x = rows_of_logits(8, 2, 20)
    for position, expected in ((5, 6), (1022, 1023), (1023, 1023)):
        got = run(device, x, [GREEDY] * 2, position=position)
        assert got.position.tolist() == [expected] * 2


@one_order
def test_the_tokens_of_prompts_are_marked(device: Any) -> None:
    B, V = 3, 40
    tokens = np.array([0, 39, 5, 5, 40, -1, 7, 7], np.int32)
    rows = np.array([0, 0, 1, 1, 1, 1, 3, -1], np.int32)
    occurred = np.zeros((B, V), np.uint8)
    occurred[2, 2] = 1
    expected = occurred.copy()
    expected[[0, 0, 1], [0, 39, 5]] = 1
    got = ops.mark_occurred(*map(device.asarray, (tokens, rows, occurred))).get()
    np.testing.assert_array_equal(got, expected)


# --- calls, and sizes for a GPU


@one_order
def test_steps_follow_each_other_in_one_state(device: Any) -> None:
    (x,) = rows_of_logits(10, 1, 1000)
    rows = [Sampling(seed=3, repetition_penalty=1.2), Sampling(seed=3, sample=1)]
    state = SampleState.allocate(2, 1000)
    state.set(rows)
    logits = device.asarray(np.tile(x, (2, 1)))
    bound = bind_state(logits, state, 1024)
    occurred = np.zeros((2, 1000), np.uint8)
    for step in range(20):
        tokens = bound.run().get()
        for b in range(2):
            assert tokens[b] == choose(x, rows[b], step, occurred[b]).token
            occurred[b, tokens[b]] = 1
    np.testing.assert_array_equal(state.occurred.get(), occurred)
    assert state.position.get().tolist() == state.step.get().tolist() == [20, 20]

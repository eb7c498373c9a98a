"""The assignment of sequences to slots: each runs once, in order, never more than slots."""

from __future__ import annotations

import weakref
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt2block.engine.generation.scheduling import (
    MAX_REMOVED,
    START_COST,
    PieceScheduler,
    SequenceScheduler,
)

LENGTHS = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=40)


def scheduler_of(sequences: int, slots: int) -> SequenceScheduler[int]:
    """Return a scheduler in which sequences 0, 1, 2 … wait."""
    scheduler: SequenceScheduler[int] = SequenceScheduler(slots)
    scheduler.add(range(sequences))
    return scheduler


@given(lengths=LENGTHS, slots=st.integers(1, 12))
def test_every_sequence_runs_as_often_as_it_asks(lengths: list[list[int]], slots: int) -> None:
    """lengths: for each sequence, the number of steps of each of its stays in a slot."""
    scheduler, left = scheduler_of(len(lengths), slots), [list(times) for times in lengths]
    running: dict[int, tuple[int, int]] = {}  # slot → sequence, steps left
    started: list[int] = []
    missed: Counter[int] = Counter()  # steps for which ended sequences have waited
    waiting: list[int] = []
    while scheduler.busy:
        free = slots - len(running)
        placed = scheduler.place()
        assert len(placed) <= free
        assert placed or running
        for slot, sequence in placed:
            assert slot not in running
            assert scheduler.sequence_of(slot) == sequence
            if waiting:
                assert sequence == waiting.pop(0)  # comes before new sequences
            elif sequence not in started:
                assert sequence == len(started)
                started.append(sequence)
            running[slot] = sequence, left[sequence].pop(0)
            missed[sequence] = 0
        for sequence in waiting:
            missed[sequence] += 1
            assert missed[sequence] <= slots
        for slot, (sequence, steps) in list(running.items()):
            running[slot] = sequence, steps - 1
            if steps == 1:
                del running[slot]
                scheduler.release(slot, again=bool(left[sequence]))
                if left[sequence]:
                    waiting.append(sequence)
    assert started == list(range(len(lengths)))
    assert not any(left)
    assert not running
    assert scheduler.place() == []


def test_one_sequence_does_not_wait() -> None:
    scheduler = scheduler_of(5, 2)
    assert scheduler.place() == [(0, 0), (1, 1)]
    scheduler.release(1)
    assert scheduler.place() == [(1, 2)]
    scheduler.release(1)
    scheduler.release(0)
    assert scheduler.place() == [(0, 3), (1, 4)]
    assert scheduler.place() == []


@pytest.mark.parametrize("ended", [1, 4, 64])
def test_sequences_wait_for_others_while_many_run(ended: int) -> None:
    """Sequences wait until missed steps outweigh a start: the more have ended, the sooner."""
    slots = 64 * START_COST
    scheduler = scheduler_of(2 * slots, slots)
    assert scheduler.place() == [(sequence, sequence) for sequence in range(slots)]
    for slot in range(ended):
        scheduler.release(slot)
    steps = 1
    while not (placed := scheduler.place()):
        steps += 1
    assert placed == [(slot, slots + slot) for slot in range(ended)]
    assert steps == -(-(slots - ended) // START_COST // ended)


def test_clients_take_turns() -> None:
    """Removed sequences take no turn; a client that returns gains no earlier turn."""
    scheduler: SequenceScheduler[str] = SequenceScheduler(1)
    sequences = {
        name: [f"{name}{n}" for n in range(count)]
        for name, count in zip("abc", (6, 1, 3), strict=True)
    }
    for client, each in sequences.items():
        scheduler.add(each, client)
    scheduler.remove(sequences["a"][1])
    order = []
    while scheduler.busy:
        order += [sequence for _, sequence in scheduler.place()]
        scheduler.release(0)
        if order[-1] == "c0":
            scheduler.add(["b1"], "b")
    assert order == ["a0", "b0", "c0", "a2", "b1", "c1", "a3", "c2", "a4", "a5"]


PROMPTS = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 30)), min_size=1, max_size=12)


@given(prompts=PROMPTS, most=st.integers(1, 20), piece=st.integers(1, 9))
def test_pieces_end_where_they_would_alone(
    prompts: list[tuple[int, int]], most: int, piece: int
) -> None:
    """prompts: numbers of computed and of new tokens. All arrive at once, the worst case."""
    pieces: PieceScheduler[int] = PieceScheduler(most, piece)
    for sequence, (first, new) in enumerate(prompts):
        pieces.add(sequence, sequence, first, first + new)
    ends = {sequence: first for sequence, (first, _) in enumerate(prompts)}
    turns: Counter[int] = Counter()
    while pieces:
        sequences = len(pieces)
        taken = pieces.take()
        tokens = sum(each.end - each.first for each in taken)
        assert 0 < tokens < most + piece
        assert tokens >= most or len(taken) == sequences
        for slot, sequence, first, end, last in taken:
            total = sum(prompts[sequence])
            assert slot == sequence
            assert first == ends[sequence]
            assert end == min(total, (first // piece + 1) * piece)
            assert last == (end == total)
            ends[sequence] = end
            turns[sequence] += 1
        waiting = [turns[each] for each in range(len(prompts)) if ends[each] < sum(prompts[each])]
        assert not waiting or max(waiting) <= min(waiting) + 1
    assert ends == {sequence: sum(prompt) for sequence, prompt in enumerate(prompts)}


def test_a_slot_has_the_sequence_that_runs_in_it() -> None:
    scheduler = scheduler_of(3, 2)
    scheduler.place()
    assert [scheduler.slot_of(sequence) for sequence in range(3)] == [0, 1, None]
    scheduler.release(0)
    assert scheduler.place() == [(0, 2)]
    assert [scheduler.slot_of(sequence) for sequence in range(3)] == [None, 1, 0]
    assert scheduler.sequences_of([1, 0]) == [1, 2]


@pytest.mark.parametrize("removed", [1, MAX_REMOVED, MAX_REMOVED + 1])
def test_sequences_that_start_again_can_be_removed(removed: int) -> None:
    """One sequence is removed, or so many that they are dropped together; others keep order."""
    sequences, others = ([object() for _ in range(n)] for n in (4, MAX_REMOVED + 3))
    scheduler: SequenceScheduler[object] = SequenceScheduler(4)
    scheduler.add(sequences)
    scheduler.place()
    for slot in range(4):
        scheduler.release(slot, again=True)
    scheduler.add(others)
    gone = [sequences[2], *others[1:removed]]
    for sequence in gone:
        scheduler.remove(sequence)
    started = []
    while scheduler.busy:
        for slot, sequence in scheduler.place():
            started.append(sequence)
            scheduler.release(slot)
    assert started == [sequence for sequence in [*sequences, *others] if sequence not in gone]


def test_a_sequence_that_waits_can_be_removed() -> None:
    pieces: PieceScheduler[str] = PieceScheduler(4, 4)
    pieces.add(0, "long", 0, 9)
    pieces.add(1, "short", 0, 2)
    assert [each[1:] for each in pieces.take()] == [("long", 0, 4, False)]
    pieces.remove("long")
    assert [each[1:] for each in pieces.take()] == [("short", 0, 2, True)]
    assert not pieces


class Waiting:
    """A sequence to which weak references are possible."""


@pytest.mark.parametrize("kept", [0, 3, 200])
def test_removed_sequences_are_not_kept_until_their_turn(kept: int) -> None:
    """While the only slot is taken, sequences come and are removed; others wait, in order."""
    scheduler: SequenceScheduler[Waiting] = SequenceScheduler(1)
    first, others = Waiting(), [Waiting() for _ in range(kept)]
    scheduler.add([first])
    assert scheduler.place() == [(0, first)]
    gone: list[weakref.ref[Waiting]] = []
    for n in range(2000):
        came = [Waiting(), *others[n : n + 1]]
        scheduler.add(came)
        gone.append(weakref.ref(came[0]))
        scheduler.remove(came[0])
        del came
    assert sum(ref() is not None for ref in gone) <= max(MAX_REMOVED, kept) + 1
    assert scheduler.waiting == kept
    for other in others:
        scheduler.release(0)
        assert scheduler.place() == [(0, other)]
    scheduler.release(0)
    assert not scheduler.busy

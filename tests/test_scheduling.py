"""Which rows run in which slots: each row once, in order, never more than there are slots."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt2block.text.scheduling import START_COST, RowScheduler

LENGTHS = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=40)


def scheduler_of(rows: int, slots: int) -> RowScheduler[int]:
    """With rows 0, 1, 2 … waiting."""
    scheduler: RowScheduler[int] = RowScheduler(slots)
    scheduler.add(range(rows))
    return scheduler


@given(lengths=LENGTHS, slots=st.integers(1, 12))
def test_every_row_runs_as_often_as_it_asks(lengths: list[list[int]], slots: int) -> None:
    """lengths: for each row, the steps of each of its times in a slot."""
    scheduler, left = scheduler_of(len(lengths), slots), [list(times) for times in lengths]
    running: dict[int, tuple[int, int]] = {}  # slot → row, steps left
    started: list[int] = []
    missed: Counter[int] = Counter()  # steps that ended rows have waited for
    waiting: list[int] = []
    while scheduler.busy:
        free = slots - len(running)
        placed = scheduler.place()
        assert len(placed) <= free
        assert placed or running
        for slot, row in placed:
            assert slot not in running
            assert scheduler.row_of(slot) == row
            if waiting:
                assert row == waiting.pop(0)  # before new rows
            elif row not in started:
                assert row == len(started)
                started.append(row)
            running[slot] = row, left[row].pop(0)
            missed[row] = 0
        for row in waiting:
            missed[row] += 1
            assert missed[row] <= slots
        for slot, (row, steps) in list(running.items()):
            running[slot] = row, steps - 1
            if steps == 1:
                del running[slot]
                scheduler.release(slot, again=bool(left[row]))
                if left[row]:
                    waiting.append(row)
    assert started == list(range(len(lengths)))
    assert not any(left)
    assert not running
    assert scheduler.place() == []


def test_one_row_does_not_wait() -> None:
    scheduler = scheduler_of(5, 2)
    assert scheduler.place() == [(0, 0), (1, 1)]
    scheduler.release(1)
    assert scheduler.place() == [(1, 2)]
    scheduler.release(1)
    scheduler.release(0)
    assert scheduler.place() == [(0, 3), (1, 4)]
    assert scheduler.place() == []


@pytest.mark.parametrize("ended", [1, 4, 64])
def test_rows_wait_for_others_while_many_run(ended: int) -> None:
    """Until the steps they missed are worth a start: the more have ended, the sooner."""
    slots = 64 * START_COST
    scheduler = scheduler_of(2 * slots, slots)
    assert scheduler.place() == [(row, row) for row in range(slots)]
    for slot in range(ended):
        scheduler.release(slot)
    steps = 1
    while not (placed := scheduler.place()):
        steps += 1
    assert placed == [(slot, slots + slot) for slot in range(ended)]
    assert steps == -(-(slots - ended) // START_COST // ended)

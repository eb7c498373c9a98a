"""Messages of the package's errors are one line of bounded length, without control characters."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt2block.errors import LONGEST, CheckpointError, DeviceError, InputError, printable, shown

ANYTHING = st.text(st.characters(codec=None))


@pytest.mark.parametrize("kind", [InputError, CheckpointError, DeviceError])
def test_a_message_has_no_control_characters(kind: type[Exception]) -> None:
    assert str(kind("h.0\x1b[31m\nred \ud800 \u202e")) == r"h.0\x1b[31m\nred \ud800 \u202e"


@pytest.mark.parametrize("kind", [InputError, CheckpointError, DeviceError])
def test_a_long_message_keeps_its_beginning_and_its_end(kind: type[Exception]) -> None:
    message = str(kind("tensor " + 1_000_000 * "x" + ": download it again"))
    assert len(message) <= LONGEST
    assert message.startswith("tensor xxx")
    assert message.endswith("xxx: download it again")


@given(ANYTHING)
def test_printable_text_can_be_shown_and_is_bounded(text: str) -> None:
    line = printable(text)
    assert line.isprintable()
    assert len(line) <= LONGEST
    assert line == text or not text.isprintable() or len(text) > LONGEST


@pytest.mark.parametrize("length", [1, 2, 3, 10, 499, 500, 501, 999, 1000, 1001])
def test_lengths_around_the_limits(length: int) -> None:
    assert len(printable("a" * length)) == min(length, LONGEST)
    assert len(printable("\x1b" * length)) == min(4 * length, LONGEST)
    assert len(printable("a" * length, 40)) == min(length, 40)


def test_errors_travel_between_processes() -> None:
    error = pickle.loads(pickle.dumps(InputError("x: expected 1, got 2")))
    assert type(error) is InputError
    assert str(error) == "x: expected 1, got 2"


def test_any_wrong_value_can_be_shown() -> None:
    """The `repr` of a wrong value may be long, too deep, or fail."""

    class Unspeakable:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    values = (10**5000, -(10**5000), deep, Unspeakable(), "x" * 10**6, list(range(10**5)))
    for value in values:
        assert 0 < len(shown(value)) < 200
    assert shown("gelu") == "'gelu'"
    assert shown(10**5000) == "an integer of more than 40 digits"
    assert [shown(value) for value in (None, True, 1.5, 12)] == ["None", "True", "1.5", "12"]

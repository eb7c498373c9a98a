"""Options of the commands, and errors that name them instead of keywords of the library."""

from __future__ import annotations

import pickle
from dataclasses import dataclass

import pytest
import typer

from gpt2block.apps.cli.options import add_command, argument, option
from gpt2block.errors import Argument, CheckpointError, InputError, PrintableError
from tests.refusals import cases


@dataclass(frozen=True)
class Shared:
    model: str = option("A name.", "small")
    stop_ids: list[int] = option("An id.", (), "--stop-id")
    form: str = option("A format.", "jsonl", "--format")


def ran(function: object, *words: str) -> None:
    """Run a function as a command of a new application with these arguments."""
    app = typer.Typer()
    app.callback()(lambda: None)
    add_command(app, function, "example")  # type: ignore[arg-type]
    typer.main.get_command(app).main(["command", *words], standalone_mode=False)


def test_fields_and_parameters_are_options() -> None:
    found = []

    def command(
        file: str = argument("A file.", ...),
        *,
        model: Shared,
        top_k: int | None = option("A number."),
        causal: bool = option("A flag.", True),
    ) -> None:
        found.append((file, model, top_k, causal))

    ran(command, "a.txt")
    ran(command, "a.txt", "--stop-id=3", "--stop-id=4", "--model=b", "--top-k=5", "--no-causal")
    assert found == [
        ("a.txt", Shared("small", []), None, True),
        ("a.txt", Shared("b", [3, 4]), 5, False),
    ]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        *cases("arguments in messages"),
        (CheckpointError("weights: expected a name"), "--model: expected a name"),
        (InputError("try ", Argument("model", "a"), " or wait"), "try --model a or wait"),
        (InputError("b: ", Argument("form"), " 'x': expected"), "b: --format 'x': expected"),
        (InputError("use ", Argument("top_k"), " or top_p"), "use --top-k or top_p"),
        (InputError("use ", Argument("dtype", "float32")), "use dtype='float32'"),
    ],
)
def test_an_argument_in_a_message_becomes_its_option(
    error: PrintableError | str, expected: str
) -> None:
    given = InputError(error) if isinstance(error, str) else error

    def command(
        file: str = argument("A file.", "a.txt"), *, shared: Shared, top_k: int = option("", 0)
    ) -> None:
        raise given

    for given in (given, pickle.loads(pickle.dumps(given))):  # noqa: B020
        with pytest.raises(type(given)) as caught:
            ran(command)
        assert str(caught.value) == expected

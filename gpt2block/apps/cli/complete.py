"""Complete values of options in the shell, after `gpt2block --install-completion`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import typer

from gpt2block.cuda.formats import DTYPES
from gpt2block.models.config import SIZES

if TYPE_CHECKING:
    from gpt2block.ops.operation import Operation


def one_of(*names: str) -> Callable[[str], list[str]]:
    """Return a function that returns those of `names` that begin with a given text."""
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]


sizes = one_of(*SIZES)
dtypes = one_of(*DTYPES)
devices = one_of("cpu", "cuda")


def models(incomplete: str) -> list[str]:
    """Complete the name of a model that is bundled, installed or on the hub."""
    from gpt2block.files.checkpoints import BUNDLED_NAMES  # noqa: PLC0415  (slow to import)
    from gpt2block.files.checkpoints.locating import SMOLLM2  # noqa: PLC0415

    return one_of(*BUNDLED_NAMES, SMOLLM2, *SIZES)(incomplete)


def operations(incomplete: str) -> list[str]:
    """Complete the name of an operation."""
    from gpt2block.ops.registry import OPERATIONS  # noqa: PLC0415  (slow to import)

    return one_of(*OPERATIONS)(incomplete)


def variants(context: typer.Context, incomplete: str) -> list[str]:
    """Complete the name of a variant of the operation on the command line."""
    operation = _operation(context)
    return one_of(*(each.name for each in operation.variants))(incomplete) if operation else []


def solutions(context: typer.Context, incomplete: str) -> list[str]:
    """Complete the number of an exercise with a solution for the operation on the command line."""
    from gpt2block.judge.solutions import names  # noqa: PLC0415  (needed here alone)

    operation = _operation(context)
    return one_of(*names(operation.name))(incomplete) if operation else []


def _operation(context: typer.Context) -> Operation | None:
    from gpt2block.ops.registry import OPERATIONS  # noqa: PLC0415  (slow to import)

    # While an option without a value is completed, Typer puts the operation's name in `args`.
    words = (str(context.params.get("operation")), *context.args)
    return next((OPERATIONS[word] for word in words if word in OPERATIONS), None)

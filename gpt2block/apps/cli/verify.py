"""`gpt2block verify`: check the receipts of generated texts."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from gpt2block.apps.cli.codes import FAILED, WRONG
from gpt2block.apps.cli.display import progress_bar
from gpt2block.apps.cli.model import AdapterOptions, ModelOptions, load_model, model_option
from gpt2block.apps.cli.options import argument, option
from gpt2block.apps.cli.texts import BYTE_ORDER_MARK, read_text
from gpt2block.cuda.formats import BY_DEFAULT, USUAL
from gpt2block.engine.receipts import found_in, json_of, parsed, use_threads
from gpt2block.errors import CheckpointError, InputError, printable

if TYPE_CHECKING:
    from gpt2block.files.tokenizers.encoding import Encoding
    from gpt2block.model import Model

MAX_FILE = 2**32  # maximum bytes of a file of receipts: 4 GiB
MAX_SHOWN = 10  # maximum number of problems that are printed
MAX_UNREADABLE = 100  # receipts of a file that cannot be read, after which no more are read
NO_JSON = re.compile(r"^(?:data: ?(?:\[DONE\])?|:.*|event:.*)", re.MULTILINE)  # in a stream


@dataclass(frozen=True)
class VerifyOptions(ModelOptions):
    model: str = model_option("")


def verify(
    files: list[str] = argument(
        "Receipts, results of map generate --receipts, or saved answers of a server.", ...
    ),
    *,
    model: VerifyOptions,
    adapters: AdapterOptions,
    sample: int | None = option("Check this many receipts, drawn at random.", min=1),
) -> None:
    """Check that texts are what a model generates, at a fraction of the cost of generation.

    The model, its dtypes and the threads are as the first receipt states, unless options select
    others.

    Exit code: 0 if all tokens and the bits of all log-probabilities are as the receipts state; 1 if
    one differs; 2 if a receipt cannot be read, or its text cannot be compared on this device or
    with this model or version.
    """
    from gpt2block.engine.generation.known_texts import check_receipts  # noqa: PLC0415

    receipts = [each for file in files for each in _read(file)]
    if sample is not None:
        receipts = random.SystemRandom().sample(receipts, min(sample, len(receipts)))
    loaded, encoding = _load(model, receipts, adapters)
    begun, codes, tokens, nan = perf_counter(), [0, 0, 0], 0, 0
    stated = [each.receipt for each in receipts]
    with progress_bar("verifying") as bar:
        task = bar.add_task("verifying", total=len(receipts))
        for index, check in check_receipts(loaded.engine, encoding or loaded.lookup, stated):
            bar.advance(task)
            codes[check.code] += 1
            tokens, nan = tokens + check.tokens, nan + check.nan
            if check.code and codes[1] + codes[2] <= MAX_SHOWN:
                line = printable(f"{receipts[index].place}: {check.problem}", 1000)
                bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
    seconds = perf_counter() - begun
    equal, differ, others = codes
    print(
        f"{equal:,} of {len(receipts):,} texts are as stated, {differ:,} differ, {others:,} cannot "
        f"be compared{f'; {nan:,} have NaN' if nan else ''}: {tokens:,} tokens in {seconds:.1f} s, "
        f"{len(receipts) / seconds:,.1f} texts/s, "
        f"{printable(f'{loaded.name}, {loaded.dtypes}, {loaded.device}')}"
    )
    if differ or others:
        raise typer.Exit(FAILED if differ else WRONG)


class StatedReceipt(NamedTuple):
    """A receipt, or an InputError that says why there is none; and its file, and line or number."""

    place: str
    receipt: object


def _read(file: str) -> list[StatedReceipt]:
    """Return the receipts in a file: JSON, lines of JSON, or the events of a saved stream.

    After MAX_UNREADABLE receipts that cannot be read, the rest of the file is left out.
    """
    text = read_text(file, MAX_FILE).removeprefix(BYTE_ORDER_MARK).rstrip()
    found, unreadable, unended = list[StatedReceipt](), 0, dict[str, InputError]()
    try:
        name, parts = "receipt", [*found_in(json_of(text), unended)]
    except InputError:
        # Not `splitlines`: JSON strings can contain U+0085, U+2028 and U+2029.
        lines = NO_JSON.sub("", text).split("\n")
        name, parts = "line", [line.strip() or [] for line in lines]
    for number, part in enumerate(parts, 1):
        for each in found_in(part, unended):
            unreadable += isinstance(each, InputError)
            found.append(StatedReceipt(f"{file}, {name} {number}", each))
        if unreadable >= MAX_UNREADABLE:
            rest = f"the {len(parts) - number:,} {name}s after {name} {number} are left out"
            print(printable(f"{file}: {unreadable} cannot be read: {rest}"), file=sys.stderr)
            break
    found += [StatedReceipt(file, problem) for problem in unended.values()]
    if not found:
        raise InputError(f"{file}: expected receipts, found none")
    return found


def _load(
    options: VerifyOptions, receipts: Sequence[StatedReceipt], adapters: AdapterOptions
) -> tuple[Model[Any], Encoding | None]:
    """Load the model, by default with the name, formats and threads that a receipt states."""
    problem, formats = "", options.formats
    for place, receipt in receipts:
        try:
            stated = parsed(receipt)
            name = options.model or stated.get("model")
            if not isinstance(name, str):
                raise InputError("--model: expected a name or path, as the receipt has none")
            if options.formats == BY_DEFAULT:
                own = {each: stated[each] for each in USUAL.facts() if each in stated}
                formats = replace(BY_DEFAULT, **own)
            break
        except InputError as error:
            problem = problem or f"{place}: {error}"
    else:
        raise InputError(problem)
    if options.threads is None:
        use_threads(stated.get("threads"))
    try:
        return load_model(replace(options, model=name, formats=formats, gpus=None), None, adapters)
    except (CheckpointError, InputError) as error:
        if options.formats != BY_DEFAULT:
            raise
        raise InputError(f"cannot load the model for {place}: {error}") from error

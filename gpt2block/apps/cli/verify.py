"""`gpt2block verify`: check the receipts of generated texts."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from time import perf_counter

import typer

from gpt2block.apps.cli.codes import FAILED, WRONG
from gpt2block.apps.cli.display import progress_bar
from gpt2block.apps.cli.model import ModelOptions, load_model, model_option
from gpt2block.apps.cli.options import argument, option
from gpt2block.apps.cli.texts import BYTE_ORDER_MARK, read_text
from gpt2block.cuda.formats import BY_DEFAULT
from gpt2block.engine.receipts import found_in, parsed
from gpt2block.errors import InputError, printable

MAX_FILE = 2**32  # maximum bytes of a file of receipts: 4 GiB
MAX_SHOWN = 10  # maximum number of problems that are printed


@dataclass(frozen=True)
class VerifyOptions(ModelOptions):
    model: str = model_option("")


def verify(
    files: list[str] = argument(
        "Receipts, results of map generate --receipts, or saved answers of a server.", ...
    ),
    *,
    model: VerifyOptions,
    sample: int | None = option("Check this many receipts, drawn at random.", min=1),
) -> None:
    """Check that texts are what a model generates, at a fraction of the cost of generation.

    The model and its dtypes are as the receipts state, unless options select others.

    Exit code: 0 if all tokens and the bits of all log-probabilities are as the receipts state; 1 if
    one differs; 2 if a receipt cannot be read, or its text cannot be compared on this device or
    with this model or version.
    """
    from gpt2block.engine.generation.known_texts import check_receipts  # noqa: PLC0415

    receipts = [(file, n, each) for file in files for n, each in enumerate(_read(file), 1)]
    if sample is not None:
        receipts = random.SystemRandom().sample(receipts, min(sample, len(receipts)))
    stated = [each for *_, each in receipts]
    loaded, encoding = load_model(_options(model, stated), None)
    begun, codes, tokens, nan = perf_counter(), [0, 0, 0], 0, 0
    with progress_bar("verifying") as bar:
        task = bar.add_task("verifying", total=len(receipts))
        for index, check in check_receipts(loaded.engine, encoding or loaded.lookup, stated):
            bar.advance(task)
            codes[check.code] += 1
            tokens, nan = tokens + check.tokens, nan + check.nan
            if check.code and codes[1] + codes[2] <= MAX_SHOWN:
                file, number, _ = receipts[index]
                bar.console.print(printable(f"{file}, receipt {number}: {check.problem}", 1000),
                                  markup=False, highlight=False, soft_wrap=True)  # fmt: skip
    seconds = perf_counter() - begun
    equal, differ, others = codes
    print(
        f"{equal:,} of {len(receipts):,} texts are as stated, {differ:,} differ, {others:,} cannot "
        f"be compared{f'; {nan:,} have NaN' if nan else ''}: {tokens:,} tokens in {seconds:.1f} s, "
        f"{len(receipts) / seconds:,.1f} texts/s"
    )
    if differ or others:
        raise typer.Exit(FAILED if differ else WRONG)


def _read(file: str) -> list[object]:
    """Return the receipts in a file: JSON, lines of JSON, or the events of a saved stream."""
    text = read_text(file, MAX_FILE).removeprefix(BYTE_ORDER_MARK)
    # Not `splitlines`: JSON strings can contain U+0085, U+2028 and U+2029.
    lines = [line.removeprefix("data: ") for line in text.split("\n")]  # begins a saved event
    values = [_value(text)] if isinstance(_value(text), (dict, list)) else [*map(_value, lines)]
    receipts = [*found_in([each for each in values if each not in ("", "[DONE]")])]
    if not receipts:
        raise InputError(f"{file}: expected receipts, found none")
    return receipts


def _value(text: str) -> object:
    """Return the value of JSON; a text that is not JSON is returned unchanged."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text.strip()


def _options(options: VerifyOptions, receipts: Sequence[object]) -> ModelOptions:
    """Return the options of the model: by default the name and the formats that receipts state."""
    first = None
    for each in receipts:
        with suppress(InputError):  # `check_receipts` reports it
            first = parsed(each)
            if isinstance(first.get("model"), str):
                break
    first = parsed(receipts[0]) if first is None else first  # raises an error for any other text
    name, formats = options.model or first.get("model"), options.formats
    if not isinstance(name, str):
        raise InputError("--model: expected a name or path of a model, as the receipt has none")
    if formats == BY_DEFAULT:
        stated = {each.name: first[each.name] for each in fields(formats) if each.name in first}
        formats = replace(formats, **stated)
    return replace(options, model=name, formats=formats, gpus=None)

"""`gpt2block compare`: compare every step of every layer of a model with float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

from rich.console import Console

from gpt2block.apps.cli.display import console, new_table, print_json, print_table, shown
from gpt2block.apps.cli.model import ModelOptions, load_model, model_facts
from gpt2block.apps.cli.options import argument, flag, json_option, option
from gpt2block.engine.inspect.compare import Comparison
from gpt2block.errors import InputError
from gpt2block.files.tokenizers.tokenizer import token_ids

MAX_TOKENS = 1024  # a limit, because the tensors of all steps are kept in float64
DEFAULT_TEXT = "To be, or not to be, that is the question"
text_argument = partial(argument, "Input text; by default a short one.")


def compare(
    text: str | None = text_argument(),
    *,
    model: ModelOptions,
    layer: int | None = option("Show the steps of this layer, counted from 0."),
    cached: bool = flag("Compare a decoding step: the last token alone."),
    as_json: bool = json_option(),
) -> None:
    """Compare every step of every layer of a model with float64 NumPy.

    A row shows the step with the largest error of a layer. The float64 pass uses the weights as
    they are stored, and keys and values that are not rounded.
    """
    loaded, encoding = load_model(model, "--ids of generate reads token ids")
    n_layer = loaded.config.n_layer
    if layer is not None and not 0 <= layer < n_layer:
        raise InputError(f"--layer: expected 0 to {n_layer - 1}, got {layer}")
    assert encoding is not None  # without a tokenizer, load_model has raised an error
    text = DEFAULT_TEXT if text is None else text
    ids = token_ids(encoding, text, loaded.config.vocab_size, "TEXT")
    most = min(MAX_TOKENS, loaded.config.n_ctx)
    least = 2 if cached else 1
    if len(ids) < least:
        expected = "two tokens for a decoding step" if cached else "one token"
        raise InputError(f"TEXT: expected at least {expected}, got {len(ids)}")
    if len(ids) > most:
        raise InputError(f"TEXT: expected at most {most:,} tokens, got {len(ids):,}: shorten it")
    steps = loaded.compare(ids, cached)
    if as_json:
        facts = {**model_facts(loaded), "cached": cached, "tokens": len(ids)}
        entries = (asdict(row).items() for row in steps)
        without = [{name: value for name, value in each if name != "ms"} for each in entries]
        print_json(facts | {"steps": without})
        return
    out = console()
    what = "the last of " if cached else ""
    out.print(f"device  {shown(loaded.device)}")
    out.print(f"model   {shown(loaded.name)}, {loaded.dtypes}")
    out.print(f"input   {what}{len(ids)} tokens of {shown(repr(text[:40]))}")
    parts = _parts(steps)
    if layer is None:
        _print_steps(out, [(name, _worst(rows)) for name, rows in parts.items()])
    else:
        _print_steps(out, [(str(layer), row) for row in parts[str(layer)]])
    out.print("own: the step alone on exact inputs; total: accumulated from the tokens on.")
    out.print("Errors against float64, relative to the tensor's largest value.")


def _parts(steps: Sequence[Comparison]) -> dict[str, list[Comparison]]:
    """Group steps by part of the model: "input", the layers' numbers, and "output"."""
    parts: dict[str, list[Comparison]] = {}
    for row in steps:
        h, _, rest = row.name.partition(".")
        name = rest.partition(".")[0] if h == "h" else "input" if h == "embedding" else "output"
        parts.setdefault(name, []).append(row)
    return parts


def _worst(rows: Sequence[Comparison]) -> Comparison:
    """Return the step with the largest relative error of a step run alone; NaN is the largest."""
    return max(rows, key=lambda row: (row.max_rel != row.max_rel, row.max_rel))


def _print_steps(out: Console, rows: Sequence[tuple[str, Comparison]]) -> None:
    table = new_table(("layer", "step", "kernel", "shape"), ("own abs", "own rel", "total rel"))
    for name, row in rows:
        shape = "x".join(map(str, row.shape))
        errors = (row.max_abs, row.max_rel, row.total_rel)
        step = row.name.rpartition(".")[2] if row.name.startswith("h.") else row.name
        table.add_row(name, step, row.kernel, shape, *(f"{error:.1e}" for error in errors))
    print_table(out, table)

"""`gpt2block explain`: write one forward pass of a model as an HTML page."""

from __future__ import annotations

import webbrowser
from pathlib import Path

from gpt2block.apps.cli import complete
from gpt2block.apps.cli.compare import DEFAULT_TEXT, text_argument
from gpt2block.apps.cli.display import console, shown, working
from gpt2block.apps.cli.model import ModelOptions, load_model
from gpt2block.apps.cli.options import option, path_option
from gpt2block.errors import InputError
from gpt2block.files.tokenizers.tokenizer import token_ids
from gpt2block.files.writing import check_file


def explain(
    text: str | None = text_argument(),
    output: Path = path_option("The HTML file.", Path("explain.html"), "--output", "-o"),
    *,
    model: ModelOptions,
    layer: int = option("Index of the block that the page shows in detail, from 0.", 0),
    open_page: bool = option("Open the page in a browser.", False, "--open"),
    plan: str | None = option(
        "Print instead which kernels a decoding step of this model runs, and why. Needs no GPU and "
        "only a config: a model as for --model, or the path of a config.json.",
        complete=complete.models,
    ),
    rows: int | None = option(
        "With --plan: tokens of the step, one of each sequence; by default 1."
    ),
    card: str | None = option("With --plan: the compute capability of a GPU; by default 9.0."),
    as_json: bool = option("With --plan: print JSON.", False, "--json"),
) -> None:
    """Write one forward pass as an HTML page: tokens, every step, attention, the next token.

    The page shows each step's tensor, formula, kernel, time and error against float64. The page is
    one file that needs no network.
    """
    if plan is not None:
        from gpt2block.apps.cli.plan import print_plan  # noqa: PLC0415

        print_plan(plan, model, 1 if rows is None else rows, card or "9.0", as_json)
        return
    given = {"--rows": rows is not None, "--card": card is not None, "--json": as_json}
    if any(given.values()):
        names = ", ".join(name for name, stated in given.items() if stated)
        raise InputError(f"{names}: expected --plan with it")
    from gpt2block.engine import explain as explaining  # noqa: PLC0415

    check_file(output)
    loaded, encoding = load_model(model, "--tokenizer takes the path of one")
    text = DEFAULT_TEXT if text is None else text
    ids = token_ids(encoding, text, loaded.config.vocab_size, "text")
    with working():
        data = explaining.collect(loaded.engine, encoding, loaded.name, ids, layer)
    path = explaining.Page(data).save(output)
    console().print(f"{shown(str(path))}  {len(ids)} tokens, {path.stat().st_size / 1e6:.1f} MB")
    if open_page and not webbrowser.open(path.resolve().as_uri()):
        console().print("--open: no browser was found: open the file yourself")

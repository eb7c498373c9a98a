"""`gpt2block explain`: one forward pass of a model as an HTML page."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from gpt2block.checkpoints import BUNDLED
from gpt2block.cli.compare import DEFAULT_TEXT
from gpt2block.cli.display import compiling, console, shown
from gpt2block.cli.model import (
    Device,
    Dtype,
    KvDtype,
    Model,
    OptionalStr,
    Revision,
    Tokenizer,
    load_model,
    path_of,
)


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(epilog="Example: gpt2block explain 'To be, or not to be' -o page.html")(explain)


def explain(
    text: Annotated[OptionalStr, typer.Argument(help="Input text; by default a short one.")] = None,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="The HTML file.", parser=path_of, metavar="PATH"),
    ] = Path("explain.html"),
    model: Model = BUNDLED,
    revision: Revision = None,
    dtype: Dtype = "float32",
    kv_dtype: KvDtype = None,
    device: Device = None,
    tokenizer: Tokenizer = None,
    layer: Annotated[
        int, typer.Option(help="The block that the page opens, with finer heatmaps, from 0.")
    ] = 0,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Write one forward pass as an HTML page: tokens, every step, attention, the next token.

    The page shows each step's tensor, formula, kernel, time and error against float64. It is one
    file that needs no network.
    """
    from gpt2block import explain as explaining  # noqa: PLC0415
    from gpt2block.text.tokenizer import token_ids  # noqa: PLC0415  (tiktoken takes its time)

    explaining.check_file(output)
    hint = "--tokenizer takes the path of one"
    loaded, encoding = load_model(model, dtype, device, tokenizer, hint, revision, kv_dtype)
    given = DEFAULT_TEXT if text is None else text
    ids = token_ids(encoding, given, loaded.config.vocab_size, "text")
    with compiling():
        data = explaining.collect(loaded.engine, encoding, loaded.name, ids, layer)
    path = explaining.Page(data).save(output)
    console().print(f"{shown(str(path))}  {len(ids)} tokens, {path.stat().st_size / 1e6:.1f} MB")
    if open_page and not webbrowser.open(path.resolve().as_uri()):
        console().print("--open: no browser was found: open the file yourself")

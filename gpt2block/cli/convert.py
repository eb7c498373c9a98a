"""`gpt2block convert`: write any readable checkpoint as a Hugging Face directory."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from gpt2block.checkpoints import Checkpoint, save_pretrained
from gpt2block.checkpoints.hugging_face import WEIGHTS
from gpt2block.checkpoints.saving import SAVED_DTYPES
from gpt2block.checks import check_choice
from gpt2block.cli import complete
from gpt2block.cli.model import OptionalStr
from gpt2block.errors import InputError, printable


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(epilog="Example: gpt2block convert out/ckpt.pt my-model --dtype bfloat16")(convert)


def convert(
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CKPT",
            help="A pytorch_model.bin, a nanoGPT ckpt.pt, an llm.c .bin, a .gguf, a "
            "directory, a .safetensors file, smollm2 or a hub id.",
        ),
    ],
    output: Annotated[str, typer.Argument(metavar="OUT", help="The directory to write.")],
    dtype: Annotated[
        OptionalStr,
        typer.Option(
            help="float32, bfloat16 or float16; by default each tensor keeps its "
            "dtype, and quantized ones become float32.",
            autocompletion=complete.one_of(*SAVED_DTYPES),
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Write into OUT although it exists.")
    ] = False,
) -> None:
    """Write a checkpoint as a Hugging Face directory: config.json and model.safetensors.

    PyTorch files are read without PyTorch, and no code in them is executed.
    """
    if not output:
        raise InputError("OUT: expected a directory, got an empty string")
    if dtype is not None:
        check_choice("--dtype", dtype, SAVED_DTYPES)
    if os.path.lexists(os.path.expanduser(output)) and not overwrite:
        raise InputError(f"{output}: already exists: give another directory or --overwrite")
    source = Checkpoint.open(checkpoint)
    if os.path.realpath(os.path.expanduser(output)) == os.path.realpath(source.directory):
        raise InputError(f"{output}: the checkpoint is in this directory: give another one as OUT")
    directory = save_pretrained(output, source, dtype, overwrite=overwrite)
    size = (directory / WEIGHTS).stat().st_size
    stored = Checkpoint.open(directory).stored.values()
    dtypes = ", ".join(sorted({tensor.dtype for tensor in stored}))
    layers, width = source.config.n_layer, source.config.n_embd
    print(
        f"wrote {layers} layers of width {width} in {dtypes} to "
        f"{printable(str(directory))}: {size / 1e6:,.1f} MB"
    )

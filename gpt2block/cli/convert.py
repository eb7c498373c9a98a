"""`gpt2block convert`: write any readable checkpoint as a Hugging Face directory."""

from __future__ import annotations

import os

from gpt2block.checkpoints import Checkpoint, save_pretrained
from gpt2block.checkpoints.hugging_face import WEIGHTS
from gpt2block.checkpoints.saving import SAVED_DTYPES
from gpt2block.checks import check_choice
from gpt2block.cli import complete
from gpt2block.cli.options import argument, option
from gpt2block.errors import InputError, printable


def convert(
    checkpoint: str = argument(
        "A pytorch_model.bin, a nanoGPT ckpt.pt, an llm.c .bin, a .gguf, a directory, a "
        ".safetensors file, smollm2 or a hub id.",
        ...,
        metavar="CKPT",
    ),
    output: str = argument("The directory to write.", ..., metavar="OUT"),
    dtype: str | None = option(
        "float32, bfloat16 or float16; by default each tensor keeps its dtype, and quantized ones "
        "become float32.",
        complete=complete.one_of(*SAVED_DTYPES),
    ),
    overwrite: bool = option("Write into OUT although it exists.", False, "--overwrite"),
) -> None:
    """Write a checkpoint as a Hugging Face directory: config.json and model.safetensors.

    PyTorch files are read without PyTorch, and no code in them is executed.
    """
    if not output:
        raise InputError("OUT: expected a directory, got an empty string")
    if dtype is not None:
        check_choice("dtype", dtype, SAVED_DTYPES)
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

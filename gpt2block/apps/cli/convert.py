"""`gpt2block convert`: write any readable checkpoint as a Hugging Face directory or as GGUF."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from gpt2block.apps.cli import complete
from gpt2block.apps.cli.options import argument, flag, option
from gpt2block.checks import check_choice
from gpt2block.errors import InputError, printable
from gpt2block.files.checkpoints import Checkpoint, save_gguf, save_pretrained
from gpt2block.files.checkpoints.gguf_saving import TYPES
from gpt2block.files.checkpoints.hugging_face import WEIGHTS
from gpt2block.files.checkpoints.saving import SAVED_DTYPES
from gpt2block.files.writing import cleared


def convert(
    checkpoint: str = argument(
        "A pytorch_model.bin, a nanoGPT ckpt.pt, a .gguf, a directory, a .safetensors file, "
        "smollm2 or a hub id.",
        ...,
        metavar="CKPT",
    ),
    output: str = argument("The directory, or the .gguf, to write.", ..., metavar="OUT"),
    dtype: str | None = option(
        "float32, bfloat16 or float16; by default each tensor keeps its dtype, and quantized ones "
        "become float32.",
        complete=complete.one_of(*SAVED_DTYPES),
    ),
    type: str | None = option(
        f"Type of the matrices in a .gguf: {', '.join(TYPES)}.", complete=complete.one_of(*TYPES)
    ),
    overwrite: bool = flag("Write into OUT although it exists."),
) -> None:
    """Write a checkpoint as a Hugging Face directory, or, where OUT ends in .gguf, as GGUF.

    A directory has config.json and model.safetensors. PyTorch files are read without PyTorch, and
    no code in them is executed.
    """
    if not output:
        raise InputError("OUT: expected a directory or a .gguf, got an empty string")
    to_gguf = output.endswith(".gguf")
    if dtype is not None:
        check_choice("dtype", dtype, SAVED_DTYPES)
    if type is not None:
        check_choice("type", type, TYPES)
    elif to_gguf:
        raise InputError(f"type: expected one of {', '.join(TYPES)} for a .gguf, got none")
    if to_gguf and dtype is not None:
        raise InputError(f"dtype: expected none for a .gguf, got {dtype!r}: give --type only")
    if type is not None and not to_gguf:
        raise InputError(f"type: expected an OUT that ends in .gguf with it, got {output!r}")
    if not overwrite and _is_there(Path(os.path.expanduser(output))):
        kind = "file" if to_gguf else "directory"
        raise InputError(f"{output}: already exists: give another {kind} or --overwrite")
    source = Checkpoint.open(checkpoint)
    place = os.path.realpath(os.path.expanduser(output))
    if to_gguf and place == os.path.realpath(source.file):
        raise InputError(f"{output}: it is the checkpoint: give another file as OUT")
    if place == os.path.realpath(source.directory):
        raise InputError(f"{output}: the checkpoint is in this directory: give another one as OUT")
    if type is not None:
        written = _with_notes(save_gguf, output, source, type, overwrite=overwrite)
        size = written.stat().st_size
    else:
        written = _with_notes(save_pretrained, output, source, dtype, overwrite=overwrite)
        size = (written / WEIGHTS).stat().st_size
    stored = Checkpoint.open(written).stored.values()
    types = ", ".join(sorted({each for tensor in stored for each in tensor.types}))
    layers, width = source.config.n_layer, source.config.n_embd
    print(
        f"wrote {layers} layers of width {width} in {types} to "
        f"{printable(str(written))}: {size / 1e6:,.1f} MB"
    )


def _is_there(output: Path) -> bool:
    """Return whether OUT exists. An empty directory does not count.

    A `convert` that was killed leaves a directory with only its temporary folder.
    """
    if output.is_dir():
        with suppress(OSError), cleared(output, "saving"):
            return any(output.iterdir())
    return os.path.lexists(output)


def _with_notes(save: Callable[..., Path], *arguments: object, **options: object) -> Path:
    """Return save(*arguments, **options), and print its warnings to stderr."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        written = save(*arguments, **options)
    for each in caught:
        print(f"note: {printable(str(each.message))}", file=sys.stderr)
    return written

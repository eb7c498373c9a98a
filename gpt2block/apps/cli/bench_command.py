"""The command `gpt2block bench`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from gpt2block.apps.cli import complete
from gpt2block.apps.cli.codes import FAILED
from gpt2block.apps.cli.model import device_option
from gpt2block.apps.cli.options import flag, json_option, option
from gpt2block.errors import InputError

if TYPE_CHECKING:
    from gpt2block.apps.bench import Work


@dataclass(frozen=True)
class BenchOptions:
    device: str | None = device_option()
    only: str | None = option("Run only blocks whose name has this text, such as 8x1024.")
    decode: bool = flag("Time steps of decoding with a whole GPT-2 with random weights.")
    rows: str | None = option("With --decode: sequences decoded together, such as 1,8,64.")
    size: str | None = option("With --decode: gpt2 (the default), gpt2-medium, -large or -xl.")
    kv_dtype: str | None = option(
        "With --decode: float8_e5m2 or float8_e4m3fn for keys and values.", complete=complete.dtypes
    )
    dtype: str | None = option(
        "Run only bfloat16, float16 or float32. With --decode: dtype of the weights, by default "
        "bfloat16; also float8_e5m2 or float8_e4m3fn.",
        complete=complete.dtypes,
    )
    as_json: bool = json_option()


def bench(options: BenchOptions) -> None:
    """Time blocks of GPT-2 or steps of decoding on a GPU, and check the results.

    The rates of blocks are compared with the ceilings of this GPU. Steps of decoding are compared
    with the least time that reading weights, keys and values takes. The exit code is 1 if a result
    is wrong.
    """
    from gpt2block.apps.cli.bench import race  # noqa: PLC0415  (slow to import)

    if not race(_works(options), options.device, options.as_json):
        raise typer.Exit(FAILED)


def _works(options: BenchOptions) -> list[Work]:
    """Return the benchmarks that the options select. Raises InputError."""
    from gpt2block.apps.bench import block_works, decode_works  # noqa: PLC0415

    if options.decode:
        if options.only is not None:
            raise InputError("--only chooses blocks, --decode times a whole model: leave out one")
        return decode_works(options.dtype, options.rows, options.size, options.kv_dtype)
    of_models = {"--rows": options.rows, "--size": options.size, "--kv-dtype": options.kv_dtype}
    for name, value in of_models.items():
        if value is not None:
            raise InputError(f"{name} is an option of --decode: add --decode")
    return block_works(options.dtype, options.only)

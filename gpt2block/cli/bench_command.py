"""The command `gpt2block bench`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from gpt2block.cli import complete
from gpt2block.cli.codes import FAILED
from gpt2block.cli.model import (
    device_of,
    device_option,
    gpus_option,
)
from gpt2block.cli.options import json_option, option, path_option
from gpt2block.errors import InputError

if TYPE_CHECKING:
    from gpt2block.bench import Work


@dataclass(frozen=True)
class BenchOptions:
    device: str | None = device_option()
    decode: bool = option(
        "Time a whole GPT-2 with random weights, from ids to new ids.", False, "--decode"
    )
    llama: bool = option(
        "Time a whole Llama with random weights, also with fewer fusions.", False, "--llama"
    )
    what: str | None = option("block, gemm, attention or all: compare these with the ceilings.")
    rows: str | None = option(
        "With --decode or --llama: rows decoded together, such as 1,8,64; default 1 to 256, with "
        "--llama 1,4,16,64."
    )
    size: str | None = option(
        "With --decode: gpt2 (the default), gpt2-medium, -large or -xl. With --llama: 7b (the "
        "default), 1b, qwen3-0.6b, qwen3-4b, smollm2-135m, mistral-7b, 70b or small."
    )
    dtype: str | None = option(
        "Run only bfloat16, float16 or float32. With --decode: dtype of the weights, by default "
        "bfloat16; also float8_e5m2 or float8_e4m3fn. With --llama: also file, GGUF blocks as in "
        "Q4_K_M; by default 16 bits, then float8_e5m2, then file.",
        complete=complete.weight_dtypes,
    )
    kv_dtype: str | None = option(
        "With --decode or --llama: float8_e5m2 or float8_e4m3fn for keys and values.",
        complete=complete.dtypes,
    )
    only: str | None = option("Run only works whose name has this text, such as 8x1024 or M=128.")
    plot: Path | None = path_option(
        "Plot the roofline, or the rates of decoding, to this PNG file."
    )
    as_json: bool = json_option()
    gpus: int | None = gpus_option()


def bench(options: BenchOptions) -> None:
    """Time GPT-2's block, and compare it with the figures of LeetGPU's GPT-2 block challenge.

    With --what, --dtype, --only or --plot: compare blocks, matrix products and attention with the
    ceilings of this GPU. With --decode: steps of decoding, a prompt and many prompts, compared with
    the least time that reading weights, keys and values takes. With --llama: the same for a Llama,
    whose steps are also timed with fewer fusions. The exit code is then 1 if a result is wrong.
    With --gpus, these models are divided among several GPUs.
    """
    from gpt2block.cli.bench import compare_with_document, race  # noqa: PLC0415  (slow to import)

    device = device_of(options.device, options.gpus)
    several = device if device and "," in device else None
    _check_together(options, several)
    works = _works(options, several)
    if several:  # the first GPU measures the ceilings and computes the exact results
        device = several.partition(",")[0]
    if works is None:
        compare_with_document(device, options.as_json)
    elif not race(works, device, options.plot, options.as_json):
        raise typer.Exit(FAILED)


def _works(options: BenchOptions, several: str | None) -> list[Work] | None:
    """Return the benchmarks that the options select; None selects GPT-2's block alone.

    several: the device of models on several GPUs, else None.
    """
    from gpt2block.bench import chosen_works, model_works  # noqa: PLC0415

    if options.decode or options.llama:
        architecture = "llama" if options.llama else "gpt2"
        stored = options.dtype, options.rows, options.size, options.kv_dtype, several
        return model_works(architecture, *stored)
    chosen = options.what, options.dtype, options.only, options.plot
    if chosen == (None,) * len(chosen):
        return None
    return chosen_works(options.what or "all", options.dtype, options.only)


def _check_together(options: BenchOptions, several: str | None) -> None:
    """Raise InputError for options that exclude each other."""
    if options.decode and options.llama:
        raise InputError("--decode times GPT-2, --llama a Llama: leave out one")
    whole = "--llama" if options.llama else "--decode" if options.decode else ""
    of_kernels = _first_given({"--what": options.what, "--only": options.only})
    of_models = _first_given(
        {
            "--rows": options.rows,
            "--size": options.size,
            "--kv-dtype": options.kv_dtype,
        }
    )
    if whole and of_kernels:
        raise InputError(f"{of_kernels} chooses kernels, {whole} times whole models: leave out one")
    if of_models and not whole:
        raise InputError(f"{of_models} is an option of --decode and --llama: add one of them")
    if several and not whole:
        raise InputError(f"--gpus or --device {several}: expected --decode or --llama with it")
    if options.llama and options.plot is not None:
        raise InputError("--plot: expected --decode or kernels with it, got --llama")


def _first_given(values: dict[str, str | None]) -> str | None:
    return next((name for name, value in values.items() if value is not None), None)

"""The options of `gpt2block kernels`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gpt2block.apps.cli import complete
from gpt2block.apps.cli.options import argument, flag, json_option, option, path_option

OWN = "Your own kernel"
own_option = partial(option, rich_help_panel=OWN)


@dataclass(frozen=True)
class KernelsOptions:
    operation: str | None = argument(
        "An operation, whose variants are listed and run; without it, all operations are listed.",
        complete=complete.operations,
    )
    variant: str | None = option(
        "One variant; by default all variants.", complete=complete.variants
    )
    shape: str | None = option("Sizes that differ from the default ones, such as B=1,T=128.")
    dtype: str | None = option(
        "Dtype of the arrays; float8_e5m2 and float8_e4m3fn are for weights.",
        complete=complete.dtypes,
    )
    layout: str | None = option("Memory layout of the weights: KN or NK.")
    device: str | None = option(
        "cuda, or cpu: an emulator, which checks results at small sizes. By default the GPU if "
        "there is one.",
        complete=complete.devices,
    )
    source: str | None = option(
        "Print the source of a variant, given by name or by position, starting at 1.",
        complete=complete.variants,
    )
    counters: bool = flag(
        "Count accesses to memory, bank conflicts and other events of each variant, on the CPU at "
        "reduced sizes; with --mine of each line of your kernel and of the fastest variant."
    )
    as_json: bool = json_option()


@dataclass(frozen=True)
class OwnOptions:
    """Options for a user's own kernel, which the help shows in a separate panel."""

    mine: Path | None = path_option(
        "Check a kernel of your own; on a GPU, time it together with the variants.",
        metavar="FILE.cu",
        rich_help_panel=OWN,
    )
    template: bool = flag("Print a starter file: a slow but correct kernel.", rich_help_panel=OWN)
    solution: str | None = own_option(
        "Print the solution of an exercise in docs/learn: 2.1 for exercise 1 of chapter 2, 2 for "
        "the last one of chapter 2.",
        metavar="CHAPTER[.EXERCISE]",
        complete=complete.solutions,
    )
    kernel: str | None = own_option("The kernel, if the file has several.")
    grid: str | None = own_option(
        "Blocks, such as 'ceil(N / 8)' or 'T, NH'; by default as the file says in a line // "
        "launch: grid=... block=... shared=..."
    )
    block: str | None = own_option("Threads of a block, such as 256 or '16, 16'.")
    shared: str | None = own_option("Bytes of extern __shared__ memory, such as '4 * C'.")
    seed: int | None = own_option(
        "Seed of the random sizes at which the kernel is checked; by default a new one."
    )
    why: bool = flag(
        "After a race, a divergent barrier, an access out of bounds or another problem, print the "
        "steps of its threads.",
        rich_help_panel=OWN,
    )
    why_page: Path | None = path_option(
        "Write these steps to a page with the source, in which you can go forward and back.",
        metavar="PAGE.html",
        rich_help_panel=OWN,
    )
    args: str | None = own_option(
        "The argument of each parameter, such as x,out,N,C; by default matched by name."
    )

"""`gpt2block profile`: trace the kernels of a few forward passes, and time each operation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from gpt2block.apps.cli import complete, display
from gpt2block.apps.cli.model import (
    ModelOptions,
    device_option,
    load_model,
    model_option,
    revision_option,
)
from gpt2block.apps.cli.options import argument, json_option, option, path_option
from gpt2block.apps.profiling import summary
from gpt2block.apps.profiling.summary import PassTimes, TimedOperation
from gpt2block.apps.profiling.trace import trace
from gpt2block.block import Block, LlamaBlock
from gpt2block.checks import check_choice
from gpt2block.cuda.devices import resolve_devices
from gpt2block.cuda.formats import BY_DEFAULT, FormatOptions
from gpt2block.errors import InputError
from gpt2block.files.checkpoints import BUNDLED, Checkpoint
from gpt2block.files.parameters.gpt2 import BlockWeights, GPT2Weights
from gpt2block.files.parameters.llama import LlamaBlockWeights
from gpt2block.files.writing import check_file, write_file
from gpt2block.models.config import size
from gpt2block.models.config.llama import LlamaConfig

if TYPE_CHECKING:
    from gpt2block.apps.profiling.runs import Profile
    from gpt2block.model import Model

WHAT = ("generate", "score", "block")
FROM_CACHE = "% floor above 100: the bytes come from a cache, such as the L2, or stay in it"


@dataclass(frozen=True)
class ProfileOptions:
    model: str = model_option(BUNDLED)
    revision: str | None = revision_option()
    size: str | None = option(
        "Random weights of gpt2, gpt2-medium, gpt2-large or gpt2-xl.", complete=complete.sizes
    )
    formats: FormatOptions = BY_DEFAULT
    device: str | None = device_option()
    rows: int = option("Sequences that are computed together.", 1)
    tokens: int = option("Tokens of each sequence; with generate, of its prompt.", 64)
    steps: int = option("New tokens of generate; passes of score and block.", 3)


def profile(
    what: str = argument("generate, score or block.", "generate", complete=complete.one_of(*WHAT)),
    output: Path = path_option("The trace, JSON.", Path("trace.json"), "--output", "-o"),
    *,
    options: ProfileOptions,
    as_json: bool = json_option(),
) -> None:
    """Time every kernel of a forward pass: print a table, and write a trace for Perfetto.

    ui.perfetto.dev and chrome://tracing show the trace. generate: a prompt and the decoding of some
    tokens; score: likelihoods of whole sequences; block: one block. The tokens are random, as the
    times do not depend on them. On a CPU the steps run with NumPy.
    """
    from gpt2block.apps.profiling import runs  # noqa: PLC0415  (slow to import)

    check_choice("WHAT", what, WHAT)
    check_file(output)
    if options.size is not None and (options.model, options.revision) != (BUNDLED, None):
        raise InputError("--size uses random weights: leave out --model and --revision")
    if what == "block" and options.formats.kv_dtype is not None:
        raise InputError("--kv-dtype: a block has no kv_cache: use it with generate or score")
    sizes = options.rows, options.tokens, options.steps
    runs.check_sizes(*sizes)
    of: Model[Any] | Block | LlamaBlock
    with display.working():
        if what == "block":
            of, name, dtype = _block(options)
            passes = runs.of_block(of, *sizes)
        else:
            of, name, dtype = _model(options)
            run = runs.of_generate if what == "generate" else runs.of_score
            passes = run(of, *sizes)
    rate = runs.copy_gb_s(next(iter(resolve_devices(options.device)), None))
    found = runs.Profile(what, name, of.device, dtype, *sizes[:2], rate, passes)
    write_file(output, json.dumps(display.for_json(trace(found))).encode())
    if as_json:
        display.print_json(_facts(found, output))
    else:
        _print(found, output)


def _model(options: ProfileOptions) -> tuple[Model[Any], str, str]:
    """Load the model. Return the model, its name and its dtypes."""
    if options.size is None:
        chosen = options.model, options.revision, options.formats, options.device
        loaded, _ = load_model(ModelOptions(*chosen), None)
        return loaded, loaded.name, loaded.dtypes
    from gpt2block.model import GPT2  # noqa: PLC0415

    weights = GPT2Weights.random(0, size(options.size))
    formats = options.formats.resolved(in_blocks=False)
    model = GPT2(weights, options.device, formats.dtype, formats.allow_nonfinite, formats.kv_dtype)
    return model, f"random weights, the shape of {options.size}", model.dtypes


def _block(options: ProfileOptions) -> tuple[Block | LlamaBlock, str, str]:
    """Load the first block of the model. Return the block, its name and its dtype."""
    block: Block | LlamaBlock
    dtype = options.formats.resolved(in_blocks=False).dtype
    where: dict[str, Any] = {"device": options.device, "dtype": dtype}
    if options.size is not None:
        block = Block(BlockWeights.random(0, size(options.size)), **where)
        return block, f"random weights, the shape of {options.size}", block.dtype
    checkpoint = Checkpoint.open(options.model, options.revision)
    if isinstance(checkpoint.config, LlamaConfig):
        block = LlamaBlock(LlamaBlockWeights.from_pretrained(checkpoint), **where)
    else:
        block = Block(BlockWeights.from_pretrained(checkpoint), **where)
    return block, f"{checkpoint.name}, block 0", block.dtype


def _facts(profile: Profile, output: Path) -> dict[str, object]:
    """Return the object that --json prints."""
    kinds = summary.kinds(profile)
    return {
        **profile.facts,
        "trace": str(output),
        "passes": [_with_bytes(summary.pass_times(profile, kind)) for kind in kinds],
        "operations": [_with_bytes(row) for k in kinds for row in summary.operations(profile, k)],
    }


def _with_bytes(row: PassTimes | TimedOperation) -> dict[str, object]:
    """Return a row for JSON. `moved`: bytes of memory traffic (weights, activations, cache)."""
    return {**asdict(row), "moved": row.moved._asdict()}


def _print(profile: Profile, output: Path) -> None:
    out = display.console()
    out.print(f"device  {display.shown(profile.device)}")
    out.print(f"model   {display.shown(profile.model)}, {profile.dtype}")
    out.print(f"input   {profile.rows} x {profile.tokens} random tokens")
    out.print(f"floor   the time of a copy of as many bytes: {profile.copy_gb_s:,.1f} GB/s here")
    cached = False
    for kind in summary.kinds(profile):
        times = summary.pass_times(profile, kind)
        rows = summary.operations(profile, kind)
        _print_operations(out, rows, times)
        _print_times(out, times)
        cached |= any(row.of_floor is not None and row.of_floor > 1 for row in rows)
    out.print()
    if cached:
        out.print(FROM_CACHE)
    file, size = display.shown(str(output)), output.stat().st_size / 1e6
    out.print(f"{file}  {size:.1f} MB: open it in ui.perfetto.dev", soft_wrap=True)


def _print_operations(out: Console, rows: Sequence[TimedOperation], times: PassTimes) -> None:
    """Print a table of the operations in forward passes of one kind (`times.kind`)."""
    kind, count = times.kind, times.count
    title = f"{kind}, the mean of {count}" if count > 1 else kind
    figures = ("us alone", "us in pass", "share", "MB", "GB/s", "% floor")
    table = display.new_table(("step", "kernel"), ("n", *figures), title)
    for row in rows:
        least = f"< {row.count * summary.RESOLUTION_US:,.1f}"
        own = f"{row.own_us:,.1f}" if row.own_us else least
        table.add_row(
            row.step, row.kernel, f"{row.count:g}", own, f"{row.added_us:,.1f}",
            f"{row.share:.1%}", f"{1e-6 * row.moved.total:,.3f}",
            "" if row.gb_s is None else f"{row.gb_s:,.1f}",
            "" if row.of_floor is None else f"{100 * row.of_floor:.0f}",
        )  # fmt: skip
    out.print()
    display.print_table(out, table)


def _print_times(out: Console, times: PassTimes) -> None:
    """Print a forward pass's time as kernels' times plus gaps between kernels minus overlap."""
    moved = times.moved
    line = f"alone {times.own_us:,.1f} us + gaps {times.apart_us - times.own_us:,.1f} us"
    if times.apart_us != times.us:
        line += f" = one at a time {times.apart_us:,.1f} us"
        line += f" - overlap {times.apart_us - times.us:,.1f} us"
    out.print(f"{line} = a pass {times.us:,.1f} us")
    parts = ", ".join(f"{name} {1e-6 * n:,.3f}" for name, n in moved._asdict().items())
    out.print(
        f"{1e-6 * moved.total:,.3f} MB ({parts}): floor {times.floor_us:,.1f} us, "
        f"{times.floor_us / times.us:.0%} of the pass"
    )

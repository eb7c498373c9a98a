"""`gpt2block map score|generate|embed`: process many records, on Dask."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import typer
from rich.markup import escape
from rich.progress import MofNCompleteColumn

from gpt2block.apps.cli.codes import FAILED, INTERRUPTED
from gpt2block.apps.cli.display import progress_bar
from gpt2block.apps.cli.model import (
    NO_ADAPTERS,
    AdapterOptions,
    ModelOptions,
    TextOptions,
    note_on_cpu,
    stride_option,
)
from gpt2block.apps.cli.options import add_command, argument, flag, option
from gpt2block.errors import printable, require

if TYPE_CHECKING:
    from gpt2block.bulk.driver import Outcome

ERRORS = "errors"  # name of the folder for errors in the output folder
SECONDS_BETWEEN_LINES = 10  # interval of progress lines if stderr is not a terminal


@dataclass(frozen=True)
class FileOptions:
    inputs: list[str] = argument(
        ".jsonl, .ndjson, .parquet or .txt (one record per line), or folders.", ...
    )
    # The type is str, not Path, because Path("") is the working directory.
    output: str = option(
        "Folder of the results: new, empty, or with results of this job.", ..., metavar="FOLDER"
    )


@dataclass(frozen=True)
class JobOptions:
    workers: int | None = option(
        "Processes; by default one for each visible GPU (with --gpus N, for each N of them) or, "
        "without a GPU, one for each usable CPU core, limited by the memory for the models.",
        min=1,
    )
    scheduler: str | None = option(
        "A running Dask cluster, tcp://host:8786; by default a local one."
    )
    shard_size: int = option("Input lines per output file.", 1000, min=1)
    column: str = option("Field with the text, or the list of token ids.", "text", "--field")
    keep: list[str] = option(
        "Field to copy into the results; may be given several times. Records of a .txt file have "
        "one field, text.",
        (),
    )
    form: str = option("Format of the results: jsonl or parquet.", "jsonl", "--format")


@dataclass(frozen=True)
class BatchedJobOptions(JobOptions):
    batch_tokens: int = option("Most tokens computed together.", 16384, min=1)


_logprobs_option = partial(flag, "Add every token's log-probability.")


@dataclass(frozen=True)
class ScoreTask:
    stride: int | None = stride_option()
    logprobs: bool = _logprobs_option()


@dataclass(frozen=True)
class GenerateTask(TextOptions):
    seed: int = option("Seed from which the seed of each record is derived.", 0)
    samples: int = option("Continuations per record.", 1)
    overflow: str = option("error or truncate, as in generate.", "error")
    rows_at_once: int | None = option(
        "Continuations computed together; by default as many as fit in memory."
    )
    logprobs: bool = _logprobs_option()
    receipts: bool = flag("Add the receipt of every text, which verify checks.")


@dataclass(frozen=True)
class EmbedTask:
    pooling: str | None = option(
        "mean, last or first (cls) of the final hidden states; by default as the model's files say."
    )
    normalize: bool | None = option(
        "Whether vectors are scaled to length 1; by default as the model's files say.",
        None,
        "--normalize/--no-normalize",
    )
    overflow: str = option(
        "For records longer than the context: error, or truncate to the last tokens.", "error"
    )


def score(
    files: FileOptions, model: ModelOptions, task: ScoreTask, options: BatchedJobOptions
) -> None:
    """Compute the log-likelihood and perplexity of every record."""
    _map("score", files, model, task, options)


def generate(
    files: FileOptions,
    model: ModelOptions,
    adapters: AdapterOptions,
    task: GenerateTask,
    options: JobOptions,
) -> None:
    """Continue every record. The same seed gives the same texts with any number of workers."""
    _map("generate", files, model, task, options, adapters)


def embed(
    files: FileOptions, model: ModelOptions, task: EmbedTask, options: BatchedJobOptions
) -> None:
    """Compute an embedding vector of every record."""
    _map("embed", files, model, task, options)


app = typer.Typer(
    no_args_is_help=True,
    help="Score, continue or embed many records on all GPUs. After an interruption, the same "
    "command continues the job. Exit code: 0 when the input is done and at least one record has a "
    "result; 1 when no record has one, when a shard failed or when the job stopped; 2 for invalid "
    "options or input; 130 after Ctrl-C.",
)
add_command(app, score, "map score lines.txt --output scores --workers 2")
add_command(app, generate, "map generate prompts.jsonl --output texts --seed 7")
add_command(app, embed, "map embed texts.parquet --output vectors --format parquet")


@contextmanager
def _resumable() -> Iterator[None]:
    """After Ctrl-C, print how to continue the job, and exit."""
    try:
        yield
    except KeyboardInterrupt:
        print("interrupted: the same command continues from here", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None


@_resumable()
def _map(
    name: Any,
    files: FileOptions,
    model: ModelOptions,
    task: ScoreTask | GenerateTask | EmbedTask,
    options: JobOptions,
    adapters: AdapterOptions = NO_ADAPTERS,
) -> None:
    """Run a job, print its results and set the exit code."""
    require("map", "dask", "dask", "distributed")
    from gpt2block.bulk import driver  # noqa: PLC0415
    from gpt2block.bulk.job import Job, engine_of  # noqa: PLC0415

    fields = asdict(options) | vars(model)
    workers, scheduler = fields.pop("workers"), fields.pop("scheduler")
    del fields["gpus"], fields["threads"]  # `device` names these GPUs; workers inherit the threads
    fields["keep"] = tuple(options.keep)
    fields["tokenizer"] = None if model.tokenizer is None else str(model.tokenizer)
    fields["adapters"], own = tuple(adapters.folders.items()), asdict(task)
    fields["adapters_memory"] = adapters.adapters_memory
    own |= {} if adapters.only is None else {"adapter": adapters.only}
    job = Job(task=name, output=files.output, options=own, **fields)
    speculates = job.options.get("speculate") and scheduler is None
    if speculates and engine_of(job.device) == "cpu":
        note_on_cpu("--speculate")
    watcher = _Watcher()
    try:
        with watcher.bar:
            outcome = driver.run(job, files.inputs, watcher, workers, scheduler)
    except driver.JobError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(FAILED) from None
    for line in _summary(Path(files.output), outcome):
        print(printable(line))
    if outcome.errors and not outcome.records:
        line = f"none of {outcome.errors:,} records could be computed: {outcome.first_error}"
        print(f"error: {printable(line)}", file=sys.stderr)
        raise typer.Exit(FAILED)
    if outcome.failed:
        raise typer.Exit(FAILED)


def _summary(output: Path, outcome: Outcome) -> list[str]:
    errors = f", {outcome.errors:,} errors in {output / ERRORS}" if outcome.errors else ""
    blank = outcome.lines_done - outcome.records - outcome.errors
    skipped = f", {blank:,} blank lines skipped" if blank else ""
    lines = [f"{output}: {outcome.records:,} records{errors}{skipped}"]
    if outcome.done_now:
        records = outcome.done_now / outcome.seconds
        tokens = outcome.tokens_now / outcome.seconds
        lines.append(
            f"{outcome.done_now:,} records in {outcome.seconds:.1f} s: {records:,.1f} records/s, "
            f"{tokens:,.0f} tokens/s; ready after {outcome.start_up:.1f} s"
        )
    if outcome.failed:
        shards = ", ".join(map(str, sorted(outcome.failed)[:10]))
        lines.append(
            f"{len(outcome.failed):,} shards failed ({shards}): the same command tries them again"
        )
    return lines


class _Watcher:
    """Progress on stderr: a bar on a terminal, otherwise a line every ten seconds."""

    def __init__(self) -> None:
        self.bar = progress_bar("{task.description}", done=MofNCompleteColumn())
        self._task = self.bar.add_task("", visible=False)
        self._earlier: int | None = None  # number of input lines that earlier runs finished
        self._begun = self._printed = 0.0

    def say(self, line: str) -> None:
        self.bar.console.print(escape(printable(line)), highlight=False, soft_wrap=True)

    def show(self, outcome: Outcome, inside: int) -> None:
        now, done = monotonic(), outcome.lines_done + inside
        if self._earlier is None:
            self._earlier, self._begun, self._printed = done, now, now
        seconds = max(now - self._begun, 1e-9)
        rates = f"{(outcome.done_now + inside) / seconds:,.1f} records/s"
        if outcome.tokens_now:
            rates += f", {outcome.tokens_now / seconds:,.0f} tokens/s"
        total = outcome.lines
        self.bar.update(self._task, total=total, completed=done, description=rates, visible=True)
        if not self.bar.disable or now - self._printed < SECONDS_BETWEEN_LINES:
            return
        self._printed, computed = now, done - self._earlier
        left = f", {(total - done) * seconds / computed:,.0f} s left" if computed else ""
        self.say(f"{done:,} of {total:,} lines, {rates}{left}")

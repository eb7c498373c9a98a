"""`gpt2block map score|generate|embed`: process many records, on Dask."""

from __future__ import annotations

import sys
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from gpt2block.checkpoints import BUNDLED
from gpt2block.cli.codes import FAILED, INTERRUPTED
from gpt2block.cli.model import (
    Device,
    Dtype,
    KvDtype,
    MaxNewTokens,
    MinP,
    Model,
    OptionalInt,
    OptionalStr,
    RepetitionPenalty,
    Revision,
    Stop,
    Stride,
    Temperature,
    Tokenizer,
    TopK,
    TopP,
)
from gpt2block.errors import InputError, printable
from gpt2block.sampling import DEFAULT_TEMPERATURE

if TYPE_CHECKING:
    from gpt2block.bulk.driver import Outcome

ERRORS = "errors"  # folder in the output
SECONDS_BETWEEN_LINES = 10  # of progress, if stderr is no terminal

app = typer.Typer(
    no_args_is_help=True,
    help="Score, continue or embed many records on all GPUs. After an interruption, the same "
    "command continues the job. Exit code: 0 when the input is done and at least one record has a "
    "result; 1 when no record has one, when a shard failed or when the job stopped; 2 for invalid "
    "options or input; 130 after Ctrl-C.",
)

Input = Annotated[
    list[str],
    typer.Argument(help=".jsonl, .ndjson, .parquet or .txt (one record per line), or folders."),
]
Output = Annotated[
    str,  # not Path, which turns an empty string into the working directory
    typer.Option(
        metavar="FOLDER", help="Folder of the results: new, empty, or one of the same job."
    ),
]
Workers = Annotated[
    OptionalInt,
    typer.Option(
        min=1,
        help="Processes; by default one for each visible GPU or, without a GPU, one for each "
        "usable CPU core, limited by the memory for the models.",
    ),
]
SchedulerAt = Annotated[
    OptionalStr,
    typer.Option(help="A running Dask cluster, tcp://host:8786; by default a local one."),
]
ShardSize = Annotated[int, typer.Option(min=1, help="Input lines per output file.")]
BatchTokens = Annotated[int, typer.Option(min=1, help="Most tokens computed together.")]
Column = Annotated[
    str, typer.Option("--field", help="Field with the text, or the list of token ids.")
]
Keep = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option(
        help="Field to copy into the results; may be given several times. Records of a .txt file "
        "have one field, text."
    ),
]
Format = Annotated[str, typer.Option("--format", help="Format of the results: jsonl or parquet.")]
LogProbs = Annotated[bool, typer.Option("--logprobs", help="Add every token's log-probability.")]


def register(to: typer.Typer) -> None:
    """Add the commands to the application."""
    to.add_typer(app, name="map")


@app.command(epilog="Example: gpt2block map score lines.txt --output scores --workers 2")
def score(
    inputs: Input,
    output: Output,
    model: Model = BUNDLED,
    revision: Revision = None,
    dtype: Dtype = "float32",
    kv_dtype: KvDtype = None,
    device: Device = None,
    tokenizer: Tokenizer = None,
    stride: Stride = None,
    logprobs: LogProbs = False,
    workers: Workers = None,
    scheduler: SchedulerAt = None,
    shard_size: ShardSize = 1000,
    batch_tokens: BatchTokens = 16384,
    column: Column = "text",
    keep: Keep = None,
    form: Format = "jsonl",
) -> None:
    """Compute the log-likelihood and perplexity of every record."""
    _map("score", locals(), "stride", "logprobs")


@app.command(epilog="Example: gpt2block map generate prompts.jsonl --output texts --seed 7")
def generate(
    inputs: Input,
    output: Output,
    model: Model = BUNDLED,
    revision: Revision = None,
    dtype: Dtype = "float32",
    kv_dtype: KvDtype = None,
    device: Device = None,
    tokenizer: Tokenizer = None,
    max_new_tokens: MaxNewTokens = 200,
    temperature: Temperature = DEFAULT_TEMPERATURE,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    seed: Annotated[int, typer.Option(help="Base of each record's own seed.")] = 0,
    stop: Stop = None,
    samples: Annotated[int, typer.Option(help="Continuations per record.")] = 1,
    overflow: Annotated[str, typer.Option(help="error or truncate, as in generate.")] = "error",
    rows_at_once: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Continuations computed together; by default what memory allows."),
    ] = None,
    logprobs: LogProbs = False,
    workers: Workers = None,
    scheduler: SchedulerAt = None,
    shard_size: ShardSize = 1000,
    column: Column = "text",
    keep: Keep = None,
    form: Format = "jsonl",
) -> None:
    """Continue every record. The same seed gives the same texts with any number of workers."""
    stop = stop or []
    _map(
        "generate", locals(), "max_new_tokens", "temperature", "top_k", "top_p", "min_p",
        "repetition_penalty", "seed", "stop", "samples", "overflow", "rows_at_once", "logprobs",
    )  # fmt: skip


@app.command(epilog="Example: gpt2block map embed texts.parquet --output vectors --format parquet")
def embed(
    inputs: Input,
    output: Output,
    model: Model = BUNDLED,
    revision: Revision = None,
    dtype: Dtype = "float32",
    kv_dtype: KvDtype = None,
    device: Device = None,
    tokenizer: Tokenizer = None,
    pooling: Annotated[str, typer.Option(help="mean or last of the final hidden states.")] = "mean",
    overflow: Annotated[
        str,
        typer.Option(
            help="For records longer than the context: error, or truncate to the last tokens."
        ),
    ] = "error",
    workers: Workers = None,
    scheduler: SchedulerAt = None,
    shard_size: ShardSize = 1000,
    batch_tokens: BatchTokens = 16384,
    column: Column = "text",
    keep: Keep = None,
    form: Format = "jsonl",
) -> None:
    """Compute an embedding vector of every record."""
    _map("embed", locals(), "pooling", "overflow")


def _map(task: Any, arguments: dict[str, Any], *names: str) -> None:
    """Run the job of a command with these arguments; `names`: those of the task itself."""
    options = {name: arguments[name] for name in names}
    try:
        code = _run(task, SimpleNamespace(**arguments), options)
    except KeyboardInterrupt:
        print("interrupted: the same command continues from here", file=sys.stderr)
        code = INTERRUPTED
    if code:
        raise typer.Exit(code)


def _run(task: Any, common: SimpleNamespace, options: dict[str, Any]) -> int:
    """Run the job, print its results and return the exit code."""
    try:
        from gpt2block.bulk import driver  # noqa: PLC0415
    except ImportError as error:
        raise InputError(f"map needs Dask: pip install dask distributed bokeh ({error})") from error
    from gpt2block.bulk.job import Job  # noqa: PLC0415
    from gpt2block.run.model import check_dtype, kv_cache_dtype  # noqa: PLC0415

    check_dtype(common.dtype)  # before a worker is started
    kv_cache_dtype(common.dtype, common.kv_dtype)
    job = Job(
        task=task,
        output=common.output,
        model=common.model,
        revision=common.revision,
        device=common.device,
        dtype=common.dtype,
        kv_dtype=common.kv_dtype,
        tokenizer=None if common.tokenizer is None else str(common.tokenizer),
        options=options,
        column=common.column,
        keep=tuple(common.keep or ()),
        form=common.form,
        shard_size=common.shard_size,
        batch_tokens=getattr(common, "batch_tokens", Job.batch_tokens),
    )
    watcher = _Watcher()
    try:
        with watcher.bar:
            outcome = driver.run(job, common.inputs, watcher, common.workers, common.scheduler)
    except driver.JobError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    output = Path(common.output)
    for line in _summary(output, outcome):
        print(printable(line))
    if outcome.errors and not outcome.records:
        line = f"none of {outcome.errors:,} records could be computed: {outcome.first_error}"
        print(f"error: {printable(line)}", file=sys.stderr)
        return FAILED
    return FAILED if outcome.failed else 0


def _summary(output: Path, outcome: Outcome) -> list[str]:
    errors = f", {outcome.errors:,} errors in {output / ERRORS}" if outcome.errors else ""
    lines = [f"{output}: {outcome.records:,} records{errors}"]
    if outcome.done_now:
        records, tokens = (
            count / outcome.seconds for count in (outcome.done_now, outcome.tokens_now)
        )
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
        console = Console(stderr=True, highlight=False)
        self._terminal = sys.stderr.isatty()
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not self._terminal,
        )
        self._console = console
        self._lines = self._done = self._now = self._records = self._tokens = 0
        self._begun = self._printed = monotonic()
        self._task: Any = None

    def say(self, line: str) -> None:
        self._console.print(escape(printable(line)), soft_wrap=True)

    def begin(self, lines: int, finished: int) -> None:
        self._lines, self._done = lines, finished
        self._begun = self._printed = monotonic()
        if finished:
            self.say(f"{finished:,} of {lines:,} lines are done already")
        self._task = self.bar.add_task("", total=lines, completed=finished)

    def advance(self, lines: int, records: int, tokens: int) -> None:
        self._done += lines
        self._now += lines
        self._records += records
        self._tokens += tokens
        self._show(0)

    def wait(self, records: int) -> None:
        self._show(records)

    def _show(self, inside: int) -> None:
        """inside: records of unfinished shards that are computed."""
        done, rates = self._done + inside, self._rates(inside)
        self.bar.update(self._task, completed=done, description=rates)
        if self._terminal or monotonic() - self._printed < SECONDS_BETWEEN_LINES:
            return
        self._printed = monotonic()
        now, seconds = self._now + inside, self._printed - self._begun
        ends = f", {(self._lines - done) * seconds / now:,.0f} s left" if now else ""
        self.say(f"{done:,} of {self._lines:,} lines, {rates}{ends}")

    def _rates(self, inside: int) -> str:
        seconds = max(monotonic() - self._begun, 1e-9)
        tokens = f", {self._tokens / seconds:,.0f} tokens/s" if self._tokens else ""
        return f"{(self._records + inside) / seconds:,.1f} records/s{tokens}"

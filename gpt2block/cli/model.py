"""The commands about a whole model: `gpt2block generate`, `score` and `info`.

What is slow to import is imported where it is used: the first token should come soon.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite, prod
from pathlib import Path
from stat import S_ISREG
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Optional

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from gpt2block.checkpoints import ON_BOARD, Checkpoint
from gpt2block.cli import INTERRUPTED
from gpt2block.errors import CheckpointError, InputError, printable
from gpt2block.text.sampling import DEFAULT_TEMPERATURE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gpt2block.model import GPT2
    from gpt2block.text.encoding import Encoding
    from gpt2block.text.generation import Row, Run
    from gpt2block.text.scoring import Score

DEFAULT_PROMPT = "JULIET:\nO Romeo,"  # for the model on board, when nobody says what to continue
MOST_TEXT, MOST_PROMPT = 2**28, 2**24  # bytes that are read: 256 and 16 MiB
_LONGEST_LINE = 4096  # characters of a name or path in a table
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e5m2": 1, "float8_e4m3fn": 1}

# Typer reads these annotations at run time, on Python 3.10 too: hence Optional.
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Device = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(help="cuda, cuda:N or cpu; the best there is by default."),
]
Model = Annotated[
    str,
    typer.Option(
        help="gpt2, gpt2-medium, gpt2-large or gpt2-xl, another hub id, a Hugging Face directory "
        "or .safetensors file, an llm.c .bin; the small model in the package by default."
    ),
]
Revision = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(help="For a hub id: a branch, tag or commit; its main branch by default."),
]
Dtype = Annotated[
    str,
    typer.Option(
        help="How weights are stored: float32, bfloat16, float16, float8_e5m2 or float8_e4m3fn."
    ),
]


def path_of(text: str) -> Path:
    """The parser of options that take a path: `~` and `~user` become home directories."""
    if not text:  # which would be the working directory
        raise typer.BadParameter("expected a path, got an empty string")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise typer.BadParameter(f"there is no user {Path(text).parts[0]!r}") from None


Tokenizer = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(
        help="A tokenizer.json, or a folder with vocab.json and merges.txt.",
        parser=path_of,
        metavar="PATH",
    ),
]
Special = Annotated[
    bool,
    typer.Option("--special", help="Names of special tokens, as <|endoftext|>, mean the tokens."),
]


def register(app: typer.Typer) -> None:
    """Add the three commands."""
    app.command(epilog="Example: gpt2block generate 'To be, or not to be' --seed 7")(generate)
    app.command(epilog="Example: gpt2block score hamlet.txt --stride 64")(score)
    app.command(epilog="Example: gpt2block info shakespeare --json")(info)


def generate(
    prompt: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(help="What to continue; - or nothing reads stdin, less its last newline."),
    ] = None,
    ids: Annotated[
        bool,
        typer.Option(
            "--ids",
            help="The prompt is token ids, as in 1,2,3 or '1 2 3', and ids are written; the model "
            "needs no tokenizer.",
        ),
    ] = False,
    special: Special = False,
    model: Model = ON_BOARD,
    revision: Revision = None,
    dtype: Dtype = "float32",
    device: Device = None,
    tokenizer: Tokenizer = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens at most.")] = 200,
    temperature: Annotated[
        float, typer.Option(help="0 takes the likeliest token; 1 draws as the model says.")
    ] = DEFAULT_TEMPERATURE,
    top_k: Annotated[int, typer.Option(help="Draw from the k likeliest; 0: from all.")] = 0,
    top_p: Annotated[
        float, typer.Option(help="From the fewest that have this probability together; 1: off.")
    ] = 1.0,
    min_p: Annotated[
        float, typer.Option(help="From those this many times as likely as the first; 0: off.")
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1, tokens that were there become less likely.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
    stop: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="End before this text; may be given several times."),
    ] = None,
    stop_id: Annotated[
        Optional[list[int]],  # noqa: UP045
        typer.Option(help="End at this token; several times; <|endoftext|> where none is given."),
    ] = None,
    samples: Annotated[int, typer.Option(help="How many continuations.")] = 1,
    overflow: Annotated[
        str,
        typer.Option(
            help="error: the text ends where the context is full, and a longer prompt is an "
            "error; truncate: the oldest tokens are dropped."
        ),
    ] = "error",
    logprobs: Annotated[
        bool, typer.Option("--logprobs", help="And every token with its log-probability.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Continue a text, token by token as it is written.

    The prompt and its continuation go to stdout, how fast it went to stderr. Ctrl-C ends it.
    """
    from gpt2block.text.generation import Run  # noqa: PLC0415
    from gpt2block.text.tokenizer import token_ids  # noqa: PLC0415

    begun = perf_counter()
    if ids and special:
        raise InputError("--special goes with a text, not with --ids")
    text = _prompt(prompt, "" if ids or model != ON_BOARD else DEFAULT_PROMPT)
    start: Any = _read_ids(text) if ids else text
    instead = None if ids else "--ids takes token ids instead of text"
    loaded, encoding = load_model(model, dtype, device, tokenizer, instead, revision)
    if special:
        start = token_ids(encoding, text, loaded.config.vocab_size, "prompt", special=True)
    run = Run(
        loaded.engine,
        encoding,
        start,
        max_new_tokens=max_new_tokens,
        stop=stop or (),
        stop_ids=stop_id or None,
        samples=samples,
        overflow=overflow,  # type: ignore[arg-type]  # Run checks it
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    clock = Clock(begun, min(samples, run.rows_at_once))
    prompt = " ".join(map(str, start.tolist())) if ids else text
    writer = None if as_json else _Writer(run.rows, prompt, ids)
    interrupted = _follow(run, clock, writer)
    if writer is None:
        given = start.tolist() if ids else text
        print(json.dumps(_report(loaded, given, encoding is not None, seed, run, clock)))
    else:
        writer.rest(logprobs)
        line = _summary(loaded, seed, run, clock)
        Console(stderr=True, highlight=False).print(shown(line), style="dim", soft_wrap=True)
    if interrupted:
        raise typer.Exit(INTERRUPTED)


@dataclass
class Clock:
    """When the command began, when its first and last tokens came, and how many."""

    begun: float
    at_first: int  # tokens of the first step, one a row
    first: float | None = None
    last: float = 0.0
    tokens: int = 0

    def tick(self) -> None:
        """A token has come."""
        self.last = perf_counter()
        self.first = self.first or self.last
        self.tokens += 1

    @property
    def to_first(self) -> float | None:
        """Seconds to the first token, the loading of the model included."""
        return None if self.first is None else self.first - self.begun

    @property
    def rate(self) -> float | None:
        """Tokens a second after the first step."""
        if self.first is None or self.tokens <= self.at_first:
            return None
        return (self.tokens - self.at_first) / (self.last - self.first)


class _Writer:
    """Rows to stdout: the first one as it comes, each other one when those before it are done.

    ids: write the tokens' ids instead of their text.
    """

    def __init__(self, rows: Sequence[Row], prompt: str, ids: bool) -> None:
        self._rows, self._prompt, self._ids = rows, prompt, ids
        self._taken = 0  # ids of the row that is shown
        self._terminal = Console(highlight=False) if sys.stdout.isatty() else None
        self._showing = -1
        self._tail = "\n\n"  # what was written last
        self._begin()

    def show(self, row: Row) -> None:
        """A row has a new token."""
        if row is self._rows[self._showing]:
            self._say(self._take(row))
            while row.finish_reason and self._showing + 1 < len(self._rows):
                row = self._begin()

    def rest(self, logprobs: bool) -> None:
        """What has not been shown, after the last token."""
        self._say(self._take(self._rows[self._showing]))
        while self._showing + 1 < len(self._rows):
            self._begin()
        self._end_line("\n")
        for number, row in enumerate(self._rows if logprobs else ()):
            self._end_line("\n\n")
            self._say(self._heading(number))
            pieces = row.tokens if self._ids else row.token_texts()
            for piece, logprob in zip(pieces, row.logprobs, strict=True):
                self._say(f"{logprob:9.4f}  {piece!r}\n")

    def _begin(self) -> Row:
        """The next row's heading, prompt and text so far."""
        self._end_line("\n\n")
        self._showing += 1
        row = self._rows[self._showing]
        self._say(self._heading(self._showing))
        if self._terminal:
            self._terminal.print(Text(self._prompt, style="bold"), end="", soft_wrap=True)
            self._tail = self._prompt[-2:]
        else:
            self._say(self._prompt)
        self._taken = 0
        self._say(self._take(row))
        return row

    def _take(self, row: Row) -> str:
        """What has come since the last call, of the row that is shown."""
        if not self._ids:
            return row.take()
        new = row.tokens[self._taken :]
        self._taken += len(new)
        return "".join(f" {token}" for token in new)

    def _heading(self, number: int) -> str:
        several = len(self._rows) > 1
        return f"--- sample {number + 1} of {len(self._rows)}\n" if several else ""

    def _end_line(self, end: str) -> None:
        """Newlines, as far as they are not there."""
        there = len(self._tail) - len(self._tail.rstrip("\n"))
        self._say(end[there:])

    def _say(self, text: str) -> None:
        if text:
            sys.stdout.write(text)
            sys.stdout.flush()
            self._tail = (self._tail + text)[-2:]


def _follow(run: Run, clock: Clock, writer: _Writer | None) -> bool:
    """Let the rows be written; True when Ctrl-C ended it, after which the rows say what they have.

    A second Ctrl-C is an ordinary one.
    """
    try:
        for row in run:
            clock.tick()
            if writer:
                writer.show(row)
    except KeyboardInterrupt:
        for row in run.rows:
            row.close()
        return True
    return False


def _summary(loaded: GPT2, seed: int, run: Run, clock: Clock) -> str:
    """What was computed where, and how fast."""
    rate = f", {clock.rate:,.1f} tokens/s" if clock.rate else ""
    first = f", first after {clock.to_first:.2f} s" if clock.to_first else ""
    ends = ", ".join(dict.fromkeys(row.finish_reason or "interrupted" for row in run.rows))
    if any(row.finish_reason == "context" for row in run.rows):
        ends += f" (its {loaded.config.n_ctx} tokens are full: --overflow truncate goes on)"
    return (
        f"{loaded.name}, {loaded.dtype}, {loaded.device}: {clock.tokens} tokens{rate}{first}; "
        f"seed {seed}; ended: {ends}"
    )


def _report(
    loaded: GPT2, prompt: str | list[int], has_text: bool, seed: int, run: Run, clock: Clock
) -> dict[str, Any]:
    """The same for programs.

    finish_reason is null where Ctrl-C came first, text where the model has no tokenizer.
    """
    return {
        "model": loaded.name,
        "device": loaded.device,
        "dtype": loaded.dtype,
        "prompt": prompt,
        "seed": seed,
        "samples": [
            {
                "text": row.text if has_text else None,
                "tokens": row.tokens,
                "logprobs": row.logprobs,
                "finish_reason": row.finish_reason,
            }
            for row in run.rows
        ],
        "seconds_to_first_token": clock.to_first,
        "tokens_per_second": clock.rate,
    }


def _prompt(given: str | None, default: str) -> str:
    """The argument; else stdin, unless it is a terminal or empty; else the default."""
    if given not in (None, "-"):
        return given or ""
    if given == "-" or not sys.stdin.isatty():
        text = _read_text("-", MOST_PROMPT).removesuffix("\n").removesuffix("\r")
        if text or given == "-":
            return text
    return default


def _read_ids(text: str) -> NDArray[np.int64]:
    """Ids in decimal digits, between commas and white space."""
    words = re.findall(r"[^\s,]+", text)
    wrong = next((word for word in words if not re.fullmatch("[0-9]{1,18}", word)), None)
    if wrong is not None:
        raise InputError(f"--ids: expected token ids such as 1,2,3, got {wrong!r}")
    return np.array([int(word) for word in words], np.int64)


def score(
    file: Annotated[
        str, typer.Argument(help="A text of at most 256 MiB, a token file, or - for stdin.")
    ],
    model: Model = ON_BOARD,
    revision: Revision = None,
    dtype: Dtype = "float32",
    device: Device = None,
    tokenizer: Tokenizer = None,
    stride: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Tokens between windows; half of the context by default."),
    ] = None,
    tokens: Annotated[
        Optional[bool],  # noqa: UP045
        typer.Option(
            "--tokens/--text",
            help="What the file holds; by default .npy and .bin hold tokens (uint16, as from "
            "llm.c and nanoGPT), all else text.",
        ),
    ] = None,
    special: Special = False,
    bos: Annotated[
        bool,
        typer.Option("--bos", help="Put <|endoftext|> in front, so that the first token counts."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Measure how well a model predicts a text: log-likelihood and perplexity.

    Windows of the model's whole context slide over the text; each token is predicted once.
    """
    from gpt2block.text import scoring  # noqa: PLC0415
    from gpt2block.text.tokenizer import token_ids  # noqa: PLC0415

    begun = perf_counter()
    are_tokens = Path(file).suffix in (".npy", ".bin") if tokens is None else tokens
    if are_tokens and special:
        raise InputError("--special goes with a text, not with a token file")
    text: Any = (
        scoring.load_tokens(_regular_file(file)) if are_tokens else _read_text(file, MOST_TEXT)
    )
    instead = None if are_tokens else "--tokens reads token ids instead of text"
    loaded, encoding = load_model(model, dtype, device, tokenizer, instead, revision)
    if special or (bos and not are_tokens):
        text = token_ids(encoding, text, loaded.config.vocab_size, "text", special=special)
    if bos:
        text = _after_end_of_text(encoding, text)
    with _bar("scoring") as bar:
        task = bar.add_task("scoring", total=None)
        found = scoring.score(
            loaded.engine,
            encoding,
            text,
            stride=stride,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    seconds = perf_counter() - begun
    if as_json:
        print(json.dumps(_score_json(file, loaded, found, seconds)))
    else:
        _print_score(file, loaded, found, seconds)


def _after_end_of_text(encoding: Encoding | None, ids: Any) -> Any:
    """The ids with <|endoftext|> in front; InputError where the tokenizer does not have it."""
    from gpt2block.text.tokenizer import end_of_text  # noqa: PLC0415

    end = end_of_text(encoding)
    if end is None:
        raise InputError("--bos: this model has no tokenizer with <|endoftext|>")
    return np.concatenate([np.array([end], np.int32), ids])


def _score_json(file: str, loaded: GPT2, found: Score, seconds: float) -> dict[str, Any]:
    numbers = {
        "log_likelihood": found.log_likelihood,
        "nats_per_token": found.nats_per_token,
        "perplexity": found.perplexity,
        "bits_per_byte": found.bits_per_byte,
    }
    finite = {name: x if x is None or isfinite(x) else None for name, x in numbers.items()}
    return {
        "file": file,
        "model": loaded.name,
        "device": loaded.device,
        "dtype": loaded.dtype,
        **finite,
        "tokens": found.tokens,
        "bytes": found.bytes,
        "n_ctx": found.n_ctx,
        "stride": found.stride,
        "seconds": seconds,
    }


def _print_score(file: str, loaded: GPT2, found: Score, seconds: float) -> None:
    size = "" if found.bytes is None else f", {found.bytes:,} bytes"
    rows = {
        "text": f"{file}: {found.tokens:,} tokens predicted{size}",
        "model": f"{loaded.name}, {loaded.dtype}, {loaded.device}",
        "windows": f"{found.n_ctx} tokens, stride {found.stride}: each token predicted from at "
        f"least {found.n_ctx - found.stride} before it, but near the start",
        "log-likelihood": f"{found.log_likelihood:,.2f} nats",
        "nats per token": f"{found.nats_per_token:.4f}",
        "perplexity": f"{found.perplexity:,.4f}",
    }
    if found.bits_per_byte is not None:
        rows["bits per byte"] = f"{found.bits_per_byte:.4f}"
    rows["time"] = f"{seconds:.1f} s, {found.tokens / seconds:,.0f} tokens/s"
    _print_facts(rows)


def info(
    model: Annotated[str, typer.Argument(help="As in generate --model.")] = ON_BOARD,
    revision: Revision = None,
    as_json: Json = False,
) -> None:
    """Show a model's sizes, memory and tensors; only the headers of its files are read."""
    from gpt2block.run.model import kv_cache_dtype  # noqa: PLC0415

    checkpoint = Checkpoint.open(model, revision)
    c = checkpoint.config
    per_token = 2 * c.n_layer * c.n_embd
    memory = {
        dtype: {
            "weights": memory_of(checkpoint, dtype),
            "kv_cache_dtype": kv_cache_dtype(dtype),
            "kv_cache_per_row": per_token * c.n_ctx * _BYTES[kv_cache_dtype(dtype)],
        }
        for dtype in _BYTES
    }
    facts = {
        "name": checkpoint.name,
        "file": str(checkpoint.file),
        "config": vars(c),
        "parameters": sum(prod(tensor.shape) for tensor in checkpoint.stored.values()),
        "dtypes": sorted({tensor.dtype for tensor in checkpoint.stored.values()}),
        "nbytes": checkpoint.nbytes,
        "memory": memory,
        "tensors": [
            {
                "name": name,
                "in_file": tensor.label,
                "shape": tensor.shape,
                "dtype": tensor.dtype,
                "layout": tensor.layout,
            }
            for name, tensor in checkpoint.stored.items()
        ],
    }
    if as_json:
        print(json.dumps(facts))
    else:
        _print_info(checkpoint, facts)


def memory_of(checkpoint: Checkpoint, dtype: str) -> int:
    """Bytes of the weights in use: matrices in `dtype`, E4M3 with scales, all else in float32."""
    total = 0
    for tensor in checkpoint.stored.values():
        size = prod(tensor.shape)
        total += size * (4 if tensor.layout is None else _BYTES[dtype])
        if tensor.layout is not None and dtype == "float8_e4m3fn":
            total += 4 * tensor.shape[tensor.layout.index("N")]
    return total


def _print_info(checkpoint: Checkpoint, facts: dict[str, Any]) -> None:
    c = checkpoint.config
    tied = "tied to the embedding" if c.tie_word_embeddings else "a matrix of its own"
    _print_facts(
        {
            "model": checkpoint.name,
            "file": str(checkpoint.file),
            "sizes": f"{c.n_layer} blocks, width {c.n_embd}, {c.n_head} heads of {c.head_size}, "
            f"context {c.n_ctx}, vocabulary {c.vocab_size}, lm_head {tied}",
            "parameters": f"{facts['parameters']:,}",
            "stored": f"{', '.join(facts['dtypes'])}, {_megabytes(facts['nbytes'])}",
        }
    )
    out = _console()
    table = _table("on a GPU as", "weights", f"kv_cache, a row of {c.n_ctx}")
    for dtype, sizes in facts["memory"].items():
        cache = f"{_megabytes(sizes['kv_cache_per_row'])} {sizes['kv_cache_dtype']}"
        table.add_row(dtype, _megabytes(sizes["weights"]), cache)
    out.print()
    out.print(table)
    out.print("On the CPU every dtype takes the memory of float32.")
    table = _table("tensor", "shape", "stored as", "in the file")
    for tensor in _without_repetition(facts["tensors"], c.n_layer):
        shape = "x".join(map(str, tensor["shape"]))
        table.add_row(tensor["name"], shape, tensor["dtype"], shown(tensor["in_file"]))
    out.print()
    out.print(table)


def _without_repetition(tensors: list[dict[str, Any]], n_layer: int) -> Iterator[dict[str, Any]]:
    """The tensors; blocks that are all alike as one, h.0 … h.11."""
    kinds: dict[str, set[tuple[Any, ...]]] = {}
    for tensor in tensors:
        kind = tensor["name"].rpartition(".")[2]
        kinds.setdefault(kind, set()).add((tuple(tensor["shape"]), tensor["dtype"]))
    alike = n_layer > 1 and all(len(found) == 1 for found in kinds.values())
    for tensor in tensors:
        block, _, kind = tensor["name"].rpartition(".")
        if not (alike and block):
            yield tensor
        elif block == "h.0":
            yield {**tensor, "name": f"h.0 … h.{n_layer - 1}: {kind}"}


def load_model(
    name: str,
    dtype: str,
    device: str | None,
    tokenizer: Path | None,
    instead: str | None,
    revision: str | None = None,
) -> tuple[GPT2, Encoding | None]:
    """The model, with a bar on stderr while its tensors are read; and its tokenizer, read first.

    tokenizer: one named by hand. instead: how to do without one, for the error when there is none;
    None: the caller does without, and gets None.
    """
    from gpt2block.model import GPT2  # noqa: PLC0415

    checkpoint = Checkpoint.open(name, revision)
    try:
        encoding = read_tokenizer(checkpoint, tokenizer)
    except CheckpointError as error:
        if tokenizer is not None:
            raise
        if instead:
            raise CheckpointError(f"{error}; {instead}") from error
        encoding = None
    total = len(checkpoint.stored)

    def progress(tensors: Iterable[Any]) -> Iterable[Any]:
        with _bar("loading", hidden=name == ON_BOARD) as bar:  # which takes no time
            yield from bar.track(tensors, total)

    loaded = GPT2.from_pretrained(checkpoint, device=device, dtype=dtype, progress=progress)
    return loaded, encoding


def read_tokenizer(checkpoint: Checkpoint, path: Path | None) -> Encoding:
    """The tokenizer named by hand, or the checkpoint's. Raises CheckpointError."""
    from gpt2block.text import tokenizer  # noqa: PLC0415

    if path is None:
        return tokenizer.load(checkpoint.tokenizer_directory(), checkpoint.config.vocab_size)
    return tokenizer.from_path(path, checkpoint.config.vocab_size)


def _read_text(file: str, most: int) -> str:
    """Of a regular file, or of stdin for -; InputError when there are more bytes than `most`."""
    if file == "-":
        return _decoded(sys.stdin.buffer, "stdin", most)  # tokens are mapped: they need a file
    with _regular_file(file).open("rb") as opened:
        return _decoded(opened, file, most, or_tokens=True)


def _regular_file(file: str) -> Path:
    """The path of one that can be opened at once and has an end: no pipe, no device."""
    path = path_of(file)
    try:
        regular = S_ISREG(path.stat().st_mode)
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}") from error
    if not regular:
        raise InputError(
            f"{file}: expected a regular file; to read from a pipe or a device, redirect it to "
            "standard input and give -"
        )
    return path


def _decoded(source: BinaryIO, name: str, most: int, or_tokens: bool = False) -> str:
    try:
        data = source.read(most + 1)
    except OSError as error:
        raise InputError(f"{name}: cannot be read: {error.strerror or error}") from error
    if len(data) > most:
        raise InputError(f"{name}: expected at most {most // 2**20} MiB of text, got more")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        hint = ": for a token file give --tokens" if or_tokens else ""
        raise InputError(
            f"{name}: expected text in UTF-8, byte {error.start} is not{hint}"
        ) from error


def _bar(what: str, hidden: bool = False) -> Progress:
    """A progress bar on stderr, gone when the work is done; nothing where nobody looks."""
    return Progress(
        TextColumn(what),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=hidden or not sys.stderr.isatty(),
    )


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 120, highlight=False)


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="bold")
    for name in columns:
        table.add_column(name, no_wrap=True)
    return table


def _print_facts(rows: dict[str, str]) -> None:
    table = Table(box=None, padding=(0, 1), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, fact in rows.items():
        table.add_row(name, shown(fact))
    _console().print(table)


def shown(text: str) -> str:
    """A text from outside as Rich markup: on one line, without control characters."""
    return escape(printable(text, _LONGEST_LINE))


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 1e6 else f"{count / 1e3:,.1f} kB"

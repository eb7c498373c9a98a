"""`gpt2block generate`: continue a text.

Modules that are slow to import are imported where they are used, so that the first token comes
early.
"""

from __future__ import annotations

import re
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import typer

from gpt2block.apps.cli.codes import INTERRUPTED
from gpt2block.apps.cli.display import print_json, say, working
from gpt2block.apps.cli.model import (
    AdapterOptions,
    ModelOptions,
    TextOptions,
    draft_option,
    keyword,
    load_draft,
    load_model,
    model_facts,
    special_option,
)
from gpt2block.apps.cli.options import argument, flag, json_option, option, path_option
from gpt2block.apps.cli.texts import RECEIPT, read_text
from gpt2block.apps.cli.writer import Writer
from gpt2block.engine.generation.options import Options
from gpt2block.engine.receipts import append_receipts
from gpt2block.errors import InputError
from gpt2block.files.checkpoints import BUNDLED_NAMES
from gpt2block.files.tokenizers.tokenizer import token_ids

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gpt2block.engine.generation.generate import Run
    from gpt2block.engine.generation.sequences import TokenSequence
    from gpt2block.model import Model

DEFAULT_PROMPT = "JULIET:\nO Romeo,"  # default prompt of the bundled models
MAX_PROMPT = 2**24  # maximum bytes of a prompt: 16 MiB


@dataclass(frozen=True)
class RunOptions(TextOptions):
    stop_ids: list[int] = option(
        "Stop at this token id, may be given several times; by default the end tokens of the "
        "model, such as <|endoftext|>.",
        (),
        "--stop-id",
    )
    top_logprobs: int = keyword("top_logprobs")


def generate(
    prompt: str | None = argument("Text to continue; - or none: stdin without its last newline."),
    ids: bool = flag(
        "Read the prompt as token ids, such as 1,2,3 or '1 2 3', and write ids; needs no tokenizer."
    ),
    special: bool = special_option(),
    *,
    model: ModelOptions,
    adapters: AdapterOptions,
    options: RunOptions,
    draft_model: str | None = draft_option(),
    logprobs: bool = flag("Also print each token's log-probability."),
    receipt: Path | None = path_option(RECEIPT),
    as_json: bool = json_option(),
) -> None:
    """Continue a text, and print each token as it is generated.

    The prompt and its continuation go to stdout, the speed to stderr. Ctrl-C ends the text.
    """
    from gpt2block.engine.generation.generate import Run  # noqa: PLC0415

    clock = Stopwatch(perf_counter())
    if ids and special:
        raise InputError("--special: expected a text, got --ids")
    more = {"stop_ids": options.stop_ids or None, "receipt": receipt is not None}
    asked = Options.of(asdict(options) | more | {"adapter": adapters.only})
    default = "" if ids or model.model not in BUNDLED_NAMES else DEFAULT_PROMPT
    text = _prompt(prompt, default)
    start: Any = _read_ids(text) if ids else text
    hint = None if ids else "--ids takes token ids instead of text"
    if receipt is not None:
        append_receipts(receipt, ())  # an error for a file that cannot be written, before the text
    loaded, encoding = load_model(model, hint, adapters)
    load_draft(loaded, model, draft_model, options.speculate)
    if special:
        start = token_ids(encoding, text, loaded.config.vocab_size, "prompt", special=True)
    run = Run(loaded.engine, encoding, start, asked)
    beginning = " ".join(map(str, start.tolist())) if ids else text
    writer = None if as_json else Writer(run.sequences, beginning, ids)
    interrupted = _follow(run, clock, writer)
    if receipt is not None:
        ended = (sequence for sequence in run.sequences if sequence.finish_reason)
        append_receipts(receipt, (sequence.result().receipt for sequence in ended))
    if writer is None:
        report = {
            **model_facts(loaded),
            "prompt": start.tolist() if ids else text,
            "seed": options.seed,
            "samples": [_sample(sequence, encoding is not None) for sequence in run.sequences],
            "seconds_to_first_token": clock.to_first,
            "tokens_per_second": clock.rate,
        }
        print_json(report)
    else:
        writer.rest(logprobs or options.top_logprobs > 0)
        say(_summary(loaded, options.seed, run, clock))
    if interrupted:
        raise typer.Exit(INTERRUPTED)


@dataclass
class Stopwatch:
    """The times of the command's start and of all tokens."""

    begun: float
    at_first: int = 0  # number of tokens that the first step generated: one per sequence
    times: list[float] = field(default_factory=list)  # when each token came

    def tick(self, sequence: TokenSequence) -> None:
        """Record the time of a new token of the sequence."""
        if self.at_first == len(self.times) and len(sequence.tokens) == 1:
            self.at_first += 1
        self.times.append(perf_counter())

    @property
    def to_first(self) -> float | None:
        """Seconds to the first token, including the loading of the model."""
        return self.times[0] - self.begun if self.times else None

    @property
    def rate(self) -> float | None:
        """Tokens per second after the first step, which generates one token per sample."""
        later = len(self.times) - self.at_first
        return later / (self.times[-1] - self.times[0]) if later > 0 else None


def _follow(run: Run, clock: Stopwatch, writer: Writer | None) -> bool:
    """Generate all tokens. Return True if Ctrl-C ended the generation early.

    The first Ctrl-C closes the sequences, a second one raises KeyboardInterrupt.
    """
    with ExitStack() as first:  # contexts that end at the first token
        step = f"reading {len(run.sequences[0].prompt):,} tokens"
        first.enter_context(working(lambda: step, hidden=writer is None))
        try:
            for sequence in run:
                first.close()
                clock.tick(sequence)
                if writer:
                    writer.show(sequence)
        except KeyboardInterrupt:
            for sequence in run.sequences:
                sequence.close()
            return True
    return False


def _summary(loaded: Model[Any], seed: int, run: Run, clock: Stopwatch) -> str:
    """Return one line: model, device, tokens, speed, seed, and why each continuation ended."""
    rate = f", {clock.rate:,.1f} tokens/s" if clock.rate else ""
    first = f", first after {clock.to_first:.2f} s" if clock.to_first else ""
    ends = ", ".join(dict.fromkeys(each.finish_reason or "interrupted" for each in run.sequences))
    if any(sequence.finish_reason == "context" for sequence in run.sequences):
        ends += f" (all {loaded.config.n_ctx} tokens used: --overflow truncate continues)"
    return (
        f"{loaded.name}, {loaded.dtypes}, {loaded.device}: {len(clock.times)} tokens{rate}{first}; "
        f"seed {seed}; ended: {ends}"
    )


def _sample(sequence: TokenSequence, has_text: bool) -> dict[str, object]:
    """Return a sample for JSON. finish_reason: None after Ctrl-C. text: None without tokenizer."""
    return {
        "text": sequence.text if has_text else None,
        "tokens": sequence.tokens,
        "logprobs": sequence.logprobs,
        **({"top_logprobs": sequence.tops} if sequence.tops else {}),
        "finish_reason": sequence.finish_reason,
    }


def _prompt(argument: str | None, default: str) -> str:
    """Return the prompt argument, else stdin unless it is a terminal or empty, else `default`."""
    if argument not in (None, "-"):
        return argument or ""
    if argument == "-" or not sys.stdin.isatty():
        text = read_text("-", MAX_PROMPT).removesuffix("\n").removesuffix("\r")
        if text or argument == "-":
            return text
    return default


def _read_ids(text: str) -> NDArray[np.int64]:
    """Parse decimal token ids separated by commas and white space."""
    words = re.findall(r"[^\s,]+", text)
    wrong = next((word for word in words if not re.fullmatch("[0-9]{1,18}", word)), None)
    if wrong is not None:
        raise InputError(f"--ids: expected token ids such as 1,2,3, got {wrong!r}")
    return np.array([int(word) for word in words], np.int64)

"""`gpt2block score`: compute the log-likelihood and perplexity of a text."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.text import Text

from gpt2block.apps.cli.display import print_facts, print_json, printable_lines, progress_bar
from gpt2block.apps.cli.model import (
    ModelOptions,
    load_model,
    model_facts,
    special_option,
    stride_option,
)
from gpt2block.apps.cli.options import argument, flag, json_option, option
from gpt2block.apps.cli.texts import read_text, regular_file
from gpt2block.errors import InputError
from gpt2block.files.tokenizers.tokenizer import end_of_text, prefix_of, token_ids

if TYPE_CHECKING:
    from gpt2block.engine.generation.scoring import Score
    from gpt2block.files.tokenizers.encoding import Encoding
    from gpt2block.model import Model

MAX_TEXT = 2**28  # maximum bytes of a text: 256 MiB


def score(
    file: str = argument("A text of at most 256 MiB, a token file, or - for stdin.", ...),
    *,
    model: ModelOptions,
    stride: int | None = stride_option(),
    tokens: bool | None = option(
        "Content of the file; by default .npy and .bin files hold tokens (uint16, as written by "
        "llm.c and nanoGPT), all other files text.",
        None,
        "--tokens/--text",
    ),
    special: bool = special_option(),
    bos: bool = flag("Prepend <|endoftext|>, so that the first token is scored too."),
    per_token: bool = flag(
        "Also print the text with each token's surprisal: as a color, and in bits."
    ),
    as_json: bool = json_option(),
) -> None:
    """Compute the log-likelihood and perplexity of a text.

    A window as long as the model's context slides over the text; each token is predicted once.
    """
    from gpt2block.engine.generation import scoring  # noqa: PLC0415

    begun = perf_counter()
    of_tokens = Path(file).suffix in (".npy", ".bin") if tokens is None else tokens
    if of_tokens and special:
        raise InputError("--special: expected a text, got a token file")
    text: Any = (
        scoring.load_tokens(regular_file(file)) if of_tokens else read_text(file, MAX_TEXT, True)
    )
    hint = None if of_tokens else "--tokens reads token ids instead of text"
    loaded, encoding = load_model(model, hint)
    vocab_size = loaded.config.vocab_size
    if special or (bos and not of_tokens):
        text = token_ids(encoding, text, vocab_size, "text", special=special)
    if bos:
        text = _prepend_end_of_text(encoding, text, vocab_size)
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
        _print_json(file, loaded, found, seconds, per_token)
        return
    if per_token:
        _print_tokens(found, encoding)
    _print_score(file, loaded, found, seconds)


def _prepend_end_of_text(encoding: Encoding | None, ids: Any, vocab_size: int) -> object:
    """Prepend the ids that the tokenizer puts before every text, unless `ids` begin with them.

    A tokenizer without a prefix, such as GPT-2's, prepends <|endoftext|>. Raises InputError if the
    tokenizer has no such token.
    """
    prefix = prefix_of(encoding) if encoding is not None else []
    if prefix:
        present = np.array_equal(ids[: len(prefix)], prefix)
        return ids if present else np.concatenate([np.array(prefix, np.int32), ids])
    end = end_of_text(encoding, vocab_size)
    if end is None:
        raise InputError("--bos: this model has no tokenizer with <|endoftext|>")
    return np.concatenate([np.array([end], np.int32), ids])


def _print_json(
    file: str, loaded: Model[Any], score: Score, seconds: float, per_token: bool
) -> None:
    results = ("log_likelihood", "nats_per_token", "perplexity", "bits_per_byte")
    report = {
        "file": file,
        **model_facts(loaded),
        **{name: getattr(score, name) for name in results},
        "tokens": score.n_tokens,
        "bytes": score.bytes,
        "n_ctx": score.n_ctx,
        "stride": score.stride,
        "seconds": seconds,
    }
    if per_token:
        tokens = [token._asdict() | {"surprisal": token.surprisal} for token in score.tokens]
        report["per_token"] = tokens
    print_json(report)


SURPRISALS = ((1, "green"), (4, "default"), (8, "yellow"), (12, "red"))  # (maximum bits, color)
HIGHEST = "bold red"


def _print_tokens(score: Score, encoding: Encoding | None) -> None:
    """Print the text, colored by surprisal, on a terminal; in a pipe print a line per token."""
    out = Console(highlight=False)
    if not out.is_terminal or encoding is None:
        for token in score.tokens:
            print(f"{token.surprisal:9.4f}  {token.id:6}  {token.text!r}")
        print()
        return
    text = Text(printable_lines(score.tokens.start))
    for piece, bits in score.tokens.pieces():
        style = next((style for most, style in SURPRISALS if bits <= most), HIGHEST)
        text.append(printable_lines(piece), style=style)
    legend = Text("surprisal in bits: ", style="dim")
    for bits, style in SURPRISALS:
        legend.append(f"up to {bits} ", style=style)
    legend.append("more", style=HIGHEST)
    out.print(text, legend, sep="\n\n", end="\n\n", soft_wrap=True)


def _print_score(file: str, loaded: Model[Any], score: Score, seconds: float) -> None:
    size = "" if score.bytes is None else f", {score.bytes:,} bytes"
    rows = {
        "text": f"{file}: {score.n_tokens:,} tokens predicted{size}",
        "model": f"{loaded.name}, {loaded.dtypes}, {loaded.device}",
        "windows": f"{score.n_ctx} tokens, stride {score.stride}: each token predicted from at "
        f"least {score.n_ctx - score.stride} before it, but near the start",
        "log-likelihood": f"{score.log_likelihood:,.2f} nats",
        "nats per token": f"{score.nats_per_token:.4f}",
        "perplexity": f"{score.perplexity:,.4f}",
    }
    if score.bits_per_byte is not None:
        rows["bits per byte"] = f"{score.bits_per_byte:.4f}"
    rows["time"] = f"{seconds:.1f} s, {score.n_tokens / seconds:,.0f} tokens/s"
    print_facts(rows)

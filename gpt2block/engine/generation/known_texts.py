"""Score texts that a model has generated: the log-probabilities have the bits of generation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpt2block.engine.generation.generate import Run
from gpt2block.engine.generation.options import Options
from gpt2block.engine.generation.rows import Generation
from gpt2block.engine.generation.scoring import ScoredTokens
from gpt2block.engine.model import Ids, ModelEngine
from gpt2block.errors import Argument, InputError
from gpt2block.files.tokenizers import tokenizer
from gpt2block.files.tokenizers.lookup import Tokenizer
from gpt2block.sampling import Sampling


def score_generated(
    engine: ModelEngine, encoding: Tokenizer, prompts: Any, continuations: Any, options: Options
) -> ScoredTokens | list[ScoredTokens]:
    """Return the log-probabilities that `generate` computes for tokens after a prompt.

    prompts: as for `generate`. continuations: token ids or a Generation for one prompt, a list of
    these for a list of prompts. The options of sampling change no log-probability. max_new_tokens
    counts only for a model whose RoPE frequencies depend on the length of the text. Raises
    InputError for wrong arguments, for texts that are longer than the context, and for logits that
    are NaN or infinite.
    """
    if options.overflow == "truncate":
        raise InputError(Argument("overflow"), ": expected error, got 'truncate'")
    forced = Options(
        max_new_tokens=options.max_new_tokens,
        sampling=Sampling(temperature=0.0),
        seed=0,
        stop_ids=(),
        top_logprobs=options.top_logprobs,
        rows_at_once=on_its_own(engine, options.rows_at_once),
    )
    run = Run(engine, encoding, prompts, forced)
    given = [continuations] if run.single else list(continuations)
    if len(given) != len(run.rows):
        raise InputError(
            f"continuations: expected one for each of {len(run.rows):,} prompts, got {len(given):,}"
        )
    texts = [_ids(engine, run, index, each) for index, each in enumerate(given)]
    run.follow(texts, forced=True)
    run.finish()
    found = [
        ScoredTokens(
            text,
            np.array(row.logprobs, np.float32),
            encoding,
            int(row.prompt[-1]),
            top_logprobs=tuple(row.tops),
        )
        for row, text in zip(run.rows, texts, strict=True)
    ]
    return found[0] if run.single else found


def on_its_own(engine: ModelEngine, rows_at_once: int | None) -> int | None:
    """Return `rows_at_once`; for None with NumPy 1, as bits depend on the rows of a product."""
    return 1 if rows_at_once is None and engine.cache_kind[3] == "cpu" else rows_at_once


def _ids(engine: ModelEngine, run: Run, index: int, given: Any) -> Ids:
    """Return the checked token ids of a continuation. Raises InputError."""
    name = "continuation" if run.single else f"continuation {index}"
    ids: Sequence[int] = given.tokens if isinstance(given, Generation) else given
    found = tokenizer.token_ids(None, ids, engine.config.vocab_size, name)
    most = engine.config.n_ctx - len(run.rows[index].prompt) + 1
    if not 0 < len(found) <= most:
        raise InputError(
            f"{name}: expected 1 to {most:,} tokens, as the model's context is "
            f"{engine.config.n_ctx:,}, got {len(found):,}"
        )
    return found

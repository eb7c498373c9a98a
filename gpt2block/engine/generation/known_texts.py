"""Score texts that a model has generated, and check receipts, with the bits of generation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gpt2block.engine.generation.batching import Batch
from gpt2block.engine.generation.generate import Run, computes_alone
from gpt2block.engine.generation.options import Options
from gpt2block.engine.generation.rows import Generation, Row
from gpt2block.engine.generation.scoring import ScoredTokens
from gpt2block.engine.grammars import Grammar
from gpt2block.engine.model import Ids, ModelEngine
from gpt2block.engine.receipts import (
    IDENTITY,
    READERS,
    SAMPLED,
    identity,
    parsed,
    readers,
    require_equal,
)  # fmt: skip
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
        rows_at_once=1 if computes_alone(engine) else options.rows_at_once,
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


@dataclass(frozen=True)
class ReceiptCheck:
    """The result of the check of a receipt.

    code: exit code of `gpt2block verify`. 0: all tokens and log-probabilities have the stated bits;
    1: one differs; 2: the text cannot be compared. problem: a sentence, "" for code 0. tokens:
    number of tokens of the text that were compared. nan: whether a log-probability is NaN.
    """

    code: int
    problem: str = ""
    tokens: int = 0
    nan: bool = False


def check_receipts(
    engine: ModelEngine, encoding: Tokenizer, receipts: Sequence[Any]
) -> Iterator[tuple[int, ReceiptCheck]]:
    """Generate the texts of receipts again; yield (index, ReceiptCheck) when a check ends.

    The stated tokens are drafts: a step computes several of them. A text is as stated exactly if
    all of them are sampled, with equal bits of their log-probabilities, and the text ends there.
    """
    known, rows = identity(engine), dict[Row, tuple[int, dict[str, Any]]]()
    for index, receipt in enumerate(receipts):
        try:
            stated = parsed(receipt)
            require_equal(stated, known, IDENTITY)
            rows[_row(engine, encoding, stated)] = index, stated
        except InputError as error:
            yield index, ReceiptCheck(2, str(error))
    if not rows:
        return
    at_once = 1 if computes_alone(engine) else len(rows)
    n_ctx = max(len(row.prompt) + row.ends.max_new_tokens - 1 for row in rows)
    batch = Batch(engine, at_once, n_ctx, fewer=True, speculate="known")
    batch.submit([*rows])
    while batch.busy:
        for row in batch.step(each_token=False):
            index, stated = rows[row]
            problem = _problem(row, stated)
            if problem and row.finish_reason is None:
                batch.cancel([row])
            if row.finish_reason:
                nan = bool(np.isnan(stated["logprobs"]).any())
                yield index, ReceiptCheck(int(bool(problem)), problem, len(row.tokens), nan)


def _row(engine: ModelEngine, encoding: Tokenizer, stated: Mapping[str, Any]) -> Row:
    """Return the row that generates a stated text again. Raises InputError if there is none."""
    own, rule = stated["options"], stated["options"]["rule"]
    require_equal(stated, readers(encoding, own["stop"], rule), READERS)
    sampling = Sampling(**{name: own[name] for name in SAMPLED})
    ends = {"stop": own["stop"], "stop_ids": None if rule else own["stop_ids"]}
    options = Options(max_new_tokens=own["max_new_tokens"], sampling=sampling, seed=0, **ends)
    if rule:
        grammar = Grammar(rule, "options.rule")
        grammar.check()
        options.follow(grammar)
    run, V = Run(engine, encoding, stated["prompt"], options), engine.config.vocab_size
    (row,) = run.rows
    row.sampling = replace(row.sampling, seed=sampling.seed)
    if [row.prompt.tolist(), sorted(row.ends.stop_ids)] != [stated["prompt"], own["stop_ids"]]:
        raise InputError("prompt, options.stop_ids: expected tokens of a text of this model")
    run.follow([tokenizer.token_ids(None, stated["tokens"], V, "tokens")])
    unwritten = tokenizer.token_ids(None, own["unwritten"], V, "options.unwritten")
    row.unwritten = frozenset(unwritten.tolist())
    return row


def _problem(row: Row, stated: Mapping[str, Any]) -> str:
    """Return a sentence about the first difference between a row and the stated text, or ""."""
    tokens, count = stated["tokens"], min(len(row.tokens), len(stated["tokens"]))
    own, other = np.array(row.logprobs[:count], np.float32), stated["logprobs"][:count]
    wrong = (own.view(np.int32) != other.view(np.int32)) | (
        np.array(row.tokens[:count]) != tokens[:count]
    )
    if wrong.any():
        at = int(wrong.argmax())
        return (
            f"token {at}: the receipt states {tokens[at]} with a log-probability of "
            f"{_shown(other[at])}, generated is {row.tokens[at]} with {_shown(own[at])}"
        )
    if row.finish_reason in (None, "cancelled"):
        return ""
    reason = None if row.error else row.finish_reason
    if reason == "length" and row.ends.max_new_tokens < stated["options"]["max_new_tokens"]:
        reason = "context" if row.full else None
    if reason == stated["finish_reason"] and count == len(tokens):
        return ""
    ended = f"ends with {reason!r}" if reason else row.error or "goes on"
    return (
        f"token {len(row.tokens)}: the receipt states {len(tokens):,} tokens and the reason "
        f"{stated['finish_reason']!r}, the generated text {ended}"
    )


def _shown(logprob: np.float32) -> str:
    return f"{logprob:.9g} ({logprob.view(np.uint32):#010x})"

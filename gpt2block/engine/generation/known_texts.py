"""Score texts that a model has generated, and check receipts, with the bits of generation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from gpt2block.engine.generation.batching import Batch
from gpt2block.engine.generation.generate import Run, matcher_of, on_its_own
from gpt2block.engine.generation.options import Options
from gpt2block.engine.generation.rows import Ends, Generation, Row
from gpt2block.engine.generation.scoring import ScoredTokens
from gpt2block.engine.grammars import Grammar
from gpt2block.engine.model import Ids, ModelEngine
from gpt2block.engine.receipts import Stated, identity, readers
from gpt2block.errors import Argument, InputError
from gpt2block.files.tokenizers import tokenizer
from gpt2block.files.tokenizers.lookup import Tokenizer, of_outputs
from gpt2block.sampling import Sampling, check_biased


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
    known, rows = identity(engine), dict[Row, tuple[int, Stated]]()
    for index, receipt in enumerate(receipts):
        try:
            stated = Stated.of(receipt)
            if difference := stated.difference(known):
                raise InputError(difference)
            rows[_row(engine, encoding, stated)] = index, stated
        except InputError as error:
            yield index, ReceiptCheck(2, str(error))
    if not rows:
        return
    at_once = on_its_own(engine, None) or len(rows)
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
                nan = bool(np.isnan(stated.logprobs).any())
                yield index, ReceiptCheck(int(bool(problem)), problem, len(row.tokens), nan)


def _row(engine: ModelEngine, encoding: Tokenizer, stated: Stated) -> Row:
    """Return the row that generates a stated text again. Raises InputError if there is none."""
    options, rule = stated.fields["options"], stated.rule
    V, n_ctx, stop = engine.config.vocab_size, engine.config.n_ctx, tuple(options["stop"])
    own = of_outputs(encoding) if stop or rule else None
    if difference := stated.difference(readers(own, stop, rule), ("tokenizer", "llguidance")):
        raise InputError(difference)
    for name, ids in {"prompt": stated.prompt, "tokens": stated.tokens, **options}.items():
        if name in ("prompt", "tokens", "stop_ids", "unwritten"):
            tokenizer.token_ids(None, ids, V, name)
    check_biased(stated.sampling, V)
    if rule is not None:
        _check(rule)
    most = min(len(stated.tokens), options["max_new_tokens"], n_ctx - len(stated.prompt) + 1)
    if most < 1 or not len(stated.prompt):
        raise InputError(f"prompt: expected 1 to {n_ctx:,} tokens, and at least one new token")
    ends = Ends(most, n_ctx, False, stop, frozenset(options["stop_ids"]), own)
    row = Row(stated.prompt, stated.sampling, encoding, ends, rule=rule)
    row.matcher = matcher_of(rule, encoding, V, ends.stop_ids)
    row.unwritten = frozenset(options["unwritten"])
    row.known, row.most = stated.tokens[:most], len(stated.prompt) + options["max_new_tokens"]
    return row


@lru_cache(maxsize=64)
def _check(rule: Grammar) -> None:
    """Raise InputError unless a rule can be compiled."""
    rule.check()


def _problem(row: Row, stated: Stated) -> str:
    """Return a sentence about the first difference between a row and the stated text, or ""."""
    count = min(len(row.tokens), len(stated.tokens))
    logprobs = np.array(row.logprobs[:count], np.float32)
    bits = logprobs.view(np.int32) != stated.logprobs[:count].view(np.int32)
    wrong = bits | (np.array(row.tokens[:count], np.int32) != stated.tokens[:count])
    if wrong.any():
        at = int(wrong.argmax())
        return (
            f"token {at}: the receipt states {stated.tokens[at]} with a log-probability of "
            f"{_shown(stated.logprobs[at])}, generated is {row.tokens[at]} with "
            f"{_shown(logprobs[at])}"
        )
    if row.finish_reason in (None, "cancelled"):
        return ""
    reason = None if row.error else row.finish_reason
    if reason == "length" and row.ends.max_new_tokens < stated.fields["options"]["max_new_tokens"]:
        reason = "context" if row.full else None
    if reason == stated.fields["finish_reason"] and len(row.tokens) == len(stated.tokens):
        return ""
    return (
        f"token {len(row.tokens)}: the receipt states {len(stated.tokens):,} tokens and the reason "
        f"{stated.fields['finish_reason']!r}, the generated text "
        f"{f'ends with {reason!r}' if reason else row.error or 'goes on'}"
    )


def _shown(logprob: np.float32) -> str:
    return f"{logprob:.9g} ({logprob.view(np.uint32):#010x})"

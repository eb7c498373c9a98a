"""Score texts that a model has generated, and check receipts, with the bits of generation."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from gpt2block.checks import check_choice, several
from gpt2block.engine.generation.batching import Batch
from gpt2block.engine.generation.generate import Run, computes_alone, matcher_of
from gpt2block.engine.generation.options import Options
from gpt2block.engine.generation.scoring import ScoredTokens
from gpt2block.engine.generation.sequences import FinishReason, Generation, TokenSequence
from gpt2block.engine.grammars import Grammar
from gpt2block.engine.model import Floats, Ids, ModelEngine
from gpt2block.engine.receipts import SAMPLED, identity, parsed, receipt_of, require_equal
from gpt2block.errors import InputError, require, shown
from gpt2block.files.tokenizers import tokenizer
from gpt2block.files.tokenizers.lookup import Tokenizer
from gpt2block.sampling import Sampling

FINISHED = get_args(FinishReason)


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
    run = Run(engine, encoding, prompts, options)
    given = [continuations] if run.single else several(continuations)
    if len(given) != (count := len(run.sequences)):
        raise InputError(
            f"continuations: expected one for each of {count:,} prompts, got {len(given):,}"
        )
    texts = [_ids(engine, run, index, each) for index, each in enumerate(given)]
    run.follow(texts, forced=True)
    run.finish()
    scored = []
    for sequence, text in zip(run.sequences, texts, strict=True):
        logprobs, first = np.array(sequence.logprobs, np.float32), int(sequence.prompt[-1])
        scored.append(ScoredTokens(text, logprobs, encoding, first, None, tuple(sequence.tops)))
    return scored[0] if run.single else scored


def _ids(engine: ModelEngine, run: Run, index: int, text: Any) -> Ids:
    """Return the checked token ids of a continuation. Raises InputError."""
    name = "continuation" if run.single else f"continuation {index}"
    ids: Sequence[int] = text.tokens if isinstance(text, Generation) else text
    if isinstance(ids, str):  # a text has several rows of tokens
        raise InputError(f"{name}: expected token ids or a Generation, got text")
    checked = tokenizer.token_ids(None, ids, engine.config.vocab_size, name)
    most = engine.config.n_ctx - len(run.sequences[index].prompt) + 1
    if not 0 < len(checked) <= most:
        raise InputError(
            f"{name}: expected 1 to {most:,} tokens, as the model's context is "
            f"{engine.config.n_ctx:,}, got {len(checked):,}"
        )
    return checked


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
    engine: ModelEngine, encoding: Tokenizer, receipts: Sequence[object]
) -> Iterator[tuple[int, ReceiptCheck]]:
    """Generate the texts of receipts again; yield (index, ReceiptCheck) when a check ends.

    The stated tokens are drafts: a step computes several of them. A text is as stated exactly if
    all of them are sampled, with equal bits of their log-probabilities, and the text ends there.
    """
    known, sequences = identity(engine), dict[TokenSequence, tuple[int, dict[str, Any]]]()
    for index, receipt in enumerate(receipts):
        try:
            stated = parsed(receipt)
            require_equal(stated, known)
            sequence, logprobs = _sequence(engine, encoding, stated, known)
            sequences[sequence] = index, {**stated, "logprobs": logprobs}
        except (InputError, ChildProcessError, MemoryError) as error:
            yield index, ReceiptCheck(2, str(error))
        except KeyError as error:
            yield index, ReceiptCheck(2, f"{error.args[0]}: expected, but missing")
    if not sequences:
        return
    at_once = 1 if computes_alone(engine) else len(sequences)
    longest = max(len(sequence.prompt) + sequence.ends.max_new_tokens for sequence in sequences)
    n_ctx = min(longest - 1, engine.config.n_ctx)
    batch = Batch(engine, at_once, n_ctx, fewer=True, speculate="known")
    batch.submit([*sequences])
    while batch.busy:
        for sequence in batch.step(each_token=False):
            index, stated = sequences[sequence]
            problem = _problem(sequence, stated)
            if problem and sequence.finish_reason is None:
                batch.cancel([sequence])
            if sequence.finish_reason:
                nan = bool(np.isnan(stated["logprobs"]).any())
                code = 2 if sequence.finish_reason == "rule" else int(bool(problem))
                yield index, ReceiptCheck(code, problem, len(sequence.tokens), nan)


def _sequence(
    engine: ModelEngine, encoding: Tokenizer, stated: Mapping[str, Any], known: Mapping[str, object]
) -> tuple[TokenSequence, Floats]:
    """Return the sequence that generates a stated text again, and the stated log-probabilities.

    Raises InputError, which names the field, unless the receipt is one of this model and version.
    """
    own, V = stated["options"], engine.config.vocab_size
    if not isinstance(own, dict):
        raise InputError(f"options: expected an object, got {shown(own)}")
    sampling, rule = Sampling(**{name: own[name] for name in SAMPLED}), own["rule"]
    ends = {"stop": own["stop"], "stop_ids": None if rule else own["stop_ids"]}
    more = {"max_new_tokens": own["max_new_tokens"], "seed": sampling.seed}
    options = Options(sampling=sampling, **ends, **more)
    if rule:
        require("options.rule", "tools", "llguidance")
        options.follow(Grammar(str(rule), "options.rule"))
    prompt = tokenizer.token_ids(None, stated["prompt"], V, "prompt")
    run = Run(engine, encoding, prompt, options, compiles=False)
    (sequence,) = run.sequences
    unwritten = tokenizer.token_ids(None, own["unwritten"], V, "unwritten")
    sequence.unwritten = frozenset(unwritten.tolist())
    sequence.adapter = engine.adapters.with_digest(stated["adapter"])
    again = receipt_of(sequence, known)
    require_equal(own, again["options"], "options.")
    require_equal(stated, again)
    if unknown := ({*stated} - {*again}) | ({*own} - {*again["options"]}):
        raise InputError(f"{shown(min(map(str, unknown)))}: this version has no such field")
    tokens = tokenizer.token_ids(None, stated["tokens"], V, "tokens")
    try:
        logprobs = np.frombuffer(base64.b64decode(stated["logprobs"], validate=True), "<f4")
    except (TypeError, ValueError):
        raise InputError("logprobs: expected float32 numbers in base64") from None
    if not len(logprobs) == len(tokens) > 0:
        raise InputError(
            f"logprobs: {len(logprobs)} for {len(tokens)} tokens: expected as many, at least one"
        )
    check_choice("finish_reason", stated["finish_reason"], FINISHED)
    sequence.matcher = matcher_of(options.rule, encoding, V, sequence.ends.stop_ids, limited=True)
    run.follow([tokens])
    return sequence, logprobs


def _problem(sequence: TokenSequence, stated: Mapping[str, Any]) -> str:
    """Return a sentence about the first difference of a sequence from the stated text, or ""."""
    tokens, count = stated["tokens"], min(len(sequence.tokens), len(stated["tokens"]))
    own, other = np.array(sequence.logprobs[:count], np.float32), stated["logprobs"][:count]
    wrong = (own.view(np.int32) != other.view(np.int32)) | (
        np.array(sequence.tokens[:count]) != tokens[:count]
    )
    if wrong.any():
        at = int(wrong.argmax())
        return (
            f"token {at}: the receipt states {tokens[at]} with a log-probability of "
            f"{_shown(other[at])}, generated is {sequence.tokens[at]} with {_shown(own[at])}"
        )
    if sequence.finish_reason in (None, "cancelled"):
        return ""
    reason = None if sequence.error else sequence.finish_reason
    if reason == "length" and sequence.ends.max_new_tokens < stated["options"]["max_new_tokens"]:
        reason = "context" if sequence.full else None
    if reason == stated["finish_reason"] and count == len(tokens):
        return ""
    ended = f"ends with {reason!r}" if reason else sequence.error or "goes on"
    return (
        f"token {len(sequence.tokens)}: the receipt states {len(tokens):,} tokens and the reason "
        f"{stated['finish_reason']!r}, the generated text {ended}"
    )


def _shown(logprob: np.float32) -> str:
    return f"{logprob:.9g} ({logprob.view(np.uint32):#010x})"

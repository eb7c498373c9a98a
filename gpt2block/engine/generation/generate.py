"""Generate text: stop strings, streaming, several samples, texts longer than the context.

An engine computes and samples the tokens; this module decodes them to text. The text of a sequence
does not depend on the other sequences of its batch.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import overload

import numpy as np

from gpt2block.engine.generation.batching import Batch
from gpt2block.engine.generation.options import Options
from gpt2block.engine.generation.sequences import Ends, Generation, TokenSequence
from gpt2block.engine.grammars import Grammar, Matcher, vocabulary_of
from gpt2block.engine.grammars.trials import trial_of
from gpt2block.engine.model import Drafts, Ids, ModelEngine
from gpt2block.engine.receipts import certify
from gpt2block.errors import Argument, InputError
from gpt2block.files.tokenizers import tokenizer
from gpt2block.files.tokenizers.encoding import Encoding, packed
from gpt2block.files.tokenizers.lookup import Tokenizer, of_inputs, of_outputs
from gpt2block.models.config import ModelConfig
from gpt2block.sampling import Sampling, check_biased, new_seed

Prompt = str | Sequence[int] | np.ndarray[tuple[int], np.dtype[np.integer]]
Prompts = Sequence[Prompt] | np.ndarray[tuple[int, int], np.dtype[np.integer]]
MAX_SEQUENCES = 2**20  # most sequences per call: number of prompts times samples


def generate(
    engine: ModelEngine, encoding: Tokenizer, prompts: object, options: Options
) -> Generation | list[Generation] | list[list[Generation]]:
    """Continue a prompt (text or token ids), or each prompt of a list.

    Returns a Generation for one prompt and a list for a list; with `samples` above 1, a list of
    Generations for each prompt. If prompts are ids, the encoding may be None; the text is then
    empty. With a Lookup and ids, the tokenizer is loaded only when a text is read. An empty prompt
    starts from <|endoftext|> if the tokenizer has this token.

    overflow="truncate" keeps the last n_ctx tokens of a prompt, and drops the older half of the
    context whenever it is full. Raises InputError for wrong arguments, for a longer prompt with
    overflow="error", and for logits that are NaN or infinite.
    """
    run = Run(engine, encoding, prompts, options)
    run.finish()
    results, samples = [sequence.result() for sequence in run.sequences], options.samples
    if samples == 1:
        return results[0] if run.single else results
    groups = [results[first : first + samples] for first in range(0, len(results), samples)]
    return groups[0] if run.single else groups


def stream(
    engine: ModelEngine, encoding: Tokenizer, prompt: Prompt, options: Options
) -> Generator[str, None, Generation]:
    """Yield the text of `generate` for one prompt in pieces.

    Pieces hold whole characters and no part of a stop string; joined, the pieces are the text.
    There are no pieces without a tokenizer, or if the prompt is ids and the Lookup has no local
    tokenizer. The generator returns the Generation. Raises the errors of `generate`; wrong
    arguments raise at the call.
    """
    run = Run(engine, of_inputs(encoding, prompt), prompt, options)
    if not run.single:
        raise InputError("stream: expected one prompt, got a list")
    if len(run.sequences) > 1:
        raise InputError(f"stream: expected one sample, got {len(run.sequences)}: use generate")
    return _pieces(run)


def _pieces(run: Run) -> Generator[str, None, Generation]:
    for sequence in run:
        piece = sequence.take()
        if piece:
            yield piece
    return run.sequences[0].result()


class Run:
    """The sequences of one call: one for each sample of each prompt.

    Iteration generates the tokens, and yields the sequence of each new token until all sequences
    have ended. batch: an idle Batch to run in; None: a new one. compiles: whether sequences get the
    matchers of their grammar; otherwise their owner must set the matchers.
    """

    def __init__(
        self,
        engine: ModelEngine,
        encoding: Tokenizer,
        prompts: object,
        options: Options,
        compiles: bool = True,
    ) -> None:
        prompts = packed(prompts)
        reader = encoding  # a Lookup loads its tokenizer when a text is first read
        encoding = of_inputs(reader, prompts)
        if encoding is None and options.stop:
            encoding = of_outputs(reader)
            if encoding is None:
                raise InputError(
                    "stop: this model has no tokenizer, so there is no text: use ",
                    Argument("stop_ids"),
                )
        config, V = engine.config, engine.config.vocab_size
        ends = _ends(options, config, encoding)
        sampling, samples = options.sampling, options.samples
        if sampling.min_new_tokens:  # end tokens are then excluded at first
            sampling = replace(sampling, end_ids=ends.stop_ids)
        check_biased(sampling, V)
        rule = options.rule if compiles else None
        matcher = matcher_of(rule, reader, V, ends.stop_ids)
        adapter = engine.adapters.named(options.adapter)
        self._engine, self._rows_at_once = engine, options.rows_at_once
        self._speculate: Drafts = options.speculate
        self._alone = options.receipt  # whether bits must not depend on other texts
        self.batch: Batch | None = None
        self.single, self.prompts = tokenizer.as_list(prompts, "prompt")
        if len(self.prompts) * samples > MAX_SEQUENCES:
            raise InputError(
                f"{'samples' if samples > 1 else 'prompts'}: expected at most {MAX_SEQUENCES:,} "
                f"sequences, one per sample of each prompt, got {len(self.prompts):,} prompts and "
                f"{samples:,} samples: make several calls"
            )
        if samples > 1:
            replace(sampling, sample=sampling.sample + samples - 1)  # checks the last index
        starts, end = [], tokenizer.end_of_text(encoding, V)
        for index, prompt in enumerate(self.prompts):
            name = "prompt" if self.single else f"prompt {index}"
            start = tokenizer.token_ids(encoding, prompt, V, name)
            starts.append(_fitting(start, name, end, ends))

        # `create` has no reference to `self`: a cycle would keep ended sequences in memory.
        def create(index: int) -> TokenSequence:
            start, more = starts[index // samples], index % samples
            own = sampling
            if options.seed is None:
                own = sampling.with_seed(new_seed())
            elif more:
                own = replace(sampling, sample=sampling.sample + more)
            sequence = TokenSequence(start, own, reader, ends, options.top_logprobs, options.rule)
            sequence.matcher = None if matcher is None else matcher.copy()
            sequence.adapter = adapter
            if options.receipt:
                sequence.exact, sequence.certify = True, partial(certify, engine)
            return sequence

        self.sequences = LazySequences(len(starts) * samples, create)
        longest = max(map(len, starts))
        self.n_ctx = min(ends.n_ctx, longest + ends.max_new_tokens - 1)  # positions per slot

    def follow(self, texts: Sequence[Ids], forced: bool = False) -> None:
        """Compute several tokens of known texts, one for each sequence, together.

        A sequence ends with its text at the latest. forced: the tokens of the sequences are the
        tokens of the texts, instead of sampled tokens.
        """
        self._speculate, self._alone = "forced" if forced else "known", True
        for sequence, text in zip(self.sequences, texts, strict=True):
            ends, most, sequence.known = sequence.ends, len(sequence.prompt) + len(text), text
            sequence.ends = replace(ends, max_new_tokens=min(len(text), ends.max_new_tokens))
            if forced:
                sequence.most = max(sequence.most, most)
                sequence.sampling, sequence.matcher = Sampling(temperature=0.0), None
                sequence.ends = Ends(len(text), ends.n_ctx, False, (), frozenset(), None)
            self.n_ctx = min(ends.n_ctx, max(self.n_ctx, most - 1))

    def __iter__(self) -> Generator[TokenSequence, None, None]:
        return self._generate(each_token=True)

    def finish(self) -> None:
        """Generate all tokens; faster than iteration: a sequence receives many tokens at a time."""
        for _ in self._generate(each_token=False):
            pass

    def _generate(self, each_token: bool) -> Generator[TokenSequence, None, None]:
        """Generate all tokens; yield a sequence each time that it has got new tokens.

        each_token: whether sequences receive each token at once, instead of several at a time.
        """
        batch = self._own_batch() if self.batch is None else self.batch
        batch.submit(self.sequences)
        try:
            while batch.busy:
                for sequence in batch.step(each_token):
                    if sequence.error is not None:
                        raise sequence.error
                    yield sequence
        finally:
            if self.batch is not None:
                batch.cancel(self.sequences)

    def _own_batch(self) -> Batch:
        at_once = 1 if self._alone and computes_alone(self._engine) else self._rows_at_once
        slots = len(self.sequences) if at_once is None else min(at_once, len(self.sequences))
        fewer = at_once is None
        return Batch(self._engine, slots, self.n_ctx, fewer, speculate=self._speculate)


class LazySequences(Sequence[TokenSequence]):
    """The sequences of a call; each sequence is created on first use."""

    def __init__(self, count: int, create: Callable[[int], TokenSequence]) -> None:
        self._count, self._create = count, cache(create)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[TokenSequence]:
        return map(self._create, range(self._count))

    @overload
    def __getitem__(self, index: int) -> TokenSequence: ...
    @overload
    def __getitem__(self, index: slice) -> list[TokenSequence]: ...
    def __getitem__(self, index: int | slice) -> TokenSequence | list[TokenSequence]:
        selected = range(self._count)[index]
        if isinstance(selected, range):
            return [self[i] for i in selected]
        return self._create(selected)


def matcher_of(
    rule: Grammar | None, reader: Tokenizer, size: int, ends: frozenset[int], limited: bool = False
) -> Matcher | None:
    """Return a Matcher of a grammar at the start of a text; None without a grammar.

    reader: tokenizer of the model. size: of its vocabulary. ends: tokens that end a text. limited:
    whether compiling has limits of time and memory. Raises InputError for a model without
    tokenizer, and for a grammar that cannot be compiled; with limits, as `Trial.matcher` does.
    """
    if rule is None:
        return None
    encoding = of_outputs(reader)
    if encoding is None:
        raise InputError(f"{rule.name}: this model has no tokenizer, so there is no text")
    return (trial_of if limited else vocabulary_of)(encoding, size, ends).matcher(rule)


def computes_alone(engine: ModelEngine) -> bool:
    """Whether the bits of a text depend on the texts computed with it, as with NumPy."""
    return engine.cache_kind[3] == "cpu"


def _ends(options: Options, config: ModelConfig, encoding: Encoding | None) -> Ends:
    if options.stop_ids is None:
        ids = tokenizer.end_tokens(config, encoding)
    else:
        stop_ids = tokenizer.token_ids(None, options.stop_ids, config.vocab_size, "stop_ids")
        ids = frozenset(stop_ids.tolist())
    truncate = options.overflow == "truncate"
    return Ends(options.max_new_tokens, config.n_ctx, truncate, options.stop, ids, encoding)


def _fitting(ids: Ids, name: str, end: int | None, ends: Ends) -> Ids:
    """Return the last n_ctx ids of a prompt, or the id `end` of <|endoftext|> for an empty prompt.

    Raises InputError if an empty prompt has no `end`, or a prompt is too long and not truncated.
    """
    if not len(ids):
        if end is None:
            raise InputError(
                f"{name}: expected a text to continue, got an empty one: this model has no token "
                "that begins a text: write the first words"
            )
        return np.array([end], np.int32)
    if len(ids) > ends.n_ctx and not ends.truncate:
        raise InputError(
            f"{name}: {len(ids)} tokens, the model's context is {ends.n_ctx}: shorten it, or let ",
            Argument("overflow", "truncate"),
            f" keep the last {ends.n_ctx} and drop older ones when it is full",
        )
    return ids[-ends.n_ctx :]

"""The model type `gpt2block` of lm_eval: log-likelihoods and texts of a model in this process."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from gpt2block.checks import check_count, check_integer, named_options
from gpt2block.engine.generation.scoring import Score
from gpt2block.engine.numpy.model import NumpyModel
from gpt2block.engine.receipts import append_receipts
from gpt2block.errors import InputError, shown
from gpt2block.files.checkpoints import Checkpoint
from gpt2block.files.checkpoints.chat_files import bos_token
from gpt2block.files.tokenizers.encoding import special_id
from gpt2block.files.tokenizers.tokenizer import encode_chat, end_of_text, prefix_of, token_ids
from gpt2block.model import from_pretrained

SEED = 1234  # seed of sampled texts, lm_eval's default seed
REPLACED = {
    "pretrained": "expected model=, got pretrained={}",
    "tokenizer": "expected a model with its own tokenizer, got tokenizer={}",
    "trust_remote_code": "expected no trust_remote_code: no code of a checkpoint is run",
}
Scored = tuple[float, bool]  # log-likelihood in nats; whether each token is the most likely one
Request = tuple[Any, Sequence[int], Sequence[int]]  # texts, ids of context and of continuation


class EvaluatedModel(TemplateLM):
    """A model for lm_eval, which calls it with requests and computes the metrics of tasks.

    model: a name or path as in `gpt2block.from_pretrained`, such as a GGUF file. device, dtype,
    kv_dtype, revision: as in `from_pretrained`. batch_size: most sequences computed together, or
    "auto" for as many as fit; max_batch_size limits "auto". max_length: most tokens of a sequence,
    by default n_ctx. max_gen_toks: most new tokens of a text if the task does not say.
    prefix_token_id: the token before a text without context, by default the tokenizer's first token
    (<s>) or its end of text. chat_template_kwargs: as in `Model.chat`. receipts: file to which the
    receipt of each generated text is appended, as a line of JSON.

    A sequence of more than `max_length` tokens loses tokens at its start. A long text is divided
    into lm_eval's rolling windows. A window has `max_length` tokens, including the last predicted
    token, as in lm_eval's type `vllm`; in lm_eval's type `hf`, it has one token more. Results do
    not depend on `batch_size`: with NumPy, therefore, every sequence is computed alone. Raises
    UnknownOption, InputError, CheckpointError and DeviceError, as `from_pretrained` does.
    """

    @named_options(**REPLACED)
    def __init__(
        self,
        model: str = "",
        device: str | None = None,
        dtype: str | None = None,
        kv_dtype: str | None = None,
        revision: str | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        prefix_token_id: int | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        receipts: str | None = None,
    ) -> None:
        super().__init__()
        if not model or not isinstance(model, str):
            raise InputError(f"model: expected a name or path, such as FILE.gguf, got {model!r}")
        self._checkpoint = Checkpoint.open(model, revision)
        self.model = from_pretrained(self._checkpoint, device, dtype, kv_dtype=kv_dtype)
        self._device = self.model.device
        n_ctx, self._vocab_size = self.model.config.n_ctx, self.model.config.vocab_size
        expected = f"2 to {n_ctx}, the model's context"
        most = n_ctx if max_length is None else max_length
        self.max_length = check_integer("max_length", most, 2, n_ctx, expected)
        self.max_gen_toks = check_count("max_gen_toks", max_gen_toks)
        self.batch_size = batch_size
        self._sequences = _sequences_of(batch_size, max_batch_size)
        if isinstance(self.model.engine, NumpyModel):
            self._sequences = 1
        self._prefix, self._variables = prefix_token_id, chat_template_kwargs
        self._receipts = receipts
        if prefix_token_id is not None:
            last = self._vocab_size - 1
            check_integer("prefix_token_id", prefix_token_id, 0, last, f"an id from 0 to {last}")

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, object], additional_config: dict[str, object] | None = None
    ) -> EvaluatedModel:
        """Return a model. Model arguments replace lm_eval's options, such as its device cuda:0."""
        others = {k: v for k, v in (additional_config or {}).items() if k not in arg_dict}
        found: EvaluatedModel = super().create_from_arg_obj(arg_dict, others)
        return found

    @property
    def eot_token_id(self) -> int:
        """The id of the token that ends a text. Raises InputError if the tokenizer has none."""
        token = end_of_text(self.model.tokenizer, self._vocab_size)
        if token is None:
            raise InputError(
                f"prefix_token_id: {self.model.name} names no token that begins or ends a text, "
                "and this task scores texts without a context: expected prefix_token_id=ID"
            )
        return token

    @cached_property
    def prefix_token_id(self) -> int:
        """The id of the token before a text without a context. Raises InputError."""
        if self._prefix is not None:
            return self._prefix
        if prefix := prefix_of(self.model.tokenizer):
            return prefix[-1]
        name = bos_token(self._checkpoint)
        if name is not None and name in self.model.tokenizer.special_tokens_set:
            return special_id(self.model.tokenizer, name)
        return self.eot_token_id

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: object
    ) -> list[int]:
        """Return the token ids of a text, in which names of special tokens become their ids.

        The ids that the tokenizer adds before every text come first, but only once.
        add_special_tokens: False omits them.
        """
        if add_special_tokens is False:
            return encode_chat(self.model.tokenizer, string)
        found = token_ids(self.model.tokenizer, string, self._vocab_size, "text", special=True)
        return [int(token) for token in found]

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Return the ids of a context and of its continuation, as lm_eval divides them.

        If a token extends over the end of the context so that no id is left for the continuation,
        the continuation gets the ids that it has as a text of its own.
        """
        before, after = super()._encode_pair(context, continuation)
        spaces = context[len(context.rstrip()) :]  # lm_eval moves them to the continuation
        return before, after or self.tok_encode(spaces + continuation, add_special_tokens=False)

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, **kwargs: object
    ) -> list[Scored]:
        """Return log-likelihoods of continuations after contexts, as `loglikelihood` does."""
        sequences = []
        for texts, context, continuation in requests:
            if not 0 < len(continuation) < self.max_length:
                raise InputError(
                    f"continuation: expected 1 to {self.max_length - 1:,} tokens, as max_length is "
                    f"{self.max_length:,}, got {len(continuation):,} for {shown(texts)}"
                )
            ids = [*(context or [self.prefix_token_id]), *continuation]
            sequences.append(ids[-self.max_length :])
        scores, results = self._scores(sequences, disable_tqdm), []
        for (texts, _, continuation), score in zip(requests, scores, strict=True):
            last, tokens = slice(-len(continuation), None), score.tokens
            assert tokens.likeliest is not None
            greedy = np.array_equal(tokens.likeliest[last], tokens.ids[last])
            results.append((float(tokens.logprobs[last].sum(dtype=np.float64)), greedy))
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, results[-1])
        return results

    def _scores(self, texts: Sequence[list[int]], quiet: bool) -> list[Score]:
        """Return the Score of each text's ids; texts of similar length are computed together."""
        order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
        by_index: dict[int, Score] = {}
        with tqdm(total=sum(map(len, texts)) - len(texts), unit=" tokens", disable=quiet) as bar:
            size = self._sequences or len(texts) or 1
            for first in range(0, len(texts), size):
                batch = order[first : first + size]
                scores = self.model.score(
                    [texts[index] for index in batch],
                    progress=partial(_advance, bar, bar.n),
                    likeliest=True,
                )
                by_index.update(zip(batch, scores, strict=True))
        return [by_index[index] for index in range(len(texts))]

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihood of each text, whose tokens are all predicted once."""
        windows = [
            (index, (None, *make_disjoint_window(window)))
            for index, request in enumerate(requests)
            for window in get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length - 1, 1
            )
        ]
        scored = self._loglikelihood_tokens([window for _, window in windows], disable_tqdm)
        sums = [0.0] * len(requests)
        for (index, _), (nats, _) in zip(windows, scored, strict=True):
            sums[index] += nats
        for request, nats in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, nats)
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the text that follows each context, up to the first stop string.

        Other generation arguments than lm_eval's are keywords of `Model.generate`. Equal requests
        have different seeds.
        """
        groups: defaultdict[str, list[int]] = defaultdict(list)
        seen: Counter[tuple[str, str]] = Counter()
        for index, (context, given) in enumerate(request.args for request in requests):
            seen[key := (context, json.dumps(given, sort_keys=True))] += 1
            groups[json.dumps([seen[key] - 1, given])].append(index)
        texts = [""] * len(requests)
        for (repeat, given), indices in ((json.loads(key), found) for key, found in groups.items()):
            prompts = [requests[index].args[0] for index in indices]
            for index, text in zip(indices, self._texts(prompts, given, repeat), strict=True):
                texts[index] = text
                self.cache_hook.add_partial("generate_until", requests[index].args, text)
        return texts

    def _texts(self, prompts: list[str], given: dict[str, object], repeat: int) -> Iterator[str]:
        options: dict[str, Any] = {**normalize_gen_kwargs(given, self.max_gen_toks)}
        stop = [text for text in options.pop("until") if text]
        new, sampled = options.pop("max_gen_toks"), options.pop("do_sample")
        room = self.max_length - new
        if room < 1:
            raise InputError(
                f"max_gen_toks: expected less than {self.max_length:,}, as the model's context "
                f"also holds the prompt, got {new:,}"
            )
        seed = check_integer("seed", options.pop("seed", SEED), 0, 2**63, "an integer")
        options = {"temperature": 1.0 if sampled else 0.0, "seed": seed + repeat, **options}
        options["receipt"] = self._receipts is not None
        sequences = [self.tok_encode(prompt)[-room:] for prompt in prompts]
        generations = self.model.generate(
            sequences, max_new_tokens=new, stop=stop, rows_at_once=self._sequences, **options
        )
        if self._receipts is not None:
            append_receipts(self._receipts, (each.receipt for each in generations))
        return (each.text for each in generations)

    @property
    def tokenizer_name(self) -> str:
        """The model's name, by which lm_eval distinguishes cached requests."""
        return self.model.name.replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the source of the model's chat template; None if no template is requested.

        Raises CheckpointError for a model without a template, InputError for a template's name.
        """
        if chat_template is False or chat_template is None:
            return None
        if chat_template not in (True, "default"):
            raise InputError(
                f"apply_chat_template: expected no name, as a model has one template, got "
                f"{shown(chat_template)}"
            )
        return self.model.chat_template.source

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return the text of a conversation, as the model's chat template writes it.

        add_generation_prompt: whether the text ends with the beginning of an answer; otherwise the
        answer continues the last message. Raises InputError for messages that the template refuses.
        """
        template, begins = self.model.chat_template, add_generation_prompt
        arguments = template.arguments(begins, not begins, self._variables)
        return template.render(chat_history, **arguments)


def _sequences_of(batch_size: int | str, most: int | None) -> int | None:
    """Return the most sequences computed together; None: as many as fit. Raises InputError."""
    limit = None if most is None else check_count("max_batch_size", most)
    if str(batch_size).partition(":")[0] == "auto":
        return limit
    digits = isinstance(batch_size, str) and batch_size.isdecimal()
    if isinstance(batch_size, str) and not digits:
        raise InputError(f"batch_size: expected a positive integer or auto, got {batch_size!r}")
    return check_count("batch_size", int(batch_size) if digits else batch_size)


def _advance(bar: Any, start: int, done: int, total: int) -> None:
    """Advance a progress bar to `start` tokens of earlier batches and `done` tokens of this one."""
    bar.update(start + done - bar.n)

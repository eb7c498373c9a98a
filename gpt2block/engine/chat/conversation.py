"""`Conversation`: messages, and answers that reuse the key-value cache of earlier answers."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any
from weakref import ref

from gpt2block.engine.chat.messages import Message, checked, continued
from gpt2block.engine.chat.template import ChatTemplate
from gpt2block.engine.generation.batching import Batch
from gpt2block.engine.generation.generate import Run
from gpt2block.engine.generation.options import Options
from gpt2block.engine.generation.sequences import Generation, TokenSequence
from gpt2block.engine.model import ModelEngine
from gpt2block.engine.receipts import append_receipts
from gpt2block.errors import InputError
from gpt2block.files.tokenizers.encoding import Encoding
from gpt2block.sampling import with_defaults

MIN_TOKENS = 1024  # minimum number of tokens for which a conversation's batch allocates memory
SYSTEM = "system"  # role of the first messages, which stay in every prompt


class Conversation:
    """Messages, and the model's answers to them. Created by `GPT2.conversation`.

    messages: a list of {"role": …, "content": …}, which may be changed between answers.
    chat_template_kwargs: variables that the template reads, which may be changed too. A kv_cache
    keeps the keys and values of all tokens that the model has read: an answer computes only the
    tokens after the prefix that its messages share with the messages of the last answer. Therefore
    its last bits, and its text where two tokens are about equally likely, can differ from those of
    `chat`; the same messages in the same order give the same bits again.

    If the context has no room for an answer, the oldest turns are left out, until at most half of
    the context is used; a turn lasts from a user's message to the next user's message. `left_out`
    counts these messages; `clear` sets it to 0.

    answer: the TokenSequence of the last answer: its `tokens`, the tokens of its `prompt`, and how
    many of the prompt's tokens were `reused`. Not thread-safe. A copied or unpickled conversation
    on the CPU has the messages, and computes its kv_cache again.
    """

    def __init__(
        self,
        engine: ModelEngine,
        encoding: Encoding,
        template: ChatTemplate,
        messages: Iterable[Message] = (),
        sampling: Mapping[str, float] | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
    ) -> None:
        """sampling: default sampling options of answers, as keywords of `GPT2.stream`."""
        self.messages: list[Message] = list(messages)
        template.arguments(None, False, chat_template_kwargs)  # checks chat_template_kwargs
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        self.left_out, self._sampling = 0, dict(sampling or {})
        self.answer: TokenSequence | None = None
        self.receipts: Path | None = None  # file to which receipts of whole answers are appended
        self._engine, self._encoding, self._template = engine, encoding, template
        self._batch: Batch | None = None
        self._latest: ref[Generator[str, None, Generation | None]] | None = None
        if self.messages:
            template.normalized(self.messages)

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "answer": None, "_batch": None, "_latest": None}

    def __repr__(self) -> str:
        return f"Conversation({len(self.messages)} messages)"

    @property
    def n_ctx(self) -> int:
        """Context length of the model, in tokens."""
        return self._engine.config.n_ctx

    def stream(
        self,
        text: str | Message | None = None,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        **options: object,
    ) -> Generator[str, None, Generation | None]:
        """Add a message and yield the model's answer in pieces, as `GPT2.stream` does.

        text: the content of a user's message, or a message; None to answer the messages as they
        are. add_generation_prompt, continue_final_message: as in `GPT2.chat`; an answer that
        continues the last message is added to its content. options: the keywords of `GPT2.stream`.

        The message is added with the first piece. The answer is added when it ends, also if the
        generator is closed early by the caller or by the next `stream`, `undo` or `clear`. If the
        messages are changed meanwhile, the answer ends without being added, and the generator
        returns None. An error removes the message again. Raises as `GPT2.chat` does; wrong
        arguments raise at the call.
        """
        self._close()
        if isinstance(text, Mapping):
            asked = [text]
        else:
            asked = [] if text is None else [{"role": "user", "content": text}]
        own = (add_generation_prompt, continue_final_message)
        template = self._template.arguments(*own, self.chat_template_kwargs)
        run = self._run([*self.messages, *asked], template, options)
        pieces = self._pieces(run, deepcopy(self.messages), asked, template, options)
        self._latest = ref(pieces)
        return pieces

    def append(self, message: Message) -> None:
        """Append a message. Raises InputError if the template does not accept all messages."""
        self._template.normalized([*self.messages, message])
        self.messages.append(message)

    def clear(self) -> None:
        """Remove all messages except for the system messages at the beginning."""
        self._close()
        del self.messages[_turns(self.messages)[0] :]
        self.left_out = 0

    def undo(self) -> None:
        """Remove the user's last message and all messages after it, if the user has sent any."""
        self._close()
        last = [at for at, message in enumerate(self.messages) if message["role"] == "user"][-1:]
        del self.messages[last[0] if last else len(self.messages) :]

    def _close(self) -> None:
        """Close the generator of the latest answer, which ends an unfinished answer."""
        pieces = self._latest() if self._latest else None
        if pieces is not None:
            pieces.close()

    def _pieces(
        self,
        run: Run,
        before: list[Message],
        asked: list[Message],
        template: dict[str, Any],
        options: dict[str, Any],
    ) -> Generator[str, None, Generation | None]:
        if self.messages != before:  # the messages have changed since `stream` was called
            run = self._run([*self.messages, *asked], template, options)
        self.messages += asked
        read = deepcopy(self.messages)
        self.answer = sequence = run.sequences[0]
        steps = iter(run)
        try:
            for each in steps:
                piece = each.take()
                if piece:
                    yield piece
                if self.messages != read:
                    return None
        except GeneratorExit:
            raise
        except BaseException:
            self._batch = None  # do not reuse: after an error, the batch may be inconsistent
            if asked and self.messages == read:
                del self.messages[-1]
            raise
        finally:
            steps.close()  # cancels an unfinished sequence, whose text is then final
            if self._batch is not None and self.messages == read:
                if template["continue_final_message"]:
                    self.messages[-1] = continued(self.messages[-1], sequence.text)
                else:
                    self.messages.append({"role": "assistant", "content": sequence.text})
        result = sequence.result()
        if self.receipts is not None:
            append_receipts(self.receipts, [result.receipt])
        return result

    def _run(
        self, messages: Sequence[Message], template: dict[str, object], options: dict[str, object]
    ) -> Run:
        """Return the Run that generates an answer, in the last answer's KV cache if possible.

        template: arguments of `ChatTemplate.ids`.
        """
        receipt = {"receipt": True} if self.receipts is not None else {}
        given = with_defaults(options | receipt, self._sampling)
        chosen = Options.of(given, "Conversation.stream")
        if chosen.samples != 1:
            raise InputError(f"samples: expected one answer, got {chosen.samples}: use chat")
        new = chosen.max_new_tokens
        ids = self._fitting(messages, template, new)
        run = Run(self._engine, self._encoding, ids, chosen)
        needed = min(self.n_ctx, len(ids) + new - 1)
        speculate, batch = chosen.speculate, self._batch
        if batch is None or batch.n_ctx < needed or batch.speculate != speculate:
            self._batch = None  # frees the old batch's memory first
            n_ctx = min(self.n_ctx, max(MIN_TOKENS, 2 * needed))
            self._batch = Batch(self._engine, 1, n_ctx, reuse=True, speculate=speculate)
        run.batch = self._batch
        return run

    def _fitting(
        self, messages: Sequence[Message], template: dict[str, Any], new: int
    ) -> list[int]:
        """Return the prompt's token ids; omit the oldest turns if `new` more tokens would not fit.

        template: arguments of `ChatTemplate.ids`.
        """
        checked(messages)
        n_ctx = self.n_ctx
        most, turns = n_ctx + 1 - min(new, max(1, n_ctx // 4)), _turns(messages)
        begins = [at for at in turns if at >= turns[0] + self.left_out] or turns
        for at in begins:
            kept = [*messages[: turns[0]], *messages[at:]]
            ids = self._template.ids(self._encoding, kept, **template)
            if len(ids) <= most:
                self.left_out = at - turns[0]
                return ids
            most = n_ctx // 2  # leave out more turns than necessary, to have room for later turns
        if len(ids) > n_ctx:
            raise InputError(
                f"the message: {len(ids)} tokens with what the template adds, the model's context "
                f"is {n_ctx}: expected a shorter one"
            )
        self.left_out = begins[-1] - turns[0]
        return ids


def _turns(messages: Sequence[Message]) -> list[int]:
    """Return the indices where turns begin: at user messages and the first non-system message."""
    roles = [message["role"] for message in messages]
    first = next((at for at, role in enumerate(roles) if role != SYSTEM), len(roles))
    return [first, *(at for at in range(first + 1, len(roles)) if roles[at] == "user")]

"""A conversation whose kv_cache stays from answer to answer."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any

from gpt2block.config import check_count
from gpt2block.errors import InputError, shown
from gpt2block.run.model import ModelEngine
from gpt2block.text.batching import Batch
from gpt2block.text.chat import ChatTemplate, Message, checked
from gpt2block.text.encoding import Encoding
from gpt2block.text.generation import Run
from gpt2block.text.rows import Generation, Row

LEAST = 1024  # tokens that a batch has room for
ANSWER = 200  # tokens of an answer by default, as of `generate`
SYSTEM = "system"  # the role of messages at the beginning that are never left out


class Conversation:
    """Messages, and the model's answers to them; `GPT2.conversation` makes one.

    messages: a list of {"role": …, "content": …}, which may be changed between answers. The keys
    and values of what the model has read stay in a kv_cache: an answer computes only what follows
    the beginning that the messages share with those of the last answer. So its last bits, and where
    two tokens are about as likely its text, can differ from those of `chat`; the same messages in
    the same order give the same bits again.

    Where the context has no room for an answer, the oldest turns are left out, from a user's
    message to the next one's, until at most half of it is used; `left_out` counts these messages,
    and is 0 again after `clear`.

    answer: the Row of the last answer: its `tokens`, the tokens of its `prompt`, and how many of
    those were `reused`. Not thread-safe.
    """

    def __init__(
        self,
        engine: ModelEngine,
        encoding: Encoding,
        template: ChatTemplate,
        messages: Iterable[Message] = (),
    ) -> None:
        self.messages: list[Message] = list(messages)
        if self.messages:
            checked(self.messages)
        self.left_out = 0
        self.answer: Row | None = None
        self._engine, self._encoding, self._template = engine, encoding, template
        self._batch: Batch | None = None

    def __repr__(self) -> str:
        return f"Conversation({len(self.messages)} messages)"

    @property
    def n_ctx(self) -> int:
        """The context of the model."""
        return self._engine.config.n_ctx

    def stream(self, text: str | None = None, **options: Any) -> Generator[str, None, Generation]:
        """Add a user's message and yield the model's answer in pieces, as `GPT2.stream` does.

        text: None to answer the messages as they are. options: the keywords of `GPT2.stream`. The
        answer is added to the messages when it ends, also when the caller closes the generator
        before. An error takes the user's message back. Raises as `GPT2.chat` does; wrong arguments
        raise at the call.
        """
        if text is not None:
            self.messages.append({"role": "user", "content": text})
        try:
            run = self._run(options)
        except BaseException:
            self._take_back(text)
            raise
        return self._pieces(run, text)

    def clear(self) -> None:
        """Remove all messages except for the system's at the beginning."""
        del self.messages[self._turns()[0] :]
        self.left_out = 0

    def undo(self) -> None:
        """Remove the last user's message and all after it; none where there is none."""
        last = [at for at, message in enumerate(self.messages) if message["role"] == "user"][-1:]
        del self.messages[last[0] if last else len(self.messages) :]

    def _pieces(self, run: Run, text: str | None) -> Generator[str, None, Generation]:
        row, steps = run.rows[0], iter(run)
        self.answer = row
        try:
            for each in steps:
                piece = each.take()
                if piece:
                    yield piece
        except GeneratorExit:
            steps.close()  # which cancels the row: all of its text is known then
            self._add(row)
            raise
        except BaseException:
            self._batch = None  # it may have been interrupted anywhere
            self._take_back(text)
            raise
        self._add(row)
        return row.result()

    def _add(self, row: Row) -> None:
        self.messages.append({"role": "assistant", "content": row.text})

    def _take_back(self, text: str | None) -> None:
        if text is not None:
            del self.messages[-1]

    def _run(self, options: dict[str, Any]) -> Run:
        """The run of the next answer, in the batch of the last one where that has room."""
        new = check_count("max_new_tokens", options.get("max_new_tokens", ANSWER))
        ids = self._fitting(new)
        run = Run(self._engine, self._encoding, ids, **options)  # checks the options
        if len(run.rows) != 1:
            raise InputError(f"samples: expected one answer, got {len(run.rows)}: use chat")
        needed = min(self.n_ctx, len(ids) + new - 1)
        if self._batch is None or self._batch.n_ctx < needed:
            self._batch = None  # so that its memory is free
            n_ctx = min(self.n_ctx, max(LEAST, 2 * needed))
            self._batch = Batch(self._engine, 1, n_ctx, reuse=True)
        run.batch = self._batch
        return run

    def _fitting(self, new: int) -> list[int]:
        """Token ids of the messages that the model reads, before an answer of `new` tokens."""
        checked(self.messages)
        n_ctx = self.n_ctx
        most, turns = n_ctx + 1 - min(new, max(1, n_ctx // 4)), self._turns()
        begins = [at for at in turns if at >= turns[0] + self.left_out] or turns[:1]
        for at in begins:
            ids = self._ids(turns[0], at)
            if len(ids) <= most:
                self.left_out = at - turns[0]
                return ids
            most = n_ctx // 2  # room for some turns more before all is computed again
        if len(ids) > n_ctx:
            raise InputError(
                f"the message: {len(ids)} tokens with what the template adds, the model's context "
                f"is {n_ctx}: expected a shorter one"
            )
        self.left_out = begins[-1] - turns[0]
        return ids

    def _turns(self) -> list[int]:
        """Where turns begin: after the system's messages, and with each later user's message."""
        roles = [message["role"] for message in self.messages]
        first = next((at for at, role in enumerate(roles) if role != SYSTEM), len(roles))
        later = [at for at in range(first + 1, len(roles)) if roles[at] == "user"]
        return [first, *later]

    def _ids(self, first: int, begin: int) -> list[int]:
        """Token ids of the system's messages, `first` many, and of those from `begin` on."""
        messages = [*self.messages[:first], *self.messages[begin:]]
        return self._template.ids(self._encoding, messages)


def read_messages(value: Any) -> list[Message]:
    """The messages of a file or a line of JSON: one, or a list. InputError for anything else."""
    if isinstance(value, str):
        value = {"role": "user", "content": value}
    messages = [value] if isinstance(value, dict) else value
    if not isinstance(messages, list):
        raise InputError(f"expected a message, or a list of them, got {shown(value)}")
    if messages:
        checked(messages)
    return messages

"""Conversations: random sequences of actions, compared with a plain list of messages."""

from __future__ import annotations

import pickle
from collections.abc import Generator, Sequence
from copy import deepcopy
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import tiktoken

from fuzzing import Area, Refused, Rng, attempt, check, check_equal, refuses
from fuzzing.values import odd_text, spoil, spoil_json
from gpt2block import GPT2, GPT2Config, GPT2Weights
from gpt2block.engine.chat.conversation import Conversation
from gpt2block.engine.chat.template import ChatTemplate
from gpt2block.engine.generation.generate import generate
from gpt2block.engine.generation.options import Options

_N_CTX = 56
_SOURCE = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}\n{% endfor %}>"
_TEMPLATE = ChatTemplate(_SOURCE, {})  # one process for all cases
_MERGED = (b"ab", b"ba", "é".encode())
_TOKENS = {each: at for at, each in enumerate([*(bytes([b]) for b in range(256)), *_MERGED])}
_ENCODING = tiktoken.Encoding(
    "bytes", pat_str="(?s:.+)", mergeable_ranks=_TOKENS, special_tokens={"<|endoftext|>": 259}
)
_LIKELY = dict.fromkeys((*b"abcde \n", *"éà🎭".encode(), 256, 257, 258, 259), 5.0)


@lru_cache
def _model(seed: int) -> GPT2:
    config = GPT2Config(n_layer=1, n_head=1, n_embd=8, n_ctx=_N_CTX, vocab_size=260)
    return GPT2(GPT2Weights.random(seed, config), device="cpu")


class _Answer:
    """A generator of `stream`, and what it has yielded."""

    def __init__(
        self, pieces: Generator[str, None, Any], text: str | None, options: dict[str, Any]
    ) -> None:
        self.pieces, self.options = pieces, options
        self.asked = [] if text is None else [{"role": "user", "content": text}]
        self.read: list[Any] | None = None  # the messages that it answers, from the first piece on
        self.got, self.ended = "", False
        self.row, self.whole = None, None  # type: Any, Any


class _Talk:
    """A conversation, and the messages that it should have."""

    def __init__(self, rng: Rng) -> None:
        messages = [_message(rng) for _ in range(rng.whole(5))]
        spoilt = bool(messages) and rng.chance(0.2)
        if spoilt:
            spoil_json(rng, messages[-1])
        self.engine, sampling = _model(rng.whole(3)).engine, rng.pick(None, {"temperature": 0.5})
        arguments = self.engine, _ENCODING, _TEMPLATE, messages, sampling
        self.conversation = attempt(not spoilt, Conversation, *arguments)
        if spoilt and not messages[-1]["role"].isascii():  # a lone surrogate is refused later
            raise Refused
        self.messages, self.defaults = deepcopy(messages), sampling or {}
        self.answers: list[_Answer] = []

    def stream(self, rng: Rng) -> None:
        """Ask for an answer, which ends the one before."""
        text = rng.pick(None, odd_text(rng), odd_text(rng)[:9], "a", "b", "c")
        options: dict[str, Any] = {
            "max_new_tokens": rng.whole(1, 14), "seed": rng.whole(9),
            "stop": rng.pick((), "b", ("ab", "c"), "\n", "\ufffd"),
            "temperature": rng.pick(0, 1, 3),
        }  # fmt: skip
        if rng.chance(0.3):
            del options["temperature"]
        spoilt = rng.chance(0.15)
        if spoilt:
            spoil(rng, options, "top_k", "min_p", "stop_ids", "samples", "overflow", "maximum")
        options["logit_bias"] = _LIKELY
        self.end_latest()
        asked = [] if text is None else [{"role": "user", "content": text}]
        valid = not spoilt and _fits([*self.messages, *asked])
        try:
            pieces = attempt(valid, self.conversation.stream, text, **options)
        except (Refused, TypeError) as error:
            check(spoilt or not isinstance(error, TypeError), f"TypeError: {error}")
            return
        self.answers.append(_Answer(pieces, text, {**self.defaults, **options}))
        if spoilt:  # the answer for such an argument is not checked
            self.close(self.answers[-1])

    def read(self, rng: Rng) -> None:
        """Take pieces of an answer, mostly the latest."""
        if self.answers:
            answer = self.answers[rng.pick(-1, -1, -1, rng.whole(len(self.answers)))]
            for _ in range(rng.pick(1, 1, 2, 3, 99)):
                self.piece(answer)

    def piece(self, answer: _Answer) -> None:
        first = answer.read is None and not answer.ended
        if first:
            expected = [*self.messages, *answer.asked]
            if not _fits(expected):  # changed since the call
                check(refuses(next, answer.pieces), "an answer to messages that do not fit")
                answer.ended = True
                return
            self.messages, answer.read = expected, deepcopy(expected)
        going = not answer.ended and self.messages == answer.read
        try:
            piece = next(answer.pieces)
        except StopIteration as end:
            found = end.value
        else:
            check(going and piece, f"{piece!r} after the end of an answer")
            answer.got += piece
            found = piece
        if first:
            answer.row = self.conversation.answer
            self.check_prompt(answer)
        if isinstance(found, str):
            check(answer.whole.text.startswith(answer.got), f"{answer.got!r} of {answer.whole}")
        elif going:
            check_equal("joined", answer.got, answer.whole.text)
            check_equal("tokens", found.tokens, answer.whole.tokens)
            self.messages.append({"role": "assistant", "content": answer.whole.text})
            answer.ended = True
        else:
            check_equal("of an answer that was ended", found, None)
            answer.ended = True

    def check_prompt(self, answer: _Answer) -> None:
        """Check that the prompt has the system messages and latest turns; generate the answer."""
        assert answer.read is not None
        head, turns = _divided(answer.read)
        left_out, ids = self.conversation.left_out, answer.row.prompt.tolist()
        kept = [*head, *answer.read[len(head) + left_out :]]
        check_equal("prompt", ids, _ids(kept))
        check(len(head) + left_out in turns, f"{left_out} messages left out")
        answer.whole = generate(self.engine, _ENCODING, ids, Options.of(answer.options))

    def close(self, answer: _Answer, drop: bool = False) -> None:
        """Close the generator, or with `drop` only delete it."""
        if not drop:
            answer.pieces.close()
        answer.pieces = (each for each in "")
        self.end(answer)

    def end(self, answer: _Answer) -> None:
        """Check the text of an answer that is ended early, and append it to the messages."""
        if not answer.ended and answer.read is not None and self.messages == answer.read:
            tokens, whole = tuple(answer.row.tokens), answer.whole
            check_equal("tokens so far", tokens, whole.tokens[: len(tokens)])
            text = whole.text if tokens == whole.tokens else _ENCODING.decode(tokens)
            check(text.startswith(answer.got), f"{text!r} after {answer.got!r}")
            self.messages.append({"role": "assistant", "content": text})
        answer.ended = True

    def end_latest(self) -> None:
        for answer in self.answers[-1:]:
            self.end(answer)

    def end_answer(self, rng: Rng) -> None:
        """Close or abandon an answer."""
        if self.answers:
            self.close(self.answers[rng.whole(len(self.answers))], drop=rng.chance(0.5))

    def undo(self, rng: Rng) -> None:
        self.end_latest()
        self.conversation.undo()
        users = [at for at, each in enumerate(self.messages) if each["role"] == "user"]
        self.messages = self.messages[: max(users, default=len(self.messages))]

    def clear(self, rng: Rng) -> None:
        self.end_latest()
        self.conversation.clear()
        self.messages = _divided(self.messages)[0]
        check_equal("left out after clear", self.conversation.left_out, 0)

    def change(self, rng: Rng) -> None:
        """Change the list of messages, or one of them, as a caller may."""
        at, message, kind = rng.whole(len(self.messages) + 1), _message(rng), rng.whole(4)
        for messages in (self.conversation.messages, self.messages):
            if kind == 0 or at == len(messages):
                messages.insert(at, dict(message))
            elif kind == 1:
                del messages[at:]
            elif kind == 2:
                messages[at] = dict(message)
            else:
                messages[at]["content"] += "!"

    def copy(self, rng: Rng) -> None:
        """Go on with a copy, to which the generators do not belong."""
        before = self.conversation
        again = pickle.loads(pickle.dumps(before)) if rng.chance(0.5) else deepcopy(before)
        self.conversation, self.answers = again, []


def _message(rng: Rng) -> dict[str, Any]:
    role = rng.pick("user", "user", "assistant", "system", "tool")
    empty: dict[str, Any] = rng.pick({}, {}, {"name": None}, {"tool_calls": [], "refusal": None})
    return {"role": role, "content": odd_text(rng)[:12], **empty}


def _ids(messages: Sequence[dict[str, Any]]) -> list[int]:
    lines = "".join(f"{each['role'][:1]}{each['content']}\n" for each in messages)
    return _ENCODING.encode_ordinary(f"{lines}>")


def _divided(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[int]]:
    """Return the system messages at the beginning, and the indices at which turns begin."""
    head = [*takewhile(lambda each: each["role"] == "system", messages)]
    users = [at for at, each in enumerate(messages) if each["role"] == "user"]
    return head, sorted({len(head), *users})


def _fits(messages: list[dict[str, Any]]) -> bool:
    """Whether there is a message, and the last turn fits into the context."""
    head, turns = _divided(messages)
    return bool(messages) and len(_ids([*head, *messages[turns[-1] :]])) <= _N_CTX


def case(rng: Rng, folder: Path) -> None:
    talk = _Talk(rng)
    actions = [talk.stream] * 4 + [talk.read] * 6 + [talk.end_answer, talk.undo, talk.change] * 2
    for _ in range(rng.whole(4, 25)):
        rng.pick(*actions, talk.clear, talk.copy)(rng)
        check_equal("messages", talk.conversation.messages, talk.messages)


AREA = Area("conversations", 2, case)

"""Chat templates: messages as the text and the token ids that a model was trained on."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from gpt2block.checks import check_encodable
from gpt2block.errors import CheckpointError, InputError, require, shown
from gpt2block.tokenizers import tokenizer
from gpt2block.tokenizers.encoding import Encoding, Spans

Message = Mapping[str, Any]  # "role" and "content", and what else the template reads
SECONDS = 10.0  # that a rendering may take
WORKER = Path(__file__).with_name("worker.py")


class RenderingTimeoutError(CheckpointError):
    """A rendering that took too long."""


class ChatTemplate:
    """The Jinja template of a model.

    source: of the template. tokens: strings of special tokens by their names, such as "bos_token",
    which it may use. Source: Hugging Face, "Chat templates".

    The template runs in a process of its own, in jinja2's sandbox, for at most `seconds` at a time
    and in 1 GiB of memory: it cannot reach files, the network or Python's objects. The process is
    started for the first rendering, and ends with this object. Thread-safe. A copy has a process of
    its own.

    check: called with each text before the characters of messages are followed in it, which takes
    several times as long as the rendering. Its exceptions are raised.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        self.source, self.tokens = source, dict(tokens)
        self.seconds = SECONDS
        self.check: Callable[[str], None] = lambda text: None
        self._worker: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"ChatTemplate({len(self.source):,} characters, {self.tokens})"

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The text of a conversation.

        messages: "role" and "content" of each. add_generation_prompt: whether the text ends with
        what begins an answer. variables: further ones that the template knows, such as `tools`;
        they and the messages consist of what JSON has.

        Raises InputError for messages of another form, or that the template refuses, and
        CheckpointError for a template that fails, or takes too long.
        """
        checked(messages)
        text: str = self._rendered(messages, add_generation_prompt, variables, False)["text"]
        return text

    def ids(
        self,
        encoding: Encoding,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """Token ids of `render`'s text.

        Names of special tokens, and of other added tokens that are not white space, are tokens only
        where the template writes all of their characters. Where a character of a name comes from
        messages or variables (contents, tools, roles that no model is known to have), the name is
        encoded as ordinary text. The ids of the rest are those of the same messages with a word in
        the name's place. Raises as `render` does; InputError for a name that the tokenizer cannot
        write with other tokens.
        """
        text, places = self.placed(messages, add_generation_prompt, **variables)
        return tokenizer.encode_chat(encoding, text, places)

    def placed(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any
    ) -> tuple[str, Spans]:
        """The text of `render`, and the parts of it that do not come from the template."""
        checked(messages)
        found = self._rendered(messages, add_generation_prompt, variables, True)
        return found["text"], found["places"]

    def _rendered(
        self, messages: Sequence[Message], prompt: bool, variables: Mapping[str, Any], places: bool
    ) -> dict[str, Any]:
        """The text, and ranges of places whose characters do not come from the template."""
        given = {**self.tokens, "tools": None, "documents": None, **variables}
        given |= {"messages": list(messages), "add_generation_prompt": prompt}
        names = ["messages", *(n for n in variables if not n.endswith("_token"))] if places else []
        try:
            line = json.dumps(given)
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(f"messages: expected what JSON has: {error}") from error
        with self._lock:
            if self._worker is None:
                self._start()
            until, about = monotonic() + self.seconds, "the chat template refuses these messages: "
            found = self._ask(line, about, until)
            self.check(found["text"])
            return {**found, **self._ask(json.dumps(names), about, until)} if places else found

    def _start(self) -> None:
        require("a chat template", "serve", "jinja2")
        self._worker = subprocess.Popen(
            [sys.executable, str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )
        about, until = "the chat template is damaged: ", monotonic() + SECONDS
        try:
            self._ask(json.dumps(self.source), about, until, CheckpointError)
        except CheckpointError:
            self._end()
            raise

    def _ask(
        self, line: str, about: str, until: float, kind: type[Exception] = InputError
    ) -> dict[str, Any]:
        """The worker's answer to a line. until: the time, as of `monotonic`, when it is ended."""
        worker = self._worker
        assert worker is not None
        assert worker.stdin is not None
        assert worker.stdout is not None
        late = threading.Event()

        def stop() -> None:
            late.set()
            worker.kill()

        timer = threading.Timer(until - monotonic(), stop)
        timer.start()
        try:
            worker.stdin.write(line + "\n")
            worker.stdin.flush()
            answer = worker.stdout.readline()
        except OSError:
            answer = ""
        finally:
            timer.cancel()
        if not answer:
            self._end()
            if late.is_set():
                problem = f"the chat template takes more than {self.seconds:g} s"
                raise RenderingTimeoutError(f"{problem}: choose another model")
            raise CheckpointError("the chat template ends its process: choose another model")
        found: dict[str, Any] = json.loads(answer)
        if "error" in found:
            raise kind(about + found["error"])
        return found

    def _end(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.kill()
            worker.communicate()

    def __del__(self) -> None:
        if vars(self).get("_worker") is not None:
            self._end()

    def __getstate__(self) -> dict[str, Any]:
        return {"source": self.source, "tokens": self.tokens}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


def checked(messages: Any) -> None:
    """Raise InputError unless these are messages of a conversation."""
    expected = "expected a list of messages such as {'role': 'user', 'content': 'Hello'}"
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InputError(f"messages: {expected}, got {shown(messages)}")
    if not messages:
        raise InputError(f"messages: {expected}, got none")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InputError(f"messages: {expected}, got {shown(message)} at {index}")
        if not isinstance(message.get("content"), str):
            problem = f"expected a text as content, got {shown(message.get('content'))}"
            raise InputError(f"messages: {problem} at {index}")
        check_encodable(f"messages: content at {index}", message["content"])

"""Chat templates: messages as the text and the token ids that a model was trained on."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpt2block.errors import CheckpointError, InputError, shown
from gpt2block.text import tokenizer
from gpt2block.text.encoding import Encoding

Message = Mapping[str, Any]  # "role" and "content", and what else the template reads
SECONDS = 10.0  # that a rendering may take
WORKER = Path(__file__).with_name("chat_worker.py")
MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # which Unicode reserves for programs


class ChatTemplate:
    """The Jinja template of a model.

    source: of the template. tokens: strings of special tokens by their names, such as "bos_token",
    which it may use. Source: Hugging Face, "Chat templates".

    The template runs in a process of its own, in jinja2's sandbox, for at most SECONDS at a time
    and in 1 GiB of memory: it cannot reach files, the network or Python's objects. The process is
    started for the first rendering, and ends with this object. Thread-safe.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        self.source, self.tokens = source, dict(tokens)
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
        return self._rendered(list(messages), add_generation_prompt, variables)

    def ids(
        self,
        encoding: Encoding,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """Token ids of `render`. Names of special tokens in messages are ordinary text."""
        checked(messages)
        try:
            return self._ids(encoding, messages, add_generation_prompt, variables)
        except RecursionError:
            raise InputError("messages: expected less depth") from None

    def _ids(
        self,
        encoding: Encoding,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> list[int]:
        given, mark = messages, ""
        names = sorted(filter(None, encoding.special_tokens_set), key=len, reverse=True)
        if any(name in text for text in _strings(messages) for name in names):
            everything = "".join((self.source, *_strings([*messages, *variables.values()])))
            mark = next((each for each in MARKS if each not in everything), "")
            if not mark:
                raise InputError("messages: expected no noncharacters (U+FDD0 to U+FDEF) in them")
            found = re.compile("|".join(map(re.escape, names)))
            given = _mapped(messages, lambda text: found.sub(lambda at: mark.join(at[0]), text))
        text = self._rendered(list(given), add_generation_prompt, variables)
        return tokenizer.encode_chat(encoding, text, mark)

    def _rendered(self, messages: Any, prompt: bool, variables: Mapping[str, Any]) -> str:
        given = {**self.tokens, "tools": None, "documents": None, **variables}
        given |= {"messages": messages, "add_generation_prompt": prompt}
        try:
            line = json.dumps(given)
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(f"messages: expected what JSON has: {error}") from error
        with self._lock:
            if self._worker is None:
                self._start()
            return self._ask(line, "the chat template refuses these messages: ")

    def _start(self) -> None:
        if find_spec("jinja2") is None:
            raise InputError("chat templates need jinja2: run pip install jinja2")
        self._worker = subprocess.Popen(
            [sys.executable, str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )
        try:
            self._ask(json.dumps(self.source), "the chat template is damaged: ", CheckpointError)
        except CheckpointError:
            self._end()
            raise

    def _ask(self, line: str, about: str, kind: type[Exception] = InputError) -> str:
        """The worker's answer to a line."""
        worker = self._worker
        assert worker is not None
        assert worker.stdin is not None
        assert worker.stdout is not None
        late = threading.Event()

        def stop() -> None:
            late.set()
            worker.kill()

        timer = threading.Timer(SECONDS, stop)
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
            why = f"takes more than {SECONDS:g} s" if late.is_set() else "ends its process"
            raise CheckpointError(f"the chat template {why}: choose another model")
        found: dict[str, str] = json.loads(answer)
        if "error" in found:
            raise kind(about + found["error"])
        return found["text"]

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
        tokenizer.check_encodable(f"messages: content at {index}", message["content"])


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _strings(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _strings(each)


def _mapped(value: Any, change: Any) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {name: _mapped(each, change) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_mapped(each, change) for each in value]
    return value

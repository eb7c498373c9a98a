"""Chat templates: render messages into the text and the token ids that a model was trained on."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from time import monotonic
from typing import Any

from gpt2block.checks import check_flag
from gpt2block.engine.chat.messages import Message, TemplateNames, normalized
from gpt2block.engine.chat.thinking import thinking_of
from gpt2block.engine.chat.tool_forms import form_of
from gpt2block.errors import CheckpointError, InputError, require, shown
from gpt2block.files.tokenizers import tokenizer
from gpt2block.files.tokenizers.encoding import Encoding, Spans

# Arguments of `render` and `ids`. A template's variables cannot have these names.
ARGUMENTS = ("add_generation_prompt", "continue_final_message", "messages", "encoding", "self")
SECONDS = 10.0  # time limit of a rendering, in seconds
WORKER = Path(__file__).with_name("worker.py")


class RenderingTimeoutError(CheckpointError):
    """Raised if a rendering exceeds its time limit."""


class ChatTemplate:
    """The chat template of a model, in Jinja.

    source: text of the template. tokens: texts of special tokens, which the template may use, by
    names such as "bos_token". Source: Hugging Face, "Chat templates".

    The template runs in a separate process, in jinja2's sandbox, for at most `seconds` at a time
    and in 1 GiB of memory: it cannot reach files, the network or Python's objects. The process is
    started for the first rendering, and ends with this object. Thread-safe. A copy starts another
    process.

    check: function that is called with each rendered text, before the characters of messages are
    located in the text, which takes several times as long as rendering. Exceptions of this function
    are raised.

    tool_form: the form in which the model writes calls of tools, by default the form that the
    source shows; None if it is unknown. Calls in messages are written into the content in this form
    if the template does not read them. thinking: the texts around the thinking of the model that
    the source shows, or None. reasoning_content is written into the content in the same way.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        self.source, self.tokens = source, dict(tokens)
        self.seconds = SECONDS
        self.check: Callable[[str], None] = lambda text: None
        self.tool_form, self.thinking = form_of(self.source), thinking_of(self.source)
        self._worker: subprocess.Popen[str] | None = None
        self._names: TemplateNames | None = None
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"ChatTemplate({len(self.source):,} characters, {self.tokens})"

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """Render messages, and return the text of the conversation.

        messages: "role" and "content" of each; docs/chat.md has the forms that are read.
        add_generation_prompt: whether the text ends with the beginning of an answer; by default, if
        the last message is not continued. continue_final_message: end with the content of the last
        message, which the answer continues, as in transformers. variables: other variables that the
        template reads, such as `tools` and `enable_thinking`. Messages and variables must be
        serializable as JSON.

        Raises InputError for messages of another form, for roles, fields and variables that the
        template does not read or that it refuses, and CheckpointError for a template that fails, or
        takes too long.
        """
        arguments = (messages, add_generation_prompt, continue_final_message)
        text: str = self._rendered(False, *arguments, **variables)["text"]
        return text

    def ids(self, encoding: Encoding, messages: Sequence[Message], **arguments: Any) -> list[int]:
        """Return the token ids of the text that `render` returns for the same arguments.

        Names of special tokens, and of other added tokens that are not white space, are tokens only
        where the template writes all of their characters. Where a character of a name comes from
        messages or variables (contents, tools, roles that no model is known to have), the name is
        encoded as ordinary text. The ids of the rest are those of the same messages with a word in
        the name's place. Raises as `render` does; InputError for a name that the tokenizer cannot
        write with other tokens.
        """
        text, places = self.placed(messages, **arguments)
        return tokenizer.encode_chat(encoding, text, places)

    def placed(self, messages: Sequence[Message], **arguments: Any) -> tuple[str, Spans]:
        """Return the text of `render`, and the text's ranges copied from messages and variables."""
        rendered = self._rendered(True, messages, **arguments)
        return rendered["text"], rendered["places"]

    def arguments(
        self,
        add_generation_prompt: bool | None,
        continue_final_message: bool,
        chat_template_kwargs: Mapping[str, object] | None,
    ) -> dict[str, Any]:
        """Return keyword arguments for `render`. Raises InputError as `check_variables` does."""
        if chat_template_kwargs:
            self.check_variables(chat_template_kwargs)
        return {
            **(chat_template_kwargs or {}),
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }

    @property
    def names(self) -> TemplateNames:
        """Names that the template reads. Raises CheckpointError for a damaged template."""
        if self._names is None:
            with self._lock:
                if self._names is None:
                    self._start()
        assert self._names is not None
        return self._names

    def normalized(self, messages: Any, arguments_as_objects: bool = True) -> list[dict[str, Any]]:
        """Return messages in the form that this template reads. Raises as `render` does."""
        write_calls = self.tool_form.written if self.tool_form else None
        if self.thinking:
            messages = self.thinking.converted(messages, self.names)
        return normalized(messages, self.names, arguments_as_objects, write_calls)

    def check_variables(self, variables: Any) -> None:
        """Raise InputError unless `variables` is a mapping of variables that the template reads.

        Messages, special tokens and the other arguments of `render` cannot be replaced.
        """
        known = {*self.names.variables}.difference(ARGUMENTS, self.tokens)
        given = isinstance(variables, Mapping)
        if unread := [name for name in variables if name not in known] if given else variables:
            expected = ", ".join(sorted(known)) or "none, as the chat template reads no variables"
            raise InputError(f"chat_template_kwargs: expected {expected}, got {shown(unread)}")

    def _rendered(
        self,
        places: bool,
        messages: Sequence[Message],
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        **variables: object,
    ) -> dict[str, Any]:
        """Return {"text": …}; with `places`, also the ranges copied from messages or variables."""
        self.check_variables(variables)
        continues, prompt = continue_final_message, add_generation_prompt
        if check_flag("continue_final_message", continues) and prompt:
            raise InputError(
                "add_generation_prompt: expected False with continue_final_message: an answer "
                "continues the last message, or begins a message of its own"
            )
        prompt = check_flag("add_generation_prompt", not continues if prompt is None else prompt)
        values = {**self.tokens, "tools": None, "documents": None, **variables}
        values["add_generation_prompt"] = prompt
        names = ["messages", *variables] if places else []
        converted = self.normalized(messages)
        try:
            return self._answer(converted, values, names, continues)
        except InputError:  # some templates need a tool call's arguments as JSON text
            texts = self.normalized(messages, arguments_as_objects=False)
            with suppress(InputError):
                if texts != converted:
                    return self._answer(texts, values, names, continues)
            raise

    def _answer(
        self, messages: list[Any], values: dict[str, Any], names: list[str], continues: bool
    ) -> dict[str, object]:
        """Render messages in the worker process. `names`: variables to find in the text."""
        content, mark = messages[-1]["content"], token_hex(8)
        if continues:  # if the space after `mark` is lost, the template strips the content
            messages = [*messages[:-1], {**messages[-1], "content": f"{content}{mark} "}]
        try:
            line = json.dumps({**values, "messages": messages})
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(f"messages: expected what JSON has: {error}") from error
        with self._lock:
            if self._worker is None:
                self._start()
            until, about = monotonic() + self.seconds, "the chat template refuses these messages: "
            rendered = self._ask(line, about, until)
            self.check(rendered["text"])
            if names:
                rendered |= self._ask(json.dumps(names), about, until)
        return _ended_at(rendered, content, mark) if continues else rendered

    def _start(self) -> None:
        require("a chat template", "serve", "jinja2")
        command, pipe = [sys.executable, str(WORKER)], subprocess.PIPE
        self._worker = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, encoding="utf-8"
        )
        about, until = "the chat template is damaged: ", monotonic() + SECONDS
        try:
            names = self._ask(json.dumps(self.source), about, until, CheckpointError)
        except CheckpointError:
            self._end()
            raise
        self._names = TemplateNames(
            frozenset(names["fields"]), names["any_role"], frozenset(names["variables"])
        )

    def _ask(
        self, line: str, about: str, until: float, kind: type[Exception] = InputError
    ) -> dict[str, Any]:
        """Send a line to the worker process; return its answer. `until`: time.monotonic() limit."""
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
            timer.join()  # now `stop` has killed the worker, or never will
        if late.is_set() or not answer:
            self._end()
            if late.is_set():
                problem = f"the chat template takes more than {self.seconds:g} s"
                raise RenderingTimeoutError(f"{problem}: choose another model")
            raise CheckpointError("the chat template ends its process: choose another model")
        reply: dict[str, Any] = json.loads(answer)
        if "error" in reply:
            raise kind(about + reply["error"])
        return reply

    def _end(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            # The garbage collector may have closed the pipes before it calls __del__. Therefore
            # communicate(), which flushes stdin, could fail; `with` closes open pipes and waits.
            with suppress(OSError), worker:
                worker.kill()

    def __del__(self) -> None:
        if vars(self).get("_worker") is not None:
            self._end()

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.source, self.tokens)


def _ended_at(rendered: dict[str, Any], content: str, mark: str) -> dict[str, Any]:
    """Cut off a rendering, as transformers does, at `mark`, which follows the last content."""
    text = rendered["text"]
    if text.count(mark) != 1 or content.strip() not in text:
        raise InputError(
            "continue_final_message: the chat template does not write the content of the last "
            "message once and as it is"
        )
    at = text.index(mark)
    kept = text[:at] if text.startswith(f"{mark} ", at) else text[:at].rstrip()
    places = [(a, min(b, len(kept))) for a, b in rendered.get("places", ()) if a < len(kept)]
    return {"text": kept, "places": places}

"""`ToolForm`: the form in which a family of models writes calls of tools.

Source: Hugging Face, "Tool use" (Chat templates); vLLM, "Tool Calling".
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from secrets import token_hex
from typing import Any, ClassVar, NamedTuple, Protocol

from gpt2block.errors import InputError, shown

NO_TOOLS = (
    "tools: the chat template of this model reads no tools: leave them out, or set tool_choice to "
    '"none"'
)
Offered = tuple[list[Any], dict[str, Any]]


class Names(Protocol):
    """The names in a chat template that a form reads: two fields of `TemplateNames`."""

    @property
    def fields(self) -> Collection[str]: ...
    @property
    def variables(self) -> Collection[str]: ...


class Tool(NamedTuple):
    """A function that a model may call. schema: JSON schema of its arguments, an object."""

    name: str
    schema: Mapping[str, Any]


class ToolForm(ABC):
    """A form of calls: an object with a name and arguments, between texts that mark it.

    name: name of the form for users. begins: texts, one of which begins a call or a list of calls.
    end: text that ends the call or list, or "". line: text between `begins`, the call and `end`.
    listed: whether models write a JSON list of calls. bare: whether an answer that begins with a
    call needs no text of `begins`. named: whether the name is written before the object of
    arguments, in place of an object with both. key: key of the arguments. many: whether an answer
    may have several calls.
    """

    name: ClassVar[str]
    begins: ClassVar[tuple[str, ...]]
    end: ClassVar[str] = ""
    line: ClassVar[str] = ""
    listed: ClassVar[bool] = False
    bare: ClassVar[bool] = False
    named: ClassVar[bool] = False
    key: ClassVar[str] = "arguments"
    many: ClassVar[bool] = True

    @abstractmethod
    def is_shown_in(self, source: str) -> bool:
        """Return whether the source of a chat template belongs to a model with this form."""

    def offered(self, names: Names, messages: list[Any], tools: list[Any]) -> Offered:
        """Return (messages, variables of a template) with which a chat template shows tools.

        tools: in OpenAI's format. Raises InputError if the template does not show tools.
        """
        if "tools" not in names.variables:
            raise InputError(NO_TOOLS)
        return messages, {"tools": tools}

    def new_id(self) -> str:
        """Return an id for a call."""
        return f"call_{token_hex(12)}"

    def written(self, content: str, calls: Sequence[Mapping[str, Any]]) -> str:
        """Return a content followed by calls in OpenAI's format, as the model writes them.

        Raises InputError for calls of another format.
        """
        objects = [self._object(*_name_and_arguments(call)) for call in calls]
        if self.listed:
            objects = [f"[{', '.join(objects)}]"]
        begin, line = "" if self.bare else self.begins[0], self.line
        texts = [f"{begin}{line}{each}{line}{self.end}" for each in objects]
        return f"{content}{line if content else ''}" + ("; " if self.bare else line).join(texts)

    def _object(self, name: str, arguments: str) -> str:
        return f'{{"name": {json.dumps(name)}, "{self.key}": {arguments}}}'


def _name_and_arguments(call: Mapping[str, Any]) -> tuple[str, str]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InputError(
            "messages: expected tool_calls such as {'id': '1', 'type': 'function', 'function': "
            f"{{'name': 'f', 'arguments': '{{}}'}}}}, got {shown(call)}"
        )
    arguments = function.get("arguments") or "{}"
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return function["name"], arguments

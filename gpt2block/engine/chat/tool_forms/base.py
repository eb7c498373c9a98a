"""`ToolForm`: the form in which a family of models writes calls of tools.

Source: Hugging Face, "Tool use" (Chat templates); vLLM, "Tool Calling".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from secrets import token_hex
from typing import Any, NamedTuple

from gpt2block.engine.chat.messages import TemplateNames, continued
from gpt2block.engine.chat.tool_forms.members import Members
from gpt2block.errors import InputError, shown

NO_TOOLS = (
    "tools: the chat template of this model reads no tools: leave them out, set tool_choice to "
    '"none", or start the server with --tool-form general'
)
VARIABLES = ("tools", "xml_tools")  # variables from which templates read tools
DESCRIPTION = """You may call functions. These functions are available:
{tools}
To call a function, write its name and its arguments as JSON in this form:
{call}"""
Offered = tuple[list[Any], dict[str, Any]]


class Tool(NamedTuple):
    """A function that a model may call. schema: JSON schema of its arguments, an object."""

    name: str
    schema: Mapping[str, object]


@dataclass(frozen=True)
class ToolForm:
    """A form of calls: an object with a name and arguments, between texts that mark it.

    name: name of the form for users. begins: texts, one of which begins a call or a list of calls.
    end: text that ends the call or list, or "". line: text between `begins`, the call and `end`.
    listed: texts before, between and after the calls of a list; (): each call has its own `begins`
    and `end`. bare: whether an answer that begins with a call needs no text of `begins`. named:
    whether the name is written before the object of arguments, in place of an object with both.
    key: key of the arguments. members: how arguments are written one by one; None: as a JSON
    object. many: whether an answer may have several calls. short_ids: whether ids of calls must
    have 9 letters and digits.

    shown: lists of texts; the source of a chat template shows the form if it has all texts of a
    list and none of `unless`. general: whether the form is for models that were not trained to call
    functions. A system message then describes the tools and the form, whatever the template reads.
    """

    name: str
    begins: tuple[str, ...]
    end: str = ""
    line: str = ""
    listed: tuple[str, ...] = ()
    bare: bool = False
    named: bool = False
    key: str = "arguments"
    members: Members | None = None
    many: bool = True
    short_ids: bool = False
    shown: tuple[tuple[str, ...], ...] = ()
    unless: tuple[str, ...] = ()
    general: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts around names and arguments, which are special tokens of some tokenizers."""
        quotes = self.members.quotes if self.members and self.members.bare else ()
        return (*self.begins, self.end, *(("[CALL_ID]", "[ARGS]") if self.named else ()), *quotes)

    def is_shown_in(self, source: str) -> bool:
        """Return whether the source of a chat template belongs to a model with this form."""
        has = source.__contains__
        return any(all(map(has, texts)) for texts in self.shown) and not any(map(has, self.unless))

    def offered(self, names: TemplateNames, messages: list[Any], tools: list[Any]) -> Offered:
        """Return (messages, variables of a template) with which a chat template shows tools.

        tools: in OpenAI's format. Raises InputError if the template does not show tools.
        """
        if self.general:
            example = {"function": {"name": "f", "arguments": {"a": 1}}}
            text = DESCRIPTION.format(tools=_text(tools), call=self.written("", [example]))
            return _with_system(messages, lambda first: continued(first, text, "\n\n")), {}
        for variable in VARIABLES:
            if variable in names.variables:
                return messages, {variable: tools}
        if not reads_tools(names):
            raise InputError(NO_TOOLS)
        functions = _text([tool["function"] for tool in tools])
        return _with_system(messages, lambda first: {**first, "tools": functions}), {}

    def new_id(self) -> str:
        """Return an id for a call."""
        return token_hex(5)[:9] if self.short_ids else f"call_{token_hex(12)}"

    def written(self, content: str, calls: Sequence[Mapping[str, object]]) -> str:
        """Return a content followed by calls in OpenAI's format, as the model writes them.

        Raises InputError for calls of another format.
        """
        objects = [self._object(*_name_and_arguments(call)) for call in calls]
        if self.listed:
            first, between, last = self.listed
            objects = [f"{first}{between.join(objects)}{last}"]
        begin, line = "" if self.bare else self.begins[0], self.line
        texts = [f"{begin}{line}{each}{line}{self.end}" for each in objects]
        return f"{content}{line if content else ''}" + ("; " if self.bare else line).join(texts)

    def head(self, name: str) -> str:
        """Return the text of a call before its arguments."""
        if self.members:
            return name.join(self.members.name)
        if self.named:
            return f"{json.dumps(name)[1:-1]}[ARGS]"
        return f'{{"name": {json.dumps(name)}, "{self.key}": '

    def _object(self, name: str, arguments: str) -> str:
        if self.members:
            return self.members.written(name, arguments)
        return f"{self.head(name)}{arguments}{'' if self.named else '}'}"


def reads_tools(names: TemplateNames) -> bool:
    """Return whether a template reads tools: from a variable, or from a system message's field."""
    return "tools" in names.fields or not {*VARIABLES}.isdisjoint(names.variables)


def _with_system(messages: list[Any], changed: Callable[[Any], Any]) -> list[Any]:
    """Return messages whose first system message is `changed`; without any, an empty one is."""
    at = next((i for i, each in enumerate(messages) if each["role"] == "system"), None)
    if at is None:
        return [changed({"role": "system", "content": ""}), *messages]
    return [*messages[:at], changed(messages[at]), *messages[at + 1 :]]


def _text(tools: list[Any]) -> str:
    return json.dumps(tools, ensure_ascii=False)


def _name_and_arguments(call: Mapping[str, object]) -> tuple[str, str]:
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

"""The tools of a chat request: how a prompt shows them, and calls of them in answers.

Source: OpenAI, "API reference" (Chat Completions); "Function calling".
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from gpt2block.chat.messages import checked
from gpt2block.chat.template import ChatTemplate
from gpt2block.chat.tool_forms import FORMS
from gpt2block.chat.tool_forms.base import NO_TOOLS, Tool, ToolForm
from gpt2block.chat.tool_forms.grammar import closed, lark
from gpt2block.chat.tool_forms.reading import CallReader
from gpt2block.errors import InputError, require
from gpt2block.grammars import Grammar
from gpt2block.serve.answers import AnswerChoice, ChatForm, TextOffsets
from gpt2block.serve.protocol import ApiError, ChatRequest, NamedChoice, ToolFields
from gpt2block.tokenizers.encoding import Encoding, special_id

ANY_OBJECT: dict[str, Any] = {"type": "object"}
UNKNOWN_FORM = "tools: the chat template does not show the form in which this model writes calls"
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request, and how the model may call them.

    given: the tools that the prompt shows. allowed: the tools that may be called. required: whether
    the answer must be a call. parallel: whether it may have several calls.
    """

    form: ToolForm
    given: Sequence[ToolFields]
    allowed: Sequence[ToolFields]
    required: bool
    parallel: bool

    @classmethod
    def of(cls, given: ChatRequest, template: ChatTemplate) -> ToolUse | None:
        """Return the ToolUse of a request, None if it has no tools that may be called.

        Raises ApiError if the form in which the model writes calls is not known.
        """
        choice, tools = given.tool_choice, given.tools or ()
        if not tools or choice == "none":
            return None
        place, rule = given.rule()
        if rule:
            field = place.partition(".")[0]
            raise ApiError(400, f'{field}: expected tool_choice "none" with it', field)
        form = template.tool_form
        if form is None:
            told = f"{UNKNOWN_FORM}: start the server with --tool-form {' or '.join(FORMS)}"
            reads = "tools" in template.names.variables
            raise ApiError(400, told if reads else NO_TOOLS, "tools")
        only = choice.function.name if isinstance(choice, NamedChoice) else None
        return cls(
            form,
            tools,
            [tool for tool in tools if only in (None, tool.name)],
            choice == "required" or only is not None,
            only is None and given.parallel_tool_calls is not False,
        )

    @property
    def held(self) -> bool:
        """Whether the answer is held to a grammar."""
        strict = any(tool.function.strict for tool in self.allowed)
        return self.required or strict or not self.parallel

    def offered(
        self, template: ChatTemplate, messages: list[Any], arguments: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return the messages and the arguments with which the template shows the tools."""
        checked(messages)
        tools = [_as_shown(tool) for tool in self.given]
        messages, more = self.form.offered(template.names, messages, tools)
        if twice := [name for name in more if name in arguments]:
            problem = f"chat_template_kwargs: expected no {twice[0]} beside the field tools"
            raise ApiError(400, problem, "chat_template_kwargs")
        return messages, {**arguments, **more}

    def grammar(self, encoding: Encoding) -> Grammar | None:
        """Return the grammar of the answer, which is not compiled yet; None if it has none.

        Raises ApiError for a schema that cannot be part of a grammar.
        """
        if not self.held:
            return None
        require("tool_choice, strict or parallel_tool_calls: false", "tools", "llguidance")
        tools = [self._tool(tool) for tool in self.allowed]
        special = partial(_special_id, encoding)
        made = Grammar.unchecked(
            grammar=lark(self.form, tools, self.required, self.parallel, special)
        )
        places = (f".{self.given.index(tool)}.function.parameters" for tool in self.allowed)
        texts = (json.dumps(tool.schema) for tool in tools)
        return made and replace(made, name="tools", schemas=(*zip(places, texts, strict=True),))

    def _tool(self, tool: ToolFields) -> Tool:
        if not self.required and not tool.function.strict:
            return Tool(tool.name, ANY_OBJECT)
        schema = closed(tool.function.parameters or NO_PARAMETERS)
        try:
            Grammar.unchecked(schema=schema)
        except InputError as error:
            place = f"tools.{self.given.index(tool)}.function.parameters"
            problem = str(error).removeprefix("schema: ")
            raise ApiError(400, f"{place}: {problem}", "tools") from None
        return Tool(tool.name, schema)


def _as_shown(tool: ToolFields) -> dict[str, Any]:
    """Return a tool as chat templates read it; `strict` is for the server alone."""
    function = tool.function.model_dump(exclude_none=True, exclude={"strict"})
    parameters = tool.function.parameters or NO_PARAMETERS
    return {"type": "function", "function": {**function, "parameters": parameters}}


def _special_id(encoding: Encoding, text: str) -> int | None:
    return special_id(encoding, text) if text in encoding.special_tokens_set else None


class ToolChatForm(ChatForm):
    """The format of /v1/chat/completions for answers that may have calls of tools."""

    def __init__(self, model: str, encoding: Encoding | None, use: ToolUse) -> None:
        super().__init__(model, encoding)
        names = frozenset(tool.name for tool in use.allowed)
        self._tool_form = use.form
        # index of the choice → its reader
        self._readers = defaultdict[int, CallReader](partial(CallReader, use.form, names, use.held))

    def choice(self, index: int, choice: AnswerChoice, logprobs: bool) -> dict[str, Any]:
        content, calls, choice = self._read(index, choice, True)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message |= {"content": content or None, "tool_calls": calls}
        for call in calls:
            del call["index"]
        return self._told({"index": index, "message": message}, choice, logprobs)

    def delta(
        self, index: int, part: AnswerChoice, logprobs: bool, offsets: TextOffsets
    ) -> dict[str, Any]:
        content, calls, part = self._read(index, part, part.reason is not None)
        new: dict[str, Any] = {"content": content} if content else {}
        if calls:
            new["tool_calls"] = calls
        return self._told({"index": index, "delta": new}, part, logprobs)

    def is_empty(self, delta: dict[str, Any]) -> bool:
        return not delta["delta"] and delta["finish_reason"] is None

    def _read(
        self, index: int, part: AnswerChoice, final: bool
    ) -> tuple[str, list[dict[str, Any]], AnswerChoice]:
        """Return (content, new entries of tool_calls, the part with the reason of its end)."""
        reader, content, calls = self._readers[index], "", dict[int, dict[str, Any]]()
        for each in reader.read(part.text, final):
            if isinstance(each, str):
                content += each
                continue
            call = calls.setdefault(each.call, {"index": each.call, "function": {}})
            if each.name is not None:
                head = {"index": each.call, "id": self._tool_form.new_id(), "type": "function"}
                call = calls[each.call] = {**head, "function": {"name": each.name}}
            function = call["function"]
            function["arguments"] = function.get("arguments", "") + each.arguments
        if part.reason == "stop" and reader.count and not reader.cut:
            part = replace(part, reason="tool_calls")
        return content, [*calls.values()], part

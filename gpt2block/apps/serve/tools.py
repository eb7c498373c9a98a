"""The tools of a chat request: how a prompt shows them, and calls of them in answers.

Source: OpenAI, "API reference" (Chat Completions); "Function calling".
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from gpt2block.apps.serve.answers import AnswerChoice, ChatForm
from gpt2block.apps.serve.protocol import ChatRequest, JsonObject, NamedChoice, ToolFields, invalid
from gpt2block.engine.chat.messages import checked
from gpt2block.engine.chat.template import ChatTemplate
from gpt2block.engine.chat.thinking import Thinking
from gpt2block.engine.chat.tool_forms import FORMS
from gpt2block.engine.chat.tool_forms.base import Tool, ToolForm
from gpt2block.engine.chat.tool_forms.grammar import closed, lark
from gpt2block.engine.chat.tool_forms.reading import CallPart, CallReader, Texts, Thought
from gpt2block.engine.generation.sequences import Sequences
from gpt2block.engine.grammars.grammar import Grammar
from gpt2block.errors import InputError, require
from gpt2block.files.tokenizers.encoding import Encoding, special_id

UNKNOWN_FORM = "tools: the chat template does not show the form in which this model writes calls"
# The field of a message in which each part of an answer is sent
KINDS: dict[type, str] = {str: "content", Thought: "reasoning_content", CallPart: "tool_calls"}
NO_PARAMETERS: JsonObject = {"type": "object", "properties": {}}


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request, and how the model may call them.

    given: the tools that the prompt shows. allowed: the tools that may be called. required: whether
    the answer must be a call. parallel: whether it may have several calls. format: place of a JSON
    schema in the request, and the schema, which a text follows if the answer has no call. thinking:
    as for CallReader.
    """

    form: ToolForm
    given: Sequence[ToolFields]
    allowed: Sequence[ToolFields]
    required: bool
    parallel: bool
    format: tuple[str, Any] | None
    thinking: Thinking | None = None

    @classmethod
    def of(cls, request: ChatRequest, template: ChatTemplate) -> ToolUse | None:
        """Return the ToolUse of a request, None if it has no tools that may be called.

        Raises ApiError if the form in which the model writes calls is not known.
        """
        choice, tools = request.tool_choice, request.tools or ()
        if not tools or choice == "none":
            return None
        place, rule = request.rule()
        if request.structured_outputs is not None:
            raise invalid('structured_outputs: expected tool_choice "none" with it')
        form = template.tool_form
        if form is None:
            raise invalid(f"{UNKNOWN_FORM}: start the server with --tool-form {' or '.join(FORMS)}")
        only = choice.function.name if isinstance(choice, NamedChoice) else None
        use = cls(
            form,
            tools,
            [tool for tool in tools if only in (None, tool.name)],
            choice == "required" or only is not None,
            only is None and request.parallel_tool_calls is not False,
            (place, rule["schema"]) if rule else None,
        )
        if use.held_by:
            request.check_ends(use.held_by)
        return use

    @property
    def held_by(self) -> str:
        """The field because of which the answer is held to a grammar; "" if it is not."""
        strict = self.form.general or any(tool.function.strict for tool in self.allowed)
        reasons = {"tool_choice": self.required, "response_format": self.format,
                   "parallel_tool_calls": not self.parallel, "tools": strict}  # fmt: skip
        return next((field for field, holds in reasons.items() if holds), "")

    @property
    def texts(self) -> Texts:
        """Return where an answer may have text, as for CallReader."""
        return "none" if self.required else "instead" if self.format else "around"

    def offered(
        self, template: ChatTemplate, messages: list[object], arguments: JsonObject
    ) -> tuple[list[object], JsonObject]:
        """Return the messages and the arguments with which the template shows the tools."""
        checked(messages)
        tools = [_as_shown(tool) for tool in self.given]
        messages, more = self.form.offered(template.names, messages, tools)
        if twice := [name for name in more if name in arguments]:
            raise invalid(f"chat_template_kwargs: expected no {twice[0]} beside the field tools")
        return messages, {**arguments, **more}

    def grammar(self, encoding: Encoding) -> Grammar | None:
        """Return the grammar of the answer, which is not compiled yet; None if it has none.

        Raises ApiError for a schema that cannot be part of a grammar.
        """
        if not self.held_by:
            return None
        require(f"a grammar of tool calls ({self.held_by})", "tools", "llguidance")
        tools = [self._tool(tool) for tool in self.allowed]
        special, format = partial(_special_id, encoding), self.format and _checked(*self.format)
        options = (special, format, self.thinking)
        text = lark(self.form, tools, self.required, self.parallel, *options)
        schemas = [(self._place(tool), json.dumps(grammar.schema))
                   for tool, grammar in zip(self.allowed, tools, strict=True)]  # fmt: skip
        if self.format:
            schemas.append((self.format[0], json.dumps(format)))
        grammar = Grammar.unchecked(grammar=text)
        return grammar and replace(grammar, name="tools", schemas=tuple(schemas))

    def _place(self, tool: ToolFields) -> str:
        return f"tools.{self.given.index(tool)}.function.parameters"

    def _tool(self, tool: ToolFields) -> Tool:
        if not (self.required or tool.function.strict or self.form.general):
            return Tool(tool.name, {"type": "object"})
        parameters = closed(tool.function.parameters or NO_PARAMETERS)
        return Tool(tool.name, _checked(self._place(tool), parameters))


def _checked(place: str, schema: Any) -> Mapping[str, Any]:
    """Return a schema. Raises ApiError, with its place, for parts that are not supported."""
    try:
        Grammar.unchecked(schema=schema)
    except InputError as error:
        raise invalid(f"{place}: {str(error).removeprefix('schema: ')}") from None
    found: Mapping[str, object] = json.loads(schema) if isinstance(schema, str) else schema
    return {} if schema is True else found


def _as_shown(tool: ToolFields) -> JsonObject:
    """Return a tool as chat templates read it; `strict` is for the server alone."""
    function = tool.function.model_dump(exclude_none=True, exclude={"strict"})
    parameters = tool.function.parameters or NO_PARAMETERS
    return {"type": "function", "function": {**function, "parameters": parameters}}


def _special_id(encoding: Encoding, text: str) -> int | None:
    return special_id(encoding, text) if text in encoding.special_tokens_set else None


class ToolChatForm(ChatForm):
    """The format of /v1/chat/completions for answers that may have calls of tools, or thinking.

    thinking: as for CallReader. reasons: whether answers contain the thinking.
    """

    def __init__(
        self,
        model: str,
        encoding: Encoding | None,
        use: ToolUse | None,
        thinking: Thinking | None,
        reasons: bool,
    ) -> None:
        super().__init__(model, encoding)
        self._use, self._reasons = use, reasons
        reader = partial(CallReader, None, {}, thinking=thinking)
        if use is not None:
            schemas = {tool.name: tool.function.parameters or NO_PARAMETERS for tool in use.allowed}
            held = bool(use.held_by)
            reader = partial(CallReader, use.form, schemas, held, use.texts, thinking)
        self._readers = defaultdict[int, CallReader](reader)  # index of the choice → its reader

    def choice(self, index: int, choice: AnswerChoice, logprobs: bool) -> JsonObject:
        deltas, choice = self._read(index, choice, True)
        content, thought = (
            "".join(each.get(name, "") for each in deltas)
            for name in ("content", "reasoning_content")
        )
        calls = [call for each in deltas for call in each.get("tool_calls", ())]
        message: JsonObject = {"role": "assistant", "content": content, "refusal": None}
        if thought:
            message["reasoning_content"] = thought
        if calls or (self._use and self._use.required):
            message["content"] = content or None
        if calls:
            message["tool_calls"] = calls
        for call in calls:
            del call["index"]
        return self._filled({"index": index, "message": message}, choice, logprobs)

    def usage_details(self, sequences: Sequences) -> JsonObject:
        thoughts = {n: reader.thoughts for n, reader in self._readers.items() if reader.thoughts}
        count = sum(sequences[n].tokens_within(ranges) for n, ranges in thoughts.items())
        return {"completion_tokens_details": {"reasoning_tokens": count}} if count else {}

    def _read(
        self, index: int, part: AnswerChoice, final: bool
    ) -> tuple[list[JsonObject], AnswerChoice]:
        reader, deltas = self._readers[index], list[JsonObject]()
        for each in reader.read(part.text, final):
            if isinstance(each, Thought) and not self._reasons:
                continue
            kind = KINDS[type(each)]
            if not deltas or kind not in deltas[-1]:
                deltas.append({kind: [] if isinstance(each, CallPart) else ""})
            if isinstance(each, CallPart):
                self._add(deltas[-1][kind], each)
            else:
                deltas[-1][kind] += each if isinstance(each, str) else each.text
        if part.reason == "stop" and reader.count and not reader.cut:
            part = replace(part, reason="tool_calls")
        return deltas, part

    def _add(self, calls: list[JsonObject], part: CallPart) -> None:
        """Add a part of a call to the entries of tool_calls, of which it may continue the last."""
        if part.name is not None and self._use is not None:
            id, function = self._use.form.new_id(), {"name": part.name, "arguments": ""}
            calls.append({"index": part.call, "id": id, "type": "function", "function": function})
        elif not calls:
            calls.append({"index": part.call, "function": {"arguments": ""}})
        calls[-1]["function"]["arguments"] += part.arguments

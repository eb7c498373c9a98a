"""Requests to /v1/messages and /v1/messages/count_tokens as chat requests, and /v1/models.

Source: Anthropic, "API reference" (Messages, Count tokens in a Message, Models, Versions). Version
2026-10-21 has no temperature, top_p and top_k, which this server accepts in both versions.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timezone
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from gpt2block.apps.serve.protocol import (
    ANYTHING,
    MAX_NEW,
    Body,
    Bounded,
    Fields,
    JsonObject,
    SamplingFields,
    invalid,
)

THINKS = "enable_thinking"  # variable with which chat templates turn thinking on and off
# Regular expressions of names in errors about the chat request → names in the given request
MESSAGE_FIELDS = {
    "response_format(.json_schema)?": "output_config.format",
    "stop": "stop_sequences",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "continue_final_message": "messages",
    r"tools\.([0-9]+)\.function\.parameters": r"tools.\1.input_schema",
    r"tools\.([0-9]+)\.function": r"tools.\1",
}
# Fields that chat requests have, too
SAME = {"model", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stream",
        "receipt"}  # fmt: skip
FUNCTION = {"name", "description", "parameters", "strict"}  # fields of tools that chats have, too
CHOICES = {"auto": "auto", "any": "required", "none": "none"}  # types of tool_choice, as in chats


class CachedFields(Fields):
    """Base class of objects with a mark for a cache of prompts, which has no effect."""

    cache_control: object = None


class TextBlock(CachedFields):
    type: Literal["text"]
    text: str
    citations: Annotated[list[object] | None, Field(max_length=0)] = None


class ThinkingBlock(CachedFields):
    type: Literal["thinking"]
    thinking: str
    signature: object = None


class ToolUseBlock(CachedFields):
    type: Literal["tool_use"]
    id: str
    name: str
    input: JsonObject
    caller: object = None


class ToolResultBlock(CachedFields):
    """The result of a tool. is_error has no effect: the content describes the error."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[TextBlock] = ""
    is_error: bool | None = None


UserBlock = Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")]
AssistantBlock = Annotated[TextBlock | ThinkingBlock | ToolUseBlock, Field(discriminator="type")]


class SystemMessage(Fields):
    role: Literal["system"]
    content: str | list[TextBlock]


class UserMessage(Fields):
    role: Literal["user"]
    content: str | list[UserBlock]


class AssistantMessage(Fields):
    role: Literal["assistant"]
    content: str | list[AssistantBlock]


Message = Annotated[SystemMessage | UserMessage | AssistantMessage, Field(discriminator="role")]


class ClientTool(CachedFields):
    """A tool that the client runs. eager_input_streaming has no effect."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    parameters: JsonObject = Field(alias="input_schema")
    strict: bool | None = None
    eager_input_streaming: bool | None = None


class ToolChoiceFields(Fields):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingFields(Fields):
    """The field thinking. budget_tokens has no effect: max_tokens limits thinking, too."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1024)
    display: Literal["summarized"] | None = None


class FormatFields(Fields):
    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")


class OutputFields(Fields):
    format: FormatFields | None = None


class CountRequest(Body):
    """The body of a request to /v1/messages/count_tokens."""

    neutral: ClassVar[Mapping[str, object]] = {
        **dict.fromkeys(("cache_control", "metadata"), ANYTHING),
        **{"service_tier": ("auto", "standard_only"), "speed": ("standard",), "mcp_servers": ([],)},
        **dict.fromkeys(("container", "context_management", "diagnostics", "inference_geo"), ()),
    }
    model: str
    messages: Annotated[list[Message], Bounded] = Field(min_length=1)
    system: Annotated[str | list[TextBlock] | None, Bounded] = None
    tools: Annotated[list[ClientTool] | None, Bounded] = None
    tool_choice: ToolChoiceFields | None = None
    thinking: ThinkingFields | None = None
    output_config: OutputFields | None = None

    def chat_body(self, variables: Collection[str]) -> JsonObject:
        """Return the body of the chat request that has the same answer.

        variables: names of the variables that the chat template reads. Raises ApiError for a
        conversation that ends with a call, and for thinking that the template cannot turn on.
        """
        messages, choice, thinking = self._chat_messages(), self.tool_choice, self.thinking
        if messages[-1].get("tool_calls"):
            raise invalid("messages: expected a tool_result for each tool_use, got none at the end")
        if choice and (choice.name is not None) != (choice.type == "tool"):
            raise invalid('tool_choice: expected a name with the type "tool", and only with it')
        switch = None
        if thinking and thinking.type != "adaptive" and THINKS in variables:
            switch = {THINKS: thinking.type == "enabled"}
        elif thinking and thinking.type == "enabled":
            raise invalid(f"thinking: expected none, as the chat template reads no {THINKS}")
        format = self.output_config and self.output_config.format
        given = self.model_dump(include=SAME)
        body = {
            **given,
            "messages": messages,
            "continue_final_message": messages[-1]["role"] == "assistant" or None,
            "stream_options": {"include_usage": True} if given.get("stream") else None,
            "tools": [_function(**tool.model_dump(include=FUNCTION, exclude_none=True))
                      for tool in self.tools or ()] or None,
            "tool_choice": choice and (CHOICES.get(choice.type) or _function(name=choice.name)),
            "parallel_tool_calls": False if choice and choice.disable_parallel_tool_use else None,
            "response_format": format and {
                "type": "json_schema", "json_schema": {"schema": format.schema_}},
            "chat_template_kwargs": switch,
        }  # fmt: skip
        return {name: value for name, value in body.items() if value is not None}

    def _chat_messages(self) -> list[JsonObject]:
        """Return the messages of the chat. Results of tools become messages of their own."""
        system = [] if self.system is None else [SystemMessage(role="system", content=self.system)]
        found = list[JsonObject]()
        for message in (*system, *self.messages):
            first, content = len(found), message.content
            whole = TextBlock(type="text", text=content if isinstance(content, str) else "")
            for block in [whole] if isinstance(content, str) else content or [whole]:
                if isinstance(block, ToolResultBlock):
                    result = {"tool_call_id": block.tool_use_id, "content": _text(block.content)}
                    found.append({"role": "tool", **result})
                    continue
                if len(found) == first or found[-1]["role"] == "tool":
                    found.append({"role": message.role, "content": ""})
                if isinstance(block, ToolUseBlock):
                    call = _function(name=block.name, arguments=json.dumps(block.input))
                    found[-1].setdefault("tool_calls", []).append({"id": block.id, **call})
                elif isinstance(block, TextBlock):
                    found[-1]["content"] += block.text
                else:
                    before = found[-1].get("reasoning_content", "")
                    found[-1]["reasoning_content"] = before + block.thinking
        return found


class MessagesRequest(CountRequest, SamplingFields):
    """The body of a request to /v1/messages. Additions: min_p, seed and receipt."""

    max_tokens: int = Field(ge=1, le=MAX_NEW)
    stop: list[str] | None = Field(None, alias="stop_sequences")
    stream: bool | None = False
    temperature: float | None = Field(1.0, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    receipt: bool | None = False


def model_list(names: Sequence[str], created: int, n_ctx: int) -> JsonObject:
    """Return the object of /v1/models. created: seconds since 1970."""
    at = datetime.fromtimestamp(created, timezone.utc).isoformat()
    facts = {"type": "model", "created_at": at, "lifecycle": "active", "max_input_tokens": n_ctx}
    data = [{"id": name, "display_name": name, **facts} for name in names]
    return {"data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]}


def _text(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content)


def _function(**fields: object) -> JsonObject:
    return {"type": "function", "function": fields}

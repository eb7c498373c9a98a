"""Requests to /v1/responses, converted to requests of /v1/chat/completions.

Responses are stateless: a request has the whole conversation in `input`. Source: OpenAI, "API
reference" (Responses).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

from pydantic import Field

from gpt2block.apps.serve.protocol import (
    NEUTRAL,
    ApiError,
    Fields,
    JsonObject,
    Messages,
    NewTokens,
    SamplingFields,
    Variables,
    invalid,
    refused,
)
from gpt2block.errors import InputError, shown
from gpt2block.sampling import MAX_ALTERNATIVES

LOGPROBS = "message.output_text.logprobs"
# Values of `include`. Except for the first, they concern items that no answer of this server has.
Included = Literal[
    "message.output_text.logprobs", "reasoning.encrypted_content", "file_search_call.results",
    "web_search_call.results", "web_search_call.action.sources", "code_interpreter_call.outputs",
    "message.input_image.image_url", "computer_call_output.output.image_url",
]  # fmt: skip
# Names of ChatRequest's fields in errors → names of the fields of ResponsesRequest
FIELDS = {"messages": "input", "response_format.json_schema": "text.format",
          "response_format": "text.format",
          "max_completion_tokens": "max_output_tokens"}  # fmt: skip
# Fields that chat requests have, too
SAME = ("model", "temperature", "top_p", "top_k", "min_p", "seed", "stream", "parallel_tool_calls",
        "chat_template_kwargs", "skip_special_tokens")  # fmt: skip
TEXTS = "input_text", "output_text"  # types of parts of messages
# Fields of an item of reasoning and types of their parts; the first field that is not empty is read
REASONING = ("content", "reasoning_text"), ("summary", "summary_text")
ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}


class TextFields(Fields):
    """The field `text`. format: "text", "json_object" or "json_schema" with its schema."""

    format: JsonObject | None = None
    verbosity: Literal["medium"] | None = None


class ResponsesRequest(SamplingFields):
    """The body of a request to /v1/responses.

    Additions: seed, chat_template_kwargs, skip_special_tokens, top_k and min_p.
    """

    neutral: ClassVar[Mapping[str, object]] = {
        **NEUTRAL,
        **dict.fromkeys(("store", "background"), (False,)),
        **dict.fromkeys(("previous_response_id", "conversation", "prompt", "max_tool_calls"), ()),
        "truncation": ("disabled",),
        "stream_options": ({}, {"include_obfuscation": False}),
        "reasoning": ({},),
    }
    input: str | Messages
    instructions: str | None = None
    max_output_tokens: NewTokens = None
    stream: bool | None = False
    text: TextFields | None = None
    tools: Messages | None = None
    tool_choice: str | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    include: list[Included] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_ALTERNATIVES)
    metadata: dict[str, str] | None = Field(None, max_length=16)
    user: str | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    chat_template_kwargs: Variables | None = None
    skip_special_tokens: bool | None = None

    @property
    def logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())


def chat_body(request: ResponsesRequest, thinks: bool) -> JsonObject:
    """Return the body of the chat request that has the same answer.

    Fields that the request does not have are absent. thinks: as for `messages_of`. Raises ApiError
    for items, tools and formats that a chat request cannot have.
    """
    if request.top_logprobs and not request.logprobs:
        raise invalid(f'top_logprobs: expected "{LOGPROBS}" in include with it')
    tools = [_chat_tool(tool, index) for index, tool in enumerate(request.tools or ())]
    body = {
        **{name: getattr(request, name) for name in SAME},
        "messages": messages_of(request.input, request.instructions, thinks),
        "max_completion_tokens": request.max_output_tokens,
        "stream_options": {"include_usage": True} if request.stream else None,
        "logprobs": request.logprobs or None,
        "top_logprobs": request.top_logprobs or None,
        "tools": tools or None,
        "tool_choice": _chat_choice(request.tool_choice),
        "response_format": _chat_format(request.text.format if request.text else None),
    }
    return {name: value for name, value in body.items() if value is not None}


@contextmanager
def named_as_given(fields: Collection[str], given: Mapping[str, str] = FIELDS) -> Iterator[None]:
    """Raise errors about a field of the chat request again, with the name in the given request.

    fields: names of the fields of ChatRequest. given: regular expressions of names in errors → the
    names in the given request. The position of a message in an error stays: it counts the messages
    of the chat request.
    """
    try:
        yield
    except (ApiError, InputError) as error:
        refusal = error if isinstance(error, ApiError) else refused(error, fields)
        own, message = given.get(refusal.param or "", refusal.param), refusal.message
        for name, in_given in given.items():
            message = re.sub(rf"^{name}\b", in_given, message)
        param = own and own.partition(".")[0]
        raise ApiError(refusal.status, message, param, refusal.code) from error


def messages_of(items: str | list[Any], first: str | None, thinks: bool) -> list[JsonObject]:
    """Return the messages of a chat: a system message `first`, then messages for the field `input`.

    Function calls become tool calls of the assistant's message before them; consecutive calls
    become tool calls of one message. The text of items of reasoning becomes `reasoning_content` of
    the assistant's message that follows. The text is left out if no such message follows, or if
    `thinks`, whether messages may have this field, is false.
    """
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    messages: list[JsonObject] = [] if first is None else [{"role": "system", "content": first}]
    thought = ""
    for index, item in enumerate(items):
        message, latest = _message_of(item, f"input.{index}"), messages[-1] if messages else {}
        if "tool_calls" in message and latest.get("role") == "assistant":
            calls = [*latest.get("tool_calls", ()), *message["tool_calls"]]
            message = {**messages.pop(), "tool_calls": calls}
        if "content" not in message:
            thought += message["reasoning_content"]
            continue
        if thought and thinks and message["role"] == "assistant":
            message["reasoning_content"] = message.get("reasoning_content", "") + thought
        messages.append(message)
        thought = ""
    if not messages:
        raise invalid("input: expected at least one message, got none")
    return messages


def _message_of(item: object, place: str) -> JsonObject:
    """Convert an item of `input` to a message of a chat, which has no content for reasoning."""
    fields = _present(item, place)
    kind = fields.pop("type", "message" if "role" in fields else None)
    if kind == "message":
        role, content = _values_of(fields, place, "role", "content")
        if role not in ROLES:
            raise invalid(f"{place}.role: expected {', '.join(ROLES)}, got {shown(role)}")
        return {"role": ROLES[role], "content": _content(content, f"{place}.content", *TEXTS)}
    if kind == "function_call":
        id, name, arguments = _values_of(fields, place, "call_id", "name", "arguments")
        function = {"name": name, "arguments": arguments}
        if not isinstance(arguments, str):
            raise invalid(f"{place}.arguments: expected a text, got {shown(arguments)}")
        call = {"id": id, "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if kind == "function_call_output":
        id, output = _values_of(fields, place, "call_id", "output")
        content = _content(output, f"{place}.output", *TEXTS)
        return {"role": "tool", "tool_call_id": id, "content": content}
    if kind != "reasoning":
        expected = "a message, function_call, function_call_output or reasoning"
        raise invalid(f"{place}: expected {expected}, got {shown(kind)}")
    _values_of(fields, place, others=("id", "status", "encrypted_content", *dict(REASONING)))
    found = [_content(fields.get(name, ""), f"{place}.{name}", type) for name, type in REASONING]
    text = "".join(each if isinstance(each, str) else each["text"] for each in found[0] or found[1])
    if not text and "encrypted_content" in fields:
        raise invalid(f"{place}: this server cannot decrypt this item", "invalid_encrypted_content")
    return {"reasoning_content": text}


def _content(content: object, place: str, *kinds: str) -> str | list[JsonObject]:
    """Convert the content of an item to the content of a chat message: a text, or parts of text.

    kinds: types of the parts.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(f"{place}: expected a text or a list of parts, got {shown(content)}")
    parts = []
    for index, each in enumerate(content):
        part, at = _present(each, f"{place}.{index}"), f"{place}.{index}"
        kind = part.pop("type", None)
        if kind not in kinds or not isinstance(part.get("text"), str):
            expected = f"{' or '.join(kinds)} with a text"
            raise invalid(f"{at}: expected {expected}, got {shown(each)}")
        _values_of(part, at, "text", others=("annotations", "logprobs"))
        parts.append({"type": "text", "text": part["text"]})
    return parts


def _present(item: object, place: str) -> JsonObject:
    """Return the fields of an object that are not null."""
    if not isinstance(item, dict):
        raise invalid(f"{place}: expected an object, got {shown(item)}")
    return {name: value for name, value in item.items() if value is not None}


def _values_of(
    fields: JsonObject, place: str, *needed: str, others: Collection[str] = ("id", "status")
) -> list[object]:
    """Return the values of the fields `needed`. others: fields without effect."""
    if unknown := [name for name in fields if name not in (*needed, *others)]:
        raise invalid(f"{place}.{unknown[0]}: there is no such field", "unknown_parameter")
    if missing := [name for name in needed if name not in fields]:
        raise invalid(f"{place}.{missing[0]}: expected, but missing")
    return [fields[name] for name in needed]


def _chat_tool(value: JsonObject, index: int) -> JsonObject:
    """Return a function tool in the form of chats."""
    tool = _present(value, f"tools.{index}")
    if tool.pop("type", None) != "function":
        kind = shown(value.get("type"))
        problem = f"tools.{index}: expected a function, got {kind}: this server runs no tools"
        raise invalid(problem, "unsupported_parameter")
    return {"type": "function", "function": tool}


def _chat_choice(choice: str | JsonObject | None) -> str | JsonObject | None:
    if not isinstance(choice, dict):
        return choice
    if choice.keys() != {"type", "name"} or choice["type"] != "function":
        problem = f'tool_choice: expected "auto", "none", "required" or a function, got {choice!r}'
        raise invalid(problem, "unsupported_parameter")
    return {"type": "function", "function": {"name": choice["name"]}}


def _chat_format(format: JsonObject | None) -> JsonObject | None:
    """Return text.format in the form of response_format; None for plain text."""
    if format is None or format == {"type": "text"}:
        return None
    fields = {name: value for name, value in format.items() if value is not None}
    kind = fields.pop("type", None)
    if kind == "json_schema":
        return {"type": kind, "json_schema": fields}
    if kind == "json_object" and not fields:
        return {"type": kind}
    expected = 'a type of "text", "json_object" or "json_schema"'
    raise invalid(f"text.format: expected {expected}, got {shown(format)}")

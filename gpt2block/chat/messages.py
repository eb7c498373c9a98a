"""Messages of a conversation in the forms that clients send, and as a chat template reads them.

Sources: OpenAI, "API reference" (Chat Completions); Hugging Face, "Chat templates".
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from gpt2block.checks import check_encodable
from gpt2block.errors import InputError, shown

Message = Mapping[str, Any]  # "role" and "content", and what else the template reads
EXPECTED = "expected a list of messages such as {'role': 'user', 'content': 'Hello'}"
USUAL_ROLES = ("user", "assistant")  # may be the "else" of a template that does not name them
# Fields that clients send back empty with every answer, and which are absent then.
ABSENT_IF_EMPTY = (
    "tool_calls", "refusal", "audio", "annotations", "function_call", "reasoning_content"
)  # fmt: skip


class TemplateNames(NamedTuple):
    """Names in the source of a chat template.

    fields: attributes, keys and strings. any_role: whether roles are used other than in
    comparisons, or not at all. variables: all that the template does not set itself.
    """

    fields: Collection[str]
    any_role: bool
    variables: Collection[str]


def checked(messages: Any) -> None:
    """Raise InputError unless these are messages of a conversation, for whatever template."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InputError(f"messages: {EXPECTED}, got {shown(messages)}")
    if not messages:
        raise InputError(f"messages: {EXPECTED}, got none")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InputError(f"messages: {EXPECTED}, got {shown(message)} at {index}")
        check_encodable(f"messages: content at {index}", _text(message, index))


def normalized(
    messages: Any, names: TemplateNames, arguments_as_objects: bool = True
) -> list[dict[str, Any]]:
    """Return the messages as a template with these names reads them.

    Fields that are null, and empty ones of ABSENT_IF_EMPTY, are absent. The content is a text: that
    of its parts, or empty where an assistant's message has none. Arguments of calls that are the
    text of a JSON object become this object; other text stays. Raises InputError for messages of
    another form, and for roles and fields that the template would leave out.
    """
    checked(messages)
    read = {"role", "content", "tool_call_id", *names.fields}
    found, calls = [], list[Any]()  # calls: ids that have no result yet
    for index, message in enumerate(messages):
        fields = {name: value for name, value in message.items() if not _absent(name, value)}
        fields["content"] = _text(message, index)
        role = fields["role"]
        if not (names.any_role or role in names.fields or role in USUAL_ROLES):
            _refuse(f"the chat template reads no messages with the role {shown(role)}", index)
        if unread := [name for name in fields if name not in read]:
            _refuse(f"the chat template reads no field {shown(unread[0])}: leave it out", index)
        if "tool_calls" in fields:
            given = fields["tool_calls"]
            if not isinstance(given, list) or not all(isinstance(call, Mapping) for call in given):
                _refuse(f"tool_calls: expected a list of objects, got {shown(given)}", index)
            calls = [call.get("id") for call in given]
            if arguments_as_objects:
                fields["tool_calls"] = [*map(_with_object, given)]
        if "tool_call_id" in fields and "tool_call_id" not in names.fields:
            # Such a template tells results by their order alone.
            if (id := fields.pop("tool_call_id")) not in calls[:1]:
                _refuse(f"expected the results in the order of the calls, got {shown(id)}", index)
            del calls[0]
        if arguments_as_objects and isinstance(fields.get("function_call"), Mapping):
            fields["function_call"] = _with_object(fields["function_call"])
        found.append(fields)
    return found


def _refuse(problem: str, index: int) -> NoReturn:
    raise InputError(f"messages: {problem}, at {index}")


def _absent(name: str, value: Any) -> bool:
    return value is None or (
        name in ABSENT_IF_EMPTY and not value and isinstance(value, (str, list, dict))
    )


def _text(message: Message, index: int) -> str:
    """The content of a message as a text."""
    content = message.get("content")
    if content is None and message["role"] == "assistant":
        return ""
    if isinstance(content, list):
        places = (f"at {index}, part {at} of the content" for at in range(len(content)))
        return "".join(map(_text_of_part, content, places))
    if not isinstance(content, str):
        raise InputError(f"messages: expected a text as content, got {shown(content)} at {index}")
    return content


def _text_of_part(part: Any, place: str) -> str:
    given = {n: v for n, v in part.items() if v is not None} if isinstance(part, Mapping) else {}
    text = given.pop("text", None)
    if given != {"type": "text"} or not isinstance(text, str):
        expected = "{'type': 'text', 'text': 'Hello'} without other fields"
        raise InputError(f"messages: expected {expected}, got {shown(part)} {place}")
    return text


def _with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call of a tool whose arguments are an object instead of the JSON text of one."""
    function = call.get("function")
    if isinstance(function, Mapping):
        return {**call, "function": {**function, "arguments": _object(function.get("arguments"))}}
    return {**call, "arguments": _object(call.get("arguments"))}


def _object(arguments: Any) -> Any:
    try:
        found = json.loads(arguments or "{}", object_pairs_hook=_unique)
    except (ValueError, TypeError, RecursionError):  # also integers of more than 4,300 digits
        return arguments
    return found if isinstance(found, dict) else arguments


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key comes twice")  # one of its values would be lost
    return found


def continued(message: Message, text: str) -> dict[str, Any]:
    """A message whose content goes on with a text."""
    return {**message, "content": _text(message, 0) + text}

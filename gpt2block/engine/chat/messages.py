"""Check messages in the forms that clients send, and convert them for a chat template.

Sources: OpenAI, "API reference" (Chat Completions); Hugging Face, "Chat templates".
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from gpt2block.checks import check_encodable, unique_keys
from gpt2block.errors import InputError, shown

Message = Mapping[str, Any]  # fields "role", "content", and others that the template reads
WriteCalls = Callable[[str, Sequence[Mapping[str, Any]]], str]
EXPECTED = "expected a list of messages such as {'role': 'user', 'content': 'Hello'}"
USUAL_ROLES = ("user", "assistant")  # roles that a template may handle without naming them
# Fields that clients copy from answers into messages. An empty field counts as absent.
ABSENT_IF_EMPTY = (
    "tool_calls", "refusal", "audio", "annotations", "function_call", "reasoning_content"
)  # fmt: skip


class TemplateNames(NamedTuple):
    """Names that occur in the source of a chat template.

    fields: attributes, keys and strings in the template. any_role: whether the template uses roles
    outside comparisons, or never. variables: variables that the template does not set itself.
    """

    fields: Collection[str]
    any_role: bool
    variables: Collection[str]


def checked(messages: object) -> None:
    """Raise InputError unless `messages` have a valid form; the template is not considered."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InputError(f"messages: {EXPECTED}, got {shown(messages)}")
    if not messages:
        raise InputError(f"messages: {EXPECTED}, got none")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InputError(f"messages: {EXPECTED}, got {shown(message)} at {index}")
        check_encodable(f"messages: content at {index}", _text(message, index))


def normalized(
    messages: Any,
    names: TemplateNames,
    arguments_as_objects: bool = True,
    write_calls: WriteCalls | None = None,
) -> list[dict[str, object]]:
    """Return `messages` in the form that a chat template whose source has these `names` reads.

    Null fields, and empty fields in ABSENT_IF_EMPTY, are removed. The content becomes one text,
    joined from its parts; a missing content of the assistant becomes "". Arguments of tool calls
    that are the text of a JSON object become the object; other arguments stay. If the template does
    not read tool_calls, `write_calls`(content, tool_calls) returns the content with the calls in
    it, and results become messages of the user if the template does not read their role; None: such
    messages are refused. Raises InputError for messages of another form, and for roles and fields
    that the template would ignore.
    """
    checked(messages)
    written = write_calls is not None and "tool_calls" not in names.fields
    read = {"role", "content", "tool_call_id", *names.fields, *["tool_calls"] * written}
    converted, calls = [], list[Any]()  # calls: ids of tool calls that still lack a result
    for index, message in enumerate(messages):
        fields = {name: value for name, value in message.items() if not _absent(name, value)}
        fields["content"] = _text(message, index)
        fields["role"] = _role_read(fields["role"], names, written, index)
        if unread := [name for name in fields if name not in read]:
            _refuse(f"the chat template reads no field {shown(unread[0])}: leave it out", index)
        if "tool_calls" in fields:
            items = fields["tool_calls"]
            calls = _ids_of_calls(items, index)
            if write_calls is not None and written:
                fields["content"] = write_calls(fields["content"], fields.pop("tool_calls"))
            elif arguments_as_objects:
                fields["tool_calls"] = [*map(_with_object, items)]
        if "tool_call_id" not in names.fields:
            _drop_result(fields, calls, index)
        if arguments_as_objects and isinstance(fields.get("function_call"), Mapping):
            fields["function_call"] = _with_object(fields["function_call"])
        converted.append(fields)
    return converted


def _role_read(role: str, names: TemplateNames, written: bool, index: int) -> str:
    """Return the role that the template reads in place of a role. Raises InputError for none.

    written: whether calls of tools are written into contents, so that results are the user's.
    """
    if names.any_role or role in names.fields or role in USUAL_ROLES:
        return role
    if not (written and role == "tool"):
        _refuse(f"the chat template reads no messages with the role {shown(role)}", index)
    return "user"


def _ids_of_calls(items: object, index: int) -> list[Any]:
    """Return the id of each of a message's tool calls, or None. Raises InputError."""
    if not isinstance(items, list) or not all(isinstance(call, Mapping) for call in items):
        _refuse(f"tool_calls: expected a list of objects, got {shown(items)}", index)
    ids = [call.get("id") for call in items]
    counts = Counter(str(id) for id in ids if id is not None)
    if twice := [id for id, count in counts.items() if count > 1]:
        _refuse(f"tool_calls: expected each id once, got {shown(twice[0])} again", index)
    return ids


def _drop_result(fields: dict[str, Any], calls: list[Any], index: int) -> None:
    """Remove the id of a result from its fields, and from calls. Raises InputError if not first.

    A template that does not read tool_call_id assigns results to calls by their order.
    """
    if "tool_call_id" in fields:
        if (id := fields.pop("tool_call_id")) not in calls[:1]:
            _refuse(f"expected the results in the order of the calls, got {shown(id)}", index)
        del calls[0]


def _refuse(problem: str, index: int) -> NoReturn:
    raise InputError(f"messages: {problem}, at {index}")


def _absent(name: str, value: object) -> bool:
    return value is None or (name in ABSENT_IF_EMPTY and value in ("", [], {}))


def _text(message: Message, index: int) -> str:
    """Return the content of a message as one text. Raises InputError for other content."""
    content = message.get("content")
    if content is None and message["role"] == "assistant":
        return ""
    if isinstance(content, list):
        places = (f"at {index}, part {at} of the content" for at in range(len(content)))
        return "".join(map(_text_of_part, content, places))
    if not isinstance(content, str):
        raise InputError(f"messages: expected a text as content, got {shown(content)} at {index}")
    return content


def _text_of_part(part: object, place: str) -> str:
    fields = {n: v for n, v in part.items() if v is not None} if isinstance(part, Mapping) else {}
    text = fields.pop("text", None)
    if fields != {"type": "text"} or not isinstance(text, str):
        expected = "{'type': 'text', 'text': 'Hello'} without other fields"
        raise InputError(f"messages: expected {expected}, got {shown(part)} {place}")
    return text


def _with_object(call: Mapping[str, object]) -> dict[str, object]:
    """Return a tool call whose arguments are parsed from JSON text into an object.

    The name of a function comes first, because models read the name before the arguments.
    """
    function = call.get("function")
    if isinstance(function, Mapping):
        name = {"name": function["name"]} if "name" in function else {}
        arguments = {"arguments": _object(function.get("arguments"))}
        return {**call, "function": {**name, **function, **arguments}}
    return {**call, "arguments": _object(call.get("arguments"))}


def _object(arguments: Any) -> object:
    try:
        value = json.loads(arguments or "{}", object_pairs_hook=unique_keys)
    # Bad JSON, integers of over 4,300 digits, or an InputError: a dict would drop a repeated key.
    except (ValueError, TypeError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def continued(message: Message, text: str, between: str = "") -> dict[str, object]:
    """Return a message with `text` appended to its content. between: text between both, if any."""
    content = _text(message, 0)
    return {**message, "content": f"{content}{between if content else ''}{text}"}


def read_messages(value: object) -> list[Message]:
    """Convert parsed JSON (a text, a message or a list) to a list of messages, and check them."""
    if isinstance(value, str):
        value = {"role": "user", "content": value}
    messages = [value] if isinstance(value, dict) else value
    if not isinstance(messages, list):
        raise InputError(f"expected a message, or a list of them, got {shown(value)}")
    if messages:
        checked(messages)
    return messages

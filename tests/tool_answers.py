"""Answers with tool calls in each form, and short chat templates of models that use the form."""

from __future__ import annotations

from typing import Any

from gpt2block.engine.chat.tool_forms.reading import CallPart

Example = tuple[str, str, list[tuple[str, str]]]  # an answer, its content, (name, arguments) pairs
NAMES = frozenset({"f", "g"})
EXAMPLES: dict[str, list[Example]] = {
    "hermes": [
        ("Hello", "Hello", []),
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "",
         [("f", '{"a": 1}')]),
        ('I look.\n<tool_call>\n{"name": "f", "arguments": {"a": "}"}}\n</tool_call>\n'
         '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>', "I look.",
         [("f", '{"a": "}"}'), ("g", "{}")]),
        ('<tool_call>{"name":"f","arguments":{"a":[{}]}}', "", [("f", '{"a":[{}]}')]),
        ('<tool_call>{"name": "f", "arguments": {"a": "é\\""}}</tool_call> Done <',
         " Done <", [("f", '{"a": "é\\""}')]),
        ('<tool_call>\n{"name": "f", "arguments": {"a": }}\n</tool_call>',
         '<tool_call>\n{"name": "f", "arguments": {"a": }}\n</tool_call>', []),
        ('<tool_call>\n{"name": "h", "arguments": {}}\n</tool_call>',
         '<tool_call>\n{"name": "h", "arguments": {}}\n</tool_call>', []),
        ('<tool_call>\n{"name": "f", "argum', '<tool_call>\n{"name": "f", "argum', []),
        ("a <tool_call> b <tool", "a <tool_call> b <tool", []),
        ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", '{"a": 1}')]),
        ('<tool_call>{"arguments": {}, "name": "h"}</tool_call>',
         '<tool_call>{"arguments": {}, "name": "h"}</tool_call>', []),
        ('<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
         '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', []),
        ('<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>',
         []),
    ],
    "smollm3": [
        ("<think>\n\n</think>\n<tool_call>\n"
         '{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "<think>\n\n</think>",
         [("f", '{"a": 1}')]),
        ("<code>f(1)</code>", "<code>f(1)</code>", []),
    ],
    "llama3": [
        ("Hello {x}", "Hello {x}", []),
        ('{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
        ('\n{"type": "function", "name": "f", "arguments": {"a": {}}} ', "", [("f", '{"a": {}}')]),
        ('<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', "",
         [("f", "{}"), ("g", "{}")]),
        ('Yes <|python_tag|>{"name": "g", "parameters": {}}', "Yes", [("g", "{}")]),
        ('<|python_tag|>brave_search.call(query="x")', '<|python_tag|>brave_search.call(query="x")',
         []),
        ('{"name": "Ann", "parameters": {}}', '{"name": "Ann", "parameters": {}}', []),
        ('Yes {"name": "f", "parameters": {}}', 'Yes {"name": "f", "parameters": {}}', []),
    ],
    "mistral": [
        ("Hello [TOOL", "Hello [TOOL", []),
        ('[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]', "", [("f", '{"a": 1}')]),
        ('Sure.[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "a1b2c3d4e"}, '
         '{"name": "g", "arguments": {"a": "]"}}]', "Sure.", [("f", "{}"), ("g", '{"a": "]"}')]),
        ('[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g"}]', ', {"name": "g"}]',
         [("f", "{}")]),
        ("[TOOL_CALLS] []", "[TOOL_CALLS] []", []),
    ],
    "mistral-args": [
        ('[TOOL_CALLS]f[ARGS]{"a": 1}', "", [("f", '{"a": 1}')]),
        ('Sure.[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{}[TOOL_CALLS]g[ARGS]{"a": "{"}', "Sure.",
         [("f", "{}"), ("g", '{"a": "{"}')]),
        ("[TOOL_CALLS]f[ARGS]1", "[TOOL_CALLS]f[ARGS]1", []),
    ],
    "granite": [
        ('<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]', "", [("f", '{"a": 1}')]),
        ('<tool_call>[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]', "",
         [("f", "{}"), ("g", "{}")]),
        ('<|tool_call|> [\n  {"name": "g", "arguments": {"a": null}}\n] ok', " ok",
         [("g", '{"a": null}')]),
        ("<|tool_call|>[1]", "<|tool_call|>[1]", []),
    ],
    "phi4-mini": [
        ('<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]<|/tool_call|>', "",
         [("f", '{"a": 1}')]),
        ('<|tool_call|>{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}', "",
         [("f", "{}"), ("g", "{}")]),
        ('functools[{"name": "f", "arguments": {"a": "x"}}]', "", [("f", '{"a": "x"}')]),
        ("import functools", "import functools", []),
        ("functools.cache(f)", "functools.cache(f)", []),
    ],
}  # fmt: skip
EXAMPLES["general"] = EXAMPLES["hermes"]

_TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
# For each form a template that contains the form's markers, as the models' own templates do.
TEMPLATES = {
    "hermes": "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}{% for m in messages %}"
    "{% if m.role == 'tool' %}<tool_response>{{ m.content }}</tool_response>{% else %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}",
    "smollm3": "{% if xml_tools is defined %}<tools>{% for t in xml_tools %}{{ t | string }}"
    "{% endfor %}</tools> return <tool_call>{...}</tool_call>{% endif %}{% for m in messages %}"
    "{% if m.role == 'tool' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n{% else %}"
    + _TURN + "{% endif %}{% endfor %}",
    "llama3": "{% if tools %}respond with {\"name\": n, \"parameters\": p}. {{ tools | tojson }}"
    "{% endif %}{% for m in messages %}<|start_header_id|>"
    "{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>{% if m.tool_calls %}"
    "{% if m.tool_calls | length > 1 %}{{ raise_exception('single calls only') }}{% endif %}"
    "{% set c = m.tool_calls[0].function %}"
    '{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}'
    "{% else %}{{ m.content }}{% endif %}<|eot_id|>{% endfor %}",
    "mistral": "{% for m in messages %}{% if m.role == 'user' %}{% if tools %}[AVAILABLE_TOOLS]"
    "{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST]{{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }},{{ m.tool_call_id }}[/TOOL_RESULTS]"
    "{% elif m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}{% if c.id | length != 9 %}"
    "{{ raise_exception('9 letters') }}{% endif %}{{ ', ' if not loop.first }}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "{% endfor %}]</s>{% else %}{{ m.content }}</s>{% endif %}{% endfor %}",
    "mistral-args": "{% for m in messages %}{% if m.role == 'user' %}{{ tools | tojson }}"
    "[INST]{{ m.content }}[/INST]{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}"
    "{{ m.tool_call_id }}[/TOOL_RESULTS]{% else %}{{ m.content }}{% for c in m.tool_calls %}"
    "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}</s>"
    "{% endif %}{% endfor %}",
    "granite": "{% if tools %}respond with <|tool_call|>, a list. {{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}"
    "{% endfor %}",
    "phi4-mini": "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% if m.role == 'system' and 'tools' in m %}<|tool|>{{ m.tools }}<|/tool|>{% endif %}<|end|>"
    "{% endfor %}",
    "general": "{% for m in messages %}" + _TURN + "{% endfor %}",
}  # fmt: skip


def joined(parts: list[str | CallPart]) -> tuple[str, list[tuple[str, str]]]:
    """Return the content and the calls, as (name, arguments), of parts in their order."""
    text, calls = "", list[list[str]]()
    for part in parts:
        if isinstance(part, str):
            text += part
        elif part.name is not None:
            assert part.call == len(calls)
            calls.append([part.name, part.arguments])
        else:
            calls[part.call][1] += part.arguments
    return text, [(name, arguments) for name, arguments in calls]


def call(name: str, arguments: str, id: str = "a1b2c3d4e") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}

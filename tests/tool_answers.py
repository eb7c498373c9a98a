"""Answers with tool calls in each form, and short chat templates of models that use the form."""

from __future__ import annotations

from typing import Any

from gpt2block.engine.chat.tool_forms.reading import CallPart

Example = tuple[str, str, list[tuple[str, str]]]  # an answer, its content, (name, arguments) pairs
TEXT = {"type": "string"}
SCHEMAS: dict[str, dict[str, Any]] = {
    "f": {"properties": {"s": TEXT, "t": {"anyOf": [{"$ref": "#/$defs/T"}, {"type": "null"}]}},
          "$defs": {"T": TEXT}},
    "g": {},
}  # fmt: skip
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
    "lfm2": [
        ("Hello [f(a=1)]", "Hello [f(a=1)]", []),
        ("I look.<|tool_call_start|>[f(a=1, b='x, )', c=[True, {'k': None}]), g()]"
         "<|tool_call_end|>Wait", "I look.Wait",
         [("f", '{"a": 1, "b": "x, )", "c": [true, {"k": null}]}'), ("g", "{}")]),
        (r"""<|tool_call_start|>[f(a='it\'s "\x41"', b="\u00e9\n\\d")]""", "",
         [("f", '{"a": "it\'s \\"A\\"", "b": "é\\n\\\\d"}')]),
        ("<|tool_call_start|>[f(a='it's', b=['a', \"b\"c\"])]", "",
         [("f", '{"a": "it\'s", "b": ["a", "b\\"c"]}')]),
        ("<|tool_call_start|>[f(1)]<|tool_call_end|>", "<|tool_call_start|>[f(1)]<|tool_call_end|>",
         []),
        ("<|tool_call_start|>[f(a=b)]", "<|tool_call_start|>[f(a=b)]", []),
        ("<|tool_call_start|>[h(a=1)]", "<|tool_call_start|>[h(a=1)]", []),
    ],
    "olmo3": [
        ('<function_calls>f(a={"k": [null, true]}, b="(")\ng()</function_calls>', "",
         [("f", '{"a": {"k": [null, true]}, "b": "("}'), ("g", "{}")]),
        ("Yes.\n<function_calls>\nf(a='x')\n</function_calls>\nNo", "Yes.\nNo",
         [("f", '{"a": "x"}')]),
        ("<function_calls>none</function_calls>", "<function_calls>none</function_calls>", []),
    ],
    "qwen3-coder": [
        ("I look.\n\n<tool_call>\n<function=f>\n<parameter=s>\n1\n</parameter>\n<parameter=b>\n"
         '{"k": 1}\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>'
         "\n</tool_call>", "I look.", [("f", '{"s": "1", "b": {"k": 1}}'), ("g", "{}")]),
        ("<tool_call>\n<function=f>\n<parameter=t>\n2\n</parameter>\n<parameter=u>\n"
         "True\n</parameter>\n<parameter=s>\n a\n\n</parameter>\n\n</parameter>\n</function>", "",
         [("f", '{"t": "2", "u": true, "s": " a\\n\\n</parameter>\\n"}')]),
        ("<tool_call>\n<function=f>\n<parameter=t>\nnull\n</parameter>\n</function>\n</tool_call>",
         "", [("f", '{"t": null}')]),
        ("<tool_call>\n<function=f>\n<parameter=s>\n1\n</function>",
         "<tool_call>\n<function=f>\n<parameter=s>\n1\n</function>", []),
    ],
    "gemma4": [
        ('<|tool_call>call:f{a:<|"|>x, "}<|"|>,b:[1,{k:true}],c:None}<tool_call|>'
         "<|tool_call>call:g{}<tool_call|>", "",
         [("f", '{"a": "x, \\"}", "b": [1,{"k":true}], "c": null}'), ("g", "{}")]),
        ('<|tool_call>call:f{a:x}<tool_call|>', "<|tool_call>call:f{a:x}<tool_call|>", []),
        ("call:f{a:1}", "call:f{a:1}", []),
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
    "lfm2": "{% macro v(x) %}{{ \"'\" + x + \"'\" if x is string "
    "else x | tojson if x is mapping else x }}{% endmacro %}"
    "{% if tools %}List of tools: {{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.thinking %}<think>{{ m.thinking }}</think>{% endif %}{{ m.content }}"
    "{% if m.tool_calls %}<|tool_call_start|>[{% for c in m.tool_calls %}{{ c.function.name }}("
    "{% for k, x in c.function.arguments.items() %}{{ k }}={{ v(x) }}{{ ', ' if not loop.last }}"
    "{% endfor %}){{ ', ' if not loop.last }}{% endfor %}]<|tool_call_end|>{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "olmo3": "{% if tools %}<functions>{{ tools | tojson }}</functions>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ 'environment' if m.role == 'tool' else m.role }}\n"
    "{{ m.content }}{% if m.tool_calls %}<function_calls>{% for c in m.tool_calls %}"
    "{{ c.function.name }}({% for k, x in c.function.arguments.items() %}{{ k }}={{ x | tojson }}"
    "{{ ', ' if not loop.last }}{% endfor %}){{ '\n' if not loop.last }}{% endfor %}"
    "</function_calls>{% endif %}<|im_end|>\n{% endfor %}",
    "qwen3-coder": "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls %}{{ '\n\n' if loop.first and m.content }}"
    "{{ '\n' if not loop.first }}<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for k, x in c.function.arguments.items() %}<parameter={{ k }}>\n"
    "{{ x if x is string else x | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{{ '<think>\n\n</think>\n\n' if enable_thinking is false else '<think>\n' }}{% endif %}",
    "gemma4": "{% macro v(x) %}{% if x is string %}<|\"|>{{ x }}<|\"|>{% elif x is boolean %}"
    "{{ 'true' if x else 'false' }}{% elif x is mapping %}{{ '{' }}{% for k, y in x | dictsort %}"
    "{{ k }}:{{ v(y) }}{{ ',' if not loop.last }}{% endfor %}{{ '}' }}{% elif x is sequence %}["
    "{% for y in x %}{{ v(y) }}{{ ',' if not loop.last }}{% endfor %}]{% else %}{{ x }}{% endif %}"
    "{% endmacro %}{% if enable_thinking %}<|think|>\n{% endif %}{{ tools | tojson if tools }}"
    "{% for m in messages %}<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{% if m.reasoning_content %}<|channel>thought\n{{ m.reasoning_content }}\n<channel|>"
    "{% endif %}"
    "{% for c in m.tool_calls %}<|tool_call>call:{{ c.function.name }}{{ v(c.function.arguments) }}"
    "<tool_call|>{% endfor %}{{ m.content }}<turn|>\n{% endfor %}"
    "{{ '<|turn>model\n' if add_generation_prompt }}",
    "general": "{% for m in messages %}" + _TURN + "{% endfor %}",
}  # fmt: skip

# Templates of further models: (form, template).
OTHERS = {
    "granite-4": ("hermes", "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for m in messages %}<|start_of_role|>{{ 'user' if m.role == 'tool' else m.role }}"
    "<|end_of_role|>{{ m.content }}{% for c in m.tool_calls %}{{ '\n' if not loop.first }}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|end_of_text|>\n{% endfor %}"),
    "ministral-3": ("mistral-args", "{% for m in messages %}{% if m.role == 'user' %}"
    "{{ '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' if tools }}"
    "[INST]{{ m.content }}[/INST]{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}"
    "[/TOOL_RESULTS]{% else %}{{ m.content }}{% for c in m.tool_calls %}[TOOL_CALLS]"
    "{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}</s>{% endif %}"
    "{% endfor %}"),
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

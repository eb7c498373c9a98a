"""The form of Hermes, Qwen 2.5, Qwen 3 and Granite 4: an object between <tool_call> tags.

Source: Nous Research, "Hermes Function Calling"; Qwen, "Function Calling".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from gpt2block.chat.tool_forms.base import Example, ToolForm

# Texts in templates of models that write something else than JSON between the tags.
OTHERS = ("<function=", "<arg_key>", "xml_tools")


class HermesCalls(ToolForm):
    """Calls between <tool_call> and </tool_call>, each with its own tags."""

    name = "hermes"
    begins, end, line = ("<tool_call>",), "</tool_call>", "\n"
    examples: ClassVar[Sequence[Example]] = (
        ("Hello", "Hello", ()),
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "",
         [("f", '{"a": 1}')]),
        ('I look.\n<tool_call>\n{"name": "f", "arguments": {"a": "}"}}\n</tool_call>\n'
         '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>', "I look.",
         [("f", '{"a": "}"}'), ("g", "{}")]),
        ('<tool_call>{"name":"f","arguments":{"a":[{}]}}', "", [("f", '{"a":[{}]}')]),
        ('<tool_call>{"name": "f", "arguments": {"a": "é\\""}}</tool_call> Done <',
         " Done <", [("f", '{"a": "é\\""}')]),
        ('<tool_call>\n{"name": "f", "arguments": {"a": }}\n</tool_call>',
         '<tool_call>\n{"name": "f", "arguments": {"a": }}\n</tool_call>', ()),
        ('<tool_call>\n{"name": "h", "arguments": {}}\n</tool_call>',
         '<tool_call>\n{"name": "h", "arguments": {}}\n</tool_call>', ()),
        ('<tool_call>\n{"name": "f", "argum', '<tool_call>\n{"name": "f", "argum', ()),
        ("a <tool_call> b <tool", "a <tool_call> b <tool", ()),
    )  # fmt: skip

    def is_shown_in(self, source: str) -> bool:
        return "</tool_call>" in source and not any(each in source for each in OTHERS)

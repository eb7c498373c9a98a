"""The form of Phi-4-mini: a list of calls after <|tool_call|> or `functools`.

Source: Microsoft, "Phi-4-mini-instruct" (Tool-enabled function-calling format); vLLM, "Tool
Calling" (phi4_mini_json).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from gpt2block.chat.tool_forms.base import ToolForm


class Phi4MiniCalls(ToolForm):
    """A list of calls, often without brackets for a single call and without the end tag.

    The template reads the tools, as JSON text, from the field `tools` of a system message.
    """

    name = "phi4-mini"
    begins, end, listed = ("<|tool_call|>", "functools"), "<|/tool_call|>", True
    examples = (
        ('<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]<|/tool_call|>', "",
         [("f", '{"a": 1}')]),
        ('<|tool_call|>{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}', "",
         [("f", "{}"), ("g", "{}")]),
        ('functools[{"name": "f", "arguments": {"a": "x"}}]', "", [("f", '{"a": "x"}')]),
        ("import functools", "import functools", ()),
        ("functools.cache(f)", "functools.cache(f)", ()),
    )  # fmt: skip

    def is_shown_in(self, source: str) -> bool:
        return "<|tool|>" in source or "functools[" in source

    def offered(
        self,
        variables: Collection[str],
        fields: Collection[str],
        messages: Sequence[Any],
        tools: Sequence[Mapping[str, Any]],
    ) -> tuple[Sequence[Any], dict[str, Any]]:
        if "tools" in variables or "tools" not in fields:
            return super().offered(variables, fields, messages, tools)
        text = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
        at = next((i for i, each in enumerate(messages) if each.get("role") == "system"), None)
        if at is None:
            return [{"role": "system", "content": "", "tools": text}, *messages], {}
        return [*messages[:at], {**messages[at], "tools": text}, *messages[at + 1 :]], {}

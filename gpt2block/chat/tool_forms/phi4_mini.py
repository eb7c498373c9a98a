"""The form of Phi-4-mini: a list of calls after <|tool_call|> or `functools`.

Source: Microsoft, "Phi-4-mini-instruct" (Tool-enabled function-calling format); vLLM, "Tool
Calling" (phi4_mini_json).
"""

from __future__ import annotations

import json
from typing import Any

from gpt2block.chat.tool_forms.base import Names, Offered, ToolForm


class Phi4MiniCalls(ToolForm):
    """A list of calls, often without brackets for a single call and without the end tag.

    The template reads the tools, as JSON text, from the field `tools` of a system message.
    """

    name = "phi4-mini"
    begins, end, listed = ("<|tool_call|>", "functools"), "<|/tool_call|>", True

    def is_shown_in(self, source: str) -> bool:
        return "<|tool|>" in source or "functools[" in source

    def offered(self, names: Names, messages: list[Any], tools: list[Any]) -> Offered:
        if "tools" in names.variables or "tools" not in names.fields:
            return super().offered(names, messages, tools)
        text = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
        at = next((i for i, each in enumerate(messages) if each.get("role") == "system"), None)
        if at is None:
            return [{"role": "system", "content": "", "tools": text}, *messages], {}
        return [*messages[:at], {**messages[at], "tools": text}, *messages[at + 1 :]], {}

"""The form of SmolLM3: as Hermes, with another variable of the template for the tools.

Source: Hugging Face, "SmolLM3-3B" (Agentic Usage).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from gpt2block.chat.tool_forms.hermes import HermesCalls


class SmolLM3Calls(HermesCalls):
    """Calls between <tool_call> and </tool_call>; the template reads `xml_tools`."""

    name = "smollm3"
    examples = (
        ("<think>\n\n</think>\n<tool_call>\n"
         '{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "<think>\n\n</think>",
         [("f", '{"a": 1}')]),
        ("<code>f(1)</code>", "<code>f(1)</code>", ()),
    )  # fmt: skip

    def is_shown_in(self, source: str) -> bool:
        return "xml_tools" in source

    def offered(
        self,
        variables: Collection[str],
        fields: Collection[str],
        messages: Sequence[Any],
        tools: Sequence[Mapping[str, Any]],
    ) -> tuple[Sequence[Any], dict[str, Any]]:
        if "tools" not in variables and "xml_tools" in variables:
            return messages, {"xml_tools": list(tools)}
        return super().offered(variables, fields, messages, tools)

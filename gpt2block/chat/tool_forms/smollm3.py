"""The form of SmolLM3: calls as in Hermes's form; another variable of the template has the tools.

Source: Hugging Face, "SmolLM3-3B" (Agentic Usage).
"""

from __future__ import annotations

from typing import Any

from gpt2block.chat.tool_forms.base import Names, Offered
from gpt2block.chat.tool_forms.hermes import HermesCalls


class SmolLM3Calls(HermesCalls):
    """Calls between <tool_call> and </tool_call>; the template reads `xml_tools`."""

    name = "smollm3"

    def is_shown_in(self, source: str) -> bool:
        return "xml_tools" in source

    def offered(self, names: Names, messages: list[Any], tools: list[Any]) -> Offered:
        if "tools" not in names.variables and "xml_tools" in names.variables:
            return messages, {"xml_tools": tools}
        return super().offered(names, messages, tools)

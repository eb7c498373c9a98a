"""The form of Hermes, Qwen 2.5, Qwen 3 and Granite 4: an object between <tool_call> tags.

Source: Nous Research, "Hermes Function Calling"; Qwen, "Function Calling".
"""

from __future__ import annotations

from gpt2block.chat.tool_forms.base import ToolForm

# Texts in templates of models that write something else than JSON between the tags.
OTHERS = ("<function=", "<arg_key>", "xml_tools")


class HermesCalls(ToolForm):
    """Calls between <tool_call> and </tool_call>, each with its own tags."""

    name = "hermes"
    begins, end, line = ("<tool_call>",), "</tool_call>", "\n"

    def is_shown_in(self, source: str) -> bool:
        return "</tool_call>" in source and not any(each in source for each in OTHERS)

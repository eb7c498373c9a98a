"""The form of Granite 3: a list of calls after <|tool_call|>.

Source: IBM, "Granite 3.3 language models" (Function calling); vLLM, "Tool Calling" (granite).
"""

from __future__ import annotations

from gpt2block.chat.tool_forms.base import ToolForm


class GraniteCalls(ToolForm):
    """A list of calls after <|tool_call|>, or, as Granite 3.1 writes it, after <tool_call>."""

    name = "granite"
    begins, listed = ("<|tool_call|>", "<tool_call>"), True

    def is_shown_in(self, source: str) -> bool:
        return "<|start_of_role|>" in source and "</tool_call>" not in source

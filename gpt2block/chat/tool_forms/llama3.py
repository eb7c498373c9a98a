"""The form of Llama 3.1 to 3.3: the answer is an object with "name" and "parameters".

Source: Meta, "Llama 3.1: JSON based tool calling"; "Llama 3.2: Function definitions in the prompt".
"""

from __future__ import annotations

from gpt2block.chat.tool_forms.base import ToolForm


class Llama3Calls(ToolForm):
    """Calls at the beginning of the answer or after <|python_tag|>, in order between semicolons.

    The templates accept one call in a message, and so does the grammar.
    """

    name = "llama3"
    begins, bare, many, key = ("<|python_tag|>",), True, False, "parameters"

    def is_shown_in(self, source: str) -> bool:
        return "<|start_header_id|>" in source and (
            "python_tag" in source or '"parameters": ' in source
        )

"""The forms of Mistral's models: calls after [TOOL_CALLS], in a list or one by one.

Source: Mistral AI, "mistral-common" (instruct tokenizers, versions 3 to 13).
"""

from __future__ import annotations

import json
import secrets
import string

from gpt2block.chat.tool_forms.base import ToolForm

ALPHABET = string.ascii_letters + string.digits


class MistralCalls(ToolForm):
    """A list of calls after [TOOL_CALLS] (tokenizers of versions 3 and 7)."""

    name = "mistral"
    begins, listed = ("[TOOL_CALLS]",), True

    def is_shown_in(self, source: str) -> bool:
        return "[TOOL_CALLS]" in source and "[ARGS]" not in source

    def new_id(self) -> str:
        """Return an id of 9 letters and digits, which the templates require."""
        return "".join(secrets.choice(ALPHABET) for _ in range(9))


class MistralArgsCalls(MistralCalls):
    """Calls with [TOOL_CALLS] before each name and [ARGS] before arguments (versions 11, 13)."""

    name = "mistral-args"
    listed, named = False, True

    def is_shown_in(self, source: str) -> bool:
        return "[TOOL_CALLS]" in source and "[ARGS]" in source

    def _object(self, name: str, arguments: str) -> str:
        return f"{json.dumps(name)[1:-1]}[ARGS]{arguments}"

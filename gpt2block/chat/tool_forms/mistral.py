"""The forms of Mistral's models: calls after [TOOL_CALLS], in a list or one by one.

Source: Mistral AI, "mistral-common" (instruct tokenizers, versions 3 to 13).
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Sequence
from typing import ClassVar

from gpt2block.chat.tool_forms.base import Example, ToolForm

ALPHABET = string.ascii_letters + string.digits


class MistralCalls(ToolForm):
    """A list of calls after [TOOL_CALLS] (tokenizers of versions 3 and 7)."""

    name = "mistral"
    begins, listed = ("[TOOL_CALLS]",), True
    examples: ClassVar[Sequence[Example]] = (
        ("Hello [TOOL", "Hello [TOOL", ()),
        ('[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]', "", [("f", '{"a": 1}')]),
        ('Sure.[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "a1b2c3d4e"}, '
         '{"name": "g", "arguments": {"a": "]"}}]', "Sure.", [("f", "{}"), ("g", '{"a": "]"}')]),
        ('[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g"}]', ', {"name": "g"}]',
         [("f", "{}")]),
        ("[TOOL_CALLS] []", "[TOOL_CALLS] []", ()),
    )  # fmt: skip

    def is_shown_in(self, source: str) -> bool:
        return "[TOOL_CALLS]" in source and "[ARGS]" not in source

    def new_id(self) -> str:
        """Return an id of 9 letters and digits, which the templates require."""
        return "".join(secrets.choice(ALPHABET) for _ in range(9))


class MistralArgsCalls(MistralCalls):
    """Calls with [TOOL_CALLS] before each name and [ARGS] before arguments (versions 11, 13)."""

    name = "mistral-args"
    listed, named = False, True
    examples = (
        ('[TOOL_CALLS]f[ARGS]{"a": 1}', "", [("f", '{"a": 1}')]),
        ('Sure.[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{}[TOOL_CALLS]g[ARGS]{"a": "{"}', "Sure.",
         [("f", "{}"), ("g", '{"a": "{"}')]),
        ("[TOOL_CALLS]f[ARGS]1", "[TOOL_CALLS]f[ARGS]1", ()),
    )  # fmt: skip

    def is_shown_in(self, source: str) -> bool:
        return "[TOOL_CALLS]" in source and "[ARGS]" in source

    def _object(self, name: str, arguments: str) -> str:
        return f"{json.dumps(name)[1:-1]}[ARGS]{arguments}"

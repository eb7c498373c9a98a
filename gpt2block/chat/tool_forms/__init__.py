"""The forms in which models write calls of tools into their answers.

base       a form: what is around a call, how tools get into a prompt, calls as text
reading    the calls and the other text in an answer, as it arrives
grammar    a grammar of answers whose calls fit the tools
hermes, llama3, mistral, granite, smollm3, phi4_mini: one form each, with examples
"""

from __future__ import annotations

from typing import Literal

from gpt2block.chat.tool_forms.base import ToolForm
from gpt2block.chat.tool_forms.granite import GraniteCalls
from gpt2block.chat.tool_forms.hermes import HermesCalls
from gpt2block.chat.tool_forms.llama3 import Llama3Calls
from gpt2block.chat.tool_forms.mistral import MistralArgsCalls, MistralCalls
from gpt2block.chat.tool_forms.phi4_mini import Phi4MiniCalls
from gpt2block.chat.tool_forms.smollm3 import SmolLM3Calls

FormName = Literal[
    "hermes", "smollm3", "llama3", "mistral", "mistral-args", "granite", "phi4-mini"
]  # names of forms, as on the command line

_ALL = (
    HermesCalls(), SmolLM3Calls(), Llama3Calls(), MistralCalls(), MistralArgsCalls(),
    GraniteCalls(), Phi4MiniCalls(),
)  # fmt: skip
FORMS: dict[str, ToolForm] = {form.name: form for form in _ALL}


def form_of(source: str) -> ToolForm | None:
    """Return the form of calls that the source of a chat template shows; None if it is unknown."""
    return next((form for form in _ALL if form.is_shown_in(source)), None)

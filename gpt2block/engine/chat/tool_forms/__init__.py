"""The forms in which models write calls of tools into their answers.

base       a form: what is around a call, how tools get into a prompt, calls as text
members    arguments that are written one by one, not as a JSON object
reading    the calls and the other text in an answer, as it arrives
grammar    a grammar of answers whose calls fit the tools

Sources: Nous Research, "Hermes Function Calling"; Qwen, "Function Calling"; Hugging Face,
"SmolLM3-3B" (Agentic Usage); Meta, "Llama 3.1: JSON based tool calling" and "Llama 3.2: Function
definitions in the prompt"; Mistral AI, "mistral-common" (instruct tokenizers, versions 3 to 13);
IBM, "Granite 3.3 language models" (Function calling); Microsoft, "Phi-4-mini-instruct"
(Tool-enabled function-calling format); vLLM, "Tool Calling" (granite, phi4_mini_json). `members`
names the sources of its forms.
"""

from __future__ import annotations

from typing import Any, Literal

from gpt2block.engine.chat.tool_forms.base import ToolForm
from gpt2block.engine.chat.tool_forms.members import CONSTANTS, Members

# Names of forms, as on the command line
FormName = Literal[
    "hermes", "smollm3", "llama3", "mistral", "mistral-args", "granite", "phi4-mini", "lfm2",
    "olmo3", "qwen3-coder", "gemma4", "general",
]  # fmt: skip

# Texts in templates of models that write something else than JSON between the tags of Hermes
OTHER_TAGS = ("<function=", "<arg_key>", "xml_tools")
HEADER = "<|start_header_id|>"  # begins a message in templates of Llama 3
LIST = ("[", ", ", "]")
PYTHON: Any = {"name": ("", "("), "key": ("", "="), "between": ", ", "close": ")",
               "quotes": ('"', "'")}  # fmt: skip
TAGS: Any = {"begins": ("<tool_call>",), "end": "</tool_call>", "line": "\n"}
_ALL = (
    ToolForm("hermes", **TAGS, shown=(("</tool_call>",),), unless=OTHER_TAGS),
    ToolForm("smollm3", **TAGS, shown=(("xml_tools",),)),
    # The templates of Llama 3 accept one call in a message, and so does the grammar.
    ToolForm("llama3", ("<|python_tag|>",), bare=True, many=False, key="parameters",
             shown=((HEADER, "python_tag"), (HEADER, '"parameters": '))),
    ToolForm("mistral", ("[TOOL_CALLS]",), listed=LIST, short_ids=True,
             shown=(("[TOOL_CALLS]",),), unless=("[ARGS]",)),
    ToolForm("mistral-args", ("[TOOL_CALLS]",), named=True, short_ids=True,
             shown=(("[TOOL_CALLS]", "[ARGS]"),)),
    # Granite 3.1 begins with <tool_call>.
    ToolForm("granite", ("<|tool_call|>", "<tool_call>"), listed=LIST,
             shown=(("<|start_of_role|>",),), unless=("</tool_call>",)),
    # Phi-4-mini often writes a single call without brackets, and leaves the end out.
    ToolForm("phi4-mini", ("<|tool_call|>", "functools"), "<|/tool_call|>", listed=LIST,
             shown=(("<|tool|>",), ("functools[",))),
    # Templates of LFM2 write a value of Python, templates of OLMo 3 a value of JSON.
    ToolForm("lfm2", ("<|tool_call_start|>",), "<|tool_call_end|>", listed=LIST,
             members=Members(**PYTHON, constants={v: k for k, v in CONSTANTS.items()}),
             shown=(("<|tool_call_start|>",), ("<|tool_list_start|>",),
                    ("List of tools: [", "<|im_start|>"))),
    ToolForm("olmo3", ("<function_calls>",), "</function_calls>", listed=("", "\n", ""),
             members=Members(**PYTHON), shown=(("<function_calls>",),)),
    ToolForm("qwen3-coder", **TAGS,
             members=Members(("<function=", ">\n"), ("<parameter=", ">\n"), "</function>",
                             end="\n</parameter>\n"),
             shown=(("<tool_call>", "<function=", "<parameter="),), unless=("<seed:tool_call>",)),
    ToolForm("gemma4", ("<|tool_call>",), "<tool_call|>",
             members=Members(("call:", "{"), ("", ":"), "}", ",", quotes=('<|"|>',), bare=True),
             shown=(("<|tool_call>",),)),
    ToolForm("general", **TAGS, general=True),
)  # fmt: skip
FORMS: dict[str, ToolForm] = {form.name: form for form in _ALL}


def form_of(source: str) -> ToolForm | None:
    """Return the form of calls that the source of a chat template shows; None if it is unknown."""
    return next((form for form in _ALL if form.is_shown_in(source)), None)

"""A grammar of answers whose calls fit the tools, in llguidance's dialect of Lark.

Source: guidance-ai, "Syntax of LLGuidance Grammars".
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence

from gpt2block.engine.chat.thinking import Thinking
from gpt2block.engine.chat.tool_forms.base import Tool, ToolForm
from gpt2block.engine.chat.tool_forms.member_grammar import MemberRules, schema_text

COMBINING = frozenset({"anyOf", "allOf", "oneOf", "$ref", "if", "dependentSchemas"})
ANY_TEXT = r"/(.|\n)*/"
NO_CALL = r"/[ \n\t]*([^{ \n\t](.|\n)*)?/"  # a text that does not begin with an object


def lark(
    form: ToolForm,
    tools: Sequence[Tool],
    required: bool,
    parallel: bool,
    special: Callable[[str], int | None] = lambda text: None,
    format: Mapping[str, object] | None = None,
    thinking: Thinking | None = None,
) -> str:
    """Return a grammar of the answers of a model with this form.

    required: whether the answer consists of calls only; otherwise it may be any text, in which
    everything after the beginning of a call must be a call. parallel: whether there may be several
    calls; without `required`, the answer then may also go on after a call. special: returns the id
    of a special token by its name, None if the tokenizer has no such special token. A special token
    is matched by its id, because its text would be matched by the tokens of the text only. format:
    JSON schema of a text; an answer that need not be a call is then either such a text or calls.
    thinking: as for CallReader; it may be before calls, and before a text.
    """

    def literal(text: str) -> str:
        id = special(text)
        return json.dumps(text, ensure_ascii=False) if id is None else f"<[{id}]>"

    several, thinks = parallel and form.many, thinking is not None
    texts = [each for each in form.begins if special(each) is None]
    tokens = [literal(each) for each in form.begins if each not in texts]
    text = NO_CALL if form.bare else ANY_TEXT
    heads = [f"text {token}" for token in tokens] + ["text_begin"] * bool(texts)
    rules = {
        "text": text,
        "begin": " | ".join(map(literal, form.begins)),
        "head": " | ".join(heads),
        "call": " | ".join(f"call_{index}" for index in range(len(tools))),
        "body": _body(form, several, literal),
    }
    if texts:
        rules["text_begin[lazy]"] = f"{text} ({' | '.join(map(literal, texts))})"
    for index, (name, schema) in enumerate(tools):
        if form.members:
            more = MemberRules(form.members, schema, literal, rules, f"part_{index}")
            rules[f"call_{index}"] = more.call(name)
        else:
            rules[f"call_{index}"] = _call(form, name, f"%json {schema_text(schema)}", literal)
    either = format is not None and not required
    rules |= _thoughts(thinking, literal)
    start = _start(form, required or either, several, thinks)
    if format is not None and either:
        start = f"{'thoughts ' * thinks}%json {schema_text(format)} | {start}"
    rules["start"] = f"thought ({start})" if thinking and thinking.opened else start
    return "".join(f"{name}: {rule}\n" for name, rule in rules.items())


def _thoughts(thinking: Thinking | None, literal: Callable[[str], str]) -> dict[str, str]:
    """Return the rules for thinking: before required calls (thoughts), and before any text."""
    if thinking is None:
        return {}
    begin, end, label = literal(thinking.begin), literal(thinking.end), thinking.label.strip()
    label = f" {json.dumps(label)}" if label else ""
    begins, ends = ("" if mark.startswith("<") else "[lazy]" for mark in (begin, end))
    return {
        f"begin_thought{begins}": rf"/[ \n]*/ {begin}",
        f"end_thought{ends}": f"{ANY_TEXT} {end}",
        "thought": r"end_thought /[ \n]*/",
        "thoughts": f"({begin}{label} thought)*",
        "first_thoughts": f"(begin_thought{label} end_thought)*",
    }


def _start(form: ToolForm, required: bool, several: bool, thinks: bool) -> str:
    """Return the rule for an answer. thinks: whether there may be thinking."""
    repeats = several and not form.listed
    thoughts, before = ("thoughts ", "first_thoughts ") if thinks else ("", "")
    if required:
        first = f"{thoughts}body" if form.bare else f"{thoughts}begin body"
        line = json.dumps(form.line) + " " if form.line else ""
        return f"{first} ({line}{first})*" if repeats else first
    if several:
        return f"({before}head body)* {before}text"
    answer = "text | head body" + (" | body" if form.bare else "")
    return f"{before}({answer})" if thinks else answer


def _body(form: ToolForm, several: bool, literal: Callable[[str], str]) -> str:
    """Return the rule for the text that follows the beginning of a call or a list of calls."""
    line = json.dumps(form.line) + " " if form.line else ""
    end = f"{line}{literal(form.end)}" if form.end else ""
    if not form.listed:
        return f"{line}call {end}"
    first, between, last = map(json.dumps, form.listed)
    calls = f"call ({between} call)*" if several else "call"
    # Only models that write JSON leave the end out.
    end = rf"(/\n?/ {end}){'' if form.members else '?'}" if end else ""
    return rf"/[ \n]?/ {first} {calls} {last} {end}"


def _call(form: ToolForm, name: str, arguments: str, literal: Callable[[str], str]) -> str:
    if form.named:
        id = f"({literal('[CALL_ID]')} /[a-zA-Z0-9]{{9}}/)?"
        return f"{json.dumps(name)} {id} {literal('[ARGS]')} {arguments}"
    # In the tokens of JSON, so that a text of `format` may begin with the same characters.
    head = " ".join(map(json.dumps, re.findall('[{]|"[^"]*"|[:,] ', form.head(name))))
    return f'{head} {arguments} "}}"'


def closed(schema: Mapping[str, object]) -> Mapping[str, object]:
    """Return a schema of an object that allows only listed properties unless it says otherwise.

    A schema that combines several schemas stays as it is.
    """
    lists = "properties" in schema and COMBINING.isdisjoint(schema)
    return {"additionalProperties": False, **schema} if lists else schema

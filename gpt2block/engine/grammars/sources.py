"""Translate rules to the source of a grammar in llguidance's format. Imports llguidance."""

from __future__ import annotations

import json
import re

from llguidance import LLMatcher, grammar_from

from gpt2block.checks import check_encodable, several
from gpt2block.engine.grammars.schema import JSON_FORM, incomplete, translated
from gpt2block.errors import InputError, shown

_REGEX_ERROR = re.compile(r"regex parse error:\n {4}(.*)\n {4}( *)\^.*\nerror: (.*)")


def problem_of(source: str) -> str:
    """Return a message on one line about a grammar that cannot be compiled; "" if it can."""
    is_error, messages = LLMatcher.validate_grammar_with_warnings(source)
    if is_error and (refused := _REGEX_ERROR.search(messages[0])):
        return f'"{refused[1]}": {refused[3]} at character {len(refused[2]) + 1}'
    lines = [line.strip() for line in messages[0].splitlines()] if is_error else []
    return "; ".join(line for line in lines if line.strip("^ "))


def of_schema(schema: object) -> str:
    """Return the source of a Grammar for a schema of `parsed`."""
    try:
        return LLMatcher.grammar_from_json_schema(translated(schema), JSON_FORM)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"schema: expected a JSON schema: {error}") from None


def of_regex(regex: object) -> str:
    text = _text("regex", regex)
    if problem := incomplete(text):
        raise InputError(f"regex: {problem}")
    return LLMatcher.grammar_from_regex(text)


def of_choice(choice: object) -> str:
    texts = [choice] if isinstance(choice, str) else several(choice)
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise InputError(f"choice: expected texts of at least one character, got {shown(choice)}")
    for text in texts:
        check_encodable("choice", text)
    literals = " | ".join(json.dumps(text) for text in texts)
    # A single terminal, because llguidance allows a rule at most 2,000 alternatives.
    return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {literals}")


def of_grammar(grammar: object) -> str:
    try:
        return grammar_from("grammar", _text("grammar", grammar))
    except ValueError as error:
        raise InputError(f"grammar: {error}") from None


def _text(name: str, text: object) -> str:
    if not isinstance(text, str) or not text:
        raise InputError(f"{name}: expected a text, got {shown(text)}")
    check_encodable(name, text)
    return text

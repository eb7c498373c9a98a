"""A grammar: the rule that a generated text must follow, in the format of llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpt2block.checks import check_encodable, several
from gpt2block.engine.grammars.schema import check_schema, parsed, place_of, translated
from gpt2block.errors import InputError, require, shown

RULES = ("schema", "regex", "choice", "grammar")  # keywords of `GPT2.generate`
Schema = Mapping[str, Any] | bool | str
_REGEX_ERROR = re.compile(r"regex parse error:\n {4}(.*)\n {4}( *)\^.*\nerror: (.*)")
# JSON is written on one line. With free white space, models can write spaces without end, and
# fewer bytes of a text are determined by its schema.
JSON_FORM: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Remedies for problems that llguidance reports: part of its message -> message.
REMEDIES = {
    "oneOf constraints": "oneOf: it is not certain that no value fits two of its schemas: write "
    "anyOf, or give them different types, constants, or ranges of numbers",
    "min/maxProperties": "minProperties, maxProperties: write all names of properties in required",
    "too many digits": "multipleOf: expected a number of few digits, such as 3, 0.01 or 0.25",
    "disjoint": "patternProperties: expected patterns of which no name fits two",
    "Unknown format": "{}: leave it out, or write a pattern",
    "circular references": "{}: write the other keywords in the schema to which $ref refers",
    "Resource": "{}: write the schema in $defs",
}


@dataclass(frozen=True)
class Grammar:
    """A rule for texts. source: the rule in llguidance's JSON format.

    name: the rule's keyword, or its place in a request; errors begin with it. schemas: for each
    JSON schema in the rule, its place ("": the place of the rule) and its JSON. `of` creates one
    from keywords of `GPT2.generate`.
    """

    source: str
    name: str
    schemas: tuple[tuple[str, str], ...] = field(default=(), compare=False)

    @classmethod
    def of(cls, **keywords: object) -> Grammar | None:
        """Return the Grammar of one of the keywords schema, regex, choice and grammar.

        schema: a JSON schema, as a mapping, True or JSON text. regex: a regular expression of the
        whole text, without look-around, in the syntax of Rust's crate regex. choice: texts, one of
        which is the result. grammar: a grammar in llguidance's dialect of Lark, or in llama.cpp's
        GBNF. Returns None if all keywords are None.

        Raises InputError for several keywords, for a grammar that cannot be compiled, for a schema
        with keywords that are not supported (docs/structured.md), and if llguidance is not
        installed.
        """
        made = cls.unchecked(**keywords)
        if made is not None:
            made.check()
        return made

    @classmethod
    def unchecked(cls, **keywords: object) -> Grammar | None:
        """Return a Grammar as `of` does, without checking whether it can be compiled.

        This takes little time for any rule, while compiling can take any time and memory.
        """
        given = {name: value for name, value in keywords.items() if value is not None}
        if not given:
            return None
        if len(given) > 1:
            raise InputError(f"{' and '.join(given)}: expected only one of them")
        require(f"{next(iter(given))}=", "tools", "llguidance")
        ((name, value),) = given.items()
        if name == "schema":
            schema = parsed(value)
            check_schema(schema)
            text = value if isinstance(value, str) else json.dumps(value)
            return cls(_compiled(schema), name, (("", text),))
        sources = {"regex": _of_regex, "choice": _of_choice, "grammar": _of_lark}
        return cls(sources[name](value), name)

    def check(self) -> None:
        """Raise InputError, which names the place if it is known, unless the grammar compiles."""
        problem = _problem(self.source)
        if not problem:
            return
        for place, text in self.schemas:
            schema = parsed(text)
            if wrong := _problem(_compiled(schema)):
                inner = place_of(schema, lambda part: bool(_problem(_compiled(part))))
                remedies = [remedy for part, remedy in REMEDIES.items() if part in wrong]
                wrong = remedies[0].format(wrong) if remedies else wrong
                raise InputError(f"{place or self.name}: {inner}{wrong}")
        raise InputError(f"{self.name}: {problem}")


def _problem(source: str) -> str:
    """Return a message on one line about a grammar that cannot be compiled; "" if it can."""
    from llguidance import LLMatcher  # noqa: PLC0415  (optional dependency)

    is_error, messages = LLMatcher.validate_grammar_with_warnings(source)
    if is_error and (refused := _REGEX_ERROR.search(messages[0])):
        return f'"{refused[1]}": {refused[3]} at character {len(refused[2]) + 1}'
    lines = [line.strip() for line in messages[0].splitlines()] if is_error else []
    return "; ".join(line for line in lines if line.strip("^ "))


def _compiled(schema: object) -> str:
    """Return the source of a Grammar for a schema of `parsed`."""
    from llguidance import LLMatcher  # noqa: PLC0415  (optional dependency)

    try:
        return LLMatcher.grammar_from_json_schema(translated(schema), JSON_FORM)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"schema: expected a JSON schema: {error}") from None


def _of_regex(given: object) -> str:
    from llguidance import LLMatcher  # noqa: PLC0415  (optional dependency)

    return LLMatcher.grammar_from_regex(_text("regex", given))


def _of_choice(given: object) -> str:
    from llguidance import LLMatcher  # noqa: PLC0415  (optional dependency)

    texts: Sequence[Any] = [given] if isinstance(given, str) else several(given)
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise InputError(f"choice: expected texts of at least one character, got {shown(given)}")
    for text in texts:
        check_encodable("choice", text)
    literals = " | ".join(json.dumps(text) for text in texts)
    # A single terminal, because llguidance allows a rule at most 2,000 alternatives.
    return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {literals}")


def _of_lark(given: object) -> str:
    from llguidance import grammar_from  # noqa: PLC0415  (optional dependency)

    try:
        return grammar_from("grammar", _text("grammar", given))
    except ValueError as error:
        raise InputError(f"grammar: {error}") from None


def _text(name: str, given: object) -> str:
    if not isinstance(given, str) or not given:
        raise InputError(f"{name}: expected a text, got {shown(given)}")
    check_encodable(name, given)
    return given

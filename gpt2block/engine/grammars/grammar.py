"""A grammar: the rule that a generated text must follow, in the format of llguidance."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpt2block.engine.grammars.schema import check_schema, parsed, place_of
from gpt2block.errors import InputError, require

RULES = ("schema", "regex", "choice", "grammar")  # keywords of `GPT2.generate`
Schema = Mapping[str, Any] | bool | str
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
        grammar = cls.unchecked(**keywords)
        if grammar is not None:
            grammar.check()
        return grammar

    @classmethod
    def unchecked(cls, **keywords: object) -> Grammar | None:
        """Return a Grammar as `of` does, without checking whether it can be compiled.

        This takes little time for any rule, while compiling can take any time and memory.
        """
        rules = {name: value for name, value in keywords.items() if value is not None}
        if not rules:
            return None
        if len(rules) > 1:
            raise InputError(f"{' and '.join(rules)}: expected only one of them")
        require(f"{next(iter(rules))}=", "tools", "llguidance")
        from gpt2block.engine.grammars import sources  # noqa: PLC0415  (imports llguidance)

        ((name, value),) = rules.items()
        if name == "schema":
            schema = parsed(value)
            check_schema(schema)
            text = value if isinstance(value, str) else json.dumps(value)
            return cls(sources.of_schema(schema), name, (("", text),))
        return cls(getattr(sources, f"of_{name}")(value), name)

    def check(self) -> None:
        """Raise InputError, which names the place if it is known, unless the grammar compiles."""
        from gpt2block.engine.grammars.sources import of_schema, problem_of  # noqa: PLC0415

        problem = problem_of(self.source)
        if not problem:
            return
        for place, text in self.schemas:
            schema = parsed(text)
            if wrong := problem_of(of_schema(schema)):
                inner = place_of(schema, lambda part: bool(problem_of(of_schema(part))))
                remedies = [remedy for part, remedy in REMEDIES.items() if part in wrong]
                wrong = remedies[0].format(wrong) if remedies else wrong
                raise InputError(f"{place or self.name}: {inner}{wrong}")
        raise InputError(f"{self.name}: {problem}")

"""Rules of a grammar for arguments that are written one by one (`Members`).

Source: guidance-ai, "Syntax of LLGuidance Grammars".
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from gpt2block.engine.chat.tool_forms.members import KEY, Members, alternatives
from gpt2block.engine.grammars.schema import ANNOTATIONS, JSON_FORM, parsed, translated
from gpt2block.errors import InputError

DEFINITIONS = ("$defs", "definitions")
OBJECT = {"type", "properties", "required", "additionalProperties", *DEFINITIONS}
ARRAY = {"type", "items", "minItems", "maxItems"}
STRING = {"type", "minLength", "maxLength"}


def schema_text(schema: Mapping[str, object]) -> str:
    """Return the JSON text of a schema, with the options of llguidance."""
    return translated(parsed({**schema, "x-guidance": JSON_FORM}))


@dataclass
class MemberRules:
    """The rules for the arguments of one function.

    rules: name of a rule → its text; methods add rules, whose names begin with `prefix`. schema:
    the schema of the arguments, to whose definitions its parts refer. literal: as in `lark`.
    """

    _members: Members
    _schema: Mapping[str, Any]
    _literal: Callable[[str], str]
    _rules: dict[str, str]
    _prefix: str
    _values: dict[str, str] = field(default_factory=dict)  # JSON of a schema → name of its rule

    def call(self, name: str) -> str:
        """Return an expression for a call. Raises InputError for a keyword that it cannot follow.

        Where arguments are not values of JSON, strings follow no pattern and no format, and objects
        and arrays no combined schemas.
        """
        before, after = self._members.name
        head = self._text(f"{before}{name}{after}")
        return f"{head} {self._object(self._schema)} {self._text(self._members.close)}"

    def _object(self, schema: Mapping[str, Any]) -> str:
        """Return an expression for arguments, or for the members of an object without braces."""
        _check(schema, OBJECT)
        properties, needed = schema.get("properties", {}), schema.get("required", ())
        others = schema.get("additionalProperties", True)
        names = [*properties, *(name for name in needed if name not in properties)]
        if self._members.bare:
            names.sort(key=str.lower)
        between = self._text(self._members.between)
        options, tail = list[str](), '""'
        if others is not False:
            listed = "|".join(map(_escaped, names))
            key = self._rule(f"/{KEY}/" + f" & ~/({listed})/" * bool(names), terminal=True)
            member = self._member(key, others)
            tail = self._rule(f"({between} {member})*")
            options = [f"{member} {tail}"]
        for name in reversed(names):
            if not re.fullmatch(KEY, name):
                _refuse(f"properties: expected names without spaces and brackets, got {name!r}")
            member = self._member(
                json.dumps(name, ensure_ascii=False), properties.get(name, others)
            )
            first, times = f"{member} {tail}", "" if name in needed else "?"
            options = [first, *options] if times else [first]
            tail = self._rule(f"({between} {member}){times} {tail}")
        return f"({' | '.join(options) or tail}){'' if needed else '?'}"

    def _member(self, key: str, schema: object) -> str:
        before, after = map(self._text, self._members.key)
        return self._rule(f"{before} {key} {after} {self._value(schema)}")

    def _value(self, schema: object) -> str:
        """Return the name of a rule for a value, and for the text that follows the value."""
        key = json.dumps(schema)
        if key not in self._values:
            name = self._values[key] = self._rule("")  # a schema may contain itself
            options = map(self._alternative, alternatives(schema, self._schema))
            self._rules[name] = " | ".join(options)
        return self._values[key]

    def _alternative(self, schema: Mapping[str, Any]) -> str:
        """Return an expression for a value of a schema that `alternatives` yields."""
        members, kind = self._members, schema.get("type")
        if "enum" in schema:
            return " | ".join(self._text(members.value(value)) for value in schema["enum"])
        if members.bare or not members.quotes:
            if kind is None:
                _check(schema, set())
            if kind == "string":
                return self._string(schema)
        if members.bare or members.constants:
            constants = {"boolean": ("true", "false"), "null": ("null",)}.get(str(kind), ())
            if constants:
                return " | ".join(json.dumps(members.constants.get(t, t)) for t in constants)
        if members.bare and kind == "object":
            return f'"{{" {self._object(schema)} "}}"'
        if members.bare and kind == "array":
            return self._array(schema)
        own = {name: self._schema[name] for name in DEFINITIONS if name in self._schema}
        return f"%json {schema_text({**own, **schema})} {self._text(members.end)}"

    def _string(self, schema: Mapping[str, Any]) -> str:
        """Return an expression for a string without escapes, up to the text after it."""
        _check(schema, STRING)
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        text = f"/(.|\\n){{{least},{most}}}/" if least or most != "" else r"/(.|\n)*/"
        quote = "".join(self._members.quotes)
        end = self._literal(quote or self._members.end)
        if end.startswith("<"):  # a special token
            rule = self._rule(f"{text} & ~/(.|\\n)*{_escaped(quote)}(.|\\n)*/", terminal=True)
            return f"{end} {rule} {end}"
        rule = self._rule(f"{text} {end}", lazy=True)
        return f"{end} {rule}" if quote else rule

    def _array(self, schema: Mapping[str, Any]) -> str:
        _check(schema, ARRAY)
        item = self._value(schema.get("items", True))
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[" "]"'
        between = json.dumps(self._members.between)
        more = f"({between} {item}){{{max(0, least - 1)},{'' if most is None else most - 1}}}"
        return f'"[" ({item} {more}){"" if least else "?"} "]"'

    def _text(self, text: str) -> str:
        """Return an expression for a text, in which quotes may be special tokens."""
        quote = "|".join(map(re.escape, self._members.quotes if self._members.bare else ()))
        pieces = re.split(f"({quote})", text) if quote else [text]
        return " ".join(self._literal(piece) for piece in pieces if piece) or '""'

    def _rule(self, rule: str, terminal: bool = False, lazy: bool = False) -> str:
        """Add a rule; return its name. terminal: whether it is a single regular expression."""
        name = f"{self._prefix}_{len(self._rules)}"
        name = name.upper() if terminal else name
        self._rules[f"{name}[lazy]" if lazy else name] = rule or '""'
        return name


def _check(schema: Mapping[str, Any], known: set[str]) -> None:
    """Raise InputError for a keyword with an effect that is not among `known`."""
    for name in schema:
        if name not in known and name not in ANNOTATIONS:
            _refuse(f"the form in which this model writes calls follows no {name}: leave it out")


def _refuse(problem: str) -> NoReturn:
    raise InputError(f"tools: {problem}")


def _escaped(text: str) -> str:
    """Return a regular expression between slashes for a text."""
    return re.escape(text).replace("/", r"\/")

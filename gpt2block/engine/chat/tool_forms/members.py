"""`Members`: how a form writes the arguments of a call one by one, in place of a JSON object.

Sources: Liquid AI, "Tool use" (LFM2), and the chat template of LFM2.5-8B-A1B; Ai2, the chat
template of Olmo-3.1-32B-Instruct; Qwen, the chat template of Qwen3.5; Google, "Gemma 4 prompt
formatting"; vLLM, examples/tool_chat_template_olmo3.jinja and tool_chat_template_gemma4.jinja.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn

import regex

from gpt2block.engine.grammars.numbers import types_of
from gpt2block.engine.grammars.schema import resolved
from gpt2block.errors import InputError, shown

NAME = r"[\w.-]+"  # name of a function
KEY = r"[^\s=:,<>(){}\[\]\"']+"  # name of an argument
CONSTANTS = {"True": "true", "False": "false", "None": "null"}
TYPES = {str: "string", bool: "boolean", type(None): "null", list: "array", dict: "object"}
_ESCAPE = regex.compile(r"(?s)\\(x[\da-fA-F]{2}|u[\da-fA-F]{4}|U[\da-fA-F]{8}|[0-7]{1,3}|.)")
_CHARACTERS = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a",
               "\n": "", "\\": "\\", "/": "/", "'": "'", '"': '"'}  # fmt: skip


@dataclass(frozen=True)
class Members:
    """The texts of a call, and of the values in it.

    name: texts before and after the name of the function. key: texts before and after the name of
    an argument. between: text between arguments. end: text after the value of an argument. close:
    text after all arguments.

    quotes: texts, one of which is before and after a string. Without any, a string that is an
    argument is written as it is, and the schema of the argument distinguishes the string from other
    values. bare: whether strings have no escapes, names in objects no quotes, and arguments the
    order of their names. constants: texts of JSON's constants that the form writes in another way.
    """

    name: tuple[str, str]
    key: tuple[str, str]
    close: str
    between: str = ""
    end: str = ""
    quotes: tuple[str, ...] = ()
    bare: bool = False
    constants: Mapping[str, str] = field(default_factory=dict, hash=False)

    @cached_property
    def head(self) -> regex.Pattern[str]:
        """Matches the beginning of a call, until after the name of its function."""
        return regex.compile(rf"\s*(?P<list>\[)?\s*{self._call}")

    @cached_property
    def next(self) -> regex.Pattern[str]:
        """Matches the text between two calls."""
        return regex.compile(rf"\s*[,;]?\s*(?={self._call})")

    @property
    def _call(self) -> str:
        before, after = (regex.escape(text.rstrip()) for text in self.name)
        return f"{before}(?P<name>{NAME}){after}"

    @cached_property
    def argument(self) -> regex.Pattern[str]:
        """Matches the text before the value of an argument, or the end of the arguments."""
        texts = (self.between, self.end, self.close)
        between, end, close = (regex.escape(text.strip()) for text in texts)
        before, after = map(regex.escape, self.key)
        key = rf"(?:{between}\s*)?{before}(?P<key>{KEY})\s*{after}"
        return regex.compile(rf"\s*(?:{end}\s*)?(?:(?P<close>{close})|{key})")

    @cached_property
    def marks(self) -> regex.Pattern[str]:
        """Matches, outside strings, quotes and brackets, and the text that ends a value."""
        if self.quotes:
            quotes = "|".join(map(regex.escape, self.quotes))
            return regex.compile(rf"(?P<quote>{quotes})|(?P<open>[\[{{(])|(?P<close>[\]}})])|,")
        end, key, close = map(regex.escape, (self.end, self.key[0], self.close))
        return regex.compile(f"{end}(?={key}|{close})")

    def inside(self, quote: str) -> regex.Pattern[str]:
        """Return a pattern for the end of a string, and for escapes in the string."""
        escape = "" if self.bare else r"\\.|"
        return regex.compile(f"(?s){escape}{regex.escape(quote)}")

    @cached_property
    def _token(self) -> regex.Pattern[str]:
        quotes = "|".join(map(regex.escape, self.quotes))
        character = "." if self.bare else r"\\.|[^\\]"
        key = rf"(?P<key>{KEY})(?=\s*:)|" if self.bare else "(?P<key>(?!))|"
        return regex.compile(
            rf"(?s)(?P<quote>{quotes})(?P<text>(?:{character})*?)(?P=quote)|{key}[^\s,:{{}}\[\]]+"
        )

    def json(self, text: str, types: Collection[str]) -> str:
        """Return the JSON text of a value. text: the value as the model wrote it.

        types: types of JSON that the value may have. The result is no JSON if the text is no value.
        """
        if self.quotes:
            return str(self._token.sub(self._json_of_token, text.strip()))
        constant = CONSTANTS.get(text.strip(), text)
        try:
            kind = type_of(json.loads(constant))
        except (ValueError, RecursionError):
            kind = "string"
        is_text = kind == "string" or kind not in types
        return json.dumps(text, ensure_ascii=False) if is_text else constant.strip()

    def _json_of_token(self, token: regex.Match[str]) -> str:
        if token["quote"] is None:
            text = token[0]
            return CONSTANTS.get(text, text) if token["key"] is None else json.dumps(text)
        text = token["text"] if self.bare else _ESCAPE.sub(_unescaped, token["text"])
        whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return json.dumps(whole, ensure_ascii=False)

    def written(self, name: str, arguments: str) -> str:
        """Return a call as the model writes it. arguments: a JSON object.

        Raises InputError for arguments that are no object, and for a text that cannot be written.
        """
        try:
            values = json.loads(arguments)
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict):
            raise InputError(
                f"messages: tool_calls: expected the JSON text of an object, got {shown(arguments)}"
            )
        pairs = [self.pair(key, value) for key, value in values.items()]
        return f"{self.name[0]}{name}{self.name[1]}{self.between.join(pairs)}{self.close}"

    def pair(self, key: str, value: object) -> str:
        """Return an argument as the model writes it. Raises InputError as `written` does."""
        if not regex.fullmatch(KEY, key):
            _refuse(f"a name without spaces, quotes and brackets, got {shown(key)}")
        return f"{self.key[0]}{key}{self.key[1]}{self.value(value)}"

    def value(self, value: object) -> str:
        """Return the value of an argument, and the text after it, as the model writes both."""
        if self.quotes or not isinstance(value, str):
            text = self.text(value)
            return self.constants.get(text, text) + self.end
        found = self.marks.search(f"{value}{self.end}{self.close}")
        return _without(self.end, value, ends=found.start() < len(value)) + self.end

    def text(self, value: object) -> str:
        """Return a value with quotes around all of its strings."""
        if self.bare and isinstance(value, dict):
            pairs = [f"{self._key(key)}{self.text(each)}" for key, each in value.items()]
            return f"{{{','.join(pairs)}}}"
        if self.bare and isinstance(value, list):
            return f"[{','.join(map(self.text, value))}]"
        if self.bare and isinstance(value, str):
            (quote,) = self.quotes
            return f"{quote}{_without(quote, value, ends=quote in value)}{quote}"
        return json.dumps(value, ensure_ascii=False)

    def _key(self, key: str) -> str:
        return f"{key}:" if regex.fullmatch(KEY, key) else f"{self.text(key)}:"


def types_of_argument(schema: Mapping[str, Any], name: str) -> set[str]:
    """Return the types of JSON that a schema of arguments permits for an argument."""
    return _types(schema.get("properties", {}).get(name, True), schema)


def _types(part: object, schema: Mapping[str, Any], depth: int = 9) -> set[str]:
    """Return the types that a part of a schema permits. depth: most references to follow."""
    part = resolved(part, schema)
    if not isinstance(part, dict) or not depth:
        return types_of({})
    options = [*part.get("anyOf", ()), *part.get("oneOf", ()), *part.get("allOf", ())]
    if options and "type" not in part:
        return set().union(*(_types(each, schema, depth - 1) for each in options))
    values = part.get("enum", [part["const"]] if "const" in part else None)
    if values is not None:
        return {type_of(value) for value in values}
    return types_of(part)


def type_of(value: object) -> str:
    """Return the type of a value of JSON; "number" stands for "integer", too."""
    return TYPES.get(type(value), "number")


def _unescaped(escape: regex.Match[str]) -> str:
    code: str = escape[1]
    if len(code) > 1 or code in "01234567":
        digits = code.lstrip("xuU")
        return chr(min(int(digits, 8 if digits == code else 16), sys.maxunicode))
    return _CHARACTERS.get(code, f"\\{code}")


def _without(end: str, text: str, ends: bool) -> str:
    """Return a text. Raises InputError if a part of the text, `end`, ends it too early."""
    if ends:
        _refuse(f"a text without {shown(end)}, got {shown(text)}")
    return text


def _refuse(problem: str) -> NoReturn:
    raise InputError(f"messages: tool_calls: the form of this model can write {problem}")

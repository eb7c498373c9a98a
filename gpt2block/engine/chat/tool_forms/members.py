"""`Members`: how a form writes the arguments of a call one by one, in place of a JSON object.

Sources: Liquid AI, "Tool use" (LFM2), and the chat template of LFM2.5-8B-A1B; Ai2, the chat
template of Olmo-3.1-32B-Instruct; Qwen, the chat template of Qwen3.5; Google, "Gemma 4 prompt
formatting"; vLLM, examples/tool_chat_template_olmo3.jinja and tool_chat_template_gemma4.jinja.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn

import regex

from gpt2block.engine.grammars.numbers import TYPES, types_of
from gpt2block.engine.grammars.schema import ANNOTATIONS, COMBINING, resolved
from gpt2block.errors import InputError, shown

NAME = r"[\w.-]+"  # name of a function
KEY = r"[^\s=:,<>(){}\[\]\"'\\\x00-\x1f]+"  # name of an argument
# Constants of Python, and their texts in JSON
CONSTANTS = {"True": "true", "False": "false", "None": "null"}
TYPE_OF = {str: "string", bool: "boolean", type(None): "null", list: "array", dict: "object"}
_STRING = regex.compile(r'(?P<text>"(?:[^"\\]|\\.)*")(?P<colon>:?)')
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

    @cached_property
    def inside(self) -> Mapping[str, regex.Pattern[str]]:
        """For each quote, a pattern of the end of a string, and of escapes in the string.

        The template of LFM2.5 escapes no quotes in strings. Therefore a quote ends a string only
        before a text that can follow a string.
        """
        escape = "" if self.bare else r"\\.|"
        after = r"(?=\s*[,:)\]}])" if "'" in self.quotes else ""
        return {q: regex.compile(f"(?s){escape}{regex.escape(q)}{after}") for q in self.quotes}

    @cached_property
    def _token(self) -> regex.Pattern[str]:
        quotes = "|".join(map(regex.escape, self.quotes))
        character, after = (".", "") if self.bare else (r"\\.|[^\\]", r"(?=\s*(?:[,:)\]}]|$))")
        key = rf"(?P<key>{KEY})(?=\s*:)|" if self.bare else "(?P<key>(?!))|"
        return regex.compile(
            rf"(?s)(?P<quote>{quotes})(?P<text>(?:{character})*?)(?P=quote){after}"
            rf"|{key}[^\s,:{{}}\[\]]+"
        )

    def json(self, text: str, types: Collection[str]) -> str:
        """Return the JSON text of a value. text: the value as the model wrote it.

        types: types of JSON that the value may have. If `text` is not a value of this form, the
        result is not JSON.
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
            return CONSTANTS.get(text, text) if token["key"] is None else f'"{text}"'
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
            problem = f"expected the JSON text of an object, got {shown(arguments)}"
            raise InputError(f"messages: tool_calls: {problem}")
        pairs = [f"{key.join(self.key)}{self.value(value)}" for key, value in values.items()]
        call = f"{name.join(self.name)}{self.between.join(pairs)}{self.close}"
        if not all(regex.fullmatch(KEY, key) for key in values):
            _refuse("a name of an argument with spaces, quotes or brackets", call)
        return call

    def value(self, value: object) -> str:
        """Return the value of an argument, and the text after it, as the model writes both."""
        if self.quotes or not isinstance(value, str):
            text = self._text(value)
            return self.constants.get(text, text) + self.end
        if self.marks.search(f"{value}{self.end}{self.close}").start() < len(value):
            _refuse("a text that contains its end", value)
        return f"{value}{self.end}"

    def _text(self, value: object) -> str:
        """Return a value with quotes around all of its strings."""
        separators = (",", ":") if self.bare else (", ", ": ")
        text = json.dumps(value, ensure_ascii=False, separators=separators)
        return str(_STRING.sub(self._bare, text)) if self.bare else text

    def _bare(self, token: regex.Match[str]) -> str:
        (quote,), text = self.quotes, json.loads(token["text"])
        if quote in text:
            _refuse("a text that contains its end", text)
        if token["colon"] and regex.fullmatch(KEY, text):
            return f"{text}:"
        return f"{quote}{text}{quote}{token['colon']}"


def alternatives(
    schema: Any, root: Mapping[str, Any], depth: int = 9
) -> Iterator[Mapping[str, Any]]:
    """Yield schemas that together permit the same values as `schema`, without $ref and anyOf.

    Each schema lists values (enum), has one type, or combines schemas. root: the whole schema,
    which has the definitions. depth: maximum depth of references and of anyOf in each other. Raises
    InputError for a schema that permits no value.
    """
    part = {} if schema is True else schema
    if depth and isinstance(part, dict) and part.keys() - ANNOTATIONS == {"$ref"}:
        yield from alternatives(resolved(part, root), root, depth - 1)
    elif not depth or not isinstance(part, dict):
        raise InputError(f"tools: expected a schema that permits a value, got {shown(schema)}")
    elif values := part.get("enum", [part["const"]] if "const" in part else ()):
        yield {"enum": [value for value in values if type_of(value) in types_of(part)]}
    elif part.keys() - ANNOTATIONS == {"anyOf"}:
        for option in part["anyOf"]:
            yield from alternatives(option, root, depth - 1)
    elif part.keys() & COMBINING or isinstance(part.get("type"), str):
        yield part
    else:
        yield from ({**part, "type": kind} for kind in part.get("type", TYPES))


def types_of_argument(schema: Mapping[str, Any], name: str) -> set[str]:
    """Return the types of JSON that a schema of arguments permits for an argument."""
    found = set[str]()
    try:  # only a schema to which an answer is held has been checked
        for each in alternatives(schema.get("properties", {}).get(name, True), schema):
            found |= set(map(type_of, each["enum"])) if "enum" in each else types_of(each)
    except (InputError, AttributeError, TypeError):
        return {*TYPES}
    return found


def type_of(value: object) -> str:
    """Return the type of a value of JSON; "number" stands for "integer", too."""
    return TYPE_OF.get(type(value), "number")


def _unescaped(escape: regex.Match[str]) -> str:
    code: str = escape[1]
    if len(code) > 1 or code in "01234567":
        digits = code.lstrip("xuU")
        return chr(min(int(digits, 8 if digits == code else 16), sys.maxunicode))
    return _CHARACTERS.get(code, f"\\{code}")


def _refuse(problem: str, text: str) -> NoReturn:
    raise InputError(f"messages: tool_calls: this model cannot write {problem}, got {shown(text)}")

"""Check the keywords of a JSON schema, translate it, and find a part that cannot be compiled.

Source: JSON Schema, drafts 4 to 2020-12; llguidance, "JSON Schema".
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from functools import partial
from itertools import combinations, starmap
from math import prod
from typing import Any

from gpt2block.engine.grammars import numbers, patterns
from gpt2block.errors import InputError, printable, shown

# Keywords with an effect on the text. docs/structured.md has the same list.
SUPPORTED = frozenset({
    "type", "enum", "const", "anyOf", "allOf", "oneOf", "$ref", "$defs", "definitions",
    "properties", "required", "additionalProperties", "patternProperties", "minProperties",
    "maxProperties", "items", "prefixItems", "additionalItems", "minItems", "maxItems",
    "minLength", "maxLength", "pattern", "format",
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
})  # fmt: skip
# Keywords that only describe a schema.
ANNOTATIONS = frozenset({
    "$schema", "$id", "id", "$anchor", "$comment", "title", "description", "default", "example",
    "examples", "readOnly", "writeOnly", "deprecated", "contentMediaType", "contentEncoding",
    "discriminator",
})  # fmt: skip
DEFINED = (("$defs",), ("definitions",))
_OF_NAMES = ("properties", "patternProperties", "$defs", "definitions")
_OF_SCHEMAS = ("anyOf", "allOf", "oneOf", "prefixItems", "items", "additionalItems",
               "additionalProperties")  # fmt: skip
LITERAL = re.compile(r"\^([\w -]+|\([\w |-]+\))\$")  # a pattern that matches only listed names
COMBINING = frozenset({"anyOf", "allOf", "oneOf", "$ref"})
DEEPEST = 118  # keys from a schema to the schemas in it: llguidance reads 127 levels of JSON
MANY = 200  # schemas of oneOf that are compared in pairs
LARGE = 2**14  # characters of a schema in which parts are compiled without the definitions
NESTED = "nested too deeply: write this schema in $defs, and refer to it by $ref"
# JSON is written on one line. With free white space, models can write spaces without end, and
# fewer bytes of a text are determined by its schema.
JSON_FORM: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
KINDS: dict[str, tuple[str, Any]] = {
    **dict.fromkeys(_OF_NAMES, ("an object", dict)), "minProperties": ("an integer", int),
    **dict.fromkeys(("anyOf", "allOf", "oneOf", "enum"), ("an array", list)),
    "type": ("a text or texts", (str, list)), "required": ("an array of texts", list),
    **dict.fromkeys(("$ref", "pattern", "format"), ("a text", str)),
}  # fmt: skip
Path = tuple[str | int, ...]


def parsed(schema: object) -> Any:
    """Return a schema, which is a value or JSON text, as JSON values with Decimals for floats."""
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        return json.loads(text, parse_float=lambda digits: Decimal(repr(float(digits))))
    except (TypeError, ValueError, RecursionError) as error:
        is_file = isinstance(schema, str) and schema.lstrip()[:1] not in "[{"
        file = ': of a file, pass the text: "$(cat FILE)"' if is_file else ""
        problem = f"schema: expected a JSON schema: {error}, got {shown(schema)}{file}"
        raise InputError(problem) from None


def parts(schema: object) -> Iterator[tuple[Path, Any]]:
    """Yield the path and the value of a schema and of all schemas in it, outer schemas first."""
    waiting: list[tuple[Path, object]] = [((), schema)]
    while waiting:
        path, each = waiting.pop()
        yield path, each
        inner: list[tuple[Path, object]] = []
        for name, value in each.items() if isinstance(each, dict) else ():
            if name in _OF_NAMES and isinstance(value, dict):
                inner += [((*path, name, key), one) for key, one in value.items()]
            elif name in _OF_SCHEMAS and isinstance(value, list):
                inner += [((*path, name, index), one) for index, one in enumerate(value)]
            elif name in _OF_SCHEMAS:
                inner.append(((*path, name), value))
        waiting += reversed(inner)


def check_schema(schema: object) -> None:
    """Raise InputError, which names the place, for a part that is no schema or not supported."""
    if schema is False:
        raise InputError("schema: expected a schema that allows a text, got False")
    every = [(path, part) for path, part in parts(schema) if not isinstance(part, bool)]
    for find in (_fault, numbers.fault, partial(_overflow, every)):
        for path, part in every:
            if problem := find(part) or (NESTED if len(path) > DEEPEST else ""):
                raise InputError(f"schema: {place(path)}{problem}")


def _fault(part: object) -> str:
    """Return which keyword or value has a wrong type or is not supported, or an empty text."""
    if not isinstance(part, dict):
        return f"expected an object, got {numbers.as_json(part)}"
    for name, value in part.items():
        if name not in SUPPORTED and name not in ANNOTATIONS:
            return f"the keyword {shown(name)} is not supported"
        expected, kind = KINDS.get(name, ("", object))
        each = value if name in ("type", "required") and isinstance(value, list) else ()
        if not isinstance(value, kind) or not all(isinstance(one, str) for one in each):
            return f"{name}: expected {expected}, got {numbers.as_json(value)}"
    for pattern in (part.get("pattern", ""), *part.get("patternProperties", ())):
        if problem := incomplete(pattern) or patterns.fault(pattern):
            return f"pattern: {problem}"
    most = len(part.get("required", ())) + 1
    if part.get("minProperties", 0) > most:
        return (f"minProperties: expected at most {most}, because a name that is not in required "
                "can occur twice: list more names in required")  # fmt: skip
    return ""


def incomplete(pattern: str) -> str:
    """Return an error if a pattern ends within an escape, which llguidance drops; or ""."""
    whole = (len(pattern) - len(pattern.rstrip("\\"))) % 2 == 0
    return "" if whole else f"{shown(pattern)} ends with an incomplete escape: write \\\\ for \\"


def _overflow(every: list[tuple[Path, Any]], part: dict[str, Any]) -> str:
    """Return an error if llguidance may compute a wrong common multiple, or an empty text.

    It multiplies the digits of several values of multipleOf as integers of 32 bits.
    """
    both = "multipleOf" in part and not COMBINING.isdisjoint(part)
    if not both and len(part.get("allOf", ())) < 2:
        return ""
    units = {Decimal(each["multipleOf"]).normalize() for _, each in every if "multipleOf" in each}
    decimals = max([0, *(-int(unit.as_tuple().exponent) for unit in units)])
    if prod(unit.scaleb(decimals) for unit in units) < 2**32:
        return ""
    return "multipleOf: the product of several is too large: write one that is their multiple"


def translated(schema: object) -> str:
    """Return JSON of a schema that permits the same values, and that llguidance compiles exactly.

    schema: a result of `parsed`.
    """
    schema = {} if schema is True else parsed(numbers.as_json(schema))  # a copy
    every = [part for _, part in parts(schema) if isinstance(part, dict)]
    zeros = 0 if any("multipleOf" in part for part in every) else numbers.ZEROS
    for part in every:
        for pattern, value in part.pop("patternProperties", {}).items():
            listed = LITERAL.fullmatch(pattern)
            named = part.setdefault("properties" if listed else "patternProperties", {})
            for name in listed[1].strip("()").split("|") if listed else [patterns.as_rust(pattern)]:
                named[name] = {"allOf": [named[name], value]} if name in named else value
        if "pattern" in part:
            part["pattern"] = patterns.as_rust(part["pattern"])
        if exact := patterns.OF_FORMATS.get(part.get("format", "")):
            part["allOf"] = [*part.get("allOf", ()), *({"pattern": each} for each in exact)]
        options = [resolved(option, schema) for option in part.get("oneOf", ())]
        if 0 < len(options) <= MANY and all(starmap(_are_apart, combinations(options, 2))):
            part["allOf"] = [*part.get("allOf", ()), {"anyOf": part.pop("oneOf")}]
    for part in every:
        numbers.translate(part, zeros)
    return numbers.as_json(schema)


def resolved(part: object, schema: object) -> object:
    """Return the part of a schema to which another part refers, or else this other part."""
    reference = part.get("$ref", "") if isinstance(part, dict) else ""
    for key in reference.split("/")[1:]:
        schema = schema.get(key) if isinstance(schema, dict) else None
    return schema if reference else part


def _are_apart(first: object, second: object, inner: bool = True) -> bool:
    """Return whether it is certain that no value fits two schemas.

    By their constants, their types, the ranges of their numbers, or by a required property.
    """
    if not (isinstance(first, dict) and isinstance(second, dict)):
        return False
    values, others = (part.get("enum", [part.get("const")]) for part in (first, second))
    if (values, others).count([None]) == 0:
        return not any(value in others for value in values)
    common = numbers.types_of(first) & numbers.types_of(second)
    if common == {"number"}:
        (low, high), (least, most) = numbers.bounds(first), numbers.bounds(second)
        return high < least or most < low
    if common == {"object"} and inner:
        named, names = first.get("properties", {}), second.get("properties", {})
        required = {*first.get("required", ()), *second.get("required", ())} & named.keys()
        return any(_are_apart(named[name], names.get(name), False) for name in required)
    return not common


def place_of(schema: Any, fails: Callable[[Any], bool]) -> str:
    """Return the place of the innermost part of a schema that fails alone, "" if it is unknown.

    fails: function of a part with the definitions of the whole schema. Definitions come first,
    because parts with references to them fail, too. Parts with other references are skipped, and
    in a large schema, all parts with references.
    """
    failed: Path = ()
    definitions = {name: schema[name] for (name,) in DEFINED if name in schema}
    known = r"#/(\$defs|definitions)/" if len(str(schema)) < LARGE else "no reference"
    for path, part in sorted(parts(schema), key=lambda each: each[0][:1] not in DEFINED):
        text = re.sub(rf"'\$ref': '{known}", "", str(part))
        if path and path[: len(failed)] == failed and isinstance(part, dict) and "$ref" not in text:
            try:
                if fails({**definitions, **part}):
                    failed = path
            except (TypeError, ValueError):
                failed = path
    return place(failed)


def place(path: Path) -> str:
    """Return a path as a JSON Pointer followed by ": "; "" for the whole schema."""
    keys = [str(key).replace("~", "~0").replace("/", "~1") for key in path]
    return "".join("/" + printable(key, 100) for key in keys) + ": " if keys else ""

"""Check the keywords of a JSON schema, and find the part of a schema that cannot be compiled.

Source: JSON Schema, drafts 4 to 2020-12; llguidance, "JSON Schema".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

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
_OF_NAMES = ("properties", "patternProperties", "$defs", "definitions")
_OF_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")
_OF_ONE = ("additionalProperties", "additionalItems", "items")
Path = tuple[str | int, ...]


def parts(schema: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the path and the value of a schema and of all schemas in it, outer schemas first."""
    waiting = [(path, schema)]
    while waiting:
        path, each = waiting.pop()
        yield path, each
        if not isinstance(each, Mapping):
            continue
        inner: list[tuple[Path, Any]] = []
        for name in _OF_NAMES:
            if isinstance(named := each.get(name), Mapping):
                inner += [((*path, name, key), value) for key, value in named.items()]
        for name in (*_OF_LISTS, *_OF_ONE):
            value = each.get(name)
            if isinstance(value, (list, tuple)):
                inner += [((*path, name, index), one) for index, one in enumerate(value)]
            elif name in each:
                inner.append(((*path, name), value))
        waiting += reversed(inner)


def check_schema(schema: Any) -> None:
    """Raise InputError, which names the place, for a part that is no schema or not supported."""
    for path, part in parts(schema):
        if not isinstance(part, (bool, Mapping)):
            raise InputError(f"schema: {place(path)}expected an object, got {shown(part)}")
        if part is False and not path:
            raise InputError("schema: expected a schema that allows a text, got False")
        for name in part if isinstance(part, Mapping) else ():
            if name not in SUPPORTED and name not in ANNOTATIONS:
                raise InputError(f"schema: {place(path)}the keyword {shown(name)} is not supported")


def place_of(schema: Any, fails: Callable[[Any], bool]) -> str:
    """Return the place of the innermost part of a schema that fails alone, "" if it is unknown.

    fails: function of a part. Parts with references are skipped, because they need the whole.
    """
    found: Path = ()
    for path, part in parts(schema):
        inside = path[: len(found)] == found
        if inside and path and isinstance(part, Mapping) and "$ref" not in str(part):
            try:
                if fails(dict(part)):
                    found = path
            except (TypeError, ValueError):
                found = path
    return place(found)


def place(path: Path) -> str:
    """Return a path as a JSON Pointer followed by ": "; "" for the whole schema."""
    keys = [str(key).replace("~", "~0").replace("/", "~1") for key in path]
    return "".join("/" + printable(key, 100) for key in keys) + ": " if keys else ""

"""Texts generated for many schemas: each parses, and jsonschema accepts it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llguidance")

import jsonschema

from gpt2block.engine.generation.sequences import Generation
from gpt2block.engine.grammars import Grammar, vocabulary_of
from gpt2block.errors import InputError
from tests.generating import generate
from tests.markov import MarkovEngine, byte_encoding

SCHEMAS, LONGEST = 200, 400
MERGES = (b'": ', b'", "', b"true", b"null", b"false", b"12", b"ab", b'"}', "é".encode())
ENCODING = byte_encoding(*MERGES)
NAMES = ("name", "a b", "ü", "x/y", "id", "values", "unit", '"quoted"')
PATTERNS = ("^[a-f]{2,5}$", "^(cat|dog)s?$", r"^\d{3}-\d{2}$", "^[A-Z][a-z]*$", "x.y")
FORMATS = ("date", "time", "email", "uuid", "ipv4")


def schema_of(rng: np.random.Generator, depth: int = 0) -> dict[str, Any]:
    """Draw a random schema of one of the common kinds."""
    kinds = [string, number, choice, constant, boolean]
    if depth < 3:
        kinds += [array, pair, thing, thing, union, tree]
    made: dict[str, Any] = kinds[rng.integers(len(kinds))](rng, depth)
    return made


def string(rng: np.random.Generator, depth: int) -> dict[str, Any]:
    kind = rng.integers(4)
    if kind == 0:
        return {"type": "string", "pattern": PATTERNS[rng.integers(len(PATTERNS))]}
    if kind == 1:
        return {"type": "string", "format": FORMATS[rng.integers(len(FORMATS))]}
    least = int(rng.integers(3))
    return {"type": "string", "minLength": least, "maxLength": least + int(rng.integers(1, 9))}


def bounds(rng: np.random.Generator, apart: float = 9.0) -> dict[str, float]:
    """Draw one or two bounds with up to 5 decimals, `apart` or more, included or excluded."""
    width, decimals = 10.0 ** int(rng.integers(-2, 5)), int(rng.integers(6))
    low = round(float(rng.uniform(-width, width)) * int(rng.integers(4) > 0), decimals)
    high = round(low + max(apart, 10.0**-decimals) + float(rng.uniform(0, width)), decimals)
    first, last = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
    both = [(first[rng.integers(2)], low), (last[rng.integers(2)], high)]
    return dict([both, both, both[:1], both[1:]][rng.integers(4)])


def number(rng: np.random.Generator, depth: int) -> dict[str, Any]:
    kind = ("integer", "number", ["number", "null"])[rng.integers(3)]
    kinds: list[dict[str, Any]] = [
        {"type": kind, **bounds(rng)},
        {"type": "integer", "multipleOf": int(rng.integers(2, 9)), "minimum": 0},
        {"type": "number", "multipleOf": (0.25, 1.5, 2)[rng.integers(3)], **bounds(rng)},
        {"allOf": [{"type": kind}, bounds(rng)], "exclusiveMaximum": 1e6},
        {"oneOf": [{"type": "number", "exclusiveMaximum": 0}, {"type": "number", "minimum": 0.5}]},
    ]
    return kinds[rng.integers(len(kinds))]


def choice(rng: np.random.Generator, depth: int) -> dict[str, Any]:
    values = ["red", "grün", 'with "quotes"', 1, -2.5, None, True, [1, "a"], {"k": []}, "\n"]
    return {"enum": [values[n] for n in rng.choice(len(values), 4, replace=False)]}


def constant(rng: np.random.Generator, depth: int) -> dict[str, Any]:
    return {"const": [None, "fixed", 7, {"a": [True]}][rng.integers(4)]}


def boolean(rng: np.random.Generator, depth: int) -> dict[str, Any]:
    return {"type": ["boolean", "null"] if rng.integers(2) else "boolean"}


def array(rng: np.random.Generator, depth: int) -> dict[str, Any]:
    least = int(rng.integers(3))
    items = schema_of(rng, depth + 1)
    return {"type": "array", "items": items, "minItems": least, "maxItems": least + 2}


def pair(rng: np.random.Generator, depth: int) -> dict[str, Any]:
    first = [schema_of(rng, depth + 1) for _ in range(2)]
    return {"type": "array", "prefixItems": first, "items": False, "minItems": 2}


def thing(rng: np.random.Generator, depth: int) -> dict[str, Any]:
    names = rng.choice(NAMES, rng.integers(1, 5), replace=False).tolist()
    required = [name for name in names if rng.integers(2)]
    more: Any = [False, {"type": "integer", "minimum": 0, "maximum": 9}][rng.integers(2)]
    properties = {name: schema_of(rng, depth + 1) for name in names}
    return {
        "type": "object", "properties": properties, "required": required,
        "additionalProperties": more,
    }  # fmt: skip


def union(rng: np.random.Generator, depth: int) -> dict[str, Any]:
    return {"anyOf": [schema_of(rng, depth + 1) for _ in range(2)]}


def tree(rng: np.random.Generator, depth: int) -> dict[str, Any]:
    """Return the schema of a linked list of small numbers, which refers to itself."""
    value = {"type": "integer", "minimum": 0, "maximum": 9}
    node = {
        "type": "object", "properties": {"value": value, "next": {"$ref": "#/$defs/node"}},
        "required": ["value"], "additionalProperties": False,
    }  # fmt: skip
    if depth:  # references begin at the root of a schema
        return value
    return {"$ref": "#/$defs/node", "$defs": {"node": node}}


def schemas() -> list[dict[str, Any]]:
    rng = np.random.default_rng(5)
    return [schema_of(rng) for _ in range(SCHEMAS)]


def engine() -> MarkovEngine:
    """Return an engine of random texts, in which strings, lists and objects end soon."""
    V = ENCODING.n_vocab
    table = np.random.default_rng(0).standard_normal((V, V)).astype(np.float32)
    for token in range(V - 1):
        data = ENCODING.decode_single_token_bytes(token)
        if data[:1] in (b'"', b"]", b"}", b","):
            table[:, token] += 5.0
        elif data[0] >= 0x80 and token < 256:
            table[:, token] -= 4.0
    table[:, -1] += 5.0
    return MarkovEngine(table, n_ctx=LONGEST + 8)


def problem(schema: Any, found: Generation) -> str | None:
    """Return the reason why a finished text is wrong, with numbers as Decimal or float, or None."""
    kind = jsonschema.Draft202012Validator
    for number in (Decimal, float):
        try:
            given = json.loads(json.dumps(schema), parse_float=number)
            value = json.loads(found.text, parse_float=number)
            kind(given, format_checker=kind.FORMAT_CHECKER).validate(value)
        except (ValueError, jsonschema.ValidationError) as error:
            return f"{schema}: {found.text!r}: {error}"
    return None


def test_finished_texts_are_valid() -> None:
    counts, made = Counter[str](), engine()
    options: dict[str, Any] = {"max_new_tokens": LONGEST, "temperature": 1.0, "seed": 3}
    for schema in schemas():
        found = generate(made, ENCODING, [65], schema=schema, **options)
        counts[found.finish_reason] += 1
        if found.finish_reason == "stop":
            assert problem(schema, found) is None
    assert counts["stop"] >= 0.95 * counts.total()
    assert counts.total() == SCHEMAS


# --- numbers: a matcher permits the texts that jsonschema accepts


def permitted(schema: Any, texts: Sequence[str]) -> list[str]:
    grammar = Grammar.of(schema=schema)
    assert grammar is not None
    tokens = vocabulary_of(ENCODING, ENCODING.n_vocab, frozenset({ENCODING.eot_token}))
    state: Any = tokens.matcher(grammar).state
    whole = {text: [*text.encode(), ENCODING.eot_token] for text in texts}
    return [text for text in texts if state.validate_tokens(whole[text]) == len(whole[text])]


def accepted(schema: Any, texts: Sequence[str]) -> list[str]:
    given = json.loads(json.dumps(schema), parse_float=Decimal)
    kind = jsonschema.validators.validator_for(given, jsonschema.Draft202012Validator)(given)
    return [text for text in texts if kind.is_valid(json.loads(text, parse_float=Decimal))]


def test_the_deepest_schemas() -> None:
    schema: dict[str, Any] = {"exclusiveMinimum": 0, "maximum": 0.5}
    for _ in range(59):
        schema = {"properties": {"a": schema}}
    assert permitted(schema, ["{}", "[]", "7"]) == ["{}", "[]", "7"]
    with pytest.raises(InputError, match=r"schema: (/properties/a)+.*: nested too deeply: write"):
        Grammar.of(schema={"properties": {"a": schema}})


# --- patterns and formats: texts that a matcher permits, and others


@pytest.mark.filterwarnings("ignore:Possible:FutureWarning")
def test_random_classes_that_python_reads_alike() -> None:
    rng, cases = np.random.default_rng(3), 0
    parts = [*"abz09[^&~:|,+. -'{}\"", "&&", "--", "~~", "[:", *map("\\".__add__, "dwsDWSb-]\\")]
    texts = {json.dumps(chr(code)): chr(code) for code in (8, 9, 10, *range(32, 127))}
    while cases < 400:
        items = "".join(rng.choice(parts, rng.integers(1, 6)))
        pattern = f"^[{'^' * int(rng.integers(2))}{items}]$"
        with suppress(re.error):  # such as a range whose end is a set
            python = re.compile(pattern, re.ASCII)
            if expected := [text for text in texts if python.search(texts[text])]:
                assert permitted({"type": "string", "pattern": pattern}, [*texts]) == expected
                cases += 1


def test_decimals_of_random_ranges() -> None:
    """Numbers near the ends and near 0, also with zeros at their end. Minus zero is only "-0"."""
    rng = np.random.default_rng(3)
    for _ in range(120):
        ends, texts = bounds(rng, 0.0), set[str]()
        while len(texts) < 17:
            near = Decimal(repr([*ends.values(), 0.0][rng.integers(len(ends) + 1)]))
            number = near + Decimal(int(rng.integers(-9, 10))).scaleb(-int(rng.integers(7)))
            number = number.quantize(Decimal(1).scaleb(-int(rng.integers(7))))
            texts.add(format(number or abs(number), "f"))
        schema = {"type": "number", **ends}
        assert permitted(schema, [*texts]) == accepted(schema, [*texts]), schema

"""Bounds of numbers in a JSON schema, as alternatives that llguidance compiles exactly.

llguidance 1.9 translates the range of a number to a regular expression, which is wrong for some
ranges: it permits 0 for 0 < x <= 0.5, and not 0.2 for x <= 0.25. For 0 <= a < b, it is exact for

    x >= a
    a <= x <= b    if b is an integer
    a <= x < b     except for the texts with which the text of b begins, such as 0.2 for b = 0.25
    x = a          without zeros after the last decimal

and, with a > 0, for the same ranges of -x. `_pieces` divides a range into ranges of these kinds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from decimal import ROUND_CEILING, ROUND_DOWN, Context, Decimal
from typing import Any

BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
INT64 = 2**63 - 1  # as the maximum of integers, llguidance rounds it to itself
UP = Context(15, ROUND_CEILING, Emin=-8)  # 15 digits, 22 decimals: exact, and different as floats
ZEROS = 6  # zeros that may follow the last decimal of the largest number
MIRRORED = {"const": "const", "minimum": "maximum", "maximum": "minimum",
            "exclusiveMaximum": "exclusiveMinimum"}  # fmt: skip
TYPES = ("boolean", "number", "string", "null", "array", "object")
Part = Mapping[str, Any]  # a schema whose numbers are int and Decimal


def types_of(part: Part) -> set[str]:
    """Return the types that `type` permits; "number" stands for "integer", too."""
    declared = part.get("type", TYPES)
    names = [declared] if isinstance(declared, str) else declared
    return {"number" if name == "integer" else name for name in names}


def is_integer(part: Part) -> bool:
    """Return whether the numbers that `type` permits are integers."""
    return "integer" in part.get("type", "") and "number" not in part["type"]


def fault(part: Part) -> str:
    """Return which number of a schema is not supported, and a remedy; "" if all are supported."""
    for name, value in [(name, part[name]) for name in BOUNDS if name in part]:
        is_draft_4 = isinstance(value, bool) and name.startswith("exclusive")
        number = value if type(value) in (int, Decimal) else Decimal("Infinity")
        end = number if "max" in name.lower() else -number
        # The ends of int64 and uint64, also if they are written with the digits of a 64-bit float.
        is_end = is_integer(part) and any(abs(end - 2**bits) < 1000 for bits in (63, 64))
        if not (is_draft_4 or is_end or abs(number) <= 2**53):
            return (f"{name}: expected a number from -2^53 to 2^53, or for integers an end of "
                    f"(u)int64, got {as_json(value)}: write a narrower bound, or none")  # fmt: skip
    unit = part.get("multipleOf", 1)
    if type(unit) not in (int, Decimal) or unit <= 0 or not _is_exact(Decimal(unit)):
        return f"multipleOf: expected a number above 0 of at most 15 digits, got {as_json(unit)}"
    texts: list[str] = []
    values, add = as_json([part.get("const"), part.get("enum")]), texts.append
    json.loads(values, parse_int=add, parse_float=add, parse_constant=add)
    for text in [text for text in texts if not _is_exact(Decimal(text))]:
        return f"const, enum: expected numbers of at most 15 digits, got {text}: write a string"
    return ""


def as_json(value: object) -> str:
    """Return JSON of a value of a schema."""
    return json.dumps(value, default=float)


def _is_exact(number: Decimal) -> bool:
    """Return whether llguidance reads a number exactly, and writes it with the same digits."""
    if not number.is_finite():
        return False
    decimals = max(0, -int(number.normalize().as_tuple().exponent))
    return decimals <= 22 and abs(number.scaleb(decimals)) <= 2**53


def bounds(part: Part) -> tuple[Decimal, Decimal]:
    """Return the least and the largest number that the bounds permit.

    A bound that is excluded, or has too many digits, is replaced by the next number of 15 digits,
    and with multipleOf, by the next multiple.
    """
    unit = Decimal(part.get("multipleOf", 1))
    ends = []
    for sign, name, strict in ((1, *BOUNDS[::2]), (-1, *BOUNDS[1::2])):
        limit, excluded = part.get(name), part.get(strict, False)
        if excluded is True:  # draft 4
            limit, excluded = None, part.get(name, False)
        limits = [] if limit is None else [sign * Decimal(limit)]
        if excluded is not False:
            end = sign * Decimal(excluded)
            limits.append(end + 1 if abs(end) >= 10**15 else UP.next_plus(end))
        if is_integer(part) or "multipleOf" in part:
            limits = [(end / unit).to_integral_value(ROUND_CEILING) * unit for end in limits]
        limits = [max(end, Decimal(-INT64)) for end in limits]
        exact = [end if _is_exact(end) or sign * end == INT64 else UP.plus(end) for end in limits]
        ends.append(sign * max(exact, default=Decimal("-Infinity")) + 0)  # 0 in place of -0
    return ends[0], ends[1]


def translate(part: dict[str, Any], zeros: int) -> None:
    """Replace the bounds of numbers in a schema by alternatives that are compiled exactly.

    zeros: number of zeros that may follow the last decimal of the largest number.
    """
    (low, high), types = bounds(part), types_of(part)
    bounded = [part.pop(name) for name in BOUNDS if name in part]
    if is_integer(part):
        ends = {"minimum": low, "maximum": high}
        part |= {name: end for name, end in ends.items() if end.is_finite()}
    elif bounded and "number" in types:
        unit = part.pop("multipleOf", None)
        number = {"type": "number", **({"multipleOf": unit} if unit else {})}
        options = [{"type": [*types - {"number"}]}] if len(types) > 1 else []
        options += [
            piece if "const" in piece else {**number, **piece}
            for piece in _pieces(low, high, zeros, Decimal(unit or 0))
        ]
        part["allOf"] = [*part.get("allOf", ()), {"anyOf": options}]


def _pieces(low: Decimal, high: Decimal, *form: Any) -> Iterator[dict[str, Any]]:
    """Yield keywords of schemas that together permit exactly the numbers from low to high.

    form: as for `_above_zero`.
    """
    zero = Decimal(0)
    if high >= 0:
        yield from _above_zero(max(low, zero), high, *form)
        if low <= 0:
            yield {"const": -0.0}
    if low < 0:
        for piece in _above_zero(max(-high, UP.next_plus(zero)), -low, *form):
            yield {MIRRORED.get(key, key): -value if key in MIRRORED else value
                   for key, value in piece.items()}  # fmt: skip


def _above_zero(low: Decimal, high: Decimal, zeros: int, step: Decimal) -> Iterator[dict[str, Any]]:
    """Yield pieces of the numbers from low, which is not negative, to high.

    step: multipleOf, of which `high` is a multiple; or 0.
    """
    if not high.is_finite():
        yield {"minimum": low}
        return
    last = high.to_integral_value(ROUND_DOWN)
    if low < last == high:
        yield {"minimum": low, "maximum": high}
        return
    if low <= high:
        # With a later end than `high`, also `high` has the decimals of multipleOf.
        end = high + step * bool(high % 1)
        yield {"minimum": low, "exclusiveMaximum": end} if low < end else {"const": high}
    for decimals in range(1, 1 + zeros - int(high.normalize().as_tuple().exponent) * (not step)):
        unit = Decimal(1).scaleb(-decimals)
        end = high.quantize(unit, ROUND_DOWN)
        if last < end >= low:
            yield {"const": end}
        elif low <= end and zeros and decimals < 10:
            # This is `end` alone, whose last decimal is 0, and which is written with it.
            yield {"minimum": max(end - unit, Decimal(0)), "exclusiveMaximum": end + unit,
                   "multipleOf": 2 * unit}  # fmt: skip
        last = end

"""Translate patterns of ECMA 262 to the syntax of Rust's crate regex, which llguidance reads.

Sources: ECMA 262, "RegExp (Regular Expression) Objects", with the flag u, and its annex B for
escapes such as `\\_`; RFC 3339, 5.6 and 5.7, for formats that depend on a calendar.
"""

from __future__ import annotations

import re

from gpt2block.errors import shown

_SET = r"\\(?:[dDwWsS]|[pP]\{[\w=]+\})"
_ESCAPE = _SET + r"|\\(?:x[\da-fA-F]{2}|u[\da-fA-F]{4}|u\{\w+\}|0(?!\d)|[tnvfr]|[^\da-zA-Z])"
_ATOM = rf"(?:{_ESCAPE}|\\b|[^\\\]])"  # of a class
_COUNT = r"\{\d+(?:,\d*)?\}"
_TIMES = rf"(?:[*+?]|{_COUNT})(?:\?|(?!\?))"
_TOKEN = re.compile(
    rf"\[(?P<negated>\^?)(?P<items>{_ATOM}*)(?:\]|(?P<unclosed>\\.?|\Z))|{_ESCAPE}|[.\0]"
    rf"|(?!{_COUNT})\{{|(?P<refused>\\.|\(\?(?!:|i[:)]|P?<\w)(?:<?[=!])?|{_TIMES}{_TIMES})"
)
_SPACES = r"\t-\r \xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
_RUST = {r"\s": f"[{_SPACES}]", r"\S": f"[^{_SPACES}]", r"\0": r"\x00", r"\b": r"\x08"}
_SETS = {".": r"[^\n\r\u2028\u2029]", "[]": r"[^\s\S]", "[^]": r"[\s\S]", "{": r"\{"}
# In place of a class with all control characters, llguidance permits " and \, even if the class
# lacks them. A class that may lack them therefore loses U+0000: with _LACKS after ^, or with _NULL.
_LACKS = re.compile(r'["\0]|\\[^dDwWsS]|[\0-"]-["-\U0010ffff]|[\0-\\]-[\\-\U0010ffff]')
_NULL = re.compile(r"\0|\\[0uxpP]")

_LEAP = "(0[48]|[2468][048]|[13579][26])"  # last two digits of a leap year, or of its century
_DAY = rf"^(\d*[1-9]\d*-(0[13-9]|1|02-([01]|2[0-8]))|(\d\d{_LEAP}|{_LEAP}00)-02-29)"
_SECOND = r"^([\d-]+[tT])?..:..:[0-5]|^(....-(06-30|12-31)[tT])?23:59:60[.\d]*[zZ]$"
# Patterns of the texts that are valid among the texts that a format of llguidance permits.
OF_FORMATS = {"date": [_DAY], "time": [_SECOND], "date-time": [_DAY, _SECOND],
              "hostname": ["^.{1,253}$"]}  # fmt: skip


def fault(pattern: str) -> str:
    """Return which part of a pattern is not supported, or an empty text."""
    found = (each["refused"] or each["unclosed"] for each in _TOKEN.finditer(pattern))
    return next((f"expected ECMA 262 without {shown(part)}" for part in found if part), "")


def as_rust(pattern: str) -> str:
    """Return a pattern in Rust's syntax. pattern: one of ECMA 262 without a fault."""
    return _TOKEN.sub(_token, pattern)


def _token(found: re.Match[str]) -> str:
    if found[0] in _SETS or found["unclosed"] is not None:  # llguidance refuses unclosed classes
        return _SETS.get(found[0], found[0])
    negated, items = found["negated"] or "", found["items"] or found[0]
    body = f"[{negated}{re.sub(rf'({_ATOM})(?:-({_ATOM}))?', _range, items)}]"
    return rf"[{body}&&[^\x00]]" if (_LACKS if negated else _NULL).search(items) else body


def _range(found: re.Match[str]) -> str:
    """Return the ends of a range in Rust's syntax, and if one is a set, a literal hyphen."""
    ends = [end for end in found.groups() if end]
    rust = [_RUST.get(end, end if end[1:2].isalnum() else re.escape(end[-1])) for end in ends]
    return (r"\-" if any(re.match(_SET, end) for end in ends) else "-").join(rust)

"""Replace inline PTX in the text of a user's kernel by C++ that calls functions of ptx.h.

The preprocessor first expands the file's own macros, so that every asm statement is visible. The
text keeps the line numbers of the file.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple, NoReturn

from gpt2block.emulator.ptx_instructions import called
from gpt2block.emulator.ptx_operands import Operand, UnknownPtxError, declared
from gpt2block.errors import NotJudged

HEADER = '#include "ptx.h"\n'
POISON = "#pragma GCC poison asm __asm __asm__\n"  # g++ then refuses an asm that is not replaced
_ASM = ("asm", "__asm", "__asm__")
_MAY_HAVE_ASM = re.compile(r"\b(?:asm|__asm(?:__)?)\b|##")
_HIDDEN = re.compile(r"^([ \t]*)#([ \t]*(?:include|pragma)\b)", re.MULTILINE)
_HIDING = "#pragma ptx_on_cpu "
_MARKER = re.compile(r'^# (\d+) ("[^"\n]*")[^\n]*$', re.MULTILINE)
_LINE = re.compile(r'^#line (\d+) "[^\n]*"\n', re.MULTILINE)
_TOKEN = re.compile(
    r'R"(?P<mark>[^()\\\s]{0,16})\((?P<raw>.*?)\)(?P=mark)"|"(?P<string>(?:[^"\\\n]|\\.)*)"'
    r"|'(?:[^'\\\n]|\\.)+'|(?P<line>^\#[^\n]*)|(?P<name>[A-Za-z_]\w*)|\d[\w.']*|::|\s+|.",
    re.DOTALL | re.MULTILINE,
)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "v": "\v"}
_CONSTRAINT = re.compile(r"([=+]?)&?([rlhfdn])")
_KINDS = {
    "h": ("std::uint16_t", "std::uint16_t"),
    "r": ("std::uint32_t", "std::uint32_t"),
    "l": ("std::uint64_t", "std::uint64_t"),
    "f": ("float", "std::uint32_t"),
    "d": ("double", "std::uint64_t"),
    "n": ("long long", "long long"),
}  # constraint → type of the value, and type of the register
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_STATEMENT = re.compile(
    r"(?P<brace>[{}])|\.reg\s+\.(?P<type>\w+)\s+(?P<names>[^;]+);|(?P<label>[\w$]+)\s*:(?!:)"
    r"|(?:@\s*(?P<guard>!?\s*[%\w$]+)\s+)?(?P<code>[a-z][\w.:]*)(?P<operands>[^;]*)(?:;|$)|;"
)


class _Place(NamedTuple):
    file: str  # name without folders
    line: int

    def refuse(self, what: str) -> NoReturn:
        raise NotJudged(f"{self.file}:{self.line}: {what}, or check it on a GPU")


@cache
def translated(text: str, name: str, constants: str) -> str | None:
    """Return a file's text with C++ in place of asm statements, or None if it has none.

    name: path of the file, for line markers. constants: definitions before the text. Raises
    NotJudged for PTX that the emulator does not support.
    """
    if not _MAY_HAVE_ASM.search(text):
        return None
    expanded = _preprocessed(text, name, constants)
    if expanded is None:
        return None
    parts: list[str] = []
    tokens = list(_TOKEN.finditer(expanded))
    at, line, i = 0, 1, 0
    for start in [k for k, token in enumerate(tokens) if token["name"] in _ASM]:
        if start < i:
            continue
        begin = tokens[start].start()
        line = _line(expanded, begin)
        i, code = _statement(tokens, start + 1, _Place(Path(name).name, line))
        end = tokens[i - 1].end()
        resumed = _line(expanded, end)
        parts += [expanded[at:begin], code, f'\n#line {resumed} "{name}"\n']
        at = end
    if not parts:
        return None
    return "".join([*parts, expanded[at:]])


def check_replaced(said: str) -> None:
    """Raise NotJudged if g++ has found an asm statement that is not replaced, as in a header."""
    if found := re.search(r'([^\s/:]+):(\d+):.*poisoned "(?:asm|__asm|__asm__)"', said):
        _Place(found[1], int(found[2])).refuse("the emulator does not run the inline PTX here")


def _line(text: str, offset: int) -> int:
    """Return the line of the user's file at an offset of the preprocessed text."""
    markers = list(_LINE.finditer(text, 0, offset))
    number, start = (int(markers[-1][1]), markers[-1].end()) if markers else (1, 0)
    return number + text.count("\n", start, offset)


def _preprocessed(text: str, name: str, constants: str) -> str | None:
    """Expand the macros that a file defines. Return None if the preprocessor finds an error.

    Directives #include and #pragma stay in the text.
    """
    hidden = _HIDDEN.sub(rf"\1{_HIDING}\2", text)
    command = ("g++", "-E", "-x", "c++", "-std=c++17", "-w", "-nostdinc", "-")
    given = f'{constants}#line 1 "{name}"\n{hidden}\n'
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    if done.returncode:
        return None
    start = re.search(rf'^# 1 "{re.escape(name)}"[^\n]*\n', done.stdout, re.MULTILINE)
    if start is None:
        return None
    shown = done.stdout[start.end() :].replace(_HIDING, "#")
    return f'#line 1 "{name}"\n' + _MARKER.sub(r"#line \1 \2", shown)


def _statement(tokens: list[re.Match[str]], i: int, place: _Place) -> tuple[int, str]:
    """Translate the asm statement after the token `i` - 1. Return (next token, C++)."""
    while i < len(tokens) and (tokens[i][0].isspace() or tokens[i]["name"] or tokens[i]["line"]):
        i += 1  # volatile
    if i == len(tokens) or tokens[i][0] != "(":
        place.refuse("an asm statement without parentheses: write asm volatile(...)")
    sections: list[list[re.Match[str]]] = [[]]
    depth = 0
    for found in tokens[i:]:
        i += 1
        token = found[0]
        opens = token in "([{"
        depth += opens - (token in ")]}")
        if depth == 0:
            break
        if found["line"] or (depth == 1 and opens):
            continue
        if depth == 1 and token in (":", "::"):
            sections += [[] for _ in token]
        else:
            sections[-1].append(found)
    sections += [[], [], []]
    template = "".join(_string(token, place) for token in sections[0] if not token[0].isspace())
    operands = [
        _operand(number, part, place)
        for number, part in enumerate(
            [part for section in sections[1:3] for part in _separated(section)]
        )
    ]
    return i, _code(template, operands, place, f"{place.line}_{found.start()}")


def _string(token: re.Match[str], place: _Place) -> str:
    if token["raw"] is not None:
        return token["raw"]
    if token["string"] is None:
        place.refuse(f"{token[0]} in an asm statement: write the instructions as string literals")
    return re.sub(r"\\(.)", lambda found: _ESCAPES.get(found[1], found[1]), token["string"])


def _separated(section: list[re.Match[str]]) -> Iterator[list[re.Match[str]]]:
    """Split tokens at commas outside of parentheses."""
    depth, part = 0, list[re.Match[str]]()
    for token in section:
        depth += (token[0] in "([{") - (token[0] in ")]}")
        if token[0] == "," and depth == 0:
            yield part
            part = []
        else:
            part.append(token)
    if any(not token[0].isspace() for token in part):
        yield part


class _Bound(NamedTuple):
    """An operand of an asm statement: C++ before and after the instructions."""

    before: str
    after: str
    operand: Operand


def _operand(number: int, part: list[re.Match[str]], place: _Place) -> _Bound:
    first = next((k for k, token in enumerate(part) if not token[0].isspace()), 0)
    text = part[first]["string"] if part else None
    constraint = _CONSTRAINT.fullmatch(text or "")
    expression = "".join(" " if t[0].isspace() else t[0] for t in part[first + 1 :]).strip()
    if constraint is None:
        place.refuse(f'operand {number} of asm has the constraint "{text}": use r, l, h, f, d or n')
    kind, register = _KINDS[constraint[2]]
    name = f"ptx_{number}"
    head = f"[[maybe_unused]] {register} {name}"
    bound = Operand(name, constraint[2])
    if not constraint[1]:
        return _Bound(f"{head} = ptx_on_cpu::input<{kind}>{expression};", "", bound)
    target = f"ptx_to_{number}"
    value = "~0" if constraint[1] == "=" else f"ptx_on_cpu::input<{kind}>({target})"
    before = f"auto& {target} = {expression}; {head} = ({register}){value};"
    return _Bound(before, f"ptx_on_cpu::output<{kind}>({target}, {name});", bound)


def _code(template: str, bound: list[_Bound], place: _Place, unique: str) -> str:
    """Return C++ that runs the instructions of a template, as one statement in one line."""
    names = {f"%{number}": each.operand for number, each in enumerate(bound)}
    text = _COMMENT.sub(" ", template).replace("%%", "%")
    code: list[str] = []
    at = 0
    while at < len(text):
        if text[at].isspace():
            at += 1
            continue
        found = _STATEMENT.match(text, at)
        if found is None:
            place.refuse(f"the emulator does not understand the PTX {text[at : at + 30].strip()!r}")
        at = found.end()
        if found["brace"]:
            code.append(found["brace"])
        elif found["type"]:
            code.append(_declaration(found["type"], found["names"], names, place))
        elif found["label"]:
            label = f"ptx_{unique}_{found['label'].replace('$', '_dollar_')}"
            code.append(f"{label}: __attribute__((unused));")
        elif found["code"]:
            code.append(_instruction(found, names, unique, place))
    befores, afters = [each.before for each in bound], [each.after for each in bound]
    return " ".join(["do {", *befores, "{", *code, "}", *afters, "} while (0)"])


def _declaration(kind: str, list_: str, names: dict[str, Operand], place: _Place) -> str:
    code = []
    for name in (each.strip() for each in list_.split(",")):
        several = re.fullmatch(r"(\S+)<(\d+)>", name)
        for each in (f"{several[1]}{k}" for k in range(int(several[2]))) if several else (name,):
            try:
                operand = declared(each, kind)
            except UnknownPtxError as error:
                place.refuse(str(error))
            names[each] = operand
            # Without an initializer, as a branch may jump over the declaration.
            code.append(f"[[maybe_unused]] {operand.register} {operand.name};")
            code.append(f"{operand.name} = ({operand.register})~0ull;")
    return " ".join(code)


def _instruction(
    found: re.Match[str], names: dict[str, Operand], unique: str, place: _Place
) -> str:
    code, operands = found["code"], found["operands"].strip()
    try:
        if code in ("bra", "bra.uni"):
            body = f"goto ptx_{unique}_{operands.replace('$', '_dollar_')};"
        else:
            body = called(code, operands, names)
        if found["guard"] is None:
            return body
        guard = found["guard"].replace(" ", "")
        test = names.get(guard.lstrip("!"))
        if test is None:
            raise UnknownPtxError(f"the emulator does not know the predicate {guard}")
    except UnknownPtxError as error:
        place.refuse(str(error))
    return f"if ({'!' * guard.startswith('!')}{test.name}) {{ {body} }}"

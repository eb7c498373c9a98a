"""Render a chat template in a separate process, which `gpt2block.engine.chat.template` starts.

A template comes from a checkpoint. The template cannot reach Python objects (jinja2's sandbox). The
process has limits of memory and output, and its parent ends it after a time limit. The process
reads and writes lines of JSON. The first line is the source of the template; the answer contains
the names that the template reads. A line with an object contains the variables of a rendering; the
answer is its text. A list after it contains names of variables; the answer contains the ranges of
the text that come from their strings.

To locate strings, each of their characters is replaced by another character, its mark. The template
sees `MarkedText`, which compares, searches and splits like the string without marks; pieces and
joins keep the marks. Both renderings must have the same text.
"""

from __future__ import annotations

import os
import signal
import sys

# Remove this file's folder from sys.path: its modules could hide standard library modules.
sys.path[:] = [each for each in sys.path if each != os.path.dirname(__file__)]

import json  # noqa: E402
import re  # noqa: E402
from collections.abc import Callable, ItemsView, Iterator, KeysView, ValuesView  # noqa: E402
from contextlib import suppress  # noqa: E402
from datetime import datetime  # noqa: E402
from functools import wraps  # noqa: E402
from typing import Any, NoReturn, SupportsIndex  # noqa: E402

import jinja2  # noqa: E402
from jinja2 import meta, nodes  # noqa: E402
from jinja2.compiler import CodeGenerator, Frame  # noqa: E402
from jinja2.ext import Extension, loopcontrols  # noqa: E402
from jinja2.parser import Parser  # noqa: E402
from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: E402

MEMORY = 2**30  # limit of the address space in bytes, except on Windows
MAX_CHARACTERS = 2**22  # maximum characters of a rendering
MARKS = range(0xF0000, 0x10FFFE)  # private-use code points that stand for variables' characters
# Roles from which a template may build a special token's name, as in "<|" + role + "|>".
ROLES = {"system", "developer", "user", "assistant", "model", "tool", "function", "ipython",
         "observation", "environment", "context"}  # fmt: skip


class GenerationTag(Extension):
    """Accept `{% generation %}` … `{% endgeneration %}`, and leave the text between unchanged."""

    tags = {"generation"}  # noqa: RUF012  (as jinja2 declares it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Marks(dict[int, str]):
    """Map characters to marks (private-use code points); `back` maps marks to characters."""

    def __init__(self, used: set[str]) -> None:
        """used: characters that occur in texts and therefore cannot be marks."""
        self.back: dict[int, str] = {}
        self._free = (code for code in MARKS if chr(code) not in used)

    def __missing__(self, code: int) -> str:
        mark = next(self._free)
        self.back[mark] = chr(code)
        self[code] = chr(mark)
        return self[code]


marks, now = Marks(set()), datetime.now()  # globals: marks and time of the current rendering


def marked(text: str) -> MarkedText:
    return MarkedText(text.translate(marks))


def plain(value: object) -> Any:
    """Return a copy of a value with each mark replaced by the character that it stands for."""
    if isinstance(value, str):
        return str.translate(value, marks.back)
    if isinstance(value, list):
        return [*map(plain, value)]
    if isinstance(value, tuple):
        return tuple.__new__(type(value), map(plain, value))  # also a named tuple, as of `groupby`
    return {plain(k): plain(v) for k, v in value.items()} if isinstance(value, dict) else value


def followed(value: object, key: str = "") -> object:
    """Return a copy of a JSON value whose strings consist of marks instead of characters."""
    if isinstance(value, str):
        return MarkedText(value) if key == "role" and value in ROLES else marked(value)
    if isinstance(value, list):
        return [followed(each) for each in value]
    if isinstance(value, dict):
        return {marked(name): followed(each, name) for name, each in value.items()}
    return value


class MarkedText(str):
    """A string with marks (stand-ins for characters) that behaves like the original string."""

    __slots__ = ()

    def __str__(self) -> str:
        return self

    def __radd__(self, other: str) -> MarkedText:
        return MarkedText(str.__add__(other, self))

    def __iter__(self) -> Iterator[MarkedText]:
        return map(MarkedText, str.__iter__(self))

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> MarkedText:
        pieces = str.split(plain(self), plain(old), count)
        return MarkedText(str.join(new, self._pieces(pieces, len(old))))

    def _pieces(self, strings: Any, gap: int) -> Any:
        """Find strings in this text, in order, `gap` or more characters apart; return them."""
        whole, at, pieces = plain(self), 0, []
        for piece in [strings] if isinstance(strings, str) else strings:
            start = whole.find(piece, at)
            if start >= 0:
                at = start + len(piece) + gap
                pieces.append(self[start : start + len(piece)])
            else:
                pieces.append(marked(piece))
        return pieces[0] if isinstance(strings, str) else type(strings)(pieces)


def _method(name: str) -> Callable[..., Any]:
    """Return the method `name` of `str` for `MarkedText`, which keeps marks in its results."""
    of_str = getattr(str, name)

    def method(self: MarkedText, *args: object, **options: object) -> Any:
        if name in _KEEPING:
            return MarkedText(of_str(self, *args))
        result = of_str(plain(self), *plain(args), **plain(options))
        if not isinstance(result, (str, list, tuple)):
            return result
        separator = options.get("sep", args[0] if args else None) if "split" in name else None
        return self._pieces(result, len(separator) if isinstance(separator, str) else 0)

    return method


# Methods of `str` that copy characters unchanged, and therefore marks, too
_KEEPING = ("__add__", "__mul__", "__rmul__", "__mod__", "__getitem__", "join")
_COMPARING = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__contains__")
_OTHERS = {name for name in dir(str) if not name.startswith(("_", "format", "make", "replace"))}
for _name in {*_KEEPING, *_COMPARING, *_OTHERS, "__hash__", "__repr__"}:
    setattr(MarkedText, _name, _method(_name))


class Following(CodeGenerator):
    """Code generator of jinja2 that replaces each string of a template by a `MarkedText`."""

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:  # noqa: N802  (jinja2's name)
        if isinstance(node.value, str):
            self.write(f"environment.concat(({node.value!r},))")
        else:
            super().visit_Const(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self.write("environment.concat(map(str, (")
        for each in node.nodes:
            self.visit(each, frame)
            self.write(", ")
        self.write(")))")


def _followed_filter(do: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a jinja2 filter so that, apart from marks, its result is as for unmarked input."""

    @wraps(do)
    def filtered(*args: object, **options: object) -> object:
        read = (Iterator, KeysView, ValuesView, ItemsView)  # `plain` does not copy them
        args = tuple(list(each) if isinstance(each, read) else each for each in args)
        result = do(*args, **options)
        if not isinstance(result, (str, int, float)):
            return result
        true = do(*plain(args), **plain(options))
        if not isinstance(result, str):
            return true
        return MarkedText(result) if plain(result) == true else marked(true)

    return filtered


def refuse(message: str) -> NoReturn:
    """Raise a template's own error. Templates call this function as `raise_exception`."""
    raise jinja2.TemplateError(message)


def to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without HTML escapes. Templates call this function as the filter `tojson`."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def environment(follows: bool = False) -> jinja2.Environment:
    """Return a jinja2 environment like transformers'. `follows`: make strings `MarkedText`."""
    jinja = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    jinja.filters["tojson"] = to_json
    jinja.globals["raise_exception"] = refuse
    jinja.globals["strftime_now"] = lambda form: str(now.strftime(form))
    if follows:
        jinja.code_generator_class = Following
        jinja.concat = lambda parts: MarkedText("".join(parts))  # type: ignore[method-assign]
        jinja.filters |= {name: _followed_filter(do) for name, do in jinja.filters.items()}
    return jinja


def rendered(template: jinja2.Template, variables: dict[str, object]) -> str:
    parts, length = [], 0
    for part in template.generate(**variables):
        parts.append(part)
        length += len(part)
        if length > MAX_CHARACTERS:
            raise jinja2.TemplateError(f"it writes more than {MAX_CHARACTERS:,} characters")
    return "".join(parts)


def places(
    template: jinja2.Template, text: str, values: dict[str, Any], names: list[str]
) -> list[tuple[int, int]]:
    """Return the ranges of a text whose characters come from the variables `names`."""
    global marks  # noqa: PLW0603  (of this process)
    marks = Marks({*json.dumps(values, ensure_ascii=False), *text})
    following = rendered(template, {**values, **{name: followed(values[name]) for name in names}})
    if plain(following) != text:
        raise jinja2.TemplateError("what it does with their characters cannot be followed")
    own = "".join(map(chr, marks.back))
    return [each.span() for each in re.finditer(f"[{own}]+", following)] if own else []


def names_of(source: str) -> dict[str, object]:
    """Return the fields of `TemplateNames` for the source of a template."""
    tree = environment().parse(source)
    lookups = [*tree.find_all((nodes.Getattr, nodes.Getitem))]
    roles = [n for n in lookups if "role" in (getattr(n, "attr", None), key_of(n))]
    compares = tree.find_all((nodes.Compare, nodes.Operand, nodes.Test))
    compared = [n for each in compares for n in each.iter_child_nodes() if n in roles]
    fields = {each.attr for each in tree.find_all(nodes.Getattr)}
    fields |= {each.value for each in tree.find_all(nodes.Const) if isinstance(each.value, str)}
    own = {each.name for each in tree.find_all(nodes.Name) if each.ctx == "store"}
    tests = tree.find_all((nodes.Test, nodes.Filter))  # such as "x is defined" before x is set
    tested = {name.name for each in tests for name in each.find_all(nodes.Name)}
    return {
        "fields": sorted(fields),
        "any_role": not roles or len(roles) > len(compared),
        "variables": sorted(meta.find_undeclared_variables(tree) - (own - tested)),
    }


def key_of(node: nodes.Node) -> Any:
    """Return the key of an expression x['key'] if it is a constant, else None."""
    return getattr(getattr(node, "arg", None), "value", None)


def main() -> None:
    global now
    with suppress(ImportError, ValueError):  # Windows has no module `resource`
        import resource  # noqa: PLC0415

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent process
    templates: list[jinja2.Template] = []
    text, variables = "", {}
    for line in sys.stdin:
        try:
            request = json.loads(line)
            if not templates:
                templates = [environment(each).from_string(request) for each in (False, True)]
                answer = names_of(request)
            elif isinstance(request, dict):
                variables, now = request, datetime.now()  # kept for a second rendering by `places`
                answer = {"text": (text := rendered(templates[0], request))}
            else:
                answer = {"places": places(templates[1], text, variables, request)}
        except MemoryError:
            answer = {"error": f"it takes more than {MEMORY >> 20:,} MiB of memory"}
        except RecursionError:
            answer = {"error": "it calls itself too often"}
        except Exception as error:  # a template can raise any exception
            place = (
                f"line {error.lineno}: " if isinstance(error, jinja2.TemplateSyntaxError) else ""
            )
            answer = {"error": f"{place}{error or type(error).__name__}"[:1000]}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()

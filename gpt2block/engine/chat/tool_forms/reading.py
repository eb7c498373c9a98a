"""Read calls of tools, and the text around them, from an answer that arrives in pieces."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from typing import Any, Literal, NamedTuple, TypeVar

import regex

from gpt2block.engine.chat.thinking import Thinking
from gpt2block.engine.chat.tool_forms.base import ToolForm
from gpt2block.engine.chat.tool_forms.members import Members, types_of_argument

_OTHER = r'"(?:type|id)"\s*:\s*"[^"]*"'  # a further member of a call, before or after the others
_NAME = r'"name"\s*:\s*"(?P<name>[^"\\]+)"'  # usually before the arguments, but also after them
_ARGUMENTS = r'"(?:arguments|parameters)"\s*:\s*(?=\{)'
_HEAD = regex.compile(
    rf"\s*(?P<list>\[)?\s*\{{\s*(?:{_OTHER}\s*,\s*)?(?:{_NAME}\s*,\s*)?{_ARGUMENTS}"
)
_NAMED_HEAD = regex.compile(
    r"(?P<list>(?!))?\s*(?P<name>[\w-]+)(?:\[CALL_ID\][\w-]*)?\[ARGS\]\s*(?=\{)"
)
_CLOSE = regex.compile(rf"\s*(?:,\s*{_NAME}\s*)?(?:,\s*{_OTHER}\s*)?\}}")
_NEXT = regex.compile(r"\s*[,;]\s*(?=\{)")
_LIST_END = regex.compile(r"\s*\]")
_JSON = Members(("", ""), ("", ""), "", quotes=('"',))  # strings and brackets of JSON
_SPACE = regex.compile(r"\s*(?=\S)")

Texts = Literal["around", "instead", "none"]
Result = TypeVar("Result")
Step = Generator[None, None, Result]  # yields when it needs more text


class CallPart(NamedTuple):
    """A part of a call. call: number of the call in the answer, from 0.

    name: name of the function in the first part of a call, else None. arguments: a piece of the
    JSON text of the arguments.
    """

    call: int
    name: str | None
    arguments: str


class Thought(NamedTuple):
    """A piece of the model's thinking, without the texts and the white space around it."""

    text: str


Found = str | CallPart | Thought


class CallReader:
    """Separates an answer into text, calls and thinking.

    form: the form of calls; None: the answer has no calls.
    schemas: for each function that may be called, the JSON schema of its arguments. held: whether
    the answer is held to a grammar of `lark`; then the arguments of a call are returned as they
    arrive (one by one if the form writes them so), and a call that is cut is returned without its
    end, if its name is certain. Otherwise a call is returned when all of it has been read. A call
    must have one of these names and a JSON object of arguments; otherwise the call is returned as
    text. White space next to a call is left out unless text follows it. texts: whether a held
    answer has text around its calls, text instead of calls, or none. thinking: the texts around
    thinking; None: thinking is text.

    count: number of calls that have begun. cut: whether the answer ended within its last call.
    thoughts: ranges of characters of the answer between the texts around thinking.
    """

    def __init__(
        self,
        form: ToolForm | None,
        schemas: Mapping[str, Mapping[str, Any]],
        held: bool = False,
        texts: Texts = "around",
        thinking: Thinking | None = None,
    ) -> None:
        form = form or ToolForm("", ())
        self._form, self._schemas, self._held, self._texts = form, schemas, held, texts
        self._head = _NAMED_HEAD if form.named else _HEAD
        self._next = _NEXT
        if form.members:
            self._head, self._next = form.members.head, form.members.next
        begins = "|".join(map(regex.escape, form.begins)) or "(?!)"
        self._begin, self._thinking = regex.compile(begins), thinking
        if thinking:
            begin = regex.escape(thinking.begin + thinking.label.rstrip())
            self._think = regex.compile(rf"\s*{begin}")
            self._think_end = regex.compile(rf"\s*{regex.escape(thinking.end)}")
        self._end = regex.compile(rf"\s*{regex.escape(form.end)}") if form.end else None
        self._text, self._final = "", False  # text not returned yet; whether no text follows it
        self._at = 0  # number of characters of _text that the current step has read
        self._space = ""  # white space after the returned text, which is returned if text follows
        self.count, self.cut, self._after_call = 0, False, False
        self.thoughts, self._characters = list[tuple[int, int]](), 0  # _characters: all so far
        self._found: list[Found] = []
        self._steps = self._all()

    def read(self, piece: str, final: bool = False) -> list[Found]:
        """Return the text and the parts of calls that a further piece of the answer completes.

        final: whether the answer ends here.
        """
        self._text += piece
        self._characters += len(piece)
        self._final = final
        next(self._steps, None)
        found, self._found = self._found, []
        return found

    def _all(self) -> Step[None]:
        calls = True  # whether calls may follow
        if not (yield from self._thoughts(self._thinking is not None and self._thinking.opened)):
            return
        if self._form.bare:
            while not self._text.strip() and not self._final:
                yield
            yield from self._calls(0)
        if self._texts == "instead" and not self.count:
            calls = (yield from self._matched(self._begin, drops=True)) is not None
            self._texts = "none" if calls else "around"
        while True:
            begin: Any = self._begin.search(self._text, partial=True) if calls else None
            if begin is not None and not begin.partial:
                self._say(begin.start())
                count = self.count
                yield from self._calls(len(begin[0]))
                if self.count > count and not (yield from self._thoughts(False)):
                    return
                continue
            whole = begin is None or self._final
            self._say(len(self._text) if whole else begin.start())
            if self._final:
                break
            yield
        if self._texts == "none" and not self.count:
            self._cut("")
        if self._space and not self._after_call:
            self._found.append(self._space)

    def _thoughts(self, opened: bool) -> Step[bool]:
        """Read thinking if it comes next; return False if the answer ends within it."""
        while opened or (self._thinking and (yield from self._matched(self._think))):
            opened = False
            if not (yield from self._thought()):
                return False
        return True

    def _thought(self) -> Step[bool]:
        """Return thinking from `_at` as it arrives, and whether its end has been read."""
        begun, first = False, self._characters - len(self._text) + self._at
        while True:
            self._drop()
            end: Any = self._think_end.search(self._text, partial=True)
            ended = end is not None and not end.partial
            stop = len(self._text) if end is None or (self._final and not ended) else end.start()
            piece = self._text[:stop] if begun else self._text[:stop].lstrip()
            if piece:
                self._found.append(Thought(piece))
                begun = True
            self._at = end.end() if ended else stop
            if not (ended or self._final):
                yield
                continue
            last = len(self._text) - self._at + len(end[0].lstrip() if ended else "")
            self.thoughts.append((first, self._characters - last))
            if ended:
                yield from self._matched(_SPACE, drops=True)
            self._drop()
            return ended

    def _calls(self, prefix: int) -> Step[None]:
        """Read calls after `prefix` characters, which are text if no call follows them."""
        listed = False
        while True:
            self._at = prefix
            head = yield from self._matched(self._head)
            name = head and head["name"]
            members, named = self._form.members, name in self._schemas
            known = head is not None and (named or (name is None and not self._held))
            call = self._arguments(members, name) if members else self._call(name)
            if not known or not (yield from call):
                if self._held and self._final and (prefix or self._texts == "none"):
                    self._cut(self._text[prefix:])
                self._say(prefix)
                return
            self._drop()
            listed = listed or head["list"] is not None
            drops = self._held or not self._form.members
            if (yield from self._matched(self._next, drops)) is None:
                break
            prefix = self._at
        for end in (_LIST_END if listed else None, self._end):
            if end is not None and (yield from self._matched(end, drops=True)):
                self._drop()

    def _call(self, name: str | None) -> Step[bool]:
        """Read the arguments and the end of a call; return whether they are valid.

        name: name of the function, None if it may follow the arguments.
        """
        index, begin, extent = self.count, self._at, _Extent(_JSON, whole=True)
        if self._held:
            self._add(CallPart(index, name, ""))
        while not extent.closed:
            first, self._at = self._at, extent.end(self._text, self._at)
            if self._final and not extent.closed:
                self._at = len(self._text)
            if self._held and self._at > first:
                self._add(CallPart(index, None, self._text[first : self._at]))
            if not extent.closed:
                if self._final:
                    self.cut = self._held
                    return self._held
                yield
        arguments = self._text[begin : self._at]
        if self._held:
            if not self._form.named:
                yield from self._matched(_CLOSE)
            return True
        if not _is_json(arguments):
            return False
        if not self._form.named:
            close = yield from self._matched(_CLOSE)
            if close is None or (name is None) == (close["name"] is None):
                return False
            name = name or close["name"]
        if name not in self._schemas:
            return False
        self._add(CallPart(index, name, arguments))
        return True

    def _arguments(self, members: Members, name: str) -> Step[bool]:
        """Read arguments that are written one by one, and the end of their call, as `_call`."""
        index, parts = self.count, list[str]()
        if self._held:
            self._add(CallPart(index, name, ""))
        while True:
            match, begin = (yield from self._matched(members.argument)), self._at
            if match is not None and match["close"]:
                parts.append("}" if parts else "{}")
            elif match is not None and (yield from self._value(members)):
                types = types_of_argument(self._schemas[name], match["key"])
                value = members.json(self._text[begin : self._at], types)
                parts.append(f'{", " if parts else "{"}"{match["key"]}": {value}')
            else:
                self.cut = self._held
                self._at = len(self._text) if self._held else self._at
                return self._held
            if self._held:
                self._add(CallPart(index, None, parts[-1]))
            if match["close"]:
                break
        if not self._held and _is_json("".join(parts)):
            self._add(CallPart(index, name, "".join(parts)))
        return self.count > index

    def _value(self, members: Members) -> Step[bool]:
        """Move `_at` to the end of a value; return False if the answer ends before it."""
        extent = _Extent(members)
        while not extent.closed:
            self._at = extent.end(self._text, self._at)
            if not extent.closed:
                if self._final:
                    return False
                yield
        return True

    def _matched(self, pattern: regex.Pattern[str], drops: bool = False) -> Step[Any]:
        """Return the match of a pattern at `_at`, which moves to its end, or None.

        drops: whether to leave out a beginning of a match at the end of the answer.
        """
        while True:
            match = pattern.match(self._text, self._at, partial=True)
            if match is None or not match.partial:
                break
            if self._final:
                self._text = self._text[: self._at] if drops else self._text
                return None
            yield
        if match is not None:
            self._at = match.end()
        return match

    def _cut(self, text: str) -> None:
        """Return a call that the answer ends in, if its name is certain. text: the part of it."""
        written = text.lstrip(" \n[")
        names = [name for name in self._schemas if self._form.head(name).startswith(written)]
        if len(names) == 1:
            self._add(CallPart(self.count, names[0], ""))
        self._text, self.cut = "", True

    def _say(self, count: int) -> None:
        """Return the next `count` characters as text, except for white space at their end."""
        if self._texts == "none":
            self._text = self._text[count:]
            count = 0
        text = self._space + self._text[:count]
        said = text.rstrip()
        self._space, self._at = text[len(said) :], count
        self._drop()
        if said:
            self._found.append(said)
            self._after_call = False

    def _add(self, part: CallPart) -> None:
        self._found.append(part)
        self._space, self._after_call, self.count = "", True, part.call + 1

    def _drop(self) -> None:
        self._text, self._at = self._text[self._at :], 0


class _Extent:
    """The extent of a value, or with `whole` of an object, in a text that is read in pieces.

    closed: whether the end has been read.
    """

    def __init__(self, members: Members, whole: bool = False) -> None:
        self.closed, self._members, self._whole = False, members, whole
        self._depth, self._quote = 0, ""

    def end(self, text: str, at: int) -> int:
        """Read characters from `at`; return the end of the value, or of what has been read."""
        while not self.closed:
            pattern = self._members.inside.get(self._quote, self._members.marks)
            mark: Any = pattern.search(text, at, partial=True)
            if mark is None or mark.partial:
                return len(text) if mark is None else int(mark.start())
            at, kind = mark.end(), mark.lastgroup
            if self._quote:
                self._quote = "" if mark[0] == self._quote else self._quote
            elif kind == "quote":
                self._quote = mark[0]
            elif kind == "open":
                self._depth += 1
            elif not self._depth:
                self.closed, at = True, mark.start()
            elif kind == "close":
                self._depth -= 1
                self.closed = self._whole and not self._depth
        return at


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=int)  # int refuses NaN and Infinity, which are not JSON
    except (ValueError, RecursionError):
        return False
    return True

"""The forms in which models write tool calls: reading, writing, prompts and grammars."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from typing import Any

import pytest

pytest.importorskip("jinja2", reason="the extra serve is not installed")

from gpt2block.engine.chat.template import ChatTemplate
from gpt2block.engine.chat.thinking import thinking_of
from gpt2block.engine.chat.tool_forms import FORMS, FormName
from gpt2block.engine.chat.tool_forms.base import Tool
from gpt2block.engine.chat.tool_forms.grammar import closed, lark
from gpt2block.engine.chat.tool_forms.reading import CallReader, Thought
from gpt2block.errors import InputError
from tests.devices import slow
from tests.tool_answers import EXAMPLES, OTHERS, SCHEMAS, TEMPLATES, call, joined

USER = {"role": "user", "content": "Hi"}
A_NUMBER = {"type": "object", "properties": {"a": {"type": "number", "maximum": 1.25}},
            "required": ["a"]}  # fmt: skip
SHOWN = [{"type": "function", "function": {"name": "f", "description": "Counts."}}]
TOOLS = [Tool("f", closed(A_NUMBER)), Tool("g", closed({"type": "object", "properties": {}}))]
CALLS = [("f", '{"a": 1.2}'), ("g", "{}")]


def read(form: str, text: str, size: int, *more: Any, schemas: Any = SCHEMAS) -> list[Any]:
    reader = CallReader(FORMS[form], schemas, *more)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    return [part for piece in pieces for part in reader.read(piece)] + reader.read("", final=True)


def test_each_form_has_examples_and_a_template() -> None:
    assert [*FORMS] == [*EXAMPLES] == [*TEMPLATES] == [*FormName.__args__]  # type: ignore[attr-defined]
    for name, source in [*[*TEMPLATES.items()][:-1], *OTHERS.values()]:
        assert [form.name for form in FORMS.values() if form.is_shown_in(source)] == [name]


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
@pytest.mark.parametrize("form", FORMS)
def test_answers_are_read_in_pieces_of_any_size(form: str, size: int) -> None:
    for text, content, calls in EXAMPLES[form]:
        assert joined(read(form, text, size)) == (content, calls), text


@pytest.mark.parametrize("form", FORMS)
def test_a_text_without_calls_is_returned_as_it_is(form: str) -> None:
    """Each example is cut at every place, with white space around it."""
    for text, *_ in EXAMPLES[form]:
        for end in range(len(text)):
            cut = f" \n{text[:end]}\n"
            content, calls = joined(read(form, cut, 3))
            assert calls or content == cut


@pytest.mark.parametrize("form", FORMS)
def test_arguments_of_a_held_answer_arrive_in_pieces(form: str) -> None:
    text = FORMS[form].written("", [call("f", '{"a": "}", "b": [1]}')])
    parts = read(form, text, 4, True)
    assert joined(parts) == ("", [("f", '{"a": "}", "b": [1]}')])
    assert len(parts) == 4 if FORMS[form].members else len(parts) > 4
    cut = read(form, text[: text.index("[1") + 1], 4, True)
    whole = '{"a": "}"' if FORMS[form].members else '{"a": "}", "b": ['
    assert joined(cut) == ("", [("f", whole)])
    escape = FORMS[form].written("", [call("f", r'{"a": "\n"}')])
    assert joined(read(form, escape[: escape.find("\\") + 1], 4, True))[0] == ""


@pytest.mark.parametrize("form", FORMS)
def test_a_held_answer_that_is_cut_shows_no_marks(form: str) -> None:
    """A call has its name as soon as no other name can follow, and its arguments so far."""
    first, text = (FORMS[form].written("", [call(*each) for each in CALLS[:n]]) for n in (1, 2))
    begin = FORMS[form].begins[0]
    for end in range(len(text)):
        content, calls = joined(read(form, text[:end], 3, True, "none"))
        assert content == ""
        for call_, whole in zip(calls, CALLS, strict=False):
            assert (call_[0], whole[1][: len(call_[1])]) == (whole[0], call_[1])
        if first.startswith(begin) and len(begin) <= end < len(first):
            calls = joined(read(form, first[:end], 3, True, "none"))[1]
            found = joined(read(form, f"Hi {first[:end]}", 3, True))
            assert found == ("Hi" if calls else "Hi ", calls)


@pytest.mark.parametrize("form", FORMS)
def test_a_text_in_place_of_calls(form: str) -> None:
    """A text may have the marks of a call, if it does not begin with a call."""
    written = FORMS[form].written("", [call(*each) for each in CALLS])
    text = f'{{"a": "{FORMS[form].begins[0]}{{", "b": {json.dumps(written)}}}'
    assert joined(read(form, text, 3, True, "instead")) == (text, [])
    assert joined(read(form, written, 3, True, "instead")) == ("", CALLS)
    assert joined(read(form, FORMS[form].begins[0][:-1], 3, True, "instead"))[0] == ""


@pytest.mark.parametrize("form", FORMS)
def test_written_calls_are_read(form: str) -> None:
    text = FORMS[form].written("", [call(*each) for each in CALLS])
    assert joined(read(form, text, 1000)) == ("", CALLS)
    with pytest.raises(InputError, match="expected tool_calls such as"):
        FORMS[form].written("", [{"function": {}}])


@pytest.mark.parametrize("form", FORMS)
def test_a_round_in_a_prompt(form: str) -> None:
    """The prompt has the tools, the call as the model writes it, and the result."""
    template = ChatTemplate(TEMPLATES[form], {})
    template.tool_form = template.tool_form or FORMS["general"]
    assert template.tool_form is FORMS[form]
    asked = [USER, {"role": "assistant", "content": None, "tool_calls": [call(*CALLS[0])]},
             {"role": "tool", "tool_call_id": "a1b2c3d4e", "content": "r1"}]  # fmt: skip
    messages, variables = template.tool_form.offered(template.names, asked, SHOWN)
    text, places = template.placed(messages, **variables)
    at = [text.rindex(part) for part in
          ("Counts.", "Hi", FORMS[form].written("", [call(*CALLS[0])]), "r1")]  # fmt: skip
    assert at[1:] == sorted(at[1:])
    assert len(FORMS[form].new_id()) == (9 if "mistral" in form else 29)
    assert any(start <= at[0] < end for start, end in places)


MEMBERS = [name for name, form in FORMS.items() if form.members]
PIECES = ["a", "é", "\n", "\\", *" '\",)]}:([{=<1", "True",
          "<tool_call>", "</parameter>", "</function>", "<|tool_call>", "</think>"]  # fmt: skip


def random_value(rng: random.Random, depth: int = 2) -> object:
    kind = rng.randrange(6 if depth else 4)
    if kind < 4:
        text, constant = "".join(rng.choices(PIECES, k=rng.randrange(9))), [True, False, None]
        return [text, rng.choice(constant), rng.randrange(-99, 10**12), rng.random()][kind]
    values = [random_value(rng, depth - 1) for _ in range(rng.randrange(4))]
    return values if kind == 4 else {f"k{i}-": value for i, value in enumerate(values)}


def schema_of(value: Any) -> Mapping[str, Any]:
    """Return a schema that determines the type of a value."""
    kinds = {bool: "boolean", int: "integer", str: "string", float: "number", list: "array"}
    if isinstance(value, dict):
        properties = {name: schema_of(each) for name, each in value.items()}
        return closed({"type": "object", "properties": properties, "required": [*value]})
    return {"type": kinds.get(type(value), "null")}


def calls_of(values: list[dict[str, object]]) -> list[dict[str, Any]]:
    return [call(name, json.dumps(each, ensure_ascii=False), name * 9)
            for name, each in zip("fg", values, strict=True)]  # fmt: skip


@pytest.mark.parametrize("name", [*MEMBERS, *OTHERS])
def test_random_calls(name: str) -> None:
    """80 calls with any values are read as written, from templates, too, and fit the grammar."""
    pytest.importorskip("llguidance", reason="the extra tools is not installed")
    of, source = OTHERS.get(name, (name, TEMPLATES.get(name, "")))
    form, template, rng = FORMS[of], ChatTemplate(source, {}), random.Random(7)
    for index in range(80):
        values = [{f"a_{i}": random_value(rng) for i in range(rng.randrange(4))} for _ in "fg"]
        schemas = {name: schema_of(each) for name, each in zip("fg", values, strict=True)}
        written = form.written("", calls_of(values))
        # The template of LFM2 writes a text between quotes, without escapes.
        plain = [{k: re.sub(r"['\\]", "", v) if name == "lfm2" and isinstance(v, str) else v
                  for k, v in each.items()} for each in values]  # fmt: skip
        message = {"role": "assistant", "content": "", "tool_calls": calls_of(plain)}
        rendered = template.render([message], add_generation_prompt=False)
        python = [f"{n}({', '.join(f'{k}={v!r}' for k, v in each.items())})"
                  for n, each in zip("fg", values, strict=True)]  # fmt: skip
        cases = [(rendered, plain, False), (written, values, False), (written, values, True)]
        if name == "lfm2":
            cases.append(
                (f"<|tool_call_start|>[{', '.join(python)}]<|tool_call_end|>", values, False)
            )
        for text, expected, held in cases:
            calls = joined(read(of, text, rng.randrange(1, 40), held, schemas=schemas))[1]
            assert [name for name, _ in calls] == ["f", "g"], text
            assert [json.loads(each) for _, each in calls] == expected
        if index % 10 == 0 and "\n</parameter>\n\n" not in written:
            tools = [Tool(*each) for each in schemas.items()]
            assert accepted(lark(form, tools, True, True), written, []), written


def test_the_name_of_a_call_is_before_its_arguments() -> None:
    function = {"arguments": '{"a": 1}', "name": "f"}
    template = ChatTemplate("{{ messages[0].tool_calls[0].function | tojson }}", {})
    text = template.render([{"role": "assistant", "tool_calls": [{"function": function}]}])
    assert text == '{"name": "f", "arguments": {"a": 1}}'


# --- thinking -------------------------------------------------------------------------------------

QWEN, GEMMA = (thinking_of(TEMPLATES[name]) for name in ("qwen3-coder", "gemma4"))
CALL = FORMS["qwen3-coder"].written("", [call("g", "{}")])
GEMMA_CALL = FORMS["gemma4"].written("", [call("g", "{}")])
# (form, thinking, opened, answer, content, thinking's text, number of calls)
THOUGHTS: list[tuple[str, Any, bool, str, str, str, int]] = [
    ("qwen3-coder", QWEN, True, f"\nHm. {CALL}\n</think>\n\nYes. {CALL}", "Yes.", f"Hm. {CALL}", 1),
    ("qwen3-coder", QWEN, False, f"<think>a</think>{CALL}\n<think>b\n</think>{CALL}", "", "ab", 2),
    ("qwen3-coder", QWEN, False, "<think>\n\n</think>\n\nHi <think", "Hi <think", "", 0),
    ("qwen3-coder", QWEN, True, "Hm </thin", "", "Hm </thin", 0),
    ("qwen3-coder", QWEN, False, "Use <think>a</think>", "Use <think>a</think>", "", 0),
    ("mistral-args", thinking_of("[THINK][/THINK]"), False,
     "[THINK]a[/THINK][TOOL_CALLS]g[ARGS]{}", "", "a", 1),
    ("qwen3-coder", None, False, "<think>a</think>b", "<think>a</think>b", "", 0),
    ("gemma4", GEMMA, False, f"<|channel>thought\na\n<channel|>{GEMMA_CALL}b", "b", "a", 1),
    ("gemma4", GEMMA, False, "<|channel>other\na<channel|>", "<|channel>other\na<channel|>", "", 0),
]  # fmt: skip


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("row", THOUGHTS)
def test_thinking_is_read_apart(row: tuple[str, Any, bool, str, str, str, int], size: int) -> None:
    form, thinking, opened, answer, content, thought, count = row
    thinking = thinking and thinking._replace(opened=opened)
    for texts in ("around", *["none"] * bool(count), *["instead"] * (not content)):
        parts = read(form, answer, size, texts != "around", texts, thinking)
        thoughts = [part for part in parts if isinstance(part, Thought)]
        assert "".join(part.text for part in thoughts) == thought
        text, calls = joined([part for part in parts if part not in thoughts])
        assert (text, len(calls)) == ("" if texts == "none" else content, count)


@pytest.mark.parametrize("form", ["qwen3-coder", "gemma4"])
@pytest.mark.parametrize("are_special", [False, True])
def test_grammars_with_thinking(form: str, are_special: bool) -> None:
    """Thinking is permitted before calls and before a text, and may contain anything."""
    pytest.importorskip("llguidance", reason="the extra tools is not installed")
    of, thinking = FORMS[form], thinking_of(TEMPLATES[form])
    assert thinking is not None
    special = [*filter(None, (*of.marks, *thinking.marks))] if are_special else []
    ids = {name: 257 + at for at, name in enumerate(special)}
    one, two = (of.written("", [call(*each) for each in CALLS[:n]]) for n in (1, 2))
    begin, begun = thinking.begin + thinking.label, f"Hm {{\n{thinking.end}\n\n"
    # text → whether accepted if calls are required, optional, one call is optional, with a format
    table = {
        begin + begun + two: (True, True, False, True),
        begin + begun + "Hi": (False, True, True, False),
        begin + begun + '{"a": 1}': (False, True, True, True),
        begin + begun + begin + begun + one: (True, True, True, True),
        "Use" + begin + begun: (False, not are_special, not are_special, False),
        begin + "Hm": (False, False, False, False),
        begin + begun + of.begins[0] + "x": (False, False, False, False),
        one + "\n" * bool(of.line) + begin + begun + one: (True, True, False, True),
    }
    for place, (required, parallel, format) in enumerate(
        [(True, True, None), (False, True, None), (False, False, None), (False, True, A_NUMBER)]
    ):
        grammar, opened = (
            lark(of, TOOLS, required, parallel, ids.get, format, each)
            for each in (thinking, thinking.after(begin))
        )
        for text, expected in table.items():
            assert accepted(grammar, text, special) == expected[place], (text, place)
            if text.startswith(begin):
                assert accepted(opened, text.removeprefix(begin), special) == expected[place], text
        assert not accepted(opened, one, special)


def test_thinking_in_messages() -> None:
    """reasoning_content is rendered from the field that a template reads, or from the content."""
    message = {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    for name, expected in {
        "qwen3-coder": "<think>\nHm.\n</think>\n\nYes.", "lfm2": "<think>Hm.</think>Yes.",
        "gemma4": "<|channel>thought\nHm.\n<channel|>Yes.",
    }.items():  # fmt: skip
        template = ChatTemplate(TEMPLATES[name], {})
        assert expected in template.render([message], add_generation_prompt=False)
    template = ChatTemplate("{% for m in messages %}{{ m.content.split('</think>')[-1] }}"
                            "{{ m.content }}{% endfor %}<think>", {})  # fmt: skip
    assert template.render([message]) == "\n\nYes.<think>\nHm.\n</think>\n\nYes.<think>"
    prompt = ChatTemplate(TEMPLATES["qwen3-coder"], {})
    for enabled, opened in [(True, True), (False, False)]:
        assert QWEN is not None
        assert QWEN.after(prompt.render([USER], enable_thinking=enabled)).opened == opened


# --- grammars -------------------------------------------------------------------------------------


def accepted(grammar: str, text: str, special: list[str]) -> bool:
    """Return whether a grammar accepts a text; tokens are bytes, and special tokens have ids."""
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper  # noqa: PLC0415

    class Tokens:
        bos_token_id, eos_token_id = None, 256

        def __init__(self) -> None:
            self.tokens = [*(bytes([byte]) for byte in range(256)), b"</s>"]
            self.tokens += map(str.encode, special)
            self.special_token_ids = [*range(256, 257 + len(special))]

        def __call__(self, text: str) -> list[int]:
            return [*text.encode()]

    wrapped: Any = TokenizerWrapper(Tokens())
    matcher = LLMatcher(LLTokenizer(wrapped, eos_token=[256]), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    while text:
        name = next((name for name in special if text.startswith(name)), None)
        tokens = [257 + special.index(name)] if name else [*text[0].encode()]
        text = text[len(name or "x") :]
        if matcher.is_stopped() or matcher.try_consume_tokens(tokens) < len(tokens):
            return False
    return bool(matcher.is_accepting())


@pytest.mark.parametrize("are_special", [False, slow(True)])
@pytest.mark.parametrize("form", FORMS)
def test_grammars(form: str, are_special: bool) -> None:
    """Texts are accepted or not, with calls required or optional, and one call or several."""
    pytest.importorskip("llguidance", reason="the extra tools is not installed")
    of = FORMS[form]
    special = [*filter(None, of.marks)] if are_special else []
    one, two = (of.written("", [call(*each) for each in CALLS[:n]]) for n in (1, 2))
    others = ("f", '{"a": "x"}'), ("f", "{}"), ("f", '{"a": 1, "z": 1}'), ("h", "{}")
    wrong = [of.written("", [call(*each)]) for each in others]
    # text -> whether accepted if: one call is required, one or more; optional: one, one or more
    table = {
        one: (True, True, True, True),
        two: (False, of.many, False, of.many),
        "Hi {": (False, False, True, True),
        '{"b"': (False, False, not of.bare, not of.bare),
        "Hi" + of.begins[0] + one.removeprefix(of.begins[0]): (False, False, True, True),
        one + " ok": (False, False, False, of.many),
        **dict.fromkeys([*wrong, of.begins[0] + "x"], (False,) * 4),
    }
    ids = {name: 257 + at for at, name in enumerate(special)}
    for place, (required, parallel) in enumerate([(1, 0), (1, 1), (0, 0), (0, 1)]):
        grammar = lark(of, TOOLS, bool(required), bool(parallel), ids.get)
        for text, expected in table.items():
            assert accepted(grammar, text, special) == expected[place], (text, place)
    grammar = lark(of, TOOLS, False, False, ids.get, A_NUMBER)
    for text in (one, '{"a": 1}', '{"a": ""}', "Hi", f'{{"a": 1}}{one}'):
        assert accepted(grammar, text, special) == (text in (one, '{"a": 1}'))


ITEM = {"type": "object", "required": ["a"], "additionalProperties": False,
        "properties": {"a": {"type": "integer", "minimum": 1},
                       "b": {"$ref": "#/$defs/B"}}}  # fmt: skip
RULES: Any = {
    "type": "object", "additionalProperties": False, "required": ["s"],
    "properties": {
        "e": {"enum": ["x", "y z", 1, None]}, "i": {"$ref": "#/$defs/I"},
        "l": {"type": "array", "items": ITEM, "minItems": 1, "maxItems": 2},
        "o": {"anyOf": [{"type": "boolean"}, {"type": "null"}], "default": None},
        "s": {"type": "string", "minLength": 1, "maxLength": 4, "description": "A text."},
        "x": {"type": "object", "additionalProperties": {"type": ["integer", "boolean"]}},
    },
    "$defs": {"B": {"type": "boolean"}, "I": {"type": "integer"}},
}  # fmt: skip


@pytest.mark.parametrize("form", MEMBERS)
def test_grammars_follow_schemas_of_arguments(form: str) -> None:
    pytest.importorskip("llguidance", reason="the extra tools is not installed")
    grammar = lark(FORMS[form], [Tool("f", RULES)], True, False)

    def fits(values: object) -> bool:
        written = FORMS[form].written("", [call("f", json.dumps(values, ensure_ascii=False))])
        return accepted(grammar, written, [])

    more = [
        {"e": "x"},
        {"e": 1},
        {"e": None},
        {"i": -7},
        {"o": True},
        {"o": None},
        {"x": {}},
        {"x": {"a": 1, "b": True}},
        {"l": [{"a": 1}]},
        {"l": [{"a": 2}, {"a": 1, "b": False}]},
    ]
    wrong = [
        {"e": "z"},
        {"i": "a"},
        {"i": 1.5},
        {"o": 2},
        {"s": ""},
        {"s": "abcde"},
        {"z": 1},
        {"x": {"a": None}},
        {"l": []},
        {"l": [{"a": 0}]},
        {"l": [{}]},
        {"l": [{"a": 1}] * 3},
    ]
    for each in list[Any]([{}, *more, *wrong]):
        values = dict(sorted({"s": "é\n", **each}.items()))
        assert fits(values) == (each not in wrong), values
    first = {"e": "y z", "i": 1, "l": [{"a": 9}], "o": False, "s": "abcd"}
    assert [fits(values) for values in (first, {"e": "x"}, {})] == [True, False, False]


def test_a_grammar_refuses_keywords_that_it_cannot_follow() -> None:
    for form, schema in [("gemma4", {"type": "string", "pattern": "a"}),
                         ("gemma4", {"oneOf": [{"type": "string"}, {"type": "null"}]}),
                         ("qwen3-coder", {"type": "string", "format": "date"})]:  # fmt: skip
        tool = Tool("f", {"type": "object", "properties": {"a": schema}})
        with pytest.raises(InputError, match=r"^tools: the form in which this model writes calls"):
            lark(FORMS[form], [tool], True, True)
    for form in MEMBERS:
        with pytest.raises(InputError, match="follows no anyOf: leave it out"):
            lark(FORMS[form], [Tool("f", {"anyOf": [A_NUMBER]})], True, True)
        with pytest.raises(InputError, match=r"^messages: tool_calls: expected the JSON text"):
            FORMS[form].written("", [call("f", "[]")])
    for form, arguments in [("gemma4", '{"a": "<|\\"|>"}'), ("lfm2", '{"a b": 1}'),
                            ("qwen3-coder", '{"a": "\\n</parameter>\\n<parameter="}')]:  # fmt: skip
        with pytest.raises(InputError, match=r"^messages: tool_calls: this model cannot write"):
            FORMS[form].written("", [call("f", arguments)])

"""A generation option is defined once, as a field from which all interfaces derive it."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pytest

from gpt2block import GPT2, InputError, Sampling
from gpt2block.apps.cli.chat import ChatOptions
from gpt2block.apps.cli.map import GenerateTask
from gpt2block.apps.cli.model import TextOptions, keyword, with_numbers
from gpt2block.checks import document, documented, meaning_of, option, options_of
from gpt2block.engine.generation.options import KEYWORDS, Options, with_keywords
from gpt2block.sampling import NUMBERS, SAMPLING_OPTIONS

OTHER = {"seed": 5, "min_new_tokens": 3, "top_k": 2}  # values other than the defaults


def other(name: str) -> Any:
    return OTHER.get(name, 0.25)


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_is_a_keyword_an_option_and_a_field_of_requests(name: str) -> None:
    pytest.importorskip("pydantic", reason="the server needs the extra serve")
    from gpt2block.apps.serve.protocol import KEYWORD_OF, CompletionRequest  # noqa: PLC0415

    expected = Sampling(**{name: other(name)})
    assert getattr(Options.of({name: other(name)}).sampling, name) == getattr(expected, name)
    assert name in inspect.signature(GPT2.generate).parameters
    assert f"\n{name}: " in str(inspect.getdoc(GPT2.generate))
    for kind in (TextOptions, GenerateTask):
        (field,) = (each for each in fields(kind) if each.name == name)
        default = 0 if name == "seed" else KEYWORDS[name].default
        assert field.default == default
        assert f"{name}=" in repr(kind())
    field_of = {keyword: field for field, keyword in KEYWORD_OF.items()}
    request = CompletionRequest.model_validate({field_of.get(name, name): other(name)})
    assert getattr(request.options().sampling, name) == getattr(expected, name)


def test_meanings_are_sentences_and_are_told_once() -> None:
    meanings = {**options_of(Sampling), **options_of(Options)}
    for name, each in meanings.items():
        for text in filter(None, (meaning_of(each).text, meaning_of(each).more)):
            assert re.fullmatch(r"[A-Z0-9].*\.", text), name
    parameters = {*inspect.signature(GPT2.generate).parameters} - {"self", "prompts"}
    assert {*SAMPLING_OPTIONS} < {*KEYWORDS} == parameters


def test_an_answer_has_the_models_settings_by_default() -> None:
    given = {each.name: each.default for each in fields(ChatOptions)}
    assert given["top_k"] is given["temperature"] is None
    assert given["presence_penalty"] == 0.0
    assert list(given)[:3] == ["max_new_tokens", "temperature", "top_k"]


def test_docstrings_without_a_place_or_without_any_stay() -> None:
    @documented
    @dataclass
    class A:
        """Of A.

        {options}
        """

        a: int = option(1, "The first number.", more="It has no end.")

    assert inspect.getdoc(A) == "Of A.\n\na: the first number. It has no end."

    def f() -> None:
        """Do it."""

    def g() -> None: ...

    for function, text in ((f, "Do it."), (g, None)):
        document(function, options_of(A))
        assert function.__doc__ == text

    @with_keywords("samples")
    def h(a: int, **options: Any) -> None:
        """{options}"""

    assert [*inspect.signature(h).parameters][:2] == ["a", "max_new_tokens"]
    assert "samples" not in inspect.signature(h).parameters
    assert "top_k: keep the k" in str(h.__doc__)
    assert "samples: " not in str(h.__doc__)


def test_numbers_of_commands() -> None:
    @with_numbers("top_k", optional="{}; by default none")
    @dataclass(frozen=True)
    class Of:
        top_p: float = keyword("top_p", default=0.5)

    kind: Any = Of
    assert (kind(top_k=3).top_p, kind(top_k=3).top_k, kind().top_k) == (0.5, 3, None)
    (info,) = (each.metadata["info"] for each in fields(Of) if each.name == "top_k")
    assert info.help == "Keep the k most likely tokens; 0: off; by default none."


def test_the_options_of_keywords() -> None:
    found = Options.of({"stop": "a", "seed": np.uint8(3), "stop_ids": iter([1]), "samples": 2})
    assert (found.stop, found.seed, found.sampling.seed) == (("a",), 3, 3)
    assert (found.stop_ids, found.samples, found.max_new_tokens) == ([1], 2, 200)
    assert Options.of({}).seed is None
    assert Options.of({"sampling": Sampling(seed=9)}).seed == 9
    for keywords, message in (
        ({"sampling": Sampling(), "top_k": 1}, "sampling: already has top_k: pass only one"),
        ({"sampling": 3}, "sampling: expected a Sampling, got 3"),
        ({"samples": 0}, "samples: expected a positive integer, got 0"),
    ):
        with pytest.raises(InputError, match=message):
            Options.of(keywords)
    with pytest.raises(TypeError, match=r"F: unknown keyword 'topk': did you mean 'top_k'\?"):
        Options.of({"topk": 3}, "F")

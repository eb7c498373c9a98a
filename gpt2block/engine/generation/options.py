"""Options of text generation: the keywords of `GPT2.generate`, and a class that checks them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, field
from typing import Any, Literal, TypeVar, get_args

from gpt2block.checks import (
    check_choice,
    check_count,
    check_encodable,
    check_flag,
    document,
    option,
    options_of,
    set_fields,
    several,
    unknown_option,
)
from gpt2block.engine.grammars.grammar import RULES, Grammar, Schema
from gpt2block.errors import Argument, InputError, shown
from gpt2block.sampling import SAMPLING_OPTIONS, Sampling, SamplingKeywords, check_alternatives

Overflow = Literal["error", "truncate"]
Function = TypeVar("Function", bound=Callable[..., Any])


class StreamOptions(SamplingKeywords, total=False):
    """The keywords of `Model.stream`, for type checkers."""

    max_new_tokens: int
    sampling: Sampling | None
    stop: str | Iterable[str]
    stop_ids: Iterable[int] | None
    top_logprobs: int
    overflow: Overflow
    speculate: bool
    receipt: bool
    adapter: str | None
    schema: Schema | None
    regex: str | None
    choice: Iterable[str] | None
    grammar: str | None


class GenerateOptions(StreamOptions, total=False):
    """The keywords of `Model.generate` except `samples`, for type checkers."""

    rows_at_once: int | None


@dataclass(frozen=True, kw_only=True)
class Options:
    """The keywords of `GPT2.generate`, with values that have been checked.

    `of` creates Options from keywords. Raises InputError for wrong values.
    """

    max_new_tokens: int = option(200, "Largest number of new tokens.")
    sampling: Sampling = option(
        None, "A Sampling, instead of the keywords from temperature to min_new_tokens."
    )
    seed: int | None = option(
        None,
        "The same seed, prompt and options give the same text.",
        more="An integer of up to 64 bits. None draws a new one for each continuation, which its "
        "Generation.seed reports.",
    )
    stop: tuple[str, ...] = option(
        (), "A string, or several: the text ends before the first occurrence."
    )
    stop_ids: Iterable[int] | None = option(
        None, "Tokens that end the text; None: the model's end tokens, such as <|endoftext|>."
    )
    top_logprobs: int = option(
        0,
        "Also report this many of the most likely tokens at each position, up to 20.",
        more="Generation.top_logprobs has them.",
    )
    samples: int = option(
        1, "Number of continuations.", more="Prompts times samples is at most 2^20."
    )
    overflow: Overflow = option(
        "error",
        "When the context is full: error ends the text and rejects longer prompts; truncate drops "
        "the oldest tokens.",
    )
    rows_at_once: int | None = option(
        None,
        "Continuations computed at the same time; results do not depend on it.",
        more="The next continuation starts when one has ended. None: up to 512 on a GPU, limited "
        "by half of its free memory.",
    )
    speculate: bool = option(
        False,
        "On a GPU, draft the next tokens from the text so far, and compute them together.",
        more="The tokens and their log-probabilities stay the same to the last bit. A text that "
        "repeats parts of its prompt takes fewer steps; for other texts, drafting soon stops. "
        "Models with a block that drafts tokens, such as Qwen3.5, use this block instead.",
    )
    receipt: bool = option(
        False,
        "State in Generation.receipt how the text was generated, so that `verify` can check it.",
        more="With NumPy, texts are then computed one by one. See docs/proof.md.",
    )
    adapter: str | None = option(
        None, "The name of the model's adapter (LoRA) that generates the text."
    )
    schema: Schema | None = option(
        None,
        "A JSON schema: the text is JSON that the schema accepts.",
        more="A mapping, or JSON text; True: any JSON. Only one of schema, regex, choice and "
        "grammar can be set. The text ends when it is complete; docs/structured.md has the "
        "details.",
    )
    regex: str | None = option(None, "A regular expression that the whole text matches.")
    choice: Iterable[str] | None = option(None, "Texts, one of which is the result.")
    grammar: str | None = option(None, "A grammar of the text, in llguidance's Lark or in GBNF.")
    rule: Grammar | None = field(init=False, default=None)  # from schema to grammar

    def __post_init__(self) -> None:
        checked: dict[str, object] = {
            "max_new_tokens": check_count("max_new_tokens", self.max_new_tokens),
            "top_logprobs": check_alternatives("top_logprobs", self.top_logprobs),
            "samples": check_count("samples", self.samples),
            "speculate": check_flag("speculate", self.speculate),
            "receipt": check_flag("receipt", self.receipt),
        }
        if self.rows_at_once is not None:
            checked["rows_at_once"] = check_count("rows_at_once", self.rows_at_once)
        check_choice("overflow", self.overflow, get_args(Overflow))
        if self.receipt and self.overflow == "truncate":
            raise InputError(
                Argument("overflow"), ": expected error, as the text is to be computed again"
            )
        checked["stop"] = _strings(self.stop)
        if self.stop_ids is not None:
            checked["stop_ids"] = several(self.stop_ids)
        if self.choice is not None and not isinstance(self.choice, str):
            checked["choice"] = tuple(several(self.choice))
        set_fields(self, **checked)
        rules = {name: getattr(self, name) for name in RULES}
        if any(rule is not None for rule in rules.values()):
            rule = Grammar.of(**rules)
            assert rule is not None
            self.follow(rule)
        if self.sampling.min_new_tokens > self.max_new_tokens:
            raise InputError(
                Argument("min_new_tokens"),
                f": expected at most the {self.max_new_tokens} of ",
                Argument("max_new_tokens"),
                f", got {self.sampling.min_new_tokens}",
            )

    def follow(self, rule: Grammar) -> None:
        """Set `rule`. Raises InputError for options that contradict a rule."""
        set_fields(self, rule=rule)
        because = f" with {rule.name}, which decides where the text ends"
        if self.stop_ids is not None:
            raise InputError(Argument("stop_ids"), f": expected none{because}")
        if self.sampling.min_new_tokens:
            raise InputError(Argument("min_new_tokens"), f": expected 0{because}")

    @classmethod
    def of(cls, keywords: Mapping[str, Any], caller: str = "GPT2.generate") -> Options:
        """Return Options with the values of `keywords`. caller: name of the function for errors."""
        if unknown := [name for name in keywords if name not in KEYWORDS]:
            raise unknown_option(caller, unknown[0], KEYWORDS)
        fields = {name: keywords[name] for name in SAMPLING_OPTIONS if name in keywords}
        others = {name: value for name, value in keywords.items() if name not in fields}
        sampling = others.pop("sampling", None)
        if sampling is None:
            seed = fields.pop("seed", None)
            sampling = Sampling(**fields, seed=0 if seed is None else seed)
            return cls(**others, seed=seed, sampling=sampling)
        if fields:
            raise InputError(f"sampling: already has {next(iter(fields))}: pass only one of them")
        if not isinstance(sampling, Sampling):
            raise InputError(f"sampling: expected a Sampling, got {shown(sampling)}")
        return cls(**others, seed=sampling.seed, sampling=sampling)


def _strings(stop: object) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(several(stop))
    if not all(isinstance(string, str) and string for string in strings):
        raise InputError(f"stop: expected strings of at least one character, got {shown(stop)}")
    for string in strings:
        check_encodable("stop", string)
    return strings


def _keywords() -> dict[str, Field[Any]]:
    """Return the parameters of `generate` in the order of its documentation."""
    sampling, keywords = options_of(Sampling), dict[str, Field[Any]]()
    for name, each in options_of(Options).items():
        if name == "sampling":
            keywords |= {name: sampling[name] for name in SAMPLING_OPTIONS}
        keywords[name] = each  # replaces the seed of Sampling
    return keywords


KEYWORDS = _keywords()


def with_keywords(*without: str) -> Callable[[Function], Function]:
    """Decorator that adds the keywords of `generate` to a function's signature and docstring.

    The function takes them as `**options`. without: keywords that it does not take.
    """
    types = {**GenerateOptions.__annotations__, "samples": "int"}

    def decorated(function: Any) -> Any:
        options = {name: each for name, each in KEYWORDS.items() if name not in without}
        signature = inspect.signature(function)
        own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        added = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=each.default,
                annotation=getattr(types[name], "__forward_arg__", types[name]),
            )
            for name, each in options.items()
        ]
        function.__signature__ = signature.replace(parameters=[*own, *added])
        document(function, options)
        return function

    return decorated

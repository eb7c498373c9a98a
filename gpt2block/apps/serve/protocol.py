"""Validate requests in OpenAI's protocol, and build errors in the format that clients expect.

Source: OpenAI, "API reference" (Completions, Chat Completions, Embeddings, Errors).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    create_model,
)

from gpt2block.checks import meaning_of, unique_keys
from gpt2block.engine.generation.options import KEYWORDS, Options
from gpt2block.engine.grammars import Grammar
from gpt2block.errors import InputError, printable, shown
from gpt2block.sampling import MAX_ALTERNATIVES, NUMBERS, LogitBias

MAX_PROMPTS = 256  # most prompts of a request
MAX_SAMPLES = 128
MAX_STOPS = 16
MAX_STOP = 256  # most characters of a stop text
MAX_VALUES = 2**14  # most biases, stop ids, values in messages, commas of a body for C's decoder
MAX_MESSAGES = 2**12
MAX_TEXT = 2**20  # most bytes of the texts of all messages
MAX_TOOLS = 128
MAX_NEW = 2**31 - 1  # most new tokens per answer
MAX_RULE = 2**16  # most characters of a schema, regular expression, list of choices or grammar
PART = 2**13  # list entries that are checked or written without releasing the GIL
LONGEST_KEY = 100  # most characters of a key shown in an error
TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")  # pattern of a token id written as a string
KEYWORD_OF = {"min_tokens": "min_new_tokens"}  # fields that `generate` names differently
MESSAGES = "/v1/messages"  # path of the endpoint in Anthropic's protocol
# Status → type of an error in Anthropic's protocol; "invalid_request_error" for any other status.
# Source: Anthropic, "Claude API errors".
MESSAGE_ERRORS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large",
                  500: "api_error", 503: "overloaded_error", 504: "timeout_error"}  # fmt: skip
ANYTHING = object()  # in place of a list of values: any value is accepted and ignored

JsonObject = dict[str, Any]  # an object of JSON in a request or an answer
# Unsupported fields of requests, with their values that do not change the result and are accepted.
# Null is accepted for all of them. Sources: OpenAI, "API reference"; vLLM, "OpenAI-Compatible
# Server"; llama.cpp, "LLaMA.cpp HTTP Server". docs/serve.md has the same table.
_NEUTRAL: tuple[tuple[Any, str], ...] = (
    (ANYTHING,
     "user metadata store safety_identifier prompt_cache_key prompt_cache_retention service_tier "
     "request_id mirostat_tau mirostat_eta cache_prompt dynatemp_exponent xtc_threshold dry_base "
     "dry_allowed_length dry_penalty_last_n dry_sequence_breakers"),
    ((),
     "reasoning_effort prediction audio web_search_options chat_template guided_json guided_regex "
     "guided_choice guided_grammar allowed_token_ids prompt_logprobs kv_transfer_params"),
    ((True,), "add_generation_prompt add_special_tokens"),
    ((False,),
     "continue_final_message echo early_stopping use_beam_search include_stop_str_in_output "
     "return_tokens_as_token_ids timings_per_token return_progress post_sampling_probs"),
    ((True, False), "spaces_between_special_tokens skip_special_tokens include_reasoning"),
    ((-1,), "truncate_prompt_tokens top_n_sigma id_slot repeat_last_n"),
    ((0,),
     "priority mirostat dynatemp_range xtc_probability dry_multiplier n_keep n_probs min_keep "
     "n_indent"),
    ((1,), "length_penalty repeat_penalty typical_p tfs_z"),
    (("",), "suffix grammar"),
    (("none", "auto"), "function_call"),
    (("medium",), "verbosity"),
    (([],), "functions documents bad_words logits_processors lora"),
    ((["text"],), "modalities"),
    (({},), "chat_template_kwargs mm_processor_kwargs vllm_xargs json_schema"),
)  # fmt: skip
NEUTRAL = {name: accepted for accepted, names in _NEUTRAL for name in names.split()}

Request = TypeVar("Request", bound="Body")


def _token_ids(ids: Any) -> object:
    """Return token ids after checks in parts: pydantic would hold the GIL for the whole list."""
    for first in range(0, len(ids) if isinstance(ids, list) else 0, PART):
        part = ids[first : first + PART]
        if set(map(type, part)) != {int} or min(part) < 0:
            raise ValueError("expected token ids")
    return ids


def _values(value: Any, info: ValidationInfo) -> Any:
    """Return messages unchanged. Raises ApiError for too many values or too much text.

    The length of the rendered text is not known yet: a template may leave messages out.
    """
    if isinstance(value, list) and len(value) > MAX_MESSAGES:
        raise _too_many(info, MAX_MESSAGES, "messages", 413)
    count, size, waiting = 0, 0, [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, str):
            size += len(each.encode(errors="replace"))
            if size > MAX_TEXT:
                raise _too_many(info, MAX_TEXT, "bytes of text", 413)
        inner = [*each, *each.values()] if isinstance(each, dict) else each
        if isinstance(inner, list):
            count += len(each)
            if count > MAX_VALUES:
                raise _too_many(info, MAX_VALUES, "values: messages, parts and fields", 413)
            waiting += inner
    return value


def _too_many(info: ValidationInfo, most: int, what: str, status: int = 400) -> ApiError:
    """Return an error for too many values. The values are omitted: listing them takes long."""
    problem = f"{info.field_name}: expected at most {most:,} {what}"
    return ApiError(status, problem, info.field_name)


def _at_most(most: int, what: str) -> BeforeValidator:
    def check(given: object, info: ValidationInfo) -> Any:
        if isinstance(given, (list, dict)) and len(given) > most:
            raise _too_many(info, most, what)
        return given

    return BeforeValidator(check)


Tokens = Annotated[list[Any], BeforeValidator(_token_ids)]


def _texts(prompt: object, info: ValidationInfo) -> list[object]:
    """Check the length of an input, and return it as a list of texts or of lists of token ids."""
    of_ids = isinstance(prompt, list) and [*map(type, prompt[:1])] == [int]
    texts = [prompt] if isinstance(prompt, str) or of_ids else prompt
    if isinstance(texts, list):
        if not 1 <= len(texts) <= MAX_PROMPTS:
            raise ValueError(f"expected 1 to {MAX_PROMPTS} of them, not {len(texts)}")
        most = max(len(each) if isinstance(each, list) else 0 for each in texts)
        check_length(most, cast(int, info.context), info.field_name or "")
    if not isinstance(texts, list) or not all(map(_is_text, texts)):
        raise ValueError("expected a text, token ids, or a list of texts or of token ids")
    return texts


def _is_text(value: object) -> bool:
    """Return whether a value is a text or token ids; the model's tokenizer checks the ids later."""
    return isinstance(value, str) or (isinstance(value, list) and set(map(type, value)) <= {int})


Texts = Annotated[list[Any], BeforeValidator(_texts)]


class ApiError(Exception):
    """An error to send to a client. param: the field of the request that is wrong."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle all arguments, for another process."""
        return type(self), (self.status, self.message, self.param, self.code)

    def body(self, openai: bool = True) -> JsonObject:
        """Return the body of the response. openai: whether in OpenAI's format or Anthropic's."""
        if not openai:
            kind = MESSAGE_ERRORS.get(self.status, "invalid_request_error")
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        found = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": found}


def invalid(problem: str, code: str | None = None) -> ApiError:
    """Return the error for a wrong field. The problem begins with the field's name or path."""
    return ApiError(400, problem, problem.partition(":")[0].partition(".")[0], code)


def overloaded(problem: str) -> ApiError:
    """Return the error for a client that may send its request again later."""
    return ApiError(503, f"{problem}: try again later", code="overloaded")


def named(field: str, entries: list[Any]) -> list[tuple[Any, str]]:
    """Return pairs (entry, its name in errors); names of several entries have an index."""
    names = [field] if len(entries) == 1 else [f"{field}.{index}" for index in range(len(entries))]
    return [*zip(entries, names, strict=True)]


def check_length(count: int, n_ctx: int, field: str, least: str = "") -> None:
    """Raise ApiError if there are more tokens than the model's context has positions."""
    if count > n_ctx:
        problem = f"{field}: {least}{count} tokens, the model's context is {n_ctx}"
        raise invalid(problem, "context_length_exceeded")


def _or_all(least: int) -> BeforeValidator:
    """Check a limit of new tokens; -1 becomes `info.context` (as many as fit in the context)."""

    def check(value: object, info: ValidationInfo) -> Any:
        if type(value) is int and not least <= value <= MAX_NEW and value != -1:
            raise ValueError(f"expected {least} to {MAX_NEW:,}, or -1 for all of the context")
        return info.context if type(value) is int and value == -1 else value

    return BeforeValidator(check)


NewTokens = Annotated[int | None, _or_all(1)]


class Fields(BaseModel):
    """Base class of objects in requests. A string is not accepted in place of a number."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Body(Fields):
    """Base class of request bodies.

    neutral: fields that are not fields of the class, with the values that are accepted.
    """

    neutral: ClassVar[Mapping[str, object]] = NEUTRAL
    model: str | None = None


def _as_n(value: int | None, info: ValidationInfo) -> int | None:
    n = info.data.get("n") or 1
    if value not in (None, n):
        problem = f"best_of: {value} is not supported: expected {n}, as n, or none"
        raise invalid(problem, "unsupported_parameter")
    return value


def _with_stream(value: object, info: ValidationInfo) -> object:
    if value is not None and not info.data.get("stream"):
        raise ValueError("expected stream: true with it")
    return value


class StreamFields(Fields):
    include_usage: bool = False
    include_obfuscation: bool = False


class SchemaFormat(Fields):
    """The object json_schema of a response_format. strict is not read: the schema always holds."""

    name: str | None = None
    description: str | None = None
    schema_: object = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Fields):
    """The field response_format. Source: OpenAI, "Structured model outputs"."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None

    def rule(self) -> tuple[str, JsonObject]:
        """Return the place of the rule in a request, and the rule as a keyword of `generate`."""
        if (self.json_schema is not None) != (self.type == "json_schema"):
            problem = "response_format: expected json_schema with the type json_schema, and only it"
            raise invalid(problem)
        if self.json_schema is not None:
            return "response_format.json_schema.schema", {"schema": self.json_schema.schema_}
        given = {"schema": {"type": "object"}} if self.type == "json_object" else {}
        return "response_format", given


class StructuredOutputs(Fields):
    """The field structured_outputs. Source: vLLM, "Structured Outputs"."""

    json_: object = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def rule(self) -> tuple[str, JsonObject]:
        """Return the place of the rule in a request, and the rule as a keyword of `generate`."""
        rules: dict[str, tuple[str, object]] = {
            "json": ("schema", self.json_),
            "regex": ("regex", self.regex),
            "choice": ("choice", self.choice),
            "grammar": ("grammar", self.grammar),
            "json_object": ("schema", {"type": "object"} if self.json_object else None),
        }
        stated = {name: pair for name, pair in rules.items() if pair[1] is not None}
        if len(stated) != 1:
            names = ", ".join(rules)
            raise invalid(f"structured_outputs: expected one of {names}, got {len(stated)}")
        ((name, (keyword, value)),) = stated.items()
        return f"structured_outputs.{name}", {keyword: value}


def _with_further_numbers(kind: type[Request]) -> type[Request]:
    """Class decorator: add fields for the numeric options of Sampling that have no field yet."""
    known = {KEYWORD_OF.get(name, name) for name in kind.model_fields}
    further: JsonObject = {}
    for name in NUMBERS:
        if name not in known:
            default, meaning = KEYWORDS[name].default, meaning_of(KEYWORDS[name])
            least, most = (meaning.range or (None, None))[:2]
            further[name] = (type(default) | None, Field(default, ge=least, le=most))
    made: type[Request] = create_model(
        kind.__name__, __base__=kind, __module__=kind.__module__, __doc__=kind.__doc__, **further
    )
    return made


class SamplingFields(Body):
    """Fields of sampling parameters. top_k and min_p are extensions of OpenAI's protocol."""

    temperature: float | None = Field(1.0, ge=0, le=2)
    top_p: float | None = Field(1.0, ge=0, le=1)
    top_k: int | None = Field(0, ge=-1)
    min_p: float | None = Field(0.0, ge=0, le=1)

    def sampling_keywords(self) -> JsonObject:
        """Return the numeric Sampling options without the seed; null becomes the default."""
        keywords: JsonObject = {}
        for name, field in type(self).model_fields.items():
            if (keyword := KEYWORD_OF.get(name, name)) in NUMBERS and keyword != "seed":
                value = getattr(self, name)
                keywords[keyword] = field.default if value is None else value
        return {**keywords, "top_k": max(0, keywords["top_k"])}


@_with_further_numbers
class SampledRequest(SamplingFields):
    """Fields that requests of text completions and of chat completions share.

    repetition_penalty, receipt, return_token_ids and the fields after it are additions. Source,
    except for repetition_penalty and receipt: vLLM, "OpenAI-Compatible Server".
    """

    max_tokens: NewTokens = None
    n: int | None = Field(1, ge=1, le=MAX_SAMPLES)
    best_of: Annotated[int | None, AfterValidator(_as_n)] = None  # must be n: all answers are sent
    stop: Annotated[str | list[str] | None, _at_most(MAX_STOPS, "texts")] = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)  # answers contain the seed modulo 2^64
    stream: bool | None = False
    stream_options: Annotated[StreamFields | None, AfterValidator(_with_stream)] = None
    repetition_penalty: float | None = Field(1.0, gt=0)
    presence_penalty: float | None = Field(0.0, ge=-2, le=2)
    frequency_penalty: float | None = Field(0.0, ge=-2, le=2)
    logit_bias: Annotated[
        dict[str, Annotated[float, Field(ge=-100, le=100)]] | None,
        _at_most(MAX_VALUES, "token ids"),
    ] = None
    receipt: bool | None = False
    return_token_ids: bool | None = False
    stop_token_ids: Annotated[Tokens | None, _at_most(MAX_VALUES, "token ids")] = None
    ignore_eos: bool | None = False
    min_tokens: int | None = Field(0, ge=0)
    skip_special_tokens: bool | None = False
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    def options(self, rule: Grammar | None = None, **more: object) -> Options:
        """Return this request's generation options. The rule of the answers is not compiled yet.

        rule: replaces the request's own rule. more: further keywords of `GPT2.generate`.
        """
        keywords: JsonObject = {
            **self.sampling_keywords(),
            "samples": self.n or 1,
            "stop": self._stops(),
            "logit_bias": self._biases(),
        }
        if self.seed is not None:
            keywords["seed"] = self.seed % 2**64
        options, rule = Options.of({**keywords, **more}), rule or self._grammar()
        if rule is not None:
            options.follow(rule)
        return options

    def _grammar(self) -> Grammar | None:
        """Return the rule that the answers follow, named by its place in the request."""
        place, rule = self.rule()
        try:
            grammar = Grammar.unchecked(**rule)
        except InputError as error:
            keyword = next(iter(rule))
            if not str(error).startswith(f"{keyword}: "):
                raise
            raise invalid(str(error).replace(keyword, place, 1)) from None
        return grammar and replace(grammar, name=place)

    def rule(self) -> tuple[str, JsonObject]:
        """Return the place of the rule that the answers follow, and the rule as a keyword."""
        formats = [each for each in (self.response_format, self.structured_outputs) if each]
        if len(formats) > 1:
            raise invalid("structured_outputs: expected none with response_format")
        place, rule = formats[0].rule() if formats else ("", {})
        if not rule:
            return place, rule
        field = place.partition(".")[0]
        size = len(json.dumps(next(iter(rule.values()))))
        if size > MAX_RULE:
            problem = f"{place}: expected at most {MAX_RULE:,} characters, got {size:,}"
            raise ApiError(413, problem, field)
        self.check_ends(field)
        return place, rule

    def check_ends(self, field: str) -> None:
        """Raise ApiError for fields that contradict the rule that `field` causes."""
        for name in ("stop_token_ids", "ignore_eos", "min_tokens"):
            if getattr(self, name):
                problem = f"{name}: expected none with {field}, which decides where the text ends"
                raise invalid(problem)

    def _stops(self) -> list[str]:
        stop = self.stop if isinstance(self.stop, list) else [self.stop] if self.stop else []
        if any(len(text) > MAX_STOP for text in stop):
            raise invalid(f"stop: expected at most {MAX_STOP} characters each")
        return stop

    def _biases(self) -> LogitBias:
        """Return logit biases by token id as integers; JSON has the ids as strings."""
        biases = self.logit_bias
        if not biases:
            return ()
        for name in biases:
            if not TOKEN_ID.fullmatch(name):  # one spelling per id, so that no id occurs twice
                raise invalid(f"logit_bias: expected token ids, got {shown(name)}")
        return {int(name): bias for name, bias in biases.items()}


class CompletionRequest(SampledRequest):
    """The body of a request to /v1/completions. logprobs: alternatives to report at each token."""

    prompt: Texts = [""]
    max_tokens: Annotated[int | None, _or_all(0)] = 16
    logprobs: int | None = Field(None, ge=0, le=MAX_ALTERNATIVES)
    echo: bool | None = False


Bounded = BeforeValidator(_values)
Messages = Annotated[list[Any], Bounded]  # the chat template checks messages
Variables = Annotated[JsonObject, Bounded]


class TemplateFields(Body):
    """Arguments of the chat template. Source: vLLM, "OpenAI-Compatible Server"."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = False
    chat_template_kwargs: Variables | None = None


def _of_object(schema: JsonObject | None) -> JsonObject | None:
    """Return the schema of a function's parameters. Raises ValueError unless it has type object."""
    if schema and schema.get("type") != "object":
        raise ValueError("expected the JSON schema of an object, with the type 'object'")
    return schema


class FunctionFields(Fields):
    """A function that the model may call. parameters: JSON schema of its arguments."""

    name: str = Field(pattern="^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    parameters: Annotated[JsonObject | None, AfterValidator(_of_object)] = None
    strict: bool | None = None


class ToolFields(Fields):
    type: Literal["function"]
    function: FunctionFields

    @property
    def name(self) -> str:
        return self.function.name


def _with_names(tools: list[ToolFields] | None) -> list[ToolFields] | None:
    names = [tool.name for tool in tools or ()]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"expected each name once, got {twice[0]!r} {len(twice)} times")
    return tools


class NamedFunction(Fields):
    name: str


class NamedChoice(Fields):
    """A tool choice that requires a call of one function."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedChoice | None


def _of_tools(choice: ToolChoice, info: ValidationInfo) -> ToolChoice:
    names = [tool.name for tool in info.data.get("tools") or ()]
    if choice == "required" and not names:
        raise ValueError("expected tools with it")
    if isinstance(choice, NamedChoice) and choice.function.name not in names:
        raise ValueError("expected the name of one of the tools")
    return choice


class ChatRequest(SampledRequest, TemplateFields):
    """The body of a request to /v1/chat/completions."""

    include_reasoning: bool | None = True
    messages: Messages = Field(min_length=1)
    tools: Annotated[
        list[ToolFields] | None,
        Bounded,
        _at_most(MAX_TOOLS, "tools"),
        AfterValidator(_with_names),
    ] = None
    tool_choice: Annotated[ToolChoice, AfterValidator(_of_tools)] = None
    parallel_tool_calls: bool | None = True
    max_completion_tokens: NewTokens = None
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_ALTERNATIVES)


class EmbeddingRequest(Body):
    """The body of a request to /v1/embeddings. instruction: an addition, as for `Model.embed`."""

    input: Texts
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: int | None = None
    instruction: str | None = None


class TokenizeRequest(TemplateFields):
    """The body of a request to /tokenize."""

    prompt: str | None = None
    messages: Messages | None = Field(None, min_length=1)


class DetokenizeRequest(Body):
    """The body of a request to /detokenize."""

    tokens: Tokens


class _PatientDecoder(json.JSONDecoder):
    """A JSON decoder in Python (strings: in C), which lets other threads run while it decodes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.scan_once = json.scanner.py_make_scanner(self)  # type: ignore[attr-defined]


def parsed(kind: type[Request], data: bytes, names: Collection[str], n_ctx: int) -> Request:
    """Return the parsed request. names: accepted model names. n_ctx: the model's context length.

    Raises ApiError, which names the first field that is wrong.
    """
    try:
        reader = _PatientDecoder if data.count(b",") > MAX_VALUES else None
        body = json.loads(data.decode("utf-8-sig"), cls=reader, object_pairs_hook=unique_keys)
    except InputError as error:
        raise ApiError(400, f"the body: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body: expected JSON in UTF-8: {shown(str(error))}") from None
    if not isinstance(body, dict):
        raise ApiError(400, f"the body: expected a JSON object, got {shown(body)}")
    return validated(kind, body, names, n_ctx)


def validated(kind: type[Request], body: JsonObject, names: Collection[str], n_ctx: int) -> Request:
    """Return the request with the fields `body`. Other arguments and errors: as for `parsed`."""
    if body.get("function_call") == "none":
        body.pop("functions", None)
    for name in [name for name in kind.neutral if name in body and name not in kind.model_fields]:
        _check_neutral(name, body.pop(name), kind.neutral[name])
    try:
        request = kind.model_validate(body, context=n_ctx)
    except ValidationError as error:
        raise _of_field(error, body) from None
    if request.model is not None and request.model not in names:
        problem = f"model: there is no {shown(request.model)}: expected {' or '.join(names)}"
        raise ApiError(404, problem, "model", "model_not_found")
    return request


def _check_neutral(name: str, value: object, accepted: Any) -> None:
    if accepted is ANYTHING or value is None or any(value == each for each in accepted):
        return
    only = f": expected {' or '.join(map(json.dumps, accepted))}, or none" if accepted else ""
    only += ', or function_call "none" with it' if name == "functions" else ""
    raise invalid(f"{name}: {shown(value)} is not supported{only}", "unsupported_parameter")


def _of_field(error: ValidationError, given: object) -> ApiError:
    """Return an error for the first problem of a body; it names the path of the wrong value.

    For a value that may have several types, pydantic reports a problem with each type. The problem
    with the innermost value belongs to the type that fits best.
    """
    every = [(_place(each, given), each) for each in error.errors(include_context=False)]
    about = [each for each in every if each[0][: len(every[0][0])] == every[0][0]]
    keys, first = max(about, key=lambda each: len(each[0]))
    place = ".".join(printable(str(key), LONGEST_KEY) for key in keys) or "the body"
    field = printable(str(keys[0]), LONGEST_KEY) if keys else "the body"
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{place}: there is no such field", field, "unknown_parameter")
    if first["type"] == "missing":
        return ApiError(400, f"{place}: expected, but missing", field)
    said = first["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
    said = said.partition(" or instance of ")[0]
    said = re.sub("Input tag .* using '(.*)' .* tags:", r"expected a \1 of", said)
    said = said.replace("Unable to extract tag using discriminator", "expected a field")
    said = re.sub("(List|Dictionary) should have (.*) after val.*", r"expected \2", said)
    return ApiError(400, f"{place}: {said}, got {shown(first['input'])}", field)


def _place(problem: Any, body: Any) -> list[object]:
    """Return the keys that lead to a value in a body, without pydantic's names of types.

    A key of a value without members, before another key of the same object, names a type.
    """
    path = []
    for key, following in zip(problem["loc"], (*problem["loc"][1:], None), strict=True):
        inside = isinstance(body, dict) and key in body
        if inside and following in body and not isinstance(body[key], (dict, list)):
            continue
        if inside or (isinstance(body, list) and isinstance(key, int)):
            body = body[key]
            path.append(key)
    return [*path, problem["loc"][-1]] if problem["type"] == "missing" else path


def refused(error: Exception, fields: Collection[str]) -> ApiError:
    """Convert the library's error to an ApiError. param: the wrong argument if `fields` has it."""
    argument = re.split("[:. ]", str(error), maxsplit=1)[0]
    return ApiError(400, str(error), argument if argument in fields else None)

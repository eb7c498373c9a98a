"""The HTTP endpoints of `gpt2block serve`, and limits of its requests."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from time import perf_counter
from typing import Any, TypeVar

import anyio
import numpy as np
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from gpt2block.apps.serve.access import Access, error_response
from gpt2block.apps.serve.answers import (
    Answer,
    AnswerChoice,
    ChatForm,
    Form,
    Sent,
    TextForm,
    late,
    streamed,
    usage,
    whole,
)
from gpt2block.apps.serve.embeddings import TOKENS_AT_ONCE, embedding_list, inputs_of
from gpt2block.apps.serve.http_end import HttpEnd
from gpt2block.apps.serve.log import log, traceback_of
from gpt2block.apps.serve.message_events import MessageSent
from gpt2block.apps.serve.messages import MESSAGE_FIELDS, CountRequest, MessagesRequest, model_list
from gpt2block.apps.serve.play import Play
from gpt2block.apps.serve.protocol import (
    MESSAGES,
    PART,
    ApiError,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    JsonObject,
    SampledRequest,
    TemplateFields,
    TokenizeRequest,
    check_length,
    invalid,
    named,
    parsed,
    refused,
    validated,
)
from gpt2block.apps.serve.rerank import RerankRequest, answer_ids, check_size, prompt_ids, ranking
from gpt2block.apps.serve.response_events import ResponseSent
from gpt2block.apps.serve.responses import ResponsesRequest, chat_body, named_as_given
from gpt2block.apps.serve.settings import ServedModel, ServerSettings
from gpt2block.apps.serve.tools import ToolChatForm, ToolUse
from gpt2block.apps.serve.workers import Workers
from gpt2block.cuda import doctor
from gpt2block.engine.chat.template import ChatTemplate, RenderingTimeoutError
from gpt2block.engine.chat.thinking import Thinking
from gpt2block.engine.chat.tool_forms import FORMS
from gpt2block.engine.chat.tool_forms.base import reads_tools
from gpt2block.engine.generation.generate import Run
from gpt2block.engine.generation.sequences import Sequences, TokenSequence
from gpt2block.engine.model import Ids, in_groups
from gpt2block.errors import CheckpointError, InputError
from gpt2block.files.tokenizers import tokenizer
from gpt2block.files.tokenizers.encoding import Encoding, bytes_of_ids, special_id

MAX_BODY = 4 * 2**20  # most bytes of a request's body
MAX_DROPPED = 64 * 2**20  # most bytes read of a too large body: clients read errors after it
SMALL_BODY = 4096  # most bytes of a body that is parsed in the event loop, not in a thread
BODY_SECONDS = 30.0  # time limit for receiving a body
Value = TypeVar("Value")
AT_ONCE = 4  # threads that encode texts, render templates and write large answers
TEMPLATE_SECONDS = 2.0  # time limit for rendering one chat template
PING, PING_SECONDS = b": ping\n\n", 15.0  # keeps an idle stream open; seconds between two
MANY_TOKENS = 1024  # most values in JSON that is written in the event loop, not in a thread


@dataclass(frozen=True)
class PreparedRequest:
    """A validated request that is ready to run."""

    body: SampledRequest
    sequences: Sequences
    prompts: Sequence[Ids]
    echoes: Sequence[AnswerChoice]  # for each sequence, the prompt as start of the answer
    form: Form
    logprobs: bool
    sent: Sent = field(default_factory=Sent)

    @property
    def new_tokens(self) -> int:
        """Number of tokens of all answers, so far."""
        return sum(len(sequence.tokens) for sequence in self.sequences)

    @property
    def prompt_ids(self) -> dict[int, list[int]] | None:
        """Token ids of prompts by index of the choice, if the request wants them; else None."""
        if not self.body.return_token_ids:
            return None
        samples = len(self.echoes) // len(self.prompts)
        return {i: self.prompts[i // samples].tolist() for i in range(len(self.echoes))}


class Server:
    """The endpoints that serve a model. encoding: a tokenizer that fits the model's token ids."""

    def __init__(self, model: ServedModel, encoding: Encoding, settings: ServerSettings) -> None:
        self.model, self.encoding, self.settings = model, encoding, settings
        self.names = *settings.names, *model.adapters.names
        self.keys = settings.keys  # API keys; may be replaced, but not by an empty set
        self.engine, self.threads = HttpEnd(), Workers(AT_ONCE)
        self.engine.keys = self.set_keys
        self._token_count_bound = tokenizer.token_count_bound(encoding)
        self._templates: list[ChatTemplate] = []  # copies of the template that no thread uses now
        self._begun = int(time.time())

    def set_keys(self, keys: Mapping[str, str]) -> None:
        """Replace the API keys."""
        self.keys = keys

    def app(self) -> Starlette:
        form = TextForm(self.settings.name, self.encoding)
        play = Play(self.model, form, self.engine, self.ids_of, self.in_thread)
        routes = [  # the first route that matches the path is used
            self._route("/v1/completions", self.completions, CompletionRequest),
            self._route("/v1/chat/completions", self.chat, ChatRequest),
            self._route("/v1/responses", self.responses, ResponsesRequest),
            self._route(MESSAGES, self.messages, MessagesRequest),
            self._route(f"{MESSAGES}/count_tokens", self.messages, CountRequest),
            *play.routes(self._route),
            Route("/health", self.health),
            Route("/health/live", self.live),
            self._route("/metrics", self.show_metrics),
            self._route("/version", self.version),
            self._route("/v1/models", self.models),
            self._route("/v1/models/{name:path}", self.models),
            self._route("/v1/embeddings", self.embeddings, EmbeddingRequest),
            self._route("/v1/rerank", self.rerank, RerankRequest),
            self._route("/rerank", self.rerank, RerankRequest),
            self._route("/tokenize", self.tokenize, TokenizeRequest),
            self._route("/detokenize", self.detokenize, DetokenizeRequest),
        ]
        allowed = self.settings.allowed_hosts
        hosts = (*self.settings.hosts, *allowed) if allowed or not self.keys else ()
        middleware = [Middleware(Access, [*dict.fromkeys(map(str.lower, hosts))])]
        if self.settings.origins:  # runs after Access has refused unknown hosts
            middleware += [Middleware(
                CORSMiddleware, allow_origins=self.settings.origins, allow_headers=("*",),
                allow_methods=("GET", "POST"), expose_headers=("Retry-After", "X-Request-Id"),
            )]  # fmt: skip
        handlers: dict[object, Any] = {HTTPException: _http_error}
        made = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)
        made.router.redirect_slashes = False
        return made

    # --- requests ---------------------------------------------------------------------------------

    def _route(
        self, path: str, handler: Callable[..., Awaitable[Response]], kind: type[Any] | None = None
    ) -> Route:
        """Return a route that requires an API key. kind: class of a POST's body; None: a GET.

        ApiErrors of the handler become responses. The handler is cancelled at the time limit of a
        request, and when the client disconnects.
        """

        async def handled(request: Request) -> Response:
            begun, openai = perf_counter(), request.state.openai
            try:
                with anyio.fail_after(self.settings.seconds):
                    request.state.client = self._client_of(request)
                    if kind is None:
                        response = await handler(request)
                    else:
                        body = await self._parsed(request, kind)
                        response = await _while_there(request.receive, handler(request, body))
            except TimeoutError:
                response = error_response(late(), openai)
            except _TooLargeError as error:
                response = _EarlyResponse(error.body(openai), error.status, {"connection": "close"})
            except ApiError as error:
                response = error_response(error, openai)
            except (InputError, CheckpointError) as error:
                response = error_response(refused(error, kind.model_fields if kind else ()), openai)
            except Exception as error:
                response = error_response(self._fault(request, path, error), openai)
            self.engine.note("answered", path, response.status_code, perf_counter() - begun)
            return response

        return Route(path, handled, methods=["GET" if kind is None else "POST"])

    def _fault(self, request: Request, path: str, error: Exception) -> ApiError:
        """Log an unexpected exception of a request, and return the error for its client."""
        log.error("%s, %s: %s", path, request.state.id, traceback_of(error))
        self.engine.note("fault", path)
        return ApiError(500, "the server has made an error")

    def _client_of(self, request: Request) -> str:
        """Return the name of the request's API key, or the client's address if none is required."""
        if not self.keys:
            return request.client.host if request.client else ""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            token = request.headers.get("x-api-key", "")
        data, keys = token.strip().encode(), self.keys.items()
        # Compare all keys, so that the time does not tell which key matches.
        names = [name for name, key in keys if hmac.compare_digest(data, key.encode())]
        if not names:
            problem = "the key: expected one of the server's, as in Authorization: Bearer KEY"
            raise ApiError(401, f"{problem} or x-api-key: KEY", code="invalid_api_key")
        return names[0]

    async def _parsed(self, request: Request, kind: type[Value]) -> Value:
        """Read, parse and validate the body of a request."""
        media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media != "application/json":
            raise ApiError(415, f"Content-Type: expected application/json, got {media!r}")
        body = await _body(request)
        texts = not issubclass(kind, (EmbeddingRequest, RerankRequest))  # without an adapter
        names = self.names if texts else self.settings.names
        return await self._prepared(request, parsed, kind, body, names, self.model.config.n_ctx)

    async def _prepared(self, request: Request, call: Callable[..., Value], *args: object) -> Value:
        """Return call(*args): computed directly if the body is small, else in a thread."""
        if int(request.headers.get("content-length", SMALL_BODY + 1)) <= SMALL_BODY:
            return call(*args)
        return await self.in_thread(request, call, *args)

    async def in_thread(
        self, request: Request, call: Callable[..., Value], *arguments: object
    ) -> Value:
        """Return call(*arguments), computed in a thread; clients whose calls wait take turns."""
        return await self.threads.run(request.state.client, call, *arguments)

    # --- endpoints of completions -----------------------------------------------------------------

    async def completions(self, request: Request, body: CompletionRequest) -> Response:
        asked = await self._prepared(request, self._completion, body)
        if body.echo and body.logprobs is not None:
            for echo, ids in zip(asked.echoes[:: body.n or 1], asked.prompts, strict=True):
                client = request.state.client
                echo.scored = await self.engine.call("score", client, ids, body.logprobs)
        return await self._answer(request, asked)

    async def chat(self, request: Request, body: ChatRequest) -> Response:
        return await self._answer(request, await self.in_thread(request, self._chat, body))

    async def responses(self, request: Request, body: ResponsesRequest) -> Response:
        with named_as_given(ChatRequest.model_fields):
            asked = await self.in_thread(request, self._response, body)
            return await self._answer(request, asked)

    def _response(self, body: ResponsesRequest) -> PreparedRequest:
        """Return the chat request that answers a request to /v1/responses."""
        with self._template(lambda text: None) as template:
            thinks = bool(template.thinking) or "reasoning_content" in template.names.fields
        fields, n_ctx = chat_body(body, thinks), self.model.config.n_ctx
        asked = self._chat(validated(ChatRequest, fields, self.names, n_ctx))
        return replace(asked, sent=ResponseSent(body, self._name_of(asked.body)))

    def _adapter_of(self, body: SampledRequest) -> str | None:
        """Return the adapter that a request selects by its field `model`."""
        return body.model if body.model in self.model.adapters.names else None

    def _name_of(self, body: SampledRequest) -> str:
        """Return the name of the model in answers: an adapter's, or the model's first name."""
        return self._adapter_of(body) or self.settings.name

    async def messages(self, request: Request, body: CountRequest) -> Response:
        with named_as_given(ChatRequest.model_fields, MESSAGE_FIELDS):
            found = await self.in_thread(request, self._message, body)
            if isinstance(found, int):
                return JSONResponse({"input_tokens": found})
            return await self._answer(request, found)

    def _message(self, body: CountRequest) -> PreparedRequest | int:
        """Return the chat request that answers a message, or the count that a request asks for."""
        with self._template(lambda text: None) as template:
            fields = body.chat_body(template.names.variables)
        chat = validated(ChatRequest, fields, self.names, self.model.config.n_ctx)
        if not isinstance(body, MessagesRequest):
            return len(self._chat_prompt(chat, lambda text: None)[0])
        asked = self._chat(chat)
        return replace(asked, sent=MessageSent(self._name_of(chat), len(asked.prompts[0])))

    def _completion(self, body: CompletionRequest) -> PreparedRequest:
        n, top, new = body.n or 1, body.logprobs or 0, body.max_tokens
        if new == 0 and not body.echo:
            raise invalid("max_tokens: expected at least 1, or echo")
        if body.echo and body.logprobs is not None and self._adapter_of(body):
            raise invalid("echo: expected no logprobs with it and an adapter")
        if new == 0 and body.stream:
            raise invalid("stream: expected max_tokens of at least 1")
        prompts = [self.ids_of(*each) for each in named("prompt", body.prompt)]
        most, unwritten = 16 if new is None else new, self._unwritten(body)
        sequences = self._sequences(prompts, body, most, top) if most else []
        echoes = [AnswerChoice() for _ in prompts]
        if body.echo:
            for echo, ids, prompt in zip(echoes, prompts, body.prompt, strict=True):
                written = [id for id in ids.tolist() if id not in unwritten]
                data = bytes_of_ids(self.encoding, written)
                echo.text = prompt if isinstance(prompt, str) else data.decode(errors="replace")
        form = TextForm(self._name_of(body), self.encoding, unwritten)
        starts = [each for each in echoes for _ in range(n)]
        return PreparedRequest(body, sequences, prompts, starts, form, body.logprobs is not None)

    def _chat(self, body: ChatRequest) -> PreparedRequest:
        top, logprobs = body.top_logprobs or 0, bool(body.logprobs)
        if top and not logprobs:
            raise invalid("top_logprobs: expected logprobs with it")
        found, use, thinking = self._chat_prompt(body, partial(self._check_text, "messages"))
        self._check_length(len(found), "messages")
        ids = np.array(found, np.int32)
        most = body.max_completion_tokens or body.max_tokens or self.model.config.n_ctx
        marks = {*(use.form.marks if use else ()), *(thinking.marks if thinking else ())}
        sequences = self._sequences([ids], body, most, top, use, marks)
        named, reasons = (self._name_of(body), self.encoding), body.include_reasoning is not False
        form = ToolChatForm(*named, use, thinking, reasons) if marks else ChatForm(*named)
        starts = [AnswerChoice()] * len(sequences)
        return PreparedRequest(body, sequences, [ids], starts, form, logprobs)

    def _chat_prompt(
        self, body: ChatRequest, check: Callable[[str], None]
    ) -> tuple[list[int], ToolUse | None, Thinking | None]:
        """Return the prompt's token ids, the tools and the thinking. check: as for `_template`."""
        with self._template(check) as template:
            arguments, messages = self._template_arguments(template, body), body.messages
            use = ToolUse.of(body, template)
            if use is not None:
                messages, arguments = use.offered(template, messages, arguments)
            text, places = template.placed(messages, **arguments)
            thinking = template.thinking if use or not body.rule()[1] else None
        thinking = thinking and thinking.after(text)
        use = use and replace(use, thinking=thinking)
        return tokenizer.encode_chat(self.encoding, text, places), use, thinking

    def _template_arguments(self, template: ChatTemplate, body: TemplateFields) -> JsonObject:
        """Return the keyword arguments for `ChatTemplate.ids` that a chat request determines."""
        own = (body.add_generation_prompt, bool(body.continue_final_message))
        default = self.settings.chat_template_kwargs or {}
        variables = {**default, **(body.chat_template_kwargs or {})}
        return template.arguments(*own, variables)

    def ids_of(self, prompt: Any, field: str, whole: bool = False) -> Ids:
        """Return a prompt's token ids; for an empty prompt the end-of-text id.

        whole: whether a text has an end, as for `tokenizer.whole_text_ids`.
        """
        encoding, V = self.encoding, self.model.config.vocab_size
        if isinstance(prompt, str) and prompt:
            self._check_text(field, prompt)
        encode = tokenizer.whole_text_ids if whole else tokenizer.token_ids
        if isinstance(prompt, str):
            prompt = encode(encoding, prompt, V, field)
        self._check_length(len(prompt), field)
        ids = tokenizer.token_ids(encoding, prompt, V, field)
        if not len(ids):
            end = tokenizer.end_of_text(encoding, V)
            if end is None:
                raise invalid(f"{field}: expected at least one token")
            ids = np.array([end], np.int32)
        return ids

    @contextmanager
    def _template(self, check: Callable[[str], None]) -> Iterator[ChatTemplate]:
        """Yield a copy of the chat template for one thread alone. check: as in ChatTemplate."""
        try:
            template = self._templates.pop()
        except IndexError:
            template = copy(self.model.chat_template)
            template.seconds = TEMPLATE_SECONDS
            if self.settings.tool_form is not None:
                template.tool_form = FORMS[self.settings.tool_form]
            elif not reads_tools(template.names):
                template.tool_form = FORMS["general"]
        template.check = check
        try:
            yield template
        except RenderingTimeoutError:
            problem = f"the chat template takes more than {1000 * TEMPLATE_SECONDS:,.0f} ms"
            whole = f"messages: {problem}: expected fewer or shorter"
            raise ApiError(413, whole, "messages") from None
        finally:
            self._templates.append(template)

    def _check_text(self, field: str, text: str) -> None:
        """Raise ApiError if a text has more tokens than the context, without encoding the text."""
        self._check_length(self._token_count_bound(text), field, "at least ")

    def _check_length(self, count: int, field: str, least: str = "") -> None:
        check_length(count, self.model.config.n_ctx, field, least)

    def _unwritten(self, body: SampledRequest, marks: Set[str] = frozenset()) -> frozenset[int]:
        """Return ids of tokens that the texts leave out. marks: special tokens that stay."""
        names = self.encoding.special_tokens_set if body.skip_special_tokens else set[str]()
        return frozenset(special_id(self.encoding, name) for name in names - marks)

    def _sequences(
        self,
        prompts: list[Ids],
        body: SampledRequest,
        most: int,
        top: int,
        use: ToolUse | None = None,
        marks: Set[str] = frozenset(),
    ) -> list[TokenSequence]:
        """Return a request's sequences.

        top: alternatives to report per token. marks: as for `_unwritten`.
        """
        count, max_sequences = len(prompts) * (body.n or 1), self.model.slots + self.settings.queue
        if count > max_sequences:
            raise invalid(f"n: {count} continuations: this server takes {max_sequences} at most")
        if (body.min_tokens or 0) > most:
            raise invalid(f"min_tokens: expected at most max_tokens, {most}")
        if body.receipt and not self.model.receipts:
            problem = "receipt: this server was started without receipts"
            if not self.settings.no_receipts:
                problem = "receipt: expected a model on a GPU, or a server with --rows 1"
            raise invalid(problem)
        rule = None if use is None else use.grammar(self.encoding)
        ids = self._stop_ids(body)
        more: Any = {"max_new_tokens": most, "top_logprobs": top, "stop_ids": ids}
        options = body.options(rule=rule, adapter=self._adapter_of(body), **more)
        model: Any = self.model  # Run needs only its config, as it does not generate the sequences
        sequences = list(Run(model, self.encoding, prompts, options, compiles=False).sequences)
        unwritten = self._unwritten(body, marks)
        for sequence in sequences:  # tokens of a whole answer without stop strings arrive together
            sequence.held = not body.stream and not sequence.ends.stop
            sequence.unwritten, sequence.exact = unwritten, bool(body.receipt)
        return sequences

    def _stop_ids(self, body: SampledRequest) -> list[int] | None:
        """Return ids of tokens that end answers of this request; None: the model's end tokens."""
        if not body.stop_token_ids and not body.ignore_eos:
            return None
        config, V = self.model.config, self.model.config.vocab_size
        ends = () if body.ignore_eos else tokenizer.end_tokens(config, self.encoding)
        more = tokenizer.token_ids(None, body.stop_token_ids or (), V, "stop_token_ids")
        return [*ends, *more.tolist()]

    async def _answer(self, request: Request, asked: PreparedRequest) -> Response:
        request.state.asked = asked
        left = anyio.current_effective_deadline() - anyio.current_time()
        for rule in {sequence.rule for sequence in asked.sequences} - {None}:
            await self.engine.call("compile", request.state.client, rule)
        if asked.body.receipt:
            asked.sent.identity = await self.engine.call("identity", request.state.client)
        answer = Answer(self.engine, asked.sequences)
        await answer.submit(request.state.client, left)
        self.engine.note("started", sum(map(len, asked.prompts)), len(asked.sequences))
        if asked.body.stream:
            options = asked.body.stream_options
            wanted = partial(self._usage, asked) if options and options.include_usage else None
            events = streamed(
                answer, asked.form, asked.echoes, asked.logprobs, wanted, asked.prompt_ids,
                self.settings.speculate, self.engine.note_between,
                partial(self._fault, request, request.url.path), asked.sent,
            )  # fmt: skip
            return _Streamed(events, answer)
        choices = [AnswerChoice(echo.text) for echo in asked.echoes]
        for choice, echo in zip(choices, asked.echoes, strict=True):
            choice.scored.add(echo.scored)
            choice.reason = None if asked.sequences else "length"
        try:
            await whole(answer, choices)
        finally:
            answer.close()
        if asked.new_tokens + sum(len(choice.scored.tokens) for choice in choices) > MANY_TOKENS:
            return await self.in_thread(request, self._whole, asked, choices, _PatientResponse)
        return self._whole(asked, choices, JSONResponse)

    def _whole(
        self, asked: PreparedRequest, choices: Sequence[AnswerChoice], kind: type[JSONResponse]
    ) -> Response:
        """Return the response object for complete answers."""
        form, logprobs, sent = asked.form, asked.logprobs, asked.sent
        written = [sent.choice(form, n, choice, logprobs) for n, choice in enumerate(choices)]
        for each, sequence in zip(written, asked.sequences, strict=False):
            each.update(sent.facts(sequence))
        found = form.object(form.whole, written, usage=self._usage(asked, asked.new_tokens))
        if (prompts := asked.prompt_ids) is not None:
            for index, each in enumerate(written):
                each["token_ids"] = asked.sequences[index].tokens if asked.sequences else []
                if self.settings.speculate:
                    each["guessed"] = asked.sequences[index].drafted if asked.sequences else []
            form.with_prompts(found, prompts)
        return kind(sent.whole(found))

    def _usage(self, asked: PreparedRequest, new: int) -> JsonObject:
        """Return OpenAI's usage object for answers with `new` tokens in total."""
        details = asked.form.usage_details(asked.sequences)
        if self.model.reuses:  # tokens count as cached if all sequences of a prompt reuse them
            samples = len(asked.sequences) // len(asked.prompts)
            groups = zip(*[iter(each.reused for each in asked.sequences)] * samples, strict=True)
            details["prompt_tokens_details"] = {"cached_tokens": sum(map(min, groups))}
        return usage(sum(map(len, asked.prompts)), new, **details)

    async def _written(self, request: Request, found: object, values: int) -> Response:
        """Return a response with `found` as JSON; a thread encodes more than MANY_TOKENS values."""
        if values > MANY_TOKENS:
            return await self.in_thread(request, _PatientResponse, found)
        return JSONResponse(found)

    # --- other endpoints --------------------------------------------------------------------------

    async def embeddings(self, request: Request, body: EmbeddingRequest) -> Response:
        inputs = inputs_of(body, self.model.config.n_embd)
        ids = [await self._prepared(request, self.ids_of, *each, True) for each in inputs]
        client, size = request.state.client, body.dimensions
        groups = in_groups(ids, TOKENS_AT_ONCE)
        parts = [await self.engine.call("embed", client, each, size) for each in groups]
        vectors = np.concatenate(parts)
        form, count = body.encoding_format, sum(map(len, ids))
        found = embedding_list(vectors, form, self.settings.name, count)
        return await self._written(request, found, vectors.size)

    async def rerank(self, request: Request, body: RerankRequest) -> Response:
        check_size(body)
        answers, client = answer_ids(self.encoding), request.state.client
        documents = named("documents", body.documents)
        ids = [await self._prepared(request, self._judged_ids, body, *each) for each in documents]
        groups = in_groups(ids, TOKENS_AT_ONCE)
        parts = [await self.engine.call("judge", client, answers, each) for each in groups]
        found = ranking(body, [*chain(*parts)], self.settings.name, sum(map(len, ids)))
        return await self._written(request, found, len(ids))

    def _judged_ids(self, body: RerankRequest, document: str, field: str) -> Ids:
        """Return the prompt of a document for /v1/rerank. Raises ApiError if it is too long."""
        self._check_text("query", body.query)
        self._check_text(field, body.query + document)
        ids = prompt_ids(self.encoding, body, document)
        self._check_length(len(ids), field)
        return ids

    async def tokenize(self, request: Request, body: TokenizeRequest) -> Response:
        if (body.prompt is None) == (body.messages is None):
            raise invalid("prompt: expected prompt or messages")
        encoding, config = self.encoding, self.model.config

        def ids() -> list[int]:
            if body.messages is not None:
                with self._template(lambda text: None) as template:
                    arguments = self._template_arguments(template, body)
                    return list(template.ids(encoding, body.messages, **arguments))
            if not body.prompt:
                return tokenizer.prefix_of(encoding)
            return tokenizer.encode(encoding, body.prompt, name="prompt")

        run = self._prepared if body.messages is None else self.in_thread
        tokens = await run(request, ids)
        told = {"count": len(tokens), "max_model_len": config.n_ctx, "tokens": tokens}
        return await self._written(request, told, len(tokens))

    async def detokenize(self, request: Request, body: DetokenizeRequest) -> Response:
        encoding, V, found = self.encoding, self.model.config.vocab_size, bytearray()

        def text() -> Response:
            for first in range(0, len(body.tokens), PART):
                part = body.tokens[first : first + PART]
                tokenizer.check_ids(np.array(part), V, "tokens", first)
                found.extend(bytes_of_ids(encoding, part))
            return JSONResponse({"prompt": found.decode(errors="replace")})

        return await self.in_thread(request, text)

    async def models(self, request: Request) -> Response:
        names, n_ctx = self.names, self.model.config.n_ctx
        if (wanted := request.path_params.get("name")) not in (None, *names):
            raise ApiError(404, f"there is no {wanted!r}: expected {' or '.join(names)}", "model")
        facts = {"object": "model", "created": self._begun, "owned_by": "gpt2block"}
        facts |= {"max_model_len": n_ctx}
        found: JsonObject = {"object": "list", "data": [{"id": name, **facts} for name in names]}
        if not request.state.openai:
            found = model_list(names, self._begun, n_ctx)
        return JSONResponse(found if wanted is None else found["data"][names.index(wanted)])

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": doctor.version()})

    async def health(self, request: Request) -> Response:
        """Respond with the server's state: ready, starting (503) or failed (503)."""
        try:
            found = await self.engine.call("health")
        except ApiError as error:
            found = {"status": "failed", "problem": str(error)}
        return JSONResponse(found, 200 if found["status"] == "ready" else 503)

    async def live(self, request: Request) -> Response:
        """Respond with success: the process is alive."""
        return JSONResponse({"status": "live"})

    async def show_metrics(self, request: Request) -> Response:
        return Response(await self.engine.call("show_metrics"), media_type=CONTENT_TYPE_LATEST)


class _PatientResponse(JSONResponse):
    """A large JSON response, encoded in Python code, which lets other threads run meanwhile."""

    def render(self, content: object) -> bytes:
        texts = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).iterencode(content)
        return b"".join(iter(lambda: "".join(islice(texts, PART)).encode(), b""))


class _Streamed(StreamingResponse):
    """A streamed response of server-sent events. If the client disconnects, generation ends."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], answer: Answer) -> None:
        super().__init__(events, headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pings = asyncio.ensure_future(self._ping(send))
        try:
            with suppress(ApiError):  # the client is gone
                await _while_there(receive, self.stream_response(send))
        finally:
            pings.cancel()
            self._answer.close()

    async def _ping(self, send: Send) -> None:
        """Send comments, so that proxies do not close the connection of a slow stream."""
        while True:
            await asyncio.sleep(PING_SECONDS)
            await send({"type": "http.response.body", "body": PING, "more_body": True})


class _TooLargeError(ApiError):
    """The error of a request whose body exceeds the limit of size, and is not read to its end."""


class _EarlyResponse(JSONResponse):
    """A response that is sent at once, and ends after the rest of the request's body."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await super().__call__(scope, receive, lambda part: send({**part, "more_body": True}))
        dropped = 0
        with anyio.move_on_after(BODY_SECONDS):
            while dropped <= MAX_DROPPED and (part := await receive()).get("more_body"):
                dropped += len(part["body"])
        await send({"type": "http.response.body"})


async def _body(request: Request) -> bytes:
    """Read the body of a request. Raises ApiError if it exceeds the limits of size or time."""
    found, problem = bytearray(), f"the body: expected at most {MAX_BODY:,} bytes"
    if int(request.headers.get("content-length", 0)) > MAX_BODY:
        raise _TooLargeError(413, problem)
    try:
        with anyio.fail_after(BODY_SECONDS):
            async for part in request.stream():
                found += part
                if len(found) > MAX_BODY:
                    raise _TooLargeError(413, problem)
    except TimeoutError:
        raise ApiError(408, f"the body: expected within {BODY_SECONDS:g} s") from None
    except ClientDisconnect:
        raise ApiError(499, "the client is gone") from None
    return bytes(found)


async def _while_there(receive: Receive, work: Awaitable[Value]) -> Value:
    """Return the result of a request's work; cancel the work if the client disconnects."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        scope.cancel()

    with anyio.CancelScope() as scope:
        watching = asyncio.ensure_future(watch())
        try:
            return await work
        finally:
            watching.cancel()
    raise ApiError(499, "the client is gone")


async def _http_error(request: Request, error: HTTPException) -> Response:
    problems = {404: "there is no such address", 405: "another method is expected"}
    problem = f"{request.method} {request.url.path}: {problems.get(error.status_code, 'an error')}"
    refusal = ApiError(error.status_code, problem)
    return error_response(refusal, request.state.openai, **(error.headers or {}))
